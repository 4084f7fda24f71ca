//! Pausing, resuming, limiting and enlarging a disk while it is served.
//!
//! While a disk is enlarged it cannot be used: requests wait at the valve while the image is closed, changed
//! and opened again.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_lock::RwLockWriteGuard;
use futures_lite::future::or;
use vellum_core::{BlockSize, Disk, Error, ErrorKind, Result, SharedDisk, lock};
use vellum_export::nbd::Exports;
use vellum_io::{Task, clock, spawn_local};
use vellum_layer::Chain;
use vellum_layer::noted::Notes;
use vellum_layer::valve::{Hold, RateLimits, State, Valve};

use super::gone::Gone;
use super::{IS_READ, Served, Step, behind_valve, reads_a_snapshot};
use crate::image::open_over;

/// The requested size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// So many bytes.
    Size(u64),
    /// So many more.
    More(u64),
}

impl Wish {
    /// In bytes, for a disk that has `before`.
    fn bytes(self, before: u64) -> Result<u64> {
        let size = match self {
            Self::Size(size) => Some(size),
            Self::More(more) => before.checked_add(more),
        };
        // The last sector is a whole one.
        let size = size.filter(|size| *size <= BlockSize::SECTOR.round_down(u64::MAX));
        let size = size.ok_or_else(|| {
            Error::invalid(format!("the disk has {before} bytes and cannot grow by that much"))
        })?;
        Ok(BlockSize::SECTOR.round_up(size))
    }
}

/// How often, and at what interval, a file that was just closed is tried, if somebody still holds it.
const RELEASED_TRIES: usize = 100;
const RELEASED_EVERY: Duration = Duration::from_millis(20);
/// How often where a base is opened that another program may have for good. One try takes about a second.
const MERGING_TRIES: usize = 2;

/// How often, and at what interval, to try to get a chain exclusively: a short reader is gone by then.
const ALONE_TRIES: usize = 20;
const ALONE_EVERY: Duration = Duration::from_millis(5);

/// A chain that one has alone.
pub(super) struct Alone<'a>(RwLockWriteGuard<'a, Option<Chain>>);

impl Deref for Alone<'_> {
    type Target = Chain;

    fn deref(&self) -> &Chain {
        self.0.as_ref().expect("it was looked at")
    }
}

impl DerefMut for Alone<'_> {
    fn deref_mut(&mut self) -> &mut Chain {
        self.0.as_mut().expect("it was looked at")
    }
}

/// A step in progress, until dropped.
pub(super) struct Begun<'a>(&'a Served);

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.0.life().step_is_over();
    }
}

/// A disk whose requests wait while it is exchanged. If that is interrupted they fail from then on, until the
/// disk is opened again: the state behind the valve, and in the image, is unknown.
pub(super) struct Held<'a> {
    served: &'a Served,
    pub(super) hold: Hold,
    is_over: bool,
}

impl Held<'_> {
    /// The step is done, or was not begun: requests continue.
    pub(super) fn finish(mut self) {
        self.is_over = true;
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        self.served.life().set_cut_off(true);
        self.served.valve.exchange(&self.hold, Gone::of(&*self.served.disk));
        let path = self.served.shown();
        tracing::error!(
            "{path}: a change of it was interrupted; requests fail until `vellum export reopen` recovers it"
        );
    }
}

/// A pause that is ended with the command that asked for it, if that does not come to its end.
struct ResumeOnDrop<'a>(Option<&'a Valve>);

impl ResumeOnDrop<'_> {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for ResumeOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(valve) = self.0 {
            valve.resume();
        }
    }
}

/// A task that continues when its future is dropped.
struct ToItsEnd(Option<Task<Result<()>>>);

impl Drop for ToItsEnd {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.detach();
        }
    }
}

/// A wish for the chain, as long as this is held.
struct Wanted<'a>(&'a AtomicUsize);

impl<'a> Wanted<'a> {
    fn of(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Served {
    pub(crate) fn in_use(&self, why: &str) -> Error {
        Error::new(ErrorKind::Locked, format!("{}: {why}", self.shown()))
    }

    /// Has the step to itself, as long as this is held.
    pub(super) fn begin(&self, step: Step) -> Result<Begun<'_>> {
        self.life().begin(step).map_err(|why| self.in_use(why))?;
        Ok(Begun(self))
    }

    /// The chain, exclusively. Does not wait for a snapshot that is being made or deleted: that may take
    /// long.
    pub(super) async fn alone(&self) -> Result<Alone<'_>> {
        let chain = self.alone_or_closed().await?;
        if chain.is_some() { Ok(Alone(chain)) } else { Err(self.is_closed()) }
    }

    /// As above, also if there is none.
    pub(super) async fn alone_or_closed(&self) -> Result<RwLockWriteGuard<'_, Option<Chain>>> {
        let _wanted = Wanted::of(&self.tiering.want_alone);
        let (mut tries, until) = (0, clock().now() + self.how.patience);
        while tries < ALONE_TRIES && clock().now() < until {
            if let Some(chain) = self.chain.try_write() {
                return Ok(chain);
            }
            // A round of promotions ends by itself, and no other one begins.
            tries += usize::from(!self.tiering.is_warming.load(Ordering::Acquire));
            clock().sleep(ALONE_EVERY).await;
        }
        let why = "a snapshot of it is being created, deleted or reverted to, or it is being paused or resized; try \
         again when that is done";
        Err(self.in_use(why))
    }

    /// Stops admitting requests. Returns when none is in flight and everything that was answered is durable: in the image, whatever a
    /// flash cache had of it. From then on the image does not change, and a copy of it is complete.
    pub(crate) async fn pause(&self) -> Result<()> {
        let _step = self.begin(Step::Pause)?;
        // Most of it while guests are at work.
        if let Some(chain) = self.chain.try_read()
            && let Some(flash) = chain.as_ref().and_then(|chain| chain.flash())
        {
            flash.drain().await?;
        }
        // Making or deleting a snapshot changes the image without any request of a guest.
        let alone = self.alone().await?;
        self.valve.pause().await?;
        if let Some(flash) = alone.flash() {
            let unless_kept = ResumeOnDrop(Some(&self.valve));
            // Whoever resumes the disk meanwhile lets no request in before the image is complete.
            let hold = self.valve.hold().await;
            let settled = flash.settle().await;
            drop(hold);
            settled.map_err(|error| {
                error.context(format!(
                    "{} is not paused, because its image lacks writes that are in the flash cache",
                    self.shown()
                ))
            })?;
            unless_kept.keep();
            if self.valve.state() == State::Running {
                return Err(self.in_use("it was resumed before it had paused"));
            }
        }
        tracing::warn!("{} is paused: its requests wait until it is resumed", self.shown());
        Ok(())
    }

    /// Lets requests continue, and those that wait for space try again. Returns whether they had been
    /// stopped, and whether any waited.
    pub(crate) fn resume(&self) -> (bool, bool) {
        let was_stopped = self.valve.resume();
        let was_held = self.valve.try_again();
        if was_stopped {
            tracing::warn!("{} is resumed", self.shown());
        }
        (was_stopped, was_held)
    }

    /// Stops new requests, and waits until none is in flight, with a time limit: one that hangs would hold up
    /// all others.
    pub(super) async fn hold_in_time(&self) -> Result<Held<'_>> {
        let is_held = async {
            clock().sleep(self.how.patience).await;
            let hangs = self.what_hangs().unwrap_or_default();
            Err(Error::new(ErrorKind::Locked, format!("requests in flight do not finish: {hangs}")))
        };
        let hold = or(async { Ok(self.valve.hold().await) }, is_held).await?;
        Ok(Held { served: self, hold, is_over: false })
    }

    /// Closes the image and opens it again, which recovers it: a disk that stopped after a failed flush
    /// becomes usable again. Everything durable is there. If anything else was lost, the next flush of each
    /// user of the disk reports it. Returns whether there was any loss.
    ///
    /// # Errors
    /// With nothing changed: `Refused` where another file has the name of the image, `NoSpace` where the host has no room
    /// for what was answered and not flushed, and `Locked` where the storage does not answer a flush in time, unless that
    /// may be lost.
    pub(crate) async fn reopen(self: &Arc<Self>, lose_unflushed: bool, exports: &Exports) -> Result<bool> {
        let _step = self.begin(Step::Reopen)?;
        let mut chain = self.alone_or_closed().await?;
        self.flash_works(chain.as_ref())?;
        let is_broken = self.disk.is_broken() || self.life().is_cut_off() || self.record.is_poisoned();
        if !lose_unflushed && !is_broken {
            self.is_the_same_file(chain.as_ref()).await?;
            self.could_be_opened_again(chain.as_ref()).await?;
        }
        self.before_writing(chain.as_ref(), exports).await?;
        // It reads the images below, which are closed.
        if let Err(error) = self.hydrate_no_more_in_time().await {
            self.begin_hydrating();
            return Err(error);
        }
        let held = match self.hold_for_reopening(chain.as_ref()).await {
            Ok(held) => held,
            Err(error) => {
                chain.iter().for_each(Chain::resume_forks);
                self.begin_hydrating();
                return Err(error);
            }
        };
        if let Some(open) = chain.as_ref() {
            // A disk that is broken, or half changed, gets no more requests.
            let may_be_closed = !self.disk.is_broken() && !self.life().is_cut_off();
            let mut is_well = may_be_closed && !self.record.is_poisoned();
            // Requests that wait for space keep their data: the image is as good as before.
            if is_well
                && !lose_unflushed
                && let Err(error) = self.has_room_in_time(open).await
            {
                held.finish();
                self.begin_hydrating();
                open.resume_forks();
                return Err(error);
            }
            if may_be_closed && let Err(error) = open.close().await {
                tracing::warn!("closing {} before it is reopened failed: {}", self.shown(), error.chain());
                is_well = false;
            }
            // What is closed well has lost nothing, and where each write is durable when it is answered,
            // nothing can be.
            if !is_well && !self.how.is_durable && self.disk_is_written() {
                self.valve.lose(&held.hold);
                self.reconnects.lost();
            }
        }
        // All references to its files must be gone, or their locks would be in the way.
        self.tend_no_more().await;
        let was_barred = self.is_barred();
        let allowed = match self.release_files(&held.hold, &mut chain).await {
            Ok(()) => self.allow_writing_again().await,
            failed => failed,
        };
        let opened = self.open_again(&held.hold, &mut chain).await;
        // It is open, or closed: nothing is half done.
        held.finish();
        opened?;
        allowed?;
        if let Some(open) = chain.as_ref().filter(|_| was_barred && !self.is_barred()) {
            self.hydrate_as_said(&self.hydration_said, open.top().head.wish())?;
        }
        let count = self.valve.losses().map_or(0, |losses| losses.count());
        let may_miss = self.losses_said.swap(count, Ordering::AcqRel) != count;
        let path = self.shown();
        if may_miss {
            tracing::warn!(
                "{path} was closed and reopened after a failure: writes that were acknowledged but not flushed may \
                 be missing; the next flush of each client fails once"
            );
        } else {
            tracing::warn!("{path} was closed and reopened");
        }
        Ok(may_miss)
    }

    /// Nothing reads a snapshot of the disk, and no request is in flight.
    pub(super) async fn hold_for_reopening(&self, chain: Option<&Chain>) -> Result<Held<'_>> {
        if let Some(chain) = chain {
            chain.hold_forks().await;
            if reads_a_snapshot(chain) {
                return Err(self.in_use(IS_READ));
            }
        }
        self.hold_in_time().await
    }

    /// Makes durable what was answered, if the disk may still be used.
    ///
    /// # Errors
    /// `NoSpace` if the host has no room for it: it would be lost if the image were closed now. Other errors
    /// of the flush are not returned here: closing reports them.
    pub(crate) async fn has_room_for_what_was_answered(self: &Arc<Self>) -> Result<()> {
        if self.disk.is_broken() || self.life().is_cut_off() || self.record.is_poisoned() {
            return Ok(());
        }
        let served = self.clone();
        let flush = async move {
            match &*served.chain.read().await {
                Some(chain) => served.has_room(chain.disk()).await,
                None => Ok(()),
            }
        };
        // A flush runs to its end even if this future is dropped: one that is dropped half way stops the disk
        // for good.
        let mut flush = ToItsEnd(Some(spawn_local(flush)));
        // But storage that does not answer keeps no disk from being removed: closing waits for the flush, as
        // it does for requests.
        let late = async {
            clock().sleep(self.how.patience).await;
            Ok(())
        };
        or(async { flush.0.as_mut().expect("it is only taken when dropped").await }, late).await
    }

    /// The same while its requests are stopped, by the caller that has the chain to itself: a flush that is
    /// late is an error, as the requests should not wait for it.
    pub(super) async fn has_room_in_time(self: &Arc<Self>, chain: &Chain) -> Result<()> {
        let (served, disk) = (self.clone(), chain.disk().clone());
        let mut flush = ToItsEnd(Some(spawn_local(async move { served.has_room(&disk).await })));
        let late = async {
            let patience = self.how.patience;
            clock().sleep(patience).await;
            let why = format!(
                "the storage has not answered a flush for {} s, and nothing was changed: try again when it answers",
                patience.as_secs()
            );
            Err(self.in_use(&why))
        };
        or(async { flush.0.as_mut().expect("it is only taken when dropped").await }, late).await
    }

    async fn has_room(&self, disk: &SharedDisk) -> Result<()> {
        if !self.disk_is_written() {
            return Ok(());
        }
        let flush = || disk.flush();
        let is_full = |error: &Error| error.kind() == ErrorKind::NoSpace;
        match flush().await {
            // A storage that this flush has stopped reports it only the next time. Then it has lost them
            // already.
            Err(error) if is_full(&error) && flush().await.is_err_and(|error| is_full(&error)) => {
                let path = self.shown();
                let why = format!(
                    "{path}: the host has no space for writes that were acknowledged but not flushed, and closing \
                     the image now would lose them: free space and try again, or give them up with \
                     --lose-unflushed"
                );
                Err(error.context(why))
            }
            _ => Ok(()),
        }
    }

    /// Answered writes of its image were lost, at this time, before it was removed from this server. As after
    /// a reopening, each new connection gets a report.
    pub(super) async fn has_lost_writes(&self, when: Duration) -> Result<()> {
        if let Some(chain) = &*self.chain.read().await {
            chain.settle().await?;
        }
        let hold = self.valve.hold().await;
        self.valve.lose_at(&hold, when);
        tracing::warn!(
            "{}: writes that were acknowledged but not flushed before it was removed may be missing; the first \
             flush of each connection fails once",
            self.shown()
        );
        Ok(())
    }

    /// Opens the image that was just closed. A task that has let it go may hold its file a moment longer, if its thread was put
    /// aside then.
    async fn open_released(&self) -> Result<Chain> {
        // A base that is to be written as well may be another program's for good, and requests wait.
        let tries_max = if lock(&self.merging).is_some() { MERGING_TRIES } else { RELEASED_TRIES };
        let mut tries = 0;
        loop {
            let opened = open_over(Some(&self.how.templates), &self.path(), &self.image_options()).await;
            let is_held = opened.as_ref().is_err_and(|error| error.kind() == ErrorKind::Locked);
            if !is_held || tries == tries_max {
                return opened;
            }
            tries += 1;
            clock().sleep(RELEASED_EVERY).await;
        }
    }

    pub(super) async fn open_again(self: &Arc<Self>, hold: &Hold, chain: &mut Option<Chain>) -> Result<()> {
        self.release_files(hold, chain).await?;
        let opened = match self.open_released().await {
            Ok(opened) => opened,
            Err(error) => {
                self.forks_read_file().await;
                return Err(error);
            }
        };
        opened.settle().await?;
        let (inner, growing) =
            behind_valve(&opened, &self.path(), &self.how, &self.record, self.over_disk()).await;
        *lock(&self.tallies) = (opened.top_tally.clone(), opened.below_tally());
        self.valve.exchange(hold, inner);
        if !self.is_barred() {
            self.valve.bar(false);
        }
        *self.watcher() = growing;
        *lock(&self.tap) = opened.tap().cloned();
        *chain = Some(opened);
        self.life().set_cut_off(false);
        self.tend();
        self.record.is_well_again();
        self.disk.mend();
        Ok(())
    }

    /// Limits its requests from now on.
    pub(crate) fn limit(&self, limits: RateLimits) {
        self.valve.limit(limits);
    }

    /// How its requests are limited, by names.
    pub(crate) fn rate_limits_said(&self) -> BTreeMap<String, u64> {
        self.valve.limits().said().into_iter().collect()
    }

    /// Lets all waiting requests continue, for good: the server ends.
    pub(crate) fn open_for_good(&self) {
        self.valve.end();
    }

    /// Enlarges the disk, durably. Returns the sizes before and after, in bytes.
    pub(crate) async fn resize(&self, wish: Wish) -> Result<(u64, u64)> {
        let _step = self.begin(Step::Resize)?;
        let mut chain = self.alone().await?;
        let size = wish.bytes(self.disk.geometry().size)?;
        chain.hold_forks().await;
        let grown = self.grow_alone(&mut chain, size).await;
        chain.resume_forks();
        Ok((grown?, size))
    }

    async fn grow_alone(&self, chain: &mut Chain, size: u64) -> Result<u64> {
        if reads_a_snapshot(chain) {
            return Err(self.in_use(IS_READ));
        }
        let (held, before) = (self.hold_in_time().await?, chain.disk().clone());
        let grown = chain.grow(size).await;
        self.follow(held, chain, &before).await;
        grown
    }

    /// Whether a migration forbids to write it, and where its changes are noted.
    fn over_disk(&self) -> (bool, Option<Arc<Notes>>) {
        (self.is_barred(), lock(&self.merging).as_ref().and_then(|merging| merging.notes.clone()))
    }

    /// Requests go to the chain's disk from now on, if that is another one than before. The previous disk
    /// keeps the task that watches its device as long as it is open: of two such tasks one would wait for
    /// answers that the other gets.
    pub(super) async fn follow(&self, held: Held<'_>, chain: &Chain, before: &SharedDisk) {
        if let Some(error) = chain.gone() {
            let (path, error) = (self.shown(), error.chain());
            tracing::error!(
                "{path} is closed, and every request fails until `vellum export reopen` opens it again: {error}"
            );
        }
        if Arc::ptr_eq(before, chain.disk()) {
            return held.finish();
        }
        let (inner, growing) =
            behind_valve(chain, &self.path(), &self.how, &self.record, self.over_disk()).await;
        self.valve.exchange(&held.hold, inner);
        *self.watcher() = growing;
        self.record.work.wake();
        held.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_waits_for_goes_to_its_end() {
        let has_ended = vellum_io::run(vellum_io::IoMode::Threads, async || {
            let has_ended = Arc::new(std::sync::atomic::AtomicBool::new(false));
            let its = has_ended.clone();
            drop(ToItsEnd(Some(spawn_local(async move {
                clock().sleep(Duration::from_millis(5)).await;
                its.store(true, Ordering::Release);
                Ok(())
            }))));
            for _ in 0..10_000 {
                clock().sleep(Duration::from_millis(5)).await;
                if has_ended.load(Ordering::Acquire) {
                    return true;
                }
            }
            false
        });
        assert!(has_ended.expect("a worker"));
    }

    #[test]
    fn sizes_are_whole_sectors_and_there_is_a_largest() {
        for (wish, size) in [
            (Wish::Size(1 << 20), Some(1 << 20)),
            (Wish::Size(1000), Some(1024)),
            (Wish::More(1), Some((1 << 20) + 512)),
            (Wish::More(0), Some(1 << 20)),
            (Wish::More(u64::MAX), None),
            (Wish::Size(u64::MAX), None),
        ] {
            assert_eq!(wish.bytes(1 << 20).ok(), size, "{wish:?}");
        }
    }
}
