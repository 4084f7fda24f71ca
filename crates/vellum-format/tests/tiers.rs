//! An image with a fast medium: every crash of the two, together and apart. `VELLUM_EXPLORE=all` explores for longer.

mod common;
#[path = "tiers/explorer.rs"]
mod explorer;
#[path = "tiers/media.rs"]
mod media;
#[path = "tiers/trials.rs"]
mod trials;

use std::collections::HashSet;

use explorer::{Counts, Setup, explore};

/// How many programs are tried, where this many are usual.
fn scaled(programs: u64) -> u64 {
    let is_soak = std::env::var("VELLUM_EXPLORE").is_ok_and(|what| what == "all");
    programs * if is_soak { 20 } else { 1 }
}

#[allow(clippy::print_stderr, reason = "how much was looked at is worth knowing")]
fn all(setup: &Setup, programs: u64) {
    let (mut counts, mut seen) = (Counts::default(), HashSet::new());
    let one = std::env::var("VELLUM_EXPLORE_SEED").ok().and_then(|seed| seed.parse().ok());
    for seed in one.map_or(0..scaled(programs), |seed: u64| seed..seed + 1) {
        match explore(setup, seed, &mut seen) {
            Ok(more) => counts += more,
            Err(what) => panic!("{what}"),
        }
    }
    eprintln!("{}: {counts:?}", setup.name);
    assert!(one.is_some() || counts.fast_units > counts.states / 4, "{counts:?}");
}

#[test]
fn explored_table() {
    all(&Setup::table(), 50);
}

#[test]
fn explored_over_a_base() {
    all(&Setup::over_a_base(), 50);
}

#[test]
fn explored_zoned() {
    all(&Setup::zoned(), 50);
}

#[test]
fn explored_large_units() {
    all(&Setup::large_units(), 40);
}

#[test]
fn explored_several_guests() {
    all(&Setup::table().several(), 40);
    all(&Setup::table().demoting(), 40);
    all(&Setup::over_a_base().several(), 40);
    all(&Setup::zoned().several(), 40);
}

#[test]
fn explored_faults() {
    all(&Setup::table().faulty(), 50);
    all(&Setup::over_a_base().several().faulty(), 50);
}
