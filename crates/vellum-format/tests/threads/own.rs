//! Guests that own sectors, on every layout, beside everything that a server does: snapshots made, read and
//! deleted, units prepared, zones emptied.
//!
//! ```text
//!   unit   │0 1 2 3│0 1 2 3│ ..      four guests own the sectors of the same units in turn: what one writes the others must not lose
//!   unit   │   4   │                 a fifth has units to itself, which it releases and takes again: pages of the table change
//! ```
//!
//! A guest's sectors are written by that guest alone, so each read of them has one correct answer at once. A
//! snapshot reads the same every time. At the end the disk has each guest's last writes: after closing, or
//! after a flush and a power cut.

use super::common::scale;
use super::race::{USED, kinds, nearly_full, race};

/// A write that finds no space finds some later if there is room for everything that is allocated: no unit is
/// lost to tasks that prepare others, open zones or empty them.
#[test]
fn guests_find_space_on_a_device_that_is_nearly_full() {
    for units in USED..USED + 4 {
        for seed in 0..2 * scale() {
            let what = |what| panic!("{units} units for {USED}, seed {seed}: {what}");
            let kind = nearly_full(units);
            race(&kind, seed, || ()).unwrap_or_else(what);
        }
    }
}

#[test]
fn guests_keep_what_is_theirs_whatever_is_done_beside_them() {
    for kind in kinds() {
        for seed in 0..2 * scale() {
            race(&kind, seed, || ())
                .unwrap_or_else(|what| panic!("{}, seed {seed}: {what}", kind.setup.name));
        }
    }
}
