//! The disk behind a valve for background work: neither limited nor waiting. While the valve is held, requests fail
//! at once.

use std::sync::Arc;

use vellum_core::{
    Buffer, Disk, Error, ErrorKind, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan, LocalFuture,
    MergedExtent, PlaceKind, Result, SharedDisk, WriteFlags, ZeroFlags,
};

use super::Valve;

struct Aside(Arc<Valve>);

impl Valve {
    /// The disk behind it, for background work. While the valve is held its requests fail with `Locked`.
    pub fn aside(self: &Arc<Self>) -> SharedDisk {
        Arc::new(Aside(self.clone()))
    }
}

fn is_held<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Locked, "the disk is paused, or being exchanged"))
}

/// Does `$request` at the disk that is there, if the valve is open.
macro_rules! pass {
    ($aside:ident, $inner:ident => $request:expr) => {
        Box::pin(async move {
            let Some(_inside) = $aside.0.passage.try_enter() else { return is_held() };
            let $inner = $aside.0.inner.load();
            $request.await
        })
    };
}

impl Disk for Aside {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.0.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        pass!(self, disk => disk.read(at, buffer))
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        pass!(self, disk => disk.write(at, data, flags))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        pass!(self, disk => disk.flush())
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        pass!(self, disk => disk.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        pass!(self, disk => disk.discard(span, flags))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        pass!(self, disk => disk.map(span))
    }

    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        pass!(self, disk => disk.map_whole(span))
    }

    fn filling(&self) -> Option<Filling> {
        self.0.filling()
    }

    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        self.0.fill(at, data)
    }

    /// The disk is closed by its chain.
    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
