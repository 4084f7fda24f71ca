//! The rows of the paper, from the runs.

use super::judged::{factor, none, of_application, scaled};
use super::printed::{PRINTED, Printed};
use super::{Pair, Replayed, Runs, timed_rows};
use crate::cowcache::format::{Amplified, Scattered};
use crate::cowcache::guest::Guest;
use crate::cowcache::scene::Counted;
use crate::report::{Good, How, Row};

const GIB: f64 = (1u64 << 30) as f64;

fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB
}

fn less(pair: &Pair) -> String {
    let kib = |counted: &Counted| counted.flash() as f64 / 1024.0 / pair.requests as f64;
    format!(
        "-{:.1} %, {:.2} KiB each of {:.1}",
        100.0 * (1.0 - 1.0 / pair.gain()),
        kib(&pair.ours),
        kib(&pair.rival)
    )
}

pub(super) fn rows(runs: &Runs) -> Vec<Row> {
    let mut rows = timed_rows::headline(runs);
    rows.extend(without_a_cache(runs));
    rows.extend(format_rows(runs));
    rows.extend(timed_rows::figure_9(runs));
    rows.extend(table_1(runs));
    rows.extend(timed_rows::figure_10a(runs));
    rows.extend(figure_10b(runs));
    rows.extend(timed_rows::figure_11(runs));
    rows.extend(timed_rows::figure_12(runs));
    rows.extend(table_2(runs));
    rows.extend(timed_rows::figure_13(runs));
    rows.extend(figure_13(runs));
    rows.extend(traced(&runs.traces));
    rows.extend(last(runs));
    rows.extend(timed_rows::recovery(runs));
    rows
}

/// A drive of 3.3 times takes 16 / 3.3 times as long for 64 KiB as for 4.
const OF_THE_DRIVE: &str = "of the drive: the model's reads 64 KiB in 3.0 times the time of 4 KiB, by its sheet; 3.3 needs 4.8 \
                            times, 244 MB/s at depth 1, which the sheet does not say";
/// The columns of the paper's table determine how many writes of the database come for one of the log.
const OF_THE_MIX: &str =
    "one mix, fitted on C20, for all four rows; beside it, with the mix that its own columns determine";
const NOT_ITS_TRACES: &str =
    "another guest than the paper's ten traces of MSR, which are the user's: --msr FILE";

/// C2 and C3: copy-on-write without a cache.
fn without_a_cache(runs: &Runs) -> Vec<Row> {
    let times: Vec<f64> = runs.amplified.iter().map(Amplified::times).collect();
    let (least, most) = times
        .iter()
        .fold((f64::INFINITY, 0.0), |(least, most): (f64, f64), one| (least.min(*one), most.max(*one)));
    let amplified = Row::judged(
        "C2",
        ("§1", "requests to image and base for one of the guest, random writes"),
        How::Counted,
        ("2 to 13 times", format!("{least:.1} to {most:.1} times")),
        most,
        Good::Within(2.0, 13.0),
    );
    let fragments = &runs.fragments;
    let mut rows = vec![amplified];
    let mut push = |what: &str, paper: &str, [read, write]: [Scattered; 2], worst: f64, good| {
        let text = |one: Scattered| format!("{:.1} ({:.1} at once)", one.in_turn, one.at_once);
        let here = format!("read {}, write {}", text(read), text(write));
        let row = Row::judged("C3", ("Fig. 4", what), How::Simulated, (paper, here), worst, good);
        rows.push(row.because(OF_THE_DRIVE));
    };
    let most = |[read, write]: [Scattered; 2]| read.in_turn.max(write.in_turn);
    push(
        "64 KiB in scattered clusters of 4 KiB, times as long: hard disk",
        "13.5, a write",
        fragments.hdd,
        most(fragments.hdd),
        Good::Near(13.5),
    );
    push("  SSD", "3.3, a read", fragments.ssd, fragments.ssd[0].in_turn, Good::Near(3.3));
    rows
}

/// C4: sizes of the format.
fn format_rows(runs: &Runs) -> Vec<Row> {
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let of = |what: &'static str, paper: &'static str, value: u64, mib_then: f64| {
        let here = format!("{:.1} MiB", mib(value));
        Row::judged("C4", ("§2.1.3", what), How::Counted, (paper, here), mib(value), Good::Near(mib_then))
    };
    vec![
        of("QCOW2 metadata of 1 TB, clusters of 64 KiB", "160 MB", runs.metadata_bytes[0], 160.0),
        of("  of 4 KiB", "2.5 GB", runs.metadata_bytes[1], 2560.0),
    ]
}

/// C6 to C11: the memory for tables, and metadata on flash.
fn table_1(runs: &Runs) -> Vec<Row> {
    let list_of = |all: &[(u64, Counted)], value: &dyn Fn(&Counted) -> f64, digits: usize| {
        let texts: Vec<String> =
            all.iter().map(|(_, counted)| format!("{:.digits$}", value(counted))).collect();
        texts.join(" / ")
    };
    let list = |value: &dyn Fn(&Counted) -> f64, digits| list_of(&runs.by_memory, value, digits);
    let ours_list = |value: &dyn Fn(&Counted) -> f64, digits| list_of(&runs.ours_by_memory, value, digits);
    let ours_smallest = &runs.ours_by_memory[0].1;
    let hits = |counted: &Counted| 100.0 * counted.hit_ratio();
    let read = |counted: &Counted| gib(counted.flash_metadata_read);
    let written = |counted: &Counted| gib(counted.flash_metadata);
    let smallest = &runs.by_memory[0].1;
    let rival = |id, what: &'static str, paper: &'static str, here: String, value, good| {
        scaled(runs.is_full, Row::judged(id, ("Table 1", what), How::Counted, (paper, here), value, good))
    };
    let million = 1e6 / runs.random[4].requests as f64;
    let ours = gib(runs.random[4].ours.flash_metadata) * million;
    let flushed = gib(runs.flushed[1].ours.flash_metadata) * million;
    let share = runs.random[4].ours.flash_metadata as f64 / smallest.flash_metadata.max(1) as f64;
    vec![
        rival(
            "C6",
            "TRDC: L2 hits, %, 1/32/64/96/128 MB; judged at 1",
            "33.6 / 74.7 / 83.1 / 91.6 / ~100",
            list(&hits, 1),
            hits(smallest),
            Good::Near(33.6),
        ),
        rival(
            "C7",
            "COWCache, writethrough: L2 hits, %; judged at 1 MB",
            "75.1 / 83 / 90.4 / 96.6 / ~100",
            ours_list(&hits, 1),
            hits(ours_smallest),
            Good::High(75.1),
        ),
        rival(
            "C8",
            "TRDC: metadata read from flash, GB",
            "119.64 / 45.66 / 30.39 / 15.13 / 0",
            list(&read, 2),
            read(smallest),
            Good::Near(119.64),
        ),
        rival(
            "C9",
            "COWCache, writethrough: metadata read from flash, GB",
            "0.35 / 0.24 / 0.14 / 0.05 / 0",
            ours_list(&read, 2),
            read(ours_smallest),
            Good::Low(0.35),
        ),
        rival(
            "C10",
            "TRDC: metadata written to flash, GB",
            "61.15 / 46.61 / 31.95 / 18.08 / 4.95",
            list(&written, 2),
            written(smallest),
            Good::Near(61.15),
        ),
        Row::judged(
            "C11",
            ("Table 1", "metadata written to flash, 1 M random 64 KiB writes, write-back"),
            How::Counted,
            ("0.47 GB", format!("{ours:.2} GB; {flushed:.2} with a flush after 32")),
            ours,
            Good::Low(0.47),
        ),
        rival(
            "C11",
            "  writethrough, by memory, GB; judged at 1 MB",
            "0.47",
            ours_list(&written, 2),
            written(ours_smallest),
            Good::Low(0.47),
        ),
        rival(
            "C11",
            "  writethrough, as a share of TRDC's, 1 MB",
            "0.77 %",
            format!("{:.2} %", 100.0 * written(ours_smallest) / written(smallest)),
            100.0 * written(ours_smallest) / written(smallest),
            Good::Low(0.77),
        ),
        scaled(
            runs.is_full,
            Row::judged(
                "C11",
                ("Table 1", "  as a share of TRDC's, 1 MB of memory"),
                How::Counted,
                ("0.77 %", format!("{:.2} %", 100.0 * share)),
                100.0 * share,
                Good::Low(0.77),
            ),
        ),
    ]
}

/// C13 and C14: flash writes of random writes.
fn figure_10b(runs: &Runs) -> Vec<Row> {
    let [small, .., aligned, across] = &runs.random[..] else { unreachable!("six of them") };
    let gain = runs.small_memory.flash() as f64 / small.ours.flash() as f64;
    let through = &runs.through[0];
    let network = through.ours.network() as f64 / through.rival.network() as f64;
    let kib = |counted: &Counted| counted.network() as f64 / 1024.0 / through.requests as f64;
    vec![
        Row::judged(
            "C13",
            ("Fig. 10b", "flash writes, random 4 KiB"),
            How::Counted,
            ("-96.7 %", less(small)),
            small.gain(),
            Good::High(factor(96.7)),
        ),
        Row::judged(
            "C13",
            ("Fig. 10b", "  with a flush after 32"),
            How::Counted,
            ("-96.7 %", less(&runs.flushed[0])),
            runs.flushed[0].gain(),
            Good::High(factor(96.7)),
        ),
        Row::judged(
            "C13",
            ("Fig. 10b", "  64 KiB across two clusters, the least of the range"),
            How::Counted,
            ("-31.6 %", less(across)),
            across.gain(),
            Good::High(factor(31.6)),
        )
        .because("see above"),
        scaled(
            runs.is_full,
            Row::judged(
                "C13",
                ("Fig. 10b", "  4 KiB, writethrough"),
                How::Counted,
                ("-96.7 %", less(&runs.through[0])),
                runs.through[0].gain(),
                Good::High(factor(96.7)),
            ),
        ),
        Row::judged(
            "C13",
            ("Fig. 10b", "  network, writethrough, against TRDC's, times"),
            How::Counted,
            (
                "1",
                format!(
                    "{network:.2}: {:.1} KiB each of {:.1}",
                    kib(&runs.through[0].ours),
                    kib(&runs.through[0].rival)
                ),
            ),
            network,
            Good::Near(1.0),
        ),
        Row::judged(
            "C13",
            ("Fig. 10b", "  64 KiB aligned: as much as TRDC's, times"),
            How::Counted,
            ("1", format!("{:.3}", aligned.gain())),
            aligned.gain(),
            Good::Near(1.0),
        ),
        scaled(
            runs.is_full,
            Row::judged(
                "C14",
                ("§5.2.2", "flash writes, 4 KiB, 1 MB for tables: TRDC has more"),
                How::Counted,
                ("40 times", format!("{gain:.1} times")),
                gain,
                Good::High(40.0),
            ),
        ),
    ]
}

/// C20 to C23: OLTP.
fn table_2(runs: &Runs) -> Vec<Row> {
    let mut rows = Vec::new();
    for (row, pair) in PRINTED.iter().zip(&runs.oltp) {
        let Printed { id, name, hits_percent: hits, metadata_read: read, metadata_written: written, .. } =
            *row;
        let Printed { data, saved_percent: saved, .. } = *row;
        let rival = &pair.rival;
        let of_row = runs.oltp_of_rows.iter().find(|other| is_of_row(row, other));
        // The same with the row's own mix.
        let own = |value: fn(&Counted) -> u64| {
            of_row
                .map_or_else(String::new, |pair| format!("; {:.2} with its own mix", gib(value(&pair.rival))))
        };
        let mut push = |what: String, paper: String, here: String, value, good| {
            let row = Row::judged(id, ("Table 2", what), How::Counted, (paper, here), value, good);
            let row = if of_row.is_some() { row.because(OF_THE_MIX) } else { row };
            rows.push(scaled(runs.is_full, row));
        };
        let ours = |pair: &Pair| {
            format!(
                "-{:.1} %; metadata {:.2} GB, data {:.2} GB",
                100.0 * (1.0 - 1.0 / pair.gain()),
                gib(pair.ours.flash_metadata),
                gib(pair.ours.flash_data)
            )
        };
        let good = Good::High(factor(saved));
        push(format!("{name}: flash writes"), format!("-{saved} %"), ours(pair), pair.gain(), good);
        if let Some(of_row) = of_row {
            let mix = row.writes_of_100() as f64 / 100.0;
            let what = format!("  with {mix:.1} writes for one of the log, as its columns say");
            push(what, format!("-{saved} %"), ours(of_row), of_row.gain(), good);
        }
        push(
            "  TRDC: L2 hits".into(),
            format!("{hits} %"),
            format!("{:.1} %", 100.0 * rival.hit_ratio()),
            100.0 * rival.hit_ratio(),
            Good::Near(hits),
        );
        if read > 0.0 {
            push(
                "  TRDC: metadata read".into(),
                format!("{read} GB"),
                format!("{:.2} GB{}", gib(rival.flash_metadata_read), own(|of| of.flash_metadata_read)),
                gib(rival.flash_metadata_read),
                Good::Near(read),
            );
        }
        push(
            "  TRDC: metadata written".into(),
            format!("{written} GB"),
            format!("{:.2} GB{}", gib(rival.flash_metadata), own(|of| of.flash_metadata)),
            gib(rival.flash_metadata),
            Good::Near(written),
        );
        push(
            "  TRDC: data written".into(),
            format!("{data} GB"),
            format!("{:.2} GB{}", gib(rival.flash_data), own(|of| of.flash_data)),
            gib(rival.flash_data),
            Good::Near(data),
        );
    }
    rows
}

/// Whether a run is this row's guest.
fn is_of_row(row: &Printed, pair: &Pair) -> bool {
    let Guest::Oltp { bytes, .. } = pair.guest else { return false };
    (bytes, pair.memory_mib) == (row.bytes, row.memory_mib)
}

/// C25: applications.
fn figure_13(runs: &Runs) -> Vec<Row> {
    let mut rows = Vec::new();
    let places = ["flash writes, Varmail", "  Fileserver", "  YCSB-A"];
    for ((what, saved), one) in places.into_iter().zip([22.5, 27.1, 35.2]).zip(&runs.applications) {
        let texts = (format!("-{saved} %"), format!("{:+.1} %", -one.flash_less()));
        let good = Good::High(factor(saved));
        let row = Row::judged("C25", ("Fig. 13", what), How::Counted, texts, factor(one.flash_less()), good);
        rows.push(of_application(runs.is_full, what, row));
    }
    rows
}

/// C27 and C28: traces.
fn traced(traces: &[Replayed]) -> Vec<Row> {
    const WHY: &str = "the paper's ten traces of MSR are the user's: --msr FILE";
    let mut rows = vec![
        none("C27", "Fig. 14", "MSR traces, flash writes, one delta", "-1.4 to -32.8 %", WHY),
        none(
            "C28",
            "Fig. 15",
            "MSR traces, flash a share of what is used: flash, network",
            "-2.8 to -25.5, -18 to -76.2 %",
            WHY,
        ),
    ];
    if !traces.is_empty() {
        rows.clear();
    }
    for one in traces {
        let name = &one.trace;
        let mut push = |id, place, what: String, paper: &str, less: f64, (least, most)| {
            let here = format!("{:+.1} %", -less);
            let good = Good::Within(factor(least), factor(most));
            let row = Row::judged(id, (place, what), How::Counted, (paper, here), factor(less), good);
            rows.push(if one.is_msr { row } else { row.not_judged(NOT_ITS_TRACES) });
        };
        match one.percent {
            None => {
                let what = format!("{name}, one delta: flash writes");
                push("C27", "Fig. 14", what, "-1.4 to -32.8 %", one.flash_less(), (1.4, 32.8));
            }
            Some(percent) => {
                let what = format!("{name}, flash has {percent} % of what is used: flash writes");
                push("C28", "Fig. 15", what, "-2.8 to -25.5 %", one.flash_less(), (2.8, 25.5));
                let what = "  network traffic".to_owned();
                push("C28", "Fig. 15", what, "-18 to -76.2 %", one.network_less(), (18.0, 76.2));
            }
        }
    }
    rows
}

fn last(runs: &Runs) -> Vec<Row> {
    let percent = |share: f64| format!("{:.3} %", share * 100.0);
    let sum = |of: fn(&Pair) -> u64| runs.random.iter().map(of).sum::<u64>();
    let reads = sum(|pair| pair.ours.base_reads);
    let rival = sum(|pair| pair.rival.base_reads);
    let writes = sum(|pair| pair.ours.writes);
    let waited = sum(|pair| pair.ours.network_in_writes);
    vec![
        Row::judged(
            "C29",
            ("§5.3.4", "memory of the index, full clusters"),
            How::Counted,
            (
                "0.23 to 0.26 %",
                format!("{}; lone blocks {}", percent(runs.index_full), percent(runs.index_lone)),
            ),
            runs.index_full * 100.0,
            Good::Low(0.23),
        ),
        Row::exact(
            "C31",
            ("§3.3", "reads of the base, and so fills, for random writes, write-back"),
            ("0", format!("{reads} for {writes} writes; TRDC {rival}")),
            (0, reads),
        ),
        Row::judged(
            "C31",
            ("§3.3", "  requests over the network that writes waited for, each"),
            How::Counted,
            ("–", format!("{:.3}", waited as f64 / writes as f64)),
            0.0,
            Good::Said(true),
        )
        .not_judged("the paper prints none; blocks go home when memory for lone ones is full, which the paper does not bound"),
    ]
}
