//! One row: an image is made, a workload done, the image closed, and what that cost is counted.
//!
//! ```text
//!   make ► (serve, fill, stop) ► (snapshot) ► serve ► 64 operations │ those that count │ stop: the image is closed
//!                                                                   └── foreground ──┘
//!                                                                   └───────────── total ──────────────┘
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::SystemTime;

use vellum_core::{Context, Error, ErrorKind, Result};

use super::subjects::{Maker, SUBJECTS, Subject, Tools};
use super::workloads::{Below, Workload};
use crate::cost::{Counts, stats, strace};
use crate::images;
use crate::load::guest::{Guest as Client, Request};
use crate::report::amplification::{Guest, Host, Row};
use crate::server::{Cache, QemuNbd, Running, Server, Serving, Vellum};

/// Who counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Witness {
    Stats,
    Strace,
    Both,
}

/// What stays the same for all rows.
pub(super) struct Bench {
    pub(super) dir: PathBuf,
    pub(super) vellum: Vellum,
    pub(super) knows_journal: bool,
    /// Operations that count.
    pub(super) operations: usize,
    /// Why there is no `strace`.
    pub(super) blind: Option<String>,
    /// Why there is no QEMU.
    pub(super) no_qemu: Option<String>,
    /// Whether each row of ours is seen by both witnesses.
    pub(super) confirms_all: bool,
    /// Why subjects are left out, in their order.
    pub(super) refusals: Vec<Option<String>>,
}

/// A row, and what both witnesses say of it to the clean close: Vellum itself, and `strace`.
pub(super) struct Counted {
    pub(super) row: Row,
    pub(super) said: Option<(Counts, Counts)>,
}

/// The files of one worker, who counts one row at a time.
struct Desk {
    dir: PathBuf,
    image: PathBuf,
    socket: PathBuf,
    figures: PathBuf,
    trace: PathBuf,
}

impl Desk {
    fn new(dir: PathBuf, format: &str) -> Result<Self> {
        drop(fs::remove_dir_all(&dir));
        fs::create_dir(&dir).context(|| format!("can't make {}", dir.display()))?;
        let path = |name: &str| dir.join(name);
        let image = path(&format!("image.{format}"));
        let (socket, figures, trace) = (path("nbd.sock"), path("stats.json"), path("trace"));
        Ok(Self { dir, image, socket, figures, trace })
    }
}

/// Microseconds since 1970, as `strace -ttt` tells the time.
fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// What guests ask with these requests.
fn asked(requests: &[Vec<Request>]) -> Guest {
    let mut guest = Guest::default();
    for request in requests.iter().flatten() {
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

/// All guests at once, each waiting for its answers.
fn ask_all(clients: &mut [Client], requests: &[Vec<Request>]) -> Result<()> {
    thread::scope(|scope| {
        let guests: Vec<_> = clients
            .iter_mut()
            .zip(requests)
            .map(|(client, requests)| {
                scope.spawn(|| requests.iter().try_for_each(|request| client.ask(*request)))
            })
            .collect();
        guests.into_iter().try_for_each(|guest| guest.join().expect("guests do not panic"))
    })
}

/// What was counted up to a moment.
#[derive(Clone, Copy)]
struct Mark {
    at_us: u64,
    stats: stats::Figures,
}

impl Bench {
    pub(super) fn tools(&self) -> Tools<'_> {
        Tools { vellum: &self.vellum.path, knows_journal: self.knows_journal }
    }

    pub(super) fn base(&self) -> PathBuf {
        self.dir.join("base.raw")
    }

    /// Counts for one format, with the files of one worker. A format that cannot be looked at is told with its reason; a
    /// plain image of ours that fails is an error.
    pub(super) fn row(&self, subject: usize, workload: &Workload, worker: usize) -> Result<Counted> {
        let refusal = &self.refusals[subject];
        let subject = &SUBJECTS[subject];
        let witness = match subject.maker {
            Maker::Qemu => Witness::Strace,
            Maker::Vellum if self.confirms_all && self.blind.is_none() => Witness::Both,
            Maker::Vellum => Witness::Stats,
        };
        let needs_qemu = subject.maker == Maker::Qemu || workload.below == Below::Snapshot;
        let mut row = Row {
            subject: subject.name,
            witness: if witness == Witness::Stats { "stats" } else { "strace" },
            guest: asked(&workload.plan(self.operations).counted),
            host: None,
            skipped: refusal.clone(),
        };
        if row.skipped.is_none() && needs_qemu {
            row.skipped.clone_from(&self.no_qemu);
        }
        if row.skipped.is_none() && witness == Witness::Strace {
            row.skipped.clone_from(&self.blind);
        }
        let mut said = None;
        if row.skipped.is_none() {
            match self.count(subject, workload, witness, worker) {
                // Of two, the one is told that knows when each call began.
                Ok((host, strace)) => {
                    row.host = strace.or(Some(host));
                    said = strace.map(|strace| (host.total, strace.total));
                }
                Err(error) if subject.maker == Maker::Qemu => row.skipped = Some(error.chain()),
                Err(error) => return Err(error).context(|| format!("{} at {}", subject.name, workload.id)),
            }
        }
        Ok(Counted { row, said })
    }

    /// Makes an image, does the workload, closes it. With two witnesses the second is `strace`.
    pub(super) fn count(
        &self,
        subject: &Subject,
        workload: &Workload,
        witness: Witness,
        worker: usize,
    ) -> Result<(Host, Option<Host>)> {
        let plan = workload.plan(self.operations);
        let desk = Desk::new(self.dir.join(worker.to_string()), subject.format)?;
        let base = (workload.below == Below::Base).then(|| self.base());
        subject.make(self.tools(), &desk.image, plan.disk_bytes, base.as_deref())?;
        let serving = Serving {
            image: &desk.image,
            format: subject.format,
            cache: Cache::Buffered,
            connections: workload.guests,
            socket: &desk.socket,
        };
        let server: &dyn Server = match subject.maker {
            Maker::Vellum => &self.our_server(&desk.figures, witness),
            Maker::Qemu => &QemuNbd::VISIBLE,
        };
        if !plan.fill.is_empty() {
            let running = Running::start(server, &serving)?;
            let mut client = Client::connect(running.socket())?;
            plan.fill.iter().try_for_each(|request| client.ask(*request))?;
            client.leave()?;
            running.stop()?;
            drop(fs::remove_file(&desk.figures)); // those of the server that has ended
        }
        if workload.below == Below::Snapshot {
            images::run(Command::new("qemu-img").args(["snapshot", "-q", "-c", "s"]).arg(&desk.image))?;
        }
        let mut command = server.command(&serving)?;
        if witness != Witness::Stats {
            command = strace::watched(&command, &desk.trace);
        }
        let running = Running::start_command(command, &serving)?;
        let pid = running.pid();
        let connect = |_| Client::connect(running.socket());
        let mut clients = (0..workload.guests).map(connect).collect::<Result<Vec<_>>>()?;
        let mark = |clients: &mut [Client], number: u64| {
            let at_us = now_us();
            let stats = if witness == Witness::Strace {
                stats::Figures::default()
            } else {
                // Figures that know of this read were taken after the last answer.
                clients[0].read_a_block()?;
                stats::read_after(&desk.figures, number)?
            };
            Ok(Mark { at_us, stats })
        };
        plan.warm_up.iter().try_for_each(|request| clients[0].ask(*request))?;
        let begun = mark(&mut clients, 1)?;
        ask_all(&mut clients, &plan.counted)?;
        let ended = mark(&mut clients, 2)?;
        clients.into_iter().try_for_each(Client::leave)?;
        running.stop()?;
        let of_stats = || -> Result<Host> {
            let closed = stats::read(&desk.figures)?;
            let (begun, ended) = (begun.stats, ended.stats);
            Ok(Host { foreground: ended.foreground - begun.foreground, total: closed.total - begun.total })
        };
        let of_strace = || -> Result<Host> {
            let calls = strace::read(&desk.trace, pid, &desk.dir)?;
            let until = |end_us| strace::sum(&calls, begun.at_us, end_us);
            Ok(Host { foreground: until(ended.at_us), total: until(u64::MAX) })
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
        // For the base, which is not beside the image.
        vellum.arguments.extend(["--allow-dir".into(), self.dir.clone().into()]);
        if witness != Witness::Stats {
            vellum.arguments.extend(["--io".into(), "threads".into()]);
        }
        vellum
    }

    /// What both witnesses say of one run.
    pub(super) fn both(&self, subject: &Subject, workload: &Workload, worker: usize) -> Result<(Host, Host)> {
        let (stats, strace) = self.count(subject, workload, Witness::Both, worker)?;
        let strace = strace.ok_or_else(|| Error::new(ErrorKind::NotFound, "strace said nothing"))?;
        Ok((stats, strace))
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.dir));
    }
}
