//! Tables that are read through the cache, over crashes of flash and of the image, together and apart.
//!
//! ```text
//!   openings of one image ──► logs of flash and of the image
//!                               │ at a position: power cut or kill of flash × power cut or kill of the image
//!                               ▼
//!                             open the cache and the image ► tables read as the image does
//!                                                          ► changed, closed, opened again: the same
//! ```
//!
//! 1. The name that proves the image's content is always the same. So nothing but the cache itself sees to it that what it
//!    has of an image that was changed since counts no more.
//! 2. A case is its seed: everything is drawn from it.

use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::block_on;
use vellum_core::{Buffer, ImageOffset, Random, Result as CoreResult, SharedStorage, Storage, Zeroes};
use vellum_sim::Content;
use vellum_sim::explore::Medium;

use super::cache_on;
use super::pair::Pair;
use crate::flash::{FlashCache, FlashMetadata, MetadataCounts, MetadataOptions};

const NAME: [u8; 16] = [9; 16];
const TABLE: u64 = 8192;
const SECTORS: u64 = 96;
const BYTES: u64 = SECTORS * 512;

/// What was looked at.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counts {
    pub programs: u64,
    pub states: u64,
    /// Openings that found something of an earlier one on flash.
    pub warm: u64,
    pub reads: MetadataCounts,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.programs += other.programs;
        self.states += other.states;
        self.warm += other.warm;
        self.reads += other.reads;
    }
}

struct Opening {
    cache: Arc<FlashCache>,
    metadata: Arc<FlashMetadata>,
    image: SharedStorage,
    tables: SharedStorage,
}

async fn open(flash: &SharedStorage, image: &SharedStorage, slots: u64, seed: u64) -> CoreResult<Opening> {
    let cache = cache_on(flash, slots, seed).await?;
    let options =
        MetadataOptions { image: image.clone(), name: Some(NAME), is_written: true, table_bytes: TABLE };
    let metadata = cache.open_metadata(options).await?;
    Ok(Opening { cache, image: metadata.image(), tables: metadata.tables(), metadata })
}

impl Opening {
    async fn close(self, is_found_again: bool) -> CoreResult<()> {
        self.metadata.close(async || is_found_again.then_some(NAME)).await?;
        self.cache.close().await
    }
}

fn bytes(random: &mut Random, sectors: u64) -> Buffer {
    let mut bytes = vec![0; usize::try_from(sectors * 512).unwrap()];
    for sector in bytes.chunks_mut(512) {
        if !random.one_in(3) {
            random.fill(sector);
        }
    }
    Buffer::copy_of(&bytes)
}

async fn read(storage: &dyn Storage, sector: u64, sectors: u64) -> CoreResult<Vec<u8>> {
    let len = usize::try_from(sectors * 512).unwrap();
    // In one piece, as formats take it.
    Ok(storage.read(ImageOffset::new(sector * 512), Buffer::for_overwrite(len)).await?.slice().to_vec())
}

async fn compare(what: &str, tables: &dyn Storage, image: &dyn Storage) -> Result<(), String> {
    let failed = |error: vellum_core::Error| format!("{what}: {}", error.chain());
    for round in 0..2 {
        for sector in 0..SECTORS {
            let (found, is) = (
                read(tables, sector, 1).await.map_err(failed)?,
                read(image, sector, 1).await.map_err(failed)?,
            );
            if found != is {
                return Err(format!("{what}: sector {sector} is not as in the image (round {round})"));
            }
        }
    }
    Ok(())
}

async fn step(random: &mut Random, open: &Opening, now: Duration) -> CoreResult<()> {
    let sector = if random.one_in(2) { random.below(20) } else { random.below(SECTORS) };
    let sectors = (1 + random.below(3)).min(SECTORS - sector);
    let span = ImageOffset::new(sector * 512).span(sectors * 512);
    match random.below(24) {
        0..=6 => {
            let handle = if random.one_in(2) { &open.image } else { &open.tables };
            handle.write(span.start(), bytes(random, sectors)).await
        }
        7 => {
            let table = ImageOffset::new(sector * 512 / TABLE * TABLE).span(TABLE);
            open.image.write_zeroes(table, Zeroes::Allocated).await
        }
        8 => open.image.discard(span).await,
        9 if random.one_in(4) => {
            open.image.set_len(sector * 512).await?;
            open.image.set_len(BYTES).await
        }
        10..=16 => {
            let sectors = if random.one_in(4) { (SECTORS - sector).min(40) } else { sectors };
            read(&*open.tables, sector, sectors).await.map(drop)
        }
        17 => {
            // Often enough that the window is read anew.
            for _ in 0..256 {
                read(&*open.tables, sector, 1).await?;
            }
            Ok(())
        }
        18 | 19 => open.image.flush().await,
        20 | 21 => open.cache.flush().await,
        _ => {
            open.cache.tend(now).await;
            Ok(())
        }
    }
}

fn run(pair: &Pair, random: &mut Random, slots: u64, seed: u64, counts: &mut Counts) -> Result<(), String> {
    let (flash_storage, image_storage) = pair.storages();
    let several = pair.has_tasks;
    let outcome: Result<MetadataCounts, String> = pair.world.run(async {
        let failed = |error: vellum_core::Error| error.chain();
        let mut reads = MetadataCounts::default();
        for opening in 0..3u64 {
            let open =
                Arc::new(open(&flash_storage, &image_storage, slots, seed + opening).await.map_err(failed)?);
            let mut tasks = Vec::new();
            for task in 0..if several { 3 } else { 1u64 } {
                let mut random = Random::from_seed(seed ^ (opening * 4 + task + 1) << 33);
                let open = open.clone();
                tasks.push(pair.world.spawn(async move {
                    for number in 0..10 {
                        step(&mut random, &open, Duration::from_secs(number * 9)).await?;
                    }
                    Ok::<_, vellum_core::Error>(())
                }));
            }
            for task in tasks {
                task.await.map_err(failed)?;
            }
            compare("while it is open", &*open.tables, &*image_storage).await?;
            reads += open.metadata.counts();
            if opening == 2 && random.one_in(2) {
                break;
            }
            let Ok(open) = Arc::try_unwrap(open) else { panic!("the tasks have ended") };
            open.close(!random.one_in(5)).await.map_err(failed)?;
        }
        Ok(reads)
    });
    counts.reads += outcome?;
    Ok(())
}

/// Opens what a crash left, and what became of it after that.
fn judge(flash: &Content, image: &Content, slots: u64, seed: u64, counts: &mut Counts) -> Result<(), String> {
    counts.states += 1;
    let (flash, image) = (Medium::new(flash.clone()), Medium::new(image.clone()));
    let (flash_storage, image_storage): (SharedStorage, SharedStorage) = (flash, image);
    let failed = |error: vellum_core::Error| error.chain();
    block_on(async {
        let mut random = Random::from_seed(seed);
        for opening in 0..3 {
            let open = open(&flash_storage, &image_storage, slots, seed + opening).await.map_err(failed)?;
            let what = format!("opening {opening} after the crash");
            if random.one_in(2) {
                // Before anything was read of it.
                for _ in 0..2 {
                    let sector = random.below(SECTORS);
                    let data = bytes(&mut random, 1);
                    open.image.write(ImageOffset::new(sector * 512), data).await.map_err(failed)?;
                }
            }
            compare(&what, &*open.tables, &*image_storage).await?;
            let reads = open.metadata.counts();
            counts.warm += u64::from(reads.flash_hits > 0);
            counts.reads += reads;
            let sector = random.below(SECTORS);
            let data = bytes(&mut random, 1);
            open.tables.write(ImageOffset::new(sector * 512), data).await.map_err(failed)?;
            compare(&what, &*open.tables, &*image_storage).await?;
            open.close(true).await.map_err(failed)?;
        }
        Ok(())
    })
}

/// Explores one program.
pub fn explore(slots: u64, seed: u64) -> Result<Counts, String> {
    let mut counts = Counts::default();
    let flash = Medium::new(Content::default());
    let storage: SharedStorage = flash.clone();
    block_on(cache_on(&storage, slots, 1)).expect("a cache is made");
    let image = {
        let mut random = Random::from_seed(seed ^ 77);
        Content::of(bytes(&mut random, SECTORS).slice())
    };
    let mut random = Random::from_seed(seed);
    let pair = Pair::new(&flash.content(), &image, seed, &mut random);
    let explored = run(&pair, &mut random, slots, seed, &mut counts).and_then(|()| {
        counts.programs += 1;
        pair.judge(seed, |flash, image, chance| judge(flash, image, slots, chance, &mut counts))
    });
    explored.map_err(|what| format!("{slots} slots, seed {seed}: {what}"))?;
    Ok(counts)
}
