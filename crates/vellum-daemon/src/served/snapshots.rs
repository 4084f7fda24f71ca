//! The snapshots of a disk that is served: made, listed and deleted while guests are at work.
//!
//! A snapshot is one of the image. Where the flash cache holds writes of the disk, they go home first: most of them while
//! guests are at work, and the rest while requests wait.

use std::time::{SystemTime, UNIX_EPOCH};

use vellum_core::Result;
use vellum_format::image::SnapshotSupport;

use super::{Served, facts, kept, none_in};
use crate::clones_of::with_clones;
use crate::control::SnapshotFacts;

impl Served {
    /// Makes a snapshot. Returns its number.
    pub(crate) async fn snapshot_create(&self, name: &str) -> Result<u32> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let top = self.top().await?;
        let snapshots = kept(top.member(), "created")?;
        let Some(flash) = top.0.as_ref().and_then(|chain| chain.flash()) else {
            return snapshots.create(name, now).await;
        };
        // Most of it while guests are at work.
        flash.drain().await?;
        let held = self.hold_in_time().await?;
        let made = match flash.settle().await {
            Ok(()) => snapshots.create(name, now).await,
            Err(error) => Err(error),
        };
        held.finish();
        made
    }

    /// All snapshots, in the order in which they were made.
    pub(crate) async fn snapshot_list(&self) -> Result<Vec<SnapshotFacts>> {
        let held = self.top().await?;
        let top = held.member();
        let all = match &top.opened.snapshots {
            Some(snapshots) if self.disk_is_written() => snapshots.list()?,
            _ => match top.head.kind().format().snapshot_support() {
                SnapshotSupport::None => return Err(none_in(top)),
                _ => top.head.snapshots(&top.storage, Some(&top.storage)).await?,
            },
        };
        Ok(facts(all))
    }

    /// Deletes a snapshot.
    pub(crate) async fn snapshot_delete(&self, wanted: &str) -> Result<()> {
        let top = self.top().await?;
        let snapshots = kept(top.member(), "deleted")?;
        match snapshots.delete(wanted).await {
            Ok(()) => Ok(()),
            Err(error) => Err(with_clones(error, &self.canonical, &snapshots.list()?, wanted).await),
        }
    }
}
