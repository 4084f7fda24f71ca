//! `vellum commit`: what an image has goes into an image below it.

use std::cell::OnceCell;
use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use vellum_core::ErrorKind;
use vellum_daemon::commit::{Commit, Committed, commit};
use vellum_daemon::signals::Stop;
use vellum_daemon::{FormatKind, ImageOptions, IoMode, run as run_worker};

use super::{Failure, Outcome, with_code};
use crate::args::{AllowArgs, OutputFormat, parse_format};
use crate::output::{human_bytes, say, say_json, say_json_line};
use crate::progress::{Progress, Wish};
use crate::secrets::SecretArgs;

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
    /// Format of the image: qcow2 or vellum. Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// The image below that gets the contents. Default: the one directly below
    #[arg(short, long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Do not empty the image; accepted for scripts, because it never is
    #[arg(short = 'd', hide = true)]
    keep: bool,
    /// Commit even if other images stand on the backing image; they are useless afterwards
    #[arg(long)]
    force: bool,
    /// Bypass the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// Allow writing to FILE as the data file of the backing image
    #[arg(long, value_name = "FILE")]
    data_file: Vec<PathBuf>,
    /// Show progress
    ///
    /// A terminal always shows a progress bar. Elsewhere, -p prints lines as qemu-img does, or lines of JSON
    /// with --output json. SIGUSR1 prints the progress once, with or without -p.
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    secrets: SecretArgs,
    /// The image
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let Committed { base, between, bytes_written } =
        run_worker(IoMode::Auto, async || committed(args).await)??;
    let (name, base) = (args.file.display(), base.display());
    let between: Vec<String> = between.iter().map(|path| path.display().to_string()).collect();
    match args.output {
        OutputFormat::Json => {
            let answer = json!({
                "filename": name.to_string(),
                "committed-into": base.to_string(),
                "useless": between,
                "bytes-written": bytes_written,
            });
            // Among lines of JSON the answer is one of them.
            if args.progress { say_json_line(&answer) } else { say_json(&answer) }
        }
        OutputFormat::Human if args.quiet => {}
        OutputFormat::Human => {
            say(&format!(
                "{base} now has everything that {name} has: {} written",
                human_bytes(bytes_written)
            ));
            if !between.is_empty() {
                say(&format!("of no use any more: {}", between.join(", ")));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn committed(args: &Args) -> Result<Committed, Failure> {
    let options = ImageOptions {
        secrets: args.secrets.read()?,
        format: args.format,
        direct: args.direct,
        allow_dirs: args.allow.places(),
        remote_timeout: args.allow.remote_timeout,
        data_files: args.data_file.clone(),
        ..ImageOptions::default()
    };
    let commit_wish = Commit { base: args.base.clone(), force: args.force };
    let mut stop = Stop::new()?;
    let wish = Wish { is_wanted: args.progress, quiet: args.quiet, output: args.output };
    let bar = OnceCell::new();
    let progress = |size, done| bar.get_or_init(|| Progress::new(size, wish)).set(done);
    let done = commit(&args.file, &options, &commit_wish, &mut stop, &progress).await;
    bar.get().into_iter().for_each(Progress::end);
    done.map_err(|error| match error.kind() {
        ErrorKind::Closed => with_code(130)(error.context("interrupted; run it again to continue")),
        _ => error.into(),
    })
}
