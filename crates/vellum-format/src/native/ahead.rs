//! Open zones in a file, filled with zeros a little ahead of need.
//!
//! ```text
//!   zone   handed out │ zeros, written │ zeros, on their way │ never touched
//!                     ▲ prepared                             ▲ next     (all of it reads as zero, as before)
//! ```
//!
//! A host's file system commits its own journal when a flush finds blocks that the file did not have before.
//! Where zeros were already written, it does not. `docs/design/0005-preallocation.md` says what that is
//! worth, and `prealloc.rs` how far ahead zeros are written.
//!
//! 1. Zeros are written only to units that were not handed out, and none of these is handed out while zeros
//!    are on their way to it. So zeros never land on other data. Meanwhile the zone continues behind them.
//! 2. A prepared unit reads as before. Only the order of handing out depends on it, so no flush is needed.
//! 3. One piece is in progress at a time. Closing waits for it.
//! 4. A failure ends this for the opening. The guest does not notice it.

use std::time::Duration;

use vellum_core::{Buffer, ImageSpan, Result};

use super::image::Native;
use crate::state::UnderWay;

impl Native {
    /// Prepares a piece of an open zone, if it is time for one. Returns whether it is time for another. The
    /// caller holds the lock for making units ready.
    pub(super) async fn prepare_zones(&self, now: Duration) -> bool {
        let (Some(zones), Some(unit)) = (&self.zones, self.unit()) else { return false };
        let Some(mut need) = zones.need.try_lock() else { return false };
        let has_ended = self.engine.state.check_open().is_err() || self.engine.state.check_stopped().is_err();
        if !need.is_on() || has_ended || self.journal().is_none() {
            return false;
        }
        let written = zones.written_bytes();
        need.note(now, self.given_of_zones() << unit.shift(), written);
        let ready = || self.prepared_units() << unit.shift();
        let Some(bytes) = need.piece(ready()) else { return false };
        match self.prepare_piece(unit.count_for(bytes)).await {
            Ok(0) => false,
            Ok(units) => {
                need.spend(units << unit.shift());
                need.piece(ready()).is_some()
            }
            Err(_) => {
                need.give_up();
                false
            }
        }
    }

    /// Writes zeros to about `count` units. Returns how many.
    async fn prepare_piece(&self, count: u64) -> Result<u64> {
        let per_zone = self.places.units_per_zone();
        let count = u32::try_from(count).unwrap_or(per_zone);
        let begun = self.in_next_zone(|zone| (zone.zone, zone.begin_preparing(count, per_zone)));
        let Some((zone, run)) = begun.filter(|(_, run)| !run.is_empty()) else { return Ok(0) };
        let under_way = UnderWay::begin(&self.engine.state, "writing zeros ahead of need");
        let first = zone * per_zone + 1;
        let (start, last) = (self.places.unit(first + run.start), self.places.unit(first + run.end - 1));
        let result = self.write_ahead(ImageSpan::between(start.start(), last.end())).await;
        under_way.end();
        let prepared = u64::from(run.end - run.start);
        self.in_zone(zone, |zone| zone.end_preparing(run));
        result.map(|()| prepared)
    }

    async fn write_ahead(&self, span: ImageSpan) -> Result<()> {
        // Extended first, so that no other request does it meanwhile and truncates the file where this lands.
        self.reach(span).await?;
        let len = usize::try_from(span.len()).expect("a piece is small");
        self.ahead.write(span.start(), Buffer::zeroed(len)).await
    }
}
