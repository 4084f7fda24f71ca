//! A `Storage` of one's own: an image that is nowhere but in this program's memory, and counts its flushes.
//! A remote object or a block of another program would look the same. The contract is written at the trait.

#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vellum_disk::{
    Buffer, Error, FormatKind, GuestOffset, Image, ImageOffset, ImageSpan, IoMode, LocalFuture, NewImage,
    Result, Storage, StorageLimits, StorageRun, WriteFlags, Zeroes, run,
};

/// No image may grow beyond this, in bytes: a length comes from outside, and is memory here.
const LEN_MAX: u64 = 64 << 20;

/// Bytes in memory.
struct InMemory {
    limits: StorageLimits,
    bytes: Mutex<Vec<u8>>,
    flushes: AtomicUsize,
}

impl InMemory {
    fn new() -> Self {
        // Memory is not a file with holes, and gives nothing back.
        let limits = StorageLimits { discards: false, ..StorageLimits::plain() };
        Self { limits, bytes: Mutex::default(), flushes: AtomicUsize::new(0) }
    }

    /// The bytes. The lock is never held across an `await`.
    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes, which reach at least to the end of this run, and where it is in them.
    fn grown(&self, span: ImageSpan) -> Result<(MutexGuard<'_, Vec<u8>>, Range<usize>)> {
        let mut bytes = self.bytes();
        let range = index(span.start().bytes())?..index(span.end().bytes())?;
        if range.end > bytes.len() {
            bytes.resize(range.end, 0);
        }
        Ok((bytes, range))
    }
}

/// A position as an index, if it is not too large.
fn index(bytes: u64) -> Result<usize> {
    let small = (bytes <= LEN_MAX).then(|| usize::try_from(bytes).ok()).flatten();
    small.ok_or_else(|| Error::invalid(format!("{bytes} is more than the {LEN_MAX} bytes of this storage")))
}

impl Storage for InMemory {
    fn name(&self) -> &str {
        "memory.qcow2"
    }

    fn limits(&self) -> &StorageLimits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.bytes().len() as u64
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let bytes = self.bytes();
            let from = usize::try_from(at.bytes()).unwrap_or(usize::MAX).min(bytes.len());
            let there = &bytes[from..];
            // The buffer may be in several pieces, or be a guest's memory. Behind the end are zeros.
            buffer.fill_with(|done, piece| {
                let rest = there.get(done..).unwrap_or_default();
                let (data, behind) = piece.split_at_mut(piece.len().min(rest.len()));
                data.copy_from_slice(&rest[..data.len()]);
                behind.fill(0);
            });
            drop(bytes);
            Ok(buffer)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let (mut bytes, range) = self.grown(at.span(data.len() as u64))?;
            data.copy_to(0, &mut bytes[range]);
            Ok(())
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Box::pin(std::future::ready(Ok(())))
    }

    fn write_zeroes(&self, span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let (mut bytes, range) = self.grown(span)?;
            bytes[range].fill(0);
            Ok(())
        })
    }

    fn discard(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.bytes().resize(index(len)?, 0);
            Ok(())
        })
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.grown(span).map(drop) })
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        // It knows of no holes: everything up to its end is data.
        let span = span.intersect(ImageOffset::ZERO.span(self.len()));
        let all = (!span.is_empty()).then_some(StorageRun { span, is_data: true });
        Box::pin(std::future::ready(Ok(all.into_iter().collect())))
    }
}

pub(crate) fn main() -> Result<()> {
    let storage = Arc::new(InMemory::new());
    run(IoMode::Auto, async || {
        let new = NewImage::of(FormatKind::Qcow2).size(1 << 30);
        new.create_in(storage.clone()).await?;
        let image = Image::options().open_in(storage.clone()).await?;
        let hello = Buffer::copy_of(b"hello");
        image.disk().write(GuestOffset::new(512 << 20), hello, WriteFlags::default()).await?;
        image.disk().flush().await?;
        image.close().await?;

        let image = Image::options().read_only().open_in(storage.clone()).await?;
        let found = image.disk().read(GuestOffset::new(512 << 20), Buffer::for_overwrite(5)).await?.to_vec();
        println!("a disk of {} bytes has {:?} in its middle", image.size(), String::from_utf8_lossy(&found));
        assert_eq!(found, b"hello");
        image.close().await
    })??;
    let flushes = storage.flushes.load(Ordering::Relaxed);
    assert!(flushes > 0, "the flush of the disk reached the storage");
    println!("the storage holds {} bytes and was flushed {flushes} times", storage.len());
    Ok(())
}
