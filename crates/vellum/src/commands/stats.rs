//! `vellum stats`: what a server has counted so far, and how its disks are.

use std::process::ExitCode;

use serde_json::Value;
use vellum_daemon::control::Request;

use super::Outcome;
use super::control::Target;
use crate::args::OutputFormat;
use crate::output::{human_bytes, say, say_json};

/// Tell what a server has counted, and how its disks are: running or paused, connections, requests
///
/// The JSON is that of `vellum serve --stats-json`.
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
}
