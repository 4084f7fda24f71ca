//! `vellum flash drain` and `vellum flash recover`: what only the cache has goes home to the images.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};
use vellum_core::{Error, Result};
use vellum_daemon::control::{Request, call};
use vellum_daemon::flash::{Completed, complete};
use vellum_daemon::{FormatKind, ImageOptions, IoMode, run as run_worker};

use super::in_use;
use crate::args::{AllowArgs, OutputFormat, parse_format};
use crate::commands::Outcome;
use crate::output::{human_bytes, say, say_json};
use crate::secrets::SecretArgs;

/// Write home to the images what only a flash cache has
///
/// With --control, a served disk is drained while guests continue. Without it, the cache and the images must not be in
/// use: the cache is recovered if its server was killed, and afterwards each image is complete and can be used without
/// the cache.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Control socket of the server that serves the disk, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH", conflicts_with_all = ["cache", "images"])]
    control: Option<PathBuf>,
    /// Export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT", requires = "control")]
    disk: Option<String>,
    #[command(flatten)]
    how: HowArgs,
    /// The file or block device of the cache
    #[arg(value_name = "CACHE", required_unless_present = "control")]
    cache: Option<PathBuf>,
    /// The images
    #[arg(value_name = "IMAGE", required_unless_present = "control")]
    images: Vec<PathBuf>,
}

/// Recover a flash cache whose server was killed
///
/// `vellum serve --flash` does the same when it opens the cache. With --full, the images are also completed, so that
/// they can be used without the cache, also on another host. No flushed data is lost.
#[derive(clap::Args)]
pub(crate) struct RecoverArgs {
    /// Also write home what only the cache has of these images
    #[arg(long, requires = "images")]
    full: bool,
    #[command(flatten)]
    how: HowArgs,
    /// The file or block device of the cache
    #[arg(value_name = "CACHE")]
    cache: PathBuf,
    /// The images, with --full
    #[arg(value_name = "IMAGE", requires = "full")]
    images: Vec<PathBuf>,
}

#[derive(clap::Args)]
struct HowArgs {
    /// Format of the images: qcow2 or vellum. Default: detected
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    secrets: SecretArgs,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
}

impl HowArgs {
    fn options(&self) -> Result<ImageOptions> {
        Ok(ImageOptions {
            format: self.format,
            allow_dirs: self.allow.places(),
            remote: self.allow.remote.usual(),
            // Images that are encrypted are not cached, but they may be below one that is.
            secrets: self.secrets.read()?,
            ..ImageOptions::default()
        })
    }
}

pub(super) fn run(args: &Args) -> Outcome {
    if let Some(control) = &args.control {
        let request = Request::FlashDrain { disk: args.disk.clone() };
        let answer = run_worker(IoMode::Auto, async || call(control, &request).await)??;
        match args.how.output {
            OutputFormat::Json => say_json(&answer),
            OutputFormat::Human => {
                let left = human_bytes(answer["dirty-bytes"].as_u64().unwrap_or_default());
                say(&format!("All that was written before is home. Written since: {left}."));
            }
        }
        return Ok(ExitCode::SUCCESS);
    }
    let Some(cache) = &args.cache else { return Err(Error::invalid("name the cache and the images").into()) };
    finish(cache, &args.images, &args.how)
}

pub(super) fn recover(args: &RecoverArgs) -> Outcome {
    finish(&args.cache, &args.images, &args.how)
}

fn finish(cache: &Path, images: &[PathBuf], how: &HowArgs) -> Outcome {
    let options = how.options()?;
    let done: Result<Completed> = run_worker(IoMode::Auto, async || complete(cache, images, &options).await)?;
    let done = done.map_err(in_use)?;
    match how.output {
        OutputFormat::Json => say_json(&said(cache, &done)),
        OutputFormat::Human => {
            if images.is_empty() {
                say(&format!("{} was recovered.", cache.display()));
            }
            for (image, bytes) in &done.images {
                say(&format!("{}: complete; {} written home", image.display(), human_bytes(*bytes)));
            }
            let left = &done.left;
            if !left.is_empty() {
                let bytes = left.iter().map(|row| (row.dirty_blocks + row.zero_blocks) * 4096).sum();
                let disks = if left.len() == 1 { "disk" } else { "disks" };
                say(&format!(
                    "{} still holds writes of {} other {disks} ({}): `vellum flash info` lists them",
                    cache.display(),
                    left.len(),
                    human_bytes(bytes)
                ));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn said(cache: &Path, done: &Completed) -> Value {
    let images: Vec<_> = done
        .images
        .iter()
        .map(|(image, bytes)| json!({ "image": image.display().to_string(), "bytes-written-home": bytes }))
        .collect();
    json!({
        "filename": cache.display().to_string(),
        "images": images,
        "disks-left": done.left.len(),
    })
}
