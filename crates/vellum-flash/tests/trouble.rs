//! One disk whose home takes nothing, or never answers, beside disks whose homes are well: their requests are answered.

mod common;
use vellum_flash as flash;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use common::{ID, SECRET, bytes_of, over};
use futures_lite::future::{block_on, poll_once};
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, MemoryDisk,
    MemoryStorage, Result, SharedDisk, SharedStorage, Storage, WriteFlags, ZeroFlags, join_all,
};
use vellum_flash::{FlashCache, FlashDisk, FlashOptions};
use vellum_sim::{Content, Drive, DriveOptions, Operation, World};

const BLOCKS: u64 = 400;
const SLOTS: u64 = 128;
/// Each block is the only one of its group.
const STRIDE: u64 = 16;
/// The memory that counts for one.
const LONE: u64 = 79;

const WELL: u8 = 0;
const FULL: u8 = 1;
const HUNG: u8 = 2;
/// Its block 33 cannot be read.
const DAMAGED: u8 = 3;
/// Neither can its block 34.
const WORSE: u8 = 4;

/// A home that stops taking changes, or stops answering.
struct Troubled {
    inner: Arc<MemoryDisk>,
    state: AtomicU8,
}

impl Troubled {
    async fn pass(&self, is_change: bool) -> Result<()> {
        match self.state.load(Ordering::Relaxed) {
            FULL if is_change => Err(Error::new(ErrorKind::NoSpace, "the host's file system is full")),
            HUNG => std::future::pending().await,
            _ => Ok(()),
        }
    }
}

impl Disk for Troubled {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            self.pass(false).await?;
            let (start, end) = (at.bytes(), at.bytes() + buffer.len() as u64);
            let hits = |block: u64| start < (block + 1) * 4096 && block * 4096 < end;
            let state = self.state.load(Ordering::Relaxed);
            if (state >= DAMAGED && hits(33)) || (state == WORSE && hits(34)) {
                return Err(Error::new(ErrorKind::Io, "the medium is damaged"));
            }
            self.inner.read(at, buffer).await
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.pass(true).await?;
            self.inner.write(at, data, flags).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.pass(false).await?;
            self.inner.flush().await
        })
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.pass(true).await?;
            self.inner.write_zeroes(span, flags).await
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.pass(true).await?;
            self.inner.discard(span, flags).await
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            self.pass(false).await?;
            self.inner.map(span).await
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// The request ends without waiting for anything outside: every transfer is in memory.
fn answered<T>(what: &str, request: impl Future<Output = T>) -> T {
    block_on(async {
        let mut request = Box::pin(request);
        for _ in 0..1000 {
            if let Some(answer) = poll_once(&mut request).await {
                return answer;
            }
        }
        panic!("{what} hangs")
    })
}

fn write_block(disk: &FlashDisk, block: u64, value: u8) -> LocalFuture<'_, Result<()>> {
    let at = GuestOffset::new(block % BLOCKS * STRIDE * 4096);
    disk.write(at, Buffer::copy_of(&[value; 4096]), WriteFlags::default())
}

struct Scene {
    cache: Arc<FlashCache>,
    home: Arc<Troubled>,
    bad: Arc<FlashDisk>,
    victims: Vec<(Arc<FlashDisk>, Arc<MemoryDisk>)>,
}

/// What is short: there are few slots, or there is memory for as few blocks.
#[derive(Debug, Clone, Copy)]
enum Few {
    Slots,
    Memory,
}

fn cache(few: Few) -> Arc<FlashCache> {
    let slots = if matches!(few, Few::Slots) { SLOTS } else { 4000 };
    let open = |memory_bytes_max| {
        block_on(async {
            let storage: SharedStorage = MemoryStorage::new("flash");
            storage.set_len(bytes_of(slots)).await.unwrap();
            vellum_flash::create(&storage, bytes_of(slots), ID, SECRET).await.unwrap();
            let options = FlashOptions { memory_bytes_max, ..common::options(1) };
            FlashCache::open(storage, options).await.unwrap()
        })
    };
    match few {
        Few::Slots => open(None),
        Few::Memory => open(Some(open(None).facts().budget_used_bytes + SLOTS * LONE)),
    }
}

fn scene(few: Few) -> Scene {
    let cache = cache(few);
    let size = BLOCKS * STRIDE * 4096;
    let home = Arc::new(Troubled { inner: MemoryDisk::new(size), state: AtomicU8::new(WELL) });
    let bad = block_on(over(&cache, 1, home.clone() as SharedDisk)).unwrap();
    let victim = |number| {
        let home = MemoryDisk::new(size);
        (block_on(over(&cache, number, home.clone() as SharedDisk)).unwrap(), home)
    };
    let victims = vec![victim(2), victim(3)];
    Scene { cache, home, bad, victims }
}

/// Each victim writes all its blocks twice, flushes, and reads them; then it is closed, and its home has them.
fn victims_go_on(scene: &Scene, mut between: impl FnMut()) {
    let mut writes = 0;
    for (disk, _) in &scene.victims {
        for number in 0..2 * BLOCKS {
            let value = u8::try_from(number % 251 + 1).unwrap();
            answered("a write", write_block(disk, number, value)).unwrap();
            writes += 1;
            if number % 7 == 0 {
                answered("a flush", disk.flush()).unwrap();
                between();
            }
        }
        let zeros = GuestOffset::new(2 * STRIDE * 4096).span(4096);
        answered("zeros", disk.write_zeroes(zeros, ZeroFlags::default())).unwrap();
    }
    assert_eq!(writes, 4 * BLOCKS);
    for (disk, home) in &scene.victims {
        answered("a close", disk.close()).unwrap();
        let home = home.reopened();
        for block in (0..BLOCKS).filter(|block| *block != 2) {
            let value = u8::try_from((BLOCKS + block) % 251 + 1).unwrap();
            let found =
                block_on(home.read(GuestOffset::new(block * STRIDE * 4096), Buffer::zeroed(4096))).unwrap();
            assert_eq!(found.to_vec(), [value; 4096], "block {block}");
        }
    }
}

#[test]
fn a_home_that_is_full_fails_its_own_writes_alone() {
    is_full(Few::Slots);
}

#[test]
fn a_home_that_is_full_leaves_memory_to_others() {
    is_full(Few::Memory);
}

#[test]
fn a_home_that_never_answers_holds_up_its_own_requests_alone() {
    never_answers(Few::Slots);
}

#[test]
fn a_home_that_never_answers_leaves_memory_to_others() {
    never_answers(Few::Memory);
}

fn is_full(few: Few) {
    let scene = scene(few);
    scene.home.state.store(FULL, Ordering::Relaxed);
    let mut failed = 0;
    for number in 0..BLOCKS {
        if let Err(error) = answered("a write", write_block(&scene.bad, number, 9)) {
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            failed += 1;
        }
    }
    assert!(failed > BLOCKS / 2, "{failed} of {BLOCKS} writes failed");
    assert!(scene.bad.dirty_blocks() <= SLOTS - 2 * (SLOTS / 8), "{}", scene.bad.dirty_blocks());
    let mut now = 0;
    victims_go_on(&scene, || {
        now += 1;
        answered("background work", scene.cache.tend(Duration::from_secs(now)));
        assert!(answered("a write", write_block(&scene.bad, 399, 9)).is_err());
    });
    assert!(scene.bad.trouble().is_some());
    // All that was acknowledged is there once home takes it.
    scene.home.state.store(WELL, Ordering::Relaxed);
    block_on(scene.bad.close()).unwrap();
    block_on(scene.cache.close()).unwrap();
}

fn never_answers(few: Few) {
    let scene = scene(few);
    for number in 0..10 {
        answered("a write", write_block(&scene.bad, number, 8)).unwrap();
    }
    answered("a drain", scene.bad.drain()).unwrap();
    scene.home.state.store(HUNG, Ordering::Relaxed);
    let bad = &scene.bad;
    // Its guest reads what home has, writes until there is no room, and is not answered any more.
    let mut hanging: Vec<LocalFuture<'_, ()>> = Vec::new();
    hanging.push(Box::pin(async {
        let _ = bad.read(GuestOffset::ZERO, Buffer::zeroed(64 * 4096)).await;
    }));
    for number in 0..64u64 {
        hanging.push(Box::pin(async move {
            let _ = bad
                .write(
                    GuestOffset::new((300 + number) * STRIDE * 4096 + 3),
                    Buffer::zeroed(7),
                    WriteFlags::default(),
                )
                .await;
        }));
    }
    for lane in 0..4u64 {
        hanging.push(Box::pin(async move {
            for number in 0..100 {
                write_block(bad, lane * 75 + number, 7).await.unwrap();
            }
        }));
    }
    let steps: RefCell<Vec<LocalFuture<'static, ()>>> = RefCell::default();
    for _ in 0..20 {
        let mut left = Vec::new();
        for mut one in hanging {
            if block_on(poll_once(&mut one)).is_none() {
                left.push(one);
            }
        }
        hanging = left;
    }
    // What needs home waits for it. Nothing of it has failed.
    assert_eq!(hanging.len(), 69, "requests that wait");
    let mut now = 100;
    victims_go_on(&scene, || {
        now += 1;
        let spawn = |step| steps.borrow_mut().push(step);
        answered("background work", scene.cache.tend_with(Duration::from_secs(now), &spawn));
        let mut running = steps.borrow_mut();
        block_on(async {
            let mut left = Vec::new();
            for mut step in running.drain(..) {
                if poll_once(&mut step).await.is_none() {
                    left.push(step);
                }
            }
            *running = left;
        });
        assert!(running.len() <= 1, "only the disk that hangs has work that has not ended");
    });
    assert_eq!(steps.borrow().len(), 1, "the write-back of the disk that hangs");
}

/// Writes of parts of sectors, over blocks that were given up while they waited for slots, read home again. They hold nothing
/// meanwhile that others need.
#[test]
fn what_was_given_up_while_a_write_waited_is_read_from_home_without_holding_others_up() {
    let scene = scene(Few::Slots);
    let cached = 110;
    for number in 0..cached {
        answered("a write", write_block(&scene.bad, number, 8)).unwrap();
    }
    answered("a drain", scene.bad.drain()).unwrap();
    answered("a write", write_block(&scene.bad, 399, 8)).unwrap();
    scene.home.state.store(HUNG, Ordering::Relaxed);
    let bad = &scene.bad;
    let mut hanging: Vec<LocalFuture<'_, ()>> = Vec::new();
    for number in 0..cached {
        hanging.push(Box::pin(async move {
            let at = GuestOffset::new(number * STRIDE * 4096 + 3);
            bad.write(at, Buffer::zeroed(7), WriteFlags::default()).await.unwrap();
        }));
    }
    let step = |hanging: &mut Vec<LocalFuture<'_, ()>>| {
        hanging.retain_mut(|one| block_on(poll_once(one)).is_none());
    };
    for _ in 0..20 {
        step(&mut hanging);
    }
    assert!(!hanging.is_empty(), "some of them need home");
    victims_go_on(&scene, || step(&mut hanging));
    assert!(!hanging.is_empty(), "they wait for home, and for nothing else");
    scene.home.state.store(WELL, Ordering::Relaxed);
}

/// All that is dirty is being written anew at this moment, so nothing of it can go home, and those writes are promised all slots
/// that are left. Whoever needs one waits until such a write has ended, and lets it run: a request of the same disk, and of another.
#[test]
fn what_is_just_being_written_is_waited_for() {
    let world = World::new(1);
    let storage = Drive::from_content(&world, Content::default(), DriveOptions::default());
    world.run(async {
        let shared: SharedStorage = storage.clone();
        let cache = common::cache_on(&shared, 12, 1).await.unwrap();
        let mut disks = Vec::new();
        for number in 1..7 {
            disks.push(over(&cache, number, MemoryDisk::new(BLOCKS * STRIDE * 4096)).await.unwrap());
        }
        for block in 0..6 {
            write_block(&disks[0], block, 1).await.unwrap();
        }
        disks[0].flush().await.unwrap();
        // Another record: now they are written in place.
        disks[1].write_zeroes(GuestOffset::ZERO.span(4096), ZeroFlags::default()).await.unwrap();
        disks[1].flush().await.unwrap();
        let hold = storage.hold(Operation::Write);
        let write = |disk: usize, block: u64| -> LocalFuture<'_, Result<()>> {
            Box::pin(write_block(&disks[disk], block, 2))
        };
        let mut writes: Vec<_> = (0..6).map(|block| write(0, block)).collect();
        for write in &mut writes {
            assert!(poll_once(write).await.is_none(), "it is held");
        }
        assert_eq!((hold.count(), disks[0].dirty_blocks(), cache.facts().free_slots), (6, 6, 6));
        let mut late = vec![write(0, 9), write(2, 9)];
        for _ in 0..3 {
            for write in &mut late {
                assert!(poll_once(write).await.is_none(), "there is no slot");
            }
        }
        drop(hold);
        writes.append(&mut late);
        assert!(join_all(writes).await.into_iter().all(|written| written.is_ok()));
    });
}

/// Which part of the map a group of a disk is in, as `docs/format/flash.md` says.
fn part_of(parts: u32, row: u16, group: u64) -> u64 {
    let mut mixed = ((u64::from(row) << 48) | (group * STRIDE)) ^ SECRET;
    for _ in 0..2 {
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB) ^ SECRET.rotate_left(32);
    }
    (((mixed ^ mixed >> 31) >> 32) * u64::from(parts)) >> 32
}

/// A part of the map that is full of what two other disks have, one of whose homes has just stopped answering: the blocks of
/// the other go home, and writes go on.
#[test]
fn a_full_part_is_emptied_by_the_home_that_answers() {
    const BYTES: u64 = 64 << 20;
    const GROUPS: u64 = 40_000;
    let cache = block_on(async {
        let storage: SharedStorage = MemoryStorage::new("flash");
        storage.set_len(BYTES).await.unwrap();
        vellum_flash::create(&storage, BYTES, ID, SECRET).await.unwrap();
        FlashCache::open(storage, common::options(1)).await.unwrap()
    });
    let size = GROUPS * STRIDE * 4096;
    let home = Arc::new(Troubled { inner: MemoryDisk::new(size), state: AtomicU8::new(WELL) });
    let homes: [SharedDisk; 3] = [home.clone(), MemoryDisk::new(size), MemoryDisk::new(size)];
    let disks: Vec<Arc<FlashDisk>> =
        (1..).zip(homes).map(|(number, home)| block_on(over(&cache, number, home)).unwrap()).collect();
    let rows = cache.rows();
    let parts = cache.facts().parts;
    // A sector of each of the disk's first groups that are in the first part, `most` of them.
    let groups = |disk: u8, most: usize| -> Vec<u64> {
        let row = rows.iter().find(|row| row.disk == [disk; 16]).expect("it is open").number;
        let of_part: Vec<u64> =
            (0..GROUPS).filter(|group| part_of(parts, row, *group) == 0).take(most).collect();
        assert_eq!(of_part.len(), most, "{parts} parts");
        of_part
    };
    let sector = |disk: usize, group: u64| {
        let at = GuestOffset::new(group * STRIDE * 4096);
        disks[disk].write(at, Buffer::copy_of(&[6; 512]), WriteFlags::default())
    };
    for (disk, number, most) in [(0, 1, 1800), (1, 2, 2600)] {
        for group in groups(number, most) {
            answered("a write", sector(disk, group)).unwrap();
        }
    }
    assert!(disks[1].counts().written_home > 0, "the part is full");
    assert_eq!(disks[0].dirty_blocks(), 1800);
    home.state.store(HUNG, Ordering::Relaxed);
    let steps: RefCell<Vec<LocalFuture<'static, ()>>> = RefCell::default();
    let before = disks[1].counts().written_home;
    block_on(async {
        let mut now = 0;
        cache.tend_with(Duration::from_secs(0), &|step| steps.borrow_mut().push(step)).await;
        for group in groups(3, 60) {
            let mut write = sector(2, group);
            for round in 0.. {
                if let Some(written) = poll_once(&mut write).await {
                    written.unwrap();
                    break;
                }
                assert!(round < 1000, "a write waits for the home that does not answer");
                now += 1;
                cache.tend_with(Duration::from_millis(now), &|step| steps.borrow_mut().push(step)).await;
                let mut running = steps.take();
                let mut left = Vec::new();
                for mut step in running.drain(..) {
                    if poll_once(&mut step).await.is_none() {
                        left.push(step);
                    }
                }
                steps.borrow_mut().append(&mut left);
            }
        }
    });
    assert!(disks[1].counts().written_home > before, "what made room");
    assert_eq!(disks[0].dirty_blocks(), 1800);
}

/// A read goes over a block that is cached, and home cannot be read in just that one.
#[test]
fn what_flash_has_is_read_where_home_is_damaged() {
    block_on(async {
        let inner = MemoryDisk::new(BLOCKS * 4096);
        for block in 0..64 {
            let data = Buffer::copy_of(&[1 + u8::try_from(block).unwrap(); 4096]);
            inner.write(GuestOffset::new(block * 4096), data, WriteFlags::default()).await.unwrap();
        }
        let home = Arc::new(Troubled { inner, state: AtomicU8::new(WELL) });
        let storage = MemoryStorage::new("flash");
        storage.set_len(32 << 20).await.unwrap();
        let shared: SharedStorage = storage;
        flash::create(&shared, 32 << 20, ID, SECRET).await.unwrap();
        let cache = FlashCache::open(shared, common::options(1)).await.unwrap();
        let disk = over(&cache, 1, home.clone() as SharedDisk).await.unwrap();
        let read = async |block: u64, blocks: usize| {
            disk.read(GuestOffset::new(block * 4096), Buffer::for_overwrite(blocks * 4096)).await
        };
        read(33, 1).await.unwrap();
        for second in 1..40 {
            cache.tend(Duration::from_secs(second)).await;
        }
        assert_eq!(disk.counts().admitted, 1);
        home.state.store(DAMAGED, Ordering::Relaxed);
        for (block, blocks) in [(33, 1), (32, 3), (30, 16)] {
            let bytes = read(block, blocks).await.unwrap().to_vec();
            let expected: Vec<u8> = (block..block + blocks as u64)
                .flat_map(|block| [1 + u8::try_from(block).unwrap(); 4096])
                .collect();
            assert!(bytes == expected, "{blocks} blocks from {block} on");
        }
        home.state.store(WORSE, Ordering::Relaxed);
        assert_eq!(read(32, 3).await.unwrap_err().kind(), ErrorKind::Io, "nobody has block 34");
    });
}
