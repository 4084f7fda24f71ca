//! Clones of one template: its blocks are on flash once, whichever clone reads them, and leave when all clones have their own.

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{ID, SECRET, options};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Error, Extent, Geometry, GuestOffset, GuestSpan, ImageOffset, LocalFuture, MemoryDisk,
    MemoryStorage, Place, Random, Result, SharedDisk, SharedStorage, WriteFlags, ZeroFlags, lock,
};
use vellum_flash::{self as flash, DiskOptions, FlashCache, FlashDisk, FlashPolicy};

const TEMPLATE_BYTES: usize = 1 << 20;
const BLOCKS: u64 = TEMPLATE_BYTES as u64 / 4096;

/// An image over a template: it has whole blocks of its own, and reads the rest in long runs.
struct Overlay {
    own: Mutex<BTreeMap<u64, Vec<u8>>>,
    below: SharedDisk,
    storage: SharedStorage,
}

impl Overlay {
    fn over(below: SharedDisk) -> Arc<Self> {
        Arc::new(Self { own: Mutex::default(), below, storage: MemoryStorage::new("overlay") })
    }

    fn block(&self, block: u64) -> Option<Vec<u8>> {
        lock(&self.own).get(&block).cloned()
    }
}

impl Disk for Overlay {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        Some(self.below.clone())
    }

    fn read(&self, at: GuestOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let len = buffer.len();
            let first = at.bytes() / 4096;
            buffer = self.below.read(at, buffer).await?;
            for block in first..(at.bytes() + len as u64).div_ceil(4096) {
                if let Some(own) = self.block(block) {
                    let (from, to) =
                        ((block * 4096).max(at.bytes()), (block * 4096 + 4096).min(at.bytes() + len as u64));
                    let within = |offset: u64, base: u64| usize::try_from(offset - base).unwrap();
                    let bytes = &own[within(from, block * 4096)..within(to, block * 4096)];
                    buffer.copy_from(within(from, at.bytes()), bytes);
                }
            }
            Ok(buffer)
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let data = data.to_vec();
            let end = at.bytes() + data.len() as u64;
            for block in at.bytes() / 4096..end.div_ceil(4096) {
                let start = GuestOffset::new(block * 4096);
                let mut bytes = match self.block(block) {
                    Some(own) => own,
                    None => self.below.read(start, Buffer::for_overwrite(4096)).await?.to_vec(),
                };
                for offset in (block * 4096).max(at.bytes())..(block * 4096 + 4096).min(end) {
                    let (to, from) = (offset - block * 4096, offset - at.bytes());
                    bytes[usize::try_from(to).unwrap()] = data[usize::try_from(from).unwrap()];
                }
                lock(&self.own).insert(block, bytes);
            }
            Ok(())
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn write_zeroes(&self, _: GuestSpan, _: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Err(Error::unsupported("no zeros here")) })
    }

    fn discard(&self, _: GuestSpan, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Err(Error::unsupported("no discards here")) })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        let mut extents: Vec<Extent> = Vec::new();
        let (mut at, end) = (span.start(), span.end());
        while at < end {
            let next = GuestOffset::new((at.bytes() / 4096 + 1) * 4096).min(end);
            let place = match self.block(at.bytes() / 4096) {
                Some(_) => Place::Data { storage: self.storage.clone(), at: ImageOffset::new(at.bytes()) },
                None => Place::Below,
            };
            extents.push(Extent { span: GuestSpan::between(at, next), place });
            at = next;
        }
        Box::pin(async { Ok(extents) })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

async fn cache_of(bytes: u64) -> (Arc<FlashCache>, SharedStorage) {
    let storage: SharedStorage = MemoryStorage::new("flash");
    storage.set_len(bytes).await.unwrap();
    flash::create(&storage, bytes, ID, SECRET).await.unwrap();
    (FlashCache::open(storage.clone(), options(1)).await.unwrap(), storage)
}

async fn open(cache: &Arc<FlashCache>, number: u16, home: SharedDisk) -> Arc<FlashDisk> {
    let mut disk = [9; 16];
    disk[..2].copy_from_slice(&number.to_be_bytes());
    let policy = FlashPolicy::WriteBack;
    cache.open_disk(DiskOptions { disk, home, sessions: None, policy, trusts_home: true }).await.unwrap()
}

/// A template with a cache over it, and clones over that.
async fn family(cache: &Arc<FlashCache>, clones: u16) -> (Arc<FlashDisk>, Vec<Arc<FlashDisk>>) {
    let bytes: Vec<u8> = (0..TEMPLATE_BYTES).map(|at| u8::try_from(at / 4096 % 250 + 1).unwrap()).collect();
    let template = open(cache, 0, MemoryDisk::holding(&bytes)).await;
    let mut all = Vec::new();
    for number in 1..=clones {
        let clone = open(cache, number, Overlay::over(template.clone())).await;
        clone.lies_over(std::slice::from_ref(&template));
        all.push(clone);
    }
    (template, all)
}

async fn read(disk: &FlashDisk, block: u64, blocks: usize) -> Vec<u8> {
    let found =
        disk.read(GuestOffset::new(block * 4096), Buffer::for_overwrite(blocks * 4096)).await.unwrap();
    found.to_vec()
}

async fn write(disk: &FlashDisk, at: u64, len: usize) {
    disk.write(GuestOffset::new(at), Buffer::copy_of(&vec![255; len]), WriteFlags::default()).await.unwrap();
}

async fn tend(cache: &FlashCache) {
    while cache.tend(Duration::from_secs(1)).await {}
}

async fn close(cache: &FlashCache, template: &FlashDisk, clones: &[Arc<FlashDisk>]) {
    for clone in clones {
        clone.close().await.unwrap();
    }
    template.close().await.unwrap();
    cache.close().await.unwrap();
}

#[test]
fn a_thousand_clones_have_the_templates_blocks_on_flash_once() {
    block_on(async {
        let (cache, storage) = cache_of(64 << 20).await;
        let (template, clones) = family(&cache, 1000).await;
        let mut random = Random::from_seed(7);
        for clone in &clones {
            let block = random.below(BLOCKS - 15);
            let found = read(clone, block, 16).await;
            assert!(
                found
                    .iter()
                    .enumerate()
                    .all(|(at, byte)| u64::from(*byte) == (block + at as u64 / 4096) % 250 + 1)
            );
            tend(&cache).await;
        }
        let rows = cache.rows();
        assert_eq!(rows.iter().filter(|row| row.blocks > 0).map(|row| row.number).collect::<Vec<_>>(), [0]);
        assert_eq!(cache.facts().blocks, BLOCKS, "each block of the template, once");
        assert_eq!(template.counts().misses, BLOCKS, "each was read from home once");
        // A clone that writes has its own block beside it.
        write(&clones[0], 0, 4096).await;
        assert_eq!(cache.facts().blocks, BLOCKS + 1);
        clones[0].flush().await.unwrap();
        close(&cache, &template, &clones).await;
        assert_eq!(flash::look(&storage).await.unwrap().facts.dirty_blocks, 0);
    });
}

#[test]
fn a_block_that_the_only_clone_hides_leaves() {
    block_on(async {
        let (cache, _storage) = cache_of(4 << 20).await;
        let (template, clones) = family(&cache, 1).await;
        read(&clones[0], 0, 16).await;
        tend(&cache).await;
        assert_eq!(cache.facts().blocks, 16);
        write(&clones[0], 4096, 8192).await;
        assert_eq!((cache.facts().blocks, clones[0].counts().demoted), (16, 2), "two came, two left");
        write(&clones[0], 5 * 4096, 512).await;
        assert_eq!(clones[0].counts().demoted, 2, "the rest of that block is still read from the template");
        let found = read(&clones[0], 0, 6).await;
        assert_eq!([0, 4096, 8192, 12_288, 20_480, 20_992].map(|at| found[at]), [1, 255, 255, 4, 255, 6]);
        close(&cache, &template, &clones).await;
    });
}

#[test]
fn a_block_that_another_clone_sees_stays_but_is_the_first_to_go() {
    block_on(async {
        let (cache, _storage) = cache_of(4 << 20).await;
        let (template, clones) = family(&cache, 2).await;
        read(&clones[0], 0, 16).await;
        tend(&cache).await;
        // Used again: without being hidden it would stay longer than what is used once.
        read(&clones[1], 0, 16).await;
        write(&clones[0], 0, 4096).await;
        assert_eq!((cache.facts().blocks, clones[0].counts().demoted), (17, 1));
        let before = template.counts().misses;
        assert_eq!(read(&clones[1], 0, 1).await[0], 1);
        assert_eq!(template.counts().misses, before, "it is still on flash");
        clones[1].close().await.unwrap();
        write(&clones[0], 4096, 4096).await;
        assert_eq!(cache.facts().blocks, 17, "nobody else sees the second one now");
        close(&cache, &template, &clones[..1]).await;
    });
}
