//! Units over the base that hold their own entries, and that no record has yet.
//!
//! ```text
//!   embedded    entry, then noted here               no bit and no mask changes, so nothing has to be recorded
//!   recorded    mask of the packed block ► forgotten here ► the entry stays, or changes        one transaction
//!   a reader    bit and mask say base ► noted here? then the image has it ► bit and mask once more
//! ```
//!
//! A packed block over the base says two things: that the unit of the disk lies here, and that the image has this
//! block. The write changes nothing else (design note 0006, *Over a base*).
//!
//! 1. The packed block is all that such a write turns into data. A sub-block beside it that became data with it could
//!    be lost while the packed block is not, and would read as zeros instead of the base.
//! 2. A transaction that turns another sub-block of the unit into data also records the entry. Otherwise its mask could
//!    be durable where the packed block is not. Recovery leaves the newest record out when a packed block that it names
//!    is missing.
//! 3. The mask of the packed block is changed in the transaction that records the entry or changes it, before that
//!    change: a reader that no longer finds the unit here finds the mask.
//! 4. A unit of the disk whose entry was recorded or let go gets another packed block only when that is durable. Recovery
//!    could find both blocks otherwise, and the newer one knows nothing of the data in the older one.
//! 5. With snapshots, the pages of the entry, the mask and the bit are durably kept: recovery changes them at home.
//! 6. Meanwhile the superblock has a feature bit. An earlier program would find the entry, and not the mask.

use vellum_core::{GuestCluster, Result};

use super::geometry::SUB_BLOCK;
use super::home_pages::Missing;
use super::image::{Native, Sub};

impl Native {
    /// Whether the base has a part of this unit of the disk.
    pub(super) fn is_over_base(&self, unit: u64) -> bool {
        self.cell.start_of(GuestCluster::new(unit)) < self.base_end()
    }

    /// The state of a sub-block which bit and mask do not give to the image, when `recorded` is looked at again.
    pub(super) fn sub_over_base(
        &self,
        sub_block: u64,
        recorded: impl Fn() -> Result<Sub, Missing>,
    ) -> Result<Sub, Missing> {
        let Some(over_base) = self.zones.as_ref().map(|zones| &zones.over_base) else { return recorded() };
        let unit = sub_block / self.subs_per_cell();
        loop {
            let any = over_base.any();
            let state = recorded()?;
            if !any || !matches!(state, Sub::Base | Sub::Zero) {
                return Ok(state);
            }
            if over_base.is_packed(unit, sub_block) {
                return Ok(Sub::Image);
            }
            // It may have been recorded in between.
            if recorded()? == state {
                return Ok(state);
            }
        }
    }

    /// How many sub-blocks a unit has.
    pub(super) fn subs_per_cell(&self) -> u64 {
        SUB_BLOCK.count_for(self.cell.bytes())
    }

    /// Whether earlier packed blocks of this unit of the disk allow another one.
    pub(super) fn may_pack_over_base(&self, unit: u64) -> bool {
        let is_durable = |sequence| self.engine.commits.is_durable(sequence);
        self.zones.as_ref().is_some_and(|zones| zones.over_base.may_begin(unit, is_durable))
    }

    /// Whether the base has a part of this unit of the disk, and only its packed block has its entry. While a part of
    /// the unit is claimed, it does not become one.
    pub(super) fn is_packed_over_base(&self, unit: u64) -> bool {
        self.zones.as_ref().is_some_and(|zones| zones.over_base.has(unit))
    }

    /// Records the entry of a unit of which another sub-block becomes data in the same transaction. The caller holds the
    /// gate.
    pub(super) fn record_entry_over_base(&self, unit: u64) {
        if !self.is_packed_over_base(unit) {
            return;
        }
        let Ok((stored, _)) = self.entry_and_form(unit) else { return };
        self.home.touch(self.places.entry(unit).word);
        self.mark_recorded(stored);
    }

    /// Records the mask of a unit's packed block. The caller holds the gate, and records the entry or changes it after
    /// this.
    pub(super) fn record_mask_over_base(&self, unit: u64) {
        let Some(over_base) = self.zones.as_ref().map(|zones| &zones.over_base) else { return };
        let Some(sub) = over_base.packed(unit) else { return };
        self.publish_subs(sub.as_slice());
        let sequence = self.journal().expect("it has begun").open_sequence();
        over_base.end(unit, sequence, |sequence| self.engine.commits.is_durable(sequence));
    }
}
