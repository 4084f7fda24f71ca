//! Written homes that can name no session: what counts for the next opening, over crashes of flash and of the home, together
//! and apart.
//!
//! ```text
//!   openings of one home, each with a policy ──► logs of flash and of the home
//!                               │ at a position: power cut or kill of flash × power cut or kill of the home
//!                               ▼
//!                             open both ► the disk reads as its home ► written, left with its name, opened again: the same
//! ```
//!
//! 1. The name that proves the home's content is the same all the time, also after a crash. So nothing but the cache itself
//!    sees to it that what it has of a home that was changed since counts no more.
//! 2. Another writer changes the home between two openings: then the name is another one, and never an earlier one again.

use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, HostTally, ImageOffset, Random, Result as CoreResult, SharedStorage, Storage,
    WriteFlags, ZeroFlags,
};
use vellum_format::Raw;
use vellum_sim::Content;
use vellum_sim::explore::Medium;

use super::cache_on;
use super::pair::Pair;
use crate::flash::{DiskOptions, FlashCache, FlashDisk, FlashPolicy};

const BLOCKS: u64 = 20;
pub const BYTES: u64 = BLOCKS * 4096 + 3 * 512;

#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    pub programs: u64,
    pub states: u64,
    /// Openings that found something of an earlier one.
    pub warm: u64,
    pub cold: u64,
}

pub struct Opening {
    pub cache: Arc<FlashCache>,
    pub disk: Arc<FlashDisk>,
}

pub async fn open(
    flash: &SharedStorage,
    home: &SharedStorage,
    slots: u64,
    policy: FlashPolicy,
    found: Option<u8>,
    seed: u64,
) -> CoreResult<Opening> {
    let cache = cache_on(flash, slots, seed).await?;
    let home = Raw::open(home.clone(), false, &HostTally::default());
    let options = DiskOptions { disk: [3; 16], home, sessions: None, policy, trusts_home: false };
    let disk = cache.open_file(options, found.map(|name| [name; 16])).await?;
    Ok(Opening { cache, disk })
}

impl Opening {
    pub fn blocks(&self) -> u64 {
        self.cache.rows().iter().filter(|row| row.is_open).map(|row| row.blocks).sum()
    }

    pub async fn close(self, name: Option<u8>) -> CoreResult<()> {
        self.disk.close().await?;
        self.disk.leave_as(async || name.map(|name| [name; 16])).await?;
        self.cache.close().await
    }
}

fn policy(random: &mut Random) -> FlashPolicy {
    if random.one_in(4) { FlashPolicy::ReadOnly } else { FlashPolicy::WriteThrough }
}

fn bytes(random: &mut Random, len: u64) -> Buffer {
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    random.fill(&mut bytes);
    Buffer::copy_of(&bytes)
}

async fn step(random: &mut Random, open: &Opening, now: Duration) -> CoreResult<()> {
    let disk = &*open.disk;
    let sector = if random.one_in(2) { random.below(24) } else { random.below(BYTES / 512) };
    let block = random.below(BLOCKS);
    let blocks = (1 + random.below(4)).min(BLOCKS - block);
    let span = GuestOffset::new(block * 4096).span(blocks * 4096);
    match random.below(20) {
        0..=4 => {
            let data = bytes(random, span.len());
            disk.write(span.start(), data, WriteFlags { fua: random.one_in(8) }).await
        }
        5 | 6 => {
            let sectors = (1 + random.below(9)).min(BYTES / 512 - sector);
            let data = bytes(random, sectors * 512);
            disk.write(GuestOffset::new(sector * 512), data, WriteFlags::default()).await
        }
        7 => disk.write_zeroes(span, ZeroFlags { may_unmap: random.one_in(2), ..ZeroFlags::default() }).await,
        8 => disk.discard(span, WriteFlags::default()).await,
        9..=12 => {
            let len = usize::try_from(span.len()).unwrap();
            disk.read(span.start(), Buffer::for_overwrite(len)).await.map(drop)
        }
        13 | 14 => disk.flush().await,
        15 => open.cache.flush().await,
        _ => {
            for _ in 0..3 {
                open.cache.tend(now).await;
            }
            Ok(())
        }
    }
}

/// The disk reads as its home.
pub async fn compare(what: &str, disk: &dyn Disk, home: &dyn Storage) -> Result<(), String> {
    let failed = |error: vellum_core::Error| format!("{what}: {}", error.chain());
    for at in (0..BYTES).step_by(512) {
        let found = disk.read(GuestOffset::new(at), Buffer::for_overwrite(512)).await.map_err(failed)?;
        let is = home.read(ImageOffset::new(at), Buffer::for_overwrite(512)).await.map_err(failed)?;
        if found.to_vec() != is.to_vec() {
            return Err(format!("{what}: sector {} is not as at home", at / 512));
        }
    }
    Ok(())
}

fn run(pair: &Pair, random: &mut Random, slots: u64, seed: u64, counts: &mut Counts) -> Result<(), String> {
    let (flash_storage, home_storage) = pair.storages();
    let several = pair.has_tasks;
    pair.world.run(async {
        let failed = |error: vellum_core::Error| error.chain();
        let mut is_left = false;
        for opening in 0..3u64 {
            let policy = policy(random);
            let opened = open(&flash_storage, &home_storage, slots, policy, Some(1), seed + opening).await;
            let open = Arc::new(opened.map_err(failed)?);
            let is_warm = open.blocks() > 0;
            if is_warm && !is_left {
                return Err(format!("opening {opening} found what no opening has left"));
            }
            *(if is_warm { &mut counts.warm } else { &mut counts.cold }) += 1;
            if is_warm && random.one_in(2) {
                compare("before it is written", &*open.disk, &*home_storage).await?;
            }
            let mut tasks = Vec::new();
            for task in 0..if several { 3 } else { 1u64 } {
                let mut random = Random::from_seed(seed ^ (opening * 4 + task + 1) << 33);
                let open = open.clone();
                tasks.push(pair.world.spawn(async move {
                    for number in 0..if several { 8 } else { 20 } {
                        step(&mut random, &open, Duration::from_secs(number * 9)).await?;
                    }
                    Ok::<_, vellum_core::Error>(())
                }));
            }
            for task in tasks {
                task.await.map_err(failed)?;
            }
            if random.one_in(2) {
                compare("while it is open", &*open.disk, &*home_storage).await?;
            }
            if opening == 2 && random.one_in(2) {
                break;
            }
            let Ok(open) = Arc::try_unwrap(open) else { panic!("the tasks have ended") };
            is_left = !random.one_in(6);
            open.close(is_left.then_some(1)).await.map_err(failed)?;
        }
        Ok(())
    })
}

/// Opens what a crash left, and what became of it after that.
fn judge(flash: &Content, home: &Content, slots: u64, seed: u64, counts: &mut Counts) -> Result<(), String> {
    counts.states += 1;
    let (flash, home) = (Medium::new(flash.clone()), Medium::new(home.clone()));
    let (flash, home): (SharedStorage, SharedStorage) = (flash, home);
    let failed = |error: vellum_core::Error| error.chain();
    block_on(async {
        let mut random = Random::from_seed(seed);
        let mut name = 1;
        for opening in 0..3 {
            let policy = policy(&mut random);
            let open =
                open(&flash, &home, slots, policy, Some(name), seed + opening).await.map_err(failed)?;
            *(if open.blocks() > 0 { &mut counts.warm } else { &mut counts.cold }) += 1;
            let what = format!("opening {opening} after the crash, {policy:?}");
            compare(&what, &*open.disk, &*home).await?;
            for number in 0..4 {
                step(&mut random, &open, Duration::from_secs(number * 9)).await.map_err(failed)?;
            }
            compare(&what, &*open.disk, &*home).await?;
            open.close(Some(name)).await.map_err(failed)?;
            if random.one_in(3) {
                name += 1;
                let at = random.below(BYTES / 512) * 512;
                home.write(ImageOffset::new(at), bytes(&mut random, 512)).await.map_err(failed)?;
            }
        }
        Ok(())
    })
}

/// Explores one program.
pub fn explore(slots: u64, seed: u64, counts: &mut Counts) -> Result<(), String> {
    let flash = Medium::new(Content::default());
    let storage: SharedStorage = flash.clone();
    block_on(cache_on(&storage, slots, 1)).expect("a cache is made");
    let home = Content::of(bytes(&mut Random::from_seed(seed ^ 77), BYTES).slice());
    let mut random = Random::from_seed(seed);
    let pair = Pair::new(&flash.content(), &home, seed, &mut random);
    run(&pair, &mut random, slots, seed, counts)?;
    counts.programs += 1;
    pair.judge(seed, |flash, home, chance| judge(flash, home, slots, chance, counts))
}
