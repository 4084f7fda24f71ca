//! Signals reach the task that waits for them. One test, because signals are the whole process's.

mod common;

use std::time::Duration;

use common::in_both_modes;
use futures_lite::future::poll_once;
use vellum_io::{Signal, Signals, clock, spawn_local};

fn raise(signal: i32) {
    // To this thread: its handler has run when the call returns.
    // SAFETY: sends a signal that the process handles.
    assert_eq!(unsafe { libc::raise(signal) }, 0);
}

#[test]
fn signals_are_taken_one_by_one() {
    in_both_modes(|| async {
        let all = [Signal::Terminate, Signal::Interrupt, Signal::Hangup, Signal::User1];
        let mut signals = Signals::new(&all).expect("signals");
        assert!(poll_once(Box::pin(signals.next())).await.is_none());
        let waiting = spawn_local(async move {
            let first = signals.next().await.expect("a signal");
            (signals, first)
        });
        clock().sleep(Duration::from_millis(10)).await;
        raise(libc::SIGTERM);
        let (mut signals, first) = waiting.await;
        assert_eq!(first, Signal::Terminate);
        // Signals that arrive while no task waits are not lost; two of a kind are one.
        raise(libc::SIGHUP);
        raise(libc::SIGHUP);
        raise(libc::SIGINT);
        raise(libc::SIGUSR1);
        clock().sleep(Duration::from_millis(10)).await;
        let mut came = Vec::new();
        for _ in 0..3 {
            came.push(signals.next().await.expect("a signal"));
        }
        came.sort_by_key(|signal| format!("{signal:?}"));
        assert_eq!(came, [Signal::Hangup, Signal::Interrupt, Signal::User1]);
        assert!(poll_once(Box::pin(signals.next())).await.is_none(), "there were no more");
    });
}
