//! The disk suite of `vellum-core` over caches of a few slots and of many, with and without background work; and
//! with dirty blocks that stay on flash at each close.

mod common;
use vellum_flash as flash;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use common::{Owner, cache_on, over_with};
use futures_lite::future::block_on;
use vellum_core::contract::{self, DiskFixture};
use vellum_core::{
    CheckedDisk, GuestOffset, LocalFuture, MemoryDisk, MemoryStorage, Result, SharedDisk, SharedStorage,
};

struct Cached {
    slots: u64,
    tends: bool,
    keeps: bool,
    policy: vellum_flash::FlashPolicy,
    base: Option<Vec<u8>>,
    made: RefCell<Option<(Arc<MemoryStorage>, Arc<MemoryDisk>)>>,
}

impl Cached {
    fn new(slots: u64, tends: bool, keeps: bool, has_base: bool) -> Self {
        let base = has_base.then(|| (0..700_001u32).map(|i| u8::try_from(i % 253 + 1).unwrap()).collect());
        let policy = vellum_flash::FlashPolicy::WriteBack;
        Self { slots, tends, keeps, policy, base, made: RefCell::default() }
    }

    async fn open(&self) -> Result<SharedDisk> {
        let (flash, home) = self.made.borrow().clone().expect("made before");
        let flash = flash as SharedStorage;
        let cache = cache_on(&flash, self.slots, 1).await?;
        let disk = over_with(&cache, 1, CheckedDisk::new(home), self.policy).await?;
        let keeps = self.keeps.then(|| disk.clone());
        let owner = Owner { cache, disk, tends: self.tends, keeps, now: AtomicU64::new(0) };
        Ok(CheckedDisk::new(Arc::new(owner)))
    }
}

impl DiskFixture for Cached {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let below = self.base.as_ref().map(|base| MemoryDisk::holding(base) as SharedDisk);
            *self.made.borrow_mut() = Some((MemoryStorage::new("flash"), MemoryDisk::over(size, below)));
            self.open().await
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let (flash, home) = self.made.borrow().clone().expect("made before");
            let flash = MemoryStorage::with("flash", vellum_core::Limits::plain(), flash.content());
            *self.made.borrow_mut() = Some((flash, home.reopened()));
            self.open().await
        })
    }

    fn fresh_content(&self, size: u64) -> Vec<u8> {
        let mut content = self.base.clone().unwrap_or_default();
        content.resize(usize::try_from(size).unwrap(), 0);
        content
    }
}

fn suite(slots: u64, tends: bool, keeps: bool) {
    for has_base in [false, true] {
        block_on(contract::disk(&Cached::new(slots, tends, keeps, has_base)));
    }
}

#[test]
fn few_slots() {
    suite(9, false, false);
}

#[test]
fn few_slots_with_background_work() {
    suite(13, true, false);
}

#[test]
fn one_slot() {
    block_on(contract::disk_random_operations(&Cached::new(1, true, false, true), 1 << 18, 5, 200));
}

#[test]
fn slots_for_a_part_of_the_disk() {
    suite(100, true, true);
}

#[test]
fn slots_for_all() {
    suite(1000, false, false);
}

#[test]
fn dirty_blocks_that_stay() {
    suite(1000, true, true);
}

#[test]
fn written_through() {
    let policy = vellum_flash::FlashPolicy::WriteThrough;
    for (slots, tends) in [(9, false), (13, true), (100, true), (1000, false)] {
        for has_base in [false, true] {
            block_on(contract::disk(&Cached { policy, ..Cached::new(slots, tends, false, has_base) }));
        }
    }
    for seed in 0..6 {
        let fixture = Cached { policy, ..Cached::new(20 + 60 * seed, seed % 2 == 0, false, seed % 2 == 1) };
        block_on(contract::disk_random_operations(&fixture, (1 << 20) + 512 * seed, 100 + seed, 600));
    }
}

#[test]
fn long_random_operations() {
    for seed in 0..6 {
        let fixture = Cached::new(20 + 60 * seed, seed % 2 == 0, seed % 3 == 0, seed % 2 == 1);
        block_on(contract::disk_random_operations(&fixture, (1 << 20) + 512 * seed, 100 + seed, 600));
    }
}

#[test]
fn a_cache_that_was_closed_has_it_still_and_home_has_it_all() {
    let fixture = Cached::new(64, false, false, false);
    block_on(async {
        let disk = fixture.fresh(1 << 18).await.unwrap();
        let data = vellum_core::Buffer::copy_of(&[9; 8192]);
        disk.write(GuestOffset::new(4096), data, vellum_core::WriteFlags::default()).await.unwrap();
        disk.close().await.unwrap();
        let (_, home) = fixture.made.borrow().clone().unwrap();
        let home: SharedDisk = home.reopened();
        let found = home.read(GuestOffset::new(4096), vellum_core::Buffer::zeroed(8192)).await.unwrap();
        assert!(found.to_vec().iter().all(|byte| *byte == 9));
        let disk = fixture.reopen().await.unwrap();
        let found = disk.read(GuestOffset::new(4096), vellum_core::Buffer::zeroed(8192)).await.unwrap();
        assert!(found.to_vec().iter().all(|byte| *byte == 9));
    });
}

#[test]
fn zeros_over_parts_of_blocks() {
    let fixture = Cached::new(64, false, false, false);
    block_on(async {
        let disk = fixture.fresh(1 << 18).await.unwrap();
        let mut model = vec![0u8; 1 << 18];
        let check = async |disk: &SharedDisk, model: &[u8], what: &str| {
            let found =
                disk.read(GuestOffset::ZERO, vellum_core::Buffer::zeroed(1 << 18)).await.unwrap().to_vec();
            let differs: Vec<usize> = (0..model.len()).filter(|at| found[*at] != model[*at]).collect();
            assert!(
                differs.is_empty(),
                "{what}: {} from {:?} to {:?}",
                differs.len(),
                differs.first(),
                differs.last()
            );
        };
        let all = GuestOffset::ZERO.span(65536);
        disk.write_zeroes(all, vellum_core::ZeroFlags::default()).await.unwrap();
        let data = vellum_core::Buffer::copy_of(&[8; 5000]);
        disk.write(GuestOffset::new(10_000), data, vellum_core::WriteFlags::default()).await.unwrap();
        model[10_000..15_000].fill(8);
        check(&disk, &model, "write").await;
        disk.write_zeroes(GuestOffset::new(9_000).span(3_000), vellum_core::ZeroFlags::default())
            .await
            .unwrap();
        model[9_000..12_000].fill(0);
        check(&disk, &model, "zeroes").await;
    });
}
