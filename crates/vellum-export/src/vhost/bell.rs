//! The two bells of a queue: eventfds of the front end. The guest rings one, we ring the other.
//!
//! A front end can send any descriptor. One that is not an eventfd is refused. An eventfd is made
//! non-blocking: its flags are shared with the front end, and the protocol does not mention them, because
//! neither side is meant to wait on it (QEMU creates it so, and KVM uses it so). But the front end can revert
//! that at any time, and fill the counter to its maximum. So it is read with a per-call flag. No call that
//! writes an eventfd has such a flag; the host has another way ([`Host::ring`](super::Host::ring)).

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use vellum_core::{Context, Error, Result};

use super::keep_from_children;

/// An eventfd that does not make anybody wait.
#[derive(Debug, Clone)]
pub(super) struct Bell(Arc<OwnedFd>);

impl Bell {
    /// Takes what the front end gave.
    pub(super) fn new(file: File) -> Result<Self> {
        keep_from_children(&file)?;
        // The kernel shows the kind of a descriptor nowhere else.
        let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        if link.is_ok_and(|link| link.as_os_str() != "anon_inode:[eventfd]") {
            return Err(Error::invalid("a queue was given a descriptor that is not an eventfd"));
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
        // Not by the descriptor's own flag: the front end can change that at any time.
        let mut count = [0; 8];
        let mut into = [IoSliceMut::new(&mut count)];
        match preadv2(&self.0, &mut into, u64::MAX, ReadWriteFlags::NOWAIT) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            read => return told(read),
        }
        // A kernel before 5.8.
        told(rustix::io::read(&self.0, &mut count))
    }
}

/// What reading an eventfd gave; that it was not rung is fine.
fn told(read: rustix::io::Result<usize>) -> Result<()> {
    match read {
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
        Err(errno) => Err(Error::os(errno.raw_os_error(), "can't read an eventfd")),
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn rung(bell: &Bell) {
        rustix::io::write(&*bell.0, &1u64.to_le_bytes()).expect("it is not full");
    }

    #[test]
    fn only_an_eventfd_will_do_and_nobody_waits_for_it() {
        let blocking = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let bell = Bell::new(blocking.into()).expect("an eventfd");
        bell.clear().expect("it was not rung");
        rung(&bell);
        bell.clear().expect("it was");
        bell.clear().expect("it is forgotten");
        for other in ["/dev/zero", "/", "/proc/self/exe"] {
            Bell::new(File::open(other).expect("it is there")).expect_err("no eventfd");
        }
        let (reader, _writer) = std::io::pipe().expect("a pipe");
        Bell::new(OwnedFd::from(reader).into()).expect_err("no eventfd");
    }

    #[test]
    fn one_that_was_made_blocking_behind_our_back_keeps_nobody_when_it_is_heard() {
        let blocking = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let bell = Bell::new(File::from(blocking).try_clone().expect("a descriptor")).expect("an eventfd");
        let flags = fcntl_getfl(&*bell.0).expect("its flags");
        fcntl_setfl(&*bell.0, flags - OFlags::NONBLOCK).expect("the front end may do so");
        bell.clear().expect("it was not rung, and nobody waits for that");
        rung(&bell);
        bell.clear().expect("it was");
    }
}
