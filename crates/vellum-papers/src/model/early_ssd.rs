//! A solid-state drive of the first years: one request at a time, and blocks that have to be erased before they are
//! written again.
//!
//! ```text
//!   read ──▶ the flash is free: latency + bytes / rate ──▶ end
//!   write ─▶ the log of its block: appended      log full, or its log is wanted for another block ──▶ merge ──▶ end
//! ```
//!
//! 1. The mapping is by blocks. A block that is written has one of a few logs, to which writes of it are appended.
//! 2. The log of a block that was written from its start on, in order, takes the block's place: what the log lacks is
//!    copied, and the old block is erased. Any other log is merged: the whole block is copied, and log and block are erased.
//! 3. Where there is no log for a block, the one that was written longest ago is merged first, and the write waits.
//! 4. One operation at a time, reads behind merges too. A flush ends when all that came before has.
//!
//! Left out: a write cache, which drives of that time had little of, and wear.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use vellum_sim::model::{DriveModel, MediumCounts};
use vellum_sim::{Operation, Request};

use super::transfer;

/// What an early solid-state drive is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EarlySsdParameters {
    /// What to call it where a figure is printed.
    pub(crate) name: &'static str,
    /// Of a read, beside its bytes.
    pub(crate) read_latency: Duration,
    /// Bytes a second that are read.
    pub(crate) read_rate: u64,
    /// Bytes a second that are programmed.
    pub(crate) program_rate: u64,
    /// Of a write, beside its bytes.
    pub(crate) write_latency: Duration,
    /// The size of a block in bytes.
    pub(crate) block: u64,
    /// To erase a block.
    pub(crate) erase: Duration,
    /// How many blocks have a log at a time.
    pub(crate) logs: usize,
}

const US: fn(u64) -> Duration = Duration::from_micros;

impl EarlySsdParameters {
    /// The drive of the paper HVD, a Samsung of 64 GB of 2008.
    ///
    /// `read_latency` is fitted to H1, random reads 16 times as fast as the hard disk's. Rates: sheets of such drives (100
    /// and 80 MB/s). Block and erasing: sheets of such flash (64 pages of 2 KiB, 1.5 ms). The number of logs is a guess.
    pub(crate) fn samsung_2008() -> Self {
        Self {
            name: "SSD 2008",
            read_latency: US(READ_LATENCY_US),
            read_rate: 100_000_000,
            program_rate: 80_000_000,
            write_latency: US(100),
            block: 128 << 10,
            erase: US(1500),
            logs: 16,
        }
    }
}

/// In microseconds: the constant that H1 gives.
const READ_LATENCY_US: u64 = 210;

/// What was written to a block since it was merged.
#[derive(Debug)]
struct Log {
    block: u64,
    bytes: u64,
    /// Whether it has the start of the block in order.
    is_in_order: bool,
}

/// An early solid-state drive.
#[derive(Debug)]
pub(crate) struct EarlySsd {
    parameters: EarlySsdParameters,
    now: Duration,
    free: Duration,
    /// From the one that was written longest ago.
    logs: VecDeque<Log>,
    last: u64,
    ends: BTreeSet<(Duration, u64)>,
    counts: MediumCounts,
}

impl EarlySsd {
    /// A drive, idle, without logs.
    pub(crate) fn new(parameters: EarlySsdParameters) -> Self {
        Self {
            parameters,
            now: Duration::ZERO,
            free: Duration::ZERO,
            logs: VecDeque::new(),
            last: 0,
            ends: BTreeSet::new(),
            counts: MediumCounts::default(),
        }
    }

    /// What it takes to do without this log.
    fn merge(&self, log: &Log) -> Duration {
        let EarlySsdParameters { block, erase, read_rate, program_rate, .. } = self.parameters;
        let copy = |bytes: u64| transfer(bytes, read_rate) + transfer(bytes, program_rate);
        match log.is_in_order {
            true => copy(block - log.bytes) + erase,
            false => copy(block) + 2 * erase,
        }
    }

    /// What it takes to write there, within a block.
    fn append(&mut self, at: u64, len: u64) -> Duration {
        let (block, logs) = (self.parameters.block, self.parameters.logs.max(1));
        let number = at / block;
        let mut takes = transfer(len, self.parameters.program_rate);
        let mut log = match self.logs.iter().position(|log| log.block == number) {
            Some(index) => self.logs.remove(index).expect("it was found"),
            None => {
                while self.logs.len() >= logs {
                    let oldest = self.logs.pop_front().expect("there are some");
                    takes += self.merge(&oldest);
                }
                Log { block: number, bytes: 0, is_in_order: true }
            }
        };
        log.is_in_order &= at % block == log.bytes;
        log.bytes += len;
        if log.bytes >= block {
            takes += self.merge(&Log { bytes: block, ..log });
        } else {
            self.logs.push_back(log);
        }
        takes
    }

    fn write(&mut self, at: u64, len: u64) -> Duration {
        let (mut takes, mut from, end) = (self.parameters.write_latency, at, at + len);
        while from < end {
            let upto = (from / self.parameters.block + 1) * self.parameters.block;
            let now = upto.min(end) - from;
            takes += self.append(from, now);
            from += now;
        }
        takes
    }
}

impl DriveModel for EarlySsd {
    fn submit(&mut self, ticket: u64, request: &Request) {
        let (at, len) = (request.span.start().bytes(), request.span.len());
        let takes = match request.operation {
            Operation::Read => self.parameters.read_latency + transfer(len, self.parameters.read_rate),
            Operation::Write | Operation::WriteZeroes => self.write(at, len),
            Operation::Flush => {
                self.counts.flushes += 1;
                Duration::ZERO
            }
            Operation::Discard | Operation::SetLen | Operation::Preallocate => Duration::ZERO,
        };
        if matches!(request.operation, Operation::Read | Operation::Write | Operation::WriteZeroes) {
            self.counts.note(request.operation == Operation::Read, len, at.abs_diff(self.last));
            self.last = at + len;
        }
        self.counts.busy += takes;
        // An end is later than the request, also where it takes no time.
        self.free = self.free.max(request.now) + takes.max(Duration::from_nanos(1));
        self.ends.insert((self.free, ticket));
    }

    fn next(&self) -> Option<Duration> {
        self.ends.first().map(|(ends, _)| *ends)
    }

    fn advance(&mut self, now: Duration, ended: &mut Vec<u64>) {
        while let Some((_, ticket)) = self.ends.first().copied().filter(|(ends, _)| *ends <= now) {
            self.ends.pop_first();
            ended.push(ticket);
        }
        self.now = now.max(self.now);
    }

    fn counts(&self) -> MediumCounts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::ImageOffset;

    use super::*;

    /// How long these writes take, in microseconds, one after the other.
    fn writes(places: impl IntoIterator<Item = (u64, u64)>) -> u64 {
        let mut ssd = EarlySsd::new(EarlySsdParameters::samsung_2008());
        for (ticket, (at, len)) in (0..).zip(places) {
            let span = ImageOffset::new(at).span(len);
            let now = ssd.free;
            ssd.submit(ticket, &Request { operation: Operation::Write, span, now, in_flight: 0 });
        }
        u64::try_from(ssd.free.as_micros()).unwrap()
    }

    #[test]
    fn a_block_written_in_order_costs_one_erase_and_one_that_is_not_is_copied() {
        let block = EarlySsdParameters::samsung_2008().block;
        let in_order = writes((0..block / 16_384).map(|part| (part * 16_384, 16_384)));
        // Its bytes, the latency of each write, one erase.
        assert_eq!(in_order, 1638 + 8 * 100 + 1500);
        let backwards = writes((0..block / 16_384).rev().map(|part| (part * 16_384, 16_384)));
        assert_eq!(backwards, in_order + 1500 + 1638 + 1310 + 1);
    }

    #[test]
    fn more_blocks_than_there_are_logs_cost_a_merge_for_each_write() {
        let block = EarlySsdParameters::samsung_2008().block;
        let logs = EarlySsdParameters::samsung_2008().logs as u64;
        let round = |blocks: u64| {
            (0..4).flat_map(move |part| (0..blocks).map(move |at| (at * block + part * 4096, 4096)))
        };
        let (few, many) = (writes(round(logs)), writes(round(logs + 1)));
        assert!(many > 10 * few, "{few} {many}");
    }
}
