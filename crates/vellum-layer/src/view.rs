//! All images below the top of a chain, read as one disk: a read costs the same over one image and over a
//! hundred.
//!
//! ```text
//!   top.qcow2          its own mapping, which writes change
//!      │ where it has nothing
//!   View               pages of 2 MiB: which storage has each byte, and where
//!      │                    └─ a page that is not in memory: each image is asked once, from above
//!   a  b  c  …  base   opened for reading only, never written while the chain is open
//! ```
//!
//! 1. What is below the top image never reads otherwise while the chain is open, so a page never becomes stale.
//!    Writes, snapshots, resizing and reverting concern the top image alone. An image that gets what those above it
//!    have ([`merge`](crate::merge)) changes only where they hide it; it may move what it has, and is read by its disk.
//! 2. To make a page, the images are queried from the top down, each for the shortest range that contains
//!    everything still missing: in one query as a rule, in another one where it answers in parts. Once the page
//!    is complete, no further image is queried.
//! 3. The memory for pages is bounded ([`Pages`]), and a part of what the chain has for mappings.
//! 4. Bytes are read where they are, without the disks in between. Compressed clusters are read by their
//!    image's own disk, so is a snapshot (`chain/forks.rs`), and so is everything in an image that is a raw file: it has all bytes, and
//!    querying the host for its holes would cost more than it saves.
//! 5. Where a page cannot be made, because a mapping is damaged or cannot be read, a request is passed on from
//!    image to image: it fails only where its own bytes are concerned.
//! 6. As a `Disk`, the view reports the size and the map of the first image below the top, and the disk below
//!    that one.

mod page;
mod pages;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Place, Result,
    SharedDisk, SharedStorage, WriteFlags, ZeroFlags, try_join_all,
};

use page::{Draft, Holder, PAGE, Page, Part};
use pages::Pages;

/// At most this many parts of one request are read at once.
const READS_AT_ONCE: usize = 32;

/// One image of the view.
pub(crate) struct Layer {
    /// Its disk, over those below.
    pub(crate) disk: SharedDisk,
    /// The same, for reads of which a cache keeps nothing, where it has a cache.
    pub(crate) unadmitting: Option<SharedDisk>,
    /// It has all bytes of its disk, so it is not asked for its map.
    pub(crate) is_whole: bool,
    /// It has no storage of its own for long, or a cache over it, so its disk is read.
    pub(crate) is_exchanged: bool,
}

impl Layer {
    fn reader(&self, admits: bool) -> &SharedDisk {
        self.unadmitting.as_ref().filter(|_| !admits).unwrap_or(&self.disk)
    }
}

/// The images below the top of a chain, as one disk that is read.
pub(crate) struct View {
    layers: Vec<Layer>,
    /// The storage of each image that has bytes, known once it was met.
    storages: Box<[OnceLock<SharedStorage>]>,
    /// The size of the disk, in bytes.
    size: u64,
    pages: Pages,
    closed: AtomicBool,
}

impl View {
    /// The view of these images, listed from the top down. Its pages take at most `memory_max` bytes.
    pub(crate) fn new(layers: Vec<Layer>, memory_max: u64) -> Arc<Self> {
        let size = layers[0].disk.geometry().size;
        let storages = layers.iter().map(|_| OnceLock::new()).collect();
        let (pages, closed) = (Pages::new(memory_max), AtomicBool::new(false));
        Arc::new(Self { layers, storages, size, pages, closed })
    }

    /// The disk that the view is to others.
    fn first(&self) -> &SharedDisk {
        &self.layers[0].disk
    }

    fn check(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the disk is closed"));
        }
        span.filter(|span| span.end().bytes() <= self.size).ok_or_else(|| {
            Error::invalid(format!("the request extends past the end of the disk at {:#x}", self.size))
        })
    }

    async fn read_span(&self, span: GuestSpan, mut buffer: Buffer, admits: bool) -> Result<Buffer> {
        let mut parts: SmallVec<[Part; 4]> = SmallVec::new();
        for piece in PAGE.pieces_of(span) {
            let index = PAGE.cluster_of(piece.start()).index();
            let page = match self.pages.get(index) {
                Some(page) => page,
                None => match Box::pin(self.make(index)).await {
                    Ok(page) => page,
                    // Something else of the page is damaged, perhaps: what is wanted is read image by image.
                    Err(_) => return self.first().read(span.start(), buffer).await,
                },
            };
            let start = within(PAGE.within(piece.start()));
            parts.extend(page.parts(start..start + within(piece.len())));
        }
        if let [part] = parts[..] {
            return self.read_part(span.start(), part, buffer, admits).await;
        }
        let mut at = span.start();
        let mut filled = Buffer::empty();
        for some in parts.chunks(READS_AT_ONCE) {
            let mut reads: SmallVec<[LocalFuture<'_, Result<Buffer>>; 4]> = SmallVec::new();
            for part in some {
                let piece = buffer.split_to(usize::try_from(part.len).expect("within the buffer"));
                reads.push(Box::pin(self.read_part(at, *part, piece, admits)));
                at += part.len;
            }
            for piece in try_join_all(reads).await? {
                filled.append(piece);
            }
        }
        Ok(filled)
    }

    async fn read_part(
        &self,
        at: GuestOffset,
        part: Part,
        mut buffer: Buffer,
        admits: bool,
    ) -> Result<Buffer> {
        match part.holder {
            Holder::Zero => {
                buffer.fill(0);
                Ok(buffer)
            }
            Holder::Storage(layer) => {
                let storage = self.storages[usize::from(layer)].get().expect("a page names it");
                storage.read(part.place, buffer).await
            }
            Holder::Disk(layer) => self.layers[usize::from(layer)].reader(admits).read(at, buffer).await,
        }
    }

    /// Asks the images for a page.
    async fn make(&self, index: u64) -> Result<Arc<Page>> {
        let start = GuestOffset::new(index << PAGE.shift());
        let mut draft = Draft::new(within((self.size - start.bytes()).min(PAGE.bytes())));
        for (layer, Layer { disk, is_whole, .. }) in self.layers.iter().enumerate() {
            let Some(wanted) = draft.wanted() else { break };
            let size = disk.geometry().size.saturating_sub(start.bytes()).min(PAGE.bytes());
            let (inside, outside) = split(wanted, within(size));
            let number = u16::try_from(layer).expect("a chain is not as long");
            let mut has = match is_whole {
                true => vec![(inside, Holder::Disk(number), 0)],
                false => self.ask(number, start, inside).await?,
            };
            // What is past the end of an image reads as zero, whatever is below it.
            has.push((outside, Holder::Zero, 0));
            draft.lay_under(has);
        }
        let page = Arc::new(draft.finish());
        self.pages.put(index, page.clone());
        Ok(page)
    }

    /// What an image has of the bytes of a page.
    async fn ask(
        &self,
        layer: u16,
        page: GuestOffset,
        range: Range<u32>,
    ) -> Result<Vec<(Range<u32>, Holder, u64)>> {
        let Layer { disk, is_exchanged, .. } = &self.layers[usize::from(layer)];
        let mut has = Vec::new();
        let mut rest = (page + u64::from(range.start)).span(u64::from(range.end - range.start));
        while !rest.is_empty() {
            let extents = disk.map(rest).await?;
            let covered = extents.last().map_or(rest.start(), |last| last.span.end());
            if covered == rest.start() {
                return Err(Error::invalid("a disk says nothing about its bytes"));
            }
            for extent in extents {
                let start = within(extent.span.start().bytes() - page.bytes());
                let range = start..start + within(extent.span.len());
                match extent.place {
                    Place::Below => {}
                    Place::Zero { .. } => has.push((range, Holder::Zero, 0)),
                    Place::Data { storage, at } if !is_exchanged && self.is_of(layer, &storage) => {
                        has.push((range, Holder::Storage(layer), at.bytes()));
                    }
                    Place::Data { .. } | Place::Compressed { .. } => {
                        has.push((range, Holder::Disk(layer), 0))
                    }
                }
            }
            rest = GuestSpan::between(covered, rest.end().max(covered));
        }
        Ok(has)
    }

    /// Whether this is the storage of the image: the first one that it names.
    fn is_of(&self, layer: u16, storage: &SharedStorage) -> bool {
        let known = self.storages[usize::from(layer)].get_or_init(|| storage.clone());
        Arc::ptr_eq(known, storage)
    }
}

/// A number of bytes of one page.
fn within(bytes: u64) -> u32 {
    u32::try_from(bytes).expect("a page is short")
}

/// The part of the range before `end`, and the rest.
fn split(range: Range<u32>, end: u32) -> (Range<u32>, Range<u32>) {
    let end = end.clamp(range.start, range.end);
    (range.start..end, end..range.end)
}

impl Disk for View {
    fn geometry(&self) -> Geometry {
        self.first().geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.first().below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        match self.check(GuestSpan::checked(at, buffer.len() as u64)) {
            Ok(span) => Box::pin(self.read_span(span, buffer, true)),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.first().write(at, data, flags)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.first().flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.first().write_zeroes(span, flags)
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.first().discard(span, flags)
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.first().map(span)
    }

    /// The images are closed by their chain.
    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.closed.store(true, Ordering::Release);
        self.pages.clear();
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A view, for reads of which the caches over its images keep nothing. The owner of the view closes it.
pub(crate) struct Unadmitting(pub(crate) Arc<View>);

impl Disk for Unadmitting {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.0.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        match self.0.check(GuestSpan::checked(at, buffer.len() as u64)) {
            Ok(span) => Box::pin(self.0.read_span(span, buffer, false)),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.0.write(at, data, flags)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.0.flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.0.write_zeroes(span, flags)
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.0.discard(span, flags)
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.0.map(span)
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
