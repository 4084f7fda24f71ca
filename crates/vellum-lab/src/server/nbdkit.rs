//! nbdkit and its file plugin: a thread per request, up to sixteen for a connection.

use std::process::Command;

use vellum_core::{Error, Result};

use super::{Cache, Server, Serving, first_line_of};

/// `nbdkit` of this host.
#[derive(Debug, Clone, Copy)]
pub struct Nbdkit;

impl Server for Nbdkit {
    fn name(&self) -> String {
        "nbdkit".to_owned()
    }

    fn version(&self) -> Result<String> {
        first_line_of(Command::new("nbdkit").arg("--version"))
    }

    fn command(&self, serving: &Serving<'_>) -> Result<Command> {
        if serving.format != "raw" {
            return Err(Error::unsupported("nbdkit has no plugin for it"));
        }
        if serving.cache == Cache::Direct {
            return Err(Error::unsupported("its file plugin does not open with O_DIRECT"));
        }
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(serving.socket);
        command.arg("file").arg(serving.image);
        Ok(command)
    }
}
