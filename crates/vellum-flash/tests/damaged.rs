//! Places of slices that are damaged, and places that were cut off: a cache is right or refused, and one that a crash has left is
//! not refused.
//!
//! ```text
//!   writes and flushes ► the cache after each ► one place of one slice changed ► opened: every block, or Corrupt
//! ```

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{ID, SECRET, options, over};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, MemoryDisk, MemoryStorage, Random, SharedStorage, Storage as _,
    WriteFlags,
};
use vellum_flash::{self as flash, FlashCache, FlashDisk, look};

const SLOTS: u64 = 100;
const BLOCKS: u64 = 60;
const BLOCK: u64 = 4096;
const BLOCK_LEN: usize = 4096;
const SLICES_AT: usize = 8192;
const PLACE: usize = 90_112;
const SLICES: usize = 2;
const RING_AT: usize = SLICES_AT + 2 * SLICES * PLACE;
const RING: usize = 128 << 10;

type Model = BTreeMap<u64, u8>;

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// The newest record, and its tail.
fn newest(bytes: &[u8]) -> (u64, u64) {
    let records = (RING_AT..RING_AT + RING).step_by(4096).filter(|at| bytes[*at..].starts_with(b"VELLUMF1"));
    records.map(|at| (be64(bytes, at + 24), be64(bytes, at + 40))).max().unwrap_or((0, 1))
}

/// Where the newer place of a slice begins, and how old each is.
fn newer_place(bytes: &[u8], slice: usize) -> Option<(usize, u64)> {
    let places = [0, 1].map(|place| SLICES_AT + (2 * slice + place) * PLACE);
    let ages = places.map(|at| bytes[at..].starts_with(b"VELLUMF2").then(|| be64(bytes, at + 32)));
    match ages {
        [Some(first), Some(second)] if first > second => Some((places[0], first)),
        [Some(_), Some(second)] => Some((places[1], second)),
        _ => None,
    }
}

async fn new_cache() -> Arc<MemoryStorage> {
    let memory = MemoryStorage::new("flash");
    let storage: SharedStorage = memory.clone();
    storage.set_len(common::bytes_of(SLOTS)).await.unwrap();
    flash::create(&storage, common::bytes_of(SLOTS), ID, SECRET).await.unwrap();
    memory
}

async fn of(bytes: &[u8]) -> Arc<MemoryStorage> {
    let memory = MemoryStorage::new("flash");
    memory.set_len(bytes.len() as u64).await.unwrap();
    memory.write(vellum_core::ImageOffset::ZERO, Buffer::copy_of(bytes)).await.unwrap();
    memory
}

async fn opened(memory: &Arc<MemoryStorage>) -> vellum_core::Result<(Arc<FlashCache>, Arc<FlashDisk>)> {
    let cache = FlashCache::open(memory.clone(), options(1)).await?;
    let disk = over(&cache, 1, MemoryDisk::new(BLOCKS * BLOCK)).await?;
    Ok((cache, disk))
}

async fn write(disk: &FlashDisk, model: &mut Model, random: &mut Random, value: u8) {
    let block = random.below(BLOCKS);
    let bytes = Buffer::copy_of(&[value; BLOCK_LEN]);
    disk.write(GuestOffset::new(block * BLOCK), bytes, WriteFlags::default()).await.unwrap();
    disk.flush().await.unwrap();
    model.insert(block, value);
}

async fn assert_right(disk: &FlashDisk, model: &Model, about: &str) {
    for (block, value) in model {
        let buffer = Buffer::for_overwrite(BLOCK_LEN);
        let read = disk.read(GuestOffset::new(block * BLOCK), buffer).await.unwrap();
        assert_eq!(read.to_vec(), [*value; BLOCK_LEN], "{about}, block {block}");
    }
}

/// What the cache was after each of these flushes, as a kill leaves it, and what was written.
async fn moments(seed: u64, flushes: u8) -> Vec<(Vec<u8>, Model)> {
    let memory = new_cache().await;
    let (cache, disk) = opened(&memory).await.unwrap();
    let (mut model, mut random) = (Model::new(), Random::from_seed(seed));
    let mut moments = Vec::new();
    for number in 1..=flushes {
        write(&disk, &mut model, &mut random, number).await;
        moments.push((memory.content().to_vec(), model.clone()));
    }
    disk.close().await.unwrap();
    cache.close().await.unwrap();
    moments
}

/// Changes of a place that has this many bytes in its slice: in the payload, and in each field of the header but those that make it
/// look older.
fn changes(bytes: &[u8], at: usize) -> Vec<(&'static str, usize, u8)> {
    let mut changes =
        vec![("payload", at + 64, 8), ("CRC", at + 8, 1), ("magic", at, 0x40), ("id", at + 20, 2)];
    changes.extend([("number", at + 15, 4), ("length", at + 42, 1), ("zero", at + 50, 16)]);
    if bytes[at + 36] & 0x20 == 0 {
        changes.push(("age", at + 36, 0x20));
    }
    changes
}

#[test]
fn a_damaged_place_is_never_passed_over_for_an_older_one() {
    block_on(async {
        let (mut refused, mut right) = (0, 0);
        for seed in 0..3 {
            for (bytes, model) in moments(seed, 120).await.iter().skip(20).step_by(4) {
                for slice in 0..SLICES {
                    let Some((at, as_of)) = newer_place(bytes, slice) else { continue };
                    for (what, byte, bits) in changes(bytes, at) {
                        let about = format!(
                            "seed {seed}, record {:?}, slice {slice} of {as_of}, {what}",
                            newest(bytes)
                        );
                        let mut bytes = bytes.clone();
                        bytes[byte] ^= bits;
                        let memory = of(&bytes).await;
                        let storage: SharedStorage = memory.clone();
                        let looked = look(&storage).await;
                        match opened(&memory).await {
                            Ok((_cache, disk)) => {
                                assert!(looked.is_ok(), "{about}");
                                assert_right(&disk, model, &about).await;
                                right += 1;
                            }
                            Err(error) => {
                                assert_eq!(error.kind(), ErrorKind::Corrupt, "{about}: {}", error.chain());
                                assert!(looked.is_err(), "{about}");
                                refused += 1;
                            }
                        }
                    }
                }
            }
        }
        assert!(refused > 100 && right > 10, "{refused} refused, {right} right");
    });
}

#[test]
fn a_place_that_was_cut_off_is_made_void_and_not_met_again() {
    block_on(async {
        let mut torn = 0;
        for (bytes, model) in moments(7, 200).await {
            for slice in 0..SLICES {
                let Some((at, as_of)) = newer_place(&bytes, slice) else { continue };
                if newest(&bytes).0 > as_of + 1 {
                    continue;
                }
                let about = format!("record {:?}, slice {slice} of {as_of}", newest(&bytes));
                let (mut bytes, mut model) = (bytes.clone(), model.clone());
                // Its header arrived, the rest did not.
                bytes[at + 64..at + 512].fill(0xEE);
                let memory = of(&bytes).await;
                let mut random = Random::from_seed(as_of);
                for round in 0..4 {
                    let about = format!("{about}, round {round}");
                    let (_cache, disk) =
                        opened(&memory).await.unwrap_or_else(|error| panic!("{about}: {}", error.chain()));
                    assert_right(&disk, &model, &about).await;
                    for _ in 0..2 {
                        write(&disk, &mut model, &mut random, 200 + round).await;
                    }
                    // Killed: neither is closed.
                }
                torn += 1;
            }
        }
        assert!(torn > 10, "{torn}");
    });
}
