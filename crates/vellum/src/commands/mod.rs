//! One file for each command; `control.rs` is what those share that ask a server.

pub(crate) mod check;
pub(crate) mod compare;
pub(crate) mod control;
pub(crate) mod convert;
pub(crate) mod create;
pub(crate) mod info;
pub(crate) mod journal;
pub(crate) mod limits;
pub(crate) mod map;
pub(crate) mod pause;
pub(crate) mod quickstart;
pub(crate) mod recover;
pub(crate) mod resize;
pub(crate) mod serve;
pub(crate) mod snapshot;
pub(crate) mod stats;
pub(crate) mod template;

use std::process::ExitCode;

use vellum_core::Error;

/// Why a command failed, and with which exit code.
pub(crate) struct Failure {
    pub(crate) error: Error,
    pub(crate) code: u8,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { error, code: 1 }
    }
}

/// How a command ended.
pub(crate) type Outcome = Result<ExitCode, Failure>;

/// Ends a command with this exit code when the error is passed on with `?`.
pub(crate) fn with_code(code: u8) -> impl Fn(Error) -> Failure {
    move |error| Failure { error, code }
}
