//! The table, the partial units, and the rule that no unit is named for two purposes.

use vellum_core::{ImageOffset, ImageSpan, Result};

use super::super::geometry::{PARTIALS, Region, SUB_BLOCK};
use super::super::open::may_be_embedded;
use super::packed::Named;
use super::{CUT_OFF, Walk};
use crate::bytes::{be32, be64};

/// All names of units, with their purpose: the unit of the disk, [`MAP`] or [`PART`].
#[derive(Default)]
pub(super) struct Names {
    pairs: Vec<(u32, u32)>,
    /// How many pairs were left when duplicates were last dropped.
    settled: usize,
}

/// The purpose of a unit that holds copies of pages.
pub(super) const MAP: u32 = u32::MAX;
/// The purpose of a unit that has a part of the table.
const PART: u32 = u32::MAX - 1;

impl Names {
    pub(super) fn add(&mut self, unit: u32, purpose: u32) {
        self.pairs.push((unit, purpose));
        if self.pairs.len() > 2 * self.settled + 4096 {
            self.settle();
        }
    }

    fn settle(&mut self) {
        self.pairs.sort_unstable();
        self.pairs.dedup();
        self.settled = self.pairs.len();
    }

    fn has(&self, unit: u32) -> bool {
        let at = self.pairs.partition_point(|(named, _)| *named < unit);
        self.pairs.get(at).is_some_and(|(named, _)| *named == unit)
    }
}

struct Partial {
    slot: u64,
    unit: u32,
    under: u32,
}

impl Walk<'_> {
    /// Whether the unit can exist at its place.
    pub(super) fn is_inside(&self, unit: u32) -> bool {
        self.places.may_hold(unit, self.image.len(), self.image.limits().fixed_len)
    }

    /// Checks home's table with its parts.
    pub(super) async fn table(&mut self) -> Result<()> {
        for unit in self.places.units_of_parts() {
            self.names.add(unit, PART);
        }
        let mut last = (0, 0);
        let places = self.places;
        for span in places.table() {
            self.table_span(span, &mut last).await?;
        }
        Ok(())
    }

    /// As above, for one span. `last` is the entry before, and its unit.
    async fn table_span(&mut self, span: ImageSpan, last: &mut (u64, u32)) -> Result<()> {
        let mut at = span.start();
        while let Some((place, bytes)) = self.next_bytes(Region::Table, span, &mut at).await? {
            let first = self.places.entry_at(place).expect("a place of the table");
            let units = self.places.shape().units();
            let behind = usize::try_from(units.saturating_sub(first).saturating_mul(4)).unwrap_or(usize::MAX);
            let (inside, outside) = bytes.split_at(behind.min(bytes.len()));
            if outside.iter().any(|byte| *byte != 0) {
                let from: ImageOffset = place + inside.len() as u64;
                self.error_to_zero(from.span(outside.len() as u64), || {
                    format!(
                        "table: entries past the end of the disk are not 0, at {:#x}: {CUT_OFF}",
                        from.bytes()
                    )
                });
            }
            for (index, entry) in (first..).zip(inside.chunks_exact(4).map(|entry| be32(entry, 0))) {
                if entry == 0 {
                    continue;
                }
                if self.superblocks.superblock.has_moved && entry == self.places.moved_number() {
                    self.moved(index).await;
                    continue;
                }
                self.entry(index, entry, "home");
                self.report.allocated_clusters += 1;
                let (unit, _) = self.places.split_entry(entry);
                let follows = *last == (index.wrapping_sub(1), unit.wrapping_sub(1));
                self.report.fragmented_clusters += u64::from(!follows && *last != (0, 0));
                *last = (index, unit);
            }
        }
        Ok(())
    }

    /// Looks at the bit of a unit that only the fast medium has.
    async fn moved(&mut self, index: u64) {
        self.report.moved_units += 1;
        let Some(bit) = self.places.fast_bit(index) else {
            return self
                .error(|| format!("table (home): unit {index} of the disk is moved, and can have no copy"));
        };
        let Some(word) = self.read(bit.word.span(8), Region::Fast.name()).await else { return };
        if bit.get(be64(&word, 0)) == 0 {
            self.error(|| {
                format!(
                    "table (home): unit {index} of the disk is moved, and the image says that the fast medium has no copy of it"
                )
            });
        }
    }

    /// Notes an entry that is not 0, of home's table or of a copy.
    pub(super) fn entry(&mut self, index: u64, entry: u32, view: &str) {
        let (entry, form) = self.places.split_entry(entry);
        if form != 0 && !(entry != 0 && may_be_embedded(&self.places, entry, form)) {
            self.error(|| {
                format!(
                    "table ({view}): unit {index} of the disk lies in unit {entry}, which has no form {form}"
                )
            });
            return;
        }
        if !self.is_inside(entry) {
            let end = self.image.len();
            self.error(|| {
                format!("table ({view}): unit {index} of the disk lies in unit {entry}, past the end of the file ({end})")
            });
            return;
        }
        let purpose = u32::try_from(index).expect("a table has at most 2^26 entries");
        self.names.add(entry, purpose);
        if let Some(block) = form.checked_sub(1) {
            let block = u8::try_from(block).expect("a form has 5 bits");
            self.packed.push(Named { unit: entry, block, index: purpose });
        }
        let end = self.places.unit(entry).end().bytes();
        self.report.image_end_offset = self.report.image_end_offset.max(end);
    }

    /// Checks the slots for partial units.
    pub(super) async fn partials(&mut self) -> Result<()> {
        self.names.settle();
        let region = self.places.region(Region::Partials);
        let Some(bytes) = self.read(region, Region::Partials.name()).await else { return Ok(()) };
        let mut found: Vec<Partial> = Vec::new();
        for slot in 0..PARTIALS {
            let at = usize::try_from(self.places.partial(slot).start() - region.start()).expect("8 KiB");
            let (unit, under) = (be32(&bytes, at), be32(&bytes, at + 4));
            if unit == 0 {
                continue;
            }
            let problem = if unit == under || under == 0 {
                Some("no other slot has the rest of it")
            } else if !self.is_inside(unit) || !self.is_inside(under) {
                Some("it, or the unit that has the rest of it, lies past the end of the file")
            } else if found.iter().any(|other| other.unit == unit) {
                Some("another slot has it too")
            } else if self.has_bits_past_the_unit(&bytes[at + 8..at + 72]) {
                Some("it has more sub-blocks than a unit")
            } else {
                None
            };
            match problem {
                Some(why) => {
                    self.error(|| format!("partial units: slot {slot}, unit {unit} over {under}: {why}"))
                }
                None => found.push(Partial { slot, unit, under }),
            }
        }
        self.circles(&found);
        self.vanished(&found);
        Ok(())
    }

    fn has_bits_past_the_unit(&self, bits: &[u8]) -> bool {
        let Some(unit) = self.places.shape().layout.unit() else { return false };
        let sub_blocks = usize::try_from(unit.bytes() / SUB_BLOCK.bytes()).expect("at most 512");
        bits[sub_blocks / 8..].iter().any(|byte| *byte != 0)
    }

    fn circles(&mut self, partials: &[Partial]) {
        for partial in partials {
            let mut under = partial.under;
            for _ in 0..PARTIALS {
                match partials.iter().find(|other| other.unit == under) {
                    Some(next) => under = next.under,
                    None => break,
                }
                if under == partial.unit {
                    self.error(|| {
                        format!("partial units: unit {under} lies under itself (slot {})", partial.slot)
                    });
                    break;
                }
            }
        }
    }

    /// Finds slots of units that no view names and that do not lie under a unit that a view names.
    fn vanished(&mut self, partials: &[Partial]) {
        let mut alive: Vec<bool> = partials.iter().map(|partial| self.names.has(partial.unit)).collect();
        for _ in 0..partials.len() {
            for index in 0..partials.len() {
                let is_under =
                    |(over, is_alive): (&Partial, &bool)| *is_alive && over.under == partials[index].unit;
                alive[index] |= partials.iter().zip(&alive).any(is_under);
            }
        }
        for (partial, _) in partials.iter().zip(&alive).filter(|(_, is_alive)| !**is_alive) {
            let span = self.places.partial(partial.slot);
            let (slot, unit) = (partial.slot, partial.unit);
            self.leak_to_zero(span, || {
                format!("slot {slot} of the partial units: nothing names its unit {unit}")
            });
        }
        // A unit under another one is in use, so it cannot be a map unit.
        for (partial, _) in partials.iter().zip(&alive).filter(|(_, is_alive)| **is_alive) {
            let is_map = |unit| self.names.pairs.binary_search(&(unit, MAP)).is_ok();
            if is_map(partial.under) || is_map(partial.unit) {
                let slot = partial.slot;
                self.error(|| format!("partial units: slot {slot} names a unit that holds copies of pages"));
            }
            let end = self.places.unit(partial.under).end().bytes();
            self.report.image_end_offset = self.report.image_end_offset.max(end);
        }
    }

    /// Reports units that are named for two purposes.
    pub(super) fn doubles(&mut self) {
        self.names.settle();
        let pairs = std::mem::take(&mut self.names.pairs);
        let purpose = |purpose| match purpose {
            MAP => "copies of pages".to_owned(),
            PART => "a part of the table".to_owned(),
            index => format!("unit {index} of the disk"),
        };
        for two in pairs.windows(2).filter(|two| two[0].0 == two[1].0) {
            self.error(|| {
                let (unit, first, second) = (two[0].0, purpose(two[0].1), purpose(two[1].1));
                format!("unit {unit} is used for {first} and for {second}: one of them would read the other's data")
            });
        }
        self.names.pairs = pairs;
    }
}
