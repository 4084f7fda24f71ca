//! The fast medium of a disk that is served: pins and file times, read from a snapshot.
//!
//! ```text
//!   snapshot made ► the guest's file system is read from it ► snapshot deleted ► units promoted, while guests are at work
//! ```
//!
//! 1. One change of pins at a time.
//! 2. While the disk is paused its image does not change: what would change it is refused. A pause waits for none of it,
//!    and is refused as beside a snapshot that is being made.
//! 3. While units are on the fast medium alone there is no snapshot. The disk is read as guests write it then: what is found wrongly is
//!    copied or moved in vain, and reads as before.
//! 4. The snapshot has a name of its own. One that a crash has left is deleted by the next change, and when the disk is served
//!    again.

use std::sync::atomic::{AtomicBool, AtomicUsize};

use async_lock::RwLockReadGuard;
use vellum_core::{Disk, Error, ErrorKind, Result};
use vellum_layer::{Chain, valve};

use super::{Served, kept};
use crate::pins::{
    ChosenFiles, DemotedFiles, FileTimes, MovedFiles, Pin, PinChange, Pinning, apply_times, demote_wanted,
    find_by_times, find_paths, move_wanted, pins_of,
};
use crate::tier::{FILES_SNAPSHOT, Watch, facts_json};

/// How often a disk is looked at that guests write meanwhile.
const LOOKS_MAX: u32 = 3;

/// What is being done with the fast medium of a disk.
#[derive(Default)]
pub(super) struct Tiering {
    /// A round of promotions for heat has the chain, and ends soon.
    pub(super) is_warming: AtomicBool,
    /// Steps that want the chain: no round begins.
    pub(super) want_alone: AtomicUsize,
    /// Held while its pins are changed, while files are chosen by their times or their names, and while units move, which cannot be
    /// while there is a snapshot that files are looked up in.
    pub(super) pinning: async_lock::Mutex<()>,
}

impl Served {
    /// Changes its pins, and makes its fast medium have what they want.
    ///
    /// # Errors
    /// As for a closed image; what keeps a snapshot from being made.
    pub(crate) async fn pin(&self, change: &PinChange) -> Result<ChosenFiles> {
        let _one = self.tiering.pinning.lock().await;
        drop(self.chain_to_change().await?);
        let pinning = Pinning::begin(&self.canonical(), change).await?;
        let found = self.read_files(async |disk| pinning.find(disk).await).await?;
        let chain = self.chain_to_change().await?;
        pinning.apply(&self.canonical(), chain.as_ref().ok_or_else(|| self.is_closed())?, found).await
    }

    /// Copies the files that were written long ago and read lately.
    ///
    /// # Errors
    /// As above.
    pub(crate) async fn promote_by_times(&self, times: FileTimes) -> Result<ChosenFiles> {
        let _one = self.tiering.pinning.lock().await;
        drop(self.chain_to_change().await?);
        let found = self.read_files(async |disk| find_by_times(disk, times).await).await?;
        let chain = self.chain_to_change().await?;
        apply_times(&self.canonical(), chain.as_ref().ok_or_else(|| self.is_closed())?, found).await
    }

    /// Moves the files at these paths.
    ///
    /// # Errors
    /// As above.
    pub(crate) async fn move_files(&self, paths: &[Pin]) -> Result<MovedFiles> {
        let _one = self.tiering.pinning.lock().await;
        drop(self.chain_to_change().await?);
        let found = self.read_files(async |disk| find_paths(disk, paths).await).await?;
        let chain = self.chain_to_change().await?;
        move_wanted(chain.as_ref().ok_or_else(|| self.is_closed())?, found, Watch::nobody()).await
    }

    /// Brings the files at these paths back.
    ///
    /// # Errors
    /// As above.
    pub(crate) async fn demote_files(&self, paths: &[Pin]) -> Result<DemotedFiles> {
        let _one = self.tiering.pinning.lock().await;
        drop(self.chain_to_change().await?);
        let found = self.read_files(async |disk| find_paths(disk, paths).await).await?;
        let chain = self.chain_to_change().await?;
        demote_wanted(chain.as_ref().ok_or_else(|| self.is_closed())?, found, Watch::nobody()).await
    }

    /// The chain, for a change of the image that no guest has asked for.
    pub(super) async fn chain_to_change(&self) -> Result<RwLockReadGuard<'_, Option<Chain>>> {
        let chain = self.chain.read().await;
        match self.valve.state() {
            valve::State::Running => Ok(chain),
            valve::State::Pausing | valve::State::Paused(_) => {
                Err(self.in_use("it is paused, and its image does not change until `vellum resume`"))
            }
        }
    }

    /// What its fast medium has, and its pins.
    ///
    /// # Errors
    /// As for what it has; those of the pins file.
    pub(crate) async fn tier_status(&self) -> Result<serde_json::Value> {
        let mut facts = self.tier_facts().await?;
        facts["pins"] = serde_json::json!(pins_of(&self.canonical()).await?);
        Ok(facts)
    }

    /// What it has on its fast medium, if there is one; nothing while another task has the chain.
    pub(super) fn tier_now(&self) -> Option<serde_json::Value> {
        let chain = self.chain.try_read()?;
        let tier = chain.as_ref()?.tier()?;
        Some(facts_json(&tier.facts()))
    }

    /// Whether reads failed of units that only its fast medium has.
    pub(super) fn has_lost_reads(&self) -> bool {
        let Some(chain) = self.chain.try_read() else { return false };
        chain.as_ref().and_then(|chain| chain.tier()).is_some_and(|tier| tier.lost_reads() > 0)
    }

    /// Counts what is read from now on, if that is wanted: before the first request.
    pub(super) fn count_heat(&self) {
        let Some(chain) = self.chain.try_read().filter(|_| self.how.warms) else { return };
        if let Some(tier) = chain.as_ref().and_then(|chain| chain.tier()) {
            tier.count_heat();
        }
    }

    /// How many requests guests have made.
    pub(super) fn requests(&self) -> u64 {
        let counts = self.disk.counts();
        counts.reads + counts.writes + counts.flushes + counts.zeroes + counts.discards
    }

    /// Reads the disk as it is now, while guests go on.
    async fn read_files<T>(&self, act: impl AsyncFn(&dyn Disk) -> Result<T>) -> Result<T> {
        if !self.disk_is_written() {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is served read-only", self.shown())));
        }
        if self.has_moved().await {
            return self.read_files_live(act).await;
        }
        self.delete_files_snapshot().await?;
        self.snapshot_create(FILES_SNAPSHOT).await?;
        let read = async {
            let top = self.top().await?;
            let snapshots = kept(top.member(), "read")?;
            let id = snapshots.named(FILES_SNAPSHOT)?;
            let id = id.ok_or_else(|| Error::new(ErrorKind::NotFound, "the snapshot is gone"))?;
            let disk = snapshots.clone().open(id)?;
            act(&*disk).await
        };
        let read = read.await;
        let deleted = self.delete_files_snapshot().await;
        let path = self.shown();
        read.and_then(|read| deleted.map(|()| read)).map_err(|error| error.context(path))
    }

    async fn has_moved(&self) -> bool {
        let chain = self.chain.read().await;
        chain.as_ref().and_then(|chain| chain.tier()).is_some_and(|tier| tier.facts().moved > 0)
    }

    /// As above, where there can be no snapshot.
    async fn read_files_live<T>(&self, act: impl AsyncFn(&dyn Disk) -> Result<T>) -> Result<T> {
        let path = self.shown();
        let mut looks = 1;
        loop {
            let chain = self.chain.read().await;
            let disk = chain.as_ref().ok_or_else(|| self.is_closed())?.disk().clone();
            match act(&*disk).await {
                // The guest may have been changing what was read.
                Err(error) if error.kind() == ErrorKind::Corrupt && looks < LOOKS_MAX => looks += 1,
                read => return read.map_err(|error| error.context(path)),
            }
        }
    }

    /// What a program that was killed has left of a change of pins.
    pub(super) async fn end_files_snapshot(&self) {
        let has_tier =
            self.chain.try_read().is_some_and(|chain| chain.as_ref().is_some_and(|it| it.tier().is_some()));
        if has_tier
            && self.disk_is_written()
            && let Err(error) = self.delete_files_snapshot().await
        {
            tracing::warn!(
                "{}: snapshot {FILES_SNAPSHOT}, which a change of pins has left, is still there: {}",
                self.shown(),
                error.chain()
            );
        }
    }

    async fn delete_files_snapshot(&self) -> Result<()> {
        match self.snapshot_delete(FILES_SNAPSHOT).await {
            // A linear image has no snapshots.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Unsupported) => Ok(()),
            deleted => deleted,
        }
    }
}
