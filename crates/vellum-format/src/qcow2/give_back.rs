//! Gives back freed clusters (`quarantine.rs`): punches them and lowers their refcounts.
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

use vellum_core::{Error, ErrorKind, ImageCluster, ImageOffset, ImageSpan, Result, Zeroes};

use super::image::Qcow2;
use crate::engine::Commit as _;

/// One punch takes at most this many bytes, because other requests to the file wait for it in the kernel.
const PUNCHED_AT_ONCE: u64 = 256 << 20;
/// A request, or a call of `tend`, processes at most this many runs before others have their turn.
const RUNS_IN_A_GO: usize = 8;
/// This many refcounts at most are lowered under one hold of the lock.
const RELEASED_AT_ONCE: u64 = 1024;

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
            match self.quarantine.first_stamp() {
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
        let _giving = self.quarantine.giving().await;
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
        match self.quarantine.try_giving() {
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
        let quarantine = &self.quarantine;
        let mut any = self.give_back_punched(pace, left).await?;
        loop {
            let batch = quarantine.take_passed(|stamp| self.engine.epochs.has_passed(stamp));
            let Some((stamp, mut spans)) = batch else { return Ok(any) };
            while let Some(span) = spans.pop() {
                if *left == 0 || !self.is_out_of_records(span, pace).await? {
                    spans.push(span);
                    quarantine.put_back(stamp, spans);
                    return Ok(any);
                }
                *left -= 1;
                match self.give_back_span(span, pace).await {
                    Ok(is_given) => {
                        any |= is_given;
                        quarantine.note_left();
                    }
                    Err((rest, error)) => {
                        spans.push(rest); // it will be tried again
                        quarantine.put_back(stamp, spans);
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
        while journal.common.full.has(wide) {
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
            let next = quarantine.take_zeroed(|change| pace == Pace::Now || change <= covered);
            let Some((change, span)) = next else { return Ok(any) };
            *left -= 1;
            if let Err((rest, error)) = self.release_span(span, change <= covered).await {
                quarantine.put_back_zeroed(change, rest);
                return Err(self.stopping_if_corrupt(error));
            }
            quarantine.note_left();
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
        if has_journal && punched && pace == Pace::Later {
            self.quarantine.add_zeroed(self.engine.commits.changes(), run);
            return Ok(false);
        }
        let reads_zero = punched && !has_journal;
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
        self.quarantine.note_given();
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
