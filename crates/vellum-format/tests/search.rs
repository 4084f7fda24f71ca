//! In a large image that is full, a free cluster is hard to find. No request waits for the search. Counted in
//! reads.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::QcowSetup;

use futures_lite::future::{block_on, zip};
use vellum_core::{
    BlockSize, Buffer, Disk as _, Error, ErrorKind, GuestOffset, HostTally, ImageOffset, IoCounts, Limits,
    LocalFuture, MemoryStorage, Place, Random, Result, SharedStorage, Storage, WriteFlags,
};
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_sim::{FaultPlan, ForwardStorage, Forwarding, World};

const CLUSTER: BlockSize = BlockSize::from_shift(16);
/// Of the image file.
const BYTES: u64 = 10 << 40;
/// What a block of refcounts of one bit each counts.
const BLOCK_REACH: u64 = (CLUSTER.bytes() * 8) << CLUSTER.shift();
/// A request may read this often. (What it changes is a page of the mapping, and one of refcounts.)
const READS_MAX: u64 = 48;

/// An image file of this many bytes in which all clusters are in use, except one at each of these places.
fn full_image(bytes: u64, free: &[u64]) -> Arc<MemoryStorage> {
    let image = MemoryStorage::new("full.qcow2");
    let options = CreateOptions { size: 8 << 40, refcount_bits: 1, ..CreateOptions::without_journal() };
    block_on(create(&*image, None, &options)).unwrap();
    let header = block_on(image.read(ImageOffset::new(48), Buffer::for_overwrite(8))).unwrap();
    let table_at = u64::from_be_bytes(header.slice().try_into().unwrap());
    block_on(image.set_len(bytes)).unwrap();
    let mut table = Vec::new();
    for first in (0..bytes).step_by(usize::try_from(BLOCK_REACH).unwrap()) {
        // In the last cluster that it counts.
        let at = first + BLOCK_REACH - CLUSTER.bytes();
        let mut block = vec![0xFF; 1 << 16];
        for place in free.iter().filter(|place| (first..first + BLOCK_REACH).contains(place)) {
            let index = (place - first) >> CLUSTER.shift();
            block[usize::try_from(index / 8).unwrap()] &= !(1 << (index % 8));
        }
        block_on(image.write(ImageOffset::new(at), Buffer::copy_of(&block))).unwrap();
        table.extend(at.to_be_bytes());
    }
    assert!(table.len() as u64 <= CLUSTER.bytes());
    block_on(image.write(ImageOffset::new(table_at), Buffer::copy_of(&table))).unwrap();
    image
}

struct Opened {
    disk: Arc<Qcow2>,
    tally: HostTally,
}

impl Opened {
    fn new<S: Storage + 'static>(image: &Arc<S>) -> Self {
        let image: SharedStorage = image.clone();
        let header = block_on(Header::read(&*image)).unwrap();
        let tally = HostTally::default();
        let options = OpenOptions { tally: tally.clone(), ..OpenOptions::default() };
        let files = Files { image, data_file: None, below: None };
        Self { disk: block_on(Qcow2::open(header, files, options)).unwrap(), tally }
    }

    fn counts(&self) -> IoCounts {
        self.tally.metadata.counts()
    }

    /// Writes to unallocated parts of the disk, and returns the cost in metadata.
    fn write(&self, at: u64) -> IoCounts {
        let before = self.counts();
        let data = Buffer::copy_of(&[7; 4096]);
        block_on(self.disk.write(GuestOffset::new(at), data, WriteFlags::default())).unwrap();
        self.counts() - before
    }

    /// Tends the disk until there is nothing to do, and returns the cost.
    fn tend(&self) -> IoCounts {
        let before = self.counts();
        while block_on(self.disk.tend(Duration::ZERO)) {}
        self.counts() - before
    }

    fn place(&self, at: u64) -> Vec<u64> {
        let extents = block_on(self.disk.map(GuestOffset::new(at).span(4096))).unwrap();
        let place = |place: &Place| match place {
            Place::Data { at, .. } => Some(at.bytes()),
            _ => None,
        };
        extents.iter().filter_map(|extent| place(&extent.place)).collect()
    }
}

#[test]
fn the_first_allocation_in_a_full_image_reads_little_and_the_search_goes_on_beside_it() {
    let hole = (6 << 40) + 3 * CLUSTER.bytes();
    let opened = Opened::new(&full_image(BYTES, &[hole]));
    block_on(opened.disk.tend(Duration::ZERO));
    let first = opened.write(0);
    assert!(first.reads <= READS_MAX, "{first:?}");
    assert!(opened.place(0)[0] >= BYTES, "it lies behind everything else");
    let second = opened.write(1 << 20);
    assert!(second.reads <= 1, "{second:?}");
    let search = opened.tend();
    let blocks = BYTES / BLOCK_REACH;
    assert!(search.reads <= blocks, "in large reads: {search:?}");
    assert!(search.bytes_read >= blocks / 2 * CLUSTER.bytes(), "{search:?}");
    let third = opened.write(2 << 20);
    assert!(third.reads <= 1, "{third:?}");
    assert_eq!(opened.place(2 << 20), [hole], "what was found is used");
    let fourth = opened.write(3 << 20);
    assert!(fourth.reads <= READS_MAX, "{fourth:?}");
    opened.tend();
    block_on(opened.disk.close()).unwrap();
}

#[test]
fn what_is_freed_while_it_is_searched_for_is_used() {
    let opened = Opened::new(&full_image(1 << 40, &[]));
    block_on(opened.disk.tend(Duration::ZERO));
    opened.write(0);
    opened.write(1 << 20);
    let places = [opened.place(0), opened.place(1 << 20)];
    assert!(block_on(opened.disk.tend(Duration::ZERO)), "it is searched");
    block_on(opened.disk.discard(GuestOffset::ZERO.span(CLUSTER.bytes()), WriteFlags::default())).unwrap();
    block_on(opened.disk.flush()).unwrap();
    opened.tend();
    opened.write(2 << 20);
    assert_eq!(opened.place(2 << 20), places[0]);
    assert_eq!(opened.place(1 << 20), places[1]);
}

#[test]
fn on_a_disk_that_is_not_tended_requests_search_a_piece_each() {
    let hole = (BLOCK_REACH * 6) + 3 * CLUSTER.bytes();
    let opened = Opened::new(&full_image(BLOCK_REACH * 8, &[hole]));
    let found = (0..32u64).find(|index| {
        let counts = opened.write(index << 20);
        assert!(counts.reads <= READS_MAX, "{counts:?}");
        opened.place(index << 20) == [hole]
    });
    assert!(found.is_some_and(|requests| requests > 1), "{found:?}");
}

#[test]
fn a_device_has_nothing_behind_but_what_is_free_is_found() {
    let hole = BLOCK_REACH * 6 + 3 * CLUSTER.bytes();
    let limits = Limits { fixed_len: true, grows_zeroed: false, ..Limits::plain() };
    let image = MemoryStorage::with(
        "device",
        limits,
        full_image(BLOCK_REACH * 8, &[hole, hole + (1 << 30)]).content(),
    );
    let opened = Opened::new(&image);
    // The mapping's table, and the data.
    opened.write(0);
    assert_eq!(opened.place(0), [hole + (1 << 30)]);
    let data = Buffer::copy_of(&[7; 4096]);
    let error =
        block_on(opened.disk.write(GuestOffset::new(1 << 20), data, WriteFlags::default())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
}

/// A host that provides no more space, until it does.
struct FullHost {
    inner: Arc<MemoryStorage>,
    is_full: AtomicBool,
}

impl ForwardStorage for FullHost {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        match self.is_full.load(Ordering::Relaxed) && len > self.inner.len() {
            true => Box::pin(async { Err(Error::new(ErrorKind::NoSpace, "the host is full")) }),
            false => self.inner.set_len(len),
        }
    }
}

#[test]
fn when_a_full_host_has_space_again_no_request_waits_for_a_search() {
    let hole = BLOCK_REACH * 2 + 3 * CLUSTER.bytes();
    let bytes = BLOCK_REACH * 40;
    let inner = full_image(bytes, &[hole, hole + CLUSTER.bytes()]);
    let host = Forwarding::new(FullHost { inner, is_full: AtomicBool::new(true) });
    let opened = Opened::new(&host);
    opened.write(0); // finds the two: for a table, and for the data
    assert_eq!(opened.place(0), [hole + CLUSTER.bytes()]);
    host.is_full.store(false, Ordering::Relaxed);
    for index in 1..4 {
        let counts = opened.write(index << 20);
        assert!(counts.reads <= READS_MAX, "{counts:?}");
        assert!(opened.place(index << 20)[0] >= bytes, "it lies behind everything else");
    }
}

/// Four tasks write at the same time and the disk is not tended. Each may search for space when it has what
/// it needed; two never search the same part at the same time, and no search is wasted.
#[test]
fn concurrent_searches_do_not_undo_each_other() {
    let options = CreateOptions { size: 6 << 20, ..small(None).options };
    let setup = QcowSetup { name: "half full", options, has_base: false };
    let world = World::new(5);
    let drive = common::busy_drive(&world, setup.empty_image(), FaultPlan::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        for at in (0..3 << 20).step_by(1 << 18) {
            let data = Buffer::copy_of(&[7; 1 << 18]);
            disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
        }
        disk.close().await.unwrap();
        let disk = setup.open(&drive).await.unwrap();
        let mark = drive.counts();
        let writers = (0..4u64).map(|writer| {
            let disk = disk.clone();
            world.spawn(async move {
                for index in 0..30 {
                    let at = GuestOffset::new((3 << 20) + (writer << 18) + index * 512);
                    disk.write(at, Buffer::copy_of(&[9; 512]), WriteFlags::default()).await.unwrap();
                }
            })
        });
        for writer in writers.collect::<Vec<_>>() {
            writer.await;
        }
        let reads = drive.counts_since(mark).reads;
        // Each of the blocks is read once, by a request or by a search.
        assert!(reads <= 128, "{reads} reads");
        disk.close().await.unwrap();
    });
}

/// Refcounts of 64 bits and clusters of 512 bytes: the search becomes long after 1 MiB.
fn small(journal: Option<u64>) -> QcowSetup {
    let options = CreateOptions {
        size: 3 << 20,
        cluster_size: 512,
        refcount_bits: 64,
        journal,
        ..CreateOptions::without_journal()
    };
    QcowSetup { name: "small", options, has_base: false }
}

#[test]
fn disks_are_right_while_space_is_searched_for() {
    for (seed, journal) in [(1, None), (2, Some(64 << 10)), (3, None), (4, Some(64 << 10))] {
        let setup = small(journal);
        let world = World::new(seed);
        let drive = common::busy_drive(&world, setup.empty_image(), FaultPlan::default());
        world.run(async {
            let mut model = vec![7; 3 << 20];
            let disk = setup.open(&drive).await.unwrap();
            for at in (0..3 << 20).step_by(1 << 18) {
                let data = Buffer::copy_of(&[7; 1 << 18]);
                disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
            }
            disk.close().await.unwrap();
            let mut random = Random::from_seed(seed);
            for round in 1..=3u8 {
                let disk = setup.open(&drive).await.unwrap();
                for step in 0..150u8 {
                    let len = 512 * (1 + random.below(32));
                    let at = random.below((3 << 20) - len) / 512 * 512;
                    let range = usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
                    let is_discard = random.one_in(if step < 75 { 2 } else { 8 });
                    let change = async {
                        match is_discard {
                            true => {
                                let span = GuestOffset::new(at).span(len);
                                disk.discard(span, WriteFlags::default()).await.unwrap();
                            }
                            false => {
                                let data = Buffer::copy_of(&vec![round ^ step; range.len()]);
                                disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
                            }
                        }
                    };
                    let tends = random.one_in(3);
                    let tend = async { tends && disk.tend(Duration::ZERO).await };
                    zip(change, tend).await;
                    model[range].fill(if is_discard { 0 } else { round ^ step });
                    if random.one_in(6) {
                        disk.flush().await.unwrap();
                    }
                }
                disk.close().await.unwrap();
                let image: SharedStorage = drive.clone();
                let (report, lines) = common::look(&image).await.unwrap();
                assert!(report.is_clean(), "{seed} {round}: {lines:?}");
                let disk = setup.open(&drive).await.unwrap();
                let got = disk.read(GuestOffset::ZERO, Buffer::zeroed(3 << 20)).await.unwrap();
                assert!(got.slice() == model, "{seed} {round}");
                disk.close().await.unwrap();
            }
        });
    }
}
