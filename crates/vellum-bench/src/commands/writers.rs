//! `vellum-bench writers`: how fast guests write to the native format, beside raw and QEMU's qcow2.
//!
//! ```text
//!   for each case     a server on a new image each; all are ready at once
//!     for each round  each one in turn, beginning with another one each time: its guests write, and the clock stops at the last flush
//! ```
//!
//! A case is: new places or mapped ones, 4 or 64 KiB, each write flushed or all of a turn, 1 to 8 guests. A guest waits for each
//! answer, and has a part of the disk for itself. Turns are short, so that what else the machine does is in all of them, and a
//! ratio is the median of those of the rounds.

use std::path::PathBuf;
use std::thread;
use std::time::{Instant, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Result};

use crate::cost::lab::{Desk, Lab};
use crate::host::{Machine, cpu_seconds};
use crate::load::guest::{Bytes, Guest, Request};
use crate::report::{Output, Table, median, say_json, short, tell_skipped};
use crate::server::{Cache, QemuNbd, Running, Server, Serving, Vellum};
use crate::subjects::{Base, Journal, Maker, NATIVE, Subject, qemu, vellum};

/// Time guests that write, flushed or not, to new and to mapped places: the native format, raw and QEMU's qcow2, in turns
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Turns of each; one more comes first and does not count
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only cases whose name contains TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// What guests write: noise, or one byte again and again, which packs
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = Bytes::Noise)]
    bytes: Bytes,
    /// Past the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// Where images and sockets are made; beside this program when not given
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Vellum alone
    #[arg(long)]
    skip_peers: bool,
    /// The vellum to look at
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
    /// What goes to stdout: the table, or all figures as JSON (the table goes to stderr then)
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
    /// Name the cases and do nothing
    #[arg(long)]
    list: bool,
}

/// What others are compared with, by name.
const RAW: &str = "vellum raw";
const QEMU: &str = "qemu qcow2";
const LINEAR: &str = "vellum linear";

const SUBJECTS: [Subject; 8] = [
    vellum(RAW, "raw", "", Base::Never, Journal::Off),
    vellum(LINEAR, NATIVE, "layout=linear", Base::Never, Journal::Off),
    vellum("vellum table", NATIVE, "layout=table", Base::Never, Journal::Off),
    vellum("vellum zoned", NATIVE, "layout=zoned", Base::Never, Journal::Off),
    vellum("vellum zoned embed=off", NATIVE, "layout=zoned,embed=off", Base::Never, Journal::Off),
    vellum("vellum qcow2 journaled", "qcow2", "", Base::Never, Journal::On),
    qemu("qemu raw", "raw", "", Base::Never),
    qemu(QEMU, "qcow2", "", Base::Never),
];

/// What guests do in a turn.
#[derive(Debug, Clone, Copy)]
struct Case {
    /// Places were written before, all of them.
    is_mapped: bool,
    /// Each write is flushed, not only the last one.
    is_flushed: bool,
    len: usize,
    guests: usize,
}

impl Case {
    fn id(&self) -> String {
        let what = if self.is_mapped { "overwrite" } else { "new" };
        let how = if self.is_flushed { "sync" } else { "async" };
        format!("{what}-{}k-{how}-{}", self.len >> 10, self.guests)
    }

    /// Writes of each guest in a turn: some hundredths of a second.
    fn operations(&self) -> usize {
        let all = match (self.is_flushed, self.len) {
            (true, _) => 64,
            (false, 4096) => 2048,
            (false, _) => 512,
        };
        (all / self.guests).max(16)
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for is_mapped in [false, true] {
        for len in [4 << 10, 64 << 10] {
            for is_flushed in [true, false] {
                let of = |guests| Case { is_mapped, is_flushed, len, guests };
                cases.extend([1, 2, 4, 8].map(of));
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
    programs: Vec<String>,
    rounds: u32,
    bytes: Bytes,
    cases: Vec<Outcome>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Outcome {
    case: String,
    rows: Vec<Row>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    subject: &'static str,
    /// Writes a second, of each round.
    rates: Vec<f64>,
    /// What the server took of the processors for one, in microseconds, over all rounds: a round is shorter than a tick of that clock.
    cpu_us: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted =
        |case: &Case| args.only.is_empty() || args.only.iter().any(|text| case.id().contains(text.as_str()));
    let cases: Vec<Case> = cases().into_iter().filter(wanted).collect();
    let table = Table::to(args.output);
    if args.list {
        cases.iter().for_each(|case| table.say(&case.id()));
        return Ok(());
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let machine = Machine::with(&lab.dir);
    table.say(&format!(
        "{} rounds; guests write {}; images on {}, {}; Linux {}, {} processors",
        args.rounds,
        args.bytes.name(),
        machine.medium,
        if args.direct { "O_DIRECT" } else { "through the page cache" },
        machine.kernel,
        machine.processors
    ));
    lab.programs.iter().for_each(|program| table.say(program));
    table.say("writes a second (median), CPU time of the server for one; times raw and times QEMU's qcow2 (median of the rounds, ± half of their spread)");
    let mut outcomes = Vec::new();
    for case in cases {
        let outcome = measure(args, &lab, case).context(|| case.id())?;
        tell(&outcome, table);
        outcomes.push(outcome);
    }
    let rows = outcomes.iter().flat_map(|outcome| &outcome.rows);
    tell_skipped(rows.filter_map(|row| Some((row.subject, row.skipped.as_deref()?))), table);
    sum_up(&outcomes, table);
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (unix_seconds, programs, rounds) = (now.as_secs(), lab.programs.clone(), args.rounds);
        let bytes = args.bytes;
        say_json(&Report { unix_seconds, machine, programs, rounds, bytes, cases: outcomes });
    }
    Ok(())
}

/// One that is ready for its turn.
struct Ready {
    row: usize,
    running: Running,
    guests: Vec<Guest>,
}

fn measure(args: &Args, lab: &Lab, case: Case) -> Result<Outcome> {
    let turns = u64::from(args.rounds + 1);
    let per_turn = case.operations() as u64 * case.len as u64;
    // Mapped places are the same in each turn.
    let part = if case.is_mapped { per_turn } else { per_turn * turns };
    let size = (part * case.guests as u64).next_multiple_of(1 << 20);
    let (mut rows, mut ready) = (Vec::new(), Vec::new());
    for (index, subject) in SUBJECTS.iter().enumerate() {
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
            let within = if case.is_mapped { 0 } else { round * per_turn };
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
    Ok(Outcome { case: case.id(), rows })
}

/// What a guest does in a turn: what it wrote is durable at the end.
fn turn_of(guest: &mut Guest, case: Case, from: u64) -> Result<()> {
    for operation in 0..case.operations() {
        guest.ask(Request::Write { offset: from + (operation * case.len) as u64, len: case.len })?;
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
    let connect = |_| Guest::connect_writing(running.socket(), args.bytes);
    let mut guests = (0..case.guests).map(connect).collect::<Result<Vec<_>>>()?;
    if case.is_mapped {
        let len = 1 << 20;
        for offset in (0..size).step_by(len) {
            guests[0].ask(Request::Write { offset, len })?;
        }
        guests[0].ask(Request::Flush)?;
    }
    Ok((running, guests))
}

/// One's rates over another's, round by round.
fn ratios(row: &Row, rows: &[Row], to: &str) -> Vec<f64> {
    let other = rows.iter().find(|other| other.subject == to);
    other.map_or_else(Vec::new, |other| {
        row.rates.iter().zip(&other.rates).map(|(mine, theirs)| mine / theirs).collect()
    })
}

fn tell(outcome: &Outcome, table: Table) {
    table.say("");
    table.say(&outcome.case);
    for row in outcome.rows.iter().filter(|row| row.skipped.is_none()) {
        let show = |to: &str| {
            let ratios = ratios(row, &outcome.rows, to);
            if ratios.is_empty() {
                return "-".to_owned();
            }
            let (least, most) = ends(&ratios);
            format!("{:.2} ±{:.0}%", median(ratios), (most - least) * 50.0)
        };
        let rate = short(median(row.rates.iter().copied()));
        table.say(&format!(
            "  {:<24} {rate:>8}   CPU {:>6} µs   raw {:>12}   qemu {:>13}",
            row.subject,
            short(row.cpu_us),
            show(RAW),
            show(QEMU)
        ));
    }
}

fn ends(values: &[f64]) -> (f64, f64) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (least, most)
}

/// Over all cases: what each one's ratios come to.
fn sum_up(outcomes: &[Outcome], table: Table) {
    table.say("");
    table.say("over all cases: the median of their ratios, the least and the most");
    for subject in &SUBJECTS {
        let of = |to: &str| -> Vec<f64> {
            let rows = outcomes.iter().flat_map(|outcome| {
                outcome.rows.iter().filter(|row| row.subject == subject.name).map(move |row| (row, outcome))
            });
            let ratios = rows.map(|(row, outcome)| ratios(row, &outcome.rows, to));
            ratios.filter(|ratios| !ratios.is_empty()).map(median).collect()
        };
        let show = |ratios: Vec<f64>| {
            if ratios.is_empty() {
                return "-".to_owned();
            }
            let (least, most) = ends(&ratios);
            format!("{:.2} ({least:.2} to {most:.2})", median(ratios))
        };
        table.say(&format!("  {:<24} raw {:>20}   qemu {:>20}", subject.name, show(of(RAW)), show(of(QEMU))));
    }
    let linear = outcomes.iter().filter_map(|outcome| {
        let row = outcome.rows.iter().find(|row| row.subject == LINEAR)?;
        let ratios = ratios(row, &outcome.rows, RAW);
        (!ratios.is_empty()).then(|| median(ratios))
    });
    let (all, reached) =
        linear.fold((0, 0), |(all, reached), ratio| (all + 1, reached + usize::from(ratio >= 0.95)));
    table.say(&format!("linear reaches 0.95 of raw in {reached} of {all} cases"));
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn cases_have_names_of_their_own_and_what_they_are_compared_with_takes_part() {
        let names: HashSet<String> = cases().iter().map(Case::id).collect();
        assert_eq!(names.len(), 32);
        for name in [RAW, QEMU, LINEAR] {
            assert_eq!(SUBJECTS.iter().filter(|subject| subject.name == name).count(), 1, "{name}");
        }
        for case in cases() {
            assert!(case.operations() * case.len <= 64 << 20, "{}", case.id());
        }
    }

    #[test]
    fn ratios_are_those_of_the_same_round() {
        let row = |subject, rates: &[f64]| Row { subject, rates: rates.to_vec(), cpu_us: 0.0, skipped: None };
        let rows = [row(LINEAR, &[10.0, 40.0]), row(RAW, &[20.0, 50.0]), row(QEMU, &[])];
        assert_eq!(ratios(&rows[0], &rows, RAW), [0.5, 0.8]);
        assert!(ratios(&rows[0], &rows, QEMU).is_empty());
    }
}
