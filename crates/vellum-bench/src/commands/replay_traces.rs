//! `vellum-bench replay-traces`: what recorded guests cost the host, by counts.
//!
//! ```text
//!   for each trace    a raw base, full wherever the trace asks
//!     for each format   an empty overlay on it (raw: a new file) ► all requests, one at a time ► a flush ► closed
//! ```
//!
//! Reads of the trace are left out, so that every read of the base belongs to the write path. `strace` counts
//! those, and the calls of QEMU. Only Vellum can separate its foreground writes from the checkpoint writes of
//! its journal. `strace` must see the same totals of writes and flushes.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::{Lab, Plan, Scene, Witness};
use vellum_lab::guest::{Bytes, Request};
use vellum_lab::report::{Output, Table, say_json, tell_skipped};
use vellum_lab::server::Vellum;
use vellum_lab::subjects::{Base, Maker, NATIVE, SUBJECTS, Subject};
use vellum_lab::trace::Trace;

use crate::host::Machine;
use crate::images;
use crate::report::replay::{Outcome, Row, head, line};

/// The unit in which the base is full or a hole; at least that of any format that copies.
const BASE_UNIT: u64 = 2 << 20;
/// Disks are as large as their trace needs, in this unit.
const DISK_UNIT: u64 = 64 << 20;

/// Replay block traces with their flushes on overlays, and count host operations
///
/// A trace is a text file, plain or compressed with xz, with one line per request. The first line names the
/// columns: op (W, R, F, T, Z), offset and len are required, phase and fua are optional. Requests are
/// replayed one at a time. A flush is added at the end, and reads are skipped.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Trace to replay; several may follow
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    trace: Vec<PathBuf>,
    /// Phases to replay, for traces that have phases; several may follow
    #[arg(long, value_name = "PHASE", num_args = 1.., default_value = "w")]
    phase: Vec<String>,
    /// Contents of the writes
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = Bytes::Noise)]
    bytes: Bytes,
    /// Directory for images and sockets. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Run only the formats whose names contain TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
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

/// Everything that was counted, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    traces: Vec<Outcome>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let named = |subject: &&Subject| {
        args.only.is_empty() || args.only.iter().any(|text| subject.name.contains(text.as_str()))
    };
    let subjects: Vec<&Subject> = SUBJECTS
        .iter()
        .filter(|subject| match subject.format {
            "raw" => true,
            "qcow2" | NATIVE => subject.base != Base::Never,
            _ => false,
        })
        .filter(|subject| subject.maker == Maker::Vellum || !args.skip_peers)
        .filter(named)
        .collect();
    if subjects.is_empty() {
        return Err(Error::invalid("no format has such a name"));
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let table = Table::to(args.output);
    let machine = Machine::with(&lab.dir);
    table.say(&format!("images on {}; Linux {}", machine.medium, machine.kernel));
    lab.programs.iter().for_each(|program| table.say(program));
    let mut traces = Vec::new();
    for path in &args.trace {
        traces.push(replay(&lab, path, args, &subjects, table)?);
    }
    let rows = traces.iter().flat_map(|outcome| &outcome.rows);
    tell_skipped(rows.filter_map(|row| Some((row.subject, row.skipped.as_deref()?))), table);
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report { unix_seconds: now.as_secs(), machine, programs: lab.programs.clone(), traces });
    }
    Ok(())
}

/// The requests of the selected phases, and how many reads were left out.
fn plan(trace: Trace, phases: &[String], bytes: Bytes) -> (Plan, u64) {
    let mut reads_left_out = 0;
    let mut requests = Vec::new();
    for (phase, request) in trace.requests {
        if phase.is_some_and(|phase| !phases.contains(&phase)) {
            continue;
        }
        match request {
            Request::Read { .. } => reads_left_out += 1,
            request => requests.push(request),
        }
    }
    requests.push(Request::Flush);
    let disk_bytes = trace.end.next_multiple_of(DISK_UNIT).max(DISK_UNIT);
    (
        Plan { disk_bytes, bytes, fill: Vec::new(), warm_up: Vec::new(), counted: vec![requests] },
        reads_left_out,
    )
}

/// Whether the base is full there, by unit: wherever something is written, zeroed or discarded in part.
fn touched(plan: &Plan) -> Vec<bool> {
    let unit = |at: u64| usize::try_from(at / BASE_UNIT).expect("a disk of moderate size");
    let mut touched = vec![false; unit(plan.disk_bytes)];
    for request in plan.counted.iter().flatten() {
        match *request {
            Request::Write { offset, len } | Request::WriteThrough { offset, len } => {
                touched[unit(offset)..=unit(offset + len as u64 - 1)].fill(true);
            }
            // The middle is not needed: what is copied is at the ends.
            Request::Zero { offset, len } | Request::Discard { offset, len } => {
                touched[unit(offset)] = true;
                touched[unit(offset + len as u64 - 1)] = true;
            }
            Request::Read { .. } | Request::Flush => {}
        }
    }
    touched
}

/// One trace on each format.
fn replay(lab: &Lab, path: &Path, args: &Args, subjects: &[&Subject], table: Table) -> Result<Outcome> {
    let (plan, reads_left_out) = plan(Trace::read(path)?, &args.phase, args.bytes);
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let name = name.split('.').next().unwrap_or_default().to_owned();
    let name = match args.bytes {
        Bytes::Noise => name,
        Bytes::Same => name + "-same",
    };
    let base = lab.base();
    images::write_raw_where(&base, BASE_UNIT, &touched(&plan)).context(|| "can't write the base")?;
    let mut outcome = Outcome { trace: name, guest: plan.asked(), reads_left_out, rows: Vec::new() };
    table.say("");
    head(&outcome).iter().for_each(|line| table.say(line));
    for subject in subjects {
        let row =
            row(lab, subject, &plan, &base).context(|| format!("{} at {}", subject.name, outcome.trace))?;
        table.say(&line(&outcome, &row));
        outcome.rows.push(row);
    }
    std::fs::remove_file(&base).context(|| "can't remove the base")?;
    Ok(outcome)
}

fn row(lab: &Lab, subject: &Subject, plan: &Plan, base: &Path) -> Result<Row> {
    let witness = match (subject.maker, &lab.blind) {
        (Maker::Qemu, _) => Witness::Strace,
        (Maker::Vellum, None) => Witness::Both,
        (Maker::Vellum, Some(_)) => Witness::Stats,
    };
    let mut row = Row { subject: subject.name, host: None, base_bytes_read: None, skipped: None };
    row.skipped = lab.refusal(subject)?;
    if row.skipped.is_none() && witness == Witness::Strace {
        row.skipped.clone_from(&lab.blind);
    }
    if row.skipped.is_some() {
        return Ok(row);
    }
    let base = (subject.base != Base::Never).then_some(base);
    let seen = lab.count(subject, Scene { plan, base, snapshot: false }, witness, 0)?;
    if let (Some(stats), Some(strace)) = (seen.stats, seen.strace)
        && !stats.total.is_confirmed_by(strace.total)
    {
        return Err(Error::corrupt(format!(
            "strace counted {:?}, Vellum itself {:?}",
            strace.total, stats.total
        )));
    }
    row.host = seen.stats.or(seen.strace);
    row.base_bytes_read = seen.base_bytes_read;
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_has_the_wanted_phases_without_reads_and_ends_with_a_flush() {
        let write = |offset| Request::Write { offset, len: 4096 };
        let of = |phase: &str, request| (Some(phase.to_owned()), request);
        let requests = vec![
            of("m", write(0)),
            of("w", write(5 << 20)),
            of("w", Request::Read { offset: 0, len: 512 }),
            of("w", Request::Discard { offset: 8 << 20, len: 8 << 20 }),
            (None, write((4 << 20) - 512)),
        ];
        let (plan, reads) = plan(Trace { requests, end: 65 << 20 }, &["w".to_owned()], Bytes::Noise);
        let counted = [
            write(5 << 20),
            Request::Discard { offset: 8 << 20, len: 8 << 20 },
            write((4 << 20) - 512),
            Request::Flush,
        ];
        assert_eq!((plan.counted, reads, plan.disk_bytes), (vec![counted.to_vec()], 1, 128 << 20));
    }

    #[test]
    fn the_base_is_full_where_something_may_be_copied() {
        let counted = vec![
            Request::Write { offset: (4 << 20) - 512, len: 1024 },
            Request::Discard { offset: 8 << 20, len: 8 << 20 },
        ];
        let plan = Plan {
            disk_bytes: 64 << 20,
            bytes: Bytes::Noise,
            fill: Vec::new(),
            warm_up: Vec::new(),
            counted: vec![counted],
        };
        let full: Vec<usize> =
            touched(&plan).into_iter().enumerate().filter_map(|(unit, full)| full.then_some(unit)).collect();
        assert_eq!(full, [1, 2, 4, 7]);
    }
}
