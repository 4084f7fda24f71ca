//! `vellum-bench replay-traces` on this machine: a short trace of the shape of a mail server, and its cost
//! with Vellum.

mod support;

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;
use support::{NO_VELLUM, is_installed, number, per, report, skipped, vellum};
use vellum_core::Random;

/// Files of 4 to 32 KiB, a few of them between two flushes, blocks that are written again and again; and a
/// read that is left out.
fn mail_server() -> String {
    let mut random = Random::from_seed(1);
    let mut text = "t_us,phase,op,offset,len,fua\n0,m,W,0,65536,0\n1,w,R,0,4096,0\n".to_owned();
    let mut end = 1u64 << 20;
    for time in 0..100 {
        for _ in 0..1 + random.below(8) {
            let (offset, len) = match random.below(4) {
                0 => ((1 << 19) + random.below(8) * 4096, 4096),
                _ => (end, 4096 * (1 + random.below(8))),
            };
            writeln!(text, "{time},w,W,{offset},{len},0").expect("memory");
            end += if offset == end { len } else { 0 };
        }
        writeln!(text, "{time},w,F,0,0,0").expect("memory");
    }
    text
}

#[test]
fn overlays_write_what_the_guest_writes() {
    let Some(vellum) = vellum() else {
        return skipped(NO_VELLUM);
    };
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mail.csv");
    fs::write(&path, mail_server()).expect("the trace can be written");
    let path = path.to_str().expect("a name");
    let (report, told) = report("replay-traces", &vellum, &["--skip-peers", "--trace", path]);
    let outcome = &report["traces"][0];
    assert_eq!((outcome["trace"].as_str(), number(outcome, "/reads-left-out")), (Some("mail"), 1));
    let (bytes, flushes) = (number(outcome, "/guest/bytes-written"), number(outcome, "/guest/flushes"));
    assert_eq!(flushes, 101, "one more at the end; the phase m is left out");
    let row = |subject: &str| -> &Value {
        let rows = outcome["rows"].as_array().expect("rows");
        let row = rows.iter().find(|row| row["subject"] == subject);
        row.unwrap_or_else(|| panic!("no row {subject}: {told}"))
    };
    // What opening for writing costs once: the journal of 1 MiB is made, and the header says so.
    const OPENING_FLUSHES: u64 = 2;
    const OPENING_BYTES: u64 = (1 << 20) + 4096;
    for (subject, bytes_per_byte, opening_bytes, flushes_max) in [
        ("vellum raw", 1.0, 0, flushes),
        ("vellum qcow2 plain", 1.15, 0, 2 * flushes),
        ("vellum qcow2 journaled", 1.15, OPENING_BYTES, flushes + OPENING_FLUSHES),
    ] {
        let row = row(subject);
        let host = number(row, "/host/foreground/bytes-written");
        let steady = host.saturating_sub(opening_bytes);
        assert!(host >= bytes && per(steady, bytes) <= bytes_per_byte, "{subject}\n{told}");
        assert!(number(row, "/host/foreground/flushes") <= flushes_max, "{subject}\n{told}");
        assert!(number(row, "/host/total/bytes-written") >= host, "{subject}\n{told}");
        if subject != "vellum raw" && is_installed("strace") {
            assert_eq!(number(row, "/base-bytes-read"), 0, "{subject}\n{told}");
        }
    }
    if !is_installed("strace") {
        return skipped("strace is not installed; what is read of the base is not seen");
    }
    // Whole clusters copy the rest from the base, and that is seen.
    assert!(number(row("vellum qcow2 extended_l2=off"), "/base-bytes-read") > 0, "{told}");
}
