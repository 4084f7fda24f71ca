//! `vellum tier pin` and `unpin`, promotions by file times, and files that move: which files of the guest the fast medium has.

use std::process::ExitCode;

use serde_json::{Value, json};
use vellum_daemon::control::Request;
use vellum_daemon::pins::{self, FileTimes, Pin, PinChange};
use vellum_daemon::tier::Watch;
use vellum_daemon::{IoMode, run as run_worker};

use super::Outcome;
use super::tier_disk::{WithFast, code_for_left, code_for_moved, in_use, say_demoted, say_moved, say_units};
use crate::output::{human_bytes, say};

/// Keep files of the guest on the fast medium
///
/// Each unit of the image that holds bytes of a file at one of the paths, or below it, is promoted. Where the files are, is
/// read from the guest's file system (ext2, ext3, ext4 or XFS, on a partition or on the whole disk), without the guest: a disk of
/// a running server is read from a snapshot, which is deleted again.
///
/// Pins are kept in a file beside the image (DISK.pins). Files that the guest writes go back to the image, and new ones are
/// not known: without --path, the command looks all pins up again. Give it to a timer to do that from time to time.
#[derive(clap::Args)]
pub(super) struct PinArgs {
    /// A file or directory in the guest, such as /usr/share; may be given several times
    #[arg(long, value_name = "PATH")]
    path: Vec<String>,
    /// The partition with these paths; needed if several partitions have them
    #[arg(long, value_name = "NUMBER", requires = "path")]
    partition: Option<u32>,
    /// Also copy what is read from the backing image
    #[arg(long, requires = "path")]
    copy: bool,
    #[command(flatten)]
    with: WithFast,
}

/// Keep files of the guest on the fast medium no more
///
/// What no other pin wants is read from the image again.
#[derive(clap::Args)]
pub(super) struct UnpinArgs {
    /// A path that is pinned; may be given several times
    #[arg(long, value_name = "PATH", required = true)]
    path: Vec<String>,
    #[command(flatten)]
    with: WithFast,
}

pub(super) fn pin(args: &PinArgs) -> Outcome {
    let pin = |path: &String| Pin { path: path.clone(), partition: args.partition, copy: args.copy };
    change(PinChange { add: args.path.iter().map(pin).collect(), remove: Vec::new() }, &args.with)
}

pub(super) fn unpin(args: &UnpinArgs) -> Outcome {
    change(PinChange { add: Vec::new(), remove: args.path.clone() }, &args.with)
}

fn change(change: PinChange, with: &WithFast) -> Outcome {
    let asked = with.ask(|disk| {
        let PinChange { add, remove } = change.clone();
        Request::TierPin { disk, add, remove }
    });
    let answer = match asked? {
        Some(answer) => answer,
        None => {
            let (image, fast, options) = with.closed();
            let done = run_worker(IoMode::Auto, async || pins::pin(&image, &fast, &change, &options).await)?;
            json!(done.map_err(in_use)?)
        }
    };
    if !with.says_json(&answer) {
        if !answer["pins"].as_array().is_some_and(Vec::is_empty) || !change.remove.is_empty() {
            say_files(&answer);
        } else {
            say("no files are pinned: --path PATH pins some");
        }
        for pin in answer["pins"].as_array().into_iter().flatten() {
            say(&format!("pinned: {}", pin_text(pin)));
        }
        for missing in answer["missing"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            say(&format!("not there now: {missing}"));
        }
    }
    Ok(code_for_left(&answer))
}

pub(super) fn promote_by_times(times: FileTimes, with: &WithFast) -> Outcome {
    let asked = with.ask(|disk| {
        let FileTimes { old_mtime, recent_atime, copy } = times;
        Request::TierTimes { disk, old_mtime, recent_atime, copy }
    });
    let answer = match asked? {
        Some(answer) => answer,
        None => {
            let (image, fast, options) = with.closed();
            let done = run_worker(IoMode::Auto, async || {
                pins::promote_by_times(&image, &fast, times, &options).await
            })?;
            json!(done.map_err(in_use)?)
        }
    };
    if !with.says_json(&answer) {
        say_files(&answer);
    }
    Ok(ExitCode::SUCCESS)
}

fn pins_at(paths: &[String], partition: Option<u32>) -> Vec<Pin> {
    paths.iter().map(|path| Pin { path: path.clone(), partition, copy: false }).collect()
}

pub(super) fn bring_files_back(paths: &[String], partition: Option<u32>, with: &WithFast) -> Outcome {
    let paths = pins_at(paths, partition);
    let asked = with.ask(|disk| {
        let (ranges, paths) = (Vec::new(), paths.clone());
        Request::TierPromote { disk, ranges, copy: false, demote: true, paths }
    })?;
    let answer = match asked {
        Some(answer) => answer,
        None => {
            let (image, fast, options) = with.closed();
            let work =
                async |watch: Watch<'_>| pins::demote_files(&image, &fast, &paths, &options, watch).await;
            json!(with.watched(work)?)
        }
    };
    if !with.says_json(&answer) {
        say_count(&answer);
        say_demoted(&answer);
    }
    Ok(code_for_left(&answer))
}

pub(super) fn move_files(paths: &[String], partition: Option<u32>, with: &WithFast) -> Outcome {
    let paths = pins_at(paths, partition);
    let asked = with.ask(|disk| {
        let (ranges, paths) = (Vec::new(), paths.clone());
        Request::TierMove { disk, ranges, only_copied: false, paths }
    });
    let answer = match asked? {
        Some(answer) => answer,
        None => {
            let (image, fast, options) = with.closed();
            let work =
                async |watch: Watch<'_>| pins::move_files(&image, &fast, &paths, &options, watch).await;
            json!(with.watched(work)?)
        }
    };
    if !with.says_json(&answer) {
        say_count(&answer);
        say_moved(&answer);
    }
    Ok(code_for_moved(&answer))
}

fn say_count(answer: &Value) {
    let number = |field: &str| answer[field].as_u64().unwrap_or_default();
    let what = if number("files") == 1 { "file" } else { "files" };
    say(&format!("{} {what} with {} on the disk", number("files"), human_bytes(number("file-bytes"))));
}

fn say_files(answer: &Value) {
    let number = |field: &str| answer[field].as_u64().unwrap_or_default();
    say_count(answer);
    say_units(answer);
    if number("demoted") > 0 {
        say(&format!("{} units are read from the image again", number("demoted")));
    }
}

/// A pin, for people.
pub(super) fn pin_text(pin: &Value) -> String {
    let path = pin["path"].as_str().unwrap_or_default();
    let partition = pin["partition"].as_u64().map(|number| format!(", in partition {number}"));
    let copy = if pin["copy"] == true { ", also from the backing image" } else { "" };
    format!("{path}{}{copy}", partition.unwrap_or_default())
}
