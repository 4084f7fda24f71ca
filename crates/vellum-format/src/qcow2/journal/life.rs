//! Where the journal lies, and how it begins and ends.
//!
//! ```text
//!   first change   zeros over the run ── flush ──► header: where, generation + 1, the feature bit ── flush ──► on
//!   clean close    a last record, so that all is proven ► pages home ── flush ──► header: no bit ── flush ──► run punched
//! ```
//!
//! 1. The run has refcount 0, and the allocator keeps away from it while the image is open. So a closed image, and one that
//!    a repair has looked at, has nothing of it.
//! 2. The zeros are durable before the header names the run: whatever a guest once wrote there is never taken for a record.

use vellum_core::{Context, ImageOffset, ImageSpan, Result, Zeroes};

use super::super::image::{Qcow2, lock};
use super::super::layout::{autoclear, incompatible};
use super::Journal;
use super::extension::Extension;
use crate::journal::commit::write_zeros;
use crate::journal::record::{BLOCK, BYTES_MAX, BYTES_MIN};
use crate::sabotage::{self, Bug};

impl Qcow2 {
    /// The journal, if this image is being written with one.
    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref().filter(|journal| journal.is_on())
    }

    /// Begins the journal, before the first change. Tells whether it did: without a good place for it the image is
    /// written in the ordered way.
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
        {
            let mut refcounts = self.refcounts();
            refcounts.keep_out(clusters);
            refcounts.reserve();
        }
        let begun = self.begin_in(journal, run).await;
        if begun.is_err() {
            self.refcounts().let_in();
        }
        begun.map(|()| true)
    }

    async fn begin_in(&self, journal: &Journal, run: ImageSpan) -> Result<()> {
        self.reach(run.end().bytes()).await?;
        let context = || format!("{}: can't write the journal", self.name);
        if !sabotage::is(Bug::OldRunKept) {
            write_zeros(&*self.metadata, run).await.context(context)?;
        }
        self.flush_storage().await?;
        let generation = {
            let header = lock(&self.header);
            let (extension, _) = header.journal.expect("there is a journal because the header has one");
            extension.generation.wrapping_add(u64::from(!sabotage::is(Bug::OldRunKept)))
        };
        let key = journal.new_key()?;
        let prealloc = lock(&self.header).prealloc();
        let extension = Extension { wanted_bytes: journal.wanted_bytes, run, generation, key, prealloc };
        self.change_header(|header| {
            header.set_journal(extension);
            let autoclear = header.autoclear & autoclear::KEPT;
            header.set_features(header.incompatible | incompatible::JOURNAL, autoclear);
        })
        .await?;
        self.flush_storage().await?; // commit point: a crash from here on is recovered with the journal
        journal.begin(generation, key, run);
        Ok(())
    }

    /// Takes the last of it home, and clears the bit. Everything is committed and given back.
    pub(crate) async fn end_journal(&self, journal: &Journal) -> Result<()> {
        if journal.has_unproven() {
            journal.want_proof();
            self.commit().await?;
        }
        journal.empty(self).await?;
        let run = journal.run().expect("it has begun");
        // What was prepared goes while the bit says that somebody must look.
        self.cut_to_end(run).await?;
        self.change_header(|header| {
            let (extension, _) = header.journal.expect("there is a journal");
            header.set_journal(Extension { run: ImageOffset::ZERO.span(0), key: 0, ..extension });
            header.set_features(header.incompatible & !incompatible::JOURNAL, header.autoclear);
        })
        .await?;
        self.flush_storage().await?; // commit point of the clean close
        // From here on the image is whole without what follows.
        self.cut_to_end(ImageOffset::ZERO.span(0)).await?;
        if run.end().bytes() <= self.metadata.len() && self.metadata.limits().fast_zeroes {
            let _ = self.metadata.write_zeroes(run, Zeroes::MayUnmap).await;
        }
        Ok(())
    }
}
