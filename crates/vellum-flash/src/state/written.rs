//! Regions that are being written: entered, settled, void. `regions` has their story.

use std::collections::BTreeSet;

use super::State;
use crate::layout::Key;
use crate::open::Share;
use crate::record::Item;
use crate::regions::{Idle, REGION_BLOCKS, WORD_BYTES, Word, region_of, words_max};
use crate::slice::PAIRS_MAX;
use crate::zeros::RUNS_MAX;

/// How a writer enters a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    /// A durable record says that it is being written.
    Durable,
    /// A commit makes that durable.
    New,
    /// The record has no room to say it before a commit.
    NoRoom,
    /// There are as many regions as there may be.
    Full,
}

impl State {
    /// The regions in which some of these blocks are cached, or a recovery may find that they are.
    pub(crate) fn known_regions(&self, first: Key, blocks: u64) -> BTreeSet<Key> {
        let last = first.plus(blocks - 1);
        let sealed = self.sealed.iter().copied().filter(|key| (first..=last).contains(key));
        let cached = self.map.keys_between(first, blocks).into_iter();
        cached.chain(self.open.keys_between(first, last)).chain(sealed).map(region_of).collect()
    }

    /// Whether the disk has regions that count as written.
    pub(crate) fn has_regions(&self, row: u16) -> bool {
        self.ledger.regions.words_of(row).next().is_some()
    }

    /// A writer enters the region: home and flash may differ there from now on.
    pub(crate) fn enter_region(&mut self, region: Key) -> Entry {
        if !self.ledger.regions.has(region) {
            if !self.ledger.regions.has_word(region) && !self.has_room_for_word() {
                return Entry::Full;
            }
            if self.room_for(Share::Home) < WORD_BYTES {
                return Entry::NoRoom;
            }
            let word = Word::of(region);
            self.ledger.regions.add(word);
            self.open.note_ledger(Item::Written(word), Share::Home);
            self.open.make_urgent();
        }
        if self.uses.enter(region, self.now) { Entry::Durable } else { Entry::New }
    }

    /// An older cache may have more runs of zeros than are there now.
    fn has_room_for_word(&self) -> bool {
        let words = self.ledger.regions.len();
        let pairs = words + self.ledger.zeros.len().max(RUNS_MAX);
        words < words_max(self.record_bytes_max()) && pairs < PAIRS_MAX
    }

    /// Whether regions of this disk are in the way of others.
    pub(crate) fn is_full_of_regions(&self) -> bool {
        !self.has_room_for_word()
    }

    /// The record that says *written* of these is durable.
    pub(crate) fn entries_are_durable(&mut self, regions: &[Key]) {
        regions.iter().for_each(|region| self.uses.is_durable_now(*region));
    }

    /// The writer has ended, or was dropped half way.
    pub(crate) fn leave_regions(&mut self, regions: &[Key], is_lost: bool) {
        regions.iter().for_each(|region| self.uses.leave(*region, is_lost));
    }

    /// Regions of the disk that have no writer, and that none has entered since this time.
    pub(crate) fn idle_regions(&self, row: u16, until: u32) -> Vec<Idle> {
        let regions = self.ledger.regions.words_of(row).flat_map(Word::regions);
        regions.filter_map(|region| self.uses.idle(region, until)).collect()
    }

    /// Home and flash have the same in these, durably, unless somebody has entered them since. Those for which the
    /// record has no room are left in the list.
    pub(crate) fn settle_regions(&mut self, idle: &mut Vec<Idle>) {
        let uses = &self.uses;
        idle.retain(|idle| uses.is_still(*idle));
        while let Some(first) = idle.first() {
            if self.room_for(Share::Home) < WORD_BYTES {
                return;
            }
            let mut word = Word::of(first.region);
            let of_word = |idle: &&Idle| Word::of(idle.region).key == word.key;
            word.bits =
                idle.iter().take_while(of_word).fold(0, |bits, idle| bits | Word::of(idle.region).bits);
            idle.drain(..word.bits.count_ones() as usize);
            self.forget_word(word);
            self.open.note_ledger(Item::Settled(word), Share::Home);
        }
    }

    fn forget_word(&mut self, word: Word) {
        self.ledger.regions.remove(word);
        word.regions().for_each(|region| self.uses.forget(region));
    }

    /// The words of the regions of all disks, or of one, and the bytes of a record that name them.
    fn words(&self, row: Option<u16>) -> Vec<Word> {
        match row {
            Some(row) => self.ledger.regions.words_of(row).collect(),
            None => self.ledger.regions.words().collect(),
        }
    }

    /// Nothing counts of what the cache has of regions in which home and flash may differ: of all disks, or of one. False,
    /// and nothing is done, when the record has no room.
    pub(crate) fn void_regions(&mut self, row: Option<u16>) -> bool {
        let words = self.words(row);
        if self.room_for(Share::Evict) < words.len() * WORD_BYTES {
            return false;
        }
        if words.is_empty() {
            return true;
        }
        let is_void = |key: &Key| row.is_none_or(|row| key.row() == row) && self.ledger.regions.has(*key);
        let keys: Vec<Key> = self.map.entries().map(|(key, _)| key).filter(is_void).collect();
        for key in keys {
            self.forget(key);
        }
        for word in words {
            for region in word.regions() {
                self.open.forget_blocks(region, REGION_BLOCKS);
            }
            self.forget_word(word);
            self.open.note_ledger(Item::Void(word), Share::Evict);
        }
        true
    }
}
