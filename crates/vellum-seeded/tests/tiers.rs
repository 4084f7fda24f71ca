//! Mistakes about a fast medium: each is switched on in the engine itself, and must be found.

extern crate vellum_seeded as vellum_format;

#[path = "../../vellum-format/tests/common/mod.rs"]
mod common;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../vellum-format/tests/tiers/explorer.rs"]
mod explorer;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../vellum-format/tests/tiers/moved.rs"]
mod moved;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../vellum-format/tests/tiers/salvage.rs"]
mod salvage;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../../vellum-format/tests/tiers/trials.rs"]
mod trials;

use std::collections::HashSet;

use explorer::{Setup, explore};
use vellum_format::sabotage::{Bug, put_in};

/// At most this many programs of each setup are tried.
const PROGRAMS: u64 = 200;

/// Does this with a mistake switched on in the engine of this thread.
fn with<T>(bug: Bug, what: impl FnOnce() -> T) -> T {
    put_in(Some(bug));
    let done = what();
    put_in(None);
    done
}

#[allow(clippy::print_stderr, reason = "how soon each is found is worth knowing")]
fn found_by(setup: &Setup, bug: Bug) {
    let mut seen = HashSet::new();
    let found = with(bug, || (0..PROGRAMS).find_map(|seed| explore(setup, seed, &mut seen).err()));
    let found = found.unwrap_or_else(|| panic!("{bug:?} is not found in {}", setup.name));
    eprintln!("{bug:?}: {found}");
}

#[test]
fn by_the_explorer() {
    for bug in [Bug::PromotedBeforeDurable, Bug::CopyNotFlushed, Bug::WrittenUnderBit] {
        found_by(&Setup::table(), bug);
    }
}

#[test]
fn by_the_explorer_with_several_guests() {
    for bug in [Bug::ClearNotAwaited, Bug::MarkKept, Bug::CopiedBesideWriters] {
        found_by(&Setup::table().several(), bug);
    }
}

#[test]
fn of_moves_by_the_explorer() {
    for bug in [Bug::ClearedWhileMoved, Bug::BackUnchecked] {
        found_by(&Setup::table().moving(), bug);
    }
    found_by(&Setup::table().moving().putting_back(), Bug::MissingOpened);
    for bug in [Bug::OverForPart, Bug::OverByZeros, Bug::OverUnderBit] {
        found_by(&Setup::table().overwriting(), bug);
    }
}

#[test]
fn of_moves_by_the_explorer_with_several_guests() {
    found_by(&Setup::table().several().moving(), Bug::MovedThoughWritten);
}

#[test]
#[allow(clippy::print_stderr, reason = "how each is found is worth knowing")]
fn of_moves_by_trials() {
    for (bug, trial) in [
        (Bug::MovedOpened, moved::a_medium_of_another_time_is_refused as fn() -> trials::Trial),
        (Bug::MissingOpened, moved::a_medium_of_another_time_is_refused),
        (Bug::MovedWithoutSession, moved::a_copy_from_before_the_move_takes_nothing_away),
        (Bug::NeededRowTaken, moved::a_copy_from_before_the_move_takes_nothing_away),
        (Bug::MovedBesideSnapshot, moved::snapshots_and_moved_units_exclude_each_other),
        (Bug::SnapshotOfMoved, moved::snapshots_and_moved_units_exclude_each_other),
        (Bug::RowNotNeeded, moved::an_image_is_not_used_without_its_medium),
        (Bug::MovedSaidOnce, moved::each_copy_of_the_superblock_says_so),
        (Bug::MovedForgotten, moved::an_image_is_not_used_without_its_medium),
        (Bug::MovedUnproven, moved::a_copy_that_is_not_the_same_is_not_the_only_one),
        (Bug::ClearedWhileMoved, moved::what_is_moved_is_read_written_and_brought_back),
        (Bug::MissingCleared, salvage::what_the_tables_have_lost_does_not_keep_the_others_there),
        (Bug::MissingForgotten, salvage::what_the_tables_have_lost_does_not_keep_the_others_there),
        (Bug::CutForgotten, salvage::what_was_cut_off_stays_lost),
        (Bug::BlindIsGiven, salvage::a_bad_sector_of_the_tables_does_not_keep_the_units_there),
        (Bug::CutOnOnePage, salvage::a_cut_that_was_noted_once_counts),
        (Bug::OverForPart, salvage::what_is_lost_is_overwritten_as_a_whole),
        (Bug::OverUnderBit, salvage::what_is_lost_is_overwritten_as_a_whole),
    ] {
        let Err(found) = with(bug, trial) else { panic!("{bug:?} is not found") };
        eprintln!("{bug:?}: {found}");
    }
}

#[test]
#[allow(clippy::print_stderr, reason = "how each is found is worth knowing")]
fn by_trials() {
    for (bug, trial) in [
        (
            Bug::ForgottenMediumCounts,
            trials::a_medium_that_has_forgotten_is_not_believed as fn() -> trials::Trial,
        ),
        (Bug::LastOfMedium, trials::what_another_disk_promotes_brings_no_old_copies_back),
        (Bug::OldEntriesKept, trials::an_earlier_promotion_does_not_come_back),
        (Bug::OldEntriesKept, trials::damaged_entries_do_not_bring_an_earlier_promotion_back),
        (Bug::OldEntriesKept, trials::a_slot_that_is_written_again_has_no_entry_meanwhile),
        (Bug::BlankedLate, trials::a_slot_that_is_written_again_has_no_entry_meanwhile),
        (Bug::LaterCopyCounts, trials::a_copy_of_an_image_in_use_does_not_read_what_was_promoted_later),
        (Bug::EntryOfAnyDisk, trials::another_disk_does_not_read_what_its_row_had_before),
        (Bug::LostBitKept, trials::a_unit_that_was_written_while_its_entry_was_lost_stays_written),
        (Bug::FastSessionKept, trials::what_was_void_stays_void),
    ] {
        let Err(found) = with(bug, trial) else { panic!("{bug:?} is not found") };
        eprintln!("{bug:?}: {found}");
    }
}
