//! `vellum clone`: one or many new images over a template.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use vellum_core::{Error, ErrorKind, Result};
use vellum_daemon::signals::Stop;
use vellum_daemon::template::ListUse;
use vellum_daemon::{
    CloneOf, Cloned, Cloning, FormatKind, IoMode, NewClone, clone_template, run as run_worker,
};

use super::{Failure, Outcome, with_code};
use crate::args::{AllowArgs, NewImage, OutputFormat, options_help, parse_format, parse_size};
use crate::output::{complain, human_bytes, say, say_json};
use crate::progress::{Progress, Wish};
use crate::secrets::SecretArgs;

/// Create one or many clones of a template or a snapshot
///
/// A clone stores only what differs from its template, which must not change while clones of it exist. The
/// template is opened once, however many clones are made. A clone appears under its name only once it is complete
/// and durable; existing files are never replaced.
///
/// IMAGE@SNAPSHOT is a snapshot inside a vellum image. The disk of the image may be written while clones of its
/// snapshot exist. The snapshot cannot be deleted until it is released (`vellum snapshot release`). If a server has
/// the image open, use --control and --from. Clones of a snapshot are then served by that server.
#[derive(clap::Args)]
#[command(
    override_usage = "vellum clone [OPTIONS] TEMPLATE NAME...\n       vellum clone [OPTIONS] IMAGE@SNAPSHOT NAME...\n       vellum clone [OPTIONS] --control PATH --from EXPORT@SNAPSHOT NAME..."
)]
pub(crate) struct Args {
    /// Format of the clones: qcow2 or vellum
    ///
    /// Default: taken from each name (.qcow2, .vlm), otherwise qcow2.
    #[arg(short, long, value_name = "FMT", value_parser = parse_format)]
    format: Option<FormatKind>,
    /// Clone this snapshot of a disk that a server has open; EXPORT may be empty if the server has one disk
    #[arg(long, value_name = "EXPORT@SNAPSHOT", requires = "control", conflicts_with = "template_format")]
    from: Option<String>,
    /// Control socket of the server
    #[arg(long, value_name = "PATH", requires = "from")]
    control: Option<PathBuf>,
    /// Format of the template: raw, qcow2 or vellum
    ///
    /// Default: taken from its name (.raw, .qcow2, .vlm).
    #[arg(short = 'F', long, value_name = "FMT", value_parser = parse_format)]
    template_format: Option<FormatKind>,
    /// Size of each clone's disk, such as 20G
    ///
    /// Default: the size of the template's disk.
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Format options as for `vellum create`; -o help lists them
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    allow: AllowArgs,
    #[command(flatten)]
    secrets: SecretArgs,
    /// Take a template at a URL for fixed although its server does not prove it
    #[arg(long)]
    trust_base: bool,
    /// The template: an image of any format, or a snapshot of a vellum image
    #[arg(value_name = "TEMPLATE", required_unless_present_any = ["options", "from"])]
    template: Option<PathBuf>,
    /// The clones to create
    #[arg(value_name = "NAME", required_unless_present_any = ["options", "from"])]
    names: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    if args.options.iter().any(|list| list.split(',').any(|option| option == "help" || option == "?")) {
        say(&options_help(args.format));
        return Ok(ExitCode::SUCCESS);
    }
    // With --from, what stands in the place of the template is the first clone.
    let first = args.template.iter().filter(|_| args.from.is_some());
    let names: Vec<PathBuf> = first.chain(&args.names).cloned().collect();
    if names.is_empty() {
        return Err(Error::invalid("name the clones to create, after the template").into());
    }
    let format_of =
        |path: &Path| args.format.or_else(|| FormatKind::of_name(path)).unwrap_or(FormatKind::Qcow2);
    let clones: Vec<NewClone> =
        names.iter().map(|path| NewClone { path: path.clone(), format: format_of(path) }).collect();
    let how = cloning(args, &clones)?;
    let cloned = run_worker(IoMode::Auto, async || clone_all(args, &how, &clones).await)?.map_err(failure)?;
    if let ListUse::Refused(error) = &cloned.zeros {
        complain(&format!("vellum clone: {}", error.chain()));
    }
    if let Some(refusal) = &cloned.refusal {
        complain(&format!(
            "vellum clone: opening the clones for writing will need a further option: {}",
            refusal.chain()
        ));
    }
    if cloned.stands_on_encrypted && !cloned.made.is_empty() && !args.quiet {
        let way_out = match &how.template {
            CloneOf::Snapshot { .. } => "`vellum convert -o encrypt.format=luks` makes an encrypted copy",
            _ => "`vellum create -b` with `-o encrypt.format=luks` makes an encrypted one",
        };
        complain(&format!(
            "vellum clone: warning: {} is encrypted, and a clone is not: what is written to it, or copied into it, can be read \
             without a secret ({way_out})",
            cloned.template_name()
        ));
    }
    report(args, &cloned);
    match cloned.failed {
        None => Ok(ExitCode::SUCCESS),
        Some(error) => {
            let made = format!("{} of {} clones were created", cloned.made.len(), clones.len());
            let kind = error.kind();
            Err(failure(error.context(made).with_kind(kind)))
        }
    }
}

fn failure(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::Closed => with_code(130)(error.context("interrupted")),
        _ => Failure::from(error),
    }
}

/// The options, checked against the formats of the clones.
fn cloning(args: &Args, clones: &[NewClone]) -> Result<Cloning> {
    let mut new = NewImage::parse(&args.options)?;
    new.refuse_encryption()?;
    if new.backing_file.is_some() || new.backing_format.is_some() {
        return Err(Error::invalid("-o backing_file and backing_fmt: the template is the backing image"));
    }
    let size = match (args.size, new.size) {
        (Some(one), Some(other)) if one != other => {
            return Err(Error::invalid(format!(
                "two sizes are given, {one} with --size and {other} with -o size: give one"
            )));
        }
        (one, other) => one.or(other),
    };
    for clone in clones {
        new.suits(clone.format, "-f")?;
    }
    new.suit_overlay();
    Ok(Cloning {
        template: clone_of(args)?,
        size,
        allow_dirs: args.allow.places(),
        remote: args.allow.remote.usual(),
        trust_base: args.trust_base,
        secrets: args.secrets.read()?,
        native: new.native,
        qcow2: new.qcow2,
    })
}

/// What the clones are to stand on.
fn clone_of(args: &Args) -> Result<CloneOf> {
    if let (Some(from), Some(control)) = (&args.from, &args.control) {
        let (disk, snapshot) = from
            .rsplit_once('@')
            .filter(|(_, snapshot)| !snapshot.is_empty())
            .ok_or_else(|| Error::invalid(format!("--from {from}: expected EXPORT@SNAPSHOT")))?;
        let disk = Some(disk.to_owned()).filter(|disk| !disk.is_empty());
        return Ok(CloneOf::Served { control: control.clone(), disk, snapshot: snapshot.to_owned() });
    }
    let path = args.template.clone().ok_or_else(|| Error::invalid("name the template"))?;
    if let Some((path, snapshot)) = snapshot_in(&path) {
        if args.template_format.is_some_and(|format| format != FormatKind::Native) {
            return Err(Error::invalid("-F: only vellum images have snapshots that can be cloned"));
        }
        return Ok(CloneOf::Snapshot { path, snapshot });
    }
    // If the format were guessed, a guest that wrote the first bytes of a raw template could choose it.
    let format = args.template_format.or_else(|| FormatKind::of_name(&path)).ok_or_else(|| {
        Error::invalid(format!(
            "the name of {} does not show its format: add `-F raw`, `-F qcow2` or `-F vellum`",
            path.display()
        ))
    })?;
    // A link may have another name than the image: its content was perhaps written by a guest.
    let canonical = path.canonicalize().ok().filter(|_| args.template_format.is_none());
    if let Some(other) = canonical.filter(|path| FormatKind::of_name(path) != Some(format)) {
        return Err(Error::invalid(format!(
            "{} is a link to {}, whose name does not show the format {format}: give the format with -F",
            path.display(),
            other.display()
        )));
    }
    Ok(CloneOf::Image { path, format })
}

/// The image and the snapshot of it that this names, if it names no file itself.
pub(super) fn snapshot_in(path: &Path) -> Option<(PathBuf, String)> {
    if path.symlink_metadata().is_ok() {
        return None;
    }
    let (file, snapshot) = path.to_str()?.rsplit_once('@')?;
    let is_named = !snapshot.is_empty() && Path::new(file).is_file();
    is_named.then(|| (PathBuf::from(file), snapshot.to_owned()))
}

async fn clone_all(args: &Args, how: &Cloning, clones: &[NewClone]) -> Result<Cloned> {
    let mut stop = Stop::new()?;
    let wish = Wish { is_wanted: false, quiet: args.quiet, output: args.output };
    let bar = Progress::of_items(clones.len() as u64, wish);
    let cloned = clone_template(how, clones, &mut stop, &|count| bar.set(count as u64)).await;
    bar.end();
    cloned
}

fn report(args: &Args, cloned: &Cloned) {
    let (template, format) = (cloned.template_name(), cloned.template_format);
    match (args.output, &cloned.made[..]) {
        _ if args.quiet => {}
        (OutputFormat::Json, made) => say_json(&json!({
            "template": template,
            "template-format": format.to_string(),
            "virtual-size": cloned.size,
            "clones": made.iter().map(|clone| json!({
                "filename": clone.path.display().to_string(),
                "format": clone.format.to_string(),
            })).collect::<Vec<_>>(),
        })),
        (OutputFormat::Human, []) => {}
        (OutputFormat::Human, [clone]) => say(&format!(
            "Created {}, a clone of {template}: {}, {}",
            clone.path.display(),
            clone.format,
            human_bytes(cloned.size)
        )),
        (OutputFormat::Human, made) => {
            say(&format!("Created {} clones of {template}, {} each", made.len(), human_bytes(cloned.size)));
        }
    }
}
