//! A block that this disk has hides that of the disks below, for which it may be cached: they give theirs up first.
//!
//! ```text
//!   clone   ─ write of a whole block ─► published ─► template's block: demoted; or dropped, when no other disk sees it
//! ```
//!
//! Only what is clean is dropped. Nothing depends on it: a block that is read again is admitted again.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_core::lock;

use crate::disk::{FlashDisk, count};
use crate::layout::{Key, SECTORS_ALL};
use crate::shared::{Home, Over};
use crate::state::State;

impl FlashDisk {
    /// This disk lies over these, in any order, until it is closed. What it has of a block, it does not read from them.
    /// To be called again when a chain changes; the disks of the call before count no more.
    pub fn lies_over(&self, below: &[Arc<Self>]) {
        let over = below.iter().map(|disk| {
            disk.home.above.0.fetch_add(1, Ordering::Relaxed);
            Over(Arc::downgrade(&disk.home))
        });
        let old = std::mem::replace(&mut *lock(&self.home.below), over.collect());
        drop(old);
    }
}

impl Home {
    /// The block has been published with these sectors.
    pub(crate) fn mask(&self, state: &mut State, block: u64, sectors: u8) {
        if sectors != SECTORS_ALL {
            return;
        }
        for below in lock(&self.below).iter().filter_map(|over| over.0.upgrade()) {
            let is_seen_elsewhere = below.above.0.load(Ordering::Relaxed) > 1;
            if below.is_open() && state.demote(Key::new(below.row, block), is_seen_elsewhere) {
                count(&self.tally.demoted, 1);
            }
        }
    }
}
