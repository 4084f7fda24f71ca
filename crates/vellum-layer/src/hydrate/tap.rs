//! The tap: it stands between an image and the disk below it, sees what is read from there, and keeps copies.
//!
//! ```text
//!   top image ── read of what it has not ──► tap ──► the disk below, or the view of those below
//!                                             ├─► widened to whole blocks, fetched once for all that wait
//!                                             └─► copies: bounded, taken by the filler (`filler`)
//! ```
//!
//! 1. A copy is made of bytes that no guest has ever had in its hands: the disk below is read into memory of our own,
//!    and the guest's buffer is filled from that.
//! 2. Several readers of a missing block fetch it once. While its copy waits for the filler, later readers
//!    get it from there.
//! 3. A read is widened to whole blocks, where these are at most [`WIDENED_MAX`]: the rest of a block would have to be
//!    fetched anyway. If a widened read fails, the guest's own bytes are read alone: a request fails only
//!    where its own bytes are concerned.
//! 4. The memory for copies is bounded, per disk and for all disks ([`CopyMemory`]). Where there is none, a read passes
//!    through as if there were no tap, and the block counts as dropped.
//! 5. A block that was found to be zero is not copied: it is remembered, within bounds, and read from memory.
//! 6. The disk below never changes while it is open, so neither copies nor known zeros become stale. Where it is found to
//!    have changed all the same ([`BaseFiles`]), reads pass as if there were no tap.
//! 7. As a `Disk` the tap is what is below it; it is only read.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use arc_swap::ArcSwapOption;
use event_listener::{Event, EventListener};
use smallvec::SmallVec;
use vellum_core::{
    BlockSize, Buffer, Disk, Error, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Result,
    SharedDisk, WriteFlags, ZeroFlags, is_zero, join_all, lock,
};

use super::base_files::BaseFiles;
use super::memory::{CopyMemory, DiskMemory, Taken};
use super::order::{Order, Run};
use super::runs::Runs;

/// Larger blocks than this are copied only where a guest reads all of one.
const WIDENED_MAX: u64 = 128 << 10;
/// How many runs of zeros are remembered.
const ZERO_RUNS_MAX: usize = 1 << 16;

/// What a tap does with what it sees.
#[derive(Debug, Clone, Default)]
pub struct TapOptions {
    /// Blocks that guests read are copied into the image.
    pub copy_on_read: bool,
    /// The order in which blocks are read first is kept.
    pub keeps_order: bool,
    /// What copies may take in memory.
    pub memory: Arc<CopyMemory>,
}

/// What the image above says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Facts {
    /// The blocks that it keeps.
    pub(super) unit: BlockSize,
    /// Neither disk has bytes from here on, or one of them has not.
    pub(super) end: GuestOffset,
}

impl Facts {
    /// The whole blocks in the span.
    pub(super) fn whole(&self, span: GuestSpan) -> GuestSpan {
        let start = self.unit.round_up(span.start().bytes());
        let end = match span.end() >= self.end {
            true => self.end.bytes(),
            false => self.unit.round_down(span.end().bytes()),
        };
        GuestSpan::between(GuestOffset::new(start.min(end)), GuestOffset::new(end))
    }

    /// The span made of whole blocks.
    pub(super) fn widened(&self, span: GuestSpan) -> GuestSpan {
        self.unit.widen(span).intersect(GuestOffset::ZERO.span(self.end.bytes()))
    }
}

/// What a tap has counted, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TapCounts {
    /// Read from below for guests, with what reads were widened by.
    pub fetched: u64,
    /// Got from a fetch of another reader, or from a copy.
    pub shared: u64,
    /// Not copied: there was no memory, or no room in the image.
    pub dropped: u64,
}

#[derive(Default)]
struct Tallies {
    fetched: AtomicU64,
    shared: AtomicU64,
    dropped: AtomicU64,
}

/// A run of bytes that is being fetched, or whose copy waits.
struct Fetch {
    span: GuestSpan,
    /// Nothing, when it failed.
    bytes: OnceLock<Option<Arc<Buffer>>>,
    done: Event,
    /// No reader finds it any more: its copy is in the image, or was dropped.
    is_gone: AtomicBool,
    gone: Event,
}

impl Fetch {
    fn of(span: GuestSpan) -> Self {
        let (bytes, is_gone) = (OnceLock::new(), AtomicBool::new(false));
        Self { span, bytes, done: Event::new(), is_gone, gone: Event::new() }
    }
}

type Fetches = Arc<Mutex<BTreeMap<u64, Arc<Fetch>>>>;

/// A fetch that readers find, until dropped.
pub(super) struct Found {
    fetches: Fetches,
    fetch: Arc<Fetch>,
}

impl Drop for Found {
    fn drop(&mut self) {
        lock(&self.fetches).remove(&self.fetch.span.start().bytes());
        // One that was dropped half way: the others read for themselves.
        if self.fetch.bytes.set(None).is_ok() {
            self.fetch.done.notify(usize::MAX);
        }
        self.fetch.is_gone.store(true, Ordering::Release);
        self.fetch.gone.notify(usize::MAX);
    }
}

/// A part of a fetch of another reader.
pub(super) struct Joined {
    pub(super) span: GuestSpan,
    fetch: Arc<Fetch>,
}

impl Joined {
    /// Completes when its copy is in the image, or was dropped.
    pub(super) async fn is_gone(&self) {
        loop {
            let gone = self.fetch.gone.listen();
            if self.fetch.is_gone.load(Ordering::Acquire) {
                return;
            }
            gone.await;
        }
    }
}

/// Who gets a part of a read.
enum Part {
    Lead(Found),
    Join(Arc<Fetch>),
}

/// Bytes of the disk below, on their way into the image.
pub(super) struct Copied {
    /// Where the bytes begin.
    at: GuestOffset,
    bytes: Arc<Buffer>,
    /// What of it is worth filling: whole blocks that are not zero.
    pub(super) keep: Vec<GuestSpan>,
    /// The length of those whole blocks of it that were found to be zero and are remembered, in bytes.
    pub(super) zero: u64,
    /// What this takes in memory.
    _taken: Arc<Taken>,
    /// Readers find it.
    _found: Found,
}

impl Copied {
    /// A copy of these bytes of it.
    pub(super) fn part(&self, span: GuestSpan) -> Buffer {
        let mut part = Buffer::for_overwrite(to_usize(span.len()));
        copy(&mut part, span, &self.bytes, self.at);
        part
    }
}

/// See the module.
pub struct Tap {
    inner: SharedDisk,
    files: Arc<BaseFiles>,
    options: TapOptions,
    facts: ArcSwapOption<Facts>,
    fetches: Fetches,
    copies: Mutex<VecDeque<Copied>>,
    /// What the copies of this disk may still take.
    memory: Arc<DiskMemory>,
    came: Event,
    zeros: Mutex<Runs>,
    knows_zeros: AtomicBool,
    order: Mutex<Order>,
    /// Reads of guests that are under way.
    reading: AtomicUsize,
    /// Fetches of the prefetcher that are under way, or whose copies wait.
    fetching: AtomicUsize,
    tallies: Tallies,
}

/// One more of what is counted, until dropped.
pub(super) struct Reading<'a>(&'a AtomicUsize);

impl<'a> Reading<'a> {
    pub(super) fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Tap {
    /// Over this disk, which is made of these files.
    pub(crate) fn over(inner: SharedDisk, files: Arc<BaseFiles>, options: TapOptions) -> Arc<Self> {
        let memory = Arc::new(DiskMemory::of(&options.memory));
        Arc::new(Self {
            inner,
            files,
            options,
            facts: ArcSwapOption::empty(),
            fetches: Fetches::default(),
            copies: Mutex::default(),
            memory,
            came: Event::new(),
            zeros: Mutex::new(Runs::with_room_for(ZERO_RUNS_MAX)),
            knows_zeros: AtomicBool::new(false),
            order: Mutex::default(),
            reading: AtomicUsize::new(0),
            fetching: AtomicUsize::new(0),
            tallies: Tallies::default(),
        })
    }

    /// The image above is open: from now on what it can keep is copied. False if it takes no copies.
    pub(crate) fn is_below(&self, top: &dyn Disk) -> bool {
        let end = GuestOffset::new(top.geometry().size.min(self.inner.geometry().size));
        let facts = top.filling().map(|filling| Arc::new(Facts { unit: filling.unit, end }));
        let takes_copies = facts.is_some();
        self.facts.store(facts);
        takes_copies
    }

    /// What the image above keeps, once it is open.
    pub(super) fn facts(&self) -> Option<Facts> {
        self.facts.load().as_deref().copied()
    }

    /// The disk below.
    pub(super) fn inner(&self) -> &SharedDisk {
        &self.inner
    }

    /// Makes sure that what was read from below is still what it was when this disk was opened.
    ///
    /// # Errors
    /// `Changed` when it is not, and those of the host.
    pub(super) async fn check_below(&self) -> Result<()> {
        self.files.check().await
    }

    /// How what is below has changed since, if that was found.
    pub fn changed_below(&self) -> Option<&Error> {
        self.files.changed()
    }

    /// What was counted.
    pub fn counts(&self) -> TapCounts {
        TapCounts {
            fetched: self.tallies.fetched.load(Ordering::Relaxed),
            shared: self.tallies.shared.load(Ordering::Relaxed),
            dropped: self.tallies.dropped.load(Ordering::Relaxed),
        }
    }

    /// Bytes were not copied after all.
    pub(super) fn count_dropped(&self, bytes: u64) {
        self.tallies.dropped.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The runs in the order in which they were read first, and whether that is all of them.
    pub fn order(&self) -> (Vec<Run>, bool) {
        lock(&self.order).runs()
    }

    /// Whether blocks that guests read are copied.
    pub fn copies_on_read(&self) -> bool {
        self.options.copy_on_read
    }

    /// Whether the order in which blocks are read is kept.
    pub fn keeps_order(&self) -> bool {
        self.options.keeps_order
    }

    /// Guests share what is fetched until this is dropped, also where their reads are not copied.
    pub(super) fn share_fetches(&self) -> Reading<'_> {
        Reading::begin(&self.fetching)
    }

    /// Whether a guest waits for the disk below.
    pub(super) fn is_read(&self) -> bool {
        self.reading.load(Ordering::Acquire) > 0
    }

    /// The next copy.
    pub(super) fn take_copy(&self) -> Option<Copied> {
        lock(&self.copies).pop_front()
    }

    /// No copy is kept any more.
    pub(super) fn drop_copies(&self) {
        let copies = std::mem::take(&mut *lock(&self.copies));
        for copied in copies {
            self.count_dropped(copied.keep.iter().map(|span| span.len()).sum());
        }
    }

    /// Completes when a copy has come since.
    pub(super) fn next_copy(&self) -> EventListener {
        self.came.listen()
    }

    /// The parts of the span that are not known to be zero.
    pub(super) fn not_known_zero(&self, span: GuestSpan) -> Vec<GuestSpan> {
        lock(&self.zeros).missing_in(span)
    }

    fn is_known_zero(&self, span: GuestSpan) -> bool {
        self.knows_zeros.load(Ordering::Acquire) && lock(&self.zeros).has_all(span)
    }

    /// Fetches whole blocks for the prefetcher. Guests that miss them meanwhile get them from here. What another reader
    /// fetches, or has fetched, is that one's to copy.
    pub(super) async fn fetch(
        &self,
        span: GuestSpan,
        taken: &Arc<Taken>,
    ) -> Result<(Vec<Copied>, Vec<Joined>)> {
        let (mut copies, mut joined) = (Vec::new(), Vec::new());
        for (part, who) in self.parts(span) {
            match who {
                Part::Lead(found) => {
                    let bytes = self.fetched(part, &found).await?;
                    copies.push(self.copied(part.start(), bytes, taken.clone(), found));
                }
                Part::Join(fetch) => joined.push(Joined { span: part, fetch }),
            }
        }
        Ok((copies, joined))
    }

    async fn read_and_keep(
        &self,
        span: GuestSpan,
        wide: GuestSpan,
        mut buffer: Buffer,
        taken: Arc<Taken>,
    ) -> Result<Buffer> {
        let parts = self.parts(wide);
        let joined = parts.iter().filter(|(_, who)| matches!(who, Part::Join(_)));
        let shared = joined.map(|(part, _)| part.intersect(span).len()).sum();
        self.tallies.shared.fetch_add(shared, Ordering::Relaxed);
        let got = join_all(parts.into_iter().map(|(part, who)| {
            let taken = taken.clone();
            Box::pin(async move { (part, self.obtained(part, who, taken).await) })
        }));
        for (part, bytes) in got.await {
            let wanted = part.intersect(span);
            if wanted.is_empty() {
                continue;
            }
            match bytes {
                Some((at, bytes)) => copy_into(&mut buffer, span.start(), wanted, &bytes, at),
                None => {
                    let alone = Buffer::for_overwrite(to_usize(wanted.len()));
                    let alone = self.inner.read(wanted.start(), alone).await?;
                    copy_into(&mut buffer, span.start(), wanted, &alone, wanted.start());
                }
            }
        }
        Ok(buffer)
    }

    /// The bytes of a part, and where they begin; `None` when they could not be read.
    async fn obtained(
        &self,
        part: GuestSpan,
        who: Part,
        taken: Arc<Taken>,
    ) -> Option<(GuestOffset, Arc<Buffer>)> {
        match who {
            Part::Join(fetch) => Some((fetch.span.start(), awaited(&fetch).await?)),
            Part::Lead(found) => {
                let bytes = self.fetched(part, &found).await.ok()?;
                let copied = self.copied(part.start(), bytes.clone(), taken, found);
                if self.options.copy_on_read && !copied.keep.is_empty() {
                    lock(&self.copies).push_back(copied);
                    self.came.notify(usize::MAX);
                }
                Some((part.start(), bytes))
            }
        }
    }

    /// Reads a run from below, for all that wait for it.
    async fn fetched(&self, span: GuestSpan, found: &Found) -> Result<Arc<Buffer>> {
        let bytes = Buffer::for_overwrite(to_usize(span.len()));
        let bytes = Arc::new(self.inner.read(span.start(), bytes).await?);
        self.tallies.fetched.fetch_add(span.len(), Ordering::Relaxed);
        let _ = found.fetch.bytes.set(Some(bytes.clone()));
        found.fetch.done.notify(usize::MAX);
        Ok(bytes)
    }

    /// The copy that was fetched. Blocks of zero are remembered and not kept.
    fn copied(&self, at: GuestOffset, bytes: Arc<Buffer>, taken: Arc<Taken>, found: Found) -> Copied {
        let (mut keep, mut zero): (Vec<GuestSpan>, u64) = (Vec::new(), 0);
        let Some(facts) = self.facts() else {
            return Copied { at, bytes, keep, zero, _taken: taken, _found: found };
        };
        for block in facts.unit.pieces_of(facts.whole(at.span(bytes.len() as u64))) {
            let is_zero = part_is_zero(&bytes, to_usize(block.start() - at), to_usize(block.len()));
            if is_zero && lock(&self.zeros).insert(block) {
                self.knows_zeros.store(true, Ordering::Release);
                zero += block.len();
                continue;
            }
            match keep.last_mut() {
                Some(last) if last.end() == block.start() => {
                    *last = GuestSpan::between(last.start(), block.end());
                }
                _ => keep.push(block),
            }
        }
        Copied { at, bytes, keep, zero, _taken: taken, _found: found }
    }

    /// Divides a span among fetches in progress and new ones.
    fn parts(&self, wide: GuestSpan) -> SmallVec<[(GuestSpan, Part); 2]> {
        let mut fetches = lock(&self.fetches);
        let mut parts = SmallVec::new();
        let (mut at, end) = (wide.start(), wide.end());
        while at < end {
            let before = fetches.range(..=at.bytes()).next_back().map(|(_, fetch)| fetch.clone());
            if let Some(fetch) = before.filter(|fetch| fetch.span.end() > at) {
                let part = GuestSpan::between(at, fetch.span.end().min(end));
                at = part.end();
                parts.push((part, Part::Join(fetch)));
                continue;
            }
            let next = fetches
                .range(at.bytes()..)
                .next()
                .map_or(end, |(start, _)| GuestOffset::new(*start).min(end));
            let span = GuestSpan::between(at, next);
            let fetch = Arc::new(Fetch::of(span));
            fetches.insert(at.bytes(), fetch.clone());
            parts.push((span, Part::Lead(Found { fetches: self.fetches.clone(), fetch })));
            at = next;
        }
        parts
    }

    /// Memory for a copy.
    pub(super) fn memory(&self, bytes: u64) -> Option<Arc<Taken>> {
        self.memory.take(bytes).map(Arc::new)
    }
}

/// Waits for the fetch of another reader. `None` when that has failed.
async fn awaited(fetch: &Fetch) -> Option<Arc<Buffer>> {
    loop {
        let done = fetch.done.listen();
        if let Some(bytes) = fetch.bytes.get() {
            return bytes.clone();
        }
        done.await;
    }
}

fn part_is_zero(bytes: &Buffer, start: usize, len: usize) -> bool {
    let mut at = 0;
    bytes.pieces().all(|piece| {
        let from = start.clamp(at, at + piece.len()) - at;
        let to = (start + len).clamp(at, at + piece.len()) - at;
        at += piece.len();
        is_zero(&piece[from..to])
    })
}

/// Copies `wanted` into the buffer, which begins at `start` of the disk, from bytes that begin at `at`.
fn copy_into(buffer: &mut Buffer, start: GuestOffset, wanted: GuestSpan, bytes: &Buffer, at: GuestOffset) {
    let mut from = at;
    for piece in bytes.pieces() {
        let part = from.span(piece.len() as u64).intersect(wanted);
        if !part.is_empty() {
            let skip = to_usize(part.start() - from);
            let its = &piece[skip..skip + to_usize(part.len())];
            buffer.copy_from(to_usize(part.start() - start), its);
        }
        from += piece.len() as u64;
    }
}

/// Fills a buffer with the bytes of this span.
fn copy(buffer: &mut Buffer, span: GuestSpan, bytes: &Buffer, at: GuestOffset) {
    copy_into(buffer, span.start(), span, bytes, at);
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a request fits in memory")
}

impl Disk for Tap {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        let Some(span) = GuestSpan::checked(at, buffer.len() as u64) else {
            return self.inner.read(at, buffer);
        };
        if self.options.keeps_order && !span.is_empty() {
            lock(&self.order).note(span);
        }
        let facts = self.facts().filter(|_| self.files.changed().is_none());
        let Some(facts) = facts else { return self.inner.read(at, buffer) };
        if span.is_empty() || span.end() > facts.end {
            return self.inner.read(at, buffer);
        }
        if self.is_known_zero(span) {
            buffer.fill(0);
            return Box::pin(std::future::ready(Ok(buffer)));
        }
        let wide = match facts.unit.bytes() <= WIDENED_MAX {
            true => facts.widened(span),
            false => span,
        };
        // Where nothing is copied, what the prefetcher is fetching is shared all the same.
        let shares = self.options.copy_on_read || self.fetching.load(Ordering::Acquire) > 0;
        let wide = if self.options.copy_on_read { wide } else { span };
        let taken = if shares { self.memory(wide.len()) } else { None };
        Box::pin(async move {
            let _reading = Reading::begin(&self.reading);
            if let Some(taken) = taken {
                return self.read_and_keep(span, wide, buffer, taken).await;
            }
            if self.options.copy_on_read {
                self.count_dropped(facts.whole(wide).len());
            }
            self.tallies.fetched.fetch_add(span.len(), Ordering::Relaxed);
            self.inner.read(at, buffer).await
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.inner.write(at, data, flags)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.inner.write_zeroes(span, flags)
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.inner.discard(span, flags)
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.inner.map(span)
    }

    /// The disk below is closed by its chain.
    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
