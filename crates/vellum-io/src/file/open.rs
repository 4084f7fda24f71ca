//! Opening and creating files without trusting what a path leads to.
//!
//! A path may lead to a pipe that blocks the program that opens it, or to a tape that rewinds. So it is
//! checked first, opened without blocking, and checked again: only the opened file counts.
//!
//! A path that has been checked must not lead elsewhere by the time it is opened:
//! [`OpenOptions::without_links`] opens it without following a link in any of its components, with `openat2`,
//! or component by component where that is not available.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use vellum_core::{Context, Error, ErrorKind, Result};

use super::handle::Handle;
use super::space::Abilities;
use super::{File, LockMode, facts, lock, retry};
use crate::blocking::unblock_at;

/// How a file is opened. The default is read-only, for an image that no program writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenOptions {
    /// The file is to be written too.
    pub writable: bool,
    /// Transfers go past the page cache (O_DIRECT). Any byte range still works; what is no whole block is
    /// slower.
    pub direct: bool,
    /// What other programs may do with the image meanwhile.
    pub lock: LockMode,
    /// A block device's sectors read as zero or as before after `BLKDISCARD`, which the caller knows of this
    /// drive (thin volumes do that); then it is used for `discard` where the drive has nothing better.
    pub trim: bool,
    /// No part of the path is a link: it is canonical, or has been changed since, and is refused then.
    pub without_links: bool,
    /// Nobody else makes the file shorter while it is open: where somebody does, a read of what was cut off fails instead
    /// of reading zeros, as it does for a file that is only read.
    pub keeps_len: bool,
    /// Flushes are not passed on to the kernel: what is written, and the name of a new file, may be lost when the machine
    /// crashes, and nothing says what. For files that are made anew then.
    pub never_flushed: bool,
}

impl OpenOptions {
    /// For reading an image that no program writes.
    pub fn reading() -> Self {
        Self::default()
    }

    /// For reading and writing an image that no other program uses.
    pub fn writing() -> Self {
        Self { writable: true, lock: LockMode::Write, ..Self::default() }
    }

    /// As this, with or without O_DIRECT.
    #[must_use]
    pub fn direct(self, direct: bool) -> Self {
        Self { direct, ..self }
    }

    /// As this, with another lock.
    #[must_use]
    pub fn lock(self, lock: LockMode) -> Self {
        Self { lock, ..self }
    }
}

impl File {
    /// Opens a regular file or a block device.
    ///
    /// Fails with `NotFound`; with `Locked` when another program uses the image in a way that the lock mode
    /// excludes; with `Unsupported` when it is anything else than a file or block device, or cannot be opened
    /// for direct I/O.
    pub async fn open(path: impl AsRef<Path>, options: OpenOptions) -> Result<Arc<Self>> {
        let path = path.as_ref().to_owned();
        unblock_at(&path.clone(), move || open(&path, &options).map(Arc::new)).await
    }

    /// Creates a file, which must not exist, and opens it for writing as `options` say. When this returns its
    /// name is as durable as the next flush of its content; when it fails there is no such file.
    pub async fn create_new(path: impl AsRef<Path>, options: OpenOptions) -> Result<Arc<Self>> {
        let path = path.as_ref().to_owned();
        let options = OpenOptions { writable: true, ..options };
        unblock_at(&path.clone(), move || create(&path, &options).map(Arc::new)).await
    }
}

fn create(path: &Path, options: &OpenOptions) -> Result<File> {
    let name = path.display().to_string();
    // Created without O_DIRECT: a file system that does not know it makes the file and fails afterwards.
    let created = open_descriptor(path, false, true, OFlags::CREATE | OFlags::EXCL)
        .map_err(|errno| Error::io(errno.into(), format!("can't create {name}")))?;
    let created = stat(&created, &name)?;
    let opened = open(path, options).and_then(|file| {
        let opened = rustix::fs::fstat(file.as_fd()).map_err(|errno| cannot_open(errno, &name))?;
        check_same(&created, &opened, &name)?;
        if !options.never_flushed {
            sync_directory_of(path)?;
        }
        Ok(file)
    });
    // A file that another program has opened meanwhile, or put in its place, is left alone.
    let is_ours = || rustix::fs::stat(path).is_ok_and(|now| check_same(&created, &now, &name).is_ok());
    if opened.as_ref().is_err_and(|error| error.kind() != ErrorKind::Locked) && is_ours() {
        drop(std::fs::remove_file(path));
    }
    opened
}

pub(super) fn open(path: &Path, options: &OpenOptions) -> Result<File> {
    let name = path.display().to_string();
    let is_writer = options.lock == LockMode::Write;
    if options.lock != LockMode::None && options.writable != is_writer {
        return Err(Error::invalid(format!(
            "can't open {name}: a file that is written takes the lock for writing, one that is read does not"
        )));
    }
    let facts = retry(|| rustix::fs::stat(path)).map_err(|errno| cannot_open(errno, &name))?;
    facts::check_type(&facts, &name)?;
    let flags = open_flags(options.direct, options.writable);
    let file = match options.without_links {
        true => open_without_links(path, flags),
        false => retry(|| rustix::fs::open(path, flags, Mode::empty())),
    };
    let file = file.map_err(|errno| match errno {
        Errno::LOOP | Errno::NOTDIR if options.without_links => Error::new(
            ErrorKind::Refused,
            format!("can't open {name}: it was replaced by a link while it was being opened"),
        ),
        Errno::INVAL if options.direct => Error::unsupported(format!(
            "can't open {name} for direct I/O: its file system does not support it"
        )),
        errno => cannot_open(errno, &name),
    })?;
    let opened = stat(&file, &name)?;
    facts::check_type(&opened, &name)?;
    must_block(&file).map_err(|errno| cannot_open(errno, &name))?;
    lock::acquire(file.as_fd(), options.lock, &name)?;
    // Queried again now that no other program can change it any more.
    let facts = facts::find(&file, &stat(&file, &name)?, options, &name)?;
    let storage = facts::storage_of(&file, &opened);
    let handle = if facts.direct.is_some() {
        let needs_cached = options.writable && !facts.limits.fixed_len;
        let cached = if needs_cached { Some(open_cached(path, &opened, &name)?) } else { None };
        Handle::direct(file, options.lock, cached, facts.len, storage)
    } else {
        Handle::buffered(file, options.lock, facts.len, storage)
    };
    Ok(File {
        name,
        limits: facts.limits,
        kind: facts.kind,
        handle: Arc::new(handle),
        direct: facts.direct,
        abilities: Abilities::hoped_for(options.trim),
        keeps_len: options.keeps_len,
        never_flushed: options.never_flushed,
        proof: facts.proof,
    })
}

fn cannot_open(errno: Errno, name: &str) -> Error {
    Error::io(errno.into(), format!("can't open {name}"))
}

fn stat(file: &OwnedFd, name: &str) -> Result<Stat> {
    rustix::fs::fstat(file).map_err(|errno| Error::io(errno.into(), format!("can't stat {name}")))
}

fn open_flags(direct: bool, writable: bool) -> OFlags {
    let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    flags |= if writable { OFlags::RDWR } else { OFlags::RDONLY };
    if direct {
        flags |= OFlags::DIRECT;
    }
    flags
}

fn open_descriptor(path: &Path, direct: bool, writable: bool, create: OFlags) -> Result<OwnedFd, Errno> {
    let flags = open_flags(direct, writable) | create;
    retry(|| rustix::fs::open(path, flags, Mode::from_raw_mode(0o644)))
}

/// Opens the file at the path; fails with `LOOP` or `NOTDIR` when any part of it is a link.
fn open_without_links(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match retry(|| rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve)) {
        // An old kernel, or a filter of system calls that does not know it.
        Err(Errno::NOSYS | Errno::PERM) => walk_without_links(path, flags),
        opened => opened,
    }
}

/// As above, directory by directory.
fn walk_without_links(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let step = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let start = if path.is_absolute() { Path::new("/") } else { Path::new(".") };
    let mut dir = retry(|| rustix::fs::open(start, step, Mode::empty()))?;
    let mut parts = path.components().filter(|part| *part != Component::RootDir).peekable();
    while let Some(part) = parts.next() {
        let name = part.as_os_str();
        if parts.peek().is_none() {
            return retry(|| rustix::fs::openat(&dir, name, flags | OFlags::NOFOLLOW, Mode::empty()));
        }
        dir = retry(|| rustix::fs::openat(&dir, name, step, Mode::empty()))?;
    }
    Err(Errno::ISDIR)
}

/// Takes back the flag that kept opening from blocking: a ring would give up, rather than wait, on such a
/// descriptor.
fn must_block(file: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags - OFlags::NONBLOCK)
}

/// The same file once more, through the page cache.
fn open_cached(path: &Path, opened: &Stat, name: &str) -> Result<OwnedFd> {
    let file =
        open_descriptor(path, false, true, OFlags::empty()).map_err(|errno| cannot_open(errno, name))?;
    let again = stat(&file, name)?;
    if (again.st_dev, again.st_ino) != (opened.st_dev, opened.st_ino) {
        return Err(Error::new(
            ErrorKind::Io,
            format!("can't open {name}: it is being replaced by another file"),
        ));
    }
    must_block(&file).map_err(|errno| cannot_open(errno, name))?;
    Ok(file)
}

fn check_same(one: &Stat, other: &Stat, name: &str) -> Result<()> {
    if (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Io, format!("can't open {name}: it is being replaced by another file")))
}

/// Makes the names in a file's directory durable.
pub(super) fn sync_directory_of(path: &Path) -> Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let synced = rustix::fs::open(directory, flags, Mode::empty())
        .and_then(|directory| match rustix::fs::fsync(&directory) {
            // Some file systems cannot, and need not.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(()),
            result => result,
        })
        .map_err(std::io::Error::from);
    synced.context(|| format!("can't make the name of {} durable", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_leads_through_a_link_by_now_is_not_opened() {
        let dir = std::env::temp_dir().join(format!("vellum-links-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("sub")).expect("a directory");
        let dir = dir.canonicalize().expect("it is there");
        std::fs::write(dir.join("sub/file"), "x").expect("a file");
        std::os::unix::fs::symlink("sub/file", dir.join("file-link")).expect("a link");
        std::os::unix::fs::symlink("sub", dir.join("dir-link")).expect("a link");
        for open in [open_without_links, walk_without_links] {
            let open = |name: &str| open(&dir.join(name), open_flags(false, false));
            open("sub/file").expect("no link is in it");
            for name in ["file-link", "dir-link/file"] {
                let errno = open(name).expect_err("a link is in it");
                assert!([Errno::LOOP, Errno::NOTDIR].contains(&errno), "{name}: {errno}");
            }
            assert_eq!(open("sub/none").expect_err("it is not there"), Errno::NOENT);
        }
        let options = OpenOptions { without_links: true, ..OpenOptions::reading() };
        let refused = super::open(&dir.join("file-link"), &options).expect_err("it is a link");
        assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
        super::open(&dir.join("sub/file"), &options).expect("it is a file");
        std::fs::remove_dir_all(dir).expect("it is ours");
    }
}
