//! Programs that serve an image over a Unix socket: how each is called, and how any of them is started and
//! stopped.
//!
//! A program that is not installed, or cannot serve the image as requested, is left out with its reason. Each
//! measurement has a server of its own on the same file, so that none profits from the placement of its copy,
//! and none runs beside another.

mod nbdkit;
mod qemu_nbd;
mod vellum;

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use vellum_core::{Context, Error, ErrorKind, Result};

pub use nbdkit::Nbdkit;
pub use qemu_nbd::QemuNbd;
pub use vellum::Vellum;

/// How long a server may take to begin or to end.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a server reaches the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// Through the page cache.
    Buffered,
    /// Past it (O_DIRECT).
    Direct,
}

/// What is to be served.
#[derive(Debug, Clone, Copy)]
pub struct Serving<'a> {
    /// The image.
    pub image: &'a Path,
    /// `raw` or `qcow2`.
    pub format: &'a str,
    /// How its file is reached.
    pub cache: Cache,
    /// Clients at once.
    pub connections: usize,
    /// Where they come in.
    pub socket: &'a Path,
}

/// A program that can serve.
pub trait Server {
    /// What to call it in a table.
    fn name(&self) -> String;

    /// Its version, in its own words; fails when it is not there.
    fn version(&self) -> Result<String>;

    /// The command that serves in the foreground; an `Unsupported` error says why it cannot.
    fn command(&self, serving: &Serving<'_>) -> Result<Command>;
}

/// The first line that the command prints.
pub fn first_line_of(command: &mut Command) -> Result<String> {
    let program = command.get_program().display().to_string();
    let output = command.stdin(Stdio::null()).output().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            Error::new(ErrorKind::NotFound, format!("{program} is not installed"))
        }
        _ => Error::io(error, format!("can't run {program}")),
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}

/// A running server. It is asked to end, and waited for, when dropped.
pub struct Running {
    child: Child,
    socket: PathBuf,
}

impl Running {
    /// Starts the server and waits until clients can connect.
    pub fn start(server: &dyn Server, serving: &Serving<'_>) -> Result<Self> {
        Self::start_command(server.command(serving)?, serving)
    }

    /// As above, with a command that was changed, for example to be watched.
    pub fn start_command(command: Command, serving: &Serving<'_>) -> Result<Self> {
        drop(fs::remove_file(serving.socket));
        Self::start_until(command, serving.socket, || UnixStream::connect(serving.socket).is_ok())
    }

    /// As above, with any command, and another sign that it serves.
    pub fn start_until(mut command: Command, at: &Path, serves: impl Fn() -> bool) -> Result<Self> {
        let log = at.with_extension("log");
        let error = File::create(&log).context(|| format!("can't make {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(error);
        let child = command.spawn().context(|| format!("can't start {command:?}"))?;
        let mut running = Self { child, socket: at.to_owned() };
        let begun = Instant::now();
        while !serves() {
            let ended = running.child.try_wait().context(|| "can't ask for the server")?;
            if ended.is_some() || begun.elapsed() > PATIENCE {
                let said = fs::read_to_string(&log).unwrap_or_default();
                return Err(Error::invalid(format!("{command:?} does not serve: {}", said.trim())));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(running)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where clients come in.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks it to end, and fails unless it ends in good order: its images are closed then.
    pub fn stop(mut self) -> Result<()> {
        self.end();
        let status = self.child.wait().context(|| "can't ask for the server")?;
        if !status.success() {
            return Err(Error::invalid(format!("the server did not end in good order: {status}")));
        }
        Ok(())
    }

    /// Kills it, as a crash does.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context(|| "can't kill the server")?;
        self.child.wait().map(drop).context(|| "can't ask for the server")
    }

    fn end(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // In good order first: an image that was written has to be closed.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() > PATIENCE {
                drop(self.child.kill());
                drop(self.child.wait());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}
