//! The disks of a server: open, counted, and one of them closed and opened again when it goes back to a snapshot or grows.
//!
//! ```text
//!   exports   "" "disk"        the disk as it is now           one chain per image file, however many names it has
//!             "@NAME" "disk@NAME"   a snapshot, for reading    made when a client asks, gone with the last one
//! ```
//!
//! 1. Who makes, lists or deletes a snapshot shares the chain; who goes back to one has it alone, and nobody else is connected.
//! 2. A name that was given to an export comes before a snapshot's.
//! 3. Exports have one disk from the beginning to the end: behind its valve it may be another one (`vellum_layer::valve`).

mod steer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use async_lock::{RwLock, RwLockReadGuard};
use vellum_core::{CheckedDisk, Context, Error, ErrorKind, HostTally, Result, SharedDisk};
use vellum_export::nbd::{Export, Exports, OnDemand};
use vellum_format::native::Native;
use vellum_format::native::snapshots::{Snapshot, snapshots};
use vellum_format::qcow2::snapshot::list as list_qcow2;
use vellum_io::clock;
use vellum_layer::valve::State;
use vellum_layer::{Chain, Member, Valve};

use crate::control::SnapshotFacts;
use crate::grow::{GrowHook, Growing};
use crate::image::open_image;
use crate::serve::ExportSpec;
use crate::stats::DiskStats;
pub(crate) use steer::Wish;

/// A disk that is open.
pub(crate) struct Served {
    path: PathBuf,
    names: Vec<String>,
    grow_hook: Option<GrowHook>,
    chain: RwLock<Chain>,
    top_tally: HostTally,
    below_tally: HostTally,
    /// Somebody besides the sessions of its exports uses the disk as it is now, until the server ends.
    is_held: AtomicBool,
    valve: Arc<Valve>,
    /// What is exported: the valve, counted; where nobody steers it, what is behind.
    disk: Arc<CheckedDisk>,
    /// Who looks after its device, when that may become full.
    growing: Mutex<Option<Arc<Growing>>>,
    /// Who pauses or resizes it. Nobody waits for it: who waited would begin after somebody else has let requests go on.
    steering: async_lock::Mutex<()>,
}

impl Served {
    async fn new(chain: Chain, export: &ExportSpec, grow_hook: Option<&GrowHook>, is_steered: bool) -> Self {
        let (inner, growing) = behind_valve(&chain, &export.path, grow_hook).await;
        let valve = Valve::new(inner.clone(), clock());
        // Where nobody can ask for anything, nobody pays for it.
        let is_steered = is_steered || !export.limits.are_none();
        valve.limit(export.limits.clone());
        Self {
            grow_hook: grow_hook.cloned(),
            path: export.path.clone(),
            names: vec![export.name.clone()],
            top_tally: chain.top_tally.clone(),
            below_tally: chain.below_tally.clone(),
            chain: RwLock::new(chain),
            is_held: AtomicBool::new(false),
            disk: CheckedDisk::new(if is_steered { valve.clone() } else { inner }),
            valve,
            growing: Mutex::new(growing),
            steering: Default::default(),
        }
    }

    fn watcher(&self) -> MutexGuard<'_, Option<Arc<Growing>>> {
        self.growing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The disk stays the one it is: somebody besides the sessions of its exports uses it until the server ends.
    pub(crate) fn hold(&self) {
        self.is_held.store(true, Ordering::Release);
    }

    /// The disk as it is exported.
    pub(crate) fn disk(&self) -> Arc<CheckedDisk> {
        self.disk.clone()
    }

    /// Who looks after its device, when that may become full.
    pub(crate) fn growing(&self) -> Option<Arc<Growing>> {
        self.watcher().clone()
    }

    /// What was counted.
    pub(crate) fn stats(&self, exports: &Exports) -> DiskStats {
        let (state, paused_seconds) = match self.valve.state() {
            State::Running => ("running", None),
            State::Pausing => ("pausing", None),
            State::Paused(since) => ("paused", Some(since.as_secs())),
        };
        DiskStats {
            exports: self.names.clone(),
            image: self.path.display().to_string(),
            virtual_size: vellum_core::Disk::geometry(&*self.disk).size,
            state: state.to_owned(),
            paused_seconds,
            held: self.valve.held(),
            limits: self.limits_said(),
            limited: self.valve.limited(),
            connections: self.names.iter().filter_map(|name| exports.sessions(name)).sum(),
            guest: self.disk.counts().into(),
            guest_errors: self.disk.errors(),
            host: (&self.top_tally).into(),
            below: (&self.below_tally).into(),
        }
    }

    /// What was begun in the background stops where it can go on later. To be called before the disk is closed, and now and then
    /// until all have left: nobody is waited for who has the chain alone, and nothing is in the background meanwhile.
    pub(crate) fn stop_background(&self) {
        let chain = self.chain.try_read();
        if let Some(native) = chain.as_ref().and_then(|chain| chain.members[0].native.as_ref()) {
            native.stop_deleting();
        }
    }

    async fn close(&self) -> Result<()> {
        self.chain.read().await.close().await
    }

    async fn top(&self) -> Top<'_> {
        Top(self.chain.read().await)
    }

    /// Makes a snapshot. Gives its number.
    pub(crate) async fn snapshot_create(&self, name: &str) -> Result<u32> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let top = self.top().await;
        top.native("made")?.snapshot_create(name, now).await
    }

    /// All snapshots, in the order in which they were made.
    pub(crate) async fn snapshot_list(&self) -> Result<Vec<SnapshotFacts>> {
        let top = self.top().await;
        match (&top.native, &top.header) {
            (Some(native), _) if self.disk_is_written() => Ok(facts(native.snapshots()?)),
            (Some(_), _) => Ok(facts(snapshots(&top.storage).await?)),
            (None, Some(header)) => {
                let all = list_qcow2(header, &*top.storage).await?;
                let rows = all.into_iter().map(|snapshot| SnapshotFacts {
                    id: snapshot.id,
                    name: snapshot.name,
                    virtual_size: snapshot.disk_size,
                    date_sec: u64::from(snapshot.date_seconds),
                });
                Ok(rows.collect())
            }
            (None, None) => Err(none_in_raw(&top.path)),
        }
    }

    /// Deletes a snapshot.
    pub(crate) async fn snapshot_delete(&self, wanted: &str) -> Result<()> {
        let top = self.top().await;
        top.native("deleted")?.snapshot_delete(wanted).await
    }

    /// The disk becomes what a snapshot has. Nobody may be connected; who comes meanwhile finds no such export.
    pub(crate) async fn snapshot_revert(&self, wanted: &str, exports: &Exports) -> Result<()> {
        let in_use = |why: String| self.in_use(&why);
        let mut chain = self.alone().await?;
        if self.is_held.load(Ordering::Acquire) {
            return Err(in_use(
                "it is served as a file or a block device, too; that must end first".to_owned(),
            ));
        }
        let native = native_of(&chain.members[0], "gone back to")?.clone();
        // Before anybody is sent away for nothing.
        if !native.snapshots()?.iter().any(|one| one.name == wanted || one.id.to_string() == wanted) {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no snapshot named {wanted}")));
        }
        let taken = match exports.take_unused(&self.names) {
            Ok(taken) => taken,
            Err(1) => return Err(in_use("a client is connected; it must leave first".to_owned())),
            Err(many) => return Err(in_use(format!("{many} clients are connected; they must leave first"))),
        };
        let (hold, before) = (self.valve.hold().await, chain.disk().clone());
        let reverted = match native.has_open_snapshots() {
            true => Err(in_use(IS_READ.to_owned())),
            false => chain.revert(wanted).await,
        };
        self.follow(&hold, &chain, &before).await;
        drop(hold);
        for export in taken {
            exports.add(export)?;
        }
        reverted
    }

    fn disk_is_written(&self) -> bool {
        !vellum_core::Disk::geometry(&*self.disk()).read_only
    }

    /// The image, when snapshots of it can be served now. It stays as long as this is held.
    fn written(&self) -> Option<Top<'_>> {
        // Nobody waits here: while the disk goes back to a snapshot there is none.
        let top = Top(self.chain.try_read()?);
        (top.native.is_some() && self.disk_is_written()).then_some(top)
    }
}

/// Why a disk cannot be exchanged, when it has snapshots.
const IS_READ: &str = "a client reads a snapshot of it, and must leave first";

/// The disk on top of a chain as it is served, and who looks after its device.
async fn behind_valve(
    chain: &Chain,
    path: &Path,
    hook: Option<&GrowHook>,
) -> (SharedDisk, Option<Arc<Growing>>) {
    let growing = Growing::over(chain.disk(), path.display().to_string(), hook.cloned()).await;
    match growing {
        Some(growing) => (growing.clone(), Some(growing)),
        None => (chain.disk().clone(), None),
    }
}

/// The top image, which stays as long as this is held.
struct Top<'a>(RwLockReadGuard<'a, Chain>);

impl std::ops::Deref for Top<'_> {
    type Target = Member;

    fn deref(&self) -> &Member {
        &self.0.members[0]
    }
}

impl Top<'_> {
    fn native(&self, what: &str) -> Result<&Arc<Native>> {
        native_of(self, what)
    }
}

fn native_of<'a>(top: &'a Member, what: &str) -> Result<&'a Arc<Native>> {
    match (&top.native, &top.header) {
        (Some(native), _) => Ok(native),
        (None, Some(_)) => Err(Error::unsupported(format!(
            "{}: snapshots of qcow2 images can be listed while they are served, not {what}",
            top.path.display()
        ))),
        (None, None) => Err(none_in_raw(&top.path)),
    }
}

fn none_in_raw(path: &Path) -> Error {
    Error::unsupported(format!("{}: a raw image has no snapshots", path.display()))
}

fn facts(snapshots: Vec<Snapshot>) -> Vec<SnapshotFacts> {
    snapshots.into_iter().map(SnapshotFacts::from).collect()
}

/// All disks of a server.
pub(crate) struct Disks(Vec<Served>);

impl std::ops::Deref for Disks {
    type Target = [Served];

    fn deref(&self) -> &[Served] {
        &self.0
    }
}

impl Disks {
    /// Opens each image once. `is_steered`: somebody can ask to pause them, and more.
    pub(crate) async fn open(
        exports: &[ExportSpec],
        grow_hook: Option<&GrowHook>,
        is_steered: bool,
    ) -> Result<Self> {
        let mut served = Self(Vec::new());
        let mut by_file: BTreeMap<PathBuf, usize> = BTreeMap::new();
        for export in exports {
            let canonical =
                export.path.canonicalize().context(|| format!("can't open {}", export.path.display()))?;
            if let Some(index) = by_file.get(&canonical) {
                served.0[*index].names.push(export.name.clone());
                continue;
            }
            let chain = match open_image(&export.path, &export.image).await {
                Ok(chain) => chain,
                Err(error) => {
                    served.close().await?;
                    return Err(error);
                }
            };
            by_file.insert(canonical, served.0.len());
            served.0.push(Served::new(chain, export, grow_hook, is_steered).await);
        }
        if grow_hook.is_some() && served.iter().all(|served| served.growing().is_none()) {
            served.close().await?;
            return Err(Error::invalid(
                "a grow hook is for images of the native format with layout=table on a device, open for writing: none is \
                 served",
            ));
        }
        Ok(served)
    }

    /// Closes every disk, also when one of them fails; the first failure counts.
    pub(crate) async fn close(&self) -> Result<()> {
        let mut result = Ok(());
        for disk in &self.0 {
            result = result.and(disk.close().await);
        }
        result
    }

    /// The disk that is exported under this name; the only one, when none is said.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<&Served> {
        let names = || {
            let all = self.0.iter().flat_map(|served| &served.names);
            all.map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
        };
        match (name, &self.0[..]) {
            (None, [one]) => Ok(one),
            (None, _) => {
                Err(Error::invalid(format!("there are several disks; say which by its export: {}", names())))
            }
            (Some(name), all) => {
                all.iter().find(|served| served.names.iter().any(|its| its == name)).ok_or_else(|| {
                    let context = format!("there is no export {name:?}; there are {}", names());
                    Error::new(ErrorKind::NotFound, context)
                })
            }
        }
    }
}

/// Exports of the snapshots of all disks that are written.
pub(crate) struct SnapshotExports(pub(crate) Arc<Disks>);

impl OnDemand for SnapshotExports {
    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for served in self.0.iter() {
            let Some(top) = served.written() else { continue };
            let Some(native) = &top.native else { continue };
            // One of a layout without snapshots has none.
            let Ok(snapshots) = native.snapshots() else { continue };
            for name in &served.names {
                names.extend(snapshots.iter().map(|snapshot| format!("{name}@{}", snapshot.name)));
            }
        }
        names
    }

    fn find(&self, name: &str) -> Option<Export> {
        for served in self.0.iter() {
            for its in &served.names {
                let Some(wanted) = name.strip_prefix(its.as_str()).and_then(|rest| rest.strip_prefix('@'))
                else {
                    continue;
                };
                // Held until the snapshot is open: who exchanges the disk looks for those that are.
                let Some(top) = served.written() else { continue };
                let Some(native) = &top.native else { continue };
                // A disk without snapshots is not the one that is meant.
                let Ok(Some(id)) = native.snapshot_named(wanted) else { continue };
                let Ok(disk) = native.snapshot_open(id) else { continue };
                return Some(Export {
                    name: name.to_owned(),
                    description: String::new(),
                    disk: CheckedDisk::new(disk),
                    read_only: true,
                });
            }
        }
        None
    }
}
