//! Which clones stand on the snapshots of an image, as far as they can be found: the image does not know them.
//!
//! 1. Clones are looked for in directories, not below these. Others are not known here.
//! 2. A file that cannot be read is no clone. Nothing is locked: clones may be in use.

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

/// The files in these directories that name one of the images at these canonical paths as the one below; but for those at the paths `except`.
///
/// # Errors
/// When a directory cannot be listed.
pub(crate) async fn images_over(
    dirs: &[PathBuf],
    below: &[PathBuf],
    except: &[PathBuf],
) -> Result<Vec<PathBuf>> {
    let mut images = Vec::new();
    for file in files_in(dirs).await? {
        let is_over = async |file: &Path| {
            let Some(Backing { path, snapshot: None, .. }) = backing_of(file).await? else {
                return Ok(false);
            };
            let its =
                canonical_path(&path).await.map_err(|error| Error::io(error, "can't find its image"))?;
            let own = canonical_path(file).await.map_err(|error| Error::io(error, "can't find it"))?;
            Ok::<_, Error>(below.contains(&its) && !except.contains(&own))
        };
        if is_over(&file).await.unwrap_or(false) {
            images.push(file);
        }
    }
    Ok(images)
}

/// The plain files in these directories.
async fn files_in(dirs: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for dir in dirs {
        let its = dir.clone();
        let files = unblock_at(dir, move || -> std::io::Result<Vec<PathBuf>> {
            let entries = std::fs::read_dir(&its)?.flatten();
            let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
            Ok(files.map(|entry| entry.path()).take(FILES_MAX).collect())
        });
        let mut files = files.await.context(|| format!("can't look for clones in {}", dir.display()))?;
        files.sort();
        all.append(&mut files);
    }
    Ok(all)
}

/// The image that a file names as the one below.
async fn backing_of(file: &Path) -> Result<Option<Backing>> {
    let host = Host::default();
    let storage = host.open(&host.canonical(file).await?, file, Purpose::Look).await?;
    let Guess::Known(kind) = guess(&*storage).await? else { return Ok(None) };
    let head = kind.format().read(&*storage).await?;
    Backing::of(file, &*head)
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
