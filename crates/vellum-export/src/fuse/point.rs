//! The mount point: a regular file that the disk is put over, and taken from again.
//!
//! ```text
//!   Point::prepare    what a dead server left is taken away; the file is there, empty, and nothing is mounted on it
//!   Point::mount      fuser mounts, and its threads begin ──► Mounted
//!   Mounted::unmount  taken off, unless somebody has it open, or what is mounted there is another's
//!   Mounted::force    taken off from those who have it open
//!   Mounted::finish   its threads have ended; the file is removed if it was made here
//! ```
//!
//! Others unmount, mount and put files at the same path while this is served. So what is there is taken away only when it
//! is known to be what was put there: a mount by its device, a file by its numbers.
//!
//! The functions block, for as long as the kernel takes; they are no work for a worker.

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

/// What stands before the mount point in `/proc/self/mountinfo`, by which what a dead server left is known.
const SOURCE: &str = "vellum";

/// Mounts upon each other that are taken away before something else must be wrong.
const STALE_MAX: usize = 16;

/// A file that is ready to be mounted on.
#[derive(Debug)]
pub struct Point {
    path: PathBuf,
    made: Option<Identity>,
    owner: Owner,
}

/// Which file it is. The number of one that was removed is soon another's; the time that this was born is not.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    number: u64,
    born: Option<SystemTime>,
}

/// A file that shows a disk.
pub struct Mounted {
    point: Point,
    /// The device of the mount; nothing when somebody had taken it away before it was looked at.
    device: Option<String>,
    unmounter: SessionUnmounter,
    notifier: Notifier,
    /// Requested once fuser's threads have ended.
    ended: Shutdown,
}

/// Tells the kernel to look at the file again.
#[derive(Clone)]
pub struct Teller {
    notifier: Notifier,
    path: PathBuf,
    ended: Shutdown,
}

impl Teller {
    /// The kernel forgets what it was told of the file, its size among it, and asks at once: loop devices take the size that it
    /// knows. Waits for the answer, which a file that is busy may give late.
    pub fn look_again(&self) {
        if self.ended.is_requested() {
            return;
        }
        // No bytes are kept of it that would have to go, too.
        let attributes_alone = -1;
        match self.notifier.inval_inode(INodeNo::ROOT, attributes_alone, 0) {
            // A kernel that never looked has nothing to forget.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::debug!("the kernel was not told to look at {} again: {error}", self.path.display());
            }
            _ => {}
        }
        let _ = std::fs::metadata(&self.path);
    }
}

/// How a file was taken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// Nobody had it open.
    Free,
    /// Somebody has it open.
    Busy,
    /// What is at the path is not what was mounted there; that was taken off by somebody, and may still be open.
    Elsewhere,
}

impl Identity {
    fn of(facts: &Metadata) -> Self {
        Self { device: facts.dev(), number: facts.ino(), born: facts.created().ok() }
    }
}

impl Point {
    /// Looks at the file, makes it if it is not there, and takes away what a server that is dead left mounted on it.
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
            return no(ErrorKind::Invalid, "it is no regular file; name one that is empty or not there yet");
        }
        if facts.len() > 0 {
            return no(ErrorKind::Invalid, "the file is not empty; name one that is empty or not there yet");
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

    /// Only the file that was made here, and only as long as it is empty: another is somebody's.
    fn remove(&self) {
        let Some(made) = &self.made else { return };
        let removed = match self.path.symlink_metadata() {
            Ok(facts) if facts.is_file() && facts.len() == 0 && Identity::of(&facts) == *made => {
                std::fs::remove_file(&self.path)
            }
            Ok(_) => return tracing::warn!("{} is left: it is not as it was made", self.path.display()),
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
    /// What the kernel said; then the file is as it was found.
    pub fn mount(self, file: &DiskFile) -> Result<Mounted> {
        let mut config = Config::default();
        let access = if file.is_read_only() { MountOption::RO } else { MountOption::RW };
        // Mode and owner of the file say who may open it, as of any other.
        config.mount_options = vec![
            MountOption::FSName(SOURCE.into()),
            MountOption::DefaultPermissions,
            MountOption::NoExec,
            access,
        ];
        // Only root lets others in without being asked; `fusermount` would want `user_allow_other`.
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
                    tracing::error!("{} is served no longer: {error}", name.display());
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

    /// Who tells the kernel that the file has changed from outside.
    pub fn teller(&self) -> Teller {
        Teller { notifier: self.notifier.clone(), path: self.path().to_owned(), ended: self.ended.clone() }
    }

    /// Completes when nothing comes from the kernel any more: somebody unmounted it, or [`Mounted::unmount`] did.
    pub async fn ended(&self) {
        self.ended.requested().await;
    }

    /// Whether nothing comes from the kernel any more.
    pub fn has_ended(&self) -> bool {
        self.ended.is_requested()
    }

    /// Whether what is at the path is what was mounted there. Its device is its own for as long as its threads have not ended.
    fn is_in_place(&self) -> bool {
        self.device.is_some() && device_at(self.path()) == self.device
    }

    /// Takes the file off, unless somebody has it open, or something else is mounted there.
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
            // Somebody was faster.
            Err(_) if self.has_ended() => Ok(Taken::Free),
            Err(error) => Err(Error::io(error, format!("can't unmount {}", self.path().display()))),
        }
    }

    /// Takes the file off while somebody has it open: every request of theirs fails from now on.
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
            Ok(true) => tracing::warn!("{} is left: something is mounted on it", self.path().display()),
            Err(error) => tracing::warn!("{} is left: {}", self.path().display(), error.chain()),
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
            held => held.context(|| format!("can't look at {}", path.display()))?,
        };
        let error = match held.facts() {
            Ok(facts) => return Ok(Some(facts)),
            Err(error) => error,
        };
        // ENOTCONN: a file system whose server is gone.
        if error.kind() != io::ErrorKind::NotConnected {
            return Err(Error::io(error, format!("can't look at {}", path.display())));
        }
        let stale = || format!("can't use {}: {}", path.display(), stale_remedy(path));
        if held.mount()?.is_none_or(|mount| mount.source != SOURCE) {
            return Err(Error::io(error, stale()));
        }
        match held.detach(UnmountFlags::empty()) {
            Ok(()) => tracing::warn!(
                "{}: took away what a server that is dead had left mounted there",
                path.display()
            ),
            // Somebody was faster. What is mounted there now is looked at anew.
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
            Err(error) => return Err(Error::io(error, stale())),
        }
    }
    Err(Error::invalid(format!("can't use {}: {}", path.display(), stale_remedy(path))))
}

fn stale_remedy(path: &Path) -> String {
    format!("a server that is dead left it mounted; say: umount -l {}", path.display())
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound if !Path::new("/dev/fuse").exists() => {
            " (there is no /dev/fuse: is the module loaded? modprobe fuse)"
        }
        io::ErrorKind::PermissionDenied => " (it takes root, or fusermount3)",
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
