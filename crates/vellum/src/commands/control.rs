//! What the commands share that ask a server.

use std::path::PathBuf;

use serde_json::Value;
use vellum_core::Result;
use vellum_daemon::control::{Request, call};
use vellum_daemon::{IoMode, run as run_worker};

use crate::args::OutputFormat;

/// Which server, and which of its disks.
#[derive(clap::Args)]
pub(crate) struct Target {
    /// Control socket of the server, as given to `vellum serve --control`
    #[arg(long, value_name = "PATH")]
    pub(crate) control: PathBuf,
    /// Export name of the disk; optional if the server has one disk
    #[arg(long, value_name = "EXPORT")]
    pub(crate) disk: Option<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    pub(crate) output: OutputFormat,
}

impl Target {
    /// Asks the server.
    pub(crate) fn ask(&self, request: &Request) -> Result<Value> {
        run_worker(IoMode::Auto, async || call(&self.control, request).await)?
    }
}
