//! The host's processors, in virtual time: each piece of work goes to the one that is free first.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use vellum_core::{Clock, lock};

/// As many as the paper's host has.
const PROCESSORS: usize = 2;

pub(super) struct Processors {
    clock: Arc<dyn Clock>,
    free: Mutex<[Duration; PROCESSORS]>,
}

impl Processors {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { clock, free: Mutex::default() })
    }

    /// Ends when a processor has worked this long for the caller.
    pub(super) async fn work(&self, takes: Duration) {
        let now = self.clock.now();
        let ends = {
            let mut free = lock(&self.free);
            let first = free.iter_mut().min().expect("there are some");
            *first = (*first).max(now) + takes;
            *first
        };
        self.clock.sleep(ends - now).await;
    }
}
