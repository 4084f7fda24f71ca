//! A solid-state drive: several channels to the flash, one link to the host, a write cache that is programmed
//! in the background.
//!
//! ```text
//!   read ──▶ first free way: latency ──▶ link ──▶ end
//!   write ─▶ link ──▶ latency ──▶ end        meanwhile the cache is programmed at a rate of its own
//!   flush ─▶ when what was written before is programmed: + base
//! ```
//!
//! A write costs whole pages of flash. The cache has room for as much as can be programmed in `cache_time`;
//! later writes wait. Left out: garbage collection (it costs nothing before the spare space is used up) and
//! the mapping's own writes.

use std::collections::BTreeSet;
use std::time::Duration;

use vellum_sim::model::{DriveModel, MediumCounts};
use vellum_sim::{Operation, Request};

use super::flushes::Flushes;
use super::transfer;

/// What a solid-state drive is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SsdParameters {
    /// What to call it where a figure is printed.
    pub(crate) name: &'static str,
    /// Of a small read, without the link.
    pub(crate) read_latency: Duration,
    /// Of a small write into the cache, without the link.
    pub(crate) write_latency: Duration,
    /// Reads that the flash serves at a time.
    pub(crate) ways: usize,
    /// Bytes a second between host and drive.
    pub(crate) link_rate: u64,
    /// Bytes a second from the cache to the flash.
    pub(crate) program_rate: u64,
    /// What a write costs at least there.
    pub(crate) page: u64,
    /// How far programming may lag behind.
    pub(crate) cache_time: Duration,
    /// Of a flush, beside what is not yet programmed.
    pub(crate) flush_base: Duration,
    /// What is in the cache survives a power cut, so a flush does not wait for it.
    pub(crate) is_protected: bool,
}

const US: fn(u64) -> Duration = Duration::from_micros;

impl SsdParameters {
    /// A consumer's SATA drive, as in the paper Selfie (840 EVO, on a host that let 250 MB/s through).
    ///
    /// Reads and writes of 4 KiB: 10,000 and 40,000 a second at depth 1, from reviews of the 850 EVO. Link:
    /// what Selfie's host reached. Programming: the sheet's sequential writes. Flush: not published; 1.0 to
    /// 1.7 ms are common. Ways and cache: guesses.
    pub(crate) fn consumer_sata() -> Self {
        Self {
            name: "SSD SATA",
            read_latency: US(85),
            write_latency: US(10),
            ways: 16,
            link_rate: 250_000_000,
            program_rate: 520_000_000,
            page: 8 << 10,
            cache_time: Duration::from_millis(100),
            flush_base: US(1300),
            is_protected: false,
        }
    }

    /// The cache of the paper `COWCache`, an Intel DC S3610 of 400 GB.
    ///
    /// Latencies, link and programming: its sheet (55 and 66 us, 550 MB/s read, 400 MB/s written). 25,000 random writes
    /// of 4 KiB a second are the sheet's too: so a write costs 16 KiB of programming at least. Its cache survives a
    /// power cut.
    pub(crate) fn data_centre_sata() -> Self {
        Self {
            name: "SSD S3610",
            read_latency: US(48),
            write_latency: US(58),
            ways: 16,
            link_rate: 550_000_000,
            program_rate: 400_000_000,
            page: 16 << 10,
            cache_time: Duration::from_millis(20),
            flush_base: US(58),
            is_protected: true,
        }
    }

    /// The store of that paper: NFS over `IPoIB` (1.6 GB/s, the paper) to an Intel P3700 (20 us, 1.7 GB/s written), with a
    /// round trip of 60 us and 50 us for a call, which are guesses. So many percent of these times.
    pub(crate) fn nfs_store(percent: u32) -> Self {
        let slower = |time: Duration| time * percent / 100;
        let rate = |rate: u64| rate * 100 / u64::from(percent.max(1));
        Self {
            name: "NFS over IPoIB",
            read_latency: slower(US(130)),
            write_latency: slower(US(130)),
            ways: 64,
            link_rate: rate(1_600_000_000),
            program_rate: rate(1_700_000_000),
            page: 4 << 10,
            cache_time: Duration::from_millis(20),
            flush_base: slower(US(130)),
            is_protected: true,
        }
    }
}

/// A solid-state drive.
#[derive(Debug)]
pub(crate) struct Ssd {
    parameters: SsdParameters,
    now: Duration,
    /// When each way is free.
    ways: Vec<Duration>,
    link_free: Duration,
    /// When all that was written is programmed.
    programmed: Duration,
    /// Where the last operation ended, for the counts.
    last: u64,
    ends: BTreeSet<(Duration, u64)>,
    flushes: Flushes,
    flush_ends: Duration,
    counts: MediumCounts,
}

impl Ssd {
    /// A drive, idle.
    pub(crate) fn new(parameters: SsdParameters) -> Self {
        Self {
            ways: vec![Duration::ZERO; parameters.ways.max(1)],
            parameters,
            now: Duration::ZERO,
            link_free: Duration::ZERO,
            programmed: Duration::ZERO,
            last: 0,
            ends: BTreeSet::new(),
            flushes: Flushes::default(),
            flush_ends: Duration::ZERO,
            counts: MediumCounts::default(),
        }
    }

    /// Over the link, no earlier than `from`.
    fn cross(&mut self, from: Duration, len: u64) -> Duration {
        self.link_free = self.link_free.max(from) + transfer(len, self.parameters.link_rate);
        self.link_free
    }

    fn read(&mut self, len: u64) -> Duration {
        let way = self.ways.iter_mut().min().expect("there is one");
        *way = (*way).max(self.now) + self.parameters.read_latency;
        let read = *way;
        self.cross(read, len)
    }

    fn write(&mut self, len: u64) -> Duration {
        let room = self.programmed.saturating_sub(self.parameters.cache_time);
        let arrives = self.cross(self.now.max(room), len);
        let pages = len.next_multiple_of(self.parameters.page);
        let programs = transfer(pages, self.parameters.program_rate);
        self.programmed = self.programmed.max(arrives) + programs;
        self.counts.busy += programs;
        arrives + self.parameters.write_latency
    }

    fn begin_flush(&mut self) {
        if self.flushes.begin() {
            self.counts.flushes += 1;
            let programmed = if self.parameters.is_protected { self.now } else { self.programmed };
            self.flush_ends = self.now.max(programmed) + self.parameters.flush_base;
        }
    }
}

impl DriveModel for Ssd {
    fn submit(&mut self, ticket: u64, request: &Request) {
        let (at, len) = (request.span.start().bytes(), request.span.len());
        let ends = match request.operation {
            Operation::Flush => {
                self.flushes.ask(ticket);
                return self.begin_flush();
            }
            Operation::Read => self.read(len),
            Operation::Write | Operation::WriteZeroes => self.write(len),
            Operation::Discard | Operation::SetLen | Operation::Preallocate => {
                self.now + self.parameters.write_latency
            }
        };
        if matches!(request.operation, Operation::Read | Operation::Write | Operation::WriteZeroes) {
            self.counts.note(request.operation == Operation::Read, len, at.abs_diff(self.last));
            self.last = at + len;
        }
        self.ends.insert((ends, ticket));
    }

    fn next(&self) -> Option<Duration> {
        let flush = self.flushes.is_running().then_some(self.flush_ends);
        let first = self.ends.first().map(|(ends, _)| *ends);
        flush.into_iter().chain(first).min()
    }

    fn advance(&mut self, now: Duration, ended: &mut Vec<u64>) {
        while let Some(time) = self.next().filter(|time| *time <= now) {
            self.now = time;
            if self.flushes.is_running() && self.flush_ends <= time {
                self.flushes.end(ended);
                self.begin_flush();
            } else if let Some((_, ticket)) = self.ends.pop_first() {
                ended.push(ticket);
            }
        }
        self.now = now.max(self.now);
    }

    fn counts(&self) -> MediumCounts {
        self.counts
    }
}
