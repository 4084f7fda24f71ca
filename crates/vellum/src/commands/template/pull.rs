//! `vellum template pull`: copy a published template into an image.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use vellum_daemon::convert::{Conversion, Step};
use vellum_daemon::published::{Pulled, pull};
use vellum_daemon::signals::Stop;
use vellum_daemon::{FormatKind, IoMode, run as run_worker};

use super::interrupted;
use crate::args::{ChunkCacheArgs, NewImage, OutputFormat, parse_format};
use crate::commands::{Failure, Outcome};
use crate::output::{human_bytes, say, say_json};
use crate::progress::{Progress, Wish};

/// Copy a published template into a new image
///
/// Every chunk is compared with its digest. The new image is written under a temporary name in its directory and renamed
/// when it is complete. With --chunk-cache, an interrupted pull does not fetch again what it had fetched.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the image: raw, qcow2 or vellum
    ///
    /// Default: taken from its name (.raw, .qcow2, .vlm), otherwise raw.
    #[arg(short = 'O', long, value_name = "FMT", value_parser = parse_format)]
    target_format: Option<FormatKind>,
    /// Format options of the image; `vellum create -o help` lists them
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,
    #[command(flatten)]
    cache: ChunkCacheArgs,
    /// Show progress
    ///
    /// A terminal always shows a progress bar.
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Where from: s3://BUCKET/PREFIX/NAME or file:///DIR/NAME, with :VERSION or the newest one
    #[arg(value_name = "TEMPLATE")]
    url: String,
    /// The image to create
    #[arg(value_name = "IMAGE")]
    target: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let pulled = run_worker(IoMode::Auto, async || fetch(args).await)??;
    let counts = pulled.counts;
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": args.target.display().to_string(),
            "template": pulled.url,
            "virtual-size": pulled.size,
            "fetched-chunks": counts.fetched,
            "fetched-bytes": counts.fetched_bytes,
            "cached-chunks": counts.cached,
        })),
        OutputFormat::Human if !args.quiet => say(&format!(
            "{}: {} from {}; {} chunks fetched ({}), {} from the local cache",
            args.target.display(),
            human_bytes(pulled.size),
            pulled.url,
            counts.fetched,
            human_bytes(counts.fetched_bytes),
            counts.cached
        )),
        OutputFormat::Human => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn fetch(args: &Args) -> Result<Pulled, Failure> {
    let format = args.target_format.or_else(|| FormatKind::of_name(&args.target)).unwrap_or(FormatKind::Raw);
    let new = NewImage::parse(&args.options)?;
    new.refuse_encryption()?;
    new.suits(format, "-O")?;
    if new.backing_file.is_some() {
        return Err(
            vellum_core::Error::invalid("a copy contains its whole disk and has no backing image").into()
        );
    }
    let conversion = Conversion {
        secrets: Default::default(),
        target: args.target.clone(),
        format,
        qcow2: new.qcow2,
        native: new.native,
        fills_existing: false,
        must_be_encrypted: None,
        target_is_zero: false,
        data_files: Vec::new(),
        allow_dirs: Vec::new(),
        remote: Default::default(),
        direct: false,
        writes_direct: true,
        never_flushed: false,
        pieces_at_once: 8,
        sparse_bytes: 4096,
        out_of_order: false,
        rate: None,
        salvages: false,
        compression: None,
        backing: None,
        bitmaps: Vec::new(),
    };
    let mut stop = Stop::new()?;
    let bar = OnceCell::new();
    let wish = Wish { is_wanted: args.progress, quiet: args.quiet, output: args.output };
    let progress = |step| match step {
        Step::IsPlain | Step::Lost(_) | Step::LostInAll(_) => {}
        Step::Begins(size) => drop(bar.set(Progress::new(size, wish))),
        Step::Copied(bytes) => bar.get().into_iter().for_each(|bar: &Progress| bar.set(bytes)),
        Step::Ends => bar.get().into_iter().for_each(Progress::end),
    };
    pull(&args.url, &conversion, args.cache.choice().as_ref(), &mut stop, &progress)
        .await
        .map_err(interrupted)
}
