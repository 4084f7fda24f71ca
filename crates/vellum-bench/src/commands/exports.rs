//! `vellum-bench exports`: the same disks over vhost-user-blk, FUSE and NBD, beside `qemu-storage-daemon`,
//! `qemu-nbd` and nbdkit.
//!
//! ```text
//!   for each case      a way × how the file is reached × a disk × what is asked
//!     for each round     each program takes a turn, beginning with another one each time
//!       start the program on the image ► load ► stop it
//! ```
//!
//! The load is a virtual machine of our own for vhost-user-blk ([`crate::load::vhost`]), and fio for the
//! others. Programs run with default options apart from the image; all serve the same one, mapped or fresh,
//! through the page cache of the host or with O_DIRECT. Vellum also serves an image of its own format. The
//! figures for raw disks come with those of fio on the file itself.

mod cases;
mod table;
mod turns;
mod way;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, ErrorKind, Result};
use vellum_lab::programs::dir_or_beside_me;
use vellum_lab::report::{Output, Table, complain, say_json};
use vellum_lab::server::{Server, Vellum};

use super::parse_size;
use crate::host::Machine;
use crate::report::Series;
use cases::Case;
use turns::Setting;
use way::{Program, Way};

/// Time disks served over vhost-user-blk, FUSE, ublk and NBD, beside other servers
///
/// FUSE and ublk need root. Each case prints a line when it ends: IOPS, mean and 99th percentile of the
/// latency, and the server's CPU time per operation. Programs that are not installed are skipped.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Measured seconds per turn; vhost-user-blk warms up for another fifth of it
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3)]
    seconds: f64,
    /// Number of rounds of each case; each program has a turn in each
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Size of the allocated disks in whole MiB, at least 16M; empty ones are 128 times as large
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    size: u64,
    /// Directory for images, sockets and files. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Run only the cases whose names contain TEXT; may be given several times
    ///
    /// This also selects cases that run only with --all.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Run all cases, not only the usual ones
    #[arg(long)]
    all: bool,
    /// Measure Vellum only
    #[arg(long)]
    skip_peers: bool,
    /// vellum program to measure, optionally with extra arguments for `serve`
    ///
    /// May be given several times to compare them.
    #[arg(long, value_name = "[LABEL=]PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Vec<Vellum>,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
    /// List the cases and exit
    #[arg(long)]
    list: bool,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    size: u64,
    seconds: f64,
    programs: Vec<String>,
    skipped: Vec<String>,
    cases: Vec<Outcome>,
}

#[derive(Serialize)]
struct Outcome {
    case: String,
    series: Vec<Series>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted = |case: &Case| match args.only.is_empty() {
        true => args.all || case.is_usual(),
        false => args.only.iter().any(|text| case.id().contains(text)),
    };
    let mut cases: Vec<Case> = Case::all().into_iter().filter(wanted).collect();
    let table = Table::to(args.output);
    if args.list {
        cases.iter().for_each(|case| table.say(&case.id()));
        return Ok(());
    }
    if cases.is_empty() {
        return Err(Error::invalid("no case has such a name: see --list --all"));
    }
    if args.size < 16 << 20 || !args.size.is_multiple_of(1 << 20) {
        return Err(Error::invalid("--size is at least 16M, in whole MiB"));
    }
    let window = Duration::try_from_secs_f64(args.seconds).ok().filter(|window| !window.is_zero());
    let window = window.ok_or_else(|| Error::invalid("--seconds is a number above 0"))?;
    let dir = dir_or_beside_me(args.dir.as_ref())?;
    let ours = if args.vellum.is_empty() { vec![Vellum::beside_me()?] } else { args.vellum.clone() };
    let mut skipped = Vec::new();
    let (programs, versions) = programs(args, &ours, &mut skipped)?;
    leave_out(&mut cases, &mut skipped)?;
    skipped.iter().for_each(|reason| complain(&format!("skipped: {reason}")));
    let machine = Machine::with(&dir);
    table.say(&format!(
        "{} MiB disk on {}; Linux {}, {} processors; {} x {} s each, medians, ± half of the spread",
        args.size >> 20,
        machine.medium,
        machine.kernel,
        machine.processors,
        args.rounds,
        args.seconds,
    ));
    versions.iter().for_each(|version| table.say(version));
    let begun = Instant::now();
    let setting = Setting::make(&dir, ours[0].clone(), programs, args.size, window)?;
    let mut outcomes: Vec<(Case, Vec<Series>)> = Vec::new();
    for group in cases.chunk_by(|a, b| a.group() == b.group()) {
        table.say("");
        table.say(&table::heading(&group[0].group()));
        for case in group {
            let series = measure(args.rounds, &setting, case)?;
            table::lines(case, &series).iter().for_each(|line| table.say(line));
            outcomes.push((*case, series));
        }
    }
    table.say("");
    table::second_queues(&outcomes).iter().for_each(|line| table.say(line));
    table.say(&format!("{} cases in {} s", outcomes.len(), begun.elapsed().as_secs()));
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report {
            unix_seconds: now.as_secs(),
            machine,
            size: args.size,
            seconds: args.seconds,
            programs: versions,
            skipped,
            cases: outcomes.into_iter().map(|(case, series)| Outcome { case: case.id(), series }).collect(),
        });
    }
    Ok(())
}

/// The programs that are here, ours first, and their versions.
fn programs(args: &Args, ours: &[Vellum], skipped: &mut Vec<String>) -> Result<(Vec<Program>, Vec<String>)> {
    let (mut programs, mut versions) = (Vec::new(), Vec::new());
    for vellum in ours {
        versions.push(format!("{}: {}", vellum.name(), vellum.version()?));
        programs.push(Program::Vellum(vellum.clone()));
    }
    let peers = [Program::StorageDaemon, Program::QemuNbd, Program::Nbdkit, Program::Nobody];
    for program in peers.into_iter().filter(|_| !args.skip_peers) {
        match program.version() {
            Ok(version) => {
                versions.push(format!("{}: {version}", program.name()));
                programs.push(program);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                skipped.push(format!("{}: {}", program.name(), error.chain()));
            }
            Err(error) => return Err(error),
        }
    }
    Ok((programs, versions))
}

/// Leaves out the ways that this host does not have; fails when none is left.
fn leave_out(cases: &mut Vec<Case>, skipped: &mut Vec<String>) -> Result<()> {
    let no_fio = Program::Nobody.version().err().map(|error| error.chain().to_string());
    let no_fuse = (!Path::new("/dev/fuse").exists()).then(|| "there is no /dev/fuse".to_owned());
    let reasons = [(Way::Fuse, no_fuse.or_else(|| no_fio.clone())), (Way::Nbd, no_fio)];
    for (way, reason) in reasons.into_iter().filter_map(|(way, reason)| Some((way, reason?))) {
        if cases.iter().any(|case| case.way == way) {
            cases.retain(|case| case.way != way);
            skipped.push(format!("{}: {reason}", way.id()));
        }
    }
    if cases.is_empty() {
        return Err(Error::unsupported(format!("nothing can be measured here: {}", skipped.join("; "))));
    }
    Ok(())
}

/// All rounds of a case: the series of all programs.
fn measure(rounds: u32, setting: &Setting, case: &Case) -> Result<Vec<Series>> {
    let entrants = setting.entrants(case);
    let mut all: Vec<Series> = entrants.iter().map(|entrant| Series::of(entrant.name.clone())).collect();
    for round in 0..rounds {
        for turn in 0..entrants.len() {
            let index = (round as usize + turn) % entrants.len();
            let sample = setting
                .take_turn(&entrants[index], case, round)
                .context(|| format!("{} at {}", entrants[index].name, case.id()))?;
            all[index].samples.push(sample);
        }
    }
    Ok(all)
}
