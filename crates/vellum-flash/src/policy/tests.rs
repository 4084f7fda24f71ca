//! Each policy names what it may, forgets what it must, and stays within its bounds.

use std::collections::BTreeSet;

use vellum_core::Random;

use super::*;
use crate::layout::{Layout, SECTORS_ALL, Slot};
use crate::map::Entry;

fn map(slots: u32) -> Map {
    Map::new(&Layout::new(slots, 1 << 20, 3).unwrap())
}

const fn entry(dirty: bool) -> Entry {
    Entry { slot: Slot(0), sectors: SECTORS_ALL, dirty }
}

fn key(block: u64) -> Key {
    Key::new(1, block)
}

/// Uses a block as a cache of `blocks` blocks does. Whether it was there.
fn use_block(map: &mut Map, policy: &mut dyn Policy, blocks: u64, key: Key) -> bool {
    if map.get(key).is_some() {
        policy.used(map, key, false);
        return true;
    }
    while map.blocks() >= blocks {
        for victim in policy.victims(map, 1) {
            map.remove(victim).unwrap();
        }
    }
    map.put(key, entry(false));
    policy.used(map, key, true);
    false
}

/// Uses blocks in order, with a cache of 1000.
fn use_all(map: &mut Map, policy: &mut dyn Policy, blocks: std::ops::Range<u64>) {
    for block in blocks {
        use_block(map, policy, 1000, key(block));
    }
}

#[test]
fn only_clean_cached_blocks_are_named_and_all_of_them_in_the_end() {
    for kind in Replacement::ALL {
        for seed in 0..30 {
            let mut random = Random::from_seed(seed);
            let keys_max = [8, 100, 5000][random.index(3)];
            let (mut map, mut policy) = (map(5000), kind.policy(keys_max));
            for _ in 0..5000 {
                let key = key(random.below(2000));
                match random.below(8) {
                    0 => {
                        map.remove(key);
                    }
                    1 => map.set_dirty(key, random.one_in(2)),
                    2 if map.get(key).is_some() => policy.demoted(&mut map, key),
                    3 => {
                        let most = 1 + random.index(9);
                        let named = policy.victims(&mut map, most);
                        assert!(named.len() <= most);
                        let distinct: BTreeSet<Key> = named.iter().copied().collect();
                        assert_eq!(distinct.len(), named.len(), "{kind:?}, seed {seed}");
                        for key in named {
                            assert!(!map.get(key).unwrap().dirty, "{kind:?}, seed {seed}");
                            // Some are claimed, and stay.
                            if random.below(4) > 0 {
                                map.remove(key);
                            }
                        }
                    }
                    _ => {
                        let is_new = map.put(key, entry(random.one_in(3))).is_none();
                        policy.used(&mut map, key, is_new);
                    }
                }
            }
            let mut rounds = 0;
            while map.blocks() > map.dirty_blocks() {
                for key in policy.victims(&mut map, 50) {
                    map.remove(key).unwrap();
                }
                rounds += 1;
                assert!(rounds < 500, "{kind:?}, seed {seed}: {} are never named", map.blocks());
            }
            assert!(policy.victims(&mut map, 50).is_empty(), "{kind:?}, seed {seed}");
        }
    }
}

#[test]
fn lru_names_what_was_unused_for_longest() {
    let (mut map, mut policy) = (map(100), Replacement::Lru.policy(100));
    for block in 0..10 {
        use_block(&mut map, &mut *policy, 100, key(block));
    }
    use_block(&mut map, &mut *policy, 100, key(0));
    policy.demoted(&mut map, key(7));
    map.set_dirty(key(1), true);
    assert_eq!(policy.victims(&mut map, 4), [7, 2, 3, 4].map(key));
}

#[test]
fn lru_with_a_short_list_gives_up_what_is_not_in_it_first() {
    let (mut map, mut policy) = (map(100), Replacement::Lru.policy(3));
    for block in 0..10 {
        use_block(&mut map, &mut *policy, 100, key(block));
    }
    let first: BTreeSet<Key> = policy.victims(&mut map, 7).into_iter().collect();
    assert_eq!(first, (0..7).map(key).collect());
    for key in first {
        map.remove(key);
    }
    assert_eq!(policy.victims(&mut map, 9), [7, 8, 9].map(key));
}

#[test]
fn s3_fifo_keeps_what_is_used_from_a_scan() {
    let (mut map, mut policy) = (map(1000), Replacement::S3Fifo.policy(1000));
    let hot = 0..500;
    for _ in 0..3 {
        use_all(&mut map, &mut *policy, hot.clone());
    }
    use_all(&mut map, &mut *policy, 10_000..30_000);
    let stayed = hot.filter(|block| map.get(key(*block)).is_some()).count();
    assert!(stayed > 480, "{stayed} of 500");
}

#[test]
fn s3_fifo_knows_what_it_gave_up_too_early() {
    let (mut map, mut policy) = (map(1000), Replacement::S3Fifo.policy(1000));
    // Twice round a loop that is a little longer than the cache, then a scan.
    for _ in 0..3 {
        use_all(&mut map, &mut *policy, 0..1100);
    }
    use_all(&mut map, &mut *policy, 10_000..12_000);
    assert!((0..1100).filter(|block| map.get(key(*block)).is_some()).count() > 500);
}

#[test]
fn memory_is_bounded() {
    for kind in Replacement::ALL {
        let (mut map, mut policy) = (map(100_000), kind.policy(1000));
        for block in 0..50_000 {
            use_block(&mut map, &mut *policy, 100_000, key(block));
        }
        let bytes = policy.memory_bytes();
        assert!(bytes <= 64 * 1000, "{kind:?}: {bytes}");
    }
}

#[test]
fn names_are_read_as_they_are_written() {
    for kind in Replacement::ALL {
        assert_eq!(kind.name().parse::<Replacement>().unwrap(), kind);
    }
    assert!("fifo".parse::<Replacement>().unwrap_err().to_string().contains("s3-fifo"));
}
