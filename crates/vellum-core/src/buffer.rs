//! Owned, aligned memory for guest data, which can be cut, joined and lent to the kernel without a copy.
//!
//! ```text
//!   Buffer ── piece ── piece ── piece          a list of pieces, read and written as one run of bytes
//!               │        │        └───┐
//!            region A  region A    region B    4 KiB aligned memory, shared by the pieces cut from it
//! ```
//!
//! A buffer is owned by one holder at a time. It is *cut* so that parts of one request can travel to different
//! places at once, and *joined* again on the way back; a copy-on-write fill is [head, guest data, tail] joined,
//! written with one vectored host write. Whoever gives a buffer to the kernel keeps it until the kernel is done.
//!
//! 1. Two pieces of one region never overlap, so a piece is the only way to its bytes.
//! 2. Every byte of a region is initialised when it is allocated; a *recycled* region keeps its old bytes, so
//!    [`Buffer::for_overwrite`] is only for callers who fill all of it (debug builds fill it with a pattern).
//! 3. A piece starts at a 4 KiB boundary when nothing was cut off in front of it.
//! 4. Freed regions are kept for reuse per thread, at most [`POOLED_BYTES_MAX`].
//!
//! Left out: memory that others may change meanwhile (guest RAM). It needs accessors without slices.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use smallvec::SmallVec;

/// Where every region starts: enough for O_DIRECT on every drive there is.
pub const BUFFER_ALIGNMENT: usize = 4096;

/// How many bytes of freed regions one thread keeps for its next buffers.
pub const POOLED_BYTES_MAX: usize = 16 << 20;

/// The largest region that is kept for reuse; larger ones go back to the allocator.
const POOLED_REGION_MAX: usize = 2 << 20;

/// What debug builds write over recycled memory, so that a reader who does not fill it is noticed.
const STALE_PATTERN: u8 = 0xC9;

/// An owned run of bytes, possibly in several pieces.
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

    /// `len` bytes with no meaning, for a caller who is about to fill all of them.
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

    fn from_region(region: Arc<Region>, len: usize) -> Self {
        let mut pieces = SmallVec::new();
        if len > 0 {
            pieces.push(Piece { region, start: 0, len });
        }
        Self { pieces, len }
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

    /// Joins `other` behind. No byte is copied; pieces that were neighbours become one again.
    pub fn append(&mut self, other: Self) {
        self.len += other.len;
        for piece in other.pieces {
            match self.pieces.last_mut() {
                Some(last) if last.precedes(&piece) => last.len += piece.len,
                _ => self.pieces.push(piece),
            }
        }
    }

    /// The bytes as one slice, when they lie in one piece.
    pub fn try_slice(&self) -> Option<&[u8]> {
        match &self.pieces[..] {
            [] => Some(&[]),
            [piece] => Some(piece.slice()),
            _ => None,
        }
    }

    /// The bytes as one slice. Panics when they lie in several pieces: for buffers one has made oneself.
    pub fn slice(&self) -> &[u8] {
        self.try_slice().expect("the buffer lies in one piece")
    }

    /// The bytes as one slice to change. Panics as [`Buffer::slice`] does.
    pub fn slice_mut(&mut self) -> &mut [u8] {
        match &mut self.pieces[..] {
            [] => &mut [],
            [piece] => piece.slice_mut(),
            _ => panic!("the buffer lies in one piece"),
        }
    }

    /// The pieces in order.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(Piece::slice)
    }

    /// The pieces in order, to change.
    pub fn pieces_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.pieces.iter_mut().map(Piece::slice_mut)
    }

    /// How many pieces the bytes lie in.
    pub fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    /// Address and length of each piece, for a system call. The addresses are good for as long as the buffer
    /// is neither dropped, cut, joined nor read or written otherwise.
    pub fn raw_pieces(&mut self) -> impl Iterator<Item = (*mut u8, usize)> {
        self.pieces.iter_mut().map(|piece| (piece.address(), piece.len))
    }

    /// Whether every piece starts at and is a multiple of `alignment` bytes, as O_DIRECT wants it.
    pub fn is_aligned_to(&self, alignment: usize) -> bool {
        self.pieces.iter().all(|piece| {
            piece.address().addr().is_multiple_of(alignment) && piece.len.is_multiple_of(alignment)
        })
    }

    /// The same bytes in one piece: as they are, or copied when they lie in several.
    #[must_use]
    pub fn contiguous(self) -> Self {
        if self.pieces.len() <= 1 {
            return self;
        }
        let mut whole = Self::for_overwrite(self.len);
        let mut at = 0;
        for piece in self.pieces() {
            whole.copy_from(at, piece);
            at += piece.len();
        }
        whole
    }

    /// Copies `bytes` in, from position `at`.
    pub fn copy_from(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len, "a copy stays within the buffer");
        let mut skip = at;
        let mut rest = bytes;
        for piece in self.pieces_mut() {
            if rest.is_empty() {
                break;
            }
            if skip >= piece.len() {
                skip -= piece.len();
                continue;
            }
            let part = (piece.len() - skip).min(rest.len());
            let (now, later) = rest.split_at(part);
            piece[skip..skip + part].copy_from_slice(now);
            rest = later;
            skip = 0;
        }
    }

    /// Copies bytes out, from position `at`, until `bytes` is full.
    pub fn copy_to(&self, at: usize, bytes: &mut [u8]) {
        assert!(at + bytes.len() <= self.len, "a copy stays within the buffer");
        let mut skip = at;
        let mut rest = bytes;
        for piece in self.pieces() {
            if rest.is_empty() {
                break;
            }
            if skip >= piece.len() {
                skip -= piece.len();
                continue;
            }
            let part = (piece.len() - skip).min(rest.len());
            let (now, later) = rest.split_at_mut(part);
            now.copy_from_slice(&piece[skip..skip + part]);
            rest = later;
            skip = 0;
        }
    }

    /// The bytes in a vector, copied.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len);
        for piece in self.pieces() {
            bytes.extend_from_slice(piece);
        }
        bytes
    }

    /// A copy of the bytes in memory of its own.
    pub fn duplicate(&self) -> Self {
        let mut copy = Self::for_overwrite(self.len);
        let mut at = 0;
        for piece in self.pieces() {
            copy.copy_from(at, piece);
            at += piece.len();
        }
        copy
    }

    /// Sets every byte to `value`.
    pub fn fill(&mut self, value: u8) {
        for piece in self.pieces_mut() {
            piece.fill(value);
        }
    }

    /// Whether every byte is zero.
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

/// A run of a region's bytes that nobody else can reach.
struct Piece {
    region: Arc<Region>,
    start: usize,
    len: usize,
}

// SAFETY: a piece is the only way to its bytes (invariant 1), and the region's memory is plain bytes that
// may be used and freed on any thread.
unsafe impl Send for Piece {}
// SAFETY: a shared piece gives only shared slices of its bytes.
unsafe impl Sync for Piece {}

impl Piece {
    fn address(&self) -> *mut u8 {
        // SAFETY: `start` is within the region's allocation, by construction.
        unsafe { self.region.start.as_ptr().add(self.start) }
    }

    fn slice(&self) -> &[u8] {
        // SAFETY: the bytes are inside the allocation, initialised, and no other piece overlaps them.
        unsafe { std::slice::from_raw_parts(self.address(), self.len) }
    }

    fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `slice`; `&mut self` makes this the only borrow.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.len) }
    }

    fn split_off(&mut self, at: usize) -> Self {
        debug_assert!(at <= self.len);
        let tail = Self { region: self.region.clone(), start: self.start + at, len: self.len - at };
        self.len = at;
        tail
    }

    fn precedes(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.region, &other.region) && self.start + self.len == other.start
    }
}

/// One allocation, freed (or kept for reuse) when the last piece of it is dropped.
struct Region {
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: the region owns its memory, and only pieces reach it.
unsafe impl Send for Region {}
// SAFETY: a shared region gives nothing but its address.
unsafe impl Sync for Region {}

thread_local! {
    static POOL: RefCell<Pool> = const { RefCell::new(Pool { free: [const { Vec::new() }; POOL_CLASSES], bytes: 0 }) };
}

/// Size classes are powers of two from one page to `POOLED_REGION_MAX`.
const POOL_CLASSES: usize = (POOLED_REGION_MAX / BUFFER_ALIGNMENT).trailing_zeros() as usize + 1;

struct Pool {
    free: [Vec<NonNull<u8>>; POOL_CLASSES],
    bytes: usize,
}

impl Pool {
    fn class_of(size: usize) -> Option<usize> {
        (size <= POOLED_REGION_MAX).then(|| (size / BUFFER_ALIGNMENT).trailing_zeros() as usize)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for (class, free) in self.free.iter_mut().enumerate() {
            for start in free.drain(..) {
                // SAFETY: the pool owns the allocation, which has the size of its class.
                unsafe { dealloc(start.as_ptr(), Region::layout(BUFFER_ALIGNMENT << class)) };
            }
        }
    }
}

impl Region {
    /// A region of at least `len` bytes, and whether it is fresh (all zero) or recycled.
    fn take(len: usize) -> (Arc<Self>, bool) {
        let size = len.max(1).next_multiple_of(BUFFER_ALIGNMENT);
        let size = if size <= POOLED_REGION_MAX { size.next_power_of_two() } else { size };
        let recycled = Pool::class_of(size).and_then(|class| {
            POOL.try_with(|pool| {
                let mut pool = pool.borrow_mut();
                let start = pool.free[class].pop()?;
                pool.bytes -= size;
                Some(start)
            })
            .ok()
            .flatten()
        });
        let fresh = recycled.is_none();
        let start = recycled.unwrap_or_else(|| {
            let layout = Self::layout(size);
            // SAFETY: the layout has a size above zero.
            let start = unsafe { alloc_zeroed(layout) };
            NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout))
        });
        (Arc::new(Self { start, size }), fresh)
    }

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, BUFFER_ALIGNMENT).expect("a buffer is far below 2^63 bytes")
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let kept = Pool::class_of(self.size).is_some_and(|class| {
            POOL.try_with(|pool| {
                let mut pool = pool.borrow_mut();
                if pool.bytes + self.size > POOLED_BYTES_MAX {
                    return false;
                }
                pool.bytes += self.size;
                pool.free[class].push(self.start);
                true
            })
            .unwrap_or(false)
        });
        if !kept {
            // SAFETY: allocated in `take` with this layout, and no piece is left.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.size)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(len: usize) -> Buffer {
        let bytes: Vec<u8> = (0..len).map(|i| u8::try_from(i % 251).unwrap()).collect();
        Buffer::copy_of(&bytes)
    }

    #[test]
    fn cut_and_joined_is_the_same_buffer_in_one_piece() {
        let mut first = numbered(10_000);
        let whole = first.to_vec();
        let mut second = first.split_off(3_000);
        let third = second.split_off(2_000);
        assert_eq!((first.len(), second.len(), third.len()), (3_000, 2_000, 5_000));
        first.append(second);
        first.append(third);
        assert_eq!(first.piece_count(), 1);
        assert_eq!(first.slice(), whole);
    }

    #[test]
    fn pieces_of_different_regions_read_as_one_run() {
        let mut buffer = numbered(100);
        buffer.append(Buffer::zeroed(50));
        buffer.append(numbered(30));
        assert_eq!((buffer.len(), buffer.piece_count()), (180, 3));
        buffer.copy_from(90, &[9; 70]);
        let mut out = [0; 72];
        buffer.copy_to(89, &mut out);
        assert_eq!(out[0], 89);
        assert!(out[1..71].iter().all(|byte| *byte == 9));
        assert_eq!(out[71], 10);
        let tail = buffer.split_off(120);
        assert_eq!(tail.to_vec().len(), 60);
        assert_eq!(buffer.contiguous().piece_count(), 1);
    }

    #[test]
    fn a_cut_at_either_end_leaves_an_empty_buffer() {
        let mut buffer = numbered(64);
        assert!(buffer.split_off(64).is_empty());
        let all = buffer.split_off(0);
        assert!(buffer.is_empty());
        assert_eq!(all.len(), 64);
        assert_eq!(buffer.slice(), b"");
    }

    #[test]
    fn zeroed_is_zero_even_when_recycled() {
        for _ in 0..3 {
            let mut buffer = Buffer::zeroed(8192);
            assert!(buffer.is_zero());
            buffer.fill(7);
            assert!(!buffer.is_zero());
        }
    }

    #[test]
    fn alignment_is_told_piece_by_piece() {
        let mut buffer = Buffer::zeroed(8192);
        assert!(buffer.is_aligned_to(4096));
        let tail = buffer.split_off(512);
        assert!(tail.is_aligned_to(512) && !tail.is_aligned_to(4096));
    }

    #[test]
    fn a_single_one_is_found_at_every_place() {
        for len in [1, 63, 64, 65, 200, 4096] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for at in [0, len / 2, len - 1] {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "length {len}, at {at}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn buffers_may_be_freed_on_another_thread() {
        let mut buffer = numbered(4096);
        let tail = buffer.split_off(2048);
        std::thread::spawn(move || drop(tail)).join().unwrap();
        assert_eq!(buffer.len(), 2048);
    }
}
