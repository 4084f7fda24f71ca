//! Another name for a snapshot: whole and durable, whatever crashes, and never that of another.

use futures_lite::future::block_on;
use vellum_core::{Buffer, Disk, ErrorKind, GuestOffset, MemoryStorage, Random, SharedStorage, WriteFlags};
use vellum_format::native::snapshots::snapshots;
use vellum_format::native::{Native, create};
use vellum_sim::{CrashKind, Drive, DriveOptions, World};

use super::common::native::{NativeSetup, look_native};
use super::common::scale;
use super::trials::options;

/// Longer than a sector's part of an entry, so that a torn one would be noticed.
const LONG: &str = "a name as long as any, 64 bytes: 0123456789 0123456789 012345678";

fn setup() -> NativeSetup {
    NativeSetup::table("table", 1 << 20, 64 << 10)
}

async fn write(disk: &Native, at: u64, value: u8) {
    let data = Buffer::copy_of(&[value; 4096]);
    disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
}

#[test]
fn a_crash_leaves_the_old_name_or_the_new_one() {
    assert_eq!(LONG.len(), 64);
    let mut met = [0, 0];
    for seed in 0..8 * scale() {
        let setup = setup();
        let world = World::new(seed);
        let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
        let (made, renamed) = world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            write(&disk, 0, 1).await;
            disk.snapshot_create("s", 0).await.unwrap();
            let made = world.position();
            write(&disk, 0, 2).await;
            let snapshot = disk.snapshot_rename("s", LONG).await.unwrap();
            assert_eq!((snapshot.id, &snapshot.name[..]), (1, LONG));
            let renamed = world.position();
            write(&disk, 65_536, 3).await;
            (made, renamed)
        });
        let log = drive.log();
        let mut random = Random::from_seed(seed);
        for position in log.crash_positions().into_iter().filter(|position| *position >= made) {
            for kind in [CrashKind::PowerCut, CrashKind::ProcessKill] {
                let image = log.crash(kind, position).random_image(&mut random);
                let what = format!("seed {seed}, {kind:?} at {position}");
                let world = World::new(0);
                let drive = Drive::from_content(&world, image, DriveOptions::default());
                world.run(async {
                    let disk =
                        setup.open(&drive).await.unwrap_or_else(|error| panic!("{what}: {}", error.chain()));
                    let all = disk.snapshots().unwrap();
                    let is_new = match &all[..] {
                        [one] if one.name == LONG => true,
                        [one] if one.name == "s" => false,
                        other => panic!("{what}: {other:?}"),
                    };
                    assert!(is_new || position < renamed, "{what}: the name is lost");
                    met[usize::from(is_new)] += 1;
                    disk.close().await.unwrap();
                    let image: SharedStorage = drive.clone();
                    let (report, lines) = look_native(&image).await.unwrap();
                    assert!(report.is_clean(), "{what}: {lines:?}");
                });
            }
        }
    }
    assert!(met[0] > 0 && met[1] > 0, "both were met: {met:?}");
}

#[test]
fn names_that_cannot_be_given_are_refused() {
    let image: SharedStorage = MemoryStorage::new("image");
    block_on(async {
        create(&*image, &setup().create_options()).await.unwrap();
        let disk = Native::open(image.clone(), None, options()).await.unwrap();
        for name in ["s", "t", "held"] {
            write(&disk, 0, 1).await;
            disk.snapshot_create(name, 0).await.unwrap();
        }
        disk.snapshot_mark_cloned("held").await.unwrap();
        let long = "x".repeat(65);
        for (wanted, name, kind) in [
            ("none", "u", ErrorKind::NotFound),
            ("s", "t", ErrorKind::Invalid),
            ("s", "", ErrorKind::Invalid),
            ("s", "a\nb", ErrorKind::Invalid),
            ("s", &long, ErrorKind::Invalid),
            ("held", "u", ErrorKind::Refused),
        ] {
            let error = disk.snapshot_rename(wanted, name).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{wanted} {name:?}: {}", error.chain());
        }
        disk.snapshot_rename("1", "first").await.unwrap();
        disk.snapshot_rename("first", "first").await.unwrap();
        // What another has given up can be had.
        disk.snapshot_rename("t", "s").await.unwrap();
        disk.close().await.unwrap();
        let closed = disk.snapshot_rename("s", "v").await.unwrap_err();
        assert_eq!(closed.kind(), ErrorKind::Closed);
        let names: Vec<String> = snapshots(&image).await.unwrap().into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["first", "s", "held"]);
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}
