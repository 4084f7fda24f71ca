//! `vellum tier`: which parts of a disk also lie on a fast medium.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgGroup, Subcommand};
use serde_json::{Value, json};
use vellum_core::{Error, Result};
use vellum_daemon::control::{Request, call};
use vellum_daemon::pins::{FileTimes, pins_of};
use vellum_daemon::tier::{self, FastFor, Ranges, Watch, facts_json};
use vellum_daemon::{ImageOptions, IoMode, run as run_worker};

use super::Outcome;
use super::tier_disk::{
    OfDisk, WithFast, code_for_left, code_for_moved, in_use, in_use_alone, options_of, say_demoted,
    say_moved, say_units, units_are,
};
use super::tier_files::{self, PinArgs, UnpinArgs};
use crate::args::{AllowArgs, OutputFormat, parse_size};
use crate::output::{human_bytes, printable, say, say_json, table};

/// Keep copies of parts of a disk on a fast medium
///
/// A fast medium is a file or block device on an SSD. A disk whose image lies on slow storage reads promoted parts from
/// there. Writes always go to the image; a part that is written is read from the image again. The image keeps
/// everything, so a lost fast medium loses nothing, unless parts were moved there (`vellum tier move`). One medium serves many disks. Only images of the format vellum with
/// layout=table or layout=zoned can have one.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Attach(AttachArgs),
    Detach(DetachArgs),
    Status(StatusArgs),
    List(ListArgs),
    Forget(ForgetArgs),
    Pin(PinArgs),
    Unpin(UnpinArgs),
    Promote(PromoteArgs),
    Demote(DemoteArgs),
    Move(MoveArgs),
}

/// A fast medium that is made or used for an image.
#[derive(clap::Args, Debug, Clone)]
pub(crate) struct FastArgs {
    /// How much of the drive a new fast medium takes, such as 100G
    ///
    /// Needed for a file that does not exist yet. Default for a block device: all of it.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "fast")]
    pub(crate) fast_size: Option<u64>,
    /// At most this much of the fast medium holds copies of this disk. Default: all of it
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "fast")]
    pub(crate) fast_budget: Option<u64>,
}

impl FastArgs {
    pub(crate) fn at(&self, path: PathBuf) -> FastFor {
        FastFor { path, size: self.fast_size, budget: self.fast_budget }
    }
}

/// Attach a disk to a fast medium, which is made if it does not exist
///
/// Nothing is copied yet. Attaching again changes the budget. The disk must not be in use.
#[derive(clap::Args)]
struct AttachArgs {
    /// The fast medium: a file or block device
    #[arg(long, value_name = "PATH")]
    fast: PathBuf,
    #[command(flatten)]
    how: FastArgs,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The image
    #[arg(value_name = "DISK")]
    image: PathBuf,
}

/// Detach a disk from its fast medium
///
/// The disk does not change. The disk must not be in use.
#[derive(clap::Args)]
struct DetachArgs {
    /// The fast medium, whose space is then free for other disks. Without it, the space stays taken
    #[arg(long, value_name = "PATH")]
    fast: Option<PathBuf>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// The image
    #[arg(value_name = "DISK")]
    image: PathBuf,
}

/// List the disks that a fast medium has copies of
///
/// The medium must not be in use. USED may count copies that are void.
#[derive(clap::Args)]
struct ListArgs {
    /// The fast medium
    #[arg(long, value_name = "PATH")]
    fast: PathBuf,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
}

/// Free the space of a disk on a fast medium, without its image
///
/// For an image that was deleted. An image that still exists has no copies there afterwards, and loses nothing. The medium must
/// not be in use.
#[derive(clap::Args)]
struct ForgetArgs {
    /// The fast medium
    #[arg(long, value_name = "PATH")]
    fast: PathBuf,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    /// Also a disk with units that only the medium has (`vellum tier move`): they are lost
    #[arg(long)]
    force: bool,
    /// The disk: a UUID or a name that `vellum tier list` shows
    #[arg(value_name = "UUID|NAME")]
    row: String,
}

/// Show what a disk has on its fast medium
#[derive(clap::Args)]
struct StatusArgs {
    /// The fast medium
    ///
    /// Without it, only what the image records is shown.
    #[arg(long, value_name = "PATH", conflicts_with = "control")]
    fast: Option<PathBuf>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    of: OfDisk,
}

/// Copy parts of a disk to its fast medium
///
/// They are read from there until they are written. Parts of the disk that its image does not have, because they are read
/// from the backing image, are promoted only with --copy. It is better to put the backing image itself on fast storage,
/// once for all of its clones.
///
/// The unit is that of the image (unit_size). A range promotes each unit that it touches. With --control the disk of a
/// running server is changed while it is served.
///
/// With --old-mtime and --recent-atime, the parts are those that hold bytes of files which the guest wrote long ago and has
/// read lately, as its file system says (ext2, ext3, ext4, XFS). A guest that mounts with noatime does not record what it reads.
#[derive(clap::Args)]
#[command(group = ArgGroup::new("what").args(["range", "all", "old_mtime", "recent_atime"]).multiple(true).required(true))]
struct PromoteArgs {
    /// A part of the disk, such as 1G+64M; may be given several times
    #[arg(long, value_name = "OFFSET+LENGTH", value_parser = parse_range)]
    range: Vec<(u64, u64)>,
    /// The whole disk
    #[arg(long, conflicts_with = "range")]
    all: bool,
    /// Files that were not written for this many days
    #[arg(long, value_name = "DAYS", requires = "recent_atime", conflicts_with_all = ["range", "all"])]
    old_mtime: Option<u32>,
    /// And were read within this many days
    #[arg(long, value_name = "DAYS", requires = "old_mtime", conflicts_with_all = ["range", "all"])]
    recent_atime: Option<u32>,
    /// Also copy what is read from the backing image
    #[arg(long)]
    copy: bool,
    #[command(flatten)]
    with: WithFast,
}

/// Read parts of a disk from its image again
#[derive(clap::Args)]
#[command(group = ArgGroup::new("what").args(["range", "all"]).multiple(true).required(true))]
struct DemoteArgs {
    /// A part of the disk, such as 1G+64M; may be given several times
    #[arg(long, value_name = "OFFSET+LENGTH", value_parser = parse_range)]
    range: Vec<(u64, u64)>,
    /// The whole disk
    #[arg(long, conflicts_with = "range")]
    all: bool,
    #[command(flatten)]
    with: WithFast,
}

/// Free the space that parts of a disk take in its image: only the fast medium has them then
///
/// What the fast medium has no copy of is copied first. Each copy is read back and compared before its space is freed.
///
/// From then on the disk is not opened without that medium, and what is lost with the medium is lost. The guest still writes to the
/// image alone: a part that is written is copied back first. Snapshots are not possible meanwhile, nor is what changes the image
/// without its medium (resize, flatten, check -r). `--back` copies parts home; when nothing is left, all of that is as before.
///
/// A terminal shows the progress. Interrupted, the command ends in good order: what is done stays done, and the same command goes on. A
/// server that was asked with --control carries on.
#[derive(clap::Args)]
#[command(group = ArgGroup::new("what").args(["range", "all", "copied", "path"]).multiple(true).required(true))]
struct MoveArgs {
    /// A part of the disk, such as 1G+64M; may be given several times
    #[arg(long, value_name = "OFFSET+LENGTH", value_parser = parse_range)]
    range: Vec<(u64, u64)>,
    /// The files at this path in the guest, such as /usr/share, as `vellum tier pin` finds them; may be given several times
    #[arg(long, value_name = "PATH", conflicts_with_all = ["range", "all", "copied"])]
    path: Vec<String>,
    /// The partition with these paths; needed if several partitions have them
    #[arg(long, value_name = "NUMBER", requires = "path")]
    partition: Option<u32>,
    /// The whole disk
    #[arg(long, conflicts_with_all = ["range", "copied"])]
    all: bool,
    /// What the fast medium has a copy of already, such as pinned files; with --range, of these parts
    #[arg(long, conflicts_with = "back")]
    copied: bool,
    /// Copy them back to the image, and take them from the fast medium
    #[arg(long)]
    back: bool,
    #[command(flatten)]
    with: WithFast,
}

/// Offset and length of a part of a disk.
fn parse_range(text: &str) -> Result<(u64, u64)> {
    let bad = || Error::invalid(format!("invalid range {text:?}: use OFFSET+LENGTH, for example 1G+64M"));
    let (at, len) = text.split_once('+').ok_or_else(bad)?;
    let (at, len) = (parse_size(at).map_err(|_| bad())?, parse_size(len).map_err(|_| bad())?);
    if len == 0 { Err(bad()) } else { Ok((at, len)) }
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.verb {
        Verb::Attach(args) => attach(args),
        Verb::Detach(args) => detach(args),
        Verb::Status(args) => status(args),
        Verb::List(args) => list(args),
        Verb::Forget(args) => forget(args),
        Verb::Pin(args) => tier_files::pin(args),
        Verb::Unpin(args) => tier_files::unpin(args),
        Verb::Promote(args) => promote(args),
        Verb::Demote(args) => demote(args),
        Verb::Move(args) => move_units(args),
    }
}

fn attach(args: &AttachArgs) -> Outcome {
    let fast = args.how.at(args.fast.clone());
    let options = ImageOptions::default();
    let attached = run_worker(IoMode::Auto, async || tier::attach(&args.image, &fast, &options).await)?
        .map_err(in_use_alone)?;
    let (name, medium) = (args.image.display().to_string(), args.fast.display().to_string());
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": name,
            "fast": medium,
            "created": attached.is_new,
            "room-bytes": attached.room,
            "budget-bytes": attached.budget,
        })),
        OutputFormat::Human => {
            if attached.is_new {
                say(&format!("{medium}: a fast medium for {} of copies", human_bytes(attached.room)));
            }
            let budget = human_bytes(attached.budget);
            say(&format!("{name} is attached to {medium}, with at most {budget} of copies"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn detach(args: &DetachArgs) -> Outcome {
    let options = ImageOptions::default();
    let fast = args.fast.as_deref();
    let named = run_worker(IoMode::Auto, async || tier::detach(&args.image, fast, &options).await)?
        .map_err(in_use_alone)?;
    let name = args.image.display().to_string();
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": name,
            "fast": named.as_ref().map(|named| named.name.clone()),
            "space-freed": fast.is_some(),
        })),
        OutputFormat::Human => say(&match (named, fast) {
            (None, None) => format!("{name} names no fast medium"),
            (None, Some(_)) => format!("{name} named no fast medium; its space there is free"),
            (Some(named), Some(_)) => format!("{name} is detached from {}", named.name),
            (Some(named), None) => format!(
                "{name} is detached from {0}; its space there stays taken. To free it, unless that medium was cut off or its tables are damaged: `vellum \
                 tier detach --fast {0} {name}`",
                named.name
            ),
        }),
    }
    Ok(ExitCode::SUCCESS)
}

fn list(args: &ListArgs) -> Outcome {
    let (free, rows) =
        run_worker(IoMode::Auto, async || tier::rows(&args.fast).await)?.map_err(in_use_alone)?;
    match args.output {
        OutputFormat::Json => say_json(&json!({ "free-bytes": free, "disks": rows })),
        OutputFormat::Human => {
            let row = |row: &tier::TierRow| {
                let (used, budget) = (human_bytes(row.used_bytes), human_bytes(row.budget_bytes));
                [printable(&row.filename).into_owned(), row.uuid.clone(), used, budget]
            };
            table(["DISK", "UUID", "USED", "BUDGET"], 2, rows.iter().map(row))
                .iter()
                .for_each(|line| say(line));
            say(&format!("{} free", human_bytes(free)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn forget(args: &ForgetArgs) -> Outcome {
    let row = run_worker(IoMode::Auto, async || tier::forget(&args.fast, &args.row, args.force).await)?
        .map_err(in_use_alone)?;
    match args.output {
        OutputFormat::Json => say_json(&json!(row)),
        OutputFormat::Human => {
            let (name, freed) = (printable(&row.filename), human_bytes(row.used_bytes));
            say(&format!(
                "{} has nothing of {name} ({}) any more; {freed} are free",
                args.fast.display(),
                row.uuid
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn status(args: &StatusArgs) -> Outcome {
    let (name, answer) = match (&args.of.image, &args.of.control) {
        (Some(image), _) => {
            let fast = args.fast.as_deref();
            let options = ImageOptions { read_only: true, ..options_of(&args.allow) };
            let (named, facts) =
                run_worker(IoMode::Auto, async || tier::status(image, fast, &options).await)?
                    .map_err(in_use)?;
            let mut answer = facts.as_ref().map_or_else(|| json!({}), facts_json);
            answer["fast"] = json!(named.as_ref().map(|named| named.name.clone()));
            answer["counts"] = json!(named.as_ref().is_some_and(|named| named.counts));
            answer["needed"] = json!(named.is_some_and(|named| named.is_needed));
            answer["pins"] = json!(run_worker(IoMode::Auto, async || pins_of(image).await)??);
            (image.display().to_string(), answer)
        }
        (None, control) => {
            let control = control.as_ref().expect("one of the two is given");
            let request = Request::TierStatus { disk: args.of.disk.clone() };
            let answer = run_worker(IoMode::Auto, async || call(control, &request).await)??;
            ("the disk".to_owned(), answer)
        }
    };
    match args.output {
        OutputFormat::Json => say_json(&answer),
        OutputFormat::Human => say(&status_text(&name, &answer)),
    }
    Ok(ExitCode::SUCCESS)
}

fn status_text(name: &str, answer: &Value) -> String {
    let number = |field: &str| answer[field].as_u64().unwrap_or_default();
    let mut lines = Vec::new();
    if let Some(fast) = answer.get("fast") {
        match fast.as_str() {
            None => return format!("{name} names no fast medium (`vellum tier attach`)"),
            Some(fast) if answer["counts"] == true => lines.push(format!("{name}: attached to {fast}")),
            Some(fast) => lines.push(format!("{name}: attached to {fast}, where no copy counts")),
        }
    }
    if answer["needed"] == true && answer.get("units").is_none() {
        lines.push(
            "units of it are there alone: the disk needs this medium (--fast PATH says how many)".to_owned(),
        );
    }
    if let Some(trouble) = answer["trouble"].as_str() {
        // With reads that failed it is used all the same.
        let what =
            if answer["lost-reads"].as_u64().is_some_and(|reads| reads > 0) { "trouble" } else { "not used" };
        lines.push(format!("{what}: {trouble}"));
    }
    if answer.get("units").is_some() {
        let (units, unit) = (number("units"), number("unit-size"));
        let (copied, used) = (human_bytes(units * unit), human_bytes(number("used-bytes")));
        let budget = human_bytes(number("budget-bytes"));
        // Without a medium there is no budget.
        if number("budget-bytes") > 0 || units > 0 {
            let what = format!("they take {used}, of a budget of {budget}");
            lines.push(format!("{} copied; {what}", units_are(units, &copied)));
        }
        if number("moved") > 0 {
            let moved = human_bytes(number("moved") * unit);
            lines.push(format!(
                "{} of them ({moved}) are there alone: the disk needs this medium",
                number("moved")
            ));
        }
        if number("missing") > 0 {
            lines.push(format!(
                "{} units ({}) should be there alone, and are not: they are lost, unless the medium can be mended",
                number("missing"),
                human_bytes(number("missing") * unit)
            ));
        }
        for (reason, count) in answer["units-by-reason"].as_object().into_iter().flatten() {
            if count.as_u64().is_some_and(|count| count > 0) {
                lines.push(format!("  {reason}: {count}"));
            }
        }
        if std::io::stdout().is_terminal() {
            lines.extend(strip(answer));
        }
        let reads = |which: &str| {
            let bytes = human_bytes(number(&format!("{which}-read-bytes")));
            format!("{} ({bytes})", number(&format!("{which}-reads")))
        };
        lines.push(format!("reads since it was opened: {} fast, {} slow", reads("fast"), reads("slow")));
        if number("failed-reads") > 0 {
            lines.push(format!(
                "{} reads failed there, and were answered from the image",
                number("failed-reads")
            ));
        }
        if number("lost-reads") > 0 {
            lines.push(format!("{} reads of what is there alone failed", number("lost-reads")));
        }
    }
    for pin in answer["pins"].as_array().into_iter().flatten() {
        lines.push(format!("  pinned: {}", tier_files::pin_text(pin)));
    }
    lines.join("\n")
}

/// The disk from its start to its end, and how much of each part is copied.
fn strip(answer: &Value) -> Option<String> {
    const SHADES: [char; 5] = ['·', '░', '▒', '▓', '█'];
    let parts = answer["strip"].as_array().filter(|parts| !parts.is_empty())?;
    let whole = answer["disk-units"].as_u64()?.div_ceil(parts.len() as u64).max(1);
    let shade = |part: &Value| match part.as_u64().unwrap_or_default() {
        0 => SHADES[0],
        units => SHADES[usize::try_from((units * 4).div_ceil(whole).clamp(1, 4)).unwrap_or(4)],
    };
    Some(format!("  [{}]", parts.iter().map(shade).collect::<String>()))
}

fn promote(args: &PromoteArgs) -> Outcome {
    if let (Some(old_mtime), Some(recent_atime)) = (args.old_mtime, args.recent_atime) {
        let times = FileTimes { old_mtime, recent_atime, copy: args.copy };
        return tier_files::promote_by_times(times, &args.with);
    }
    let ranges = Ranges { ranges: args.range.clone(), copies_base: args.copy };
    let asked = args.with.ask(|disk| {
        let (ranges, copy) = (ranges.ranges.clone(), args.copy);
        Request::TierPromote { disk, ranges, copy, demote: false, paths: Vec::new() }
    });
    let answer = match asked? {
        Some(answer) => answer,
        None => {
            let (image, fast, options) = args.with.closed();
            let done =
                run_worker(IoMode::Auto, async || tier::promote(&image, &fast, &ranges, &options).await)?;
            json!(done.map_err(in_use)?)
        }
    };
    if !args.with.says_json(&answer) {
        say_units(&answer);
    }
    Ok(ExitCode::SUCCESS)
}

fn demote(args: &DemoteArgs) -> Outcome {
    take_back(&args.range, &args.with)
}

fn move_units(args: &MoveArgs) -> Outcome {
    if args.back && !args.path.is_empty() {
        return tier_files::bring_files_back(&args.path, args.partition, &args.with);
    }
    if args.back {
        return take_back(&args.range, &args.with);
    }
    if !args.path.is_empty() {
        return tier_files::move_files(&args.path, args.partition, &args.with);
    }
    let ranges = Ranges { ranges: args.range.clone(), copies_base: false };
    let only_copied = args.copied;
    let asked = args.with.ask(|disk| {
        let ranges = ranges.ranges.clone();
        Request::TierMove { disk, ranges, only_copied, paths: Vec::new() }
    })?;
    let answer = match asked {
        Some(answer) => answer,
        None => {
            let (image, fast, options) = args.with.closed();
            let work = async |watch: Watch<'_>| {
                tier::move_away(&image, &fast, (&ranges, only_copied), &options, watch).await
            };
            json!(args.with.watched(work)?)
        }
    };
    if !args.with.says_json(&answer) {
        say_moved(&answer);
    }
    Ok(code_for_moved(&answer))
}

fn take_back(range: &[(u64, u64)], with: &WithFast) -> Outcome {
    let ranges = Ranges { ranges: range.to_vec(), copies_base: false };
    let asked = with.ask(|disk| Request::TierPromote {
        disk,
        ranges: ranges.ranges.clone(),
        copy: false,
        demote: true,
        paths: Vec::new(),
    });
    let answer = match asked? {
        Some(answer) => answer,
        None => {
            let (image, fast, options) = with.closed();
            let work = async |watch: Watch<'_>| tier::demote(&image, &fast, &ranges, &options, watch).await;
            json!(with.watched(work)?)
        }
    };
    if !with.says_json(&answer) {
        say_demoted(&answer);
    }
    Ok(code_for_left(&answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_strip_shows_how_much_of_each_part_is_copied() {
        let answer = json!({ "disk-units": 32, "strip": [0, 1, 4, 5, 8, 9, 0, 2] });
        // Four units a part.
        assert_eq!(strip(&answer).as_deref(), Some("  [·░████·▒]"));
        assert_eq!(strip(&json!({ "strip": [] })), None);
    }
}
