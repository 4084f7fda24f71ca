//! An opening with less memory than the map takes: what it reads, what it has in memory, what it writes, and what is there
//! afterwards, also after a crash.

mod common;
use vellum_flash as flash;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use common::{ID, SECRET, over};
use futures_lite::future::block_on;
use vellum_core::{
    BlockSize, Buffer, Disk, GuestOffset, ImageOffset, ImageSpan, Limits, LocalFuture, MemoryDisk,
    MemoryStorage, Random, Result, SharedStorage, Storage, StorageRun, WriteFlags, Zeroes,
};
use vellum_flash::{FlashCache, FlashDisk, FlashOptions};

const CACHE_BYTES: u64 = 100 << 20;
/// A lone dirty block counts for at most this much.
const LONE: u64 = 104;
const GROUPS: u64 = 9000;

fn options(memory: Option<u64>) -> FlashOptions {
    FlashOptions { memory_bytes_max: memory, fetched_bytes_max: 1 << 20, ..common::options(1) }
}

async fn created() -> Arc<MemoryStorage> {
    let storage = MemoryStorage::new("flash");
    storage.set_len(CACHE_BYTES).await.unwrap();
    let shared: SharedStorage = storage.clone();
    flash::create(&shared, CACHE_BYTES, ID, SECRET).await.unwrap();
    storage
}

async fn copy_of(storage: &SharedStorage) -> SharedStorage {
    let copy: SharedStorage = MemoryStorage::new("copy");
    copy.set_len(storage.len()).await.unwrap();
    let mut at = 0;
    while at < storage.len() {
        let len = (1 << 20).min(storage.len() - at);
        let offset = vellum_core::ImageOffset::new(at);
        let buffer = Buffer::for_overwrite(usize::try_from(len).unwrap());
        copy.write(offset, storage.read(offset, buffer).await.unwrap()).await.unwrap();
        at += len;
    }
    copy
}

/// What a cache takes in which there is nothing.
fn empty_bytes() -> u64 {
    block_on(async {
        let storage: SharedStorage = created().await;
        FlashCache::open(storage, options(None)).await.unwrap().facts().budget_used_bytes
    })
}

/// A storage that transfers in units of this size, and notes what is read.
struct Noting {
    inner: SharedStorage,
    limits: Limits,
    reads: Mutex<Vec<(u64, u64)>>,
}

impl Storage for Noting {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.reads.lock().unwrap().push((at.bytes(), buffer.len() as u64));
        self.inner.read(at, buffer)
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        self.inner.write(at, data)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.inner.write_zeroes(span, how)
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.inner.discard(span)
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.inner.set_len(len)
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.inner.preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.inner.runs(span)
    }
}

async fn write(disk: &FlashDisk, block: u64, blocks: usize, value: u8) {
    let data = Buffer::copy_of(&vec![value; blocks * 4096]);
    disk.write(GuestOffset::new(block * 4096), data, WriteFlags::default()).await.unwrap();
}

async fn read(disk: &dyn Disk, block: u64) -> Vec<u8> {
    disk.read(GuestOffset::new(block * 4096), Buffer::zeroed(4096)).await.unwrap().to_vec()
}

/// A cache with lone blocks, and some full groups, of which one in ten is dirty; and its home.
struct Filled {
    storage: SharedStorage,
    home: Arc<MemoryDisk>,
    model: BTreeMap<u64, u8>,
    blocks: u64,
    dirty: u64,
}

fn filled(seed: u64) -> Filled {
    let mut random = Random::from_seed(seed);
    let home = MemoryDisk::new(GROUPS * 64 * 4096);
    block_on(async {
        let storage: SharedStorage = created().await;
        let cache = FlashCache::open(storage.clone(), options(None)).await.unwrap();
        let disk = over(&cache, 1, home.clone()).await.unwrap();
        let mut model = BTreeMap::new();
        for round in 0..2 {
            for _ in 0..if round == 0 { GROUPS * 9 / 10 } else { GROUPS / 10 } {
                let (group, value) = (random.below(GROUPS * 4), 1 + u8::try_from(random.below(250)).unwrap());
                let (first, blocks) =
                    if random.one_in(12) { (group * 16, 16) } else { (group * 16 + random.below(16), 1) };
                write(&disk, first, blocks, value).await;
                model.extend((first..first + blocks as u64).map(|block| (block, value)));
            }
            if round == 0 {
                disk.drain().await.unwrap();
            }
        }
        disk.keep_at_close(true);
        disk.close().await.unwrap();
        let facts = cache.facts();
        cache.close().await.unwrap();
        assert!(facts.parts >= 6, "{facts:?}");
        Filled { storage, home: home.reopened(), model, blocks: facts.blocks, dirty: facts.dirty_blocks }
    })
}

async fn is_right(disk: &dyn Disk, model: &BTreeMap<u64, u8>, why: &str) {
    for (block, value) in model {
        assert_eq!(read(disk, *block).await, [*value; 4096], "{why}: block {block}");
    }
}

#[test]
fn it_has_no_more_in_memory_than_the_budget_and_reads_each_slice_once() {
    let filled = filled(1);
    let empty = empty_bytes();
    let usual =
        block_on(async { FlashCache::open(copy_of(&filled.storage).await, options(None)).await.unwrap() });
    let (all, opened) = (usual.facts(), usual.opened());
    assert_eq!((opened.given_up, opened.slices_written), (0, 0));
    assert_eq!((opened.slices_read, usual.counts().records), (all.parts.into(), 0), "and nothing is written");
    let needed = all.budget_used_bytes - empty;
    // The most that dirty blocks take is less than each of these budgets.
    for percent in [100, 95, 70, 40, 25] {
        let budget = empty + (needed * percent).div_ceil(100).max(filled.dirty * LONE);
        block_on(async {
            let why = format!("{percent} %");
            let storage = copy_of(&filled.storage).await;
            let cache = FlashCache::open(storage.clone(), options(Some(budget))).await.unwrap();
            let (facts, opened) = (cache.facts(), cache.opened());
            assert!(opened.bytes_max <= facts.budget_bytes, "{why}: {opened:?}, {facts:?}");
            assert!(facts.budget_used_bytes <= facts.budget_bytes, "{why}: {facts:?}");
            assert_eq!(
                (facts.dirty_blocks, facts.blocks + opened.given_up),
                (filled.dirty, filled.blocks),
                "{why}"
            );
            assert_eq!(opened.slices_read, u64::from(facts.parts), "{why}");
            assert_eq!(
                (opened.given_up > 0, opened.slices_written > 0),
                (percent < 100, percent < 100),
                "{why}"
            );
            assert!(opened.slices_written <= u64::from(facts.parts), "{why}: {opened:?}");
            // One to have the slices copied, one to take the copies along: there are not more than 64.
            assert_eq!(cache.counts().records, if percent < 100 { 2 } else { 0 }, "{why}");
            assert_eq!(facts.free_slots + facts.blocks, facts.slots, "{why}: what was left out is free");
            // What is left is worth its memory: nearly all of it is used.
            let used = facts.budget_used_bytes - empty;
            assert!(used * 100 >= (budget - empty) * 90, "{why}: {used} of {}", budget - empty);
            let home = filled.home.reopened();
            let disk = over(&cache, 1, home).await.unwrap();
            is_right(&*disk, &filled.model, &why).await;
        });
    }
}

/// Of each slice both heads, and the rest of the one that counts, as long as it is; and all of the ring, once.
#[test]
fn it_reads_no_more_of_the_map_than_there_is() {
    const SLICES_AT: u64 = 8192;
    const PLACE: u64 = 90_112;
    let filled = filled(7);
    for unit in [1, 512, 1024, 4096] {
        block_on(async {
            let storage = copy_of(&filled.storage).await;
            // An opening with less memory writes slices.
            let budget = empty_bytes() + filled.dirty * LONE * 2;
            drop(FlashCache::open(storage.clone(), options(Some(budget))).await.unwrap());
            let limits = Limits { block_size: BlockSize::from_bytes(unit).unwrap(), ..Limits::plain() };
            let noting = Arc::new(Noting { inner: storage.clone(), limits, reads: Mutex::default() });
            let cache = FlashCache::open(noting.clone(), options(None)).await.unwrap();
            let facts = cache.facts();
            let ring_at = SLICES_AT + (u64::from(facts.parts) + 1) * 2 * PLACE;
            let unit = unit.max(512);
            let mut wanted: Vec<(u64, u64)> = Vec::new();
            let mut longer = 0;
            for slice in 0..=u64::from(facts.parts) {
                let mut best = (0, 0, 0);
                for at in [0, 1].map(|place| SLICES_AT + (2 * slice + place) * PLACE) {
                    wanted.push((at, unit));
                    let head = storage.read(ImageOffset::new(at), Buffer::zeroed(64)).await.unwrap().to_vec();
                    let as_of = u64::from_be_bytes(head[32..40].try_into().unwrap());
                    let len = 64 + u64::from(u32::from_be_bytes(head[40..44].try_into().unwrap()));
                    if head.starts_with(b"VELLUMF2") && as_of >= best.0 {
                        best = (as_of, at, len);
                    }
                }
                let (_, at, len) = best;
                if len > unit {
                    wanted.push((at + unit, len.next_multiple_of(unit) - unit));
                    longer += 1;
                }
            }
            assert!(longer >= 5, "{longer} slices of {} have much in them", facts.parts);
            let reads = noting.reads.lock().unwrap().clone();
            let mut of_map: Vec<(u64, u64)> =
                reads.iter().copied().filter(|(at, _)| (SLICES_AT..ring_at).contains(at)).collect();
            of_map.sort_unstable();
            wanted.sort_unstable();
            assert_eq!(of_map, wanted, "units of {unit}");
            let of_ring: u64 = reads
                .iter()
                .filter(|(at, _)| (ring_at..ring_at + facts.ring_bytes).contains(at))
                .map(|(_, len)| *len)
                .sum();
            assert_eq!(of_ring, facts.ring_bytes, "units of {unit}");
        });
    }
}

/// Dirty blocks that come late, when clean ones have taken the memory: those make room.
#[test]
fn dirty_blocks_that_take_more_than_the_budget_stay_and_no_clean_one_does() {
    let filled = filled(2);
    let budget = empty_bytes() + filled.dirty * LONE / 8;
    block_on(async {
        let cache = FlashCache::open(filled.storage.clone(), options(Some(budget))).await.unwrap();
        let (facts, opened) = (cache.facts(), cache.opened());
        assert_eq!((facts.dirty_blocks, facts.blocks), (filled.dirty, filled.dirty));
        assert_eq!(opened.given_up, filled.blocks - filled.dirty);
        let disk = over(&cache, 1, filled.home.reopened()).await.unwrap();
        is_right(&*disk, &filled.model, "more is dirty than there is memory").await;
    });
}

/// The process ends without a word after slots that were given up have got other blocks.
#[test]
fn slots_that_were_given_up_get_other_blocks_and_a_crash_finds_those_alone() {
    for seed in 3..6 {
        let filled = filled(seed);
        let budget = empty_bytes() + filled.dirty * LONE * 2;
        let mut model = filled.model.clone();
        let mut random = Random::from_seed(seed);
        block_on(async {
            let mut home = filled.home.reopened();
            for round in 0..3 {
                let cache = FlashCache::open(filled.storage.clone(), options(Some(budget))).await.unwrap();
                assert!(round > 0 || cache.opened().given_up > 1000, "{:?}", cache.opened());
                let disk = over(&cache, 1, home.clone()).await.unwrap();
                is_right(&*disk, &model, &format!("seed {seed}, round {round}")).await;
                for _ in 0..400 {
                    let (block, value) =
                        (random.below(GROUPS * 64), 1 + u8::try_from(random.below(250)).unwrap());
                    write(&disk, block, 1, value).await;
                    model.insert(block, value);
                }
                disk.flush().await.unwrap();
                // No close: a kill.
                drop(disk);
                drop(cache);
                home = home.reopened();
                let mut said = Vec::new();
                let errors = flash::check(&filled.storage, &mut |line| said.push(line)).await.unwrap();
                assert_eq!(errors, 0, "seed {seed}, round {round}: {said:?}");
            }
        });
    }
}
