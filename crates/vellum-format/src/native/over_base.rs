//! What is in memory of the units over the base that hold their own entries (`pack_over_base.rs`).

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::hash::HashMap;
use crate::state::lock;

/// Of so many units it is remembered when they were recorded, before those are forgotten for which that is durable. Where
/// more are left then, of twice as many.
const RECORDED_MIN: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Only its packed block has its entry; and the sub-block of the base that the block is, if it is one.
    Packed(Option<u64>),
    /// The transaction in which its entry was recorded or let go.
    Recorded(u64),
}

/// Units of the disk, by number.
#[derive(Default)]
pub(super) struct OverBase {
    packed_count: AtomicUsize,
    units: Mutex<HashMap<u64, State>>,
    /// When more units than this are recorded, those are forgotten for which that is durable.
    recorded_max: AtomicUsize,
}

impl OverBase {
    /// Whether there is any such unit. A caller that looks at masks asks before.
    pub(super) fn any(&self) -> bool {
        self.packed_count.load(Ordering::Acquire) > 0
    }

    /// Whether only its packed block has the unit's entry.
    pub(super) fn has(&self, unit: u64) -> bool {
        self.any() && matches!(lock(&self.units).get(&unit), Some(State::Packed(_)))
    }

    /// Whether the unit's packed block is this sub-block.
    pub(super) fn is_packed(&self, unit: u64, sub: u64) -> bool {
        lock(&self.units).get(&unit) == Some(&State::Packed(Some(sub)))
    }

    pub(super) fn packed(&self, unit: u64) -> Option<Option<u64>> {
        match lock(&self.units).get(&unit) {
            Some(State::Packed(sub)) => Some(*sub),
            _ => None,
        }
    }

    /// The entry of the unit has changed already.
    pub(super) fn note(&self, unit: u64, sub: Option<u64>) {
        let mut units = lock(&self.units);
        let before = units.insert(unit, State::Packed(sub));
        debug_assert!(!matches!(before, Some(State::Packed(_))), "it had a unit");
        self.packed_count.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn end(&self, unit: u64, sequence: u64, is_durable: impl Fn(u64) -> bool) {
        let mut units = lock(&self.units);
        let before = units.insert(unit, State::Recorded(sequence));
        if matches!(before, Some(State::Packed(_))) {
            self.packed_count.fetch_sub(1, Ordering::AcqRel);
        }
        let recorded = |units: &HashMap<u64, State>| units.len() - self.packed_count.load(Ordering::Acquire);
        if recorded(&units) > self.recorded_max.load(Ordering::Relaxed).max(RECORDED_MIN) {
            units.retain(|_, state| !matches!(state, State::Recorded(sequence) if is_durable(*sequence)));
            self.recorded_max.store(2 * recorded(&units), Ordering::Relaxed);
        }
    }

    /// Whether the unit may get a packed block, as far as earlier ones are concerned.
    pub(super) fn may_begin(&self, unit: u64, is_durable: impl Fn(u64) -> bool) -> bool {
        match lock(&self.units).get(&unit) {
            Some(State::Recorded(sequence)) => is_durable(*sequence),
            Some(State::Packed(_)) => false,
            None => true,
        }
    }
}
