//! `vellum journal`: whether an image is written with a journal.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use serde_json::json;
use vellum_daemon::closed::set_journal;
use vellum_daemon::{IoMode, JournalChange, run as run_worker};

use super::Outcome;
use super::recover::{replayed, replayed_json};
use crate::args::{OutputFormat, parse_size};
use crate::output::{human_bytes, say, say_json};
use crate::protocol::image_name;

/// Enable or disable the journal of a qcow2 image
///
/// With a journal, each guest flush costs one host flush instead of two. While such an image is open for
/// writing, and after a crash until it is recovered, QEMU refuses to open it. Once closed, it is a plain qcow2
/// image that other programs can read and write.
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

/// Write the image with a journal from now on, or change the journal's size
#[derive(clap::Args)]
struct Enable {
    /// Size of the journal, 64k to 64M. Default: unchanged, or 1M for a new journal
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
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The image; it must be qcow2 version 3, and no program may have it open
    #[arg(value_name = "FILE", value_parser = image_name())]
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    // Whether there is to be a journal, and its size if that was said. Without, one that is there keeps its own.
    let (common, wish) = match &args.what {
        What::Enable(enable) => (&enable.common, Some(enable.size)),
        What::Disable(disable) => (&disable.common, None),
    };
    let change = run_worker(IoMode::Auto, async || set_journal(&common.file, wish).await)??;
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

fn lines(args: &Common, change: &JournalChange) -> Vec<String> {
    let name = args.file.display();
    let mut lines = Vec::new();
    if let Some(recovery) = &change.recovery {
        lines.push(format!("{name} was not closed: {}", replayed(recovery)));
    }
    lines.push(match (change.before, change.after) {
        (None, None) => format!("{name} has no journal: nothing to do"),
        (Some(_), None) => format!("{name}: the journal is now disabled"),
        (Some(before), Some(after)) if before == after => {
            format!("{name} already has a journal of {}: nothing to do", human_bytes(after))
        }
        (_, Some(after)) => format!("{name}: a journal of {} is now enabled", human_bytes(after)),
    });
    if change.names_cut {
        lines.push("unused feature names were removed from its header to make room".to_owned());
    }
    lines
}
