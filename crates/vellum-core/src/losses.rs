//! Reports to each session that acknowledged writes may be missing, after a disk failed and was opened again.
//!
//! ```text
//!   session     write ─ answered ─┐                                     flush ─ fails, once ─ flush ─ done
//!   disk        ──────────────────┴─ a flush failed ═ opened again ───────┘
//!   count                     n                       n + 1
//! ```
//!
//! The failed flush may have belonged to another client, to a pause, or to the engine itself. Without a
//! report, a session would flush after the reopening, get a success, and so be promised writes that are gone
//! (contract 1). The mechanism is that of Linux's `errseq_t`:
//!
//! 1. The count grows whenever answered writes may have been lost. Each session remembers the count that it
//!    has seen ([`Witness`]).
//! 2. A request that promises durability (a flush, a change with FUA) fails once for each session after the
//!    count has grown; from then on the session has seen it. All such requests that were begun before then
//!    fail. A failed change with FUA does not count as a report to the flushes: a session has many users, and
//!    the one whose synchronous write failed is not the file system that flushes later. So a flush fails also
//!    after such a change has failed.
//! 3. The count is compared after the flush: a flush that waited while the disk was reopened also fails.
//! 4. A loss that was reported to no session yet is reported to the next one that begins: it may be a client
//!    that reconnected.
//! 5. A client over a network comes back as a new session, and a reply that was on its way to the previous
//!    session may be lost, including the one with the report. So within [`COMES_BACK`] of a loss every new
//!    connection gets a report, whether or not another has had one ([`Losses::witness_of_connection`]). The
//!    kernel, and a guest whose device stays, lose no reply, and do not come back as another session.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::{Clock, Error, ErrorKind, Result};

/// The last loss was reported to at least one session.
const HEARD: u64 = 1;
/// What one loss adds.
const ONE: u64 = 2;

/// How long after a loss a new connection may belong to a client that was connected before it. A client that
/// reconnects later gets a report only of a loss that was reported to no session.
pub const COMES_BACK: Duration = Duration::from_secs(600);

/// Counts the events in which answered writes of a disk may have been lost.
#[derive(Default)]
pub struct Losses {
    state: AtomicU64,
    /// The time of the last one, in nanoseconds.
    last: AtomicU64,
    /// Without a clock every loss is recent.
    clock: Option<Arc<dyn Clock>>,
}

impl fmt::Debug for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Losses({}, {})", self.count(), if self.is_unheard() { "unheard" } else { "heard" })
    }
}

impl Losses {
    /// No losses yet. The clock is for the age of one.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock: Some(clock), ..Self::default() }
    }

    fn load(&self) -> u64 {
        self.state.load(Ordering::SeqCst)
    }

    fn now(&self) -> Duration {
        self.clock.as_ref().map_or(Duration::ZERO, |clock| clock.now())
    }

    /// Answered writes may be missing. To be called before a request reaches the disk that misses them.
    pub fn grow(&self) {
        self.grow_at(self.now());
    }

    /// As above, for a loss at this time.
    pub fn grow_at(&self, when: Duration) {
        // Before the count: a session that sees the loss also sees its time.
        self.last.fetch_max(u64::try_from(when.as_nanos()).unwrap_or(u64::MAX), Ordering::SeqCst);
        let change = |state: u64| Some((state / ONE + 1) * ONE);
        let _before = self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change);
    }

    /// How often it has grown.
    pub fn count(&self) -> u64 {
        self.load() / ONE
    }

    /// Whether the last loss was reported to no session yet.
    pub fn is_unheard(&self) -> bool {
        is_unheard(self.load())
    }

    /// The time of the last loss, while a client may still come back after it.
    pub fn recent(&self) -> Option<Duration> {
        let is_recent = self.count() > 0 && self.since_last() < COMES_BACK;
        is_recent.then(|| self.last())
    }

    fn last(&self) -> Duration {
        Duration::from_nanos(self.last.load(Ordering::SeqCst))
    }

    fn since_last(&self) -> Duration {
        self.now().saturating_sub(self.last())
    }

    /// A session that begins.
    pub fn witness(self: &Arc<Self>) -> Arc<Witness> {
        self.witness_that_knows(heard_of(self.load()))
    }

    /// A new connection. Its client may have been connected before.
    pub fn witness_of_connection(self: &Arc<Self>) -> Arc<Witness> {
        let state = self.load();
        // If there was no loss, it has seen all.
        self.witness_that_knows(if self.since_last() < COMES_BACK { 0 } else { heard_of(state) })
    }

    fn witness_that_knows(self: &Arc<Self>, known: u64) -> Arc<Witness> {
        Arc::new(Witness {
            losses: self.clone(),
            by_flushes: AtomicU64::new(known),
            by_changes: AtomicU64::new(known),
        })
    }

    fn hear(&self, count: u64) {
        let change = |state: u64| (state / ONE == count).then_some(state | HEARD);
        let _before = self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change);
    }
}

fn is_unheard(state: u64) -> bool {
    state >= ONE && state & HEARD == 0
}

/// The count that has been reported. Both parts come from one load: between two loads another loss might
/// come, and the difference would be below zero.
fn heard_of(state: u64) -> u64 {
    state / ONE - u64::from(is_unheard(state))
}

/// What a session has seen of losses.
#[derive(Debug)]
pub struct Witness {
    losses: Arc<Losses>,
    /// The count that was last reported by a flush.
    by_flushes: AtomicU64,
    /// The count that was last reported by a flush or a change with FUA.
    by_changes: AtomicU64,
}

impl Witness {
    /// Whether there was a loss that the session has not seen.
    pub fn is_behind(&self) -> bool {
        self.losses.count() != self.by_flushes.load(Ordering::SeqCst)
    }

    /// Runs a request that makes everything answered durable. It fails if there was a loss that the session
    /// had not seen when the request began.
    ///
    /// # Errors
    /// The error of `request`; `Io` after a loss.
    pub async fn promise(&self, request: impl Future<Output = Result<()>>) -> Result<()> {
        let now = self.keep(&self.by_flushes, request).await?;
        let Some(now) = now else { return Ok(()) };
        self.by_flushes.fetch_max(now, Ordering::SeqCst);
        self.by_changes.fetch_max(now, Ordering::SeqCst);
        self.losses.hear(now);
        Err(lost())
    }

    /// As above, for a change that is itself durable: its failure is no report to the users that flush.
    ///
    /// # Errors
    /// The error of `change`; `Io` after a loss.
    pub async fn promise_change(&self, change: impl Future<Output = Result<()>>) -> Result<()> {
        let now = self.keep(&self.by_changes, change).await?;
        let Some(now) = now else { return Ok(()) };
        self.by_changes.fetch_max(now, Ordering::SeqCst);
        Err(lost())
    }

    /// Runs the request. Returns the count if it exceeds what the session had seen when the request began.
    async fn keep(
        &self,
        known: &AtomicU64,
        request: impl Future<Output = Result<()>>,
    ) -> Result<Option<u64>> {
        let known = known.load(Ordering::SeqCst);
        request.await?;
        let now = self.losses.count();
        Ok(Some(now).filter(|now| *now != known))
    }

    /// Fails like a flush after a loss, for a caller that may ignore the error: the loss stays unreported.
    ///
    /// # Errors
    /// `Io` after a loss.
    pub fn peek(&self) -> Result<()> {
        if self.is_behind() { Err(lost()) } else { Ok(()) }
    }
}

/// The error that reports a loss.
pub fn lost() -> Error {
    let context = "the disk was reopened after a failure: earlier writes that were acknowledged but not flushed may \
     be missing";
    Error::new(ErrorKind::Io, context)
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use futures_lite::future::{block_on, poll_once, yield_now};

    use super::*;
    use crate::LocalFuture;

    fn flush(witness: &Witness) -> Result<()> {
        block_on(witness.promise(ready(Ok(()))))
    }

    fn fail(witness: &Witness, kind: ErrorKind) {
        block_on(witness.promise(ready(Err(Error::new(kind, "no"))))).expect_err("it fails");
    }

    #[test]
    fn each_session_hears_of_each_loss_once() {
        let losses = Arc::<Losses>::default();
        let (first, second) = (losses.witness(), losses.witness());
        for _ in 0..3 {
            flush(&first).expect("nothing was lost");
            losses.grow();
            first.peek().expect_err("it does not count as heard");
            for witness in [&first, &second] {
                assert!(witness.is_behind());
                assert_eq!(flush(witness).expect_err("a loss").kind(), ErrorKind::Io);
                flush(witness).expect("it has heard of it");
                witness.peek().expect("it has");
            }
        }
        losses.grow();
        losses.grow();
        flush(&first).expect_err("two losses");
        flush(&first).expect("both losses were reported at once");
    }

    #[test]
    fn a_session_after_a_loss_hears_of_it_unless_another_has() {
        let losses = Arc::<Losses>::default();
        let before = losses.witness();
        assert!(!losses.is_unheard());
        losses.grow();
        let (one, other) = (losses.witness(), losses.witness());
        assert!(losses.is_unheard());
        flush(&one).expect_err("nobody had heard of it");
        flush(&losses.witness()).expect("somebody has");
        flush(&other).expect_err("it began before");
        flush(&before).expect_err("and so did this one");

        // An earlier failed flush does not report later losses, nor those of others.
        for kind in [ErrorKind::Io, ErrorKind::Poisoned, ErrorKind::NoSpace] {
            fail(&before, kind);
            losses.grow();
            assert!(losses.is_unheard(), "{kind:?}");
            flush(&losses.witness()).expect_err("it may be one that has come back");
            flush(&before).expect_err("what it was answered since the flush failed may be gone, too");
        }
    }

    /// A clock that is set by hand, in seconds.
    #[derive(Default)]
    struct Hand(AtomicU64);

    impl Clock for Hand {
        fn now(&self) -> Duration {
            Duration::from_secs(self.0.load(Ordering::SeqCst))
        }

        fn sleep(&self, _wait: Duration) -> LocalFuture<'static, ()> {
            Box::pin(std::future::pending())
        }
    }

    #[test]
    fn every_connection_hears_of_a_loss_for_a_while_even_if_others_have() {
        let hand = Arc::<Hand>::default();
        hand.0.store(5000, Ordering::SeqCst);
        let losses = Arc::new(Losses::new(hand.clone()));
        flush(&losses.witness_of_connection()).expect("nothing was lost");
        for loss in [10_000, 20_000] {
            hand.0.store(loss, Ordering::SeqCst);
            losses.grow();
            // The reply may not have arrived.
            flush(&losses.witness_of_connection()).expect_err("a loss");
            hand.0.fetch_add(COMES_BACK.as_secs() - 1, Ordering::SeqCst);
            let back = losses.witness_of_connection();
            flush(&losses.witness()).expect("somebody has heard of it, and it is nobody who comes back");
            hand.0.fetch_add(1, Ordering::SeqCst);
            flush(&losses.witness_of_connection()).expect("a new one");
            flush(&back).expect_err("it may have been there before, however late it flushes");
            flush(&back).expect("it was told");
        }
        losses.grow();
        hand.0.fetch_add(2 * COMES_BACK.as_secs(), Ordering::SeqCst);
        flush(&losses.witness_of_connection()).expect_err("it was reported to no session");
        flush(&losses.witness_of_connection()).expect("somebody has");
    }

    #[test]
    fn a_flush_fails_that_was_begun_before_the_loss_or_before_it_was_heard_of() {
        let losses = Arc::<Losses>::default();
        let witness = losses.witness();
        block_on(async {
            let mut flushes: Vec<_> = (0..3)
                .map(|_| {
                    let witness = witness.clone();
                    Box::pin(async move {
                        let twice = async {
                            yield_now().await;
                            Ok(())
                        };
                        witness.promise(twice).await
                    })
                })
                .collect();
            for flush in &mut flushes {
                assert!(poll_once(flush).await.is_none());
            }
            losses.grow();
            for flush in flushes {
                flush.await.expect_err("a loss");
            }
        });
        flush(&witness).expect("it has heard of it");
    }
}
