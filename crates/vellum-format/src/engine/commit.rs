//! The order of a commit: how everything that was published becomes durable.
//!
//! Metadata changes in memory first, where readers see it at once ("published"). A commit takes everything
//! that has changed since the last one:
//!
//! ```text
//!   a flush ──► group commit: leads, or waits for a leader that begins after its arrival
//!                  │ leads
//!   seal           copies tables, and what was freed, at one moment     (the gate is held alone)
//!                  │
//!                  ├ nothing changed   ► flush, if anything was written since the last one
//!                  ├ no journal        ► ordered stages, a flush after each             `write_in_order`
//!                  ├ fits a record     ► [fence: flush] ► record, [checkpoint] ► flush  journal/commit.rs
//!                  └ does not fit      ► the map decides how                          `commit_unfit`
//!                  │                                                                    commit point
//!   settle         records what the flush covers; what was freed may be given back
//! ```
//!
//! 1. One commit runs at a time, led by one caller. What was published before the call is durable when it
//!    returns.
//! 2. A commit covers the changes of the storage that had completed before the seal. It counts them only
//!    after a host flush that began later has succeeded. If there is nothing to write, the commit is that one
//!    flush. If nothing was written since the last flush, it does not even flush.
//! 3. What was freed before the seal is given back only after the commit that makes it durable.
//! 4. A failed host flush stops the image for good, and so does any failure with a journal: only a recovery
//!    can then find out what is on the medium. A failed write of the ordered stages fails the callers that
//!    waited, and the next commit tries it again.
//! 5. A leader whose future is dropped halfway stops the image.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vellum_core::{
    Buffer, Clock, Context, Error, ErrorKind, ImageOffset, LocalFuture, Result, SharedStorage, try_join_all,
};

use super::group_commit::GroupCommit;
use super::{Map, Sealed};
use crate::journal::Journal;
use crate::journal::commit::Transaction;
use crate::state::lock;

/// At most this many metadata writes are in flight at once.
const WRITES_AT_ONCE: usize = 32;

/// The group commit, what was freed, and what is durable.
pub(crate) struct Commits<F> {
    group: GroupCommit,
    /// Freed since the last seal.
    freed: Mutex<Vec<F>>,
    /// How many changes of the storage have completed.
    changes: AtomicU64,
    /// The value of `changes` that the last good host flush covers.
    covered: AtomicU64,
    /// How many records are durable.
    records: AtomicU64,
    /// The last transaction whose record is durable.
    durable: AtomicU64,
}

impl<F> Commits<F> {
    /// With a clock, a leader may wait for other flushes.
    pub(super) fn new(clock: Option<Arc<dyn Clock>>) -> Self {
        Self {
            group: GroupCommit::with_clock(clock),
            freed: Mutex::default(),
            changes: AtomicU64::new(0),
            covered: AtomicU64::new(0),
            records: AtomicU64::new(0),
            durable: AtomicU64::new(0),
        }
    }

    /// Counts a change of the storage by a request that is about to return. Returns the number of this
    /// change.
    pub(crate) fn note_change(&self) -> u64 {
        self.changes.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// How many changes there have been.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// How many of those changes a host flush covers.
    pub(crate) fn covered(&self) -> u64 {
        self.covered.load(Ordering::Acquire)
    }

    /// A flush that began when there were this many changes has succeeded.
    fn cover(&self, changes: u64) {
        self.covered.fetch_max(changes, Ordering::AcqRel);
    }

    /// How many records are durable.
    pub(crate) fn records(&self) -> u64 {
        self.records.load(Ordering::Acquire)
    }

    fn note_record(&self, sequence: u64) {
        self.records.fetch_add(1, Ordering::AcqRel);
        self.durable.fetch_max(sequence, Ordering::AcqRel);
    }

    /// Whether a transaction is durable.
    pub(crate) fn is_durable(&self, sequence: u64) -> bool {
        self.durable.load(Ordering::Acquire) >= sequence
    }

    /// Records what a change frees. The caller does this together with that change.
    pub(crate) fn note_freed(&self, freed: F) {
        lock(&self.freed).push(freed);
    }

    /// Whether something was freed since the last seal.
    pub(crate) fn any_freed(&self) -> bool {
        !lock(&self.freed).is_empty()
    }

    /// Takes what was freed since the last seal. For a seal.
    pub(crate) fn take_freed(&self) -> Vec<F> {
        std::mem::take(&mut *lock(&self.freed))
    }

    /// Puts back what a seal took when no commit has made it durable.
    pub(crate) fn put_back_freed(&self, freed: Vec<F>) {
        lock(&self.freed).extend(freed);
    }
}

/// How an image makes changes durable.
pub(crate) trait Commit: Map {
    /// Makes durable every change that was published before the call.
    async fn commit(&self) -> Result<()> {
        let engine = self.engine();
        let abandoned = || {
            let why = Error::new(ErrorKind::Poisoned, "a commit was interrupted: reopen the image");
            engine.state.stop(why.clone());
            Some(why)
        };
        // Boxed: every request that may commit would have room for a whole commit in its future.
        engine.commits.group.share(async || Box::pin(lead(self)).await, abandoned).await
    }

    /// Serves a flush of the guest.
    async fn make_durable(&self) -> Result<()> {
        self.engine().state.check_stopped()?;
        self.note_flush();
        self.commit().await?;
        self.note_flushed();
        Ok(())
    }

    /// Makes the writes to the image, and to its data file if it has one, durable. A failure stops the image.
    async fn flush_storage(&self) -> Result<()> {
        let flushed = self.flush_host().await;
        flushed.map_err(|error| stopped_by(self, error, "a host flush failed"))
    }
}

impl<M: Map> Commit for M {}

/// Stops the image for good. Returns the error that says so.
fn stopped_by(image: &impl Map, error: Error, what: &str) -> Error {
    let engine = image.engine();
    let why = error.context(format!("{}: {what}; reopen the image", engine.name));
    let why = why.with_kind(ErrorKind::Poisoned);
    engine.state.stop(why.clone());
    why
}

async fn lead(image: &impl Map) -> Result<()> {
    let engine = image.engine();
    engine.state.check_stopped()?;
    let covers = engine.commits.changes();
    if let Some(journal) = image.journal() {
        let result = lead_journaled(image, journal, covers).await;
        return result.map_err(|error| stopped_by(image, error, "the journal could not be written"));
    }
    // When a seal fails, no list holds what it has taken so far. The image stops, so that it never counts as
    // written.
    let sealed = image.seal_in_order().inspect_err(|error| engine.state.stop(error.clone()))?;
    let result = match &sealed {
        Some(sealed) if !sealed.is_empty() => image.write_in_order(sealed).await, // commit point
        _ if engine.commits.covered() == covers => Ok(()),
        _ => image.flush_storage().await, // commit point
    };
    settle(image, sealed, covers, result)
}

/// As above, with a journal. Any failure stops the image.
async fn lead_journaled(image: &impl Map, journal: &Journal, covers: u64) -> Result<()> {
    let commits = &image.engine().commits;
    let (mut sealed, mut transaction) = seal(image, journal)?;
    if transaction.is_none() && commits.covered() != covers && journal.has_chores() {
        // The flush is due in any case, so a record that goes with it costs nothing extra.
        journal.do_chores();
        (sealed, transaction) = seal(image, journal)?;
    }
    let result = match transaction {
        None if commits.covered() == covers => Ok(()),
        None => image.flush_storage().await, // commit point
        Some(Transaction { sequence, items, full: data, fence }) => {
            let record = journal.record_of(sequence, items);
            match sealed.fits_a_record() && journal.fits(&record) {
                true => {
                    let committed = journal.commit_record(image, record, sealed.pages(), data, fence);
                    committed.await.inspect(|()| commits.note_record(sequence)) // commit point
                }
                false => image.commit_unfit(journal, &sealed, record, &data).await, // commit point
            }
        }
    };
    settle(image, Some(sealed), covers, result)
}

/// Copies everything in the open transaction at one moment. Returns no transaction when it is empty. If the
/// seal took something freed before the page that stops naming it is listed, another writer could get it
/// while the medium still says that it is in use.
fn seal<M: Map>(image: &M, journal: &Journal) -> Result<(M::Sealed, Option<Transaction>)> {
    let _alone = image.alone(journal);
    let sealed = image.seal()?;
    let transaction = transaction_of(image, journal, &sealed);
    Ok((sealed, transaction))
}

/// The transaction that belongs to the sealed copies. The caller has just sealed them.
fn transaction_of<M: Map>(image: &M, journal: &Journal, sealed: &M::Sealed) -> Option<Transaction> {
    let mut transaction = journal.seal(!sealed.is_empty())?;
    image.items_of(sealed, &mut transaction.items);
    Some(transaction)
}

/// Records how the commit ended.
fn settle<M: Map>(image: &M, sealed: Option<M::Sealed>, covers: u64, result: Result<()>) -> Result<()> {
    if result.is_ok() {
        image.engine().commits.cover(covers);
    }
    if let Some(sealed) = sealed {
        image.settle(sealed, result.is_ok());
    }
    result
}

/// Writes parts of the image, adjacent ones in one write. `what` names them in the error message.
pub(crate) async fn write_all<'a>(
    name: &str,
    storage: &SharedStorage,
    parts: impl Iterator<Item = (ImageOffset, &'a [u8])>,
    what: &str,
) -> Result<()> {
    let mut parts = parts.peekable();
    while parts.peek().is_some() {
        let mut batch: Vec<LocalFuture<'_, Result<()>>> = Vec::new();
        while batch.len() < WRITES_AT_ONCE
            && let Some((at, bytes)) = parts.next()
        {
            // Adjacent parts go out as one write.
            let mut data = Buffer::copy_of(bytes);
            while let Some((_, next)) = parts.next_if(|(next, _)| *next == at + data.len() as u64) {
                data.append(Buffer::copy_of(next));
            }
            batch.push(storage.write(at, data));
        }
        try_join_all(batch).await.context(|| format!("{name}: can't write {what}"))?;
    }
    Ok(())
}
