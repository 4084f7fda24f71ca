//! Zones of a file that are written with zeros ahead of need: how much, what the guest's own writes cost
//! meanwhile, and that no zero ever overwrites anything else.

use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::zip;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, HostTally, IoCounts, Limits, Random, SharedStorage, WriteFlags,
};
use vellum_format::Prealloc;
use vellum_format::native::{Native, OpenOptions, create};
use vellum_sim::{Delay, Drive, DriveOptions, Fault, Operation, World};

use super::common::native::{NativeSetup, look_native};

const UNIT: u64 = 64 << 10;
const UNIT_LEN: usize = 64 << 10;
const MIB: u64 = 1 << 20;

struct Fixture {
    disk: Arc<Native>,
    drive: Arc<Drive>,
    tally: HostTally,
    millis: u64,
}

impl Fixture {
    async fn open(world: &World, prefers_written: bool, prealloc: Prealloc, delay: Delay) -> Self {
        let limits = Limits { prefers_written, ..Limits::plain() };
        let drive = Drive::new(world, DriveOptions { limits, delay, ..DriveOptions::default() });
        let setup = NativeSetup::zoned("zoned", 64 * MIB, UNIT, 8 * MIB);
        create(&*drive, &setup.create_options()).await.unwrap();
        let mut fixture = Self::again(drive, prealloc).await;
        // The journal begins, a zone is opened, and that is durable.
        for _ in 0..2 {
            fixture.write(1000, &[1; 4096]).await;
            fixture.disk.flush().await.unwrap();
            fixture.idle(50).await;
        }
        fixture
    }

    async fn again(drive: Arc<Drive>, prealloc: Prealloc) -> Self {
        let tally = HostTally::default();
        let options =
            OpenOptions { tally: tally.clone(), journal_key: Some(1), prealloc, ..OpenOptions::default() };
        let disk = Native::open(drive.clone(), None, options).await.unwrap();
        Self { disk, drive, tally, millis: 0 }
    }

    async fn idle(&mut self, millis: u64) {
        for _ in 0..millis.div_ceil(50) {
            self.millis += 50;
            while self.disk.tend(Duration::from_millis(self.millis)).await {}
        }
    }

    async fn write(&self, unit: u64, bytes: &[u8]) {
        let at = GuestOffset::new(unit * UNIT);
        self.disk.write(at, Buffer::copy_of(bytes), WriteFlags::default()).await.unwrap();
    }

    fn of_guest(&self) -> IoCounts {
        self.tally.data.counts() + self.tally.metadata.counts()
    }

    fn zeros(&self) -> u64 {
        self.tally.prealloc.counts().bytes_written
    }

    async fn close(self) -> Arc<Drive> {
        self.disk.close().await.unwrap();
        let image: SharedStorage = self.drive.clone();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
        self.drive
    }
}

/// An embedded allocation costs one write and one flush, with zeros ahead or without, and the zeros are about
/// what is taken.
#[test]
fn what_comes_next_is_written_already() {
    const N: u64 = 48;
    for (prefers, prealloc, least, most) in [
        (true, Prealloc::Auto, N * UNIT, 64 * MIB),
        (false, Prealloc::Fixed(2 * MIB), N * UNIT, (N + 64) * UNIT),
        (true, Prealloc::Off, 0, 0),
        (false, Prealloc::Auto, 0, 0),
    ] {
        let world = World::new(0);
        world.run(async {
            let mut fixture = Fixture::open(&world, prefers, prealloc, Delay::none()).await;
            fixture.idle(1000).await;
            let before = fixture.of_guest();
            for unit in 0..N {
                fixture.write(unit, &vec![7; UNIT_LEN]).await;
                fixture.disk.flush().await.unwrap();
                fixture.idle(50).await;
            }
            let cost = fixture.of_guest() - before;
            assert_eq!((cost.flushes, cost.writes, cost.bytes_written), (N, N, N * UNIT), "{prealloc:?}");
            assert!((least..=most).contains(&fixture.zeros()), "{prealloc:?}: {} bytes", fixture.zeros());
            let quiet = fixture.zeros();
            fixture.idle(60_000).await;
            let then = fixture.zeros();
            fixture.idle(60_000).await;
            assert!(then - quiet <= 2 * MIB && fixture.zeros() == then, "a quiet disk writes no zeros");
            fixture.close().await;
        });
    }
}

/// Scattered small writes take a unit each. They are not followed by a unit of zeros each.
#[test]
fn zeros_are_no_more_than_a_few_times_what_is_written() {
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open(&world, true, Prealloc::Auto, Delay::none()).await;
        let mut written = 2 * 4096;
        for unit in 0..200 {
            fixture.write(unit, &[7; 4096]).await;
            fixture.disk.flush().await.unwrap();
            fixture.idle(50).await;
            written += 4096;
        }
        assert!(fixture.zeros() <= MIB + 4 * written, "{} bytes for {written}", fixture.zeros());
        assert!(fixture.zeros() > MIB, "{}", fixture.zeros());
        fixture.close().await;
    });
}

/// Zeros, embedded allocations, units that do not pack, discards and flushes at once, answered in any order:
/// each unit holds what was written.
#[test]
fn zeros_land_on_nothing() {
    for seed in 0..12 {
        let world = World::new(seed);
        world.run(async {
            let delay = Delay::between(Duration::from_micros(1)..=Duration::from_millis(2));
            let mut fixture = Fixture::open(&world, true, Prealloc::Fixed(MIB), delay).await;
            let mut random = Random::from_seed(seed);
            let mut model: Vec<Option<Vec<u8>>> = vec![None; 400];
            for turn in 0..60 {
                let mut requests = Vec::new();
                for _ in 0..1 + random.index(6) {
                    let unit = random.index(400);
                    if requests.iter().any(|(other, _)| *other == unit) {
                        continue;
                    }
                    let len = [4096, 512, UNIT_LEN][random.index(3)];
                    let mut bytes = vec![u8::try_from(turn + 1).unwrap(); len];
                    if random.index(3) == 0 {
                        random.fill(&mut bytes);
                    }
                    requests.push((unit, bytes));
                }
                for (unit, bytes) in &requests {
                    let held = model[*unit].get_or_insert_with(|| vec![0; UNIT_LEN]);
                    held[..bytes.len()].copy_from_slice(bytes);
                }
                let disk = fixture.disk.clone();
                let writes = requests.iter().map(|(unit, bytes)| {
                    let at = GuestOffset::new(*unit as u64 * UNIT);
                    disk.write(at, Buffer::copy_of(bytes), WriteFlags::default())
                });
                let writes = vellum_core::try_join_all(writes);
                let (_, result) = zip(fixture.idle(50), writes).await;
                result.unwrap();
                if random.index(2) == 0 {
                    fixture.disk.flush().await.unwrap();
                }
            }
            assert!(fixture.zeros() > MIB, "seed {seed}: zeros were written");
            let drive = fixture.close().await;
            let fixture = Fixture::again(drive, Prealloc::Off).await;
            for (unit, bytes) in model.iter().enumerate() {
                let at = GuestOffset::new(unit as u64 * UNIT);
                let read = fixture.disk.read(at, Buffer::for_overwrite(UNIT_LEN)).await.unwrap();
                let nothing = vec![0; UNIT_LEN];
                assert!(read.to_vec() == *bytes.as_ref().unwrap_or(&nothing), "seed {seed}, unit {unit}");
            }
        });
    }
}

/// Where zeros cannot be written the guest gets no error, and no more are tried.
#[test]
fn a_failure_ends_it() {
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open(&world, true, Prealloc::Auto, Delay::none()).await;
        fixture.write(999, &[7; UNIT_LEN]).await;
        fixture.idle(500).await;
        let zeros = fixture.zeros();
        assert!(zeros > 0);
        // All prepared space is used up while the disk is not tended.
        for unit in 0..zeros / UNIT {
            fixture.write(unit, &[7; UNIT_LEN]).await;
        }
        fixture.disk.flush().await.unwrap();
        let full = Fault { error: ErrorKind::NoSpace, ..Fault::nth(Operation::Write, 0) };
        fixture.drive.faults().add(full);
        fixture.idle(500).await;
        assert_eq!(fixture.drive.faults().hits(), 1);
        let tried = fixture.zeros();
        for unit in 0..8 {
            fixture.write(100 + unit, &[7; UNIT_LEN]).await;
            fixture.disk.flush().await.unwrap();
            fixture.idle(50).await;
        }
        assert_eq!(fixture.zeros(), tried);
        fixture.close().await;
    });
}
