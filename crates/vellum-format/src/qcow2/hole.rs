//! Holes in the file, in which tables may lie.

use vellum_core::{ImageOffset, ImageSpan, Storage, StorageRun};

/// The runs of data and holes around the last table that was looked at. Tables in a hole are all zeros, and there may be
/// millions; those in data are not asked for one by one either.
pub(super) struct Hole {
    /// Where all runs are known.
    known: ImageSpan,
    runs: Vec<StorageRun>,
}

impl Default for Hole {
    fn default() -> Self {
        Self { known: ImageOffset::ZERO.span(0), runs: Vec::new() }
    }
}

/// A table smaller than this costs no more to read than to query the block status.
const WORTH_ASKING: u64 = 64 << 10;
/// Runs are asked for up to this far behind a table.
const ASKED_BYTES: u64 = 4 << 30;

impl Hole {
    /// Whether all of this table lies in a hole of the file.
    pub(super) async fn covers(&mut self, image: &dyn Storage, table: ImageSpan) -> bool {
        if table.len() < WORTH_ASKING || table.end().bytes() > image.len() {
            return false;
        }
        if table.start() < self.known.start() || table.end() > self.known.end() {
            let asked =
                table.start().span(ASKED_BYTES.max(table.len()).min(image.len() - table.start().bytes()));
            let Ok(runs) = image.runs(asked).await else { return false };
            let end = runs.last().map_or(asked.start(), |last| last.span.end());
            (self.known, self.runs) = (ImageSpan::between(asked.start(), end), runs);
        }
        let index = self.runs.partition_point(|run| run.span.end() <= table.start());
        self.runs.get(index).is_some_and(|run| {
            !run.is_data && run.span.start() <= table.start() && table.end() <= run.span.end()
        })
    }
}
