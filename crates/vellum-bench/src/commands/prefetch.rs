//! `vellum-bench prefetch`: what prefetching costs a busy guest, and how fast it is beside an idle one.
//!
//! ```text
//!   pairs     for each load    in each round   paused │ running   and the next round   running │ paused
//!   course    idle ► the guest works ► idle ► detached          the rate, ten times a second, as a plot
//! ```
//!
//! The base is a raw file on the same disk as the image: guest and prefetcher share the drive, which is the worst case. The guest
//! works on the first part of its disk, which the image has already, so that its requests cost the same in each window; the
//! prefetcher works on the rest. Each round gives one ratio, from two windows that follow each other.

mod plot;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde_json::Value;
use vellum_core::{Context, Error, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::guest::{Guest, Request, filler};
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::{Running, Vellum};

use super::parse_size;
use crate::host::Machine;
use crate::images::{prepare, write_raw};
use crate::load::workload::{BLOCK, Operation, Order, Workload, stamp};
use crate::load::{self, Sample, Target, Timing};
use crate::report::{median, spread_percent};
use plot::{Phase, Point};

const PIECE: u64 = 1 << 20;
/// Between two points of the course.
const EVERY: Duration = Duration::from_millis(100);
/// A rate is that of this many points.
const SMOOTH: usize = 10;
/// If the image is not detached after so long, it will not be.
const PATIENCE: Duration = Duration::from_secs(600);
/// Exports of this name share nothing but the server's process.
const LIMIT: &str = "base-max";

/// Compare a busy guest's throughput with prefetching paused and running, and plot the rate of prefetching
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the disk, in whole MiB
    #[arg(long, value_name = "SIZE", default_value = "3G", value_parser = parse_size)]
    size: u64,
    /// The guest's part of the disk, in whole MiB
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    part: u64,
    /// Requests in flight
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..))]
    in_flight: u8,
    /// Seconds of each window
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    seconds: f64,
    /// Number of rounds, of two windows each
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Limit of prefetching in the plotted course, in bytes a second, so that it lasts
    #[arg(long, value_name = "SIZE", default_value = "96M", value_parser = parse_size)]
    course_limit: u64,
    /// Write the plot of the course there
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Directory for images and sockets. Default: the directory of this program
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// vellum program to measure. Default: the one beside this program
    #[arg(long, value_name = "PATH [ARGUMENT ...]", value_parser = Vellum::parse)]
    vellum: Option<Vellum>,
    /// Output format on stdout; with json, the table goes to stderr
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Output::Human)]
    output: Output,
}

/// What the guest of the pairs does.
const LOADS: [(&str, Operation); 2] =
    [("random reads", Operation::Read), ("random writes", Operation::Write)];

/// One load.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Pairs {
    load: &'static str,
    paused: Vec<Sample>,
    running: Vec<Sample>,
    /// Copied in the windows in which it ran, in bytes.
    prefetched_bytes: u64,
    /// What the guest kept of its throughput, one ratio for each round.
    kept: Vec<f64>,
}

/// The plotted course.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Course {
    limit: u64,
    phases: Vec<Phase>,
    points: Vec<Point>,
    seconds_to_detached: f64,
    /// The same without a limit and without a guest.
    seconds_alone: f64,
    bytes: u64,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    pairs: Vec<Pairs>,
    course: Course,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let whole = |bytes: u64| bytes > 0 && bytes.is_multiple_of(PIECE);
    if !whole(args.size) || !whole(args.part) || args.part >= args.size {
        return Err(Error::invalid(
            "--size and --part are in whole MiB, and the part is smaller than the disk",
        ));
    }
    let window = Duration::try_from_secs_f64(args.seconds).ok().filter(|window| !window.is_zero());
    let window = window.ok_or_else(|| Error::invalid("--seconds is a number above 0"))?;
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let machine = Machine::with(&lab.dir);
    let table = Table::to(args.output);
    table.say(&format!(
        "disk of {} MiB over a raw file, the guest's part {} MiB; 4 KiB, {} in flight; {} rounds of 2 x {} s; Linux {}, {} \
         processors, {}",
        args.size >> 20,
        args.part >> 20,
        args.in_flight,
        args.rounds,
        args.seconds,
        machine.kernel,
        machine.processors,
        machine.medium
    ));
    lab.programs.iter().take(1).for_each(|program| table.say(program));
    let base = lab.dir.join("base.raw");
    write_raw(&base, args.size).context(|| format!("can't write {}", base.display()))?;
    let mut pairs = Vec::new();
    for (load, operation) in LOADS {
        let seen = measure_pairs(&lab, &base, args, load, operation, window).context(|| load)?;
        let last: f64 = seen.running.iter().map(|sample| sample.seconds).sum();
        table.say(&format!(
            "{load:<14} keeps {:.3} of its throughput (±{:.1}%, {:.3} to {:.3}); {:.0} operations/s paused; prefetched {:.1} MiB/s",
            median(seen.kept.iter().copied()),
            spread_percent(seen.kept.iter().copied()),
            seen.kept.iter().copied().fold(f64::INFINITY, f64::min),
            seen.kept.iter().copied().fold(0.0, f64::max),
            median(seen.paused.iter().map(Sample::per_second)),
            seen.prefetched_bytes as f64 / f64::from(1 << 20) / last
        ));
        pairs.push(seen);
    }
    let course = measure_course(&lab, &base, args)?;
    course.phases.iter().for_each(|phase| {
        table.say(&format!(
            "{:<14} {:>5.1} s, prefetched {:.1} MiB/s",
            phase.name,
            phase.to - phase.from,
            plot::rate_in(&course.points, phase) / f64::from(1 << 20)
        ));
    });
    table.say(&format!(
        "detached after {:.1} s with these phases and a limit of {} MiB/s; alone and without a limit: {:.0} MiB in {:.1} s",
        course.seconds_to_detached,
        course.limit >> 20,
        course.bytes as f64 / f64::from(1 << 20),
        course.seconds_alone
    ));
    if let Some(file) = &args.svg {
        fs::write(file, plot::svg(&course.points, &course.phases))
            .context(|| format!("can't write {}", file.display()))?;
    }
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (unix_seconds, programs) = (now.as_secs(), lab.programs.clone());
        say_json(&Report { unix_seconds, machine, programs, pairs, course });
    }
    Ok(())
}

/// A served clone, in whose image the guest's part is.
struct Clone<'a> {
    lab: &'a Lab,
    running: Running,
    control: PathBuf,
}

impl<'a> Clone<'a> {
    /// Prefetching is paused.
    fn serve(lab: &'a Lab, base: &Path, part: u64, more: &[String]) -> Result<Self> {
        let dir = lab.dir.join("clone");
        drop(fs::remove_dir_all(&dir));
        fs::create_dir(&dir).context(|| format!("can't make {}", dir.display()))?;
        let [image, socket, control] = ["clone.qcow2", "nbd.sock", "control"].map(|name| dir.join(name));
        let mut create = Command::new(&lab.vellum.path);
        create.args(["create", "-q", "-f", "qcow2", "-b"]).arg(base).args(["-F", "raw"]).arg(&image);
        programs::run(&mut create)?;
        let mut serve = Command::new(&lab.vellum.path);
        serve.args(["serve", "-q", "--nbd"]).arg(format!("unix:{}", socket.display()));
        serve.arg("--allow-dir").arg(&lab.dir).arg("--control").arg(&control);
        serve.args(&lab.vellum.arguments).args(more).arg(&image);
        let serves = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
        let running = Running::start_until(serve, &socket, serves)?;
        let clone = Self { lab, running, control };
        let mut guest = Guest::connect(&socket)?;
        let mut bytes = filler(usize::try_from(PIECE).expect("short"));
        for at in (0..part).step_by(bytes.len()) {
            stamp(&mut bytes, at);
            guest.write(at, &bytes)?;
        }
        guest.ask(Request::Flush)?;
        guest.leave()?;
        // Nothing of either file is in large folios of the page cache, where overwrites are slow.
        prepare(&image, false)?;
        prepare(base, false)?;
        Ok(clone)
    }

    fn prefetch(&self, verb: &str) -> Result<Value> {
        let mut command = Command::new(&self.lab.vellum.path);
        command.args(["prefetch", verb, "--output", "json", "--control"]).arg(&self.control);
        let output = command.stdin(Stdio::null()).output().context(|| format!("can't run {command:?}"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Error::invalid(format!("{command:?} failed: {said}")));
        }
        serde_json::from_slice(&output.stdout)
            .map_err(|error| Error::corrupt(format!("{command:?} has another form: {error}")))
    }

    fn prefetched(&self) -> Result<(u64, String)> {
        let status = self.prefetch("status")?;
        let state = status["state"].as_str().unwrap_or_default().to_owned();
        Ok((status["bytes-prefetched"].as_u64().unwrap_or(0), state))
    }

    fn target(&self) -> Target<'_> {
        Target { pid: self.running.pid(), socket: self.running.socket(), connections: 1, structured: true }
    }
}

fn workload(args: &Args, operation: Operation) -> Workload {
    Workload { operation, order: Order::Random, len: BLOCK, depth: usize::from(args.in_flight) }
}

fn measure_pairs(
    lab: &Lab,
    base: &Path,
    args: &Args,
    load: &'static str,
    operation: Operation,
    window: Duration,
) -> Result<Pairs> {
    let clone = Clone::serve(lab, base, args.part, &[])?;
    let workload = workload(args, operation);
    let timing = Timing { warm_up: window / 5, window };
    let (mut paused, mut running, mut prefetched_bytes) = (Vec::new(), Vec::new(), 0);
    clone.prefetch("start")?;
    for round in 0..args.rounds {
        for turn in 0..2 {
            let runs = (round + turn) % 2 == 1;
            clone.prefetch(if runs { "start" } else { "pause" })?;
            let (before, _) = clone.prefetched()?;
            let sample = load::run_within(clone.target(), &workload, timing, u64::from(round), args.part)?;
            let (after, state) = clone.prefetched()?;
            if runs {
                if state == "detached" {
                    return Err(Error::invalid(
                        "everything was prefetched before the end: make --size larger",
                    ));
                }
                prefetched_bytes += after - before;
            }
            if runs { running.push(sample) } else { paused.push(sample) }
        }
    }
    clone.running.stop()?;
    let kept = running.iter().zip(&paused).map(|(with, without)| with.per_second() / without.per_second());
    let kept = kept.collect();
    Ok(Pairs { load, paused, running, prefetched_bytes, kept })
}

fn measure_course(lab: &Lab, base: &Path, args: &Args) -> Result<Course> {
    let alone = Clone::serve(lab, base, args.part, &[])?;
    let began = Instant::now();
    alone.prefetch("start")?;
    while alone.prefetched()?.1 != "detached" {
        if began.elapsed() > PATIENCE {
            return Err(Error::invalid("the image is not detached"));
        }
        thread::sleep(EVERY);
    }
    let seconds_alone = began.elapsed().as_secs_f64();
    alone.running.stop()?;

    let limit = format!("{LIMIT}={}", args.course_limit);
    let clone = Clone::serve(lab, base, args.part, &["--prefetch-limit".to_owned(), limit])?;
    let bytes = args.size - args.part;
    // A quarter of it, as long as the limit takes for that; then the guest, for as long again.
    let quarter = Duration::from_secs_f64(bytes as f64 / 4.0 / args.course_limit as f64);
    let (began, mut points) = (Instant::now(), Vec::new());
    clone.prefetch("start")?;
    let mut phases = Vec::new();
    let seconds = || began.elapsed().as_secs_f64();
    let mut note = || {
        let (bytes, state) = clone.prefetched()?;
        let is_detached = state == "detached";
        points.push(Point { seconds: seconds(), bytes, state });
        Ok::<_, Error>(is_detached)
    };
    while began.elapsed() < quarter {
        note()?;
        thread::sleep(EVERY);
    }
    phases.push(Phase { name: "guest idle", from: 0.0, to: seconds(), is_busy: false });
    let from = seconds();
    thread::scope(|scope| {
        let timing = Timing { warm_up: Duration::ZERO, window: quarter };
        let (target, workload) = (clone.target(), workload(args, Operation::Read));
        let load = scope.spawn(move || load::run_within(target, &workload, timing, 1, args.part));
        while !load.is_finished() {
            note()?;
            thread::sleep(EVERY);
        }
        load.join().expect("a load does not panic").map(drop)
    })?;
    phases.push(Phase { name: "guest busy", from, to: seconds(), is_busy: true });
    let from = seconds();
    while !note()? {
        if began.elapsed() > PATIENCE {
            return Err(Error::invalid("the image is not detached"));
        }
        thread::sleep(EVERY);
    }
    phases.push(Phase { name: "guest idle", from, to: seconds(), is_busy: false });
    let seconds_to_detached = seconds();
    clone.running.stop()?;
    Ok(Course { limit: args.course_limit, phases, points, seconds_to_detached, seconds_alone, bytes })
}
