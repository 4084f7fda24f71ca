//! `vellum map`: where the bytes of a disk are.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use serde::Serialize;
use vellum_core::{Error, GuestOffset, GuestSpan, MergedExtent, Place, Result, SharedStorage, map_merged};
use vellum_daemon::{ImageOptions, open_image};
use vellum_format::FormatKind;
use vellum_io::{IoMode, run as run_worker};
use vellum_layer::Chain;

use super::{Outcome, or_share};
use crate::args::{OutputFormat, ReadArgs, parse_size};
use crate::output::{printable, say};

/// Show where each part of a disk is stored: in which image, at which offset
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    read: ReadArgs,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Start at this offset of the disk
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    start_offset: u64,
    /// Show at most this many bytes. Default: up to the end of the disk
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = parse_size)]
    max_length: Option<u64>,
    /// Map this internal snapshot of the image, given by ID or name
    #[arg(long, value_name = "NAME")]
    snapshot: Option<String>,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// One extent, with the names that `qemu-img map --output=json` uses.
#[derive(Serialize)]
struct Row {
    start: u64,
    length: u64,
    depth: usize,
    present: bool,
    zero: bool,
    data: bool,
    compressed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    #[serde(skip)]
    file: Option<String>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let rows = run_worker(IoMode::Auto, async || gather(args).await)?.map_err(or_share)?;
    match args.output {
        OutputFormat::Json => {
            let lines: Vec<String> =
                rows.iter().map(|row| serde_json::to_string(row).expect("numbers")).collect();
            say(&format!("[{}]", lines.join(",\n")));
        }
        OutputFormat::Human => {
            let cannot = "part of the disk is compressed and has no offset to show: use --output json";
            if rows.iter().any(|row| row.compressed) {
                return Err(Error::unsupported(cannot).into());
            }
            say(&format!("{:<15} {:<15} {:<15} File", "Offset", "Length", "Mapped to"));
            for row in rows.iter().filter(|row| row.data) {
                let offset = row.offset.expect("data that is not compressed has a place");
                let file = printable(row.file.as_deref().unwrap_or_default());
                say(&format!("{:<15} {:<15} {:<15} {file}", hex(row.start), hex(row.length), hex(offset)));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A number as C's `%#x` prints it: zero has no prefix.
fn hex(number: u64) -> String {
    if number == 0 { "0".to_owned() } else { format!("{number:#x}") }
}

async fn gather(args: &Args) -> Result<Vec<Row>> {
    let options = ImageOptions { snapshot: args.snapshot.clone(), ..args.read.options() };
    let chain = open_image(&args.file, &options).await?;
    let size = chain.disk().geometry().size;
    let start = args.start_offset.min(size);
    let len = args.max_length.unwrap_or(u64::MAX).min(size - start);
    let mut rest = GuestOffset::new(start).span(len);
    let mut rows: Vec<Row> = Vec::new();
    while !rest.is_empty() {
        for extent in map_merged(chain.disk(), rest).await? {
            rest = GuestSpan::between(extent.span.end(), rest.end());
            for part in at_the_end_of_its_disk(&chain, extent) {
                push(&mut rows, row(&chain, part));
            }
        }
    }
    chain.close().await?;
    Ok(rows)
}

/// Cuts an extent where the disk that answered ends. Behind that nobody has anything, and as with `qemu-img` it is the
/// longer disk above that says so.
fn at_the_end_of_its_disk(chain: &Chain, extent: MergedExtent) -> impl Iterator<Item = MergedExtent> {
    let size = chain.members[extent.depth].disk.geometry().size;
    let (inside, outside) = extent.span.split_at(size.saturating_sub(extent.span.start().bytes()));
    let behind = MergedExtent { span: outside, place: Place::Below, depth: extent.depth.saturating_sub(1) };
    [MergedExtent { span: inside, ..extent }, behind].into_iter().filter(|part| !part.span.is_empty())
}

fn row(chain: &Chain, extent: MergedExtent) -> Row {
    let (start, length) = (extent.span.start().bytes(), extent.span.len());
    let plain = Row {
        start,
        length,
        depth: extent.depth,
        present: true,
        zero: false,
        data: true,
        compressed: false,
        offset: None,
        file: None,
    };
    match extent.place {
        Place::Data { storage, at } => {
            Row { offset: Some(at.bytes()), file: Some(name(chain, extent.depth, &storage)), ..plain }
        }
        Place::Compressed => Row { compressed: true, ..plain },
        // What nobody in the chain has is not present; zeros that an image recorded are.
        Place::Below => Row { present: false, zero: true, data: false, ..plain },
        Place::Zero { .. } => {
            // A hole of a raw disk lies where it would have its bytes.
            let is_raw = chain.members[extent.depth].head.kind() == FormatKind::Raw;
            Row { zero: true, data: false, offset: is_raw.then_some(start), ..plain }
        }
    }
}

/// The name of the file as it was asked for, or as the image above has it.
fn name(chain: &Chain, depth: usize, storage: &SharedStorage) -> String {
    let member = &chain.members[depth];
    match &member.data_file {
        Some((path, file)) if file.name() == storage.name() || Arc::ptr_eq(file, storage) => {
            path.display().to_string()
        }
        _ => member.path.strip_prefix("./").unwrap_or(&member.path).display().to_string(),
    }
}

fn push(rows: &mut Vec<Row>, next: Row) {
    if let Some(last) = rows.last_mut() {
        let same = (last.depth, last.present, last.zero, last.data, last.compressed)
            == (next.depth, next.present, next.zero, next.data, next.compressed);
        let follows = match (last.offset, next.offset) {
            (Some(at), Some(next)) => at + last.length == next,
            (None, None) => true,
            _ => false,
        };
        if same && follows && last.file == next.file && last.start + last.length == next.start {
            last.length += next.length;
            return;
        }
    }
    rows.push(next);
}
