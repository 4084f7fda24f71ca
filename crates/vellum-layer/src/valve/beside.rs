//! A disk beside the one behind the valve, such as a snapshot of it: it is stored in the same place, so its
//! requests share the limits and wait at the same points.

use std::sync::Arc;
use std::time::Duration;

use vellum_core::{
    Buffer, Disk, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, MergedExtent, PlaceKind, Result,
    Room, SharedDisk, WriteFlags, ZeroFlags,
};

use super::Valve;
use super::limits::Direction;

struct Beside {
    valve: Arc<Valve>,
    disk: SharedDisk,
}

impl Valve {
    /// This disk, each of whose requests passes as one of the valve's own.
    pub fn beside(self: &Arc<Self>, disk: SharedDisk) -> SharedDisk {
        Arc::new(Beside { valve: self.clone(), disk })
    }
}

impl Beside {
    fn pass<'a, T: 'a>(
        &'a self,
        limited: Option<(Direction, u64)>,
        request: LocalFuture<'a, T>,
    ) -> LocalFuture<'a, T> {
        Box::pin(async move {
            let _inside = match self.valve.begin_at_once() {
                Some(inside) => inside,
                None => self.valve.begin_in_turn(limited).await,
            };
            request.await
        })
    }
}

impl Disk for Beside {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.disk.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        let limited = Some((Direction::Read, buffer.len() as u64));
        self.pass(limited, self.disk.read(at, buffer))
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        let limited = Some((Direction::Write, data.len() as u64));
        self.pass(limited, self.disk.write(at, data, flags))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.pass(None, self.disk.flush())
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.pass(Some((Direction::Write, span.len())), self.disk.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.pass(Some((Direction::Write, 0)), self.disk.discard(span, flags))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.pass(Some((Direction::Read, 0)), self.disk.map(span))
    }

    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        self.pass(Some((Direction::Read, 0)), self.disk.map_whole(span))
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        self.disk.tend(now)
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        self.pass(None, self.disk.room())
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.disk.close()
    }
}
