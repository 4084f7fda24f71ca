//! The drive keeps the storage contract, however slow, small or stubborn it is.

mod common;

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use common::any_order;
use vellum_core::contract::{self, StorageFixture};
use vellum_core::{BlockSize, Limits, LocalFuture, Result, SharedStorage};
use vellum_sim::{Content, Delay, Discards, Drive, DriveOptions, Granule, History, World};

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
