//! `vellum-papers run cowcache`: rows C1 to C31 of the paper.
//!
//! ```text
//!   guests × { the rival, the flash cache }  ─►  Counted  ─►  rows, figures
//!   scale     --full is the paper's million of requests; without it what each request costs is the same, and what
//!             depends on how many there were is not judged
//! ```

mod figures;
mod judged;
mod printed;
mod rows;
mod speeds;
mod timed_rows;

use std::path::PathBuf;
use std::time::Duration;

use futures_lite::future::block_on;
use serde::Serialize;
use vellum_core::{
    Buffer, Disk as _, GuestOffset, Limits, Random, Result, SharedDisk, SharedStorage, WriteFlags,
};
use vellum_flash::{DiskOptions, FlashCache, FlashOptions, FlashPolicy, create};
use vellum_format::qcow2::{self, CreateOptions, Preallocation};
use vellum_lab::guest::Request;
use vellum_lab::report::Table;

use self::printed::PRINTED;
use self::speeds::Speeds;
use super::progress::Progress;
use super::{Options, on_all_processors};
use crate::cowcache::applications::Application;
use crate::cowcache::format::{Amplified, Fragments, amplified};
use crate::cowcache::guest::{Guest, OLTP_WRITES_OF_100};
use crate::cowcache::scene::{Counted, Devices, Scene, Sizes, ask};
use crate::cowcache::trace::{Form, Recorded};
use crate::cowcache::trdc::Policy;
use crate::cowcache::{BLOCK_BYTES, CLUSTER_BYTES, DISK_BYTES};
use crate::model::{Device, ForgetfulDrive};
use crate::report::Made;

/// Requests of a run: the paper's million, or fewer.
const REQUESTS: (u64, u64) = (1_000_000, 10_000);
/// Where only a figure shows the requests, one in this many is made.
const BETWEEN_PART: u64 = 10;
/// Requests of the runs without a cache; what each costs does not depend on how many there are.
const AMPLIFIED: (u64, u64) = (20_000, 500);
/// Where not all of an application is made, one part in this many is.
const APPLICATION_PART: u64 = 20;
/// Blocks of which the index is measured.
const INDEX_BLOCKS: (u64, u64) = (1 << 20, 1 << 16);
/// The disk whose metadata is counted for C4, and what one of 1 TiB has more of it.
const METADATA_DISK: (u64, u64) = (DISK_BYTES, DISK_BYTES / 64);
/// Memory for tables in the paper's table 1.
const MEMORY_MIB: [u64; 5] = [1, 32, 64, 96, 128];
/// Sizes of the caches of figure 15, in percent of what a trace touches; the paper's are not in its text.
const PERCENT: [u64; 3] = [10, 20, 40];
const MIB: u64 = 1 << 20;
const SEED: u64 = 13;

/// Traces that the user has.
#[derive(Debug, Clone, Default)]
pub(crate) struct Files {
    pub(crate) msr: Vec<PathBuf>,
    pub(crate) cloudphysics: Option<PathBuf>,
}

/// A run of one guest over both sides.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Pair {
    guest: Guest,
    requests: u64,
    memory_mib: u64,
    rival: Counted,
    ours: Counted,
}

impl Pair {
    /// How many times as much the rival writes to flash.
    fn gain(&self) -> f64 {
        self.rival.flash() as f64 / self.ours.flash().max(1) as f64
    }
}

/// A recorded guest over both sides, with flash for this share of what it touches.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Replayed {
    trace: String,
    /// One of MSR's, as the paper's are.
    is_msr: bool,
    /// None: flash has room for all.
    percent: Option<u64>,
    rival: Counted,
    ours: Counted,
}

impl Replayed {
    fn flash_less(&self) -> f64 {
        100.0 * (1.0 - self.ours.flash() as f64 / self.rival.flash().max(1) as f64)
    }

    fn network_less(&self) -> f64 {
        100.0 * (1.0 - self.ours.network() as f64 / self.rival.network().max(1) as f64)
    }
}

/// All runs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Runs {
    is_full: bool,
    /// 4, 8, 16, 32 and 64 KiB, and 64 KiB across two clusters.
    random: Vec<Pair>,
    /// The first and the fifth of them with a flush after every 32.
    flushed: Vec<Pair>,
    /// The rival by memory, 64 KiB.
    by_memory: Vec<(u64, Counted)>,
    /// The flash cache with writethrough by memory, 64 KiB.
    ours_by_memory: Vec<(u64, Counted)>,
    /// The rival with 1 MiB, 4 KiB.
    small_memory: Counted,
    /// With writethrough, 4 KiB and 64 KiB.
    through: Vec<Pair>,
    /// OLTP2-1, 2-8, 8-1, 8-8.
    oltp: Vec<Pair>,
    /// OLTP8-1 and 8-8 with the mix of writes that their own columns in the paper come to.
    oltp_of_rows: Vec<Pair>,
    /// Figure 13's.
    applications: Vec<Replayed>,
    amplified: Vec<Amplified>,
    fragments: Fragments,
    speeds: Speeds,
    traces: Vec<Replayed>,
    index_full: f64,
    index_lone: f64,
    /// Metadata of a QCOW2 of 1 TiB with clusters of 64 KiB and of 4 KiB.
    metadata_bytes: [u64; 2],
}

/// A guest's requests with a flush after so many.
fn with_flushes(
    requests: impl Iterator<Item = Request>,
    every: Option<u64>,
) -> impl Iterator<Item = (Duration, Request)> {
    let mut since = 0;
    requests
        .flat_map(move |request| {
            since += 1;
            let is_due = every.is_some_and(|every| since % every == 0);
            [Some(request), is_due.then_some(Request::Flush)]
        })
        .flatten()
        .map(|request| (Duration::ZERO, request))
}

/// What one side of a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Job {
    guest: Guest,
    requests: u64,
    memory_mib: u64,
    /// A flush after so many.
    every: Option<u64>,
    policy: Policy,
    is_ours: bool,
}

impl Job {
    /// What came of it, in a line.
    fn said(&self, counted: &Counted) -> String {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        format!(
            "{}: to flash {:.3} + {:.3} GiB of tables, {:.3} GiB of tables read, {:.1} % of lookups in memory",
            self.name(),
            gib(counted.flash_data),
            gib(counted.flash_metadata),
            gib(counted.flash_metadata_read),
            100.0 * counted.hit_ratio()
        )
    }

    fn name(&self) -> String {
        let side = if self.is_ours { "the flash cache" } else { "TRDC" };
        let every = self.every.map_or_else(String::new, |every| format!(", a flush after {every}"));
        format!(
            "{:?} of {} over {side}, {:?}, {} MiB{every}",
            self.guest, self.requests, self.policy, self.memory_mib
        )
    }
}

fn counted(job: &Job) -> Result<Counted> {
    let blocks = match job.guest {
        Guest::Random { bytes, .. } => job.requests * (bytes / BLOCK_BYTES + 1),
        Guest::Mix { .. } => job.requests,
        // What is written twice needs a slot of its own until the flush.
        Guest::Oltp { .. } => job.requests + (64 << 10),
    };
    let sizes =
        Sizes { blocks: None, blocks_max: blocks * 5 / 4 + 65_536, memory_bytes: job.memory_mib * MIB };
    block_on(async {
        let scene = match job.is_ours {
            true => Scene::ours(Devices::instant(), None, job.policy, sizes).await?,
            false => Scene::rival(Devices::instant(), job.policy, sizes).await?,
        };
        let asked = ask(&scene, with_flushes(job.guest.requests(job.requests, SEED), job.every)).await?;
        scene.disk.flush().await?;
        Ok(scene.counted(asked))
    })
}

/// A trace over one side; flash has this share of its blocks.
fn replayed(
    requests: &[(Duration, Request)],
    blocks: u64,
    percent: Option<u64>,
    is_ours: bool,
) -> Result<Counted> {
    let share = percent.map(|percent| (blocks * percent).div_ceil(100));
    let sizes = Sizes { blocks: share, blocks_max: blocks * 2 + 65_536, memory_bytes: 128 * MIB };
    block_on(async {
        let scene = match is_ours {
            true => Scene::ours(Devices::instant(), None, Policy::WriteBack, sizes).await?,
            false => Scene::rival(Devices::instant(), Policy::WriteBack, sizes).await?,
        };
        let asked = ask(&scene, requests.iter().copied()).await?;
        scene.disk.flush().await?;
        Ok(scene.counted(asked))
    })
}

fn replay(trace: &Recorded) -> Result<Vec<Replayed>> {
    let blocks = trace.blocks();
    let percents: Vec<Option<u64>> = [None].into_iter().chain(PERCENT.map(Some)).collect();
    let jobs: Vec<_> = percents.iter().flat_map(|percent| [(*percent, false), (*percent, true)]).collect();
    let counted =
        on_all_processors(&jobs, |(percent, is_ours)| replayed(&trace.requests, blocks, *percent, *is_ours))?;
    let pair = |(percent, both): (&Option<u64>, &[Counted])| Replayed {
        trace: trace.name.clone(),
        is_msr: trace.form == Form::Msr,
        percent: *percent,
        rival: both[0],
        ours: both[1],
    };
    Ok(percents.iter().zip(counted.chunks(2)).map(pair).collect())
}

/// An application over one side.
fn application(which: Application, part: u64, is_ours: bool) -> Result<Counted> {
    let requests: Vec<_> =
        which.requests(part, SEED)?.all().map(|request| (Duration::ZERO, request)).collect();
    let blocks = |request: &(Duration, Request)| match request.1 {
        Request::Write { len, .. } | Request::WriteThrough { len, .. } | Request::Read { len, .. } => {
            len as u64 / BLOCK_BYTES + 2
        }
        _ => 0,
    };
    let blocks = requests.iter().map(blocks).sum::<u64>().min(1 << 20);
    replayed(&requests, blocks, None, is_ours)
}

/// Bytes of memory for the index of `blocks` blocks, which are neighbours or lone, for each byte that is cached.
fn index_bytes(blocks: u64, is_lone: bool) -> Result<f64> {
    block_on(async {
        let flash_bytes = blocks * BLOCK_BYTES * 5 / 4 + (16 << 20);
        let kept = flash_bytes - blocks * BLOCK_BYTES;
        let storage: SharedStorage =
            ForgetfulDrive::on(Device::instant(), Limits::plain(), (flash_bytes, kept), 0);
        create(&storage, flash_bytes, [7; 16], 0x5EC2_E700_0000_0001).await?;
        let cache = FlashCache::open(storage, FlashOptions::new(None, Random::from_seed(1))).await?;
        let sink = ForgetfulDrive::on(Device::instant(), Limits::plain(), (DISK_BYTES, 0), 0);
        let options = DiskOptions {
            disk: [1; 16],
            home: vellum_format::Raw::open(sink, false, &vellum_core::HostTally::default()) as SharedDisk,
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

/// What a QCOW2 of this size has of tables, as it is made with all of its mapping.
fn metadata_bytes(size: u64, cluster_size: u64) -> Result<u64> {
    block_on(async {
        let device = Device::instant();
        let storage = ForgetfulDrive::on(device.clone(), Limits::plain(), (0, 0), 0);
        let options = CreateOptions {
            size,
            cluster_size,
            preallocation: Preallocation::Metadata,
            ..CreateOptions::without_journal()
        };
        qcow2::create(&*storage, None, &options).await?;
        let counts = device.counts();
        Ok(counts.bytes_written + counts.bytes_zeroed)
    })
}

fn read_traces(files: &Files, table: Table) -> Result<Vec<Recorded>> {
    let cloudphysics = files.cloudphysics.iter().map(|path| (path, Form::Named));
    let msr = files.msr.iter().map(|path| (path, Form::Msr));
    let mut traces = Vec::new();
    for (path, form) in cloudphysics.chain(msr) {
        let trace = Recorded::read(path, form)?;
        table.say(&format!("{}: {} requests, {} blocks", trace.name, trace.requests.len(), trace.blocks()));
        traces.push(trace);
    }
    Ok(traces)
}

fn run_all(options: &Options, table: Table) -> Result<Runs> {
    // Better now than after minutes of work.
    let recorded = read_traces(&options.traces, table)?;
    let of = |(full, small): (u64, u64)| if options.is_full { full } else { small };
    let requests = of(REQUESTS);
    let sizes = [(4, true), (8, true), (16, true), (32, true), (64, true), (64, false)];
    let random = sizes.map(|(kib, is_aligned)| Guest::Random { bytes: kib << 10, is_aligned });
    let oltp = PRINTED.map(|row| row.job(OLTP_WRITES_OF_100, options.is_full));
    let oltp_of_rows = [&PRINTED[2], &PRINTED[3]].map(|row| row.job(row.writes_of_100(), options.is_full));
    let plain = |guest| Job {
        guest,
        requests,
        memory_mib: 128,
        every: None,
        policy: Policy::WriteBack,
        is_ours: false,
    };
    let mut jobs: Vec<Job> = Vec::new();
    let both = |job: Job| [job, Job { is_ours: true, ..job }];
    // Those between the smallest and the longest are in a figure alone, where each request costs the same.
    let fewer = |guest| Job { requests: requests / BETWEEN_PART, ..plain(guest) };
    jobs.extend(random[..1].iter().flat_map(|guest| both(plain(*guest))));
    jobs.extend(random[1..4].iter().flat_map(|guest| both(fewer(*guest))));
    jobs.extend(random[4..].iter().flat_map(|guest| both(plain(*guest))));
    jobs.extend([0, 4].iter().flat_map(|index| both(Job { every: Some(32), ..plain(random[*index]) })));
    jobs.extend(oltp.iter().chain(&oltp_of_rows).flat_map(|job| both(*job)));
    jobs.extend(MEMORY_MIB.map(|memory_mib| Job { memory_mib, ..plain(random[4]) }));
    jobs.push(Job { memory_mib: 1, ..plain(random[0]) });
    jobs.extend(
        [0, 4].iter().flat_map(|index| both(Job { policy: Policy::WriteThrough, ..plain(random[*index]) })),
    );
    jobs.extend(MEMORY_MIB.map(|memory_mib| Job {
        memory_mib,
        policy: Policy::WriteThrough,
        is_ours: true,
        ..plain(random[4])
    }));
    let mut unique: Vec<Job> = Vec::new();
    // The longest are at the end, and come first.
    for job in jobs.iter().rev() {
        if !unique.contains(job) {
            unique.push(*job);
        }
    }
    table.say(&format!("{} runs of {requests} requests", unique.len()));
    let progress = Progress::new(options.is_full);
    let made = on_all_processors(&unique, |job| progress.part(|made| job.said(made), || counted(job)))?;
    let made_of = |job: &Job| made[unique.iter().position(|one| one == job).expect("each is made")];
    let done: Vec<Counted> = jobs.iter().map(made_of).collect();
    let pair = |(jobs, both): (&[Job], &[Counted])| Pair {
        guest: jobs[0].guest,
        requests: jobs[0].requests,
        memory_mib: jobs[0].memory_mib,
        rival: both[0],
        ours: both[1],
    };
    let pairs: Vec<Pair> = jobs[..28].chunks(2).zip(done.chunks(2)).map(pair).collect();
    let by_memory = MEMORY_MIB.iter().copied().zip(done[28..33].iter().copied()).collect();
    let mut traces = Vec::new();
    for trace in &recorded {
        traces.extend(replay(trace)?);
    }
    let part = if options.is_full { 1 } else { APPLICATION_PART };
    let sides: Vec<(Application, bool)> =
        Application::ALL.iter().flat_map(|which| [(*which, false), (*which, true)]).collect();
    let counted = on_all_processors(&sides, |(which, is_ours)| {
        let side = if *is_ours { "the flash cache" } else { "TRDC" };
        progress.part(
            |made| format!("{} over {side}: {made:?}", which.name()),
            || application(*which, part, *is_ours),
        )
    })?;
    let applications = sides.chunks(2).zip(counted.chunks(2)).map(|(sides, both)| Replayed {
        trace: sides[0].0.name().to_owned(),
        is_msr: false,
        percent: None,
        rival: both[0],
        ours: both[1],
    });
    let applications = applications.collect();
    let kinds: Vec<(Guest, bool)> =
        random.iter().flat_map(|guest| [(*guest, false), (*guest, true)]).collect();
    let amplified = on_all_processors(&kinds, |(guest, is_flushed)| {
        progress.part(|made| format!("{made:?}"), || amplified(*guest, *is_flushed, of(AMPLIFIED)))
    })?;
    let (blocks, metadata_disk) = (of(INDEX_BLOCKS), of(METADATA_DISK));
    let metadata = |cluster| Ok(metadata_bytes(metadata_disk, cluster)? * (DISK_BYTES / metadata_disk));
    Ok(Runs {
        is_full: options.is_full,
        random: pairs[..6].to_vec(),
        flushed: pairs[6..8].to_vec(),
        by_memory,
        small_memory: done[33],
        through: jobs[34..38].chunks(2).zip(done[34..38].chunks(2)).map(pair).collect(),
        ours_by_memory: MEMORY_MIB.iter().copied().zip(done[38..].iter().copied()).collect(),
        oltp: pairs[8..12].to_vec(),
        oltp_of_rows: pairs[12..].to_vec(),
        applications,
        amplified,
        fragments: Fragments::made(),
        speeds: Speeds::run(options.is_full, progress)?,
        traces,
        index_full: progress.part(|_| "the index".to_owned(), || index_bytes(blocks, false))?,
        index_lone: progress
            .part(|_| "the index of lone blocks".to_owned(), || index_bytes(blocks / 16, true))?,
        metadata_bytes: [
            progress.part(|_| "metadata of a qcow2".to_owned(), || metadata(64 << 10))?,
            progress.part(|_| "metadata of a qcow2".to_owned(), || metadata(4 << 10))?,
        ],
    })
}

pub(crate) fn make(options: &Options, table: Table) -> Result<Made> {
    let setting = "Requests to a sparse disk of 1 TiB over a full base, clusters of 64 KiB. The flash cache (write-back) \
                   and the qcow2 below both sides are the engine itself; every byte is counted. TRDC, the rival, is our \
                   model of the paper's: a cache below the format that knows nothing of copy-on-write, with blocks of \
                   4 KiB and tables in whole."
        .to_owned();
    table.say(&setting);
    let runs = run_all(options, table)?;
    for pair in runs.random.iter().chain(&runs.flushed) {
        let each = |bytes: u64| bytes as f64 / 1024.0 / pair.requests as f64;
        table.say(&format!(
            "  {:?}: KiB to flash for each: TRDC {:.2} + {:.2} of tables, here {:.2} + {:.2}; {} flushes of flash",
            pair.guest,
            each(pair.rival.flash_data),
            each(pair.rival.flash_metadata),
            each(pair.ours.flash_data),
            each(pair.ours.flash_metadata),
            pair.ours.flash_flushes,
        ));
    }
    Ok(Made {
        name: "cowcache",
        title: "COWCache: effective flash caching for Copy-on-Write virtual disks",
        venue: "Cluster Computing 2019",
        setting,
        rows: rows::rows(&runs),
        figures: figures::figures(&runs)?,
        runs: serde_json::to_value(runs).expect("numbers and strings"),
    })
}
