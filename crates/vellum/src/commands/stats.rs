//! `vellum stats`: what a server has counted so far, and how its disks are.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use vellum_daemon::control::Request;

use super::Outcome;
use super::control::Target;
use crate::args::OutputFormat;
use crate::output::{human_bytes, say, say_json};

/// Show the state, connections and request counts of a server's disks
///
/// The state is running, paused, no space, poisoned (stopped after a failed flush) or hung (the storage does
/// not answer). The JSON output is that of `vellum serve --stats-json`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    target: Target,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let mut answer = args.target.ask(&Request::Stats {})?;
    if let (Some(wanted), Some(disks)) = (&args.target.disk, answer["disks"].as_array_mut()) {
        let is_it = |name: &Value| name.as_str() == Some(wanted);
        disks.retain(|disk| disk["exports"].as_array().is_some_and(|names| names.iter().any(is_it)));
        if disks.is_empty() {
            let why = format!("there is no export {wanted:?}");
            return Err(vellum_core::Error::new(vellum_core::ErrorKind::NotFound, why).into());
        }
    }
    match args.target.output {
        OutputFormat::Json => say_json(&answer),
        OutputFormat::Human => answer["disks"].as_array().into_iter().flatten().for_each(show),
    }
    Ok(ExitCode::SUCCESS)
}

fn show(disk: &Value) {
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let guest = &disk["guest"];
    let paused = match disk["paused-seconds"].as_u64() {
        Some(seconds) => format!(" for {seconds} s"),
        None => String::new(),
    };
    let waiting = match number(&disk["held"]) + number(&disk["limited"]) {
        0 => String::new(),
        waiting => format!(", {waiting} requests wait"),
    };
    say(&format!(
        "{}: {}, {}{paused}{waiting}; {} connections; {} reads ({}), {} writes ({}), {} flushes, {} failed",
        disk["image"].as_str().unwrap_or_default(),
        human_bytes(number(&disk["virtual-size"])),
        disk["state"].as_str().unwrap_or_default(),
        number(&disk["connections"]),
        number(&guest["reads"]),
        human_bytes(number(&guest["bytes-read"])),
        number(&guest["writes"]),
        human_bytes(number(&guest["bytes-written"])),
        number(&guest["flushes"]),
        number(&disk["guest-errors"]),
    ));
    for request in disk["under-way"]["long"].as_array().into_iter().flatten() {
        say(&format!(
            "  under way for {} s: {} of {} bytes at {}",
            number(&request["seconds"]),
            request["request"].as_str().unwrap_or_default(),
            number(&request["length"]),
            number(&request["offset"]),
        ));
    }
    if let Some(error) = disk["last-error"].as_object() {
        let text = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default();
        let ago = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let ago = ago.saturating_sub(error.get("date-sec").map_or(0, number));
        say(&format!("  last error, {ago} s ago: {}: {}", text("request"), text("message")));
    }
}
