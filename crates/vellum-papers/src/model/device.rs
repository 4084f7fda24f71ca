//! Something that takes requests and no bytes: a drive, a line. It counts, and takes a model's time where it has one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vellum_core::{Clock, ImageSpan, IoCounts, IoTally};
use vellum_sim::model::{DriveModel, Medium};
use vellum_sim::{Operation, Request, World};

/// A device. The module says what it is.
#[derive(Default)]
pub(crate) struct Device {
    timing: Option<(Arc<dyn Clock>, Medium)>,
    in_flight: AtomicUsize,
    tally: IoTally,
}

impl Device {
    /// One that takes no time.
    pub(crate) fn instant() -> Arc<Self> {
        Arc::default()
    }

    /// One that takes the model's time in this world.
    pub(crate) fn of(world: &World, model: impl DriveModel + 'static) -> Arc<Self> {
        Self::with(world, Medium::new(model))
    }

    /// A medium that others may have too.
    pub(super) fn with(world: &World, medium: Medium) -> Arc<Self> {
        Arc::new(Self { timing: Some((world.clock(), medium)), ..Self::default() })
    }

    /// What it was asked for.
    pub(crate) fn counts(&self) -> IoCounts {
        self.tally.counts()
    }

    fn count(&self, operation: Operation, span: ImageSpan) {
        match operation {
            Operation::Read => self.tally.count_read(span.len()),
            Operation::Write => self.tally.count_write(span.len()),
            Operation::Flush => self.tally.count_flush(),
            Operation::WriteZeroes => self.tally.count_zeroes(span.len()),
            Operation::Discard => self.tally.count_discard(span.len()),
            Operation::SetLen | Operation::Preallocate => {}
        }
    }

    /// Counts a request and ends when the device has done it.
    pub(crate) async fn pass(&self, operation: Operation, span: ImageSpan) {
        self.count(operation, span);
        let Some((clock, medium)) = &self.timing else { return };
        let in_flight = self.in_flight.fetch_add(1, Ordering::Relaxed);
        let ticket = medium.submit(&Request { operation, span, now: clock.now(), in_flight });
        let mut now = clock.now();
        while let Some(next) = ticket.look(now) {
            clock.sleep(next - now).await;
            now = clock.now();
        }
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts a request for whose end nobody waits; the device does it all the same.
    pub(crate) fn begin(&self, operation: Operation, span: ImageSpan) {
        self.count(operation, span);
        if let Some((clock, medium)) = &self.timing {
            let in_flight = self.in_flight.load(Ordering::Relaxed);
            let _nobody_waits = medium.submit(&Request { operation, span, now: clock.now(), in_flight });
        }
    }
}
