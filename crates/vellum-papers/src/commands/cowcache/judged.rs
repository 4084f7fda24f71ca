//! What all rows of this paper are judged by.

use crate::report::Row;

const SCALE: &str = "made with fewer requests than the paper's";

/// The factor that a reduction stands for: −75 % is four times less.
pub(super) fn factor(percent_less: f64) -> f64 {
    1.0 / (1.0 - percent_less / 100.0)
}

/// A row for which there is nothing here.
pub(super) fn none(
    id: &'static str,
    place: &'static str,
    what: &'static str,
    paper: &'static str,
    why: &'static str,
) -> Row {
    Row::not_made(id, (place, what), paper, why)
}

/// A row that depends on how many requests there were.
pub(super) fn scaled(is_full: bool, row: Row) -> Row {
    if is_full { row } else { row.not_judged(SCALE) }
}

/// A row of figure 13, whose guests are not the paper's own: a generator's row is judged on the whole scale, that of the short
/// recording never.
pub(super) fn of_application(is_full: bool, what: &str, row: Row) -> Row {
    match what.contains("Varmail") {
        true => row.not_judged("another size: varmail's parameters, recorded, 54 MiB written on ext4"),
        false => scaled(is_full, row),
    }
}
