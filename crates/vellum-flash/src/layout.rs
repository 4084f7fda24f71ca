//! Where everything is on flash, and the superblock that says it.
//!
//! ```text
//!   0       4 KiB    8 KiB
//!   ├ super ┼ super ─┼ slice 0 │ slice 0 ┼ … ┼ slice P │ slice P ┼ ring ─┼ slot 0 ┼ slot 1 ┼ …
//!   │ block │ copy   │ place 0   place 1                         │       │
//!
//!   ├ super ┼ super ─┼ slot 0 ┼ slot 1 ┼ … ┼ slice 0 │ slice 0 ┼ … ┼ slice P │ slice P ┼ ring ─┤    slots first
//! ```
//!
//! 1. Slots, parts and the ring's length determine every place. A superblock in which they contradict each
//!    other is refused, so no later arithmetic can pass 2^63.
//! 2. Slots come first where the size was changed an odd number of times: then old and new tables are at different ends.
//! 3. The part of a key depends on the cache's secret and on the key's group, never on which slots are in use.
//!
//! The text of this is `docs/format/flash.md`. Left out: what records and slices say (`record`).

use vellum_core::{Context, Error, ImageOffset, ImageSpan, Result, Storage};

use crate::bytes::{be32, be64, be128, put32, put64, put128};

/// A block of a disk, and a slot of flash, in bytes.
pub(crate) const BLOCK_BYTES: u64 = 4096;
/// [`BLOCK_BYTES`], as a length in memory.
pub(crate) const BLOCK_LEN: usize = 4096;
/// The unit in which a block may be cached in part, in bytes.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// [`SECTOR_BYTES`], as a length in memory.
pub(crate) const SECTOR_LEN: usize = 512;
/// The mask of a block of which every sector is cached.
pub(crate) const SECTORS_ALL: u8 = 0xFF;
/// Neighbouring blocks that share an entry of the map.
pub(crate) const GROUP_BLOCKS: u64 = 16;
/// [`GROUP_BLOCKS`], as a length in memory.
pub(crate) const GROUP_PLACES: usize = 16;
/// Slots of a segment: what two bytes can number.
pub(crate) const SEGMENT_SLOTS: u32 = 1 << 16;
/// A part's share of the slots.
pub(crate) const PART_SLOTS: u32 = 4096;
/// Length of one of the two places of a slice.
pub(crate) const PLACE_BYTES: u64 = 90_112;
/// Length of a slice's header.
pub(crate) const SLICE_HEADER_LEN: usize = 64;
/// The longest payload of a slice.
pub(crate) const PAYLOAD_MAX: usize = 90_048;
/// The shortest and the longest ring.
pub(crate) const RING_BYTES_MIN: u64 = 128 << 10;
/// See [`RING_BYTES_MIN`].
pub(crate) const RING_BYTES_MAX: u64 = 64 << 20;
/// Blocks are numbered below this.
pub(crate) const BLOCKS_MAX: u64 = 1 << 48;
/// Rows are numbered below this.
pub(crate) const ROWS_MAX: u16 = 1022;

/// Where the copy of the superblock is.
pub(crate) const COPY_AT: u64 = BLOCK_BYTES;
const SLICES_AT: u64 = 2 * BLOCK_BYTES;

/// A block of a disk: the number of the disk's row in the upper 16 bits, the number of the block in the
/// lower 48.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key(u64);

impl Key {
    /// Block `block` of the disk in row `row`. Panics when the block is numbered 2^48 or higher.
    pub(crate) fn new(row: u16, block: u64) -> Self {
        assert!(block < BLOCKS_MAX, "block {block} of row {row} has no key");
        Self(u64::from(row) << 48 | block)
    }

    /// The key that these bits are. Any bits are a key.
    pub(crate) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The key as one number.
    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    /// The number of the disk's row.
    pub(crate) const fn row(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// The number of the block.
    pub(crate) const fn block(self) -> u64 {
        self.0 & (BLOCKS_MAX - 1)
    }

    /// The key of the first block of the group.
    pub(crate) const fn group(self) -> Self {
        Self(self.0 & !(GROUP_BLOCKS - 1))
    }

    /// Which block of its group it is, below 16.
    pub(crate) const fn index(self) -> u32 {
        (self.0 & (GROUP_BLOCKS - 1)) as u32
    }

    /// The key `blocks` further. Panics where it would leave the disk.
    pub(crate) fn plus(self, blocks: u64) -> Self {
        Self::new(self.row(), self.block() + blocks)
    }
}

/// A slot of flash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot(pub(crate) u32);

impl Slot {
    /// The number of its segment.
    pub(crate) const fn segment(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Its number within the segment.
    #[allow(clippy::cast_possible_truncation, reason = "the lower half is what is meant")]
    pub(crate) const fn within(self) -> u16 {
        self.0 as u16
    }

    /// The slot of this number in a segment.
    pub(crate) const fn of_segment(segment: u16, within: u16) -> Self {
        Self((segment as u32) << 16 | within as u32)
    }
}

/// Spreads groups over parts, and over the tables in memory. All 64 bits are well mixed.
pub(crate) fn mix(secret: u64, group: Key) -> u64 {
    let mut m = group.bits() ^ secret;
    for _ in 0..2 {
        m = (m ^ m >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        m = (m ^ m >> 27).wrapping_mul(0x94D0_49BB_1331_11EB) ^ secret.rotate_left(32);
    }
    m ^ m >> 31
}

/// What determines where everything is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Decides which part a block is in.
    pub(crate) secret: u64,
    /// How many slots there are, at least 1.
    pub(crate) slots: u32,
    /// How many parts the map has.
    pub(crate) parts: u32,
    /// The length of the ring of records, in bytes.
    pub(crate) ring_bytes: u64,
    /// The slots come before the slices and the ring.
    pub(crate) is_slots_first: bool,
}

impl Layout {
    /// The layout of `slots` slots. An error when there is none such.
    pub(crate) fn new(slots: u32, ring_bytes: u64, secret: u64) -> Result<Self> {
        if slots == 0 {
            return Err(Error::invalid("a flash cache has at least one slot"));
        }
        let is_good =
            ring_bytes.is_multiple_of(BLOCK_BYTES) && (RING_BYTES_MIN..=RING_BYTES_MAX).contains(&ring_bytes);
        if !is_good {
            let why = format!(
                "a flash cache's ring of {ring_bytes} bytes: it has a multiple of 4096, from {RING_BYTES_MIN} to {RING_BYTES_MAX}"
            );
            return Err(Error::invalid(why));
        }
        Ok(Self { secret, slots, parts: slots.div_ceil(PART_SLOTS), ring_bytes, is_slots_first: false })
    }

    /// The layout that fills `bytes` of flash best: a ring of a 256th, within its bounds, and as many slots
    /// as then have room. An error when not even one has.
    pub(crate) fn for_size(bytes: u64, secret: u64) -> Result<Self> {
        let ring_bytes = (bytes / 256 / BLOCK_BYTES * BLOCK_BYTES).clamp(RING_BYTES_MIN, RING_BYTES_MAX);
        let with = |slots: u64| {
            let slots = u32::try_from(slots).expect("at most as many as 32 bits have numbers");
            Self::new(slots, ring_bytes, secret)
        };
        let fits = |slots: u64| with(slots).is_ok_and(|layout| layout.total_bytes() <= bytes);
        let (mut some, mut too_many) = (0, (bytes / BLOCK_BYTES + 1).min(1 << 32));
        while too_many - some > 1 {
            let middle = some + (too_many - some) / 2;
            if fits(middle) { some = middle } else { too_many = middle }
        }
        if some == 0 {
            let least = with(1)?.total_bytes();
            let why = format!("{bytes} bytes are too few for a flash cache: it needs at least {least}");
            return Err(Error::invalid(why));
        }
        with(some)
    }

    /// How many slices there are: the ledger and the parts.
    pub(crate) const fn slices(&self) -> u32 {
        self.parts + 1
    }

    /// Where place `place` (0 or 1) of slice `number` begins.
    pub(crate) fn slice_at(&self, number: u32, place: u32) -> ImageOffset {
        debug_assert!(number <= self.parts && place < 2);
        self.tables().start() + (2 * u64::from(number) + u64::from(place)) * PLACE_BYTES
    }

    /// The slices and the ring.
    pub(crate) fn tables(&self) -> ImageSpan {
        let before = if self.is_slots_first { u64::from(self.slots) * BLOCK_BYTES } else { 0 };
        let slices = 2 * u64::from(self.slices()) * PLACE_BYTES;
        ImageOffset::new(SLICES_AT + before).span(slices + self.ring_bytes)
    }

    /// All slots.
    pub(crate) fn all_slots(&self) -> ImageSpan {
        let start = if self.is_slots_first { ImageOffset::new(SLICES_AT) } else { self.tables().end() };
        start.span(u64::from(self.slots) * BLOCK_BYTES)
    }

    /// The ring of records.
    pub(crate) fn ring(&self) -> ImageSpan {
        ImageOffset::new(self.tables().end().bytes() - self.ring_bytes).span(self.ring_bytes)
    }

    /// The longest record.
    pub(crate) const fn record_bytes_max(&self) -> u64 {
        self.ring_bytes / 8 / BLOCK_BYTES * BLOCK_BYTES
    }

    /// Where a slot begins.
    pub(crate) fn slot_at(&self, slot: Slot) -> ImageOffset {
        debug_assert!(slot.0 < self.slots);
        self.all_slots().start() + u64::from(slot.0) * BLOCK_BYTES
    }

    /// How many bytes of flash it takes.
    pub(crate) fn total_bytes(&self) -> u64 {
        SLICES_AT + self.tables().len() + self.all_slots().len()
    }

    /// Which part of the map the key is in.
    pub(crate) fn part_of(&self, key: Key) -> u32 {
        part_of(self.secret, self.parts, key)
    }

    /// The same for a group of which the hash is known ([`mix`]).
    pub(crate) fn part_of_hash(&self, hash: u64) -> u32 {
        part_of_hash(self.parts, hash)
    }

    /// The number of the slice of the part that the key is in.
    pub(crate) fn slice_of(&self, key: Key) -> u32 {
        self.part_of(key) + 1
    }
}

/// Which of `parts` parts the key is in.
pub(crate) fn part_of(secret: u64, parts: u32, key: Key) -> u32 {
    part_of_hash(parts, mix(secret, key.group()))
}

fn part_of_hash(parts: u32, hash: u64) -> u32 {
    u32::try_from(((hash >> 32) * u64::from(parts)) >> 32).expect("below the number of parts")
}

const MAGIC: u64 = 0x5645_4C4C_554D_4630; // "VELLUMF0"
const VERSION: u32 = 1;
/// An incompatible feature: the slots come before the tables. The layout says it.
const SLOTS_FIRST: u64 = 2;

mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const CRC: usize = 8;
    pub(super) const VERSION: usize = 12;
    pub(super) const INCOMPATIBLE: usize = 16;
    pub(super) const ID: usize = 24;
    pub(super) const SECRET: usize = 40;
    pub(super) const SLOTS: usize = 48;
    pub(super) const PARTS: usize = 52;
    pub(super) const RING: usize = 56;
    pub(super) const PLACE: usize = 64;
}

/// What a cache says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// Random; records and slices of another cache have another.
    pub(crate) id: u128,
    /// Where everything is.
    pub(crate) layout: Layout,
    /// What a program has to know to read it: bits of [`Superblock::KNOWN`].
    pub(crate) features: u64,
}

impl Superblock {
    /// Records and the ledger may name regions that are being written.
    pub(crate) const REGIONS: u64 = 1;
    /// Records may have items about several neighbouring blocks.
    pub(crate) const NEIGHBOURS: u64 = 4;
    /// Places of slices that a crash has cut off are made void when the cache is opened.
    pub(crate) const VOIDED: u64 = 8;
    /// All that this program knows.
    pub(crate) const KNOWN: u64 = Self::REGIONS | Self::NEIGHBOURS | Self::VOIDED;

    /// The bytes of one copy.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_LEN];
        put64(&mut bytes, at::MAGIC, MAGIC);
        put32(&mut bytes, at::VERSION, VERSION);
        let order = if self.layout.is_slots_first { SLOTS_FIRST } else { 0 };
        put64(&mut bytes, at::INCOMPATIBLE, self.features | order);
        put128(&mut bytes, at::ID, self.id);
        put64(&mut bytes, at::SECRET, self.layout.secret);
        put32(&mut bytes, at::SLOTS, self.layout.slots);
        put32(&mut bytes, at::PARTS, self.layout.parts);
        put64(&mut bytes, at::RING, self.layout.ring_bytes);
        put64(&mut bytes, at::PLACE, PLACE_BYTES);
        let crc = crc32c::crc32c(&bytes);
        put32(&mut bytes, at::CRC, crc);
        bytes
    }

    /// The superblock in the first 4 KiB of `bytes`. `Corrupt` when there is none, `Unsupported` when a later
    /// program has made it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let none = || Error::corrupt("no superblock of a flash cache");
        let block = bytes.get(..BLOCK_LEN).ok_or_else(none)?;
        if be64(block, at::MAGIC) != MAGIC || !has_good_crc(block, at::CRC) {
            return Err(none());
        }
        let (version, features) = (be32(block, at::VERSION), be64(block, at::INCOMPATIBLE));
        if version != VERSION || features & !(Self::KNOWN | SLOTS_FIRST) != 0 {
            let why = format!(
                "the flash cache has version {version} and features {features:#x}, this program knows version {VERSION} and features {:#x}: use the program that wrote it last",
                Self::KNOWN | SLOTS_FIRST
            );
            return Err(Error::unsupported(why));
        }
        let layout = Layout::new(be32(block, at::SLOTS), be64(block, at::RING), be64(block, at::SECRET))
            .map_err(|error| error.with_kind(vellum_core::ErrorKind::Corrupt))?;
        if be32(block, at::PARTS) != layout.parts || be64(block, at::PLACE) != PLACE_BYTES {
            return Err(Error::corrupt("the superblock of the flash cache contradicts itself"));
        }
        let layout = Layout { is_slots_first: features & SLOTS_FIRST != 0, ..layout };
        Ok(Self { id: be128(block, at::ID), layout, features: features & !SLOTS_FIRST })
    }

    /// Writes the copies that are not this one, each by itself: a change of size that was cut off between them is
    /// completed.
    pub(crate) async fn complete(&self, storage: &dyn Storage) -> Result<()> {
        let wanted = self.encode();
        for place in [0, COPY_AT] {
            let buffer = vellum_core::Buffer::for_overwrite(BLOCK_LEN);
            let found = storage.read(ImageOffset::new(place), buffer).await?;
            if found.to_vec() != wanted {
                storage.write(ImageOffset::new(place), vellum_core::Buffer::copy_of(&wanted)).await?;
                storage.flush().await?; // commit point
            }
        }
        Ok(())
    }

    /// Reads the first copy that is good. The storage has to be as long as the superblock says.
    pub(crate) async fn read(storage: &dyn Storage) -> Result<Self> {
        let len = storage.len();
        let mut found = Err(Error::corrupt(
            "it is no flash cache, or its creation was cut off: create it with `vellum flash create`",
        ));
        for place in [0, COPY_AT] {
            if place + BLOCK_BYTES > len {
                break;
            }
            let block = vellum_core::Buffer::for_overwrite(BLOCK_LEN);
            let block =
                storage.read(ImageOffset::new(place), block).await.context(|| "can't read the superblock")?;
            match Self::decode(block.contiguous().slice()) {
                Ok(superblock) => {
                    found = Ok(superblock);
                    break;
                }
                Err(error) if error.kind() == vellum_core::ErrorKind::Unsupported => return Err(error),
                Err(_) => {}
            }
        }
        let superblock = found?;
        let needs = superblock.layout.total_bytes();
        if len < needs {
            let why = format!("the flash cache has {needs} bytes, but only {len} of them are there");
            return Err(Error::corrupt(why));
        }
        Ok(superblock)
    }
}

/// Whether the CRC32C of `bytes`, with the field itself as zero, is what the field says.
pub(crate) fn has_good_crc(bytes: &[u8], field: usize) -> bool {
    let before = crc32c::crc32c(&bytes[..field]);
    let zeroed = crc32c::crc32c_append(before, &[0; 4]);
    crc32c::crc32c_append(zeroed, &bytes[field + 4..]) == be32(bytes, field)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        let layout = Layout::new(70_000, 1 << 20, 0x0123_4567_89AB_CDEF).unwrap();
        Superblock { id: 77, layout, features: Superblock::KNOWN }
    }

    #[test]
    fn a_superblock_reads_as_it_was_written() {
        let bytes = superblock().encode();
        assert_eq!(Superblock::decode(&bytes).unwrap(), superblock());
    }

    #[test]
    fn every_bit_counts() {
        let bytes = superblock().encode();
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&bytes).is_err(), "bit {bit}");
        }
        assert!(Superblock::decode(&bytes[..4095]).is_err());
    }

    #[test]
    fn fields_that_contradict_each_other_are_refused() {
        let with = |at: usize, value: u32| {
            let mut bytes = superblock().encode();
            put32(&mut bytes, at, value);
            put32(&mut bytes, at::CRC, 0);
            let crc = crc32c::crc32c(&bytes);
            put32(&mut bytes, at::CRC, crc);
            Superblock::decode(&bytes).map_err(|error| error.kind())
        };
        use vellum_core::ErrorKind::{Corrupt, Unsupported};
        assert!(with(at::ID, 5).is_ok());
        assert_eq!(with(at::VERSION, 2), Err(Unsupported));
        assert_eq!(with(at::INCOMPATIBLE, 1), Err(Unsupported));
        assert!(with(at::INCOMPATIBLE + 4, 0).is_ok(), "an older one");
        for (at, value) in [
            (at::SLOTS, 0),
            (at::SLOTS, u32::MAX),
            (at::PARTS, 17),
            (at::PARTS, 0),
            (at::RING, 1),
            (at::RING + 4, 4096),
            (at::RING + 4, (64 << 20) + 4096),
            (at::RING + 4, (1 << 20) + 512),
            (at::PLACE + 4, 4096),
        ] {
            assert_eq!(with(at, value), Err(Corrupt), "{at}: {value}");
        }
    }

    #[test]
    fn places_follow_each_other_without_a_gap() {
        let layout = superblock().layout;
        assert_eq!(layout.parts, 18);
        assert_eq!(layout.slice_at(0, 0).bytes(), 8192);
        for number in 0..layout.slices() {
            assert_eq!(layout.slice_at(number, 1).bytes() - layout.slice_at(number, 0).bytes(), PLACE_BYTES);
        }
        assert_eq!(layout.ring().start().bytes(), layout.slice_at(layout.parts, 1).bytes() + PLACE_BYTES);
        assert_eq!(layout.slot_at(Slot(0)), layout.ring().end());
        assert_eq!(layout.total_bytes(), layout.slot_at(Slot(69_999)).bytes() + 4096);
    }

    #[test]
    fn the_largest_cache_has_places_for_all() {
        let layout = Layout::new(u32::MAX, RING_BYTES_MAX, 1).unwrap();
        assert!(layout.total_bytes() < 1 << 45);
        assert_eq!(layout.parts, 1 << 20);
    }

    #[test]
    fn a_size_is_filled_as_far_as_it_goes() {
        for bytes in [600 << 10, 1 << 20, (10 << 20) + 777, 1 << 30, 400 << 30, 1 << 45, 1 << 60] {
            let layout = Layout::for_size(bytes, 3).unwrap();
            assert!(layout.total_bytes() <= bytes);
            if layout.slots < u32::MAX {
                let more = Layout::new(layout.slots + 1, layout.ring_bytes, 3).unwrap();
                assert!(more.total_bytes() > bytes, "{bytes}");
            }
        }
        assert!(Layout::for_size(100 << 10, 3).unwrap_err().to_string().contains("at least 503808"));
    }

    #[test]
    fn a_key_has_its_row_and_its_block() {
        let key = Key::new(9, 0x1234_5678_9ABC);
        assert_eq!((key.row(), key.block(), key.index()), (9, 0x1234_5678_9ABC, 12));
        assert_eq!(key.group().block(), 0x1234_5678_9AB0);
        assert_eq!(key.plus(4).group(), key.group().plus(16));
        let slot = Slot(0x3_0007);
        assert_eq!((slot.segment(), slot.within()), (3, 7));
        assert_eq!(Slot::of_segment(3, 7), slot);
    }

    #[test]
    fn groups_are_spread_evenly_whatever_their_distance() {
        for shift in [4, 8, 12, 20, 30, 40] {
            let mut counts = [0; 64];
            for n in 0..64 * 256 {
                let key = Key::new(1, (n << shift) & (BLOCKS_MAX - 1));
                counts[part_of(0x5EC2E7, 64, key) as usize] += 1;
                let within = part_of(0x5EC2E7, 64, key.plus(15 - u64::from(key.index())));
                assert_eq!(within, part_of(0x5EC2E7, 64, key), "one group, one part");
            }
            // Of 256 expected, seven standard deviations.
            if shift <= 30 {
                assert!(counts.iter().all(|n| (144..=368).contains(n)), "{shift}: {counts:?}");
            }
        }
    }

    #[test]
    fn the_hash_is_what_the_format_says() {
        // Computed by another program from the text of docs/format/flash.md.
        assert_eq!(mix(0x0123_4567_89AB_CDEF, Key::new(3, 0x1000)), 0xEAC0_6823_6240_5F00);
    }
}
