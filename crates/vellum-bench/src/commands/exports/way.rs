//! Ways to a disk, and the programs that offer them: how each is started, found ready, and stopped.
//!
//! Another way is another [`Way`]: its arguments for each program, and when it is ready.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vellum_core::{Context, Result};
use vellum_lab::server::{self, Cache, Nbdkit, QemuNbd, Running, Server, Vellum, first_line_of};

/// How a disk is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Through the memory of a virtual machine.
    Vhost,
    /// As a file, by FUSE.
    Fuse,
    /// Over NBD, through a Unix socket.
    Nbd,
}

impl Way {
    /// All of them.
    pub(super) const ALL: [Self; 3] = [Self::Vhost, Self::Fuse, Self::Nbd];

    /// A short name, for choosing it.
    pub(super) fn id(self) -> &'static str {
        match self {
            Self::Vhost => "vhost",
            Self::Fuse => "fuse",
            Self::Nbd => "nbd",
        }
    }
}

/// What is to be served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Serving<'a> {
    pub(super) way: Way,
    pub(super) image: &'a Path,
    /// `raw`, `qcow2` or `vellum`.
    pub(super) format: &'a str,
    pub(super) cache: Cache,
    /// Where the disk is to be found: a file for FUSE, else a socket.
    pub(super) at: &'a Path,
    /// The size of the disk.
    pub(super) size: u64,
    /// Queues, or connections.
    pub(super) queues: u16,
}

/// The server.
#[derive(Debug, Clone)]
pub(super) enum Program {
    Vellum(Vellum),
    /// `qemu-storage-daemon`, with io_uring, the fastest way it has to the file.
    StorageDaemon,
    QemuNbd,
    Nbdkit,
    /// No server: fio on the image's own file, which is raw.
    Nobody,
}

impl Program {
    pub(super) fn name(&self) -> String {
        match self {
            Self::Vellum(vellum) => vellum.name(),
            Self::StorageDaemon => "qsd".to_owned(),
            Self::QemuNbd => QemuNbd::FAST.name(),
            Self::Nbdkit => Nbdkit.name(),
            Self::Nobody => "fio alone".to_owned(),
        }
    }

    pub(super) fn version(&self) -> Result<String> {
        match self {
            Self::Vellum(vellum) => vellum.version(),
            Self::StorageDaemon => first_line_of(Command::new("qemu-storage-daemon").arg("--version")),
            Self::QemuNbd => QemuNbd::FAST.version(),
            Self::Nbdkit => Nbdkit.version(),
            Self::Nobody => first_line_of(Command::new("fio").arg("--version")),
        }
    }

    /// The command that serves in the foreground.
    fn command(&self, serving: &Serving<'_>) -> Result<Command> {
        let nbd = server::Serving {
            image: serving.image,
            format: serving.format,
            cache: serving.cache,
            connections: usize::from(serving.queues),
            socket: serving.at,
        };
        match self {
            Self::Vellum(vellum) if serving.way == Way::Nbd => vellum.command(&nbd),
            Self::Vellum(vellum) => Ok(of_vellum(vellum, serving)),
            Self::StorageDaemon => Ok(of_storage_daemon(serving)),
            Self::QemuNbd => QemuNbd::FAST.command(&nbd),
            Self::Nbdkit => Nbdkit.command(&nbd),
            Self::Nobody => unreachable!("nobody is started"),
        }
    }
}

fn of_vellum(vellum: &Vellum, serving: &Serving<'_>) -> Command {
    let mut command = Command::new(&vellum.path);
    command.args(["serve", "--quiet", "--format", serving.format]);
    command.args((serving.cache == Cache::Direct).then_some("--direct")).args(&vellum.arguments);
    if serving.way == Way::Fuse {
        command.arg("--fuse").arg(serving.at);
    } else {
        command.arg("--queues").arg(serving.queues.to_string()).arg("--vhost-user-blk").arg(serving.at);
    }
    command.arg(serving.image);
    command
}

fn of_storage_daemon(serving: &Serving<'_>) -> Command {
    let Serving { way, image, format, cache, at, queues, .. } = *serving;
    let (image, at) = (image.display(), at.display());
    let direct = if cache == Cache::Direct { "on" } else { "off" };
    let export = match way {
        Way::Fuse => format!("fuse,id=disk,node-name=disk,mountpoint={at},writable=on"),
        _ => format!(
            "vhost-user-blk,id=disk,node-name=disk,addr.type=unix,addr.path={at},writable=on,num-queues={queues}"
        ),
    };
    let mut command = Command::new("qemu-storage-daemon");
    command.arg("--blockdev").arg(format!(
        "driver=file,node-name=file,filename={image},cache.direct={direct},aio=io_uring,discard=unmap"
    ));
    command.arg("--blockdev").arg(format!("driver={format},node-name=disk,file=file,discard=unmap"));
    command.arg("--export").arg(export);
    command
}

/// A disk that is served. When it is dropped, a mount that is left is removed.
pub(super) struct Served {
    /// `None` once it was asked to end.
    running: Option<Running>,
    mounted: Option<PathBuf>,
}

impl Served {
    /// Starts the program and waits until the disk is there.
    pub(super) fn start(program: &Program, serving: &Serving<'_>) -> Result<Self> {
        let at = serving.at;
        drop(fs::remove_file(at));
        let command = program.command(serving)?;
        if serving.way == Way::Fuse {
            // Both take an empty file that is there.
            File::create(at).context(|| format!("can't make {}", at.display()))?;
        }
        let mounted = (serving.way == Way::Fuse).then(|| at.to_owned());
        let mut served = Self { running: None, mounted };
        served.running = Some(match serving.way {
            Way::Fuse => {
                let is_there = || fs::metadata(at).map_or(0, |facts| facts.size()) == serving.size;
                Running::start_until(command, at, is_there)?
            }
            // A connection that only checks for the server would be taken for the one front end.
            Way::Vhost => Running::start_until(command, at, || at.exists())?,
            Way::Nbd => {
                Running::start_until(command, at, || std::os::unix::net::UnixStream::connect(at).is_ok())?
            }
        });
        Ok(served)
    }

    pub(super) fn pid(&self) -> u32 {
        self.running.as_ref().expect("it was not told to end").pid()
    }

    /// Asks it to end, and fails unless it ends in good order: its image is closed then.
    pub(super) fn stop(mut self) -> Result<()> {
        self.running.take().expect("it was not told to end").stop()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.running.take());
        if let Some(at) = &self.mounted {
            // If it ended in good order nothing is mounted any more; then this fails, which does no harm.
            drop(Command::new("umount").arg("-l").arg(at).stderr(Stdio::null()).status());
        }
    }
}
