//! `vellum-bench exports`: the same images by other ways than NBD, beside `qemu-storage-daemon`.
//!
//! ```text
//!   for each case      a way (a file by FUSE) × an image × what fio asks
//!     for each round     each program takes a turn, beginning with another one each time
//!       start the program on the image ► fio ► stop it
//! ```
//!
//! fio puts the load on, for both, as it does on any file: libaio, O_DIRECT. A program is told what its image is and nothing
//! else; both serve the same one, mapped or fresh, through the page cache of the host or past it.

mod load;
mod way;

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, ErrorKind, Result};

use super::{dir_or_beside_me, parse_size};
use crate::host::Machine;
use crate::images::{Image, Images, run as run_program};
use crate::load::Sample;
use crate::load::workload::{Operation, Order, Workload};
use crate::report::{Figures, Output, Series, Table, complain, lines, say_json};
use crate::server::{Cache, Vellum};
use way::{Program, Served, Serving, Way};

/// Serve images as files with Vellum and qemu-storage-daemon in turn, put load on them with fio, and compare
///
/// It takes root, as mounting does. Each case is told as it ends: IOPS, or the time an operation takes and its 99th percentile, and the CPU time
/// of the server per operation.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seconds that each turn lasts
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Turns of each program at each case
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Size of the mapped disks, in whole MiB, at least 16M
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    size: u64,
    /// Where images and files are made; beside this program when not given
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Only cases whose name contains TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Vellum alone
    #[arg(long)]
    skip_peers: bool,
    /// The vellum to measure, perhaps with more arguments for `serve`; several are compared
    #[arg(long, value_name = "[LABEL=]PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Vec<Vellum>,
    /// What goes to stdout: the table, or all samples as JSON (the table goes to stderr then)
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
    /// Name the cases and do nothing
    #[arg(long)]
    list: bool,
}

/// A disk nothing of which is mapped is so much larger than a mapped one: it should not become one.
const FRESH_TIMES: u64 = 32;

/// Which disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disk {
    Mapped(Image),
    /// A qcow2 image that is made for each turn.
    Fresh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Case {
    way: Way,
    cache: Cache,
    disk: Disk,
    workload: Workload,
}

impl Case {
    /// All of them, those of one group beside each other.
    fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for way in Way::ALL {
            for cache in [Cache::Buffered, Cache::Direct] {
                let disks = [
                    (Disk::Mapped(Image::Raw), Operation::Read),
                    (Disk::Mapped(Image::Qcow2), Operation::Read),
                    (Disk::Mapped(Image::Qcow2), Operation::Write),
                    (Disk::Fresh, Operation::Write),
                ];
                for (disk, operation) in disks {
                    for depth in [1, 32] {
                        let workload = Workload { operation, order: Order::Random, len: 4096, depth };
                        cases.push(Self { way, cache, disk, workload });
                    }
                }
            }
        }
        cases
    }

    fn group(&self) -> String {
        let cache = match self.cache {
            Cache::Buffered => "buffered",
            Cache::Direct => "direct",
        };
        format!("{}/{cache}", self.way.id())
    }

    fn id(&self) -> String {
        let disk = match self.disk {
            Disk::Mapped(image) => image.id(),
            Disk::Fresh => "fresh",
        };
        format!("{}/{disk}/{}", self.group(), self.workload.id())
    }

    fn title(&self) -> String {
        let what = match (self.disk, self.workload.operation) {
            (Disk::Mapped(Image::Raw), _) => "raw read",
            (Disk::Mapped(_), Operation::Read) => "read",
            (Disk::Mapped(_), Operation::Write) => "overwrite",
            (Disk::Fresh, _) => "allocate",
        };
        format!("{what} d{}", self.workload.depth)
    }

    fn figures(&self) -> Figures {
        if self.workload.is_about_latency() { Figures::Latency } else { Figures::Rate }
    }
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    size: u64,
    seconds: u32,
    programs: Vec<String>,
    cases: Vec<Outcome>,
}

#[derive(Serialize)]
struct Outcome {
    case: String,
    series: Vec<Series>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted = |case: &Case| args.only.is_empty() || args.only.iter().any(|text| case.id().contains(text));
    let cases: Vec<Case> = Case::all().into_iter().filter(wanted).collect();
    let table = Table::to(args.output);
    if args.list {
        cases.iter().for_each(|case| table.say(&case.id()));
        return Ok(());
    }
    if cases.is_empty() {
        return Err(Error::invalid("no case has such a name: see --list"));
    }
    if args.size < 16 << 20 || !args.size.is_multiple_of(1 << 20) {
        return Err(Error::invalid("--size is at least 16M, in whole MiB"));
    }
    let dir = dir_or_beside_me(args.dir.as_ref())?;
    let ours = if args.vellum.is_empty() { vec![Vellum::beside_me()?] } else { args.vellum.clone() };
    let programs = programs(args, &ours)?;
    let machine = Machine::with(&dir);
    table.say(&format!(
        "{} MiB disk on {}; Linux {}, {} processors; {} x {} s each, medians, ± half of the spread; load: fio, libaio, O_DIRECT, 4 KiB",
        args.size >> 20,
        machine.medium,
        machine.kernel,
        machine.processors,
        args.rounds,
        args.seconds,
    ));
    let mut versions = Vec::new();
    for program in &programs {
        versions.push(format!("{}: {}", program.name(), program.version()?));
    }
    versions.iter().for_each(|version| table.say(version));
    let images = Images::make(&dir, args.size, &ours[0].path)?;
    let mut outcomes: Vec<Outcome> = Vec::new();
    for group in cases.chunk_by(|a, b| a.group() == b.group()) {
        table.say("");
        table.say(&group[0].group());
        for case in group {
            let series = measure(args, &images, &programs, case, &ours[0])?;
            lines(&case.title(), case.figures(), &series).iter().for_each(|line| table.say(line));
            outcomes.push(Outcome { case: case.id(), series });
        }
    }
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report {
            unix_seconds: now.as_secs(),
            machine,
            size: args.size,
            seconds: args.seconds,
            programs: versions,
            cases: outcomes,
        });
    }
    Ok(())
}

/// The programs that are here, ours first.
fn programs(args: &Args, ours: &[Vellum]) -> Result<Vec<Program>> {
    let mut programs: Vec<Program> = ours.iter().cloned().map(Program::Vellum).collect();
    if !args.skip_peers {
        match Program::Qemu.version() {
            Ok(_) => programs.push(Program::Qemu),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                complain(&format!("skipped: {}", error.chain()))
            }
            Err(error) => return Err(error),
        }
    }
    Ok(programs)
}

/// All rounds of a case: the series of all programs.
fn measure(
    args: &Args,
    images: &Images,
    programs: &[Program],
    case: &Case,
    maker: &Vellum,
) -> Result<Vec<Series>> {
    let mut all: Vec<Series> = programs.iter().map(|program| Series::of(program.name())).collect();
    for round in 0..args.rounds as usize {
        for turn in 0..programs.len() {
            let index = (round + turn) % programs.len();
            let sample = take_turn(args, images, &programs[index], case, maker)
                .context(|| format!("{} at {}", programs[index].name(), case.id()))?;
            all[index].samples.push(sample);
        }
    }
    Ok(all)
}

fn take_turn(args: &Args, images: &Images, program: &Program, case: &Case, maker: &Vellum) -> Result<Sample> {
    let (image, format, size) = match case.disk {
        Disk::Mapped(image) => {
            images.prepare(image, case.cache == Cache::Buffered)?;
            (images.path(image), image.format(), args.size)
        }
        Disk::Fresh => {
            let (path, size) = (images.dir().join("fresh.qcow2"), args.size * FRESH_TIMES);
            let mut create = std::process::Command::new(&maker.path);
            create.args(["create", "-q", "-f", "qcow2"]).arg(&path).arg(size.to_string());
            run_program(&mut create)?;
            (path, "qcow2", size)
        }
    };
    let at = images.dir().join("served");
    let serving = Serving { way: case.way, image: &image, format, cache: case.cache, at: &at, size };
    let served = Served::start(program, &serving)?;
    let window = Duration::from_secs(u64::from(args.seconds));
    let sample = load::run(served.pid(), &at, &case.workload, window)?;
    served.stop()?;
    Ok(sample)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_a_name_of_its_own() {
        let mut names: Vec<String> = Case::all().iter().map(Case::id).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!((count, names.len()), (16, 16));
        assert!(names.contains(&"fuse/buffered/fresh/rand-write-4k-d32".to_owned()));
    }
}
