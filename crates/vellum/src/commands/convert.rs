//! `vellum convert`: copy a disk into a new image of any format.

use std::cell::Cell;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use vellum_core::{Error, ErrorKind, Result, SharedDisk};
use vellum_daemon::copy::{CopyOptions, copy};
use vellum_daemon::{CreateTarget, ImageOptions, create_native, create_qcow2, create_raw, open_image};
use vellum_format::FormatKind;
use vellum_io::{Draft, IoMode, run as run_worker};
use vellum_layer::Gate;

use super::{Failure, Outcome, or_share, with_code};
use crate::args::{NewImage, OutputFormat, parse_format, parse_size};
use crate::config::allowed;
use crate::output::{say_json, say_json_line};
use crate::progress::{Progress, Stop, Wish};

/// Copy a disk into a new image of the same or another format
///
/// Zeros are not stored.
///
/// The new image is written under a temporary name in the directory of the target and renamed when it is
/// complete. An existing target stays intact until then, so there must be room for both. A target that is a
/// block device, has several hard links or is in a directory that cannot be written to is filled in place, as
/// with -n.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the source: raw, qcow2 or vellum. Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Format of the target: raw, qcow2 or vellum
    ///
    /// Default: taken from its name (.raw, .qcow2, .vlm), otherwise raw.
    #[arg(short = 'O', long, value_name = "FMT", value_parser = parse_format)]
    target_format: Option<FormatKind>,
    /// Format options of the target; `vellum create -o help` lists them
    ///
    /// They are KEY=VALUE, separated by commas.
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Copy this internal snapshot of the source, given by ID or name
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Store runs of zeros shorter than this as data; 0 stores all zeros
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = parse_size, default_value = "4k")]
    sparse_size: u64,
    /// Number of reads in flight, and with -W of writes too
    #[arg(short = 'm', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    parallel: u16,
    /// Write out of order; may be faster, but the new image is laid out out of order
    #[arg(short = 'W', long)]
    out_of_order: bool,
    /// Fill an existing target instead of creating one; it must be large enough
    #[arg(short = 'n', long)]
    no_create: bool,
    /// With -n: skip writing zeros, because the target already reads as zero
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// Bypass the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// With -n: allow writing to FILE as the data file of the target
    #[arg(long, value_name = "FILE", requires = "no_create")]
    data_file: Vec<PathBuf>,
    /// Read the source even if another program has it open for writing
    ///
    /// The copy may be inconsistent.
    #[arg(short = 'U', long)]
    force_share: bool,
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
    /// Also allow backing and data files in DIR; may be given several times
    ///
    /// By default, an image may only refer to files in its own directory.
    #[arg(long, value_name = "DIR")]
    allow_dir: Vec<PathBuf>,
    /// The image to copy
    source: PathBuf,
    /// The image to create
    target: PathBuf,
}

impl Args {
    fn target_format(&self) -> FormatKind {
        self.target_format.or_else(|| FormatKind::of_name(&self.target)).unwrap_or(FormatKind::Raw)
    }

    fn wish(&self) -> Wish {
        Wish { is_wanted: self.progress, quiet: self.quiet, output: self.output }
    }
}

pub(crate) fn run(args: Args) -> Outcome {
    let bytes = run_worker(IoMode::Auto, async || convert(&args).await)??;
    if args.output == OutputFormat::Json {
        let answer = json!({
            "source": args.source.display().to_string(),
            "target": args.target.display().to_string(),
            "format": args.target_format().to_string(),
            "virtual-size": bytes,
        });
        // Among lines of JSON the answer is one of them.
        if args.progress { say_json_line(&answer) } else { say_json(&answer) }
    }
    Ok(ExitCode::SUCCESS)
}

async fn convert(args: &Args) -> Result<u64, Failure> {
    let new = NewImage::parse(&args.options)?;
    new.suits(args.target_format(), "-O")?;
    if new.backing_file.is_some() {
        return Err(Error::invalid(
            "a copy contains its whole disk and has no backing image; to create a clone, use `vellum create -b`",
        )
        .into());
    }
    if same_file(&args.source, &args.target) {
        return Err(
            Error::invalid(format!("{} cannot be converted into itself", args.source.display())).into()
        );
    }
    let mut stop = Stop::new()?;
    let options = ImageOptions {
        format: args.format,
        snapshot: args.snapshot.clone(),
        force_share: args.force_share,
        direct: args.direct,
        allow_dirs: allowed(&args.allow_dir),
        ..ImageOptions::reading()
    };
    let source = open_image(&args.source, &options).await.map_err(or_share)?;
    let size = source.disk().geometry().size;
    if new.size.is_some_and(|wanted| wanted != size) {
        return Err(Error::invalid(format!(
            "-o size: the source has {size} bytes, and a copy keeps its size"
        ))
        .into());
    }
    let draft = if args.no_create { None } else { Draft::begin(&args.target).await? };
    let copying = Copying { args, new: &new, draft: draft.as_ref(), has_begun: Cell::new(false) };
    let data_file = DataFile::of(&copying)?;
    let copied = copying.make_and_fill(source.disk(), size, &mut stop).await;
    let copied = copied.and(source.close().await);
    let has_begun = copying.has_begun.get();
    let done = match (copied, draft) {
        (Ok(()), Some(draft)) => {
            let replaces = draft.replaces();
            draft.publish().await.map_err(|error| error.context(removed(args, replaces)))
        }
        (Ok(()), None) => Ok(()),
        (Err(error), Some(draft)) => {
            let left = give_up_draft(args, draft, error.kind());
            Err(error.context(left))
        }
        (Err(error), None) if has_begun => {
            let left = give_up_in_place(args);
            Err(error.context(left))
        }
        (Err(error), None) => Err(error),
    };
    done.map(|()| size).map_err(|error| {
        let error = match data_file.filter(|_| has_begun) {
            Some(data_file) => data_file.give_up(error),
            None => error,
        };
        match error.kind() {
            ErrorKind::Closed => with_code(130)(error.context("interrupted")),
            _ => error.into(),
        }
    })
}

/// One conversion, once the source is open.
struct Copying<'a> {
    args: &'a Args,
    new: &'a NewImage,
    /// What will get the target's name; the target is filled in place when there is none.
    draft: Option<&'a Draft>,
    /// Whether the target, or a data file, may have been changed.
    has_begun: Cell<bool>,
}

impl Copying<'_> {
    fn path(&self) -> &Path {
        self.draft.map_or(&self.args.target, Draft::path)
    }

    async fn make_and_fill(&self, source: &SharedDisk, size: u64, stop: &mut Stop) -> Result<()> {
        if !self.args.no_create {
            let made = stop.or_stopped(self.make(size)).await;
            // With other errors it was not opened, or is a device too small.
            let is_device = !self.path().metadata().is_ok_and(|facts| facts.is_file());
            self.has_begun.set(match made.as_ref().map_err(Error::kind) {
                Ok(()) | Err(ErrorKind::Closed | ErrorKind::Io) => true,
                Err(ErrorKind::NoSpace) => !is_device,
                Err(_) => false,
            });
            made?;
        }
        self.fill(source, size, stop).await
    }

    /// Where the data file of a new image is, if it has one: the user named it.
    fn new_data_file(&self) -> Result<Option<PathBuf>> {
        let name = self.new.qcow2.data_file.as_ref().filter(|_| !self.args.no_create);
        name.map(|name| Gate::resolve(self.path(), name)).transpose()
    }

    async fn make(&self, size: u64) -> Result<()> {
        let target = CreateTarget {
            path: self.path().to_owned(),
            size: Some(size),
            backing: None,
            trust_backing: true,
            allow_dirs: Vec::new(),
        };
        match self.args.target_format() {
            FormatKind::Raw => create_raw(self.path(), size, self.new.qcow2.preallocation).await,
            FormatKind::Qcow2 => create_qcow2(&target, self.new.qcow2.clone()).await.map(drop),
            FormatKind::Native => create_native(&target, self.new.native.clone()).await.map(drop),
        }
    }

    async fn fill(&self, source: &SharedDisk, size: u64, stop: &Stop) -> Result<()> {
        let args = self.args;
        let options = ImageOptions {
            format: Some(args.target_format()),
            direct: args.direct,
            allow_dirs: allowed(&args.allow_dir),
            data_files: args.data_file.iter().cloned().chain(self.new_data_file()?).collect(),
            ..ImageOptions::default()
        };
        let target = open_image(self.path(), &options).await?;
        let room = target.disk().geometry().size;
        if room < size {
            target.close().await?;
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{} has {room} bytes, but the source has {size}", args.target.display()),
            ));
        }
        let bar = Progress::new(size, args.wish());
        let is_fresh = !args.no_create && !target.members[0].storage.limits().fixed_len;
        let how = CopyOptions {
            pieces_at_once: usize::from(args.parallel),
            sparse_bytes: args.sparse_size,
            target_is_zero: is_fresh || args.target_is_zero,
            out_of_order: args.out_of_order,
            stop: &stop.flag,
        };
        self.has_begun.set(true);
        let result = copy(source, target.disk(), how, &|bytes| bar.set(bytes)).await;
        bar.end();
        // Closed in any case; what went wrong first is told.
        let closed = target.close().await;
        result.and(closed)
    }
}

/// Removes a draft; says what is under the target's name.
fn give_up_draft(args: &Args, draft: Draft, why: ErrorKind) -> String {
    let (path, replaces) = (draft.path().to_owned(), draft.replaces());
    if let Err(error) = draft.discard() {
        return format!("the unfinished copy {} cannot be removed ({error}): delete it", path.display());
    }
    let mut left = removed(args, replaces);
    if replaces && why == ErrorKind::NoSpace {
        left += "; there must be room for both until the copy is complete, or delete the old one first";
    }
    left
}

fn removed(args: &Args, replaces: bool) -> String {
    let target = args.target.display();
    match replaces {
        true => format!("{target} is unchanged, the unfinished copy was removed"),
        false => format!("{target} was not created, the unfinished copy was removed"),
    }
}

/// Sees to it that nobody takes what was filled in place for a whole image; says what is left of it.
fn give_up_in_place(args: &Args) -> String {
    let target = args.target.display();
    let part = format!("{target} contains only part of the copy and must be filled again before it is used");
    let is_file = args.target.metadata().is_ok_and(|facts| facts.is_file());
    if args.no_create || !is_file {
        return part;
    }
    match std::fs::OpenOptions::new().write(true).truncate(true).open(&args.target) {
        Ok(_) => format!("{target} was emptied because the copy is incomplete"),
        Err(error) => format!("{part}; it cannot be emptied ({error})"),
    }
}

/// The data file of a new image: filled under its own name, as it stands in the image.
struct DataFile {
    path: PathBuf,
    existed: bool,
}

impl DataFile {
    fn of(copying: &Copying<'_>) -> Result<Option<Self>> {
        let path = copying.new_data_file()?;
        Ok(path.map(|path| Self { existed: path.exists(), path }))
    }

    fn give_up(self, error: Error) -> Error {
        if !self.existed && std::fs::remove_file(&self.path).is_ok() {
            return error;
        }
        error.context(format!("{} contains only part of the copy's data: delete it", self.path.display()))
    }
}

/// Whether both names lead to one file or device.
fn same_file(a: &Path, b: &Path) -> bool {
    let (Ok(a), Ok(b)) = (a.metadata(), b.metadata()) else { return false };
    let same_device =
        a.file_type().is_block_device() && b.file_type().is_block_device() && a.rdev() == b.rdev();
    (a.dev(), a.ino()) == (b.dev(), b.ino()) || same_device
}
