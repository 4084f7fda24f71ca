//! Interleavings, crashes and failing drives.
//!
//! Each test prints its seed when it fails; the same seed gives the same run.

use std::rc::Rc;
use std::sync::Arc;

use vellum_core::contract::{self, DiskFixture};
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, LocalFuture, Random, Result, SharedDisk, SharedStorage, WriteFlags,
    ZeroFlags, join_all,
};
use vellum_format::native::{CreateOptions, NewBase, create};
use vellum_sim::{
    Content, CrashKind, Drive, DriveOptions, Effect, Fault, FaultPlan, Operation, Operations, Oracle, Repeat,
    World,
};

use super::common::native::{NativeSetup, look_native, native_setups};
use super::common::{busy_drive, random_request, scale};

struct SimFixture {
    world: Rc<World>,
    setup: NativeSetup,
    drive: std::cell::RefCell<Option<Arc<Drive>>>,
}

impl DiskFixture for SimFixture {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let drive = busy_drive(&self.world, Content::zeroed(0), FaultPlan::none());
            let mut options = CreateOptions { size, ..self.setup.create_options() };
            if let Some(base) = &mut options.base {
                *base = NewBase { size: base.size.min(size), ..base.clone() };
            }
            create(&*drive, &options).await?;
            *self.drive.borrow_mut() = Some(drive);
            self.reopen().await
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let drive = self.drive.borrow().clone().expect("made before");
            let image: SharedStorage = drive.clone();
            let (report, lines) = look_native(&image).await?;
            assert!(report.is_clean(), "an image that was closed is clean: {lines:?}");
            Ok(self.setup.open(&drive).await? as SharedDisk)
        })
    }

    fn fresh_content(&self, size: u64) -> Vec<u8> {
        let mut content = self.setup.base.as_ref().map(|base| base.to_vec()).unwrap_or_default();
        content.resize(usize::try_from(size).unwrap(), 0);
        content
    }
}

#[test]
fn the_contract_holds_when_the_drive_answers_in_any_order() {
    for setup in native_setups() {
        for seed in 0..3 {
            let world = Rc::new(World::shuffled(seed));
            let fixture =
                SimFixture { world: world.clone(), setup: setup.clone(), drive: Default::default() };
            world.run(contract::disk(&fixture));
        }
    }
}

/// A long write is done in pieces. Wherever it begins, no piece ends within a sector: a kill between two of
/// them leaves each sector old or new.
#[test]
fn a_kill_between_the_pieces_of_a_long_write_tears_no_sector() {
    let k = |kib: u64| kib << 10;
    let setups = [
        NativeSetup::linear("linear over a base", k(1024)).over(vec![9; 600_000], k(16)),
        NativeSetup::table("table", k(1024), k(64)),
        NativeSetup::zoned("zoned", k(1024), k(64), k(1024)),
    ];
    for setup in setups {
        let drive_of =
            |world: &World| Drive::from_content(world, setup.empty_image(), DriveOptions::default());
        let world = World::new(0);
        let drive = drive_of(&world);
        let oracle = Oracle::new(&world, setup.content());
        world.run(async {
            let disk = oracle.watch(setup.open(&drive).await.unwrap());
            let span = GuestOffset::new(300).span(400_001);
            let (old, new) = (Buffer::copy_of(&vec![1; 400_001]), Buffer::copy_of(&vec![2; 400_001]));
            disk.write(span.start(), old, WriteFlags { fua: true }).await.unwrap();
            disk.write(span.start(), new, WriteFlags::default()).await.unwrap();
            disk.close().await.unwrap();
        });
        let log = drive.log();
        for position in log.crash_positions() {
            let image = log.crash(CrashKind::ProcessKill, position).random_image(&mut Random::from_seed(0));
            let expectation = oracle.expect_at(position);
            recovers(&setup, "", image, async |disk| {
                if let Err(violation) = expectation.check_disk(disk).await {
                    panic!("{}, at {position}: {violation}", setup.name);
                }
            });
        }
    }
}

/// Several guests at once, then a crash at many moments, many ways. Whatever is left opens, is recovered, and
/// reads as the contract allows.
#[test]
fn crashes_of_a_busy_image() {
    let rounds = 12 * scale();
    let mut states = 0;
    for setup in native_setups() {
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
                let what = format!("{}, seed {seed}, {kind:?} at {position}", setup.name);
                recovers(&setup, &what, image, async |disk| {
                    if let Err(violation) = expectation.check_disk(disk).await {
                        panic!("{what}: {violation}");
                    }
                });
                states += 1;
            }
        }
    }
    assert!(states >= 2_800, "{states}");
}

/// Opens what a crash left, hands it to `judge`, closes it, and makes sure that nothing is wrong then.
fn recovers(setup: &NativeSetup, what: &str, image: Content, judge: impl AsyncFnOnce(&dyn Disk)) {
    let world = World::new(0);
    let drive = Drive::from_content(&world, image, DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap_or_else(|error| panic!("{what}: {}", error.chain()));
        judge(&*disk).await;
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{what}: {lines:?}");
    });
}

/// The Nth host operation fails, for every N, once and forever, with and without space: no wrong byte after
/// opening again, and every error says what it was about.
#[test]
fn every_host_operation_fails_once() {
    for setup in native_setups() {
        let empty = setup.empty_image();
        let mut faults = Vec::new();
        for error in [ErrorKind::Io, ErrorKind::NoSpace] {
            for repeat in [Repeat::Once, Repeat::ForEver] {
                for effect in [Effect::None, Effect::Some] {
                    faults.push(Fault { error, repeat, effect, ..Fault::nth(Operations::ALL, 0) });
                }
            }
        }
        for (fault, seed) in faults.iter().flat_map(|fault| (0..scale()).map(move |seed| (fault, seed))) {
            let kinds = match fault.error {
                ErrorKind::NoSpace => Operation::Write | Operation::WriteZeroes | Operation::Preallocate,
                _ => Operations::ALL,
            };
            let mut number = 0;
            loop {
                let plan = FaultPlan::none();
                let fault = Fault { operations: kinds, skip: number, ..fault.clone() };
                if one_failing_run(&setup, &empty, &plan, fault, seed) == 0 {
                    break;
                }
                number += 1;
            }
            assert!(number >= 15, "{}: the fault met only {number} operations", setup.name);
        }
    }
}

fn one_failing_run(setup: &NativeSetup, empty: &Content, plan: &FaultPlan, fault: Fault, seed: u64) -> u64 {
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
    recovers(setup, &what, image, async |disk| {
        if let Err(violation) = expectation.check_disk(disk).await {
            panic!("{what}: {violation}; errors were {errors:?}");
        }
    });
    plan.hits()
}

/// Zeros over a base need no space but that of the masks. Where the host is full the request says so, and the
/// disk lives on: the space is not missed later, when the journal takes the masks home.
#[test]
fn space_for_masks_is_there_before_a_change_is_accepted() {
    for setup in native_setups().into_iter().filter(|setup| setup.name.contains("over a base")) {
        let world = World::new(0);
        let plan = FaultPlan::none();
        let drive = busy_drive(&world, setup.empty_image(), plan.clone());
        world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            let zero = async |at: u64| {
                disk.write_zeroes(GuestOffset::new(at).span(4096), ZeroFlags::default()).await
            };
            let full = Fault {
                error: ErrorKind::NoSpace,
                repeat: Repeat::ForEver,
                ..Fault::nth(Operation::Preallocate, 0)
            };
            plan.add(full);
            assert_eq!(zero(4096).await.expect_err(setup.name).kind(), ErrorKind::NoSpace);
            disk.flush().await.unwrap();
            plan.clear();
            zero(4096).await.unwrap();
            disk.flush().await.unwrap();
            disk.close().await.unwrap();
        });
        assert!(plan.hits() > 0, "{}", setup.name);
    }
}

#[test]
fn after_a_failed_flush_nothing_is_written_until_the_image_is_reopened() {
    for setup in native_setups() {
        let world = World::new(0);
        let plan = FaultPlan::none();
        let drive = busy_drive(&world, setup.empty_image(), plan.clone());
        world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            let at = GuestOffset::ZERO;
            disk.write(at, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
            disk.write(at, Buffer::copy_of(&[2; 512]), WriteFlags::default()).await.unwrap();
            plan.add(Fault::nth(Operation::Flush, 0));
            let failed = disk.flush().await.expect_err(setup.name);
            assert_eq!(failed.kind(), ErrorKind::Poisoned);
            plan.clear();
            let writes = drive.counts().writes;
            for _ in 0..2 {
                assert_eq!(disk.flush().await.unwrap_err().kind(), ErrorKind::Poisoned);
                let write = disk.write(at, Buffer::copy_of(&[3; 4096]), WriteFlags::default()).await;
                assert_eq!(write.unwrap_err().kind(), ErrorKind::Poisoned);
            }
            assert_eq!(drive.counts().writes, writes, "{}: nothing is written any more", setup.name);
            assert!(disk.close().await.is_err(), "closing cannot make good what was lost");
        });
    }
}
