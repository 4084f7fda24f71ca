//! The order of a clean close.
//!
//! ```text
//!   rest     background work ends; what was published is committed, and freed space is given back
//!   verify   with a journal: a last record, so that nothing on the medium is unverified ► checkpoint ── flush
//!   clear    the header or superblock records the clean close ── flush                     commit point
//!   trim     space that the image no longer needs goes back to the host
//! ```
//!
//! 1. The mark is cleared only after everything it stands for is durable. A crash before that is recovered
//!    like any other.
//! 2. A close that failed is neither tried again nor taken for done. The image stays marked, and the next
//!    opening repairs it.
//! 3. The trim needs no flush: the image is consistent with or without it.

use vellum_core::Result;

use super::{Commit, Map};

/// How an image is closed.
pub(crate) trait Close: Commit {
    /// Checkpoints everything, gives back everything that was freed, and clears the mark.
    async fn close_image(&self) -> Result<()> {
        let engine = self.engine();
        if engine.geometry.read_only {
            engine.state.close();
            return Ok(());
        }
        engine.state.check_stopped()?;
        if !engine.state.close() {
            return Ok(());
        }
        close_once(self).await.inspect_err(|error| engine.state.stop(error.clone()))
    }
}

impl<M: Map> Close for M {}

async fn close_once(image: &impl Commit) -> Result<()> {
    let _nothing_begins = image.come_to_rest().await?;
    if let Some(journal) = image.journal() {
        if journal.has_unverified() {
            journal.request_record();
            image.commit().await?;
        }
        journal.empty(image).await?;
    }
    let cleared = image.clear_mark().await?;
    if cleared.is_some() {
        image.flush_storage().await?; // commit point of the clean close
    }
    // The image is consistent from here on, even if the trim fails.
    image.trim().await
}
