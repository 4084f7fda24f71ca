//! One file for each command; `control.rs` is what those share that ask a server.

pub(crate) mod amend;
pub(crate) mod backup;
pub(crate) mod bench;
pub(crate) mod bitmap;
pub(crate) mod change;
pub(crate) mod check;
pub(crate) mod client;
pub(crate) mod clone;
pub(crate) mod commit;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod control;
pub(crate) mod convert;
pub(crate) mod create;
pub(crate) mod dd;
pub(crate) mod delta;
pub(crate) mod export;
pub(crate) mod flash;
pub(crate) mod flatten;
pub(crate) mod info;
pub(crate) mod job;
pub(crate) mod journal;
pub(crate) mod key;
pub(crate) mod limits;
pub(crate) mod man;
pub(crate) mod map;
pub(crate) mod measure;
pub(crate) mod migrate;
pub(crate) mod pause;
pub(crate) mod prefetch;
pub(crate) mod quickstart;
pub(crate) mod rebase;
pub(crate) mod recover;
pub(crate) mod resize;
pub(crate) mod serve;
pub(crate) mod snapshot;
pub(crate) mod stats;
pub(crate) mod template;
pub(crate) mod tier;
mod tier_disk;
mod tier_files;
pub(crate) mod trace;

use std::process::ExitCode;

use vellum_core::{Error, ErrorKind};

/// Why a command failed, and with which exit code.
pub(crate) struct Failure {
    pub(crate) error: Error,
    pub(crate) code: u8,
    /// What this command can do about it; said last.
    pub(crate) remedy: Option<&'static str>,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, code: 1, remedy: None }
    }
}

impl Failure {
    /// One line: what went wrong, its causes, and what to do.
    pub(crate) fn line(&self) -> String {
        let remedy = self.remedy.map_or_else(String::new, |remedy| format!("; {remedy}"));
        self.error.chain() + &remedy
    }
}

/// How a command ended.
pub(crate) type Outcome = Result<ExitCode, Failure>;

/// Ends a command with this exit code when the error is passed on with `?`.
pub(crate) fn with_code(code: u8) -> impl Fn(Error) -> Failure {
    move |error| Failure { error, code, remedy: None }
}

/// For commands that can read an image that another program writes.
pub(crate) fn or_share(failure: impl Into<Failure>) -> Failure {
    if_locked(failure, "or use --force-share to read it while it changes")
}

/// For commands that can ask the server that has the image.
pub(crate) fn or_ask_server(failure: impl Into<Failure>) -> Failure {
    if_locked(
        failure,
        "or, if `vellum serve --control PATH` serves it, use `--control PATH` instead of the image",
    )
}

fn if_locked(failure: impl Into<Failure>, remedy: &'static str) -> Failure {
    let failure = failure.into();
    let is_locked = failure.error.kind() == ErrorKind::Locked;
    Failure { remedy: failure.remedy.or(is_locked.then_some(remedy)), ..failure }
}
