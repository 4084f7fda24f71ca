//! `vellum snapshot`: the snapshots inside an image.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Subcommand;
use serde_json::{Value, json};
use vellum_core::{Disk, Error, Result, SharedStorage};
use vellum_daemon::ImageOptions;
use vellum_daemon::image::open_file;
use vellum_format::FormatKind;
use vellum_format::native::snapshots::{self, Snapshot};
use vellum_format::native::{Native, OpenOptions};
use vellum_format::qcow2::Header;
use vellum_format::qcow2::snapshot::list as list_qcow2;
use vellum_io::{IoMode, run as run_worker};

use super::Outcome;
use super::info::date;
use crate::args::{OutputFormat, parse_format};
use crate::output::{human_bytes, say, say_json};

/// Make, list, delete or go back to snapshots inside an image
///
/// An image of the native format with layout=table keeps them; of a qcow2 image they are listed. The image is closed. To read
/// one: `-l NAME` of convert, compare and serve, `--snapshot NAME` of map.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Keep the disk as it is now under a name
    Create(Named),
    /// Tell which snapshots there are
    List(Common),
    /// Delete a snapshot; space that only it had is free
    Delete(Named),
    /// Make the disk what a snapshot has; what was written since is lost. The snapshots stay
    Revert(Named),
}

#[derive(clap::Args)]
struct Common {
    /// Format of the image; guessed when not given
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// How the answer is printed
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The image
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

#[derive(clap::Args)]
struct Named {
    #[command(flatten)]
    common: Common,
    /// The snapshot's name; for one that is there also its id
    #[arg(value_name = "NAME")]
    name: String,
}

/// A snapshot, of whatever format.
struct Row {
    id: String,
    name: String,
    size: u64,
    seconds: u64,
}

impl Row {
    fn of(snapshot: Snapshot) -> Self {
        let Snapshot { id, name, size, seconds } = snapshot;
        Self { id: id.to_string(), name, size, seconds }
    }

    fn json(&self) -> Value {
        json!({ "id": self.id, "name": self.name, "virtual-size": self.size, "date-sec": self.seconds })
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.what {
        What::List(common) => {
            let rows = run_worker(IoMode::Auto, async || list(common).await)??;
            match common.output {
                OutputFormat::Json => say_json(&rows.iter().map(Row::json).collect::<Vec<_>>()),
                OutputFormat::Human => {
                    say(&format!("{:<7} {:<24} {:>10} {:>19}", "ID", "NAME", "DISK SIZE", "DATE"));
                    for Row { id, name, size, seconds } in &rows {
                        say(&format!("{id:<7} {name:<24} {:>10} {:>19}", human_bytes(*size), date(*seconds)));
                    }
                }
            }
        }
        What::Create(named) => {
            let id = run_worker(IoMode::Auto, async || create(named).await)??;
            let words = format!("Snapshot {} made, id {id}.", named.name);
            answer(named, &words, json!({ "id": id.to_string(), "created": named.name }));
        }
        What::Delete(named) => {
            run_worker(IoMode::Auto, async || delete(named).await)??;
            answer(named, &format!("Snapshot {} deleted.", named.name), json!({ "deleted": named.name }));
        }
        What::Revert(named) => {
            run_worker(IoMode::Auto, async || revert(named).await)??;
            let words = format!("The disk is what snapshot {} has.", named.name);
            answer(named, &words, json!({ "reverted-to": named.name }));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn answer(named: &Named, words: &str, mut facts: Value) {
    match named.common.output {
        OutputFormat::Human => say(words),
        OutputFormat::Json => {
            facts["filename"] = json!(named.common.file.display().to_string());
            say_json(&facts);
        }
    }
}

/// The image, which must be of the native format.
async fn native_file(common: &Common, what: &str) -> Result<SharedStorage> {
    let options = ImageOptions { format: common.format, ..ImageOptions::default() };
    let (storage, format) = open_file(&common.file, &options).await?;
    match format {
        FormatKind::Native => Ok(storage),
        FormatKind::Qcow2 => Err(Error::unsupported(format!(
            "{}: snapshots of qcow2 images can be listed and read, not {what}",
            common.file.display()
        ))),
        FormatKind::Raw => Err(none_in_raw(&common.file)),
    }
}

fn none_in_raw(file: &Path) -> Error {
    Error::unsupported(format!("{}: a raw image has no snapshots", file.display()))
}

/// Nothing of the guest's is read or written.
fn for_snapshots() -> OpenOptions {
    OpenOptions { without_base: true, ..OpenOptions::default() }
}

async fn open(common: &Common, what: &str) -> Result<std::sync::Arc<Native>> {
    Native::open(native_file(common, what).await?, None, for_snapshots()).await
}

async fn list(common: &Common) -> Result<Vec<Row>> {
    let options = ImageOptions { format: common.format, ..ImageOptions::reading() };
    let (storage, format) = open_file(&common.file, &options).await?;
    match format {
        FormatKind::Native => Ok(snapshots::snapshots(&storage).await?.into_iter().map(Row::of).collect()),
        FormatKind::Qcow2 => {
            let header = Header::read(&*storage).await?;
            let all = list_qcow2(&header, &*storage).await?;
            let rows = all.into_iter().map(|snapshot| Row {
                id: snapshot.id,
                name: snapshot.name,
                size: snapshot.disk_size,
                seconds: u64::from(snapshot.date_seconds),
            });
            Ok(rows.collect())
        }
        FormatKind::Raw => Err(none_in_raw(&common.file)),
    }
}

async fn create(named: &Named) -> Result<u32> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let disk = open(&named.common, "made").await?;
    let made = disk.snapshot_create(&named.name, now).await;
    let closed = disk.close().await;
    let id = made?;
    closed.map(|()| id)
}

async fn delete(named: &Named) -> Result<()> {
    let disk = open(&named.common, "deleted").await?;
    let deleted = disk.snapshot_delete(&named.name).await;
    let closed = disk.close().await;
    deleted.and(closed)
}

async fn revert(named: &Named) -> Result<()> {
    let storage = native_file(&named.common, "gone back to").await?;
    snapshots::revert(storage, None, for_snapshots(), &named.name).await
}
