//! qcow2 in the simulator: interleavings, crashes, failing drives, and exact counts of what a request costs
//! the host.
//!
//! Each test prints its seed when it fails; the same seed gives the same run.

mod common;

use std::time::Duration;

use common::{QcowSetup, busy_drive, look, noise, random_request, setups, sim};
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, IoCounts, Random, SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_format::qcow2::CreateOptions;
use vellum_sim::{Content, Drive, DriveOptions, FaultPlan, FaultSweep, Operation, Oracle, World};

#[test]
fn the_contract_holds_when_the_drive_answers_in_any_order() {
    sim::contract_in_any_order(&setups());
}

/// Long writes and zeros are done in pieces. Wherever they begin, no piece ends within a sector: a kill
/// between two of them leaves each sector old or new.
#[test]
fn a_kill_between_the_pieces_of_a_long_request_tears_no_sector() {
    let options =
        |cluster_size| CreateOptions { size: 4 << 20, cluster_size, ..CreateOptions::without_journal() };
    // Zeros of a part of a cluster are written as data.
    let cases = [
        ("small clusters", options(512), 600_001, false),
        ("a small journal", CreateOptions { journal: Some(64 << 10), ..options(4096) }, 1_300_001, false),
        ("zeros as data", options(2 << 20), 1_300_001, true),
    ];
    for (name, options, len, is_zeroed) in cases {
        sim::kill_between_pieces(&QcowSetup { name, options, has_base: false }, len, is_zeroed);
    }
}

/// Several guests at once, then a crash at many moments, many ways. Whatever is left opens, is repaired,
/// reads as the contract allows, and loses no cluster.
#[test]
fn crashes_of_a_busy_image() {
    sim::crashes_of_a_busy_image(&setups());
}

/// The Nth host operation fails, for every N, once and forever, with and without space: no wrong byte, no
/// leak after opening again, and every error says what it was about.
#[test]
fn every_host_operation_fails_once() {
    sim::every_host_operation_fails(&setups(), Operation::Write | Operation::WriteZeroes, 20);
}

/// A failed request harms nothing else: the disk continues, and reads as what succeeded.
#[test]
fn a_disk_goes_on_after_a_failed_write() {
    let setup = &setups()[2];
    let empty = setup.empty_image();
    FaultSweep { operations: Operation::Write.into(), ..FaultSweep::new(1) }.run(async |world, plan| {
        let drive = busy_drive(world, empty.clone(), plan.clone());
        let oracle = Oracle::new(world, setup.content());
        let disk = oracle.watch(setup.open(&drive).await.unwrap());
        let mut random = Random::from_seed(9);
        for _ in 0..20 {
            let _ = random_request(&*disk, &mut random).await;
        }
        plan.clear();
        disk.flush().await.unwrap();
        oracle.expect_running().check_disk(&*disk).await.unwrap_or_else(|violation| panic!("{violation}"));
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}

#[test]
fn after_a_failed_flush_nothing_is_written_until_the_image_is_reopened() {
    sim::nothing_is_written_after_a_failed_flush(&setups()[0], 4096);
}

/// Reads of mapped data never wait for a flush, nor for requests that wait for one.
#[test]
fn reads_do_not_wait_for_a_flush() {
    for setup in setups() {
        let world = World::new(0);
        let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
        world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 8192]), WriteFlags::FUA).await.unwrap();
            let hold = drive.hold(Operation::Flush);
            let flusher = world.spawn({
                let disk = disk.clone();
                async move {
                    let at = GuestOffset::new(100_000);
                    disk.write(at, Buffer::copy_of(&[2; 4096]), WriteFlags::FUA).await.unwrap();
                }
            });
            hold.caught(1).await;
            let before = world.now();
            for at in [0, 4096, 100_000] {
                let read = disk.read(GuestOffset::new(at), Buffer::zeroed(512)).await.unwrap();
                assert_ne!(read.slice()[0], 0, "also what the flush is about");
            }
            // Writing continues as well, in place and elsewhere.
            let other = GuestOffset::new(50_000);
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&[3; 512]), WriteFlags::default()).await.unwrap();
            disk.write(other, Buffer::copy_of(&[3; 512]), WriteFlags::default()).await.unwrap();
            assert!(world.now() - before < Duration::from_millis(5));
            assert!(!flusher.is_finished());
            hold.release();
            flusher.await;
            disk.close().await.unwrap();
        });
    }
}

/// A cluster that was freed is not reused while a request may still be reading or writing it.
#[test]
fn a_freed_cluster_waits_for_its_last_user() {
    let setup = &setups()[0];
    let world = World::new(0);
    let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let (first, second) = (GuestOffset::ZERO, GuestOffset::new(65_536));
        disk.write(first, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
        let hold = drive.hold(Operation::Read | Operation::Write);
        let reader = world.spawn({
            let disk = disk.clone();
            async move { disk.read(first, Buffer::zeroed(4096)).await.unwrap().to_vec() }
        });
        let writer = world.spawn({
            let disk = disk.clone();
            async move { disk.write(first, Buffer::copy_of(&[2; 4096]), WriteFlags::default()).await.unwrap() }
        });
        hold.caught(2).await;
        // Both know where the cluster is. Now it is freed, durably, and another write needs space.
        let freer = world.spawn({
            let disk = disk.clone();
            async move {
                disk.discard(first.span(4096), WriteFlags::FUA).await.unwrap();
                for i in 0..16 {
                    let data = Buffer::copy_of(&[7; 4096]);
                    disk.write(second + i * 4096, data, WriteFlags::FUA).await.unwrap();
                }
            }
        });
        // Let everything pass but the two that were caught first.
        for _ in 0..400 {
            world.sleep(Duration::from_micros(700)).await;
            if hold.count() > 2 {
                // The oldest two stay.
                break;
            }
        }
        hold.release();
        freer.await;
        writer.await;
        let read = reader.await;
        assert!(read.iter().all(|byte| [1, 2].contains(byte)), "a reader saw another cluster's bytes");
        for i in 0..16 {
            let bytes = disk.read(second + i * 4096, Buffer::zeroed(4096)).await.unwrap().to_vec();
            assert!(bytes.iter().all(|byte| *byte == 7), "a late write landed in cluster {i}");
        }
        disk.close().await.unwrap();
    });
}

/// What requests cost, exactly.
#[test]
fn counts() {
    let options = CreateOptions { size: 1 << 30, ..CreateOptions::without_journal() };
    let cost = |options: &CreateOptions, requests: usize, act: fn(u64) -> u64| {
        let setup = QcowSetup { name: "counts", options: options.clone(), has_base: false };
        let world = World::new(0);
        let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
        world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            // The first write marks the image, makes an L2 table, and is not counted.
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
            let mark = drive.counts();
            for i in 0..requests as u64 {
                let at = GuestOffset::new(act(i));
                disk.write(at, Buffer::copy_of(&[1; 4096]), WriteFlags::default()).await.unwrap();
                disk.flush().await.unwrap();
            }
            drive.counts_since(mark)
        })
    };
    let n = 64;
    // In place: what raw costs.
    let counts = cost(&options, n, |_| 0);
    assert_eq!((counts.flushes, counts.writes, counts.bytes_written), (64, 64, 64 * 4096));
    // A fresh cluster each: refcounts, then the mapping.
    let counts = cost(&options, n, |i| (i + 1) * 65_536);
    assert_eq!((counts.flushes, counts.writes, counts.bytes_written), (2 * 64, 3 * 64, 3 * 64 * 4096));
    // A fresh L2 table: as above, and one sector of the L1 table.
    let counts = cost(&options, 1, |_| 512 << 20);
    assert_eq!((counts.flushes, counts.writes), (2, 4));
}

#[test]
fn thirty_two_new_tables_and_one_flush_cost_two_host_flushes() {
    let options = CreateOptions { size: 32 << 30, ..CreateOptions::without_journal() };
    let setup = QcowSetup { name: "tables", options, has_base: false };
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
        let mark = drive.counts();
        for i in 1..=32u64 {
            let at = GuestOffset::new(i << 29);
            disk.write(at, Buffer::copy_of(&[1; 4096]), WriteFlags::default()).await.unwrap();
        }
        disk.flush().await.unwrap();
        assert_eq!(drive.counts_since(mark).flushes, 2);
        disk.close().await.unwrap();
    });
}

/// Flushes that arrive while one is in flight share the next.
#[test]
fn concurrent_flushes_are_grouped() {
    let setup = &setups()[0];
    let world = World::new(0);
    let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 65_536]), WriteFlags::FUA).await.unwrap();
        let mark = drive.counts();
        let guests: Vec<_> = (0..4u64)
            .map(|guest| {
                let disk = disk.clone();
                world.spawn(async move {
                    for i in 0..50 {
                        let at = GuestOffset::new(guest * 4096);
                        disk.write(at, Buffer::copy_of(&[i; 512]), WriteFlags::FUA).await.unwrap();
                    }
                })
            })
            .collect();
        for guest in guests {
            guest.await;
        }
        let IoCounts { flushes, .. } = drive.counts_since(mark);
        assert!(flushes <= 100, "200 guest flushes by four took {flushes} host flushes");
        // And with nothing written, none.
        let mark = drive.counts();
        disk.flush().await.unwrap();
        disk.flush().await.unwrap();
        assert_eq!(drive.counts_since(mark).flushes, 0);
        disk.close().await.unwrap();
    });
}

/// Two first writes into one cluster allocate once, and each is seen only with its own data.
#[test]
fn two_first_writes_into_one_cluster_share_it() {
    let options = CreateOptions { size: 1 << 20, extended_l2: true, ..CreateOptions::without_journal() };
    let setup = QcowSetup { name: "shared", options, has_base: true };
    let world = World::new(0);
    let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        disk.write(GuestOffset::new(500_000), Buffer::copy_of(&[1; 512]), WriteFlags::FUA).await.unwrap();
        let len = drive.content().len();
        let hold = drive.hold(Operation::Write);
        let write = |at: u64, value: u8| {
            let disk = disk.clone();
            world.spawn(async move {
                let at = GuestOffset::new(at);
                disk.write(at, Buffer::copy_of(&[value; 2048]), WriteFlags::default()).await.unwrap();
            })
        };
        let (first, second) = (write(0, 11), write(8192, 12));
        hold.caught(2).await;
        let byte = async |at| disk.read(GuestOffset::new(at), Buffer::zeroed(1)).await.unwrap().slice()[0];
        let base = common::base();
        assert_eq!(
            (byte(0).await, byte(8192).await),
            (base[0], base[8192]),
            "neither is published before its data"
        );
        assert!(hold.release_one());
        world.sleep(Duration::from_millis(2)).await;
        let seen = (byte(0).await == 11, byte(8192).await == 12);
        assert!(seen.0 != seen.1, "one of them is there, the other is not: {seen:?}");
        hold.release();
        first.await;
        second.await;
        assert_eq!((byte(0).await, byte(8192).await), (11, 12));
        assert_eq!(byte(4096).await, base[4096], "between them the base shows through");
        disk.close().await.unwrap();
        assert!(drive.content().len() <= len + 65_536, "one cluster was allocated for both");
    });
}

/// Space that is freed can be written again, also when the drive is full and cannot grow.
#[test]
fn a_full_device_lives_on_what_is_freed() {
    let setup = &setups()[0];
    let world = World::new(0);
    let empty = setup.empty_image();
    let mut device = Content::zeroed(empty.len() + 16 * 4096);
    device.write(vellum_core::ImageOffset::ZERO, &empty.to_vec());
    let limits = vellum_core::Limits { fixed_len: true, grows_zeroed: false, ..vellum_core::Limits::plain() };
    let drive = Drive::from_content(&world, device, DriveOptions { limits, ..DriveOptions::default() });
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let mut random = Random::from_seed(1);
        let mut written = 0;
        let error = loop {
            let span = GuestOffset::new(written * 4096).span(4096);
            match disk.write(span.start(), noise(span, &mut random), WriteFlags::default()).await {
                Ok(()) => written += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain());
        assert!(written >= 12, "{written}");
        for round in 0..30u64 {
            let old = GuestOffset::new((round % written) * 4096).span(4096);
            disk.discard(old, WriteFlags::default()).await.unwrap();
            let data = noise(old, &mut random);
            let expected = data.to_vec();
            disk.write(old.start(), data, WriteFlags::default()).await.unwrap();
            let read = disk.read(old.start(), Buffer::zeroed(4096)).await.unwrap();
            assert_eq!(read.to_vec(), expected);
        }
        disk.write_zeroes(
            GuestOffset::ZERO.span(4096),
            ZeroFlags { may_unmap: true, ..ZeroFlags::default() },
        )
        .await
        .unwrap();
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}
