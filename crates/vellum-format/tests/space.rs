//! When space runs out: the space that is left is found, the lack is reported, and nothing else suffers.

mod common;
#[path = "space/host.rs"]
mod host;

use std::sync::Arc;
use std::time::Duration;

use common::{QcowSetup, busy_drive, look};
use host::FullHost;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, GuestSpan, ImageOffset, Limits, SharedStorage, WriteFlags,
    ZeroFlags, Zeroes,
};
use vellum_format::image::FileGrowth;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2};
use vellum_sim::{Content, Delay, Drive, DriveOptions, Fault, FaultPlan, Operation, Repeat, World};

const CLUSTER: u64 = 512;
/// A table of 64 entries maps 32 KiB.
const REACH: u64 = 64 * CLUSTER;

fn setup(size: u64) -> QcowSetup {
    let options = CreateOptions { size, cluster_size: CLUSTER, ..CreateOptions::without_journal() };
    QcowSetup { name: "512 byte clusters over a base", options, has_base: true }
}

/// An image on a device that has room for its metadata and a few clusters.
async fn on_a_small_device(world: &World, setup: &QcowSetup, clusters: u64) -> (Arc<Drive>, Arc<Qcow2>) {
    let content = setup.empty_image();
    let mut bytes = content.to_vec();
    bytes.resize(bytes.len() + usize::try_from(clusters * CLUSTER).unwrap(), 0);
    let limits = Limits { fixed_len: true, grows_zeroed: false, ..Limits::plain() };
    let delay = Delay::between(Duration::from_micros(20)..=Duration::from_micros(300));
    let options = DriveOptions { limits, delay, ..DriveOptions::default() };
    let drive = Drive::from_content(world, Content::of(&bytes), options);
    let disk = setup.open(&drive).await.unwrap();
    (drive, disk)
}

/// Writes clusters in the first table until there is no space. Returns how many there was space for.
async fn fill(disk: &Qcow2) -> u64 {
    for index in 0..64 {
        let data = Buffer::copy_of(&[7; 512]);
        match disk.write(GuestOffset::new(index * CLUSTER), data, WriteFlags::default()).await {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain());
                return index;
            }
        }
    }
    panic!("the device is too large for the test");
}

async fn close_and_look(drive: &Arc<Drive>, disk: &Qcow2) {
    disk.close().await.unwrap();
    let image: SharedStorage = drive.clone();
    let (report, lines) = look(&image).await.unwrap();
    assert!(report.is_clean(), "{lines:?}");
}

/// A request that is not a write needs space too: for a table, or for the rest of a cluster. What was freed a
/// moment ago serves.
#[test]
fn zeros_and_discards_find_the_space_that_was_just_freed() {
    let setup = setup(4 * REACH);
    for request in 0..3 {
        let world = World::new(request);
        world.run(async {
            let (drive, disk) = on_a_small_device(&world, &setup, 20).await;
            let filled = fill(&disk).await;
            assert!(filled > 8, "{filled}");
            disk.flush().await.unwrap();
            disk.discard(GuestOffset::ZERO.span(8 * CLUSTER), WriteFlags::default()).await.unwrap();
            let elsewhere = GuestOffset::new(2 * REACH);
            let zeroes = |span: GuestSpan| disk.write_zeroes(span, ZeroFlags::default());
            let result = match request {
                0 => zeroes(elsewhere.span(4 * CLUSTER)).await,
                1 => zeroes(elsewhere.span(100)).await,
                _ => disk.discard(elsewhere.span(4 * CLUSTER), WriteFlags::default()).await,
            };
            result.unwrap_or_else(|error| panic!("request {request}: {}", error.chain()));
            let read = disk.read(elsewhere, Buffer::for_overwrite(100)).await.unwrap().to_vec();
            assert!(read.iter().all(|byte| *byte == 0), "request {request}");
            close_and_look(&drive, &disk).await;
        });
    }
}

/// Freed space cannot be used while a request may still be reading it. A write that needs it waits for that
/// reader.
#[test]
fn a_write_waits_for_the_reader_of_what_was_freed() {
    let setup = setup(4 * REACH);
    let world = World::new(1);
    world.run(async {
        let (drive, disk) = on_a_small_device(&world, &setup, 20).await;
        let filled = fill(&disk).await;
        let hold = drive.hold(Operation::Read);
        let reader = world.spawn({
            let disk = disk.clone();
            async move { disk.read(GuestOffset::ZERO, Buffer::zeroed(512)).await.unwrap().to_vec() }
        });
        hold.caught(1).await;
        disk.discard(GuestOffset::ZERO.span(4 * CLUSTER), WriteFlags::FUA).await.unwrap();
        let writer = world.spawn({
            let disk = disk.clone();
            async move {
                let at = GuestOffset::new(filled * CLUSTER);
                disk.write(at, Buffer::copy_of(&[9; 512]), WriteFlags::FUA).await
            }
        });
        world.sleep(Duration::from_secs(1)).await;
        assert!(!writer.is_finished(), "the space is still being read");
        hold.release();
        let read = reader.await;
        assert!(read.iter().all(|byte| *byte == 7 || *byte == 0), "somebody else's bytes");
        writer.await.unwrap_or_else(|error| panic!("{}", error.chain()));
        close_and_look(&drive, &disk).await;
    });
}

/// The host provides no more room. That fails the requests that need room, and only them: what was written
/// before can still be made durable, and freed space can be used.
#[test]
fn a_file_that_cannot_grow_fails_no_other_request() {
    let options = CreateOptions {
        size: 64 << 20,
        cluster_size: 512,
        refcount_bits: 64,
        ..CreateOptions::without_journal()
    };
    let setup = QcowSetup { name: "wide refcounts", options, has_base: false };
    let world = World::new(0);
    let plan = FaultPlan::none();
    let drive = busy_drive(&world, setup.empty_image(), plan.clone());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let step = 64 * 1024;
        let write = |at: u64, value: u8| {
            disk.write(GuestOffset::new(at), Buffer::copy_of(&vec![value; 64 * 1024]), WriteFlags::default())
        };
        write(0, 1).await.unwrap();
        plan.add(Fault {
            error: ErrorKind::NoSpace,
            repeat: Repeat::ForEver,
            ..Fault::nth(Operation::SetLen, 0)
        });
        let mut at = step;
        let error = loop {
            match write(at, 1).await {
                Ok(()) => at += step,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain());
        let len = drive.content().len();
        disk.flush().await.unwrap_or_else(|error| panic!("what was written before: {}", error.chain()));
        assert_eq!(drive.content().len(), len, "the file has grown all the same");
        disk.discard(GuestOffset::ZERO.span(2 * step), WriteFlags::FUA).await.unwrap();
        write(at, 2).await.unwrap_or_else(|error| panic!("into what was freed: {}", error.chain()));
        disk.flush().await.unwrap();
        plan.clear();
        close_and_look(&drive, &disk).await;
    });
}

/// The file is extended for one writer, slowly. Meanwhile others get space behind that, and a flush writes
/// the refcounts of it. Those must not be truncated when the first writer's new length is set.
#[test]
fn a_file_that_grows_cuts_off_nothing() {
    let options = CreateOptions {
        size: 64 << 20,
        cluster_size: 512,
        refcount_bits: 64,
        ..CreateOptions::without_journal()
    };
    let setup = QcowSetup { name: "wide refcounts", options, has_base: false };
    let world = World::new(0);
    let drive = busy_drive(&world, setup.empty_image(), FaultPlan::none());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let write = |index: u64| {
            let disk = disk.clone();
            let at = GuestOffset::new(index * 64 * 1024);
            world.spawn(async move {
                disk.write(at, Buffer::copy_of(&[3; 64 * 1024]), WriteFlags::default()).await.unwrap();
            })
        };
        // The tables are there before.
        for table in 0..400 {
            let at = GuestOffset::new(table * 32 * 1024);
            disk.write(at, Buffer::copy_of(&[3; 512]), WriteFlags::default()).await.unwrap();
        }
        let hold = drive.hold(Operation::SetLen);
        let writers: Vec<_> = (0..200).map(write).collect();
        hold.caught(1).await;
        world.sleep(Duration::from_millis(50)).await;
        disk.flush().await.unwrap();
        hold.release();
        for writer in writers {
            writer.await;
        }
        // Its pages of refcounts are read again.
        close_and_look(&drive, &disk).await;
    });
}

/// An image that finds space as it grows asks for it once for each step, also where the host has none to set aside; what is left over is
/// cut off at the close.
#[test]
fn a_file_grows_by_space_that_is_there_or_by_a_hole() {
    const STEP: u64 = 4 << 20;
    const ALLOCATED: FileGrowth = FileGrowth::Allocated { hole_bytes: 32 << 20, space_bytes: STEP };
    let options = CreateOptions { size: 64 << 20, ..CreateOptions::without_journal() };
    let setup = QcowSetup { name: "64 KiB clusters", options, has_base: false };
    for (growth, refused, asks) in [
        (FileGrowth::Hole(STEP), None, 0),
        (ALLOCATED, None, 3),
        (ALLOCATED, Some(ErrorKind::NoSpace), 3),
        (ALLOCATED, Some(ErrorKind::Unsupported), 3),
    ] {
        let world = World::new(0);
        let plan = FaultPlan::none();
        let drive = busy_drive(&world, setup.empty_image(), plan.clone());
        world.run(async {
            let header = Header::read(&*drive).await.unwrap();
            let files = Files { image: drive.clone(), data_file: None, below: None };
            let disk =
                Qcow2::open(header, files, OpenOptions { growth, ..OpenOptions::default() }).await.unwrap();
            if let Some(error) = refused {
                plan.add(Fault { error, repeat: Repeat::ForEver, ..Fault::nth(Operation::Preallocate, 0) });
            }
            let before = drive.content().len();
            let data = vec![5; 1 << 20];
            for index in 0..10 {
                let at = GuestOffset::new(index << 20);
                disk.write(at, Buffer::copy_of(&data), WriteFlags::default()).await.unwrap();
            }
            assert_eq!(plan.seen(Operation::Preallocate), asks, "{growth:?}, {refused:?}");
            assert_eq!(plan.hits(), if refused.is_some() { asks } else { 0 });
            let read = disk.read(GuestOffset::new(9 << 20), Buffer::for_overwrite(1 << 20)).await.unwrap();
            assert_eq!(read.to_vec(), data);
            close_and_look(&drive, &disk).await;
            let grown = drive.content().len() - before;
            assert!(grown < 11 << 20, "{grown} bytes are left, {growth:?}");
        });
    }
}

/// A close that failed is not made good by asking again.
#[test]
fn a_close_that_failed_never_becomes_a_success() {
    let setup = setup(REACH);
    let world = World::new(0);
    let plan = FaultPlan::none();
    let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
    let drive = Drive::from_content(&world, setup.empty_image(), options);
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&[7; 512]), WriteFlags::default()).await.unwrap();
        let l1 = ImageOffset::new(u64::from_be_bytes(drive.content().to_vec()[40..48].try_into().unwrap()));
        plan.add(Fault { within: Some(l1.span(512)), ..Fault::nth(Operation::Write, 0) });
        disk.close().await.unwrap_err();
        let again = disk.close().await;
        let image: SharedStorage = drive.clone();
        let written = setup.open(&drive).await.unwrap();
        let read = written.read(GuestOffset::ZERO, Buffer::zeroed(512)).await.unwrap().to_vec();
        assert!(again.is_err() || read.iter().all(|byte| *byte == 7), "lost, and closed well");
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.corruptions == 0, "{lines:?}");
    });
}

/// With a journal refcounts are checkpointed some time after what they are for was flushed. There is space
/// for them by then: whatever was accepted before the host was full is flushed and closed without an error.
#[test]
fn space_for_refcounts_is_there_before_a_change_is_accepted() {
    futures_lite::future::block_on(async {
        // A page has the refcounts of 512 clusters, a block two pages. The first block is there from the
        // beginning, whole; of the second only the first page is written when it comes, at cluster 1024. From
        // cluster 1536 on the other is needed.
        let options = CreateOptions {
            size: 64 << 20,
            cluster_size: 8192,
            refcount_bits: 64,
            journal: Some(64 << 10),
            ..CreateOptions::without_journal()
        };
        let host = FullHost::new();
        let image: SharedStorage = host.clone();
        vellum_format::qcow2::create(&*image, None, &options).await.unwrap();
        let open = async || {
            let header = Header::read(&*image).await.unwrap();
            let files = Files { image: image.clone(), data_file: None, below: None };
            Qcow2::open(header, files, OpenOptions::default()).await.unwrap()
        };
        let disk = open().await;
        let write = async |cluster: u64| {
            let at = GuestOffset::new(cluster << 13);
            disk.write(at, Buffer::copy_of(&[7; 4096]), WriteFlags::default()).await
        };
        for cluster in 0..1500 {
            write(cluster).await.unwrap();
        }
        disk.flush().await.unwrap();
        host.leave(50);
        let mut cluster = 1500;
        let error = loop {
            match write(cluster).await {
                Ok(()) => cluster += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain());
        assert!((1540..=1550).contains(&cluster), "into the second page: {cluster}");
        disk.flush().await.unwrap();
        disk.close().await.unwrap_or_else(|error| panic!("{}", error.chain()));
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
        let disk = open().await;
        for cluster in 0..cluster {
            let bytes = disk.read(GuestOffset::new(cluster << 13), Buffer::zeroed(4096)).await.unwrap();
            assert!(bytes.to_vec().iter().all(|byte| *byte == 7), "cluster {cluster}");
        }
    });
}

/// There is no space for a journal when an image is opened. Overwriting existing data needs none, and a
/// discard frees some.
#[test]
fn an_image_with_a_journal_is_written_on_a_host_that_is_full() {
    futures_lite::future::block_on(async {
        const CLUSTER: u64 = 64 << 10;
        let options = CreateOptions { size: 16 << 20, journal: Some(1 << 20), ..CreateOptions::default() };
        let host = FullHost::new();
        let image: SharedStorage = host.clone();
        vellum_format::qcow2::create(&*image, None, &options).await.unwrap();
        let open = async || {
            let header = Header::read(&*image).await.unwrap();
            let files = Files { image: image.clone(), data_file: None, below: None };
            Qcow2::open(header, files, OpenOptions::default()).await.unwrap()
        };
        let write = async |disk: &Qcow2, cluster: u64, value: u8| {
            let at = GuestOffset::new(cluster * CLUSTER);
            disk.write(at, Buffer::copy_of(&vec![value; 64 << 10]), WriteFlags::FUA).await
        };
        let read = async |disk: &Qcow2, cluster: u64| {
            let bytes =
                disk.read(GuestOffset::new(cluster * CLUSTER), Buffer::zeroed(64 << 10)).await.unwrap();
            let bytes = bytes.to_vec();
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "cluster {cluster}");
            bytes[0]
        };
        let disk = open().await;
        for cluster in 0..32 {
            write(&disk, cluster, 1).await.unwrap();
        }
        disk.close().await.unwrap();
        // A part of the journal fits.
        host.leave(17);
        let disk = open().await;
        write(&disk, 3, 2).await.unwrap_or_else(|error| panic!("what is there: {}", error.chain()));
        assert!(!Header::read(&*image).await.unwrap().needs_replay(), "no journal");
        host.leave(0);
        let error = write(&disk, 40, 3).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain());
        let trim = GuestOffset::new(8 * CLUSTER).span(8 * CLUSTER);
        disk.discard(trim, WriteFlags::FUA).await.unwrap_or_else(|error| panic!("a trim: {}", error.chain()));
        while disk.tend(Duration::ZERO).await {}
        write(&disk, 50, 4).await.unwrap_or_else(|error| panic!("what was freed: {}", error.chain()));
        let found = (read(&disk, 3).await, read(&disk, 7).await, read(&disk, 9).await, read(&disk, 50).await);
        assert_eq!(found, (2, 1, 0, 4));
        disk.close().await.unwrap();
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
        // With space it is written with its journal again.
        host.leave(1000);
        let disk = open().await;
        write(&disk, 51, 5).await.unwrap();
        assert!(Header::read(&*image).await.unwrap().needs_replay(), "a journal");
        disk.close().await.unwrap();
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}

/// A native image that was copied with holes in its ring, on a full host. The mark needs no space: what is there is
/// overwritten, and a crash after that is seen. What needs a record is refused, and the disk lives on.
#[test]
fn a_native_image_whose_ring_has_holes_is_overwritten_on_a_host_that_is_full() {
    use vellum_format::native::{self, Native, Region, Superblocks};
    futures_lite::future::block_on(async {
        const UNIT: u64 = 64 << 10;
        let options = native::CreateOptions {
            size: 16 << 20,
            has_table: true,
            unit_size: Some(UNIT),
            ..native::CreateOptions::default()
        };
        let host = FullHost::new();
        let image: SharedStorage = host.clone();
        native::create(&*image, &options).await.unwrap();
        let open = async || Native::open(image.clone(), None, native::OpenOptions::default()).await.unwrap();
        let write = async |disk: &Native, unit: u64, value: u8| {
            let at = GuestOffset::new(unit * UNIT);
            disk.write(at, Buffer::copy_of(&vec![value; 64 << 10]), WriteFlags::FUA).await
        };
        let superblock = async || Superblocks::read(&*image).await.unwrap().superblock;
        let disk = open().await;
        write(&disk, 3, 1).await.unwrap();
        disk.close().await.unwrap();
        let ring = superblock().await.places().region(Region::Journal);
        image.write_zeroes(ring, Zeroes::MayUnmap).await.unwrap();
        host.leave(0);
        let disk = open().await;
        write(&disk, 3, 2).await.unwrap_or_else(|error| panic!("what is there: {}", error.chain()));
        assert!(superblock().await.needs_replay(), "it says that it is in use");
        let error = write(&disk, 40, 3).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.chain());
        write(&disk, 3, 4).await.unwrap_or_else(|error| panic!("once more: {}", error.chain()));
        host.leave(10_000);
        write(&disk, 40, 5).await.unwrap_or_else(|error| panic!("with space: {}", error.chain()));
        disk.close().await.unwrap();
        assert!(!superblock().await.needs_replay(), "it is closed");
        let disk = open().await;
        for (unit, value) in [(3, 4), (40, 5)] {
            let bytes = disk.read(GuestOffset::new(unit * UNIT), Buffer::zeroed(64 << 10)).await.unwrap();
            assert_eq!(bytes.to_vec(), vec![value; 64 << 10], "unit {unit}");
        }
        disk.close().await.unwrap();
        let (report, lines) = common::native::look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}
