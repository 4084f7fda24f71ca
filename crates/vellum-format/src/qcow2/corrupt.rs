//! An image that contradicts itself while it is written: an entry that points where no data can be, a table
//! inside another table, a refcount of zero for a cluster in use.
//!
//! Further writes would turn one wrong entry into many. So the first contradiction that a request meets is
//! the last: the image accepts no more changes, and its header says that it is corrupt (incompatible bit 1).
//! Then the next opening for writing, by this program or by QEMU, is refused until the image is repaired
//! (`vellum check -r all` clears the bit when nothing is wrong any more). Reads continue. Version 2 has no
//! such bit; there the image only stops.
//!
//! ```text
//!   deep inside, without waiting     contradicts(error)     recorded, once
//!   where the request ends           noticed(its result)    stopped ─ header ─ flush; the request fails
//! ```

use vellum_core::{Error, ErrorKind, Result};

use super::header::Header;
use super::image::Qcow2;
use super::layout::incompatible;
use crate::engine::Commit as _;

impl Qcow2 {
    /// Records that the metadata contradicts itself. Returns the error.
    pub(crate) fn contradicts(&self, error: Error) -> Error {
        if self.refcounts.is_some() {
            self.contradiction.find(&error);
        }
        error
    }

    /// Called when a request has ended, to act on a contradiction that it found. Returns the request's
    /// result. (It takes the result and not the request's future, because that would be copied into another
    /// future: kilobytes for each request.)
    pub(crate) async fn noticed<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err() && self.contradiction.is_found() {
            Box::pin(self.mark_corrupt()).await;
        }
        result
    }

    /// Marks the image as corrupt. The first caller does it.
    async fn mark_corrupt(&self) {
        let Some(error) = self.contradiction.take() else { return };
        // An image that has already stopped for this reason is marked too. After a failed flush nothing more
        // is written.
        let may_write =
            self.engine.state.check_stopped().map_or_else(|why| why.kind() != ErrorKind::Poisoned, |()| true);
        let why = "the image's metadata is inconsistent; it is marked corrupt and accepts no more changes: close \
         it, and run `vellum check -r all`";
        self.engine.state.stop(error.context(format!("{}: {why}", self.engine.name)));
        if !may_write || self.header.read(Header::version) < 3 {
            return;
        }
        let marked = self.change_header(|header| {
            header.set_features(header.incompatible | incompatible::CORRUPT, header.autoclear);
        });
        // If this fails, the image has stopped all the same.
        if marked.await.is_ok() {
            let _ = self.flush_storage().await;
        }
    }
}
