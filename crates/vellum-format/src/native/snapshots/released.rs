//! A check for tests: which units were seen not to be held.
//!
//! A writer that has seen that a unit is not held writes to it in place, and holds nothing but its epoch. If
//! the unit became held without a new stamp, a copy would not wait for that writer, and its bytes would land
//! where the disk does not look any more.

#[cfg(debug_assertions)]
use std::cell::RefCell;

#[cfg(debug_assertions)]
use crate::hash::HashMap;

/// For each unit of the disk: the stored unit that was seen not to be held since the last stamp. Locked with
/// the copies.
#[derive(Default)]
pub(super) struct Released {
    #[cfg(debug_assertions)]
    seen: RefCell<HashMap<u64, u32>>,
}

impl Released {
    /// Notes the result of a check on which the caller will act.
    #[cfg(debug_assertions)]
    pub(super) fn note(&self, number: u64, unit: u32, is_held: bool) {
        let mut seen = self.seen.borrow_mut();
        if !is_held {
            seen.insert(number, unit);
        } else {
            let was_released = seen.get(&number) == Some(&unit);
            assert!(
                !was_released,
                "unit {unit} of the image, {number} of the disk, is held again without a stamp"
            );
        }
    }

    #[cfg(not(debug_assertions))]
    pub(super) fn note(&self, _number: u64, _unit: u32, _is_held: bool) {}

    /// Called when there is a new stamp.
    pub(super) fn forget(&mut self) {
        #[cfg(debug_assertions)]
        self.seen.get_mut().clear();
    }
}
