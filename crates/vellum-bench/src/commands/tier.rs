//! `vellum-bench tier`: a disk on a slow medium that is written once and read often, with a fast medium and without.
//!
//! ```text
//!   tiered   NBD ◄─ vellum serve --fast ◄┬─ file ◄─ nbdfuse ◄─ nbdkit, delay ◄─ image
//!                                        └─ fast medium, on the local drive
//!   slow     NBD ◄─ vellum serve ◄───────── file ◄─ nbdfuse ◄─ nbdkit, delay ◄─ image
//!   fast     NBD ◄─ vellum serve ◄───────── image, on the local drive
//!
//!   a round  the part is written ► first pass ► promoted: `tier promote`, or by its heat ► second pass
//! ```
//!
//! 1. In each round the disks take turns, pass by pass; a pass reads the part once, in an order of its own, one request after
//!    the other. Each round gives one ratio to the image on the local drive.
//! 2. Each round has a part of the disk of its own: what was written after it was promoted has to be read more until heat
//!    promotes it again.
//! 3. The file that nbdfuse shows is read past the page cache, which would be a fast medium of its own. The image on the local
//!    drive and the fast medium are both in it: what is compared is the way to a copy, and not the drive.
//! 4. The fast medium's bytes are compared before and after a guest writes: none of them changes.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde_json::Value;
use vellum_core::{Context, Error, Random, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::guest::{Bytes, Guest, Request};
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, complain, say_json};
use vellum_lab::server::{Running, Vellum, first_line_of};

use super::flash::stand::{nbdkit, show};
use super::parse_size;
use crate::host::Machine;
use crate::images::write_raw;
use crate::report::{median, short};

/// Bytes of a read.
const READ: usize = 64 << 10;
/// How long heat may take to promote all of the part.
const WARM_MAX: Duration = Duration::from_secs(300);
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Compare a disk that is written once and read often with and without a fast medium
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What each answer of the slow medium to a read or write is late, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    delay: u64,
    /// The part of a round, which is written once and read often, in whole MiB. The disk has one for each round
    #[arg(long, value_name = "SIZE", default_value = "32M", value_parser = parse_size)]
    part: u64,
    /// Number of rounds of each kind
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
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

/// Where a disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    Fast,
    Slow,
    Tiered,
}

const WAYS: [Way; 3] = [Way::Fast, Way::Slow, Way::Tiered];

/// What brings the part to the fast medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum By {
    Command,
    Heat,
}

impl By {
    fn title(self) -> &'static str {
        match self {
            Self::Command => "tier promote",
            Self::Heat => "--tier-heat on",
        }
    }
}

/// Reads a second in MiB, in the order of [`WAYS`].
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Round {
    by: By,
    first: [f64; 3],
    second: [f64; 3],
    /// From the end of the first pass until the fast medium had all of the part.
    promoted_seconds: f64,
    /// Bytes of the fast medium that are others after the guest has written.
    changed_on_fast: u64,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    delay_ms: u64,
    part: u64,
    rounds: Vec<Round>,
}

/// A disk that is served.
struct Disk {
    guest: Guest,
    control: PathBuf,
    fast: Option<PathBuf>,
    running: Vec<Running>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.part == 0 || !args.part.is_multiple_of(1 << 20) {
        return Err(Error::invalid("--part is in whole MiB"));
    }
    let mut programs = Vec::new();
    for program in ["nbdkit", "nbdfuse"] {
        match first_line_of(Command::new(program).arg("--version")) {
            Ok(version) => programs.push(version),
            Err(error) => {
                complain(&format!("skipped: {}", error.chain()));
                return Ok(());
            }
        }
    }
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    programs.splice(0..0, lab.programs.iter().take(1).cloned());
    let machine = Machine::with(&lab.dir);
    let table = Table::to(args.output);
    table.say(&format!(
        "{} MiB of a disk of {} MiB, written once and read twice, in {} KiB one after the other; the slow medium answers {} ms \
         late; {} rounds; Linux {}, {} processors, {}",
        args.part >> 20,
        (args.part * u64::from(args.rounds)) >> 20,
        READ >> 10,
        args.delay,
        args.rounds,
        machine.kernel,
        machine.processors,
        machine.medium
    ));
    programs.iter().for_each(|program| table.say(program));
    let raw = lab.dir.join("disk.raw");
    write_raw(&raw, args.part * u64::from(args.rounds))
        .context(|| format!("can't write {}", raw.display()))?;
    let mut rounds = Vec::new();
    for by in [By::Command, By::Heat] {
        let mut disks = Vec::new();
        for way in WAYS {
            disks.push(start(&lab, args, (&raw, way, by))?);
        }
        for number in 0..args.rounds {
            rounds.push(round(&lab, args, &mut disks, by, number)?);
        }
        for disk in disks {
            drop(disk.guest);
            let mut running = disk.running.into_iter();
            running.next().map_or(Ok(()), Running::stop)?;
            running.for_each(drop);
        }
    }
    lines(&rounds).iter().for_each(|line| table.say(line));
    let on_fast: u64 = rounds.iter().map(|round| round.changed_on_fast).sum();
    table.say(&format!(
        "the guest wrote {} MiB to the disk with the fast medium, and that changed {on_fast} bytes of the medium",
        (rounds.len() as u64 * args.part) >> 20
    ));
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report {
            unix_seconds: now.as_secs(),
            machine,
            programs,
            delay_ms: args.delay,
            part: args.part,
            rounds,
        });
    }
    Ok(())
}

fn lines(rounds: &[Round]) -> Vec<String> {
    let mut lines = vec![format!(
        "{:<16} {:>26} {:>26} {:>26} {:>26} {:>13}",
        "promoted by", "slow, of the local drive", "first pass", "second pass", "over slow", "promoted in"
    )];
    for by in [By::Command, By::Heat] {
        let of = |ratio: &dyn Fn(&Round) -> f64| {
            let all: Vec<f64> = rounds.iter().filter(|round| round.by == by).map(ratio).collect();
            let (least, most) =
                all.iter().fold((f64::INFINITY, 0.0_f64), |(low, high), one| (low.min(*one), high.max(*one)));
            format!("{:.3} ({least:.3} to {most:.3})", median(all))
        };
        let seconds = rounds.iter().filter(|round| round.by == by).map(|round| round.promoted_seconds);
        lines.push(format!(
            "{:<16} {:>26} {:>26} {:>26} {:>26} {:>11} s",
            by.title(),
            of(&|round| round.second[1] / round.second[0]),
            of(&|round| round.first[2] / round.first[0]),
            of(&|round| round.second[2] / round.second[0]),
            of(&|round| round.second[2] / round.second[1]),
            short(median(seconds)),
        ));
    }
    for (name, index) in [("local drive", 0), ("slow", 1), ("tiered", 2)] {
        lines.push(format!(
            "{name:<16} first pass {:>8} MiB/s, second pass {:>8} MiB/s",
            short(median(rounds.iter().map(|round| round.first[index]))),
            short(median(rounds.iter().map(|round| round.second[index]))),
        ));
    }
    lines
}

/// A copy of the disk, served.
fn start(lab: &Lab, args: &Args, (raw, way, by): (&Path, Way, By)) -> Result<Disk> {
    let dir = lab.dir.join(format!("{way:?}-{by:?}").to_lowercase());
    fs::create_dir(&dir).context(|| format!("can't make {}", dir.display()))?;
    let path = |name: &str| dir.join(name);
    let vellum = || Command::new(&lab.vellum.path);
    let (image, front, control) = (path("disk.vlm"), path("front"), path("control"));
    programs::run(
        vellum()
            .args(["convert", "-q", "-f", "raw", "-O", "vellum", "-o", "layout=table"])
            .arg(raw)
            .arg(&image),
    )?;
    let mut serve = vellum();
    serve.args(["serve", "-q", "--format", "vellum", "--nbd"]);
    serve.arg(format!("unix:{}", front.display())).arg("--control").arg(&control).args(&lab.vellum.arguments);
    let (mut running, mut medium) = (Vec::new(), None);
    let file = match way {
        Way::Fast => image,
        Way::Slow | Way::Tiered => {
            serve.arg("--direct");
            if way == Way::Tiered {
                let fast = path("fast");
                let mut attach = vellum();
                attach.args(["tier", "attach", "--fast"]).arg(&fast).arg("--fast-size");
                let room = (u64::from(args.rounds) + 1) * args.part;
                programs::run(attach.arg(room.to_string()).arg(&image))?;
                serve.arg("--fast").arg(&fast);
                medium = Some(fast);
                if by == By::Heat {
                    serve.args(["--tier-heat", "on"]);
                }
            }
            let back = path("back");
            let serves = || UnixStream::connect(&back).is_ok();
            let late = Running::start_until(nbdkit(&back, &["delay"], &image, args.delay), &back, serves)?;
            let (file, shown) = show(path("file"), &back)?;
            running.extend([shown, late]);
            file
        }
    };
    serve.arg(file);
    let serves = || UnixStream::connect(&front).is_ok();
    running.insert(0, Running::start_until(serve, &front, serves)?);
    let guest = Guest::connect_writing(&front, Bytes::Noise)?;
    Ok(Disk { guest, control, fast: medium, running })
}

fn round(lab: &Lab, args: &Args, disks: &mut [Disk], by: By, number: u32) -> Result<Round> {
    let at = u64::from(number) * args.part;
    let mut changed_on_fast = 0;
    for disk in &mut *disks {
        let before = disk.fast.as_ref().map(fs::read).transpose().context(|| "can't read the fast medium")?;
        for offset in (at..at + args.part).step_by(READ) {
            disk.guest.ask(Request::Write { offset, len: READ })?;
        }
        disk.guest.ask(Request::Flush)?;
        if let (Some(fast), Some(before)) = (&disk.fast, before) {
            let after = fs::read(fast).context(|| "can't read the fast medium")?;
            changed_on_fast =
                before.iter().zip(&after).filter(|(before, after)| before != after).count() as u64;
        }
    }
    let first = pass(args, disks, (at, 2 * number))?;
    let begun = Instant::now();
    let tiered = &disks[2];
    if by == By::Command {
        let mut promote = Command::new(&lab.vellum.path);
        promote.args(["tier", "promote", "--range"]).arg(format!("{at}+{}", args.part));
        programs::run(promote.arg("--control").arg(&tiered.control))?;
    }
    loop {
        let stats = stats(lab, tiered)?;
        let units = |name: &str| stats.pointer(&format!("/disks/0/tier/{name}")).and_then(Value::as_u64);
        let (Some(units), Some(unit)) = (units("units"), units("unit-size")) else {
            return Err(Error::invalid(format!("the disk has no fast medium: {stats}")));
        };
        if units * unit >= at + args.part {
            break;
        }
        if begun.elapsed() > WARM_MAX {
            return Err(Error::invalid(format!("after {WARM_MAX:?} only {units} units are promoted")));
        }
        thread::sleep(LOOK_EVERY);
    }
    let promoted_seconds = begun.elapsed().as_secs_f64();
    let second = pass(args, disks, (at, 2 * number + 1))?;
    Ok(Round { by, first, second, promoted_seconds, changed_on_fast })
}

/// Each disk reads the part once.
fn pass(args: &Args, disks: &mut [Disk], (at, number): (u64, u32)) -> Result<[f64; 3]> {
    let mut places: Vec<u64> = (at..at + args.part).step_by(READ).collect();
    let mut random = Random::from_seed(number.into());
    for index in (1..places.len()).rev() {
        places.swap(index, random.index(index + 1));
    }
    let mut speeds = [0.0; 3];
    for turn in 0..disks.len() {
        let index = (turn + number as usize) % disks.len();
        let begun = Instant::now();
        for offset in &places {
            disks[index].guest.ask(Request::Read { offset: *offset, len: READ })?;
        }
        speeds[index] = (args.part >> 20) as f64 / begun.elapsed().as_secs_f64();
    }
    Ok(speeds)
}

fn stats(lab: &Lab, disk: &Disk) -> Result<Value> {
    let mut command = Command::new(&lab.vellum.path);
    command.args(["stats", "--output", "json", "--control"]).arg(&disk.control).stdin(Stdio::null());
    let output = command.output().context(|| format!("can't run {command:?}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::invalid(format!("{command:?} failed: {said}")));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::corrupt(format!("{command:?} has another form: {error}")))
}
