//! What a guest's reads ask of home while little or nothing of it is cached: never more requests than without the cache.

mod common;
use vellum_flash as flash;

use std::sync::Arc;
use std::time::Duration;

use common::{ID, SECRET, over};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, HostTally, IoCounts, IoTally, MemoryStorage, Random, SharedDisk,
    SharedStorage, Storage, Tallied, WriteFlags,
};
use vellum_flash::{FlashCache, FlashDisk};
use vellum_format::Raw;

const DISK_BYTES: u64 = 32 << 20;
const CACHE_BYTES: u64 = 128 << 20;

struct Scene {
    cache: Arc<FlashCache>,
    disk: Arc<FlashDisk>,
    home: Arc<IoTally>,
    flash: Arc<IoTally>,
    content: Vec<u8>,
    now: u64,
}

fn scene() -> Scene {
    block_on(async {
        let mut content = vec![0; usize::try_from(DISK_BYTES).unwrap()];
        Random::from_seed(1).fill(&mut content);
        let (home, flash): (Arc<IoTally>, Arc<IoTally>) = Default::default();
        let image = MemoryStorage::new("home");
        image.set_len(DISK_BYTES).await.unwrap();
        image.write(vellum_core::ImageOffset::ZERO, Buffer::copy_of(&content)).await.unwrap();
        let image: SharedDisk = Raw::open(Tallied::shared(image, home.clone()), false, &HostTally::default());
        let storage = MemoryStorage::new("flash");
        storage.set_len(CACHE_BYTES).await.unwrap();
        let storage: SharedStorage = Tallied::shared(storage, flash.clone());
        flash::create(&storage, CACHE_BYTES, ID, SECRET).await.unwrap();
        let cache = FlashCache::open(storage, common::options(1)).await.unwrap();
        let disk = over(&cache, 1, image).await.unwrap();
        Scene { cache, disk, home, flash, content, now: 0 }
    })
}

impl Scene {
    fn read(&self, at: u64, len: u64) {
        let range = usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
        let buffer = Buffer::for_overwrite(range.len());
        let read = block_on(self.disk.read(GuestOffset::new(at), buffer)).unwrap();
        assert!(read.to_vec() == self.content[range], "{len} bytes at {at}");
    }

    /// What was read gets its slots.
    fn admit(&mut self) {
        for _ in 0..40 {
            self.now += 1;
            block_on(self.cache.tend(Duration::from_millis(self.now)));
        }
    }

    fn asked(&self, what: impl FnOnce(&Self)) -> IoCounts {
        let before = self.home.counts();
        what(self);
        self.home.counts() - before
    }
}

#[test]
fn a_read_of_what_is_not_cached_is_one_read_of_home_and_waits_for_nothing_of_flash() {
    for shift in [12, 13, 14, 16, 18, 20] {
        let len = 1 << shift;
        // In order, at whole blocks and across them, and anywhere.
        for (offset, is_random) in [(0, false), (512, false), (0, true)] {
            let scene = scene();
            let mut random = Random::from_seed(len);
            let reads = (4 << 20) / len;
            let flash = scene.flash.counts();
            let asked = scene.asked(|scene| {
                for number in 0..reads {
                    // Far apart, so that none is of what another has read.
                    let at = if is_random {
                        number * 2 * len + random.below(len / 512) * 512
                    } else {
                        number * len
                    };
                    scene.read(at + offset, len);
                }
            });
            assert_eq!(
                (asked.reads, asked.bytes_read),
                (reads, reads * len),
                "{len} at {offset}, {is_random}"
            );
            // The background has not had a turn yet: nothing is on its way to flash.
            let flash = scene.flash.counts() - flash;
            assert_eq!((flash.reads, flash.writes, flash.flushes), (0, 0, 0));
        }
    }
}

#[test]
fn a_few_blocks_that_are_cached_do_not_split_a_read() {
    let mut scene = scene();
    // Every fourth block of the first half of each mebibyte.
    for number in (0..32).flat_map(|part| (0..32).map(move |block| part * 256 + block * 4)) {
        scene.read(number * 4096, 4096);
    }
    scene.admit();
    let admitted = scene.disk.counts().admitted;
    assert_eq!(admitted, 32 * 32);
    for part in 0..16 {
        let asked = scene.asked(|scene| scene.read(part << 20, 1 << 20));
        // The first block is a hit, and what is between the others is not worth requests of its own.
        assert_eq!((asked.reads, asked.bytes_read), (1, (1 << 20) - 4096), "mebibyte {part}");
        scene.admit();
    }
    let refused = scene.disk.counts().refused;
    assert_eq!(refused, 0, "what was cached already is no admission that failed");
    let asked = scene.asked(|scene| (0..16).for_each(|part| scene.read(part << 20, 1 << 20)));
    assert_eq!(asked.reads, 0, "all of it is cached now");
    // Dirty blocks are on flash alone.
    let mut rest = 16..32;
    for part in rest.by_ref().take(4) {
        let block = (part << 20) + 4096 * 8;
        scene.content[usize::try_from(block).unwrap()..][..4096].fill(7);
        let data = Buffer::copy_of(&[7; 4096]);
        block_on(scene.disk.write(GuestOffset::new(block), data, WriteFlags::default())).unwrap();
        let asked = scene.asked(|scene| scene.read(part << 20, 1 << 20));
        assert_eq!(asked.reads, 2, "on both sides of it");
    }
    // Many that are cached are not read again.
    for part in rest {
        scene.read((part << 20) + (64 << 10), 64 << 10);
    }
    scene.admit();
    let asked = scene.asked(|scene| scene.read(31 << 20, 256 << 10));
    assert_eq!((asked.reads, asked.bytes_read), (2, (15 + 31) * 4096));
}
