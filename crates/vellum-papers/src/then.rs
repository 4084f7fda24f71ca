//! Drivers of virtual disks that the paper Selfie compared with: models of their order of operations, without
//! the data.
//!
//! ```text
//!   first write to a unit    QCOW2, 64 KiB   data ─ [flush ─ L2 block]                            [ ]: one at a time
//!                            QED, 64 KiB     [data ─ L2 block]
//!                            FVD, 1 MiB      data ─ [flush ─ sector of the journal]
//!   write to a mapped one    data
//!   flush                    flush
//! ```
//!
//! From the paper's text (its sections 2.3 and 3.1): units are allocated in the order of requests, at the end
//! of the image; QCOW2 and FVD flush between data and the pointer to it, QED does not; updates of metadata
//! are serialised, and QED does one allocating write at a time. An L2 block is 4 KiB, and a new one is
//! flushed before the L1 table points at it. One request updates an L2 block once.
//!
//! Left out, all of it in their favour: refcounts, the fill around a small write, reads of tables. Since the
//! workloads here have no base, FVD's bitmap is absent.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use vellum_core::{Buffer, ImageOffset, Result, SharedStorage};

const PAGE: u64 = 4096;
const SECTOR: u64 = 512;
/// The regions before the units: header, L1 table, journal.
const HEAD: u64 = 64 << 20;
/// Where FVD's journal is, which goes round.
const JOURNAL: u64 = 16 << 20;

/// Which of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Qcow2,
    Qed,
    Fvd,
}

impl Kind {
    fn unit(self) -> u64 {
        if self == Self::Fvd { 1 << 20 } else { 64 << 10 }
    }
}

/// An image of one.
pub(super) struct Then {
    kind: Kind,
    storage: SharedStorage,
    /// Held while metadata is updated; with QED, while something is allocated.
    updating: async_lock::Mutex<()>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    /// Unit of the disk to its place in the image.
    units: HashMap<u64, u64>,
    /// L2 blocks that exist, by what they map.
    tables: HashMap<u64, u64>,
    /// Tables that an L1 entry points at.
    linked: HashSet<u64>,
    end: u64,
    journal: u64,
}

impl Then {
    pub(super) fn new(kind: Kind, storage: SharedStorage) -> Self {
        let state = RefCell::new(State { end: HEAD, ..State::default() });
        Self { kind, storage, updating: async_lock::Mutex::new(()), state }
    }

    pub(super) async fn flush(&self) -> Result<()> {
        self.storage.flush().await
    }

    /// Reads what is there; where nothing is, nothing is read.
    pub(super) async fn read(&self, offset: u64, len: u64) -> Result<()> {
        let (mut at, end, unit) = (offset, offset + len, self.kind.unit());
        while at < end {
            let start = self.find(at);
            let mut stop = end.min((at / unit + 1) * unit);
            while stop < end && start.is_some() && self.find(stop) == start.map(|start| start + (stop - at)) {
                stop = end.min((stop / unit + 1) * unit);
            }
            if let Some(start) = start {
                let buffer = Buffer::zeroed(usize::try_from(stop - at).expect("a request is short"));
                self.storage.read(ImageOffset::new(start), buffer).await?;
            }
            at = stop;
        }
        Ok(())
    }

    async fn metadata(&self, at: u64, len: u64) -> Result<()> {
        let zeros = Buffer::zeroed(usize::try_from(len).expect("small"));
        self.storage.write(ImageOffset::new(at), zeros).await
    }

    pub(super) async fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let unit = self.kind.unit();
        let end = offset + data.len() as u64;
        let units = offset / unit..end.div_ceil(unit);
        let is_new = {
            let state = self.state.borrow();
            units.clone().any(|index| !state.units.contains_key(&index))
        };
        let _one = match is_new && self.kind == Kind::Qed {
            true => Some(self.updating.lock().await),
            false => None,
        };
        let mut new = Vec::new();
        {
            let mut state = self.state.borrow_mut();
            for index in units {
                if !state.units.contains_key(&index) {
                    let at = state.end;
                    state.end += unit;
                    state.units.insert(index, at);
                    new.push(index);
                }
            }
        }
        let mut at = offset;
        while at < end {
            let (start, mut stop) = (self.place(at), at);
            // As far as the image has it in one piece.
            while stop < end && self.place(stop) == start + (stop - at) {
                stop = end.min((stop / unit + 1) * unit);
            }
            let piece = |at: u64| usize::try_from(at - offset).expect("within the data");
            let bytes = Buffer::copy_of(&data[piece(at)..piece(stop)]);
            self.storage.write(ImageOffset::new(start), bytes).await?;
            at = stop;
        }
        if new.is_empty() {
            return Ok(());
        }
        match self.kind {
            Kind::Qed => self.update_tables(&new, false).await,
            Kind::Qcow2 => {
                let _one = self.updating.lock().await;
                self.storage.flush().await?;
                self.update_tables(&new, true).await
            }
            Kind::Fvd => {
                let _one = self.updating.lock().await;
                self.storage.flush().await?;
                let at = self.state.borrow().journal;
                self.state.borrow_mut().journal = (at + SECTOR) % JOURNAL;
                self.metadata(PAGE + at, SECTOR).await
            }
        }
    }

    fn place(&self, at: u64) -> u64 {
        self.find(at).expect("it was given out")
    }

    fn find(&self, at: u64) -> Option<u64> {
        let unit = self.kind.unit();
        self.state.borrow().units.get(&(at / unit)).map(|start| start + at % unit)
    }

    /// The L2 blocks of these units; the L1 table, too, where a block is new.
    async fn update_tables(&self, new: &[u64], is_ordered: bool) -> Result<()> {
        let mut tables: Vec<u64> = new.iter().map(|index| index / (PAGE / 8)).collect();
        tables.dedup();
        for table in tables {
            let at = {
                let mut state = self.state.borrow_mut();
                let end = state.end;
                let at = *state.tables.entry(table).or_insert(end);
                if at == end {
                    state.end += PAGE;
                }
                at
            };
            self.metadata(at, PAGE).await?;
            if self.state.borrow_mut().linked.insert(table) {
                if is_ordered {
                    self.storage.flush().await?;
                }
                self.metadata(PAGE + table * 8 / SECTOR * SECTOR, SECTOR).await?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vellum_core::{IoTally, MemoryStorage, Tallied};
    use vellum_sim::World;

    use super::*;

    /// What writes of this many KiB at these offsets, each with a flush, cost the host: writes, flushes, KiB.
    fn asked(kind: Kind, kib: usize, places: &[u64]) -> (u64, u64, u64) {
        let tally = Arc::new(IoTally::default());
        let image = Then::new(kind, Tallied::shared(MemoryStorage::new("image"), tally.clone()));
        World::new(0).run(async {
            for place in places {
                image.write(*place, &vec![1; kib << 10]).await.unwrap();
                image.flush().await.unwrap();
            }
        });
        let counts = tally.counts();
        (counts.writes, counts.flushes, counts.bytes_written.div_ceil(1024))
    }

    #[test]
    fn a_first_write_costs_what_the_paper_says() {
        let unit = 64 << 10;
        // The first makes a table: data, L2, L1. The second does not. The third is there already.
        assert_eq!(asked(Kind::Qcow2, 64, &[0]), (3, 3, 69));
        assert_eq!(asked(Kind::Qcow2, 64, &[0, unit]), (3 + 2, 3 + 2, 69 + 68));
        assert_eq!(asked(Kind::Qcow2, 64, &[0, unit, 0]), (6, 6, 69 + 68 + 64));
        assert_eq!(asked(Kind::Qed, 64, &[0, unit]), (3 + 2, 2, 69 + 68));
        assert_eq!(asked(Kind::Fvd, 64, &[0, unit]), (2 + 1, 2 + 1, 65 + 64), "one chunk of 1 MiB");
        assert_eq!(asked(Kind::Qcow2, 512, &[0]), (3, 3, 517), "one update for all");
    }

    #[test]
    fn what_lies_in_a_row_is_read_at_once_and_what_is_not_there_not_at_all() {
        let unit = 64 << 10;
        let tally = Arc::new(IoTally::default());
        let image = Then::new(Kind::Qcow2, Tallied::shared(MemoryStorage::new("image"), tally.clone()));
        World::new(0).run(async {
            for place in [0, 3 * unit, unit, 2 * unit] {
                image.write(place, &vec![1; 64 << 10]).await.unwrap();
            }
            image.read(0, 5 * unit).await.unwrap();
        });
        let counts = tally.counts();
        assert_eq!((counts.reads, counts.bytes_read), (3, 4 * unit), "the table lies behind the first unit");
    }
}
