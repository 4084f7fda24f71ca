//! `vellum flash policy`: what a served disk does with the flash cache.

use std::process::ExitCode;

use vellum_core::Result;
use vellum_daemon::control::Request;
use vellum_daemon::flash::word_of;
use vellum_daemon::{FlashPolicy, policy_of};

use crate::args::OutputFormat;
use crate::commands::Outcome;
use crate::commands::control::Target;
use crate::output::{human_bytes, say, say_json};

/// Show or change how a served disk uses the flash cache
///
/// Leaving writeback first writes home what only the cache has. Requests wait while the image is closed and opened again.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    target: Target,
    /// writeback, writethrough, readonly or off. Default: show it
    #[arg(value_name = "POLICY", value_parser = parse_policy)]
    policy: Option<FlashPolicy>,
}

/// A policy by its name.
pub(crate) fn parse_policy(name: &str) -> Result<FlashPolicy> {
    policy_of(name)
}

pub(super) fn run(args: &Args) -> Outcome {
    let set = args.policy.map(|policy| word_of(policy).to_owned());
    let answer = args.target.ask(&Request::FlashPolicy { disk: args.target.disk.clone(), set })?;
    match args.target.output {
        OutputFormat::Json => say_json(&answer),
        OutputFormat::Human => {
            let policy = answer["policy"].as_str().unwrap_or_default();
            let dirty = answer["dirty-bytes"].as_u64().unwrap_or_default();
            say(&format!("policy: {policy}; not home yet: {}", human_bytes(dirty)));
        }
    }
    Ok(ExitCode::SUCCESS)
}
