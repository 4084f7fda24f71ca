//! The bitmaps of images that no server uses: listed, read, changed. Each function must be called on a worker.

use std::path::Path;
use std::sync::Arc;

use vellum_core::{Error, ErrorKind, Result, SharedStorage, Storage};
use vellum_format::FormatKind;
use vellum_format::image::{Bitmap, BitmapChange, Bits, ClosedBitmaps, Format, MergeSource};
use vellum_layer::Chain;

use crate::data_file::make_durable;
use crate::image::{ImageOptions, open_file, open_file_replayed};

/// The bitmaps of an image.
///
/// # Errors
/// `Unsupported` for a format without bitmaps, and the errors of the image.
pub async fn list(path: &Path, format: Option<FormatKind>) -> Result<Vec<Bitmap>> {
    let (storage, bitmaps) = opened(path, format).await?;
    bitmaps.list(&*storage).await
}

/// What is marked in a bitmap.
///
/// # Errors
/// As [`list`]; `NotFound` when there is none of this name, `Corrupt` when it cannot be relied on.
pub async fn load(path: &Path, format: Option<FormatKind>, name: &str) -> Result<Bits> {
    let (storage, bitmaps) = opened(path, format).await?;
    bitmaps.load(&*storage, name).await
}

async fn opened(
    path: &Path,
    format: Option<FormatKind>,
) -> Result<(SharedStorage, &'static dyn ClosedBitmaps)> {
    let options = ImageOptions { format, ..ImageOptions::reading() };
    let (storage, kind) = open_file_replayed(path, &options).await?;
    Ok((storage, bitmaps_of(path, kind)?))
}

/// Changes a bitmap of an image, in this order. A crash leaves all of it or nothing. What the disk reads as is durable before: a
/// bitmap that is cleared says that this is what a copy has.
///
/// # Errors
/// As [`load`]; `Invalid` for an impossible name or granularity, `NoSpace` when there is no room, `Refused` for a data file that the
/// image may not have.
pub async fn change(path: &Path, options: &ImageOptions, name: &str, changes: &[BitmapChange]) -> Result<()> {
    let (storage, kind) = open_file(path, options).await?;
    let bitmaps = bitmaps_of(path, kind)?;
    make_durable(path, options, &storage, kind).await?;
    bitmaps.change(&storage, name, changes).await // commit point
}

/// A bitmap of a disk, to be added to a copy of it.
#[derive(Debug, Clone)]
pub struct BitmapCopy {
    bitmap: Bitmap,
    bits: Arc<Bits>,
}

/// The bitmaps of the image on top. Those that are inconsistent are left out if `skips_broken`.
///
/// # Errors
/// `Unsupported` for a format without bitmaps, or for a snapshot; `Corrupt` for one that is inconsistent.
pub async fn copies_of(chain: &Chain, skips_broken: bool) -> Result<Vec<BitmapCopy>> {
    let top = chain.top();
    let closed = bitmaps_of(&top.path, top.head.kind())?;
    let Some(open) = &top.opened.bitmaps else { return Ok(Vec::new()) };
    let mut copies = Vec::new();
    for bitmap in closed.list(&*top.storage).await? {
        if bitmap.is_in_use && skips_broken {
            continue;
        }
        let bits = open.load(&bitmap.name).await?;
        copies.push(BitmapCopy { bitmap, bits });
    }
    Ok(copies)
}

/// Checks that none of them has a name which an image that gets them has given to another.
///
/// # Errors
/// `Invalid` for such a name, and those of [`list`].
pub(crate) async fn may_add_copies(path: &Path, format: FormatKind, copies: &[BitmapCopy]) -> Result<()> {
    let there = list(path, Some(format)).await?;
    let names = copies.iter().map(|copy| &copy.bitmap.name);
    match names.into_iter().find(|name| there.iter().any(|one| one.name == **name)) {
        None => Ok(()),
        Some(name) => Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{} has a bitmap {name} already: remove it (`vellum bitmap --remove`), or copy without --bitmaps",
                path.display()
            ),
        )),
    }
}

/// Adds them to a copy of the disk, with the flags that they have. Each of them is added whole or not.
///
/// # Errors
/// As [`change`].
pub(crate) async fn add_copies(path: &Path, format: FormatKind, copies: &[BitmapCopy]) -> Result<()> {
    let options = ImageOptions { format: Some(format), ..ImageOptions::default() };
    for BitmapCopy { bitmap, bits } in copies {
        let (storage, kind) = open_file(path, &options).await?;
        let mut changes = vec![
            BitmapChange::Add { granularity: Some(bitmap.granularity) },
            BitmapChange::Merge(MergeSource::Other(bits.clone())),
        ];
        if !bitmap.is_auto {
            changes.push(BitmapChange::Disable);
        }
        bitmaps_of(path, kind)?.change(&storage, &bitmap.name, &changes).await?;
    }
    Ok(())
}

/// The names of the bitmaps that an image has; none, where they cannot be read.
pub(crate) async fn names_of(format: &dyn Format, storage: &dyn Storage) -> Vec<String> {
    let Some(bitmaps) = format.closed_bitmaps() else { return Vec::new() };
    let all = bitmaps.list(storage).await.unwrap_or_default();
    all.into_iter().map(|one| one.name).collect()
}

fn bitmaps_of(path: &Path, kind: FormatKind) -> Result<&'static dyn ClosedBitmaps> {
    kind.format().closed_bitmaps().ok_or_else(|| {
        Error::unsupported(format!(
            "{}: a {kind} image has no bitmaps; qcow2 images can have them",
            path.display()
        ))
    })
}
