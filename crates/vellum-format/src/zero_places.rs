//! Zeros for which an image keeps space, such as those of preallocated clusters: where they lie, for whoever shows a map of the
//! image. The map itself says only that there is space.

use vellum_core::{GuestSpan, ImageOffset, LocalFuture, Result};

/// The places of zeros for which space is kept.
pub trait ZeroPlaces: Send + Sync {
    /// The parts of the run that are such zeros, in order, and where each of them lies. They may have changed meanwhile.
    ///
    /// # Errors
    /// Those of reading the mapping.
    fn zero_places(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<(GuestSpan, ImageOffset)>>>;
}
