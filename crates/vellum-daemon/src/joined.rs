//! Several disks, one behind the other, as one disk that is read.
//!
//! ```text
//!   the disks      │ a        │ b     │ c            │      each begins at a sector: one that ends within a sector is
//!   this one       0                                 size   followed by zeros
//! ```

use std::sync::Arc;

use vellum_core::{
    BlockSize, Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Place,
    Result, SharedDisk, WriteFlags, ZeroFlags, map_merged,
};

/// The disks, with the place at which each begins, and the size of it all.
pub(crate) struct Joined {
    parts: Vec<(u64, SharedDisk)>,
    size: u64,
}

impl Joined {
    /// These disks, in this order.
    ///
    /// # Errors
    /// `Invalid` when they are too large together.
    pub(crate) fn of(disks: &[SharedDisk]) -> Result<Self> {
        let (mut parts, mut size) = (Vec::with_capacity(disks.len()), 0_u64);
        for disk in disks {
            parts.push((size, disk.clone()));
            let len = disk.geometry().size.checked_next_multiple_of(BlockSize::SECTOR.bytes());
            size = len
                .and_then(|len| size.checked_add(len))
                .filter(|size| i64::try_from(*size).is_ok())
                .ok_or_else(|| Error::invalid("the sources together are too large for a disk"))?;
        }
        Ok(Self { parts, size })
    }

    /// The parts of a run: which disk, where in it, how many bytes of it and how many zeros behind its end.
    fn pieces(&self, span: GuestSpan) -> Result<Vec<Piece<'_>>> {
        let (mut at, end) = (span.start().bytes(), span.end().bytes());
        if end > self.size {
            return Err(Error::invalid(format!("{} bytes at {at} are outside of the disk", span.len())));
        }
        let mut pieces = Vec::new();
        let mut index = self.parts.partition_point(|(start, _)| *start <= at).saturating_sub(1);
        while at < end {
            let (start, disk) = &self.parts[index];
            let behind = self.parts.get(index + 1).map_or(self.size, |(start, _)| *start);
            let upto = end.min(behind);
            let has = disk.geometry().size;
            let (from, to) = (at - start, upto - start);
            pieces.push(Piece {
                disk,
                start: *start,
                span: GuestSpan::between(GuestOffset::new(from.min(has)), GuestOffset::new(to.min(has))),
                zeros: GuestSpan::between(
                    GuestOffset::new(at.max(start + has)),
                    GuestOffset::new(upto.max(start + has)),
                ),
            });
            (at, index) = (upto, index + 1);
        }
        Ok(pieces)
    }
}

struct Piece<'a> {
    disk: &'a SharedDisk,
    /// Where the disk begins in the joined one.
    start: u64,
    /// What is read of it.
    span: GuestSpan,
    /// What follows behind its end, in the joined disk.
    zeros: GuestSpan,
}

fn only_read() -> Error {
    Error::new(ErrorKind::ReadOnly, "disks that are joined are only read")
}

impl Disk for Joined {
    fn geometry(&self) -> Geometry {
        let first = self.parts[0].1.geometry();
        Geometry { size: self.size, read_only: true, block_size: BlockSize::SECTOR, ..first }
    }

    fn read(&self, at: GuestOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let mut rest = buffer.split_off(0);
            for piece in self.pieces(at.span(rest.len() as u64))? {
                let len = |span: GuestSpan| usize::try_from(span.len()).expect("part of a buffer");
                let mut behind = rest.split_off(len(piece.span));
                buffer.append(piece.disk.read(piece.span.start(), rest).await?);
                rest = behind.split_off(len(piece.zeros));
                behind.fill(0);
                buffer.append(behind);
            }
            buffer.append(rest);
            Ok(buffer)
        })
    }

    fn write(&self, _at: GuestOffset, _data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Err(only_read())))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn write_zeroes(&self, _span: GuestSpan, _flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Err(only_read())))
    }

    fn discard(&self, _span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Err(only_read())))
    }

    /// What is below one of them is this disk's own.
    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let mut extents = Vec::new();
            for piece in self.pieces(span)? {
                let mut end = piece.span.start();
                for extent in map_merged(piece.disk, piece.span).await? {
                    end = extent.span.end();
                    let start = extent.span.start() + piece.start;
                    extents.push(Extent { span: start.span(extent.span.len()), place: extent.place });
                }
                if end < piece.span.end() {
                    break; // An answer may stop early.
                }
                if !piece.zeros.is_empty() {
                    extents.push(Extent { span: piece.zeros, place: Place::Zero { allocated: false } });
                }
            }
            Ok(extents)
        })
    }

    /// They are closed where they were opened.
    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// One disk as it is, several joined.
///
/// # Errors
/// As [`Joined::of`].
pub(crate) fn joined(disks: &[SharedDisk]) -> Result<SharedDisk> {
    match disks {
        [only] => Ok(only.clone()),
        all => Ok(Arc::new(Joined::of(all)?)),
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{MemoryDisk, Random};

    use super::*;

    #[test]
    fn disks_are_read_one_behind_the_other() {
        let sizes = [1000_usize, 512, 1, 5000];
        let (mut expected, mut disks): (Vec<u8>, Vec<SharedDisk>) = Default::default();
        for (size, value) in sizes.into_iter().zip(1..) {
            let bytes = vec![value; size];
            disks.push(MemoryDisk::holding(&bytes));
            expected.extend(&bytes);
            expected.resize(expected.len().next_multiple_of(512), 0);
        }
        let all = joined(&disks).unwrap();
        assert_eq!(all.geometry().size, expected.len() as u64);
        let mut random = Random::from_seed(3);
        for _ in 0..2000 {
            let start = random.index(expected.len());
            let len = random.index(expected.len() - start + 1);
            let at = GuestOffset::new(start as u64);
            let read = block_on(all.read(at, Buffer::for_overwrite(len))).unwrap();
            assert_eq!(read.to_vec(), expected[start..start + len], "{len} bytes at {start}");
            let mut next = at;
            for extent in block_on(map_merged(&all, at.span(len as u64))).unwrap() {
                assert_eq!(extent.span.start(), next);
                next = extent.span.end();
            }
            assert!(next <= at + len as u64 && (len == 0 || next > at));
        }
        let outside = GuestOffset::new(expected.len() as u64);
        assert!(block_on(all.read(outside, Buffer::for_overwrite(1))).is_err());
        assert!(block_on(all.write(GuestOffset::ZERO, Buffer::zeroed(512), WriteFlags::default())).is_err());
    }
}
