//! The state of the ring, and the pages that are not checkpointed yet.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_core::{Error, ErrorKind, ImageOffset, ImageSpan, Result};

use super::full::HomeWrite;
use super::ring::Ring;
use super::{Journal, lock};

/// At most this many pages wait in memory for a checkpoint.
const UNCHECKPOINTED_MAX: usize = 4096;

/// The state of the ring, and the pages that are not checkpointed yet.
pub(crate) struct Ledger {
    pub(crate) generation: u64,
    pub(crate) key: u128,
    pub(crate) run: ImageSpan,
    pub(crate) ring: Ring,
    /// The tail that the next record states.
    pub(crate) tail: u64,
    /// The tail that the last flushed record stated.
    pub(crate) durable_tail: u64,
    /// Pages whose last durable version is not at its home location, by place.
    pub(super) uncheckpointed: BTreeMap<ImageOffset, Uncheckpointed>,
}

/// The last durable version of a page that is not checkpointed yet.
#[derive(Clone)]
pub(super) struct Uncheckpointed {
    pub(super) bytes: Arc<[u8]>,
    /// The first record that recovery needs for it.
    since: u64,
}

impl Ledger {
    fn needs_checkpoint(&self) -> bool {
        // The last checkpoint must take effect first: a flushed record has to state the new tail.
        self.tail == self.durable_tail
            && (self.ring.is_half_full() || self.uncheckpointed.len() > UNCHECKPOINTED_MAX)
    }

    /// Drops these versions, which are checkpointed: at their home location, and covered by a flush.
    pub(crate) fn drop_checkpointed(&mut self, written: &[HomeWrite]) {
        for (at, page) in written {
            if self.uncheckpointed.get(at).is_some_and(|newest| Arc::ptr_eq(&newest.bytes, page)) {
                self.uncheckpointed.remove(at);
            }
        }
    }

    pub(super) fn add_uncheckpointed(&mut self, sequence: u64, pages: impl Iterator<Item = HomeWrite>) {
        for (at, bytes) in pages {
            let since = self.uncheckpointed.get(&at).map_or(sequence, |older| older.since);
            self.uncheckpointed.insert(at, Uncheckpointed { bytes, since });
        }
    }

    /// The first record that recovery needs. `next` is the sequence of the next record.
    pub(super) fn needed(&self, next: u64) -> u64 {
        self.uncheckpointed.values().map(|page| page.since).min().unwrap_or(next)
    }
}

impl Journal {
    /// Begins the journal: from now on commits write records. The run exists, holds no record of this
    /// generation and key, and the image names it.
    pub(crate) fn begin(&self, generation: u64, key: u128, run: ImageSpan) {
        let ring = Ring::new(run.len());
        let ledger = Ledger {
            generation,
            key,
            run,
            ring,
            tail: 1,
            durable_tail: 1,
            uncheckpointed: BTreeMap::default(),
        };
        *lock(&self.ledger) = Some(ledger);
        self.is_on.store(true, Ordering::Release);
    }

    /// The key for a new journal's records.
    pub(crate) fn new_key(&self) -> Result<u128> {
        self.key.map_or_else(random_key, Ok)
    }

    pub(crate) fn with_ledger<T>(&self, act: impl FnOnce(&mut Ledger) -> T) -> T {
        act(lock(&self.ledger).as_mut().expect("a journal that is on has a ledger"))
    }

    /// Where the journal is, if it has begun.
    pub(crate) fn run(&self) -> Option<ImageSpan> {
        lock(&self.ledger).as_ref().map(|ledger| ledger.run)
    }

    /// All pages that are not checkpointed yet.
    pub(crate) fn all_uncheckpointed(&self) -> Vec<HomeWrite> {
        self.with_ledger(|ledger| {
            ledger.uncheckpointed.iter().map(|(at, page)| (*at, page.bytes.clone())).collect()
        })
    }

    /// The pages that the next commit should checkpoint.
    pub(super) fn pages_to_checkpoint(&self) -> Vec<HomeWrite> {
        let is_asked = self.checkpoint_wanted.swap(false, Ordering::AcqRel);
        if !is_asked && !self.with_ledger(|ledger| ledger.needs_checkpoint()) {
            return Vec::new();
        }
        let mut pages = self.all_uncheckpointed();
        pages.retain(|(at, page)| !self.is_unverified(at.span(page.len() as u64)));
        pages
    }
}

/// A number that a guest cannot know.
#[expect(clippy::disallowed_methods, reason = "a guest that knew the key could forge a checksum")]
pub(crate) fn random_key() -> Result<u128> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        Error::new(ErrorKind::Io, format!("the system provides no random numbers: {error}"))
    })?;
    Ok(u128::from_be_bytes(bytes))
}
