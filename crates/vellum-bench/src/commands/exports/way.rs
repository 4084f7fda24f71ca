//! Ways to a disk besides NBD, and the programs that offer them: how each is started, found ready, and stopped.
//!
//! One more way is one more [`Way`]: its arguments for both programs, and when it is ready.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use vellum_core::{Context, Error, Result};

use crate::server::{Cache, Server, Vellum, first_line_of};

/// How long a program may take to begin or to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// How a disk is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// As a file, by FUSE.
    Fuse,
}

impl Way {
    /// All of them.
    pub(super) const ALL: [Self; 1] = [Self::Fuse];

    /// A short name, for choosing it.
    pub(super) fn id(self) -> &'static str {
        match self {
            Self::Fuse => "fuse",
        }
    }
}

/// What is to be served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Serving<'a> {
    pub(super) way: Way,
    pub(super) image: &'a Path,
    /// `raw` or `qcow2`.
    pub(super) format: &'a str,
    pub(super) cache: Cache,
    /// Where the disk is to be found: for FUSE, the file.
    pub(super) at: &'a Path,
    /// The size of the disk.
    pub(super) size: u64,
}

/// Who serves.
pub(super) enum Program {
    Vellum(Vellum),
    /// `qemu-storage-daemon`, with io_uring, the fastest way it has to the file.
    Qemu,
}

impl Program {
    pub(super) fn name(&self) -> String {
        match self {
            Self::Vellum(vellum) => vellum.name(),
            Self::Qemu => "qsd".to_owned(),
        }
    }

    pub(super) fn version(&self) -> Result<String> {
        match self {
            Self::Vellum(vellum) => vellum.version(),
            Self::Qemu => first_line_of(Command::new("qemu-storage-daemon").arg("--version")),
        }
    }

    fn command(&self, serving: &Serving<'_>) -> Command {
        let Serving { way: Way::Fuse, image, format, cache, at, .. } = *serving;
        let is_direct = cache == Cache::Direct;
        match self {
            Self::Vellum(vellum) => {
                let mut command = Command::new(&vellum.path);
                command.args(["serve", "--quiet", "--format", format]).args(is_direct.then_some("--direct"));
                command.args(&vellum.arguments).arg("--fuse").arg(at).arg(image);
                command
            }
            Self::Qemu => {
                let direct = if is_direct { "on" } else { "off" };
                let mut command = Command::new("qemu-storage-daemon");
                command.arg("--blockdev").arg(format!(
                    "driver=file,node-name=file,filename={},cache.direct={direct},aio=io_uring,discard=unmap",
                    image.display()
                ));
                command
                    .arg("--blockdev")
                    .arg(format!("driver={format},node-name=disk,file=file,discard=unmap"));
                command
                    .arg("--export")
                    .arg(format!("fuse,id=disk,node-name=disk,mountpoint={},writable=on", at.display()));
                command
            }
        }
    }
}

/// A disk that is served. It is ended, and what is left mounted taken away, when dropped.
pub(super) struct Served {
    child: Child,
    at: PathBuf,
}

impl Served {
    /// Starts the program and waits until the disk is there.
    pub(super) fn start(program: &Program, serving: &Serving<'_>) -> Result<Self> {
        let log = serving.at.with_extension("log");
        let error = File::create(&log).context(|| format!("can't make {}", log.display()))?;
        // Both take an empty file that is there.
        File::create(serving.at).context(|| format!("can't make {}", serving.at.display()))?;
        let mut command = program.command(serving);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(error);
        let child = command.spawn().context(|| format!("can't start {command:?}"))?;
        let mut served = Self { child, at: serving.at.to_owned() };
        let begun = Instant::now();
        while fs::metadata(serving.at).map_or(0, |facts| facts.size()) != serving.size {
            let ended = served.child.try_wait().context(|| "can't ask for the server")?;
            if ended.is_some() || begun.elapsed() > PATIENCE {
                let said = fs::read_to_string(&log).unwrap_or_default();
                return Err(Error::invalid(format!("{command:?} does not serve: {}", said.trim())));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(served)
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Tells it to end, and fails unless it ends in good order: its image is closed then.
    pub(super) fn stop(mut self) -> Result<()> {
        self.end();
        let status = self.child.wait().context(|| "can't ask for the server")?;
        if !status.success() {
            return Err(Error::invalid(format!("the server did not end in good order: {status}")));
        }
        Ok(())
    }

    fn end(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
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

impl Drop for Served {
    fn drop(&mut self) {
        self.end();
        // Nothing is mounted any more when it ended in good order; then this fails, and nobody minds.
        drop(Command::new("umount").arg("-l").arg(&self.at).stderr(Stdio::null()).status());
    }
}
