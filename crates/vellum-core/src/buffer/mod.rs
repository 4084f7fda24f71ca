//! Aligned memory for guest data, which can be cut, joined and passed to the kernel without a copy: our own,
//! or *lent*.
//!
//! ```text
//!   Buffer ── piece ── piece ── piece ── piece     a list of pieces, read and written as one run of bytes
//!               │        │        │        └── lent: where a guest has it, with what keeps it mapped
//!            region A  region A    region B        our own: 4 KiB aligned, shared by the pieces cut from it
//! ```
//!
//! A buffer has one holder at a time. It is *cut* so that parts of one request can go to different places at
//! once, and *joined* again on the way back; a copy-on-write fill is [head, guest data, tail] joined, written
//! with one vectored host write. A holder that passes a buffer to the kernel keeps it until the kernel is
//! done.
//!
//! Lent memory ([`Buffer::lent`]) belongs to another party, typically a guest, which may change it at any
//! time. It can be passed to the kernel, filled and copied, and nothing else. Code that reads a byte more
//! than once, or must write exactly what it has read, copies the bytes first ([`Buffer::owned`]): the copy is
//! what counts.
//!
//! 1. Two pieces of one region of our own never overlap, so a piece is the only way to its bytes. Lent pieces
//!    may overlap.
//! 2. Every byte of a region is initialised when it is allocated; a *recycled* region keeps its old bytes, so
//!    [`Buffer::for_overwrite`] is only for callers that fill all of it (debug builds fill it with a
//!    pattern).
//! 3. A piece of our own memory starts at a 4 KiB boundary unless something was cut off in front of it.
//! 4. Freed regions are kept for reuse per thread, at most [`POOLED_BYTES_MAX`].
//! 5. No reference to a byte of lent memory is ever made (`shared.rs`): an operation that would need one
//!    panics with a message.
//! 6. Lent memory stays in place until the last piece of it is dropped, whatever its owner does meanwhile.

mod region;
mod shared;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use region::Region;
pub use region::{BUFFER_ALIGNMENT, Keeper, POOLED_BYTES_MAX};
pub use shared::SharedBytes;
use smallvec::SmallVec;

/// The pattern that debug builds write over recycled memory, so that a caller that does not fill it is
/// noticed.
const STALE_PATTERN: u8 = 0xC9;

/// Asking for a slice of lent memory is a bug in the caller.
const NO_SLICE: &str = "lent memory is never seen as a slice: `Buffer::owned` gives a copy";

/// A run of bytes, possibly in several pieces.
#[derive(Default)]
pub struct Buffer {
    pieces: SmallVec<[Piece; 1]>,
    len: usize,
}

impl Buffer {
    /// A buffer of no bytes.
    pub fn empty() -> Self {
        Self::default()
    }

    /// `len` bytes of zero.
    pub fn zeroed(len: usize) -> Self {
        let (region, fresh) = Region::take(len);
        let mut buffer = Self::from_region(region, len);
        if !fresh {
            buffer.fill(0);
        }
        buffer
    }

    /// `len` bytes of undefined content, for a caller that will fill all of them.
    pub fn for_overwrite(len: usize) -> Self {
        let (region, _) = Region::take(len);
        let mut buffer = Self::from_region(region, len);
        if cfg!(debug_assertions) {
            buffer.fill(STALE_PATTERN);
        }
        buffer
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let (region, _) = Region::take(bytes.len());
        let mut buffer = Self::from_region(region, bytes.len());
        buffer.copy_from(0, bytes);
        buffer
    }

    /// Memory whose owner may change it at any time: its runs, in order, each with its address and length.
    ///
    /// # Safety
    ///
    /// As long as `keeper`, or a clone of it, exists, each run may be read and written by any code in this
    /// process, and there are no references to its bytes except atomic ones. Runs may overlap.
    pub unsafe fn lent(runs: impl IntoIterator<Item = (NonNull<u8>, usize)>, keeper: Keeper) -> Self {
        let region = Region::lent(keeper);
        let mut buffer = Self::default();
        for (at, len) in runs.into_iter().filter(|(_, len)| *len > 0) {
            buffer.len += len;
            buffer.push(Piece { region: region.clone(), at, len });
        }
        buffer
    }

    fn from_region(region: Arc<Region>, len: usize) -> Self {
        let mut pieces = SmallVec::new();
        if len > 0 {
            pieces.push(Piece { at: region.start(), region, len });
        }
        Self { pieces, len }
    }

    fn push(&mut self, piece: Piece) {
        match self.pieces.last_mut() {
            Some(last) if last.precedes(&piece) => last.len += piece.len,
            _ => self.pieces.push(piece),
        }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Cuts the buffer in two: `self` keeps the first `at` bytes, the rest is returned. No byte is copied.
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.len, "a buffer of {} bytes cannot be cut at {at}", self.len);
        let mut index = 0;
        let mut before = 0;
        while index < self.pieces.len() && before + self.pieces[index].len <= at {
            before += self.pieces[index].len;
            index += 1;
        }
        let mut tail: SmallVec<[Piece; 1]> = SmallVec::new();
        if before < at {
            tail.push(self.pieces[index].split_off(at - before));
            index += 1;
        }
        tail.extend(self.pieces.drain(index..));
        let len = self.len - at;
        self.len = at;
        Self { pieces: tail, len }
    }

    /// Cuts the first `at` bytes off and returns them; `self` keeps the rest. No byte is copied.
    pub fn split_to(&mut self, at: usize) -> Self {
        let tail = self.split_off(at);
        std::mem::replace(self, tail)
    }

    /// Appends `other`. No byte is copied; pieces that were neighbours become one again.
    pub fn append(&mut self, other: Self) {
        self.len += other.len;
        for piece in other.pieces {
            self.push(piece);
        }
    }

    /// Whether any of it is lent: it may change at any time, and has no slices.
    pub fn is_lent(&self) -> bool {
        self.pieces.iter().any(|piece| piece.region.is_lent())
    }

    /// How many bytes of it are lent.
    pub fn lent_len(&self) -> usize {
        self.pieces.iter().filter(|piece| piece.region.is_lent()).map(|piece| piece.len).sum()
    }

    /// The same bytes in memory of our own: as they are, or copied if any are lent. They do not change any
    /// more.
    #[must_use]
    pub fn owned(self) -> Self {
        if self.is_lent() { self.duplicate() } else { self }
    }

    /// Another buffer to read the same bytes into, for when a read into this one fails: lent memory is the same, and for memory
    /// of our own there is new memory, of undefined content.
    #[must_use]
    pub fn spare(&self) -> Self {
        let mut spare = Self::empty();
        for Piece { region, at, len } in &self.pieces {
            if region.is_lent() {
                spare.len += len;
                spare.push(Piece { region: region.clone(), at: *at, len: *len });
            } else {
                spare.append(Self::for_overwrite(*len));
            }
        }
        spare
    }

    /// The bytes as one slice. Panics when they are in several pieces, or are lent: use it for buffers made
    /// by the same code.
    pub fn slice(&self) -> &[u8] {
        match &self.pieces[..] {
            [] => &[],
            [piece] => piece.slice(),
            _ => panic!("the buffer lies in one piece"),
        }
    }

    /// The bytes as one slice to change. Panics as [`Buffer::slice`] does.
    pub fn slice_mut(&mut self) -> &mut [u8] {
        match &mut self.pieces[..] {
            [] => &mut [],
            [piece] => piece.slice_mut(),
            _ => panic!("the buffer lies in one piece"),
        }
    }

    /// The pieces in order. Panics where one is lent.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(Piece::slice)
    }

    /// The pieces in order, to change. Panics where one is lent.
    pub fn pieces_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.pieces.iter_mut().map(Piece::slice_mut)
    }

    /// How many pieces the bytes are in.
    pub fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    /// How long each piece is.
    pub fn piece_lengths(&self) -> impl Iterator<Item = usize> {
        self.pieces.iter().map(|piece| piece.len)
    }

    /// Address and length of each piece, for a system call. The addresses are valid until the buffer is
    /// dropped, cut, joined, or otherwise read or written.
    pub fn raw_pieces(&mut self) -> impl Iterator<Item = (*mut u8, usize)> {
        self.pieces.iter_mut().map(|piece| (piece.at.as_ptr(), piece.len))
    }

    /// Whether every piece starts at a multiple of `memory` bytes and is a multiple of `length` long, as
    /// O_DIRECT requires.
    pub fn is_aligned_to(&self, memory: usize, length: usize) -> bool {
        let fits =
            |piece: &Piece| piece.at.addr().get().is_multiple_of(memory) && piece.len.is_multiple_of(length);
        self.pieces.iter().all(fits)
    }

    /// The same bytes in one piece of our own: as they are, or copied if they are in several pieces or lent.
    #[must_use]
    pub fn contiguous(self) -> Self {
        if self.pieces.len() <= 1 && !self.is_lent() { self } else { self.duplicate() }
    }

    /// Copies `bytes` in, from position `at`.
    pub fn copy_from(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len, "a copy stays within the buffer");
        let mut skip = at;
        let mut rest = bytes;
        for piece in &mut self.pieces {
            if rest.is_empty() {
                break;
            }
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let part = (piece.len - skip).min(rest.len());
            let (now, later) = rest.split_at(part);
            piece.copy_in(skip, now);
            rest = later;
            skip = 0;
        }
    }

    /// Copies bytes out, from position `at`, until `bytes` is full.
    pub fn copy_to(&self, at: usize, bytes: &mut [u8]) {
        assert!(at + bytes.len() <= self.len, "a copy stays within the buffer");
        let mut skip = at;
        let mut rest = bytes;
        for piece in &self.pieces {
            if rest.is_empty() {
                break;
            }
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let part = (piece.len - skip).min(rest.len());
            let (now, later) = rest.split_at_mut(part);
            piece.copy_out(skip, now);
            rest = later;
            skip = 0;
        }
    }

    /// The bytes in a vector, copied.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(0, &mut bytes);
        bytes
    }

    /// A copy of the bytes in memory of our own, in one piece.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        let (region, _) = Region::take(self.len);
        let mut copy = Self::from_region(region, self.len);
        self.copy_to(0, copy.slice_mut());
        copy
    }

    /// Sets every byte to `value`.
    pub fn fill(&mut self, value: u8) {
        self.pieces.iter_mut().for_each(|piece| piece.fill(value));
    }

    /// Has `put` fill the bytes, run by run, with the position at which each begins. For lent memory the
    /// result is copied.
    pub fn fill_with(&mut self, mut put: impl FnMut(usize, &mut [u8])) {
        let mut at = 0;
        for piece in &mut self.pieces {
            if piece.region.is_lent() {
                let mut bytes = vec![0; piece.len];
                put(at, &mut bytes);
                piece.copy_in(0, &bytes);
            } else {
                put(at, piece.slice_mut());
            }
            at += piece.len;
        }
    }

    /// Whether every byte is zero. Panics where one is lent.
    pub fn is_zero(&self) -> bool {
        self.pieces().all(is_zero)
    }
}

/// Whether every byte of the slice is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // In chunks, because the compiler turns a fold without an early exit into vector operations.
    let (chunks, rest) = bytes.as_chunks::<64>();
    chunks.iter().all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes in {} pieces)", self.len, self.pieces.len())
    }
}

/// A run of a region's bytes. In memory of our own no other piece can reach them.
struct Piece {
    region: Arc<Region>,
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: a piece of ours is the only way to its bytes (invariant 1), and the region's memory is plain bytes
// that may be used and freed on any thread. Lent bytes are read and changed only as atomic ones, on any
// thread.
unsafe impl Send for Piece {}
// SAFETY: a shared piece gives only shared slices of its bytes, or copies of lent ones.
unsafe impl Sync for Piece {}

impl Piece {
    fn slice(&self) -> &[u8] {
        assert!(!self.region.is_lent(), "{NO_SLICE}");
        // SAFETY: the bytes are inside the allocation, initialised, and no other piece overlaps them.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }

    fn slice_mut(&mut self) -> &mut [u8] {
        assert!(!self.region.is_lent(), "{NO_SLICE}");
        // SAFETY: as in `slice`; `&mut self` makes this the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }

    /// The address of the bytes from this one on, of which there are `len`.
    fn place(&self, from: usize, len: usize) -> NonNull<u8> {
        assert!(from.checked_add(len).is_some_and(|end| end <= self.len), "within the piece");
        // Lent pieces that follow each other are one piece, even if they belong to two mappings: the address
        // is not computed within one object.
        shared::behind(self.at, from)
    }

    fn copy_in(&mut self, from: usize, bytes: &[u8]) {
        match self.region.is_lent() {
            // SAFETY: the place has as many bytes, which are lent memory and may be used while the region
            // lives.
            true => unsafe { shared::copy_in(self.place(from, bytes.len()), bytes) },
            false => self.slice_mut()[from..from + bytes.len()].copy_from_slice(bytes),
        }
    }

    fn copy_out(&self, from: usize, bytes: &mut [u8]) {
        match self.region.is_lent() {
            // SAFETY: as in `copy_in`.
            true => unsafe { shared::copy_out(self.place(from, bytes.len()), bytes) },
            false => bytes.copy_from_slice(&self.slice()[from..from + bytes.len()]),
        }
    }

    fn fill(&mut self, value: u8) {
        match self.region.is_lent() {
            // SAFETY: as in `copy_in`.
            true => unsafe { shared::fill(self.at, self.len, value) },
            false => self.slice_mut().fill(value),
        }
    }

    fn split_off(&mut self, at: usize) -> Self {
        let tail = Self { region: self.region.clone(), at: self.place(at, 0), len: self.len - at };
        self.len = at;
        tail
    }

    fn precedes(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.region, &other.region) && self.at.addr().get() + self.len == other.at.addr().get()
    }
}
