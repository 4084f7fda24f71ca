//! A forgetful drive with a short memory: packed blocks that were written last are read as they were written.
//!
//! A recovery looks for packed blocks in zones that are open, and nowhere else. So it is enough to remember as many as those can have, and an
//! image of any size fits in memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use vellum_core::{
    Buffer, ImageOffset, ImageSpan, IoCounts, Limits, LocalFuture, Result, Storage, StorageRun, Zeroes,
};
use vellum_sim::model::ForgetfulDrive;

/// A forgetful drive that remembers blocks of guest data that are not one byte again and again: packed ones, and noise; the last
/// ones written.
pub(super) struct Recent {
    inner: Arc<ForgetfulDrive>,
    /// What lies below is the inner drive's to keep.
    kept: u64,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    at: BTreeMap<u64, Vec<u8>>,
    /// As they came.
    order: VecDeque<u64>,
}

const BLOCK: usize = 4096;
/// More than the packed blocks of all zones that are open at a time.
const RECENT_MAX: usize = 16 << 10;

impl Recent {
    pub(super) fn over(inner: Arc<ForgetfulDrive>, kept: u64) -> Arc<Self> {
        Arc::new(Self { inner, kept, blocks: Mutex::default() })
    }

    /// What has been asked of it.
    pub(super) fn counts(&self) -> IoCounts {
        self.inner.counts()
    }

    fn note(&self, at: ImageOffset, data: &Buffer) {
        if at.bytes() < self.kept || !at.bytes().is_multiple_of(BLOCK as u64) {
            return;
        }
        let mut guard = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let Blocks { at: blocks, order } = &mut *guard;
        let mut place = at.bytes();
        let bytes = data.pieces().flat_map(|piece| piece.chunks(BLOCK));
        for block in bytes {
            if block.iter().any(|byte| *byte != block[0]) && block.len() == BLOCK {
                if blocks.insert(place, block.to_vec()).is_none() {
                    order.push_back(place);
                }
                if order.len() > RECENT_MAX {
                    let oldest = order.pop_front().expect("there are many");
                    blocks.remove(&oldest);
                }
            } else {
                blocks.remove(&place);
            }
            place += block.len() as u64;
        }
    }
}

impl Storage for Recent {
    fn name(&self) -> &'static str {
        "drive"
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let mut buffer = self.inner.read(at, buffer).await?;
            let end = at.bytes() + buffer.len() as u64;
            let guard = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
            for (place, block) in guard.at.range(at.bytes()..end) {
                let within = usize::try_from(place - at.bytes()).expect("within the buffer");
                let len = BLOCK.min(buffer.len() - within);
                buffer.copy_from(within, &block[..len]);
            }
            drop(guard);
            Ok(buffer)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        self.note(at, &data);
        self.inner.write(at, data)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        // A host that makes zeros by itself writes none.
        match self.limits().fast_zeroes {
            true => self.inner.discard(span),
            false => self.inner.write_zeroes(span, how),
        }
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
