//! Copies of the disk below: what is kept, what it costs, and what is left out.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::native::{NativeSetup, look_native};
use common::{QcowSetup, busy_drive, look};
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, GuestSpan, HostTally, LocalFuture, MemoryDisk, Place, Result,
    SharedDisk, SharedStorage, WriteFlags, ZeroFlags, fill_from_below,
};
use vellum_format::native::{self, Native};
use vellum_format::qcow2::{self, CreateOptions, Files, Header, Qcow2};
use vellum_format::report::CheckReport;
use vellum_sim::{
    Content, Drive, DriveOptions, Fault, FaultPlan, ForwardDisk, Forwarding, Operation, Repeat, World,
};

const SIZE: u64 = 8 << 20;
/// Within a sector.
const BASE: u64 = (4 << 20) + 70_001;

/// A disk that counts what is read of it.
struct Counted {
    inner: SharedDisk,
    reads: Arc<AtomicU64>,
}

impl ForwardDisk for Counted {
    fn inner(&self) -> &dyn Disk {
        &*self.inner
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.inner.read(at, buffer)
    }
}

fn base_bytes() -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(BASE).unwrap()];
    vellum_core::Random::from_seed(5).fill(&mut bytes);
    bytes
}

#[derive(Clone)]
enum Kind {
    Qcow(QcowSetup),
    Native(NativeSetup),
}

fn qcow(name: &'static str, options: CreateOptions) -> Kind {
    let options = CreateOptions { size: SIZE, journal: Some(1 << 20), ..options };
    Kind::Qcow(QcowSetup { name, options, has_base: true })
}

fn over(setup: NativeSetup, block: u64) -> Kind {
    let mut setup = setup.over(base_bytes(), block);
    setup.options.journal_bytes = Some(1 << 20);
    Kind::Native(setup)
}

fn kinds() -> Vec<Kind> {
    let plain = CreateOptions::without_journal;
    vec![
        qcow("qcow2", plain()),
        qcow("qcow2, 4 KiB clusters", CreateOptions { cluster_size: 4096, ..plain() }),
        qcow("qcow2, 2 MiB clusters", CreateOptions { cluster_size: 2 << 20, ..plain() }),
        qcow("qcow2, subclusters", CreateOptions { extended_l2: true, ..plain() }),
        over(NativeSetup::table("table", SIZE, 1 << 20), 64 << 10),
        over(NativeSetup::table("table, small blocks", SIZE, 64 << 10), 4 << 10),
        over(NativeSetup::zoned("zoned", SIZE, 64 << 10, 1 << 20), 64 << 10),
        linear(),
        over(NativeSetup::linear("linear, large blocks", SIZE), 1 << 20),
    ]
}

fn linear() -> Kind {
    over(NativeSetup::linear("linear", SIZE), 64 << 10)
}

/// An image of one kind, over the base.
struct Scene {
    kind: Kind,
    drive: Arc<Drive>,
    reads: Arc<AtomicU64>,
    tally: HostTally,
}

impl Scene {
    async fn new(kind: &Kind, drive: Arc<Drive>) -> Self {
        match kind {
            Kind::Qcow(setup) => {
                let backing = setup.has_base.then(|| ("base".to_owned(), Some("raw".to_owned())));
                let options = CreateOptions { backing, ..setup.options.clone() };
                qcow2::create(&*drive, None, &options).await.unwrap();
            }
            Kind::Native(setup) => drop(native::create(&*drive, &setup.create_options()).await.unwrap()),
        }
        Self { kind: kind.clone(), drive, reads: Arc::default(), tally: HostTally::default() }
    }

    fn name(&self) -> &'static str {
        match &self.kind {
            Kind::Qcow(setup) => setup.name,
            Kind::Native(setup) => setup.name,
        }
    }

    fn is_linear(&self) -> bool {
        self.name().starts_with("linear")
    }

    async fn open(&self) -> SharedDisk {
        let inner: SharedDisk = MemoryDisk::holding(&base_bytes());
        let below: SharedDisk = Forwarding::new(Counted { inner, reads: self.reads.clone() });
        let image: SharedStorage = self.drive.clone();
        match &self.kind {
            Kind::Qcow(_) => {
                let header = Header::read(&*image).await.unwrap();
                let files = Files { image, data_file: None, below: Some(below) };
                let tally = self.tally.clone();
                let options =
                    qcow2::OpenOptions { journal_key: Some(1), tally, ..qcow2::OpenOptions::default() };
                Qcow2::open(header, files, options).await.unwrap()
            }
            Kind::Native(_) => {
                let tally = self.tally.clone();
                let options =
                    native::OpenOptions { journal_key: Some(1), tally, ..native::OpenOptions::default() };
                Native::open(image, Some(below), options).await.unwrap()
            }
        }
    }

    fn base_reads(&self) -> u64 {
        self.reads.swap(0, Ordering::Relaxed)
    }

    /// Host flushes and writes so far.
    fn host(&self) -> (u64, u64) {
        let counts = self.drive.counts();
        (counts.flushes, counts.writes)
    }

    async fn check(&self) {
        let image: SharedStorage = self.drive.clone();
        let (report, lines): (CheckReport, Vec<String>) = match &self.kind {
            Kind::Qcow(_) => look(&image).await.unwrap(),
            Kind::Native(_) => look_native(&image).await.unwrap(),
        };
        assert!(report.is_clean(), "{}: {lines:?}", self.name());
    }
}

fn guest(bytes: u64) -> GuestOffset {
    GuestOffset::new(bytes)
}

fn expected() -> Vec<u8> {
    let mut bytes = base_bytes();
    bytes.resize(usize::try_from(SIZE).unwrap(), 0);
    bytes
}

async fn read_all(disk: &dyn Disk) -> Vec<u8> {
    disk.read(GuestOffset::ZERO, Buffer::zeroed(usize::try_from(SIZE).unwrap())).await.unwrap().to_vec()
}

/// How many bytes of the base the disk still reads.
async fn still_below(disk: &dyn Disk) -> u64 {
    let mut rest = GuestOffset::ZERO.span(BASE);
    let mut below = 0;
    while !rest.is_empty() {
        for extent in disk.map(rest).await.unwrap() {
            if matches!(extent.place, Place::Below) {
                below += extent.span.len();
            }
            rest = GuestSpan::between(extent.span.end(), rest.end());
        }
    }
    below
}

/// Fills until nothing is read from below. Returns how many flushes that took.
async fn fill_all(disk: &dyn Disk) -> u64 {
    let mut flushes = 0;
    for round in 0..100 {
        let filled = fill_from_below(disk, GuestOffset::ZERO.span(BASE)).await.unwrap();
        if filled.wants_flush {
            disk.flush().await.unwrap();
            flushes += 1;
        } else if still_below(disk).await == 0 {
            return flushes;
        }
        assert!(round < 99, "{} bytes are still below", still_below(disk).await);
    }
    unreachable!()
}

fn in_world(kinds: &[Kind], act: impl AsyncFn(&Scene)) {
    for kind in kinds {
        let world = World::new(0);
        let drive = Drive::new(&world, DriveOptions::default());
        world.run(async {
            let scene = Scene::new(kind, drive).await;
            act(&scene).await;
        });
    }
}

#[test]
fn what_was_filled_is_not_read_from_below_again() {
    in_world(&kinds(), async |scene| {
        let name = scene.name();
        let disk = scene.open().await;
        let filling = disk.filling().expect(name);
        assert_eq!(filling.kept_at_close, scene.is_linear(), "{name}");
        assert_eq!(still_below(&*disk).await, BASE, "{name}");
        fill_all(&*disk).await;
        scene.base_reads();
        assert!(read_all(&*disk).await == expected(), "{name}");
        assert_eq!(scene.base_reads(), 0, "{name}");
        disk.close().await.unwrap();
        scene.check().await;
        let disk = scene.open().await;
        assert!(read_all(&*disk).await == expected(), "{name}");
        assert_eq!((scene.base_reads(), still_below(&*disk).await), (0, 0), "{name}");
        disk.close().await.unwrap();
    });
}

/// FVD's free copy-on-read: nothing but the bytes is written, whatever the guest flushes.
#[test]
fn a_fill_of_a_linear_image_writes_nothing_but_the_bytes() {
    in_world(&[linear()], async |scene| {
        let disk = scene.open().await;
        let before = scene.host();
        let filled = fill_from_below(&*disk, GuestOffset::ZERO.span(BASE)).await.unwrap();
        assert!(filled.kept >= BASE && !filled.wants_flush, "{filled:?}");
        disk.flush().await.unwrap();
        disk.flush().await.unwrap();
        assert_eq!(scene.tally.metadata.counts().writes, 0);
        assert_eq!(scene.tally.checkpoint.counts().writes, 0);
        let (flushes, writes) = scene.host();
        assert_eq!(flushes - before.0, 0, "the guest has written nothing, so its flushes are free");
        assert_eq!(writes - before.1, BASE.div_ceil(64 << 10), "one write for each block");
        // Bits, the superblock and the journal: at the close, once.
        disk.close().await.unwrap();
        scene.check().await;
    });
}

/// Elsewhere a fill joins what the guest's next flush writes anyway.
#[test]
fn a_fill_asks_for_no_flush_and_no_record() {
    let journaled: Vec<Kind> = kinds().into_iter().filter(|kind| !is_linear(kind)).collect();
    in_world(&journaled, async |scene| {
        let name = scene.name();
        let disk = scene.open().await;
        // The first change of an opening marks the image as in use.
        disk.write(guest(6 << 20), Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
        let unit = disk.filling().unwrap().unit.bytes();
        let before = (scene.host().0, scene.tally.metadata.counts().writes);
        let filled = fill_from_below(&*disk, guest(unit).span(unit)).await.unwrap();
        assert_eq!((filled.kept, filled.wants_flush), (unit, false), "{name}");
        assert_eq!((scene.host().0, scene.tally.metadata.counts().writes), before, "{name}");
        // The same write, with a fill before it and without.
        let mut costs = Vec::new();
        for (round, fills) in [true, false].into_iter().enumerate() {
            if fills {
                fill_from_below(&*disk, guest(2 * unit).span(unit)).await.unwrap();
            }
            let before = scene.host();
            disk.write(
                guest((6 << 20) + 8192 + round as u64 * 4096),
                Buffer::copy_of(&[2; 512]),
                WriteFlags::default(),
            )
            .await
            .unwrap();
            disk.flush().await.unwrap();
            costs.push((scene.host().0 - before.0, scene.host().1 - before.1));
        }
        assert_eq!(costs[0].0, 1, "{name}: {costs:?}");
        assert!(costs[0].1 <= costs[1].1 + 1, "{name}: at most the record is more: {costs:?}");
        disk.close().await.unwrap();
        scene.check().await;
    });
}

fn is_linear(kind: &Kind) -> bool {
    matches!(kind, Kind::Native(setup) if setup.name.starts_with("linear"))
}

/// So that a guest's flush stays cheap, a transaction takes a bounded part of fills.
#[test]
fn fills_wait_for_the_next_flush_when_they_have_no_more_room() {
    let journaled: Vec<Kind> = kinds().into_iter().filter(|kind| !is_linear(kind)).collect();
    in_world(&journaled, async |scene| {
        let name = scene.name();
        let disk = scene.open().await;
        let filled = fill_from_below(&*disk, GuestOffset::ZERO.span(BASE)).await.unwrap();
        assert!(filled.wants_flush && filled.kept > 0, "{name}: {filled:?}");
        assert!(filled.kept <= 2 << 20, "{name}: {filled:?}");
        let again = fill_from_below(&*disk, GuestOffset::ZERO.span(BASE)).await.unwrap();
        assert_eq!((again.kept, again.wants_flush), (0, true), "{name}");
        let flushes = fill_all(&*disk).await;
        assert!(flushes >= 2, "{name}: {flushes}");
        disk.close().await.unwrap();
        scene.check().await;
    });
}

#[test]
fn what_the_guest_wrote_or_made_zero_is_left_alone() {
    in_world(&kinds(), async |scene| {
        let name = scene.name();
        let disk = scene.open().await;
        let mut model = expected();
        disk.write(guest(100_000), Buffer::copy_of(&[9; 5000]), WriteFlags::default()).await.unwrap();
        model[100_000..105_000].fill(9);
        disk.write_zeroes(guest(300_000).span(40_000), ZeroFlags { may_unmap: true, ..ZeroFlags::default() })
            .await
            .unwrap();
        model[300_000..340_000].fill(0);
        fill_all(&*disk).await;
        assert!(read_all(&*disk).await == model, "{name}");
        // Over what was filled, and the zeros of that.
        disk.write(guest(1_000_001), Buffer::copy_of(&[8; 777]), WriteFlags::default()).await.unwrap();
        model[1_000_001..1_000_778].fill(8);
        disk.write_zeroes(guest(1 << 21).span(1 << 16), ZeroFlags::default()).await.unwrap();
        model[1 << 21..(1 << 21) + (1 << 16)].fill(0);
        assert!(read_all(&*disk).await == model, "{name}");
        fill_all(&*disk).await;
        assert!(read_all(&*disk).await == model, "{name}");
        disk.close().await.unwrap();
        let disk = scene.open().await;
        scene.base_reads();
        assert!(read_all(&*disk).await == model, "{name}");
        assert_eq!(scene.base_reads(), 0, "{name}");
        disk.close().await.unwrap();
        scene.check().await;
    });
}

/// A write that is in flight has a claim: the fill does not wait for it, and is dropped.
#[test]
fn a_fill_waits_for_no_write() {
    for kind in kinds() {
        let world = World::new(0);
        let drive = Drive::new(&world, DriveOptions::default());
        world.run(async {
            let scene = Scene::new(&kind, drive.clone()).await;
            let name = scene.name();
            let disk = scene.open().await;
            // Over the base, so that everything has begun.
            disk.write(guest(4 << 20), Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
            let unit = disk.filling().unwrap().unit.bytes();
            let hold = drive.hold(Operation::Write);
            let writer = disk.clone();
            let writing = world.spawn(async move {
                writer.write(guest(unit + 512), Buffer::copy_of(&[7; 512]), WriteFlags::default()).await
            });
            hold.caught(1).await;
            let filled = fill_from_below(&*disk, guest(unit).span(unit)).await.unwrap();
            assert_eq!((filled.kept, hold.count()), (0, 1), "{name}");
            hold.release();
            writing.await.unwrap();
            let mut model = expected();
            model[4 << 20..(4 << 20) + 4096].fill(1);
            let at = usize::try_from(unit).unwrap() + 512;
            model[at..at + 512].fill(7);
            assert!(read_all(&*disk).await == model, "{name}");
            disk.close().await.unwrap();
            scene.check().await;
        });
    }
}

/// The host has no space, or fails: the copy is dropped, and the guest notices nothing.
#[test]
fn a_fill_that_fails_changes_nothing() {
    for kind in kinds() {
        for error in [ErrorKind::NoSpace, ErrorKind::Io] {
            let world = World::new(0);
            let faults = FaultPlan::none();
            let drive = busy_drive(&world, Content::zeroed(0), faults.clone());
            world.run(async {
                let scene = Scene::new(&kind, drive).await;
                let name = scene.name();
                let disk = scene.open().await;
                disk.write(guest(6 << 20), Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
                faults.add(Fault { error, repeat: Repeat::ForEver, ..Fault::nth(Operation::Write, 0) });
                let unit = disk.filling().unwrap().unit.bytes();
                let failed = fill_from_below(&*disk, guest(0).span(unit)).await;
                assert_eq!(failed.expect_err(name).kind(), error, "{name}");
                faults.clear();
                let mut model = expected();
                model[6 << 20..(6 << 20) + 4096].fill(1);
                assert!(read_all(&*disk).await == model, "{name}");
                fill_all(&*disk).await;
                disk.flush().await.unwrap();
                assert!(read_all(&*disk).await == model, "{name}");
                disk.close().await.unwrap();
                scene.check().await;
            });
        }
    }
}

/// A copy that is left out takes no room from those that come after it.
#[test]
fn what_was_left_out_takes_no_room() {
    let journaled: Vec<Kind> = kinds().into_iter().filter(|kind| !is_linear(kind)).collect();
    for kind in journaled {
        let world = World::new(0);
        let drive = Drive::new(&world, DriveOptions::default());
        world.run(async {
            let scene = Scene::new(&kind, drive.clone()).await;
            let name = scene.name();
            let disk = scene.open().await;
            disk.write(guest(4 << 20), Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
            let unit = disk.filling().unwrap().unit.bytes();
            let hold = drive.hold(Operation::Write);
            let writer = disk.clone();
            let writing = world.spawn(async move {
                writer.write(guest(unit + 512), Buffer::copy_of(&[7; 512]), WriteFlags::default()).await
            });
            hold.caught(1).await;
            for _ in 0..(4 << 20) / unit {
                let filled = fill_from_below(&*disk, guest(unit).span(unit)).await.unwrap();
                assert_eq!((filled.kept, filled.wants_flush), (0, false), "{name}");
            }
            hold.release();
            writing.await.unwrap();
            fill_all(&*disk).await;
            disk.close().await.unwrap();
            scene.check().await;
        });
    }
}

/// A copy may be written and then find that the transaction has become too large for it. Its unit is given to another
/// part of the disk later, which must not show the bytes.
#[test]
fn a_copy_that_was_written_in_vain_leaves_no_bytes_behind() {
    for setup in [
        NativeSetup::table("table, small journal", SIZE, 64 << 10),
        NativeSetup::zoned("zoned, small journal", SIZE, 64 << 10, 1 << 20),
    ] {
        let kind = Kind::Native(setup.over(base_bytes(), 16 << 10));
        in_world(&[kind], async |scene| {
            let name = scene.name();
            let disk = scene.open().await;
            let (mut model, mut in_vain) = (expected(), 0);
            for round in 0..48_u64 {
                // Small writes over the base take room for their masks and checks.
                for write in 0..round % 24 {
                    let at = (round * 24 + write) * 4096 % (3 << 20);
                    disk.write(guest(at), Buffer::copy_of(&[8; 512]), WriteFlags::default()).await.unwrap();
                    let at = usize::try_from(at).unwrap();
                    model[at..at + 512].fill(8);
                }
                let at = (round << 16) % (BASE & !0xFFFF);
                let filled = fill_from_below(&*disk, guest(at).span(64 << 10)).await.unwrap();
                in_vain += u64::from(filled.wants_flush);
                disk.flush().await.unwrap();
                // A unit behind the base, of which only a part is written.
                let behind = (5 << 20) + (round << 16);
                if behind + 65_536 <= SIZE {
                    disk.write(guest(behind + 32_768), Buffer::copy_of(&[7; 512]), WriteFlags::default())
                        .await
                        .unwrap();
                    let at = usize::try_from(behind + 32_768).unwrap();
                    model[at..at + 512].fill(7);
                }
            }
            assert!(in_vain > 0, "{name}");
            assert!(read_all(&*disk).await == model, "{name}");
            disk.close().await.unwrap();
            scene.check().await;
        });
    }
}

/// What ends within the base, or behind it, or is no whole unit.
#[test]
fn only_whole_units_are_kept() {
    in_world(&kinds(), async |scene| {
        let name = scene.name();
        let disk = scene.open().await;
        let unit = disk.filling().unwrap().unit;
        let part = usize::try_from(unit.bytes() - 1).unwrap();
        let filled = disk.fill(guest(0), Buffer::copy_of(&base_bytes()[..part])).await.unwrap();
        assert_eq!(filled.kept, 0, "{name}");
        // More than the base has: what lies behind its end is not asked for.
        let last = unit.round_down(BASE);
        let from = usize::try_from(last).unwrap();
        let mut bytes = base_bytes()[from..].to_vec();
        let base_len = bytes.len();
        bytes.resize(base_len + 10_000, 0);
        let filled = disk.fill(guest(last), Buffer::copy_of(&bytes)).await.unwrap();
        assert!(filled.kept >= base_len as u64, "{name}: {filled:?}");
        assert!(read_all(&*disk).await == expected(), "{name}");
        let outside = disk.fill(guest(SIZE), Buffer::zeroed(512)).await;
        assert_eq!(outside.unwrap_err().kind(), ErrorKind::Invalid, "{name}");
        disk.close().await.unwrap();
        scene.check().await;
    });
}

#[test]
fn images_without_a_journal_take_no_copies() {
    let ordered = Kind::Qcow(QcowSetup {
        name: "qcow2 without a journal",
        options: CreateOptions { size: SIZE, ..CreateOptions::without_journal() },
        has_base: true,
    });
    in_world(&[ordered], async |scene| {
        let disk = scene.open().await;
        assert_eq!(disk.filling(), None);
        let refused = disk.fill(guest(0), Buffer::zeroed(65_536)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
    });
}
