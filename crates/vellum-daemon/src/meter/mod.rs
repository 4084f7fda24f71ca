//! A record of a disk's requests: how long each takes, which are in flight, which failed and why.
//!
//! ```text
//!   valve ──► Metered ──► the disk, whichever it is now
//!                │ begin, end
//!                ▼
//!             Record      one for each disk, from its first opening to the end of the server
//! ```
//!
//! 1. The meter is behind the valve: a request that waits for a limit or a pause is not in flight yet, and
//!    its wait is not counted.
//! 2. A request costs two reads of the clock and a lock that it shares with an eighth of the others. The lock
//!    is never held across a wait.
//! 3. A client's mistake (a request past the end, a write to a read-only disk) does not count as a failure of
//!    the disk.
//! 4. The log has at most one line per disk and kind of failure in [`SAID_EVERY`], with the number of those
//!    suppressed since.

mod histogram;
mod troubles;

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use event_listener::Event;
use vellum_core::{
    Buffer, Clock, Disk, Error, ErrorKind, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan,
    LocalFuture, MergedExtent, PlaceKind, Result, Room, SharedDisk, WriteFlags, ZeroFlags, lock,
};

use crate::flash::HostFlash;

pub(crate) use histogram::Counts;
use histogram::Histogram;
pub(crate) use troubles::LastError;
use troubles::Troubles;

/// A request that has been in flight for this long is logged.
pub(crate) const LONG: Duration = Duration::from_secs(10);
/// How often the log repeats the same message.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// Requests in flight are spread over this many tables, by thread.
const TABLES: usize = 8;

/// A kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    Zeroes,
    Discard,
    Map,
}

impl Kind {
    pub(crate) const ALL: [Self; 6] =
        [Self::Read, Self::Write, Self::Flush, Self::Zeroes, Self::Discard, Self::Map];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Zeroes => "write-zeroes",
            Self::Discard => "discard",
            Self::Map => "map",
        }
    }

    /// Whether the image may have other bytes after it, and something to do in quiet times.
    fn changes(self) -> bool {
        !matches!(self, Self::Read | Self::Map)
    }
}

/// A request, for reports about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) kind: Kind,
    pub(crate) at: u64,
    pub(crate) len: u64,
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Flush => f.write_str("a flush"),
            kind => write!(f, "a {} of {} bytes at {:#x}", kind.name(), self.len, self.at),
        }
    }
}

/// What is known of a disk's requests.
pub(crate) struct Record {
    image: Mutex<String>,
    clock: Arc<dyn Clock>,
    holds_when_full: bool,
    times: [OnceLock<Box<Histogram>>; Kind::ALL.len()],
    under_way: [Mutex<Table>; TABLES],
    troubles: Mutex<Troubles>,
    is_poisoned: AtomicBool,
    is_full: AtomicBool,
    /// When it was last logged that requests take long; reset when they no longer do.
    said_long: Mutex<Option<Duration>>,
    /// There may be something to do in quiet times.
    pub(crate) work: Work,
    /// The flash cache of the server, whose failure has another remedy than that of an image.
    pub(crate) flash: OnceLock<Arc<HostFlash>>,
}

#[derive(Default)]
struct Table {
    rows: Vec<Option<(Request, Duration)>>,
    free: Vec<usize>,
}

/// Notifies the task that tends a disk of changes.
#[derive(Default)]
pub(crate) struct Work {
    is_there: AtomicBool,
    came: Event,
}

impl Work {
    fn has_come(&self) {
        // Most of the time it is known.
        if !self.is_there.load(Ordering::Relaxed) && !self.is_there.swap(true, Ordering::AcqRel) {
            self.came.notify(usize::MAX);
        }
    }

    /// Whether anything has changed since the last call.
    pub(crate) fn take(&self) -> bool {
        self.is_there.swap(false, Ordering::AcqRel)
    }

    /// Wakes the waiting task for another reason.
    pub(crate) fn wake(&self) {
        self.is_there.store(true, Ordering::Release);
        self.came.notify(usize::MAX);
    }

    /// Waits until something has come.
    pub(crate) async fn wait(&self) {
        loop {
            let came = self.came.listen();
            if self.is_there.load(Ordering::Acquire) {
                return;
            }
            came.await;
        }
    }
}

fn table_of_thread() -> usize {
    thread_local! {
        static TABLE: Cell<Option<usize>> = const { Cell::new(None) };
    }
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    TABLE.with(|table| {
        table.get().unwrap_or_else(|| {
            let next = NEXT.fetch_add(1, Ordering::Relaxed) % TABLES;
            table.set(Some(next));
            next
        })
    })
}

impl Record {
    /// `holds_when_full`: a request that finds no space is tried again, and its client gets no error.
    pub(crate) fn new(image: String, clock: Arc<dyn Clock>, holds_when_full: bool) -> Arc<Self> {
        Arc::new(Self {
            image: Mutex::new(image),
            clock,
            holds_when_full,
            times: Default::default(),
            under_way: Default::default(),
            troubles: Mutex::default(),
            is_poisoned: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
            said_long: Mutex::new(None),
            work: Work::default(),
            flash: OnceLock::new(),
        })
    }

    /// The image of its disk is another one from now on.
    pub(crate) fn is_of(&self, image: String) {
        *lock(&self.image) = image;
    }

    fn image(&self) -> String {
        lock(&self.image).clone()
    }

    fn begin(&self, request: Request) -> Entry<'_> {
        let (table, begun) = (table_of_thread(), self.clock.now());
        let mut rows = lock(&self.under_way[table]);
        let row = rows.free.pop().unwrap_or_else(|| {
            rows.rows.push(None);
            rows.rows.len() - 1
        });
        rows.rows[row] = Some((request, begun));
        Entry { record: self, table, row, request, begun }
    }

    /// All requests in flight, with their ages; the oldest first.
    pub(crate) fn under_way(&self) -> Vec<(Request, Duration)> {
        let now = self.clock.now();
        let mut all = Vec::new();
        for table in &self.under_way {
            let table = lock(table);
            all.extend(
                table.rows.iter().flatten().map(|(request, begun)| (*request, now.saturating_sub(*begun))),
            );
        }
        all.sort_by_key(|(_, since)| std::cmp::Reverse(*since));
        all
    }

    /// The times of a kind of request, if there were any.
    pub(crate) fn times(&self, kind: Kind) -> Option<Counts> {
        self.times[kind as usize].get().map(|times| times.counts())
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.is_poisoned.load(Ordering::Acquire)
    }

    /// Whether a request has failed for want of space, with no successful change since.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Acquire)
    }

    /// It was opened anew: what was wrong with it before is over.
    pub(crate) fn is_well_again(&self) {
        self.is_poisoned.store(false, Ordering::Release);
        self.is_full.store(false, Ordering::Release);
    }

    pub(crate) fn last_error(&self) -> Option<LastError> {
        lock(&self.troubles).last.clone()
    }

    /// How many requests failed, by kind of failure.
    pub(crate) fn failures(&self) -> Vec<(ErrorKind, u64)> {
        lock(&self.troubles).counts()
    }

    fn failed(&self, request: Request, error: &Error) {
        match error.kind() {
            // What clients do wrong, and what a disk cannot do quickly.
            ErrorKind::Invalid | ErrorKind::ReadOnly | ErrorKind::Unsupported => return,
            ErrorKind::Poisoned => self.is_poisoned.store(true, Ordering::Release),
            ErrorKind::NoSpace => self.is_full.store(true, Ordering::Release),
            _ => {}
        }
        let said = lock(&self.troubles).add(request, error, self.clock.now());
        let Some(more) = said else { return };
        let (image, why, more) = (self.image(), error.chain(), more_of_them(more));
        match error.kind() {
            ErrorKind::NoSpace if self.holds_when_full => tracing::warn!(
                "{image}: {request} waits for space, and later requests wait as well: {why}{more}; they are retried \
                 automatically, and fail when the server exits"
            ),
            _ if self.flash.get().is_some_and(|flash| flash.works().is_err()) => tracing::warn!(
                "{image}: {request} failed: {why}{more}; the disk refuses writes until the server is started again, which \
                 recovers its flash cache"
            ),
            _ if self.is_poisoned() => tracing::warn!(
                "{image}: {request} failed: {why}{more}; the disk refuses writes until `vellum export reopen`, which recovers it"
            ),
            _ => tracing::warn!("{image}: {request} failed: {why}{more}"),
        }
    }

    /// To be called now and then: logs requests that take long, and the number of suppressed failures.
    pub(crate) fn look(&self) {
        let now = self.clock.now();
        for (kind, more) in lock(&self.troubles).left_out(now) {
            tracing::warn!("{}: {more} more requests have failed ({kind:?})", self.image());
        }
        let under_way = self.under_way();
        let long = under_way.iter().filter(|(_, since)| *since >= LONG).count();
        let mut said = lock(&self.said_long);
        let is_due = said.is_none_or(|last| now.saturating_sub(last) >= SAID_EVERY);
        match (under_way.first().filter(|_| long > 0), *said) {
            (Some((request, since)), _) if is_due => {
                *said = Some(now);
                tracing::warn!(
                    "{}: the storage does not answer: {request} has been in flight for {} s, and {} other requests \
                     for more than {} s",
                    self.image(),
                    since.as_secs(),
                    long - 1,
                    LONG.as_secs(),
                );
            }
            (None, Some(_)) => {
                *said = None;
                tracing::warn!("{}: the storage answers again", self.image());
            }
            _ => {}
        }
    }
}

fn more_of_them(more: u64) -> String {
    if more == 0 { String::new() } else { format!(" (and {more} more like it since the last message)") }
}

/// A request in flight, until dropped.
struct Entry<'a> {
    record: &'a Record,
    table: usize,
    row: usize,
    request: Request,
    begun: Duration,
}

impl Entry<'_> {
    fn ended<T>(self, result: &Result<T>) {
        let Self { record, request, begun, .. } = &self;
        let times = record.times[request.kind as usize].get_or_init(Box::default);
        times.add(record.clock.now().saturating_sub(*begun));
        match result {
            Err(error) => record.failed(*request, error),
            Ok(_) if request.kind.changes() => {
                if record.is_full.load(Ordering::Relaxed) && request.kind != Kind::Flush {
                    record.is_full.store(false, Ordering::Release);
                }
                record.work.has_come();
            }
            Ok(_) => {}
        }
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        let mut table = lock(&self.record.under_way[self.table]);
        table.rows[self.row] = None;
        table.free.push(self.row);
    }
}

/// A disk whose requests are recorded.
pub(crate) struct Metered {
    inner: SharedDisk,
    record: Arc<Record>,
}

impl Metered {
    pub(crate) fn new(inner: SharedDisk, record: Arc<Record>) -> Arc<Self> {
        Arc::new(Self { inner, record })
    }

    fn request<'a, T: 'a>(
        &'a self,
        (kind, at, len): (Kind, u64, u64),
        future: LocalFuture<'a, Result<T>>,
    ) -> LocalFuture<'a, Result<T>> {
        Box::pin(async move {
            let entry = self.record.begin(Request { kind, at, len });
            let result = future.await;
            entry.ended(&result);
            result
        })
    }
}

impl Disk for Metered {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        let what = (Kind::Read, at.bytes(), buffer.len() as u64);
        self.request(what, self.inner.read(at, buffer))
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        let what = (Kind::Write, at.bytes(), data.len() as u64);
        self.request(what, self.inner.write(at, data, flags))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        let flush = async move {
            let result = self.inner.flush().await;
            if matches!(&result, Err(error) if error.kind() != ErrorKind::Poisoned)
                && matches!(self.inner.flush().await, Err(error) if error.kind() == ErrorKind::Poisoned)
            {
                // This is permanent, so it should be visible now and not only with the next write.
                self.record.is_poisoned.store(true, Ordering::Release);
            }
            result
        };
        self.request((Kind::Flush, 0, 0), Box::pin(flush))
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        let what = (Kind::Zeroes, span.start().bytes(), span.len());
        self.request(what, self.inner.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        let what = (Kind::Discard, span.start().bytes(), span.len());
        self.request(what, self.inner.discard(span, flags))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        let what = (Kind::Map, span.start().bytes(), span.len());
        self.request(what, self.inner.map(span))
    }

    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        let what = (Kind::Map, span.start().bytes(), span.len());
        self.request(what, self.inner.map_whole(span))
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        self.inner.tend(now)
    }

    fn filling(&self) -> Option<Filling> {
        self.inner.filling()
    }

    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        self.inner.fill(at, data)
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        self.inner.room()
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.close()
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::{block_on, poll_once};
    use vellum_core::MemoryDisk;
    use vellum_sim::World;

    use super::*;

    /// A disk that never answers a read, and has one answer for everything else.
    struct Odd(ErrorKind);

    impl Disk for Odd {
        fn geometry(&self) -> Geometry {
            MemoryDisk::new(4096).geometry()
        }

        fn read(&self, _at: GuestOffset, _buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
            Box::pin(std::future::pending())
        }

        fn write(&self, _at: GuestOffset, _data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            Box::pin(std::future::ready(Err(Error::new(self.0, "no"))))
        }

        fn flush(&self) -> LocalFuture<'_, Result<()>> {
            Box::pin(std::future::ready(Err(Error::new(self.0, "no"))))
        }

        fn write_zeroes(&self, _span: GuestSpan, _flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
            self.flush()
        }

        fn discard(&self, _span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            self.flush()
        }

        fn map(&self, _span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
            Box::pin(std::future::pending())
        }

        fn close(&self) -> LocalFuture<'_, Result<()>> {
            Box::pin(std::future::ready(Ok(())))
        }
    }

    fn write(disk: &Metered) -> LocalFuture<'_, Result<()>> {
        disk.write(GuestOffset::ZERO, Buffer::zeroed(512), WriteFlags::default())
    }

    #[test]
    fn what_is_under_way_is_known_and_forgotten() {
        let world = World::new(1);
        let record = Record::new("disk".to_owned(), world.clock(), false);
        let disk = Metered::new(Arc::new(Odd(ErrorKind::Io)), record.clone());
        world.run(async {
            let mut read = disk.read(GuestOffset::new(512), Buffer::zeroed(1024));
            assert!(poll_once(&mut read).await.is_none());
            world.sleep(Duration::from_secs(11)).await;
            let request = Request { kind: Kind::Read, at: 512, len: 1024 };
            let under_way = record.under_way();
            assert_eq!(under_way.len(), 1);
            assert!(under_way[0].0 == request && under_way[0].1 >= LONG, "{under_way:?}");
            record.look();
            assert!(lock(&record.said_long).is_some(), "it is said");
            drop(read);
            assert!(record.under_way().is_empty());
            record.look();
            assert!(lock(&record.said_long).is_none(), "and that it is over");
        });
    }

    #[test]
    fn failures_are_counted_and_make_a_state() {
        let world = World::new(1);
        for (kind, poisoned, full) in [
            (ErrorKind::Io, false, false),
            (ErrorKind::Poisoned, true, false),
            (ErrorKind::NoSpace, false, true),
        ] {
            let record = Record::new("disk".to_owned(), world.clock(), false);
            let disk = Metered::new(Arc::new(Odd(kind)), record.clone());
            world.run(async {
                for _ in 0..3 {
                    write(&disk).await.expect_err("it fails");
                }
            });
            assert_eq!((record.is_poisoned(), record.is_full()), (poisoned, full), "{kind:?}");
            assert_eq!(record.failures(), [(kind, 3)]);
            assert_eq!(record.last_error().expect("one").request.kind, Kind::Write);
            assert_eq!(record.times(Kind::Write).expect("some").count(), 3);
            record.is_well_again();
            assert!(!record.is_poisoned() && !record.is_full());
        }
        let record = Record::new("disk".to_owned(), world.clock(), false);
        let disk = Metered::new(Arc::new(Odd(ErrorKind::Invalid)), record.clone());
        block_on(write(&disk)).expect_err("it fails");
        assert!(record.failures().is_empty(), "that was the client's");
    }

    #[test]
    fn space_that_is_back_ends_the_state() {
        let world = World::new(1);
        let record = Record::new("disk".to_owned(), world.clock(), false);
        world.run(async {
            write(&Metered::new(Arc::new(Odd(ErrorKind::NoSpace)), record.clone())).await.expect_err("full");
            assert!(record.is_full());
            let disk = Metered::new(MemoryDisk::new(4096), record.clone());
            disk.flush().await.expect("it takes no space");
            assert!(record.is_full());
            write(&disk).await.expect("there is room");
            assert!(!record.is_full());
        });
    }

    #[test]
    fn who_tends_hears_of_changes_once() {
        let record = Record::new("disk".to_owned(), World::new(1).clock(), false);
        let disk = Metered::new(MemoryDisk::new(4096), record.clone());
        block_on(async {
            disk.read(GuestOffset::ZERO, Buffer::zeroed(1)).await.expect("read");
            let mut came = Box::pin(record.work.wait());
            assert!(poll_once(&mut came).await.is_none(), "a read changes nothing");
            write(&disk).await.expect("written");
            came.await;
            assert!(record.work.take() && !record.work.take());
        });
    }
}
