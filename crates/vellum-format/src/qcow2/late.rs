//! Older writes that may still land in a place whose units were made zero.
//!
//! ```text
//!   a write in place     looks up ──────────────── its bytes are in flight ──────────────
//!   zeros                            unit is zero, and keeps its place
//!   a new write                                    may it fill the unit there?      not before ▲
//! ```
//!
//! A request looks up the place of a unit and transfers bytes there without holding anything. As long as the
//! mapping says that the unit is zero, it does not matter what lands there. But a write that fills the unit
//! again and publishes it would also show what landed in between: bytes that were overwritten long ago from
//! the guest's point of view, and that no checksum of a journal expects.
//!
//! 1. A unit that is not allocated is filled at its old place only when every request that may have looked it
//!    up while it was allocated has left. A cluster without any allocated unit gets a fresh place instead of
//!    waiting, because a request may hang, and in most cases the wait would be for another cluster. It waits
//!    only if other units of the cluster are allocated, or the host is full.
//! 2. The question is asked with the unit claimed: nothing can make it zero between the question and the
//!    write.
//! 3. There are at most [`NOTED_MAX`] notes. A request that would add more waits first.
//! 4. A request that has to wait leaves its own epoch and its claims first. So nothing waits for a request
//!    that waits here.
//! 5. Notes whose epoch has passed are removed by the next request that asks. So a disk on which units were
//!    once made zero during other writes does not stay slower.
//!
//! Fresh clusters need none of this: they are handed out only when all earlier requests have left
//! (`give_back.rs`). Neither do raw data files, where writes in place claim their units.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use vellum_core::ImageOffset;

use crate::epochs::Epochs;
use crate::hash::HashMap;
use crate::state::lock;

/// The outcome of a change that may have had to wait until all requests have left that entered in some epoch
/// or before.
pub(crate) type Done = crate::engine::Done<u64>;

/// The units that were made zero recently.
#[derive(Default)]
pub(crate) struct Late {
    noted: Mutex<Noted>,
    /// Whether there are any notes. Read without the lock.
    any: AtomicBool,
}

/// At most this many notes, not counting those of zeros in flight.
const NOTED_MAX: usize = 1 << 16;

/// An epoch that must pass, and the units that were made zero in it. At most three epochs are pending at a
/// time.
type Stamped = SmallVec<[(u64, u32); 2]>;

#[derive(Default)]
struct Noted {
    places: HashMap<ImageOffset, Stamped>,
    /// Each place and epoch in the order of the notes.
    order: VecDeque<(u64, ImageOffset)>,
}

impl Late {
    /// Records that units of the cluster at this place are about to be made zero, and that the cluster keeps
    /// the place.
    pub(crate) fn note(&self, place: ImageOffset, units: u32, epochs: &Epochs) {
        if units == 0 {
            return;
        }
        // A request that enters the next epoch may still look up what was there before.
        let stamp = epochs.now() + 1;
        let mut noted = lock(&self.noted);
        let stamps = noted.places.entry(place).or_default();
        match stamps.iter_mut().find(|(there, _)| *there == stamp) {
            Some((_, there)) => *there |= units,
            None => {
                stamps.push((stamp, units));
                noted.order.push_back((stamp, place));
            }
        }
        self.any.store(true, Ordering::Release);
    }

    /// Whether there may be any notes.
    pub(crate) fn has_any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// If there are too many notes, the epoch that must pass before more may be added.
    pub(crate) fn is_full(&self, epochs: &Epochs) -> Option<u64> {
        if !self.has_any() || lock(&self.noted).order.len() < NOTED_MAX {
            return None;
        }
        self.forget_passed(epochs);
        let noted = lock(&self.noted);
        noted.order.front().filter(|_| noted.order.len() >= NOTED_MAX).map(|(stamp, _)| *stamp)
    }

    /// The epoch that must pass before these units may be filled at this place. `None` when they may be
    /// filled now.
    pub(crate) fn must_wait(&self, place: ImageOffset, units: u32, epochs: &Epochs) -> Option<u64> {
        if !self.has_any() {
            return None;
        }
        let mut noted = lock(&self.noted);
        self.forget(&mut noted, epochs);
        let stamps = noted.places.get(&place)?.iter();
        let last = stamps.filter(|(_, there)| there & units != 0).map(|(stamp, _)| *stamp).max();
        drop(noted);
        last.filter(|stamp| !epochs.has_passed(*stamp))
    }

    /// Forgets places where nothing can land late any more.
    pub(crate) fn forget_passed(&self, epochs: &Epochs) {
        if !self.has_any() {
            return;
        }
        self.forget(&mut lock(&self.noted), epochs);
    }

    fn forget(&self, noted: &mut Noted, epochs: &Epochs) {
        while let Some((stamp, place)) =
            noted.order.front().copied().filter(|(stamp, _)| epochs.has_passed(*stamp))
        {
            noted.order.pop_front();
            let Some(stamps) = noted.places.get_mut(&place) else { continue };
            stamps.retain(|(there, _)| *there != stamp);
            if stamps.is_empty() {
                noted.places.remove(&place);
            }
        }
        self.any.store(!noted.order.is_empty(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_late_until_every_request_that_may_have_looked_it_up_has_left() {
        let (late, epochs) = (Late::default(), Epochs::default());
        let (place, other) = (ImageOffset::new(0x10000), ImageOffset::new(0x20000));
        let looking = epochs.enter();
        late.note(place, 0b0110, &epochs);
        late.note(place, 0, &epochs);
        assert_eq!(late.must_wait(other, 0b0110, &epochs), None);
        assert_eq!(late.must_wait(place, 0b1001, &epochs), None, "those were not made zero");
        let stamp = late.must_wait(place, 0b0011, &epochs).expect("somebody is still there");
        late.note(place, 0b1000, &epochs);
        late.forget_passed(&epochs);
        assert!(late.must_wait(place, 0b1000, &epochs) >= Some(stamp));
        drop(looking);
        while !epochs.has_passed(stamp + 1) {}
        assert_eq!(late.must_wait(place, 0b1110, &epochs), None);
        late.forget_passed(&epochs);
        let noted = lock(&late.noted);
        assert!(noted.places.is_empty() && noted.order.is_empty() && !late.any.load(Ordering::Relaxed));
    }

    #[test]
    fn a_write_forgets_what_has_passed() {
        let (late, epochs) = (Late::default(), Epochs::default());
        let looking = epochs.enter();
        for place in [0x10000, 0x20000] {
            late.note(ImageOffset::new(place), 1, &epochs);
        }
        let write = || late.must_wait(ImageOffset::new(0x30000), 1, &epochs);
        assert_eq!((write(), late.has_any()), (None, true), "somebody is still there");
        drop(looking);
        assert_eq!((write(), late.has_any()), (None, false));
        let noted = lock(&late.noted);
        assert!(noted.places.is_empty() && noted.order.is_empty());
    }

    #[test]
    fn notes_are_bounded() {
        let (late, epochs) = (Late::default(), Epochs::default());
        let looking = epochs.enter();
        for place in 0..NOTED_MAX as u64 {
            assert_eq!(late.is_full(&epochs), None);
            late.note(ImageOffset::new(place << 16), 1, &epochs);
        }
        let stamp = late.is_full(&epochs).expect("they are as many as may be");
        drop(looking);
        while !epochs.has_passed(stamp) {}
        assert_eq!(late.is_full(&epochs), None, "nothing lands late any more");
    }
}
