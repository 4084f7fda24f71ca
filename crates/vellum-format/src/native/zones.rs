//! Zones: runs of units that are opened so that a unit written first there may hold its own entry.
//!
//! ```text
//!   zeroed ──► opened: generation, tag ── commit ──► open ──► all units given out, in the table ──► closed
//!                                                      │
//!                               unit: handed out ──► embedded: a block with the entry, nothing else
//!                                                      └──► recorded: a bit, and the table
//! ```
//!
//! 1. A zone is used once it was zero and its opening is durable. A handful of zones are open at a time.
//! 2. A zone is open while it has the generation of the journal in use. A clean close or a recovery
//!    therefore closes all zones.
//! 3. While the bit of a unit of an open zone is 0, the unit's block states its entry, and nothing else does.
//!    Any change of that entry sets the bit in the same transaction.
//! 4. Each unit of an open zone is handed out once. Prepared units (`ahead.rs`) may also go to writes that do
//!    not embed. A unit whose write fails is freed as usual, and is then a plain unit.
//! 5. In a quiet time the embedded entries are written to the table early.
//! 6. No entry is embedded while anything lies beneath the unit. With snapshots one is embedded only where the page of its
//!    entry is durably kept: recovery enters in the page at home what it finds, and no snapshot may see that.
//!
//! The tag does the work of two things in Selfie: the "zone type" by which Z-blocks are recognised, and the
//! incarnation, because a block from an earlier time has another tag. Entries that Selfie gathers in metadata
//! clusters are written to the table through the journal here: `docs/design/0006-zones.md`.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vellum_core::{ImageOffset, Result, Zeroes};

use super::geometry::{GENERATION_WORD, RECORDED_WORD, TAG_WORD};
use super::image::Native;
use super::publish::{RECORDING_COST, WORD_COST};
use super::snapshots::views::Views;
use super::units::Units;
use super::zone_state::{Given, OpenZone, Paused, Zones};
use crate::engine::Commit as _;
use crate::state::lock;

/// Word of a zone's entry: how often it was opened.
const INCARNATION_WORD: u64 = 2;
/// Without an embedded allocation for this long, the embedded entries are written to the table.
const QUIET_AFTER: Duration = Duration::from_secs(2);
/// At most this many zones are open at a time. Those that are full and have writes under way count. Recovery
/// accepts more: the limit of `zone_scan.rs` is higher.
const OPEN_MAX: usize = 16;
/// What opening a zone takes of a record, at most.
const OPENING_COST: u64 = 24 * 24;

/// The tag of a zone's blocks. It cannot be derived without the key.
fn tag_of(key: u128, zone: u32, incarnation: u64) -> u64 {
    let words = key.to_be_bytes();
    let half = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().expect("eight bytes"));
    let mut tag = 0;
    for part in [half(&words[..8]), half(&words[8..]), u64::from(zone), incarnation] {
        // The mixing steps of SplitMix64.
        tag = (tag ^ part).wrapping_add(0x9E37_79B9_7F4A_7C15);
        tag = (tag ^ (tag >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        tag = (tag ^ (tag >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        tag ^= tag >> 31;
    }
    tag.max(1)
}

impl Native {
    /// Pauses embedded allocation.
    pub(super) fn pause_embedding(&self) -> Option<Paused<'_>> {
        let zones = self.zones.as_ref()?;
        Some(zones.pause())
    }

    /// Whether a unit may hold its own entry now, if what the entry changes is kept.
    pub(super) fn may_embed(&self) -> bool {
        self.zones.as_ref().is_some_and(|zones| !zones.is_paused())
    }

    /// Whether zones may be emptied now.
    pub(super) fn may_compact(&self) -> bool {
        self.may_embed() && !self.views.as_ref().is_some_and(Views::any)
    }

    /// Takes a unit of an open zone. `None` when no open zone has one left.
    pub(super) fn take_open_unit(&self) -> Option<Given> {
        let zones = self.zones.as_ref()?;
        let per_zone = self.places.units_per_zone();
        let mut open = lock(&zones.open);
        let mut usable = open.iter_mut().filter(|zone| self.engine.commits.is_durable(zone.opened_in));
        let (index, zone) = usable.find_map(|zone| zone.take(per_zone).map(|index| (index, zone)))?;
        zones.given.fetch_add(1, Ordering::AcqRel);
        zone.under_way += 1;
        Some(Given { unit: zone.zone * per_zone + index + 1, tag: zone.tag })
    }

    /// Takes a prepared unit of an open zone for a write that does not embed. It is a plain unit from the
    /// beginning, and no block of it ever states an entry.
    pub(super) fn take_prepared(&self) -> Option<u32> {
        let zones = self.zones.as_ref()?;
        let per_zone = self.places.units_per_zone();
        let mut open = lock(&zones.open);
        let mut usable = open.iter_mut().filter(|zone| self.engine.commits.is_durable(zone.opened_in));
        let unit = usable.find_map(|zone| Some(zone.zone * per_zone + zone.take_prepared()? + 1))?;
        zones.given_plain.fetch_add(1, Ordering::AcqRel);
        Some(unit)
    }

    /// Calls `act` with the first open zone that has units which were neither handed out nor prepared.
    pub(super) fn in_next_zone<T>(&self, act: impl FnOnce(&mut OpenZone) -> T) -> Option<T> {
        let per_zone = self.places.units_per_zone();
        let mut open = lock(&self.zones.as_ref()?.open);
        let is_next =
            |zone: &&mut OpenZone| zone.next < per_zone && self.engine.commits.is_durable(zone.opened_in);
        open.iter_mut().find(is_next).map(act)
    }

    /// Calls `act` with the open zone of this number, if it is still open.
    pub(super) fn in_zone<T>(&self, number: u32, act: impl FnOnce(&mut OpenZone) -> T) -> Option<T> {
        let mut open = lock(&self.zones.as_ref()?.open);
        open.iter_mut().find(|zone| zone.zone == number).map(act)
    }

    /// How many units are prepared.
    pub(super) fn prepared_units(&self) -> u64 {
        let zones = self.zones.as_ref();
        zones.map_or(0, |zones| lock(&zones.open).iter().map(|zone| u64::from(zone.prepared())).sum())
    }

    /// How many units of open zones were handed out.
    pub(super) fn given_of_zones(&self) -> u64 {
        let sum =
            |zones: &Zones| zones.given.load(Ordering::Acquire) + zones.given_plain.load(Ordering::Acquire);
        self.zones.as_ref().map_or(0, sum)
    }

    /// Calls `act` with the open zone of a unit, and the unit's index in it.
    fn in_open_zone<T>(&self, unit: u32, act: impl FnOnce(&mut OpenZone, u32) -> T) -> Option<T> {
        let zones = self.zones.as_ref()?;
        let (number, index) = self.places.zone_of(unit)?;
        let mut open = lock(&zones.open);
        let zone = open.iter_mut().find(|zone| zone.zone == number)?;
        Some(act(zone, index))
    }

    /// From now on the unit's own block states that this unit of the disk lies there. The caller holds the
    /// gate.
    pub(super) fn note_embedded(&self, unit: u32, guest_unit: u64) {
        self.in_open_zone(unit, |zone, index| {
            zone.under_way -= 1;
            zone.unrecorded.push((index, guest_unit));
        });
    }

    /// Ends an embedded allocation that does not count: only the table's entry counts for the unit, whatever
    /// the unit holds. The caller holds the gate.
    pub(super) fn note_not_embedded(&self, unit: u32) {
        self.in_open_zone(unit, |zone, _| zone.under_way -= 1);
        self.mark_recorded(unit);
    }

    /// From this transaction on only the table's entry counts for the unit. The caller holds the gate, and changes the
    /// entry after this, if at all.
    pub(in crate::native) fn mark_recorded(&self, unit: u32) {
        if unit == 0 {
            return;
        }
        let mut guest_unit = None;
        let found = self.in_open_zone(unit, |zone, index| {
            guest_unit = zone.unrecorded.iter().find(|(other, _)| *other == index).map(|(_, guest)| *guest);
            zone.unrecorded.retain(|(other, _)| *other != index);
            (zone.zone, index)
        });
        if let Some(guest_unit) = guest_unit {
            self.record_mask_over_base(guest_unit);
        }
        if let Some((zone, index)) = found {
            let bits = self.places.recorded(zone, index);
            self.home.change(bits.word, |word| bits.set(word, 1));
        }
    }

    /// Whether the table has the entries of all units. The caller holds the gate alone.
    pub(super) fn all_recorded(&self) -> bool {
        let zones = self.zones.as_ref();
        zones.is_none_or(|zones| lock(&zones.open).iter().all(|zone| zone.unrecorded.is_empty()))
    }

    /// Writes all embedded entries to the table, and closes zones that are used up.
    pub(super) async fn record_all(&self) -> Result<()> {
        let Some(zones) = &self.zones else { return Ok(()) };
        let numbers: Vec<u32> = lock(&zones.open).iter().map(|zone| zone.zone).collect();
        for number in numbers {
            self.record_zone(zones, number).await?;
        }
        Ok(())
    }

    /// After an idle period, writes the embedded entries to the table, so that a recovery has less to
    /// do.
    pub(super) async fn record_when_quiet(&self, now: Duration) -> Result<()> {
        let Some(zones) = self.zones.as_ref().filter(|_| self.journal().is_some()) else { return Ok(()) };
        let given = zones.given.load(Ordering::Acquire);
        {
            let mut quiet = lock(&zones.quiet);
            if quiet.0 != given {
                *quiet = (given, now);
            }
            if now.saturating_sub(quiet.1) < QUIET_AFTER {
                return Ok(());
            }
        }
        let any_unrecorded = lock(&zones.open).iter().any(|zone| !zone.unrecorded.is_empty());
        if any_unrecorded {
            self.record_all().await?;
            self.commit().await?;
        }
        Ok(())
    }

    async fn record_zone(&self, zones: &Zones, number: u32) -> Result<()> {
        let _one = zones.recording.lock().await;
        let has_base = self.places.shape().base_bytes.is_some();
        let per_unit = if has_base { RECORDING_COST } else { 2 * WORD_COST };
        let at_once = usize::try_from((self.record_max() / 4 / per_unit).clamp(1, 256)).expect("a few");
        loop {
            let some: Vec<(u32, u64)> = {
                let open = lock(&zones.open);
                let Some(zone) = open.iter().find(|zone| zone.zone == number) else { return Ok(()) };
                zone.unrecorded.iter().take(at_once).copied().collect()
            };
            if some.is_empty() {
                return self.close_zone(zones, number).await;
            }
            let _gate = self.enter_transaction(some.len() as u64 * per_unit).await?;
            for (index, guest_unit) in some {
                let unit = number * self.places.units_per_zone() + index + 1;
                // The unit may have been changed meanwhile.
                let is_unrecorded =
                    self.in_open_zone(unit, |zone, _| zone.unrecorded.contains(&(index, guest_unit)));
                if is_unrecorded == Some(true) {
                    self.home.touch(self.places.entry(guest_unit).word);
                    self.mark_recorded(unit);
                }
            }
        }
    }

    /// Closes a zone that is used up, if the table has the entries of all its units.
    async fn close_zone(&self, zones: &Zones, number: u32) -> Result<()> {
        let per_zone = self.places.units_per_zone();
        let is_over =
            |zone: &OpenZone| zone.zone == number && zone.is_used_up(per_zone) && zone.unrecorded.is_empty();
        if !lock(&zones.open).iter().any(is_over) {
            return Ok(());
        }
        let _gate = self.enter_transaction(WORD_COST).await?;
        lock(&zones.open).retain(|zone| !is_over(zone));
        self.home.change(self.places.zone_word(number, GENERATION_WORD), |_| 0);
        Ok(())
    }

    /// Follows an embedded allocation: records zones that are used up, and opens the next one in time.
    pub(super) async fn tidy_zones(&self) -> Result<()> {
        let Some(zones) = self.zones.as_ref().filter(|_| self.journal().is_some()) else { return Ok(()) };
        let per_zone = self.places.units_per_zone();
        let (full, left): (Vec<u32>, u32) = {
            let open = lock(&zones.open);
            let left = open.iter().map(|zone| zone.left(per_zone)).sum();
            (open.iter().filter(|zone| zone.is_used_up(per_zone)).map(|zone| zone.zone).collect(), left)
        };
        for number in full {
            self.record_zone(zones, number).await?;
        }
        if left <= per_zone / 2 {
            self.open_zone(zones).await?;
        }
        Ok(())
    }

    /// How many units must be clean so that a zone can be opened.
    pub(super) fn zone_len(&self) -> usize {
        self.zones
            .as_ref()
            .map_or(0, |_| usize::try_from(self.places.units_per_zone()).expect("at most 1024"))
    }

    /// Whether no zone is open, although one should be.
    pub(super) fn wants_zone(&self) -> bool {
        let zones = self.zones.as_ref();
        zones.is_some_and(|zones| lock(&zones.open).is_empty()) && self.may_embed()
    }

    /// How many units of open zones can still be handed out.
    pub(super) fn left_in_zones(&self) -> u32 {
        let per_zone = self.places.units_per_zone();
        let zones = self.zones.as_ref();
        zones.map_or(0, |zones| lock(&zones.open).iter().map(|zone| zone.left(per_zone)).sum())
    }

    /// Whether there is a zone that could be opened.
    pub(super) fn has_zone_to_open(&self, zones: &Zones) -> bool {
        let (units, per_zone, count) = (self.units(), self.places.units_per_zone(), self.places.zones());
        let open: Vec<u32> = lock(&zones.open).iter().map(|zone| zone.zone).collect();
        let is_clean = !self.metadata.limits().fast_zeroes;
        units.has_new_zone(per_zone, count)
            || units.has_free_zone(per_zone, count, is_clean, |zone| open.contains(&zone))
    }

    /// Units of unknown content in a zone of which all is free, at most `most` of them.
    pub(super) fn take_unknown_of_a_zone(&self, units: &Units, most: usize) -> Option<Range<u32>> {
        let zones = self.zones.as_ref()?;
        let open: Vec<u32> = lock(&zones.open).iter().map(|zone| zone.zone).collect();
        let (per_zone, count) = (self.places.units_per_zone(), self.places.zones());
        units.take_unknown_of_a_zone(per_zone, count, most, |zone| open.contains(&zone))
    }

    /// Opens a zone, if there is one. It is used once its opening is durable.
    async fn open_zone(&self, zones: &Zones) -> Result<()> {
        let Some(_one) = zones.opening.try_lock() else { return Ok(()) };
        let per_zone = self.places.units_per_zone();
        if !self.may_embed() || lock(&zones.open).len() >= OPEN_MAX {
            return Ok(());
        }
        // After a failed search there is no other one until more units have become clean.
        let stamp = self.units().given() + 1;
        if zones.none_found_at.load(Ordering::Acquire) == stamp {
            return Ok(());
        }
        let Some((first, is_unknown)) = self.find_zone(zones) else {
            zones.none_found_at.store(stamp, Ordering::Release);
            return Ok(());
        };
        let number = (first - 1) / per_zone;
        let words: Vec<ImageOffset> = {
            let recorded = (0..u64::from(per_zone.div_ceil(64))).map(|word| RECORDED_WORD + word);
            let head = [GENERATION_WORD, TAG_WORD, INCARNATION_WORD];
            head.into_iter().chain(recorded).map(|word| self.places.zone_word(number, word)).collect()
        };
        let opened = match self.zero_zone(first, is_unknown).await {
            Ok(()) => self.open_this(zones, number, &words).await,
            Err(error) => Err(error),
        };
        if opened.is_err() {
            self.units().give_zone_back(first, per_zone);
        }
        opened
    }

    /// A zone that was emptied, or one that has never been used, or on a medium that cannot grow one whose
    /// zeros cost nothing.
    fn find_zone(&self, zones: &Zones) -> Option<(u32, bool)> {
        let (units, per_zone, count) = (self.units(), self.places.units_per_zone(), self.places.zones());
        // A zone that is full and not closed yet may have been emptied.
        let open: Vec<u32> = lock(&zones.open).iter().map(|zone| zone.zone).collect();
        let is_open = |zone: u32| open.contains(&zone);
        units
            .take_free_zone(per_zone, count, true, is_open)
            .or_else(|| units.take_zone(per_zone, count).map(|first| (first, false)))
            .or_else(|| match self.metadata.limits().fast_zeroes {
                true => units.take_free_zone(per_zone, count, false, is_open),
                false => None,
            })
    }

    /// For lack of other space, makes the units of open zones that were not handed out available one by one.
    /// Returns whether there were any.
    pub(super) fn give_up_open_zones(&self, units: &Units) -> bool {
        let Some(zones) = &self.zones else { return false };
        let per_zone = self.places.units_per_zone();
        let mut found = false;
        // Zones whose opening is not durable yet have zeros that no flush covers.
        for zone in lock(&zones.open).iter_mut().filter(|zone| self.engine.commits.is_durable(zone.opened_in))
        {
            let first = zone.zone * per_zone + 1;
            let rest = zone.next..per_zone;
            zone.next = per_zone;
            for run in std::mem::take(&mut zone.prepared).into_iter().chain([rest]) {
                found |= !run.is_empty();
                units.add_clean(first + run.start..first + run.end);
            }
        }
        found
    }

    /// Fills a zone of unknown content with zeros. The flush that makes its opening durable covers the zeros:
    /// nothing is written there before, and no older block has its tag.
    async fn zero_zone(&self, first: u32, is_unknown: bool) -> Result<()> {
        if !is_unknown {
            return Ok(());
        }
        let zone = self.places.shape().zone().expect("it has zones");
        let span = self.places.unit(first).start().span(zone.bytes());
        self.metadata.write_zeroes(self.inside(span), Zeroes::MayUnmap).await?;
        self.engine.commits.note_change();
        Ok(())
    }

    async fn open_this(&self, zones: &Zones, number: u32, words: &[ImageOffset]) -> Result<()> {
        self.find(|| self.home.word(words[0])).await?;
        self.reserve(&words[..1]).await?;
        let _gate = self.enter_transaction(OPENING_COST).await?;
        let journal = self.journal().expect("it has begun");
        let (generation, key) = journal.with_ledger(|ledger| (ledger.generation, ledger.key));
        let incarnation = 1 + self
            .home
            .change(self.places.zone_word(number, INCARNATION_WORD), |word| word.wrapping_add(1));
        let tag = tag_of(key, number, incarnation);
        for word in words.iter().skip(3) {
            self.home.change(*word, |_| 0);
        }
        self.home.change(words[0], |_| generation);
        self.home.change(words[1], |_| tag);
        let opened_in = journal.open_sequence();
        let opened = OpenZone::new(number, tag, opened_in);
        if zones.emptying.load(Ordering::SeqCst) == number + 1 {
            self.end_emptying(zones); // that is what it was emptied for
        }
        let mut all = lock(&zones.open);
        debug_assert!(all.iter().all(|other| other.zone != number), "it is open already");
        all.push(opened);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_differ_by_key_zone_and_time() {
        let tags =
            [tag_of(1, 0, 1), tag_of(2, 0, 1), tag_of(1, 1, 1), tag_of(1, 0, 2), tag_of(1 << 64, 0, 1)];
        for (index, tag) in tags.iter().enumerate() {
            assert!(*tag != 0 && !tags[..index].contains(tag));
        }
    }
}
