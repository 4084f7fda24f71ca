//! The crash explorer itself is tested: each of these bugs is put into a correct engine, and must be found.

mod common;
mod sabotage;
mod subjects;

use sabotage::{Bug, Kind, Sabotaged};
use subjects::QcowSubject;
use vellum_core::Random;
use vellum_sim::explore::{Depth, Explorer, Plan, Program, Subject, Thoroughness};

const BUGS: [Bug; 22] = [
    Bug::NoFlushAfter(Kind::L2),
    Bug::NoFlushAfter(Kind::Header),
    Bug::NoFlushAfter(Kind::Data),
    Bug::NoFlush,
    Bug::FlushErrorIgnored,
    Bug::Lost(Kind::Header),
    Bug::Lost(Kind::Refcounts),
    Bug::Lost(Kind::L1),
    Bug::Lost(Kind::L2),
    Bug::Lost(Kind::Data),
    Bug::Late(Kind::Header),
    Bug::Late(Kind::L1),
    Bug::Late(Kind::L2),
    Bug::Late(Kind::Data),
    Bug::Short(Kind::Data),
    Bug::NoPunch,
    Bug::LatePunch,
    Bug::CutTooShort,
    Bug::FuaIgnored,
    Bug::FlushSkipped,
    Bug::WriteAnsweredEarly,
    Bug::EdgeNotMerged,
];

/// Those that a repair makes good wherever there is a mark that asks for it: only version 2 relies on the
/// order.
const BUGS_OF_THE_ORDER: [Bug; 4] = [
    Bug::NoFlushAfter(Kind::Refcounts),
    Bug::NoFlushAfter(Kind::RefcountTable),
    Bug::Lost(Kind::RefcountTable),
    Bug::Late(Kind::Refcounts),
];

/// Those that show only where a base lies beneath, or only there soon.
const BUGS_OVER_A_BASE: [Bug; 3] = [Bug::DiscardTooLong, Bug::ZeroesIgnored, Bug::CloseForgets];

fn plans() -> Vec<Plan> {
    let mut plans: Vec<Plan> = (1..=2).flat_map(|len| Program::all(len, 3)).map(Plan::last_step).collect();
    let mut random = Random::from_seed(3);
    for number in 0..400 {
        let program = Program::random(&mut random, 1, 4, 3);
        let fail_flush = (number % 4 == 0).then(|| random.below(10));
        plans.push(Plan { fail_flush, ..Plan::whole(program) });
    }
    for _ in 0..60 {
        plans.push(Plan::whole(Program::random(&mut random, 1, 14, 8)));
    }
    plans
}

/// How many states it took.
#[allow(clippy::print_stderr, reason = "how soon each is found is worth knowing")]
fn find(subject: &dyn Subject) -> Option<String> {
    let thoroughness = Thoroughness {
        depth: Depth { sampled: 8, ..Depth::FULL },
        nested_one_in: 50,
        sample_one_in: u64::MAX,
        whole_one_in: 50,
    };
    let explorer = Explorer::new(subject, thoroughness);
    let report = explorer.explore_all(&plans(), 1);
    let Some(failure) = report.failures.first() else { return Some(report.to_string()) };
    eprintln!("{}: found after {} states: {}", subject.name(), report.counts.judged, failure.what);
    // The case names the state: it fails again, by itself.
    let (_, verdict) = explorer.replay(&failure.case.to_string().parse().unwrap());
    assert!(
        verdict.is_err() || failure.what.starts_with("nothing failed"),
        "{failure}: passes when it is judged again"
    );
    None
}

#[test]
fn every_seeded_bug_is_found() {
    let missed: Vec<String> =
        BUGS.into_iter().filter_map(|bug| find(&Sabotaged { inner: QcowSubject::plain(), bug })).collect();
    assert!(missed.is_empty(), "not found: {missed:#?}");
}

#[test]
fn every_seeded_bug_of_the_order_is_found() {
    let missed: Vec<String> = BUGS_OF_THE_ORDER
        .into_iter()
        .filter_map(|bug| find(&Sabotaged { inner: QcowSubject::version_2(), bug }))
        .collect();
    assert!(missed.is_empty(), "not found: {missed:#?}");
}

#[test]
fn every_seeded_bug_over_a_base_is_found() {
    let missed: Vec<String> = BUGS_OVER_A_BASE
        .into_iter()
        .filter_map(|bug| find(&Sabotaged { inner: QcowSubject::over_a_base(), bug }))
        .collect();
    assert!(missed.is_empty(), "not found: {missed:#?}");
}
