//! `vellum commit`: what an image has goes into an image below it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};
use vellum_core::{Context, Result};
use vellum_daemon::commit::{Commit, Committed, commit};
use vellum_daemon::control::Request;
use vellum_daemon::{IoMode, run as run_worker};

use super::change::ChangeArgs;
use super::{Failure, Outcome, job};
use crate::args::parse_size;
use crate::output::{complain, human_bytes};
use crate::protocol::image_name;
use crate::spoken::is_qemu_command;

/// Write the contents of an image into its backing image
///
/// Everything that the image has is written into the image below it, or with -b into one further down. A backing image that is
/// smaller grows. The disk does not change, and a crash at any moment loses nothing: if the command is interrupted, run it
/// again.
///
/// The image itself keeps what it has. It can be deleted afterwards, or used further. Images between it and the one that
/// gets the contents are of no use any more, and neither is any other image that stands on these. Where such images
/// are found in the same directories, the command is refused.
///
/// With --control this is done to a disk while it is served. When everything is in the backing image, the server goes on with
/// that, and an empty image over it takes the place of FILE: both read the same, and either can be served later. With --top
/// an image further down is committed, and the one above it refers to the base from then on. If the command is interrupted, the
/// server carries on: see `vellum job`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    change: ChangeArgs,
    /// The image below that gets the contents. Default: the one directly below
    #[arg(short, long, value_name = "FILE", value_parser = image_name())]
    base: Option<PathBuf>,
    /// Do not empty the image; accepted for scripts, because it never is
    #[arg(short = 'd', hide = true)]
    keep: bool,
    /// Commit even if other images stand on the backing image; they are useless afterwards
    #[arg(long)]
    force: bool,
    /// The image
    #[arg(value_name = "FILE", required_unless_present = "control", conflicts_with = "control", value_parser = image_name())]
    file: Option<PathBuf>,
    /// Control socket of the server that serves the image, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH", conflicts_with_all = ["format", "direct", "data_file", "allow_dir", "allow_url", "RemoteArgs"])]
    control: Option<PathBuf>,
    /// Export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT", requires = "control")]
    disk: Option<String>,
    /// With --control: commit this image below the top, and what is between it and the base
    #[arg(long, value_name = "FILE", requires = "control")]
    top: Option<PathBuf>,
    /// With --control: bytes of data per second, at most, such as 50M
    #[arg(long, value_name = "BYTES", requires = "control", value_parser = parse_size)]
    rate_limit: Option<u64>,
    /// With --control: return when it has begun
    #[arg(long, requires = "control")]
    background: bool,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let Some(file) = &args.file else { return served(args) };
    let Committed { base, between, bytes_written, is_less_protected } =
        run_worker(IoMode::Auto, async || committed(args, file).await)??;
    let (name, base) = (file.display(), base.display());
    if is_less_protected && !args.change.is_quiet() {
        complain(&format!(
            "vellum commit: warning: {name} is encrypted and {base} is not: what was committed can be read there without a \
             secret"
        ));
    }
    let between: Vec<String> = between.iter().map(|path| path.display().to_string()).collect();
    let mut lines =
        vec![format!("{base} now has everything that {name} has: {} written", human_bytes(bytes_written))];
    if !between.is_empty() {
        lines.push(format!("of no use any more: {}", between.join(", ")));
    }
    let answer = json!({
        "filename": name.to_string(),
        "committed-into": base.to_string(),
        "useless": between,
        "bytes-written": bytes_written,
    });
    if is_qemu_command() {
        lines = vec!["Image committed.".to_owned()];
    }
    args.change.answer(&answer, &lines);
    Ok(ExitCode::SUCCESS)
}

/// The disk of a server.
fn served(args: &Args) -> Outcome {
    let control = args.control.as_ref().expect("one of the two is given");
    let answer = run_worker(IoMode::Auto, async || begun(args, control).await)??;
    let text = |name: &str| answer[name].as_str().unwrap_or_default();
    let (base, top) = (text("base"), text("image"));
    let mut lines = match job::has_ended(&answer)? {
        true => {
            let written = human_bytes(answer["bytes-written"].as_u64().unwrap_or_default());
            vec![format!("{base} has everything that was committed: {written} written; {top} is on top")]
        }
        false => vec![format!("Committing into {base}: `vellum job status --control {}`", control.display())],
    };
    lines.extend(job::useless(&answer));
    args.change.answer(&answer, &lines);
    Ok(ExitCode::SUCCESS)
}

/// Begins it, and waits for its end if that is wanted. Returns what the server said last.
async fn begun(args: &Args, control: &Path) -> Result<Value, Failure> {
    let absolute = |path: &Option<PathBuf>| {
        let absolute =
            |path: &PathBuf| std::path::absolute(path).context(|| format!("can't find {}", path.display()));
        path.as_ref().map(absolute).transpose()
    };
    let request = Request::Commit {
        disk: args.disk.clone(),
        top: absolute(&args.top)?,
        base: absolute(&args.base)?,
        force: args.force,
        bytes_per_second_max: args.rate_limit,
    };
    job::begin(&args.change, (control, args.disk.as_deref()), &request, args.background).await
}

async fn committed(args: &Args, file: &Path) -> Result<Committed, Failure> {
    let options = args.change.options()?;
    let wish = Commit { base: args.base.clone(), force: args.force };
    args.change.watched(async |stop, progress| commit(file, &options, &wish, stop, progress).await).await
}
