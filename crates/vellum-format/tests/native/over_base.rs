//! Packed blocks over a base: what readers see beside them, and what fills find.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use vellum_core::{Buffer, Disk, GuestOffset, Random, SharedStorage, WriteFlags, ZeroFlags};
use vellum_format::native::recover;
use vellum_sim::{Drive, DriveOptions, FaultPlan, World};

use super::common::busy_drive;
use super::common::native::{NativeSetup, look_native};
use super::over_base_trials::packed_blocks_of_a_released_unit;

const UNIT: u64 = 64 << 10;
/// What each byte of the base is.
const BELOW: u8 = 200;

fn setup() -> NativeSetup {
    let base = vec![BELOW; 8 * 65_536];
    NativeSetup::zoned("zoned over a base", 1 << 20, UNIT, 256 << 10).over(base, 32 << 10)
}

fn bytes(value: u8) -> Buffer {
    Buffer::copy_of(&[value; 4096])
}

/// Beside writes, zeros, discards, copies of the base and quiet times, no read finds the base again where another one has
/// found something else before, and none finds anything that was never written.
#[test]
fn what_the_image_has_is_never_the_bases_again() {
    const READ: usize = 32 << 10;
    for seed in 0..30 {
        let world = World::shuffled(seed);
        let setup = setup();
        let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
        world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            disk.write(GuestOffset::new(15 * UNIT), bytes(1), WriteFlags::FUA).await.unwrap();
            let mut random = Random::from_seed(seed);
            let writers: Vec<_> = (0..4_u64)
                .map(|writer| {
                    let (disk, mut random) = (disk.clone(), random.fork());
                    world.spawn(async move {
                        for value in 1..40_u8 {
                            // Two of them write to the same unit.
                            let whole = GuestOffset::new(writer / 2 * UNIT);
                            let block = whole + 4096 * random.below(8);
                            let sector = block + 512 * random.below(8);
                            match random.below(9) {
                                0 => disk.discard(whole.span(UNIT), WriteFlags::default()).await.unwrap(),
                                1 => {
                                    disk.write_zeroes(sector.span(4096), ZeroFlags::default()).await.unwrap()
                                }
                                2 => disk.flush().await.unwrap(),
                                3 => {
                                    let data = Buffer::copy_of(&[value; 512]);
                                    disk.write(sector, data, WriteFlags::default()).await.unwrap();
                                }
                                4 => {
                                    let data = Buffer::copy_of(&[BELOW; 8192]);
                                    disk.fill(block, data).await.unwrap();
                                }
                                5 => drop(disk.tend(Duration::from_secs(3 * u64::from(value))).await),
                                _ => disk.write(block, bytes(value), WriteFlags::default()).await.unwrap(),
                            }
                        }
                    })
                })
                .collect();
            let seen = Rc::new(RefCell::new(vec![false; 2 * READ / 512]));
            let readers: Vec<_> = (0..4_usize)
                .map(|reader| {
                    let (disk, seen, clock) = (disk.clone(), seen.clone(), world.clock());
                    world.spawn(async move {
                        for _ in 0..60 {
                            // A read of the base alone takes no time.
                            clock.sleep(Duration::from_micros(250)).await;
                            let at = GuestOffset::new(reader as u64 / 2 * UNIT);
                            let before = seen.borrow().clone();
                            let found = disk.read(at, Buffer::zeroed(READ)).await.unwrap().to_vec();
                            for (index, sector) in found.chunks(512).enumerate() {
                                let index = reader / 2 * READ / 512 + index;
                                let value = sector[0];
                                assert!(sector.iter().all(|byte| *byte == value), "seed {seed}: torn");
                                assert!(
                                    value < 40 || value == BELOW,
                                    "seed {seed}: {value} was never written"
                                );
                                assert!(value != BELOW || !before[index], "seed {seed}: the base again");
                                seen.borrow_mut()[index] |= value != BELOW;
                            }
                        }
                    })
                })
                .collect();
            for task in writers.into_iter().chain(readers) {
                task.await;
            }
            assert!(seen.borrow().contains(&true), "seed {seed}: nothing was read");
            disk.close().await.unwrap();
            let image: SharedStorage = drive.clone();
            let (report, lines) = look_native(&image).await.unwrap();
            assert!(report.is_clean(), "seed {seed}: {lines:?}");
        });
    }
}

/// The blocks beside a packed block are filled as others are, so that a disk can be detached from its base.
#[test]
fn blocks_beside_a_packed_block_are_filled() {
    let (setup, world) = (setup(), World::new(0));
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        disk.write(GuestOffset::new(15 * UNIT), bytes(1), WriteFlags::FUA).await.unwrap();
        disk.write(GuestOffset::new(UNIT + 8192), bytes(2), WriteFlags::FUA).await.unwrap();
        let found = async || {
            let image: SharedStorage = Drive::from_content(&world, drive.content(), DriveOptions::default());
            recover(&image).await.unwrap().embedded_units
        };
        assert_eq!(found().await, 1, "only its packed block has the entry");
        let data = Buffer::copy_of(&[BELOW; 65_536]);
        let filled = disk.fill(GuestOffset::new(UNIT), data).await.unwrap();
        assert_eq!(filled.kept, UNIT - 4096);
        disk.flush().await.unwrap();
        assert_eq!(found().await, 0, "the copy's transaction has it");
        disk.close().await.unwrap();
    });
}

/// Until it is durable that the first one was let go.
#[test]
fn a_recovery_finds_one_packed_block_of_a_unit() {
    assert_eq!(packed_blocks_of_a_released_unit(), 1);
}
