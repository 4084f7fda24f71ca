//! The session of an open image with its fast medium: from then on copies of this opening count, and of no other.
//!
//! ```text
//!   row: new number beside the image's ── flush ► superblock names it ── flush (both copies, if the image needs the medium)
//!     ► row: only the newest ── flush ► what the row has and the image does not count is free
//! ```
//!
//! 1. Cut off anywhere, the row has the number that the image names. A number that was drawn, and that a write of the superblock
//!    may have brought to the image although it failed, is used again, and no third one.
//! 2. An image that needs its medium names the number in both copies of its superblock before the row forgets the one before.
//! 3. Before an opening has a session, it may be that of a copy of the image: nothing is free that another copy may have.

use std::sync::atomic::Ordering::SeqCst;

use vellum_core::{Context, ImageOffset, Result};

use super::geometry::Region;
use super::image::Native;
use super::publish::WORD_COST;
use super::tier::WORDS_AT_ONCE;
use super::tier_state::{Begun, Tier};
use crate::engine::Commit as _;
use crate::state::{UnderWay, lock};

impl Native {
    /// Begins a session with the fast medium, before the first promotion of an opening, and before its first move.
    pub(super) async fn begin_fast(&self, tier: &Tier, begun: &mut Begun) -> Result<()> {
        let context = || format!("{}: can't begin a session with its fast medium", self.engine.name);
        self.begin_journal().await?;
        let counted = tier.counts.load(SeqCst);
        if !counted {
            self.clear_all_bits().await.context(context)?;
        }
        let number = match begun.drawn {
            Some(number) => number,
            None => {
                let named = self.superblocks.lock().await.superblock.fast().and_then(|fast| fast.number);
                tier.row.draw(named.filter(|_| counted)).await?
            }
        };
        begun.drawn = Some(number);
        let mut superblocks = self.superblocks.lock().await;
        // An image that needs its medium is not to depend on one copy of the superblock.
        for _ in 0..1 + u8::from(superblocks.superblock.has_moved) {
            let under_way = UnderWay::begin(&self.engine.state, "a write of the superblock");
            // The other copy, which the next write goes over, is needed until this one is durable.
            let before = superblocks.clone();
            superblocks.superblock.begin_fast(number);
            let written = superblocks.write(&*self.metadata).await;
            if written.is_err() {
                *superblocks = before;
            }
            under_way.end();
            written.context(context)?;
            self.flush_storage().await?; // commit point: the image names the new number
        }
        drop(superblocks);
        tier.row.settle().await?;
        begun.drawn = None;
        begun.session = true;
        tier.row.free(&std::mem::take(&mut *lock(&tier.others)));
        tier.has_session.store(true, SeqCst);
        if !counted {
            tier.row.free_all();
            tier.counts.store(true, SeqCst);
        }
        Ok(())
    }

    /// Clears bits that do not count, durably.
    async fn clear_all_bits(&self) -> Result<()> {
        let region = self.places.region(Region::Fast);
        let mut set: Vec<ImageOffset> = Vec::new();
        let mut page = region.start();
        while page < region.end() {
            self.find(|| self.home.word(page)).await?;
            let words = (0..512).map(|word| page + word * 8);
            set.extend(words.filter(|at| self.home.word(*at).is_ok_and(|word| word != 0)));
            page += 4096;
        }
        for words in set.chunks(WORDS_AT_ONCE) {
            let _gate = self.enter_transaction(WORD_COST * words.len() as u64).await?;
            for at in words {
                self.home.change(*at, |_| 0);
            }
        }
        if !set.is_empty() {
            self.engine.commits.note_change();
            self.commit().await?; // commit point: no void bit is left to count again
        }
        Ok(())
    }
}
