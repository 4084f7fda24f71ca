//! `vellum-bench slow-flush`: whether reads wait when the drive takes long to flush.
//!
//! ```text
//!   mapped part │ new clusters ────────►
//!   reader: 4 KiB anywhere here          writer: 4 KiB to the next cluster, a flush, again
//! ```
//!
//! Reads are due at fixed times, and their latency counts from then: a read that is late because the one
//! before it waited has waited too.
//!
//! `strace` delays each `fdatasync` and `fsync` of the server before the kernel sees it
//! (`inject=…:delay_enter`). It cannot see a ring, so both programs use threads: `qemu-nbd --aio=threads`,
//! `vellum serve --io threads`. A run without delay is traced too, so that the cost of tracing is in all
//! figures.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, Random, Result};
use vellum_lab::cost::lab::{Desk, Lab};
use vellum_lab::cost::strace;
use vellum_lab::guest::{Guest, Request};
use vellum_lab::report::{Output, Table, say_json, tell_skipped};
use vellum_lab::server::{Cache, QemuNbd, Running, Server, Serving, Vellum};
use vellum_lab::subjects::{Base, Journal, Maker, Subject, qemu, vellum};

use crate::host::Machine;
use crate::load::latency::Latency;
use crate::report::short;

/// The mapped part, which is read.
const MAPPED_BYTES: u64 = 64 << 20;
const CLUSTER_BYTES: u64 = 64 << 10;
const READ_BYTES: usize = 4096;
/// When the next one is due after a read.
const READ_EVERY: Duration = Duration::from_millis(5);
const DISK_BYTES: u64 = 16 << 30;

const SUBJECTS: [Subject; 4] = [
    vellum("vellum raw", "raw", "", Base::Never, Journal::Off),
    vellum("vellum qcow2 plain", "qcow2", "", Base::Never, Journal::Off),
    vellum("vellum qcow2 journaled", "qcow2", "", Base::Never, Journal::On),
    qemu("qemu qcow2", "qcow2", "", Base::Never),
];

/// Time reads of allocated clusters during writes whose host flushes are slow
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many milliseconds each flush of the host is delayed
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 500)]
    delay: u64,
    /// Seconds of each measurement
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    seconds: f64,
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
    delay_ms: u64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    subject: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    seen: Option<Seen>,
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped: Option<String>,
}

/// Reads alone, beside a writer, and beside a writer whose flushes take long.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Seen {
    alone: Reads,
    beside_writer: Reads,
    beside_slow_writer: Reads,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Reads {
    reads: u64,
    median_us: f64,
    p99_us: f64,
    max_us: f64,
    /// Flushes of the writer that were answered meanwhile.
    guest_flushes: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let span = Duration::try_from_secs_f64(args.seconds)
        .map_err(|_| Error::invalid(format!("{} seconds cannot be waited for", args.seconds)))?;
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let table = Table::to(args.output);
    let machine = Machine::with(&lab.dir);
    table.say(&format!(
        "a read of {} KiB each {} ms for {} s, fdatasync held for {} ms; images on {}; Linux {}, {} processors",
        READ_BYTES >> 10,
        READ_EVERY.as_millis(),
        args.seconds,
        args.delay,
        machine.medium,
        machine.kernel,
        machine.processors
    ));
    lab.programs.iter().for_each(|program| table.say(program));
    head().iter().for_each(|line| table.say(line));
    let mut rows = Vec::new();
    for subject in SUBJECTS.iter().filter(|subject| subject.maker == Maker::Vellum || !args.skip_peers) {
        let skipped = lab.refusal(subject)?.or_else(|| lab.blind.clone());
        let seen = match skipped {
            None => Some(look(&lab, subject, args.delay, span).context(|| subject.name)?),
            Some(_) => None,
        };
        let row = Row { subject: subject.name, seen, skipped };
        lines(&row).iter().for_each(|line| table.say(line));
        rows.push(row);
    }
    tell_skipped(rows.iter().filter_map(|row| Some((row.subject, row.skipped.as_deref()?))), table);
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let programs = lab.programs.clone();
        say_json(&Report { unix_seconds: now.as_secs(), machine, programs, delay_ms: args.delay, rows });
    }
    Ok(())
}

/// The three figures of one format.
fn look(lab: &Lab, subject: &Subject, delay_ms: u64, span: Duration) -> Result<Seen> {
    let desk = Desk::new(lab.dir.join("slow"), subject.format)?;
    subject.make(lab.tools(), &desk.image, DISK_BYTES, None)?;
    let mut ours = lab.vellum.clone();
    ours.arguments.extend(["--io".into(), "threads".into()]);
    let server: &dyn Server = match subject.maker {
        Maker::Vellum => &ours,
        Maker::Qemu => &QemuNbd::VISIBLE,
    };
    let serving = Serving {
        image: &desk.image,
        format: subject.format,
        cache: Cache::Buffered,
        connections: 2,
        socket: &desk.socket,
    };
    let plain = server.command(&serving)?;
    let start = |command: Command| Running::start_command(command, &serving);
    let running = start(strace::held(&plain, Duration::ZERO, &desk.trace))?;
    let mut guest = Guest::connect(running.socket())?;
    let len = usize::try_from(CLUSTER_BYTES).expect("small");
    for offset in (0..MAPPED_BYTES).step_by(len) {
        guest.ask(Request::Write { offset, len })?;
    }
    guest.ask(Request::Flush)?;
    guest.leave()?;
    let mut next = MAPPED_BYTES;
    let alone = read(&running, None, span)?;
    let beside_writer = read(&running, Some(&mut next), span)?;
    running.stop()?;
    let running = start(strace::held(&plain, Duration::from_millis(delay_ms), &desk.trace))?;
    let beside_slow_writer = read(&running, Some(&mut next), span)?;
    running.stop()?;
    Ok(Seen { alone, beside_writer, beside_slow_writer })
}

/// Reads for this long; with `write_from`, beside a writer that continues from there.
fn read(running: &Running, write_from: Option<&mut u64>, span: Duration) -> Result<Reads> {
    let (is_over, flushes) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut reader = Guest::connect(running.socket())?;
    let mut random = Random::from_seed(1);
    let mut latency = Latency::default();
    let mut writing = write_from.map(|next| Guest::connect(running.socket()).map(|guest| (guest, next)));
    let writing = writing.take().transpose()?;
    let mut reads = 0;
    thread::scope(|scope| {
        let writer = writing.map(|(mut guest, next)| {
            let (is_over, flushes) = (&is_over, &flushes);
            scope.spawn(move || {
                loop {
                    guest.ask(Request::Write { offset: *next, len: READ_BYTES })?;
                    guest.ask(Request::Flush)?;
                    *next += CLUSTER_BYTES;
                    flushes.fetch_add(1, Ordering::Relaxed);
                    if is_over.load(Ordering::Relaxed) {
                        return guest.leave();
                    }
                }
            })
        });
        let begun = Instant::now();
        let mut read_all = || {
            for index in 0.. {
                let due = begun + READ_EVERY * index;
                if due >= begun + span {
                    break;
                }
                thread::sleep(due.saturating_duration_since(Instant::now()));
                let block = random.below(MAPPED_BYTES / READ_BYTES as u64);
                reader.ask(Request::Read { offset: block * READ_BYTES as u64, len: READ_BYTES })?;
                latency.note(u64::try_from(due.elapsed().as_nanos()).unwrap_or(u64::MAX));
                reads += 1;
            }
            Ok(())
        };
        let done = read_all();
        is_over.store(true, Ordering::Relaxed);
        let written = writer.map_or(Ok(()), |writer| writer.join().expect("a writer does not panic"));
        done.and(written)
    })?;
    reader.leave()?;
    Ok(Reads {
        reads,
        median_us: latency.percentile(50.0),
        p99_us: latency.percentile(99.0),
        max_us: latency.percentile(100.0),
        guest_flushes: flushes.into_inner(),
    })
}

fn head() -> [String; 2] {
    [
        String::new(),
        format!(
            "  {:<24} {:<32} {:>8} {:>10} {:>10} {:>10} {:>8}",
            "", "reads of mapped clusters", "reads", "median µs", "p99 µs", "max µs", "flushes"
        ),
    ]
}

fn lines(row: &Row) -> Vec<String> {
    let Some(seen) = &row.seen else {
        return vec![format!("  {:<24} n/a", row.subject)];
    };
    let all = [
        ("alone", &seen.alone),
        ("beside writes and flushes", &seen.beside_writer),
        ("the same, flushes held", &seen.beside_slow_writer),
    ];
    let line = |(index, (when, reads)): (usize, (&str, &Reads))| {
        format!(
            "  {:<24} {when:<32} {:>8} {:>10} {:>10} {:>10} {:>8}",
            if index == 0 { row.subject } else { "" },
            reads.reads,
            short(reads.median_us),
            short(reads.p99_us),
            short(reads.max_us),
            reads.guest_flushes
        )
    };
    all.into_iter().enumerate().map(line).collect()
}
