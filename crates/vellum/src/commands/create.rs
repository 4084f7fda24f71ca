//! `vellum create`: make an image, or clone one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Serialize;
use vellum_core::{BlockSize, Context, Error, Result};
use vellum_daemon::template::ListUse;
use vellum_daemon::tier::{self, FastFor};
use vellum_daemon::{
    Compression, CreateTarget, FormatKind, ImageOptions, IoMode, Layout, NativeImage, Preallocation,
    Qcow2Options, create_luks, create_native, create_qcow2, create_raw, run as run_worker,
};

use super::Outcome;
use super::tier::FastArgs;
use crate::args::{AllowArgs, NewImage, OutputFormat, options_help, parse_format, parse_size, prealloc_text};
use crate::output::{complain, human_bytes, say, say_json};
use crate::protocol::place;
use crate::secrets::SecretArgs;
use crate::spoken::is_qemu_command;

/// Create an image, or with -b a clone of a backing image
///
/// A clone stores only what differs from its backing image.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the new image: raw, qcow2, vellum or luks
    ///
    /// Default: taken from the file name (.raw, .qcow2, .vlm), otherwise qcow2 with -b and raw without.
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Backing image: a file or a URL; a relative name is relative to the new image's directory
    ///
    /// URLs begin with http://, https:// or s3://. Credentials for a store come from the environment (AWS_ACCESS_KEY_ID,
    /// AWS_PROFILE and so on), never from the URL.
    #[arg(short, long, value_name = "FILE")]
    backing: Option<OsString>,
    /// Format of the backing image; required with -b
    #[arg(short = 'F', long, value_name = "FMT", value_parser = parse_format)]
    backing_format: Option<FormatKind>,
    /// Take a backing image at a URL for fixed although its server does not prove it
    ///
    /// Needed where a web server gives no strong ETag. The image records that it was trusted. If the backing image does
    /// change, the disk is a mixture.
    #[arg(long, requires = "backing")]
    trust_base: bool,
    /// Do not open the backing image; SIZE must be given
    #[arg(short, long)]
    unsafe_backing: bool,
    /// Format options as KEY=VALUE, separated by commas; -o help lists them
    ///
    /// `-f FMT -o help` lists the options of one format.
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Attach the disk to this fast medium, a file or block device on an SSD
    ///
    /// Needs -f vellum with layout=table or layout=zoned. It is made if it does not exist, with --fast-size. Parts of the
    /// disk are copied there with `vellum tier promote`, and `vellum serve --fast` reads them from there.
    #[arg(long, value_name = "PATH")]
    fast: Option<PathBuf>,
    #[command(flatten)]
    fast_how: FastArgs,
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    secrets: SecretArgs,
    /// The image to create; an existing file is replaced
    #[arg(value_name = "FILE", required_unless_present = "options")]
    file: Option<PathBuf>,
    /// Size of the disk, such as 20G; k, M, G, T, P and E are powers of 1024
    ///
    /// Default: the size of the backing image.
    #[arg(value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Answer {
    filename: String,
    format: String,
    virtual_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename_format: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    journal_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    layout: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_size: Option<u64>,
    /// How much of the backing image is known to be zero.
    #[serde(skip_serializing_if = "Option::is_none")]
    template_zero_bytes: Option<u64>,
}

/// What was made.
struct Made {
    size: u64,
    /// Of a qcow2 image: its options as they turned out.
    qcow2: Option<Qcow2Options>,
    /// Of an image of the native format.
    native: Option<NativeImage>,
}

impl Made {
    fn of(size: u64) -> Self {
        Self { size, qcow2: None, native: None }
    }
}

pub(crate) fn run(args: Args) -> Outcome {
    if args.options.iter().any(|list| list.split(',').any(|option| option == "help" || option == "?")) {
        let by_name = || args.file.as_deref().and_then(FormatKind::of_name);
        say(&options_help(args.format.or_else(by_name)));
        return Ok(ExitCode::SUCCESS);
    }
    let mut new = NewImage::parse(&args.options)?;
    let name = args.file.clone().ok_or_else(|| Error::invalid("give the name of the file to create"))?;
    let path = place(&name)?;
    let backing = args.backing.clone().map(text_of_name).transpose()?.or(new.backing_file.clone());
    let format = match (args.format.or_else(|| FormatKind::of_name(&path)), &backing) {
        (Some(format), _) => format,
        (None, Some(_)) => FormatKind::Qcow2,
        (None, None) => FormatKind::Raw,
    };
    let size = match (args.size, new.size) {
        (Some(one), Some(other)) if one != other => {
            let why =
                format!("two sizes are given, {one} after the file name and {other} with -o size: give one");
            return Err(Error::invalid(why).into());
        }
        (one, other) => one.or(other),
    };
    if format == FormatKind::Qcow2 && backing.is_some() {
        new.suit_overlay();
    }
    let backing_format = args.backing_format.or(new.backing_format);
    let backing = match (backing, backing_format) {
        (None, None) => None,
        (None, Some(_)) => {
            let why = "-F gives the format of a backing image, but there is none: name it with -b FILE";
            return Err(Error::invalid(why).into());
        }
        (Some(name), Some(format)) => Some((name, format)),
        // Guessing here would let whoever wrote the first bytes of a raw disk choose.
        (Some(name), None) => {
            return Err(Error::invalid(format!(
                "give the format of the backing image {name}: `-F raw`, `-F qcow2` or `-F vellum`"
            ))
            .into());
        }
    };
    let fast = args.fast.clone().map(|path| args.fast_how.at(path));
    if fast.is_some() && format != FormatKind::Native {
        let why = "--fast needs `-f vellum` with -o layout=table or layout=zoned. With other formats, put the backing \
                   image on fast storage";
        return Err(Error::invalid(why).into());
    }
    if fast.is_some() && new.key_secret().is_some() {
        let why = "--fast cannot be combined with encryption: the fast medium would have copies of the data as they are";
        return Err(Error::invalid(why).into());
    }
    let target = CreateTarget {
        path,
        size,
        backing,
        trust_backing: args.unsafe_backing,
        allow_dirs: args.allow.places(),
        remote: args.allow.remote.usual(),
        trust_base: args.trust_base,
        secrets: args.secrets.read()?,
        stands_on_encrypted: Arc::default(),
        never_flushed: false,
    };
    let mut made = run_worker(IoMode::Auto, async || make(format, &target, &new).await)??;
    if let Some(fast) = &fast {
        let attached = run_worker(IoMode::Auto, async || attach(&target, fast).await)?;
        attached.context(|| format!("{} was created without a fast medium", target.path.display()))?;
    }
    new.qcow2 = made.qcow2.take().unwrap_or(new.qcow2);
    let options = new.qcow2.clone();
    if let Some(NativeImage { zeros: ListUse::Refused(error), .. }) = &made.native {
        complain(&format!("vellum create: {}", error.chain()));
    }
    let is_encrypted = new.encryption_text().is_some();
    if target.stands_on_encrypted.load(Ordering::Relaxed) && !is_encrypted && !args.quiet {
        complain(&format!(
            "vellum create: warning: its backing image is encrypted and {} is not: what is written to it, or copied into it, \
             can be read without a secret (`-o encrypt.format=luks` encrypts it)",
            target.path.display()
        ));
    }
    let data_file = options.data_file.as_deref().filter(|_| format == FormatKind::Qcow2);
    let says_nothing = is_qemu_command();
    if let Some(refusal) = target.refusal(format, data_file).filter(|_| !says_nothing) {
        complain(&format!(
            "vellum create: {} was created, but opening it for writing will need a further option: {}",
            target.path.display(),
            refusal.chain()
        ));
    }
    if !args.quiet {
        match args.output {
            OutputFormat::Human => match &made.native {
                Some(native) => say(&formatting_native(&target, &new, native)),
                None => say(&formatting(format, (&name, &target), &new, made.size)),
            },
            OutputFormat::Json => say_json(&answer(format, &target, &options, &made)),
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn attach(target: &CreateTarget, fast: &FastFor) -> Result<()> {
    let options = ImageOptions { format: Some(FormatKind::Native), ..ImageOptions::default() };
    tier::attach(&target.path, fast, &options).await.map(drop)
}

/// The name as an image holds it.
pub(super) fn text_of_name(name: OsString) -> Result<String> {
    name.into_string().map_err(|name| {
        Error::unsupported(format!(
            "the backing image's name {} is not UTF-8, so it cannot be stored in an image: rename it, or create a \
             link to it",
            name.display()
        ))
    })
}

async fn make(format: FormatKind, target: &CreateTarget, new: &NewImage) -> Result<Made> {
    if matches!(format, FormatKind::Raw | FormatKind::Luks) && target.backing.is_some() {
        return Err(Error::invalid(format!("a {format} image cannot have a backing image: use `-f qcow2`")));
    }
    new.suits(format, "-f")?;
    match format {
        FormatKind::Foreign(_) => Err(format.check_is_written().expect_err("they are only read")),
        FormatKind::Qcow2 => {
            let made = create_qcow2(target, new.with_keys(&target.secrets)?.0).await?;
            Ok(Made { qcow2: Some(made.clone()), ..Made::of(made.size) })
        }
        FormatKind::Native => {
            let made = create_native(target, new.with_keys(&target.secrets)?.1).await?;
            Ok(Made { native: Some(made.clone()), ..Made::of(made.size) })
        }
        FormatKind::Luks => {
            let size = target.disk_size().await?;
            let keys = new.with_keys(&target.secrets)?.0.encryption;
            let size = create_luks(&target.path, size, keys.as_deref(), new.qcow2.preallocation).await?;
            Ok(Made::of(size))
        }
        FormatKind::Raw => {
            let size = BlockSize::SECTOR.round_up(target.disk_size().await?);
            create_raw(&target.path, size, new.qcow2.preallocation).await?;
            Ok(Made::of(size))
        }
    }
}

fn formatting_native(target: &CreateTarget, new: &NewImage, made: &NativeImage) -> String {
    let mut line = format!("Formatting '{}', fmt=vellum", target.path.display());
    line += &new.encryption_text().map(|text| format!(" {text}")).unwrap_or_default();
    line += &format!(" size={}", made.size);
    line += match made.layout {
        Layout::Linear => " layout=linear".to_owned(),
        Layout::Table(unit) => format!(" layout=table unit_size={}", unit.bytes()),
        Layout::Zoned { unit, zone } => {
            let embed = switch(made.embeds);
            format!(" layout=zoned unit_size={} zone_size={} embed={embed}", unit.bytes(), zone.bytes())
        }
    }
    .as_str();
    if let (Some((name, format)), Some(block)) = (&target.backing, made.block_bytes) {
        line += &format!(" block_size={block} backing_file={name} backing_fmt={format}");
    }
    if let ListUse::Used(bytes) = &made.zeros {
        line += &format!(" (of which {} are known to be zero)", human_bytes(*bytes));
    }
    match made.journal_bytes {
        None => line,
        Some(bytes) => line + &format!(" journal_size={bytes}"),
    }
}

fn switch(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}

/// The line that `qemu-img create` prints.
fn formatting(
    format: FormatKind,
    (name, target): (&Path, &CreateTarget),
    new: &NewImage,
    size: u64,
) -> String {
    let options = &new.qcow2;
    let mut line = format!("Formatting '{}', fmt={format}", name.display());
    if matches!(format, FormatKind::Raw | FormatKind::Luks) {
        line += &format!(" size={size}");
        line += &new.luks_text();
        if options.preallocation != Preallocation::Off {
            line += &format!(" preallocation={}", preallocation(options.preallocation));
        }
        return line;
    }
    line += &new.encryption_text().map(|text| format!(" {text}")).unwrap_or_default();
    let compression = if options.compression == Compression::Zstd { "zstd" } else { "zlib" };
    line += &format!(" cluster_size={} extended_l2={}", options.cluster_size, switch(options.extended_l2));
    if options.preallocation != Preallocation::Off {
        line += &format!(" preallocation={}", preallocation(options.preallocation));
    }
    line += &format!(" compression_type={compression} size={size}");
    if let Some(compat) = &new.compat {
        line += &format!(" compat={compat}");
    }
    if let Some((name, format)) = &target.backing {
        line += &format!(" backing_file={name} backing_fmt={format}");
    }
    if let Some(name) = &options.data_file {
        line += &format!(" data_file={name} data_file_raw={}", switch(options.data_file_raw));
    }
    if new.says_journal() {
        line += &format!(" journal={}", switch(options.journal.is_some()));
        line += &options.journal.map(|bytes| format!(" journal_size={bytes}")).unwrap_or_default();
    }
    if let Some(prealloc) = prealloc_text(options.prealloc) {
        line += &format!(" prealloc={prealloc}");
    }
    line + &format!(
        " lazy_refcounts={} refcount_bits={}",
        switch(options.lazy_refcounts),
        options.refcount_bits
    )
}

fn preallocation(how: Preallocation) -> &'static str {
    match how {
        Preallocation::Off => "off",
        Preallocation::Metadata => "metadata",
        Preallocation::Falloc => "falloc",
        Preallocation::Full => "full",
    }
}

fn answer(format: FormatKind, target: &CreateTarget, options: &Qcow2Options, made: &Made) -> Answer {
    let native = made.native.as_ref();
    Answer {
        filename: target.path.display().to_string(),
        format: format.to_string(),
        virtual_size: made.size,
        cluster_size: (format == FormatKind::Qcow2).then_some(options.cluster_size),
        backing_filename: target.backing.as_ref().map(|(name, _)| name.clone()),
        backing_filename_format: target.backing.as_ref().map(|(_, format)| format.to_string()),
        journal_size: match native {
            Some(native) => native.journal_bytes,
            None => options.journal.filter(|_| format == FormatKind::Qcow2),
        },
        layout: native.map(|native| native.layout.name()),
        unit_size: native.and_then(|native| native.layout.unit()).map(BlockSize::bytes),
        block_size: native.and_then(|native| native.block_bytes),
        template_zero_bytes: match native {
            Some(NativeImage { zeros: ListUse::Used(bytes), .. }) => Some(*bytes),
            _ => None,
        },
    }
}
