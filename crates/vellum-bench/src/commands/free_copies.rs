//! `vellum-bench free-copies`: what a clone writes that nobody asked for, while it is written and filled.
//!
//! ```text
//!   disk    0         copied        32 MiB        zeros of the base     64 MiB    beyond the base     96 MiB
//!           │ copy-on-read │ prefetch     │ a guest's writes            │         │ a guest's writes  │
//! ```
//!
//! FVD (USENIX ATC 2011, sections 3.1 and 3.2) calls writes beyond the base and over its zeros, copy-on-read
//! and prefetch free: none of them updates the bitmap on disk. Here a server runs under `strace`, which sees
//! each call to the image and to its base. What it writes beyond the bytes of guests and of copies is its own:
//! a record, a table, the bitmap. While the disk is filled the guest writes one block again and again and
//! flushes, as guests do: formats that record copies do so with the guest's flush, so the flushes beyond its
//! are the server's own. Once the disk is detached, what is read of the image beyond the bytes that the guest
//! asked for is its own, and nothing is read of the base.
//!
//! The numbers are counts, the same on each machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use vellum_core::{Context, Error, ErrorKind, Result};
use vellum_lab::cost::lab::{Desk, Lab};
use vellum_lab::cost::{Counts, strace};
use vellum_lab::guest::{Bytes, Guest, Request, filler};
use vellum_lab::programs::run as run_program;
use vellum_lab::report::{Output, Table, say_json};
use vellum_lab::server::{Cache, Running, Server, Serving, Vellum};
use vellum_lab::subjects::{SUBJECTS, Subject};

const MIB: u64 = 1 << 20;

/// Where the data of the base ends, where the base ends, where the disk ends.
const DATA: u64 = 32 * MIB;
const BASE: u64 = 64 * MIB;
const DISK: u64 = 96 * MIB;

/// What guests read while copy-on-read copies it.
const COPIED: u64 = 4 * MIB;

/// How far prefetch is when it is looked at, at least; the rest is copied when the disk is detached.
const PREFETCHED: u64 = 16 * MIB;

/// Bytes per second, so that prefetch can be paused in time.
const SLOWLY: &str = "base-max=12M";

/// The formats: the paper's set-up first.
const NAMES: [&str; 4] = ["vellum linear", "vellum table", "vellum zoned", "vellum qcow2 journaled"];

/// Requests of a guest in a step.
const REQUESTS: u64 = 64;

/// What the guest writes again and again while the disk is filled, and where.
const BEAT: [u8; 4096] = [0x5a; 4096];
const BEAT_AT: u64 = DISK - 4096;

/// How long a server may take to copy.
const PATIENCE: Duration = Duration::from_secs(120);

/// Count what copy-on-read, prefetch and free writes cost on disk (FVD, row F8)
///
/// A server of a clone runs under strace. For each step, the line shows the bytes that guests wrote and that
/// were copied, and what the server wrote beyond them, its flushes, and what it read of the image beyond the
/// guest's bytes and of the base. The guest does not flush.
#[derive(clap::Args)]
pub(crate) struct Args {
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

/// What was counted in one step.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Step {
    what: &'static str,
    /// Written by the guest, and copied.
    data_bytes: u64,
    /// Written to the image beyond that.
    own_bytes: u64,
    guest_flushes: u64,
    own_flushes: u64,
    /// Read by the guest.
    guest_read_bytes: u64,
    /// Read of the image.
    image_read_bytes: u64,
    base_read_bytes: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    format: &'static str,
    steps: Vec<Step>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Report {
    unix_seconds: u64,
    programs: Vec<String>,
    rows: Vec<Row>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let table = Table::to(args.output);
    let lab = Lab::open(args.dir.as_ref(), args.vellum.as_ref())?;
    if let Some(reason) = &lab.blind {
        return Err(Error::new(ErrorKind::NotFound, reason.clone()));
    }
    make_base(&lab)?;
    table.say(&format!("{}; KiB", lab.programs[0]));
    let mut rows = Vec::new();
    for name in NAMES {
        let subject = SUBJECTS.iter().find(|subject| subject.name == name).expect("one of the subjects");
        table.say("");
        table.say(&head(name));
        let steps = count(&lab, subject)?;
        steps.iter().for_each(|step| table.say(&line(step)));
        rows.push(Row { format: name, steps });
    }
    if args.output == Output::Json {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        say_json(&Report { unix_seconds: now.as_secs(), programs: lab.programs.clone(), rows });
    }
    Ok(())
}

/// The base: data, then a hole that `template prepare` finds.
fn make_base(lab: &Lab) -> Result<()> {
    let base = lab.base();
    let write = || -> std::io::Result<()> {
        std::fs::write(&base, filler(usize::try_from(DATA).expect("a small base")))?;
        std::fs::File::options().write(true).open(&base)?.set_len(BASE)
    };
    write().context(|| format!("can't make {}", base.display()))?;
    run_program(Command::new(&lab.vellum.path).args(["template", "prepare", "-f", "raw"]).arg(&base))
}

/// A served clone under observation.
struct Stage<'a> {
    vellum: &'a Path,
    control: PathBuf,
    guest: Guest,
    /// When each step began and ended, in microseconds since 1970, and what is known of it.
    steps: Vec<(u64, u64, Step)>,
}

impl Stage<'_> {
    /// Does it, and waits until `done` bytes have been copied.
    fn step(&mut self, what: &'static str, requests: &[Request], until: Until) -> Result<()> {
        let begun_us = now_us();
        let before = self.filled()?;
        if until != Until::Answered {
            self.prefetch_if(until, "start")?;
        }
        requests.iter().try_for_each(|request| self.guest.ask(*request))?;
        let (filled, beats) = self.wait(until, before)?;
        let bytes = |wanted: fn(&Request) -> Option<usize>| {
            requests.iter().filter_map(wanted).map(|len| len as u64).sum::<u64>()
        };
        let written = bytes(|request| match request {
            Request::Write { len, .. } => Some(*len),
            _ => None,
        });
        let guest_read_bytes = bytes(|request| match request {
            Request::Read { len, .. } => Some(*len),
            _ => None,
        });
        let data_bytes = written + (filled - before) + beats * BEAT.len() as u64;
        let step = Step {
            what,
            data_bytes,
            own_bytes: 0,
            guest_flushes: beats,
            own_flushes: 0,
            guest_read_bytes,
            image_read_bytes: 0,
            base_read_bytes: 0,
        };
        self.steps.push((begun_us, now_us(), step));
        Ok(())
    }

    fn prefetch_if(&self, until: Until, verb: &str) -> Result<()> {
        match until {
            Until::Prefetched | Until::Detached => run_program(
                Command::new(self.vellum).args(["prefetch", verb, "--control"]).arg(&self.control),
            ),
            Until::Answered | Until::Copied => Ok(()),
        }
    }

    /// Returns how many bytes the image was filled with, in all, and how often the guest flushed meanwhile.
    fn wait(&mut self, until: Until, before: u64) -> Result<(u64, u64)> {
        let begun = Instant::now();
        for beats in 0.. {
            let (filled, state) = self.status()?;
            let reached = match until {
                Until::Answered => true,
                Until::Copied => filled >= before + COPIED,
                Until::Prefetched => filled >= before + PREFETCHED,
                Until::Detached => state == "detached",
            };
            if reached && until != Until::Prefetched {
                return Ok((filled, beats));
            }
            if reached {
                self.prefetch_if(until, "pause")?;
                // What was in flight ends.
                thread::sleep(Duration::from_millis(500));
                return Ok((self.filled()?, beats));
            }
            if begun.elapsed() > PATIENCE {
                return Err(Error::invalid(format!("the disk is not filled: {filled} bytes, {state}")));
            }
            self.guest.write(BEAT_AT, &BEAT)?;
            self.guest.ask(Request::Flush)?;
            thread::sleep(Duration::from_millis(20));
        }
        unreachable!("it returns")
    }

    fn filled(&self) -> Result<u64> {
        Ok(self.status()?.0)
    }

    fn status(&self) -> Result<(u64, String)> {
        let mut command = Command::new(self.vellum);
        command.args(["prefetch", "status", "--output", "json", "--control"]).arg(&self.control);
        let output = command.output().context(|| format!("can't run {command:?}"))?;
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| Error::corrupt(format!("{command:?} does not answer in JSON: {error}")))?;
        let filled = answer["bytes-filled"].as_u64().unwrap_or_default();
        let prefetched = answer["bytes-prefetched"].as_u64().unwrap_or_default();
        let state = answer["state"].as_str().unwrap_or_default().to_owned();
        Ok((filled + prefetched, state))
    }
}

/// When a step has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    Answered,
    Copied,
    Prefetched,
    Detached,
}

fn count(lab: &Lab, subject: &Subject) -> Result<Vec<Step>> {
    let desk = Desk::new(lab.dir.join("0"), subject.format)?;
    subject.make(lab.tools(), &desk.image, DISK, Some(&lab.base()))?;
    let control = desk.dir.join("control.sock");
    let mut vellum = lab.vellum.clone();
    for argument in ["--prealloc", "off", "--io", "threads", "--copy-on-read", "--prefetch-limit", SLOWLY] {
        vellum.arguments.push(argument.into());
    }
    vellum.arguments.extend(["--control".into(), control.clone().into()]);
    vellum.arguments.extend(["--allow-dir".into(), lab.dir.clone().into()]);
    let serving = Serving {
        image: &desk.image,
        format: subject.format,
        cache: Cache::Buffered,
        connections: 1,
        socket: &desk.socket,
    };
    let command = strace::watched(&vellum.command(&serving)?, &desk.trace);
    let running = Running::start_command(command, &serving)?;
    let pid = running.pid();
    let guest = Guest::connect_writing(running.socket(), Bytes::Noise)?;
    let mut stage = Stage { vellum: &lab.vellum.path, control, guest, steps: Vec::new() };
    let write = |from: u64, len: usize| -> Vec<Request> {
        (0..REQUESTS).map(|i| Request::Write { offset: from + i * (256 << 10), len }).collect()
    };
    let read = |all: u64| -> Vec<Request> {
        let len = all / REQUESTS;
        (0..REQUESTS)
            .map(|i| Request::Read { offset: i * len, len: usize::try_from(len).expect("small") })
            .collect()
    };
    // The first change of an image records that it is in use: that is not what is counted.
    stage.guest.write(BEAT_AT, &BEAT)?;
    stage.guest.ask(Request::Flush)?;
    stage.step("writes beyond the base", &write(BASE, 4096), Until::Answered)?;
    stage.step("writes over its zeros", &write(DATA, 4096), Until::Answered)?;
    stage.step("copy-on-read", &read(COPIED), Until::Copied)?;
    stage.step("prefetch", &[], Until::Prefetched)?;
    stage.step("the rest, and detaching, once", &[], Until::Detached)?;
    stage.step("reads when detached", &read(DATA), Until::Answered)?;
    let Stage { guest, steps, .. } = stage;
    guest.leave()?;
    running.stop()?;
    let trace = strace::read(&desk.trace, pid)?;
    let (image, base) = (strace::parse(&trace, &desk.image)?, strace::parse(&trace, &lab.base())?);
    let counted = steps.into_iter().map(|(begun_us, ended_us, step)| {
        let Counts { flushes, bytes_written, .. } = strace::sum(&image, begun_us, ended_us);
        Step {
            own_bytes: bytes_written.saturating_sub(step.data_bytes),
            own_flushes: flushes.saturating_sub(step.guest_flushes),
            image_read_bytes: strace::bytes_read(&image, begun_us, ended_us),
            base_read_bytes: strace::bytes_read(&base, begun_us, ended_us),
            ..step
        }
    });
    Ok(counted.collect())
}

/// Microseconds since 1970, the format of `strace -ttt`.
fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

fn head(name: &str) -> String {
    format!(
        "{name:<30} |  data written  its own | guest's flushes  its own | guest's reads  of the image  of the base"
    )
}

fn line(step: &Step) -> String {
    format!(
        "{:<30} | {:>13} {:>8} | {:>15} {:>8} | {:>13} {:>13} {:>12}",
        step.what,
        step.data_bytes >> 10,
        step.own_bytes.div_ceil(1024),
        step.guest_flushes,
        step.own_flushes,
        step.guest_read_bytes >> 10,
        step.image_read_bytes.div_ceil(1024),
        step.base_read_bytes.div_ceil(1024),
    )
}
