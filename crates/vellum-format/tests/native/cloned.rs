//! Snapshots on which clones stand: the mark is durable when it is said to be, whatever crashes, and excludes
//! deletion.

use futures_lite::future::{block_on, poll_once, zip};
use vellum_core::{Buffer, Disk, ErrorKind, GuestOffset, MemoryStorage, Random, SharedStorage, WriteFlags};
use vellum_format::native::snapshots::snapshots;
use vellum_format::native::{Native, Superblocks, create};
use vellum_format::{SnapshotBase, SnapshotKey};
use vellum_sim::{CrashKind, Drive, DriveOptions, World};

use super::common::native::{NativeSetup, look_native};
use super::common::scale;
use super::trials::options;

async fn write(disk: &Native, at: u64, value: u8) {
    let data = Buffer::copy_of(&[value; 4096]);
    disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
}

fn setup() -> NativeSetup {
    NativeSetup::table("table", 1 << 20, 64 << 10)
}

/// Nothing else is flushed by the guest, so the mark alone makes itself durable. A crash before that leaves an
/// unmarked snapshot or a marked one, and always a sound image.
#[test]
fn a_mark_is_durable_when_it_returns() {
    for seed in 0..8 * scale() {
        let setup = setup();
        let world = World::new(seed);
        let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
        let marked = world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            write(&disk, 0, 1).await;
            disk.snapshot_create("s", 0).await.unwrap();
            write(&disk, 0, 2).await;
            let snapshot = disk.snapshot_mark_cloned("s").await.unwrap();
            assert!(snapshot.is_cloned && snapshot.name == "s");
            let marked = world.position();
            write(&disk, 65_536, 3).await;
            marked
        });
        let log = drive.log();
        let mut random = Random::from_seed(seed);
        for position in log.crash_positions() {
            for kind in [CrashKind::PowerCut, CrashKind::ProcessKill] {
                let image = log.crash(kind, position).random_image(&mut random);
                let what = format!("seed {seed}, {kind:?} at {position}");
                let world = World::new(0);
                let drive = Drive::from_content(&world, image, DriveOptions::default());
                world.run(async {
                    let disk =
                        setup.open(&drive).await.unwrap_or_else(|error| panic!("{what}: {}", error.chain()));
                    let all = disk.snapshots().unwrap();
                    let is_marked = all.iter().any(|one| one.is_cloned);
                    assert!(is_marked || position < marked, "{what}: the mark is lost");
                    if is_marked {
                        let error = disk.snapshot_delete("s").await.unwrap_err();
                        assert_eq!(error.kind(), ErrorKind::Refused, "{what}: {}", error.chain());
                    }
                    disk.close().await.unwrap();
                    let image: SharedStorage = drive.clone();
                    let (report, lines) = look_native(&image).await.unwrap();
                    assert!(report.is_clean(), "{what}: {lines:?}");
                    let has_bit = Superblocks::read(&*image).await.unwrap().superblock.has_clones();
                    assert!(has_bit || !is_marked, "{what}: an older program would delete it");
                });
            }
        }
    }
}

/// A mark and a deletion of one snapshot, step by step beside each other: one of them happens.
#[test]
fn a_mark_and_a_deletion_exclude_each_other() {
    let mut won = [0, 0];
    for polls in 0..12 {
        for is_mark_first in [false, true] {
            let image: SharedStorage = MemoryStorage::new("image");
            block_on(async {
                create(&*image, &setup().create_options()).await.unwrap();
                let disk = Native::open(image.clone(), None, options()).await.unwrap();
                for name in ["s", "t"] {
                    write(&disk, 0, 1).await;
                    disk.snapshot_create(name, 0).await.unwrap();
                }
                let (mut marking, mut deleting) =
                    (Box::pin(disk.snapshot_mark_cloned("s")), Box::pin(disk.snapshot_delete("s")));
                let (mut marked, mut deleted) = (None, None);
                for _ in 0..polls {
                    match is_mark_first {
                        true if marked.is_none() => marked = poll_once(&mut marking).await,
                        false if deleted.is_none() => deleted = poll_once(&mut deleting).await,
                        _ => {}
                    }
                }
                let (marked, deleted) = zip(
                    async {
                        match marked {
                            Some(marked) => marked,
                            None => marking.await,
                        }
                    },
                    async {
                        match deleted {
                            Some(deleted) => deleted,
                            None => deleting.await,
                        }
                    },
                )
                .await;
                let what = format!("{polls} polls, the mark first: {is_mark_first}");
                match (&marked, &deleted) {
                    (Ok(_), Err(error)) => assert_eq!(error.kind(), ErrorKind::Refused, "{what}"),
                    (Err(error), Ok(())) => assert_eq!(error.kind(), ErrorKind::NotFound, "{what}"),
                    both => panic!("{what}: {both:?}"),
                }
                won[usize::from(marked.is_ok())] += 1;
                disk.close().await.unwrap();
                let there = snapshots(&image).await.unwrap();
                let is_there = there.iter().any(|one| one.name == "s" && one.is_cloned);
                assert_eq!(is_there, marked.is_ok(), "{what}: {there:?}");
                let (report, lines) = look_native(&image).await.unwrap();
                assert!(report.is_clean(), "{what}: {lines:?}");
            });
        }
    }
    assert!(won[0] > 0 && won[1] > 0, "both orders were met: {won:?}");
}

#[test]
fn a_snapshot_that_is_read_is_not_released() {
    let image: SharedStorage = MemoryStorage::new("image");
    block_on(async {
        create(&*image, &setup().create_options()).await.unwrap();
        let disk = Native::open(image.clone(), None, options()).await.unwrap();
        let id = disk.snapshot_create("s", 0).await.unwrap();
        disk.snapshot_mark_cloned("1").await.unwrap();
        let open = disk.snapshot_open(id).unwrap();
        assert_eq!(disk.snapshot_release("s").await.unwrap_err().kind(), ErrorKind::Locked);
        drop(open);
        disk.snapshot_release("s").await.unwrap();
        disk.snapshot_release("s").await.unwrap();
        assert_eq!(disk.snapshot_mark_cloned("t").await.unwrap_err().kind(), ErrorKind::NotFound);
        disk.snapshot_delete("s").await.unwrap();
        disk.close().await.unwrap();
        let closed = disk.snapshot_mark_cloned("s").await.unwrap_err();
        assert_eq!(closed.kind(), ErrorKind::Closed);
    });
}

/// Whatever a header says is refused, or is the one spelling of what it is read as; and what is spelled is read back.
#[test]
fn any_name_of_a_snapshot_has_one_spelling() {
    let mut random = Random::from_seed(5);
    let mut read = 0;
    for _ in 0..40_000 * scale() {
        let letters = ["@", "#", "0", "7", "4294967295", "a", " ", "\u{e9}"];
        let text: String = (0..random.below(9)).map(|_| letters[random.index(letters.len())]).collect();
        if let Ok(base) = SnapshotBase::parse(&text) {
            assert_eq!(base.encode().unwrap(), text);
            assert!(
                !base.file.is_empty() && !base.snapshot.name.is_empty() && base.snapshot.id > 0,
                "{text:?}"
            );
            read += 1;
        }
        let snapshot = SnapshotKey { name: format!("n{}", text.replace('@', "")), id: 1 };
        let base = SnapshotBase { file: format!("f{text}"), snapshot };
        assert_eq!(SnapshotBase::parse(&base.encode().unwrap()).unwrap(), base, "{text:?}");
    }
    assert!(read > 100, "{read} names are sound");
}
