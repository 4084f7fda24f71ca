//! The map of a whole chain, as one disk reports it: which image holds each byte, and at what depth.
//!
//! Each disk's [`map`](crate::Disk::map) covers only its own data and reports [`Place::Below`] elsewhere.
//! Here the query goes down the chain until a disk holds the range. Past the end of a shorter disk below,
//! everything reads as zero.

use crate::disk::{Disk, Filled, MergedExtent, Place, SharedDisk, merged};
use crate::units::{GuestOffset, GuestSpan, ImageOffset};
use crate::{Buffer, Error, Result, SharedStorage};

/// Fills the buffer from the disk below, if there is one; zeros past its end, and where there is none.
pub async fn read_below(below: Option<&SharedDisk>, at: GuestOffset, mut buffer: Buffer) -> Result<Buffer> {
    let inside = below.map_or(0, |below| below.geometry().size.saturating_sub(at.bytes()));
    let mut outside = buffer.split_off(usize::try_from(inside).unwrap_or(usize::MAX).min(buffer.len()));
    outside.fill(0);
    let mut filled = match below {
        Some(below) if !buffer.is_empty() => below.read(at, buffer).await?,
        _ => buffer,
    };
    filled.append(outside);
    Ok(filled)
}

/// Gives the disk a copy of what the disk below has there, widened to whole blocks of
/// [`Filling::unit`](crate::Filling). Nothing happens to a disk that takes no copies.
///
/// # Errors
/// Those of the disk below, and of [`Disk::fill`].
pub async fn fill_from_below(disk: &dyn Disk, span: GuestSpan) -> Result<Filled> {
    let (Some(filling), Some(below)) = (disk.filling(), disk.below()) else { return Ok(Filled::default()) };
    let end = below.geometry().size.min(disk.geometry().size);
    let wide = filling.unit.widen(span);
    let (span, _) = wide.split_at(end.saturating_sub(wide.start().bytes()));
    if span.is_empty() {
        return Ok(Filled::default());
    }
    let len = usize::try_from(span.len()).map_err(|_| Error::invalid("the run is longer than memory"))?;
    let copy = below.read(span.start(), Buffer::for_overwrite(len)).await?;
    disk.fill(span.start(), copy).await
}

/// The extents of the run, from its start, in order, without gaps, neighbours of one place merged. May stop
/// early, but is not empty unless the run is.
///
/// The storages that are named are held by the answer, and meanwhile: a caller that need not know them asks for
/// [`Disk::map_whole`]. Neighbours that are compressed are one extent, which says where they are only if all of them lie together:
/// [`map_placed`] says it of each.
pub async fn map_merged(disk: &SharedDisk, span: GuestSpan) -> Result<Vec<MergedExtent>> {
    let joins = |last: &mut MergedExtent, next: &Place| {
        let continues = continues(last, next);
        match (&mut last.place, next) {
            (Place::Compressed { from }, Place::Compressed { .. }) => {
                if !continues {
                    *from = None;
                }
                true
            }
            _ => continues,
        }
    };
    merged(&**disk, span, joins).await
}

/// As [`map_merged`], with the place of each run that is compressed.
///
/// # Errors
/// Those of the disks.
pub async fn map_placed(disk: &SharedDisk, span: GuestSpan) -> Result<Vec<MergedExtent>> {
    merged(&**disk, span, |last, next| continues(last, next)).await
}

/// Whether what comes next lies behind what came last.
fn continues(last: &MergedExtent, next: &Place) -> bool {
    let follows = |(a, at): (&SharedStorage, ImageOffset), (b, next_at): (&SharedStorage, ImageOffset)| {
        std::sync::Arc::ptr_eq(a, b) && at.checked_add(last.span.len()) == Some(next_at)
    };
    match (&last.place, next) {
        (Place::Zero { allocated: a }, Place::Zero { allocated: b }) => a == b,
        (Place::Data { storage: a, at }, Place::Data { storage: b, at: next_at }) => {
            follows((a, *at), (b, *next_at))
        }
        (Place::Compressed { from: Some((a, at)) }, Place::Compressed { from: Some((b, next_at)) }) => {
            follows((a, *at), (b, *next_at))
        }
        (Place::Compressed { from: None }, Place::Compressed { from: None })
        | (Place::Below, Place::Below) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::Arc;

    use futures_lite::future::{block_on, poll_once};

    use super::*;
    use crate::{
        Extent, Geometry, ImageOffset, LocalFuture, MemoryDisk, MemoryStorage, SharedStorage, WriteFlags,
        ZeroFlags,
    };

    /// A disk whose map has two parts; the second one is waited for, as at a valve that is held.
    struct InParts {
        disk: Arc<MemoryDisk>,
        storage: std::sync::Mutex<Option<SharedStorage>>,
    }

    impl Disk for InParts {
        fn geometry(&self) -> Geometry {
            self.disk.geometry()
        }

        fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
            self.disk.read(at, buffer)
        }

        fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            self.disk.write(at, data, flags)
        }

        fn flush(&self) -> LocalFuture<'_, Result<()>> {
            self.disk.flush()
        }

        fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
            self.disk.write_zeroes(span, flags)
        }

        fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            self.disk.discard(span, flags)
        }

        fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
            Box::pin(async move {
                let storage = self.storage.lock().expect("no panic").take();
                let Some(storage) = storage else { return pending().await };
                let (first, _) = span.split_at(4096);
                Ok(vec![Extent { span: first, place: Place::Data { storage, at: ImageOffset::ZERO } }])
            })
        }

        fn close(&self) -> LocalFuture<'_, Result<()>> {
            self.disk.close()
        }
    }

    #[test]
    fn no_storage_is_held_while_the_rest_of_a_map_is_waited_for() {
        let storage: SharedStorage = MemoryStorage::new("held");
        let left = Arc::downgrade(&storage);
        let disk: SharedDisk =
            Arc::new(InParts { disk: MemoryDisk::new(1 << 20), storage: Some(storage).into() });
        let mut asking = disk.map_whole(GuestOffset::ZERO.span(1 << 20));
        assert!(block_on(poll_once(&mut asking)).is_none());
        assert_eq!(left.strong_count(), 0);
    }
}
