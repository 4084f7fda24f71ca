//! `vellum template`: templates for clones, in files and in stores. One file for each of its commands.

mod gc;
mod list;
mod prepare;
mod pull;
mod push;
mod remove;

use clap::Subcommand;
use vellum_core::{Error, ErrorKind};

use super::{Failure, Outcome, with_code};

/// Prepare templates for clones; publish them in stores, and fetch them
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Prepare(prepare::Args),
    Push(push::Args),
    Pull(pull::Args),
    List(list::Args),
    Remove(remove::Args),
    Gc(gc::Args),
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.what {
        What::Prepare(args) => prepare::run(args),
        What::Push(args) => push::run(args),
        What::Pull(args) => pull::run(args),
        What::List(args) => list::run(args),
        What::Remove(args) => remove::run(args),
        What::Gc(args) => gc::run(args),
    }
}

/// A failure of work that Ctrl-C stops.
fn interrupted(error: Error) -> Failure {
    match error.kind() {
        ErrorKind::Closed => with_code(130)(error.context("interrupted")),
        _ => Failure::from(error),
    }
}
