//! `vellum convert`: copy a disk into a new image of any format.

use std::cell::{Cell, OnceCell};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;
use vellum_core::{Error, ErrorKind, Result};
use vellum_daemon::bitmaps::copies_of;
use vellum_daemon::convert::{self, Conversion, ConvertCompression, Step, same_file};
use vellum_daemon::signals::Stop;
use vellum_daemon::tier::medium_beside;
use vellum_daemon::{Encrypted, FormatKind, ImageOptions, IoMode, Remote, open_image, run as run_worker};

use super::{Failure, Outcome, or_share, with_code};
use crate::args::{AllowArgs, NO_KEY_SECRET, NewImage, OutputFormat, parse_format, parse_size};
use crate::names::{Named, named};
use crate::output::{complain, say_json, say_json_line};
use crate::progress::{Progress, Wish};
use crate::protocol::is_nbd;
use crate::secrets::SecretArgs;
use crate::spoken::is_qemu_command;

/// Copy a disk into a new image of the same or another format
///
/// Zeros are not stored. Several sources are joined: the copy has their disks one behind the other.
///
/// The new image is written under a temporary name in the directory of the target and renamed when it is
/// complete. An existing target stays intact until then, so there must be room for both; one whose data file gets the copy is emptied first. A target that is a
/// block device, has several hard links or is in a directory that cannot be written to is filled in place, as
/// with -n.
#[derive(clap::Args)]
#[command(override_usage = "vellum convert [OPTIONS] SOURCE... TARGET")]
pub(crate) struct Args {
    /// Format of the source: raw, qcow2, vellum, or one that is only read (vmdk, vdi, vpc, vhdx, qed, parallels, dmg, qcow). Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Format of the target: raw, qcow2, vellum or luks
    ///
    /// Default: taken from its name (.raw, .qcow2, .vlm), otherwise raw.
    #[arg(short = 'O', long, value_name = "FMT", value_parser = parse_format)]
    target_format: Option<FormatKind>,
    /// Format options of the target; `vellum create -o help` lists them
    ///
    /// They are KEY=VALUE, separated by commas.
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Store the data compressed (qcow2)
    ///
    /// `-o compression_type` chooses the method: zlib or zstd. Data that is written later is not compressed.
    #[arg(short, long)]
    compress: bool,
    /// With -c: how hard to compress: 1 to 9 (zlib, default 6) or 1 to 19 (zstd, default 3)
    #[arg(long, value_name = "N", requires = "compress")]
    level: Option<i32>,
    /// Copy this internal snapshot of the source, given by ID or name
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Store runs of zeros shorter than this as data; 0 stores all zeros
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = parse_size, default_value = "4k")]
    sparse_size: u64,
    /// Maximum number of reads in flight, and with -W also of writes
    #[arg(short = 'm', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    parallel: u16,
    /// Write out of order; may be faster, but the data is then scattered in the new image
    #[arg(short = 'W', long)]
    out_of_order: bool,
    /// Write at most SIZE bytes a second
    #[arg(short, long, value_name = "SIZE", value_parser = parse_rate)]
    rate: Option<u64>,
    /// Copy what can be read; what cannot is zero in the copy, with a warning
    ///
    /// Also copies a disk whose fast medium is lost or damaged (`vellum tier move`).
    #[arg(long)]
    salvage: bool,
    /// The fast medium of the source, where it alone has parts of the disk (`vellum tier move`)
    #[arg(long, value_name = "PATH", conflicts_with = "snapshot")]
    fast: Option<PathBuf>,
    /// The source is a list of options in the words of QEMU, such as driver=qcow2,file.filename=a.qcow2
    #[arg(long, conflicts_with = "format")]
    image_opts: bool,
    /// With -n: the target is such a list
    #[arg(long, conflicts_with = "target_format", requires = "no_create")]
    target_image_opts: bool,
    /// Copy only what reads differently from this image, which becomes the backing image of the target (qcow2, vellum)
    ///
    /// Its name is stored as it is given: a relative one is looked for beside the target.
    #[arg(short = 'B', long, value_name = "FILE", conflicts_with_all = ["no_create", "compress", "sparse_size"])]
    backing: Option<String>,
    /// With -B, or `-o backing_file=FILE`: format of that image
    #[arg(short = 'F', long, value_name = "FMT", value_parser = parse_format)]
    backing_format: Option<FormatKind>,
    /// Fill an existing target instead of creating one; it must be large enough
    #[arg(short = 'n', long)]
    no_create: bool,
    /// With -n: skip writing zeros, because the target already reads as zero
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// Also copy the persistent bitmaps of the source (qcow2)
    #[arg(long, conflicts_with = "snapshot")]
    bitmaps: bool,
    /// With --bitmaps: leave out those that are inconsistent
    #[arg(long, requires = "bitmaps")]
    skip_broken_bitmaps: bool,
    /// Bypass the page cache (O_DIRECT)
    #[arg(long)]
    direct: bool,
    /// How the target is written, in the words of QEMU: writeback, writethrough, none, directsync or unsafe
    ///
    /// Without it a raw or qcow2 target bypasses the page cache, where its file system can do that. writeback and writethrough keep
    /// what is written there, for programs that read it soon, and take longer. none and directsync are the same as --direct. With all of
    /// these the copy is durable when the command ends.
    ///
    /// unsafe flushes nothing: when the machine crashes or loses power after the end, the target may be incomplete, and
    /// what it replaced is gone. It is the default of qemu-img, and faster.
    #[arg(short = 't', long, value_name = "MODE", value_enum)]
    target_cache: Option<TargetCache>,
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
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    secrets: SecretArgs,
    /// The image to copy, and last the image to create; of several to copy, each begins at a multiple of 512 bytes in the copy
    // One list: options may stand between them.
    #[arg(required = true, value_name = "SOURCE... TARGET")]
    images: Vec<PathBuf>,
    #[arg(skip)]
    sources: Vec<PathBuf>,
    #[arg(skip)]
    target: PathBuf,
}

/// How the target is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum TargetCache {
    Writeback,
    Writethrough,
    #[value(alias = "off")]
    None,
    Directsync,
    Unsafe,
}

/// At least one byte.
fn parse_rate(text: &str) -> Result<u64> {
    Some(parse_size(text)?)
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| Error::invalid("a rate is at least 1 byte a second"))
}

impl Args {
    fn target_format(&self) -> FormatKind {
        self.target_format.or_else(|| FormatKind::of_name(&self.target)).unwrap_or(FormatKind::Raw)
    }

    fn is_direct(&self) -> bool {
        self.direct || matches!(self.target_cache, Some(TargetCache::None | TargetCache::Directsync))
    }

    fn wish(&self) -> Wish {
        Wish { is_wanted: self.progress, quiet: self.quiet, output: self.output }
    }
}

pub(crate) fn run(mut args: Args) -> Outcome {
    if is_qemu_command() && (!args.sparse_size.is_multiple_of(512) || args.sparse_size > 16 << 20) {
        return Err(Error::invalid("-S: use a multiple of 512 up to 16M").into());
    }
    if is_qemu_command() && args.parallel > 16 {
        return Err(Error::invalid("-m: use 1 to 16").into());
    }
    let target = args.images.pop().filter(|_| !args.images.is_empty());
    let target =
        target.ok_or_else(|| Error::invalid("use SOURCE... TARGET: the image to create is missing"))?;
    let sources = args.images.iter().map(|source| named(source, args.format, args.image_opts));
    let sources = sources.collect::<Result<Vec<Named>>>()?;
    let target = named(&target, args.target_format, args.target_image_opts)?;
    // There is nothing to create: the server has the export.
    args.no_create |= is_nbd(&target.path);
    let target_is = target.must_be_encrypted();
    let all: Vec<&Named> = sources.iter().chain([&target]).collect();
    let remote = args.allow.remote.of(&all, &args.secrets)?;
    args.sources = sources.iter().map(|source| source.path.clone()).collect();
    (args.target, args.target_format) = (target.path, target.format);
    let bytes = run_worker(IoMode::Auto, async || convert(&args, &sources, target_is, &remote).await)??;
    if args.output == OutputFormat::Json {
        let mut answer = json!({
            "target": args.target.display().to_string(),
            "format": args.target_format().to_string(),
            "virtual-size": bytes,
        });
        let names: Vec<String> = args.sources.iter().map(|source| source.display().to_string()).collect();
        match &names[..] {
            [only] => answer["source"] = json!(only),
            all => answer["sources"] = json!(all),
        }
        // Among lines of JSON the answer is one of them.
        if args.progress { say_json_line(&answer) } else { say_json(&answer) }
    }
    Ok(ExitCode::SUCCESS)
}

/// Copies. What the source and an existing target must be by their options is given.
async fn convert(
    args: &Args,
    sources: &[Named],
    target_is: Option<Encrypted>,
    remote: &Remote,
) -> Result<u64, Failure> {
    let new = NewImage::parse(&args.options)?;
    new.suits(args.target_format(), "-O")?;
    if args.compress && !args.no_create {
        let why = match () {
            () if args.target_format() != FormatKind::Qcow2 => "it needs `-O qcow2`",
            () if new.qcow2.data_file.is_some() => "an external data file stores no compressed data",
            () if new.encryption_text().is_some() => "encrypted images store no compressed data",
            () => "",
        };
        if !why.is_empty() {
            return Err(Error::invalid(format!("-c: {why}")).into());
        }
    }
    let backing = args.backing.as_ref().or(new.backing_file.as_ref());
    let backing_format = args.backing_format.or(new.backing_format);
    if new.backing_file.is_some() && (args.no_create || args.compress) {
        return Err(Error::invalid("-o backing_file, like -B, goes with neither -n nor -c").into());
    }
    if backing.is_none() && backing_format.is_some() {
        return Err(Error::invalid("-F is the format of a backing image: name that with -B FILE").into());
    }
    if backing.is_some() && backing_format.is_none() {
        return Err(
            Error::invalid("-B: give the format of that image: `-F raw`, `-F qcow2` or `-F vellum`").into()
        );
    }
    if backing.is_some() && !matches!(args.target_format(), FormatKind::Qcow2 | FormatKind::Native) {
        return Err(Error::invalid(format!(
            "-B: a {} disk has no backing image: use `-O qcow2` or `-O vellum`",
            args.target_format()
        ))
        .into());
    }
    if args.target_format() == FormatKind::Luks && !args.no_create && new.key_secret().is_none() {
        return Err(Error::invalid(NO_KEY_SECRET).into());
    }
    if let Some(source) = args.sources.iter().find(|source| same_file(source, &args.target)) {
        return Err(Error::invalid(format!("{} cannot be converted into itself", source.display())).into());
    }
    let alone = [
        (args.snapshot.is_some(), "-l"),
        (args.bitmaps, "--bitmaps"),
        (backing.is_some(), "-B"),
        (args.fast.is_some(), "--fast"),
    ];
    if let Some((_, option)) = alone.iter().find(|(is_said, _)| *is_said && sources.len() > 1) {
        return Err(Error::invalid(format!("{option} goes with one source, not with several")).into());
    }
    let mut stop = Stop::new()?;
    let secrets = args.secrets.read()?;
    let reading = ImageOptions {
        secrets: Arc::new(secrets.with_copy(new.key_secret())),
        may_be_weak: true,
        snapshot: args.snapshot.clone(),
        force_share: args.force_share,
        direct: args.is_direct(),
        allow_dirs: args.allow.places(),
        remote: remote.clone(),
        fast: medium_beside(args.fast.as_deref(), args.salvage).await?,
        salvages: args.salvage,
        ..ImageOptions::reading()
    };
    let mut opened = Vec::with_capacity(sources.len());
    for Named { path, format, .. } in sources {
        let must_be_encrypted = sources[opened.len()].must_be_encrypted();
        let options = ImageOptions { format: *format, must_be_encrypted, ..reading.clone() };
        opened.push(match stop.or_stopped(open_image(path, &options)).await {
            Err(error) if stop.is_requested() => return Err(interrupted(error)),
            opened => opened.map_err(or_share)?,
        });
    }
    let size = match &opened[..] {
        [only] => only.disk().geometry().size,
        all => all
            .iter()
            .map(|one| one.disk().geometry().size.next_multiple_of(512))
            .fold(0, u64::saturating_add),
    };
    if new.size.is_some_and(|wanted| wanted != size) {
        return Err(Error::invalid(format!(
            "-o size: the source has {size} bytes, and a copy keeps its size"
        ))
        .into());
    }
    let bitmaps = match args.bitmaps {
        true if args.target_format() != FormatKind::Qcow2 => {
            return Err(Error::invalid("--bitmaps: only qcow2 images have bitmaps: use `-O qcow2`").into());
        }
        true => copies_of(&opened[0], args.skip_broken_bitmaps).await?,
        false => Vec::new(),
    };
    let (qcow2, native) = new.with_keys(&secrets)?;
    let conversion = Conversion {
        target: args.target.clone(),
        format: args.target_format(),
        qcow2,
        native,
        secrets,
        fills_existing: args.no_create,
        must_be_encrypted: target_is,
        target_is_zero: args.target_is_zero,
        data_files: args.data_file.clone(),
        allow_dirs: args.allow.places(),
        remote: remote.clone(),
        direct: args.is_direct(),
        writes_direct: args.target_cache.is_none(),
        never_flushed: args.target_cache == Some(TargetCache::Unsafe),
        pieces_at_once: usize::from(args.parallel),
        sparse_bytes: args.sparse_size,
        out_of_order: args.out_of_order,
        rate: args.rate,
        salvages: args.salvage,
        compression: args.compress.then_some(ConvertCompression { level: args.level }),
        backing: backing.cloned().zip(backing_format),
        bitmaps,
    };
    let (is_encrypted, is_plain) = (opened.iter().any(|source| source.is_any_encrypted()), Cell::new(false));
    let shown =
        args.sources.iter().map(|source| source.display().to_string()).collect::<Vec<_>>().join(" + ");
    let bar = OnceCell::new();
    let progress = |step| match step {
        Step::IsPlain => is_plain.set(true),
        Step::Begins(bytes) => drop(bar.set(Progress::new(bytes, args.wish()))),
        Step::Copied(bytes) => bar.get().into_iter().for_each(|bar| bar.set(bytes)),
        Step::Ends => bar.get().into_iter().for_each(Progress::end),
        // With -q the parts are not listed; that the copy differs from the disk is said all the same.
        Step::Lost(_) if args.quiet => {}
        Step::Lost(run) => complain(&format!(
            "vellum convert: warning: {}: {} bytes at {} could not be read and are zero in the copy",
            shown,
            run.len(),
            run.start()
        )),
        Step::LostInAll(bytes) => {
            complain(&format!("vellum convert: warning: {shown}: {bytes} bytes in all could not be read"))
        }
    };
    let converted = convert::convert(opened, &conversion, &mut stop, &progress).await;
    // Also a server that closes the connection gives that kind.
    converted.map_err(|error| match error.kind() {
        ErrorKind::Closed if stop.is_requested() => interrupted(error),
        _ => error.into(),
    })?;
    if is_encrypted && is_plain.get() && !args.quiet {
        complain(&format!(
            "vellum convert: warning: {} is encrypted and {} is not: its data can be read there without a secret (`-O qcow2 \
             -o encrypt.format=luks` or `-O vellum -o encrypt.format=luks` encrypts a new image)",
            shown,
            args.target.display()
        ));
    }
    Ok(size)
}

fn interrupted(error: Error) -> Failure {
    with_code(130)(error.context("interrupted"))
}
