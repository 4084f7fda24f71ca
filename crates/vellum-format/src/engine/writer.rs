//! What a format gives so that the engine can write its disk ([`Writer`]), and one cell of a write ([`Step`]).
//!
//! 1. A step has its claim from the moment it is planned until it is released.
//! 2. A format places and publishes the bytes of a step. Only the engine writes them.

use std::ops::Range;

use smallvec::SmallVec;
use vellum_core::{
    BlockSize, Buffer, GuestSpan, ImageOffset, LocalFuture, Result, SharedStorage, try_join_all,
};

use super::Map;
use crate::claims::{Fresh, Held};
use crate::journal::{Journal, SectorChecks};
use crate::state::UnderWay;

/// Where a write in place goes: places in the storage, and how many bytes.
pub(crate) type Runs = SmallVec<[(ImageOffset, u64); 2]>;

/// The outcome of a change that may have had to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Done<B> {
    Yes,
    /// Nothing is done, or only a part that may be done again. The change may continue after this, which must
    /// happen outside of any epoch.
    After(B),
}

/// How a write is to be done.
pub(crate) enum Way<B> {
    /// The image has all of it.
    InPlace(Runs),
    /// The mapping must change.
    Allocate(Space),
    /// This must happen first.
    After(B),
}

/// What is known of the image's free space before an attempt to allocate some.
pub(crate) struct Space {
    /// How often space was given back so far.
    pub(crate) given: u64,
    /// Freed space waits to be given back. The host may be full as well. Freed space may then help, and the
    /// bytes are needed once more.
    pub(crate) more_may_come: bool,
}

/// One cell of a write that changes the mapping.
pub(crate) struct Step<'a, W: Writer> {
    /// Stops the image if the request is dropped. In front of the claim, which ends later.
    pub(crate) under_way: Option<UnderWay<'a>>,
    pub(crate) held: Option<Held<'a>>,
    /// The place of the cell, once that is settled.
    pub(crate) place: Option<Fresh>,
    /// The bytes of the cell, in order, that this step is the first to fill. The journal has checks of them.
    pub(crate) fresh: SmallVec<[Range<u64>; 2]>,
    /// For the journal: the checksums of the fresh bytes.
    pub(crate) checks: Vec<SectorChecks>,
    /// No checksums were taken of the fresh bytes.
    pub(super) is_unchecked: bool,
    pub(crate) is_published: bool,
    /// If set, the step gets a fresh place only to avoid this wait.
    pub(crate) instead_of: Option<W::Before>,
    /// What only the format knows of the step.
    pub(crate) plan: W::Plan,
}

impl<'a, W: Writer> Step<'a, W> {
    pub(crate) fn new(plan: W::Plan, held: Option<Held<'a>>) -> Self {
        Self {
            under_way: None,
            held,
            place: None,
            fresh: SmallVec::new(),
            checks: Vec::new(),
            is_unchecked: false,
            is_published: false,
            instead_of: None,
            plan,
        }
    }

    /// The claim of a step that has one.
    pub(crate) fn held(&self) -> &Held<'a> {
        self.held.as_ref().expect("claimed")
    }

    /// Where the cell's bytes go.
    pub(crate) fn at(&self) -> ImageOffset {
        self.place.expect("settled").at
    }

    /// Adds to the open transaction what the journal must know of the fresh bytes. The caller holds the gate,
    /// and publishes the bytes before it releases the gate.
    pub(crate) fn note_fresh(&self, journal: &Journal) {
        match self.is_unchecked {
            true => journal.fence(),
            false => journal.add_checks(&self.checks),
        }
    }

    /// The request no longer uses the step. Returns the claim, which is still held.
    pub(crate) fn end(self) -> Option<Held<'a>> {
        if let Some(under_way) = self.under_way {
            under_way.end();
        }
        self.held
    }
}

/// What a format gives so that its disk can be written.
pub(crate) trait Writer: Map {
    /// What only the format knows of a step.
    type Plan;
    /// What may have to happen before another attempt.
    type Before: Ord;
    /// What one write keeps while it looks for space.
    type Turn<'a>: Default
    where
        Self: 'a;

    // Facts.

    /// The storage of guest data.
    fn data(&self) -> &SharedStorage;

    /// The size of a cell.
    fn cell(&self) -> BlockSize;

    /// Bytes as they are to be stored at this place. All that is written there passes through this, once, before
    /// anything else is done with it.
    async fn as_stored(&self, _at: ImageOffset, data: Buffer) -> Result<Buffer> {
        Ok(data)
    }

    /// A run of checks never crosses a multiple of this.
    fn checks_together(&self) -> BlockSize {
        self.cell()
    }

    // Decisions.

    /// Decides how to write the bytes. The caller is inside an epoch.
    async fn decide(&self, span: GuestSpan, data: &Buffer) -> Result<Way<Self::Before>>;

    /// Claims the cells of a run and settles where their bytes go. Steps are added as soon as they have a
    /// claim. If this fails, or something else must happen first, they are released.
    async fn plan_steps<'a>(
        &'a self,
        span: GuestSpan,
        data: &Buffer,
        steps: &mut Vec<Step<'a, Self>>,
    ) -> Result<Done<Self::Before>>;

    /// Takes the guest's bytes of a step off the front of `data`, and adds them to the pieces, with what must
    /// be written around them.
    fn add_pieces<'s>(&'s self, step: &'s Step<'_, Self>, data: &mut Buffer, pieces: &mut Pieces<'s>);

    /// Makes a step's bytes part of the disk. They have been written.
    async fn publish_step(&self, step: &Step<'_, Self>) -> Result<()>;

    /// Ends the steps of a write, whether or not they were published, and releases their claims.
    async fn release_steps(&self, steps: Vec<Step<'_, Self>>);

    // Between two attempts, outside of any epoch.

    /// Does what [`Way::After`] or [`Done::After`] asked for.
    async fn wait_for(&self, before: Self::Before, span: GuestSpan) -> Result<()>;

    /// Looks for space for the bytes of this run. Returns whether there is any that was not there when
    /// [`Space::given`] was read.
    async fn find_space<'a>(&'a self, span: GuestSpan, given: u64, turn: &mut Self::Turn<'a>)
    -> Result<bool>;
}

/// Bytes to be written, in the order of the disk, and their places.
#[derive(Default)]
pub(crate) struct Pieces<'s> {
    places: Vec<ImageOffset>,
    bytes: Vec<LocalFuture<'s, Result<Buffer>>>,
}

impl<'s> Pieces<'s> {
    /// Adds bytes of the guest.
    pub(crate) fn add(&mut self, at: ImageOffset, bytes: Buffer) {
        self.fill(at, std::future::ready(Ok(bytes)));
    }

    /// Adds bytes that are read.
    pub(crate) fn fill(&mut self, at: ImageOffset, bytes: impl Future<Output = Result<Buffer>> + 's) {
        self.places.push(at);
        self.bytes.push(Box::pin(bytes));
    }

    /// Waits for what is read, and joins adjacent pieces.
    pub(super) async fn join(self) -> Result<Vec<(ImageOffset, Buffer)>> {
        let mut writes: Vec<(ImageOffset, Buffer)> = Vec::new();
        for (at, piece) in self.places.into_iter().zip(try_join_all(self.bytes).await?) {
            match writes.last_mut() {
                Some((first, before)) if *first + before.len() as u64 == at => before.append(piece),
                _ => writes.push((at, piece)),
            }
        }
        Ok(writes)
    }
}
