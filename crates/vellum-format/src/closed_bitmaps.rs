//! Changes of the bitmaps of an image that is not open, and reading one of them.

use std::sync::Arc;

use vellum_core::{LocalFuture, Result, SharedStorage, Storage};

pub use crate::qcow2::bitmaps::{Bitmap, Bits};

/// What becomes of a bitmap.
#[derive(Debug, Clone)]
pub enum BitmapChange {
    /// It is made, enabled, with nothing marked. A bit stands for this many bytes; for as many as usual, when not given.
    Add {
        /// Bytes.
        granularity: Option<u64>,
    },
    /// It is removed.
    Remove,
    /// Nothing is marked any more.
    Clear,
    /// Changes of the disk are marked from now on.
    Enable,
    /// Changes of the disk are not marked any more.
    Disable,
    /// What is marked in this one is marked.
    Merge(MergeSource),
}

/// A bitmap that is merged into another one.
#[derive(Debug, Clone)]
pub enum MergeSource {
    /// Of the same image, by its name.
    Own(String),
    /// Of another image.
    Other(Arc<Bits>),
}

/// The bitmaps of an image that is open.
pub trait OpenBitmaps: Send + Sync {
    /// What is marked in a bitmap, as it is now. Changes of an enabled one are marked before they are made.
    ///
    /// # Errors
    /// As [`ClosedBitmaps::load`].
    fn load<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Arc<Bits>>>;

    /// Begins a bitmap anew, and returns what was marked since it was begun anew before: a copy is to be made of that. No request
    /// may run meanwhile. In the image all of it stays marked until it is [given up](OpenBitmaps::forget) or [taken
    /// back](OpenBitmaps::take_back).
    ///
    /// # Errors
    /// As above; `Unsupported` for a bitmap that is disabled, or an image that is only read.
    fn begin_anew(&self, name: &str) -> Result<Arc<Bits>>;

    /// Marks again what was marked before the bitmap was begun anew: the copy was not made.
    fn take_back(&self, name: &str);

    /// Gives up what was marked before the bitmap was begun anew: the copy was made. It is durable when this returns.
    ///
    /// # Errors
    /// Those of the image. Then it is marked again, as if it was [taken back](OpenBitmaps::take_back).
    fn forget<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<()>>;
}

/// The bitmaps of images that are not open.
pub trait ClosedBitmaps: Sync {
    /// The bitmaps of an image; none where another program has made them invalid.
    ///
    /// # Errors
    /// When the list is damaged, and the errors of the storage.
    fn list<'a>(&'a self, image: &'a dyn Storage) -> LocalFuture<'a, Result<Vec<Bitmap>>>;

    /// What is marked in a bitmap.
    ///
    /// # Errors
    /// `NotFound` when there is none of this name, `Corrupt` when it cannot be relied on, and the errors of the storage.
    fn load<'a>(&'a self, image: &'a dyn Storage, name: &'a str) -> LocalFuture<'a, Result<Bits>>;

    /// Changes a bitmap, in this order. A crash leaves all bitmaps as they were or as they were to be.
    ///
    /// # Errors
    /// As [`load`](ClosedBitmaps::load); `Invalid` for an impossible name or granularity, or a name that is taken; `NoSpace`
    /// when there is no room for new tables beside the old ones, or none in the header. Nothing has changed then.
    fn change<'a>(
        &'a self,
        image: &'a SharedStorage,
        name: &'a str,
        changes: &'a [BitmapChange],
    ) -> LocalFuture<'a, Result<()>>;
}
