//! LUKS version 2, which is only read: two copies of a header, each with a checksum and an area of JSON, as untrusted bytes.
//!
//! ```text
//!   0       first copy:   4096 bytes: magic, length, sequence, checksum │ JSON, to the length
//!   length  second copy:  the same, with another magic
//!           key material of the slots, each where its JSON says
//!           the segment: the encrypted disk
//!
//!   first 4096 bytes of a copy, big-endian
//!     0  magic "LUKS" BA BE, or "SKUL" BA BE     6      104  salt of the checksum                64
//!     6  version: 2                              2      168  UUID, text                          40
//!     8  length of the copy                      8      256  where this copy is                   8
//!    16  sequence: the higher one counts         8      448  checksum of the copy, of which       64
//!    72  kind of checksum: "sha256"             32           these 64 bytes are zero
//!
//!   JSON      keyslots   how a key is derived from a secret (PBKDF2, argon2), where its material is, how that is encrypted
//!             digests    by which the right key is known; which slots and segments it is for
//!             segments   where the data is, its cipher, and the size of its sectors
//!             config     what a program must know to use it
//! ```
//!
//! 1. A copy counts only with its checksum. The caller reads both, and takes the one with the higher sequence.
//! 2. After [`Header2::parse`] there is one segment, whose cipher can be read; the material of each slot has its own place
//!    behind the copies and in front of the segment; and deriving a key takes minutes at most, and 4 GiB.
//! 3. A slot that cannot be used (another hash, another kind) says why. The others can be used all the same.
//! 4. What would make the data another one is refused by name: integrity, reencryption, several segments, and all that
//!    the header says a program must know.

use serde_json::Value;
use vellum_core::{Error, Result};
use zeroize::Zeroizing;

use crate::derive::Kdf;
use crate::header::{STRIPES, WORK_MAX};
use crate::kdf::Hash;
use crate::secret::decode_base64;
use crate::sector::{Mode, SectorCipher};
use crate::{MasterKey, SECTOR, Secret};

/// Bytes in front of the JSON.
pub const PREAMBLE_LEN: usize = 4096;
/// The lengths that a copy may have, in bytes; the second copy is behind the first.
pub const COPY_LENS: [u64; 9] =
    [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20];
/// What the copies begin with.
const MAGICS: [&[u8; 6]; 2] = [b"LUKS\xBA\xBE", b"SKUL\xBA\xBE"];
/// More slots are not possible, as in cryptsetup.
const SLOTS_MAX: usize = 32;
/// Digests of other lengths are none that a hash makes.
const DIGEST_LENS: std::ops::RangeInclusive<usize> = 16..=64;
const SALT_LENS: std::ops::RangeInclusive<usize> = 8..=512;

mod field {
    pub(super) const VERSION: usize = 6;
    pub(super) const LEN: usize = 8;
    pub(super) const SEQUENCE: usize = 16;
    pub(super) const CHECKSUM_KIND: usize = 72;
    pub(super) const UUID: usize = 168;
    pub(super) const UUID_LEN: usize = 40;
    pub(super) const PLACE: usize = 256;
    pub(super) const CHECKSUM: usize = 448;
    pub(super) const CHECKSUM_LEN: usize = 64;
}

/// What a copy of the header says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preamble {
    /// Bytes of the copy, with its JSON.
    pub len: u64,
    /// Of two copies the one with the higher number counts.
    pub sequence: u64,
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Preamble {
    /// Checks the first bytes of the copy at this place of the image.
    ///
    /// # Errors
    /// `Corrupt` for anything else, `Unsupported` for another version or checksum.
    pub fn parse(bytes: &[u8], at: u64) -> Result<Self> {
        if bytes.len() < PREAMBLE_LEN {
            return Err(Error::corrupt(format!("the LUKS header is cut off after {} bytes", bytes.len())));
        }
        if !bytes.starts_with(MAGICS[usize::from(at != 0)]) {
            return Err(Error::corrupt(format!("there is no LUKS header at {at}")));
        }
        match u16::from_be_bytes([bytes[field::VERSION], bytes[field::VERSION + 1]]) {
            2 => {}
            other => {
                return Err(Error::unsupported(format!(
                    "LUKS version {other} is not supported: 1 and 2 are"
                )));
            }
        }
        let (len, place) = (be64(bytes, field::LEN), be64(bytes, field::PLACE));
        if !COPY_LENS.contains(&len) || place != at || (at != 0 && at != len) {
            return Err(Error::corrupt(format!(
                "a LUKS header of {len} bytes for {place} is impossible at {at}"
            )));
        }
        let kind = &bytes[field::CHECKSUM_KIND..field::CHECKSUM_KIND + 32];
        if kind.strip_prefix(b"sha256").is_none_or(|rest| rest.iter().any(|byte| *byte != 0)) {
            return Err(Error::unsupported("the checksum of the LUKS header is not sha256"));
        }
        Ok(Self { len, sequence: be64(bytes, field::SEQUENCE) })
    }
}

/// A header whose every field has been checked.
#[derive(Debug, Clone)]
pub struct Header2 {
    sequence: u64,
    uuid: String,
    slots: Vec<Slot2>,
    segment: Segment,
}

/// Where the encrypted disk is, and how it is encrypted.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    /// Its first byte.
    pub at: u64,
    /// Its bytes; to the end of the image, when not given.
    pub len: Option<u64>,
    /// The mode of AES.
    pub mode: Mode,
    /// What one initial vector is for, in bytes.
    pub sector_bytes: usize,
    /// What is added to the number of a sector of 512 bytes.
    iv_tweak: u64,
}

/// A key slot.
#[derive(Debug, Clone)]
pub struct Slot2 {
    /// Its number.
    pub id: u32,
    /// How it is opened, or why it cannot be.
    how: std::result::Result<Way, String>,
}

#[derive(Debug, Clone)]
struct Way {
    /// The first byte of its material.
    at: u64,
    /// Bytes of the key that it holds.
    key_len: usize,
    /// How its material is encrypted.
    mode: Mode,
    slot_key_len: usize,
    split: Hash,
    kdf: Kdf,
    digest: Digest,
}

/// By what the right key is known.
#[derive(Debug, Clone)]
struct Digest {
    kdf: Kdf,
    bytes: Vec<u8>,
}

/// A text of the header as part of a message: not longer than it must be, nor with anything else in it.
fn shown(text: &str) -> String {
    text.chars().take(40).map(|one| if one.is_ascii_graphic() { one } else { '?' }).collect()
}

fn lacks(what: &str) -> Error {
    Error::corrupt(format!("the LUKS header has no usable {what}"))
}

fn text<'a>(value: &'a Value, name: &str) -> Result<&'a str> {
    value.get(name).and_then(Value::as_str).ok_or_else(|| lacks(name))
}

/// A number as JSON has it.
fn small(value: &Value, name: &str) -> Result<u32> {
    let number = value.get(name).and_then(Value::as_u64).and_then(|number| u32::try_from(number).ok());
    number.ok_or_else(|| lacks(name))
}

/// A number of 64 bits, which is a text.
fn large(value: &Value, name: &str) -> Result<u64> {
    text(value, name)?.parse().map_err(|_| lacks(name))
}

fn bytes_of(value: &Value, name: &str, lens: std::ops::RangeInclusive<usize>) -> Result<Vec<u8>> {
    let bytes = decode_base64(text(value, name)?.as_bytes());
    bytes.map(|bytes| bytes.to_vec()).filter(|bytes| lens.contains(&bytes.len())).ok_or_else(|| lacks(name))
}

fn members<'a>(value: &'a Value, name: &str) -> Result<&'a serde_json::Map<String, Value>> {
    value.get(name).and_then(Value::as_object).ok_or_else(|| lacks(name))
}

fn names<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = &'a str> {
    value.get(name).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

/// As above, where what is no list of names could hide something that must be known.
fn all_names<'a>(value: &'a Value, name: &str) -> Result<Vec<&'a str>> {
    let Some(list) = value.get(name) else { return Ok(Vec::new()) };
    let names = list.as_array().and_then(|names| names.iter().map(Value::as_str).collect());
    names.ok_or_else(|| Error::corrupt(format!("the {name} in the LUKS header are not a list of names")))
}

fn mode(value: &Value) -> Result<Mode> {
    let cipher = text(value, "encryption")?;
    let unsupported =
        || Error::unsupported(format!("the cipher {:?} is not supported: aes-xts-plain64 is", shown(cipher)));
    Mode::named(cipher.strip_prefix("aes-").ok_or_else(unsupported)?).map_err(|_| unsupported())
}

fn key_len(value: &Value, mode: Mode) -> Result<usize> {
    let len = small(value, "key_size")? as usize;
    match mode.key_lens().contains(&len) {
        true => Ok(len),
        false => Err(Error::corrupt(format!("a key of {len} bytes is impossible for aes-{}", mode.name()))),
    }
}

impl Header2 {
    /// Checks a copy of the header, all of its bytes, which are at this place of the image.
    ///
    /// # Errors
    /// `Corrupt` for a damaged one, `Unsupported` for what is not read here.
    pub fn parse(bytes: &[u8], at: u64) -> Result<Self> {
        let preamble = Preamble::parse(bytes, at)?;
        if bytes.len() as u64 != preamble.len {
            return Err(Error::corrupt(format!("the LUKS header is cut off after {} bytes", bytes.len())));
        }
        if checksum(bytes) != bytes[field::CHECKSUM..field::CHECKSUM + 32] {
            return Err(Error::corrupt(format!("the checksum of the LUKS header at {at} is wrong")));
        }
        let json = bytes[PREAMBLE_LEN..].split(|byte| *byte == 0).next().unwrap_or_default();
        let json: Value = serde_json::from_slice(json)
            .map_err(|error| Error::corrupt(format!("the LUKS header at {at} is not valid JSON: {error}")))?;
        refuse_requirements(&json)?;
        let segment = Segment::of(&json, preamble.len)?;
        let slots = members(&json, "keyslots")?;
        if slots.len() > SLOTS_MAX {
            return Err(Error::corrupt(format!("{} key slots are impossible", slots.len())));
        }
        let mut all = Vec::new();
        for (name, slot) in slots {
            let id = name.parse().ok().filter(|id| (*id as usize) < SLOTS_MAX);
            let id = id.ok_or_else(|| lacks("number of a key slot"))?;
            let how = Way::of(&json, name, slot, &segment).map_err(|error| error.chain());
            all.push(Slot2 { id, how });
        }
        all.sort_by_key(|slot| slot.id);
        let uuid = &bytes[field::UUID..field::UUID + field::UUID_LEN];
        let uuid = uuid.split(|byte| *byte == 0).next().unwrap_or_default();
        let header = Self {
            sequence: preamble.sequence,
            uuid: shown(&String::from_utf8_lossy(uuid)),
            slots: all,
            segment,
        };
        header.check_places(preamble.len)?;
        Ok(header)
    }

    fn check_places(&self, copy_len: u64) -> Result<()> {
        let mut places: Vec<(u64, u64)> =
            self.slots.iter().filter_map(|slot| slot.how.as_ref().ok()).map(Way::place).collect();
        places.sort_unstable();
        let mut end = 2 * copy_len;
        for (at, len) in places {
            if at < end {
                return Err(Error::corrupt(
                    "the key material of a LUKS slot overlaps the header or another slot",
                ));
            }
            end = at
                .checked_add(len)
                .filter(|end| *end <= self.segment.at)
                .ok_or_else(|| Error::corrupt("the key material of a LUKS slot overlaps the data"))?;
        }
        Ok(())
    }

    /// Of two copies the one with the higher number counts.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The UUID, as text.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Where the encrypted disk is.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// The key slots.
    pub fn slots(&self) -> &[Slot2] {
        &self.slots
    }

    /// The name of the cipher, with the bits of its key.
    pub fn cipher(&self) -> &'static str {
        let halves = if self.segment.mode.is_for_writing() { 2 } else { 1 };
        match self.slots.iter().find_map(|slot| slot.how.as_ref().ok()).map(|way| way.key_len / halves) {
            Some(16) => "aes-128",
            _ => "aes-256",
        }
    }

    /// Whether a secret can be tried on all slots in some minutes.
    ///
    /// # Errors
    /// `Unsupported` when it cannot.
    pub fn check_work(&self) -> Result<()> {
        let ways = self.slots.iter().filter_map(|slot| slot.how.as_ref().ok());
        let work =
            ways.map(|way| way.kdf.work(way.slot_key_len) + way.digest.kdf.work(way.digest.bytes.len()));
        match work.sum::<u64>() <= WORK_MAX {
            true => Ok(()),
            false => Err(Error::unsupported(format!(
                "its {} key slots ask for so much that trying one secret would take very long: remove slots with \
                 `cryptsetup luksKillSlot`",
                self.slots.len()
            ))),
        }
    }
}

/// SHA-256 of a copy, in which the place of the checksum counts as zero.
fn checksum(bytes: &[u8]) -> [u8; 32] {
    let end = field::CHECKSUM + field::CHECKSUM_LEN;
    let zeros = [0; field::CHECKSUM_LEN];
    Hash::sha256_of([&bytes[..field::CHECKSUM], &zeros, &bytes[end..]])
}

/// Puts the checksum into a copy, for tests and for whoever makes bytes up.
pub fn put_checksum(copy: &mut [u8]) {
    let sum = checksum(copy);
    copy[field::CHECKSUM..field::CHECKSUM + field::CHECKSUM_LEN].fill(0);
    copy[field::CHECKSUM..field::CHECKSUM + sum.len()].copy_from_slice(&sum);
}

fn refuse_requirements(json: &Value) -> Result<()> {
    let Some(requirements) = json.get("config").and_then(|config| config.get("requirements")) else {
        return Ok(());
    };
    let is_known = requirements.as_object().map(|_| all_names(requirements, "mandatory"));
    let unknown = || {
        Error::corrupt(
            "the LUKS header does not say what a program must know to use the image: its requirements are not a list of names",
        )
    };
    let needed = is_known.and_then(Result::ok).ok_or_else(unknown)?;
    let Some(name) = needed.first() else { return Ok(()) };
    let name = shown(name);
    let more = match name.contains("reencrypt") {
        true => ": its reencryption is not finished (`cryptsetup reencrypt --resume-only`)",
        false => "",
    };
    Err(Error::unsupported(format!("the image needs {name}, which is not supported{more}")))
}

impl Segment {
    fn of(json: &Value, copy_len: u64) -> Result<Self> {
        let segments = members(json, "segments")?;
        let flags: Result<Vec<_>> = segments.values().map(|segment| all_names(segment, "flags")).collect();
        if flags?.iter().flatten().any(|flag| flag.starts_with("backup-") || *flag == "in-reencryption") {
            return Err(Error::unsupported(
                "the image is being reencrypted, which is not supported: finish it with `cryptsetup reencrypt`",
            ));
        }
        let mut values = segments.values();
        let (Some(segment), None) = (values.next(), values.next()) else {
            return Err(Error::unsupported(format!(
                "the image has {} segments of data, which is not supported: one is",
                segments.len()
            )));
        };
        match text(segment, "type")? {
            "crypt" => {}
            other => {
                return Err(Error::unsupported(format!(
                    "data of the kind {:?} is not supported: crypt is",
                    shown(other)
                )));
            }
        }
        if let Some(integrity) = segment.get("integrity") {
            let kind = integrity.get("type").and_then(Value::as_str).unwrap_or("of unknown kind");
            return Err(Error::unsupported(format!(
                "the data has integrity tags ({}), which are not supported: open it with `cryptsetup open`, and copy the \
                 device that it makes",
                shown(kind)
            )));
        }
        let mode = mode(segment)?;
        let sector_bytes = small(segment, "sector_size")? as usize;
        if ![512, 1024, 2048, 4096].contains(&sector_bytes) {
            return Err(Error::corrupt(format!("sectors of {sector_bytes} bytes are impossible")));
        }
        if sector_bytes != SECTOR && !mode.is_for_writing() {
            return Err(Error::unsupported(format!(
                "aes-{} with sectors of {sector_bytes} bytes is not supported: sectors of {SECTOR} are",
                mode.name()
            )));
        }
        let unit = sector_bytes as u64;
        let at = large(segment, "offset")?;
        let len = match text(segment, "size")? {
            "dynamic" => None,
            _ => Some(large(segment, "size")?),
        };
        let is_possible = at >= 2 * copy_len
            && at.is_multiple_of(SECTOR as u64)
            && len.is_none_or(|len| len.is_multiple_of(unit) && at.checked_add(len).is_some());
        match is_possible {
            true => Ok(Self { at, len, mode, sector_bytes, iv_tweak: large(segment, "iv_tweak")? }),
            false => Err(Error::corrupt("the place of the data in the LUKS header is impossible")),
        }
    }

    /// The cipher of its data.
    ///
    /// # Errors
    /// `Unsupported` for a key of another length than the mode takes.
    pub fn cipher(&self, key: &MasterKey) -> Result<SectorCipher> {
        Ok(SectorCipher::new(self.mode, key)?.of_sectors(self.sector_bytes, self.iv_tweak))
    }
}

impl Way {
    fn of(json: &Value, name: &str, slot: &Value, segment: &Segment) -> Result<Self> {
        match text(slot, "type")? {
            "luks2" => {}
            other => return Err(Error::unsupported(format!("it is of the kind {:?}", shown(other)))),
        }
        let key_len = key_len(slot, segment.mode)?;
        let (split, area) = (slot.get("af").ok_or_else(|| lacks("af"))?, slot.get("area"));
        let area = area.ok_or_else(|| lacks("area"))?;
        if text(split, "type")? != "luks1" || small(split, "stripes")? as usize != STRIPES {
            return Err(Error::unsupported("its key is not spread over 4000 stripes"));
        }
        if text(area, "type")? != "raw" {
            return Err(Error::unsupported("its area is not raw"));
        }
        let slot_mode = mode(area)?;
        let slot_key_len = self::key_len(area, slot_mode)?;
        let way = Self {
            at: large(area, "offset")?,
            key_len,
            mode: slot_mode,
            slot_key_len,
            split: Hash::named(text(split, "hash")?)?,
            kdf: kdf(slot.get("kdf").ok_or_else(|| lacks("kdf"))?)?,
            digest: Digest::of(json, name)?,
        };
        match large(area, "size")? >= way.place().1 {
            true => Ok(way),
            false => Err(Error::corrupt("its area is too small for its key")),
        }
    }

    /// Its material: whole sectors.
    fn place(&self) -> (u64, u64) {
        (self.at, (self.key_len * STRIPES).next_multiple_of(SECTOR) as u64)
    }
}

fn kdf(value: &Value) -> Result<Kdf> {
    let salt = bytes_of(value, "salt", SALT_LENS)?;
    match text(value, "type")? {
        "pbkdf2" => Kdf::pbkdf2(Hash::named(text(value, "hash")?)?, small(value, "iterations")?, salt),
        kind => {
            let numbers = (small(value, "memory")?, small(value, "time")?, small(value, "cpus")?);
            Kdf::argon2(kind, numbers, salt)
        }
    }
}

impl Digest {
    /// That of a slot and of the data.
    fn of(json: &Value, slot: &str) -> Result<Self> {
        let segments = members(json, "segments")?;
        let is_its_own = |digest: &&Value| {
            names(digest, "keyslots").any(|name| name == slot)
                && names(digest, "segments").any(|name| segments.contains_key(name))
        };
        let mut digests = members(json, "digests")?.values().filter(is_its_own);
        let digest = digests.next().ok_or_else(|| Error::unsupported("it is not for the data"))?;
        if text(digest, "type")? != "pbkdf2" {
            return Err(Error::unsupported("its digest is not of the kind pbkdf2"));
        }
        Ok(Self { kdf: kdf(digest)?, bytes: bytes_of(digest, "digest", DIGEST_LENS)? })
    }
}

impl Slot2 {
    /// Where its key material is: its first byte, and how many there are. Nothing, where it cannot be opened.
    pub fn material(&self) -> Option<(u64, usize)> {
        let way = self.how.as_ref().ok()?;
        Some((way.at, usize::try_from(way.place().1).expect("a key is short")))
    }

    /// Why it cannot be opened, if that is so.
    pub fn trouble(&self) -> Option<&str> {
        self.how.as_ref().err().map(String::as_str)
    }

    /// How its key is derived, where it can be opened.
    pub fn kdf(&self) -> Option<&Kdf> {
        self.how.as_ref().ok().map(|way| &way.kdf)
    }

    /// Tries a secret on the slot, which takes as long as it asks for. `None` when it is another one.
    ///
    /// # Errors
    /// `Unsupported` for a slot that cannot be opened, or when there is not enough memory.
    ///
    /// # Panics
    /// When the material is not as long as it must be.
    pub fn open(&self, material: &[u8], secret: &Secret) -> Result<Option<MasterKey>> {
        let way = self.how.as_ref().map_err(|why| Error::unsupported(why.clone()))?;
        assert_eq!(material.len() as u64, way.place().1, "all of the material");
        let derived = way.kdf.derive(secret.bytes(), way.slot_key_len)?;
        let mut stripes = Zeroizing::new(material.to_vec());
        SectorCipher::with_key(way.mode, &derived)?.decrypt(0, &mut stripes);
        let key = way.split.merge(way.key_len, &stripes[..way.key_len * STRIPES]);
        let digest = way.digest.kdf.derive(&key, way.digest.bytes.len())?;
        Ok((digest[..] == way.digest.bytes).then(|| MasterKey::new(key)))
    }
}

#[cfg(test)]
mod tests;
