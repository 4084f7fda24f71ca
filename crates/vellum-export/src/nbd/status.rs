//! Block status: a disk's map in terms of the metadata contexts that a client selected.
//!
//! ```text
//!   extents   │ data at depth 0 │ data at depth 1 │ zero, unallocated │ …      from the merged map of the chain
//!   statuses  │        0        │        0        │     HOLE|ZERO     │        MetaContext::status_of
//!   runs      │                 0                 │     HOLE|ZERO     │        Folder: neighbours merged, cut at
//!                                                                            multiples of the minimum block
//! ```
//!
//! 1. An answer has at least one run; its runs follow each other from the start of the request and never pass
//!    its end, so that every length fits its header field.
//! 2. A run starts and ends at a multiple of the minimum block the client was promised. A block with several
//!    statuses gets the one that promises least.
//! 3. An answer is bounded: [`RUNS_MAX`] runs for each context, [`MAPS_MAX`] queries that the disk answers
//!    only in part, 1 TiB in all. It may be shorter than requested; the client continues from there. The disk
//!    is queried a slice at a time (`slices`), other tasks have their turn after each, and the answer ends
//!    when the client has left.
//!
//! A new context is a new [`MetaContext`]. What an export is marked with (dirty bitmaps, what differs from a snapshot) has a source of
//! its own ([`Marks`]): its runs are found beside the map and folded in the same way.
//!
//! Source: NBD protocol, "Metadata querying", `NBD_CMD_BLOCK_STATUS`; QEMU's `docs/interop/nbd.rst` for the
//! `qemu:` namespace.

use std::sync::Arc;

use futures_lite::future::yield_now;
use vellum_core::{Error, GuestOffset, GuestSpan, LocalFuture, MergedExtent, PlaceKind, Result, SharedDisk};

use super::sparse::{Outlook, stop_if_left};
use super::wire::allocation;
use crate::slices::SLICE;

/// The most bytes of runs in one answer for one context, which is within every payload limit.
const RUNS_BYTES_MAX: usize = 64 << 10;

/// The most runs of one answer for one context. With extended headers each takes twice the bytes.
pub(super) const RUNS_MAX: usize = RUNS_BYTES_MAX / 8;
pub(super) const RUNS_MAX_EXTENDED: usize = RUNS_BYTES_MAX / 16;

/// How often at most, for one answer, the disk may describe less than was requested.
pub(super) const MAPS_MAX: usize = 16;

/// At most this many slices are queried from a disk for one answer.
const ROUNDS_MAX: usize = 1 << 14;

/// What a request for status is charged: the extents of one map while they gather, and the runs of each
/// context.
pub(super) const MEMORY_BYTES: usize = 1 << 20;

/// One way to look at the extents of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MetaContext {
    /// `base:allocation`: holes and zeros.
    Allocation,
    /// `qemu:allocation-depth`: how many images up the chain the data is; 0 where no image has any.
    AllocationDepth,
    /// `qemu:dirty-bitmap:NAME`, `vellum:diff:NAME`: what is marked of the export, by its number among its marks.
    Marked(u16),
}

/// What marks are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MarksKind {
    /// `qemu:dirty-bitmap:NAME`: what has changed since a bitmap was cleared.
    Bitmap,
    /// `vellum:diff:NAME`: what differs from a snapshot.
    Diff,
}

impl MarksKind {
    const ALL: [Self; 2] = [Self::Bitmap, Self::Diff];

    /// What the name follows.
    const fn prefix(self) -> &'static str {
        match self {
            Self::Bitmap => "qemu:dirty-bitmap:",
            Self::Diff => "vellum:diff:",
        }
    }
}

/// Parts of a disk that are marked.
pub trait Marks: Send + Sync {
    /// What they are of.
    fn kind(&self) -> MarksKind;

    /// Its name.
    fn name(&self) -> &str;

    /// What is marked in `span`, from its start: no more than `most` runs. May stop early, but not at the start.
    fn marked(&self, span: GuestSpan, most: usize) -> LocalFuture<'_, Result<Marked>>;
}

/// What is marked in a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marked {
    /// Runs that are marked, in order and apart from each other.
    pub runs: Vec<GuestSpan>,
    /// Nothing else is marked before this.
    pub until: GuestOffset,
}

/// The marks of one kind and name.
pub type SharedMarks = Arc<dyn Marks>;

/// What an export is marked with.
pub trait OffersMarks: Send + Sync {
    /// All that clients may ask for now. What is beyond the first 65,536 is not offered.
    fn marks(&self) -> Vec<SharedMarks>;
}

impl MetaContext {
    const FIXED: [Self; 2] = [Self::Allocation, Self::AllocationDepth];

    /// All contexts of an export with these marks, each with its name.
    pub(super) fn all(marks: &[SharedMarks]) -> Vec<(Self, String)> {
        let fixed = Self::FIXED.into_iter().map(|context| match context {
            Self::AllocationDepth => (context, "qemu:allocation-depth".to_owned()),
            _ => (context, "base:allocation".to_owned()),
        });
        let named = (0..=u16::MAX)
            .zip(marks)
            .map(|(number, one)| (Self::Marked(number), format!("{}{}", one.kind().prefix(), one.name())));
        fixed.chain(named).collect()
    }

    /// The number it has on the wire.
    pub(super) fn id(self) -> u32 {
        match self {
            Self::Allocation => 1,
            Self::AllocationDepth => 2,
            Self::Marked(number) => 3 + u32::from(number),
        }
    }

    /// Whether a query for a list means the context of this name, or a whole namespace that it is in: `base:`, `qemu:`,
    /// `qemu:dirty-bitmap:`, `vellum:`, `vellum:diff:`.
    pub(super) fn is_matched(name: &str, query: &str) -> bool {
        let is_namespace = |prefix: &str| query == prefix && name.starts_with(prefix);
        let namespaces =
            ["base:", "qemu:", "vellum:"].into_iter().chain(MarksKind::ALL.map(MarksKind::prefix));
        query == name || namespaces.into_iter().any(is_namespace)
    }

    fn status_of(self, extent: &MergedExtent<PlaceKind>) -> u32 {
        match (self, &extent.place) {
            // Zeros that only a disk below has set space aside for have none here: writing them takes new
            // space.
            (Self::Allocation, PlaceKind::Zero { allocated: true }) if extent.depth == 0 => allocation::ZERO,
            (Self::Allocation, PlaceKind::Zero { .. } | PlaceKind::Below) => {
                allocation::HOLE | allocation::ZERO
            }
            (Self::Allocation, PlaceKind::Data | PlaceKind::Compressed) => 0,
            (Self::AllocationDepth, PlaceKind::Below) => 0,
            (Self::AllocationDepth, _) => u32::try_from(extent.depth + 1).unwrap_or(u32::MAX),
            (Self::Marked(_), _) => 0,
        }
    }

    /// The status of a block whose parts have these two.
    fn joined(self, one: u32, other: u32) -> u32 {
        match self {
            // A hole is only what is a hole throughout.
            Self::Allocation => one & other,
            // A block counts as belonging to the nearest image that has some of it.
            Self::AllocationDepth if one == 0 || other == 0 => one.max(other),
            Self::AllocationDepth => one.min(other),
            // A block is marked if some of it is.
            Self::Marked(_) => one | other,
        }
    }

    /// The status of a block of which only a part is known: one that promises nothing.
    fn unknown(self) -> u32 {
        match self {
            // "A server MAY always safely report a status of 0 for any block".
            Self::Allocation | Self::AllocationDepth => 0,
            Self::Marked(_) => MARKED,
        }
    }
}

/// The contexts a client chose, each once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Contexts(Vec<MetaContext>);

impl Contexts {
    pub(super) fn select(&mut self, context: MetaContext) {
        if !self.0.contains(&context) {
            self.0.push(context);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = MetaContext> {
        self.0.iter().copied()
    }
}

/// A run of bytes with one status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) len: u64,
    pub(super) status: u32,
}

/// The answer to a block status request: each context with its runs.
pub(super) type Statuses = Vec<(MetaContext, Vec<Run>)>;

/// The requested information.
#[derive(Clone, Copy)]
pub(super) struct Question<'a> {
    pub(super) span: GuestSpan,
    /// No more runs than this for each context.
    pub(super) runs_max: usize,
    /// Runs are multiples of this; the span is one.
    pub(super) block: u64,
    pub(super) contexts: &'a Contexts,
    /// Those that the client was told of.
    pub(super) marks: &'a [SharedMarks],
}

/// The runs of each context, from the start of the span. They may end early.
pub(super) async fn block_status(
    disk: &SharedDisk,
    question: Question<'_>,
    outlook: &Outlook,
) -> Result<Statuses> {
    let Question { span, runs_max, block, contexts, marks } = question;
    let mut statuses = Statuses::new();
    for context in contexts.iter() {
        let MetaContext::Marked(number) = context else { continue };
        let its = marks.get(usize::from(number));
        let its = its.ok_or_else(|| Error::invalid("the export has no such marks: connect again"))?;
        statuses.push((context, marked_runs(&**its, context, question).await?));
        stop_if_left(outlook)?;
    }
    let of_the_map = contexts.iter().filter(|context| !matches!(context, MetaContext::Marked(_)));
    let mut folders: Vec<Folder> = of_the_map.map(|context| Folder::new(context, block, runs_max)).collect();
    if folders.is_empty() {
        return Ok(statuses);
    }
    let mut at = span.start();
    let mut answered_in_part = 0;
    for round in 0..ROUNDS_MAX {
        if round > 0 {
            // A disk that has its map in memory would not let others have their turn.
            yield_now().await;
            stop_if_left(outlook)?;
        }
        let (rest, _) = GuestSpan::between(at, span.end()).split_at(SLICE.bytes());
        for extent in &disk.map_whole(rest).await? {
            // Never past the end of the request, even if the disk reports more.
            let part = extent.span.intersect(rest);
            for folder in &mut folders {
                folder.push(part.len(), folder.context.status_of(extent));
            }
            at = part.end();
        }
        if at == rest.start() {
            return Err(Error::corrupt("the map of a run of bytes is empty"));
        }
        answered_in_part += usize::from(at < rest.end());
        let is_full = folders.iter().all(|folder| folder.is_full);
        if at == span.end() || is_full || answered_in_part == MAPS_MAX {
            break;
        }
    }
    let to_the_end = at == span.end();
    statuses.extend(folders.into_iter().map(|folder| (folder.context, folder.finish(to_the_end))));
    Ok(statuses)
}

/// The runs of what is marked.
async fn marked_runs(marks: &dyn Marks, context: MetaContext, question: Question<'_>) -> Result<Vec<Run>> {
    let Question { span, runs_max, block, .. } = question;
    let most = runs_max.div_ceil(2) + 1;
    let Marked { runs, until } = marks.marked(span, most).await?;
    let mut folder = Folder::new(context, block, runs_max);
    let mut at = span.start();
    for run in &runs {
        let run = run.intersect(span);
        folder.push(run.start().bytes().saturating_sub(at.bytes()), 0);
        folder.push(run.len(), MARKED);
        at = run.end();
    }
    let until = until.min(span.end());
    if runs.len() < most {
        folder.push(until.bytes().saturating_sub(at.bytes()), 0);
        at = at.max(until);
    }
    if at == span.start() && !span.is_empty() {
        return Err(Error::corrupt("nothing is known of what is marked"));
    }
    Ok(folder.finish(at == span.end()))
}

/// The status of what is marked.
const MARKED: u32 = 1;

/// Joins statuses into runs of whole blocks.
struct Folder {
    context: MetaContext,
    block: u64,
    runs_max: usize,
    runs: Vec<Run>,
    /// A block that is not yet covered whole.
    begun: Option<Run>,
    /// One run more was begun than is allowed, so the last one is final.
    is_full: bool,
}

impl Folder {
    fn new(context: MetaContext, block: u64, runs_max: usize) -> Self {
        Self { context, block, runs_max, runs: Vec::new(), begun: None, is_full: false }
    }

    fn push(&mut self, mut len: u64, status: u32) {
        if let Some(begun) = &mut self.begun {
            let part = len.min(self.block - begun.len);
            begun.len += part;
            begun.status = self.context.joined(begun.status, status);
            len -= part;
            if begun.len < self.block {
                return;
            }
            let whole = *begun;
            self.begun = None;
            self.emit(whole);
        }
        let rest = len % self.block;
        self.emit(Run { len: len - rest, status });
        if rest > 0 {
            self.begun = Some(Run { len: rest, status });
        }
    }

    fn emit(&mut self, run: Run) {
        if run.len == 0 || self.is_full {
            return;
        }
        let has_all = self.runs.len() == self.runs_max;
        match self.runs.last_mut() {
            Some(last) if last.status == run.status => last.len += run.len,
            _ if has_all => self.is_full = true,
            _ => self.runs.push(run),
        }
    }

    fn finish(mut self, to_the_end: bool) -> Vec<Run> {
        match self.begun.take() {
            Some(begun) if to_the_end => self.emit(begun),
            // The limit of queries was reached with less than one block described.
            Some(_) if self.runs.is_empty() => {
                self.emit(Run { len: self.block, status: self.context.unknown() });
            }
            _ => {}
        }
        self.runs
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;

    use super::*;

    const H: u32 = allocation::HOLE;
    const Z: u32 = allocation::ZERO;

    fn extent(place: PlaceKind, depth: usize) -> MergedExtent<PlaceKind> {
        MergedExtent { span: GuestOffset::ZERO.span(1), place, depth }
    }

    #[test]
    fn statuses_say_what_a_place_is() {
        let cases = [
            (PlaceKind::Data, 0, 0, 1),
            (PlaceKind::Data, 3, 0, 4),
            (PlaceKind::Compressed, 1, 0, 2),
            (PlaceKind::Zero { allocated: true }, 0, Z, 1),
            (PlaceKind::Zero { allocated: true }, 1, H | Z, 2),
            (PlaceKind::Zero { allocated: false }, 0, H | Z, 1),
            (PlaceKind::Below, 2, H | Z, 0),
        ];
        for (place, depth, allocation, own_depth) in cases {
            let extent = extent(place, depth);
            assert_eq!(MetaContext::Allocation.status_of(&extent), allocation, "{extent:?}");
            assert_eq!(MetaContext::AllocationDepth.status_of(&extent), own_depth, "{extent:?}");
        }
    }

    /// Parts as `len:status`, runs in the same format.
    fn fold(
        context: MetaContext,
        block: u64,
        runs_max: usize,
        to_the_end: bool,
        parts: &[(u64, u32)],
    ) -> String {
        let mut folder = Folder::new(context, block, runs_max);
        for (len, status) in parts {
            folder.push(*len, *status);
        }
        let runs = folder.finish(to_the_end);
        runs.iter().map(|run| format!("{}:{}", run.len, run.status)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn runs_are_merged_and_cut_at_blocks() {
        let allocation = |block, parts: &[(u64, u32)]| fold(MetaContext::Allocation, block, 99, true, parts);
        assert_eq!(allocation(1, &[(5, 0), (7, 0), (3, 3)]), "12:0 3:3");
        assert_eq!(allocation(8, &[(8, 3), (16, 0), (8, 0)]), "8:3 24:0");
        assert_eq!(allocation(8, &[(4, 3), (4, 0), (8, 3)]), "8:0 8:3", "mixed: promise least");
        assert_eq!(allocation(8, &[(4, 3), (12, 2)]), "16:2", "mixed: zero but no hole");
        assert_eq!(allocation(8, &[(20, 3), (1, 0), (3, 3)]), "16:3 8:0");
        assert_eq!(allocation(8, &[(1, 3), (1, 2), (1, 3), (5, 3), (9, 0), (7, 3)]), "8:2 16:0");
        assert_eq!(allocation(8, &[(12, 3)]), "12:3", "an odd end of the disk");
        assert_eq!(allocation(8, &[(3, 1)]), "3:1");
        let depth = |parts: &[(u64, u32)]| fold(MetaContext::AllocationDepth, 8, 99, true, parts);
        assert_eq!(depth(&[(4, 3), (4, 1)]), "8:1", "some of it is near");
        assert_eq!(depth(&[(4, 0), (4, 2), (8, 2)]), "16:2");
    }

    #[test]
    fn an_answer_that_ends_early_ends_with_a_whole_block() {
        let early = |runs_max, parts: &[(u64, u32)]| fold(MetaContext::Allocation, 8, runs_max, false, parts);
        assert_eq!(early(9, &[(8, 0), (12, 3)]), "8:0 8:3");
        assert_eq!(
            early(1, &[(8, 0), (8, 3), (8, 0)]),
            "8:0",
            "one run, and what follows is not joined to it"
        );
        assert_eq!(early(2, &[(8, 0), (8, 3), (16, 3), (8, 0), (8, 3)]), "8:0 24:3");
        assert_eq!(early(9, &[(5, 3)]), "8:0", "less than a block is known");
    }

    /// Whatever the parts, the runs cover them in whole blocks and say of no byte more than its part does.
    #[test]
    fn runs_never_say_more_than_the_extents() {
        let mut random = vellum_core::Random::from_seed(11);
        for _ in 0..2_000 {
            let block = 1 << random.below(5);
            let blocks = random.below(20) + 1;
            let mut bytes: Vec<u32> = Vec::new();
            let mut parts = Vec::new();
            while (bytes.len() as u64) < block * blocks {
                let len = (random.below(2 * block) + 1).min(block * blocks - bytes.len() as u64);
                let status = *random.pick(&[0, H, Z, H | Z]);
                parts.push((len, status));
                bytes.extend((0..len).map(|_| status));
            }
            let mut folder = Folder::new(MetaContext::Allocation, block, 99);
            for (len, status) in &parts {
                folder.push(*len, *status);
            }
            let mut rest = &bytes[..];
            for run in folder.finish(true) {
                assert!(run.len > 0 && run.len.is_multiple_of(block));
                let (now, later) = rest.split_at(usize::try_from(run.len).unwrap());
                assert!(now.iter().all(|byte| byte & run.status == run.status), "{parts:?}");
                rest = later;
            }
            assert!(rest.is_empty(), "{parts:?}");
        }
    }

    #[test]
    fn queries_name_a_context_or_its_namespace() {
        let marks = |kind| Arc::new(Named(kind, Vec::new(), None)) as SharedMarks;
        let all = MetaContext::all(&[marks(MarksKind::Bitmap), marks(MarksKind::Diff)]);
        assert_eq!(all.iter().map(|(context, _)| context.id()).collect::<Vec<_>>(), [1, 2, 3, 4]);
        let matched = |query| {
            let is_matched: Vec<bool> =
                all.iter().map(|(_, name)| MetaContext::is_matched(name, query)).collect();
            <[bool; 4]>::try_from(is_matched).expect("four")
        };
        assert_eq!(matched("base:allocation"), [true, false, false, false]);
        assert_eq!(matched("base:"), [true, false, false, false]);
        assert_eq!(matched("qemu:"), [false, true, true, false]);
        assert_eq!(matched("qemu:dirty-bitmap:"), [false, false, true, false]);
        assert_eq!(matched("qemu:dirty-bitmap:daily"), [false, false, true, false]);
        for query in ["vellum:", "vellum:diff:", "vellum:diff:daily"] {
            assert_eq!(matched(query), [false, false, false, true], "{query}");
        }
        for query in [
            "",
            ":",
            "base",
            "base:alloc",
            "base:allocation ",
            "BASE:",
            "x-other:",
            "qemu:dirty-bitmap:d",
            "vellum",
            "vellum:diff",
            "vellum:diff:d",
        ] {
            assert_eq!(matched(query), [false; 4], "{query}");
        }
    }

    /// Marks with this name, `daily`: these runs, known up to there.
    struct Named(MarksKind, Vec<GuestSpan>, Option<u64>);

    impl Marks for Named {
        fn kind(&self) -> MarksKind {
            self.0
        }

        fn name(&self) -> &str {
            "daily"
        }

        fn marked(&self, span: GuestSpan, most: usize) -> LocalFuture<'_, Result<Marked>> {
            let until = self.2.map_or(span.end(), GuestOffset::new);
            let runs = self.1.iter().map(|run| run.intersect(GuestSpan::between(span.start(), until)));
            let runs: Vec<_> = runs.filter(|run| !run.is_empty()).take(most).collect();
            Box::pin(std::future::ready(Ok(Marked { runs, until })))
        }
    }

    #[test]
    fn marks_cover_what_is_known_in_whole_blocks() {
        let context = MetaContext::Marked(0);
        let told = |runs: &[(u64, u64)], until, runs_max, block| {
            let runs = runs.iter().map(|(at, len)| GuestOffset::new(*at).span(*len)).collect();
            let marks = Named(MarksKind::Diff, runs, until);
            let (span, contexts) = (GuestOffset::ZERO.span(64), Contexts::default());
            let question = Question { span, runs_max, block, contexts: &contexts, marks: &[] };
            let runs = block_on(marked_runs(&marks, context, question));
            runs.map(|runs| {
                runs.iter().map(|run| format!("{}:{}", run.len, run.status)).collect::<Vec<_>>().join(" ")
            })
        };
        assert_eq!(told(&[], None, 9, 8).unwrap(), "64:0");
        assert_eq!(
            told(&[(16, 8), (40, 4)], None, 9, 8).unwrap(),
            "16:0 8:1 16:0 8:1 16:0",
            "a part of a block"
        );
        assert_eq!(told(&[(16, 8), (40, 4)], None, 3, 8).unwrap(), "16:0 8:1 16:0", "no more runs");
        assert_eq!(told(&[(16, 8)], Some(32), 9, 8).unwrap(), "16:0 8:1 8:0", "no more is known");
        assert_eq!(told(&[(16, 8)], Some(20), 9, 8).unwrap(), "16:0", "of the last block only a part");
        assert_eq!(
            told(&[], Some(4), 9, 8).unwrap(),
            "8:1",
            "of the first block only a part: it may be marked"
        );
        assert!(told(&[], Some(0), 9, 8).is_err(), "nothing would be answered");
    }
}
