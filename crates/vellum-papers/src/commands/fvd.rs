//! `vellum-papers fvd`: rows F1 to F8 of the paper, each beside the paper's, met or missed.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::Serialize;
use vellum_core::{Error, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::Vellum;

use super::{Row, on_all_processors, tell};
use crate::fvd::{self, FreeWrites, Image, Phase, Run, Sizes, Stage};

/// FVD, USENIX ATC 2011 (rows F1 to F8)
///
/// Files created, transactions, disk I/Os, seek distance, sizes and free writes. Times are simulated: they
/// show what an order of operations costs on a modelled drive, and do not depend on this machine. Every run
/// gives the same output.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run 1/N of the paper's files and transactions
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    scale: u64,
    /// Model only the drive of the paper, without the others that give the error band
    #[arg(long)]
    quick: bool,
    /// Directory of recorded traces; postmark_selfie_small.csv.xz is added to the table
    #[arg(long, value_name = "DIR")]
    traces: Option<PathBuf>,
    /// Directory for QEMU's image, whose calls are replayed. Default: this program's
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// A vellum; it is not looked at
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse, hide = true)]
    vellum: Option<Vellum>,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
}

/// Everything that was found, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    scale: u64,
    runs: Vec<Run>,
    recorded: Vec<(Image, Phase)>,
    /// The same trace on QEMU's qcow2 as it is now, its calls replayed on the modelled drive.
    #[serde(skip_serializing_if = "Option::is_none")]
    today: Option<Phase>,
    sizes: Sizes,
    free_writes: FreeWrites,
    rows: Vec<Row>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let table = Table::to(args.output);
    let stages = if args.quick { fvd::stages()[..1].to_vec() } else { fvd::stages() };
    let [first, ..] = &stages[..] else {
        return Err(Error::invalid("no drive"));
    };
    table.say(&format!(
        "simulated: {}; 1/{} of the paper's files; {} writes of the guest at a time",
        first.name, args.scale, first.depth
    ));
    // The band is that of the two which the paper compares.
    let images = |index: usize| Image::ALL.into_iter().filter(move |image| index == 0 || image.is_compared());
    let jobs: Vec<(&Stage, Image)> = stages
        .iter()
        .enumerate()
        .flat_map(|(index, stage)| images(index).map(move |image| (stage, image)))
        .collect();
    let runs = on_all_processors(&jobs, |(stage, image)| fvd::postmark(*image, stage, args.scale))?;
    for stage in &stages {
        table.say("");
        table.say(&format!("{}: PostMark", stage.name));
        HEAD.iter().for_each(|line| table.say(line));
        for run in runs.iter().filter(|run| run.stage == stage.name) {
            table.say(&line(run.image.name(), &[run.creation, run.transactions]));
        }
    }
    let (mut recorded, mut today) = (Vec::new(), None);
    if let Some(dir) = &args.traces {
        let trace = fvd::trace_in(dir)?;
        table.say("");
        table.say(&format!("{}: a recorded PostMark on ext4, 95 MiB, with flushes", first.name));
        table.say(HEAD[1][..ONE_PHASE].trim_end());
        let requests = fvd::recorded_requests(&trace)?;
        for image in Image::ALL {
            let phase = fvd::replayed(image, first, requests.clone())?;
            table.say(&line(image.name(), &[phase]));
            recorded.push((image, phase));
        }
        let log = Lab::open(args.dir.as_ref(), args.vellum.as_ref())
            .and_then(|lab| fvd::todays_log(&lab, requests).map(|log| (log, lab.programs.join(", "))));
        match log {
            Ok((log, programs)) => {
                let phase = fvd::replayed(Image::Raw, first, log)?;
                table.say(&line("qcow2, QEMU of today (log)", &[phase]));
                table.say(&format!("  log: {programs}"));
                today = Some(phase);
            }
            Err(error) => table.say(&format!("skipped: QEMU of today: {}", error.chain())),
        }
    }
    let (sizes, free_writes) = (fvd::sizes()?, fvd::free_writes()?);
    let mut rows = simulated_rows(&runs, &stages);
    rows.extend(recorded_rows(&recorded, today));
    rows.extend(counted_rows(sizes, free_writes));
    tell(&rows, table);
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (unix_seconds, scale) = (now.as_secs(), args.scale);
        say_json(&Report { unix_seconds, scale, runs, recorded, today, sizes, free_writes, rows });
    }
    Ok(())
}

const HEAD: [&str; 2] = [
    "                            | files created                                 | transactions",
    "                            | seconds    reads   writes      MiB  seek, MiB | seconds    reads   writes      MiB  seek, MiB",
];

/// The width of a line that reports one phase.
const ONE_PHASE: usize = 76;

fn line(name: &str, phases: &[Phase]) -> String {
    let mut line = format!("  {name:<26}");
    for phase in phases {
        let Phase { seconds, reads, writes, mebibytes_written, average_seek_mebibytes } = phase;
        write!(
            line,
            "| {seconds:>7.1} {reads:>8} {writes:>8} {mebibytes_written:>8.0} {average_seek_mebibytes:>10.1} "
        )
        .expect("memory");
    }
    line.trim_end().to_owned()
}

/// By how many percent one is more than the other.
fn more(one: f64, other: f64) -> f64 {
    (one / other - 1.0) * 100.0
}

/// A figure of the two, on the first drive and the least and most on all.
fn figure(runs: &[Run], stages: &[Stage], of: impl Fn(&Run, &Run) -> f64) -> (f64, f64, f64) {
    let on = |stage: &Stage| {
        let find = |image| runs.iter().find(|run| run.stage == stage.name && run.image == image);
        let (ours, theirs) = (find(Image::Linear)?, find(Image::Qcow2)?);
        Some(of(ours, theirs))
    };
    let all: Vec<f64> = stages.iter().filter_map(on).collect();
    let least = all.iter().copied().fold(f64::INFINITY, f64::min);
    let most = all.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (all[0], least, most)
}

fn simulated_rows(runs: &[Run], stages: &[Stage]) -> Vec<Row> {
    let percent = |(here, least, most): (f64, f64, f64)| format!("{here:+.0} % ({least:+.0} to {most:+.0})");
    let times = |(here, least, most): (f64, f64, f64)| format!("{here:.1} times ({least:.1} to {most:.1})");
    let created = figure(runs, stages, |ours, theirs| more(theirs.creation.seconds, ours.creation.seconds));
    let transactions =
        figure(runs, stages, |ours, theirs| more(theirs.transactions.seconds, ours.transactions.seconds));
    let operations = figure(runs, stages, |ours, theirs| {
        more(theirs.creation.operations() as f64, ours.creation.operations() as f64)
    });
    let seeks = figure(runs, stages, |ours, theirs| {
        theirs.creation.average_seek_mebibytes / ours.creation.average_seek_mebibytes
    });
    let row = |id, what, paper, ours, is_met| Row { id, what, paper, ours, is_met };
    vec![
        row("F1", "files created, linear over QCOW2", "+249 %", percent(created), created.0 >= 249.0),
        row("F2", "transactions, linear over QCOW2", "+77 %", percent(transactions), transactions.0 >= 77.0),
        row(
            "F3",
            "disk I/Os while creating, QCOW2 over linear",
            "+45 %",
            percent(operations),
            operations.0 >= 45.0,
        ),
        row("F4", "average seek while creating, QCOW2 to linear", "5.6 times", times(seeks), seeks.0 >= 5.6),
    ]
}

fn recorded_rows(recorded: &[(Image, Phase)], today: Option<Phase>) -> Vec<Row> {
    let find = |image| recorded.iter().find(|(of, _)| *of == image).map(|(_, phase)| phase);
    let (Some(ours), Some(theirs)) = (find(Image::Linear), find(Image::Qcow2)) else {
        return Vec::new();
    };
    let operations = |theirs: &Phase| more(theirs.operations() as f64, ours.operations() as f64);
    let seeks = |theirs: &Phase| theirs.average_seek_mebibytes / ours.average_seek_mebibytes;
    let time = |theirs: &Phase| more(theirs.seconds, ours.seconds);
    let both = |show: &dyn Fn(&Phase) -> String| {
        let today = today.as_ref().map(|today| format!(" (QEMU of today {})", show(today)));
        show(theirs) + &today.unwrap_or_default()
    };
    let row = |id, what, paper, ours, is_met| Row { id, what, paper, ours, is_met };
    vec![
        row(
            "F2",
            "  recorded trace: speed",
            "+77 %",
            both(&|phase| format!("{:+.0} %", time(phase))),
            time(theirs) >= 77.0,
        ),
        row(
            "F3",
            "  recorded trace: disk I/Os",
            "+45 %",
            both(&|phase| format!("{:+.0} %", operations(phase))),
            operations(theirs) >= 45.0,
        ),
        row(
            "F4",
            "  recorded trace: average seek",
            "5.6 times",
            both(&|phase| format!("{:.2} times", seeks(phase))),
            seeks(theirs) >= 5.6,
        ),
    ]
}

fn counted_rows(sizes: Sizes, free: FreeWrites) -> Vec<Row> {
    let mib = |bytes: u64| bytes >> 20;
    let row = |id, what, paper, ours, is_met| Row { id, what, paper, ours, is_met };
    let Sizes { bitmap, masks, table, template_bitmap, journal } = sizes;
    vec![
        row(
            "F5",
            "bitmap of 1 TiB, blocks of 64 KiB",
            "2 MB",
            format!("{} MiB (masks, a hole at first: {} MiB)", mib(bitmap), mib(masks)),
            bitmap == 2 << 20,
        ),
        row("F5", "table of 1 TiB, units of 1 MiB", "4 MB", format!("{} MiB", mib(table)), table == 4 << 20),
        row(
            "F6",
            "bitmap of 1 TiB over a template of 10 GiB",
            "20 KB",
            format!("{} KiB", template_bitmap >> 10),
            template_bitmap == 20 << 10,
        ),
        row(
            "F7",
            "journal, when nothing is said",
            "16 MB",
            format!("{} MiB", mib(journal)),
            journal == 16 << 20,
        ),
        row(
            "F8",
            "updates on disk for free writes",
            "0",
            format!("{} for {} flushed writes", free.metadata_writes, free.guest_writes),
            free.metadata_writes == 0 && free.metadata_writes_over_data > 0,
        ),
    ]
}
