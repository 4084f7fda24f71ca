//! `vellum flash`: the flash cache, a file or block device on a fast local drive. One file for each of its commands.

mod check;
mod create;
mod drain;
mod forget;
mod info;
pub(crate) mod policy;
mod resize;

use clap::Subcommand;
use vellum_core::Error;

use super::{Failure, Outcome, if_locked};

/// Make, inspect, empty and control a flash cache
///
/// A flash cache keeps blocks of slow or remote images on a fast local drive: a file there, or a block device. `vellum
/// serve --flash PATH` uses it for all disks of a server. With the policy writeback, the cache holds writes that the
/// image does not have yet. Until they are home, the image can only be used with its cache.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Create(create::Args),
    Info(info::Args),
    Check(check::Args),
    Drain(drain::Args),
    Recover(drain::RecoverArgs),
    Forget(forget::Args),
    Policy(policy::Args),
    Resize(resize::Args),
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.verb {
        Verb::Create(args) => create::run(args),
        Verb::Info(args) => info::run(args),
        Verb::Check(args) => check::run(args),
        Verb::Drain(args) => drain::run(args),
        Verb::Recover(args) => drain::recover(args),
        Verb::Forget(args) => forget::run(args),
        Verb::Policy(args) => policy::run(args),
        Verb::Resize(args) => resize::run(args),
    }
}

/// A failure of a command that needs a cache for itself.
fn in_use(error: Error) -> Failure {
    if_locked(error, "stop that server first, or ask it: `vellum stats`, `vellum flash drain --control PATH`")
}
