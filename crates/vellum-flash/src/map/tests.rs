//! The map beside a model, and what it takes in memory.

use std::collections::BTreeMap;

use vellum_core::Random;

use super::*;

fn layout(slots: u32) -> Layout {
    Layout::new(slots, 1 << 20, 0x5EC2_E700_0000_0001).unwrap()
}

fn random_entry(random: &mut Random, slots: u32) -> Entry {
    let slot = Slot(u32::try_from(random.below(u64::from(slots))).unwrap());
    let sectors =
        if random.one_in(4) { *random.pick(&[1, 2, 0x0F, 0x81, 0xFE, SECTORS_ALL]) } else { SECTORS_ALL };
    Entry { slot, sectors, dirty: random.one_in(2) }
}

fn agrees(map: &Map, model: &BTreeMap<Key, Entry>, why: &str) {
    let found: BTreeMap<Key, Entry> = map.entries().collect();
    assert_eq!(&found, model, "{why}");
    assert_eq!(map.blocks(), model.len() as u64, "{why}");
    assert_eq!(map.dirty_blocks(), model.values().filter(|entry| entry.dirty).count() as u64, "{why}");
}

#[test]
fn the_entries_are_those_of_a_model() {
    for seed in 0..40 {
        let mut random = Random::from_seed(seed);
        let layout = layout([9000, 200_000][random.index(2)]);
        let mut map = Map::new(&layout);
        let mut model = BTreeMap::new();
        let blocks = [100, 4000][random.index(2)];
        for step in 0..4000 {
            let why = format!("seed {seed}, step {step}");
            let key = Key::new(*random.pick(&[0, 1]), random.below(blocks));
            match random.below(6) {
                0..3 => {
                    let entry = random_entry(&mut random, layout.slots);
                    assert_eq!(map.put(key, entry), model.insert(key, entry), "{why}");
                }
                3 | 4 => assert_eq!(map.remove(key), model.remove(&key), "{why}"),
                _ => {
                    let dirty = random.one_in(2);
                    map.set_dirty(key, dirty);
                    if let Some(entry) = model.get_mut(&key) {
                        entry.dirty = dirty;
                    }
                }
            }
            assert_eq!(map.get(key), model.get(&key).copied(), "{why}");
            if step % 500 == 0 {
                agrees(&map, &model, &why);
            }
        }
        agrees(&map, &model, &format!("seed {seed}, at the end"));
        for key in model.keys().copied().collect::<Vec<_>>() {
            map.remove(key);
        }
        assert_eq!(
            map.memory_bytes(),
            Map::new(&layout).memory_bytes(),
            "seed {seed}: an empty map takes none"
        );
        assert!((0..map.parts()).all(|part| map.encode_part(part).is_empty()), "seed {seed}");
    }
}

#[test]
fn a_part_reads_as_it_was_written() {
    for seed in 0..40 {
        let mut random = Random::from_seed(seed);
        let layout = layout(20_000);
        let mut map = Map::new(&layout);
        for _ in 0..3000 {
            map.put(Key::new(7, random.below(8000)), random_entry(&mut random, layout.slots));
        }
        let mut again = Map::new(&layout);
        for part in 0..map.parts() {
            let payload = map.encode_part(part);
            let room = map.room_in(part) as usize;
            assert!(
                payload.len() + room * 21 <= PAYLOAD_MAX && payload.len() + (room + 1) * 21 > PAYLOAD_MAX
            );
            let entries = decode_part(&layout, part, &payload).unwrap();
            for (key, entry) in entries {
                assert_eq!(again.put(key, entry), None);
            }
            if !payload.is_empty() {
                assert_eq!(decode_part(&layout, (part + 1) % layout.parts, &payload), None);
                let twice = [&payload[..], &payload[..]].concat();
                assert_eq!(decode_part(&layout, part, &twice), None, "a group twice");
                assert_eq!(decode_part(&layout, part, &payload[..payload.len() - 1]), None);
            }
        }
        assert_eq!(again.entries().collect::<BTreeMap<_, _>>(), map.entries().collect(), "seed {seed}");
    }
}

#[test]
fn a_map_that_is_filled_is_what_puts_make_of_it_and_costs_what_it_says() {
    for seed in 0..40 {
        let mut random = Random::from_seed(seed);
        let layout = layout(20_000);
        let mut map = Map::new(&layout);
        for _ in 0..3000 {
            map.put(Key::new(7, random.below(8000)), random_entry(&mut random, layout.slots));
        }
        let mut filled = Map::new(&layout);
        for part in 0..map.parts() {
            let entries = decode_part(&layout, part, &map.encode_part(part)).unwrap();
            let groups = || entries.chunk_by(|(a, _), (b, _)| a.group() == b.group());
            let before = filled.grown_bytes() + filled.payload_bytes();
            assert!(filled.fill(part, groups().count(), groups()), "seed {seed}");
            let dirty = groups().filter(|group| group.iter().any(|(_, entry)| entry.dirty)).count() as u64;
            let cost: u64 = groups().map(cost_of).sum();
            let after = filled.grown_bytes() + filled.payload_bytes();
            assert_eq!(after - before + dirty * DIRTY_GROUP_COST, cost, "seed {seed}");
            assert_eq!(filled.payload_of(part), filled.encode_part(part).len(), "seed {seed}");
            assert!(filled.payload_of(part) <= map.payload_of(part), "seed {seed}: no worse than it was");
            let clean = filled.clean_in(part);
            assert_eq!(clean.len(), entries.iter().filter(|(_, entry)| !entry.dirty).count());
        }
        assert_eq!(filled.entries().collect::<BTreeMap<_, _>>(), map.entries().collect(), "seed {seed}");
        assert_eq!((filled.blocks(), filled.dirty_blocks()), (map.blocks(), map.dirty_blocks()));
        assert!(filled.memory_bytes() <= filled.empty_bytes_max() + filled.grown_bytes(), "seed {seed}");
        // It goes on as any other.
        for key in map.entries().map(|(key, _)| key).collect::<Vec<_>>() {
            assert_eq!(filled.remove(key), map.get(key), "seed {seed}");
        }
        assert_eq!((filled.blocks(), filled.grown_bytes(), filled.payload_bytes()), (0, 0, 0));
    }
}

#[test]
fn groups_that_are_filled_as_they_are_on_flash_are_those_of_their_blocks() {
    for seed in 0..40 {
        let mut random = Random::from_seed(seed);
        let layout = layout([20_000, 70_000][random.index(2)]);
        let mut map = Map::new(&layout);
        for _ in 0..300 {
            let (group, first) = (16 * random.below(500), u32::try_from(random.below(19_000)).unwrap());
            let (from, to, dirty) = (random.below(8), 9 + random.below(8), random.one_in(2));
            for (n, slot) in (from..to).zip(first..) {
                map.put(Key::new(7, group + n), Entry { slot: Slot(slot), sectors: SECTORS_ALL, dirty });
            }
            map.put(Key::new(7, random.below(8000)), random_entry(&mut random, layout.slots));
        }
        let (mut whole, mut single) = (Map::new(&layout), Map::new(&layout));
        let mut plain_groups = 0;
        for part in 0..map.parts() {
            let payload = map.encode_part(part);
            let mut heads = Vec::new();
            heads_of(&layout, part, &payload, &mut heads).unwrap();
            let others: Vec<(Key, Entry)> = heads
                .iter()
                .filter(|head| !head.is_plain())
                .flat_map(|head| head.entries(&payload))
                .collect();
            heads.retain(Head::is_plain);
            plain_groups += heads.len();
            for head in &heads {
                let blocks: Vec<(Key, Entry)> = head.entries(&payload).collect();
                assert_eq!(
                    (head.cost(), head.blocks()),
                    (cost_of(&blocks), u32::try_from(blocks.len()).unwrap())
                );
                let mut numbers = [0; 16];
                let within = blocks.iter().map(|(_, entry)| entry.slot.within());
                assert!(head.numbers(&payload, &mut numbers).iter().copied().eq(within), "seed {seed}");
                assert_eq!(head.nth(blocks.len() - 1), blocks[blocks.len() - 1].0);
            }
            assert!(whole.fill_found(part, (&heads, &payload), &others), "seed {seed}");
            let entries = decode_part(&layout, part, &payload).unwrap();
            let groups = || entries.chunk_by(|(a, _), (b, _)| a.group() == b.group());
            assert!(single.fill(part, groups().count(), groups()), "seed {seed}");
            if let [.., last] = &heads[..] {
                let twice = [&heads[..], &[*last]].concat();
                assert!(!Map::new(&layout).fill_found(part, (&twice, &payload), &others), "a group twice");
                let blocks: Vec<(Key, Entry)> = last.entries(&payload).collect();
                assert!(!Map::new(&layout).fill_found(part, (&heads, &payload), &blocks), "in both ways");
            }
        }
        assert!(plain_groups > 100, "seed {seed}: {plain_groups}");
        let all = |map: &Map| map.entries().collect::<BTreeMap<_, _>>();
        assert_eq!(all(&whole), all(&map), "seed {seed}");
        let counts = |map: &Map| (map.blocks(), map.dirty_blocks(), map.grown_bytes(), map.payload_bytes());
        assert_eq!(counts(&whole), counts(&single), "seed {seed}");
        assert!(whole.memory_bytes() <= whole.empty_bytes_max() + whole.grown_bytes(), "seed {seed}");
        for key in map.entries().map(|(key, _)| key).collect::<Vec<_>>() {
            assert_eq!(whole.remove(key), map.get(key), "seed {seed}");
        }
        assert_eq!((whole.blocks(), whole.grown_bytes()), (0, 0), "seed {seed}");
    }
}

#[test]
fn what_no_cache_writes_is_refused() {
    let layout = layout(4000);
    let mut map = Map::new(&layout);
    let odd = Entry { slot: Slot(5), sectors: 1, dirty: true };
    map.put(Key::new(3, 32), Entry { slot: Slot(3999), sectors: SECTORS_ALL, dirty: false });
    map.put(Key::new(3, 33), odd);
    let payload = map.encode_part(0);
    assert_eq!(payload.len(), 16 + 2 + 5);
    let with = |at: usize, value: &[u8]| {
        let mut payload = payload.clone();
        payload[at..at + value.len()].copy_from_slice(value);
        decode_part(&layout, 0, &payload).map(|entries| entries.len())
    };
    assert_eq!(with(0, &[]), Some(2));
    assert_eq!(with(7, &[33]), None, "no group begins there");
    assert_eq!(with(0, &[4, 0]), None, "no row has this number");
    assert_eq!(with(8, &[0, 0]), None, "nothing is present");
    assert_eq!(with(10, &[0, 4]), None, "dirty, and not present");
    assert_eq!(with(12, &[0, 4]), None, "odd, and not present");
    assert_eq!(with(14, &[0, 1]), None, "a segment that is not there");
    assert_eq!(with(16, &[0x0F, 0xA0]), None, "a slot that is not there");
    assert_eq!(with(22, &[0]), None, "no sector");
}

#[test]
fn any_payload_is_read_or_refused() {
    let layout = layout(100);
    let mut map = Map::new(&layout);
    let mut random = Random::from_seed(1);
    for block in 0..40 {
        map.put(Key::new(0, block), random_entry(&mut random, 100));
    }
    let payload = map.encode_part(0);
    for _ in 0..20_000 {
        let mut payload = payload.clone();
        for _ in 0..=random.below(2) {
            let at = random.index(payload.len());
            payload[at] ^= 1 << random.below(8);
        }
        if let Some(entries) = decode_part(&layout, 0, &payload) {
            let mut map = Map::new(&layout);
            let count = entries.len() as u64;
            entries.into_iter().for_each(|(key, entry)| assert_eq!(map.put(key, entry), None));
            assert_eq!(map.blocks(), count);
        }
    }
}

#[test]
fn runs_of_blocks_are_found_by_either_way() {
    for seed in 0..40 {
        let mut random = Random::from_seed(seed);
        let layout = layout(20_000);
        let mut map = Map::new(&layout);
        for _ in 0..200 {
            map.put(Key::new(1, random.below(3000)), random_entry(&mut random, layout.slots));
        }
        map.put(Key::new(2, 0), random_entry(&mut random, layout.slots));
        for _ in 0..100 {
            let start = random.below(3000);
            let blocks = [1 + random.below(100), crate::layout::BLOCKS_MAX - start][random.index(2)];
            let wanted: Vec<Key> = map
                .entries()
                .map(|(key, _)| key)
                .filter(|key| key.row() == 1 && (start..start + blocks).contains(&key.block()))
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .collect();
            assert_eq!(map.keys_between(Key::new(1, start), blocks), wanted, "seed {seed}");
            for bits in map.groups_between(Key::new(1, start), blocks) {
                let dirty: Vec<Key> = bits.keys().filter(|key| map.get(*key).unwrap().dirty).collect();
                assert_eq!(bits.dirty_keys().collect::<Vec<_>>(), dirty, "seed {seed}");
            }
        }
    }
}

#[test]
fn the_hand_gives_up_what_was_not_seen_and_nothing_that_is_dirty() {
    let layout = layout(20_000);
    let mut map = Map::new(&layout);
    for block in 0..1000 {
        let dirty = block % 5 == 0;
        map.put(
            Key::new(1, block),
            Entry { slot: Slot(u32::try_from(block).unwrap()), sectors: SECTORS_ALL, dirty },
        );
        map.set_seen(Key::new(1, block), block % 2 == 0);
    }
    let first = map.sweep(1000, usize::MAX);
    assert_eq!(first.len(), 400);
    for key in first {
        assert!(key.block() % 2 == 1 && key.block() % 5 != 0, "{key:?}");
        map.remove(key);
    }
    // Now those that were seen have been passed, and go as well.
    let mut rounds = 0;
    while map.blocks() > map.dirty_blocks() {
        let some = map.sweep(7, 20);
        assert!(some.len() <= 7);
        for key in some {
            assert!(!map.remove(key).unwrap().dirty);
        }
        rounds += 1;
        assert!(rounds < 500);
    }
    assert_eq!((map.sweep(9, usize::MAX), map.blocks()), (vec![], 200));
}

#[test]
fn a_group_keeps_to_one_segment() {
    let layout = layout(200_000);
    let mut map = Map::new(&layout);
    let full = |slot| Entry { slot: Slot(slot), sectors: SECTORS_ALL, dirty: true };
    assert_eq!(map.segment_for(Key::new(1, 5)), None);
    map.put(Key::new(1, 5), full(70_000));
    assert_eq!(map.segment_for(Key::new(1, 6)), Some(1));
    map.put(Key::new(1, 6), full(140_000));
    map.remove(Key::new(1, 5));
    assert_eq!(map.segment_for(Key::new(1, 6)), None, "none that is left is in it");
    map.put(Key::new(1, 6), full(140_001));
    assert_eq!(map.segment_for(Key::new(1, 6)), Some(2));
}

/// Bytes for a full group, over caches that are filled in any order.
#[test]
fn a_full_group_takes_at_most_65_bytes_on_average() {
    let layout = layout(64 * 4096);
    let (mut least, mut most, mut sum, mut count) = (f64::MAX, 0.0_f64, 0.0, 0);
    let mut random = Random::from_seed(5);
    let mut map = Map::new(&layout);
    let mut groups = 0_u64;
    for round in 0..40 {
        // Groups of a quarter of a part each round, their blocks in random order among each other.
        let mut blocks: Vec<u64> = (groups * 16..(groups + 400) * 16).collect();
        for index in (1..blocks.len()).rev() {
            blocks.swap(index, random.index(index + 1));
        }
        for block in blocks {
            let slot = Slot(u32::try_from(block).unwrap() % layout.slots);
            map.put(Key::new(1, block), Entry { slot, sectors: SECTORS_ALL, dirty: false });
        }
        groups += 400;
        if round >= 10 {
            let each = map.memory_bytes() as f64 / groups as f64;
            (least, most, sum, count) = (least.min(each), most.max(each), sum + each, count + 1);
        }
    }
    let average = sum / f64::from(count);
    assert!(average <= 65.0 && most <= 70.0, "{least} to {most}, {average} on average");
}

#[test]
fn a_part_takes_its_share_in_any_encoding() {
    let layout = layout(4096);
    let mut map = Map::new(&layout);
    for n in 0..4096 {
        assert!(map.has_room(Key::new(1, n * 16)));
        map.put(
            Key::new(1, n * 16),
            Entry { slot: Slot(u32::try_from(n).unwrap()), sectors: 1, dirty: true },
        );
    }
    assert_eq!(map.encode_part(0).len(), 4096 * 21);
}

/// What is counted beside what is there, and what the dirty blocks alone may take.
fn counts_enough(map: &Map, why: &str) {
    let counted = map.empty_bytes_max() + map.grown_bytes();
    assert!(map.memory_bytes() <= counted, "{why}: {} bytes, {counted} counted", map.memory_bytes());
    let payload: usize = (0..map.parts()).map(|part| map.encode_part(part).len()).sum();
    assert_eq!(map.payload_bytes(), payload as u64, "{why}");
    let groups: usize = (0..map.parts()).map(|part| map.groups_in(part).count()).sum();
    assert_eq!(map.groups(), groups as u64, "{why}");
}

#[test]
fn what_is_counted_for_memory_is_never_less_than_what_is_there() {
    for seed in 0..24 {
        let mut random = Random::from_seed(seed);
        let layout = layout([5000, 40_000][random.index(2)]);
        let mut map = Map::new(&layout);
        let blocks = [2000, 20_000, 1 << 40][random.index(3)];
        let stride = [1, 1, 16][random.index(3)];
        let mut keys: Vec<Key> = Vec::new();
        let (mut dirty_cost, mut most) = (0, 0);
        for step in 0..24_000 {
            let why = format!("seed {seed}, step {step}");
            let grows = if step / 4000 % 2 == 0 { 9 } else { 2 };
            let is_put = keys.is_empty() || random.below(10) < grows;
            let changed = if is_put && keys.len() < layout.slots as usize - 1 {
                let key = Key::new(1, random.below(blocks) * stride);
                keys.push(key);
                let before = map.grown_bytes() + map.payload_bytes();
                let changed = map.put_in(key, random_entry(&mut random, layout.slots));
                let grown = (map.grown_bytes() + map.payload_bytes()).saturating_sub(before);
                assert!(grown + DIRTY_GROUP_COST <= DIRTY_COST_MAX, "{why}: a block adds {grown}");
                changed
            } else {
                // By regions too, so that pages become sparse.
                let key = keys.swap_remove(random.index(keys.len()));
                map.take_out(key)
            };
            assert!(changed.cost <= changed.cost_before + DIRTY_COST_MAX, "{why}");
            dirty_cost = dirty_cost + changed.cost - changed.cost_before;
            most = most.max(map.memory_bytes());
            if step % 997 == 0 {
                counts_enough(&map, &why);
                let all: u64 =
                    (0..map.parts()).flat_map(|part| map.dirty_costs_in(part)).map(|(_, c)| c).sum();
                assert_eq!(all, dirty_cost, "{why}");
            }
        }
        counts_enough(&map, &format!("seed {seed}, at the end"));
        // Without its clean blocks it has grown by no more than what the dirty ones may cost.
        let clean: Vec<Key> = map.entries().filter(|(_, entry)| !entry.dirty).map(|(key, _)| key).collect();
        for key in clean {
            map.remove(key);
        }
        let groups = map.groups() * DIRTY_GROUP_COST;
        assert!(map.grown_bytes() + map.payload_bytes() + groups <= dirty_cost, "seed {seed}");
        counts_enough(&map, &format!("seed {seed}, without clean blocks"));
    }
}

#[test]
fn groups_of_few_blocks_that_are_clean_are_given_up_first() {
    let layout = layout(20_000);
    let mut map = Map::new(&layout);
    let mut slot = 0;
    let mut put = |map: &mut Map, block: u64, dirty: bool| {
        slot += 1;
        map.put(Key::new(1, block), Entry { slot: Slot(slot), sectors: SECTORS_ALL, dirty });
    };
    for group in 0..100 {
        // Whole ones, pairs, lone ones, and lone ones that are dirty.
        let blocks = match group % 4 {
            0 => 16,
            1 => 2,
            _ => 1,
        };
        for block in 0..blocks {
            put(&mut map, group * 16 + block, group % 4 == 3);
        }
    }
    map.set_seen(Key::new(1, 2 * 16), true);
    let lone = map.sparse(24 * 55, 1000, usize::MAX);
    assert_eq!(lone.len(), 24);
    assert!(
        lone.iter().all(|key| key.block() % 64 == 32 && key.block() != 32),
        "the one that was seen stays"
    );
    for key in map.sparse(u64::MAX, 1000, usize::MAX) {
        assert!(!map.remove(key).unwrap().dirty);
    }
    assert_eq!((map.blocks(), map.dirty_blocks(), map.groups()), (25, 25, 25));
    assert_eq!(map.sparse(u64::MAX, 1000, usize::MAX), []);
}
