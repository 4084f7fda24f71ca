//! What the tests share: short words for requests, and the simplest disk there is, a drive one to one.

#![allow(dead_code, unreachable_pub, reason = "every test file has a copy of its own and uses a part of it")]

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use vellum_core::{
    Buffer, Clock, Disk, Extent, Geometry, GuestOffset, GuestSpan, ImageOffset, ImageSpan, LocalFuture,
    Place, Result, Storage, WriteFlags, ZeroFlags, Zeroes,
};
use vellum_sim::{Content, Delay, Drive, DriveOptions, World};

pub fn at(bytes: u64) -> ImageOffset {
    ImageOffset::new(bytes)
}

pub fn span(start: u64, len: u64) -> ImageSpan {
    at(start).span(len)
}

pub fn guest(bytes: u64) -> GuestOffset {
    GuestOffset::new(bytes)
}

pub async fn write(drive: &dyn Storage, start: u64, len: usize, value: u8) -> Result<()> {
    drive.write(at(start), Buffer::copy_of(&vec![value; len])).await
}

pub async fn read(drive: &dyn Storage, start: u64, len: usize) -> Result<Vec<u8>> {
    Ok(drive.read(at(start), Buffer::for_overwrite(len)).await?.to_vec())
}

/// A drive of `len` zeros.
pub fn drive_of(world: &World, len: u64, options: DriveOptions) -> Arc<Drive> {
    Drive::from_content(world, Content::zeroed(len), options)
}

/// A delay that makes operations end in any order.
pub fn any_order() -> Delay {
    Delay::between(Duration::from_micros(10)..=Duration::from_micros(500))
}

/// What a crash test must find out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    None,
    /// A flush returns at once.
    ForgetsFlush,
    /// A write with FUA is not flushed.
    ForgetsFua,
    /// A flush ignores the writes that returned while it ran.
    SharesFlush,
}

/// A disk that is its drive, one to one.
pub struct RawDisk {
    drive: Arc<Drive>,
    bug: Bug,
    clock: Arc<dyn Clock>,
    flushing: AtomicUsize,
}

impl RawDisk {
    pub fn new(world: &World, drive: Arc<Drive>, bug: Bug) -> Arc<Self> {
        Arc::new(Self { drive, bug, clock: world.clock(), flushing: 0.into() })
    }

    async fn fua(&self, fua: bool) -> Result<()> {
        if fua && self.bug != Bug::ForgetsFua { self.drive.flush().await } else { Ok(()) }
    }
}

impl Disk for RawDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.drive.len(),
            block_size: self.drive.limits().block_size,
            preferred_size: self.drive.limits().physical_block,
            read_only: false,
            fast_zeroes: true,
        }
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.drive.read(ImageOffset::new(at.bytes()), buffer)
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.drive.write(ImageOffset::new(at.bytes()), data).await?;
            self.fua(flags.fua).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            match self.bug {
                Bug::ForgetsFlush => return Ok(()),
                Bug::SharesFlush if self.flushing.load(Relaxed) > 0 => {
                    // Waits for a flush that began too early.
                    while self.flushing.load(Relaxed) > 0 {
                        self.clock.sleep(Duration::from_micros(5)).await;
                    }
                    return Ok(());
                }
                _ => {}
            }
            self.flushing.fetch_add(1, Relaxed);
            let result = self.drive.flush().await;
            self.flushing.fetch_sub(1, Relaxed);
            result
        })
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let image = ImageOffset::new(span.start().bytes()).span(span.len());
            self.drive.write_zeroes(image, Zeroes::MayUnmap).await?;
            self.fua(flags.fua).await
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.drive.discard(ImageOffset::new(span.start().bytes()).span(span.len())).await?;
            self.fua(flags.fua).await
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        let at = ImageOffset::new(span.start().bytes());
        let place = Place::Data { storage: self.drive.clone(), at };
        Box::pin(std::future::ready(Ok(vec![Extent { span, place }])))
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.drive.flush()
    }
}
