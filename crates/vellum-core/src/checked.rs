//! Watches a seam: every request that passes from one side to the other is checked against the contract and counted.
//!
//! A request that comes from outside was checked by the export; here a wrong one is refused all the same, so that a
//! format never sees it, and an answer that breaks the contract stops the program before it reaches a guest.
//!
//! 1. Requests stay inside the disk, and a read-only disk gets no writes (contract 8).
//! 2. A read gives back as many bytes as were asked for, in the memory that was lent for them.
//! 3. A map covers the run from its start, in order and without gaps.
//! 4. A future that was polled is polled to its end (contract 10); those that are not are counted as `abandoned`.
//!
//! What it counts are the guest's operations; [`HostTally`](crate::HostTally) counts what they cost the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::disk::{Disk, Extent, Geometry, Room, SharedDisk, WriteFlags, ZeroFlags};
use crate::tally::{IoCounts, IoTally};
use crate::units::{GuestOffset, GuestSpan};
use crate::{Buffer, Error, ErrorKind, LocalFuture, Result};

/// A disk that keeps both sides to the contract.
pub struct CheckedDisk {
    inner: SharedDisk,
    tally: Arc<IoTally>,
    errors: AtomicU64,
    abandoned: AtomicU64,
}

impl CheckedDisk {
    /// Watches everything asked of `inner` through this handle.
    pub fn new(inner: SharedDisk) -> Arc<Self> {
        Arc::new(Self {
            inner,
            tally: Arc::default(),
            errors: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
        })
    }

    /// The guest operations so far.
    pub fn counts(&self) -> IoCounts {
        self.tally.counts()
    }

    /// How many requests failed.
    pub fn errors(&self) -> u64 {
        self.errors.load(Relaxed)
    }

    /// How many requests were dropped half way.
    pub fn abandoned(&self) -> u64 {
        self.abandoned.load(Relaxed)
    }

    fn span(&self, at: GuestOffset, len: usize) -> Result<GuestSpan> {
        let span = GuestSpan::checked(at, len as u64)
            .ok_or_else(|| Error::invalid(format!("a request of {len} bytes at {at} passes 2^64")))?;
        self.inside(span)
    }

    fn inside(&self, span: GuestSpan) -> Result<GuestSpan> {
        let size = self.inner.geometry().size;
        if span.end().bytes() > size {
            return Err(Error::invalid(format!(
                "the request {span} passes the end of the disk at {size:#x}"
            )));
        }
        Ok(span)
    }

    fn writable(&self) -> Result<()> {
        if self.inner.geometry().read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "the disk is read-only"));
        }
        Ok(())
    }

    fn watch<'a, T>(&'a self, future: impl Future<Output = Result<T>> + 'a) -> LocalFuture<'a, Result<T>> {
        Box::pin(async move {
            let mut guard = Abandoned { disk: self, ended: false };
            let result = future.await;
            guard.ended = true;
            if result.is_err() {
                self.errors.fetch_add(1, Relaxed);
            }
            result
        })
    }
}

impl Disk for CheckedDisk {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        let (len, lent_len) = (buffer.len(), buffer.lent_len());
        self.tally.count_read(len as u64);
        self.watch(async move {
            self.span(at, len)?;
            let buffer = self.inner.read(at, buffer).await?;
            assert!(buffer.len() == len, "a read of {len} bytes gave {}", buffer.len());
            assert!(buffer.lent_len() == lent_len, "a read gave back other memory than it got");
            Ok(buffer)
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.tally.count_write(data.len() as u64);
        self.watch(async move {
            self.span(at, data.len())?;
            self.writable()?;
            self.inner.write(at, data, flags).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.tally.count_flush();
        self.watch(self.inner.flush())
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.tally.count_zeroes(span.len());
        self.watch(async move {
            self.inside(span)?;
            self.writable()?;
            self.inner.write_zeroes(span, flags).await
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.tally.count_discard(span.len());
        self.watch(async move {
            self.inside(span)?;
            self.writable()?;
            self.inner.discard(span, flags).await
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.watch(async move {
            self.inside(span)?;
            let extents = self.inner.map(span).await?;
            assert!(span.is_empty() || !extents.is_empty(), "the map of {span} is empty");
            let mut at = span.start();
            for extent in &extents {
                assert!(
                    extent.span.start() == at && !extent.span.is_empty(),
                    "the map of {span} has a gap at {at}: {extent:?}"
                );
                at = extent.span.end();
            }
            assert!(at <= span.end(), "the map of {span} runs on to {at}");
            Ok(extents)
        })
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        self.inner.tend(now)
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        self.inner.room()
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.watch(self.inner.close())
    }
}

/// Exists from a request's first poll on; dropped before the end, it counts the request as abandoned.
struct Abandoned<'a> {
    disk: &'a CheckedDisk,
    ended: bool,
}

impl Drop for Abandoned<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.disk.abandoned.fetch_add(1, Relaxed);
        }
    }
}
