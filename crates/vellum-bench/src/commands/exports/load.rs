//! fio on a file or a device, and what it says of it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use vellum_core::{Context, Error, Result};

use crate::load::fio::sample_of;
use crate::load::workload::{Operation, Order, Workload};
use crate::load::{Sample, server_cpu_of};

/// Runs fio for as long as the window.
pub(super) fn run(server: u32, at: &Path, workload: &Workload, window: Duration) -> Result<Sample> {
    let direction = match (workload.order, workload.operation) {
        (Order::Random, Operation::Read) => "randread",
        (Order::Random, Operation::Write) => "randwrite",
        (Order::Sequential, Operation::Read) => "read",
        (Order::Sequential, Operation::Write) => "write",
    };
    let mut command = Command::new("fio");
    command
        .args(["--name=load", "--ioengine=libaio", "--direct=1", "--output-format=json", "--time_based"])
        .arg("--norandommap")
        .arg(format!("--filename={}", at.display()))
        .arg(format!("--rw={direction}"))
        .arg(format!("--bs={}", workload.len))
        .arg(format!("--iodepth={}", workload.depth))
        .arg(format!("--runtime={}", window.as_secs().max(1)));
    let (output, cpu) =
        server_cpu_of(server, || command.output().context(|| "can't run fio: is it installed?"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Error::invalid(format!("fio failed: {}{}", said.trim(), text.trim())));
    }
    // Some of its warnings come before the JSON.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value = serde_json::from_str(json)
        .map_err(|error| Error::corrupt(format!("can't read fio's report: {error}")))?;
    sample_of(&report, workload, cpu).ok_or_else(|| Error::corrupt("fio's report lacks what is wanted"))
}
