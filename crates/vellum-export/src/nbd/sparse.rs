//! Reads that send no zeros. With structured replies a run of zeros is reported in 32 bytes instead of being
//! sent.
//!
//! ```text
//!   small read   read it; if every byte is zero, it is a hole
//!   large read   ask the map; holes are not even read; what was read is looked at grain by grain
//! ```
//!
//! Why it is done this way: scanning bytes that were just read ends at the first byte that is not zero, so it
//! costs next to nothing for data, and it saves sending zeros. Querying the map is a request to the disk,
//! which may have to query the file system and wait for a thread to do so. It pays from [`MAP_BYTES_MIN`] on,
//! and only where there are holes: a hole that is not read saves filling and scanning that much memory. So a
//! client that finds only data is spared the query until a read finds zeros again ([`Outlook`]).
//!
//! 1. The parts of a read follow each other without gap or overlap and cover it. None is empty.
//! 2. A hole is whatever reads as zero, whether or not space is allocated for it. The client finds out about
//!    space with `NBD_CMD_BLOCK_STATUS`.
//! 3. A part that could not be read does not spoil the others: its error is reported with its offset.
//!
//! A concurrent write may change a range between the map query and the read. Then the read of its holes took
//! place at the time of the query, which is as good as any other time while both run (contract 9 of the
//! disk).
//!
//! Source: NBD protocol, `NBD_CMD_READ`, "Structured replies".

use std::cell::Cell;

use smallvec::SmallVec;
use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, GuestOffset, GuestSpan, PlaceKind, Result, SharedDisk, is_zero,
    join_all,
};

/// From this length on a read queries the map first.
pub(super) const MAP_BYTES_MIN: u64 = 256 << 10;

/// Runs of zeros shorter than this, or not aligned to it, are sent as they are inside a larger read.
const GRAIN: BlockSize = BlockSize::from_shift(16);

/// More runs of data than this are read as one: the disk should not get a read for every other grain.
const READS_MAX: usize = 16;

/// The parts of a read; a small one has one.
pub(super) type Parts = SmallVec<[Part; 1]>;

/// What a run of the export turned out to be.
#[derive(Debug)]
pub(super) enum Part {
    Data { at: GuestOffset, bytes: Buffer },
    Hole { at: GuestOffset, len: u64 },
    Failed { at: GuestOffset, error: Error },
}

/// What the requests of a session know of it.
#[derive(Debug)]
pub(super) struct Outlook {
    /// Whether large reads meet holes: the last one that ended did, or none has ended yet.
    meets_holes: Cell<bool>,
    /// The session no longer waits for an answer.
    is_left: Cell<bool>,
}

impl Outlook {
    pub(super) fn new() -> Self {
        Self { meets_holes: Cell::new(true), is_left: Cell::new(false) }
    }

    fn learn(&self, parts: &Parts) {
        // A failure may concern a part of what was read as one; the next read will show which.
        self.meets_holes.set(parts.iter().any(|part| !matches!(part, Part::Data { .. })));
    }

    /// The session no longer waits for an answer: long work stops at the next opportunity.
    pub(super) fn leave(&self) {
        self.is_left.set(true);
    }

    pub(super) fn is_left(&self) -> bool {
        self.is_left.get()
    }
}

/// Long work checks this between two steps.
pub(super) fn stop_if_left(outlook: &Outlook) -> Result<()> {
    if outlook.is_left() {
        return Err(Error::new(ErrorKind::Closed, "nobody waits for the answer any more"));
    }
    Ok(())
}

/// Reads what is not known to be zero.
pub(super) async fn read(disk: &SharedDisk, span: GuestSpan, outlook: &Outlook) -> Parts {
    let parts = read_runs(disk, span, outlook.meets_holes.get()).await;
    outlook.learn(&parts);
    parts
}

async fn read_runs(disk: &SharedDisk, span: GuestSpan, asks_map: bool) -> Parts {
    if !asks_map {
        let mut parts = Parts::new();
        push_read(
            &mut parts,
            span,
            disk.read(span.start(), Buffer::for_overwrite(to_usize(span.len()))).await,
        );
        return parts;
    }
    let runs = match disk.map_whole(span).await {
        Ok(extents) => {
            let extents = extents.iter().map(|extent| {
                let reads_zero = matches!(extent.place, PlaceKind::Zero { .. } | PlaceKind::Below);
                (extent.span.intersect(span), reads_zero)
            });
            runs_of(span, extents)
        }
        // A map that cannot be read is no reason to refuse a read that perhaps can.
        Err(_) => vec![(span, false)],
    };
    let data = || runs.iter().filter(|(_, is_hole)| !is_hole).map(|(run, _)| *run);
    // One buffer, cut up: many would take more memory than the request was charged for.
    let mut memory = Buffer::for_overwrite(to_usize(data().map(|run| run.len()).sum()));
    let reads = data().map(|run| disk.read(run.start(), memory.split_to(to_usize(run.len()))));
    let mut read = join_all(reads).await.into_iter();
    let mut parts = Parts::new();
    for (run, is_hole) in runs {
        if is_hole {
            push_hole(&mut parts, run.start(), run.len());
        } else {
            push_read(&mut parts, run, read.next().expect("every run of data was read"));
        }
    }
    parts
}

/// Adds what a read of `run` gave.
pub(super) fn push_read(parts: &mut Parts, run: GuestSpan, result: Result<Buffer>) {
    match result {
        Ok(bytes) if bytes.len() as u64 == run.len() => push_bytes(parts, run, bytes),
        Ok(_) => {
            let error = Error::corrupt("the disk returned fewer bytes than requested");
            parts.push(Part::Failed { at: run.start(), error });
        }
        Err(error) => parts.push(Part::Failed { at: run.start(), error }),
    }
}

/// The runs of data and of holes worth telling: whole grains, neighbours joined. What the extents do not
/// cover is data.
fn runs_of(span: GuestSpan, extents: impl Iterator<Item = (GuestSpan, bool)>) -> Vec<(GuestSpan, bool)> {
    let mut holes: Vec<GuestSpan> = Vec::new();
    for (extent, _) in extents.filter(|(_, reads_zero)| *reads_zero) {
        match holes.last_mut() {
            Some(last) if last.end() == extent.start() => {
                *last = GuestSpan::between(last.start(), extent.end());
            }
            _ => holes.push(extent),
        }
    }
    let mut runs = Vec::new();
    let mut at = span.start();
    for hole in holes {
        // The ends of the request are as good as the edge of a grain.
        let (start, end) = (hole.start().bytes(), hole.end().bytes());
        let start = if hole.start() == span.start() { start } else { GRAIN.round_up(start) };
        let end = if hole.end() == span.end() { end } else { GRAIN.round_down(end) };
        if end.saturating_sub(start) < GRAIN.bytes() {
            continue;
        }
        let (start, end) = (GuestOffset::new(start), GuestOffset::new(end));
        if at < start {
            runs.push((GuestSpan::between(at, start), false));
        }
        runs.push((GuestSpan::between(start, end), true));
        at = end;
    }
    if at < span.end() {
        runs.push((GuestSpan::between(at, span.end()), false));
    }
    let reads = runs.iter().filter(|(_, is_hole)| !is_hole).count();
    if reads > READS_MAX { vec![(span, false)] } else { runs }
}

/// Cuts zeros out of bytes that were read.
fn push_bytes(parts: &mut Parts, run: GuestSpan, mut bytes: Buffer) {
    if run.len() <= GRAIN.bytes() {
        if bytes.is_zero() {
            push_hole(parts, run.start(), run.len());
        } else if !run.is_empty() {
            parts.push(Part::Data { at: run.start(), bytes });
        }
        return;
    }
    // `bytes` holds the run from `begin` on; up to `end` it is known to be data.
    let (mut begin, mut end) = (run.start(), run.start());
    for grain in GRAIN.pieces_of(run) {
        if !range_is_zero(&bytes, to_usize(end - begin), to_usize(grain.len())) {
            end = grain.end();
            continue;
        }
        if begin < end {
            parts.push(Part::Data { at: begin, bytes: bytes.split_to(to_usize(end - begin)) });
        }
        drop(bytes.split_to(to_usize(grain.len())));
        push_hole(parts, grain.start(), grain.len());
        (begin, end) = (grain.end(), grain.end());
    }
    if begin < end {
        parts.push(Part::Data { at: begin, bytes });
    }
}

fn push_hole(parts: &mut Parts, at: GuestOffset, len: u64) {
    match parts.last_mut() {
        // Parts follow each other without a gap, so this one does.
        Some(Part::Hole { len: before, .. }) => *before += len,
        _ if len == 0 => {}
        _ => parts.push(Part::Hole { at, len }),
    }
}

fn range_is_zero(bytes: &Buffer, from: usize, len: usize) -> bool {
    let (mut skip, mut left) = (from, len);
    for piece in bytes.pieces() {
        let start = skip.min(piece.len());
        let part = (piece.len() - start).min(left);
        if !is_zero(&piece[start..start + part]) {
            return false;
        }
        skip -= start;
        left -= part;
        if left == 0 {
            break;
        }
    }
    true
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a payload fits the address space")
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{Disk, MemoryDisk, Random, WriteFlags};

    use super::*;

    const K: u64 = 1024;

    fn span(at: u64, len: u64) -> GuestSpan {
        GuestOffset::new(at).span(len)
    }

    fn runs(request: GuestSpan, extents: &[(u64, u64, bool)]) -> Vec<(u64, u64, bool)> {
        let extents = extents.iter().map(|(at, len, zero)| (span(*at, *len), *zero));
        runs_of(request, extents).iter().map(|(run, hole)| (run.start().bytes(), run.len(), *hole)).collect()
    }

    #[test]
    fn only_holes_worth_telling_are_told() {
        let request = span(0, 512 * K);
        assert_eq!(runs(request, &[(0, 512 * K, true)]), [(0, 512 * K, true)]);
        assert_eq!(runs(request, &[(0, 512 * K, false)]), [(0, 512 * K, false)]);
        assert_eq!(runs(request, &[]), [(0, 512 * K, false)], "nothing known is data");
        assert_eq!(
            runs(request, &[(0, 100 * K, false), (100 * K, 200 * K, true), (300 * K, 212 * K, false)]),
            [(0, 128 * K, false), (128 * K, 128 * K, true), (256 * K, 256 * K, false)],
            "whole grains"
        );
        assert_eq!(
            runs(request, &[(0, 64 * K, true), (64 * K, 64 * K, true), (128 * K, 100 * K, false)]),
            [(0, 128 * K, true), (128 * K, 384 * K, false)],
            "neighbours are one hole; the rest is unknown"
        );
        assert_eq!(runs(request, &[(10 * K, 70 * K, true)]), [(0, 512 * K, false)], "no whole grain");
        assert_eq!(
            runs(span(10 * K, 300 * K), &[(10 * K, 300 * K, true)]),
            [(10 * K, 300 * K, true)],
            "the ends of the request need no grain"
        );
        for (at, len) in
            [(0, 10 * K), (10 * K, 20 * K), (70 * K, 60 * K), (490 * K, 10 * K), (450 * K, 50 * K)]
        {
            let request = span(10 * K, 490 * K);
            let hole = request.intersect(span(at, len));
            let extent = (hole.start().bytes(), hole.len(), true);
            assert_eq!(runs(request, &[extent]), [(10 * K, 490 * K, false)], "too short: {extent:?}");
        }
        assert_eq!(
            runs(span(10 * K, 490 * K), &[(10 * K, 70 * K, true), (400 * K, 100 * K, true)]),
            [(10 * K, 490 * K, false)],
            "grains at the ends need not be whole, but a hole must be as long as one"
        );
        let chequered = |n| (0..n).map(|i| (i * 64 * K, 64 * K, i % 2 == 0)).collect::<Vec<_>>();
        assert_eq!(runs(span(0, 32 * 64 * K), &chequered(32)).len(), 32, "16 reads");
        assert_eq!(
            runs(span(0, 34 * 64 * K), &chequered(34)),
            [(0, 34 * 64 * K, false)],
            "17 would be too many"
        );
    }

    #[test]
    fn parts_cover_a_read_with_its_bytes() {
        let mut random = Random::from_seed(5);
        for _ in 0..300 {
            let start = random.below(200_000);
            let len = random.below(700_000) + 1;
            let mut bytes = vec![0; to_usize(len)];
            for _ in 0..random.below(6) {
                let at = random.index(bytes.len());
                let end = (at + random.index(100_000) + 1).min(bytes.len());
                random.fill(&mut bytes[at..end]);
            }
            // In several pieces, as a disk may give it back.
            let cut = random.index(bytes.len());
            let mut buffer = Buffer::copy_of(&bytes[..cut]);
            buffer.append(Buffer::copy_of(&bytes[cut..]));
            let mut parts = Parts::new();
            push_read(&mut parts, span(start, len), Ok(buffer));
            let mut seen = Vec::new();
            for part in parts {
                match part {
                    Part::Data { at, bytes } => {
                        assert_eq!(at.bytes(), start + seen.len() as u64);
                        assert!(!bytes.is_empty() && !bytes.is_zero());
                        seen.extend(bytes.to_vec());
                    }
                    Part::Hole { at, len } => {
                        assert_eq!(at.bytes(), start + seen.len() as u64);
                        assert!(len > 0);
                        seen.resize(seen.len() + to_usize(len), 0);
                    }
                    Part::Failed { .. } => unreachable!("nothing failed"),
                }
            }
            assert!(seen == bytes, "read at {start}, {len} bytes");
        }
    }

    #[test]
    fn the_map_is_asked_only_while_reads_meet_holes_and_never_missed() {
        let inner = MemoryDisk::new(4 << 20);
        block_on(async {
            let data = Buffer::copy_of(&[7; 3 << 20]);
            inner.write(GuestOffset::ZERO, data, WriteFlags::default()).await.expect("memory takes it");
        });
        let asked = Cell::new(0);
        let disk: SharedDisk = inner;
        let outlook = Outlook::new();
        let read = |at: u64| {
            asked.set(asked.get() + u32::from(outlook.meets_holes.get()));
            let parts = block_on(super::read(&disk, span(at << 20, 1 << 20), &outlook));
            assert_eq!(parts.len(), 1);
            (matches!(parts[0], Part::Hole { len: 0x10_0000, .. }), asked.get())
        };
        assert_eq!(read(0), (false, 1), "nothing is known yet");
        assert_eq!(read(1), (false, 1), "the one before was data");
        assert_eq!(read(3), (true, 1), "zeros are seen without the map");
        assert_eq!(read(3), (true, 2));
        assert_eq!(read(2), (false, 3));
        assert_eq!(read(0), (false, 3));
    }

    #[test]
    fn a_read_of_the_wrong_length_is_a_failure_not_a_shorter_reply() {
        let mut parts = Parts::new();
        push_read(&mut parts, span(512, 512), Ok(Buffer::zeroed(511)));
        assert!(matches!(&parts[..], [Part::Failed { at, .. }] if at.bytes() == 512));
    }

    #[test]
    fn a_read_of_nothing_has_no_parts() {
        let mut parts = Parts::new();
        push_read(&mut parts, span(512, 0), Ok(Buffer::empty()));
        assert!(parts.is_empty());
    }
}
