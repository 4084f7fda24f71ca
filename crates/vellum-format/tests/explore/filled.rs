//! Copies of the disk below, between and beside what the guest does: copy-on-read, prefetch, flattening.

use super::*;

/// The same programs, in which some writes have become copies.
fn with_copies(plan: &Plan) -> Plan {
    let text = plan.program.to_string();
    let text = text.replace("w512@", "fill4k@").replace("odd@", "fill160k@").replace("fua@2", "fill64k@2");
    Plan { program: text.parse().unwrap(), ..plan.clone() }
}

/// What drafts of the protocol did not survive, and its like.
fn known() -> Vec<Plan> {
    let texts = [
        // A part of what was filled is overwritten, and only that is flushed.
        "fill64k@0 w512@0 flush",
        "fill160k@4 flush odd@0 flush w4k@4 fua@0",
        // What was filled becomes zero, and is filled again.
        "fill64k@0 zero@0 flush fill64k@0 flush reopen",
        "fill160k@4 zero@0 flush reopen fill160k@4 reopen zero@0 flush",
        "fill64k@0 keep@0 flush reopen keep@0 fill64k@0 flush",
        "fill64k@0 flush discard@0 reopen fill160k@4 drop160k@4 flush",
        "zero@0 fill64k@0 w512@0 flush reopen",
        "fill64k@0 reopen w4k@0 flush zero@0 reopen",
        // Beside a guest: in the same cluster, in the same block.
        "w4k@0 w512@0 flush zero@0 flush | fill64k@0 fill160k@4 fill4k@0 fill64k@0",
        "zero@0 w512@0 discard@0 flush | fill64k@0 fill64k@0 fill64k@0 | fua@1 odd@0 flush",
        "w64k@0 zero@0 flush keep@0 | fill160k@4 fill160k@4 | fill4k@0 fill4k@0 fill64k@0",
    ];
    let mut plans = Vec::new();
    for text in texts {
        let plan = Plan::whole(text.parse().unwrap());
        plans.extend((0..4 * scale()).map(|seed| Plan { seed, ..plan.clone() }));
        plans.extend((0..6).map(|number| Plan { fail_flush: Some(number), ..plan.clone() }));
        plans.extend((0..6).map(|number| Plan { fail_write: Some(number), ..plan.clone() }));
    }
    plans
}

fn explore_filled(subject: &dyn Subject, one_in: usize) {
    let drawn = plans(3);
    let mut chosen: Vec<Plan> = drawn.iter().step_by(part(one_in)).map(with_copies).collect();
    chosen.extend(known().into_iter().step_by(if one_in > 4 { 2 } else { 1 }));
    chosen.extend(failing_flushes().iter().map(with_copies).step_by(part(one_in)));
    let counts = explore_plans(subject, chosen);
    assert!(counts.programs == 0 || counts.states > 500, "{counts:?}");
}

#[test]
fn filled_linear() {
    explore_filled(&NativeSubject::linear_over_a_base(), 2);
}

#[test]
fn filled_table() {
    explore_filled(&NativeSubject::table_over_a_base(), 3);
}

#[test]
fn filled_table_in_large_blocks() {
    explore_filled(&NativeSubject::table_over_a_base_in_large_blocks(), 8);
}

#[test]
fn filled_zoned() {
    explore_filled(&NativeSubject::zoned_over_a_base(), 8);
}

#[test]
fn filled_qcow2() {
    explore_filled(&QcowSubject::journal_over_a_base(), 3);
}

#[test]
fn filled_qcow2_with_subclusters() {
    explore_filled(&QcowSubject::journal_subclusters(), 6);
}

/// What a snapshot sees is not filled; what came after it is.
#[test]
fn filled_with_snapshots() {
    let texts = [
        "fill64k@0 drop64k@0 fill64k@0 fill64k@1 flush",
        "w4k@0 fill64k@0 flush drop64k@0 fill64k@0 w512@0 fill64k@0 flush drop64k@1 fill64k@0 flush",
        "drop64k@0 fill64k@1 w512@1 fill64k@1 flush drop64k@2 w512@1 fill64k@1 reopen",
        "fill64k@0 fill64k@1 drop64k@0 zero@0 fill64k@0 drop64k@0 w512@1 flush drop64k@1 drop64k@1 fill64k@1 flush",
    ];
    let plans = texts.map(|text| Plan::whole(text.parse().unwrap())).to_vec();
    explore_plans(&NativeSubject::snapshots_over_a_base(), plans);
}
