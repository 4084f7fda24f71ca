//! The hydration of a served disk: copies of what its guests read from below come into its image, what is missing is
//! copied ahead of need, and in the end it is detached from the images below.
//!
//! ```text
//!   the disk is served ──► task: copies of what guests read │ prefetch ──► complete ──► detached (behind the valve)
//!        │ reopened, removed                                                   └── snapshots: looked at again later
//!        ▼
//!   the task is ended, and waited for: nobody reads the images below when they are closed
//! ```
//!
//! 1. There is one task for each disk that has images below it and may be changed while it is served. It
//!    sleeps until something is wanted.
//! 2. Its settings stay in force when the disk is opened again (`HydrationControl`).
//! 3. Detaching is a step like resizing: it has the chain alone, and requests wait at the valve. They do not wait for what
//!    takes as long as the disk is large: that is done before.
//! 4. Before the first byte is copied, the image durably records what proves those below: at opening where copying was asked
//!    for by then, otherwise in a step when it begins. So copies of one base never meet another.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures_lite::future::{or, zip};
use vellum_core::{CheckedDisk, Error, ErrorKind, Random, Result, lock};
use vellum_format::Wish;
use vellum_io::{Spawned, WorkersHandle, clock};
use vellum_layer::hydrate::{
    Activity, Filler, Guest, HydrationControl, Outcome, PrefetchLimits, Run, SideLimits, State, Tap,
    TapOptions,
};
use vellum_layer::valve;
use vellum_layer::{Chain, Valve};

use super::{How, IS_READ, Served, Step, reads_a_snapshot};
use crate::contained::in_rounds;
use crate::image::ImageOptions;
use crate::spec::{BootTrace, ExportSpec, HydrationSpec};
use crate::stats::HydrationStats;

/// How long to wait before a disk that could not be detached is looked at again.
const AGAIN: Duration = Duration::from_secs(10);
/// How often a disk is made ready to be detached, while guests are at work, before they wait for it.
const PREPARED_MAX: u32 = 3;

/// The guests of a disk.
struct Guests {
    disk: Arc<CheckedDisk>,
    valve: Arc<Valve>,
}

impl Guest for Guests {
    fn activity(&self) -> Activity {
        let counts = self.disk.counts();
        let requests = counts.reads + counts.writes + counts.flushes + counts.zeroes + counts.discards;
        let is_held = self.valve.state() != valve::State::Running;
        Activity { requests, flushes: counts.flushes, is_held }
    }
}

/// The task of a disk.
pub(super) struct Hydrating {
    control: Arc<HydrationControl>,
    task: Spawned<()>,
}

impl Hydrating {
    fn begin(served: &Arc<Served>, tap: Arc<Tap>, workers: &WorkersHandle) -> Self {
        let control = served.hydration.clone();
        control.begin();
        let worker = workers.count() - 1 - served.number() % workers.count();
        let its = served.clone();
        let task = workers.spawn(worker, move || async move {
            let what = format!("the hydration of {}", its.shown());
            let filler = filler(&its, tap);
            in_rounds(&what, async || {
                zip(filler.keep_copies(), its.hydrate(&filler)).await;
                ControlFlow::Break(())
            })
            .await;
        });
        Self { control, task }
    }

    /// Waits until what was begun is done.
    async fn end(self) {
        self.control.end();
        // A worker that has ended has nothing in flight.
        let _ = self.task.await;
    }
}

fn filler(served: &Arc<Served>, tap: Arc<Tap>) -> Filler {
    Filler {
        tap,
        disk: served.disk(),
        aside: served.valve.aside(),
        guest: Arc::new(Guests { disk: served.disk(), valve: served.valve.clone() }),
        clock: clock(),
        // Disks are not to pause in step.
        chance: Random::from_seed(served.number() as u64 ^ u64::from(std::process::id()) << 32),
        turns: served.how.filler_turns.clone(),
        control: served.hydration.clone(),
    }
}

/// How the image of a disk is opened: what is to be seen of its reads from below, and whether it will have copies.
pub(super) fn image_options(export: &ExportSpec, how: &How) -> ImageOptions {
    let HydrationSpec { copy_on_read, prefetch, keeps_order, .. } = export.hydration;
    let is_wanted = how.is_steered || export.hydration.is_wanted();
    let options = TapOptions { copy_on_read, keeps_order, memory: how.copy_memory.clone() };
    let wished_tap = (!export.hydration.ignores_wish).then(|| options.clone());
    let tap = is_wanted.then_some(options);
    let flash = how.flash.as_ref().map(|flash| flash.choice(export.flash_policy));
    let fast = how.fast.clone();
    ImageOptions { tap, wished_tap, flash, fast, pin_base: copy_on_read || prefetch, ..export.image.clone() }
}

/// The names of the limits.
const LIMITS: [&str; 4] = ["base-max", "base-min", "image-max", "image-min"];

/// The limits of a prefetcher by their names: `base-max`, `base-min`, `image-max` and `image-min`, in bytes a second. What
/// is not given has its default.
///
/// # Errors
/// `Invalid` for an unknown name, a most of nothing, and a least that is more than the most.
pub fn prefetch_limits<'a>(said: impl IntoIterator<Item = (&'a str, u64)>) -> Result<PrefetchLimits> {
    let mut limits = PrefetchLimits::default();
    for (name, bytes) in said {
        match name {
            "base-max" => limits.base.upper = Some(bytes),
            "base-min" => limits.base.lower = bytes,
            "image-max" => limits.image.upper = Some(bytes),
            "image-min" => limits.image.lower = bytes,
            _ => {
                let why = format!("unknown limit {name:?}: use {}", LIMITS.join(", "));
                return Err(Error::invalid(why));
            }
        }
    }
    for (side, limits) in [("base", &mut limits.base), ("image", &mut limits.image)] {
        let default = SideLimits::default().lower;
        match limits.upper {
            Some(0) => return Err(Error::invalid(format!("{side}-max must be more than 0"))),
            // Who says only how much there may be, does not say that less is contention.
            Some(upper) if limits.lower == default && upper < default => limits.lower = upper / 2,
            Some(upper) if limits.lower > upper => {
                return Err(Error::invalid(format!("{side}-min is more than {side}-max")));
            }
            _ => {}
        }
    }
    Ok(limits)
}

fn limits_said(limits: PrefetchLimits) -> BTreeMap<String, u64> {
    let PrefetchLimits { base, image } = limits;
    let numbers = [base.upper, Some(base.lower), image.upper, Some(image.lower)];
    let said = LIMITS.iter().zip(numbers).filter_map(|(name, number)| Some(((*name).to_owned(), number?)));
    said.collect()
}

impl Served {
    /// What its hydration does; `None` where there is nothing to copy from.
    pub(crate) fn hydration_stats(&self) -> Option<HydrationStats> {
        let tap = lock(&self.tap).clone();
        let progress = self.hydration.progress();
        let remark = self.hydration_remark(tap.is_some(), progress.state);
        if tap.is_none() && progress.state == State::Off && remark.is_none() {
            return None;
        }
        let is_closed = |chain: &Option<Chain>| chain.as_ref().is_none_or(|chain| chain.gone().is_some());
        let is_closed = self.chain.try_read().is_some_and(|chain| is_closed(&chain));
        let counts = self.hydration.counts();
        let seen = tap.as_ref().map(|tap| tap.counts()).unwrap_or_default();
        Some(HydrationStats {
            state: if is_closed { "closed" } else { progress.state.name() }.to_owned(),
            copy_on_read: tap.is_some_and(|tap| tap.copies_on_read()),
            bytes_missing: progress.missing,
            bytes_per_second: progress.rate,
            seconds_left: progress.left.map(|left| left.as_secs()),
            bytes_fetched: seen.fetched,
            bytes_shared: seen.shared,
            bytes_filled: counts.filled,
            bytes_prefetched: counts.prefetched,
            bytes_dropped: seen.dropped,
            commits: counts.commits,
            pauses: counts.pauses,
            errors: counts.errors,
            last_error: progress.last_error.map(|error| error.chain()),
            limits: limits_said(self.hydration.limits()),
            remark,
        })
    }

    /// Why what was asked for is not done, or not to its end.
    fn hydration_remark(&self, has_tap: bool, state: State) -> Option<String> {
        let said = &self.hydration_said;
        if !has_tap && state == State::Off && (said.copy_on_read || said.prefetch) {
            return self.may_be_hydrated().err().map(|error| error.chain());
        }
        let knows = |chain: &Option<Chain>| chain.as_ref().is_some_and(Chain::has_known_snapshots);
        let stays = has_tap
            && self.hydration.prefetches()
            && self.chain.try_read().is_some_and(|chain| knows(&chain));
        stays.then(|| self.has_snapshots().chain())
    }

    /// Begins to copy ahead of need, or continues, with these limits.
    ///
    /// # Errors
    /// `Unsupported` when the image takes no copies, and what keeps it from recording what proves the images below.
    pub(crate) async fn prefetch(
        &self,
        limits: Option<PrefetchLimits>,
        trace: Option<Arc<[Run]>>,
    ) -> Result<()> {
        self.may_be_hydrated()?;
        self.pin_below().await?;
        self.prefetch_pinned(limits, trace);
        Ok(())
    }

    fn prefetch_pinned(&self, limits: Option<PrefetchLimits>, trace: Option<Arc<[Run]>>) {
        self.hydration.set_prefetch(limits.unwrap_or_else(|| self.hydration.limits()), trace);
    }

    /// Stops copying ahead of need until it is started again.
    pub(crate) fn pause_prefetch(&self) -> Result<()> {
        self.may_be_hydrated()?;
        self.hydration.set_paused(true);
        Ok(())
    }

    /// As fast as it can. Returns when the disk is detached, with the number of bytes that were copied.
    ///
    /// # Errors
    /// What keeps it from going on: errors of the images, snapshots, or no space. It stays as it was then, and what was copied
    /// is kept.
    pub(crate) async fn flatten(&self) -> Result<u64> {
        let before = self.hydration.counts().prefetched;
        if lock(&self.tap).is_none() && self.hydration.progress().state == State::Detached {
            return Ok(0);
        }
        if self.is_barred() {
            self.may_be_hydrated()?;
        }
        // As without a server: it was detached before this one has opened it, or never had anything below it.
        if self.disk_is_written()
            && self.chain.read().await.as_ref().is_some_and(|it| it.members().count() == 1)
        {
            return Ok(0);
        }
        if self.alone().await?.has_snapshots().await? {
            return Err(self.has_snapshots());
        }
        self.prefetch(None, None).await?;
        let errors = self.hydration.counts().errors;
        // Also where several wait for it, and where one of them goes away.
        let hurry = self.hydration.hurry();
        let ended = loop {
            clock().sleep(Duration::from_millis(20)).await;
            let progress = self.hydration.progress();
            match progress.state {
                State::Detached => break Ok(()),
                State::Snapshots => break Err(self.has_snapshots()),
                State::Changed => {
                    let error =
                        progress.last_error.unwrap_or_else(|| Error::new(ErrorKind::Changed, "it changed"));
                    break Err(error.context(format!("can't flatten {}", self.shown())));
                }
                State::NoSpace | State::Failed if self.hydration.counts().errors > errors => {
                    let error = progress.last_error.unwrap_or_else(|| Error::new(ErrorKind::Io, "it failed"));
                    break Err(error.context(format!("can't flatten {}", self.shown())));
                }
                State::Paused => break Err(self.in_use("its prefetching was paused")),
                _ if self.hydration.is_over() => break Err(self.in_use("it is being reopened or removed")),
                _ => {}
            }
        };
        drop(hurry);
        ended.map(|()| self.hydration.counts().prefetched - before)
    }

    fn has_snapshots(&self) -> Error {
        Error::unsupported(format!(
            "{} has snapshots, which also read from its backing image: delete them first",
            self.shown()
        ))
    }

    /// The runs that guests have read first from below, in order, and whether that is all.
    ///
    /// # Errors
    /// `Unsupported` when the order is not kept.
    pub(crate) fn read_order(&self) -> Result<(Vec<Run>, bool)> {
        let tap = lock(&self.tap).clone();
        let tap = tap.filter(|tap| tap.keeps_order()).ok_or_else(|| {
            Error::unsupported(format!(
                "{}: the order in which it is read is not recorded: serve it with --record-trace, over a backing image",
                self.shown()
            ))
        })?;
        Ok(tap.order())
    }

    fn may_be_hydrated(&self) -> Result<()> {
        self.is_not_merging()?;
        let path = self.shown();
        if lock(&self.tap).is_none() {
            return Err(match self.disk_is_written() {
                _ if self.is_barred() => Error::new(
                    ErrorKind::Refused,
                    format!(
                        "{path} is not written while its migration is not complete: `vellum migrate run` completes it"
                    ),
                ),
                true => {
                    Error::unsupported(format!("{path} has no backing image: there is nothing to copy from"))
                }
                false => Error::new(ErrorKind::ReadOnly, format!("{path} is served read-only")),
            });
        }
        let tap = lock(&self.tap).clone();
        if let Some(error) = tap.as_ref().and_then(|tap| tap.changed_below()) {
            return Err(error.clone().context(format!("{path} is not filled")));
        }
        match vellum_core::Disk::filling(&*self.disk) {
            Some(_) => Ok(()),
            None => Err(takes_no_copies(self)),
        }
    }

    /// Begins what the user has asked for when the disk was named.
    pub(super) fn hydrate_as_said(&self, said: &HydrationSpec, wish: Wish) -> Result<()> {
        if said.copy_on_read || said.prefetch {
            match self.may_be_hydrated() {
                Err(error) if lock(&self.tap).is_some() => return Err(error),
                // A server may have many disks, and the option is for all of them.
                Err(error) if !self.is_barred() => {
                    tracing::warn!("--copy-on-read and --prefetch do nothing here: {}", error.chain());
                }
                _ => {}
            }
        }
        if let Some(trace) = said.trace.as_ref().filter(|_| lock(&self.tap).is_some()) {
            self.look_at_trace(trace);
        }
        if said.prefetch && lock(&self.tap).is_some() {
            self.prefetch_pinned(Some(said.limits), said.trace.as_ref().map(|trace| trace.runs.clone()));
        }
        self.heed(said, wish);
        Ok(())
    }

    /// As above, at the start. Nobody holds the chain.
    pub(super) async fn begin_as_said(&self, said: &HydrationSpec, wish: Wish) -> Result<()> {
        self.hydrate_as_said(said, wish)?;
        self.warn_of_snapshots().await
    }

    /// A boot trace of another disk does no harm, and no good.
    fn look_at_trace(&self, trace: &BootTrace) {
        let size = vellum_core::Disk::geometry(&*self.disk).size;
        let past_end = trace.runs.iter().filter(|run| run.at.saturating_add(run.len) > size).count();
        if past_end > 0 {
            tracing::warn!(
                "{} of {} runs of the boot trace {} lie past the end of {}, which has {size} bytes: they are left out. If the \
                 trace is of another disk, record one of this disk with `vellum trace record`",
                past_end,
                trace.runs.len(),
                trace.file.display(),
                self.shown()
            );
        }
    }

    /// Says that it will not be detached as long as it has snapshots.
    async fn warn_of_snapshots(&self) -> Result<()> {
        if !self.hydration.prefetches() {
            return Ok(());
        }
        let chain = self.chain.read().await;
        if let Some(chain) = &*chain
            && chain.has_snapshots().await?
        {
            tracing::warn!(
                "what its snapshots see is not copied, and it stays over its backing image: {}",
                self.has_snapshots().chain()
            );
        }
        Ok(())
    }

    /// Begins what the image asks for. What is not possible is no reason not to serve it.
    fn heed(&self, said: &HydrationSpec, wish: Wish) {
        if said.ignores_wish || wish.is_none() || lock(&self.tap).is_none() {
            return;
        }
        if let Err(error) = self.may_be_hydrated() {
            let path = self.shown();
            tracing::warn!("{path} asks for copies of its backing image, but gets none: {}", error.chain());
        } else if wish.prefetch && !said.prefetch {
            self.prefetch_pinned(Some(said.limits), said.trace.as_ref().map(|trace| trace.runs.clone()));
        }
    }

    /// Starts the task.
    pub(super) fn begin_hydrating(self: &Arc<Self>) {
        let tap = lock(&self.tap).clone();
        if let Some(tap) = tap {
            *lock(&self.hydrating) = Some(Hydrating::begin(self, tap, &self.workers));
        }
    }

    /// Stops the task. Waits until what it had begun is done.
    pub(super) async fn hydrate_no_more(&self) {
        let hydrating = lock(&self.hydrating).take();
        if let Some(hydrating) = hydrating {
            hydrating.end().await;
        }
    }

    /// As above, where requests are not to wait for images below that do not answer.
    ///
    /// # Errors
    /// `Locked` when they do not answer in time. The task ends when they do.
    pub(super) async fn hydrate_no_more_in_time(&self) -> Result<()> {
        let late = async {
            clock().sleep(self.how.patience).await;
            Err(self.in_use("an image below it does not answer: try again when it does"))
        };
        let ended = async {
            self.hydrate_no_more().await;
            Ok(())
        };
        or(ended, late).await
    }

    /// The task that copies ahead of need.
    async fn hydrate(&self, filler: &Filler) {
        let path = self.shown();
        loop {
            match filler.prefetch().await {
                Outcome::Complete => {}
                Outcome::Ended => return,
                Outcome::Changed => {
                    let error = filler.tap.changed_below().map(Error::chain).unwrap_or_default();
                    return tracing::warn!("{path} gets no more copies of what is below it: {error}");
                }
            }
            match self.detach().await {
                Ok(()) => {
                    tracing::info!("{path} has everything and no longer needs its backing image");
                    return self.hydration.end();
                }
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    self.hydration.set_state(State::Snapshots)
                }
                Err(_) if filler.tap.changed_below().is_some() => continue,
                // It was stopped while it was made ready.
                Err(_) if self.hydration.is_over() => return,
                Err(error) => {
                    tracing::warn!("{path} could not be detached from its backing image: {}", error.chain());
                    self.hydration.set_failed(State::Failed, error);
                }
            }
            self.hydration.wait(&*clock(), AGAIN).await;
        }
    }

    /// Makes the image record what proves those below, unless it does. Requests wait meanwhile.
    async fn pin_below(&self) -> Result<()> {
        let _step = self.begin(Step::Pin)?;
        let mut chain = self.alone().await?;
        if chain.pin_to_record()?.is_none() {
            return Ok(());
        }
        if reads_a_snapshot(&chain) {
            return Err(self.in_use(IS_READ));
        }
        let (held, before) = (self.hold_in_time().await?, chain.disk().clone());
        let pinned = chain.pin_below().await;
        self.follow(held, &chain, &before).await;
        pinned
    }

    /// Makes the image independent of those below. What takes long is done while guests are at work; requests wait for the
    /// rest.
    async fn detach(&self) -> Result<()> {
        let _step = self.begin(Step::Detach)?;
        let mut chain = self.alone().await?;
        if chain.has_snapshots().await? {
            return Err(self.has_snapshots());
        }
        if reads_a_snapshot(&chain) {
            return Err(self.in_use(IS_READ));
        }
        self.hydration.set_state(State::Detaching);
        let stop = || self.hydration.is_over();
        let mut tries = 0;
        let held = loop {
            chain.prepare_detach(&stop).await?;
            let held = self.hold_in_time().await?;
            // A request that failed meanwhile may have undone it. It is tried again, as long as that is not the rule.
            tries += 1;
            if chain.can_be_detached() || tries == PREPARED_MAX {
                break held;
            }
            held.finish();
        };
        let before = chain.disk().clone();
        chain.hold_forks().await;
        let detached = chain.detach(&AtomicBool::new(false)).await;
        chain.resume_forks();
        self.follow(held, &chain, &before).await;
        *lock(&self.tap) = chain.tap().cloned();
        if chain.tap().is_none() {
            self.hydration.set_state(State::Detached);
        }
        detached
    }
}

/// Why the image of a disk is not filled.
fn takes_no_copies(served: &Served) -> Error {
    Error::unsupported(format!(
        "{}: this image takes no copies of its backing image while it is served; `vellum flatten` copies everything \
         while it is not",
        served.shown()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_have_names_and_a_least_is_no_more_than_the_most() {
        let limits = prefetch_limits([("base-max", 5 << 20), ("image-min", 0)]).expect("they go together");
        assert_eq!(limits.base, SideLimits { upper: Some(5 << 20), lower: 1 << 20 });
        assert_eq!(limits.image, SideLimits { upper: None, lower: 0 });
        assert_eq!(limits_said(limits).len(), 3);
        let slow = prefetch_limits([("base-max", 100_000)]).expect("it is slow");
        assert_eq!(slow.base.lower, 50_000);
        for wrong in [("base", 1), ("base-max", 0), ("image-max", 0)] {
            assert!(prefetch_limits([wrong]).is_err(), "{wrong:?}");
        }
        assert!(prefetch_limits([("base-max", 10), ("base-min", 11)]).is_err());
    }
}
