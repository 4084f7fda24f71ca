//! What the simulator asks of every kind of image: the contract in any order of answers, crashes, failing
//! drives, and silence after a failed flush.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use vellum_core::contract::{self, DiskFixture};
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, LocalFuture, Random, Result, SharedDisk, SharedStorage, WriteFlags,
    ZeroFlags, join_all,
};
use vellum_format::report::CheckReport;
use vellum_sim::{
    Content, CrashKind, Drive, DriveOptions, Effect, Fault, FaultPlan, Operation, Operations, Oracle, Repeat,
    World,
};

use super::{busy_drive, random_request, scale};

/// One kind of image under test, in either format.
pub(crate) trait Setup {
    fn name(&self) -> &'static str;

    /// What the base has: no bytes without one.
    fn base(&self) -> Vec<u8>;

    /// What the empty disk reads as.
    fn content(&self) -> Content;

    /// The image as it is made, with nothing in it.
    fn empty_image(&self) -> Content;

    /// Makes such an image for a disk of this size.
    async fn create(&self, drive: &Drive, size: u64) -> Result<()>;

    async fn open(&self, drive: &Arc<Drive>) -> Result<SharedDisk>;

    /// Looks at an image from outside.
    async fn look(&self, image: &SharedStorage) -> Result<(CheckReport, Vec<String>)>;
}

struct SimFixture<'a, S> {
    world: Rc<World>,
    setup: &'a S,
    drive: RefCell<Option<Arc<Drive>>>,
}

impl<S: Setup> DiskFixture for SimFixture<'_, S> {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let drive = busy_drive(&self.world, Content::zeroed(0), FaultPlan::none());
            self.setup.create(&drive, size).await?;
            *self.drive.borrow_mut() = Some(drive);
            self.reopen().await
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let drive = self.drive.borrow().clone().expect("made before");
            let image: SharedStorage = drive.clone();
            let (report, lines) = self.setup.look(&image).await?;
            assert!(report.is_clean(), "an image that was closed is clean: {lines:?}");
            self.setup.open(&drive).await
        })
    }

    fn fresh_content(&self, size: u64) -> Vec<u8> {
        let mut content = self.setup.base();
        content.resize(usize::try_from(size).unwrap(), 0);
        content
    }
}

pub(crate) fn contract_in_any_order(setups: &[impl Setup]) {
    for setup in setups {
        for seed in 0..3 {
            let world = Rc::new(World::shuffled(seed));
            let fixture = SimFixture { world: world.clone(), setup, drive: RefCell::default() };
            world.run(contract::disk(&fixture));
        }
    }
}

/// Writes `len` bytes durably, and then again, or zeros over them. A kill between two pieces of that leaves
/// each sector old or new.
pub(crate) fn kill_between_pieces(setup: &impl Setup, len: u64, is_zeroed: bool) {
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
        let what = format!("{}, at {position}", setup.name());
        recovers(setup, &what, image, async |disk| {
            if let Err(violation) = expectation.check_disk(disk).await {
                panic!("{what}: {violation}");
            }
        });
    }
}

/// Several guests at once, then a crash at many moments, many ways.
pub(crate) fn crashes_of_a_busy_image(setups: &[impl Setup]) {
    let rounds = 12 * scale();
    let mut states = 0;
    for setup in setups {
        let empty = setup.empty_image();
        for seed in 0..rounds {
            let world = World::shuffled(seed);
            let drive = busy_drive(&world, empty.clone(), FaultPlan::none());
            let oracle = Oracle::new(&world, setup.content());
            world.run(busy_guests(setup, &world, &drive, &oracle, seed));
            let log = drive.log();
            let positions = log.crash_positions();
            let mut random = Random::from_seed(seed);
            for _ in 0..60 {
                let position = *random.pick(&positions);
                let kind = *random.pick(&[CrashKind::PowerCut, CrashKind::ProcessKill]);
                let image = log.crash(kind, position).random_image(&mut random);
                let expectation = oracle.expect_at(position);
                let what = format!("{}, seed {seed}, {kind:?} at {position}", setup.name());
                recovers(setup, &what, image, async |disk| {
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

/// Three guests send random requests. After every second seed the disk is closed.
async fn busy_guests(setup: &impl Setup, world: &World, drive: &Arc<Drive>, oracle: &Oracle, seed: u64) {
    let disk = oracle.watch(setup.open(drive).await.unwrap());
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
    if seed.is_multiple_of(2) {
        disk.close().await.unwrap();
    }
}

/// Opens what a crash left, hands it to `judge`, closes it, and makes sure that nothing is wrong then.
fn recovers(setup: &impl Setup, what: &str, image: Content, judge: impl AsyncFnOnce(&dyn Disk)) {
    let world = World::new(0);
    let drive = Drive::from_content(&world, image, DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap_or_else(|error| panic!("{what}: {}", error.chain()));
        judge(&*disk).await;
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = setup.look(&image).await.unwrap();
        assert!(report.is_clean(), "{what}: {lines:?}");
    });
}

/// The Nth host operation fails, for every N, once and forever. Space runs out for operations of `allocating`.
/// Each fault meets at least `least` operations.
pub(crate) fn every_host_operation_fails(setups: &[impl Setup], allocating: Operations, least: u64) {
    for setup in setups {
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
                ErrorKind::NoSpace => allocating,
                _ => Operations::ALL,
            };
            let mut number = 0;
            loop {
                let plan = FaultPlan::none();
                let fault = Fault { operations: kinds, skip: number, ..fault.clone() };
                if one_failing_run(setup, &empty, &plan, fault, seed) == 0 {
                    break;
                }
                number += 1;
            }
            assert!(number >= least, "{}: the fault met only {number} operations", setup.name());
        }
    }
}

fn one_failing_run(setup: &impl Setup, empty: &Content, plan: &FaultPlan, fault: Fault, seed: u64) -> u64 {
    let what = format!("{}, seed {seed}, {fault:?}", setup.name());
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

/// A flush fails that has a write of `len` bytes to make durable. From then on nothing is written, and nothing
/// succeeds but reading.
pub(crate) fn nothing_is_written_after_a_failed_flush(setup: &impl Setup, len: usize) {
    let name = setup.name();
    let world = World::new(0);
    let plan = FaultPlan::none();
    let drive = busy_drive(&world, setup.empty_image(), plan.clone());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let at = GuestOffset::ZERO;
        disk.write(at, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
        disk.write(at, Buffer::copy_of(&vec![2; len]), WriteFlags::default()).await.unwrap();
        plan.add(Fault::nth(Operation::Flush, 0));
        assert_eq!(disk.flush().await.expect_err(name).kind(), ErrorKind::Poisoned);
        plan.clear();
        let writes = drive.counts().writes;
        for _ in 0..2 {
            assert_eq!(disk.flush().await.unwrap_err().kind(), ErrorKind::Poisoned);
            let write = disk.write(at, Buffer::copy_of(&[3; 4096]), WriteFlags::default()).await;
            assert_eq!(write.unwrap_err().kind(), ErrorKind::Poisoned);
        }
        let read = disk.read(at, Buffer::zeroed(1)).await.unwrap();
        assert!([1, 2].contains(&read.slice()[0]), "{name}: reading goes on");
        assert_eq!(drive.counts().writes, writes, "{name}: nothing is written any more");
        assert!(disk.close().await.is_err(), "closing cannot make good what was lost");
    });
}
