//! The two bells of a queue: eventfds of the front end. The guest rings one, we ring the other.
//!
//! A front end can hand over anything. What is not an eventfd is turned away; what is one is read and written without
//! waiting, so that a worker never stands still for it.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use vellum_core::{Context, Error, Result};

use super::keep_from_children;

/// An eventfd that does not make anybody wait.
#[derive(Debug, Clone)]
pub(super) struct Bell(Arc<OwnedFd>);

impl Bell {
    /// Takes what the front end gave.
    pub(super) fn new(file: File) -> Result<Self> {
        keep_from_children(&file)?;
        // The kernel tells nowhere else what a descriptor is.
        let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        if link.is_ok_and(|link| link.as_os_str() != "anon_inode:[eventfd]") {
            return Err(Error::invalid("a queue was given a descriptor that is no eventfd"));
        }
        let bell = OwnedFd::from(file);
        let context = || "can't take over an eventfd";
        let flags = fcntl_getfl(&bell).map_err(std::io::Error::from).context(context)?;
        fcntl_setfl(&bell, flags | OFlags::NONBLOCK).map_err(std::io::Error::from).context(context)?;
        Ok(Self(Arc::new(bell)))
    }

    /// For waiting until it was rung.
    pub(super) fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.0
    }

    /// Forgets that it was rung.
    pub(super) fn clear(&self) -> Result<()> {
        match rustix::io::read(&self.0, &mut [0; 8]) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::os(errno.raw_os_error(), "can't read an eventfd")),
        }
    }

    /// Rings it. One that is full is being heard already; one that is broken is the front end's loss.
    pub(super) fn ring(&self) {
        #[expect(clippy::host_endian_bytes, reason = "an eventfd takes a number of the host")]
        let one = 1u64.to_ne_bytes();
        let _ = rustix::io::write(&self.0, &one);
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn only_an_eventfd_will_do_and_nobody_waits_for_it() {
        let blocking = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let bell = Bell::new(blocking.into()).expect("an eventfd");
        bell.clear().expect("it was not rung");
        bell.ring();
        bell.clear().expect("it was");
        bell.clear().expect("it is forgotten");
        for other in ["/dev/zero", "/", "/proc/self/exe"] {
            Bell::new(File::open(other).expect("it is there")).expect_err("no eventfd");
        }
        let (reader, _writer) = std::io::pipe().expect("a pipe");
        Bell::new(OwnedFd::from(reader).into()).expect_err("no eventfd");
    }

    #[test]
    fn a_full_one_is_no_obstacle() {
        let full = eventfd(u32::MAX, EventfdFlags::CLOEXEC).expect("an eventfd");
        let most = (u64::MAX - 1 - u64::from(u32::MAX)).to_le_bytes();
        rustix::io::write(&full, &most).expect("it is full now");
        Bell::new(full.into()).expect("an eventfd").ring();
    }
}
