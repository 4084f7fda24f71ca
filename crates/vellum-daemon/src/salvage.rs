//! A disk that is read as far as it can be: what cannot be read is zero, and noted.
//!
//! A read that fails is tried again in sectors, so no more is lost than the sectors that fail. Where the map of the disk
//! cannot be told, everything counts as data.

use std::sync::Mutex;

use vellum_core::{
    BlockSize, Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Place,
    Result, SharedDisk, WriteFlags, ZeroFlags, lock, map_merged,
};

/// Runs that are listed; what is lost besides is only counted.
const LISTED_MAX: usize = 1000;

/// How much of the disk is called data where its map fails.
const UNKNOWN: u64 = 2 << 20;

/// What could not be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Lost {
    /// The first runs of it.
    pub(crate) runs: Vec<GuestSpan>,
    /// All of it, in bytes.
    pub(crate) bytes: u64,
}

/// The disk.
pub(crate) struct Salvaged {
    inner: SharedDisk,
    lost: Mutex<Lost>,
}

impl Salvaged {
    pub(crate) fn of(inner: SharedDisk) -> Self {
        Self { inner, lost: Mutex::default() }
    }

    /// What could not be read so far, in the order of the disk.
    pub(crate) fn lost(&self) -> Lost {
        let mut lost = lock(&self.lost).clone();
        lost.runs.sort_by_key(|run| run.start());
        let mut merged: Vec<GuestSpan> = Vec::new();
        for run in lost.runs {
            match merged.last_mut().filter(|last| last.end() == run.start()) {
                Some(last) => *last = GuestSpan::between(last.start(), run.end()),
                None => merged.push(run),
            }
        }
        Lost { runs: merged, bytes: lost.bytes }
    }

    fn note(&self, span: GuestSpan) {
        let mut lost = lock(&self.lost);
        lost.bytes += span.len();
        let has_room = lost.runs.len() < LISTED_MAX;
        match lost.runs.last_mut().filter(|last| last.end() == span.start()) {
            Some(last) => *last = GuestSpan::between(last.start(), span.end()),
            None if has_room => lost.runs.push(span),
            None => {}
        }
    }

    async fn read_all(&self, span: GuestSpan) -> Result<Buffer> {
        let buffer = |span: GuestSpan| {
            Buffer::for_overwrite(usize::try_from(span.len()).expect("as it was asked for"))
        };
        let mut whole = Buffer::empty();
        for block in BlockSize::PAGE.pieces_of(span) {
            match self.inner.read(block.start(), buffer(block)).await {
                Ok(bytes) => whole.append(bytes),
                Err(error) if is_final(&error) => return Err(error),
                Err(_) => {
                    for sector in BlockSize::SECTOR.pieces_of(block) {
                        let bytes = match self.inner.read(sector.start(), buffer(sector)).await {
                            Ok(bytes) => bytes,
                            Err(error) if is_final(&error) => return Err(error),
                            Err(_) => {
                                self.note(sector);
                                Buffer::zeroed(usize::try_from(sector.len()).expect("a sector"))
                            }
                        };
                        whole.append(bytes);
                    }
                }
            }
        }
        Ok(whole)
    }
}

/// Whether the disk itself, and not a part of it, is the trouble.
fn is_final(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Closed | ErrorKind::Invalid)
}

fn refused<'a, T: 'a>() -> LocalFuture<'a, Result<T>> {
    Box::pin(std::future::ready(Err(Error::new(ErrorKind::ReadOnly, "a disk that is salvaged is only read"))))
}

impl Disk for Salvaged {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, ..self.inner.geometry() }
    }

    fn read(&self, at: GuestOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = at.span(buffer.len() as u64);
            let whole = match self.inner.read(at, Buffer::for_overwrite(buffer.len())).await {
                Ok(bytes) => bytes,
                Err(error) if is_final(&error) => return Err(error),
                Err(_) => self.read_all(span).await?,
            };
            let mut at = 0;
            for piece in whole.pieces() {
                buffer.copy_from(at, piece);
                at += piece.len();
            }
            Ok(buffer)
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

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            match map_merged(&self.inner, span).await {
                Ok(merged) => Ok(merged
                    .into_iter()
                    .map(|extent| Extent { span: extent.span, place: extent.place })
                    .collect()),
                Err(error) if is_final(&error) => Err(error),
                // Data without a place that others could read from.
                Err(_) => Ok(vec![Extent { span: span.split_at(UNKNOWN).0, place: Place::Compressed }]),
            }
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::MemoryDisk;

    use super::*;

    /// Its third sector, and its second MiB, cannot be read, and its map never.
    struct Damaged(SharedDisk);

    impl Disk for Damaged {
        fn geometry(&self) -> Geometry {
            self.0.geometry()
        }

        fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
            let (start, end) = (at.bytes(), at.bytes() + buffer.len() as u64);
            let hits = |from: u64, to: u64| start < to && from < end;
            match hits(1024, 1536) || hits(1 << 20, 2 << 20) {
                true => Box::pin(std::future::ready(Err(Error::new(ErrorKind::Io, "damaged")))),
                false => self.0.read(at, buffer),
            }
        }

        fn write(&self, _: GuestOffset, _: Buffer, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
            refused()
        }

        fn flush(&self) -> LocalFuture<'_, Result<()>> {
            refused()
        }

        fn write_zeroes(&self, _: GuestSpan, _: ZeroFlags) -> LocalFuture<'_, Result<()>> {
            refused()
        }

        fn discard(&self, _: GuestSpan, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
            refused()
        }

        fn map(&self, _: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
            refused()
        }

        fn close(&self) -> LocalFuture<'_, Result<()>> {
            refused()
        }
    }

    #[test]
    fn what_can_be_read_is_read() {
        let mut bytes = vec![7; 3 << 20];
        let disk = Salvaged::of(std::sync::Arc::new(Damaged(MemoryDisk::holding(&bytes))));
        let all = GuestOffset::ZERO.span(3 << 20);
        let map = block_on(disk.map(all)).unwrap();
        assert_eq!((map.len(), map[0].span.len()), (1, 2 << 20));
        let read = block_on(disk.read(GuestOffset::ZERO, Buffer::for_overwrite(3 << 20))).unwrap();
        bytes[1024..1536].fill(0);
        bytes[1 << 20..2 << 20].fill(0);
        assert!(read.to_vec() == bytes);
        let run = |start: u64, len| GuestOffset::new(start).span(len);
        assert_eq!(
            disk.lost(),
            Lost { runs: vec![run(1024, 512), run(1 << 20, 1 << 20)], bytes: (1 << 20) + 512 }
        );
        assert!(block_on(disk.read(GuestOffset::new(2048), Buffer::for_overwrite(512))).is_ok());
    }
}
