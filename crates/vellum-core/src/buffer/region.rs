//! The memory behind buffers: allocations, which are kept for reuse for a while; and memory of other owners.
//!
//! ```text
//!   take ──► Region ── the last piece is dropped ──► the thread's pool, by size ──► take …
//!                                                └─► the allocator, when it is large or the pool is full
//!   lent ──► Region, which holds what keeps the memory ── the last piece is dropped ──► the keeper is dropped
//! ```

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where every region of ours starts: aligned enough for O_DIRECT on any drive.
pub const BUFFER_ALIGNMENT: usize = 4096;

/// How many bytes of freed regions one thread keeps for its next buffers.
pub const POOLED_BYTES_MAX: usize = 16 << 20;

/// The largest region that is kept for reuse; larger ones go back to the allocator.
const POOLED_REGION_MAX: usize = 2 << 20;

/// Keeps lent memory in place as long as it exists.
pub type Keeper = Arc<dyn Any + Send + Sync>;

/// One allocation, freed (or kept for reuse) when the last piece of it is dropped; or memory of another
/// owner.
pub(super) struct Region {
    memory: Memory,
}

enum Memory {
    Own {
        start: NonNull<u8>,
        size: usize,
    },
    Lent {
        #[expect(dead_code, reason = "it is held, and does its work when it is dropped")]
        keeper: Keeper,
    },
}

// SAFETY: the region owns its memory, and only pieces reach it; a keeper may be dropped on any thread.
unsafe impl Send for Region {}
// SAFETY: a shared region reveals nothing but its address.
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
    pub(super) fn take(len: usize) -> (Arc<Self>, bool) {
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
        (Arc::new(Self { memory: Memory::Own { start, size } }), fresh)
    }

    /// Memory that exists as long as the keeper.
    pub(super) fn lent(keeper: Keeper) -> Arc<Self> {
        Arc::new(Self { memory: Memory::Lent { keeper } })
    }

    pub(super) fn is_lent(&self) -> bool {
        matches!(self.memory, Memory::Lent { .. })
    }

    /// Where memory of our own starts.
    pub(super) fn start(&self) -> NonNull<u8> {
        match self.memory {
            Memory::Own { start, .. } => start,
            Memory::Lent { .. } => unreachable!("pieces of lent memory begin where they were said to"),
        }
    }

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, BUFFER_ALIGNMENT).expect("a buffer is far below 2^63 bytes")
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let Memory::Own { start, size } = self.memory else { return };
        let kept = Pool::class_of(size).is_some_and(|class| {
            POOL.try_with(|pool| {
                let mut pool = pool.borrow_mut();
                if pool.bytes + size > POOLED_BYTES_MAX {
                    return false;
                }
                pool.bytes += size;
                pool.free[class].push(start);
                true
            })
            .unwrap_or(false)
        });
        if !kept {
            // SAFETY: allocated in `take` with this layout, and no piece is left.
            unsafe { dealloc(start.as_ptr(), Self::layout(size)) };
        }
    }
}
