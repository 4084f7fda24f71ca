//! Threads over one cache of few slots: each has blocks of its own, and finds what it wrote last.

mod common;
use vellum_flash as flash;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{cache_on, over};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, MemoryDisk, MemoryStorage, Random, SharedDisk, SharedStorage, WriteFlags,
    ZeroFlags,
};
use vellum_flash::{FlashCache, FlashDisk};

const THREADS: u64 = 4;
const BLOCKS: u64 = 96;

/// Blocks of one thread: every fourth.
async fn guest(disk: &FlashDisk, thread: u64, steps: u64) {
    let mut random = Random::from_seed(thread);
    let mut model = vec![0u8; usize::try_from(BLOCKS).unwrap()];
    for step in 0..steps {
        let block = random.below(BLOCKS / THREADS) * THREADS + thread;
        let at = GuestOffset::new(block * 4096);
        let index = usize::try_from(block).unwrap();
        match random.below(10) {
            0..=4 => {
                let value = 1 + u8::try_from(step % 250).unwrap();
                let fua = WriteFlags { fua: random.one_in(10) };
                disk.write(at, Buffer::copy_of(&[value; 4096]), fua).await.unwrap();
                model[index] = value;
            }
            5 => {
                let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
                disk.write_zeroes(at.span(4096), flags).await.unwrap();
                model[index] = 0;
            }
            6 => disk.flush().await.unwrap(),
            _ => {
                let found = disk.read(at, Buffer::for_overwrite(4096)).await.unwrap().to_vec();
                assert!(
                    found.iter().all(|byte| *byte == model[index]),
                    "thread {thread} step {step}: block {block}"
                );
            }
        }
    }
}

fn race(slots: u64, steps: u64) {
    let storage: SharedStorage = MemoryStorage::new("flash");
    let cache: Arc<FlashCache> = block_on(cache_on(&storage, slots, 1)).unwrap();
    let homes: Vec<SharedDisk> = (0..2).map(|_| MemoryDisk::new(BLOCKS * 4096) as SharedDisk).collect();
    let disks: Vec<Arc<FlashDisk>> = (1..)
        .zip(&homes)
        .map(|(number, home)| block_on(over(&cache, number, home.clone())).unwrap())
        .collect();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut now = Duration::ZERO;
            while !is_over.load(Ordering::Relaxed) {
                now += Duration::from_secs(20);
                block_on(cache.tend(now));
                std::thread::yield_now();
            }
        });
        let guests: Vec<_> = (0..THREADS)
            .flat_map(|thread| disks.iter().map(move |disk| (thread, disk)))
            .map(|(thread, disk)| scope.spawn(move || block_on(guest(disk, thread, steps))))
            .collect();
        let results: Vec<_> = guests.into_iter().map(|guest| guest.join()).collect();
        is_over.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    for disk in disks {
        block_on(disk.close()).unwrap();
    }
    block_on(cache.close()).unwrap();
    assert_eq!(cache.facts().dirty_blocks, 0);
}

#[test]
fn few_slots() {
    race(10, 1500);
}

#[test]
fn some_slots() {
    race(60, 3000);
}
