//! The worst image for each table of the native format: valid, or nearly, and as expensive as possible. The
//! cost of opening is in proportion to the bytes of metadata that are there: in steps that the engine counts,
//! and in bytes that it reads.

use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, ImageOffset, IoTally, MemoryStorage, Result, SharedStorage,
    Storage, Tallied, WriteFlags,
};
use vellum_format::native::snapshots::snapshots;
use vellum_format::native::{
    CreateOptions, Native, OpenOptions, Places, Region, Superblocks, create, recover,
};
use vellum_format::work;

const UNIT: u64 = 64 << 10;
/// Steps for each eight bytes of metadata, at most: a few passes.
const STEPS_PER_WORD: u64 = 8;

fn options(size: u64, journal: u64) -> CreateOptions {
    CreateOptions {
        size,
        has_table: true,
        unit_size: Some(UNIT),
        journal_bytes: Some(journal),
        uuid: Some([1; 16]),
        ..CreateOptions::default()
    }
}

/// An image with one snapshot, so that the superblock says that there are some.
async fn image(options: &CreateOptions) -> (Arc<MemoryStorage>, Places) {
    let storage = MemoryStorage::new("image");
    create(&*storage, options).await.unwrap();
    let disk = Native::open(storage.clone(), None, OpenOptions::default()).await.unwrap();
    disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
    disk.snapshot_create("1", 0).await.unwrap();
    disk.close().await.unwrap();
    let places = Superblocks::read(&*storage).await.unwrap().superblock.places();
    (storage, places)
}

async fn put(storage: &MemoryStorage, at: ImageOffset, words: &[u64]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    storage.write(at, Buffer::copy_of(&bytes)).await.unwrap();
}

fn word(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// All entries of the list, each relying on what `next` says; the last one on home.
async fn list(storage: &MemoryStorage, places: &Places, next: impl Fn(u32) -> u32) {
    for index in 0..4095u32 {
        let id = index + 1;
        let size = places.shape().size;
        let name = u64::from_be_bytes(format!("s{id:07}").into_bytes().try_into().unwrap());
        let entry = [word(id, next(id)), size, 0, 0, 0, 0, 0, 0, name];
        put(storage, places.snapshot(u64::from(index)).start(), &entry).await;
    }
}

/// What it costs to do this with an image: steps, and bytes read.
fn cost<T>(storage: &Arc<MemoryStorage>, work: impl AsyncFnOnce(SharedStorage) -> T) -> (T, u64, u64) {
    let tally = Arc::new(IoTally::default());
    work::take();
    let done = block_on(work(Tallied::shared(storage.clone(), tally.clone())));
    (done, work::take(), tally.counts().bytes_read)
}

#[track_caller]
fn is_cheap(what: &str, (steps, read): (u64, u64), bytes: u64) {
    assert!(steps <= STEPS_PER_WORD * bytes / 8, "{what}: {steps} steps for {bytes} bytes");
    assert!(read <= 6 * bytes, "{what}: {read} bytes read of {bytes}");
}

async fn open(image: SharedStorage, snapshot: Option<&str>) -> Result<Arc<Native>> {
    let options =
        OpenOptions { snapshot: snapshot.map(str::to_owned), journal_key: Some(1), ..OpenOptions::default() };
    Native::open(image, None, options).await
}

/// Maps a snapshot to the one that it relies on.
type Next = fn(u32) -> u32;

/// As many snapshots as there can be, in a row: oldest first, newest first, and in two circles.
#[test]
fn four_thousand_snapshots() {
    const LIST: u64 = 512 << 10;
    let ways: [(&str, Next, u32); 3] = [
        ("in a row", |id| if id == 4095 { u32::MAX } else { id + 1 }, 4095),
        ("in a row, backwards", |id| if id == 1 { u32::MAX } else { id - 1 }, 1),
        ("circles", |id| if id == 4095 { u32::MAX } else { (id % 2047 + 1) + id / 2048 * 2047 }, 4095),
    ];
    for (what, next, relies_on_home) in ways {
        let (storage, places) = block_on(image(&options(1 << 20, 64 << 10)));
        block_on(async {
            list(&storage, &places, next).await;
            put(&storage, places.snapshot(4095).start(), &[word(0, relies_on_home), word(4096, 0)]).await;
        });
        let (opened, steps, read) = cost(&storage, async |image| open(image, None).await.map(drop));
        is_cheap(what, (steps, read), LIST);
        let (listed, steps, read) = cost(&storage, async |image| snapshots(&image).await);
        is_cheap(what, (steps, read), LIST);
        if what == "circles" {
            assert_eq!(opened.unwrap_err().kind(), ErrorKind::Corrupt);
            assert_eq!(listed.unwrap_err().kind(), ErrorKind::Corrupt);
            continue;
        }
        opened.unwrap();
        assert_eq!(listed.unwrap().len(), 4095);
        for id in ["1", "4095"] {
            let (opened, steps, read) = cost(&storage, async |image| open(image, Some(id)).await.map(drop));
            opened.unwrap();
            is_cheap(what, (steps, read), LIST);
        }
        // A change of the disk, and a snapshot less.
        let (deleted, steps, _) = cost(&storage, async |image| {
            let disk = open(image, None).await?;
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&[2; 4096]), WriteFlags::FUA).await?;
            disk.snapshot_delete("7").await?;
            disk.close().await
        });
        deleted.unwrap();
        is_cheap(what, (steps, 0), 2 * LIST);
    }
}

/// Map units in a chain, full of copies for thousands of snapshots.
#[test]
fn a_long_chain_of_map_units() {
    const UNITS: u32 = 300;
    let (storage, places) = block_on(image(&options(1 << 30, 64 << 10)));
    let table = places.region(Region::Table);
    block_on(async {
        list(&storage, &places, |id| if id == 4095 { u32::MAX } else { id + 1 }).await;
        put(&storage, places.snapshot(4095).start(), &[word(10, 4095), word(4096, 0)]).await;
        for unit in 10..10 + UNITS {
            let next = if unit + 1 < 10 + UNITS { u64::from(unit) + 1 } else { 0 };
            let mut index = vec![u64::from_be_bytes(*b"VELLUMmu"), next];
            for slot in 0..15u32 {
                let number = (unit - 10) * 15 + slot;
                index.push(word(1 + number % 4095, 0));
                index.push(table.start().bytes() + 4096 * u64::from(number / 4095));
            }
            put(&storage, places.unit(unit).start(), &index).await;
        }
        storage.set_len(places.unit(10 + UNITS).end().bytes()).await.unwrap();
    });
    let bytes = (512 << 10) + u64::from(UNITS) * UNIT;
    let (opened, steps, read) = cost(&storage, async |image| open(image, None).await.map(drop));
    opened.unwrap();
    is_cheap("map units", (steps, read), bytes);
    let (opened, steps, read) = cost(&storage, async |image| open(image, Some("5")).await.map(drop));
    opened.unwrap();
    is_cheap("map units, a snapshot", (steps, read), bytes);
}

/// Each block of the ring says that a record begins there which takes an eighth of it, and none is whole.
#[test]
fn a_ring_of_headers() {
    const RING: u64 = 2 << 20;
    for zones in [false, true] {
        let storage = MemoryStorage::new("image");
        let mut options = options(1 << 30, RING);
        (options.has_zones, options.zone_size) = (zones, zones.then_some(1 << 20));
        block_on(async {
            create(&*storage, &options).await.unwrap();
            let disk = open(storage.clone(), None).await.unwrap();
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
            disk.discard(GuestOffset::ZERO.span(UNIT), WriteFlags::FUA).await.unwrap();
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
            drop(disk);
            let places = Superblocks::read(&*storage).await.unwrap().superblock.places();
            let ring = places.region(Region::Journal);
            let mut header = storage.read(ring.start(), Buffer::zeroed(4096)).await.unwrap().to_vec();
            let len = u32::from_be_bytes(header[40..44].try_into().unwrap());
            assert!((64..=4096).contains(&len), "the length of the first record: {len}");
            header[40..44].copy_from_slice(&u32::try_from(RING / 8).unwrap().to_be_bytes());
            for block in 0..RING / 4096 {
                storage.write(ring.start() + block * 4096, Buffer::copy_of(&header)).await.unwrap();
            }
        });
        let (recovered, steps, read) = cost(&storage, async |image| recover(&image).await);
        assert_eq!(recovered.unwrap_err().kind(), ErrorKind::Corrupt);
        is_cheap("a ring of headers", (steps, read), RING);
    }
}

/// A table, and a table of zones, as long as they can be, of which nearly nothing is there.
#[test]
fn long_tables_that_are_holes() {
    let storage = MemoryStorage::new("image");
    let mut options = options(4 << 40, 64 << 10);
    (options.has_zones, options.zone_size) = (true, Some(64 << 20));
    block_on(create(&*storage, &options)).unwrap();
    let write = async |image: SharedStorage| {
        let disk = open(image, None).await.unwrap();
        for at in [0, 1 << 40, 3 << 40] {
            disk.write(GuestOffset::new(at), Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
        }
        // It is not closed.
    };
    // The list, the slots of partial units, the journal, and around each page of a table a mebibyte, which is
    // read at once.
    let bytes = 2 << 20;
    let ((), steps, read) = cost(&storage, write);
    is_cheap("first opened", (steps, read), bytes);
    let (opened, steps, read) = cost(&storage, async |image| open(image, None).await.map(drop));
    opened.unwrap();
    is_cheap("recovered", (steps, read), bytes);
}
