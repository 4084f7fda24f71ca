//! What is on the medium, established before anything that is read is trusted.
//!
//! After a failed flush Linux shows pages that it has given up writing as clean ones: they can be read, they
//! are not on the medium, and later flushes succeed. A recovery that trusted them would refer to data that is
//! not there. So:
//!
//! | before | what is asked for |
//! |---|---|
//! | a header or superblock is read for writing | [`reconcile`] of it: whether the image was closed must be true |
//! | an image that was not closed is recovered or repaired | [`settle`]: all of it, and of its data file |
//! | a disk is opened again after it stopped | [`settle`] of an image that does not know whether it was closed |
//!
//! What follows from a header that says *closed* needs no more: it was written after a flush of everything
//! else had succeeded.

use vellum_core::{ImageOffset, ImageSpan, Result, Storage};

/// Makes sure that the bytes that the run reads as are on the medium, or will be after the next successful
/// flush.
pub(crate) async fn reconcile(storage: &dyn Storage, span: ImageSpan) -> Result<bool> {
    if storage.limits().read_only {
        return Ok(false);
    }
    storage.reconcile(span).await
}

/// Makes everything that the storage reads as durable: what is read from here on is what a power cut would
/// leave. The storage must not be written meanwhile.
///
/// # Errors
/// Those of the storage: it cannot be flushed, or what it shows cannot be written.
pub async fn settle(storage: &dyn Storage) -> Result<()> {
    storage.flush().await?;
    match reconcile(storage, ImageOffset::ZERO.span(storage.len())).await? {
        true => storage.flush().await,
        false => Ok(()),
    }
}
