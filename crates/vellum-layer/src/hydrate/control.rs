//! Settings and progress of a hydration: shared by the tasks that do it and those that steer it, and kept when the disk
//! is opened again.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{Clock, Error, lock};

use super::order::Run;
use super::pace::PrefetchLimits;

/// A rate is that of at least this long.
const RATE_OVER: Duration = Duration::from_secs(1);

/// What a prefetcher does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum State {
    /// It is not wanted.
    #[default]
    Off,
    /// It copies, or is about to.
    Running,
    /// A user has paused it.
    Paused,
    /// It waits: something else needed what it uses.
    Contended,
    /// It waits: what it had found missing could not be filled, such as what a snapshot sees.
    Waiting,
    /// It waits: the disk below does not answer.
    NoAnswer,
    /// It waits: the host has no space for more.
    NoSpace,
    /// It waits after an error, and tries again.
    Failed,
    /// A file below has changed: nothing is copied any more, until the disk is opened anew.
    Changed,
    /// Everything is in the image; snapshots keep it from being detached.
    Snapshots,
    /// Everything is in the image, and the disk is being detached.
    Detaching,
    /// The image needs no other one.
    Detached,
}

impl State {
    /// In one word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Contended => "contended",
            Self::Waiting => "waiting",
            Self::NoAnswer => "no answer",
            Self::NoSpace => "no space",
            Self::Failed => "failed",
            Self::Changed => "base changed",
            Self::Snapshots => "snapshots",
            Self::Detaching => "detaching",
            Self::Detached => "detached",
        }
    }
}

/// How far a hydration is.
#[derive(Debug, Clone, Default)]
pub struct Progress {
    /// What the prefetcher does.
    pub state: State,
    /// Bytes that were missing when it last began to look at the whole disk, less what was filled since; `None` before.
    pub missing: Option<u64>,
    /// Bytes a second that come into the image.
    pub rate: u64,
    /// How long the rest takes at this rate.
    pub left: Option<Duration>,
    /// What went wrong last.
    pub last_error: Option<Error>,
}

/// What was counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HydrationCounts {
    /// Bytes that guests read and that were copied into the image.
    pub filled: u64,
    /// Bytes that were copied ahead of need.
    pub prefetched: u64,
    /// Flushes that no guest had asked for.
    pub commits: u64,
    /// Pauses because of contention.
    pub pauses: u64,
    /// Copies that failed.
    pub errors: u64,
}

#[derive(Debug, Default)]
pub(super) struct Tallies {
    /// Bytes that any fill has kept, counted as soon as it has.
    pub(super) kept: AtomicU64,
    /// Fills that have begun, and those that are under way.
    pub(super) fills: AtomicU64,
    pub(super) filling: AtomicUsize,
    pub(super) filled: AtomicU64,
    pub(super) prefetched: AtomicU64,
    pub(super) commits: AtomicU64,
    pub(super) pauses: AtomicU64,
    pub(super) errors: AtomicU64,
}

#[derive(Debug, Default)]
struct Rate {
    since: Duration,
    bytes: u64,
    per_second: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct HydrationControl {
    prefetches: AtomicBool,
    is_paused: AtomicBool,
    hurries: AtomicUsize,
    has_ended: AtomicBool,
    changed: Event,
    limits: Mutex<PrefetchLimits>,
    trace: Mutex<Arc<[Run]>>,
    progress: Mutex<Progress>,
    rate: Mutex<Rate>,
    pub(super) tallies: Tallies,
}

/// Somebody waits for the end of a hydration, until dropped.
#[derive(Debug)]
pub struct Hurry<'a>(&'a HydrationControl);

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.hurries.fetch_sub(1, Ordering::AcqRel);
        self.0.changed.notify(usize::MAX);
    }
}

impl HydrationControl {
    /// What is missing is copied ahead of need, in this order first, within these limits.
    pub fn set_prefetch(&self, limits: PrefetchLimits, trace: Option<Arc<[Run]>>) {
        *lock(&self.limits) = limits;
        if let Some(trace) = trace {
            *lock(&self.trace) = trace;
        }
        self.is_paused.store(false, Ordering::Release);
        if !self.prefetches.swap(true, Ordering::AcqRel) {
            self.set_state(State::Running);
        }
        self.changed.notify(usize::MAX);
    }

    /// Nothing is copied ahead of need any more: the disk has another image.
    pub fn set_off(&self) {
        self.prefetches.store(false, Ordering::Release);
        self.is_paused.store(false, Ordering::Release);
        *lock(&self.progress) = Progress::default();
        self.changed.notify(usize::MAX);
    }

    /// The limits in force.
    pub fn limits(&self) -> PrefetchLimits {
        *lock(&self.limits)
    }

    /// As fast as it can, with flushes of its own, until this is dropped, and all others of them.
    pub fn hurry(&self) -> Hurry<'_> {
        self.hurries.fetch_add(1, Ordering::AcqRel);
        self.changed.notify(usize::MAX);
        Hurry(self)
    }

    /// Whether nothing is waited for.
    pub fn hurries(&self) -> bool {
        self.hurries.load(Ordering::Acquire) > 0
    }

    /// Pauses the prefetcher, or lets it continue.
    pub fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Release);
        self.changed.notify(usize::MAX);
    }

    /// Whether there is anything to do ahead of need.
    pub fn prefetches(&self) -> bool {
        self.prefetches.load(Ordering::Acquire)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Acquire)
    }

    /// Begins anew, after the disk was opened again.
    pub fn begin(&self) {
        self.has_ended.store(false, Ordering::Release);
    }

    /// The tasks end when what they have begun is done.
    pub fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
        self.changed.notify(usize::MAX);
    }

    /// Whether its tasks have been told to end.
    pub fn is_over(&self) -> bool {
        self.has_ended()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    pub(super) fn trace(&self) -> Arc<[Run]> {
        lock(&self.trace).clone()
    }

    /// Waits this long, or until something was said.
    pub async fn wait(&self, clock: &dyn Clock, wait: Duration) {
        let changed = self.changed.listen();
        if !self.has_ended() {
            or(changed, clock.sleep(wait)).await;
        }
    }

    /// Waits until something was said.
    pub(super) async fn wait_for_word(&self, is_so: impl Fn() -> bool) {
        while is_so() && !self.has_ended() {
            let changed = self.changed.listen();
            if is_so() && !self.has_ended() {
                changed.await;
            }
        }
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        let mut progress = lock(&self.progress).clone();
        // What is under way may take long: a disk below that hangs is not waited for to say so.
        let is_at_work = !matches!(
            progress.state,
            State::Off | State::Changed | State::Snapshots | State::Detaching | State::Detached
        );
        if self.is_paused() && is_at_work {
            progress.state = State::Paused;
        }
        // Nothing that went wrong on the way is wrong any more.
        progress.last_error.take_if(|_| progress.state == State::Detached);
        if progress.state == State::Running {
            progress.rate = lock(&self.rate).per_second;
            let missing = progress.missing.filter(|_| progress.rate > 0);
            progress.left = missing.map(|missing| Duration::from_secs(missing / progress.rate));
        }
        progress
    }

    /// What it does now.
    pub fn set_state(&self, state: State) {
        lock(&self.progress).state = state;
    }

    pub(super) fn set_missing(&self, missing: u64) {
        lock(&self.progress).missing = Some(missing);
    }

    /// Something went wrong.
    pub fn set_failed(&self, state: State, error: Error) {
        let mut progress = lock(&self.progress);
        (progress.state, progress.last_error) = (state, Some(error));
        self.tallies.errors.fetch_add(1, Ordering::Relaxed);
    }

    /// A file below has changed. Whoever waits for a word notices.
    pub(super) fn set_changed(&self, error: Error) {
        self.set_failed(State::Changed, error);
        self.changed.notify(usize::MAX);
    }

    pub(super) fn count_prefetched(&self, bytes: u64, now: Duration) {
        self.tallies.prefetched.fetch_add(bytes, Ordering::Relaxed);
        let mut rate = lock(&self.rate);
        rate.bytes += bytes;
        let over = now.saturating_sub(rate.since);
        if over >= RATE_OVER {
            rate.per_second =
                u64::try_from(u128::from(rate.bytes) * 1000 / over.as_millis()).unwrap_or(u64::MAX);
            (rate.since, rate.bytes) = (now, 0);
        }
        drop(rate);
        self.is_less_missing(bytes);
    }

    pub(super) fn is_less_missing(&self, bytes: u64) {
        let mut progress = lock(&self.progress);
        progress.missing = progress.missing.map(|missing| missing.saturating_sub(bytes));
    }

    /// What was counted.
    pub fn counts(&self) -> HydrationCounts {
        let of = |tally: &AtomicU64| tally.load(Ordering::Relaxed);
        let Tallies { filled, prefetched, commits, pauses, errors, .. } = &self.tallies;
        HydrationCounts {
            filled: of(filled),
            prefetched: of(prefetched),
            commits: of(commits),
            pauses: of(pauses),
            errors: of(errors),
        }
    }
}
