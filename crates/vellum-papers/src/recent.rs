//! A forgetful drive with a short memory: the packed blocks that were written last can be read as they were
//! written, and all are counted.
//!
//! A recovery looks for packed blocks in open zones, and a guest that reads gigabytes back needs those of
//! these gigabytes. So it is enough to remember the last ones, without the zeros at their end, and an image
//! of any size fits in memory.
//!
//! A block counts as packed when it is not one repeated byte and its second half is zero: guests here write
//! one byte, or noise.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vellum_core::{
    Buffer, ImageOffset, ImageSpan, IoCounts, Limits, LocalFuture, Result, Storage, StorageRun, Zeroes, lock,
    try_join_all,
};

use crate::model::ForgetfulDrive;

/// A forgetful drive that remembers packed blocks: the last ones written.
pub(super) struct Recent {
    inner: Arc<ForgetfulDrive>,
    /// What is below is kept by the inner drive.
    kept: u64,
    /// Where guest data begins: what is written before is not counted.
    guest_data: AtomicU64,
    /// Bytes of it that were read.
    guest_read: AtomicU64,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    at: BTreeMap<u64, Vec<u8>>,
    /// As they came.
    order: VecDeque<u64>,
    /// How many were written.
    packed: u64,
}

const BLOCK: usize = 4096;
/// Those of 16 GiB: more than all zones have that are open at a time, and than a guest here reads back.
const RECENT_MAX: usize = 256 << 10;
/// The longest request that a host's block layer passes on.
const REQUEST_MAX: u64 = 512 << 10;

impl Recent {
    pub(super) fn over(inner: Arc<ForgetfulDrive>, kept: u64) -> Arc<Self> {
        let guest_data = AtomicU64::new(u64::MAX);
        Arc::new(Self { inner, kept, guest_data, guest_read: AtomicU64::new(0), blocks: Mutex::default() })
    }

    /// The requests so far.
    pub(super) fn counts(&self) -> IoCounts {
        self.inner.counts()
    }

    /// Guest data begins there.
    pub(super) fn count_from(&self, at: u64) {
        self.guest_data.store(at, Ordering::Release);
    }

    /// How many bytes of guest data were read.
    pub(super) fn guest_read(&self) -> u64 {
        self.guest_read.load(Ordering::Acquire)
    }

    /// How many packed blocks were written.
    pub(super) fn packed(&self) -> u64 {
        lock(&self.blocks).packed
    }

    fn note(&self, at: ImageOffset, data: &Buffer) {
        if !at.bytes().is_multiple_of(BLOCK as u64) {
            return;
        }
        let guest_data = self.guest_data.load(Ordering::Acquire);
        let mut guard = lock(&self.blocks);
        let Blocks { at: blocks, order, packed } = &mut *guard;
        let mut place = at.bytes();
        let bytes = data.pieces().flat_map(|piece| piece.chunks(BLOCK));
        for block in bytes {
            let is_packed = is_packed(block);
            *packed += u64::from(is_packed && place >= guest_data);
            if place < self.kept {
                // The inner drive remembers it.
            } else if is_packed {
                let len = block.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
                if blocks.insert(place, block[..len].to_vec()).is_none() {
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

fn is_packed(block: &[u8]) -> bool {
    block.len() == BLOCK
        && block[BLOCK / 2..].iter().all(|byte| *byte == 0)
        && block.iter().any(|byte| *byte != block[0])
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
            if at.bytes() >= self.guest_data.load(Ordering::Acquire) {
                self.guest_read.fetch_add(buffer.len() as u64, Ordering::AcqRel);
            }
            let end = at.bytes() + buffer.len() as u64;
            let guard = lock(&self.blocks);
            for (place, block) in guard.at.range(at.bytes()..end) {
                let within = usize::try_from(place - at.bytes()).expect("within the buffer");
                let len = block.len().min(buffer.len() - within);
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
            // One that writes them does so request by request.
            false => Box::pin(async move {
                let places = (span.start().bytes()..span.end().bytes())
                    .step_by(usize::try_from(REQUEST_MAX).expect("64 bits"));
                let requests = places.map(|at| {
                    let len = REQUEST_MAX.min(span.end().bytes() - at);
                    self.inner.write_zeroes(ImageOffset::new(at).span(len), how)
                });
                try_join_all(requests).await.map(drop)
            }),
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
