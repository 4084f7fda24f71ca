//! A disk for code without `async`: [`threaded::Disk`] with functions that wait.
//!
//! 1. It is `Send + Sync`: several threads may use one disk, with requests at the same time.
//! 2. [`Disk::close`] closes the image. Dropping the disk does so, too, but loses the error.
//! 3. Not for a thread that is a worker itself: the functions would block its other tasks.

use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{Buffer, Result};

use crate::{Image, threaded};

/// An open image on a thread of its own.
pub struct Disk(threaded::Disk);

impl Disk {
    /// Opens the image at this path for writing, with everything below it.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub fn open(path: impl Into<std::path::PathBuf>) -> Result<Self> {
        let path = path.into();
        Self::start(move || Image::open(path))
    }

    /// Starts the thread and opens the image there: `open` is called on it, with one of the functions that
    /// return an [`Image`].
    ///
    /// # Errors
    /// Those of `open`; `Io` when the host cannot start a thread.
    pub fn start<F>(open: impl FnOnce() -> F + Send + 'static) -> Result<Self>
    where
        F: Future<Output = Result<Image>> + 'static,
    {
        block_on(threaded::Disk::start(open)).map(Self)
    }

    /// Fills `bytes` with what the disk holds from this position on.
    ///
    /// # Errors
    /// `Invalid` past the end of the disk, and the errors of the image.
    pub fn read_at(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let buffer = block_on(self.0.read_at(at, Buffer::for_overwrite(bytes.len())))?;
        buffer.copy_to(0, bytes);
        Ok(())
    }

    /// Writes the bytes from this position on. They are durable after the next [`flush`](Self::flush).
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at); `ReadOnly` for an image that was opened so.
    pub fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()> {
        block_on(self.0.write_at(at, Buffer::copy_of(bytes)))
    }

    /// Makes everything durable that was written before.
    ///
    /// # Errors
    /// `Poisoned` when an earlier flush has failed, and the errors of the image.
    pub fn flush(&self) -> Result<()> {
        block_on(self.0.flush())
    }

    /// Declares that these bytes are no longer needed. Each sector then reads as zero or as before.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn discard(&self, at: u64, len: u64) -> Result<()> {
        block_on(self.0.discard(at, len))
    }

    /// The size of the disk, in bytes.
    pub fn size(&self) -> u64 {
        self.0.size()
    }

    /// Runs a future on the disk's thread, with the image: for snapshots, the map, or many requests at once.
    ///
    /// # Errors
    /// `Closed` when the thread has ended because of a panic.
    pub fn with<T, F>(&self, make: impl FnOnce(Arc<Image>) -> F + Send + 'static) -> Result<T>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        block_on(self.0.with(make))
    }

    /// Closes the image and ends the thread.
    ///
    /// # Errors
    /// As [`Image::close`].
    pub fn close(self) -> Result<()> {
        block_on(self.0.close())
    }
}
