//! The crash explorer against mistakes inside the journal: each is switched on in the engine itself, and must
//! be found.

extern crate vellum_seeded as vellum_format;

#[path = "../../vellum-format/tests/common/mod.rs"]
mod common;
mod sabotaged;
#[path = "../../vellum-format/tests/subjects/mod.rs"]
mod subjects;

use subjects::{QcowSubject, failing_flushes};
use vellum_core::Random;
use vellum_format::sabotage::Bug;
use vellum_sim::explore::{Plan, Program};

/// What is known to be dangerous.
const KNOWN: [&str; 11] = [
    "w4k@0 w4k@0 flush",
    "w4k@0 flush w4k@0 flush",
    "w4k@0 flush odd@0 flush",
    "w4k@0 flush discard@0 w4k@1 flush",
    "w4k@0 flush w4k@2 flush discard@0 w4k@1 flush",
    "w4k@0 discard@0 flush w512@1 flush",
    "w4k@0 flush discard@0 flush w512@1 flush w512@2 flush",
    "w4k@0 flush w4k@0 flush w512@1 flush w4k@0 flush",
    "w4k@0 flush w4k@0 flush discard@0 flush w4k@1 flush w4k@2 flush",
    "w4k@0 flush reopen w4k@1 flush w4k@2",
    "w64k@0 flush w64k@2 flush w64k@7 flush",
];

/// As above, side by side.
const KNOWN_OF_SEVERAL: [&str; 4] = [
    "w4k@0 w4k@0 w4k@0 | flush flush flush",
    "w4k@0 flush w4k@0 flush w4k@0 | w4k@1 flush w4k@1 flush w4k@1",
    "w4k@0 w4k@0 w4k@0 w4k@0 | zero@0 w4k@0 flush zero@0 w4k@0 flush",
    "w4k@0 w4k@2 w4k@1 w4k@3 | flush flush flush flush",
];

/// Clusters are allocated while zeros are in progress.
const BESIDE_ZEROS: &str = "w4k@0 w4k@1 w4k@5 flush | w4k@2 w4k@3 w4k@6 flush";

/// More fresh data than a record has checksums of.
const IN_BULK: &str = "w64k@0 w64k@1 w64k@2 w64k@3 w64k@4 flush";

fn plans(bug: Bug) -> Vec<Plan> {
    let whole = |text: &str| Plan::whole(text.parse().unwrap());
    let mut plans: Vec<Plan> = Vec::new();
    if bug == Bug::CacheBelieved {
        return failing_flushes();
    }
    if bug == Bug::PreparedGivenOut {
        plans.extend((0..30).map(|seed| Plan { seed, ..whole(BESIDE_ZEROS) }));
    }
    if bug == Bug::NoFence {
        plans.push(Plan::last_step(IN_BULK.parse().unwrap()));
    }
    plans.extend(KNOWN.into_iter().map(whole));
    for number in 0..8 {
        plans.push(Plan { fail_flush: Some(number), ..whole("w4k@0 flush w4k@1 flush w4k@0 flush") });
    }
    // More tables than there is memory for.
    let few = |first| (first..first + 5).map(|place| format!("w512@{place} ")).collect::<String>();
    let many: Vec<String> = [8, 13, 18, 23, 8].map(few).to_vec();
    plans.push(Plan::last_step(format!("{} flush", many.join("flush ")).parse().unwrap()));
    // Round the ring; the first step and the last meet what it has of them.
    for times in 3..11 {
        let loops = "w512@1 flush ".repeat(times);
        for text in
            [format!("w4k@0 flush w4k@0 flush {loops} w4k@0 flush"), format!("{loops} w4k@2 flush {loops}")]
        {
            plans.push(whole(&text));
        }
    }
    for seed in 0..30 {
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

fn find(inner: QcowSubject, bug: Bug) {
    sabotaged::find(inner, bug, &plans(bug), sabotaged::thoroughness(50));
}

/// One test for each bug, on the kind of image where it shows.
macro_rules! found {
    ($($subject:ident { $($name:ident: $bug:ident,)* })*) => {
        $($(
            #[test]
            fn $name() {
                find(QcowSubject::$subject(), Bug::$bug);
            }
        )*)*
    };
}

found! {
    plain {
        cache_believed_by_a_repair: CacheBelieved,
    }
    version_2 {
        cache_believed_without_a_mark: CacheBelieved,
    }
    journal {
        cache_believed: CacheBelieved,
        stale_check: StaleCheck,
        no_others: NoOthers,
        no_pending: NoPending,
        pending_not_removed: PendingNotRemoved,
        no_l1: NoL1,
        no_refcounts: NoRefcounts,
        unverified_overwritten: UnverifiedOverwritten,
        durable_is_verified: DurableIsVerified,
        seal_half: SealHalf,
        checkpoint_before_commit: CheckpointBeforeCommit,
        tail_before_home: TailBeforeHome,
        tail_used_early: TailUsedEarly,
        flush_error_ignored: FlushErrorIgnored,
        freed_before_durable: FreedBeforeDurable,
        punch_not_covered: PunchNotCovered,
        given_back_in_records: GivenBackInRecords,
        full_not_sticky: FullNotSticky,
        closed_before_home: ClosedBeforeHome,
        only_newest_replayed: OnlyNewestReplayed,
        forgotten_before_home: ForgottenBeforeHome,
        lowered_not_recorded: LoweredNotRecorded,
        published_before_written: PublishedBeforeWritten,
    }
    bitmap {
        changed_before_marked_in_order: ChangedBeforeMarked,
    }
    bitmap_journal {
        changed_before_marked: ChangedBeforeMarked,
        no_bitmaps: NoBitmaps,
    }
    compressed_journal {
        compressed_not_fenced: CompressedNotFenced,
        compressed_not_freed: CompressedNotFreed,
    }
    journal_in_bulk {
        no_fence: NoFence,
    }
    journal_on_a_device {
        no_checks: NoChecks,
        no_verify: NoVerify,
        no_zeros: NoZeros,
        old_run_kept: OldRunKept,
    }
    journal_prepared {
        prepared_given_out: PreparedGivenOut,
        given_back_in_use: GivenBackInUse,
    }
    prepared {
        plain_prepared_given_out: PreparedGivenOut,
        plain_given_back_in_use: GivenBackInUse,
    }
    journal_small_cache {
        old_page_loaded: OldPageLoaded,
    }
    journal_over_a_base {
        barrier_wants_no_repair: BarrierWantsNoRepair,
        barrier_before_home: BarrierBeforeHome,
    }
    journal_subclusters {
        filled_over_unverified: FilledOverUnverified,
    }
}

/// These show only where tables and clusters are shared.
macro_rules! found_with_snapshots {
    ($($name:ident: $bug:ident,)*) => {
        $(
            #[test]
            fn $name() {
                if let Some(subject) = QcowSubject::journal_snapshots() {
                    find(subject, Bug::$bug);
                }
            }
        )*
    };
}

found_with_snapshots! {
    home_before_verified: HomeBeforeVerified,
    result_not_recorded: ResultNotRecorded,
}
