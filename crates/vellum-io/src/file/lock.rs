//! Keeps two programs, QEMU among them, from writing one image: the lock bytes are QEMU's.
//!
//! ```text
//!   byte 100 + i   a program does i                    i = 0  read consistent data
//!   byte 200 + i   a program allows no other to do i       1  write
//!                                                          2  write what changes nothing (not used here)
//!                                                          3  change the length
//! ```
//!
//! Every lock is a shared one, so a byte says only *that* it is held; an attempt at an exclusive lock shows
//! whether another program holds it. A program that opens an image locks its bytes first and checks
//! afterwards: of two that open it at the same time at least one sees the other.
//!
//! | mode | does | suffers no other to |
//! |---|---|---|
//! | `Write` | read, write, change the length | write, change the length |
//! | `Read` | read | write, change the length |
//! | `ForceShare` | read | – |
//!
//! The locks belong to the open file, not to the process: two files opened in one process exclude each other
//! too. They are released when the file is closed, at the latest when the last descriptor is: a child process
//! that is being started holds copies of all descriptors for a moment. A conflict is checked again a few
//! times before it is reported, for two reasons: a program may just have been killed (the kernel closes the
//! files of an io_uring some time after the process is gone), and another program may be inspecting the image
//! for a moment.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::io::Errno;
use vellum_core::{Error, ErrorKind, Result};

/// How an image is kept from others while it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LockMode {
    /// No lock. For files that are not images, and for block devices that are protected in another way.
    None,
    /// Others may read it, but not write it.
    #[default]
    Read,
    /// Others may neither write it nor read it, but with `ForceShare`.
    Write,
    /// Others may do anything. What is read may be inconsistent. As `qemu-img -U`.
    ForceShare,
}

const READ: u32 = 1 << 0;
const WRITE: u32 = 1 << 1;
const RESIZE: u32 = 1 << 3;
const PERMISSIONS: [(u32, &str); 4] =
    [(0, "consistent reading"), (1, "writing"), (2, "writing unchanged data"), (3, "resizing")];

const DOES: i64 = 100;
const SUFFERS_NOT: i64 = 200;
const CLAIM: i64 = 300;

/// The waits between checks of a conflict.
const LOOK_AGAIN: [Duration; 7] = [
    Duration::from_millis(5),
    Duration::from_millis(15),
    Duration::from_millis(30),
    Duration::from_millis(60),
    Duration::from_millis(120),
    Duration::from_millis(250),
    Duration::from_millis(500),
];

impl LockMode {
    /// What it does, and what it suffers no other to do.
    fn permissions(self) -> (u32, u32) {
        match self {
            Self::None => (0, 0),
            Self::Read => (READ, WRITE | RESIZE),
            Self::Write => (READ | WRITE | RESIZE, WRITE | RESIZE),
            Self::ForceShare => (READ, 0),
        }
    }
}

/// Locks the image, or says which lock is in the way. Blocks for at most a second.
pub(super) fn acquire(file: BorrowedFd<'_>, mode: LockMode, name: &str) -> Result<()> {
    let mut waits = LOOK_AGAIN.into_iter();
    loop {
        let conflict = match try_acquire(file, mode) {
            Ok(()) => return Ok(()),
            Err(Refusal::Conflict(conflict)) => conflict,
            Err(Refusal::Failed(errno)) => {
                return Err(Error::io(
                    errno.into(),
                    format!(
                        "can't lock {name}: its file system refuses; open it \
                 without a lock if no other program uses it"
                    ),
                )
                .with_kind(ErrorKind::Unsupported));
            }
        };
        release(file, mode);
        let Some(wait) = waits.next() else {
            return Err(Error::new(
                ErrorKind::Locked,
                format!(
                    "{name} is in use: a server, a virtual machine or another program {conflict}; close it there first \
                     (`lsof {name}` finds it)"
                ),
            ));
        };
        std::thread::sleep(wait);
    }
}

enum Refusal {
    Conflict(String),
    Failed(Errno),
}

fn try_acquire(file: BorrowedFd<'_>, mode: LockMode) -> Result<(), Refusal> {
    let (does, suffers_not) = mode.permissions();
    for (index, _) in PERMISSIONS {
        if does & (1 << index) != 0 {
            share(file, DOES + i64::from(index))?;
        }
        if suffers_not & (1 << index) != 0 {
            share(file, SUFFERS_NOT + i64::from(index))?;
        }
    }
    for (index, name) in PERMISSIONS {
        if does & (1 << index) != 0 && is_held(file, SUFFERS_NOT + i64::from(index))? {
            return Err(Refusal::Conflict(format!("has it open and does not allow {name} by others")));
        }
        if suffers_not & (1 << index) != 0 && is_held(file, DOES + i64::from(index))? {
            return Err(Refusal::Conflict(format!("has it open for {name}")));
        }
    }
    Ok(())
}

/// Releases the locks, even if copies of the descriptor exist.
pub(super) fn release(file: BorrowedFd<'_>, mode: LockMode) {
    let (does, suffers_not) = mode.permissions();
    for (index, _) in PERMISSIONS {
        // Letting go of a lock does not fail, and the descriptor is closed soon anyway.
        if does & (1 << index) != 0 {
            let _ = call(file, libc::F_OFD_SETLK, libc::F_UNLCK, DOES + i64::from(index));
        }
        if suffers_not & (1 << index) != 0 {
            let _ = call(file, libc::F_OFD_SETLK, libc::F_UNLCK, SUFFERS_NOT + i64::from(index));
        }
    }
}

/// Marks a file that is not an image yet as taken; false if another program has marked it. QEMU does not know
/// this byte.
pub(super) fn claim(file: BorrowedFd<'_>) -> Result<bool, Errno> {
    match call(file, libc::F_OFD_SETLK, libc::F_WRLCK, CLAIM) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Takes a shared lock on one byte.
fn share(file: BorrowedFd<'_>, byte: i64) -> Result<(), Refusal> {
    match call(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte) {
        Ok(_) => Ok(()),
        Err(Errno::AGAIN | Errno::ACCESS) => Err(Refusal::Conflict("has it open exclusively".into())),
        Err(errno) => Err(Refusal::Failed(errno)),
    }
}

/// Whether another open file holds a lock on the byte.
fn is_held(file: BorrowedFd<'_>, byte: i64) -> Result<bool, Refusal> {
    let found = call(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte).map_err(Refusal::Failed)?;
    Ok(found != libc::F_UNLCK)
}

/// One call of `fcntl` for one byte; returns the kind of lock that it left in its argument.
fn call(file: BorrowedFd<'_>, command: i32, kind: i32, byte: i64) -> Result<i32, Errno> {
    let lock_kind = i16::try_from(kind).expect("kinds of locks are small numbers");
    let whence = i16::try_from(libc::SEEK_SET).expect("a small number");
    let mut lock = libc::flock { l_type: lock_kind, l_whence: whence, l_start: byte, l_len: 1, l_pid: 0 };
    loop {
        // SAFETY: the two commands used read and write the one `flock` that is passed.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
        match result {
            0.. => return Ok(i32::from(lock.l_type)),
            _ => match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                errno => return Err(Errno::from_raw_os_error(errno.unwrap_or(libc::EIO))),
            },
        }
    }
}
