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
use vellum_core::{ErrorKind, Random, Result, SharedStorage};
use vellum_format::native;
use vellum_format::native::check::check;
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
