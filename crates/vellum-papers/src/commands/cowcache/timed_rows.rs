//! Rows of what is timed. Each gives the ratio on the network as it is, and the least and the most of the three.

use super::Runs;
use super::judged::{factor, none, scaled};
use super::speeds::{ALLOCATING, Speed};
use crate::report::{Good, How, Row};

const WITHOUT: &str = "writethrough is not timed";

/// A gain with its band, in words.
fn gain(speed: &Speed) -> String {
    let (gain, least, most) = speed.gain();
    format!("{gain:.2} times ({least:.2} to {most:.2})")
}

struct Rows<'a> {
    runs: &'a Runs,
    rows: Vec<Row>,
}

impl Rows<'_> {
    fn push(
        &mut self,
        id: &'static str,
        place: &'static str,
        what: &str,
        paper: &str,
        (value, here): (f64, String),
        good: Good,
    ) {
        let row = Row::judged(id, (place, what), How::Simulated, (paper, here), value, good);
        self.rows.push(scaled(self.runs.is_full, row));
    }

    fn push_gain(
        &mut self,
        id: &'static str,
        place: &'static str,
        what: &str,
        paper: &str,
        speed: &Speed,
        good: Good,
    ) {
        self.push(id, place, what, paper, (speed.gain().0, gain(speed)), good);
    }
}

/// C5.
pub(super) fn figure_9(runs: &Runs) -> Vec<Row> {
    let mut rows = Rows { runs, rows: Vec::new() };
    let [small, _, large] = &runs.speeds.by_memory[..] else { unreachable!("three of them") };
    rows.push_gain(
        "C5",
        "Fig. 9",
        "random 64 KiB writes, write-back, 1 MB for tables",
        "+175.7 %",
        small,
        Good::High(2.757),
    );
    rows.push_gain("C5", "Fig. 9", "  128 MB", "+2 %", large, Good::High(1.02));
    rows.rows.push(none("C5", "Fig. 9", "  writethrough", "+6.7 to +116.5 %", WITHOUT));
    rows.rows
}

/// C12.
pub(super) fn figure_10a(runs: &Runs) -> Vec<Row> {
    let mut rows = Rows { runs, rows: Vec::new() };
    let [small, middle @ .., aligned, across] = &runs.speeds.random[..] else { unreachable!("six of them") };
    let fitted = Row::judged(
        "C12",
        ("Fig. 10a", "random 4 KiB writes, write-back"),
        How::Simulated,
        ("4.4 times", gain(small)),
        small.gain().0,
        Good::High(4.4),
    );
    rows.rows.push(fitted.not_judged("the processor's time for a request is fitted on this row"));
    let range = Good::Within(1.6, 4.4);
    for (name, speed) in ["  8 KiB", "  16 KiB", "  32 KiB"].into_iter().zip(middle) {
        rows.push_gain("C12", "Fig. 10a", name, "+60 % to 4.4 times", speed, range);
    }
    rows.push_gain("C12", "Fig. 10a", "  64 KiB across two clusters", "+60 % to 4.4 times", across, range);
    rows.push_gain("C12", "Fig. 10a", "  64 KiB aligned", "the same", aligned, Good::Near(1.0));
    rows.rows.push(none("C12", "Fig. 10a", "  writethrough", "+3.8 to +10.9 %", WITHOUT));
    rows.rows
}

/// C15 to C17.
pub(super) fn figure_11(runs: &Runs) -> Vec<Row> {
    let mut rows = Rows { runs, rows: Vec::new() };
    let [two, one] = &runs.speeds.mixed;
    let list = |all: &[Speed]| {
        all.iter().map(|speed| format!("{:.2}", speed.gain().0)).collect::<Vec<_>>().join(" / ")
    };
    let shares = ALLOCATING.map(|share| share.to_string()).join("/");
    let mut range = |id, what: &str, paper: &str, all: &[Speed], (least, most)| {
        let worst = all.iter().map(|speed| speed.gain().0).fold(f64::INFINITY, f64::min);
        rows.push(
            id,
            "Fig. 11",
            &format!("{what}, COW ratio {shares} %; judged by the least"),
            paper,
            (worst, format!("{} times", list(all))),
            Good::Within(least, most),
        );
    };
    range("C15", "4 KiB, writes to reads 2:1, write-back", "1.8 to 3.4 times", two, (1.8, 3.4));
    range("C17", "  1:2", "1.0 to 1.7 times", one, (1.0, 1.7));
    let faster = |speeds: fn(&Speed) -> [f64; 3]| speeds(&two[2])[0] / speeds(&two[0])[0];
    let (ours, rival) = (faster(|speed| speed.ours), faster(|speed| speed.rival));
    let more = |ratio: f64| format!("{:+.1} %", 100.0 * (ratio - 1.0));
    rows.push(
        "C16",
        "Fig. 11",
        "COW ratio 40 against 80 %: here",
        "+16.3 %",
        (ours, more(ours)),
        Good::Near(1.163),
    );
    rows.push("C16", "Fig. 11", "  TRDC", "+79.6 %", (rival, more(rival)), Good::Near(1.796));
    rows.rows.push(none("C15", "Fig. 11", "writethrough, 2:1", "+4.1 to +7 %", WITHOUT));
    rows.rows.push(none("C17", "Fig. 11", "  1:2", "+2.3 to +8.2 %", WITHOUT));
    rows.rows
}

/// C18 and C19.
pub(super) fn figure_12(runs: &Runs) -> Vec<Row> {
    let mut rows = Rows { runs, rows: Vec::new() };
    let all = &runs.speeds.oltp;
    for (name, speed) in ["OLTP2-1, write-back", "  OLTP2-8", "  OLTP8-1", "  OLTP8-8"].into_iter().zip(all) {
        rows.push_gain("C18", "Fig. 12", name, "+86.2 to +122.7 %", speed, Good::Within(1.862, 2.227));
    }
    let slower = |speeds: fn(&Speed) -> [f64; 3]| speeds(&all[0])[0] / speeds(&all[1])[0];
    let (ours, rival) = (slower(|speed| speed.ours), slower(|speed| speed.rival));
    let less = |ratio: f64| format!("{:+.1} %", 100.0 * (ratio - 1.0));
    rows.push(
        "C19",
        "Fig. 12",
        "OLTP2-1 against OLTP2-8: here",
        "-2 %",
        (ours, less(ours)),
        Good::Near(0.98),
    );
    rows.push("C19", "Fig. 12", "  TRDC", "-18.1 %", (rival, less(rival)), Good::Near(0.819));
    rows.rows.push(none("C18", "Fig. 12", "OLTP, writethrough", "+52.5 to +86.8 %", WITHOUT));
    rows.rows
}

/// C24 and C26.
pub(super) fn figure_13(runs: &Runs) -> Vec<Row> {
    let speed = &runs.speeds.varmail;
    let row = Row::judged(
        "C24",
        ("Fig. 13", "Varmail, write-back"),
        How::Simulated,
        ("+78.6 %", gain(speed)),
        speed.gain().0,
        Good::High(1.786),
    );
    vec![
        row.not_judged("another size: varmail's parameters, recorded, 54 MiB written on ext4"),
        none("C24", "Fig. 13", "  Fileserver, YCSB-A", "+24.5, +23.3 %", "not recorded"),
    ]
}

/// What a factor of this much stands for, checked against the paper's headline.
pub(super) fn headline(runs: &Runs) -> Vec<Row> {
    let best = runs.speeds.oltp.iter().map(|speed| speed.gain().0).fold(0.0, f64::max);
    let saved = runs.oltp.iter().map(super::Pair::gain).fold(0.0, f64::max);
    let mut rows = Rows { runs, rows: Vec::new() };
    rows.push(
        "C1",
        "abstract",
        "performance, the best of OLTP",
        "+122.7 %",
        (best, format!("{:+.1} %", 100.0 * (best - 1.0))),
        Good::High(2.227),
    );
    let less = format!("{:+.1} %", -100.0 * (1.0 - 1.0 / saved));
    let row = Row::judged(
        "C1",
        ("abstract", "  flash writes"),
        How::Counted,
        ("-78.5 %", less),
        saved,
        Good::High(factor(78.5)),
    );
    rows.rows.push(scaled(runs.is_full, row));
    rows.rows
}
