//! A storage for real threads: memory with two contents, of which a power cut leaves one.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use vellum_core::{
    Buffer, ImageOffset, ImageSpan, Limits, LocalFuture, Random, Result, Storage, StorageRun, Zeroes,
};
use vellum_format::perturb;

/// A file in memory. What was not flushed is lost in a power cut, all of it.
pub(crate) struct Volatile {
    limits: Limits,
    contents: Mutex<Contents>,
}

#[derive(Default)]
pub(crate) struct Contents {
    pub(crate) visible: Vec<u8>,
    pub(crate) durable: Vec<u8>,
    /// Sectors that differ.
    dirty: BTreeSet<usize>,
}

impl Contents {
    fn reach(&mut self, end: usize) {
        if self.visible.len() < end {
            self.visible.resize(end, 0);
        }
    }

    fn touch(&mut self, start: usize, end: usize) {
        self.dirty.extend(start / 512..end.div_ceil(512));
    }
}

pub(crate) fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}

impl Volatile {
    pub(crate) fn new() -> Arc<Self> {
        Self::with(Limits::plain(), Vec::new())
    }

    fn with(limits: Limits, bytes: Vec<u8>) -> Arc<Self> {
        let contents = Contents { visible: bytes.clone(), durable: bytes, dirty: BTreeSet::new() };
        Arc::new(Self { limits, contents: Mutex::new(contents) })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap()
    }

    /// What a power cut leaves.
    pub(crate) fn after_power_cut(&self) -> Vec<u8> {
        self.lock().durable.clone()
    }
}

impl Storage for Volatile {
    fn name(&self) -> &str {
        "volatile"
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.lock().visible.len() as u64
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            perturb::point();
            let contents = self.lock();
            let mut at = index(at.bytes());
            for piece in buffer.pieces_mut() {
                let there = contents.visible.len().saturating_sub(at).min(piece.len());
                piece[there..].fill(0);
                piece[..there].copy_from_slice(contents.visible.get(at..at + there).unwrap_or_default());
                at += piece.len();
            }
            drop(contents);
            Ok(buffer)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            perturb::transfer();
            let (start, data) = (index(at.bytes()), data.to_vec());
            {
                let mut contents = self.lock();
                contents.reach(start + data.len());
                contents.visible[start..start + data.len()].copy_from_slice(&data);
                contents.touch(start, start + data.len());
            }
            perturb::point();
            Ok(())
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            {
                let contents = &mut *self.lock();
                contents.durable.resize(contents.visible.len(), 0);
                for sector in std::mem::take(&mut contents.dirty) {
                    let end = (sector * 512 + 512).min(contents.visible.len());
                    let Some(bytes) = contents.visible.get(sector * 512..end) else { continue };
                    contents.durable[sector * 512..end].copy_from_slice(bytes);
                }
            }
            perturb::point();
            std::thread::yield_now();
            Ok(())
        })
    }

    fn write_zeroes(&self, span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            perturb::point();
            let (start, end) = (index(span.start().bytes()), index(span.end().bytes()));
            let mut contents = self.lock();
            contents.reach(end);
            contents.visible[start..end].fill(0);
            contents.touch(start, end);
            Ok(())
        })
    }

    fn discard(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.lock().visible.resize(index(len), 0);
            Ok(())
        })
    }

    fn preallocate(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        Box::pin(std::future::ready(Ok(vec![StorageRun { span, is_data: true }])))
    }
}

impl Volatile {
    /// A device with other bytes on it, whose zeros are fast.
    pub(crate) fn device(len: u64) -> Arc<Self> {
        let limits = Limits { fixed_len: true, grows_zeroed: false, discards: false, ..Limits::plain() };
        let mut bytes = vec![0; index(len)];
        Random::from_seed(9).fill(&mut bytes);
        Self::with(limits, bytes)
    }

    /// What is left of another.
    pub(crate) fn holding(bytes: Vec<u8>, other: &Self) -> Arc<Self> {
        Self::with(other.limits.clone(), bytes)
    }
}
