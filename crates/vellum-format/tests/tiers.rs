//! An image with a fast medium: crashes of the two, together and apart, more than 200,000 states. `VELLUM_EXPLORE=all`
//! explores twenty times as many programs: more than two million states.

mod common;
#[path = "tiers/explorer.rs"]
mod explorer;
#[path = "tiers/media.rs"]
mod media;
#[path = "tiers/mended.rs"]
mod mended;
#[path = "tiers/moved.rs"]
mod moved;
#[path = "tiers/salvage.rs"]
mod salvage;
#[path = "tiers/trials.rs"]
mod trials;

use std::collections::HashSet;
use std::time::Instant;

use explorer::{Counts, Setup, explore};

/// How many programs are tried, where this many are usual.
fn scaled(programs: u64) -> u64 {
    let is_soak = std::env::var("VELLUM_EXPLORE").is_ok_and(|what| what == "all");
    programs * if is_soak { 20 } else { 1 }
}

#[allow(clippy::disallowed_methods, reason = "how long it took is only told")]
fn all(name: &str, setup: &Setup, programs: u64) {
    let (mut counts, mut seen) = (Counts::default(), HashSet::new());
    let begun = Instant::now();
    let one = std::env::var("VELLUM_EXPLORE_SEED").ok().and_then(|seed| seed.parse().ok());
    for seed in one.map_or(0..scaled(programs), |seed: u64| seed..seed + 1) {
        match explore(setup, seed, &mut seen) {
            Ok(more) => counts += more,
            Err(what) => {
                tell(name, &counts, 1, begun);
                panic!("{name}: {what}");
            }
        }
    }
    tell(name, &counts, 0, begun);
    // What is looked for can only be found where much is read from the fast medium.
    assert!(one.is_some() || counts.fast_units > counts.states / 8, "{counts:?}");
    assert!(one.is_some() || setup.put_back_one_in == 0 || counts.put_back > counts.states / 8, "{counts:?}");
    assert!(one.is_some() || !setup.snapshots || counts.snapshots > 0, "{counts:?}");
    assert!(one.is_some() || !setup.moves || counts.moved_units > counts.states / 20, "{counts:?}");
    // Beside snapshots nothing is moved.
    let alone = counts.states / if setup.snapshots { 16 } else { 10 };
    assert!(one.is_some() || !setup.moves || counts.refused_alone > alone, "{counts:?}");
    let refuses = setup.moves && setup.put_back_one_in > 0;
    assert!(one.is_some() || !refuses || counts.refused > counts.put_back / 50, "{counts:?}");
}

/// In the words that a soak adds up.
#[allow(clippy::print_stderr, reason = "how much was looked at is worth knowing")]
fn tell(name: &str, counts: &Counts, violations: u64, begun: Instant) {
    let Counts { programs, crashes, states, judged, fast_units, nested, put_back, .. } = *counts;
    let Counts { snapshots, reverted, moved_units, refused, refused_alone, .. } = *counts;
    let seconds = begun.elapsed().as_secs_f64();
    let rate = states as f64 / seconds.max(0.1);
    eprintln!(
        "explored tiers, {name}: {programs} programs, {crashes} crashes, {states} states, {judged} judged, {nested} nested, \
         {put_back} with a medium of another time, {fast_units} units read from it, {snapshots} snapshots read, {reverted} \
         reverts, {moved_units} units moved, {refused} refused with a medium of another time, {refused_alone} without one, {violations} violations; {seconds:.1} s of a core, {rate:.0} states per second"
    );
}

#[test]
fn explored_table() {
    all("table", &Setup::table(), 28);
    all("table, snapshots", &Setup::table().with_snapshots().putting_back(), 22);
}

#[test]
fn explored_over_a_base() {
    all("over a base", &Setup::over_a_base().with_snapshots(), 20);
    all("over a base, put back", &Setup::over_a_base().putting_back(), 20);
}

#[test]
fn explored_zoned() {
    all("zoned", &Setup::zoned().with_snapshots(), 20);
    all("zoned, put back", &Setup::zoned().putting_back(), 22);
}

#[test]
fn explored_large_units() {
    all("large units", &Setup::large_units().with_snapshots().putting_back(), 17);
}

#[test]
fn explored_several_guests() {
    all("several guests", &Setup::table().several(), 20);
    all("several guests, demotions", &Setup::table().demoting().putting_back(), 20);
    all("several guests, over a base", &Setup::over_a_base().several().with_snapshots(), 17);
    all("several guests, zoned", &Setup::zoned().several().putting_back(), 17);
}

/// A first snapshot beside a first promotion: each writes the superblock, in turns over its two copies. The second has to wait until
/// the first is durable.
#[test]
fn a_copy_of_the_superblock_is_durable_before_the_other_is_written() {
    let setup = Setup::over_a_base().several().with_snapshots();
    explore(&setup, 44, &mut HashSet::new()).unwrap();
}

/// Units whose space in the image is free.
#[test]
fn explored_moves() {
    all("moves", &Setup::table().moving(), 22);
    all("moves, put back", &Setup::table().moving().putting_back(), 22);
    all("moves, over a base", &Setup::over_a_base().moving().putting_back(), 20);
    all("moves, large units", &Setup::large_units().moving().putting_back(), 17);
}

#[test]
fn explored_moves_in_zones() {
    all("moves, zoned", &Setup::zoned().moving().putting_back(), 22);
    all("moves, zoned, several guests", &Setup::zoned().several().moving().putting_back(), 17);
    all("moves, snapshots", &Setup::table().with_snapshots().moving().putting_back(), 20);
}

#[test]
fn explored_moves_of_several_guests() {
    all("moves, several guests", &Setup::table().several().moving().putting_back(), 20);
    all("moves, several guests, demotions", &Setup::table().demoting().moving().putting_back(), 20);
    all("moves, two disks", &Setup::table().several().moving().beside_another(), 20);
}

#[test]
fn explored_moves_with_faults() {
    all("moves, faults", &Setup::table().faulty().moving().putting_back(), 28);
    all("moves, faults, several guests", &Setup::over_a_base().several().faulty().moving(), 17);
    all("moves, faults, zoned", &Setup::zoned().several().faulty().moving().putting_back(), 17);
}

/// What a request has for all of a unit takes the place of what is moved, whether or not that can be read.
#[test]
fn explored_moves_that_are_overwritten() {
    all("overwritten", &Setup::table().overwriting().putting_back(), 22);
    all("overwritten, over a base", &Setup::over_a_base().several().overwriting().putting_back(), 17);
    all("overwritten, large units", &Setup::large_units().overwriting().putting_back(), 14);
    all("overwritten, zoned", &Setup::zoned().several().overwriting(), 17);
}

/// Slots go from one disk to the other.
#[test]
fn explored_two_disks() {
    all("two disks", &Setup::table().beside_another(), 22);
    all("two disks, several guests", &Setup::table().several().beside_another(), 20);
    all("two disks, demotions", &Setup { slots: 4, ..Setup::table().demoting().beside_another() }, 20);
}

#[test]
fn explored_faults() {
    all("faults", &Setup::table().faulty().with_snapshots(), 28);
    all("faults, several guests over a base", &Setup::over_a_base().several().faulty(), 17);
    all("faults, put back", &Setup::zoned().several().faulty().putting_back(), 17);
    all("faults, two disks", &Setup::table().several().faulty().beside_another(), 17);
}
