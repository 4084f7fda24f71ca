//! `vellum pause` and `vellum resume`: a disk that is served stops, and goes on.

use std::process::ExitCode;

use vellum_daemon::control::Request;

use super::Outcome;
use super::control::Target;
use crate::args::OutputFormat;
use crate::output::{say, say_json};

/// Stop a disk while it is served: its requests wait until `vellum resume`
///
/// Answers when nothing is under way any more and all that was answered is durable; the image on the host changes no more. Clients
/// stay connected, and wait. A server that ends resumes its disks first.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    target: Target,
}

/// Let a paused disk go on
#[derive(clap::Args)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    target: Target,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let answer = args.target.ask(&Request::Pause { disk: args.target.disk.clone() })?;
    match args.target.output {
        OutputFormat::Human => say("Paused. What is asked of the disk waits for `vellum resume`."),
        OutputFormat::Json => say_json(&answer),
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn resume(args: &ResumeArgs) -> Outcome {
    let answer = args.target.ask(&Request::Resume { disk: args.target.disk.clone() })?;
    match args.target.output {
        OutputFormat::Human if answer["was-paused"] == true => say("Resumed."),
        OutputFormat::Human => say("It was not paused."),
        OutputFormat::Json => say_json(&answer),
    }
    Ok(ExitCode::SUCCESS)
}
