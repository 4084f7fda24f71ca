//! `vellum template prepare`: what can be found out of a template once, for all images made over it.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use vellum_core::Result;
use vellum_daemon::signals::Stop;
use vellum_daemon::template::{list_path, prepare};
use vellum_daemon::{IoMode, Zeros, run as run_worker};

use super::interrupted;
use crate::args::{OutputFormat, ReadArgs};
use crate::commands::Outcome;
use crate::output::{human_bytes, say, say_json};
use crate::progress::{Progress, Wish};

/// Record which parts of a template are zero, in the file TEMPLATE.vzero
///
/// `vellum create -f vellum -b TEMPLATE` uses the file: first writes to those parts cost no more than in
/// an image without a template. A template that has changed must be prepared again; until then, the file is ignored.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    read: ReadArgs,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The template, an image of any format
    #[arg(value_name = "TEMPLATE")]
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let zeros = run_worker(IoMode::Auto, async || find(args).await)?.map_err(interrupted)?;
    let (list, bytes) = (list_path(&args.file), zeros.zero_bytes());
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": args.file.display().to_string(),
            "list": list.display().to_string(),
            "virtual-size": zeros.size,
            "zero-bytes": bytes,
            "runs": zeros.runs.len(),
        })),
        OutputFormat::Human if !args.quiet => say(&format!(
            "{}: {} of {} are zero; recorded in {}",
            args.file.display(),
            human_bytes(bytes),
            human_bytes(zeros.size),
            list.display()
        )),
        OutputFormat::Human => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn find(args: &Args) -> Result<Zeros> {
    let mut stop = Stop::new()?;
    let flag = stop.flag.clone();
    let bar = std::cell::OnceCell::new();
    let wish = Wish { is_wanted: false, quiet: args.quiet, output: args.output };
    let progress = |size, bytes| bar.get_or_init(|| Progress::new(size, wish)).set(bytes);
    let (_, options) = args.read.open(&args.file)?;
    let zeros = stop.or_stopped(prepare(&args.file, &options, &flag, &progress)).await;
    if let Some(bar) = bar.get() {
        bar.end();
    }
    zeros
}
