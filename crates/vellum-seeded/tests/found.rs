//! Mistakes that the tests of the formats find by other means than the crash explorer: a trial of those tests is run
//! with the mistake switched on, and something must be wrong then.
//!
//! The trials stand beside the tests that run them without a mistake, in `crates/vellum-format/tests`.

extern crate vellum_seeded as vellum_format;

#[path = "../../vellum-format/tests/common/mod.rs"]
mod common;
#[path = "../../vellum-format/tests/subjects/device.rs"]
mod device;
#[path = "../../vellum-format/tests/native_encrypted/trials.rs"]
mod encrypted;
#[path = "../../vellum-format/tests/native/fragments.rs"]
mod fragments;
#[path = "../../vellum-format/tests/freed/trials.rs"]
mod freed;
#[path = "../../vellum-format/tests/space/host.rs"]
mod host;
#[path = "../../vellum-format/tests/changes/images.rs"]
mod images;
#[path = "../../vellum-format/tests/subjects/late.rs"]
mod late;
#[path = "../../vellum-format/tests/late/trials.rs"]
mod late_writes;
#[path = "../../vellum-format/tests/lent/trials.rs"]
mod lent;
#[path = "../../vellum-format/tests/threads/race.rs"]
mod race;
#[path = "../../vellum-format/tests/native/trials.rs"]
mod trials;
#[path = "../../vellum-format/tests/threads/volatile.rs"]
mod volatile;

use common::native::NativeSetup;
use futures_lite::future::block_on;
use images::{Change, DEVICE, of_size};
use vellum_format::sabotage::{Bug, put_in};
use vellum_sim::Effect;
use vellum_sim::explore::{Care, explore_offline};

/// Does this with a mistake switched on in the engine of this thread.
fn with<T>(bug: Bug, what: impl FnOnce() -> T) -> T {
    put_in(Some(bug));
    let done = what();
    put_in(None);
    done
}

/// The mistake that all trials of freed clusters look for: a commit that does not wait for changes that are half done.
#[test]
fn a_seal_beside_changes_is_found() {
    const BUG: Bug = Bug::SealedBesideChanges;
    assert!(with(BUG, || freed::foreign_bytes(2)).is_err(), "version 2");
    assert!(with(BUG, || freed::foreign_bytes(3)).is_err(), "version 3");
    assert!(with(BUG, freed::compressed_data).is_err(), "compressed");
    assert!(with(BUG, freed::late_write).is_err(), "late write");
    let yielding = |seed| freed::yielding_threads(3, seed, || put_in(Some(BUG)));
    assert!((0..40).any(|seed| yielding(seed).is_err()), "threads that yield");
}

/// The search for plain text finds some where there is.
#[test]
fn a_piece_that_is_not_encrypted_is_found() {
    for setup in common::native::encrypted_setups().into_iter().filter(|setup| setup.options.has_table) {
        let found = with(Bug::PlainInJournal, || encrypted::nothing_is_readable(setup.clone()));
        assert!(found.is_err_and(|what| what.contains("readable")), "{}", setup.name);
        let found = with(Bug::MovedWithOldPlace, || encrypted::nothing_is_readable(setup.clone()));
        assert!(found.is_err(), "{}", setup.name);
    }
}

#[test]
fn what_was_overwritten_comes_back() {
    for options in late_writes::all() {
        let read = with(Bug::LateWritesMet, || late_writes::read_again(&options));
        assert_eq!(read, 2, "{options:?}: the seeded mistake shows");
    }
}

#[test]
fn what_was_flushed_beside_a_late_write_is_lost() {
    for options in late_writes::all().into_iter().filter(|options| options.journal.is_some()) {
        let beside = with(Bug::LateWritesMet, || late_writes::flushed_beside(&options));
        assert_ne!(beside, Some(7), "{options:?}: the seeded mistake shows");
    }
}

#[test]
fn a_checksum_of_bytes_that_may_still_change_is_found() {
    for kind in lent::Kind::all().into_iter().filter(lent::Kind::has_checks) {
        // The same seeds as in the test without it, where nothing is found.
        let found = with(Bug::LentChecked, || {
            (0..lent::SEEDS).find_map(|seed| block_on(lent::run(&kind, seed, 12)).err())
        });
        assert!(found.is_some(), "{}: nobody noticed", kind.name());
    }
}

/// What explores each change finds the mistake that was made for it.
#[test]
#[allow(clippy::print_stderr, reason = "how each is found is worth knowing")]
fn mistakes_in_changes_are_found() {
    use images::{table, zoned};
    let larger = |setup| of_size(setup, 1 << 20);
    let short = NativeSetup::with_the_shortest_table;
    for (change, bug) in [
        (Change::revert(table(), "large", None), Bug::ResizedUnfinished),
        (Change::revert(table(), "large", None), Bug::RevertForgotten),
        (Change::revert(zoned(), "small", None), Bug::MarkGoneEarly),
        (Change::grow(larger(table()), None), Bug::GrownBeforeZeros),
        (Change::shrink(table(), None), Bug::ClearedBeforeCut),
        (Change::grow_into_freed_units(short(larger(table()))), Bug::GrownBeforeZeros),
        (Change::grow_into_freed_units(short(larger(table()))), Bug::PartNotZero),
        (Change::grow_past_the_table(short(table()), Some(DEVICE)), Bug::PartIsFree),
        (Change::shrink_from_a_part(short(table())), Bug::ClearedBeforeCut),
    ] {
        let care = Care { one_in: 1, ..images::care() };
        let found = with(bug, || explore_offline(&change, &care)).expect_err("it is not found");
        eprintln!("{bug:?}: {found}");
    }
}

#[test]
fn an_embedded_allocation_that_is_not_invalidated_comes_back() {
    let found = with(Bug::NotInvalidated, || trials::after_a_failed_allocation(Effect::All));
    assert_eq!(found, [2; 4096], "the mistake is found");
}

#[test]
fn what_is_kept_without_its_space_is_found() {
    let failed = with(Bug::IndexNotReserved, || {
        (0..24).any(|pages| block_on(trials::kept_on_a_full_host(pages)).is_err())
    });
    assert!(failed, "the mistake is not found");
}

#[test]
fn a_write_under_way_is_lost_where_units_are_held_again() {
    assert!(with(Bug::HeldAgain, trials::lost_beside_a_deletion).len() >= 3, "the mistake is found");
}

#[test]
fn a_copy_that_was_made_in_vain_is_found() {
    let found = with(Bug::HoldNotLookedAtAgain, || {
        trials::setups().iter().filter(|setup| trials::written_beside_a_copy(setup).is_err()).count()
    });
    assert_eq!(found, trials::setups().len(), "the mistake is found");
}

#[test]
fn a_copy_that_counts_although_the_zone_was_released_is_found() {
    let found = with(Bug::HoldNotLookedAtAgain, fragments::with_the_zone_released);
    assert!(found.is_some(), "the mistake is found");
}

#[test]
fn a_copy_that_does_not_wait_for_writes_is_found() {
    let found = with(Bug::MovedUnderWriters, fragments::writes_on_their_way);
    assert!(found.is_some(), "the mistake is found");
}

/// How soon a race finds a mistake: within some twenty seeds.
#[allow(clippy::print_stderr, reason = "how soon each is found is worth knowing")]
fn finds(kind: &race::Kind, bug: Bug, on_thread: fn()) {
    let found = (0..300).find_map(|seed| Some((seed, race::race(kind, seed, on_thread).err()?)));
    let (seed, what) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
    eprintln!("{bug:?}: found with seed {seed}: {what}");
}

#[test]
fn units_that_are_held_again_are_found() {
    finds(&race::table(), Bug::HeldAgain, || put_in(Some(Bug::HeldAgain)));
}

#[test]
fn units_that_move_under_writers_are_found() {
    finds(&race::zoned(), Bug::MovedUnderWriters, || put_in(Some(Bug::MovedUnderWriters)));
}
