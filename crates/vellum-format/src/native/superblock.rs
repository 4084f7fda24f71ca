//! The superblock: two copies of one page, written in turns.
//!
//! ```text
//!  A at 0, B at 4096
//!  0          8     12        16         24     40             48           56       60      62 64     72          80
//!  ├──────────┼─────┼─────────┼──────────┼──────┼──────────────┼────────────┼────────┼───────┼──┼──────┼───────────┤
//!  │ VELLUMv1 │ crc │ version │ sequence │ uuid │ incompatible │ compatible │ layout │ shifts│sw│ size │ base size │
//!  └──────────┴─────┴─────────┴──────────┴──────┴──────────────┴────────────┴────────┴───────┴──┴──────┴───────────┘
//!  80                    176           184          192   208          212       216        220         256     1280
//!  ├─────────────────────┼─────────────┼────────────┼─────┼────────────┼─────────┼──────────┼───────────┼───────┼──────
//!  │ six regions: at, len│ data_offset │ generation │ key │ not used   │ name len│format len│ zone table│ name  │ format
//!  └─────────────────────┴─────────────┴────────────┴─────┴────────────┴─────────┴──────────┴───────────┴───────┴──────
//!  1296                                   1552     1560                  1584     1600     1604   1608     2112
//!  ├──────────────────────────────────────┼────────┼─────────────────────┼────────┼────────┼──────┼────────┼──────
//!  │ eight parts: at, table len, zones len│        │ state, zero, number │        │ pin len│ zero │  pin   │
//!  └──────────────────────────────────────┴────────┴─────────────────────┴────────┴────────┴──────┴────────┴──────
//!  2112                                               2152             2168                           2208 2212 2216
//!  ├──────────────────────────────────────────────────┼────────────────┼──────────────────────────────┼────┼────┼──────
//!  │ session: id of the cache, number, its generation │ fast: at, len  │ id of the medium, number, gen│ len│zero│ name
//!  └──────────────────────────────────────────────────┴────────────────┴──────────────────────────────┴────┴────┴──────
//!  2728            2744
//!  ├───────────────┼──────
//!  │ keys: at, len │ zero
//!  └───────────────┴──────
//! ```
//!
//! 1. [`Superblock::parse`] is the only way in. After it no region exceeds its limits or overlaps another
//!    one, no allocation that follows from these sizes exceeds its limit, and no unknown incompatible feature
//!    is left.
//! 2. The copy with a good CRC and the higher sequence counts, whatever else it says. When it asks for
//!    something that is not supported, the older copy is not used instead.
//! 3. A change is written over the copy that does not count. A torn write therefore leaves the one that does.
//! 4. Bytes that this program does not know are kept.

use vellum_core::pin::Pin;
use vellum_core::{BlockSize, Buffer, Context, Error, ImageOffset, Result, Storage};

use super::geometry::{Layout, Places, Region, Shape};
use super::parts::{PARTS_MAX, Part, Parts};
use crate::bytes::{be32, be64, put32, put64};
use crate::handover::Handover;
use crate::luks::KeyArea;
use crate::session::{CacheId, Session, SessionState};
use crate::truth::reconcile;
use crate::wish::Wish;

/// The first bytes of each copy.
pub(crate) const MAGIC: [u8; 8] = *b"VELLUMv1";
pub(crate) const VERSION: u32 = 1;
/// Bytes of one copy.
pub(crate) const SUPERBLOCK_LEN: usize = 4096;

mod fast;
mod features;
mod texts;

use fast::Fast;
use features::{compatible, incompatible};
use texts::{base, pin, put_text};

mod field {
    use crate::fast::FAST_NAME_MAX;

    pub(super) const CRC: usize = 8;
    pub(super) const VERSION: usize = 12;
    pub(super) const SEQUENCE: usize = 16;
    pub(super) const UUID: usize = 24;
    pub(super) const INCOMPATIBLE: usize = 40;
    pub(super) const COMPATIBLE: usize = 48;
    pub(super) const LAYOUT: usize = 56;
    pub(super) const BLOCK_SHIFT: usize = 60;
    pub(super) const UNIT_SHIFT: usize = 61;
    pub(super) const ZONE_SHIFT: usize = 62;
    pub(super) const SWITCHES: usize = 63;
    pub(super) const SIZE: usize = 64;
    pub(super) const BASE_BYTES: usize = 72;
    pub(super) const REGIONS: usize = 80;
    pub(super) const DATA_OFFSET: usize = 176;
    pub(super) const GENERATION: usize = 184;
    pub(super) const KEY: usize = 192;
    pub(super) const NAME_LEN: usize = 216;
    pub(super) const FORMAT_LEN: usize = 220;
    pub(super) const ZONES: usize = 224;
    pub(super) const NAME: usize = 256;
    pub(super) const FORMAT: usize = 1280;
    pub(super) const PARTS: usize = 1296;
    pub(super) const HANDOVER: usize = 1560;
    /// Length of one part.
    pub(super) const PART_LEN: usize = 32;
    pub(super) const PIN_LEN: usize = 1600;
    pub(super) const PIN: usize = 1608;
    /// Id of the cache, number, generation.
    pub(super) const SESSION: usize = 2112;
    pub(super) const SESSION_GENERATION: usize = SESSION + 32;
    /// Offset and length of the region with bits of units that a fast medium has.
    pub(super) const FAST: usize = 2152;
    pub(super) const FAST_ID: usize = 2168;
    pub(super) const FAST_NUMBER: usize = 2184;
    pub(super) const FAST_GENERATION: usize = 2200;
    pub(super) const FAST_NAME_LEN: usize = 2208;
    pub(super) const FAST_NAME: usize = 2216;
    pub(super) const FAST_END: usize = FAST_NAME + FAST_NAME_MAX;
    /// Offset and length of the region with the keys of an encrypted image.
    pub(super) const KEYS: usize = 2728;
}

/// Longest name of a base, in bytes.
pub(crate) const NAME_MAX: usize = 1023;
/// Longest name of a base's format, in bytes.
pub(crate) const FORMAT_MAX: usize = 15;

/// Bits of the byte of switches.
const NO_EMBEDDING: u8 = 1 << 0;

/// Offset in the superblock of a region's offset and length.
fn place_of(region: Region) -> usize {
    let index = match region {
        Region::Bitmap => 0,
        Region::Masks => 1,
        Region::Table => 2,
        Region::Partials => 3,
        Region::Snapshots => 4,
        Region::Journal => 5,
        Region::Zones => return field::ZONES,
        Region::Fast => return field::FAST,
        Region::Keys => return field::KEYS,
    };
    field::REGIONS + 16 * index
}

/// One of the two copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// At 0.
    A,
    /// At 4096.
    B,
}

impl Slot {
    /// Its offset in the image.
    pub fn offset(self) -> ImageOffset {
        match self {
            Self::A => ImageOffset::ZERO,
            Self::B => ImageOffset::new(SUPERBLOCK_LEN as u64),
        }
    }

    /// The other copy.
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::A => "A",
            Self::B => "B",
        }
    }
}

/// The bytes of one copy. `Debug` leaves them out, because they only clutter a message.
#[derive(Clone)]
struct Page(Box<[u8; SUPERBLOCK_LEN]>);

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Page")
    }
}

/// The base (backing image), as this image records it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// Its name.
    pub name: String,
    /// Its format, if one is recorded.
    pub format: Option<String>,
}

impl Base {
    /// Whether it can be recorded.
    fn check(&self) -> Result<()> {
        let format = self.format.as_deref().unwrap_or("");
        if self.name.is_empty() || self.name.len() > NAME_MAX || self.name.contains('\0') {
            return Err(Error::invalid(format!(
                "the base's name must have 1 to {NAME_MAX} bytes, none of them zero"
            )));
        }
        if format.len() > FORMAT_MAX || format.contains('\0') {
            return Err(Error::invalid(format!(
                "the name of the base's format is longer than {FORMAT_MAX} bytes"
            )));
        }
        Ok(())
    }
}

/// A superblock whose every field has been checked.
#[derive(Debug, Clone)]
pub struct Superblock {
    /// The page as it was read, so that unknown bytes are kept.
    page: Page,
    /// Increases by one with each change.
    pub(crate) sequence: u64,
    uuid: [u8; 16],
    /// Sizes and places.
    pub(crate) places: Places,
    base: Option<Base>,
    pin: Option<Pin>,
    /// The journal's generation. It increases by one with each opening that changes the image.
    pub(crate) generation: u64,
    /// The journal's key, while the journal is in use.
    pub(crate) key: Option<u128>,
    /// Whether the image has snapshots, or has had any.
    pub(crate) has_snapshots: bool,
    /// Whether clones stand on snapshots of the image, or have stood.
    pub(crate) has_clones: bool,
    /// Whether units of zones may hold their own entries.
    pub(crate) embeds: bool,
    /// What it asks of the program that serves it.
    pub(crate) wish: Wish,
    /// What it records of a migration.
    pub(crate) handover: Option<Handover>,
    /// The session with a flash cache that it names.
    session: Option<Session>,
    /// The generation in which it counts.
    session_generation: u64,
    /// The fast medium that it names.
    fast: Option<Fast>,
    pub(crate) has_moved: bool, // the fast medium may be the only one that has a unit
}

impl Superblock {
    /// The first superblock of a new image.
    pub(crate) fn new(places: Places, base: Option<Base>, uuid: [u8; 16]) -> Result<Self> {
        base.as_ref().map_or(Ok(()), Base::check)?;
        if base.is_some() != places.shape().base_bytes.is_some() {
            return Err(Error::invalid("a base needs a size, and a size needs a base"));
        }
        Ok(Self {
            page: Page(Box::new([0; SUPERBLOCK_LEN])),
            sequence: 1,
            uuid,
            places,
            base,
            pin: None,
            generation: 0,
            key: None,
            has_snapshots: false,
            has_clones: false,
            embeds: places.shape().zone().is_some() && places.region(Region::Keys).is_empty(),
            wish: Wish::default(),
            handover: None,
            session: None,
            session_generation: 0,
            fast: None,
            has_moved: false,
        })
    }

    /// Checks the bytes of one copy.
    ///
    /// # Errors
    /// `Corrupt` when the CRC is wrong or a field has an impossible value. `Unsupported` for a version,
    /// layout or feature that this program does not have.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let page: Box<[u8; SUPERBLOCK_LEN]> = match bytes.get(..SUPERBLOCK_LEN).map(<[u8]>::to_vec) {
            Some(page) => page.into_boxed_slice().try_into().expect("one page"),
            None => return Err(Error::corrupt("the superblock is incomplete")),
        };
        check_seal(&*page)?;
        let version = be32(&*page, field::VERSION);
        if version != VERSION {
            return Err(Error::unsupported(format!(
                "version {version} of the format is not supported (1 is)"
            )));
        }
        let features = be64(&*page, field::INCOMPATIBLE);
        refuse_unknown_features(features)?;
        let shape = shape(&*page, features)?;
        shape.check().map_err(|error| error.with_kind(vellum_core::ErrorKind::Corrupt))?;
        let mut regions = [ImageOffset::ZERO.span(0); 9];
        let is_encrypted = features & incompatible::ENCRYPTED != 0;
        // A medium that this program could not use may be ignored: its bits become void with the first change.
        let has_fast = be64(&*page, field::COMPATIBLE) & compatible::FAST != 0 && !is_encrypted;
        let has_zones = shape.zone().is_some();
        let is_there = |region: &Region| match region {
            Region::Zones => has_zones,
            Region::Fast => has_fast,
            Region::Keys => is_encrypted,
            _ => true,
        };
        for region in Region::ALL.into_iter().filter(is_there) {
            let at = place_of(region);
            let span =
                vellum_core::ImageSpan::checked(ImageOffset::new(be64(&*page, at)), be64(&*page, at + 8));
            regions[region as usize] =
                span.ok_or_else(|| Error::corrupt(format!("the {} cannot lie there", region.name())))?;
        }
        let data_offset = ImageOffset::new(be64(&*page, field::DATA_OFFSET));
        let has_parts = features & incompatible::PARTS != 0;
        let parts = if has_parts { parts(&*page) } else { [Part::NONE; PARTS_MAX] };
        let places = Places::checked(shape, regions, data_offset, parts)?;
        if has_parts && places.parts().next().is_none() {
            return Err(Error::corrupt("the superblock lists parts of a table, but there is no table"));
        }
        let base = match features & incompatible::BASE {
            0 => None,
            _ => Some(base(&*page)?),
        };
        let pin = match base {
            None => None, // older programs leave the pin of a base that they remove
            Some(_) => pin(&*page)?,
        };
        let key = u128::from(be64(&*page, field::KEY)) << 64 | u128::from(be64(&*page, field::KEY + 8));
        let fast = if has_fast { Some(Fast::parse(&*page)?) } else { None };
        if has_fast && places.region(Region::Fast).is_empty() {
            return Err(Error::corrupt("it names a fast medium, and has no bits of units there"));
        }
        if !is_encrypted && be64(&*page, field::KEYS + 8) != 0 {
            return Err(Error::corrupt("it has keys, and is not marked as encrypted"));
        }
        if is_encrypted && places.region(Region::Keys).is_empty() {
            return Err(Error::corrupt("it is encrypted, and has no keys"));
        }
        let superblock = Self {
            sequence: be64(&*page, field::SEQUENCE),
            uuid: page[field::UUID..field::UUID + 16].try_into().expect("sixteen bytes"),
            places,
            base,
            pin,
            generation: be64(&*page, field::GENERATION),
            key: (features & incompatible::REPLAY != 0).then_some(key),
            has_snapshots: features & incompatible::SNAPSHOTS != 0,
            has_clones: features & incompatible::CLONED != 0,
            embeds: has_zones && page[field::SWITCHES] & NO_EMBEDDING == 0,
            wish: Wish::of(be64(&*page, field::COMPATIBLE), compatible::COPY_ON_READ, compatible::PREFETCH),
            handover: Handover::parse(
                page[field::HANDOVER..field::HANDOVER + Handover::BYTES].try_into().expect("24 bytes"),
                features & incompatible::HANDOVER != 0,
            )?,
            session: Session::parse(
                page[field::SESSION..field::SESSION + Session::BYTES].try_into().expect("32 bytes"),
                be64(&*page, field::SESSION_GENERATION) == be64(&*page, field::GENERATION),
                features & incompatible::HOLDS_WRITES != 0,
            )?,
            session_generation: be64(&*page, field::SESSION_GENERATION),
            fast,
            has_moved: features & incompatible::MOVED != 0,
            page: Page(page),
        };
        if (features & incompatible::SESSION != 0) != superblock.counts_without_journal() {
            return Err(Error::corrupt("what it records of a flash cache contradicts its feature bit"));
        }
        // Images that earlier programs did not close lack the bit.
        if features & incompatible::PACKED_OVER_BASE != 0 && !superblock.may_pack_over_base() {
            return Err(Error::corrupt("it has no packed blocks over a base, and the feature bit says so"));
        }
        superblock.check_rest(key)?;
        Ok(superblock)
    }

    fn check_rest(&self, key: u128) -> Result<()> {
        let contradictions = [
            (self.key.is_none() && key != 0, "the journal has a key but is not in use"),
            (self.key == Some(0), "the journal is in use but has no key"),
            (
                self.key.is_some() && self.places.region(Region::Journal).is_empty(),
                "the journal is marked as in use, but there is none",
            ),
            (
                self.has_snapshots && self.places.shape().layout == Layout::Linear,
                "a linear image cannot have snapshots, but the superblock lists some",
            ),
            (
                self.has_clones && !self.has_snapshots,
                "there are clones of snapshots, but there has been no snapshot",
            ),
            (
                self.embeds && self.is_encrypted(),
                "it is encrypted, and its units may hold their own entries, which no encrypted image has",
            ),
            (self.has_moved && self.is_encrypted(), "it is encrypted, and units are on a fast medium alone"),
            (self.has_moved && self.fast.is_none(), "units are on a fast medium alone, and none is named"),
            (self.sequence == 0 || self.sequence == u64::MAX, "the sequence is impossible"),
            (self.generation == u64::MAX, "the generation is impossible"),
        ];
        match contradictions.iter().find(|(is_so, _)| *is_so) {
            Some((_, what)) => Err(Error::corrupt(*what)),
            None => Ok(()),
        }
    }

    /// Whether packed blocks alone may tell of parts of the base that the image has. That ends with a recovery or a close.
    fn may_pack_over_base(&self) -> bool {
        self.key.is_some() && self.embeds && self.base.is_some()
    }

    /// Refuses an image that was truncated.
    pub fn check_against(&self, storage: &dyn Storage) -> Result<()> {
        let end = match self.places.shape().layout {
            // A device must have room for all of it. A file can grow.
            Layout::Linear if storage.limits().fixed_len => {
                self.places.data_offset() + self.places.shape().size
            }
            _ => self.places.end_of_parts().unwrap_or(self.places.data_offset()),
        };
        if storage.len() < end.bytes() {
            return Err(Error::corrupt(format!(
                "{} is {} bytes long but must have {}: it was truncated",
                storage.name(),
                storage.len(),
                end.bytes()
            )));
        }
        Ok(())
    }

    /// The bytes to write to the medium.
    pub(crate) fn encode(&self) -> Buffer {
        let mut page = self.page.clone();
        let bytes = &mut page.0[..];
        let Shape { size, layout, block, base_bytes } = self.places.shape();
        let mut features = 0;
        for (is_set, bit) in [
            (self.key.is_some(), incompatible::REPLAY),
            (layout.has_table(), incompatible::TABLE),
            (matches!(layout, Layout::Zoned { .. }), incompatible::ZONED),
            (self.is_encrypted(), incompatible::ENCRYPTED),
            (self.base.is_some(), incompatible::BASE),
            (self.has_snapshots, incompatible::SNAPSHOTS),
            (self.has_clones, incompatible::CLONED),
            (self.places.parts().next().is_some(), incompatible::PARTS),
            (self.handover.is_some_and(|handover| !handover.allows_writing()), incompatible::HANDOVER),
            (self.session.is_some_and(|session| session.holds_writes()), incompatible::HOLDS_WRITES),
            (self.counts_without_journal(), incompatible::SESSION),
            (self.has_moved, incompatible::MOVED),
            (self.may_pack_over_base(), incompatible::PACKED_OVER_BASE),
        ] {
            features |= if is_set { bit } else { 0 };
        }
        let (layout, unit_shift, zone_shift) = match layout {
            Layout::Linear => (0, 0, 0),
            Layout::Table(unit) => (1, unit.shift(), 0),
            Layout::Zoned { unit, zone } => (2, unit.shift(), zone.shift()),
        };
        bytes[..8].copy_from_slice(&MAGIC);
        put32(bytes, field::VERSION, VERSION);
        put64(bytes, field::SEQUENCE, self.sequence);
        bytes[field::UUID..field::UUID + 16].copy_from_slice(&self.uuid);
        put64(bytes, field::INCOMPATIBLE, features);
        let ours = compatible::COPY_ON_READ | compatible::PREFETCH | compatible::FAST;
        let others = be64(bytes, field::COMPATIBLE) & !ours;
        let others = if self.fast.is_some() { others | compatible::FAST } else { others };
        let wish = if self.base.is_some() { self.wish } else { Wish::default() };
        let wished = wish.bits(compatible::COPY_ON_READ, compatible::PREFETCH);
        put64(bytes, field::COMPATIBLE, others | wished);
        put32(bytes, field::LAYOUT, layout);
        bytes[field::BLOCK_SHIFT] = u8::try_from(block.shift()).expect("at most 20");
        bytes[field::UNIT_SHIFT] = u8::try_from(unit_shift).expect("at most 21");
        if zone_shift != 0 {
            bytes[field::ZONE_SHIFT] = u8::try_from(zone_shift).expect("at most 26");
            let others = bytes[field::SWITCHES] & !NO_EMBEDDING;
            bytes[field::SWITCHES] = if self.embeds { others } else { others | NO_EMBEDDING };
        }
        put64(bytes, field::SIZE, size);
        put64(bytes, field::BASE_BYTES, base_bytes.unwrap_or(0));
        for region in Region::ALL {
            let span = self.places.region(region);
            if matches!(region, Region::Zones | Region::Fast | Region::Keys) && span.is_empty() {
                continue; // an image without them leaves these bytes as they are
            }
            put64(bytes, place_of(region), span.start().bytes());
            put64(bytes, place_of(region) + 8, span.len());
        }
        put64(bytes, field::DATA_OFFSET, self.places.data_offset().bytes());
        for (index, part) in self.places.parts().enumerate() {
            let at = field::PARTS + index * field::PART_LEN;
            put64(bytes, at, part.at.bytes());
            put64(bytes, at + 8, part.table_len);
            put64(bytes, at + 16, part.zones_len);
        }
        put64(bytes, field::GENERATION, self.generation);
        bytes[field::KEY..field::KEY + 16].copy_from_slice(&self.key.unwrap_or(0).to_be_bytes());
        if let Some(base) = &self.base {
            put_text(bytes, field::NAME_LEN, field::NAME, &base.name);
            put_text(bytes, field::FORMAT_LEN, field::FORMAT, base.format.as_deref().unwrap_or(""));
        }
        if let Some(pin) = &self.pin {
            bytes[field::PIN..field::PIN + Pin::BYTES_MAX].fill(0);
            put_text(bytes, field::PIN_LEN, field::PIN, &pin.to_string());
        }
        bytes[field::HANDOVER..field::HANDOVER + Handover::BYTES]
            .copy_from_slice(&Handover::encode(self.handover));
        let session = self.session.as_ref();
        bytes[field::SESSION..field::SESSION + Session::BYTES]
            .copy_from_slice(&session.map_or([0; Session::BYTES], Session::encode));
        put64(bytes, field::SESSION_GENERATION, session.map_or(0, |_| self.session_generation));
        if let Some(fast) = &self.fast {
            fast.encode(bytes);
        }
        put32(bytes, field::CRC, 0);
        let crc = crc32c::crc32c(bytes);
        put32(bytes, field::CRC, crc);
        Buffer::copy_of(bytes)
    }

    /// Sizes and places.
    pub fn places(&self) -> Places {
        self.places
    }

    /// The size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.places.shape().size
    }

    /// The image's own UUID.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Whether guest data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        !self.places.region(Region::Keys).is_empty()
    }

    /// Where the keys of an encrypted image are.
    pub fn key_area(&self) -> Option<KeyArea> {
        self.is_encrypted().then(|| KeyArea { span: self.places.region(Region::Keys) })
    }

    /// The base, if the image has one.
    pub fn base(&self) -> Option<&Base> {
        self.base.as_ref()
    }

    /// What proves that the base is the one that the image was made over, if the image records it.
    pub fn pin(&self) -> Option<&Pin> {
        self.pin.as_ref()
    }

    /// Records what proves the content of the base.
    pub(crate) fn set_pin(&mut self, pin: Pin) {
        self.pin = Some(pin);
    }

    /// Gives the image another base of the same size, with what proves its content.
    ///
    /// # Errors
    /// `Invalid` for a name that is too long.
    pub(crate) fn set_base(&mut self, base: Base, pin: Option<Pin>) -> Result<()> {
        base.check()?;
        self.clear_base();
        self.base = Some(base);
        self.pin = pin;
        Ok(())
    }

    /// The texts, which may be longer than those that replace them.
    fn clear_base(&mut self) {
        for (len, bytes) in [
            (field::PIN_LEN, field::PIN..field::PIN + Pin::BYTES_MAX),
            (field::NAME_LEN, field::NAME..field::NAME + NAME_MAX),
            (field::FORMAT_LEN, field::FORMAT..field::FORMAT + FORMAT_MAX),
        ] {
            put32(&mut self.page.0[..], len, 0);
            self.page.0[bytes].fill(0);
        }
    }

    /// Removes the base, and the regions that only an image over a base has.
    pub(crate) fn detach(&mut self) -> Result<()> {
        self.places = self.places.without_base()?;
        self.base = None;
        self.pin = None;
        self.clear_base();
        Ok(())
    }

    /// Whether the journal holds changes that must be replayed first.
    pub fn needs_replay(&self) -> bool {
        self.key.is_some()
    }

    /// Whether the first write of a unit may embed the unit's entry.
    pub fn embeds(&self) -> bool {
        self.embeds
    }

    /// The session with a flash cache that it names.
    pub fn session(&self) -> Option<Session> {
        self.session
    }

    /// Names a session, or none.
    pub(crate) fn set_session(&mut self, session: Option<Session>) {
        self.session = session;
        self.session_generation = self.generation;
    }

    /// A new generation, for an opening that changes the image with this flash cache, or with none. A session that does
    /// not outlive that is void.
    pub(crate) fn draw_generation(&mut self, flash: Option<CacheId>) {
        self.generation += 1;
        match &mut self.session {
            Some(session) if session.survives_changes_of(flash) => self.session_generation = self.generation,
            Some(session) => session.state = SessionState::Void,
            None => {}
        }
    }

    /// Whether nothing but this program makes the session void: an older one would draw no generation.
    fn counts_without_journal(&self) -> bool {
        self.session.is_some_and(|session| session.counts()) && self.places.region(Region::Journal).is_empty()
    }

    /// Whether the image has snapshots, or has had any.
    pub fn has_snapshots(&self) -> bool {
        self.has_snapshots
    }

    /// Whether clones stand on snapshots of the image, or have stood.
    pub fn has_clones(&self) -> bool {
        self.has_clones
    }

    /// The error for an image that must be recovered before it can be inspected.
    pub fn replay_first(&self, name: &str) -> Error {
        Error::unsupported(format!(
            "the image was not closed, and its journal must be replayed first: run `vellum recover {name}`"
        ))
    }
}

/// The superblock that counts, and the state of the other copy.
#[derive(Debug, Clone)]
pub struct Superblocks {
    /// The one that counts.
    pub superblock: Superblock,
    /// Where it lies.
    pub slot: Slot,
    /// Why the other copy is not readable, if it is not.
    pub other_is_bad: Option<Error>,
}

impl Superblocks {
    /// Reads both copies and chooses one. On a writable storage they are reconciled first: what is read is on
    /// the medium, or will be after the next successful flush.
    ///
    /// # Errors
    /// `Invalid` when this is no image of this format, `Corrupt` when no copy is readable, and as
    /// [`Superblock::parse`].
    pub async fn read(storage: &dyn Storage) -> Result<Self> {
        reconcile(storage, ImageOffset::ZERO.span(2 * SUPERBLOCK_LEN as u64)).await?;
        let both = storage.read(ImageOffset::ZERO, Buffer::for_overwrite(2 * SUPERBLOCK_LEN)).await?;
        let found = Self::choose(both.slice()).context(|| format!("{} is not usable", storage.name()))?;
        found.superblock.check_against(storage).context(|| format!("{} is not usable", storage.name()))?;
        Ok(found)
    }

    /// Chooses between the two copies in the first 8 KiB of an image.
    pub fn choose(both: &[u8]) -> Result<Self> {
        let (a, b) =
            both.split_at_checked(SUPERBLOCK_LEN).ok_or_else(|| Error::corrupt("the file is too short"))?;
        let b = b.get(..SUPERBLOCK_LEN).ok_or_else(|| Error::corrupt("the file is too short"))?;
        let is_magic = |page: &[u8]| page.starts_with(&MAGIC);
        if !is_magic(a) && !is_magic(b) {
            return Err(Error::invalid("not a vellum image: it does not begin with the magic number"));
        }
        let (page, slot, other_is_bad) = match (check_seal(a), check_seal(b)) {
            (Err(error), Err(_)) => return Err(error.context("both copies of the superblock are damaged")),
            (Ok(()), Err(error)) => (a, Slot::A, Some(error)),
            (Err(error), Ok(())) => (b, Slot::B, Some(error)),
            (Ok(()), Ok(())) => match be64(a, field::SEQUENCE).cmp(&be64(b, field::SEQUENCE)) {
                std::cmp::Ordering::Equal if a != b => {
                    return Err(Error::corrupt(
                        "both copies of the superblock claim to be the newest, but they differ",
                    ));
                }
                std::cmp::Ordering::Less => (b, Slot::B, None),
                _ => (a, Slot::A, None),
            },
        };
        Ok(Self { superblock: Superblock::parse(page)?, slot, other_is_bad })
    }

    /// Writes the changed `superblock` over the copy that does not count. From then on it is the one that
    /// counts. The caller flushes.
    ///
    /// # Errors
    /// The error of the storage. The copy that counted before is unchanged.
    pub async fn write(&mut self, storage: &dyn Storage) -> Result<()> {
        let mut next = self.superblock.clone();
        next.sequence += 1;
        storage.write(self.slot.other().offset(), next.encode()).await?;
        *self = Self { superblock: next, slot: self.slot.other(), other_is_bad: None };
        Ok(())
    }
}

/// Checks that the page is a complete superblock, of any version.
fn check_seal(page: &[u8]) -> Result<()> {
    if !page.starts_with(&MAGIC) {
        return Err(Error::corrupt("a copy of the superblock does not begin with the magic number"));
    }
    let mut copy = page.to_vec();
    put32(&mut copy, field::CRC, 0);
    if crc32c::crc32c(&copy) != be32(page, field::CRC) {
        return Err(Error::corrupt("a copy of the superblock is damaged: its CRC32C is wrong"));
    }
    Ok(())
}

fn refuse_unknown_features(bits: u64) -> Result<()> {
    let unknown = bits & !incompatible::KNOWN;
    if unknown == 0 {
        return Ok(());
    }
    let list: Vec<String> =
        (0..64).filter(|bit| unknown >> bit & 1 == 1).map(|bit| bit.to_string()).collect();
    Err(Error::unsupported(format!(
        "the image needs features that this program does not support: incompatible bit {}",
        list.join(", ")
    )))
}

fn shape(page: &[u8], features: u64) -> Result<Shape> {
    let (block_shift, unit_shift) = (u32::from(page[field::BLOCK_SHIFT]), u32::from(page[field::UNIT_SHIFT]));
    let layout = match (be32(page, field::LAYOUT), unit_shift) {
        (0, 0) => Layout::Linear,
        (1, 16..=21) => Layout::Table(BlockSize::from_shift(unit_shift)),
        (2, 16..=21) => {
            let zone_shift = u32::from(page[field::ZONE_SHIFT]);
            if !(17..=26).contains(&zone_shift) {
                return Err(Error::corrupt(format!("zones of 2^{zone_shift} bytes are impossible")));
            }
            Layout::Zoned { unit: BlockSize::from_shift(unit_shift), zone: BlockSize::from_shift(zone_shift) }
        }
        (0..=2, _) => {
            return Err(Error::corrupt(format!("units of 2^{unit_shift} bytes are impossible here")));
        }
        (other, _) => return Err(Error::unsupported(format!("layout {other} is not known"))),
    };
    let is_zoned = matches!(layout, Layout::Zoned { .. });
    if layout.has_table() != (features & incompatible::TABLE != 0)
        || is_zoned != (features & incompatible::ZONED != 0)
    {
        return Err(Error::corrupt("the layout and its feature bit contradict each other"));
    }
    if !(12..=20).contains(&block_shift) {
        return Err(Error::corrupt(format!("blocks of 2^{block_shift} bytes are impossible")));
    }
    let has_base = features & incompatible::BASE != 0;
    let base_bytes = be64(page, field::BASE_BYTES);
    if !has_base && (base_bytes, be32(page, field::NAME_LEN), be32(page, field::FORMAT_LEN)) != (0, 0, 0) {
        return Err(Error::corrupt("there is no base, but a size or a name for it"));
    }
    Ok(Shape {
        size: be64(page, field::SIZE),
        layout,
        block: BlockSize::from_shift(block_shift),
        base_bytes: has_base.then_some(base_bytes),
    })
}

fn parts(page: &[u8]) -> Parts {
    std::array::from_fn(|index| {
        let at = field::PARTS + index * field::PART_LEN;
        let [at, table_len, zones_len] = [0, 8, 16].map(|field| be64(page, at + field));
        Part { at: ImageOffset::new(at), table_len, zones_len }
    })
}

#[cfg(test)]
mod tests;
