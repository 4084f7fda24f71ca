//! `vellum map`: where the bytes of a disk are.

use std::path::PathBuf;
use std::process::ExitCode;

use vellum_core::Error;
use vellum_daemon::map::map;
use vellum_daemon::tier::medium_beside;
use vellum_daemon::{ImageOptions, IoMode, run as run_worker};

use super::{Outcome, or_share};
use crate::args::{OutputFormat, ReadArgs, parse_size};
use crate::output::{printable, say, say_piece};

/// Show where each part of a disk is stored: in which image, at which offset
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    read: ReadArgs,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Start at this offset of the disk: bytes, or with k, M, G or T
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    start_offset: u64,
    /// Show at most this many bytes (k, M, G or T as above). Default: up to the end of the disk
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = parse_size)]
    max_length: Option<u64>,
    /// The fast medium of the image, where it alone has parts of the disk (`vellum tier move`)
    #[arg(long, value_name = "PATH", conflicts_with = "snapshot")]
    fast: Option<PathBuf>,
    /// Also map a disk whose fast medium is lost or damaged; what it alone had is shown as lost
    #[arg(long, conflicts_with = "snapshot")]
    salvage: bool,
    /// Map this internal snapshot of the image, given by ID or name
    #[arg(long, value_name = "NAME")]
    snapshot: Option<String>,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (file, mut options) = args.read.open(&args.file)?;
    options.remote.is_bounded = true;
    let options = ImageOptions { snapshot: args.snapshot.clone(), salvages: args.salvage, ..options };
    let look = async || {
        let fast = medium_beside(args.fast.as_deref(), args.salvage).await?;
        map(&file, &ImageOptions { fast, ..options.clone() }, args.start_offset, args.max_length).await
    };
    let rows = run_worker(IoMode::Auto, look)?.map_err(or_share)?;
    match args.output {
        OutputFormat::Json => {
            // There may be millions of them.
            let mut text = Vec::with_capacity(rows.len() * 128);
            for (index, row) in rows.iter().enumerate() {
                text.extend_from_slice(if index == 0 { b"[" } else { b",\n" });
                serde_json::to_writer(&mut text, row).expect("numbers, in memory");
            }
            text.extend_from_slice(if rows.is_empty() { b"[]" } else { b"]" });
            text.push(b'\n');
            say_piece(std::str::from_utf8(&text).expect("JSON is text"));
        }
        OutputFormat::Human => {
            let cannot = "part of the disk is compressed, encrypted or on a fast medium alone, and has no offset to show: use \
                          --output json";
            if rows.iter().any(|row| !row.lost && (row.compressed || (row.data && row.offset.is_none()))) {
                return Err(Error::unsupported(cannot).into());
            }
            say(&format!("{:<15} {:<15} {:<15} File", "Offset", "Length", "Mapped to"));
            for row in rows.iter().filter(|row| row.data) {
                let (start, length) = (hex(row.start), hex(row.length));
                if row.lost {
                    say(&format!("{start:<15} {length:<15} {:<15} (only its fast medium had it)", "lost"));
                    continue;
                }
                let offset = row.offset.expect("data has a place where nothing is compressed or encrypted");
                let file = printable(row.file.as_deref().unwrap_or_default());
                say(&format!("{start:<15} {length:<15} {:<15} {file}", hex(offset)));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A number as C's `%#x` prints it: zero has no prefix.
fn hex(number: u64) -> String {
    if number == 0 { "0".to_owned() } else { format!("{number:#x}") }
}
