//! `vellum-bench chains`: random reads of long chains of images, and the memory they take.
//!
//! ```text
//!   depth 1                depth 8: each image has every eighth cluster
//!   ┌──────────────┐       ┌─┬─┬─┬─┬─┬─┬─┬─┬─┬─
//!   │ all clusters │       │7│6│5│4│3│2│1│0│7│6  …    the top image has those numbered 7
//!   └──────────────┘       └─┴─┴─┴─┴─┴─┴─┴─┴─┴─
//! ```
//!
//! The disk is the same at every depth, and so are the requests. Programs and depths take turns in one run, each
//! beginning with another one in each round. All files are in the page cache: what is left is the way to the bytes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::guest::{Guest, Request, filler};
use vellum_lab::programs::run as run_program;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::{Cache, QemuNbd, Running, Server, Serving, Vellum};

use super::parse_size;
use crate::host::{Machine, resident};
use crate::images::prepare;
use crate::load::workload::{Operation, Order, Workload, stamp};
use crate::load::{self, Sample, Target, Timing};
use crate::report::median;

const CLUSTER_BYTES: u64 = 64 << 10;

/// Time random reads of chains of 1, 8, 64 and 100 images, and count the memory they take
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of images in the chain; may be given several times. The first one is compared with the others
    #[arg(long, value_name = "IMAGES", default_values_t = [1, 8, 64, 100], value_parser = clap::value_parser!(u64).range(1..=256))]
    depth: Vec<u64>,
    /// Size of the disk, in whole MiB
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    size: u64,
    /// Measured seconds per turn, after a fifth of it to warm up
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    seconds: f64,
    /// Number of rounds; each program has a turn at each depth in each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Requests in flight
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    in_flight: u8,
    /// Directory for images and sockets. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Measure Vellum only
    #[arg(long)]
    skip_peers: bool,
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
    rows: Vec<Row>,
}

/// A program at one depth.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    program: String,
    depth: u64,
    /// Memory of the process before and after all reads, in bytes.
    resident_bytes_before: u64,
    resident_bytes: u64,
    samples: Vec<Sample>,
}

/// A server in its turn.
struct Ready {
    running: Running,
    row: Row,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.size == 0 || !args.size.is_multiple_of(1 << 20) {
        return Err(Error::invalid("--size is a number of whole MiB"));
    }
    let window = Duration::try_from_secs_f64(args.seconds).ok().filter(|window| !window.is_zero());
    let window = window.ok_or_else(|| Error::invalid("--seconds is a number above 0"))?;
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let machine = Machine::with(&lab.dir);
    let table = Table::to(args.output);
    table.say(&format!(
        "random 4 KiB reads, {} in flight; {} MiB disk; {} x {} s each, medians; Linux {}, {} processors",
        args.in_flight,
        args.size >> 20,
        args.rounds,
        args.seconds,
        machine.kernel,
        machine.processors
    ));
    lab.programs.iter().for_each(|program| table.say(program));
    let mut ready = Vec::new();
    for depth in &args.depth {
        let top = make_chain(&lab, *depth, args.size).context(|| format!("a chain of {depth} images"))?;
        let peer = (!args.skip_peers && lab.no_qemu.is_none()).then_some(&QemuNbd::FAST as &dyn Server);
        for server in [Some(&lab.vellum as &dyn Server), peer].into_iter().flatten() {
            // Each program has its own top image, because it opens it for writing.
            let own = top.with_file_name(format!("top-{}.qcow2", server.name()));
            fs::copy(&top, &own).context(|| format!("can't copy {}", top.display()))?;
            prepare(&own, false)?;
            prepare(&own, true)?;
            ready.push(start(&lab, server, *depth, &own)?);
        }
    }
    let workload = Workload {
        operation: Operation::Read,
        order: Order::Random,
        len: 4096,
        depth: usize::from(args.in_flight),
    };
    let timing = Timing { warm_up: window / 5, window };
    for round in 0..args.rounds {
        for turn in 0..ready.len() {
            let index = (round as usize + turn) % ready.len();
            let Ready { running, row } = &mut ready[index];
            let target =
                Target { pid: running.pid(), socket: running.socket(), connections: 1, structured: true };
            row.samples.push(load::run(target, &workload, timing, u64::from(round))?);
        }
    }
    let mut rows = Vec::new();
    for Ready { running, mut row } in ready {
        row.resident_bytes = resident(running.pid())?;
        running.stop()?;
        rows.push(row);
    }
    table_of(&rows).iter().for_each(|line| table.say(line));
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (unix_seconds, programs) = (now.as_secs(), lab.programs.clone());
        say_json(&Report { unix_seconds, machine, programs, disk_bytes: args.size, rows });
    }
    Ok(())
}

/// Makes a chain over a disk whose blocks bear their tags, each image with its clusters. The path of the top image.
fn make_chain(lab: &Lab, depth: u64, size: u64) -> Result<PathBuf> {
    let dir = lab.dir.join(format!("chain-{depth}"));
    fs::create_dir(&dir).context(|| format!("can't make {}", dir.display()))?;
    let dir = dir.canonicalize().context(|| format!("can't find {}", dir.display()))?;
    let path = |level: u64| dir.join(format!("{level}.qcow2"));
    for level in 0..depth {
        let mut create = Command::new(&lab.vellum.path);
        create.args(["create", "-q", "-f", "qcow2"]);
        if level > 0 {
            create.arg("-b").arg(format!("{}.qcow2", level - 1)).args(["-F", "qcow2"]);
        }
        run_program(create.arg(path(level)).arg(size.to_string()).current_dir(&dir))?;
        let socket = dir.join("socket");
        let image = path(level);
        let serving = serving(&image, &socket);
        let running = Running::start(&lab.vellum, &serving)?;
        let mut guest = Guest::connect(&socket)?;
        let mut bytes = filler(usize::try_from(CLUSTER_BYTES).expect("short"));
        for cluster in (level..size / CLUSTER_BYTES).step_by(usize::try_from(depth).expect("short")) {
            stamp(&mut bytes, cluster * CLUSTER_BYTES);
            guest.write(cluster * CLUSTER_BYTES, &bytes)?;
        }
        guest.ask(Request::Flush)?;
        guest.leave()?;
        running.stop()?;
        prepare(&image, false)?;
        prepare(&image, true)?;
    }
    Ok(path(depth - 1))
}

fn serving<'a>(image: &'a Path, socket: &'a Path) -> Serving<'a> {
    Serving { image, format: "qcow2", cache: Cache::Buffered, connections: 1, socket }
}

fn start(lab: &Lab, server: &dyn Server, depth: u64, top: &Path) -> Result<Ready> {
    let socket = lab.dir.join(format!("{}-{depth}.socket", server.name()));
    let running = Running::start(server, &serving(top, &socket))?;
    let resident_bytes_before = resident(running.pid())?;
    let row =
        Row { program: server.name(), depth, resident_bytes_before, resident_bytes: 0, samples: Vec::new() };
    Ok(Ready { running, row })
}

fn table_of(rows: &[Row]) -> Vec<String> {
    let head = format!(
        "{:<14} {:>6} {:>10} {:>10} {:>12} {:>10} {:>10}",
        "program", "images", "reads/s", "of first", "median us", "cpu us", "MiB"
    );
    let line = |row: &Row| {
        let of = |figure: fn(&Sample) -> f64| median(row.samples.iter().map(figure));
        let first = rows.iter().find(|first| first.program == row.program).unwrap_or(row);
        // Pairs of one round: what disturbed one disturbed the other.
        let pairs = row.samples.iter().zip(&first.samples);
        let ratio = median(pairs.map(|(sample, first)| sample.per_second() / first.per_second()));
        format!(
            "{:<14} {:>6} {:>10.0} {:>10.3} {:>12.1} {:>10.2} {:>10.1}",
            row.program,
            row.depth,
            of(Sample::per_second),
            ratio,
            of(|sample| sample.latency_us_median),
            of(Sample::server_cpu_us),
            row.resident_bytes as f64 / f64::from(1 << 20)
        )
    };
    std::iter::once(head).chain(rows.iter().map(line)).collect()
}
