//! Space ahead of need: what is prepared, when, that no request waits for it, and that it is returned.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{QcowSetup, busy_drive, look};
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, HostTally, ImageOffset, IoCounts, Limits, Random, SharedStorage,
    Storage, WriteFlags,
};
use vellum_format::Prealloc;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, recover};
use vellum_sim::{
    Content, CrashKind, Drive, DriveOptions, Effect, Fault, FaultPlan, Operation, Repeat, World,
};

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 65_536;

fn setups() -> [QcowSetup; 2] {
    [None, Some(MIB)].map(|journal| {
        let options = CreateOptions { size: 1 << 30, journal, ..CreateOptions::without_journal() };
        let name = if journal.is_some() { "with a journal" } else { "in the ordered way" };
        QcowSetup { name, options, has_base: false }
    })
}

/// A drive of which it is known that preparing helps, or does not.
fn drive(world: &World, content: Content, prefers_written: bool) -> Arc<Drive> {
    let limits = Limits { prefers_written, ..Limits::plain() };
    Drive::from_content(world, content, DriveOptions { limits, ..DriveOptions::default() })
}

async fn open(drive: &Arc<Drive>, prealloc: Prealloc, tally: &HostTally) -> Arc<Qcow2> {
    let image: SharedStorage = drive.clone();
    let header = Header::read(&*image).await.unwrap();
    let tally = tally.clone();
    let options = OpenOptions { tally, prealloc, journal_key: Some(1), ..OpenOptions::default() };
    Qcow2::open(header, Files { image, data_file: None, below: None }, options).await.unwrap()
}

async fn write(disk: &dyn Disk, cluster: u64) {
    let data = Buffer::copy_of(&vec![u8::try_from(cluster % 250 + 1).unwrap(); 65_536]);
    disk.write(GuestOffset::new(cluster * CLUSTER), data, WriteFlags::default()).await.unwrap();
}

async fn reads_as_written(disk: &dyn Disk, clusters: u64) {
    for cluster in 0..clusters {
        let at = GuestOffset::new(cluster * CLUSTER);
        let bytes = disk.read(at, Buffer::zeroed(65_536)).await.unwrap().to_vec();
        let wanted = u8::try_from(cluster % 250 + 1).unwrap();
        assert!(bytes.iter().all(|byte| *byte == wanted), "cluster {cluster}");
    }
}

/// Tends until there is nothing more to do at once.
async fn tend(disk: &dyn Disk, millis: u64) {
    while disk.tend(Duration::from_millis(millis)).await {}
}

async fn used_end(drive: &Arc<Drive>) -> u64 {
    let image: SharedStorage = drive.clone();
    let (report, lines) = look(&image).await.unwrap();
    assert!(report.is_clean(), "{lines:?}");
    report.image_end_offset
}

/// What the guest's requests cost, and what was prepared, when 64 KiB are appended and flushed 200 times, one
/// every 5 ms.
fn cost(setup: &QcowSetup, prealloc: Prealloc, prefers_written: bool) -> (Vec<IoCounts>, IoCounts) {
    let world = World::new(0);
    let drive = drive(&world, setup.empty_image(), prefers_written);
    let tally = HostTally::default();
    world.run(async {
        let disk = open(&drive, prealloc, &tally).await;
        for i in 0..200 {
            write(&*disk, i).await;
            disk.flush().await.unwrap();
            tend(&*disk, i * 5).await;
        }
        let counts = [&tally.data, &tally.metadata, &tally.checkpoint].map(|tally| tally.counts()).to_vec();
        let prepared = tally.prealloc.counts();
        reads_as_written(&*disk, 200).await;
        disk.close().await.unwrap();
        let end = used_end(&drive).await;
        assert_eq!(drive.len(), end, "{}: the file ends with what is in use", setup.name);
        (counts, prepared)
    })
}

#[test]
fn the_foreground_is_the_same() {
    for setup in setups() {
        let (without, none) = cost(&setup, Prealloc::Off, true);
        assert_eq!(none, IoCounts::default());
        for (prealloc, prefers_written) in
            [(Prealloc::Auto, true), (Prealloc::Adaptive, false), (Prealloc::Fixed(2 * MIB), false)]
        {
            let (with, prepared) = cost(&setup, prealloc, prefers_written);
            assert_eq!(with, without, "{}, {prealloc:?}", setup.name);
            assert_eq!(IoCounts { writes: 0, bytes_written: 0, ..prepared }, IoCounts::default());
            // 12.5 MiB were allocated, within a second. Of them a fifth pays, and there is a mebibyte to
            // begin with.
            let (least, most) = match prealloc {
                Prealloc::Fixed(_) => (11 * MIB, 15 * MIB),
                _ => (2 * MIB, 7 * MIB / 2),
            };
            assert!((least..=most).contains(&prepared.bytes_written), "{}: {prepared:?}", setup.name);
        }
        // Where it does not help nothing is done unasked.
        assert_eq!(cost(&setup, Prealloc::Auto, false).1, IoCounts::default());
    }
}

/// The zeros save writes of the file system that come with a flush: without one there are none but the first,
/// and a flush that carries much earns no more than one that carries 256 KiB.
#[test]
fn zeros_are_earned_by_flushes() {
    for setup in setups() {
        let world = World::new(0);
        let drive = drive(&world, setup.empty_image(), true);
        let tally = HostTally::default();
        world.run(async {
            let disk = open(&drive, Prealloc::Adaptive, &tally).await;
            let append = async |from: u64, flushes: bool| {
                for i in from..from + 100 {
                    write(&*disk, i).await;
                    if flushes {
                        disk.flush().await.unwrap();
                    }
                    tend(&*disk, i * 5).await;
                }
                tally.prealloc.counts().bytes_written
            };
            let unflushed = append(0, false).await;
            assert!((1..=MIB).contains(&unflushed), "{}: {unflushed}", setup.name);
            // Of 6.25 MiB a fifth.
            let flushed = append(100, true).await - unflushed;
            assert!((MIB / 2..=2 * MIB).contains(&flushed), "{}: {flushed}", setup.name);
            reads_as_written(&*disk, 200).await;
            disk.close().await.unwrap();
        });
    }
}

#[test]
fn an_image_says_for_itself() {
    let [_, setup] = setups();
    for (setting, said, prepares) in [
        (Prealloc::Fixed(MIB), Prealloc::Auto, true),
        (Prealloc::Fixed(MIB), Prealloc::Off, false),
        (Prealloc::Off, Prealloc::Auto, false),
        (Prealloc::Off, Prealloc::Adaptive, true),
    ] {
        let options = CreateOptions { prealloc: setting, ..setup.options.clone() };
        let setup = QcowSetup { options, ..setup.clone() };
        // The second time from a header that was written anew.
        let first = cost(&setup, said, true);
        assert_eq!(first.1.writes > 0, prepares, "{setting:?} {said:?}");
        let world = World::new(0);
        let drive = drive(&world, setup.empty_image(), true);
        world.run(async {
            let disk = open(&drive, Prealloc::Off, &HostTally::default()).await;
            write(&*disk, 0).await;
            disk.close().await.unwrap();
            assert_eq!(Header::read(&*drive).await.unwrap().prealloc(), setting);
        });
    }
}

/// An image that is only read or overwritten stays as it is, and so does one of version 2.
#[test]
fn nothing_is_prepared_without_need() {
    let [plain, journaled] = setups();
    let old = QcowSetup { options: CreateOptions { version: 2, ..plain.options.clone() }, ..plain.clone() };
    for (setup, prealloc) in
        [(&plain, Prealloc::Adaptive), (&journaled, Prealloc::Adaptive), (&old, Prealloc::Fixed(MIB))]
    {
        let world = World::new(0);
        let drive = drive(&world, setup.empty_image(), true);
        let tally = HostTally::default();
        world.run(async {
            let disk = open(&drive, Prealloc::Off, &HostTally::default()).await;
            write(&*disk, 0).await;
            disk.close().await.unwrap();
            let disk = open(&drive, prealloc, &tally).await;
            tend(&*disk, 0).await;
            for i in 0..20 {
                write(&*disk, 0).await;
                tend(&*disk, i * 100).await;
            }
            disk.close().await.unwrap();
            assert_eq!(tally.prealloc.counts(), IoCounts::default());
        });
    }
}

/// Where the image ends when one cluster is written.
fn end_of_one(setup: &QcowSetup) -> u64 {
    let world = World::new(0);
    let drive = drive(&world, setup.empty_image(), false);
    world.run(async {
        let disk = open(&drive, Prealloc::Off, &HostTally::default()).await;
        write(&*disk, 0).await;
        disk.close().await.unwrap();
    });
    drive.len()
}

/// While zeros are on their way, writes continue beside them and land elsewhere; the piece comes next when it
/// is ready.
#[test]
fn no_request_waits_for_zeros_or_meets_them() {
    for setup in setups() {
        let zeros = ImageOffset::new(end_of_one(&setup)).span(MIB / 4);
        let world = World::new(0);
        let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
        world.run(async {
            let disk = open(&drive, Prealloc::Fixed(MIB), &HostTally::default()).await;
            write(&*disk, 0).await;
            let hold = drive.hold_within(Operation::Write, zeros);
            let tending = world.spawn({
                let disk = disk.clone();
                async move { disk.tend(Duration::ZERO).await }
            });
            hold.caught(1).await;
            for cluster in 1..40 {
                write(&*disk, cluster).await;
            }
            disk.flush().await.unwrap();
            assert!(!tending.is_finished() && hold.count() == 1);
            hold.release();
            tending.await;
            reads_as_written(&*disk, 40).await;
            for cluster in 40..44 {
                write(&*disk, cluster).await;
            }
            tend(&*disk, 10).await;
            reads_as_written(&*disk, 44).await;
            disk.close().await.unwrap();
            assert_eq!(drive.len(), used_end(&drive).await);
            // Four clusters were passed over, and came next.
            assert_eq!(drive.len(), zeros.start().bytes() + 43 * CLUSTER, "{}", setup.name);
        });
    }
}

/// It ends at the first failure, which shows only in the tally.
#[test]
fn a_failure_ends_it_quietly() {
    for setup in setups() {
        for error in [ErrorKind::NoSpace, ErrorKind::Io] {
            for (operation, effect) in [
                (Operation::Write, Effect::None),
                (Operation::Write, Effect::Some),
                (Operation::SetLen, Effect::None),
            ] {
                let world = World::new(0);
                let faults = FaultPlan::none();
                let drive = busy_drive(&world, setup.empty_image(), faults.clone());
                let tally = HostTally::default();
                world.run(async {
                    let disk = open(&drive, Prealloc::Fixed(4 * MIB), &tally).await;
                    write(&*disk, 0).await;
                    // A file that cannot grow by a step is tried with what is needed.
                    let tries = if operation == Operation::SetLen { 2 } else { 1 };
                    for nth in 0..tries {
                        let repeat = Repeat::Once;
                        faults.add(Fault { error, effect, repeat, ..Fault::nth(operation, nth) });
                    }
                    tend(&*disk, 0).await;
                    let after = tally.prealloc.counts().writes;
                    assert!(faults.hits() == tries && after <= 1, "{after} {}", faults.hits());
                    for cluster in 1..30 {
                        write(&*disk, cluster).await;
                        disk.flush().await.unwrap();
                        tend(&*disk, cluster).await;
                    }
                    assert_eq!(tally.prealloc.counts().writes, after);
                    reads_as_written(&*disk, 30).await;
                    disk.close().await.unwrap();
                    assert_eq!(drive.len(), used_end(&drive).await);
                });
            }
        }
    }
}

/// A crash leaves zeros behind the end. They do no harm, and a recovery of the image truncates them.
#[test]
fn a_recovery_gives_back_what_was_prepared() {
    for setup in setups() {
        for kind in [CrashKind::ProcessKill, CrashKind::PowerCut] {
            let world = World::new(0);
            let drive = drive(&world, setup.empty_image(), false);
            world.run(async {
                let disk = open(&drive, Prealloc::Fixed(16 * MIB), &HostTally::default()).await;
                for cluster in 0..40 {
                    write(&*disk, cluster).await;
                }
                tend(&*disk, 0).await;
                disk.flush().await.unwrap();
                assert!(drive.len() > 18 * MIB);
            });
            let left = drive.crash(kind, &mut Random::from_seed(1));
            assert!(left.len() > 18 * MIB, "{}: it was durable", setup.name);
            // By opening it, and by recovering alone.
            for by_opening in [true, false] {
                let world = World::new(0);
                let drive = crate::drive(&world, left.clone(), false);
                world.run(async {
                    let image: SharedStorage = drive.clone();
                    let header = Header::read(&*image).await.unwrap();
                    if by_opening || !header.needs_replay() {
                        let disk = open(&drive, Prealloc::Auto, &HostTally::default()).await;
                        assert_eq!(drive.len(), used_end(&drive).await, "{}", setup.name);
                        reads_as_written(&*disk, 40).await;
                        disk.close().await.unwrap();
                    } else {
                        recover(&image).await.unwrap();
                    }
                    assert_eq!(drive.len(), used_end(&drive).await, "{}", setup.name);
                });
            }
        }
    }
}
