//! `vellum commit`: what an image has goes into an image below it.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use vellum_daemon::commit::{Commit, Committed, commit};
use vellum_daemon::{IoMode, run as run_worker};

use super::change::ChangeArgs;
use super::{Failure, Outcome};
use crate::output::human_bytes;

/// Write the contents of an image into its backing image
///
/// Everything that the image has is written into the image below it, or with -b into one further down. A backing image that is
/// smaller grows. The disk does not change, and a crash at any moment loses nothing: if the command is interrupted, run it
/// again.
///
/// The image itself keeps what it has. It can be deleted afterwards, or used further. Images between it and the one that
/// gets the contents are of no use any more, and neither is any other image that stands on these. Where such images
/// are found in the same directories, the command is refused.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    change: ChangeArgs,
    /// The image below that gets the contents. Default: the one directly below
    #[arg(short, long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Do not empty the image; accepted for scripts, because it never is
    #[arg(short = 'd', hide = true)]
    keep: bool,
    /// Commit even if other images stand on the backing image; they are useless afterwards
    #[arg(long)]
    force: bool,
    /// The image
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let Committed { base, between, bytes_written } =
        run_worker(IoMode::Auto, async || committed(args).await)??;
    let (name, base) = (args.file.display(), base.display());
    let between: Vec<String> = between.iter().map(|path| path.display().to_string()).collect();
    let mut lines =
        vec![format!("{base} now has everything that {name} has: {} written", human_bytes(bytes_written))];
    if !between.is_empty() {
        lines.push(format!("of no use any more: {}", between.join(", ")));
    }
    let answer = json!({
        "filename": name.to_string(),
        "committed-into": base.to_string(),
        "useless": between,
        "bytes-written": bytes_written,
    });
    args.change.answer(&answer, &lines);
    Ok(ExitCode::SUCCESS)
}

async fn committed(args: &Args) -> Result<Committed, Failure> {
    let options = args.change.options()?;
    let wish = Commit { base: args.base.clone(), force: args.force };
    args.change
        .watched(async |stop, progress| commit(&args.file, &options, &wish, stop, progress).await)
        .await
}
