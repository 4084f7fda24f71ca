//! A medium that behaves like a block device: a fixed length, old bytes everywhere, zeros only by writing
//! them. When the device below grows, a query of its length sees that; or it grows at each query, up to a
//! bound.

use std::sync::atomic::{AtomicU64, Ordering};

use vellum_core::{
    Buffer, ImageOffset, ImageSpan, Limits, LocalFuture, Result, SharedStorage, Storage, Zeroes,
};
use vellum_sim::{ForwardStorage, Forwarding};

pub(crate) struct Device {
    inner: SharedStorage,
    limits: Limits,
    len: AtomicU64,
    /// It gets this length, whatever is below.
    most: Option<u64>,
}

/// How much longer it is with each look: no whole number of units.
const STEP: u64 = 96 << 10;

fn limits_over(inner: &SharedStorage, fast_zeroes: bool) -> Limits {
    let limits = inner.limits().clone();
    Limits { fixed_len: true, grows_zeroed: false, fast_zeroes, discards: false, ..limits }
}

impl Device {
    pub(crate) fn shared(inner: SharedStorage) -> SharedStorage {
        Self::with(inner, false)
    }

    /// One whose zeros may be fast.
    pub(crate) fn with(inner: SharedStorage, fast_zeroes: bool) -> SharedStorage {
        let limits = limits_over(&inner, fast_zeroes);
        let len = AtomicU64::new(inner.len());
        Forwarding::new(Self { inner, limits, len, most: None })
    }

    /// A device of this length that grows when it is queried; below it is already `most`.
    #[allow(dead_code, reason = "each test file uses its part")]
    pub(crate) fn growing(inner: SharedStorage, fast_zeroes: bool, len: u64, most: u64) -> SharedStorage {
        let limits = limits_over(&inner, fast_zeroes);
        assert!(len <= most && most <= inner.len(), "there is as much below");
        Forwarding::new(Self { inner, limits, len: AtomicU64::new(len), most: Some(most) })
    }
}

impl ForwardStorage for Device {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn look_at_len(&self) -> LocalFuture<'_, Result<u64>> {
        let len = self.most.map_or_else(|| self.inner.len(), |most| (self.len() + STEP).min(most));
        self.len.store(len, Ordering::Release);
        Box::pin(std::future::ready(Ok(self.len())))
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        assert!(at.bytes() + data.len() as u64 <= self.len(), "a device has an end");
        self.inner.write(at, data)
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
}
