//! Whether a worker busy-polls for a while before it sleeps.
//!
//! ```text
//!   nothing to do ── look, without a system call, up to `most` ── sleep in the kernel ──► something came
//!                    └── only when the wait before was no longer than `most` ──┘
//! ```
//!
//! Sleeping and being woken costs a microsecond where the processor stays awake, and tens of them in a
//! virtual machine whose processor is halted meanwhile. Busy polling pays with processor time instead. So it
//! is off by default, and when it is on, the worker polls only where that would have helped the last time: an
//! idle server sleeps.
//!
//! QEMU calls it `poll-max-ns` of an I/O thread.

use std::time::Duration;

/// When to look, for one worker.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watch {
    most: Duration,
    last: Duration,
}

impl Watch {
    /// Polls for at most this long; zero means never.
    pub(super) fn new(most: Duration) -> Self {
        Self { most, last: Duration::MAX }
    }

    /// Whether waits are measured at all.
    pub(super) fn is_on(&self) -> bool {
        !self.most.is_zero()
    }

    /// How long to poll before a sleep of `patience`.
    pub(super) fn time(&self, patience: Option<Duration>) -> Option<Duration> {
        (self.last <= self.most && self.is_on())
            .then(|| patience.map_or(self.most, |most| most.min(self.most)))
    }

    /// Records how long it took, polling and asleep, until an event came.
    pub(super) fn note(&mut self, waited: Duration) {
        self.last = waited;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_looks_only_where_it_would_have_helped_before() {
        let micros = Duration::from_micros;
        let mut watch = Watch::new(micros(50));
        assert_eq!(watch.time(None), None, "nothing is known yet");
        for (waited, patience, looks) in [
            (20, None, Some(50)),
            (50, None, Some(50)),
            (51, None, None),
            (9, Some(10), Some(10)),
            (9, Some(1000), Some(50)),
            (100_000, Some(10), None),
        ] {
            watch.note(micros(waited));
            assert_eq!(watch.time(patience.map(micros)), looks.map(micros), "{waited} {patience:?}");
        }
        let mut off = Watch::new(Duration::ZERO);
        off.note(Duration::ZERO);
        assert_eq!((off.time(None), off.is_on()), (None, false));
    }
}
