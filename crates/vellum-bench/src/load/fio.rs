//! fio: the second opinion on an NBD server, with its NBD engine (libnbd), and the load on files.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use vellum_core::{Context, Error, Result};

use super::pattern::{Load, Pattern, READ_PERCENT, WRITES_PER_FLUSH};
use super::workload::{Operation, Order, Workload};
use super::{Sample, Target, Timing, server_cpu_of};

/// Runs fio for the length of a window.
pub(crate) fn run(target: Target<'_>, workload: &Workload, timing: Timing) -> Result<Sample> {
    let direction = match (workload.order, workload.operation) {
        (Order::Random, Operation::Read) => "randread",
        (Order::Random, Operation::Write) => "randwrite",
        (Order::Sequential, Operation::Read) => "read",
        (Order::Sequential, Operation::Write) => "write",
    };
    let mut command = fio(Engine::Nbd(target.socket), timing.window);
    command
        .arg(format!("--rw={direction}"))
        .arg(format!("--bs={}", workload.len))
        .arg(format!("--iodepth={}", workload.depth))
        .arg(format!("--numjobs={}", target.connections));
    let (report, cpu) = server_cpu_of(target.pid, || report_of(command))?;
    let side = match workload.operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    sample_of(&report, side, workload.len, cpu).ok_or_else(incomplete)
}

/// By what fio reaches a disk.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Engine<'a> {
    /// The NBD server at this socket.
    Nbd(&'a Path),
    /// A file, by libaio and past the page cache.
    File(&'a Path),
    /// A file without a server: with io_uring, with or without O_DIRECT.
    Alone { file: &'a Path, direct: bool },
}

/// As above, for any load. Without a server, fio's own processor time is reported.
pub(crate) fn run_load(
    server: Option<u32>,
    engine: Engine<'_>,
    load: &Load,
    window: Duration,
) -> Result<Sample> {
    let mut command = fio(engine, window);
    // Reads and writes are reported as one.
    command
        .arg("--unified_rw_reporting=1")
        .arg(format!("--bs={}", load.len()))
        .arg(format!("--iodepth={}", load.depth))
        .arg(format!("--numjobs={}", load.queues));
    match load.pattern {
        Pattern::Read => command.arg("--rw=randread"),
        Pattern::Overwrite => command.arg("--rw=randwrite"),
        // At the head of each unit, so that few are met twice.
        Pattern::Allocate => command.args(["--rw=randwrite", "--blockalign=65536"]),
        Pattern::Sequential => command.arg("--rw=read"),
        Pattern::Mixed => command
            .arg("--rw=randrw")
            .arg(format!("--rwmixread={READ_PERCENT}"))
            .arg(format!("--fsync={WRITES_PER_FLUSH}")),
    };
    let (report, cpu) = match server {
        Some(server) => server_cpu_of(server, || report_of(command))?,
        None => {
            let report = report_of(command)?;
            let cpu = own_cpu_seconds(&report).ok_or_else(incomplete)?;
            (report, cpu)
        }
    };
    sample_of(&report, "mixed", load.len(), cpu).ok_or_else(incomplete)
}

/// Jobs of fio that begin at once, one for each door.
pub(crate) struct Jobs<'a> {
    /// Sockets and exports of NBD servers; one may be there several times.
    pub(crate) doors: &'a [(&'a Path, &'a str)],
    /// What fio calls `rw`.
    pub(crate) direction: &'static str,
    /// Requests in flight of each.
    pub(crate) depth: u16,
    /// A flush after this many writes.
    pub(crate) fsync: Option<u32>,
    /// They use this many bytes at the start of the disk.
    pub(crate) part: u64,
    pub(crate) window: Duration,
    pub(crate) seed: u64,
}

/// What they did together.
pub(crate) struct Done {
    /// Reads and writes.
    pub(crate) operations: u64,
    pub(crate) seconds: f64,
    /// Of reads or of writes, whichever is longer.
    pub(crate) p99_us: f64,
    /// Of flushes; zero when there were none.
    pub(crate) flush_p99_us: f64,
}

/// Blocks of 4 KiB.
pub(crate) fn run_jobs(jobs: &Jobs<'_>) -> Result<Done> {
    let mut command = Command::new("fio");
    command.args(["--output-format=json", "--time_based", "--norandommap", "--group_reporting", "--thread"]);
    command.args(["--ioengine=nbd", "--bs=4k", "--rwmixread=70"]);
    command
        .arg(format!("--runtime={}ms", jobs.window.as_millis().max(1)))
        .arg(format!("--size={}", jobs.part));
    command.arg(format!("--rw={}", jobs.direction)).arg(format!("--iodepth={}", jobs.depth));
    command.arg(format!("--randseed={}", jobs.seed));
    command.args(jobs.fsync.map(|writes| format!("--fsync={writes}")));
    for (number, (socket, export)) in jobs.doors.iter().enumerate() {
        command.arg(format!("--name=load{number}"));
        command.arg(format!("--uri=nbd+unix:///{export}?socket={}", socket.display()));
    }
    done_in(&report_of(command)?).filter(|done| done.seconds > 0.0).ok_or_else(incomplete)
}

fn done_in(report: &Value) -> Option<Done> {
    let job = report.get("jobs")?.get(0)?;
    let sides = ["read", "write"].map(|side| job.get(side));
    let count = |side: &Value| side.get("total_ios")?.as_u64();
    let p99 = |of: &Value| of.get("percentile")?.get("99.000000")?.as_f64().map(|time| time / 1000.0);
    Some(Done {
        operations: sides.iter().flatten().copied().filter_map(count).sum(),
        seconds: sides.iter().flatten().filter_map(|side| side.get("runtime")?.as_f64()).fold(0.0, f64::max)
            / 1000.0,
        p99_us: sides.iter().flatten().filter_map(|side| p99(side.get("clat_ns")?)).fold(0.0, f64::max),
        flush_p99_us: job.pointer("/sync/lat_ns").and_then(p99).unwrap_or_default(),
    })
}

fn fio(engine: Engine<'_>, window: Duration) -> Command {
    let mut command = Command::new("fio");
    command
        .args(["--name=load", "--output-format=json", "--time_based", "--norandommap", "--group_reporting"])
        .arg(format!("--runtime={}ms", window.as_millis().max(1)));
    let file = match engine {
        Engine::Nbd(socket) => {
            command.arg("--ioengine=nbd").arg(format!("--uri=nbd+unix:///?socket={}", socket.display()));
            return command;
        }
        Engine::File(file) => {
            command.args(["--ioengine=libaio", "--direct=1"]);
            file
        }
        Engine::Alone { file, direct } => {
            // What the page cache has of it stays there.
            command
                .args(["--ioengine=io_uring", "--invalidate=0"])
                .arg(format!("--direct={}", u8::from(direct)));
            file
        }
    };
    command.arg(format!("--filename={}", file.display()));
    command
}

fn report_of(mut command: Command) -> Result<Value> {
    let output = command.output().context(|| "can't run fio: is it installed?")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Error::invalid(format!("fio failed: {}{}", said.trim(), text.trim())));
    }
    // Some of its warnings come before the JSON.
    let json = text.find('{').map_or("", |at| &text[at..]);
    serde_json::from_str(json).map_err(|error| Error::corrupt(format!("can't read fio's report: {error}")))
}

fn incomplete() -> Error {
    Error::corrupt("fio's report lacks what is wanted")
}

/// User and system time of fio's jobs.
fn own_cpu_seconds(report: &Value) -> Option<f64> {
    let job = report.get("jobs")?.get(0)?;
    let percent = job.get("usr_cpu")?.as_f64()? + job.get("sys_cpu")?.as_f64()?;
    Some(percent / 100.0 * job.get("job_runtime")?.as_f64()? / 1000.0)
}

/// The figures of fio's only job, from its report.
fn sample_of(report: &Value, side: &str, len: usize, server_cpu_seconds: f64) -> Option<Sample> {
    let side = report.get("jobs")?.get(0)?.get(side)?;
    let percentile =
        |percent: &str| Some(side.get("clat_ns")?.get("percentile")?.get(percent)?.as_f64()? / 1000.0);
    let operations = side.get("total_ios")?.as_u64()?;
    Some(Sample {
        operations,
        bytes: operations * len as u64,
        seconds: side.get("runtime")?.as_f64()? / 1000.0,
        server_cpu_seconds,
        client_cpu_seconds: 0.0,
        others_cpu_seconds: 0.0,
        latency_us_median: percentile("50.000000")?,
        latency_us_p99: percentile("99.000000")?,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_report_is_read() {
        let read = json!({
            "total_ios": 1000, "runtime": 2000,
            "clat_ns": { "percentile": { "50.000000": 5000, "99.000000": 9000 } }
        });
        let report =
            json!({ "jobs": [{ "read": read, "usr_cpu": 5.0, "sys_cpu": 20.0, "job_runtime": 2000 }] });
        let sample = sample_of(&report, "read", 4096, 0.5).unwrap();
        assert_eq!((sample.operations, sample.bytes), (1000, 4_096_000));
        assert!(sample.seconds == 2.0 && sample.latency_us_p99 == 9.0);
        assert!(own_cpu_seconds(&report) == Some(0.5));
        let side = |ios: u32, p99: u32| json!({ "total_ios": ios, "runtime": 500, "clat_ns": { "percentile": { "99.000000": p99 } } });
        let sync = json!({ "lat_ns": { "percentile": { "99.000000": 8000 } } });
        let report = json!({ "jobs": [{ "read": side(10, 7000), "write": side(5, 9000), "sync": sync }] });
        let done = done_in(&report).unwrap();
        assert!(
            done.operations == 15 && done.seconds == 0.5 && done.p99_us == 9.0 && done.flush_p99_us == 8.0
        );
        assert!(sample_of(&json!({ "jobs": [] }), "read", 4096, 0.5).is_none());
    }
}
