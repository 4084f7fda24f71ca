//! A file that gets its name only when it is complete.
//!
//! ```text
//!   begin      .NAME.vellum-00000000 beside NAME: empty, with the owner and the mode of the file it will replace
//!              (the caller fills it)
//!   publish    fsync; rename to NAME; fsync of the directory
//! ```
//!
//! 1. At every moment NAME is either the old file or the complete new one, even after a crash of the machine. Where the
//!    caller wants no flushes ([`Draft::publish_at_once`]), a crash may leave NAME with a part of the new one.
//! 2. A draft that is dropped is removed. The draft of a killed program is removed by the next draft of the
//!    same name, or by one that sweeps its directory ([`Draft::sweep`]). Drafts of one name have the first free numbers, so that nothing has to list the directory: a
//!    thousand images that are made in one would read it a thousand times.
//! 3. The file that will be replaced is locked for writing until then, so that no program works on a file
//!    that is about to vanish.
//!
//! There is no draft where a new file could not replace the old one; the old one is overwritten then. This
//! concerns block devices; files with several names, with extended attributes (access lists), or with a file
//! system mounted on them; directories that may not be written; and owners that cannot be preserved.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Stat, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use vellum_core::{Error, ErrorKind, Result};

use super::open::{open, sync_directory_of};
use super::{File, OpenOptions, lock, retry};
use crate::blocking::unblock_at;

/// Names have 255 bytes at most; the longest that a draft keeps whole leaves room for its own part.
const NAME_KEPT: usize = 200;

/// More drafts of one file than there ever are at once.
const NUMBERS_MAX: u32 = 1000;

/// A chain of links that is longer is a loop, for the kernel too.
const LINKS_MAX: usize = 40;

/// A file under a temporary name.
#[derive(Debug)]
pub struct Draft {
    path: PathBuf,
    target: PathBuf,
    /// Holds the lock that distinguishes the draft from an abandoned one.
    file: OwnedFd,
    old: Option<Old>,
    /// Its content is durable.
    is_flushed: bool,
    is_done: bool,
}

#[derive(Debug)]
struct Old {
    /// Keeps the lock.
    file: Arc<File>,
    facts: Stat,
}

impl Draft {
    /// An empty file that can take the place of `target`, or of what it is a link to. Nothing when what is
    /// there has to be overwritten instead.
    ///
    /// # Errors
    /// `Locked` when another program uses the existing file; the errors of creating one.
    pub async fn begin(target: impl AsRef<Path>) -> Result<Option<Self>> {
        let target = target.as_ref().to_owned();
        unblock_at(&target.clone(), move || begin(&target)).await
    }

    /// Where it is now.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where it will be: no link.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Gives it the owner and the mode of another file. If this process may not give it to that owner, it keeps the rights for its
    /// own owner alone.
    ///
    /// # Errors
    /// Those of the host.
    pub fn take_rights_of(&self, other: &Path) -> Result<()> {
        let taken = rustix::fs::stat(other).and_then(|facts| match take_over(&self.file, &facts) {
            Err(Errno::PERM) => rustix::fs::fchmod(&self.file, Mode::from_raw_mode(facts.st_mode & 0o700)),
            taken => taken,
        });
        taken.map_err(|errno| {
            Error::io(
                errno.into(),
                format!("can't give {} the rights of {}", self.target.display(), other.display()),
            )
        })
    }

    /// Whether it will replace another file.
    pub fn replaces(&self) -> bool {
        self.old.is_some()
    }

    /// The file that it will replace.
    pub fn old(&self) -> Option<Arc<File>> {
        self.old.as_ref().map(|old| old.file.clone())
    }

    /// Makes its content durable, once it is complete. Then giving it its name takes no time, and its caller can look once more whether
    /// the name is still wanted.
    ///
    /// # Errors
    /// Those of the file system.
    pub async fn flush(&mut self) -> Result<()> {
        // The same open file: it learns of each write that has failed.
        let target = self.target.display().to_string();
        let failed = move |error| Error::io(error, format!("can't create {target}"));
        let file = self.file.try_clone().map_err(&failed)?;
        let flushed = unblock_at(&self.path, move || retry(|| rustix::fs::fsync(&file))).await;
        flushed.map_err(|errno| failed(errno.into()))?;
        self.is_flushed = true;
        Ok(())
    }

    /// Flushes it, and gives it its name, durably. The program that filled it has closed it, and need not have flushed it.
    ///
    /// # Errors
    /// Fails with the error of the file system, or if another program has created the target meanwhile. Then
    /// the draft is removed.
    pub async fn publish(self) -> Result<()> {
        unblock_at(&self.path.clone(), move || publish(self, true)).await
    }

    /// As above, without a flush: until the system has written it on its own a crash of the machine leaves the name with a part
    /// of the content, or the old file, or none.
    ///
    /// # Errors
    /// As above.
    pub async fn publish_at_once(self) -> Result<()> {
        unblock_at(&self.path.clone(), move || publish(self, false)).await
    }

    /// Removes drafts of other names that killed programs have left in its directory, as far as they are as old as this. What cannot
    /// be removed stays.
    pub async fn sweep(&self, age: Duration) {
        let Ok(now) = rustix::fs::fstat(&self.file).map(|facts| facts.st_mtime) else { return };
        let (directory, before) =
            (directory_of(&self.path).to_owned(), now.saturating_sub_unsigned(age.as_secs()));
        unblock_at(&self.path, move || sweep(&directory, before)).await;
    }

    /// Removes it.
    ///
    /// # Errors
    /// The errors of the file system.
    pub fn discard(mut self) -> io::Result<()> {
        self.is_done = true;
        fs::remove_file(&self.path)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.is_done {
            drop(fs::remove_file(&self.path));
        }
    }
}

fn begin(name: &Path) -> Result<Option<Draft>> {
    let found = retry(|| rustix::fs::stat(name));
    if found.is_ok_and(|facts| FileType::from_raw_mode(facts.st_mode) != FileType::RegularFile) {
        return Ok(None);
    }
    let target = follow_links(name)?;
    let failed = |errno: Errno| Error::io(errno.into(), format!("can't create {}", name.display()));
    let (Some(file_name), false) = (target.file_name(), target.as_os_str().as_bytes().ends_with(b"/")) else {
        return Ok(None);
    };
    let old = match found {
        Ok(facts) => {
            let file = Arc::new(open(name, &OpenOptions::writing())?);
            // One of the kernel's links, to a file without a name, leads elsewhere than its text.
            if !rustix::fs::stat(&target).is_ok_and(|there| is_same(&there, &Some(facts))) {
                return Ok(None);
            }
            Some(Old { facts: stat(&file, name)?, file })
        }
        Err(Errno::NOENT) => None,
        Err(errno) => return Err(failed(errno)),
    };
    if old.as_ref().is_some_and(|old| !can_be_replaced(&target, &old.facts)) {
        return Ok(None);
    }
    let prefix = prefix_of(file_name);
    let (path, file) = match create(directory_of(&target), &prefix, old.is_some()) {
        Ok(created) => created,
        Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) if old.is_some() => return Ok(None),
        Err(errno) => return Err(failed(errno)),
    };
    let draft = Draft { path, target, file, old, is_flushed: false, is_done: false };
    match &draft.old {
        Some(old) if take_over(&draft.file, &old.facts).is_err() => Ok(None),
        _ => Ok(Some(draft)),
    }
}

fn stat(file: &impl AsFd, path: &Path) -> Result<Stat> {
    rustix::fs::fstat(file).map_err(|errno| Error::io(errno.into(), format!("can't stat {}", path.display())))
}

/// What a name leads to, whether or not it is there.
fn follow_links(path: &Path) -> Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match fs::read_link(&path) {
            Ok(to) => path = directory_of(&path).join(to),
            // It is not a link, or it does not exist. Opening it will report any other error.
            Err(_) => return Ok(path),
        }
    }
    Err(Error::invalid(format!("{} is a loop of links", path.display())))
}

fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether another file under its name would be equivalent for all users.
fn can_be_replaced(path: &Path, facts: &Stat) -> bool {
    let is_mount = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS)
        .is_ok_and(|known| known.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
    // A security label is the directory's affair. What does not fit into the buffer is more than a label.
    let mut names = [0; 1024];
    let has_attributes = match rustix::fs::listxattr(path, &mut names) {
        Ok(len) => {
            names[..len].split(|byte| *byte == 0).any(|name| !name.is_empty() && name != b"security.selinux")
        }
        Err(errno) => errno == Errno::RANGE,
    };
    facts.st_nlink == 1 && !is_mount && !has_attributes
}

/// What the names of all drafts of one file begin with.
fn prefix_of(file_name: &OsStr) -> OsString {
    let kept = &file_name.as_bytes()[..file_name.len().min(NAME_KEPT)];
    OsString::from_vec([b".", kept, b".vellum-"].concat())
}

/// Creates the draft with the first number that is free, and removes those that killed programs have left.
fn create(directory: &Path, prefix: &OsStr, is_private: bool) -> Result<(PathBuf, OwnedFd), Errno> {
    // The replacement of a file must not be readable by others before it has that file's mode.
    let mode = Mode::from_raw_mode(if is_private { 0o600 } else { 0o644 });
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let path_of = |number: u32| {
        let mut name = prefix.to_owned();
        name.push(format!("{number:08x}"));
        directory.join(name)
    };
    let mut number = 0;
    loop {
        let path = path_of(number);
        let file = match retry(|| rustix::fs::open(&path, flags, mode)) {
            Err(Errno::EXIST) if remove_left_behind(&path) => continue,
            Err(Errno::EXIST) if number < NUMBERS_MAX => {
                number += 1;
                continue;
            }
            opened => opened?,
        };
        // Where there are no locks an abandoned draft cannot be recognised, so none is removed. Before this one was locked
        // another program may have taken it for abandoned: it has removed it, or has the lock and is about to.
        let is_taken = lock::claim(file.as_fd()) == Ok(false);
        if !is_taken && rustix::fs::stat(&path).is_ok_and(|now| is_same(&now, &rustix::fs::fstat(&file).ok()))
        {
            // Two programs that were killed have left two.
            let _ = (number + 1..NUMBERS_MAX).take_while(|next| remove_left_behind(&path_of(*next))).count();
            return Ok((path, file));
        }
    }
}

fn is_same(one: &Stat, other: &Option<Stat>) -> bool {
    other.is_some_and(|other| (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
}

/// Removes drafts of killed programs that were written last before this time. An hour later nobody is in between creating one and
/// locking it, and on a file system that shows no locks of other hosts one that is at work has written.
fn sweep(directory: &Path, before: i64) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for path in entries.flatten().filter(|entry| is_of_draft(&entry.file_name())).map(|entry| entry.path()) {
        if rustix::fs::lstat(&path).is_ok_and(|facts| facts.st_mtime < before) {
            remove_left_behind(&path);
        }
    }
}

/// Whether a draft has such a name.
fn is_of_draft(name: &OsStr) -> bool {
    let name = name.as_bytes();
    let Some((rest, number)) = name.len().checked_sub(8).map(|at| name.split_at(at)) else { return false };
    rest.len() > b"..vellum-".len()
        && rest.starts_with(b".")
        && rest.ends_with(b".vellum-")
        && number.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Removes the draft of a killed program, whose lock is free. Returns whether it did.
fn remove_left_behind(path: &Path) -> bool {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let Ok(file) = rustix::fs::open(path, flags, Mode::empty()) else { return false };
    let Ok(facts) = rustix::fs::fstat(&file) else { return false };
    FileType::from_raw_mode(facts.st_mode) == FileType::RegularFile
        && lock::claim(file.as_fd()) == Ok(true)
        // It is removed by the one that has its lock, so what has the name now keeps it.
        && rustix::fs::stat(path).is_ok_and(|now| is_same(&now, &Some(facts)))
        && fs::remove_file(path).is_ok()
}

/// Makes the owner and the mode those of the other file.
fn take_over(file: &OwnedFd, facts: &Stat) -> Result<(), Errno> {
    let now = rustix::fs::fstat(file)?;
    if (now.st_uid, now.st_gid) != (facts.st_uid, facts.st_gid) {
        let (owner, group) = (facts.st_uid, facts.st_gid);
        rustix::fs::fchown(
            file,
            Some(rustix::fs::Uid::from_raw(owner)),
            Some(rustix::fs::Gid::from_raw(group)),
        )?;
    }
    rustix::fs::fchmod(file, Mode::from_raw_mode(facts.st_mode & 0o777))
}

fn publish(mut draft: Draft, is_durable: bool) -> Result<()> {
    let (path, target) = (&draft.path, &draft.target);
    let failed = |errno: Errno| Error::io(errno.into(), format!("can't create {}", target.display()));
    // Its content, owner and mode. This descriptor is older than all writes, so it learns of each that has failed.
    if is_durable && !draft.is_flushed {
        retry(|| rustix::fs::fsync(&draft.file)).map_err(failed)?;
    }
    let now = retry(|| rustix::fs::stat(target));
    let is_as_it_was = match (&draft.old, &now) {
        (Some(old), now) => now.is_ok_and(|now| is_same(&now, &Some(old.facts))),
        (None, now) => now.is_err(),
    };
    let flags = if draft.old.is_some() { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    let renamed = match rustix::fs::renameat_with(CWD, path, CWD, target, flags) {
        _ if !is_as_it_was => Err(Errno::EXIST),
        // Some file systems, such as NFS, have no such rename.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if draft.old.is_none() => {
            name_by_link(path, target)
        }
        renamed => renamed,
    };
    match renamed {
        Ok(()) => draft.is_done = true,
        Err(Errno::EXIST) => {
            return Err(Error::new(
                ErrorKind::Locked,
                format!("another program has created or replaced {} in the meantime", target.display()),
            ));
        }
        Err(errno) => return Err(failed(errno)),
    }
    if is_durable { sync_directory_of(&draft.target) } else { Ok(()) }
}

/// Gives a file its name only if nothing has that name: by a second name, which replaces nothing, where the file
/// system has links.
fn name_by_link(path: &Path, target: &Path) -> Result<(), Errno> {
    match rustix::fs::link(path, target) {
        Ok(()) => {
            // The name is given; a second one would only be a leftover.
            let _ = rustix::fs::unlink(path);
            Ok(())
        }
        Err(Errno::EXIST) => Err(Errno::EXIST),
        Err(_) => rustix::fs::rename(path, target),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("vellum-draft-{name}-{}", std::process::id()));
            drop(fs::remove_dir_all(&path));
            fs::create_dir(&path).expect("a directory");
            Self(path)
        }

        fn names(&self) -> Vec<OsString> {
            let entries = fs::read_dir(&self.0).expect("the directory");
            let mut names: Vec<OsString> =
                entries.map(|entry| entry.expect("an entry").file_name()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    #[test]
    fn a_new_file_is_as_private_as_another_one() {
        let dir = Dir::new("rights");
        let (old, new) = (dir.0.join("old"), dir.0.join("new"));
        fs::write(&old, b"old").expect("a file");
        fs::set_permissions(&old, fs::Permissions::from_mode(0o600)).expect("our file");
        let draft = draft_of(&new);
        draft.take_rights_of(&old).expect("it is ours");
        publish(draft, true).expect("the name is free");
        assert_eq!(fs::metadata(&new).expect("a file").mode() & 0o777, 0o600);
    }

    fn draft_of(path: &Path) -> Draft {
        begin(path).expect("it can be made").expect("by a draft")
    }

    #[test]
    fn a_name_is_given_when_all_is_there() {
        let dir = Dir::new("name");
        let target = dir.0.join("image");
        let draft = draft_of(&target);
        assert!(!draft.replaces() && !target.exists());
        fs::write(draft.path(), "whole").expect("the draft");
        publish(draft, true).expect("nobody is in the way");
        assert_eq!(fs::read(&target).expect("the image"), b"whole");
        assert_eq!(dir.names(), ["image"]);
        drop(draft_of(&target));
        assert_eq!(dir.names(), ["image"], "a draft that is dropped is removed");
    }

    #[test]
    fn what_replaces_a_file_has_its_mode_and_links_lead_to_it() {
        let dir = Dir::new("mode");
        let (target, link) = (dir.0.join("image"), dir.0.join("link"));
        fs::write(&target, "old").expect("a file");
        fs::set_permissions(&target, fs::Permissions::from_mode(0o640)).expect("our file");
        symlink("image", &link).expect("a link");
        let draft = draft_of(&link);
        assert!(draft.replaces());
        fs::write(draft.path(), "new").expect("the draft");
        assert_eq!(fs::read(&target).expect("the image"), b"old");
        publish(draft, true).expect("nobody is in the way");
        assert_eq!(fs::read(&target).expect("the image"), b"new");
        assert_eq!(fs::metadata(&target).expect("the image").mode() & 0o777, 0o640);
        assert!(link.is_symlink());
        // A link to nothing, and a loop.
        fs::remove_file(&target).expect("the image");
        publish(draft_of(&link), true).expect("nobody is in the way");
        assert!(target.exists() && link.is_symlink());
        symlink("loop", dir.0.join("loop")).expect("a link");
        assert_eq!(begin(&dir.0.join("loop")).expect_err("a loop").kind(), ErrorKind::Invalid);
    }

    #[test]
    fn what_cannot_be_replaced_has_no_draft() {
        let dir = Dir::new("none");
        let target = dir.0.join("image");
        fs::write(&target, "old").expect("a file");
        fs::hard_link(&target, dir.0.join("other")).expect("a second name");
        assert!(begin(&target).expect("it can be written").is_none());
        assert!(begin(&dir.0).expect("whoever opens it is told").is_none());
        assert!(begin(Path::new("/dev/null")).expect("whoever opens it is told").is_none());
        assert_eq!(dir.names().len(), 2);
    }

    #[test]
    fn what_is_in_use_is_left_alone() {
        let dir = Dir::new("locked");
        let target = dir.0.join("image");
        fs::write(&target, "old").expect("a file");
        let draft = draft_of(&target);
        let second = begin(&target).expect_err("the first draft holds it");
        assert_eq!(second.kind(), ErrorKind::Locked);
        // A program that takes no lock.
        fs::remove_file(&target).expect("the image");
        fs::write(&target, "theirs").expect("a file");
        assert_eq!(publish(draft, true).expect_err("it was replaced").kind(), ErrorKind::Locked);
        let draft = draft_of(&dir.0.join("new"));
        fs::write(dir.0.join("new"), "theirs").expect("a file");
        assert_eq!(publish(draft, true).expect_err("it was made").kind(), ErrorKind::Locked);
        assert_eq!(dir.names(), ["image", "new"]);
    }

    #[test]
    fn a_name_by_link_replaces_nothing() {
        let dir = Dir::new("link");
        let (draft, target) = (dir.0.join("draft"), dir.0.join("image"));
        fs::write(&draft, "new").expect("a file");
        fs::write(&target, "theirs").expect("a file");
        assert_eq!(name_by_link(&draft, &target), Err(Errno::EXIST));
        assert_eq!(fs::read(&target).expect("the image"), b"theirs");
        fs::remove_file(&target).expect("the image");
        assert_eq!(name_by_link(&draft, &target), Ok(()));
        assert_eq!(fs::read(&target).expect("the image"), b"new");
        assert_eq!(dir.names(), ["image"]);
    }

    #[test]
    fn what_was_left_behind_is_removed_and_nothing_else() {
        let dir = Dir::new("left");
        let target = dir.0.join("image");
        let left = [0, 1, 3].map(|number| format!(".image.vellum-0000000{number}"));
        for name in left.iter().map(String::as_str).chain([".image.vellum-notes", ".other.vellum-00000000"]) {
            fs::write(dir.0.join(name), "").expect("a file");
        }
        let first = draft_of(&target);
        let second = draft_of(&target);
        assert!(first.path().exists() && second.path().exists(), "one that is used is no leftover");
        assert_ne!(first.path(), second.path());
        let third = draft_of(&target);
        drop((first, second, third));
        assert_eq!(dir.names(), [".image.vellum-notes", ".other.vellum-00000000"]);
    }

    #[test]
    fn a_sweep_removes_old_drafts_that_nobody_has() {
        let dir = Dir::new("sweep");
        let used = draft_of(&dir.0.join("used"));
        let names = [
            ".one.vellum-00000000",
            ".two.qcow2.vellum-000003e7",
            ".new.vellum-00000000",
            ".x.vellum-notahexa",
        ];
        let others = ["one.vellum-00000000", ".vellum-00000000", ".three.vellum-0000000"];
        for name in names.into_iter().chain(others) {
            fs::write(dir.0.join(name), "").expect("a file");
        }
        let old = std::time::SystemTime::now() - Duration::from_secs(7200);
        for name in dir.names().iter().filter(|name| *name != names[2]) {
            let file = fs::File::options().write(true).open(dir.0.join(name)).expect("our file");
            file.set_modified(old).expect("our file");
        }
        let now = rustix::fs::stat(dir.0.join(names[2])).expect("it is there").st_mtime;
        sweep(&dir.0, now - 3600);
        assert!(used.path().exists(), "somebody fills it");
        drop(used);
        let mut left = [&names[2..], &others].concat();
        left.sort_unstable();
        assert_eq!(dir.names(), left);
    }

    /// They all want the first number, and see each other's drafts before these are locked.
    #[test]
    fn drafts_of_one_name_that_are_made_at_once_are_all_kept() {
        let dir = Dir::new("at-once");
        let target = dir.0.join("image");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let draft = draft_of(&target);
                        assert!(draft.path().exists(), "another one has removed it");
                        std::thread::yield_now();
                        assert!(draft.path().exists(), "another one has removed it");
                    }
                });
            }
        });
        assert!(dir.names().is_empty(), "{:?}", dir.names());
    }

    #[test]
    fn a_name_may_be_as_long_as_names_may_be() {
        let dir = Dir::new("long");
        let target = dir.0.join("x".repeat(255));
        publish(draft_of(&target), true).expect("nobody is in the way");
        assert!(target.exists());
    }
}
