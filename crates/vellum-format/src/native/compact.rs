//! Emptying a zone of which most units are free, so that it can be opened again.
//!
//! ```text
//!   quiet, and no zone can be opened ► a zone with few units ► hold: who writes there gets a copy elsewhere first
//!     ► the table is looked through ► each unit that is left is copied ► freed, durably ► made zero ► the zone is opened
//! ```
//!
//! Free units of closed zones are used one by one, so no space is lost where nothing is compacted: what a device of fragments loses is
//! that new units hold their own entries. In a file new zones lie behind the others, and what is free is a hole.
//!
//! 1. A unit is copied as one is that a snapshot sees (`snapshots/keep.rs`): who looked before it was held has left, the copy is claimed,
//!    its checks and its entry are one step. Then nothing names the old unit, and it is freed like any other.
//! 2. Nobody is given a unit of the zone meanwhile. Where there is no other, or where a copy fails that a write waits for, the zone is
//!    let go: compaction fails no write. A copy that is under way then does not count.
//! 3. It begins only after two quiet seconds, for a zone of which at most half is used, and never where there are snapshots. A little
//!    is done at a time, and it ends when the guest writes much. So an opened zone costs at most half a zone of copies.
//! 4. What could not be emptied is not tried again before the next opening.
//! 5. It may be cut off anywhere: it is nothing but writes and frees.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vellum_core::{ImageOffset, Result};

use super::geometry::Region;
use super::image::Native;
use super::zones::Zones;
use crate::bytes::be32;
use crate::state::lock;

/// So long nothing is taken before it begins, and little is written.
const QUIET_AFTER: Duration = Duration::from_secs(2);
/// That is little, in bytes: for the time before it begins, and between two goes.
const WRITTEN_MAX: u64 = 256 << 10;
/// So many pages of the table are looked through in a go.
const PAGES_IN_A_GO: u64 = 256;
/// So many units are copied in a go.
const COPIED_IN_A_GO: usize = 8;
/// So often it is waited for freed units before it is given up.
const WAITS_MAX: u32 = 200;

/// What is being emptied.
#[derive(Default)]
pub(super) struct Compaction {
    work: async_lock::Mutex<Work>,
}

#[derive(Default)]
struct Work {
    /// Since when it is quiet, and how many units and bytes the guest had taken and written then.
    quiet_since: Duration,
    taken: u64,
    written: u64,
    now: Option<Emptying>,
    /// Zones that could not be emptied.
    given_up: BTreeSet<u32>,
}

struct Emptying {
    zone: u32,
    /// The table was looked through up to here.
    seen: ImageOffset,
    /// Units of the disk that lie in the zone.
    left: Vec<u64>,
    waits: u32,
}

/// How it goes on.
enum Step {
    More {
        at_once: bool,
    },
    Over,
    /// The zone cannot be emptied.
    GivenUp,
}

impl Native {
    /// Waits for what is under way, and ends it.
    pub(super) async fn end_compaction(&self) {
        if let (Some(compaction), Some(zones)) = (&self.compaction, &self.zones) {
            compaction.work.lock().await.now = None;
            self.let_zone_go(zones);
        }
    }

    /// Does a little, if there is anything to do. Tells whether there is more at once. Not to be called from inside an epoch, nor by
    /// who makes units ready.
    pub(super) async fn compact_some(&self, now: Duration) -> bool {
        let (Some(compaction), Some(zones)) = (&self.compaction, &self.zones) else { return false };
        let Some(mut work) = compaction.work.try_lock() else { return false };
        let has_ended = self.state.check_open().is_err() || self.state.check_stopped().is_err();
        if has_ended || self.journal().is_none() || !self.may_be_born() {
            work.now = None;
            self.let_zone_go(zones);
            return false;
        }
        let work = &mut *work;
        let written = self.written_bytes.load(Ordering::Relaxed);
        let is_busy = written - work.written > WRITTEN_MAX;
        let Some(emptying) = &mut work.now else {
            let taken = self.units().taken() + self.given_of_zones();
            if work.taken != taken || is_busy {
                (work.quiet_since, work.taken, work.written) = (now, taken, written);
            }
            if now.saturating_sub(work.quiet_since) < QUIET_AFTER {
                return false;
            }
            // One try for each quiet time.
            (work.quiet_since, work.written) = (now, written);
            let Some(zone) = self.zone_to_empty(zones, &work.given_up) else { return false };
            self.hold_zone(zones, zone);
            let seen = self.places.region(Region::Table).start();
            work.now = Some(Emptying { zone, seen, left: Vec::new(), waits: 0 });
            return true;
        };
        // Somebody needed its units, or is better not disturbed.
        let has_ended = is_busy || zones.emptying.load(Ordering::SeqCst) != emptying.zone + 1;
        work.written = written;
        let zone = emptying.zone;
        match if has_ended { Ok(Step::Over) } else { self.empty_some(zones, emptying).await } {
            Ok(Step::More { at_once }) => at_once,
            ended => {
                // What keeps a unit from being copied is found out by who needs it.
                if matches!(ended, Ok(Step::GivenUp) | Err(_)) {
                    work.given_up.insert(zone);
                }
                work.now = None;
                self.let_zone_go(zones);
                false
            }
        }
    }

    async fn empty_some(&self, zones: &Zones, emptying: &mut Emptying) -> Result<Step> {
        let table = self.places.region(Region::Table);
        if emptying.seen < table.end() {
            let end = (emptying.seen + PAGES_IN_A_GO * 4096).min(table.end());
            self.look_through(emptying, end);
            emptying.seen = end;
            return Ok(Step::More { at_once: true });
        }
        if !emptying.left.is_empty() {
            for _ in 0..COPIED_IN_A_GO {
                let Some(number) = emptying.left.last() else { break };
                self.leave_unit(*number).await?;
                emptying.left.pop();
            }
            return Ok(Step::More { at_once: true });
        }
        if self.units().is_free(self.units_of_zone(emptying.zone), true) {
            self.let_zone_go(zones);
            self.tidy_zones().await?;
            return Ok(Step::Over);
        }
        emptying.waits += 1;
        if emptying.waits > WAITS_MAX {
            return Ok(Step::GivenUp);
        }
        // What was freed becomes zero when that is durable and nobody looks any more, and the rest of the zone here.
        let has_more = self.zero_some_of(self.units_of_zone(emptying.zone)).await;
        if !has_more && (!lock(&self.commits.freed).is_empty() || self.units().any_waits()) {
            self.commit().await?;
        }
        Ok(Step::More { at_once: has_more })
    }

    /// Notes which units of the disk lie in the zone, as far as a part of the table says.
    fn look_through(&self, emptying: &mut Emptying, end: ImageOffset) {
        let (table, zone) = (self.places.region(Region::Table), emptying.zone);
        let mut at = emptying.seen;
        while at < end {
            if let Some(bytes) = self.home.bytes(at) {
                let first = (at - table.start()) / 4;
                let lies_there = |entry: &[u8]| {
                    let (unit, _) = self.places.split_entry(be32(entry, 0));
                    unit != 0 && self.places.zone_of(unit).is_some_and(|(number, _)| number == zone)
                };
                let entries = (first..).zip(bytes.chunks_exact(4));
                emptying
                    .left
                    .extend(entries.filter(|(_, entry)| lies_there(entry)).map(|(number, _)| number));
            }
            at += 4096;
        }
    }

    fn units_of_zone(&self, zone: u32) -> std::ops::Range<u32> {
        let per_zone = self.places.units_per_zone();
        zone * per_zone + 1..(zone + 1) * per_zone + 1
    }

    /// The zone with the fewest units, if one is needed and this helps.
    fn zone_to_empty(&self, zones: &Zones, given_up: &BTreeSet<u32>) -> Option<u32> {
        let (per_zone, young) = (self.places.units_per_zone(), self.young_zones(zones));
        // Map units of snapshots are in no table, and stay.
        let of_views = self.views.as_ref().map_or(Vec::new(), |views| views.units());
        let kept: BTreeSet<u32> =
            of_views.into_iter().filter_map(|unit| Some(self.places.zone_of(unit)?.0)).collect();
        if self.left_in_zones() > per_zone / 2 || self.has_zone_to_open(zones) {
            return None;
        }
        self.units().emptiest_zone(per_zone, self.places.zones(), |zone| {
            young.contains(&zone) || kept.contains(&zone) || given_up.contains(&zone)
        })
    }

    /// From now on who writes to a unit of the zone gets a copy elsewhere first.
    fn hold_zone(&self, zones: &Zones, zone: u32) {
        self.say_held(|| {
            self.units().avoid(Some(self.units_of_zone(zone)));
            zones.emptying.store(zone + 1, Ordering::SeqCst);
        });
    }

    /// Lets the zone go, if the disk's unit lies in one that is being emptied. Tells whether it did.
    pub(super) fn ends_emptying_for(&self, number: u64) -> bool {
        let Some(zones) = &self.zones else { return false };
        let is_in_it = self.entry(number).is_ok_and(|unit| unit != 0 && self.is_being_emptied(unit));
        if is_in_it {
            self.let_zone_go(zones);
        }
        is_in_it
    }

    /// Its units are units like others again.
    pub(super) fn let_zone_go(&self, zones: &Zones) {
        if zones.emptying.load(Ordering::SeqCst) == 0 {
            return;
        }
        // Under the lock under which copies come to count.
        let _held = self.views.as_ref().map(|views| views.hold());
        if zones.emptying.swap(0, Ordering::SeqCst) != 0 {
            self.units().avoid(None);
        }
    }

    /// Whether this stored unit is one that is to be left.
    pub(super) fn is_being_emptied(&self, unit: u32) -> bool {
        let Some(zones) = &self.zones else { return false };
        let zone = zones.emptying.load(Ordering::SeqCst);
        zone != 0 && self.places.zone_of(unit).is_some_and(|(number, _)| number + 1 == zone)
    }

    /// Whether any zone is.
    pub(super) fn empties_any(&self) -> bool {
        self.zones.as_ref().is_some_and(|zones| zones.emptying.load(Ordering::SeqCst) != 0)
    }

    /// Which zones are young.
    fn young_zones(&self, zones: &Zones) -> Vec<u32> {
        lock(&zones.young).iter().map(|zone| zone.zone).collect()
    }
}
