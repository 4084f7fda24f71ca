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

use std::sync::atomic::Ordering;

use vellum_core::{Buffer, Context, Error, ErrorKind, ImageOffset, ImageSpan, Result, Zeroes};

use super::super::image::{Qcow2, lock};
use super::super::layout::{autoclear, incompatible};
use super::record::{BLOCK, BYTES_MAX, BYTES_MIN, Extension};
use super::ring::Ring;
use super::{Journal, Ledger};
use crate::sabotage::{self, Bug};

/// The run is written with zeros in pieces of this many bytes.
const ZEROED_AT_ONCE: u64 = 1 << 20;

impl Journal {
    /// The run is there, zeroed, and named by the header: from now on commits write records.
    fn begin(&self, generation: u64, key: u128, run: ImageSpan) {
        let ring = Ring::new(run.len());
        let ledger = Ledger { generation, key, run, ring, tail: 1, told: 1, kept: Default::default() };
        *lock(&self.ledger) = Some(ledger);
        self.is_on.store(true, Ordering::Release);
    }
}

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
        self.refcounts().keep_out(clusters);
        let begun = self.begin_in(journal, run).await;
        if begun.is_err() {
            self.refcounts().let_in();
        }
        begun.map(|()| true)
    }

    async fn begin_in(&self, journal: &Journal, run: ImageSpan) -> Result<()> {
        self.reach(run.end().bytes()).await?;
        let context = || format!("{}: can't write the journal", self.name);
        let mut rest = run;
        while !rest.is_empty() && !sabotage::is(Bug::OldRunKept) {
            let (now, later) = rest.split_at(ZEROED_AT_ONCE);
            let zeros = Buffer::zeroed(usize::try_from(now.len()).expect("bounded"));
            self.metadata.write(now.start(), zeros).await.context(context)?;
            rest = later;
        }
        self.flush_storage().await?;
        let generation = {
            let header = lock(&self.header);
            let (extension, _) = header.journal.expect("there is a journal because the header has one");
            extension.generation.wrapping_add(u64::from(!sabotage::is(Bug::OldRunKept)))
        };
        let prealloc = lock(&self.header).prealloc();
        let key = match journal.key {
            Some(key) => key,
            None => random_key()?,
        };
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
        let kept = journal.all_kept();
        self.write_home(&kept).await?;
        if !sabotage::is(Bug::ClosedBeforeHome) {
            self.flush_storage().await?;
        }
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

/// A number that no guest can know.
fn random_key() -> Result<u128> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(ErrorKind::Io, format!("the system gives no random numbers: {error}")))?;
    Ok(u128::from_be_bytes(bytes))
}
