//! `vellum-bench nbd`: the served path beside `qemu-nbd` and nbdkit.
//!
//! ```text
//!   for each case      image × page cache or not × connections × workload
//!     for each round     programs take turns, beginning with another one each time
//!       start the program on the image ► warm up ► measure ► stop it
//! ```
//!
//! All programs serve the same file and are asked the same places by the same client. Before each turn the file is flushed,
//! and brought into the page cache whole, or dropped from it.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, ErrorKind, Result};

use super::parse_size;
use crate::host::Machine;
use crate::images::{Image, Images};
use crate::load::workload::{Operation, Order, Workload};
use crate::load::{self, Sample, Target, Timing, fio};
use crate::report::{Figures, Series, complain, head, line, median, say, write_json};
use crate::server::{Cache, Nbdkit, QemuNbd, Running, Server, Serving, Vellum};

/// Serve images over NBD with Vellum, qemu-nbd and nbdkit in turn, and compare
///
/// Each case is told as it ends: rate or time, CPU time of the server per operation, and for each other program the
/// ratios of ours to theirs. The cases of `--only` are named as `--list` names them.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seconds that each turn measures
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// Seconds before each turn that do not count
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3)]
    warm_up: f64,
    /// Turns of each program at each case
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Size of the disk; at least 16 MiB
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    size: u64,
    /// Where images and sockets are made
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    dir: PathBuf,
    /// Only cases whose name contains TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Only past the page cache: --direct here, --cache=none there
    #[arg(long, conflicts_with = "buffered")]
    direct: bool,
    /// Only through the page cache
    #[arg(long)]
    buffered: bool,
    /// Clients that ask for simple replies, as the kernel does, and not for structured ones, as libnbd and QEMU do
    #[arg(long)]
    simple_replies: bool,
    /// Vellum alone
    #[arg(long)]
    skip_peers: bool,
    /// The vellum to measure, perhaps with more arguments for `serve`; several are compared
    #[arg(long, value_name = "[LABEL=]PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Vec<Vellum>,
    /// Put the load on with fio's NBD engine, as the other opinion
    #[arg(long)]
    fio: bool,
    /// Write all samples to PATH
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
    /// Name the cases and do nothing
    #[arg(long)]
    list: bool,
}

/// What is measured.
#[derive(Debug, Clone, Copy)]
struct Case {
    image: Image,
    cache: Cache,
    connections: usize,
    workload: Workload,
}

impl Case {
    fn id(&self) -> String {
        let cache = match self.cache {
            Cache::Buffered => "buffered",
            Cache::Direct => "direct",
        };
        format!("{}/{cache}/c{}/{}", self.image.id(), self.connections, self.workload.id())
    }

    /// What cases in one part of the table have in common.
    fn group(&self) -> String {
        let cache = match self.cache {
            Cache::Buffered => "page cache",
            Cache::Direct => "O_DIRECT",
        };
        let connections = if self.connections == 1 { "connection" } else { "connections" };
        format!("{}; {cache}; {} {connections}", self.image.title(), self.connections)
    }

    fn figures(&self) -> Figures {
        if self.workload.is_about_latency() {
            Figures::Latency
        } else if self.workload.order == Order::Sequential {
            Figures::Throughput
        } else {
            Figures::Rate
        }
    }
}

const WORKLOADS: [Workload; 6] = {
    const fn random(operation: Operation, depth: usize) -> Workload {
        Workload { operation, order: Order::Random, len: 4 << 10, depth }
    }
    const fn sequential(operation: Operation) -> Workload {
        Workload { operation, order: Order::Sequential, len: 1 << 20, depth: 4 }
    }
    [
        random(Operation::Read, 32),
        random(Operation::Write, 32),
        sequential(Operation::Read),
        sequential(Operation::Write),
        random(Operation::Read, 1),
        random(Operation::Write, 1),
    ]
};

/// How many clients there are.
const CONNECTIONS: [usize; 2] = [1, 4];

/// All cases, in the order of the table.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for cache in [Cache::Buffered, Cache::Direct] {
        for image in Image::ALL {
            for connections in CONNECTIONS {
                for workload in WORKLOADS {
                    let allocates = image == Image::Overlay && workload.operation == Operation::Write;
                    let crowd_at_depth_one = connections > 1 && workload.is_about_latency();
                    if !allocates && !crowd_at_depth_one {
                        cases.push(Case { image, cache, connections, workload });
                    }
                }
            }
        }
    }
    cases
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
    case: String,
    image: Image,
    cache: Cache,
    connections: usize,
    workload: String,
    series: Vec<Series>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted = |case: &Case| {
        let id = case.id();
        let cache = match case.cache {
            Cache::Buffered => !args.direct,
            Cache::Direct => !args.buffered,
        };
        cache && (args.only.is_empty() || args.only.iter().any(|text| id.contains(text)))
    };
    let cases: Vec<Case> = cases().into_iter().filter(wanted).collect();
    if args.list {
        cases.iter().for_each(|case| say(&case.id()));
        return Ok(());
    }
    if cases.is_empty() {
        return Err(Error::invalid("no case has such a name: see --list"));
    }
    if args.size < 16 << 20 || !args.size.is_multiple_of(1 << 20) {
        return Err(Error::invalid("--size is at least 16M, in whole MiB"));
    }
    let timing = Timing { warm_up: seconds(args.warm_up)?, window: seconds(args.seconds)? };
    let entrants = entrants(args)?;
    let ours = args.vellum.first().cloned().map_or_else(Vellum::beside_me, Ok)?;
    let machine = Machine::with(&args.dir);
    say(&format!(
        "{} MiB disk on {}; Linux {}, {} processors; {} x {} s each, medians; client: {}, {} replies",
        args.size >> 20,
        machine.medium,
        machine.kernel,
        machine.processors,
        args.rounds,
        args.seconds,
        if args.fio { "fio" } else { "own" },
        if args.simple_replies { "simple" } else { "structured" },
    ));
    for Entrant { server, version } in &entrants {
        say(&format!("{}: {version}", server.name()));
    }
    let images = Images::make(&args.dir, args.size, &ours.path)?;
    let names: Vec<String> = entrants.iter().map(|entrant| entrant.server.name()).collect();
    let mut group = String::new();
    let mut outcomes = Vec::new();
    for case in cases {
        if case.group() != group {
            group = case.group();
            say("");
            say(&group);
            say(&head("", &names));
        }
        let series = measure(args, &images, &entrants, case, timing)?;
        say(&line(&case.workload.title(), case.figures(), &series));
        outcomes.push(Outcome {
            case: case.id(),
            image: case.image,
            cache: case.cache,
            connections: case.connections,
            workload: case.workload.id(),
            series,
        });
    }
    tell_reasons_and_noise(&outcomes);
    let Some(path) = &args.json else { return Ok(()) };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    write_json(
        path,
        &Report {
            unix_seconds: now.as_secs(),
            machine,
            size: args.size,
            seconds: args.seconds,
            structured_replies: !args.simple_replies,
            client: if args.fio { "fio" } else { "own" },
            programs: entrants
                .into_iter()
                .map(|entrant| Program { name: entrant.server.name(), version: entrant.version })
                .collect(),
            cases: outcomes,
        },
    )
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
fn entrants(args: &Args) -> Result<Vec<Entrant>> {
    let ours = if args.vellum.is_empty() { vec![Vellum::beside_me()?] } else { args.vellum.clone() };
    let mut servers: Vec<Box<dyn Server>> = Vec::new();
    servers.extend(ours.into_iter().map(|vellum| Box::new(vellum) as Box<dyn Server>));
    if !args.skip_peers {
        servers.push(Box::new(QemuNbd));
        servers.push(Box::new(Nbdkit));
    }
    let mut entrants: Vec<Entrant> = Vec::new();
    for server in servers {
        match server.version() {
            Ok(version) => entrants.push(Entrant { server, version }),
            Err(error) if error.kind() == ErrorKind::NotFound && !entrants.is_empty() => {
                complain(&format!("{} is left out: {}", server.name(), error.chain()));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(entrants)
}

/// All rounds of one case.
fn measure(
    args: &Args,
    images: &Images,
    entrants: &[Entrant],
    case: Case,
    timing: Timing,
) -> Result<Vec<Series>> {
    let mut series: Vec<Series> = entrants.iter().map(|entrant| Series::of(entrant.server.name())).collect();
    for round in 0..args.rounds as usize {
        for turn in 0..entrants.len() {
            let index = (round + turn) % entrants.len();
            let server = &*entrants[index].server;
            if series[index].skipped.is_some() {
                continue;
            }
            match take_turn(args, images, server, case, timing, round as u64) {
                Ok(sample) => series[index].samples.push(sample),
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    series[index].skipped = Some(error.to_string());
                }
                Err(error) => {
                    return Err(error).context(|| format!("{} at {}", server.name(), case.id()));
                }
            }
        }
    }
    Ok(series)
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

/// Why programs were left out, and how busy others kept the machine.
fn tell_reasons_and_noise(outcomes: &[Outcome]) {
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
    say("");
    reasons.iter().for_each(|reason| say(reason));
    let others = median(
        all().flat_map(|series| &series.samples).map(|sample| sample.others_cpu_seconds / sample.seconds),
    );
    say(&format!("other programs kept {others:.2} processors busy meanwhile (median)"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_have_names_of_their_own_and_none_allocates() {
        let ids: Vec<String> = cases().iter().map(Case::id).collect();
        let mut unique = ids.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(ids.len(), unique.len());
        assert_eq!(ids[0], "raw/buffered/c1/rand-read-4k-d32");
        assert!(!ids.iter().any(|id| id.starts_with("overlay") && id.contains("write")));
        assert!(!ids.iter().any(|id| id.contains("c4") && id.ends_with("-d1")));
    }
}
