//! Publishing the result of a write: entry, checks, bits and masks join the open transaction in one step.
//!
//! ```text
//!   pages loaded ► room in the transaction ► gate: checks, entry, masks and bits
//! ```
//!
//! 1. Checks are listed before the bytes can be found through the mapping. So a later overwrite of these
//!    bytes sees the checks.
//! 2. The entry is changed before bits and masks. A reader that these send to the image finds there the right
//!    bytes.
//! 3. Where only a packed block has the unit's entry, that is recorded with the first bit or mask (`pack_over_base.rs`).
//! 4. The masks of one block are changed under its lock: the change that turns the last of them into data
//!    sets the bit.

use std::sync::RwLockReadGuard;

use vellum_core::{Context, GuestSpan, ImageOffset, Result};

use super::geometry::Bits;
use super::home_pages::Missing;
use super::image::{Native, mask};
use super::zone_state::Given;
use crate::engine;

/// The bytes of a record that one word takes, at most: as an item of its own.
pub(super) const WORD_COST: u64 = 24;

/// What recording such a unit takes of a record beside its mask and bit: they, its entry, the bit in its zone.
pub(super) const RECORDING_COST: u64 = 4 * WORD_COST;
/// One cell of a write.
pub(super) type Step<'a> = engine::Step<'a, Native>;

/// What the native format knows of a step.
pub(crate) struct Planned {
    pub(super) part: GuestSpan,
    /// The entry must be set to the step's place.
    pub(super) is_fresh: bool,
    /// Sub-blocks that become data.
    pub(super) subs: Vec<u64>,
    /// Set when the unit holds its own entry.
    pub(super) embedded: Option<EmbeddedAlloc>,
}

/// An embedded allocation: a unit, and the packed block that holds its entry.
pub(super) struct EmbeddedAlloc {
    pub(super) given: Given,
    /// Which block holds the entry, and its bytes for the image.
    pub(super) block: u8,
    pub(super) bytes: Vec<u8>,
}

impl Planned {
    pub(super) const fn new(part: GuestSpan) -> Self {
        Self { part, is_fresh: false, subs: Vec::new(), embedded: None }
    }
}

impl Native {
    /// Makes one cell's bytes part of the disk.
    pub(super) async fn publish_plain(&self, step: &Step<'_>) -> Result<()> {
        let (words, cost) = self.prepare_publishing(step).await?;
        let gate = self.enter_changing(cost, || words.clone()).await?;
        self.publish_prepared(step, gate);
        Ok(())
    }

    /// As above, if the open transaction has room for it and no snapshot is in the way. Returns whether.
    pub(super) async fn publish_if_room(&self, step: &Step<'_>) -> Result<bool> {
        let (words, cost) = self.prepare_publishing(step).await?;
        let Some(gate) = self.try_enter_transaction(cost)? else { return Ok(false) };
        let may_change = self.may_change(&|| words.clone());
        if may_change {
            self.publish_prepared(step, gate);
        }
        Ok(may_change)
    }

    /// The words that a step changes, loaded, and the most that it takes of a record.
    async fn prepare_publishing(&self, step: &Step<'_>) -> Result<(Vec<ImageOffset>, u64)> {
        self.load_masks(&step.plan.subs).await?;
        let mut words = self.words_of(&step.plan.subs);
        words.extend(self.entry_of(step).filter(|_| step.plan.is_fresh).map(|bits| bits.word));
        self.reserve(&words).await?;
        let unit = self.cell_of(step.plan.part.start()).index();
        let mut cost = WORD_COST; // for the bit of a unit that is left
        if self.is_packed_over_base(unit) {
            words.push(self.places.entry(unit).word);
            cost += RECORDING_COST;
        }
        let checks: u64 = step.checks.iter().map(|(_, crcs)| 20 + crcs.len() as u64 * 4).sum();
        Ok((words.clone(), cost + words.len() as u64 * WORD_COST + checks))
    }

    fn entry_of(&self, step: &Step<'_>) -> Option<Bits> {
        let unit = self.unit()?;
        Some(self.places.entry(unit.cluster_of(step.plan.part.start()).index()))
    }

    fn publish_prepared(&self, step: &Step<'_>, gate: RwLockReadGuard<'_, ()>) {
        let journal = self.journal().expect("begun before");
        step.note_fresh(journal);
        self.record_entry_over_base(self.cell_of(step.plan.part.start()).index());
        if let Some(bits) = self.entry_of(step).filter(|_| step.plan.is_fresh) {
            let number = self.number_of(step.at());
            match self.home.get(bits) {
                Ok(0) => self.enter_unit(bits, number),
                // It held its own entry, and was filled from end to end.
                _ => self.enter_instead(bits, number),
            }
            step.held().published();
        }
        self.publish_subs(&step.plan.subs);
        drop(gate);
    }

    /// The words of home that a step may change, before it is known whether it gets a unit.
    pub(super) fn words_of_any(&self, step: &Step<'_>) -> Vec<ImageOffset> {
        let unit = self.unit();
        let number = unit.map(|unit| unit.cluster_of(step.plan.part.start()).index());
        // An existing entry stays.
        let entry = number.filter(|number| self.entry(*number).is_ok_and(|entry| entry == 0));
        let mut words = self.words_of(&step.plan.subs);
        words.extend(entry.map(|number| self.places.entry(number).word));
        words
    }

    /// The words of these sub-blocks' bits and masks.
    pub(super) fn words_of(&self, subs: &[u64]) -> Vec<ImageOffset> {
        let bit = |sub: &u64| self.places.bit(self.block_of_sub(*sub)).word;
        let mut words: Vec<ImageOffset> =
            subs.iter().flat_map(|sub| [bit(sub), self.places.mask(*sub).word]).collect();
        words.sort_unstable();
        words.dedup();
        words
    }

    /// Makes sure that the host has space for the pages of these words.
    pub(super) async fn reserve(&self, words: &[ImageOffset]) -> Result<()> {
        let reserved = self.home.reserve(&*self.metadata, words).await;
        reserved.context(|| format!("{}: can't reserve space for the tables", self.engine.name))
    }

    /// Loads the masks and bits of these sub-blocks, and of the rest of their blocks.
    pub(super) async fn load_masks(&self, subs: &[u64]) -> Result<()> {
        let mut last = None;
        for sub in subs {
            let block = self.block_of_sub(*sub);
            if last.replace(block) != Some(block) {
                self.find(|| {
                    self.home.get(self.places.bit(block))?;
                    self.block_is(block, mask::DATA)
                })
                .await?;
            }
        }
        Ok(())
    }

    /// Whether all masks of a block have this value.
    fn block_is(&self, block: u64, value: u64) -> Result<bool, Missing> {
        let subs = self.subs_of(block);
        // A word has thirty-two masks. All are looked at, so that all are loaded.
        let mut is = true;
        for sub in subs {
            is &= self.home.get(self.places.mask(sub))? == value;
        }
        Ok(is)
    }

    /// Turns sub-blocks into data. A block whose sub-blocks are all data gets its bit. The caller holds the
    /// gate, and everything is loaded.
    pub(super) fn publish_subs(&self, subs: &[u64]) {
        let mut rest = subs;
        while let Some(first) = rest.first() {
            let block = self.block_of_sub(*first);
            let (now, later) = rest.split_at(rest.partition_point(|sub| self.block_of_sub(*sub) == block));
            rest = later;
            let all = self.subs_of(block);
            let bit = self.places.bit(block);
            let _one_at_a_time = self.lock_block(block);
            if now.len() as u64 == all.end - all.start {
                self.home.change(bit.word, |word| bit.set(word, 1));
                continue;
            }
            for sub in now {
                let bits = self.places.mask(*sub);
                self.home.change(bits.word, |word| bits.set(word, mask::DATA));
            }
            if self.block_is(block, mask::DATA).unwrap_or(false) {
                self.home.change(bit.word, |word| bit.set(word, 1));
            }
        }
    }
}
