//! A guest that boots from a slow template: a new clone for each program, which boots twice in each round.
//!
//! ```text
//!   vellum, qemu-nbd   QEMU ◄─ NBD ◄─ clone on the local drive ◄─ template behind the delay
//!   nbdkit cache       QEMU ◄─ NBD ◄─ cache ◄─ a copy of the template behind the delay
//! ```
//!
//! 1. *Cold*: nothing of the template has been read, and caches are empty. *Warm*: the same programs go on, and the guest boots
//!    again. A program that has no cache reads what the guest reads from behind the delay both times.
//! 2. A program without QEMU's own overlay writes to the template's copy.
//!
//! Processors are emulated, so much of a boot is work that no storage makes shorter.

use std::fs;

use serde::Serialize;
use vellum_core::{Context, Result};
use vellum_lab::cost::lab::Lab;
use vellum_lab::report::complain;

use super::stand::{Counts, Disk, Stand, Way};
use crate::commands::boot::machine::boot;
use crate::commands::boot::system::System;
use crate::report::{median, short};

/// The boots of a program in one round.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Round {
    /// Until the guest was up.
    cold_seconds: f64,
    warm_seconds: f64,
    /// What a cache counted in both boots.
    #[serde(skip_serializing_if = "Option::is_none")]
    cold_flash: Option<Counts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    warm_flash: Option<Counts>,
}

/// All boots of a program behind this delay.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Row {
    delay_ms: u64,
    way: Way,
    rounds: Vec<Round>,
}

/// All programs behind this delay.
///
/// # Errors
/// When a program or a guest fails.
pub(super) fn measure(
    lab: &Lab,
    ways: &[Way],
    system: &System,
    flash_bytes: u64,
    delay_ms: u64,
    rounds: u32,
) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = ways.iter().map(|way| Row { delay_ms, way: *way, rounds: Vec::new() }).collect();
    for round in 0..rounds as usize {
        for turn in 0..rows.len() {
            let at = (round + turn) % rows.len();
            let way = rows[at].way;
            let seen = of_way(lab, way, system, flash_bytes, delay_ms).context(|| way.title())?;
            complain(&format!(
                "{delay_ms} ms, {}: {:.1} s, {:.1} s",
                way.title(),
                seen.cold_seconds,
                seen.warm_seconds
            ));
            rows[at].rounds.push(seen);
        }
    }
    Ok(rows)
}

fn of_way(lab: &Lab, way: Way, system: &System, flash_bytes: u64, delay_ms: u64) -> Result<Round> {
    let disk = Disk { raw: &system.disk, full: &system.disk, flash_bytes };
    let stand = match way {
        Way::NbdkitCache => Stand::of_disk(lab, way, delay_ms, &disk, "guest")?,
        _ => Stand::of_clones(lab, way, delay_ms, &disk, 1)?,
    };
    let dir = stand.dir.clone();
    let (socket, export) = &stand.doors[0];
    let counts = [stand.counts()?];
    let cold = boot(system, socket, export)?;
    let between = stand.counts()?;
    let warm = boot(system, socket, export)?;
    let after = stand.counts()?;
    let since = |after: Option<Counts>, before: Option<Counts>| {
        after.zip(before).map(|(after, before)| after.since(&before))
    };
    let [before] = counts;
    stand.stop()?;
    fs::remove_dir_all(&dir).context(|| format!("can't remove {}", dir.display()))?;
    Ok(Round {
        cold_seconds: cold.as_secs_f64(),
        warm_seconds: warm.as_secs_f64(),
        cold_flash: since(between, before),
        warm_flash: since(after, between),
    })
}

/// What is printed of them.
pub(super) fn lines(rows: &[Row]) -> Vec<String> {
    let mut lines = Vec::new();
    for row in rows {
        if row.way == Way::Cached {
            lines.push(format!(
                "{} ms, guest: Debian under TCG boots a new clone until its last service is up, then again; seconds",
                row.delay_ms
            ));
        }
        let times = |of: fn(&Round) -> f64| median(row.rounds.iter().map(of));
        let mut line = format!(
            "  {:<15} cold {:>5.1} warm {:>5.1}",
            row.way.title(),
            times(|round| round.cold_seconds),
            times(|round| round.warm_seconds)
        );
        if let Some(ours) = rows.iter().find(|ours| ours.way == Way::Cached && row.way != Way::Cached) {
            let ratio = |of: fn(&Round) -> f64| {
                median(row.rounds.iter().zip(&ours.rounds).map(|(theirs, ours)| of(theirs) / of(ours)))
            };
            line += &format!(
                "   with the cache {}x, {}x",
                short(ratio(|round| round.cold_seconds)),
                short(ratio(|round| round.warm_seconds))
            );
        }
        for (name, of) in [
            ("cold", (|round| round.cold_flash.as_ref()) as fn(&Round) -> Option<&Counts>),
            ("warm", |round| round.warm_flash.as_ref()),
        ] {
            let seen: Vec<&Counts> = row.rounds.iter().filter_map(of).collect();
            if !seen.is_empty() {
                line += &format!("   {name}:{}", super::told(&seen));
            }
        }
        lines.push(line);
    }
    lines
}
