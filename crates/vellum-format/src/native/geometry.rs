//! The layout of an image: its regions, and the places of guest offsets in them. Arithmetic only.
//!
//! ```text
//!  0     4 KiB   8 KiB                                                             journal                   data_offset
//!  ├───────┼───────┼────────┬───────┬───────┬──────────┬───────────────┬─ ─ ─ ─ ─ ──┼─────────┬──────┬─ ─ ─ ─ ─┼────────
//!  │ super │ super │ bitmap │ masks │ table │ partials │ snapshot list │ unused     │ journal │ keys │ unused  │ data
//!  └───────┴───────┴────────┴───────┴───────┴──────────┴───────────────┴─ ─ ─ ─ ─ ──┴─────────┴──────┴─ ─ ─ ─ ─┴────────
//!                  ╰──────────────────────── home ──────────────────────────────────╯
//! ```
//!
//! Where a disk has outgrown its table, the rest of the table lies in the data area (`parts.rs`).
//!
//! [`Shape`] has the sizes, and [`Places`] where the regions were put. A field of home that is smaller than a
//! word is described by [`Bits`] of a word, because the journal changes words.

use vellum_core::{BlockSize, Error, GuestOffset, GuestSpan, ImageOffset, ImageSpan, Result};

use super::parts::{PARTS_MAX, Part, Parts};

/// The size that one mask covers.
pub const SUB_BLOCK: BlockSize = BlockSize::PAGE;
/// Home begins behind the two superblocks.
pub const HOME_START: ImageOffset = ImageOffset::new(2 * PAGE_LEN);
/// Regions begin and end at multiples of this.
const PAGE_LEN: u64 = 4096;
/// `data_offset` is a multiple of this.
pub const DATA_ALIGN: BlockSize = BlockSize::from_shift(20);
/// All image offsets are below this.
pub const IMAGE_END: ImageOffset = ImageOffset::new(1 << 56);

/// The number of slots for partial units.
pub const PARTIALS: u64 = 64;
/// The size of such a slot in bytes.
pub const PARTIAL_LEN: u64 = 128;
/// The number of entries of the snapshot list. The last one holds the chain of map units.
pub const SNAPSHOTS: u64 = 4096;
/// The size of an entry of the snapshot list in bytes.
pub const SNAPSHOT_LEN: u64 = 128;

/// The smallest journal, in bytes.
pub const JOURNAL_BYTES_MIN: u64 = 64 << 10;
/// The largest journal, in bytes.
pub const JOURNAL_BYTES_MAX: u64 = 64 << 20;
/// A bitmap is kept in memory, so it has a limit.
pub const BITMAP_BYTES_MAX: u64 = 256 << 20;
/// The largest base: 64 TiB, with 4 GiB of masks.
pub const BASE_BYTES_MAX: u64 = 1 << 46;
/// The size of an entry of the zone table in bytes.
pub const ZONE_LEN: u64 = 256;
/// Word of a zone's entry: the generation in which the zone was opened last. 0: closed since.
pub(super) const GENERATION_WORD: u64 = 0;
/// Its tag.
pub(super) const TAG_WORD: u64 = 1;
/// The first word of a zone's entry with bits of recorded units.
pub const RECORDED_WORD: u64 = 8;
/// Where entries hold a form, the number of a stored unit has this many bits.
const UNIT_BITS: u32 = 27;
/// Enough for 2^18 zones.
pub const ZONES_BYTES_MAX: u64 = 64 << 20;
/// Enough for 2^26 units.
pub const TABLE_BYTES_MAX: u64 = 256 << 20;
/// A word, and a bit for each of 2^26 units.
pub const FAST_BYTES_MAX: u64 = (8 << 20) + PAGE_LEN;
/// A LUKS header with all its key material takes 2 MiB.
pub const KEYS_BYTES_MAX: u64 = 16 << 20;
/// Regions end here at the latest, far behind the largest ones. Each page of home takes a pointer in memory.
const HOME_END_MAX: u64 = 8 << 30;
/// The largest disk, in bytes.
const SIZE_MAX: u64 = IMAGE_END.bytes() - (1 << 40);

/// How guest offsets become places of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// In order, at a fixed offset.
    Linear,
    /// Through a table with one entry for each unit of this size.
    Table(BlockSize),
    /// As `Table`, with units taken from zones in order. The first write of a unit may embed its entry
    /// (`embed.rs`).
    Zoned {
        /// The size that one entry of the table maps.
        unit: BlockSize,
        /// The size that is opened for embedding at a time.
        zone: BlockSize,
    },
}

impl Layout {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Table(_) => "table",
            Self::Zoned { .. } => "zoned",
        }
    }

    /// The size that one entry of the table maps.
    pub fn unit(self) -> Option<BlockSize> {
        match self {
            Self::Linear => None,
            Self::Table(unit) | Self::Zoned { unit, .. } => Some(unit),
        }
    }

    /// Whether there is a table.
    pub fn has_table(self) -> bool {
        self != Self::Linear
    }
}

/// The parts of the home area, in their order in a new image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// One bit per block of the base.
    Bitmap,
    /// Two bits per sub-block of the base.
    Masks,
    /// Four bytes per unit.
    Table,
    /// Slots of partial units, whose rest lies in another unit.
    Partials,
    /// The list of snapshots.
    Snapshots,
    /// 256 bytes per zone.
    Zones,
    /// The sequence of the last promotion, then one bit per unit that a fast medium has.
    Fast,
    /// The ring of records.
    Journal,
    /// The LUKS header of an encrypted image, and its key material.
    Keys,
}

impl Region {
    /// All regions.
    pub const ALL: [Self; 9] = [
        Self::Bitmap,
        Self::Masks,
        Self::Table,
        Self::Partials,
        Self::Snapshots,
        Self::Zones,
        Self::Fast,
        Self::Journal,
        Self::Keys,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bitmap => "bitmap",
            Self::Masks => "masks",
            Self::Table => "table",
            Self::Partials => "partial units",
            Self::Snapshots => "snapshot list",
            Self::Zones => "zone table",
            Self::Fast => "bits of units on a fast medium",
            Self::Journal => "journal",
            Self::Keys => "keys",
        }
    }
}

/// The sizes from which the lengths of the regions follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The size of the disk in bytes.
    pub size: u64,
    /// Where guest data lies.
    pub layout: Layout,
    /// The size that one bit of the bitmap covers.
    pub block: BlockSize,
    /// How much of the base counts, in bytes. `None` without a base.
    pub base_bytes: Option<u64>,
}

impl Shape {
    /// Whether anything in home can ever change, so that a journal is needed.
    pub fn needs_journal(&self) -> bool {
        self.base_bytes.is_some() || self.layout.has_table()
    }

    /// The number of blocks of the base.
    pub fn blocks(&self) -> u64 {
        self.block.count_for(self.base_bytes.unwrap_or(0))
    }

    /// The number of sub-blocks of the base.
    pub fn sub_blocks(&self) -> u64 {
        SUB_BLOCK.count_for(self.base_bytes.unwrap_or(0))
    }

    /// The number of units of the disk; 0 in `linear`.
    pub fn units(&self) -> u64 {
        self.layout.unit().map_or(0, |unit| unit.count_for(self.size))
    }

    /// The size of a zone, where there are zones.
    pub fn zone(&self) -> Option<BlockSize> {
        match self.layout {
            Layout::Zoned { zone, .. } => Some(zone),
            Layout::Linear | Layout::Table(_) => None,
        }
    }

    /// The smallest length of the region in bytes. The length of the journal can be chosen; this is its
    /// minimum where there is one.
    pub fn need(&self, region: Region) -> u64 {
        let is_table = self.layout.has_table();
        let bytes = match region {
            Region::Bitmap => self.blocks().div_ceil(8),
            Region::Masks => self.sub_blocks().div_ceil(4),
            Region::Table => self.units() * 4,
            Region::Partials if is_table => PARTIALS * PARTIAL_LEN,
            Region::Snapshots if is_table => SNAPSHOTS * SNAPSHOT_LEN,
            Region::Zones if self.zone().is_some() => ZONE_LEN,
            Region::Journal if self.needs_journal() => JOURNAL_BYTES_MIN,
            Region::Partials
            | Region::Snapshots
            | Region::Zones
            | Region::Fast
            | Region::Journal
            | Region::Keys => 0,
        };
        bytes.next_multiple_of(PAGE_LEN)
    }

    /// The length of the region in a new image, in bytes. There are zones for twice the disk, because an
    /// image also holds what snapshots see.
    pub(super) fn desired_len(&self, region: Region) -> u64 {
        match (region, self.zone()) {
            (Region::Zones, Some(zone)) => {
                let zones = 2 * zone.count_for(self.size) + 8;
                (zones * ZONE_LEN).next_multiple_of(PAGE_LEN).min(ZONES_BYTES_MAX)
            }
            _ => self.need(region),
        }
    }

    /// The largest length of the region in bytes.
    pub fn limit(&self, region: Region) -> u64 {
        match region {
            Region::Bitmap if self.base_bytes.is_some() => BITMAP_BYTES_MAX,
            Region::Masks if self.base_bytes.is_some() => BASE_BYTES_MAX >> 14,
            Region::Table if self.layout.has_table() => TABLE_BYTES_MAX,
            Region::Zones if self.zone().is_some() => ZONES_BYTES_MAX,
            Region::Journal if self.needs_journal() => JOURNAL_BYTES_MAX,
            Region::Fast if self.layout.has_table() => FAST_BYTES_MAX,
            // Whether there are any is the superblock's to say.
            Region::Keys => KEYS_BYTES_MAX,
            Region::Bitmap
            | Region::Masks
            | Region::Table
            | Region::Zones
            | Region::Fast
            | Region::Journal => 0,
            Region::Partials | Region::Snapshots => self.need(region),
        }
    }

    /// Refuses impossible sizes.
    pub fn check(&self) -> Result<()> {
        let Self { size, base_bytes, .. } = *self;
        if !size.is_multiple_of(512) {
            return Err(Error::invalid(format!(
                "a disk of {size} bytes: the size must be a multiple of 512"
            )));
        }
        if size > SIZE_MAX {
            return Err(Error::invalid(format!("a disk of {size} bytes is too large")));
        }
        if base_bytes.is_some_and(|bytes| bytes > size) {
            return Err(Error::invalid("the visible part of the base is longer than the disk"));
        }
        if base_bytes.is_some_and(|bytes| bytes > BASE_BYTES_MAX) {
            return Err(Error::invalid("the base is larger than 64 TiB"));
        }
        if !(12..=20).contains(&self.block.shift()) {
            return Err(Error::invalid("block_size must be a power of two from 4k to 1M"));
        }
        if self.need(Region::Bitmap) > BITMAP_BYTES_MAX {
            return Err(Error::invalid("a base this large needs larger blocks: block_size"));
        }
        if let Some(unit) = self.layout.unit() {
            if !(16..=21).contains(&unit.shift()) {
                return Err(Error::invalid("unit_size must be a power of two from 64k to 2M"));
            }
            if self.units() > TABLE_BYTES_MAX / 4 {
                return Err(Error::invalid(
                    "a disk this large needs larger units (unit_size), or layout=linear",
                ));
            }
            let can_be = |zone: BlockSize| {
                (17..=26).contains(&zone.shift())
                    && (1..=10).contains(&(zone.shift() - unit.shift().min(zone.shift())))
            };
            if self.zone().is_some_and(|zone| !can_be(zone)) {
                return Err(Error::invalid(
                    "zone_size must be a power of two from 128k to 64M, and 2 to 1024 units",
                ));
            }
        }
        Ok(())
    }
}

/// A few bits of a word of home: `width` of them, `shift` from the least significant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bits {
    /// The offset of the word, a multiple of 8.
    pub word: ImageOffset,
    /// Their distance from the least significant bit.
    pub shift: u32,
    /// Their number.
    pub width: u32,
}

impl Bits {
    fn mask(self) -> u64 {
        ((1 << self.width) - 1) << self.shift
    }

    /// The value of these bits in a word.
    pub fn get(self, word: u64) -> u64 {
        (word & self.mask()) >> self.shift
    }

    /// The word with these bits set to another value.
    pub fn set(self, word: u64, value: u64) -> u64 {
        debug_assert!(value >> self.width == 0, "{value} in {} bits", self.width);
        word & !self.mask() | value << self.shift
    }
}

/// Where everything lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    pub(crate) shape: Shape,
    regions: [ImageSpan; 9],
    data_offset: ImageOffset,
    pub(super) parts: Parts,
}

impl Places {
    /// The places of a new image, with the regions one after another. The rest of the space up to
    /// `data_offset` goes to the table, so that the disk can grow.
    pub fn plan(shape: Shape, journal_bytes: u64) -> Result<Self> {
        Self::plan_for(shape, journal_bytes, shape.size)
    }

    /// As above, with tables for a disk of `room_bytes`, within their limits.
    pub fn plan_for(shape: Shape, journal_bytes: u64, room_bytes: u64) -> Result<Self> {
        Self::plan_with_keys(shape, journal_bytes, room_bytes, 0)
    }

    /// As above, with keys of this length.
    pub fn plan_with_keys(shape: Shape, journal_bytes: u64, room_bytes: u64, keys: u64) -> Result<Self> {
        shape.check()?;
        let later = Shape { size: room_bytes.max(shape.size), ..shape };
        let len = |region| match region {
            Region::Journal => journal_bytes,
            Region::Keys => keys.next_multiple_of(PAGE_LEN),
            Region::Table | Region::Zones => {
                later.desired_len(region).min(shape.limit(region)).max(shape.desired_len(region))
            }
            _ => shape.desired_len(region),
        };
        let total = HOME_START.bytes() + Region::ALL.iter().map(|region| len(*region)).sum::<u64>();
        let data_offset = DATA_ALIGN.round_up(total);
        let mut at = HOME_START;
        let regions = Region::ALL.map(|region| {
            let room = match region {
                Region::Table if len(region) > 0 => data_offset - total,
                _ => 0,
            };
            let long = (len(region) + room).min(shape.limit(region).max(len(region)));
            let span = at.span(long);
            at = span.end();
            if span.is_empty() { ImageOffset::ZERO.span(0) } else { span }
        });
        Self::checked(shape, regions, ImageOffset::new(data_offset), [Part::NONE; PARTS_MAX])
    }

    /// The places that an untrusted superblock states.
    ///
    /// # Errors
    /// `Corrupt` when they are impossible.
    pub fn checked(
        shape: Shape,
        regions: [ImageSpan; 9],
        data_offset: ImageOffset,
        parts: Parts,
    ) -> Result<Self> {
        if !DATA_ALIGN.aligns(data_offset) || data_offset.bytes() == 0 || data_offset.bytes() > HOME_END_MAX {
            return Err(Error::corrupt(format!("the data cannot begin at {:#x}", data_offset.bytes())));
        }
        let places = Self { shape, regions, data_offset, parts };
        let mut seen: Vec<Region> = Vec::new();
        let journal = places.region(Region::Journal);
        for region in Region::ALL {
            let span = places.region(region);
            let (need, limit) = (shape.need(region), shape.limit(region));
            let with_parts = parts.iter().try_fold(span.len(), |len, part| match region {
                Region::Table => len.checked_add(part.table_len),
                Region::Zones => len.checked_add(part.zones_len),
                _ => Some(len),
            });
            if with_parts.is_none_or(|len| !(need..=limit).contains(&len)) {
                return Err(Error::corrupt(format!(
                    "the {} and its parts are {} bytes long, but must be {need} to {limit}",
                    region.name(),
                    with_parts.unwrap_or(u64::MAX)
                )));
            }
            if span.is_empty() {
                continue;
            }
            let is_aligned = SUB_BLOCK.aligns(span.start()) && span.len().is_multiple_of(PAGE_LEN);
            if !is_aligned || span.start() < HOME_START || span.end() > data_offset {
                return Err(Error::corrupt(format!(
                    "the {} cannot lie at {:#x} (length {:#x})",
                    region.name(),
                    span.start().bytes(),
                    span.len()
                )));
            }
            if let Some(other) = seen.iter().find(|other| places.region(**other).overlaps(span)) {
                return Err(Error::corrupt(format!(
                    "the {} and the {} overlap",
                    other.name(),
                    region.name()
                )));
            }
            if region == Region::Journal
                && seen.iter().any(|other| places.region(*other).start() > span.start())
            {
                return Err(Error::corrupt("the journal does not lie behind the other regions"));
            }
            if region == Region::Keys && span.start() < places.home().end() && !journal.is_empty() {
                return Err(Error::corrupt("the keys do not lie behind the journal"));
            }
            seen.push(region);
        }
        if shape.layout == Layout::Linear
            && (data_offset.checked_add(shape.size)).is_none_or(|end| end > IMAGE_END)
        {
            return Err(Error::corrupt("the disk is larger than an image can hold"));
        }
        places.check_parts()?;
        Ok(places)
    }

    /// The sizes.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Where a region lies. Empty when the image has no such region.
    pub fn region(&self, region: Region) -> ImageSpan {
        self.regions[region as usize]
    }

    pub(super) fn regions(&self) -> [ImageSpan; 9] {
        self.regions
    }

    /// Where the data begins.
    pub fn data_offset(&self) -> ImageOffset {
        self.data_offset
    }

    /// The pages before the data that the journal changes word by word. The parts have more of them
    /// (`table_places.rs`).
    pub fn home(&self) -> ImageSpan {
        let journal = self.region(Region::Journal);
        let end = if journal.is_empty() { self.data_offset } else { journal.start() };
        ImageSpan::between(HOME_START, end)
    }

    /// The largest size of the disk without a longer table, in bytes.
    pub fn size_max(&self) -> u64 {
        self.shape.layout.unit().map_or(SIZE_MAX, |unit| self.entries() << unit.shift())
    }

    /// The number of units of a disk of this size; 0 in `linear`.
    pub fn units_of(&self, size: u64) -> u64 {
        Shape { size, ..self.shape }.units()
    }

    /// The same places for a disk of another size.
    pub fn resized(&self, size: u64) -> Result<Self> {
        let base_bytes = self.shape.base_bytes.map(|bytes| bytes.min(size));
        let shape = Shape { size, base_bytes, ..self.shape };
        shape.check()?;
        Self::checked(shape, self.regions, self.data_offset, self.parts)
    }

    /// The same places for a disk without a base.
    pub fn without_base(&self) -> Result<Self> {
        let shape = Shape { base_bytes: None, ..self.shape };
        let mut regions = self.regions;
        for region in Region::ALL.into_iter().filter(|region| shape.limit(*region) == 0) {
            regions[region as usize] = ImageOffset::ZERO.span(0);
        }
        Self::checked(shape, regions, self.data_offset, self.parts)
    }

    /// The block of the base that the offset lies in, if it has a bit.
    pub fn block_of(&self, at: GuestOffset) -> Option<u64> {
        let block = self.shape.block.cluster_of(at).index();
        (block < self.shape.blocks()).then_some(block)
    }

    /// The guest bytes of a block of the base, up to the end of the disk.
    pub fn block_span(&self, block: u64) -> GuestSpan {
        let start = GuestOffset::new(block << self.shape.block.shift());
        GuestSpan::between(
            start,
            GuestOffset::new((start.bytes() + self.shape.block.bytes()).min(self.shape.size)),
        )
    }

    /// The bit of a block.
    pub fn bit(&self, block: u64) -> Bits {
        debug_assert!(block < self.shape.blocks());
        bits(self.region(Region::Bitmap), block, 1)
    }

    /// The mask of a sub-block.
    pub fn mask(&self, sub_block: u64) -> Bits {
        debug_assert!(sub_block < self.shape.sub_blocks());
        bits(self.region(Region::Masks), sub_block, 2)
    }

    /// The stored unit that an entry names (0: none), and its form: 0, or the number of its embedded block
    /// plus one.
    pub fn split_entry(&self, entry: u32) -> (u32, u32) {
        match self.shape.zone() {
            Some(_) => (entry & ((1 << UNIT_BITS) - 1), entry >> UNIT_BITS),
            None => (entry, 0),
        }
    }

    /// The entry for a stored unit with this form.
    pub fn make_entry(&self, unit: u32, form: u32) -> u32 {
        debug_assert!(form == 0 || self.shape.zone().is_some(), "only units of zones have forms");
        unit | form << UNIT_BITS
    }

    /// The highest possible number of a stored unit.
    pub fn unit_max(&self) -> u32 {
        self.moved_number() - 1
    }

    /// The number in the entry of a unit that only the fast medium has. No stored unit has it.
    pub fn moved_number(&self) -> u32 {
        match self.shape.zone() {
            Some(_) => (1 << UNIT_BITS) - 1,
            None => u32::MAX,
        }
    }

    /// The stored units that the two entries of a word of the table name.
    pub fn units_in(&self, word: u64) -> [u32; 2] {
        let entry = |value: u64| u32::try_from(value & 0xFFFF_FFFF).expect("32 bits");
        [entry(word >> 32), entry(word)].map(|entry| self.split_entry(entry).0)
    }

    /// The higher of the two. That of a unit which only the fast medium has is none.
    pub fn last_unit(&self, word: u64) -> u32 {
        let stored = self.units_in(word).into_iter().filter(|unit| *unit != self.moved_number());
        stored.max().unwrap_or(0)
    }

    /// The number of units of a zone; 0 without zones.
    pub fn units_per_zone(&self) -> u32 {
        match self.shape.layout {
            Layout::Zoned { unit, zone } => 1 << (zone.shift() - unit.shift()),
            Layout::Linear | Layout::Table(_) => 0,
        }
    }

    /// The zone that contains a stored unit, and the unit's index in it. `None` when the zone has no entry.
    pub fn zone_of(&self, unit: u32) -> Option<(u32, u32)> {
        let per_zone = self.units_per_zone();
        let zone = (unit - 1).checked_div(per_zone)?;
        (zone < self.zones() && unit != self.moved_number()).then(|| (zone, (unit - 1) % per_zone))
    }

    /// The bit of a recorded unit, for which the table alone counts.
    pub fn recorded(&self, zone: u32, index: u32) -> Bits {
        Bits {
            word: self.zone_word(zone, RECORDED_WORD + u64::from(index / 64)),
            shift: index % 64,
            width: 1,
        }
    }

    /// Where stored unit `number` (1 and up) lies.
    pub fn unit(&self, number: u32) -> ImageSpan {
        let unit = self.shape.layout.unit().expect("only a table has units");
        debug_assert!(number > 0, "0 is no unit");
        (self.data_offset + ((u64::from(number) - 1) << unit.shift())).span(unit.bytes())
    }

    /// Whether unit `number` can exist on a storage of this length.
    pub fn may_hold(&self, number: u32, len: u64, is_fixed: bool) -> bool {
        if number == 0 || number > self.unit_max() {
            return false;
        }
        let span = self.unit(number);
        match is_fixed {
            true => span.end().bytes() <= len,
            // Parts of it that were not written may lie behind the end.
            false => span.start().bytes() < len,
        }
    }

    /// Where a byte of the disk lies in `linear`.
    pub fn linear(&self, at: GuestOffset) -> ImageOffset {
        debug_assert!(self.shape.layout == Layout::Linear);
        self.data_offset + at.bytes()
    }

    /// Where a slot for a partial unit lies.
    pub fn partial(&self, slot: u64) -> ImageSpan {
        debug_assert!(slot < PARTIALS);
        (self.region(Region::Partials).start() + slot * PARTIAL_LEN).span(PARTIAL_LEN)
    }

    /// Where an entry of the snapshot list lies.
    pub fn snapshot(&self, index: u64) -> ImageSpan {
        debug_assert!(index < SNAPSHOTS);
        (self.region(Region::Snapshots).start() + index * SNAPSHOT_LEN).span(SNAPSHOT_LEN)
    }
}

/// Item `index` of `width` bits. Items are counted from the least significant bit of each byte; words are
/// big-endian.
pub(super) fn bits(region: ImageSpan, index: u64, width: u32) -> Bits {
    let bit = index * u64::from(width);
    let byte_in_word = bit / 8 % 8;
    let shift = (7 - byte_in_word) * 8 + bit % 8;
    Bits { word: region.start() + bit / 64 * 8, shift: u32::try_from(shift).expect("below 64"), width }
}

#[cfg(test)]
mod tests {
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
    fn entries_of_zones_have_forms() {
        let places = Places::plan(shape(1 << 30, zoned(16, 26), None), MIB).unwrap();
        assert_eq!(places.split_entry(places.make_entry(5, 31)), (5, 31));
        assert_eq!(places.split_entry(u32::MAX), (places.moved_number(), 31));
        assert_eq!(places.units_in(u64::from(places.make_entry(9, 1)) << 32 | 7), [9, 7]);
        let moved = places.moved_number();
        assert_eq!(places.last_unit(u64::from(moved) << 32 | 7), 7, "no stored unit");
        assert!(!places.may_hold(moved, u64::MAX, true) && places.zone_of(moved).is_none());
        assert_eq!(
            (places.zone_of(1), places.zone_of(1024), places.zone_of(1025)),
            (Some((0, 0)), Some((0, 1023)), Some((1, 0)))
        );
        assert_eq!(places.zone_of(places.zones() * 1024 + 1), None);
        let bit = places.recorded(1, 65);
        assert_eq!((bit.word - places.region(Region::Zones).start(), bit.shift), (256 + 72, 1));
        let plain = Places::plan(shape(1 << 30, table(16), None), MIB).unwrap();
        assert_eq!((plain.split_entry(u32::MAX), plain.zone_of(1)), ((u32::MAX, 0), None));
    }

    #[test]
    fn metadata_is_as_long_as_the_paper_says() {
        let tib = 1 << 40;
        let all = shape(tib, table(20), Some(tib));
        assert_eq!(all.need(Region::Bitmap), 2 * MIB, "2 MiB of bitmap for 1 TiB");
        assert_eq!(all.need(Region::Table), 4 * MIB, "4 MiB of table for 1 TiB");
        assert_eq!(
            shape(10 << 30, table(20), Some(10 << 30)).need(Region::Bitmap),
            20 << 10,
            "20 KiB for 10 GiB"
        );
    }

    #[test]
    fn regions_follow_one_another() {
        for (name, shape, journal, want, data) in [
            ("plain", shape(1 << 30, Layout::Linear, None), 0, [0, 0, 0, 0, 0, 0, 0], 1),
            ("base", shape(1 << 30, Layout::Linear, Some(1 << 30)), 16 * MIB, [1, 16, 0, 0, 0, 0, 4096], 17),
            ("empty base", shape(1 << 30, Layout::Linear, Some(0)), MIB, [0, 0, 0, 0, 0, 0, 256], 2),
            ("table", shape(1 << 30, table(20), None), MIB, [0, 0, 124, 2, 128, 0, 256], 2),
            ("empty table", shape(0, table(16), None), 64 << 10, [0, 0, 0, 2, 128, 0, 16], 1),
            ("all", shape(1 << 30, table(16), Some(1 << 29)), MIB, [1, 8, 115, 2, 128, 0, 256], 2),
            ("zoned", shape(1 << 30, zoned(16, 26), None), MIB, [0, 0, 121, 2, 128, 3, 256], 2),
        ] {
            let places = Places::plan(shape, journal).unwrap();
            let mut regions =
                Region::ALL.into_iter().filter(|region| !matches!(region, Region::Fast | Region::Keys));
            let pages = want.map(|_| places.region(regions.next().expect("seven")).len() / 4096);
            assert_eq!((pages, places.data_offset().bytes() / MIB), (want, data), "{name}");
            let mut at = HOME_START;
            for region in Region::ALL.into_iter().filter(|region| !places.region(*region).is_empty()) {
                assert_eq!(places.region(region).start(), at, "{name}: {}", region.name());
                at = places.region(region).end();
            }
            if journal > 0 {
                assert_eq!(places.home().end(), places.region(Region::Journal).start(), "{name}");
            }
        }
    }

    #[test]
    fn sizes_that_no_image_has() {
        let linear = Layout::Linear;
        for (why, shape) in [
            ("512", shape(513, linear, None)),
            ("too large", shape(1 << 60, linear, None)),
            ("visible part of the base", shape(512, linear, Some(513))),
            ("64 TiB", shape(1 << 50, linear, Some(1 << 47))),
            ("larger blocks", Shape { block: SUB_BLOCK, ..shape(1 << 46, linear, Some(1 << 46)) }),
            ("block_size", Shape { block: BlockSize::from_shift(21), ..shape(512, linear, None) }),
            ("unit_size", shape(512, table(15), None)),
            ("unit_size", shape(512, table(22), None)),
            ("larger units", shape(1 << 43, table(16), None)),
            ("zone_size", shape(512, zoned(16, 27), None)),
            ("zone_size", shape(512, zoned(20, 20), None)),
        ] {
            let error = shape.check().unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
    }

    #[test]
    fn bits_are_where_the_bytes_have_them() {
        let places = Places::plan(shape(1 << 40, table(20), Some(1 << 40)), MIB).unwrap();
        let value = |bits: Bits, bytes: &[u8]| {
            let at = usize::try_from(bits.word.bytes()).unwrap();
            bits.get(crate::bytes::be64(bytes, at))
        };
        let mut bytes = vec![0; 8 << 20];
        let start = |region| usize::try_from(places.region(region).start().bytes()).unwrap();
        for block in [0u64, 7, 8, 63, 64, 100_003] {
            bytes[start(Region::Bitmap) + usize::try_from(block).unwrap() / 8] = 1 << (block % 8);
            assert_eq!(value(places.bit(block), &bytes), 1, "block {block}");
            bytes[start(Region::Bitmap) + usize::try_from(block).unwrap() / 8] = !(1 << (block % 8));
            assert_eq!(value(places.bit(block), &bytes), 0, "block {block}");
        }
        for sub in [0u64, 3, 4, 31, 32, 50_001] {
            bytes[start(Region::Masks) + usize::try_from(sub).unwrap() / 4] = 2 << (2 * (sub % 4));
            assert_eq!(value(places.mask(sub), &bytes), 2, "sub-block {sub}");
        }
        let small = Places::plan(shape(1 << 30, table(20), None), MIB).unwrap();
        for unit in [0u64, 1, 2, 1023] {
            let at = usize::try_from(small.region(Region::Table).start().bytes() + unit * 4).unwrap();
            bytes[at..at + 4].copy_from_slice(&0x1234_5678u32.to_be_bytes());
            assert_eq!(value(small.entry(unit), &bytes), 0x1234_5678, "unit {unit}");
        }
        let entry = small.entry(1);
        assert_eq!(entry.set(u64::MAX, 7), 0xFFFF_FFFF_0000_0007);
        assert_eq!(entry.get(entry.set(u64::MAX, 7)), 7);
    }

    #[test]
    fn offsets_past_the_base_have_no_block() {
        let places = Places::plan(shape(1 << 30, Layout::Linear, Some(65_537)), MIB).unwrap();
        for (at, block) in
            [(0, Some(0)), (65_535, Some(0)), (65_536, Some(1)), (131_071, Some(1)), (131_072, None)]
        {
            assert_eq!(places.block_of(GuestOffset::new(at)), block, "{at}");
        }
        assert_eq!(places.linear(GuestOffset::new(5)).bytes(), 2 * MIB + 5);
        let tabled = Places::plan(shape(1 << 30, table(16), None), MIB).unwrap();
        assert_eq!(tabled.unit(3), ImageOffset::new(2 * MIB + 2 * 65_536).span(65_536));
    }
}
