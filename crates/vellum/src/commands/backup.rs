//! `vellum backup`: a copy of a disk, or of what has changed since the copy before.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::json;
use vellum_core::{Context as _, Error, Result};
use vellum_daemon::backup::{BackedUp, Backup, backup};
use vellum_daemon::control::{EncryptionWish, Request, call};
use vellum_daemon::{FormatKind, IoMode, Qcow2Options, run as run_worker};

use super::change::ChangeArgs;
use super::{Failure, Outcome};
use crate::args::{NewImage, parse_format};
use crate::output::human_bytes;

/// Copy a disk, or what a bitmap says has changed, into a new qcow2 image
///
/// With --incremental the new image has only what has changed since the bitmap was added, or since the backup before with this
/// bitmap. It stands on that backup (--backing), so that it reads as the whole disk. Without --incremental all of the disk is copied.
///
/// With --control a server makes the backup while guests are at work. It is what the disk was at one moment. Requests wait while
/// the last changes are copied.
///
/// In both cases the bitmap begins anew, and the next incremental backup has what changes from now on. If the command fails or is
/// interrupted, and there is no TARGET, the bitmap is as before. If there is one, it is a whole backup. An incremental backup never
/// replaces a file.
#[derive(clap::Args)]
#[command(
    override_usage = "vellum backup [OPTIONS] --bitmap NAME SOURCE TARGET\n       vellum backup [OPTIONS] --bitmap NAME --control PATH TARGET"
)]
pub(crate) struct Args {
    #[command(flatten)]
    change: ChangeArgs,
    /// The bitmap; `vellum bitmap --add` adds one to a qcow2 image
    #[arg(long, value_name = "NAME")]
    bitmap: String,
    /// Copy only what has changed
    #[arg(long, requires = "backing")]
    incremental: bool,
    /// With --incremental: the backup before
    #[arg(short = 'B', long, value_name = "FILE", requires = "incremental", requires = "backing_format")]
    backing: Option<PathBuf>,
    /// Format of the backup before
    #[arg(short = 'F', long, value_name = "FMT", value_parser = parse_format, requires = "backing")]
    backing_format: Option<FormatKind>,
    /// Options of the new image: encrypt.format, encrypt.key-secret and the others that begin with encrypt; `vellum create -o
    /// help` lists them
    ///
    /// The backup of an encrypted disk must be encrypted, or --plain-text given. With --control the server reads the file of
    /// the secret, or has a secret of this name itself.
    #[arg(short, long = "option", value_name = "NAME=VALUE")]
    options: Vec<String>,
    /// The backup of an encrypted disk is not to be encrypted: whoever can read it may read the disk
    #[arg(long, conflicts_with = "options")]
    plain_text: bool,
    /// Back up a disk of the server with this control socket, instead of an image
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// With --control: export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT", requires = "control")]
    disk: Option<String>,
    /// The image, omitted with --control; and the new image. Without --incremental an existing file is replaced when the backup is complete
    #[arg(value_name = "SOURCE TARGET", num_args = 1..=2, required = true)]
    words: Vec<PathBuf>,
}

impl Args {
    /// The image, unless a server has it; and the new one.
    fn places(&self) -> Result<(Option<&Path>, &Path)> {
        match (&self.words[..], &self.control) {
            ([source, target], None) => Ok((Some(source), target)),
            ([target], Some(_)) => Ok((None, target)),
            (_, None) => Err(Error::invalid("give the image and the TARGET")),
            (_, Some(_)) => Err(Error::invalid("with --control, give only the TARGET")),
        }
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (source, target) = args.places()?;
    let BackedUp { bytes_marked, bytes_copied } = run_worker(IoMode::Auto, async || match source {
        Some(source) => made(args, source, target).await,
        None => served(args, target).await,
    })??;
    let source = source.map_or("the served disk".to_owned(), |source| source.display().to_string());
    let target = target.display();
    let lines = [match args.incremental {
        true => format!(
            "{target} has what has changed of {source}: {} marked, {} copied",
            human_bytes(bytes_marked),
            human_bytes(bytes_copied)
        ),
        false => format!("{target} has all of {source}: {} copied", human_bytes(bytes_copied)),
    }];
    let answer = json!({
        "filename": target.to_string(),
        "incremental": args.incremental,
        "bytes-marked": bytes_marked,
        "bytes-copied": bytes_copied,
    });
    args.change.answer(&answer, &lines);
    Ok(ExitCode::SUCCESS)
}

/// A server makes it.
async fn served(args: &Args, target: &Path) -> Result<BackedUp, Failure> {
    let full = |path: &Path| std::path::absolute(path).context(|| format!("can't find {}", path.display()));
    let new = NewImage::parse(&args.options)?;
    new.refuse_all_but_encryption()?;
    let request = Request::Backup {
        disk: args.disk.clone(),
        bitmap: args.bitmap.clone(),
        target: full(target)?,
        before: args.backing.as_deref().map(full).transpose()?,
        before_format: args.backing_format.map(|format| format.to_string()),
        encryption: new.encryption().map(|encryption| EncryptionWish {
            secret: encryption.secret.clone(),
            key_bits: encryption.key_bits,
            hash: encryption.hash.name().to_owned(),
            iter_time: u64::try_from(encryption.time.as_millis()).unwrap_or(u64::MAX),
        }),
        secrets: args.change.secret_files()?,
        plain_text: args.plain_text,
    };
    let control = args.control.as_ref().expect("it was looked at");
    let answer = call(control, &request).await?;
    let bytes = |key: &str| answer[key].as_u64().unwrap_or_default();
    Ok(BackedUp { bytes_marked: bytes("bytes-marked"), bytes_copied: bytes("bytes-copied") })
}

async fn made(args: &Args, source: &Path, target: &Path) -> Result<BackedUp, Failure> {
    let options = args.change.options()?;
    let new = NewImage::parse(&args.options)?;
    new.refuse_all_but_encryption()?;
    let (Qcow2Options { encryption, .. }, _) = new.with_keys(&options.secrets)?;
    let wish = Backup {
        bitmap: args.bitmap.clone(),
        target: target.to_owned(),
        before: args.backing.clone().zip(args.backing_format),
        options: Qcow2Options { encryption, ..Qcow2Options::default() },
        is_plain_text: args.plain_text,
        secrets: options.secrets.clone(),
        allow_dirs: args.change.allow.places(),
    };
    args.change.watched(async |stop, progress| backup(source, &options, &wish, stop, progress).await).await
}
