//! QEMU's NBD server, with io_uring: the fastest way it has to the file.

use std::process::Command;

use vellum_core::Result;

use super::{Cache, Server, Serving, first_line_of};

/// `qemu-nbd` of this host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QemuNbd;

impl Server for QemuNbd {
    fn name(&self) -> String {
        "qemu-nbd".to_owned()
    }

    fn version(&self) -> Result<String> {
        first_line_of(Command::new("qemu-nbd").arg("--version"))
    }

    fn command(&self, serving: &Serving<'_>) -> Result<Command> {
        let cache = match serving.cache {
            Cache::Buffered => "writeback",
            Cache::Direct => "none",
        };
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--aio=io_uring", "--format", serving.format]);
        command.arg(format!("--cache={cache}"));
        // One more, for whoever looks whether it is there.
        command.arg(format!("--shared={}", serving.connections + 1));
        command.arg("--socket").arg(serving.socket).arg(serving.image);
        Ok(command)
    }
}
