//! A disk that is read as far as it can be: what cannot be read is zero, and noted.
//!
//! A read that fails is tried again in sectors, so no more is lost than the sectors that fail. Where the map of the disk
//! cannot be told, everything counts as data. What is known to be lost is not read at all.

use std::collections::BTreeMap;
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
    /// The first runs of it, in the order of the disk, neighbours together.
    pub(crate) runs: Vec<GuestSpan>,
    /// All of it, in bytes.
    pub(crate) bytes: u64,
}

/// The disk.
pub(crate) struct Salvaged {
    inner: SharedDisk,
    /// Nothing of these can be read, in the order of the disk.
    known: Vec<GuestSpan>,
    /// By their start: what lies side by side is one run, also where several pieces are read at a time.
    lost: Mutex<(BTreeMap<u64, u64>, u64)>,
}

impl Salvaged {
    /// The disk, of which these parts are known to be lost.
    pub(crate) fn of(inner: SharedDisk, mut known: Vec<GuestSpan>) -> Self {
        known.sort_by_key(|span| span.start());
        Self { inner, known, lost: Mutex::default() }
    }

    /// What could not be read so far.
    pub(crate) fn lost(&self) -> Lost {
        let lost = lock(&self.lost);
        let run =
            |(start, end): (&u64, &u64)| GuestSpan::between(GuestOffset::new(*start), GuestOffset::new(*end));
        Lost { runs: lost.0.iter().map(run).collect(), bytes: lost.1 }
    }

    fn note(&self, span: GuestSpan) {
        let (mut start, mut end) = (span.start().bytes(), span.end().bytes());
        let mut lost = lock(&self.lost);
        let (runs, bytes) = &mut *lost;
        *bytes += span.len();
        let before = runs.range(..start).next_back().filter(|(_, before)| **before == start);
        let before = before.map(|(before, _)| *before);
        let behind = runs.get(&end).copied();
        if before.is_none() && behind.is_none() && runs.len() >= LISTED_MAX {
            return;
        }
        if let Some(behind) = behind {
            runs.remove(&end);
            end = behind;
        }
        start = before.unwrap_or(start);
        runs.insert(start, end);
    }

    /// The first part of a span: whether it is known to be lost.
    fn first_part(&self, span: GuestSpan) -> (GuestSpan, bool) {
        let next = self.known.partition_point(|known| known.end() <= span.start());
        match self.known.get(next).map(|known| known.intersect(span)).filter(|known| !known.is_empty()) {
            None => (span, false),
            Some(known) if known.start() == span.start() => (known, true),
            Some(known) => (GuestSpan::between(span.start(), known.start()), false),
        }
    }

    async fn read_known(&self, span: GuestSpan) -> Result<Buffer> {
        let (mut whole, mut rest) = (Buffer::empty(), span);
        while !rest.is_empty() {
            let (part, is_lost) = self.first_part(rest);
            rest = GuestSpan::between(part.end(), rest.end());
            let len = usize::try_from(part.len()).expect("as it was asked for");
            whole.append(match is_lost {
                true => {
                    self.note(part);
                    Buffer::zeroed(len)
                }
                false => match self.inner.read(part.start(), Buffer::for_overwrite(len)).await {
                    Ok(bytes) => bytes,
                    Err(error) if is_final(&error) => return Err(error),
                    Err(_) => self.read_all(part).await?,
                },
            });
        }
        Ok(whole)
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
            let whole = self.read_known(at.span(buffer.len() as u64)).await?;
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
                Err(_) => Ok(vec![Extent {
                    span: span.split_at(UNKNOWN).0,
                    place: Place::Compressed { from: None },
                }]),
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
        let disk = Salvaged::of(std::sync::Arc::new(Damaged(MemoryDisk::holding(&bytes))), Vec::new());
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
    /// What is known to be lost is not asked for, and what lies side by side is one run, in whatever order it was read.
    #[test]
    fn what_is_known_to_be_lost_is_not_read() {
        let run = |start: u64, len| GuestOffset::new(start).span(len);
        let known = vec![run(64 << 10, 64 << 10), run(2 << 20, 4096)];
        let disk = Salvaged::of(std::sync::Arc::new(Damaged(MemoryDisk::holding(&vec![7; 3 << 20]))), known);
        let read = |at: u64, len: usize| {
            let read = disk.read(GuestOffset::new(at), Buffer::for_overwrite(len));
            block_on(read).unwrap().to_vec()
        };
        assert_eq!(read(2 << 20, 8192), [[0; 4096], [7; 4096]].concat());
        assert_eq!(read((128 << 10) - 512, 1024), [[0; 512], [7; 512]].concat());
        assert_eq!(read(64 << 10, (64 << 10) - 512), vec![0; (64 << 10) - 512]);
        assert_eq!(read((2 << 20) - 512, 512), [0; 512], "it fails, and lies beside what is lost");
        let lost = Lost {
            runs: vec![run(64 << 10, 64 << 10), run((2 << 20) - 512, 4608)],
            bytes: (64 << 10) + 4608,
        };
        assert_eq!(disk.lost(), lost);
    }
}
