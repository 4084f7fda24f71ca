//! The journal of ext3 and ext4 (jbd2), replayed in memory: which blocks have newer bytes in it.
//!
//! ```text
//!   superblock ─► start ─► descriptor │ block │ block │ … │ commit │ descriptor │ … │ revoke │ commit │ old
//!                            └ tags: whose they are            └ counts from here     └ not from earlier transactions
//! ```
//!
//! All numbers are big-endian.
//!
//! 1. A transaction counts if its commit block is there, with the sequence that comes next.
//! 2. A revoked block keeps what it has at home, unless a later transaction has it again.
//! 3. The log is gone through once, at most as far as it is long.

use std::collections::HashMap;

use vellum_core::{Error, Result};

use super::Ext;
use crate::bytes::{be16, be32};

const MAGIC: u32 = 0xc03b_3998;
const HEADER: usize = 12;
/// The longest one that is read, in blocks, and the most that it may revoke.
const BLOCKS_MAX: usize = 1 << 20;

mod kind {
    pub(super) const DESCRIPTOR: u32 = 1;
    pub(super) const COMMIT: u32 = 2;
    pub(super) const REVOKE: u32 = 5;
}

mod feature {
    pub(super) const BITS_64: u32 = 2;
    pub(super) const CHECKSUMS_2: u32 = 8;
    pub(super) const CHECKSUMS_3: u32 = 0x10;
    pub(super) const FAST_COMMIT: u32 = 0x20;
}

mod flag {
    /// The first bytes were the magic number, and are zero here.
    pub(super) const ESCAPED: u32 = 1;
    pub(super) const SAME_ID: u32 = 2;
    pub(super) const LAST: u32 = 8;
}

/// Where the journal has a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct InJournal {
    /// In bytes from the start of the volume.
    pub(super) at: u64,
    is_escaped: bool,
}

impl InJournal {
    pub(super) fn restore(self, bytes: &mut [u8]) {
        if self.is_escaped && bytes.len() >= 4 {
            bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
        }
    }
}

/// What the journal has.
#[derive(Debug, Default)]
pub(super) struct Moved {
    blocks: HashMap<u64, (u32, InJournal)>,
    revoked: HashMap<u64, u32>,
}

impl Moved {
    pub(super) fn place(&self, block: u64) -> Option<InJournal> {
        let (sequence, place) = self.blocks.get(&block)?;
        let is_revoked = self.revoked.get(&block).is_some_and(|of| is_at_most(*sequence, *of));
        (!is_revoked).then_some(*place)
    }
}

/// Sequences go round.
fn is_at_most(a: u32, b: u32) -> bool {
    b.wrapping_sub(a) < u32::MAX / 2
}

/// How tags are laid out.
struct Tags {
    len: usize,
    is_64: bool,
    is_version_3: bool,
    /// What the block has at its end.
    tail: usize,
}

impl<'a> Ext<'a> {
    /// The same file system, with what its journal has.
    pub(super) async fn with_journal(mut self, inode: u64) -> Result<Self> {
        let inode = self.inode(inode).await?;
        let mut log = Vec::new();
        let mut blocks = self.blocks_of(&inode).await?;
        while let Some((block, index)) = blocks.next(&self).await? {
            if index != log.len() as u64 || block >= self.blocks {
                return Err(Error::corrupt("it has holes"));
            }
            if log.len() == BLOCKS_MAX {
                return Err(Error::unsupported(format!("it has more than {BLOCKS_MAX} blocks")));
            }
            log.push(block);
        }
        let Some(first) = log.first() else { return Err(Error::corrupt("it is empty")) };
        let head = self.pieces.read(first * self.block, self.block).await?;
        let is_sound = be32(&head, 0) == MAGIC
            && matches!(be32(&head, 4), 3 | 4)
            && u64::from(be32(&head, 0x0c)) == self.block;
        if !is_sound {
            return Err(Error::corrupt("its superblock is damaged"));
        }
        let features = if be32(&head, 4) == 4 { be32(&head, 0x28) } else { 0 };
        let fast = match (features & feature::FAST_COMMIT != 0, be32(&head, 0x54) as usize) {
            (false, _) => 0,
            (true, 0) => 256,
            (true, blocks) => blocks,
        };
        let end = (be32(&head, 0x10) as usize).min(log.len()).saturating_sub(fast);
        let (from, start) = (be32(&head, 0x14) as usize, be32(&head, 0x1c) as usize);
        if start == 0 {
            return Ok(self);
        }
        if !(from..end).contains(&start) || from == 0 {
            return Err(Error::corrupt("its log begins outside"));
        }
        let is_64 = features & feature::BITS_64 != 0;
        let (is_version_2, is_version_3) =
            (features & feature::CHECKSUMS_2 != 0, features & feature::CHECKSUMS_3 != 0);
        let len = match is_version_3 {
            true => 16,
            false => 8 + 4 * usize::from(is_64) + 2 * usize::from(is_version_2),
        };
        let tail = 4 * usize::from(is_version_2 || is_version_3);
        let tags = Tags { len, is_64, is_version_3, tail };
        self.moved = self.replay(&log[from..end], start - from, be32(&head, 0x18), &tags).await?;
        Ok(self)
    }

    async fn replay(&self, log: &[u64], start: usize, sequence: u32, tags: &Tags) -> Result<Moved> {
        let (mut moved, mut open) = (Moved::default(), Moved::default());
        let (mut sequence, mut gone) = (sequence, 0);
        while gone < log.len() {
            let place = |ahead: usize| log[(start + gone + ahead) % log.len()] * self.block;
            let block = self.pieces.read(place(0), self.block).await?;
            if be32(&block, 0) != MAGIC || be32(&block, 8) != sequence {
                break;
            }
            gone += 1;
            match be32(&block, 4) {
                kind::DESCRIPTOR => {
                    let found = tags.all_of(&block);
                    let place = |ahead: usize| log[(start + gone + ahead) % log.len()] * self.block;
                    for (ahead, (home, is_escaped)) in found.iter().copied().enumerate() {
                        open.blocks.insert(home, (sequence, InJournal { at: place(ahead), is_escaped }));
                    }
                    gone += found.len();
                }
                kind::REVOKE => {
                    tags.revoked(&block, |home| {
                        open.revoked.insert(home, sequence);
                    });
                    if open.revoked.len() + moved.revoked.len() > BLOCKS_MAX {
                        return Err(Error::unsupported(format!("it revokes more than {BLOCKS_MAX} blocks")));
                    }
                }
                kind::COMMIT => {
                    moved.blocks.extend(open.blocks.drain());
                    moved.revoked.extend(open.revoked.drain());
                    sequence = sequence.wrapping_add(1);
                }
                _ => break,
            }
        }
        Ok(moved)
    }
}

impl Tags {
    /// Whose blocks follow a descriptor, and which of them are escaped.
    fn all_of(&self, block: &[u8]) -> Vec<(u64, bool)> {
        let (mut found, mut at) = (Vec::new(), HEADER);
        while at + self.len <= block.len() - self.tail {
            let tag = &block[at..];
            let flags = if self.is_version_3 { be32(tag, 4) } else { be16(tag, 6).into() };
            let high = if self.is_64 { u64::from(be32(tag, 8)) << 32 } else { 0 };
            found.push((u64::from(be32(tag, 0)) | high, flags & flag::ESCAPED != 0));
            at += self.len + if flags & flag::SAME_ID == 0 { 16 } else { 0 };
            if flags & flag::LAST != 0 {
                break;
            }
        }
        found
    }

    fn revoked(&self, block: &[u8], mut add: impl FnMut(u64)) {
        let end = (be32(block, 12) as usize).min(block.len());
        let len = if self.is_64 { 8 } else { 4 };
        for entry in block.get(16..end).unwrap_or_default().chunks_exact(len) {
            add(match self.is_64 {
                true => u64::from(be32(entry, 0)) << 32 | u64::from(be32(entry, 4)),
                false => be32(entry, 0).into(),
            });
        }
    }
}
