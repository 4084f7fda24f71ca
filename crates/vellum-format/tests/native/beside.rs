//! Snapshots of an image that is open: read while the disk is written, deleted in steps, refused with the
//! reason.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_lite::future::{block_on, poll_once, zip};
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, LocalFuture, MemoryStorage, Random, SharedStorage, WriteFlags,
    join_all,
};
use vellum_format::native::snapshots::snapshots;
use vellum_format::native::{Native, create};
use vellum_sim::{Drive, DriveOptions, Fault, FaultPlan, Operation, World};

use super::common::native::{NativeSetup, look_native};
use super::common::{busy_drive, scale};
use super::snapshots::{Shifted, request};
use super::trials::{SECOND_PAGE, content, lost_beside_a_deletion, model_of, of_two_pages, options, setups};

/// Snapshots that are open beside the disk: what each sees stays, whatever is written, made and deleted
/// meanwhile.
#[test]
fn an_open_snapshot_sees_what_it_saw() {
    for setup in setups() {
        for seed in 0..12 * scale() {
            block_on(one_open(&setup, seed));
        }
    }
}

async fn one_open(setup: &NativeSetup, seed: u64) {
    let what = format!("{}, seed {seed}", setup.name);
    let mut random = Random::from_seed(seed);
    let image: SharedStorage = MemoryStorage::new("image");
    create(&*image, &setup.create_options()).await.unwrap();
    let disk = Native::open(image.clone(), setup.below(), options()).await.unwrap();
    let mut model = model_of(setup);
    let mut taken = BTreeMap::<u32, Vec<u8>>::new();
    let mut read = BTreeMap::<u32, Arc<Native>>::new();
    for step in 0..100 {
        let any = (!taken.is_empty()).then(|| *taken.keys().nth(random.index(taken.len())).unwrap());
        match (random.below(12), any) {
            (0..=1, _) => {
                let id = disk.snapshot_create(&format!("s{step}"), step).await.unwrap();
                taken.insert(id, model.clone());
            }
            (2, Some(id)) => {
                let is_open = read.contains_key(&id);
                match disk.snapshot_delete(&id.to_string()).await {
                    Ok(()) => assert!(!is_open && taken.remove(&id).is_some(), "{what}, step {step}"),
                    Err(error) => assert!(is_open && error.kind() == ErrorKind::Locked, "{}", error.chain()),
                }
            }
            (3, Some(id)) => drop(read.insert(id, disk.snapshot_open(id).unwrap())),
            (4, Some(id)) => drop(read.remove(&id)),
            (5, _) => disk.flush().await.unwrap(),
            _ => request(&*disk, &mut model, &mut random).await.unwrap(),
        }
        assert_eq!(disk.has_open_snapshots(), !read.is_empty(), "{what}, step {step}");
        for (id, open) in &read {
            assert!(content(&**open).await == taken[id], "{what}, step {step}: snapshot {id} has changed");
            let write = open.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 512]), WriteFlags::default());
            assert_eq!(write.await.unwrap_err().kind(), ErrorKind::ReadOnly);
        }
    }
    for (id, should) in &taken {
        let open = disk.snapshot_open(*id).unwrap();
        assert!(content(&*open).await == *should, "{what}: snapshot {id} at the end");
    }
    assert_eq!(disk.snapshot_open(1000).err().map(|error| error.kind()), Some(ErrorKind::NotFound));
    drop(read);
    disk.close().await.unwrap();
    for id in taken.keys() {
        let error = disk.snapshot_open(*id).err().expect("others may write the image now");
        assert_eq!(error.kind(), ErrorKind::Closed, "{what}: snapshot {id}");
    }
    let (report, lines) = look_native(&image).await.unwrap();
    assert!(report.is_clean(), "{what}: {lines:?}");
}

/// Guests write while a snapshot is made, opened and read: from the first look on it stays, in memory or not.
#[test]
fn an_open_snapshot_stays_beside_guests() {
    for setup in setups() {
        for seed in 0..6 * scale() {
            one_beside(&setup, seed);
        }
    }
}

fn one_beside(setup: &NativeSetup, seed: u64) {
    let world = World::shuffled(seed);
    let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let mut random = Random::from_seed(seed);
        let mut model = model_of(setup);
        for round in 0..8 {
            let what = format!("{}, seed {seed}, round {round}", setup.name);
            let before = model.clone();
            let mut touched = vec![false; model.len()];
            let third = model.len() / 3;
            let mut forks: Vec<Random> = (0..3).map(|_| random.fork()).collect();
            let parts: Vec<_> = model.chunks_mut(third).zip(touched.chunks_mut(third)).enumerate().collect();
            let guests = parts.into_iter().zip(&mut forks).map(|((part, (bytes, touched)), random)| {
                let disk = Shifted { disk: disk.clone(), by: (part * third) as u64 };
                Box::pin(async move {
                    for _ in 0..1 + random.below(6) {
                        disk.write_some(bytes, touched, random).await;
                    }
                }) as LocalFuture<'_, ()>
            });
            let guests = join_all(guests.collect::<Vec<_>>());
            let made = async {
                let id = disk.snapshot_create(&format!("s{round}"), 1).await.unwrap();
                let open = disk.snapshot_open(id).unwrap();
                let first = content(&*open).await;
                (id, open, first)
            };
            let ((id, open, first), _) = futures_lite::future::zip(made, guests).await;
            assert!(content(&*open).await == first, "{what}: it has changed");
            drop(open);
            // Nothing of it is in memory now.
            let open = disk.snapshot_open(id).unwrap();
            assert!(content(&*open).await == first, "{what}: it has changed, read anew");
            let wrong = first
                .iter()
                .zip(&before)
                .zip(&touched)
                .position(|((is, was), touched)| is != was && !touched);
            assert!(wrong.is_none(), "{what}: it has something else at {wrong:?}");
        }
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{}, seed {seed}: {lines:?}", setup.name);
    });
}

/// Deleting that is stopped half way has happened, and the next opening ends it. Snapshots are made
/// meanwhile.
#[test]
fn deleting_is_stopped_and_goes_on_later() {
    let setup = NativeSetup::table("table", 1 << 30, 64 << 10);
    let image: SharedStorage = MemoryStorage::new("image");
    block_on(async {
        create(&*image, &setup.create_options()).await.unwrap();
        let disk = Native::open(image.clone(), None, options()).await.unwrap();
        let write = async |disk: &Native, value: u8| {
            for at in (0..1 << 30).step_by(64 << 20) {
                let data = Buffer::copy_of(&[value; 4096]);
                disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
            }
        };
        write(&disk, 1).await;
        for name in ["one", "two"] {
            disk.snapshot_create(name, 0).await.unwrap();
            write(&disk, 2).await;
        }
        {
            let mut deleting = std::pin::pin!(disk.snapshot_delete("two"));
            for _ in 0..4 {
                assert!(poll_once(&mut deleting).await.is_none(), "it has many steps");
            }
            // Its name is free at once, without a wait.
            disk.snapshot_create("two", 0).await.unwrap();
            disk.stop_deleting();
            assert_eq!(deleting.await.unwrap_err().kind(), ErrorKind::Closed);
        }
        write(&disk, 3).await;
        let names =
            |disk: &Native| disk.snapshots().unwrap().into_iter().map(|one| one.name).collect::<Vec<_>>();
        assert_eq!(names(&disk), ["one", "two"]);
        disk.close().await.unwrap();
        let disk = Native::open(image.clone(), None, options()).await.unwrap();
        assert_eq!(disk.snapshots().unwrap().last().map(|one| one.id), Some(3));
        for (id, value) in [(1, 1), (3, 2)] {
            let open = disk.snapshot_open(id).unwrap();
            let byte = open.read(GuestOffset::new(64 << 20), Buffer::zeroed(1)).await.unwrap();
            assert_eq!(byte.slice(), [value]);
        }
        disk.close().await.unwrap();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
        assert_eq!(snapshots(&image).await.unwrap().len(), 2);
    });
}

/// A snapshot is being deleted when the disk is closed, and another one is to be deleted afterwards. The
/// first stops, the second is refused: nothing is written once the image says that it was closed.
#[test]
fn nothing_is_deleted_once_the_disk_is_closed() {
    let setup = NativeSetup::table("table", 1 << 30, 64 << 10);
    for polls in [0, 1, 2, 3, 6, 12] {
        let image = MemoryStorage::new("image");
        let shared: SharedStorage = image.clone();
        block_on(async {
            create(&*image, &setup.create_options()).await.unwrap();
            let disk = Native::open(shared.clone(), None, options()).await.unwrap();
            for name in ["one", "two"] {
                for at in (0..1 << 30).step_by(64 << 20) {
                    let data = Buffer::copy_of(&[1; 4096]);
                    disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
                }
                disk.snapshot_create(name, 0).await.unwrap();
            }
            {
                let mut deleting = std::pin::pin!(disk.snapshot_delete("one"));
                for _ in 0..polls {
                    assert!(poll_once(&mut deleting).await.is_none(), "it has many steps");
                }
                let (closed, deleted) = zip(disk.close(), deleting).await;
                closed.unwrap();
                assert_eq!(deleted.unwrap_err().kind(), ErrorKind::Closed, "{polls} polls");
            }
            let left = image.content().to_vec();
            let error = disk.snapshot_delete("two").await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Closed, "{}", error.chain());
            assert!(image.content().to_vec() == left, "{polls} polls: something was written after the close");
            drop(disk);
            let disk = Native::open(shared.clone(), None, options()).await.unwrap();
            assert_eq!(disk.snapshots().unwrap().last().map(|one| one.name.clone()), Some("two".to_owned()));
            disk.close().await.unwrap();
            let (report, lines) = look_native(&shared).await.unwrap();
            assert!(report.is_clean(), "{polls} polls: {lines:?}");
        });
    }
}

/// A write in place is in flight when the snapshot is deleted, and another request writes to the same unit in
/// the middle of that: both are there afterwards, whatever step of the deletion that is.
#[test]
fn a_write_under_way_is_kept_while_snapshots_are_deleted() {
    assert_eq!(lost_beside_a_deletion(), []);
}

/// A deletion takes as many steps as the snapshot has copies, although each of their pages changes between
/// any two steps.
#[test]
fn deleting_ends_however_much_is_written_meanwhile() {
    for setup in of_two_pages() {
        for has_older in [false, true] {
            block_on(async {
                let image: SharedStorage = MemoryStorage::new("image");
                create(&*image, &setup.create_options()).await.unwrap();
                let disk = Native::open(image.clone(), setup.below(), options()).await.unwrap();
                let write = async |value: u8| {
                    for at in [0, SECOND_PAGE] {
                        // A unit that goes and comes changes the page.
                        disk.discard(GuestOffset::new(at).span(65_536), WriteFlags::default()).await.unwrap();
                        let data = Buffer::copy_of(&[value; 4096]);
                        disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
                    }
                };
                write(1).await;
                if has_older {
                    disk.snapshot_create("older", 0).await.unwrap();
                    write(2).await;
                }
                disk.snapshot_create("s", 0).await.unwrap();
                write(3).await;
                let mut deleting = Box::pin(disk.snapshot_delete("s"));
                let mut steps = 0;
                while poll_once(&mut deleting).await.map(Result::unwrap).is_none() {
                    write(4).await;
                    steps += 1;
                    assert!(steps <= 8, "{}: it has four steps, and one for each of two copies", setup.name);
                }
                drop(deleting);
                disk.close().await.unwrap();
                let (report, lines) = look_native(&image).await.unwrap();
                assert!(report.is_clean(), "{}: {lines:?}", setup.name);
            });
        }
    }
}

/// What cannot be says why; after a failed flush it is the disk's own error.
#[test]
fn a_snapshot_that_cannot_be_made_says_why() {
    let setup = NativeSetup::table("table", 1 << 20, 64 << 10);
    block_on(async {
        let image: SharedStorage = MemoryStorage::new("image");
        create(&*image, &setup.create_options()).await.unwrap();
        let disk = Native::open(image, None, options()).await.unwrap();
        disk.snapshot_create("there", 0).await.unwrap();
        for (name, word) in
            [("there", "this name already exists"), ("", "1 to 64 bytes"), (&"n".repeat(65), "1 to 64 bytes")]
        {
            let error = disk.snapshot_create(name, 0).await.unwrap_err();
            assert!(error.kind() == ErrorKind::Invalid && error.chain().contains(word), "{}", error.chain());
        }
        for number in 1..4095 {
            disk.snapshot_create(&format!("s{number}"), 0).await.unwrap();
        }
        let error = disk.snapshot_create("more", 0).await.unwrap_err();
        assert!(error.kind() == ErrorKind::NoSpace && error.chain().contains("4095"), "{}", error.chain());
        disk.close().await.unwrap();
    });
    let world = World::new(0);
    let faults = FaultPlan::of(Fault::nth(Operation::Flush, 6));
    let drive =
        Drive::from_content(&world, setup.empty_image(), DriveOptions { faults, ..DriveOptions::default() });
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let mut first = None;
        for number in 0..20 {
            if let Err(error) = disk.snapshot_create(&format!("s{number}"), 0).await {
                first.get_or_insert(error);
            }
        }
        assert_eq!(first.map(|error| error.kind()), Some(ErrorKind::Poisoned));
        let error = disk.snapshot_create("late", 0).await.unwrap_err();
        assert!(error.kind() == ErrorKind::Poisoned && error.chain().contains("flush"), "{}", error.chain());
    });
}
