//! Signals that long work responds to: those that end it in good order, and the one that asks for its progress.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_lite::future::or;
use vellum_core::{Error, ErrorKind, Result};
use vellum_io::{Signal, Signals, Task, spawn_local};

/// The exit code of a command that was stopped.
const STOPPED_CODE: i32 = 130;

/// Whether SIGINT, SIGTERM or SIGHUP has arrived since this was made. A SIGHUP that is ignored, as under `nohup`, stays so.
pub struct Stop {
    /// For work that checks it between its pieces.
    pub flag: Arc<AtomicBool>,
    watch: Task<()>,
}

impl Stop {
    /// From now on these signals have no other effect. Must be called on a worker.
    ///
    /// # Errors
    /// When the signals cannot be watched.
    pub fn new() -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        let all = [Signal::Interrupt, Signal::Terminate, Signal::Hangup];
        let mut signals = Signals::new(if ignores_hangups() { &all[..2] } else { &all })?;
        let raised = flag.clone();
        let watch = spawn_local(async move {
            if signals.next().await.is_ok() {
                raised.store(true, Ordering::Relaxed);
                // What the first one ends in good order may take long: a second one ends it as a kill does. A terminal that is closed sends
                // SIGHUP twice.
                spawn_local(async move {
                    while let Ok(signal) = signals.next().await {
                        if signal != Signal::Hangup {
                            std::process::exit(STOPPED_CODE);
                        }
                    }
                })
                .detach();
            } else {
                pending::<()>().await;
            }
        });
        Ok(Self { flag, watch })
    }

    /// Whether one has arrived.
    pub fn is_requested(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }

    /// Does work that checks nothing. When one of the signals arrives, the work is dropped where it is.
    ///
    /// # Errors
    /// Those of the work; `Closed` when it was stopped.
    pub async fn or_stopped<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let stopped = || Error::new(ErrorKind::Closed, "stopped by a signal");
        if self.flag.load(Ordering::Relaxed) {
            return Err(stopped());
        }
        or(work, async {
            (&mut self.watch).await;
            Err(stopped())
        })
        .await
    }
}

fn ignores_hangups() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
    })
}

/// Responds to SIGUSR1, which asks how far the work is, until it is dropped.
pub struct ProgressRequests {
    _task: Task<()>,
}

impl ProgressRequests {
    /// Calls `answer` for each of these signals. Must be called on a worker.
    ///
    /// # Errors
    /// When the signal cannot be watched.
    pub fn new(answer: impl Fn() + 'static) -> Result<Self> {
        let mut signals = Signals::new(&[Signal::User1])?;
        let task = spawn_local(async move {
            while signals.next().await.is_ok() {
                answer();
            }
        });
        Ok(Self { _task: task })
    }
}
