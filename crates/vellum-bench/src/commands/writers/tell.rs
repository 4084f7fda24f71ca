//! The report on writers: rates, processor time, ratios in the same round.

use vellum_lab::report::Table;

use super::cases::{MORE_SUBJECTS, QEMU, RAW, SUBJECTS, ZONED};
use super::{Outcome, Row};
use crate::report::{median, short};

pub(super) fn head(table: Table) {
    table.say(
        "writes a second (median), CPU time of the server for one; times raw and times QEMU's qcow2 (median of the rounds, \
         ± half of their spread)",
    );
}

/// One's rates over another's, round by round.
fn ratios(row: &Row, rows: &[Row], to: &str) -> Vec<f64> {
    let other = rows.iter().find(|other| other.subject == to);
    other.map_or_else(Vec::new, |other| {
        row.rates.iter().zip(&other.rates).map(|(mine, theirs)| mine / theirs).collect()
    })
}

/// A case, and each one at it.
pub(super) fn outcome(outcome: &Outcome, table: Table) {
    table.say("");
    let lz4 = outcome
        .lz4_percent
        .map_or_else(String::new, |percent| format!("   (LZ4: {percent:.2} % of a processor)"));
    table.say(&format!("{}{lz4}", outcome.case));
    for row in outcome.rows.iter().filter(|row| row.skipped.is_none()) {
        let show = |to: &str| {
            let ratios = ratios(row, &outcome.rows, to);
            if ratios.is_empty() {
                return "-".to_owned();
            }
            let (least, most) = ends(&ratios);
            format!("{:.2} ±{:.0}%", median(ratios), (most - least) * 50.0)
        };
        let rate = short(median(row.rates.iter().copied()));
        table.say(&format!(
            "  {:<24} {rate:>8}   CPU {:>6} µs   raw {:>12}   qemu {:>13}",
            row.subject,
            short(row.cpu_us),
            show(RAW),
            show(QEMU)
        ));
    }
}

fn ends(values: &[f64]) -> (f64, f64) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (least, most)
}

/// Over all cases: what each one's ratios come to.
pub(super) fn sum_up(outcomes: &[Outcome], table: Table) {
    table.say("");
    table.say("over all cases: the median of their ratios, the least and the most");
    for subject in SUBJECTS.iter().chain(&MORE_SUBJECTS) {
        let of = |to: &str| -> Vec<f64> {
            let rows = outcomes.iter().flat_map(|outcome| {
                outcome.rows.iter().filter(|row| row.subject == subject.name).map(move |row| (row, outcome))
            });
            let ratios = rows.map(|(row, outcome)| ratios(row, &outcome.rows, to));
            ratios.filter(|ratios| !ratios.is_empty()).map(median).collect()
        };
        let show = |ratios: Vec<f64>| {
            if ratios.is_empty() {
                return "-".to_owned();
            }
            let (least, most) = ends(&ratios);
            format!("{:.2} ({least:.2} to {most:.2})", median(ratios))
        };
        let (raw, qemu) = (show(of(RAW)), show(of(QEMU)));
        if raw == "-" && qemu == "-" {
            continue;
        }
        table.say(&format!("  {:<24} raw {:>20}   qemu {:>20}", subject.name, raw, qemu));
    }
    let zoned = outcomes.iter().filter_map(|outcome| {
        let row = outcome.rows.iter().find(|row| row.subject == ZONED)?;
        let is_sync = outcome.case.contains("-sync-") && !outcome.case.starts_with("overwrite");
        let [raw, qemu] = [RAW, QEMU]
            .map(|to| ratios(row, &outcome.rows, to))
            .map(|all| (!all.is_empty()).then(|| median(all)));
        Some((is_sync, raw, qemu))
    });
    let (mut raw, mut qemu) = ((0, 0), (0, 0));
    let count = |(all, reached): &mut (u32, u32), ratio: Option<f64>, least: f64| {
        if let Some(ratio) = ratio {
            *all += 1;
            *reached += u32::from(ratio >= least);
        }
    };
    for (is_sync, to_raw, to_qemu) in zoned {
        count(&mut raw, to_raw, 0.95);
        count(&mut qemu, to_qemu.filter(|_| is_sync), 2.0);
    }
    table.say(&format!(
        "zoned reaches 0.95 of raw in {} of {} cases, and twice QEMU's qcow2 in {} of {} that allocate and flush each write",
        raw.1, raw.0, qemu.1, qemu.0
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_those_of_the_same_round() {
        let row = |subject, rates: &[f64]| Row { subject, rates: rates.to_vec(), cpu_us: 0.0, skipped: None };
        let rows = [row(ZONED, &[10.0, 40.0]), row(RAW, &[20.0, 50.0]), row(QEMU, &[])];
        assert_eq!(ratios(&rows[0], &rows, RAW), [0.5, 0.8]);
        assert!(ratios(&rows[0], &rows, QEMU).is_empty());
    }
}
