//! Reads, and where the bytes are.

use std::rc::Rc;

use smallvec::SmallVec;
use vellum_core::{
    Buffer, Extent, GuestOffset, GuestSpan, ImageOffset, LocalFuture, Place, Result, try_join_all,
};
use vellum_format::commit::Inside;

use super::count;
use crate::layout::{BLOCK_BYTES, Key, SECTOR_BYTES};
use crate::options::FlashPolicy;
use crate::shared::Home;
use crate::state::Found;

/// Where a run of bytes is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Slot { at: ImageOffset, dirty: bool },
    Zero,
    Home,
}

/// A run of bytes that are in one place.
#[derive(Debug, Clone, Copy)]
struct Piece {
    span: GuestSpan,
    source: Source,
    /// It is of home, and has blocks that flash has as well.
    is_joined: bool,
}

type Pieces = SmallVec<[Piece; 4]>;

/// Clean blocks between two pieces of home are read from home with them, if they are no more than this: one request instead of
/// two, and home has the same.
const JOINED_BYTES_MAX: u64 = 16 << 10;

/// A piece that is read: the bytes, and a copy of what is worth keeping.
type Reading<'a> = LocalFuture<'a, Result<(Buffer, Option<Buffer>)>>;

fn push(pieces: &mut Pieces, span: GuestSpan, source: Source) {
    if let Some(last) = pieces.last_mut() {
        let continues = match (last.source, source) {
            (Source::Slot { at, dirty }, Source::Slot { at: next, dirty: next_dirty }) => {
                dirty == next_dirty && at + last.span.len() == next
            }
            (a, b) => a == b,
        };
        if continues {
            last.span = GuestSpan::between(last.span.start(), span.end());
            return;
        }
    }
    pieces.push(Piece { span, source, is_joined: false });
}

/// Pieces of home on both sides of a few clean blocks become one piece with these.
fn joined(pieces: Pieces) -> Pieces {
    let (mut all, mut between) = (Pieces::new(), Pieces::new());
    for piece in pieces {
        let bytes = piece.span.len() + between.iter().map(|piece| piece.span.len()).sum::<u64>();
        let is_behind_home = all.last().is_some_and(|last| last.source == Source::Home);
        match piece.source {
            Source::Home if is_behind_home => {
                let home = all.last_mut().expect("it was there");
                home.is_joined |= !between.is_empty();
                between.clear();
                home.span = GuestSpan::between(home.span.start(), piece.span.end());
            }
            Source::Slot { dirty: false, .. } if is_behind_home && bytes <= JOINED_BYTES_MAX => {
                between.push(piece)
            }
            _ => {
                all.append(&mut between);
                all.push(piece);
            }
        }
    }
    all.append(&mut between);
    all
}

/// The parts of a run that lie in one block each: the block's number, and which of its bytes.
pub(super) fn in_blocks(span: GuestSpan) -> impl Iterator<Item = (u64, u64, u64)> {
    let (start, end) = (span.start().bytes(), span.end().bytes());
    let blocks = if span.is_empty() { 0..0 } else { start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES) };
    blocks.map(move |block| {
        let first = block * BLOCK_BYTES;
        (block, start.max(first) - first, end.min(first + BLOCK_BYTES) - first)
    })
}

fn copy_into(buffer: &mut Buffer, own: &Buffer) {
    let mut at = 0;
    for piece in own.pieces() {
        buffer.copy_from(at, piece);
        at += piece.len();
    }
}

impl Home {
    fn look_up(&self, span: GuestSpan) -> Pieces {
        let mut pieces = Pieces::new();
        let mut state = self.cache.state();
        for (block, from, to) in in_blocks(span) {
            let start = GuestOffset::new(block * BLOCK_BYTES);
            let bytes = |from: u64, to: u64| GuestSpan::between(start + from, start + to);
            let key = Key::new(self.row, block);
            match state.find_used(key) {
                Found::Home => push(&mut pieces, bytes(from, to), Source::Home),
                Found::Zero => push(&mut pieces, bytes(from, to), Source::Zero),
                // The usual one: all of the block is in its slot.
                Found::Slot { slot, sectors: u8::MAX, dirty } => {
                    let at = self.cache.slot_at(slot) + from;
                    push(&mut pieces, bytes(from, to), Source::Slot { at, dirty });
                }
                Found::Slot { slot, sectors, dirty } => {
                    let at = self.cache.slot_at(slot);
                    let (first, end) = (from / SECTOR_BYTES, to.div_ceil(SECTOR_BYTES));
                    for sector in first..end {
                        let (from, to) =
                            (from.max(sector * SECTOR_BYTES), to.min((sector + 1) * SECTOR_BYTES));
                        let source = match sectors & 1 << sector {
                            0 => Source::Home,
                            _ => Source::Slot { at: at + from, dirty },
                        };
                        push(&mut pieces, bytes(from, to), source);
                    }
                }
            }
        }
        pieces
    }

    pub(crate) async fn read(&self, at: GuestOffset, buffer: Buffer, admits: bool) -> Result<Buffer> {
        let span = self.check(GuestSpan::checked(at, buffer.len() as u64))?;
        if span.is_empty() {
            return Ok(buffer);
        }
        if self.is_without_flash() {
            return self.disk.read(at, buffer).await;
        }
        let inside = self.cache.epochs.enter();
        let pieces = self.look_up(span);
        // The usual hit has nothing but its transfer to wait for, and no memory but that of the request.
        if let [Piece { source: Source::Slot { at, dirty }, .. }] = pieces[..] {
            self.count_reads(&pieces);
            return self.read_slot(span.start(), at, dirty, buffer, inside).await;
        }
        Box::pin(self.read_pieces(span, pieces, buffer, admits, inside)).await
    }

    async fn read_pieces(
        &self,
        span: GuestSpan,
        mut pieces: Pieces,
        buffer: Buffer,
        admits: bool,
        inside: Inside<'_>,
    ) -> Result<Buffer> {
        let inside = Rc::new(inside);
        let is_home = |piece: &Piece| piece.source == Source::Home;
        let mut watch = None;
        if admits && pieces.iter().any(is_home) {
            // The watch begins before the last look: whatever changes a block that is read from home is seen.
            let blocks = span.start().bytes() / BLOCK_BYTES..span.end().bytes().div_ceil(BLOCK_BYTES);
            watch = Some(self.claims.watch(blocks));
            pieces = self.look_up(span);
        }
        // Under writethrough home may have lost a change that flash has.
        if pieces.len() > 2 && self.policy() != FlashPolicy::WriteThrough {
            pieces = joined(pieces);
        }
        self.count_reads(&pieces);
        let keeps = watch.is_some();
        let mut copies = Vec::new();
        // Home is read outside the epoch: slots of other disks wait for its end.
        let hold = |piece: &Piece| matches!(piece.source, Source::Slot { .. }).then(|| inside.clone());
        let holds: SmallVec<[Option<Rc<Inside<'_>>>; 4]> = pieces.iter().map(hold).collect();
        drop(inside);
        let mut holds = holds.into_iter();
        let buffer = match &pieces[..] {
            [piece] => {
                let (buffer, copy) = self.read_piece(*piece, buffer, keeps, holds.next().flatten()).await?;
                copies.extend(copy.map(|copy| (piece.span, copy)));
                buffer
            }
            _ => {
                let mut rest = buffer;
                let mut reads: SmallVec<[Reading<'_>; 4]> = SmallVec::new();
                for piece in &pieces {
                    let part = rest.split_to(usize::try_from(piece.span.len()).expect("within a buffer"));
                    reads.push(Box::pin(self.read_piece(*piece, part, keeps, holds.next().flatten())));
                }
                let mut whole = Buffer::empty();
                for (piece, (part, copy)) in pieces.iter().zip(try_join_all(reads).await?) {
                    whole.append(part);
                    copies.extend(copy.map(|copy| (piece.span, copy)));
                }
                whole
            }
        };
        if let Some(watch) = watch {
            self.offer(copies, watch);
        }
        Ok(buffer)
    }

    fn count_reads(&self, pieces: &Pieces) {
        for piece in pieces {
            let number = if piece.source == Source::Home { &self.tally.misses } else { &self.tally.hits };
            count(number, piece.span.len().div_ceil(BLOCK_BYTES));
        }
    }

    /// Reads a piece; what home has is copied where it is worth keeping. A guest may change lent memory before it
    /// is answered, so the copy is what was read, never what is found there.
    async fn read_piece(
        &self,
        piece: Piece,
        mut buffer: Buffer,
        keeps: bool,
        inside: Option<Rc<Inside<'_>>>,
    ) -> Result<(Buffer, Option<Buffer>)> {
        match piece.source {
            Source::Home if piece.is_joined => {
                let spare = buffer.spare();
                let alone = Piece { is_joined: false, ..piece };
                match Box::pin(self.read_piece(alone, buffer, keeps, inside)).await {
                    // Home may be unreadable just where flash has what is there.
                    Err(_) => Ok((self.read_apart(piece.span, spare).await?, None)),
                    read => read,
                }
            }
            Source::Home if keeps && buffer.is_lent() => {
                let own = self.disk.read(piece.span.start(), Buffer::for_overwrite(buffer.len())).await?;
                copy_into(&mut buffer, &own);
                Ok((buffer, Some(own)))
            }
            Source::Home => {
                let buffer = self.disk.read(piece.span.start(), buffer).await?;
                let copy = keeps.then(|| buffer.duplicate());
                Ok((buffer, copy))
            }
            Source::Zero => {
                buffer.fill(0);
                Ok((buffer, None))
            }
            Source::Slot { at, dirty } => {
                Ok((self.read_slot(piece.span.start(), at, dirty, buffer, inside).await?, None))
            }
        }
    }

    /// Reads each part from where it is, without those of flash that could come from home.
    async fn read_apart(&self, span: GuestSpan, buffer: Buffer) -> Result<Buffer> {
        let inside = Rc::new(self.cache.epochs.enter());
        let (mut rest, mut whole) = (buffer, Buffer::empty());
        for piece in self.look_up(span) {
            let part = rest.split_to(usize::try_from(piece.span.len()).expect("within a buffer"));
            whole.append(Box::pin(self.read_piece(piece, part, false, Some(inside.clone()))).await?.0);
        }
        Ok(whole)
    }

    /// Reads bytes of a slot; or from home, if home has the same and the slot cannot be read. `inside` is held while the
    /// slot is in use.
    async fn read_slot<T>(
        &self,
        start: GuestOffset,
        at: ImageOffset,
        dirty: bool,
        buffer: Buffer,
        inside: T,
    ) -> Result<Buffer> {
        let len = buffer.len();
        // Lent memory comes back only from a read that succeeds.
        let spare = (!dirty && buffer.is_lent()).then(|| buffer.spare());
        let error = match self.cache.read_slots(at, buffer).await {
            Ok(read) => return Ok(read),
            Err(error) => error,
        };
        count(&self.tally.errors, 1);
        if dirty {
            return Err(error);
        }
        drop(inside);
        let buffer = spare.unwrap_or_else(|| Buffer::for_overwrite(len));
        self.disk.read(start, buffer).await
    }

    /// Where the bytes are: home says it, except for what home may have older.
    pub(super) async fn map(&self, span: GuestSpan) -> Result<Vec<Extent>> {
        let span = self.check(Some(span))?;
        if span.is_empty() {
            return Ok(Vec::new());
        }
        // A bounded part: the answer may stop early.
        let (span, _) = span.split_at(64 << 20);
        let mut extents = Vec::new();
        for Piece { span, source, .. } in self.look_up(span) {
            let place = match source {
                Source::Slot { at, dirty: true } => Place::Data { storage: self.cache.storage.clone(), at },
                Source::Zero => Place::Zero { allocated: false },
                Source::Home | Source::Slot { dirty: false, .. } => {
                    let mut rest = span;
                    while !rest.is_empty() {
                        let part = self.disk.map(rest).await?;
                        let end = part.last().map_or(rest.end(), |last| last.span.end());
                        extents.extend(part);
                        rest = GuestSpan::between(end, rest.end());
                    }
                    continue;
                }
            };
            extents.push(Extent { span, place });
        }
        Ok(extents)
    }
}
