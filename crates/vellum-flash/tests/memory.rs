//! The memory of a cache stays within its budget, whatever the guests do, and what is in it is right all the same.

mod common;
use vellum_flash as flash;

use std::sync::Arc;
use std::time::Duration;

use common::{ID, SECRET, over};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, MemoryDisk, MemoryStorage, Random, SharedStorage, WriteFlags,
};
use vellum_flash::{FlashCache, FlashDisk, FlashOptions};

const CACHE_BYTES: u64 = 40 << 20;
/// A lone dirty block counts for at most this much.
const LONE: u64 = 104;

async fn storage() -> SharedStorage {
    let storage: SharedStorage = MemoryStorage::new("flash");
    storage.set_len(CACHE_BYTES).await.unwrap();
    vellum_flash::create(&storage, CACHE_BYTES, ID, SECRET).await.unwrap();
    storage
}

fn options(memory: Option<u64>) -> FlashOptions {
    FlashOptions { memory_bytes_max: memory, fetched_bytes_max: 1 << 20, ..common::options(1) }
}

/// What a cache takes in which there is nothing.
async fn empty_bytes() -> u64 {
    FlashCache::open(storage().await, options(None)).await.unwrap().facts().budget_used_bytes
}

fn write(disk: &FlashDisk, block: u64, value: u8) {
    let data = Buffer::copy_of(&[value; 4096]);
    block_on(disk.write(GuestOffset::new(block * 4096), data, WriteFlags::default())).unwrap();
}

fn read(disk: &dyn Disk, block: u64) -> Vec<u8> {
    block_on(disk.read(GuestOffset::new(block * 4096), Buffer::zeroed(4096))).unwrap().to_vec()
}

fn is_within(cache: &FlashCache, why: &str) {
    let facts = cache.facts();
    assert!(
        facts.budget_used_bytes <= facts.budget_bytes,
        "{why}: {} bytes of {}",
        facts.budget_used_bytes,
        facts.budget_bytes
    );
    assert!(facts.memory_bytes <= facts.budget_used_bytes, "{why}: more is there than is counted");
}

#[test]
fn lone_blocks_that_are_written_and_read_stay_within_the_budget() {
    for seed in 0..3 {
        let mut random = Random::from_seed(seed);
        // Room for 600 of 8000 groups.
        let budget = block_on(empty_bytes()) + 600 * LONE;
        let cache =
            block_on(async { FlashCache::open(storage().await, options(Some(budget))).await.unwrap() });
        let blocks = 16 * 8000;
        let home = MemoryDisk::new(blocks * 4096);
        let disk = block_on(over(&cache, 1, home.clone())).unwrap();
        let mut model = std::collections::BTreeMap::new();
        let (mut now, mut most) = (0, 0);
        for step in 0..12_000 {
            let why = format!("seed {seed}, step {step}");
            let block = random.below(8000) * 16 + random.below(2) * random.below(16);
            match random.below(10) {
                0..6 => {
                    let value = u8::try_from(random.below(255) + 1).unwrap();
                    write(&disk, block, value);
                    model.insert(block, value);
                }
                6..9 => {
                    let wanted = model.get(&block).copied().unwrap_or(0);
                    assert_eq!(read(&*disk, block), [wanted; 4096], "{why}, block {block}");
                }
                _ => block_on(disk.flush()).unwrap(),
            }
            if step % 50 == 0 {
                now += 1;
                block_on(cache.tend(Duration::from_secs(now)));
            }
            is_within(&cache, &why);
            most = most.max(cache.facts().blocks);
        }
        assert!(most >= 400, "the budget is used: {most} blocks");
        assert!(disk.counts().written_home > 1000 && disk.counts().admitted > 0, "{:?}", disk.counts());
        for (block, value) in &model {
            assert_eq!(read(&*disk, *block), [*value; 4096], "seed {seed}, block {block}");
        }
        block_on(disk.close()).unwrap();
        let home = home.reopened();
        for (block, value) in &model {
            assert_eq!(read(&*home, *block), [*value; 4096], "seed {seed}, block {block} at home");
        }
        block_on(cache.close()).unwrap();
    }
}

#[test]
fn full_groups_need_no_more_than_the_usual_budget() {
    let cache = block_on(async { FlashCache::open(storage().await, common::options(1)).await.unwrap() });
    let slots = cache.facts().slots;
    let disk = block_on(over(&cache, 1, MemoryDisk::new(slots * 4096))).unwrap();
    let empty = cache.facts();
    for first in (0..slots / 2 / 256).map(|part| part * 256) {
        let data = Buffer::copy_of(&vec![7; 1 << 20]);
        block_on(disk.write(GuestOffset::new(first * 4096), data, WriteFlags::default())).unwrap();
    }
    let facts = cache.facts();
    assert_eq!(
        (facts.dirty_blocks, disk.counts().written_home),
        (slots / 2 / 256 * 256, 0),
        "all stays here"
    );
    block_on(disk.drain()).unwrap();
    let (more, cached) = (cache.facts().memory_bytes - empty.memory_bytes, facts.blocks * 4096);
    assert!(more * 1000 <= cached, "{more} bytes of memory for {cached}: at most 0.10 %");
    // The whole cache, and more: what takes slots is given up for slots alone.
    for first in (0..slots / 256).map(|part| part * 256) {
        let data = Buffer::copy_of(&vec![9; 1 << 20]);
        block_on(disk.write(GuestOffset::new(first * 4096), data, WriteFlags::default())).unwrap();
    }
    assert!(cache.facts().blocks + 512 >= slots * 3 / 4, "{:?}", cache.facts());
    block_on(disk.close()).unwrap();
}

/// What was cached with much memory is opened with little.
#[test]
fn a_cache_that_has_more_than_the_budget_is_opened_without_loss() {
    let storage = block_on(storage());
    let blocks = 16 * 2000;
    let home = MemoryDisk::new(blocks * 4096);
    block_on(async {
        let cache = FlashCache::open(storage.clone(), options(None)).await.unwrap();
        let disk = over(&cache, 1, home.clone()).await.unwrap();
        for group in 0..2000 {
            write(&disk, group * 16, 5);
            if group == 1500 {
                disk.drain().await.unwrap();
            }
        }
        disk.keep_at_close(true);
        disk.close().await.unwrap();
        cache.close().await.unwrap();
    });
    let budget = block_on(empty_bytes()) + 600 * LONE;
    let home = home.reopened();
    block_on(async {
        let cache = FlashCache::open(storage.clone(), options(Some(budget))).await.unwrap();
        is_within(&cache, "opened");
        let facts = cache.facts();
        assert_eq!(facts.dirty_blocks, 499, "nothing that is dirty is given up");
        assert!(facts.blocks < 1200, "{} blocks", facts.blocks);
        let disk = over(&cache, 1, home.clone()).await.unwrap();
        for group in 0..2000 {
            assert_eq!(read(&*disk, group * 16), [5; 4096]);
        }
        disk.keep_at_close(true);
        disk.close().await.unwrap();
        cache.close().await.unwrap();
    });
    // Less than what is dirty: it stays, and goes home as soon as something is written.
    let budget = block_on(empty_bytes()) + 100 * LONE;
    let home = home.reopened();
    block_on(async {
        let cache = FlashCache::open(storage.clone(), options(Some(budget))).await.unwrap();
        let facts = cache.facts();
        assert_eq!((facts.dirty_blocks, facts.blocks), (499, 499));
        assert!(facts.budget_used_bytes > facts.budget_bytes);
        let disk = over(&cache, 1, home.clone()).await.unwrap();
        write(&disk, 7, 8);
        is_within(&cache, "after a write");
        for group in 0..2000 {
            assert_eq!(read(&*disk, group * 16), [5; 4096]);
        }
        disk.close().await.unwrap();
        cache.close().await.unwrap();
    });
    let home = home.reopened();
    assert!((0..2000).all(|group| read(&*home, group * 16) == [5; 4096]));
    assert_eq!(read(&*home, 7), [8; 4096]);
}

#[test]
fn a_budget_that_is_too_small_is_refused_and_says_what_is_needed() {
    let least = block_on(empty_bytes()) + 8 * LONE;
    block_on(async {
        let refused = FlashCache::open(storage().await, options(Some(least - 1))).await;
        let error = refused.err().expect("it is too little");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.chain().contains(&least.to_string()), "{}", error.chain());
        let cache = FlashCache::open(storage().await, options(Some(least))).await.unwrap();
        let disk = over(&cache, 1, MemoryDisk::new(1 << 24)).await.unwrap();
        for block in 0..100 {
            write(&disk, block * 16, 3);
            is_within(&cache, "the least");
        }
        disk.close().await.unwrap();
        let _kept: Arc<FlashCache> = cache;
    });
}
