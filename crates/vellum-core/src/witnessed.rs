//! A disk as one session uses it: requests that promise durability fail once after a loss that the session has
//! not seen. Everything else goes to the disk below as it is.
//!
//! What a loss is, and which session gets a report of it, is in [`crate::losses`].

use std::sync::Arc;
use std::time::Duration;

use crate::disk::{
    Disk, Extent, Filled, Filling, Geometry, MergedExtent, PlaceKind, Room, SharedDisk, WriteFlags, ZeroFlags,
};
use crate::losses::{Losses, Witness};
use crate::units::{GuestOffset, GuestSpan};
use crate::{Buffer, LocalFuture, Result};

/// A disk as one session uses it.
struct Witnessed {
    inner: SharedDisk,
    witness: Arc<Witness>,
}

/// The disk for a session that has seen what this one has; the disk itself if it never loses anything.
pub fn witnessed(disk: SharedDisk, witness: Option<&Arc<Witness>>) -> SharedDisk {
    match witness {
        Some(witness) => Arc::new(Witnessed { inner: disk, witness: witness.clone() }),
        None => disk,
    }
}

/// The disk for a session that begins now.
pub fn witnessed_from_now(disk: SharedDisk) -> SharedDisk {
    let witness = disk.losses().map(|losses| losses.witness());
    witnessed(disk, witness.as_ref())
}

/// The disk for a connection that begins now.
pub fn witnessed_by_connection(disk: SharedDisk) -> SharedDisk {
    let witness = disk.losses().map(|losses| losses.witness_of_connection());
    witnessed(disk, witness.as_ref())
}

impl Witnessed {
    fn change<'a>(&'a self, fua: bool, change: LocalFuture<'a, Result<()>>) -> LocalFuture<'a, Result<()>> {
        if fua { Box::pin(self.witness.promise_change(change)) } else { change }
    }
}

impl Disk for Witnessed {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.inner.read(at, buffer)
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.change(flags.fua, self.inner.write(at, data, flags))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.witness.promise(self.inner.flush()))
    }

    fn flush_change(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.witness.promise_change(self.inner.flush()))
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.change(flags.fua, self.inner.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.change(flags.fua, self.inner.discard(span, flags))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.inner.map(span)
    }

    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        self.inner.map_whole(span)
    }

    fn losses(&self) -> Option<Arc<Losses>> {
        self.inner.losses()
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        self.inner.tend(now)
    }

    fn filling(&self) -> Option<Filling> {
        self.inner.filling()
    }

    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        self.inner.fill(at, data)
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        self.inner.room()
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.close()
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;

    use super::*;
    use crate::MemoryDisk;

    #[test]
    fn only_what_promises_durability_fails() {
        let losses = Arc::<Losses>::default();
        let disk = witnessed(MemoryDisk::new(4096), Some(&losses.witness()));
        let data = || Buffer::zeroed(512);
        let span = GuestOffset::ZERO.span(512);
        let zeros = |fua| ZeroFlags { fua, ..ZeroFlags::default() };
        block_on(async {
            for promise in 0..3 {
                losses.grow();
                disk.write(GuestOffset::ZERO, data(), WriteFlags::default()).await.expect("a write");
                disk.read(GuestOffset::ZERO, data()).await.expect("a read");
                disk.write_zeroes(span, zeros(false)).await.expect("zeros");
                disk.discard(span, WriteFlags::default()).await.expect("a discard");
                let change = async || match promise {
                    0 => disk.write(GuestOffset::ZERO, data(), WriteFlags::FUA).await,
                    1 => disk.write_zeroes(span, zeros(true)).await,
                    _ => disk.discard(span, WriteFlags::FUA).await,
                };
                change().await.expect_err("a loss");
                change().await.expect("it was told");
                disk.flush().await.expect_err("and it was not who flushes that was told");
                disk.flush().await.expect("it has heard of it");
                losses.grow();
                disk.flush().await.expect_err("a loss");
                change().await.expect("what a flush tells is for all");
            }
        });
    }
}
