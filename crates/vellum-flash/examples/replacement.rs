//! Hit ratios of each replacement on recorded traces, in caches of a share of what the trace touches.
//!
//! ```text
//!   xz -dk FILE.csv.xz; cargo run --release -p vellum-flash --example replacement -- FILE.csv…
//! ```
//!
//! The forms of a trace are those of `vellum_flash::uses_of`.

use std::collections::BTreeSet;
use std::io::{Write, stdout};
use std::{env, fs};

use vellum_core::{Context, Result};
use vellum_flash::{Replacement, hits, uses_of};

/// Sizes of the caches, in percent of the blocks that are touched.
const PERCENT: [u64; 5] = [1, 5, 10, 20, 40];

fn main() -> Result<()> {
    let mut out = stdout().lock();
    for path in env::args().skip(1) {
        let context = || format!("can't read {path}");
        let uses = fs::read_to_string(&path).context(context)?;
        let uses = uses_of(&uses).context(context)?;
        let touched = uses.iter().map(|(block, _)| block).collect::<BTreeSet<_>>().len() as u64;
        let reads = uses.iter().filter(|(_, is_write)| !is_write).count();
        let mut lines = format!("{path}: {} uses, {reads} reads, {touched} blocks\n", uses.len());
        for percent in PERCENT {
            let slots = u32::try_from((touched * percent).div_ceil(100).max(1)).unwrap_or(u32::MAX);
            lines += &format!("{percent:>4} % {slots:>9}");
            for kind in Replacement::ALL {
                let counts = hits(kind, slots, uses.iter().copied());
                let share = |hits: u64, all: u64| 100.0 * hits as f64 / all.max(1) as f64;
                let all = share(counts.read_hits + counts.write_hits, counts.reads + counts.writes);
                let reads = share(counts.read_hits, counts.reads);
                let each = counts.policy_bytes as f64 / f64::from(slots);
                lines += &format!("   {} {all:.2} % (reads {reads:.2} %, {each:.1} B)", kind.name());
            }
            lines.push('\n');
        }
        out.write_all(lines.as_bytes()).context(|| "can't write to stdout")?;
    }
    Ok(())
}
