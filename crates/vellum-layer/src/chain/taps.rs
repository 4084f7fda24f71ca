//! What stands between the top image of a chain and those below, so that what is read from them can be copied.

use std::sync::Arc;

use vellum_core::SharedDisk;
use vellum_format::Wish;

use super::ChainOptions;
use super::below::Stand;
use crate::hydrate::{BaseFiles, Tap};

impl ChainOptions {
    /// These, and what the top image asks for.
    pub(super) fn with_wish(&self, wish: Wish) -> Self {
        let mut options = self.clone();
        if let Some(wished) = self.wished_tap.as_ref().filter(|_| !wish.is_none()) {
            let tap = options.tap.get_or_insert_with(|| wished.clone());
            tap.copy_on_read |= wish.copy_on_read;
            options.pin_base = true;
        }
        options
    }
}

/// What sees the reads of the top image from below.
pub(super) fn tap_over(
    below: Option<&Stand>,
    files: &Arc<BaseFiles>,
    options: &ChainOptions,
) -> Option<Arc<Tap>> {
    let is_written = !options.read_only && options.snapshot.is_none();
    let tap = options.tap.as_ref().filter(|_| is_written);
    below.zip(tap).map(|(below, tap)| Tap::over(below.disk().clone(), files.clone(), tap.clone()))
}

/// The disk that the top image stands on.
pub(super) fn over(below: Option<&Stand>, tap: Option<&Arc<Tap>>) -> Option<SharedDisk> {
    let tap = tap.map(|tap| Arc::clone(tap) as SharedDisk);
    tap.or_else(|| below.map(|below| below.disk().clone()))
}
