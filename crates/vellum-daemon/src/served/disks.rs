//! The disks of a server: opened concurrently, found by their names, added and removed while others are
//! served.
//!
//! 1. An image is open once, however many names it has.
//! 2. A disk is available, to clients and to commands, as soon as it is open; it does not wait for others.
//! 3. No disk is added once the server ends: one that is still being opened is closed when it is open.
//! 4. An image whose storage does not answer does not keep others from being opened, and is logged until it
//!    is open or has failed.
//! 5. When the server ends, an opening that waits for a remote image, or for a long computation such as deriving a key, is abandoned
//!    after [`GRACE`]. For the image on top that is as a crash is, of which it recovers.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::losses::COMES_BACK;
use vellum_core::{Error, ErrorKind, LocalFuture, Result, lock};
use vellum_export::nbd::Exports;
use vellum_io::{WorkersHandle, clock, spawn_local};

use super::{Group, How, Served};
use crate::contained::contained;
use crate::flash::HostFlash;
use crate::host::{CountedPool, canonical_path};
use crate::spec::ExportSpec;
use crate::stats::Stats;

/// How many images are opened at once for each worker: most of the time each waits for the host.
const OPENED_AT_ONCE: usize = 16;

/// If opening takes longer than this, another image is opened meanwhile.
const OPENING_LONG: Duration = Duration::from_secs(2);

/// How long a server that ends waits for images that are being opened over remote ones, or whose keys are derived.
const GRACE: Duration = Duration::from_secs(1);

/// All disks of a server.
pub(crate) struct Disks {
    how: Arc<How>,
    workers: WorkersHandle,
    exports: Exports,
    all: Mutex<Vec<Arc<Served>>>,
    /// Those that are being opened.
    coming: Mutex<Vec<PathBuf>>,
    /// Those that are not found any more, and have not ended.
    going: Mutex<Vec<Arc<Served>>>,
    /// Images that were removed and may miss what was answered, and when that was. A client may come back to
    /// one of them.
    lost: Mutex<Vec<(PathBuf, Duration)>>,
    next_number: AtomicUsize,
    has_ended: AtomicBool,
    ending: Event,
}

/// An image that is being opened, until dropped.
struct Coming {
    disks: Arc<Disks>,
    path: PathBuf,
}

impl Coming {
    fn of(disks: &Arc<Disks>, path: &Path) -> Self {
        lock(&disks.coming).push(path.to_owned());
        Self { disks: disks.clone(), path: path.to_owned() }
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        let mut coming = lock(&self.disks.coming);
        if let Some(place) = coming.iter().position(|path| *path == self.path) {
            coming.remove(place);
        }
    }
}

/// Images that are being opened.
pub(crate) struct Opening {
    left: Mutex<VecDeque<(usize, Group)>>,
    opened: Mutex<VecDeque<(Group, Result<Arc<Served>>)>>,
    came: Event,
    outstanding: AtomicUsize,
    all: usize,
}

impl Opening {
    /// The next that was opened, or could not be; nothing when there are no more.
    pub(crate) async fn next(&self) -> Option<(Group, Result<Arc<Served>>)> {
        loop {
            let came = self.came.listen();
            if let Some(opened) = lock(&self.opened).pop_front() {
                self.outstanding.fetch_sub(1, Ordering::AcqRel);
                return Some(opened);
            }
            if self.outstanding.load(Ordering::Acquire) == 0 {
                return None;
            }
            came.await;
        }
    }

    /// How many there are besides one.
    pub(crate) fn others(&self) -> usize {
        self.all - 1
    }

    /// Those that were not begun are not opened any more.
    pub(crate) fn give_up(&self) {
        let dropped = lock(&self.left).drain(..).count();
        self.outstanding.fetch_sub(dropped, Ordering::AcqRel);
        self.came.notify(usize::MAX);
    }
}

fn ends() -> Error {
    Error::new(ErrorKind::Closed, "the server is shutting down")
}

impl Disks {
    /// None yet.
    pub(crate) fn new(how: How, exports: Exports, workers: WorkersHandle) -> Arc<Self> {
        Arc::new(Self {
            how: Arc::new(how),
            workers,
            exports,
            all: Mutex::default(),
            coming: Mutex::default(),
            going: Mutex::default(),
            lost: Mutex::default(),
            next_number: AtomicUsize::new(0),
            has_ended: AtomicBool::new(false),
            ending: Event::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Served>>> {
        lock(&self.all)
    }

    /// Those there are, in the order in which they were named.
    pub(crate) fn all(&self) -> Vec<Arc<Served>> {
        self.lock().clone()
    }

    /// The flash cache over them.
    pub(crate) fn flash(&self) -> Option<&Arc<HostFlash>> {
        self.how.flash.as_ref()
    }

    /// What was counted so far.
    pub(crate) fn stats(&self, exports: &Exports) -> Stats {
        let flash = self.how.flash.as_ref().map(|flash| flash.stats());
        Stats::of(self.all().iter().map(|disk| disk.stats(exports)).collect(), flash)
    }

    /// Opens these, on all workers. The outcomes are available one by one.
    pub(crate) fn open_all(self: &Arc<Self>, groups: Vec<Group>) -> Arc<Opening> {
        let first = self.next_number.fetch_add(groups.len(), Ordering::Relaxed);
        let outstanding = groups.len();
        let left = groups.into_iter().enumerate().map(|(index, group)| (first + index, group));
        let opening = Arc::new(Opening {
            left: Mutex::new(left.collect()),
            opened: Mutex::default(),
            came: Event::new(),
            outstanding: AtomicUsize::new(outstanding),
            all: outstanding,
        });
        for task in 0..outstanding.min(self.workers.count() * OPENED_AT_ONCE) {
            let (disks, opening) = (self.clone(), opening.clone());
            drop(self.workers.spawn(task % self.workers.count(), move || disks.open_next(opening)));
        }
        opening
    }

    /// Opens one after another of those that are left.
    fn open_next(self: Arc<Self>, opening: Arc<Opening>) -> LocalFuture<'static, ()> {
        Box::pin(async move {
            loop {
                let next = lock(&opening.left).pop_front();
                let Some((number, group)) = next else { return };
                let (disks, others) = (self.clone(), opening.clone());
                let relief = spawn_local(async move {
                    clock().sleep(OPENING_LONG).await;
                    spawn_local(disks.open_next(others)).detach();
                });
                let what = format!("opening {}", group.exports[0].path.display());
                let opened = contained(&what, self.open(number, &group)).await;
                drop(relief);
                lock(&opening.opened).push_back((group, opened));
                opening.came.notify(usize::MAX);
            }
        })
    }

    async fn open(self: &Arc<Self>, number: usize, group: &Group) -> Result<Arc<Served>> {
        let _coming = Coming::of(self, &group.exports[0].path);
        let asks_remote = Arc::new(AtomicBool::new(false));
        let mut group = Group { canonical: group.canonical.clone(), exports: group.exports.clone() };
        let computing = CountedPool::default();
        group.exports[0].image.asks_remote = asks_remote.clone();
        group.exports[0].image.computing = computing.clone();
        let opening = Served::open(number, &group, self.how.clone(), self.workers.clone());
        let served = or(opening, self.abandoned(&asks_remote, &computing)).await?;
        let lost: Vec<Duration> = {
            let lost = self.lost_now();
            lost.iter().filter(|(path, _)| *path == served.canonical()).map(|(_, when)| *when).collect()
        };
        if let Some(when) = lost.into_iter().max().filter(|_| served.disk_is_written())
            && let Err(error) = served.has_lost_writes(when).await
        {
            served.end(&Exports::new()).await?;
            return Err(error);
        }
        match self.admit(&served, &group.exports) {
            Ok(()) => Ok(served),
            Err(error) => {
                served.end(&Exports::new()).await?;
                Err(error)
            }
        }
    }

    /// Completes when the server has ended and something is waited for that may take very long: a remote image, which may never
    /// answer, or a computation.
    async fn abandoned(&self, asks_remote: &AtomicBool, computing: &CountedPool) -> Result<Arc<Served>> {
        loop {
            let ending = self.ending.listen();
            if self.has_ended.load(Ordering::Acquire) {
                break;
            }
            ending.await;
        }
        loop {
            clock().sleep(GRACE).await;
            if asks_remote.load(Ordering::Acquire) || computing.running() > 0 {
                return Err(ends());
            }
        }
    }

    /// Offers a disk that is open.
    pub(super) fn admit(&self, served: &Arc<Served>, exports: &[ExportSpec]) -> Result<()> {
        let mut all = self.lock();
        if self.has_ended.load(Ordering::Acquire) {
            return Err(ends());
        }
        for (index, export) in exports.iter().enumerate() {
            // It has these names from the beginning.
            if let Err(error) = served.add_to(&self.exports, export) {
                exports[..index].iter().for_each(|export| drop(self.exports.remove(&export.name)));
                return Err(error);
            }
        }
        let place = all.partition_point(|other| other.number() < served.number());
        all.insert(place, served.clone());
        drop(all);
        served.tend();
        Ok(())
    }

    /// Serves one more image, or an image under one more name. Also returns whether it is new. Must be called
    /// on a worker.
    pub(crate) async fn add(self: &Arc<Self>, export: ExportSpec) -> Result<(Arc<Served>, bool)> {
        let coming = Coming::of(self, &export.path);
        let canonical = canonical_path(&export.path).await;
        drop(coming);
        let there =
            canonical.ok().and_then(|path| self.all().into_iter().find(|served| served.canonical() == path));
        if let Some(served) = there {
            // A second name may be for reading alone, not the other way round.
            if served.image.read_only && !export.image.read_only {
                return Err(served.in_use("it is served read-only and cannot also be exported for writing"));
            }
            served.offer(&export, &self.exports)?;
            return Ok((served, false));
        }
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let group = Group::all_of(&[export]).await.pop().expect("one export is of one image");
        Ok((self.open(number, &group).await?, true))
    }

    /// The disks that clients may still reconnect to.
    fn lost_now(&self) -> MutexGuard<'_, Vec<(PathBuf, Duration)>> {
        let mut lost = lock(&self.lost);
        let now = clock().now();
        lost.retain(|(_, since)| now.saturating_sub(*since) < COMES_BACK);
        lost
    }

    /// Ends one while others are served. It is not found any more.
    pub(crate) async fn end_one(&self, served: &Arc<Served>) -> Result<()> {
        // Before it is found no more: it is named at any time.
        lock(&self.going).push(served.clone());
        self.lock().retain(|other| !Arc::ptr_eq(other, served));
        let ended = served.end(&self.exports).await;
        if let Some(when) = served.lost_when(&ended) {
            self.lost_now().push((served.canonical(), when));
        }
        lock(&self.going).retain(|other| !Arc::ptr_eq(other, served));
        ended
    }

    /// Which have not been opened, or closed, when the server ends, and why.
    pub(crate) fn what_hangs(&self) -> Vec<String> {
        let mut hung: Vec<String> = self.all().iter().filter_map(|disk| disk.what_hangs()).collect();
        hung.extend(lock(&self.going).iter().filter_map(|disk| disk.what_hangs()));
        hung.sort_unstable();
        hung.dedup();
        let coming = |path: &PathBuf| format!("{}: opening it does not finish", path.display());
        hung.extend(lock(&self.coming).iter().map(coming));
        hung
    }

    /// No disk is added any more. Returns all disks.
    pub(crate) fn end(&self) -> Vec<Arc<Served>> {
        let all = self.lock();
        self.has_ended.store(true, Ordering::Release);
        self.ending.notify(usize::MAX);
        all.clone()
    }

    /// Drops the disks that are closed: their files, and the locks of these, are released now, also when the process
    /// itself can't yet.
    pub(crate) fn drop_closed(&self) {
        self.lock().retain(|disk| !disk.is_closed_for_good());
    }

    /// The disk that is exported under this name; without a name, the only one.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<Arc<Served>> {
        let all = self.all();
        let names = || {
            let all = all.iter().flat_map(|served| served.names());
            let names: Vec<_> = all.map(|name| format!("{name:?}")).collect();
            if names.is_empty() { "none".to_owned() } else { names.join(", ") }
        };
        match (name, &all[..]) {
            (None, [one]) => Ok(one.clone()),
            (None, []) => Err(Error::new(ErrorKind::NotFound, "no disk is served")),
            (None, _) => Err(Error::invalid(format!(
                "there are several disks; select one by its export name (--disk): {}",
                names()
            ))),
            // A name that is being removed is free already: the disk that has got it since is the one that is
            // meant.
            (Some(name), all) => {
                let offers = |served: &&Arc<Served>| served.offered().iter().any(|its| its == name);
                let has = |served: &&Arc<Served>| served.has_name(name);
                let its = all.iter().find(offers).or_else(|| all.iter().find(has));
                its.cloned().ok_or_else(|| {
                    let context = format!("there is no export {name:?}; the exports are {}", names());
                    Error::new(ErrorKind::NotFound, context)
                })
            }
        }
    }
}
