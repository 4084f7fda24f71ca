//! A first pass over a disk: what it reads is cached as fast as flash takes it, and no read waits for that.

mod common;
use vellum_flash as flash;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{ID, SECRET, over};
use futures_lite::future::or;
use vellum_core::{Buffer, Disk, GuestOffset, HostTally, Random, SharedDisk, SharedStorage};
use vellum_flash::{FlashCache, FlashCounts, FlashOptions};
use vellum_format::Raw;
use vellum_sim::{Content, Delay, Drive, DriveOptions, World};

/// What a server does: the background at its work, each disk with a task of its own.
async fn tend(cache: Arc<FlashCache>, world: Rc<World>, has_ended: Arc<AtomicBool>) {
    let spawner = world.spawner();
    while !has_ended.load(Ordering::Relaxed) {
        let spawn = |step| drop(spawner.spawn(step));
        let has_more = cache.tend_with(world.now(), &spawn).await;
        match has_more {
            true => world.sleep(Duration::from_millis(1)).await,
            false => {
                let offered = async {
                    cache.wait_for_reads().await;
                    world.sleep(Duration::from_millis(1)).await;
                };
                or(world.sleep(Duration::from_millis(100)), offered).await;
            }
        }
    }
}

/// With a cache of `flash_bytes`, reads `blocks` of a new disk from its beginning, in requests of `request` bytes, `depth` at a time.
/// Home and flash take 100 us for a request. Returns the counts a second later, and how long the reads took.
fn pass(flash_bytes: u64, blocks: u64, request: usize, depth: u64) -> (FlashCounts, Duration) {
    let world = Rc::new(World::new(1));
    let delay = || Delay::fixed(Duration::from_micros(100)).with_flush(Duration::from_micros(600));
    let drive = |bytes: &[u8]| {
        let options = DriveOptions { delay: delay(), ..DriveOptions::default() };
        Drive::from_content(&world, Content::of(bytes), options)
    };
    let len = usize::try_from(blocks * 4096).unwrap();
    let home: SharedStorage = drive(&vec![3; len]);
    let storage: SharedStorage = drive(&[]);
    let its = world.clone();
    world.run(async move {
        let world = its;
        storage.set_len(flash_bytes).await.unwrap();
        vellum_flash::create(&storage, flash_bytes, ID, SECRET).await.unwrap();
        let options = FlashOptions::new(Some(world.clock()), Random::from_seed(1));
        let cache = FlashCache::open(storage, options).await.unwrap();
        let home: SharedDisk = Raw::open(home, false, &HostTally::default());
        let disk = over(&cache, 1, home).await.unwrap();
        let has_ended = Arc::new(AtomicBool::new(false));
        let tending = world.spawn(tend(cache, world.clone(), has_ended.clone()));
        let (begun, step) = (world.now(), usize::try_from(depth).unwrap());
        let readers: Vec<_> = (0..depth)
            .map(|reader| {
                let disk = disk.clone();
                world.spawn(async move {
                    for number in (reader..len as u64 / request as u64).step_by(step) {
                        let at = GuestOffset::new(number * request as u64);
                        let read = disk.read(at, Buffer::zeroed(request)).await.unwrap();
                        assert_eq!(read.to_vec(), vec![3; request]);
                    }
                })
            })
            .collect();
        for reader in readers {
            reader.await;
        }
        let took = world.now() - begun;
        world.sleep(Duration::from_secs(1)).await;
        has_ended.store(true, Ordering::Relaxed);
        tending.await;
        (disk.counts(), took)
    })
}

#[test]
#[allow(clippy::print_stderr, reason = "the numbers are worth knowing")]
fn a_first_pass_is_cached_and_takes_no_longer() {
    for (flash_mib, blocks, request, depth) in [
        (64, 2048, 4096, 1),
        (64, 2048, 65_536, 1),
        (64, 2048, 1 << 20, 1),
        (64, 8192, 4096, 8),
        (1024, 8192, 131_072, 1),
        (64, 8192, 131_072, 1),
    ] {
        let (counts, took) = pass(flash_mib << 20, blocks, request, depth);
        let what = format!("{flash_mib} MiB of flash, {blocks} blocks by {request} bytes, {depth} at a time");
        eprintln!("{what}: {} admitted, {} refused, {took:?}", counts.admitted, counts.refused);
        assert_eq!((counts.misses, counts.admitted + counts.refused), (blocks, blocks), "{what}");
        if flash_mib == 64 && request == 131_072 {
            // 1.3 GB in a second. A record of so small a cache has room for 330 KiB of it, so flash takes less; what waits
            // is kept.
            assert!(counts.admitted >= (8 << 20) / 4096, "{what}");
        } else {
            assert_eq!(counts.refused, 0, "{what}");
        }
        let reads = blocks * 4096 / request as u64 / depth;
        assert_eq!(took, Duration::from_micros(100) * u32::try_from(reads).unwrap(), "{what}");
    }
}
