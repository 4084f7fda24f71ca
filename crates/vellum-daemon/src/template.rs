//! Templates: the list of ranges where their disk reads as zero is computed once, and kept beside them for
//! all the images made over them.
//!
//! 1. A list is written only when no file of the chain changed while it was read, and none had changed less
//!    than [`SETTLED`] before: file systems count time in steps, and two changes may fall into one.
//! 2. A list is trusted only for files that have not changed. An invalid list never stands in the way: the
//!    image is created without it.

use std::ffi::OsString;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use vellum_core::{Buffer, Context, Error, ErrorKind, ImageOffset, Result, Storage};
use vellum_format::zeros::{FILE_BYTES_MAX, FileFacts, GRANULARITY, SUFFIX, Zeros};
use vellum_io::{Draft, File, LockMode, OpenOptions, clock};
use vellum_layer::Chain;

use crate::copy::find_zeros;
use crate::image::{ImageOptions, new_file, open_image};

/// A file that was changed later than this before it is read is waited for.
const SETTLED: Duration = Duration::from_secs(1);
/// Pieces read at once.
const PIECES_AT_ONCE: usize = 8;

/// The list's name beside a template.
pub fn list_path(template: &Path) -> PathBuf {
    let mut name = OsString::from(template);
    name.push(SUFFIX);
    PathBuf::from(name)
}

/// Reads a template's disk and writes the list of its zeros beside it. Must be called on a worker. `progress`
/// gets the size of the disk and the bytes done.
///
/// # Errors
/// `Unsupported` for a device, which has no modification time, and the errors of the files; `Closed` when it
/// was stopped.
pub async fn prepare(
    template: &Path,
    options: &ImageOptions,
    stop: &AtomicBool,
    progress: &dyn Fn(u64, u64),
) -> Result<Zeros> {
    let chain = open_image(template, &ImageOptions { read_only: true, ..options.clone() }).await?;
    let found = scan(&chain, stop, progress).await;
    let closed = chain.close().await;
    let zeros = found?;
    closed?;
    write(&list_path(template), &zeros).await?;
    Ok(zeros)
}

async fn scan(chain: &Chain, stop: &AtomicBool, progress: &dyn Fn(u64, u64)) -> Result<Zeros> {
    let files = facts(chain)?;
    for file in &files {
        let Ok(seconds) = u64::try_from(file.seconds) else { continue };
        let changed = SystemTime::UNIX_EPOCH + Duration::new(seconds, file.nanoseconds);
        // Waiting does not help if the time is in the future.
        let age = SystemTime::now().duration_since(changed).unwrap_or(Duration::ZERO);
        clock().sleep(SETTLED.saturating_sub(age)).await;
    }
    let size = chain.disk().geometry().size;
    let runs =
        find_zeros(chain.disk(), GRANULARITY, PIECES_AT_ONCE, stop, &|bytes| progress(size, bytes)).await?;
    if facts(chain)? != files {
        return Err(Error::new(ErrorKind::Invalid, "the template was changed while it was read"));
    }
    Ok(Zeros { size, files, runs })
}

/// What shows whether the files of a chain have changed, from the top down.
fn facts(chain: &Chain) -> Result<Vec<FileFacts>> {
    let images = chain.members().map(|member| member.path.as_path());
    let data_files =
        chain.members().filter_map(|member| member.data_file.as_ref()).map(|(path, _)| path.as_path());
    images.chain(data_files).map(facts_of).collect()
}

fn facts_of(path: &Path) -> Result<FileFacts> {
    let metadata = std::fs::metadata(path).context(|| format!("can't stat {}", path.display()))?;
    if metadata.file_type().is_block_device() {
        return Err(Error::unsupported(format!(
            "{} is a block device, which does not record when it was changed, so a list of its zeros would not be \
             safe",
            path.display()
        )));
    }
    let nanoseconds = u32::try_from(metadata.mtime_nsec()).unwrap_or(0);
    Ok(FileFacts { len: metadata.len(), seconds: metadata.mtime(), nanoseconds })
}

async fn write(path: &Path, zeros: &Zeros) -> Result<()> {
    let draft = Draft::begin(path).await?;
    let context = || format!("can't write {}", path.display());
    let file = new_file(draft.as_ref().map_or(path, Draft::path), false).await.context(context)?;
    file.set_len(0).await.context(context)?;
    file.write(ImageOffset::ZERO, Buffer::copy_of(&zeros.encode())).await.context(context)?;
    file.flush().await.context(context)?;
    drop(file);
    match draft {
        Some(draft) => draft.publish().await,
        None => Ok(()),
    }
}

/// What became of the list of a template's zeros when an image was made over it.
#[derive(Debug, Clone)]
pub enum ListUse {
    /// There is none.
    None,
    /// So many bytes of the template are known to be zero.
    Used(u64),
    /// There is one, and this is why it does not count.
    Refused(Error),
}

/// The list of zeros beside the template of an open chain, if it fits the template as it is now.
pub(crate) async fn zeros_of(chain: &Chain) -> (Option<Zeros>, ListUse) {
    match load(chain).await {
        Ok(None) => (None, ListUse::None),
        Ok(Some(zeros)) => {
            let bytes = zeros.zero_bytes();
            (Some(zeros), ListUse::Used(bytes))
        }
        Err(error) => {
            let path = list_path(&chain.top().path);
            (None, ListUse::Refused(error.context(format!("{} is not used", path.display()))))
        }
    }
}

async fn load(chain: &Chain) -> Result<Option<Zeros>> {
    let path = list_path(&chain.top().path);
    if !path.exists() {
        return Ok(None);
    }
    let options = OpenOptions { writable: false, lock: LockMode::Read, ..OpenOptions::default() };
    let file = File::open(&path, options).await?;
    if file.len() > FILE_BYTES_MAX {
        return Err(Error::invalid("it is not a list of zeros: it is too long"));
    }
    let len = usize::try_from(file.len()).expect("as just bounded");
    let bytes = file.read(ImageOffset::ZERO, Buffer::for_overwrite(len)).await?;
    let zeros = Zeros::parse(&bytes.to_vec())?;
    let is_as_it_was = zeros.size == chain.disk().geometry().size && zeros.files == facts(chain)?;
    if !is_as_it_was {
        return Err(Error::invalid("the template was changed since: run `vellum template prepare` again"));
    }
    Ok(Some(zeros))
}
