//! ext2, ext3 and ext4: inodes, directories, and where the bytes of a file are. Only read.
//!
//! ```text
//!   superblock ─► group descriptors ─► inode tables ─► inode ─┬ extents, a tree         ─► blocks
//!   byte 1024     next block; with                            ├ indirect blocks         ─► blocks
//!                 meta_bg in each meta group                  └ inline data: in the inode itself
//! ```
//!
//! 1. Every block is read through the journal ([`journal`]): what a mounted file system has committed, and not yet
//!    written home, counts.
//! 2. A tree of extents is at most 5 deep, indirect blocks 3. What is in them more often than the volume has blocks is
//!    ended by the bound of [`Pieces`].
//! 3. A hashed directory is read as a linear one: its index blocks look like unused entries.
//!
//! Left out: directories that are inline, compressed files, fast commits, journals on other devices.

mod journal;
mod places;

use vellum_core::{Context, Error, Result};

use self::journal::Moved;
use crate::bytes::{le16, le32};
use crate::file::{FileFacts, FileKind};
use crate::pieces::Pieces;

const SUPER_AT: usize = 1024;
const MAGIC: u16 = 0xef53;
const ROOT: u64 = 2;

/// Incompatible features.
mod feature {
    pub(super) const RECOVER: u32 = 0x4;
    pub(super) const META_GROUPS: u32 = 0x10;
    pub(super) const BITS_64: u32 = 0x80;
    /// What can be read: filetype, needs_recovery, meta_bg, extent, 64bit, mmp, flex_bg, ea_inode, metadata_csum_seed,
    /// large_dir, inline_data, encrypt, casefold.
    pub(super) const KNOWN: u32 = 0x3_e7d6;
}

/// Flags of an inode.
mod flag {
    pub(super) const EXTENTS: u32 = 0x8_0000;
    pub(super) const ATTRIBUTE_INODE: u32 = 0x20_0000;
    pub(super) const INLINE_DATA: u32 = 0x1000_0000;
}

/// Whether the first 4 KiB of a volume are those of such a file system.
pub(crate) fn is_ext(bytes: &[u8]) -> bool {
    le16(bytes, SUPER_AT + 0x38) == MAGIC
}

/// A file system.
pub(crate) struct Ext<'a> {
    pieces: Pieces<'a>,
    block: u64,
    blocks: u64,
    first_block: u64,
    blocks_per_group: u64,
    inodes: u64,
    inodes_per_group: u64,
    inode_len: u64,
    descriptor_len: u64,
    /// From this meta group on, descriptors are in the groups that they describe.
    first_meta_group: Option<u64>,
    has_sparse_supers: bool,
    /// Where `sparse_super2` has its copies of the superblock.
    super_groups: Option<[u64; 2]>,
    moved: Moved,
}

/// An inode, as it is on the disk.
struct Inode {
    /// Where it begins in the volume.
    at: u64,
    bytes: Vec<u8>,
}

/// What a name leads to.
pub(crate) struct Node {
    pub(crate) number: u64,
    pub(crate) kind: FileKind,
    pub(crate) facts: FileFacts,
    inode: Inode,
}

impl Inode {
    fn flags(&self) -> u32 {
        le32(&self.bytes, 0x20)
    }

    fn size(&self) -> u64 {
        u64::from(le32(&self.bytes, 0x4)) | u64::from(le32(&self.bytes, 0x6c)) << 32
    }

    /// Seconds since 1970: 32 bits, and two more where the inode has room for them.
    fn time(&self, at: usize, extra_at: usize) -> i64 {
        let low = i64::from(le32(&self.bytes, at).cast_signed());
        let has_extra = self.bytes.len() > 128 && 128 + usize::from(le16(&self.bytes, 0x80)) >= extra_at + 4;
        let epoch = if has_extra { le32(&self.bytes, extra_at) & 3 } else { 0 };
        low + (i64::from(epoch) << 32)
    }

    fn kind(&self) -> FileKind {
        match le16(&self.bytes, 0) >> 12 {
            _ if self.flags() & flag::ATTRIBUTE_INODE != 0 => FileKind::Other,
            0x4 => FileKind::Directory,
            0x8 => FileKind::File,
            0xa => FileKind::Link,
            _ => FileKind::Other,
        }
    }

    /// What leads to its blocks, or the data of a short link.
    fn root(&self) -> &[u8] {
        self.bytes.get(0x28..0x28 + 60).unwrap_or_default()
    }
}

impl<'a> Ext<'a> {
    pub(crate) async fn open(pieces: Pieces<'a>) -> Result<Self> {
        let head = pieces.read(SUPER_AT as u64, 1024).await?;
        let (le16, le32) = (|at| le16(&head, at), |at| le32(&head, at));
        let (has_revision, compatible, incompatible) = (le32(0x4c) > 0, le32(0x5c), le32(0x60));
        let unknown = if has_revision { incompatible & !feature::KNOWN } else { 0 };
        if unknown != 0 {
            return Err(Error::unsupported(format!(
                "its file system has features {unknown:#x}, not known here"
            )));
        }
        let has = |wanted| has_revision && incompatible & wanted != 0;
        let shift = le32(0x18);
        let block = 1024_u64 << shift.min(6);
        let high = if has(feature::BITS_64) { u64::from(le32(0x150)) << 32 } else { 0 };
        let descriptor_len = if has(feature::BITS_64) { u64::from(le16(0xfe)).max(32) } else { 32 };
        let this = Self {
            block,
            blocks: u64::from(le32(0x4)) | high,
            first_block: le32(0x14).into(),
            blocks_per_group: le32(0x20).into(),
            inodes: le32(0).into(),
            inodes_per_group: le32(0x28).into(),
            inode_len: if has_revision { le16(0x58).into() } else { 128 },
            descriptor_len,
            first_meta_group: has(feature::META_GROUPS).then(|| le32(0x104).into()),
            has_sparse_supers: has_revision && le32(0x64) & 1 != 0,
            super_groups: (has_revision && compatible & 0x200 != 0)
                .then(|| [le32(0x24c).into(), le32(0x250).into()]),
            moved: Moved::default(),
            pieces,
        };
        let is_sound = shift <= 6
            && this.blocks > this.first_block
            && this.blocks_per_group > 0
            && this.inodes_per_group > 0
            && this.inode_len.is_power_of_two()
            && (128..=block).contains(&this.inode_len)
            && descriptor_len.is_power_of_two()
            && descriptor_len <= 1024;
        if !is_sound {
            return Err(Error::corrupt("the superblock of its file system is damaged"));
        }
        let journal = le32(0xe0);
        match has(feature::RECOVER) && journal != 0 {
            true => this.with_journal(journal.into()).await.context(|| "the journal of its file system"),
            false => Ok(this),
        }
    }

    /// A block of the file system, as the journal has it.
    async fn block(&self, number: u64) -> Result<Vec<u8>> {
        let is_its = number < self.blocks && number >= self.first_block.min(1);
        let place = if is_its { number.checked_mul(self.block) } else { None };
        let at =
            place.ok_or_else(|| Error::corrupt(format!("it refers to block {number}, which it has not")))?;
        match self.moved.place(number) {
            None => self.pieces.read(at, self.block).await,
            Some(moved) => {
                let mut bytes = self.pieces.read(moved.at, self.block).await?;
                moved.restore(&mut bytes);
                Ok(bytes)
            }
        }
    }

    fn has_super(&self, group: u64) -> bool {
        let is_power = |of: u64| {
            let mut power = of;
            while power < group {
                power *= of;
            }
            power == group
        };
        match self.super_groups {
            Some(groups) => group == 0 || groups.contains(&group),
            None => group < 2 || !self.has_sparse_supers || [3, 5, 7].into_iter().any(is_power),
        }
    }

    /// The block with a group's descriptor, and where in it.
    fn descriptor_of(&self, group: u64) -> (u64, usize) {
        let of_block = self.block / self.descriptor_len;
        let meta = group / of_block;
        let number = match self.first_meta_group {
            Some(first) if meta >= first => {
                let begins = meta * of_block;
                let block = self.first_block + begins.saturating_mul(self.blocks_per_group);
                // With blocks of 1 KiB the first group's superblock is in a block of its own, before the group.
                let lies_before = begins == 0 && self.block == 1024 && self.first_block == 0;
                block + u64::from(self.has_super(begins)) + u64::from(lies_before)
            }
            _ => SUPER_AT as u64 / self.block + 1 + meta,
        };
        (number, usize::try_from(group % of_block * self.descriptor_len).expect("in a block"))
    }

    async fn inode(&self, number: u64) -> Result<Inode> {
        if number == 0 || number > self.inodes {
            return Err(Error::corrupt(format!("it refers to inode {number}, which it has not")));
        }
        let (group, index) = ((number - 1) / self.inodes_per_group, (number - 1) % self.inodes_per_group);
        let (block, at) = self.descriptor_of(group);
        let descriptor = self.block(block).await?;
        let descriptor = &descriptor[at..];
        let high = if self.descriptor_len >= 64 { u64::from(le32(descriptor, 0x28)) << 32 } else { 0 };
        let table = u64::from(le32(descriptor, 0x8)) | high;
        let at = index * self.inode_len;
        let block = table.saturating_add(at / self.block);
        let within = usize::try_from(at % self.block).expect("in a block");
        let bytes = self.block(block).await?;
        let len = usize::try_from(self.inode_len).expect("a block at most");
        Ok(Inode { at: block * self.block + within as u64, bytes: bytes[within..within + len].to_vec() })
    }

    pub(crate) fn root(&self) -> u64 {
        ROOT
    }

    pub(crate) async fn node(&self, number: u64) -> Result<Node> {
        let inode = self.inode(number).await?;
        let facts = FileFacts {
            bytes: inode.size(),
            modified: inode.time(0x10, 0x88),
            accessed: inode.time(0x8, 0x8c),
        };
        Ok(Node { number, kind: inode.kind(), facts, inode })
    }

    /// The names in a directory, and their inodes, until `visit` says no.
    pub(crate) async fn entries(&self, node: &Node, visit: &mut dyn FnMut(&[u8], u64) -> bool) -> Result<()> {
        if node.inode.flags() & flag::INLINE_DATA != 0 {
            return Err(Error::unsupported(format!("inode {}: a directory with inline data", node.number)));
        }
        let mut blocks = self.blocks_of(&node.inode).await?;
        while let Some((number, _)) = blocks.next(self).await? {
            let block = self.block(number).await?;
            let mut at = 0;
            while at + 8 <= block.len() {
                let entry = &block[at..];
                // 64 KiB do not fit the field.
                let len = match le16(entry, 4) {
                    0 | 0xffff if block.len() == 1 << 16 => block.len(),
                    len => len.into(),
                };
                let name_len = usize::from(entry[6]);
                if len < 8 || !len.is_multiple_of(4) || at + len > block.len() || 8 + name_len > len {
                    let why = format!("inode {}: an entry of the directory is damaged", node.number);
                    return Err(Error::corrupt(why));
                }
                let (inode, name) = (le32(entry, 0), &entry[8..8 + name_len]);
                let is_entry = inode != 0 && !matches!(name, b"" | b"." | b"..");
                if is_entry && !visit(name, inode.into()) {
                    return Ok(());
                }
                at += len;
            }
        }
        Ok(())
    }

    /// Where a symbolic link leads to.
    pub(crate) async fn link(&self, node: &Node) -> Result<Vec<u8>> {
        let len = usize::try_from(node.facts.bytes).unwrap_or(usize::MAX);
        if len < 60 {
            return Ok(node.inode.root()[..len.min(node.inode.root().len())].to_vec());
        }
        let mut blocks = self.blocks_of(&node.inode).await?;
        match blocks.next(self).await? {
            Some((number, _)) => {
                let mut target = self.block(number).await?;
                target.truncate(len);
                Ok(target)
            }
            None => Err(Error::corrupt(format!("inode {}: a link without a target", node.number))),
        }
    }

    /// Where the bytes of a file are in the volume: start and length, each run.
    pub(crate) async fn runs(&self, node: &Node, add: &mut dyn FnMut(u64, u64) -> Result<()>) -> Result<()> {
        let (inode, size) = (&node.inode, node.facts.bytes);
        if size == 0 {
            return Ok(());
        }
        if inode.flags() & flag::INLINE_DATA != 0 {
            return add(inode.at, self.inode_len);
        }
        let mut runs = self.runs_of(inode).await?;
        while let Some(run) = runs.next(self).await? {
            let begins = run.logical.saturating_mul(self.block);
            let len = run.count.saturating_mul(self.block).min(size.saturating_sub(begins));
            let end = run.physical.checked_add(run.count).filter(|end| *end <= self.blocks);
            if end.is_none() || run.physical == 0 {
                let why = format!("inode {}: it refers to block {}", node.number, run.physical);
                return Err(Error::corrupt(why));
            }
            if len > 0 && run.is_written {
                add(run.physical * self.block, len)?;
            }
        }
        Ok(())
    }
}
