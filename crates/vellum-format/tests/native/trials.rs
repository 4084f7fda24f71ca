//! Trials on images of the native format, for the tests of the format and for those that seed a mistake.

#![allow(dead_code, reason = "each test file uses its part")]

use futures_lite::future::{block_on, poll_once};
use vellum_core::{Buffer, Disk, ErrorKind, GuestOffset, MemoryStorage, Random, SharedStorage, WriteFlags};
use vellum_format::native::{Native, OpenOptions, create};
use vellum_sim::{Drive, DriveOptions, Effect, Fault, FaultPlan, Operation, Repeat, World};

use super::common::native::{NativeSetup, look_native, opening};
use super::common::{SIZE, base, busy_drive, noise};
use super::host::FullHost;
use super::late::{Fate, Late};

const UNIT: u64 = 64 << 10;

/// What the disk has where an embedded allocation failed with this effect, and the next write did not, after
/// a crash.
pub(crate) fn after_a_failed_allocation(effect: Effect) -> Vec<u8> {
    let setup = NativeSetup::zoned("zoned", 1 << 20, UNIT, 128 << 10);
    let world = World::new(0);
    let plan = FaultPlan::none();
    let drive = busy_drive(&world, setup.empty_image(), plan.clone());
    let killed = world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        disk.write(GuestOffset::new(UNIT), Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
        let fault = Fault::nth(Operation::Write, 0);
        plan.add(Fault { effect, repeat: Repeat::Once, error: ErrorKind::Io, ..fault });
        let failed = disk.write(GuestOffset::ZERO, Buffer::copy_of(&[2; 4096]), WriteFlags::default()).await;
        assert!(failed.is_err(), "{effect:?}");
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&[3; 4096]), WriteFlags::FUA).await.unwrap();
        drive.content()
    });
    let world = World::new(0);
    let drive = Drive::from_content(&world, killed, DriveOptions::default());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let found = disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await.unwrap().to_vec();
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
        found
    })
}

/// An image in a file on a host that has room for this many more pages, when units are written that a
/// snapshot sees. Returns why the disk could not be used any more.
pub(crate) async fn kept_on_a_full_host(pages: u64) -> Result<(), String> {
    let host = FullHost::new();
    let image: SharedStorage = host.clone();
    let setup = NativeSetup::table("table", 4096 * UNIT, UNIT);
    create(&*image, &setup.create_options()).await.unwrap();
    let disk = Native::open(image.clone(), None, OpenOptions::default()).await.unwrap();
    for unit in [0, 1, 1024, 2048, 3000] {
        let at = GuestOffset::new(unit * UNIT);
        disk.write(at, Buffer::copy_of(&[1; 4096]), WriteFlags::FUA).await.unwrap();
    }
    disk.snapshot_create("one", 0).await.unwrap();
    host.leave(pages);
    for unit in [0, 1, 1024, 2048, 3000] {
        let at = GuestOffset::new(unit * UNIT);
        let written = disk.write(at, Buffer::copy_of(&[2; 4096]), WriteFlags::default()).await;
        match written {
            Err(error) if error.kind() != ErrorKind::NoSpace => return Err(error.chain()),
            _ => {}
        }
    }
    // What was accepted has its space.
    disk.flush().await.map_err(|error| error.chain())?;
    disk.close().await.map_err(|error| error.chain())?;
    let disk = Native::open(image.clone(), None, OpenOptions::default()).await.unwrap();
    disk.close().await.map_err(|error| error.chain())
}

/// Two pages of the table, so that the deletion of a snapshot that has copies of both takes several steps.
pub(crate) fn of_two_pages() -> Vec<NativeSetup> {
    let k = |kib: u64| kib << 10;
    vec![
        NativeSetup::table("table", 128 << 20, k(64)),
        NativeSetup::table("table over a base", 128 << 20, k(64)).over(base(), k(16)),
        NativeSetup::zoned("zoned", 128 << 20, k(64), k(1024)),
    ]
}

/// Where the second page begins.
pub(crate) const SECOND_PAGE: u64 = 64 << 20;

/// The kinds of image, with or without an older snapshot, on which a write that is in flight is lost when a snapshot is
/// deleted, and after how many polls of that.
pub(crate) fn lost_beside_a_deletion() -> Vec<((&'static str, bool), Option<usize>)> {
    let all = of_two_pages().into_iter().flat_map(|setup| {
        [false, true].map(|has_older| {
            let lost = (0..7).find(|polls| is_lost(&setup, has_older, *polls));
            ((setup.name, has_older), lost)
        })
    });
    all.filter(|(_, polls)| polls.is_some()).collect()
}

pub(crate) fn is_lost(setup: &NativeSetup, has_older: bool, polls: usize) -> bool {
    let late = Late::over(MemoryStorage::new("image"));
    let image: SharedStorage = late.clone();
    let sector = |value: u8| Buffer::copy_of(&[value; 512]);
    let page = |value: u8| Buffer::copy_of(&[value; 4096]);
    let plain = WriteFlags::default();
    let (there, beside) = (GuestOffset::new(8192), GuestOffset::new(16_384));
    block_on(async {
        create(&*image, &setup.create_options()).await.unwrap();
        let disk = Native::open(image.clone(), setup.below(), options()).await.unwrap();
        for at in [0, SECOND_PAGE] {
            disk.write(GuestOffset::new(at), Buffer::copy_of(&[1; 65_536]), plain).await.unwrap();
        }
        if has_older {
            disk.snapshot_create("older", 0).await.unwrap();
        }
        disk.snapshot_create("s", 0).await.unwrap();
        for at in [0, SECOND_PAGE] {
            disk.write(GuestOffset::new(at), page(2), plain).await.unwrap();
        }
        late.arm_write(512);
        let mut under_way = std::pin::pin!(disk.write(there, sector(5), plain));
        assert!(poll_once(&mut under_way).await.is_none(), "its bytes are on their way");
        let mut deleting = std::pin::pin!(disk.snapshot_delete("s"));
        let mut is_deleted = false;
        for _ in 0..polls {
            if !is_deleted {
                is_deleted = poll_once(&mut deleting).await.map(Result::unwrap).is_some();
            }
        }
        {
            let mut other = std::pin::pin!(disk.write(beside, page(7), plain));
            let is_done = poll_once(&mut other).await.map(Result::unwrap).is_some();
            late.release();
            under_way.await.unwrap();
            if !is_done {
                other.await.unwrap();
            }
        }
        if !is_deleted {
            deleting.await.unwrap();
        }
        disk.flush().await.unwrap();
        let is_there = async |disk: &Native| {
            let first = disk.read(there, Buffer::zeroed(512)).await.unwrap().to_vec();
            let second = disk.read(beside, Buffer::zeroed(4096)).await.unwrap().to_vec();
            first == vec![5; 512] && second == vec![7; 4096]
        };
        let was_there = is_there(&disk).await;
        disk.close().await.unwrap();
        let disk = Native::open(image.clone(), setup.below(), options()).await.unwrap();
        let is_there = is_there(&disk).await;
        assert_eq!(was_there, is_there);
        if has_older {
            let older = disk.snapshot_open(disk.snapshots().unwrap()[0].id).unwrap();
            let first = older.read(there, Buffer::zeroed(8704)).await.unwrap().to_vec();
            assert_eq!(first, vec![1; 8704], "{}: the older one", setup.name);
        }
        disk.close().await.unwrap();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{}: {lines:?}", setup.name);
        !is_there
    })
}

pub(crate) fn setups() -> Vec<NativeSetup> {
    let k = |kib: u64| kib << 10;
    vec![
        NativeSetup::table("table", SIZE, k(64)),
        NativeSetup::table("table, large units", 3 << 20, 1 << 20),
        NativeSetup::table("table over a base", SIZE, k(64)).over(base(), k(16)),
        NativeSetup::table("", SIZE, k(64)).over(base(), k(16)).encrypted("encrypted, table over a base"),
        NativeSetup::zoned("zoned", SIZE, k(64), k(256)),
        NativeSetup::zoned("zoned over a base", SIZE, k(64), k(256)).over(base(), k(16)),
    ]
}

pub(crate) fn options() -> OpenOptions {
    OpenOptions { journal_key: Some(1), ..opening() }
}

pub(crate) fn model_of(setup: &NativeSetup) -> Vec<u8> {
    let mut bytes = setup.base.as_ref().map(|base| base.to_vec()).unwrap_or_default();
    bytes.resize(usize::try_from(setup.options.size).unwrap(), 0);
    bytes
}

pub(crate) async fn content(disk: &dyn Disk) -> Vec<u8> {
    let len = usize::try_from(disk.geometry().size).unwrap();
    disk.read(GuestOffset::ZERO, Buffer::zeroed(len)).await.unwrap().to_vec()
}

/// A unit is copied for a snapshot that is deleted meanwhile, and written to.
pub(crate) fn written_beside_a_copy(setup: &NativeSetup) -> Result<(), &'static str> {
    let world = World::new(0);
    world.run(async {
        let late = Late::over(Drive::new(&world, DriveOptions::default()));
        let image: SharedStorage = late.clone();
        create(&*image, &setup.create_options()).await.unwrap();
        let unit = if setup.name.contains("large") { 1 << 20 } else { 64 << 10 };
        let mut random = Random::from_seed(7);
        let mut model = model_of(setup);
        let mut bytes = |at: u64, len: u64| {
            let data = noise(GuestOffset::new(at).span(len), &mut random);
            model[usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap()]
                .copy_from_slice(&data.to_vec());
            (GuestOffset::new(at), data)
        };
        let disk = Native::open(image.clone(), setup.below(), options()).await.unwrap();
        for _ in 0..2 {
            let (at, data) = bytes(0, unit);
            disk.write(at, data, WriteFlags { fua: true }).await.unwrap();
        }
        disk.snapshot_create("s", 0).await.unwrap();
        late.arm(usize::try_from(unit).unwrap(), &[Fate::Late]);
        let (at, data) = bytes(0, 4096);
        let copying = world.spawn({
            let disk = disk.clone();
            async move { disk.write(at, data, WriteFlags::default()).await }
        });
        late.caught(1).await;
        disk.snapshot_delete("s").await.unwrap();
        let (at, data) = bytes(8192, 4096);
        disk.write(at, data, WriteFlags { fua: true }).await.unwrap();
        late.release();
        copying.await.unwrap();
        let is_there = content(&*disk).await == model;
        disk.close().await.unwrap();
        let disk = Native::open(image.clone(), setup.below(), options()).await.unwrap();
        let is_there_later = content(&*disk).await == model;
        disk.close().await.unwrap();
        let (report, lines) = look_native(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
        match (is_there, is_there_later) {
            (true, true) => Ok(()),
            (true, false) => Err("lost when it is opened again"),
            _ => Err("lost"),
        }
    })
}
