//! Changes of an image that is not open: of its snapshots, of its size, and of what it is.

use std::sync::Arc;
use std::time::Duration;

use vellum_core::{Inline, LocalFuture, Offload, Result, SharedStorage};

use crate::luks::Secrets;

/// What an existing image is to be. `None` leaves it as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Amend {
    /// The version of the format.
    pub version: Option<u32>,
    /// Whether other programs may postpone refcount updates.
    pub lazy_refcounts: Option<bool>,
    /// The width of refcounts.
    pub refcount_bits: Option<u32>,
}

/// How a snapshot is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted<'a> {
    /// By its id, or by its name if no snapshot has this id.
    IdOrName(&'a str),
    /// By its name.
    Name(&'a str),
}

impl<'a> Wanted<'a> {
    /// The id or name.
    pub fn text(self) -> &'a str {
        match self {
            Self::IdOrName(text) | Self::Name(text) => text,
        }
    }
}

/// Changes of the snapshots of an image that is not open. A crash leaves the image as it was or as it was to be.
pub trait ClosedSnapshots: Sync {
    /// Makes a snapshot. Returns its id. `may_repeat` allows a name that another snapshot has.
    ///
    /// # Errors
    /// `Invalid` for an impossible name, `Corrupt` when the image is damaged, and the errors of the image.
    fn create<'a>(
        &'a self,
        image: &'a SharedStorage,
        name: &'a str,
        now: Duration,
        may_repeat: bool,
    ) -> LocalFuture<'a, Result<String>>;

    /// Deletes a snapshot.
    ///
    /// # Errors
    /// `NotFound` when there is none, and as [`create`](ClosedSnapshots::create).
    fn delete<'a>(&'a self, image: &'a SharedStorage, wanted: Wanted<'a>) -> LocalFuture<'a, Result<()>>;

    /// Gives a snapshot another name.
    ///
    /// # Errors
    /// As [`delete`](ClosedSnapshots::delete).
    fn rename<'a>(
        &'a self,
        image: &'a SharedStorage,
        wanted: Wanted<'a>,
        name: &'a str,
    ) -> LocalFuture<'a, Result<()>>;
}

/// How a disk grows.
#[derive(Clone)]
pub struct Growth {
    /// The size of the disk below in bytes, if that is longer than the disk: what it has behind the old end is never seen.
    pub below: u64,
    /// Space for what is added.
    pub reserve: Reserve,
    /// What opens the image, where it is encrypted and what lies behind the old end must become zero.
    pub secrets: Arc<Secrets>,
    /// Where the key is derived from them, which takes seconds.
    pub offload: Arc<dyn Offload>,
}

impl Default for Growth {
    fn default() -> Self {
        Self { below: 0, reserve: Reserve::default(), secrets: Arc::default(), offload: Arc::new(Inline) }
    }
}

/// What is reserved for the part of a disk that is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reserve {
    /// Nothing: it is a hole.
    #[default]
    Nothing,
    /// Places in the image, so that its tables need not change later.
    Places,
    /// As before, and the space of the host.
    Space,
    /// As before, with zeros written there.
    Zeros,
}
