//! What a crash may leave, and what it may not.

mod common;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use common::{any_order, at, drive_of, read, span, write};
use vellum_core::{Buffer, ErrorKind, Random, Result, Storage, Zeroes, join_all};
use vellum_sim::{
    Content, CrashKind, Drive, DriveOptions, Fate, Fault, FaultPlan, Granule, History, Operation, Outcome,
    World,
};

fn sector_of(content: &Content, sector: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    content.read(at(sector * 512), &mut bytes);
    bytes
}

#[test]
fn a_flushed_write_survives_and_an_unflushed_one_perhaps() -> Result<()> {
    let world = World::new(1);
    let drive = drive_of(&world, 1 << 16, DriveOptions::default());
    world.run(async {
        write(&*drive, 0, 4096, 1).await?;
        drive.flush().await?;
        write(&*drive, 4096, 4096, 2).await
    })?;
    let point = drive.log().crash(CrashKind::PowerCut, world.position());
    let (mut lost, mut kept, mut torn) = (0, 0, 0);
    let mut random = Random::from_seed(1);
    for _ in 0..1_000 {
        let bytes = point.random_image(&mut random).to_vec();
        assert_eq!(bytes[..4096], [1; 4096], "what was flushed is there");
        let sectors: Vec<&[u8]> = bytes[4096..8192].chunks(512).collect();
        assert!(sectors.iter().all(|sector| **sector == [0; 512] || **sector == [2; 512]), "a mixed sector");
        match sectors.iter().filter(|sector| sector[0] == 2).count() {
            0 => lost += 1,
            8 => kept += 1,
            _ => torn += 1,
        }
    }
    assert!(lost > 100 && kept > 100 && torn > 30, "lost {lost}, kept {kept}, torn {torn}");
    // A killed process takes nothing with it that had returned.
    let killed = drive.log().crash(CrashKind::ProcessKill, world.position());
    assert!(killed.pending().is_empty());
    assert_eq!(*killed.base(), drive.content());
    Ok(())
}

/// Contract 3: what had *returned* before the flush was *submitted*.
#[test]
fn a_write_in_flight_during_a_flush_is_not_durable() -> Result<()> {
    let world = World::new(1);
    let drive = drive_of(&world, 1 << 16, DriveOptions::default());
    let hold = drive.hold(Operation::Write);
    let writer = world.spawn({
        let drive = drive.clone();
        async move { write(&*drive, 0, 512, 7).await }
    });
    world.run(async {
        hold.caught(1).await;
        let in_flight = world.position();
        drive.flush().await?;
        let point = drive.log().crash(CrashKind::PowerCut, in_flight);
        assert_eq!(point.pending().len(), 1, "it may have reached the medium already");
        hold.release();
        writer.await
    })?;
    let point = drive.log().crash(CrashKind::PowerCut, world.position());
    assert_eq!(sector_of(&point.image_of(0), 0), [0; 512], "the flush did not cover it");
    assert_eq!(sector_of(&point.image_of(1), 0), [7; 512]);
    world.run(drive.flush())?;
    let point = drive.log().crash(CrashKind::PowerCut, world.position());
    assert!(point.pending().is_empty(), "the next flush does");
    assert_eq!(sector_of(point.base(), 0), [7; 512]);
    Ok(())
}

#[test]
fn a_flush_covers_nothing_until_it_has_ended() -> Result<()> {
    let world = World::new(1);
    let drive = drive_of(&world, 1 << 16, DriveOptions::default());
    let hold = drive.hold(Operation::Flush);
    world.run(async {
        write(&*drive, 0, 512, 7).await?;
        let flush = world.spawn({
            let drive = drive.clone();
            async move { drive.flush().await }
        });
        hold.caught(1).await;
        assert_eq!(drive.log().crash(CrashKind::PowerCut, world.position()).pending().len(), 1);
        hold.release();
        flush.await
    })?;
    assert!(drive.log().crash(CrashKind::PowerCut, world.position()).pending().is_empty());
    Ok(())
}

/// The bytes and the length are two events: longer with zeros, or shorter although the bytes were written.
#[test]
fn a_write_past_the_end_may_leave_a_longer_file_with_zeros_or_a_shorter_one() -> Result<()> {
    let world = World::new(1);
    let drive = drive_of(&world, 1000, DriveOptions::default());
    world.run(write(&*drive, 4000, 2000, 9))?;
    let log = drive.log();
    assert_eq!(log.events().len(), 2);
    assert!(log.events()[1].is_growth());
    let point = log.crash(CrashKind::PowerCut, world.position());
    let images: BTreeMap<u64, Content> = point.subsets().expect("two changes").collect();
    assert_eq!(images.len(), 4);
    assert_eq!(images[&0b00], Content::zeroed(1000));
    assert_eq!(images[&0b01], Content::zeroed(1000), "bytes past the end are not there");
    assert_eq!(images[&0b10], Content::zeroed(6000), "longer, with zeros");
    assert_eq!(images[&0b11], drive.content());
    Ok(())
}

#[test]
fn bytes_past_the_end_appear_when_another_event_makes_the_file_longer() -> Result<()> {
    let world = World::new(1);
    let drive = drive_of(&world, 0, DriveOptions::default());
    world.run(async {
        write(&*drive, 0, 512, 1).await?;
        write(&*drive, 512, 512, 2).await
    })?;
    let point = drive.log().crash(CrashKind::PowerCut, world.position());
    // Data 1 and growth 2, without growth 1 and data 2.
    let image = point.image_of(0b1001);
    assert_eq!(image.len(), 1024);
    assert_eq!((sector_of(&image, 0), sector_of(&image, 1)), ([1; 512], [0; 512]));
    Ok(())
}

#[test]
fn cutting_off_growing_and_punching_are_events_of_their_own() -> Result<()> {
    let world = World::new(1);
    let drive = Drive::from_content(&world, Content::of(&[5; 8192]), DriveOptions::default());
    world.run(async {
        drive.set_len(1000).await?;
        drive.set_len(3000).await?;
        drive.write_zeroes(span(100, 50), Zeroes::MayUnmap).await?;
        drive.discard(span(0, 512)).await
    })?;
    let point = drive.log().crash(CrashKind::PowerCut, world.position());
    let images: BTreeMap<u64, Content> = point.subsets().expect("four changes").collect();
    assert_eq!(images[&0b0000], Content::of(&[5; 8192]));
    assert_eq!(images[&0b0001], Content::of(&[5; 1000]));
    assert_eq!(images[&0b0010], Content::of(&[5; 3000]), "grown to 3000 from a longer file is cut off there");
    let mut cut_and_grown = Content::of(&[5; 1000]);
    cut_and_grown.set_len(3000);
    assert_eq!(images[&0b0011], cut_and_grown);
    let mut zeroed = Content::of(&[5; 8192]);
    zeroed.zero(span(100, 50));
    assert_eq!(images[&0b0100], zeroed);
    assert_eq!(sector_of(&images[&0b1000], 0), [0; 512]);
    assert_eq!(images[&0b1111], drive.content());
    Ok(())
}

/// Two small writes into one sector: it may be as before, as after the first, or as after the second; never
/// the second without the first, because no medium ever held that.
#[test]
fn a_sector_shared_by_small_writes_has_only_values_it_once_had() -> Result<()> {
    let world = World::new(1);
    let drive = drive_of(&world, 4096, DriveOptions::default());
    world.run(async {
        write(&*drive, 0, 100, 1).await?;
        write(&*drive, 100, 100, 2).await
    })?;
    let point = drive.log().crash(CrashKind::PowerCut, world.position());
    let seen: HashSet<[u8; 512]> =
        point.subsets().expect("two changes").map(|(_, image)| sector_of(&image, 0)).collect();
    let (mut first, mut second) = ([0; 512], [0; 512]);
    first[..100].fill(1);
    second[..100].fill(1);
    second[100..200].fill(2);
    assert_eq!(seen, HashSet::from([[0; 512], first, second]));
    Ok(())
}

#[test]
fn a_drive_that_promises_pages_tears_between_pages() -> Result<()> {
    let world = World::new(1);
    let drive = drive_of(&world, 1 << 16, DriveOptions { granule: Granule::Page, ..DriveOptions::default() });
    world.run(write(&*drive, 0, 12_288, 1))?;
    let point = drive.log().crash(CrashKind::PowerCut, world.position());
    assert_eq!(point.pending()[0].units(), 3);
    let mut digests = HashSet::new();
    for image in point.tears(0, 0) {
        digests.insert(image.digest());
        assert!(image.to_vec().chunks(4096).all(|page| page == [0; 4096] || page == [1; 4096]));
    }
    assert_eq!(digests.len(), 8);
    Ok(())
}

/// What happens to two drives lies on one line, so one position cuts both.
#[test]
fn one_position_is_one_moment_for_all_drives() -> Result<()> {
    let world = World::new(1);
    let [data, journal] = [0; 2].map(|_| drive_of(&world, 4096, DriveOptions::default()));
    world.run(async {
        write(&*data, 0, 512, 1).await?;
        data.flush().await?;
        write(&*journal, 0, 512, 2).await
    })?;
    let mut seen = HashSet::new();
    let positions =
        [data.log(), journal.log()].iter().flat_map(|log| log.crash_positions()).collect::<Vec<_>>();
    for position in positions.into_iter().filter(|position| *position >= data.log().crash_positions()[0]) {
        let images = |drive: &Drive| {
            let point = drive.log().crash(CrashKind::PowerCut, position);
            let images = point.subsets().expect("one change");
            images.map(|(_, image)| sector_of(&image, 0)[0]).collect::<Vec<u8>>()
        };
        for data in images(&data) {
            for journal in images(&journal) {
                seen.insert((data, journal));
            }
        }
    }
    assert_eq!(seen, HashSet::from([(0, 0), (1, 0), (1, 2)]), "never the journal without the data");
    Ok(())
}

#[test]
fn a_log_can_be_read() {
    let world = World::new(1);
    let drive = drive_of(&world, 4096, DriveOptions::default());
    world.run(async {
        write(&*drive, 4000, 200, 1).await.expect("a write succeeds");
        drive.flush().await.expect("a flush succeeds");
    });
    let expected = format!(
        "#0–#1 write {span}: 2 sectors\n#0–#1 write {span}: grow to 0x1068\n#2–#3 flush {none}: nothing\n",
        span = span(4000, 200),
        none = span(0, 0)
    );
    assert_eq!(drive.log().to_string(), expected);
}

/// A busy story with everything in it, for the general rules.
fn busy_drive(world: &World, history: History) -> Arc<Drive> {
    let options = DriveOptions { delay: any_order(), history, ..DriveOptions::default() };
    let drive = drive_of(world, 40_000, options);
    let tasks: Vec<_> = (1..=3u8)
        .map(|value| {
            let (drive, mut random) = (drive.clone(), world.random());
            world.spawn(async move {
                for step in 0..15 {
                    let start = random.below(60_000);
                    let len = 1 + random.index(5_000);
                    let value = value * 16 + step;
                    match random.below(8) {
                        0 => drive.flush().await,
                        1 => drive.write_zeroes(span(start, len as u64), Zeroes::Allocated).await,
                        2 => drive.discard(span(start, len as u64)).await,
                        3 => drive.set_len(30_000 + start / 2).await,
                        4 => drive.preallocate(span(start, len as u64)).await,
                        _ => write(&*drive, start, len, value).await,
                    }
                    .expect("nothing fails");
                }
            })
        })
        .collect();
    world.run(join_all(tasks));
    drive
}

#[test]
fn with_everything_kept_a_power_cut_leaves_what_was_visible() {
    for seed in 0..20 {
        let world = World::shuffled(seed);
        let drive = busy_drive(&world, History::Whole);
        let log = drive.log();
        for position in log.crash_positions() {
            let visible = log.visible_at(position);
            let point = log.crash(CrashKind::PowerCut, position);
            let in_flight = |index: usize| {
                let id = point.pending()[index].event().expect("an event");
                let event = &log.events()[usize::try_from(id).expect("a small log")];
                event.ended().is_none_or(|ended| ended >= position)
            };
            let image = point.image(|index| if in_flight(index) { Fate::Lost } else { Fate::Kept });
            assert_eq!(image, *visible, "seed {seed} at {position}");
            let killed = log.crash(CrashKind::ProcessKill, position);
            assert_eq!(killed.base(), visible);
            let dropped = log.crash(CrashKind::FailedFlush, position);
            let all = dropped.image(|index| match dropped.pending()[index].event() {
                None => Fate::Kept,
                Some(_) => Fate::Lost,
            });
            assert_eq!(all, *visible, "seed {seed} at {position}: all dirty pages");
        }
    }
}

#[test]
fn a_log_of_what_is_pending_gives_the_same_crashes_now() {
    for seed in 0..20 {
        let crashes = [History::Whole, History::Pending].map(|history| {
            let world = World::shuffled(seed);
            let drive = busy_drive(&world, history);
            let log = drive.log();
            let images = |kind| {
                let point = log.crash(kind, world.position());
                let mut random = Random::from_seed(seed);
                (0..50).map(|_| point.random_image(&mut random).digest()).collect::<Vec<_>>()
            };
            let kinds = [CrashKind::PowerCut, CrashKind::ProcessKill, CrashKind::FailedFlush];
            (log.events().len(), kinds.map(images))
        });
        assert_eq!(crashes[0].1, crashes[1].1, "seed {seed}");
        assert!(crashes[0].0 > crashes[1].0, "seed {seed}: it is shorter");
    }
}

#[test]
fn all_subsets_are_all_images_and_corners_are_among_them() {
    let world = World::new(3);
    let drive = drive_of(&world, 1 << 16, DriveOptions::default());
    world.run(async {
        for step in 0..6u8 {
            write(&*drive, u64::from(step) * 3_000, 5_000, step + 1).await.expect("a write succeeds");
        }
    });
    let point = drive.log().crash(CrashKind::PowerCut, world.position());
    let subsets: BTreeMap<u64, Content> = point.subsets().expect("six changes").collect();
    assert_eq!(subsets.len(), 64);
    for (kept, image) in &subsets {
        assert_eq!(*image, point.image_of(*kept));
    }
    let images: HashSet<u64> = subsets.into_values().map(|image| image.digest()).collect();
    assert_eq!(images.len(), 64);
    let corners: Vec<Content> = point.corners().collect();
    assert_eq!(corners.len(), 7 + 6 + 6);
    assert!(corners.iter().all(|corner| images.contains(&corner.digest())));
}

#[test]
fn after_a_failed_flush_pages_may_be_gone_although_they_read_back() -> Result<()> {
    let world = World::new(1);
    let faults = FaultPlan::of(Fault::nth(Operation::Flush, 1));
    let drive = drive_of(&world, 1 << 16, DriveOptions { faults, ..DriveOptions::default() });
    world.run(async {
        write(&*drive, 0, 4096, 1).await?;
        drive.flush().await?;
        for page in 0..4 {
            write(&*drive, page * 8192, 4096, 2).await?;
        }
        assert_eq!(drive.flush().await.expect_err("it fails").kind(), ErrorKind::Io);
        assert!(drive.is_poisoned());
        for refused in [write(&*drive, 0, 512, 3).await, drive.flush().await, drive.set_len(0).await] {
            assert_eq!(refused.expect_err("poisoned").kind(), ErrorKind::Poisoned);
        }
        assert_eq!(read(&*drive, 8192, 4096).await?, [2; 4096], "it reads back");
        Ok::<_, vellum_core::Error>(())
    })?;
    let log = drive.log();
    assert_eq!(log.events().last().expect("the flush").outcome(), Outcome::Failed);
    let point = log.crash(CrashKind::ProcessKill, world.position());
    assert_eq!(point.kind(), CrashKind::FailedFlush, "a kill does not bring the pages back");
    let mut images = HashSet::new();
    for (_, image) in point.subsets().expect("four pages") {
        for page in 0..4 {
            let value = sector_of(&image, page * 16)[0];
            assert!(value == 2 || value == u8::from(page == 0), "page {page} is {value}");
        }
        images.insert(image.digest());
    }
    assert_eq!(images.len(), 16);
    Ok(())
}

/// "After any restart, fdatasync before trusting what is read."
#[test]
fn after_a_killed_process_the_next_one_reads_what_is_not_durable_yet() -> Result<()> {
    let world = World::new(1);
    let drive = drive_of(&world, 1 << 16, DriveOptions::default());
    world.run(write(&*drive, 0, 4096, 1))?;
    let next = drive.restart(&mut world.random());
    let gone = world.run(write(&*drive, 0, 512, 9)).expect_err("the old process is dead");
    assert_eq!(gone.kind(), ErrorKind::Io);
    assert_eq!(world.run(read(&*next, 0, 4096))?, [1; 4096]);
    let point = next.log().crash(CrashKind::PowerCut, world.position());
    assert_eq!(point.pending().len(), 1, "a power cut may still take it");
    world.run(next.flush())?;
    assert!(next.log().crash(CrashKind::PowerCut, world.position()).pending().is_empty());
    Ok(())
}

#[test]
fn restarted_after_a_failed_flush_the_drive_works_and_shows_what_is_left() -> Result<()> {
    let mut left = HashSet::new();
    for seed in 0..40 {
        let world = World::new(seed);
        let faults = FaultPlan::of(Fault::nth(Operation::Flush, 0));
        let drive = drive_of(&world, 1 << 14, DriveOptions { faults, ..DriveOptions::default() });
        world.run(async {
            write(&*drive, 0, 512, 1).await?;
            write(&*drive, 8192, 512, 1).await?;
            drive.flush().await.expect_err("it fails");
            let next = drive.restart(&mut world.random());
            left.insert([read(&*next, 0, 1).await?[0], read(&*next, 8192, 1).await?[0]]);
            write(&*next, 0, 512, 2).await?;
            next.flush().await?;
            let point = next.log().crash(CrashKind::PowerCut, world.position());
            assert!(point.pending().is_empty());
            assert_eq!(*point.base(), next.content());
            Ok::<_, vellum_core::Error>(())
        })?;
    }
    assert_eq!(left.len(), 4, "each page was dropped in some world: {left:?}");
    Ok(())
}

/// Contract 7: dropped half way, it happens later or never, and the log knows it as in flight until then.
#[test]
fn a_write_whose_future_is_dropped_happens_later_or_never() {
    let (mut happened, mut not) = (0, 0);
    for seed in 0..40 {
        let world = World::new(seed);
        let drive = drive_of(&world, 4096, DriveOptions { delay: any_order(), ..DriveOptions::default() });
        let task = world.spawn({
            let drive = drive.clone();
            async move { drive.write(at(0), Buffer::copy_of(&[1; 512])).await }
        });
        world.run(async {
            world.yield_now().await;
            task.abort().await;
            assert_eq!((drive.in_flight(), drive.log().events()[0].outcome()), (0, Outcome::InFlight));
            assert_eq!(drive.log().crash(CrashKind::PowerCut, world.position()).pending().len(), 1);
            assert_eq!(drive.content(), Content::zeroed(4096));
            world.sleep(std::time::Duration::from_secs(1)).await;
        });
        let log = drive.log();
        let written = sector_of(log.visible(), 0) == [1; 512];
        assert_eq!(written, log.events()[0].outcome() == Outcome::Done, "seed {seed}");
        if written {
            happened += 1;
        } else {
            not += 1;
        }
    }
    assert!(happened > 5 && not > 5, "happened {happened}, not {not}");
}

#[test]
fn an_unplugged_drive_answers_nothing_and_its_crash_is_one_of_the_possible_ones() {
    let world = World::shuffled(5);
    let drive = busy_drive(&world, History::Pending);
    let image = drive.crash(CrashKind::PowerCut, &mut world.random());
    let kind = world.run(read(&*drive, 0, 1)).expect_err("no power").kind();
    assert_eq!(kind, ErrorKind::Io);
    let again = Drive::from_content(&world, image.clone(), DriveOptions::default());
    assert_eq!(again.content(), image);
    assert_eq!(again.len(), image.len());
}
