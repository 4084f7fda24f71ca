//! `vellum recover`: what any opening for writing does first, and nothing else.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::{Value, json};
use vellum_core::{Context, Error, ErrorKind, Result, SharedStorage};
use vellum_daemon::ImageOptions;
use vellum_daemon::image::open_file;
use vellum_format::FormatKind;
use vellum_format::native::{self, Superblocks};
use vellum_format::qcow2::check::{CheckReport, Repair, check};
use vellum_format::qcow2::{Header, Recovery, recover as replay};
use vellum_io::{IoMode, run as run_worker};

use super::Outcome;
use crate::args::{OutputFormat, parse_format};
use crate::output::{say, say_json};

/// Repair an image that was not closed: after a crash, a power cut, a killed server
///
/// Serving such an image does the same by itself: the journal is replayed, or without one the refcounts are made right.
/// Flushed data is never lost by it.
#[derive(clap::Args)]
pub(crate) struct Args {
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

/// What was found and done.
struct Recovered {
    /// It had not been closed by who wrote it last.
    was_dirty: bool,
    /// What the journal came to, where there was one to replay.
    replayed: Option<Recovery>,
    report: CheckReport,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let recovered = run_worker(IoMode::Auto, async || recover(args).await)??;
    let name = args.file.display();
    match args.output {
        OutputFormat::Json => {
            let mut answer = json!({
                "filename": name.to_string(),
                "was-dirty": recovered.was_dirty,
                "corruptions-fixed": recovered.report.corruptions_fixed,
                "leaks-fixed": recovered.report.leaks_fixed,
            });
            if let Some(recovery) = &recovered.replayed {
                answer["journal"] = replayed_json(recovery);
            }
            say_json(&answer);
        }
        OutputFormat::Human => {
            let fixed = (recovered.report.corruptions_fixed, recovered.report.leaks_fixed);
            say(&match (&recovered.replayed, recovered.was_dirty, fixed) {
                (Some(recovery), _, (0, 0)) => format!("{name} is recovered: {}", self::replayed(recovery)),
                (None, false, (0, 0)) => format!("{name} was closed in good order: nothing to do"),
                (_, _, (corruptions, leaks)) => format!(
                    "{name} is recovered: {leaks} leaked clusters freed, {corruptions} refcounts or flags corrected"
                ),
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn recover(args: &Args) -> Result<Recovered> {
    let options = ImageOptions { format: args.format, ..ImageOptions::default() };
    let (storage, format): (SharedStorage, _) = open_file(&args.file, &options).await?;
    if format == FormatKind::Raw {
        return Err(Error::unsupported(format!(
            "{} is a raw image, which is never in need of recovery",
            args.file.display()
        )));
    }
    if format == FormatKind::Native {
        return recover_native(args, &storage).await;
    }
    let mut header = Header::read(&*storage).await?;
    let mut replayed = None;
    let was_dirty = header.is_dirty() || header.needs_replay();
    if header.needs_replay() {
        let context = || format!("can't recover {}", args.file.display());
        replayed = Some(replay(&header, &storage).await.context(context)?);
        header = Header::read(&*storage).await?;
        if !header.is_dirty() {
            // The tables are as they were flushed; there is no need to look at all of them.
            return Ok(Recovered { was_dirty, replayed, report: CheckReport::default() });
        }
    }
    // Version 2 has no dirty bit: there every image may have been left open.
    let report = check(&header, &storage, Repair::All, &mut |_| {}).await?;
    if report.corruptions > 0 || report.check_errors > 0 {
        return Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "{}: {} corruptions and {} unreadable parts cannot be repaired; `vellum check` lists them, and reading \
                 what is sound still works (`vellum convert`)",
                args.file.display(),
                report.corruptions,
                report.check_errors
            ),
        ));
    }
    Ok(Recovered { was_dirty, replayed, report })
}

async fn recover_native(args: &Args, storage: &SharedStorage) -> Result<Recovered> {
    let was_dirty = Superblocks::read(&**storage).await?.superblock.needs_replay();
    let context = || format!("can't recover {}", args.file.display());
    let recovery = native::recover(storage).await.context(context)?;
    // Nothing is counted in such an image, so there is nothing else to make right.
    Ok(Recovered { was_dirty, replayed: was_dirty.then_some(recovery), report: CheckReport::default() })
}

/// What a replay did, for people.
pub(crate) fn replayed(recovery: &Recovery) -> String {
    let mut text = match recovery.records {
        0 => "its journal held nothing".to_owned(),
        records => format!(
            "{records} journal records replayed, {} table pages written, {} clusters given back",
            recovery.pages, recovery.given_back
        ),
    };
    if recovery.left_out {
        text += "; the newest record had not been flushed and was left out";
    }
    if recovery.repaired {
        text += "; the whole image was looked at and repaired";
    }
    text
}

/// The same, for programs.
pub(crate) fn replayed_json(recovery: &Recovery) -> Value {
    json!({
        "records-replayed": recovery.records,
        "pages-written": recovery.pages,
        "clusters-given-back": recovery.given_back,
        "newest-left-out": recovery.left_out,
        "repaired": recovery.repaired,
    })
}
