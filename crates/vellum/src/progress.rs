//! Long work: a bar on stderr when somebody watches, and Ctrl-C that ends it in good order.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_lite::future::or;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use vellum_core::{Error, ErrorKind, Result};
use vellum_io::{Signal, Signals, Task, spawn_local};

/// A bar of bytes. Shown on a terminal, or nowhere.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar for `total` bytes of work; hidden unless wanted or watched.
    pub(crate) fn new(total: u64, quiet: bool) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let style = "{wide_bar} {binary_bytes:>10} of {binary_total_bytes} ({percent} %) {binary_bytes_per_sec} {eta}";
        bar.set_style(ProgressStyle::with_template(style).expect("a good template"));
        Self(bar)
    }

    pub(crate) fn set(&self, bytes: u64) {
        self.0.set_position(bytes);
    }

    pub(crate) fn end(&self) {
        self.0.finish_and_clear();
    }
}

/// Whether SIGINT or SIGTERM came, from when it was made on.
pub(crate) struct Stop {
    /// For work that looks at it between its pieces.
    pub(crate) flag: Arc<AtomicBool>,
    watch: Task<()>,
}

impl Stop {
    /// Must be called on a worker.
    pub(crate) fn new() -> Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        let mut signals = Signals::new(&[Signal::Interrupt, Signal::Terminate])?;
        let told = flag.clone();
        let watch = spawn_local(async move {
            if signals.next().await.is_ok() {
                told.store(true, Ordering::Relaxed);
            } else {
                pending::<()>().await;
            }
        });
        Ok(Self { flag, watch })
    }

    /// Does work that looks at nothing; it is dropped where it is, with `Closed`, when one of the signals comes.
    pub(crate) async fn or_stopped<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let stopped = || Error::new(ErrorKind::Closed, "it was stopped");
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
