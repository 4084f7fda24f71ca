//! Whether the log is empty: its last record says that the file system was unmounted.
//!
//! ```text
//!   blocks of 512 bytes │ cycle 8 … 8 │ 7 … 7 │      the first word of each, or the second of a record's first block
//!                                     ▲ head: here the log was written last; the record before it is the last one
//! ```
//!
//! A log of which this cannot be said is taken for one that has changes: a wrong answer would be the files of another time.

use vellum_core::{Error, Result};

use super::Xfs;
use crate::bytes::be32;

const BLOCK: u64 = 512;
const RECORD_MAGIC: u32 = 0xfeed_babe;
/// The last record begins no further before the head: 256 KiB and what leads to it.
const BACK_MAX: u64 = (256 << 10) / BLOCK + 16;
/// Headers for each of these many bytes.
const HEADER_FOR: u32 = 32 << 10;
const UNMOUNT: u8 = 0x20;

struct Log<'x, 'a> {
    system: &'x Xfs<'a>,
    at: u64,
    blocks: u64,
}

impl Log<'_, '_> {
    async fn block(&self, number: u64) -> Result<Vec<u8>> {
        self.system.pieces.read(self.at + number % self.blocks * BLOCK, BLOCK).await
    }

    async fn cycle(&self, number: u64) -> Result<u32> {
        let block = self.block(number).await?;
        Ok(be32(&block, if be32(&block, 0) == RECORD_MAGIC { 4 } else { 0 }))
    }

    /// The block behind the last record; nothing was ever written where there is none.
    async fn head(&self) -> Result<Option<u64>> {
        let (first, last) = (self.cycle(0).await?, self.cycle(self.blocks - 1).await?);
        match first {
            0 => return Ok(None),
            _ if first == last => return Ok(Some(self.blocks)),
            _ => {}
        }
        // Before the head the cycle is that of the first block.
        let (mut before, mut behind) = (0, self.blocks - 1);
        while behind - before > 1 {
            let middle = before + (behind - before) / 2;
            match self.cycle(middle).await? == first {
                true => before = middle,
                false => behind = middle,
            }
        }
        Ok(Some(behind))
    }

    async fn is_empty(&self) -> Result<bool> {
        let Some(head) = self.head().await? else { return Ok(true) };
        for back in 1..=BACK_MAX.min(self.blocks) {
            let begins = (head + self.blocks - back) % self.blocks;
            let record = self.block(begins).await?;
            if be32(&record, 0) != RECORD_MAGIC {
                continue;
            }
            let (version, len, operations) = (be32(&record, 8), be32(&record, 12), be32(&record, 40));
            let headers = if version & 2 != 0 { be32(&record, 320).div_ceil(HEADER_FOR).max(1) } else { 1 };
            let first = self.block(begins + u64::from(headers)).await?;
            let end = begins + u64::from(headers) + u64::from(len).div_ceil(BLOCK);
            return Ok(operations == 1 && first[9] & UNMOUNT != 0 && end % self.blocks == head % self.blocks);
        }
        Ok(false)
    }
}

/// An error where the log, this many bytes from there on, has changes or may have.
pub(super) async fn check_empty(system: &Xfs<'_>, at: u64, len: u64) -> Result<()> {
    let log = Log { system, at, blocks: len / BLOCK };
    match log.blocks > 0 && log.is_empty().await? {
        true => Ok(()),
        false => Err(Error::unsupported(
            "the log of its XFS file system has changes that are not written home, and is not replayed here: unmount it \
             in the guest, or mount it read-only there (`mount -o remount,ro`), and try again",
        )),
    }
}
