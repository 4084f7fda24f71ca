//! `vellum rebase`: another backing image for an image that is not in use.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};
use vellum_core::{Context, Error};
use vellum_daemon::control::Request;
use vellum_daemon::create::CreateTarget;
use vellum_daemon::flatten::flatten;
use vellum_daemon::image::open_file;
use vellum_daemon::rebase::{Rebase, rebase};
use vellum_daemon::signals::Stop;
use vellum_daemon::{FormatKind, ImageOptions, IoMode, run as run_worker};

use super::change::ChangeArgs;
use super::create::text_of_name;
use super::{Failure, Outcome, job};
use crate::args::{parse_format, parse_size};
use crate::output::{complain, human_bytes};
use crate::protocol::image_name;
use crate::spoken::is_qemu_command;

/// Give an image another backing image
///
/// The disk does not change: where the old and the new backing image differ, and the image has no data of its own, the old
/// data is copied into it. Then the image names the new backing image. A crash at any moment loses nothing: if the command is
/// interrupted, run it again, and it continues. An image with snapshots is refused, because they also read from the
/// backing image.
///
/// With -u nothing is copied, and the old backing image need not exist: only the name changes. That is right when the
/// backing image was renamed or moved. If the new one has other contents, the disk changes.
///
/// `-b ""` makes the image independent, as `vellum flatten` does; with -u too, what only the backing image has then reads as
/// zero.
///
/// With --control this is done to a disk while it is served. Its backing image is then replaced by one further down (what is
/// between is copied into the image) or by any other one. If the command is interrupted, the server carries on: see `vellum job`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    change: ChangeArgs,
    /// The new backing image; a relative name is relative to the image's directory. `""` for none
    #[arg(short, long, value_name = "FILE")]
    backing: OsString,
    /// Format of the new backing image. Default: detected from the file
    #[arg(short = 'F', long, value_name = "FMT", value_parser = parse_format)]
    backing_format: Option<FormatKind>,
    /// Change the name alone, without opening the old backing image
    #[arg(short = 'u', long = "unsafe")]
    is_unsafe: bool,
    /// Take a backing image at a URL for fixed although its server does not prove it
    #[arg(long)]
    trust_base: bool,
    /// The image
    #[arg(value_name = "FILE", required_unless_present = "control", conflicts_with = "control", value_parser = image_name())]
    file: Option<PathBuf>,
    /// Control socket of the server that serves the image, as given to `vellum serve --control`; a relative name of the backing
    /// image is then relative to the current directory
    #[arg(long, value_name = "PATH", conflicts_with_all = ["is_unsafe", "trust_base", "format", "direct", "data_file", "allow_dir", "allow_url", "RemoteArgs"])]
    control: Option<PathBuf>,
    /// Export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT", requires = "control")]
    disk: Option<String>,
    /// With --control: bytes per second that are read and compared, at most, such as 50M
    #[arg(long, value_name = "BYTES", requires = "control", value_parser = parse_size)]
    rate_limit: Option<u64>,
    /// With --control: return when it has begun
    #[arg(long, requires = "control")]
    background: bool,
}

/// What was done.
struct Answer {
    before: Option<String>,
    after: Option<(String, FormatKind)>,
    /// Why the new backing image would not be opened without a further option.
    refusal: Option<Error>,
    bytes_written: u64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let Some(file) = &args.file else { return served(args) };
    let answer = run_worker(IoMode::Auto, async || rebased(args, file).await)??;
    let name = file.display();
    let copied = match args.is_unsafe {
        true => "nothing was compared".to_owned(),
        false => format!("{} copied", human_bytes(answer.bytes_written)),
    };
    let line = match &answer.after {
        Some((after, format)) => format!("{name} now has the backing image {after} ({format}): {copied}"),
        None => format!("{name} no longer has a backing image: {copied}"),
    };
    if let Some(refusal) = answer.refusal.as_ref().filter(|_| !args.change.is_quiet()) {
        complain(&format!(
            "vellum rebase: {name} was changed, but opening it for writing will need a further option: {}",
            refusal.chain()
        ));
    }
    let json = json!({
        "filename": name.to_string(),
        "backing-filename-before": answer.before,
        "backing-filename": answer.after.as_ref().map(|(name, _)| name),
        "backing-filename-format": answer.after.as_ref().map(|(_, format)| format.to_string()),
        "bytes-written": answer.bytes_written,
    });
    let lines = if is_qemu_command() { vec![] } else { vec![line] };
    args.change.answer(&json, &lines);
    Ok(ExitCode::SUCCESS)
}

/// The disk of a server.
fn served(args: &Args) -> Outcome {
    let control = args.control.as_ref().expect("one of the two is given");
    let answer = run_worker(IoMode::Auto, async || begun(args, control).await)??;
    let text = |name: &str| answer[name].as_str().unwrap_or_default();
    let (base, top) = (text("base"), text("image"));
    let mut lines = match job::has_ended(&answer)? {
        true => vec![format!("{top} now has the backing image {base}")],
        false => vec![format!("Changing to {base}: `vellum job status --control {}`", control.display())],
    };
    lines.extend(job::useless(&answer));
    args.change.answer(&answer, &lines);
    Ok(ExitCode::SUCCESS)
}

async fn begun(args: &Args, control: &Path) -> Result<Value, Failure> {
    if args.backing.is_empty() {
        return Err(
            Error::invalid("`vellum flatten --control` makes the disk of a server independent").into()
        );
    }
    let base = std::path::absolute(&args.backing)
        .context(|| format!("can't find {}", Path::new(&args.backing).display()))?;
    let request = Request::Rebase {
        disk: args.disk.clone(),
        base,
        format: args.backing_format.map(|format| format.to_string()),
        bytes_per_second_max: args.rate_limit,
    };
    job::begin(&args.change, (control, args.disk.as_deref()), &request, args.background).await
}

/// Why an image of this kind would not be opened with the new backing image without a further option.
fn refusal(args: &Args, file: &Path, backing: &str, format: FormatKind, kind: FormatKind) -> Option<Error> {
    let target = CreateTarget {
        path: file.to_owned(),
        size: None,
        backing: Some((backing.to_owned(), format)),
        trust_backing: true,
        allow_dirs: args.change.allow.places(),
        remote: Default::default(),
        trust_base: args.trust_base,
        secrets: Arc::default(),
        stands_on_encrypted: Arc::default(),
        never_flushed: false,
    };
    target.refusal(kind, None)
}

async fn rebased(args: &Args, file: &Path) -> Result<Answer, Failure> {
    let backing = text_of_name(args.backing.clone())?;
    let options = ImageOptions { trust_base: args.trust_base, ..args.change.options()? };
    args.change
        .watched(async |stop, progress| change((args, file), backing, &options, stop, progress).await)
        .await
}

async fn change(
    (args, file): (&Args, &Path),
    backing: String,
    options: &ImageOptions,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<Answer, Error> {
    if !backing.is_empty() {
        let wish = Rebase { backing: (backing.clone(), args.backing_format), is_unsafe: args.is_unsafe };
        let done = rebase(file, options, &wish, stop, progress).await?;
        let before = done.before.map(|path| path.display().to_string());
        let refusal = refusal(args, file, &backing, done.format, done.kind);
        let after = Some((backing, done.format));
        return Ok(Answer { before, after, refusal, bytes_written: done.bytes_written });
    }
    if args.backing_format.is_some() {
        return Err(Error::invalid("-F gives the format of a backing image, but -b \"\" names none"));
    }
    if args.is_unsafe {
        return let_go(file, options).await;
    }
    let done = flatten(file, options, 8, stop, progress).await?;
    let before = done.backing.map(|path| path.display().to_string());
    Ok(Answer { before, after: None, refusal: None, bytes_written: done.bytes_written })
}

/// The image loses what only the images below have.
async fn let_go(file: &Path, options: &ImageOptions) -> Result<Answer, Error> {
    let (storage, kind) = open_file(file, options).await?;
    let head = kind.format().read(&*storage).await?;
    let before = head.backing().map(|(name, _)| name.to_owned());
    if head.needs_replay() {
        kind.format().recover(&storage).await?;
    }
    kind.format().detach(&storage, false, &AtomicBool::new(false)).await?;
    Ok(Answer { before, after: None, refusal: None, bytes_written: 0 })
}
