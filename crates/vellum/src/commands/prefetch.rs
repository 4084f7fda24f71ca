//! `vellum prefetch`: copying ahead of need what only the backing image of a served disk has.

use std::process::ExitCode;

use serde_json::Value;
use vellum_core::{Error, Result};
use vellum_daemon::control::Request;
use vellum_daemon::{PrefetchLimits, prefetch_limits};

use super::Outcome;
use super::control::Target;
use crate::args::{OutputFormat, parse_size};
use crate::output::{human_bytes, say, say_json};

/// Copy the backing image of a served disk into its image in the background
///
/// Guests come first: while a disk is busy, one piece at a time is copied, and seldom. When the image has everything, it
/// is detached: it no longer refers to its backing image. An image with snapshots is not detached, because they also
/// read from the backing image. What was copied is kept when the server stops; `vellum serve --prefetch`, or `vellum
/// prefetch start`, continues. `vellum flatten --control` does the same at full speed.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Start or continue
    Start(StartArgs),
    /// Stop until `vellum prefetch start`
    Pause(DiskArgs),
    /// Show the state, the progress, the rate and the time that is left
    ///
    /// The state is off, running, paused, contended (something else needs the disk or the network), waiting (what is missing
    /// cannot be copied now, such as what a snapshot sees), no answer (the backing image does not answer), no space, failed
    /// (it tries again), base changed (the backing image is not what it was when the disk was opened), snapshots (everything
    /// is copied; snapshots keep the image from being detached), detaching, detached, closed (the image could not be opened
    /// again), or none (there is no backing image).
    Status(DiskArgs),
}

#[derive(clap::Args)]
struct DiskArgs {
    #[command(flatten)]
    target: Target,
}

#[derive(clap::Args)]
struct StartArgs {
    #[command(flatten)]
    target: Target,
    /// New limits in bytes per second, such as base-max=50M,image-min=0. Default: unchanged
    ///
    /// base is what is read from the backing image, image is what is written. -max is never exceeded. Less than -min means
    /// that something else needs the disk or the network: then prefetching pauses. Limits you do not give are reset.
    #[arg(long, value_name = "NAME=N,…", value_parser = prefetch_limits_of)]
    limit: Option<PrefetchLimits>,
}

/// The limits of such a list.
pub(super) fn prefetch_limits_of(list: &str) -> Result<PrefetchLimits> {
    let mut said = Vec::new();
    for one in list.split(',') {
        let (name, number) = one.split_once('=').ok_or_else(|| {
            Error::invalid(format!("invalid limit {one:?}: use NAME=NUMBER, such as base-max=50M"))
        })?;
        said.push((name, parse_size(number)?));
    }
    prefetch_limits(said)
}

/// The limits as a server takes them.
fn limits_said(limits: PrefetchLimits) -> std::collections::BTreeMap<String, u64> {
    let PrefetchLimits { base, image } = limits;
    let all = [
        ("base-max", base.upper),
        ("base-min", Some(base.lower)),
        ("image-max", image.upper),
        ("image-min", Some(image.lower)),
    ];
    all.into_iter().filter_map(|(name, number)| Some((name.to_owned(), number?))).collect()
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (target, request) = match &args.verb {
        Verb::Start(args) => {
            let (disk, limits) = (args.target.disk.clone(), args.limit.map(limits_said));
            (&args.target, Request::PrefetchStart { disk, limits })
        }
        Verb::Pause(args) => (&args.target, Request::PrefetchPause { disk: args.target.disk.clone() }),
        Verb::Status(args) => (&args.target, Request::PrefetchStatus { disk: args.target.disk.clone() }),
    };
    let answer = target.ask(&request)?;
    match (target.output, &args.verb) {
        (OutputFormat::Json, _) => say_json(&answer),
        (OutputFormat::Human, Verb::Start(_)) => say("Prefetching."),
        (OutputFormat::Human, Verb::Pause(_)) => say("Paused. `vellum prefetch start` continues."),
        (OutputFormat::Human, Verb::Status(_)) => lines(&answer).iter().for_each(|line| say(line)),
    }
    Ok(ExitCode::SUCCESS)
}

fn lines(answer: &Value) -> Vec<String> {
    let number = |name: &str| answer[name].as_u64();
    let bytes = |name: &str| human_bytes(number(name).unwrap_or_default());
    let state = answer["state"].as_str().unwrap_or_default();
    if state == "none" {
        return vec!["state: none (no backing image)".to_owned()];
    }
    let mut lines = vec![format!("state: {state}")];
    if number("bytes-missing").is_some() && state != "detached" {
        lines.push(format!("missing: {}", bytes("bytes-missing")));
    }
    if state == "running" {
        lines.push(format!("rate: {}/s", bytes("bytes-per-second")));
        if let Some(seconds) = number("seconds-left") {
            lines.push(format!("left: {seconds} s"));
        }
    }
    lines.push(format!(
        "copied: {} ahead of need, {} that guests read; not copied: {}",
        bytes("bytes-prefetched"),
        bytes("bytes-filled"),
        bytes("bytes-dropped")
    ));
    lines.push(format!(
        "own flushes: {}, pauses: {}, errors: {}",
        number("commits").unwrap_or_default(),
        number("pauses").unwrap_or_default(),
        number("errors").unwrap_or_default()
    ));
    if let Some(remark) = answer["remark"].as_str() {
        lines.push(format!("remark: {remark}"));
    }
    if let Some(error) = answer["last-error"].as_str() {
        lines.push(format!("last error: {error}"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_go_to_the_server_and_back() {
        let limits = prefetch_limits_of("base-max=50M,image-min=0").expect("they go together");
        let said = limits_said(limits);
        let again = prefetch_limits(said.iter().map(|(name, number)| (name.as_str(), *number)));
        assert_eq!(again.expect("the same"), limits);
        for wrong in ["", "base-max", "base-max=much", "base=1", "base-max=0"] {
            assert!(prefetch_limits_of(wrong).is_err(), "{wrong:?}");
        }
    }
}
