//! Many clones of one template in one server.
//!
//! ```text
//!   create N clones ► start: first served, all served ► settled ► idle: memory, CPU, open files, `vellum stats` ► stop
//!   start ► a write and a flush to each ► SIGKILL ► start: first served, all served ► stop
//! ```
//!
//! A disk counts as served when a client has read a block of it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use vellum_core::{Context, Error, Result};
use vellum_lab::guest::{Guest, Request};
use vellum_lab::programs;
use vellum_lab::server::{Running, Vellum};

use crate::host::{cpu_seconds, resident};
use crate::images;
use crate::report::short;

const TEMPLATE_BYTES: u64 = 64 << 20;
/// At least this long, because a tick of the kernel's process clock is 10 ms.
const IDLE_MIN: Duration = Duration::from_secs(10);

/// The server's work after its start is over when a second costs no more than a tick. If it is not over after
/// this time, the figure is not that of an idle server.
const SETTLED_SECONDS: f64 = 0.01;
const SETTLES_WITHIN: Duration = Duration::from_secs(20);

/// What was seen.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Fleet {
    clones: u32,
    create_ms_each: f64,
    clean: Start,
    /// Until what is done once behind the start was over.
    settled_ms: f64,
    /// Of the server, all idle.
    resident_bytes: u64,
    /// Of one processor.
    idle_percent: f64,
    /// Descriptors of the server, all idle.
    open_files: usize,
    /// What `vellum stats --output json` prints of all disks, and how long it takes.
    stats_bytes: usize,
    stats_ms: f64,
    stop_ms: f64,
    /// All were written and flushed, and the server killed.
    killed: Start,
}

/// From the start of the program, in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Start {
    first_served_ms: f64,
    all_served_ms: f64,
}

impl Fleet {
    pub(super) fn lines(&self) -> Vec<String> {
        let start = |start: &Start| {
            format!("first served {} ms, all {} ms", short(start.first_served_ms), short(start.all_served_ms))
        };
        vec![
            format!("  {} clones: created in {} ms each", self.clones, short(self.create_ms_each)),
            format!("    start         {}", start(&self.clean)),
            format!(
                "    idle          {} % of a processor, {} ms after the start; {} MiB",
                short(self.idle_percent),
                short(self.settled_ms),
                self.resident_bytes >> 20
            ),
            format!(
                "    open files    {}, {} a clone",
                self.open_files,
                short(self.open_files as f64 / f64::from(self.clones))
            ),
            format!("    vellum stats  {} ms, {} KiB", short(self.stats_ms), self.stats_bytes >> 10),
            format!("    stop          {} ms", short(self.stop_ms)),
            format!("    after a kill  {}", start(&self.killed)),
        ]
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

pub(super) fn measure(dir: &Path, vellum: &Vellum, clones: u32, window: Duration) -> Result<Fleet> {
    let template = dir.join("template.raw");
    images::write_raw(&template, TEMPLATE_BYTES).context(|| "can't write the template")?;
    let begun = Instant::now();
    for number in 0..clones {
        let mut create = Command::new(&vellum.path);
        create
            .args(["create", "-q", "-f", "qcow2", "-b"])
            .arg(&template)
            .args(["-F", "raw"])
            .arg(clone(dir, number));
        programs::run(create.arg("10G"))?;
    }
    let create_ms_each = milliseconds(begun) / f64::from(clones);
    let (server, clean) = start(dir, vellum, clones)?;
    let settled_ms = settle(server.pid())?;
    let window = window.max(IDLE_MIN);
    let before = cpu_seconds(server.pid())?;
    thread::sleep(window);
    let idle_percent = (cpu_seconds(server.pid())? - before) / window.as_secs_f64() * 100.0;
    let resident_bytes = resident(server.pid())?;
    let open_files = open_files(server.pid())?;
    let begun = Instant::now();
    let stats_bytes = stats(dir, vellum)?;
    let stats_ms = milliseconds(begun);
    for number in 0..clones {
        let mut guest = Guest::connect_to(server.socket(), &name(number))?;
        guest.write(u64::from(number % 1024) << 20, &[0x5a; 4096])?;
        guest.ask(Request::Flush)?;
        guest.leave()?;
    }
    server.kill()?;
    let (server, killed) = start(dir, vellum, clones)?;
    let begun = Instant::now();
    server.stop()?;
    let stop_ms = milliseconds(begun);
    Ok(Fleet {
        clones,
        create_ms_each,
        clean,
        settled_ms,
        resident_bytes,
        idle_percent,
        open_files,
        stats_bytes,
        stats_ms,
        stop_ms,
        killed,
    })
}

/// Waits until a server is idle. Returns how long that took, in milliseconds.
fn settle(pid: u32) -> Result<f64> {
    let begun = Instant::now();
    let mut before = cpu_seconds(pid)?;
    loop {
        thread::sleep(Duration::from_secs(1));
        let now = cpu_seconds(pid)?;
        if now - before <= SETTLED_SECONDS || begun.elapsed() >= SETTLES_WITHIN {
            return Ok(milliseconds(begun));
        }
        before = now;
    }
}

/// Descriptors of a process that is there.
fn open_files(pid: u32) -> Result<usize> {
    let path = format!("/proc/{pid}/fd");
    Ok(std::fs::read_dir(&path).context(|| format!("can't read {path}: has the server ended?"))?.count())
}

/// Queries the server for the state of all its disks. Returns the bytes of the answer.
fn stats(dir: &Path, vellum: &Vellum) -> Result<usize> {
    let mut command = Command::new(&vellum.path);
    command.args(["stats", "--output", "json", "--control"]).arg(control(dir)).stderr(Stdio::inherit());
    let output = command.output().context(|| "can't run `vellum stats`")?;
    if output.status.success() {
        Ok(output.stdout.len())
    } else {
        Err(Error::invalid(format!("`vellum stats` ended with {}", output.status)))
    }
}

fn control(dir: &Path) -> PathBuf {
    dir.join("control")
}

fn name(number: u32) -> String {
    format!("d{number}")
}

fn clone(dir: &Path, number: u32) -> PathBuf {
    dir.join(format!("clone{number}.qcow2"))
}

/// Starts the server and reads a block of each disk.
fn start(dir: &Path, vellum: &Vellum, clones: u32) -> Result<(Running, Start)> {
    let socket = dir.join("fleet");
    drop(std::fs::remove_file(&socket));
    let mut command = Command::new(&vellum.path);
    command.args(["serve", "--quiet"]).args(&vellum.arguments);
    command.arg("--nbd").arg(format!("unix:{}", socket.display()));
    command.arg("--control").arg(control(dir));
    for number in 0..clones {
        command.arg("--export").arg(format!("{}={}", name(number), clone(dir, number).display()));
    }
    let read = |number: u32| -> Result<()> {
        let mut guest = Guest::connect_to(&socket, &name(number))?;
        guest.read_a_block()?;
        guest.leave()
    };
    let begun = Instant::now();
    // Whichever is served first: one of a few, spread over all.
    let some: Vec<u32> = (0..8).map(|eighth| clones * eighth / 8).collect();
    let server = Running::start_until(command, &socket, || some.iter().any(|number| read(*number).is_ok()))?;
    let first_served_ms = milliseconds(begun);
    for number in 0..clones {
        while let Err(error) = read(number) {
            if begun.elapsed() > Duration::from_secs(120) {
                return Err(error);
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
    Ok((server, Start { first_served_ms, all_served_ms: milliseconds(begun) }))
}
