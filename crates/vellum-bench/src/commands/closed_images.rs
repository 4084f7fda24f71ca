//! `vellum-bench qemu-img`: what is done to images that no guest uses, beside `qemu-img`, in one run.
//!
//! ```text
//!   once            disk.raw, small.raw   a third of each is data, of which a half compresses
//!                   disk.qcow2, base.qcow2, over.qcow2     made of them by qemu-img
//!                   full.qcow2, mixed.qcow2                every cluster has a place: in order, and in no order
//!   for each case and round     each way in turn, beginning with another one each time
//!                   copies of what is changed ► nothing waits to be written ► the command, perhaps with a sync ► time
//! ```
//!
//! 1. A case says which ways are compared. The first one is Vellum's; of the others the one with the least median time counts.
//! 2. Durable is compared with durable: where Vellum has flushed its target when it ends, the time of QEMU's program includes
//!    that of `sync TARGET`. What flushes nothing is compared with what flushes nothing.
//! 3. What is read lies in the page cache before, and is the same file for all.
//!
//! The cases are in [`cases`].

mod cases;
mod places;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Instant, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::Vellum;

use crate::host::{Machine, cpu_seconds_of_ended};
use crate::report::{median, short, spread_percent};
use cases::{CASES, Case, Program, Way};

/// Time the commands that change, copy and examine images: Vellum and qemu-img
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the disk that is copied, in whole MiB; a third of it is data
    #[arg(long, value_name = "SIZE", default_value = "3G", value_parser = super::parse_size)]
    size: u64,
    /// Size of the disk that is compressed
    #[arg(long, value_name = "SIZE", default_value = "768M", value_parser = super::parse_size)]
    compressed: u64,
    /// Size of the full disks that are checked and mapped; each TiB takes 128 MiB of tables
    #[arg(long, value_name = "SIZE", default_value = "1T", value_parser = super::parse_size)]
    full: u64,
    /// Number of rounds; each way has a turn in each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only cases whose name contains TEXT
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// List the cases
    #[arg(long)]
    list: bool,
    /// Directory for images. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// vellum program to measure. Default: the one beside this program
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
}

/// One run of a command.
#[derive(Debug, Clone, Copy)]
struct Sample {
    wall_ms: f64,
    /// User and system time of the command.
    cpu_ms: f64,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    size: u64,
    compressed: u64,
    full: u64,
    rounds: u32,
    cases: Vec<Row>,
}

/// One case.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    case: &'static str,
    /// The median over the rounds of the other program's time, of its fastest way, divided by ours.
    times: f64,
    ways: Vec<Timed>,
}

/// One way of a case.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Timed {
    line: String,
    rounds_ms: Vec<f64>,
    median_ms: f64,
    cpu_median_ms: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let table = Table::to(args.output);
    let chosen: Vec<&Case> = CASES.iter().filter(|case| case.title.contains(&args.only)).collect();
    if args.list {
        chosen.iter().for_each(|case| table.say(case.title));
        return Ok(());
    }
    let mib = 1 << 20;
    if args.size == 0 || !args.size.is_multiple_of(12 * mib) || !args.compressed.is_multiple_of(12 * mib) {
        return Err(Error::invalid("--size and --compressed are multiples of 12M"));
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    if let Some(why) = &lab.no_qemu {
        return Err(Error::unsupported(format!("there is nothing to compare with: {why}")));
    }
    let machine = Machine::with(&lab.dir);
    table.say(&format!(
        "{} MiB, a third of it data; images on {}; Linux {}, {} processors; {} rounds, medians",
        args.size >> 20,
        machine.medium,
        machine.kernel,
        machine.processors,
        args.rounds
    ));
    lab.programs.iter().for_each(|program| table.say(program));
    places::make(&lab.dir, args.size, args.compressed, args.full).context(|| "can't make the images")?;
    let mut rows = Vec::new();
    for case in chosen {
        let row = measured(&lab, case, args.rounds).context(|| case.title)?;
        lines(&row, case).iter().for_each(|line| table.say(line));
        rows.push(row);
    }
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report {
            unix_seconds: now.as_secs(),
            machine,
            programs: lab.programs.clone(),
            size: args.size,
            compressed: args.compressed,
            full: args.full,
            rounds: args.rounds,
            cases: rows,
        });
    }
    drop(fs::remove_dir_all(&lab.dir));
    Ok(())
}

fn measured(lab: &Lab, case: &'static Case, rounds: u32) -> Result<Row> {
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); case.ways.len()];
    for round in 0..rounds as usize {
        for turn in 0..case.ways.len() {
            let index = (round + turn) % case.ways.len();
            places::prepare(&lab.dir, case)?;
            samples[index].push(timed(lab, &case.ways[index])?);
        }
    }
    places::clear(&lab.dir, case);
    let walls: Vec<Vec<f64>> =
        samples.iter().map(|samples| samples.iter().map(|sample| sample.wall_ms).collect()).collect();
    let best = (1..walls.len())
        .min_by(|a, b| median(walls[*a].iter().copied()).total_cmp(&median(walls[*b].iter().copied())))
        .expect("a case has a way of the other program");
    let times = median(walls[0].iter().zip(&walls[best]).map(|(mine, theirs)| theirs / mine));
    let ways = case.ways.iter().zip(walls).zip(&samples).map(|((way, rounds_ms), samples)| Timed {
        line: way.shown(),
        median_ms: median(rounds_ms.iter().copied()),
        rounds_ms,
        cpu_median_ms: median(samples.iter().map(|sample| sample.cpu_ms)),
    });
    Ok(Row { case: case.title, times, ways: ways.collect() })
}

/// Runs one command, and makes its target durable where the way says so.
fn timed(lab: &Lab, way: &Way) -> Result<Sample> {
    let mut command = match way.program {
        Program::Vellum => Command::new(&lab.vellum.path),
        Program::Qemu => Command::new("qemu-img"),
    };
    command.args(way.line.split_whitespace()).current_dir(&lab.dir);
    let (cpu, begun) = (cpu_seconds_of_ended()?, Instant::now());
    programs::run(&mut command)?;
    if !way.synced.is_empty() {
        programs::run(Command::new("sync").args(way.synced.split_whitespace()).current_dir(&lab.dir))?;
    }
    let wall = begun.elapsed();
    let cpu = cpu_seconds_of_ended()? - cpu;
    Ok(Sample { wall_ms: wall.as_secs_f64() * 1000.0, cpu_ms: cpu * 1000.0 })
}

/// The lines of one case.
fn lines(row: &Row, case: &Case) -> Vec<String> {
    let head = format!("  {:<46} {} times qemu-img's speed", row.case, short(row.times));
    let ways = row.ways.iter().zip(case.ways).map(|(timed, way)| {
        let spread = spread_percent(timed.rounds_ms.iter().copied());
        format!(
            "    {:>8} ms ±{spread:.0}%   CPU {:>7} ms   {}",
            short(timed.median_ms),
            short(timed.cpu_median_ms),
            way.shown()
        )
    });
    std::iter::once(head).chain(ways).collect()
}
