//! What an operation on a file keeps alive: the descriptors, and the state that is updated when it ends.
//!
//! 1. The length is the largest end of any change that has completed, or what the last `set_len` found: it
//!    never exceeds the file's.
//! 2. The lock is released with the handle, even while a child process that is being started still holds
//!    copies of the descriptors.
//! 3. Poison is permanent. The driver sets it, even if the future of the failed flush was dropped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use super::gate::Gate;
use super::lock::{self, LockMode};
use crate::blocking::Backend;

/// An open file, as the drivers know it.
pub(crate) struct Handle {
    main: OwnedFd,
    /// The same file through the page cache, if `main` uses O_DIRECT: for the file's last, partial block.
    cached: Option<OwnedFd>,
    /// Where partial blocks are changed by reading and writing whole ones.
    gate: Option<Box<Gate>>,
    len: AtomicU64,
    poisoned: AtomicBool,
    /// What `main` holds.
    lock: LockMode,
    /// What it lies on.
    storage: Storage,
}

/// What a file is stored on, as far as it matters for blocking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Storage {
    pub(crate) backend: Backend,
    /// It cannot report that a transfer would have to wait (`RWF_NOWAIT`), as FUSE and NFS cannot: such a
    /// transfer blocks its caller.
    pub(crate) makes_wait: bool,
}

impl Drop for Handle {
    fn drop(&mut self) {
        lock::release(self.main.as_fd(), self.lock);
    }
}

impl Handle {
    /// An open file of `len` bytes, locked like this, that moves any byte range.
    pub(crate) fn buffered(main: OwnedFd, lock: LockMode, len: u64, storage: Storage) -> Self {
        let (len, poisoned) = (AtomicU64::new(len), AtomicBool::new(false));
        Self { main, cached: None, gate: None, len, poisoned, lock, storage }
    }

    /// As above, but `main` moves whole blocks only.
    pub(crate) fn direct(
        main: OwnedFd,
        lock: LockMode,
        cached: Option<OwnedFd>,
        len: u64,
        storage: Storage,
    ) -> Self {
        let mut handle = Self::buffered(main, lock, len, storage);
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

    /// What it lies on.
    pub(crate) fn storage(&self) -> Storage {
        self.storage
    }

    pub(crate) fn gate(&self) -> Option<&Gate> {
        self.gate.as_deref()
    }

    pub(crate) fn len(&self) -> u64 {
        self.len.load(SeqCst)
    }

    /// A change that ends at `end` has been made.
    pub(crate) fn note_end(&self, end: u64) {
        // Usually it is unchanged, and then the cache line is not taken from the other workers.
        if end > self.len() {
            self.len.fetch_max(end, SeqCst);
        }
    }

    /// The file has been truncated or extended to `len`.
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
        Self::on(Storage { backend: Backend::None, makes_wait: false })
    }

    /// As above, on this storage.
    #[cfg(test)]
    pub(crate) fn on(storage: Storage) -> std::sync::Arc<Self> {
        let file = std::fs::File::open("/dev/null").expect("there is a null device");
        std::sync::Arc::new(Self::direct(file.into(), LockMode::None, None, 0, storage))
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
        let handle = Handle::buffered(file.into(), LockMode::Write, 512, Handle::for_test().storage());
        let other = open();
        assert!(lock::acquire(other.as_fd(), LockMode::Write, "image").is_err(), "the handle has it");
        drop(handle);
        lock::acquire(other.as_fd(), LockMode::Write, "image").expect("the handle has gone");
        drop((copy, other));
        std::fs::remove_file(path).expect("the image");
    }
}
