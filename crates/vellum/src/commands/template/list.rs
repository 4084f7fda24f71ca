//! `vellum template list`: what is published in a store.

use std::process::ExitCode;

use serde_json::json;
use vellum_core::Result;
use vellum_daemon::published::{PublishedVersion, list};
use vellum_daemon::signals::Stop;
use vellum_daemon::{IoMode, run as run_worker};

use super::interrupted;
use crate::args::OutputFormat;
use crate::commands::Outcome;
use crate::output::{human_bytes, say, say_json, table};

/// List the templates that are published in a store, oldest version first
///
/// The store is a bucket, s3://BUCKET/PREFIX, or a directory, file:///DIR. Credentials and endpoint of a bucket come
/// from the environment and from files, as for other programs: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
/// AWS_SESSION_TOKEN, AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// URL of the store
    #[arg(value_name = "STORE")]
    store: String,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let versions = run_worker(IoMode::Auto, async || find(args).await)?.map_err(interrupted)?;
    match args.output {
        OutputFormat::Json => {
            let all = versions.iter().map(|one| {
                json!({
                    "name": one.name,
                    "version": one.version,
                    "published": one.published_text(),
                    "index-size": one.index_len,
                })
            });
            say_json(&all.collect::<Vec<_>>());
        }
        OutputFormat::Human => {
            let row = |one: &PublishedVersion| {
                [one.name.clone(), one.version.clone(), one.published_text(), human_bytes(one.index_len)]
            };
            for line in table(["NAME", "VERSION", "PUBLISHED", "INDEX"], 3, versions.iter().map(row)) {
                say(&line);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn find(args: &Args) -> Result<Vec<PublishedVersion>> {
    Stop::new()?.or_stopped(list(&args.store)).await
}
