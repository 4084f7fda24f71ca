//! Copying one disk to another, and comparing two: the basis of conversion, comparison and migration.
//!
//! Both walk the disks in pieces, several at a time, and skip ranges that are zero according to the map.
//! Neither prints: progress, in bytes, goes to the caller, and a request to stop is obeyed between two
//! pieces.
//!
//! 1. A piece that failed stops the copy; pieces in flight are finished first, so nothing is written after
//!    the function has returned. A request to stop does not wait for reads.
//! 2. Zeros are not written to a target that reads as zero already.
//! 3. The target is flushed before the copy counts as done.
//! 4. Into a target that compresses, whole blocks of it are copied. They are compressed where long computations run,
//!    several pieces at a time, and written many at a time, so that they lie close together.
//! 5. What the target reads as already is not written, where that is asked for: the target is read, and compared.
//! 6. By default pieces are read several at a time, and their writes begin one after the other, in the order of the disk: a
//!    format that allocates on write then lays the copy out in that order. Where writes overlap, what has begun need not have
//!    ended before the next begins, but for the very first write, which marks the target as in use and lays out what comes with
//!    that; of a piece that is cut into many runs the first ones count.
//! 7. A copy has at most `pieces_at_once` pieces in memory, and where it compresses as many batches of compressed data.

mod compared;
pub(crate) mod differing;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

use futures_lite::future::{or, poll_once};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, GuestOffset, GuestSpan, LocalFuture, Place, Result,
    SharedDisk, WriteFlags, ZeroFlags, is_zero, map_merged,
};
use vellum_format::image::{BlockContent, Compressing, PackedBlock};
use vellum_io::clock;

pub use compared::{Comparison, compare, compare_strictly};
use differing::{RUNS_AT_ONCE, differences, write_runs};

/// Bytes copied as one piece. No cluster that is compressed is larger.
const PIECE: BlockSize = BlockSize::from_shift(21);

/// The same into the page cache: a piece stays in the caches of the processor, and the kernel takes memory for it in smaller parts,
/// of which it nearly always has some at hand.
const SMALL_PIECE: BlockSize = BlockSize::from_shift(18);

/// Compressed data is written when there is this much of it, in bytes: all of it lies together, and what is left of its
/// last cluster stays free.
const BATCH_BYTES: usize = 8 << 20;

/// Or when there are this many blocks, because all of them are claimed at once.
const BATCH_BLOCKS: usize = 4096;

/// How often a read that takes long is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How a copy is done.
#[derive(Clone, Copy)]
pub struct CopyOptions<'a> {
    /// Pieces in flight at once, at least one.
    pub pieces_at_once: usize,
    /// Runs of zeros at least this long are not written; zero writes everything, holes too.
    pub sparse_bytes: u64,
    /// The target reads as zero already.
    pub target_is_zero: bool,
    /// Only what reads differently in the target is written.
    pub skips_same: bool,
    /// Pieces may be written in any order.
    pub out_of_order: bool,
    /// Pieces that are written in order need not end in order. A device has always something to do then, and so has the kernel's
    /// thread that copies to the page cache.
    pub overlaps: bool,
    /// What says where a piece belongs is looked up before its write begins. A target that gives a write its place in the image is
    /// not to read its tables between that and the next write.
    pub looks_up: bool,
    /// Pieces are small, as is best for the page cache.
    pub in_small_pieces: bool,
    /// Data is compressed by this, which is the target's own.
    pub compression: Option<CopyCompression<'a>>,
    /// Write at most this many bytes a second, zeros not counted.
    pub rate: Option<u64>,
    /// Set from outside to stop between two pieces.
    pub stop: &'a AtomicBool,
}

/// How the data of a copy is compressed.
#[derive(Clone, Copy)]
pub struct CopyCompression<'a> {
    /// What compresses it and writes it to the target.
    pub target: &'a dyn Compressing,
    /// From fast to small; what is usual, when not given.
    pub level: Option<i32>,
}

impl CopyOptions<'_> {
    fn runs_at_once(&self) -> usize {
        if self.overlaps { RUNS_AT_ONCE } else { 1 }
    }
}

/// Copies all of `source` to the front of `target`, which is at least as long. `progress` gets the bytes
/// done.
///
/// # Errors
/// What reading and writing say; `Closed` when it was stopped.
pub async fn copy(
    source: &SharedDisk,
    target: &SharedDisk,
    options: CopyOptions<'_>,
    progress: &dyn Fn(u64),
) -> Result<()> {
    let size = source.geometry().size;
    let queue = Queue::default();
    let batch = Batch::default();
    let pacer = Pacer::new(options.rate);
    let piece = |piece: Piece| {
        // Taken here, where pieces come in order, and not when the work is first polled.
        let place = (!options.out_of_order).then(|| queue.join(options.overlaps));
        let (batch, pacer) = (&batch, &pacer);
        async move {
            if !piece.is_zero {
                or(pacer.pace(piece.span.len()), stopped(options.stop)).await?;
            }
            match options.compression {
                Some(compression) => {
                    compress_piece(source, target, piece, options, compression, place, batch).await
                }
                None => copy_piece(source, target, piece, options, place).await,
            }
        }
    };
    let unit = options.compression.map_or(ANY_UNIT, |compression| compression.target.block());
    let all = GuestOffset::ZERO.span(size);
    let most = match options.in_small_pieces {
        // None is a part of a cluster.
        true => SMALL_PIECE.max(target.geometry().preferred_size).min(PIECE),
        false => PIECE,
    };
    let cut = Cut { unit, most: most.max(unit) };
    in_pieces(&[source], all, cut, options.pieces_at_once, options.stop, progress, piece).await?;
    if let Some(compression) = options.compression {
        batch.write(compression.target).await?;
    }
    target.flush().await.context(|| "can't flush the copy")
}

async fn copy_piece(
    source: &SharedDisk,
    target: &SharedDisk,
    piece: Piece,
    options: CopyOptions<'_>,
    place: Option<QueuePlace<'_>>,
) -> Result<Option<GuestOffset>> {
    let span = piece.span;
    let turn = async || {
        let Some(place) = &place else { return Ok(()) };
        place.comes().await;
        match options.looks_up {
            true => target.map(span).await.map(drop),
            false => Ok(()),
        }
    };
    if options.skips_same {
        // Whole blocks of the target, so that none of them is filled from below.
        let unit = target.geometry().preferred_size;
        let runs = or(differences(source, target, piece, unit), stopped(options.stop)).await?;
        turn().await?;
        return begun_in_turn(place, write_runs(target, runs, options.runs_at_once())).await.map(|()| None);
    }
    if piece.is_zero && options.sparse_bytes == 0 {
        turn().await?;
        return write_zeros_as_data(target, span, options.stop).await;
    }
    if piece.is_zero {
        if !options.target_is_zero {
            turn().await?;
            let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
            target
                .write_zeroes(span, flags)
                .await
                .context(|| format!("can't write zeros at {}", span.start()))?;
        }
        return Ok(None);
    }
    let data = or(read_piece(source, span), stopped(options.stop)).await?;
    let mut runs = cut_zeros(span, data, options.sparse_bytes);
    runs.retain(|(_, data)| data.is_some() || !options.target_is_zero);
    turn().await?;
    begun_in_turn(place, write_runs(target, runs, options.runs_at_once())).await.map(|()| None)
}

/// Does the work, and lets the next member of the queue act as soon as it has begun.
async fn begun_in_turn<T>(place: Option<QueuePlace<'_>>, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    let Some(place) = place else { return work.await };
    if place.overlaps() {
        let begun = poll_once(work.as_mut()).await;
        drop(place);
        if let Some(done) = begun {
            return done;
        }
    }
    work.await
}

/// Holds data back, so that no more of it passes in a second than is allowed.
struct Pacer {
    rate: Option<u64>,
    begun: Duration,
    passed: Cell<u64>,
}

impl Pacer {
    fn new(rate: Option<u64>) -> Self {
        Self { rate, begun: clock().now(), passed: Cell::new(0) }
    }

    async fn pace(&self, bytes: u64) -> Result<()> {
        let Some(rate) = self.rate else { return Ok(()) };
        let before = self.passed.replace(self.passed.get().saturating_add(bytes));
        let nanos = u128::from(before) * 1_000_000_000 / u128::from(rate.max(1));
        let due = self.begun + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let wait = due.saturating_sub(clock().now());
        if !wait.is_zero() {
            clock().sleep(wait).await;
        }
        Ok(())
    }
}

/// Compressed blocks that are not written yet.
#[derive(Default)]
struct Batch(RefCell<(Vec<PackedBlock>, usize)>);

impl Batch {
    /// Adds one. Returns whether the batch should be written now.
    fn add(&self, block: PackedBlock) -> bool {
        let mut batch = self.0.borrow_mut();
        batch.1 += match &block.content {
            BlockContent::Compressed(bytes) => bytes.len(),
            BlockContent::Plain(data) => data.len(),
        };
        batch.0.push(block);
        batch.1 >= BATCH_BYTES || batch.0.len() >= BATCH_BLOCKS
    }

    /// Adds them. What is full then is written by the future.
    fn add_all<'a>(
        &self,
        blocks: Vec<PackedBlock>,
        target: &'a dyn Compressing,
    ) -> impl Future<Output = Result<()>> + use<'a> {
        let mut full = Vec::new();
        for block in blocks {
            if self.add(block) {
                full.push(self.0.take().0);
            }
        }
        async move {
            for blocks in full {
                Self::write_all(blocks, target).await?;
            }
            Ok(())
        }
    }

    /// Writes what is left.
    async fn write(&self, target: &dyn Compressing) -> Result<()> {
        let (blocks, _) = self.0.take();
        Self::write_all(blocks, target).await
    }

    async fn write_all(blocks: Vec<PackedBlock>, target: &dyn Compressing) -> Result<()> {
        match blocks.first().map(|block| block.at) {
            None => Ok(()),
            Some(at) => target
                .write_compressed(blocks)
                .await
                .context(|| format!("can't write compressed data from {at} on")),
        }
    }
}

/// As [`copy_piece`], compressed. The piece has whole blocks of the target.
async fn compress_piece(
    source: &SharedDisk,
    target: &SharedDisk,
    piece: Piece,
    options: CopyOptions<'_>,
    compression: CopyCompression<'_>,
    place: Option<QueuePlace<'_>>,
    batch: &Batch,
) -> Result<Option<GuestOffset>> {
    if piece.is_zero && options.sparse_bytes > 0 {
        return copy_piece(source, target, piece, options, place).await;
    }
    let mut packed = Vec::new();
    let mut zeros: Vec<GuestSpan> = Vec::new();
    // A run of zeros that is to be written as data may be long. It is not kept in memory.
    let is_long = piece.is_zero;
    if let Some(place) = place.as_ref().filter(|_| is_long) {
        place.comes().await;
    }
    for part in PIECE.pieces_of(piece.span) {
        let mut data = or(read_piece(source, part), stopped(options.stop)).await?;
        let mut blocks = Vec::new();
        for block in compression.target.block().pieces_of(part) {
            let bytes = data.split_to(usize::try_from(block.len()).expect("a piece is small")).contiguous();
            match options.sparse_bytes > 0 && is_zero(bytes.slice()) {
                true => zeros.push(block),
                false => blocks.push((block.start(), bytes)),
            }
        }
        packed.extend(compression.target.compress(blocks, compression.level).await?);
        if is_long {
            batch.add_all(std::mem::take(&mut packed), compression.target).await?;
        }
    }
    if let Some(place) = &place {
        place.comes().await;
    }
    let write = batch.add_all(packed, compression.target);
    if options.target_is_zero {
        zeros.clear();
    }
    let zeros = zeros.into_iter().map(|span| (span, None)).collect();
    begun_in_turn(place, async move {
        write.await?;
        write_runs(target, zeros, options.runs_at_once()).await
    })
    .await
    .map(|()| None)
}

/// The members act one after the other, in the order in which they joined.
#[derive(Default)]
struct Queue {
    joined: Cell<u64>,
    /// Which of them it is.
    turn: Cell<u64>,
    /// The members that left before it was their turn.
    gone: RefCell<BTreeSet<u64>>,
    waiting: RefCell<BTreeMap<u64, Waker>>,
    /// Whether one of them has acted, so that those that may overlap do.
    has_acted: Cell<bool>,
}

/// A place in a queue; when it is dropped the next one acts.
struct QueuePlace<'a> {
    queue: &'a Queue,
    number: u64,
    may_overlap: bool,
}

impl Queue {
    fn join(&self, may_overlap: bool) -> QueuePlace<'_> {
        let number = self.joined.get();
        self.joined.set(number + 1);
        QueuePlace { queue: self, number, may_overlap }
    }

    fn leave(&self, number: u64) {
        self.gone.borrow_mut().insert(number);
        while self.gone.borrow_mut().remove(&self.turn.get()) {
            self.turn.set(self.turn.get() + 1);
        }
        if let Some(waker) = self.waiting.borrow_mut().remove(&self.turn.get()) {
            waker.wake();
        }
    }
}

impl QueuePlace<'_> {
    /// Waits until all members that joined earlier have left.
    async fn comes(&self) {
        poll_fn(|context| {
            if self.queue.turn.get() == self.number {
                return Poll::Ready(());
            }
            self.queue.waiting.borrow_mut().insert(self.number, context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Whether the next one may act while this one is still at work. The first that asks is to be alone.
    fn overlaps(&self) -> bool {
        self.queue.has_acted.replace(true) && self.may_overlap
    }
}

impl Drop for QueuePlace<'_> {
    fn drop(&mut self) {
        self.queue.waiting.borrow_mut().remove(&self.number);
        self.queue.leave(self.number);
    }
}

async fn write_zeros_as_data(
    target: &SharedDisk,
    span: GuestSpan,
    stop: &AtomicBool,
) -> Result<Option<GuestOffset>> {
    for part in BlockSize::from_shift(20).pieces_of(span) {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "stopped by a signal"));
        }
        let len = usize::try_from(part.len()).expect("a mebibyte");
        let context = || format!("can't write {len} bytes at {}", part.start());
        target.write(part.start(), Buffer::zeroed(len), WriteFlags::default()).await.context(context)?;
    }
    Ok(None)
}

/// Ends, with an error, soon after the flag was raised: reading of a disk that does not answer is given up then.
async fn stopped<T>(stop: &AtomicBool) -> Result<T> {
    while !stop.load(Ordering::Relaxed) {
        clock().sleep(LOOK_EVERY).await;
    }
    Err(Error::new(ErrorKind::Closed, "stopped by a signal"))
}

async fn read_piece(disk: &SharedDisk, span: GuestSpan) -> Result<Buffer> {
    let len = usize::try_from(span.len()).expect("a piece is small");
    let context = || format!("can't read {len} bytes at {}", span.start());
    disk.read(span.start(), Buffer::for_overwrite(len)).await.context(context)
}

/// Cuts data into runs that are to be written and runs of zeros that need not be.
fn cut_zeros(span: GuestSpan, data: Buffer, sparse_bytes: u64) -> Vec<(GuestSpan, Option<Buffer>)> {
    if sparse_bytes == 0 {
        return vec![(span, Some(data))];
    }
    let unit = BlockSize::from_bytes(sparse_bytes.next_power_of_two()).expect("a power of two");
    let mut data = data.contiguous();
    let mut runs: Vec<(GuestSpan, bool)> = Vec::new();
    let mut at = 0;
    for part in unit.pieces_of(span) {
        let len = usize::try_from(part.len()).expect("a piece is small");
        let zero = is_zero(&data.slice()[at..at + len]);
        at += len;
        match runs.last_mut() {
            Some((last, same)) if *same == zero => *last = GuestSpan::between(last.start(), part.end()),
            _ => runs.push((part, zero)),
        }
    }
    runs.into_iter()
        .map(|(run, zero)| {
            let part = data.split_to(usize::try_from(run.len()).expect("a piece is small"));
            (run, (!zero).then_some(part))
        })
        .collect()
}

/// Finds where a disk reads as zero, in units of `unit` bytes: the runs in order, neighbours merged.
/// `progress` gets the bytes done.
///
/// # Errors
/// The errors of reading; `Closed` when it was stopped.
pub async fn find_zeros(
    disk: &SharedDisk,
    unit: u64,
    pieces_at_once: usize,
    stop: &AtomicBool,
    progress: &dyn Fn(u64),
) -> Result<Vec<GuestSpan>> {
    let all = GuestOffset::ZERO.span(disk.geometry().size);
    let found: RefCell<BTreeMap<GuestOffset, GuestSpan>> = RefCell::default();
    let piece = async |piece: Piece| {
        let runs = match piece.is_zero {
            true => vec![(piece.span, None)],
            false => cut_zeros(piece.span, read_piece(disk, piece.span).await?, unit),
        };
        let zeros = runs.into_iter().filter(|(_, data)| data.is_none());
        found.borrow_mut().extend(zeros.map(|(span, _)| (span.start(), span)));
        Ok(None)
    };
    in_pieces(&[disk], all, Cut::at_most(PIECE), pieces_at_once, stop, progress, piece).await?;
    let mut merged: Vec<GuestSpan> = Vec::new();
    for span in found.into_inner().into_values() {
        match merged.last_mut().filter(|last| last.end() == span.start()) {
            Some(last) => *last = GuestSpan::between(last.start(), span.end()),
            None => merged.push(span),
        }
    }
    let unit = BlockSize::from_bytes(unit).expect("a power of two");
    let end = all.end();
    let whole = |span: GuestSpan| {
        let last = if span.end() == end { end } else { unit.narrow(span).end() };
        let first = GuestOffset::new(unit.round_up(span.start().bytes()));
        (first < last).then(|| GuestSpan::between(first, last))
    };
    Ok(merged.into_iter().filter_map(whole).collect())
}

/// A run of the disk that is handled at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) span: GuestSpan,
    /// By the maps of all disks it reads as zero.
    pub(crate) is_zero: bool,
}

/// How a disk is cut into pieces.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// All but the last begin and end at multiples of this.
    unit: BlockSize,
    /// What must be read has at most this many bytes.
    most: BlockSize,
}

/// Pieces may begin and end anywhere.
const ANY_UNIT: BlockSize = BlockSize::from_shift(0);

impl Cut {
    /// Pieces of so many bytes, which may begin and end anywhere.
    const fn at_most(most: BlockSize) -> Self {
        Self { unit: ANY_UNIT, most }
    }
}

/// Walks the run in pieces, several at a time. Stops at the first error, and at the lowest piece for which `act` returns a
/// value, which is the result.
async fn in_pieces<'a, F>(
    disks: &[&SharedDisk],
    span: GuestSpan,
    cut: Cut,
    at_once: usize,
    stop: &AtomicBool,
    progress: &dyn Fn(u64),
    act: impl Fn(Piece) -> F,
) -> Result<Option<GuestOffset>>
where
    F: Future<Output = Result<Option<GuestOffset>>> + 'a,
{
    let mut running: FuturesUnordered<LocalFuture<'_, (u64, Result<Option<GuestOffset>>)>> =
        FuturesUnordered::new();
    let mut rest = span;
    let mut known: Vec<(GuestSpan, bool)> = Vec::new();
    let mut outcome: Result<Option<GuestOffset>> = Ok(None);
    let mut done = 0;
    loop {
        let goes_on = matches!(outcome, Ok(None)) && !stop.load(Ordering::Relaxed);
        while goes_on && running.len() < at_once.max(1) && !rest.is_empty() {
            let piece = match next_piece(disks, rest, cut, &mut known).await {
                Ok(piece) => piece,
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            };
            rest = GuestSpan::between(piece.span.end(), rest.end());
            let work = act(piece);
            running.push(Box::pin(async move { (piece.span.len(), work.await) }));
        }
        let Some((len, result)) = running.next().await else { break };
        done += len;
        progress(done);
        outcome = match (outcome, result) {
            (Ok(Some(a)), Ok(Some(b))) => Ok(Some(a.min(b))),
            (Ok(None), result) => result,
            (outcome, _) => outcome,
        };
    }
    if stop.load(Ordering::Relaxed) && !rest.is_empty() && outcome.is_ok() {
        return Err(Error::new(ErrorKind::Closed, "stopped before the end"));
    }
    outcome
}

/// The next piece of the run: as much of it as is in one kind.
async fn next_piece(
    disks: &[&SharedDisk],
    rest: GuestSpan,
    cut: Cut,
    known: &mut Vec<(GuestSpan, bool)>,
) -> Result<Piece> {
    if known.is_empty() {
        *known = in_units(zero_runs(disks, rest).await?, cut.unit, rest.end());
        known.reverse();
    }
    let (run, is_zero) = known.pop().expect("a map is not empty");
    let longest = if is_zero { u64::MAX } else { cut.most.bytes() - cut.most.within(run.start()) };
    let (span, later) = run.split_at(longest);
    if !later.is_empty() {
        known.push((later, is_zero));
    }
    Ok(Piece { span, is_zero })
}

/// The same runs, but each of them begins and ends at multiples of the unit, or with the disk: a unit is zero if all of
/// it is. What is left at the end may be asked for again.
pub(crate) fn in_units(
    runs: Vec<(GuestSpan, bool)>,
    unit: BlockSize,
    end: GuestOffset,
) -> Vec<(GuestSpan, bool)> {
    let Some((first, _)) = runs.first().copied() else { return runs };
    let up = |at: GuestOffset| GuestOffset::new(unit.round_up(at.bytes())).min(end);
    let mut units: Vec<(GuestSpan, bool)> = Vec::new();
    let mut at = first.start();
    for (run, zero) in runs {
        // A run of zeros begins where a unit does, and data ends where one does.
        let (start, stop) = match zero {
            true if run.end() == end => (up(run.start()), end),
            true => (up(run.start()), GuestOffset::new(unit.round_down(run.end().bytes()))),
            false => (run.start(), up(run.end())),
        };
        if stop <= at || start >= stop {
            continue;
        }
        let mut add = |to: GuestOffset, zero: bool| {
            if to > at {
                match units.last_mut() {
                    Some((last, same)) if *same == zero => *last = GuestSpan::between(last.start(), to),
                    _ => units.push((GuestSpan::between(at, to), zero)),
                }
                at = to;
            }
        };
        if zero {
            add(start, false);
        }
        add(stop, zero);
    }
    if units.is_empty() {
        units.push((GuestSpan::between(at, up(at + 1)), false));
    }
    units
}

/// Which parts of the run read as zero on all disks, from its start. Stops early where an answer does.
pub(crate) async fn zero_runs(disks: &[&SharedDisk], span: GuestSpan) -> Result<Vec<(GuestSpan, bool)>> {
    let mut runs = vec![(span, true)];
    for disk in disks {
        let extents = map_merged(disk, span).await?;
        let covered = extents.last().map_or(span.start(), |extent| extent.span.end());
        let span = GuestSpan::between(span.start(), covered);
        let mut merged: Vec<(GuestSpan, bool)> = Vec::new();
        for (run, zero) in runs {
            for extent in &extents {
                let part = run.intersect(extent.span).intersect(span);
                if part.is_empty() {
                    continue;
                }
                let zero = zero && matches!(extent.place, Place::Zero { .. } | Place::Below);
                match merged.last_mut() {
                    Some((last, same)) if *same == zero => {
                        *last = GuestSpan::between(last.start(), part.end())
                    }
                    _ => merged.push((part, zero)),
                }
            }
        }
        runs = merged;
    }
    Ok(runs)
}

#[cfg(test)]
mod tests;
