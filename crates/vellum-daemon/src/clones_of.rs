//! Which clones stand on the snapshots of an image, as far as they can be found: the image does not know them.
//!
//! 1. Clones are looked for in directories, not below these. Others are not known here.
//! 2. A file that cannot be read is no clone. Nothing is locked: clones may be in use.
//! 3. Of an image whose reference cannot be understood nobody knows what it stands on: asked what stands on an image, it
//!    counts as one.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vellum_core::{Context, Error, ErrorKind, Result};
use vellum_format::image::Snapshot;
use vellum_format::probe::{Guess, guess};
use vellum_io::unblock_at;
use vellum_layer::chain::Backing;
use vellum_layer::{Opener, Purpose};

use crate::host::{Host, canonical_path};

/// Files looked at in one directory, at most.
const FILES_MAX: usize = 100_000;
/// At most this many clones are named in a message.
const NAMED_MAX: usize = 5;

/// The files in these directories that are clones of the snapshot with this number, of the image at this canonical
/// path. Must be called on a worker.
///
/// # Errors
/// When a directory cannot be listed.
pub(crate) async fn clones_in(dirs: &[PathBuf], image: &Path, id: &str) -> Result<Vec<PathBuf>> {
    let mut clones = Vec::new();
    for file in files_in(dirs).await? {
        if is_clone(&file, image, id).await.unwrap_or(false) {
            clones.push(file);
        }
    }
    Ok(clones)
}

/// The files in these directories that name one of the images at these canonical paths as the one below, by whatever name; but
/// for those at the paths `except`.
///
/// # Errors
/// When a directory cannot be listed.
pub(crate) async fn images_over(
    dirs: &[PathBuf],
    below: &[PathBuf],
    except: &[PathBuf],
) -> Result<Vec<PathBuf>> {
    let (mut images, mut images_at, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
    for image in below {
        numbers.push(number_of(image).await);
    }
    for file in files_in(dirs).await? {
        let Ok(own) = canonical_path(&file).await else { continue };
        if except.contains(&own) || images_at.contains(&own) {
            continue;
        }
        let its = match reference_of(&file).await {
            Ok(Some(Ok(Backing { path, snapshot: None, .. }))) => path,
            Ok(Some(Err(error))) => {
                tracing::warn!("{}: {}: it may stand on the image", file.display(), error.chain());
                images_at.push(own);
                images.push(file);
                continue;
            }
            Ok(_) => continue,
            Err(error) => {
                tracing::warn!("{}: can't see what it stands on: {}", file.display(), error.chain());
                continue;
            }
        };
        let number = number_of(&its).await;
        if number.is_some() && numbers.contains(&number) {
            images_at.push(own);
            images.push(file);
        }
    }
    Ok(images)
}

/// The device and the inode of a file, if it is there.
async fn number_of(path: &Path) -> Option<(u64, u64)> {
    let its = path.to_owned();
    let metadata = unblock_at(path, move || std::fs::metadata(its)).await;
    metadata.ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// The plain files in these directories, and what links lead to.
async fn files_in(dirs: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for dir in dirs {
        let its = dir.clone();
        let files = unblock_at(dir, move || -> std::io::Result<Vec<PathBuf>> {
            let entries = std::fs::read_dir(&its)?.flatten();
            // A named pipe would hang whoever opens it.
            let files = entries.map(|entry| entry.path()).filter(|path| path.is_file());
            Ok(files.take(FILES_MAX).collect())
        });
        let mut files = files.await.context(|| format!("can't look for clones in {}", dir.display()))?;
        files.sort();
        all.append(&mut files);
    }
    Ok(all)
}

/// The image that a file names as the one below.
async fn backing_of(file: &Path) -> Result<Option<Backing>> {
    reference_of(file).await?.transpose()
}

/// As above; within, what is wrong with the name.
async fn reference_of(file: &Path) -> Result<Option<Result<Backing>>> {
    let host = Host::default();
    let storage = host.open(&host.canonical(file).await?, file, Purpose::Look).await?;
    let Guess::Known(kind) = guess(&*storage).await? else { return Ok(None) };
    let head = kind.format().read(&*storage).await?;
    Ok(Backing::of(file, &*head).transpose())
}

async fn is_clone(file: &Path, image: &Path, id: &str) -> Result<bool> {
    let Some(Backing { path, snapshot: Some(snapshot), .. }) = backing_of(file).await? else {
        return Ok(false);
    };
    let its = canonical_path(&path).await.map_err(|error| Error::io(error, "can't find its image"))?;
    Ok(its == image && snapshot.id.to_string() == id)
}

/// Refuses to release a snapshot of which there are clones in the directory of its image or in these.
///
/// # Errors
/// `Refused`, naming clones.
pub(crate) async fn refuse_while_cloned(
    image: &Path,
    snapshot: &Snapshot,
    look_in: &[PathBuf],
) -> Result<()> {
    let mut dirs: Vec<PathBuf> = image.parent().map(Path::to_owned).into_iter().collect();
    dirs.extend(look_in.iter().cloned());
    let clones = clones_in(&dirs, image, &snapshot.id).await?;
    if clones.is_empty() {
        return Ok(());
    }
    let why = format!(
        "clones still stand on snapshot {} of {}: {}; remove them, or make them independent with `vellum flatten`",
        snapshot.name,
        image.display(),
        names(&clones)
    );
    Err(Error::new(ErrorKind::Refused, why))
}

/// Adds which clones stand on the snapshot, where that is why it cannot be deleted and some are found.
pub(crate) async fn with_clones(error: Error, image: &Path, snapshots: &[Snapshot], wanted: &str) -> Error {
    if error.kind() != ErrorKind::Refused {
        return error;
    }
    let by_id = snapshots.iter().find(|one| one.id == wanted);
    let Some(snapshot) = by_id.or_else(|| snapshots.iter().find(|one| one.name == wanted)) else {
        return error;
    };
    let dirs: Vec<PathBuf> = image.parent().map(Path::to_owned).into_iter().collect();
    match clones_in(&dirs, image, &snapshot.id).await {
        Ok(clones) if !clones.is_empty() => error.context(format!("its clones include {}", names(&clones))),
        _ => error,
    }
}

pub(crate) fn names(clones: &[PathBuf]) -> String {
    let named: Vec<String> = clones.iter().take(NAMED_MAX).map(|path| path.display().to_string()).collect();
    match clones.len().saturating_sub(NAMED_MAX) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
