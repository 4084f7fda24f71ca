//! What the log changes, laid over what is home when that is read.
//!
//! ```text
//!   bytes of the volume   │ home … │ piece │ home │ piece │ …          pieces of 128 bytes, the newest of each
//!   an inode              │ home, or nothing where it is new │ core │ data fork │
//! ```
//!
//! 1. The newest change of each piece, core and fork is kept, with its LSN. The earlier ones are in it.
//! 2. Version 5: what is home has the LSN of its last change, a block in its header, an inode in its core. A change that is older
//!    is not laid: what is home has it, and later ones. Version 4: an inode says how often it was written home, and a
//!    block says nothing.
//! 3. An inode that was made in the log has no past: what is home there is of another time.
//! 4. What is held is at most [`Changes::MIB_MAX`] MiB.

use std::collections::{BTreeMap, HashSet};

use vellum_core::{Error, Result};

use super::extents::Extent;
use super::{INODE_MAGIC, LINK_MAGIC, form};
use crate::bytes::{be16, be32, be64};

/// The bytes of a bit in a buffer's bitmap.
pub(super) const PIECE: usize = 128;
const PIECE_COSTS: usize = 224;
const INODE_COSTS: usize = 512;
const RANGE_COSTS: usize = 64;
/// Changes of one inode's mappings that were not done, at most.
const MAPS_MAX: usize = 64;
/// The count of an inode of version 4 that begins again.
const FLUSHES_MAX: u16 = 0xffff;

/// Part of a buffer.
struct Piece {
    lsn: u64,
    /// Where the buffer begins, whose header has the LSN of what is home.
    buffer: u64,
    bytes: [u8; PIECE],
}

/// What an inode has its data in.
pub(super) enum Fork {
    /// As it is on the disk.
    Bytes(Box<[u8]>),
    /// The root of a tree as it is in memory: a block's header, keys, pointers.
    Root(Box<[u8]>),
}

/// When something was changed: its LSN, and how often the inode had been written home.
#[derive(Clone, Copy)]
struct When {
    lsn: u64,
    flushes: u16,
}

struct Core {
    number: u64,
    when: When,
    bytes: Box<[u8]>,
    fork: Option<(When, Fork)>,
}

/// A change of a file's mapping.
#[derive(Debug, Clone, Copy)]
pub(super) struct MapChange {
    /// These blocks come to the file; otherwise they go.
    pub(super) is_map: bool,
    pub(super) offset: u64,
    pub(super) block: u64,
    pub(super) count: u64,
    pub(super) is_written: bool,
}

#[derive(Default)]
pub(super) struct Changes {
    pieces: BTreeMap<u64, Piece>,
    /// By their places in the volume.
    inodes: BTreeMap<u64, Core>,
    /// Ranges of new ones: start and end.
    new_inodes: BTreeMap<u64, u64>,
    maps: BTreeMap<u64, Vec<MapChange>>,
    exchanged: HashSet<u64>,
    costs: usize,
}

impl Changes {
    pub(super) const MIB_MAX: usize = 256;

    pub(super) fn are_few(&self) -> bool {
        self.costs <= Self::MIB_MAX << 20
    }

    pub(super) fn are_none(&self) -> bool {
        self.costs == 0
    }

    /// Bytes of a buffer at `at`, from this piece of it on.
    pub(super) fn add_pieces(&mut self, lsn: u64, at: u64, first: usize, bytes: &[u8]) {
        let start = at / PIECE as u64 + first as u64;
        for (number, bytes) in (start..).zip(bytes.chunks_exact(PIECE)) {
            let bytes = bytes.try_into().expect("a piece");
            if self.pieces.insert(number, Piece { lsn, buffer: at, bytes }).is_none() {
                self.costs += PIECE_COSTS;
            }
        }
        // Inodes that were there are so no more.
        let start = start * PIECE as u64;
        self.remove_inodes(start, start + bytes.len() as u64);
    }

    fn remove_inodes(&mut self, start: u64, end: u64) {
        while let Some((at, _)) = self.inodes.range(start..end).next() {
            let at = *at;
            let gone = self.inodes.remove(&at);
            self.costs = self.costs.saturating_sub(gone.map_or(0, |core| core.costs()));
        }
    }

    /// New inodes there. What was there before does not count.
    pub(super) fn add_new_inodes(&mut self, start: u64, end: u64) {
        self.remove_inodes(start, end);
        while let Some((number, _)) = self.pieces.range(start / PIECE as u64..end / PIECE as u64).next() {
            let number = *number;
            self.pieces.remove(&number);
            self.costs = self.costs.saturating_sub(PIECE_COSTS);
        }
        let (mut start, mut end) = (start, end);
        while let Some((its, upto)) = self.new_inodes.range(..=end).next_back()
            && *upto >= start
        {
            let its = *its;
            (start, end) = (start.min(its), end.max(*upto));
            self.new_inodes.remove(&its);
            self.costs = self.costs.saturating_sub(RANGE_COSTS);
        }
        self.new_inodes.insert(start, end);
        self.costs += RANGE_COSTS;
    }

    pub(super) fn add_inode(&mut self, at: u64, number: u64, lsn: u64, core: &[u8], fork: Option<Fork>) {
        let when = When { lsn, flushes: if core[4] < 3 { be16(core, 30) } else { 0 } };
        let before = self.inodes.remove(&at);
        self.costs = self.costs.saturating_sub(before.as_ref().map_or(0, Core::costs));
        let before = before.filter(|before| before.number == number).and_then(|before| before.fork);
        let fork = fork.map(|fork| (when, fork)).or(before);
        let core = Core { number, when, bytes: core.into(), fork };
        self.costs += core.costs();
        self.inodes.insert(at, core);
    }

    pub(super) fn add_map(&mut self, inode: u64, map: MapChange) {
        self.maps.entry(inode).or_default().push(map);
        self.costs += RANGE_COSTS;
    }

    pub(super) fn add_exchange(&mut self, inode: u64) {
        self.exchanged.insert(inode);
        self.costs += RANGE_COSTS;
    }

    /// The pieces of `len` bytes from there on: where each begins in them, its LSN, the buffer that it is of.
    pub(super) fn pieces(&self, at: u64, len: u64) -> impl Iterator<Item = (usize, u64, u64, &[u8])> {
        let (first, end) = (at / PIECE as u64, (at + len).div_ceil(PIECE as u64));
        self.pieces.range(first..end).map(move |(number, piece)| {
            let from = usize::try_from((number - first) * PIECE as u64).expect("it was read");
            (from, piece.lsn, piece.buffer, &piece.bytes[..])
        })
    }

    /// Whether the inode there was made in the log.
    pub(super) fn is_new_inode(&self, at: u64) -> bool {
        self.new_inodes.range(..=at).next_back().is_some_and(|(_, end)| *end > at)
    }

    /// Lays the changes of an inode over what is home.
    pub(super) fn lay_inode(&self, at: u64, number: u64, bytes: &mut [u8]) -> Result<()> {
        let Some(change) = self.inodes.get(&at) else { return Ok(()) };
        if change.number != number {
            return Err(Error::corrupt(format!(
                "the log of its XFS file system has inode {} where {number} is",
                change.number
            )));
        }
        let home = Home::of(bytes);
        if !home.is_newer_than(change.when) {
            bytes[..change.bytes.len()].copy_from_slice(&change.bytes);
        }
        let fork = change.fork.as_ref().filter(|(when, _)| !home.is_newer_than(*when));
        let Some((_, fork)) = fork else { return Ok(()) };
        let header = if bytes[4] >= 3 { 72 } else { 24 };
        let (its_form, place) = (bytes[5], super::fork_of(bytes));
        let place = &mut bytes[place];
        match (fork, its_form) {
            (Fork::Bytes(fork), form::LOCAL | form::EXTENTS) => {
                let len = fork.len().min(place.len());
                place[..len].copy_from_slice(&fork[..len]);
            }
            (Fork::Root(root), form::TREE) => {
                root_on_disk(root, header, place).ok_or_else(|| {
                    Error::corrupt(format!("inode {number}: what leads to its data is damaged in the log"))
                })?;
            }
            // The form has changed since.
            _ => {}
        }
        Ok(())
    }

    /// What the changes of an inode's mapping that were not done come to.
    pub(super) fn maps_of(&self, inode: u64) -> Result<Maps> {
        if self.exchanged.contains(&inode) {
            return Err(Error::unsupported(format!(
                "inode {inode}: the exchange of its data with that of another file is not complete in the log, and is not \
                 done here: mount the file system in the guest, and try again"
            )));
        }
        let mut maps = Maps::default();
        let changes = self.maps.get(&inode).map(Vec::as_slice).unwrap_or_default();
        if changes.len() > MAPS_MAX {
            return Err(Error::unsupported(format!(
                "inode {inode}: more than {MAPS_MAX} changes of what leads to its data are not complete in the log: mount \
                 the file system in the guest, and try again"
            )));
        }
        for change in changes {
            let MapChange { offset, block, count, is_written, .. } = *change;
            if change.is_map {
                maps.added.push(Extent { offset, block, count, is_written });
                continue;
            }
            maps.gone.push((offset, count));
            maps.added = maps.added.iter().flat_map(|extent| without(*extent, offset, count)).collect();
        }
        Ok(maps)
    }
}

impl Core {
    fn costs(&self) -> usize {
        let fork = match &self.fork {
            Some((_, Fork::Bytes(bytes) | Fork::Root(bytes))) => bytes.len(),
            None => 0,
        };
        INODE_COSTS + fork
    }
}

/// What an inode that is home says about when it was written.
enum Home {
    /// It is none, or does not say.
    Unknown,
    Lsn(u64),
    Flushes(u16),
}

impl Home {
    fn of(bytes: &[u8]) -> Self {
        match bytes[4] {
            _ if be16(bytes, 0) != INODE_MAGIC => Self::Unknown,
            version if version < 3 => Self::Flushes(be16(bytes, 30)),
            _ => match be64(bytes, 112) {
                0 | u64::MAX => Self::Unknown,
                lsn => Self::Lsn(lsn),
            },
        }
    }

    fn is_newer_than(&self, change: When) -> bool {
        match *self {
            Self::Unknown => false,
            Self::Lsn(lsn) => lsn > change.lsn,
            // The count begins again after its highest.
            Self::Flushes(FLUSHES_MAX) if change.flushes < FLUSHES_MAX >> 1 => false,
            Self::Flushes(flushes) => change.flushes < flushes,
        }
    }
}

/// The LSN in the header of a block of version 5, if it is one with a header, and of this file system.
pub(super) fn lsn_of(header: &[u8], uuid: &[u8; 16]) -> u64 {
    let (lsn, its) = match be32(header, 0) {
        // Extents; blocks of directories; links; the superblock.
        0x424d_4133 => (32, 40),
        0x5844_4233 | 0x5844_4433 => (16, 24),
        LINK_MAGIC => (48, 16),
        super::MAGIC => (240, super::uuid_at(header)),
        _ => return 0,
    };
    match be64(header, lsn) {
        u64::MAX => 0,
        lsn if header.get(its..its + 16) == Some(uuid) => lsn,
        _ => 0,
    }
}

/// Brings the root of a tree to the form that it has in an inode.
fn root_on_disk(root: &[u8], header: usize, place: &mut [u8]) -> Option<()> {
    let entries = root.get(header..)?;
    let (count, had, room) =
        (usize::from(be16(root, 6)), entries.len() / 16, place.len().checked_sub(4)? / 16);
    if count > had || count > room {
        return None;
    }
    place[..2].copy_from_slice(&root[4..6]);
    place[2..4].copy_from_slice(&root[6..8]);
    place[4..4 + 8 * count].copy_from_slice(&entries[..8 * count]);
    place[4 + 8 * room..][..8 * count].copy_from_slice(&entries[8 * had..][..8 * count]);
    Some(())
}

/// Extents that a file gets, and places that lose theirs.
#[derive(Default)]
pub(super) struct Maps {
    pub(super) added: Vec<Extent>,
    gone: Vec<(u64, u64)>,
}

impl Maps {
    pub(super) fn are_none(&self) -> bool {
        self.added.is_empty() && self.gone.is_empty()
    }

    /// What is left of an extent.
    pub(super) fn left_of(&self, extent: Extent) -> Vec<Extent> {
        self.gone.iter().fold(vec![extent], |left, (offset, count)| {
            left.into_iter().flat_map(|extent| without(extent, *offset, *count)).collect()
        })
    }
}

/// An extent without these blocks of the file.
fn without(extent: Extent, offset: u64, count: u64) -> impl Iterator<Item = Extent> {
    let (start, end) = (extent.offset, extent.offset.saturating_add(extent.count));
    let part = |from: u64, upto: u64| Extent {
        offset: from,
        block: extent.block.saturating_add(from.saturating_sub(start)),
        count: upto.saturating_sub(from),
        ..extent
    };
    let gone_end = offset.saturating_add(count);
    [part(start, end.min(offset)), part(start.max(gone_end), end)].into_iter().filter(|part| part.count > 0)
}
