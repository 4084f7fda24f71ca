//! The substitute for a disk that is closed and whose files were released: it knows the disk's size, and
//! nothing else.

use std::sync::Arc;

use vellum_core::{
    Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Result,
    SharedDisk, WriteFlags, ZeroFlags,
};

/// A disk that answers nothing any more.
pub(super) struct Gone(Geometry);

impl Gone {
    /// In the place of this one.
    pub(super) fn of(disk: &dyn Disk) -> SharedDisk {
        Arc::new(Self(disk.geometry()))
    }
}

fn closed<T: 'static>() -> LocalFuture<'static, Result<T>> {
    Box::pin(std::future::ready(Err(Error::new(ErrorKind::Closed, "the image is closed"))))
}

impl Disk for Gone {
    fn geometry(&self) -> Geometry {
        self.0.clone()
    }

    fn read(&self, _at: GuestOffset, _buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        closed()
    }

    fn write(&self, _at: GuestOffset, _data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        closed()
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        closed()
    }

    fn write_zeroes(&self, _span: GuestSpan, _flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        closed()
    }

    fn discard(&self, _span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        closed()
    }

    fn map(&self, _span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        closed()
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
