//! The judge is judged: tables of what it accepts and rejects, and a correct disk beside disks that are not.
//!
//! Tables are written as a story of one sector: `begin A` and `end A` are a write of a sector of A's, `F`
//! flushes.

mod common;

use std::sync::Arc;

use common::{Bug, RawDisk, any_order, drive_of, guest};
use vellum_core::{Disk, Random, SharedDisk, WriteFlags, ZeroFlags, join_all};
use vellum_sim::{
    Content, CrashKind, Discards, DriveOptions, GuestRequest, History, Oracle, World, fault_loop, read_disk,
};

const SIZE: u64 = 8 * 512;

fn whole(value: u8, fua: bool) -> GuestRequest {
    GuestRequest::Write { at: guest(512), data: vec![value; 512].into(), fua }
}

/// Plays a story and returns what the sector may be after a crash at its end.
///
/// Small letters begin a write and capitals end it; `z` and `d` are write-zeroes and discard. A digit is a
/// write with FUA, begun and ended. `+` is a flush, `<` and `>` begin and end one. `!` fails what ends next,
/// `#` crashes.
fn admissible(story: &str) -> String {
    let world = World::new(1);
    let mut initial = Content::zeroed(SIZE);
    initial.write(vellum_core::ImageOffset::ZERO, &[b'i'; 4096]);
    let oracle = Oracle::new(&world, initial);
    let mut open = std::collections::BTreeMap::new();
    let mut succeeds = true;
    let span = guest(512).span(512);
    for step in story.chars() {
        let mut begin = |name: char, request| open.insert(name, oracle.begin(request));
        match step {
            'z' => drop(begin('z', GuestRequest::WriteZeroes { span, fua: false })),
            'd' => drop(begin('d', GuestRequest::Discard { span })),
            'a'..='y' => drop(begin(step, whole(u8::try_from(step).expect("ASCII"), false))),
            '<' => drop(begin('>', GuestRequest::Flush)),
            '+' => {
                let flush = oracle.begin(GuestRequest::Flush);
                oracle.end(flush, true);
            }
            '0'..='9' => {
                let write = oracle.begin(whole(u8::try_from(step).expect("ASCII"), true));
                oracle.end(write, true);
            }
            '!' => succeeds = false,
            '#' => oracle.note_crash(),
            ' ' => {}
            _ => {
                let id = open.remove(&step.to_ascii_lowercase()).expect("it has begun");
                oracle.end(id, std::mem::replace(&mut succeeds, true));
            }
        }
    }
    let expectation = oracle.expect_at(world.position());
    let accepts = |value: u8| expectation.check_bytes(guest(512), &[value; 512]).is_ok();
    let letters = "0123iabcexyq".bytes().filter(|letter| accepts(*letter)).map(char::from);
    let zero = accepts(0).then_some('Z');
    letters.chain(zero).collect()
}

#[test]
fn which_values_of_a_sector_are_admissible() {
    for (story, expected) in [
        // Unflushed: old or new. In flight: the same.
        ("", "i"),
        ("aA", "ia"),
        ("a", "ia"),
        ("aA bB", "iab"),
        // Flushed: only that, or later.
        ("aA +", "a"),
        ("aA + bB", "ab"),
        ("aA bB +", "b"),
        ("aA + b", "ab"),
        // A flush covers what had returned before it was submitted, once it has returned.
        ("a < A >", "ia"),
        ("aA <", "ia"),
        ("aA < bB >", "ab"),
        ("aA < b > B", "ab"),
        ("aA !< >", "ia"),
        // Writes at the same time: either may be the one that stays.
        ("ab AB +", "ab"),
        ("ab A+ B", "ab"),
        ("a bB +", "ab"),
        ("a bB + A +", "ab"),
        ("aA bc B C +", "bc"),
        // FUA makes only itself durable, and overrules what had returned.
        ("1", "1"),
        ("aA 1", "1"),
        ("a 1 A", "1a"),
        ("1 aA", "1a"),
        // Zeroes are a write; a discard is zero or as before.
        ("zZ", "iZ"),
        ("aA + zZ +", "Z"),
        ("dD", "iZ"),
        ("dD +", "iZ"),
        ("aA + dD +", "aZ"),
        ("aA dD + bB", "abZ"),
        ("dD aA +", "a"),
        // A failed request may have happened; it is never durable.
        ("a!A", "ia"),
        ("a!A +", "ia"),
        ("a!A + bB +", "b"),
        ("aA + b!B +", "ab"),
        ("aA + b!B + cC +", "c"),
        // A crash in between: what was lost does not come back by a flush.
        ("aA # +", "ia"),
        ("aA # bB +", "b"),
        ("aA + # +", "a"),
        ("a # bB +", "b"),
        ("aA < # >", "ia"),
    ] {
        assert_eq!(admissible(story), expected, "{story:?}");
    }
}

/// Writes of parts of a sector: what they make of it, one after the other.
#[test]
fn parts_of_a_sector_make_a_chain_of_values() {
    let world = World::new(1);
    let oracle = Oracle::new(&world, Content::zeroed(SIZE));
    let part = |from: u64, value: u8| GuestRequest::Write {
        at: guest(512 + from),
        data: vec![value; 100].into(),
        fua: false,
    };
    let image = |parts: &[(u64, u8)]| {
        let mut content = Content::zeroed(SIZE);
        for (from, value) in parts {
            content.write(vellum_core::ImageOffset::new(512 + from), &[*value; 100]);
        }
        content
    };
    let now = |oracle: &Oracle| oracle.expect_at(world.position());
    let run = |request| {
        let id = oracle.begin(request);
        oracle.end(id, true);
    };
    run(part(0, 1));
    run(part(200, 2));
    let expectation = now(&oracle);
    for accepted in [&[][..], &[(0, 1)], &[(0, 1), (200, 2)]] {
        expectation.check(&image(accepted)).expect("a value it had");
    }
    expectation.check(&image(&[(200, 2)])).expect_err("the second without the first never was");
    expectation.check(&image(&[(0, 2)])).expect_err("another's bytes");
    run(GuestRequest::Flush);
    now(&oracle).check(&image(&[(0, 1)])).expect_err("both were flushed");
    now(&oracle).check(&image(&[(0, 1), (200, 2)])).expect("both were flushed");
    // At the same time: byte by byte.
    let ids = [(0, 3), (300, 4)].map(|(from, value)| oracle.begin(part(from, value)));
    now(&oracle).check(&image(&[(0, 3), (200, 2)])).expect("one has happened");
    now(&oracle).check(&image(&[(0, 1), (200, 2), (300, 4)])).expect("or the other");
    for id in ids {
        oracle.end(id, true);
    }
    run(GuestRequest::Flush);
    now(&oracle).check(&image(&[(0, 1), (200, 2), (300, 4)])).expect_err("now both must have");
    now(&oracle).check(&image(&[(0, 3), (200, 2), (300, 4)])).expect("now both must have");
}

#[test]
fn a_violation_says_what_was_found_and_what_it_looks_like() {
    let world = World::new(1);
    let oracle = Oracle::new(&world, Content::zeroed(SIZE));
    for request in [whole(1, false), whole(2, true)] {
        let id = oracle.begin(request);
        oracle.end(id, true);
    }
    let mut image = Content::zeroed(SIZE);
    image.write(vellum_core::ImageOffset::new(512), &[1; 512]);
    let violation = oracle.expect_at(world.position()).check(&image).expect_err("write 1 overrules write 0");
    let message = violation.to_string();
    assert!(message.contains("sector 1 (0x200) reads as [01 01 01 01 01 01 01 01"), "{message}");
    assert!(message.contains("which is write 0; admissible: write 1 [02 02"), "{message}");
    let untouched = oracle.expect_at(world.position());
    let mut image = image.clone();
    image.write(vellum_core::ImageOffset::new(512), &[2; 512]);
    image.write(vellum_core::ImageOffset::new(3000), &[1]);
    untouched.check(&image).expect("nobody asked about the rest");
    let bytes = image.to_vec();
    untouched.check_bytes(guest(0), &bytes).expect_err("where nobody wrote");
}

/// Three guests on one disk, with everything in it. Returns the drive's log and the oracle.
fn guests(world: &World, bug: Bug) -> (Arc<vellum_sim::Drive>, Oracle) {
    let options = DriveOptions {
        delay: any_order(),
        history: History::Whole,
        discards: Discards::Whim,
        ..DriveOptions::default()
    };
    let drive = drive_of(world, 64 << 10, options);
    let oracle = Oracle::new(world, drive.content());
    let disk = oracle.watch(RawDisk::new(world, drive.clone(), bug) as SharedDisk);
    let tasks: Vec<_> = (1..=3u8)
        .map(|guest| {
            let (disk, random) = (disk.clone(), world.random());
            world.spawn(guest_of(disk, random, guest))
        })
        .collect();
    world.run(join_all(tasks));
    world.run(async {
        let found = read_disk(&*disk).await.expect("a disk can be read");
        oracle.expect_running().check(&found).expect("what runs is right");
        oracle.expect_running().check_whole_disk(&*disk).await.expect("also read through the disk");
    });
    (drive, oracle)
}

async fn guest_of(disk: Arc<dyn Disk>, mut random: Random, number: u8) {
    for step in 0..12 {
        let value = number * 16 + step;
        let align = *random.pick(&[1, 512, 4096]);
        let start = random.below(60_000) / align * align;
        let len = (1 + random.below(4_000)).next_multiple_of(align).min((64 << 10) - start);
        let span = guest(start).span(len);
        let fua = random.one_in(4);
        match random.below(8) {
            0 | 1 => disk.flush().await,
            2 => disk.write_zeroes(span, ZeroFlags { fua, ..ZeroFlags::default() }).await,
            3 => disk.discard(span, WriteFlags::default()).await,
            _ => {
                let len = usize::try_from(len).expect("small");
                let data = vellum_core::Buffer::copy_of(&vec![value; len]);
                disk.write(span.start(), data, WriteFlags { fua }).await
            }
        }
        .expect("nothing fails");
    }
}

/// Crashes at every position, and judges images of every kind. Returns the number of images and of
/// violations.
fn judge(seed: u64, bug: Bug) -> (u64, u64) {
    let world = World::shuffled(seed);
    let (drive, oracle) = guests(&world, bug);
    let log = drive.log();
    let mut random = Random::from_seed(seed);
    let (mut images, mut violations) = (0, 0);
    for position in log.crash_positions() {
        let expectation = oracle.expect_at(position);
        for kind in [CrashKind::PowerCut, CrashKind::ProcessKill, CrashKind::FailedFlush] {
            let point = log.crash(kind, position);
            for _ in 0..4 {
                images += 1;
                if let Err(violation) = expectation.check(&point.random_image(&mut random)) {
                    assert!(bug != Bug::None, "seed {seed}, {kind:?}: {violation}");
                    violations += 1;
                }
            }
        }
    }
    (images, violations)
}

#[test]
fn a_disk_that_is_its_drive_is_never_blamed() {
    let images: u64 = (0..40).map(|seed| judge(seed, Bug::None).0).sum();
    assert!(images > 40_000, "{images}");
}

#[test]
fn disks_that_forget_a_flush_are_found_out() {
    for bug in [Bug::ForgetsFlush, Bug::ForgetsFua, Bug::SharesFlush] {
        let found = (0..20).filter(|seed| judge(*seed, bug).1 > 0).count();
        assert!(found >= 12, "{bug:?} was found in only {found} of 20 worlds");
    }
}

/// Every operation of a guest's story fails in turn, and what had been promised survives every kind of crash.
#[test]
fn no_failure_makes_a_disk_lose_what_it_has_promised() {
    let report = fault_loop(3, async |world, plan| {
        let options = DriveOptions { faults: plan.clone(), ..DriveOptions::default() };
        let drive = drive_of(world, 64 << 10, options);
        let oracle = Oracle::new(world, drive.content());
        let disk = oracle.watch(RawDisk::new(world, drive.clone(), Bug::None) as SharedDisk);
        for step in 0..6u8 {
            let at = guest(u64::from(step) * 2_000);
            let data = vellum_core::Buffer::copy_of(&[step + 1; 3_000]);
            // A guest that does not mind errors.
            disk.write(at, data, WriteFlags { fua: step == 4 }).await.ok();
            disk.discard(guest(4_096).span(2_048), WriteFlags::default()).await.ok();
            if step % 2 == 1 {
                disk.flush().await.ok();
            }
        }
        let mut random = world.random();
        let expectation = oracle.expect_at(world.position());
        for kind in [CrashKind::PowerCut, CrashKind::ProcessKill, CrashKind::FailedFlush] {
            let point = drive.log().crash(kind, world.position());
            for _ in 0..20 {
                let image = point.random_image(&mut random);
                expectation.check(&image).unwrap_or_else(|violation| panic!("{violation}\n{}", drive.log()));
            }
        }
    });
    assert!(report.runs > 100 && report.failures > 100, "{report:?}");
}

/// Disks that run for long: crash, start again, crash again, with one oracle.
#[test]
fn one_oracle_judges_a_disk_through_many_crashes() {
    for seed in 0..20 {
        let world = World::shuffled(seed);
        let options =
            || DriveOptions { delay: any_order(), history: History::Pending, ..DriveOptions::default() };
        let mut drive = drive_of(&world, 64 << 10, options());
        let oracle = Oracle::new(&world, drive.content());
        let mut random = world.random();
        for round in 1..=8u8 {
            let disk = oracle.watch(RawDisk::new(&world, drive.clone(), Bug::None) as SharedDisk);
            let guests: Vec<_> = (0..2)
                .map(|guest| {
                    let (disk, random) = (disk.clone(), random.fork());
                    let work = async move {
                        // It may be cut off anywhere.
                        guest_of(disk, random, round + guest).await;
                    };
                    world.spawn(work)
                })
                .collect();
            let position = world.run(async {
                world.sleep(std::time::Duration::from_micros(random.below(3_000))).await;
                for guest in guests {
                    guest.abort().await;
                }
                world.position()
            });
            drive = if random.one_in(2) {
                let image = drive.crash(CrashKind::PowerCut, &mut random);
                vellum_sim::Drive::from_content(&world, image, options())
            } else {
                drive.restart(&mut random)
            };
            let found = drive.content();
            oracle
                .expect_at(position)
                .check(&found)
                .unwrap_or_else(|violation| panic!("seed {seed} round {round}: {violation}"));
            oracle.note_crash();
            // After a restart, flush before trusting what is read.
            world.run(vellum_core::Storage::flush(&*drive)).expect("a flush succeeds");
        }
    }
}
