//! `vellum measure`: how large will an image be?

use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;
use vellum_core::{Error, Result};
use vellum_daemon::measure::{Measured, MeasuredFormat, measure};
use vellum_daemon::{FormatKind, ImageOptions, IoMode, open_image, run as run_worker};

use super::{Failure, Outcome, or_share};
use crate::args::{NewImage, OutputFormat, ReadArgs, parse_format, parse_size};
use crate::output::{say, say_json};
use crate::spoken::is_qemu_command;

/// Calculate how large a new image will be, for a copy of an image or for a disk of a given size
///
/// The first number is for the data that the image holds now, the second one for a disk that is full. Zeros that the
/// image stores as data count as data.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    read: ReadArgs,
    /// Format of the new image: raw, qcow2, vellum or luks
    #[arg(short = 'O', long, value_name = "FMT", value_parser = parse_format, default_value = "raw")]
    target_format: FormatKind,
    /// Format options of the new image; `vellum create -o help` lists them
    ///
    /// With journal=off, the numbers for qcow2 are those of qemu-img.
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Measure a copy of this internal snapshot of the image, given by ID or name
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Measure an empty disk of this size instead of an image
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "file", required_unless_present = "file")]
    size: Option<u64>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The image to be copied
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Answer {
    required: u64,
    fully_allocated: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bitmaps: Option<u64>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let new = NewImage::parse(&args.options)?;
    new.suits(args.target_format, "-O")?;
    let secrets = args.read.secrets.read()?;
    // How long a luks header is depends on no secret.
    let (qcow2, native) = match args.target_format {
        FormatKind::Luks => Default::default(),
        _ => new.with_keys_to_measure(&secrets)?,
    };
    let format = match args.target_format {
        FormatKind::Raw => MeasuredFormat::Raw,
        FormatKind::Qcow2 => MeasuredFormat::Qcow2(Box::new(qcow2)),
        FormatKind::Native => MeasuredFormat::Native(native),
        FormatKind::Luks => MeasuredFormat::Luks(new.luks_header_bytes()),
        format => {
            return Err(Error::unsupported(format!("-O {format}: images of this format are not made")).into());
        }
    };
    if new.backing_file.is_some() {
        return Err(Error::invalid("a copy contains its whole disk and has no backing image").into());
    }
    let source = args.file.as_deref().map(|file| args.read.open(file)).transpose()?;
    let said = args.size.or(new.size.filter(|_| args.file.is_none()));
    let look = async || look(args, source, said, format).await;
    let Measured { required, fully_allocated, bitmaps } = run_worker(IoMode::Auto, look)??;
    match args.output {
        OutputFormat::Json => say_json(&Answer { required, fully_allocated, bitmaps }),
        OutputFormat::Human => {
            say(&format!("required size: {required}"));
            say(&format!("fully allocated size: {fully_allocated}"));
            // There, a snapshot has some that take nothing.
            let of_snapshot = (is_qemu_command() && args.snapshot.is_some()).then_some(0);
            bitmaps.or(of_snapshot).into_iter().for_each(|bytes| say(&format!("bitmaps size: {bytes}")));
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn look(
    args: &Args,
    source: Option<(PathBuf, ImageOptions)>,
    size: Option<u64>,
    format: MeasuredFormat,
) -> Result<Measured, Failure> {
    let Some((file, options)) = source else {
        let size = size.ok_or_else(|| Error::invalid("give an image or --size"))?;
        return Ok(measure(size, None, format).await?);
    };
    let mut options = ImageOptions { snapshot: args.snapshot.clone(), ..options };
    options.remote.is_bounded = true;
    let source = open_image(&file, &options).await.map_err(or_share)?;
    let size = source.disk().geometry().size;
    let measured = measure(size, Some(&source), format).await;
    source.close().await?;
    Ok(measured?)
}
