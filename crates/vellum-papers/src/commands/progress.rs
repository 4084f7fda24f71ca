//! What a long run says on stderr while it works: each part when it ends, and what it took on this machine.

use std::fs;
use std::time::{Duration, Instant};

use vellum_core::Result;
use vellum_lab::report::complain;

/// Says each part, or nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    begun: Option<Instant>,
}

impl Progress {
    /// One that begins now.
    pub(crate) fn new(is_said: bool) -> Self {
        Self { begun: is_said.then(Instant::now) }
    }

    /// Makes a part, on this thread, and says what it took.
    pub(crate) fn part<T>(
        self,
        say: impl FnOnce(&T) -> String,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(begun) = self.begun else { return make() };
        let (from, before) = (Instant::now(), on_processor());
        let made = make()?;
        let processor = (on_processor() - before).as_secs_f64();
        let (took, since) = (from.elapsed().as_secs_f64(), begun.elapsed().as_secs_f64());
        complain(&format!("{since:7.1} s: {took:6.1} s, {processor:6.1} s of a processor: {}", say(&made)));
        Ok(made)
    }
}

/// How long this thread has been on a processor; nothing, where the system does not say.
fn on_processor() -> Duration {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0))
}
