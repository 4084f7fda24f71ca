//! Memory that others read and write concurrently: a guest, the kernel, another thread.
//!
//! It is never borrowed. Bytes are copied out of it, copied into it and set, each of them once, with relaxed
//! atomic accesses: words where they are aligned, bytes at both ends. A copy sees, word by word, any of the
//! values that were there meanwhile.
//!
//! Left out: memory that goes away while it is used. A mapped file that is truncated raises SIGBUS here, as
//! it does in any copy.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use super::{BUFFER_ALIGNMENT, Buffer};

const WORD: usize = size_of::<u64>();

/// The byte `index` behind this place.
///
/// # Safety
///
/// It is shared memory that exists as long as `'a`.
unsafe fn byte<'a>(at: NonNull<u8>, index: usize) -> &'a AtomicU8 {
    // SAFETY: the caller's promise; a byte is aligned wherever it is.
    unsafe { AtomicU8::from_ptr(at.as_ptr().wrapping_add(index)) }
}

/// The word `index` words behind this place.
///
/// # Safety
///
/// It is shared memory that exists as long as `'a`, and the place is aligned to a word.
unsafe fn word<'a>(at: NonNull<u8>, index: usize) -> &'a AtomicU64 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(at.as_ptr().wrapping_add(index * WORD).cast()) }
}

/// How many of `len` bytes precede the first aligned word.
fn head_len(at: NonNull<u8>, len: usize) -> usize {
    (at.addr().get().wrapping_neg() % WORD).min(len)
}

/// The address this many bytes further on.
pub(super) fn behind(at: NonNull<u8>, bytes: usize) -> NonNull<u8> {
    NonNull::new(at.as_ptr().wrapping_add(bytes)).expect("memory does not reach round to nothing")
}

/// Copies shared bytes out.
///
/// # Safety
///
/// From this place on there are that many bytes of shared memory.
pub(super) unsafe fn copy_out(from: NonNull<u8>, bytes: &mut [u8]) {
    let (head, rest) = bytes.split_at_mut(head_len(from, bytes.len()));
    let (words, tail) = rest.as_chunks_mut::<WORD>();
    let aligned = behind(from, head.len());
    let last = words.len() * WORD;
    // SAFETY: all of these are within the bytes that the caller guarantees, and `aligned` is aligned.
    unsafe {
        head.iter_mut().enumerate().for_each(|(index, to)| *to = byte(from, index).load(Relaxed));
        for (index, to) in words.iter_mut().enumerate() {
            // Independent of the machine's byte order: the order in memory is kept.
            *to = u64::from_le(word(aligned, index).load(Relaxed)).to_le_bytes();
        }
        tail.iter_mut().enumerate().for_each(|(index, to)| *to = byte(aligned, last + index).load(Relaxed));
    }
}

/// Copies bytes into shared ones.
///
/// # Safety
///
/// From this place on there are that many bytes of shared memory.
pub(super) unsafe fn copy_in(to: NonNull<u8>, bytes: &[u8]) {
    let (head, rest) = bytes.split_at(head_len(to, bytes.len()));
    let (words, tail) = rest.as_chunks::<WORD>();
    let aligned = behind(to, head.len());
    let last = words.len() * WORD;
    // SAFETY: as in `copy_out`.
    unsafe {
        head.iter().enumerate().for_each(|(index, from)| byte(to, index).store(*from, Relaxed));
        for (index, from) in words.iter().enumerate() {
            word(aligned, index).store(u64::from_le_bytes(*from).to_le(), Relaxed);
        }
        tail.iter().enumerate().for_each(|(index, from)| byte(aligned, last + index).store(*from, Relaxed));
    }
}

/// Sets shared bytes.
///
/// # Safety
///
/// From this place on there are that many bytes of shared memory.
pub(super) unsafe fn fill(at: NonNull<u8>, len: usize, value: u8) {
    let head = head_len(at, len);
    let aligned = behind(at, head);
    let words = (len - head) / WORD;
    let wide = u64::from_le_bytes([value; WORD]);
    // SAFETY: as in `copy_out`.
    unsafe {
        (0..head).for_each(|index| byte(at, index).store(value, Relaxed));
        (0..words).for_each(|index| word(aligned, index).store(wide, Relaxed));
        (words * WORD..len - head).for_each(|index| byte(aligned, index).store(value, Relaxed));
    }
}

/// Memory that any thread may change at any time, and that can be lent: it stands for a guest's memory,
/// without a guest.
pub struct SharedBytes {
    pages: Vec<Page>,
}

/// Aligned as pages are.
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "it is reached by its address alone")] [AtomicU8; BUFFER_ALIGNMENT]);

impl SharedBytes {
    /// At least `len` bytes of zero, aligned to a page.
    pub fn zeroed(len: usize) -> Arc<Self> {
        let page = || Page([const { AtomicU8::new(0) }; BUFFER_ALIGNMENT]);
        Arc::new(Self { pages: std::iter::repeat_with(page).take(len.div_ceil(BUFFER_ALIGNMENT)).collect() })
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.pages.len() * BUFFER_ALIGNMENT
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Lends runs of it, in order: the start and length of each. They may overlap.
    pub fn lend(self: &Arc<Self>, runs: &[(usize, usize)]) -> Buffer {
        let start = NonNull::from(&self.pages[..]).cast::<u8>();
        let place = |&(at, len): &(usize, usize)| {
            assert!(at.checked_add(len).is_some_and(|end| end <= self.len()), "it lies within the bytes");
            (behind(start, at), len)
        };
        // SAFETY: the pages consist of atomic bytes only, and stay in place as long as the keeper lives.
        unsafe { Buffer::lent(runs.iter().map(place), self.clone()) }
    }

    /// Changes bytes, from `at` on, whatever else uses them at the time.
    pub fn set(self: &Arc<Self>, at: usize, bytes: &[u8]) {
        self.lend(&[(at, bytes.len())]).copy_from(0, bytes);
    }

    /// The bytes from `at` on, as they are now.
    pub fn get(self: &Arc<Self>, at: usize, len: usize) -> Vec<u8> {
        self.lend(&[(at, len)]).to_vec()
    }
}
