//! Every crash of flash and of the homes, recovered and judged. `VELLUM_EXPLORE=all` explores for longer:
//! more than three million states. With `VELLUM_EXPLORE_SECONDS=N` no setup begins another program after N seconds.

mod common;
use vellum_flash as flash;

use std::collections::HashSet;
use std::time::Instant;

use common::explorer::{Counts, Setup, explore};

/// How many programs are tried, where this many are usual.
fn scaled(programs: u64) -> u64 {
    let is_soak = std::env::var("VELLUM_EXPLORE").is_ok_and(|what| what == "all");
    programs * if is_soak { 20 } else { 1 }
}

#[allow(clippy::disallowed_methods, reason = "how long it took is only told")]
fn all(name: &str, setup: &Setup, programs: u64) {
    let (mut counts, mut seen) = (Counts::default(), HashSet::new());
    let begun = Instant::now();
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (one, seconds) = (number("VELLUM_EXPLORE_SEED"), number("VELLUM_EXPLORE_SECONDS"));
    for seed in one.map_or(0..scaled(programs), |seed: u64| seed..seed + 1) {
        if seconds.is_some_and(|most| begun.elapsed().as_secs() >= most) {
            break;
        }
        match explore(setup, seed, &mut seen) {
            Ok(more) => counts += more,
            Err(what) => {
                tell(name, &counts, 1, begun);
                panic!("{name}: {what}");
            }
        }
    }
    tell(name, &counts, 0, begun);
}

/// In the words that a soak adds up. Each explorer has one thread.
#[allow(clippy::print_stderr, reason = "how much was looked at is worth knowing")]
fn tell(name: &str, counts: &Counts, violations: u64, begun: Instant) {
    let Counts { programs, crashes, states, judged, drained, nested } = *counts;
    let seconds = begun.elapsed().as_secs_f64();
    let rate = states as f64 / seconds.max(0.1);
    eprintln!(
        "explored flash, {name}: {programs} programs, {crashes} crashes, {states} states, {judged} judged, {drained} drained, \
         {nested} nested, {violations} violations; {seconds:.1} s of a core, {rate:.0} states per second"
    );
}

#[test]
fn few_slots() {
    all("few slots", &Setup::usual(9), 40);
}

#[test]
fn some_slots() {
    all("some slots", &Setup { steps: 70, ..Setup::usual(16) }, 30);
}

#[test]
fn slots_for_all() {
    all("slots for all", &Setup { steps: 90, ..Setup::usual(64) }, 25);
}

/// Slices are longer than a sector, so they can be torn.
#[test]
fn many_groups() {
    all("many groups", &Setup { blocks: 250, steps: 120, ..Setup::usual(200) }, 12);
}

#[test]
fn two_guests() {
    all("two guests", &Setup { guests: 2, steps: 25, ..Setup::usual(12) }, 40);
}

#[test]
fn two_disks_with_two_guests_each() {
    all("two disks", &Setup { disks: 2, guests: 2, steps: 14, blocks: 10, ..Setup::usual(20) }, 40);
}

/// Free slots are discarded while others are written, and used again.
#[test]
fn discards() {
    all("discards", &Setup { trims: true, steps: 70, ..Setup::usual(24) }, 20);
    let two = Setup { guests: 2, steps: 25, ..Setup::usual(24) };
    all("discards, two guests", &Setup { trims: true, ..two }, 30);
}

/// What is short is memory: clean blocks are given up for it, and dirty ones go home.
#[test]
fn little_memory() {
    all("little memory", &Setup { memory: Some(900), steps: 70, ..Setup::usual(64) }, 30);
    let two = Setup { disks: 2, guests: 2, steps: 14, blocks: 10, ..Setup::usual(40) };
    all("little memory, two disks", &Setup { memory: Some(1000), ..two }, 20);
    let many = Setup { blocks: 250, steps: 120, ..Setup::usual(200) };
    all("little memory, many groups", &Setup { memory: Some(1500), ..many }, 6);
}

/// Every other opening has less memory than the map takes: it leaves clean blocks out and writes their slices again.
#[test]
fn openings_with_less_memory() {
    let less =
        Setup { blocks: 150, memory: Some(8000), shrinks: true, nested_one_in: 60, ..Setup::usual(64) };
    all("openings with less memory", &Setup { steps: 60, ..less.clone() }, 12);
    let two = Setup { disks: 2, guests: 2, steps: 14, blocks: 80, slots: 40, ..less.clone() };
    all("openings with less memory, two disks", &two, 8);
    // Two parts: one is read when the other is in memory.
    let parts = Setup { slots: 4200, blocks: 250, steps: 60, ..less.clone() };
    all("openings with less memory, two parts", &parts, 4);
    all("openings with less memory, through", &Setup { through_from: 0, steps: 60, ..less }, 8);
}

#[test]
fn written_through() {
    let through = Setup { through_from: 0, ..Setup::usual(16) };
    all("written through, few slots", &Setup { steps: 60, ..Setup { slots: 9, ..through.clone() } }, 20);
    all("written through", &Setup { steps: 60, ..through.clone() }, 20);
    all("written through, two guests", &Setup { guests: 2, steps: 25, ..through }, 30);
}

#[test]
fn written_through_beside_written_back() {
    let both = Setup { disks: 2, through_from: 1, guests: 2, steps: 14, blocks: 10, ..Setup::usual(20) };
    all("through beside back", &both, 30);
    all("through beside back, faults", &Setup { faults: true, ..both }, 30);
}

#[test]
fn what_fails_and_then_crashes() {
    all("faults", &Setup { faults: true, ..Setup::usual(12) }, 60);
    all(
        "faults, several guests",
        &Setup { faults: true, disks: 2, guests: 2, steps: 10, blocks: 10, ..Setup::usual(12) },
        40,
    );
}

#[test]
fn a_slot_is_not_reused_beside_a_reader() {
    common::readers::slots_are_not_reused_beside_a_reader().unwrap();
}
