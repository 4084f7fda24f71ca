//! Holes in the file, in which tables may lie.

use vellum_core::{ImageSpan, Storage};

/// The largest known hole around the last table that was looked at. Tables in it are all zeros, and there may
/// be millions.
#[derive(Default)]
pub(super) struct Hole(std::ops::Range<u64>);

/// A table smaller than this costs no more to read than to query the block status.
const WORTH_ASKING: u64 = 64 << 10;
/// When a table is in a hole, the hole is looked for up to this far behind it.
const HOLE_BYTES: u64 = 1 << 30;

impl Hole {
    /// Whether all of this table lies in a hole of the file.
    pub(super) async fn covers(&mut self, image: &dyn Storage, table: ImageSpan) -> bool {
        let (start, end) = (table.start().bytes(), table.end().bytes());
        if table.len() < WORTH_ASKING || end > image.len() {
            return false;
        }
        if !(self.0.start <= start && end <= self.0.end) {
            // Most tables are data, and that shows without looking at what follows.
            let hole = async |span: ImageSpan| match image.runs(span).await.ok()?.first() {
                Some(first) if !first.is_data => Some(first.span),
                _ => None,
            };
            let Some(first) = hole(table).await else { return false };
            let more = match first.end() == table.end() {
                true => hole(table.end().span(HOLE_BYTES.min(image.len() - end))).await,
                false => None,
            };
            self.0 = start..more.unwrap_or(first).end().bytes();
        }
        end <= self.0.end
    }
}
