//! The guest's processor, in virtual time: one request after the other.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use vellum_core::{Clock, lock};
use vellum_lab::guest::Request;

/// A processor. A flush costs nothing by itself.
pub(crate) struct Processor {
    clock: Arc<dyn Clock>,
    write: Duration,
    read: Duration,
    /// When it has done all that it has.
    free: Mutex<Duration>,
}

impl Processor {
    /// One that takes so long for a write and for a read.
    pub(crate) fn new(clock: Arc<dyn Clock>, write: Duration, read: Duration) -> Arc<Self> {
        Arc::new(Self { clock, write, read, free: Mutex::default() })
    }

    /// Ends when the processor has done its part of a request.
    pub(crate) async fn work(&self, request: Request) {
        let takes = match request {
            Request::Read { .. } => self.read,
            Request::Flush => return,
            _ => self.write,
        };
        let now = self.clock.now();
        let ends = {
            let mut free = lock(&self.free);
            *free = (*free).max(now) + takes;
            *free
        };
        self.clock.sleep(ends - now).await;
    }
}
