//! `vellum-bench nbd`: the served path beside `qemu-nbd` and nbdkit.
//!
//! ```text
//!   for each group     page cache or not × connections × workload
//!     for each round     each image with each program takes a turn, beginning with another one each time
//!       start the program on the image ► warm up ► measure ► stop it
//! ```
//!
//! All programs serve the same file, and the same client requests the same offsets. Before each turn the file
//! is flushed, and either read into the page cache as a whole or dropped from it. Images take turns too, so
//! that the cost of a format can be read from the same rounds.

mod cases;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, ErrorKind, Result};
use vellum_lab::programs::dir_or_beside_me;
use vellum_lab::report::{Output, Table, complain, say_json};
use vellum_lab::server::{Cache, Nbdkit, QemuNbd, Running, Server, Serving, Vellum};

use super::parse_size;
use crate::host::Machine;
use crate::images::{Image, Images};
use crate::load::{self, Sample, Target, Timing, fio};
use crate::report::{Series, lines, median};
use cases::{Case, cases};

/// Time images served over NBD by Vellum, qemu-nbd and nbdkit
///
/// Each case prints a line when it ends: rate or time, the server's CPU time per operation, and the ratios of
/// Vellum's rate (or time) and CPU time to those of each other program.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Quick run of a few minutes: one connection, raw and qcow2, short turns, a small disk
    #[arg(long)]
    quick: bool,
    /// Measured seconds per turn [default: 2, quick: 0.5]
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Seconds of warm-up before each turn
    #[arg(long, value_name = "SECONDS", default_value_t = 0.2)]
    warm_up: f64,
    /// Number of rounds of each case; each program has a turn in each
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Size of the disk, at least 16M [default: 1G, quick: 256M]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Directory for images and sockets. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Run only the cases whose names contain TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Run only cases without the page cache (vellum --direct, qemu-nbd --cache=none)
    #[arg(long, conflicts_with = "buffered")]
    direct: bool,
    /// Run only cases with the page cache
    #[arg(long)]
    buffered: bool,
    /// Let the clients negotiate simple replies, as the kernel's client does
    ///
    /// By default they negotiate structured replies, as libnbd and QEMU do.
    #[arg(long)]
    simple_replies: bool,
    /// Measure Vellum only
    #[arg(long)]
    skip_peers: bool,
    /// vellum program to measure, optionally with extra arguments for `serve`
    ///
    /// May be given several times to compare them.
    #[arg(long, value_name = "[LABEL=]PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Vec<Vellum>,
    /// Generate the load with fio's NBD engine, as a cross-check
    #[arg(long)]
    fio: bool,
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
    structured_replies: bool,
    client: &'static str,
    programs: Vec<Program>,
    cases: Vec<Outcome>,
}

#[derive(Serialize)]
struct Program {
    name: String,
    version: String,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Outcome {
    #[serde(rename = "case")]
    id: String,
    #[serde(skip)]
    case: Case,
    series: Vec<Series>,
}

impl Args {
    fn wants(&self, case: &Case) -> bool {
        let id = case.id();
        let is_quick = case.connections == 1 && case.image != Image::Overlay;
        let cache = match case.cache {
            Cache::Buffered => !self.direct,
            Cache::Direct => !self.buffered,
        };
        cache
            && (is_quick || !self.quick)
            && (self.only.is_empty() || self.only.iter().any(|text| id.contains(text)))
    }

    fn timing(&self) -> Result<Timing> {
        let window = self.seconds.unwrap_or(if self.quick { 0.5 } else { 2.0 });
        Ok(Timing { warm_up: seconds(self.warm_up)?, window: seconds(window)? })
    }

    fn size(&self) -> Result<u64> {
        let size = self.size.unwrap_or(if self.quick { 256 << 20 } else { 1 << 30 });
        if size < 16 << 20 || !size.is_multiple_of(1 << 20) {
            return Err(Error::invalid("--size is at least 16M, in whole MiB"));
        }
        Ok(size)
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let cases: Vec<Case> = cases().into_iter().filter(|case| args.wants(case)).collect();
    let table = Table::to(args.output);
    if args.list {
        cases.iter().for_each(|case| table.say(&case.id()));
        return Ok(());
    }
    if cases.is_empty() {
        return Err(Error::invalid("no case has such a name: see --list"));
    }
    let (timing, size, dir) = (args.timing()?, args.size()?, dir_or_beside_me(args.dir.as_ref())?);
    let ours = if args.vellum.is_empty() { vec![Vellum::beside_me()?] } else { args.vellum.clone() };
    let entrants = entrants(args, &ours)?;
    let machine = Machine::with(&dir);
    if machine.medium == "tmpfs" {
        complain(
            "the images lie on tmpfs, which has no device below it: say --dir for what O_DIRECT really costs",
        );
    }
    let client = if args.fio { "fio" } else { "own" };
    table.say(&format!(
        "{} MiB disk on {}; Linux {}, {} processors; {} x {} s each, medians, ± half of the spread; client: {client}, \
         {} replies",
        size >> 20,
        machine.medium,
        machine.kernel,
        machine.processors,
        args.rounds,
        timing.window.as_secs_f64(),
        if args.simple_replies { "simple" } else { "structured" },
    ));
    for Entrant { server, version } in &entrants {
        table.say(&format!("{}: {version}", server.name()));
    }
    let images = Images::make(&dir, size, &ours[0].path)?;
    let mut outcomes: Vec<Outcome> = Vec::new();
    for group in cases.chunk_by(|a, b| a.group() == b.group()) {
        table.say("");
        table.say(&group[0].group());
        let measured = measure(args, &images, &entrants, group, timing)?;
        for (case, series) in group.iter().zip(measured) {
            lines(case.image.title(), case.figures(), &series).iter().for_each(|line| table.say(line));
            outcomes.push(Outcome { case: *case, id: case.id(), series });
        }
    }
    table.say("");
    tell_formats(&outcomes, table);
    tell_reasons_and_noise(&outcomes, table);
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report {
            unix_seconds: now.as_secs(),
            machine,
            size,
            seconds: timing.window.as_secs_f64(),
            structured_replies: !args.simple_replies,
            client,
            programs: entrants
                .into_iter()
                .map(|entrant| Program { name: entrant.server.name(), version: entrant.version })
                .collect(),
            cases: outcomes,
        });
    }
    Ok(())
}

fn seconds(seconds: f64) -> Result<Duration> {
    let duration = Duration::try_from_secs_f64(seconds);
    duration.map_err(|_| Error::invalid(format!("{seconds} seconds cannot be waited for")))
}

/// A program that takes part.
struct Entrant {
    server: Box<dyn Server>,
    version: String,
}

/// The programs that are here, ours first.
fn entrants(args: &Args, ours: &[Vellum]) -> Result<Vec<Entrant>> {
    let mut servers: Vec<Box<dyn Server>> = Vec::new();
    servers.extend(ours.iter().map(|vellum| Box::new(vellum.clone()) as Box<dyn Server>));
    if !args.skip_peers {
        servers.push(Box::new(QemuNbd::FAST));
        servers.push(Box::new(Nbdkit));
    }
    let mut entrants: Vec<Entrant> = Vec::new();
    for server in servers {
        match server.version() {
            Ok(version) => entrants.push(Entrant { server, version }),
            Err(error) if error.kind() == ErrorKind::NotFound && entrants.len() >= ours.len() => {
                complain(&format!("skipped: {}: {}", server.name(), error.chain()));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(entrants)
}

/// All rounds of the cases of one group: for each case the series of all programs.
fn measure(
    args: &Args,
    images: &Images,
    entrants: &[Entrant],
    group: &[Case],
    timing: Timing,
) -> Result<Vec<Vec<Series>>> {
    let none = || entrants.iter().map(|entrant| Series::of(entrant.server.name())).collect();
    let mut all: Vec<Vec<Series>> = group.iter().map(|_| none()).collect();
    let turns = group.len() * entrants.len();
    for round in 0..args.rounds as usize {
        for turn in 0..turns {
            let index = (round + turn) % turns;
            let (case, server) = (group[index % group.len()], &*entrants[index / group.len()].server);
            let series = &mut all[index % group.len()][index / group.len()];
            if series.skipped.is_some() {
                continue;
            }
            match take_turn(args, images, server, case, timing, round as u64) {
                Ok(sample) => series.samples.push(sample),
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    series.skipped = Some(error.to_string());
                }
                Err(error) => {
                    return Err(error).context(|| format!("{} at {}", server.name(), case.id()));
                }
            }
        }
    }
    Ok(all)
}

fn take_turn(
    args: &Args,
    images: &Images,
    server: &dyn Server,
    case: Case,
    timing: Timing,
    seed: u64,
) -> Result<Sample> {
    let (image, socket) = (images.path(case.image), images.dir().join("nbd.sock"));
    let serving = Serving {
        image: &image,
        format: case.image.format(),
        cache: case.cache,
        connections: case.connections,
        socket: &socket,
    };
    // What it cannot do is known before anything is prepared.
    server.command(&serving)?;
    images.prepare(case.image, case.cache == Cache::Buffered)?;
    let running = Running::start(server, &serving)?;
    let target = Target {
        pid: running.pid(),
        socket: running.socket(),
        connections: case.connections,
        structured: !args.simple_replies,
    };
    if args.fio {
        fio::run(target, &case.workload, timing)
    } else {
        load::run(target, &case.workload, timing, seed)
    }
}

/// What qcow2 costs each program over raw, from the rounds that both took part in.
fn tell_formats(outcomes: &[Outcome], table: Table) {
    let of = |image| move |outcome: &&Outcome| outcome.case.image == image;
    let mut told = false;
    for qcow2 in outcomes.iter().filter(of(Image::Qcow2)) {
        let group = qcow2.case.group();
        let Some(raw) = outcomes.iter().filter(of(Image::Raw)).find(|raw| raw.case.group() == group) else {
            continue;
        };
        if !told {
            table.say("qcow2 beside raw, the same program: times its rate (or its time), times its CPU time");
            told = true;
        }
        let figures = qcow2.case.figures();
        let ratios: Vec<String> = qcow2
            .series
            .iter()
            .zip(&raw.series)
            .filter_map(|(qcow2, raw)| Some(format!("{} {}", qcow2.server, figures.compare(qcow2, raw)?)))
            .collect();
        table.say(&format!("  {group:<52} {}", ratios.join("; ")));
    }
}

/// Why programs were left out, and how busy others kept the machine.
fn tell_reasons_and_noise(outcomes: &[Outcome], table: Table) {
    let mut reasons: Vec<String> = Vec::new();
    let all = || outcomes.iter().flat_map(|outcome| &outcome.series);
    for series in all() {
        if let Some(reason) = &series.skipped {
            let reason = format!("n/a, {}: {reason}", series.server);
            if !reasons.contains(&reason) {
                reasons.push(reason);
            }
        }
    }
    reasons.iter().for_each(|reason| table.say(reason));
    let others = median(
        all().flat_map(|series| &series.samples).map(|sample| sample.others_cpu_seconds / sample.seconds),
    );
    table.say(&format!("other programs kept {others:.2} processors busy meanwhile (median)"));
}
