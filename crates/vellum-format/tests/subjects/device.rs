//! A medium that behaves as a block device does: a fixed length, old bytes everywhere, zeros only by writing them. When what
//! is below becomes longer, that is seen by who looks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_core::{
    Buffer, ImageOffset, ImageSpan, Limits, LocalFuture, Result, SharedStorage, Storage, StorageRun, Zeroes,
};

pub(crate) struct Device {
    inner: SharedStorage,
    limits: Limits,
    len: AtomicU64,
}

impl Device {
    pub(crate) fn shared(inner: SharedStorage) -> SharedStorage {
        Self::with(inner, false)
    }

    /// One whose zeros may be fast.
    pub(crate) fn with(inner: SharedStorage, fast_zeroes: bool) -> SharedStorage {
        let limits = Limits {
            fixed_len: true,
            grows_zeroed: false,
            fast_zeroes,
            discards: false,
            ..inner.limits().clone()
        };
        let len = AtomicU64::new(inner.len());
        Arc::new(Self { inner, limits, len })
    }
}

impl Storage for Device {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn look_at_len(&self) -> LocalFuture<'_, Result<u64>> {
        self.len.store(self.inner.len(), Ordering::Release);
        Box::pin(std::future::ready(Ok(self.len())))
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.inner.read(at, buffer)
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        assert!(at.bytes() + data.len() as u64 <= self.len(), "a device has an end");
        self.inner.write(at, data)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        assert!(span.end().bytes() <= self.len(), "a device has an end");
        self.inner.write_zeroes(span, how)
    }

    fn discard(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        panic!("a device has one length, not {len}");
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.inner.preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.inner.runs(span)
    }
}
