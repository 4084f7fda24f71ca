//! A disk that takes part in a migration and is not written: its image is open read-only, and a change fails with
//! the reason.
//!
//! A disk that will be written says already now that it can be: its front ends ask only once.

use vellum_core::{
    Buffer, Disk, Error, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Result, SharedDisk,
    WriteFlags, ZeroFlags,
};

/// A disk that is not written for the time being.
pub struct Barred {
    inner: SharedDisk,
    why: Error,
    read_only: bool,
}

impl Barred {
    /// Over a disk that is open read-only. Changes fail with this error. `read_only`: it also says so.
    pub fn over(inner: SharedDisk, why: Error, read_only: bool) -> SharedDisk {
        std::sync::Arc::new(Self { inner, why, read_only })
    }

    fn refuse(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Err(self.why.clone())))
    }
}

impl Disk for Barred {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: self.read_only, ..self.inner.geometry() }
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.inner.read(at, buffer)
    }

    fn write(&self, _at: GuestOffset, _data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.refuse()
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, _span: GuestSpan, _flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.refuse()
    }

    fn discard(&self, _span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.refuse()
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.inner.map(span)
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.close()
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{ErrorKind, MemoryDisk};

    use super::*;

    #[test]
    fn it_is_read_and_not_written() {
        let disk =
            Barred::over(MemoryDisk::new(4096), Error::new(ErrorKind::Refused, "it awaits its disk"), false);
        let (at, span) = (GuestOffset::ZERO, GuestOffset::ZERO.span(512));
        block_on(async {
            assert_eq!(disk.read(at, Buffer::for_overwrite(512)).await.unwrap().to_vec(), [0; 512]);
            for refused in [
                disk.write(at, Buffer::zeroed(512), WriteFlags::default()).await,
                disk.write_zeroes(span, ZeroFlags::default()).await,
                disk.discard(span, WriteFlags::default()).await,
            ] {
                assert_eq!(refused.unwrap_err().kind(), ErrorKind::Refused);
            }
            disk.flush().await.unwrap();
            assert!(!disk.geometry().read_only && disk.filling().is_none());
        });
    }
}
