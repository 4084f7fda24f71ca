//! `vellum-bench instructions`: a fixed number of the same requests to a disk in memory, for valgrind to
//! count.
//!
//! It has no ring, no thread, no clock and no randomness, so the count is nearly the same each time. The cost
//! of start and end cancels out when it is run with N and with 2 N requests: the difference over N is the
//! cost of one request. `tests/instructions.rs` checks it against bounds.

mod flat;

use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Error, GuestOffset, HostTally, Random, Result, SharedDisk, SharedStorage, Storage,
    WriteFlags,
};
use vellum_flash::{DiskOptions, FlashCache, FlashOptions, FlashPolicy};
use vellum_format::qcow2::{self, Files, Header, Qcow2};
use vellum_format::{Prealloc, Raw, native};
use vellum_lab::guest::filler;

use crate::load::workload::BLOCK;
use flat::Flat;

/// What one write makes its own: a cluster, a unit.
const UNIT: u64 = 64 << 10;

/// An image has so much besides the disk's bytes, at most.
const ROOM_BYTES: u64 = 256 << 20;

/// What is read and overwritten.
const MAPPED_BYTES: u64 = 16 << 20;

/// An odd number: multiples of it meet every place of a power of two once, in an order without neighbours.
const STRIDE: u64 = 0x9E37_79B1;

/// What a cache gets at a time before reads are counted.
const WARMED_BYTES: usize = 1 << 20;
/// It has all of it after fewer pieces than this; each is a second for it.
const WARMED_SECONDS_MAX: u64 = 1000;

/// Writes that allocate are flushed as often as those of `vellum-bench engine`.
const FLUSH_EVERY: u64 = 32;

/// What its journal's records are known by: chance would be another count each time.
const JOURNAL_KEY: Option<u128> = Some(5);

/// Repeat one request on a disk in memory, for counting instructions with valgrind
#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(value_enum)]
    what: What,
    /// Number of requests
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    operations: u64,
}

/// 4 KiB each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum What {
    /// A file is read.
    ReadRaw,
    /// The same, through a flash cache that has all of it.
    ReadFlash,
    /// What is mapped is read.
    ReadQcow2,
    ReadZoned,
    /// What is mapped is written, with a journal.
    OverwriteQcow2,
    /// Each write to 64 KiB that were never written, with a journal.
    AllocateQcow2,
    AllocateZoned,
}

impl What {
    fn is_zoned(self) -> bool {
        matches!(self, Self::ReadZoned | Self::AllocateZoned)
    }

    fn allocates(self) -> bool {
        matches!(self, Self::AllocateQcow2 | Self::AllocateZoned)
    }

    fn reads(self) -> bool {
        matches!(self, Self::ReadQcow2 | Self::ReadZoned | Self::ReadRaw | Self::ReadFlash)
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    block_on(repeat(args.what, args.operations))
}

async fn repeat(what: What, operations: u64) -> Result<()> {
    let units = operations.next_power_of_two();
    let size = if what.allocates() { units * UNIT } else { MAPPED_BYTES };
    let storage = Arc::new(Flat::with_room_for(size + ROOM_BYTES));
    make(what, &storage, size).await?;
    if !what.allocates() {
        let filled = if what == What::ReadFlash { What::ReadRaw } else { what };
        let disk = open(filled, &storage).await?;
        let bytes = filler(1 << 20);
        for at in (0..size).step_by(bytes.len()) {
            disk.write(GuestOffset::new(at), Buffer::copy_of(&bytes), WriteFlags::default()).await?;
        }
        disk.close().await?;
    }
    let disk = open(what, &storage).await?;
    let block = filler(BLOCK);
    for index in 0..operations {
        let place = match what.allocates() {
            true => index.wrapping_mul(STRIDE) % units * UNIT,
            false => index.wrapping_mul(STRIDE) % (size / BLOCK as u64) * BLOCK as u64,
        };
        let place = GuestOffset::new(place);
        if what.reads() {
            std::hint::black_box(disk.read(place, Buffer::for_overwrite(BLOCK)).await?);
            continue;
        }
        disk.write(place, Buffer::copy_of(&block), WriteFlags::default()).await?;
        if what.allocates() && (index + 1).is_multiple_of(FLUSH_EVERY) {
            disk.flush().await?;
        }
    }
    // Not closed: what that takes grows with the disk, which is another one for 2 N.
    std::mem::forget(disk);
    Ok(())
}

async fn make(what: What, storage: &Arc<Flat>, size: u64) -> Result<()> {
    if matches!(what, What::ReadRaw | What::ReadFlash) {
        return storage.set_len(size).await;
    }
    match what.is_zoned() {
        true => {
            let uuid = Some([1; 16]);
            let options =
                native::CreateOptions { size, has_table: true, has_zones: true, uuid, ..Default::default() };
            native::create(&**storage, &options).await.map(drop)
        }
        false => {
            let journal = Some(qcow2::JOURNAL_BYTES_DEFAULT);
            let options = qcow2::CreateOptions { size, journal, ..Default::default() };
            qcow2::create(&**storage, None, &options).await
        }
    }
}

async fn open(what: What, storage: &Arc<Flat>) -> Result<SharedDisk> {
    let image: SharedStorage = storage.clone();
    if what == What::ReadRaw {
        return Ok(Raw::open(image, false, &HostTally::default()));
    }
    if what == What::ReadFlash {
        return cached(Raw::open(image, false, &HostTally::default())).await;
    }
    if what.is_zoned() {
        let options =
            native::OpenOptions { journal_key: JOURNAL_KEY, prealloc: Prealloc::Off, ..Default::default() };
        return Ok(native::Native::open(image, None, options).await?);
    }
    let options =
        qcow2::OpenOptions { journal_key: JOURNAL_KEY, prealloc: Prealloc::Off, ..Default::default() };
    let header = Header::read(&*image).await?;
    Ok(Qcow2::open(header, Files { image, data_file: None, below: None }, options).await?)
}

/// The disk through a cache in memory, which has all of it once the disk was read.
async fn cached(home: SharedDisk) -> Result<SharedDisk> {
    let size = home.geometry().size;
    let flash = Arc::new(Flat::with_room_for(2 * size + ROOM_BYTES));
    flash.set_len(2 * size).await?;
    let flash: SharedStorage = flash;
    vellum_flash::create(&flash, 2 * size, [1; 16], 1).await?;
    let cache = FlashCache::open(flash, FlashOptions::new(None, Random::from_seed(1))).await?;
    let policy = FlashPolicy::ReadOnly;
    let options = DiskOptions { disk: [1; 16], home, sessions: None, policy, trusts_home: true };
    let disk = cache.open_disk(options).await?;
    let blocks = size / BLOCK as u64;
    for second in 0..WARMED_SECONDS_MAX {
        if disk.counts().admitted == blocks {
            break;
        }
        // What is there already is not admitted again. Some of it is refused until the rest is durable.
        let at = GuestOffset::new(second * WARMED_BYTES as u64 % size);
        drop(disk.read(at, Buffer::for_overwrite(WARMED_BYTES)).await?);
        while cache.tend(Duration::from_secs(second)).await {}
    }
    let admitted = disk.counts().admitted;
    if admitted != blocks {
        return Err(Error::invalid(format!("the cache has {admitted} of {blocks} blocks")));
    }
    Ok(disk)
}
