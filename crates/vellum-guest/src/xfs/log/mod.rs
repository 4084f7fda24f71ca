//! The log: what was committed in it and may not be home yet, as changes that are laid over what is read.
//!
//! ```text
//!   ring ─► records, tail to head ─► transactions ─► items ─┬ buffers  ─► pieces of 128 bytes  ─┐
//!   which are whole                   committed ones        ├ inodes   ─► core, data fork       ├─► `Changes`
//!                                                           ├ icreate  ─► inodes without a past ─┘
//!                                                           └ mapping intents that are not done
//! ```
//!
//! 1. The log is read twice. First all cancelled buffers are counted: a buffer that a later transaction has freed is not
//!    laid over anything, because other data may be there.
//! 2. In a transaction, buffers and new inodes come before inodes, and cancellations last.
//! 3. A log whose last record says that the file system was unmounted has no changes.

mod items;
mod ring;
mod transactions;

use vellum_core::{Error, Result};

use self::items::{Cancelled, Replay, is_cancellation, is_of_files};
use self::ring::{Ends, Ring};
use self::transactions::Transactions;
use super::Xfs;
use super::changes::Changes;

/// What the log, this many bytes from there on, has to change.
pub(super) async fn changes(system: &Xfs<'_>, at: u64, len: u64) -> Result<Changes> {
    let ring = Ring::new(&system.pieces, at, len, system.uuid, system.is_v5)?;
    let Some(ends) = ring.ends().await? else { return Ok(Changes::default()) };
    if system.unknown_in_log != 0 {
        return Err(Error::unsupported(format!(
            "the log of its XFS file system has features {:#x}, not known here: unmount it in the guest, and try again",
            system.unknown_in_log
        )));
    }
    let (cancelled, tail) = cancellations(&ring, ends).await?;
    let mut replay = Replay::new(system, cancelled);
    let mut transactions = Transactions::new(is_of_files);
    let mut at = tail;
    while at != ends.head {
        let record = ring.next(at, ends.head).await?;
        transactions.add(&record, &mut |lsn, items| replay.commit(lsn, &items))?;
        at = ring.behind(&record);
    }
    replay.done()
}

/// The cancelled buffers, and the first record that counts.
async fn cancellations(ring: &Ring<'_, '_>, ends: Ends) -> Result<(Cancelled, u64)> {
    let (mut tail, mut at) = (ends.tail, ends.tail);
    let (mut cancelled, mut transactions) = (Cancelled::default(), Transactions::new(is_cancellation));
    while at != ends.head {
        let record = ring.next_or_later(at, ends).await?;
        if record.at != at {
            // What came before a gap is home: the tail was behind it.
            (cancelled, transactions) = (Cancelled::default(), Transactions::new(is_cancellation));
            tail = record.at;
        }
        transactions.add(&record, &mut |_, items| items.iter().try_for_each(|item| cancelled.add(item)))?;
        at = ring.behind(&record);
    }
    Ok((cancelled, tail))
}
