//! `vellum snapshot`: the snapshots inside an image.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Subcommand;
use serde_json::{Value, json};
use vellum_core::{Disk, Error, ErrorKind, Result, SharedStorage};
use vellum_daemon::ImageOptions;
use vellum_daemon::control::{Request, SnapshotFacts, call};
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
/// An image of the native format with layout=table keeps them; of a qcow2 image they are listed. The image is closed; or it is
/// served, and the server is asked instead of the file: `--control PATH`, as `vellum serve --control PATH` has it. To read one:
/// `-l NAME` of convert, compare and serve, `--snapshot NAME` of map; while its disk is served, the NBD export @NAME.
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
    /// Delete a snapshot; space that only it had is free. While it is served and read, it is not deleted
    Delete(Named),
    /// Make the disk what a snapshot has; what was written since is lost. The snapshots stay. While it is served, no client may be
    /// connected
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
    /// Ask the server with this control socket, instead of giving the image
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// With --control: the disk, by the name of its export; not needed where the server has only one
    #[arg(long, value_name = "EXPORT", requires = "control")]
    disk: Option<String>,
    /// The image
    #[arg(value_name = "FILE", required_unless_present = "control", conflicts_with = "control")]
    file: Option<PathBuf>,
}

impl Common {
    /// The image, or the socket of the server that has it.
    fn place(&self) -> &Path {
        self.control.as_ref().or(self.file.as_ref()).expect("one of them is required")
    }

    /// The image. Who has the server's socket asks that.
    fn image(&self) -> &Path {
        self.file.as_ref().expect("it is required without a socket")
    }
}

#[derive(clap::Args)]
#[command(allow_missing_positional = true)]
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
            answer(named, &words, json!({ "id": id, "created": named.name }));
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
            let key = if named.common.control.is_some() { "control" } else { "filename" };
            facts[key] = json!(named.common.place().display().to_string());
            say_json(&facts);
        }
    }
}

/// The image, which must be of the native format.
async fn native_file(common: &Common, what: &str) -> Result<SharedStorage> {
    let options = ImageOptions { format: common.format, ..ImageOptions::default() };
    let (storage, format) = open_file(common.image(), &options).await.map_err(name_remedy)?;
    match format {
        FormatKind::Native => Ok(storage),
        FormatKind::Qcow2 => Err(Error::unsupported(format!(
            "{}: snapshots of qcow2 images can be listed and read, not {what}",
            common.image().display()
        ))),
        FormatKind::Raw => Err(none_in_raw(common.image())),
    }
}

/// What to do when another program has the image.
pub(crate) fn name_remedy(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Locked => error.context(
            "while a server has the image open, that is asked instead: with `--control PATH` in place of the file, as `vellum serve \
             --control PATH` was started",
        ),
        _ => error,
    }
}

/// Asks the server.
async fn ask(common: &Common, request: Request) -> Result<Value> {
    call(common.place(), &request).await
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
    if common.control.is_some() {
        let answer = ask(common, Request::SnapshotList { disk: common.disk.clone() }).await?;
        let facts: Vec<SnapshotFacts> = serde_json::from_value(answer)
            .map_err(|error| Error::invalid(format!("the server's list is no list: {error}")))?;
        let rows = facts.into_iter().map(|SnapshotFacts { id, name, virtual_size, date_sec }| Row {
            id,
            name,
            size: virtual_size,
            seconds: date_sec,
        });
        return Ok(rows.collect());
    }
    let options = ImageOptions { format: common.format, ..ImageOptions::reading() };
    let (storage, format) = open_file(common.image(), &options).await.map_err(name_remedy)?;
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
        FormatKind::Raw => Err(none_in_raw(common.image())),
    }
}

async fn create(named: &Named) -> Result<String> {
    let (disk, name) = (named.common.disk.clone(), named.name.clone());
    if named.common.control.is_some() {
        let answer = ask(&named.common, Request::SnapshotCreate { disk, name }).await?;
        return Ok(answer["id"].as_str().unwrap_or_default().to_owned());
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let disk = open(&named.common, "made").await?;
    let made = disk.snapshot_create(&named.name, now).await;
    let closed = disk.close().await;
    let id = made?;
    closed.map(|()| id.to_string())
}

async fn delete(named: &Named) -> Result<()> {
    let (disk, name) = (named.common.disk.clone(), named.name.clone());
    if named.common.control.is_some() {
        return ask(&named.common, Request::SnapshotDelete { disk, name }).await.map(drop);
    }
    let disk = open(&named.common, "deleted").await?;
    let deleted = disk.snapshot_delete(&named.name).await;
    let closed = disk.close().await;
    deleted.and(closed)
}

async fn revert(named: &Named) -> Result<()> {
    let (disk, name) = (named.common.disk.clone(), named.name.clone());
    if named.common.control.is_some() {
        return ask(&named.common, Request::SnapshotRevert { disk, name }).await.map(drop);
    }
    let storage = native_file(&named.common, "gone back to").await?;
    snapshots::revert(storage, None, for_snapshots(), &named.name).await
}
