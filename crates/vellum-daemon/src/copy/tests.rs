//! The copy and the comparison, on disks in memory.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use futures_lite::future::{block_on, yield_now};
use vellum_core::{CheckedDisk, Disk, Extent, Geometry, MemoryDisk, Random};

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
        overlaps: true,
        looks_up: false,
        in_small_pieces: false,
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

/// A disk whose writes take a while: the earlier on the disk, the longer. One may fail.
struct Slow {
    disk: Arc<MemoryDisk>,
    log: Mutex<Vec<(u64, bool)>>,
    fails_at: Option<u64>,
}

impl Slow {
    fn new(size: u64, fails_at: Option<u64>) -> Arc<Self> {
        Arc::new(Self { disk: MemoryDisk::new(size), log: Mutex::default(), fails_at })
    }

    /// Where writes have begun, in this order; how many were on their way at most; how many are still.
    fn told(&self) -> (Vec<u64>, usize, usize) {
        let log = self.log.lock().expect("no panic");
        let (mut now, mut most) = (0, 0);
        for (_, is_begin) in &*log {
            now = if *is_begin { now + 1 } else { now - 1 };
            most = now.max(most);
        }
        (log.iter().filter(|(_, is_begin)| *is_begin).map(|(at, _)| *at).collect(), most, now)
    }
}

impl Disk for Slow {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.disk.read(at, buffer)
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let note = |is_begin| self.log.lock().expect("no panic").push((at.bytes(), is_begin));
            note(true);
            for _ in 0..20 + (self.geometry().size - at.bytes()) / PIECE.bytes() {
                yield_now().await;
            }
            note(false);
            match self.fails_at == Some(at.bytes()) {
                true => Err(Error::new(ErrorKind::Io, "as planned")),
                false => self.disk.write(at, data, flags).await,
            }
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.disk.flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.disk.write_zeroes(span, flags)
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.disk.discard(span, flags)
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.disk.map(span)
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.disk.close()
    }
}

#[test]
fn writes_begin_in_order_and_the_next_does_not_wait_for_the_end() {
    let size = 20 * PIECE.bytes();
    let source: SharedDisk = MemoryDisk::holding(&vec![1; usize::try_from(size).unwrap()]);
    let stop = AtomicBool::new(false);
    for (out_of_order, overlaps, most_at_once) in [(false, true, 8), (false, false, 1), (true, false, 8)] {
        let slow = Slow::new(size, None);
        let target: SharedDisk = slow.clone();
        let how = CopyOptions { out_of_order, overlaps, ..options(&stop) };
        block_on(copy(&source, &target, how, &|_| {})).unwrap();
        let (mut begun, most, _) = slow.told();
        assert!(out_of_order || begun.is_sorted(), "{begun:?}");
        assert_eq!(most, most_at_once);
        begun.sort_unstable();
        assert_eq!(begun, (0..20).map(|piece| piece * PIECE.bytes()).collect::<Vec<_>>());
        let log = slow.log.lock().unwrap();
        assert!(out_of_order || log[..2] == [(0, true), (0, false)], "the first one is alone: {log:?}");
        drop(log);
        assert_eq!(block_on(compare(&source, &target, 4, &stop, &|_| {})).unwrap(), Comparison::Identical);
    }
}

#[test]
fn no_write_is_on_its_way_when_a_copy_has_failed() {
    let size = 20 * PIECE.bytes();
    let source: SharedDisk = MemoryDisk::holding(&vec![1; usize::try_from(size).unwrap()]);
    let stop = AtomicBool::new(false);
    for at in [0, 1, 9, 19] {
        let slow = Slow::new(size, Some(at * PIECE.bytes()));
        let target: SharedDisk = slow.clone();
        let error = block_on(copy(&source, &target, options(&stop), &|_| {})).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        let (begun, _, left) = slow.told();
        assert_eq!(left, 0, "{at}");
        assert!(begun.len() <= 8 || at > 0, "{at}: it stops soon: {begun:?}");
    }
}

#[test]
fn many_runs_of_one_piece_are_all_written_and_a_few_at_a_time() {
    let mut bytes = vec![0; 6 << 20];
    for at in (0..bytes.len()).step_by(8192) {
        bytes[at] = 1;
    }
    let source: SharedDisk = MemoryDisk::holding(&bytes);
    let slow = Slow::new(6 << 20, None);
    let target: SharedDisk = slow.clone();
    let stop = AtomicBool::new(false);
    block_on(copy(&source, &target, options(&stop), &|_| {})).unwrap();
    let (begun, most, left) = slow.told();
    assert_eq!((begun.len(), left), (768, 0));
    assert!((17..=3 * 16).contains(&most), "{most}");
    assert_eq!(block_on(compare(&source, &target, 4, &stop, &|_| {})).unwrap(), Comparison::Identical);
}
