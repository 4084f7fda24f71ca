//! A disk whose writes are durable when they are answered. Concurrent writes share flushes.
//!
//! ```text
//!   write A ──► disk ──┐                                        flush 1 began before C was written, so C waits for the next
//!   write B ──► disk ──┴► flush 1 ───────────► A, B answered
//!   write C ──────► disk ──┐
//!   write D ─────────► disk┴(wait)► flush 2 ──► C, D answered
//! ```
//!
//! 1. A change is answered when a flush that *began* after the change had returned has succeeded.
//! 2. One flush runs at a time; when it ends, one of the waiting changes begins the next, for all that wait.
//! 3. A failed flush fails every change that waited for it. Nothing is tried again: what a failed flush means
//!    is for the disk to decide (contract 5).

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use event_listener::Event;
use vellum_core::{
    Buffer, Disk, Error, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan, LocalFuture,
    MergedExtent, PlaceKind, Result, Room, SharedDisk, WriteFlags, ZeroFlags, lock,
};

/// A disk without a write cache.
pub struct Durable {
    inner: SharedDisk,
    flushes: Mutex<Flushes>,
    ended: Event,
}

#[derive(Default)]
struct Flushes {
    begun: u64,
    ended: u64,
    is_running: bool,
    /// The last that failed, and why.
    failed: Option<(u64, Error)>,
}

impl Flushes {
    /// The answer of the flush with this number, or of a later one; nothing before either has ended.
    fn answer(&self, number: u64) -> Option<Result<()>> {
        if self.ended < number {
            return None;
        }
        Some(match &self.failed {
            Some((failed, error)) if *failed >= number => Err(error.clone()),
            _ => Ok(()),
        })
    }
}

/// The flush in progress, held by the change that runs it.
struct Running<'a> {
    disk: &'a Durable,
    number: u64,
    result: Option<Result<()>>,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut flushes = self.disk.lock();
        flushes.is_running = false;
        // A flush that was dropped half way has reported nothing; another one begins.
        if let Some(result) = self.result.take() {
            flushes.ended = self.number;
            if let Err(error) = result {
                flushes.failed = Some((self.number, error));
            }
        }
        drop(flushes);
        self.disk.ended.notify(usize::MAX);
    }
}

impl Durable {
    /// Over this disk.
    pub fn over(inner: SharedDisk) -> Arc<Self> {
        Arc::new(Self { inner, flushes: Mutex::default(), ended: Event::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Flushes> {
        lock(&self.flushes)
    }

    /// Makes durable what has returned.
    async fn sync(&self) -> Result<()> {
        let wanted = self.lock().begun + 1;
        loop {
            let ended = self.ended.listen();
            let mine = {
                let mut flushes = self.lock();
                if let Some(answer) = flushes.answer(wanted) {
                    return answer;
                }
                let is_free = !flushes.is_running;
                is_free.then(|| {
                    flushes.is_running = true;
                    flushes.begun += 1;
                    Running { disk: self, number: flushes.begun, result: None }
                })
            };
            match mine {
                None => ended.await,
                Some(mut running) => {
                    let result = self.inner.flush().await; // commit point of every change it is for
                    running.result = Some(result.clone());
                    drop(running);
                    return result;
                }
            }
        }
    }

    fn then_sync<'a>(&'a self, change: LocalFuture<'a, Result<()>>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            change.await?;
            self.sync().await
        })
    }
}

impl Disk for Durable {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.inner.read(at, buffer)
    }

    fn write(&self, at: GuestOffset, data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.then_sync(self.inner.write(at, data, WriteFlags::default()))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.sync())
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.then_sync(self.inner.write_zeroes(span, ZeroFlags { fua: false, ..flags }))
    }

    fn discard(&self, span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.then_sync(self.inner.discard(span, WriteFlags::default()))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.inner.map(span)
    }

    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        self.inner.map_whole(span)
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
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

    use vellum_core::{Clock, ErrorKind, MemoryDisk};
    use vellum_sim::{ForwardDisk, Forwarding, World};

    use super::*;

    /// Flushes take a while, and make durable what had returned when they began.
    struct Slow {
        memory: Arc<MemoryDisk>,
        clock: Arc<dyn Clock>,
        /// Sectors by number: written, and durable.
        returned: Mutex<BTreeMap<u64, bool>>,
        flushes: AtomicU64,
        fails: AtomicBool,
    }

    impl Slow {
        fn new(world: &World) -> Arc<Forwarding<Self>> {
            Forwarding::new(Self {
                memory: MemoryDisk::new(1 << 20),
                clock: world.clock(),
                returned: Mutex::default(),
                flushes: AtomicU64::new(0),
                fails: AtomicBool::new(false),
            })
        }

        fn is_durable(&self, at: GuestOffset) -> bool {
            self.returned.lock().expect("no panic").get(&at.bytes()).copied().unwrap_or(false)
        }
    }

    impl ForwardDisk for Slow {
        fn inner(&self) -> &dyn Disk {
            &*self.memory
        }

        fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            Box::pin(async move {
                self.clock.sleep(Duration::from_micros(at.bytes() % 7)).await;
                self.memory.write(at, data, flags).await?;
                self.returned.lock().expect("no panic").insert(at.bytes(), false);
                Ok(())
            })
        }

        fn flush(&self) -> LocalFuture<'_, Result<()>> {
            Box::pin(async move {
                let covered: Vec<u64> = self.returned.lock().expect("no panic").keys().copied().collect();
                self.flushes.fetch_add(1, SeqCst);
                self.clock.sleep(Duration::from_millis(1)).await;
                if self.fails.load(SeqCst) {
                    return Err(Error::new(ErrorKind::Io, "the drive"));
                }
                let mut returned = self.returned.lock().expect("no panic");
                returned.extend(covered.into_iter().map(|at| (at, true)));
                Ok(())
            })
        }
    }

    /// Writes at intervals from several guests; returns what was not durable when it was answered, and how
    /// many writes there were.
    fn write_many(
        world: &World,
        disk: &Arc<Durable>,
        slow: &Arc<Forwarding<Slow>>,
    ) -> (Vec<Result<()>>, usize) {
        world.run(async {
            let mut guests = Vec::new();
            for guest in 0..32u64 {
                let (disk, slow, clock) = (disk.clone(), slow.clone(), world.clock());
                guests.push(world.spawn(async move {
                    let (mut answers, mut early) = (Vec::new(), 0);
                    for round in 0..8 {
                        clock.sleep(Duration::from_micros(guest * 37 % 101)).await;
                        let at = GuestOffset::new((guest * 8 + round) * 512);
                        let answer = disk.write(at, Buffer::zeroed(512), WriteFlags::default()).await;
                        early += usize::from(answer.is_ok() && !slow.is_durable(at));
                        answers.push(answer);
                    }
                    (answers, early)
                }));
            }
            let (mut answers, mut early) = (Vec::new(), 0);
            for guest in guests {
                let (its, too_early) = guest.await;
                answers.extend(its);
                early += too_early;
            }
            (answers, early)
        })
    }

    #[test]
    fn what_is_answered_is_durable_and_flushes_are_shared() {
        for seed in 0..20 {
            let world = World::new(seed);
            let slow = Slow::new(&world);
            let disk = Durable::over(slow.clone());
            let (answers, early) = write_many(&world, &disk, &slow);
            assert!(answers.iter().all(Result::is_ok) && early == 0, "{early} were answered early");
            let flushes = slow.flushes.load(SeqCst);
            assert!(flushes * 4 < 32 * 8, "{flushes} flushes for {} writes", 32 * 8);
        }
    }

    #[test]
    fn a_flush_that_failed_is_everybodys_answer() {
        let world = World::new(3);
        let slow = Slow::new(&world);
        slow.fails.store(true, SeqCst);
        let disk = Durable::over(slow.clone());
        let (answers, _) = write_many(&world, &disk, &slow);
        assert!(answers.iter().all(Result::is_err));
    }

    #[test]
    fn one_that_goes_away_half_way_leaves_the_flush_to_the_others() {
        let world = World::new(3);
        let slow = Slow::new(&world);
        let disk = Durable::over(slow.clone());
        world.run(async {
            let mut first = disk.flush();
            assert!(futures_lite::future::poll_once(&mut first).await.is_none());
            let mut second = disk.flush();
            assert!(futures_lite::future::poll_once(&mut second).await.is_none());
            drop(first);
            second.await.expect("it begins one of its own");
        });
        assert_eq!(slow.flushes.load(SeqCst), 2);
    }
}
