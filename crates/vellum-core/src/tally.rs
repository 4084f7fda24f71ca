//! Counts the requests to a storage, so that the cost of a guest write is visible.
//!
//! A format wraps its storage twice, once for guest data and once for its own metadata ([`HostTally`]); both
//! handles lead to the same file, and the two tallies separate the traffic. A flush covers both; it is
//! counted where it is requested.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::pin::Proof;
use crate::storage::{Limits, SharedStorage, Storage, StorageRun, Zeroes};
use crate::units::{ImageOffset, ImageSpan};
use crate::{Buffer, LocalFuture, Result};

/// Counters that many workers add to.
#[derive(Debug, Default)]
pub struct IoTally {
    reads: AtomicU64,
    writes: AtomicU64,
    flushes: AtomicU64,
    zeroes: AtomicU64,
    discards: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    bytes_zeroed: AtomicU64,
    bytes_discarded: AtomicU64,
}

/// The values of the counters at one moment. Requests are counted when they are made, whether or not they
/// succeed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoCounts {
    /// Read requests.
    pub reads: u64,
    /// Write requests.
    pub writes: u64,
    /// Flush requests.
    pub flushes: u64,
    /// Write-zeroes requests.
    pub zeroes: u64,
    /// Discard requests.
    pub discards: u64,
    /// Bytes requested by reads.
    pub bytes_read: u64,
    /// Bytes given to writes.
    pub bytes_written: u64,
    /// Bytes covered by write-zeroes.
    pub bytes_zeroed: u64,
    /// Bytes covered by discards.
    pub bytes_discarded: u64,
}

impl IoTally {
    /// The current values.
    pub fn counts(&self) -> IoCounts {
        IoCounts {
            reads: self.reads.load(Relaxed),
            writes: self.writes.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            zeroes: self.zeroes.load(Relaxed),
            discards: self.discards.load(Relaxed),
            bytes_read: self.bytes_read.load(Relaxed),
            bytes_written: self.bytes_written.load(Relaxed),
            bytes_zeroed: self.bytes_zeroed.load(Relaxed),
            bytes_discarded: self.bytes_discarded.load(Relaxed),
        }
    }

    /// Counts one read of `bytes`.
    pub fn count_read(&self, bytes: u64) {
        self.reads.fetch_add(1, Relaxed);
        self.bytes_read.fetch_add(bytes, Relaxed);
    }

    /// Counts one write of `bytes`.
    pub fn count_write(&self, bytes: u64) {
        self.writes.fetch_add(1, Relaxed);
        self.bytes_written.fetch_add(bytes, Relaxed);
    }

    /// Counts one flush.
    pub fn count_flush(&self) {
        self.flushes.fetch_add(1, Relaxed);
    }

    /// Counts one write-zeroes of `bytes`.
    pub fn count_zeroes(&self, bytes: u64) {
        self.zeroes.fetch_add(1, Relaxed);
        self.bytes_zeroed.fetch_add(bytes, Relaxed);
    }

    /// Counts one discard of `bytes`.
    pub fn count_discard(&self, bytes: u64) {
        self.discards.fetch_add(1, Relaxed);
        self.bytes_discarded.fetch_add(bytes, Relaxed);
    }
}

impl std::ops::Sub for IoCounts {
    type Output = Self;
    /// The difference to an earlier reading.
    fn sub(self, earlier: Self) -> Self {
        self.combine(earlier, u64::wrapping_sub)
    }
}

impl std::ops::Add for IoCounts {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        self.combine(other, u64::wrapping_add)
    }
}

impl IoCounts {
    fn combine(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            reads: with(self.reads, other.reads),
            writes: with(self.writes, other.writes),
            flushes: with(self.flushes, other.flushes),
            zeroes: with(self.zeroes, other.zeroes),
            discards: with(self.discards, other.discards),
            bytes_read: with(self.bytes_read, other.bytes_read),
            bytes_written: with(self.bytes_written, other.bytes_written),
            bytes_zeroed: with(self.bytes_zeroed, other.bytes_zeroed),
            bytes_discarded: with(self.bytes_discarded, other.bytes_discarded),
        }
    }
}

/// The host traffic of one disk, guest data and metadata apart.
#[derive(Debug, Clone, Default)]
pub struct HostTally {
    /// Requests for guest bytes, and all flushes.
    pub data: Arc<IoTally>,
    /// Requests for the format's own bytes.
    pub metadata: Arc<IoTally>,
    /// Checkpoint writes: they take bytes that a journal has already made durable to their home location, in
    /// the background.
    pub checkpoint: Arc<IoTally>,
    /// Zeros written ahead of need, also in the background.
    pub prealloc: Arc<IoTally>,
}

/// A storage that counts what goes through it.
pub struct Tallied {
    inner: SharedStorage,
    tally: Arc<IoTally>,
}

impl Tallied {
    /// Counts every request to `inner` through this handle in `tally`.
    pub fn shared(inner: SharedStorage, tally: Arc<IoTally>) -> SharedStorage {
        Arc::new(Self { inner, tally })
    }
}

impl Storage for Tallied {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn proof(&self) -> Option<Proof> {
        self.inner.proof()
    }

    fn proof_now(&self) -> LocalFuture<'_, Result<Option<Proof>>> {
        self.inner.proof_now()
    }

    fn changed_at(&self) -> LocalFuture<'_, Result<Option<i128>>> {
        self.inner.changed_at()
    }

    fn description(&self) -> String {
        self.inner.description()
    }

    fn look_at_len(&self) -> LocalFuture<'_, Result<u64>> {
        self.inner.look_at_len()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.tally.count_read(buffer.len() as u64);
        self.inner.read(at, buffer)
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        self.tally.count_write(data.len() as u64);
        self.inner.write(at, data)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.tally.count_flush();
        self.inner.flush()
    }

    fn reconcile(&self, span: ImageSpan) -> LocalFuture<'_, Result<bool>> {
        self.inner.reconcile(span)
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.tally.count_zeroes(span.len());
        self.inner.write_zeroes(span, how)
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.tally.count_discard(span.len());
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
