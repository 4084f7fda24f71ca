//! `vellum template`: templates for clones, in files and in stores. One file for each of its commands.

mod list;
mod prepare;

use clap::Subcommand;
use vellum_core::{Error, ErrorKind};

use super::{Failure, Outcome, with_code};

/// Prepare templates for clones, and list those that are published in a store
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Prepare(prepare::Args),
    List(list::Args),
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.what {
        What::Prepare(args) => prepare::run(args),
        What::List(args) => list::run(args),
    }
}

/// A failure of work that Ctrl-C stops.
fn interrupted(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::Closed => with_code(130)(error.context("interrupted")),
        _ => Failure::from(error),
    }
}
