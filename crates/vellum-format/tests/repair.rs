//! Repairs that must not make things worse: of images that cannot be seen whole, and of images whose parts lie upon each
//! other. What a repair may do without seeing everything is raise a refcount and clear a flag; the rest would give away
//! what only the hidden part still uses.

mod common;

use common::{Setup, look};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, ImageOffset, MemoryStorage, SharedStorage, WriteFlags,
};
use vellum_format::qcow2::check::{Repair, check};
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_sim::{Content, Drive, DriveOptions, Fault, FaultPlan, Operation, Repeat, World};

const CLUSTER: u64 = 4096;

fn setup() -> Setup {
    let options = CreateOptions { size: 1 << 20, cluster_size: CLUSTER, ..CreateOptions::default() };
    Setup { name: "4 KiB clusters", options, has_base: false }
}

/// An image with data in its first 16 clusters.
fn image() -> Content {
    let (setup, world) = (setup(), World::new(0));
    let drive = Drive::new(&world, DriveOptions::default());
    world.run(async {
        create(&*drive, None, &setup.options).await.unwrap();
        let disk = setup.open(&drive).await.unwrap();
        let data = Buffer::copy_of(&[7; 16 * 4096]);
        disk.write(GuestOffset::ZERO, data, WriteFlags::default()).await.unwrap();
        disk.close().await.unwrap();
    });
    drive.content()
}

fn word(image: &[u8], at: u64) -> u64 {
    let at = usize::try_from(at).unwrap();
    u64::from_be_bytes(image[at..at + 8].try_into().unwrap())
}

/// Where the first L2 table lies.
fn table(image: &[u8]) -> u64 {
    word(image, word(image, 40)) & 0x00FF_FFFF_FFFF_FE00
}

/// A table cannot be read for a moment while leaks are repaired. What it maps is in use all the same, and must not be
/// handed out to whoever writes next.
#[test]
fn what_an_unreadable_table_maps_is_no_leak() {
    for repair in [Repair::Leaks, Repair::All] {
        let world = World::new(0);
        let content = image();
        let table = ImageOffset::new(table(&content.to_vec())).span(CLUSTER);
        let plan = FaultPlan::none();
        let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
        let drive = Drive::from_content(&world, content, options);
        world.run(async {
            let image: SharedStorage = drive.clone();
            let header = Header::read(&*image).await.unwrap();
            plan.add(Fault {
                within: Some(table),
                repeat: Repeat::ForEver,
                ..Fault::nth(Operation::Read, 0)
            });
            let report = check(&header, &image, repair, &mut |_| {}).await.unwrap();
            assert!(report.check_errors > 0, "{repair:?}: {report:?}");
            plan.clear();
            let (report, lines) = look(&image).await.unwrap();
            assert!(report.is_clean(), "{repair:?}: {lines:?}");
            let disk = setup().open(&drive).await.unwrap();
            let other = GuestOffset::new(64 * CLUSTER);
            disk.write(other, Buffer::copy_of(&[8; 8 * 4096]), WriteFlags::FUA).await.unwrap();
            let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(16 * 4096)).await.unwrap().to_vec();
            assert!(read.iter().all(|byte| *byte == 7), "{repair:?}: somebody else's bytes");
            disk.close().await.unwrap();
        });
    }
}

/// An entry of the L1 table is damaged. What hangs from it is hidden, not free.
#[test]
fn what_a_damaged_entry_hides_is_no_leak() {
    for repair in [Repair::Leaks, Repair::All] {
        let mut bytes = image().to_vec();
        let (l1, good) = (usize::try_from(word(&bytes, 40)).unwrap(), word(&bytes, word(&bytes, 40)));
        bytes[l1..l1 + 8].copy_from_slice(&(good ^ 0x200).to_be_bytes());
        let storage = MemoryStorage::holding("image", &bytes);
        let image: SharedStorage = storage.clone();
        block_on(async {
            let header = Header::read(&*image).await.unwrap();
            let report = check(&header, &image, repair, &mut |_| {}).await.unwrap();
            assert!(report.corruptions > 0, "{report:?}");
            image.write(ImageOffset::new(l1 as u64), Buffer::copy_of(&good.to_be_bytes())).await.unwrap();
            let (report, lines) = look(&image).await.unwrap();
            assert!(report.is_clean(), "{repair:?}: {lines:?}");
        });
    }
}

/// The refcount table names a cluster of guest data as its block. Lowering "refcounts" there would change what the guest
/// wrote.
#[test]
fn a_repair_of_leaks_writes_no_block_that_somebody_else_uses() {
    let mut bytes = image().to_vec();
    let data = word(&bytes, table(&bytes)) & 0x00FF_FFFF_FFFF_FE00;
    let refcount_table = usize::try_from(word(&bytes, 48)).unwrap();
    bytes[refcount_table..refcount_table + 8].copy_from_slice(&data.to_be_bytes());
    for repair in [Repair::Leaks, Repair::All] {
        let storage = MemoryStorage::holding("image", &bytes);
        let image: SharedStorage = storage.clone();
        block_on(async {
            let header = Header::read(&*image).await.unwrap();
            let _ = check(&header, &image, repair, &mut |_| {}).await;
            let read = image.read(ImageOffset::new(data), Buffer::zeroed(4096)).await.unwrap().to_vec();
            assert!(read.iter().all(|byte| *byte == 7), "{repair:?} changed the guest's bytes");
        });
    }
}

/// Without its refcounts and with a part of the mapping hidden, an image cannot be given new refcounts: those would say
/// that the hidden part is free.
#[test]
fn refcounts_are_not_rebuilt_for_half_an_image() {
    let mut bytes = image().to_vec();
    let (l1, good) = (usize::try_from(word(&bytes, 40)).unwrap(), word(&bytes, word(&bytes, 40)));
    bytes[l1..l1 + 8].copy_from_slice(&(good ^ 0x200).to_be_bytes());
    let refcount_table = usize::try_from(word(&bytes, 48)).unwrap();
    bytes[refcount_table..refcount_table + 8].fill(0);
    let storage = MemoryStorage::holding("image", &bytes);
    let image: SharedStorage = storage.clone();
    let header = block_on(Header::read(&*image)).unwrap();
    let error = block_on(check(&header, &image, Repair::All, &mut |_| {})).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
    assert!(storage.content().to_vec() == bytes, "nothing was written");
}

/// An entry names a table as guest data, or another table as its own. A repair gives the cluster a refcount of two, and
/// then every count is right. It is a corruption all the same: what the guest writes there would change the mapping.
#[test]
fn a_table_that_is_also_data_stays_a_corruption() {
    let good = image().to_vec();
    let (l1, l2) = (word(&good, 40), table(&good));
    let cases = [
        ("L2 entry 1, the L1 table", l2 + 8, l1),
        ("L2 entry 1, its own table", l2 + 8, l2),
        ("L1 entry 0, the L1 table", l1, l1),
    ];
    for (what, at, target) in cases {
        let mut bytes = good.clone();
        let at = usize::try_from(at).unwrap();
        bytes[at..at + 8].copy_from_slice(&target.to_be_bytes());
        let image: SharedStorage = MemoryStorage::holding("image", &bytes);
        block_on(async {
            let header = Header::read(&*image).await.unwrap();
            let _ = check(&header, &image, Repair::All, &mut |_| {}).await;
            let (report, lines) = look(&image).await.unwrap();
            let is_told = lines.iter().any(|line| line.contains("overlaps metadata"));
            assert!(report.corruptions > 0, "{what}: {report:?}");
            assert!(is_told, "{what}: {lines:?}");
        });
    }
}

/// Version 2 has no dirty bit. After a kill the clusters that were being freed are lost, until somebody repairs the image;
/// more than that must not be wrong with it.
#[test]
fn a_killed_image_of_version_2_has_lost_space_and_nothing_else() {
    let options =
        CreateOptions { version: 2, cluster_size: CLUSTER, size: 1 << 20, ..CreateOptions::default() };
    let setup = Setup { name: "version 2", options, has_base: false };
    let world = World::new(0);
    let drive = Drive::new(&world, DriveOptions::default());
    world.run(async {
        create(&*drive, None, &setup.options).await.unwrap();
        let disk = setup.open(&drive).await.unwrap();
        let data = Buffer::copy_of(&[7; 4 * 4096]);
        disk.write(GuestOffset::ZERO, data, WriteFlags::FUA).await.unwrap();
        disk.discard(GuestOffset::ZERO.span(CLUSTER), WriteFlags::FUA).await.unwrap();
        drop(disk); // killed
        let image: SharedStorage = drive.clone();
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.leaks > 0 && report.corruptions == 0 && report.check_errors == 0, "{lines:?}");
        let header = Header::read(&*image).await.unwrap();
        let report = check(&header, &image, Repair::All, &mut |_| {}).await.unwrap();
        assert!(report.is_clean(), "{report:?}");
        let disk = setup.open(&drive).await.unwrap();
        let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(4 * 4096)).await.unwrap().to_vec();
        assert!(read[..4096].iter().all(|byte| *byte == 0) && read[4096..].iter().all(|byte| *byte == 7));
        disk.close().await.unwrap();
    });
}

/// With a data file the guest's offset is the place. An entry that names another one gives two guest clusters the same
/// bytes: a corruption, and neither is read nor written through it.
#[test]
fn a_cluster_at_the_wrong_place_of_a_data_file_is_a_corruption() {
    let data_file = Some("data".to_owned());
    let options =
        CreateOptions { size: 1 << 20, cluster_size: CLUSTER, data_file, ..CreateOptions::default() };
    let (image, data): (SharedStorage, SharedStorage) =
        (MemoryStorage::new("image"), MemoryStorage::new("data"));
    let open = async || {
        let header = Header::read(&*image).await.unwrap();
        let files = Files { image: image.clone(), data_file: Some(data.clone()), below: None };
        Qcow2::open(header, files, OpenOptions::default()).await.unwrap()
    };
    let word = async |at: u64| {
        let read = image.read(ImageOffset::new(at), Buffer::zeroed(8)).await.unwrap();
        u64::from_be_bytes(read.slice().try_into().unwrap())
    };
    block_on(async {
        create(&*image, Some(&data), &options).await.unwrap();
        let disk = open().await;
        let bytes = Buffer::copy_of(&[7; 4 * 4096]);
        disk.write(GuestOffset::ZERO, bytes, WriteFlags::FUA).await.unwrap();
        disk.close().await.unwrap();
        assert!(look(&image).await.unwrap().0.is_clean());
        let table = word(word(40).await).await & 0x00FF_FFFF_FFFF_FE00;
        let entry = Buffer::copy_of(&(1 << 63 | (3 * CLUSTER)).to_be_bytes());
        image.write(ImageOffset::new(table + 2 * 8), entry).await.unwrap();
        let (report, lines) = look(&image).await.unwrap();
        assert_eq!(report.corruptions, 1, "{lines:?}");
        let disk = open().await;
        let wrong = GuestOffset::new(2 * CLUSTER);
        let read = disk.read(wrong, Buffer::zeroed(4096)).await.unwrap_err();
        let write = disk.write(wrong, Buffer::zeroed(4096), WriteFlags::default()).await.unwrap_err();
        assert_eq!((read.kind(), write.kind()), (ErrorKind::Corrupt, ErrorKind::Corrupt));
        let right = disk.read(GuestOffset::new(3 * CLUSTER), Buffer::zeroed(4096)).await.unwrap();
        assert!(right.to_vec() == [7; 4096]);
    });
}
