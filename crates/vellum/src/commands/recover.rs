//! `vellum recover`: what any opening for writing does first, and nothing else.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::{Value, json};
use vellum_daemon::closed::recover;
use vellum_daemon::{FormatKind, ImageOptions, IoMode, Recovery, run as run_worker};

use super::Outcome;
use crate::args::{AllowArgs, OutputFormat, parse_format};
use crate::output::{say, say_json};
use crate::protocol::image_name;

/// Recover an image that was not closed, for example after a power failure
///
/// `vellum serve` does the same when it opens such an image. The journal is replayed; without a journal, the
/// refcounts are repaired. A revert, a resize or a deletion of a snapshot that was interrupted is finished. No flushed
/// data is lost. A data file is made durable first.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the image: raw, qcow2 or vellum. Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Allow writing to FILE as the data file of the image
    #[arg(long, value_name = "FILE")]
    data_file: Vec<PathBuf>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    allow: AllowArgs,
    /// The image
    #[arg(value_name = "FILE", value_parser = image_name())]
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let options = ImageOptions {
        format: args.format,
        allow_dirs: args.allow.places(),
        data_files: args.data_file.clone(),
        ..ImageOptions::default()
    };
    let recovered = run_worker(IoMode::Auto, async || recover(&args.file, &options).await)??;
    let name = args.file.display();
    match args.output {
        OutputFormat::Json => {
            let mut answer = json!({
                "filename": name.to_string(),
                "was-dirty": recovered.was_dirty,
                "corruptions-fixed": recovered.report.corruptions_fixed,
                "leaks-fixed": recovered.report.leaks_fixed,
            });
            if let Some(recovery) = &recovered.replayed {
                answer["journal"] = replayed_json(recovery);
            }
            if !recovered.finished.is_empty() {
                answer["finished"] = json!(recovered.finished);
            }
            say_json(&answer);
        }
        OutputFormat::Human => {
            let fixed = (recovered.report.corruptions_fixed, recovered.report.leaks_fixed);
            for change in &recovered.finished {
                say(&format!("{name}: {change} was interrupted, and is finished now"));
            }
            say(&match (&recovered.replayed, recovered.was_dirty, fixed) {
                (Some(recovery), _, (0, 0)) => format!("{name} was recovered: {}", self::replayed(recovery)),
                (None, false, (0, 0)) if !recovered.finished.is_empty() => format!("{name} was recovered"),
                (None, false, (0, 0)) => format!("{name} was closed cleanly: nothing to do"),
                (_, _, (corruptions, leaks)) => format!(
                    "{name} was recovered: {leaks} leaked clusters freed, {corruptions} refcounts or flags corrected"
                ),
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What a replay did, for people.
pub(crate) fn replayed(recovery: &Recovery) -> String {
    let mut text = match recovery.records {
        0 => "its journal was empty".to_owned(),
        records => format!(
            "{records} journal records replayed, {} table pages written, {} clusters freed",
            recovery.pages, recovery.given_back
        ),
    };
    if recovery.block_lost {
        text += "; the newest record was ignored because a packed block that it names is missing: if that record \
         had been flushed, the storage has lost the block since (`vellum check` finds others)";
    } else if recovery.left_out {
        text += "; the newest record had not been flushed and was ignored";
    }
    if recovery.repaired {
        text += "; the whole image was checked and repaired";
    }
    text
}

/// The same, for programs.
pub(crate) fn replayed_json(recovery: &Recovery) -> Value {
    json!({
        "records-replayed": recovery.records,
        "pages-written": recovery.pages,
        "clusters-given-back": recovery.given_back,
        "newest-left-out": recovery.left_out,
        "block-lost": recovery.block_lost,
        "repaired": recovery.repaired,
    })
}
