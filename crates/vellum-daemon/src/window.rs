//! A part of a disk as a disk of its own. One that is copied is only read, and stays open when the window is closed; one
//! that is served is written through its window, and closed with it.
//!
//! ```text
//!   the disk    │ … left out … │ the window      │ … left out … │
//!   the window                 0                 size
//! ```

use std::sync::Arc;
use std::time::Duration;

use vellum_core::{
    BlockSize, Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Losses,
    MergedExtent, PlaceKind, Result, Room, SharedDisk, WriteFlags, ZeroFlags,
};

/// Which part of a disk is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Part {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its size in bytes; by default all that follows.
    pub size: Option<u64>,
}

impl Part {
    /// This part of a disk, as a disk that is served in its place.
    pub(crate) fn of(self, inner: SharedDisk) -> SharedDisk {
        let size = self.size.unwrap_or(u64::MAX);
        Arc::new(Window { is_whole_way: true, ..Window::of(inner, self.offset, size) })
    }

    /// Checks that a disk of this size has this part.
    pub(crate) fn check(self, has: u64) -> Result<()> {
        let end = self.offset.checked_add(self.size.unwrap_or(0));
        match end.filter(|end| *end <= has) {
            Some(_) => Ok(()),
            None => Err(Error::invalid(format!(
                "the part of the disk that is to be served, {} bytes at {}, is outside of it: the disk has {has} bytes",
                self.size.map_or_else(|| "all".to_owned(), |size| size.to_string()),
                self.offset
            ))),
        }
    }
}

/// The part from `start` on, of `size` bytes.
pub(crate) struct Window {
    inner: SharedDisk,
    start: u64,
    size: u64,
    /// Writes pass, and so does all else that a disk that is served is asked.
    is_whole_way: bool,
}

impl Window {
    /// As much of it as the disk has.
    pub(crate) fn of(inner: SharedDisk, start: u64, size: u64) -> Self {
        let has = inner.geometry().size;
        let start = start.min(has);
        Self { inner, start, size: size.min(has - start), is_whole_way: false }
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

impl Window {
    /// Where a change goes in the inner disk.
    fn check_change(&self, span: GuestSpan) -> Result<GuestSpan> {
        match self.is_whole_way {
            true => self.check(span),
            false => Err(Error::new(ErrorKind::ReadOnly, "a part of a disk is only read")),
        }
    }
}

impl Disk for Window {
    fn geometry(&self) -> Geometry {
        let inner = self.inner.geometry();
        // A multiple of it, shifted by the start, is still one.
        let divides = |block: BlockSize| match self.start {
            0 => block,
            start => block.min(BlockSize::from_shift(start.trailing_zeros())),
        };
        Geometry {
            size: self.size,
            read_only: !self.is_whole_way || inner.read_only,
            block_size: divides(inner.block_size),
            ..inner
        }
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = self.check(at.span(buffer.len() as u64))?;
            self.inner.read(span.start(), buffer).await
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check_change(at.span(data.len() as u64))?;
            self.inner.write(span.start(), data, flags).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        if self.is_whole_way { self.inner.flush() } else { Box::pin(std::future::ready(Ok(()))) }
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.inner.write_zeroes(self.check_change(span)?, flags).await })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.inner.discard(self.check_change(span)?, flags).await })
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        if self.is_whole_way { self.inner.tend(now) } else { Box::pin(std::future::ready(false)) }
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        if self.is_whole_way { self.inner.room() } else { Box::pin(std::future::ready(Ok(None))) }
    }

    fn flush_change(&self) -> LocalFuture<'_, Result<()>> {
        if self.is_whole_way { self.inner.flush_change() } else { self.flush() }
    }

    fn losses(&self) -> Option<Arc<Losses>> {
        self.inner.losses().filter(|_| self.is_whole_way)
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
        if self.is_whole_way { self.inner.close() } else { Box::pin(std::future::ready(Ok(()))) }
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn what_is_served_is_written_and_nothing_outside_of_it() {
        let inner: SharedDisk = MemoryDisk::holding(&[9; 64 << 10]);
        let part = Part { offset: 1000, size: Some(10_000) };
        part.check(64 << 10).expect("it is inside");
        let disk = part.of(inner.clone());
        let geometry = disk.geometry();
        assert_eq!((geometry.size, geometry.read_only), (10_000, false));
        assert!(geometry.block_size.bytes() <= 8, "the start is a multiple of 8 and no more");
        let write = |at: u64, len| {
            block_on(disk.write(GuestOffset::new(at), Buffer::zeroed(len), WriteFlags::default()))
        };
        write(0, 500).expect("inside");
        block_on(disk.write_zeroes(GuestOffset::new(9000).span(1000), ZeroFlags::default())).expect("inside");
        for (at, len) in [(9999, 2), (10_000, 1), (u64::MAX - 1, 1)] {
            write(at, len).expect_err("outside");
            let span = GuestOffset::new(at).span(len as u64);
            block_on(disk.discard(span, WriteFlags::default())).expect_err("outside");
        }
        block_on(disk.flush()).expect("a flush");
        let mut expected = vec![9; 64 << 10];
        expected[1000..1500].fill(0);
        expected[10_000..11_000].fill(0);
        let all = block_on(inner.read(GuestOffset::ZERO, Buffer::for_overwrite(64 << 10))).expect("a read");
        assert_eq!(all.to_vec(), expected);
    }

    #[test]
    fn a_part_that_is_not_there_is_refused() {
        for (offset, size, is_there) in [
            (0, None, true),
            (4096, None, true),
            (4097, None, false),
            (0, Some(4096), true),
            (1, Some(4096), false),
            (u64::MAX, Some(2), false),
        ] {
            assert_eq!(Part { offset, size }.check(4096).is_ok(), is_there, "{size:?} at {offset}");
        }
    }
}
