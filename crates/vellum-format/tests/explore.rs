//! The crash explorer on the formats: every image that every crash in every short program can leave is recovered, read
//! and checked.
//!
//! Usually all programs of up to two steps, some of three, and long ones by chance; `VELLUM_TEST_SCALE` multiplies what is
//! drawn by chance, and `VELLUM_EXPLORE=all` takes all programs of three steps. `VELLUM_EXPLORE_CASE=CASE` judges one
//! state again, and `VELLUM_EXPLORE_DUMP=FILE` writes its image down.

mod common;
mod subjects;

use common::scale;
use subjects::native::NativeSubject;
use subjects::{QcowSubject, RawSubject};
use vellum_core::Random;
use vellum_sim::explore::{Case, Counts, Explorer, Plan, Program, Step, Subject, Thoroughness};

/// Programs by chance for each subject: short ones, long ones, ones of several queues, ones whose flush fails.
const SHORT: u64 = 60;
const LONG: u64 = 6;
const SEVERAL: u64 = 8;
const FAILING: u64 = 30;

fn takes_all() -> bool {
    std::env::var("VELLUM_EXPLORE").is_ok_and(|what| what == "all")
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
    explore_plans(subject, plans(1).into_iter().step_by(one_in).collect())
}

#[allow(clippy::print_stderr, reason = "the counts are what the test is for")]
fn explore_plans(subject: &dyn Subject, plans: Vec<Plan>) -> Counts {
    let mut thoroughness = Thoroughness::default();
    if takes_all() {
        // Another program takes as long for one state as this for thousands; there are enough of them all the same.
        thoroughness.sample_one_in *= 10;
    }
    let explorer = Explorer::new(subject, thoroughness);
    if let Ok(text) = std::env::var("VELLUM_EXPLORE_CASE") {
        let case: Case = text.parse().unwrap();
        if case.subject == subject.name() {
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

#[test]
fn journal_over_a_base() {
    explore(&QcowSubject::journal_over_a_base(), 1);
}

#[test]
fn journal_with_subclusters_over_a_base() {
    explore(&QcowSubject::journal_subclusters(), 1);
}

#[test]
fn journal_on_a_device() {
    explore(&QcowSubject::journal_on_a_device(), 2);
}

#[test]
fn journal_with_little_memory() {
    explore(&QcowSubject::journal_small_cache(), 2);
}

#[test]
fn journal_with_large_clusters() {
    explore(&QcowSubject::journal_large_clusters(), 8);
}

#[test]
fn journal_with_wide_refcounts() {
    explore(&QcowSubject::journal_wide_refcounts(), 1);
}

#[test]
fn journal_with_narrow_refcounts() {
    explore(&QcowSubject::journal_narrow_refcounts(), 2);
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
    explore(&QcowSubject::journal_prepared(), 2);
}

/// The crashes of the paper that the journal is taken from (FAST'16, *Mitigating Sync Amplification for Copy-on-write
/// Virtual Disk*): two workloads, and of each 200 crashes between two flushes, some of the writes there lost. Each image is
/// looked at by QEMU, too.
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
    explore(&NativeSubject::table_over_a_base(), 1);
}

#[test]
fn native_table_over_a_base_in_large_blocks() {
    explore(&NativeSubject::table_over_a_base_in_large_blocks(), 2);
}

#[test]
fn native_table_on_a_device() {
    explore(&NativeSubject::table_on_a_device(), 2);
}

/// Discards let go of whole units, so that these are taken again.
fn explore_units(subject: &dyn Subject) {
    let whole = |plan: Plan| {
        let program = plan.program.to_string().replace("discard@", "drop64k@").parse().unwrap();
        Plan { program, ..plan }
    };
    explore_plans(subject, plans(1).into_iter().step_by(2).map(whole).collect());
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
    let mut chosen: Vec<Plan> = plans(1).iter().map(asking).filter(asks).step_by(one_in).collect();
    for text in [
        "w4k@0 drop64k@0 w4k@0 flush",
        "w64k@0 drop64k@0 w512@0 flush drop64k@0 w512@0 w4k@1 flush drop64k@1 w4k@0 flush",
        "w64k@0 w4k@1 flush drop64k@0 zero@0 drop64k@0 w512@1 flush drop64k@1 drop64k@1 w512@2 flush",
        "w4k@0 drop64k@0 drop64k@1 w4k@0 flush drop64k@0 w4k@1 reopen w4k@0 flush drop64k@2 w4k@2 flush",
        "w64k@0 drop64k@0 reopen w64k@0 flush drop64k@0 reopen drop64k@1 reopen w4k@1 flush w4k@2",
    ] {
        chosen.push(Plan::whole(text.parse().unwrap()));
    }
    explore_plans(subject, chosen);
}

#[test]
fn native_snapshots() {
    explore_snapshots(&NativeSubject::snapshots(), 2);
}

#[test]
fn native_snapshots_over_a_base() {
    explore_snapshots(&NativeSubject::snapshots_over_a_base(), 4);
}

/// Before each program something is written and flushed, so that a zone is open; discards let go of whole units. Programs of two seeds.
fn explore_zoned(subject: &dyn Subject, one_in: usize) {
    let opened = |plan: Plan| {
        let program = plan.program.to_string().replace("discard@", "drop64k@");
        Plan { program: format!("w512@4 flush {program}").parse().unwrap(), ..plan }
    };
    let both = plans(1).into_iter().chain(plans(2));
    explore_plans(subject, both.step_by(one_in).map(opened).collect());
}

#[test]
fn native_zoned() {
    explore_zoned(&NativeSubject::zoned(), 1);
}

#[test]
fn native_zoned_in_small_zones() {
    explore_zoned(&NativeSubject::zoned_in_small_zones(), 1);
}

#[test]
fn native_zoned_on_a_device() {
    explore_zoned(&NativeSubject::zoned_on_a_device(), 1);
}

#[test]
fn native_zoned_over_a_base() {
    explore_zoned(&NativeSubject::zoned_over_a_base(), 2);
}

#[test]
fn native_zoned_prepared() {
    explore_zoned(&NativeSubject::zoned_prepared(), 1);
}

#[test]
fn native_zoned_in_quiet_times() {
    explore_zoned(&NativeSubject::zoned_in_quiet_times(), 1);
}

#[test]
fn native_zoned_compacted() {
    explore_zoned(&NativeSubject::zoned_compacted(), 1);
}

#[test]
fn native_zoned_with_snapshots() {
    explore_snapshots(&NativeSubject::zoned_with_snapshots(), 1);
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

#[test]
fn native_units_on_a_device() {
    explore_units(&NativeSubject::units_on_a_device());
}
