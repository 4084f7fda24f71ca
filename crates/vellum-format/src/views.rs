//! Snapshots beside the disk of an open image, in formats that change them only while the image is closed. Where a format makes and
//! deletes them in an open image there is [`Snapshots`](crate::image::Snapshots) instead.

use vellum_core::{LocalFuture, Result, SharedDisk};

use crate::snapshot_facts::Snapshot;

/// Snapshots of an open image that are only looked at.
pub trait Views: Send + Sync {
    /// What they are, as long as the image is open.
    fn snapshots(&self) -> &[Snapshot];

    /// The snapshot with exactly this id, as a disk beside that of the image. The same place of the same storage in the maps of both
    /// is the same bytes. It is to be dropped before the image is closed. All that want one snapshot share one disk.
    ///
    /// # Errors
    /// `NotFound` when there is none, and the errors of the image.
    fn view<'a>(&'a self, id: &'a str) -> LocalFuture<'a, Result<SharedDisk>>;
}
