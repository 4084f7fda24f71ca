//! A file on a host that becomes full: a hole takes space when it is written, or reserved before.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, ImageOffset, ImageSpan, LocalFuture, MemoryStorage, Result, Storage,
    Zeroes,
};
use vellum_sim::{ForwardStorage, Forwarding};

pub(crate) struct FullHost {
    inner: Arc<MemoryStorage>,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    /// Pages that the file has.
    taken: BTreeSet<u64>,
    /// So many more there are.
    free: u64,
}

impl FullHost {
    pub(crate) fn new() -> Arc<Forwarding<Self>> {
        let blocks = Mutex::new(Blocks { free: u64::MAX / 2, ..Blocks::default() });
        Forwarding::new(Self { inner: MemoryStorage::new("image"), blocks })
    }

    /// From now on there are this many more pages.
    pub(crate) fn leave(&self, pages: u64) {
        self.blocks.lock().unwrap().free = pages;
    }

    fn take(&self, span: ImageSpan) -> Result<()> {
        let mut blocks = self.blocks.lock().unwrap();
        let first = BlockSize::PAGE.cluster_of(span.start()).index();
        let new: Vec<u64> = (first..BlockSize::PAGE.count_for(span.end().bytes()))
            .filter(|page| !blocks.taken.contains(page))
            .collect();
        let Some(free) = blocks.free.checked_sub(new.len() as u64) else {
            return Err(Error::new(ErrorKind::NoSpace, "the host is full"));
        };
        blocks.free = free;
        blocks.taken.extend(new);
        Ok(())
    }
}

impl FullHost {
    /// Pages that are entirely in the run are free again.
    fn give_back(&self, span: ImageSpan) {
        let mut blocks = self.blocks.lock().unwrap();
        let pages =
            BlockSize::PAGE.count_for(span.start().bytes())..span.end().bytes() / BlockSize::PAGE.bytes();
        let mut kept = std::mem::take(&mut blocks.taken);
        let before = kept.len();
        kept.retain(|page| !pages.contains(page));
        blocks.free = blocks.free.saturating_add((before - kept.len()) as u64);
        blocks.taken = kept;
    }
}

impl ForwardStorage for FullHost {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.take(at.span(data.len() as u64))?;
            self.inner.write(at, data).await
        })
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            match how {
                Zeroes::Allocated => self.take(span)?,
                _ => self.give_back(span),
            }
            self.inner.write_zeroes(span, how).await
        })
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.give_back(span);
        self.inner.discard(span)
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.take(span)?;
            self.inner.preallocate(span).await
        })
    }
}
