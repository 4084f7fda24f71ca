//! The native format: the contract of a disk, in every configuration that changes how it works internally;
//! crashes and failing drives; and what a request costs the host, exactly.

#[path = "native/ahead.rs"]
mod ahead;
#[path = "native/beside.rs"]
mod beside;
#[path = "native/cloned.rs"]
mod cloned;
mod common;
#[path = "native/compact.rs"]
mod compact;
#[path = "native/counts.rs"]
mod counts;
#[path = "subjects/device.rs"]
mod device;
#[path = "native/fragments.rs"]
mod fragments;
#[path = "space/host.rs"]
mod host;
#[path = "subjects/late.rs"]
mod late;
#[path = "native/over_base.rs"]
mod over_base;
#[path = "native/over_base_trials.rs"]
mod over_base_trials;
#[path = "native/placed.rs"]
mod placed;
#[path = "native/ready.rs"]
mod ready;
#[path = "native/renamed.rs"]
mod renamed;
#[path = "native/sim.rs"]
mod sim;
#[path = "native/snapshots.rs"]
mod snapshots;
#[path = "native/space.rs"]
mod space;
#[path = "native/trials.rs"]
mod trials;
#[path = "native/zones.rs"]
mod zones;

use std::cell::RefCell;
use std::sync::Arc;

use common::native::{NativeSetup, look_native, opening};
use futures_lite::future::block_on;
use vellum_core::contract::{self, DiskFixture};
use vellum_core::{Buffer, Disk, GuestOffset};
use vellum_core::{
    CheckedDisk, ErrorKind, HostTally, LocalFuture, MemoryStorage, Result, SharedDisk, SharedStorage,
    WriteFlags,
};
use vellum_format::native::{Native, OpenOptions, create, recover};

struct Fixture {
    setup: NativeSetup,
    image: RefCell<Option<Arc<MemoryStorage>>>,
}

impl DiskFixture for Fixture {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let image = MemoryStorage::new("image");
            create(&*image, &self.setup.create_options_of(size)).await?;
            *self.image.borrow_mut() = Some(image);
            self.reopen().await
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let image = self.image.borrow().clone().expect("made before") as SharedStorage;
            let (report, lines) = look_native(&image).await?;
            assert!(report.is_clean(), "an image that was closed is clean: {lines:?}");
            let disk = Native::open(image, self.setup.below(), opening()).await?;
            Ok(CheckedDisk::new(disk) as SharedDisk)
        })
    }

    fn fresh_content(&self, size: u64) -> Vec<u8> {
        let mut content = self.setup.base.as_ref().map(|base| base.to_vec()).unwrap_or_default();
        content.resize(usize::try_from(size).unwrap(), 0);
        content
    }
}

fn suite(setup: NativeSetup) {
    block_on(contract::disk(&Fixture { setup, image: RefCell::default() }));
}

fn large_base() -> Vec<u8> {
    (0..700_001u32).map(|i| u8::try_from(i % 253 + 1).unwrap()).collect()
}

#[test]
fn linear() {
    suite(NativeSetup::linear("linear", 0));
}

#[test]
fn linear_over_a_base() {
    for block in [4 << 10, 64 << 10, 1 << 20] {
        suite(NativeSetup::linear("linear over a base", 0).over(large_base(), block));
    }
}

#[test]
fn table() {
    for unit in [64 << 10, 2 << 20] {
        suite(NativeSetup::table("table", 0, unit));
    }
}

#[test]
fn table_over_a_base() {
    for (unit, block) in [(64 << 10, 4 << 10), (64 << 10, 1 << 20), (1 << 20, 64 << 10), (2 << 20, 256 << 10)]
    {
        suite(NativeSetup::table("table over a base", 0, unit).over(large_base(), block));
    }
}

#[test]
fn zoned() {
    for (unit, zone) in [(64 << 10, 1 << 20), (64 << 10, 64 << 20), (512 << 10, 1 << 20)] {
        suite(NativeSetup::zoned("zoned", 0, unit, zone));
    }
}

#[test]
fn zoned_over_a_base() {
    suite(NativeSetup::zoned("zoned over a base", 0, 64 << 10, 1 << 20).over(large_base(), 16 << 10));
}

/// As above, encrypted.
#[test]
fn encrypted() {
    suite(NativeSetup::linear("", 0).encrypted("encrypted, linear"));
    suite(NativeSetup::linear("", 0).over(large_base(), 16 << 10).encrypted("encrypted, linear over a base"));
    suite(NativeSetup::table("", 0, 1 << 20).encrypted("encrypted, table"));
    suite(
        NativeSetup::table("", 0, 64 << 10)
            .over(large_base(), 64 << 10)
            .encrypted("encrypted, table over a base"),
    );
    suite(NativeSetup::zoned("", 0, 64 << 10, 1 << 20).encrypted("encrypted, zoned"));
}

/// Opening for reading writes nothing, and says what to do about an image that was not closed.
#[test]
fn an_image_that_was_not_closed_is_recovered_by_an_opening_that_may_write() {
    block_on(async {
        let setup = NativeSetup::table("table", 1 << 20, 64 << 10);
        let image = MemoryStorage::new("image");
        create(&*image, &setup.create_options()).await.unwrap();
        let open = async |image: &Arc<MemoryStorage>, read_only| {
            let options = OpenOptions { read_only, ..OpenOptions::default() };
            Native::open(image.clone() as SharedStorage, None, options).await
        };
        let disk = open(&image, false).await.unwrap();
        let at = GuestOffset::new(100_000);
        disk.write(at, Buffer::copy_of(&[5; 4096]), WriteFlags::FUA).await.unwrap();
        drop(disk);
        let refused = open(&image, true).await.err().expect("it was not closed");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.chain().contains("vellum recover"), "{}", refused.chain());
        let shared: SharedStorage = image.clone();
        let recovery = recover(&shared).await.unwrap();
        assert!(recovery.records > 0 && recovery.pages > 0, "{recovery:?}");
        assert_eq!(recover(&shared).await.unwrap().records, 0, "once is enough");
        let disk = open(&image, true).await.unwrap();
        assert_eq!(disk.read(at, Buffer::zeroed(4096)).await.unwrap().to_vec(), vec![5; 4096]);
        let (report, lines) = look_native(&shared).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}

/// Writes that change no page of home need no record. The first of them marks the image as in use, once.
#[test]
fn what_changes_no_home_page_needs_no_record() {
    block_on(async {
        let setup = NativeSetup::linear("linear", 1 << 20).over(vec![0; 512 << 10], 64 << 10);
        let mut options = setup.create_options();
        options.base.as_mut().unwrap().zeros = vec![GuestOffset::ZERO.span(512 << 10)];
        let image = MemoryStorage::new("image");
        create(&*image, &options).await.unwrap();
        let shared: SharedStorage = image.clone();
        let disk = Native::open(shared.clone(), setup.below(), OpenOptions::default()).await.unwrap();
        let superblocks = || image.content().to_vec()[..8192].to_vec();
        let closed = superblocks();
        let write = async |at| {
            disk.write(GuestOffset::new(at), Buffer::copy_of(&[5; 5000]), WriteFlags::FUA).await.unwrap();
        };
        write(0).await;
        let marked = superblocks();
        assert_ne!(marked, closed, "it says that it is in use");
        write(300_000).await;
        write(600_000).await;
        disk.discard(GuestOffset::new(4096).span(700_000), WriteFlags::FUA).await.unwrap();
        assert_eq!(superblocks(), marked, "once is enough");
        drop(disk);
        let recovery = recover(&shared).await.unwrap();
        assert_eq!((recovery.records, recovery.pages), (0, 0), "{recovery:?}");
    });
}

/// Nothing says of such an image whether its last writer had everything flushed, so the first flush of an opening reaches
/// the host although nothing was written. Then there is nothing to do, as ever.
#[test]
fn the_first_flush_of_an_image_without_a_mark_reaches_the_host() {
    block_on(async {
        let setup = NativeSetup::linear("linear", 1 << 20);
        let image = MemoryStorage::new("image");
        create(&*image, &setup.create_options()).await.unwrap();
        let shared: SharedStorage = image.clone();
        let open = async |tally: &HostTally| {
            let options = OpenOptions { tally: tally.clone(), ..OpenOptions::default() };
            Native::open(shared.clone(), None, options).await.unwrap()
        };
        let flushes = |tally: &HostTally| {
            let (data, metadata) = (tally.data.counts(), tally.metadata.counts());
            data.flushes + metadata.flushes
        };
        let disk = open(&HostTally::default()).await;
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&[5; 4096]), WriteFlags::default()).await.unwrap();
        drop(disk); // killed: the bytes are in the page cache, and nowhere else
        let tally = HostTally::default();
        let disk = open(&tally).await;
        let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await.unwrap();
        assert_eq!(read.to_vec(), vec![5; 4096]);
        disk.flush().await.unwrap();
        assert_eq!(flushes(&tally), 1, "what was read is durable");
        disk.flush().await.unwrap();
        assert_eq!(flushes(&tally), 1, "nothing was written");
        disk.close().await.unwrap();
    });
}
