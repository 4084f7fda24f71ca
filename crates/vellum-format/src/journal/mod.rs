//! The journal inside an image: what a transaction gathers, where records go, and what is not yet home.
//!
//! Nothing here knows of a format. Each has its own tables, and its own way to begin and to end.
//!
//! ```text
//!   publish, allocate, free        gate shared      page, check, and what belongs to them: one step
//!          │
//!   seal                           gate alone       all of it as it stands: one record
//!          │
//!   record ──► ring ──► flush      commit point     the sealed pages are kept until they are home
//!          │ half of the ring is used
//!   pages kept ──► home            with the next record's flush; the record after that moves the tail
//! ```
//!
//! 1. What changes together is changed under the shared gate, so a record holds all of it or nothing.
//! 2. A sector with an unproven check is overwritten only when the open transaction can take the new value up
//!    (`checks.rs`), after a commit has proven it, or through the journal (`full.rs`).
//! 3. A page that is not home is found here by who loads it ([`Journal::kept`]).
//! 4. Only the leader of a commit writes records, moves the tail and takes pages home.
//!
//! The protocol is `docs/design/0003-qcow2-journal.md`; the order of writes is in `commit.rs`, what is read after a crash in
//! `replay.rs`.

mod checks;
pub(crate) mod commit;
mod full;
pub(crate) mod ledger;
mod place;
pub(crate) mod record;
pub(crate) mod replay;
pub(crate) mod ring;
pub(crate) mod words;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use vellum_core::{ImageOffset, ImageSpan};

pub(crate) use checks::{Overwrite, SectorChecks, checks_of, unchanging};
pub(crate) use full::{Full, Home, Overlaid};
pub(crate) use words::Changed;

use crate::epochs::Epochs;
use crate::hash::HashMap;
use crate::sabotage::{self, Bug};
use crate::state::lock;
use checks::{Gathered, Unproven};
use ledger::Ledger;
use record::{Item, SECTOR};

/// Places that were made zero and kept, the epoch in which nobody may write there late any more, and the order.
#[derive(Default)]
struct Zeroed {
    stamps: HashMap<ImageOffset, u64>,
    order: VecDeque<(u64, ImageOffset)>,
}

/// The journal of an image that is open for writing.
pub(crate) struct Journal {
    /// What its records are to be known by; drawn at random when nothing is said.
    key: Option<u128>,
    /// Records are written. Set before the first change, if ever.
    is_on: AtomicBool,
    gate: RwLock<()>,
    open: Mutex<Gathered>,
    unproven: Unproven,
    /// All transactions up to this one are proven.
    proven: AtomicU64,
    /// Somebody waits for a proof: the next commit writes a record even if it is empty.
    proof_wanted: AtomicBool,
    /// Somebody waits for pages or sectors to be home.
    relief_wanted: AtomicBool,
    /// Overwrites under way whose sectors have two values meanwhile.
    replacing: AtomicU64,
    /// Guest data that is newer in memory than at home.
    pub(crate) full: Arc<Full>,
    /// Older writes may still be on their way there.
    zeroed: Mutex<Zeroed>,
    ledger: Mutex<Option<Ledger>>,
}

impl Journal {
    pub(crate) fn new(key: Option<u128>) -> Self {
        Self {
            key,
            is_on: AtomicBool::new(false),
            gate: RwLock::new(()),
            open: Mutex::default(),
            unproven: Unproven::default(),
            proven: AtomicU64::new(0),
            proof_wanted: AtomicBool::new(false),
            relief_wanted: AtomicBool::new(false),
            replacing: AtomicU64::new(0),
            full: Arc::default(),
            zeroed: Mutex::default(),
            ledger: Mutex::new(None),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    /// Held while things are changed that belong together. Not to be taken twice by one task.
    pub(crate) fn shared(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while everything is sealed.
    pub(crate) fn alone(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new table begins as zeros.
    pub(crate) fn add_zeros(&self, span: ImageSpan) {
        lock(&self.open).zeros.push(span);
    }

    /// Whether the open transaction has become so large that the next writer should commit it.
    pub(crate) fn is_large(&self) -> bool {
        let longest = lock(&self.ledger).as_ref().map_or(u64::MAX, |ledger| ledger.ring.record_max());
        let open = lock(&self.open);
        open.check_bytes() > longest / 4 || open.full_bytes() >= longest / 2
    }

    /// So many bytes of fresh data may be written before the next commit is due, about.
    pub(crate) fn fresh_bytes_max(&self) -> u64 {
        let longest = lock(&self.ledger).as_ref().map_or(u64::MAX >> 8, |ledger| ledger.ring.record_max());
        longest / 2 / 4 * SECTOR
    }

    /// The last durable version of a page that is not home.
    pub(crate) fn kept(&self, place: ImageOffset) -> Option<Arc<[u8]>> {
        if sabotage::is(Bug::KeptNotAsked) {
            return None;
        }
        lock(&self.ledger).as_ref()?.kept.get(&place).map(|kept| kept.bytes.clone())
    }

    /// Units of the cluster at this place are about to be made zero, and the place is kept.
    pub(crate) fn note_zeroed(&self, place: ImageOffset, epochs: &Epochs) {
        // Who enters the next epoch may still look up what was there before.
        let stamp = epochs.now() + 1;
        let mut zeroed = lock(&self.zeroed);
        zeroed.stamps.insert(place, stamp);
        zeroed.order.push_back((stamp, place));
    }

    /// Whether a write that was looked up before its unit became zero may still be on its way to this cluster. Then
    /// nobody can say what checksum the sectors will have.
    pub(crate) fn may_be_written_late(&self, place: ImageOffset, epochs: &Epochs) -> bool {
        let stamp = lock(&self.zeroed).stamps.get(&place).copied();
        stamp.is_some_and(|stamp| !epochs.has_passed(stamp)) && !sabotage::is(Bug::LateWritesChecked)
    }

    /// Forgets about places that nobody can still be writing to late.
    pub(crate) fn forget_zeroed(&self, epochs: &Epochs) {
        let mut zeroed = lock(&self.zeroed);
        while let Some((stamp, place)) =
            zeroed.order.front().copied().filter(|(stamp, _)| epochs.has_passed(*stamp))
        {
            zeroed.order.pop_front();
            if zeroed.stamps.get(&place) == Some(&stamp) {
                zeroed.stamps.remove(&place);
            }
        }
    }

    /// Takes what was gathered; nothing when there is nothing to tell, `has_pages` included. The caller holds the gate
    /// alone.
    pub(crate) fn seal(&self, has_pages: bool) -> Option<Transaction> {
        let mut open = lock(&self.open);
        let proof_wanted = self.proof_wanted.swap(false, Ordering::AcqRel);
        if !has_pages && open.is_empty() && !proof_wanted {
            return None;
        }
        let (sequence, mut items, places) = open.take();
        let (full, home) = self.full.seal(sequence, &places);
        drop(open);
        items.extend(full);
        Some(Transaction { sequence, items, full: home })
    }
}

/// What a seal took.
pub(crate) struct Transaction {
    pub(crate) sequence: u64,
    pub(crate) items: Vec<Item>,
    /// Guest data as it is to be at home.
    pub(crate) full: Vec<Home>,
}
