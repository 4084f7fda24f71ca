//! The crash explorer of the flash cache finds each mistake.

extern crate vellum_flash_seeded as vellum_flash;
use vellum_flash as flash;

#[path = "../../vellum-flash/tests/common/mod.rs"]
mod common;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::explorer::{Counts, Setup, explore};
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
    ]
}

/// Explores until the mistake is found: a state is not what it may be, or the cache notices that it contradicts
/// itself.
#[allow(clippy::print_stderr, reason = "how soon each is found is worth knowing")]
fn find(bug: Bug) {
    put_in(Some(bug));
    let (mut counts, mut seen) = (Counts::default(), HashSet::new());
    for seed in 0..60 {
        for setup in setups() {
            let explored = catch_unwind(AssertUnwindSafe(|| explore(&setup, seed, &mut seen)));
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
    ($($test:ident: $bug:ident,)*) => {
        $(
            #[test]
            fn $test() {
                find(Bug::$bug);
            }
        )*

        #[test]
        fn every_mistake_has_a_test() {
            let tested = [$(Bug::$bug,)* Bug::ReusedBesideReaders];
            assert!(Bug::ALL.iter().all(|bug| tested.contains(bug)));
        }
    };
}

found! {
    no_checks: NoChecks,
    clean_without_checks: CleanWithoutChecks,
    in_place_over_clean: InPlaceOverClean,
    in_place_unproven: InPlaceUnproven,
    in_place_unsealed: InPlaceUnsealed,
    in_place_other_sectors: InPlaceOtherSectors,
    carried_over_lost: CarriedOverLost,
    overwrite_not_counted: OverwriteNotCounted,
    written_past_claim: WrittenPastClaim,
    discard_forgotten: DiscardForgotten,
    run_not_left: RunNotLeft,
    reused_before_durable: ReusedBeforeDurable,
    proven_when_durable: ProvenWhenDurable,
    newest_forgotten: NewestForgotten,
    tail_before_slices: TailBeforeSlices,
    slice_too_early: SliceTooEarly,
    slice_over_itself: SliceOverItself,
    published_before_written: PublishedBeforeWritten,
    flush_error_ignored: FlushErrorIgnored,
    home_before_durable: HomeBeforeDurable,
    home_not_flushed: HomeNotFlushed,
    clean_though_touched: CleanThoughTouched,
    run_home_before_durable: RunHomeBeforeDurable,
    run_gone_unflushed: RunGoneUnflushed,
    admitted_though_touched: AdmittedThoughTouched,
    unverified_kept: UnverifiedKept,
    settle_left_out: SettleLeftOut,
    slice_behind_forgotten: SliceBehindForgotten,
}

#[test]
fn without_a_mistake_nothing_is_found() {
    let mut seen = HashSet::new();
    for setup in setups() {
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
