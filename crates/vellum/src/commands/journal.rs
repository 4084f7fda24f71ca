//! `vellum journal`: whether an image is written with a journal.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use serde_json::json;
use vellum_core::{Error, Result};
use vellum_daemon::ImageOptions;
use vellum_daemon::image::open_file;
use vellum_format::FormatKind;
use vellum_format::qcow2::{JOURNAL_BYTES_DEFAULT, JournalChange, set_journal};
use vellum_io::{IoMode, run as run_worker};

use super::Outcome;
use super::recover::{replayed, replayed_json};
use crate::args::{OutputFormat, parse_size};
use crate::output::{human_bytes, say, say_json};

/// Give an image a journal, or take it away
///
/// With a journal a flush of the guest costs the host one flush. While such an image is open for writing other programs
/// refuse it; closed, it is a plain qcow2 image that they read and write.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Enable(Enable),
    Disable(Disable),
}

/// Write the image with a journal from now on; also changes the size of one
#[derive(clap::Args)]
struct Enable {
    /// Size of the journal while the image is open for writing, 64k to 64M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    #[command(flatten)]
    common: Common,
}

/// Write the image without a journal from now on
#[derive(clap::Args)]
struct Disable {
    #[command(flatten)]
    common: Common,
}

#[derive(clap::Args)]
struct Common {
    /// How the answer is printed
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The image; it is qcow2, version 3, and closed
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (common, wish) = match &args.what {
        What::Enable(enable) => (&enable.common, Some(enable.size)),
        What::Disable(disable) => (&disable.common, None),
    };
    let change = run_worker(IoMode::Auto, async || make(common, wish).await)??;
    match common.output {
        OutputFormat::Human => lines(common, &change).iter().for_each(|line| say(line)),
        OutputFormat::Json => {
            let mut answer = json!({
                "filename": common.file.display().to_string(),
                "journal-size-before": change.before,
                "journal-size": change.after,
                "feature-names-cut": change.names_cut,
            });
            if let Some(recovery) = &change.recovery {
                answer["journal"] = replayed_json(recovery);
            }
            say_json(&answer);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `wish`: whether there is to be a journal, and its size if that was said. Without, one that is there keeps its own.
async fn make(args: &Common, wish: Option<Option<u64>>) -> Result<JournalChange> {
    let (storage, format) = open_file(&args.file, &ImageOptions::default()).await?;
    if format == FormatKind::Raw {
        return Err(Error::unsupported(format!(
            "{} is a raw image, which has no place for a journal",
            args.file.display()
        )));
    }
    if format == FormatKind::Native {
        return Err(Error::unsupported(format!(
            "{} is an image of the native format: it has a journal whenever there is something to record, as large as it \
             was made",
            args.file.display()
        )));
    }
    let wanted = match wish {
        None => None,
        Some(Some(bytes)) => Some(bytes),
        Some(None) => {
            let header = vellum_format::qcow2::Header::read(&*storage).await?;
            Some(header.journal_bytes().unwrap_or(JOURNAL_BYTES_DEFAULT))
        }
    };
    set_journal(&storage, wanted).await
}

fn lines(args: &Common, change: &JournalChange) -> Vec<String> {
    let name = args.file.display();
    let mut lines = Vec::new();
    if let Some(recovery) = &change.recovery {
        lines.push(format!("{name} had not been closed: {}", replayed(recovery)));
    }
    lines.push(match (change.before, change.after) {
        (None, None) => format!("{name} has no journal: nothing to do"),
        (Some(_), None) => format!("{name} is written without a journal from now on"),
        (Some(before), Some(after)) if before == after => {
            format!("{name} is written with a journal of {} already", human_bytes(after))
        }
        (_, Some(after)) => format!("{name} is written with a journal of {} from now on", human_bytes(after)),
    });
    if change.names_cut {
        lines.push(
            "names of features that it does not use were left out of its header, to make room".to_owned(),
        );
    }
    lines
}
