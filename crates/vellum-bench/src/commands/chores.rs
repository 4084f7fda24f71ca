//! `vellum-bench chores`: how long the large operations on a disk take, and what waits behind them, beside
//! QEMU.
//!
//! ```text
//!   for each round     each program in turn, beginning with another one each time
//!     disk       create ► serve ► fill ► flush ► discard all ► flush ► fill again ► stop
//!     copy       a raw file into a new image: `vellum convert`, `qemu-img convert`
//!     full       an image without a free cluster, made a little larger ► serve ► first write, second write ► stop
//! ```
//!
//! Each figure is the time that the caller waits, and the server's processor time in it. Programs take turns,
//! so that both sides of a ratio were measured in the same minute. Images and their options are each
//! program's defaults, except for `journal=off`.

mod case;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Instant, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::{Desk, Lab};
use vellum_lab::guest::{Guest, Request};
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::{Cache, QemuNbd, Running, Server, Serving, Vellum};
use vellum_lab::subjects::{Base, Journal, Maker, NATIVE, Subject, qemu, vellum};

use crate::host::{Machine, cpu_seconds, cpu_seconds_of_ended};
use crate::images;
use crate::report::{median, short};
use case::{Figure, Samples};

/// Bytes of one request that fills a disk.
const PIECE: usize = 1 << 20;

/// Time filling, discarding and copying whole disks: Vellum and QEMU
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the disks that are filled, discarded and copied, in whole MiB, at most 3G
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = super::parse_size)]
    size: u64,
    /// Size of the full disk; each TiB takes 128 MiB of tables; 0 skips these cases
    #[arg(long, value_name = "SIZE", default_value = "1T", value_parser = super::parse_size)]
    full: u64,
    /// Number of rounds; each program has a turn in each
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Measure Vellum only
    #[arg(long)]
    skip_peers: bool,
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

/// The program that the others are compared with.
const QEMU: &str = "qemu qcow2";

const SUBJECTS: [Subject; 4] = [
    vellum("vellum qcow2", "qcow2", "", Base::Never, Journal::On),
    vellum("vellum qcow2 journal=off", "qcow2", "", Base::Never, Journal::Off),
    vellum("vellum zoned", NATIVE, "layout=zoned", Base::Never, Journal::Off),
    qemu(QEMU, "qcow2", "", Base::Never),
];

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    size: u64,
    full: u64,
    rounds: u32,
    figures: Vec<Row>,
}

/// One figure of one program.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    figure: Figure,
    subject: &'static str,
    rounds_ms: Vec<f64>,
    median_ms: f64,
    cpu_median_ms: f64,
    /// The median of the ratios of the rounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    times_qemu: Option<f64>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.size == 0 || !args.size.is_multiple_of(1 << 20) || args.size > 3 << 30 {
        return Err(Error::invalid("--size is in whole MiB, from 1M to 3G"));
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let table = Table::to(args.output);
    let machine = Machine::with(&lab.dir);
    table.say(&format!(
        "{} MiB; images on {}; Linux {}, {} processors; {} rounds, medians",
        args.size >> 20,
        machine.medium,
        machine.kernel,
        machine.processors,
        args.rounds
    ));
    lab.programs.iter().for_each(|program| table.say(program));
    let mut subjects = Vec::new();
    for subject in SUBJECTS.into_iter().filter(|subject| subject.maker == Maker::Vellum || !args.skip_peers) {
        match lab.refusal(&subject)? {
            Some(reason) => table.say(&format!("skipped: {}: {reason}", subject.name)),
            None => subjects.push(subject),
        }
    }
    let mut samples = vec![Samples::default(); subjects.len()];
    let source = lab.dir.join("source.raw");
    images::write_raw(&source, args.size).context(|| "can't write what is copied")?;
    images::prepare(&source, true).context(|| "can't read what is copied")?;
    for round in 0..args.rounds as usize {
        for turn in 0..subjects.len() {
            let index = (round + turn) % subjects.len();
            let (subject, samples) = (&subjects[index], &mut samples[index]);
            disk(&lab, subject, args.size, samples).context(|| subject.name)?;
            copy(&lab, subject, &source, samples).context(|| format!("{}, a copy", subject.name))?;
        }
    }
    drop(fs::remove_file(&source));
    if args.full > 0 && lab.no_qemu.is_none() && !args.skip_peers {
        full(&lab, &subjects, args, &mut samples).context(|| "a full disk")?;
    }
    let rows = rows(&subjects, &samples);
    case::lines(&rows).iter().for_each(|line| table.say(line));
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report {
            unix_seconds: now.as_secs(),
            machine,
            programs: lab.programs.clone(),
            size: args.size,
            full: args.full,
            rounds: args.rounds,
            figures: rows,
        });
    }
    drop(fs::remove_dir_all(&lab.dir));
    Ok(())
}

fn rows(subjects: &[Subject], samples: &[Samples]) -> Vec<Row> {
    let qemu = subjects.iter().position(|subject| subject.name == QEMU).map(|index| &samples[index]);
    let mut rows = Vec::new();
    for figure in Figure::ALL {
        for (subject, samples) in subjects.iter().zip(samples) {
            let mine = samples.of(figure);
            if mine.is_empty() {
                continue;
            }
            let theirs = qemu.map(|qemu| qemu.of(figure)).filter(|theirs| theirs.len() == mine.len());
            let ratio = |theirs: &[case::Sample]| {
                median(mine.iter().zip(theirs).map(|(mine, theirs)| mine.wall_ms / theirs.wall_ms))
            };
            rows.push(Row {
                figure,
                subject: subject.name,
                rounds_ms: mine.iter().map(|sample| sample.wall_ms).collect(),
                median_ms: median(mine.iter().map(|sample| sample.wall_ms)),
                cpu_median_ms: median(mine.iter().map(|sample| sample.cpu_ms)),
                times_qemu: theirs.filter(|_| subject.name != QEMU).map(|theirs| ratio(&theirs)),
            });
        }
    }
    rows
}

/// A server, of whichever program, that lets a guest's discards through.
fn serve(lab: &Lab, subject: &Subject, image: &Path, socket: &Path) -> Result<Running> {
    let serving = Serving { image, format: subject.format, cache: Cache::Buffered, connections: 1, socket };
    let server: &dyn Server = match subject.maker {
        Maker::Vellum => &lab.vellum,
        Maker::Qemu => &QemuNbd::VISIBLE,
    };
    Running::start(server, &serving)
}

/// Does something that a guest waits for.
fn timed(pid: u32, samples: &mut Samples, figure: Figure, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let cpu = cpu_seconds(pid)?;
    let begun = Instant::now();
    work().context(|| figure.title())?;
    let wall = begun.elapsed();
    samples.note(figure, wall, cpu_seconds(pid)? - cpu);
    Ok(())
}

fn disk(lab: &Lab, subject: &Subject, size: u64, samples: &mut Samples) -> Result<()> {
    let desk = Desk::new(lab.dir.join("disk"), subject.format)?;
    subject.make(lab.tools(), &desk.image, size, None)?;
    let server = serve(lab, subject, &desk.image, &desk.socket)?;
    let pid = server.pid();
    let mut guest = Guest::connect(server.socket())?;
    let fill = |guest: &mut Guest| {
        (0..size / PIECE as u64)
            .try_for_each(|piece| guest.ask(Request::Write { offset: piece * PIECE as u64, len: PIECE }))
    };
    timed(pid, samples, Figure::Fill, || fill(&mut guest))?;
    timed(pid, samples, Figure::FillFlush, || guest.ask(Request::Flush))?;
    let len = usize::try_from(size).map_err(|_| Error::invalid("--size is too large"))?;
    timed(pid, samples, Figure::Discard, || guest.ask(Request::Discard { offset: 0, len }))?;
    timed(pid, samples, Figure::DiscardFlush, || guest.ask(Request::Flush))?;
    timed(pid, samples, Figure::FillAgain, || fill(&mut guest))?;
    guest.leave()?;
    let (cpu, begun) = (cpu_seconds_of_ended()? + cpu_seconds(pid)?, Instant::now());
    server.stop()?;
    samples.note(Figure::Stop, begun.elapsed(), cpu_seconds_of_ended()? - cpu);
    drop(fs::remove_dir_all(&desk.dir));
    Ok(())
}

fn copy(lab: &Lab, subject: &Subject, source: &Path, samples: &mut Samples) -> Result<()> {
    let target = lab.dir.join("target");
    drop(fs::remove_file(&target));
    let mut convert = match subject.maker {
        Maker::Vellum => Command::new(&lab.vellum.path),
        Maker::Qemu => Command::new("qemu-img"),
    };
    convert.args(["convert", "-q", "-f", "raw", "-O", subject.format]);
    if subject.maker == Maker::Vellum && subject.format == "qcow2" {
        convert.args(["-o", if subject.has_journal() { "journal=on" } else { "journal=off" }]);
    }
    let (cpu, begun) = (cpu_seconds_of_ended()?, Instant::now());
    programs::run(convert.arg(source).arg(&target))?;
    samples.note(Figure::Copy, begun.elapsed(), cpu_seconds_of_ended()? - cpu);
    images::settle(&target)
}

/// QEMU fills the tables once; each program writes to a cluster that was not there yet, just opened.
fn full(lab: &Lab, subjects: &[Subject], args: &Args, samples: &mut [Samples]) -> Result<()> {
    let (image, socket) = (lab.dir.join("full.qcow2"), lab.dir.join("full.sock"));
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"]).arg(&image);
    programs::run(create.arg(args.full.to_string()))?;
    programs::run(Command::new("qemu-img").args(["resize", "-q", "-f", "qcow2"]).arg(&image).arg("+1G"))?;
    let of_qcow2: Vec<usize> = (0..subjects.len()).filter(|at| subjects[*at].format == "qcow2").collect();
    let mut place = args.full;
    for round in 0..args.rounds as usize {
        for turn in 0..of_qcow2.len() {
            let index = of_qcow2[(round + turn) % of_qcow2.len()];
            let subject = &subjects[index];
            if subject.maker == Maker::Vellum {
                let wish = if subject.has_journal() { "enable" } else { "disable" };
                programs::run(Command::new(&lab.vellum.path).args(["journal", wish]).arg(&image))?;
            }
            let server = serve(lab, subject, &image, &socket)?;
            let mut guest = Guest::connect(server.socket())?;
            for figure in [Figure::FullFirst, Figure::FullSecond] {
                let offset = place;
                place += 1 << 20;
                timed(server.pid(), &mut samples[index], figure, || {
                    guest.ask(Request::Write { offset, len: 4096 })
                })?;
            }
            guest.leave()?;
            server.stop()?;
        }
    }
    Ok(())
}
