//! `vellum snapshot`: the snapshots inside an image.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use serde_json::{Value, json};
use vellum_core::{Context, Error, Result};
use vellum_daemon::closed;
use vellum_daemon::control::{NewOverlay, Request, SnapshotFacts, call};
use vellum_daemon::{FormatKind, IoMode, Machine, Snapshot, Wanted as Key, run as run_worker};

use super::control::Target;
use super::info::{HELD, clock_text, date, list_lines, machine_json};
use super::{Outcome, or_ask_server};
use crate::args::{OutputFormat, parse_format};
use crate::output::{complain, human_bytes, printable, say, say_json};
use crate::protocol::{image_name, place};
use crate::spoken::is_qemu_command;

/// Create, list, rename, release, delete and revert to snapshots inside an image, and external ones of a served disk
///
/// Images of the vellum format (layout=zoned, the default, and layout=table) and qcow2 images support snapshots. If a
/// server has the image open, give its control socket with --control PATH instead of the image. A vellum image is served
/// on meanwhile. The requests to a qcow2 disk wait while its image is closed, changed and opened again.
///
/// A crash leaves the image as it was or as it was to be. A qcow2 image is checked first, and one that is damaged is
/// refused. Each of its snapshots keeps the size of its disk, and the state of a virtual machine if QEMU saved one.
///
/// The options -l, -c, -a and -d do what they do with `qemu-img snapshot`. -d takes a name, not an ID. -c also takes a
/// name that another snapshot of a qcow2 image has.
///
/// To read a snapshot, use `-l NAME` of convert, compare and serve, or `--snapshot NAME` of map. If its disk
/// is served with --export-snapshots, it is also the NBD export @NAME.
#[derive(clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    override_usage = "vellum snapshot COMMAND ...\n       vellum snapshot [-l | -c NAME | -a NAME | -d NAME] [-f FMT] [-q] [-U] FILE"
)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    short: Short,
}

/// The options of `qemu-img snapshot`.
#[derive(clap::Args)]
struct Short {
    /// List the snapshots of FILE, which is also done without any of these options
    #[arg(short, long, group = "action")]
    list: bool,
    /// Create a snapshot of FILE
    #[arg(short, long, value_name = "NAME", group = "action")]
    create: Option<String>,
    /// Revert FILE to this snapshot, given by ID or name
    #[arg(short, long, value_name = "NAME", group = "action")]
    apply: Option<String>,
    /// Delete this snapshot of FILE, given by name
    #[arg(short, long, value_name = "NAME", group = "action")]
    delete: Option<String>,
    /// Format of the image: raw, qcow2 or vellum. Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// With -l: do not lock the image, so that it may be in use
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print only errors and what -l lists, which is what these options do anyway
    #[arg(short, long)]
    quiet: bool,
    /// The image
    #[arg(value_name = "FILE", value_parser = image_name())]
    file: Option<PathBuf>,
}

#[derive(Subcommand)]
enum What {
    /// Create a snapshot of the disk as it is now
    #[command(
        override_usage = "vellum snapshot create [OPTIONS] FILE NAME\n       vellum snapshot create [OPTIONS] --control PATH NAME",
        mut_arg("second", |arg| arg.help("Name of the new snapshot"))
    )]
    Create(Wanted),
    /// List the snapshots
    List(Listed),
    /// Delete a snapshot and free the space that only it uses
    ///
    /// A snapshot cannot be deleted while a client of the server reads it.
    #[command(
        override_usage = "vellum snapshot delete [OPTIONS] FILE NAME\n       vellum snapshot delete [OPTIONS] --control PATH NAME"
    )]
    Delete(Wanted),
    /// Release a snapshot on which no clone stands any more, so that it can be deleted
    ///
    /// Making a clone of a snapshot (`vellum clone`) marks the snapshot. Remove its clones first, or make them
    /// independent (`vellum flatten`): a clone cannot be opened once its snapshot is released. Clones in the
    /// directory of the image are found, and the snapshot is not released then. Clones in other directories are
    /// found only with --look-in.
    #[command(
        override_usage = "vellum snapshot release [OPTIONS] FILE NAME\n       vellum snapshot release [OPTIONS] --control PATH NAME"
    )]
    Release(Released),
    /// Put a new image on top of a served disk: its image becomes one that is only read
    ///
    /// What is written from then on goes to the new image, and the one that was on top stays as it is at this moment, as with
    /// `virsh snapshot-create --disk-only`. Guests wait for a flush. With EXPORT=FILE for several disks the moment is the same
    /// for all of them. The new image is in the directory of the other one, or the server was started with --allow-dir.
    ///
    /// Serve the new image from then on. A server that is started with the other one writes to it, and does not see what was
    /// written since. After a crash the disk is the new image if there is one of that name, and otherwise the old one.
    /// `vellum commit` brings both together again.
    External(External),
    /// Give a snapshot another name
    ///
    /// One on which clones stand keeps its name, because they refer to it by that.
    #[command(
        override_usage = "vellum snapshot rename [OPTIONS] FILE NAME NEW\n       vellum snapshot rename [OPTIONS] --control PATH NAME NEW"
    )]
    Rename(Renamed),
    /// Revert the disk to a snapshot; later writes are lost
    ///
    /// The snapshots are kept. A served disk can be reverted only while no client is connected.
    #[command(
        override_usage = "vellum snapshot revert [OPTIONS] FILE NAME\n       vellum snapshot revert [OPTIONS] --control PATH NAME"
    )]
    Revert(Wanted),
}

#[derive(Clone, clap::Args)]
struct Source {
    /// Format of the image: raw, qcow2 or vellum. Default: detected from the file
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Ask the server with this control socket instead of opening an image
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// With --control: export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT", requires = "control")]
    disk: Option<String>,
}

#[derive(clap::Args)]
struct Listed {
    #[command(flatten)]
    source: Source,
    /// The image
    #[arg(value_name = "FILE", required_unless_present = "control", conflicts_with = "control", value_parser = image_name())]
    file: Option<PathBuf>,
}

#[derive(clap::Args)]
struct Wanted {
    #[command(flatten)]
    source: Source,
    /// The image; omitted with --control
    #[arg(value_name = "FILE")]
    first: OsString,
    /// Name or ID of the snapshot
    #[arg(value_name = "NAME")]
    second: Option<OsString>,
}

#[derive(clap::Args)]
struct Released {
    #[command(flatten)]
    wanted: Wanted,
    /// Also look for clones in DIR; may be given several times
    #[arg(long, value_name = "DIR")]
    look_in: Vec<PathBuf>,
}

#[derive(clap::Args)]
struct External {
    #[command(flatten)]
    target: Target,
    /// Format of the new image: qcow2 or vellum. Default: by its name, else qcow2 over qcow2 and vellum over others
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// The new image, which must not exist, for the only disk or the one of --disk; with EXPORT= in front, for that export
    #[arg(value_name = "[EXPORT=]FILE", required = true)]
    images: Vec<String>,
}

impl External {
    fn request(&self) -> Result<Request> {
        let overlay = |text: &String| {
            // A directory may have any name.
            let named = text.split_once('=').filter(|(export, _)| !export.contains('/'));
            let (disk, file) = match named {
                Some((export, file)) => (Some(export.to_owned()), file),
                None => (self.target.disk.clone(), text.as_str()),
            };
            let image = std::path::absolute(file).context(|| format!("can't create {file}"))?;
            Ok(NewOverlay { disk, image, format: self.format.map(|format| format.to_string()) })
        };
        Ok(Request::SnapshotExternal { overlays: self.images.iter().map(overlay).collect::<Result<_>>()? })
    }

    fn run(&self) -> Outcome {
        let answer = self.target.ask(&self.request()?)?;
        if self.target.output == OutputFormat::Json {
            say_json(&answer);
            return Ok(ExitCode::SUCCESS);
        }
        for done in answer["overlays"].as_array().into_iter().flatten() {
            let text = |name: &str| printable(done[name].as_str().unwrap_or_default());
            let (image, below, format) = (text("image"), text("backing-filename"), text("format"));
            let waited = done["held-us"].as_u64().unwrap_or_default() / 1000;
            say(&format!("{image} is on top of {below} from now on; requests waited {waited} ms."));
            let left: Vec<String> =
                done["key-slots-left"].as_array().into_iter().flatten().map(Value::to_string).collect();
            if !left.is_empty() {
                say(&format!(
                    "The secrets of key slots {} of {below} do not open it, because the server has not got them: add them with `vellum key \
                     add`.",
                    left.join(", ")
                ));
            }
            let fast = done["fast"].as_str().map(|fast| format!("--fast {} ", printable(fast)));
            let fast = fast.unwrap_or_default();
            say(&format!(
                "Serve it instead of {below} from now on: vellum serve -f {format} {fast}{image} ..."
            ));
        }
        Ok(ExitCode::SUCCESS)
    }
}

#[derive(clap::Args)]
struct Renamed {
    #[command(flatten)]
    source: Source,
    /// The image; omitted with --control. Then the name or ID of the snapshot, and its new name
    #[arg(value_name = "FILE NAME NEW", num_args = 2..=3, required = true)]
    words: Vec<OsString>,
}

/// Where the snapshots are: in an image, or with the server that has it.
struct Common {
    source: Source,
    /// The image, or the server's socket.
    place: PathBuf,
}

/// One snapshot there.
struct Named {
    common: Common,
    name: String,
}

impl Listed {
    fn common(&self) -> Common {
        let place = self.source.control.as_ref().or(self.file.as_ref()).expect("one of them is required");
        Common { source: self.source.clone(), place: place.clone() }
    }
}

impl Renamed {
    /// The snapshot, and its new name.
    fn named(&self) -> Result<(Named, String)> {
        let (last, rest) = self.words.split_last().expect("at least two");
        let wanted =
            Wanted { source: self.source.clone(), first: rest[0].clone(), second: rest.get(1).cloned() };
        Ok((wanted.named()?, name_in(last)?))
    }
}

/// A name of a snapshot.
fn name_in(name: &OsString) -> Result<String> {
    let name = name.to_str();
    let name =
        name.ok_or_else(|| Error::invalid(format!("{name:?}: the name of a snapshot must be UTF-8")))?;
    Ok(name.to_owned())
}

impl Wanted {
    /// What the one or two places after the options mean.
    fn named(&self) -> Result<Named> {
        let (place, name) = match (&self.source.control, &self.second) {
            (Some(_), Some(_)) => {
                let why = "with --control, give only the NAME, without a FILE";
                return Err(Error::invalid(why));
            }
            (Some(socket), None) => (socket.clone(), &self.first),
            (None, Some(name)) => (place(Path::new(&self.first))?, name),
            (None, None) => {
                return Err(Error::invalid(format!(
                    "give the snapshot's name after {}, or --control PATH before it",
                    self.first.display()
                )));
            }
        };
        Ok(Named { common: Common { source: self.source.clone(), place }, name: name_in(name)? })
    }
}

/// A snapshot, of whatever format.
struct Row {
    id: String,
    name: String,
    size: u64,
    seconds: u64,
    is_cloned: bool,
    machine: Option<Machine>,
}

impl Row {
    fn of(snapshot: Snapshot) -> Self {
        let Snapshot { id, name, size, seconds, is_cloned, machine } = snapshot;
        Self { id, name, size, seconds, is_cloned, machine }
    }

    fn json(&self) -> Value {
        let mut facts = json!({
            "id": self.id, "name": self.name, "virtual-size": self.size, "date-sec": self.seconds
        });
        if self.is_cloned {
            facts["held-by-clones"] = json!(true);
        }
        if let Some(machine) = &self.machine {
            machine_json(machine, &mut facts);
        }
        facts
    }
}

/// Says the list.
fn say_list(rows: &[Row]) {
    let has_machine = rows.iter().any(|row| row.machine.is_some());
    let behind = if has_machine { format!(" {:>8} {:>15}", "VM SIZE", "VM CLOCK") } else { String::new() };
    say(&format!("{:<7} {:<24} {:>10} {:>19}{behind}", "ID", "NAME", "DISK SIZE", "DATE"));
    for Row { id, name, size, seconds, is_cloned, machine } in rows {
        let (id, name) = (printable(id), printable(name));
        let held = if *is_cloned { HELD } else { "" };
        let (size, date) = (human_bytes(*size), date(*seconds));
        let behind = machine.as_ref().map_or_else(String::new, |machine| {
            format!(" {:>8} {:>15}", human_bytes(machine.state_bytes), clock_text(machine))
        });
        say(&format!("{id:<7} {name:<24} {size:>10} {date:>19}{behind}{held}"));
    }
}

/// What `qemu-img snapshot` does.
fn run_short(short: &Short) -> Outcome {
    let file = short.file.as_ref().ok_or_else(|| {
        Error::invalid("give a command (`vellum snapshot --help`), or -l, -c, -a or -d and the image")
    })?;
    let format = short.format;
    if short.force_share && (short.create.is_some() || short.apply.is_some() || short.delete.is_some()) {
        return Err(Error::invalid("--force-share is only for -l: an image that is changed is locked").into());
    }
    let action = async || {
        if let Some(name) = &short.create {
            closed::snapshot_create(file, format, name, true).await.map(drop)
        } else if let Some(name) = &short.apply {
            let bitmaps = closed::snapshot_revert(file, format, name).await?;
            if !short.quiet {
                say_removed(file, &bitmaps);
            }
            Ok(())
        } else if let Some(name) = &short.delete {
            closed::snapshot_delete(file, format, Key::Name(name)).await
        } else {
            // There, an image of a format without snapshots has an empty list.
            let all = match is_qemu_command() {
                true => closed::snapshots_if_any(file, format, short.force_share).await?.unwrap_or_default(),
                false => closed::snapshots(file, format, short.force_share).await?,
            };
            if !all.is_empty() {
                say("Snapshot list:");
                list_lines(&all).iter().for_each(|line| say(line));
            }
            Ok(())
        }
    };
    run_worker(IoMode::Auto, action)?.map_err(or_ask_server)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run(args: &Args) -> Outcome {
    let Some(what) = &args.what else { return run_short(&args.short) };
    match what {
        What::List(listed) => {
            let common = listed.common();
            let rows = run_worker(IoMode::Auto, async || list(&common).await)?.map_err(or_ask_server)?;
            match common.source.output {
                OutputFormat::Json => say_json(&rows.iter().map(Row::json).collect::<Vec<_>>()),
                OutputFormat::Human => say_list(&rows),
            }
        }
        What::Create(wanted) => {
            let named = &wanted.named()?;
            let id = run_worker(IoMode::Auto, async || create(named).await)?.map_err(or_ask_server)?;
            let words = format!("Snapshot {} created, ID {id}.", printable(&named.name));
            answer(named, &words, json!({ "id": id, "created": named.name }));
        }
        What::Delete(wanted) => {
            let named = &wanted.named()?;
            run_worker(IoMode::Auto, async || delete(named).await)?.map_err(or_ask_server)?;
            answer(
                named,
                &format!("Snapshot {} deleted.", printable(&named.name)),
                json!({ "deleted": named.name }),
            );
        }
        What::Release(released) => {
            let named = &released.wanted.named()?;
            let release = async || release(named, &released.look_in).await;
            run_worker(IoMode::Auto, release)?.map_err(or_ask_server)?;
            let words = format!("Snapshot {} released: it can be deleted.", printable(&named.name));
            answer(named, &words, json!({ "released": named.name }));
        }
        What::External(external) => return external.run(),
        What::Rename(renamed) => {
            let (named, new) = &renamed.named()?;
            run_worker(IoMode::Auto, async || rename(named, new).await)?.map_err(or_ask_server)?;
            let words = format!("Snapshot {} is now named {}.", printable(&named.name), printable(new));
            answer(named, &words, json!({ "renamed": named.name, "name": new }));
        }
        What::Revert(wanted) => {
            let named = &wanted.named()?;
            let bitmaps = run_worker(IoMode::Auto, async || revert(named).await)?.map_err(or_ask_server)?;
            let words = format!("The disk was reverted to snapshot {}.", printable(&named.name));
            say_removed(&named.common.place, &bitmaps);
            answer(named, &words, json!({ "reverted-to": named.name, "bitmaps-removed": bitmaps }));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn answer(named: &Named, words: &str, mut facts: Value) {
    match named.common.source.output {
        OutputFormat::Human => say(words),
        OutputFormat::Json => {
            let key = if named.common.source.control.is_some() { "control" } else { "filename" };
            facts[key] = json!(named.common.place.display().to_string());
            say_json(&facts);
        }
    }
}

/// Asks the server.
async fn ask(common: &Common, request: Request) -> Result<Value> {
    call(&common.place, &request).await
}

async fn list(common: &Common) -> Result<Vec<Row>> {
    if common.source.control.is_some() {
        let answer = ask(common, Request::SnapshotList { disk: common.source.disk.clone() }).await?;
        let facts: Vec<SnapshotFacts> = serde_json::from_value(answer)
            .map_err(|error| Error::invalid(format!("unexpected answer of the server: {error}")))?;
        let row = |facts: SnapshotFacts| Row {
            id: facts.id,
            name: facts.name,
            size: facts.virtual_size,
            seconds: facts.date_sec,
            is_cloned: facts.held_by_clones,
            machine: facts.machine.map(Machine::from),
        };
        return Ok(facts.into_iter().map(row).collect());
    }
    let all = closed::snapshots(&common.place, common.source.format, false).await?;
    Ok(all.into_iter().map(Row::of).collect())
}

async fn create(named: &Named) -> Result<String> {
    let (disk, name) = (named.common.source.disk.clone(), named.name.clone());
    if named.common.source.control.is_some() {
        let answer = ask(&named.common, Request::SnapshotCreate { disk, name }).await?;
        return Ok(answer["id"].as_str().unwrap_or_default().to_owned());
    }
    let Common { source, place } = &named.common;
    closed::snapshot_create(place, source.format, &named.name, false).await
}

async fn delete(named: &Named) -> Result<()> {
    let (disk, name) = (named.common.source.disk.clone(), named.name.clone());
    if named.common.source.control.is_some() {
        return ask(&named.common, Request::SnapshotDelete { disk, name }).await.map(drop);
    }
    let Common { source, place } = &named.common;
    closed::snapshot_delete(place, source.format, Key::IdOrName(&named.name)).await
}

async fn rename(named: &Named, new: &str) -> Result<()> {
    let (disk, name) = (named.common.source.disk.clone(), named.name.clone());
    if named.common.source.control.is_some() {
        let request = Request::SnapshotRename { disk, name, new_name: new.to_owned() };
        return ask(&named.common, request).await.map(drop);
    }
    let Common { source, place } = &named.common;
    closed::snapshot_rename(place, source.format, &named.name, new).await
}

async fn release(named: &Named, look_in: &[PathBuf]) -> Result<()> {
    let (disk, name) = (named.common.source.disk.clone(), named.name.clone());
    if named.common.source.control.is_some() {
        let absolute =
            |dir: &PathBuf| dir.canonicalize().context(|| format!("can't look in {}", dir.display()));
        let look_in = look_in.iter().map(absolute).collect::<Result<Vec<PathBuf>>>()?;
        return ask(&named.common, Request::SnapshotRelease { disk, name, look_in }).await.map(drop);
    }
    let Common { source, place } = &named.common;
    closed::snapshot_release(place, source.format, &named.name, look_in).await
}

/// Names what a revert has cost.
fn say_removed(place: &Path, bitmaps: &[String]) {
    if !bitmaps.is_empty() {
        let names: Vec<String> = bitmaps.iter().map(|name| printable(name).to_string()).collect();
        complain(&format!(
            "vellum snapshot: {}: its bitmaps were removed, because they say nothing of the disk as it is now: {}",
            place.display(),
            names.join(", ")
        ));
    }
}

/// The names of the bitmaps that are gone.
async fn revert(named: &Named) -> Result<Vec<String>> {
    let (disk, name) = (named.common.source.disk.clone(), named.name.clone());
    if named.common.source.control.is_some() {
        let answer = ask(&named.common, Request::SnapshotRevert { disk, name }).await?;
        let names = answer["bitmaps-removed"].as_array().into_iter().flatten();
        return Ok(names.filter_map(Value::as_str).map(str::to_owned).collect());
    }
    let Common { source, place } = &named.common;
    closed::snapshot_revert(place, source.format, &named.name).await
}
