//! `vellum-bench migrate`: disks that move between two servers while they are written and verified.
//!
//! ```text
//!   guests   write and flush at the source ─── fails ─► the same write again, at the target ──► write, flush ──► read all
//!   command                            migrate run
//!   gap                      last answer of the source ◄───────────► first answer of the target
//! ```
//!
//! Each guest has blocks of its own and one request in flight. It knows what each of its blocks holds: the bytes of the last
//! write that was answered. A write that the source fails is repeated at the target, as the machine would do that moves with
//! its disk. In the end all blocks are read: beside the source, and once the disk is detached and the source has ended.
//!
//! What the command reports is the time in which neither image is writable. What the guests see is the longest gap of
//! all of them, and has their own requests in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde_json::Value;
use vellum_core::{Context, Error, Random, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::guest::{Guest, Request, filler};
use vellum_lab::programs;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::{Running, Vellum};

use super::parse_size;
use crate::host::Machine;
use crate::report::median;

const BLOCK: usize = 4096;

/// The kinds of images, with the options of `create`.
const KINDS: [(&str, &[&str]); 4] = [
    ("qcow2 journaled", &["-f", "qcow2"]),
    ("vellum zoned", &["-f", "vellum"]),
    ("vellum table", &["-f", "vellum", "-o", "layout=table"]),
    ("vellum linear", &["-f", "vellum", "-o", "layout=linear"]),
];

/// If the target is not detached after this time, it will not be.
const PATIENCE: Duration = Duration::from_secs(300);

/// Move disks between two servers while guests write, and verify every block
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Size of the disk
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_size)]
    size: u64,
    /// Number of guests
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..))]
    guests: u8,
    /// Each guest flushes after this many writes
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    flush_every: u32,
    /// Seconds in which the guests write before the hand-over, and after it
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    seconds: f64,
    /// Number of migrations of each kind of image
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only the kinds of images whose names contain TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
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

/// One migration.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Migration {
    /// As the command reports it.
    downtime_ms: f64,
    /// The longest gap between two answers of a guest, around the hand-over.
    gap_ms: f64,
    /// From the hand-over until the target needs no source.
    detached_seconds: f64,
    writes_before: u64,
    writes_after: u64,
    /// Blocks that were read and compared, twice.
    blocks_verified: u64,
    /// Blocks with other bytes than the last write that was answered.
    blocks_wrong: u64,
}

/// All migrations of a kind of image.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    kind: &'static str,
    migrations: Vec<Migration>,
}

/// Everything that was seen, for programs.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    machine: Machine,
    programs: Vec<String>,
    rows: Vec<Row>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let part = args.size / u64::from(args.guests) / BLOCK as u64;
    if part == 0 || !args.size.is_multiple_of(1 << 20) {
        return Err(Error::invalid("--size is in whole MiB, with at least one block for each guest"));
    }
    let time = Duration::try_from_secs_f64(args.seconds).ok().filter(|time| !time.is_zero());
    let time = time.ok_or_else(|| Error::invalid("--seconds is a number above 0"))?;
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    let machine = Machine::with(&lab.dir);
    let table = Table::to(args.output);
    table.say(&format!(
        "disks of {} MiB; {} guests, 4 KiB at random, a flush after {} writes; {} s before and after; {} rounds; Linux {}, {} \
         processors, {}",
        args.size >> 20,
        args.guests,
        args.flush_every,
        args.seconds,
        args.rounds,
        machine.kernel,
        machine.processors,
        machine.medium
    ));
    lab.programs.iter().take(1).for_each(|program| table.say(program));
    let wanted =
        |kind: &str| args.only.is_empty() || args.only.iter().any(|text| kind.contains(text.as_str()));
    let kinds: Vec<_> = KINDS.into_iter().filter(|(kind, _)| wanted(kind)).collect();
    if kinds.is_empty() {
        return Err(Error::invalid(format!(
            "--only names none of: {}",
            KINDS.map(|(kind, _)| kind).join(", ")
        )));
    }
    let mut rows: Vec<Row> = kinds.iter().map(|(kind, _)| Row { kind, migrations: Vec::new() }).collect();
    for round in 0..args.rounds {
        for (row, (kind, options)) in rows.iter_mut().zip(&kinds) {
            let moved = migrate(&lab, options, args, time, round).context(|| *kind)?;
            row.migrations.push(moved);
        }
    }
    lines(&rows).iter().for_each(|line| table.say(line));
    let wrong: u64 = rows.iter().flat_map(|row| &row.migrations).map(|moved| moved.blocks_wrong).sum();
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (unix_seconds, programs) = (now.as_secs(), lab.programs.clone());
        say_json(&Report { unix_seconds, machine, programs, rows });
    }
    match wrong {
        0 => Ok(()),
        wrong => Err(Error::corrupt(format!("{wrong} blocks have other bytes than were written"))),
    }
}

fn lines(rows: &[Row]) -> Vec<String> {
    let head = format!(
        "{:<16} {:>22} {:>22} {:>10} {:>8} {:>8} {:>9} {:>6}",
        "image",
        "not writable, ms",
        "gap of guests, ms",
        "detached s",
        "before",
        "after",
        "verified",
        "wrong"
    );
    let line = |row: &Row| {
        let all = |figure: fn(&Migration) -> f64| {
            let values: Vec<f64> = row.migrations.iter().map(figure).collect();
            let (least, most) = values
                .iter()
                .fold((f64::INFINITY, 0.0_f64), |(least, most), value| (least.min(*value), most.max(*value)));
            format!("{:.1} ({least:.1} to {most:.1})", median(values))
        };
        let sum = |figure: fn(&Migration) -> u64| row.migrations.iter().map(figure).sum::<u64>();
        format!(
            "{:<16} {:>22} {:>22} {:>10.1} {:>8} {:>8} {:>9} {:>6}",
            row.kind,
            all(|moved| moved.downtime_ms),
            all(|moved| moved.gap_ms),
            median(row.migrations.iter().map(|moved| moved.detached_seconds)),
            sum(|moved| moved.writes_before),
            sum(|moved| moved.writes_after),
            sum(|moved| moved.blocks_verified),
            sum(|moved| moved.blocks_wrong)
        )
    };
    let foot = "median (least to most) of the rounds; before and after: writes answered, all rounds; verified: blocks read and \
                compared, beside the source and without it";
    std::iter::once(head).chain(rows.iter().map(line)).chain([foot.to_owned()]).collect()
}

/// One of the two servers.
struct Side {
    running: Running,
    socket: PathBuf,
    control: PathBuf,
}

impl Side {
    fn serve(lab: &Lab, dir: &Path, name: &str, more: &[&str]) -> Result<Self> {
        let [image, socket, control] =
            ["image", "nbd", "control"].map(|part| dir.join(format!("{name}.{part}")));
        let mut serve = Command::new(&lab.vellum.path);
        serve.args(["serve", "-q", "--nbd"]).arg(format!("unix:{}", socket.display()));
        serve.arg("--control").arg(&control).args(&lab.vellum.arguments).args(more);
        serve.arg("--export").arg(format!("disk={}", image.display()));
        let serves = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
        Ok(Self { running: Running::start_until(serve, &socket, serves)?, socket, control })
    }
}

fn answer_of(command: &mut Command) -> Result<Value> {
    let output = command.stdin(Stdio::null()).output().context(|| format!("can't run {command:?}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::invalid(format!("{command:?} failed: {said}")));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| Error::corrupt(format!("{command:?} has another form: {error}")))
}

fn migrate(lab: &Lab, options: &[&str], args: &Args, time: Duration, round: u32) -> Result<Migration> {
    let dir = lab.dir.join("migrate");
    drop(fs::remove_dir_all(&dir));
    fs::create_dir(&dir).context(|| format!("can't make {}", dir.display()))?;
    let vellum = || Command::new(&lab.vellum.path);
    let mut create = vellum();
    create.args(["create", "-q"]).args(options).arg(dir.join("source.image")).arg(args.size.to_string());
    programs::run(&mut create)?;
    let source = Side::serve(lab, &dir, "source", &[])?;
    let uri = format!("nbd+unix:///disk?socket={}", source.socket.display());
    let mut prepare = vellum();
    prepare
        .args(["migrate", "prepare", "--output", "json", "--from", &uri])
        .args(options)
        .arg(dir.join("target.image"));
    answer_of(&mut prepare)?;
    let target = Side::serve(lab, &dir, "target", &["--allow-url", &uri, "--prefetch"])?;
    let part = args.size / u64::from(args.guests) / BLOCK as u64;
    let mut guests = (0..args.guests)
        .map(|index| {
            let seed = u64::from(round) << 8 | u64::from(index);
            let (source, target) = (&source.socket, &target.socket);
            Ok(Writer {
                source: Guest::connect_to(source, "disk")?,
                target: Guest::connect_to(target, "disk")?,
                start: u64::from(index) * part,
                versions: vec![0; usize::try_from(part).expect("it fits in memory")],
                random: Random::from_seed(seed),
                payload: filler(BLOCK),
                flush_every: args.flush_every,
                gap: Duration::ZERO,
                writes: [0; 2],
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let is_over = AtomicBool::new(false);
    let (downtime_ms, detached_seconds) = thread::scope(|scope| {
        let writers: Vec<_> =
            guests.iter_mut().map(|guest| scope.spawn(|| guest.run_until(&is_over))).collect();
        thread::sleep(time);
        let mut run = vellum();
        run.args(["migrate", "run", "--output", "json", "--source-control"]).arg(&source.control);
        run.arg("--target-control").arg(&target.control);
        let said = answer_of(&mut run);
        let began = Instant::now();
        if said.is_ok() {
            thread::sleep(time);
        }
        is_over.store(true, Ordering::Relaxed);
        for writer in writers {
            writer.join().expect("a guest does not panic")?;
        }
        let micros = said?["downtime-us"].as_u64().unwrap_or_default();
        Ok::<_, Error>((micros as f64 / 1e3, began))
    })?;
    let [mut verified, mut wrong] = [0; 2];
    let mut verify = |guests: &mut [Writer]| -> Result<()> {
        for guest in guests {
            let (of_guest, bad) = guest.verify()?;
            verified += of_guest;
            wrong += bad;
        }
        Ok(())
    };
    verify(&mut guests)?;
    let since = detached_seconds;
    loop {
        let mut status = vellum();
        let status = answer_of(
            status.args(["prefetch", "status", "--output", "json", "--control"]).arg(&target.control),
        )?;
        if status["state"] == "detached" {
            break;
        }
        if since.elapsed() > PATIENCE {
            return Err(Error::invalid(format!("the target still needs its source: {status}")));
        }
        thread::sleep(Duration::from_millis(50));
    }
    let detached_seconds = since.elapsed().as_secs_f64();
    source.running.stop()?;
    verify(&mut guests)?;
    target.running.stop()?;
    let sum = |side: usize| guests.iter().map(|guest| guest.writes[side]).sum();
    let gap = guests.iter().map(|guest| guest.gap).max().unwrap_or_default();
    let moved = Migration {
        downtime_ms,
        gap_ms: gap.as_secs_f64() * 1e3,
        detached_seconds,
        writes_before: sum(0),
        writes_after: sum(1),
        blocks_verified: verified,
        blocks_wrong: wrong,
    };
    drop(fs::remove_dir_all(&dir));
    Ok(moved)
}

/// A guest with blocks of its own.
struct Writer {
    source: Guest,
    target: Guest,
    /// Its first block.
    start: u64,
    /// Which of its writes each block holds, counted from 1; 0 where it has not written.
    versions: Vec<u64>,
    random: Random,
    payload: Vec<u8>,
    flush_every: u32,
    /// Between the last answer of the source and the first one of the target.
    gap: Duration,
    /// Those that were answered, by each side.
    writes: [u64; 2],
}

impl Writer {
    /// Writes until then: to the source while that takes it, and then to the target.
    fn run_until(&mut self, is_over: &AtomicBool) -> Result<()> {
        let mut answered = Instant::now();
        let mut has_moved = false;
        while !is_over.load(Ordering::Relaxed) {
            let index = self.random.below(self.versions.len() as u64);
            let version = self.writes[0] + self.writes[1] + 1;
            self.stamp(index, version);
            let at = (self.start + index) * BLOCK as u64;
            if !has_moved {
                match self.source.write(at, &self.payload) {
                    Ok(()) => answered = Instant::now(),
                    Err(_) => {
                        self.target.write(at, &self.payload)?;
                        self.gap = answered.elapsed();
                        has_moved = true;
                    }
                }
            } else {
                self.target.write(at, &self.payload)?;
            }
            self.writes[usize::from(has_moved)] += 1;
            self.versions[usize::try_from(index).expect("it is in memory")] = version;
            if version.is_multiple_of(u64::from(self.flush_every)) {
                // The source may have been fixed between the write and the flush; fixing has flushed it.
                let _ =
                    if has_moved { self.target.ask(Request::Flush) } else { self.source.ask(Request::Flush) };
            }
        }
        match has_moved {
            true => self.target.ask(Request::Flush),
            false => Err(Error::invalid("the disk has not moved")),
        }
    }

    /// Makes the payload that of this write of this block.
    fn stamp(&mut self, index: u64, version: u64) {
        let block = self.start + index;
        for (sector, bytes) in self.payload.chunks_mut(512).enumerate() {
            bytes[..8].copy_from_slice(&block.to_le_bytes());
            bytes[8..16].copy_from_slice(&version.to_le_bytes());
            bytes[16..24].copy_from_slice(&(sector as u64).to_le_bytes());
        }
    }

    /// Reads all blocks at the target. Returns how many there are, and how many are wrong.
    fn verify(&mut self) -> Result<(u64, u64)> {
        let mut wrong = 0;
        for index in 0..self.versions.len() as u64 {
            let version = self.versions[usize::try_from(index).expect("it is in memory")];
            match version {
                0 => self.payload.fill(0),
                _ => {
                    self.payload = filler(BLOCK);
                    self.stamp(index, version);
                }
            }
            let at = (self.start + index) * BLOCK as u64;
            wrong += u64::from(self.target.read(at, BLOCK)? != self.payload);
        }
        self.payload = filler(BLOCK);
        Ok((self.versions.len() as u64, wrong))
    }
}
