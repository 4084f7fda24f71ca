//! `vellum-bench sync-amplification`: what a guest's synchronous writes cost the host, by counts and not by clocks.
//!
//! ```text
//!   for each workload, for each format
//!     make an image ► serve it ► fill, 64 operations │ the operations that count │ stop: the image is closed
//!                                                    └────── foreground ────────┘
//!                                                    └─────────────────── total ──────────────────────┘
//! ```
//!
//! QEMU's calls are seen by `strace`, so its server uses threads and not a ring. Vellum counts for itself, as it is used; each
//! of its formats is watched once by both, and both have to say the same.

mod subjects;
mod workloads;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use serde::Serialize;
use vellum_core::{Context, Error, ErrorKind, Result};

use super::dir_or_beside_me;
use crate::cost::{Counts, stats, strace};
use crate::host::Machine;
use crate::images;
use crate::load::guest::{Guest as Client, Request};
use crate::report::amplification::{Guest, Host, Row, head, line};
use crate::report::{Output, Table, complain, say_json};
use crate::server::{Cache, QemuNbd, Running, Server, Serving, Vellum, first_line_of};
use subjects::{Maker, SUBJECTS, Subject};
use workloads::{BASE_BYTES, WORKLOADS, Workload};

/// Count what synchronous writes cost the host: flushes, writes and bytes, for each format of Vellum and QEMU
///
/// One guest waits for each answer. The first 64 operations do not count; then each line tells what the guest asked (w, f) and
/// what the host was asked for it: flushes of the file (F), writes to it (W), KiB written, calls that punch a hole or zero a
/// range (H), and how many times the guest's own that is.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// 32 operations of each workload
    #[arg(long)]
    quick: bool,
    /// Operations that count [default: 256, quick: 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    operations: Option<u16>,
    /// Where images and sockets are made; beside this program when not given
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Only workloads whose name contains TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Vellum alone
    #[arg(long)]
    skip_peers: bool,
    /// The vellum to look at
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
    /// What goes to stdout: the table, or all counts as JSON (the table goes to stderr then)
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
    /// Name the workloads and do nothing
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
    rows: Vec<Row>,
}

/// What both witnesses said of one run of Vellum.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Confirmation {
    subject: &'static str,
    workload: &'static str,
    stats: Counts,
    strace: Counts,
}

/// Who counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Witness {
    Stats,
    Strace,
    Both,
}

/// What stays the same for all images.
struct Bench {
    dir: PathBuf,
    vellum: Vellum,
    count: usize,
    /// Why there is no `strace`.
    blind: Option<String>,
    /// Why there is no QEMU.
    no_qemu: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted = |workload: &&Workload| {
        args.only.is_empty() || args.only.iter().any(|text| workload.id.contains(text.as_str()))
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
    let count = args.operations.map_or(if args.quick { 32 } else { 256 }, usize::from);
    let vellum = args.vellum.clone().map_or_else(Vellum::beside_me, Ok)?;
    let mut programs = vec![vellum.version()?];
    let mut version = |command: &mut Command| match first_line_of(command) {
        Ok(version) => {
            programs.push(version);
            None
        }
        Err(error) => Some(error.chain()),
    };
    let blind = version(Command::new("strace").arg("--version"));
    let no_qemu = version(Command::new("qemu-img").arg("--version"))
        .or_else(|| version(Command::new("qemu-nbd").arg("--version")));
    let dir = dir_or_beside_me(args.dir.as_ref())?.join(format!("vellum-bench-{}", std::process::id()));
    fs::create_dir_all(&dir).context(|| format!("can't make {}", dir.display()))?;
    // As the kernel names it: paths in a trace are compared with it.
    let dir = dir.canonicalize().context(|| format!("can't find {}", dir.display()))?;
    let bench = Bench { dir, vellum, count, blind, no_qemu };
    let machine = Machine::with(&bench.dir);
    table
        .say(&format!("{count} operations after 64; images on {}; Linux {}", machine.medium, machine.kernel));
    programs.iter().for_each(|program| table.say(program));
    if workloads.iter().any(|workload| workload.on_base) {
        images::write_raw(&bench.base(), BASE_BYTES).context(|| "can't write the base")?;
    }
    let mut outcomes = Vec::new();
    for workload in &workloads {
        table.say("");
        table.say(&format!("{}: {}", workload.id, workload.title));
        head().iter().for_each(|line| table.say(line));
        let subjects = SUBJECTS.iter().filter(|subject| {
            subject.takes(workload) && (subject.maker == Maker::Vellum || !args.skip_peers)
        });
        let mut rows = Vec::new();
        for subject in subjects {
            let row = bench.row(subject, workload)?;
            table.say(&line(&row));
            rows.push(row);
        }
        outcomes.push(Outcome { workload: workload.id, title: workload.title, rows });
    }
    table.say("");
    tell_reasons(&outcomes, table);
    let confirmations = bench.confirm(&workloads, table)?;
    if args.output == Output::Json {
        let unix_seconds = now_us() / 1_000_000;
        let report =
            Report { unix_seconds, machine, operations: count, programs, workloads: outcomes, confirmations };
        say_json(&report);
    }
    Ok(())
}

/// Microseconds since 1970, as `strace -ttt` tells the time.
fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// Why formats were left out, each reason once.
fn tell_reasons(outcomes: &[Outcome], table: Table) {
    let mut told: Vec<String> = Vec::new();
    for row in outcomes.iter().flat_map(|outcome| &outcome.rows) {
        if let Some(reason) = &row.skipped {
            let reason = format!("skipped: {}: {reason}", row.subject);
            if !told.contains(&reason) {
                table.say(&reason);
                told.push(reason);
            }
        }
    }
}

/// What the guest asks of these requests.
fn asked(requests: &[Request]) -> Guest {
    let mut guest = Guest::default();
    for request in requests {
        match request {
            Request::Write { len, .. } => {
                guest.writes += 1;
                guest.bytes_written += *len as u64;
            }
            Request::Discard { .. } => guest.discards += 1,
            Request::Flush => guest.flushes += 1,
        }
    }
    guest
}

impl Bench {
    fn base(&self) -> PathBuf {
        self.dir.join("base.raw")
    }

    /// Counts for one format; a format of QEMU that cannot be counted is told with its reason.
    fn row(&self, subject: &Subject, workload: &Workload) -> Result<Row> {
        let witness = if subject.maker == Maker::Qemu { Witness::Strace } else { Witness::Stats };
        let mut row = Row {
            subject: subject.name,
            witness: if witness == Witness::Strace { "strace" } else { "stats" },
            guest: asked(&workload.plan(self.count).counted),
            host: None,
            skipped: None,
        };
        if subject.maker == Maker::Qemu {
            row.skipped = self.no_qemu.clone().or_else(|| self.blind.clone());
            if row.skipped.is_some() {
                return Ok(row);
            }
        }
        match self.count(subject, workload, witness) {
            Ok((host, _)) => row.host = Some(host),
            Err(error) if subject.maker == Maker::Qemu => row.skipped = Some(error.chain()),
            Err(error) => return Err(error).context(|| format!("{} at {}", subject.name, workload.id)),
        }
        Ok(row)
    }

    /// Makes an image, does the workload, closes it. With two witnesses the second is `strace`.
    fn count(
        &self,
        subject: &Subject,
        workload: &Workload,
        witness: Witness,
    ) -> Result<(Host, Option<Host>)> {
        let plan = workload.plan(self.count);
        let path = |name: &str| self.dir.join(name);
        let (image, socket) = (path(&format!("image.{}", subject.format)), path("nbd.sock"));
        let (figures, log) = (path("stats.json"), path("trace"));
        for old in [&image, &figures, &log] {
            match fs::remove_file(old) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io(error, format!("can't remove {}", old.display())));
                }
                _ => {}
            }
        }
        let base = self.base();
        let base = workload.on_base.then_some(base.as_path());
        subject.make(&self.vellum.path, &image, plan.disk_bytes, base)?;
        let cache = Cache::Buffered;
        let serving =
            Serving { image: &image, format: subject.format, cache, connections: 1, socket: &socket };
        let mut command = match subject.maker {
            Maker::Vellum => self.our_server(&figures, witness).command(&serving)?,
            Maker::Qemu => QemuNbd::VISIBLE.command(&serving)?,
        };
        if witness != Witness::Stats {
            command = strace::watched(&command, &log);
        }
        let running = Running::start_command(command, &serving)?;
        let pid = running.pid();
        let mut client = Client::connect(running.socket())?;
        let mut marks = Vec::new();
        for requests in [&plan.before, &plan.counted] {
            for request in requests {
                client.ask(*request)?;
            }
            let at = now_us();
            let counts = if witness == Witness::Strace {
                Counts::default()
            } else {
                // Figures that know of this read were taken after the last answer.
                client.read_a_block()?;
                stats::read_after(&figures, marks.len() as u64 + 1)?
            };
            marks.push((at, counts));
        }
        client.leave()?;
        running.stop()?;
        let [(begun, before), (ended, after)] = marks[..] else { unreachable!("two spans") };
        let of_stats = || -> Result<Host> {
            let total = stats::read(&figures)? - before;
            Ok(Host { foreground: after - before, total })
        };
        let of_strace = || -> Result<Host> {
            let calls = strace::read(&log, pid, &self.dir)?;
            let until = |end| strace::sum(&calls, begun, end);
            Ok(Host { foreground: until(ended), total: until(u64::MAX) })
        };
        Ok(match witness {
            Witness::Stats => (of_stats()?, None),
            Witness::Strace => (of_strace()?, None),
            Witness::Both => (of_stats()?, Some(of_strace()?)),
        })
    }

    /// Vellum, which writes its figures to this file; without a ring when it is watched.
    fn our_server(&self, figures: &Path, witness: Witness) -> Vellum {
        let mut vellum = self.vellum.clone();
        vellum.arguments.extend(["--stats-json".into(), figures.into()]);
        if witness != Witness::Stats {
            vellum.arguments.extend(["--io".into(), "threads".into()]);
        }
        vellum
    }

    /// Each of our formats once with both witnesses, at the first workload that is one for it.
    fn confirm(&self, workloads: &[&Workload], table: Table) -> Result<Vec<Confirmation>> {
        if let Some(reason) = &self.blind {
            table.say(&format!("skipped: what Vellum counts is not confirmed: {reason}"));
            return Ok(Vec::new());
        }
        let mut all = Vec::new();
        for subject in SUBJECTS.iter().filter(|subject| subject.maker == Maker::Vellum) {
            let Some(workload) = workloads.iter().find(|workload| subject.takes(workload)) else {
                continue;
            };
            let (Host { total: stats, .. }, Some(Host { total: strace, .. })) =
                self.count(subject, workload, Witness::Both)?
            else {
                return Err(Error::new(ErrorKind::NotFound, "strace said nothing"));
            };
            let confirmed = if stats == strace {
                format!("strace counted the same: {} flushes, {} writes", stats.flushes, stats.writes)
            } else {
                complain(&format!("{}: strace and the statistics differ", subject.name));
                format!("strace DIFFERS: {strace:?}, its own {stats:?}")
            };
            table.say(&format!("{}, {}: {confirmed}", subject.name, workload.id));
            all.push(Confirmation { subject: subject.name, workload: workload.id, stats, strace });
        }
        Ok(all)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.dir));
    }
}
