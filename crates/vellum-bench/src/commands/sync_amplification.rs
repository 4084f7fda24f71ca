//! `vellum-bench sync-amplification`: what synchronous writes of a guest cost the host, in counts instead of
//! times.
//!
//! ```text
//!   for each workload, for each format: one row
//!     of one guest        several at once: a count does not depend on other load
//!     of several guests   alone: how many writers share a flush depends on timing
//! ```
//!
//! QEMU's calls are counted by `strace`, so its server uses threads and not a ring. Vellum counts its own
//! calls in normal use; each of its formats is also counted once by both (with `--strace` each row), and both
//! must agree. Background work after the last answer is excluded from the counts of `strace`, which has the
//! time of each call; Vellum's own figures, which come once a second, may include it.

mod count;
mod workloads;

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::SystemTime;

use serde::Serialize;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::Counts;
use vellum_lab::cost::lab::Lab;
use vellum_lab::device::Device;
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, say_json, tell_skipped};
use vellum_lab::server::Vellum;
use vellum_lab::subjects::{Maker, SUBJECTS, Subject};

use crate::host::Machine;
use crate::images;
use crate::report::amplification::{Row, head, line};
use count::{Bench, Counted};
use workloads::{BASE_BYTES, Below, WORKLOADS, Workload};

/// Rows of one guest that are counted at once. They mostly wait: for the drive, and for figures that come
/// once a second.
const WORKERS: usize = 4;

/// Count the host flushes, writes and bytes that synchronous guest writes cause
///
/// All formats of Vellum and QEMU are compared. The guest waits for each reply, and the first 64 operations
/// are not counted. Each line shows the guest's writes and flushes (w, f), and what the host did for them:
/// flushes of the file (F), writes (W), KiB written, calls that punch holes or zero ranges (H), and the
/// ratios to the guest's own numbers.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Quick run: fewer workloads, 32 operations each
    #[arg(long)]
    quick: bool,
    /// Counted operations [default: 256, quick: 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(4..=1024))]
    operations: Option<u16>,
    /// Directory for images and sockets. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Run only the workloads whose names contain TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Measure Vellum only
    #[arg(long)]
    skip_peers: bool,
    /// Cross-check every row of Vellum with strace, without io_uring
    ///
    /// By default, one row of each format is checked.
    #[arg(long)]
    strace: bool,
    /// Also count the flushes of the drive that DIR is on
    ///
    /// Rows then run one at a time. Other programs that use the drive are counted too.
    #[arg(long)]
    device_flushes: bool,
    /// vellum program to measure. Default: the one beside this program
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
    /// List the workloads and exit
    #[arg(long)]
    list: bool,
}

/// Everything that was counted, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    operations: usize,
    programs: Vec<String>,
    workloads: Vec<Outcome>,
    confirmations: Vec<Confirmation>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Outcome {
    workload: &'static str,
    title: &'static str,
    guests: usize,
    rows: Vec<Row>,
}

/// The counts of both witnesses for one run of Vellum, to the clean close.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Confirmation {
    subject: &'static str,
    workload: &'static str,
    stats: Counts,
    strace: Counts,
}

/// A row to come: which workload of those chosen, which of all subjects.
#[derive(Clone, Copy)]
struct Job {
    workload: usize,
    subject: usize,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted = |workload: &&Workload| {
        let named = args.only.iter().any(|text| workload.id.contains(text.as_str()));
        if args.only.is_empty() { !args.quick || workload.quick } else { named }
    };
    let workloads: Vec<&Workload> = WORKLOADS.iter().filter(wanted).collect();
    let table = Table::to(args.output);
    if args.list {
        workloads.iter().for_each(|workload| table.say(workload.id));
        return Ok(());
    }
    if workloads.is_empty() {
        return Err(Error::invalid("no workload has such a name: see --list"));
    }
    let bench = prepare(args)?;
    let lab = &bench.lab;
    let machine = Machine::with(&lab.dir);
    table.say(&format!(
        "{} operations after {}; images on {}; Linux {}",
        bench.operations,
        workloads::WARM_UP,
        machine.medium,
        machine.kernel
    ));
    lab.programs.iter().for_each(|program| table.say(program));
    let has = |below: &[Below]| workloads.iter().any(|workload| below.contains(&workload.below));
    if has(&[Below::Base, Below::BeforeBase]) {
        images::write_raw(&lab.base(), BASE_BYTES).context(|| "can't write the base")?;
    }
    if has(&[Below::Zeros]) {
        images::write_raw_where(&lab.zeros(), BASE_BYTES, &[false]).context(|| "can't write the base")?;
        programs::run(Command::new(lab.tools().vellum).args(["template", "prepare", "-q"]).arg(lab.zeros()))?;
    }
    let (outcomes, mut confirmations) = count_all(&bench, &workloads, args.skip_peers, table)?;
    table.say("");
    let rows = outcomes.iter().flat_map(|outcome| &outcome.rows);
    tell_skipped(rows.filter_map(|row| Some((row.subject, row.skipped.as_deref()?))), table);
    if let Some(reason) = &lab.blind {
        table.say(&format!("skipped: what Vellum counts is not confirmed: {reason}"));
    } else if !args.strace {
        confirmations = confirm(&bench, &workloads)?;
    }
    let doubts = confirmations.iter().filter(|seen| !seen.stats.is_confirmed_by(seen.strace)).count();
    for Confirmation { subject, workload, stats, strace } in &confirmations {
        let same = format!("strace counted the same: {} flushes, {} writes", stats.flushes, stats.writes);
        let said =
            if doubts == 0 { same } else { format!("strace counted {strace:?}, Vellum itself {stats:?}") };
        table.say(&format!("{subject}, {workload}: {said}"));
    }
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (unix_seconds, operations, programs) = (now.as_secs(), bench.operations, lab.programs.clone());
        say_json(&Report { unix_seconds, machine, operations, programs, workloads: outcomes, confirmations });
    }
    if doubts > 0 {
        return Err(Error::corrupt(format!("strace and Vellum's own counters differ at {doubts} rows")));
    }
    Ok(())
}

fn prepare(args: &Args) -> Result<Bench> {
    let mut lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    if args.device_flushes {
        lab.device = Some(Device::below(&lab.dir)?);
    }
    let refusals = SUBJECTS.iter().map(|subject| lab.refusal(subject)).collect::<Result<_>>()?;
    let operations = args.operations.map_or(if args.quick { 32 } else { 256 }, usize::from);
    Ok(Bench { lab, operations, confirms_all: args.strace, refusals })
}

/// Counts all rows, and reports each workload when its last row is there.
fn count_all(
    bench: &Bench,
    workloads: &[&Workload],
    skip_peers: bool,
    table: Table,
) -> Result<(Vec<Outcome>, Vec<Confirmation>)> {
    let jobs_of = |index: usize| {
        let workload = workloads[index];
        let takes = move |subject: &usize| {
            let subject = &SUBJECTS[*subject];
            workload.suits(subject) && (subject.maker == Maker::Vellum || !skip_peers)
        };
        (0..SUBJECTS.len()).filter(takes).map(move |subject| Job { workload: index, subject })
    };
    let jobs: Vec<Job> = (0..workloads.len()).flat_map(jobs_of).collect();
    let (alone, together): (Vec<Job>, Vec<Job>) =
        jobs.iter().partition(|job| workloads[job.workload].guests > 1);
    let mut rows: Vec<Vec<Option<Row>>> = vec![Vec::new(); workloads.len()];
    jobs.iter().for_each(|job| rows[job.workload].push(None));
    let place = |job: Job| jobs_of(job.workload).take_while(|other| other.subject != job.subject).count();
    let (mut outcomes, mut confirmations) = (Vec::new(), Vec::new());
    let mut take = |job: Job, counted: Counted| {
        let workload = workloads[job.workload];
        if let Some((stats, strace)) = counted.said {
            let (subject, workload) = (counted.row.subject, workload.id);
            confirmations.push(Confirmation { subject, workload, stats, strace });
        }
        rows[job.workload][place(job)] = Some(counted.row);
        // Workloads are reported in their order, whichever ends first.
        while let Some(workload) = workloads.get(outcomes.len())
            && rows[outcomes.len()].iter().all(Option::is_some)
        {
            let rows = std::mem::take(&mut rows[outcomes.len()]).into_iter().flatten().collect();
            let (id, title, guests) = (workload.id, workload.title, workload.guests);
            let outcome = Outcome { workload: id, title, guests, rows };
            tell(&outcome, table);
            outcomes.push(outcome);
        }
    };
    // The drive's counter does not distinguish rows.
    let workers = if bench.lab.device.is_some() { 1 } else { WORKERS };
    spread(bench, workloads, &together, workers, &mut take)?;
    spread(bench, workloads, &alone, 1, &mut take)?;
    Ok((outcomes, confirmations))
}

/// Lets this many workers do the jobs; the first error ends them all.
fn spread(
    bench: &Bench,
    workloads: &[&Workload],
    jobs: &[Job],
    workers: usize,
    take: &mut impl FnMut(Job, Counted),
) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (results, coming) = mpsc::channel();
    let work = |worker: usize, results: &mpsc::Sender<(Job, Result<Counted>)>| {
        while !failed.load(Ordering::Relaxed)
            && let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let counted = bench.row(job.subject, workloads[job.workload], worker);
            failed.fetch_or(counted.is_err(), Ordering::Relaxed);
            if results.send((*job, counted)).is_err() {
                return;
            }
        }
    };
    thread::scope(|scope| {
        for worker in 0..workers {
            let (results, work) = (results.clone(), &work);
            scope.spawn(move || work(worker, &results));
        }
        drop(results);
        coming.into_iter().try_for_each(|(job, counted)| {
            take(job, counted?);
            Ok(())
        })
    })
}

fn tell(outcome: &Outcome, table: Table) {
    table.say("");
    table.say(&format!("{}: {}", outcome.workload, outcome.title));
    head().iter().for_each(|line| table.say(line));
    outcome.rows.iter().for_each(|row| table.say(&line(row)));
}

/// Each of our formats whose counts do not depend on the time once with both witnesses, at the first workload
/// that is one for it; all at once.
fn confirm(bench: &Bench, workloads: &[&Workload]) -> Result<Vec<Confirmation>> {
    let first = |subject: &Subject| workloads.iter().find(|workload| workload.suits(subject)).copied();
    let chosen: Vec<(&Subject, &Workload)> = SUBJECTS
        .iter()
        .zip(&bench.refusals)
        .filter(|(subject, refusal)| subject.maker == Maker::Vellum && refusal.is_none())
        .filter(|(subject, _)| !subject.prepares()) // zeros that are under way as it begins are seen by one of both
        .filter_map(|(subject, _)| first(subject).map(|workload| (subject, workload)))
        .collect();
    let look = |worker: usize, subject: &Subject, workload: &Workload| {
        let (stats, strace) = bench.both(subject, workload, worker)?;
        let (subject, workload) = (subject.name, workload.id);
        Ok(Confirmation { subject, workload, stats: stats.total, strace: strace.total })
    };
    thread::scope(|scope| {
        let spawn = |(worker, (subject, workload))| scope.spawn(move || look(worker, subject, workload));
        let looks: Vec<_> = chosen.into_iter().enumerate().map(spawn).collect();
        looks.into_iter().map(|look| look.join().expect("who looks does not panic")).collect()
    })
}
