//! The crash explorer of the flash cache finds each mistake.

extern crate vellum_flash_seeded as vellum_flash;
use vellum_flash as flash;

#[path = "../../vellum-flash/tests/common/mod.rs"]
mod common;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::explorer::{Counts, Setup, explore};
use common::named::{Counts as FileCounts, explore as explore_files};
use common::tables::explore as explore_tables;
use vellum_flash::sabotage::{Bug, put_in};

/// What is tried, in turn.
fn setups() -> Vec<Setup> {
    vec![
        Setup { positions: 60, nested_one_in: 60, ..Setup::usual(9) },
        Setup { guests: 2, steps: 25, nested_one_in: 100, ..Setup::usual(12) },
        Setup { steps: 90, nested_one_in: 60, ..Setup::usual(64) },
        Setup { faults: true, nested_one_in: 100, ..Setup::usual(12) },
        Setup { blocks: 250, steps: 120, nested_one_in: 100, ..Setup::usual(200) },
        Setup { disks: 2, guests: 2, steps: 14, blocks: 10, ..Setup::usual(20) },
        Setup { guests: 2, steps: 25, trims: true, ..Setup::usual(24) },
    ]
}

/// The same for disks that are written through.
fn through() -> Vec<Setup> {
    let through = Setup { through_from: 0, steps: 60, positions: 60, nested_one_in: 60, ..Setup::usual(16) };
    vec![
        through.clone(),
        Setup { guests: 2, steps: 25, ..through.clone() },
        Setup { slots: 64, steps: 90, ..through.clone() },
        Setup { disks: 2, through_from: 1, guests: 2, steps: 14, blocks: 10, ..through },
    ]
}

/// The same with openings that have less memory than the map takes.
fn shrinking() -> Vec<Setup> {
    let less = Setup { blocks: 150, steps: 60, memory: Some(8000), shrinks: true, ..Setup::usual(64) };
    let less = Setup { positions: 60, nested_one_in: 20, ..less };
    vec![
        less.clone(),
        Setup { through_from: 0, ..less.clone() },
        Setup { slots: 4200, blocks: 250, steps: 90, ..less },
    ]
}

/// Explores until the mistake is found: a state is not what it may be, or the cache notices that it contradicts
/// itself.
#[allow(clippy::print_stderr, reason = "how soon each is found is worth knowing")]
fn find(bug: Bug, setups: &[Setup]) {
    put_in(Some(bug));
    let (mut counts, mut seen) = (Counts::default(), HashSet::new());
    for seed in 0..60 {
        for setup in setups {
            let explored = catch_unwind(AssertUnwindSafe(|| explore(setup, seed, &mut seen)));
            let what = match explored {
                Ok(Ok(more)) => {
                    counts += more;
                    continue;
                }
                Ok(Err(what)) => what,
                Err(_) => "the cache contradicts itself".to_owned(),
            };
            put_in(None);
            let what: String = what.chars().take(600).collect();
            eprintln!("{bug:?}: found after {} states: {what}", counts.judged);
            return;
        }
    }
    put_in(None);
    panic!("{bug:?} was not found: {counts:?}");
}

macro_rules! found {
    ($($test:ident: $bug:ident in $setups:ident,)*) => {
        $(
            #[test]
            fn $test() {
                find(Bug::$bug, &$setups());
            }
        )*

        #[test]
        fn every_mistake_has_a_test() {
            let tested = [$(Bug::$bug,)* Bug::ReusedBesideReaders];
            let tested: Vec<Bug> = tested.into_iter().chain(OF_TABLES).collect();
            assert!(Bug::ALL.iter().all(|bug| tested.contains(bug)));
        }
    };
}

found! {
    no_checks: NoChecks in setups,
    clean_without_checks: CleanWithoutChecks in setups,
    in_place_over_clean: InPlaceOverClean in setups,
    in_place_unproven: InPlaceUnproven in setups,
    in_place_unsealed: InPlaceUnsealed in setups,
    in_place_other_sectors: InPlaceOtherSectors in setups,
    carried_over_lost: CarriedOverLost in setups,
    overwrite_not_counted: OverwriteNotCounted in setups,
    written_past_claim: WrittenPastClaim in setups,
    discard_forgotten: DiscardForgotten in setups,
    run_not_left: RunNotLeft in setups,
    reused_before_durable: ReusedBeforeDurable in setups,
    reused_beside_trim: ReusedBesideTrim in setups,
    proven_when_durable: ProvenWhenDurable in setups,
    newest_forgotten: NewestForgotten in setups,
    tail_before_slices: TailBeforeSlices in setups,
    slice_too_early: SliceTooEarly in setups,
    slice_over_itself: SliceOverItself in setups,
    published_before_written: PublishedBeforeWritten in setups,
    flush_error_ignored: FlushErrorIgnored in setups,
    home_before_durable: HomeBeforeDurable in setups,
    home_not_flushed: HomeNotFlushed in setups,
    clean_though_touched: CleanThoughTouched in setups,
    run_home_before_durable: RunHomeBeforeDurable in setups,
    run_gone_unflushed: RunGoneUnflushed in setups,
    admitted_though_touched: AdmittedThoughTouched in setups,
    unverified_kept: UnverifiedKept in setups,
    neighbours_unchecked: NeighboursUnchecked in setups,
    neighbour_elsewhere: NeighbourElsewhere in setups,
    neighbour_not_dropped: NeighbourNotDropped in setups,
    neighbour_forgotten: NeighbourForgotten in setups,
    settle_left_out: SettleLeftOut in setups,
    slice_behind_forgotten: SliceBehindForgotten in setups,
    joined_though_dirty: JoinedThoughDirty in setups,
    dirty_left_out: DirtyLeftOut in shrinking,
    short_left: ShortLeft in shrinking,
    short_unflushed: ShortUnflushed in shrinking,
    region_after_write: RegionAfterWrite in through,
    settled_home_unflushed: SettledHomeUnflushed in through,
    settled_flash_unflushed: SettledFlashUnflushed in through,
    settled_though_written: SettledThoughWritten in through,
    through_over_checked: ThroughOverChecked in through,
    void_kept: VoidKept in through,
    contested_kept: ContestedKept in through,
}

#[test]
fn without_a_mistake_nothing_is_found() {
    let mut seen = HashSet::new();
    for setup in setups().into_iter().chain(through()).chain(shrinking()) {
        explore(&setup, 1, &mut seen).unwrap();
    }
}

#[test]
fn reused_beside_readers() {
    put_in(Some(Bug::ReusedBesideReaders));
    let trial = catch_unwind(common::readers::slots_are_not_reused_beside_a_reader);
    put_in(None);
    assert!(!matches!(trial, Ok(Ok(()))), "the slot has another owner while it is read");
}

/// Mistakes with tables, which only the explorer of tables can find.
const OF_TABLES: [Bug; 7] = [
    Bug::TableKeptThoughWritten,
    Bug::TableAnewThoughWritten,
    Bug::ChangeUnderWayForgotten,
    Bug::NameLeft,
    Bug::TablesUnknownAtOpening,
    Bug::TablesNamedThoughWritten,
    Bug::TablesNamedUnflushed,
];

#[test]
#[allow(clippy::print_stderr, reason = "how soon each is found is worth knowing")]
fn mistakes_with_tables() {
    for bug in OF_TABLES {
        put_in(Some(bug));
        let mut states = 0;
        let found = (0..400u64).find_map(|seed| {
            let slots = if seed.is_multiple_of(2) { 64 } else { 24 };
            match explore_tables(slots, seed) {
                Ok(counts) => {
                    states += counts.states;
                    None
                }
                Err(what) => Some(what),
            }
        });
        put_in(None);
        let what = found.unwrap_or_else(|| panic!("{bug:?} was not found in {states} states"));
        eprintln!("{bug:?}: found after {states} states: {what}");
    }
}

/// The one of them that files without a session can have too.
#[test]
fn a_file_that_keeps_its_name() {
    put_in(Some(Bug::NameLeft));
    let mut counts = FileCounts::default();
    let found = (0..60u64).find_map(|seed| explore_files(64, seed, &mut counts).err());
    put_in(None);
    assert!(found.is_some(), "NameLeft was not found: {counts:?}");
}
