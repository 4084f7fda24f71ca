//! `vellum tier`: which parts of a disk also lie on a fast medium.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use serde_json::{Value, json};
use vellum_core::{Error, Result};
use vellum_daemon::control::{Request, call};
use vellum_daemon::tier::{self, FastFor, Ranges, facts_json};
use vellum_daemon::{ImageOptions, IoMode, run as run_worker};

use super::{Failure, Outcome, if_locked};
use crate::args::{AllowArgs, OutputFormat, parse_size};
use crate::output::{human_bytes, say, say_json};

/// Keep copies of parts of a disk on a fast medium
///
/// A fast medium is a file or block device on an SSD. A disk whose image lies on slow storage reads promoted parts from
/// there. Writes always go to the image; a part that is written is read from the image again. The image keeps
/// everything, so a lost fast medium loses nothing. One medium serves many disks. Only images of the format vellum with
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
    Promote(PromoteArgs),
    Demote(PromoteArgs),
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

/// The disk: a closed image, or one of a running server.
#[derive(clap::Args)]
struct OfDisk {
    /// Control socket of the server that serves the disk, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH", conflicts_with = "image")]
    control: Option<PathBuf>,
    /// Export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT", requires = "control")]
    disk: Option<String>,
    /// The image
    #[arg(value_name = "DISK", required_unless_present = "control")]
    image: Option<PathBuf>,
}

/// Copy parts of a disk to its fast medium, or back
///
/// `promote` copies them: they are read from there until they are written. `demote` takes them back: they are read from
/// the image again. Parts of the disk that its image does not have, because they are read from the backing image, are
/// promoted only with --copy. It is better to put the backing image itself on fast storage, once for all of its clones.
///
/// The unit is that of the image (unit_size). A range promotes each unit that it touches. With --control the disk of a
/// running server is changed while it is served.
#[derive(clap::Args)]
struct PromoteArgs {
    /// The fast medium
    #[arg(long, value_name = "PATH", required_unless_present = "control", conflicts_with = "control")]
    fast: Option<PathBuf>,
    /// A part of the disk, such as 1G+64M; may be given several times
    #[arg(long, value_name = "OFFSET+LENGTH", value_parser = parse_range, required_unless_present = "all")]
    range: Vec<(u64, u64)>,
    /// The whole disk
    #[arg(long, conflicts_with = "range")]
    all: bool,
    /// Also copy what is read from the backing image
    #[arg(long)]
    copy: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    of: OfDisk,
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
        Verb::Promote(args) => promote(args),
        Verb::Demote(args) => demote(args),
    }
}

fn in_use(error: Error) -> Failure {
    if_locked(error, "stop that server first, or ask it with --control PATH")
}

fn attach(args: &AttachArgs) -> Outcome {
    let fast = args.how.at(args.fast.clone());
    let options = ImageOptions::default();
    let attached = run_worker(IoMode::Auto, async || tier::attach(&args.image, &fast, &options).await)?
        .map_err(in_use)?;
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
        .map_err(in_use)?;
    let name = args.image.display().to_string();
    match args.output {
        OutputFormat::Json => say_json(&json!({
            "filename": name,
            "fast": named.as_ref().map(|named| named.name.clone()),
            "space-freed": fast.is_some(),
        })),
        OutputFormat::Human => say(&match (named, fast) {
            (None, _) => format!("{name} names no fast medium"),
            (Some(named), Some(_)) => format!("{name} is detached from {}", named.name),
            (Some(named), None) => format!(
                "{name} is detached from {0}; its space there stays taken. To free it: `vellum tier detach --fast {0} {name}`",
                named.name
            ),
        }),
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
            answer["counts"] = json!(named.is_some_and(|named| named.counts));
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
    if let Some(trouble) = answer["trouble"].as_str() {
        lines.push(format!("not used: {trouble}"));
    }
    if answer.get("units").is_some() {
        let (units, unit) = (number("units"), number("unit-size"));
        let (copied, used) = (human_bytes(units * unit), human_bytes(number("used-bytes")));
        let budget = match number("budget-bytes") {
            u64::MAX => "no budget".to_owned(),
            budget => format!("of a budget of {}", human_bytes(budget)),
        };
        lines.push(format!("{units} units ({copied}) are copied; they take {used}, {budget}"));
        for (reason, count) in answer["units-by-reason"].as_object().into_iter().flatten() {
            if count.as_u64().is_some_and(|count| count > 0) {
                lines.push(format!("  {reason}: {count}"));
            }
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
    }
    lines.join("\n")
}

fn ranges_of(args: &PromoteArgs) -> Ranges {
    Ranges { ranges: args.range.clone(), copies_base: args.copy }
}

/// The server's answer, for a disk of a server.
fn ask(args: &PromoteArgs, demote: bool) -> Result<Option<Value>, Failure> {
    let Some(control) = &args.of.control else { return Ok(None) };
    let Ranges { ranges, copies_base } = ranges_of(args);
    let request = Request::TierPromote { disk: args.of.disk.clone(), ranges, copy: copies_base, demote };
    Ok(Some(run_worker(IoMode::Auto, async || call(control, &request).await)??))
}

fn options_of(allow: &AllowArgs) -> ImageOptions {
    ImageOptions {
        allow_dirs: allow.places(),
        remote_timeout: allow.remote_timeout,
        ..ImageOptions::default()
    }
}

fn promote(args: &PromoteArgs) -> Outcome {
    let answer = match ask(args, false)? {
        Some(answer) => answer,
        None => {
            let (image, fast) = both(args);
            let (ranges, options) = (ranges_of(args), options_of(&args.allow));
            let done =
                run_worker(IoMode::Auto, async || tier::promote(&image, &fast, &ranges, &options).await)?;
            json!(done.map_err(in_use)?)
        }
    };
    if args.output == OutputFormat::Json {
        say_json(&answer);
        return Ok(ExitCode::SUCCESS);
    }
    let number = |field: &str| answer[field].as_u64().unwrap_or_default();
    let bytes = human_bytes(number("promoted") * number("unit-size"));
    say(&format!("{} units ({bytes}) are on the fast medium now", number("promoted")));
    for (field, what) in [
        ("there", "were there already"),
        ("in-backing", "are read from the backing image: --copy promotes them, too"),
        ("zero", "are zero"),
        ("written", "were written meanwhile"),
        ("no-room", "found no room: the medium is full, or the budget is spent"),
        (
            "no-bit",
            "lie behind the end that the disk had when it was attached: detach it and attach it again",
        ),
    ] {
        if number(field) > 0 {
            say(&format!("  {} {what}", number(field)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn both(args: &PromoteArgs) -> (PathBuf, PathBuf) {
    let image = args.of.image.clone().expect("an image or a socket is given");
    (image, args.fast.clone().expect("required with an image"))
}

fn demote(args: &PromoteArgs) -> Outcome {
    let answer = match ask(args, true)? {
        Some(answer) => answer,
        None => {
            let (image, fast) = both(args);
            let (ranges, options) = (ranges_of(args), options_of(&args.allow));
            let units =
                run_worker(IoMode::Auto, async || tier::demote(&image, &fast, &ranges, &options).await)?;
            json!({ "demoted": units.map_err(in_use)? })
        }
    };
    match args.output {
        OutputFormat::Json => say_json(&answer),
        OutputFormat::Human => {
            let units = answer["demoted"].as_u64().unwrap_or_default();
            say(&format!("{units} units are read from the image again"));
        }
    }
    Ok(ExitCode::SUCCESS)
}
