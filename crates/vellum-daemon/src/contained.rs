//! Panics in the server's own work: they are logged with a name, and end nothing else.
//!
//! A disk, a session and a request catch their own panics. This is for the work around them: admitting
//! clients, and opening, tending and closing disks. A panic that left a task would end its worker, all
//! workers with it, and the server with all of its disks.

use std::ops::ControlFlow;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_lite::FutureExt as _;
use vellum_core::{Error, ErrorKind, Result};
use vellum_io::clock;

/// Between two rounds of which the first panicked: one that does so each time is not to take a processor.
const PAUSE: Duration = Duration::from_millis(100);

/// Returns what the work returns, or an error if it panics. `what` names the work.
pub(crate) async fn contained<T>(what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|_| {
        tracing::error!("{what}: stopped by an internal error");
        Err(Error::new(ErrorKind::Poisoned, format!("{what}: stopped by an internal error")))
    })
}

/// Runs one round after the other, until one returns that it was the last. A round that panics is abandoned,
/// and the next one runs.
pub(crate) async fn in_rounds(what: &str, mut round: impl AsyncFnMut() -> ControlFlow<()>) {
    loop {
        match contained(what, async { Ok(round().await) }).await {
            Ok(ControlFlow::Break(())) => return,
            Ok(ControlFlow::Continue(())) => {}
            Err(_) => clock().sleep(PAUSE).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::{IoMode, spawn_local};

    use super::*;

    #[test]
    fn a_round_that_panics_is_given_up_and_the_next_has_its_turn() {
        let rounds = vellum_io::run(IoMode::Threads, async || {
            let mut rounds = 0;
            let others = spawn_local(async { 7 });
            in_rounds("a test", async || {
                rounds += 1;
                match rounds {
                    1 | 3 => panic!("as planned"),
                    4 => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                }
            })
            .await;
            assert_eq!(others.await, 7, "the worker goes on");
            rounds
        });
        assert_eq!(rounds.expect("a worker"), 4);
    }

    #[test]
    fn work_that_panics_is_an_error_that_says_which() {
        let ended = vellum_io::run(IoMode::Threads, async || {
            contained("opening x", async {
                if clock().now() > Duration::ZERO { panic!("as planned") } else { Ok(()) }
            })
            .await
        });
        let error = ended.expect("a worker").expect_err("it panicked");
        assert!(error.chain().starts_with("opening x: stopped by an internal error"), "{}", error.chain());
    }
}
