//! Clusters between two lives: freed, and not yet to be used again.
//!
//! ```text
//!   freed ── commit ──► waiting for requests to leave ──► punched ──► given back                   the ordered way
//!                                                             └── flush ──► given back, reads zero  with a journal
//! ```
//!
//! 1. Nothing gets here before a commit has made durable that no metadata names it.
//! 2. A cluster is given back when every request has left that may have looked it up before (`epochs.rs`).
//!    With a journal, no record may have bytes of it that a recovery would bring back, either.
//! 3. With a journal, a cluster counts as reading zero only when a flush covers the punch: what is then written there in
//!    part needs no checksum for the rest. In the ordered way that is so in any case, because the data is flushed before it
//!    is named.
//!
//! When space is short, and at the end, nothing waits for that flush; then the clusters count as holding old bytes.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_core::{Error, ErrorKind, ImageCluster, ImageSpan, Result, Zeroes};

use super::image::{Qcow2, lock};
use crate::sabotage::{self, Bug};

/// What was freed durably.
#[derive(Default)]
pub(crate) struct Quarantine {
    /// Waiting for requests to leave: the epoch in which they were sealed, and what.
    waiting: Mutex<VecDeque<(u64, Vec<ImageSpan>)>>,
    /// Punched: the change that this was, and what.
    punched: Mutex<VecDeque<(u64, ImageSpan)>>,
    /// Held by who gives back clusters.
    giving: async_lock::Mutex<()>,
    /// Runs that have been given back.
    given: AtomicU64,
}

impl Quarantine {
    pub(crate) fn add(&self, epoch: u64, freed: Vec<ImageSpan>) {
        lock(&self.waiting).push_back((epoch, freed));
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.waiting).is_empty() && lock(&self.punched).is_empty()
    }

    /// How many runs have been given back; a number that grows.
    pub(crate) fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }
}

/// How soon clusters are wanted back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// When it costs no flush.
    Later,
    Now,
}

impl Qcow2 {
    /// Repeats what failed for want of space as long as there is some after all: what was freed may wait for a commit,
    /// or for those who may still be reading it. `act` must not be inside an epoch when it returns.
    pub(crate) async fn with_space<T>(&self, mut act: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        loop {
            let given = self.commits.quarantine.given();
            match act().await {
                Err(error) if error.kind() == ErrorKind::NoSpace && self.make_space(given).await? => {}
                result => return result,
            }
        }
    }

    /// Gives back everything that was freed. Tells whether anything was, by anybody, since `given` was asked.
    pub(crate) async fn make_space(&self, given: u64) -> Result<bool> {
        self.commit().await?;
        loop {
            self.give_back_freed(Pace::Now).await?;
            if self.commits.quarantine.given() != given {
                return Ok(true);
            }
            let stamp = lock(&self.commits.quarantine.waiting).front().map(|(stamp, _)| *stamp);
            match stamp {
                None => return Ok(false),
                Some(stamp) => self.epochs.until_passed(stamp).await,
            }
        }
    }

    /// Gives back the clusters that were freed durably and that nobody can be using any more. Must not be called from
    /// inside an epoch if it is to get anywhere. Tells whether any was given back.
    pub(crate) async fn give_back_freed(&self, pace: Pace) -> Result<bool> {
        // One at a time: else some run might be on its way while another task finds nothing left, and says so.
        let giving = self.commits.quarantine.giving.lock().await;
        self.give_back_all(giving, pace).await
    }

    /// The same, unless somebody is doing it.
    pub(crate) async fn give_back_unless_busy(&self) -> Result<()> {
        match self.commits.quarantine.giving.try_lock() {
            Some(giving) => self.give_back_all(giving, Pace::Later).await.map(drop),
            None => Ok(()),
        }
    }

    async fn give_back_all(&self, _giving: async_lock::MutexGuard<'_, ()>, pace: Pace) -> Result<bool> {
        let mut any = self.give_back_punched(pace).await?;
        loop {
            let batch = {
                let mut waiting = lock(&self.commits.quarantine.waiting);
                match waiting.front() {
                    Some((stamp, _)) if self.epochs.has_passed(*stamp) => waiting.pop_front(),
                    _ => None,
                }
            };
            let Some((stamp, mut spans)) = batch else { return Ok(any) };
            while let Some(span) = spans.pop() {
                if !self.is_out_of_records(span, pace).await? {
                    spans.push(span);
                    lock(&self.commits.quarantine.waiting).push_front((stamp, spans));
                    return Ok(any);
                }
                match self.give_back_span(span, pace).await {
                    Ok(is_given) => any |= is_given,
                    Err((rest, error)) => {
                        spans.push(rest); // it will be tried again
                        lock(&self.commits.quarantine.waiting).push_front((stamp, spans));
                        return Err(self.stopping_if_corrupt(error));
                    }
                }
            }
        }
    }

    /// Whether no record has guest data of these clusters that a recovery would bring back. Asks for it to be made so.
    async fn is_out_of_records(&self, span: ImageSpan, pace: Pace) -> Result<bool> {
        let Some(journal) = self.journal() else { return Ok(true) };
        let wide = self.cluster.widen(span);
        while journal.full.has(wide) && !sabotage::is(Bug::GivenBackInRecords) {
            journal.want_relief();
            if pace == Pace::Later {
                return Ok(false);
            }
            self.commit().await?;
        }
        Ok(true)
    }

    fn stopping_if_corrupt(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::Corrupt {
            self.state.stop(error.clone());
        }
        error
    }

    /// Gives back what was punched and may be used again.
    async fn give_back_punched(&self, pace: Pace) -> Result<bool> {
        let mut any = false;
        loop {
            let (_, covered) = self.commits.changes();
            let next = {
                let mut punched = lock(&self.commits.quarantine.punched);
                match punched.front() {
                    Some((change, _)) if pace == Pace::Now || *change <= covered => punched.pop_front(),
                    _ => None,
                }
            };
            let Some((change, span)) = next else { return Ok(any) };
            if let Err((rest, error)) = self.release_span(span, change <= covered).await {
                lock(&self.commits.quarantine.punched).push_front((change, rest));
                return Err(self.stopping_if_corrupt(error));
            }
            any = true;
        }
    }

    /// Punches the clusters that hold a byte of the run, if nobody else has one of them, and gives them back, unless a
    /// flush is to come first. Tells whether it gave them back; on failure, what is left to do.
    async fn give_back_span(&self, span: ImageSpan, pace: Pace) -> Result<bool, (ImageSpan, Error)> {
        let wide = self.cluster.widen(span);
        let mut sole = true;
        for cluster in self.cluster.clusters_in(wide) {
            let count = self.with_refcounts(|refcounts| refcounts.get(cluster.index())).await;
            sole &= count.map_err(|error| (wide, error))? == 1;
        }
        // Punched before the refcount is lowered: from then on somebody else may write there.
        let punched = sole
            && self.metadata.limits().fast_zeroes
            && self.metadata.write_zeroes(wide, Zeroes::MayUnmap).await.is_ok();
        self.commits.note_change();
        let has_journal = self.journal().is_some();
        let waits_for_flush = !sabotage::is(Bug::PunchNotCovered) && !sabotage::is(Bug::FreedBeforeDurable);
        if has_journal && punched && pace == Pace::Later && waits_for_flush {
            let (change, _) = self.commits.changes();
            lock(&self.commits.quarantine.punched).push_back((change, wide));
            return Ok(false);
        }
        self.release_span(wide, punched && (!has_journal || sabotage::is(Bug::PunchNotCovered)))
            .await
            .map(|()| true)
    }

    /// Lowers the refcount of each cluster of the run.
    async fn release_span(&self, wide: ImageSpan, reads_zero: bool) -> Result<(), (ImageSpan, Error)> {
        for cluster in self.cluster.clusters_in(wide) {
            let released = self.release(cluster, reads_zero).await;
            let rest = ImageSpan::between(self.cluster.start_of(cluster), wide.end());
            released.map_err(|error| (rest, error))?;
        }
        self.commits.quarantine.given.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Lowers the refcount of a cluster, which nobody owes any more then.
    pub(crate) async fn release(&self, cluster: ImageCluster, reads_zero: bool) -> Result<()> {
        self.with_refcounts(|refcounts| {
            refcounts.release(cluster.index(), reads_zero)?;
            if let Some(journal) = self.journal() {
                journal.settle(cluster);
            }
            Ok(())
        })
        .await
    }
}
