//! What is known in memory of a fast medium beside an open image. `tier.rs` says what it is for.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use crate::epochs::Epochs;
use crate::fast::{OpenRow, Reason};
use crate::hash::{HashMap, HashSet};
use crate::state::lock;

/// A unit that the fast medium has.
pub(super) struct Copied {
    pub(super) slots: Arc<[u32]>,
    pub(super) reason: Reason,
}

/// Slots that readers may still be looking at, or that a bit on the medium may still lead to.
pub(super) struct Leaving {
    pub(super) unit: u64,
    pub(super) slots: Arc<[u32]>,
    pub(super) stamp: u64,
    pub(super) is_durable: bool,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) copied: HashMap<u64, Copied>,
    /// Units that are being promoted, and were not written since.
    pub(super) marks: HashSet<u64>,
    /// Units whose clear may not be durable.
    pub(super) clearing: HashSet<u64>,
    pub(super) leaving: Vec<Leaving>,
}

#[derive(Default)]
pub(super) struct Tally {
    pub(super) fast: [AtomicU64; 2],
    pub(super) slow: [AtomicU64; 2],
    pub(super) failed: AtomicU64,
    pub(super) promoted: AtomicU64,
    pub(super) demoted: AtomicU64,
}

impl Tally {
    pub(super) fn note(numbers: &[AtomicU64; 2], bytes: u64) {
        numbers[0].fetch_add(1, SeqCst);
        numbers[1].fetch_add(bytes, SeqCst);
    }
}

/// The fast medium of an open image.
pub(super) struct Tier {
    pub(super) row: OpenRow,
    pub(super) epochs: Epochs,
    pub(super) state: Mutex<State>,
    /// How many units are in any list of the state. While there are none, requests do not look.
    pub(super) listed: AtomicUsize,
    pub(super) counts: AtomicBool,
    /// Whether this opening has begun a session. Held by the one promotion that is under way.
    pub(super) begun: async_lock::Mutex<bool>,
    pub(super) tally: Tally,
}

impl Tier {
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let mut state = lock(&self.state);
        let done = act(&mut state);
        let State { copied, marks, clearing, .. } = &*state;
        self.listed.store(copied.len() + marks.len() + clearing.len(), SeqCst);
        done
    }

    /// The units of a list that lie in a range, which may be much longer than the list.
    pub(super) fn within<'a>(range: &Range<u64>, units: impl Iterator<Item = &'a u64>) -> Vec<u64> {
        units.copied().filter(|unit| range.contains(unit)).collect()
    }

    /// Frees the slots that are known to be unused.
    pub(super) fn free_slots(&self) {
        let free: Vec<Leaving> = self.with(|state| {
            let (free, stay) = std::mem::take(&mut state.leaving)
                .into_iter()
                .partition(|leaving| leaving.is_durable && self.epochs.has_passed(leaving.stamp));
            state.leaving = stay;
            free
        });
        free.iter().for_each(|leaving| self.row.free(&leaving.slots));
    }
}
