//! `vellum rebase`: another backing image for an image that is not in use.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use serde_json::json;
use vellum_core::{Error, ErrorKind};
use vellum_daemon::flatten::flatten;
use vellum_daemon::image::open_file;
use vellum_daemon::rebase::{Rebase, rebase};
use vellum_daemon::signals::Stop;
use vellum_daemon::{FormatKind, ImageOptions, IoMode, run as run_worker};

use super::create::text_of_name;
use super::{Failure, Outcome, with_code};
use crate::args::{AllowArgs, OutputFormat, parse_format};
use crate::output::{human_bytes, say, say_json, say_json_line};
use crate::progress::{Progress, Wish};
use crate::secrets::SecretArgs;

/// Give an image another backing image
///
/// The disk does not change: where the old and the new backing image differ, and the image has no data of its own, the old
/// data is copied into it. Then the image names the new backing image. A crash at any moment loses nothing: if the command is
/// interrupted, run it again, and it continues. An image with snapshots is refused, because they also read from the
/// backing image.
///
/// With -u nothing is copied, and the old backing image need not exist: only the name changes. That is right when the
/// backing image was renamed or moved. If the new one has other contents, the disk changes.
///
/// `-b ""` makes the image independent, as `vellum flatten` does; with -u too, what only the backing image has then reads as
/// zero.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the image: qcow2 or vellum. Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// The new backing image; a relative name is relative to the image's directory. `""` for none
    #[arg(short, long, value_name = "FILE")]
    backing: OsString,
    /// Format of the new backing image. Default: detected from the file, except raw
    #[arg(short = 'F', long, value_name = "FMT", value_parser = parse_format)]
    backing_format: Option<FormatKind>,
    /// Change the name alone, without opening the old backing image
    #[arg(short = 'u', long = "unsafe")]
    is_unsafe: bool,
    /// Take a backing image at a URL for fixed although its server does not prove it
    #[arg(long)]
    trust_base: bool,
    /// Bypass the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// Allow writing to FILE as the data file of the image
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

/// What was done.
struct Answer {
    before: Option<String>,
    after: Option<(String, FormatKind)>,
    bytes_written: u64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let answer = run_worker(IoMode::Auto, async || rebased(args).await)??;
    let name = args.file.display();
    match args.output {
        OutputFormat::Json => {
            let json = json!({
                "filename": name.to_string(),
                "backing-filename-before": answer.before,
                "backing-filename": answer.after.as_ref().map(|(name, _)| name),
                "backing-filename-format": answer.after.as_ref().map(|(_, format)| format.to_string()),
                "bytes-written": answer.bytes_written,
            });
            // Among lines of JSON the answer is one of them.
            if args.progress { say_json_line(&json) } else { say_json(&json) }
        }
        OutputFormat::Human if args.quiet => {}
        OutputFormat::Human => {
            let copied = match args.is_unsafe {
                true => "nothing was compared".to_owned(),
                false => format!("{} copied", human_bytes(answer.bytes_written)),
            };
            say(&match &answer.after {
                Some((after, format)) => {
                    format!("{name} now has the backing image {after} ({format}): {copied}")
                }
                None => format!("{name} no longer has a backing image: {copied}"),
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn rebased(args: &Args) -> Result<Answer, Failure> {
    let backing = text_of_name(args.backing.clone())?;
    let options = ImageOptions {
        secrets: args.secrets.read()?,
        format: args.format,
        direct: args.direct,
        allow_dirs: args.allow.places(),
        remote_timeout: args.allow.remote_timeout,
        data_files: args.data_file.clone(),
        trust_base: args.trust_base,
        ..ImageOptions::default()
    };
    let mut stop = Stop::new()?;
    let wish = Wish { is_wanted: args.progress, quiet: args.quiet, output: args.output };
    let bar = OnceCell::new();
    let progress = |size, done| bar.get_or_init(|| Progress::new(size, wish)).set(done);
    let done = change(args, backing, &options, &mut stop, &progress).await;
    bar.get().into_iter().for_each(Progress::end);
    done.map_err(|error| match error.kind() {
        ErrorKind::Closed => with_code(130)(error.context("interrupted; run it again to continue")),
        _ => error.into(),
    })
}

async fn change(
    args: &Args,
    backing: String,
    options: &ImageOptions,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<Answer, Error> {
    if !backing.is_empty() {
        let wish = Rebase { backing: (backing.clone(), args.backing_format), is_unsafe: args.is_unsafe };
        let done = rebase(&args.file, options, &wish, stop, progress).await?;
        let before = done.before.map(|path| path.display().to_string());
        return Ok(Answer { before, after: Some((backing, done.format)), bytes_written: done.bytes_written });
    }
    if args.backing_format.is_some() {
        return Err(Error::invalid("-F gives the format of a backing image, but -b \"\" names none"));
    }
    if args.is_unsafe {
        return let_go(&args.file, options).await;
    }
    let done = flatten(&args.file, options, 8, stop, progress).await?;
    let before = done.backing.map(|path| path.display().to_string());
    Ok(Answer { before, after: None, bytes_written: done.bytes_written })
}

/// The image loses what only the images below have.
async fn let_go(file: &Path, options: &ImageOptions) -> Result<Answer, Error> {
    let (storage, kind) = open_file(file, options).await?;
    let head = kind.format().read(&*storage).await?;
    let before = head.backing().map(|(name, _)| name.to_owned());
    if head.needs_replay() {
        kind.format().recover(&storage).await?;
    }
    kind.format().detach(&storage, false, &AtomicBool::new(false)).await?;
    Ok(Answer { before, after: None, bytes_written: 0 })
}
