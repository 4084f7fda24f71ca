//! Neighbouring blocks in neighbouring slots, as one item of a record.
//!
//! ```text
//!   put 32, slot 7, crc a │ put 33, slot 8, crc b │ put 34, slot 9, crc c     20 bytes each
//!   └──────────────── put 32 to 34, slots 7 to 9, crc of a b c ─────────┘     20 bytes
//! ```
//!
//! 1. Blocks are joined that are whole, of one group, in slots that follow each other, and that say the same: clean or
//!    dirty, with a CRC or without. So the joined item says of each block what its own said.
//! 2. Its CRC is that of all bytes of its slots. A record holds or is void as a whole, so a recovery learns from one CRC
//!    what it learns from sixteen: whether a byte of them is missing.
//! 3. That CRC is made of the blocks' own, without a look at their bytes: CRCs are linear, so that of `a b` is that of `a`
//!    with 4096 zero bytes behind it, xor that of `b`.
//! 4. Joined items are never longer than the single ones, so a record has room for them.
//!
//! A cache that an older program has made learns it by a feature bit (`docs/format/flash.md`) when it is opened.

use crate::layout::{GROUP_BLOCKS, Key, SECTORS_ALL, Slot};
use crate::record::Item;

/// CRC32C's polynomial, the lowest bit the highest power.
const POLYNOMIAL: u32 = 0x82F6_3B78;

/// The product of two polynomials modulo CRC32C's; the highest bit is the power 0.
const fn product(a: u32, mut b: u32) -> u32 {
    let (mut sum, mut bit) = (0, 1 << 31);
    while bit != 0 {
        if a & bit != 0 {
            sum ^= b;
        }
        b = if b & 1 != 0 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
        bit >>= 1;
    }
    sum
}

/// x to the power of 2^`doublings`.
const fn power(doublings: u32) -> u32 {
    // x itself.
    let (mut power, mut n) = (1 << 30, 0);
    while n < doublings {
        power = product(power, power);
        n += 1;
    }
    power
}

/// What each byte of a CRC becomes behind 4096 zero bytes: 2^15 bits.
const BEHIND_ZEROS: [[u32; 256]; 4] = {
    let (block, mut table, mut n) = (power(15), [[0; 256]; 4], 0u32);
    while n < 1024 {
        let (which, byte) = (n / 256, n % 256);
        table[which as usize][byte as usize] = product(block, byte << (which * 8));
        n += 1;
    }
    table
};

/// The CRC of some bytes and a block behind them, from those of both.
fn append_block(crc: u32, block: u32) -> u32 {
    let bytes = crc.to_le_bytes();
    BEHIND_ZEROS.iter().zip(bytes).fold(block, |sum, (table, byte)| sum ^ table[usize::from(byte)])
}

/// A put as an item of several: where it begins, how many blocks, clean or dirty, its CRC if it has one.
fn puts(item: &Item) -> Option<(Key, Slot, u32, bool, Option<u32>)> {
    match item {
        Item::Put { key, slot, sectors: SECTORS_ALL, dirty, checks } => {
            let check = match checks {
                None => None,
                Some(checks) => Some(checks.of_all()?),
            };
            Some((*key, *slot, 1, *dirty, check))
        }
        Item::Puts { key, slot, blocks, dirty, check } => Some((*key, *slot, *blocks, *dirty, *check)),
        _ => None,
    }
}

fn drops(item: &Item) -> Option<(Key, u32)> {
    match item {
        Item::Drop { key } => Some((*key, 1)),
        Item::Drops { key, blocks } => Some((*key, *blocks)),
        _ => None,
    }
}

/// Whether `next` is the block of the same group that comes after `blocks` of them, counted from `first`.
fn follows(first: Key, blocks: u32, next: Key) -> bool {
    first.bits() + u64::from(blocks) == next.bits() && u64::from(first.index() + blocks) < GROUP_BLOCKS
}

/// Both as one item, where that says the same. `next` is about a single block.
fn join(before: &Item, next: &Item) -> Option<Item> {
    if let (Some((key, slot, blocks, dirty, check)), Some((next, its_slot, 1, its_dirty, its_check))) =
        (puts(before), puts(next))
    {
        let is_alike = dirty == its_dirty && check.is_some() == its_check.is_some();
        let is_neighbour = follows(key, blocks, next) && slot.0 + blocks == its_slot.0;
        let check = check.zip(its_check).map(|(crc, block)| append_block(crc, block));
        return (is_alike && is_neighbour).then_some(Item::Puts {
            key,
            slot,
            blocks: blocks + 1,
            dirty,
            check,
        });
    }
    let ((key, blocks), (next, _)) = (drops(before)?, drops(next)?);
    follows(key, blocks, next).then_some(Item::Drops { key, blocks: blocks + 1 })
}

/// Items in their order, with neighbours as one.
pub(crate) fn joined(items: Vec<Item>) -> Vec<Item> {
    let mut found: Vec<Item> = Vec::with_capacity(items.len());
    for item in items {
        match found.last_mut().and_then(|last| join(last, &item).map(|both| (last, both))) {
            Some((last, both)) => *last = both,
            None => found.push(item),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;
    use crate::layout::BLOCK_LEN;
    use crate::record::{Checks, Record};

    fn bytes(random: &mut Random) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_LEN];
        random.fill(&mut bytes);
        bytes
    }

    fn put(key: u64, slot: u32, checks: Option<Checks>) -> Item {
        Item::Put { key: Key::new(1, key), slot: Slot(slot), sectors: SECTORS_ALL, dirty: true, checks }
    }

    #[test]
    fn the_crc_of_blocks_is_made_of_their_own() {
        let mut random = Random::from_seed(1);
        let (mut all, mut crc) = (Vec::new(), None);
        for _ in 0..16 {
            let block = bytes(&mut random);
            let own = crc32c::crc32c(&block);
            all.extend(block);
            let both = crc.map_or(own, |crc| append_block(crc, own));
            assert_eq!(both, crc32c::crc32c(&all));
            crc = Some(both);
        }
        assert_eq!(append_block(7, 9), crc32c::crc32c_combine(7, 9, BLOCK_LEN));
    }

    #[test]
    fn a_group_is_one_item_of_20_bytes() {
        let mut random = Random::from_seed(2);
        let blocks: Vec<Vec<u8>> = (0..16).map(|_| bytes(&mut random)).collect();
        let places = (32..).zip(100..).zip(&blocks);
        let put_one = |((key, slot), block): ((u64, u32), &Vec<u8>)| {
            put(key, slot, Some(Checks::of(SECTORS_ALL, block)))
        };
        let items = joined(places.map(put_one).collect());
        let check = Some(crc32c::crc32c(&blocks.concat()));
        assert_eq!(
            items,
            [Item::Puts { key: Key::new(1, 32), slot: Slot(100), blocks: 16, dirty: true, check }]
        );
        assert_eq!(items[0].encoded_len(), 20);
        assert!(items[0].holds(&blocks.concat()));
        for at in [0, 4095, 4096, 65_535] {
            let mut bytes = blocks.concat();
            bytes[at] ^= 1;
            assert!(!items[0].holds(&bytes), "byte {at}");
        }
    }

    #[test]
    fn only_what_says_the_same_is_joined() {
        let one = || Some(Checks::of(SECTORS_ALL, &[1; BLOCK_LEN]));
        let count = |items: Vec<Item>| joined(items).len();
        assert_eq!(count(vec![put(32, 7, one()), put(33, 8, one())]), 1);
        assert_eq!(count(vec![put(32, 7, None), put(33, 8, None)]), 1);
        assert_eq!(count(vec![put(31, 7, one()), put(32, 8, one())]), 2, "of two groups");
        assert_eq!(count(vec![put(32, 7, one()), put(34, 8, one())]), 2, "not neighbours");
        assert_eq!(count(vec![put(32, 7, one()), put(33, 9, one())]), 2, "not in neighbouring slots");
        assert_eq!(count(vec![put(32, 7, one()), put(33, 6, one())]), 2, "in slots the other way round");
        assert_eq!(count(vec![put(32, 7, one()), put(33, 8, None)]), 2, "only one is checked");
        let with = |change: &dyn Fn(&mut u8, &mut bool)| {
            let mut item = put(33, 8, one());
            if let Item::Put { sectors, dirty, .. } = &mut item {
                change(sectors, dirty);
            }
            count(vec![put(32, 7, one()), item])
        };
        assert_eq!(with(&|sectors, _| *sectors = 0x7F), 2, "not whole");
        assert_eq!(with(&|_, dirty| *dirty = false), 2, "one is clean");
        let drop = |block| Item::Drop { key: Key::new(1, block) };
        let drops = Item::Drops { key: Key::new(1, 45), blocks: 3 };
        assert_eq!(joined(vec![drop(45), drop(46), drop(47), drop(48)]), [drops, drop(48)]);
        assert_eq!(count(vec![drop(32), put(33, 8, None), drop(34)]), 3);
    }

    /// Any items say the same of each block when they are joined, and are read as they were written.
    #[test]
    fn nothing_is_lost() {
        let blocks: Vec<Vec<u8>> = (0..4).map(|n| vec![n; BLOCK_LEN]).collect();
        for seed in 0..500 {
            let mut random = Random::from_seed(seed);
            let (mut items, mut slot) = (Vec::new(), 0);
            for block in 0..60 {
                slot += [1, 1, 1, 2][random.index(4)];
                let checks = (random.below(8) > 0).then(|| Checks::of(SECTORS_ALL, &blocks[random.index(4)]));
                let key = Key::new(2, block);
                match random.below(8) {
                    0 => {}
                    1 | 2 => items.push(Item::Drop { key }),
                    kind => {
                        let sectors = if kind == 3 { 5 } else { SECTORS_ALL };
                        let dirty = random.below(8) > 0;
                        items.push(Item::Put { key, slot: Slot(slot), sectors, dirty, checks });
                    }
                }
            }
            let joined = joined(items.clone());
            let single: Vec<Item> = joined.iter().flat_map(singles).collect();
            assert_eq!(single, items.iter().map(unchecked).collect::<Vec<_>>(), "seed {seed}");
            let record = Record { id: 1, sequence: 2, durable: 1, tail: 1, items: joined };
            let bytes = record.encode();
            assert_eq!(Record::decode(&bytes, 1, 1000), Some((record, bytes.len())), "seed {seed}");
        }
    }

    fn unchecked(item: &Item) -> Item {
        match item.clone() {
            Item::Put { key, slot, sectors, dirty, .. } => {
                Item::Put { key, slot, sectors, dirty, checks: None }
            }
            other => other,
        }
    }

    /// What it says of each block, without CRCs.
    fn singles(item: &Item) -> Vec<Item> {
        match item {
            Item::Puts { key, slot, blocks, dirty, .. } => (0..*blocks)
                .map(|n| Item::Put {
                    key: key.plus(u64::from(n)),
                    slot: Slot(slot.0 + n),
                    sectors: SECTORS_ALL,
                    dirty: *dirty,
                    checks: None,
                })
                .collect(),
            Item::Drops { key, blocks } => {
                (0..*blocks).map(|n| Item::Drop { key: key.plus(u64::from(n)) }).collect()
            }
            other => vec![unchecked(other)],
        }
    }
}
