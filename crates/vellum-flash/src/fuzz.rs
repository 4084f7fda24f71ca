//! What the fuzz target `flash_bytes` does with its bytes: they are a superblock, a slice or a record.
//!
//! Magic, id and CRC are put right first, so that an input gets to what is behind them.
//!
//! 1. What is read is within its bounds: a slot, a row or a run that there cannot be is refused.
//! 2. What is read is written again, and read again, and is the same.

use crate::bytes::{put32, put128};
use crate::layout::{BLOCK_LEN, Key, Layout, PAYLOAD_MAX, ROWS_MAX, Superblock};
use crate::map::{Map, decode_part};
use crate::record::{Item, Record};
use crate::slice::{Ledger, PAIRS_MAX, Slice};

const ID: u128 = 1;
const SLOTS: u32 = 9000;

/// Writes the CRC of all bytes to `at`.
fn sign(bytes: &mut [u8], at: usize) {
    put32(bytes, at, 0);
    let crc = crc32c::crc32c(bytes);
    put32(bytes, at, crc);
}

/// The target. The first byte says what the others are.
pub fn flash_bytes(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    match kind % 4 {
        0 => superblock(data),
        1 => part(data),
        2 => ledger(data),
        _ => record(data),
    }
}

fn superblock(data: &[u8]) {
    let mut bytes = data.to_vec();
    bytes.resize(BLOCK_LEN, 0);
    bytes[..8].copy_from_slice(b"VELLUMF0");
    sign(&mut bytes, 8);
    if let Ok(found) = Superblock::decode(&bytes) {
        assert!(found.layout.total_bytes() < 1 << 45 && found.layout.slots > 0);
        assert_eq!(Superblock::decode(&found.encode()).expect("just written"), found);
    }
}

/// The payload of a slice, as it is found on flash.
fn payload(data: &[u8], number: u32) -> Option<Vec<u8>> {
    let payload = data[..data.len().min(PAYLOAD_MAX)].to_vec();
    let bytes = Slice { number, as_of: 7, payload }.encode(ID);
    assert!(
        Slice::decode(&bytes, ID, number + 1).is_none() && Slice::decode(&bytes, ID + 1, number).is_none()
    );
    Slice::decode(&bytes, ID, number).map(|slice| slice.payload)
}

fn part(data: &[u8]) {
    let layout = Layout::new(SLOTS, 1 << 20, 5).expect("a layout");
    // A part that the first group is in, so that inputs need not find one by chance.
    let part = data.first_chunk().map_or(0, |key| layout.part_of(Key::from_bits(u64::from_be_bytes(*key))));
    let payload = payload(data, part + 1).expect("just written");
    let Some(entries) = decode_part(&layout, part, &payload) else { return };
    let mut map = Map::new(&layout);
    for (key, entry) in &entries {
        assert!(entry.slot.0 < SLOTS && entry.sectors != 0 && key.row() < ROWS_MAX);
        assert!(map.put(*key, *entry).is_none(), "a block is there once");
    }
    let mut again = decode_part(&layout, part, &map.encode_part(part)).expect("just written");
    again.sort_unstable_by_key(|(key, _)| *key);
    let mut entries = entries;
    entries.sort_unstable_by_key(|(key, _)| *key);
    assert_eq!(again, entries);
}

fn ledger(data: &[u8]) {
    let payload = payload(data, 0).expect("just written");
    if let Some(found) = Ledger::decode(&payload) {
        assert!(found.rows.len() <= usize::from(ROWS_MAX));
        assert!(found.zeros.len() + found.regions.len() <= PAIRS_MAX);
        assert_eq!(Ledger::decode(&found.encode()), Some(found));
    }
}

fn record(data: &[u8]) {
    // The header's fields after magic and id, then the items.
    let len = (24 + data.len()).next_multiple_of(BLOCK_LEN);
    let mut bytes = vec![0; len];
    bytes[24..24 + data.len()].copy_from_slice(data);
    bytes[..8].copy_from_slice(b"VELLUMF1");
    put128(&mut bytes, 8, ID);
    put32(&mut bytes, 48, u32::try_from(len).expect("a short input"));
    put32(&mut bytes, 60, 0);
    sign(&mut bytes, 56);
    let Some((found, found_len)) = Record::decode(&bytes, ID, SLOTS) else { return };
    assert_eq!(found_len, len);
    for item in &found.items {
        match item {
            Item::Put { key, slot, sectors, .. } => {
                assert!(slot.0 < SLOTS && *sectors != 0 && key.row() < ROWS_MAX);
            }
            Item::Puts { key, slot, blocks, .. } => {
                assert!(*blocks > 1 && slot.0 + blocks <= SLOTS && key.row() < ROWS_MAX);
                assert_eq!(key.group(), key.plus(u64::from(blocks - 1)).group());
            }
            Item::Drops { key, blocks } => {
                assert!(*blocks > 1 && key.row() < ROWS_MAX);
                assert_eq!(key.group(), key.plus(u64::from(blocks - 1)).group());
            }
            Item::Zero { key, blocks, .. } | Item::Unzero { key, blocks } => drop(key.plus(blocks - 1)),
            _ => {}
        }
    }
    let again = Record::decode(&found.encode(), ID, SLOTS).expect("just written").0;
    assert_eq!(again, found);
}

/// Inputs to begin with, each with its name.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    use smallvec::smallvec;

    use crate::layout::{SECTORS_ALL, Slot};
    use crate::map::Entry;
    use crate::record::{Checks, Row};
    use crate::regions::Word;
    use crate::zeros::Run;

    let layout = Layout::new(SLOTS, 1 << 20, 5).expect("a layout");
    let superblock = Superblock { id: ID, layout, features: Superblock::KNOWN }.encode();
    let key = Key::new(3, 0x40);
    let mut map = Map::new(&layout);
    for (block, slot, sectors, dirty) in [(0, 9, SECTORS_ALL, true), (1, 8999, 3, false), (5, 7, 1, true)] {
        map.put(key.plus(block), Entry { slot: Slot(slot), sectors, dirty });
    }
    let row = Row { number: 3, has_record: true, disk: 1, named: 2, newest: 3 };
    let mut ledger = Ledger::default();
    ledger.rows.insert(3, row);
    let word = Word { key: Key::new(3, 1 << 20), bits: 6 };
    ledger.regions.add(word);
    for (key, blocks, may_free) in [(key, 9, true), (key.plus(50), 1, false)] {
        assert!(ledger.zeros.restore(Run { key, blocks, may_free }));
    }
    let block: smallvec::SmallVec<[u8; BLOCK_LEN]> = smallvec![7; BLOCK_LEN];
    let items = vec![
        Item::NoRow(2),
        Item::Row(row),
        Item::Zero { key, blocks: 5, may_free: true },
        Item::Unzero { key, blocks: 2 },
        Item::Written(word),
        Item::Settled(word),
        Item::Void(word),
        Item::Put { key, slot: Slot(5), sectors: 5, dirty: true, checks: Some(Checks::of(5, &block)) },
        Item::Put { key: key.plus(1), slot: Slot(6), sectors: SECTORS_ALL, dirty: false, checks: None },
        Item::Drop { key: key.plus(2) },
        Item::Puts { key: key.plus(16), slot: Slot(90), blocks: 16, dirty: true, check: Some(9) },
        Item::Drops { key: key.plus(3), blocks: 4 },
    ];
    let used: usize = items.iter().map(Item::encoded_len).sum();
    let record = Record { id: ID, sequence: 9, durable: 8, tail: 3, items }.encode();
    let with = |kind: u8, bytes: &[u8]| [&[kind], bytes].concat();
    vec![
        ("superblock", with(0, &superblock[..72])),
        ("part", with(1, &map.encode_part(layout.part_of(key)))),
        ("ledger", with(2, &ledger.encode())),
        ("record", with(3, &record[24..64 + used])),
    ]
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    #[test]
    fn the_seeds_and_what_is_near_them_keep_the_rules() {
        let mut random = Random::from_seed(3);
        for (_, seed) in seeds() {
            flash_bytes(&seed);
            for _ in 0..2000 {
                let mut bytes = seed.clone();
                for _ in 0..=random.below(3) {
                    let at = 1 + random.index(bytes.len() - 1);
                    bytes[at] ^= 1 << random.below(8);
                }
                flash_bytes(&bytes);
            }
        }
    }

    #[test]
    fn the_seeds_are_read() {
        let seeds = seeds();
        let [_, part, ledger, record] = &seeds[..] else { panic!("four kinds") };
        assert!(Ledger::decode(&ledger.1[1..]).is_some_and(|ledger| ledger.zeros.len() == 2));
        let layout = Layout::new(SLOTS, 1 << 20, 5).unwrap();
        let number = layout.part_of(Key::new(3, 0x40));
        assert_eq!(decode_part(&layout, number, &part.1[1..]).map(|entries| entries.len()), Some(3));
        assert!(record.1.len() > 100);
    }
}
