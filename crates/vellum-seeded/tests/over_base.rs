//! The rule for packed blocks over a base (design note 0006): each part of it is left out, and must be missed.

extern crate vellum_seeded as vellum_format;

#[path = "../../vellum-format/tests/common/mod.rs"]
mod common;
#[path = "../../vellum-format/tests/native/over_base_trials.rs"]
mod over_base_trials;
mod sabotaged;
#[path = "../../vellum-format/tests/subjects/mod.rs"]
mod subjects;

use over_base_trials::packed_blocks_of_a_released_unit;
use subjects::native::NativeSubject;
use vellum_format::sabotage::{Bug, put_in};
use vellum_sim::explore::Plan;

fn find(inner: NativeSubject, bug: Bug, texts: &[&str]) {
    let plan = |text: &&str, seed| Plan { seed, ..Plan::whole(text.parse().unwrap()) };
    let plans: Vec<Plan> = (0..4).flat_map(|seed| texts.iter().map(move |text| plan(text, seed))).collect();
    sabotaged::find(inner, bug, &plans, sabotaged::thoroughness(50));
}

/// What is beside the packed block is lost with the write, and not zero.
#[test]
fn more_than_packed() {
    find(NativeSubject::packed_over_a_base(), Bug::MoreThanPacked, &["w512@4 flush flush w64k@0 flush"]);
}

#[test]
fn entry_not_with_mask() {
    find(
        NativeSubject::packed_over_a_base(),
        Bug::EntryNotWithMask,
        &["w512@4 flush flush w4k@0 w4k@1 flush"],
    );
}

/// By another sub-block, by an overwrite, by a move, by a quiet time and by a close.
#[test]
fn packed_mask_left() {
    let subject = NativeSubject::packed_over_a_base;
    find(subject(), Bug::PackedMaskLeft, &["w512@4 flush flush w4k@0 flush w4k@1 flush"]);
    find(subject(), Bug::PackedMaskLeft, &["w512@4 flush flush w4k@0 flush w512@0 flush"]);
    find(subject(), Bug::PackedMaskLeft, &["w512@4 flush flush w4k@0 flush fill4k@1 flush"]);
    find(subject(), Bug::PackedMaskLeft, &["w512@4 flush flush w4k@0 reopen"]);
    let old = NativeSubject::packed_over_a_base_on_an_old_device();
    find(old, Bug::PackedMaskLeft, &["w512@4 flush flush w4k@0 flush w64k@0 flush"]);
    let quiet = NativeSubject::packed_over_a_base_in_quiet_times();
    find(quiet, Bug::PackedMaskLeft, &["w512@4 flush flush w4k@0 flush flush flush"]);
}

#[test]
fn found_mask_left() {
    find(NativeSubject::packed_over_a_base(), Bug::FoundMaskLeft, &["w512@4 flush flush w4k@0 flush"]);
}

/// The neighbour's entry is in the same word.
#[test]
fn agreed_mask_left() {
    let text = "w512@4 flush flush w4k@0 flush w4k@2 flush w4k@3 flush";
    find(NativeSubject::packed_over_a_base(), Bug::AgreedMaskLeft, &[text]);
}

#[test]
fn unkept_mask_embeds() {
    let text = "w512@4 flush flush drop64k@0 w4k@0 w4k@2 flush";
    find(NativeSubject::packed_over_a_base_with_snapshots(), Bug::UnkeptMaskEmbeds, &[text]);
}

/// It takes a zone that was emptied and opened again to lose bytes by this, so the blocks are counted.
#[test]
fn packed_twice() {
    put_in(Some(Bug::PackedTwice));
    let found = packed_blocks_of_a_released_unit();
    put_in(None);
    assert_eq!((found, packed_blocks_of_a_released_unit()), (2, 1));
}
