//! The commands that measure time, small, on this machine: they end and report all their rows. Counts are
//! checked, times are not.

mod support;

use serde_json::Value;
use support::{NO_VELLUM, is_installed, number, report, skipped, vellum};

fn is_positive(value: &Value, place: &str) -> bool {
    value.pointer(place).and_then(Value::as_f64).is_some_and(|value| value > 0.0)
}

#[test]
fn a_disk_that_grows() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let arguments = ["--skip-peers", "--rounds", "2", "--operations", "4", "--write", "4K"];
    let (report, told) = report("growing", &vellum, &arguments);
    let outcome = &report["writes"][0];
    assert_eq!(number(outcome, "/write-bytes"), 4096);
    let rows = outcome["rows"].as_array().expect("rows");
    for subject in ["vellum qcow2 journaled", "vellum qcow2 plain", "vellum raw", "file, growing: pwrite"] {
        let row = rows.iter().find(|row| row["subject"] == subject).unwrap_or_else(|| panic!("{told}"));
        assert_eq!(row["rounds-us"].as_array().map(Vec::len), Some(2), "the first round does not count");
        assert!(is_positive(row, "/median-us") && is_positive(row, "/p99-us"), "{told}");
    }
    assert!(!rows.iter().any(|row| row["subject"].as_str().is_some_and(|name| name.starts_with("qemu"))));
}

#[test]
fn guests_that_write() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let arguments = [
        "--skip-peers",
        "--rounds",
        "2",
        "--only",
        "new-64k-sync-4-half",
        "--only",
        "overwrite-4k-async-1-same",
    ];
    let (report, told) = report("writers", &vellum, &arguments);
    let cases = report["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 2, "{told}");
    for case in cases {
        let rows = case["rows"].as_array().expect("rows");
        let names: Vec<_> = rows.iter().filter_map(|row| row["subject"].as_str()).collect();
        let expected = [
            "vellum raw",
            "vellum table",
            "vellum zoned",
            "vellum zoned embed=off",
            "vellum qcow2 journaled",
        ];
        assert_eq!(names, expected, "{told}");
        for row in rows {
            assert_eq!(row["rates"].as_array().map(Vec::len), Some(2), "the first round does not count");
            assert!(is_positive(row, "/rates/0"), "{told}");
        }
    }
    assert!(is_positive(&report, "/lz4/text-us") && is_positive(&report, "/lz4/unpack-us"), "{told}");
    let share = |case: usize| cases[case]["lz4-percent"].as_f64().expect("a share");
    assert!(share(0) > 0.0 && share(1) == 0.0, "who writes over what is there packs nothing: {told}");
}

#[test]
fn flushes_that_take_long() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    if !is_installed("strace") {
        return skipped("strace is not installed; nothing holds a flush");
    }
    let (report, told) =
        report("slow-flush", &vellum, &["--skip-peers", "--delay", "20", "--seconds", "0.2"]);
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 3, "{told}");
    for row in rows {
        for (when, writes) in [("alone", false), ("beside-writer", true), ("beside-slow-writer", true)] {
            let reads = &row["seen"][when];
            assert_eq!(number(reads, "/reads"), 40, "one each 5 ms: {told}");
            assert_eq!(number(reads, "/guest-flushes") > 0, writes, "{when}: {told}");
            assert!(is_positive(reads, "/max-us"), "{told}");
        }
    }
}

#[test]
fn an_image_whose_server_was_killed() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let (report, told) = report("recovery", &vellum, &["--size", "1G", "--journal-size", "256K"]);
    let row = &report["rows"][0];
    let (writes, records) = (number(row, "/flushed-writes"), number(row, "/records-replayed"));
    assert_eq!(writes, 31, "{told}");
    // A record each; the newest is verified by itself, and opening may have made one.
    assert!((writes - 1..=writes + 2).contains(&records), "{told}");
    assert!(number(row, "/pages-written") > 0 && is_positive(row, "/serve-seconds"), "{told}");
}

#[test]
fn snapshots_of_a_served_disk() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let arguments = [
        "--size",
        "4G",
        "--allocated",
        "256M",
        "--beside",
        "5",
        "--every",
        "20",
        "--many",
        "24",
        "--hot",
        "20",
    ];
    let (report, told) = report("snapshots", &vellum, &arguments);
    let others = report["quiet"]["others"].as_array().expect("costs");
    assert_eq!(others.len(), 16, "{told}");
    for cost in others {
        assert_eq!(number(cost, "/flushes"), 1, "{told}");
        assert!(number(cost, "/writes") <= 4 && number(cost, "/bytes-written") <= 16 << 10, "{told}");
    }
    assert_eq!(number(&report, "/create-beside/count"), 5);
    assert!(number(&report, "/load-beside/requests") > 0, "{told}");
    assert_eq!((number(&report, "/many/create/count"), number(&report, "/many/delete/count")), (24, 24));
    // 18, 12, 6 and 5 of the 24, the 5 again in full, and the disk.
    assert_eq!(number(&report, "/many/views-compared"), 18 + 12 + 6 + 5 + 5 + 1, "{told}");
    assert!(number(&report, "/many/blocks-compared") > 41 * 15 + 6 * 256, "{told}");
    assert!(number(&report, "/many/bytes-at-the-end") < number(&report, "/many/bytes-with-all"), "{told}");
}

#[test]
fn what_a_neighbour_notices() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let arguments = [
        "--seconds",
        "0.1",
        "--rounds",
        "2",
        "--size",
        "2M",
        "--clones",
        "8",
        "--only",
        "quiet",
        "--only",
        "map-qcow2-1",
        "--only",
        "machine",
    ];
    let (report, told) = report("neighbours", &vellum, &arguments);
    let names: Vec<_> = report["cases"].as_array().expect("cases").iter().map(|case| &case["case"]).collect();
    assert_eq!(names, ["quiet", "map-qcow2-1", "machine-read-32"], "{told}");
    for case in report["cases"].as_array().expect("cases") {
        assert!(is_positive(case, "/quiet/p99-us") && is_positive(case, "/resident-bytes"), "{told}");
        assert!(case["is-held"].is_boolean() && is_positive(case, "/bound-us"), "{told}");
    }
    let fleet = &report["fleet"];
    assert_eq!(number(fleet, "/clones"), 8);
    assert!(
        is_positive(fleet, "/clean/all-served-ms") && is_positive(fleet, "/killed/first-served-ms"),
        "{told}"
    );
}

#[test]
fn whole_disks() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let (report, told) = report("chores", &vellum, &["--size", "4M", "--full", "64M", "--rounds", "2"]);
    let rows = report["figures"].as_array().expect("rows");
    let peers = is_installed("qemu-img") && is_installed("qemu-nbd");
    // Seven figures of three disks of ours; with QEMU its own, and two more of the three that are qcow2.
    assert_eq!(rows.len(), if peers { 7 * 4 + 2 * 3 } else { 7 * 3 }, "{told}");
    for row in rows {
        assert_eq!(row["rounds-ms"].as_array().map(Vec::len), Some(2), "{told}");
        assert!(is_positive(row, "/median-ms"), "{told}");
    }
}

#[test]
fn chains_of_images() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let arguments = ["--skip-peers", "--depth", "1", "--depth", "4", "--size", "8M", "--seconds", "0.1"];
    let (report, told) = report("chains", &vellum, &[&arguments[..], &["--rounds", "2"]].concat());
    let rows = report["rows"].as_array().expect("rows");
    let depths: Vec<u64> = rows.iter().map(|row| number(row, "/depth")).collect();
    assert_eq!(depths, [1, 4], "{told}");
    for row in rows {
        assert_eq!(row["samples"].as_array().map(Vec::len), Some(2), "{told}");
        assert!(is_positive(row, "/samples/0/operations") && is_positive(row, "/resident-bytes"), "{told}");
    }
}
