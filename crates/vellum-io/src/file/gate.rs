//! Protects a block during its read-modify-write from whole-block writes that would be lost.
//!
//! ```text
//!   the file    │ 64 KiB │ 64 KiB │ 64 KiB │ 64 KiB │ …        each stretch belongs to one of 64 stripes
//!   stripes         0        1        2        3     … 63, 0, 1 …
//!
//!   a stripe    ┌─ exclusive ─┬─ count of those inside ─┐      one word
//! ```
//!
//! Transfers of whole blocks pass *shared*: one addition to each stripe they touch (mostly one), and one
//! subtraction when they end. A change of part of a block passes *exclusively*: it closes its stripe to
//! newcomers and waits until the transfers inside have left. That is rare, so the common path costs a few
//! nanoseconds and never waits.
//!
//! 1. Stripes are entered in ascending order, and a change of part of a block enters only one, so no two
//!    requests wait for each other.
//! 2. A passage belongs to the operation that the kernel performs, not to the future that waits for it: it
//!    ends when the operation does, even if the future was dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use event_listener::{Event, listener};

use super::handle::Handle;

/// The size of one stretch in bytes. At least a page, so that no two stripes ever share a page of the page
/// cache.
const STRETCH_SHIFT: u32 = 16;
const STRIPES: usize = 64;

/// Set while one request has the stripe for itself, or waits for the others to leave. The rest counts those
/// inside.
const EXCLUSIVE: u32 = 1 << 31;

/// The stripes of one file.
pub(crate) struct Gate {
    stripes: [Stripe; STRIPES],
}

/// On a cache line of its own, so that workers in different stripes do not slow each other down.
#[repr(align(64))]
#[derive(Default)]
struct Stripe {
    state: AtomicU32,
    changed: Event,
}

/// Leave to work on a run of the file, until dropped.
pub(crate) struct Passage {
    file: Arc<Handle>,
    inside: Inside,
}

enum Inside {
    /// Shared, in these stripes.
    Shared { first: usize, count: usize },
    /// Alone, in these stripes.
    Alone { first: usize, count: usize },
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self { stripes: [const { Stripe { state: AtomicU32::new(0), changed: Event::new() } }; STRIPES] }
    }

    fn stripe(&self, number: usize) -> &Stripe {
        &self.stripes[number]
    }
}

/// The stripes of `len` bytes from `at` on: the first, and how many from there on.
fn stripes_of(at: u64, len: u64) -> (usize, usize) {
    let stretch = at >> STRETCH_SHIFT;
    let more = ((at + len.max(1) - 1) >> STRETCH_SHIFT) - stretch;
    let first = usize::try_from(stretch % STRIPES as u64).expect("below 64");
    match usize::try_from(more) {
        Ok(more) if more < STRIPES - first => (first, more + 1),
        // Going round past the last stripe would break the order they are entered in; such a run takes all.
        _ => (0, STRIPES),
    }
}

impl Passage {
    /// Passes with others that move whole blocks. `None` where the file has no gate.
    pub(crate) async fn shared(file: &Arc<Handle>, at: u64, len: u64) -> Option<Self> {
        let gate = file.gate()?;
        let (first, count) = stripes_of(at, len);
        let mut passage = Self { file: file.clone(), inside: Inside::Shared { first, count: 0 } };
        for number in first..first + count {
            gate.stripe(number).enter().await;
            passage.inside = Inside::Shared { first, count: number - first + 1 };
        }
        Some(passage)
    }

    /// Passes alone, to change part of the block at `at`.
    pub(crate) async fn alone(file: &Arc<Handle>, at: u64) -> Option<Self> {
        Self::alone_in(file, stripes_of(at, 1)).await
    }

    /// Passes alone through all of the file.
    pub(crate) async fn alone_everywhere(file: &Arc<Handle>) -> Option<Self> {
        Self::alone_in(file, (0, STRIPES)).await
    }

    async fn alone_in(file: &Arc<Handle>, (first, count): (usize, usize)) -> Option<Self> {
        let gate = file.gate()?;
        let mut passage = Self { file: file.clone(), inside: Inside::Alone { first, count: 0 } };
        for number in first..first + count {
            gate.stripe(number).close().await;
            // From here on the stripe is ours to open again, also when the future is dropped while it waits.
            passage.inside = Inside::Alone { first, count: number - first + 1 };
            gate.stripe(number).until_empty().await;
        }
        Some(passage)
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        let gate = self.file.gate().expect("a passage is through a gate");
        match self.inside {
            Inside::Shared { first, count } => {
                (first..first + count).for_each(|number| gate.stripe(number).leave());
            }
            Inside::Alone { first, count } => {
                (first..first + count).for_each(|number| gate.stripe(number).open());
            }
        }
    }
}

impl Stripe {
    async fn enter(&self) {
        while !self.try_enter() {
            listener!(self.changed => changed);
            if self.state.load(SeqCst) & EXCLUSIVE != 0 {
                changed.await;
            }
        }
    }

    fn try_enter(&self) -> bool {
        if self.state.fetch_add(1, SeqCst) & EXCLUSIVE == 0 {
            return true;
        }
        self.leave();
        false
    }

    fn leave(&self) {
        if self.state.fetch_sub(1, SeqCst) == EXCLUSIVE | 1 {
            self.changed.notify(usize::MAX);
        }
    }

    async fn close(&self) {
        while self.state.fetch_or(EXCLUSIVE, SeqCst) & EXCLUSIVE != 0 {
            listener!(self.changed => changed);
            if self.state.load(SeqCst) & EXCLUSIVE != 0 {
                changed.await;
            }
        }
    }

    async fn until_empty(&self) {
        while self.state.load(SeqCst) != EXCLUSIVE {
            listener!(self.changed => changed);
            if self.state.load(SeqCst) != EXCLUSIVE {
                changed.await;
            }
        }
    }

    fn open(&self) {
        self.state.fetch_and(!EXCLUSIVE, SeqCst);
        self.changed.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_lite::future::{block_on, poll_once};

    #[test]
    fn runs_take_the_stripes_they_touch_in_order() {
        assert_eq!(stripes_of(0, 4096), (0, 1));
        assert_eq!(stripes_of(65_535, 2), (0, 2));
        assert_eq!(stripes_of(63 << 16, 65_536), (63, 1));
        assert_eq!(stripes_of(63 << 16, 65_537), (0, 64));
        assert_eq!(stripes_of(0, 1 << 40), (0, 64));
        assert_eq!(stripes_of(70 << 16, 0), (6, 1));
    }

    #[test]
    fn a_change_of_part_of_a_block_waits_for_those_inside_and_keeps_others_out() {
        block_on(async {
            let file = Handle::for_test();
            let inside = Passage::shared(&file, 0, 4096).await;
            let mut change = Box::pin(Passage::alone(&file, 512));
            assert!(poll_once(&mut change).await.is_none(), "somebody is inside");
            let mut late = Box::pin(Passage::shared(&file, 0, 200_000));
            assert!(poll_once(&mut late).await.is_none(), "the stripe is closed");
            assert!(poll_once(Passage::shared(&file, 1 << 16, 4096)).await.is_some(), "elsewhere is free");
            drop(inside);
            let change = poll_once(&mut change).await.expect("all have left");
            assert!(poll_once(&mut late).await.is_none());
            drop(change);
            assert!(poll_once(&mut late).await.is_some());
        });
    }

    #[test]
    fn giving_up_while_waiting_opens_the_stripe_again() {
        block_on(async {
            let file = Handle::for_test();
            let inside = Passage::shared(&file, 0, 4096).await;
            let mut change = Box::pin(Passage::alone_everywhere(&file));
            assert!(poll_once(&mut change).await.is_none());
            drop(change);
            assert!(poll_once(Passage::shared(&file, 0, 1 << 30)).await.is_some());
            drop(inside);
            assert!(poll_once(Passage::alone_everywhere(&file)).await.is_some());
        });
    }
}
