//! `vellum compare`: do two disks read the same?

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::json;
use vellum_core::{ErrorKind, Result};
use vellum_daemon::copy::{Comparison, compare, compare_strictly};
use vellum_daemon::signals::Stop;
use vellum_daemon::{FormatKind, ImageOptions, IoMode, open_image, run as run_worker};

use super::{Outcome, or_share, with_code};
use crate::args::{AllowArgs, OutputFormat, parse_format};
use crate::names::named;
use crate::output::{say, say_json, say_json_line};
use crate::progress::{Progress, Wish};
use crate::secrets::SecretArgs;

/// Compare the contents of two disks
///
/// Exit codes: 0 identical, 1 different, 2 an image could not be opened, 4 an image could not be read.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format of the first image: raw, qcow2, vellum, or one that is only read (vmdk, vdi, vpc, vhdx, qed, parallels, dmg, qcow). Default: detected
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Format of the second image: raw, qcow2, vellum, or one that is only read (vmdk, vdi, vpc, vhdx, qed, parallels, dmg, qcow). Default: detected
    #[arg(short = 'F', long, value_name = "FMT", value_parser = parse_format)]
    second_format: Option<FormatKind>,
    /// Treat disks as different that differ in size, or in where they have data, zeros and nothing
    ///
    /// Without it, they are identical if they read the same and the rest of the larger one is zero. With it, what one of them
    /// has must be in the other one of the same kind: data, zeros that are recorded, or nothing in any image of the chain.
    #[arg(short, long)]
    strict: bool,
    /// Show progress
    ///
    /// A terminal always shows a progress bar. Elsewhere, -p prints lines as qemu-img does, or lines of JSON
    /// with --output json. SIGUSR1 prints the progress once, with or without -p.
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Read the images even if another program has them open for writing
    ///
    /// The result may be wrong.
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The images are lists of options in the words of QEMU, such as driver=qcow2,file.filename=a.qcow2
    #[arg(long, conflicts_with_all = ["format", "second_format"])]
    image_opts: bool,
    /// Compare this internal snapshot of the first image, given by ID or name
    #[arg(short = 'l', long, value_name = "NAME")]
    snapshot: Option<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    secrets: SecretArgs,
    /// The first image
    first: PathBuf,
    /// The second image
    second: PathBuf,
}

const DIFFERENT: u8 = 1;
const CANNOT_OPEN: u8 = 2;
const CANNOT_READ: u8 = 4;

/// What was found.
struct Answer {
    comparison: Comparison,
    sizes: (u64, u64),
}

pub(crate) fn run(args: &Args) -> Outcome {
    let result = run_worker(IoMode::Auto, async || examine(args).await)?;
    let answer = result.map_err(|(error, code)| or_share(with_code(code)(error)))?;
    let strictly_different = args.strict && answer.sizes.0 != answer.sizes.1;
    let line = match answer.comparison {
        _ if strictly_different => "Strict mode: Image size mismatch!".to_owned(),
        Comparison::Identical if answer.sizes.0 != answer.sizes.1 => {
            "Warning: Image size mismatch!\nImages are identical.".to_owned()
        }
        Comparison::Identical => "Images are identical.".to_owned(),
        Comparison::DiffersAt(at) => format!("Content mismatch at offset {}!", at.bytes()),
        Comparison::PlacesDifferAt(at) => {
            format!("Strict mode: Offset {} block status mismatch!", at.bytes())
        }
    };
    let identical = answer.comparison == Comparison::Identical && !strictly_different;
    match args.output {
        OutputFormat::Json => {
            let offset = match answer.comparison {
                Comparison::DiffersAt(at) | Comparison::PlacesDifferAt(at) => json!(at.bytes()),
                Comparison::Identical => json!(null),
            };
            let facts = json!({
                "identical": identical,
                "mismatch-offset": offset,
                "virtual-sizes": [answer.sizes.0, answer.sizes.1],
            });
            if args.progress { say_json_line(&facts) } else { say_json(&facts) }
        }
        OutputFormat::Human if !args.quiet => say(&line),
        OutputFormat::Human => {}
    }
    Ok(ExitCode::from(if identical { 0 } else { DIFFERENT }))
}

async fn examine(args: &Args) -> Result<Answer, (vellum_core::Error, u8)> {
    let secrets = args.secrets.read().map_err(|error| (error, CANNOT_OPEN))?;
    let open = async |path: &PathBuf, format, snapshot: Option<String>| {
        let named = named(path, format, args.image_opts).map_err(|error| (error, CANNOT_OPEN))?;
        let options = ImageOptions {
            secrets: secrets.clone(),
            may_be_weak: true,
            must_be_encrypted: named.must_be_encrypted(),
            format: named.format,
            snapshot,
            force_share: args.force_share,
            allow_dirs: args.allow.places(),
            remote: args.allow.remote.of(&[&named], &args.secrets).map_err(|error| (error, CANNOT_OPEN))?,
            ..ImageOptions::reading()
        };
        open_image(&named.path, &options).await.map_err(|error| (error, CANNOT_OPEN))
    };
    let first = open(&args.first, args.format, args.snapshot.clone()).await?;
    let second = open(&args.second, args.second_format, None).await?;
    let sizes = (first.disk().geometry().size, second.disk().geometry().size);
    if args.strict && sizes.0 != sizes.1 {
        return Ok(Answer { comparison: Comparison::Identical, sizes });
    }
    let wish = Wish { is_wanted: args.progress, quiet: args.quiet, output: args.output };
    let bar = Progress::new(sizes.0.max(sizes.1), wish);
    let stop = Stop::new().map_err(|error| (error, CANNOT_READ))?;
    let (one, other, progress) = (first.disk(), second.disk(), |bytes| bar.set(bytes));
    let comparison = match args.strict {
        true => compare_strictly(&first, &second, 8, &stop.flag, &progress).await,
        false => compare(one, other, 8, &stop.flag, &progress).await,
    };
    bar.end();
    let code = |error: &vellum_core::Error| match error.kind() {
        ErrorKind::Closed if stop.is_requested() => 130,
        _ => CANNOT_READ,
    };
    let comparison = comparison.map_err(|error| {
        let code = code(&error);
        (error, code)
    })?;
    Ok(Answer { comparison, sizes })
}
