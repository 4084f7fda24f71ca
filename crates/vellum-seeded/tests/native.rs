//! The crash explorer against mistakes in the engine of the native format: each is switched on in the engine
//! itself, and must be found.

extern crate vellum_seeded as vellum_format;

#[path = "../../vellum-format/tests/common/mod.rs"]
mod common;
mod sabotaged;
#[path = "../../vellum-format/tests/subjects/mod.rs"]
mod subjects;

use subjects::native::NativeSubject;
use subjects::{failing_flushes, kinds};
use vellum_core::Random;
use vellum_format::sabotage::Bug;
use vellum_sim::explore::{Depth, Plan, Program, Thoroughness};

/// What is known to be dangerous.
const KNOWN: [&str; 13] = [
    "w4k@0 w4k@0 flush",
    "w4k@0 flush w4k@0 flush",
    "w4k@0 flush w512@1 w4k@0 flush",
    "w4k@0 flush odd@0 flush",
    "w512@0 flush discard@0 w4k@1 flush",
    "w4k@0 flush drop64k@0 w512@1 flush",
    "w64k@0 flush drop64k@0 w512@1 w512@2 flush",
    "w64k@0 flush drop64k@0 flush w512@1 flush w512@2 flush",
    "w64k@0 flush drop64k@0 flush flush w512@1 flush reopen w4k@1",
    "w64k@0 w64k@1 flush drop64k@0 flush w4k@2 flush reopen w512@3 flush",
    "w4k@0 flush w4k@0 flush w512@1 flush w4k@0 flush",
    "w4k@0 flush reopen w4k@1 flush w4k@2",
    "zero@0 flush w4k@1 reopen",
];

/// Where discards of 64 KiB make snapshots and delete them.
const KNOWN_OF_SNAPSHOTS: [&str; 4] = [
    "w4k@0 drop64k@0 w4k@0 flush",
    "w4k@0 drop64k@0 w4k@0 flush drop64k@0 w4k@0 flush drop64k@1 w4k@1 flush w512@2 flush",
    "w64k@0 w64k@1 drop64k@0 w4k@0 w4k@1 flush drop64k@0 w4k@0 flush drop64k@1 w4k@2 flush w4k@3 flush reopen",
    "w64k@0 drop64k@0 w64k@0 w64k@1 w64k@2 flush flush w512@3 flush w512@4 flush",
];

/// Where units hold their own entries: the first writes open a zone.
const KNOWN_OF_ZONES: [&str; 14] = [
    "w512@4 flush w4k@0 flush drop64k@0 w4k@0 flush",
    "w512@4 flush w512@0 flush drop64k@0 w512@0 flush drop64k@0 w4k@0 flush",
    "w512@4 flush w512@0 w4k@1 flush drop64k@0 drop64k@1 flush w512@2 w4k@0 w4k@1 flush flush w4k@2 flush w512@3 flush",
    "w512@4 flush w512@0 w4k@1 w4k@2 w4k@3 flush drop64k@0 drop64k@1 drop64k@2 flush flush flush w512@0 w4k@1 flush w4k@2 w512@0 flush",
    "w512@4 flush w4k@0 flush w4k@0 flush",
    "w512@4 flush w4k@0 w4k@1 flush w4k@0 flush reopen w4k@2",
    "w512@4 w4k@0 w4k@1 w4k@2 flush",
    "w512@4 flush w4k@0 flush drop64k@0 w4k@1 flush",
    "w512@4 flush w4k@0 flush drop64k@0 flush w512@1 flush",
    "w512@4 flush w4k@0 flush w4k@0 w512@0 drop64k@0 w4k@0 flush",
    "w512@4 flush w4k@0 w512@1 w4k@2 flush w512@0 flush w4k@3 flush w4k@1 flush",
    "w512@4 flush w4k@0 w512@1 w4k@2 w4k@3 flush w512@0 flush",
    "w512@4 flush w64k@0 flush zero@0 flush w512@0 flush",
    "w512@4 flush w4k@0 flush w4k@0 flush flush w4k@0 flush drop64k@0 flush w4k@0 flush",
];

/// As above, side by side.
const KNOWN_OF_SEVERAL: [&str; 3] = [
    "w4k@0 w4k@0 w4k@0 | flush flush flush",
    "w4k@0 flush w4k@0 flush w4k@0 | w4k@1 flush w4k@1 flush w4k@1",
    "w4k@0 w4k@2 w4k@1 w4k@3 | flush flush flush flush",
];

fn plans() -> Vec<Plan> {
    let whole = |text: &str| Plan::whole(text.parse().unwrap());
    let mut plans: Vec<Plan> = KNOWN.into_iter().map(whole).collect();
    for number in 0..8 {
        plans.push(Plan { fail_flush: Some(number), ..whole("w4k@0 flush w4k@1 flush w4k@0 flush") });
    }
    plans.extend(KNOWN_OF_SNAPSHOTS.into_iter().map(whole));
    plans.extend(KNOWN_OF_ZONES.into_iter().map(whole));
    // Round the ring; the first step and the last meet what it has of them.
    for times in [4, 6, 8, 10] {
        let loops = "w512@1 flush ".repeat(times);
        for text in
            [format!("w4k@0 flush w4k@0 flush {loops} w4k@0 flush"), format!("{loops} w4k@2 flush {loops}")]
        {
            plans.push(whole(&text));
        }
        let units: String =
            (0..times).map(|i| format!("w512@{} flush drop64k@{} flush ", i % 3, i % 3)).collect();
        plans.push(whole(&format!("{units} w4k@0 flush")));
    }
    for seed in 0..20 {
        plans.extend(KNOWN_OF_SEVERAL.into_iter().map(|text| Plan { seed, ..whole(text) }));
    }
    plans.extend((1..=2).flat_map(|len| Program::all(len, 3)).map(Plan::last_step));
    let mut random = Random::from_seed(3);
    for number in 0..200 {
        let program = Program::random(&mut random, 1, 4 + number % 3, 3);
        let fail_flush = (number % 4 == 0).then(|| random.below(10));
        plans.push(Plan { fail_flush, ..Plan::whole(program) });
    }
    plans
}

fn find(inner: NativeSubject, bug: Bug) {
    let plans = if matches!(bug, Bug::CacheBelieved | Bug::MarkedLate) { failing_flushes() } else { plans() };
    find_by(inner, bug, &plans);
}

fn find_by(inner: NativeSubject, bug: Bug, plans: &[Plan]) {
    let whole_one_in = if inner.is_small() { 50 } else { u64::MAX };
    sabotaged::find(inner, bug, plans, sabotaged::thoroughness(whole_one_in));
}

/// Where the table has more than one page.
#[test]
fn later_page_not_in_record() {
    let plans = ["w4k@0 flush w4k@1 flush", "w512@4 flush w512@1 w4k@0 flush drop64k@1 w4k@1 flush"];
    let plans: Vec<Plan> = plans.into_iter().map(|text| Plan::whole(text.parse().unwrap())).collect();
    find_by(NativeSubject::two_pages(), Bug::LaterPageNotInRecord, &plans);
    find_by(NativeSubject::two_pages_of_zones(), Bug::LaterPageNotInRecord, &plans);
}

/// Where the ring is longer than the shortest one.
#[test]
fn mistakes_in_a_larger_ring() {
    // Each flush has something to record: a unit is taken, and released.
    let round = "w512@1 flush drop64k@1 flush w512@2 flush drop64k@2 flush ";
    let plans: Vec<Plan> = (4..10)
        .map(|rounds| Plan::last_step(format!("{}w4k@0 flush", round.repeat(rounds)).parse().unwrap()))
        .collect();
    find_by(NativeSubject::larger_ring(), Bug::RunCutShort, &plans);
}

/// Where more is written over a base than a record has checksums of.
#[test]
fn mistakes_in_bulk() {
    let plan = |text: &str| Plan::last_step(text.parse().unwrap());
    let mut plans = vec![plan("w64k@0 w64k@1 w64k@2 w64k@3 w64k@4 w64k@5 flush")];
    find_by(NativeSubject::zoned_in_bulk(), Bug::NoFence, &plans);
    // The flush of one queue falls between the other's write and its publication.
    let text = "w64k@0 w64k@1 w64k@2 w64k@3 w64k@4 flush | w64k@5 w64k@6 w64k@7 w64k@8 flush";
    plans = (0..40).map(|seed| Plan { seed, stalls: true, ..plan(text) }).collect();
    find_by(NativeSubject::zoned_in_bulk(), Bug::UncheckedNotFenced, &plans);
}

/// Where units are filled from end to end over other bytes.
#[test]
fn mistakes_where_units_are_filled() {
    let texts = ["w512@4 flush w64k@0 w64k@1 flush", "w512@4 flush w4k@0 flush w64k@0 w64k@1 flush"];
    let plans: Vec<Plan> = (0..4)
        .flat_map(|seed| texts.map(|text| Plan { seed, ..Plan::whole(text.parse().unwrap()) }))
        .collect();
    for bug in [Bug::FilledUnchecked, Bug::NoVerify] {
        find_by(NativeSubject::zoned_on_an_old_device(), bug, &plans);
    }
}

/// Where entries are embedded although there are snapshots: the first write keeps the page of the entries that follow.
#[test]
fn unkept_embeds() {
    let texts = [
        "w512@4 flush drop64k@0 w4k@0 w64k@1 flush",
        "w512@4 flush drop64k@0 drop64k@1 w64k@3 flush w4k@2 flush",
    ];
    let plans: Vec<Plan> = (0..4)
        .flat_map(|seed| texts.map(|text| Plan { seed, ..Plan::whole(text.parse().unwrap()) }))
        .collect();
    find_by(NativeSubject::zoned_with_snapshots_of_two_pages(), Bug::UnkeptEmbeds, &plans);
}

/// Where each opening enlarges the disk, on a device that has grown by then.
#[test]
fn mistakes_in_growing() {
    let plans = [
        "w4k@0 w4k@1 w4k@2 w4k@3 w4k@4 flush",
        "w4k@1 w4k@2 flush reopen w4k@0 w512@1 flush reopen w4k@4 flush",
    ];
    let plans: Vec<Plan> = plans.into_iter().map(|text| Plan::whole(text.parse().unwrap())).collect();
    for bug in [Bug::GrownIsClean, Bug::PartNotZero, Bug::PartIsFree, Bug::GrownBeforeZeros] {
        find_by(NativeSubject::growing_on_a_device(), bug, &plans);
    }
}

/// The same, with snapshots of disks that were smaller.
#[test]
fn mistakes_in_growing_with_snapshots() {
    let known = [
        (Bug::SnapshotGrows, "w4k@0 drop64k@0 flush reopen w512@1"),
        (Bug::HeldOverwritten, "w4k@0 drop64k@0 flush reopen w4k@0 flush"),
    ];
    for (bug, text) in known {
        let plans = [Plan::last_step(text.parse().unwrap())];
        find_by(NativeSubject::growing_with_snapshots(), bug, &plans);
        find_by(NativeSubject::growing_over_a_base(), bug, &plans);
    }
}

/// Where clones are made of each snapshot, and it is deleted afterwards.
#[test]
fn mistakes_with_clones() {
    let known = [
        (Bug::ClonedDeleted, "w4k@0 drop64k@0 drop64k@1 flush"),
        (Bug::CloneNotInRecord, "w4k@0 drop64k@0 w4k@0 flush reopen w4k@1"),
        (Bug::CloneWithoutBit, "w4k@0 drop64k@0 flush"),
    ];
    for (bug, text) in known {
        find_by(NativeSubject::snapshots_with_clones(), bug, &[Plan::whole(text.parse().unwrap())]);
    }
}

/// A mistake that shows only after a failed write.
#[test]
fn mistakes_when_writes_fail() {
    let whole = Plan::whole("zero@0 w512@0 odd@2 discard@1 w4k@0".parse().unwrap());
    let plans = [Plan { fail_write: Some(2), ..whole }];
    for subject in [NativeSubject::units, NativeSubject::units_on_a_device] {
        find_by(subject(), Bug::HalfWrittenIsClean, &plans);
    }
}

/// Where the second page of the table lies in a part of it.
#[test]
fn mistakes_in_parts() {
    let plans = ["w4k@0 flush w4k@1 flush", "w512@4 flush w512@1 w4k@0 flush drop64k@1 w4k@1 flush"];
    let plans: Vec<Plan> = plans.into_iter().map(|text| Plan::whole(text.parse().unwrap())).collect();
    for subject in [NativeSubject::grown, NativeSubject::grown_on_a_device, NativeSubject::grown_zones] {
        find_by(subject(), Bug::LaterPageNotInRecord, &plans);
    }
    find_by(NativeSubject::grown_on_a_device(), Bug::PartIsFree, &plans);
}

/// Requests that are never drawn by themselves.
#[test]
fn zeros_not_durable() {
    let plans: Vec<Plan> = (0..20).map(kinds::of_all_kinds).collect();
    find_by(NativeSubject::units_over_a_base(), Bug::ZerosNotDurable, &plans);
}

/// Snapshots where zones are emptied, on a device, in quiet times.
#[test]
fn held_overwritten_with_everything() {
    let plans: Vec<Plan> = (0..20).map(kinds::snapshots_beside_guests).collect();
    find_by(NativeSubject::zoned_with_everything(), Bug::HeldOverwritten, &plans);
}

/// Snapshots are made and deleted beside guests. (That units become held again takes three requests in one
/// order, which `found.rs` holds up and races for.)
fn find_beside(inner: NativeSubject, bug: Bug, programs: &[&str]) {
    let plan = |text: &str, seed| Plan { seed, stalls: true, ..Plan::whole(text.parse().unwrap()) };
    let known = (0..400).flat_map(|seed| programs.iter().map(move |text| plan(text, seed)));
    // Few states of many programs: it is the order of requests that matters.
    let thoroughness = Thoroughness {
        depth: Depth { subsets_of: 2, sampled: 1, tears_each: 1 },
        nested_one_in: u64::MAX,
        sample_one_in: u64::MAX,
        whole_one_in: u64::MAX,
    };
    sabotaged::find(inner, bug, &known.collect::<Vec<_>>(), thoroughness);
}

/// The book's page of the table is kept as soon as a snapshot is made, the other one when one of its units
/// gets another place.
#[test]
fn released_early() {
    let program = "w64k@0 w64k@1 drop64k@0 drop64k@2 \
                   | fua@3 fua@4 fua@3 fua@4 w512@0 \
                   | fua@3 fua@4 fua@3 fua@4 fua@3 w512@1";
    find_beside(NativeSubject::snapshots_of_two_pages(), Bug::ReleasedEarly, &[program]);
}

#[test]
fn moved_under_writers() {
    let program = "w4k@0 w4k@3 drop64k@0 w4k@0 w4k@3 drop64k@2 flush \
                   | zero@0 zero@0 w512@0 w512@0 w512@0 w512@0 w512@0 w512@0 | odd@0 odd@0 odd@0 odd@0 odd@0 odd@0";
    find_beside(NativeSubject::snapshots(), Bug::MovedUnderWriters, &[program]);
}

/// What only an encrypted disk has.
#[test]
fn mistakes_of_encrypted_disks() {
    let snapshots = || NativeSubject::snapshots().encrypted("vellum, encrypted, table with snapshots");
    let table = || NativeSubject::table_over_a_base().encrypted("vellum, encrypted, table over a base");
    let plans = |text: &str| [Plan::last_step(text.parse().unwrap())];
    find_by(snapshots(), Bug::MovedWithOldPlace, &plans("w64k@0 drop64k@0 w512@0 flush"));
    find_by(table(), Bug::RestOfSectorLost, &plans("w4k@0 flush odd@0 flush"));
    find_by(table(), Bug::PlainInJournal, &plans("w4k@0 flush w4k@0 flush"));
}

/// One test for each bug, on the kind of image where it shows.
macro_rules! found {
    ($($subject:ident { $($name:ident: $bug:ident,)* })*) => {
        $($(
            #[test]
            fn $name() {
                find(NativeSubject::$subject(), Bug::$bug);
            }
        )*)*
    };
}

found! {
    linear_over_a_base {
        cache_believed_in_a_bitmap: CacheBelieved,
        marked_late_over_a_base: MarkedLate,
        bit_before_data: PublishedBeforeWritten,
        mask_not_in_record: MaskNotInRecord,
        bit_not_in_record: BitNotInRecord,
        no_checks: NoChecks,
        stale_check: StaleCheck,
        unverified_overwritten: UnverifiedOverwritten,
        durable_is_verified: DurableIsVerified,
        full_not_sticky: FullNotSticky,
        tail_before_home: TailBeforeHome,
        flush_error_ignored: FlushErrorIgnored,
        closed_before_home: ClosedBeforeHome,
        only_newest_replayed: OnlyNewestReplayed,
        forgotten_before_home: ForgottenBeforeHome,
        no_verify: NoVerify,
        home_before_durable: CheckpointBeforeCommit,
    }
    table {
        cache_believed: CacheBelieved,
        marked_late: MarkedLate,
        entry_not_in_record: EntryNotInRecord,
    }
    units {
        unit_freed_before_durable: UnitFreedBeforeDurable,
        unit_not_zeroed: UnitNotZeroed,
    }
    snapshots {
        page_kept_late: PageKeptLate,
        copy_not_in_record: CopyNotInRecord,
        held_overwritten: HeldOverwritten,
        named_unit_freed: NamedUnitFreed,
    }
    units_on_a_device {
        zero_not_covered: ZeroNotCovered,
    }
    zoned {
        cache_believed_in_zones: CacheBelieved,
        marked_late_in_zones: MarkedLate,
        plain_in_place: PlainInPlace,
    }
    zoned_prepared {
        zeros_on_given: ZerosOnGiven,
    }
    zoned_in_quiet_times {
        recorded_early: RecordedEarly,
    }
    zoned_in_small_zones {
        newest_believed: NewestBelieved,
    }
    zoned_on_a_device {
        zone_not_zeroed: ZoneNotZeroed,
    }
}
