//! What the tests of the cache share.

#![allow(unreachable_pub, reason = "a module of each test program")]
#![allow(dead_code, reason = "each test program uses a part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::flash::{self, DiskOptions, FlashCache, FlashDisk, FlashOptions, FlashPolicy};
use vellum_core::{
    Buffer, Disk, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan, LocalFuture, Random, Result,
    SharedDisk, SharedStorage, WriteFlags, ZeroFlags,
};

pub mod explorer;
pub mod named;
pub mod pair;
pub mod readers;
pub mod tables;

pub const ID: [u8; 16] = [7; 16];
pub const SECRET: u64 = 0x5EC2_E700_0000_0001;

/// Bytes of a cache of this many slots, at most 4096, with the shortest ring.
pub const fn bytes_of(slots: u64) -> u64 {
    8192 + 4 * 90_112 + (128 << 10) + slots * 4096
}

/// Options without a clock.
pub fn options(seed: u64) -> FlashOptions {
    FlashOptions::new(None, Random::from_seed(seed))
}

/// A disk over a home that only the test reaches, in write-back.
pub async fn over(cache: &Arc<FlashCache>, number: u8, home: SharedDisk) -> Result<Arc<FlashDisk>> {
    over_with(cache, number, home, FlashPolicy::WriteBack).await
}

/// The same with this policy.
pub async fn over_with(
    cache: &Arc<FlashCache>,
    number: u8,
    home: SharedDisk,
    policy: FlashPolicy,
) -> Result<Arc<FlashDisk>> {
    let options = DiskOptions { disk: [number; 16], home, sessions: None, policy, trusts_home: true };
    cache.open_disk(options).await
}

/// Opens a cache, which is created when the storage is empty.
pub async fn cache_on(storage: &SharedStorage, slots: u64, seed: u64) -> Result<Arc<FlashCache>> {
    if storage.len() == 0 {
        storage.set_len(bytes_of(slots)).await?;
        flash::create(storage, bytes_of(slots), ID, SECRET).await?;
    }
    FlashCache::open(storage.clone(), options(seed)).await
}

/// The same with `memory` bytes for blocks where it says so, and with discards of free slots.
pub async fn cache_with(
    storage: &SharedStorage,
    slots: u64,
    seed: u64,
    memory: Option<u64>,
    trims: bool,
) -> Result<Arc<FlashCache>> {
    if storage.len() == 0 {
        drop(cache_on(storage, slots, seed).await?);
    }
    let mut options = FlashOptions { discards: trims, discard_slots_min: 1, ..options(seed) };
    if let Some(for_blocks) = memory {
        let empty: SharedStorage = vellum_core::MemoryStorage::new("empty");
        let needed = cache_on(&empty, slots, seed).await?.facts().budget_used_bytes;
        options.memory_bytes_max = Some(needed + for_blocks);
    }
    FlashCache::open(storage.clone(), options).await
}

/// A disk whose cache does background work after every request, and which closes its cache.
pub struct Owner {
    pub cache: Arc<FlashCache>,
    pub disk: SharedDisk,
    pub tends: bool,
    pub keeps: Option<Arc<FlashDisk>>,
    pub now: AtomicU64,
}

impl Owner {
    async fn after<T>(&self, result: Result<T>) -> Result<T> {
        if self.tends {
            let now = self.now.fetch_add(700, Ordering::Relaxed);
            while self.cache.tend(Duration::from_millis(now)).await && now.is_multiple_of(3) {}
        }
        result
    }
}

impl Disk for Owner {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.disk.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move { self.after(self.disk.read(at, buffer).await).await })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.after(self.disk.write(at, data, flags).await).await })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.after(self.disk.flush().await).await })
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.after(self.disk.write_zeroes(span, flags).await).await })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.after(self.disk.discard(span, flags).await).await })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.disk.map(span)
    }

    fn filling(&self) -> Option<Filling> {
        self.disk.filling()
    }

    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        self.disk.fill(at, data)
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            if let Some(disk) = &self.keeps {
                disk.keep_at_close(true);
            }
            self.disk.close().await?;
            self.cache.close().await
        })
    }
}
