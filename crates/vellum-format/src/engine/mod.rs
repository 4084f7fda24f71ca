//! What every format that allocates does in the same way: how a disk is written, how a change becomes durable,
//! and how an image is closed.
//!
//! Here a format is a *map* ([`Map`]): where the bytes of the disk are, which tables say so, and how these
//! tables are copied and written. The engine decides which caller does that, when, and in what order.
//!
//! ```text
//!   a write       in place, or: plan ► claim ► data ► published in memory ──► change recorded ──► answered
//!   a flush       group_commit: leader ──► commit: seal ► record, or ordered stages ► flush ► settle
//!   the end       close: rest ► commit ► checkpoint ► mark cleared ► flush ► trim
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `group_commit` | flushes that arrive while a commit is under way share the next one |
//! | `writer` | what a format gives so that its disk can be written |
//! | `write` | the order of a write; its bytes, their checks, and how they reach the medium |
//! | `fill` | the order of a fill: a copy of what is below becomes the image's own |
//! | `commit` | the order of a commit; what is durable |
//! | `close` | the order of a clean close |
//!
//! 1. The engine never asks which format it serves. A map never leads a commit on its own: it calls
//!    [`Commit::commit`].
//! 2. A map's tables are sealed, that is copied at one moment, by the leader of a commit alone. No change is
//!    half done at that moment.
//! 3. Everything is generic over the map, so no request pays for this boundary with an allocation or an
//!    indirect call.

mod close;
mod commit;
mod fill;
pub(crate) mod group_commit;
mod write;
mod writer;

use std::sync::{Arc, RwLockWriteGuard};

use vellum_core::{Clock, Error, ErrorKind, Geometry, GuestSpan, Result};

pub(crate) use close::Close;
pub(crate) use commit::{Commit, Commits, write_all};
pub(crate) use fill::{Copier, Fill, whole_units};
pub(crate) use write::{Write, place_fresh};
pub(crate) use writer::{Done, Pieces, Runs, Space, Step, Way, Writer};

use crate::claims::Claims;
use crate::epochs::Epochs;
use crate::journal::commit::Medium;
use crate::journal::record::{Item, Record};
use crate::journal::{HomeWrite, Journal};
use crate::state::State;

/// What every open image has, whatever its map. `F` is what a change frees: a run of the image, or a unit.
pub(crate) struct Engine<F> {
    /// The image as messages name it.
    pub(crate) name: String,
    pub(crate) geometry: Geometry,
    pub(crate) state: State,
    /// What is durable.
    pub(crate) commits: Commits<F>,
    /// The claims on parts of the disk that are being changed.
    pub(crate) claims: Claims,
    /// The requests that may still use what they have looked up.
    pub(crate) epochs: Epochs,
}

impl<F> Engine<F> {
    /// For an image that was just opened. With a clock, flushes wait for one another.
    pub(crate) fn new(name: String, geometry: Geometry, clock: Option<Arc<dyn Clock>>) -> Self {
        Self {
            name,
            geometry,
            state: State::default(),
            commits: Commits::new(clock),
            claims: Claims::default(),
            epochs: Epochs::default(),
        }
    }

    /// Checks that the request is inside the disk and the disk still open.
    pub(crate) fn check(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        self.state.check_open()?;
        let span = span.ok_or_else(|| Error::invalid("the request exceeds 2^64"))?;
        if span.end().bytes() > self.geometry.size {
            return Err(Error::invalid(format!(
                "the request {span} extends past the end of the disk at {:#x}",
                self.geometry.size
            )));
        }
        Ok(span)
    }

    /// Checks that a change is allowed.
    pub(crate) fn check_change(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        let span = self.check(span)?;
        if self.geometry.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open read-only", self.name)));
        }
        self.state.check_stopped()?;
        Ok(span)
    }
}

/// Copies of everything that a commit makes durable, taken at one moment.
pub(crate) trait Sealed {
    /// Whether no table has changed.
    fn is_empty(&self) -> bool;
    /// Whether one record can hold all of it.
    fn fits_a_record(&self) -> bool;
    /// The pages as they will be at their home locations.
    fn pages(&self) -> Vec<HomeWrite>;
}

/// A format as the engine sees it: its tables, and what only the format knows about the medium.
pub(crate) trait Map: Medium + Sized {
    /// What a change frees.
    type Freed;
    type Sealed: Sealed;

    fn engine(&self) -> &Engine<Self::Freed>;

    /// The journal, once it has begun.
    fn journal(&self) -> Option<&Journal>;

    // A commit.

    /// Without a journal: copies what has changed, while no change is half done. `None` for an image that
    /// never changes a table in this mode.
    fn seal_in_order(&self) -> Result<Option<Self::Sealed>>;

    /// Without a journal: writes what was sealed in stages, each durable before the next.
    async fn write_in_order(&self, sealed: &Self::Sealed) -> Result<()>;

    /// The gate, held alone: no change is half done.
    fn alone<'a>(&'a self, journal: &'a Journal) -> RwLockWriteGuard<'a, ()>;

    /// Copies what has changed since the last seal, and takes what was freed. The caller holds the gate
    /// alone.
    fn seal(&self) -> Result<Self::Sealed>;

    /// The items by which a transaction's record describes the sealed tables.
    fn items_of(&self, sealed: &Self::Sealed, items: &mut Vec<Item>);

    /// Makes a transaction durable that does not fit in a record.
    async fn commit_unfit(
        &self,
        journal: &Journal,
        sealed: &Self::Sealed,
        record: Record,
        data: &[HomeWrite],
    ) -> Result<()>;

    /// Flushes the storages that hold guest data and metadata.
    fn flush_host(&self) -> impl Future<Output = Result<()>>;

    /// Called when the commit has ended. If it is durable, what was freed may be given back once no request
    /// uses it any more.
    fn settle(&self, sealed: Self::Sealed, is_durable: bool);

    // A flush of the guest.

    /// The flush has begun.
    fn note_flush(&self) {}

    /// Everything that the flush covers is durable.
    fn note_flushed(&self) {}

    // The clean close.

    /// Ends background work, commits, and gives back what was freed. No request begins while the guard lives.
    async fn come_to_rest(&self) -> Result<impl Sized>;

    /// Writes the mark of a clean close over the mark that the image is open. The guard prevents other writes
    /// of the mark.
    async fn clear_mark(&self) -> Result<Option<impl Sized>>;

    /// Gives space that is no longer needed back to the host. The clean close is already durable.
    async fn trim(&self) -> Result<()>;
}
