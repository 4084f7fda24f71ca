//! The tables of an image, by sectors: a [`Storage`] over the image file, through which a format reads its tables.
//!
//! ```text
//!   format ── reads of tables ─► tables() ─► zero, flash, or the image          memory: the format's own pages, of a sector each
//!          └─ all else ────────► image()  ─► the image                          a change is known before it reaches the image
//!                                   windows that are read go to slots, as clean blocks of a row of their own
//! ```
//!
//! A window (64 KiB of the image, or a table where that is shorter) is read as a whole when flash has not what is asked for, and
//! kept; of the window only what was asked for goes to the format's memory. The key of a block is its place in the image. What is
//! kept is clean: what the format writes goes to the image, and flash is read no more there (`known`). So nothing of this
//! is needed for anything, and it uses spare slots alone, as data that was read.
//!
//! 1. Nothing is believed of flash that the image has not: `known` says what has changed since, and it knows every block of the row
//!    from the beginning of the opening.
//! 2. While an image is open for writing, its row has a number that was drawn, durably, from before the first change: after an
//!    unclean end nothing finds it.
//! 3. A clean close names the row by what proves the image's content. By then the image is flushed, what has changed is given
//!    up, and the time since the last change is longer than a tick of the host's clock, so that a later change has another time.
//! 4. An image that is only read has that name all the time.
//!
//! Left out: which bytes of an image are tables. The format says so by what it reads from.

mod known;

use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_core::pin::Proof;
use vellum_core::{
    BlockSize, Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, ImageOffset,
    ImageSpan, Limits, LocalFuture, Place, Result, SharedStorage, Storage, StorageRun, WriteFlags, ZeroFlags,
    Zeroes, is_zero, lock, try_join_all,
};

use self::known::{Known, Source};
use crate::disk::{FlashDisk, count};
use crate::layout::{BLOCK_BYTES, BLOCK_LEN, BLOCKS_MAX, Key, ROWS_MAX, SECTOR_BYTES};
use crate::options::{CLOCK_STEP, DiskOptions, FlashPolicy};
use crate::record::Row;
use crate::shared::FlashCache;

/// A window is at most as long.
const WINDOW_BYTES_MAX: u64 = 64 << 10;
/// Only what lies before this is cached.
const SIZE: u64 = 1 << 59;

/// The last bytes of what identifies a row of tables.
const MARK: [u8; 6] = *b"tables";
/// Rows of tables are made only while no more than one row in this many is open: the others are for disks.
const OPEN_ROWS_MAX: usize = ROWS_MAX as usize / 4;

/// An image whose tables are to be cached.
pub struct MetadataOptions {
    /// The image file.
    pub image: SharedStorage,
    /// What proves its content now; nothing where nothing does.
    pub name: Option<[u8; 16]>,
    /// It is opened for writing.
    pub is_written: bool,
    /// The length of a table, in bytes.
    pub table_bytes: u64,
}

/// What was read of tables, and from where.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MetadataCounts {
    /// Entries that the format looked up, where it holds its tables by pages.
    pub lookups: u64,
    /// Reads of tables that were known to be zero.
    pub zeros: u64,
    /// Reads of tables from flash.
    pub flash_hits: u64,
    /// Reads of tables from the image.
    pub misses: u64,
    /// Bytes read from flash.
    pub flash_read_bytes: u64,
    /// Bytes read from the image.
    pub image_read_bytes: u64,
    /// Bytes written to flash, without the records that name them.
    pub flash_write_bytes: u64,
}

impl MetadataCounts {
    /// Lookups that needed neither flash nor the image.
    pub fn memory_hits(&self) -> u64 {
        self.lookups.saturating_sub(self.flash_hits + self.misses)
    }
}

impl std::ops::AddAssign for MetadataCounts {
    fn add_assign(&mut self, other: Self) {
        self.lookups += other.lookups;
        self.zeros += other.zeros;
        self.flash_hits += other.flash_hits;
        self.misses += other.misses;
        self.flash_read_bytes += other.flash_read_bytes;
        self.image_read_bytes += other.image_read_bytes;
        self.flash_write_bytes += other.flash_write_bytes;
    }
}

#[derive(Default)]
struct Tally {
    zeros: AtomicU64,
    flash_hits: AtomicU64,
    misses: AtomicU64,
    flash_read_bytes: AtomicU64,
    image_read_bytes: AtomicU64,
}

/// The tables of an open image, in the cache.
pub struct FlashMetadata {
    cache: Arc<FlashCache>,
    disk: Arc<FlashDisk>,
    image: SharedStorage,
    window_bytes: u64,
    is_written: bool,
    known: Mutex<Known>,
    lookups: Arc<AtomicU64>,
    tally: Tally,
}

impl FlashCache {
    /// Caches the tables of an image that is about to be opened. All its reads and writes must go through what this
    /// returns, from here to [`FlashMetadata::close`].
    ///
    /// # Errors
    /// `Locked` when the same content is open with the cache already; `NoSpace` when there is no row left; those of flash.
    pub async fn open_metadata(self: &Arc<Self>, options: MetadataOptions) -> Result<Arc<FlashMetadata>> {
        let MetadataOptions { image, name, is_written, table_bytes } = options;
        self.check_open()?;
        self.stop.check()?;
        let name = name.map(number_of);
        let disk = match name.filter(|_| !is_written) {
            Some(name) => name,
            None => self.take_name(name, || number_of(self.draw_row().to_be_bytes())).await?,
        };
        if lock(&self.disks).len() > OPEN_ROWS_MAX {
            let why = format!("{}: the rows that are left are for disks", self.name());
            return Err(Error::new(ErrorKind::NoSpace, why));
        }
        let disk = disk.to_be_bytes();
        let home = Arc::new(Flat { image: image.clone() });
        let disk =
            DiskOptions { disk, home, sessions: None, policy: FlashPolicy::ReadOnly, trusts_home: true };
        let disk = self.open_disk(disk).await?;
        let window_bytes = table_bytes.clamp(BLOCK_BYTES, WINDOW_BYTES_MAX);
        let mut known = Known::new(window_bytes, self.windows.clone());
        if is_written {
            let keys = self.state().map.keys_between(Key::new(disk.home.row, 0), BLOCKS_MAX);
            for key in keys {
                if !known.note(key.block() * BLOCK_BYTES / window_bytes) {
                    // More than can be known: then nothing of it may be believed.
                    disk.home.drop_cached(whole_of(key.block()), async || Ok(())).await?;
                }
            }
        }
        Ok(Arc::new(FlashMetadata {
            cache: self.clone(),
            disk,
            image,
            window_bytes,
            is_written,
            known: Mutex::new(known),
            lookups: Arc::default(),
            tally: Tally::default(),
        }))
    }
}

/// What identifies a row of tables with this name.
fn number_of(mut name: [u8; 16]) -> u128 {
    name[16 - MARK.len()..].copy_from_slice(&MARK);
    u128::from_be_bytes(name)
}

/// Whether a row is one of tables.
pub(crate) fn is_of_tables(row: &Row) -> bool {
    row.disk.to_be_bytes().ends_with(&MARK)
}

fn copy_pieces(to: &mut Buffer, mut place: usize, from: &Buffer) {
    for piece in from.pieces() {
        to.copy_from(place, piece);
        place += piece.len();
    }
}

fn whole_of(block: u64) -> GuestSpan {
    GuestOffset::new(block * BLOCK_BYTES).span(BLOCK_BYTES)
}

fn sectors_of(span: ImageSpan) -> Range<u64> {
    match span.is_empty() {
        true => 0..0,
        false => span.start().bytes() / SECTOR_BYTES..span.end().bytes().div_ceil(SECTOR_BYTES),
    }
}

impl FlashMetadata {
    /// The image file, for all but reads of tables.
    pub fn image(self: &Arc<Self>) -> SharedStorage {
        Arc::new(Through { metadata: self.clone(), reads_tables: false })
    }

    /// The image file, for reads of tables.
    pub fn tables(self: &Arc<Self>) -> SharedStorage {
        Arc::new(Through { metadata: self.clone(), reads_tables: true })
    }

    /// Where the format counts entries that it looks up.
    pub fn lookups(&self) -> Arc<AtomicU64> {
        self.lookups.clone()
    }

    /// What was read so far.
    pub fn counts(&self) -> MetadataCounts {
        let of = |number: &AtomicU64| number.load(Ordering::Relaxed);
        MetadataCounts {
            lookups: of(&self.lookups),
            zeros: of(&self.tally.zeros),
            flash_hits: of(&self.tally.flash_hits),
            misses: of(&self.tally.misses),
            flash_read_bytes: of(&self.tally.flash_read_bytes),
            image_read_bytes: of(&self.tally.image_read_bytes),
            flash_write_bytes: self.disk.counts().admit_writes,
        }
    }

    /// The image is closed, and nothing changes it until this returns. `name` says what proves its content then: the next
    /// opening finds what is cached by that. Where nothing does, nothing is found.
    ///
    /// # Errors
    /// Those of flash, and of a flush of the image. What is cached is not found again then.
    pub async fn close(&self, name: impl AsyncFnOnce() -> Option<[u8; 16]>) -> Result<()> {
        if !self.is_written {
            return self.disk.close().await;
        }
        let named = self.name_row(name).await;
        let closed = self.disk.close().await;
        if !matches!(named, Ok(true)) && self.cache.failure().is_none() {
            // Nothing finds it any more.
            self.cache.state().remove_row(self.disk.home.row);
        }
        named.map(drop).and(closed)
    }

    /// False when there is no name.
    async fn name_row(&self, name: impl AsyncFnOnce() -> Option<[u8; 16]>) -> Result<bool> {
        if self.cache.failure().is_some() || !lock(&self.known).is_quiet() {
            return Ok(false);
        }
        self.image.flush().await?;
        if let Some(clock) = &self.cache.options.clock {
            clock.sleep(CLOCK_STEP).await;
        }
        let Some(name) = name().await else { return Ok(false) };
        self.disk.home.drop_fetched();
        let changed = lock(&self.known).changed();
        for sectors in changed {
            let start = GuestOffset::new(sectors.start * SECTOR_BYTES);
            let span = GuestSpan::between(start, GuestOffset::new(sectors.end * SECTOR_BYTES));
            self.disk.home.drop_cached(span, async || Ok(())).await?;
        }
        let name = number_of(name);
        self.cache.forget_useless(name);
        {
            let mut state = self.cache.state();
            if state.row_of(name).is_some() {
                return Ok(false);
            }
            let row = state.ledger.rows.get(&self.disk.home.row).copied().expect("an open disk has a row");
            state.set_row(Row { disk: name, ..row });
        }
        self.cache.commit_all().await?; // commit point
        Ok(true)
    }

    async fn read_tables(&self, at: ImageOffset, mut buffer: Buffer) -> Result<Buffer> {
        let span = at.span(buffer.len() as u64);
        if span.is_empty() || span.end().bytes() > SIZE || self.cache.failure().is_some() {
            return self.image.read(at, buffer).await;
        }
        let (first, last) = (at.bytes() / self.window_bytes, (span.end().bytes() - 1) / self.window_bytes);
        if first == last {
            return self.read_in_window(span, buffer).await;
        }
        let parts = (first..=last).map(|window| {
            let start = ImageOffset::new((window * self.window_bytes).max(at.bytes()));
            let end = ImageOffset::new(((window + 1) * self.window_bytes).min(span.end().bytes()));
            let part = ImageSpan::between(start, end);
            let len = usize::try_from(part.len()).expect("a window");
            let part: LocalFuture<'_, Result<Buffer>> =
                Box::pin(self.read_in_window(part, Buffer::for_overwrite(len)));
            part
        });
        let mut place = 0;
        for part in try_join_all(parts).await? {
            copy_pieces(&mut buffer, place, &part);
            place += part.len();
        }
        Ok(buffer)
    }

    async fn read_in_window(&self, span: ImageSpan, mut buffer: Buffer) -> Result<Buffer> {
        let window = span.start().bytes() / self.window_bytes;
        let len = span.len();
        let source = lock(&self.known).find(window, &sectors_of(span));
        match source {
            Source::Zero => {
                count(&self.tally.zeros, 1);
                buffer.fill(0);
                return Ok(buffer);
            }
            Source::Flash if self.has(span) => {
                count(&self.tally.flash_hits, 1);
                count(&self.tally.flash_read_bytes, len);
                // Slots that are no neighbours give pieces; what a storage reads is one.
                let own = Buffer::for_overwrite(buffer.len());
                let own = self.disk.home.read(GuestOffset::new(span.start().bytes()), own, false).await?;
                copy_pieces(&mut buffer, 0, &own);
                return Ok(buffer);
            }
            Source::Image => {
                count(&self.tally.misses, 1);
                count(&self.tally.image_read_bytes, len);
                return self.image.read(span.start(), buffer).await;
            }
            Source::Flash | Source::Anew => {}
        }
        count(&self.tally.misses, 1);
        count(&self.tally.image_read_bytes, self.window_bytes);
        let bytes = self.fetch(window, source == Source::Anew).await?;
        let from = usize::try_from(span.start().bytes() % self.window_bytes).expect("a window");
        buffer.copy_from(0, &bytes.slice()[from..from + buffer.len()]);
        Ok(buffer)
    }

    /// Whether flash has all of it.
    fn has(&self, span: ImageSpan) -> bool {
        let blocks = span.start().bytes() / BLOCK_BYTES..span.end().bytes().div_ceil(BLOCK_BYTES);
        let state = self.cache.state();
        blocks.into_iter().all(|block| state.map.get(Key::new(self.disk.home.row, block)).is_some())
    }

    /// Reads a window, and keeps it unless all of it is zero. What is known to be zero is forgotten at the end of the opening, so a
    /// part that is zero is kept with the rest.
    async fn fetch(&self, window: u64, is_anew: bool) -> Result<Buffer> {
        let home = &self.disk.home;
        let start = window * self.window_bytes;
        let span = GuestOffset::new(start).span(self.window_bytes);
        let number = lock(&self.known).begin_fetch(window, is_anew);
        let read = async {
            if is_anew {
                home.drop_cached(span, async || Ok(())).await?;
            }
            let watch = home.claims.watch(start / BLOCK_BYTES..(start + self.window_bytes) / BLOCK_BYTES);
            let len = usize::try_from(self.window_bytes).expect("a window");
            let read = self.image.read(ImageOffset::new(start), Buffer::for_overwrite(len)).await?;
            Ok::<_, Error>((read.contiguous(), watch))
        };
        let (bytes, watch) = match read.await {
            Ok(read) => read,
            Err(error) => {
                lock(&self.known).give_up_fetch(number);
                return Err(error);
            }
        };
        let sectors = bytes.slice().chunks(512).enumerate();
        let zero = sectors.filter(|(_, sector)| is_zero(sector)).fold(0, |zero, (bit, _)| zero | 1 << bit);
        lock(&self.known).end_fetch(number, zero);
        if is_zero(bytes.slice()) {
            return Ok(bytes);
        }
        let blocks = bytes.slice().chunks(BLOCK_LEN).enumerate();
        let copies: Vec<(GuestSpan, Buffer)> = blocks
            .map(|(index, block)| (whole_of(start / BLOCK_BYTES + index as u64), Buffer::copy_of(block)))
            .filter(|(block, _)| !self.has(ImageOffset::new(block.start().bytes()).span(BLOCK_BYTES)))
            .collect();
        if !copies.is_empty() {
            home.offer(copies, watch);
            // What fails here stops the cache, which is met elsewhere; the bytes are read.
            let _made = self.cache.make_spare(16).await;
            while home.admit_some().await {}
        }
        Ok(bytes)
    }

    /// Makes a change of the image. When it is dropped half way, it counts as under way for ever.
    async fn change<T>(&self, sectors: Range<u64>, change: LocalFuture<'_, Result<T>>) -> Result<T> {
        let number = lock(&self.known).begin_change(sectors);
        let changed = change.await;
        lock(&self.known).end_change(number);
        changed
    }
}

/// A handle to the image file.
struct Through {
    metadata: Arc<FlashMetadata>,
    reads_tables: bool,
}

impl Through {
    fn image(&self) -> &dyn Storage {
        &*self.metadata.image
    }
}

impl Storage for Through {
    fn name(&self) -> &str {
        self.image().name()
    }

    fn limits(&self) -> &Limits {
        self.image().limits()
    }

    fn len(&self) -> u64 {
        self.image().len()
    }

    fn look_at_len(&self) -> LocalFuture<'_, Result<u64>> {
        self.image().look_at_len()
    }

    fn proof(&self) -> Option<Proof> {
        self.image().proof()
    }

    fn proof_now(&self) -> LocalFuture<'_, Result<Option<Proof>>> {
        self.image().proof_now()
    }

    fn changed_at(&self) -> LocalFuture<'_, Result<Option<i128>>> {
        self.image().changed_at()
    }

    fn description(&self) -> String {
        self.image().description()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        match self.reads_tables {
            true => Box::pin(self.metadata.read_tables(at, buffer)),
            false => self.image().read(at, buffer),
        }
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        let sectors = sectors_of(at.span(data.len() as u64));
        Box::pin(self.metadata.change(sectors, self.image().write(at, data)))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.image().flush()
    }

    fn reconcile(&self, span: ImageSpan) -> LocalFuture<'_, Result<bool>> {
        Box::pin(self.metadata.change(sectors_of(span), self.image().reconcile(span)))
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.metadata.change(sectors_of(span), self.image().write_zeroes(span, how)))
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.metadata.change(sectors_of(span), self.image().discard(span)))
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        // What lies past the end reads as zero, before and after it grows.
        let sectors = if len < self.len() { len / SECTOR_BYTES..u64::MAX } else { 0..0 };
        Box::pin(self.metadata.change(sectors, self.image().set_len(len)))
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.image().preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.image().runs(span)
    }
}

/// The image file as a disk that is only read, for the cache's side.
struct Flat {
    image: SharedStorage,
}

fn refused() -> LocalFuture<'static, Result<()>> {
    Box::pin(std::future::ready(Err(Error::new(ErrorKind::ReadOnly, "tables are only read here"))))
}

impl Disk for Flat {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: SIZE,
            block_size: self.image.limits().block_size,
            preferred_size: BlockSize::PAGE,
            read_only: true,
            fast_zeroes: false,
        }
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.image.read(ImageOffset::new(at.bytes()), buffer)
    }

    fn write(&self, _at: GuestOffset, _data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        refused()
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn write_zeroes(&self, _span: GuestSpan, _flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        refused()
    }

    fn discard(&self, _span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        refused()
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        let at = ImageOffset::new(span.start().bytes());
        let place = Place::Data { storage: self.image.clone(), at };
        Box::pin(std::future::ready(Ok(vec![Extent { span, place }])))
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
