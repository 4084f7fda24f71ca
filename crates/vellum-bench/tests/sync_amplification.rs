//! `vellum-bench sync-amplification --quick` on this machine: the calls that Vellum makes on the host are
//! bounded.
//!
//! Counts of one guest are the same each time. Those of four guests depend on timing, so all are bounded and
//! none is asserted exactly. Where `strace` is installed the program also counts from outside, and fails if
//! the two counts differ.

mod support;

use std::collections::HashSet;

use support::{NO_VELLUM, is_installed, number, per, report, skipped, vellum};

/// What a row may cost at most: host flushes per guest flush, host writes per guest write, KiB per guest
/// write.
struct Bound {
    workload: &'static str,
    subject: &'static str,
    flushes: f64,
    writes: f64,
    kib: f64,
}

const fn bound(workload: &'static str, subject: &'static str, flushes: f64, writes: f64, kib: f64) -> Bound {
    Bound { workload, subject, flushes, writes, kib }
}

const BOUNDS: [Bound; 39] = [
    bound("append-rand-4k", "vellum raw", 1.0, 1.0, 4.0),
    bound("append-seq-4k", "vellum raw", 1.0, 1.0, 4.0),
    bound("overwrite-4k", "vellum raw", 1.0, 1.0, 4.0),
    bound("flushers-append-4k", "vellum raw", 1.0, 1.0, 4.0),
    // A flush before what points at new data, and one after: data, an L2 sector and a refcount sector are
    // written.
    bound("append-rand-4k", "vellum qcow2 plain", 2.0, 3.0, 12.0),
    // As above, for each sixteenth write.
    bound("append-seq-4k", "vellum qcow2 plain", 1.2, 1.2, 5.0),
    bound("overwrite-4k", "vellum qcow2 plain", 1.0, 1.0, 4.0),
    bound("flushers-append-4k", "vellum qcow2 plain", 2.0, 3.0, 12.0),
    // The data and a record, and one flush for both.
    bound("append-rand-4k", "vellum qcow2 journaled", 1.0, 2.0, 8.5),
    bound("append-seq-4k", "vellum qcow2 journaled", 1.0, 1.2, 5.0),
    bound("overwrite-4k", "vellum qcow2 journaled", 1.0, 1.0, 4.0),
    bound("flushers-append-4k", "vellum qcow2 journaled", 1.0, 2.0, 8.5),
    // Nothing to record: what raw costs.
    bound("append-rand-4k", "vellum linear", 1.0, 1.0, 4.0),
    bound("append-seq-4k", "vellum linear", 1.0, 1.0, 4.0),
    bound("overwrite-4k", "vellum linear", 1.0, 1.0, 4.0),
    bound("behind-base-4k", "vellum linear", 1.0, 1.0, 4.0),
    bound("base-zeros-4k", "vellum linear", 1.0, 1.0, 4.0),
    bound("overwrite-4k", "vellum table", 1.0, 1.0, 4.0),
    // The data and a record, and one flush for both.
    bound("base-append-rand-4k", "vellum linear", 1.0, 2.0, 8.5),
    bound("append-rand-4k", "vellum table", 1.0, 2.0, 8.5),
    bound("behind-base-4k", "vellum table", 1.0, 2.0, 8.5),
    bound("base-zeros-4k", "vellum table", 1.0, 2.0, 8.5),
    bound("base-append-rand-4k", "vellum table", 1.0, 2.0, 8.5),
    // A block that packs holds its unit's entry: what raw costs.
    bound("append-rand-4k-same", "vellum zoned", 1.0, 1.0, 4.0),
    bound("append-rand-64k-same", "vellum zoned", 1.0, 1.0, 64.0),
    bound("append-seq-4k-same", "vellum zoned", 1.0, 1.0, 4.0),
    bound("append-seq-64k-same", "vellum zoned", 1.0, 1.0, 64.0),
    bound("behind-base-4k", "vellum zoned", 1.0, 2.0, 8.5),
    bound("overwrite-4k", "vellum zoned", 1.0, 1.0, 4.0),
    // Noise does not pack: the data and a record. The same where nothing may be embedded.
    bound("append-rand-4k", "vellum zoned", 1.0, 2.0, 8.5),
    bound("append-seq-4k", "vellum zoned", 1.0, 1.2, 5.0),
    bound("base-append-rand-4k", "vellum zoned", 1.0, 2.0, 8.5),
    bound("flushers-append-4k", "vellum zoned", 1.0, 2.0, 8.5),
    bound("snapshot-apart-4k", "vellum zoned", 1.0, 4.0, 76.5),
    bound("append-rand-4k", "vellum zoned embed=off", 1.0, 2.0, 8.5),
    bound("append-rand-4k-same", "vellum zoned embed=off", 1.0, 2.0, 8.5),
    bound("append-seq-4k-same", "vellum zoned embed=off", 1.0, 1.2, 5.0),
    bound("append-seq-64k-same", "vellum zoned embed=off", 1.0, 2.0, 68.5),
    // And the copy of what the unit has, 64 KiB.
    bound("snapshot-apart-4k", "vellum table", 1.0, 4.0, 76.5),
];

/// What a clean close may add: the last metadata, what must be durable before it, and the header.
const CLOSING: u64 = 4;

#[test]
fn what_vellum_asks_of_the_host_is_bounded() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let (report, told) = report("sync-amplification", &vellum, &["--quick", "--skip-peers"]);

    let workloads = report["workloads"].as_array().expect("workloads");
    let mut looked_at = HashSet::new();
    for outcome in workloads {
        let guests = number(outcome, "/guests");
        for row in outcome["rows"].as_array().expect("rows") {
            let (workload, subject) = (&outcome["workload"], &row["subject"]);
            let Some(bound) =
                BOUNDS.iter().find(|bound| *workload == bound.workload && *subject == bound.subject)
            else {
                continue;
            };
            looked_at.insert((bound.workload, bound.subject));
            let of = |place: &str| number(row, place);
            let (flushes, writes) = (of("/guest/flushes"), of("/guest/writes"));
            let (host_flushes, host_writes) = (of("/host/foreground/flushes"), of("/host/foreground/writes"));
            let kib = per(of("/host/foreground/bytes-written"), writes) / 1024.0;
            let said = format!("{workload} {subject}\n{told}");
            assert!(per(host_flushes, flushes) <= bound.flushes, "{said}");
            assert!(per(host_writes, writes) <= bound.writes, "{said}");
            assert!(kib <= bound.kib, "{said}");
            // A write never reads what lies below, where the unit of copy-on-write is small enough.
            if let Some(read) = row.get("base-bytes-read") {
                assert_eq!(*read, 0, "{said}");
            }
            // No promise without a flush: as many guests as there are can share one.
            assert!(host_flushes * guests >= flushes, "{said}");
            assert!(host_writes >= writes, "{said}");
            for (total, foreground) in
                [("/host/total/flushes", host_flushes), ("/host/total/writes", host_writes)]
            {
                let total = of(total);
                // With a journal the tables are checkpointed later: at most two pages for each write.
                let has_no_journal = ["vellum raw", "vellum qcow2 plain"];
                let later = if has_no_journal.contains(&bound.subject) { 0 } else { 2 * writes };
                assert!((foreground..=foreground + CLOSING + later).contains(&total), "{said}");
            }
        }
    }
    assert_eq!(looked_at.len(), BOUNDS.len(), "each bound has its row: {looked_at:?}");

    if is_installed("strace") {
        let confirmed = report["confirmations"].as_array().expect("confirmations");
        assert!(confirmed.len() >= 2, "raw and qcow2 were seen from outside: {confirmed:?}");
    } else {
        skipped("strace is not installed; what Vellum counts is not confirmed from outside");
    }
}
