//! One image, several real threads: what the simulator, which runs in one thread, cannot see.
//!
//! The storage is memory with two contents: what reads see, and what a power cut would leave. Only a flush
//! moves bytes from the first to the second, so anything that a commit forgot is missing there the moment it
//! returns.

mod common;
#[path = "threads/own.rs"]
mod own;
#[path = "threads/race.rs"]
mod race;
#[path = "threads/volatile.rs"]
mod volatile;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};

use common::look;
use common::native::{NativeSetup, look_native};
use futures_lite::future::block_on;
use race::fill_beside;
use vellum_core::{
    Buffer, Disk, GuestOffset, MemoryDisk, Random, SharedDisk, SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_format::Native;
use vellum_format::perturb;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use volatile::{Volatile, index};

async fn open(image: &Arc<Volatile>, mapping_bytes_max: u64) -> Arc<Qcow2> {
    let image: SharedStorage = image.clone();
    let header = Header::read(&*image).await.unwrap();
    let options = OpenOptions { mapping_bytes_max, ..OpenOptions::default() };
    let below = header.backing_file().map(|_| MemoryDisk::new(150_000) as SharedDisk);
    Qcow2::open(header, Files { image, data_file: None, below }, options).await.unwrap()
}

fn fresh(options: &CreateOptions) -> Arc<Volatile> {
    let image = Volatile::new();
    block_on(create(&*image, None, options)).unwrap();
    image
}

/// The first bytes of a guest cluster, found by hand in what a power cut would leave now.
fn durable_bytes(image: &Volatile, guest: u64) -> Option<[u8; 8]> {
    let contents = image.lock();
    let word = |at: u64| {
        let bytes = contents.durable.get(index(at)..index(at) + 8)?;
        Some(u64::from_be_bytes(bytes.try_into().unwrap()))
    };
    let shift = word(16)? & 0xFFFF_FFFF;
    let (cluster, per_table) = (guest >> shift, 1 << (shift - 3));
    let place = |entry: u64| Some(entry & 0x00FF_FFFF_FFFF_FE00).filter(|at| *at != 0);
    let l2 = place(word(word(40)? + cluster / per_table * 8)?)?;
    let data = place(word(l2 + cluster % per_table * 8)?)?;
    word(data).map(u64::to_be_bytes)
}

/// Each thread writes clusters of its own with FUA; all have their entries in the same page of the same
/// table. What was acknowledged as durable to one must be durable, whatever the others are in the middle of.
#[test]
fn what_shares_a_page_with_another_writer_is_durable_all_the_same() {
    let options = CreateOptions { size: 1 << 20, cluster_size: 4096, ..CreateOptions::without_journal() };
    let image = fresh(&options);
    let disk = block_on(open(&image, 1 << 20));
    let threads = 4;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (disk, image) = (&disk, &image);
            scope.spawn(move || {
                for round in 1..=20_000 * common::scale() {
                    let at = GuestOffset::new((round % 16 * threads + thread) * 4096);
                    // What is not there is allocated again, so that each round changes the mapping.
                    block_on(disk.discard(at.span(4096), WriteFlags::default())).unwrap();
                    let value = round.to_be_bytes();
                    block_on(disk.write(at, Buffer::copy_of(&value.repeat(512)), WriteFlags::FUA)).unwrap();
                    let found = durable_bytes(image, at.bytes());
                    assert_eq!(found, Some(value), "thread {thread}, round {round}: lost in a power cut");
                }
            });
        }
    });
    block_on(disk.close()).unwrap();
}

/// Threads meet at each new L2 table. Whichever made it, each thread's acknowledged entries are durable; and
/// what was written stays when the page is evicted and loaded again.
#[test]
fn a_table_that_several_threads_touch_first_loses_no_entry() {
    for round in 0..8 * common::scale() {
        let size = 16 << 20;
        let options = CreateOptions { size, cluster_size: 512, ..CreateOptions::without_journal() };
        let image = fresh(&options);
        // Sixteen pages fit, so that pages come and go all the time.
        let disk = block_on(open(&image, 8192));
        let (threads, reach) = (4, 64 * 512);
        let barrier = Barrier::new(threads);
        // A thread that panicked would leave the others at the barrier.
        let lost = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for thread in 0..threads as u64 {
                let (disk, image, barrier, lost) = (&disk, &image, &barrier, &lost);
                scope.spawn(move || {
                    for table in 0..size / reach {
                        barrier.wait();
                        let at = GuestOffset::new(table * reach + thread * 512);
                        let value = (round << 32 | table << 8 | thread | 1 << 63).to_be_bytes();
                        let data = Buffer::copy_of(&value.repeat(64));
                        block_on(disk.write(at, data, WriteFlags::FUA)).unwrap();
                        if durable_bytes(image, at.bytes()) != Some(value) {
                            lost.lock().unwrap().push((thread, table));
                        }
                        // Others, so that its page has to make room.
                        for back in 1..=table.min(24) {
                            let at = GuestOffset::new((table - back) * reach);
                            block_on(disk.read(at, Buffer::zeroed(8))).unwrap();
                        }
                    }
                });
            }
        });
        let lost = lost.into_inner().unwrap();
        assert!(lost.is_empty(), "round {round}: lost in a power cut, by thread and table: {lost:?}");
        for table in 0..size / reach {
            for thread in 0..threads as u64 {
                let at = GuestOffset::new(table * reach + thread * 512);
                let read = block_on(disk.read(at, Buffer::zeroed(8))).unwrap().to_vec();
                let value = (round << 32 | table << 8 | thread | 1 << 63).to_be_bytes();
                assert_eq!(read, value, "thread {thread}, table {table}");
            }
        }
        block_on(disk.close()).unwrap();
        let shared: SharedStorage = image.clone();
        let (report, lines) = block_on(look(&shared)).unwrap();
        assert!(report.is_clean(), "{lines:?}");
    }
}

/// One request of a thread, and between which ticks of the clock it ran.
struct Done {
    start: u64,
    end: u64,
    first: u64,
    sectors: u64,
    what: What,
}

enum What {
    /// Every sector begins with this number.
    Write(u64),
    Zero,
    /// Zero or as before.
    Discard,
    /// What each sector began with.
    Read(Vec<u64>),
}

/// Anything from several threads over the same clusters: each read, and what is left at the end, is what some
/// order of the requests gives, sector by sector; what a power cut leaves opens, is repaired and clean, and
/// has what was flushed.
#[test]
fn threads_over_the_same_clusters() {
    let plain =
        |cluster_size| CreateOptions { size: 256 << 10, cluster_size, ..CreateOptions::without_journal() };
    let kinds = [
        plain(512),
        plain(4096),
        CreateOptions { extended_l2: true, ..plain(16_384) },
        CreateOptions { refcount_bits: 1, ..plain(512) },
        CreateOptions { version: 2, ..plain(4096) },
        over_zeros(plain(4096)),
        over_zeros(CreateOptions { extended_l2: true, ..plain(16_384) }),
    ];
    for (kind, options) in kinds.into_iter().enumerate() {
        for seed in 0..3 * common::scale() {
            one_race(&Racer::Qcow2(options.clone()), kind, seed);
        }
    }
}

/// With a journal, over a base that is zero, which is not known: so it is filled.
fn over_zeros(options: CreateOptions) -> CreateOptions {
    let backing = Some(("base".to_owned(), Some("raw".to_owned())));
    CreateOptions { backing, journal: Some(128 << 10), ..options }
}

/// As above, for the native format. The base is zero, which is not known.
#[test]
fn threads_over_the_same_units() {
    let zeros = || vec![0; 150_000];
    let kinds = [
        NativeSetup::linear("linear", 256 << 10).over(zeros(), 16 << 10),
        NativeSetup::table("table", 256 << 10, 64 << 10),
        NativeSetup::table("table over a base", 256 << 10, 64 << 10).over(zeros(), 16 << 10),
        NativeSetup::table("table over a base, large blocks", 256 << 10, 64 << 10).over(zeros(), 128 << 10),
    ];
    for (kind, setup) in kinds.into_iter().enumerate() {
        for seed in 0..3 * common::scale() {
            one_race(&Racer::Native(setup.clone()), kind, seed);
        }
    }
}

/// What the threads race over.
enum Racer {
    Qcow2(CreateOptions),
    Native(NativeSetup),
}

impl Racer {
    fn size(&self) -> u64 {
        match self {
            Self::Qcow2(options) => options.size,
            Self::Native(setup) => setup.options.size,
        }
    }

    fn fresh(&self) -> Arc<Volatile> {
        match self {
            Self::Qcow2(options) => fresh(options),
            Self::Native(setup) => {
                let image = Volatile::new();
                block_on(vellum_format::native::create(&*image, &setup.create_options())).unwrap();
                image
            }
        }
    }

    fn open(&self, image: &Arc<Volatile>) -> SharedDisk {
        match self {
            Self::Qcow2(_) => block_on(open(image, 8192)),
            Self::Native(setup) => {
                let options = vellum_format::native::OpenOptions::default();
                block_on(Native::open(image.clone(), setup.below(), options)).unwrap()
            }
        }
    }

    /// Whether a closed image is as it should be.
    fn check(&self, image: SharedStorage, was_cut_off: bool, what: &str) {
        let (report, lines) = match self {
            Self::Qcow2(_) => block_on(look(&image)).unwrap(),
            Self::Native(_) => block_on(look_native(&image)).unwrap(),
        };
        let may_leak = was_cut_off && matches!(self, Self::Qcow2(options) if options.version == 2);
        assert!(report.corruptions == 0 && (report.is_clean() || may_leak), "{what}: {lines:?}");
    }
}

fn one_race(racer: &Racer, kind: usize, seed: u64) {
    let image = racer.fresh();
    let disk = racer.open(&image);
    let clock = AtomicU64::new(1);
    let sectors = racer.size() / 512;
    let has_ended = AtomicBool::new(false);
    let logs: Vec<Vec<Done>> = std::thread::scope(|scope| {
        scope.spawn(|| {
            perturb::begin(seed, 9);
            fill_beside(&*disk, Random::from_seed(seed * 8 + 7), &has_ended);
        });
        let handles: Vec<_> = (0..4u64)
            .map(|thread| {
                let (disk, clock) = (&disk, &clock);
                scope.spawn(move || {
                    perturb::begin(seed, thread);
                    let mut random = Random::from_seed(seed * 8 + thread);
                    let mut log = Vec::new();
                    for number in 1..=600u64 {
                        let longest = *random.pick(&[4, 40, 120]);
                        let len = 1 + random.below(longest);
                        let first = random.below(sectors - len);
                        let span = GuestOffset::new(first * 512).span(len * 512);
                        let flags = WriteFlags { fua: random.one_in(16) };
                        let start = clock.fetch_add(1, Ordering::SeqCst);
                        let what = match random.below(10) {
                            0 => {
                                block_on(disk.flush()).unwrap();
                                continue;
                            }
                            1 => {
                                block_on(disk.discard(span, flags)).unwrap();
                                What::Discard
                            }
                            2 => {
                                let may_unmap = random.one_in(2);
                                let flags = ZeroFlags { may_unmap, ..ZeroFlags::default() };
                                block_on(disk.write_zeroes(span, flags)).unwrap();
                                What::Zero
                            }
                            3..=5 => {
                                let buffer = Buffer::zeroed(index(span.len()));
                                let bytes = block_on(disk.read(span.start(), buffer)).unwrap().to_vec();
                                let value = |sector: &[u8]| {
                                    assert!(
                                        sector.chunks(8).all(|word| word == &sector[..8]),
                                        "a torn sector"
                                    );
                                    u64::from_be_bytes(sector[..8].try_into().unwrap())
                                };
                                What::Read(bytes.chunks(512).map(value).collect())
                            }
                            _ => {
                                let value = number << 8 | thread | 1 << 63;
                                let data = value.to_be_bytes().repeat(index(span.len()) / 8);
                                block_on(disk.write(span.start(), Buffer::copy_of(&data), flags)).unwrap();
                                What::Write(value)
                            }
                        };
                        let end = clock.fetch_add(1, Ordering::SeqCst);
                        log.push(Done { start, end, first, sectors: len, what });
                    }
                    log
                })
            })
            .collect();
        let logs = handles.into_iter().map(|handle| handle.join()).collect::<Vec<_>>();
        has_ended.store(true, Ordering::SeqCst);
        logs.into_iter().map(|log| log.unwrap()).collect()
    });
    let mut log: Vec<Done> = logs.into_iter().flatten().collect();
    let now = clock.load(Ordering::SeqCst);
    let whole = block_on(disk.read(GuestOffset::ZERO, Buffer::zeroed(index(racer.size())))).unwrap().to_vec();
    let value = |sector: &[u8]| u64::from_be_bytes(sector[..8].try_into().unwrap());
    let last = What::Read(whole.chunks(512).map(value).collect());
    log.push(Done { start: now, end: now + 1, first: 0, sectors, what: last });
    let what = format!("kind {kind}, seed {seed}");
    judge(&log, sectors, &what);
    if seed.is_multiple_of(2) {
        block_on(disk.flush()).unwrap();
        drop(disk);
        let left = Volatile::new();
        left.lock().visible = image.after_power_cut();
        left.lock().durable = image.after_power_cut();
        let again = racer.open(&left);
        let after = block_on(again.read(GuestOffset::ZERO, Buffer::zeroed(index(racer.size())))).unwrap();
        assert!(after.to_vec() == whole, "{what}: what was flushed is not there");
        block_on(again.close()).unwrap();
        racer.check(left, true, &what);
    } else {
        block_on(disk.close()).unwrap();
        racer.check(image, false, &what);
    }
}

/// Every value that was read is one that a change gave which no later one, over before the read began, has
/// replaced.
fn judge(log: &[Done], sectors: u64, what: &str) {
    for sector in 0..sectors {
        let here = || log.iter().filter(|done| (done.first..done.first + done.sectors).contains(&sector));
        let changes: Vec<(u64, u64, u64)> = here()
            .filter_map(|done| match done.what {
                What::Write(value) => Some((done.start, done.end, value)),
                What::Zero => Some((done.start, done.end, 0)),
                What::Discard | What::Read(_) => None,
            })
            .collect();
        let discards: Vec<(u64, u64)> = here()
            .filter(|done| matches!(done.what, What::Discard))
            .map(|done| (done.start, done.end))
            .collect();
        for done in here() {
            let What::Read(values) = &done.what else { continue };
            let value = values[index(sector - done.first)];
            let replaced =
                |from: u64| changes.iter().any(|(start, end, _)| *start > from && *end < done.start);
            let given = changes
                .iter()
                .any(|(start, end, given)| *given == value && *start < done.end && !replaced(*end));
            // At the beginning everything is zero; a discard may make it so again.
            let zeroed = |(start, end): &(u64, u64)| *start < done.end && !replaced(*end);
            let zero = value == 0 && (!replaced(0) || discards.iter().any(zeroed));
            assert!(given || zero, "{what}: sector {sector} reads as {value:#x} at {}", done.start);
        }
    }
}
