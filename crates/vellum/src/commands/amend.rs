//! `vellum amend`: what a qcow2 image is, changed in place.

use std::path::PathBuf;
use std::process::ExitCode;

use vellum_core::{Error, Result};
use vellum_daemon::closed::amend;
use vellum_daemon::{Amend, FormatKind, IoMode, run as run_worker};

use super::Outcome;
use crate::args::parse_format;
use crate::key_values::split_options;
use crate::output::say;
use crate::protocol::image_name;

/// What `-o help` prints, in the form of `qemu-img`.
const HELP: &str = "Amend options for 'qcow2':
  compat=<str>           - Compatibility level (v2 [0.10] or v3 [1.1])
  lazy_refcounts=<bool (on/off)> - Postpone refcount updates
  refcount_bits=<num>    - Width of a reference count entry in bits";

/// Change the version, refcount width or lazy refcounts of a qcow2 image, without a copy
///
/// The disk and its snapshots read the same before and after. compat=0.10 is refused where the image has what that version
/// lacks, such as bitmaps, subclusters, zstd, or zeros over a backing image; a journal is removed. A crash leaves the image with or without each of the
/// changes, and the same command can be run again. The image must not be in use.
///
/// Other options of `qemu-img amend` are commands of their own: `vellum key` for the keys of an encrypted image,
/// `vellum resize` for the size, `vellum rebase` for the backing image.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Options: compat=0.10|1.1, lazy_refcounts=on|off, refcount_bits=1|2|4|8|16|32|64
    #[arg(short, long, value_name = "OPTIONS", required = true)]
    options: Vec<String>,
    /// Format of the image: only qcow2 can be amended
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// The image
    #[arg(value_name = "FILE", value_parser = image_name(), required_unless_present = "options")]
    file: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    if args.options.iter().any(|list| list.split(',').any(|option| option == "help" || option == "?")) {
        say(HELP);
        return Ok(ExitCode::SUCCESS);
    }
    let wish = wish(&args.options)?;
    let file = args.file.as_ref().ok_or_else(|| Error::invalid("give the name of the image"))?;
    run_worker(IoMode::Auto, async || amend(file, args.format, &wish).await)??;
    Ok(ExitCode::SUCCESS)
}

fn wish(options: &[String]) -> Result<Amend> {
    let mut wish = Amend::default();
    for (key, value) in split_options(options)? {
        let bad = |allowed: &str| Error::invalid(format!("-o {key}={value}: expected {allowed}"));
        let elsewhere = |command: &str| {
            Err(Error::unsupported(format!("-o {key}: use `vellum {command}`, which changes it")))
        };
        match key.as_str() {
            "compat" => {
                wish.version = Some(match value.as_str() {
                    "0.10" | "v2" => 2,
                    "1.1" | "v3" => 3,
                    _ => return Err(bad("v2 (0.10), v3 (1.1)")),
                });
            }
            "lazy_refcounts" => {
                wish.lazy_refcounts = Some(match value.as_str() {
                    "on" | "true" | "yes" => true,
                    "off" | "false" | "no" => false,
                    _ => return Err(bad("on, off")),
                });
            }
            "refcount_bits" => {
                wish.refcount_bits = Some(value.parse().map_err(|_| bad("1, 2, 4, 8, 16, 32, 64"))?);
            }
            "size" => return elsewhere("resize"),
            "backing_file" | "backing_fmt" => return elsewhere("rebase"),
            "journal" | "journal_size" => return elsewhere("journal"),
            key if key.starts_with("encrypt") => return elsewhere("key"),
            _ => {
                return Err(Error::unsupported(format!(
                    "-o {key}: an image that exists cannot change that: copy it with `vellum convert`"
                )));
            }
        }
    }
    Ok(wish)
}
