//! What is mounted at a path. A mount that is to be removed is held open meanwhile, so that another mount
//! cannot take its place unnoticed.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, open, statx};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use vellum_core::{Context, Result};

/// The topmost mount at a path. While this is held the mount is busy, and its device number is not reused.
#[derive(Debug)]
pub(super) struct Held(File);

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    /// The device number that `stat` reports, such as `0:50`: each file system without a device of its own
    /// gets a unique one.
    pub(super) device: String,
    /// What is mounted, as the server of FUSE calls it; of others, nothing.
    pub(super) source: String,
}

impl Held {
    /// Opens what is at a path. This does not query the server, so it also finds mounts that have lost
    /// theirs.
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        Ok(Self(File::from(open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)))
    }

    /// Its attributes, as its server reports them now. Those that the kernel has cached outlive a server that
    /// was killed.
    pub(super) fn facts(&self) -> io::Result<Metadata> {
        match statx(&self.0, "", AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS) {
            // An old kernel queries whenever it likes.
            Ok(_) | Err(Errno::NOSYS) => self.0.metadata(),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The mount that it is in.
    pub(super) fn mount(&self) -> Result<Option<Mount>> {
        let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd()));
        let about = about.context(|| "can't read the list of mounts")?;
        let number = about.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim);
        Ok(number.and_then(|number| numbered(&table().ok()?, number)))
    }

    /// Unmounts this mount and no other, as soon as it is no longer in use.
    pub(super) fn detach(&self, flags: UnmountFlags) -> io::Result<()> {
        let name = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        Ok(unmount(name, UnmountFlags::DETACH | flags)?)
    }
}

/// Whether anything is mounted at this path.
pub(super) fn is_mounted(path: &Path) -> Result<bool> {
    Ok(has_point(&table()?, path))
}

fn table() -> Result<String> {
    File::open("/proc/self/mountinfo")
        .and_then(io::read_to_string)
        .context(|| "can't read the list of mounts")
}

/// Whether a table of mounts has one at `path`.
fn has_point(table: &str, path: &Path) -> bool {
    // 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    points.map(unescaped).any(|point| point == path.as_os_str().as_encoded_bytes())
}

/// The mount with this number.
fn numbered(table: &str, number: &str) -> Option<Mount> {
    let line = table.lines().find(|line| line.split(' ').next() == Some(number))?;
    let device = line.split(' ').nth(2)?.to_owned();
    let (_, kind) = line.split_once(" - ")?;
    let mut words = kind.split(' ');
    let is_fuse = words.next().is_some_and(|kind| kind == "fuse" || kind.starts_with("fuse."));
    let source = words.next().filter(|_| is_fuse).unwrap_or_default().to_owned();
    Some(Mount { device, source })
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
93 36 0:53 / /run/tmp rw shared:7 - tmpfs vellum rw
";

    #[test]
    fn what_is_mounted_is_found_by_its_place_and_its_number() {
        let at = |path: &str| has_point(TABLE, Path::new(path));
        assert!(
            at("/run/a disk") && at("/run/other") && at("/run/tmp") && !at("/run") && !at("/run/a\\040disk")
        );
        let is = |number: &str, device: &str, source: &str| {
            let should = Mount { device: device.to_owned(), source: source.to_owned() };
            assert_eq!(numbered(TABLE, number), Some(should));
        };
        is("90", "0:50", "vellum");
        is("91", "0:51", "host:/");
        is("93", "0:53", "");
        assert_eq!(numbered(TABLE, "9"), None);
    }

    #[test]
    fn the_mount_of_what_is_held_is_found() {
        let held = Held::at(Path::new("/proc/self/mountinfo")).expect("there is proc");
        let mount = held.mount().expect("the table").expect("it is mounted");
        let device = std::os::unix::fs::MetadataExt::dev(&held.facts().expect("facts"));
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        assert_eq!(mount, Mount { device: format!("{major}:{minor}"), source: String::new() });
    }
}
