//! The state of the ring, and the pages that are not home.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_core::{Error, ErrorKind, ImageOffset, ImageSpan, Result};

use super::full::Home;
use super::record::{SECTOR, SECTOR_LEN};
use super::ring::Ring;
use super::{Journal, lock};
use crate::sabotage::{self, Bug};

/// At most this many pages wait in memory to be taken home.
const KEPT_MAX: usize = 4096;

/// The state of the ring, and the pages that are not home.
pub(crate) struct Ledger {
    pub(crate) generation: u64,
    pub(crate) key: u128,
    pub(crate) run: ImageSpan,
    pub(crate) ring: Ring,
    /// The tail that the next record states.
    pub(crate) tail: u64,
    /// The tail that the last flushed record stated.
    pub(crate) told: u64,
    /// Pages whose last durable version is not home, by place.
    pub(super) kept: BTreeMap<ImageOffset, Kept>,
}

/// The last durable version of a page that is not home.
#[derive(Clone)]
pub(super) struct Kept {
    pub(super) bytes: Arc<[u8]>,
    /// The first record that recovery needs for it.
    since: u64,
}

impl Ledger {
    fn wants_relief(&self) -> bool {
        // The last relief must take effect first: a flushed record has to state the new tail.
        self.tail == self.told && (self.ring.is_half_full() || self.kept.len() > KEPT_MAX)
    }

    /// Drops these versions, which are home and covered by a flush.
    pub(crate) fn came_home(&mut self, home: &[Home]) {
        for (at, page) in home {
            if self.kept.get(at).is_some_and(|kept| Arc::ptr_eq(&kept.bytes, page)) {
                self.kept.remove(at);
            }
        }
    }

    pub(super) fn keep(&mut self, sequence: u64, pages: impl Iterator<Item = Home>) {
        for (at, bytes) in pages {
            let since = self.kept.get(&at).map_or(sequence, |kept| kept.since);
            self.kept.insert(at, Kept { bytes, since });
        }
    }

    /// The first record that recovery needs. `next` is the sequence of the next record.
    pub(super) fn needed(&self, next: u64) -> u64 {
        self.kept.values().map(|kept| kept.since).min().unwrap_or(next)
    }
}

impl Journal {
    /// Begins the journal: from now on commits write records. The run exists, holds no record of this
    /// generation and key, and the image names it.
    pub(crate) fn begin(&self, generation: u64, key: u128, run: ImageSpan) {
        let ring = Ring::new(run.len());
        let ledger = Ledger { generation, key, run, ring, tail: 1, told: 1, kept: BTreeMap::default() };
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

    /// All pages that are not home.
    pub(crate) fn all_kept(&self) -> Vec<Home> {
        self.with_ledger(|ledger| ledger.kept.iter().map(|(at, kept)| (*at, kept.bytes.clone())).collect())
    }

    /// The pages that should go home now.
    pub(super) fn relief(&self) -> Vec<Home> {
        let is_asked = self.relief_wanted.swap(false, Ordering::AcqRel);
        if !is_asked && !self.with_ledger(|ledger| ledger.wants_relief()) {
            return Vec::new();
        }
        let mut home = self.all_kept();
        let may_go = |(at, page): &Home| !self.is_unproven(at.span(page.len() as u64));
        home.retain(|home| may_go(home) || sabotage::is(Bug::HomeBeforeProven));
        home
    }

    /// A seeded mistake: guest data in records is forgotten, and not taken home either.
    pub(super) fn forget_full(&self, span: ImageSpan) {
        self.full.drop_all(span);
        self.with_ledger(|ledger| {
            ledger.kept.retain(|at, kept| kept.bytes.len() != SECTOR_LEN || !at.span(SECTOR).overlaps(span))
        });
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
