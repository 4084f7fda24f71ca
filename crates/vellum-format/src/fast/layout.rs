//! Every byte on a fast medium.
//!
//! ```text
//!   0       4 KiB   8 KiB                      520 KiB                           a multiple of 64 KiB
//!   ├ super ┼ super ┼ row 0 │ row 1 │ … │ 1023 ┼ entry of slot 0 │ 1 │ … ┼ ─ ─ ─ ┼ slot 0 │ slot 1 │ …
//!   │       │ copy  │ 512 bytes each           │ 32 bytes each            unused │ 64 KiB each
//! ```
//!
//! 1. A row and an entry lie in one sector each, so each is old or new.
//! 2. What has a wrong CRC is none. So a medium whose tables were never written has neither rows nor entries.
//!    The CRC of an entry covers the UUID in its row: an entry of another disk, which had the row before, is none.
//! 3. The number of slots determines every place, and has to fit the storage.

use vellum_core::{BlockSize, Error, ErrorKind, ImageOffset, ImageSpan, Result};

use crate::bytes::{be16, be32, be64, put32, put64};
use crate::session::SessionNumber;

/// The size of a slot in bytes: that of the smallest unit.
pub const SLOT_BYTES: u64 = 64 << 10;
/// [`SLOT_BYTES`], as a length in memory.
pub(super) const SLOT_LEN: usize = 64 << 10;
/// There are this many rows.
pub(super) const ROWS: u16 = 1024;
/// Length of a row.
pub(super) const ROW_LEN: usize = 512;
/// Length of an entry.
pub(super) const ENTRY_LEN: usize = 32;
/// Entries of one sector.
pub(super) const ENTRIES_TOGETHER: u32 = 16;
/// Length of a superblock.
pub(super) const SUPER_LEN: usize = 4096;
/// The longest name of an image in a row, in bytes.
pub(super) const NAME_MAX: usize = 255;
/// At most this many slots: 16 TiB.
const SLOTS_MAX: u32 = 1 << 28;

/// Where a row has the sequence of its last promotion.
const LAST_AT: usize = 328;
const MAGIC: [u8; 8] = *b"VELLUMh1";
const VERSION: u32 = 1;
/// The incompatible feature that a superblock says where the medium was cut off.
const CUT: u64 = 1;
const ROWS_AT: u64 = 2 * SUPER_LEN as u64;
const TABLE_AT: u64 = ROWS_AT + ROWS as u64 * ROW_LEN as u64;

/// The id of a fast medium. It is random, and never zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FastId([u8; 16]);

impl FastId {
    /// With these bytes; `None` if they are all zero.
    pub fn new(bytes: [u8; 16]) -> Option<Self> {
        bytes.iter().any(|byte| *byte != 0).then_some(Self(bytes))
    }

    /// Its bytes.
    pub fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl std::fmt::Display for FastId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for FastId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Why a unit was promoted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Reason {
    /// It was asked for by its place.
    Asked,
    /// It holds bytes of a file that a rule names.
    Rule,
    /// It holds bytes of a file that is old and still read.
    Times,
    /// It is read often.
    Heat,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Asked, Self::Rule, Self::Times, Self::Heat];

    /// Its name in the interfaces of programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Rule => "rule",
            Self::Times => "times",
            Self::Heat => "heat",
        }
    }

    fn byte(self) -> u8 {
        match self {
            Self::Asked => 1,
            Self::Rule => 2,
            Self::Times => 3,
            Self::Heat => 4,
        }
    }

    fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.byte() == byte)
    }
}

/// Where everything is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) slots: u32,
}

impl Layout {
    /// As many slots as these bytes have room for.
    ///
    /// # Errors
    /// `Invalid` where they have room for none.
    pub(super) fn for_size(bytes: u64) -> Result<Self> {
        let fits = |slots: u32| Self { slots }.total_bytes() <= bytes;
        let (mut some, mut too_many) = (0, SLOTS_MAX + 1);
        while too_many - some > 1 {
            let middle = some + (too_many - some) / 2;
            if fits(middle) { some = middle } else { too_many = middle }
        }
        match some {
            0 => Err(Error::invalid(format!(
                "{bytes} bytes are too few for a fast medium: it needs at least {}",
                Self { slots: 1 }.total_bytes()
            ))),
            slots => Ok(Self { slots }),
        }
    }

    /// Where slot 0 begins.
    pub(super) fn data_at(self) -> u64 {
        (TABLE_AT + u64::from(self.slots) * ENTRY_LEN as u64).next_multiple_of(SLOT_BYTES)
    }

    /// How many slots lie in so many bytes, as a whole or in part.
    pub(super) fn slots_within(self, bytes: u64) -> u32 {
        let slots = bytes.saturating_sub(self.data_at()).div_ceil(SLOT_BYTES);
        self.slots.min(u32::try_from(slots).unwrap_or(u32::MAX))
    }

    pub(super) fn total_bytes(self) -> u64 {
        self.data_at() + u64::from(self.slots) * SLOT_BYTES
    }

    pub(super) fn slot_at(self, slot: u32) -> ImageOffset {
        debug_assert!(slot < self.slots);
        ImageOffset::new(self.data_at() + u64::from(slot) * SLOT_BYTES)
    }

    pub(super) fn rows() -> ImageSpan {
        ImageOffset::new(ROWS_AT).span(TABLE_AT - ROWS_AT)
    }

    pub(super) fn row_at(row: u16) -> ImageOffset {
        debug_assert!(row < ROWS);
        ImageOffset::new(ROWS_AT) + u64::from(row) * ROW_LEN as u64
    }

    /// The table of entries.
    pub(super) fn table(self) -> ImageSpan {
        let len = u64::from(self.slots) * ENTRY_LEN as u64;
        ImageOffset::new(TABLE_AT).span(BlockSize::from_shift(9).round_up(len))
    }

    /// The sector with the entries of 16 slots, of which `slot` is one; and the first of them.
    pub(super) fn entries_at(self, slot: u32) -> (ImageOffset, u32) {
        let first = slot - slot % ENTRIES_TOGETHER;
        (ImageOffset::new(TABLE_AT) + u64::from(first) * ENTRY_LEN as u64, first)
    }
}

/// Neighbouring slots together: the first of them, and how many.
pub(super) fn runs_of(slots: &[u32]) -> impl Iterator<Item = (u32, u32)> {
    let mut rest = slots;
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let count = (first..).zip(rest).take_while(|(wanted, slot)| wanted == *slot).count();
        rest = &rest[count..];
        Some((first, u32::try_from(count).expect("a unit's")))
    })
}

/// What the superblock says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Super {
    pub(super) id: FastId,
    pub(super) layout: Layout,
    /// The length in bytes that the medium was found to have, if it was cut off. What lay behind is gone, even if it has become
    /// longer again.
    pub(super) cut_at: Option<u64>,
}

impl Super {
    /// How many bytes of it count.
    pub(super) fn len(&self) -> u64 {
        self.cut_at.unwrap_or(u64::MAX).min(self.layout.total_bytes())
    }

    /// How many slots lie in them as a whole.
    pub(super) fn whole_slots(&self) -> u32 {
        let slots = self.len().saturating_sub(self.layout.data_at()) / SLOT_BYTES;
        u32::try_from(slots).expect("at most 2^28")
    }

    /// # Errors
    /// `Changed` when the storage is shorter than it was made, or than it was found.
    pub(super) fn fits(self, storage_len: u64) -> Result<Self> {
        if self.len() > storage_len {
            return Err(Error::new(
                ErrorKind::Changed,
                format!(
                    "its superblock says {} slots, which do not fit {storage_len} bytes: it was truncated. Do not make it longer: \
                     what is gone would read as zeros. `vellum tier move --back --fast` brings home what is left of a disk, and \
                     `vellum convert --salvage --fast` copies it",
                    self.layout.slots
                ),
            ));
        }
        Ok(self)
    }

    /// The page at 0, and its copy at 4096. Written when the medium is made, and when it is found to be cut off.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; SUPER_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        put32(&mut bytes, 12, VERSION);
        put64(&mut bytes, 16, if self.cut_at.is_some() { CUT } else { 0 });
        bytes[24..40].copy_from_slice(&self.id.0);
        put32(&mut bytes, 40, self.layout.slots);
        put64(&mut bytes, 44, self.cut_at.unwrap_or_default());
        let crc = crc32c::crc32c(&bytes);
        put32(&mut bytes, 8, crc);
        bytes
    }
}

/// # Errors
/// `Invalid` when this is no fast medium, `Corrupt` for a damaged one, `Unsupported` for a later one.
pub(super) fn parse_super(page: &[u8]) -> Result<Super> {
    if page.len() < SUPER_LEN || !page.starts_with(&MAGIC) {
        return Err(Error::invalid("it is no fast medium: it does not begin with the magic number"));
    }
    let mut copy = page[..SUPER_LEN].to_vec();
    put32(&mut copy, 8, 0);
    if crc32c::crc32c(&copy) != be32(page, 8) {
        return Err(Error::corrupt("the superblock is damaged: its CRC32C is wrong"));
    }
    let features = be64(page, 16);
    if be32(page, 12) != VERSION || features & !CUT != 0 {
        return Err(Error::unsupported("the fast medium was made by a later version of this program"));
    }
    let id = FastId::new(page[24..40].try_into().expect("16 bytes"));
    let id = id.ok_or_else(|| Error::corrupt("its superblock has no id"))?;
    let layout = Layout { slots: be32(page, 40) };
    let cut_at = (features & CUT != 0).then(|| be64(page, 44));
    if !(1..=SLOTS_MAX).contains(&layout.slots) || cut_at.is_some_and(|at| at < layout.data_at()) {
        return Err(Error::corrupt("its superblock says something impossible"));
    }
    Ok(Super { id, layout, cut_at })
}

/// What the medium stores about one disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Row {
    /// The UUID of the disk's image.
    pub(super) uuid: [u8; 16],
    /// The number that the image named when the newest was made.
    pub(super) previous: Option<SessionNumber>,
    pub(super) newest: Option<SessionNumber>,
    /// The number before the newest does not count any more.
    pub(super) only_newest: bool,
    /// Units of the disk may be here alone: nothing of it is taken away.
    pub(super) is_needed: bool,
    /// Its copies take at most this many bytes.
    pub(super) budget: u64,
    /// The sequence of its last promotion that wrote entries.
    pub(super) last: u64,
    /// The image's name, for people.
    pub(super) name: String,
}

impl Row {
    /// Whether an image that names this number has the row.
    pub(super) fn counts(&self, number: SessionNumber) -> bool {
        self.newest == Some(number) || (!self.only_newest && self.previous == Some(number))
    }

    pub(super) fn encode(&self, row: u16) -> Vec<u8> {
        let mut bytes = vec![0; ROW_LEN];
        put32(&mut bytes, 4, u32::from(self.only_newest) | u32::from(self.is_needed) << 1);
        bytes[8..24].copy_from_slice(&self.uuid);
        for (at, number) in [(24, self.previous), (40, self.newest)] {
            bytes[at..at + 16].copy_from_slice(&number.map_or([0; 16], SessionNumber::bytes));
        }
        put64(&mut bytes, 56, self.budget);
        let len = u32::try_from(self.name.len()).expect("at most 255");
        put32(&mut bytes, 64, len);
        bytes[68..68 + self.name.len()].copy_from_slice(self.name.as_bytes());
        put64(&mut bytes, LAST_AT, self.last);
        let crc = crc_of(u32::from(row), &bytes[4..]);
        put32(&mut bytes, 0, crc);
        bytes
    }

    /// `None` where there is no row, or what is there is damaged.
    pub(super) fn parse(row: u16, bytes: &[u8]) -> Option<Self> {
        if crc_of(u32::from(row), &bytes[4..ROW_LEN]) != be32(bytes, 0) {
            return None;
        }
        let number = |at: usize| SessionNumber::new(bytes[at..at + 16].try_into().expect("16 bytes"));
        let len = be32(bytes, 64) as usize;
        let name =
            bytes.get(68..68 + len.min(NAME_MAX)).map(|name| String::from_utf8_lossy(name).into_owned());
        Some(Self {
            uuid: bytes[8..24].try_into().expect("16 bytes"),
            previous: number(24),
            newest: number(40),
            only_newest: be32(bytes, 4) & 1 == 1,
            is_needed: be32(bytes, 4) & 2 == 2,
            budget: be64(bytes, 56),
            last: be64(bytes, LAST_AT),
            name: name.unwrap_or_default(),
        })
    }
}

/// What a slot holds: a part of a unit of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) sequence: u64,
    pub(super) unit: u64,
    pub(super) row: u16,
    /// Which 64 KiB of the unit.
    pub(super) part: u16,
    pub(super) reason: Reason,
}

impl Entry {
    /// `uuid` is that of its row.
    pub(super) fn encode(&self, slot: u32, uuid: &[u8; 16]) -> [u8; ENTRY_LEN] {
        let mut bytes = [0; ENTRY_LEN];
        bytes[4..6].copy_from_slice(&self.row.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.part.to_be_bytes());
        put64(&mut bytes, 8, self.unit);
        put64(&mut bytes, 16, self.sequence);
        bytes[24] = self.reason.byte();
        let crc = crc32c::crc32c_append(crc_of(slot, &bytes[4..]), uuid);
        put32(&mut bytes, 0, crc);
        bytes
    }

    /// `None` where there is none, or what is there is damaged, or of a disk that has no row any more.
    pub(super) fn parse(slot: u32, bytes: &[u8], rows: &[Option<Row>]) -> Option<Self> {
        let row = be16(bytes, 4);
        let uuid = rows.get(usize::from(row))?.as_ref()?.uuid;
        if crc32c::crc32c_append(crc_of(slot, &bytes[4..ENTRY_LEN]), &uuid) != be32(bytes, 0) {
            return None;
        }
        let reason = Reason::of(bytes[24])?;
        let sequence = be64(bytes, 16);
        let is_possible = sequence > 0 && sequence < u64::MAX;
        is_possible.then(|| Self { sequence, unit: be64(bytes, 8), row, part: be16(bytes, 6), reason })
    }
}

/// The CRC32C of something, and of where it lies.
fn crc_of(index: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&index.to_be_bytes()), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_in_its_place_alone() {
        let number = SessionNumber::new([3; 16]);
        let row = Row {
            uuid: [1; 16],
            previous: None,
            newest: number,
            only_newest: true,
            is_needed: true,
            budget: 7 << 20,
            last: 1 << 40,
            name: "n".repeat(NAME_MAX),
        };
        let bytes = row.encode(5);
        assert_eq!(Row::parse(5, &bytes).as_ref(), Some(&row));
        assert_eq!(Row::parse(6, &bytes), None);
        assert_eq!(Row::parse(0, &[0; ROW_LEN]), None);
        let entry = Entry { sequence: 9, unit: 1 << 25, row: 5, part: 31, reason: Reason::Heat };
        let bytes = entry.encode(77, &[1; 16]);
        let mut rows = vec![None; usize::from(ROWS)];
        rows[5] = Some(row.clone());
        assert_eq!(Entry::parse(77, &bytes, &rows), Some(entry));
        assert_eq!(Entry::parse(78, &bytes, &rows), None);
        assert_eq!(Entry::parse(0, &[0; ENTRY_LEN], &rows), None);
        for at in 0..ENTRY_LEN {
            let mut damaged = bytes;
            damaged[at] ^= 4;
            assert_eq!(Entry::parse(77, &damaged, &rows), None, "byte {at}");
        }
        rows[5] = Some(Row { uuid: [2; 16], ..row });
        assert_eq!(Entry::parse(77, &bytes, &rows), None, "of the disk that had the row before");
        rows[5] = None;
        assert_eq!(Entry::parse(77, &bytes, &rows), None);
    }

    #[test]
    fn as_many_slots_as_fit_and_no_more() {
        for bytes in [1 << 20, 10 << 20, (1 << 30) + 77, 1 << 40] {
            let layout = Layout::for_size(bytes).unwrap();
            assert!(layout.total_bytes() <= bytes);
            assert!(Layout { slots: layout.slots + 1 }.total_bytes() > bytes);
        }
        assert!(Layout::for_size(600 << 10).is_err());
        let id = FastId::new([9; 16]).unwrap();
        let layout = Layout { slots: 3 };
        let whole = Super { id, layout, cut_at: None };
        let page = whole.encode();
        let parse_super = |page: &[u8], len| parse_super(page).and_then(|found| found.fits(len));
        assert_eq!(parse_super(&page, layout.total_bytes()).unwrap(), whole);
        let short = parse_super(&page, layout.total_bytes() - 1).unwrap_err();
        assert_eq!(short.kind(), ErrorKind::Changed);
        let cut = Super { cut_at: Some(layout.total_bytes() - 1), ..whole };
        assert_eq!(parse_super(&cut.encode(), layout.total_bytes() - 1).unwrap(), cut);
        assert_eq!(
            parse_super(&cut.encode(), layout.total_bytes()).unwrap(),
            cut,
            "it was made longer again"
        );
        assert_eq!((whole.whole_slots(), cut.whole_slots()), (3, 2));
        assert!(parse_super(&cut.encode(), layout.total_bytes() - 2).is_err());
        let mut damaged = page;
        damaged[43] ^= 1;
        assert!(parse_super(&damaged, layout.total_bytes()).is_err());
    }

    #[test]
    fn a_row_counts_for_its_newest_number_and_the_one_before_until_that_is_over() {
        let number = |n: u8| SessionNumber::new([n; 16]).unwrap();
        let mut row = Row {
            uuid: [1; 16],
            previous: Some(number(1)),
            newest: Some(number(2)),
            only_newest: false,
            is_needed: false,
            budget: 0,
            last: 0,
            name: String::new(),
        };
        assert!(row.counts(number(1)) && row.counts(number(2)) && !row.counts(number(3)));
        row.only_newest = true;
        assert!(!row.counts(number(1)) && row.counts(number(2)));
    }
}
