//! `vellum flash resize`.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use vellum_core::ErrorKind;
use vellum_daemon::flash::{ResizedFlash, resize};
use vellum_daemon::signals::Stop;
use vellum_daemon::{IoMode, run as run_worker};

use super::in_use;
use crate::args::{OutputFormat, parse_size};
use crate::commands::{Failure, Outcome, with_code};
use crate::output::{human_bytes, say, say_json};
use crate::progress::{Progress, Wish};

/// Make a flash cache larger or smaller
///
/// No server may have it open. What images lack is kept, or the size is refused: `vellum flash drain` writes it home. What
/// images have too is given up where its place goes away. If the command is stopped, fails or is killed, the cache has
/// its old size or the new one, and nothing that images lack is lost.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Show the progress
    #[arg(short = 'p', long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The file or block device
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// How much of the drive it takes from now on, such as 200G. Default for a block device: all of it
    #[arg(value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
}

pub(super) fn run(args: &Args) -> Outcome {
    let resized = run_worker(IoMode::Auto, async || resized(args).await)??;
    let name = args.path.display();
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": name.to_string(),
            "size": resized.size,
            "capacity-bytes": resized.capacity,
            "moved-bytes": resized.moved,
            "given-up-bytes": resized.given_up,
        })),
        OutputFormat::Human if !args.quiet => {
            let mut line = format!("{name}: a flash cache for {} of blocks", human_bytes(resized.capacity));
            if resized.moved + resized.given_up > 0 {
                line += &format!(
                    "; {} moved, {} given up that images have too",
                    human_bytes(resized.moved),
                    human_bytes(resized.given_up)
                );
            }
            say(&line);
        }
        OutputFormat::Human => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn resized(args: &Args) -> Result<ResizedFlash, Failure> {
    let mut stop = Stop::new()?;
    let wish = Wish { is_wanted: args.progress, quiet: args.quiet, output: args.output };
    let bar = OnceCell::new();
    let progress = |done, total| bar.get_or_init(|| Progress::new(total, wish)).set(done);
    let done = resize(&args.path, args.size, &mut stop, &progress).await;
    bar.get().into_iter().for_each(Progress::end);
    done.map_err(|error| match error.kind() {
        ErrorKind::Closed => with_code(130)(error.context("interrupted")),
        _ => in_use(error),
    })
}
