//! What a crash may leave: one content that is certain, and changes each of which may be there, be missing or
//! be torn.
//!
//! ```text
//!   kind            sure                             perhaps
//!   power cut       covered by a completed flush     everything submitted since
//!   process kill    everything that ended            what was in flight; the host and its cache live on
//!   failed flush    covered by a completed flush     page by page: dropped, or as it reads; what was in flight
//! ```
//!
//! 1. Changes are applied in the order in which they became visible, those in flight last, in the order of
//!    their submission. Other orders are not tried, because they give nothing new: whichever change comes
//!    last decides a sector, and losing the later one's sector gives the same.
//! 2. With every completed change kept and nothing in flight, a power cut leaves what was visible.
//! 3. A sector is old or new: it has a value that some change gave it as a whole.
//! 4. A process kill on a drive that had a failed flush leaves what the failed flush leaves: the kernel may
//!    have dropped the pages at any time.
//! 5. After a failed flush the host continues to show what it has not written ([`CrashPoint::shown`]), until
//!    it needs the memory.
//!
//! Building an image copies only the nodes on the way to what it changes, and [`CrashPoint::subsets`] shares
//! them between images, so an explorer spends its time in recovery and not here.

use vellum_core::{ImageOffset, ImageSpan, Random};

use crate::change::{Change, Granule, Patches, Torn};
use crate::content::Content;
use crate::log::EventLog;
use crate::mix::mix;
use crate::operation::Operation;
use crate::world::Position;

/// [`CrashPoint::subsets`] goes through all of them up to this many changes.
pub const SUBSETS_OF_MAX: usize = 12;

/// How a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashKind {
    /// The host lost its power: whatever was not flushed may be gone.
    PowerCut,
    /// The process was killed; the host's page cache survives.
    ProcessKill,
    /// A flush failed: dirty pages may be gone although they can still be read.
    FailedFlush,
}

/// What became of a change that was only perhaps on the medium.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// It is not there.
    Lost,
    /// All of it is there.
    Kept,
    /// Some of it is there.
    Torn(Torn),
}

/// A change that is only perhaps on the medium.
#[derive(Debug, Clone)]
pub struct Pending {
    event: Option<u64>,
    operation: Operation,
    span: ImageSpan,
    change: Change,
    units: u64,
}

impl Pending {
    /// The number of the event in the log; none for a page of the host's cache.
    pub fn event(&self) -> Option<u64> {
        self.event
    }

    /// What was asked.
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// The bytes it is about.
    pub fn span(&self) -> ImageSpan {
        self.span
    }

    /// Into how many units it can be torn; one where it cannot.
    pub fn units(&self) -> u64 {
        self.units
    }
}

/// All that a crash of one kind at one position may leave.
#[derive(Debug, Clone)]
pub struct CrashPoint {
    kind: CrashKind,
    position: Position,
    base: Content,
    pending: Vec<Pending>,
    granule: Granule,
}

impl EventLog {
    /// What a crash at `position` may leave.
    pub fn crash(&self, kind: CrashKind, position: Position) -> CrashPoint {
        let kind = match kind {
            CrashKind::ProcessKill if self.poisoned_before(position) => CrashKind::FailedFlush,
            kind => kind,
        };
        // The host's cache works in pages; the drive in what it promises.
        let granule = if kind == CrashKind::FailedFlush { Granule::Page } else { self.granule() };
        let durable = self.durable(position);
        let events = self.pending(&durable, position);
        // What is in flight settles over what everybody sees.
        let visible = match events.iter().any(|event| !event.ended_before(position)) {
            true => Some(self.visible_at(position)),
            false => None,
        };
        let mut pending = Vec::with_capacity(events.len());
        for event in events {
            let ended = event.ended_before(position);
            if ended && kind != CrashKind::PowerCut {
                continue;
            }
            let change = match visible {
                Some(visible) if !ended => event.change().settled(visible),
                _ => event.effect().clone(),
            };
            let units = change.units(granule);
            let (operation, span) = (event.operation(), event.span());
            pending.push(Pending { event: Some(event.id()), operation, span, change, units });
        }
        let base = match kind {
            CrashKind::PowerCut => durable.content.clone(),
            CrashKind::ProcessKill => self.visible_at(position).clone(),
            CrashKind::FailedFlush => {
                let visible = self.visible_at(position);
                let in_flight = std::mem::take(&mut pending);
                pending = dirty_pages(durable.content, visible);
                pending.extend(in_flight);
                durable.content.clone()
            }
        };
        pending.retain(|pending| pending.units > 0);
        CrashPoint { kind, position, base, pending, granule }
    }
}

/// The cache holds one version of each page, the last: either that reached the medium, or it did not.
fn dirty_pages(durable: &Content, visible: &Content) -> Vec<Pending> {
    let perhaps = |operation, span, change| Pending { event: None, operation, span, change, units: 1 };
    let page = |index| {
        let patches = Patches::page_of(visible, index);
        perhaps(Operation::Write, patches.span(), Change::Sectors(patches))
    };
    let mut pages: Vec<Pending> = visible.pages_that_differ(durable).into_iter().map(page).collect();
    if visible.len() != durable.len() {
        let span = ImageOffset::ZERO.span(visible.len());
        pages.push(perhaps(Operation::SetLen, span, Change::Length(visible.len())));
    }
    pages
}

impl CrashPoint {
    /// The kind of crash. A kill after a failed flush counts as the failed flush.
    pub fn kind(&self) -> CrashKind {
        self.kind
    }

    /// Where it happened.
    pub fn position(&self) -> Position {
        self.position
    }

    /// What is sure.
    pub fn base(&self) -> &Content {
        &self.base
    }

    /// What is only perhaps there, in the order in which it is applied.
    pub fn pending(&self) -> &[Pending] {
        &self.pending
    }

    /// What is left when each pending change has the fate that `fate_of` returns for its index.
    pub fn image(&self, mut fate_of: impl FnMut(usize) -> Fate) -> Content {
        let mut content = self.base.clone();
        for index in 0..self.pending.len() {
            self.apply(index, &fate_of(index), &mut content);
        }
        content.seal();
        content
    }

    /// What the host's cache shows where that is the image: after a failed flush, every page as if it had
    /// been written.
    pub fn shown(&self, mut fate_of: impl FnMut(usize) -> Fate) -> Content {
        let is_page = |pending: &Pending| pending.event.is_none() && pending.operation == Operation::Write;
        self.image(|index| if is_page(&self.pending[index]) { Fate::Kept } else { fate_of(index) })
    }

    /// Does to a content what is left of one change. When all is done it is to be sealed.
    pub(crate) fn apply(&self, index: usize, fate: &Fate, content: &mut Content) {
        match (fate, &self.pending[index].change) {
            (Fate::Lost, _) => {}
            (Fate::Kept, change) => change.apply(content),
            (Fate::Torn(torn), Change::Sectors(patches)) => patches.apply_torn(torn, self.granule, content),
            (Fate::Torn(torn), change) => change.torn(torn, self.granule).apply(content),
        }
    }

    /// A number that stands for everything that the fates affect besides themselves.
    pub(crate) fn digests(&self) -> (u64, Vec<u64>) {
        let changes = self.pending.iter().map(|pending| pending.change.digest()).collect();
        (mix(self.base.digest(), self.granule as u64), changes)
    }

    /// What is left when the changes whose bits are set are kept and the others lost.
    pub fn image_of(&self, kept: u64) -> Content {
        self.image(|index| if index < 64 && kept & (1 << index) != 0 { Fate::Kept } else { Fate::Lost })
    }

    /// The image with everything lost, the ones with everything kept up to some change, those with one change
    /// lost, and those with one change kept: what to try where there are too many subsets.
    pub fn corners(&self) -> impl Iterator<Item = Content> {
        let count = self.pending.len();
        let keep = |kept: bool| if kept { Fate::Kept } else { Fate::Lost };
        let prefixes = (0..=count).map(move |end| self.image(|index| keep(index < end)));
        let losses = (0..count).map(move |lost| self.image(|index| keep(index != lost)));
        let survivors = (0..count).map(move |kept| self.image(|index| keep(index == kept)));
        prefixes.chain(losses).chain(survivors)
    }

    /// Every subset of the pending changes, none of them torn, with its image. `None` when there are more
    /// than [`SUBSETS_OF_MAX`] changes.
    pub fn subsets(&self) -> Option<Subsets<'_>> {
        (self.pending.len() <= SUBSETS_OF_MAX)
            .then(|| Subsets { point: self, open: vec![(0, 0, self.base.clone())] })
    }

    /// The images in which one change is torn and the others have the fates of `kept`, bit by bit: every
    /// prefix and every suffix of the torn change, and, when it has at most eight units, every set of them.
    pub fn tears(&self, torn: usize, kept: u64) -> impl Iterator<Item = Content> {
        let units = self.pending[torn].units;
        let few = if units <= 8 { 1 << units } else { 0 };
        let sets = (0..few).map(Torn::These);
        let ends = (1..if few == 0 { units } else { 1 }).flat_map(|at| [Torn::First(at), Torn::AllBut(at)]);
        sets.chain(ends).map(move |tear| {
            self.image(|index| match index {
                _ if index == torn => Fate::Torn(tear.clone()),
                _ if index < 64 && kept & (1 << index) != 0 => Fate::Kept,
                _ => Fate::Lost,
            })
        })
    }

    /// A random fate for each pending change: sometimes everything is kept, sometimes almost nothing,
    /// sometimes each with its own probability, sometimes torn.
    pub fn random_fates(&self, random: &mut Random) -> Vec<Fate> {
        let count = self.pending.len();
        // Of eight: how many changes survive, and how many of the survivors are torn.
        let (kept, torn) = (*random.pick(&[0, 1, 4, 7, 8]), *random.pick(&[0, 0, 1, 4]));
        let single = random.one_in(4).then(|| random.index(count.max(1)));
        let invert = random.one_in(2);
        (0..count)
            .map(|index| {
                let survives = match single {
                    Some(single) => (index == single) != invert,
                    None => random.below(8) < kept,
                };
                let units = self.pending[index].units;
                match survives {
                    false => Fate::Lost,
                    true if units > 1 && random.below(8) < torn => Fate::Torn(random_tear(units, random)),
                    true => Fate::Kept,
                }
            })
            .collect()
    }

    /// One of the images, drawn from `random`.
    pub fn random_image(&self, random: &mut Random) -> Content {
        let mut fates = self.random_fates(random).into_iter();
        self.image(|_| fates.next().expect("a fate for each"))
    }

    /// The changes that happened, given their fates.
    pub(crate) fn survivors(&self, fates: Vec<Fate>) -> Vec<Change> {
        let changes = self.pending.iter().map(|pending| &pending.change);
        let survivor_of = |(change, fate): (&Change, Fate)| match fate {
            Fate::Lost => None,
            Fate::Kept => Some(change.clone()),
            Fate::Torn(torn) => Some(change.torn(&torn, self.granule)),
        };
        changes.zip(fates).filter_map(survivor_of).collect()
    }
}

/// Some but not all units of a change.
pub(crate) fn random_tear(units: u64, random: &mut Random) -> Torn {
    let at = 1 + random.below(units.max(2) - 1);
    match random.below(3) {
        0 => Torn::First(at),
        1 => Torn::AllBut(at),
        _ => Torn::Scattered(random.any()),
    }
}

/// Goes through all subsets depth first, so that neighbours share the work: one change is applied per image.
pub struct Subsets<'a> {
    point: &'a CrashPoint,
    /// Decided so far: how many changes, which of them are kept, and the resulting content.
    open: Vec<(usize, u64, Content)>,
}

impl Iterator for Subsets<'_> {
    /// The bits of the changes that are kept, and the image.
    type Item = (u64, Content);

    fn next(&mut self) -> Option<(u64, Content)> {
        let (mut decided, kept, mut content) = self.open.pop()?;
        while let Some(pending) = self.point.pending.get(decided) {
            let mut with = content.clone();
            pending.change.apply(&mut with);
            self.open.push((decided + 1, kept | 1 << decided, with));
            decided += 1;
        }
        content.seal();
        Some((kept, content))
    }
}
