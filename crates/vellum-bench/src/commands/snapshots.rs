//! `vellum-bench snapshots`: the cost of making, keeping and deleting internal snapshots of a disk that is
//! served.
//!
//! ```text
//!   create, a block into each unit ► serve
//!     quiet      one write of a guest, one snapshot, again: what each costs the host, counted
//!     load       fio alone; fio, and a snapshot every now and then: how long each takes, and the slowest request of the guest
//!     many       some writes, one snapshot, a thousand times ► deleted in random order; what is left is read and compared, after
//!                each quarter where it was written meanwhile, and the last ones in full
//!   close ► `vellum check`
//! ```
//!
//! The image is sparse: each allocated unit has one block of data. Snapshots are requested over the control
//! socket and read as exports, as any client would do.

mod control;
mod load;
mod model;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, Random, Result};
use vellum_lab::cost::Counts;
use vellum_lab::cost::lab::{Desk, Lab};
use vellum_lab::guest::{Guest, Request};
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::{Cache, Running, Serving, Vellum};

use crate::host::Machine;
use crate::report::{median, short};
use control::Control;
use load::Seen;
use model::{Model, UNIT_BYTES};

/// Snapshots whose cost is counted one by one.
const COUNTED: u64 = 16;
/// The last ones that are left are compared in full.
const IN_FULL: usize = 5;

/// Time creating, reading and deleting snapshots of a served disk
///
/// Host operations are counted as well, and all contents are compared with a model.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the disk
    #[arg(long, value_name = "SIZE", value_parser = super::parse_size, default_value = "1T")]
    size: u64,
    /// Allocated part of the disk, in units of 1M with one block of data each
    #[arg(long, value_name = "SIZE", value_parser = super::parse_size, default_value = "100G")]
    allocated: u64,
    /// Number of snapshots that are created under load
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    beside: u32,
    /// Milliseconds between two of them
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 100)]
    every: u64,
    /// Number of snapshots, with writes in between, that are deleted in random order
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(8..=4000))]
    many: u32,
    /// Units that are written between two of them
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..))]
    hot: u64,
    /// Seed of the writes and of the order of deletion
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Directory for images and sockets. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// vellum program to measure. Default: the one beside this program
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
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
    programs: Vec<String>,
    disk_bytes: u64,
    allocated_units: u64,
    seed: u64,
    load: &'static str,
    quiet: Quiet,
    load_alone: Seen,
    load_beside: Seen,
    create_beside: Times,
    many: Many,
}

/// What each of several snapshots cost, without other load.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Quiet {
    /// The first one of the image also writes its superblock.
    first: Cost,
    others: Vec<Cost>,
    times: Times,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Cost {
    writes: u64,
    bytes_written: u64,
    flushes: u64,
}

#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Times {
    count: usize,
    min_ms: f64,
    median_ms: f64,
    max_ms: f64,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Many {
    create: Times,
    delete: Times,
    /// Blocks that were read of snapshots and the disk, each as it should be.
    blocks_compared: u64,
    /// Views that were compared.
    views_compared: u64,
    /// What the image takes on the host: with all of them, and when it was closed without any.
    bytes_with_all: u64,
    bytes_at_the_end: u64,
    seconds: f64,
}

impl Times {
    fn of(times: &[f64]) -> Self {
        let fold = |with: fn(f64, f64) -> f64, start| times.iter().copied().fold(start, with);
        Self {
            count: times.len(),
            min_ms: fold(f64::min, f64::MAX),
            median_ms: median(times.iter().copied()),
            max_ms: fold(f64::max, 0.0),
        }
    }
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [min, median, max] = [self.min_ms, self.median_ms, self.max_ms].map(short);
        write!(f, "{min} / {median} / {max} ms (min / median / max of {})", self.count)
    }
}

impl From<Counts> for Cost {
    fn from(counts: Counts) -> Self {
        let Counts { writes, bytes_written, flushes, .. } = counts;
        Self { writes, bytes_written, flushes }
    }
}

/// The image, and where it is served.
struct Scene<'a> {
    image: &'a Path,
    nbd: &'a Path,
    units: u64,
    table: Table,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let units = args.allocated / UNIT_BYTES;
    if units == 0 || args.size < args.allocated || !args.size.is_multiple_of(UNIT_BYTES) {
        return Err(Error::invalid("--size is in whole units of 1M, and --allocated at least one of them"));
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let table = Table::to(args.output);
    let machine = Machine::with(&lab.dir);
    table.say(&format!(
        "a disk of {} GiB, layout=table, {units} units of 1 MiB with one block each; image on {}; Linux {}, {} processors; seed {}",
        args.size >> 30, machine.medium, machine.kernel, machine.processors, args.seed
    ));
    table.say(&lab.programs[0]);
    let desk = Desk::new(lab.dir.join("snapshots"), "vlm")?;
    let mut create = Command::new(&lab.vellum.path);
    create.args(["create", "-q", "-f", "vellum", "-o", "layout=table"]).arg(&desk.image);
    programs::run(create.arg(args.size.to_string()))?;
    let socket = desk.dir.join("control");
    let mut vellum = lab.vellum.clone();
    vellum.arguments.extend(["--export-snapshots".into(), "--control".into(), socket.clone().into()]);
    let serving = Serving {
        image: &desk.image,
        format: "vellum",
        cache: Cache::Buffered,
        connections: 8,
        socket: &desk.socket,
    };
    let running = Running::start(&vellum, &serving)?;
    let scene = Scene { image: &desk.image, nbd: &desk.socket, units, table };
    let mut control = Control::connect(&socket)?;
    model::fill(scene.nbd, units, 1)?;
    let quiet = quiet(&scene, &mut control)?;
    let has_fio = load::has_fio();
    let load = if has_fio { "fio" } else { "guests of our own" };
    let (load_alone, load_beside, create_beside) = beside(args, &scene, &mut control, has_fio, load)?;
    let many = many(args, &scene, &mut control)?;
    running.stop()?;
    let bytes_at_the_end = room(scene.image)?;
    programs::run(Command::new(&lab.vellum.path).args(["check", "-q"]).arg(scene.image))?;
    let many = Many { bytes_at_the_end, ..many };
    table.say(&format!(
        "many    all deleted and closed: the image takes {} MiB (with all of them {} MiB), and `vellum check` finds nothing",
        many.bytes_at_the_end >> 20,
        many.bytes_with_all >> 20
    ));
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report {
            unix_seconds: now.as_secs(),
            machine,
            programs: lab.programs.clone(),
            disk_bytes: args.size,
            allocated_units: units,
            seed: args.seed,
            load,
            quiet,
            load_alone,
            load_beside,
            create_beside,
            many,
        });
    }
    Ok(())
}

fn quiet(scene: &Scene<'_>, control: &mut Control) -> Result<Quiet> {
    let mut guest = Guest::connect(scene.nbd)?;
    let (mut costs, mut times) = (Vec::new(), Vec::new());
    for number in 0..=COUNTED {
        // Something that is not durable, so that there is something to do.
        guest.ask(Request::Write { offset: number % scene.units * UNIT_BYTES + 8192, len: 4096 })?;
        let before = control.stats()?;
        times.push(control.create(&format!("quiet{number}"))?);
        costs.push(Cost::from(control.stats()?.total - before.total));
    }
    guest.leave()?;
    let times = Times::of(&times[1..]);
    let others = costs.split_off(1);
    let most = |of: fn(&Cost) -> u64| others.iter().map(of).max().unwrap_or(0);
    scene.table.say(&format!(
        "quiet   {times}; each at most {} flushes, {} writes, {} bytes; the first of the image {}, {}, {}",
        most(|cost| cost.flushes),
        most(|cost| cost.writes),
        most(|cost| cost.bytes_written),
        costs[0].flushes,
        costs[0].writes,
        costs[0].bytes_written
    ));
    Ok(Quiet { first: costs[0], others, times })
}

fn beside(
    args: &Args,
    scene: &Scene<'_>,
    control: &mut Control,
    has_fio: bool,
    load: &str,
) -> Result<(Seen, Seen, Times)> {
    let every = Duration::from_millis(args.every);
    let span = every * args.beside + Duration::from_secs(1);
    let bytes = scene.units * UNIT_BYTES;
    let (alone, ()) = load::beside(scene.nbd, bytes, span, has_fio, || Ok(()))?;
    let (seen, times) = load::beside(scene.nbd, bytes, span, has_fio, || {
        let mut times = Vec::new();
        for number in 0..args.beside {
            let begun = Instant::now();
            times.push(control.create(&format!("beside{number}"))?);
            thread::sleep(every.saturating_sub(begun.elapsed()));
        }
        Ok(times)
    })?;
    let times = Times::of(&times);
    let line = |seen: &Seen| {
        let figures = [seen.median_us, seen.flush_median_ms, seen.flush_slowest_ms, seen.slowest_ms];
        let [write, flush, slowest_flush, slowest] = figures.map(short);
        format!(
            "{} requests; median of writes {write} µs; flushes {flush} ms, at most {slowest_flush} ms; slowest request {slowest} ms",
            seen.requests
        )
    };
    scene.table.say(&format!("load    {load} alone: {}", line(&alone)));
    scene.table.say(&format!("load    {load} beside snapshots: {}", line(&seen)));
    scene.table.say(&format!("load    each snapshot {times}"));
    let mut deleted = Vec::new();
    for number in 0..=COUNTED {
        deleted.push(control.delete(&format!("quiet{number}"))?);
    }
    for number in 0..args.beside {
        deleted.push(control.delete(&format!("beside{number}"))?);
    }
    scene.table.say(&format!("load    deleted, oldest first, nobody else asking: {}", Times::of(&deleted)));
    Ok((alone, seen, times))
}

fn many(args: &Args, scene: &Scene<'_>, control: &mut Control) -> Result<Many> {
    let begun = Instant::now();
    // What the load wrote is not known.
    model::fill(scene.nbd, scene.units, 2)?;
    let mut random = Random::from_seed(args.seed);
    let mut model = Model::new(scene.units, 2, args.hot, &mut random);
    let count = usize::try_from(args.many).expect("at most thousands");
    let mut guest = Guest::connect(scene.nbd)?;
    let mut create = Vec::new();
    for number in 1..=count {
        model.write(&mut guest, &mut random, 8, number)?;
        create.push(control.create(&format!("n{number}"))?);
    }
    model.write(&mut guest, &mut random, 8, count + 1)?;
    guest.ask(Request::Flush)?;
    guest.leave()?;
    let bytes_with_all = room(scene.image)?;
    let create = Times::of(&create);
    scene.table.say(&format!("many    {count} with 8 writes between: each {create}"));
    let mut left: Vec<usize> = (1..=count).collect();
    for last in (1..count).rev() {
        left.swap(last, random.index(last + 1));
    }
    let (mut delete, mut blocks, mut views) = (Vec::new(), 0, 0);
    for quarter in (0..4).rev() {
        for number in left.split_off((count * quarter / 4).max(IN_FULL.min(count))) {
            delete.push(control.delete(&format!("n{number}"))?);
        }
        for number in &left {
            let context = || format!("{} deleted, seed {}", delete.len(), args.seed);
            blocks += model.verify_hot(scene.nbd, &format!("@n{number}"), *number).context(context)?;
            views += 1;
        }
        scene.table.say(&format!(
            "many    {} deleted; {} left, each compared where it was written: as it should be",
            delete.len(),
            left.len()
        ));
    }
    for number in &left {
        blocks += model.verify_all(scene.nbd, &format!("@n{number}"), *number)?;
        views += 1;
    }
    for number in &left {
        delete.push(control.delete(&format!("n{number}"))?);
    }
    blocks += model.verify_all(scene.nbd, "", count + 1)?;
    views += 1;
    let delete = Times::of(&delete);
    let seconds = begun.elapsed().as_secs_f64();
    scene.table.say(&format!(
        "many    in random order, each {delete}; {} and the disk compared in full; {views} views, {blocks} blocks; {} s",
        left.len(),
        short(seconds)
    ));
    Ok(Many {
        create,
        delete,
        blocks_compared: blocks,
        views_compared: views,
        bytes_with_all,
        bytes_at_the_end: 0,
        seconds,
    })
}

/// What the file takes on the host.
fn room(path: &Path) -> Result<u64> {
    let facts = std::fs::metadata(path).context(|| format!("can't look at {}", path.display()))?;
    Ok(facts.blocks() * 512)
}
