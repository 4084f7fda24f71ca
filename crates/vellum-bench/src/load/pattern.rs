//! What a guest requests of a disk, over any transport: its reads, writes and flushes, one after the other.

use vellum_core::{Error, Random, Result};

use super::workload::BLOCK;

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// 4 KiB anywhere are read.
    Read,
    /// 4 KiB anywhere are written where something was.
    Overwrite,
    /// 4 KiB are written, each to 64 KiB that were never written.
    Allocate,
    /// 1 MiB after the other is read.
    Sequential,
    /// Seven reads to three writes, of 4 KiB at random offsets, and a flush after this many writes.
    Mixed,
}

/// How many writes of [`Pattern::Mixed`] there are for each flush.
pub(crate) const WRITES_PER_FLUSH: u32 = 32;

/// How many of 100 requests of [`Pattern::Mixed`] are reads.
pub(crate) const READ_PERCENT: u64 = 70;

/// The part of a fresh disk that one write makes its own: a cluster of qcow2, a unit of the native format.
const UNIT: u64 = 64 << 10;

/// An odd number: multiples of it meet every unit of a power of two once, in an order without neighbours.
const STRIDE: u64 = 0x9E37_79B1;

/// A guest's behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) pattern: Pattern,
    /// Requests in flight on each queue.
    pub(crate) depth: u16,
    /// Queues, or connections, or jobs of fio.
    pub(crate) queues: u16,
}

impl Load {
    /// A short name, for choosing it.
    pub(crate) fn id(&self) -> String {
        let pattern = match self.pattern {
            Pattern::Read => "read",
            Pattern::Overwrite => "overwrite",
            Pattern::Allocate => "allocate",
            Pattern::Sequential => "sequential",
            Pattern::Mixed => "mixed",
        };
        format!("{pattern}-d{}-q{}", self.depth, self.queues)
    }

    /// Bytes of one request.
    pub(crate) fn len(&self) -> usize {
        match self.pattern {
            Pattern::Sequential => 1 << 20,
            _ => BLOCK,
        }
    }

    /// What the guest does on one of its queues to a disk of `size` bytes. The same seed gives the same
    /// offsets.
    pub(crate) fn asks(&self, size: u64, queue: u16, seed: u64) -> Result<Asks> {
        let (queue, queues) = (u64::from(queue), u64::from(self.queues));
        let share = size / self.len() as u64 / queues;
        let units = (size / UNIT).checked_ilog2().map_or(0, |bits| 1 << bits);
        if share == 0 || units == 0 {
            return Err(Error::invalid(format!("a disk of {size} bytes is too small for {}", self.id())));
        }
        let random = Random::from_seed(seed.wrapping_mul(1000).wrapping_add(queue));
        let (len, blocks) = (self.len() as u64, size / BLOCK as u64);
        Ok(Asks {
            pattern: self.pattern,
            queue,
            queues,
            len,
            share,
            blocks,
            units,
            done: 0,
            writes: 0,
            random,
        })
    }
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    Read(u64),
    Write(u64),
    Flush,
}

/// The requests of one queue.
pub(crate) struct Asks {
    pattern: Pattern,
    queue: u64,
    queues: u64,
    len: u64,
    /// Requests that find room in the queue's own part of the disk.
    share: u64,
    blocks: u64,
    units: u64,
    done: u64,
    /// Since the last flush.
    writes: u32,
    random: Random,
}

impl Asks {
    /// The next one; fails when every unit of a fresh disk has been written.
    pub(crate) fn next(&mut self) -> Result<Ask> {
        let done = self.done;
        self.done += 1;
        Ok(match self.pattern {
            Pattern::Read => Ask::Read(self.anywhere()),
            Pattern::Overwrite => Ask::Write(self.anywhere()),
            Pattern::Sequential => Ask::Read((self.queue * self.share + done % self.share) * self.len),
            Pattern::Allocate => {
                let index = done * self.queues + self.queue;
                if index >= self.units {
                    return Err(Error::invalid(
                        "the fresh disk is full: say fewer --seconds or a larger --size",
                    ));
                }
                let inside = self.random.below(UNIT / BLOCK as u64) * BLOCK as u64;
                Ask::Write(index.wrapping_mul(STRIDE) % self.units * UNIT + inside)
            }
            Pattern::Mixed if self.writes == WRITES_PER_FLUSH => {
                self.writes = 0;
                Ask::Flush
            }
            Pattern::Mixed if self.random.below(100) < READ_PERCENT => Ask::Read(self.anywhere()),
            Pattern::Mixed => {
                self.writes += 1;
                Ask::Write(self.anywhere())
            }
        })
    }

    fn anywhere(&mut self) -> u64 {
        self.random.below(self.blocks) * BLOCK as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn asks(pattern: Pattern, size: u64, queues: u16) -> Vec<Asks> {
        let load = Load { pattern, depth: 1, queues };
        (0..queues).map(|queue| load.asks(size, queue, 7).unwrap()).collect()
    }

    #[test]
    fn two_queues_allocate_each_unit_once_and_no_more() {
        let mut units = BTreeSet::new();
        for mut queue in asks(Pattern::Allocate, 16 << 20, 2) {
            for _ in 0..128 {
                let Ask::Write(at) = queue.next().unwrap() else { panic!("it writes") };
                assert!(at % 4096 == 0 && at < 16 << 20 && units.insert(at / UNIT), "{at:#x}");
            }
            assert!(queue.next().is_err());
        }
        assert_eq!(units.len(), 256);
    }

    #[test]
    fn a_mixed_load_reads_seven_of_ten_and_flushes_after_32_writes() {
        let mut queue = asks(Pattern::Mixed, 1 << 20, 1).remove(0);
        let (mut reads, mut writes, mut flushes) = (0, 0, 0);
        for _ in 0..10_000 {
            match queue.next().unwrap() {
                Ask::Read(_) => reads += 1,
                Ask::Write(_) => writes += 1,
                Ask::Flush => flushes += 1,
            }
        }
        assert!((6_700..7_200).contains(&reads), "{reads}");
        assert_eq!(flushes, writes / WRITES_PER_FLUSH);
    }

    #[test]
    fn queues_that_go_in_sequence_have_parts_of_their_own() {
        let mut places = asks(Pattern::Sequential, 5 << 20, 2)
            .into_iter()
            .map(|mut queue| [queue.next().unwrap(), queue.next().unwrap(), queue.next().unwrap()]);
        assert_eq!(places.next(), Some([0, 1, 0].map(|mib: u64| Ask::Read(mib << 20))));
        assert_eq!(places.next(), Some([2, 3, 2].map(|mib: u64| Ask::Read(mib << 20))));
        assert!(Load { pattern: Pattern::Sequential, depth: 4, queues: 2 }.asks(1 << 20, 0, 1).is_err());
    }
}
