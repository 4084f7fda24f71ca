//! `vellum-bench engine`: the cost of a disk without a server: no export, no socket, no other process.
//!
//! ```text
//!   lanes of a worker (32) ─► Disk ─► format ─► Storage ─► the worker's ring          vellum
//!                          └► FormatAccess ─► pread, pwrite on the same thread        imago, a library of the same kind
//! ```
//!
//! Each lane has one request in flight. The engines take turns in one process, beginning with another one in
//! each round, and execute the same number of the same requests. The CPU time is that of the whole process,
//! user and system, including the kernel's threads for its ring.

mod cases;
mod drive;

use std::path::PathBuf;
use std::time::SystemTime;

use serde::Serialize;
use vellum_core::{Context, Error, Result};
use vellum_lab::programs::dir_or_beside_me;
use vellum_lab::report::{Output, Table, say_json};

use super::parse_size;
use crate::host::Machine;
use crate::report::{median, short, spread_percent};
use cases::{Case, Engine};
use drive::{Setting, Turn};

/// Time the engine without any export, and compare it with the crate imago
///
/// Each case prints a line when it ends: CPU time per operation, thousands of operations per second, and both
/// as ratios to imago's in the same round.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of rounds of each case; each engine has a turn in each
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Measured requests per turn; reads from the page cache are eight times as many
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = clap::value_parser!(u64).range(64..))]
    operations: u64,
    /// Size of the allocated disks, in whole MiB
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    size: u64,
    /// Requests in flight on each worker
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..))]
    depth: u64,
    /// Number of workers that use the disk
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    workers: u16,
    /// Run only the cases whose names contain TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Measure Vellum only
    #[arg(long)]
    skip_peers: bool,
    /// Directory for images. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
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
    depth: u64,
    workers: u16,
    cases: Vec<Outcome>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Outcome {
    case: String,
    rows: Vec<Row>,
}

/// What one engine did: a turn for each round.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    engine: &'static str,
    turns: Vec<Turn>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let is_wanted =
        |case: &&Case| args.only.is_empty() || args.only.iter().any(|text| case.id().contains(text));
    let cases: Vec<Case> = Case::ALL.iter().filter(is_wanted).copied().collect();
    let table = Table::to(args.output);
    if args.list {
        cases.iter().for_each(|case| table.say(&case.id()));
        return Ok(());
    }
    if cases.is_empty() {
        return Err(Error::invalid("no case has such a name: see --list"));
    }
    if args.size < 1 << 20 || !args.size.is_multiple_of(1 << 20) {
        return Err(Error::invalid("--size is in whole MiB"));
    }
    let dir = dir_or_beside_me(args.dir.as_ref())?;
    let machine = Machine::with(&dir);
    table.say(&format!(
        "{} MiB disk on {}; Linux {}, {} processors; {} rounds, {} workers with {} requests under way; medians, ± half of the spread",
        args.size >> 20,
        machine.medium,
        machine.kernel,
        machine.processors,
        args.rounds,
        args.workers,
        args.depth,
    ));
    table.say(&format!(
        "  {:<34} {:<22} {:<18} {:<18} times imago's: rate, CPU",
        "", "", "CPU µs/op", "kIOPS"
    ));
    let setting = Setting::make(&dir, args.size, args.depth, args.workers)?;
    let mut outcomes = Vec::new();
    for case in cases {
        let outcome = measure(args, &setting, &case)?;
        lines(&case, &outcome.rows).iter().for_each(|line| table.say(line));
        outcomes.push(outcome);
    }
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (depth, workers) = (args.depth, args.workers);
        say_json(&Report { unix_seconds: now.as_secs(), machine, depth, workers, cases: outcomes });
    }
    Ok(())
}

fn measure(args: &Args, setting: &Setting, case: &Case) -> Result<Outcome> {
    let engines: Vec<Engine> =
        Engine::ALL.into_iter().filter(|engine| *engine != Engine::Imago || !args.skip_peers).collect();
    let mut rows: Vec<Row> =
        engines.iter().map(|engine| Row { engine: engine.name(), turns: Vec::new() }).collect();
    let operations = case.operations(args.operations);
    for round in 0..args.rounds {
        for turn in 0..engines.len() {
            let index = (round as usize + turn) % engines.len();
            let done = setting
                .take_turn(engines[index], case, operations, u64::from(round))
                .context(|| format!("{} at {}", engines[index].name(), case.id()))?;
            rows[index].turns.push(done);
        }
    }
    Ok(Outcome { case: case.id(), rows })
}

/// The lines of a case: each engine, what it is beside imago, and whether it does what is aimed at.
fn lines(case: &Case, rows: &[Row]) -> Vec<String> {
    let figures = |row: &Row, figure: fn(&Turn) -> f64| row.turns.iter().map(figure).collect::<Vec<_>>();
    let show = |values: &[f64]| {
        format!("{} ±{:.0}%", short(median(values.iter().copied())), spread_percent(values.iter().copied()))
    };
    let imago = rows.iter().find(|row| row.engine == Engine::Imago.name());
    let line = |(index, row): (usize, &Row)| {
        let (cpu, rate) = (figures(row, Turn::cpu_us), figures(row, Turn::kilo_per_second));
        let beside = imago.filter(|imago| imago.engine != row.engine).map_or_else(String::new, |imago| {
            let ratios = |mine: &[f64], figure| -> Vec<f64> {
                mine.iter().zip(figures(imago, figure)).map(|(mine, theirs)| mine / theirs).collect()
            };
            let rates = ratios(&rate, Turn::kilo_per_second);
            let costs = median(ratios(&cpu, Turn::cpu_us));
            format!("{}  {}", show(&rates), short(costs))
        });
        let name = if index == 0 { case.id() } else { String::new() };
        let line = format!("  {name:<34} {:<22} {:<18} {:<18} {beside}", row.engine, show(&cpu), show(&rate));
        line.trim_end().to_owned()
    };
    rows.iter().enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_compared_with_imago_round_by_round() {
        let turn = |seconds, cpu_seconds| Turn { operations: 1000, seconds, cpu_seconds };
        let rows = [
            Row { engine: Engine::Qcow2.name(), turns: vec![turn(1.0, 0.002), turn(10.0, 0.02)] },
            Row { engine: Engine::Imago.name(), turns: vec![turn(2.0, 0.008), turn(20.0, 0.08)] },
        ];
        let lines = lines(&Case::ALL[0], &rows);
        assert!(lines[0].ends_with("2.00 ±0%  0.25"), "the second round was slow for both: {lines:?}");
        assert!(lines[1].contains("44.0 ±82%"), "{lines:?}");
    }
}
