//! `vellum resize`: another size for the disk of an image.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};
use vellum_core::{BlockSize, Error, Result, SharedStorage};
use vellum_daemon::ImageOptions;
use vellum_daemon::control::{Request, call};
use vellum_daemon::image::{open_file, open_image};
use vellum_format::FormatKind;
use vellum_format::native::{self, Superblocks};
use vellum_format::qcow2::{self, Header};
use vellum_io::{IoMode, run as run_worker};

use super::Outcome;
use super::snapshot::name_remedy;
use crate::args::{OutputFormat, parse_format, parse_size};
use crate::output::{say, say_json};

/// Make the disk of an image larger, or smaller with --shrink
///
/// What a disk is made larger by reads as zero. The image is closed; or it is served, and the server is asked instead of the file:
/// `--control PATH`, as `vellum serve --control PATH` has it. A disk that is served is made larger only: virtual machines and files
/// see it at once, NBD clients when they connect. A qcow2 disk grows as far as its L1 table has room, and is not made smaller.
#[derive(clap::Args)]
#[command(allow_missing_positional = true)]
pub(crate) struct Args {
    /// Format of the image; a raw disk is changed only if this says so
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// The disk may become smaller: what lies behind its new end is lost
    #[arg(long)]
    shrink: bool,
    /// Say nothing
    #[arg(short, long)]
    quiet: bool,
    /// How the answer is printed
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Ask the server with this control socket, instead of giving the image
    #[arg(long, value_name = "PATH", conflicts_with_all = ["format", "shrink"])]
    control: Option<PathBuf>,
    /// With --control: the disk, by the name of its export; not needed where the server has only one
    #[arg(long, value_name = "EXPORT", requires = "control")]
    disk: Option<String>,
    /// The image
    #[arg(value_name = "FILE", required_unless_present = "control", conflicts_with = "control")]
    file: Option<PathBuf>,
    /// The new size (k, M, G, T); with + or - in front, by how much it changes
    #[arg(value_name = "SIZE", allow_hyphen_values = true)]
    size: String,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (mut facts, key, place) = match (&args.control, &args.file) {
        (Some(socket), _) => (ask(args, socket)?, "control", socket),
        (None, Some(file)) => {
            let (before, after) = run_worker(IoMode::Auto, async || resize(args, file).await)??;
            (json!({ "virtual-size-before": before, "virtual-size": after }), "filename", file)
        }
        (None, None) => unreachable!("one of them is required"),
    };
    match args.output {
        OutputFormat::Json => {
            facts[key] = json!(place.display().to_string());
            say_json(&facts);
        }
        OutputFormat::Human if !args.quiet => say("Image resized."),
        OutputFormat::Human => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks the server; gives what it answers.
fn ask(args: &Args, socket: &Path) -> Result<Value> {
    let (disk, mut size, mut grow_by) = (args.disk.clone(), None, None);
    match (args.size.strip_prefix('+'), args.size.strip_prefix('-')) {
        (Some(more), _) => grow_by = Some(parse_size(more)?),
        (None, Some(_)) => return Err(Error::invalid("a disk is not made smaller while it is served")),
        (None, None) => size = Some(parse_size(&args.size)?),
    }
    run_worker(IoMode::Auto, async || call(socket, &Request::Resize { disk, size, grow_by }).await)?
}

/// The size that is asked for, of a disk that has `before` bytes.
fn wanted(text: &str, before: u64) -> Result<u64> {
    let size = match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(more), _) => before.checked_add(parse_size(more)?),
        (None, Some(less)) => before.checked_sub(parse_size(less)?),
        (None, None) => Some(parse_size(text)?),
    };
    let size = size.ok_or_else(|| Error::invalid(format!("{text}: the disk has {before} bytes")))?;
    Ok(BlockSize::SECTOR.round_up(size))
}

/// How long the image below a qcow2 image is, in bytes: it has no word for how far that counts.
async fn len_below(args: &Args, file: &Path) -> Result<Option<u64>> {
    let options = ImageOptions { format: args.format, ..ImageOptions::reading() };
    let (storage, format) = open_file(file, &options).await.map_err(name_remedy)?;
    if format != FormatKind::Qcow2 || Header::read(&*storage).await?.backing_file().is_none() {
        return Ok(None);
    }
    drop(storage);
    let chain = open_image(file, &options).await?;
    let below = chain.members.get(1).map(|member| member.disk.geometry().size);
    chain.close().await?;
    Ok(below)
}

async fn resize(args: &Args, file: &Path) -> Result<(u64, u64)> {
    let below = len_below(args, file).await?;
    let options = ImageOptions { format: args.format, ..ImageOptions::default() };
    let (storage, format): (SharedStorage, _) = open_file(file, &options).await.map_err(name_remedy)?;
    let before = match format {
        FormatKind::Raw => storage.len(),
        FormatKind::Qcow2 => Header::read(&*storage).await?.size(),
        FormatKind::Native => Superblocks::read(&*storage).await?.superblock.size(),
    };
    let size = wanted(&args.size, before)?;
    if let Some(below) = below.filter(|below| size > before && *below > before) {
        return Err(Error::unsupported(format!(
            "{}: its backing image has {below} bytes, more than the disk, and would show behind {before}: copy it into a larger image",
            file.display()
        )));
    }
    match format {
        FormatKind::Raw => resize_raw(args, file, &storage, size).await?,
        FormatKind::Qcow2 => drop(qcow2::grow(&storage, size).await?),
        FormatKind::Native => drop(native::resize(&storage, size, args.shrink).await?),
    }
    Ok((before, size))
}

async fn resize_raw(args: &Args, file: &Path, storage: &SharedStorage, size: u64) -> Result<()> {
    let name = file.display();
    if args.format.is_none() {
        return Err(Error::invalid(format!(
            "{name} has no format that can be recognised; if it is a raw disk, say `-f raw` to change it"
        )));
    }
    if size < storage.len() && !args.shrink {
        return Err(Error::invalid(format!(
            "the disk has {} bytes, and what lies behind {size} would be lost: say --shrink",
            storage.len()
        )));
    }
    storage.set_len(size).await?;
    storage.flush().await
}

#[cfg(test)]
mod tests {
    use super::wanted;

    #[test]
    fn sizes_are_absolute_or_relative() {
        for (text, size) in [("1M", 1 << 20), ("+1M", 3 << 20), ("-1M", 1 << 20), ("1000", 1024), ("-2M", 0)]
        {
            assert_eq!(wanted(text, 2 << 20).unwrap(), size, "{text}");
        }
        for text in ["-3M", "+16E", "", "+", "much"] {
            assert!(wanted(text, 2 << 20).is_err(), "{text}");
        }
    }
}
