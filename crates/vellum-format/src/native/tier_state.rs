//! What is known in memory of a fast medium beside an open image. `tier.rs` says what it is for.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};

use vellum_core::{BlockSize, Error, GuestSpan, Result};

use crate::epochs::Epochs;
use crate::fast::{OpenRow, Reason};
use crate::hash::{HashMap, HashSet};
use crate::session::SessionNumber;
use crate::state::lock;

use super::heat::Heat;

/// A unit that the fast medium has.
pub(super) struct Copied {
    pub(super) slots: Arc<[u32]>,
    pub(super) reason: Reason,
    /// The image has nothing of it any more.
    pub(super) is_moved: bool,
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
    /// Units whose bit is set although the medium has nothing complete for them: a damaged entry, or a medium of another
    /// time. They are read from the image. The medium that has them may come back, so a write clears the bit as any other.
    pub(super) lost: HashSet<u64>,
    /// Units that only the fast medium has and of which it says nothing complete.
    pub(super) missing: BTreeSet<u64>,
}

#[derive(Default)]
pub(super) struct Tally {
    pub(super) fast: [AtomicU64; 2],
    pub(super) slow: [AtomicU64; 2],
    pub(super) failed: AtomicU64,
    /// Reads that failed of units that only the fast medium has.
    pub(super) lost: AtomicU64,
    /// By reason.
    pub(super) promoted: [AtomicU64; 4],
    pub(super) demoted: AtomicU64,
}

impl Tally {
    /// A read of what only the fast medium has.
    pub(super) fn note_lost<T>(&self, read: &Result<T>) {
        self.lost.fetch_add(u64::from(read.is_err()), SeqCst);
    }

    pub(super) fn note(numbers: &[AtomicU64; 2], bytes: u64) {
        numbers[0].fetch_add(1, SeqCst);
        numbers[1].fetch_add(bytes, SeqCst);
    }
}

/// What became of units whose copies were to end.
#[derive(Default)]
pub(super) struct Ended {
    /// So many are no copies any more.
    pub(super) units: u64,
    /// Those that only the fast medium has, and that could not be read there.
    pub(super) left: Vec<u64>,
    /// Why the first of them could not be.
    pub(super) why: Option<Error>,
}

/// What an opening has begun with its fast medium.
#[derive(Default)]
pub(super) struct Begun {
    /// A session.
    pub(super) session: bool,
    /// And one of its own before its first move.
    pub(super) moving: bool,
    /// The number of a session that the row has, and the image may have: a write of the superblock that failed may have
    /// arrived. So another is not drawn in its place.
    pub(super) drawn: Option<SessionNumber>,
}

/// The fast medium of an open image.
pub(super) struct Tier {
    pub(super) row: OpenRow,
    pub(super) epochs: Epochs,
    pub(super) state: Mutex<State>,
    /// How many units are in any list of the state. While there are none, requests do not look.
    pub(super) listed: AtomicUsize,
    pub(super) counts: AtomicBool,
    /// Held by the one promotion or move that is under way.
    pub(super) begun: async_lock::Mutex<Begun>,
    /// Whether this opening has begun a session: the row is its own, and no copy's of the image.
    pub(super) has_session: AtomicBool,
    /// Slots of the row that are not this image's. They are free when this opening has begun a session.
    pub(super) others: Mutex<Vec<u32>>,
    pub(super) tally: Tally,
    /// Counted once that is asked for.
    pub(super) heat: OnceLock<Heat>,
}

impl Tier {
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let mut state = lock(&self.state);
        let done = act(&mut state);
        let State { copied, marks, clearing, lost, missing, .. } = &*state;
        let listed = copied.len() + marks.len() + clearing.len() + lost.len() + missing.len();
        self.listed.store(listed, SeqCst);
        done
    }

    /// The units of a list that lie in a range: the shorter of the two is gone through.
    pub(super) fn within<'a>(
        range: &Range<u64>,
        mut units: impl ExactSizeIterator<Item = &'a u64>,
        has: impl Fn(&u64) -> bool,
    ) -> Vec<u64> {
        match range.end.saturating_sub(range.start) <= units.len() as u64 {
            true => range.clone().filter(|unit| has(unit)).collect(),
            false => units.by_ref().copied().filter(|unit| range.contains(unit)).collect(),
        }
    }

    /// A guest reads there.
    pub(super) fn note_read(&self, unit: BlockSize, span: GuestSpan) {
        let Some(heat) = self.heat.get() else { return };
        for piece in unit.pieces_of(span) {
            heat.read(unit.cluster_of(piece.start()).index(), piece.len());
        }
    }

    /// What the disk reads as changes there.
    pub(super) fn note_change(&self, units: Range<u64>) {
        let Some(heat) = self.heat.get() else { return };
        let mut copied = match self.listed.load(SeqCst) {
            0 => Vec::new(),
            _ => {
                let copied = &lock(&self.state).copied;
                Self::within(&units, copied.keys(), |unit| copied.contains_key(unit))
            }
        };
        copied.sort_unstable();
        // Far more than one request has: a discard of the disk, which its owner will not repeat soon.
        units.for_each(|unit| heat.written(unit, copied.binary_search(&unit).is_ok()));
    }

    /// Units that are hot and that the fast medium has not; few.
    pub(super) fn hot(&self, most: usize) -> Vec<u64> {
        let Some(heat) = self.heat.get() else { return Vec::new() };
        heat.take_hot(most, |unit| lock(&self.state).copied.contains_key(&unit))
    }

    /// Units that were promoted for their heat, and have lost it; the coldest.
    pub(super) fn cold(&self, most: usize) -> Vec<u64> {
        let Some(heat) = self.heat.get() else { return Vec::new() };
        let mut cold: Vec<(u16, u64)> = {
            let state = lock(&self.state);
            let warm =
                state.copied.iter().filter(|(_, copied)| copied.reason == Reason::Heat && !copied.is_moved);
            let cold = warm.map(|(unit, _)| *unit).filter(|unit| heat.is_cold(*unit));
            cold.map(|unit| (heat.heat(unit), unit)).collect()
        };
        cold.sort_unstable();
        cold.truncate(most);
        cold.into_iter().map(|(_, unit)| unit).collect()
    }

    pub(super) fn age_heat(&self) {
        if let Some(heat) = self.heat.get() {
            heat.age(|unit| lock(&self.state).copied.contains_key(&unit));
        }
    }

    /// Frees the slots that are known to be unused. While units of the disk are on the medium alone, and this opening has
    /// not begun a session, it may be that of a copy of the image, whose slots are the image's too.
    pub(super) fn free_slots(&self) {
        if self.row.is_needed() && !self.has_session.load(SeqCst) {
            return;
        }
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
