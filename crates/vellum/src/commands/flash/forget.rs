//! `vellum flash forget`: writes that only a cache has are given up.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use vellum_daemon::{FormatKind, ImageOptions, IoMode, flash, run as run_worker};

use super::in_use;
use crate::args::{OutputFormat, parse_format};
use crate::commands::Outcome;
use crate::output::{say, say_json};

/// Give up writes that only a flash cache has
///
/// For an image whose cache is lost: the image is used as it is from now on. It is sound, and behind by everything that
/// was not home. With --cache and --disk, a cache forgets a disk whose image is lost. Its session tells it from all others:
/// `vellum info` shows the sessions of the images that are to stay.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The file or block device of a cache that is to forget a disk
    #[arg(long, value_name = "CACHE", requires = "disk", conflicts_with = "image")]
    cache: Option<PathBuf>,
    /// The disk, by the digits of its session, or else its own, as `vellum flash info` shows them
    #[arg(long, value_name = "DISK", requires = "cache")]
    disk: Option<String>,
    /// Format of the image: qcow2 or vellum. Default: detected
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The image
    #[arg(value_name = "IMAGE", required_unless_present = "cache")]
    image: Option<PathBuf>,
}

pub(super) fn run(args: &Args) -> Outcome {
    if let (Some(cache), Some(disk)) = (&args.cache, &args.disk) {
        let was_there =
            run_worker(IoMode::Auto, async || flash::forget_row(cache, disk).await)?.map_err(in_use)?;
        match args.output {
            OutputFormat::Json => say_json(&json!({ "disk": disk, "forgotten": was_there })),
            OutputFormat::Human if was_there => say(&format!("{} has forgotten the disk.", cache.display())),
            OutputFormat::Human => say(&format!("{} knows no such disk: nothing to do", cache.display())),
        }
        return Ok(ExitCode::SUCCESS);
    }
    let image = args.image.as_ref().expect("one of both is given");
    let options = ImageOptions { format: args.format, ..ImageOptions::default() };
    let session = run_worker(IoMode::Auto, async || flash::forget(image, &options).await)??;
    let name = image.display();
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": name.to_string(),
            "cache": session.map(|session| session.cache.to_string()),
            "was-behind": session.is_some_and(|session| session.holds_writes()),
        })),
        OutputFormat::Human => say(&match session {
            None => format!("{name} names no flash cache: nothing to do"),
            Some(session) if session.holds_writes() => format!(
                "{name} is used as it is from now on: what only the flash cache {} had is given up",
                session.cache
            ),
            Some(_) => format!("{name} was complete, and names no flash cache any more"),
        }),
    }
    Ok(ExitCode::SUCCESS)
}
