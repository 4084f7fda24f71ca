//! Another size: nothing is lost, whatever the sizes, and wherever it is cut off.

mod common;
use vellum_flash as flash;

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{ID, SECRET, bytes_of, over};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, GuestOffset, GuestSpan, ImageOffset, MemoryDisk, MemoryStorage, Random,
    SharedDisk, SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_flash::{FlashCache, FlashDisk};
use vellum_sim::explore::Medium;
use vellum_sim::{Content, CrashKind, Delay, Drive, DriveOptions, World};

const BLOCKS: u64 = 600;

/// What a guest has written, block by block.
type Model = BTreeMap<u64, u8>;

async fn open(storage: &SharedStorage) -> Arc<FlashCache> {
    FlashCache::open(storage.clone(), common::options(1)).await.unwrap()
}

async fn made(slots: u64) -> SharedStorage {
    let storage: SharedStorage = MemoryStorage::new("flash");
    storage.set_len(bytes_of(slots)).await.unwrap();
    vellum_flash::create(&storage, bytes_of(slots), ID, SECRET).await.unwrap();
    storage
}

async fn write(disk: &FlashDisk, model: &mut Model, block: u64, value: u8) {
    let data = Buffer::copy_of(&[value; 4096]);
    disk.write(GuestOffset::new(block * 4096), data, WriteFlags::default()).await.unwrap();
    model.insert(block, value);
}

async fn agrees(disk: &dyn Disk, model: &Model, why: &str) {
    for block in 0..BLOCKS {
        let wanted = model.get(&block).copied().unwrap_or(0);
        let found = disk.read(GuestOffset::new(block * 4096), Buffer::zeroed(4096)).await.unwrap();
        assert_eq!(found.to_vec(), [wanted; 4096], "{why}: block {block}");
    }
}

/// Some changes, some of which go home.
async fn change(random: &mut Random, disk: &FlashDisk, model: &mut Model, dirty_max: u64) {
    for _ in 0..random.below(200) {
        let block = random.below(BLOCKS);
        match random.below(12) {
            0 => {
                let blocks = (1 + random.below(6)).min(BLOCKS - block);
                let span: GuestSpan = GuestOffset::new(block * 4096).span(blocks * 4096);
                disk.write_zeroes(span, ZeroFlags::default()).await.unwrap();
                model.retain(|written, _| !(block..block + blocks).contains(written));
            }
            1 => drop(disk.read(GuestOffset::new(block * 4096), Buffer::zeroed(4096)).await.unwrap()),
            _ => write(disk, model, block, u8::try_from(1 + random.below(255)).unwrap()).await,
        }
        if disk.dirty_blocks() > dirty_max {
            disk.drain().await.unwrap();
        }
    }
}

/// In the eyes of the program, and of the second one that reads the same bytes.
async fn is_sound(storage: &SharedStorage, why: &str) {
    let mut lines = Vec::new();
    let errors = vellum_flash::check(storage, &mut |line| lines.push(line)).await.unwrap();
    assert_eq!(errors, 0, "{why}: {lines:?}");
    let all = Buffer::for_overwrite(usize::try_from(storage.len()).unwrap());
    let all = storage.read(ImageOffset::ZERO, all).await.unwrap().to_vec();
    static FILES: AtomicU64 = AtomicU64::new(0);
    let number = FILES.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("vellum-flash-resize-{}-{number}", std::process::id()));
    std::fs::write(&path, all).unwrap();
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check-flash.py");
    let ran = Command::new("python3").arg(tool).arg("--list").arg(&path).output();
    std::fs::remove_file(&path).unwrap();
    // Without Python there is no second reader.
    let Ok(ran) = ran else { return };
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{why}: {text}{}", String::from_utf8_lossy(&ran.stderr));
    let is_listed = |line: &&str| ["row ", "zero ", "block "].iter().any(|word| line.starts_with(word));
    let theirs: Vec<&str> = text.lines().filter(is_listed).collect();
    assert_eq!(theirs, vellum_flash::listing(storage).await.unwrap(), "{why}");
}

#[test]
fn any_sizes_one_after_the_other_lose_nothing() {
    for seed in 0..12 {
        block_on(async {
            let mut random = Random::from_seed(seed);
            let storage = made(700).await;
            let home = MemoryDisk::new(BLOCKS * 4096);
            let mut home_now: SharedDisk = home.clone();
            let (mut model, mut changed, mut moved) = (Model::new(), 0, 0);
            for round in 0..8 {
                let why = format!("seed {seed}, round {round}");
                let cache = open(&storage).await;
                let disk = over(&cache, 1, home_now.clone()).await.unwrap();
                agrees(&*disk, &model, &why).await;
                change(&mut random, &disk, &mut model, 150).await;
                disk.keep_at_close(true);
                disk.close().await.unwrap();
                cache.close().await.unwrap();
                home_now = home.reopened();
                let slots = *random.pick(&[300, 420, 700, 1000, 1500]) + random.below(40);
                let bytes = bytes_of(slots);
                let before = storage.len();
                if bytes > before {
                    storage.set_len(bytes).await.unwrap();
                }
                let cache = open(&storage).await;
                let dirty = cache.facts().dirty_blocks;
                let mut goes_on = |done, total| {
                    assert!(done <= total);
                    Ok(())
                };
                match cache.resize(bytes, &mut goes_on).await {
                    Ok(resized) => {
                        assert_eq!((resized.slots, resized.file_bytes), (slots, bytes), "{why}");
                        storage.set_len(bytes).await.unwrap();
                        (changed, moved) = (changed + 1, moved + resized.moved);
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Invalid, "{why}: {}", error.chain());
                        storage.set_len(before).await.unwrap();
                    }
                }
                is_sound(&storage, &why).await;
                let cache = open(&storage).await;
                assert_eq!(cache.facts().dirty_blocks, dirty, "{why}");
                cache.close().await.unwrap();
            }
            assert!(changed >= 4 && moved > 0, "seed {seed}: {changed} sizes, {moved} blocks moved");
            let cache = open(&storage).await;
            let disk = over(&cache, 1, home_now).await.unwrap();
            agrees(&*disk, &model, &format!("seed {seed}, at the end")).await;
            disk.close().await.unwrap();
            agrees(&*home.reopened(), &model, &format!("seed {seed}, home alone")).await;
        });
    }
}

#[test]
fn what_is_dirty_and_has_no_room_is_counted_and_nothing_changes() {
    block_on(async {
        let storage = made(700).await;
        let home = MemoryDisk::new(BLOCKS * 4096);
        let mut model = Model::new();
        let cache = open(&storage).await;
        let disk = over(&cache, 1, home.clone()).await.unwrap();
        for block in 0..400 {
            write(&disk, &mut model, block, 7).await;
        }
        disk.keep_at_close(true);
        disk.close().await.unwrap();
        cache.close().await.unwrap();
        let cache = open(&storage).await;
        let error = cache.resize(bytes_of(320), &mut |_, _| Ok(())).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(error.chain().contains("400") && error.chain().contains("flash drain"), "{}", error.chain());
        cache.close().await.unwrap();
        // Stopped half way, it is as before too.
        let cache = open(&storage).await;
        let mut steps = 0;
        let stopped = cache
            .resize(bytes_of(560), &mut |_, _| {
                steps += 1;
                if steps > 3 { Err(Error::new(ErrorKind::Closed, "interrupted")) } else { Ok(()) }
            })
            .await;
        assert_eq!(stopped.unwrap_err().kind(), ErrorKind::Closed);
        is_sound(&storage, "stopped").await;
        let cache = open(&storage).await;
        assert_eq!((cache.facts().slots, cache.facts().dirty_blocks), (700, 400));
        let disk = over(&cache, 1, home.reopened()).await.unwrap();
        agrees(&*disk, &model, "stopped").await;
        disk.close().await.unwrap();
    });
}

/// More parts, and fewer: all blocks are in other ones then.
#[test]
fn parts_come_and_go() {
    block_on(async {
        let storage: SharedStorage = MemoryStorage::new("flash");
        storage.set_len(20 << 20).await.unwrap();
        vellum_flash::create(&storage, 20 << 20, ID, SECRET).await.unwrap();
        let home = MemoryDisk::new(4000 * 4096);
        let cache = open(&storage).await;
        let disk = over(&cache, 1, home.clone()).await.unwrap();
        let mut model = Model::new();
        for number in 0..3000 {
            let block = number * 7 % 4000;
            write(&disk, &mut model, block, u8::try_from(number % 255 + 1).unwrap()).await;
            if number == 1500 {
                disk.drain().await.unwrap();
            }
        }
        disk.keep_at_close(true);
        disk.close().await.unwrap();
        cache.close().await.unwrap();
        let mut parts = Vec::new();
        for (mib, keeps_all) in [(60, true), (24, true), (90, true), (10, false), (12, true)] {
            storage.set_len(storage.len().max(mib << 20)).await.unwrap();
            let cache = open(&storage).await;
            let before = cache.facts();
            let resized = cache.resize(mib << 20, &mut |_, _| Ok(())).await.unwrap();
            storage.set_len(mib << 20).await.unwrap();
            is_sound(&storage, &format!("{mib} MiB")).await;
            let facts = vellum_flash::look(&storage).await.unwrap().facts;
            assert_eq!(facts.dirty_blocks, before.dirty_blocks);
            assert_eq!(facts.blocks, before.blocks - resized.given_up);
            assert_eq!(resized.given_up == 0, keeps_all, "{mib} MiB: {resized:?}");
            parts.push(facts.parts);
        }
        assert_eq!(parts, [4, 2, 6, 1, 1]);
        let cache = open(&storage).await;
        let disk = over(&cache, 1, home.reopened()).await.unwrap();
        agrees(&*disk, &model, "at the end").await;
        disk.close().await.unwrap();
        agrees(&*home.reopened(), &model, "home alone").await;
    });
}

/// After a crash anywhere the cache has its old size or its new one, and all that was dirty.
#[test]
#[allow(clippy::print_stderr, reason = "how much was looked at is worth knowing")]
fn a_crash_anywhere_leaves_the_old_size_or_the_new_one() {
    let (mut states, mut sizes) = (0, BTreeMap::<u64, u64>::new());
    for (seed, (from, to)) in (0..).zip([(700, 400), (400, 900), (700, 330), (330, 420), (700, 800)]) {
        let mut random = Random::from_seed(seed);
        let home = MemoryDisk::new(BLOCKS * 4096);
        let mut model = Model::new();
        let (content, dirty) = block_on(async {
            let storage = made(from).await;
            // Each beginning once more with the tables at the other end.
            if seed % 2 == 1 {
                storage.set_len(bytes_of(from + 300)).await.unwrap();
                let cache = open(&storage).await;
                cache.resize(bytes_of(from + 300), &mut |_, _| Ok(())).await.unwrap();
            }
            let cache = open(&storage).await;
            let disk = over(&cache, 1, home.clone()).await.unwrap();
            change(&mut random, &disk, &mut model, 60).await;
            for block in 0..60 {
                write(&disk, &mut model, block * 10, 9).await;
            }
            disk.keep_at_close(true);
            disk.close().await.unwrap();
            cache.close().await.unwrap();
            let dirty = cache.facts().dirty_blocks;
            if storage.len() < bytes_of(to) {
                storage.set_len(bytes_of(to)).await.unwrap();
            }
            let all = storage
                .read(ImageOffset::ZERO, Buffer::for_overwrite(usize::try_from(storage.len()).unwrap()));
            (Content::of(&all.await.unwrap().to_vec()), dirty)
        });
        let world = World::new(seed);
        let drive = Drive::from_content(
            &world,
            content,
            DriveOptions { delay: Delay::none(), ..DriveOptions::default() },
        );
        world.run(async {
            let storage: SharedStorage = drive.clone();
            let cache = open(&storage).await;
            let resized = cache.resize(bytes_of(to), &mut |_, _| Ok(())).await.unwrap();
            assert_eq!(resized.slots, to);
        });
        let log = drive.log();
        let mut seen = HashSet::new();
        for position in log.crash_positions() {
            for kind in [CrashKind::PowerCut, CrashKind::ProcessKill] {
                let point = log.crash(kind, position);
                let mut images: Vec<Content> = vec![point.image_of(0), point.image_of(u64::MAX)];
                for _ in 0..6 {
                    images.push(point.random_image(&mut random));
                }
                if !point.pending().is_empty() {
                    let torn = random.index(point.pending().len());
                    images.extend(point.tears(torn, u64::MAX).take(64).step_by(9));
                }
                for image in images {
                    if !seen.insert(image.digest()) {
                        continue;
                    }
                    states += 1;
                    let storage: SharedStorage = Medium::new(image);
                    let why = format!("{from} to {to}, {kind:?} at {position:?}");
                    block_on(async {
                        let cache = FlashCache::open(storage.clone(), common::options(2)).await;
                        let cache = cache.unwrap_or_else(|error| panic!("{why}: {}", error.chain()));
                        let facts = cache.facts();
                        *sizes.entry(facts.slots).or_default() += 1;
                        assert_eq!(facts.dirty_blocks, dirty, "{why}");
                        let disk = over(&cache, 1, home.reopened()).await.unwrap();
                        agrees(&*disk, &model, &why).await;
                        // It goes on.
                        let mut model = model.clone();
                        for block in [3, 100, 599] {
                            write(&disk, &mut model, block, 77).await;
                        }
                        disk.flush().await.unwrap();
                        agrees(&*disk, &model, &why).await;
                    });
                }
            }
        }
    }
    eprintln!("{states} states, by slots {sizes:?}");
    assert!(sizes.len() >= 6, "{sizes:?}: old sizes and new ones");
}

/// A file that was cut while the cache was in use may have grown again up to its last slot, and no further: what was cut off would
/// read as zeros.
#[test]
fn a_cache_that_has_lost_its_end_is_not_used() {
    block_on(async {
        let storage = made(64).await;
        let cache = open(&storage).await;
        let slots = storage.len();
        cache.keep_witness().await.expect("it was never used");
        let whole = storage.len();
        assert!(whole > slots, "its end is never written");
        let disk = over(&cache, 1, MemoryDisk::new(1 << 20)).await.unwrap();
        write(&disk, &mut Model::default(), 3, 9).await;
        disk.flush().await.unwrap();
        drop(disk);
        drop(cache);
        open(&storage).await.keep_witness().await.expect("it is as it was");
        storage.set_len(slots - 32 * 4096).await.unwrap();
        storage.set_len(slots).await.unwrap();
        let refused = open(&storage).await.keep_witness().await.expect_err("it was cut");
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{}", refused.chain());
        assert_eq!(storage.len(), slots, "nothing hides that");
    });
}
