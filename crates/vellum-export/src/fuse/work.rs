//! A request at the disk, from its start to its answer.
//!
//! The file has validated everything in a request: each range lies inside the disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_core::{
    Buffer, Error, GuestOffset, GuestSpan, Result, SharedDisk, Witness, WriteFlags, ZeroFlags,
};

use super::seek::{Target, seek};
use crate::slices::in_slices;

/// What an open descriptor has seen of lost writes; `None` if no writes are ever lost.
pub(super) type Handle = Option<Arc<Witness>>;

/// The request to the disk.
#[derive(Debug)]
pub(super) enum Operation {
    Read {
        span: GuestSpan,
    },
    Write {
        at: GuestOffset,
        data: Buffer,
        /// It is durable when it is answered, checked against the losses that the descriptor has seen.
        synced: Option<Handle>,
    },
    Sync(Handle),
    /// A descriptor is closed: what was written is made durable, if anything was.
    Close(Handle),
    Zero {
        span: GuestSpan,
        may_unmap: bool,
    },
    Seek {
        at: GuestOffset,
        target: Target,
    },
}

/// What came of it.
#[derive(Debug)]
pub(super) enum Outcome {
    Bytes(Buffer),
    Written(usize),
    Done,
    /// `None` if nothing was found.
    Found(Option<GuestOffset>),
}

impl Operation {
    /// The bytes it holds in memory until it is answered.
    pub(super) fn memory_bytes(&self) -> usize {
        match self {
            Self::Read { span } => usize::try_from(span.len()).unwrap_or(usize::MAX),
            Self::Write { data, .. } => data.len(),
            Self::Sync(_) | Self::Close(_) | Self::Zero { .. } | Self::Seek { .. } => 0,
        }
    }
}

/// The disk behind a file.
pub(super) struct Behind {
    pub(super) disk: SharedDisk,
    /// Writes that were answered, also those that failed.
    written: AtomicU64,
    /// At least this many of these writes are durable: a flush that was begun after them has succeeded.
    flushed: AtomicU64,
}

impl Behind {
    pub(super) fn new(disk: SharedDisk) -> Self {
        Self { disk, written: AtomicU64::new(0), flushed: AtomicU64::new(0) }
    }

    /// Does what is wanted.
    pub(super) async fn perform(&self, operation: Operation) -> Result<Outcome> {
        match operation {
            Operation::Read { span } => {
                let len = usize::try_from(span.len()).expect("a read fits the address space");
                let bytes = self.disk.read(span.start(), Buffer::for_overwrite(len)).await?;
                if bytes.len() != len {
                    return Err(Error::corrupt("the disk returned fewer bytes than requested"));
                }
                Ok(Outcome::Bytes(bytes))
            }
            Operation::Write { at, data, synced } => {
                let (len, is_synced) = (data.len(), synced.is_some());
                let result = self.disk.write(at, data, WriteFlags { fua: is_synced });
                let result = promised(synced.as_ref().and_then(Option::as_ref), result).await;
                if is_synced && result.is_ok() {
                    return Ok(Outcome::Written(len));
                }
                self.wrote(result)?;
                Ok(Outcome::Written(len))
            }
            Operation::Zero { span, may_unmap } => {
                let flags = ZeroFlags { fua: false, may_unmap, fast_only: false };
                let result = in_slices(span, |slice| self.disk.write_zeroes(slice, flags), || Ok(())).await;
                self.wrote(result)?;
                Ok(Outcome::Done)
            }
            Operation::Sync(handle) => {
                let written = self.written.load(Ordering::Acquire);
                promised(handle.as_ref(), self.flush(written)).await?;
                Ok(Outcome::Done)
            }
            Operation::Close(handle) => {
                // Few programs check the result of close, so it does not count as a report.
                handle.as_ref().map_or(Ok(()), |witness| witness.peek())?;
                let written = self.written.load(Ordering::Acquire);
                // A flush that another request has begun counts only once it has succeeded.
                if self.flushed.load(Ordering::Acquire) >= written {
                    return Ok(Outcome::Done);
                }
                self.flush(written).await?;
                handle.as_ref().map_or(Ok(()), |witness| witness.peek())?;
                Ok(Outcome::Done)
            }
            Operation::Seek { at, target } => {
                Ok(Outcome::Found(seek(&self.disk, self.disk.geometry().size, at, target).await?))
            }
        }
    }

    /// Makes durable all writes that were answered, at least this many.
    async fn flush(&self, written: u64) -> Result<()> {
        self.disk.flush().await?;
        self.flushed.fetch_max(written, Ordering::AcqRel);
        Ok(())
    }

    /// Before it is answered, and also when it failed: a part of it may have been written.
    fn wrote(&self, result: Result<()>) -> Result<()> {
        self.written.fetch_add(1, Ordering::AcqRel);
        result
    }
}

/// Does what promises durability to a descriptor.
async fn promised(witness: Option<&Arc<Witness>>, request: impl Future<Output = Result<()>>) -> Result<()> {
    match witness {
        Some(witness) => witness.promise(request).await,
        None => request.await,
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::Mutex;
    use std::task::Poll;

    use futures_lite::future::{block_on, poll_once};
    use vellum_core::{CheckedDisk, Disk, ErrorKind, Extent, Geometry, LocalFuture, Losses, MemoryDisk};

    use super::*;

    fn behind(size: u64) -> (Arc<CheckedDisk>, Behind) {
        let disk = CheckedDisk::new(MemoryDisk::new(size));
        (disk.clone(), Behind::new(disk))
    }

    fn write(behind: &Behind, at: u64, bytes: &[u8]) {
        let data = Buffer::copy_of(bytes);
        let operation = Operation::Write { at: GuestOffset::new(at), data, synced: None };
        let Ok(Outcome::Written(len)) = block_on(behind.perform(operation)) else { panic!("a write") };
        assert_eq!(len, bytes.len());
    }

    #[test]
    fn what_was_punched_reads_as_zero() {
        let (_, behind) = behind(1 << 20);
        write(&behind, 4096, &[5; 8192]);
        let span = GuestOffset::new(6000).span(4000);
        block_on(behind.perform(Operation::Zero { span, may_unmap: true })).expect("zeros");
        let all = Operation::Read { span: GuestOffset::ZERO.span(16384) };
        let Ok(Outcome::Bytes(bytes)) = block_on(behind.perform(all)) else { panic!("a read") };
        let should =
            |at: usize| if (4096..6000).contains(&at) || (10_000..12_288).contains(&at) { 5 } else { 0 };
        assert!(bytes.to_vec().iter().enumerate().all(|(at, byte)| *byte == should(at)));
    }

    #[test]
    fn closing_flushes_what_was_written_and_only_then() {
        let (disk, behind) = behind(1 << 20);
        let flushes = || disk.counts().flushes;
        block_on(behind.perform(Operation::Close(None))).expect("nothing to do");
        assert_eq!(flushes(), 0);
        write(&behind, 0, b"x");
        block_on(behind.perform(Operation::Close(None))).expect("a flush");
        block_on(behind.perform(Operation::Close(None))).expect("nothing to do");
        assert_eq!(flushes(), 1);
        block_on(behind.perform(Operation::Sync(None))).expect("a flush");
        assert_eq!(flushes(), 2);
        block_on(behind.perform(Operation::Zero { span: GuestOffset::ZERO.span(9), may_unmap: false }))
            .expect("zeros");
        block_on(behind.perform(Operation::Close(None))).expect("a flush");
        assert_eq!(flushes(), 3);
    }

    #[test]
    fn each_descriptor_hears_of_lost_writes_and_closing_tells_without_end() {
        let losses = Arc::<Losses>::default();
        let (_, behind) = behind(1 << 20);
        let [one, other] = [Some(losses.witness()), Some(losses.witness())];
        let ask = |operation| block_on(behind.perform(operation)).is_ok();
        write(&behind, 0, b"x");
        losses.grow();
        assert!(!ask(Operation::Sync(one.clone())), "what it wrote may be gone");
        assert!(ask(Operation::Sync(one.clone())), "it has been told");
        assert!(ask(Operation::Close(one)));
        for _ in 0..2 {
            assert!(!ask(Operation::Close(other.clone())), "though a flush has ended well since");
        }
        let data = || Buffer::copy_of(b"x");
        let plain = Operation::Write { at: GuestOffset::ZERO, data: data(), synced: None };
        assert!(ask(plain), "it promises nothing");
        let synced = || Operation::Write { at: GuestOffset::ZERO, data: data(), synced: Some(other.clone()) };
        assert!(!ask(synced()) && ask(synced()), "told once");
        assert!(ask(Operation::Close(other)));
    }

    /// A disk whose flushes complete when the test says so, with the result that it sets.
    struct Waiting {
        disk: SharedDisk,
        ends: Mutex<Vec<Result<()>>>,
    }

    impl Waiting {
        fn end_one(&self, result: Result<()>) {
            self.ends.lock().expect("the test's").push(result);
        }
    }

    impl Disk for Waiting {
        fn geometry(&self) -> Geometry {
            self.disk.geometry()
        }

        fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
            self.disk.read(at, buffer)
        }

        fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            self.disk.write(at, data, flags)
        }

        fn flush(&self) -> LocalFuture<'_, Result<()>> {
            Box::pin(poll_fn(|_| {
                self.ends.lock().expect("the test's").pop().map_or(Poll::Pending, Poll::Ready)
            }))
        }

        fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
            self.disk.write_zeroes(span, flags)
        }

        fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            self.disk.discard(span, flags)
        }

        fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
            self.disk.map(span)
        }

        fn close(&self) -> LocalFuture<'_, Result<()>> {
            self.disk.close()
        }
    }

    #[test]
    fn closing_waits_for_a_flush_that_ends_well_whoever_began_one() {
        let disk = Arc::new(Waiting { disk: MemoryDisk::new(1 << 20), ends: Mutex::new(Vec::new()) });
        let behind = Behind::new(disk.clone());
        write(&behind, 0, b"x");
        let mut first = Box::pin(behind.perform(Operation::Close(None)));
        let mut second = Box::pin(behind.perform(Operation::Close(None)));
        assert!(block_on(poll_once(&mut first)).is_none());
        assert!(block_on(poll_once(&mut second)).is_none(), "the flush of the first has not ended");
        disk.end_one(Err(Error::new(ErrorKind::NoSpace, "no room")));
        assert!(matches!(block_on(poll_once(&mut first)), Some(Err(_))));
        assert!(block_on(poll_once(&mut second)).is_none(), "and it failed");
        // Written after the second began: its flush does not cover that.
        write(&behind, 9, b"y");
        disk.end_one(Ok(()));
        assert!(matches!(block_on(poll_once(&mut second)), Some(Ok(_))));
        let mut third = Box::pin(behind.perform(Operation::Close(None)));
        assert!(block_on(poll_once(&mut third)).is_none(), "there is something to flush");
        disk.end_one(Ok(()));
        assert!(matches!(block_on(third), Ok(Outcome::Done)));
        assert!(
            matches!(block_on(behind.perform(Operation::Close(None))), Ok(Outcome::Done)),
            "all is durable"
        );
    }
}
