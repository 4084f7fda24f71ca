//! `vellum-bench flash-hits`: what a read costs that the flash cache has, beside the same read of a raw file.
//!
//! ```text
//!   raw                 NBD ◄─ vellum serve ◄─ disk.raw
//!   raw, cached         NBD ◄─ vellum serve --flash ◄─ cache        disk.raw is not read: all blocks are hits
//!   qcow2, cached       NBD ◄─ vellum serve --flash ◄─ cache        with write-back
//! ```
//!
//! Raw file and cache are in the page cache, so what differs is the way to the bytes. The figure is the CPU time of the
//! server for a read, its threads in the kernel included. Programs take turns; each round gives one difference.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_json::Value;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::guest::{Guest, Request};
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::{Running, Vellum};

use super::parse_size;
use crate::host::Machine;
use crate::images::{prepare, write_raw};
use crate::load::workload::{BLOCK, Operation, Order, Workload};
use crate::load::{self, Sample, Target, Timing};
use crate::report::{median, short};

/// The disk is read in pieces of this length until the cache has all of it.
const PIECE: usize = 256 << 10;
const PASSES: usize = 20;

/// Compare the CPU time of a read from the flash cache with that of the same read from a raw file
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the disk, in whole MiB
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    size: u64,
    /// Requests in flight
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..))]
    in_flight: u8,
    /// Measured seconds per turn, after a fifth of it to warm up
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    seconds: f64,
    /// Number of rounds; each program has a turn in each
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
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

const ROWS: [(&str, &str, bool); 3] =
    [("raw", "raw", false), ("raw, cached", "raw", true), ("qcow2, cached", "qcow2", true)];

/// One way to the bytes.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    name: &'static str,
    samples: Vec<Sample>,
    /// Of the cache, in the measured turns and while they warm up.
    hits: u64,
    misses: u64,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    rows: Vec<Row>,
}

/// A server in its turn.
struct Ready {
    running: Running,
    control: PathBuf,
    before: (u64, u64),
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
        "random 4 KiB reads, {} in flight; {} MiB, all in the page cache; {} rounds of {} s; Linux {}, {} processors",
        args.in_flight,
        args.size >> 20,
        args.rounds,
        args.seconds,
        machine.kernel,
        machine.processors
    ));
    lab.programs.iter().take(1).for_each(|program| table.say(program));
    let raw = lab.dir.join("disk.raw");
    write_raw(&raw, args.size).context(|| format!("can't write {}", raw.display()))?;
    let mut ready = Vec::new();
    for (number, (name, format, is_cached)) in ROWS.into_iter().enumerate() {
        ready.push(start(&lab, &raw, args.size, (number, name, format, is_cached)).context(|| name)?);
    }
    let (operation, order) = (Operation::Read, Order::Random);
    let workload = Workload { operation, order, len: BLOCK, depth: usize::from(args.in_flight) };
    let timing = Timing { warm_up: window / 5, window };
    for round in 0..args.rounds {
        for turn in 0..ready.len() {
            let index = (round as usize + turn) % ready.len();
            let Ready { running, row, .. } = &mut ready[index];
            let target =
                Target { pid: running.pid(), socket: running.socket(), connections: 1, structured: true };
            row.samples.push(load::run(target, &workload, timing, u64::from(round))?);
        }
    }
    let mut rows = Vec::new();
    for Ready { running, control, before, mut row } in ready {
        let (hits, misses) = found(&lab.vellum.path, &control)?;
        (row.hits, row.misses) = (hits - before.0, misses - before.1);
        running.stop()?;
        rows.push(row);
    }
    lines(&rows).iter().for_each(|line| table.say(line));
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (unix_seconds, programs) = (now.as_secs(), lab.programs.clone());
        say_json(&Report { unix_seconds, machine, programs, rows });
    }
    Ok(())
}

fn lines(rows: &[Row]) -> Vec<String> {
    let head = format!(
        "{:<15} {:>10} {:>10} {:>26} {:>12}",
        "disk", "reads/s", "cpu us", "more cpu than raw, us", "misses"
    );
    let line = |row: &Row| {
        // Pairs of one round: what disturbed one disturbed the other.
        let pairs = row.samples.iter().zip(&rows[0].samples);
        let more: Vec<f64> =
            pairs.map(|(sample, raw)| sample.server_cpu_us() - raw.server_cpu_us()).collect();
        let (least, most) = more
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), one| (low.min(*one), high.max(*one)));
        format!(
            "{:<15} {:>10} {:>10} {:>26} {:>12}",
            row.name,
            short(median(row.samples.iter().map(Sample::per_second))),
            short(median(row.samples.iter().map(Sample::server_cpu_us))),
            format!("{:.2} ({least:.2} to {most:.2})", median(more)),
            format!("{} of {}", row.misses, row.hits + row.misses)
        )
    };
    std::iter::once(head).chain(rows.iter().map(line)).collect()
}

fn start(lab: &Lab, raw: &Path, size: u64, row: (usize, &'static str, &str, bool)) -> Result<Ready> {
    let (number, name, format, is_cached) = row;
    let path = |what: &str| lab.dir.join(format!("{what}-{number}"));
    let (image, socket, control) = (path("image"), path("nbd"), path("control"));
    let vellum = || Command::new(&lab.vellum.path);
    programs::run(vellum().args(["convert", "-q", "-f", "raw", "-O", format]).arg(raw).arg(&image))?;
    prepare(&image, false)?;
    prepare(&image, true)?;
    let mut serve = vellum();
    serve.args(["serve", "-q", "--format", format, "--nbd"]).arg(format!("unix:{}", socket.display()));
    serve.arg("--control").arg(&control).args(&lab.vellum.arguments);
    if is_cached {
        let flash = path("flash");
        programs::run(vellum().args(["flash", "create", "-q"]).arg(&flash).arg((size * 2).to_string()))?;
        serve.arg("--flash").arg(flash);
    }
    serve.arg(&image);
    let serves = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
    let running = Running::start_until(serve, &socket, serves)?;
    let mut guest = Guest::connect(&socket)?;
    for pass in 0.. {
        let before = found(&lab.vellum.path, &control)?;
        for offset in (0..size).step_by(PIECE) {
            guest.ask(Request::Read { offset, len: PIECE })?;
        }
        let after = found(&lab.vellum.path, &control)?;
        if after.1 == before.1 {
            break;
        }
        if pass == PASSES {
            return Err(Error::invalid(format!(
                "the cache does not get all of the disk: {} misses",
                after.1 - before.1
            )));
        }
        // What was read gets its place in the background.
        std::thread::sleep(Duration::from_millis(200));
    }
    guest.leave()?;
    let before = found(&lab.vellum.path, &control)?;
    Ok(Ready { running, control, before, row: Row { name, samples: Vec::new(), hits: 0, misses: 0 } })
}

/// Blocks that the cache had, and had not.
fn found(vellum: &Path, control: &Path) -> Result<(u64, u64)> {
    let mut command = Command::new(vellum);
    command.args(["stats", "--output", "json", "--control"]).arg(control).stdin(Stdio::null());
    let output = command.output().context(|| format!("can't run {command:?}"))?;
    let stats: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::corrupt(format!("{command:?} has another form: {error}")))?;
    let of = |name: &str| stats["disks"][0]["flash"]["disk"][name].as_u64().unwrap_or_default();
    Ok((of("hits"), of("misses")))
}
