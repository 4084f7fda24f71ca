//! QEMU's NBD server: with io_uring, its fastest way to the file, or with threads, whose calls can be traced.

use std::process::Command;

use vellum_core::Result;

use super::{Cache, Server, Serving, first_line_of};

/// `qemu-nbd` of this host.
#[derive(Debug, Clone, Copy)]
pub struct QemuNbd {
    aio: &'static str,
}

impl QemuNbd {
    /// As fast as it can be.
    pub const FAST: Self = Self { aio: "io_uring" };
    /// With calls that `strace` sees; the guest's discards reach the file.
    pub const VISIBLE: Self = Self { aio: "threads" };
}

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
        command.args(["--persistent", "--format", serving.format]).arg(format!("--aio={}", self.aio));
        command.args((self.aio == Self::VISIBLE.aio).then_some("--discard=unmap"));
        command.arg(format!("--cache={cache}"));
        // One more, for the connection that checks whether the server is ready.
        command.arg(format!("--shared={}", serving.connections + 1));
        command.arg("--socket").arg(serving.socket).arg(serving.image);
        Ok(command)
    }
}
