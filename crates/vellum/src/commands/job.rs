//! `vellum job`: work on the chain of a served disk, which goes on in its server.

use std::path::Path;
use std::process::ExitCode;

use serde_json::Value;
use vellum_core::{Error, ErrorKind, Result};
use vellum_daemon::control::{JobAction, Request, call, watch_job};

use super::change::ChangeArgs;
use super::control::Target;
use super::{Failure, Outcome};
use crate::args::{OutputFormat, parse_size};
use crate::output::{human_bytes, say, say_json};

/// Watch and steer the work on the chain of a served disk: a commit, or a rebase
///
/// `vellum commit --control` or `vellum rebase --control` begins it. It goes on in the server when that command is interrupted. If the server ends or is
/// killed, the chain is as it was before, and the work can be begun again.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Show how far it is, or how it has ended
    ///
    /// The state is running, paused, switching (requests wait for the last step), done, cancelled or failed.
    Status(Target),
    /// Stop it for a while
    Pause(Target),
    /// Let it continue
    Resume(Target),
    /// Stop it for good; the chain stays as it was
    Cancel(Target),
    /// Change how fast it may go
    Limit(LimitArgs),
}

#[derive(clap::Args)]
struct LimitArgs {
    #[command(flatten)]
    target: Target,
    /// Bytes of data per second, at most, such as 50M; 0 for no limit
    #[arg(value_name = "BYTES", value_parser = parse_size)]
    bytes: u64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let (target, action, bytes) = match &args.verb {
        Verb::Status(target) => (target, None, 0),
        Verb::Pause(target) => (target, Some(JobAction::Pause), 0),
        Verb::Resume(target) => (target, Some(JobAction::Resume), 0),
        Verb::Cancel(target) => (target, Some(JobAction::Cancel), 0),
        Verb::Limit(args) => (&args.target, Some(JobAction::Limit), args.bytes),
    };
    let bytes_per_second_max = Some(bytes).filter(|bytes| *bytes > 0);
    let request = Request::Job { disk: target.disk.clone(), action, bytes_per_second_max };
    let answer = target.ask(&request)?;
    match target.output {
        OutputFormat::Json => say_json(&answer),
        OutputFormat::Human => lines(&answer).iter().for_each(|line| say(line)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Has a server begin it, and waits for its end unless it is to go on in the background. Returns what the server said last.
pub(super) async fn begin(
    change: &ChangeArgs,
    (control, disk): (&Path, Option<&str>),
    request: &Request,
    background: bool,
) -> Result<Value, Failure> {
    let begun = call(control, request).await?;
    if background {
        return Ok(begun);
    }
    change
        .watched_until("interrupted; the server carries on (`vellum job status`)", async |stop, progress| {
            let watched = async {
                // A server that has gone has not interrupted this command.
                watch_job(control, disk, progress).await.map_err(|error| error.with_kind(ErrorKind::Io))
            };
            stop.or_stopped(watched).await
        })
        .await
}

/// Whether it is done, and not only begun.
///
/// # Errors
/// When it has failed, or was cancelled.
pub(super) fn has_ended(answer: &Value) -> Result<bool> {
    match answer["state"].as_str().unwrap_or_default() {
        "done" => Ok(true),
        state @ ("failed" | "cancelled") => {
            let why = answer["last-error"].as_str().unwrap_or("the chain is as it was before");
            let (job, base) = (&answer["job"], &answer["base"]);
            let (job, base) = (job.as_str().unwrap_or_default(), base.as_str().unwrap_or_default());
            Err(Error::invalid(
                format!("{job} ({base}): it was {state}: {why}").replace("was failed", "has failed"),
            ))
        }
        _ => Ok(false),
    }
}

/// The images that are of no use any more, if there are any.
pub(super) fn useless(answer: &Value) -> Option<String> {
    let useless: Vec<&str> =
        answer["useless"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    (!useless.is_empty()).then(|| format!("of no use for this disk any more: {}", useless.join(", ")))
}

/// What the server says of it, for people.
fn lines(answer: &Value) -> Vec<String> {
    let bytes = |name: &str| human_bytes(answer[name].as_u64().unwrap_or_default());
    let text = |name: &str| answer[name].as_str().unwrap_or_default().to_owned();
    let mut lines = vec![
        format!("{} ({}): {}", text("job"), text("base"), text("state")),
        format!(
            "done: {} of {}, written: {}",
            bytes("bytes-done"),
            bytes("bytes-total"),
            bytes("bytes-written")
        ),
    ];
    if answer["bytes-left"].as_u64().is_some_and(|left| left > 0) {
        lines.push(format!("changed meanwhile: {}", bytes("bytes-left")));
    }
    if answer["bytes-per-second-max"].is_u64() {
        lines.push(format!("limit: {}/s", bytes("bytes-per-second-max")));
    }
    if answer["image"].is_string() {
        lines.push(format!("on top: {}", text("image")));
    }
    if answer["last-error"].is_string() {
        lines.push(format!("last error: {}", text("last-error")));
    }
    lines
}
