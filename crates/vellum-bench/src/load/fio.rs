//! The other opinion: the same load, put on the server by `fio` and its NBD engine (libnbd).

use std::process::Command;

use serde_json::Value;
use vellum_core::{Context, Error, Result};

use super::workload::{Operation, Order, Workload};
use super::{Sample, Target, Timing, server_cpu_of};

/// Runs fio for as long as a window.
pub(crate) fn run(target: Target<'_>, workload: &Workload, timing: Timing) -> Result<Sample> {
    let direction = match (workload.order, workload.operation) {
        (Order::Random, Operation::Read) => "randread",
        (Order::Random, Operation::Write) => "randwrite",
        (Order::Sequential, Operation::Read) => "read",
        (Order::Sequential, Operation::Write) => "write",
    };
    let mut command = Command::new("fio");
    command
        .args(["--name=load", "--ioengine=nbd", "--output-format=json", "--time_based", "--norandommap"])
        .arg(format!("--uri=nbd+unix:///?socket={}", target.socket.display()))
        .arg(format!("--rw={direction}"))
        .arg(format!("--bs={}", workload.len))
        .arg(format!("--iodepth={}", workload.depth))
        .arg(format!("--numjobs={}", target.connections))
        .arg(format!("--runtime={}", timing.window.as_secs().max(1)))
        .arg("--group_reporting");
    let (output, cpu) =
        server_cpu_of(target.pid, || command.output().context(|| "can't run fio: is it installed?"))?;
    if !output.status.success() {
        return Err(Error::invalid(format!(
            "fio failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )));
    }
    // Some of its warnings come before the JSON.
    let text = String::from_utf8_lossy(&output.stdout);
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(json)
        .map_err(|error| Error::corrupt(format!("can't read fio's report: {error}")))?;
    sample_of(&report, workload, cpu).ok_or_else(|| Error::corrupt("fio's report lacks what is wanted"))
}

/// What the report of fio's only job tells.
pub(crate) fn sample_of(report: &Value, workload: &Workload, server_cpu_seconds: f64) -> Option<Sample> {
    let job = report.get("jobs")?.get(0)?;
    let side = match workload.operation {
        Operation::Read => job.get("read")?,
        Operation::Write => job.get("write")?,
    };
    let percentile =
        |percent: &str| Some(side.get("clat_ns")?.get("percentile")?.get(percent)?.as_f64()? / 1000.0);
    let operations = side.get("total_ios")?.as_u64()?;
    Some(Sample {
        operations,
        bytes: operations * workload.len as u64,
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
        let workload = Workload { operation: Operation::Read, order: Order::Random, len: 4096, depth: 32 };
        let sample = sample_of(&json!({ "jobs": [{ "read": read }] }), &workload, 0.5).unwrap();
        assert_eq!((sample.operations, sample.bytes), (1000, 4_096_000));
        assert!(sample.seconds == 2.0 && sample.latency_us_p99 == 9.0);
        assert!(sample_of(&json!({ "jobs": [] }), &workload, 0.5).is_none());
    }
}
