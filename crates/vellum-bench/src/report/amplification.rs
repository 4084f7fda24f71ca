//! The table of `sync-amplification`: what the guest requested, what the host did for it, and the ratio.

use serde::Serialize;
use vellum_lab::cost::{Counts, Guest, Host};

/// One format of one program at one workload.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Row {
    pub(crate) subject: &'static str,
    /// The witness: `strace` or `stats`.
    pub(crate) witness: &'static str,
    pub(crate) guest: Guest,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) host: Option<Host>,
    /// Flushes that the device completed up to the last answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) device_flushes: Option<u64>,
    /// What was read of the base up to the last answer, where `strace` saw it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) base_bytes_read: Option<u64>,
    /// Why there is nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
pub(super) fn per(count: u64, unit: u64) -> f64 {
    count as f64 / unit as f64
}

/// The widths of the columns: a name, then two of the guest, then twice those of the host.
const NAME: usize = 29;

/// What stands above the rows.
pub(crate) fn head() -> [String; 2] {
    let host =
        format!("{:>6} {:>6} {:>7} {:>5}  {:>5} {:>5} {:>6}", "F", "W", "KiB", "H", "F/f", "W/w", "KiB/w");
    let width = host.chars().count();
    [
        format!(
            "  {:<NAME$} {:<9}  | {:<width$} | to a clean close",
            "", "guest", "host, to the last answer"
        ),
        format!("  {:<NAME$} {:>4} {:>4}  | {host} | {host}", "", "w", "f"),
    ]
}

/// A row as a line.
pub(crate) fn line(row: &Row) -> String {
    let name = format!("  {:<NAME$}", row.subject);
    let Some(host) = row.host else {
        return format!("{name} n/a");
    };
    let Guest { writes, flushes, .. } = row.guest;
    let side = |counts: Counts| {
        format!(
            "{:>6} {:>6} {:>7} {:>5}  {:>5.2} {:>5.2} {:>6.1}",
            counts.flushes,
            counts.writes,
            counts.bytes_written.div_ceil(1024),
            counts.holes,
            per(counts.flushes, flushes),
            per(counts.writes, writes),
            per(counts.bytes_written, writes) / 1024.0,
        )
    };
    let device = row.device_flushes.map_or_else(String::new, |device| {
        format!(" | device: {device} flushes, {:.2} for each of the guest", per(device, flushes))
    });
    let base = row
        .base_bytes_read
        .map_or_else(String::new, |bytes| format!(" | base: {} KiB read", bytes.div_ceil(1024)));
    let (foreground, total) = (side(host.foreground), side(host.total));
    format!("{name} {writes:>4} {flushes:>4}  | {foreground} | {total}{device}{base}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_counts_and_ratios_of_both_spans() {
        let foreground = Counts { flushes: 512, writes: 768, bytes_written: 256 * 135_168, holes: 256 };
        let total = Counts { flushes: 513, ..foreground };
        let guest = Guest { writes: 256, bytes_written: 1 << 20, discards: 0, flushes: 256 };
        let row = Row {
            subject: "qemu qcow2",
            witness: "strace",
            guest,
            host: Some(Host { foreground, total }),
            device_flushes: None,
            base_bytes_read: None,
            skipped: None,
        };
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(
            words(&line(&row)),
            "qemu qcow2 256 256 | 512 768 33792 256 2.00 3.00 132.0 | 513 768 33792 256 2.00 3.00 132.0"
        );
        let bars = |line: &str| line.match_indices('|').map(|(at, _)| at).collect::<Vec<_>>();
        let [first, second] = head();
        assert_eq!(bars(&first), bars(&second), "columns stand below their names");
        assert_eq!(bars(&second), bars(&line(&row)));
        let below = Row { device_flushes: Some(1024), ..row.clone() };
        assert!(line(&below).ends_with(" | device: 1024 flushes, 4.00 for each of the guest"));
        let over = Row { base_bytes_read: Some(1025), ..row.clone() };
        assert!(line(&over).ends_with(" | base: 2 KiB read"));
        let absent = Row { host: None, skipped: Some("no such format".into()), ..row };
        assert_eq!(words(&line(&absent)), "qemu qcow2 n/a");
        let json = serde_json::to_value(&absent).unwrap();
        assert_eq!(json["skipped"], "no such format");
        assert!(json.get("host").is_none());
    }
}
