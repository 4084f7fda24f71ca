//! Where the bits of units on a fast medium lie. Arithmetic only.
//!
//! ```text
//!   table │ ─ ─ ─ not needed ─ ─ ─ │ next region      before
//!   table │ word │ a bit for each unit │ next region  with a fast medium: the last pages of the table's region
//! ```

use vellum_core::{Error, ImageOffset, Result};

use super::geometry::{Bits, FAST_BYTES_MAX, Places, Region, Shape, bits};

/// The size of a page of home in bytes.
const PAGE_LEN: u64 = 4096;
/// The bits begin behind a word.
const FAST_BITS_FROM: u64 = 64;

impl Places {
    /// The same places with a region for the bits of units on a fast medium. It takes a gap behind the table's region,
    /// such as an earlier one has left, or else the last pages of that region, which neither the disk nor a disk of
    /// `largest` bytes needs. It has bits for all units that the table then has room for, or, where that is too long, for
    /// those of the disk.
    pub fn with_fast(&self, largest: u64) -> Result<Self> {
        let table = self.region(Region::Table);
        if !self.shape().layout.has_table() {
            return Err(Error::unsupported(
                "only an image with layout=table or layout=zoned can have a fast medium",
            ));
        }
        let no_space = || {
            Error::unsupported(
                "its tables leave no space for what it needs to know of a fast medium: copy it into a new image \
                 (`vellum convert`)",
            )
        };
        let len_for = |units: u64| (8 + units.div_ceil(8)).next_multiple_of(PAGE_LEN);
        let lens = [len_for(table.len() / 4), len_for(self.shape().units())];
        let behind =
            self.regions().into_iter().map(|region| region.start()).filter(|start| *start >= table.end());
        let gap = behind.min().map_or(0, |next| next - table.end());
        let mut regions = self.regions();
        if let Some(len) = lens.into_iter().find(|len| *len <= gap.min(FAST_BYTES_MAX)) {
            regions[Region::Fast as usize] = table.end().span(len);
        } else {
            let need = Shape { size: largest.max(self.shape().size), ..self.shape() }.need(Region::Table);
            // Parts continue the table where it ends.
            let may_cut = self.parts().next().is_none();
            let fits = |len: &u64| may_cut && table.len() >= need + len && *len <= FAST_BYTES_MAX;
            let len = lens.into_iter().find(fits).ok_or_else(no_space)?;
            let (rest, fast) = table.split_at(table.len() - len);
            regions[Region::Table as usize] = rest;
            regions[Region::Fast as usize] = fast;
        }
        Self::checked(self.shape(), regions, self.data_offset(), self.parts)
    }

    /// The same places without that region, whose place is then a gap.
    pub(super) fn without_fast(&self) -> Result<Self> {
        let mut regions = self.regions();
        regions[Region::Fast as usize] = ImageOffset::ZERO.span(0);
        Self::checked(self.shape(), regions, self.data_offset(), self.parts)
    }

    /// The bit of a unit: a fast medium has it. `None` where the region has no bit for it.
    pub fn fast_bit(&self, unit: u64) -> Option<Bits> {
        let region = self.region(Region::Fast);
        (unit < self.fast_units()).then(|| bits(region, FAST_BITS_FROM + unit, 1))
    }

    /// For how many units there are bits.
    pub fn fast_units(&self) -> u64 {
        (self.region(Region::Fast).len() * 8).saturating_sub(FAST_BITS_FROM)
    }

    /// The word with the sequence of the last promotion.
    pub fn fast_sequence(&self) -> ImageOffset {
        self.region(Region::Fast).start()
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::BlockSize;

    use super::super::geometry::Layout;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn shape(size: u64, layout: Layout, base_bytes: Option<u64>) -> Shape {
        Shape { size, layout, block: BlockSize::from_shift(16), base_bytes }
    }

    fn table(shift: u32) -> Layout {
        Layout::Table(BlockSize::from_shift(shift))
    }

    fn zoned(unit: u32, zone: u32) -> Layout {
        Layout::Zoned { unit: BlockSize::from_shift(unit), zone: BlockSize::from_shift(zone) }
    }

    #[test]
    fn bits_for_a_fast_medium_take_what_the_table_does_not_need() {
        for (shape, journal) in
            [(shape(1 << 30, table(20), None), MIB), (shape(40 << 30, zoned(16, 26), Some(1 << 30)), 8 * MIB)]
        {
            let before = Places::plan_for(shape, journal, 4 * shape.size).unwrap();
            let places = before.with_fast(0).unwrap();
            let (table, fast) = (places.region(Region::Table), places.region(Region::Fast));
            assert_eq!((fast.end(), table.end()), (before.region(Region::Table).end(), fast.start()));
            assert!(table.len() >= shape.need(Region::Table) && places.fast_units() >= shape.units());
            let last = places.fast_units() - 1;
            assert_eq!(places.fast_bit(last + 1), None);
            let (first, last) = (places.fast_bit(0).unwrap(), places.fast_bit(last).unwrap());
            assert_eq!(
                (first.word, first.shift),
                (fast.start() + 8, 56),
                "the first byte of the second word"
            );
            assert_eq!(last.word + 8, fast.end());
            // A gap is used again, and an image that was grown does not lose what its table has.
            let again = places.without_fast().unwrap().with_fast(0).unwrap();
            assert_eq!(again.region(Region::Table), table, "the table loses nothing a second time");
            let fast_again = again.region(Region::Fast);
            assert_eq!(fast_again.start(), fast.start());
            assert!(
                fast_again.end() <= fast.end() && again.fast_units() >= table.len() / 4,
                "bits for all entries"
            );
            assert!(before.with_fast(before.size_max() + 1).is_err(), "a snapshot needs all of it");
        }
        assert!(Places::plan(shape(1 << 30, Layout::Linear, None), 0).unwrap().with_fast(0).is_err());
    }
}
