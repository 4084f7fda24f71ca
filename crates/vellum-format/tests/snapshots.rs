//! A disk whose clusters are shared with an internal snapshot, written and discarded until the power fails:
//! the snapshot is unchanged, and the disk reads as the contract allows. QEMU makes the snapshot, so this
//! needs `qemu-img`.

#![allow(clippy::print_stderr, reason = "a test says why it was skipped")]

mod common;

use std::process::Command;
use std::sync::Arc;

use common::{QcowSetup, base, busy_drive, look, random_request, setups};
use vellum_core::{Buffer, Disk, GuestOffset, MemoryDisk, Random, SharedDisk, SharedStorage, WriteFlags};
use vellum_format::qcow2::{Files, Header, OpenOptions, Qcow2};
use vellum_sim::{Content, CrashKind, Drive, DriveOptions, FaultPlan, Oracle, World};

/// An image of this kind with a snapshot of what the disk reads as, which comes with it; nothing without
/// `qemu-img`.
fn with_snapshot(setup: &QcowSetup) -> Option<(Content, Vec<u8>)> {
    let world = World::new(0);
    let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
    let before = world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let mut random = Random::from_seed(1);
        for _ in 0..12 {
            random_request(&*disk, &mut random).await.unwrap();
        }
        let some = Buffer::copy_of(&[5; 40_000]);
        disk.write(GuestOffset::new(3000), some, WriteFlags::default()).await.unwrap();
        let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(usize::try_from(common::SIZE).unwrap())).await;
        disk.close().await.unwrap();
        read.unwrap().to_vec()
    });
    let name = format!("vellum-snapshot-{}-{}", setup.options.cluster_size, std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, drive.content().to_vec()).unwrap();
    let made = Command::new("qemu-img").args(["snapshot", "-c", "before"]).arg(&path).output();
    let image = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let Ok(made) = made else {
        eprintln!("skipped: qemu-img is not installed");
        return None;
    };
    assert!(made.status.success(), "{made:?}");
    Some((Content::of(&image), before))
}

async fn snapshot_of(setup: &QcowSetup, drive: &Arc<Drive>) -> Vec<u8> {
    let image: SharedStorage = drive.clone();
    let header = Header::read(&*image).await.unwrap();
    let below = setup.has_base.then(|| MemoryDisk::holding(&base()) as SharedDisk);
    let options = OpenOptions { snapshot: Some("before".to_owned()), ..OpenOptions::default() };
    let disk = Qcow2::open(header, Files { image, data_file: None, below }, options).await.unwrap();
    let buffer = Buffer::zeroed(usize::try_from(common::SIZE).unwrap());
    disk.read(GuestOffset::ZERO, buffer).await.unwrap().to_vec()
}

#[test]
fn a_snapshot_stays_through_crashes_of_the_disk_above_it() {
    let mut states = 0;
    for setup in setups() {
        let Some((image, before)) = with_snapshot(&setup) else { return };
        for seed in 0..6 * common::scale() {
            let world = World::shuffled(seed);
            let drive = busy_drive(&world, image.clone(), FaultPlan::none());
            let oracle = Oracle::new(&world, Content::of(&before));
            world.run(async {
                let disk = oracle.watch(setup.open(&drive).await.unwrap());
                let guests: Vec<_> = (0..3)
                    .map(|guest| {
                        let disk = disk.clone();
                        world.spawn(async move {
                            let mut random = Random::from_seed(seed * 100 + guest);
                            for _ in 0..25 {
                                random_request(&*disk, &mut random).await.unwrap();
                            }
                        })
                    })
                    .collect();
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
            for _ in 0..40 {
                let position = *random.pick(&positions);
                let kind = *random.pick(&[CrashKind::PowerCut, CrashKind::ProcessKill]);
                let left = log.crash(kind, position).random_image(&mut random);
                let what = format!("{}, seed {seed}, {kind:?} at {position}", setup.name);
                let expectation = oracle.expect_at(position);
                let world = World::new(0);
                let drive = Drive::from_content(&world, left, DriveOptions::default());
                world.run(async {
                    // Before any repair too; a journal is replayed before anything is read.
                    if !Header::read(&*drive).await.unwrap().needs_replay() {
                        assert!(snapshot_of(&setup, &drive).await == before, "{what}: the snapshot changed");
                    }
                    let disk = setup.open(&drive).await.unwrap_or_else(|e| panic!("{what}: {}", e.chain()));
                    if let Err(violation) = expectation.check_disk(&*disk).await {
                        panic!("{what}: {violation}");
                    }
                    let mut random = Random::from_seed(seed);
                    for _ in 0..10 {
                        random_request(&*disk, &mut random).await.unwrap();
                    }
                    disk.close().await.unwrap();
                    assert!(
                        snapshot_of(&setup, &drive).await == before,
                        "{what}: the snapshot changed later"
                    );
                    let image: SharedStorage = drive.clone();
                    let (report, lines) = look(&image).await.unwrap();
                    assert!(report.is_clean(), "{what}: {lines:?}");
                });
                states += 1;
            }
        }
    }
    assert!(states >= 960, "{states}");
}
