//! New images: empty ones and copy-on-write clones, in files and in storages of the caller's own.

use std::path::{Path, PathBuf};

use vellum_core::{BlockSize, Context, Error, Result, SharedStorage};
use vellum_daemon::{CreateTarget, backing_name, create_native, create_qcow2, create_raw};
use vellum_format::qcow2::Preallocation;
use vellum_format::{FormatKind, native, qcow2};

use crate::image::{Image, OpenOptions};

/// An image that is to be created.
///
/// ```no_run
/// # use vellum_disk::{FormatKind, Image, NewImage, Result};
/// # async fn one() -> Result<Image> {
/// NewImage::of(FormatKind::Qcow2)
///     .backing("/srv/templates/debian.raw")
///     .allow_dir("/srv/templates")
///     .size(20 << 30)
///     .create("/srv/disks/web.qcow2")
///     .await
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "nothing is made before `create`"]
pub struct NewImage {
    format: FormatKind,
    size: Option<u64>,
    backing: Option<(PathBuf, Option<FormatKind>)>,
    allow_dirs: Vec<PathBuf>,
    native: native::CreateOptions,
    qcow2: Option<qcow2::CreateOptions>,
}

impl NewImage {
    /// Of this format.
    pub fn of(format: FormatKind) -> Self {
        let native = native::CreateOptions { has_table: true, has_zones: true, ..Default::default() };
        Self { format, size: None, backing: None, allow_dirs: Vec::new(), native, qcow2: None }
    }

    /// Of the format that the name's extension shows.
    pub(crate) fn named(path: &Path) -> Result<Self> {
        format_of(path).map(Self::of)
    }

    /// The size of the disk, in bytes. By default that of the backing image.
    pub fn size(mut self, bytes: u64) -> Self {
        self.size = Some(bytes);
        self
    }

    /// What the disk reads as where it was not written: an image, whose format is the extension of its
    /// name. It must not change from now on.
    pub fn backing(mut self, image: impl AsRef<Path>) -> Self {
        self.backing = Some((image.as_ref().to_owned(), None));
        self
    }

    /// As above, for an image of this format.
    pub fn backing_of(mut self, image: impl AsRef<Path>, format: FormatKind) -> Self {
        self.backing = Some((image.as_ref().to_owned(), Some(format)));
        self
    }

    /// Lets images refer to files in this directory, here and when the new one is opened at the end of
    /// [`create`](Self::create). Each later opening needs [`OpenOptions::allow_dir`] again.
    pub fn allow_dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.allow_dirs.push(dir.into());
        self
    }

    /// Options of a native image, in place of the defaults: a table, and zones. Its size and base are given with [`size`](Self::size) and
    /// [`backing`](Self::backing).
    pub fn native(mut self, options: native::CreateOptions) -> Self {
        self.native = options;
        self
    }

    /// Options of a qcow2 image, in place of the defaults, which for an overlay include subclusters. Its size and backing file are given with [`size`](Self::size) and
    /// [`backing`](Self::backing).
    pub fn qcow2(mut self, options: qcow2::CreateOptions) -> Self {
        self.qcow2 = Some(options);
        self
    }

    /// Creates the image and opens it for writing. An existing file is replaced, unless it is in use. When only
    /// the opening fails, as for a backing image that is not allowed, the new file stays.
    ///
    /// # Errors
    /// `Invalid` when a size or format is missing or options contradict each other, `Locked` when the file
    /// is in use, `Refused` when the backing image is in another directory that is not allowed, and the
    /// errors of the files.
    pub async fn create(self, path: impl AsRef<Path>) -> Result<Image> {
        let path = path.as_ref();
        let context = || format!("can't create {}", path.display());
        self.lay_out(path).await.context(context)?;
        let open = OpenOptions::default().format(self.format);
        self.allow_dirs.into_iter().fold(open, OpenOptions::allow_dir).open(path).await
    }

    async fn lay_out(&self, path: &Path) -> Result<()> {
        let target = CreateTarget {
            path: path.to_owned(),
            size: self.size,
            backing: self.backing_of_image(path)?,
            trust_backing: false,
            allow_dirs: self.allow_dirs.clone(),
            remote: Default::default(),
            trust_base: false,
            secrets: Default::default(),
            stands_on_encrypted: Default::default(),
            never_flushed: false,
        };
        match self.format {
            FormatKind::Native => create_native(&target, self.native.clone()).await.map(drop),
            FormatKind::Qcow2 => create_qcow2(&target, self.qcow2_options()).await.map(drop),
            FormatKind::Foreign(_) => self.format.check_is_written(),
            FormatKind::Luks => Err(no_new_luks(path)),
            FormatKind::Raw if target.backing.is_some() => Err(no_backing()),
            FormatKind::Raw => {
                let size = BlockSize::SECTOR.round_up(target.disk_size().await?);
                create_raw(path, size, Preallocation::Off).await
            }
        }
    }

    /// As given. By default an overlay has subclusters, which spare it copies of what is below.
    fn qcow2_options(&self) -> qcow2::CreateOptions {
        let extended_l2 = self.backing.is_some();
        self.qcow2.clone().unwrap_or_else(|| qcow2::CreateOptions { extended_l2, ..Default::default() })
    }

    /// The backing image as the new one will name it, and its format.
    fn backing_of_image(&self, path: &Path) -> Result<Option<(String, FormatKind)>> {
        let Some((backing, format)) = &self.backing else { return Ok(None) };
        let format = match format {
            Some(format) => *format,
            None => format_of(backing)?,
        };
        Ok(Some((backing_name(backing, path)?, format)))
    }

    /// Creates the image in this storage, which it then fills from its beginning. It has no backing image.
    /// [`OpenOptions::open_in`] opens it.
    ///
    /// # Errors
    /// `Invalid` without a size, and the errors of the storage.
    pub async fn create_in(self, storage: SharedStorage) -> Result<()> {
        if self.backing.is_some() {
            return Err(Error::unsupported("an image in a storage of one's own has no backing image"));
        }
        let size = self.size.ok_or_else(|| Error::invalid("give the size of the new disk"))?;
        match self.format {
            FormatKind::Native => {
                native::create(&*storage, &native::CreateOptions { size, ..self.native }).await.map(drop)
            }
            FormatKind::Qcow2 => {
                let options = qcow2::CreateOptions { size, ..self.qcow2_options() }.settled();
                qcow2::create(&*storage, None, &options).await
            }
            FormatKind::Foreign(_) => self.format.check_is_written(),
            FormatKind::Luks => Err(no_new_luks(Path::new(storage.name()))),
            FormatKind::Raw => storage.set_len(BlockSize::SECTOR.round_up(size)).await,
        }
    }
}

/// The format that a file's extension shows.
fn format_of(path: &Path) -> Result<FormatKind> {
    FormatKind::of_name(path).ok_or_else(|| {
        let remedy = "name it .qcow2, .vlm or .raw, or state the format with `NewImage`";
        Error::invalid(format!("the name of {} does not show its format: {remedy}", path.display()))
    })
}

fn no_new_luks(path: &Path) -> Error {
    Error::unsupported(format!("{}: no luks image is made here: use `vellum create -f luks`", path.display()))
}

fn no_backing() -> Error {
    Error::invalid("a raw image cannot have a backing image: use qcow2 or the native format")
}

impl Image {
    /// Creates an empty image and opens it. The name's extension is its format: `.qcow2`, `.vlm` (the
    /// native format) or `.raw`. The size is in bytes. An existing file is replaced, unless it is in use.
    ///
    /// # Errors
    /// As [`NewImage::create`].
    pub async fn create(path: impl AsRef<Path>, size: u64) -> Result<Self> {
        NewImage::named(path.as_ref())?.size(size).create(path).await
    }

    /// Creates a copy-on-write clone of a template and opens it. The extensions of both names are their
    /// formats. The template must stay as it is from now on. It must be in the directory of the clone; for
    /// one elsewhere, use [`NewImage::allow_dir`].
    ///
    /// # Errors
    /// As [`NewImage::create`].
    pub async fn clone_of(template: impl AsRef<Path>, path: impl AsRef<Path>) -> Result<Self> {
        NewImage::named(path.as_ref())?.backing(template).create(path).await
    }
}
