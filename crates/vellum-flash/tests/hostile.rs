//! A cache whose bytes somebody has chosen, with good CRCs: it is refused, or works. Nothing panics.

mod common;

use std::time::Duration;

use common::{ID, SECRET, options, over};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, MemoryDisk, MemoryStorage, Random, SharedStorage, WriteFlags,
    ZeroFlags,
};
use vellum_flash::{self as flash, FlashCache, check, look};

const SLOTS: u64 = 100;
const DISK_BYTES: u64 = 1 << 20;
const RING_AT: usize = 8192 + 4 * 90_112;
const SLOTS_AT: usize = RING_AT + (128 << 10);

/// A cache with something of everything, as a kill leaves it.
async fn seed_cache() -> Vec<u8> {
    let memory = MemoryStorage::new("flash");
    let storage: SharedStorage = memory.clone();
    let bytes = common::bytes_of(SLOTS);
    storage.set_len(bytes).await.unwrap();
    flash::create(&storage, bytes, ID, SECRET).await.unwrap();
    let cache = FlashCache::open(storage, options(1)).await.unwrap();
    let mut random = Random::from_seed(3);
    let disk = over(&cache, 1, MemoryDisk::new(DISK_BYTES)).await.unwrap();
    let other = over(&cache, 2, MemoryDisk::new(DISK_BYTES)).await.unwrap();
    for step in 0..60 {
        let len = 512 * (1 + random.below(30));
        let at = GuestOffset::new(512 * random.below((DISK_BYTES - len) / 512));
        let disk = if random.one_in(3) { &other } else { &disk };
        match random.below(6) {
            0 => disk.write_zeroes(at.span(len), ZeroFlags::default()).await.unwrap(),
            1 => disk.flush().await.unwrap(),
            _ => {
                let data = Buffer::copy_of(&vec![step; usize::try_from(len).unwrap()]);
                disk.write(at, data, WriteFlags::default()).await.unwrap();
            }
        }
    }
    disk.flush().await.unwrap();
    let bytes = memory.content().to_vec();
    for disk in [disk, other] {
        disk.close().await.unwrap();
    }
    cache.close().await.unwrap();
    bytes
}

fn sign(bytes: &mut [u8], field: usize) {
    bytes[field..field + 4].fill(0);
    let crc = crc32c::crc32c(bytes);
    bytes[field..field + 4].copy_from_slice(&crc.to_be_bytes());
}

/// Where each superblock, slice and record is, how long it is, and where in it is its CRC.
fn structures(bytes: &[u8]) -> Vec<(usize, usize, usize)> {
    let be32 = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let mut found = vec![(0, 4096, 8), (4096, 4096, 8)];
    for at in (8192..RING_AT).step_by(90_112) {
        if bytes[at..].starts_with(b"VELLUMF2") {
            found.push((at, 64 + be32(at + 40), 8));
        }
    }
    for at in (RING_AT..SLOTS_AT).step_by(4096) {
        if bytes[at..].starts_with(b"VELLUMF1") {
            found.push((at, be32(at + 48), 56));
        }
    }
    found.retain(|(at, len, _)| *len >= 64 && at + len <= bytes.len());
    found
}

/// Changes some bytes behind the magic of one structure, and makes its CRC good.
fn change(bytes: &mut [u8], random: &mut Random) {
    let (at, len, crc) = *random.pick(&structures(bytes));
    let used = len - bytes[at..at + len].iter().rev().take_while(|byte| **byte == 0).count();
    for _ in 0..=random.below(3) {
        let place = at + 8 + random.index(used.max(72) - 8);
        if random.one_in(3) {
            bytes[place] = *random.pick(&[0, 1, 2, 5, 6, 128, 255]);
        } else {
            bytes[place] ^= 1 << random.below(8);
        }
    }
    let len = match crc {
        // A slice or a record may say another length now.
        8 if at >= 8192 => 64 + u32::from_be_bytes(bytes[at + 40..at + 44].try_into().unwrap()) as usize,
        56 => u32::from_be_bytes(bytes[at + 48..at + 52].try_into().unwrap()) as usize,
        _ => len,
    };
    if len > 0 && at + len <= bytes.len() && crc + 4 <= len {
        sign(&mut bytes[at..at + len], crc);
    }
}

async fn try_it(bytes: &[u8], seed: u64) -> bool {
    let memory = MemoryStorage::holding("flash", bytes);
    let storage: SharedStorage = memory.clone();
    let looked = look(&storage).await;
    check(&storage, &mut |_| {}).await.ok();
    assert_eq!(memory.content().to_vec(), bytes, "seed {seed}: looking writes nothing");
    let cache = match FlashCache::open(storage, options(1)).await {
        Ok(cache) => cache,
        Err(error) => {
            assert!(looked.is_err(), "seed {seed}: {error:?}");
            assert!(
                matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported),
                "seed {seed}: {error:?}"
            );
            return false;
        }
    };
    assert!(looked.is_ok(), "seed {seed}");
    let mut random = Random::from_seed(seed);
    for number in [1, 2, 3] {
        let Ok(disk) = over(&cache, number, MemoryDisk::new(DISK_BYTES)).await else { continue };
        for _ in 0..6 {
            let len = 512 * (1 + random.below(60));
            let at = GuestOffset::new(512 * random.below((DISK_BYTES - len) / 512));
            let data = Buffer::copy_of(&vec![7; usize::try_from(len).unwrap()]);
            if disk.write(at, data, WriteFlags::default()).await.is_ok() {
                let found =
                    disk.read(at, Buffer::for_overwrite(usize::try_from(len).unwrap())).await.unwrap();
                assert!(found.to_vec().iter().all(|byte| *byte == 7), "seed {seed}");
            }
            disk.write_zeroes(at.span(len), ZeroFlags::default()).await.ok();
            disk.flush().await.ok();
        }
        cache.tend(Duration::from_secs(100)).await;
        disk.drain().await.ok();
        disk.close().await.ok();
    }
    cache.close().await.ok();
    true
}

#[test]
fn what_somebody_has_chosen_is_refused_or_works() {
    let scale = std::env::var("VELLUM_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1);
    let bytes = block_on(seed_cache());
    assert!(structures(&bytes).len() > 10, "there are records");
    let (mut works, mut refused) = (0, 0);
    for seed in 0..1500 * scale {
        let mut random = Random::from_seed(seed);
        let mut bytes = bytes.clone();
        for _ in 0..=random.below(2) {
            change(&mut bytes, &mut random);
        }
        if block_on(try_it(&bytes, seed)) { works += 1 } else { refused += 1 }
    }
    assert!(works > 100 && refused > 100, "{works} work, {refused} are refused");
}
