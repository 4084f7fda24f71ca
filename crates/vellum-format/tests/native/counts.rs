//! What a synchronous write costs: exactly, per operation, in the steady state.
//!
//! In each row every operation is followed by a flush; the first 64 are not counted. *Foreground* is what had
//! to happen before the guest was answered; the checkpoint is added to that.

use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, HostTally, IoCounts, MemoryStorage, Random, SharedDisk,
    SharedStorage, WriteFlags,
};
use vellum_format::Raw;
use vellum_format::native::{CreateOptions, Native, NewBase, OpenOptions, create};
use vellum_sim::{Drive, DriveOptions, FaultPlan, World};

use super::common::busy_drive;
use super::common::native::{NativeSetup, look_native};

const WARM: u64 = 64;
const COUNTED: u64 = 256;
const SIZE: u64 = 4 << 30;
const BASE: u64 = 64 << 20;

/// Guest operations.
#[derive(Clone, Copy)]
enum Do {
    Write(u64, usize),
    /// Bytes that cannot be packed.
    Noise(u64, usize),
    Discard(u64, u64),
    Snapshot,
}

/// What the counted operations cost, foreground.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost {
    flushes: u64,
    writes: u64,
    bytes: u64,
    /// How often a write had to wait for a clean unit.
    waits: u64,
    /// How often the base was read.
    base_reads: u64,
}

fn options(has_table: bool, base: Option<NewBase>) -> CreateOptions {
    let has_journal = has_table || base.is_some();
    CreateOptions {
        size: SIZE,
        has_table,
        base,
        journal_bytes: has_journal.then_some(1 << 20),
        uuid: Some([7; 16]),
        ..CreateOptions::default()
    }
}

fn base(zeros: Vec<GuestSpan>) -> Option<NewBase> {
    Some(NewBase { name: "base".to_owned(), format: None, size: BASE, zeros })
}

fn sum(counts: &[IoCounts]) -> (u64, u64, u64) {
    counts.iter().fold((0, 0, 0), |(flushes, writes, bytes), counts| {
        (flushes + counts.flushes, writes + counts.writes, bytes + counts.bytes_written)
    })
}

#[allow(clippy::print_stderr, reason = "the table is what the test is for")]
fn cost(name: &str, options: &CreateOptions, act: impl Fn(u64) -> Do) -> Cost {
    let world = World::new(0);
    let drive = Drive::new(&world, DriveOptions::default());
    let read = HostTally::default();
    let tally = HostTally::default();
    world.run(async {
        create(&*drive, options).await.unwrap();
        // What is read of the base is counted as of a storage.
        let bytes = MemoryStorage::holding("base", &vec![7; usize::try_from(BASE).unwrap()]);
        let below = options.base.is_some().then(|| Raw::open(bytes, true, &read) as SharedDisk);
        let image: SharedStorage = drive.clone();
        let open = OpenOptions { tally: tally.clone(), journal_key: Some(1), ..OpenOptions::default() };
        let disk = Native::open(image.clone(), below, open).await.unwrap();
        let foreground = || sum(&[tally.data.counts(), tally.metadata.counts()]);
        let mut before = (0, 0, 0);
        let mut reads_before = 0;
        for i in 0..WARM + COUNTED {
            if i == WARM {
                before = foreground();
                reads_before = read.data.counts().reads;
            }
            match act(i) {
                Do::Write(at, len) => {
                    let data = Buffer::copy_of(&vec![u8::try_from(i % 251 + 1).unwrap(); len]);
                    disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
                }
                Do::Noise(at, len) => {
                    let mut data = vec![0; len];
                    Random::from_seed(i).fill(&mut data);
                    disk.write(GuestOffset::new(at), Buffer::copy_of(&data), WriteFlags::default())
                        .await
                        .unwrap();
                }
                Do::Snapshot => drop(disk.snapshot_create("one", 0).await.unwrap()),
                Do::Discard(at, len) => {
                    disk.discard(GuestOffset::new(at).span(len), WriteFlags::default()).await.unwrap();
                }
            }
            disk.flush().await.unwrap();
        }
        let after = foreground();
        let waits = disk.waits_for_units();
        let base_reads = read.data.counts().reads - reads_before;
        disk.close().await.unwrap();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{name}: {lines:?}");
        let cost = Cost {
            flushes: after.0 - before.0,
            writes: after.1 - before.1,
            bytes: after.2 - before.2,
            waits,
            base_reads,
        };
        let per = |value: u64| value as f64 / COUNTED as f64;
        let later = tally.checkpoint.counts().bytes_written as f64 / (WARM + COUNTED) as f64 / 1024.0;
        eprintln!(
            "{name:48} {:.2} flushes {:.2} writes {:6.2} KiB   checkpoint {later:6.2} KiB",
            per(cost.flushes),
            per(cost.writes),
            per(cost.bytes) / 1024.0,
        );
        cost
    })
}

const fn exactly(flushes: u64, writes: u64, bytes: u64) -> Cost {
    Cost { flushes, writes, bytes, waits: 0, base_reads: 0 }
}

/// A place for each operation that no other has, far from the one before.
fn scattered(i: u64, unit: u64, within: u64) -> u64 {
    (i * 7919 % (within / unit)) * unit
}

#[test]
fn one_flush_each() {
    const N: u64 = COUNTED;
    let raw = exactly(N, N, N * 4096);
    // Nothing to record: what raw costs.
    let plain = options(false, None);
    assert_eq!(cost("linear, scattered", &plain, |i| Do::Write(scattered(i, 4096, SIZE), 4096)), raw);
    let over_zeros = options(false, base(vec![GuestOffset::ZERO.span(BASE)]));
    let wrote =
        cost("linear, over zeros of the base", &over_zeros, |i| Do::Write(scattered(i, 4096, BASE), 4096));
    assert_eq!(wrote, raw);
    let over = options(false, base(Vec::new()));
    let wrote =
        cost("linear, beyond the base", &over, |i| Do::Write(BASE + scattered(i, 4096, SIZE - BASE), 4096));
    assert_eq!(wrote, raw);
    // The base: the data, and one block of record.
    let both = exactly(N, 2 * N, N * 8192);
    let wrote =
        cost("linear, over the base, scattered", &over, |i| Do::Write(scattered(i, 4096, BASE), 4096));
    assert_eq!(wrote, both);
    let wrote = cost("linear, over the base, one after another", &over, |i| Do::Write(i * 4096, 4096));
    assert_eq!(wrote, both);
    let wrote = cost("linear, over the base, whole blocks", &over, |i| Do::Write(i << 16, 65_536));
    assert_eq!(wrote, exactly(N, 2 * N, N * (65_536 + 4096)));
    // The second write comes while the first is not verified: it goes through the journal.
    let wrote = cost("linear, over the base, twice", &over, |i| Do::Write((i / 2) << 12, 4096));
    assert!(wrote.flushes == N && wrote.writes <= 2 * N && wrote.bytes <= N * 8704, "{wrote:?}");
    // With a table, a unit each: the data, and one block of record.
    let table = options(true, None);
    let wrote = cost("table, a unit each", &table, |i| Do::Write(scattered(i, 1 << 20, SIZE), 4096));
    assert_eq!(wrote, both);
    let wrote = cost("table, where the unit is there", &table, |i| Do::Write(i * 4096 % (256 << 10), 4096));
    assert_eq!(wrote, raw);
    let wrote = cost("table, one after another", &table, |i| Do::Write(i * 4096, 4096));
    assert_eq!(wrote.flushes, N);
    assert!(wrote.writes <= N + 2 && wrote.bytes <= N * 4096 + 2 * 4096, "{wrote:?}");
    let table_over = options(true, base(Vec::new()));
    let wrote = cost("table, over the base", &table_over, |i| Do::Write(scattered(i, 4096, BASE), 4096));
    assert_eq!(wrote, both);
    // A unit is released and another one taken, turn by turn.
    let wrote = cost("table, discard and write again", &table, |i| match i % 2 {
        0 => Do::Write((i / 2 % 16) << 20, 4096),
        _ => Do::Discard((i / 2 % 16) << 20, 1 << 20),
    });
    assert!(wrote.flushes == N && wrote.writes <= 2 * N && wrote.bytes <= N * 8192, "{wrote:?}");
    assert_eq!(wrote.waits, 0);
}

/// Units that hold their own entries cost what raw costs.
#[test]
fn one_write_each() {
    const N: u64 = COUNTED;
    const KIB_64: usize = 64 << 10;
    let raw = exactly(N, N, N * 4096);
    let large = exactly(N, N, N << 16);
    let zoned = CreateOptions { has_zones: true, ..options(true, None) };
    let rows = |name: &str, zoned: &CreateOptions| {
        let name = |what: &str| format!("{name}, {what}");
        let in_order = cost(&name("one after another"), zoned, |i| Do::Write(i << 12, 4096));
        let scattered_ones = cost(&name("scattered"), zoned, |i| Do::Write(scattered(i, 4096, SIZE), 4096));
        let units = cost(&name("64 KiB"), zoned, |i| Do::Write(i << 16, KIB_64));
        (in_order, scattered_ones, units)
    };
    assert_eq!(rows("zoned", &zoned), (raw, raw, large));
    // In the middle of a sub-block: all of it is written.
    let wrote =
        cost("zoned, 512 bytes, scattered", &zoned, |i| Do::Write(scattered(i, 4096, SIZE) + 512, 512));
    assert_eq!(wrote, raw);
    // What cannot be packed is recorded in the journal.
    let wrote = cost("zoned, noise, scattered", &zoned, |i| Do::Noise(scattered(i, 4096, SIZE), 4096));
    assert_eq!(wrote, exactly(N, 2 * N, N * 8192));
    let wrote = cost("zoned, noise, 64 KiB", &zoned, |i| Do::Noise(i << 16, KIB_64));
    assert_eq!(wrote, exactly(N, 2 * N, N * (65_536 + 4096)));
    // Written in order and again from the beginning: the block with the entry goes through the journal once.
    let again = |i| Do::Write((i % WARM) << 16, 4096);
    let wrote = cost("zoned, 64 blocks again and again", &zoned, again);
    assert!(wrote.flushes == N && wrote.writes < N + N / 2 && wrote.bytes < N * 8192, "{wrote:?}");
    // The switch off: a table with smaller units.
    let plain = CreateOptions { embed: Some(false), ..zoned.clone() };
    let (_, scattered_ones, units) = rows("zoned, embed off", &plain);
    assert_eq!(scattered_ones, exactly(N, 2 * N, N * 8192));
    assert_eq!(units, exactly(N, 2 * N, N * (65_536 + 4096)));
    // Over a base: behind it and over its zeros nothing lies beneath.
    let zoned_over = |zeros| CreateOptions { has_zones: true, ..options(true, base(zeros)) };
    let beyond = |i| Do::Write(BASE + scattered(i, 4096, SIZE - BASE), 4096);
    assert_eq!(cost("zoned, beyond the base", &zoned_over(Vec::new()), beyond), raw);
    let over_zeros = zoned_over(vec![GuestOffset::ZERO.span(BASE)]);
    let over = |i| Do::Write(scattered(i, 65_536, BASE), 4096);
    assert_eq!(cost("zoned, over zeros of the base", &over_zeros, over), raw);
}

/// Over a base, and with a snapshot: the packed block is all that becomes the image's.
#[test]
fn one_write_each_over_a_base() {
    const N: u64 = COUNTED;
    let raw = exactly(N, N, N * 4096);
    let both = exactly(N, 2 * N, N * 8192);
    let zoned = CreateOptions { has_zones: true, ..options(true, None) };
    let over = CreateOptions { has_zones: true, ..options(true, base(Vec::new())) };
    let off = CreateOptions { embed: Some(false), ..over.clone() };
    // A unit each.
    let units = |i| Do::Write(scattered(i, 65_536, BASE), 4096);
    assert_eq!(cost("zoned, over the base, a unit each", &over, units), raw);
    assert_eq!(cost("zoned, over the base, a unit each, embed off", &off, units), both);
    // The rest of the sub-block is read from the base.
    let parts = |i| Do::Write(scattered(i, 65_536, BASE), 512);
    let read = Cost { base_reads: N, ..raw };
    assert_eq!(cost("zoned, over the base, 512 bytes, a unit each", &over, parts), read);
    let read = Cost { base_reads: N, ..both };
    assert_eq!(cost("zoned, over the base, 512 bytes, embed off", &off, parts), read);
    // What does not pack, and what fills more than one sub-block, is recorded in the journal.
    let noise = |i| Do::Noise(scattered(i, 65_536, BASE), 4096);
    assert_eq!(cost("zoned, over the base, noise, a unit each", &over, noise), both);
    let two = |i| Do::Write(scattered(i, 65_536, BASE), 8192);
    assert_eq!(cost("zoned, over the base, 8 KiB, a unit each", &over, two), exactly(N, 2 * N, N * 12_288));
    let whole = |i| Do::Write(i << 16, 65_536);
    assert_eq!(cost("zoned, over the base, 64 KiB", &over, whole), exactly(N, 2 * N, N * (65_536 + 4096)));
    // One of sixteen sub-blocks is the first of its unit. The record that goes with its flush is the one that verifies the
    // record before.
    let in_order = |i| Do::Write(i << 12, 4096);
    assert_eq!(cost("zoned, over the base, one after another", &over, in_order), both);
    // After a snapshot. The first write to a page of the table, and of masks, keeps it, and is not counted here.
    let snapped = |i| if i == 1 { Do::Snapshot } else { units(i) };
    assert_eq!(cost("zoned, with a snapshot, a unit each", &zoned, snapped), raw);
    assert_eq!(cost("zoned, over the base, with a snapshot", &over, snapped), raw);
    assert_eq!(cost("zoned, over the base, with a snapshot, embed off", &off, snapped), both);
}

/// Four guests that flush at a time share.
#[test]
fn flushes_are_shared() {
    let over = NativeSetup::linear("linear over a base", 1 << 20).over(vec![7; 1 << 20], 64 << 10);
    for setup in
        [NativeSetup::linear("linear", 1 << 20), NativeSetup::table("table", 1 << 20, 64 << 10), over]
    {
        let world = World::new(0);
        let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
        world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
            let mark = drive.counts();
            let guests: Vec<_> = (0..4u64)
                .map(|guest| {
                    let disk = disk.clone();
                    world.spawn(async move {
                        for i in 0..64u64 {
                            let at = GuestOffset::new((guest << 18) + (i << 12));
                            disk.write(at, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
                        }
                    })
                })
                .collect();
            for guest in guests {
                guest.await;
            }
            let flushes = drive.counts_since(mark).flushes;
            assert!(flushes <= 4 * 64 / 2, "{}: {flushes} flushes for {} writes", setup.name, 4 * 64);
            disk.close().await.unwrap();
        });
    }
}

/// A flush without a write before it is none.
#[test]
fn nothing_written_nothing_flushed() {
    let setup = NativeSetup::table("table", 1 << 20, 64 << 10);
    let world = World::new(0);
    let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let mark = drive.counts();
        disk.flush().await.unwrap();
        assert_eq!(drive.counts_since(mark).flushes, 0);
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
        let mark = drive.counts();
        disk.flush().await.unwrap();
        disk.flush().await.unwrap();
        assert_eq!(drive.counts_since(mark).flushes, 0);
        disk.close().await.unwrap();
    });
}
