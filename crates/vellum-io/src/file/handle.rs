//! What an operation on a file needs to stay alive: the descriptors, and what is noted when it ends.
//!
//! 1. The length is the largest end of any change that has ended, or what the last `set_len` found: it never runs ahead
//!    of the file.
//! 2. The lock goes with the handle, even while a process that is being started still holds copies of the descriptors.
//! 3. Poison is for ever. It is set by the driver, whether or not anybody waited for the flush that failed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use super::gate::Gate;
use super::lock::{self, LockMode};

/// An open file, as the drivers know it.
pub(crate) struct Handle {
    main: OwnedFd,
    /// The same file through the page cache, where `main` goes past it: for the file's last, partial block.
    cached: Option<OwnedFd>,
    /// Where partial blocks are changed by reading and writing whole ones.
    gate: Option<Box<Gate>>,
    len: AtomicU64,
    poisoned: AtomicBool,
    /// What `main` holds.
    lock: LockMode,
}

impl Drop for Handle {
    fn drop(&mut self) {
        lock::release(self.main.as_fd(), self.lock);
    }
}

impl Handle {
    /// An open file of `len` bytes, locked like this, that moves any byte range.
    pub(crate) fn buffered(main: OwnedFd, lock: LockMode, len: u64) -> Self {
        let (len, poisoned) = (AtomicU64::new(len), AtomicBool::new(false));
        Self { main, cached: None, gate: None, len, poisoned, lock }
    }

    /// The same, but `main` moves whole blocks only.
    pub(crate) fn direct(main: OwnedFd, lock: LockMode, cached: Option<OwnedFd>, len: u64) -> Self {
        let mut handle = Self::buffered(main, lock, len);
        (handle.cached, handle.gate) = (cached, Some(Box::new(Gate::new())));
        handle
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
        std::sync::Arc::new(Self::direct(file.into(), LockMode::None, None, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_goes_with_the_handle_though_a_copy_of_the_descriptor_lives() {
        let path = std::env::temp_dir().join(format!("vellum-handle-{}", std::process::id()));
        std::fs::write(&path, [0; 512]).expect("an image");
        let open = || std::fs::File::options().read(true).write(true).open(&path).expect("it is there");
        let file = open();
        // As a process has it that is being started.
        let copy = file.try_clone().expect("a copy");
        lock::acquire(file.as_fd(), LockMode::Write, "image").expect("nobody has it");
        let handle = Handle::buffered(file.into(), LockMode::Write, 512);
        let other = open();
        assert!(lock::acquire(other.as_fd(), LockMode::Write, "image").is_err(), "the handle has it");
        drop(handle);
        lock::acquire(other.as_fd(), LockMode::Write, "image").expect("the handle has gone");
        drop((copy, other));
        std::fs::remove_file(path).expect("the image");
    }
}
