//! The snapshots of a disk that is served: made, listed and deleted while guests are at work.
//!
//! A snapshot is one of the image. Where the flash cache holds writes of the disk, they go home first: most of them while
//! guests are at work, and the rest while requests wait.
//!
//! ```text
//!   vellum   the image stays open; guests are at work
//!   qcow2    drain ► requests wait ► close, which drains the rest ► change the closed image ► open ► requests continue
//! ```

use std::sync::Arc;

use vellum_core::{CheckedDisk, Result, SharedStorage};
use vellum_export::Shutdown;
use vellum_export::nbd::{Export, OnDemand};
use vellum_format::image::{ClosedSnapshots, SnapshotSupport, Wanted};

use super::marks::Offered;
use super::{Disks, IS_READ, Served, Step, Top, facts, kept, none_in, reads_a_snapshot};
use crate::clones_of::with_clones;
use crate::closed::{refuse_own_name, since_1970};
use crate::control::SnapshotFacts;

impl Served {
    /// Makes a snapshot. Returns its id.
    pub(crate) async fn snapshot_create(&self, name: &str) -> Result<String> {
        self.has_no_job()?;
        let now = since_1970();
        let top = self.top().await?;
        if must_be_closed(&top) {
            drop(top);
            let create = async |closed: &'static dyn ClosedSnapshots, image: &SharedStorage| {
                closed.create(image, name, now, false).await
            };
            return self.snapshots_closed(create).await;
        }
        let snapshots = kept(top.member(), "created")?;
        let create = async || snapshots.create(name, now.as_secs()).await.map(|id| id.to_string());
        let Some(flash) = top.0.as_ref().and_then(|chain| chain.flash()) else {
            return create().await;
        };
        // Most of it while guests are at work.
        flash.drain().await?;
        let held = self.hold_in_time().await?;
        let made = match flash.settle().await {
            Ok(()) => create().await,
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
        if must_be_closed(&top) {
            drop(top);
            let delete = async |closed: &'static dyn ClosedSnapshots, image: &SharedStorage| {
                closed.delete(image, Wanted::IdOrName(wanted)).await
            };
            return self.snapshots_closed(delete).await;
        }
        let snapshots = kept(top.member(), "deleted")?;
        match snapshots.delete(wanted).await {
            Ok(()) => Ok(()),
            Err(error) => Err(with_clones(error, &self.canonical(), &snapshots.list()?, wanted).await),
        }
    }

    /// Gives a snapshot another name.
    pub(crate) async fn snapshot_rename(&self, wanted: &str, name: &str) -> Result<()> {
        refuse_own_name(name)?;
        let top = self.top().await?;
        if !must_be_closed(&top) {
            return kept(top.member(), "renamed")?.rename(wanted, name).await;
        }
        drop(top);
        let rename = async |closed: &'static dyn ClosedSnapshots, image: &SharedStorage| {
            closed.rename(image, Wanted::IdOrName(wanted), name).await
        };
        self.snapshots_closed(rename).await
    }

    /// Closes the image, changes its snapshots and opens it again, while requests wait.
    async fn snapshots_closed<T>(
        &self,
        change: impl AsyncFnOnce(&'static dyn ClosedSnapshots, &SharedStorage) -> Result<T>,
    ) -> Result<T> {
        // Most of it while guests are at work.
        if let Some(flash) = self.top().await?.0.as_ref().and_then(|chain| chain.flash()) {
            flash.drain().await?;
        }
        let _step = self.begin(Step::Snapshot)?;
        let mut chain = self.alone().await?;
        if reads_a_snapshot(&chain) {
            return Err(self.in_use(IS_READ));
        }
        let (held, before) = (self.hold_in_time().await?, chain.disk().clone());
        chain.hold_forks().await;
        let changed = chain.change_snapshots(change).await;
        chain.resume_forks();
        self.follow(held, &chain, &before).await;
        changed
    }
}

impl Served {
    /// The image, when snapshots of it can be served now. It stays as long as this is held.
    fn written(&self) -> Option<Top<'_>> {
        // This does not wait: while the disk is being restored from a snapshot there is none.
        let top = Top::of(self.chain.try_read()?)?;
        (top.member().opened.snapshots.is_some() && self.disk_is_written()).then_some(top)
    }
}

/// Whether the snapshots of the image are changed while it is closed.
fn must_be_closed(top: &Top<'_>) -> bool {
    let member = top.member();
    member.opened.snapshots.is_none() && member.head.kind().format().closed_snapshots().is_some()
}

/// Exports of the snapshots of all disks that are written.
pub(crate) struct SnapshotExports(pub(crate) Arc<Disks>);

impl OnDemand for SnapshotExports {
    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for served in self.0.all() {
            let Some(top) = served.written() else { continue };
            let Some(snapshots) = &top.member().opened.snapshots else { continue };
            // One of a layout without snapshots has none.
            let Ok(snapshots) = snapshots.list() else { continue };
            for name in &served.offered() {
                names.extend(snapshots.iter().map(|snapshot| format!("{name}@{}", snapshot.name)));
            }
        }
        names
    }

    fn find(&self, name: &str) -> Option<(Export, Shutdown)> {
        for served in self.0.all() {
            for its in &served.offered() {
                let Some(wanted) = name.strip_prefix(its.as_str()).and_then(|rest| rest.strip_prefix('@'))
                else {
                    continue;
                };
                // Held until the snapshot is open: a task that exchanges the disk checks for open snapshots.
                let Some(top) = served.written() else { continue };
                let Some(snapshots) = &top.member().opened.snapshots else { continue };
                // A disk without snapshots is not the one that is meant.
                let Ok(Some(id)) = snapshots.named(wanted) else { continue };
                let Ok(disk) = snapshots.clone().open(id) else { continue };
                let export = Export {
                    name: name.to_owned(),
                    description: String::new(),
                    disk: CheckedDisk::new(served.valve.beside(disk)),
                    read_only: true,
                    marks: Some(Arc::new(Offered::of_snapshot(served.own.clone(), wanted))),
                };
                return Some((export, served.readers.clone()));
            }
        }
        None
    }
}
