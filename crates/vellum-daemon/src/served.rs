//! The disks of a server: open, counted, and closed and opened again one at a time when a disk is restored
//! from a snapshot or grows.
//!
//! ```text
//!   exports   "" "disk"        the disk as it is now           one chain per image file, however many names it has
//!             "@NAME" "disk@NAME"   a snapshot, for reading    made when a client asks, gone with the last one
//! ```
//!
//! 1. Making, listing or deleting a snapshot shares the chain. Restoring one needs the chain exclusively,
//!    with no client connected.
//! 2. A name that was given to an export takes precedence over a snapshot's.
//! 3. An export keeps its disk from beginning to end: the valve may exchange the disk behind it
//!    (`vellum_layer::valve`).
//! 4. Which operations may run beside those in progress is recorded in the disk's book (`life`).
//! 5. Each disk ends independently: its sessions, then its background task, then the image. None waits for
//!    another.

mod backup;
mod behind;
mod clones;
mod committing;
mod disks;
mod external;
mod flashed;
mod gone;
mod hand_over;
mod hydrating;
mod job;
mod life;
mod marks;
mod place;
mod rebasing;
mod snapshots;
mod steer;
mod tending;
#[cfg(test)]
mod tests;
mod tiered;
mod warming;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use async_lock::{RwLock, RwLockReadGuard};
use futures_lite::future::or;
use vellum_core::{
    CheckedDisk, Context, Disk as _, Error, ErrorKind, HostTally, Result, SharedDisk, join_all, lock,
};
use vellum_export::Shutdown;
use vellum_export::nbd::{Export, Exports, Removed};
use vellum_export::vhost::Reconnects;
use vellum_flash::FlashPolicy;
use vellum_format::fast::FastMedium;
use vellum_format::image::{Snapshot, SnapshotSupport, Snapshots};
use vellum_io::{WorkersHandle, clock, unblock};
use vellum_layer::hydrate::{CopyMemory, FillerTurns, HydrationControl, Tap};
use vellum_layer::valve::{Hold, State};
use vellum_layer::{Chain, Member, SparseMode, Templates, Valve};

use crate::bitmaps::names_of;
use crate::control::SnapshotFacts;
use crate::flash::{FlashStats, HostFlash};
use crate::grow::{GrowHook, Growing};
use crate::host::canonical_path;
use crate::image::ImageOptions;
use crate::meter::{LONG, Record};
use crate::spec::{ExportSpec, HydrationSpec, ReadyDisk};
use crate::stats::DiskStats;
use behind::behind_valve;
pub(crate) use committing::LiveCommit;
use committing::Merging;
pub(crate) use disks::{Disks, Opening};
pub(crate) use external::{Overlay, put_on_top};
use gone::Gone;
pub use hydrating::prefetch_limits;
use hydrating::{Hydrating, image_options};
use job::Job;
pub(crate) use job::JobWish;
use life::{Life, Stage, Step};
use place::Place;
pub(crate) use rebasing::LiveRebase;
pub(crate) use snapshots::SnapshotExports;
pub(crate) use steer::Wish;
use tending::Tending;
use tiered::Tiering;

use crate::window::Part;

/// How long the requests that are under way may take before a disk is exchanged, and the flush before it is removed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// How all disks of a server are served.
#[derive(Debug, Clone)]
pub(crate) struct How {
    /// Makes a device larger that becomes full.
    pub(crate) grow_hook: Option<GrowHook>,
    /// There is a control socket, so disks can be paused, and more.
    pub(crate) is_steered: bool,
    /// Each write is durable when it is answered.
    pub(crate) is_durable: bool,
    /// Requests that find no space wait for some.
    pub(crate) holds_when_full: bool,
    /// What becomes of discards, and of zeros that are written.
    pub(crate) sparse: SparseMode,
    /// The part of the disk that guests see; all of it by default.
    pub(crate) part: Option<Part>,
    /// The longest wait for requests before a disk is exchanged, and for the flush before it is removed.
    pub(crate) patience: Duration,
    /// The images that the disks stand on.
    pub(crate) templates: Arc<Templates>,
    /// What copies of what guests read may take in memory.
    pub(crate) copy_memory: Arc<CopyMemory>,
    /// Those that fill images take turns.
    pub(crate) filler_turns: FillerTurns,
    /// The flash cache over the disks.
    pub(crate) flash: Option<Arc<HostFlash>>,
    /// The fast medium of images that name it.
    pub(crate) fast: Option<Arc<FastMedium>>,
    /// What guests read often comes to it.
    pub(crate) warms: bool,
}

/// A disk that is open.
pub(crate) struct Served {
    own: Weak<Self>,
    /// Its place among the disks of the server.
    number: usize,
    /// The names of its bitmaps.
    bitmaps: Vec<String>,
    place: Mutex<Place>,
    life: Mutex<Life>,
    /// How the image that it was named with is opened.
    image: ImageOptions,
    how: Arc<How>,
    workers: WorkersHandle,
    /// Nothing, when it could not be opened again.
    chain: RwLock<Option<Chain>>,
    /// What the top image costs the host, and those below it.
    tallies: Mutex<(HostTally, HostTally)>,
    /// Users of the disk besides the sessions of its exports: while there are any, the disk is not exchanged
    /// for another one.
    holders: AtomicUsize,
    valve: Arc<Valve>,
    record: Arc<Record>,
    /// What is exported: the valve, counted; without a control socket, the disk behind it.
    disk: Arc<CheckedDisk>,
    /// The task that enlarges its device when it becomes full, if there is one.
    growing: Mutex<Option<Arc<Growing>>>,
    tending: Mutex<Option<Tending>>,
    /// Settings and progress of its hydration.
    hydration: Arc<HydrationControl>,
    /// What sees the reads of its image from below.
    tap: Mutex<Option<Arc<Tap>>>,
    hydrating: Mutex<Option<Hydrating>>,
    /// What the user has asked for when the disk was named.
    hydration_said: HydrationSpec,
    /// The last policy of the flash cache that was asked for while it is served.
    flash_policy: Mutex<Option<FlashPolicy>>,
    /// Front ends that come from a server before this one.
    reconnects: Reconnects,
    /// The user wants it writable, and a migration forbids that.
    is_barred: AtomicBool,
    /// What follows the description of its exports.
    remark: Mutex<String>,
    /// Disconnects the readers of its snapshots.
    readers: Shutdown,
    /// The number of losses that were reported to the client that opened it again.
    losses_said: AtomicU64,
    /// What the flash cache had done for it when that was asked last.
    flash_stats: Mutex<Option<FlashStats>>,
    /// How often a snapshot was marked for clones; held while a mark is set or cleared.
    clone_marks: async_lock::Mutex<u64>,
    tiering: Tiering,
    /// The last work on its chain.
    job: Mutex<Option<Arc<Job>>>,
    merging: Mutex<Option<Merging>>,
}

/// How long it is waited for where an image is, to find those that are one.
const LOCATED_IN: Duration = Duration::from_secs(2);

/// An image and all the names it has.
pub(crate) struct Group {
    pub(crate) canonical: PathBuf,
    pub(crate) exports: Vec<ExportSpec>,
}

impl Group {
    /// One for each image, in the order in which they are first named. A missing image also counts, and so
    /// does one whose storage does not answer at once: opening it fails, or takes as long as it takes.
    pub(crate) async fn all_of(exports: &[ExportSpec]) -> Vec<Self> {
        let mut groups: Vec<Self> = Vec::new();
        let mut by_file: BTreeMap<PathBuf, usize> = BTreeMap::new();
        let places = exports.iter().map(|export| {
            Box::pin(async {
                let late = async {
                    clock().sleep(LOCATED_IN).await;
                    None
                };
                or(async { canonical_path(&export.path).await.ok() }, late).await
            })
        });
        let places = join_all(places).await;
        for (export, place) in exports.iter().zip(places) {
            let canonical = place.unwrap_or_else(|| export.path.clone());
            let group = *by_file.entry(canonical.clone()).or_insert_with(|| {
                groups.push(Self { canonical, exports: Vec::new() });
                groups.len() - 1
            });
            groups[group].exports.push(export.clone());
        }
        groups
    }
}

impl Served {
    /// Opens an image. Must be called on a worker.
    async fn open(number: usize, group: &Group, how: Arc<How>, workers: WorkersHandle) -> Result<Arc<Self>> {
        let export = &group.exports[0];
        canonical_path(&export.path).await.context(|| format!("can't open {}", export.path.display()))?;
        let image = image_options(export, &how);
        let chain = hand_over::open_named(&how, &export.path, image).await?;
        Self::of(number, group, how, workers, chain).await
    }

    /// Serves an image that is open.
    async fn of(
        number: usize,
        group: &Group,
        how: Arc<How>,
        workers: WorkersHandle,
        chain: Chain,
    ) -> Result<Arc<Self>> {
        let export = &group.exports[0];
        if let Some(Err(error)) = how.part.map(|part| part.check(chain.disk().geometry().size)) {
            chain.close().await?;
            return Err(error.context(format!("can't serve {}", export.path.display())));
        }
        let record = Record::new(export.path.display().to_string(), clock(), how.holds_when_full);
        if let Some(flash) = &how.flash {
            record.flash.get_or_init(|| flash.clone());
        }
        let is_barred = !export.image.read_only && hand_over::is_read_only(&chain);
        let remark = hand_over::remark(chain.top().head.handover(), &export.image);
        let (inner, growing) = behind_valve(&chain, &export.path, &how, &record, (is_barred, None)).await;
        let valve = Valve::new(inner.clone(), clock());
        valve.bar(is_barred && hand_over::is_awaiting(&chain));
        // Where nothing can be controlled, there should be no overhead.
        let is_steered = how.is_steered
            || is_barred
            || how.holds_when_full
            || how.flash.is_some()
            || !export.rate_limits.are_none()
            || export.hydration.is_wanted()
            || (!export.hydration.ignores_wish && chain.tap().is_some());
        valve.limit(export.rate_limits.clone());
        valve.hold_when_full(how.holds_when_full);
        let is_written = !export.image.read_only;
        let is_aware = chain.top().head.knows_whether_closed();
        let reconnects = match how.is_durable || !is_written || !is_aware {
            true => Reconnects::durable(),
            false => Reconnects::doubtful(chain.was_left_open()),
        };
        // What it was opened as may change: a base that was encrypted is let go of, a job ends in another image.
        let image = ImageOptions { must_be_encrypted: None, ..image_options(export, &how) };
        let wish = chain.top().head.wish();
        // They are of the disk, and of all of it.
        let bitmaps = match export.image.snapshot.is_some() || how.part.is_some() {
            true => Vec::new(),
            false => marks::names_of(&chain).await,
        };
        for export in &group.exports {
            marks::must_have(&export.path, &bitmaps, &export.bitmaps)?;
        }
        let served = Arc::new_cyclic(|own| Self {
            own: own.clone(),
            number,
            bitmaps,
            place: Mutex::new(Place {
                path: export.path.clone(),
                canonical: group.canonical.clone(),
                format: chain.top().head.kind(),
                stated: export.image.format,
            }),
            life: Mutex::new(Life::new(group.exports.iter().map(|export| export.name.clone()))),
            image,
            how,
            workers,
            tallies: Mutex::new((chain.top_tally.clone(), chain.below_tally())),
            hydration: Arc::default(),
            tap: Mutex::new(chain.tap().cloned()),
            hydrating: Mutex::default(),
            hydration_said: export.hydration.clone(),
            flash_policy: Mutex::default(),
            chain: RwLock::new(Some(chain)),
            holders: AtomicUsize::new(0),
            disk: CheckedDisk::new(if is_steered { valve.clone() } else { inner }),
            valve,
            record,
            growing: Mutex::new(growing),
            tending: Mutex::default(),
            reconnects,
            is_barred: AtomicBool::new(is_barred),
            remark: Mutex::new(remark),
            readers: Shutdown::new(),
            losses_said: AtomicU64::new(0),
            flash_stats: Mutex::default(),
            clone_marks: async_lock::Mutex::new(0),
            tiering: Tiering::default(),
            job: Mutex::default(),
            merging: Mutex::default(),
        });
        if let Err(error) = served.begin_as_said(&export.hydration, wish).await {
            served.end(&Exports::new()).await?;
            return Err(error);
        }
        served.end_files_snapshot().await;
        Ok(served)
    }

    fn watcher(&self) -> MutexGuard<'_, Option<Arc<Growing>>> {
        lock(&self.growing)
    }

    /// A description for the start of the server.
    pub(crate) fn introduction(&self) -> ReadyDisk {
        let geometry = self.disk.geometry();
        ReadyDisk {
            image: self.path(),
            format: self.format(),
            size: geometry.size,
            read_only: geometry.read_only,
        }
    }

    /// Its place among the disks of the server.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        lock(&self.life)
    }

    /// The names of its exports.
    pub(crate) fn names(&self) -> Vec<String> {
        self.life().names()
    }

    /// Those of them that clients may come in with.
    pub(crate) fn offered(&self) -> Vec<String> {
        self.life().offered()
    }

    pub(crate) fn has_name(&self, name: &str) -> bool {
        self.life().has(name)
    }

    /// Front ends that come from a server before this one.
    pub(crate) fn reconnects(&self) -> &Reconnects {
        &self.reconnects
    }

    /// When answered writes of it may have been lost: now, because it has ended with this error, or a short
    /// while ago, so that a client may still come that has not been notified.
    fn lost_when(&self, ended: &Result<()>) -> Option<Duration> {
        if self.how.is_durable || !self.disk_is_written() {
            return None;
        }
        match ended {
            Ok(()) => self.valve.losses().and_then(|losses| losses.recent()),
            Err(_) => Some(clock().now()),
        }
    }

    /// Whether writes that were answered before it was opened may be missing, with no client notified.
    pub(crate) async fn may_miss_writes(&self) -> bool {
        let chain = self.chain.read().await;
        !self.how.is_durable
            && chain.as_ref().is_some_and(|chain| chain.was_left_open() && !self.image.read_only)
    }

    /// The disk must not be exchanged: it has a user besides the sessions of its exports, until it is
    /// released.
    pub(crate) fn hold(&self) {
        self.holders.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn is_held(&self) -> bool {
        self.holders.load(Ordering::Acquire) > 0
    }

    /// Offers it under one more name.
    fn offer(&self, export: &ExportSpec, exports: &Exports) -> Result<()> {
        let mut life = self.life();
        life.add(&export.name).map_err(|why| self.in_use(why))?;
        let offered = self.add_to(exports, export);
        if offered.is_err() {
            life.is_gone(&export.name);
        }
        offered
    }

    /// Lets clients in under this name.
    fn add_to(&self, exports: &Exports, export: &ExportSpec) -> Result<()> {
        let remark = lock(&self.remark).clone();
        let export = Export {
            name: export.name.clone(),
            description: export.description.clone(),
            disk: self.disk(),
            read_only: export.image.read_only,
            marks: Some(Arc::new(marks::Offered::of_disk(self.own.clone()))),
        };
        exports.add_with_remark(export, remark)
    }

    /// One of its exports is to be removed: no other command removes it, and after the last one no step is
    /// begun any more.
    pub(crate) fn begin_removing<'a>(&'a self, name: &'a str) -> Result<Removing<'a>> {
        let is_last = self.life().take(name).map_err(|why| self.in_use(why))?;
        Ok(Removing { served: self, name, is_last, is_gone: Cell::new(false) })
    }

    /// A holder has gone.
    pub(crate) fn release(&self) {
        self.holders.fetch_sub(1, Ordering::AcqRel);
    }

    /// The disk as it is exported.
    pub(crate) fn disk(&self) -> Arc<CheckedDisk> {
        self.disk.clone()
    }

    /// What became of its requests.
    pub(crate) fn record(&self) -> &Record {
        &self.record
    }

    /// The task that enlarges its device when it becomes full, if there is one.
    pub(crate) fn growing(&self) -> Option<Arc<Growing>> {
        self.watcher().clone()
    }

    /// What was counted.
    pub(crate) fn stats(&self, exports: &Exports) -> DiskStats {
        let names = self.names();
        let (state, paused_seconds) = self.state();
        let tallies = lock(&self.tallies).clone();
        DiskStats {
            image: self.shown(),
            virtual_size: vellum_core::Disk::geometry(&*self.disk).size,
            state: state.to_owned(),
            paused_seconds,
            held: self.valve.held() + self.valve.waiting_for_space(),
            limits: self.rate_limits_said(),
            limited: self.valve.limited(),
            connections: names.iter().filter_map(|name| exports.sessions(name)).sum(),
            exports: names,
            guest: self.disk.counts().into(),
            guest_errors: self.disk.errors(),
            failures: crate::stats::failures_of(&self.record),
            last_error: self.record.last_error().map(Into::into),
            under_way: crate::stats::UnderWay::of(&self.record),
            latency: crate::stats::latency_of(&self.record),
            host: (&tallies.0).into(),
            below: (&tallies.1).into(),
            hydration: self.hydration_stats(),
            flash: self.flash_now(),
            tier: self.tier_now(),
            job: self.job_now(),
        }
    }

    /// What it does, and for how many seconds it is paused.
    pub(crate) fn state(&self) -> (&'static str, Option<u64>) {
        let is_hung = || self.record.under_way().first().is_some_and(|(_, since)| *since >= LONG);
        match self.valve.state() {
            State::Pausing => ("pausing", None),
            State::Paused(since) => ("paused", Some(since.as_secs())),
            State::Running if self.record.is_poisoned() || self.disk.is_broken() => ("poisoned", None),
            State::Running if self.life().is_cut_off() => ("closed", None),
            State::Running if self.has_no_image() => ("closed", None),
            State::Running if is_hung() => ("hung", None),
            State::Running if self.valve.waiting_for_space() > 0 || self.record.is_full() => {
                ("no space", None)
            }
            State::Running => ("running", None),
        }
    }

    /// Whether a change closed the image and could not open it again.
    fn has_no_image(&self) -> bool {
        let Some(chain) = self.chain.try_read() else { return false };
        chain.as_ref().is_none_or(|chain| chain.gone().is_some())
    }

    /// Stops background work that can be continued later. To be called before the disk is closed, and now and
    /// then until all users have left. While another task has the chain exclusively there is no background
    /// work, so this does not wait for it.
    pub(crate) fn stop_background(&self) {
        if let Some(job) = &*lock(&self.job) {
            job.cancel();
        }
        let chain = self.chain.try_read();
        let chain = chain.as_ref().and_then(|chain| chain.as_ref());
        if let Some(snapshots) = chain.and_then(|chain| chain.top().opened.snapshots.as_ref()) {
            snapshots.stop_deleting();
        }
    }

    /// Its export of this name, offered no more. While a name is being removed, another disk may have got it
    /// already.
    fn remove_from(&self, exports: &Exports, name: &str) -> Option<Removed> {
        let disk: SharedDisk = self.disk();
        exports.remove_of(name, &disk)
    }

    /// Ends it: no new client is admitted; sessions, steps and requests that were begun end; and it is
    /// closed, once, however many callers ask for that. Other disks are not waited for.
    ///
    /// # Errors
    /// The error of closing it: then flushed data is safe, and the error says what is not.
    pub(crate) async fn end(&self, exports: &Exports) -> Result<()> {
        if !self.life().end() {
            loop {
                if let Some(said) = self.life().closed() {
                    return said;
                }
                clock().sleep(ENDING_EVERY).await;
            }
        }
        // As the clients of its exports: they have it open, and may stay forever.
        self.readers.drain();
        let removed: Vec<_> =
            self.names().into_iter().map(|name| (self.remove_from(exports, &name), name)).collect();
        for (export, name) in removed {
            // Where another command removes the export, that command reports when it is gone.
            if let Some(export) = export {
                drop(export.unused().await);
                self.life().is_gone(&name);
            }
        }
        // Clones of its snapshots wait until they can read its file.
        if let Some(chain) = &*self.chain.read().await {
            chain.hold_forks().await;
        }
        let mut chain = loop {
            // Repeatedly: a task that was waiting for a disk that was being resized may begin only now.
            self.stop_background();
            if self.holders.load(Ordering::Acquire) == 0
                && let Some(chain) = self.chain.try_write()
                && !chain.as_ref().is_some_and(reads_a_snapshot)
                && self.life().close()
            {
                break chain;
            }
            clock().sleep(ENDING_EVERY).await;
        };
        self.tend_no_more().await;
        // No user is left; a request that arrives nevertheless finds the valve closed.
        let hold = self.valve.hold().await;
        let failed = |why: &str| Err(Error::new(ErrorKind::Poisoned, format!("{}: {why}", self.shown())));
        let mut closed = match &*chain {
            // No more requests are sent to it, so that nothing wrong is written.
            Some(_) if self.disk.is_broken() => failed(
                "it failed with an internal error and was not closed; it is recovered when it is next opened",
            ),
            Some(_) if self.life().is_cut_off() => failed(
                "a change of it was interrupted, and it was not closed; it is recovered when it is next opened",
            ),
            Some(chain) => match self.close_for_good(chain).await {
                Err(error) if self.disk_is_written() => Err(self.not_closed(error, chain)),
                closed => closed,
            },
            None => failed(
                "it could not be reopened and was not closed: `vellum check` shows its state, and it is recovered \
                 when it is next opened",
            ),
        };
        // Its files, and their locks, are released now and not with the last reference to the disk.
        let gone = self.release_files(&hold, &mut chain).await;
        if gone.is_ok() {
            self.forks_read_file().await;
        }
        if closed.is_ok() {
            // A front end that continues with the next server misses nothing.
            self.reconnects.closed();
            closed = gone;
        } else if !self.how.is_durable && self.disk_is_written() {
            self.reconnects.lost();
        }
        if self.valve.losses().is_some_and(|losses| losses.is_unheard()) {
            let path = self.shown();
            tracing::warn!(
                "{path} lost writes when it was reopened, and no flush has reported the loss to a client since"
            );
        }
        self.life().set_closed(closed.clone());
        closed
    }

    /// Closes the files. Requests fail from now on. Closing a file may take as long as its storage does, so
    /// it runs in the background; and it is waited for only this long.
    async fn release_files(&self, hold: &Hold, chain: &mut Option<Chain>) -> Result<()> {
        self.valve.exchange(hold, Gone::of(&*self.disk));
        let (watcher, chain) = (self.watcher().take(), chain.take());
        let late = async {
            clock().sleep(RELEASE_MAX).await;
            let why = "its storage does not answer: the files of the image stay open until it does";
            Err(Error::new(ErrorKind::Io, format!("{}: {why}", self.shown())))
        };
        let gone = async {
            unblock(move || drop((watcher, chain))).await;
            Ok(())
        };
        or(gone, late).await
    }

    /// Whether it has ended.
    pub(crate) fn is_closed_for_good(&self) -> bool {
        self.life().stage() == Stage::Closed
    }

    /// Why it has not ended, if it has not.
    pub(crate) fn what_hangs(&self) -> Option<String> {
        let (path, stage) = (self.shown(), self.life().stage());
        let under_way = self.record.under_way();
        let request = under_way.first().map(|(request, since)| {
            let more = match under_way.len() - 1 {
                0 => String::new(),
                more => format!(", and {more} more"),
            };
            format!("{request} has been in flight for {} s{more}", since.as_secs())
        });
        match (stage, request) {
            (Stage::Closed, _) => None,
            (_, Some(request)) => Some(format!("{path}: {request}")),
            (Stage::Closing, None) => Some(format!("{path}: closing it does not finish")),
            (Stage::Serving | Stage::Ending, None) => Some(format!("{path}: it is still in use")),
        }
    }

    async fn top(&self) -> Result<Top<'_>> {
        self.life().may_be_used().map_err(|why| self.in_use(why))?;
        Top::of(self.chain.read().await).ok_or_else(|| self.is_closed())
    }

    /// Why nothing can be done with it.
    pub(super) fn is_closed(&self) -> Error {
        let why = "it is closed because it could not be reopened; `vellum export reopen` tries again";
        Error::new(ErrorKind::Closed, format!("{}: {why}", self.shown()))
    }

    /// Restores the disk from a snapshot. No client may be connected; a client that comes meanwhile finds no
    /// such export. Returns the names of the bitmaps, which are gone then.
    pub(crate) async fn snapshot_revert(&self, wanted: &str, exports: &Exports) -> Result<Vec<String>> {
        let in_use = |why: String| self.in_use(&why);
        let _step = self.begin(Step::Revert)?;
        let mut chain = self.alone().await?;
        if self.holders.load(Ordering::Acquire) > 0 {
            return Err(in_use(
                "it is also served as a file or a block device, which must be stopped first".to_owned(),
            ));
        }
        let (top, snapshots) = (chain.top(), chain.top().opened.snapshots.clone());
        let all = match &snapshots {
            None if top.head.kind().format().closed_snapshots().is_some() => {
                top.head.snapshots(&top.storage, Some(&top.storage)).await?
            }
            _ => kept(top, "reverted to")?.list()?,
        };
        // Before clients are disconnected for nothing.
        if !all.iter().any(|one| one.name == wanted || one.id == wanted) {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no snapshot named {wanted}")));
        }
        let _suspended = match exports.suspend_unused(&self.names()) {
            Ok(suspended) => suspended,
            Err(1) => return Err(in_use("a client is connected and must disconnect first".to_owned())),
            Err(many) => {
                return Err(in_use(format!("{many} clients are connected and must disconnect first")));
            }
        };
        let (held, before) = (self.hold_in_time().await?, chain.disk().clone());
        let bitmaps = names_of(chain.top().head.kind().format(), &*chain.top().storage).await;
        chain.hold_forks().await;
        let reverted = match snapshots.is_some_and(|snapshots| snapshots.has_open()) {
            true => Err(in_use(IS_READ.to_owned())),
            false => chain.revert(wanted).await,
        };
        chain.resume_forks();
        self.follow(held, &chain, &before).await;
        reverted.map(|()| bitmaps)
    }

    fn disk_is_written(&self) -> bool {
        !vellum_core::Disk::geometry(&*self.disk()).read_only
    }
}

/// Why a disk cannot be exchanged, when it has snapshots.
pub(crate) const IS_READ: &str = "a client is reading a snapshot of it and must disconnect first";

/// How long the files of an image may take to be closed.
const RELEASE_MAX: Duration = Duration::from_secs(5);

/// How often to check whether a disk that ends is still in use.
const ENDING_EVERY: Duration = Duration::from_millis(5);

fn reads_a_snapshot(chain: &Chain) -> bool {
    chain.top().opened.snapshots.as_ref().is_some_and(|snapshots| snapshots.has_open())
}

/// A name that is being removed. If that is interrupted, or refused, it stays.
pub(crate) struct Removing<'a> {
    served: &'a Served,
    name: &'a str,
    is_last: bool,
    is_gone: Cell<bool>,
}

impl Removing<'_> {
    /// Whether the disk has no other name.
    pub(crate) fn is_last(&self) -> bool {
        self.is_last
    }

    /// Ends the export: no new client is admitted, and sessions end when what they have begun is answered.
    pub(crate) async fn end_export(&self, exports: &Exports) {
        if let Some(removed) = self.served.remove_from(exports, self.name) {
            drop(removed.unused().await);
        }
    }

    /// The name is not in use any more: the disk may get it again.
    pub(crate) fn is_gone(&self) {
        self.is_gone.set(true);
        self.served.life().is_gone(self.name);
    }
}

impl Drop for Removing<'_> {
    fn drop(&mut self) {
        if !self.is_gone.get() {
            self.served.life().give_back(self.name);
        }
    }
}

/// The top image, which stays as long as this is held.
struct Top<'a>(RwLockReadGuard<'a, Option<Chain>>);

impl<'a> Top<'a> {
    fn of(chain: RwLockReadGuard<'a, Option<Chain>>) -> Option<Self> {
        chain.is_some().then_some(Self(chain))
    }

    fn member(&self) -> &Member {
        self.0.as_ref().expect("it was looked at").top()
    }
}

/// The snapshots of an image whose format makes them.
fn kept<'a>(top: &'a Member, what: &str) -> Result<&'a Arc<dyn Snapshots>> {
    top.opened.snapshots.as_ref().ok_or_else(|| match top.head.kind().format().snapshot_support() {
        SnapshotSupport::None => none_in(top),
        _ => Error::unsupported(format!(
            "{}: snapshots of {} images can be listed while they are served, not {what}",
            top.path.display(),
            top.head.kind()
        )),
    })
}

fn none_in(top: &Member) -> Error {
    Error::unsupported(format!("{}: a {} image has no snapshots", top.path.display(), top.head.kind()))
}

fn facts(snapshots: Vec<Snapshot>) -> Vec<SnapshotFacts> {
    snapshots.into_iter().map(SnapshotFacts::from).collect()
}
