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
//! 6. By default pieces are read several at a time and written one after the other, in the order of the disk:
//!    a format that allocates on write then lays the copy out in that order.

mod compared;
mod differing;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, Waker};
use std::time::Duration;

use futures_lite::future::or;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, GuestOffset, GuestSpan, LocalFuture, Place, Result,
    SharedDisk, WriteFlags, ZeroFlags, is_zero, map_merged,
};
use vellum_format::image::{BlockContent, Compressing, PackedBlock};
use vellum_io::clock;

pub use compared::{Comparison, compare, compare_strictly};
use differing::{differences, write_runs};

/// Bytes copied as one piece. No cluster that is compressed is larger.
const PIECE: u64 = 2 << 20;

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
        let place = (!options.out_of_order).then(|| queue.join());
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
    in_pieces(&[source], all, unit, options.pieces_at_once, options.stop, progress, piece).await?;
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
        if let Some(place) = &place {
            place.comes().await;
        }
    };
    if options.skips_same {
        let runs = or(differences(source, target, piece), stopped(options.stop)).await?;
        turn().await;
        return write_runs(target, runs).await.map(|()| None);
    }
    if piece.is_zero && options.sparse_bytes == 0 {
        turn().await;
        return write_zeros_as_data(target, span, options.stop).await;
    }
    if piece.is_zero {
        if !options.target_is_zero {
            turn().await;
            let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
            target
                .write_zeroes(span, flags)
                .await
                .context(|| format!("can't write zeros at {}", span.start()))?;
        }
        return Ok(None);
    }
    let data = or(read_piece(source, span), stopped(options.stop)).await?;
    turn().await;
    for (part, data) in cut_zeros(span, data, options.sparse_bytes) {
        let context = || format!("can't write {} bytes at {}", part.len(), part.start());
        match data {
            Some(data) => target.write(part.start(), data, WriteFlags::default()).await.context(context)?,
            None if options.target_is_zero => {}
            None => {
                let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
                target.write_zeroes(part, flags).await.context(context)?;
            }
        }
    }
    Ok(None)
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
    /// Adds one. Returns whether the batch should be written.
    fn add(&self, block: PackedBlock) -> bool {
        let mut batch = self.0.borrow_mut();
        batch.1 += match &block.content {
            BlockContent::Compressed(bytes) => bytes.len(),
            BlockContent::Plain(data) => data.len(),
        };
        batch.0.push(block);
        batch.1 >= BATCH_BYTES || batch.0.len() >= BATCH_BLOCKS
    }

    async fn add_all(&self, blocks: Vec<PackedBlock>, target: &dyn Compressing) -> Result<()> {
        for block in blocks {
            if self.add(block) {
                self.write(target).await?;
            }
        }
        Ok(())
    }

    async fn write(&self, target: &dyn Compressing) -> Result<()> {
        let (blocks, _) = self.0.take();
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
    for part in BlockSize::from_bytes(PIECE).expect("a power of two").pieces_of(piece.span) {
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
    batch.add_all(packed, compression.target).await?;
    for span in zeros.into_iter().filter(|_| !options.target_is_zero) {
        let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
        let context = || format!("can't write zeros at {}", span.start());
        target.write_zeroes(span, flags).await.context(context)?;
    }
    Ok(None)
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
}

/// A place in a queue; when it is dropped the next one acts.
struct QueuePlace<'a> {
    queue: &'a Queue,
    number: u64,
}

impl Queue {
    fn join(&self) -> QueuePlace<'_> {
        let number = self.joined.get();
        self.joined.set(number + 1);
        QueuePlace { queue: self, number }
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
    in_pieces(&[disk], all, ANY_UNIT, pieces_at_once, stop, progress, piece).await?;
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
struct Piece {
    span: GuestSpan,
    /// By the maps of all disks it reads as zero.
    is_zero: bool,
}

/// Pieces may begin and end anywhere.
const ANY_UNIT: BlockSize = BlockSize::from_shift(0);

/// Walks the run in pieces, several at a time. All but the last begin and end at multiples of the unit. Stops at the first error, and at the lowest piece for which
/// `act` returns a value, which is the result.
async fn in_pieces<'a, F>(
    disks: &[&SharedDisk],
    span: GuestSpan,
    unit: BlockSize,
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
            let piece = match next_piece(disks, rest, unit, &mut known).await {
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

/// The next piece of the run: as much of it as is in one kind, at most [`PIECE`] bytes, or a unit, where something must
/// be read.
async fn next_piece(
    disks: &[&SharedDisk],
    rest: GuestSpan,
    unit: BlockSize,
    known: &mut Vec<(GuestSpan, bool)>,
) -> Result<Piece> {
    if known.is_empty() {
        *known = in_units(zero_runs(disks, rest).await?, unit, rest.end());
        known.reverse();
    }
    let (run, is_zero) = known.pop().expect("a map is not empty");
    let piece = PIECE.max(unit.bytes());
    let longest = if is_zero { u64::MAX } else { piece - run.start().bytes() % piece };
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
mod tests {
    use std::cell::Cell;

    use futures_lite::future::block_on;
    use vellum_core::{CheckedDisk, MemoryDisk, Random};

    use super::*;

    fn patchy(size: usize, seed: u64) -> Vec<u8> {
        let mut random = Random::from_seed(seed);
        let mut bytes = vec![0; size];
        for _ in 0..20 {
            let at = random.index(size);
            let len = random.index(100_000).min(size - at);
            random.fill(&mut bytes[at..at + len]);
        }
        bytes
    }

    fn options(stop: &AtomicBool) -> CopyOptions<'_> {
        CopyOptions {
            pieces_at_once: 8,
            sparse_bytes: 4096,
            target_is_zero: true,
            skips_same: false,
            out_of_order: false,
            compression: None,
            rate: None,
            stop,
        }
    }

    #[test]
    fn a_copy_is_identical_and_sparse() {
        let size = 20 << 20;
        let bytes = patchy(size, 1);
        let source: SharedDisk = MemoryDisk::holding(&bytes);
        let target = CheckedDisk::new(MemoryDisk::new(size as u64));
        let shared: SharedDisk = target.clone();
        let stop = AtomicBool::new(false);
        let done = Cell::new(0);
        block_on(copy(&source, &shared, options(&stop), &|bytes| done.set(bytes))).unwrap();
        assert_eq!(done.get(), size as u64);
        assert_eq!(block_on(compare(&source, &shared, 4, &stop, &|_| {})).unwrap(), Comparison::Identical);
        let written = target.counts().bytes_written;
        assert!(written < 4 << 20, "{written} bytes were written of about 1 MiB that is not zero");
        assert_eq!(target.counts().flushes, 1);
    }

    #[test]
    fn what_the_target_reads_as_already_is_not_written() {
        let size = 9 << 20;
        let below = patchy(size, 1);
        let mut wanted = below.clone();
        wanted[1 << 20..3 << 20].fill(0);
        wanted[5_000_000..5_000_100].fill(3);
        let source: SharedDisk = MemoryDisk::holding(&wanted);
        let base: SharedDisk = MemoryDisk::holding(&below);
        let target = CheckedDisk::new(MemoryDisk::over(size as u64, Some(base)));
        let shared: SharedDisk = target.clone();
        let stop = AtomicBool::new(false);
        let how = CopyOptions { skips_same: true, target_is_zero: false, ..options(&stop) };
        block_on(copy(&source, &shared, how, &|_| {})).unwrap();
        assert_eq!(block_on(compare(&source, &shared, 4, &stop, &|_| {})).unwrap(), Comparison::Identical);
        let written = target.counts().bytes_written;
        assert!((100..=8192).contains(&written), "{written}");
    }

    #[test]
    fn runs_are_cut_to_whole_units() {
        let unit = BlockSize::from_shift(4);
        let run = |start: u64, end: u64, zero| {
            (GuestSpan::between(GuestOffset::new(start), GuestOffset::new(end)), zero)
        };
        let table = [
            (vec![run(0, 100, true)], vec![run(0, 100, true)]),
            (vec![run(0, 90, true)], vec![run(0, 80, true)]),
            (
                vec![run(0, 5, true), run(5, 9, false), run(9, 100, true)],
                vec![run(0, 16, false), run(16, 100, true)],
            ),
            (vec![run(0, 33, false), run(33, 70, true)], vec![run(0, 48, false), run(48, 64, true)]),
            (vec![run(0, 8, false), run(8, 24, true), run(24, 40, false)], vec![run(0, 48, false)]),
            (vec![run(32, 40, true)], vec![run(32, 48, false)]),
            (vec![run(96, 99, true), run(99, 100, false)], vec![run(96, 100, false)]),
            (
                vec![run(0, 17, true), run(17, 18, true), run(18, 98, false)],
                vec![run(0, 16, true), run(16, 100, false)],
            ),
        ];
        for (runs, expected) in table {
            assert_eq!(in_units(runs.clone(), unit, GuestOffset::new(100)), expected, "{runs:?}");
            let same = in_units(runs.clone(), ANY_UNIT, GuestOffset::new(100));
            let merged = runs.windows(2).any(|pair| pair[0].1 == pair[1].1);
            assert!(merged || same == runs, "{same:?}");
        }
    }

    #[test]
    fn zeros_are_found_in_whole_units() {
        let mut bytes = vec![0; (5 << 20) + 512];
        bytes[4096] = 1;
        bytes[12_287] = 1;
        bytes[3 << 20..(3 << 20) + 512].fill(1);
        let disk: SharedDisk = MemoryDisk::holding(&bytes);
        let stop = AtomicBool::new(false);
        let found = block_on(find_zeros(&disk, 4096, 3, &stop, &|_| {})).unwrap();
        let found: Vec<_> = found.iter().map(|run| (run.start().bytes(), run.end().bytes())).collect();
        let mib = 1 << 20;
        assert_eq!(found, [(0, 4096), (12_288, 3 * mib), (3 * mib + 4096, 5 * mib + 512)]);
    }

    #[test]
    fn a_target_that_holds_something_is_overwritten_with_zeros() {
        let size = 5 << 20;
        let bytes = patchy(size, 2);
        let source: SharedDisk = MemoryDisk::holding(&bytes);
        let target: SharedDisk = MemoryDisk::holding(&vec![7; size]);
        let stop = AtomicBool::new(false);
        let options = CopyOptions { target_is_zero: false, ..options(&stop) };
        block_on(copy(&source, &target, options, &|_| {})).unwrap();
        assert_eq!(block_on(compare(&source, &target, 4, &stop, &|_| {})).unwrap(), Comparison::Identical);
    }

    #[test]
    fn the_first_difference_is_found_and_a_longer_disk_may_end_in_zeros() {
        let bytes = patchy(9 << 20, 3);
        let mut other = bytes.clone();
        other[8_000_001] ^= 1;
        other[8_900_000] ^= 1;
        let first: SharedDisk = MemoryDisk::holding(&bytes);
        let second: SharedDisk = MemoryDisk::holding(&other);
        let stop = AtomicBool::new(false);
        let run = |a, b| block_on(compare(a, b, 8, &stop, &|_| {})).unwrap();
        assert_eq!(run(&first, &second), Comparison::DiffersAt(GuestOffset::new(8_000_001)));
        let mut longer = bytes.clone();
        longer.resize(12 << 20, 0);
        let third: SharedDisk = MemoryDisk::holding(&longer);
        assert_eq!(run(&first, &third), Comparison::Identical);
        longer[(11 << 20) + 5] = 1;
        let fourth: SharedDisk = MemoryDisk::holding(&longer);
        assert_eq!(run(&fourth, &first), Comparison::DiffersAt(GuestOffset::new((11 << 20) + 5)));
    }

    #[test]
    fn a_copy_that_is_stopped_says_so() {
        let source: SharedDisk = MemoryDisk::holding(&[1; 40 << 20]);
        let target: SharedDisk = MemoryDisk::new(40 << 20);
        let stop = AtomicBool::new(false);
        let progress = |_| stop.store(true, Ordering::Relaxed);
        let error = block_on(copy(&source, &target, options(&stop), &progress)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
    }
}
