//! A hard disk: one arm, one spindle, a queue, and optionally a write cache.
//!
//! ```text
//!   write ─▶ cache (runs, joined) ─── flush, or the cache is full ──▶ ┐ next: nearest above the head, then
//!   write, no cache ─▶ queue (neighbours joined) ───────────────────▶ ├ from the bottom (C-LOOK)  ─▶ arm ─▶ platter
//!   read ──────────▶ queue ─────────────────────────────────────────▶ ┘
//!
//!   an operation on the medium: seek(tracks) + wait until the sector comes round + bytes / rate
//! ```
//!
//! 1. A request is ready `overhead` after it arrived; for a queued request that time overlaps with the
//!    operation before.
//! 2. The next operation may begin where the head ended without a seek and without a revolution, if it is
//!    ready then.
//! 3. A cached write ends when it has crossed the link. A flush writes what was in the cache when it began,
//!    in C-LOOK order, and takes `flush_overhead` in addition, before that.
//! 4. Positions are bytes; a track is what passes in one revolution. Tracks are skewed so that a sequential
//!    run continues without a gap.
//!
//! 5. A drive that reads on has, for a read that continues the last one, what has passed under the head since, as far as
//!    it reads on; any other operation ends that.
//!
//! Left out: zones of different density, heads (a track is a cylinder), defects, and destaging while idle: the cache
//! is written when a flush requires it or when it is full.

use std::collections::BTreeMap;
use std::time::Duration;

use vellum_sim::model::{DriveModel, MediumCounts};
use vellum_sim::{Operation, Request};

use super::flushes::Flushes;
use super::transfer;

/// How long the arm takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seek {
    /// To the next track.
    pub(crate) track: Duration,
    /// Over a third of all tracks.
    pub(crate) average: Duration,
    /// Over all of them.
    pub(crate) full: Duration,
}

/// What a hard disk is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HddParameters {
    /// What to call it where a figure is printed.
    pub(crate) name: &'static str,
    /// Bytes.
    pub(crate) capacity: u64,
    /// One turn.
    pub(crate) turn: Duration,
    /// The arm, before a read.
    pub(crate) read_seek: Seek,
    /// The arm, before a write: it settles longer.
    pub(crate) write_seek: Seek,
    /// Bytes a second under the head.
    pub(crate) media_rate: u64,
    /// Bytes a second between host and drive.
    pub(crate) link_rate: u64,
    /// From a request's coming until the arm may move for it.
    pub(crate) overhead: Duration,
    /// Of a flush, beside what it writes.
    pub(crate) flush_overhead: Duration,
    /// What the write cache holds; 0: it is off.
    pub(crate) cache_bytes: u64,
    /// The longest operation that neighbours are joined to.
    pub(crate) joined_bytes_max: u64,
    /// How far it reads on behind a read; 0: not at all.
    pub(crate) read_ahead_bytes: u64,
}

const US: fn(u64) -> Duration = Duration::from_micros;

impl HddParameters {
    /// A desktop drive of 7,200 turns a minute with its cache on, as in the papers Selfie (WD3200AAJS) and
    /// *Mitigating Sync Amplification*.
    ///
    /// Turn: arithmetic. Rate: Selfie's peak. Seeks and overhead: the sheet of an older drive of the family
    /// (WD400BB), since that of the WD3200AAJS was not at hand. `flush_overhead` is fitted to one figure,
    /// Selfie's host at 64 KiB and one thread (about 6 MB/s; the model says 7.3). Cache size: a guess of no
    /// consequence where each write is flushed.
    pub(crate) fn desktop_7200() -> Self {
        let seek = |average| Seek { track: US(2000), average: US(average), full: US(21_000) };
        Self {
            name: "HDD 7200 rpm",
            capacity: 320_000_000_000,
            turn: Duration::from_nanos(8_333_333),
            read_seek: seek(8900),
            write_seek: seek(10_900),
            media_rate: 100_000_000,
            link_rate: 300_000_000,
            overhead: US(300),
            flush_overhead: US(1000),
            cache_bytes: 8 << 20,
            joined_bytes_max: 512 << 10,
            read_ahead_bytes: 0,
        }
    }

    /// A Barracuda 7200.12 of 500 GB, as in the paper HVD, its cache on.
    ///
    /// Turn: arithmetic. Seeks, rate, capacity and cache: its sheet as it is remembered (8.5 and 9.5 ms on average, 1 ms to
    /// the next track, 125 MB/s, 16 MB). Full seeks, the flush and the overhead: those of [`desktop_7200`](Self::desktop_7200).
    /// It reads on behind a read, as drives do: half a megabyte, a guess.
    pub(crate) fn barracuda_7200() -> Self {
        let seek = |average, track| Seek { track: US(track), average: US(average), full: US(21_000) };
        Self {
            name: "HDD Barracuda",
            capacity: 500_000_000_000,
            read_seek: seek(8500, 1000),
            write_seek: seek(9500, 1200),
            media_rate: 125_000_000,
            cache_bytes: 16 << 20,
            read_ahead_bytes: 512 << 10,
            ..Self::desktop_7200()
        }
    }

    /// A 2.5-inch SAS drive of 10,000 turns a minute, as in the paper FVD (MAY2073RC), with the write cache
    /// off, as drives for servers come.
    ///
    /// Turn: arithmetic. Capacity: the drive's name. All the rest is a guess from drives of its time: its
    /// data sheet was not at hand. So its figures are always shown beside those of other drives.
    pub(crate) fn server_10k() -> Self {
        let seek = |average| Seek { track: US(300), average: US(average), full: US(10_000) };
        Self {
            name: "HDD 10k rpm",
            capacity: 73_400_000_000,
            turn: Duration::from_nanos(5_990_000),
            read_seek: seek(4000),
            write_seek: seek(4500),
            media_rate: 75_000_000,
            link_rate: 300_000_000,
            overhead: US(200),
            flush_overhead: US(500),
            cache_bytes: 0,
            joined_bytes_max: 512 << 10,
            read_ahead_bytes: 0,
        }
    }

    /// The same drive with other seeks: this percentage of the original ones. For the band around a figure.
    #[must_use]
    pub(crate) fn with_seeks_percent(mut self, percent: u32) -> Self {
        for seek in [&mut self.read_seek, &mut self.write_seek] {
            for time in [&mut seek.track, &mut seek.average, &mut seek.full] {
                *time = *time * percent / 100;
            }
        }
        self
    }

    fn track_bytes(&self) -> u64 {
        let nanos = self.turn.as_nanos() * u128::from(self.media_rate) / 1_000_000_000;
        u64::try_from(nanos).unwrap_or(u64::MAX).max(1)
    }

    /// The seek over this many tracks: a + b √d up to a third of all tracks, linear from there.
    fn seek(&self, is_read: bool, tracks: u64) -> Duration {
        if tracks == 0 {
            return Duration::ZERO;
        }
        let Seek { track, average, full } = if is_read { &self.read_seek } else { &self.write_seek };
        let all = (self.capacity / self.track_bytes()).max(6);
        let third = all / 3;
        let nanos = |time: &Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // A root with ten binary digits behind the point.
        let root = |value: u64| (value << 20).isqrt();
        let (from, to, part, whole) = match tracks {
            near if near <= third => (track, average, root(near) - root(1), root(third) - root(1)),
            far => (average, full, far.min(all) - third, all - third),
        };
        let way = u128::from(nanos(to) - nanos(from)) * u128::from(part) / u128::from(whole.max(1));
        *from + Duration::from_nanos(u64::try_from(way).unwrap_or(u64::MAX))
    }
}

/// A request in the queue of the medium.
#[derive(Debug, Clone)]
struct Pending {
    ticket: u64,
    is_read: bool,
    at: u64,
    len: u64,
    ready: Duration,
}

/// What the arm does.
#[derive(Debug)]
struct Work {
    ends: Duration,
    /// The requests that wait for it; none when it comes from the cache.
    tickets: Vec<u64>,
}

/// A hard disk.
#[derive(Debug)]
pub(crate) struct Hdd {
    parameters: HddParameters,
    now: Duration,
    /// Where the head is, in bytes from the start of the disk.
    head: u64,
    /// When it came there, if the last operation was a read.
    passed: Option<Duration>,
    arm: Option<Work>,
    queue: Vec<Pending>,
    /// Runs in the cache that no flush has taken: start to end, joined.
    dirty: BTreeMap<u64, u64>,
    dirty_bytes: u64,
    /// Runs that the flush has taken and that are not written.
    due: BTreeMap<u64, u64>,
    /// When the flush may begin to write.
    due_from: Duration,
    flushes: Flushes,
    /// Writes on their way over the link into the cache, by when they arrive.
    crossing: BTreeMap<(Duration, u64), (u64, u64)>,
    link_free: Duration,
    counts: MediumCounts,
}

impl Hdd {
    /// A disk, its head at the start.
    pub(crate) fn new(parameters: HddParameters) -> Self {
        Self {
            parameters,
            now: Duration::ZERO,
            head: 0,
            passed: None,
            arm: None,
            queue: Vec::new(),
            dirty: BTreeMap::new(),
            dirty_bytes: 0,
            due: BTreeMap::new(),
            due_from: Duration::ZERO,
            flushes: Flushes::default(),
            crossing: BTreeMap::new(),
            link_free: Duration::ZERO,
            counts: MediumCounts::default(),
        }
    }

    fn is_full(&self) -> bool {
        self.dirty_bytes > self.parameters.cache_bytes
    }

    /// Whether something that arrived may leave: a full cache keeps its writes waiting.
    fn arrival(&self) -> Option<Duration> {
        let ((arrives, _), _) = self.crossing.first_key_value()?;
        (!self.is_full()).then_some((*arrives).max(self.now))
    }

    /// What may be done next, if the arm is free: from when, and what.
    fn choice(&self) -> Option<(Duration, Choice)> {
        if self.arm.is_some() {
            return None;
        }
        // What is ready now goes in the order of its place; when nothing is, the arm waits for the first.
        let first_ready = self.queue.iter().map(|pending| pending.ready).min();
        let from_due = (!self.due.is_empty()).then_some(self.due_from);
        let from_dirty = (self.is_full() && self.due.is_empty()).then_some(self.now);
        let from = [first_ready, from_due, from_dirty].into_iter().flatten().min()?.max(self.now);
        let above = |at: u64| (at < self.head, at);
        let queued = self.queue.iter().enumerate().filter(|(_, pending)| pending.ready <= from);
        let queued = queued.map(|(index, pending)| (above(pending.at), Choice::Queued(index)));
        let run = |runs: &BTreeMap<u64, u64>, choice: fn(u64) -> Choice| {
            let next = runs.range(self.head..).next().or_else(|| runs.first_key_value());
            next.map(|(at, _)| (above(*at), choice(*at)))
        };
        let due = from_due.filter(|ready| *ready <= from).and_then(|_| run(&self.due, Choice::Due));
        let dirty = from_dirty.and_then(|_| run(&self.dirty, Choice::Dirty));
        queued.chain(due).chain(dirty).min_by_key(|(place, _)| *place).map(|(_, choice)| (from, choice))
    }

    fn start(&mut self, from: Duration, choice: Choice) {
        let (is_read, at, end, tickets) = match choice {
            Choice::Queued(index) => self.take_queued(index, from),
            Choice::Due(at) => (false, at, self.due.remove(&at).expect("chosen of these"), Vec::new()),
            Choice::Dirty(at) => {
                let end = self.dirty.remove(&at).expect("chosen of these");
                (false, at, end, Vec::new())
            }
        };
        if matches!(choice, Choice::Due(_) | Choice::Dirty(_)) {
            self.dirty_bytes -= end - at;
        }
        let parameters = &self.parameters;
        let track = parameters.track_bytes();
        let tracks = (at / track).abs_diff(self.head / track);
        // Going on where the head is crosses to the next track within the skew.
        let arrives = match at == self.head {
            true => from,
            false => from + parameters.seek(is_read, tracks),
        };
        let turn = parameters.turn.as_nanos();
        let angle = u128::from(at % track) * turn / u128::from(track);
        let wait = (angle + turn - arrives.as_nanos() % turn) % turn;
        // What has passed by no more than that is a rounded nanosecond, not a turn.
        let wait = if wait > turn - turn / 128 { 0 } else { wait };
        let begins = arrives + Duration::from_nanos(u64::try_from(wait).unwrap_or(0));
        let ends = begins + transfer(end - at, parameters.media_rate);
        let reads_on = transfer(parameters.read_ahead_bytes, parameters.media_rate);
        let on = self.passed.filter(|passed| is_read && at == self.head && from <= *passed + reads_on);
        let read_on = on.map(|passed| passed + transfer(end - at, parameters.media_rate));
        let ends = read_on.map_or(ends, |read| read.max(from));
        self.passed = is_read.then_some(read_on.unwrap_or(ends));
        self.counts.note(is_read, end - at, at.abs_diff(self.head));
        self.counts.busy += ends - from;
        self.head = end;
        self.arm = Some(Work { ends, tickets });
    }

    /// Takes a request, and its neighbours behind it that have arrived by then.
    fn take_queued(&mut self, index: usize, from: Duration) -> (bool, u64, u64, Vec<u64>) {
        let Pending { ticket, is_read, at, len, .. } = self.queue.remove(index);
        let (mut end, mut tickets) = (at + len, vec![ticket]);
        let follows = |pending: &Pending, end: u64, max: u64| {
            let fits = end + pending.len - at <= max;
            pending.is_read == is_read && pending.at == end && fits && pending.ready <= from
        };
        let max = self.parameters.joined_bytes_max;
        while let Some(next) = self.queue.iter().position(|pending| follows(pending, end, max)) {
            let next = self.queue.remove(next);
            end += next.len;
            tickets.push(next.ticket);
        }
        (is_read, at, end, tickets)
    }

    /// A write has crossed the link: it joins what it touches in the cache.
    fn cache(&mut self, mut at: u64, mut end: u64) {
        let touched: Vec<(u64, u64)> = self.dirty.range(..=end).rev().map(|(at, end)| (*at, *end)).collect();
        let begins = at;
        for (start, stop) in touched.into_iter().take_while(|(_, stop)| *stop >= begins) {
            self.dirty.remove(&start);
            self.dirty_bytes -= stop - start;
            (at, end) = (at.min(start), end.max(stop));
        }
        self.dirty.insert(at, end);
        self.dirty_bytes += end - at;
    }

    fn begin_flush(&mut self) {
        if self.flushes.begin() {
            self.counts.flushes += 1;
            self.due = std::mem::take(&mut self.dirty);
            self.due_from = self.now + self.parameters.flush_overhead;
        }
    }

    /// Whether the flush has nothing left to write, from when on.
    fn flush_ends(&self) -> Option<Duration> {
        let is_done = self.flushes.is_running() && self.due.is_empty() && self.arm.is_none();
        is_done.then(|| self.due_from.max(self.now))
    }
}

/// What the arm may do next.
#[derive(Debug, Clone, Copy)]
enum Choice {
    Queued(usize),
    Due(u64),
    Dirty(u64),
}

impl DriveModel for Hdd {
    fn submit(&mut self, ticket: u64, request: &Request) {
        let (at, len) = (request.span.start().bytes(), request.span.len());
        let ready = request.now + self.parameters.overhead;
        match request.operation {
            Operation::Flush => {
                self.flushes.ask(ticket);
                self.begin_flush();
            }
            Operation::Write | Operation::WriteZeroes if self.parameters.cache_bytes > 0 => {
                let begins = ready.max(self.link_free);
                self.link_free = begins + transfer(len, self.parameters.link_rate);
                self.crossing.insert((self.link_free, ticket), (at, at + len));
            }
            Operation::Read | Operation::Write | Operation::WriteZeroes => {
                let is_read = request.operation == Operation::Read;
                self.queue.push(Pending { ticket, is_read, at, len, ready });
            }
            // Nothing reaches the medium for these.
            Operation::Discard | Operation::SetLen | Operation::Preallocate => {
                self.crossing.insert((ready, ticket), (0, 0));
            }
        }
    }

    fn next(&self) -> Option<Duration> {
        let arm = self.arm.as_ref().map(|work| work.ends);
        let choice = self.choice().map(|(from, _)| from);
        [arm, self.arrival(), self.flush_ends(), choice].into_iter().flatten().min()
    }

    fn advance(&mut self, now: Duration, ended: &mut Vec<u64>) {
        while let Some(time) = self.next().filter(|time| *time <= now) {
            self.now = time;
            if let Some(work) = self.arm.take_if(|work| work.ends <= time) {
                ended.extend(work.tickets);
            } else if self.arrival().is_some_and(|arrives| arrives <= time) {
                let ((_, ticket), (at, end)) = self.crossing.pop_first().expect("one has arrived");
                if at < end {
                    self.cache(at, end);
                }
                ended.push(ticket);
            } else if self.flush_ends().is_some_and(|ends| ends <= time) {
                self.flushes.end(ended);
                self.begin_flush();
            } else if let Some((from, choice)) = self.choice() {
                self.start(from, choice);
            }
        }
        self.now = now.max(self.now);
    }

    fn counts(&self) -> MediumCounts {
        self.counts
    }
}
