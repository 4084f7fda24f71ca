//! Ending sessions in good order: a handle that the server keeps, and the session's view of it.
//!
//! ```text
//!   serving ──drain()──► draining ──cut()──► cut            only ever forward
//!                            │                 │
//!      no new requests are read,               nothing more is sent either;
//!      those that run are answered             those that run are only waited for
//! ```
//!
//! The caller decides how long a drain may take: it calls [`cut`](Shutdown::cut) when that time is over. A
//! session must not simply be dropped, because its disk requests may be in the middle of their work (contract
//! 10 of the disk).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Waker};

use event_listener::{Event, EventListener};
use futures_lite::FutureExt as _;

/// How far a shutdown has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
#[repr(u8)]
pub(crate) enum Stage {
    #[default]
    Serving,
    Draining,
    Cut,
}

/// Tells sessions to end. Clones are one handle; it may be used from any thread.
#[derive(Debug, Clone, Default)]
pub struct Shutdown(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    stage: AtomicU8,
    changed: Event,
}

impl Shutdown {
    /// A handle in the stage `Serving`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sessions that negotiate end now; the others read no more requests, answer those they have started, and
    /// end.
    pub fn drain(&self) {
        self.advance(Stage::Draining);
    }

    /// Sessions also stop sending: they wait for the requests they have started, answer none, and end.
    pub fn cut(&self) {
        self.advance(Stage::Cut);
    }

    /// Whether `drain` or `cut` was called.
    pub fn is_requested(&self) -> bool {
        self.stage() > Stage::Serving
    }

    /// Completes when `drain` or `cut` is called: for the accept loop.
    pub async fn requested(&self) {
        while !self.is_requested() {
            let listener = self.0.changed.listen();
            if !self.is_requested() {
                listener.await;
            }
        }
    }

    /// Whether sessions are to end at once.
    pub fn is_cut(&self) -> bool {
        self.stage() == Stage::Cut
    }

    pub(crate) fn stage(&self) -> Stage {
        match self.0.stage.load(Ordering::Acquire) {
            0 => Stage::Serving,
            1 => Stage::Draining,
            _ => Stage::Cut,
        }
    }

    fn advance(&self, stage: Stage) {
        self.0.stage.fetch_max(stage as u8, Ordering::AcqRel);
        self.0.changed.notify(usize::MAX);
    }
}

/// One session's eye on a shutdown. A look costs one atomic load.
pub(crate) struct Watch<'a> {
    shutdown: &'a Shutdown,
    listener: Option<EventListener>,
    /// The task that the listener wakes.
    waker: Waker,
    /// The stage that had been seen when the listener was made: one listener reports one change.
    seen: Stage,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(shutdown: &'a Shutdown) -> Self {
        Self { shutdown, listener: None, waker: Waker::noop().clone(), seen: Stage::Serving }
    }

    /// The stage now. The task of `context` is woken when it changes.
    pub(crate) fn poll_stage(&mut self, context: &mut Context<'_>) -> Stage {
        loop {
            let stage = self.shutdown.stage();
            if stage == Stage::Cut {
                return stage;
            }
            if stage != self.seen {
                self.seen = stage;
                self.listener = None;
            }
            let is_known = self.listener.is_some() && self.waker.will_wake(context.waker());
            // A task that is woken at all while the server is serving sees another stage. Later on the
            // listener must be polled: one that was made between the change and its notification is notified
            // of a change it has seen, and is then used up.
            if is_known && stage == Stage::Serving {
                return stage;
            }
            let listener = self.listener.get_or_insert_with(|| self.shutdown.0.changed.listen());
            if listener.poll(context).is_ready() {
                self.listener = None;
            } else if is_known {
                return stage;
            }
            self.waker.clone_from(context.waker());
            // And look again: the change may have come before we listened.
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use futures_lite::future::{block_on, poll_once, zip};

    use super::*;

    #[test]
    fn stages_only_go_forward() {
        let shutdown = Shutdown::new();
        assert!(!shutdown.is_requested());
        shutdown.cut();
        shutdown.drain();
        assert_eq!(shutdown.stage(), Stage::Cut);
    }

    #[test]
    fn a_waiting_session_sees_each_stage() {
        let shutdown = Shutdown::new();
        block_on(async {
            let mut watch = Watch::new(&shutdown);
            let mut draining = poll_fn(|context| match watch.poll_stage(context) {
                Stage::Serving => Poll::Pending,
                stage => Poll::Ready(stage),
            });
            assert_eq!(poll_once(&mut draining).await, None);
            shutdown.drain();
            assert_eq!(draining.await, Stage::Draining);
            let cut = poll_fn(|context| match watch.poll_stage(context) {
                Stage::Cut => Poll::Ready(()),
                _ => Poll::Pending,
            });
            let later = async { shutdown.cut() };
            zip(cut, later).await;
        });
    }

    #[test]
    fn a_change_that_is_seen_before_it_is_announced_hides_no_later_one() {
        let shutdown = Shutdown::new();
        let mut watch = Watch::new(&shutdown);
        let mut look = async || poll_fn(|context| Poll::Ready(watch.poll_stage(context))).await;
        block_on(async {
            assert_eq!(look().await, Stage::Serving);
            shutdown.0.stage.store(Stage::Draining as u8, Ordering::Release);
            assert_eq!(look().await, Stage::Draining);
            shutdown.0.changed.notify(usize::MAX);
            assert_eq!(look().await, Stage::Draining);
        });
        let cut = poll_fn(|context| match watch.poll_stage(context) {
            Stage::Cut => Poll::Ready(()),
            _ => Poll::Pending,
        });
        block_on(zip(cut, async { shutdown.cut() }));
    }

    #[test]
    fn the_accept_loop_is_told_before_and_after() {
        let shutdown = Shutdown::new();
        block_on(zip(shutdown.requested(), async { shutdown.drain() }));
        block_on(shutdown.requested());
    }

    #[test]
    fn another_thread_may_ask() {
        let shutdown = Shutdown::new();
        let other = shutdown.clone();
        let thread = std::thread::spawn(move || other.drain());
        let mut watch = Watch::new(&shutdown);
        block_on(poll_fn(|context| match watch.poll_stage(context) {
            Stage::Serving => Poll::Pending,
            _ => Poll::Ready(()),
        }));
        thread.join().expect("the thread ends");
    }
}
