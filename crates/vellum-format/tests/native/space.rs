//! Where space is short, and how large images become.

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, ImageOffset, LocalFuture, MemoryStorage, Random, SharedStorage,
    Storage, WriteFlags, ZeroFlags, try_join_all,
};
use vellum_format::native::check::check;
use vellum_format::native::snapshots::revert;
use vellum_format::native::{Native, OpenOptions, create, resize};
use vellum_format::report::Repair;
use vellum_sim::{Drive, DriveOptions, Fault, Operation, Repeat, World};

use super::common::native::{NativeSetup, look_native};
use super::common::{base, scale};
use super::device::Device;
use super::host::FullHost;
use super::trials::kept_on_a_full_host;

const UNIT: u64 = 64 << 10;

/// A device has fewer units than the disk. When all are taken a write fails and says so; what is released can
/// be used at once.
#[test]
fn a_full_device_says_so_and_goes_on() {
    block_on(async {
        let old = vec![0xAB; (1 << 20) + 4 * 65_536];
        let image = Device::shared(MemoryStorage::holding("device", &old));
        let setup = NativeSetup::table("table", 16 * UNIT, UNIT);
        create(&*image, &setup.create_options()).await.unwrap();
        let shared: SharedStorage = image.clone();
        let disk = Native::open(image, None, OpenOptions::default()).await.unwrap();
        let at = |unit: u64| GuestOffset::new(unit * UNIT);
        let write = async |unit: u64| {
            disk.write(at(unit) + 512, Buffer::copy_of(&[7; 512]), WriteFlags::default()).await
        };
        for unit in 0..4 {
            write(unit).await.unwrap();
            let read = disk.read(at(unit), Buffer::zeroed(65_536)).await.unwrap().to_vec();
            assert!(
                read[..512].iter().chain(&read[1024..]).all(|byte| *byte == 0),
                "old bytes of the device"
            );
        }
        assert!(disk.waits_for_units() > 0, "the first had to be made zero");
        assert_eq!(write(9).await.unwrap_err().kind(), ErrorKind::NoSpace);
        disk.discard(at(2).span(UNIT), WriteFlags::default()).await.unwrap();
        write(9).await.unwrap();
        assert_eq!(write(10).await.unwrap_err().kind(), ErrorKind::NoSpace);
        let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
        disk.write_zeroes(at(0).span(UNIT), flags).await.unwrap();
        write(10).await.unwrap();
        let read = disk.read(at(10), Buffer::zeroed(65_536)).await.unwrap().to_vec();
        assert!(read[1024..].iter().all(|byte| *byte == 0), "bytes of the unit's first life");
        disk.close().await.unwrap();
        let (report, lines) = look_native(&shared).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}

/// A device that was extended has room at once, for the write that finds it full and for those that wait
/// beside it; what was there before it grew is free space, and what was flushed stays.
#[test]
fn a_device_that_grows_is_used() {
    const UNITS: u64 = 4;
    block_on(async {
        let start = 1 << 20;
        let medium = MemoryStorage::holding("device", &vec![0xAB; start + 4 * 65_536 + 5000]);
        let image = Device::shared(medium.clone());
        let setup = NativeSetup::table("table", 64 * UNIT, UNIT);
        create(&*image, &setup.create_options()).await.unwrap();
        let shared: SharedStorage = image.clone();
        let disk = Native::open(image.clone(), None, OpenOptions::default()).await.unwrap();
        let write = async |unit: u64| {
            let at = GuestOffset::new(unit * UNIT) + 512;
            disk.write(at, Buffer::copy_of(&[7; 512]), WriteFlags::default()).await
        };
        for unit in 0..UNITS {
            write(unit).await.unwrap();
        }
        disk.flush().await.unwrap();
        let error = write(9).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        // Of the next unit 5000 bytes are there.
        assert!(error.chain().contains("needs at least 60536 more bytes"), "{}", error.chain());
        let room = disk.room().await.unwrap().expect("a device");
        assert_eq!((room.free, room.step, room.refused), (0, 60536, 1));
        assert_eq!((room.len, room.len_for_all), (image.len(), start as u64 + 64 * UNIT));
        // Old bytes there, too.
        let more = vec![0xCD; usize::try_from(4 * UNIT).unwrap()];
        medium.write(vellum_core::ImageOffset::new(medium.len()), Buffer::copy_of(&more)).await.unwrap();
        let together =
            vellum_core::try_join_all((8..12).map(|unit| Box::pin(write(unit)) as LocalFuture<'_, _>));
        together.await.unwrap();
        assert_eq!(disk.room().await.unwrap().expect("a device").free, 0);
        assert_eq!(write(12).await.unwrap_err().kind(), ErrorKind::NoSpace);
        disk.flush().await.unwrap();
        drop(disk); // as in a crash
        let disk = Native::open(image, None, OpenOptions::default()).await.unwrap();
        for unit in 0..64 {
            let at = GuestOffset::new(unit * UNIT);
            let mut bytes = disk.read(at, Buffer::zeroed(65_536)).await.unwrap().to_vec();
            let own = bytes.splice(512..1024, [0; 512]).collect::<Vec<u8>>();
            assert!(bytes.iter().all(|byte| *byte == 0), "unit {unit}: old bytes of the device");
            let wanted = if unit < UNITS || (8..12).contains(&unit) { 7 } else { 0 };
            assert!(own.iter().all(|byte| *byte == wanted), "unit {unit}");
        }
        disk.close().await.unwrap();
        let (report, lines) = look_native(&shared).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
        // What a file has is the host's to say.
        let file = MemoryStorage::new("file");
        create(&*file, &setup.create_options()).await.unwrap();
        let disk = Native::open(file, None, OpenOptions::default()).await.unwrap();
        assert_eq!(disk.room().await.unwrap(), None);
    });
}

/// A file ends with the last unit when it was closed.
#[test]
fn closing_gives_back_what_the_file_has_too_much() {
    block_on(async {
        let image = MemoryStorage::new("image");
        create(&*image, &NativeSetup::table("table", 64 * UNIT, UNIT).create_options()).await.unwrap();
        let before = image.len();
        for round in 0..3 {
            let disk = Native::open(image.clone(), None, OpenOptions::default()).await.unwrap();
            for unit in 0..8 {
                let at = GuestOffset::new(unit * UNIT);
                disk.write(at, Buffer::copy_of(&[7; 4096]), WriteFlags::default()).await.unwrap();
            }
            disk.discard(GuestOffset::ZERO.span(8 * UNIT), WriteFlags::default()).await.unwrap();
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&[1; 512]), WriteFlags::default()).await.unwrap();
            disk.discard(GuestOffset::ZERO.span(UNIT), WriteFlags::default()).await.unwrap();
            disk.close().await.unwrap();
            assert_eq!(image.len(), before, "round {round}");
        }
    });
}

/// Every kind of byte of the metadata turned over: an error or a sound disk, never a panic, and a read that
/// works gives what was written or what the base has.
#[test]
fn images_that_lie() {
    let mut random = Random::from_seed(5);
    let setup = NativeSetup::table("table over a base", 8 * UNIT, UNIT).over(base(), 16 << 10);
    for is_closed in [false, true] {
        let image = MemoryStorage::new("image");
        block_on(async {
            create(&*image, &setup.create_options()).await.unwrap();
            let disk = Native::open(image.clone(), setup.below(), OpenOptions::default()).await.unwrap();
            for at in [0, 20_000, 3 * UNIT, 5 * UNIT + 300] {
                disk.write(GuestOffset::new(at), Buffer::copy_of(&[3; 9000]), WriteFlags::FUA).await.unwrap();
            }
            disk.write_zeroes(GuestOffset::new(60_000).span(30_000), ZeroFlags::default()).await.unwrap();
            disk.flush().await.unwrap();
            if is_closed {
                disk.close().await.unwrap();
            }
        });
        let bytes = image.content().to_vec();
        // Mostly where something stands.
        let used: Vec<usize> =
            (0..1 << 20).filter(|at| bytes.get(*at).is_some_and(|byte| *byte != 0)).collect();
        for _ in 0..600 * scale() {
            let mut bytes = bytes.clone();
            let at = if random.one_in(3) { random.index(1 << 20) } else { *random.pick(&used) };
            bytes[at] ^= 1 << random.below(8);
            block_on(use_all(&setup, &bytes));
        }
    }
}

/// Everything a user may do with an image. Whether each succeeds does not matter; that it ends does.
async fn use_all(setup: &NativeSetup, bytes: &[u8]) {
    let shared: SharedStorage = MemoryStorage::holding("image", bytes);
    let size = usize::try_from(setup.options.size).unwrap();
    for read_only in [true, false] {
        let options = OpenOptions { read_only, ..OpenOptions::default() };
        let opened = Native::open(shared.clone(), setup.below(), options).await;
        let Ok(disk) = opened else { continue };
        let size = size.min(usize::try_from(disk.geometry().size).unwrap());
        let _ = disk.read(GuestOffset::ZERO, Buffer::zeroed(size)).await;
        let _ = disk.map(GuestOffset::ZERO.span(size as u64)).await;
        if !read_only {
            for at in [0, 100_000, 3 * UNIT] {
                let at = GuestOffset::new(at);
                let _ = disk.write(at, Buffer::copy_of(&[9; 5000]), WriteFlags::FUA).await;
                let _ = disk.write_zeroes(at.span(70_000), ZeroFlags::default()).await;
                let _ = disk.discard(at.span(100_000), WriteFlags::default()).await;
            }
        }
        let _ = disk.close().await;
    }
    for repair in [Repair::Nothing, Repair::All] {
        let _ = check(&shared, repair, &mut |_| {}).await;
    }
}

/// Writes that need more units than are ready, alone and many at a time: each gets them, or fails for want of
/// space.
#[test]
fn large_writes_on_a_device_end() {
    const LEN: u64 = 512 << 10;
    for setup in [
        NativeSetup::table("table", 64 * UNIT, UNIT),
        NativeSetup::zoned("zoned", 64 * UNIT, UNIT, 256 << 10),
    ] {
        block_on(async {
            let old = vec![0xAB; (1 << 20) + 60 * 65_536];
            let image = Device::shared(MemoryStorage::holding("device", &old));
            create(&*image, &setup.create_options()).await.unwrap();
            let shared: SharedStorage = image.clone();
            let disk = Native::open(image, None, OpenOptions::default()).await.unwrap();
            let mut noise = vec![0; usize::try_from(LEN).unwrap()];
            Random::from_seed(7).fill(&mut noise);
            let write = |number: u64| {
                disk.write(GuestOffset::new(number * LEN), Buffer::copy_of(&noise), WriteFlags::default())
            };
            write(0).await.unwrap();
            try_join_all((1..7).map(write)).await.unwrap();
            // 56 of 60 units are taken.
            assert_eq!(write(7).await.unwrap_err().kind(), ErrorKind::NoSpace, "{}", setup.name);
            for number in 0..7 {
                let at = GuestOffset::new(number * LEN);
                let found = disk.read(at, Buffer::zeroed(noise.len())).await.unwrap().to_vec();
                assert!(found == noise, "{}: write {number}", setup.name);
            }
            // Units that the failed write released at its end are available to a write that needs fewer.
            let small = Buffer::copy_of(&noise[..4096]);
            disk.write(GuestOffset::new(7 * LEN), small, WriteFlags::FUA).await.unwrap();
            disk.close().await.unwrap();
            let (report, lines) = look_native(&shared).await.unwrap();
            assert!(report.is_clean(), "{lines:?}");
        });
    }
}

/// Where the host has no space for a copy, the write that asks for it says so, and does not look forever.
#[test]
fn a_full_host_and_a_snapshot() {
    let world = World::new(0);
    world.run(async {
        let drive = Drive::new(&world, DriveOptions::default());
        let setup = NativeSetup::table("table", 16 * UNIT, UNIT);
        let made = create(&*drive, &setup.create_options()).await.unwrap();
        let disk = Native::open(drive.clone(), None, OpenOptions::default()).await.unwrap();
        let at = GuestOffset::new(0);
        let write = async || disk.write(at, Buffer::copy_of(&[7; 4096]), WriteFlags::default()).await;
        write().await.unwrap();
        disk.flush().await.unwrap();
        disk.snapshot_create("one", 0).await.unwrap();
        let behind = (made.places().data_offset() + UNIT).span(1 << 40);
        let full = Fault { within: Some(behind), ..Fault::nth(Operation::Write, 0) };
        drive.faults().add(Fault { error: ErrorKind::NoSpace, repeat: Repeat::ForEver, ..full });
        let before = drive.counts().flushes;
        assert_eq!(write().await.unwrap_err().kind(), ErrorKind::NoSpace);
        assert!(drive.counts().flushes - before < 200, "{} flushes", drive.counts().flushes - before);
        drive.faults().clear();
        write().await.unwrap();
        disk.close().await.unwrap();
    });
}

/// A unit that cannot be made zero keeps no other from it.
#[test]
fn one_bad_unit() {
    for unit_at in [0, 5, 17] {
        let world = World::new(0);
        world.run(async {
            let drive = Drive::new(&world, DriveOptions::default());
            let old = vec![0xAB; (1 << 20) + 40 * 65_536];
            drive.write(ImageOffset::ZERO, Buffer::copy_of(&old)).await.unwrap();
            let image = Device::shared(drive.clone());
            let setup = NativeSetup::table("table", 64 * UNIT, UNIT);
            let made = create(&*image, &setup.create_options()).await.unwrap();
            let disk = Native::open(image, None, OpenOptions::default()).await.unwrap();
            let bad = (made.places().data_offset() + unit_at * UNIT).span(UNIT);
            let fault = Fault { within: Some(bad), ..Fault::nth(Operation::WriteZeroes, 0) };
            drive.faults().add(Fault { repeat: Repeat::ForEver, ..fault });
            for unit in 0..36 {
                let at = GuestOffset::new(unit * UNIT);
                let written = disk.write(at, Buffer::copy_of(&[7; 512]), WriteFlags::default()).await;
                written.unwrap_or_else(|error| panic!("bad unit {unit_at}, unit {unit}: {}", error.chain()));
            }
            disk.close().await.unwrap();
        });
    }
}

/// A write that needs a page kept is refused when the host is full, and not the journal when it checkpoints
/// where the page was kept.
#[test]
fn what_is_kept_has_its_space_before_a_write_is_accepted() {
    for pages in 0..24 {
        block_on(kept_on_a_full_host(pages)).unwrap_or_else(|why| panic!("{pages} pages: {why}"));
    }
}

/// A revert, and a resize, on a host that is full: it is refused, and the disk is what it was; or it is done.
/// In between there is nothing, and the image opens while the host is full.
#[test]
fn a_full_host_and_a_revert() {
    let setup = NativeSetup::table("table", 4096 * UNIT - 5 * 4096, UNIT);
    let (mut done, mut refused) = (0, 0);
    for pages in 0..32 {
        block_on(async {
            let host = FullHost::new();
            let image: SharedStorage = host.clone();
            let open = async || Native::open(image.clone(), None, OpenOptions::default()).await;
            create(&*image, &setup.create_options()).await.unwrap();
            let units = [0, 1, 1024, 2048, 3000];
            let write = async |byte: u8, units: &[u64]| {
                let disk = open().await.unwrap();
                for unit in units {
                    let data = Buffer::copy_of(&[byte; 4096]);
                    disk.write(GuestOffset::new(unit * UNIT), data, WriteFlags::FUA).await.unwrap();
                }
                disk.snapshot_create(&byte.to_string(), 0).await.unwrap();
                disk.close().await.unwrap();
            };
            write(1, &units).await;
            write(2, &units).await;
            write(3, &units[1..2]).await;
            host.leave(pages);
            let to_revert = pages % 2 == 0;
            let changed = match to_revert {
                true => revert(image.clone(), None, OpenOptions::default(), "1").await,
                false => resize(&image, 5000 * UNIT, false).await.map(drop),
            };
            let disk = open().await.unwrap_or_else(|error| panic!("{pages}: {}", error.chain()));
            let byte = disk.read(GuestOffset::new(UNIT), Buffer::zeroed(1)).await.unwrap().slice()[0];
            let size = disk.geometry().size;
            match (&changed, to_revert) {
                (Ok(()), true) => assert_eq!(byte, 1, "{pages}"),
                (Ok(()), false) => assert_eq!((byte, size), (3, 5000 * UNIT), "{pages}"),
                (Err(error), _) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{pages}: {}", error.chain());
                    assert_eq!((byte, size), (3, setup.options.size), "{pages}");
                }
            }
            disk.close().await.unwrap();
            done += u32::from(changed.is_ok());
            refused += u32::from(changed.is_err());
        });
    }
    assert!(done > 4 && refused > 0, "{done} done, {refused} refused");
}
