//! Units that are prepared ahead of need: the exact cost, and when.
//!
//! The medium is a device of which nothing is known to be zero and whose zeros are written; the guest must
//! not wait for any of that.

use std::time::Duration;

use vellum_core::{
    Buffer, Disk, GuestOffset, HostTally, ImageOffset, IoCounts, Random, SharedStorage, Storage, WriteFlags,
};
use vellum_format::Prealloc;
use vellum_format::native::{Native, OpenOptions, create};
use vellum_sim::{Drive, DriveOptions, World};

use super::common::native::{NativeSetup, look_native};
use super::device::Device;

const UNIT: u64 = 64 << 10;
const UNITS: u64 = 600;

/// What happened, guest and background apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cost {
    flushes: u64,
    writes: u64,
    zeroed_for_guest: u64,
    zeroed_ahead: u64,
    waits: u64,
}

struct Fixture {
    disk: std::sync::Arc<Native>,
    image: SharedStorage,
    tally: HostTally,
    before: [IoCounts; 3],
    waits: u64,
    millis: u64,
}

impl Fixture {
    /// An open image on a device full of old bytes, or in a file.
    async fn open(world: &World, on_device: bool) -> Self {
        Self::open_keeping(world, on_device, Prealloc::Auto).await
    }

    async fn open_keeping(world: &World, on_device: bool, prealloc: Prealloc) -> Self {
        let drive = Drive::new(world, DriveOptions::default());
        let setup = NativeSetup::table("table", 2 * UNITS * UNIT, UNIT);
        let image: SharedStorage = if on_device {
            let mut old = vec![0; usize::try_from((1 << 20) + UNITS * UNIT).unwrap()];
            Random::from_seed(3).fill(&mut old);
            drive.write(ImageOffset::ZERO, Buffer::copy_of(&old)).await.unwrap();
            Device::shared(drive)
        } else {
            drive
        };
        create(&*image, &setup.create_options()).await.unwrap();
        let tally = HostTally::default();
        let options =
            OpenOptions { tally: tally.clone(), journal_key: Some(1), prealloc, ..OpenOptions::default() };
        let disk = Native::open(image.clone(), None, options).await.unwrap();
        Self { disk, image, tally, before: Default::default(), waits: 0, millis: 0 }
    }

    /// An idle time of this many milliseconds, in steps of the length that a server uses.
    async fn idle(&mut self, millis: u64) {
        for _ in 0..millis.div_ceil(50) {
            self.millis += 50;
            while self.disk.tend(Duration::from_millis(self.millis)).await {}
        }
    }

    async fn write(&self, unit: u64) {
        let at = GuestOffset::new(unit * UNIT) + 512;
        self.disk.write(at, Buffer::copy_of(&[7; 4096]), WriteFlags::default()).await.unwrap();
    }

    /// The counts since the last call.
    fn cost(&mut self) -> Cost {
        let now = [self.tally.data.counts(), self.tally.metadata.counts(), self.tally.prealloc.counts()];
        let [data, metadata, ahead] = std::array::from_fn(|i| now[i] - self.before[i]);
        let waits = self.disk.waits_for_units() - self.waits;
        (self.before, self.waits) = (now, self.disk.waits_for_units());
        Cost {
            flushes: data.flushes + metadata.flushes + ahead.flushes,
            writes: data.writes + metadata.writes,
            zeroed_for_guest: (data.bytes_zeroed + metadata.bytes_zeroed) / UNIT,
            zeroed_ahead: ahead.bytes_zeroed / UNIT,
            waits,
        }
    }

    async fn close(self) {
        self.disk.close().await.unwrap();
        let (report, lines) = look_native(&self.image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    }
}

const NOTHING: Cost = Cost { flushes: 0, writes: 0, zeroed_for_guest: 0, zeroed_ahead: 0, waits: 0 };

/// A guest that writes into a fresh unit and flushes, with an idle moment now and then: one flush and two
/// writes each, as in a file, and each unit is made zero once.
#[test]
fn writes_wait_for_no_zeros() {
    const N: u64 = 64;
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open(&world, true).await;
        fixture.cost();
        fixture.idle(1000).await;
        assert_eq!(fixture.cost(), Cost { flushes: 1, zeroed_ahead: 4, ..NOTHING }, "a few, with one flush");
        fixture.idle(60_000).await;
        assert_eq!(fixture.cost(), NOTHING, "a quiet disk costs nothing");
        // The journal begins.
        fixture.write(0).await;
        fixture.disk.flush().await.unwrap();
        fixture.idle(50).await;
        fixture.cost();
        // A mebibyte ahead, from the first write on.
        fixture.idle(1000).await;
        fixture.write(1).await;
        fixture.disk.flush().await.unwrap();
        fixture.idle(50).await;
        fixture.cost();
        for unit in 2..2 + N {
            fixture.write(unit).await;
            fixture.disk.flush().await.unwrap();
            fixture.idle(50).await;
        }
        let cost = fixture.cost();
        assert_eq!(
            (cost.flushes, cost.writes, cost.zeroed_for_guest, cost.waits),
            (N, 2 * N, 0, 0),
            "{cost:?}"
        );
        // 64 units of 64 KiB in 3.2 s: 20 units a second; at most that many are ready at the end.
        assert!((N..N + 24).contains(&cost.zeroed_ahead), "{cost:?}");
        fixture.idle(60_000).await;
        let cost = fixture.cost();
        assert!(cost.flushes <= 1 && cost.zeroed_ahead <= 8, "what was begun is ended: {cost:?}");
        fixture.idle(60_000).await;
        assert_eq!(fixture.cost(), NOTHING, "a quiet disk costs nothing");
        fixture.close().await;
    });
}

/// Without tending, or when the guest is faster than that, it waits, and the waits are counted.
#[test]
fn a_guest_that_is_faster_waits() {
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open(&world, true).await;
        fixture.idle(1000).await;
        for unit in 0..UNITS / 2 {
            fixture.write(unit).await;
        }
        let cost = fixture.cost();
        assert!(cost.waits > 0 && cost.zeroed_ahead == 4, "{cost:?}");
        fixture.idle(1000).await;
        // It was fast in the last second, so a lot is ready.
        let ahead = fixture.cost().zeroed_ahead;
        assert!((100..=1024).contains(&ahead), "{ahead}");
        for unit in UNITS / 2..UNITS / 2 + 100 {
            fixture.write(unit).await;
        }
        assert_eq!(fixture.cost().waits, 0);
        fixture.close().await;
    });
}

/// What a write fills from end to end is not made zero before, and shows nothing of what was there.
#[test]
fn units_that_are_filled_need_no_zeros() {
    const N: u64 = 100;
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open(&world, true).await;
        fixture.idle(1000).await;
        fixture.cost();
        let bytes = |unit: u64| vec![u8::try_from(unit % 251).unwrap() + 1; usize::try_from(UNIT).unwrap()];
        for unit in 0..N {
            let at = GuestOffset::new(unit * UNIT);
            fixture.disk.write(at, Buffer::copy_of(&bytes(unit)), WriteFlags::default()).await.unwrap();
            fixture.idle(50).await;
        }
        let cost = fixture.cost();
        assert_eq!((cost.zeroed_for_guest, cost.zeroed_ahead, cost.waits), (0, 0, 0), "{cost:?}");
        // Data of units in a row is one request, or several; the superblock and the ring come before it.
        assert!(cost.flushes <= 8, "what is not checked is flushed once more: {cost:?}");
        fixture.write(N).await;
        fixture.disk.flush().await.unwrap();
        for unit in 0..N {
            let at = GuestOffset::new(unit * UNIT);
            let read = fixture.disk.read(at, Buffer::zeroed(usize::try_from(UNIT).unwrap())).await.unwrap();
            assert!(read.to_vec() == bytes(unit), "unit {unit}");
        }
        let read = fixture.disk.read(GuestOffset::new(N * UNIT), Buffer::zeroed(1024)).await.unwrap();
        assert_eq!(read.to_vec(), [vec![0; 512], vec![7; 512]].concat(), "a unit that is written in part");
        fixture.close().await;
    });
}

/// As much as somebody wants is made ready when the guest is quiet, and not beside it.
#[test]
fn as_much_is_kept_ready_as_is_asked_for() {
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open_keeping(&world, true, Prealloc::Fixed(200 * UNIT)).await;
        fixture.cost();
        fixture.idle(60_000).await;
        let cost = fixture.cost();
        assert_eq!((cost.zeroed_for_guest, cost.zeroed_ahead, cost.waits), (0, 200, 0), "{cost:?}");
        for unit in 0..100 {
            fixture.write(unit).await;
            fixture.idle(50).await;
        }
        let cost = fixture.cost();
        assert!(
            cost.zeroed_ahead <= 24 && cost.waits == 0,
            "not beside a guest that flushes nothing: {cost:?}"
        );
        fixture.idle(60_000).await;
        let cost = fixture.cost();
        assert!((76..=100).contains(&cost.zeroed_ahead), "{cost:?}");
        fixture.idle(60_000).await;
        assert_eq!(fixture.cost(), NOTHING, "a quiet disk costs nothing");
        fixture.close().await;
    });
}

/// What is released is made zero only as far as it is needed; a file that grows needs nothing before its
/// first change.
#[test]
fn what_is_freed_costs_no_more_than_is_needed() {
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open(&world, true).await;
        fixture.idle(1000).await;
        for unit in 0..200 {
            fixture.write(unit).await;
            fixture.idle(50).await;
        }
        fixture.idle(60_000).await;
        fixture.cost();
        fixture.disk.discard(GuestOffset::ZERO.span(200 * UNIT), WriteFlags::default()).await.unwrap();
        fixture.disk.flush().await.unwrap();
        fixture.idle(60_000).await;
        let cost = fixture.cost();
        assert!(cost.zeroed_for_guest + cost.zeroed_ahead <= 16, "{cost:?}");
        let room = fixture.disk.room().await.unwrap().unwrap();
        assert_eq!(room.free, UNITS * UNIT, "and all of it can be used");
        for unit in 0..UNITS {
            fixture.write(unit).await;
        }
        fixture.close().await;

        let mut file = Fixture::open(&world, false).await;
        file.cost();
        file.idle(1000).await;
        assert_eq!(file.cost(), NOTHING);
        for unit in 0..200 {
            file.write(unit).await;
        }
        file.disk.flush().await.unwrap();
        file.cost();
        file.disk.discard(GuestOffset::ZERO.span(100 * UNIT), WriteFlags::default()).await.unwrap();
        file.disk.flush().await.unwrap();
        let cost = file.cost();
        assert_eq!((cost.zeroed_for_guest, cost.zeroed_ahead), (0, 0), "no flush does it: {cost:?}");
        file.write(200).await;
        let cost = file.cost();
        assert_eq!(
            (cost.zeroed_for_guest, cost.zeroed_ahead),
            (100, 0),
            "nobody has tended it yet, so the next change does it: {cost:?}"
        );
        file.idle(50).await;
        file.disk
            .discard(GuestOffset::new(100 * UNIT).span(100 * UNIT), WriteFlags::default())
            .await
            .unwrap();
        file.disk.flush().await.unwrap();
        assert_eq!(file.cost().zeroed_for_guest, 0);
        file.idle(1000).await;
        let cost = file.cost();
        assert_eq!((cost.zeroed_for_guest, cost.zeroed_ahead), (0, 100), "holes, so all of it: {cost:?}");
        file.close().await;
    });
}
