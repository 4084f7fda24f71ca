//! qcow2, versions 2 and 3: the format of QEMU's copy-on-write images, read and written.
//!
//! Nouns name what is on disk, verbs what a request does:
//!
//! | on disk | |
//! |---|---|
//! | [`layout`] | bytes, offsets, bits |
//! | [`header`] | the header, checked once |
//! | [`entry`] | L2 entries and the one shape they are seen in |
//! | [`pages`] | the mapping in memory, read without a lock |
//! | [`refcount`] | what is in use, and the allocator |
//! | [`snapshot`] | internal snapshots |
//! | [`compressed`] | compressed clusters |
//!
//! | what is done | |
//! |---|---|
//! | [`open`], [`mod@create`] | and what is believed of an image |
//! | [`read`], [`mod@write`] with [`plan`], [`zero`], [`map`] | requests |
//! | [`commit`] | the order in which metadata reaches the medium; all of it |
//! | [`journal`] | the way with one flush, and what is replayed after a crash |
//! | [`journal_wish`] | whether an image is to have one: put into its header, or taken out |
//! | `prepare` | space ahead of need, written with zeros while nobody waits |
//! | [`quarantine`] | what was freed, until it may be used again |
//! | `resize` | a larger disk, as far as the L1 table has room |
//! | [`check`] | everything an image claims, compared; and repaired |
//!
//! Shared with other formats: `claims`, `epochs`, `keyed` (who may change, who may still be looking, who loads), and most
//! of the journal.
//!
//! Source: QEMU's `docs/interop/qcow2.rst`. Left out for now: encryption, keeping bitmaps up (the autoclear bit is
//! cleared before the first change, as the specification wants), making and deleting internal snapshots.

pub mod check;
mod commit;
mod compressed;
pub mod create;
mod entry;
pub mod header;
mod image;
mod journal;
pub mod journal_wish;
mod layout;
mod map;
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

pub use create::{CreateOptions, JOURNAL_BYTES_DEFAULT, Preallocation, create};
pub use header::{Compression, Header};
pub use image::Qcow2;
pub use journal::recover::{Recovery, recover};
pub use journal_wish::{JournalChange, set_journal};
pub use open::{Files, OpenOptions};
pub use resize::grow;
pub use snapshot::Snapshot;

impl Disk for Qcow2 {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.below.clone()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = self.check(GuestSpan::checked(at, buffer.len() as u64))?;
            self.read_span(span, buffer).await
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check_change(GuestSpan::checked(at, data.len() as u64))?;
            self.write_span(span, data).await?;
            if flags.fua { self.make_durable().await } else { Ok(()) }
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.state.check_open()?;
            if self.geometry.read_only { Ok(()) } else { self.make_durable().await }
        })
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check_change(Some(span))?;
            self.zero_span(span, flags).await?;
            if flags.fua { self.make_durable().await } else { Ok(()) }
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.check_change(Some(span))?;
            self.discard_span(span).await?;
            if flags.fua { self.make_durable().await } else { Ok(()) }
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let span = self.check(Some(span))?;
            self.map_span(span).await
        })
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        Box::pin(self.prepare_some(now))
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.close_image())
    }
}
