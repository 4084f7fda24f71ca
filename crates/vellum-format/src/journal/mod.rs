//! The journal inside an image: what a transaction gathers, where records go, and which pages are not
//! checkpointed yet.
//!
//! Nothing here knows a format. Each format has its own tables, and its own way to begin and to end.
//!
//! ```text
//!   publish, allocate, free        gate shared      page, check and what belongs to them: one step
//!          │
//!   seal                           gate alone       the whole transaction as it stands: one record
//!          │
//!   record ──► ring ──► flush      commit point     the sealed pages are kept until their checkpoint
//!          │ half of the ring is used
//!   checkpoint                     with the next record's flush; the record after that moves the tail
//! ```
//!
//! 1. Changes that belong together are made under the shared gate, so a record holds all of them or none.
//! 2. A sector with an unverified check is overwritten in one of three ways only: the open transaction takes
//!    up the new value (`checks.rs`), a commit has verified the check before, or the write goes through the
//!    journal (`full.rs`).
//! 3. Code that loads a page looks here first ([`Journal::uncheckpointed`]): the newest version of a page
//!    that is not checkpointed is only here.
//! 4. Only the leader of a commit writes records, moves the tail and checkpoints pages.
//!
//! The protocol is `docs/design/0003-qcow2-journal.md`. The order of writes around a record is in
//! `commit.rs`, the choice of a commit's leader in `engine/commit.rs`. After a crash, `find.rs` finds the
//! records that count, by the table in `cases.rs`, and `replay.rs` replays them.

mod cases;
mod checks;
pub(crate) mod commit;
pub(crate) mod find;
mod full;
pub(crate) mod ledger;
mod place;
pub(crate) mod record;
pub(crate) mod replay;
pub(crate) mod ring;
pub(crate) mod words;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use vellum_core::{ImageOffset, ImageSpan};

pub(crate) use checks::{Overwrite, SectorChecks, checks_of, unchanging};
pub(crate) use full::{Full, HomeWrite, Overlaid};
pub(crate) use words::Changed;

use crate::perturb;
use crate::state::lock;
use checks::{OpenTransaction, Unverified};
use ledger::Ledger;
use record::SECTOR;

/// The journal of an image that is open for writing.
pub(crate) struct Journal {
    /// Identifies this journal's records. Drawn at random unless given.
    key: Option<u128>,
    /// Records are written. Set before the first change of metadata, if at all.
    is_on: AtomicBool,
    gate: RwLock<()>,
    open: Mutex<OpenTransaction>,
    unverified: Unverified,
    /// All transactions up to this one are verified.
    verified: AtomicU64,
    /// Bytes that the words changed since the last seal take in a record.
    word_bytes: AtomicU64,
    /// A caller waits until something is verified: the next commit writes a record even if it is empty.
    record_wanted: AtomicBool,
    /// A caller waits for pages or sectors to be checkpointed.
    checkpoint_wanted: AtomicBool,
    /// Overwrites in flight, during which their sectors have two valid values.
    replacing: AtomicU64,
    /// Guest data that is newer in memory than in place.
    pub(crate) full: Arc<Full>,
    ledger: Mutex<Option<Ledger>>,
}

impl Journal {
    pub(crate) fn new(key: Option<u128>) -> Self {
        Self {
            key,
            is_on: AtomicBool::new(false),
            gate: RwLock::new(()),
            open: Mutex::default(),
            unverified: Unverified::default(),
            verified: AtomicU64::new(0),
            word_bytes: AtomicU64::new(0),
            record_wanted: AtomicBool::new(false),
            checkpoint_wanted: AtomicBool::new(false),
            replacing: AtomicU64::new(0),
            full: Arc::default(),
            ledger: Mutex::new(None),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    /// Held during changes that belong together. A task must not take it twice.
    #[track_caller]
    pub(crate) fn shared(&self) -> RwLockReadGuard<'_, ()> {
        perturb::point();
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while everything is sealed.
    #[track_caller]
    pub(crate) fn alone(&self) -> RwLockWriteGuard<'_, ()> {
        perturb::point();
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a new table, which begins as zeros.
    pub(crate) fn add_zeros(&self, span: ImageSpan) {
        lock(&self.open).zeros.push(span);
    }

    /// Whether the open transaction has become so large that the next writer should commit it.
    pub(crate) fn is_large(&self) -> bool {
        let longest = self.record_max();
        let open = lock(&self.open);
        open.check_bytes() > longest / 4 || open.full_bytes() >= longest / 2
    }

    /// Adds words that the open transaction has changed. They take this many bytes of a record.
    pub(crate) fn add_words(&self, bytes: u64) {
        if bytes > 0 {
            self.word_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Whether the open transaction, together with what its format adds, has become so large that the next
    /// writer should commit it. A record that is not large in this sense fits, with room for what other
    /// writers add until the commit. Checks are given up first: a fence takes their place.
    pub(crate) fn has_large_record(&self, more: u64) -> bool {
        let longest = self.record_max();
        let mut open = lock(&self.open);
        let bytes = open.check_bytes() + self.word_bytes.load(Ordering::Relaxed) + more;
        let mut is_large = bytes > longest / 8 * 3;
        if is_large && bytes - open.check_bytes() <= longest / 4 {
            self.fence_open(&mut open);
            is_large = false;
        }
        is_large || open.full_bytes() >= longest / 2
    }

    fn record_max(&self) -> u64 {
        lock(&self.ledger).as_ref().map_or(u64::MAX, |ledger| ledger.ring.record_max())
    }

    /// About this many bytes of fresh data may be written before the next commit is due.
    pub(crate) fn fresh_bytes_max(&self) -> u64 {
        let longest = lock(&self.ledger).as_ref().map_or(u64::MAX >> 8, |ledger| ledger.ring.record_max());
        longest / 2 / 4 * SECTOR
    }

    /// The last durable version of a page that is not checkpointed yet.
    pub(crate) fn uncheckpointed(&self, place: ImageOffset) -> Option<Arc<[u8]>> {
        lock(&self.ledger).as_ref()?.uncheckpointed.get(&place).map(|page| page.bytes.clone())
    }
}
