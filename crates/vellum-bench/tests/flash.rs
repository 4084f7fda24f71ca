//! `vellum-bench flash` and `flash-hits`, small: every program ends at every case, and what is counted fits. No time is
//! checked.

mod support;

use serde_json::Value;
use support::{NO_VELLUM, is_installed, number, per, report, skipped, vellum};

fn rows<'a>(report: &'a Value, case: &str) -> Vec<&'a Value> {
    let rows = report["rows"].as_array().expect("rows");
    rows.iter().filter(|row| row["case"] == case).collect()
}

#[test]
fn a_cache_before_a_slow_backend() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    for program in ["nbdkit", "nbdfuse", "fio"] {
        if !is_installed(program) {
            return skipped(&format!("{program} is not installed"));
        }
    }
    if !std::path::Path::new("/dev/fuse").exists() {
        return skipped("there is no /dev/fuse");
    }
    let svg = format!("{}/flash.svg", env!("CARGO_TARGET_TMPDIR"));
    let small = ["--delay", "1", "--size", "64M", "--part", "64M", "--flash", "96M", "--rounds", "2"];
    let short = ["--seconds", "0.3", "--course-seconds", "1.5", "--clones", "2", "--svg", &svg];
    let (report, told) = report("flash", &vellum, &[&small[..], &short].concat());
    let ways = if is_installed("qemu-nbd") { 4 } else { 3 };
    for case in ["commit", "commit-four", "read", "mixed", "sqlite", "boot"] {
        assert_eq!(rows(&report, case).len(), ways, "{case}: {told}");
    }
    assert_eq!(rows(&report, "clones").len(), ways - 1, "{told}");
    for row in report["rows"].as_array().expect("rows") {
        let turns = row["turns"].as_array().expect("turns");
        assert_eq!(turns.len(), 2, "{told}");
        assert!(turns.iter().all(|turn| number(turn, "/operations") > 0), "{row}");
    }
    // Of one flusher: one flush of flash for each of the guest, and the one with which the disk's first change begins.
    let commits = rows(&report, "commit").into_iter().find(|row| row["way"] == "cached").expect("a cache");
    for turn in commits["turns"].as_array().expect("turns") {
        let (flushes, of_guest) = (number(turn, "/flash/flushes"), number(turn, "/flash/guest-flushes"));
        assert!(of_guest > 0 && flushes <= of_guest + 3, "{turn}");
        assert!(
            per(number(turn, "/flash/write-bytes"), number(turn, "/flash/guest-bytes-written")) <= 1.0,
            "{turn}"
        );
    }
    let plot = std::fs::read_to_string(&svg).expect("a plot");
    assert!(plot.starts_with("<svg") && plot.contains("polyline"), "{plot}");
}

#[test]
fn hits_beside_a_raw_file() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let (report, told) =
        report("flash-hits", &vellum, &["--size", "4M", "--rounds", "2", "--seconds", "0.1"]);
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 3, "{told}");
    for (row, is_cached) in rows.iter().zip([false, true, true]) {
        assert_eq!(number(row, "/hits") > 0, is_cached, "{told}");
        assert_eq!(number(row, "/misses"), 0, "{told}");
        assert_eq!(row["samples"].as_array().expect("samples").len(), 2, "{told}");
    }
}
