//! `vellum-bench growing`: how long a synchronous write takes on a disk that grows.
//!
//! ```text
//!   all are ready at once: a server on a new image each, and plain files
//!   for each round    each one in turn, with another one first each time: N writes behind the last, a flush
//! ```
//!
//! Turns are short, so that other load on the machine affects all of them, and a ratio is the median of those
//! of the rounds. Servers are reached as in normal use, by the same client over a Unix socket. A plain file
//! is written by this program itself, with `pwrite` and `fdatasync`; the same over NBD is the raw image,
//! which is the fair comparison for a server.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Instant, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::{Desk, Lab};
use vellum_lab::guest::{Guest, Request, filler};
use vellum_lab::report::{Output, Table, say_json, tell_skipped};
use vellum_lab::server::{Cache, QemuNbd, Running, Server, Serving, Vellum};
use vellum_lab::subjects::{Base, Journal, Maker, Subject, qemu, vellum};

use crate::host::Machine;
use crate::load::latency::Latency;
use crate::report::{median, short};

/// Time a write with its flush on growing images: Vellum, QEMU and plain files
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of a write; may be given several times [default: 64K and 4K]
    #[arg(long, value_name = "SIZE", value_parser = super::parse_size)]
    write: Vec<u64>,
    /// Number of rounds; each program has a turn in each
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Writes per turn, each followed by a flush
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    operations: u32,
    /// Directory for images and sockets. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Measure Vellum and plain files only
    #[arg(long)]
    skip_peers: bool,
    /// vellum program to measure. Default: the one beside this program
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
}

/// A participant: an image with a server, or a file.
#[derive(Clone, Copy)]
enum Who {
    Served(Subject),
    /// This program, with `pwrite` and `fdatasync`; with all zeros written before, or not.
    File {
        is_zeroed: bool,
    },
    /// The same file of zeros, served by Vellum.
    ServedZeros(Subject),
}

/// What others are compared with, by name.
const QEMU: &str = "qemu qcow2";
const APPEND: &str = "file, growing: pwrite";
const NBD: &str = "vellum raw";

const WHO: [(&str, Who); 10] = [
    // One of the two is the default of a new image; the other one is given explicitly.
    ("vellum qcow2 journaled, prealloc=off", journaled("prealloc=off")),
    ("vellum qcow2 journaled, prealloc=adaptive", journaled("prealloc=adaptive")),
    ("vellum qcow2 journaled", journaled("")),
    ("vellum qcow2 plain", Who::Served(vellum("", "qcow2", "", Base::Never, Journal::Off))),
    (QEMU, Who::Served(qemu(QEMU, "qcow2", "", Base::Never))),
    (NBD, Who::Served(vellum(NBD, "raw", "", Base::Never, Journal::Off))),
    ("qemu raw", Who::Served(qemu("qemu raw", "raw", "", Base::Never))),
    (APPEND, Who::File { is_zeroed: false }),
    ("file of zeros: pwrite", Who::File { is_zeroed: true }),
    ("file of zeros: vellum raw", Who::ServedZeros(vellum("", "raw", "", Base::Never, Journal::Off))),
];

const fn journaled(options: &'static str) -> Who {
    Who::Served(vellum("", "qcow2", options, Base::Never, Journal::On))
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    rounds: u32,
    operations: u32,
    writes: Vec<Outcome>,
}

/// All at one size of writes.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Outcome {
    write_bytes: u64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    subject: &'static str,
    #[serde(skip)]
    latency: Latency,
    /// The median of each round.
    rounds_us: Vec<f64>,
    median_us: f64,
    p99_us: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped: Option<String>,
}

/// One that is ready for its turn.
enum Ready {
    Served { running: Running, guest: Guest },
    File { file: File, payload: Vec<u8> },
}

impl Ready {
    /// A write there and a flush.
    fn write(&mut self, offset: u64, len: usize) -> Result<()> {
        match self {
            Self::Served { guest, .. } => {
                guest.ask(Request::Write { offset, len })?;
                guest.ask(Request::Flush)
            }
            Self::File { file, payload } => {
                let write = || file.write_all_at(&payload[..len], offset).and_then(|()| file.sync_data());
                write().context(|| "can't write the file")
            }
        }
    }

    fn end(self) -> Result<()> {
        match self {
            Self::Served { running, guest } => guest.leave().and_then(|()| running.stop()),
            Self::File { .. } => Ok(()),
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let sizes = if args.write.is_empty() { vec![64 << 10, 4 << 10] } else { args.write.clone() };
    if sizes.iter().any(|size| *size == 0 || !size.is_multiple_of(512) || *size > 32 << 20) {
        return Err(Error::invalid("--write is a multiple of 512 bytes, at most 32M"));
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let table = Table::to(args.output);
    let machine = Machine::with(&lab.dir);
    table.say(&format!(
        "{} rounds of {} writes with a flush each; images on {}; Linux {}, {} processors",
        args.rounds, args.operations, machine.medium, machine.kernel, machine.processors
    ));
    lab.programs.iter().for_each(|program| table.say(program));
    let mut outcomes = Vec::new();
    for size in sizes {
        let outcome = measure(args, &lab, size)?;
        tell(&outcome, table);
        outcomes.push(outcome);
    }
    let rows = outcomes.iter().flat_map(|outcome| &outcome.rows);
    tell_skipped(rows.filter_map(|row| Some((row.subject, row.skipped.as_deref()?))), table);
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report {
            unix_seconds: now.as_secs(),
            machine,
            programs: lab.programs.clone(),
            rounds: args.rounds,
            operations: args.operations,
            writes: outcomes,
        });
    }
    Ok(())
}

fn measure(args: &Args, lab: &Lab, write_bytes: u64) -> Result<Outcome> {
    let len = usize::try_from(write_bytes).map_err(|_| Error::invalid("--write is too large"))?;
    // One more round than counts: the first one.
    let size =
        (u64::from(args.rounds + 1) * u64::from(args.operations) * write_bytes).next_multiple_of(1 << 20);
    let mut rows = Vec::new();
    let mut ready = Vec::new();
    for (index, (name, who)) in WHO.iter().enumerate() {
        let skipped = match who {
            Who::Served(subject) if subject.maker == Maker::Qemu && args.skip_peers => continue,
            Who::Served(subject) => lab.refusal(subject)?,
            _ => None,
        };
        if skipped.is_none() {
            let one = prepare(lab, *who, index, size, len).context(|| format!("can't prepare {name}"))?;
            ready.push((rows.len(), one));
        }
        rows.push(Row {
            subject: name,
            latency: Latency::default(),
            rounds_us: Vec::new(),
            median_us: 0.0,
            p99_us: 0.0,
            skipped,
        });
    }
    let count = ready.len();
    for round in 0..=args.rounds {
        for turn in 0..count {
            let (row, one) = &mut ready[(round as usize + turn) % count];
            let mut latency = Latency::default();
            for operation in 0..args.operations {
                let index = u64::from(round) * u64::from(args.operations) + u64::from(operation);
                let begun = Instant::now();
                one.write(index * write_bytes, len).context(|| rows[*row].subject)?;
                latency.note(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
            }
            if round > 0 {
                rows[*row].rounds_us.push(latency.percentile(50.0));
                rows[*row].latency.add(&latency);
            }
        }
    }
    ready.into_iter().try_for_each(|(_, one)| one.end())?;
    for row in &mut rows {
        (row.median_us, row.p99_us) = (row.latency.percentile(50.0), row.latency.percentile(99.0));
    }
    Ok(Outcome { write_bytes, rows })
}

/// Makes its image or file, of at most `size` bytes, and lets the server begin.
fn prepare(lab: &Lab, who: Who, index: usize, size: u64, len: usize) -> Result<Ready> {
    let subject = match who {
        Who::Served(subject) | Who::ServedZeros(subject) => Some(subject),
        Who::File { .. } => None,
    };
    let desk = Desk::new(lab.dir.join(index.to_string()), subject.map_or("raw", |subject| subject.format))?;
    if let Who::Served(subject) = who {
        subject.make(lab.tools(), &desk.image, size, None)?;
    } else {
        let mut file = File::create(&desk.image).context(|| "can't make the file")?;
        let is_zeroed = !matches!(who, Who::File { is_zeroed: false });
        let zeros = vec![0; 1 << 20];
        let fill = || {
            for _ in 0..if is_zeroed { size >> 20 } else { 0 } {
                file.write_all(&zeros)?;
            }
            file.sync_all()
        };
        let mut fill = fill;
        fill().context(|| "can't write the file")?;
    }
    let Some(subject) = subject else {
        let file = File::options().write(true).open(&desk.image).context(|| "can't open the file")?;
        return Ok(Ready::File { file, payload: filler(len) });
    };
    let server: &dyn Server = match subject.maker {
        Maker::Vellum => &lab.vellum,
        Maker::Qemu => &QemuNbd::FAST,
    };
    let serving = Serving {
        image: &desk.image,
        format: subject.format,
        cache: Cache::Buffered,
        connections: 1,
        socket: &desk.socket,
    };
    let running = Running::start(server, &serving)?;
    let guest = Guest::connect(running.socket())?;
    Ok(Ready::Served { running, guest })
}

/// How many times another one's time this is: the median over the rounds.
fn ratio(row: &Row, rows: &[Row], to: &str) -> Option<f64> {
    let other = rows.iter().find(|other| other.subject == to)?;
    let ratios: Vec<f64> =
        row.rounds_us.iter().zip(&other.rounds_us).map(|(mine, theirs)| mine / theirs).collect();
    (!ratios.is_empty()).then(|| median(ratios))
}

fn tell(outcome: &Outcome, table: Table) {
    const NAME: usize = 42;
    table.say("");
    table.say(&format!(
        "write of {} KiB behind the last one, and a flush",
        outcome.write_bytes as f64 / 1024.0
    ));
    table.say(&format!(
        "  {:<NAME$} {:>10} {:>10}   {:>8} {:>8} {:>8}",
        "", "median µs", "p99 µs", "x qemu", "x append", "x nbd"
    ));
    for row in &outcome.rows {
        if row.skipped.is_some() {
            table.say(&format!("  {:<NAME$} n/a", row.subject));
            continue;
        }
        let [qemu, append, nbd] = [QEMU, APPEND, NBD].map(|to| {
            ratio(row, &outcome.rows, to).map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))
        });
        table.say(&format!(
            "  {:<NAME$} {:>10} {:>10}   {qemu:>8} {append:>8} {nbd:>8}",
            row.subject,
            short(row.median_us),
            short(row.p99_us)
        ));
    }
    table.say(&format!("  x: times the time of \"{QEMU}\", \"{APPEND}\" and \"{NBD}\" in the same round"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_the_median_of_those_of_the_rounds() {
        let row = |subject, rounds: &[f64]| Row {
            subject,
            latency: Latency::default(),
            rounds_us: rounds.to_vec(),
            median_us: 0.0,
            p99_us: 0.0,
            skipped: None,
        };
        let rows = [row("a", &[10.0, 40.0, 9.0]), row(QEMU, &[20.0, 80.0, 30.0]), row(NBD, &[])];
        assert_eq!(ratio(&rows[0], &rows, QEMU), Some(0.5));
        assert_eq!(ratio(&rows[0], &rows, NBD), None);
        assert_eq!(ratio(&rows[0], &rows, APPEND), None);
    }

    #[test]
    fn what_others_are_compared_with_takes_part() {
        for name in [QEMU, APPEND, NBD] {
            assert_eq!(WHO.iter().filter(|(other, _)| *other == name).count(), 1, "{name}");
        }
    }
}
