//! Which words of a page of metadata have changed, and the items that say so.

use vellum_core::ImageOffset;

use super::record::Item;

/// The bytes that an item takes in a record besides its body.
const ITEM_BYTES: u64 = 16;
use crate::bytes::be64;

/// Which words of a page have changed, by their number; pages have at most 512.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Changed([u64; 8]);

impl Changed {
    /// Adds a word. Returns by how many bytes a record grows, at most.
    pub(crate) fn add(&mut self, word: usize) -> u64 {
        if self.has(word) {
            return 0;
        }
        self.0[word / 64 % 8] |= 1 << (word % 64);
        let has_neighbour = (word > 0 && self.has(word - 1)) || self.has(word + 1);
        if has_neighbour { 8 } else { ITEM_BYTES + 8 }
    }

    fn has(self, word: usize) -> bool {
        word < 512 && self.0[word / 64] & 1 << (word % 64) != 0
    }

    /// The changed words of a page at this place, as items.
    pub(crate) fn items(self, place: ImageOffset, bytes: &[u8]) -> Vec<Item> {
        let words = self.0.into_iter().enumerate().flat_map(|(group, bits)| {
            // Most groups are zero, and in the others most bits are zero.
            let mut left = bits;
            std::iter::from_fn(move || {
                let bit = left.trailing_zeros() as usize;
                left &= left.wrapping_sub(1);
                (bit < 64).then_some(group * 64 + bit)
            })
        });
        let inside = words.take_while(|word| (word + 1) * 8 <= bytes.len());
        items_of(inside.map(|word| (place + word as u64 * 8, be64(bytes, word * 8))))
    }
}

/// Words by their places, ascending, as items. Adjacent words share an item.
pub(crate) fn items_of(words: impl Iterator<Item = (ImageOffset, u64)>) -> Vec<Item> {
    let mut items: Vec<Item> = Vec::new();
    for (place, value) in words {
        match items.last_mut() {
            Some(Item::Words { at, values }) if *at + values.len() as u64 * 8 == place => values.push(value),
            _ => items.push(Item::Words { at: place, values: vec![value] }),
        }
    }
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_words_share_an_item() {
        let mut bytes = vec![0; 4096];
        let mut changed = Changed::default();
        for word in [0, 63, 64, 511] {
            let more = changed.add(word);
            assert_eq!(more, if word == 64 { 8 } else { 24 });
            assert_eq!(changed.add(word), 0);
            bytes[word * 8 + 7] = 1;
        }
        let at = |word: u64| ImageOffset::new(0x10000 + word * 8);
        let words = |at, values: &[u64]| Item::Words { at, values: values.to_vec() };
        assert_eq!(
            changed.items(at(0), &bytes),
            [words(at(0), &[1]), words(at(63), &[1, 1]), words(at(511), &[1])]
        );
    }
}
