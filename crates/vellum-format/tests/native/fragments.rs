//! A device on which zones are emptied: its units are released here and there, and then it is tended.

#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;
use std::time::Duration;

use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, HostTally, Random, SharedStorage, Storage, WriteFlags,
};
use vellum_format::native::{Native, OpenOptions, Superblocks, create};
use vellum_sim::{Delay, Drive, DriveOptions, Forwarding, Handle, Operation, World};

use super::common::native::{NativeSetup, look_native};
use super::device::Device;
use super::late::{Fate, Late};

pub(crate) const UNIT: u64 = 64 << 10;
pub(crate) const UNIT_LEN: usize = 64 << 10;
/// Units of the device, in zones of 16; the disk has twice as many.
pub(crate) const UNITS: u64 = 160;

pub(crate) fn index(unit: u64) -> usize {
    usize::try_from(unit).unwrap()
}

pub(crate) struct Fixture {
    pub(crate) disk: Arc<Native>,
    pub(crate) drive: Arc<Drive>,
    pub(crate) late: Arc<Forwarding<Late>>,
    image: SharedStorage,
    tally: HostTally,
    millis: u64,
    /// What each unit of the disk holds: nothing, or this byte.
    pub(crate) model: Vec<u8>,
}

impl Fixture {
    pub(crate) async fn open(world: &World, delay: Delay, is_fast: bool, compaction: bool) -> Self {
        let drive = Drive::new(world, DriveOptions { delay, ..DriveOptions::default() });
        let len = (1 << 20) + usize::try_from(UNITS * UNIT).unwrap();
        drive.write(vellum_core::ImageOffset::ZERO, Buffer::copy_of(&vec![0x77; len])).await.unwrap();
        let late = Late::over(Device::with(drive.clone(), is_fast));
        let image: SharedStorage = late.clone();
        let setup = NativeSetup::zoned("zoned", 2 * UNITS * UNIT, UNIT, 16 * UNIT);
        create(&*image, &setup.create_options()).await.unwrap();
        let tally = HostTally::default();
        let options =
            OpenOptions { tally: tally.clone(), journal_key: Some(1), compaction, ..OpenOptions::default() };
        let disk = Native::open(image.clone(), None, options).await.unwrap();
        Self { disk, drive, late, image, tally, millis: 0, model: vec![0; index(2 * UNITS)] }
    }

    pub(crate) async fn idle(&mut self, millis: u64) {
        for _ in 0..millis.div_ceil(50) {
            self.millis += 50;
            for _ in 0..1000 {
                if !self.disk.tend(Duration::from_millis(self.millis)).await {
                    break;
                }
            }
        }
    }

    pub(crate) async fn write(&mut self, unit: u64, byte: u8) {
        let at = GuestOffset::new(unit * UNIT);
        self.disk.write(at, Buffer::copy_of(&[byte; UNIT_LEN]), WriteFlags::default()).await.unwrap();
        self.model[index(unit)] = byte;
    }

    pub(crate) async fn discard(&mut self, unit: u64) {
        let span: GuestSpan = GuestOffset::new(unit * UNIT).span(UNIT);
        self.disk.discard(span, WriteFlags::default()).await.unwrap();
        self.model[index(unit)] = 0;
    }

    /// All of the device is used, and then three of four units are released, here and there.
    pub(crate) async fn make_fragments(&mut self) {
        for unit in 0..UNITS - 6 {
            self.write(unit, u8::try_from(1 + unit % 200).unwrap()).await;
            self.disk.flush().await.unwrap();
            self.idle(100).await;
        }
        for unit in (0..UNITS - 6).filter(|unit| unit % 4 != 1) {
            self.discard(unit).await;
        }
        self.disk.flush().await.unwrap();
    }

    /// How many writes twelve new units take, with a flush each.
    pub(crate) async fn cost_of_new_ones(&mut self) -> u64 {
        self.write(2 * UNITS - 1, 9).await;
        self.disk.flush().await.unwrap();
        self.idle(200).await;
        let writes = |tally: &HostTally| tally.data.counts().writes + tally.metadata.counts().writes;
        let before = writes(&self.tally);
        for unit in 0..12 {
            self.write(UNITS + unit, 7).await;
            self.disk.flush().await.unwrap();
        }
        writes(&self.tally) - before
    }

    /// The first unit that does not hold what was written.
    pub(crate) async fn first_wrong(&self) -> Option<usize> {
        for (unit, byte) in self.model.iter().enumerate() {
            let at = GuestOffset::new(unit as u64 * UNIT);
            let read = self.disk.read(at, Buffer::for_overwrite(UNIT_LEN)).await.unwrap();
            if read.to_vec().iter().any(|is| is != byte) {
                return Some(unit);
            }
        }
        None
    }

    pub(crate) async fn close(self) {
        self.disk.close().await.unwrap();
        let (report, lines) = look_native(&self.image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    }
}

/// The units of the disk that are left of the fragments.
pub(crate) fn kept() -> impl Iterator<Item = u64> {
    (0..UNITS - 6).filter(|unit| unit % 4 == 1)
}

impl Fixture {
    /// Noise in place of what is there, in units that lie where they lie, and no journal that still counts on
    /// their bytes.
    pub(crate) async fn make_plain_fragments(&mut self, random: &mut Random) {
        self.make_fragments().await;
        for _ in 0..3 {
            for unit in kept() {
                let data = self.noise(unit, random);
                self.disk.write(GuestOffset::new(unit * UNIT), data, WriteFlags::default()).await.unwrap();
            }
            self.disk.flush().await.unwrap();
        }
        self.idle(1500).await; // what was freed becomes clean
    }

    /// New bytes for all of a unit, of which the model knows the first: they differ only from those of
    /// another time.
    pub(crate) fn noise(&mut self, unit: u64, random: &mut Random) -> Buffer {
        let byte = u8::try_from(1 + random.below(255)).unwrap();
        self.model[index(unit)] = byte;
        Buffer::copy_of(&[byte; UNIT_LEN])
    }

    /// Tends the disk for this long, beside others.
    pub(crate) fn tend(&mut self, world: &World, millis: u64) -> Handle<()> {
        let (disk, from) = (self.disk.clone(), self.millis);
        self.millis += millis;
        world.spawn(async move {
            for step in 0..millis / 50 {
                while disk.tend(Duration::from_millis(from + step * 50)).await {}
            }
        })
    }

    /// Writes all that is kept anew, at once. Tells when that has returned.
    pub(crate) fn overwrite(
        &mut self,
        world: &World,
        random: &mut Random,
    ) -> Vec<Handle<vellum_core::Result<()>>> {
        kept()
            .map(|unit| {
                let (disk, data) = (self.disk.clone(), self.noise(unit, random));
                let at = GuestOffset::new(unit * UNIT);
                world.spawn(async move { disk.write(at, data, WriteFlags::default()).await })
            })
            .collect()
    }
}

/// Whether a unit is wrong when writes were on their way to units that were copied.
pub(crate) fn writes_on_their_way() -> Option<usize> {
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open(&world, Delay::none(), true, true).await;
        let mut random = Random::from_seed(0);
        fixture.make_plain_fragments(&mut random).await;
        let places = Superblocks::read(&*fixture.image).await.unwrap().superblock.places();
        let units = places.data_offset().span(UNITS * UNIT);
        let hold = fixture.drive.hold_within(Operation::Write, units);
        let writes = fixture.overwrite(&world, &mut random);
        hold.caught(writes.len()).await;
        let tending = fixture.tend(&world, 10_000);
        world.sleep(Duration::from_secs(1)).await;
        hold.release();
        for write in writes {
            write.await.unwrap();
        }
        tending.await;
        fixture.idle(60_000).await;
        let wrong = fixture.first_wrong().await;
        let cost = fixture.cost_of_new_ones().await;
        assert!((12..=16).contains(&cost), "zones were emptied: {cost} writes");
        fixture.close().await;
        wrong
    })
}

/// Whether a unit is wrong when its zone was released while it was copied.
pub(crate) fn with_the_zone_released() -> Option<usize> {
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open(&world, Delay::none(), true, true).await;
        let mut random = Random::from_seed(0);
        fixture.make_plain_fragments(&mut random).await;
        fixture.late.arm(UNIT_LEN, &[Fate::Late]);
        let tending = fixture.tend(&world, 10_000);
        fixture.late.caught(1).await;
        // Whatever is free is taken, that of the zone last.
        for unit in UNITS..UNITS + 112 {
            let data = fixture.noise(unit, &mut random);
            fixture.disk.write(GuestOffset::new(unit * UNIT), data, WriteFlags::default()).await.unwrap();
        }
        for write in fixture.overwrite(&world, &mut random) {
            write.await.unwrap();
        }
        fixture.disk.flush().await.unwrap();
        fixture.late.release();
        tending.await;
        let wrong = fixture.first_wrong().await;
        fixture.close().await;
        wrong
    })
}
