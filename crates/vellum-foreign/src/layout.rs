//! What one format knows: where the bytes of the disk are.

use std::sync::Arc;

use vellum_core::{LocalFuture, Result, SharedStorage};

use crate::pages::Pages;
use crate::unpack::Packed;

/// Where the bytes of a run are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Where {
    /// They read as zero. `allocated` says whether the image has space for them.
    Zero {
        /// The image has space for them.
        allocated: bool,
    },
    /// The image has nothing there.
    Below,
    /// In a file, from `at` on.
    Plain {
        /// Which file of the image.
        file: usize,
        /// Where the first byte is.
        at: u64,
        /// The file has all bytes of the disk, so its holes are the disk's.
        is_flat: bool,
    },
    /// In a compressed chunk, from this byte of its content on.
    Packed {
        /// The chunk.
        chunk: Packed,
        /// How far the first byte is from the beginning of the chunk's content.
        skip: u64,
    },
}

/// A run of the disk from some byte on. It is not empty, and may be longer than what was asked for.
pub(crate) struct Run {
    pub(crate) len: u64,
    pub(crate) place: Where,
}

impl Run {
    /// The bytes of a block that is stored in one place, from `within` on.
    pub(crate) fn in_block(block: u64, within: u64, file: usize, start: Option<u64>) -> Self {
        // Past 2^64 no file has a byte; the disk checks that.
        let place = match start {
            Some(start) => Where::Plain { file, at: start.saturating_add(within), is_flat: false },
            None => Where::Below,
        };
        Self { len: block - within, place }
    }
}

/// The mapping of an open image.
pub(crate) trait Layout: Send + Sync {
    /// Where the byte `at` of the disk is, and the bytes after it, as far as they lie together. `at` is below the
    /// size of the disk. There is no use in a run that is longer than `wanted`.
    fn find(&self, at: u64, wanted: u64) -> LocalFuture<'_, Result<Run>>;
}

/// An image that is open: its mapping and its files.
pub(crate) struct OpenLayout {
    pub(crate) layout: Box<dyn Layout>,
    /// The image first, then its parts.
    pub(crate) files: Vec<SharedStorage>,
}

impl OpenLayout {
    /// Of a format that reads its tables through these pages.
    pub(crate) fn over(pages: Arc<Pages>, layout: impl Layout + 'static) -> Self {
        Self { layout: Box::new(layout), files: pages.files().to_vec() }
    }
}

/// The header of an image, checked.
pub(crate) trait Header: Send + Sync {
    /// Opens the mapping. The image is the first of the files; its parts follow.
    fn open(&self, files: Vec<SharedStorage>) -> LocalFuture<'_, Result<OpenLayout>>;
}
