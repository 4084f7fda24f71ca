//! `vellum template push`: publish a disk in a store.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use vellum_core::{Error, Result};
use vellum_daemon::published::{Pushed, push};
use vellum_daemon::signals::Stop;
use vellum_daemon::{IoMode, run as run_worker};

use super::interrupted;
use crate::args::{OutputFormat, ReadArgs, parse_size};
use crate::commands::Outcome;
use crate::output::{human_bytes, say, say_json};
use crate::progress::{Progress, Wish};

/// Publish the disk of an image in a store
///
/// The disk is cut into chunks, which are compressed and stored under the digest of their content. Zeros are not stored,
/// and a chunk that the store has already is not uploaded: versions and templates under one prefix share their chunks. An
/// interrupted push continues when it is run again.
///
/// A version is never replaced. Without VERSION, the version is named after the content.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    read: ReadArgs,
    /// Size of a chunk: a power of two from 64k to 4M
    ///
    /// Versions share chunks only if they have the same size.
    #[arg(long, value_name = "SIZE", value_parser = parse_chunk_size, default_value = "256k")]
    chunk_size: u32,
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
    /// The image to publish, of any format
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Where to: s3://BUCKET/PREFIX/NAME or file:///DIR/NAME, with :VERSION or without
    #[arg(value_name = "TEMPLATE")]
    url: String,
}

/// The size of a chunk, as a power of two.
fn parse_chunk_size(text: &str) -> Result<u32> {
    let size = parse_size(text)?;
    match size.is_power_of_two() && (16..=22).contains(&size.trailing_zeros()) {
        true => Ok(size.trailing_zeros()),
        false => Err(Error::invalid(format!("{text} is not a power of two from 64k to 4M"))),
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let pushed = run_worker(IoMode::Auto, async || publish(args).await)?.map_err(interrupted)?;
    let counts = pushed.counts;
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": args.image.display().to_string(),
            "name": pushed.name.name,
            "version": pushed.name.version,
            "digest": pushed.digest.to_string(),
            "is-new": pushed.is_new,
            "index-size": pushed.index_len,
            "chunks": counts.chunks,
            "chunk-bytes": counts.content_bytes,
            "uploaded-chunks": counts.uploaded,
            "uploaded-bytes": counts.uploaded_bytes,
        })),
        OutputFormat::Human if !args.quiet => say(&format!(
            "{} {}: {} in {} chunks, of which {} were uploaded as {}",
            if pushed.is_new { "published" } else { "was published already:" },
            pushed.name,
            human_bytes(counts.content_bytes),
            counts.chunks,
            counts.uploaded,
            human_bytes(counts.uploaded_bytes)
        )),
        OutputFormat::Human => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn publish(args: &Args) -> Result<Pushed> {
    let mut stop = Stop::new()?;
    let bar = std::cell::OnceCell::new();
    let wish = Wish { is_wanted: args.progress, quiet: args.quiet, output: args.output };
    let progress = |size, bytes| bar.get_or_init(|| Progress::new(size, wish)).set(bytes);
    let (image, options) = args.read.open(&args.image)?;
    let pushed = push(&image, &options, &args.url, args.chunk_size, &mut stop, &progress).await;
    if let Some(bar) = bar.get() {
        bar.end();
    }
    pushed
}

#[cfg(test)]
mod tests {
    use vellum_daemon::published::CHUNK_SHIFT_DEFAULT;

    use super::*;

    #[test]
    fn chunks_have_a_size_that_is_a_power_of_two() {
        assert_eq!(parse_chunk_size("256k").ok(), Some(CHUNK_SHIFT_DEFAULT));
        assert_eq!(parse_chunk_size("4M").ok(), Some(22));
        for bad in ["32k", "8M", "100k", "0", "x"] {
            assert!(parse_chunk_size(bad).is_err(), "{bad}");
        }
    }
}
