//! Long work: a bar on stderr when somebody watches, and Ctrl-C that ends it in good order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use vellum_core::Result;
use vellum_io::{Signal, Signals, spawn_local};

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

/// A flag that SIGINT or SIGTERM sets. Must be called on a worker.
pub(crate) fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut signals = Signals::new(&[Signal::Interrupt, Signal::Terminate])?;
    let flag = stop.clone();
    spawn_local(async move {
        if signals.next().await.is_ok() {
            flag.store(true, Ordering::Relaxed);
        }
    })
    .detach();
    Ok(stop)
}
