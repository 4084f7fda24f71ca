//! Disks on devices that become full: a hook enlarges the device, and the waiting requests continue.
//!
//! ```text
//!   room left   ────────────────────────── margin ─────────────── 0
//!                         rest                │   the hook runs    │   writes wait for the hook; without one, or when
//!                                             │                    │   it does not help, they fail: no space
//! ```
//!
//! 1. One task per disk watches how much room is left. No worker waits for the hook: it is a process of its
//!    own, polled now and then.
//! 2. One hook runs at a time for a disk, at most one per second; while it does not help, the intervals grow.
//! 3. A write waits only where a hook may help, and never longer than the hook may run.
//! 4. A full device is logged once, with the number of bytes it needs, and again when it has had room in
//!    between. It is logged when a request has failed for want of space, not when one waits for a hook that
//!    may help.

mod hook;
mod plan;

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{
    Buffer, Disk, ErrorKind, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan, LocalFuture,
    MergedExtent, PlaceKind, Result, Room, SharedDisk, WriteFlags, ZeroFlags, lock,
};
use vellum_io::clock;

pub use hook::GrowHook;
use plan::{Calls, Need};

/// How often the room is checked: at most, and while no request writes.
const LOOK_SOON: Duration = Duration::from_millis(20);
const LOOK_LATER: Duration = Duration::from_millis(500);
/// A write takes no more space than its own bytes and this many, however small it is: two of the largest
/// units.
const WRITE_TAKES: u64 = 4 << 20;
/// A request is tried at most this many times: a device may grow by less than the request needs.
const TRIES_MAX: usize = 8;

/// A disk whose device may become larger while it is served.
pub(crate) struct Growing {
    inner: SharedDisk,
    device: String,
    hook: Option<GrowHook>,
    /// So many bytes can be written before the device may be short of space. Zero or less: it may be.
    left: AtomicI64,
    /// Wakes the watching task.
    wake: Event,
    questions: Mutex<Questions>,
    answered: Event,
    /// This many requests have failed for want of space, where a hook may help.
    failed: AtomicU64,
}

/// Requests that found the device full and wait for the decision whether to try again.
#[derive(Default)]
struct Questions {
    asked: u64,
    answered: u64,
    /// The last answer.
    try_again: bool,
    /// No more answers will come.
    has_ended: bool,
}

/// What was said already.
#[derive(Default)]
struct Said {
    low: bool,
    full: bool,
    refused: u64,
}

impl Growing {
    /// Watches the room of a disk, if it has any to watch.
    pub(crate) async fn over(
        inner: &SharedDisk,
        device: String,
        hook: Option<GrowHook>,
    ) -> Option<Arc<Self>> {
        let room = inner.room().await.unwrap_or_else(|error| {
            tracing::warn!("the free space of {device} is no longer watched: {}", error.chain());
            None
        });
        (room.is_some() && !inner.geometry().read_only).then(|| {
            Arc::new(Self {
                inner: inner.clone(),
                device,
                hook,
                left: AtomicI64::new(0),
                wake: Event::new(),
                questions: Mutex::default(),
                answered: Event::new(),
                failed: AtomicU64::new(0),
            })
        })
    }

    fn lock(&self) -> MutexGuard<'_, Questions> {
        lock(&self.questions)
    }

    /// Watches the device until it is stopped, or the disk is closed.
    pub(crate) async fn watch(&self, has_ended: &AtomicBool) {
        let (mut calls, mut said) = (Calls::default(), Said::default());
        while !has_ended.load(Ordering::Acquire) {
            let woken = self.wake.listen();
            let asked = self.lock().asked;
            let room = match self.inner.room().await {
                Ok(Some(room)) => room,
                // It was restored from a snapshot, and is another disk now.
                Err(error) if error.kind() == ErrorKind::Closed => break,
                Ok(None) | Err(_) => {
                    self.answer(asked, false);
                    clock().sleep(LOOK_LATER).await;
                    continue;
                }
            };
            let need = Need::of(&room);
            self.left.store(need.until_near, Ordering::Release);
            self.tell(&room, &need, &mut said);
            let is_waited_for = asked > self.lock().answered;
            match &self.hook {
                Some(hook) if need.is_low || (is_waited_for && room.free == 0) => {
                    if calls.may_begin(clock().now()) {
                        let helped = self.call(hook, &room, &need, has_ended).await;
                        calls.ended(clock().now(), helped);
                        self.answer(asked, helped);
                        continue;
                    }
                    // If the last hook helped, the next one comes soon; if it did not, no request is kept
                    // waiting.
                    if !calls.helped_last() {
                        self.answer(asked, room.free > 0);
                    }
                }
                _ => self.answer(asked, room.free > 0),
            }
            clock().sleep(LOOK_SOON).await;
            if need.until_near > 0 {
                or(clock().sleep(LOOK_LATER), woken).await;
            }
        }
        let mut questions = self.lock();
        questions.has_ended = true;
        drop(questions);
        self.answered.notify(usize::MAX);
    }

    /// Runs the hook; returns whether the device has grown.
    async fn call(&self, hook: &GrowHook, room: &Room, need: &Need, has_ended: &AtomicBool) -> bool {
        let (device, size, more) = (&self.device, room.len + need.more, need.more);
        tracing::info!("{device}: {} bytes of free space are left; running {hook}", room.free);
        let ran = hook.run(device, size, more, has_ended).await;
        let after = self.inner.room().await.ok().flatten().map_or(room.len, |after| after.len);
        match ran {
            Ok(()) if after > room.len => {
                tracing::info!("{device} now has {after} bytes, {} more than before", after - room.len);
            }
            Ok(()) => tracing::warn!(
                "{device}: the grow hook succeeded, but the device still has {after} bytes: it needs {more} more"
            ),
            Err(error) => {
                tracing::warn!("{device} needs {more} more bytes: {}", error.chain());
            }
        }
        after > room.len
    }

    fn tell(&self, room: &Room, need: &Need, said: &mut Said) {
        let (device, all) = (&self.device, room.len_for_all.saturating_sub(room.len));
        // With a hook the image may have refused what was done at last.
        let refused = match self.hook {
            Some(_) => self.failed.load(Ordering::Acquire),
            None => room.refused,
        };
        if refused > said.refused && !said.full {
            tracing::error!(
                "{device} is full: guest writes fail (no space) until it grows by at least {} bytes; {all} more \
                 bytes are enough for the whole disk. Nothing that was written is lost, and no restart is needed",
                room.step
            );
            said.full = true;
        }
        said.refused = refused;
        if need.is_low && !said.low && self.hook.is_none() {
            tracing::warn!(
                "{device} has {} bytes of free space left: enlarge it, or writes will fail; {all} more bytes are \
                 enough for the whole disk",
                room.free
            );
        }
        said.low = need.is_low;
        said.full &= need.is_low || room.free == 0;
    }

    fn answer(&self, asked: u64, try_again: bool) {
        let mut questions = self.lock();
        if questions.answered < asked {
            (questions.answered, questions.try_again) = (asked, try_again);
            drop(questions);
            self.answered.notify(usize::MAX);
        }
    }

    /// Waits until the device may be larger; false when it will not be.
    async fn wait(&self) -> bool {
        let number = {
            let mut questions = self.lock();
            questions.asked += 1;
            questions.asked
        };
        self.wake.notify(usize::MAX);
        loop {
            let listener = self.answered.listen();
            {
                let questions = self.lock();
                if questions.answered >= number {
                    return questions.try_again;
                }
                if questions.has_ended {
                    return false;
                }
            }
            listener.await;
        }
    }

    /// Whether a request of this many bytes may find the device full, and a hook may help.
    fn may_be_short(&self, len: usize) -> bool {
        if self.hook.is_none() {
            return false;
        }
        let takes = i64::try_from(len as u64 + WRITE_TAKES).unwrap_or(i64::MAX);
        let before = self.left.fetch_sub(takes, Ordering::AcqRel);
        if before > 0 && before <= takes {
            self.wake.notify(usize::MAX);
        }
        before <= takes
    }

    /// Does what `request` does, again when the device has grown in between.
    async fn patiently<'a>(&self, request: impl Fn() -> LocalFuture<'a, Result<()>>) -> Result<()> {
        self.counted(self.try_patiently(request).await)
    }

    /// The result of a request, counted if it failed for want of space.
    fn counted(&self, result: Result<()>) -> Result<()> {
        if matches!(&result, Err(error) if error.kind() == ErrorKind::NoSpace) {
            self.failed.fetch_add(1, Ordering::AcqRel);
            self.wake.notify(usize::MAX);
        }
        result
    }

    async fn try_patiently<'a>(&self, request: impl Fn() -> LocalFuture<'a, Result<()>>) -> Result<()> {
        for _ in 1..TRIES_MAX {
            match request().await {
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    if !self.wait().await {
                        return Err(error);
                    }
                }
                result => return result,
            }
        }
        request().await
    }
}

impl Disk for Growing {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.inner.read(at, buffer)
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        if !self.may_be_short(data.len()) {
            let write = self.inner.write(at, data, flags);
            if self.hook.is_none() {
                return write;
            }
            return Box::pin(async move { self.counted(write.await) });
        }
        // Only now the bytes may be needed twice.
        Box::pin(async move { self.patiently(|| self.inner.write(at, data.duplicate(), flags)).await })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        if self.hook.is_none() {
            return self.inner.write_zeroes(span, flags);
        }
        Box::pin(self.patiently(move || self.inner.write_zeroes(span, flags)))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.inner.discard(span, flags)
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
