//! qcow2 in the simulator: interleavings, crashes, failing drives, and exact counts of what a request costs
//! the host.
//!
//! Each test prints its seed when it fails; the same seed gives the same run.

mod common;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use common::{Setup, busy_drive, look, noise, random_request, setups};
use vellum_core::contract::{self, DiskFixture};
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, IoCounts, LocalFuture, Random, Result, SharedDisk, SharedStorage,
    WriteFlags, ZeroFlags, join_all,
};
use vellum_format::qcow2::{CreateOptions, create};
use vellum_sim::{
    Content, CrashKind, Drive, DriveOptions, Effect, Fault, FaultPlan, FaultSweep, Operation, Operations,
    Oracle, Repeat, World,
};

struct SimFixture {
    world: Rc<World>,
    setup: Setup,
    drive: std::cell::RefCell<Option<Arc<Drive>>>,
}

impl DiskFixture for SimFixture {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let drive = busy_drive(&self.world, Content::zeroed(0), FaultPlan::none());
            let options = CreateOptions { size, ..self.setup.options.clone() };
            create(&*drive, None, &options).await?;
            *self.drive.borrow_mut() = Some(drive);
            self.reopen().await
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let drive = self.drive.borrow().clone().expect("made before");
            let image: SharedStorage = drive.clone();
            let (report, lines) = look(&image).await?;
            assert!(report.is_clean(), "an image that was closed is clean: {lines:?}");
            Ok(self.setup.open(&drive).await? as SharedDisk)
        })
    }

    fn fresh_content(&self, size: u64) -> Vec<u8> {
        let mut content = if self.setup.has_base { common::base() } else { Vec::new() };
        content.resize(usize::try_from(size).unwrap(), 0);
        content
    }
}

#[test]
fn the_contract_holds_when_the_drive_answers_in_any_order() {
    for setup in setups() {
        for seed in 0..3 {
            let world = Rc::new(World::shuffled(seed));
            let fixture =
                SimFixture { world: world.clone(), setup: setup.clone(), drive: Default::default() };
            world.run(contract::disk(&fixture));
        }
    }
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
        let setup = Setup { name, options, has_base: false };
        let world = World::new(0);
        let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
        let oracle = Oracle::new(&world, setup.content());
        world.run(async {
            let disk = oracle.watch(setup.open(&drive).await.unwrap());
            let span = GuestOffset::new(300).span(len);
            let bytes = |value| Buffer::copy_of(&vec![value; usize::try_from(len).unwrap()]);
            disk.write(span.start(), bytes(1), WriteFlags { fua: true }).await.unwrap();
            match is_zeroed {
                true => disk.write_zeroes(span, ZeroFlags::default()).await.unwrap(),
                false => disk.write(span.start(), bytes(2), WriteFlags::default()).await.unwrap(),
            }
            disk.close().await.unwrap();
        });
        let log = drive.log();
        for position in log.crash_positions() {
            let image = log.crash(CrashKind::ProcessKill, position).random_image(&mut Random::from_seed(0));
            let expectation = oracle.expect_at(position);
            recovers(&setup, image, async |disk| {
                if let Err(violation) = expectation.check_disk(disk).await {
                    panic!("{name}, at {position}: {violation}");
                }
            });
        }
    }
}

/// Several guests at once, then a crash at many moments, many ways. Whatever is left opens, is repaired,
/// reads as the contract allows, and loses no cluster.
#[test]
fn crashes_of_a_busy_image() {
    let rounds = 12 * common::scale();
    let mut states = 0;
    for setup in setups() {
        let empty = setup.empty_image();
        for seed in 0..rounds {
            let world = World::shuffled(seed);
            let drive = busy_drive(&world, empty.clone(), FaultPlan::none());
            let oracle = Oracle::new(&world, setup.content());
            world.run(async {
                let disk = oracle.watch(setup.open(&drive).await.unwrap());
                let mut guests = Vec::new();
                for guest in 0..3 {
                    let disk = disk.clone();
                    guests.push(world.spawn(async move {
                        let mut random = Random::from_seed(seed * 100 + guest);
                        for _ in 0..25 {
                            random_request(&*disk, &mut random).await.unwrap();
                        }
                    }));
                }
                for guest in guests {
                    guest.await;
                }
                if seed % 2 == 0 {
                    disk.close().await.unwrap();
                }
            });
            let log = drive.log();
            let positions = log.crash_positions();
            let mut random = Random::from_seed(seed);
            for _ in 0..60 {
                let position = *random.pick(&positions);
                let kind = *random.pick(&[CrashKind::PowerCut, CrashKind::ProcessKill]);
                let image = log.crash(kind, position).random_image(&mut random);
                let expectation = oracle.expect_at(position);
                recovers(&setup, image, async |disk| {
                    if let Err(violation) = expectation.check_disk(disk).await {
                        panic!("{}, seed {seed}, {kind:?} at {position}: {violation}", setup.name);
                    }
                });
                states += 1;
            }
        }
    }
    assert!(states >= 2_800, "{states}");
}

/// Opens what a crash left, hands it to `judge`, closes it, and makes sure that nothing is wrong then.
fn recovers(setup: &Setup, image: Content, judge: impl AsyncFnOnce(&dyn Disk)) {
    let world = World::new(0);
    let drive = Drive::from_content(&world, image, DriveOptions::default());
    world.run(async {
        let disk =
            setup.open(&drive).await.unwrap_or_else(|error| panic!("{}: {}", setup.name, error.chain()));
        judge(&*disk).await;
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.is_clean(), "{}: {lines:?}", setup.name);
    });
}

/// The Nth host operation fails, for every N, once and forever, with and without space: no wrong byte, no
/// leak after opening again, and every error says what it was about.
#[test]
fn every_host_operation_fails_once() {
    for setup in setups() {
        let empty = setup.empty_image();
        let mut faults = Vec::new();
        for error in [ErrorKind::Io, ErrorKind::NoSpace] {
            for repeat in [Repeat::Once, Repeat::ForEver] {
                for effect in [Effect::None, Effect::Some] {
                    faults.push(Fault { error, repeat, effect, ..Fault::nth(Operations::ALL, 0) });
                }
            }
        }
        for (fault, seed) in
            faults.iter().flat_map(|fault| (0..common::scale()).map(move |seed| (fault, seed)))
        {
            let kinds = match fault.error {
                ErrorKind::NoSpace => Operation::Write | Operation::WriteZeroes,
                _ => Operations::ALL,
            };
            let mut number = 0;
            loop {
                let plan = FaultPlan::none();
                let fault = Fault { operations: kinds, skip: number, ..fault.clone() };
                let hits = one_failing_run(&setup, &empty, &plan, fault, seed);
                if hits == 0 {
                    break;
                }
                number += 1;
            }
            assert!(number >= 20, "{}: the fault met only {number} operations", setup.name);
        }
    }
}

fn one_failing_run(setup: &Setup, empty: &Content, plan: &FaultPlan, fault: Fault, seed: u64) -> u64 {
    let what = format!("{}, seed {seed}, {fault:?}", setup.name);
    let world = World::shuffled(seed);
    let drive = busy_drive(&world, empty.clone(), plan.clone());
    let oracle = Oracle::new(&world, setup.content());
    let errors = world.run(async {
        let disk = oracle.watch(setup.open(&drive).await.unwrap());
        plan.add(fault);
        let mut errors = Vec::new();
        let mut random = Random::from_seed(seed);
        for _ in 0..12 {
            let mut forks = [random.fork(), random.fork()];
            let requests = forks.iter_mut().map(|random| Box::pin(random_request(&*disk, random)));
            errors.extend(join_all(requests).await.into_iter().filter_map(Result::err));
        }
        errors.extend(disk.close().await.err());
        errors
    });
    for error in &errors {
        assert!(error.chain().len() > 15, "{what}: the error says nothing: {error:?}");
    }
    // The drive works again. What is on the medium is what a process finds that starts now; after a failed
    // flush, what a reboot finds.
    plan.clear();
    let image = match drive.is_poisoned() {
        true => drive.crash(CrashKind::FailedFlush, &mut Random::from_seed(seed)),
        false => drive.content(),
    };
    let expectation = oracle.expect_at(world.position());
    recovers(setup, image, async |disk| {
        if let Err(violation) = expectation.check_disk(disk).await {
            panic!("{what}: {violation}; errors were {errors:?}");
        }
    });
    plan.hits()
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
    let setup = &setups()[0];
    let world = World::new(0);
    let plan = FaultPlan::none();
    let drive = busy_drive(&world, setup.empty_image(), plan.clone());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let at = GuestOffset::ZERO;
        disk.write(at, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
        disk.write(at, Buffer::copy_of(&[2; 4096]), WriteFlags::default()).await.unwrap();
        plan.add(Fault::nth(Operation::Flush, 0));
        assert_eq!(disk.flush().await.unwrap_err().kind(), ErrorKind::Poisoned);
        plan.clear();
        let writes = drive.counts().writes;
        for _ in 0..2 {
            assert_eq!(disk.flush().await.unwrap_err().kind(), ErrorKind::Poisoned);
            let write = disk.write(at, Buffer::copy_of(&[3; 4096]), WriteFlags::default()).await;
            assert_eq!(write.unwrap_err().kind(), ErrorKind::Poisoned);
        }
        let read = disk.read(at, Buffer::zeroed(1)).await.unwrap();
        assert!([1, 2].contains(&read.slice()[0]), "reading goes on");
        assert_eq!(drive.counts().writes, writes, "nothing is written any more");
        assert!(disk.close().await.is_err(), "closing cannot make good what was lost");
    });
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
        let setup = Setup { name: "counts", options: options.clone(), has_base: false };
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
    let setup = Setup { name: "tables", options, has_base: false };
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
    let setup = Setup { name: "shared", options, has_base: true };
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
