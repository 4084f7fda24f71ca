//! The crash explorer against mistakes in the engine of the native format: each is switched on in the engine itself, and must
//! be found.

mod common;
mod subjects;

use subjects::native::NativeSubject;
use vellum_core::{GuestOffset, LocalFuture, Random, Result, SharedDisk, SharedStorage};
use vellum_format::sabotage::{Bug, put_in};
use vellum_sim::Content;
use vellum_sim::explore::{Depth, Explorer, Plan, Program, Subject, Thoroughness};

/// A subject whose engine has a bug.
struct Sabotaged {
    inner: NativeSubject,
    bug: Bug,
}

impl Subject for Sabotaged {
    fn name(&self) -> String {
        format!("{} with {:?}", self.inner.name(), self.bug)
    }

    fn image(&self) -> Content {
        self.inner.image()
    }

    fn guest(&self) -> Content {
        self.inner.guest()
    }

    fn places(&self) -> Vec<GuestOffset> {
        self.inner.places()
    }

    /// The thread does nothing else from here on.
    fn open(&self, image: SharedStorage) -> LocalFuture<'_, Result<SharedDisk>> {
        put_in(Some(self.bug));
        self.inner.open(image)
    }

    fn verify(&self, image: SharedStorage) -> LocalFuture<'_, std::result::Result<(), String>> {
        self.inner.verify(image)
    }
}

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

/// The same, side by side.
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

/// Looks for the bug until it is found, and once more by the name of the state.
#[allow(clippy::print_stderr, reason = "how soon each is found is worth knowing")]
fn find(inner: NativeSubject, bug: Bug) {
    let thoroughness = Thoroughness {
        depth: Depth { sampled: 8, ..Depth::FULL },
        nested_one_in: 20,
        sample_one_in: u64::MAX,
        whole_one_in: 50,
    };
    let subject = Sabotaged { inner, bug };
    let explorer = Explorer::new(&subject, thoroughness);
    let report = explorer.explore_all(&plans(), 1);
    let failure = report.failures.first().unwrap_or_else(|| panic!("not found: {report}"));
    eprintln!("{bug:?}: found after {} states: {failure}", report.counts.judged);
    let (_, verdict) = explorer.replay(&failure.case.to_string().parse().unwrap());
    assert!(
        verdict.is_err() || failure.what.starts_with("nothing failed"),
        "{failure}: passes when it is judged again"
    );
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
        bit_before_data: BitBeforeData,
        mask_not_in_record: MaskNotInRecord,
        bit_not_in_record: BitNotInRecord,
        no_checks: NoChecks,
        stale_check: StaleCheck,
        unproven_overwritten: UnprovenOverwritten,
        durable_is_proven: DurableIsProven,
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
        plain_in_place: PlainInPlace,
    }
    zoned_prepared {
        zeros_on_given: ZerosOnGiven,
    }
    zoned_in_quiet_times {
        settled_early: SettledEarly,
    }
    zoned_in_small_zones {
        newest_believed: NewestBelieved,
    }
    zoned_on_a_device {
        zone_not_zeroed: ZoneNotZeroed,
    }
}
