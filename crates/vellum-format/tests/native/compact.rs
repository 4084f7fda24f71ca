//! A device on which zones are emptied: the result, that nothing is lost meanwhile, that no request fails
//! because of it, and that it can be switched off.

use std::time::Duration;

use futures_lite::future::zip;
use vellum_core::{Buffer, Disk, GuestOffset, Random, WriteFlags, try_join_all};
use vellum_sim::{Delay, World};

use super::fragments::{Fixture, UNIT, UNIT_LEN, UNITS, index, with_the_zone_released, writes_on_their_way};
use super::late::Fate;

#[test]
fn fragments_become_zones_again() {
    for is_fast in [true, false] {
        for compaction in [true, false] {
            let world = World::new(0);
            world.run(async {
                let mut fixture = Fixture::open(&world, Delay::none(), is_fast, compaction).await;
                fixture.make_fragments().await;
                fixture.idle(60_000).await;
                let cost = fixture.cost_of_new_ones().await;
                match compaction {
                    // One write each; and no more than a few for the zone that is opened.
                    true => assert!((12..=16).contains(&cost), "fast zeros {is_fast}: {cost} writes"),
                    false => assert!(cost >= 20, "fast zeros {is_fast}: {cost} writes without it"),
                }
                assert_eq!(fixture.first_wrong().await, None);
                fixture.close().await;
            });
        }
    }
}

/// Whatever the guest does meanwhile, in whatever order the drive answers.
#[test]
fn nothing_is_lost_while_zones_are_emptied() {
    for seed in 0..16 {
        assert_eq!(wrong_after(seed), None, "seed {seed}");
    }
}

/// The first unit that is wrong when zones were emptied beside a guest.
fn wrong_after(seed: u64) -> Option<usize> {
    let world = World::new(seed);
    world.run(async {
        let delay = Delay::between(Duration::from_micros(1)..=Duration::from_millis(2));
        let mut fixture = Fixture::open(&world, delay, seed.is_multiple_of(2), true).await;
        fixture.make_fragments().await;
        let mut random = Random::from_seed(seed);
        let disk = fixture.disk.clone();
        let mut last = vec![0; fixture.model.len()];
        // Units that are there, again and again; a zone is emptied when two seconds are over.
        let writing = async {
            for turn in 0..150 {
                let mut chosen: Vec<u64> = (0..8).map(|_| random.below(UNITS - 6) / 4 * 4 + 1).collect();
                chosen.sort_unstable();
                chosen.dedup();
                let byte = 60 + turn;
                let writes = chosen.iter().map(|unit| {
                    let at = GuestOffset::new(unit * UNIT);
                    disk.write(at, Buffer::copy_of(&[byte; UNIT_LEN]), WriteFlags::default())
                });
                try_join_all(writes).await.unwrap();
                chosen.iter().for_each(|unit| last[index(*unit)] = byte);
                if random.index(6) == 0 {
                    disk.flush().await.unwrap();
                }
            }
        };
        zip(fixture.idle(3000), writing).await;
        let written = last.iter().zip(&mut fixture.model).filter(|(byte, _)| **byte != 0);
        written.for_each(|(byte, held)| *held = *byte);
        let wrong = fixture.first_wrong().await;
        fixture.close().await;
        wrong
    })
}

/// Writes that looked before a zone was held are still on their way to it when its units are copied.
#[test]
fn writes_that_are_on_their_way_are_waited_for() {
    assert_eq!(writes_on_their_way(), None);
}

/// The zone is released while a unit of it is being copied, because another request needs its space.
#[test]
fn a_copy_does_not_count_when_the_zone_was_released() {
    assert_eq!(with_the_zone_released(), None);
}

/// A request that first writes to a unit of the zone needs a copy of it, and that cannot be made.
#[test]
fn a_copy_that_fails_fails_no_write() {
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open(&world, Delay::none(), true, true).await;
        let mut random = Random::from_seed(0);
        fixture.make_plain_fragments(&mut random).await;
        fixture.late.arm(UNIT_LEN, &[Fate::Late, Fate::Fails]);
        let tending = fixture.tend(&world, 10_000);
        fixture.late.caught(1).await;
        let writes = fixture.overwrite(&world, &mut random);
        fixture.late.caught(2).await;
        fixture.late.release();
        for write in writes {
            write.await.unwrap();
        }
        tending.await;
        assert_eq!(fixture.first_wrong().await, None);
        fixture.close().await;
    });
}

/// A zone that cannot be emptied is not tried forever.
#[test]
fn what_cannot_be_emptied_is_left_alone() {
    let world = World::new(0);
    world.run(async {
        let mut fixture = Fixture::open(&world, Delay::none(), true, true).await;
        let mut random = Random::from_seed(0);
        fixture.make_plain_fragments(&mut random).await;
        fixture.late.arm(UNIT_LEN, &[Fate::AllFail]);
        fixture.idle(60_000).await;
        let before = fixture.drive.counts();
        fixture.idle(600_000).await;
        let after = fixture.drive.counts_since(before);
        assert_eq!((after.flushes, after.writes, after.reads), (0, 0, 0), "every zone was tried");
        fixture.late.arm(0, &[]);
        assert_eq!(fixture.first_wrong().await, None);
        fixture.close().await;
    });
}
