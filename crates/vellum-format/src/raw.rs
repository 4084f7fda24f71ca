//! raw: the disk is the file, byte for byte.
//!
//! There is no layer between a request and the storage, so the storage's contract is the disk's: overwrites
//! are in place, flushes are passed on (concurrent ones together), and a crash leaves each sector old or new.
//! A file whose length is no multiple of 512 bytes is served as if it were, as other programs do: the missing
//! bytes read as zero, and before the first change there the file is extended, so that no sector can come out
//! of a crash half old and half missing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_lite::future::yield_now;
use vellum_core::{
    BlockSize, Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, HostTally,
    ImageOffset, ImageSpan, LocalFuture, Place, Result, SharedStorage, Storage, Tallied, WriteFlags,
    ZeroFlags, Zeroes,
};

use crate::engine::group_commit::GroupCommit;
use crate::image::{Files, Format, Growth, Head, OpenOptions, Opened, Reserve, ready};
use crate::probe::FormatKind;
use crate::report::{CheckReport, JournalChange, Repair};

/// A raw image.
pub struct Raw {
    storage: SharedStorage,
    geometry: Geometry,
    /// The bytes of the file as it was opened.
    len: u64,
    /// The file's length is a multiple of 512 bytes, from the beginning or because the file was extended.
    is_whole: AtomicBool,
    closed: AtomicBool,
    flushes: GroupCommit,
}

impl Raw {
    /// Opens the storage as a disk of its own length.
    pub fn open(storage: SharedStorage, read_only: bool, tally: &HostTally) -> Arc<Self> {
        let limits = storage.limits();
        let geometry = Geometry {
            size: BlockSize::SECTOR.round_up(storage.len()),
            block_size: limits.block_size,
            preferred_size: limits.physical_block.max(limits.block_size),
            read_only: read_only || limits.read_only,
            fast_zeroes: limits.fast_zeroes,
        };
        let len = storage.len();
        let is_whole = AtomicBool::new(len == geometry.size || limits.fixed_len);
        let storage = Tallied::shared(storage, tally.data.clone());
        Arc::new(Self {
            storage,
            geometry,
            len,
            is_whole,
            closed: AtomicBool::new(false),
            flushes: GroupCommit::default(),
        })
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the disk is closed"));
        }
        Ok(())
    }

    fn check(&self, span: Option<GuestSpan>) -> Result<ImageSpan> {
        self.check_open()?;
        let span = span.filter(|span| span.end().bytes() <= self.geometry.size).ok_or_else(|| {
            Error::invalid(format!(
                "the request extends past the end of the disk at {:#x}",
                self.geometry.size
            ))
        })?;
        Ok(ImageOffset::new(span.start().bytes()).span(span.len()))
    }

    fn check_change(&self, span: Option<GuestSpan>) -> Result<ImageSpan> {
        let span = self.check(span)?;
        if self.geometry.read_only {
            let why = format!("{} is open read-only", self.storage.name());
            return Err(Error::new(ErrorKind::ReadOnly, why));
        }
        Ok(span)
    }

    /// Whether the change touches a last sector of which the file has only a part.
    fn needs_whole(&self, span: ImageSpan) -> bool {
        !self.is_whole.load(Ordering::Acquire) && span.end().bytes() > BlockSize::SECTOR.round_down(self.len)
    }

    /// A host flush that began after now. Flushes that are requested while one is in progress share the next.
    async fn sync(&self) -> Result<()> {
        self.flushes.share(async || self.storage.flush().await, || None).await
    }

    async fn make_whole(&self) -> Result<()> {
        self.storage.set_len(self.geometry.size).await?;
        self.is_whole.store(true, Ordering::Release);
        Ok(())
    }
}

impl Disk for Raw {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        match self.check(GuestSpan::checked(at, buffer.len() as u64)) {
            Ok(span) => self.storage.read(span.start(), buffer),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        match self.check_change(GuestSpan::checked(at, data.len() as u64)) {
            Err(error) => Box::pin(std::future::ready(Err(error))),
            Ok(span) if !flags.fua && !self.needs_whole(span) => self.storage.write(span.start(), data),
            Ok(span) => Box::pin(async move {
                if self.needs_whole(span) {
                    self.make_whole().await?;
                }
                self.storage.write(span.start(), data).await?;
                if flags.fua { self.sync().await } else { Ok(()) }
            }),
        }
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        match self.check_open() {
            Ok(()) if self.geometry.read_only => Box::pin(std::future::ready(Ok(()))),
            Ok(()) => Box::pin(self.sync()),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check_change(Some(span))?;
            if flags.fast_only && !self.geometry.fast_zeroes {
                return Err(Error::unsupported(format!(
                    "{} does not support fast zeroing",
                    self.storage.name()
                )));
            }
            if self.needs_whole(span) {
                self.make_whole().await?;
            }
            let how = if flags.may_unmap { Zeroes::MayUnmap } else { Zeroes::Allocated };
            self.storage.write_zeroes(span, how).await?;
            if flags.fua { self.sync().await } else { Ok(()) }
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check_change(Some(span))?;
            self.storage.discard(span).await?;
            if flags.fua { self.sync().await } else { Ok(()) }
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let span = self.check(Some(span))?;
            let guest = |span: ImageSpan| GuestOffset::new(span.start().bytes()).span(span.len());
            let mut extents: Vec<Extent> = Vec::new();
            for run in self.storage.runs(span).await? {
                let place = match run.is_data {
                    true => Place::Data { storage: self.storage.clone(), at: run.span.start() },
                    false => Place::Zero { allocated: false },
                };
                extents.push(Extent { span: guest(run.span), place });
            }
            // The part of the last sector that the file does not have.
            if extents.is_empty() && !span.is_empty() {
                extents.push(Extent { span: guest(span), place: Place::Zero { allocated: false } });
            }
            Ok(extents)
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.closed.store(true, Ordering::Release);
            // Flushed each time: a second call must not make a success of what failed in the first.
            if self.geometry.read_only { Ok(()) } else { self.sync().await }
        })
    }
}

/// raw, as one of the formats.
pub(crate) struct RawFormat;

/// The head of a raw image, which is only its length.
struct Len(u64);

impl Format for RawFormat {
    fn kind(&self) -> FormatKind {
        FormatKind::Raw
    }

    fn is_recognised(&self) -> bool {
        false
    }

    fn read<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Box<dyn Head>>> {
        ready(Ok(Box::new(Len(image.len()))))
    }

    fn check<'a>(
        &'a self,
        _image: &'a SharedStorage,
        _repair: Repair,
        _say: &'a mut dyn FnMut(String),
    ) -> LocalFuture<'a, Result<Option<CheckReport>>> {
        ready(Ok(None))
    }

    fn finish<'a>(&'a self, image: &'a SharedStorage) -> LocalFuture<'a, Result<u64>> {
        ready(Ok(image.len()))
    }

    fn resize<'a>(
        &'a self,
        image: &'a SharedStorage,
        size: u64,
        may_shrink: bool,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            if size < image.len() && !may_shrink {
                return Err(Error::invalid(format!(
                    "the disk has {} bytes, and data beyond {size} would be lost: use --shrink",
                    image.len()
                )));
            }
            // The length of a device is fixed. A length that an earlier attempt has set may not be durable yet.
            if image.len() != size {
                image.set_len(size).await?;
            }
            image.flush().await
        })
    }

    fn grow_with<'a>(
        &'a self,
        image: &'a SharedStorage,
        size: u64,
        growth: &'a Growth,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let before = image.len();
            if growth.reserve == Reserve::Places {
                return Err(Error::invalid("a raw disk has no metadata: use --preallocation falloc or full"));
            }
            self.resize(image, size, false).await?;
            reserve_added(&**image, before, size, growth.reserve).await
        })
    }

    /// The length of a device cannot be set.
    fn grow<'a>(&'a self, image: &'a SharedStorage, size: u64) -> LocalFuture<'a, Result<()>> {
        match image.limits().fixed_len {
            true => ready(Ok(())),
            false => self.resize(image, size, false),
        }
    }

    /// Whether the device has been extended to exactly this length. Its disk would have the device's length
    /// when opened again, whatever is requested.
    fn may_grow<'a>(&'a self, image: &'a SharedStorage, size: u64) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            if !image.limits().fixed_len {
                return Ok(());
            }
            match image.look_at_len().await? {
                len if len == size => Ok(()),
                len => Err(Error::new(
                    ErrorKind::NoSpace,
                    format!("{} is a device of {len} bytes, and so is its disk", image.name()),
                )),
            }
        })
    }

    fn set_journal<'a>(
        &'a self,
        _image: &'a SharedStorage,
        name: &'a str,
        _wish: Option<Option<u64>>,
    ) -> LocalFuture<'a, Result<JournalChange>> {
        ready(Err(Error::unsupported(format!("{name} is a raw image, which cannot have a journal"))))
    }
}

impl Head for Len {
    fn kind(&self) -> FormatKind {
        FormatKind::Raw
    }

    fn size(&self) -> u64 {
        self.0
    }

    fn knows_whether_closed(&self) -> bool {
        false
    }

    fn open<'a>(&'a self, files: Files, options: OpenOptions) -> LocalFuture<'a, Result<Opened>> {
        if options.snapshot.is_some() {
            return ready(Err(Error::new(ErrorKind::NotFound, "a raw image has no snapshots")));
        }
        let disk = Raw::open(files.image, options.read_only, &options.tally);
        ready(Ok(Opened {
            disk,
            snapshots: None,
            compressing: None,
            detaching: None,
            sessions: None,
            bitmaps: None,
            views: None,
            tier: None,
            zeros: None,
        }))
    }
}

/// Zeros are written in pieces of this many bytes, and space is reserved in pieces of this many.
const WRITTEN_AT_ONCE: u64 = 1 << 20;
const RESERVED_AT_ONCE: u64 = 256 << 20;

/// Reserves space for what was added from `before` to `size`, or takes it away again. Durable when it returns.
pub(crate) async fn reserve_added(image: &dyn Storage, before: u64, size: u64, how: Reserve) -> Result<()> {
    let Err(error) = reserve(image, before, size, how).await else { return image.flush().await };
    let undone = async {
        image.set_len(before).await?; // nothing was written behind the old end
        image.flush().await
    };
    match undone.await {
        Ok(()) => Err(error),
        Err(undoing) => Err(error.context(format!("can't undo it: {}", undoing.chain()))),
    }
}

/// Reserves space from `before` to `size`.
pub(crate) async fn reserve(image: &dyn Storage, before: u64, size: u64, how: Reserve) -> Result<()> {
    let mut rest = ImageOffset::new(before).span(size.saturating_sub(before));
    while !rest.is_empty() && how != Reserve::Nothing {
        let piece = if how == Reserve::Zeros { WRITTEN_AT_ONCE } else { RESERVED_AT_ONCE };
        let (now, later) = rest.split_at(piece);
        match how {
            Reserve::Zeros => {
                let len = usize::try_from(now.len()).expect("a piece is short");
                image.write(now.start(), Buffer::zeroed(len)).await?;
            }
            _ => image.write_zeroes(now, Zeroes::Allocated).await?,
        }
        rest = later;
        yield_now().await;
    }
    Ok(())
}
