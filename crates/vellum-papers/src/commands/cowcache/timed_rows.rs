//! Rows of what is timed. Each gives the ratio on the network as it is, and the least and the most of the three.

use super::Runs;
use super::judged::{factor, of_application, scaled};
use super::speeds::{ALLOCATING, Speed};
use crate::report::{Good, How, Row};

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
    let [small, _, large] = &runs.speeds.back.by_memory[..] else { unreachable!("three of them") };
    rows.push_gain(
        "C5",
        "Fig. 9",
        "random 64 KiB writes, write-back, 1 MB for tables",
        "+175.7 %",
        small,
        Good::High(2.757),
    );
    rows.push_gain("C5", "Fig. 9", "  128 MB", "+2 %", large, Good::High(1.02));
    let through = &runs.speeds.through.by_memory;
    rows.push_gain("C5", "Fig. 9", "writethrough, 1 MB", "+116.5 %", &through[0], Good::High(2.165));
    rows.push_gain("C5", "Fig. 9", "  128 MB", "+6.7 %", &through[2], Good::High(1.067));
    rows.rows
}

/// C12.
pub(super) fn figure_10a(runs: &Runs) -> Vec<Row> {
    let mut rows = Rows { runs, rows: Vec::new() };
    let [small, middle @ .., aligned, across] = &runs.speeds.back.random[..] else {
        unreachable!("six of them")
    };
    let fitted = Row::judged(
        "C12",
        ("Fig. 10a", "random 4 KiB writes, write-back"),
        How::Simulated,
        ("4.4 times", gain(small)),
        small.gain().0,
        Good::High(4.4),
    );
    rows.rows.push(fitted.not_judged("the processor's time for a write is fitted on this row"));
    let range = Good::Within(1.6, 4.4);
    for (name, speed) in ["  8 KiB", "  16 KiB", "  32 KiB"].into_iter().zip(middle) {
        rows.push_gain("C12", "Fig. 10a", name, "+60 % to 4.4 times", speed, range);
    }
    rows.push_gain("C12", "Fig. 10a", "  64 KiB across two clusters", "+60 % to 4.4 times", across, range);
    rows.push_gain("C12", "Fig. 10a", "  64 KiB aligned", "the same", aligned, Good::Near(1.0));
    for (name, speed) in
        ["4 KiB, writethrough", "  8 KiB", "  16 KiB", "  32 KiB", "  64 KiB aligned", "  64 KiB across"]
            .into_iter()
            .zip(&runs.speeds.through.random)
    {
        let good = if name.ends_with("aligned") { Good::Near(1.0) } else { Good::Within(1.038, 1.109) };
        rows.push_gain("C12", "Fig. 10a", name, "+3.8 to +10.9 %", speed, good);
    }
    rows.rows
}

/// C15 to C17.
pub(super) fn figure_11(runs: &Runs) -> Vec<Row> {
    let mut rows = Rows { runs, rows: Vec::new() };
    let [two, one] = &runs.speeds.back.mixed;
    let (at, most) = ("Fig. 11", ALLOCATING[0]);
    rows.push_gain(
        "C15",
        at,
        &format!("4 KiB, writes to reads 2:1, COW ratio {most} %"),
        "3.4 times",
        &two[0],
        Good::High(3.4),
    );
    let fitted = Row::judged(
        "C15",
        (at, "  40 %"),
        How::Simulated,
        ("1.8 times", gain(&two[2])),
        two[2].gain().0,
        Good::High(1.8),
    );
    rows.rows.push(fitted.not_judged("the processor's time for a read is fitted on this row"));
    let [through_two, through_one] = &runs.speeds.through.mixed;
    rows.push_gain(
        "C15",
        at,
        "  writethrough, 80 %",
        "+4.1 to +7 %",
        &through_two[0],
        Good::Within(1.041, 1.07),
    );
    let faster = |speeds: fn(&Speed) -> [f64; 3]| speeds(&two[2])[0] / speeds(&two[0])[0];
    let (ours, rival) = (faster(|speed| speed.ours), faster(|speed| speed.rival));
    let more = |ratio: f64| format!("{:+.1} %", 100.0 * (ratio - 1.0));
    rows.push("C16", at, "COW ratio 40 against 80 %: here", "+16.3 %", (ours, more(ours)), Good::Near(1.163));
    rows.push("C16", at, "  TRDC", "+79.6 %", (rival, more(rival)), Good::Near(1.796));
    rows.push_gain(
        "C17",
        at,
        &format!("writes to reads 1:2, COW ratio {most} %"),
        "1.7 times",
        &one[0],
        Good::High(1.7),
    );
    rows.push_gain("C17", at, "  40 %", "1.0 times", &one[2], Good::High(1.0));
    rows.push_gain(
        "C17",
        at,
        "  writethrough, 80 %",
        "+2.3 to +8.2 %",
        &through_one[0],
        Good::Within(1.023, 1.082),
    );
    rows.rows
}

/// C18 and C19.
pub(super) fn figure_12(runs: &Runs) -> Vec<Row> {
    let mut rows = Rows { runs, rows: Vec::new() };
    let all = &runs.speeds.back.oltp;
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
    for (name, speed) in ["OLTP2-1, writethrough", "  OLTP2-8", "  OLTP8-1", "  OLTP8-8"]
        .into_iter()
        .zip(&runs.speeds.through.oltp)
    {
        rows.push_gain("C18", "Fig. 12", name, "+52.5 to +86.8 %", speed, Good::Within(1.525, 1.868));
    }
    rows.rows
}

/// C24 and C26.
pub(super) fn figure_13(runs: &Runs) -> Vec<Row> {
    let mut rows = Vec::new();
    let (back, through) = (&runs.speeds.back.applications, &runs.speeds.through.applications);
    let (high, under) = (Good::High, Good::Within(1.0, 1.02));
    let printed = [
        ("C24", "Fig. 13", "Varmail, write-back", "+78.6 %", &back[0], high(1.786)),
        ("C24", "Fig. 13", "  Fileserver", "+24.5 %", &back[1], high(1.245)),
        ("C24", "Fig. 13", "  YCSB-A", "+23.3 %", &back[2], high(1.233)),
        ("C26", "§5.3.1", "Varmail, writethrough", "+13 %", &through[0], high(1.13)),
        ("C26", "§5.3.1", "  Fileserver", "under +2 %", &through[1], under),
        ("C26", "§5.3.1", "  YCSB-A", "under +2 %", &through[2], under),
    ];
    for (id, place, what, paper, speed, good) in printed {
        let row = Row::judged(id, (place, what), How::Simulated, (paper, gain(speed)), speed.gain().0, good);
        rows.push(of_application(runs.is_full, what, row));
    }
    rows
}

/// C30.
pub(super) fn recovery(runs: &Runs) -> Vec<Row> {
    let mut rows = Rows { runs, rows: Vec::new() };
    let all = &runs.speeds.recovery;
    let gib = runs.speeds.recovered_bytes as f64 / (1u64 << 30) as f64;
    let mut push = |what: &str, paper: &str, seconds: fn(&(f64, f64)) -> f64, good| {
        let least = all.iter().map(seconds).fold(f64::INFINITY, f64::min);
        let most = all.iter().map(seconds).fold(0.0, f64::max);
        let here = format!("{:.2} s ({least:.2} to {most:.2})", seconds(&all[0]));
        rows.push("C30", "§5.3.4", what, paper, (seconds(&all[0]), here), good);
    };
    push(&format!("fast recovery, {gib:.1} GB dirty"), "under 1 s", |(fast, _)| *fast, Good::Low(1.0));
    push("  full, until the image is complete", "30.3 s", |(fast, full)| fast + full, Good::Low(30.3));
    rows.rows
}

/// What a factor of this much stands for, checked against the paper's headline.
pub(super) fn headline(runs: &Runs) -> Vec<Row> {
    let best = runs.speeds.back.oltp.iter().map(|speed| speed.gain().0).fold(0.0, f64::max);
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
