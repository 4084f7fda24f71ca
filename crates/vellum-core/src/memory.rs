//! The reference implementations: a storage and a disk in memory. Model tests compare everything else with
//! them.
//!
//! They keep the contracts in the simplest way: one lock, bytes in 64 KiB blocks that exist once written, so
//! that a terabyte of nothing costs nothing. "Durable" has no meaning here; `vellum-sim` has the storage that
//! crashes.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::disk::{Disk, Extent, Filled, Filling, Geometry, Place, SharedDisk, WriteFlags, ZeroFlags};
use crate::lock;
use crate::merged::read_below;
use crate::storage::{Limits, Storage, StorageRun, Zeroes};
use crate::units::{BlockSize, GuestOffset, GuestSpan, ImageOffset, ImageSpan};
use crate::{Buffer, Error, ErrorKind, LocalFuture, Result};

/// A block exists in memory once a byte of it was written.
const BLOCK: BlockSize = BlockSize::from_shift(16);

/// Sparse bytes: the content of a file, without the file.
#[derive(Debug, Clone, Default)]
pub struct SparseBytes {
    len: u64,
    blocks: BTreeMap<u64, Box<[u8]>>,
}

impl SparseBytes {
    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Truncates to `len` or extends with zeros.
    pub fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.forget(ImageOffset::new(len).span(self.len - len));
        }
        self.len = len;
    }

    /// Fills the slice with the bytes from `at` on; zeros past the end.
    pub fn read(&self, at: ImageOffset, bytes: &mut [u8]) {
        let mut rest = bytes;
        for span in BLOCK.pieces_of(at.span(rest.len() as u64)) {
            let (now, later) = rest.split_at_mut(to_usize(span.len()));
            match self.blocks.get(&BLOCK.cluster_of(span.start()).index()) {
                Some(block) => now.copy_from_slice(&block[within(span)]),
                None => now.fill(0),
            }
            rest = later;
        }
    }

    /// Writes the slice from `at` on, growing as needed.
    pub fn write(&mut self, at: ImageOffset, bytes: &[u8]) {
        let mut rest = bytes;
        for span in BLOCK.pieces_of(at.span(rest.len() as u64)) {
            let (now, later) = rest.split_at(to_usize(span.len()));
            let block = self
                .blocks
                .entry(BLOCK.cluster_of(span.start()).index())
                .or_insert_with(|| vec![0; to_usize(BLOCK.bytes())].into_boxed_slice());
            block[within(span)].copy_from_slice(now);
            rest = later;
        }
        self.len = self.len.max(at.bytes() + bytes.len() as u64);
    }

    /// Makes the run read as zero, growing as needed; whole blocks of it are freed.
    pub fn zero(&mut self, span: ImageSpan) {
        self.forget(span);
        self.len = self.len.max(span.end().bytes());
    }

    fn forget(&mut self, span: ImageSpan) {
        let touched: Vec<u64> = self
            .blocks
            .range(BLOCK.cluster_of(span.start()).index()..=BLOCK.cluster_of(span.end()).index())
            .map(|(index, _)| *index)
            .collect();
        for index in touched {
            let block = BLOCK.span_of(crate::ImageCluster::new(index));
            let part = block.intersect(span);
            if part == block {
                self.blocks.remove(&index);
            } else if let Some(bytes) = self.blocks.get_mut(&index)
                && !part.is_empty()
            {
                bytes[within(part)].fill(0);
            }
        }
    }

    /// The runs of existing and missing blocks.
    pub fn runs(&self, span: ImageSpan) -> Vec<StorageRun> {
        let end = ImageOffset::new(self.len).max(span.start());
        let span = span.intersect(ImageSpan::between(span.start(), end));
        let mut runs: Vec<StorageRun> = Vec::new();
        for piece in BLOCK.pieces_of(span) {
            let is_data = self.blocks.contains_key(&BLOCK.cluster_of(piece.start()).index());
            match runs.last_mut() {
                Some(last) if last.is_data == is_data => {
                    last.span = ImageSpan::between(last.span.start(), piece.end());
                }
                _ => runs.push(StorageRun { span: piece, is_data }),
            }
        }
        runs
    }

    /// All bytes in one vector; for tests and small images.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(self.len)];
        self.read(ImageOffset::ZERO, &mut bytes);
        bytes
    }
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a buffer fits the address space")
}

/// The position within its block of a run that does not leave the block.
fn within(span: ImageSpan) -> std::ops::Range<usize> {
    let start = to_usize(BLOCK.within(span.start()));
    start..start + to_usize(span.len())
}

/// A storage in memory.
pub struct MemoryStorage {
    name: String,
    limits: Limits,
    bytes: Mutex<SparseBytes>,
}

impl MemoryStorage {
    /// An empty storage that grows.
    pub fn new(name: impl Into<String>) -> Arc<Self> {
        Self::with(name, Limits::plain(), SparseBytes::default())
    }

    /// A storage that holds `bytes`.
    pub fn holding(name: impl Into<String>, bytes: &[u8]) -> Arc<Self> {
        let mut content = SparseBytes::default();
        content.write(ImageOffset::ZERO, bytes);
        Self::with(name, Limits::plain(), content)
    }

    /// A storage with the given limits and content.
    pub fn with(name: impl Into<String>, limits: Limits, content: SparseBytes) -> Arc<Self> {
        Arc::new(Self { name: name.into(), limits, bytes: Mutex::new(content) })
    }

    /// A copy of the content.
    pub fn content(&self) -> SparseBytes {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, SparseBytes> {
        lock(&self.bytes)
    }

    fn check_write(&self, span: ImageSpan) -> Result<()> {
        if self.limits.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open read-only", self.name)));
        }
        if self.limits.fixed_len && span.end().bytes() > self.lock().len() {
            return Err(Error::new(ErrorKind::NoSpace, format!("{} ends before {}", self.name, span.end())));
        }
        Ok(())
    }
}

impl Storage for MemoryStorage {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.lock().len()
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let bytes = self.lock();
            buffer.fill_with(|from, piece| bytes.read(at + from as u64, piece));
            drop(bytes);
            Ok(buffer)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_write(at.span(data.len() as u64))?;
            let data = data.owned();
            let mut bytes = self.lock();
            let mut at = at;
            for piece in data.pieces() {
                bytes.write(at, piece);
                at += piece.len() as u64;
            }
            Ok(())
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(ready(Ok(())))
    }

    fn write_zeroes(&self, span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_write(span)?;
            if !span.is_empty() {
                self.lock().zero(span);
            }
            Ok(())
        })
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let mut bytes = self.lock();
            let end = ImageOffset::new(bytes.len()).max(span.start());
            bytes.forget(span.intersect(ImageSpan::between(span.start(), end)));
            Ok(())
        })
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_write(ImageSpan::between(ImageOffset::ZERO, ImageOffset::ZERO))?;
            if self.limits.fixed_len {
                return Err(Error::unsupported(format!("the length of {} is fixed", self.name)));
            }
            self.lock().set_len(len);
            Ok(())
        })
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check_write(span)?;
            let mut bytes = self.lock();
            let len = bytes.len().max(span.end().bytes());
            bytes.set_len(len);
            Ok(())
        })
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        Box::pin(async move { Ok(self.lock().runs(span)) })
    }
}

/// A disk in memory, possibly over another one: the model that formats are compared with.
pub struct MemoryDisk {
    geometry: Geometry,
    storage: Arc<MemoryStorage>,
    /// One entry per 512-byte sector that this disk has itself.
    own: Mutex<Vec<bool>>,
    below: Option<SharedDisk>,
    closed: AtomicBool,
}

impl MemoryDisk {
    /// A disk of `size` bytes of zero.
    pub fn new(size: u64) -> Arc<Self> {
        Self::over(size, None)
    }

    /// A disk of `size` bytes that reads as `below` until it is written.
    pub fn over(size: u64, below: Option<SharedDisk>) -> Arc<Self> {
        let sectors = to_usize(BlockSize::SECTOR.count_for(size));
        let geometry = Geometry {
            size,
            block_size: BlockSize::from_shift(0),
            preferred_size: BlockSize::PAGE,
            read_only: false,
            fast_zeroes: true,
        };
        Arc::new(Self {
            geometry,
            storage: MemoryStorage::new("memory disk"),
            own: Mutex::new(vec![below.is_none(); sectors]),
            below,
            closed: AtomicBool::new(false),
        })
    }

    /// A disk that holds `bytes`.
    pub fn holding(bytes: &[u8]) -> Arc<Self> {
        let disk = Self::new(bytes.len() as u64);
        disk.storage.lock().write(ImageOffset::ZERO, bytes);
        disk
    }

    /// The same disk as if it had been opened again after `close`.
    #[must_use]
    pub fn reopened(&self) -> Arc<Self> {
        Arc::new(Self {
            geometry: self.geometry.clone(),
            storage: self.storage.clone(),
            own: Mutex::new(self.lock_own().clone()),
            below: self.below.clone(),
            closed: AtomicBool::new(false),
        })
    }

    fn check(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the disk is closed"));
        }
        span.filter(|span| span.end().bytes() <= self.geometry.size)
            .ok_or_else(|| Error::invalid("the request extends past the end of the disk"))
    }

    fn lock_own(&self) -> MutexGuard<'_, Vec<bool>> {
        lock(&self.own)
    }

    fn sectors_of(span: GuestSpan) -> std::ops::Range<usize> {
        let wide = BlockSize::SECTOR.widen(span);
        to_usize(wide.start().bytes() / 512)..to_usize(wide.end().bytes() / 512)
    }

    /// Copies from below what a request covers only in part, so that whole sectors become this disk's own.
    async fn own_edges(&self, span: GuestSpan) -> Result<()> {
        let Some(below) = &self.below else { return Ok(()) };
        for sector in [span.start(), GuestOffset::new(span.end().bytes().saturating_sub(1))] {
            let piece = BlockSize::SECTOR.span_of(BlockSize::SECTOR.cluster_of(sector));
            let index = to_usize(piece.start().bytes() / 512);
            if self.lock_own()[index] || piece.intersect(span) == piece {
                continue;
            }
            let bytes = read_below(Some(below), piece.start(), Buffer::for_overwrite(512)).await?;
            let mut own = self.lock_own();
            if !own[index] {
                self.storage.lock().write(ImageOffset::new(piece.start().bytes()), bytes.slice());
                own[index] = true;
            }
        }
        Ok(())
    }

    async fn put(&self, span: GuestSpan, store: impl FnOnce(&mut SparseBytes, ImageOffset)) -> Result<()> {
        if span.is_empty() {
            return Ok(());
        }
        self.own_edges(span).await?;
        let mut own = self.lock_own();
        store(&mut self.storage.lock(), ImageOffset::new(span.start().bytes()));
        own[Self::sectors_of(span)].fill(true);
        Ok(())
    }
}

impl Disk for MemoryDisk {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.below.clone()
    }

    fn read(&self, at: GuestOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = self.check(GuestSpan::checked(at, buffer.len() as u64))?;
            let mut done = Buffer::empty();
            for piece in BlockSize::SECTOR.pieces_of(span) {
                let mut part = buffer.split_to(to_usize(piece.len()));
                let own = self.lock_own()[Self::sectors_of(piece)][0];
                if own {
                    let at = ImageOffset::new(piece.start().bytes());
                    part = self.storage.read(at, part).await?;
                } else {
                    part = read_below(self.below.as_ref(), piece.start(), part).await?;
                }
                done.append(part);
            }
            Ok(done)
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check(GuestSpan::checked(at, data.len() as u64))?;
            let data = data.owned();
            self.put(span, |bytes, at| {
                let mut at = at;
                for piece in data.pieces() {
                    bytes.write(at, piece);
                    at += piece.len() as u64;
                }
            })
            .await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.check(Some(GuestOffset::ZERO.span(0))).map(drop) })
    }

    fn write_zeroes(&self, span: GuestSpan, _flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check(Some(span))?;
            self.put(span, |bytes, at| bytes.zero(at.span(span.len()))).await
        })
    }

    fn discard(&self, span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.write_zeroes(span, ZeroFlags::default())
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let span = self.check(Some(span))?;
            let own = self.lock_own();
            let mut extents: Vec<(GuestSpan, bool)> = Vec::new();
            for piece in BlockSize::SECTOR.pieces_of(span) {
                let is_own = own[Self::sectors_of(piece)][0];
                match extents.last_mut() {
                    Some((last, same)) if *same == is_own => {
                        *last = GuestSpan::between(last.start(), piece.end());
                    }
                    _ => extents.push((piece, is_own)),
                }
            }
            let place = |span: GuestSpan, is_own: bool| match is_own {
                true => {
                    Place::Data { storage: self.storage.clone(), at: ImageOffset::new(span.start().bytes()) }
                }
                false => Place::Below,
            };
            Ok(extents
                .into_iter()
                .map(|(span, is_own)| Extent { span, place: place(span, is_own) })
                .collect())
        })
    }

    fn filling(&self) -> Option<Filling> {
        self.below.is_some().then_some(Filling { unit: BlockSize::PAGE, kept_at_close: false })
    }

    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        Box::pin(async move {
            let span = self.check(GuestSpan::checked(at, data.len() as u64))?;
            let below = self.below.as_ref().map_or(0, |below| below.geometry().size);
            let end = below.min(self.geometry.size);
            let data = data.owned().to_vec();
            let mut own = self.lock_own();
            let mut kept = 0;
            for block in BlockSize::PAGE.pieces_of(span) {
                let is_whole = block.len() == BlockSize::PAGE.bytes() || block.end().bytes() >= end;
                for piece in BlockSize::SECTOR.pieces_of(block) {
                    let index = Self::sectors_of(piece).start;
                    if !is_whole || own[index] {
                        continue;
                    }
                    let from = to_usize(piece.start() - span.start());
                    let bytes = &data[from..from + to_usize(piece.len())];
                    self.storage.lock().write(ImageOffset::new(piece.start().bytes()), bytes);
                    own[index] = true;
                    kept += piece.len();
                }
            }
            Ok(Filled { kept, wants_flush: false })
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.closed.store(true, Ordering::Release);
        Box::pin(ready(Ok(())))
    }
}
