//! What is done with a flash cache that no server has open: it is made, looked at, checked, emptied into the images,
//! and given up. Each function must be called on a worker.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use vellum_core::{Context, Error, ErrorKind, ImageOffset, Result, SharedStorage};
use vellum_flash::{FlashCache, FlashPolicy, Look, RowFacts};
use vellum_format::session::Session;
use vellum_io::{File, OpenOptions};
use vellum_layer::FlashChoice;

use super::{NO_BOUND, cannot_open, open_cache, open_storage, open_with, random_bytes};
use crate::image::{ImageOptions, open_file, open_image};
use crate::occupied::holds_something;
use crate::signals::Stop;

/// A cache that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// The length of the file, or of the part of the device that is used, in bytes.
    pub size: u64,
    /// What it can hold, in bytes.
    pub capacity: u64,
}

/// Makes a cache of `size` bytes: a file, which must not exist, or all of a block device if no size is given. What is
/// there is only overwritten with `force`.
///
/// # Errors
/// `Invalid` for a size that is too small, `Refused` if something is there, and those of the storage.
pub async fn create(path: &Path, size: Option<u64>, force: bool) -> Result<Made> {
    let context = || format!("can't make a flash cache of {}", path.display());
    let is_new = !path.exists();
    let storage: SharedStorage = match is_new {
        true => File::create_new(path, OpenOptions::writing()).await?,
        false => open_storage(path, true).await?,
    };
    let made = fill_new(&storage, path, size, force).await.context(context);
    if made.is_err() && is_new {
        drop(storage);
        drop(std::fs::remove_file(path));
    }
    made
}

async fn fill_new(storage: &SharedStorage, path: &Path, size: Option<u64>, force: bool) -> Result<Made> {
    let is_device = storage.limits().fixed_len;
    let size = match size {
        None if is_device => storage.len(),
        None => return Err(Error::invalid("give the size after the file name, for example 20G")),
        Some(size) if is_device && size > storage.len() => {
            return Err(Error::invalid(format!("the device has only {} bytes", storage.len())));
        }
        Some(size) => size,
    };
    if !force && holds_something(storage).await? {
        return Err(Error::new(
            ErrorKind::Refused,
            format!(
                "{} is not empty: use --force to overwrite it. If it is a flash cache, images may be behind without it \
                 (`vellum flash info` shows that)",
                path.display()
            ),
        ));
    }
    if !is_device {
        storage.set_len(size).await?;
        // A write to it is not to fail for want of space. Where the host cannot reserve any, it may.
        match storage.preallocate(ImageOffset::ZERO.span(size)).await {
            Err(error) if error.kind() != ErrorKind::Unsupported => return Err(error),
            _ => {}
        }
    }
    let secret = u64::from_be_bytes(random_bytes()?);
    let facts = vellum_flash::create(storage, size, random_bytes()?, secret).await?;
    Ok(Made { size, capacity: facts.slots * 4096 })
}

/// A cache whose size was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResizedFlash {
    /// The length of the file, or of the part of the device that is used, in bytes.
    pub size: u64,
    /// What it can hold, in bytes.
    pub capacity: u64,
    /// Bytes of blocks that were moved.
    pub moved: u64,
    /// Bytes of blocks that were given up: images have them too.
    pub given_up: u64,
}

/// Gives a cache another size: a file `size` bytes, a block device that many of its bytes, or all of them if no size is
/// given. `progress` is told what is done of how many bytes. If it is stopped or fails, the cache has its size as
/// before, with all that images lack.
///
/// # Errors
/// `Locked` while a server has it, `NoSpace` if images lack more than it would have room for, `Invalid` for a size that is too
/// small, `Closed` when it was stopped, and those of the storage.
pub async fn resize(
    path: &Path,
    size: Option<u64>,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<ResizedFlash> {
    let (open, storage) = stop.or_stopped(open_with(path, NO_BOUND, Some(false), false)).await?;
    let (is_device, before) = (storage.limits().fixed_len, storage.len());
    let size = match size {
        None if is_device => storage.look_at_len().await?,
        None => return Err(Error::invalid("give the size after the file name, for example 20G")),
        Some(size) if is_device && size > storage.look_at_len().await? => {
            return Err(Error::invalid(format!("the device has only {} bytes", storage.len())));
        }
        Some(size) => size,
    };
    if !is_device && size > before {
        storage.set_len(size).await?;
        match storage.preallocate(ImageOffset::new(before).span(size - before)).await {
            Err(error) if error.kind() != ErrorKind::Unsupported => {
                drop(storage.set_len(before).await);
                return Err(error.context(format!("can't make {} larger", path.display())));
            }
            _ => {}
        }
    }
    // The end of a file is never written: its length shows whether somebody cuts it.
    let used = if is_device { size } else { size.saturating_sub(4096) };
    let flag = stop.flag.clone();
    let mut goes_on = |done, total| {
        progress(done, total);
        match flag.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorKind::Closed, "stopped: the flash cache has its size as before")),
            false => Ok(()),
        }
    };
    let resized = match open.resize(used, &mut goes_on).await {
        Ok(resized) => resized,
        // Once the superblock may have been written, what counts may lie where the file has become longer.
        Err(error) if open.is_decided() => {
            return Err(error.context(format!(
                "{} may have its new size: `vellum flash info` shows it, and the next opening completes it",
                path.display()
            )));
        }
        Err(error) => {
            if !is_device && size > before {
                drop(storage.set_len(before).await);
            }
            return Err(error);
        }
    };
    if !is_device && size != storage.len() {
        storage.set_len(size).await?;
        storage.flush().await?;
    }
    Ok(ResizedFlash {
        size: if is_device { resized.file_bytes } else { size },
        capacity: resized.slots * 4096,
        moved: resized.moved * 4096,
        given_up: resized.given_up * 4096,
    })
}

/// What is in a cache. Nothing is written.
///
/// # Errors
/// `Locked` while a server has it, `Invalid` if it is none, `Corrupt` if it is damaged.
pub async fn look(path: &Path) -> Result<Look> {
    let storage = open_storage(path, false).await?;
    vellum_flash::look(&storage).await.context(|| cannot_open(path))
}

/// Compares all that a cache says of itself. `say` gets a line for each thing found. Returns how many there are.
/// Nothing is written.
///
/// # Errors
/// As [`look`].
pub async fn check(path: &Path, say: &mut dyn FnMut(String)) -> Result<u64> {
    let storage = open_storage(path, false).await?;
    vellum_flash::check(&storage, say).await.context(|| cannot_open(path))
}

/// What became of images whose writes a cache had.
#[derive(Debug, Clone, Default)]
pub struct Completed {
    /// The images, and the bytes that each had to be given.
    pub images: Vec<(PathBuf, u64)>,
    /// What the cache still has of disks whose images were not named.
    pub left: Vec<RowFacts>,
}

/// Recovers a cache, and completes these images: what only the cache has of them is written home. Afterwards they can
/// be used without it.
///
/// # Errors
/// `Locked` while a server has the cache or an image, `Refused` for an image that this cache knows nothing of, and
/// those of the cache and of the images. After the first of an image, the others are completed all the same.
pub async fn complete(cache: &Path, images: &[PathBuf], options: &ImageOptions) -> Result<Completed> {
    let open = open_cache(cache).await?;
    let mut done = Completed::default();
    let mut failed = Ok(());
    for image in images {
        match complete_one(&open, image, options).await {
            Ok(bytes) => done.images.push((image.clone(), bytes)),
            Err(error) => {
                let context =
                    format!("can't complete {} from the flash cache {}", image.display(), cache.display());
                failed = failed.and(Err(error.context(context)));
            }
        }
    }
    done.left = open.rows().into_iter().filter(|row| row.dirty_blocks + row.zero_blocks > 0).collect();
    let closed = open.close().await;
    failed?;
    closed.map(|()| done)
}

async fn complete_one(
    cache: &std::sync::Arc<FlashCache>,
    image: &Path,
    options: &ImageOptions,
) -> Result<u64> {
    let policy = Some(policy_to_complete(image, options).await?);
    let flash = FlashChoice { cache: cache.clone(), policy, boot: super::boot() };
    let chain = open_image(image, &ImageOptions { flash: Some(flash), ..options.clone() }).await?;
    let dirty = chain.flash().map_or(0, |flash| flash.dirty_blocks());
    let drained = chain.drain().await;
    let closed = chain.close().await;
    drained.and(closed).map(|()| dirty * 4096)
}

/// What an image is opened with to be completed. One that has no place for a session, and one that is encrypted, never lacks writes.
async fn policy_to_complete(image: &Path, options: &ImageOptions) -> Result<FlashPolicy> {
    let (storage, kind) = open_file(image, options).await?;
    let head = kind.format().read(&*storage).await?;
    Ok(match (head.is_encrypted(), head.has_place_for_session()) {
        (true, _) => FlashPolicy::Off,
        (false, Err(_)) => FlashPolicy::ReadOnly,
        (false, Ok(())) => FlashPolicy::WriteBack,
    })
}

/// Gives up what a cache has of an image: the image is its disk from now on, although it may be behind. Returns the
/// session that it named.
///
/// # Errors
/// Those of the image.
pub async fn forget(path: &Path, options: &ImageOptions) -> Result<Option<Session>> {
    let (storage, kind) = open_file(path, options).await?;
    kind.format().forget_session(&storage).await
}

/// Gives up what a cache has of the disk that it knows by these digits, or whose session has them. Returns whether there
/// was anything.
///
/// # Errors
/// `Invalid` for other digits, and where several disks have them; and those of the cache.
pub async fn forget_row(cache: &Path, disk: &str) -> Result<bool> {
    let number = u128::from_str_radix(disk, 16).ok().filter(|_| disk.len() == 32);
    let number = number.ok_or_else(|| {
        Error::invalid(format!("invalid disk {disk:?}: use the 32 digits that `vellum flash info` shows"))
    })?;
    let open = open_cache(cache).await?;
    let forgotten = open.forget(number.to_be_bytes()).await;
    let closed = open.close().await;
    forgotten.and_then(|was_there| closed.map(|()| was_there))
}
