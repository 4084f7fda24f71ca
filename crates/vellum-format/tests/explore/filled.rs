//! Copies of the disk below, between and beside what the guest does: copy-on-read, prefetch, flattening.

use super::*;

/// The same programs, in which some writes have become copies.
fn with_copies(plan: &Plan) -> Plan {
    let text = plan.program.to_string();
    let text = text.replace("w512@", "fill4k@").replace("odd@", "fill160k@").replace("fua@2", "fill64k@2");
    Plan { program: text.parse().unwrap(), ..plan.clone() }
}

fn explore_filled(subject: &dyn Subject, one_in: usize) {
    let drawn = plans(3);
    let mut chosen: Vec<Plan> = drawn.iter().step_by(part(one_in)).map(with_copies).collect();
    chosen.extend(kinds::copies(4 * scale()).into_iter().step_by(if one_in > 4 { 2 } else { 1 }));
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
