//! A commit of a disk that is served: what images of its chain have goes into one below them, while guests are at work.
//!
//! ```text
//!   requests wait    close ► pins out, the base is enlarged ► open, the base for writing too
//!   guests at work   copy ► in rounds: what was changed meanwhile ► flush
//!   requests wait    the rest ► flush the base ► close ► commit point ► open
//!
//!   the image on top is committed    an empty image over the base takes its name; the base is on top from now on
//!   images between are               the image above them names the base
//! ```
//!
//! `docs/design/0025-live-chains.md` argues why a crash loses nothing.
//!
//! 1. Until the commit point the chain as it was is the disk: the base was written only where those above hide it.
//! 2. At the commit point the base has everything, durably. What has the name of the image that was on top reads as the base
//!    does, then and later, as nothing is written there: either of the two can be served after a crash.
//! 3. The image on top is copied while it is written: its changes are noted ([`Notes`]), and copied again.
//! 4. Whatever fails or is cancelled leaves the chain as it was, over a base that makes sense only below it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vellum_core::{Error, ErrorKind, GuestOffset, Result, SharedDisk, lock};
use vellum_format::FormatKind;
use vellum_io::{Draft, clock};
use vellum_layer::merge::Merge;
use vellum_layer::noted::Notes;
use vellum_layer::{Chain, Referrer, Trust};

use super::job::{Job, JobStep};
use super::steer::Held;
use super::{ENDING_EVERY, Place, Served, Step};
use crate::commit::{
    Plan, enlarge_base, give_pins_back, plan_of, put_pin, refuse_others, say_format, skip_merged,
};
use crate::contained::contained;
use crate::create::backing_name;
use crate::host::{Host, canonical_path};
use crate::image::ImageOptions;
use crate::new_top::NewTop;
use crate::stats::JobStats;

/// When no more than this is to be copied, requests wait for the rest.
const REST_MAX: u64 = 8 << 20;

/// How long to wait where requests cannot be stopped.
pub(super) const AGAIN: Duration = Duration::from_millis(200);

/// What is to be written where.
#[derive(Debug, Clone, Default)]
pub(crate) struct LiveCommit {
    /// The uppermost image whose contents are written; the one on top when not given, which then is no more.
    pub(crate) top: Option<PathBuf>,
    /// The image below that gets them; the one directly below when not given.
    pub(crate) base: Option<PathBuf>,
    /// Also where other images stand on what becomes useless.
    pub(crate) force: bool,
    /// Bytes of data a second, at most.
    pub(crate) rate: Option<u64>,
}

/// An image of the chain is written besides the one on top.
#[derive(Debug, Clone)]
pub(super) struct Merging {
    /// How many images are above it.
    pub(super) into: usize,
    /// What is changed in the one on top, where that is copied.
    pub(super) notes: Option<Arc<Notes>>,
}

impl Served {
    /// Begins a commit. It goes on when this has returned; its job says how far it is.
    ///
    /// # Errors
    /// What keeps it from being begun: `Unsupported` for chains that have none, `Refused` when other images stand on what
    /// becomes useless, and the errors of the images. Nothing has changed then but what proves images to those above them.
    pub(crate) async fn commit(self: &Arc<Self>, wish: &LiveCommit) -> Result<JobStats> {
        let step = JobStep::begin(self, Step::Commit)?;
        let mut chain = self.alone_or_closed().await?;
        let open = chain.as_ref().ok_or_else(|| self.is_closed())?;
        self.chain_may_change(open)?;
        let mut plan = plan_of(open, wish.top.as_deref(), wish.base.as_deref()).await?;
        self.may_commit(open, &plan).await?;
        if !wish.force {
            refuse_others(&plan).await?;
        }
        self.is_the_same_file(Some(open)).await?;
        self.could_be_opened_again(Some(open)).await?;
        let empty = match plan.from {
            0 => Some(NewTop::like(open.top(), open.top().head.kind(), &self.image.secrets).await?),
            _ => None,
        };
        let size = plan.size();
        let job = Job::new("commit", (plan.base.clone(), plan.between()), size, wish.rate);
        if let Some(flash) = open.flash() {
            flash.drain().await?;
        }
        self.has_room_in_time(open).await?;
        let held = self.hold_to_change(chain.as_ref()).await?;
        let closed = self.close_held(&held, &mut chain).await;
        let is_closed = closed.is_ok();
        let prepared = match closed {
            Ok(()) => self.prepare_commit(&mut plan).await,
            failed => failed,
        };
        let opened = match prepared {
            Ok(()) => {
                let notes = (plan.from == 0).then(|| Notes::new(size));
                *lock(&self.merging) = Some(Merging { into: plan.layers.len(), notes });
                self.open_again(&held.hold, &mut chain).await
            }
            failed => failed,
        };
        if let Err(error) = opened {
            *lock(&self.merging) = None;
            let name = plan.base.display().to_string();
            // The base is as it was, unless it is larger now, which no pin would allow.
            if is_closed
                && plan.base_size >= plan.layers[plan.from].size
                && let Err(pins) = give_pins_back(&plan, &self.image).await
            {
                tracing::warn!(
                    "{name}: what proves it to those above is not recorded any more: {}",
                    pins.chain()
                );
            }
            let back = self.open_again(&held.hold, &mut chain).await;
            held.finish();
            back?;
            return Err(error.context(format!("can't commit into {name}")));
        }
        held.finish();
        drop(chain);
        *lock(&self.job) = Some(job.clone());
        let stats = job.stats();
        let (its, worker) = (self.clone(), self.workers.count() - 1 - self.number % self.workers.count());
        let what = format!("the commit of {}", self.shown());
        // It goes on when nobody waits for it.
        drop(self.workers.spawn(worker, move || async move {
            let ended = contained(&what, its.carry_out_commit(&job, &plan, empty)).await;
            match &ended {
                Ok(image) => tracing::warn!(
                    "{} is on top from now on, and has everything that was committed",
                    image.display()
                ),
                Err(error) => {
                    tracing::warn!("{what} has ended, and its chain is as before: {}", error.chain())
                }
            }
            drop(step);
            job.end(ended);
        }));
        Ok(stats)
    }

    /// Refuses disks whose chain cannot be changed while they are served.
    pub(super) fn chain_may_change(&self, open: &Chain) -> Result<()> {
        let path = self.shown();
        if self.image.snapshot.is_some() || !self.disk_is_written() || self.is_barred() {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{path} is not written here")));
        }
        if self.disk.is_broken() || self.life().is_cut_off() || self.record.is_poisoned() {
            let why =
                format!("{path} has failed and may have lost writes: `vellum export reopen` recovers it");
            return Err(Error::new(ErrorKind::Poisoned, why));
        }
        if open.top().head.handover().is_some() {
            return Err(Error::unsupported(format!(
                "{path} has taken over its disk in a migration, which its header must go on to say: make it independent \
                 (`vellum flatten`)"
            )));
        }
        self.flash_works(Some(open))
    }

    /// Refuses disks with bitmaps where another image comes on top: they would mark nothing more.
    pub(super) fn has_no_bitmaps(&self) -> Result<()> {
        match self.bitmaps.is_empty() {
            true => Ok(()),
            false => Err(Error::unsupported(format!(
                "{} has bitmaps ({}), which would not mark what is written to another image: remove them first (`vellum bitmap \
                 --remove`)",
                self.shown(),
                self.bitmaps.join(", ")
            ))),
        }
    }

    async fn may_commit(&self, open: &Chain, plan: &Plan) -> Result<()> {
        let base = plan.base.display();
        let (size, top) = (plan.layers[plan.from].size, open.top());
        let depth = plan.layers.len();
        let encrypted =
            (plan.from..depth).map(|at| open.member(at)).find(|member| member.head.is_encrypted());
        if let Some(member) = encrypted.filter(|_| !open.member(depth).head.is_encrypted()) {
            return Err(Error::unsupported(format!(
                "{} is encrypted and {base} is not: what it has would be readable there without a secret. Convert {base} into an \
                 encrypted image first (`vellum convert -o encrypt.format=luks`), or commit it when no server has it",
                member.path.display()
            )));
        }
        if plan.from == 0 {
            self.has_no_bitmaps()?;
            let path = self.shown();
            if plan.base_size > size {
                return Err(Error::unsupported(format!(
                    "{base} has {} bytes, {path} has {size}, and a disk that is served becomes no larger by a commit: make it \
                     as large first (`vellum resize --control`)",
                    plan.base_size
                )));
            }
            if let Some((file, _)) = &top.data_file {
                return Err(Error::unsupported(format!(
                    "{path} has its data in {}: stop the server, and commit it then",
                    file.display()
                )));
            }
            return Ok(());
        }
        let above = &plan.layers[plan.from - 1];
        if above.format == FormatKind::Native && plan.base_size > size {
            return Err(Error::unsupported(format!(
                "{base} has {} bytes, and the backing image of {}, a vellum image, must have {size}",
                plan.base_size,
                above.path.display()
            )));
        }
        let canonical = async |path: &Path| {
            canonical_path(path)
                .await
                .map_err(|error| Error::io(error, format!("can't find {}", path.display())))
        };
        let referrer = &canonical(&above.path).await?;
        let referrer = Referrer { canonical: referrer, is_device: false, trust: Trust::Declared };
        Host::gate(&self.image.allow_dirs, &[])?.check(referrer, &canonical(&plan.base).await?)
    }

    /// What is done with the closed images before anything is copied.
    async fn prepare_commit(&self, plan: &mut Plan) -> Result<()> {
        if plan.from == 0 {
            let top = self.path();
            let can_be = Draft::begin(&top).await?.is_some_and(|draft| draft.replaces());
            if !can_be {
                return Err(Error::unsupported(format!(
                    "{}: another file cannot take its place (a device, a file with several names, or one with access \
                     lists): stop the server, and commit it then",
                    top.display()
                )));
            }
        }
        say_format(plan, &self.image).await?;
        for layer in &plan.layers {
            put_pin(layer, &self.image, None).await?;
        }
        enlarge_base(plan, &self.image).await
    }

    /// Returns the image that is on top in the end.
    async fn carry_out_commit(
        self: &Arc<Self>,
        job: &Job,
        plan: &Plan,
        empty: Option<NewTop>,
    ) -> Result<PathBuf> {
        let notes = lock(&self.merging).as_ref().and_then(|merging| merging.notes.clone());
        let disks = self.disks_of(plan).await;
        let copied = match disks {
            Ok((layers, base)) => {
                let merge = Merge { layers, base, steering: job };
                copy(&merge, job, plan.size(), notes.as_deref()).await.map(|()| merge)
            }
            Err(error) => Err(error),
        };
        let mut chain = self.alone_at_last().await;
        let held = loop {
            match self.hold_to_change(chain.as_ref()).await {
                Ok(held) => break held,
                // Requests, or a flush, hang: they are waited for.
                Err(_) => clock().sleep(AGAIN).await,
            }
        };
        // From here on to the end requests wait.
        let copied = match copied {
            Ok(_) if job.is_cancelled() => Err(Error::new(ErrorKind::Closed, "it was cancelled")),
            Ok(merge) => {
                job.hurry();
                let rest = match &notes {
                    Some(notes) => copy_noted(&merge, job, notes).await,
                    None => Ok(()),
                };
                match rest {
                    Ok(()) => merge.flush().await,
                    failed => failed,
                }
            }
            Err(error) => Err(error),
        };
        let closed = self.close_held(&held, &mut chain).await;
        *lock(&self.merging) = None;
        let before = lock(&self.place).clone();
        let switched = match copied.and(closed) {
            Ok(()) => self.switch_to_base(plan, &before, empty).await,
            failed => failed,
        };
        let mut opened = self.open_again(&held.hold, &mut chain).await;
        if opened.is_err() && switched.is_ok() && plan.from == 0 {
            // It reads the same, over the base.
            *lock(&self.place) = before;
            if let Err(error) = &opened {
                tracing::error!("{} can't be served itself: {}", plan.base.display(), error.chain());
            }
            opened = self.open_again(&held.hold, &mut chain).await;
        }
        held.finish();
        opened?;
        switched?;
        let path = self.path();
        self.record.is_of(path.display().to_string());
        Ok(path)
    }

    /// The disks of the images whose contents are written, and the one that gets them.
    async fn disks_of(&self, plan: &Plan) -> Result<(Vec<SharedDisk>, SharedDisk)> {
        let chain = self.chain.read().await;
        let open = chain.as_ref().ok_or_else(|| self.is_closed())?;
        let depth = plan.layers.len();
        let layers = (plan.from..depth).map(|depth| open.member(depth).disk().clone()).collect();
        Ok((layers, open.member(depth).opened.disk.clone()))
    }

    /// The chain, exclusively, however long that takes.
    pub(super) async fn alone_at_last(&self) -> async_lock::RwLockWriteGuard<'_, Option<Chain>> {
        loop {
            match self.alone_or_closed().await {
                Ok(chain) => return chain,
                Err(_) => clock().sleep(ENDING_EVERY).await,
            }
        }
    }

    /// No request is in flight, everything that was answered is durable, and nothing is done in the background: requests need not wait
    /// until that has ended.
    pub(super) async fn hold_to_change(self: &Arc<Self>, chain: Option<&Chain>) -> Result<Held<'_>> {
        let held = match self.tend_no_more_in_time().await {
            Ok(()) => self.hold_flushed(chain).await,
            Err(error) => Err(error),
        };
        if held.is_err() {
            chain.iter().for_each(|chain| chain.resume_forks());
            self.tend();
        }
        held
    }

    /// Closes the image while requests wait. It is opened again in any case.
    pub(super) async fn close_held(&self, held: &Held<'_>, chain: &mut Option<Chain>) -> Result<()> {
        let (top, below) = match chain.as_ref() {
            Some(open) => open.close_each().await,
            None => (Ok(()), Ok(())),
        };
        // An image below that could not be closed has lost nothing of the disk.
        if top.is_err() && !self.how.is_durable {
            self.valve.lose(&held.hold);
            self.reconnects.lost();
        }
        self.tend_no_more().await;
        // It has those below open, of which one may be opened for writing.
        *lock(&self.tap) = None;
        let released = self.release_files(&held.hold, chain).await;
        top.and(below).and(released)
    }

    /// All images are closed, and the base has everything. An image that was on top is replaced by this one without
    /// data.
    async fn switch_to_base(&self, plan: &Plan, before: &Place, empty: Option<NewTop>) -> Result<()> {
        if plan.from > 0 {
            let name = backing_name(&plan.base, &plan.layers[plan.from - 1].path)?;
            return skip_merged(plan, &name, &self.image).await;
        }
        let canonical = canonical_path(&plan.base)
            .await
            .map_err(|error| Error::io(error, format!("can't find {}", plan.base.display())))?;
        let draft = Draft::begin(&before.path).await?.filter(|draft| draft.replaces());
        let draft = draft.ok_or_else(|| {
            Error::unsupported(format!("{}: another file cannot take its place", before.path.display()))
        })?;
        let name = backing_name(&plan.base, &before.path)?;
        let empty = empty.expect("it was made out when the commit began");
        let slots_left = empty.slots_left();
        empty.make(&draft, plan.layers[0].size, (name, plan.format)).await?;
        NewTop::say_slots_left(&slots_left, &before.path, &before.path);
        draft.publish().await?; // commit point
        *lock(&self.place) =
            Place { path: plan.base.clone(), canonical, format: plan.format, stated: Some(plan.format) };
        self.hydration.set_off();
        Ok(())
    }

    /// Fails while an image below is written: what reads from there cannot be begun.
    pub(super) fn is_not_merging(&self) -> Result<()> {
        match lock(&self.merging).is_some() {
            true => Err(self.in_use(Step::Commit.words())),
            false => Ok(()),
        }
    }

    /// Fails while its chain is being changed: a snapshot would read from what changes.
    pub(super) fn has_no_job(&self) -> Result<()> {
        let is_at_work = lock(&self.job).as_ref().is_some_and(|job| !job.has_ended());
        match is_at_work {
            true => Err(self.in_use(Step::Commit.words())),
            false => Ok(()),
        }
    }

    /// How the images are opened while one below is written as well.
    pub(super) fn put_merging(&self, options: &mut ImageOptions) {
        if let Some(Merging { into, .. }) = &*lock(&self.merging) {
            options.merges_into = Some(*into);
            (options.tap, options.wished_tap, options.pin_base) = (None, None, false);
        }
    }
}

/// Copies until little is left to be copied.
async fn copy(merge: &Merge<'_>, job: &Job, size: u64, notes: Option<&Notes>) -> Result<()> {
    merge.all(size, &|done| job.set_done(done)).await?;
    merge.flush().await?;
    let Some(notes) = notes else { return Ok(()) };
    while notes.bytes() > REST_MAX {
        copy_noted(merge, job, notes).await?;
        merge.flush().await?;
    }
    Ok(())
}

/// Copies what was changed.
async fn copy_noted(merge: &Merge<'_>, job: &Job, notes: &Notes) -> Result<()> {
    let mut at = GuestOffset::ZERO;
    job.set_left(notes.bytes());
    while let Some(span) = notes.take(at) {
        merge.span(span).await?;
        at = span.end();
        job.set_left(notes.bytes());
    }
    Ok(())
}
