//! A disk on a thread of its own, for `async` code on any executor.
//!
//! ```text
//!   any thread:   read_at ──▶ a closure to the worker's inbox        ◀── its value, to whoever awaits it
//!   its thread:               the request's future, polled to its end ──▶
//! ```
//!
//! 1. The futures are `Send`. Dropping one does not stop its request, which is completed on the thread.
//! 2. [`Disk::close`] waits for such requests before the image is closed.
//! 3. Dropping the disk closes the image, too, and blocks the thread meanwhile. An error is lost then, so
//!    that [`Disk::close`] is better.
//! 4. After a panic on its thread every call fails with `Closed`, and the image is in the state after a crash.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use event_listener::Event;
use futures_lite::future::block_on;
use vellum_core::{Buffer, Error, GuestOffset, GuestSpan, Result, WriteFlags};
use vellum_io::{IoMode, Workers, WorkersConfig};

use crate::Image;

/// An open image on a thread of its own.
pub struct Disk {
    /// Gone once it is closed.
    open: Option<Open>,
}

struct Open {
    image: Arc<Image>,
    workers: Workers,
    in_flight: Arc<InFlight>,
}

impl Disk {
    /// Starts the thread and opens the image there: `open` is called on it, with `Image::open(path)` or one
    /// of the others. Blocks for a moment while the thread starts.
    ///
    /// # Errors
    /// Those of `open`; `Io` when the host cannot start a thread.
    pub async fn start<F>(open: impl FnOnce() -> F + Send + 'static) -> Result<Self>
    where
        F: Future<Output = Result<Image>> + 'static,
    {
        let config = WorkersConfig { threads: 1, mode: IoMode::Auto, ..WorkersConfig::default() };
        let workers = Workers::start(config)?;
        let image = Arc::new(workers.spawn(0, open).await??);
        Ok(Self { open: Some(Open { image, workers, in_flight: Arc::default() }) })
    }

    /// Fills the buffer with the bytes from this position on, and returns it.
    ///
    /// # Errors
    /// `Invalid` past the end of the disk, and the errors of the image.
    pub async fn read_at(&self, at: u64, buffer: Buffer) -> Result<Buffer> {
        self.with(async move |image| image.disk().read(GuestOffset::new(at), buffer).await).await?
    }

    /// Writes the buffer's bytes from this position on. They are durable after the next
    /// [`flush`](Self::flush).
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at); `ReadOnly` for an image that was opened so.
    pub async fn write_at(&self, at: u64, data: Buffer) -> Result<()> {
        let flags = WriteFlags::default();
        self.with(async move |image| image.disk().write(GuestOffset::new(at), data, flags).await).await?
    }

    /// Makes everything durable that was written before.
    ///
    /// # Errors
    /// `Poisoned` when an earlier flush has failed, and the errors of the image.
    pub async fn flush(&self) -> Result<()> {
        self.with(async |image| image.disk().flush().await).await?
    }

    /// Declares that these bytes are no longer needed. Each sector then reads as zero or as before.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub async fn discard(&self, at: u64, len: u64) -> Result<()> {
        let past_the_end = || Error::invalid(format!("{len} bytes from {at} on end behind any disk"));
        let span = GuestSpan::checked(GuestOffset::new(at), len).ok_or_else(past_the_end)?;
        self.with(async move |image| image.disk().discard(span, WriteFlags::default()).await).await?
    }

    /// The size of the disk, in bytes.
    pub fn size(&self) -> u64 {
        self.open().image.size()
    }

    /// Runs a future on the disk's thread, with the image: for snapshots, the map, or many requests at once.
    ///
    /// # Errors
    /// `Closed` when the thread has ended because of a panic.
    pub async fn with<T, F>(&self, make: impl FnOnce(Arc<Image>) -> F + Send + 'static) -> Result<T>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let Open { image, workers, in_flight } = self.open();
        let (image, request) = (image.clone(), InFlight::enter(in_flight));
        let task = workers.spawn(0, move || {
            let future = make(image);
            async move {
                let _request = request;
                future.await
            }
        });
        task.await
    }

    /// Waits for the requests in flight, closes the image and ends the thread. This future must be polled to
    /// its end: if it is dropped before, the image is in the state after a crash.
    ///
    /// # Errors
    /// As [`Image::close`].
    pub async fn close(mut self) -> Result<()> {
        match self.open.take() {
            Some(open) => open.close().await,
            None => Ok(()),
        }
    }

    fn open(&self) -> &Open {
        self.open.as_ref().expect("only `close` and `drop` take it, and both end the disk")
    }
}

impl Open {
    async fn close(self) -> Result<()> {
        let Self { image, workers, in_flight } = self;
        let closing = workers.spawn(0, move || async move {
            in_flight.none().await;
            image.shut().await
        });
        closing.await?
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Some(open) = self.open.take() {
            // A caller that wants the error calls `close`.
            drop(block_on(open.close()));
        }
    }
}

/// Counts requests that have been made and have not ended.
#[derive(Default)]
struct InFlight {
    count: AtomicUsize,
    ended: Event,
}

impl InFlight {
    fn enter(this: &Arc<Self>) -> Request {
        this.count.fetch_add(1, Ordering::AcqRel);
        Request(this.clone())
    }

    /// Waits until there is none.
    async fn none(&self) {
        while self.count.load(Ordering::Acquire) > 0 {
            let ended = self.ended.listen();
            if self.count.load(Ordering::Acquire) > 0 {
                ended.await;
            }
        }
    }
}

/// One of them.
struct Request(Arc<InFlight>);

impl Drop for Request {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
        self.0.ended.notify(usize::MAX);
    }
}
