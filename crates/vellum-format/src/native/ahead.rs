//! Young zones in a file, written with zeros a little ahead of need.
//!
//! ```text
//!   zone   given out │ zeros, written │ zeros, on their way │ never touched
//!                    ▲ prepared                             ▲ next             (all of it reads as zero, as it did before)
//! ```
//!
//! A host's file system commits its own journal when a flush finds blocks that the file did not have. Where zeros were
//! written before it does not: `docs/design/0005-preallocation.md` says what that is worth, and `prealloc.rs` how far ahead.
//!
//! 1. Zeros are written only to units that nobody was given, and nobody is given one while they are under way: zeros never land
//!    on what somebody else has written. Meanwhile the zone goes on behind them.
//! 2. A prepared unit reads as it did. Nothing but the order of giving out depends on it; no flush is asked for.
//! 3. One piece is under way at a time. Closing waits for it.
//! 4. No more zeros are written than a few times what the guest writes (`Budget`): scattered small writes take a unit each.
//! 5. A failure ends it for this opening. The guest does not hear of it.

use std::time::Duration;

use vellum_core::{Buffer, Error, ErrorKind, ImageSpan, Result, Storage};

use super::image::Native;
use crate::prealloc::{Budget, Pace, Prealloc, next_piece};

/// What is prepared, and how.
pub(super) struct Ahead {
    how: Prealloc,
    pace: Pace,
    has_given_up: bool,
    budget: Budget,
}

impl Ahead {
    pub(super) fn new(how: Prealloc, storage: &dyn Storage) -> Self {
        let limits = storage.limits();
        let can = !limits.fixed_len && limits.grows_zeroed;
        let how = if can { how.settled(limits.prefers_written) } else { Prealloc::Off };
        Self { how, pace: Pace::default(), has_given_up: false, budget: Budget::new() }
    }
}

impl Native {
    /// Prepares a piece of a young zone, if it is time for one. Tells whether it is time for another. Held while this is done: who
    /// makes units ready.
    pub(super) async fn prepare_zones(&self, now: Duration) -> bool {
        let (Some(ahead), Some(unit)) = (&self.zones_ahead, self.unit()) else { return false };
        let Some(mut ahead) = ahead.try_lock() else { return false };
        let has_ended = self.state.check_open().is_err() || self.state.check_stopped().is_err();
        if ahead.how == Prealloc::Off || ahead.has_given_up || has_ended || self.journal().is_none() {
            return false;
        }
        let written = self.written_bytes.load(std::sync::atomic::Ordering::Relaxed);
        ahead.budget.note(written);
        ahead.pace.note(now, self.given_of_zones() << unit.shift());
        let distance = ahead.pace.distance(ahead.how);
        let is_due = || next_piece(distance, self.prepared_units() << unit.shift());
        let Some(bytes) = is_due().filter(|bytes| ahead.budget.has(*bytes)) else { return false };
        match self.prepare_piece(unit.count_for(bytes)).await {
            Ok(0) => false,
            Ok(units) => {
                ahead.budget.spend(units << unit.shift());
                is_due().is_some_and(|bytes| ahead.budget.has(bytes))
            }
            Err(_) => {
                ahead.has_given_up = true;
                false
            }
        }
    }

    /// Writes zeros to about so many units. Tells how many.
    async fn prepare_piece(&self, count: u64) -> Result<u64> {
        let per_zone = self.places.units_per_zone();
        let count = u32::try_from(count).unwrap_or(per_zone);
        let begun = self.in_next_zone(|zone| (zone.zone, zone.begin_preparing(count, per_zone)));
        let Some((zone, run)) = begun.filter(|(_, run)| !run.is_empty()) else { return Ok(0) };
        let mut under_way = UnderWay { image: self, has_ended: false };
        let first = zone * per_zone + 1;
        let (start, last) = (self.places.unit(first + run.start), self.places.unit(first + run.end - 1));
        let result = self.write_ahead(ImageSpan::between(start.start(), last.end())).await;
        under_way.has_ended = true;
        let prepared = u64::from(run.end - run.start);
        self.in_zone(zone, |zone| zone.end_preparing(run));
        result.map(|()| prepared)
    }

    async fn write_ahead(&self, span: ImageSpan) -> Result<()> {
        // The file is made longer by nobody else meanwhile, and never cut where this lands.
        self.reach(span).await?;
        let len = usize::try_from(span.len()).expect("a piece is small");
        self.ahead.write(span.start(), Buffer::zeroed(len)).await
    }
}

/// Zeros that are on their way. Were the future dropped, they could land at any later time.
struct UnderWay<'a> {
    image: &'a Native,
    has_ended: bool,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let why = "space was being prepared, and that was abandoned half way: reopen the image";
            self.image.state.stop(Error::new(ErrorKind::Poisoned, why));
        }
    }
}
