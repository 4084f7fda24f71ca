//! What the items of a committed transaction change. Numbers in them are little-endian, where not said otherwise.
//!
//! ```text
//!   buffer    type, regions, flags, blocks of 512, number; bitmap of 128-byte pieces │ region │ region …   a region: set bits in a row
//!   inode     type, regions, fields, …, number, …, block, …, place in it │ core │ data fork │ attribute fork   as the fields say
//!   icreate   type, regions; group, block, inodes, their size, blocks, generation (big-endian)
//!   mapping   type, regions, extents, id │ inode, block, place in the file, blocks, flags, of each
//! ```
//!
//! 1. Of buffers only those are laid that may have what is read here: the superblock, extents, directories' entries, links,
//!    and whole new inodes of version 4. Of inodes the attributes are not read, only how much room they leave.
//! 2. Intents concern free space, reference counts and reverse mappings, which are not read, but for two: a change of a
//!    file's mapping, and an exchange of mappings between two files. Those that were not done at the end of the log are
//!    what the guest will do when it mounts the file system. They are kept with the inode.
//! 3. An item of an unknown type is refused: what it changes is not known.

use std::collections::{BTreeMap, HashMap};

use vellum_core::{Error, Result};

use super::super::changes::{Changes, Fork, MapChange, PIECE};
use super::super::{INODE_MAGIC, Xfs};
use super::transactions::{Item, too_much};
use crate::bytes::{be32, le16, le32, le64};

const SECTOR: u64 = 512;
/// Cancelled buffers, and intents that are not done, at most.
const CANCELLED_MAX: usize = 1 << 20;
const INTENTS_MAX: usize = 1 << 16;
/// The root of a tree in memory is no longer.
const ROOT_MAX: usize = 8192;

mod kind {
    pub(super) const INODE: u16 = 0x123b;
    pub(super) const BUFFER: u16 = 0x123c;
    pub(super) const NEW_INODES: u16 = 0x123f;
    pub(super) const MAP: u16 = 0x1244;
    pub(super) const MAP_DONE: u16 = 0x1245;
    pub(super) const EXCHANGE: u16 = 0x1248;
    pub(super) const EXCHANGE_DONE: u16 = 0x1249;
    /// Free extents, unlinked inodes, quotas, reverse mappings, reference counts, attributes; and those of the realtime
    /// section.
    pub(super) const OTHERS: [u16; 17] = [
        0x1236, 0x1237, 0x1238, 0x123d, 0x123e, 0x1240, 0x1241, 0x1242, 0x1243, 0x1246, 0x1247, 0x124a,
        0x124b, 0x124c, 0x124d, 0x124e, 0x124f,
    ];
}

mod buffer {
    pub(super) const INODES: u16 = 0x1;
    pub(super) const CANCEL: u16 = 0x2;
    pub(super) const QUOTAS: u16 = 0x1c;
    /// Bits above these flags are what the buffer has.
    pub(super) const TYPE_SHIFT: u32 = 11;
    pub(super) const BTREE: u16 = 4;
    /// Quotas, headers of groups, indexes of directories, attributes, what the realtime section has.
    pub(super) const OTHERS: [u16; 14] = [1, 2, 3, 5, 6, 7, 12, 13, 14, 15, 16, 17, 19, 20];
    pub(super) const EXTENTS: [u32; 2] = [0x424d_4150, 0x424d_4133];
    pub(super) const MAP: usize = 20;
}

mod field {
    pub(super) const DATA: u32 = 0x2;
    pub(super) const EXTENTS: u32 = 0x4;
    pub(super) const ROOT: u32 = 0x8;
}

mod mapping {
    pub(super) const KIND: u32 = 0xff;
    pub(super) const MAP: u32 = 1;
    pub(super) const UNMAP: u32 = 2;
    pub(super) const IS_UNWRITTEN: u32 = 1 << 30;
    pub(super) const IS_ATTRIBUTES: u32 = 1 << 31;
    pub(super) const LEN: usize = 32;
}

fn damaged(what: &str) -> Error {
    Error::corrupt(format!("the log of its XFS file system has {what} that is damaged"))
}

/// Whether an item that begins so cancels a buffer. It may not be all of its first region.
pub(super) fn is_cancellation(first: &[u8]) -> Result<bool> {
    Ok(le16(first, 0) == kind::BUFFER && (first.len() < 6 || le16(first, 4) & buffer::CANCEL != 0))
}

/// Whether an item that begins so may change what is read here.
pub(super) fn is_of_files(first: &[u8]) -> Result<bool> {
    match le16(first, 0) {
        kind::BUFFER if first.len() < 6 => Ok(true),
        kind::BUFFER => {
            let flags = le16(first, 4);
            let is_other = flags & (buffer::INODES | buffer::QUOTAS) != 0
                || buffer::OTHERS.contains(&(flags >> buffer::TYPE_SHIFT));
            Ok(flags & buffer::CANCEL != 0 || !is_other)
        }
        kind::INODE
        | kind::NEW_INODES
        | kind::MAP
        | kind::MAP_DONE
        | kind::EXCHANGE
        | kind::EXCHANGE_DONE => Ok(true),
        other if kind::OTHERS.contains(&other) => Ok(false),
        other => Err(Error::unsupported(format!(
            "the log of its XFS file system has a change of type {other:#x}, not known here: unmount it in the guest, and \
             try again"
        ))),
    }
}

/// A buffer as its item names it.
struct BufferHead {
    flags: u16,
    sectors: u16,
    number: u64,
}

impl BufferHead {
    fn of(item: &Item) -> Result<Self> {
        let first = item.region(0);
        if first.len() < buffer::MAP {
            return Err(damaged("a buffer"));
        }
        Ok(Self { flags: le16(first, 4), sectors: le16(first, 6), number: le64(first, 8) })
    }

    fn is_cancelled(&self) -> bool {
        self.flags & buffer::CANCEL != 0
    }

    fn key(&self) -> (u64, u16) {
        (self.number, self.sectors)
    }
}

/// Buffers that are freed in the part of the log that is still to be read, and how often.
#[derive(Debug, Default)]
pub(super) struct Cancelled {
    buffers: BTreeMap<(u64, u16), u32>,
}

impl Cancelled {
    pub(super) fn add(&mut self, item: &Item) -> Result<()> {
        let head = BufferHead::of(item)?;
        if !head.is_cancelled() {
            return Ok(());
        }
        *self.buffers.entry(head.key()).or_default() += 1;
        match self.buffers.len() <= CANCELLED_MAX {
            true => Ok(()),
            false => Err(Error::unsupported(format!(
                "the log of its XFS file system frees more than {CANCELLED_MAX} blocks: unmount it in the guest, and try again"
            ))),
        }
    }

    fn has(&self, key: (u64, u16)) -> bool {
        self.buffers.contains_key(&key)
    }

    fn has_between(&self, first: u64, end: u64) -> bool {
        self.buffers.range((first, 0)..(end, 0)).next().is_some()
    }

    /// One of them was read.
    fn pass(&mut self, key: (u64, u16)) {
        if let Some(left) = self.buffers.get_mut(&key) {
            *left -= 1;
            if *left == 0 {
                self.buffers.remove(&key);
            }
        }
    }
}

/// The state of a replay.
pub(super) struct Replay {
    cancelled: Cancelled,
    changes: Changes,
    /// Changes of mappings that are not done, by their ids: when each was begun, and of which inode.
    maps: HashMap<u64, (u64, Vec<(u64, MapChange)>)>,
    exchanges: HashMap<u64, [u64; 2]>,
    begun: u64,
    is_v5: bool,
    inode_len: usize,
    block: u64,
    group_blocks: u64,
    volume: u64,
}

impl Replay {
    pub(super) fn new(system: &Xfs<'_>, cancelled: Cancelled) -> Self {
        Self {
            cancelled,
            changes: Changes::default(),
            maps: HashMap::new(),
            exchanges: HashMap::new(),
            begun: 0,
            is_v5: system.is_v5,
            inode_len: usize::try_from(system.inode_len).expect("2048 at most"),
            block: system.block,
            group_blocks: system.group_blocks,
            volume: system.pieces.len(),
        }
    }

    /// Lays a transaction over those before.
    pub(super) fn commit(&mut self, lsn: u64, items: &[Item]) -> Result<()> {
        let mut cancellations = Vec::new();
        for item in items {
            match item.kind() {
                kind::BUFFER => {
                    let head = BufferHead::of(item)?;
                    match head.is_cancelled() {
                        true => cancellations.push(head.key()),
                        false => self.buffer(lsn, &head, item)?,
                    }
                }
                kind::NEW_INODES => self.new_inodes(item)?,
                _ => {}
            }
        }
        for item in items {
            match item.kind() {
                kind::INODE => self.inode(lsn, item)?,
                kind::MAP => self.map(item)?,
                kind::MAP_DONE => {
                    self.maps.remove(&le64(item.region(0), 8));
                }
                kind::EXCHANGE => {
                    let first = item.region(0);
                    self.exchanges.insert(le64(first, 8), [le64(first, 16), le64(first, 24)]);
                }
                kind::EXCHANGE_DONE => {
                    self.exchanges.remove(&le64(item.region(0), 8));
                }
                _ => {}
            }
        }
        cancellations.into_iter().for_each(|key| self.cancelled.pass(key));
        let is_few = self.maps.len() + self.exchanges.len() <= INTENTS_MAX;
        if is_few && self.changes.are_few() { Ok(()) } else { Err(too_much(Changes::MIB_MAX)) }
    }

    /// What they come to.
    pub(super) fn done(mut self) -> Result<Changes> {
        let mut maps: Vec<_> = self.maps.into_values().collect();
        maps.sort_unstable_by_key(|(begun, _)| *begun);
        for (inode, map) in maps.into_iter().flat_map(|(_, maps)| maps) {
            self.changes.add_map(inode, map);
        }
        for inode in self.exchanges.into_values().flatten() {
            self.changes.add_exchange(inode);
        }
        Ok(self.changes)
    }

    fn buffer(&mut self, lsn: u64, head: &BufferHead, item: &Item) -> Result<()> {
        let is_read = is_of_files(item.region(0))?;
        if !is_read || self.cancelled.has(head.key()) {
            return Ok(());
        }
        let map = &item.region(0)[buffer::MAP..];
        let words = (le32(item.region(0), 16) as usize).min(map.len() / 4);
        let is_set = |bit: usize| bit / 32 < words && le32(map, bit / 32 * 4) >> (bit % 32) & 1 != 0;
        let len = u64::from(head.sectors) * SECTOR;
        let place = head.number.checked_mul(SECTOR).and_then(|at| Some((at, at.checked_add(len)?)));
        let Some((at, end)) = place.filter(|(_, end)| *end <= self.volume) else {
            return Err(damaged("a buffer behind the end of the volume"));
        };
        let is_tree = head.flags >> buffer::TYPE_SHIFT == buffer::BTREE;
        let magic = buffer::EXTENTS[usize::from(self.is_v5)];
        if is_tree && is_set(0) && be32(item.region(1), 0) != magic {
            return Ok(());
        }
        let (mut bit, mut region) = (0, 1);
        while bit < words * 32 {
            if !is_set(bit) {
                bit += 1;
                continue;
            }
            // Bits in a row may have several regions.
            let bytes = item.region(region);
            let count = bytes.len() / PIECE;
            let is_its =
                count > 0 && (bit..bit + count).all(is_set) && at + ((bit + count) * PIECE) as u64 <= end;
            if !is_its || region >= item.regions() {
                return Err(damaged("a buffer"));
            }
            self.changes.add_pieces(lsn, at, bit, bytes);
            (bit, region) = (bit + count, region + 1);
        }
        Ok(())
    }

    fn new_inodes(&mut self, item: &Item) -> Result<()> {
        let first = item.region(0);
        let (group, block, blocks) = (be32(first, 4), be32(first, 8), be32(first, 20));
        let start = (u64::from(group) * self.group_blocks).checked_add(block.into());
        let start = start.and_then(|start| start.checked_mul(self.block));
        let end = start.and_then(|start| start.checked_add(u64::from(blocks).checked_mul(self.block)?));
        let (Some(start), Some(end)) = (start, end.filter(|end| *end <= self.volume)) else {
            return Err(damaged("inodes behind the end of the volume"));
        };
        if !self.cancelled.has_between(start / SECTOR, end / SECTOR) {
            self.changes.add_new_inodes(start, end);
        }
        Ok(())
    }

    fn inode(&mut self, lsn: u64, item: &Item) -> Result<()> {
        let first = item.region(0);
        // Some machines of 32 bits do not align the number.
        let from = match first.len() {
            56 => 16,
            52 => 12,
            _ => return Err(damaged("an inode")),
        };
        let (fields, number) = (le32(first, 4), le64(first, from));
        let (block, sectors, within) =
            (le64(first, from + 24), le32(first, from + 32), le32(first, from + 36));
        let len = self.inode_len as u64;
        let place = block.checked_mul(SECTOR).and_then(|at| at.checked_add(within.into()));
        let place = place.filter(|at| {
            at.is_multiple_of(len)
                && u64::from(within) + len <= u64::from(sectors) * SECTOR
                && at.checked_add(len).is_some_and(|end| end <= self.volume)
        });
        let place = place.ok_or_else(|| damaged("an inode"))?;
        if u16::try_from(sectors).is_ok_and(|sectors| self.cancelled.has((block, sectors))) {
            return Ok(());
        }
        let core = item.region(1);
        let is_sound =
            le16(core, 0) == INODE_MAGIC && if self.is_v5 { core.len() == 176 } else { core.len() >= 96 };
        if !is_sound {
            return Err(damaged("an inode"));
        }
        let fork = match (fields, item.region(2)) {
            (fields, bytes) if fields & field::ROOT != 0 && (1..=ROOT_MAX).contains(&bytes.len()) => {
                Some(Fork::Root(bytes.into()))
            }
            (fields, bytes)
                if fields & (field::DATA | field::EXTENTS) != 0
                    && (1..=self.inode_len).contains(&bytes.len()) =>
            {
                Some(Fork::Bytes(bytes.into()))
            }
            (fields, _) if fields & (field::DATA | field::EXTENTS | field::ROOT) != 0 => {
                return Err(damaged("an inode"));
            }
            _ => None,
        };
        self.changes.add_inode(place, number, lsn, &disk_order(core, self.is_v5), fork);
        Ok(())
    }

    fn map(&mut self, item: &Item) -> Result<()> {
        let first = item.region(0);
        let (count, id) = (le32(first, 4) as usize, le64(first, 8));
        let maps = first.get(16..).unwrap_or_default();
        if count != maps.len() / mapping::LEN {
            return Err(damaged("a change of a mapping"));
        }
        let mut found = Vec::new();
        for one in maps.chunks_exact(mapping::LEN) {
            let flags = le32(one, 28);
            if flags & mapping::IS_ATTRIBUTES != 0 {
                continue;
            }
            let is_map = match flags & mapping::KIND {
                mapping::MAP => true,
                mapping::UNMAP => false,
                _ => return Err(damaged("a change of a mapping")),
            };
            let change = MapChange {
                is_map,
                offset: le64(one, 16),
                block: le64(one, 8),
                count: le32(one, 24).into(),
                is_written: flags & mapping::IS_UNWRITTEN == 0,
            };
            found.push((le64(one, 0), change));
        }
        self.begun += 1;
        self.maps.insert(id, (self.begun, found));
        Ok(())
    }
}

/// A core as it is on the disk: big-endian.
fn disk_order(core: &[u8], is_v5: bool) -> Vec<u8> {
    let mut bytes = core[..if is_v5 { 176 } else { 96 }].to_vec();
    let has_large_times = is_v5 && le64(core, 120) & super::super::flag::LARGE_TIMES != 0;
    let mut turn = |at: usize, len: usize| {
        if let Some(number) = bytes.get_mut(at..at + len) {
            number.reverse();
        }
    };
    for (at, len) in [
        (0, 2),
        (2, 2),
        (6, 2),
        (8, 4),
        (12, 4),
        (16, 4),
        (20, 2),
        (22, 2),
        (56, 8),
        (64, 8),
        (72, 4),
        (76, 4),
        (80, 2),
        (84, 4),
        (88, 2),
        (90, 2),
        (92, 4),
        (96, 4),
        (100, 4),
        (104, 8),
        (112, 8),
        (120, 8),
        (128, 4),
        (152, 8),
    ] {
        turn(at, len);
    }
    match is_v5 {
        true => turn(24, 8),
        false => turn(30, 2),
    }
    for at in [32, 40, 48, 144] {
        match has_large_times {
            true => turn(at, 8),
            false => [at, at + 4].into_iter().for_each(|at| turn(at, 4)),
        }
    }
    bytes
}
