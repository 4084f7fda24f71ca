//! What a log changes, beside the file that it belongs to.
//!
//! 1. Patches do not overlap: a later one replaces the part of an earlier one that it covers.
//! 2. Nothing is written: the overlay is a storage that is only read.

use std::collections::BTreeMap;
use std::sync::Arc;

use vellum_core::pin::Proof;
use vellum_core::{
    Buffer, Error, ErrorKind, ImageOffset, ImageSpan, Limits, LocalFuture, Result, SharedStorage, Storage,
    StorageRun, Zeroes,
};

pub(super) const SECTOR_BYTES: usize = 4096;

/// What is at a place instead of the file's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Patch {
    Zeros,
    /// It covers as many bytes.
    Page(Box<[u8; SECTOR_BYTES]>),
}

/// All changes of a log. Each begins and ends at a multiple of 4 KiB.
#[derive(Debug, Default)]
pub(super) struct Patches {
    /// By their first byte; with their end.
    by_start: BTreeMap<u64, (u64, Patch)>,
    /// The file is at least this long.
    len_min: u64,
}

impl Patches {
    pub(super) fn count(&self) -> usize {
        self.by_start.len()
    }

    /// Adds a patch over the earlier ones.
    pub(super) fn put(&mut self, start: u64, end: u64, patch: Patch) {
        if start == end {
            return;
        }
        // Only zeros are longer than a page, so only they are cut.
        let before = self.by_start.range(..start).next_back().map(|(at, (end, _))| (*at, *end));
        if let Some((at, old_end)) = before.filter(|(_, old_end)| *old_end > start) {
            self.by_start.insert(at, (start, Patch::Zeros));
            if old_end > end {
                self.by_start.insert(end, (old_end, Patch::Zeros));
            }
        }
        let covered: Vec<u64> = self.by_start.range(start..end).map(|(at, _)| *at).collect();
        for at in covered {
            let (old_end, _) = self.by_start.remove(&at).expect("as just seen");
            if old_end > end {
                self.by_start.insert(end, (old_end, Patch::Zeros));
            }
        }
        self.by_start.insert(start, (end, patch));
    }

    /// Changes bytes that were read from `at` on.
    pub(super) fn apply(&self, at: u64, bytes: &mut [u8]) {
        self.each(at, bytes.len(), |from, content, skip, len| match content {
            Patch::Zeros => bytes[from..from + len].fill(0),
            Patch::Page(page) => bytes[from..from + len].copy_from_slice(&page[skip..skip + len]),
        });
    }

    /// Calls `put` for each part of a patch in the run: where it is there, the patch, where in the patch, how long.
    fn each(&self, at: u64, len: usize, mut put: impl FnMut(usize, &Patch, usize, usize)) {
        let end = at.saturating_add(len as u64);
        let first = self.by_start.range(..=at).next_back().map_or(at, |(start, _)| *start);
        for (start, (patch_end, patch)) in self.by_start.range(first..end) {
            let (from, to) = ((*start).max(at), (*patch_end).min(end));
            if from < to {
                let number = |value: u64| usize::try_from(value).expect("within the run");
                let skip = if matches!(patch, Patch::Zeros) { 0 } else { number(from - start) };
                put(number(from - at), patch, skip, number(to - from));
            }
        }
    }

    /// Makes the file at least this long, by zeros.
    pub(super) fn lengthen(&mut self, len: u64) {
        self.len_min = self.len_min.max(len);
    }

    fn end(&self) -> u64 {
        self.by_start.last_key_value().map_or(0, |(_, (end, _))| *end).max(self.len_min)
    }
}

/// A file with patches over it.
pub(super) struct Overlay {
    file: SharedStorage,
    patches: Arc<Patches>,
    limits: Limits,
}

impl Overlay {
    pub(super) fn new(file: SharedStorage, patches: Arc<Patches>) -> Self {
        let limits = Limits { read_only: true, ..file.limits().clone() };
        Self { file, patches, limits }
    }

    fn refused(&self) -> LocalFuture<'_, Result<()>> {
        let why = format!("{} is only read", self.file.name());
        Box::pin(std::future::ready(Err(Error::new(ErrorKind::ReadOnly, why))))
    }
}

impl Storage for Overlay {
    fn name(&self) -> &str {
        self.file.name()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.file.len().max(self.patches.end())
    }

    fn proof(&self) -> Option<Proof> {
        self.file.proof()
    }

    fn proof_now(&self) -> LocalFuture<'_, Result<Option<Proof>>> {
        self.file.proof_now()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let mut buffer = self.file.read(at, buffer).await?;
            let len = buffer.len();
            self.patches.each(at.bytes(), len, |from, content, skip, len| match content {
                Patch::Zeros => buffer.copy_from(from, &vec![0; len]),
                Patch::Page(page) => buffer.copy_from(from, &page[skip..skip + len]),
            });
            Ok(buffer)
        })
    }

    fn write(&self, _at: ImageOffset, _data: Buffer) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn write_zeroes(&self, _span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    fn discard(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    fn set_len(&self, _len: u64) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    fn preallocate(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    /// Everything counts as data: what the host says of the file is not what is read.
    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        let end = ImageOffset::new(self.len()).max(span.start());
        let span = span.intersect(ImageSpan::between(span.start(), end));
        let runs = if span.is_empty() { Vec::new() } else { vec![StorageRun { span, is_data: true }] };
        Box::pin(std::future::ready(Ok(runs)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_patch_covers_an_earlier_one() {
        const PAGE: u64 = SECTOR_BYTES as u64;
        let page = |byte| Patch::Page(Box::new([byte; SECTOR_BYTES]));
        let mut patches = Patches::default();
        let mut model = vec![9_u8; 16 * SECTOR_BYTES];
        for (start, end, patch) in [
            (2, 10, Patch::Zeros),
            (4, 5, page(1)),
            (4, 5, page(2)),
            (0, 3, Patch::Zeros),
            (9, 12, Patch::Zeros),
            (11, 12, page(3)),
            (3, 9, Patch::Zeros),
            (7, 8, page(4)),
            (15, 16, page(5)),
            (6, 6, Patch::Zeros),
        ] {
            patches.put(start * PAGE, end * PAGE, patch.clone());
            let byte = if let Patch::Page(page) = &patch { page[0] } else { 0 };
            let index = |at: u64| usize::try_from(at * PAGE).unwrap();
            model[index(start)..index(end)].fill(byte);
            for (at, len) in [(0, model.len()), (5000, 40_000), (4095, 2), (61_440, 4096)] {
                let mut bytes = vec![9; len];
                patches.apply(at as u64, &mut bytes);
                assert_eq!(bytes, model[at..at + len], "{at} {len}");
            }
        }
    }
}
