//! `vellum resize`: another size for the disk of an image.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};
use vellum_core::{BlockSize, Error, Result, UrlPrefix};
use vellum_daemon::closed::{ResizeOptions, resize};
use vellum_daemon::control::{Request, call};
use vellum_daemon::{FormatKind, IoMode, Preallocation, run as run_worker};

use super::{Outcome, or_ask_server};
use crate::args::{AllowArgs, OutputFormat, RemoteArgs, parse_format, parse_size, parse_url_prefix};
use crate::output::{say, say_json};
use crate::protocol::place;
use crate::secrets::SecretArgs;

/// Grow the disk of an image, or shrink it with --shrink
///
/// New space reads as zero; that of a luks image reads as random bytes until it is written. If a server has the image open, give
/// its control socket with --control PATH instead of the image. A served disk can only grow. Virtual machines and FUSE files see the new size at once, NBD
/// clients when they reconnect.
#[derive(clap::Args)]
#[command(
    override_usage = "vellum resize [OPTIONS] FILE SIZE\n       vellum resize [OPTIONS] --control PATH SIZE"
)]
pub(crate) struct Args {
    /// Format of the image: raw, qcow2, vellum or luks; required for raw
    ///
    /// Default: detected. A raw disk is resized only with -f raw, because any file could be taken for one.
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Allow shrinking; data beyond the new end is lost
    #[arg(long)]
    shrink: bool,
    /// Space for what is added: off, metadata (qcow2), falloc, full (qcow2, raw and luks)
    ///
    /// metadata gives it places in the image, falloc reserves space of the host as well, full writes zeros there.
    #[arg(long, value_name = "HOW", value_parser = parse_preallocation, default_value = "off", conflicts_with = "control")]
    preallocation: Preallocation,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Ask the server with this control socket instead of opening an image
    #[arg(long, value_name = "PATH", conflicts_with_all = ["format", "shrink", "RemoteArgs"])]
    control: Option<PathBuf>,
    /// Also allow backing images in DIR; may be given several times
    ///
    /// Their sizes are needed. By default, an image may only refer to files in its own directory.
    #[arg(long, value_name = "DIR", conflicts_with = "control")]
    allow_dir: Vec<PathBuf>,
    /// Also allow backing images at URLs that begin with PREFIX; may be given several times
    #[arg(long, value_name = "PREFIX", value_parser = parse_url_prefix, conflicts_with = "control")]
    allow_url: Vec<UrlPrefix>,
    #[command(flatten)]
    remote: RemoteArgs,
    /// With --control: export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT", requires = "control")]
    disk: Option<String>,
    #[command(flatten)]
    secrets: SecretArgs,
    /// The image; omitted with --control
    #[arg(value_name = "FILE")]
    first: OsString,
    /// New size, such as 20G; +10G and -10G change it by that much
    #[arg(value_name = "SIZE", allow_hyphen_values = true)]
    second: Option<String>,
}

fn parse_preallocation(text: &str) -> Result<Preallocation> {
    match text {
        "off" => Ok(Preallocation::Off),
        "metadata" => Ok(Preallocation::Metadata),
        "falloc" => Ok(Preallocation::Falloc),
        "full" => Ok(Preallocation::Full),
        _ => Err(Error::invalid(format!("{text:?}: use off, metadata, falloc or full"))),
    }
}

/// Whose disk changes.
enum Place<'a> {
    Image(PathBuf),
    Server(&'a Path),
}

impl Args {
    /// What the one or two places after the options mean.
    fn place_and_size(&self) -> Result<(Place<'_>, &str)> {
        match (&self.control, &self.second) {
            (Some(_), Some(_)) => Err(Error::invalid("with --control, give only the SIZE, without a FILE")),
            (Some(socket), None) => {
                let size =
                    self.first.to_str().ok_or_else(|| Error::invalid("the size is not valid UTF-8"))?;
                Ok((Place::Server(socket), size))
            }
            (None, Some(size)) => Ok((Place::Image(place(Path::new(&self.first))?), size)),
            (None, None) => Err(Error::invalid(format!(
                "give the new size after {0}, as in `vellum resize {0} 20G` or `+10G`",
                self.first.display()
            ))),
        }
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (place, size) = args.place_and_size()?;
    let (mut facts, key, place) = match place {
        Place::Server(socket) => (ask(args, socket, size)?, "control", socket.to_owned()),
        Place::Image(file) => {
            let options = ResizeOptions {
                format: args.format,
                may_shrink: args.shrink,
                preallocation: args.preallocation,
                secrets: args.secrets.read()?,
                allow_dirs: AllowArgs {
                    allow_dir: args.allow_dir.clone(),
                    allow_url: args.allow_url.clone(),
                    remote: args.remote.clone(),
                }
                .places(),
                remote: args.remote.usual(),
            };
            let resized = async || resize(&file, &options, |before| wanted(size, before)).await;
            let (before, after) = run_worker(IoMode::Auto, resized)?.map_err(or_ask_server)?;
            (json!({ "virtual-size-before": before, "virtual-size": after }), "filename", file)
        }
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
fn ask(args: &Args, socket: &Path, wanted: &str) -> Result<Value> {
    let (disk, mut size, mut grow_by) = (args.disk.clone(), None, None);
    match (wanted.strip_prefix('+'), wanted.strip_prefix('-')) {
        (Some(more), _) => grow_by = Some(parse_size(more)?),
        (None, Some(_)) => return Err(Error::invalid("a disk cannot be shrunk while it is served")),
        (None, None) => size = Some(parse_size(wanted)?),
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
    let size = size.ok_or_else(|| {
        Error::invalid(format!("{text}: the disk has {before} bytes and cannot change by that much"))
    })?;
    Ok(BlockSize::SECTOR.round_up(size))
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
