//! The processor time of a thread: on a machine with other work, a rate per elapsed second says little.

use std::time::{Duration, Instant};

/// Measures the thread that started it.
pub(crate) struct Watch {
    begun: Instant,
    /// The thread's time at the start, where the system reports it.
    had: Option<Duration>,
}

impl Watch {
    pub(crate) fn started() -> Self {
        Self { begun: Instant::now(), had: had() }
    }

    /// The processor time since then; where the system does not report it, the elapsed time.
    pub(crate) fn elapsed(&self) -> Duration {
        match (self.had, had()) {
            (Some(before), Some(now)) => now.saturating_sub(before),
            _ => self.begun.elapsed(),
        }
    }
}

/// The first number of `schedstat`: nanoseconds on a processor.
fn had() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(Duration::from_nanos(text.split_whitespace().next()?.parse().ok()?))
}
