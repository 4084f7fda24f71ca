//! The drive keeps the storage contract, however slow, small or stubborn it is. What forwards keeps the
//! contract of what it forwards to.

mod common;

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use common::any_order;
use vellum_core::contract::{self, DiskFixture, StorageFixture};
use vellum_core::{
    BlockSize, Disk, Limits, LocalFuture, MemoryDisk, Result, SharedDisk, SharedStorage, Storage,
};
use vellum_sim::{
    Content, Delay, Discards, Drive, DriveOptions, ForwardDisk, ForwardStorage, Forwarding, Granule, History,
    World,
};

/// Makes drives; "reopening" one is starting the process again on the same host.
struct Drives<'a> {
    world: &'a World,
    options: DriveOptions,
    last: RefCell<Option<Arc<Drive>>>,
}

impl StorageFixture for Drives<'_> {
    fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>> {
        let content = Content::zeroed(self.options.limits.block_size.round_up(len));
        let drive = Drive::from_content(self.world, content, self.options.clone());
        *self.last.borrow_mut() = Some(drive.clone());
        Box::pin(std::future::ready(Ok(drive as SharedStorage)))
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>> {
        let last = self.last.borrow_mut().take().expect("made before");
        let drive = last.restart(&mut self.world.random());
        *self.last.borrow_mut() = Some(drive.clone());
        Box::pin(std::future::ready(Ok(drive as SharedStorage)))
    }
}

fn keeps_the_contract(options: &DriveOptions) {
    for (seed, world) in [World::new(1), World::shuffled(2), World::shuffled(3)].iter().enumerate() {
        let fixture = Drives { world, options: options.clone(), last: RefCell::default() };
        world.run(contract::storage(&fixture));
        let seed = seed as u64 + 10;
        world.run(contract::storage_random_operations(&fixture, seed, 200));
    }
}

#[test]
fn at_once() {
    keeps_the_contract(&DriveOptions::default());
}

#[test]
fn in_any_order() {
    keeps_the_contract(&DriveOptions { delay: any_order(), ..DriveOptions::default() });
}

#[test]
fn with_slow_flushes_and_whimsical_discards() {
    keeps_the_contract(&DriveOptions {
        delay: Delay::fixed(Duration::from_nanos(1)).with_flush(Duration::from_millis(500)),
        discards: Discards::Whim,
        history: History::Pending,
        ..DriveOptions::default()
    });
}

#[test]
fn with_a_fixed_length_in_blocks_of_512_and_4096() {
    for (block_size, granule) in [(BlockSize::SECTOR, Granule::Sector), (BlockSize::PAGE, Granule::Page)] {
        let limits = Limits { fixed_len: true, block_size, discards: false, ..Limits::plain() };
        keeps_the_contract(&DriveOptions { limits, granule, delay: any_order(), ..DriveOptions::default() });
    }
}

/// Overrides nothing.
struct Plain<T>(T);

impl ForwardStorage for Plain<SharedStorage> {
    fn inner(&self) -> &dyn Storage {
        &*self.0
    }
}

impl ForwardDisk for Plain<SharedDisk> {
    fn inner(&self) -> &dyn Disk {
        &*self.0
    }
}

struct ForwardingDrives<'a>(Drives<'a>);

impl StorageFixture for ForwardingDrives<'_> {
    fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>> {
        Box::pin(async move { Ok(Forwarding::new(Plain(self.0.fresh(len).await?)) as SharedStorage) })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>> {
        Box::pin(async move { Ok(Forwarding::new(Plain(self.0.reopen().await?)) as SharedStorage) })
    }
}

#[derive(Default)]
struct ForwardingDisks(RefCell<Option<Arc<MemoryDisk>>>);

impl DiskFixture for ForwardingDisks {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        let disk = MemoryDisk::new(size);
        *self.0.borrow_mut() = Some(disk.clone());
        Box::pin(std::future::ready(Ok(Forwarding::new(Plain(disk as SharedDisk)) as SharedDisk)))
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        let disk = self.0.borrow().as_ref().expect("made before").reopened();
        *self.0.borrow_mut() = Some(disk.clone());
        Box::pin(std::future::ready(Ok(Forwarding::new(Plain(disk as SharedDisk)) as SharedDisk)))
    }
}

#[test]
fn through_a_storage_and_a_disk_that_forward() {
    let world = World::shuffled(4);
    let options = DriveOptions { delay: any_order(), ..DriveOptions::default() };
    let drives = ForwardingDrives(Drives { world: &world, options, last: RefCell::default() });
    world.run(contract::storage(&drives));
    world.run(contract::storage_random_operations(&drives, 14, 200));
    world.run(contract::disk(&ForwardingDisks::default()));
    world.run(contract::disk_random_operations(&ForwardingDisks::default(), 1 << 20, 15, 200));
}
