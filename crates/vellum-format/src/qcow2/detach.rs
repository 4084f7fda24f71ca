//! Removing the reference to the backing file from a closed image.
//!
//! Without a backing file every cluster that is not allocated reads as zero. The caller has written everything
//! that only the backing disk had, so that the disk reads the same before and after. The
//! header changes as for the journal (`journal_setting.rs`): a crash leaves the old header or the new one.

use vellum_core::{Context, Error, Result, SharedStorage};

use super::header::Header;
use super::journal_setting::remove_backing;

/// Removes the reference from a closed image. Where the disk still shows what is below, it reads as zero from
/// then on.
///
/// # Errors
/// `Unsupported` when the image has snapshots or was not closed, `Corrupt` when it is marked corrupt, and errors
/// of the storage.
pub(super) async fn detach(image: &SharedStorage) -> Result<()> {
    detach_inner(image).await.context(|| format!("can't detach {} from its backing image", image.name()))
}

async fn detach_inner(image: &SharedStorage) -> Result<()> {
    let header = Header::read(&**image).await?;
    if header.backing_file().is_none() {
        // An earlier attempt may have come this far without being durable.
        return image.flush().await;
    }
    if header.needs_replay() || header.is_dirty() {
        return Err(header.replay_first(image.name()));
    }
    if header.is_corrupt() {
        return Err(Error::corrupt("the image is marked corrupt: run `vellum check -r all` first"));
    }
    if header.snapshot_count > 0 {
        return Err(Error::unsupported(
            "the image has snapshots, which also read from the backing image: delete them first (`vellum snapshot delete`)",
        ));
    }
    remove_backing(&header, &**image).await
}
