//! `vellum-bench flash-recovery`: how long it takes to open a flash cache whose process was killed, and what is read for it.
//!
//! ```text
//!   a child: new cache in a sparse file ► 64 KiB at random places until 74 of 100 slots are full ► SIGKILL
//!     ► out of the page cache ► a child opens it: time, processor, requests, memory       what is in the slots is not written
//!     ► another opens it past the page cache, as `vellum serve --direct` does
//!   the same, and all blocks went home before ► opened with all the memory it needs, and with a quarter
//!   a smaller one, of which all is written ► opened ► all blocks go home ► closed         a full recovery
//!   a cache of 400 GB: its slices and ring ► bytes that are read for as many blocks ► seconds at a drive's rate
//! ```
//!
//! Only the last writes reach their slots: a recovery reads no others. So the file takes little space, and the map is as
//! full as it says. The model counts what the format says of a full map: two heads and the rest of a place for each slice, and
//! the ring; and the slots that the largest of the caches verified: past the page cache in sectors of 512 bytes, and in blocks
//! of 4 KiB. The processor's time is that of the largest cache, and for more blocks what they took in it
//! beyond the second largest: the ring of both is as long as that of the model. Its drive is that of the paper `COWCache`.

mod child;
mod sparse;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::SystemTime;

use serde::Serialize;
use vellum_core::{Context, Error, MemoryStorage, Random, Result, SharedStorage, Storage};
use vellum_flash::{Facts, FlashCache, FlashOptions};
use vellum_lab::programs::dir_or_beside_me;
use vellum_lab::report::{Output, Table, say_json};

use super::parse_size;
use crate::host::Machine;
use crate::images::prepare;
use crate::report::short;
use child::{FULL, Filled, Opening, Opens, Part, Recovered};
use sparse::Sparse;

const BLOCK_BYTES: u64 = 4096;
/// What drives transfer at least: sectors.
const SECTOR_BYTES: u64 = 512;
/// A slice of 4096 blocks in full groups: 64, 16 for a group and 2 for a block (`docs/format/flash.md`).
const SLICE_BYTES: u64 = 64 + 256 * 16 + 4096 * 2;

/// What is read of a slice in such units: the first one of both places, and of one the rest.
const fn slice_bytes_read(unit_bytes: u64) -> u64 {
    unit_bytes + SLICE_BYTES.next_multiple_of(unit_bytes)
}
/// The cache of the paper, and what its drive reads in a second (Intel DC S3610, 400 GB; its sheet).
const MODELLED_BYTES: u64 = 400_000_000_000;
const MODELLED_RATE: f64 = 550e6;

/// Time opening a flash cache after its process was killed, and count what is read
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of a cache; may be given several times
    #[arg(long, value_name = "SIZE", default_values = ["1G", "4G", "16G", "64G"], value_parser = parse_size)]
    size: Vec<u64>,
    /// Size of a cache that is written, and recovered in full; 0 for none
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    full_size: u64,
    /// Directory for the caches. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Be a child that fills or opens a cache
    #[arg(long, value_enum, value_name = "PART", hide = true, requires = "file")]
    part: Option<Part>,
    /// The cache of that child
    #[arg(long, value_name = "FILE", hide = true)]
    file: Option<PathBuf>,
    /// Its memory, in bytes
    #[arg(long, value_name = "BYTES", hide = true)]
    memory: Option<u64>,
    /// Open it past the page cache
    #[arg(long, hide = true)]
    direct: bool,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    rows: Vec<Row>,
    full: Option<Recovered>,
    model: Model,
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    cache_bytes: u64,
    /// What is in the cache is not home.
    is_dirty: bool,
    /// Less memory than the map takes; none for the usual.
    memory: Option<u64>,
    /// Past the page cache.
    is_direct: bool,
    opening: Opening,
}

/// A full cache of [`MODELLED_BYTES`].
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Model {
    blocks: u64,
    parts: u32,
    /// In sectors, past the page cache.
    bytes_read: u64,
    drive_seconds: f64,
    /// In blocks of 4 KiB.
    bytes_read_in_blocks: u64,
    drive_seconds_in_blocks: f64,
    processor_seconds: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let (Some(part), Some(file)) = (args.part, &args.file) {
        return child::run(part, file, Opens { memory: args.memory, is_direct: args.direct });
    }
    let dir = dir_or_beside_me(args.dir.as_ref())?;
    let table = Table::to(args.output);
    let machine = Machine::with(&dir);
    table.say(&format!(
        "caches on {}; Linux {}, {} processors; not in the page cache when they are opened",
        machine.medium, machine.kernel, machine.processors
    ));
    table.say(&format!(
        "  {:>9} {:>6} {:>7} {:>6} {:>9} {:>7} {:>9} {:>7} {:>9} {:>8} {:>7} {:>8} {:>8}",
        "cache MiB",
        "blocks",
        "memory",
        "by",
        "kept",
        "reads",
        "KiB read",
        "writes",
        "KiB wr.",
        "open ms",
        "CPU ms",
        "counted",
        "peak MiB"
    ));
    let mut rows = Vec::new();
    for size in &args.size {
        let what = || format!("a cache of {} MiB", size >> 20);
        for row in look(&dir, *size).context(what)? {
            table.say(&line(&row));
            rows.push(row);
        }
    }
    let mut dirty: Vec<&Opening> =
        rows.iter().filter(|row| row.is_dirty && row.is_direct).map(|row| &row.opening).collect();
    dirty.sort_unstable_by_key(|opening| opening.dirty_blocks);
    let [smaller @ .., largest] = &dirty[..] else { return Err(Error::invalid("no --size")) };
    let model = model(largest, smaller.last().copied(), &facts_of(MODELLED_BYTES)?);
    table.say(&format!(
        "modelled, a full cache of 400 GB ({} blocks, {} parts) by the format: {} MiB are read past the page cache in sectors of \
         512 bytes, {:.2} s at 550 MB/s ({} MiB and {:.2} s in blocks of 4 KiB); by the largest caches: {:.2} s of this machine's \
         processor",
        model.blocks,
        model.parts,
        model.bytes_read >> 20,
        model.drive_seconds,
        model.bytes_read_in_blocks >> 20,
        model.drive_seconds_in_blocks,
        model.processor_seconds
    ));
    let full = match args.full_size {
        0 => None,
        size => Some(recovered_in_full(&dir, size)?),
    };
    if let Some(full) = &full {
        table.say(&full.line());
    }
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report { unix_seconds: now.as_secs(), machine, rows, full, model });
    }
    Ok(())
}

fn line(row: &Row) -> String {
    let Row { cache_bytes, is_dirty, memory, is_direct, opening } = row;
    format!(
        "  {:>9} {:>6} {:>7} {:>6} {:>9} {:>7} {:>9} {:>7} {:>9} {:>8} {:>7} {:>8} {:>8}",
        cache_bytes >> 20,
        if *is_dirty { "dirty" } else { "clean" },
        if memory.is_some() { "quarter" } else { "usual" },
        if *is_direct { "direct" } else { "cached" },
        opening.blocks,
        opening.reads,
        opening.bytes_read >> 10,
        opening.writes,
        opening.bytes_written >> 10,
        short(opening.seconds * 1000.0),
        short(opening.processor_seconds * 1000.0),
        opening.counted_bytes >> 20,
        opening.peak_bytes >> 20,
    )
}

/// The processor's time for one block more: by two caches whose rings have one length, else in proportion.
#[expect(clippy::cast_precision_loss, reason = "blocks are far below 2^53")]
fn seconds_of_block(opening: &Opening, smaller: Option<&Opening>) -> f64 {
    let of_both = smaller.filter(|smaller| {
        smaller.ring_bytes == opening.ring_bytes && smaller.dirty_blocks < opening.dirty_blocks
    });
    let (seconds, blocks) = of_both.map_or((0.0, 0), |less| (less.processor_seconds, less.dirty_blocks));
    let more = (opening.dirty_blocks - blocks).max(1);
    (opening.processor_seconds - seconds).max(0.0) / more as f64
}

/// What is read by the format, and how long that takes; and the processor's time.
#[expect(clippy::cast_precision_loss, reason = "bytes and blocks are far below 2^53")]
fn model(opening: &Opening, smaller: Option<&Opening>, large: &Facts) -> Model {
    let blocks = large.slots;
    let read_in = |unit_bytes: u64| {
        (u64::from(large.parts) + 1) * slice_bytes_read(unit_bytes)
            + large.ring_bytes
            + opening.slot_bytes_read
    };
    let (bytes_read, bytes_read_in_blocks) = (read_in(SECTOR_BYTES), read_in(BLOCK_BYTES));
    Model {
        blocks,
        parts: large.parts,
        bytes_read,
        drive_seconds: bytes_read as f64 / MODELLED_RATE,
        bytes_read_in_blocks,
        drive_seconds_in_blocks: bytes_read_in_blocks as f64 / MODELLED_RATE,
        processor_seconds: opening.processor_seconds
            + blocks.saturating_sub(opening.dirty_blocks) as f64 * seconds_of_block(opening, smaller),
    }
}

/// What a cache of this size is like; nothing is written for it.
fn facts_of(bytes: u64) -> Result<Facts> {
    futures_lite::future::block_on(async {
        let storage = MemoryStorage::new("cache");
        storage.set_len(bytes).await?;
        let nowhere: SharedStorage = Sparse::dropping(storage, 0);
        vellum_flash::create(&nowhere, bytes, [1; 16], 1).await
    })
}

/// What a cache of this size counts for with nothing in it.
fn empty_bytes(bytes: u64) -> Result<u64> {
    futures_lite::future::block_on(async {
        let memory = MemoryStorage::new("cache");
        memory.set_len(bytes).await?;
        let storage: SharedStorage = memory;
        vellum_flash::create(&storage, bytes, [1; 16], 1).await?;
        let cache = FlashCache::open(storage, FlashOptions::new(None, Random::from_seed(1))).await?;
        Ok(cache.facts().budget_used_bytes)
    })
}

/// A file that goes with its owner.
struct Temporary(PathBuf);

impl Temporary {
    fn of(dir: &Path, what: &str, size: u64) -> Result<Self> {
        let path = dir.join(format!("vellum-bench-flash-recovery-{}-{what}", std::process::id()));
        let made = Self(path);
        let file = std::fs::File::create(&made.0).context(|| format!("can't make {}", made.0.display()))?;
        file.set_len(size).context(|| format!("can't make {} so long", made.0.display()))?;
        Ok(made)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _may_be_gone = std::fs::remove_file(&self.0);
    }
}

/// A child that ends with its owner.
struct Filler(Child);

impl Filler {
    fn kill(&mut self) -> Result<()> {
        self.0.kill().context(|| "can't kill the process that filled the cache")?;
        self.0.wait().map(drop).context(|| "can't wait for the process that filled the cache")
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        let _may_have_ended = self.kill();
    }
}

fn part(part: Part, path: &Path, opens: Opens) -> Result<Command> {
    let me = std::env::current_exe().context(|| "can't find this program")?;
    let mut command = Command::new(me);
    command.args(["flash-recovery", "--part", part.name(), "--file"]).arg(path).stdin(Stdio::null());
    if let Some(memory) = opens.memory {
        command.args(["--memory", &memory.to_string()]);
    }
    if opens.is_direct {
        command.arg("--direct");
    }
    Ok(command)
}

/// A cache that was filled by a process which was killed then; not in the page cache.
fn filled(how: Filled, path: &Path) -> Result<()> {
    let mut command = part(Part::of(how), path, Opens::default())?;
    command.stdout(Stdio::piped());
    let mut filler = Filler(command.spawn().context(|| format!("can't run {command:?}"))?);
    let mut said = String::new();
    let stdout = filler.0.stdout.take().expect("it is a pipe");
    BufReader::new(stdout).read_line(&mut said).context(|| "can't hear the process that fills the cache")?;
    if said.trim() != FULL {
        return Err(Error::invalid(format!("the process that fills the cache said {said:?}")));
    }
    filler.kill()?;
    prepare(path, false)
}

/// What a child says of what it did.
fn answer<T: serde::de::DeserializeOwned>(what: Part, path: &Path, opens: Opens) -> Result<T> {
    let output = part(what, path, opens)?.output().context(|| "can't run a child")?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(Error::invalid(format!("a child that opens the cache failed: {}", why.trim())));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::invalid(format!("a child's answer: {error}")))
}

fn look(dir: &Path, size: u64) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut opened = |path: &Path, is_dirty: bool, opens: Opens| -> Result<Opening> {
        prepare(path, false)?;
        let opening: Opening = answer(Part::Open, path, opens)?;
        let Opens { memory, is_direct } = opens;
        rows.push(Row { cache_bytes: size, is_dirty, memory, is_direct, opening });
        Ok(opening)
    };
    {
        let cache = Temporary::of(dir, "dirty", size)?;
        filled(Filled::Dirty, &cache.0)?;
        // An opening after a crash changes nothing, so another one finds the same.
        for is_direct in [false, true] {
            let opening = opened(&cache.0, true, Opens { memory: None, is_direct })?;
            if opening.dirty_blocks < child::filled_blocks(opening.slots) {
                let why = format!(
                    "{} of {} blocks are there",
                    opening.dirty_blocks,
                    child::filled_blocks(opening.slots)
                );
                return Err(Error::corrupt(why));
            }
        }
    }
    let cache = Temporary::of(dir, "clean", size)?;
    filled(Filled::Clean, &cache.0)?;
    let opening = opened(&cache.0, false, Opens::default())?;
    let empty = empty_bytes(size)?;
    let quarter = empty + opening.budget_used_bytes.saturating_sub(empty) / 4;
    opened(&cache.0, false, Opens { memory: Some(quarter), is_direct: false })?;
    Ok(rows)
}

fn recovered_in_full(dir: &Path, size: u64) -> Result<Recovered> {
    let cache = Temporary::of(dir, "full", size)?;
    filled(Filled::Whole, &cache.0)?;
    let _home = Temporary::of(dir, "full.home", child::disk_bytes(facts_of(size)?.slots))?;
    answer(Part::Recover, &cache.0, Opens::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_what_the_format_says() {
        let opening = Opening {
            dirty_blocks: 200_000,
            slot_bytes_read: 8192,
            processor_seconds: 0.02,
            ..Opening::default()
        };
        let large = Facts { slots: 2_000_000, parts: 489, ring_bytes: 64 << 20, ..Facts::default() };
        let model_by = |smaller| model(&opening, smaller, &large);
        let model = model_by(None);
        assert_eq!(model.bytes_read, 490 * (1024 + 12_288) + (64 << 20) + 8192);
        assert_eq!(model.bytes_read_in_blocks, 490 * (8192 + 12_288) + (64 << 20) + 8192);
        assert!((model.processor_seconds - 0.2).abs() < 1e-9);
        // What a ring of this length takes is not taken again for more blocks.
        let smaller = Opening { dirty_blocks: 100_000, processor_seconds: 0.015, ..Opening::default() };
        assert!((model_by(Some(&smaller)).processor_seconds - 0.11).abs() < 1e-9);
    }
}
