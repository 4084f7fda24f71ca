//! The disk of an image of another program: one for all formats, read-only.
//!
//! 1. Every run that a layout reports is checked against its file before it is read or reported: a byte past
//!    the end of the file is an error.
//! 2. Neighbouring runs are joined, so that a request for many blocks that lie together is one read.
//! 3. A map answers early after a bounded number of lookups.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::{
    BlockSize, Buffer, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, ImageOffset,
    LocalFuture, Offload, Place, Result, SharedDisk, SharedStorage, WriteFlags, ZeroFlags, read_below,
    try_join_all,
};

use crate::bytes::beyond;
use crate::kind::ForeignKind;
use crate::layout::{Layout, OpenLayout, Where};
use crate::unpack::Unpacker;

/// At most this many runs of one request are read at once.
const READS_AT_ONCE: usize = 32;
/// A map looks up at most this many runs, and answers early then.
const LOOKUPS_MAX: usize = 1 << 16;
/// And reports at most this many extents.
const EXTENTS_MAX: usize = 4096;

/// The disk of an open image.
pub(crate) struct ReadDisk {
    kind: ForeignKind,
    geometry: Geometry,
    layout: Box<dyn Layout>,
    files: Vec<SharedStorage>,
    below: Option<SharedDisk>,
    unpacker: Unpacker,
    closed: AtomicBool,
}

/// A run of the disk that lies in one place.
#[derive(Debug)]
struct Piece {
    len: u64,
    place: Where,
}

impl Piece {
    /// Adds the piece that follows on the disk, if both lie in one place.
    fn join(&mut self, next: &Self) -> bool {
        let is_one = match (&self.place, &next.place) {
            (Where::Zero { allocated: a }, Where::Zero { allocated: b }) => a == b,
            (Where::Below, Where::Below) => true,
            (Where::Plain { file: a, at, is_flat: c }, Where::Plain { file: b, at: next, is_flat: d }) => {
                (a, c, at + self.len) == (b, d, *next)
            }
            (Where::Packed { chunk: a, skip }, Where::Packed { chunk: b, skip: next }) => {
                (a, skip + self.len) == (b, *next)
            }
            _ => false,
        };
        if is_one {
            self.len += next.len;
        }
        is_one
    }
}

impl ReadDisk {
    pub(crate) fn over(
        kind: ForeignKind,
        size: u64,
        cluster_size: Option<u64>,
        opened: OpenLayout,
        below: Option<SharedDisk>,
        place: Arc<dyn Offload>,
    ) -> SharedDisk {
        let OpenLayout { layout, files } = opened;
        let preferred = cluster_size.and_then(BlockSize::from_bytes).unwrap_or(BlockSize::PAGE);
        let geometry = Geometry {
            size,
            block_size: BlockSize::SECTOR,
            preferred_size: preferred.max(BlockSize::SECTOR),
            read_only: true,
            fast_zeroes: false,
        };
        let (unpacker, closed) = (Unpacker::new(place), AtomicBool::new(false));
        Arc::new(Self { kind, geometry, layout, files, below, unpacker, closed })
    }

    fn check(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the disk is closed"));
        }
        span.filter(|span| span.end().bytes() <= self.geometry.size).ok_or_else(|| {
            Error::invalid(format!(
                "the request extends past the end of the disk at {:#x}",
                self.geometry.size
            ))
        })
    }

    fn refused<T: 'static>(&self) -> LocalFuture<'static, Result<T>> {
        let why = format!("{} is a {} image, which is only read", self.files[0].name(), self.kind.name());
        Box::pin(std::future::ready(Err(Error::new(ErrorKind::ReadOnly, why))))
    }

    /// The place of the first bytes of a run, at most `wanted`.
    async fn find(&self, at: u64, wanted: u64) -> Result<Piece> {
        let run = self.layout.find(at, wanted).await?;
        let len = run.len.min(wanted);
        debug_assert!(len > 0, "a run is not empty");
        match &run.place {
            Where::Plain { file, at, .. } => {
                let storage = &self.files[*file];
                if at.checked_add(len).is_none_or(|end| end > storage.len()) {
                    return Err(beyond(&**storage, *at, len));
                }
            }
            Where::Packed { chunk, skip } if skip.checked_add(len).is_none_or(|end| end > chunk.len) => {
                return Err(Error::corrupt(format!("a run of {len} bytes does not end with its chunk")));
            }
            _ => {}
        }
        Ok(Piece { len, place: run.place })
    }

    /// The run in pieces, each as long as its bytes lie together. May stop early after many of them.
    async fn pieces(&self, span: GuestSpan, pieces_max: usize) -> Result<Vec<Piece>> {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut at = span.start().bytes();
        let mut lookups = 0;
        while at < span.end().bytes() && lookups < LOOKUPS_MAX {
            let piece = self.find(at, span.end().bytes() - at).await?;
            at += piece.len;
            lookups += 1;
            if pieces.last_mut().is_none_or(|last| !last.join(&piece)) {
                if pieces.len() == pieces_max {
                    break;
                }
                pieces.push(piece);
            }
        }
        Ok(pieces)
    }

    async fn read_span(&self, span: GuestSpan, mut buffer: Buffer) -> Result<Buffer> {
        let mut filled = Buffer::empty();
        let mut rest = span;
        while !rest.is_empty() {
            let pieces = self.pieces(rest, READS_AT_ONCE).await?;
            let mut reads = Vec::with_capacity(pieces.len());
            for piece in pieces {
                let at = rest.start();
                rest = GuestSpan::between(at + piece.len, rest.end());
                let part = buffer.split_to(usize::try_from(piece.len).expect("within the buffer"));
                reads.push(Box::pin(self.read_piece(at, piece, part)));
            }
            for part in try_join_all(reads).await? {
                filled.append(part);
            }
        }
        Ok(filled)
    }

    async fn read_piece(&self, at: GuestOffset, piece: Piece, mut part: Buffer) -> Result<Buffer> {
        match piece.place {
            Where::Zero { .. } => {
                part.fill(0);
                Ok(part)
            }
            Where::Below => read_below(self.below.as_ref(), at, part).await,
            Where::Plain { file, at, .. } => self.files[file].read(ImageOffset::new(at), part).await,
            Where::Packed { chunk, skip } => {
                let content = self.unpacker.read(&*self.files[chunk.file], &chunk).await?;
                let skip = usize::try_from(skip).expect("within the chunk");
                part.copy_from(0, &content[skip..skip + part.len()]);
                Ok(part)
            }
        }
    }
}

impl Disk for ReadDisk {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.below.clone()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = self.check(GuestSpan::checked(at, buffer.len() as u64))?;
            self.read_span(span, buffer).await
        })
    }

    fn write(&self, _at: GuestOffset, _data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(self.check(Some(GuestOffset::ZERO.span(0))).map(drop)))
    }

    fn write_zeroes(&self, _span: GuestSpan, _flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    fn discard(&self, _span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.refused()
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let span = self.check(Some(span))?;
            let mut extents = Vec::new();
            let mut at = span.start();
            for Piece { len, place } in self.pieces(span, EXTENTS_MAX).await? {
                let part = at.span(len);
                at = part.end();
                let place = match place {
                    Where::Zero { allocated } => Place::Zero { allocated },
                    Where::Below => Place::Below,
                    Where::Packed { .. } => Place::Compressed { from: None },
                    Where::Plain { file, at, is_flat: true } => {
                        let is_whole = self.push_runs(&mut extents, part, file, at).await?;
                        if is_whole {
                            continue;
                        }
                        break; // The host answered in parts.
                    }
                    Where::Plain { file, at, is_flat: false } => {
                        Place::Data { storage: self.files[file].clone(), at: ImageOffset::new(at) }
                    }
                };
                extents.push(Extent { span: part, place });
            }
            Ok(extents)
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.closed.store(true, Ordering::Release);
        Box::pin(std::future::ready(Ok(())))
    }
}

impl ReadDisk {
    /// Adds what the host knows of a run that lies in a file like this: its holes are the disk's. Whether that is
    /// all of the run.
    async fn push_runs(
        &self,
        extents: &mut Vec<Extent>,
        part: GuestSpan,
        file: usize,
        at: u64,
    ) -> Result<bool> {
        let storage = &self.files[file];
        let wanted = ImageOffset::new(at).span(part.len());
        let mut from = part.start();
        for run in storage.runs(wanted).await? {
            let span = from.span(run.span.intersect(wanted).len());
            from = span.end();
            let place = match run.is_data {
                true => Place::Data { storage: storage.clone(), at: run.span.start() },
                false => Place::Zero { allocated: false },
            };
            extents.push(Extent { span, place });
        }
        Ok(from == part.end())
    }
}
