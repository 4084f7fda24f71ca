//! Kinds of programs that are not drawn at random.

use vellum_core::Random;
use vellum_sim::explore::{Plan, Program};

/// Draws this many steps.
fn steps(random: &mut Random, count: u64, of: &[&str]) -> String {
    (0..count).map(|_| format!("{} ", random.pick(of))).collect()
}

/// Snapshots made and deleted in one queue, while one or two others write to the same units.
pub(crate) fn snapshots_beside_guests(seed: u64) -> Plan {
    let mut random = Random::from_seed(seed);
    let asking =
        ["drop64k@0", "drop64k@0", "drop64k@2", "drop64k@2", "drop64k@1", "w512@0", "w4k@3", "flush"];
    let writing =
        ["w512@0", "w4k@0", "w4k@3", "w512@3", "zero@0", "odd@0", "keep@3", "w4k@1", "fua@0", "flush"];
    let mut text = format!("w64k@0 w4k@3 drop64k@0 {}", steps(&mut random, 4, &asking));
    for _ in 0..1 + random.below(2) {
        text += &format!("| {}", steps(&mut random, 6, &writing));
    }
    Plan { seed, stalls: true, ..Plan::whole(text.parse().expect("a program")) }
}

/// Zeros and discards of all kinds, writes over several units, between others; sometimes side by side.
pub(crate) fn of_all_kinds(seed: u64) -> Plan {
    let mut random = Random::from_seed(seed);
    let acts = [
        "keep@0",
        "zfua@0",
        "dfua@0",
        "zero160k@0",
        "drop160k@0",
        "long@0",
        "keep@1",
        "zfua@2",
        "zero160k@2",
    ];
    let others = ["w4k@0", "w512@1", "odd@2", "fua@1", "drop64k@0", "flush", "flush"];
    let queues = if random.one_in(3) { 2 } else { 1 };
    let queue = |random: &mut Random| {
        let pairs = (0..2).map(|_| steps(random, 1, &others) + &steps(random, 1, &acts));
        format!("{}{}", pairs.collect::<String>(), steps(random, 1, &others))
    };
    let texts: Vec<String> = (0..queues).map(|_| queue(&mut random)).collect();
    let text = texts.join("| ");
    Plan { seed, ..Plan::whole(text.parse().expect("a program")) }
}

/// Units over a base are released and packed again, with zones that are emptied and opened again.
pub(crate) fn packed_again(seed: u64) -> Plan {
    let mut random = Random::from_seed(seed);
    let acts = ["w4k@0 ", "w4k@1 ", "w4k@2 ", "w4k@3 ", "drop64k@0 ", "drop64k@2 ", "drop160k@0 "];
    let text: String = (0..14 + random.below(8))
        .map(|_| format!("{}{}", random.pick(&acts), if random.one_in(3) { "" } else { "flush " }))
        .collect();
    Plan { seed, ..Plan::whole(format!("w512@4 flush flush {text}").parse().expect("a program")) }
}

/// One write of the host fails, and the guest continues.
pub(crate) fn with_a_failing_write(seed: u64) -> Plan {
    let mut random = Random::from_seed(seed);
    let mut plan = match random.one_in(2) {
        true => of_all_kinds(seed),
        false => Plan::whole(Program::random(&mut random, 1, 5, 3)),
    };
    plan.fail_write = Some(random.below(16));
    plan
}

/// Copies of the disk below between and beside requests: what drafts of the protocol did not survive, and its like.
/// Each program with as many seeds, and with each of the first flushes and writes failing.
pub(crate) fn copies(seeds: u64) -> Vec<Plan> {
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
        "fill64k@0 zero@0 keep@0 fill64k@0 reopen w512@1",
        "fill64k@0 reopen w4k@0 flush zero@0 reopen",
        // Beside a guest: in the same cluster, in the same block.
        "w4k@0 w512@0 flush zero@0 flush | fill64k@0 fill160k@4 fill4k@0 fill64k@0",
        "zero@0 w512@0 discard@0 flush | fill64k@0 fill64k@0 fill64k@0 | fua@1 odd@0 flush",
        "w64k@0 zero@0 flush keep@0 | fill160k@4 fill160k@4 | fill4k@0 fill4k@0 fill64k@0",
    ];
    let mut plans = Vec::new();
    for text in texts {
        let plan = Plan::whole(text.parse().unwrap());
        plans.extend((0..seeds).map(|seed| Plan { seed, ..plan.clone() }));
        plans.extend((0..6).map(|number| Plan { fail_flush: Some(number), ..plan.clone() }));
        plans.extend((0..6).map(|number| Plan { fail_write: Some(number), ..plan.clone() }));
    }
    plans
}
