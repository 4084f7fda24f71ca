//! What a synchronous write costs with a journal: exactly, per operation, in the steady state.
//!
//! *Foreground* is what had to happen before the guest was answered; *total* adds the checkpoint and the
//! clean close. In each row every operation is followed by a flush; the first 64 are not counted.

mod common;

use std::sync::Arc;

use common::{QcowSetup, busy_drive, look};
use vellum_core::{
    Buffer, Disk, GuestOffset, HostTally, IoCounts, MemoryDisk, Random, SharedDisk, SharedStorage, WriteFlags,
};
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2};
use vellum_format::raw::Raw;
use vellum_sim::{Content, Drive, DriveOptions, FaultPlan, World};

const WARM: u64 = 64;
const COUNTED: u64 = 256;
const SIZE: u64 = 16 << 30;

fn journaled() -> CreateOptions {
    CreateOptions { size: SIZE, journal: Some(1 << 20), ..CreateOptions::without_journal() }
}

async fn open(drive: &Arc<Drive>, below: Option<SharedDisk>, tally: &HostTally) -> Arc<Qcow2> {
    let image: SharedStorage = drive.clone();
    let header = Header::read(&*image).await.unwrap();
    let options = OpenOptions { tally: tally.clone(), journal_key: Some(1), ..OpenOptions::default() };
    Qcow2::open(header, Files { image, data_file: None, below }, options).await.unwrap()
}

/// Guest operations: at which place the number `i` writes, and how many bytes; or discards.
#[derive(Clone, Copy)]
enum Do {
    Write(u64, usize),
    Discard(u64, u64),
}

/// What the counted operations cost, foreground: flushes, writes, bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost {
    flushes: u64,
    writes: u64,
    bytes: u64,
    /// Bytes that the checkpoint wrote meanwhile and at the close.
    later_bytes: u64,
}

fn sum(counts: &[IoCounts]) -> (u64, u64, u64) {
    counts.iter().fold((0, 0, 0), |(flushes, writes, bytes), counts| {
        (flushes + counts.flushes, writes + counts.writes, bytes + counts.bytes_written)
    })
}

#[allow(clippy::print_stderr, reason = "the table is what the test is for")]
fn cost(name: &str, options: &CreateOptions, has_base: bool, act: impl Fn(u64) -> Do) -> Cost {
    let setup = QcowSetup { name: "counts", options: options.clone(), has_base };
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    let base = MemoryDisk::holding(&vec![7; 64 << 20]);
    let tally = HostTally::default();
    world.run(async {
        let below = has_base.then(|| base.clone() as SharedDisk);
        let disk = open(&drive, below, &tally).await;
        let foreground = || sum(&[tally.data.counts(), tally.metadata.counts()]);
        let mut before = (0, 0, 0);
        for i in 0..WARM + COUNTED {
            if i == WARM {
                before = foreground();
            }
            match act(i) {
                Do::Write(at, len) => {
                    let data = Buffer::copy_of(&vec![u8::try_from(i % 251 + 1).unwrap(); len]);
                    disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
                }
                Do::Discard(at, len) => {
                    disk.discard(GuestOffset::new(at).span(len), WriteFlags::default()).await.unwrap();
                }
            }
            disk.flush().await.unwrap();
        }
        let after = foreground();
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.is_clean(), "{name}: {lines:?}");
        let cost = Cost {
            flushes: after.0 - before.0,
            writes: after.1 - before.1,
            bytes: after.2 - before.2,
            later_bytes: tally.checkpoint.counts().bytes_written,
        };
        let per = |value: u64| value as f64 / COUNTED as f64;
        eprintln!(
            "{name:38} {:.2} flushes {:.2} writes {:6.2} KiB   checkpoint {:6.2} KiB",
            per(cost.flushes),
            per(cost.writes),
            per(cost.bytes) / 1024.0,
            cost.later_bytes as f64 / (WARM + COUNTED) as f64 / 1024.0
        );
        cost
    })
}

/// A place for each operation that no other has, far from the one before.
fn scattered(i: u64, unit: u64) -> u64 {
    (i * 7919 % (SIZE / unit)) * unit
}

#[test]
fn one_flush_each() {
    let plain = journaled();
    let over = CreateOptions { extended_l2: true, ..journaled() };
    let whole = |cost: Cost| (cost.flushes, cost.writes, cost.bytes);
    let n = COUNTED;
    // Overwriting costs what raw costs.
    let cost_of = |name, act: fn(u64) -> Do| cost(name, &plain, false, act);
    let in_place =
        cost_of("4 KiB, overwriting", |i| Do::Write(if i < 8 { i << 16 } else { (i % 8) << 16 }, 4096));
    assert!(in_place.flushes == n && in_place.writes == n && in_place.bytes == n * 4096, "{in_place:?}");
    // A fresh cluster each: the data, and one block of record.
    let appending = cost_of("4 KiB, a cluster each, one after another", |i| Do::Write(i << 16, 4096));
    assert_eq!(whole(appending), (n, 2 * n, n * 8192));
    let random = cost_of("4 KiB, a cluster each, scattered", |i| Do::Write(scattered(i, 1 << 16), 4096));
    assert_eq!(whole(random), (n, 2 * n, n * 8192));
    let sequential = cost_of("4 KiB, one after another", |i| Do::Write(i * 4096, 4096));
    assert_eq!(sequential.flushes, n);
    assert_eq!(sequential.writes, n + n / 8, "a record for each cluster, and one that proves it");
    let large = cost_of("64 KiB, one after another", |i| Do::Write(i << 16, 65_536));
    assert_eq!(whole(large), (n, 2 * n, n * (65_536 + 4096)));
    // The second write comes while the first is not verified: it goes through the journal.
    let twice = cost_of("4 KiB, append and overwrite", |i| Do::Write((i / 2) << 16, 4096));
    assert_eq!(twice.flushes, n);
    assert!(twice.writes <= 2 * n && twice.bytes <= n * 8704, "{twice:?}");
    let twice = cost_of("64 KiB, append and overwrite", |i| Do::Write((i / 2) << 16, 65_536));
    assert_eq!(twice.flushes, n);
    // A table each.
    let tables =
        cost("4 KiB, an L2 table each", &CreateOptions { size: 1 << 40, ..journaled() }, false, |i| {
            Do::Write(i << 29, 4096)
        });
    assert_eq!(whole(tables), (n, 2 * n, n * 8192));
    // Over a base the rest is neither read nor copied.
    let base = cost("4 KiB, scattered over a base", &over, true, |i| Do::Write(i * 65_536 + 8192, 4096));
    assert_eq!(whole(base), (n, 2 * n, n * 8192));
    // A cluster is released and another one taken, turn by turn.
    let again = cost_of("4 KiB, discard and write again", |i| match i % 2 {
        0 => Do::Write((i / 2 % 16) << 16, 4096),
        _ => Do::Discard((i / 2 % 16) << 16, 65_536),
    });
    assert_eq!(again.flushes, n);
    assert!(again.writes <= 2 * n && again.bytes <= n * 8704, "{again:?}");
}

/// A mail server in short, on an overlay of a full base: files of 4 to 32 KiB, a few of them between two
/// flushes, and blocks of the file system's own that are written again and again. Exact: what is written,
/// what is flushed, and that nothing is read of the base.
#[test]
fn a_mail_server_on_an_overlay() {
    const FLUSHES: u64 = 256;
    let options = CreateOptions { extended_l2: true, ..journaled() };
    let setup = QcowSetup { name: "mail", options, has_base: true };
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    let base = Drive::from_content(&world, Content::zeroed(64 << 20), DriveOptions::default());
    let (tally, below_tally) = (HostTally::default(), HostTally::default());
    world.run(async {
        let below = Raw::open(base.clone(), true, &below_tally);
        let disk = open(&drive, Some(below as SharedDisk), &tally).await;
        let mut random = Random::from_seed(1);
        let (mut end, mut bytes) = (1 << 20, 0);
        // The first write makes the journal.
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
        let foreground = || sum(&[tally.data.counts(), tally.metadata.counts()]);
        let before = foreground();
        for _ in 0..FLUSHES {
            for _ in 0..1 + random.below(8) {
                let (at, len) = match random.below(4) {
                    0 => ((1 << 19) + random.below(8) * 4096, 4096),
                    _ => (end, 4096 * (1 + random.below(8))),
                };
                let data = Buffer::copy_of(&vec![7; usize::try_from(len).unwrap()]);
                disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
                end += if at == end { len } else { 0 };
                bytes += len;
            }
            disk.flush().await.unwrap();
        }
        let after = foreground();
        let (flushes, written) = (after.0 - before.0, after.2 - before.2);
        assert_eq!(flushes, FLUSHES, "one for each of the guest's");
        // Hundredths of a byte for each byte of the guest: the data, the records, and what was not verified
        // yet once more.
        assert!((100..=115).contains(&(written * 100 / bytes)), "{written} bytes for {bytes}");
        let read = below_tally.data.counts().bytes_read + below_tally.metadata.counts().bytes_read;
        assert_eq!(read, 0, "the base is not read to write");
        disk.close().await.unwrap();
    });
}

/// Writes that begin in what the one before wrote and end in fresh space, and no flush of the guest: they
/// wait for nothing.
#[test]
fn writes_that_straddle_fresh_space_are_not_committed_one_by_one() {
    const WRITES: u64 = 256;
    let whole = journaled();
    let over = CreateOptions { extended_l2: true, ..journaled() };
    for (options, has_base, len, step) in [
        (&whole, false, 12_288, 12_288), // a cluster is never a whole number of writes
        (&over, true, 4608, 4096),       // each begins with the last sector of the one before
        (&over, true, 3072, 3072),       // nor is a subcluster
    ] {
        let setup = QcowSetup { name: "straddling", options: options.clone(), has_base };
        let world = World::new(0);
        let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
        let base = MemoryDisk::holding(&vec![7; 64 << 20]);
        let tally = HostTally::default();
        world.run(async {
            let disk = open(&drive, has_base.then(|| base.clone() as SharedDisk), &tally).await;
            let mut expected = vec![if has_base { 7 } else { 0 }; 4 << 20];
            for i in 0..WRITES {
                let (at, byte) = (i * step + 512, u8::try_from(i % 251 + 1).unwrap());
                disk.write(GuestOffset::new(at), Buffer::copy_of(&vec![byte; len]), WriteFlags::default())
                    .await
                    .unwrap();
                let at = usize::try_from(at).unwrap();
                expected[at..at + len].fill(byte);
            }
            disk.flush().await.unwrap();
            let flushes = tally.data.counts().flushes + tally.metadata.counts().flushes;
            assert!(flushes <= 4, "{flushes} flushes for {WRITES} writes of {len} and one flush");
            let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(expected.len())).await.unwrap();
            assert!(read.to_vec() == expected, "what was written is read");
            disk.close().await.unwrap();
            let image: SharedStorage = drive.clone();
            let (report, lines) = look(&image).await.unwrap();
            assert!(report.is_clean(), "{lines:?}");
        });
    }
}

/// Four guests that flush at a time share.
#[test]
fn flushes_are_shared() {
    let setup = QcowSetup { name: "four guests", options: journaled(), has_base: false };
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
                        let at = GuestOffset::new((guest << 30) + (i << 16));
                        disk.write(at, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
                    }
                })
            })
            .collect();
        for guest in guests {
            guest.await;
        }
        let flushes = drive.counts_since(mark).flushes;
        assert!(flushes <= 4 * 64 / 2, "{flushes} flushes for {} writes", 4 * 64);
        disk.close().await.unwrap();
    });
}

/// So they do on a raw image.
#[test]
fn flushes_of_a_raw_image_are_shared() {
    let world = World::new(0);
    let drive = busy_drive(&world, Content::zeroed(1 << 20), FaultPlan::none());
    world.run(async {
        let disk = Raw::open(drive.clone(), false, &HostTally::default());
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
        let flushes = drive.counts().flushes;
        assert!(flushes <= 4 * 64 / 2, "{flushes} flushes for {} writes", 4 * 64);
        disk.close().await.unwrap();
    });
}

/// What is written in bulk, and flushed once: its checksums would fill record after record. It is flushed
/// before its record instead, so it costs two flushes, and one more where the mapping alone fills a record.
#[test]
#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn bulk_writes_cause_few_flushes_of_their_own() {
    for (name, writes, len, step, flushes) in [
        ("a sequential fill of 256 MiB", 256u64, 1 << 20, 1u64 << 20, 2),
        ("scattered, a cluster each", 1536, 4096, 1 << 20, 2),
        ("a little less than a record has checksums of", 8, 512 << 10, 512 << 10, 1),
    ] {
        let setup = QcowSetup { name: "bulk", options: journaled(), has_base: false };
        let world = World::new(0);
        let options = DriveOptions { history: vellum_sim::History::Pending, ..DriveOptions::default() };
        let drive = Drive::from_content(&world, setup.empty_image(), options);
        let tally = HostTally::default();
        world.run(async {
            let disk = open(&drive, None, &tally).await;
            disk.write(GuestOffset::new(SIZE - 4096), Buffer::copy_of(&[1; 4096]), WriteFlags::FUA)
                .await
                .unwrap();
            let foreground = || sum(&[tally.data.counts(), tally.metadata.counts()]);
            let before = foreground();
            for i in 0..writes {
                let at = GuestOffset::new(i * step);
                disk.write(at, Buffer::copy_of(&vec![7; len]), WriteFlags::default()).await.unwrap();
            }
            assert_eq!(foreground().0 - before.0, 0, "{name}: none before the guest asks for one");
            disk.flush().await.unwrap();
            let after = foreground();
            eprintln!("{name}: {} flushes, {} writes", after.0 - before.0, after.1 - before.1);
            assert_eq!(after.0 - before.0, flushes, "{name}");
            disk.close().await.unwrap();
            let image: SharedStorage = drive.clone();
            let (report, lines) = look(&image).await.unwrap();
            assert!(report.is_clean(), "{name}: {lines:?}");
        });
    }
}
