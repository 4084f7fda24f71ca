//! Transactions: the operations in the records, put together to items, and given out when they are committed.
//!
//! ```text
//!   record   │ op: start, tid 7 │ op: header │ op: region │ op: region, continued ►│      an op: tid, length, flags (12 bytes)
//!   next one │ op: ◄ its rest   │ op: region │ op: commit │ op: of tid 8 │ …
//!   item     │ region: type, how many regions │ region │ …
//! ```
//!
//! 1. An operation of a transaction whose start was not seen belongs to what is home already, and is left out. A transaction
//!    that is not committed is none.
//! 2. What is held of transactions that are not committed yet is at most [`HELD_MAX`] bytes. Items that nothing here reads
//!    are counted and not held.

use std::collections::HashMap;

use vellum_core::{Error, Result};

use super::ring::Record;
use crate::bytes::{be32, le16, le32};

const HEADER: usize = 12;
const TRANSACTION_HEADER: usize = 16;
const TRANSACTION_MAGIC: u32 = 0x5452_414e;
/// The most regions that an item has.
const REGIONS_MAX: u16 = 257;
/// What an item and a region take beside their bytes, and a transaction.
const ITEM_COSTS: usize = 96;
const TRANSACTION_COSTS: usize = 256;
const HELD_MAX: usize = 128 << 20;

mod flag {
    pub(super) const START: u8 = 0x1;
    pub(super) const COMMIT: u8 = 0x2;
    /// The region goes on in the next record.
    pub(super) const CONTINUE: u8 = 0x4;
    /// It began in the one before.
    pub(super) const CONTINUED: u8 = 0x8;
    /// And is complete.
    pub(super) const END: u8 = 0x10;
    pub(super) const UNMOUNT: u8 = 0x20;
}

/// A change of something.
pub(super) struct Item {
    /// How many regions it will have, and has.
    total: u16,
    count: u16,
    is_held: bool,
    bytes: Vec<u8>,
    /// Where the regions end.
    ends: Vec<usize>,
}

impl Item {
    pub(super) fn kind(&self) -> u16 {
        le16(&self.bytes, 0)
    }

    /// A region; empty if it has fewer.
    pub(super) fn region(&self, index: usize) -> &[u8] {
        let from = if index == 0 { 0 } else { self.ends.get(index - 1).copied().unwrap_or_default() };
        self.ends.get(index).and_then(|end| self.bytes.get(from..*end)).unwrap_or_default()
    }

    pub(super) fn regions(&self) -> usize {
        self.ends.len()
    }

    fn costs(&self) -> usize {
        ITEM_COSTS + self.bytes.len() + self.ends.len() * 8
    }
}

struct Transaction {
    /// Of the record in which it began.
    lsn: u64,
    /// How much of its header was seen.
    header: Vec<u8>,
    items: Vec<Item>,
}

/// Those that are not committed yet.
pub(super) struct Transactions {
    open: HashMap<u32, Transaction>,
    held: usize,
    /// Whether an item is wanted, by the beginning of its first region.
    is_wanted: fn(&[u8]) -> Result<bool>,
}

fn damaged(what: &str, record: &Record) -> Error {
    Error::corrupt(format!(
        "the log of its XFS file system is damaged ({what} in the record at block {})",
        record.at
    ))
}

/// The log changes more than may be held.
pub(super) fn too_much(mib: usize) -> Error {
    Error::unsupported(format!(
        "the log of its XFS file system has more than {mib} MiB of changes, which are not replayed here: unmount it in the \
         guest, or mount it read-only there (`mount -o remount,ro`), and try again"
    ))
}

impl Transactions {
    pub(super) fn new(is_wanted: fn(&[u8]) -> Result<bool>) -> Self {
        Self { open: HashMap::new(), held: 0, is_wanted }
    }

    /// Adds a record. What is committed in it is given out, with the LSN of each transaction.
    pub(super) fn add(
        &mut self,
        record: &Record,
        commit: &mut dyn FnMut(u64, Vec<Item>) -> Result<()>,
    ) -> Result<()> {
        let mut rest = &record.body[..];
        for _ in 0..record.operations {
            if rest.is_empty() {
                break;
            }
            let (tid, len, flags) =
                (be32(rest, 0), be32(rest, 4) as usize, rest.get(9).copied().unwrap_or_default());
            let data = rest.get(HEADER..).and_then(|data| data.get(..len));
            let data = data.ok_or_else(|| damaged("an operation is too long", record))?;
            rest = &rest[HEADER + len..];
            self.operation(record, tid, flags, data, commit)?;
        }
        Ok(())
    }

    fn operation(
        &mut self,
        record: &Record,
        tid: u32,
        flags: u8,
        data: &[u8],
        commit: &mut dyn FnMut(u64, Vec<Item>) -> Result<()>,
    ) -> Result<()> {
        let Some(transaction) = self.open.get_mut(&tid) else {
            if flags & flag::START != 0 {
                self.held += TRANSACTION_COSTS;
                let transaction = Transaction { lsn: record.lsn, header: Vec::new(), items: Vec::new() };
                self.open.insert(tid, transaction);
            }
            return self.check();
        };
        let flags = flags & !flag::END;
        match if flags & flag::CONTINUED != 0 { flags & !flag::CONTINUE } else { flags } {
            0 | flag::CONTINUE => {
                let more = transaction.region(data, self.is_wanted, record)?;
                self.held += more;
            }
            flag::CONTINUED => {
                let more = transaction.more(data);
                self.held += more.ok_or_else(|| damaged("nothing is continued", record))?;
            }
            flag::COMMIT => {
                let transaction = self.open.remove(&tid).expect("it was found");
                let held: usize = transaction.items.iter().map(Item::costs).sum();
                self.held = self.held.saturating_sub(TRANSACTION_COSTS + held);
                let is_whole = |item: &Item| item.total == item.count;
                if !transaction.items.iter().all(is_whole) {
                    return Err(damaged("an item lacks regions", record));
                }
                commit(transaction.lsn, transaction.items.into_iter().filter(|item| item.is_held).collect())?;
            }
            flag::UNMOUNT => {
                self.open.remove(&tid);
            }
            _ => return Err(damaged("an operation has unknown flags", record)),
        }
        self.check()
    }

    fn check(&self) -> Result<()> {
        if self.held > HELD_MAX { Err(too_much(HELD_MAX >> 20)) } else { Ok(()) }
    }
}

impl Transaction {
    /// Adds a region, or its beginning; how much more that holds.
    fn region(
        &mut self,
        data: &[u8],
        is_wanted: fn(&[u8]) -> Result<bool>,
        record: &Record,
    ) -> Result<usize> {
        if data.is_empty() {
            return Ok(0);
        }
        if self.header.is_empty() {
            if le32(data, 0) != TRANSACTION_MAGIC || data.len() > TRANSACTION_HEADER {
                return Err(damaged("a transaction has no header", record));
            }
            self.header.extend_from_slice(data);
            return Ok(0);
        }
        let mut more = 0;
        if self.items.last().is_none_or(|item| item.total == item.count) {
            let total = le16(data, 2);
            if data.len() < 4 || !(1..=REGIONS_MAX).contains(&total) {
                return Err(damaged("an item has no regions, or too many", record));
            }
            let is_held = is_wanted(data)?;
            self.items.push(Item { total, count: 0, is_held, bytes: Vec::new(), ends: Vec::new() });
            more += ITEM_COSTS;
        }
        let item = self.items.last_mut().expect("it was pushed");
        item.count += 1;
        if item.is_held {
            item.bytes.extend_from_slice(data);
            item.ends.push(item.bytes.len());
            more += data.len() + 8;
        }
        Ok(more)
    }

    /// Adds what goes on from the record before; how much more that holds.
    fn more(&mut self, data: &[u8]) -> Option<usize> {
        if self.header.len() < TRANSACTION_HEADER && self.items.is_empty() {
            self.header.extend_from_slice(data);
            return (self.header.len() <= TRANSACTION_HEADER).then_some(0);
        }
        let item = self.items.last_mut()?;
        if !item.is_held {
            return Some(0);
        }
        item.bytes.extend_from_slice(data);
        *item.ends.last_mut()? = item.bytes.len();
        Some(data.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(tid: u32, flags: u8, data: &[u8]) -> Vec<u8> {
        let len = u32::try_from(data.len()).expect("short");
        [&tid.to_be_bytes()[..], &len.to_be_bytes(), &[0x69, flags, 0, 0], data].concat()
    }

    fn record(operations: &[Vec<u8>]) -> Record {
        let count = u32::try_from(operations.len()).expect("a few");
        Record { at: 3, blocks: 2, lsn: 9, operations: count, body: operations.concat() }
    }

    fn begun(tid: u32) -> Vec<Vec<u8>> {
        let header = [&TRANSACTION_MAGIC.to_le_bytes()[..], &[0; 12]].concat();
        vec![operation(tid, flag::START, &[]), operation(tid, 0, &header)]
    }

    /// Adds the same records until that is refused, at most `times`.
    fn added(
        transactions: &mut Transactions,
        times: usize,
        mut next: impl FnMut(usize) -> Record,
    ) -> Result<()> {
        (0..times).try_for_each(|time| transactions.add(&next(time), &mut |_, _| Ok(())))
    }

    #[test]
    fn what_is_not_committed_is_held_up_to_a_bound() {
        let region = vec![1; 60_000];
        let item = [&[0x3b, 0x12, 2, 0][..], &[0; 52]].concat();
        let more = |_| record(&[operation(7, 0, &item), operation(7, 0, &region)]);
        let times = HELD_MAX / region.len() + 1;
        let mut transactions = Transactions::new(|_| Ok(true));
        transactions.add(&record(&begun(7)), &mut |_, _| Ok(())).expect("it is begun");
        let error = added(&mut transactions, times, more).expect_err("it is too much");
        assert_eq!(error.kind(), vellum_core::ErrorKind::Unsupported);
        // What nothing reads takes no room, and what was committed no more.
        let mut transactions = Transactions::new(|_| Ok(false));
        transactions.add(&record(&begun(7)), &mut |_, _| Ok(())).expect("it is begun");
        added(&mut transactions, times, more).expect("it is not held");
        let mut transactions = Transactions::new(|_| Ok(true));
        let whole = |_| {
            let more = [operation(7, 0, &item), operation(7, 0, &region), operation(7, flag::COMMIT, &[])];
            record(&[begun(7), more.to_vec()].concat())
        };
        added(&mut transactions, times, whole).expect("it was committed");
        assert_eq!(transactions.held, 0);
        // Transactions that are begun and have nothing.
        let mut transactions = Transactions::new(|_| Ok(true));
        let many = |time| {
            let first = u32::try_from(time).expect("small") * 1000;
            record(&(first..first + 1000).flat_map(begun).collect::<Vec<_>>())
        };
        assert!(added(&mut transactions, HELD_MAX / TRANSACTION_COSTS / 1000 + 2, many).is_err());
    }

    #[test]
    fn operations_out_of_place_are_damage_or_of_another_time() {
        let item = [0x3b, 0x12, 2, 0];
        for (operations, is_damage) in [
            (vec![operation(7, flag::CONTINUED, &[1; 8])], true),
            (vec![operation(7, flag::START, &[])], true),
            (vec![operation(7, 0x40, &[])], true),
            (vec![operation(7, 0, &[1; 2])], true),
            (vec![operation(7, 0, &item), operation(7, flag::COMMIT, &[])], true),
            (vec![operation(7, 0, &item)], false),
            (vec![operation(7, flag::UNMOUNT, &[]), operation(7, flag::COMMIT, &[])], false),
            (vec![operation(8, flag::COMMIT, &[]), operation(8, flag::CONTINUED, &[1; 8])], false),
        ] {
            let mut transactions = Transactions::new(|_| Ok(true));
            let added = transactions.add(&record(&[begun(7), operations].concat()), &mut |_, _| Ok(()));
            assert_eq!(added.is_err(), is_damage, "{:?}", added.err().map(|error| error.chain()));
        }
        // An operation that is longer than its record.
        let mut long = record(&begun(7));
        long.body[7] = 1;
        assert!(Transactions::new(|_| Ok(true)).add(&long, &mut |_, _| Ok(())).is_err());
    }

    #[test]
    fn a_header_may_go_over_records() {
        let header = [&TRANSACTION_MAGIC.to_le_bytes()[..], &[0; 12]].concat();
        let mut transactions = Transactions::new(|_| Ok(true));
        let parts = [
            vec![operation(7, flag::START, &[]), operation(7, flag::CONTINUE, &header[..4])],
            vec![operation(7, flag::CONTINUED | flag::END, &header[4..])],
            vec![operation(7, flag::CONTINUE, &[0x3b, 0x12, 1, 0])],
            vec![operation(7, flag::CONTINUED | flag::CONTINUE, &[5; 3])],
            vec![operation(7, flag::CONTINUED | flag::END, &[6; 2]), operation(7, flag::COMMIT, &[])],
        ];
        let mut seen = Vec::new();
        for part in parts {
            let mut see = |lsn, items: Vec<Item>| {
                seen.push((lsn, items[0].region(0).to_vec(), items[0].regions()));
                Ok(())
            };
            transactions.add(&record(&part), &mut see).expect("it is sound");
        }
        assert_eq!(seen, [(9, vec![0x3b, 0x12, 1, 0, 5, 5, 5, 6, 6], 1)]);
    }
}
