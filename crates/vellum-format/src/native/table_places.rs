//! Where the entries of the table and of the zone table lie: in their regions, and in the parts behind them
//! (`parts.rs`). Arithmetic only.

use vellum_core::{Error, ImageOffset, ImageSpan, Result};

use super::geometry::{Bits, HOME_START, IMAGE_END, Places, Region, Shape, ZONE_LEN};
use super::parts::Part;

/// A part makes the table this many times as long.
const TIMES: u64 = 4;
/// The size of a page of home in bytes.
const PAGE_LEN: u64 = 4096;

/// The offset of a byte of something that consists of several spans.
fn place_of(spans: impl Iterator<Item = ImageSpan>, byte: u64) -> Option<ImageOffset> {
    let mut left = byte;
    for span in spans {
        match left.checked_sub(span.len()) {
            None => return Some(span.start() + left),
            Some(behind) => left = behind,
        }
    }
    None
}

/// The reverse: which byte lies at this offset.
fn byte_at(spans: impl Iterator<Item = ImageSpan>, at: ImageOffset) -> Option<u64> {
    let mut before = 0;
    for span in spans {
        if span.contains(at) {
            return Some(before + (at - span.start()));
        }
        before += span.len();
    }
    None
}

fn total(spans: impl Iterator<Item = ImageSpan>) -> u64 {
    spans.map(|span| span.len()).sum()
}

impl Places {
    /// The further parts of the table.
    pub fn parts(&self) -> impl Iterator<Item = Part> {
        self.parts.iter().copied().take_while(|part| part.table_len > 0)
    }

    /// All pages that the journal changes word by word.
    pub fn homes(&self) -> impl Iterator<Item = ImageSpan> {
        std::iter::once(self.home()).chain(self.parts().map(|part| part.home()))
    }

    /// Whether a run lies wholly in one of these.
    pub fn is_in_home(&self, span: ImageSpan) -> bool {
        self.homes().any(|home| home.intersect(span) == span)
    }

    /// Where the table lies, in the order of its entries.
    pub fn table(&self) -> impl Iterator<Item = ImageSpan> {
        std::iter::once(self.region(Region::Table)).chain(self.parts().map(|part| part.table()))
    }

    /// Where the zone table lies, in the order of its entries.
    pub fn zone_table(&self) -> impl Iterator<Item = ImageSpan> {
        std::iter::once(self.region(Region::Zones)).chain(self.parts().map(|part| part.zones()))
    }

    /// The number of entries that the table has room for.
    pub fn entries(&self) -> u64 {
        total(self.table()) / 4
    }

    /// The unit of the disk for the table entry at this offset. `None` outside the table.
    pub fn entry_at(&self, at: ImageOffset) -> Option<u64> {
        byte_at(self.table(), at).map(|byte| byte / 4)
    }

    /// Whether this offset lies in the table.
    pub fn is_in_table(&self, at: ImageOffset) -> bool {
        self.entry_at(at).is_some()
    }

    /// Whether this offset lies in the zone table.
    pub fn is_in_zone_table(&self, at: ImageOffset) -> bool {
        byte_at(self.zone_table(), at).is_some()
    }

    /// Where an entry of the table lies. It may belong to a unit past the end of the disk.
    pub fn entry_place(&self, unit: u64) -> ImageOffset {
        place_of(self.table(), unit * 4).expect("the table has it")
    }

    /// The table's entry for a unit of the disk.
    pub fn entry(&self, unit: u64) -> Bits {
        debug_assert!(unit < self.shape().units());
        let at = self.entry_place(unit);
        Bits {
            word: ImageOffset::new(at.bytes() & !7),
            shift: if unit.is_multiple_of(2) { 32 } else { 0 },
            width: 32,
        }
    }

    /// The number of zones that have an entry.
    pub fn zones(&self) -> u32 {
        u32::try_from(total(self.zone_table()) / ZONE_LEN).expect("at most 2^18")
    }

    /// A word of a zone's entry.
    pub fn zone_word(&self, zone: u32, word: u64) -> ImageOffset {
        debug_assert!(zone < self.zones() && word < ZONE_LEN / 8);
        place_of(self.zone_table(), u64::from(zone) * ZONE_LEN + word * 8).expect("a zone that has an entry")
    }

    /// The zone whose entry lies at this offset.
    pub fn zone_at(&self, at: ImageOffset) -> Option<u64> {
        byte_at(self.zone_table(), at).map(|byte| byte / ZONE_LEN)
    }

    /// The stored units of a part, which may fill the last one only partly.
    pub fn units_of_part(&self, part: Part) -> std::ops::Range<u32> {
        let unit = self.shape().layout.unit().expect("only a table has parts");
        let first =
            u32::try_from(((part.at - self.data_offset()) >> unit.shift()) + 1).expect("it was checked");
        first..first + u32::try_from(unit.count_for(part.home().len())).expect("at most 5120")
    }

    /// The stored units of all parts.
    pub fn units_of_parts(&self) -> impl Iterator<Item = u32> {
        self.parts().flat_map(|part| self.units_of_part(part))
    }

    /// Whether a part lies in this unit, so that no table names it.
    pub fn is_of_part(&self, unit: u32) -> bool {
        self.parts().any(|part| self.units_of_part(part).contains(&unit))
    }

    /// The largest size of the disk with further parts, in bytes.
    pub fn size_limit(&self) -> u64 {
        let entries = self.shape().limit(Region::Table) / 4;
        self.shape().layout.unit().map_or(self.size_max(), |unit| entries << unit.shift())
    }

    /// The lengths of the next part, so that the table is long enough for a disk of this size. It has no
    /// place yet.
    pub fn next_part(&self, size: u64) -> Part {
        let unit = self.shape().layout.unit().expect("only a table has parts");
        let limit = |region| self.shape().limit(region);
        let has = self.entries() * 4;
        let needs = unit.count_for(size) * 4;
        let more = unit.round_up(needs.max(has * TIMES) - has); // whole units: the rest of one is useless
        let table_len = more.min(limit(Region::Table) - has);
        let later = Shape { size: ((has + table_len) / 4) << unit.shift(), ..self.shape() };
        let zones_len = later.desired_len(Region::Zones).saturating_sub(u64::from(self.zones()) * ZONE_LEN);
        let zones_len = if self.shape().zone().is_some() { zones_len } else { 0 };
        Part { at: ImageOffset::ZERO, table_len, zones_len }
    }

    /// The same places with one more part.
    pub fn with_part(&self, part: Part) -> Result<Self> {
        let mut parts = self.parts;
        let free = parts.iter_mut().find(|part| part.table_len == 0);
        *free.ok_or_else(|| Error::corrupt("its table has too many parts"))? = part;
        Self::checked(self.shape(), self.regions(), self.data_offset(), parts)
    }

    /// Refuses impossible parts.
    pub(super) fn check_parts(&self) -> Result<()> {
        let count = self.parts().count();
        if self.parts[count..].iter().any(|part| *part != Part::NONE) {
            return Err(Error::corrupt("a part of the table has no entries"));
        }
        let Some(unit) = self.shape().layout.unit() else {
            return match count {
                0 => Ok(()),
                _ => Err(Error::corrupt("the superblock lists parts of a table, but there is no table")),
            };
        };
        for (index, part) in self.parts().enumerate() {
            let lens = [part.table_len, part.zones_len];
            // Lengths that add up to at most a region's limit cannot overflow here.
            let len = unit.round_up(part.table_len + part.zones_len);
            let begins = part.at.bytes().checked_sub(self.data_offset().bytes());
            let end = part.at.checked_add(len).filter(|end| *end <= IMAGE_END);
            let (Some(begins), Some(end)) = (begins, end) else {
                return Err(Error::corrupt(format!("part {index} of the table cannot lie at {}", part.at)));
            };
            let is_possible = begins.is_multiple_of(unit.bytes())
                && lens.iter().all(|len| len.is_multiple_of(PAGE_LEN))
                && (end - self.data_offset()) >> unit.shift() <= u64::from(self.unit_max());
            let whole = ImageSpan::between(part.at, end);
            let overlaps = |other: &Part| other.at.span(unit.round_up(other.home().len())).overlaps(whole);
            if !is_possible || part.at < HOME_START || self.parts().take(index).any(|other| overlaps(&other))
            {
                return Err(Error::corrupt(format!("part {index} of the table cannot lie at {}", part.at)));
            }
        }
        Ok(())
    }

    /// The end of the last unit of a part. `None` without parts.
    pub fn end_of_parts(&self) -> Option<ImageOffset> {
        self.units_of_parts().max().map(|unit| self.unit(unit).end())
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::BlockSize;

    use super::super::geometry::Layout;
    use super::super::parts::PARTS_MAX;
    use super::*;

    fn shape(size: u64, layout: Layout) -> Shape {
        Shape { size, layout, block: BlockSize::from_shift(16), base_bytes: None }
    }

    fn layouts() -> Vec<Layout> {
        let size = BlockSize::from_shift;
        let mut layouts: Vec<Layout> = (16..=21).map(|shift| Layout::Table(size(shift))).collect();
        layouts.extend((16..=21).map(|shift| Layout::Zoned { unit: size(shift), zone: size(shift + 4) }));
        layouts
    }

    /// Adds the next part behind all others.
    fn grown(places: &Places, size: u64) -> Places {
        let end = places.end_of_parts().unwrap_or(places.data_offset());
        let part = Part { at: end, ..places.next_part(size) };
        places.with_part(part).and_then(|places| places.resized(size)).expect("a larger disk")
    }

    #[test]
    fn parts_are_enough_for_any_size_in_the_smallest_steps() {
        for layout in layouts() {
            for size in [0, 512, 1 << 20, 1 << 30] {
                let mut places = Places::plan(shape(size, layout), 65_536).unwrap();
                while places.size_max() < places.size_limit() {
                    places = grown(&places, places.size_max() + 512);
                }
                assert!(places.parts().count() < PARTS_MAX, "{layout:?} {size}");
                assert_eq!(places.entries() * 4, places.shape().limit(Region::Table));
                let zones = places.shape().desired_len(Region::Zones) / ZONE_LEN;
                assert!(places.shape().zone().is_none() || u64::from(places.zones()) >= zones, "{layout:?}");
                // Growing at once is one of the possible steps.
                let once = Places::plan(shape(size, layout), 65_536).unwrap();
                assert_eq!(grown(&once, once.size_limit()).parts().count(), 1);
            }
        }
    }

    #[test]
    fn entries_and_zones_are_found_where_they_lie() {
        for layout in layouts() {
            let mut places = Places::plan(shape(1 << 20, layout), 65_536).unwrap();
            for _ in 0..2 {
                places = grown(&places, places.size_max() + 512);
            }
            let mut index = 0;
            for span in places.table() {
                for at in [span.start(), span.start() + (span.len() - 4)] {
                    let number = index + (at - span.start()) / 4;
                    assert_eq!((places.entry_place(number), places.entry_at(at)), (at, Some(number)));
                    assert!(places.is_in_home(at.span(4)) && !places.is_in_zone_table(at));
                }
                index += span.len() / 4;
            }
            assert_eq!(index, places.entries());
            let mut zone = 0;
            for span in places.zone_table().filter(|span| !span.is_empty()) {
                assert_eq!(places.zone_word(zone, 3), span.start() + 24);
                assert_eq!(places.zone_at(span.start() + 24), Some(u64::from(zone)));
                assert!(!places.is_in_table(span.start()));
                zone += u32::try_from(span.len() / ZONE_LEN).unwrap();
            }
            let units: Vec<u32> = places.units_of_parts().collect();
            assert_eq!(units[0], 1);
            assert!(units.iter().all(|unit| places.is_of_part(*unit)));
            assert!(!places.is_of_part(units[units.len() - 1] + 1));
        }
    }

    #[test]
    fn parts_that_cannot_be() {
        let size = BlockSize::from_shift;
        let table = Places::plan(shape(1 << 20, Layout::Table(size(16))), 65_536).unwrap();
        let data = table.data_offset();
        let part = Part { at: data, table_len: 65_536, zones_len: 0 };
        table.with_part(part).unwrap();
        for (why, part) in [
            ("before the data", Part { at: HOME_START, ..part }),
            ("not at a unit", Part { at: data + 4096, ..part }),
            ("no pages", Part { table_len: 100, ..part }),
            ("too long", Part { table_len: 256 << 20, ..part }),
            ("far too long", Part { table_len: u64::MAX - 4095, ..part }),
            ("zones of a table", Part { zones_len: 4096, ..part }),
            ("too far", Part { at: ImageOffset::new(1 << 56), ..part }),
            ("at the end of all", Part { at: data + (u64::MAX << 20 >> 4), ..part }),
        ] {
            assert!(table.with_part(part).is_err(), "{why}");
        }
        let one = table.with_part(part).unwrap();
        assert!(one.with_part(part).is_err(), "two at one place");
        let linear = Places::plan(shape(1 << 20, Layout::Linear), 0).unwrap();
        assert!(linear.with_part(part).is_err(), "of no table");
    }
}
