//! Opening and making images, from what a user says.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_core::{BlockSize, Context, Error, ErrorKind, Result, SharedStorage, Storage};
use vellum_format::qcow2::{self, CreateOptions, Preallocation};
use vellum_format::{FormatKind, Prealloc, native, probe};
use vellum_io::{File, OpenOptions, clock};
use vellum_layer::{Chain, ChainOptions, Gate, Opener, Purpose};

use crate::host::{Host, HostOptions, Pool};
use crate::template::{self, ListUse};

/// How an image is opened.
#[derive(Debug, Clone, Default)]
pub struct ImageOptions {
    /// Its format; guessed when not given, but never for writing a raw disk.
    pub format: Option<FormatKind>,
    /// Nothing is written.
    pub read_only: bool,
    /// Read even while others write; only with `read_only`.
    pub force_share: bool,
    /// Past the page cache.
    pub direct: bool,
    /// This internal snapshot.
    pub snapshot: Option<String>,
    /// The image alone, without what it refers to below.
    pub without_backing: bool,
    /// Where references may lead, besides each image's own directory.
    pub allow_dirs: Vec<PathBuf>,
    /// Whether space is prepared ahead of need while it is served.
    pub prealloc: Prealloc,
    /// Zones of a native image are emptied in quiet times.
    pub compaction: bool,
}

impl ImageOptions {
    /// For looking at an image.
    pub fn reading() -> Self {
        Self { read_only: true, ..Self::default() }
    }

    fn host(&self) -> Result<Host> {
        if self.force_share && !self.read_only {
            return Err(Error::invalid(
                "--force-share is for reading: an image is written by one program at a time",
            ));
        }
        Ok(Host::new(HostOptions { direct: self.direct, force_share: self.force_share }))
    }
}

/// Opens an image and everything below it. Must be called on a worker.
///
/// # Errors
/// Those of [`Chain::open`].
pub async fn open_image(path: &Path, options: &ImageOptions) -> Result<Chain> {
    let chain = ChainOptions {
        format: options.format,
        read_only: options.read_only,
        snapshot: options.snapshot.clone(),
        without_backing: options.without_backing,
        gate: Host::gate(&options.allow_dirs)?,
        offload: Arc::new(Pool),
        prealloc: options.prealloc,
        compaction: options.compaction,
        clock: Some(clock()),
        ..ChainOptions::default()
    };
    Chain::open(&options.host()?, path, &chain).await
}

/// Opens one image file, without what it refers to, and tells its format.
///
/// # Errors
/// What opening and reading its first bytes say.
pub async fn open_file(path: &Path, options: &ImageOptions) -> Result<(SharedStorage, FormatKind)> {
    let host = options.host()?;
    let purpose = if options.read_only { Purpose::Read } else { Purpose::Write };
    let storage = host.open(&host.canonical(path)?, path, purpose).await?;
    let format = match options.format {
        Some(format) => format,
        None => probe(&*storage).await?,
    };
    Ok((storage, format))
}

/// A new image: where, and what is below it.
#[derive(Debug, Clone)]
pub struct CreateTarget {
    /// The image file. An existing file is replaced, unless somebody has it open.
    pub path: PathBuf,
    /// The size of the disk in bytes; that of the backing image when not given.
    pub size: Option<u64>,
    /// The backing image's name, as it will stand in the new one, and its format.
    pub backing: Option<(String, FormatKind)>,
    /// The backing image is not looked at; the size must be given.
    pub trust_backing: bool,
    /// Where the backing image's own references may lead.
    pub allow_dirs: Vec<PathBuf>,
}

impl CreateTarget {
    /// The size of the disk: as given, else as the backing image has it.
    ///
    /// # Errors
    /// When there is neither, or the backing image cannot be opened.
    pub async fn disk_size(&self) -> Result<u64> {
        let backing = match self.open_backing().await? {
            Some(chain) => {
                let size = chain.disk().geometry().size;
                chain.close().await?;
                Some(size)
            }
            None => None,
        };
        self.size_over(backing)
    }

    fn size_over(&self, backing: Option<u64>) -> Result<u64> {
        self.size.or(backing).ok_or_else(|| {
            Error::invalid(format!("{} needs a size: say it after the file name", self.path.display()))
        })
    }

    /// The backing image, if there is one and it is to be looked at.
    async fn open_backing(&self) -> Result<Option<Chain>> {
        let Some((name, format)) = self.backing.as_ref().filter(|_| !self.trust_backing) else {
            return Ok(None);
        };
        let options = ImageOptions {
            format: Some(*format),
            allow_dirs: self.allow_dirs.clone(),
            ..ImageOptions::reading()
        };
        let path = Gate::resolve(&self.path, name)?;
        let chain = open_image(&path, &options).await.context(|| {
            format!("can't use the backing image {name} (`-u` makes the image without looking at it)")
        })?;
        Ok(Some(chain))
    }

    async fn file(&self) -> Result<Arc<File>> {
        new_file(&self.path).await
    }
}

/// A file to be filled: made when it is not there, opened when it is. Its old content is replaced by whoever fills it.
///
/// # Errors
/// `Locked` when another program has it open.
pub async fn new_file(path: &Path) -> Result<Arc<File>> {
    match File::create_new(path, OpenOptions::writing()).await {
        Err(error) if path.exists() => match File::open(path, OpenOptions::writing()).await {
            Err(second) if second.kind() == ErrorKind::NotFound => Err(error),
            opened => opened,
        },
        created => created,
    }
}

/// Makes a qcow2 image. Must be called on a worker. Gives the size of the disk.
///
/// # Errors
/// `Invalid` for options that contradict each other, and what the files say. An image that could not be made whole is
/// removed.
pub async fn create_qcow2(target: &CreateTarget, options: CreateOptions) -> Result<u64> {
    let size = target.disk_size().await?;
    let backing = target.backing.as_ref().map(|(name, format)| (name.clone(), Some(format.to_string())));
    let options = CreateOptions { size, backing, ..options };
    let data_path = options.data_file.as_ref().map(|name| Gate::resolve(&target.path, name)).transpose()?;
    let is_new_data = data_path.as_ref().filter(|path| !path.exists());
    let data_file: Option<SharedStorage> = match &data_path {
        None => None,
        Some(path) => Some(new_file(path).await?),
    };
    let made = lay_out_qcow2(target, data_file.as_ref(), &options).await;
    if let (Err(_), Some(path)) = (&made, is_new_data) {
        drop(data_file);
        let _ = std::fs::remove_file(path);
    }
    made.map(|()| size)
}

async fn lay_out_qcow2(
    target: &CreateTarget,
    data_file: Option<&SharedStorage>,
    options: &CreateOptions,
) -> Result<()> {
    let is_new = !target.path.exists();
    let file = target.file().await?;
    let made = qcow2::create(&*file, data_file, options).await;
    if made.is_err() && is_new {
        drop(file);
        let _ = std::fs::remove_file(&target.path);
    }
    made
}

/// Makes an image in the native format. Must be called on a worker. Gives its superblock, and what became of the list of
/// the template's zeros.
///
/// # Errors
/// `Invalid` for options that contradict each other, and what the files say. An image that could not be made whole is
/// removed.
pub async fn create_native(
    target: &CreateTarget,
    options: native::CreateOptions,
) -> Result<(native::Superblock, ListUse)> {
    let backing = target.open_backing().await?;
    let mut list = (None, ListUse::None);
    if let Some(chain) = &backing {
        list = template::zeros_of(chain).await;
    }
    let backing_size = backing.as_ref().map(|chain| chain.disk().geometry().size);
    let size = BlockSize::SECTOR.round_up(target.size_over(backing_size)?);
    let base = target.backing.as_ref().map(|(name, format)| native::NewBase {
        name: name.clone(),
        format: Some(format.to_string()),
        // One that is not looked at may be as large as the disk.
        size: backing_size.unwrap_or(size),
        zeros: list.0.map(|zeros| zeros.runs).unwrap_or_default(),
    });
    let options = native::CreateOptions { size, base, ..options };
    let made = lay_out_native(target, &options).await;
    // Until here its files are locked, and so are as the list has them.
    if let Some(chain) = backing {
        chain.close().await?;
    }
    made.map(|superblock| (superblock, list.1))
}

async fn lay_out_native(
    target: &CreateTarget,
    options: &native::CreateOptions,
) -> Result<native::Superblock> {
    let is_new = !target.path.exists();
    let file = target.file().await?;
    let made = native::create(&*file, options).await;
    if made.is_err() && is_new {
        drop(file);
        let _ = std::fs::remove_file(&target.path);
    }
    made
}

/// Makes a raw disk of zeros. Must be called on a worker.
///
/// # Errors
/// `Invalid` for a preallocation that a raw disk has not, and what the file says. A file that could not be made whole is
/// removed.
pub async fn create_raw(path: &Path, size: u64, preallocation: Preallocation) -> Result<()> {
    let is_new = !path.exists();
    let file = new_file(path).await?;
    let made = lay_out_raw(path, &file, size, preallocation).await;
    if made.is_err() && is_new {
        drop(file);
        let _ = std::fs::remove_file(path);
    }
    made
}

async fn lay_out_raw(path: &Path, file: &File, size: u64, preallocation: Preallocation) -> Result<()> {
    if file.limits().fixed_len {
        if file.len() < size {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{} has {} bytes, the disk needs {size}", path.display(), file.len()),
            ));
        }
        return Ok(());
    }
    file.set_len(0).await?;
    file.set_len(size).await?;
    let all = vellum_core::ImageOffset::ZERO.span(size);
    match preallocation {
        Preallocation::Off => {}
        Preallocation::Metadata => return Err(Error::invalid("a raw disk has no metadata to preallocate")),
        Preallocation::Falloc => file.preallocate(all).await?,
        Preallocation::Full => {
            for span in vellum_core::BlockSize::from_shift(20).pieces_of(all) {
                let len = usize::try_from(span.len()).expect("a mebibyte");
                file.write(span.start(), vellum_core::Buffer::zeroed(len)).await?;
            }
        }
    }
    file.flush().await
}
