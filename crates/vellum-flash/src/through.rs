//! Regions in which home and flash may differ: entered before the first write, settled when both have the same.
//!
//! ```text
//!   enter    region ─► a record says *written* ► flush of flash   (commit point)   ─► home, slots       once for many writes
//!   settle   no writer in it ─► flush home ► commit: slots ► none has entered it since ─► a record says *settled*
//!   crash    the clean blocks of each region that still counts as written are void
//! ```
//!
//! 1. No byte of a write is under way to home or to a slot before *written* is durable.
//! 2. *Settled* is said only after a flush of home, and after that a flush of flash, that began when no writer was in the
//!    region; and none has entered it since.
//! 3. So a put in such a region needs no CRC: until its bytes are durable, a recovery makes it void.
//! 4. Each disk's regions wait for its own home alone. When there is no room for more, a writer goes past the cache.

use smallvec::SmallVec;
use vellum_core::{Buffer, ImageOffset, Result};

use crate::layout::{COPY_AT, Key, Superblock};
use crate::regions::Idle;
use crate::shared::FlashCache;
use crate::state::Entry;

/// Regions that somebody writes in.
pub(crate) struct Entered<'a> {
    cache: &'a FlashCache,
    regions: SmallVec<[Key; 2]>,
    is_under_way: bool,
}

impl Entered<'_> {
    /// Bytes are on their way to home or to slots.
    pub(crate) fn start(&mut self) {
        self.is_under_way = true;
    }

    /// They have landed, or failed to; and what flash has of them is published.
    pub(crate) fn end(mut self) {
        self.is_under_way = false;
    }

    /// Whether the region of this block is among them.
    pub(crate) fn has(&self, region: Key) -> bool {
        self.regions.contains(&region)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.cache.state().leave_regions(&self.regions, self.is_under_way);
    }
}

impl FlashCache {
    /// Before a write to these regions, which are named by their first blocks: they count as written, durably. `None`
    /// when there is no room for them.
    pub(crate) async fn enter_regions(
        &self,
        regions: impl IntoIterator<Item = Key>,
    ) -> Result<Option<Entered<'_>>> {
        let mut entered = Entered { cache: self, regions: SmallVec::new(), is_under_way: false };
        let mut is_durable = true;
        for region in regions {
            loop {
                let entry = self.state().enter_region(region);
                match entry {
                    Entry::NoRoom => self.commit_all().await?,
                    Entry::Full => return Ok(None),
                    Entry::Durable | Entry::New => {
                        entered.regions.push(region);
                        is_durable &= entry == Entry::Durable;
                        break;
                    }
                }
            }
        }
        if !is_durable {
            self.commit().await?; // commit point
            self.state().entries_are_durable(&entered.regions);
        }
        Ok(Some(entered))
    }

    /// Regions of the disk that no writer has entered since this time, in seconds, stop counting as written. The record that
    /// says so is durable with the next commit. Returns how many there are.
    pub(crate) async fn settle_regions(
        &self,
        row: u16,
        until: u32,
        flush_home: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<usize> {
        let mut idle: Vec<Idle> = self.state().idle_regions(row, until);
        let count = idle.len();
        if idle.is_empty() {
            return Ok(0);
        }
        flush_home().await?; // commit point: what home has of them
        self.commit_all().await?; // commit point: what the slots have of them
        loop {
            self.state().settle_regions(&mut idle);
            if idle.is_empty() {
                return Ok(count);
            }
            self.commit_all().await?;
        }
    }

    /// The superblock says that these features are used. Older programs refuse the cache from then on.
    pub(crate) async fn add_features(&self, features: u64) -> Result<()> {
        let _alone = self.publishing.lock().await;
        let before = self.state().features;
        if before | features == before {
            return Ok(());
        }
        let id = u128::from_be_bytes(self.id.bytes());
        let superblock = Superblock { id, layout: self.layout, features: before | features };
        // The copy first: one of the two is whole at every moment.
        for at in [COPY_AT, 0] {
            self.storage.write(ImageOffset::new(at), Buffer::copy_of(&superblock.encode())).await?;
            self.storage.flush().await?; // commit point
        }
        self.state().features = superblock.features;
        Ok(())
    }

    /// Nothing counts of what the cache has of the regions that an opening of the disk has left.
    pub(crate) async fn void_regions(&self, row: u16) -> Result<()> {
        while !self.state().void_regions(Some(row)) {
            self.commit_all().await?;
        }
        Ok(())
    }
}
