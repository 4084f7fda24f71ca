//! A request at the disk, from its begin to its answer.
//!
//! The file has looked at everything a request says: a run of bytes lies inside the disk.

use std::sync::atomic::{AtomicU64, Ordering};

use futures_lite::future::yield_now;
use vellum_core::{Buffer, Error, GuestOffset, GuestSpan, Result, SharedDisk, WriteFlags, ZeroFlags};

use super::seek::{Target, seek};

/// Zeros are written so much at a time, so that a file-long request lets others through.
const ZERO_BYTES_MAX: u64 = 1 << 30;

/// What is wanted of the disk.
#[derive(Debug)]
pub(super) enum Operation {
    Read {
        span: GuestSpan,
    },
    Write {
        at: GuestOffset,
        data: Buffer,
        is_synced: bool,
    },
    Sync,
    /// A descriptor is closed: what was written is made durable, if anything was.
    Close,
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
    /// Nothing was found where it is empty.
    Found(Option<GuestOffset>),
}

impl Operation {
    /// The bytes it holds in memory until it is answered.
    pub(super) fn memory_bytes(&self) -> usize {
        match self {
            Self::Read { span } => usize::try_from(span.len()).unwrap_or(usize::MAX),
            Self::Write { data, .. } => data.len(),
            Self::Sync | Self::Close | Self::Zero { .. } | Self::Seek { .. } => 0,
        }
    }
}

/// The disk behind a file.
pub(super) struct Behind {
    pub(super) disk: SharedDisk,
    /// Writes that were answered, also those that failed.
    written: AtomicU64,
    /// So many of these, at least, are durable: a flush that was begun after them has ended well.
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
                    return Err(Error::corrupt("the disk gave fewer bytes than it was asked for"));
                }
                Ok(Outcome::Bytes(bytes))
            }
            Operation::Write { at, data, is_synced } => {
                let len = data.len();
                let result = self.disk.write(at, data, WriteFlags { fua: is_synced }).await;
                if is_synced && result.is_ok() {
                    return Ok(Outcome::Written(len));
                }
                self.wrote(result)?;
                Ok(Outcome::Written(len))
            }
            Operation::Zero { span, may_unmap } => {
                let flags = ZeroFlags { fua: false, may_unmap, fast_only: false };
                let mut rest = span;
                while !rest.is_empty() {
                    let (now, later) = rest.split_at(ZERO_BYTES_MAX);
                    let result = self.disk.write_zeroes(now, flags).await;
                    self.wrote(result)?;
                    rest = later;
                    if !rest.is_empty() {
                        yield_now().await;
                    }
                }
                Ok(Outcome::Done)
            }
            Operation::Sync => self.flush(self.written.load(Ordering::Acquire)).await,
            Operation::Close => {
                let written = self.written.load(Ordering::Acquire);
                // A flush that another has begun does not count before it has ended well.
                if self.flushed.load(Ordering::Acquire) >= written {
                    return Ok(Outcome::Done);
                }
                self.flush(written).await
            }
            Operation::Seek { at, target } => {
                Ok(Outcome::Found(seek(&self.disk, self.disk.geometry().size, at, target).await?))
            }
        }
    }

    /// Makes durable what was answered, so many writes at least.
    async fn flush(&self, written: u64) -> Result<Outcome> {
        self.disk.flush().await?;
        self.flushed.fetch_max(written, Ordering::AcqRel);
        Ok(Outcome::Done)
    }

    /// Before it is answered, and also when it failed: a part of it may have been written.
    fn wrote(&self, result: Result<()>) -> Result<()> {
        self.written.fetch_add(1, Ordering::AcqRel);
        result
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::{Arc, Mutex};
    use std::task::Poll;

    use futures_lite::future::{block_on, poll_once};
    use vellum_core::{CheckedDisk, Disk, ErrorKind, Extent, Geometry, LocalFuture, MemoryDisk};

    use super::*;

    fn behind(size: u64) -> (Arc<CheckedDisk>, Behind) {
        let disk = CheckedDisk::new(MemoryDisk::new(size));
        (disk.clone(), Behind::new(disk))
    }

    fn write(behind: &Behind, at: u64, bytes: &[u8]) {
        let data = Buffer::copy_of(bytes);
        let operation = Operation::Write { at: GuestOffset::new(at), data, is_synced: false };
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
        block_on(behind.perform(Operation::Close)).expect("nothing to do");
        assert_eq!(flushes(), 0);
        write(&behind, 0, b"x");
        block_on(behind.perform(Operation::Close)).expect("a flush");
        block_on(behind.perform(Operation::Close)).expect("nothing to do");
        assert_eq!(flushes(), 1);
        block_on(behind.perform(Operation::Sync)).expect("a flush");
        assert_eq!(flushes(), 2);
        block_on(behind.perform(Operation::Zero { span: GuestOffset::ZERO.span(9), may_unmap: false }))
            .expect("zeros");
        block_on(behind.perform(Operation::Close)).expect("a flush");
        assert_eq!(flushes(), 3);
    }
    /// A disk whose flushes end when the test says so, and as it says.
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
        let mut first = Box::pin(behind.perform(Operation::Close));
        let mut second = Box::pin(behind.perform(Operation::Close));
        assert!(block_on(poll_once(&mut first)).is_none());
        assert!(block_on(poll_once(&mut second)).is_none(), "the flush of the first has not ended");
        disk.end_one(Err(Error::new(ErrorKind::NoSpace, "no room")));
        assert!(matches!(block_on(poll_once(&mut first)), Some(Err(_))));
        assert!(block_on(poll_once(&mut second)).is_none(), "and it failed");
        // Written after the second began: its flush does not cover that.
        write(&behind, 9, b"y");
        disk.end_one(Ok(()));
        assert!(matches!(block_on(poll_once(&mut second)), Some(Ok(_))));
        let mut third = Box::pin(behind.perform(Operation::Close));
        assert!(block_on(poll_once(&mut third)).is_none(), "there is something to flush");
        disk.end_one(Ok(()));
        assert!(matches!(block_on(third), Ok(Outcome::Done)));
        assert!(matches!(block_on(behind.perform(Operation::Close)), Ok(Outcome::Done)), "all is durable");
    }
}
