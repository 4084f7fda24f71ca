//! Writethrough: what requests cost, exactly; which regions are warm after an unclean end; two writers at once; flash that
//! fails under a disk whose home is complete; and changes of the policy.

mod common;
use vellum_flash as flash;

use std::sync::Arc;
use std::time::Duration;

use common::{ID, SECRET, options, over_with};
use futures_lite::future::{block_on, poll_once};
use vellum_core::{
    Buffer, CheckedDisk, Disk, GuestOffset, IoTally, Limits, MemoryDisk, MemoryStorage, SharedDisk,
    SharedStorage, Storage, Tallied, WriteFlags, ZeroFlags,
};
use vellum_flash::{FlashCache, FlashDisk, FlashPolicy};
use vellum_sim::{Content, Drive, DriveOptions, Effect, Fault, FaultPlan, Operation, World};

const BYTES: u64 = 64 << 20;
const REGION: u64 = 64 << 20;

struct Bench {
    tally: Arc<IoTally>,
    memory: Arc<MemoryStorage>,
    cache: Arc<FlashCache>,
    inner: Arc<MemoryDisk>,
    home: Arc<CheckedDisk>,
    disk: Arc<FlashDisk>,
}

/// How often: writes and flushes of home, writes and flushes of flash.
type Costs = (u64, u64, u64, u64);

impl Bench {
    async fn new(size: u64) -> Self {
        let memory = MemoryStorage::new("flash");
        memory.set_len(BYTES).await.unwrap();
        let storage: SharedStorage = memory.clone();
        flash::create(&storage, BYTES, ID, SECRET).await.unwrap();
        Self::on(memory, MemoryDisk::new(size)).await
    }

    async fn on(memory: Arc<MemoryStorage>, inner: Arc<MemoryDisk>) -> Self {
        let tally = Arc::new(IoTally::default());
        let cache =
            FlashCache::open(Tallied::shared(memory.clone(), tally.clone()), options(1)).await.unwrap();
        let home = CheckedDisk::new(inner.clone());
        let disk = over_with(&cache, 1, home.clone(), FlashPolicy::WriteThrough).await.unwrap();
        Self { tally, memory, cache, inner, home, disk }
    }

    /// The next opening, after a kill.
    async fn killed(&self) -> Self {
        let memory = MemoryStorage::with("flash", Limits::plain(), self.memory.content());
        Self::on(memory, self.inner.reopened()).await
    }

    fn costs(&self) -> Costs {
        let (home, flash) = (self.home.counts(), self.tally.counts());
        (home.writes, home.flushes, flash.writes, flash.flushes)
    }

    async fn cost_of(&self, what: impl AsyncFnOnce()) -> Costs {
        let before = self.costs();
        what().await;
        let now = self.costs();
        (now.0 - before.0, now.1 - before.1, now.2 - before.2, now.3 - before.3)
    }

    async fn tend(&self, second: u64) {
        while self.cache.tend(Duration::from_secs(second)).await {}
    }
}

async fn write(disk: &dyn Disk, at: u64, len: usize, fill: u8) {
    disk.write(GuestOffset::new(at), Buffer::copy_of(&vec![fill; len]), WriteFlags::default()).await.unwrap();
}

/// The first byte there, and how many blocks were found in the cache for it.
async fn read(disk: &FlashDisk, at: u64) -> (u8, u64) {
    let before = disk.counts().hits;
    let found = disk.read(GuestOffset::new(at), Buffer::zeroed(512)).await.unwrap().to_vec();
    assert!(found.iter().all(|byte| *byte == found[0]));
    (found[0], disk.counts().hits - before)
}

#[test]
fn a_random_write_is_one_of_home_and_one_of_flash_and_a_flush_is_home_s_alone() {
    block_on(async {
        let bench = Bench::new(16 << 20).await;
        let disk = &*bench.disk;
        assert_eq!(bench.cost_of(async || write(disk, 0, 4096, 1).await).await, (1, 0, 2, 1), "the region");
        for block in [77, 5, 1000, 2, 77, 77, 5] {
            assert_eq!(bench.cost_of(async || write(disk, block * 4096, 4096, 2).await).await, (1, 0, 1, 0));
        }
        assert_eq!(bench.cost_of(async || disk.flush().await.unwrap()).await, (0, 1, 0, 0));
        let fua = async || {
            let data = Buffer::copy_of(&[3; 4096]);
            disk.write(GuestOffset::new(8192), data, WriteFlags { fua: true }).await.unwrap();
        };
        assert_eq!(bench.cost_of(fua).await, (1, 0, 1, 0));
        assert_eq!(bench.cost_of(async || write(disk, 1 << 20, 256 << 10, 4).await).await, (1, 0, 1, 0));
        let reads = async || assert_eq!(read(disk, 77 * 4096).await, (2, 1));
        assert_eq!(bench.cost_of(reads).await, (0, 0, 0, 0));
        assert_eq!(bench.home.counts().reads, 0);
        // Zeros where something is cached: home alone, and no record.
        let zeroes = async || {
            disk.write_zeroes(GuestOffset::new(8192).span(4096), ZeroFlags::default()).await.unwrap();
        };
        assert_eq!(bench.cost_of(zeroes).await, (0, 0, 0, 0));
        assert_eq!(read(disk, 8192).await, (0, 0));
        assert_eq!(bench.cache.facts().written_regions, 1);
        assert_eq!(disk.counts().passed, 0);
    });
}

#[test]
fn parts_of_a_cached_block_are_kept() {
    block_on(async {
        let bench = Bench::new(1 << 20).await;
        let disk = &*bench.disk;
        write(disk, 4096, 4096, 1).await;
        write(disk, 4096 + 512, 1024, 2).await;
        for (at, fill) in [(0, 1), (512, 2), (1024, 2), (1536, 1)] {
            assert_eq!(read(disk, 4096 + at).await, (fill, 1));
        }
        // A part that is not there is added.
        write(disk, 8192 + 512, 512, 3).await;
        write(disk, 8192 + 1024, 512, 4).await;
        assert_eq!((read(disk, 8192 + 512).await, read(disk, 8192 + 1024).await), ((3, 1), (4, 1)));
        assert_eq!(read(disk, 8192).await, (0, 0));
        // Less than a sector: home has it.
        write(disk, 4096 + 100, 10, 5).await;
        let found = disk.read(GuestOffset::new(4096 + 99), Buffer::zeroed(12)).await.unwrap().to_vec();
        assert_eq!(found, [1, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 1]);
        assert_eq!(disk.counts().passed, 1);
    });
}

#[test]
fn regions_that_are_settled_are_warm_after_a_kill_and_the_others_are_void() {
    block_on(async {
        let bench = Bench::new(4 * REGION).await;
        let disk = &*bench.disk;
        for (number, at) in [(1, 0), (2, REGION), (3, REGION + 8192)] {
            write(disk, at, 4096, number).await;
        }
        bench.tend(5).await;
        assert_eq!(bench.cache.facts().written_regions, 2, "not yet");
        bench.tend(40).await;
        assert_eq!(bench.cache.facts().written_regions, 0);
        write(disk, REGION, 4096, 4).await;
        bench.cache.flush().await.unwrap();
        assert_eq!(bench.cache.facts().written_regions, 1);

        // Home loses what was not flushed: the cache must not have it either.
        let old = bench.killed().await;
        assert_eq!(read(&old.disk, 0).await, (1, 1), "warm");
        assert_eq!(read(&old.disk, REGION).await, (4, 0), "void");
        assert_eq!(read(&old.disk, REGION + 8192).await, (3, 0), "void");
        assert_eq!(old.cache.facts().written_regions, 0);
        // What is cached anew counts.
        write(&*old.disk, REGION, 4096, 5).await;
        old.disk.close().await.unwrap();
        let next = old.killed().await;
        assert_eq!((read(&next.disk, REGION).await, read(&next.disk, 0).await), ((5, 1), (1, 1)));
        assert_eq!(next.cache.facts().written_regions, 0, "a clean end");
    });
}

#[test]
fn a_region_in_which_somebody_writes_is_not_settled() {
    let world = World::new(1);
    let flash = Drive::from_content(&world, Content::default(), DriveOptions::default());
    let home = Drive::from_content(&world, Content::zeroed(1 << 20), DriveOptions::default());
    world.run(async {
        let storage: SharedStorage = flash.clone();
        let cache = common::cache_on(&storage, 64, 1).await.unwrap();
        let raw = vellum_format::Raw::open(home.clone(), false, &vellum_core::HostTally::default());
        let disk = over_with(&cache, 1, raw, FlashPolicy::WriteThrough).await.unwrap();
        write(&*disk, 0, 4096, 1).await;
        let hold = home.hold(Operation::Write);
        let mut writing = Box::pin(write(&*disk, 4096, 4096, 2));
        assert!(poll_once(&mut writing).await.is_none());
        cache.tend(Duration::from_secs(100)).await;
        assert_eq!(cache.facts().written_regions, 1);
        drop(hold);
        writing.await;
        cache.tend(Duration::from_secs(200)).await;
        assert_eq!(cache.facts().written_regions, 0);
    });
}

#[test]
fn a_block_that_two_write_at_once_is_dropped() {
    let world = World::new(1);
    let flash = Drive::from_content(&world, Content::default(), DriveOptions::default());
    let home = Drive::from_content(&world, Content::zeroed(1 << 20), DriveOptions::default());
    world.run(async {
        let storage: SharedStorage = flash.clone();
        let cache = common::cache_on(&storage, 64, 1).await.unwrap();
        let raw = vellum_format::Raw::open(home.clone(), false, &vellum_core::HostTally::default());
        let disk = over_with(&cache, 1, raw, FlashPolicy::WriteThrough).await.unwrap();
        write(&*disk, 0, 16_384, 1).await;
        let hold = home.hold(Operation::Write);
        let mut first = Box::pin(write(&*disk, 0, 8192, 2));
        let mut second = Box::pin(write(&*disk, 4096, 8192, 3));
        assert!(poll_once(&mut first).await.is_none() && poll_once(&mut second).await.is_none());
        drop(hold);
        first.await;
        second.await;
        assert_eq!(disk.counts().passed, 2, "each of them drops the one block");
        for (block, hits) in [(0, 1), (1, 0), (2, 1), (3, 1)] {
            let found = read(&disk, block * 4096).await;
            let mut alone = vec![0; 512];
            home.content().read(vellum_core::ImageOffset::new(block * 4096), &mut alone);
            assert_eq!(found, (alone[0], hits), "block {block}");
        }
    });
}

/// A world in which flash fails like this, and a disk that is written through.
fn with_failing_flash(fault: Fault, test: impl AsyncFnOnce(Arc<FlashCache>, Arc<FlashDisk>, &FaultPlan)) {
    let world = World::new(1);
    let flash = Drive::from_content(&world, Content::default(), DriveOptions::default());
    let storage: SharedStorage = flash.clone();
    world.run(async {
        drop(common::cache_on(&storage, 64, 1).await.unwrap());
        let plan = FaultPlan::none();
        let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
        let storage: SharedStorage = Drive::from_content(&world, flash.content(), options);
        let cache = common::cache_on(&storage, 64, 1).await.unwrap();
        let home: SharedDisk = MemoryDisk::new(1 << 20);
        let disk = flash::FlashCache::open_disk(
            &cache,
            flash::DiskOptions {
                disk: [1; 16],
                home,
                sessions: None,
                policy: FlashPolicy::WriteThrough,
                trusts_home: false,
            },
        );
        let disk = disk.await.unwrap();
        write(&*disk, 0, 8192, 1).await;
        plan.add(fault);
        test(cache, disk, &plan).await;
    });
}

#[test]
fn a_slot_that_cannot_be_written_costs_the_block_its_place_and_the_guest_nothing() {
    let fault = Fault { effect: Effect::None, ..Fault::nth(Operation::Write, 0) };
    with_failing_flash(fault, async |cache, disk, plan| {
        write(&*disk, 0, 4096, 2).await;
        assert_eq!((plan.hits(), disk.counts().errors, disk.counts().passed), (1, 1, 1));
        assert_eq!((read(&disk, 0).await, read(&disk, 4096).await), ((2, 0), (1, 1)));
        assert!(cache.failure().is_none());
        write(&*disk, 0, 4096, 3).await;
        assert_eq!(read(&disk, 0).await, (3, 1), "it gets another place");
        disk.close().await.unwrap();
    });
}

#[test]
fn a_disk_goes_on_without_flash_that_has_failed() {
    with_failing_flash(Fault::nth(Operation::Flush, 0), async |cache, disk, _| {
        assert!(cache.flush().await.is_err() && cache.failure().is_some());
        write(&*disk, 0, 4096, 2).await;
        disk.flush().await.unwrap();
        disk.discard(GuestOffset::new(4096).span(4096), WriteFlags::default()).await.unwrap();
        assert_eq!((read(&disk, 0).await, read(&disk, 4096).await), ((2, 0), (0, 0)));
        disk.close().await.unwrap();
    });
}

#[test]
fn a_disk_changes_between_write_back_and_writethrough_and_stays_warm() {
    block_on(async {
        let bench = Bench::new(1 << 20).await;
        let disk = &*bench.disk;
        write(disk, 0, 4096, 1).await;
        disk.set_policy(FlashPolicy::WriteBack).await.unwrap();
        assert_eq!(bench.cache.facts().written_regions, 0);
        assert_eq!(read(disk, 0).await, (1, 1));
        write(disk, 4096, 4096, 2).await;
        disk.flush().await.unwrap();
        assert_eq!(disk.dirty_blocks(), 1);
        let killed = bench.killed_as(FlashPolicy::WriteBack).await;
        assert_eq!((read(&killed.1, 0).await, read(&killed.1, 4096).await), ((1, 1), (2, 1)));
        disk.set_policy(FlashPolicy::WriteThrough).await.unwrap();
        assert_eq!((disk.dirty_blocks(), read(disk, 4096).await), (0, (2, 1)));
        write(disk, 4096, 4096, 3).await;
        disk.set_policy(FlashPolicy::ReadOnly).await.unwrap();
        assert_eq!((bench.cache.facts().written_regions, read(disk, 4096).await), (0, (3, 1)));
        disk.close().await.unwrap();
        bench.cache.close().await.unwrap();
    });
}

impl Bench {
    async fn killed_as(&self, policy: FlashPolicy) -> (Arc<FlashCache>, Arc<FlashDisk>) {
        let memory = MemoryStorage::with("flash", Limits::plain(), self.memory.content());
        let cache = FlashCache::open(memory, options(1)).await.unwrap();
        let disk = over_with(&cache, 1, self.inner.reopened(), policy).await.unwrap();
        (cache, disk)
    }
}

#[test]
fn a_disk_that_has_no_word_for_its_regions_goes_past_the_cache() {
    block_on(async {
        // Records of 16 KiB name 64 words: of 4 GiB each.
        let memory = MemoryStorage::new("flash");
        memory.set_len(common::bytes_of(512)).await.unwrap();
        let storage: SharedStorage = memory.clone();
        flash::create(&storage, common::bytes_of(512), ID, SECRET).await.unwrap();
        let bench = Bench::on(memory, MemoryDisk::new(100 << 32)).await;
        let disk = &*bench.disk;
        for number in 0..80u8 {
            write(disk, u64::from(number) << 32, 4096, number + 1).await;
        }
        assert_eq!((bench.cache.facts().written_regions, disk.counts().passed), (64, 16));
        for number in 0..80u8 {
            assert_eq!(read(disk, u64::from(number) << 32).await, (number + 1, u64::from(number < 64)));
        }
        // Those that went past the cache are read, and home has not flushed them: they are not cached.
        let read_whole = async |number: u64| {
            disk.read(GuestOffset::new(number << 32), Buffer::zeroed(4096)).await.unwrap();
        };
        for number in 64..80 {
            read_whole(number).await;
        }
        bench.tend(1).await;
        assert_eq!((disk.counts().refused, read(disk, 64 << 32).await), (16, (65, 0)));
        read_whole(64).await;
        bench.tend(1).await;
        assert_eq!(read(disk, 64 << 32).await, (65, 1), "after the flush that settles it may be");
        assert_eq!(read(disk, 79 << 32).await, (80, 0));
        assert_eq!(
            bench.cache.facts().written_regions,
            0,
            "there is no more room, so they are settled at once"
        );
        write(disk, 70 << 32, 4096, 200).await;
        assert_eq!(read(disk, 70 << 32).await, (200, 1));
        // One that is cached, and settled, is dropped durably before it is written past the cache.
        for number in 0..80u8 {
            write(disk, (u64::from(number) << 32) + 8192, 4096, number + 1).await;
        }
        write(disk, 79 << 32, 4096, 201).await;
        let killed = bench.killed().await;
        assert_eq!(read(&killed.disk, 79 << 32).await.0, 201);
    });
}

/// A request that is larger than what one record can say of blocks is several; beside others of the kind.
#[test]
fn the_largest_requests_pass_the_smallest_cache() {
    const LEN: usize = 32 << 20;
    for policy in [FlashPolicy::WriteThrough, FlashPolicy::ReadOnly, FlashPolicy::WriteBack] {
        block_on(async {
            let storage: SharedStorage = MemoryStorage::new("flash");
            let cache = common::cache_on(&storage, 64, 1).await.unwrap();
            let home = MemoryDisk::new(2 * LEN as u64);
            let disk = over_with(&cache, 1, home.clone(), policy).await.unwrap();
            let flags = WriteFlags { fua: true };
            let write = |at: u64, fill: u8| {
                disk.write(GuestOffset::new(at), Buffer::copy_of(&vec![fill; LEN]), flags)
            };
            let both = async {
                let (one, two) =
                    futures_lite::future::zip(write(700, 1), write(LEN as u64 / 2 + 4096, 2)).await;
                one.and(two)
            };
            let mut both = Box::pin(both);
            let mut written = None;
            for _ in 0..100_000 {
                written = poll_once(&mut both).await;
                if written.is_some() {
                    break;
                }
                cache.tend(Duration::from_secs(1)).await;
            }
            written.expect("it waits for nothing").unwrap();
            drop(both);
            let span = GuestOffset::new(LEN as u64 / 2).span(LEN as u64);
            disk.discard(span, WriteFlags::default()).await.unwrap();
            write(3 << 20, 3).await.unwrap();
            disk.close().await.unwrap();
            let home = home.reopened();
            let read = home.read(GuestOffset::ZERO, Buffer::zeroed(2 * LEN)).await.unwrap().to_vec();
            let first = |value: u8| read.iter().position(|byte| *byte == value);
            assert_eq!((first(1), first(3)), (Some(700), Some(3 << 20)), "{policy:?}");
            assert!(read[3 << 20..(3 << 20) + LEN].iter().all(|byte| *byte == 3), "{policy:?}");
        });
    }
}
