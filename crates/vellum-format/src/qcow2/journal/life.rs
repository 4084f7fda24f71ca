//! The place of the journal, and how it begins and ends.
//!
//! ```text
//!   first change   zeros over the run ─ flush ► header: run, generation + 1, the feature bit ─ flush ► on
//!   clean close    a last record: all is verified ► checkpoint ─ flush ► header: no bit ─ flush ► run punched
//! ```
//!
//! 1. The run has refcount 0, and the allocator avoids it while the image is open. So a closed image contains
//!    nothing of it, and neither does one that a repair has looked at.
//! 2. The zeros are durable before the header names the run, so bytes that a guest once wrote there never
//!    pass for a record.
//! 3. If the host has no space for the run, the image is written in the ordered way until it is opened again:
//!    a request that overwrites data, or frees some of it, needs no space. The journal cannot begin later,
//!    because the bytes of requests in flight would have checksums in no record.

use vellum_core::{Context, ErrorKind, ImageOffset, ImageSpan, Result, Zeroes};

use super::super::header::Header;
use super::super::image::Qcow2;
use super::super::layout::incompatible;
use super::Journal;
use super::extension::Extension;
use crate::engine::Commit as _;
use crate::journal::commit::write_zeros;
use crate::journal::record::{BLOCK, BYTES_MAX, BYTES_MIN};

impl Qcow2 {
    /// Begins the journal, before the first change. Returns whether it did: without a good place for it, or
    /// without space on the host, the image is written in the ordered way.
    pub(crate) async fn begin_journal(&self) -> Result<bool> {
        let Some(journal) = &self.journal else { return Ok(false) };
        let wanted = journal.wanted_bytes.clamp(BYTES_MIN, BYTES_MAX);
        let unit = BLOCK.max(self.cluster.bytes());
        let (least, wanted) = (BYTES_MIN.next_multiple_of(unit), wanted.next_multiple_of(unit));
        let found = self
            .with_refcounts(|refcounts| {
                refcounts.find_journal(
                    least >> self.cluster.shift(),
                    wanted >> self.cluster.shift(),
                    unit >> self.cluster.shift(),
                )
            })
            .await?;
        let Some(clusters) = found else { return Ok(false) };
        let run = ImageOffset::new(clusters.start << self.cluster.shift())
            .span((clusters.end - clusters.start) << self.cluster.shift());
        self.refcounts().keep_out(clusters);
        if let Err(error) = self.write_run(run).await {
            let is_full = error.kind() == ErrorKind::NoSpace;
            if is_full {
                // The run's space goes back to the host, before another write may land there.
                self.punch(run).await;
            }
            self.refcounts().let_in();
            return if is_full { Ok(false) } else { Err(error) };
        }
        let begun = self.begin_in(journal, run).await;
        match begun.is_ok() {
            true => self.refcounts().reserve(),
            false => self.refcounts().let_in(),
        }
        begun.map(|()| true)
    }

    /// Makes the file reach the run's end, and zeros the run.
    async fn write_run(&self, run: ImageSpan) -> Result<()> {
        self.reach(run.end().bytes()).await?;
        let context = || format!("{}: can't write the journal", self.engine.name);
        write_zeros(&*self.metadata, run).await.context(context)
    }

    /// Gives the space of the run back to the host, where that is cheap.
    async fn punch(&self, run: ImageSpan) {
        if run.end().bytes() <= self.metadata.len() && self.metadata.limits().fast_zeroes {
            let _ = self.metadata.write_zeroes(run, Zeroes::MayUnmap).await;
        }
    }

    async fn begin_in(&self, journal: &Journal, run: ImageSpan) -> Result<()> {
        self.flush_storage().await?;
        let (extension, _) =
            self.header.read(|header| header.journal).expect("there is a journal because the header has one");
        let generation = extension.generation.wrapping_add(1);
        let key = journal.common.new_key()?;
        let prealloc = self.header.read(Header::prealloc);
        let extension = Extension { wanted_bytes: journal.wanted_bytes, run, generation, key, prealloc };
        self.change_header(|header| {
            header.set_journal(extension);
            let autoclear = header.kept_autoclear(self.flash, self.tracking.unusable().is_none());
            header.set_features(header.incompatible | incompatible::JOURNAL, autoclear);
        })
        .await?;
        self.flush_storage().await?; // commit point: a crash from here on is recovered with the journal
        journal.common.begin(generation, key, run);
        Ok(())
    }

    /// Clears the bit, at the clean close. Everything is committed, given back and checkpointed.
    pub(crate) async fn clear_journal_bit(&self, journal: &Journal) -> Result<()> {
        let run = journal.common.run().expect("it has begun");
        // Prepared space is cut off while the bit still asks for a recovery.
        self.cut_to_end(run).await?;
        self.change_header(|header| {
            let (extension, _) = header.journal.expect("there is a journal");
            header.set_journal(Extension { run: ImageOffset::ZERO.span(0), key: 0, ..extension });
            header.set_features(header.incompatible & !incompatible::JOURNAL, header.autoclear);
        })
        .await
    }

    /// The bit is cleared, durably. Gives back the run, and what the file has behind the clusters in use.
    pub(crate) async fn give_back_run_of(&self, journal: &Journal) -> Result<()> {
        let run = journal.common.run().expect("it has begun");
        self.cut_to_end(ImageOffset::ZERO.span(0)).await?;
        self.punch(run).await;
        Ok(())
    }
}
