//! `vellum-bench writers`: how fast guests write to the native format, beside raw and QEMU's qcow2.
//!
//! ```text
//!   for each case     a server on a new image each; all are ready at once
//!     for each round  each one in turn, beginning with another one each time: its guests write, and the clock stops at the last flush
//! ```
//!
//! A case is: where (behind the last write, apart, over it), 4 or 64 KiB, each write flushed or all of a
//! turn, 1 to 16 guests, and whether the bytes are compressible. A guest waits for each answer, and has a
//! part of the disk for itself. Turns are short, so that other load on the machine affects all of them, and a
//! ratio is the median of those of the rounds.

mod cases;
mod pack;
mod tell;

use std::path::PathBuf;
use std::thread;
use std::time::{Instant, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Result};
use vellum_lab::cost::lab::{Desk, Lab};
use vellum_lab::guest::{Bytes, Guest, Request};
use vellum_lab::report::{Output, Table, say_json, tell_skipped};
use vellum_lab::server::{Cache, QemuNbd, Running, Server, Serving, Vellum};
use vellum_lab::subjects::{Maker, Subject};

use self::cases::{Case, MORE_SUBJECTS, Mix, SUBJECTS, cases, is_usual};
use self::pack::PackCost;
use crate::host::{Machine, cpu_seconds};
use crate::report::median;

/// Time guests that write, with and without flushes: vellum, raw and qcow2 images
///
/// By default only writes that allocate, by 1, 4 and 16 guests, are measured, which takes several minutes on
/// a busy drive. The cost of LZ4 for new units is measured as well, and shown as a share of a CPU at the
/// measured rate.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of rounds; one more is run first as a warm-up
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Run only the cases whose names contain TEXT; may be given several times
    ///
    /// This also selects cases that run only with --all.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Run all cases with all formats
    #[arg(long)]
    all: bool,
    /// Bypass the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
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
    programs: Vec<String>,
    rounds: u32,
    lz4: PackCost,
    cases: Vec<Outcome>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Outcome {
    case: String,
    /// Of a processor, at the rate of the zoned image: what LZ4 takes.
    lz4_percent: Option<f64>,
    rows: Vec<Row>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    subject: &'static str,
    /// Writes a second, of each round.
    rates: Vec<f64>,
    /// What the server took of the processors for one, in microseconds, over all rounds: a round is shorter
    /// than a tick of that clock.
    cpu_us: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let is_wanted = |case: &Case| match args.only.is_empty() {
        true => args.all || is_usual(case),
        false => args.only.iter().any(|text| case.id().contains(text.as_str())),
    };
    let cases: Vec<Case> = cases().into_iter().filter(is_wanted).collect();
    let table = Table::to(args.output);
    if args.list {
        cases.iter().for_each(|case| table.say(&case.id()));
        return Ok(());
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let machine = Machine::with(&lab.dir);
    table.say(&format!(
        "{} rounds; images on {}, {}; Linux {}, {} processors",
        args.rounds,
        machine.medium,
        if args.direct { "O_DIRECT" } else { "through the page cache" },
        machine.kernel,
        machine.processors
    ));
    lab.programs.iter().for_each(|program| table.say(program));
    let lz4 = PackCost::measure()?;
    table.say(&lz4.line());
    tell::head(table);
    let mut outcomes = Vec::new();
    for case in cases {
        let mut outcome = measure(args, &lab, case).context(|| case.id())?;
        outcome.lz4_percent = lz4_percent(&lz4, case, &outcome.rows);
        tell::outcome(&outcome, table);
        outcomes.push(outcome);
    }
    let rows = outcomes.iter().flat_map(|outcome| &outcome.rows);
    tell_skipped(rows.filter_map(|row| Some((row.subject, row.skipped.as_deref()?))), table);
    tell::sum_up(&outcomes, table);
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (unix_seconds, programs, rounds) = (now.as_secs(), lab.programs.clone(), args.rounds);
        say_json(&Report { unix_seconds, machine, programs, rounds, lz4, cases: outcomes });
    }
    Ok(())
}

/// New units a second, times what LZ4 takes for one.
fn lz4_percent(lz4: &PackCost, case: Case, rows: &[Row]) -> Option<f64> {
    let zoned = rows.iter().find(|row| row.subject == cases::ZONED && !row.rates.is_empty())?;
    let units = median(zoned.rates.iter().copied()) * case.units_per_write();
    Some(units * lz4.of_unit(case.mix, case.len) / 1e4)
}

/// One that is ready for its turn.
struct Ready {
    row: usize,
    running: Running,
    guests: Vec<Guest>,
}

fn measure(args: &Args, lab: &Lab, case: Case) -> Result<Outcome> {
    let turns = u64::from(args.rounds + 1);
    let per_turn = case.operations() as u64 * case.step();
    // Mapped places are the same in each turn.
    let part = if case.is_mapped() { per_turn } else { per_turn * turns };
    let size = (part * case.guests as u64).next_multiple_of(1 << 20);
    let (mut rows, mut ready) = (Vec::new(), Vec::new());
    let more = if args.all { &MORE_SUBJECTS[..] } else { &[] };
    for (index, subject) in SUBJECTS.iter().chain(more).enumerate() {
        if subject.maker == Maker::Qemu && args.skip_peers {
            continue;
        }
        let skipped = lab.refusal(subject)?;
        if skipped.is_none() {
            let row = rows.len();
            let one = prepare(args, lab, case, subject, index, size).context(|| subject.name)?;
            ready.push(Ready { row, running: one.0, guests: one.1 });
        }
        rows.push(Row { subject: subject.name, rates: Vec::new(), cpu_us: 0.0, skipped });
    }
    let count = ready.len();
    for round in 0..turns {
        for turn in 0..count {
            let one = &mut ready[(usize::try_from(round).expect("few") + turn) % count];
            let within = if case.is_mapped() { 0 } else { round * per_turn };
            let pid = one.running.pid();
            let (begun, cpu) = (Instant::now(), cpu_seconds(pid)?);
            thread::scope(|scope| {
                let spawn = |(index, guest): (usize, _)| {
                    scope.spawn(move || turn_of(guest, case, index as u64 * part + within))
                };
                let guests: Vec<_> = one.guests.iter_mut().enumerate().map(spawn).collect();
                guests.into_iter().try_for_each(|guest| guest.join().expect("guests do not panic"))
            })?;
            let (seconds, cpu) = (begun.elapsed().as_secs_f64(), cpu_seconds(pid)? - cpu);
            let writes = (case.operations() * case.guests) as f64;
            if round > 0 {
                let row = &mut rows[one.row];
                row.rates.push(writes / seconds);
                row.cpu_us += cpu * 1e6 / writes / f64::from(args.rounds);
            }
        }
    }
    for Ready { running, guests, .. } in ready {
        guests.into_iter().try_for_each(Guest::leave)?;
        running.stop()?;
    }
    Ok(Outcome { case: case.id(), lz4_percent: None, rows })
}

/// What a guest does in a turn: what it wrote is durable at the end.
fn turn_of(guest: &mut Guest, case: Case, from: u64) -> Result<()> {
    for operation in 0..case.operations() {
        let offset = from + operation as u64 * case.step();
        guest.write_some(case.mix.bytes(offset), offset, case.len)?;
        if case.is_flushed {
            guest.ask(Request::Flush)?;
        }
    }
    if case.is_flushed { Ok(()) } else { guest.ask(Request::Flush) }
}

fn prepare(
    args: &Args,
    lab: &Lab,
    case: Case,
    subject: &Subject,
    index: usize,
    size: u64,
) -> Result<(Running, Vec<Guest>)> {
    let desk = Desk::new(lab.dir.join(index.to_string()), subject.format)?;
    subject.make(lab.tools(), &desk.image, size, None)?;
    let server: &dyn Server = match subject.maker {
        Maker::Vellum => &lab.vellum,
        Maker::Qemu => &QemuNbd::FAST,
    };
    let serving = Serving {
        image: &desk.image,
        format: subject.format,
        cache: if args.direct { Cache::Direct } else { Cache::Buffered },
        connections: case.guests,
        socket: &desk.socket,
    };
    let running = Running::start(server, &serving)?;
    let bytes = if case.mix == Mix::Same { Bytes::Same } else { Bytes::Noise };
    let connect = |_| Guest::connect_writing(running.socket(), bytes);
    let mut guests = (0..case.guests).map(connect).collect::<Result<Vec<_>>>()?;
    if case.is_mapped() {
        let len = 1 << 20;
        for offset in (0..size).step_by(len) {
            guests[0].ask(Request::Write { offset, len })?;
        }
        guests[0].ask(Request::Flush)?;
    }
    Ok((running, guests))
}
