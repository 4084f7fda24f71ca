//! The mount point: a regular file that the disk is mounted over and unmounted from.
//!
//! ```text
//!   Point::prepare    what a dead server left is removed; the file exists, empty, and nothing is mounted on it
//!   Point::mount      fuser mounts, and its threads begin ──► Mounted
//!   Mounted::unmount  unmounted, unless it is in use, or what is mounted there is another program's
//!   Mounted::force    detached while it is in use
//!   Mounted::finish   its threads have ended; the file is removed if it was made here
//! ```
//!
//! Other programs unmount, mount and put files at the same path while this one is served. So what is found
//! there is removed only when it is known to be what this server put there: a mount by its device number, a
//! file by its inode number and birth time.
//!
//! These functions block for as long as the kernel takes, so they must not run on a worker.

use std::fs::{Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::SystemTime;

use fuser::{Config, INodeNo, MountOption, Notifier, Session, SessionACL, SessionUnmounter};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use vellum_core::{Context, Error, ErrorKind, Result};

use super::file::{DiskFile, Owner};
use super::mounts::{Held, is_mounted};
use crate::shutdown::Shutdown;

/// The prefix of the mount's source in `/proc/self/mountinfo`, by which the mount of a dead server is
/// recognised.
const SOURCE: &str = "vellum";

/// More stacked mounts than this to be removed mean that something else is wrong.
const STALE_MAX: usize = 16;

/// A file that is ready to be mounted on.
#[derive(Debug)]
pub struct Point {
    path: PathBuf,
    made: Option<Identity>,
    owner: Owner,
}

/// Which file it is. The number of one that was removed is soon another's; the time that this was born is
/// not.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    number: u64,
    born: Option<SystemTime>,
}

/// A file that shows a disk.
pub struct Mounted {
    point: Point,
    /// The device number of the mount; `None` if it had been unmounted before it could be read.
    device: Option<String>,
    unmounter: SessionUnmounter,
    notifier: Notifier,
    /// Requested once fuser's threads have ended.
    ended: Shutdown,
}

/// Notifies the kernel of a new size of the file.
#[derive(Clone)]
pub struct SizeNotifier {
    notifier: Notifier,
    path: PathBuf,
    ended: Shutdown,
}

impl SizeNotifier {
    /// Makes the kernel drop its cached attributes of the file, including its size, and query them again at
    /// once: a loop device uses the cached size. Waits for the answer, which a busy file may give late.
    pub fn notify(&self) {
        if self.ended.is_requested() {
            return;
        }
        // There are no cached bytes that would have to be dropped too.
        let attributes_alone = -1;
        match self.notifier.inval_inode(INodeNo::ROOT, attributes_alone, 0) {
            // A kernel that never looked has nothing cached.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!(
                    "can't notify the kernel of the new size of {}: {error}",
                    self.path.display()
                );
            }
            _ => {}
        }
        let _ = std::fs::metadata(&self.path);
    }
}

/// How a file was taken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// It was not in use.
    Free,
    /// It is in use.
    Busy,
    /// What is at the path is not what was mounted there. Another program has detached that mount, and it may
    /// still be open.
    Elsewhere,
}

impl Identity {
    fn of(facts: &Metadata) -> Self {
        Self { device: facts.dev(), number: facts.ino(), born: facts.created().ok() }
    }
}

impl Point {
    /// Checks the file, creates it if it does not exist, and unmounts what a dead server left mounted on it.
    ///
    /// # Errors
    /// `Locked` when something is mounted there that answers, `Invalid` when it is no empty regular file.
    pub fn prepare(path: &Path) -> Result<Self> {
        let about = || format!("can't mount on {}", path.display());
        let (facts, made) = match clear(path)? {
            Some(facts) => (facts, None),
            None => {
                let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
                let facts = made.and_then(|file| file.metadata()).context(about)?;
                let identity = Identity::of(&facts);
                (facts, Some(identity))
            }
        };
        let path = path.canonicalize().context(about)?;
        let no = |kind, why: &str| Err(Error::new(kind, format!("can't mount on {}: {why}", path.display())));
        if is_mounted(&path)? {
            return no(ErrorKind::Locked, "something is mounted there");
        }
        if !facts.is_file() {
            return no(ErrorKind::Invalid, "it is not a regular file; name an empty or a new one");
        }
        if facts.len() > 0 {
            return no(ErrorKind::Invalid, "the file is not empty; name an empty or a new one");
        }
        let mode = u16::try_from(facts.mode() & 0o777).expect("nine bits");
        Ok(Self { path, made, owner: Owner { mode, uid: facts.uid(), gid: facts.gid() } })
    }

    /// Whose the file is, and so the disk's.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// The whole path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, if it was made here. For one that was not mounted.
    pub fn give_up(self) {
        self.remove();
    }

    /// Only the file that was created here is removed, and only while it is empty. Any other file belongs to
    /// another program.
    fn remove(&self) {
        let Some(made) = &self.made else { return };
        let removed = match self.path.symlink_metadata() {
            Ok(facts) if facts.is_file() && facts.len() == 0 && Identity::of(&facts) == *made => {
                std::fs::remove_file(&self.path)
            }
            Ok(_) => return tracing::warn!("{} is not removed: it has been changed", self.path.display()),
            Err(error) => Err(error),
        };
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("can't remove {}: {error}", self.path.display());
            }
            _ => {}
        }
    }

    /// Puts the disk over the file. Requests are taken from now on, and done once the lanes are served.
    ///
    /// # Errors
    /// The kernel's error; then the file is as it was before.
    pub fn mount(self, file: &DiskFile) -> Result<Mounted> {
        let mut config = Config::default();
        let access = if file.is_read_only() { MountOption::RO } else { MountOption::RW };
        // The file's mode and owner determine who may open it, as for any other file.
        config.mount_options = vec![
            MountOption::FSName(SOURCE.into()),
            MountOption::DefaultPermissions,
            MountOption::NoExec,
            access,
        ];
        // For root the kernel admits other users; `fusermount` would require `user_allow_other`.
        let is_root = rustix::process::geteuid().is_root();
        config.acl = if is_root { SessionACL::All } else { SessionACL::Owner };
        config.n_threads = Some(file.lanes());
        config.clone_fd = true;
        let mounted = Session::new(file.clone(), &self.path, &config).and_then(|mut session| {
            let (unmounter, notifier) = (session.unmount_callable(), session.notifier());
            let device = device_at(&self.path);
            let ended = Shutdown::new();
            let told = ended.clone();
            let name = self.path.clone();
            thread::Builder::new().name("vellum-fuse".to_owned()).spawn(move || {
                if let Err(error) = session.run() {
                    tracing::error!("{} is no longer served: {error}", name.display());
                }
                told.drain();
            })?;
            Ok((unmounter, notifier, device, ended))
        });
        match mounted {
            Ok((unmounter, notifier, device, ended)) => {
                Ok(Mounted { point: self, device, unmounter, notifier, ended })
            }
            Err(error) => {
                let context = format!("can't mount on {}{}", self.path.display(), remedy(&error));
                self.remove();
                Err(Error::io(error, context))
            }
        }
    }
}

impl Mounted {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.point.path
    }

    /// The handle that notifies the kernel of a new size of the file.
    pub fn size_notifier(&self) -> SizeNotifier {
        SizeNotifier {
            notifier: self.notifier.clone(),
            path: self.path().to_owned(),
            ended: self.ended.clone(),
        }
    }

    /// Completes when the kernel sends no more requests: the file system was unmounted, by another program or
    /// by [`Mounted::unmount`].
    pub async fn ended(&self) {
        self.ended.requested().await;
    }

    /// Whether nothing comes from the kernel any more.
    pub fn has_ended(&self) -> bool {
        self.ended.is_requested()
    }

    /// Whether what is at the path is what was mounted there. Its device number stays unique until its
    /// threads have ended.
    fn is_in_place(&self) -> bool {
        self.device.is_some() && device_at(self.path()) == self.device
    }

    /// Unmounts the file unless it is in use or something else is mounted there.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn unmount(&mut self) -> Result<Taken> {
        if self.has_ended() {
            return Ok(Taken::Free);
        }
        if !self.is_in_place() {
            return Ok(Taken::Elsewhere);
        }
        match self.unmounter.unmount() {
            Ok(()) => Ok(Taken::Free),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(Taken::Busy),
            // Another program was faster.
            Err(_) if self.has_ended() => Ok(Taken::Free),
            Err(error) => Err(Error::io(error, format!("can't unmount {}", self.path().display()))),
        }
    }

    /// Detaches the mount while the file is in use: every request of its users fails from now on.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn force(&self) -> Result<Taken> {
        if self.has_ended() {
            return Ok(Taken::Free);
        }
        let Ok(held) = Held::at(self.path()) else { return Ok(Taken::Elsewhere) };
        let device = held.mount()?.map(|mount| mount.device);
        if device.is_none() || device != self.device {
            return Ok(Taken::Elsewhere);
        }
        let about = || format!("can't unmount {}", self.path().display());
        held.detach(UnmountFlags::FORCE).context(about)?;
        Ok(Taken::Free)
    }

    /// Removes the file, if it was made here. For one that is taken off.
    pub fn finish(self) {
        match is_mounted(self.path()) {
            Ok(false) => self.point.remove(),
            Ok(true) => {
                tracing::warn!("{} is not removed: something is mounted on it", self.path().display())
            }
            Err(error) => tracing::warn!("{} is not removed: {}", self.path().display(), error.chain()),
        }
    }
}

/// The device of what is mounted at the path.
fn device_at(path: &Path) -> Option<String> {
    Held::at(path).ok()?.mount().ok()?.map(|mount| mount.device)
}

/// What the file is, under all that dead servers left mounted on it; nothing when it is not there.
fn clear(path: &Path) -> Result<Option<Metadata>> {
    for _ in 0..STALE_MAX {
        let held = match Held::at(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            held => held.context(|| format!("can't stat {}", path.display()))?,
        };
        let error = match held.facts() {
            Ok(facts) => return Ok(Some(facts)),
            Err(error) => error,
        };
        // ENOTCONN: a file system whose server is gone.
        if error.kind() != io::ErrorKind::NotConnected {
            return Err(Error::io(error, format!("can't stat {}", path.display())));
        }
        let stale = || format!("can't use {}: {}", path.display(), stale_remedy(path));
        if held.mount()?.is_none_or(|mount| mount.source != SOURCE) {
            return Err(Error::io(error, stale()));
        }
        match held.detach(UnmountFlags::empty()) {
            Ok(()) => {
                tracing::warn!("{}: unmounted the stale mount of a server that had died", path.display())
            }
            // Another program was faster. The path is examined again.
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
            Err(error) => return Err(Error::io(error, stale())),
        }
    }
    Err(Error::invalid(format!("can't use {}: {}", path.display(), stale_remedy(path))))
}

fn stale_remedy(path: &Path) -> String {
    format!("a server that died left it mounted; run: umount -l {}", path.display())
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound if !Path::new("/dev/fuse").exists() => {
            " (there is no /dev/fuse: is the module loaded? modprobe fuse)"
        }
        io::ErrorKind::PermissionDenied => " (root or fusermount3 is required)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_bytes_in_it_and_a_directory_are_no_mount_points() {
        let dir = std::env::temp_dir().join(format!("vellum-point-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let file = dir.join("full");
        std::fs::write(&file, b"x").expect("a file");
        for path in [&dir, &file] {
            let error = Point::prepare(path).expect_err("it is refused");
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
        }
        let made = Point::prepare(&dir.join("new")).expect("a file that is made");
        assert!(made.made.is_some() && made.owner().mode == 0o600);
        let found = Point::prepare(&dir.join("new")).expect("an empty file");
        found.give_up();
        assert!(dir.join("new").exists(), "it was not made by the second");
        made.give_up();
        assert!(!dir.join("new").exists());
        Point::prepare(&dir.join("new")).expect("it is made again").give_up();
        assert!(!dir.join("new").exists());
        let name = dir.join("taken");
        for is_other in [true, false] {
            let made = Point::prepare(&name).expect("a file that is made");
            if is_other {
                std::fs::rename(dir.join("full"), &name).expect("another in its place");
            } else {
                std::fs::write(&name, b"y").expect("bytes in it");
            }
            made.give_up();
            assert_eq!(std::fs::metadata(&name).expect("it is left").len(), 1);
            std::fs::remove_file(&name).expect("it is ours");
        }
        std::fs::remove_dir_all(&dir).expect("the directory");
    }
}
