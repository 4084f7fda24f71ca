//! Groups that may have dirty blocks, and since when, in the order of their keys.
//!
//! ```text
//!   found    a sorted list, and a bit for each that has gone       what an opening found, since its begin
//!   later    a tree                                                what became dirty afterwards
//! ```
//!
//! 1. No group is in both.
//! 2. The list is made anew when half of it has gone. So a group takes at most 24 bytes, in either.
//! 3. An opening sorts what it found once. A tree of millions of groups would take longer than reading the map.

use std::collections::BTreeMap;
use std::iter::from_fn;

use crate::layout::Key;

/// The set.
#[derive(Debug, Default)]
pub(super) struct DirtyGroups {
    found: Vec<Key>,
    /// A bit for each of those that has gone.
    gone: Vec<u64>,
    /// How many of them have not.
    left: usize,
    later: BTreeMap<Key, u32>,
}

impl DirtyGroups {
    /// These, in any order, since 0.
    pub(super) fn found(mut groups: Vec<Key>) -> Self {
        groups.sort_unstable();
        groups.shrink_to_fit();
        let (left, words) = (groups.len(), groups.len().div_ceil(64));
        Self { found: groups, gone: vec![0; words], left, later: BTreeMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.left + self.later.len()
    }

    /// The place in the list of a group that has not gone.
    fn place_of(&self, group: Key) -> Option<usize> {
        let place = self.found.binary_search(&group).ok()?;
        (self.gone[place / 64] & 1 << (place % 64) == 0).then_some(place)
    }

    /// The group is in the set, if it was not, since `now`.
    pub(super) fn insert(&mut self, group: Key, now: u32) {
        if self.left == 0 || self.place_of(group).is_none() {
            self.later.entry(group).or_insert(now);
        }
    }

    pub(super) fn remove(&mut self, group: Key) {
        if self.later.remove(&group).is_some() || self.left == 0 {
            return;
        }
        let Some(place) = self.place_of(group) else { return };
        self.gone[place / 64] |= 1 << (place % 64);
        self.left -= 1;
        if self.left * 2 < self.found.len() {
            let mut at = 0;
            let gone = std::mem::take(&mut self.gone);
            self.found.retain(|_| {
                at += 1;
                gone[(at - 1) / 64] & 1 << ((at - 1) % 64) == 0
            });
            self.found.shrink_to_fit();
            self.gone = vec![0; self.left.div_ceil(64)];
        }
    }

    /// The first place in the list, at this one or behind, of a group that has not gone.
    fn next_place(&self, at: usize) -> Option<usize> {
        let first = !self.gone.get(at / 64)? & u64::MAX << (at % 64);
        let others = self.gone[at / 64 + 1..].iter().map(|gone| !gone);
        let mut words = (at / 64..).zip(std::iter::once(first).chain(others));
        let (index, word) = words.find(|(_, word)| *word != 0)?;
        let place = index * 64 + word.trailing_zeros() as usize;
        (place < self.found.len()).then_some(place)
    }

    /// Those from one group up to another, and since when.
    pub(super) fn between(&self, first: Key, last: Key) -> impl Iterator<Item = (Key, u32)> {
        let mut at = self.found.partition_point(|group| *group < first);
        let found = from_fn(move || {
            let place = self.next_place(at)?;
            at = place + 1;
            Some((self.found[place], 0))
        });
        let mut found = found.take_while(move |(group, _)| *group <= last).peekable();
        let mut later = self.later.range(first..=last).map(|(group, since)| (*group, *since)).peekable();
        from_fn(move || match (found.peek(), later.peek()) {
            (Some((one, _)), Some((other, _))) if other < one => later.next(),
            (Some(_), _) => found.next(),
            (None, _) => later.next(),
        })
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    #[test]
    fn the_groups_are_those_of_a_model() {
        for seed in 0..60 {
            let mut random = Random::from_seed(seed);
            let group = |random: &mut Random| Key::new(1, 16 * random.below(400));
            let mut model: BTreeMap<Key, u32> =
                (0..random.below(300)).map(|_| (group(&mut random), 0)).collect();
            let mut keys: Vec<Key> = model.keys().copied().collect();
            keys.sort_unstable_by_key(|key| key.bits().wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let mut groups = DirtyGroups::found(keys);
            for now in 0..900 {
                let one = group(&mut random);
                if random.one_in(3) {
                    groups.insert(one, now);
                    model.entry(one).or_insert(now);
                } else {
                    groups.remove(one);
                    model.remove(&one);
                }
                assert_eq!(groups.len(), model.len(), "seed {seed}");
                if now % 20 == 0 {
                    let (a, b) = (group(&mut random), group(&mut random));
                    let (first, last) = (a.min(b), a.max(b));
                    let between: Vec<(Key, u32)> = groups.between(first, last).collect();
                    let wanted: Vec<(Key, u32)> = model.range(first..=last).map(|(k, s)| (*k, *s)).collect();
                    assert_eq!(between, wanted, "seed {seed}, {now}");
                    assert!(groups.found.len() <= 2 * groups.left, "seed {seed}");
                }
            }
        }
    }
}
