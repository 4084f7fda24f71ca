//! What an operation on a file needs to stay alive: the descriptors, and what is noted when it ends.
//!
//! 1. The length is the largest end of any change that has ended, or what the last `set_len` found: it never runs ahead
//!    of the file.
//! 2. Poison is for ever. It is set by the driver, whether or not anybody waited for the flush that failed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use super::gate::Gate;

/// An open file, as the drivers know it.
pub(crate) struct Handle {
    main: OwnedFd,
    /// The same file through the page cache, where `main` goes past it: for the file's last, partial block.
    cached: Option<OwnedFd>,
    /// Where partial blocks are changed by reading and writing whole ones.
    gate: Option<Box<Gate>>,
    len: AtomicU64,
    poisoned: AtomicBool,
}

impl Handle {
    /// An open file of `len` bytes that moves any byte range.
    pub(crate) fn buffered(main: OwnedFd, len: u64) -> Self {
        Self { main, cached: None, gate: None, len: AtomicU64::new(len), poisoned: AtomicBool::new(false) }
    }

    /// An open file of `len` bytes whose `main` descriptor moves whole blocks only.
    pub(crate) fn direct(main: OwnedFd, cached: Option<OwnedFd>, len: u64) -> Self {
        Self { cached, gate: Some(Box::new(Gate::new())), ..Self::buffered(main, len) }
    }

    /// The descriptor that transfers use: the main one, or the one through the page cache.
    pub(crate) fn descriptor(&self, cached: bool) -> BorrowedFd<'_> {
        match &self.cached {
            Some(descriptor) if cached => descriptor.as_fd(),
            _ => self.main.as_fd(),
        }
    }

    /// Whether the main descriptor goes past the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.gate.is_some()
    }

    pub(crate) fn gate(&self) -> Option<&Gate> {
        self.gate.as_deref()
    }

    pub(crate) fn len(&self) -> u64 {
        self.len.load(SeqCst)
    }

    /// A change that ends at `end` has been made.
    pub(crate) fn note_end(&self, end: u64) {
        // Mostly it is no news, and then the cache line is not taken from the other workers.
        if end > self.len() {
            self.len.fetch_max(end, SeqCst);
        }
    }

    /// The file has been cut off or grown to `len`.
    pub(crate) fn set_len(&self, len: u64) {
        self.len.store(len, SeqCst);
    }

    pub(crate) fn poison(&self) {
        self.poisoned.store(true, SeqCst);
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.poisoned.load(SeqCst)
    }

    /// Some handle, for tests of what is kept in it.
    #[cfg(test)]
    pub(crate) fn for_test() -> std::sync::Arc<Self> {
        let file = std::fs::File::open("/dev/null").expect("there is a null device");
        std::sync::Arc::new(Self::direct(file.into(), None, 0))
    }
}
