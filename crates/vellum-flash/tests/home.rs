//! Batches that go home in several parts, while the guest writes, slots cannot be read and home takes nothing.
//!
//! ```text
//!   900 dirty blocks of 1200, at random ─► drain: parts of 256 and more ─► a home that takes its time
//!   meanwhile: writes of the guest to the same blocks
//! ```

mod common;
use vellum_flash as flash;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{ID, SECRET, options, over};
use vellum_core::{
    Buffer, Clock, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, MemoryDisk,
    Random, Result, SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_flash::{FlashCache, FlashDisk};
use vellum_sim::{Content, Delay, Drive, DriveOptions, Fault, FaultPlan, Operation, Repeat, World};

const BLOCKS: u64 = 1200;
const DIRTY: usize = 900;
const FLASH_BYTES: u64 = 1 << 30;
/// Every write of home passes.
const NONE: u64 = u64::MAX;

/// A home whose writes take time, and of which one fails.
struct Slow {
    inner: Arc<MemoryDisk>,
    clock: Arc<dyn Clock>,
    writes: AtomicU64,
    fails: AtomicU64,
}

impl Disk for Slow {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.inner.read(at, buffer)
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let number = self.writes.fetch_add(1, Ordering::Relaxed);
            self.clock.sleep(Duration::from_micros(150)).await;
            if number == self.fails.load(Ordering::Relaxed) {
                return Err(Error::new(ErrorKind::NoSpace, "the host's file system is full"));
            }
            self.inner.write(at, data, flags).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.inner.write_zeroes(span, flags)
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.inner.discard(span, flags)
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.inner.map(span)
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.close()
    }
}

struct Scene {
    world: Rc<World>,
    faults: FaultPlan,
    home: Arc<Slow>,
    disk: Arc<FlashDisk>,
    /// What the guest wrote last.
    model: Vec<u8>,
}

fn index(block: u64) -> usize {
    usize::try_from(block).unwrap()
}

async fn write(disk: &FlashDisk, block: u64, value: u8) {
    let data = Buffer::copy_of(&[value; 4096]);
    disk.write(GuestOffset::new(block * 4096), data, WriteFlags::default()).await.unwrap();
}

fn scene(seed: u64) -> Scene {
    let world = Rc::new(World::shuffled(seed));
    let faults = FaultPlan::none();
    let delay = Delay::between(Duration::from_micros(20)..=Duration::from_micros(120));
    let drive = DriveOptions { delay, faults: faults.clone(), ..DriveOptions::default() };
    let storage: SharedStorage = Drive::from_content(&world, Content::default(), drive);
    let home = Arc::new(Slow {
        inner: MemoryDisk::new(BLOCKS * 4096),
        clock: world.clock(),
        writes: AtomicU64::new(0),
        fails: AtomicU64::new(NONE),
    });
    let mut random = Random::from_seed(seed);
    let mut blocks: Vec<u64> = (0..BLOCKS).collect();
    let dirty: Vec<u64> = (0..DIRTY).map(|_| blocks.swap_remove(random.index(blocks.len()))).collect();
    let mut model = vec![0; index(BLOCKS)];
    let disk = world.run(async {
        // So large that a record has room for all of them: they are one batch.
        storage.set_len(FLASH_BYTES).await.unwrap();
        flash::create(&storage, FLASH_BYTES, ID, SECRET).await.unwrap();
        let cache = FlashCache::open(storage.clone(), options(seed)).await.unwrap();
        let disk = over(&cache, 1, home.clone()).await.unwrap();
        for block in dirty {
            model[index(block)] = 1 + u8::try_from(block % 100).unwrap();
            write(&disk, block, model[index(block)]).await;
        }
        disk.flush().await.unwrap();
        disk
    });
    Scene { world, faults, home, disk, model }
}

impl Scene {
    /// Home has what the guest wrote last, after one more drain.
    fn is_complete(&self) {
        self.world.run(self.disk.drain()).unwrap();
        for (block, value) in (0..).zip(&self.model) {
            let at = GuestOffset::new(block * 4096);
            let home = self.world.run(self.home.inner.read(at, Buffer::for_overwrite(4096))).unwrap();
            assert_eq!(home.to_vec(), [*value; 4096], "block {block}");
        }
    }
}

#[test]
fn what_the_guest_writes_meanwhile_comes_home_last() {
    for seed in 0..24 {
        let mut scene = scene(seed);
        let (disk, clock) = (scene.disk.clone(), scene.world.clock());
        let guest = scene.world.spawn(async move {
            let mut random = Random::from_seed(seed);
            let mut written = Vec::new();
            for number in 0..400u64 {
                let (block, value) = (random.below(BLOCKS), 101 + u8::try_from(number % 100).unwrap());
                write(&disk, block, value).await;
                written.push((block, value));
                if random.one_in(16) {
                    disk.flush().await.unwrap();
                }
                clock.sleep(Duration::from_micros(random.below(60))).await;
            }
            written
        });
        scene.world.run(scene.disk.drain()).unwrap();
        for (block, value) in scene.world.run(guest) {
            scene.model[index(block)] = value;
        }
        scene.is_complete();
    }
}

#[test]
fn parts_before_one_that_cannot_be_read_are_home_and_the_rest_stays_dirty() {
    for seed in 0..8 {
        let scene = scene(seed);
        // Slots of the first part can be read, and none later.
        let fault = Fault { repeat: Repeat::ForEver, ..Fault::nth(Operation::Read, 300) };
        scene.faults.add(fault);
        assert!(scene.world.run(scene.disk.drain()).is_err());
        let home = scene.disk.counts().written_home;
        assert!((256..DIRTY as u64).contains(&home), "{home}");
        scene.faults.clear();
        scene.is_complete();
        // None went home twice.
        assert_eq!(scene.disk.counts().written_home, DIRTY as u64);
    }
}

#[test]
fn a_write_home_that_fails_leaves_its_batch_dirty() {
    for seed in 0..8 {
        let scene = scene(seed);
        scene.home.fails.store(seed * 28, Ordering::Relaxed);
        let failed = scene.world.run(scene.disk.drain()).unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::NoSpace);
        assert_eq!(scene.disk.counts().written_home, 0);
        scene.is_complete();
        assert_eq!(scene.disk.counts().written_home, DIRTY as u64);
    }
}

#[test]
fn a_part_is_read_while_the_one_before_it_is_written_home() {
    let scene = scene(1);
    let (faults, home) = (scene.faults.clone(), scene.home.clone());
    let before = faults.seen(Operation::Read);
    let drained = scene.world.spawn({
        let disk = scene.disk.clone();
        async move { disk.drain().await }
    });
    // When the first writes come home, how many slots have been asked for.
    let clock = scene.world.clock();
    let asked = scene.world.run(async {
        while home.writes.load(Ordering::Relaxed) < 16 {
            clock.sleep(Duration::from_micros(5)).await;
        }
        faults.seen(Operation::Read) - before
    });
    scene.world.run(drained).unwrap();
    let all = faults.seen(Operation::Read) - before;
    // Three parts: the second is asked for, and not the third.
    assert!(asked > all / 3 && asked < all * 3 / 4, "{asked} of {all}");
    scene.is_complete();
}
