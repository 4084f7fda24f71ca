//! `vellum diff` and `vellum apply`: what changed between two disks, and the same change made to a third.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use vellum_core::{Error, ErrorKind, Result};
use vellum_daemon::delta::{Applied, BLOCK, Difference, Differences, Diffing, NewDelta, apply, diff};
use vellum_daemon::signals::Stop;
use vellum_daemon::{FormatKind, ImageOptions, IoMode, open_image, run as run_worker};

use super::change::ChangeArgs;
use super::clone::snapshot_in;
use super::{Failure, Outcome, or_share, with_code};
use crate::args::{AllowArgs, OutputFormat, parse_format};
use crate::names::{Named, named};
use crate::output::{complain, human_bytes, say, say_piece};
use crate::progress::{Progress, Wish};
use crate::secrets::SecretArgs;

/// List what changed between two disks, or write it to a file
///
/// Each disk is an image, or IMAGE@SNAPSHOT for a snapshot inside one. Blocks of 4 KiB are listed that differ: where they begin,
/// how many bytes, and whether they read as zero in the new disk. What both have at the same place of the same file, as two
/// snapshots of one image do, is not read.
///
/// With --delta the new data is written to a file as well. `vellum apply` makes the new disk of a copy of the old one with it.
/// Snapshots of a disk that is being served are read through its server: nbd+unix:///EXPORT@SNAPSHOT?socket=PATH.
#[derive(clap::Args)]
pub(crate) struct DiffArgs {
    /// Write the differences to this file, compressed and with checksums
    #[arg(long, value_name = "FILE")]
    delta: Option<PathBuf>,
    /// Format of the old image. Default: detected
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Format of the new image. Default: detected
    #[arg(short = 'F', long, value_name = "FMT", value_parser = parse_format)]
    second_format: Option<FormatKind>,
    /// Maximum number of pieces of 1 MiB that are read at a time
    #[arg(short = 'm', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    parallel: u16,
    /// Show progress
    ///
    /// A terminal always shows a progress bar. Elsewhere, -p prints lines as qemu-img does. SIGUSR1 prints the progress once,
    /// with or without -p.
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Read the images even if another program has them open for writing
    ///
    /// The result may be wrong.
    #[arg(short = 'U', long, conflicts_with = "delta")]
    force_share: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    secrets: SecretArgs,
    /// The old disk: IMAGE or IMAGE@SNAPSHOT
    #[arg(value_name = "OLD")]
    old: PathBuf,
    /// The new disk: IMAGE or IMAGE@SNAPSHOT
    #[arg(value_name = "NEW")]
    new: PathBuf,
}

/// Change a disk as a delta says that `vellum diff --delta` wrote
///
/// The disk must have what the old disk had wherever the two differed, and the size of the new one. That is checked first, together with
/// every byte of the delta, and nothing is written if it is not so. If the command is interrupted, the disk is neither the
/// old nor the new one: run it again, and it continues.
#[derive(clap::Args)]
pub(crate) struct ApplyArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// The delta
    #[arg(value_name = "DELTA")]
    delta: PathBuf,
    /// The image to change
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// What is printed while it is found.
struct Listing {
    output: OutputFormat,
    is_quiet: bool,
    runs: u64,
}

impl Listing {
    fn say(&mut self, Difference { span, is_zero }: Difference) {
        let (start, length) = (span.start().bytes(), span.len());
        match self.output {
            OutputFormat::Json => {
                let comma = if self.runs == 0 { "" } else { "," };
                let run = json!({ "start": start, "length": length, "zero": is_zero });
                say_piece(&format!("{comma}\n        {run}"));
            }
            OutputFormat::Human if self.is_quiet => {}
            OutputFormat::Human => {
                if self.runs == 0 {
                    say(&format!("{:>16} {:>16}  what", "offset", "bytes"));
                }
                say(&format!("{start:>16} {length:>16}  {}", if is_zero { "zero" } else { "data" }));
            }
        }
        self.runs += 1;
    }
}

/// A disk that was found, with its size.
struct Seen {
    sizes: (u64, u64),
    all: Differences,
}

pub(crate) fn run_diff(args: &DiffArgs) -> Outcome {
    let listing = RefCell::new(Listing { output: args.output, is_quiet: args.quiet, runs: 0 });
    let Seen { sizes: (old, new), all } = run_worker(IoMode::Auto, async || examine(args, &listing).await)??;
    let runs = listing.borrow().runs;
    match args.output {
        OutputFormat::Json => {
            let close = if runs == 0 { "]" } else { "\n    ]" };
            say(&format!(
                "{close},\n    \"old-size\": {old},\n    \"new-size\": {new},\n    \"block-size\": {BLOCK},\n    \"changed-bytes\": {},\n    \
                 \"zero-bytes\": {},\n    \"bytes-read\": {}\n}}",
                all.bytes, all.zero_bytes, all.bytes_read
            ));
        }
        OutputFormat::Human if args.quiet => {}
        OutputFormat::Human if runs == 0 && old == new => say("The disks are the same."),
        OutputFormat::Human => {
            let size = match old == new {
                true => String::new(),
                false => format!("; the size was {old} and is {new} bytes"),
            };
            let delta = args
                .delta
                .as_ref()
                .map_or_else(String::new, |path| format!(", written to {}", path.display()));
            say(&format!("{} of {} changed{delta}{size}", human_bytes(all.bytes), human_bytes(new)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn examine(args: &DiffArgs, listing: &RefCell<Listing>) -> Result<Seen, Failure> {
    let mut stop = Stop::new()?;
    let interrupted = |error: Error| match error.kind() {
        ErrorKind::Closed => with_code(130)(error.context("interrupted")),
        _ => or_share(error),
    };
    let secrets = args.secrets.read()?;
    let (allow, tls) = (&args.allow, &args.secrets);
    let options = |named: &Named, snapshot| {
        Ok(ImageOptions {
            secrets: secrets.clone(),
            may_be_weak: true,
            format: named.format,
            snapshot,
            force_share: args.force_share,
            allow_dirs: args.allow.places(),
            remote: allow.remote.of(&[named], tls)?,
            ..ImageOptions::reading()
        })
    };
    let (path, its) = place(&args.old, args.format, &options)?;
    let old = stop.or_stopped(open_image(&path, &its)).await.map_err(interrupted)?;
    let (path, its) = place(&args.new, args.second_format, &options)?;
    let new = stop.or_stopped(open_image(&path, &its)).await.map_err(interrupted)?;
    let sizes = (old.disk().geometry().size, new.disk().geometry().size);
    let mut delta = match &args.delta {
        Some(path) => Some(NewDelta::begin(path, random()?, sizes.0, sizes.1).await?),
        None => None,
    };
    if let Some(path) = args.delta.as_ref().filter(|_| !args.quiet)
        && (old.is_any_encrypted() || new.is_any_encrypted())
    {
        complain(&format!(
            "vellum diff: warning: an image is encrypted and {} is not: what has changed can be read there without a secret",
            path.display()
        ));
    }
    if args.output == OutputFormat::Json {
        say_piece("{\n    \"extents\": [");
    }
    // The list itself shows how far it is.
    let is_quiet = args.quiet || args.delta.is_none();
    let bar = Progress::new(
        sizes.1,
        Wish { is_wanted: args.progress, quiet: is_quiet, output: OutputFormat::Human },
    );
    let mut found = |difference| listing.borrow_mut().say(difference);
    let how = Diffing {
        pieces_at_once: args.parallel.into(),
        stop: &stop.flag,
        progress: &|bytes| bar.set(bytes),
        found: &mut found,
    };
    let all = diff(old.disk(), new.disk(), how, delta.as_mut()).await;
    bar.end();
    let all = all.map_err(interrupted)?;
    if let Some(delta) = delta {
        delta.publish().await?;
    }
    old.close().await?;
    new.close().await?;
    Ok(Seen { sizes, all })
}

/// Where a disk is, and how it is opened.
fn place(
    text: &Path,
    format: Option<FormatKind>,
    options: &dyn Fn(&Named, Option<String>) -> Result<ImageOptions>,
) -> Result<(PathBuf, ImageOptions)> {
    let (path, snapshot) = match snapshot_in(text) {
        Some((path, snapshot)) => (path, Some(snapshot)),
        None => (text.to_owned(), None),
    };
    let named = named(&path, format, false)?;
    let options = options(&named, snapshot)?;
    Ok((named.path, options))
}

fn random() -> Result<[u8; 16]> {
    let mut id = [0; 16];
    let read = std::fs::File::open("/dev/urandom")
        .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut id));
    read.map(|()| id).map_err(|error| Error::io(error, "can't read /dev/urandom"))
}

pub(crate) fn run_apply(args: &ApplyArgs) -> Outcome {
    let applied = run_worker(IoMode::Auto, async || applied(args).await)??;
    let Applied { bytes_written, bytes_there } = applied;
    let name = args.file.display();
    let line = match bytes_written {
        0 => format!("{name} has it already: nothing to do"),
        _ => format!(
            "{name}: {} changed, {} were there already",
            human_bytes(bytes_written),
            human_bytes(bytes_there)
        ),
    };
    let answer =
        json!({ "filename": name.to_string(), "bytes-written": bytes_written, "bytes-there": bytes_there });
    args.change.answer(&answer, &[line]);
    Ok(ExitCode::SUCCESS)
}

async fn applied(args: &ApplyArgs) -> Result<Applied, Failure> {
    let options = args.change.options()?;
    args.change
        .watched(async |stop, progress| apply(&args.delta, &args.file, &options, stop, progress).await)
        .await
}
