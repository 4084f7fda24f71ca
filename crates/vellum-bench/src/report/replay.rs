//! The table of `replay-traces`: what the host wrote, flushed and read for what the guest wrote and flushed.

use serde::Serialize;
use vellum_lab::cost::{Guest, Host};

use super::amplification::per;

/// One trace.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Outcome {
    pub(crate) trace: String,
    pub(crate) guest: Guest,
    pub(crate) reads_left_out: u64,
    pub(crate) rows: Vec<Row>,
}

/// One format at it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Row {
    pub(crate) subject: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<Host>,
    /// Of an overlay, where `strace` looked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) base_bytes_read: Option<u64>,
    /// Why there is nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
}

#[expect(clippy::cast_precision_loss, reason = "bytes are far below 2^53")]
fn mebibytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / (1u64 << 20) as f64)
}

/// The width of a name.
const NAME: usize = 29;

/// What stands above the rows.
pub(crate) fn head(outcome: &Outcome) -> [String; 3] {
    let Guest { writes, bytes_written, discards, flushes } = outcome.guest;
    let span = format!("{:>6} {:>8} {:>6} {:>5}  {:>5} {:>5}", "W", "MiB", "F", "H", "B/b", "F/f");
    let width = span.chars().count();
    let (discarded, read) = (
        if discards > 0 { format!(", {discards} discards") } else { String::new() },
        match outcome.reads_left_out {
            0 => String::new(),
            reads => format!("; {reads} reads left out"),
        },
    );
    [
        format!(
            "{}: {writes} writes, {} MiB, {flushes} flushes{discarded}{read}",
            outcome.trace,
            mebibytes(bytes_written)
        ),
        format!(
            "  {:<NAME$} | {:<width$} | {:<width$} | base",
            "", "host, to the last answer", "to a clean close"
        ),
        format!("  {:<NAME$} | {span} | {span} | MiB read", ""),
    ]
}

/// A row as a line.
pub(crate) fn line(outcome: &Outcome, row: &Row) -> String {
    let name = format!("  {:<NAME$}", row.subject);
    let Some(host) = row.host else {
        return format!("{name} n/a");
    };
    let [foreground, total] = [host.foreground, host.total].map(|counts| {
        format!(
            "{:>6} {:>8} {:>6} {:>5}  {:>5.2} {:>5.2}",
            counts.writes,
            mebibytes(counts.bytes_written),
            counts.flushes,
            counts.holes,
            per(counts.bytes_written, outcome.guest.bytes_written),
            per(counts.flushes, outcome.guest.flushes),
        )
    });
    let base = row.base_bytes_read.map_or_else(|| "-".to_owned(), mebibytes);
    format!("{name} | {foreground} | {total} | {base:>8}")
}

#[cfg(test)]
mod tests {
    use vellum_lab::cost::Counts;

    use super::*;

    #[test]
    fn a_line_tells_how_many_times_the_guests_bytes_and_flushes() {
        let foreground = Counts { flushes: 30, writes: 70, bytes_written: 23 << 20, holes: 1 };
        let total = Counts { bytes_written: 25 << 20, ..foreground };
        let row = Row {
            subject: "qemu qcow2",
            host: Some(Host { foreground, total }),
            base_bytes_read: Some(5 << 19),
            skipped: None,
        };
        let guest = Guest { writes: 50, bytes_written: 10 << 20, discards: 0, flushes: 20 };
        let outcome = Outcome { trace: "mail".into(), guest, reads_left_out: 3, rows: Vec::new() };
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            words(&line(&outcome, &row)),
            "qemu qcow2 | 70 23.0 30 1 2.30 1.50 | 70 25.0 30 1 2.50 1.50 | 2.5"
        );
        let [title, first, second] = head(&outcome);
        assert_eq!(title, "mail: 50 writes, 10.0 MiB, 20 flushes; 3 reads left out");
        let bars = |line: &str| line.match_indices('|').map(|(at, _)| at).collect::<Vec<_>>();
        assert_eq!(bars(&first), bars(&second), "columns stand below their names");
        assert_eq!(bars(&second), bars(&line(&outcome, &row)));
        let absent = Row { host: None, skipped: Some("not here".into()), ..row };
        assert_eq!(words(&line(&outcome, &absent)), "qemu qcow2 n/a");
    }
}
