//! Passes every request on in lent memory, as a guest's requests arrive: for the suites, over any disk or
//! storage.
//!
//! ```text
//!   suite ── its own buffer ──► here ── runs of shared bytes, cut anywhere ──► what is tested
//! ```
//!
//! 1. A read must fill the memory that was lent for it: the answer is what is found there.
//! 2. The memory of a write is scribbled over as soon as the write has been answered: it must not be read any
//!    more.
//!
//! Left out: memory that changes while a write is in flight, because then the result of a later read is not
//! defined.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::buffer::SharedBytes;
use crate::clock::Random;
use crate::disk::{
    Disk, Extent, Filled, Filling, Geometry, MergedExtent, PlaceKind, Room, SharedDisk, WriteFlags, ZeroFlags,
};
use crate::lock;
use crate::storage::{Limits, SharedStorage, Storage, StorageRun, Zeroes};
use crate::units::{GuestOffset, GuestSpan, ImageOffset, ImageSpan};
use crate::{Buffer, LocalFuture, Result};

/// Something whose requests come in lent memory.
pub struct Lending<T: ?Sized> {
    random: Mutex<Random>,
    inner: Arc<T>,
}

/// Memory for one request.
struct Loan {
    memory: Arc<SharedBytes>,
    runs: Vec<(usize, usize)>,
}

impl Loan {
    fn buffer(&self) -> Buffer {
        self.memory.lend(&self.runs)
    }

    /// The current content, in the buffer that came with the request.
    fn fetch(&self, mut buffer: Buffer) -> Buffer {
        buffer.copy_from(0, &self.buffer().to_vec());
        buffer
    }
}

impl<T: ?Sized> Lending<T> {
    /// Requests of this disk or storage use lent memory, which is cut at random.
    pub fn new(inner: Arc<T>, seed: u64) -> Arc<Self> {
        Arc::new(Self { random: Mutex::new(Random::from_seed(seed)), inner })
    }

    /// Whole pages, or runs that begin and end anywhere.
    fn loan(&self, len: usize) -> Loan {
        let mut random = lock(&self.random);
        let align = *random.pick(&[1, 512, 4096, 4096]);
        let (mut at, mut left, mut runs) = (0, len, Vec::new());
        while left > 0 {
            at += random.index(3) * align;
            let cut = if random.one_in(3) { (1 + random.index(left)).next_multiple_of(align) } else { left };
            runs.push((at, cut.min(left)));
            at += cut;
            left -= cut.min(left);
        }
        Loan { memory: SharedBytes::zeroed(at), runs }
    }

    /// Memory that holds these bytes.
    fn loan_of(&self, data: &Buffer) -> Loan {
        let loan = self.loan(data.len());
        loan.buffer().copy_from(0, &data.to_vec());
        loan
    }
}

/// Overwrites the memory of a request that has been answered.
fn end(loan: &Loan) {
    loan.buffer().fill(0xB5);
}

impl Disk for Lending<dyn Disk> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let loan = self.loan(buffer.len());
            self.inner.read(at, loan.buffer()).await?;
            Ok(loan.fetch(buffer))
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let loan = self.loan_of(&data);
            let result = self.inner.write(at, loan.buffer(), flags).await;
            end(&loan);
            result
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.inner.write_zeroes(span, flags)
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.inner.discard(span, flags)
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.inner.map(span)
    }

    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        self.inner.map_whole(span)
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        self.inner.tend(now)
    }

    fn filling(&self) -> Option<Filling> {
        self.inner.filling()
    }

    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        self.inner.fill(at, data)
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        self.inner.room()
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.close()
    }
}

impl Storage for Lending<dyn Storage> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn look_at_len(&self) -> LocalFuture<'_, Result<u64>> {
        self.inner.look_at_len()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let loan = self.loan(buffer.len());
            self.inner.read(at, loan.buffer()).await?;
            Ok(loan.fetch(buffer))
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let loan = self.loan_of(&data);
            let result = self.inner.write(at, loan.buffer()).await;
            end(&loan);
            result
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn reconcile(&self, span: ImageSpan) -> LocalFuture<'_, Result<bool>> {
        self.inner.reconcile(span)
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.inner.write_zeroes(span, how)
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

/// Lends to the storages of a fixture.
pub(crate) fn lend_storage(inner: SharedStorage) -> SharedStorage {
    Lending::new(inner, 11)
}

/// Lends to the disks of a fixture.
pub(crate) fn lend_disk(inner: SharedDisk) -> SharedDisk {
    Lending::new(inner, 12)
}
