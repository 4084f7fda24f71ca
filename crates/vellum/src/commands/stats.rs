//! `vellum stats`: what a server has counted so far, and how its disks are.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use vellum_daemon::control::Request;

use super::Outcome;
use super::control::Target;
use crate::args::OutputFormat;
use crate::output::{human_bytes, printable, say, say_json, table};

/// Show the state, connections and request counts of a server's disks
///
/// The state is running, pausing, paused, no space, poisoned (refuses writes after a failed flush), hung (the
/// storage does not answer) or closed (could not be reopened). READ and WRITTEN are bytes, the other columns
/// count requests since the server started. The JSON output is that of `vellum serve --stats-json`.
#[derive(clap::Args)]
#[command(mut_arg("disk", |arg| arg.help("Show only the disk with this export name. Default: all disks")))]
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
        OutputFormat::Human => {
            show(answer["disks"].as_array().map_or(&[], Vec::as_slice));
            cache(&answer["flash"]).iter().for_each(|line| say(line));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The headings. The first two columns are text, the others numbers.
const HEADINGS: [&str; 10] =
    ["IMAGE", "STATE", "SIZE", "CLIENTS", "READS", "READ", "WRITES", "WRITTEN", "FLUSHES", "FAILED"];

/// A table with a row for each disk. What is unusual about a disk follows its row.
fn show(disks: &[Value]) {
    let mut lines = table(HEADINGS, 2, disks.iter().map(row)).into_iter();
    lines.next().iter().for_each(|headings| say(headings));
    for (line, disk) in lines.zip(disks) {
        say(&line);
        details(disk).iter().for_each(|detail| say(&format!("  {detail}")));
    }
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

fn row(disk: &Value) -> [String; HEADINGS.len()] {
    let text = |name: &str| disk[name].as_str().unwrap_or_default().to_owned();
    let guest = |name: &str| number(&disk["guest"][name]);
    [
        printable(&text("image")).into_owned(),
        text("state"),
        human_bytes(number(&disk["virtual-size"])),
        number(&disk["connections"]).to_string(),
        guest("reads").to_string(),
        human_bytes(guest("bytes-read")),
        guest("writes").to_string(),
        human_bytes(guest("bytes-written")),
        guest("flushes").to_string(),
        number(&disk["guest-errors"]).to_string(),
    ]
}

/// What the flash cache does for a disk, and for the images below it.
fn flash(said: &Value) -> Option<String> {
    let policy = said["policy"].as_str()?;
    let sum = |name: &str| number(&said["disk"][name]) + number(&said["below"][name]);
    let (hits, reads) = (sum("hits"), sum("hits") + sum("misses"));
    let ratio = (hits * 100).checked_div(reads).map_or_else(String::new, |ratio| format!(" ({ratio} %)"));
    Some(format!(
        "flash cache: {policy}; hits {hits}{ratio}, misses {}, kept {}; not home yet: {}",
        sum("misses"),
        sum("admitted"),
        human_bytes(number(&said["dirty-bytes"]))
    ))
}

/// What the disk has on its fast medium, and which reads went there.
fn tier(said: &Value) -> Option<String> {
    let units = said["units"].as_u64()?;
    let (fast, slow) = (number(&said["fast-reads"]), number(&said["slow-reads"]));
    let ratio =
        (fast * 100).checked_div(fast + slow).map_or_else(String::new, |ratio| format!(" ({ratio} %)"));
    let copied = human_bytes(units * number(&said["unit-size"]));
    Some(format!(
        "fast medium: {copied}; reads: {fast}{ratio} fast, {slow} slow, {} failed",
        number(&said["failed-reads"])
    ))
}

/// From where the tables of the disk and of the images below it were read.
fn tables(said: &Value) -> Option<String> {
    let sum = |name: &str| number(&said["tables"][name]) + number(&said["below-tables"][name]);
    let (flash, image, zeros) = (sum("flash-hits"), sum("misses"), sum("zeros"));
    if flash + image + zeros == 0 {
        return None;
    }
    let (memory, lookups) = (sum("memory-hits"), sum("lookups"));
    let ratio = (memory * 100).checked_div(lookups).map_or_else(String::new, |ratio| format!(" ({ratio} %)"));
    Some(format!("tables: in memory {memory}{ratio}, from flash {flash}, from the image {image}"))
}

/// The flash cache itself.
fn cache(said: &Value) -> Vec<String> {
    let Some(state) = said["state"].as_str() else { return Vec::new() };
    let bytes = |name: &str| human_bytes(number(&said[name]));
    let mut lines = vec![format!(
        "flash cache {}: {state}; {} of {} used, {} not home yet; memory: {} of {}",
        printable(said["path"].as_str().unwrap_or_default()),
        bytes("cached-bytes"),
        bytes("capacity-bytes"),
        bytes("dirty-bytes"),
        bytes("budget-used-bytes"),
        bytes("budget-bytes")
    )];
    lines.extend(said["last-error"].as_str().map(|error| format!("  last error: {}", printable(error))));
    lines
}

fn details(disk: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(seconds) = disk["paused-seconds"].as_u64() {
        lines.push(format!("paused for {seconds} s"));
    }
    match number(&disk["held"]) + number(&disk["limited"]) {
        0 => {}
        waiting => lines.push(format!("requests that wait for a limit, a pause or space: {waiting}")),
    }
    for request in disk["under-way"]["long"].as_array().into_iter().flatten() {
        lines.push(format!(
            "in flight for {} s: {} of {} bytes at offset {}",
            number(&request["seconds"]),
            request["request"].as_str().unwrap_or_default(),
            number(&request["length"]),
            number(&request["offset"]),
        ));
    }
    lines.extend(flash(&disk["flash"]));
    lines.extend(tables(&disk["flash"]));
    lines.extend(tier(&disk["tier"]));
    if let Some(error) = disk["flash"]["last-error"].as_str() {
        lines.push(format!("the flash cache can't write home: {error}"));
    }
    if let Some(error) = disk["last-error"].as_object() {
        let text = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        let ago = now.saturating_sub(error.get("date-sec").map_or(0, number));
        lines.push(format!("last error, {ago} s ago: {}: {}", text("request"), text("message")));
    }
    lines
}
