//! The mount point: a regular file that the disk is put over, and taken from again.
//!
//! ```text
//!   Point::prepare    what a dead server left is taken away; the file is there, empty, and nothing is mounted on it
//!   Point::mount      fuser mounts, and its threads begin ──► Mounted
//!   Mounted::unmount  taken off; by force from those who have it open
//!   Mounted::finish   its threads have ended; the file is removed if it was made here
//! ```
//!
//! The functions block, for as long as the kernel takes; they are no work for a worker.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;

use fuser::{Config, MountOption, Session, SessionACL, SessionUnmounter};
use rustix::mount::{UnmountFlags, unmount};
use vellum_core::{Context, Error, ErrorKind, Result};

use super::file::{DiskFile, Owner};
use crate::shutdown::Shutdown;

/// What stands before the mount point in `/proc/self/mountinfo`, by which what a dead server left is known.
const SOURCE: &str = "vellum";

/// Mounts upon each other that are taken away before something else must be wrong.
const STALE_MAX: usize = 16;

/// A file that is ready to be mounted on.
#[derive(Debug)]
pub struct Point {
    path: PathBuf,
    was_made: bool,
    owner: Owner,
}

/// A file that shows a disk.
pub struct Mounted {
    point: Point,
    unmounter: SessionUnmounter,
    /// Requested once fuser's threads have ended.
    ended: Shutdown,
}

/// How a file was taken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// Nobody had it open.
    Free,
    /// Somebody has it open.
    Busy,
}

impl Point {
    /// Looks at the file, makes it if it is not there, and takes away what a server that is dead left mounted on it.
    ///
    /// # Errors
    /// `Locked` when something is mounted there that answers, `Invalid` when it is no empty regular file.
    pub fn prepare(path: &Path) -> Result<Self> {
        let about = || format!("can't mount on {}", path.display());
        let facts = clear(path)?;
        let was_made = facts.is_none();
        let facts = match facts {
            Some(facts) => facts,
            None => {
                let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
                made.and_then(|file| file.metadata()).context(about)?
            }
        };
        let path = path.canonicalize().context(about)?;
        let no = |kind, why: &str| Err(Error::new(kind, format!("can't mount on {}: {why}", path.display())));
        if is_mounted(&path)?.is_some() {
            return no(ErrorKind::Locked, "something is mounted there");
        }
        if !facts.is_file() {
            return no(ErrorKind::Invalid, "it is no regular file; name one that is empty or not there yet");
        }
        if facts.len() > 0 {
            return no(ErrorKind::Invalid, "the file is not empty; name one that is empty or not there yet");
        }
        let mode = u16::try_from(facts.mode() & 0o777).expect("nine bits");
        Ok(Self { path, was_made, owner: Owner { mode, uid: facts.uid(), gid: facts.gid() } })
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

    fn remove(&self) {
        if self.was_made
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!("can't remove {}: {error}", self.path.display());
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
            let unmounter = session.unmount_callable();
            let ended = Shutdown::new();
            let told = ended.clone();
            let name = self.path.clone();
            thread::Builder::new().name("vellum-fuse".to_owned()).spawn(move || {
                if let Err(error) = session.run() {
                    tracing::error!("{} is served no longer: {error}", name.display());
                }
                told.drain();
            })?;
            Ok((unmounter, ended))
        });
        match mounted {
            Ok((unmounter, ended)) => Ok(Mounted { point: self, unmounter, ended }),
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

    /// Completes when nothing comes from the kernel any more: somebody unmounted it, or [`Mounted::unmount`] did.
    pub async fn ended(&self) {
        self.ended.requested().await;
    }

    /// Whether nothing comes from the kernel any more.
    pub fn has_ended(&self) -> bool {
        self.ended.is_requested()
    }

    /// Takes the file off, unless somebody has it open.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn unmount(&mut self) -> Result<Taken> {
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
    pub fn force(&self) -> Result<()> {
        unmount(self.path(), UnmountFlags::FORCE | UnmountFlags::DETACH)
            .map_err(io::Error::from)
            .context(|| format!("can't unmount {}", self.path().display()))
    }

    /// Removes the file, if it was made here. For one that is taken off.
    pub fn finish(self) {
        match is_mounted(self.path()) {
            Ok(None) => self.point.remove(),
            Ok(Some(_)) => tracing::warn!("{} is left: something is mounted on it", self.path().display()),
            Err(error) => tracing::warn!("{} is left: {}", self.path().display(), error.chain()),
        }
    }
}

/// What the file is, under all that dead servers left mounted on it; nothing when it is not there.
fn clear(path: &Path) -> Result<Option<Metadata>> {
    for _ in 0..STALE_MAX {
        let error = match std::fs::metadata(path) {
            Ok(facts) => return Ok(Some(facts)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => error,
        };
        // ENOTCONN: a file system whose server is gone. Its name can still be found by way of its directory.
        let stale = || format!("can't use {}: {}", path.display(), stale_remedy(path));
        if error.kind() != io::ErrorKind::NotConnected {
            return Err(Error::io(error, format!("can't look at {}", path.display())));
        }
        let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else {
            return Err(Error::io(error, stale()));
        };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        let whole = parent.canonicalize().context(stale)?.join(name);
        if is_mounted(&whole)?.as_deref() != Some(SOURCE) {
            return Err(Error::io(error, stale()));
        }
        unmount(&whole, UnmountFlags::DETACH).map_err(io::Error::from).context(stale)?;
        tracing::warn!("{}: took away what a server that is dead had left mounted there", path.display());
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

/// What is mounted at this path, on top, by its source; nothing when the path is no mount point.
fn is_mounted(path: &Path) -> Result<Option<String>> {
    let table = File::open("/proc/self/mountinfo").and_then(io::read_to_string);
    Ok(source_at(&table.context(|| "can't see what is mounted")?, path))
}

/// The source of the last mount at `path` in a table of mounts; of others, an empty one.
fn source_at(table: &str, path: &Path) -> Option<String> {
    // 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
    let found = table.lines().rev().find(|line| {
        line.split(' ').nth(4).is_some_and(|point| unescaped(point) == path.as_os_str().as_encoded_bytes())
    })?;
    let (_, kind) = found.split_once(" - ")?;
    let mut words = kind.split(' ');
    let is_fuse = words.next().is_some_and(|kind| kind == "fuse" || kind.starts_with("fuse."));
    Some(words.next().filter(|_| is_fuse).unwrap_or_default().to_owned())
}

/// `\040` and its like are single bytes.
fn unescaped(text: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, later)) = rest.split_first() {
        let digits = later.get(..3).filter(|digits| digits.iter().all(|digit| (b'0'..b'8').contains(digit)));
        match digits {
            Some(digits) if *first == b'\\' => {
                bytes.push(
                    digits.iter().fold(0_u8, |all, digit| all.wrapping_mul(8).wrapping_add(digit - b'0')),
                );
                rest = &later[3..];
            }
            _ => {
                bytes.push(*first);
                rest = later;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
36 35 98:0 / / rw,noatime master:1 - ext3 /dev/root rw,errors=continue
90 36 0:50 / /run/a\\040disk rw,nosuid - fuse vellum rw,user_id=0
91 36 0:51 / /run/other rw - fuse.sshfs host:/ rw
92 36 0:52 / /run/twice rw - fuse vellum rw
93 36 0:53 / /run/twice rw - tmpfs vellum rw
";

    #[test]
    fn what_is_mounted_is_found_by_its_place() {
        let at = |path: &str| source_at(TABLE, Path::new(path));
        assert_eq!(at("/run/a disk").as_deref(), Some("vellum"));
        assert_eq!(at("/run/other").as_deref(), Some("host:/"));
        assert_eq!(at("/run"), None);
        assert_eq!(at("/run/twice").as_deref(), Some(""), "what is on top counts, and it is no FUSE");
    }

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
        assert!(made.was_made && made.owner().mode == 0o600);
        let found = Point::prepare(&dir.join("new")).expect("an empty file");
        found.give_up();
        assert!(dir.join("new").exists(), "it was not made by the second");
        made.give_up();
        assert!(!dir.join("new").exists());
        std::fs::remove_dir_all(&dir).expect("the directory");
    }
}
