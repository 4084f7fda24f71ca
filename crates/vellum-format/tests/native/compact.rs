//! A device on which zones are emptied: what comes of it, that nothing is lost while it goes on, and that it can be switched off.

use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::zip;
use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, HostTally, Random, SharedStorage, Storage, WriteFlags, try_join_all,
};
use vellum_format::native::{Native, OpenOptions, create};
use vellum_sim::{Delay, Drive, DriveOptions, World};

use super::common::native::{NativeSetup, look_native};
use super::device::Device;

const UNIT: u64 = 64 << 10;
const UNIT_LEN: usize = 64 << 10;
/// Units of the device, in zones of 16; the disk has twice as many.
const UNITS: u64 = 160;

fn index(unit: u64) -> usize {
    usize::try_from(unit).unwrap()
}

struct Bench {
    disk: Arc<Native>,
    image: SharedStorage,
    tally: HostTally,
    millis: u64,
    /// What each unit of the disk holds: nothing, or this byte.
    model: Vec<u8>,
}

impl Bench {
    async fn open(world: &World, delay: Delay, is_fast: bool, compaction: bool) -> Self {
        let drive = Drive::new(world, DriveOptions { delay, ..DriveOptions::default() });
        let len = (1 << 20) + usize::try_from(UNITS * UNIT).unwrap();
        drive.write(vellum_core::ImageOffset::ZERO, Buffer::copy_of(&vec![0x77; len])).await.unwrap();
        let image = Device::with(drive, is_fast);
        let setup = NativeSetup::zoned("zoned", 2 * UNITS * UNIT, UNIT, 16 * UNIT);
        create(&*image, &setup.create_options()).await.unwrap();
        let tally = HostTally::default();
        let options =
            OpenOptions { tally: tally.clone(), journal_key: Some(1), compaction, ..OpenOptions::default() };
        let disk = Native::open(image.clone(), None, options).await.unwrap();
        Self { disk, image, tally, millis: 0, model: vec![0; index(2 * UNITS)] }
    }

    async fn idle(&mut self, millis: u64) {
        for _ in 0..millis.div_ceil(50) {
            self.millis += 50;
            for _ in 0..1000 {
                if !self.disk.tend(Duration::from_millis(self.millis)).await {
                    break;
                }
            }
        }
    }

    async fn write(&mut self, unit: u64, byte: u8) {
        let at = GuestOffset::new(unit * UNIT);
        self.disk.write(at, Buffer::copy_of(&[byte; UNIT_LEN]), WriteFlags::default()).await.unwrap();
        self.model[index(unit)] = byte;
    }

    async fn discard(&mut self, unit: u64) {
        let span: GuestSpan = GuestOffset::new(unit * UNIT).span(UNIT);
        self.disk.discard(span, WriteFlags::default()).await.unwrap();
        self.model[index(unit)] = 0;
    }

    /// All of the device is used, and then three of four units let go, here and there.
    async fn make_fragments(&mut self) {
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
    async fn cost_of_new_ones(&mut self) -> u64 {
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
    async fn first_wrong(&self) -> Option<usize> {
        for (unit, byte) in self.model.iter().enumerate() {
            let at = GuestOffset::new(unit as u64 * UNIT);
            let read = self.disk.read(at, Buffer::for_overwrite(UNIT_LEN)).await.unwrap();
            if read.to_vec().iter().any(|is| is != byte) {
                return Some(unit);
            }
        }
        None
    }

    async fn close(self) {
        self.disk.close().await.unwrap();
        let (report, lines) = look_native(&self.image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    }
}

#[test]
fn fragments_become_zones_again() {
    for is_fast in [true, false] {
        for compaction in [true, false] {
            let world = World::new(0);
            world.run(async {
                let mut bench = Bench::open(&world, Delay::none(), is_fast, compaction).await;
                bench.make_fragments().await;
                bench.idle(60_000).await;
                let cost = bench.cost_of_new_ones().await;
                match compaction {
                    // One write each; and no more than a few for the zone that is opened.
                    true => assert!((12..=16).contains(&cost), "fast zeros {is_fast}: {cost} writes"),
                    false => assert!(cost >= 20, "fast zeros {is_fast}: {cost} writes without it"),
                }
                assert_eq!(bench.first_wrong().await, None);
                bench.close().await;
            });
        }
    }
}

/// Whatever the guest does meanwhile, in whatever order the drive answers.
#[test]
fn nothing_is_lost_while_zones_are_emptied() {
    for seed in 0..16 {
        assert_eq!(wrong_after(seed), None, "seed {seed}");
    }
}

/// The first unit that is wrong when zones were emptied beside a guest.
fn wrong_after(seed: u64) -> Option<usize> {
    let world = World::new(seed);
    world.run(async {
        let delay = Delay::between(Duration::from_micros(1)..=Duration::from_millis(2));
        let mut bench = Bench::open(&world, delay, seed.is_multiple_of(2), true).await;
        bench.make_fragments().await;
        let mut random = Random::from_seed(seed);
        let disk = bench.disk.clone();
        let mut last = vec![0; bench.model.len()];
        // Units that are there, again and again; a zone is emptied when two seconds are over.
        let writing = async {
            for turn in 0..150 {
                let mut chosen: Vec<u64> = (0..8).map(|_| random.below(UNITS - 6) / 4 * 4 + 1).collect();
                chosen.sort_unstable();
                chosen.dedup();
                let byte = 60 + turn;
                let writes = chosen.iter().map(|unit| {
                    let at = GuestOffset::new(unit * UNIT);
                    disk.write(at, Buffer::copy_of(&[byte; UNIT_LEN]), WriteFlags::default())
                });
                try_join_all(writes).await.unwrap();
                chosen.iter().for_each(|unit| last[index(*unit)] = byte);
                if random.index(6) == 0 {
                    disk.flush().await.unwrap();
                }
            }
        };
        zip(bench.idle(3000), writing).await;
        let written = last.iter().zip(&mut bench.model).filter(|(byte, _)| **byte != 0);
        written.for_each(|(byte, held)| *held = *byte);
        let wrong = bench.first_wrong().await;
        bench.close().await;
        wrong
    })
}
