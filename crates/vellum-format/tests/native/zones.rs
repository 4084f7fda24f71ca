//! Units that hold their own entries: what a failed first write leaves, zones that fill and are opened again,
//! and concurrent reads.

use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, ImageOffset, ImageSpan, LocalFuture, Random, Result, SharedStorage,
    Storage, StorageRun, WriteFlags, ZeroFlags,
};
use vellum_format::native::{Superblocks, recover, resize};
use vellum_sim::{Drive, DriveOptions, Effect, FaultPlan, ForwardStorage, Forwarding, World};

use super::common::busy_drive;
use super::common::native::{NativeSetup, look_native};
use super::trials::after_a_failed_allocation;

const UNIT: u64 = 64 << 10;

fn setup(size: u64, zone: u64) -> NativeSetup {
    NativeSetup::zoned("zoned", size, UNIT, zone)
}

fn bytes(value: u8) -> Buffer {
    Buffer::copy_of(&[value; 4096])
}

/// A write that failed may lie in the image with its entry. The next one for the same place is another unit,
/// and the one that was acknowledged counts, whatever a crash leaves of the first.
#[test]
fn an_embedded_allocation_that_failed_never_comes_back() {
    for effect in [Effect::None, Effect::Some, Effect::All] {
        assert_eq!(after_a_failed_allocation(effect), [3; 4096], "{effect:?}");
    }
}

/// What is released is used again: the file does not grow, and zones that have become empty are opened again.
#[test]
fn emptied_zones_are_opened_again() {
    let setup = setup(4 << 20, 256 << 10);
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let mut longest = 0;
        for round in 0..12_u8 {
            let mut writes = 0;
            for unit in 0..32 {
                let mark = drive.counts();
                disk.write(GuestOffset::new(unit * UNIT), bytes(round + 1), WriteFlags::FUA).await.unwrap();
                writes += drive.counts_since(mark).writes;
            }
            assert!(
                round == 0 || writes <= 32 + 24,
                "round {round}: {writes} writes for 32, most are embedded"
            );
            for unit in 0..32 {
                let found = disk.read(GuestOffset::new(unit * UNIT), Buffer::zeroed(4096)).await.unwrap();
                assert_eq!(found.to_vec(), [round + 1; 4096], "round {round}, unit {unit}");
            }
            if round == 3 {
                longest = drive.content().len();
            }
            disk.discard(GuestOffset::ZERO.span(32 * UNIT), WriteFlags::FUA).await.unwrap();
            for _ in 0..3 {
                disk.write(GuestOffset::new(3 << 20), bytes(9), WriteFlags::FUA).await.unwrap();
            }
        }
        assert!(drive.content().len() <= longest + (1 << 20), "{} after {longest}", drive.content().len());
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}

/// Packed blocks that are overwritten, in whole and in part, zeroed and discarded, while others read: no read
/// returns anything that was never written.
#[test]
fn readers_see_old_bytes_or_new_ones() {
    let setup = setup(1 << 20, 256 << 10);
    for seed in 0..20 {
        let world = World::shuffled(seed);
        let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
        world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            disk.write(GuestOffset::new(15 * UNIT), bytes(1), WriteFlags::FUA).await.unwrap();
            let mut random = Random::from_seed(seed);
            let writers: Vec<_> = (0..4_u64)
                .map(|unit| {
                    let (disk, mut random) = (disk.clone(), random.fork());
                    world.spawn(async move {
                        for value in 1..40_u8 {
                            // Two of them write to the same unit.
                            let unit = unit / 2;
                            let at = GuestOffset::new(unit * UNIT + 512 * random.below(8));
                            let whole = GuestOffset::new(unit * UNIT);
                            match random.below(6) {
                                0 => disk.discard(whole.span(UNIT), WriteFlags::default()).await.unwrap(),
                                1 => disk.write_zeroes(at.span(4096), ZeroFlags::default()).await.unwrap(),
                                2 => disk.flush().await.unwrap(),
                                3 => {
                                    let data = Buffer::copy_of(&[value; 1024]);
                                    disk.write(at, data, WriteFlags::default()).await.unwrap();
                                }
                                _ => disk.write(whole, bytes(value), WriteFlags::default()).await.unwrap(),
                            }
                        }
                    })
                })
                .collect();
            let readers: Vec<_> = (0..4_u64)
                .map(|unit| {
                    let disk = disk.clone();
                    world.spawn(async move {
                        for _ in 0..60 {
                            let at = GuestOffset::new(unit / 2 * UNIT);
                            let found = disk.read(at, Buffer::zeroed(16_384)).await.unwrap().to_vec();
                            for sector in found.chunks(512) {
                                assert!(
                                    sector[0] < 40 && sector.iter().all(|byte| *byte == sector[0]),
                                    "torn"
                                );
                            }
                        }
                    })
                })
                .collect();
            for task in writers.into_iter().chain(readers) {
                task.await;
            }
            disk.close().await.unwrap();
            let image: SharedStorage = drive.clone();
            let (report, lines) = look_native(&image).await.unwrap();
            assert!(report.is_clean(), "seed {seed}: {lines:?}");
        });
    }
}

/// After a crash recovery reads the journal and the open zones, whatever the size of the image, and once is
/// enough.
#[test]
fn recovery_reads_open_zones_only() {
    let setup = setup(64 << 20, 1 << 20);
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        for unit in 0..500 {
            disk.write(
                GuestOffset::new(unit * UNIT),
                bytes(u8::try_from(unit % 250 + 1).unwrap()),
                WriteFlags::FUA,
            )
            .await
            .unwrap();
        }
        let image: SharedStorage = Drive::from_content(&world, drive.content(), DriveOptions::default());
        let mark = drive.counts();
        let recovery = recover(&image).await.unwrap();
        assert!(recovery.embedded_units > 0 && recovery.embedded_units <= 3 * 16, "{recovery:?}");
        assert_eq!(drive.counts_since(mark).reads, 0, "it is a copy");
        let again = recover(&image).await.unwrap();
        assert_eq!((again.records, again.embedded_units), (0, 0));
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
        disk.close().await.unwrap();
    });
}

/// In a quiet time the entries are recorded in the table, so that a recovery has nothing to look for.
#[test]
fn embedded_entries_are_recorded_when_it_is_quiet() {
    let setup = setup(4 << 20, 1 << 20);
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let second = std::time::Duration::from_secs(1);
        let embedded = async || {
            let image: SharedStorage = Drive::from_content(&world, drive.content(), DriveOptions::default());
            recover(&image).await.unwrap().embedded_units
        };
        for unit in 0..8 {
            disk.write(GuestOffset::new(unit * UNIT), bytes(1), WriteFlags::FUA).await.unwrap();
        }
        disk.tend(second).await;
        disk.tend(2 * second).await;
        assert_eq!(embedded().await, 7, "all but the one that opened the zone");
        disk.tend(3 * second).await;
        assert_eq!(embedded().await, 0);
        disk.write(GuestOffset::new(9 * UNIT), bytes(1), WriteFlags::FUA).await.unwrap();
        disk.tend(9 * second).await;
        assert_eq!(embedded().await, 1, "it has only just become quiet");
        disk.close().await.unwrap();
    });
}

/// A packed block and what lies beside it are one read.
#[test]
fn a_unit_is_one_read() {
    let setup = setup(4 << 20, 1 << 20);
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let mut model = vec![0; 1 << 20];
        for unit in 0..16_usize {
            let at = unit << 16;
            model[at..at + (64 << 10)].fill(u8::try_from(unit + 1).unwrap());
            let data = Buffer::copy_of(&model[at..at + (64 << 10)]);
            disk.write(GuestOffset::new(at as u64), data, WriteFlags::FUA).await.unwrap();
        }
        let mark = drive.counts();
        let found = disk.read(GuestOffset::ZERO, Buffer::zeroed(1 << 20)).await.unwrap();
        assert!(found.to_vec() == model);
        let reads = drive.counts_since(mark).reads;
        assert!(reads <= 2, "{reads} reads: the first unit lies elsewhere, the others in a row");
        let odd = disk.read(GuestOffset::new(65_536 + 100), Buffer::zeroed(9000)).await.unwrap();
        assert!(odd.to_vec() == model[65_636..74_636]);
        disk.close().await.unwrap();
    });
}

/// A snapshot goes, and what the disk still has of it stays, packed or not.
#[test]
fn a_deleted_snapshot_keeps_packed_units_of_the_disk() {
    let setup = setup(4 << 20, 256 << 10);
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        disk.write(GuestOffset::new(15 * UNIT), bytes(9), WriteFlags::FUA).await.unwrap();
        disk.write(GuestOffset::ZERO, bytes(1), WriteFlags::FUA).await.unwrap();
        disk.snapshot_create("s", 0).await.unwrap();
        disk.write(GuestOffset::new(UNIT), bytes(2), WriteFlags::FUA).await.unwrap();
        disk.snapshot_delete("s").await.unwrap();
        for _ in 0..4 {
            disk.write(GuestOffset::new(2 * UNIT), bytes(3), WriteFlags::FUA).await.unwrap();
        }
        let found = disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await.unwrap().to_vec();
        assert_eq!(found, [1; 4096]);
    });
}

#[test]
fn a_packed_block_behind_the_end() {
    let setup = setup(1 << 20, 256 << 10);
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        disk.write(GuestOffset::new(15 * UNIT), bytes(9), WriteFlags::FUA).await.unwrap();
        disk.write(GuestOffset::new(32 << 10), bytes(1), WriteFlags::FUA).await.unwrap();
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        resize(&image, 16 << 10, true).await.unwrap();
        resize(&image, 1 << 20, false).await.unwrap();
        let disk = setup.open(&drive).await.unwrap();
        let found = disk.read(GuestOffset::new(32 << 10), Buffer::zeroed(4096)).await.unwrap().to_vec();
        assert_eq!(found, [0; 4096]);
    });
}

/// A file whose file system has blocks of 1 KiB.
struct Fine(SharedStorage);

impl ForwardStorage for Fine {
    fn inner(&self) -> &dyn Storage {
        &*self.0
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        Box::pin(async move {
            let end = self.0.len().min(span.end().bytes());
            let mut runs: Vec<StorageRun> = Vec::new();
            let mut at = span.start().bytes();
            while at < end {
                let next = ((at / 1024 + 1) * 1024).min(end);
                let len = usize::try_from(next - at).unwrap();
                let bytes = self.0.read(ImageOffset::new(at), Buffer::zeroed(len)).await?.to_vec();
                let is_data = bytes.iter().any(|byte| *byte != 0);
                let here = ImageOffset::new(at).span(next - at);
                match runs.last_mut() {
                    Some(last) if last.is_data == is_data => {
                        last.span = ImageSpan::between(last.span.start(), here.end());
                    }
                    _ => runs.push(StorageRun { span: here, is_data }),
                }
                at = next;
            }
            Ok(runs)
        })
    }
}

/// In the image: noise that packs no further than to about 4000 bytes, so that no KiB of the packed block is
/// zero.
fn hardly_packs() -> Vec<u8> {
    let mut data = vec![0; 4096];
    Random::from_seed(5).fill(&mut data[..3900]);
    data
}

/// Data that begins within a block of ours, as a file system with smaller blocks sends it.
#[test]
fn blocks_of_a_host_are_smaller() {
    let setup = setup(4 << 20, 256 << 10);
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        disk.write(GuestOffset::new(15 * UNIT), bytes(9), WriteFlags::FUA).await.unwrap();
        let data = Buffer::copy_of(&hardly_packs());
        disk.write(GuestOffset::new(6 * 4096), data, WriteFlags::FUA).await.unwrap();
        let last = Buffer::copy_of(&[7; 1024]);
        disk.write(GuestOffset::new(6 * 4096 - 1024), last, WriteFlags::FUA).await.unwrap();
        let plain: SharedStorage = Drive::from_content(&world, drive.content(), DriveOptions::default());
        let fine: SharedStorage =
            Forwarding::new(Fine(Drive::from_content(&world, drive.content(), DriveOptions::default())));
        let by_page = recover(&plain).await.unwrap().embedded_units;
        let by_kib = recover(&fine).await.unwrap().embedded_units;
        assert_eq!((by_page, by_kib), (1, 1));
    });
}

/// Units that were never handed out are available to all writers when there are no others.
#[test]
fn a_device_can_be_filled() {
    let setup = setup(1 << 20, 256 << 10);
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        drive.set_len((1 << 20) + 16 * UNIT).await.unwrap();
        let image = super::device::Device::with(drive.clone(), true);
        let options = vellum_format::native::OpenOptions { journal_key: Some(1), ..Default::default() };
        let disk = vellum_format::native::Native::open(image.clone(), None, options).await.unwrap();
        let mut random = Random::from_seed(3);
        disk.write(GuestOffset::ZERO, bytes(1), WriteFlags::FUA).await.unwrap();
        for unit in 1..16 {
            let mut noise = vec![0; 65536];
            random.fill(&mut noise);
            let done =
                disk.write(GuestOffset::new(unit * UNIT), Buffer::copy_of(&noise), WriteFlags::FUA).await;
            assert!(done.is_ok(), "unit {unit} of 16: {done:?}");
        }
    });
}

/// A damaged packed block is reported by a check, not returned to the guest, and repaired by writing it anew.
#[test]
fn a_damaged_packed_block_is_reported() {
    let setup = setup(4 << 20, 256 << 10);
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        let image: SharedStorage = drive.clone();
        let disk = setup.open(&drive).await.unwrap();
        for unit in 0..8 {
            disk.write(GuestOffset::new(unit * UNIT), bytes(7), WriteFlags::FUA).await.unwrap();
        }
        disk.close().await.unwrap();
        assert!(look_native(&image).await.unwrap().0.is_clean());
        let mut at = Superblocks::read(&*image).await.unwrap().superblock.places().data_offset();
        let is_packed = |block: &[u8]| block != [0; 4096] && block != [7; 4096];
        while !is_packed(image.read(at, Buffer::zeroed(4096)).await.unwrap().contiguous().slice()) {
            at += 4096;
        }
        image.write(at + 30, Buffer::copy_of(&[0xEE])).await.unwrap();
        let (report, lines) = look_native(&image).await.unwrap();
        assert_eq!(report.corruptions, 1, "{lines:?}");
        assert!(lines[0].contains(&format!("packed block at {:#x} is damaged", at.bytes())), "{lines:?}");
        let disk = setup.open(&drive).await.unwrap();
        let mut cured = 0;
        for unit in 0..8 {
            let place = GuestOffset::new(unit * UNIT);
            if let Err(error) = disk.read(place, Buffer::zeroed(4096)).await {
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                assert!(lines[0].contains(&format!("4 KiB at {:#x} ", place.bytes())), "{lines:?}");
                disk.write(place, bytes(8), WriteFlags::FUA).await.unwrap();
                cured += 1;
            }
        }
        assert_eq!(cured, 1);
        disk.close().await.unwrap();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}
