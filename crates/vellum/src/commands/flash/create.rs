//! `vellum flash create`.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use vellum_daemon::{IoMode, flash, run as run_worker};

use crate::args::{OutputFormat, parse_size};
use crate::commands::Outcome;
use crate::output::{human_bytes, say, say_json};

/// Make a flash cache
///
/// PATH is a file that does not exist, or a block device. The space is reserved at once. For each 64 KiB that are
/// cached, a server needs about 65 bytes of memory, and more where single blocks are: `vellum serve --flash-memory` is
/// the bound.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Overwrite what is there
    ///
    /// If it is a flash cache that holds writes, they are lost: `vellum flash info` shows whether it does.
    #[arg(long)]
    force: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The file or block device
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// How much of the drive it takes, such as 200G. Default for a block device: all of it
    #[arg(value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
}

pub(super) fn run(args: &Args) -> Outcome {
    let made = run_worker(IoMode::Auto, async || flash::create(&args.path, args.size, args.force).await)??;
    let name = args.path.display();
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": name.to_string(),
            "size": made.size,
            "capacity-bytes": made.capacity,
        })),
        OutputFormat::Human if !args.quiet => {
            say(&format!("{name}: a flash cache for {} of blocks", human_bytes(made.capacity)));
        }
        OutputFormat::Human => {}
    }
    Ok(ExitCode::SUCCESS)
}
