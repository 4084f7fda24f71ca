//! A part of a disk as a disk of its own, which is only read.
//!
//! ```text
//!   the disk    │ … skipped … │ the window      │ … not copied … │
//!   the window                0                 size
//! ```

use vellum_core::{
    Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, MergedExtent,
    PlaceKind, Result, SharedDisk, WriteFlags, ZeroFlags,
};

/// The part from `start` on, of `size` bytes.
pub(crate) struct Window {
    inner: SharedDisk,
    start: u64,
    size: u64,
}

impl Window {
    /// As much of it as the disk has.
    pub(crate) fn of(inner: SharedDisk, start: u64, size: u64) -> Self {
        let has = inner.geometry().size;
        let start = start.min(has);
        Self { inner, start, size: size.min(has - start) }
    }

    fn check(&self, span: GuestSpan) -> Result<GuestSpan> {
        let end = span.start().bytes().checked_add(span.len());
        match end.filter(|end| *end <= self.size) {
            Some(_) => Ok((span.start() + self.start).span(span.len())),
            None => Err(Error::invalid(format!(
                "{} bytes at {} are outside of the disk",
                span.len(),
                span.start()
            ))),
        }
    }

    /// A run of the inner disk as a run of the window.
    fn outward(&self, span: GuestSpan) -> GuestSpan {
        GuestOffset::new(span.start().bytes() - self.start).span(span.len())
    }
}

fn refused<'a, T: 'a>() -> LocalFuture<'a, Result<T>> {
    Box::pin(std::future::ready(Err(Error::new(ErrorKind::ReadOnly, "a part of a disk is only read"))))
}

impl Disk for Window {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size, read_only: true, ..self.inner.geometry() }
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = self.check(at.span(buffer.len() as u64))?;
            self.inner.read(span.start(), buffer).await
        })
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

    /// What a disk below the inner one has is this disk's own: it has none below.
    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let merged = vellum_core::map_merged(&self.inner, self.check(span)?).await?;
            let extent =
                |extent: MergedExtent| Extent { span: self.outward(extent.span), place: extent.place };
            Ok(merged.into_iter().map(extent).collect())
        })
    }

    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        Box::pin(async move {
            let merged = self.inner.map_whole(self.check(span)?).await?;
            let extent =
                |extent: MergedExtent<PlaceKind>| MergedExtent { span: self.outward(extent.span), ..extent };
            Ok(merged.into_iter().map(extent).collect())
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_lite::future::block_on;
    use vellum_core::MemoryDisk;

    use super::*;

    #[test]
    fn a_window_has_its_part_and_no_more() {
        let bytes: Vec<u8> = (0..10_000u32).map(|number| number.to_le_bytes()[0] | 1).collect();
        let inner: SharedDisk = MemoryDisk::holding(&bytes);
        for (start, size, expected) in
            [(1000, 3000, 1000..4000), (9000, 5000, 9000..10_000), (20_000, 5, 0..0)]
        {
            let disk = Window::of(inner.clone(), start, size);
            let len = expected.len();
            assert_eq!(disk.geometry().size, len as u64);
            let read = block_on(disk.read(GuestOffset::ZERO, Buffer::for_overwrite(len))).unwrap();
            assert_eq!(read.to_vec(), bytes[expected]);
            assert!(block_on(disk.read(GuestOffset::ZERO, Buffer::for_overwrite(len + 1))).is_err());
            assert!(block_on(disk.discard(GuestOffset::ZERO.span(0), WriteFlags::default())).is_err());
            if len > 0 {
                let disk: SharedDisk = Arc::new(disk);
                let map =
                    block_on(vellum_core::map_merged(&disk, GuestOffset::ZERO.span(len as u64))).unwrap();
                let (first, last) = (map.first().unwrap().span.start(), map.last().unwrap().span.end());
                assert_eq!((first.bytes(), last.bytes()), (0, len as u64));
            }
        }
    }
}
