//! `vellum-bench neighbours`: how load on one disk of a server affects another disk, and the cost of a
//! thousand clones.
//!
//! ```text
//!   for each case      one server, two disks: the victim's, and the attacker's
//!     for each round     quiet: the victim reads alone ► the attacker begins ► beside: the victim reads ► the attacker ends
//!   fleet              clones of one template in one server: start, stop, start after SIGKILL, memory, idle
//! ```
//!
//! The victim reads (or writes) 4 KiB at random offsets, one request at a time, so each of its figures is a
//! time that a guest waits. Quiet and loaded phases are of the same server and alternate, so that both halves
//! of a ratio meet the same machine. The bound is the project's own: the 99th percentile stays under three
//! times that of the quiet phase, or 2 ms if that is more.

mod attack;
mod fleet;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use vellum_core::{Context, Error, Random, Result};
use vellum_lab::guest::{Guest, Request};
use vellum_lab::programs::{self, dir_or_beside_me};
use vellum_lab::report::{Output, Table, complain, say_json};
use vellum_lab::server::{Running, Server, Vellum};

use super::parse_size;
use crate::host::{Machine, resident};
use crate::images::{Image, Images};
use crate::load::latency::Latency;
use crate::load::pattern::{Load, Pattern};
use crate::load::{Timing, vhost};
use crate::report::short;
use attack::{Attack, Kind, Target};

const BLOCK: u64 = 4096;
/// Within this time an attacker has begun.
const RUN_UP: Duration = Duration::from_millis(300);
/// What the bound allows in any case, in microseconds.
const BOUND_US: f64 = 2000.0;
const BOUND_TIMES: f64 = 3.0;

/// Measure how a hostile client affects another disk, then serve 1000 clones
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seconds of each measurement: without and with the attacker
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// Number of rounds of each case
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Size of the victim's disk and of the attacker's full one, in whole MiB
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    size: u64,
    /// Let the victim write instead of read
    #[arg(long)]
    victim_writes: bool,
    /// Number of clones to serve at the end; 0 skips this part
    #[arg(long, value_name = "N", default_value_t = 1000)]
    clones: u32,
    /// Run only the cases whose names contain TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Directory for images and sockets. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// vellum program to measure, optionally with extra arguments for `serve`
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
    program: String,
    seconds: f64,
    victim_writes: bool,
    cases: Vec<Outcome>,
    skipped: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fleet: Option<fleet::Fleet>,
}

/// A row.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Outcome {
    case: &'static str,
    quiet: Times,
    beside: Times,
    bound_us: f64,
    is_held: bool,
    /// Of the server, at the end of the last window.
    resident_bytes: u64,
    /// Why the victim got no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

/// What the victim waited, in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Times {
    requests: u64,
    median_us: f64,
    p99_us: f64,
    max_us: f64,
}

impl Times {
    fn of(latency: &Latency, requests: u64) -> Self {
        let [median_us, p99_us, max_us] = [50.0, 99.0, 100.0].map(|percent| latency.percentile(percent));
        Self { requests, median_us, p99_us, max_us }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let table = Table::to(args.output);
    let wanted =
        |attack: &Attack| args.only.is_empty() || args.only.iter().any(|text| attack.id.contains(text));
    let attacks: Vec<Attack> = Attack::all().into_iter().filter(wanted).collect();
    if args.list {
        attacks.iter().for_each(|attack| table.say(attack.id));
        return Ok(());
    }
    if attacks.is_empty() && args.clones == 0 {
        return Err(Error::invalid("no case has such a name: see --list"));
    }
    if args.size == 0 || !args.size.is_multiple_of(1 << 20) {
        return Err(Error::invalid("--size is in whole MiB, at least 1M"));
    }
    let window = Duration::try_from_secs_f64(args.seconds).ok().filter(|window| !window.is_zero());
    let window = window.ok_or_else(|| Error::invalid("--seconds is a number above 0"))?;
    let dir = dir_or_beside_me(args.dir.as_ref())?;
    let vellum = match &args.vellum {
        Some(vellum) => vellum.clone(),
        None => Vellum::beside_me()?,
    };
    let stage = Stage::make(&dir, args, vellum)?;
    let machine = Machine::with(&dir);
    table.say(&format!(
        "Linux {}, {} processors, {}; {} x {} s quiet and beside; µs of a 4 KiB {}: median / p99 / slowest",
        machine.kernel,
        machine.processors,
        machine.medium,
        args.rounds,
        args.seconds,
        if args.victim_writes { "write" } else { "read" },
    ));
    let program = stage.vellum.version()?;
    table.say(&program);
    let (mut cases, mut skipped) = (Vec::new(), Vec::new());
    for attack in &attacks {
        if let Some(reason) = stage.lacks(attack) {
            complain(&format!("skipped: {}: {reason}", attack.id));
            skipped.push(format!("{}: {reason}", attack.id));
            continue;
        }
        let outcome = stage.measure(attack, args.rounds, window).context(|| attack.id)?;
        table.say(&line(&outcome));
        cases.push(outcome);
    }
    let fleet = match args.clones {
        0 => None,
        clones => {
            Some(fleet::measure(stage.images.dir(), &stage.vellum, clones, window).context(|| "fleet")?)
        }
    };
    if let Some(fleet) = &fleet {
        fleet.lines().iter().for_each(|line| table.say(line));
    }
    let held = cases.iter().filter(|case| case.is_held).count();
    table.say(&format!("{held} of {} cases within the bound", cases.len()));
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let unix_seconds = now.as_secs();
        let (seconds, victim_writes) = (args.seconds, args.victim_writes);
        say_json(&Report { unix_seconds, machine, program, seconds, victim_writes, cases, skipped, fleet });
    }
    Ok(())
}

fn line(outcome: &Outcome) -> String {
    let times = |times: &Times| {
        format!("{} / {} / {}", short(times.median_us), short(times.p99_us), short(times.max_us))
    };
    let verdict = match (&outcome.failed, outcome.is_held) {
        (Some(reason), _) => format!("NO ANSWER: {reason}"),
        (None, true) => "within the bound".to_owned(),
        (None, false) => format!("over the bound of {} µs", short(outcome.bound_us)),
    };
    format!(
        "  {:<20} quiet {:<24} beside {:<28} {:>7} requests, {:>5} MiB; {verdict}",
        outcome.case,
        times(&outcome.quiet),
        times(&outcome.beside),
        outcome.beside.requests,
        outcome.resident_bytes >> 20,
    )
}

/// The disks, in a directory that is removed when dropped.
struct Stage {
    images: Images,
    vellum: Vellum,
    size: u64,
    victim_writes: bool,
}

/// A second server, whose disk is a file of the host, and which can be stopped in its tracks.
struct Brake {
    server: Running,
    file: PathBuf,
}

impl Brake {
    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.server.pid()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Error::invalid("a server without a number"))?;
        kill_process(pid, signal)
            .map_err(|error| Error::io(error.into(), "can't signal the server of the file"))
    }
}

impl Drop for Brake {
    fn drop(&mut self) {
        drop(self.signal(Signal::CONT));
    }
}

impl Stage {
    fn make(dir: &Path, args: &Args, vellum: Vellum) -> Result<Self> {
        let images = Images::make(dir, args.size, &vellum.path)?;
        let stage = Self { images, vellum, size: args.size, victim_writes: args.victim_writes };
        for (name, format) in [("empty.qcow2", "qcow2"), ("empty.vlm", "vellum")] {
            let mut create = Command::new(&stage.vellum.path);
            create.args(["create", "-q", "-f", format]).arg(stage.images.dir().join(name)).arg("4T");
            programs::run(&mut create)?;
        }
        Ok(stage)
    }

    /// What this host lacks for a case.
    fn lacks(&self, attack: &Attack) -> Option<&'static str> {
        let hangs = attack.target == Target::Hung;
        if hangs && !rustix::process::geteuid().is_root() {
            return Some("a disk as a file takes root");
        }
        (hangs && !Path::new("/dev/fuse").exists()).then_some("there is no /dev/fuse")
    }

    /// All rounds of a case.
    fn measure(&self, attack: &Attack, rounds: u32, window: Duration) -> Result<Outcome> {
        let dir = self.images.dir();
        let full = dir.join("full.qcow2");
        fs::copy(self.images.path(Image::Qcow2), &full).context(|| "can't copy the attacker's disk")?;
        let brake = if attack.target == Target::Hung { Some(self.brake(&full)?) } else { None };
        let other = match attack.target {
            Target::EmptyQcow2 => dir.join("empty.qcow2"),
            Target::EmptyNative => dir.join("empty.vlm"),
            Target::Full => full,
            Target::Hung => brake.as_ref().map(|brake| brake.file.clone()).expect("it was made for this"),
        };
        let server = self.serve(&other)?;
        let (mut quiet, mut beside) = ((Latency::default(), 0), (Latency::default(), 0));
        let (mut failed, mut resident_bytes) = (None, 0);
        for round in 0..rounds {
            let connects_anew = matches!(attack.kind, Kind::Strangers { .. });
            self.victim(server.socket(), window, connects_anew, round.into(), &mut quiet)
                .context(|| "the victim, quiet")?;
            brake.as_ref().map_or(Ok(()), |brake| brake.signal(Signal::STOP))?;
            let seen = self.beside(attack, &server, window, || {
                let seen = self.victim(server.socket(), window, connects_anew, round.into(), &mut beside);
                resident_bytes = resident(server.pid())?;
                seen
            });
            brake.as_ref().map_or(Ok(()), |brake| brake.signal(Signal::CONT))?;
            if let Err(error) = seen {
                failed = Some(error.chain().to_string());
                break;
            }
        }
        let (quiet, beside) = (Times::of(&quiet.0, quiet.1), Times::of(&beside.0, beside.1));
        let bound_us = (quiet.p99_us * BOUND_TIMES).max(BOUND_US);
        let is_held = failed.is_none() && beside.p99_us <= bound_us;
        if failed.is_none() {
            server.stop()?;
        }
        Ok(Outcome { case: attack.id, quiet, beside, bound_us, is_held, resident_bytes, failed })
    }

    /// Does something while the attackers of a case are at work.
    fn beside(
        &self,
        attack: &Attack,
        server: &Running,
        window: Duration,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let is_over = AtomicBool::new(false);
        let clients = match attack.kind {
            Kind::Quiet | Kind::Machine { .. } => 0,
            Kind::Storm { connections, .. }
            | Kind::NotTaken { connections }
            | Kind::HalfSent { connections } => connections,
            Kind::Strangers { sockets } => sockets,
        };
        thread::scope(|scope| {
            for seed in 0..clients as u64 {
                let is_over = &is_over;
                scope.spawn(move || attack::client(attack.kind, server.socket(), "other", seed + 1, is_over));
            }
            let machine = match attack.kind {
                Kind::Machine { depth } => {
                    let load = Load { pattern: Pattern::Read, depth, queues: 1 };
                    let timing = Timing { warm_up: RUN_UP, window };
                    let socket = self.images.dir().join("machine");
                    Some(scope.spawn(move || vhost::run(server.pid(), &socket, self.size, &load, timing, 1)))
                }
                _ => None,
            };
            thread::sleep(RUN_UP);
            let seen = work();
            is_over.store(true, Ordering::Relaxed);
            if let Some(machine) = machine {
                machine.join().expect("a machine does not panic").context(|| "the machine")?;
            }
            seen
        })
    }

    /// Serves the victim's disk and the attacker's.
    fn serve(&self, other: &Path) -> Result<Running> {
        let socket = self.images.dir().join("nbd");
        drop(fs::remove_file(&socket));
        let named = |name: &str, path: &Path| format!("{name}={}", path.display());
        let mut command = Command::new(&self.vellum.path);
        command.args(["serve", "--quiet"]).args(&self.vellum.arguments);
        command.args(["--export", &named("victim", &self.images.path(Image::Qcow2))]);
        command.args(["--export", &named("other", other), "--nbd", &format!("unix:{}", socket.display())]);
        command.args(["--vhost-user-blk", &named("other", &self.images.dir().join("machine"))]);
        Running::start_until(command, &socket, || Guest::connect_to(&socket, "victim").is_ok())
    }

    /// Asks for one block after the other for this long, and notes what each took.
    fn victim(
        &self,
        socket: &Path,
        window: Duration,
        connects_anew: bool,
        seed: u64,
        (seen, count): &mut (Latency, u64),
    ) -> Result<()> {
        let mut random = Random::from_seed(seed);
        let connect = || Guest::connect_to(socket, "victim");
        let mut guest = connect()?;
        let begun = Instant::now();
        while begun.elapsed() < window {
            let offset = random.below(self.size / BLOCK) * BLOCK;
            let asked = Instant::now();
            if connects_anew {
                guest = connect()?;
            }
            guest.ask(match self.victim_writes {
                true => Request::Write { offset, len: 4096 },
                false => Request::Read { offset, len: 4096 },
            })?;
            seen.note(u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX));
            *count += 1;
        }
        guest.leave()
    }

    /// Shows the bytes of an image as a file of the host whose server can be stopped.
    fn brake(&self, image: &Path) -> Result<Brake> {
        let file = self.images.dir().join("hung.qcow2");
        let mut command = Command::new(&self.vellum.path);
        command.args(["serve", "--quiet", "--format", "raw", "--fuse"]).arg(&file).arg(image);
        let size = fs::metadata(image).context(|| "can't look at the attacker's disk")?.len();
        let is_there = || fs::metadata(&file).is_ok_and(|file| file.len() == size);
        Ok(Brake { server: Running::start_until(command, &file, is_there)?, file })
    }
}
