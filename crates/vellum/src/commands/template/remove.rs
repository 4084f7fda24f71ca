//! `vellum template remove`: withdraw a published version.

use std::process::ExitCode;

use serde_json::json;
use vellum_daemon::published::remove;
use vellum_daemon::signals::Stop;
use vellum_daemon::{IoMode, run as run_worker};

use super::interrupted;
use crate::args::OutputFormat;
use crate::commands::Outcome;
use crate::output::say_json;

/// Remove a version of a published template from its store
///
/// Its chunks stay until `vellum template gc` collects those that no other version needs. Disks that stand on the version
/// cannot be opened from then on.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// URL of the version: STORE/NAME:VERSION
    #[arg(value_name = "TEMPLATE")]
    url: String,
}

pub(crate) fn run(args: &Args) -> Outcome {
    run_worker(IoMode::Auto, async || Stop::new()?.or_stopped(remove(&args.url)).await)?
        .map_err(interrupted)?;
    if args.output == OutputFormat::Json {
        say_json(&json!({ "removed": args.url }));
    }
    Ok(ExitCode::SUCCESS)
}
