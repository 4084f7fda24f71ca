//! `vellum flash check`.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use vellum_daemon::{IoMode, flash, run as run_worker};

use super::in_use;
use crate::args::OutputFormat;
use crate::commands::Outcome;
use crate::output::{say, say_json};

/// The exit code of a cache that contradicts itself, as for an image.
const CORRUPT: u8 = 2;

/// Check a flash cache for contradictions; nothing is written
///
/// The exit code is 0 if there are none, and 2 if there are.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The file or block device
    #[arg(value_name = "PATH")]
    path: PathBuf,
}

pub(super) fn run(args: &Args) -> Outcome {
    let mut found = Vec::new();
    let checked = run_worker(IoMode::Auto, async || {
        let mut lines = Vec::new();
        let errors = flash::check(&args.path, &mut |line| lines.push(line)).await;
        (errors, lines)
    });
    let (errors, lines) = checked?;
    found.extend(lines);
    let errors = errors.map_err(in_use)?;
    let name = args.path.display();
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": name.to_string(),
            "errors": errors,
            "found": found,
        })),
        OutputFormat::Human => {
            found.iter().for_each(|line| say(line));
            say(&match errors {
                0 => format!("{name}: no errors found"),
                errors => format!("{name}: {errors} errors found"),
            });
        }
    }
    Ok(if errors == 0 { ExitCode::SUCCESS } else { ExitCode::from(CORRUPT) })
}
