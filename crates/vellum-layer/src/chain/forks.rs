//! Snapshots as images below others, while the image that has them is written or not.
//!
//! ```text
//!   ci-000 … ci-999     clones: disks of their own
//!          │ read
//!        Base           the snapshot, as the clones see it: it stays, its way of reading is exchanged
//!          ├─ the image is open for writing here    ► the snapshot beside its disk (`Snapshots::open`)
//!          └─ it is not                             ► the file, opened for reading, and locked against writers
//! ```
//!
//! 1. What a snapshot reads as never changes, so the exchange changes no byte for the clones.
//! 2. An image is open once in a process, for writing or for reading: a base gives up its file before the image
//!    is opened for writing, and the snapshot beside the disk before the image is closed. Requests wait meanwhile.
//! 3. Where another process writes the image, its snapshots cannot be read here: a part of what they consist of is
//!    in that process's memory. The locks of the file say so.
//! 4. [`Turn`]: of the openings and closings of one image, and of its bases, one happens at a time. Finding the
//!    images of a chain takes no turn, so images that name each other in a circle are found out before any wait.
//! 5. A base reads only a snapshot that has the number and the name that the clone names, and that is marked as
//!    cloned.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use arc_swap::ArcSwapOption;
use async_lock::MutexGuardArc;
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, HostTally, LocalFuture, Result,
    SharedDisk, SharedStorage, WriteFlags, ZeroFlags, lock,
};
use vellum_format::image::{Head, Snapshot, Snapshots};
use vellum_format::{FormatKind, SnapshotKey};

use super::{Chain, ChainOptions, How, Opener, Purpose, being_written, files_of, open_disk, replayed};
use crate::passage::{Hold, Passage};

/// The images of a process of which snapshots may be below others.
#[derive(Default)]
pub(super) struct Forks {
    images: Mutex<HashMap<PathBuf, Weak<Parent>>>,
}

impl Forks {
    /// The image at this canonical path.
    pub(super) fn parent(&self, canonical: &Path) -> Arc<Parent> {
        let mut images = lock(&self.images);
        if let Some(parent) = images.get(canonical).and_then(Weak::upgrade) {
            return parent;
        }
        images.retain(|_, parent| parent.strong_count() > 0);
        let parent = Arc::new(Parent::default());
        images.insert(canonical.to_owned(), Arc::downgrade(&parent));
        parent
    }
}

/// An image of which snapshots may be below others.
#[derive(Default)]
pub(super) struct Parent {
    state: Arc<async_lock::Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// While the image is open for writing. The chain of it keeps it open.
    writer: Option<Weak<dyn Snapshots>>,
    bases: Vec<Weak<Base>>,
}

/// The image is opened or closed by the holder of this alone, and its bases are exchanged.
pub(super) struct Turn(MutexGuardArc<State>);

impl Parent {
    /// Waits for the turn, and for the requests of all bases: they have nothing open until they are attached.
    pub(super) async fn detach(&self) -> Turn {
        let mut state = self.state.lock_arc().await;
        state.bases.retain(|base| base.strong_count() > 0);
        for base in state.bases.iter().filter_map(Weak::upgrade) {
            base.give_up().await;
        }
        state.writer = None;
        Turn(state)
    }

    /// Opens a snapshot of the image.
    pub(super) async fn open(self: &Arc<Self>, opener: &dyn Opener, wanted: Wanted) -> Result<Arc<Base>> {
        let mut state = self.state.lock_arc().await;
        let disk = match state.writer.as_ref().and_then(Weak::upgrade) {
            Some(writer) => wanted.beside(&writer)?,
            None => wanted.read(opener).await?,
        };
        let base = Arc::new(Base {
            geometry: Geometry { read_only: true, ..disk.geometry() },
            _parent: self.clone(),
            wanted,
            passage: Arc::default(),
            inner: ArcSwapOption::from_pointee(disk),
            hold: Mutex::default(),
            is_closed: AtomicBool::new(false),
        });
        state.bases.push(Arc::downgrade(&base));
        Ok(base)
    }
}

impl Turn {
    /// The image is open for writing: its snapshots are read beside its disk.
    pub(super) fn attach(mut self, writer: &Arc<dyn Snapshots>) {
        for base in self.0.bases.iter().filter_map(Weak::upgrade) {
            base.attach(base.wanted.beside(writer));
        }
        self.0.writer = Some(Arc::downgrade(writer));
    }

    /// The image is not open for writing: its snapshots are read from its file.
    pub(super) async fn read_file(self, opener: &dyn Opener) {
        for base in self.0.bases.iter().filter_map(Weak::upgrade) {
            base.attach(base.wanted.read(opener).await);
        }
    }
}

/// The part of the top image, while it is open for writing, as the image of snapshots that other disks stand on.
#[derive(Default)]
pub(super) struct Fork {
    pub(super) parent: Option<Arc<Parent>>,
    /// Held while no snapshot may be read.
    turn: Mutex<Option<Turn>>,
}

impl Chain {
    /// Disks of the process that stand on snapshots of the top image read nothing from now on: their requests wait
    /// until [`resume_forks`](Chain::resume_forks), or until this chain is dropped and
    /// [`Templates::left`](super::Templates::left) is called. Must come before the disk is closed.
    pub async fn hold_forks(&self) {
        let Some(parent) = &self.fork.parent else { return };
        if lock(&self.fork.turn).is_none() {
            let turn = parent.detach().await;
            *lock(&self.fork.turn) = Some(turn);
        }
    }

    /// They go on.
    pub fn resume_forks(&self) {
        if let (Some(turn), Some(snapshots)) = (lock(&self.fork.turn).take(), &self.top.opened.snapshots) {
            turn.attach(snapshots);
        }
    }
}

/// Which snapshot of which image, over which disk.
pub(super) struct Wanted {
    pub(super) path: PathBuf,
    pub(super) canonical: PathBuf,
    pub(super) snapshot: SnapshotKey,
    pub(super) below: Option<SharedDisk>,
    /// The header with which the image was found.
    pub(super) head: Box<dyn Head>,
    /// Counts what reading its file costs.
    pub(super) tally: HostTally,
    pub(super) mapping_share: u64,
    pub(super) options: ChainOptions,
}

impl Wanted {
    /// The snapshot beside the disk that is written.
    fn beside(&self, writer: &Arc<dyn Snapshots>) -> Result<SharedDisk> {
        self.check(&writer.list()?)?;
        writer.clone().open(self.snapshot.id)
    }

    /// The snapshot in the file. Another process may read it, but not write.
    async fn read(&self, opener: &dyn Opener) -> Result<SharedDisk> {
        let remedy = || {
            format!(
                "{} is the image of a snapshot that clones stand on; while another program writes it, only that \
                 program can read the snapshot: serve the clones there (`vellum export add`)",
                self.path.display()
            )
        };
        let read = async {
            let storage = opener.open(&self.canonical, &self.path, Purpose::Read).await?;
            let kind = FormatKind::Native;
            let read = replayed(opener, &self.canonical, &self.path, storage, kind).await?;
            read.ok_or_else(|| being_written(&self.path).with_kind(ErrorKind::Locked))
        };
        let storage: SharedStorage = read.await.map_err(|error| match error.kind() {
            ErrorKind::Locked => error.context(remedy()),
            _ => error,
        })?;
        let head = FormatKind::Native.format().read(&*storage).await?;
        if head.backing() != self.head.backing() {
            return Err(Error::corrupt(format!("{} was replaced meanwhile", self.path.display())));
        }
        self.check(&head.snapshots(&storage, Some(&storage)).await?)?;
        let how = How {
            // The file is written meanwhile.
            tables: None,
            read_only: true,
            snapshot: Some(self.snapshot.id.to_string()),
            tally: &self.tally,
            mapping_share: self.mapping_share,
            fills: None,
            options: &self.options,
        };
        Ok(open_disk(&*head, files_of(&storage, None, self.below.clone()), &[], how).await?.disk)
    }

    /// Whether the snapshot is among these, and marked.
    fn check(&self, all: &[Snapshot]) -> Result<()> {
        let SnapshotKey { name, id } = &self.snapshot;
        let found = all.iter().find(|one| one.id == id.to_string() && one.name == *name);
        let path = self.path.display();
        match found {
            Some(one) if one.is_cloned => Ok(()),
            Some(_) => Err(Error::corrupt(format!(
                "{path}: snapshot {} was released, as if no clone stood on it any more: `vellum clone` marks it again, \
                 with any new clone of it",
                self.snapshot
            ))),
            None => Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "{path} has no snapshot {}, on which the clone stands: it was deleted",
                    self.snapshot
                ),
            )),
        }
    }
}

/// A snapshot as an image below others. It is only read.
pub(crate) struct Base {
    geometry: Geometry,
    _parent: Arc<Parent>,
    wanted: Wanted,
    passage: Arc<Passage>,
    /// Nothing while it is exchanged, and when that failed.
    inner: ArcSwapOption<SharedDisk>,
    /// While it is exchanged.
    hold: Mutex<Option<Hold>>,
    is_closed: AtomicBool,
}

impl Base {
    async fn give_up(&self) {
        {
            let mut hold = lock(&self.hold);
            hold.get_or_insert_with(|| self.passage.hold());
        }
        self.passage.drained().await;
        self.inner.store(None);
    }

    fn attach(&self, disk: Result<SharedDisk>) {
        let mut hold = lock(&self.hold);
        if !self.is_closed.load(Ordering::Acquire) {
            self.inner.store(disk.ok().map(Arc::new));
        }
        *hold = None;
    }

    /// Whether requests of it succeed, or will.
    pub(super) fn is_well(&self) -> bool {
        self.inner.load().is_some() || lock(&self.hold).is_some()
    }

    fn now(&self) -> Result<Arc<SharedDisk>> {
        self.inner.load_full().ok_or_else(|| {
            Error::new(
                ErrorKind::Io,
                format!(
                    "{}: snapshot {} could not be opened again after its image was closed: when no other program \
                     writes that, `vellum export reopen` of the clone helps",
                    self.wanted.path.display(),
                    self.wanted.snapshot
                ),
            )
        })
    }

    fn refused<T: 'static>(&self) -> LocalFuture<'static, Result<T>> {
        let error =
            Error::new(ErrorKind::ReadOnly, format!("snapshot {} is only read", self.wanted.snapshot));
        Box::pin(std::future::ready(Err(error)))
    }
}

impl Disk for Base {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.wanted.below.clone()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let _inside = self.passage.enter().await;
            self.now()?.read(at, buffer).await
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let _inside = self.passage.enter().await;
            self.now()?.map(span).await
        })
    }

    fn write(&self, _: GuestOffset, _: Buffer, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn write_zeroes(&self, _: GuestSpan, _: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    fn discard(&self, _: GuestSpan, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    /// Its file, or the snapshot beside the disk, is given up.
    fn close(&self) -> LocalFuture<'_, Result<()>> {
        let _hold = lock(&self.hold);
        self.is_closed.store(true, Ordering::Release);
        self.inner.store(None);
        Box::pin(std::future::ready(Ok(())))
    }
}
