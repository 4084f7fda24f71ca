//! Addresses, runs of bytes and block sizes, typed so that address spaces cannot be mixed.
//!
//! ```text
//!   GuestOffset   a byte of the disk that the guest sees
//!   ImageOffset   a byte of one host-side storage (qcow2 calls it "host offset")
//!   Span<S>       start + length, half open: the byte at `end()` is not part of it
//!   Cluster<S>    the index of a block of some `BlockSize` in the space `S`
//! ```
//!
//! offset + bytes = offset, offset − offset = bytes; offset + offset does not compile, and neither does
//! a guest offset where an image offset is wanted:
//!
//! ```compile_fail
//! use vellum_core::{GuestOffset, ImageOffset};
//! fn host(_: ImageOffset) {}
//! host(GuestOffset::new(4096));
//! ```
//!
//! Left out: conversion from one address space to the other. Only a mapping can do that.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Add, AddAssign, Sub};

/// The address space of the disk a guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Guest {}

/// The address space of one host-side storage: a file, a block device, an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Image {}

/// A byte position in one address space.
pub struct Offset<Space> {
    bytes: u64,
    space: PhantomData<fn() -> Space>,
}

/// A byte position on the disk the guest sees.
pub type GuestOffset = Offset<Guest>;
/// A byte position in one host-side storage.
pub type ImageOffset = Offset<Image>;
/// A run of bytes of the disk the guest sees.
pub type GuestSpan = Span<Guest>;
/// A run of bytes of one host-side storage.
pub type ImageSpan = Span<Image>;
/// A cluster of the disk the guest sees.
pub type GuestCluster = Cluster<Guest>;
/// A cluster of one host-side storage.
pub type ImageCluster = Cluster<Image>;

impl<S> Offset<S> {
    /// The first byte of the space.
    pub const ZERO: Self = Self::new(0);

    /// The position `bytes` from the start of the space.
    pub const fn new(bytes: u64) -> Self {
        Self { bytes, space: PhantomData }
    }

    /// The distance from the start of the space, in bytes.
    pub const fn bytes(self) -> u64 {
        self.bytes
    }

    /// `self + bytes`, or `None` past 2^64.
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.bytes.checked_add(bytes) {
            Some(sum) => Some(Self::new(sum)),
            None => None,
        }
    }

    /// The run of `len` bytes that starts here. Panics when it would pass 2^64: a length that comes from
    /// outside goes through [`Span::checked`].
    pub fn span(self, len: u64) -> Span<S> {
        Span::checked(self, len).expect("a span ends within 2^64")
    }
}

/// A run of bytes in one address space: `len` bytes from `start`. It never passes 2^64.
pub struct Span<Space> {
    start: Offset<Space>,
    len: u64,
}

impl<S> Span<S> {
    /// The run of `len` bytes from `start`, or `None` when it would pass 2^64.
    pub fn checked(start: Offset<S>, len: u64) -> Option<Self> {
        start.checked_add(len)?;
        Some(Self { start, len })
    }

    /// The run from `start` up to, not including, `end`. Panics when `end` lies before `start`.
    pub fn between(start: Offset<S>, end: Offset<S>) -> Self {
        assert!(start <= end, "a span from {start} cannot end at {end}");
        Self { start, len: end.bytes - start.bytes }
    }

    /// The first byte.
    pub const fn start(self) -> Offset<S> {
        self.start
    }

    /// The number of bytes.
    pub const fn len(self) -> u64 {
        self.len
    }

    /// Whether there is no byte in it.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The first byte after the run.
    pub const fn end(self) -> Offset<S> {
        Offset::new(self.start.bytes + self.len)
    }

    /// Whether `at` is one of its bytes.
    pub fn contains(self, at: Offset<S>) -> bool {
        self.start <= at && at < self.end()
    }

    /// The bytes that both runs share; empty (at the later start) if there are none.
    pub fn intersect(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end()).max(start);
        Self::between(start, end)
    }

    /// Whether the runs share a byte.
    pub fn overlaps(self, other: Self) -> bool {
        !self.intersect(other).is_empty()
    }

    /// The first `len` bytes and the rest; all and nothing when there are fewer.
    pub fn split_at(self, len: u64) -> (Self, Self) {
        let len = len.min(self.len);
        (self.start.span(len), Self::between(self.start + len, self.end()))
    }

    /// At most the first `max` bytes, and the rest, which begins at a multiple of 4 KiB (of `max` where that
    /// is smaller). Code that moves a long run in pieces cuts it this way: a boundary that is only counted
    /// from the first byte may lie within a sector, which a crash between the two pieces then leaves half old
    /// and half new. A run no longer than `max` stays whole.
    pub fn split_between_blocks(self, max: u64) -> (Self, Self) {
        if self.len <= max {
            return self.split_at(max);
        }
        let block = max.min(4096);
        self.split_at(max - (self.start.bytes + max) % block)
    }
}

/// The index of a block in one address space; [`BlockSize`] turns it into a position and back.
pub struct Cluster<Space> {
    index: u64,
    space: PhantomData<fn() -> Space>,
}

impl<S> Cluster<S> {
    /// The block with this index, counted from zero.
    pub const fn new(index: u64) -> Self {
        Self { index, space: PhantomData }
    }

    /// Its index, counted from zero.
    pub const fn index(self) -> u64 {
        self.index
    }

    /// The block after it.
    pub const fn next(self) -> Self {
        Self::new(self.index + 1)
    }
}

/// A power of two: the size of a cluster, a page, a sector, an alignment. It is checked once, when it is
/// made.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockSize {
    shift: u32,
}

impl BlockSize {
    /// 512 bytes: the unit in which a medium is old or new, never mixed.
    pub const SECTOR: Self = Self::from_shift(9);
    /// 4096 bytes.
    pub const PAGE: Self = Self::from_shift(12);

    /// The size 2^`shift` bytes. Panics above 2^62.
    pub const fn from_shift(shift: u32) -> Self {
        assert!(shift <= 62, "a block size fits an offset");
        Self { shift }
    }

    /// The size of `bytes`, or `None` when that is no power of two.
    pub const fn from_bytes(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() && bytes.trailing_zeros() <= 62 {
            Some(Self { shift: bytes.trailing_zeros() })
        } else {
            None
        }
    }

    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        1 << self.shift
    }

    /// The exponent: the size is 2 to this power.
    pub const fn shift(self) -> u32 {
        self.shift
    }

    /// The block that holds the byte.
    pub const fn cluster_of<S>(self, at: Offset<S>) -> Cluster<S> {
        Cluster::new(at.bytes >> self.shift)
    }

    /// The first byte of the block. Panics when it lies past 2^64.
    pub fn start_of<S>(self, cluster: Cluster<S>) -> Offset<S> {
        let bytes = cluster.index << self.shift;
        assert!(bytes >> self.shift == cluster.index, "a cluster starts within 2^64");
        Offset::new(bytes)
    }

    /// The whole block as a run of bytes.
    pub fn span_of<S>(self, cluster: Cluster<S>) -> Span<S> {
        self.start_of(cluster).span(self.bytes())
    }

    /// How far the byte lies from the start of its block.
    pub const fn within<S>(self, at: Offset<S>) -> u64 {
        at.bytes & (self.bytes() - 1)
    }

    /// Whether the position is the start of a block.
    pub const fn aligns<S>(self, at: Offset<S>) -> bool {
        self.within(at) == 0
    }

    /// The largest multiple of the size that is not above `bytes`.
    pub const fn round_down(self, bytes: u64) -> u64 {
        bytes & !(self.bytes() - 1)
    }

    /// The smallest multiple of the size that is not below `bytes`; saturates at the largest multiple.
    pub const fn round_up(self, bytes: u64) -> u64 {
        match bytes.checked_add(self.bytes() - 1) {
            Some(sum) => self.round_down(sum),
            None => self.round_down(u64::MAX),
        }
    }

    /// How many blocks `bytes` need, the last one perhaps in part.
    pub const fn count_for(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.bytes())
    }

    /// The smallest run of whole blocks that holds the given run.
    pub fn widen<S>(self, span: Span<S>) -> Span<S> {
        let start = Offset::new(self.round_down(span.start.bytes));
        Span::between(start, Offset::new(self.round_up(span.end().bytes)))
    }

    /// The largest run of whole blocks inside the given run; empty when there is none.
    pub fn narrow<S>(self, span: Span<S>) -> Span<S> {
        let start = Offset::new(self.round_up(span.start.bytes));
        let end = Offset::new(self.round_down(span.end().bytes));
        Span::between(start, end.max(start))
    }

    /// The blocks that hold a byte of the run, in order.
    pub fn clusters_in<S>(self, span: Span<S>) -> impl Iterator<Item = Cluster<S>> {
        let first = span.start.bytes >> self.shift;
        let end = if span.is_empty() { first } else { ((span.end().bytes - 1) >> self.shift) + 1 };
        (first..end).map(Cluster::new)
    }

    /// The run cut at block boundaries, in order.
    pub fn pieces_of<S>(self, span: Span<S>) -> impl Iterator<Item = Span<S>> {
        self.clusters_in(span).map(move |cluster| self.span_of(cluster).intersect(span))
    }
}

impl fmt::Debug for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockSize({})", self.bytes())
    }
}

// Derives would require traits of `Space`, which has no values; so these are written out.

impl<S> Clone for Offset<S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S> Copy for Offset<S> {}
impl<S> PartialEq for Offset<S> {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}
impl<S> Eq for Offset<S> {}
impl<S> PartialOrd for Offset<S> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<S> Ord for Offset<S> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.bytes.cmp(&other.bytes)
    }
}
impl<S> std::hash::Hash for Offset<S> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
    }
}
impl<S> fmt::Debug for Offset<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.bytes)
    }
}
impl<S> fmt::Display for Offset<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.bytes)
    }
}
impl<S> Add<u64> for Offset<S> {
    type Output = Self;
    fn add(self, bytes: u64) -> Self {
        self.checked_add(bytes).expect("an offset stays within 2^64")
    }
}
impl<S> AddAssign<u64> for Offset<S> {
    fn add_assign(&mut self, bytes: u64) {
        *self = *self + bytes;
    }
}
impl<S> Sub for Offset<S> {
    type Output = u64;
    fn sub(self, earlier: Self) -> u64 {
        self.bytes.checked_sub(earlier.bytes).expect("the distance to an earlier offset is not negative")
    }
}

impl<S> Clone for Span<S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S> Copy for Span<S> {}
impl<S> PartialEq for Span<S> {
    fn eq(&self, other: &Self) -> bool {
        self.start == other.start && self.len == other.len
    }
}
impl<S> Eq for Span<S> {}
impl<S> fmt::Debug for Span<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.start.bytes, self.len)
    }
}
impl<S> fmt::Display for Span<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl<S> Clone for Cluster<S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S> Copy for Cluster<S> {}
impl<S> PartialEq for Cluster<S> {
    fn eq(&self, other: &Self) -> bool {
        self.index == other.index
    }
}
impl<S> Eq for Cluster<S> {}
impl<S> PartialOrd for Cluster<S> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<S> Ord for Cluster<S> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.index.cmp(&other.index)
    }
}
impl<S> std::hash::Hash for Cluster<S> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.index.hash(state);
    }
}
impl<S> fmt::Debug for Cluster<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_are_cut_between_blocks() {
        let cut = |start, len, max| {
            let mut rest = GuestOffset::new(start).span(len);
            let mut pieces = Vec::new();
            while !rest.is_empty() {
                let (piece, later) = rest.split_between_blocks(max);
                pieces.push((piece.start.bytes, piece.len));
                rest = later;
            }
            pieces
        };
        assert_eq!(cut(100, 8192, 8192), [(100, 8192)], "it is not too long, wherever it lies");
        assert_eq!(cut(100, 8193, 8192), [(100, 8092), (8192, 101)]);
        assert_eq!(cut(4096, 20_000, 8192), [(4096, 8192), (12_288, 8192), (20_480, 3616)]);
        assert_eq!(cut(100, 2000, 512), [(100, 412), (512, 512), (1024, 512), (1536, 512), (2048, 52)]);
    }

    #[test]
    fn pieces_are_cut_at_block_boundaries() {
        let span = GuestOffset::new(1000).span(1100);
        let pieces: Vec<_> =
            BlockSize::SECTOR.pieces_of(span).map(|p| (p.start().bytes(), p.len())).collect();
        assert_eq!(pieces, [(1000, 24), (1024, 512), (1536, 512), (2048, 52)]);
        assert_eq!(BlockSize::SECTOR.pieces_of(GuestOffset::new(512).span(0)).count(), 0);
    }

    #[test]
    fn widen_and_narrow_bracket_a_run() {
        let span = GuestOffset::new(1000).span(1100);
        assert_eq!(BlockSize::SECTOR.widen(span), GuestOffset::new(512).span(2048));
        assert_eq!(BlockSize::SECTOR.narrow(span), GuestOffset::new(1024).span(1024));
        assert!(BlockSize::PAGE.narrow(span).is_empty());
    }

    #[test]
    fn a_span_past_the_end_of_the_space_is_refused() {
        assert!(Span::checked(GuestOffset::new(u64::MAX), 1).is_none());
        assert!(Span::checked(GuestOffset::new(u64::MAX), 0).is_some());
    }

    #[test]
    fn intersections() {
        let a = GuestOffset::new(10).span(10);
        assert_eq!(a.intersect(GuestOffset::new(15).span(10)), GuestOffset::new(15).span(5));
        assert!(!a.overlaps(GuestOffset::new(20).span(1)));
        assert!(!a.overlaps(GuestOffset::new(0).span(10)));
    }

    #[test]
    fn only_powers_of_two_are_block_sizes() {
        assert_eq!(BlockSize::from_bytes(65536).map(BlockSize::shift), Some(16));
        assert_eq!(BlockSize::from_bytes(0), None);
        assert_eq!(BlockSize::from_bytes(48), None);
    }
}
