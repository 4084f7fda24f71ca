//! Replaying in memory: an image that was not closed is read as it will be once it is recovered, and is not
//! changed.
//!
//! ```text
//!   recovery ──writes──▶ Aside: pages in memory
//!                          │ where it has none
//!                          ▼
//!                        the image, open for reading only
//! ```
//!
//! The recovery is the one that an opening for writing runs; here its writes go beside the image. Readers
//! then find a closed image.
//!
//! 1. Nothing is ever written to the image.
//! 2. Memory is bounded by [`MEMORY_MAX`], whatever the journal contains. An image that needs more is
//!    refused: then it must be recovered in place.
//! 3. The image must not be written meanwhile: the caller holds its lock while it reads.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard};

use vellum_core::pin::Proof;
use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, ImageOffset, ImageSpan, Limits, LocalFuture, Result,
    SharedStorage, Storage, StorageRun, Zeroes, lock,
};

use crate::probe::FormatKind;

/// At most this much memory is used for pages that a recovery changes, in bytes.
const MEMORY_MAX: u64 = 256 << 20;
/// The memory for the record of a page of zeros.
const ZERO_BYTES: u64 = 64;
const PAGE: BlockSize = BlockSize::PAGE;
const PAGE_LEN: usize = 4096;

/// Whether the content of an image is known only after its journal is replayed.
///
/// # Errors
/// The error of reading its first bytes.
pub async fn needs_replay(image: &dyn Storage, kind: FormatKind) -> Result<bool> {
    Ok(kind.format().read(image).await?.needs_replay())
}

/// The image as a recovery would leave it. It can be read only, and is not written.
///
/// # Errors
/// The errors of the recovery, and `Unsupported` where it would take too much memory.
pub async fn replayed_in_memory(image: SharedStorage, kind: FormatKind) -> Result<SharedStorage> {
    replayed_within(image, kind, MEMORY_MAX).await
}

async fn replayed_within(image: SharedStorage, kind: FormatKind, memory_max: u64) -> Result<SharedStorage> {
    let name = image.name().to_owned();
    let aside = Arc::new(Aside::over(image, memory_max));
    let shared: SharedStorage = aside.clone();
    let replayed = kind.format().replay(&shared).await;
    replayed.context(|| format!("can't replay the journal of {name} in memory"))?;
    drop(shared);
    let mut aside = Arc::into_inner(aside).expect("a recovery keeps nothing");
    aside.limits.read_only = true;
    Ok(Arc::new(aside))
}

/// A storage that leaves the one below as it is.
struct Aside {
    image: SharedStorage,
    limits: Limits,
    memory_max: u64,
    changed: Mutex<Changed>,
}

struct Changed {
    len: u64,
    /// The image's own bytes from here on must not be seen: it was truncated once.
    seen: u64,
    /// By page number. `None` is a page of zeros.
    pages: BTreeMap<u64, Option<Box<[u8]>>>,
    memory: u64,
}

impl Changed {
    fn put(&mut self, index: u64, page: Option<Box<[u8]>>) {
        let cost = |page: &Option<Box<[u8]>>| if page.is_some() { PAGE.bytes() } else { ZERO_BYTES };
        self.memory += cost(&page);
        if let Some(old) = self.pages.insert(index, page) {
            self.memory -= cost(&old);
        }
    }
}

fn index_of(piece: ImageSpan) -> u64 {
    PAGE.cluster_of(piece.start()).index()
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).expect("within a buffer")
}

impl Aside {
    fn over(image: SharedStorage, memory_max: u64) -> Self {
        let limits =
            Limits { read_only: false, fast_zeroes: true, discards: false, ..image.limits().clone() };
        let len = image.len();
        let changed = Changed { len, seen: len, pages: BTreeMap::new(), memory: 0 };
        Self { image, limits, memory_max, changed: Mutex::new(changed) }
    }

    fn lock(&self) -> MutexGuard<'_, Changed> {
        lock(&self.changed)
    }

    /// Whether the run may be changed.
    fn check(&self, span: ImageSpan) -> Result<()> {
        if self.limits.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open read-only", self.name())));
        }
        if self.limits.fixed_len && span.end().bytes() > self.image.len() {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{} ends before {}", self.name(), span.end()),
            ));
        }
        Ok(())
    }

    /// Whether there is memory for this many more bytes.
    fn check_memory(&self, bytes: u64) -> Result<()> {
        if self.lock().memory.saturating_add(bytes) <= self.memory_max {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "the recovery changes more than {} MiB: run `vellum recover {}`",
            self.memory_max >> 20,
            self.name()
        )))
    }

    async fn read_bytes(&self, at: ImageOffset, buffer: Buffer) -> Result<Buffer> {
        let span = ImageSpan::checked(at, buffer.len() as u64)
            .ok_or_else(|| Error::invalid("the request exceeds 2^64"))?;
        let mut buffer = self.image.read(at, buffer).await?;
        let changed = self.lock();
        let seen = changed.seen.clamp(at.bytes(), span.end().bytes()) - at.bytes();
        if seen < span.len() {
            buffer.copy_from(to_usize(seen), &vec![0; to_usize(span.len() - seen)]);
        }
        let (first, end) = (PAGE.round_down(at.bytes()), span.end().bytes());
        for (index, page) in changed.pages.range(first / PAGE.bytes()..end.div_ceil(PAGE.bytes())) {
            let whole = PAGE.span_of(vellum_core::ImageCluster::new(*index));
            let part = whole.intersect(span);
            let (from, to) = (to_usize(part.start() - whole.start()), to_usize(part.start() - at));
            match page {
                Some(page) => buffer.copy_from(to, &page[from..from + to_usize(part.len())]),
                None => buffer.copy_from(to, &vec![0; to_usize(part.len())]),
            }
        }
        Ok(buffer)
    }

    async fn write_bytes(&self, at: ImageOffset, data: Buffer) -> Result<()> {
        let span = ImageSpan::checked(at, data.len() as u64)
            .ok_or_else(|| Error::invalid("the request exceeds 2^64"))?;
        self.check(span)?;
        self.check_memory(PAGE.widen(span).len())?;
        let data = data.contiguous();
        for piece in PAGE.pieces_of(span) {
            let whole = PAGE.widen(piece);
            // Read before the lock is taken, and used only if no other task was faster: another part of the
            // page may be in transfer.
            let under = match piece.len() == PAGE.bytes() {
                true => vec![0; PAGE_LEN].into_boxed_slice(),
                false => {
                    let page = self.read_bytes(whole.start(), Buffer::for_overwrite(PAGE_LEN)).await?;
                    page.to_vec().into_boxed_slice()
                }
            };
            let mut changed = self.lock();
            let mut page = match changed.pages.get(&index_of(piece)) {
                Some(Some(page)) => page.clone(),
                Some(None) => vec![0; PAGE_LEN].into_boxed_slice(),
                None => under,
            };
            let (from, to) = (to_usize(piece.start() - at), to_usize(piece.start() - whole.start()));
            let len = to_usize(piece.len());
            page[to..to + len].copy_from_slice(&data.slice()[from..from + len]);
            changed.put(index_of(piece), Some(page));
        }
        let mut changed = self.lock();
        changed.len = changed.len.max(span.end().bytes());
        Ok(())
    }

    async fn zero(&self, span: ImageSpan) -> Result<()> {
        self.check(span)?;
        let whole = PAGE.narrow(span);
        self.check_memory(whole.len() / PAGE.bytes() * ZERO_BYTES)?;
        let edges = match whole.is_empty() {
            true => [span, ImageSpan::between(span.end(), span.end())],
            false => {
                [ImageSpan::between(span.start(), whole.start()), ImageSpan::between(whole.end(), span.end())]
            }
        };
        for edge in edges.into_iter().filter(|edge| !edge.is_empty()) {
            self.write_bytes(edge.start(), Buffer::zeroed(to_usize(edge.len()))).await?;
        }
        let mut changed = self.lock();
        PAGE.pieces_of(whole).for_each(|piece| changed.put(index_of(piece), None));
        changed.len = changed.len.max(span.end().bytes());
        Ok(())
    }

    async fn find_runs(&self, span: ImageSpan) -> Result<Vec<StorageRun>> {
        let (len, seen) = {
            let changed = self.lock();
            (changed.len, changed.seen)
        };
        let span = span.intersect(ImageSpan::between(span.start(), ImageOffset::new(len).max(span.start())));
        if span.is_empty() {
            return Ok(Vec::new());
        }
        let mut below =
            self.image.runs(span.intersect(ImageOffset::ZERO.span(seen.max(span.start().bytes())))).await?;
        let known = below.last().map_or(span.start(), |run| run.span.end());
        if known.bytes() >= seen {
            below.push(StorageRun { span: ImageSpan::between(known, span.end()), is_data: false });
        }
        let changed = self.lock();
        let mut runs: Vec<StorageRun> = Vec::new();
        let mut push = |start: ImageOffset, end: ImageOffset, is_data: bool| {
            let span = ImageSpan::between(start, end);
            match runs.last_mut() {
                _ if span.is_empty() => {}
                Some(last) if last.is_data == is_data => {
                    last.span = ImageSpan::between(last.span.start(), span.end());
                }
                _ => runs.push(StorageRun { span, is_data }),
            }
        };
        for run in below {
            let mut at = run.span.start();
            let first = PAGE.round_down(at.bytes()) / PAGE.bytes();
            let in_memory = changed.pages.range(first..run.span.end().bytes().div_ceil(PAGE.bytes()));
            for (index, _) in in_memory.filter(|(_, page)| page.is_some() && !run.is_data) {
                let page = PAGE.span_of(vellum_core::ImageCluster::new(*index)).intersect(run.span);
                push(at, page.start().max(at), run.is_data);
                push(page.start().max(at), page.end(), true);
                at = page.end();
            }
            push(at, run.span.end(), run.is_data);
        }
        Ok(runs)
    }
}

impl Storage for Aside {
    fn name(&self) -> &str {
        self.image.name()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.lock().len
    }

    fn proof(&self) -> Option<Proof> {
        self.image.proof()
    }

    fn proof_now(&self) -> LocalFuture<'_, Result<Option<Proof>>> {
        self.image.proof_now()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(self.read_bytes(at, buffer))
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.write_bytes(at, data))
    }

    /// No crash can happen: what is in memory vanishes with the program.
    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(ready(Ok(())))
    }

    fn write_zeroes(&self, span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.zero(span))
    }

    fn discard(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(ready(Ok(())))
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check(ImageOffset::ZERO.span(0))?;
            if self.limits.fixed_len {
                return Err(Error::unsupported(format!("the length of {} is fixed", self.name())));
            }
            if len < self.len() && !PAGE.aligns(ImageOffset::new(len)) {
                let page = ImageOffset::new(PAGE.round_up(len));
                self.zero(ImageSpan::between(ImageOffset::new(len), page)).await?;
            }
            let mut changed = self.lock();
            changed.len = len;
            changed.seen = changed.seen.min(len);
            let gone = changed.pages.split_off(&len.div_ceil(PAGE.bytes()));
            let cost = |page: &Option<Box<[u8]>>| if page.is_some() { PAGE.bytes() } else { ZERO_BYTES };
            changed.memory -= gone.values().map(cost).sum::<u64>();
            Ok(())
        })
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check(span)?;
            let mut changed = self.lock();
            changed.len = changed.len.max(span.end().bytes());
            Ok(())
        })
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        Box::pin(self.find_runs(span))
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{MemoryStorage, Random};

    use super::*;

    fn all(storage: &dyn Storage) -> Vec<u8> {
        let len = to_usize(storage.len());
        block_on(storage.read(ImageOffset::ZERO, Buffer::for_overwrite(len))).unwrap().to_vec()
    }

    #[test]
    fn it_reads_as_what_was_written_and_the_image_stays() {
        let mut random = Random::from_seed(4);
        for round in 0..40 {
            let mut model = vec![0; 50_000];
            random.fill(&mut model[..20_000]);
            let image = MemoryStorage::holding("image", &model);
            let aside = Aside::over(image.clone(), 1 << 20);
            let before = image.content().to_vec();
            for _ in 0..30 {
                let at = random.index(60_000);
                let len = 1 + random.index(9000);
                let (span, end) = (ImageOffset::new(at as u64).span(len as u64), at + len);
                match random.below(4) {
                    0 => {
                        model.resize(at, 0);
                        block_on(aside.set_len(at as u64)).unwrap();
                    }
                    1 => {
                        model.resize(model.len().max(end), 0);
                        model[at..end].fill(0);
                        block_on(aside.write_zeroes(span, Zeroes::MayUnmap)).unwrap();
                    }
                    _ => {
                        model.resize(model.len().max(end), 0);
                        random.fill(&mut model[at..end]);
                        block_on(aside.write(span.start(), Buffer::copy_of(&model[at..end]))).unwrap();
                    }
                }
                assert!(all(&aside) == model, "round {round}");
                let runs = block_on(aside.runs(ImageOffset::ZERO.span(1 << 20))).unwrap();
                let mut at = 0;
                for run in &runs {
                    let (start, end) = (to_usize(run.span.start().bytes()), to_usize(run.span.end().bytes()));
                    assert_eq!(start, at, "without gaps");
                    assert!(run.is_data || model[start..end].iter().all(|byte| *byte == 0), "a hole is zero");
                    at = end;
                }
                assert_eq!(at, model.len(), "{runs:?}");
            }
            assert!(image.content().to_vec() == before, "round {round}");
        }
    }

    #[test]
    fn memory_is_bounded() {
        let image = MemoryStorage::holding("image", &[1; 65_536]);
        let aside = Aside::over(image, 3 * 4096);
        block_on(aside.write(ImageOffset::new(100), Buffer::copy_of(&[2; 8192]))).unwrap();
        let refused = block_on(aside.write(ImageOffset::new(40_000), Buffer::copy_of(&[2; 10])));
        assert!(refused.unwrap_err().chain().contains("vellum recover image"));
        block_on(aside.set_len(0)).unwrap();
        block_on(aside.write(ImageOffset::new(40_000), Buffer::copy_of(&[2; 10]))).unwrap();
    }
}
