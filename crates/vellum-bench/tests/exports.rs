//! `vellum-bench exports`, small: every kind of load ends on each way that is available, and unavailable ones
//! are left out and named. No time is checked.

mod support;

use std::process::Command;

use serde_json::Value;
use support::{NO_VELLUM, is_installed, number, report, skipped, vellum};

const SMALL: [&str; 6] = ["--size", "16M", "--rounds", "2", "--seconds", "0.05"];

fn names(case: &Value) -> Vec<&str> {
    let series = case["series"].as_array().expect("series");
    series.iter().filter_map(|each| each["server"].as_str()).collect()
}

fn assert_measured(case: &Value, told: &str) {
    for each in case["series"].as_array().expect("series") {
        let samples = each["samples"].as_array().expect("samples");
        assert_eq!(samples.len(), 2, "a round each: {told}");
        for sample in samples {
            assert!(number(sample, "/operations") > 0, "{told}");
            let latency = |name: &str| sample[name].as_f64().expect("a time");
            assert!(latency("latency-us-p99") >= latency("latency-us-median"), "{told}");
        }
    }
}

#[test]
fn every_load_over_vhost_user_blk() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let loads = [
        "vhost/buffered/qcow2/read-d32-q2",
        "vhost/buffered/qcow2/overwrite-d1-q1",
        "vhost/buffered/qcow2/sequential-d4-q2",
        "vhost/buffered/qcow2/mixed-d32-q1",
        "vhost/buffered/fresh/allocate-d32-q2",
    ];
    let only = loads.iter().flat_map(|load| ["--only", load]);
    let arguments: Vec<&str> = SMALL.into_iter().chain(only).collect();
    let (report, told) = report("exports", &vellum, &arguments);
    let cases = report["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), loads.len(), "{told}");
    let qemu = is_installed("qemu-storage-daemon");
    let expected = if qemu { &["vellum", "vellum, zoned", "qsd"][..] } else { &["vellum", "vellum, zoned"] };
    for case in cases {
        assert_eq!(names(case), expected, "{told}");
        assert_measured(case, &told);
    }
    assert!(qemu || told.contains("skipped: qsd: qemu-storage-daemon is not installed"), "{told}");
}

#[test]
fn fio_over_nbd() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    if !is_installed("fio") {
        return skipped("fio is not installed");
    }
    let arguments =
        ["--skip-peers", "--only", "nbd/buffered/qcow2/mixed", "--only", "nbd/buffered/raw/read-d1-q2"];
    let arguments: Vec<&str> = SMALL.into_iter().chain(arguments).collect();
    let (report, told) = report("exports", &vellum, &arguments);
    let cases = report["cases"].as_array().expect("cases");
    let seen: Vec<_> = cases.iter().map(names).collect();
    assert_eq!(seen, [&["vellum", "vellum, zoned"][..], &["vellum", "vellum, zoned"], &["vellum"]], "{told}");
    cases.iter().for_each(|case| assert_measured(case, &told));
}

#[test]
fn a_host_where_nothing_is_installed() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let output = Command::new(env!("CARGO_BIN_EXE_vellum-bench"))
        .args(["exports", "--output", "json", "--dir", env!("CARGO_TARGET_TMPDIR"), "--vellum"])
        .arg(vellum)
        .args(SMALL)
        .args(["--only", "vhost/buffered/raw/read-d1-q1", "--only", "nbd/buffered/raw/read-d1-q1"])
        .env("PATH", "")
        .output()
        .expect("vellum-bench runs");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("the report is JSON");
    let cases = report["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 1, "NBD takes fio: {told}");
    assert_eq!(names(&cases[0]), ["vellum"], "{told}");
    assert_measured(&cases[0], &told);
    for reason in ["qsd: qemu-storage-daemon", "qemu-nbd: qemu-nbd", "nbdkit: nbdkit", "nbd: fio"] {
        assert!(told.contains(&format!("skipped: {reason} is not installed")), "{told}");
    }
}
