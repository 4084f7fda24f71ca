//! The crash explorer on the formats: every image that every crash in every short program can leave is
//! recovered, read and checked.
//!
//! By default it takes all programs of up to two steps, some of three, and random long ones; of these a subject
//! that differs little from another one takes a part;
//! `VELLUM_TEST_SCALE` multiplies the number of random ones, and `VELLUM_EXPLORE=all` takes all programs of
//! three steps. `VELLUM_EXPLORE_CASE=CASE` prints the host events before one state and judges it again, and
//! `VELLUM_EXPLORE_DUMP=FILE` writes its image to a file.

mod common;
#[path = "explore/filled.rs"]
mod filled;
#[path = "explore/over_base.rs"]
mod over_base;
mod subjects;

use common::scale;
use subjects::kinds;
use subjects::native::NativeSubject;
use subjects::{QcowSubject, RawSubject, failing_flushes};
use vellum_core::Random;
use vellum_sim::explore::{Case, Counts, Explorer, Plan, Program, Step, Subject, Thoroughness};

/// Programs by chance for each subject: short ones, long ones, ones of several queues, ones whose flush
/// fails.
const SHORT: u64 = 60;
const LONG: u64 = 6;
const SEVERAL: u64 = 8;
const FAILING: u64 = 30;

fn takes_all() -> bool {
    std::env::var("VELLUM_EXPLORE").is_ok_and(|what| what == "all")
}

/// Which programs a subject takes that differs little from another one: one in this many. A soak takes four
/// times as many of them.
fn part(one_in: usize) -> usize {
    if takes_all() { one_in.div_ceil(4) } else { one_in }
}

fn plans(seed: u64) -> Vec<Plan> {
    let mut plans = Vec::new();
    let mut random = Random::from_seed(seed);
    for len in 1..=2 {
        plans.extend(Program::all(len, 3).map(Plan::last_step));
    }
    if takes_all() {
        plans.extend(Program::all(3, 3).map(Plan::last_step));
    } else {
        let all = Step::all(3).len().pow(3);
        for _ in 0..SHORT * scale() {
            let number = random.index(all);
            plans.extend(Program::all(3, 3).nth(number).map(Plan::last_step));
        }
    }
    for _ in 0..LONG * scale() {
        plans.push(Plan::whole(Program::random(&mut random, 1, 12, 8)));
    }
    for seed in 0..SEVERAL * scale() {
        let (queues, steps) = (2 + random.index(3), 3 + random.index(3));
        plans.push(Plan { seed, ..Plan::whole(Program::random(&mut random, queues, steps, 8)) });
    }
    for _ in 0..FAILING * scale() {
        let program = Program::random(&mut random, 1, 5, 3);
        plans.push(Plan { fail_flush: Some(random.below(12)), ..Plan::whole(program) });
    }
    plans
}

fn explore(subject: &dyn Subject, one_in: usize) -> Counts {
    explore_plans(subject, plans(1).into_iter().step_by(part(one_in)).collect())
}

fn explore_plans(subject: &dyn Subject, plans: Vec<Plan>) -> Counts {
    explore_carefully(subject, plans, Thoroughness::default())
}

#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn explore_carefully(subject: &dyn Subject, plans: Vec<Plan>, mut thoroughness: Thoroughness) -> Counts {
    if takes_all() {
        // Another program takes as long for one state as this for thousands; there are enough of them all the
        // same.
        thoroughness.sample_one_in *= 10;
    }
    let explorer = Explorer::new(subject, thoroughness);
    if let Ok(text) = std::env::var("VELLUM_EXPLORE_CASE") {
        let case: Case = text.parse().unwrap();
        if case.subject == subject.name() {
            eprintln!("{}", explorer.events_before(&case));
            let (image, verdict) = explorer.replay(&case);
            if let Some(path) = std::env::var_os("VELLUM_EXPLORE_DUMP") {
                image.write_to(&mut std::fs::File::create(path).unwrap()).unwrap();
            }
            verdict.unwrap_or_else(|what| panic!("{case}: {what}"));
        }
        return Counts::default();
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let report = explorer.explore_all(&plans, threads);
    eprintln!("explored {report}");
    assert!(report.failures.is_empty(), "{report}");
    report.counts
}

#[test]
fn qcow2() {
    let counts = explore(&QcowSubject::plain(), 1);
    assert!(counts.states > 1000 && counts.nested > 100, "{counts:?}");
}

/// Flushes that fail: each state is recovered through a page cache that shows what the medium has not, and
/// read again when the cache is lost. (So it is with all subjects here; these programs have a failing flush
/// each, and little else.)
macro_rules! behind_a_cache {
    ($($name:ident: $subject:expr,)*) => {
        mod behind_a_cache {
            use super::*;
            $(
                #[test]
                fn $name() {
                    let counts = explore_plans(&$subject, failing_flushes());
                    assert!(counts.shown > 4 || counts.programs == 0, "{counts:?}");
                }
            )*
        }
    };
}

behind_a_cache! {
    qcow2: QcowSubject::plain(),
    version_2: QcowSubject::version_2(),
    journal: QcowSubject::journal(),
    journal_over_a_base: QcowSubject::journal_over_a_base(),
    linear: NativeSubject::linear(),
    linear_over_zeros: NativeSubject::linear_over_zeros(),
    linear_over_a_base: NativeSubject::linear_over_a_base(),
    table: NativeSubject::table(),
    table_over_a_base: NativeSubject::table_over_a_base(),
    zoned: NativeSubject::zoned(),
    zoned_over_a_base: NativeSubject::zoned_over_a_base(),
}

#[test]
fn qcow2_over_a_base() {
    explore(&QcowSubject::over_a_base(), 1);
}

#[test]
fn qcow2_with_subclusters_over_a_base() {
    explore(&QcowSubject::subclusters(), 2);
}

#[test]
fn qcow2_version_2() {
    explore(&QcowSubject::version_2(), 1);
}

/// Each look at it moves sixteen times as much metadata, so there are fewer.
#[test]
fn qcow2_with_large_clusters() {
    explore(&QcowSubject::large_clusters(), 8);
}

#[test]
fn journal() {
    explore(&QcowSubject::journal(), 1);
}

/// Programs of which the last step is what a crash meets; of the first one flushes fail, too.
fn in_bulk(texts: &[&str]) -> Vec<Plan> {
    let plan = |text: &str| Plan::last_step(text.parse().unwrap());
    let mut plans: Vec<Plan> = Vec::new();
    for seed in 0..scale() {
        plans.extend(texts.iter().map(|text| Plan { seed, ..plan(text) }));
    }
    plans.extend((4..6).map(|number| Plan { fail_flush: Some(number), ..plan(texts[0]) }));
    plans
}

/// More fresh data between two flushes than a record has checksums of: it is flushed before the record is
/// written.
#[test]
fn journal_in_bulk() {
    let plans = in_bulk(&[
        "w64k@0 w64k@1 w64k@2 w64k@3 w64k@4 w4k@0 flush",
        "w64k@0 w64k@1 w64k@2 w64k@3 w64k@4 discard@1 odd@2 flush w4k@0 flush",
        "w64k@0 flush w64k@1 w64k@2 w64k@3 w64k@4 w64k@5 zero@3 flush w4k@5 fua@3",
        "w64k@0 w64k@1 w64k@2 w64k@3 w64k@4 | w4k@4 w4k@0 w4k@4 | flush flush",
    ]);
    let counts = explore_plans(&QcowSubject::journal_in_bulk(), plans);
    assert!(takes_all() || counts.states > 100, "{counts:?}");
}

#[test]
fn journal_over_a_base() {
    explore(&QcowSubject::journal_over_a_base(), 2);
}

#[test]
fn journal_with_subclusters_over_a_base() {
    explore(&QcowSubject::journal_subclusters(), 4);
}

#[test]
fn journal_on_a_device() {
    explore(&QcowSubject::journal_on_a_device(), 4);
}

#[test]
fn encrypted() {
    explore(&QcowSubject::encrypted(), 2);
}

#[test]
fn encrypted_journal() {
    explore(&QcowSubject::encrypted_journal(), 2);
}

#[test]
fn encrypted_journal_with_subclusters_over_a_base() {
    explore(&QcowSubject::encrypted_journal_subclusters(), 4);
}

/// Clusters that are compressed, shared with others, overwritten in part and compressed again.
mod compressed {
    use super::*;

    #[test]
    fn ordered() {
        let counts = explore(&QcowSubject::compressed(), 16);
        assert!(counts.states > 1000, "{counts:?}");
    }

    #[test]
    fn version_2() {
        explore(&QcowSubject::compressed_version_2(), 4);
    }

    #[test]
    fn journal() {
        let counts = explore(&QcowSubject::compressed_journal(), 16);
        assert!(counts.states > 1000, "{counts:?}");
        explore_plans(&QcowSubject::compressed_journal(), failing_flushes());
    }

    #[test]
    fn journal_over_a_base() {
        explore(&QcowSubject::compressed_journal_over_a_base(), 4);
    }

    #[test]
    fn journal_with_subclusters_over_a_base() {
        explore(&QcowSubject::compressed_journal_subclusters(), 8);
    }

    #[test]
    fn journal_with_narrow_refcounts() {
        explore(&QcowSubject::compressed_journal_narrow_refcounts(), 8);
    }

    #[test]
    fn journal_with_snapshots() {
        if let Some(subject) = QcowSubject::compressed_journal_snapshots() {
            explore(&subject, 16);
        }
    }
}

/// Each recovered image has a bitmap that says what has changed. All of each disk is compared, which takes long, so there are fewer
/// programs.
mod bitmaps {
    use super::*;

    #[test]
    fn ordered() {
        let counts = explore(&QcowSubject::bitmap(), 24);
        assert!(counts.states > 200, "{counts:?}");
        explore_plans(&QcowSubject::bitmap(), failing_flushes().into_iter().step_by(4).collect());
    }

    #[test]
    fn journal() {
        let counts = explore(&QcowSubject::bitmap_journal(), 24);
        assert!(counts.states > 200, "{counts:?}");
        explore_plans(&QcowSubject::bitmap_journal(), failing_flushes().into_iter().step_by(4).collect());
    }

    #[test]
    fn journal_over_a_base() {
        explore(&QcowSubject::bitmap_journal_over_a_base(), 40);
    }

    #[test]
    fn compressed() {
        let texts =
            ["w4k@0 reopen w4k@0 flush", "w64k@0 reopen w4k@1 flush w4k@1", "w512@2 flush w4k@2 flush"];
        let plans = texts.map(|text| Plan::last_step(text.parse().unwrap())).to_vec();
        explore_plans(&QcowSubject::bitmap_journal_packed(), plans);
    }
}

#[test]
fn journal_with_little_memory() {
    explore(&QcowSubject::journal_small_cache(), 2);
    explore(&QcowSubject::journal_sectors(), 2);
    explore(&QcowSubject::sectors(), 2);
}

#[test]
fn journal_with_large_clusters() {
    explore(&QcowSubject::journal_large_clusters(), 16);
}

#[test]
fn journal_with_wide_refcounts() {
    explore(&QcowSubject::journal_wide_refcounts(), 4);
}

#[test]
fn journal_with_narrow_refcounts() {
    explore(&QcowSubject::journal_narrow_refcounts(), 8);
}

#[test]
fn prepared() {
    explore(&QcowSubject::prepared(), 4);
}

#[test]
fn prepared_over_a_base() {
    explore(&QcowSubject::prepared_over_a_base(), 8);
}

#[test]
fn journal_prepared() {
    explore(&QcowSubject::journal_prepared(), 4);
}

/// The crashes of the paper that the journal is taken from (FAST'16, *Mitigating Sync Amplification for
/// Copy-on-write Virtual Disk*): two workloads, and of each 200 crashes between two flushes, some of the
/// writes there lost. Each image is looked at by QEMU, too.
#[test]
#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn journal_scenarios_of_the_paper() {
    const CRASHES: u64 = 200;
    let subject = QcowSubject::journal_appended();
    for (name, step) in
        [("append", "w64k@PLACE flush "), ("append + overwrite", "w64k@PLACE flush w64k@PLACE flush ")]
    {
        let steps: String = (0..30).map(|place| step.replace("PLACE", &place.to_string())).collect();
        let plan = Plan::whole(steps.parse().unwrap());
        let explorer = Explorer::new(&subject, Thoroughness::default());
        let report = explorer.scenarios(&plan, CRASHES * scale(), 16);
        eprintln!("explored the paper's crashes, {name}: {report}");
        assert!(report.failures.is_empty(), "{report}");
        assert!(report.counts.states > CRASHES / 2, "{report}");
    }
}

#[test]
fn snapshots() {
    if let Some(subject) = QcowSubject::snapshots() {
        explore(&subject, 16);
    }
}

#[test]
fn journal_with_snapshots() {
    if let Some(subject) = QcowSubject::journal_snapshots() {
        explore(&subject, 8);
    }
}

#[test]
fn raw() {
    explore(&RawSubject, 1);
}

#[test]
fn native_linear() {
    explore(&NativeSubject::linear(), 1);
}

#[test]
fn native_linear_over_zeros() {
    explore(&NativeSubject::linear_over_zeros(), 1);
}

#[test]
fn native_linear_over_a_base() {
    let counts = explore(&NativeSubject::linear_over_a_base(), 1);
    assert!(counts.states > 1000 && counts.nested > 100, "{counts:?}");
}

#[test]
fn native_table() {
    let counts = explore(&NativeSubject::table(), 1);
    assert!(counts.states > 1000 && counts.nested > 100, "{counts:?}");
}

#[test]
fn native_table_over_a_base() {
    explore(&NativeSubject::table_over_a_base(), 2);
}

#[test]
fn native_table_over_a_base_in_large_blocks() {
    explore(&NativeSubject::table_over_a_base_in_large_blocks(), 4);
}

#[test]
fn native_table_on_a_device() {
    explore(&NativeSubject::table_on_a_device(), 4);
}

/// Discards release whole units, so that these are taken again.
fn explore_units(subject: &dyn Subject) {
    let whole = |plan: Plan| {
        let program = plan.program.to_string().replace("discard@", "drop64k@").parse().unwrap();
        Plan { program, ..plan }
    };
    explore_plans(subject, plans(1).into_iter().step_by(part(4)).map(whole).collect());
}

/// Discards make and delete snapshots; one queue, so that it is known what they have.
fn explore_snapshots(subject: &dyn Subject, one_in: usize) {
    let asking = |plan: &Plan| {
        let program = plan.program.to_string().replace("discard@", "drop64k@").parse().unwrap();
        Plan { program, ..plan.clone() }
    };
    let asks = |plan: &Plan| {
        let is_short = plan.program.queues.len() == 1 && plan.program.queues[0].len() <= 6;
        is_short && plan.program.to_string().contains("drop64k@0")
    };
    let mut chosen: Vec<Plan> = plans(1).iter().map(asking).filter(asks).step_by(part(one_in)).collect();
    for text in [
        "w4k@0 drop64k@0 w4k@0 flush",
        "w64k@0 drop64k@0 w512@0 flush drop64k@0 w512@0 w4k@1 flush drop64k@1 w4k@0 flush",
        "w64k@0 w4k@1 flush drop64k@0 zero@0 drop64k@0 w512@1 flush drop64k@1 drop64k@1 w512@2 flush",
        "w4k@0 drop64k@0 drop64k@1 w4k@0 flush drop64k@0 w4k@1 reopen w4k@0 flush drop64k@2 w4k@2 flush",
        "w64k@0 drop64k@0 reopen w64k@0 flush drop64k@0 reopen drop64k@1 reopen w4k@1 flush w4k@2",
    ] {
        chosen.push(Plan::whole(text.parse().unwrap()));
    }
    let beside = chosen.len() as u64 / 8;
    chosen.extend((0..beside.max(4)).map(kinds::snapshots_beside_guests));
    explore_plans(subject, chosen);
}

/// Two pages of table: deleting takes long enough for others to come in between.
#[test]
fn native_snapshots_of_two_pages() {
    let plans = (0..3 * scale()).map(kinds::snapshots_beside_guests).collect();
    explore_plans(&NativeSubject::snapshots_of_two_pages(), plans);
}

/// Snapshots, embedded allocations, a device on which zones are emptied, and quiet times.
#[test]
fn native_zoned_with_everything() {
    let mut plans: Vec<Plan> = (0..4 * scale()).map(kinds::snapshots_beside_guests).collect();
    plans.extend((0..4 * scale()).map(kinds::of_all_kinds));
    plans.extend((0..4 * scale()).map(kinds::with_a_failing_write));
    explore_plans(&NativeSubject::zoned_with_everything(), plans);
}

/// Requests that are never drawn, and writes that fail, on every layout.
#[test]
fn native_requests_of_all_kinds() {
    let subjects = [
        NativeSubject::linear_over_a_base(),
        NativeSubject::units_over_a_base(),
        NativeSubject::units_on_a_device(),
        NativeSubject::zoned_in_small_zones(),
        NativeSubject::zoned_over_a_base(),
    ];
    for subject in &subjects {
        let mut plans: Vec<Plan> = (0..6 * scale()).map(kinds::of_all_kinds).collect();
        plans.extend((0..6 * scale()).map(kinds::with_a_failing_write));
        explore_plans(subject, plans);
    }
}

#[test]
fn native_snapshots() {
    explore_snapshots(&NativeSubject::snapshots(), 4);
}

#[test]
fn native_snapshots_with_clones() {
    explore_snapshots(&NativeSubject::snapshots_with_clones(), 4);
}

#[test]
fn native_snapshots_over_a_base() {
    explore_snapshots(&NativeSubject::snapshots_over_a_base(), 8);
}

/// Before each program something is written and flushed, so that a zone is open; discards release whole
/// units. Programs of two seeds.
fn explore_zoned(subject: &dyn Subject, one_in: usize) {
    let opened = |plan: Plan| {
        let program = plan.program.to_string().replace("discard@", "drop64k@");
        Plan { program: format!("w512@4 flush {program}").parse().unwrap(), ..plan }
    };
    let both = plans(1).into_iter().chain(plans(2));
    explore_plans(subject, both.step_by(part(one_in)).map(opened).collect());
}

#[test]
fn native_zoned() {
    explore_zoned(&NativeSubject::zoned(), 2);
}

#[test]
fn native_zoned_in_small_zones() {
    explore_zoned(&NativeSubject::zoned_in_small_zones(), 4);
}

#[test]
fn native_zoned_on_a_device() {
    explore_zoned(&NativeSubject::zoned_on_a_device(), 4);
}

/// Units that are filled from end to end, over other bytes, and such writes over units that hold their own entries.
#[test]
fn native_zoned_on_an_old_device() {
    explore_zoned(&NativeSubject::zoned_on_an_old_device(), 4);
    let texts = [
        "w512@4 flush w64k@0 flush w64k@0 flush",
        "w512@4 flush w64k@0 w64k@1 flush w64k@0 w4k@1 w64k@1 flush w4k@0 flush reopen w64k@0",
        "w512@4 flush w4k@0 flush w64k@0 w512@0 flush w4k@0 flush w64k@1 drop64k@0 flush w64k@2",
        "w512@4 flush w64k@0 w64k@0 w64k@0 w64k@0 flush drop64k@0 w64k@0 flush w64k@1 w64k@2 w64k@3 flush",
        "w512@4 flush w4k@0 w4k@1 flush | w64k@0 w64k@1 flush w64k@0 | w512@0 odd@1 flush w4k@0",
        "w512@4 flush w64k@0 flush | w64k@0 w64k@0 flush | zero@0 fua@0 drop64k@0",
        "w512@4 flush long@0 flush long@0 w64k@1 flush long@0 flush",
    ];
    let plans = (0..3 * scale())
        .flat_map(|seed| texts.map(|text| Plan { seed, ..Plan::whole(text.parse().unwrap()) }))
        .collect();
    let counts = explore_plans(&NativeSubject::zoned_on_an_old_device(), plans);
    assert!(takes_all() || counts.states > 300, "{counts:?}");
}

#[test]
fn native_zoned_over_a_base() {
    explore_zoned(&NativeSubject::zoned_over_a_base(), 4);
}

/// More fresh data over a base between two flushes than a record has checksums of: it is flushed before the record is
/// written, and what follows has none.
#[test]
fn native_zoned_in_bulk() {
    let plans = in_bulk(&[
        "w64k@0 w64k@1 w64k@2 w64k@3 w64k@4 w64k@5 w4k@0 flush",
        "w64k@0 w64k@1 w64k@2 w64k@3 w64k@4 w64k@5 drop64k@1 odd@2 flush w4k@0 flush",
        "w64k@0 flush w64k@1 w64k@2 w64k@3 w64k@4 w64k@5 w64k@6 zero@3 flush w4k@5 fua@3",
        "w64k@0 w64k@1 w64k@2 w64k@3 w64k@4 w64k@5 w64k@6 | flush w4k@7 flush",
    ]);
    let counts = explore_plans(&NativeSubject::zoned_in_bulk(), plans);
    assert!(takes_all() || counts.states > 100, "{counts:?}");
}

#[test]
fn native_zoned_prepared() {
    explore_zoned(&NativeSubject::zoned_prepared(), 4);
}

#[test]
fn native_zoned_in_quiet_times() {
    explore_zoned(&NativeSubject::zoned_in_quiet_times(), 4);
}

#[test]
fn native_zoned_compacted() {
    explore_zoned(&NativeSubject::zoned_compacted(), 4);
}

#[test]
fn native_zoned_with_snapshots() {
    explore_snapshots(&NativeSubject::zoned_with_snapshots(), 2);
}

/// Entries that are embedded after a snapshot, in a page of the table that nobody has kept, or that is kept and not
/// durable, or durable.
#[test]
fn native_zoned_with_snapshots_of_two_pages() {
    let texts = [
        "w512@4 flush drop64k@0 w4k@0 w64k@1 flush w4k@3 flush",
        "w512@4 w4k@0 flush drop64k@0 w64k@1 flush w64k@3 w4k@2 flush drop64k@0 w4k@1 flush w4k@3",
        "w512@4 flush drop64k@0 w4k@0 flush w4k@1 drop64k@2 w4k@2 flush w64k@3 flush reopen w4k@1",
        "w512@4 flush w4k@0 w4k@1 flush drop64k@0 w64k@0 w64k@2 flush w64k@3 w512@1 flush drop64k@1 w4k@2",
    ];
    let plans = (0..2 * scale())
        .flat_map(|seed| texts.map(|text| Plan { seed, ..Plan::whole(text.parse().unwrap()) }))
        .collect();
    let counts = explore_plans(&NativeSubject::zoned_with_snapshots_of_two_pages(), plans);
    assert!(takes_all() || counts.states > 300, "{counts:?}");
}

#[test]
fn native_encrypted_linear() {
    explore(&NativeSubject::linear().encrypted("vellum, encrypted, linear"), 4);
}

#[test]
fn native_encrypted_linear_over_a_base() {
    explore(&NativeSubject::linear_over_a_base().encrypted("vellum, encrypted, linear over a base"), 2);
}

#[test]
fn native_encrypted_table_over_a_base() {
    explore(&NativeSubject::table_over_a_base().encrypted("vellum, encrypted, table over a base"), 2);
}

#[test]
fn native_encrypted_units_on_a_device() {
    explore_units(
        &NativeSubject::units_on_a_device().encrypted("vellum, encrypted, table by units on a device"),
    );
}

#[test]
fn native_encrypted_zoned_over_a_base() {
    explore_zoned(&NativeSubject::zoned_over_a_base().encrypted("vellum, encrypted, zoned over a base"), 8);
}

#[test]
fn native_encrypted_snapshots() {
    explore_snapshots(&NativeSubject::snapshots().encrypted("vellum, encrypted, table with snapshots"), 4);
}

#[test]
fn native_encrypted_requests_of_all_kinds() {
    let subjects = [
        NativeSubject::linear_over_a_base().encrypted("vellum, encrypted, linear over a base, all kinds"),
        NativeSubject::units_over_a_base().encrypted("vellum, encrypted, table over a base, all kinds"),
        NativeSubject::zoned_with_everything().encrypted("vellum, encrypted, zoned, with everything"),
    ];
    for subject in &subjects {
        let mut plans: Vec<Plan> = (0..4 * scale()).map(kinds::of_all_kinds).collect();
        plans.extend((0..4 * scale()).map(kinds::with_a_failing_write));
        explore_plans(subject, plans);
    }
}

#[test]
fn native_units() {
    explore_units(&NativeSubject::units());
}

#[test]
fn native_units_over_a_base() {
    explore_units(&NativeSubject::units_over_a_base());
}

#[test]
fn native_tended_units() {
    explore_units(&NativeSubject::tended_units());
}

#[test]
fn native_tended_units_on_a_device() {
    explore_units(&NativeSubject::tended_units_on_a_device());
}

/// Discards release whole units in both pages. Reading all of such a disk takes long, and finds no more.
fn explore_two_pages(subject: &dyn Subject, one_in: usize) {
    let opened = |plan: Plan| {
        let program = plan.program.to_string().replace("discard@", "drop64k@");
        Plan { program: format!("w512@4 flush {program}").parse().unwrap(), ..plan }
    };
    let chosen: Vec<Plan> = plans(1).into_iter().step_by(part(one_in)).map(opened).collect();
    explore_carefully(subject, chosen, Thoroughness { whole_one_in: u64::MAX, ..Thoroughness::default() });
}

#[test]
fn native_two_pages() {
    explore_two_pages(&NativeSubject::two_pages(), 12);
}

#[test]
fn native_two_pages_of_zones() {
    explore_two_pages(&NativeSubject::two_pages_of_zones(), 12);
}

/// As above, where the second page lies in a part of the table.
#[test]
fn native_grown() {
    explore_two_pages(&NativeSubject::grown(), 60);
    explore_two_pages(&NativeSubject::grown_on_a_device(), 60);
}

#[test]
fn native_grown_zones() {
    explore_two_pages(&NativeSubject::grown_zones(), 60);
}

/// Programs whose openings meet a device that is full, a disk that ends elsewhere, and both half changed;
/// then some of the usual ones, with most of the device taken before.
fn explore_growing(subject: &dyn Subject, one_in: usize) {
    let known = [
        "w4k@0 w4k@1 w4k@2 w4k@3 w4k@4 flush reopen w4k@0 w512@1 flush",
        "w64k@2 w64k@4 w64k@0 flush w4k@1 reopen drop64k@2 w4k@3 flush reopen w512@0 w512@1 flush",
        "odd@0 odd@1 flush reopen odd@1 zero@0 flush reopen",
    ];
    let mut chosen: Vec<Plan> = known.map(|text| Plan::whole(text.parse().unwrap())).to_vec();
    chosen.extend(plans(1).into_iter().step_by(part(one_in)).map(|plan| {
        let program = plan.program.to_string().replace("discard@", "drop64k@");
        Plan { program: format!("w4k@3 w4k@4 flush {program}").parse().unwrap(), ..plan }
    }));
    explore_carefully(subject, chosen, Thoroughness { whole_one_in: u64::MAX, ..Thoroughness::default() });
}

#[test]
fn native_growing() {
    explore_growing(&NativeSubject::growing_on_a_device(), 40);
}

#[test]
fn native_growing_with_snapshots() {
    explore_snapshots(&NativeSubject::growing_with_snapshots(), 64);
    explore_snapshots(&NativeSubject::growing_over_a_base(), 64);
}

/// Twice round a ring, then one of the usual programs.
#[test]
fn native_larger_ring() {
    let round = |plan: Plan, number: usize| {
        // A unit that is released and taken again is on record each time; a sector that is overwritten is
        // not.
        let loops: String = (0..35 + number)
            .map(|step| (step * 7 + number) % 5)
            .map(|place| format!("w512@{place} flush drop64k@{place} flush "))
            .collect();
        let program = plan.program.to_string().replace("discard@", "drop64k@");
        Plan { program: format!("{loops}{program}").parse().unwrap(), ..plan }
    };
    let short = |plan: &Plan| plan.last_step_only && plan.program.queues.len() == 1;
    let chosen = plans(1).into_iter().filter(short).step_by(40).enumerate();
    explore_plans(&NativeSubject::larger_ring(), chosen.map(|(number, plan)| round(plan, number)).collect());
}

#[test]
fn native_units_on_a_device() {
    explore_units(&NativeSubject::units_on_a_device());
}
