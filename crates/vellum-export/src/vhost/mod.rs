//! vhost-user-blk: a virtual machine uses a disk through its own memory, without a socket in between.
//!
//! ```text
//!   front end (QEMU, …) ── socket: memory, queues, eventfds ──► session      one thread for each front end
//!        guest ── rings in shared memory, kick ──► queue ──► work ──► Disk   one future for each queue, on a worker
//! ```
//!
//! The crates of rust-vmm read the socket's messages and keep the rings; the requests of a guest are handled
//! here. In reading order: `chain` and `request` (pure: bytes of a guest become a checked request), `config`
//! (what a guest reads about its disk), `memory` and `bell` (what a front end shares), `walk` (along a table
//! of descriptors), `work` (one request), `inflight` (what a killed server leaves to the next), `reconnects`
//! (which front ends may continue with it), `queue` (one queue), `back_channel` (messages to a front end that
//! did not ask), `patience` (how long one may be silent), `session` (one front end).
//!
//! Neither the guest nor the front end is trusted: whatever they put into rings, chains, tables and messages
//! ends at worst their own queue or session. docs/vhost-user-blk.md says what is offered, and what is not.
//!
//! Source: VIRTIO 1.2, 2.7 and 5.2; the vhost-user protocol of QEMU's documentation.

mod back_channel;
mod bell;
mod chain;
mod config;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod inflight;
mod memory;
mod patience;
mod queue;
mod reconnects;
mod request;
mod session;
mod walk;
mod work;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rustix::io::{FdFlags, fcntl_setfd};
use vellum_core::{Clock, Context, Disk, LocalFuture, Result, Witness};

pub use reconnects::Reconnects;
pub use session::{Session, SessionHandle};

use crate::nbd::Exports;

/// The most queues of a device: their numbers have a byte in the protocol.
pub const QUEUES_MAX: u16 = 256;

/// What front ends of one socket are given.
#[derive(Clone)]
pub struct Device {
    /// Looks up its export, each time that a front end connects.
    pub exports: Exports,
    /// The name of the export.
    pub name: String,
    /// What the guest gets for a serial number: up to 20 bytes.
    pub serial: String,
    /// How many queues a front end may use, at most [`QUEUES_MAX`].
    pub queues: u16,
    /// Whether to accept memory that the front end could truncate while it is in use, which ends the program.
    pub takes_unsealed: bool,
    /// Whether front ends that were connected before may continue.
    pub reconnects: Reconnects,
    /// Measures how long a front end has been silent. Only the time is read, on any thread.
    pub clock: Arc<dyn Clock>,
    /// What its guest has seen of lost writes. A front end that reconnects has the same guest.
    pub heard: Heard,
}

/// What the guest of a device has seen of lost writes, from its first front end on.
#[derive(Clone, Default)]
pub struct Heard(Arc<OnceLock<Option<Arc<Witness>>>>);

impl Heard {
    fn of(&self, disk: &dyn Disk) -> Option<&Arc<Witness>> {
        self.0.get_or_init(|| disk.losses().map(|losses| losses.witness())).as_ref()
    }
}

/// Makes a queue's future, on the worker where it runs.
pub type MakeQueue = Box<dyn FnOnce() -> LocalFuture<'static, ()> + Send>;

/// Where queues run, and how they wait.
pub trait Host: Send + Sync {
    /// Runs what `make` makes to its end, on a worker; which one, the number of the queue may decide.
    fn spawn(&self, queue: u32, make: MakeQueue);

    /// Waits, on a worker, until the descriptor can be read.
    fn readable(&self, descriptor: &Arc<OwnedFd>) -> LocalFuture<'static, Result<()>>;

    /// Adds one to an eventfd. It must neither wait nor leave anything behind, in whatever state the front
    /// end has put it.
    fn ring(&self, eventfd: &Arc<OwnedFd>);
}

/// Keeps a descriptor of a front end from the programs that are started here: a received descriptor lacks
/// that flag. This is the first thing to do with one.
fn keep_from_children(descriptor: impl AsFd) -> Result<()> {
    let marked = fcntl_setfd(descriptor, FdFlags::CLOEXEC).map_err(std::io::Error::from);
    marked.context(|| "can't set close-on-exec on a front end's descriptor")
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::io::fcntl_getfd;

    use super::memory::{Memory, Region};
    use super::*;

    #[test]
    fn what_a_front_end_sent_is_kept_from_children() {
        let is_kept = |file: &File| fcntl_getfd(file).expect("its flags").contains(FdFlags::CLOEXEC);
        let sent = || {
            let file = File::from(memfd_create("sent", MemfdFlags::empty()).expect("a memfd"));
            file.set_len(0x1000).expect("its length");
            assert!(!is_kept(&file));
            file
        };
        let bell = bell::Bell::new(eventfd(0, EventfdFlags::empty()).expect("an eventfd").into());
        let flags = fcntl_getfd(bell.expect("an eventfd").descriptor()).expect("its flags");
        assert!(flags.contains(FdFlags::CLOEXEC));
        let region = Region { guest: 0, front_end: 0, len: 0x1000, in_file: 0 };
        assert!(Memory::map([(region, sent())]).expect("it is mapped").files().all(is_kept));
        let book = inflight::Book::map(sent(), 0, 1, 16).expect("it is mapped");
        assert!(is_kept(book.file()));
    }
}
