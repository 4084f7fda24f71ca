//! An open image with everything below it, and the choices when one is opened.
//!
//! The walk down the backing chain is `vellum-layer`'s, the files are `vellum-daemon`'s. Here they get one
//! name and the few operations that an application needs.
//!
//! Everything here that is `async` must be polled on a worker, to its end.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use vellum_core::{Error, ErrorKind, GuestSpan, MergedExtent, Result, SharedDisk, SharedStorage, map_merged};
use vellum_daemon::{ImageOptions, Pool, open_image};
use vellum_format::FormatKind;
use vellum_format::image::{Snapshot, Snapshots};
use vellum_io::clock;
use vellum_layer::{Chain, ChainOptions, Member};

use crate::only::Only;

/// How an image is opened. By default: for writing, in the format that its content shows, with the images
/// that it refers to in its own directory.
#[derive(Debug, Clone, Default)]
#[must_use = "nothing is open before `open`"]
pub struct OpenOptions(ImageOptions);

impl OpenOptions {
    /// States the format. A raw disk can be opened for writing only with this, because its guest could
    /// write the first bytes of any other format.
    pub fn format(mut self, format: FormatKind) -> Self {
        self.0.format = Some(format);
        self
    }

    /// Nothing is written, not even a recovery.
    pub fn read_only(mut self) -> Self {
        self.0.read_only = true;
        self
    }

    /// Opens this snapshot, by its ID or name, instead of the disk. It is read-only.
    pub fn snapshot(mut self, wanted: impl Into<String>) -> Self {
        self.0.snapshot = Some(wanted.into());
        self.read_only()
    }

    /// Lets images refer to files in this directory. Without it, a backing file outside the directory of
    /// the image is refused: the name comes from the image, which may come from anywhere.
    pub fn allow_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.0.allow_dirs.push(dir.into());
        self
    }

    /// Bypasses the page cache (`O_DIRECT`).
    pub fn direct(mut self) -> Self {
        self.0.direct = true;
        self
    }

    /// Opens the image at this path and everything below it. A writable image that was not closed is
    /// recovered first.
    ///
    /// # Errors
    /// `Locked` when another program has the image open, `Refused` for a reference that is not allowed,
    /// `Corrupt` for a damaged image, and the errors of the files.
    pub async fn open(self, path: impl AsRef<Path>) -> Result<Image> {
        open_image(path.as_ref(), &self.0).await.map(Image)
    }

    /// Opens the image that this storage holds. It must not refer to other files.
    ///
    /// # Errors
    /// As [`open`](Self::open); `NotFound` when the image refers to another file.
    pub async fn open_in(self, storage: SharedStorage) -> Result<Image> {
        let options = ChainOptions {
            format: self.0.format,
            read_only: self.0.read_only,
            snapshot: self.0.snapshot,
            offload: Arc::new(Pool),
            clock: Some(clock()),
            ..ChainOptions::default()
        };
        let name = PathBuf::from(storage.name());
        Chain::open(&Only(storage), &name, &options).await.map(Image)
    }
}

/// An open image and the images below it. [`disk`](Self::disk) is what a guest would see.
pub struct Image(Chain);

impl Image {
    /// The choices when an image is opened; end with [`OpenOptions::open`].
    pub fn options() -> OpenOptions {
        OpenOptions::default()
    }

    /// Opens the image at this path for writing, with everything below it.
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::options().open(path).await
    }

    /// What a guest sees. Clones of it may be handed to other workers.
    pub fn disk(&self) -> &SharedDisk {
        self.0.disk()
    }

    /// The size of the disk, in bytes.
    pub fn size(&self) -> u64 {
        self.disk().geometry().size
    }

    /// The files of the chain, from the top down, as the caller or the image above names them.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.0.members().map(|member| member.path.as_path())
    }

    /// Where the bytes of this part of the disk are, in the whole chain: from its start, in order, without
    /// gaps. The answer may stop early, after at least one extent. Then ask again from where it ends.
    ///
    /// # Errors
    /// The errors of the images.
    pub async fn map(&self, span: GuestSpan) -> Result<Vec<MergedExtent>> {
        map_merged(self.disk(), span).await
    }

    /// Takes a snapshot of the disk as it is now, while it is in use, and returns its number. It is durable
    /// when this returns.
    ///
    /// # Errors
    /// `Unsupported` when the format has none, `ReadOnly` for an image that was opened so, `Invalid` for an
    /// impossible name, and the errors of the image.
    pub async fn take_snapshot(&self, name: &str) -> Result<u32> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.kept("taken")?.create(name, now).await
    }

    /// Deletes a snapshot, given by its number or name.
    ///
    /// # Errors
    /// `NotFound` when there is none, and as [`take_snapshot`](Self::take_snapshot).
    pub async fn delete_snapshot(&self, wanted: &str) -> Result<()> {
        self.kept("deleted")?.delete(wanted).await
    }

    /// The snapshots, in the order in which they were taken.
    ///
    /// # Errors
    /// When the list is damaged.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>> {
        let top = self.top();
        match &top.opened.snapshots {
            Some(snapshots) => snapshots.list(),
            None => top.head.snapshots(&top.storage, Some(&top.storage)).await,
        }
    }

    /// Opens a snapshot for reading, beside the disk. It must be closed, or dropped, before the image is
    /// closed.
    ///
    /// # Errors
    /// `NotFound` when there is none of this name, and as [`take_snapshot`](Self::take_snapshot). Snapshots of
    /// a qcow2 image are read with [`OpenOptions::snapshot`].
    pub fn open_snapshot(&self, name: &str) -> Result<SharedDisk> {
        let snapshots = self.kept("read beside the disk")?;
        let missing = || Error::new(ErrorKind::NotFound, format!("there is no snapshot {name:?}"));
        let id = snapshots.named(name)?.ok_or_else(missing)?;
        snapshots.clone().open(id)
    }

    /// Flushes, writes what is still in memory, marks the image clean and closes it. No other request may be
    /// running. Afterwards every request fails with `Closed`. The locks of the files are released when the
    /// last clone of the [`disk`](Self::disk) is dropped, too.
    ///
    /// # Errors
    /// The errors of the images. Everything that was flushed is safe all the same.
    pub async fn close(self) -> Result<()> {
        self.shut().await
    }

    /// As above, for an image that is shared.
    pub(crate) async fn shut(&self) -> Result<()> {
        self.0.close().await
    }

    fn top(&self) -> &Member {
        self.0.top()
    }

    fn kept(&self, what: &str) -> Result<&Arc<dyn Snapshots>> {
        let top = self.top();
        top.opened.snapshots.as_ref().ok_or_else(|| {
            let (path, kind) = (top.path.display(), top.head.kind());
            let why = "use the native format (`.vlm`), opened for writing";
            Error::unsupported(format!("{path}: snapshots of this {kind} image cannot be {what}: {why}"))
        })
    }
}
