//! `vellum-papers run`: every row of the papers, as a table, and as one page with its data.

use std::fs;
use std::path::{Path, PathBuf};

use chrono::Utc;
use serde::Serialize;
use vellum_core::{Context, Result};
use vellum_lab::report::{Output, Table, complain, say_json};
use vellum_lab::server::Vellum;

use super::{Options, cowcache, fast16, fvd, hvd, selfie};
use crate::report::{Made, Row, Tally, page};

/// Make the rows and figures of the papers
///
/// Without --full, everything is made on a smaller scale (a minute or two), and rows that depend on the scale are
/// not judged. The recorded guests come with the program. Every run gives the same output, except for the rows of
/// today's QEMU, whose calls are recorded where it is installed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The papers; all of them when none is named
    #[arg(value_enum, value_name = "PAPER")]
    papers: Vec<Paper>,
    /// Make every row on the papers' own scale (some minutes)
    #[arg(long)]
    full: bool,
    /// Write index.html, papers.json and a CSV file for each figure into this directory, which is made if need be
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Directory for QEMU's image, whose calls are replayed. Default: this program's
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// CSV files of the MSR Cambridge traces (SNIA IOTTA, trace set 388, under its terms), for C27 and C28
    #[arg(long, value_name = "FILE", num_args = 1..)]
    msr: Vec<PathBuf>,
    /// The CloudPhysics trace, for C27 and C28: data/cloudPhysicsIO.csv of github.com/1a1a11a/libCacheSim (GPL-3.0)
    #[arg(long, value_name = "FILE")]
    cloudphysics: Option<PathBuf>,
    /// A vellum; it is not looked at
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse, hide = true)]
    vellum: Option<Vellum>,
    /// Output format on stdout; with json, the tables go to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Paper {
    /// COWCache, Cluster Computing 2019: rows C1 to C31
    Cowcache,
    /// Sync amplification, FAST 2016: rows A1 to A16
    Fast16,
    /// FVD, USENIX ATC 2011: rows F1 to F11
    Fvd,
    /// HVD, two media in one disk, 2009: rows H1 to H10
    Hvd,
    /// Selfie, SYSTOR 2015: rows S1 to S24
    Selfie,
}

impl Paper {
    const ALL: [Self; 5] = [Self::Selfie, Self::Fast16, Self::Fvd, Self::Hvd, Self::Cowcache];

    fn name(self) -> &'static str {
        match self {
            Self::Cowcache => "cowcache",
            Self::Fast16 => "fast16",
            Self::Fvd => "fvd",
            Self::Hvd => "hvd",
            Self::Selfie => "selfie",
        }
    }

    fn make(self, options: &Options, table: Table) -> Result<Made> {
        match self {
            Self::Cowcache => cowcache::make(options, table),
            Self::Fast16 => fast16::make(options, table),
            Self::Fvd => fvd::make(options, table),
            Self::Hvd => hvd::make(options, table),
            Self::Selfie => selfie::make(options, table),
        }
    }
}

/// Everything that was made, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    command: String,
    /// The day of the run, UTC.
    day: String,
    is_full: bool,
    papers: Vec<Made>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let table = Table::to(args.output);
    let traces = cowcache::Files { msr: args.msr.clone(), cloudphysics: args.cloudphysics.clone() };
    let options = Options { is_full: args.full, dir: args.dir.clone(), vellum: args.vellum.clone(), traces };
    let chosen: Vec<Paper> = Paper::ALL
        .into_iter()
        .filter(|paper| args.papers.is_empty() || args.papers.contains(paper))
        .collect();
    // Better now than after minutes of work.
    if let Some(dir) = &args.out {
        fs::create_dir_all(dir).context(|| format!("can't make the directory {}", dir.display()))?;
    }
    let mut papers = Vec::new();
    for paper in &chosen {
        let made = paper.make(&options, table)?;
        tell(&made, table);
        papers.push(made);
    }
    let names: String = args.papers.iter().map(|paper| format!(" {}", paper.name())).collect();
    let command = format!("vellum-papers run{names}{}", if args.full { " --full" } else { "" });
    let day = Utc::now().format("%Y-%m-%d").to_string();
    let report = Report { command, day, is_full: args.full, papers };
    if let Some(dir) = &args.out {
        write_files(dir, &report)?;
        complain(&format!("the page is {}", dir.join("index.html").display()));
    }
    if args.output == Output::Json {
        say_json(&report);
    }
    Ok(())
}

/// The page, the data, and the figures' series.
fn write_files(dir: &Path, report: &Report) -> Result<()> {
    let write = |name: &str, bytes: &str| {
        let path = dir.join(name);
        fs::write(&path, bytes).context(|| format!("can't write {}", path.display()))
    };
    for figure in report.papers.iter().flat_map(|made| &made.figures) {
        write(&format!("{}.csv", figure.file), &figure.csv())?;
    }
    let json = serde_json::to_string_pretty(report).expect("numbers and strings");
    write("papers.json", &json)?;
    write("index.html", &page(&report.papers, &report.command, &report.day))
}

/// The rows beside the paper's, as lines.
fn tell(made: &Made, table: Table) {
    table.say("");
    table.say(&format!("{} ({})", made.title, made.venue));
    table.say(&format!(
        "{:<4} {:<12} {:<46} {:>14}  {:<44} {:>6}  verdict",
        "row", "where", "", "paper", "here", "ratio"
    ));
    for Row { id, place, what, paper, here, ratio, verdict, note, .. } in &made.rows {
        let ratio = ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
        let note = if note.is_empty() { String::new() } else { format!(": {note}") };
        let line = format!(
            "{id:<4} {place:<12} {what:<46} {paper:>14}  {here:<44} {ratio:>6}  {}{note}",
            verdict.name()
        );
        table.say(line.trim_end());
    }
    let Tally { reproduced, better, worse, not_comparable } = Tally::of(&made.rows);
    table.say(&format!(
        "{} rows: {reproduced} reproduced, {better} better, {worse} worse, {not_comparable} not comparable",
        made.rows.len()
    ));
}
