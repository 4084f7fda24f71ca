//! raw: the disk is the file, byte for byte.
//!
//! Nothing stands between a request and the storage, so the storage's contract is the disk's: overwrites are in place,
//! flushes go through (those at a time together), and a crash leaves each sector old or new. A file whose length is no multiple of 512 bytes is
//! served as if it were, as other programs do: the missing bytes read as zero, and before the first change there the file
//! is made longer, so that no sector can come out of a crash half old and half cut off.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::{
    BlockSize, Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, HostTally,
    ImageOffset, ImageSpan, LocalFuture, Place, Result, SharedStorage, Tallied, WriteFlags, ZeroFlags,
    Zeroes,
};

use crate::turns::Turns;

/// A raw image.
pub struct Raw {
    storage: SharedStorage,
    geometry: Geometry,
    /// The bytes of the file as it was opened.
    len: u64,
    /// The file has been made a multiple of 512 bytes long, or was.
    is_whole: AtomicBool,
    closed: AtomicBool,
    flushes: Turns,
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
            flushes: Turns::default(),
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
            Error::invalid(format!("the request passes the end of the disk at {:#x}", self.geometry.size))
        })?;
        Ok(ImageOffset::new(span.start().bytes()).span(span.len()))
    }

    fn check_change(&self, span: Option<GuestSpan>) -> Result<ImageSpan> {
        let span = self.check(span)?;
        if self.geometry.read_only {
            let why = format!("{} is open for reading only", self.storage.name());
            return Err(Error::new(ErrorKind::ReadOnly, why));
        }
        Ok(span)
    }

    /// Whether the change touches a last sector that the file has only in part.
    fn needs_whole(&self, span: ImageSpan) -> bool {
        !self.is_whole.load(Ordering::Acquire) && span.end().bytes() > BlockSize::SECTOR.round_down(self.len)
    }

    /// A host flush that began after now. Those who ask while one is under way share the next.
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
                return Err(Error::unsupported(format!("{} has no fast zeros", self.storage.name())));
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
            // What the file lacks of its last sector.
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
