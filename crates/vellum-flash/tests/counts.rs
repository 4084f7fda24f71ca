//! What requests cost, exactly: writes, bytes and flushes of flash, and operations of home.

mod common;
use vellum_flash as flash;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{ID, SECRET, over};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, CheckedDisk, Disk, GuestOffset, HostTally, ImageOffset, IoCounts, IoTally, LocalFuture,
    MemoryDisk, MemoryStorage, Random, Result, SharedBytes, SharedDisk, SharedStorage, Storage, Tallied,
    WriteFlags,
};
use vellum_flash::{CacheCounts, FlashCache, FlashDisk, FlashOptions};
use vellum_format::Raw;
use vellum_sim::{
    Content, Delay, Drive, DriveOptions, Fault, FaultPlan, ForwardStorage, Forwarding, Operation, World,
};

const BYTES: u64 = 64 << 20;

struct Bench {
    tally: Arc<IoTally>,
    cache: Arc<FlashCache>,
    home: Arc<CheckedDisk>,
    disk: Arc<FlashDisk>,
}

async fn bench() -> Bench {
    let tally = Arc::new(IoTally::default());
    let memory = MemoryStorage::new("flash");
    memory.set_len(BYTES).await.unwrap();
    let storage: SharedStorage = Tallied::shared(memory, tally.clone());
    vellum_flash::create(&storage, BYTES, ID, SECRET).await.unwrap();
    let cache = FlashCache::open(storage, common::options(1)).await.unwrap();
    let home = CheckedDisk::new(MemoryDisk::holding(&vec![3; 16 << 20]));
    let disk = over(&cache, 1, home.clone()).await.unwrap();
    // The row has its record.
    write(&disk, 4000).await;
    disk.flush().await.unwrap();
    Bench { tally, cache, home, disk }
}

async fn write(disk: &FlashDisk, block: u64) {
    let data = Buffer::copy_of(&[u8::try_from(block % 251).unwrap(); 4096]);
    disk.write(GuestOffset::new(block * 4096), data, WriteFlags::default()).await.unwrap();
}

/// Blocks in no order, none twice.
fn shuffled(seed: u64, count: usize) -> Vec<u64> {
    let mut random = Random::from_seed(seed);
    let mut blocks: Vec<u64> = (0..3000).collect();
    (0..count).map(|_| blocks.swap_remove(random.index(blocks.len()))).collect()
}

impl Bench {
    fn since(&self, before: IoCounts) -> IoCounts {
        self.tally.counts() - before
    }

    fn home_operations(&self) -> u64 {
        let IoCounts { reads, writes, flushes, zeroes, discards, .. } = self.home.counts();
        reads + writes + flushes + zeroes + discards
    }
}

#[test]
fn a_random_write_and_its_flush_are_two_writes_and_one_flush_of_flash_and_nothing_of_home() {
    block_on(async {
        let bench = bench().await;
        let before = (bench.tally.counts(), bench.home_operations());
        for block in shuffled(1, 12) {
            write(&bench.disk, block).await;
            bench.disk.flush().await.unwrap();
        }
        let counts = bench.since(before.0);
        assert_eq!((counts.writes, counts.bytes_written, counts.flushes), (24, 12 * 8192, 12));
        assert_eq!((counts.reads, bench.home_operations() - before.1), (0, 0));
    });
}

#[test]
fn over_dirty_blocks_a_write_is_one_write_and_a_flush_has_no_record() {
    block_on(async {
        let bench = bench().await;
        let blocks = shuffled(2, 12);
        for block in &blocks {
            write(&bench.disk, *block).await;
        }
        bench.disk.flush().await.unwrap();
        // A later record proves them.
        write(&bench.disk, 3999).await;
        bench.disk.flush().await.unwrap();
        let before = (bench.tally.counts(), bench.cache.counts().records);
        for block in &blocks {
            write(&bench.disk, *block).await;
            bench.disk.flush().await.unwrap();
        }
        let counts = bench.since(before.0);
        assert_eq!((counts.writes, counts.bytes_written, counts.flushes), (12, 12 * 4096, 12));
        assert_eq!(bench.cache.counts().records, before.1);
        bench.disk.flush().await.unwrap();
        assert_eq!(bench.since(before.0).flushes, 12, "nothing was written since");
    });
}

#[test]
fn grouped_writes_share_a_record() {
    block_on(async {
        let bench = bench().await;
        let before = bench.tally.counts();
        for block in shuffled(3, 80) {
            write(&bench.disk, block).await;
        }
        bench.disk.flush().await.unwrap();
        let counts = bench.since(before);
        assert_eq!((counts.writes, counts.flushes, counts.bytes_written), (81, 1, 80 * 4096 + 4096));
    });
}

#[test]
fn a_write_of_neighbours_is_one_write() {
    block_on(async {
        let bench = bench().await;
        let before = bench.tally.counts();
        let data = Buffer::copy_of(&[7; 128 << 10]);
        bench.disk.write(GuestOffset::new(1 << 20), data, WriteFlags::default()).await.unwrap();
        let counts = bench.since(before);
        assert_eq!((counts.writes, counts.bytes_written), (1, 128 << 10));
    });
}

#[test]
fn what_was_read_is_read_from_flash_the_next_time() {
    block_on(async {
        let bench = bench().await;
        let span = GuestOffset::new(2 << 20);
        bench.disk.read(span, Buffer::zeroed(64 << 10)).await.unwrap();
        while bench.cache.tend(Duration::from_secs(1)).await {}
        let before = (bench.tally.counts(), bench.home_operations());
        let found = bench.disk.read(span, Buffer::zeroed(64 << 10)).await.unwrap();
        assert!(found.to_vec().iter().all(|byte| *byte == 3));
        let counts = bench.since(before.0);
        assert_eq!((counts.reads, counts.bytes_read, bench.home_operations() - before.1), (1, 64 << 10, 0));
        assert_eq!((bench.disk.counts().admitted, bench.disk.counts().misses), (16, 16));
    });
}

#[test]
fn four_disks_that_flush_share_their_flushes() {
    let world = World::shuffled(5);
    let memory = MemoryStorage::new("flash");
    let storage: SharedStorage = memory.clone();
    block_on(async {
        storage.set_len(BYTES).await.unwrap();
        vellum_flash::create(&storage, BYTES, ID, SECRET).await.unwrap();
    });
    let mut bytes = vec![0; usize::try_from(BYTES).unwrap()];
    memory.content().read(vellum_core::ImageOffset::ZERO, &mut bytes);
    let delay = Delay::fixed(Duration::from_micros(60)).with_flush(Duration::from_micros(600));
    let flash =
        Drive::from_content(&world, Content::of(&bytes), DriveOptions { delay, ..DriveOptions::default() });
    let flushes = 4 * 50;
    world.run(async {
        let options = FlashOptions::new(Some(world.clock()), Random::from_seed(1));
        let cache = FlashCache::open(flash.clone(), options).await.unwrap();
        let mut tasks = Vec::new();
        let mut disks = Vec::new();
        for number in 0..4u8 {
            let home: SharedDisk = MemoryDisk::new(16 << 20);
            disks.push(over(&cache, number + 1, home).await.unwrap());
        }
        let before = flash.counts();
        for (number, disk) in disks.into_iter().enumerate() {
            tasks.push(world.spawn(async move {
                for block in shuffled(number as u64, 50) {
                    write(&disk, block).await;
                    disk.flush().await.unwrap();
                }
            }));
        }
        for task in tasks {
            task.await;
        }
        let counts = flash.counts_since(before);
        assert!(counts.flushes * 100 <= flushes * 30, "{} flushes for {flushes}", counts.flushes);
    });
}

/// Where home has the same, it is read instead, also into memory that is lent; a hit itself reads into the memory that it was
/// given, and makes no copy.
#[test]
fn a_slot_that_cannot_be_read_is_read_from_home_into_the_same_memory() {
    let world = World::new(1);
    let faults = FaultPlan::none();
    let options = DriveOptions { faults: faults.clone(), ..DriveOptions::default() };
    let flash = Drive::from_content(&world, Content::default(), options);
    world.run(async {
        let storage: SharedStorage = flash;
        let cache = common::cache_on(&storage, 64, 1).await.unwrap();
        let home = CheckedDisk::new(MemoryDisk::holding(&vec![3; 1 << 20]));
        let disk = over(&cache, 1, home.clone()).await.unwrap();
        let data = Buffer::copy_of(&[7; 8192]);
        disk.write(GuestOffset::new(4096), data, WriteFlags::default()).await.unwrap();
        disk.drain().await.unwrap();
        let memory = SharedBytes::zeroed(8192);
        for fails in [false, true] {
            let before = home.counts().reads;
            for buffer in [Buffer::zeroed(6000), memory.lend(&[(100, 2000), (3000, 4000)])] {
                let (is_lent, lengths) = (buffer.is_lent(), buffer.piece_lengths().collect::<Vec<_>>());
                if fails {
                    faults.add(Fault::nth(Operation::Read, 0));
                }
                let read = disk.read(GuestOffset::new(5000), buffer).await.unwrap();
                assert_eq!(read.to_vec(), [7; 6000]);
                assert_eq!((read.is_lent(), read.piece_lengths().collect::<Vec<_>>()), (is_lent, lengths));
            }
            assert_eq!(home.counts().reads - before, if fails { 2 } else { 0 });
            assert_eq!((memory.get(99, 3), memory.get(2999, 2)), (vec![0, 7, 7], vec![0, 7]));
            memory.set(0, &[0; 8192]);
        }
        assert_eq!(disk.counts().errors, 2);
        // What home has older is not read in its place.
        disk.write(GuestOffset::new(4096), Buffer::copy_of(&[8; 4096]), WriteFlags::default()).await.unwrap();
        faults.add(Fault::nth(Operation::Read, 0));
        assert!(disk.read(GuestOffset::new(4096), memory.lend(&[(0, 4096)])).await.is_err());
    });
}

/// Flash of which nobody reads anything once it is open.
struct Forgetful {
    storage: SharedStorage,
    forgets: Arc<AtomicBool>,
}

impl ForwardStorage for Forgetful {
    fn inner(&self) -> &dyn Storage {
        &*self.storage
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        match self.forgets.load(Ordering::Relaxed) {
            true => Box::pin(std::future::ready(Ok(()))),
            false => self.storage.write(at, data),
        }
    }
}

/// Writes `writes` random whole groups of 64 KiB of a disk of `groups`, written back, with a flush after `flushed_every` of them
/// and at the end. Returns what records and slices came to.
async fn random_groups(writes: u64, groups: u64, flushed_every: u64) -> CacheCounts {
    // Of 8 GiB and more a record has room for a thousand of them.
    let slots = (writes * 16).max(2 << 20);
    let bytes = 8192 + (slots.div_ceil(4096) + 1) * 2 * 90_112 + (64 << 20) + (slots + 4096) * 4096;
    let memory: SharedStorage = MemoryStorage::new("flash");
    memory.set_len(bytes).await.unwrap();
    vellum_flash::create(&memory, bytes, ID, SECRET).await.unwrap();
    let forgets = Arc::new(AtomicBool::new(false));
    let storage = Forwarding::new(Forgetful { storage: memory, forgets: forgets.clone() });
    let cache = FlashCache::open(storage, common::options(1)).await.unwrap();
    forgets.store(true, Ordering::Relaxed);
    let image: SharedStorage = MemoryStorage::new("image");
    image.set_len(groups << 16).await.unwrap();
    let disk = over(&cache, 1, Raw::open(image, false, &HostTally::default())).await.unwrap();
    let mut random = Random::from_seed(1);
    let data = Buffer::copy_of(&[7; 64 << 10]);
    for number in 1..=writes {
        let at = GuestOffset::new(random.below(groups) << 16);
        disk.write(at, data.duplicate(), WriteFlags::default()).await.unwrap();
        if number.is_multiple_of(flushed_every) {
            disk.flush().await.unwrap();
        }
    }
    disk.flush().await.unwrap();
    cache.counts()
}

/// A write of a group is 20 bytes of a record, as that of one block is.
#[test]
fn a_group_of_blocks_is_one_item_of_20_bytes() {
    block_on(async {
        // 64 bytes of header, two items of the row, and no block twice.
        let counts = random_groups(1000, 1 << 30, u64::MAX).await;
        let bytes = 64 + 2 * 64 + 1000 * 20_u64;
        assert_eq!((counts.records, counts.slices), (1, 0));
        assert_eq!(counts.record_bytes, bytes.next_multiple_of(4096));
        // 195 of them and the row are the most that a record of 4 KiB has room for.
        let counts = random_groups(5 * 195, 1 << 30, 195).await;
        assert_eq!((counts.records, counts.record_bytes, counts.slices), (5, 5 * 4096, 0));
    });
}

/// A million of them, as in the paper COWCache's table 1 (0.47 GiB), of a disk of 1 TiB; a hundredth of it without
/// `VELLUM_EXPLORE=all`.
#[test]
#[allow(clippy::print_stderr, reason = "the numbers are worth knowing")]
fn records_and_slices_of_random_writes_are_little() {
    let part = if std::env::var("VELLUM_EXPLORE").is_ok_and(|what| what == "all") { 1 } else { 100 };
    let writes = 1_000_000 / part;
    for flushed_every in [u64::MAX, 32] {
        let counts = block_on(random_groups(writes, (16 << 20) / part, flushed_every));
        let bytes = counts.record_bytes + counts.slice_bytes;
        eprintln!("a flush after {flushed_every}: {counts:?}, {bytes} bytes");
        assert!(u128::from(bytes) * u128::from(part) <= (47 << 30) / 100);
    }
}
