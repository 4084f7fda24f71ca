//! How many NBD clients a server admits: the sum over its exports, while exports come and go.
//!
//! An export that is being opened counts like one that is served, so that the number does not jump while a
//! server starts. When the number shrinks no client is disconnected: the next ones wait until others have
//! left.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vellum_export::nbd::{Bounds, Clients};
use vellum_io::clock;

use crate::served::Disks;
use crate::spec::ServeSpec;

/// Keeps the book of clients as large as it should be.
#[derive(Clone)]
pub(crate) struct Seats {
    clients: Clients,
    disks: Arc<Disks>,
    /// What the user said.
    most: Option<usize>,
    /// Exports of the beginning that are being opened.
    expected: Arc<AtomicUsize>,
}

impl Seats {
    /// Of a server that will have these disks.
    pub(crate) fn new(spec: &ServeSpec, disks: &Arc<Disks>) -> Self {
        let (most, exports) = (spec.connections_max, spec.exports.len());
        let bounds = Bounds { memory_bytes: spec.memory_bytes, ..bounds(most, exports) };
        let expected = Arc::new(AtomicUsize::new(exports));
        Self { clients: Clients::new(bounds, clock()), disks: disks.clone(), most, expected }
    }

    /// The book.
    pub(crate) fn clients(&self) -> &Clients {
        &self.clients
    }

    /// So many of the exports that were expected have been opened, or could not be.
    pub(crate) fn opened(&self, exports: usize) {
        self.expected.fetch_sub(exports, Ordering::AcqRel);
        self.count();
    }

    /// Exports were added or removed.
    pub(crate) fn count(&self) {
        let served: usize = self.disks.all().iter().map(|disk| disk.names().len()).sum();
        let bounds = bounds(self.most, served + self.expected.load(Ordering::Acquire));
        self.clients.set_seats(bounds.seats, bounds.seats_per_export);
    }
}

fn bounds(most: Option<usize>, exports: usize) -> Bounds {
    Bounds::new(most.unwrap_or_else(|| Bounds::seats_for(exports)), exports)
}
