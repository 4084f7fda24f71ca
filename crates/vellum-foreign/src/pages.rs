//! The tables of an image, read page by page as they are needed.
//!
//! 1. At most [`PAGES_MAX`] pages are in memory, whatever the size of the tables.
//! 2. What lies past the end of a file is an error, never zeros.
//! 3. The files are only read, so a page never becomes stale.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use vellum_core::{Buffer, ImageOffset, Result, SharedStorage, lock};

use crate::bytes::beyond;

const PAGE_BYTES: u64 = 16 << 10;
/// Together 4 MiB.
const PAGES_MAX: usize = 256;

/// The files of an image, and what was read of their tables.
pub(crate) struct Pages {
    files: Vec<SharedStorage>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    pages: BTreeMap<(usize, u64), Page>,
    /// Counts uses.
    now: u64,
}

struct Page {
    bytes: Arc<Vec<u8>>,
    /// Its last use.
    used: u64,
}

impl Pages {
    pub(crate) fn of(files: Vec<SharedStorage>) -> Arc<Self> {
        Arc::new(Self { files, kept: Mutex::default() })
    }

    pub(crate) fn files(&self) -> &[SharedStorage] {
        &self.files
    }

    /// Some bytes of a file.
    pub(crate) async fn bytes<const N: usize>(&self, file: usize, at: u64) -> Result<[u8; N]> {
        let storage = &self.files[file];
        match at.checked_add(N as u64) {
            Some(end) if end <= storage.len() => {}
            _ => return Err(beyond(&**storage, at, N as u64)),
        }
        let mut bytes = [0; N];
        let mut done = 0;
        while done < N {
            let from = at + done as u64;
            let page = self.page(file, from / PAGE_BYTES).await?;
            let within = usize::try_from(from % PAGE_BYTES).expect("within a page");
            let some = (N - done).min(page.len() - within);
            bytes[done..done + some].copy_from_slice(&page[within..within + some]);
            done += some;
        }
        Ok(bytes)
    }

    pub(crate) async fn le32(&self, file: usize, at: u64) -> Result<u32> {
        Ok(u32::from_le_bytes(self.bytes(file, at).await?))
    }

    pub(crate) async fn le64(&self, file: usize, at: u64) -> Result<u64> {
        Ok(u64::from_le_bytes(self.bytes(file, at).await?))
    }

    pub(crate) async fn be32(&self, file: usize, at: u64) -> Result<u32> {
        Ok(u32::from_be_bytes(self.bytes(file, at).await?))
    }

    pub(crate) async fn be64(&self, file: usize, at: u64) -> Result<u64> {
        Ok(u64::from_be_bytes(self.bytes(file, at).await?))
    }

    /// A page of a file, shorter at its end.
    async fn page(&self, file: usize, index: u64) -> Result<Arc<Vec<u8>>> {
        if let Some(page) = self.kept(file, index) {
            return Ok(page);
        }
        let storage = &self.files[file];
        let at = index * PAGE_BYTES;
        let len = usize::try_from(PAGE_BYTES.min(storage.len() - at)).expect("a page fits memory");
        let bytes = storage.read(ImageOffset::new(at), Buffer::for_overwrite(len)).await?;
        let bytes = Arc::new(bytes.to_vec());
        let mut kept = lock(&self.kept);
        if kept.pages.len() >= PAGES_MAX {
            let oldest = kept.pages.iter().min_by_key(|(_, page)| page.used).map(|(key, _)| *key);
            kept.pages.remove(&oldest.expect("there are some"));
        }
        let used = kept.now;
        kept.pages.insert((file, index), Page { bytes: bytes.clone(), used });
        Ok(bytes)
    }

    fn kept(&self, file: usize, index: u64) -> Option<Arc<Vec<u8>>> {
        let mut kept = lock(&self.kept);
        kept.now += 1;
        let now = kept.now;
        let page = kept.pages.get_mut(&(file, index))?;
        page.used = now;
        Some(page.bytes.clone())
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{ErrorKind, MemoryStorage};

    use super::*;

    #[test]
    fn pages_are_bounded_and_end_with_the_file() {
        let len = usize::try_from(PAGE_BYTES).unwrap() * (PAGES_MAX + 3) + 5;
        let bytes: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let pages = Pages::of(vec![MemoryStorage::holding("table", &bytes)]);
        block_on(async {
            for at in (0..len - 8).step_by(5000).chain([len - 8, 16_380]) {
                let found: [u8; 8] = pages.bytes(0, at as u64).await.unwrap();
                assert_eq!(found, bytes[at..at + 8]);
            }
            assert_eq!(lock(&pages.kept).pages.len(), PAGES_MAX);
            for at in [len as u64 - 7, len as u64, u64::MAX - 3] {
                let error = pages.bytes::<8>(0, at).await.expect_err("past the end");
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{at}");
            }
        });
    }
}
