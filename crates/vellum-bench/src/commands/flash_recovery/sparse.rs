//! A storage that drops what is written behind some place: a full cache in a file that takes little space. What was dropped
//! reads as zeros.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vellum_core::{
    Buffer, ImageOffset, ImageSpan, Limits, LocalFuture, Result, SharedStorage, Storage, StorageRun, Zeroes,
};

pub(super) struct Sparse {
    inner: SharedStorage,
    /// What is written from here on is dropped.
    from: u64,
    drops: AtomicBool,
    bytes_read: AtomicU64,
}

impl Sparse {
    pub(super) fn dropping(inner: SharedStorage, from: u64) -> Arc<Self> {
        Arc::new(Self { inner, from, drops: AtomicBool::new(true), bytes_read: AtomicU64::new(0) })
    }

    /// How much was read from there on.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Drops nothing from now on.
    pub(super) fn keep_all(&self) {
        self.drops.store(false, Ordering::Relaxed);
    }

    fn is_dropped(&self, at: ImageOffset) -> bool {
        self.drops.load(Ordering::Relaxed) && at.bytes() >= self.from
    }
}

impl Storage for Sparse {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        if at.bytes() >= self.from {
            self.bytes_read.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        }
        self.inner.read(at, buffer)
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        match self.is_dropped(at) {
            true => Box::pin(std::future::ready(Ok(()))),
            false => self.inner.write(at, data),
        }
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        match self.is_dropped(span.start()) {
            true => Box::pin(std::future::ready(Ok(()))),
            false => self.inner.write_zeroes(span, how),
        }
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.inner.discard(span)
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.inner.set_len(len)
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.inner.preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.inner.runs(span)
    }
}
