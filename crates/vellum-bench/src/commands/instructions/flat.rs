//! A storage in memory whose blocks cost nothing when they are first written, so that only the engine is
//! counted.

use std::sync::{Mutex, MutexGuard};

use vellum_core::{
    Buffer, Error, ErrorKind, ImageOffset, ImageSpan, Limits, LocalFuture, Result, Storage, StorageRun,
    Zeroes, lock,
};

/// One run of memory, which the kernel zeroes when it is first used.
pub(super) struct Flat {
    limits: Limits,
    bytes: Mutex<Bytes>,
}

struct Bytes {
    room: Vec<u8>,
    len: usize,
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("the image fits the address space")
}

impl Bytes {
    /// The part of the run before the end.
    fn before_end(&mut self, span: ImageSpan) -> &mut [u8] {
        let end = to_usize(span.end().bytes()).min(self.len);
        let start = to_usize(span.start().bytes()).min(end);
        &mut self.room[start..end]
    }

    /// The run, which the storage grows to hold.
    fn grown(&mut self, at: ImageOffset, len: usize) -> Result<&mut [u8]> {
        let start = to_usize(at.bytes());
        let end = start + len;
        let full = || Error::new(ErrorKind::NoSpace, "the memory of the disk is full");
        let run = self.room.get_mut(start..end).ok_or_else(full)?;
        self.len = self.len.max(end);
        Ok(run)
    }
}

impl Flat {
    /// An empty one that grows up to this many bytes.
    pub(super) fn with_room_for(bytes: u64) -> Self {
        let bytes = Bytes { room: vec![0; to_usize(bytes)], len: 0 };
        Self { limits: Limits::plain(), bytes: Mutex::new(bytes) }
    }

    fn lock(&self) -> MutexGuard<'_, Bytes> {
        lock(&self.bytes)
    }
}

impl Storage for Flat {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.lock().len as u64
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let mut bytes = self.lock();
            buffer.fill_with(|from, piece| {
                let found = bytes.before_end((at + from as u64).span(piece.len() as u64));
                let (known, past_end) = piece.split_at_mut(found.len());
                known.copy_from_slice(found);
                past_end.fill(0);
            });
            drop(bytes);
            Ok(buffer)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let data = data.owned();
            let mut bytes = self.lock();
            let mut at = at;
            for piece in data.pieces() {
                bytes.grown(at, piece.len())?.copy_from_slice(piece);
                at += piece.len() as u64;
            }
            Ok(())
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn write_zeroes(&self, span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut bytes = self.lock();
            bytes.before_end(span).fill(0);
            // Behind the end it is zero already.
            bytes.grown(span.start(), to_usize(span.len())).map(drop)
        })
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.lock().before_end(span).fill(0);
        Box::pin(std::future::ready(Ok(())))
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut bytes = self.lock();
            let end = ImageOffset::new(bytes.len as u64);
            if let Some(cut) = end.bytes().checked_sub(len) {
                bytes.before_end(ImageOffset::new(len).span(cut)).fill(0);
                bytes.len = to_usize(len);
            } else {
                bytes.grown(ImageOffset::ZERO, to_usize(len))?;
            }
            Ok(())
        })
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.lock().grown(span.start(), to_usize(span.len())).map(drop) })
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        Box::pin(async move {
            let len = self.lock().before_end(span).len() as u64;
            let run = StorageRun { span: span.start().span(len), is_data: true };
            Ok(if len == 0 { Vec::new() } else { vec![run] })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::future::ready;
    use std::sync::Arc;

    use futures_lite::future::block_on;
    use vellum_core::SharedStorage;
    use vellum_core::contract::{self, StorageFixture};

    use super::*;

    #[derive(Default)]
    struct Fixture(RefCell<Option<Arc<Flat>>>);

    impl StorageFixture for Fixture {
        fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>> {
            let flat = Arc::new(Flat::with_room_for(64 << 20));
            self.0.replace(Some(flat.clone()));
            Box::pin(async move {
                flat.set_len(len).await?;
                Ok(flat as SharedStorage)
            })
        }

        fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>> {
            let flat = self.0.borrow().clone().expect("made before");
            Box::pin(ready(Ok(flat as SharedStorage)))
        }
    }

    #[test]
    fn it_keeps_the_contract_of_storages() {
        block_on(async {
            contract::storage(&Fixture::default()).await;
            contract::storage_random_operations(&Fixture::default(), 7, 200).await;
        });
    }
}
