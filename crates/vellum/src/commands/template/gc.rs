//! `vellum template gc`: delete chunks that no published template needs.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;
use vellum_daemon::published::{Collected, collect};
use vellum_daemon::signals::Stop;
use vellum_daemon::{IoMode, run as run_worker};

use super::interrupted;
use crate::args::OutputFormat;
use crate::commands::Outcome;
use crate::output::{human_bytes, say, say_json};

/// Delete the chunks in a store that no published template needs
///
/// Nothing is deleted while a push is under way in the store, nor when the index of a version cannot be read.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Keep chunks that were uploaded less than HOURS ago, for pushes that will be continued
    #[arg(long, value_name = "HOURS", default_value_t = 24)]
    grace: u32,
    /// Only count what would be deleted
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// URL of the store: s3://BUCKET/PREFIX or file:///DIR
    #[arg(value_name = "STORE")]
    store: String,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let grace = Duration::from_secs(u64::from(args.grace) * 3600);
    let work = async || collect(&args.store, grace, args.dry_run, &mut Stop::new()?).await;
    let Collected { versions, named, deleted, deleted_bytes, young } =
        run_worker(IoMode::Auto, work)?.map_err(interrupted)?;
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "versions": versions,
            "named-chunks": named,
            "deleted-chunks": deleted,
            "deleted-bytes": deleted_bytes,
            "young-chunks": young,
            "dry-run": args.dry_run,
        })),
        OutputFormat::Human if !args.quiet => say(&format!(
            "{} {deleted} chunks ({}); {versions} versions need {named}, and {young} are too young",
            if args.dry_run { "would delete" } else { "deleted" },
            human_bytes(deleted_bytes),
        )),
        OutputFormat::Human => {}
    }
    Ok(ExitCode::SUCCESS)
}
