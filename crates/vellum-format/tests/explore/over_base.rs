//! Units over the base that hold their own entries: their other sub-blocks are written, filled, zeroed and released,
//! their neighbours share words with them, and snapshots are made, deleted and gone back to.

use super::*;

/// What drafts of the rule did not survive, and its like. Places 0 and 1 are in one unit, 2 and 3 in its neighbour,
/// and 4 is behind the base, where the first write opens a zone. (The third step of a program writes what does not pack, so
/// it is a flush.)
const TEXTS: [&str; 22] = [
    // Another sub-block of the unit, before the packed block is flushed and after it.
    "w512@4 flush flush w4k@0 w4k@1 flush",
    "w512@4 flush flush w4k@0 flush w4k@1 flush w4k@0 flush reopen w4k@1",
    "w512@4 flush flush w512@0 flush odd@1 w512@1 flush fua@0",
    // What fills more than the packed block.
    "w512@4 flush flush w64k@0 flush w64k@2 w4k@0 flush",
    "w512@4 flush flush odd@0 flush long@0 flush",
    // The neighbour's words.
    "w512@4 flush flush w4k@0 w4k@2 flush w4k@3 flush w4k@1 flush",
    "w512@4 flush flush w4k@0 w4k@2 w4k@3 flush zero@2 flush",
    // The unit is released and taken again, with a flush in between or without one.
    "w512@4 flush flush w4k@0 flush drop64k@0 w4k@1 flush",
    "w512@4 flush flush w4k@0 flush w4k@0 drop64k@0 w4k@1 w4k@0 flush",
    "w512@4 flush flush w4k@0 w4k@2 flush w4k@1 w4k@3 drop64k@0 drop64k@2 w4k@1 w512@3 flush",
    "w512@4 flush flush w4k@0 flush drop64k@0 flush w4k@1 flush w4k@0 flush",
    "w512@4 flush flush w4k@0 flush drop160k@0 w4k@0 w4k@2 flush reopen w4k@0",
    // The packed block is overwritten, in part and as a whole, and zeroed.
    "w512@4 flush flush w512@0 w512@0 flush zero@0 flush w4k@0",
    "w512@4 flush flush w4k@0 flush keep@0 w4k@1 flush zero160k@0 flush",
    "w512@4 flush flush zero@0 w4k@0 flush w4k@1 w4k@0 flush",
    // Several at a time.
    "w512@4 flush flush w4k@0 flush w4k@1 | w4k@2 flush w4k@3 | w512@1 flush w512@3",
    "w512@4 w4k@0 drop64k@0 w4k@0 flush | w4k@1 fua@1 w4k@2 | flush flush flush",
    // Copies of the base beside the packed block.
    "w512@4 flush flush w4k@0 fill64k@0 flush w4k@1 flush",
    "w512@4 flush flush w4k@0 flush fill160k@0 w4k@0 flush drop64k@0 w4k@0 flush",
    "w512@4 flush flush w512@0 w512@2 | fill64k@0 fill4k@1 fill64k@2 | flush flush w4k@3",
    // Zones fill and are closed.
    "w512@4 flush flush w4k@0 w4k@2 flush drop64k@0 drop64k@2 flush w4k@0 w4k@2 flush w4k@1 drop64k@2 flush w4k@3 flush",
    "w512@4 flush flush w4k@0 reopen w4k@1 w4k@2 flush reopen w4k@3 flush",
];

/// The same, where `drop64k` makes snapshots (at 0) and deletes them (the newest at 2, else the oldest).
const TEXTS_OF_SNAPSHOTS: [&str; 12] = [
    "w512@4 flush flush drop64k@0 w4k@0 flush w4k@2 flush",
    "w512@4 flush flush drop64k@0 w512@4 flush w4k@0 flush w4k@2 flush w4k@1 flush",
    "w512@4 flush flush w4k@0 drop64k@0 w4k@1 flush w4k@2 flush w4k@0 flush",
    "w512@4 flush flush w4k@0 flush drop64k@0 w4k@2 flush w4k@3 drop64k@0 w4k@1 flush drop64k@2 w4k@3 flush",
    "w512@4 flush flush drop64k@0 w4k@2 flush w4k@0 flush drop64k@1 w4k@1 flush w4k@3 flush",
    "w512@4 flush flush drop64k@0 w4k@2 flush w4k@0 drop64k@0 w512@1 flush drop64k@2 drop64k@2 w4k@1 flush",
    "w512@4 flush flush w4k@0 w4k@2 drop64k@0 drop160k@0 flush w4k@0 w512@2 flush drop64k@1 w4k@1 flush",
    "w512@4 flush flush drop64k@0 w4k@2 flush w4k@0 fill64k@0 flush drop64k@0 fill64k@2 w4k@1 flush",
    "w512@4 flush flush drop64k@0 w4k@2 flush w512@0 flush w512@0 drop64k@0 w512@1 flush reopen w4k@3",
    "w512@4 flush flush w4k@0 drop64k@0 drop64k@2 w4k@2 | w4k@1 w4k@0 flush w4k@3 flush | fua@3 w4k@0",
    "w4k@2 drop64k@0 w512@0 drop64k@0 w4k@1 flush | w4k@0 w4k@3 flush w4k@1 flush",
    "w512@4 flush flush drop64k@0 w4k@2 flush w4k@0 flush reopen drop64k@2 w4k@1 flush drop64k@0 w4k@3 flush",
];

fn of(texts: &[&str], seeds: u64) -> Vec<Plan> {
    let plan = |text: &&str, seed| Plan { seed, ..Plan::whole(text.parse().unwrap()) };
    let mut plans: Vec<Plan> =
        (0..seeds).flat_map(|seed| texts.iter().map(move |text| plan(text, seed))).collect();
    for text in texts {
        plans.extend((2..5).map(|number| Plan { fail_flush: Some(number), ..plan(text, 0) }));
        plans.extend((5..8).map(|number| Plan { fail_write: Some(number), ..plan(text, 0) }));
    }
    plans
}

/// The usual programs behind a first write that opens a zone; discards release whole units, and some writes are copies.
fn drawn(seed: u64, one_in: usize) -> Vec<Plan> {
    let opened = |(number, plan): (usize, Plan)| {
        let mut program = plan.program.to_string().replace("discard@", "drop64k@");
        if number % 4 == 3 {
            program = program.replace("odd@", "fill64k@");
        }
        Plan { program: format!("w512@4 flush flush {program}").parse().unwrap(), ..plan }
    };
    plans(seed).into_iter().step_by(part(one_in)).enumerate().map(opened).collect()
}

fn explore_over_base(subject: &NativeSubject, one_in: usize) {
    let mut all = of(&TEXTS, 2 * scale());
    all.extend(drawn(1, one_in));
    all.extend(drawn(2, one_in));
    all.extend((0..4 * scale()).map(kinds::of_all_kinds));
    all.extend((0..4 * scale()).map(kinds::with_a_failing_write));
    // A copy makes no space: where no clean unit is at hand, it fails.
    all.retain(|plan| !subject.is_on_a_device() || !plan.program.to_string().contains("fill"));
    let counts = explore_plans(subject, all);
    assert!(counts.programs == 0 || counts.states > 2000, "{counts:?}");
}

#[test]
fn native_packed_over_a_base() {
    explore_over_base(&NativeSubject::packed_over_a_base(), 4);
}

#[test]
fn native_packed_over_a_base_in_small_blocks() {
    explore_over_base(&NativeSubject::packed_over_a_base_in_small_blocks(), 12);
}

#[test]
fn native_packed_over_a_base_in_large_blocks() {
    explore_over_base(&NativeSubject::packed_over_a_base_in_large_blocks(), 12);
}

#[test]
fn native_packed_over_a_base_on_an_old_device() {
    explore_over_base(&NativeSubject::packed_over_a_base_on_an_old_device(), 8);
}

#[test]
fn native_packed_over_a_base_in_quiet_times() {
    explore_over_base(&NativeSubject::packed_over_a_base_in_quiet_times(), 8);
}

#[test]
fn native_packed_over_a_base_in_small_zones() {
    let subject = NativeSubject::packed_over_a_base_in_small_zones();
    let again = (0..24 * scale()).map(kinds::packed_again).collect();
    let counts = explore_plans(&subject, again);
    assert!(counts.programs == 0 || counts.states > 1000, "{counts:?}");
    explore_over_base(&subject, 12);
}

#[test]
fn native_packed_over_a_base_with_snapshots() {
    let subject = NativeSubject::packed_over_a_base_with_snapshots();
    // Each state is looked at with all of its snapshots, so there are fewer programs.
    let plan = |text: &&str| Plan::whole(text.parse().unwrap());
    let mut all: Vec<Plan> = TEXTS_OF_SNAPSHOTS.iter().map(plan).collect();
    all.extend((0..4 * scale()).map(kinds::snapshots_beside_guests));
    let asks = |plan: &Plan| plan.program.queues.len() == 1 && plan.program.to_string().contains("drop64k@0");
    all.extend(drawn(1, 12).into_iter().chain(drawn(2, 12)).filter(asks));
    let counts = explore_plans(&subject, all);
    assert!(counts.programs == 0 || counts.states > 1000, "{counts:?}");
}
