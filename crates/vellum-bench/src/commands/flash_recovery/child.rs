//! What the children do: fill a cache and wait to be killed, open one, recover one in full.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use vellum_core::{
    Buffer, Disk, GuestOffset, HostTally, IoTally, MemoryStorage, Random, Result, SharedDisk, SharedStorage,
    Storage, Tallied, WriteFlags,
};
use vellum_flash::{DiskOptions, Facts, FlashCache, FlashDisk, FlashOptions, FlashPolicy};
use vellum_format::Raw;
use vellum_io::{File, IoMode, OpenOptions};
use vellum_lab::report::{Output, Table};

use super::BLOCK_BYTES;
use super::sparse::Sparse;

const WRITE_BYTES: u64 = 64 << 10;
const WRITES_OF_A_FLUSH: u64 = 256;
/// Of a hundred slots this many are filled: a quarter is kept for a disk that may be opened beside this one.
const FILLED_PERCENT: u64 = 74;
/// What a child says when it has filled the cache.
pub(super) const FULL: &str = "full";

/// How many blocks a cache of this many slots is filled with, at least.
pub(super) const fn filled_blocks(slots: u64) -> u64 {
    slots * FILLED_PERCENT / 100
}

/// The disk of such a cache, which is larger.
pub(super) const fn disk_bytes(slots: u64) -> u64 {
    (slots * 4).next_power_of_two() * BLOCK_BYTES
}

/// What a cache is filled with.
#[derive(Debug, Clone, Copy)]
pub(super) enum Filled {
    /// Blocks that are not home, of which the slots of the last alone are written.
    Dirty,
    /// Blocks that are home, of which no slot is written.
    Clean,
    /// Blocks that are not home, in slots that are written.
    Whole,
}

/// What a child does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// Fill with dirty blocks
    FillDirty,
    /// Fill with clean blocks
    FillClean,
    /// Fill with dirty blocks, and write the slots
    FillWhole,
    /// Open
    Open,
    /// Open, send home and close
    Recover,
}

impl Part {
    pub(super) const fn of(how: Filled) -> Self {
        match how {
            Filled::Dirty => Self::FillDirty,
            Filled::Clean => Self::FillClean,
            Filled::Whole => Self::FillWhole,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::FillDirty => "fill-dirty",
            Self::FillClean => "fill-clean",
            Self::FillWhole => "fill-whole",
            Self::Open => "open",
            Self::Recover => "recover",
        }
    }
}

/// How a cache is opened.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Opens {
    /// At most this much memory, in bytes; none for the usual.
    pub(super) memory: Option<u64>,
    /// Past the page cache.
    pub(super) is_direct: bool,
}

/// What an opening took.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Opening {
    pub(super) slots: u64,
    pub(super) blocks: u64,
    pub(super) dirty_blocks: u64,
    pub(super) parts: u32,
    pub(super) ring_bytes: u64,
    pub(super) reads: u64,
    pub(super) bytes_read: u64,
    /// What of that was slots, which the newest records check.
    pub(super) slot_bytes_read: u64,
    pub(super) writes: u64,
    pub(super) bytes_written: u64,
    pub(super) flushes: u64,
    pub(super) given_up: u64,
    pub(super) slices_written: u64,
    pub(super) budget_used_bytes: u64,
    /// The most memory that it took, as the cache counts it.
    pub(super) counted_bytes: u64,
    /// By how much the most memory that the process had, as the kernel says it, grew.
    pub(super) peak_bytes: u64,
    pub(super) seconds: f64,
    pub(super) processor_seconds: f64,
}

/// What a full recovery took.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Recovered {
    opening: Opening,
    blocks_home: u64,
    home_writes: u64,
    home_flushes: u64,
    flash_reads: u64,
    seconds: f64,
    processor_seconds: f64,
}

impl Recovered {
    #[expect(clippy::cast_precision_loss, reason = "bytes are far below 2^53")]
    pub(super) fn line(&self) -> String {
        let bytes = self.blocks_home * BLOCK_BYTES;
        format!(
            "in full: {} MiB home in {:.2} s ({:.0} MB/s, {:.2} s of a processor), {} writes, {} flushes; {} reads of flash",
            bytes >> 20,
            self.seconds,
            bytes as f64 / 1e6 / self.seconds.max(1e-9),
            self.processor_seconds,
            self.home_writes,
            self.home_flushes,
            self.flash_reads
        )
    }
}

pub(super) fn run(part: Part, path: &Path, opens: Opens) -> Result<()> {
    vellum_io::run(IoMode::Auto, async || match part {
        Part::FillDirty => fill(path, Filled::Dirty).await,
        Part::FillClean => fill(path, Filled::Clean).await,
        Part::FillWhole => fill(path, Filled::Whole).await,
        Part::Open => {
            let (_, opening) = open(path, opens, &Arc::default()).await?;
            say(&opening)
        }
        Part::Recover => say(&recover(path).await?),
    })?
}

fn say(answer: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(answer).expect("numbers");
    Table::to(Output::Human).say(&text);
    Ok(())
}

/// User and system time of all threads of this process.
fn on_processor() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// The most memory that this process has had; 0 where the kernel does not say.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_default() << 10
}

async fn open(path: &Path, opens: Opens, tally: &Arc<IoTally>) -> Result<(Arc<FlashCache>, Opening)> {
    let file: SharedStorage = File::open(path, OpenOptions::writing().direct(opens.is_direct)).await?;
    let slots = Sparse::dropping(file.clone(), slots_at(&super::facts_of(file.len())?));
    slots.keep_all();
    let storage = Tallied::shared(slots.clone(), tally.clone());
    let (begun, processor, peak) = (Instant::now(), on_processor(), peak_bytes());
    let mut options = FlashOptions::new(Some(vellum_io::clock()), Random::from_seed(1));
    options.memory_bytes_max = opens.memory;
    let cache = FlashCache::open(storage, options).await?;
    let (took, processor, peak) = (begun.elapsed(), on_processor() - processor, peak_bytes() - peak);
    let (facts, opened, counts) = (cache.facts(), cache.opened(), tally.counts());
    let opening = Opening {
        slots: facts.slots,
        blocks: facts.blocks,
        dirty_blocks: facts.dirty_blocks,
        parts: facts.parts,
        ring_bytes: facts.ring_bytes,
        reads: counts.reads,
        bytes_read: counts.bytes_read,
        slot_bytes_read: slots.bytes_read(),
        writes: counts.writes,
        bytes_written: counts.bytes_written,
        flushes: counts.flushes,
        given_up: opened.given_up,
        slices_written: opened.slices_written,
        budget_used_bytes: facts.budget_used_bytes,
        counted_bytes: opened.bytes_max,
        peak_bytes: peak,
        seconds: took.as_secs_f64(),
        processor_seconds: processor.as_secs_f64(),
    };
    Ok((cache, opening))
}

async fn disk_over(cache: &Arc<FlashCache>, home: SharedStorage) -> Result<Arc<FlashDisk>> {
    let home: SharedDisk = Raw::open(home, false, &HostTally::default());
    let options = DiskOptions {
        disk: [1; 16],
        home,
        sessions: None,
        policy: FlashPolicy::WriteBack,
        trusts_home: true,
    };
    cache.open_disk(options).await
}

async fn recover(path: &Path) -> Result<Recovered> {
    let (begun, processor) = (Instant::now(), on_processor());
    let (of_flash, of_home): (Arc<IoTally>, Arc<IoTally>) = Default::default();
    let (cache, opening) = open(path, Opens::default(), &of_flash).await?;
    let before = of_flash.counts();
    let mut name = path.as_os_str().to_owned();
    name.push(".home");
    let home: SharedStorage = File::open(&PathBuf::from(name), OpenOptions::writing()).await?;
    let disk = disk_over(&cache, Tallied::shared(home, of_home.clone())).await?;
    disk.drain().await?;
    let blocks_home = disk.counts().written_home;
    disk.close().await?;
    cache.close().await?;
    Ok(Recovered {
        opening,
        blocks_home,
        home_writes: of_home.counts().writes,
        home_flushes: of_home.counts().flushes,
        flash_reads: of_flash.counts().reads - before.reads,
        seconds: begun.elapsed().as_secs_f64(),
        processor_seconds: (on_processor() - processor).as_secs_f64(),
    })
}

/// Where slots begin: behind the superblocks, the slices' places and the ring (`docs/format/flash.md`).
fn slots_at(facts: &Facts) -> u64 {
    const PLACES_BYTES: u64 = 2 * (88 << 10);
    2 * BLOCK_BYTES + (u64::from(facts.parts) + 1) * PLACES_BYTES + facts.ring_bytes
}

/// Fills the cache in a file, says so, and waits to be killed.
async fn fill(path: &Path, how: Filled) -> Result<()> {
    let file: SharedStorage = File::open(path, OpenOptions::writing()).await?;
    let facts = vellum_flash::create(&file, file.len(), [1; 16], 1).await?;
    let storage = match how {
        Filled::Whole => Sparse::dropping(file, u64::MAX),
        Filled::Dirty | Filled::Clean => Sparse::dropping(file, slots_at(&facts)),
    };
    let mut options = FlashOptions::new(Some(vellum_io::clock()), Random::from_seed(1));
    options.age = Duration::from_hours(24);
    options.dirty_percent = 100;
    options.memory_bytes_max = Some(u64::MAX >> 1);
    let cache = FlashCache::open(storage.clone(), options).await?;
    let home = MemoryStorage::new("home");
    home.set_len(disk_bytes(facts.slots)).await?;
    // What goes home goes nowhere.
    let disk = disk_over(&cache, Sparse::dropping(home, 0)).await?;
    let writes = filled_blocks(facts.slots).div_ceil(WRITE_BYTES / BLOCK_BYTES);
    let places = disk_bytes(facts.slots) / WRITE_BYTES;
    let mut bytes = Buffer::for_overwrite(usize::try_from(WRITE_BYTES).expect("64 KiB"));
    bytes.fill(0x5A);
    for number in 0..writes {
        if matches!(how, Filled::Dirty) && number + 2 * WRITES_OF_A_FLUSH >= writes {
            // What the newest records check is read.
            storage.keep_all();
        }
        // Odd, and the number of places is a power of two: none comes twice.
        let place = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) % places;
        disk.write(GuestOffset::new(place * WRITE_BYTES), bytes.duplicate(), WriteFlags::default()).await?;
        if number % WRITES_OF_A_FLUSH == WRITES_OF_A_FLUSH - 1 || number + 1 == writes {
            disk.flush().await?;
        }
    }
    if matches!(how, Filled::Clean) {
        disk.drain().await?;
        cache.flush().await?;
    }
    Table::to(Output::Human).say(FULL);
    loop {
        std::thread::sleep(Duration::from_hours(1));
    }
}
