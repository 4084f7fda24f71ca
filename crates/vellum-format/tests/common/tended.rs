//! A disk that is tended while it is used.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_lite::future::zip;
use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, LocalFuture, Result, SharedDisk, WriteFlags, ZeroFlags,
};
use vellum_sim::{ForwardDisk, Forwarding};

/// Beside each request the disk is tended; what that begins comes first.
pub(crate) struct Tended {
    inner: SharedDisk,
    /// Moves with each request.
    millis: AtomicU64,
    /// So much time passes from one request to the next, in milliseconds.
    step: u64,
}

/// As when a server is busy.
const STEP: u64 = 30;
/// As when it is so seldom that each time is a quiet one.
const QUIET_STEP: u64 = 3000;

impl Tended {
    pub(crate) fn shared(inner: SharedDisk) -> SharedDisk {
        Forwarding::new(Self { inner, millis: AtomicU64::new(0), step: STEP })
    }

    pub(crate) fn in_quiet_times(inner: SharedDisk) -> SharedDisk {
        Forwarding::new(Self { inner, millis: AtomicU64::new(0), step: QUIET_STEP })
    }

    fn beside<'a, T: 'a>(&'a self, request: LocalFuture<'a, Result<T>>) -> LocalFuture<'a, Result<T>> {
        let now = Duration::from_millis(self.millis.fetch_add(self.step, Ordering::Relaxed));
        Box::pin(async move {
            let tending = async {
                for _ in 0..4 {
                    if !self.inner.tend(now).await {
                        break;
                    }
                }
            };
            zip(tending, request).await.1
        })
    }
}

impl ForwardDisk for Tended {
    fn inner(&self) -> &dyn Disk {
        &*self.inner
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.beside(self.inner.write(at, data, flags))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.beside(self.inner.flush())
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.beside(self.inner.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.beside(self.inner.discard(span, flags))
    }
}
