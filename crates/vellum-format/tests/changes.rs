//! Changes of a closed image in several steps, interrupted: by a crash at every step, and by every operation
//! of the host that can fail. Whatever is left opens, is finished, and has the disk from before or after the
//! change; no snapshot changes.
//!
//! `crates/vellum-format/src/native/unfinished.rs` has the table of what is left and what is done about it.
//! For each mistake that a change can have one is found by `crates/vellum-seeded/tests/found.rs`.

mod common;
#[path = "subjects/device.rs"]
mod device;
#[path = "changes/images.rs"]
mod images;
#[path = "changes/qcow2.rs"]
mod qcow2;

use std::sync::Arc;

use images::{Change, DEVICE, SMALL, care, of_size, over_a_base, table, zoned};
use vellum_core::{Buffer, Disk as _, ErrorKind, GuestOffset, Random, Result, SharedStorage, WriteFlags};
use vellum_format::FormatKind;
use vellum_format::image::Detaching as _;
use vellum_format::native::check::check;
use vellum_format::native::{self, Native, OpenOptions};
use vellum_format::report::Repair;
use vellum_sim::explore::{Medium, Offline, explore_offline};
use vellum_sim::{
    Content, CrashKind, Drive, DriveOptions, Fault, FaultPlan, Operation, Operations, Repeat, World,
};

use common::native::NativeSetup;

fn linear() -> NativeSetup {
    NativeSetup::linear("linear", SMALL)
}

fn reverts() -> Vec<Change> {
    vec![
        Change::revert(table(), "large", None),
        Change::revert(table(), "small", None),
        Change::revert(over_a_base(table()), "large", None),
        Change::revert(zoned(), "large", None),
        Change::revert(zoned(), "small", Some(DEVICE)),
        Change::revert(over_a_base(zoned()), "small", None),
        Change::revert_of_pages(of_size(table(), 130 << 20)),
    ]
}

fn resizes() -> Vec<Change> {
    let larger = |setup| of_size(setup, 1 << 20);
    vec![
        Change::grow(larger(linear()), None),
        Change::grow(larger(table()), None),
        Change::grow(larger(over_a_base(table())), None),
        Change::grow(larger(zoned()), None),
        Change::grow(larger(zoned()), Some(DEVICE)),
        Change::grow_after_revert(table()),
        Change::grow_after_revert(zoned()),
        Change::shrink(linear(), None),
        Change::shrink(over_a_base(linear()), None),
        Change::shrink(table(), None),
        Change::shrink(over_a_base(table()), None),
        Change::shrink(zoned(), None),
        Change::shrink(over_a_base(zoned()), Some(DEVICE)),
    ]
}

/// Changes of images whose table has parts then, or had some before.
fn parts() -> Vec<Change> {
    let short = NativeSetup::with_the_shortest_table;
    vec![
        Change::grow_past_the_table(short(table()), None),
        Change::grow_past_the_table(short(table()), Some(DEVICE)),
        Change::grow_into_freed_units(short(of_size(table(), 1 << 20))),
        Change::grow_past_the_table(short(zoned()), None),
        Change::grow_past_the_table(short(zoned()), Some(DEVICE + DEVICE)),
        Change::grow_to_a_second_part(short(table()), None),
        Change::grow_to_a_second_part(short(zoned()), None),
        Change::grow_to_a_second_part(short(table()), Some(DEVICE)),
        Change::revert_past_the_table(short(table()), "large"),
        Change::revert_past_the_table(short(zoned()), "large"),
        Change::revert_past_the_table(short(table()), "small"),
        Change::shrink_from_a_part(short(table())),
        Change::shrink_from_a_part(short(zoned())),
    ]
}

fn deletes() -> Vec<Change> {
    vec![
        Change::delete(table(), "first"),
        Change::delete(over_a_base(table()), "second"),
        Change::delete(zoned(), "second"),
    ]
}

fn detachments() -> Vec<Change> {
    vec![
        Change::detach(linear(), None),
        Change::detach(table(), None),
        Change::detach(zoned(), None),
        Change::detach(zoned(), Some(DEVICE)),
        Change::detach_ahead(linear(), None),
        Change::detach_ahead(table(), None),
        Change::detach_ahead(zoned(), None),
        Change::detach_ahead(zoned(), Some(DEVICE)),
    ]
}

#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn explore(changes: &[Change]) {
    for change in changes {
        let looked = explore_offline(change, &care()).unwrap_or_else(|what| panic!("{what}"));
        eprintln!("explored {}: {looked}", change.name());
        assert!(looked.states > 2, "{}: {looked}", change.name());
    }
}

#[test]
fn a_revert_that_is_cut_off_is_finished() {
    explore(&reverts());
}

#[test]
fn a_resize_that_is_cut_off_has_happened_or_not() {
    explore(&resizes());
}

#[test]
fn a_change_of_a_disk_that_outgrows_its_table_has_happened_or_not() {
    explore(&parts());
}

#[test]
#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn a_qcow2_disk_that_was_to_grow_has_its_old_size_or_the_new_one() {
    for change in qcow2::grows() {
        let looked = explore_offline(&change, &care()).unwrap_or_else(|what| panic!("{what}"));
        eprintln!("explored {}: {looked}", change.name());
        assert!(looked.states > 2, "{}: {looked}", change.name());
    }
}

#[test]
#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn a_qcow2_disk_that_lets_go_of_its_backing_file_reads_the_same_with_it_or_without() {
    for change in qcow2::detachments() {
        let looked = explore_offline(&change, &care()).unwrap_or_else(|what| panic!("{what}"));
        eprintln!("explored {}: {looked}", change.name());
        assert!(looked.states > 2, "{}: {looked}", change.name());
    }
}

#[test]
fn a_deletion_that_is_cut_off_is_finished() {
    explore(&deletes());
}

#[test]
fn a_disk_that_lets_go_of_its_base_reads_the_same_with_it_or_without() {
    explore(&detachments());
}

/// The Nth operation of the host fails, for every N: once, or the host is full from there on. The image
/// opens, also while the host is full, and the disk is as it was or as it was to be.
#[test]
fn a_revert_that_fails_half_way_leaves_an_image_that_opens() {
    fail_everywhere(reverts());
}

#[test]
fn a_resize_that_fails_half_way_leaves_an_image_that_opens() {
    fail_everywhere(resizes());
}

#[test]
fn a_change_of_a_disk_that_outgrows_its_table_that_fails_leaves_an_image_that_opens() {
    fail_everywhere(parts());
}

#[test]
fn a_deletion_that_fails_half_way_leaves_an_image_that_opens() {
    fail_everywhere(deletes());
}

#[test]
fn letting_go_of_the_base_that_fails_half_way_leaves_an_image_that_opens() {
    fail_everywhere(detachments());
}

#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn fail_everywhere(changes: Vec<Change>) {
    let writes = Operation::Write | Operation::WriteZeroes | Operation::Preallocate | Operation::SetLen;
    let sweeps: [(Operations, ErrorKind, Repeat); 3] = [
        (Operations::ALL, ErrorKind::Io, Repeat::Once),
        (writes, ErrorKind::NoSpace, Repeat::Once),
        (Operation::Preallocate | Operation::SetLen, ErrorKind::NoSpace, Repeat::ForEver),
    ];
    for change in changes.into_iter().filter(|change| !change.is_on_device()) {
        let mut met = 0;
        for (operations, error, repeat) in &sweeps {
            for number in 0.. {
                let fault = Fault { error: *error, repeat: *repeat, ..Fault::nth(*operations, number) };
                if !one_failing(&change, &fault) {
                    break;
                }
                met += 1;
            }
        }
        eprintln!("{}: {met} failures", change.name());
        assert!(met > 5, "{}: {met}", change.name());
    }
}

fn one_failing(change: &Change, fault: &Fault) -> bool {
    let when = format!("{}: {fault:?}", change.name());
    let world = World::new(0);
    let plan = FaultPlan::none();
    let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
    let drive = Drive::from_content(&world, change.image(), options);
    let image: SharedStorage = drive.clone();
    plan.add(fault.clone());
    let done = world.run(change.perform(&image));
    let is_met = plan.hits() > 0;
    if fault.error == ErrorKind::NoSpace && !drive.is_poisoned() {
        // The host is as it is.
        let opened = world.run(change.opens(&image));
        opened.unwrap_or_else(|what| panic!("{when}, while it is so: {what}"));
    }
    plan.clear();
    if let Err(error) = &done {
        assert!(is_met, "{when}: {}", error.chain());
    }
    let content = match drive.is_poisoned() {
        true => drive.crash(CrashKind::FailedFlush, &mut Random::from_seed(1)),
        false => drive.content(),
    };
    let allowed = [&change.before, &change.after].into_iter().skip(usize::from(done.is_ok()));
    // Opened, and the same once more; the second not each time.
    for way in 0..1 + fault.skip % 2 {
        let world = World::new(0);
        let drive = Drive::from_content(&world, content.clone(), DriveOptions::default());
        let image: SharedStorage = drive;
        let looked = world.run(async {
            if way == 1 {
                change.perform(&image).await.map_err(|error| format!("once more: {}", error.chain()))?;
                return change.look(&image, [&change.after].into_iter()).await;
            }
            change.look(&image, allowed.clone()).await
        });
        looked.unwrap_or_else(|what| panic!("{when} ({:?}), way {way}: {what}", done.as_ref().err()));
    }
    is_met
}

/// The size of a disk that has shrunk.
const SHRUNK: u64 = 100_352;

/// A flush fails while something changes an image: what the medium has then, behind a cache that shows all of it. `None` if
/// there is no such flush.
fn behind_a_cache<T>(
    content: Content,
    number: u64,
    (seed, is_stubborn): (u64, bool),
    change: impl AsyncFn(&SharedStorage) -> Result<T>,
) -> Option<Arc<Medium>> {
    let world = World::new(0);
    let drive = Drive::from_content(&world, content, DriveOptions::default());
    drive
        .faults()
        .add(Fault { error: ErrorKind::Io, ..Fault::nth(Operations::from(Operation::Flush), number) });
    let image: SharedStorage = drive.clone();
    if world.run(change(&image)).is_ok() {
        return None;
    }
    let point = drive.log().crash(CrashKind::FailedFlush, world.position());
    let fates = point.random_fates(&mut Random::from_seed(seed));
    let medium = Medium::new(point.image(|index| fates[index].clone()));
    Some(medium.behind(point.shown(|index| fates[index].clone()), is_stubborn))
}

fn caches() -> impl Iterator<Item = (u64, bool)> {
    (0..6).flat_map(|seed| [(seed, false), (seed, true)])
}

/// The next opening sees what the page cache has, the disk grows back, and the cache loses what never reached the medium.
/// What was cut off does not come back.
fn grow_back(change: &Change, medium: &Arc<Medium>, when: &str) {
    let image: SharedStorage = medium.clone();
    futures_lite::future::block_on(async {
        let is_shrunk = native::finish(&image).await.unwrap() == SHRUNK;
        native::resize(&image, change.before.size, false).await.unwrap();
        medium.lose_cache();
        let grown = change.after.resized(change.before.size);
        let expected = if is_shrunk { &grown } else { &change.before };
        let looked = change.look(&image, [expected].into_iter()).await;
        looked.unwrap_or_else(|what| panic!("{when}: {what}"));
    });
}

/// A flush of a disk that shrinks fails, each in turn.
#[test]
fn what_was_cut_off_does_not_come_back_after_a_flush_that_failed() {
    let mut tried = 0;
    for setup in [table(), zoned(), of_size(table(), 1 << 20)] {
        let change = Change::shrink(setup, None);
        for (number, cache) in (0..6).flat_map(|number| caches().map(move |cache| (number, cache))) {
            let when = format!("{}, flush {number}, {cache:?}", change.name());
            let shrink = async |image: &SharedStorage| change.perform(image).await;
            if let Some(medium) = behind_a_cache(change.image(), number, cache, shrink) {
                tried += 1;
                grow_back(&change, &medium, &when);
            }
        }
    }
    assert!(tried > 30, "{tried}");
}

/// A flush of a disk that lets go of its base fails, each in turn. The next attempt sees what the page cache has, and what
/// it says is true when the cache loses what never reached the medium.
#[test]
fn a_base_that_is_said_to_be_gone_is_gone_also_after_a_flush_that_failed() {
    for change in detachments().iter().filter(|change| !change.is_on_device()) {
        once_more_after_a_failed_flush(change);
    }
    qcow2::detachments().iter().for_each(once_more_after_a_failed_flush);
}

fn once_more_after_a_failed_flush(change: &impl Offline) {
    let mut tried = 0;
    for (number, cache) in (0..8).flat_map(|number| caches().map(move |cache| (number, cache))) {
        let when = format!("{}, flush {number}, {cache:?}", change.name());
        let perform = async |image: &SharedStorage| change.change(image.clone()).await;
        let Some(medium) = behind_a_cache(change.image(), number, cache, perform) else { continue };
        tried += 1;
        let image: SharedStorage = medium.clone();
        futures_lite::future::block_on(async {
            let again = change.change(image.clone()).await;
            again.unwrap_or_else(|error| panic!("{when}: {}", error.chain()));
            medium.lose_cache();
            let judged = change.judge(image, Some(1), true).await;
            judged.unwrap_or_else(|what| panic!("{when}: {what}"));
        });
    }
    assert!(tried >= 12, "{}: {tried}", change.name());
    // What an earlier attempt has removed is removed only when a flush says so.
    let world = World::new(0);
    let drive = Drive::from_content(&world, change.image(), DriveOptions::default());
    let image: SharedStorage = drive.clone();
    world.run(change.change(image.clone())).expect("it is done");
    drive
        .faults()
        .add(Fault { repeat: Repeat::ForEver, ..Fault::nth(Operations::from(Operation::Flush), 0) });
    assert!(world.run(change.change(image)).is_err(), "{}: nothing is flushed", change.name());
}

/// The same with a repair, of an image whose shrinking was cut off right after its commit point.
#[test]
fn what_a_repair_clears_does_not_come_back_after_a_flush_that_failed() {
    let mut tried = 0;
    for setup in [table(), zoned()] {
        let change = Change::shrink(setup, None);
        // The first flush makes the new size durable; nothing is cleared when the second one fails.
        let cut_off = (0..6).find_map(|number| {
            let shrink = async |image: &SharedStorage| change.perform(image).await;
            let medium = behind_a_cache(change.image(), number, (0, false), shrink)?;
            medium.lose_cache();
            let image: SharedStorage = medium.clone();
            let (head, (report, _)) = futures_lite::future::block_on(async {
                let head = native::Superblocks::read(&*image).await.ok()?;
                Some((head, common::native::look_native(&image).await.ok()?))
            })?;
            (head.superblock.size() == SHRUNK && !report.is_clean()).then(|| medium.content())
        });
        let cut_off = cut_off.expect("a state behind the commit point");
        for (number, cache) in (0..6).flat_map(|number| caches().map(move |cache| (number, cache))) {
            let when = format!("{}, flush {number}, {cache:?}", change.name());
            let repair = async |image: &SharedStorage| check(image, Repair::All, &mut |_| {}).await;
            if let Some(medium) = behind_a_cache(cut_off.clone(), number, cache, repair) {
                tried += 1;
                grow_back(&change, &medium, &when);
            }
        }
    }
    assert!(tried > 30, "{tried}");
}

/// What guests wait for costs the same whatever the size of the disk: the superblocks, and two flushes.
#[test]
fn the_last_step_of_letting_go_of_a_base_is_as_short_for_every_disk() {
    for setup in [linear(), table(), zoned()] {
        for size in [SMALL, 64 << 20, 8 << 30] {
            let setup = of_size(setup.clone(), size).over(vec![0; 1 << 19], 16 << 10);
            let image: SharedStorage = vellum_core::MemoryStorage::new("image");
            futures_lite::future::block_on(async {
                native::create(&*image, &setup.create_options()).await.unwrap();
                let disk = Native::open(image.clone(), setup.below(), OpenOptions::default()).await.unwrap();
                for block in 0..16 {
                    let data = Buffer::copy_of(&[7; 4096]);
                    disk.write(GuestOffset::new(block * 36_864), data, WriteFlags::default()).await.unwrap();
                }
                disk.prepare(disk.mark(), &|| false).await.unwrap();
                assert!(disk.is_prepared());
                disk.close().await.unwrap();
                let tally = Arc::new(vellum_core::IoTally::default());
                let counted = vellum_core::Tallied::shared(image.clone(), tally.clone());
                let stop = std::sync::atomic::AtomicBool::new(false);
                FormatKind::Native.format().detach(&counted, true, &stop).await.unwrap();
                let counts = tally.counts();
                assert_eq!((counts.writes, counts.flushes), (2, 2), "{} of {size}", setup.name);
                assert!(counts.reads <= 4, "{} of {size}: {counts:?}", setup.name);
                let alone = Native::open(image.clone(), None, OpenOptions::default()).await.unwrap();
                for block in 0..16 {
                    let read =
                        alone.read(GuestOffset::new(block * 36_864), Buffer::zeroed(8192)).await.unwrap();
                    let read = read.to_vec();
                    assert!(
                        read[..4096] == [7; 4096] && read[4096..] == [0; 4096],
                        "{} of {size}",
                        setup.name
                    );
                }
                alone.close().await.unwrap();
            });
        }
    }
}

/// A disk that is ready to let go of its base is no more when a write of a guest fails: it may have left bytes where the disk
/// still calls everything zero. It is made ready again.
#[test]
fn a_write_that_fails_undoes_that_a_disk_is_ready_to_let_go_of_its_base() {
    for setup in [linear(), table(), zoned()] {
        let setup = setup.over(vec![0; 1 << 18], 16 << 10);
        let world = World::new(0);
        let drive = Drive::from_content(&world, Content::default(), DriveOptions::default());
        let image: SharedStorage = drive.clone();
        world.run(async {
            native::create(&*image, &setup.create_options()).await.unwrap();
            let disk = Native::open(image.clone(), setup.below(), OpenOptions::default()).await.unwrap();
            let write = async |block: u64, byte| {
                disk.write(
                    GuestOffset::new(block * 4096),
                    Buffer::copy_of(&[byte; 4096]),
                    WriteFlags::default(),
                )
                .await
            };
            write(0, 1).await.unwrap();
            disk.prepare(disk.mark(), &|| false).await.unwrap();
            assert!(disk.is_prepared(), "{}", setup.name);
            write(1, 2).await.unwrap();
            disk.flush().await.unwrap();
            assert!(disk.is_prepared(), "what goes well changes nothing");
            let writes = Operations::from(Operation::Write);
            drive.faults().add(Fault { error: ErrorKind::Io, ..Fault::nth(writes, 0) });
            write(2, 3).await.expect_err("it fails");
            assert!(!disk.is_prepared(), "{}", setup.name);
            disk.prepare(disk.mark(), &|| false).await.unwrap();
            assert!(disk.is_prepared());
            disk.close().await.unwrap();
            let stop = std::sync::atomic::AtomicBool::new(false);
            FormatKind::Native.format().detach(&image, true, &stop).await.unwrap();
            let alone = Native::open(image.clone(), None, OpenOptions::default()).await.unwrap();
            let read = alone.read(GuestOffset::ZERO, Buffer::zeroed(16_384)).await.unwrap().to_vec();
            for (block, byte) in [1, 2, 0, 0].into_iter().enumerate() {
                assert!(read[block * 4096..][..4096] == [byte; 4096], "{}, block {block}", setup.name);
            }
            alone.close().await.unwrap();
        });
    }
}

/// Guests write, zero and discard while the disk is made ready: whatever they did, it reads the same without its base.
#[test]
fn a_disk_is_made_ready_while_guests_are_at_work() {
    for (number, setup) in [linear(), table(), zoned()].into_iter().enumerate() {
        for seed in 0..30 {
            let mut base = vec![0; 1 << 19];
            base[3 << 16..5 << 16].fill(9);
            let setup = setup.clone().over(base.clone(), 16 << 10);
            let world = World::new(seed);
            let drive = Drive::from_content(&world, Content::default(), DriveOptions::default());
            let image: SharedStorage = drive.clone();
            world.run(async {
                native::create(&*image, &setup.create_options()).await.unwrap();
                let disk = Native::open(image.clone(), setup.below(), OpenOptions::default()).await.unwrap();
                let mut model = base.clone();
                model.resize(usize::try_from(SMALL).unwrap(), 0);
                let mut random = Random::from_seed(seed * 3 + number as u64);
                let whole = Buffer::copy_of(&base[3 << 16..5 << 16]);
                disk.fill(GuestOffset::new(3 << 16), whole).await.unwrap();
                let guest = async |model: &mut Vec<u8>, random: &mut Random, count: u64| {
                    for _ in 0..count {
                        let start = random.below(SMALL / 512 - 64) * 512;
                        let len = (1 + random.below(60)) * 512;
                        let span = GuestOffset::new(start).span(len);
                        let part = usize::try_from(start).unwrap()..usize::try_from(start + len).unwrap();
                        match random.below(5) {
                            0 => {
                                disk.write_zeroes(
                                    span,
                                    vellum_core::ZeroFlags {
                                        may_unmap: random.one_in(2),
                                        ..Default::default()
                                    },
                                )
                                .await
                                .unwrap();
                                model[part].fill(0);
                            }
                            // A unit that is let go of, and may come to hold its entry.
                            2 => {
                                let unit = random.below(8);
                                let span = GuestOffset::new(unit << 16).span(1 << 16);
                                let flags = vellum_core::ZeroFlags { may_unmap: true, ..Default::default() };
                                disk.write_zeroes(span, flags).await.unwrap();
                                let at = usize::try_from(unit << 16).unwrap();
                                model[at..at + (1 << 16)].fill(0);
                            }
                            1 => disk.flush().await.unwrap(),
                            _ => {
                                let byte = u8::try_from(random.below(250) + 1).unwrap();
                                let data = Buffer::copy_of(&vec![byte; part.len()]);
                                disk.write(span.start(), data, WriteFlags::default()).await.unwrap();
                                model[part].fill(byte);
                            }
                        }
                    }
                };
                guest(&mut model, &mut random, 20).await;
                // What is still missing is written, as the filler would.
                let complete = async || {
                    for at in (3 << 16..5 << 16).step_by(4096) {
                        let span = GuestOffset::new(at).span(4096);
                        let shared: vellum_core::SharedDisk = disk.clone();
                        let map = vellum_core::map_merged(&shared, span).await.unwrap();
                        if map.iter().any(|extent| extent.depth > 0) {
                            let bytes = disk.read(span.start(), Buffer::zeroed(4096)).await.unwrap();
                            disk.write(span.start(), bytes, WriteFlags::default()).await.unwrap();
                        }
                    }
                };
                let mark = disk.mark();
                complete().await;
                let preparing = disk.prepare(mark, &|| false);
                let (prepared, ()) =
                    futures_lite::future::zip(preparing, guest(&mut model, &mut random, 30)).await;
                prepared.unwrap();
                guest(&mut model, &mut random, 10).await;
                while !disk.is_prepared() {
                    let mark = disk.mark();
                    complete().await;
                    disk.prepare(mark, &|| false).await.unwrap();
                }
                disk.close().await.unwrap();
                let stop = std::sync::atomic::AtomicBool::new(false);
                FormatKind::Native.format().detach(&image, true, &stop).await.unwrap();
                let alone = Native::open(image.clone(), None, OpenOptions::default()).await.unwrap();
                let read = alone.read(GuestOffset::ZERO, Buffer::zeroed(model.len())).await.unwrap().to_vec();
                let wrong = read.iter().zip(&model).position(|(is, should)| is != should);
                assert_eq!(wrong, None, "{}, seed {seed}", setup.name);
                alone.close().await.unwrap();
            });
        }
    }
}

/// In `linear`, a zero in a block that was filled gives the rest of the block back to the base. A disk that was ready to let go
/// of the base is no more, also where this happens before the places are looked at.
#[test]
fn a_block_that_is_given_back_to_the_base_keeps_it() {
    for is_early in [true, false] {
        let setup = linear().over(vec![7; 1 << 18], 16 << 10);
        let image: SharedStorage = vellum_core::MemoryStorage::new("image");
        futures_lite::future::block_on(async {
            native::create(&*image, &setup.create_options()).await.unwrap();
            let disk = Native::open(image.clone(), setup.below(), OpenOptions::default()).await.unwrap();
            disk.fill(GuestOffset::ZERO, Buffer::copy_of(&[7; 1 << 18])).await.unwrap();
            let zero =
                || disk.write_zeroes(GuestOffset::new(4096).span(4096), vellum_core::ZeroFlags::default());
            let mark = disk.mark();
            if is_early {
                zero().await.unwrap();
            }
            disk.prepare(mark, &|| false).await.unwrap();
            assert_eq!(disk.is_prepared(), !is_early);
            if !is_early {
                zero().await.unwrap();
            }
            assert!(!disk.is_prepared());
            let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(16_384)).await.unwrap().to_vec();
            assert!(read[..4096] == [7; 4096] && read[4096..8192] == [0; 4096] && read[8192..] == [7; 8192]);
            disk.close().await.unwrap();
        });
    }
}
