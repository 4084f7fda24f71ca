//! The flash cache over a disk that is served, its policy, and what only the cache has; and its fast medium.
//!
//! ```text
//!   another policy    drain, while guests are at work ► requests wait ► drain the rest ► the image is closed, and
//!                     opened again with the policy ► requests continue
//!   a snapshot        drain ► requests wait ► drain the rest ► the snapshot is made ► requests continue
//! ```
//!
//! All other steps that close the image (resizing, reverting, detaching, migrating, reopening) find it complete: its
//! close drains it. Only the last closing of all may leave dirty blocks in the cache, with `--flash-keep`.

use vellum_core::{Context, Error, Result, lock};
use vellum_flash::FlashPolicy;
use vellum_layer::Chain;

use super::{IS_READ, Served, Step, reads_a_snapshot};
use crate::flash::FlashStats;
use crate::tier;

impl Served {
    /// What it does with the flash cache of the server.
    ///
    /// # Errors
    /// `Unsupported` where the server has none.
    pub(crate) async fn flash_stats(&self) -> Result<FlashStats> {
        let chain = self.chain.read().await;
        let chain = chain.as_ref().ok_or_else(|| self.is_closed())?;
        FlashStats::of(chain).ok_or_else(no_cache)
    }

    /// Writes home what only the cache has, while guests are at work.
    ///
    /// # Errors
    /// `Unsupported` where the server has no cache, and those of the image and of the cache.
    pub(crate) async fn drain_flash(&self) -> Result<()> {
        let chain = self.chain.read().await;
        let chain = chain.as_ref().ok_or_else(|| self.is_closed())?;
        if !chain.has_flash_choice() {
            return Err(no_cache());
        }
        chain.drain().await
    }

    /// What it has on its fast medium.
    ///
    /// # Errors
    /// `Unsupported` where it is served without one.
    pub(crate) async fn tier_facts(&self) -> Result<serde_json::Value> {
        let chain = self.chain.read().await;
        tier::facts_in(chain.as_ref().ok_or_else(|| self.is_closed())?)
    }

    /// Copies ranges to its fast medium, while guests are at work.
    ///
    /// # Errors
    /// As above, and those of the image and of the medium.
    pub(crate) async fn promote(&self, ranges: &tier::Ranges) -> Result<tier::PromotedUnits> {
        let chain = self.chain_to_change().await?;
        tier::promote_in(chain.as_ref().ok_or_else(|| self.is_closed())?, ranges).await
    }

    /// Takes ranges back.
    ///
    /// # Errors
    /// As above.
    pub(crate) async fn demote(&self, ranges: &tier::Ranges) -> Result<tier::DemotedUnits> {
        let chain = self.chain_to_change().await?;
        tier::demote_in(chain.as_ref().ok_or_else(|| self.is_closed())?, ranges, tier::Watch::nobody()).await
    }

    /// Frees the space in the image of ranges that its fast medium has.
    ///
    /// # Errors
    /// As above.
    pub(crate) async fn move_away(
        &self,
        ranges: &tier::Ranges,
        only_copied: bool,
    ) -> Result<tier::MovedUnits> {
        let _one = self.tiering.pinning.lock().await;
        let chain = self.chain_to_change().await?;
        let open = chain.as_ref().ok_or_else(|| self.is_closed())?;
        tier::move_in(open, ranges, only_copied, tier::Watch::nobody()).await
    }

    /// Changes what it does with the flash cache.
    ///
    /// # Errors
    /// Those of [`Chain::set_flash_policy`]; `Locked` while another step is under way or requests do not finish.
    pub(crate) async fn set_flash_policy(&self, policy: FlashPolicy) -> Result<()> {
        let _step = self.begin(Step::Flash)?;
        drop(self.chain_to_change().await?);
        // Most of it while guests are at work.
        self.drain_flash().await?;
        let mut chain = self.alone().await?;
        chain.hold_forks().await;
        let changed = self.change_flash(&mut chain, policy).await;
        chain.resume_forks();
        changed
    }

    async fn change_flash(&self, chain: &mut Chain, policy: FlashPolicy) -> Result<()> {
        if reads_a_snapshot(chain) {
            return Err(self.in_use(IS_READ));
        }
        let (held, before) = (self.hold_in_time().await?, chain.disk().clone());
        let changed = chain.set_flash_policy(policy).await;
        if changed.is_ok() {
            // Whatever opens it again later keeps to it.
            *lock(&self.flash_policy) = Some(policy);
        }
        self.follow(held, chain, &before).await;
        changed
    }

    /// Fails where the cache takes no more changes, and the disk is written back: closed, the disk could not be opened again,
    /// and what is only in the cache could not be read.
    ///
    /// # Errors
    /// `Poisoned`, with the remedy.
    pub(super) fn flash_works(&self, open: Option<&Chain>) -> Result<()> {
        // An image that is complete goes on without the cache.
        let uses = open
            .and_then(|chain| chain.flash())
            .is_some_and(|flash| flash.policy() == FlashPolicy::WriteBack);
        match self.how.flash.as_ref().filter(|_| uses) {
            Some(flash) => flash.works().context(|| {
                format!("{} cannot be opened again, so nothing was changed, and reads go on", self.shown())
            }),
            None => Ok(()),
        }
    }

    /// Closes the image for the last time. Where that is wanted, the cache keeps what the image does not have.
    pub(super) async fn close_for_good(&self, chain: &Chain) -> Result<()> {
        if self.how.flash.as_ref().is_some_and(|flash| flash.keeps_dirty()) {
            chain.keep_dirty_at_close();
        }
        let closed = chain.close().await;
        *lock(&self.flash_stats) = FlashStats::of(chain);
        closed
    }

    /// What it means that the image could not be closed well. Nothing is missing where the cache still has it.
    pub(super) fn not_closed(&self, error: Error, chain: &Chain) -> Error {
        let path = self.shown();
        if let (Some(flash), Some(cache)) = (chain.flash(), &self.how.flash)
            && flash.policy() == FlashPolicy::WriteBack
            && cache.works().is_ok()
        {
            let (blocks, cache) = (flash.dirty_blocks(), cache.path().display());
            if blocks > 0 {
                return error.context(format!(
                    "{path}: the image is behind, and nothing is lost: the flash cache {cache} keeps {blocks} blocks that \
                     the image lacks. Serve it with this cache again when the image can be written, or complete it with \
                     `vellum flash recover --full {cache} {path}`"
                ));
            }
        }
        match self.how.is_durable {
            true => error,
            false => {
                error.context(format!("{path}: writes that were acknowledged but not flushed may be missing"))
            }
        }
    }

    /// What the flash cache does for it, where there is one; what it had done, once it is closed.
    pub(super) fn flash_now(&self) -> Option<FlashStats> {
        let mut said = lock(&self.flash_stats);
        if let Some(open) = self.chain.try_read().as_ref().and_then(|chain| chain.as_ref()) {
            *said = FlashStats::of(open);
        }
        said.clone()
    }
}

fn no_cache() -> Error {
    Error::unsupported("this server has no flash cache: start it with --flash PATH")
}
