//! The header: 592 bytes, big-endian, read as untrusted.
//!
//! ```text
//!     0  magic, version            6 + 2    "LUKS" BA BE, 1
//!     8  cipher, mode, hash        3 × 32   "aes", "xts-plain64", "sha256", padded with zeros
//!   104  payload                   4        where the data begins, in sectors
//!   108  key length                4        in bytes
//!   112  digest, salt, iterations  20+32+4  by which the right key is known
//!   168  UUID                      40       text
//!   208  8 slots of 48 bytes: state, iterations 4 + 4 │ salt 32 │ key material, in sectors 4 │ stripes 4
//!
//!   header │ material of slot 0 │ … │ of slot 7 │ payload            each aligned to 4 KiB where it is made here
//! ```
//!
//! 1. After [`Header::parse`] the cipher is one that can be read, the material of each slot has its own place behind
//!    the header and in front of the payload, and no count of iterations takes longer than minutes.
//! 2. Where a secret is tried on all slots, that takes no longer than minutes either ([`Header::check_work`]); a header
//!    that would take longer is not made.
//! 3. A raw image has its data from the payload on. Inside a qcow2 image the header and the material are a part of
//!    it, and the payload's place means only their end.

use vellum_core::{Context, Error, Result};
use zeroize::Zeroizing;

use crate::kdf::Hash;
use crate::sector::{IvRule, Mode};
use crate::{Chance, MasterKey, SECTOR};

/// What a header begins with.
pub const MAGIC: &[u8; 6] = b"LUKS\xBA\xBE";
/// Bytes of a header.
pub const HEADER_LEN: usize = 592;
/// Key slots of a header.
pub const SLOTS: usize = 8;

/// The number of parts that a key is spread over: the only one that any program uses.
pub(crate) const STRIPES: usize = 4000;
/// Places are multiples of this in a header that is made here, in sectors.
const ALIGNMENT: u32 = 8;
/// More iterations are refused: they would take minutes for each slot.
pub(crate) const ITERATIONS_MAX: u32 = 100_000_000;
/// All active slots take at most so many iterations, each counted for every piece of a key that the hash makes.
pub(crate) const WORK_MAX: u64 = 500_000_000;
/// Fewer are not made.
pub(crate) const ITERATIONS_MIN: u32 = 1000;

const ENABLED: u32 = 0x00AC_71F3;
const DISABLED: u32 = 0x0000_DEAD;

mod field {
    pub(super) const VERSION: usize = 6;
    pub(super) const CIPHER: usize = 8;
    pub(super) const MODE: usize = 40;
    pub(super) const HASH: usize = 72;
    pub(super) const PAYLOAD: usize = 104;
    pub(super) const KEY_LEN: usize = 108;
    pub(super) const DIGEST: usize = 112;
    pub(super) const DIGEST_SALT: usize = 132;
    pub(super) const DIGEST_ITERATIONS: usize = 164;
    pub(super) const UUID: usize = 168;
    pub(super) const SLOTS: usize = 208;
    pub(super) const SLOT_LEN: usize = 48;
    pub(super) const TEXT_LEN: usize = 32;
    pub(super) const UUID_LEN: usize = 40;
}

/// What distinguishes one slot from another.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub(crate) is_active: bool,
    pub(crate) iterations: u32,
    pub(crate) salt: [u8; 32],
    /// Where its material begins, in sectors.
    pub(crate) place: u32,
}

/// A header whose every field has been checked.
#[derive(Debug, Clone)]
pub struct Header {
    pub(crate) mode: Mode,
    pub(crate) hash: Hash,
    pub(crate) payload: u32,
    pub(crate) key_len: usize,
    pub(crate) digest: [u8; 20],
    pub(crate) digest_salt: [u8; 32],
    pub(crate) digest_iterations: u32,
    uuid: String,
    pub(crate) slots: [Slot; SLOTS],
}

/// What a new header is to be.
#[derive(Debug, Clone)]
pub struct NewHeader {
    /// The mode of AES. It must be `xts-plain64`.
    pub mode: Mode,
    /// Bytes of the master key.
    pub key_len: usize,
    /// The hash of everything.
    pub hash: Hash,
    /// Iterations for the digest of the key.
    pub digest_iterations: u32,
}

/// Bytes of the key material of one slot.
pub fn material_len(key_len: usize) -> usize {
    key_len * STRIPES
}

impl NewHeader {
    /// Bytes from the beginning of such a header to the payload.
    pub fn payload(&self) -> u64 {
        u64::from(ALIGNMENT + 8 * self.slot_sectors()) * SECTOR as u64
    }

    fn slot_sectors(&self) -> u32 {
        let sectors = u32::try_from(material_len(self.key_len).div_ceil(SECTOR)).expect("a key is short");
        sectors.next_multiple_of(ALIGNMENT)
    }

    /// A header without any active slot, and the key that it is for, which is drawn from `chance`.
    ///
    /// # Errors
    /// `Invalid` for a mode that is only read, or a key of another length than it takes, and the errors of `chance`.
    pub fn make(&self, chance: &mut Chance<'_>) -> Result<(Header, MasterKey)> {
        if self.mode != Mode::Xts(IvRule::Plain64) || !self.mode.key_lens().contains(&self.key_len) {
            return Err(Error::invalid(format!(
                "no image is encrypted with aes-{} and a key of {} bits: use xts-plain64 with aes-256 or aes-128",
                self.mode.name(),
                self.key_len * 8
            )));
        }
        let mut key = Zeroizing::new(vec![0; self.key_len]);
        chance(&mut key)?;
        let (mut digest_salt, mut uuid) = ([0; 32], [0; 16]);
        chance(&mut digest_salt)?;
        chance(&mut uuid)?;
        let digest_iterations = self.digest_iterations.clamp(ITERATIONS_MIN, ITERATIONS_MAX);
        let derived = self.hash.derive(&key, &digest_salt, digest_iterations, 20);
        let slot = |index: u32| Slot {
            is_active: false,
            iterations: 0,
            salt: [0; 32],
            place: ALIGNMENT + index * self.slot_sectors(),
        };
        let header = Header {
            mode: self.mode,
            hash: self.hash,
            payload: u32::try_from(self.payload() / SECTOR as u64).expect("short"),
            key_len: self.key_len,
            digest: derived[..].try_into().expect("20 bytes"),
            digest_salt,
            digest_iterations,
            uuid: uuid_text(uuid),
            slots: std::array::from_fn(|index| slot(u32::try_from(index).expect("small"))),
        };
        Ok((header, MasterKey::new(key)))
    }
}

/// The text of a random UUID.
fn uuid_text(mut bytes: [u8; 16]) -> String {
    bytes[6] = bytes[6] & 0x0F | 0x40;
    bytes[8] = bytes[8] & 0x3F | 0x80;
    let mut text = String::new();
    for (index, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn text(bytes: &[u8], at: usize, len: usize, what: &str) -> Result<String> {
    let field = &bytes[at..at + len];
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(len);
    let text =
        std::str::from_utf8(&field[..end]).ok().filter(|text| text.chars().all(|one| one.is_ascii_graphic()));
    text.map(str::to_owned)
        .ok_or_else(|| Error::corrupt(format!("the {what} in the LUKS header is no plain text")))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("within the header")
}

impl Header {
    /// Checks the bytes of a header. More may follow it.
    ///
    /// # Errors
    /// `Corrupt` for a damaged one, `Unsupported` for version 2 and for ciphers that are not here.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() < HEADER_LEN {
            return Err(Error::corrupt(format!("the LUKS header is cut off after {} bytes", bytes.len())));
        }
        if !bytes.starts_with(MAGIC) {
            return Err(Error::corrupt("the LUKS header does not begin with \"LUKS\""));
        }
        match u16::from_be_bytes([bytes[field::VERSION], bytes[field::VERSION + 1]]) {
            1 => {}
            2 => {
                return Err(Error::unsupported(
                    "the image is encrypted with LUKS version 2, whose keys are not listed or changed here: use `cryptsetup \
                     luksDump`, `luksAddKey` and `luksKillSlot`",
                ));
            }
            other => {
                return Err(Error::unsupported(format!(
                    "LUKS version {other} is not supported: version 1 is"
                )));
            }
        }
        let cipher = text(bytes, field::CIPHER, field::TEXT_LEN, "cipher")?;
        if cipher != "aes" {
            return Err(Error::unsupported(format!(
                "the cipher {cipher:?} is not supported: aes is. Convert the image with qemu-img"
            )));
        }
        let mode = Mode::named(&text(bytes, field::MODE, field::TEXT_LEN, "cipher mode")?)?;
        let hash = Hash::named(&text(bytes, field::HASH, field::TEXT_LEN, "hash")?)?;
        let key_len = usize::try_from(be32(bytes, field::KEY_LEN)).unwrap_or(usize::MAX);
        if !mode.key_lens().contains(&key_len) {
            return Err(Error::corrupt(format!(
                "a key of {key_len} bytes is impossible for aes-{}",
                mode.name()
            )));
        }
        let digest_iterations = be32(bytes, field::DIGEST_ITERATIONS);
        check_iterations(digest_iterations, "the digest of the key")?;
        let mut slots = Vec::with_capacity(SLOTS);
        for index in 0..SLOTS {
            slots.push(Slot::parse(bytes, index).context(|| format!("key slot {index} is damaged"))?);
        }
        let header = Self {
            mode,
            hash,
            payload: be32(bytes, field::PAYLOAD),
            key_len,
            digest: array(bytes, field::DIGEST),
            digest_salt: array(bytes, field::DIGEST_SALT),
            digest_iterations,
            uuid: text(bytes, field::UUID, field::UUID_LEN, "UUID")?,
            slots: slots.try_into().expect("eight"),
        };
        header.check_places()?;
        Ok(header)
    }

    fn check_places(&self) -> Result<()> {
        let sectors = material_len(self.key_len).div_ceil(SECTOR) as u64;
        let mut places: Vec<u64> = self.slots.iter().map(|slot| u64::from(slot.place)).collect();
        places.sort_unstable();
        let header = HEADER_LEN.div_ceil(SECTOR) as u64;
        let mut end = header;
        for place in places {
            if place < end {
                return Err(Error::corrupt(
                    "the key material of a LUKS slot overlaps the header or another slot",
                ));
            }
            end = place + sectors;
        }
        if end > u64::from(self.payload) {
            return Err(Error::corrupt("the key material of a LUKS slot overlaps the data"));
        }
        Ok(())
    }

    /// What a secret costs that opens none of the slots: iterations, for each piece of a key that the hash makes.
    fn work(&self) -> u64 {
        self.active_slots().map(|slot| self.work_of(self.slots[slot].iterations)).sum()
    }

    fn work_of(&self, iterations: u32) -> u64 {
        let pieces = |len: usize| len.div_ceil(self.hash.len()) as u64;
        u64::from(iterations) * pieces(self.key_len)
            + u64::from(self.digest_iterations) * pieces(self.digest.len())
    }

    /// Whether a secret can be tried on all slots in some minutes.
    ///
    /// # Errors
    /// `Unsupported` when it cannot.
    pub fn check_work(&self) -> Result<()> {
        if self.work() <= WORK_MAX {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "its {} key slots ask for so many iterations that trying one secret would take very long: remove slots by \
             their number with `vellum key remove --slot N`, or open it with cryptsetup",
            self.active_slots().count()
        )))
    }

    /// Whether one more slot of so many iterations leaves a header that can be opened.
    pub(crate) fn has_room_for_work(&self, iterations: u32) -> bool {
        self.work() + self.work_of(iterations) <= WORK_MAX
    }

    /// The bytes of the header.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, MAGIC);
        put(field::VERSION, &1_u16.to_be_bytes());
        put(field::CIPHER, b"aes");
        put(field::MODE, self.mode.name().as_bytes());
        put(field::HASH, self.hash.name().as_bytes());
        put(field::PAYLOAD, &self.payload.to_be_bytes());
        put(field::KEY_LEN, &u32::try_from(self.key_len).expect("short").to_be_bytes());
        put(field::DIGEST, &self.digest);
        put(field::DIGEST_SALT, &self.digest_salt);
        put(field::DIGEST_ITERATIONS, &self.digest_iterations.to_be_bytes());
        put(field::UUID, self.uuid.as_bytes());
        for (index, slot) in self.slots.iter().enumerate() {
            let at = field::SLOTS + index * field::SLOT_LEN;
            put(at, &if slot.is_active { ENABLED } else { DISABLED }.to_be_bytes());
            put(at + 4, &slot.iterations.to_be_bytes());
            put(at + 8, &slot.salt);
            put(at + 40, &slot.place.to_be_bytes());
            put(at + 44, &u32::try_from(STRIPES).expect("small").to_be_bytes());
        }
        bytes
    }

    /// The mode of AES.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The name of the cipher, as QEMU says it: with the bits of its key.
    pub fn cipher(&self) -> &'static str {
        let halves = if matches!(self.mode, Mode::Xts(_)) { 2 } else { 1 };
        if self.key_len / halves == 16 { "aes-128" } else { "aes-256" }
    }

    /// The hash of the slots and of the digest.
    pub fn hash(&self) -> Hash {
        self.hash
    }

    /// Bytes of the master key.
    pub fn key_len(&self) -> usize {
        self.key_len
    }

    /// The UUID, as text.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Where the data of a raw image begins, in bytes.
    pub fn payload(&self) -> u64 {
        u64::from(self.payload) * SECTOR as u64
    }

    /// Iterations for the digest of the key.
    pub fn digest_iterations(&self) -> u32 {
        self.digest_iterations
    }

    /// The iterations of a slot; nothing, where it holds no key.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn slot_iterations(&self, slot: usize) -> Option<u32> {
        Some(&self.slots[slot]).filter(|slot| slot.is_active).map(|slot| slot.iterations)
    }

    /// The slots that hold a key.
    pub fn active_slots(&self) -> impl Iterator<Item = usize> {
        (0..SLOTS).filter(|slot| self.slots[*slot].is_active)
    }

    /// Where the key material of a slot is: its first byte, and how many there are.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn material(&self, slot: usize) -> (u64, usize) {
        (u64::from(self.slots[slot].place) * SECTOR as u64, material_len(self.key_len))
    }
}

pub(crate) fn check_iterations(iterations: u32, of: &str) -> Result<()> {
    match iterations {
        0 => Err(Error::corrupt(format!("{of} has no iterations"))),
        1..=ITERATIONS_MAX => Ok(()),
        _ => Err(Error::unsupported(format!(
            "{of} has {iterations} iterations, which would take minutes: at most {ITERATIONS_MAX} are accepted"
        ))),
    }
}

impl Slot {
    fn parse(bytes: &[u8], index: usize) -> Result<Self> {
        let at = field::SLOTS + index * field::SLOT_LEN;
        let is_active = match be32(bytes, at) {
            ENABLED => true,
            DISABLED => false,
            other => return Err(Error::corrupt(format!("its state {other:#010x} is impossible"))),
        };
        let stripes = be32(bytes, at + 44);
        if stripes as usize != STRIPES {
            return Err(Error::corrupt(format!("it has {stripes} stripes instead of {STRIPES}")));
        }
        let iterations = be32(bytes, at + 4);
        if is_active {
            check_iterations(iterations, "it")?;
        }
        Ok(Self { is_active, iterations, salt: array(bytes, at + 8), place: be32(bytes, at + 40) })
    }
}
