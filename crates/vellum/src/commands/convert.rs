//! `vellum convert`: copy a disk into a new image of any format.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use vellum_core::{Error, ErrorKind, Result, SharedDisk};
use vellum_daemon::{CreateTarget, ImageOptions, create_qcow2, create_raw, open_image};
use vellum_format::FormatKind;
use vellum_io::{IoMode, run as run_worker};
use vellum_layer::{CopyOptions, copy};

use super::{Failure, Outcome, with_code};
use crate::args::{NewImage, OutputFormat, parse_format, parse_size};
use crate::output::say_json;
use crate::progress::{Progress, stop_flag};

/// Copy a disk into a new image, of the same or another format
///
/// Zeros are not stored. An image that could not be finished is removed; a file that was there before is emptied.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the source; guessed when not given
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Format of the target
    #[arg(short = 'O', long, value_name = "FMT", value_parser = parse_format, default_value = "raw")]
    target_format: FormatKind,
    /// Options of the target as KEY=VALUE, separated by commas; see `vellum create -o help`
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Copy this internal snapshot of the source, by id or name
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Runs of zeros shorter than this are stored; 0 stores all
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = parse_size, default_value = "4k")]
    sparse_size: u64,
    /// Pieces copied at once
    #[arg(short = 'm', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    parallel: u16,
    /// The target exists: fill it instead of making it. It must be large enough
    #[arg(short = 'n', long)]
    no_create: bool,
    /// With -n: the target reads as zero already, so zeros need not be written
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// Transfers go past the page cache
    #[arg(long)]
    direct: bool,
    /// Read the source even while another program writes it
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Show a bar (on a terminal it is always shown)
    #[arg(short, long)]
    progress: bool,
    /// Say nothing
    #[arg(short, long)]
    quiet: bool,
    /// How the answer is printed
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Also open backing and data files in DIR
    #[arg(long, value_name = "DIR")]
    allow_dir: Vec<PathBuf>,
    /// The image to copy
    source: PathBuf,
    /// The image to make
    target: PathBuf,
}

pub(crate) fn run(args: Args) -> Outcome {
    let bytes = run_worker(IoMode::Auto, async || convert(&args).await)??;
    if args.output == OutputFormat::Json {
        say_json(&json!({
            "source": args.source.display().to_string(),
            "target": args.target.display().to_string(),
            "format": args.target_format.to_string(),
            "virtual-size": bytes,
        }));
    }
    Ok(ExitCode::SUCCESS)
}

async fn convert(args: &Args) -> Result<u64, Failure> {
    let new = NewImage::parse(&args.options)?;
    if args.target_format == FormatKind::Raw
        && let Some(option) = &new.only_qcow2
    {
        return Err(Error::invalid(format!("-o {option} is for qcow2: say `-O qcow2`")).into());
    }
    if new.backing_file.is_some() {
        return Err(Error::invalid(
            "a copy holds all of its disk and has no backing image; for one over a backing image use `vellum create -b`",
        )
        .into());
    }
    if same_file(&args.source, &args.target) {
        return Err(
            Error::invalid(format!("{} cannot be converted into itself", args.source.display())).into()
        );
    }
    let options = ImageOptions {
        format: args.format,
        snapshot: args.snapshot.clone(),
        force_share: args.force_share,
        direct: args.direct,
        allow_dirs: args.allow_dir.clone(),
        ..ImageOptions::reading()
    };
    let source = open_image(&args.source, &options).await?;
    let size = source.disk().geometry().size;
    if new.size.is_some_and(|wanted| wanted != size) {
        return Err(
            Error::invalid(format!("-o size: the disk has {size} bytes, and a copy keeps them")).into()
        );
    }
    let existed = args.target.exists();
    if !args.no_create {
        make(args, &new, size).await?;
    }
    let result = fill(args, source.disk(), size).await;
    let result = result.and(source.close().await);
    result.map(|()| size).map_err(|error| {
        let code = if error.kind() == ErrorKind::Closed { 130 } else { 1 };
        let left = give_up(args, existed, error.kind());
        with_code(code)(error.context(left))
    })
}

/// Sees to it that nobody takes what could not be finished for a whole image, and says what is left of it.
fn give_up(args: &Args, existed: bool, why: ErrorKind) -> String {
    let target = args.target.display();
    let is_file = args.target.metadata().is_ok_and(|facts| facts.is_file());
    // Where another program has it open by now, it is no longer ours to empty.
    if args.no_create || !is_file || why == ErrorKind::Locked {
        return format!("{target} holds a copy that is not whole");
    }
    // Emptied first: the name may be a link, or not the only one.
    let emptied = std::fs::OpenOptions::new().write(true).truncate(true).open(&args.target);
    match (emptied, existed) {
        (Err(error), _) => format!("{target} holds a copy that is not whole, and cannot be emptied: {error}"),
        (Ok(_), true) => format!("{target} was emptied, as the copy is not whole"),
        (Ok(_), false) => match std::fs::remove_file(&args.target) {
            Ok(()) => "the unfinished image was removed".to_owned(),
            Err(error) => {
                format!("{target} is empty, as the copy is not whole, and cannot be removed: {error}")
            }
        },
    }
}

async fn make(args: &Args, new: &NewImage, size: u64) -> Result<()> {
    match args.target_format {
        FormatKind::Raw => create_raw(&args.target, size, new.qcow2.preallocation).await,
        FormatKind::Qcow2 => {
            let target = CreateTarget {
                path: args.target.clone(),
                size: Some(size),
                backing: None,
                trust_backing: true,
                allow_dirs: Vec::new(),
            };
            create_qcow2(&target, new.qcow2.clone()).await.map(drop)
        }
    }
}

async fn fill(args: &Args, source: &SharedDisk, size: u64) -> Result<()> {
    let options = ImageOptions {
        format: Some(args.target_format),
        direct: args.direct,
        allow_dirs: args.allow_dir.clone(),
        ..ImageOptions::default()
    };
    let target = open_image(&args.target, &options).await?;
    let room = target.disk().geometry().size;
    if room < size {
        target.close().await?;
        return Err(Error::new(
            ErrorKind::NoSpace,
            format!("{} has {room} bytes, the disk {size}", args.target.display()),
        ));
    }
    let bar = Progress::new(size, args.quiet);
    let stop = stop_flag()?;
    let is_fresh = !args.no_create && !target.members[0].storage.limits().fixed_len;
    let how = CopyOptions {
        pieces_at_once: usize::from(args.parallel),
        sparse_bytes: args.sparse_size,
        target_is_zero: is_fresh || args.target_is_zero,
        stop: &stop,
    };
    let result = copy(source, target.disk(), how, &|bytes| bar.set(bytes)).await;
    bar.end();
    // Closed in any case; what went wrong first is told.
    let closed = target.close().await;
    result.and(closed)
}

fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}
