//! `vellum pause` and `vellum resume`: a disk that is served stops, and goes on.

use std::process::ExitCode;

use vellum_daemon::control::Request;

use super::Outcome;
use super::control::Target;
use crate::args::OutputFormat;
use crate::output::{say, say_json};

/// Pause a served disk: its requests wait until `vellum resume`
///
/// The command returns when no request is in flight and everything that was acknowledged is durable. From
/// then on the image on the host does not change. Clients stay connected. A server that is stopped resumes
/// its disks first.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    target: Target,
}

/// Resume a paused disk
///
/// Requests that wait for space (`vellum serve --on-full hold`) are also retried at once instead of within a
/// second.
#[derive(clap::Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    target: Target,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let answer = args.target.ask(&Request::Pause { disk: args.target.disk.clone() })?;
    match args.target.output {
        OutputFormat::Human => say("Paused. Requests wait until `vellum resume`."),
        OutputFormat::Json => say_json(&answer),
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn resume(args: &ResumeArgs) -> Outcome {
    let answer = args.target.ask(&Request::Resume { disk: args.target.disk.clone() })?;
    match args.target.output {
        OutputFormat::Human if answer["was-paused"] == true => say("Resumed."),
        OutputFormat::Human if answer["was-held"] == true => {
            say("The disk was not paused. Requests that waited for space are being retried.")
        }
        OutputFormat::Human => say("The disk was not paused."),
        OutputFormat::Json => say_json(&answer),
    }
    Ok(ExitCode::SUCCESS)
}
