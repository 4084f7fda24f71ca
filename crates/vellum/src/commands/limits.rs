//! `vellum limits`: how much may go through a disk that is served.

use std::process::ExitCode;

use serde_json::Value;
use vellum_core::{Error, Result};
use vellum_daemon::RateLimits;
use vellum_daemon::control::Request;

use super::Outcome;
use super::control::Target;
use crate::args::{OutputFormat, parse_size};
use crate::output::{human_bytes, say, say_json};

/// Show or change the request limits of a served disk
///
/// The names are QEMU's: iops-total, iops-read and iops-write (requests per second), bps-total, bps-read and
/// bps-write (bytes per second). With -max appended, each is the rate during a burst. With -max-length
/// appended, it is the length of a burst in seconds (default 1). iops-size is the size in bytes of the largest
/// request that counts as one; larger ones count as several. Limits you do not give are removed.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    target: Target,
    /// Remove all limits
    #[arg(long, conflicts_with = "limits")]
    none: bool,
    /// New limits, such as iops-total=1000,bps-write=50M. Default: show the limits
    #[arg(value_name = "NAME=N,…", value_parser = limits_of)]
    limits: Option<RateLimits>,
}

/// The limits of such a list.
pub(crate) fn limits_of(list: &str) -> Result<RateLimits> {
    let mut said = Vec::new();
    for one in list.split(',') {
        let (name, number) = one.split_once('=').ok_or_else(|| {
            Error::invalid(format!("invalid limit {one:?}: use NAME=NUMBER, such as iops-total=1000"))
        })?;
        said.push((name, parse_size(number)?));
    }
    RateLimits::of(said)
}

pub(crate) fn run(args: &Args) -> Outcome {
    let set = match (&args.limits, args.none) {
        (Some(limits), _) => Some(limits.said().into_iter().collect()),
        (None, true) => Some(Default::default()),
        (None, false) => None,
    };
    let answer = args.target.ask(&Request::Limits { disk: args.target.disk.clone(), set })?;
    match args.target.output {
        OutputFormat::Json => say_json(&answer),
        OutputFormat::Human => match answer["limits"].as_object().filter(|limits| !limits.is_empty()) {
            None => say("No limits are set."),
            Some(limits) => limits.iter().for_each(|(name, number)| say(&line(name, number))),
        },
    }
    Ok(ExitCode::SUCCESS)
}

fn line(name: &str, number: &Value) -> String {
    let number = number.as_u64().unwrap_or_default();
    match name {
        name if name.ends_with("-max-length") => format!("{name} {number} s"),
        "iops-size" => format!("{name} {}", human_bytes(number)),
        name if name.starts_with("bps") => format!("{name} {}/s", human_bytes(number)),
        name => format!("{name} {number}/s"),
    }
}

#[cfg(test)]
mod tests {
    use super::limits_of;

    #[test]
    fn lists_have_names_and_numbers() {
        let limits = limits_of("iops-total=1000,bps-write=50M,bps-write-max=1G").expect("they go together");
        let said: Vec<_> = limits.said();
        assert_eq!(said[1], ("bps-write".to_owned(), 50 << 20));
        for list in
            ["", "iops-total", "iops-total=", "iops-total=much", "iops=1", "iops-total=1,,", "bps-read=-1"]
        {
            assert!(limits_of(list).is_err(), "{list:?}");
        }
    }
}
