//! Watches a seam: every request that passes from one side to the other is checked against the contract and
//! counted.
//!
//! A request that comes from outside was checked by the export. Here an invalid one is refused all the same,
//! so that a format never sees it, and an answer that breaks the contract ends the disk before it reaches a
//! guest.
//!
//! 1. Requests stay inside the disk, and a read-only disk gets no writes (contract 8).
//! 2. A read returns as many bytes as were requested, in the memory that was lent for them.
//! 3. A map covers the run from its start, in order and without gaps.
//! 4. A future that was polled is polled to its end (contract 10); those that are not are counted as
//!    `abandoned`.
//!
//! 5. A panic below, or in a check here, breaks this disk and no other: the request that met it fails, and so
//!    do all later requests, including close. An engine that has broken its own rules must not continue to
//!    write. The same goes for a change that was dropped half way (4). One interested party is notified, once
//!    ([`CheckedDisk::when_broken`]).
//!
//! Its counters are the guest's operations; [`HostTally`](crate::HostTally) counts their cost on the host.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_lite::FutureExt as _;

use crate::disk::{
    Disk, Extent, Filled, Filling, Geometry, MergedExtent, PlaceKind, Room, SharedDisk, WriteFlags, ZeroFlags,
};
use crate::losses::Losses;
use crate::tally::{IoCounts, IoTally};
use crate::units::{GuestOffset, GuestSpan};
use crate::{Buffer, Error, ErrorKind, LocalFuture, Result};

/// A disk that holds both sides to the contract.
pub struct CheckedDisk {
    inner: SharedDisk,
    tally: Arc<IoTally>,
    errors: AtomicU64,
    abandoned: AtomicU64,
    is_broken: AtomicBool,
    when_broken: OnceLock<Tell>,
}

/// Called with the reason when a disk breaks.
type Tell = Box<dyn Fn(&str) + Send + Sync>;

impl CheckedDisk {
    /// Watches every request to `inner` through this handle.
    pub fn new(inner: SharedDisk) -> Arc<Self> {
        Arc::new(Self {
            inner,
            tally: Arc::default(),
            errors: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
            is_broken: AtomicBool::new(false),
            when_broken: OnceLock::new(),
        })
    }

    /// The guest operations so far.
    pub fn counts(&self) -> IoCounts {
        self.tally.counts()
    }

    /// How many requests failed.
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// How many requests were dropped half way.
    pub fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Whether a panic, or a change that was dropped half way, has ended it.
    pub fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    /// Sets a function that is called when the disk breaks, with the reason, on any thread. Called once,
    /// before the disk is used.
    pub fn when_broken(&self, notify: impl Fn(&str) + Send + Sync + 'static) {
        let is_first = self.when_broken.set(Box::new(notify)).is_ok();
        debug_assert!(is_first, "at most one is notified");
    }

    /// The disk was opened again and works once more.
    pub fn mend(&self) {
        self.is_broken.store(false, Ordering::Release);
    }

    fn break_down(&self, why: &str) {
        if !self.is_broken.swap(true, Ordering::AcqRel)
            && let Some(notify) = self.when_broken.get()
        {
            notify(why);
        }
    }

    fn sound(&self) -> Result<()> {
        if self.is_broken() {
            return Err(broken());
        }
        Ok(())
    }

    fn span(&self, at: GuestOffset, len: usize) -> Result<GuestSpan> {
        let span = GuestSpan::checked(at, len as u64)
            .ok_or_else(|| Error::invalid(format!("a request of {len} bytes at {at} exceeds 2^64")))?;
        self.inside(span)
    }

    fn inside(&self, span: GuestSpan) -> Result<GuestSpan> {
        let size = self.inner.geometry().size;
        if span.end().bytes() > size {
            return Err(Error::invalid(format!(
                "the request {span} extends past the end of the disk at {size:#x}"
            )));
        }
        Ok(span)
    }

    fn writable(&self) -> Result<()> {
        if self.inner.geometry().read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "the disk is read-only"));
        }
        Ok(())
    }

    fn watch<'a, T>(&'a self, future: impl Future<Output = Result<T>> + 'a) -> LocalFuture<'a, Result<T>> {
        self.watch_as(false, future)
    }

    fn watch_as<'a, T>(
        &'a self,
        changes: bool,
        future: impl Future<Output = Result<T>> + 'a,
    ) -> LocalFuture<'a, Result<T>> {
        Box::pin(async move {
            self.sound()?;
            let mut guard = Abandoned { disk: self, changes, ended: false };
            let result = match AssertUnwindSafe(future).catch_unwind().await {
                Ok(result) => result,
                Err(panic) => {
                    self.break_down(&words_of(&*panic));
                    Err(broken())
                }
            };
            guard.ended = true;
            if result.is_err() {
                self.errors.fetch_add(1, Ordering::Relaxed);
            }
            result
        })
    }
}

impl Disk for CheckedDisk {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        let (len, lent_len) = (buffer.len(), buffer.lent_len());
        self.tally.count_read(len as u64);
        self.watch(async move {
            self.span(at, len)?;
            let buffer = self.inner.read(at, buffer).await?;
            assert!(buffer.len() == len, "a read of {len} bytes gave {}", buffer.len());
            assert!(buffer.lent_len() == lent_len, "a read gave back other memory than it got");
            Ok(buffer)
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.tally.count_write(data.len() as u64);
        self.watch_as(true, async move {
            self.span(at, data.len())?;
            self.writable()?;
            self.inner.write(at, data, flags).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.tally.count_flush();
        self.watch(async { self.inner.flush().await })
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.tally.count_zeroes(span.len());
        self.watch_as(true, async move {
            self.inside(span)?;
            self.writable()?;
            self.inner.write_zeroes(span, flags).await
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.tally.count_discard(span.len());
        self.watch_as(true, async move {
            self.inside(span)?;
            self.writable()?;
            self.inner.discard(span, flags).await
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.watch(async move {
            self.inside(span)?;
            let extents = self.inner.map(span).await?;
            has_no_gap(span, extents.iter().map(|extent| extent.span));
            Ok(extents)
        })
    }

    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        self.watch(async move {
            self.inside(span)?;
            // One request: what is behind may be exchanged between two.
            let extents = self.inner.map_whole(span).await?;
            has_no_gap(span, extents.iter().map(|extent| extent.span));
            Ok(extents)
        })
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        Box::pin(async move {
            if self.is_broken() {
                return false;
            }
            let tended = async { self.inner.tend(now).await };
            AssertUnwindSafe(tended).catch_unwind().await.unwrap_or_else(|panic| {
                self.break_down(&words_of(&*panic));
                false
            })
        })
    }

    fn filling(&self) -> Option<Filling> {
        self.inner.filling()
    }

    /// Neither counted as a request nor its failure as an error of one: it is nobody's request.
    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        let len = data.len();
        Box::pin(async move {
            self.sound()?;
            self.span(at, len)?;
            self.writable()?;
            let mut guard = Abandoned { disk: self, changes: true, ended: false };
            let result = AssertUnwindSafe(self.inner.fill(at, data)).catch_unwind().await;
            guard.ended = true;
            result.unwrap_or_else(|panic| {
                self.break_down(&words_of(&*panic));
                Err(broken())
            })
        })
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        self.watch(async { self.inner.room().await })
    }

    fn losses(&self) -> Option<Arc<Losses>> {
        self.inner.losses()
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.watch(async { self.inner.close().await })
    }
}

/// Exists from a request's first poll on; dropped before the end, it counts the request as abandoned.
struct Abandoned<'a> {
    disk: &'a CheckedDisk,
    /// It may be half done.
    changes: bool,
    ended: bool,
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.disk.abandoned.fetch_add(1, Ordering::Relaxed);
            if self.changes {
                self.disk.break_down("a change was dropped half way");
            }
        }
    }
}

/// What a map answers begins where it was asked, and has no gap.
fn has_no_gap(span: GuestSpan, extents: impl Iterator<Item = GuestSpan>) {
    let mut at = span.start();
    for extent in extents {
        assert!(extent.start() == at && !extent.is_empty(), "the map of {span} has a gap at {at}: {extent}");
        at = extent.end();
    }
    assert!(span.is_empty() || at > span.start(), "the map of {span} is empty");
    assert!(at <= span.end(), "the map of {span} runs on to {at}");
}

fn broken() -> Error {
    let context = "the disk stopped after an internal failure; flushed data is safe: reopen the image";
    Error::new(ErrorKind::Poisoned, context)
}

/// What a panic said.
fn words_of(panic: &(dyn Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().map(|words| (*words).to_owned());
    words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures_lite::future::{block_on, pending, poll_once};

    use super::*;
    use crate::MemoryDisk;

    /// Panics at one place and hangs at another, as the test sets it.
    struct Bad {
        inner: SharedDisk,
        hangs: bool,
    }

    impl Disk for Bad {
        fn geometry(&self) -> Geometry {
            self.inner.geometry()
        }

        fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
            assert!(at != GuestOffset::new(512), "a rule is broken");
            // Returns less than was requested.
            let short = at == GuestOffset::new(1024);
            Box::pin(async move {
                let mut buffer = self.inner.read(at, buffer).await?;
                Ok(if short { buffer.split_to(1) } else { buffer })
            })
        }

        fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            Box::pin(async move {
                if self.hangs {
                    pending::<()>().await;
                }
                self.inner.write(at, data, flags).await
            })
        }

        fn flush(&self) -> LocalFuture<'_, Result<()>> {
            self.inner.flush()
        }

        fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
            self.inner.write_zeroes(span, flags)
        }

        fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            self.inner.discard(span, flags)
        }

        fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
            self.inner.map(span)
        }

        fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
            let extent = MergedExtent { span, place: PlaceKind::Compressed, depth: 7 };
            Box::pin(std::future::ready(Ok(vec![extent])))
        }

        fn tend(&self, _now: Duration) -> LocalFuture<'_, bool> {
            panic!("in the background")
        }

        fn close(&self) -> LocalFuture<'_, Result<()>> {
            self.inner.close()
        }
    }

    fn disk(hangs: bool) -> (Arc<CheckedDisk>, Arc<Mutex<Vec<String>>>) {
        let disk = CheckedDisk::new(Arc::new(Bad { inner: MemoryDisk::new(4096), hangs }));
        let reported = Arc::new(Mutex::new(Vec::new()));
        let book = reported.clone();
        disk.when_broken(move |why| book.lock().expect("nobody panics with it").push(why.to_owned()));
        (disk, reported)
    }

    fn read(disk: &CheckedDisk, at: u64) -> Result<Buffer> {
        block_on(disk.read(GuestOffset::new(at), Buffer::zeroed(512)))
    }

    fn write(disk: &CheckedDisk) -> LocalFuture<'_, Result<()>> {
        disk.write(GuestOffset::ZERO, Buffer::zeroed(512), WriteFlags::default())
    }

    /// What is behind may be exchanged between two.
    #[test]
    fn the_map_of_a_chain_is_one_request_at_what_is_behind() {
        let (disk, _) = disk(false);
        let extents = block_on(disk.map_whole(GuestOffset::ZERO.span(4096))).expect("a map");
        assert_eq!((extents.len(), extents[0].place, extents[0].depth), (1, PlaceKind::Compressed, 7));
        block_on(disk.map_whole(GuestOffset::ZERO.span(8192))).expect_err("beyond the end");
    }

    #[test]
    fn a_panic_breaks_its_disk_and_nothing_else() {
        for at in [512, 1024] {
            let (disk, reported) = disk(false);
            read(&disk, 0).expect("it is well");
            assert_eq!(read(&disk, at).expect_err("it panicked").kind(), ErrorKind::Poisoned);
            assert!(disk.is_broken());
            assert_eq!(read(&disk, 0).expect_err("no more").kind(), ErrorKind::Poisoned);
            block_on(write(&disk)).expect_err("no more");
            block_on(disk.flush()).expect_err("no more");
            block_on(disk.close()).expect_err("it must not write");
            assert!(!block_on(disk.tend(Duration::ZERO)));
            assert_eq!(reported.lock().expect("nobody panics with it").len(), 1, "it is reported once");
        }
    }

    #[test]
    fn a_panic_in_the_background_breaks_its_disk_too() {
        let (disk, reported) = disk(false);
        assert!(!block_on(disk.tend(Duration::ZERO)) && disk.is_broken());
        assert_eq!(*reported.lock().expect("nobody panics with it"), ["in the background"]);
    }

    #[test]
    fn a_change_that_is_dropped_half_way_breaks_its_disk() {
        let (disk, _) = disk(true);
        drop(write(&disk));
        assert!(!disk.is_broken(), "it was not begun");
        let mut begun = write(&disk);
        assert!(block_on(poll_once(&mut begun)).is_none());
        drop(begun);
        assert!(disk.is_broken());
    }
}
