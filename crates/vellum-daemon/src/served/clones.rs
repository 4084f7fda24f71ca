//! Clones that stand on snapshots of a disk that is served: what a new clone must know, and what becomes of those that
//! are served here when the disk is closed (`vellum_layer`'s `chain/forks.rs`).

use std::path::PathBuf;

use vellum_core::{Error, ErrorKind, Result};
use vellum_format::image::Snapshot;

use super::{Served, kept, reads_a_snapshot};
use crate::clones_of::refuse_while_cloned;
use crate::closed::snapshot_of;
use crate::control::HeldSnapshot;

impl Served {
    /// Whether a client reads a snapshot of it.
    pub(crate) async fn is_read_beside(&self) -> bool {
        // A task that has the chain exclusively has made sure that there is no reader.
        let Some(chain) = self.chain.try_read() else { return false };
        let Some(chain) = &*chain else { return false };
        // Clones do not keep it from being closed.
        chain.hold_forks().await;
        let is_read = reads_a_snapshot(chain);
        chain.resume_forks();
        is_read
    }

    /// Clones of its snapshots, in this server, read its file from now on. The image is closed.
    pub(super) async fn forks_read_file(&self) {
        if let Ok(host) = self.image.host().await {
            self.how.templates.left(&host, &self.canonical()).await;
        }
    }

    /// Records that clones stand on a snapshot.
    pub(crate) async fn snapshot_hold(&self, wanted: &str) -> Result<HeldSnapshot> {
        let top = self.top().await?;
        let mut marks = self.clone_marks.lock().await;
        let snapshot = kept(top.member(), "cloned")?.mark_cloned(wanted).await?;
        *marks += 1;
        let Snapshot { id, name, size, .. } = snapshot;
        Ok(HeldSnapshot { image: self.canonical(), id, name, virtual_size: size })
    }

    /// Records that no clone stands on a snapshot any more, unless one is found beside its image or in these
    /// directories.
    ///
    /// A clone marks the snapshot again once its file has its name. So a clone that came while the directories were searched,
    /// and that the search may have missed, has set a mark since.
    pub(crate) async fn snapshot_release(&self, wanted: &str, look_in: &[PathBuf]) -> Result<()> {
        let top = self.top().await?;
        let snapshots = kept(top.member(), "released")?;
        let snapshot = snapshot_of(&snapshots.list()?, wanted)?;
        let before = *self.clone_marks.lock().await;
        refuse_while_cloned(&self.canonical(), &snapshot, look_in).await?;
        let marks = self.clone_marks.lock().await;
        if *marks != before {
            let path = self.shown();
            let why = format!(
                "a clone of {path} was made just now: try again, if {wanted} is still to be released"
            );
            return Err(Error::new(ErrorKind::Locked, why));
        }
        snapshots.release(&snapshot.id).await
    }
}
