//! qcow2, versions 2 and 3: the format of QEMU's copy-on-write images, read and written.
//!
//! The nouns name what is on disk, the verbs what a request does:
//!
//! | on disk | |
//! |---|---|
//! | [`layout`] | bytes, offsets, bits |
//! | [`header`] | the header, checked once |
//! | [`entry`] | L2 entries, and the one type that represents them all |
//! | [`pages`] | the mapping in memory, read without a lock |
//! | [`refcount`] | which clusters are in use, the allocator, and its search for free clusters |
//! | [`snapshot`] | internal snapshots |
//! | [`bitmaps`] | persistent bitmaps, by name |
//! | [`compressed`] | compressed clusters |
//!
//! | action | |
//! |---|---|
//! | [`open`], [`mod@create`] | opening, with the checks of an image's claims; creation |
//! | [`read`], [`mod@write`] with [`plan`], [`zero`], [`map`] | requests |
//! | [`commit`] | the ordered stages of an image without a journal; what the engine needs of qcow2 |
//! | [`journal`] | qcow2's part of the journal: pending refcounts, oversized transactions, recovery |
//! | [`journal_setting`] | whether an image is to have a journal: changes the header of an existing image |
//! | `prepare` | space ahead of need, zeroed in the background |
//! | [`corrupt`] | the handling of an image that contradicts itself |
//! | [`late`] | older writes that may still land where units were made zero |
//! | [`quarantine`] | freed clusters, until they may be reused |
//! | `resize` | a larger disk, as far as the L1 table has room |
//! | [`check`] | compares everything an image claims, and repairs it |
//! | `format` | the interface that all formats have |
//!
//! Shared with other formats: `engine` (the order of a commit and of a close, in `engine/commit.rs` and
//! `engine/close.rs`), `claims`, `epochs` and `keyed` (which requests may change a unit, which may still use
//! an old mapping, which one loads a page), and most of the journal (the writes around a record are in
//! `journal/commit.rs`).
//!
//! Source: QEMU's `docs/interop/qcow2.rst`. Left out for now: encryption, updating bitmaps (the autoclear bit
//! is cleared before the first change, as the specification requires), making and deleting internal
//! snapshots.

pub mod bitmaps;
pub mod check;
mod commit;
mod compressed;
mod contradiction;
mod corrupt;
pub mod create;
mod entry;
mod format;
pub mod header;
mod header_state;
mod image;
mod journal;
pub mod journal_setting;
mod late;
mod layout;
mod map;
mod mapping;
pub mod open;
mod pages;
mod plan;
mod prepare;
mod quarantine;
mod read;
mod refcount;
mod references;
mod resize;
pub mod snapshot;
mod write;
mod zero;

use std::time::Duration;

use vellum_core::{
    Buffer, Disk, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Result, SharedDisk, WriteFlags,
    ZeroFlags,
};

use crate::engine::{Close as _, Commit as _};
pub use crate::image::Files;
pub use create::{CreateOptions, Preallocation, create};
pub(crate) use format::Qcow2Format;
pub use header::{Compression, Encryption, Header};
pub use image::Qcow2;
pub use journal::recover::recover;
pub use journal_setting::set_journal;
pub use layout::JOURNAL_BYTES_DEFAULT;
pub use open::OpenOptions;
pub use resize::grow;
pub use snapshot::Snapshot;

impl Disk for Qcow2 {
    fn geometry(&self) -> Geometry {
        self.engine.geometry.clone()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.below.clone()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = self.engine.check(GuestSpan::checked(at, buffer.len() as u64))?;
            self.noticed(self.read_span(span, buffer).await).await
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.engine.check_change(GuestSpan::checked(at, data.len() as u64))?;
            self.noticed(self.write_span(span, data).await).await?;
            if flags.fua { self.noticed(self.make_durable().await).await } else { Ok(()) }
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.engine.state.check_open()?;
            if self.engine.geometry.read_only {
                Ok(())
            } else {
                self.noticed(self.make_durable().await).await
            }
        })
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.engine.check_change(Some(span))?;
            self.noticed(self.zero_span(span, flags).await).await?;
            if flags.fua { self.noticed(self.make_durable().await).await } else { Ok(()) }
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.engine.check_change(Some(span))?;
            self.noticed(self.discard_span(span).await).await?;
            if flags.fua { self.noticed(self.make_durable().await).await } else { Ok(()) }
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let span = self.engine.check(Some(span))?;
            self.noticed(self.map_span(span).await).await
        })
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        Box::pin(async move {
            let has_more = self.give_back_in_background().await;
            let is_searched = self.look_for_space_in_background().await;
            self.prepare_some(now).await || has_more || is_searched
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.noticed(self.close_image().await).await })
    }
}
