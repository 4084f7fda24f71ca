//! Repairs that must not make things worse: of images that cannot be read completely, and of images whose
//! parts overlap. What a repair may do without reading everything is raise a refcount and clear a flag;
//! anything else would free what only the unread part still uses.

mod common;

use std::time::Duration;

use common::{QcowSetup, look};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, ImageOffset, MemoryStorage, SharedStorage, Storage as _, WriteFlags,
};
use vellum_format::FormatKind;
use vellum_format::qcow2::check::check;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_format::report::{CheckReport, Repair};
use vellum_sim::{Content, Delay, Drive, DriveOptions, Fault, FaultPlan, Operation, Repeat, World};

const CLUSTER: u64 = 4096;

fn setup() -> QcowSetup {
    let options = CreateOptions { size: 1 << 20, cluster_size: CLUSTER, ..CreateOptions::without_journal() };
    QcowSetup { name: "4 KiB clusters", options, has_base: false }
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

/// Where the first L2 table is.
fn table(image: &[u8]) -> u64 {
    word(image, word(image, 40)) & 0x00FF_FFFF_FFFF_FE00
}

/// A table cannot be read for a moment while leaks are repaired. What it maps is in use all the same, and
/// must not be allocated to a later write.
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

/// The refcount table names a cluster of guest data as its block. Lowering "refcounts" there would change
/// what the guest wrote.
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

/// An image with data in the first clusters of what its two L2 tables map.
fn image_of_two_tables() -> Vec<u8> {
    let setup = QcowSetup {
        options: CreateOptions { size: 4 << 20, ..setup().options },
        name: "two tables",
        has_base: false,
    };
    let (world, half) = (World::new(0), GuestOffset::new(2 << 20));
    let drive = Drive::new(&world, DriveOptions::default());
    world.run(async {
        create(&*drive, None, &setup.options).await.unwrap();
        let disk = setup.open(&drive).await.unwrap();
        for (at, byte) in [(GuestOffset::ZERO, 7), (half, 8)] {
            disk.write(at, Buffer::copy_of(&[byte; 16 * 4096]), WriteFlags::default()).await.unwrap();
        }
        disk.close().await.unwrap();
    });
    drive.content().to_vec()
}

/// An entry of the L1 table refers to a cluster of guest data as its table. The guest's bytes there look like
/// entries with reserved bits and wrong flags; and what the right table maps looks unused. A repair changes
/// none of the guest's bytes and frees nothing, so that nothing is lost once the entry is correct again.
#[test]
fn no_repair_writes_guest_data_that_an_entry_calls_a_table() {
    let good = image_of_two_tables();
    let l1 = word(&good, 40);
    let place = |index: u64| word(&good, table(&good) + index * 8) & 0x00FF_FFFF_FFFF_FE00;
    let patterns: [fn(u64, u64) -> u64; 4] = [
        |_, _| 0x3F3F_3F3F_3F3F_3F3F,
        |_, _| 0x3F00_0000_0000_0001,
        |_, other| other | 1 << 63,
        |index, _| (index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15),
    ];
    for (pattern, word_at) in patterns.iter().enumerate() {
        let guest: Vec<u8> =
            (0..CLUSTER / 8).flat_map(|index| word_at(index, place(3)).to_be_bytes()).collect();
        let data = usize::try_from(place(0)).unwrap();
        let mut bytes = good.clone();
        bytes[data..data + guest.len()].copy_from_slice(&guest);
        let entry = usize::try_from(l1 + 8).unwrap();
        let right: [u8; 8] = bytes[entry..entry + 8].try_into().unwrap();
        bytes[entry..entry + 8].copy_from_slice(&(place(0) | 1 << 63).to_be_bytes());
        for repair in [Some(Repair::Leaks), Some(Repair::All), None] {
            let what = format!("pattern {pattern}, {repair:?}");
            bytes[79] = u8::from(repair.is_none());
            let storage = MemoryStorage::holding("image", &bytes);
            let image: SharedStorage = storage.clone();
            let header = block_on(Header::read(&*image)).unwrap();
            let files = Files { image: image.clone(), data_file: None, below: None };
            match repair {
                Some(repair) => {
                    let report = block_on(check(&header, &image, repair, &mut |_| {})).unwrap();
                    assert!(report.corruptions > 0, "{what}: {report:?}");
                }
                None => {
                    let opened = block_on(Qcow2::open(header, files, OpenOptions::default()));
                    let error = opened.err().expect("it is not opened");
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}");
                    assert!(error.chain().contains("overlaps metadata"), "{what}: {}", error.chain());
                    assert!(storage.content().to_vec() == bytes, "{what}: nothing was written");
                }
            }
            let now = storage.content().to_vec();
            assert!(now[data..data + guest.len()] == guest, "{what} changed the guest's bytes");
            block_on(async {
                image.write(ImageOffset::new(l1 + 8), Buffer::copy_of(&right)).await.unwrap();
                // Before the next check: what is written next must not overlap anything else.
                let header = Header::read(&*image).await.unwrap();
                let files = Files { image: image.clone(), data_file: None, below: None };
                let disk = Qcow2::open(header, files, OpenOptions::default()).await.unwrap();
                let other = GuestOffset::new(1 << 20);
                disk.write(other, Buffer::copy_of(&[9; 64 * 4096]), WriteFlags::FUA).await.unwrap();
                disk.close().await.unwrap();
                let header = Header::read(&*image).await.unwrap();
                let report = check(&header, &image, Repair::All, &mut |_| {}).await.unwrap();
                assert!(report.is_clean(), "{what}: {report:?}");
                let header = Header::read(&*image).await.unwrap();
                let files = Files { image: image.clone(), data_file: None, below: None };
                let disk = Qcow2::open(header, files, OpenOptions::default()).await.unwrap();
                let read = async |at| {
                    disk.read(GuestOffset::new(at), Buffer::zeroed(16 * 4096)).await.unwrap().to_vec()
                };
                let first = read(0).await;
                assert!(first[..4096] == guest && first[4096..].iter().all(|byte| *byte == 7), "{what}");
                assert!(read(2 << 20).await.iter().all(|byte| *byte == 8), "{what}: somebody else's bytes");
                disk.close().await.unwrap();
            });
        }
    }
}

/// Without its refcounts and with a part of the mapping hidden, an image cannot be given new refcounts: those
/// would say that the hidden part is free.
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

/// A snapshot table over the limits, which a repair would cut, in an image with something that cannot be repaired: the table stays
/// as it is. What the repair says is left is what the next check finds.
#[test]
fn a_repair_that_leaves_a_snapshot_table_tells_what_it_leaves() {
    let good: SharedStorage = MemoryStorage::holding("image", &image().to_vec());
    let snapshots = FormatKind::Qcow2.format().closed_snapshots().expect("qcow2 has snapshots");
    block_on(snapshots.create(&good, "one", Duration::ZERO, false)).unwrap();
    let len = usize::try_from(good.len()).unwrap();
    let good = block_on(good.read(ImageOffset::ZERO, Buffer::for_overwrite(len))).unwrap().to_vec();
    let table_of_snapshots = usize::try_from(word(&good, 64)).unwrap();
    for (what, breaks) in [("the table alone", false), ("an L2 entry names the L1 table, too", true)] {
        let mut bytes = good.clone();
        // 2000 bytes of extra data, and then the names.
        bytes[table_of_snapshots + 36..][..4].copy_from_slice(&2000_u32.to_be_bytes());
        if breaks {
            let (l1, l2) = (word(&bytes, 40), usize::try_from(table(&bytes)).unwrap());
            bytes[l2 + 8..][..8].copy_from_slice(&l1.to_be_bytes());
        }
        let image: SharedStorage = MemoryStorage::holding("image", &bytes);
        block_on(async {
            let header = Header::read(&*image).await.unwrap();
            let report = check(&header, &image, Repair::All, &mut |_| {}).await.unwrap();
            let (again, lines) = look(&image).await.unwrap();
            let found = |report: &CheckReport| (report.check_errors, report.corruptions, report.leaks);
            assert_eq!(found(&report), found(&again), "{what}: {lines:#?}");
            assert_eq!(report.is_clean(), !breaks, "{what}: {lines:#?}");
            assert!(report.corruptions_fixed > 0 || breaks, "{what}: {report:?}");
        });
    }
}

/// An entry names a table as guest data, or another table as its own. A repair gives the cluster a refcount
/// of two, and then every count is right. It is a corruption all the same: what the guest writes there would
/// change the mapping.
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
            let is_reported = lines.iter().any(|line| line.contains("overlaps metadata"));
            assert!(report.corruptions > 0, "{what}: {report:?}");
            assert!(is_reported, "{what}: {lines:?}");
        });
    }
}

/// Version 2 has no dirty bit. After a kill the clusters that were being freed are lost until the image is
/// repaired; nothing else may be wrong with it.
#[test]
fn a_killed_image_of_version_2_has_lost_space_and_nothing_else() {
    let options = CreateOptions {
        version: 2,
        cluster_size: CLUSTER,
        size: 1 << 20,
        ..CreateOptions::without_journal()
    };
    let setup = QcowSetup { name: "version 2", options, has_base: false };
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

/// With a data file the guest's offset is the place. An entry that names another one gives two guest clusters
/// the same bytes: a corruption, and neither is read nor written through it.
#[test]
fn a_cluster_at_the_wrong_place_of_a_data_file_is_a_corruption() {
    let data_file = Some("data".to_owned());
    let options =
        CreateOptions { size: 1 << 20, cluster_size: CLUSTER, data_file, ..CreateOptions::without_journal() };
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

/// An image of which the refcounts are out of date, and marked so.
async fn out_of_date(drive: &Drive) {
    let read =
        async |at, len| drive.read(ImageOffset::new(at), Buffer::for_overwrite(len)).await.unwrap().to_vec();
    let mut header = read(0, 104).await;
    header[79] |= 1;
    let table = read(word(&header, 48), 512).await;
    drive.write(ImageOffset::ZERO, Buffer::copy_of(&header)).await.unwrap();
    for (index, block) in
        table.chunks_exact(8).map(|entry| word(entry, 0)).enumerate().filter(|(_, at)| *at != 0)
    {
        // Some are forgotten, some are leaked, some are right.
        let wrong = [vec![0; 64], [0, 3].repeat(32), [0, 1].repeat(32)][index % 3].clone();
        drive.write(ImageOffset::new(block + 128), Buffer::copy_of(&wrong)).await.unwrap();
    }
}

#[test]
fn an_image_that_was_not_closed_is_repaired_in_one_pass_that_reads_ahead() {
    const SIZE: u64 = 4 << 20;
    let options = CreateOptions { size: SIZE, cluster_size: 512, ..CreateOptions::without_journal() };
    let setup = QcowSetup { name: "many tables", options, has_base: false };
    // Of the mapping, and of the refcounts of all that and of the data.
    let tables = SIZE / 512 / 64;
    let blocks = (SIZE / 512 + tables).div_ceil(256) + 1;
    let world = World::new(0);
    let delay = Delay::between(Duration::from_millis(1)..=Duration::from_millis(1));
    let drive =
        Drive::from_content(&world, setup.empty_image(), DriveOptions { delay, ..DriveOptions::default() });
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        for at in (0..SIZE).step_by(1 << 18) {
            disk.write(GuestOffset::new(at), Buffer::copy_of(&[7; 1 << 18]), WriteFlags::default())
                .await
                .unwrap();
        }
        disk.close().await.unwrap();
        out_of_date(&drive).await;
        let (mark, begun) = (drive.counts(), world.clock().now());
        let disk = setup.open(&drive).await.unwrap();
        let (counts, took) = (drive.counts_since(mark), world.clock().now() - begun);
        assert!(counts.reads <= tables + 2 * blocks + 24, "{counts:?}, {tables} tables, {blocks} blocks");
        assert!(counts.bytes_read <= (tables + 2 * blocks + 64) * 512, "{counts:?}");
        assert!(counts.writes <= blocks + 2 && counts.flushes <= 6, "{counts:?}");
        // A read takes a millisecond of the drive's time, and eight are in flight.
        assert!(took.as_millis() < u128::from(tables / 8 + blocks / 8 + 2 * blocks + 40), "{took:?}");
        let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(1 << 20)).await.unwrap().to_vec();
        assert!(read.iter().all(|byte| *byte == 7));
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}
