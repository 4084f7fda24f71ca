//! `vellum-papers run cowcache`: rows C1 to C31 of the paper, as far as they are made.
//!
//! ```text
//!   the engine      writes of a guest ─► FlashDisk ─► flash, in memory: every byte is counted
//!   TRDC, a model   first write of 4 KiB to a cluster over a base: the base's 60 KiB are read and admitted, the cluster's
//!                   64 KiB are written; and a table of 64 KiB, where memory holds 16 of the 2048 tables
//! ```
//!
//! The model is the paper's own arithmetic for its rival. Nothing is timed: rows of throughput are not made.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_lite::future::block_on;
use serde::Serialize;
use vellum_core::{
    Buffer, Disk, Error, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, MemoryStorage, Place, Random,
    Result, SharedDisk, SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_flash::{DiskOptions, FlashCache, FlashOptions, FlashPolicy, Replacement, create, hits};
use vellum_lab::guest::Request;
use vellum_lab::report::Table;
use vellum_lab::trace::Trace;

use super::{Options, on_all_processors};
use crate::report::{Figure, Good, How, Made, Row, Series, Shape};

const CLUSTER_BYTES: u64 = 64 << 10;
const BLOCK_BYTES: u64 = 4096;
/// The disk of the paper's guest.
const DISK_BYTES: u64 = 1 << 40;
/// A guest's flush after this many writes; the paper gives flushes no durability, and does not say how many there were.
const WRITES_PER_FLUSH: u64 = 32;
/// Writes of a run: a fifth of the paper's million, which memory has room for, or fewer. What each costs is the same.
const WRITES: (u64, u64) = (200_000, 50_000);
/// Sizes of the caches of the figure, in percent of what a trace touches.
const PERCENT: [u64; 5] = [1, 5, 10, 20, 40];

/// A home of any size that holds nothing, and counts what reaches it.
#[derive(Default)]
struct Nowhere {
    reads: AtomicU64,
    writes: AtomicU64,
}

impl Disk for Nowhere {
    fn geometry(&self) -> Geometry {
        Geometry { size: DISK_BYTES, ..vellum_core::MemoryDisk::new(BLOCK_BYTES).geometry() }
    }

    fn read(&self, _: GuestOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        buffer.fill(0);
        Box::pin(async move { Ok(buffer) })
    }

    fn write(&self, _: GuestOffset, _: Buffer, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(()) })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn write_zeroes(&self, _: GuestSpan, _: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(()) })
    }

    fn discard(&self, _: GuestSpan, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move { Ok(vec![Extent { span, place: Place::Below }]) })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// What random writes of one size came to.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Writes {
    bytes_each: u64,
    writes: u64,
    slot_bytes: u64,
    record_bytes: u64,
    slice_bytes: u64,
    flash_flushes: u64,
    home_reads: u64,
    home_writes: u64,
}

impl Writes {
    /// Bytes to flash for each write.
    fn each(&self) -> f64 {
        (self.slot_bytes + self.record_bytes + self.slice_bytes) as f64 / self.writes as f64
    }

    /// Those of them that are no guest data.
    fn metadata_each(&self) -> f64 {
        (self.record_bytes + self.slice_bytes) as f64 / self.writes as f64
    }

    /// What TRDC's model writes to flash for each, without tables: data of a whole cluster, and what was read for it.
    fn rival_each(&self) -> f64 {
        (CLUSTER_BYTES + CLUSTER_BYTES - self.bytes_each) as f64
    }
}

/// Random aligned writes with write-back, over a cache that holds them all.
fn random_writes(bytes_each: u64, writes: u64) -> Result<Writes> {
    block_on(async {
        let flash_bytes = writes * bytes_each.max(BLOCK_BYTES) * 5 / 4 + (256 << 20);
        let storage: SharedStorage = MemoryStorage::new("flash");
        storage.set_len(flash_bytes).await?;
        create(&storage, flash_bytes, [7; 16], 0x5EC2_E700_0000_0001).await?;
        let cache = FlashCache::open(storage, FlashOptions::new(None, Random::from_seed(1))).await?;
        let home = Arc::new(Nowhere::default());
        let options = DiskOptions {
            disk: [1; 16],
            home: home.clone() as SharedDisk,
            sessions: None,
            policy: FlashPolicy::WriteBack,
            trusts_home: true,
        };
        let disk = cache.open_disk(options).await?;
        let before = cache.counts();
        let mut random = Random::from_seed(13);
        let len = usize::try_from(bytes_each).map_err(|_| Error::invalid("a write is short"))?;
        for number in 1..=writes {
            let at = GuestOffset::new(random.below(DISK_BYTES / bytes_each) * bytes_each);
            disk.write(at, Buffer::zeroed(len), WriteFlags::default()).await?;
            if number % WRITES_PER_FLUSH == 0 {
                disk.flush().await?;
            }
        }
        disk.flush().await?;
        let counts = cache.counts();
        Ok(Writes {
            bytes_each,
            writes,
            slot_bytes: disk.counts().slot_writes,
            record_bytes: counts.record_bytes - before.record_bytes,
            slice_bytes: counts.slice_bytes - before.slice_bytes,
            flash_flushes: counts.flushes - before.flushes,
            home_reads: home.reads.load(Ordering::Relaxed),
            home_writes: home.writes.load(Ordering::Relaxed),
        })
    })
}

/// Bytes of memory for the index of `blocks` blocks, which are neighbours or lone.
fn index_bytes(blocks: u64, is_lone: bool) -> Result<f64> {
    block_on(async {
        let flash_bytes = blocks * BLOCK_BYTES * 5 / 4 + (16 << 20);
        let storage: SharedStorage = MemoryStorage::new("flash");
        storage.set_len(flash_bytes).await?;
        create(&storage, flash_bytes, [7; 16], 0x5EC2_E700_0000_0001).await?;
        let cache = FlashCache::open(storage, FlashOptions::new(None, Random::from_seed(1))).await?;
        let options = DiskOptions {
            disk: [1; 16],
            home: Arc::new(Nowhere::default()) as SharedDisk,
            sessions: None,
            policy: FlashPolicy::WriteBack,
            trusts_home: true,
        };
        let disk = cache.open_disk(options).await?;
        let empty = cache.facts().memory_bytes;
        let step = if is_lone { CLUSTER_BYTES } else { BLOCK_BYTES };
        for block in 0..blocks {
            disk.write(GuestOffset::new(block * step), Buffer::zeroed(4096), WriteFlags::default()).await?;
            if block % 256 == 255 {
                disk.flush().await?;
            }
        }
        disk.drain().await?;
        Ok((cache.facts().memory_bytes - empty) as f64 / (blocks * BLOCK_BYTES) as f64)
    })
}

/// Hit ratios of each replacement on a recorded guest.
fn replacement_figure() -> Result<Figure> {
    let trace = Trace::recorded("sqlite_tpcc_like")?;
    let mut uses = Vec::new();
    for (_, request) in &trace.requests {
        let (offset, len, is_write) = match *request {
            Request::Read { offset, len } => (offset, len, false),
            Request::Write { offset, len } | Request::WriteThrough { offset, len } => (offset, len, true),
            _ => continue,
        };
        uses.extend(
            (offset / BLOCK_BYTES..(offset + len as u64).div_ceil(BLOCK_BYTES))
                .map(|block| (block, is_write)),
        );
    }
    let mut blocks: Vec<u64> = uses.iter().map(|(block, _)| *block).collect();
    blocks.sort_unstable();
    blocks.dedup();
    let ratio = |kind: Replacement, percent: u64| {
        let slots = u32::try_from((blocks.len() as u64 * percent).div_ceil(100)).unwrap_or(u32::MAX);
        let counts = hits(kind, slots.max(1), uses.iter().copied());
        100.0 * (counts.read_hits + counts.write_hits) as f64 / uses.len() as f64
    };
    let series = Replacement::ALL.map(|kind| Series {
        name: kind.name().to_owned(),
        is_of_the_paper: false,
        values: PERCENT.iter().map(|percent| Some(ratio(kind, *percent))).collect(),
    });
    Ok(Figure {
        file: "cowcache-replacement".to_owned(),
        title: "Uses of blocks that were cached, SQLite with TPC-C-like transactions".to_owned(),
        shape: Shape::Lines,
        x_name: "cache, percent of what is touched",
        y_name: "hits, percent",
        places: PERCENT.iter().map(u64::to_string).collect(),
        series: series.into(),
    })
}

/// Flash writes by size, beside those of the model.
fn writes_figure(all: &[Writes]) -> Figure {
    let kib = |bytes: f64| Some(bytes / 1024.0);
    let of = |name: &str, value: &dyn Fn(&Writes) -> f64| Series {
        name: name.to_owned(),
        is_of_the_paper: false,
        values: all.iter().map(|one| kib(value(one))).collect(),
    };
    Figure {
        file: "cowcache-10b".to_owned(),
        title: "Figure 10b: bytes to flash for a random write, without tables of the format".to_owned(),
        shape: Shape::Bars,
        x_name: "write, KiB",
        y_name: "KiB to flash",
        places: all.iter().map(|one| (one.bytes_each / 1024).to_string()).collect(),
        series: vec![of("flash cache", &Writes::each), of("TRDC, modelled", &Writes::rival_each)],
    }
}

/// What `run` found, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    writes: Vec<Writes>,
    index_full: f64,
    index_lone: f64,
}

const TIMED: &str = "throughput and time are not modelled";
const THROUGH: &str = "writethrough is not there yet";

pub(crate) fn make(options: &Options, table: Table) -> Result<Made> {
    let writes = if options.is_full { WRITES.0 } else { WRITES.1 };
    let setting = format!(
        "{writes} random writes with write-back to an empty disk of 1 TiB, a flush after {WRITES_PER_FLUSH}; the cache's engine on \
         memory, every byte counted. TRDC is a model: the paper's own arithmetic."
    );
    table.say(&setting);
    let sizes = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];
    // Large writes need as much memory as they bring: fewer show the same.
    let jobs = sizes.map(|size: u64| (size, (writes * 4096 / size).max(1000)));
    let all = on_all_processors(&jobs, |(size, writes)| random_writes(*size, *writes))?;
    let blocks = if options.is_full { 1 << 20 } else { 1 << 16 };
    let (full, lone) = (index_bytes(blocks, false)?, index_bytes(blocks / 16, true)?);
    for one in &all {
        table.say(&format!(
            "  {:>3} KiB: {:.2} KiB to flash for each, {:.2} of them no data; {} flushes of flash",
            one.bytes_each / 1024,
            one.each() / 1024.0,
            one.metadata_each() / 1024.0,
            one.flash_flushes
        ));
    }
    let rows = rows(&all, full, lone)?;
    let figures = vec![writes_figure(&all), replacement_figure()?];
    let report = Report { writes: all, index_full: full, index_lone: lone };
    Ok(Made {
        name: "cowcache",
        title: "COWCache: effective flash caching for Copy-on-Write virtual disks",
        venue: "Cluster Computing 2019",
        setting,
        rows,
        figures,
        runs: serde_json::to_value(report).expect("numbers and strings"),
    })
}

fn rows(all: &[Writes], full: f64, lone: f64) -> Result<Vec<Row>> {
    let [small, .., large] = all else { return Err(Error::invalid("no writes")) };
    let less = |ours: f64, rival: f64| {
        format!("-{:.1} %, {:.1} KiB of {:.1}", 100.0 * (1.0 - ours / rival), ours / 1024.0, rival / 1024.0)
    };
    let table = CLUSTER_BYTES as f64;
    let percent = |share: f64| format!("{:.3} %", share * 100.0);
    let none = Row::not_made;
    Ok(vec![
        none("C1", ("abstract", "OLTP: performance, flash writes"), "+122.7 %, -78.5 %", "its OLTP guest was not recorded"),
        none("C2", ("§1", "guest I/O to backing storage, amplified"), "2 to 13 times", "the paper does not say of what"),
        none("C3", ("Fig. 4", "64 KiB in scattered clusters, latency"), "up to 13.5 times", TIMED),
        none("C4", ("§2.1.3", "QCOW2 metadata of 1 TB, 64 and 4 KiB"), "160 MB, 2.5 GB", "of the format, with or without a cache"),
        none("C5", ("Fig. 9", "random 64 KiB writes against TRDC"), "+2 to +175.7 %", TIMED),
        none("C6", ("Table 1", "TRDC: L2 hits by memory"), "33.6 to 100 %", "its lookups are not described"),
        none("C7", ("Table 1", "COWCache: L2 hits by memory"), "75.1 to 100 %", THROUGH),
        none("C8", ("Table 1", "TRDC: metadata read from flash"), "119.6 GB to 0", "its lookups are not described"),
        none("C9", ("Table 1", "COWCache: metadata read from flash"), "0.35 GB to 0", THROUGH),
        none("C10", ("Table 1", "TRDC: metadata written to flash"), "61.15 to 4.95 GB", "its lookups are not described"),
        Row::judged(
            "C11",
            ("Table 1", "metadata written to flash, 1 M random 64 KiB writes"),
            How::Counted,
            ("0.47 GB", format!("{:.2} GB with flushes, write-back", large.metadata_each() / 1000.0)),
            large.metadata_each() / 1000.0,
            Good::Low(0.47),
        )
        .because("a record has the CRC of each sector, by which a recovery knows what arrived; the paper's flushes promise nothing"),
        none("C12", ("Fig. 10a", "random writes, throughput"), "wb +60 % to 4.4 times", TIMED),
        Row::judged(
            "C13",
            ("Fig. 10b", "flash writes, random 4 KiB, against TRDC's data"),
            How::Counted,
            ("-96.7 %", less(small.each(), small.rival_each())),
            small.rival_each() / small.each(),
            Good::High(1.0 / (1.0 - 0.967)),
        ),
        Row::judged(
            "C14",
            ("§5.2.2", "flash writes, 4 KiB, 1 MB for L2: TRDC has more"),
            How::Counted,
            ("40 times", format!("{:.1} times, of the model with a table each", (small.rival_each() + table) / small.each())),
            (small.rival_each() + table) / small.each(),
            Good::High(40.0),
        ),
        none("C15", ("Fig. 11", "4 KiB, writes to reads 2:1"), "wb 1.8 to 3.4 times", TIMED),
        none("C16", ("Fig. 11", "COW ratio 40 against 80 %"), "+16.3 %", TIMED),
        none("C17", ("Fig. 11", "writes to reads 1:2"), "wb 1.0 to 1.7 times", TIMED),
        none("C18", ("Fig. 12", "OLTP"), "wb +86.2 to +122.7 %", TIMED),
        none("C19", ("Fig. 12", "OLTP2-1 against OLTP2-8"), "-2 %", TIMED),
        none("C20", ("Table 2", "OLTP2-1: flash writes"), "-77.2 %", "its OLTP guest was not recorded"),
        none("C21", ("Table 2", "OLTP2-8: flash writes"), "-75.4 %", "its OLTP guest was not recorded"),
        none("C22", ("Table 2", "OLTP8-1: flash writes"), "-78.5 %", "its OLTP guest was not recorded"),
        none("C23", ("Table 2", "OLTP8-8: flash writes"), "-70 %", "its OLTP guest was not recorded"),
        none("C24", ("Fig. 13", "Varmail, Fileserver, YCSB-A"), "+78.6, +24.5, +23.3 %", TIMED),
        none("C25", ("Fig. 13", "flash writes of these"), "-22.5, -27.1, -35.2 %", "TRDC's write-back period is not published"),
        none("C26", ("§5.3.1", "writethrough throughput"), "Varmail +13 %", TIMED),
        none("C27", ("Fig. 14", "MSR traces: flash writes"), "-1.4 to -37.8 %", "the traces are the user's: example `replacement` reads them"),
        none("C28", ("Fig. 15", "MSR traces, cache a share of what is used"), "-2.8 to -25.5 %", "the traces are the user's: example `replacement` reads them"),
        Row::judged(
            "C29",
            ("§5.3.4", "memory of the index, full clusters"),
            How::Counted,
            ("0.23 to 0.26 %", format!("{}; lone blocks {}", percent(full), percent(lone))),
            full * 100.0,
            Good::Low(0.23),
        ),
        none("C30", ("§5.3.4", "recovery: fast, full"), "< 1 s; 2.3 to 30.3 s", TIMED),
        Row::exact(
            "C31",
            ("§3.3", "base reads and home writes of allocating writes"),
            ("0", format!("{} reads, {} writes", small.home_reads, small.home_writes)),
            (0, all.iter().map(|one| one.home_reads + one.home_writes).sum()),
        ),
    ])
}
