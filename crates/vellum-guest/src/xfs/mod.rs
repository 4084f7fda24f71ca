//! XFS, versions 4 and 5: inodes, directories, and where the bytes of a file are. Only read.
//!
//! ```text
//!   superblock ─► allocation groups of equal length        inode number = group │ block in the group │ place in the block
//!   byte 0          group 0 │ group 1 │ …
//!   inode ─┬ local     in the inode itself: short directories, short links
//!          ├ extents   in the inode                 16 bytes each: place in the file, block, count, not yet written
//!          └ B-tree    root in the inode ─► nodes ─► leaves of extents
//! ```
//!
//! 1. Numbers are big-endian. A block's number has the group in its high bits, so it is checked against the group's length.
//! 2. A tree is at most [`extents::LEVELS_MAX`] deep. One whose nodes lead to each other is ended by the bound of [`Pieces`].
//! 3. Directories of all forms but the short one have their entries in blocks before byte 2^35 of the directory; what is
//!    behind is an index, which is not read.
//! 4. Everything is read with the changes that are only in the log ([`log`], [`changes`]): what a mounted file system has
//!    committed, and not yet written home, counts. The superblock too, so it is read twice.
//!
//! Left out: the realtime section, a log on another device, logs of big-endian machines.

mod changes;
mod directory;
mod extents;
mod log;

use std::ops::Range;

use vellum_core::{Error, Result};

use self::changes::{Changes, lsn_of};
use self::extents::{Extent, Extents};
use crate::bytes::{be16, be32, be64};
use crate::file::{FileFacts, FileKind};
use crate::pieces::Pieces;

const MAGIC: u32 = 0x5846_5342;
const SUPER_LEN: u64 = 512;
const INODE_MAGIC: u16 = 0x494e;
/// Of the first block of a link that has blocks, in version 5.
const LINK_MAGIC: u32 = 0x5853_4c4d;
const LINK_HEADER: usize = 56;
/// A link is no longer.
const LINK_MAX: u64 = 1024;

/// Bits of the superblock's version number, and of its second word of features.
mod version {
    pub(super) const DIRECTORIES_2: u16 = 0x2000;
    pub(super) const MORE_BITS: u16 = 0x8000;
    pub(super) const FILE_TYPES: u32 = 0x200;
}

/// Incompatible features of version 5.
mod feature {
    pub(super) const FILE_TYPES: u32 = 0x1;
    pub(super) const OTHER_UUID: u32 = 0x4;
    pub(super) const NEEDS_REPAIR: u32 = 0x10;
    /// File types, sparse inodes, another UUID in the metadata, times after 2038, more extents, exchanged ranges, parent
    /// pointers.
    pub(super) const KNOWN: u32 = 0xef;
    /// Of the log: attributes as intents.
    pub(super) const KNOWN_IN_LOG: u32 = 0x1;
}

/// Flags of an inode, and of its second word of flags.
mod flag {
    pub(super) const REALTIME: u16 = 0x1;
    pub(super) const LARGE_TIMES: u64 = 0x8;
    pub(super) const MORE_EXTENTS: u64 = 0x10;
}

/// How an inode has its data.
mod form {
    pub(super) const LOCAL: u8 = 1;
    pub(super) const EXTENTS: u8 = 2;
    pub(super) const TREE: u8 = 3;
}

/// Whether the first bytes of a volume are those of such a file system.
pub(crate) fn is_xfs(bytes: &[u8]) -> bool {
    be32(bytes, 0) == MAGIC
}

/// A file system.
pub(crate) struct Xfs<'a> {
    pieces: Pieces<'a>,
    is_v5: bool,
    block: u64,
    blocks: u64,
    group_blocks: u64,
    groups: u64,
    /// Bits of a block's place in its group.
    group_shift: u32,
    inode_len: u64,
    /// Bits of an inode's place in its block.
    inode_shift: u32,
    directory_block: u64,
    root: u64,
    has_file_types: bool,
    /// Where the log begins, and its blocks.
    log: (u64, u64),
    /// Features of the log that are not known here.
    unknown_in_log: u32,
    /// Of the file system, and of its metadata.
    uuid: [u8; 16],
    metadata_uuid: [u8; 16],
    changes: Changes,
}

/// An inode, as it is on the disk.
struct Inode {
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
    fn version(&self) -> u8 {
        self.bytes[4]
    }

    fn form(&self) -> u8 {
        self.bytes[5]
    }

    fn size(&self) -> u64 {
        be64(&self.bytes, 56)
    }

    /// The second word of flags, which version 3 of inodes has.
    fn more_flags(&self) -> u64 {
        if self.version() >= 3 { be64(&self.bytes, 120) } else { 0 }
    }

    fn extents(&self) -> u64 {
        match self.more_flags() & flag::MORE_EXTENTS {
            0 => be32(&self.bytes, 76).into(),
            _ => be64(&self.bytes, 24),
        }
    }

    /// Seconds since 1970.
    fn time(&self, at: usize) -> i64 {
        match self.more_flags() & flag::LARGE_TIMES {
            0 => be32(&self.bytes, at).cast_signed().into(),
            _ => (be64(&self.bytes, at) / 1_000_000_000).cast_signed() - (1 << 31),
        }
    }

    fn kind(&self) -> FileKind {
        match be16(&self.bytes, 2) >> 12 {
            0x4 => FileKind::Directory,
            0x8 => FileKind::File,
            0xa => FileKind::Link,
            _ => FileKind::Other,
        }
    }

    fn fork(&self) -> &[u8] {
        &self.bytes[fork_of(&self.bytes)]
    }
}

/// Where an inode has what leads to its data, or its data; behind it are the attributes.
fn fork_of(inode: &[u8]) -> Range<usize> {
    let begins = if inode[4] >= 3 { 176 } else { 100 };
    let end = match inode[82] {
        0 => inode.len(),
        eighths => (begins + 8 * usize::from(eighths)).min(inode.len()),
    };
    begins..end
}

/// Where a superblock has the UUID that is in the metadata.
fn uuid_at(head: &[u8]) -> usize {
    if be32(head, 216) & feature::OTHER_UUID != 0 { 248 } else { 32 }
}

impl<'a> Xfs<'a> {
    pub(crate) async fn open(pieces: Pieces<'a>) -> Result<Self> {
        let head = pieces.read(0, SUPER_LEN).await?;
        let mut this = Self::of(&head, pieces)?;
        let (log, log_blocks) = this.log;
        if log == 0 {
            return Err(Error::unsupported("the log of its XFS file system is on another device"));
        }
        let at = this.place_of(log, log_blocks)?;
        this.changes = log::changes(&this, at, log_blocks * this.block).await?;
        if this.changes.are_none() {
            return Ok(this);
        }
        let head = this.read(0, SUPER_LEN).await?;
        let Self { pieces, changes, .. } = this;
        Ok(Self { changes, ..Self::of(&head, pieces)? })
    }

    /// One with this superblock.
    fn of(head: &[u8], pieces: Pieces<'a>) -> Result<Self> {
        let uuid = |at: usize| <[u8; 16]>::try_from(&head[at..at + 16]).expect("16 bytes");
        let metadata_uuid = uuid(uuid_at(head));
        let uuid = uuid(32);
        let (be32, be64) = (|at| be32(head, at), |at| be64(head, at));
        let version = be16(head, 100);
        let is_v5 = version & 0xf == 5;
        let unknown = if is_v5 { be32(216) & !feature::KNOWN } else { 0 };
        if unknown & feature::NEEDS_REPAIR != 0 {
            return Err(Error::corrupt(
                "its XFS file system has to be repaired first (`xfs_repair` in the guest)",
            ));
        }
        if unknown != 0 {
            return Err(Error::unsupported(format!(
                "its XFS file system has features {unknown:#x}, not known here"
            )));
        }
        if !is_v5 && version & 0xf != 4 || version & version::DIRECTORIES_2 == 0 {
            return Err(Error::unsupported(format!(
                "its XFS file system has version {version:#x}: 4 with directories of version 2 and 5 are read"
            )));
        }
        let (block_shift, inode_shift, group_shift) =
            (u32::from(head[120]), u32::from(head[123]), u32::from(head[124]));
        let directory_shift = block_shift + u32::from(head[192]);
        let has_file_types = match is_v5 {
            true => be32(216) & feature::FILE_TYPES != 0,
            false => version & version::MORE_BITS != 0 && be32(200) & version::FILE_TYPES != 0,
        };
        let block = u64::from(be32(4));
        let this = Self {
            is_v5,
            block,
            blocks: be64(8),
            group_blocks: be32(84).into(),
            groups: be32(88).into(),
            group_shift,
            inode_len: be16(head, 104).into(),
            inode_shift,
            directory_block: 1 << directory_shift.min(16),
            root: be64(56),
            has_file_types,
            log: (be64(48), be32(96).into()),
            unknown_in_log: if is_v5 { be32(220) & !feature::KNOWN_IN_LOG } else { 0 },
            uuid,
            metadata_uuid,
            changes: Changes::default(),
            pieces,
        };
        let is_sound = (9..=16).contains(&block_shift)
            && block == 1 << block_shift
            && directory_shift <= 16
            && (256..=2048).contains(&this.inode_len)
            && this.inode_len << inode_shift.min(16) == block
            && (1..=31).contains(&group_shift)
            && this.group_blocks > 0
            && this.group_blocks <= 1 << group_shift
            && this.groups > 0
            && this.blocks > (this.groups - 1) * this.group_blocks
            && this.blocks <= this.groups * this.group_blocks
            && this.blocks.checked_mul(block).is_some();
        if !is_sound {
            return Err(Error::corrupt("the superblock of its XFS file system is damaged"));
        }
        Ok(this)
    }

    /// Where this many blocks are in the volume, in bytes.
    fn place_of(&self, number: u64, count: u64) -> Result<u64> {
        let (group, within) = (number >> self.group_shift, number & ((1 << self.group_shift) - 1));
        let first = group.checked_mul(self.group_blocks).map(|first| first.saturating_add(within));
        let is_its = group < self.groups && count <= self.group_blocks && within <= self.group_blocks - count;
        match first.filter(|first| is_its && first + count <= self.blocks) {
            Some(first) => Ok(first * self.block),
            None => {
                Err(Error::corrupt(format!("it refers to {count} blocks from {number} on, which it has not")))
            }
        }
    }

    async fn block(&self, number: u64) -> Result<Vec<u8>> {
        self.read(self.place_of(number, 1)?, self.block).await
    }

    /// Bytes of the volume with the changes of the log, but for those of inodes.
    async fn read(&self, at: u64, len: u64) -> Result<Vec<u8>> {
        let mut bytes = self.pieces.read(at, len).await?;
        let mut home = None;
        for (from, lsn, buffer, piece) in self.changes.pieces(at, len) {
            let home_lsn = match home {
                Some((its, home_lsn)) if its == buffer => home_lsn,
                _ if !self.is_v5 => 0,
                _ => {
                    let header = self.pieces.read(buffer, SUPER_LEN).await?;
                    lsn_of(&header, &self.metadata_uuid)
                }
            };
            home = Some((buffer, home_lsn));
            if home_lsn <= lsn {
                bytes[from..from + piece.len()].copy_from_slice(piece);
            }
        }
        Ok(bytes)
    }

    pub(crate) fn root(&self) -> u64 {
        self.root
    }

    pub(crate) async fn node(&self, number: u64) -> Result<Node> {
        let at = self.place_of(number >> self.inode_shift, 1)?;
        let at = at + (number & ((1 << self.inode_shift) - 1)) * self.inode_len;
        let mut bytes = match self.changes.is_new_inode(at) {
            true => vec![0; usize::try_from(self.inode_len).expect("2048 at most")],
            false => self.read(at, self.inode_len).await?,
        };
        self.changes.lay_inode(at, number, &mut bytes)?;
        let inode = Inode { bytes };
        let is_sound = be16(&inode.bytes, 0) == INODE_MAGIC
            && (1..=3).contains(&inode.version())
            && (inode.version() == 3) == self.is_v5
            && (!self.is_v5 || be64(&inode.bytes, 152) == number);
        if !is_sound {
            return Err(Error::corrupt(format!("inode {number} is damaged")));
        }
        let facts = FileFacts { bytes: inode.size(), modified: inode.time(40), accessed: inode.time(32) };
        Ok(Node { number, kind: inode.kind(), facts, inode })
    }

    /// The names in a directory, and their inodes, until `visit` says no.
    pub(crate) async fn entries(&self, node: &Node, visit: &mut dyn FnMut(&[u8], u64) -> bool) -> Result<()> {
        directory::entries(self, node, visit).await
    }

    /// Where a symbolic link leads to.
    pub(crate) async fn link(&self, node: &Node) -> Result<Vec<u8>> {
        let damaged = || Error::corrupt(format!("inode {}: the link is damaged", node.number));
        let len = Some(node.facts.bytes).filter(|len| (1..=LINK_MAX).contains(len)).ok_or_else(damaged)?;
        let len = usize::try_from(len).expect("1024 at most");
        if node.inode.form() == form::LOCAL {
            return node.inode.fork().get(..len).map(<[u8]>::to_vec).ok_or_else(damaged);
        }
        let mut target = Vec::new();
        let mut extents = self.extents_of(node)?;
        while let Some(extent) = extents.next(self).await? {
            for number in extent.block..extent.block + extent.count {
                if target.len() >= len {
                    break;
                }
                let block = self.block(number).await?;
                let from = if self.is_v5 { LINK_HEADER } else { 0 };
                if self.is_v5 && be32(&block, 0) != LINK_MAGIC {
                    return Err(damaged());
                }
                target.extend_from_slice(&block[from..]);
            }
        }
        target.truncate(len);
        if target.len() == len { Ok(target) } else { Err(damaged()) }
    }

    /// Where the bytes of a file are in the volume: start and length, each run.
    pub(crate) async fn runs(&self, node: &Node, add: &mut dyn FnMut(u64, u64) -> Result<()>) -> Result<()> {
        if node.facts.bytes == 0 {
            return Ok(());
        }
        if be16(&node.inode.bytes, 90) & flag::REALTIME != 0 {
            let why =
                format!("inode {}: its data is in the realtime section, which is not read", node.number);
            return Err(Error::unsupported(why));
        }
        let maps = self.changes.maps_of(node.number)?;
        let mut add = |extent: &Extent| {
            let at = self.place_of(extent.block, extent.count)?;
            let begins = extent.offset.saturating_mul(self.block);
            let len = (extent.count * self.block).min(node.facts.bytes.saturating_sub(begins));
            if len > 0 && extent.is_written { add(at, len) } else { Ok(()) }
        };
        let mut extents = self.home_extents_of(node)?;
        while let Some(extent) = extents.next(self).await? {
            match maps.are_none() {
                true => add(&extent)?,
                false => maps.left_of(extent).iter().try_for_each(&mut add)?,
            }
        }
        maps.added.iter().try_for_each(add)
    }

    /// The extents of a directory or a link.
    fn extents_of(&self, node: &Node) -> Result<Extents> {
        if !self.changes.maps_of(node.number)?.are_none() {
            return Err(Error::unsupported(format!(
                "inode {}: a change of what leads to its data is not complete in the log: mount the file system in the \
                 guest, and try again",
                node.number
            )));
        }
        self.home_extents_of(node)
    }

    /// Extents, without changes that were not done.
    fn home_extents_of(&self, node: &Node) -> Result<Extents> {
        let inode = &node.inode;
        match inode.form() {
            form::EXTENTS => Extents::of_list(inode.fork(), inode.extents()),
            form::TREE => Extents::of_tree(inode.fork()),
            _ => None,
        }
        .ok_or_else(|| Error::corrupt(format!("inode {}: what leads to its data is damaged", node.number)))
    }
}
