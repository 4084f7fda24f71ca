//! Clusters between two uses: freed, but not to be reused yet.
//!
//! ```text
//!   freed ─ commit ─► waiting for requests to leave ─► punched ─► given back                 the ordered way
//!                                                         └─ flush ► given back, reads zero   with a journal
//! ```
//!
//! 1. Nothing gets here before a commit has made durable that no metadata names it.
//! 2. A cluster is given back when every request that may have looked it up before has left (`epochs.rs`).
//!    With a journal, there must also be no record with bytes of it that a recovery would bring back.
//! 3. With a journal, a cluster counts as reading zero only when a flush covers the punch. A later write to a
//!    part of the cluster then needs no checksum for the rest. In the ordered way this always holds, because
//!    the data is flushed before an entry names it.
//!
//! When space is short, and at the close, nothing waits for that flush. The clusters then count as holding
//! old bytes.
//!
//! 4. No flush of the guest waits for any of this. The task that tends the disk does it. If no task does, or
//!    it cannot keep up, the next requests that change the disk do a little of it before they begin.
//! 5. Adjacent clusters that were freed together are one run: one punch, however many they are.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use vellum_core::{BlockSize, Error, ErrorKind, ImageCluster, ImageOffset, ImageSpan, Result, Zeroes};

use super::image::Qcow2;
use crate::engine::Commit as _;
use crate::sabotage::{self, Bug};
use crate::state::lock;

/// One punch takes at most this many bytes, because other requests to the file wait for it in the kernel.
const PUNCHED_AT_ONCE: u64 = 256 << 20;
/// A request, or a call of `tend`, processes at most this many runs before others have their turn.
const RUNS_IN_A_GO: usize = 8;
/// While the disk is tended, requests give back nothing until this many runs wait.
const WAITING_MAX: usize = 1024;
/// This many refcounts at most are lowered under one hold of the lock.
const RELEASED_AT_ONCE: u64 = 1024;

/// Clusters whose freeing is durable.
#[derive(Default)]
pub(crate) struct Quarantine {
    /// Runs that wait for requests to leave, with the epoch in which they were sealed.
    waiting: Mutex<VecDeque<(u64, Vec<ImageSpan>)>>,
    /// Runs that were punched, with the number of that change.
    punched: Mutex<VecDeque<(u64, ImageSpan)>>,
    /// Roughly how many runs are in the two lists. Read without their locks.
    waits: AtomicUsize,
    /// Held while clusters are given back.
    giving: async_lock::Mutex<()>,
    /// A background task tends the disk.
    is_tended: AtomicBool,
    /// Runs that have been given back.
    given: AtomicU64,
}

/// The runs in descending order, with adjacent runs of whole clusters merged. A cluster that was freed twice
/// is in the result twice, and so is one of which two parts were freed: each time lowers its refcount.
fn merged(mut freed: Vec<ImageSpan>, cluster: BlockSize) -> Vec<ImageSpan> {
    freed.sort_unstable_by_key(|span| std::cmp::Reverse(span.start()));
    let is_whole = |span: &ImageSpan| cluster.widen(*span) == *span;
    let mut runs: Vec<ImageSpan> = Vec::new();
    for span in freed {
        match runs.last_mut() {
            Some(later) if later.start() == span.end() && is_whole(later) && is_whole(&span) => {
                *later = ImageSpan::between(span.start(), later.end());
            }
            _ => runs.push(span),
        }
    }
    runs
}

impl Quarantine {
    pub(crate) fn add(&self, epoch: u64, freed: Vec<ImageSpan>, cluster: BlockSize) {
        let runs = merged(freed, cluster);
        self.waits.fetch_add(runs.len(), Ordering::AcqRel);
        lock(&self.waiting).push_back((epoch, runs));
    }

    /// From now on a background task gives clusters back.
    fn note_tended(&self) {
        if !self.is_tended.load(Ordering::Relaxed) {
            self.is_tended.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a background task tends the disk.
    pub(crate) fn is_tended(&self) -> bool {
        self.is_tended.load(Ordering::Relaxed)
    }

    /// Whether a request should give back something before it begins.
    fn is_due(&self) -> bool {
        let waits = self.waits.load(Ordering::Acquire);
        waits > if self.is_tended.load(Ordering::Relaxed) { WAITING_MAX } else { 0 }
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.waiting).is_empty() && lock(&self.punched).is_empty()
    }

    /// How many runs have been given back so far. Only grows.
    pub(crate) fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }
}

/// How soon clusters are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// When it costs no flush.
    Later,
    Now,
}

impl Qcow2 {
    /// Repeats an operation that failed for want of space, as long as space can be found: freed clusters may
    /// wait for a commit, or for requests that may still be reading them. `act` must not be inside an epoch
    /// when it returns.
    pub(crate) async fn with_space<T>(&self, mut act: impl AsyncFnMut() -> Result<T>) -> Result<T> {
        loop {
            let given = self.quarantine.given();
            match act().await {
                Err(error) if error.kind() == ErrorKind::NoSpace && self.make_space(given).await? => {}
                result => return result,
            }
        }
    }

    /// Whether clusters wait to be given back.
    pub(crate) fn has_quarantine(&self) -> bool {
        self.engine.commits.any_freed() || !self.quarantine.is_empty()
    }

    /// Gives back everything that was freed. Returns whether any task has given back anything since `given`
    /// was read.
    pub(crate) async fn make_space(&self, given: u64) -> Result<bool> {
        self.commit().await?;
        loop {
            self.give_back_freed(Pace::Now).await?;
            if self.quarantine.given() != given {
                return Ok(true);
            }
            let stamp = lock(&self.quarantine.waiting).front().map(|(stamp, _)| *stamp);
            match stamp {
                None => return Ok(false),
                Some(stamp) => self.engine.epochs.until_passed(stamp).await,
            }
        }
    }

    /// Gives back the clusters that were freed durably and that no request can still be using. Must be called
    /// from outside an epoch to make progress. Returns whether it gave back any.
    pub(crate) async fn give_back_freed(&self, pace: Pace) -> Result<bool> {
        // One task at a time. Otherwise a run might be in progress while another task finds nothing left, and
        // reports that.
        let _giving = self.quarantine.giving.lock().await;
        let mut left = usize::MAX;
        self.give_back_runs(pace, &mut left).await
    }

    /// Gives back a little in the background. Returns whether there is more to give back at once.
    pub(crate) async fn give_back_in_background(&self) -> bool {
        let quarantine = &self.quarantine;
        quarantine.note_tended();
        if quarantine.is_empty()
            || self.engine.state.check_open().is_err()
            || self.engine.state.check_stopped().is_err()
        {
            return false;
        }
        // A request that needs the space will find out what prevents it.
        self.give_back_unless_busy().await.unwrap_or(false)
    }

    /// Gives back a little, unless another task is doing so. Returns whether it stopped only because of its
    /// limit.
    pub(crate) async fn give_back_unless_busy(&self) -> Result<bool> {
        let mut left = RUNS_IN_A_GO;
        match self.quarantine.giving.try_lock() {
            Some(_giving) => self.give_back_runs(Pace::Later, &mut left).await.map(|_| left == 0),
            None => Ok(false),
        }
    }

    /// Called before a request that changes the disk begins, outside an epoch.
    pub(crate) async fn give_back_if_due(&self) -> Result<()> {
        if !self.quarantine.is_due() {
            return Ok(());
        }
        match Box::pin(self.give_back_unless_busy()).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => Err(error),
            _ => Ok(()), // clusters that cannot be given back now will be later
        }
    }

    /// Processes up to `left` runs. Returns whether it gave back any.
    async fn give_back_runs(&self, pace: Pace, left: &mut usize) -> Result<bool> {
        let waits = &self.quarantine.waits;
        let mut any = self.give_back_punched(pace, left).await?;
        loop {
            let batch = {
                let mut waiting = lock(&self.quarantine.waiting);
                match waiting.front() {
                    Some((stamp, _)) if self.engine.epochs.has_passed(*stamp) => waiting.pop_front(),
                    _ => None,
                }
            };
            let Some((stamp, mut spans)) = batch else { return Ok(any) };
            while let Some(span) = spans.pop() {
                if *left == 0 || !self.is_out_of_records(span, pace).await? {
                    spans.push(span);
                    lock(&self.quarantine.waiting).push_front((stamp, spans));
                    return Ok(any);
                }
                *left -= 1;
                match self.give_back_span(span, pace).await {
                    Ok(is_given) => {
                        any |= is_given;
                        waits.fetch_sub(1, Ordering::AcqRel);
                    }
                    Err((rest, error)) => {
                        spans.push(rest); // it will be tried again
                        lock(&self.quarantine.waiting).push_front((stamp, spans));
                        return Err(self.stopping_if_corrupt(error));
                    }
                }
            }
        }
    }

    /// Whether no record holds guest data of these clusters that a recovery would bring back. If one does,
    /// requests a checkpoint.
    async fn is_out_of_records(&self, span: ImageSpan, pace: Pace) -> Result<bool> {
        let Some(journal) = self.journal() else { return Ok(true) };
        let wide = self.cluster.widen(span);
        while journal.common.full.has(wide) && !sabotage::is(Bug::GivenBackInRecords) {
            journal.common.request_checkpoint();
            if pace == Pace::Later {
                return Ok(false);
            }
            self.commit().await?;
        }
        Ok(true)
    }

    fn stopping_if_corrupt(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::Corrupt {
            self.engine.state.stop(error.clone());
        }
        error
    }

    /// Gives back the punched runs that may be reused.
    async fn give_back_punched(&self, pace: Pace, left: &mut usize) -> Result<bool> {
        let quarantine = &self.quarantine;
        let mut any = false;
        while *left > 0 {
            let covered = self.engine.commits.covered();
            let next = {
                let mut punched = lock(&quarantine.punched);
                match punched.front() {
                    Some((change, _)) if pace == Pace::Now || *change <= covered => punched.pop_front(),
                    _ => None,
                }
            };
            let Some((change, span)) = next else { return Ok(any) };
            *left -= 1;
            if let Err((rest, error)) = self.release_span(span, change <= covered).await {
                lock(&quarantine.punched).push_front((change, rest));
                return Err(self.stopping_if_corrupt(error));
            }
            quarantine.waits.fetch_sub(1, Ordering::AcqRel);
            any = true;
        }
        Ok(any)
    }

    /// Punches the clusters that hold a byte of the run, if nothing else refers to them, and gives them back,
    /// unless a flush must come first. Returns whether it gave back any; on failure, the rest of the run.
    async fn give_back_span(&self, span: ImageSpan, pace: Pace) -> Result<bool, (ImageSpan, Error)> {
        let end = self.cluster.widen(span).end();
        let mut from = self.cluster.widen(span).start();
        let mut any = false;
        while from < end {
            let rest = ImageSpan::between(from, end);
            let (run, is_sole) = self.alike(rest).await.map_err(|error| (rest, error))?;
            any |= self
                .give_back_run(run, is_sole, pace)
                .await
                .map_err(|(left, error)| (ImageSpan::between(left, end), error))?;
            from = run.end();
        }
        Ok(any)
    }

    /// The clusters at the start of the run that are alike: all have a refcount of one, or all have another.
    /// Says which.
    async fn alike(&self, run: ImageSpan) -> Result<(ImageSpan, bool)> {
        let most = self.cluster.count_for(run.len().min(PUNCHED_AT_ONCE));
        let first = self.cluster.cluster_of(run.start()).index();
        let (count, is_sole) = self.with_refcounts(|refcounts| refcounts.alike(first, most)).await?;
        Ok((run.start().span(count << self.cluster.shift()), is_sole))
    }

    /// Gives back clusters that are alike. On failure returns the place from which the work is left to do.
    async fn give_back_run(
        &self,
        run: ImageSpan,
        is_sole: bool,
        pace: Pace,
    ) -> Result<bool, (ImageOffset, Error)> {
        // Punched before the refcount is lowered: from then on another write may land there.
        let punched = is_sole
            && self.metadata.limits().fast_zeroes
            && self.metadata.write_zeroes(run, Zeroes::MayUnmap).await.is_ok();
        self.engine.commits.note_change();
        let has_journal = self.journal().is_some();
        let waits_for_flush = !sabotage::is(Bug::PunchNotCovered) && !sabotage::is(Bug::FreedBeforeDurable);
        if has_journal && punched && pace == Pace::Later && waits_for_flush {
            let change = self.engine.commits.changes();
            let quarantine = &self.quarantine;
            quarantine.waits.fetch_add(1, Ordering::AcqRel);
            lock(&quarantine.punched).push_back((change, run));
            return Ok(false);
        }
        let reads_zero = punched && (!has_journal || sabotage::is(Bug::PunchNotCovered));
        let released = self.release_span(run, reads_zero).await;
        released.map(|()| true).map_err(|(rest, error)| (rest.start(), error))
    }

    /// Lowers the refcount of each cluster of the run.
    async fn release_span(&self, run: ImageSpan, reads_zero: bool) -> Result<(), (ImageSpan, Error)> {
        let mut next = self.cluster.cluster_of(run.start());
        let end = self.cluster.cluster_of(run.end()).index();
        while next.index() < end {
            let released = self.release_some(&mut next, end, reads_zero).await;
            released.map_err(|error| (ImageSpan::between(self.cluster.start_of(next), run.end()), error))?;
        }
        self.quarantine.given.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// As above, for some of the clusters from `next` on. Moves `next` behind them.
    async fn release_some(&self, next: &mut ImageCluster, end: u64, reads_zero: bool) -> Result<()> {
        let stop = end.min(next.index() + RELEASED_AT_ONCE);
        self.with_refcounts(|refcounts| {
            while next.index() < stop {
                refcounts.release(next.index(), reads_zero)?;
                if let Some(journal) = self.journal() {
                    journal.remove_pending(*next);
                }
                *next = ImageCluster::new(next.index() + 1);
            }
            Ok(())
        })
        .await
    }

    /// Lowers the refcount of a cluster, which is then no longer pending.
    pub(crate) async fn release(&self, cluster: ImageCluster, reads_zero: bool) -> Result<()> {
        let mut next = cluster;
        self.release_some(&mut next, cluster.index() + 1, reads_zero).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_clusters_in_a_row_are_one_run_and_parts_stay_as_they_are() {
        let cluster = BlockSize::from_shift(12);
        let span = |at: u64, len: u64| ImageOffset::new(at).span(len);
        let freed = vec![
            span(0x5000, 0x1000),
            span(0x1000, 0x1000),
            span(0x2000, 0x2000),
            span(0x5000, 0x1000), // twice: it was shared
            span(0x4000, 0x800),  // two parts of one cluster
            span(0x4800, 0x800),
            span(0x6000, 0x1000),
        ];
        let runs = [
            span(0x6000, 0x1000),
            span(0x5000, 0x1000),
            span(0x5000, 0x1000),
            span(0x4800, 0x800),
            span(0x4000, 0x800),
            span(0x1000, 0x3000),
        ];
        let got = merged(freed, cluster);
        let clusters = |runs: &[ImageSpan]| -> u64 {
            runs.iter().map(|run| cluster.count_for(cluster.widen(*run).len())).sum()
        };
        assert_eq!(clusters(&got), clusters(&runs), "each time lowers a refcount");
        assert_eq!(got.len(), 5, "{got:?}");
        assert!(got.contains(&span(0x1000, 0x3000)) && got.contains(&span(0x5000, 0x2000)));
        assert!(got.is_sorted_by_key(|run| std::cmp::Reverse(run.start())));
    }
}
