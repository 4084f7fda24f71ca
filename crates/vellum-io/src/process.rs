//! What a server does with its own process: it leaves the terminal that it was started from, and the rights that it needed
//! to start.
//!
//! 1. Rights are dropped for all threads at once, and for good. That they are gone is checked: a server never goes on with
//!    more than it was told to keep.
//! 2. What is open stays open, and can be used as before.

use std::ffi::c_int;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;
use vellum_core::{Context, Error, ErrorKind, Result};

/// Leaves the session, so that the end of its terminal does not end this process.
///
/// # Errors
/// When this process leads a group, as one does that a shell has started.
pub fn leave_session() -> Result<()> {
    let left = rustix::process::setsid().map(drop).map_err(io::Error::from);
    left.context(|| "can't leave the session of the terminal")
}

/// A stream that a process has from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Answers.
    Stdout,
    /// All else.
    Stderr,
}

/// From now on, what is written to this stream goes nowhere.
///
/// # Errors
/// When `/dev/null` cannot be opened.
pub fn close_output(stream: Output) -> Result<()> {
    let context = || "can't close the output";
    let null = OpenOptions::new().write(true).open("/dev/null").context(context)?;
    let number = match stream {
        Output::Stdout => libc::STDOUT_FILENO,
        Output::Stderr => libc::STDERR_FILENO,
    };
    // SAFETY: the first descriptor is open, and nothing in this process owns the number of a standard stream.
    check(unsafe { libc::dup2(null.as_raw_fd(), number) }).context(context)
}

/// Locks a file against other processes that lock it in this way (QEMU's do), until this process closes it or ends.
///
/// # Errors
/// `Locked` when another one has it locked.
pub fn lock_pid_file(file: &File) -> Result<()> {
    fcntl_lock(file, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
        Errno::AGAIN | Errno::ACCESS => Error::new(ErrorKind::Locked, "it is locked"),
        errno => Error::io(errno.into(), "it can't be locked"),
    })
}

/// Who a process is to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The number of the user; unchanged when not given.
    pub user: Option<u32>,
    /// The number of the group; unchanged when not given.
    pub group: Option<u32>,
    /// The further groups.
    pub groups: Vec<u32>,
}

impl Identity {
    /// Becomes it, with all threads, for good. Must be called by root, unless nothing changes.
    ///
    /// # Errors
    /// When the host refuses, or the rights are not gone: the process must end then.
    pub fn assume(&self) -> Result<()> {
        let context = || format!("can't run as user {:?}, group {:?}", self.user, self.group);
        if self.user.is_none() && self.group.is_none() {
            return Ok(());
        }
        let groups: Vec<libc::gid_t> = self.groups.clone();
        // SAFETY: the pointer and the length are those of a vector that lives until the call returns. The C library sets
        // the groups of all threads.
        check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) }).context(context)?;
        if let Some(group) = self.group {
            // SAFETY: it takes numbers. The C library sets the group of all threads.
            check(unsafe { libc::setresgid(group, group, group) }).context(context)?;
        }
        if let Some(user) = self.user {
            // SAFETY: it takes numbers. The C library sets the user of all threads.
            check(unsafe { libc::setresuid(user, user, user) }).context(context)?;
            // SAFETY: it takes a number, and is expected to fail.
            let is_back = user != 0 && unsafe { libc::setuid(0) } == 0;
            if is_back {
                return Err(Error::new(ErrorKind::Refused, "the rights of root could not be dropped"));
            }
        }
        Ok(())
    }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_given_is_not_changed() {
        Identity { user: None, group: None, groups: Vec::new() }
            .assume()
            .expect("nothing is asked of the host");
    }
}
