//! Key slots: opened, filled, cleared.
//!
//! A slot's material is the master key, spread over [`STRIPES`] parts and encrypted, as sectors from 0 on, with what
//! PBKDF2 derives from a secret. Whether a secret was the right one is known by the digest in the header.

use vellum_core::{Error, Result};
use zeroize::Zeroizing;

use crate::header::{Header, ITERATIONS_MAX, ITERATIONS_MIN, SLOTS, STRIPES};
use crate::sector::SectorCipher;
use crate::{Chance, MasterKey, SECTOR, Secret, material_len};

impl Header {
    /// Tries a secret on a slot. Takes as long as its iterations. `None` when the slot is empty or the secret is
    /// another one.
    ///
    /// # Errors
    /// Those of the cipher.
    ///
    /// # Panics
    /// When there is no such slot, or the material is not as long as it must be.
    pub fn open_slot(&self, slot: usize, material: &[u8], secret: &Secret) -> Result<Option<MasterKey>> {
        assert_eq!(material.len(), material_len(self.key_len), "all of the material");
        let slot = &self.slots[slot];
        if !slot.is_active {
            return Ok(None);
        }
        let cipher = self.slot_cipher(&slot.salt, slot.iterations, secret)?;
        let mut stripes = Zeroizing::new(material.to_vec());
        cipher.decrypt(0, &mut stripes);
        let key = self.hash.merge(self.key_len, &stripes);
        let digest = self.hash.derive(&key, &self.digest_salt, self.digest_iterations, self.digest.len());
        Ok((digest[..] == self.digest).then(|| MasterKey::new(key)))
    }

    fn slot_cipher(&self, salt: &[u8], iterations: u32, secret: &Secret) -> Result<SectorCipher> {
        let derived = self.hash.derive(secret.bytes(), salt, iterations, self.key_len);
        SectorCipher::with_key(self.mode, &derived)
    }

    /// Puts the key into a slot, to be opened by this secret. Returns its material, which is to be durable before the
    /// header is written.
    ///
    /// # Errors
    /// `Invalid` when the slot holds a key already, or all slots together would take too long to try, and the errors of
    /// `chance`.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn fill_slot(
        &mut self,
        index: usize,
        key: &MasterKey,
        secret: &Secret,
        iterations: u32,
        chance: &mut Chance<'_>,
    ) -> Result<Vec<u8>> {
        if self.slots[index].is_active {
            return Err(Error::invalid(format!("key slot {index} is in use")));
        }
        let iterations = iterations.clamp(ITERATIONS_MIN, ITERATIONS_MAX);
        if !self.has_room_for_work(iterations) {
            return Err(Error::invalid(format!(
                "with {iterations} iterations in slot {index} too, trying a secret on all slots would take too long: \
                 choose a shorter time for it, or remove another slot"
            )));
        }
        let mut salt = [0; 32];
        chance(&mut salt)?;
        let mut stripes = Zeroizing::new(vec![0; self.key_len * STRIPES]);
        chance(&mut stripes)?;
        self.hash.split(key.bytes(), &mut stripes);
        self.slot_cipher(&salt, iterations, secret)?.encrypt(0, &mut stripes);
        let slot = &mut self.slots[index];
        (slot.is_active, slot.iterations, slot.salt) = (true, iterations, salt);
        Ok(std::mem::take(&mut *stripes))
    }

    /// Marks a slot as empty. Its material is to be overwritten once that is durable.
    ///
    /// # Errors
    /// `Invalid` for a slot that is empty, or the last one that holds the key: without it the data is lost.
    pub fn clear_slot(&mut self, index: usize) -> Result<()> {
        if !self.slots.get(index).is_some_and(|slot| slot.is_active) {
            return Err(Error::invalid(format!("there is no key in slot {index}")));
        }
        if self.active_slots().count() == 1 {
            return Err(Error::invalid(format!(
                "slot {index} holds the last key: without it nobody can read the image any more. Add another key first"
            )));
        }
        let slot = &mut self.slots[index];
        (slot.is_active, slot.iterations, slot.salt) = (false, 0, [0; 32]);
        Ok(())
    }

    /// The first slot without a key.
    pub fn free_slot(&self) -> Option<usize> {
        (0..SLOTS).find(|slot| !self.slots[*slot].is_active)
    }
}

// Of each key that is accepted the material is whole sectors.
const _: () = assert!((16 * STRIPES).is_multiple_of(SECTOR));

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "patterns of small numbers")]
mod tests {
    use vellum_core::{ErrorKind, Random};

    use super::*;
    use crate::{HEADER_LEN, Hash, Mode, NewHeader};

    fn chance(seed: u64) -> impl FnMut(&mut [u8]) -> Result<()> {
        let mut random = Random::from_seed(seed);
        move |bytes: &mut [u8]| {
            bytes.fill_with(|| random.below(256) as u8);
            Ok(())
        }
    }

    fn new(key_len: usize, hash: Hash) -> NewHeader {
        NewHeader { mode: Mode::named("xts-plain64").unwrap(), key_len, hash, digest_iterations: 1000 }
    }

    fn secret(text: &str) -> Secret {
        Secret::new(text.into()).unwrap()
    }

    #[test]
    fn each_slot_opens_with_its_own_secret() {
        let mut chance = chance(1);
        let (mut header, key) = new(64, Hash::Sha256).make(&mut chance).unwrap();
        let mut materials = Vec::new();
        for slot in 0..SLOTS {
            assert_eq!(header.free_slot(), Some(slot));
            let secret = secret(&format!("number {slot}"));
            materials.push(header.fill_slot(slot, &key, &secret, 1000, &mut chance).unwrap());
        }
        assert_eq!(header.free_slot(), None);
        let header = Header::parse(&header.encode()).unwrap();
        for (slot, material) in materials.iter().enumerate() {
            let right = secret(&format!("number {slot}"));
            let opened = header.open_slot(slot, material, &right).unwrap().expect("the right one");
            assert_eq!(opened.bytes(), key.bytes());
            assert!(header.open_slot(slot, material, &secret("number")).unwrap().is_none());
            let mut damaged = material.clone();
            damaged[77] ^= 1;
            assert!(header.open_slot(slot, &damaged, &right).unwrap().is_none());
        }
    }

    #[test]
    fn the_last_key_stays() {
        let mut chance = chance(2);
        let (mut header, key) = new(32, Hash::Sha1).make(&mut chance).unwrap();
        header.fill_slot(3, &key, &secret("a"), 0, &mut chance).unwrap();
        assert_eq!(header.slot_iterations(3), Some(ITERATIONS_MIN));
        assert!(header.fill_slot(3, &key, &secret("b"), 0, &mut chance).is_err());
        assert!(header.clear_slot(3).unwrap_err().to_string().contains("last key"));
        header.fill_slot(0, &key, &secret("b"), 0, &mut chance).unwrap();
        header.clear_slot(3).unwrap();
        assert!(header.clear_slot(3).is_err() && header.clear_slot(8).is_err());
        assert_eq!(Header::parse(&header.encode()).unwrap().active_slots().collect::<Vec<_>>(), [0]);
    }

    /// A header whose slots are each within the bound, and together are not.
    #[test]
    fn the_work_of_all_slots_is_bounded() {
        let mut chance = chance(4);
        let (mut header, key) = new(64, Hash::Sha1).make(&mut chance).unwrap();
        header.fill_slot(0, &key, &secret("a"), 1000, &mut chance).unwrap();
        let mut bytes = header.encode();
        header.check_work().unwrap();
        for slot in 0..SLOTS {
            bytes[208 + slot * 48..][..4].copy_from_slice(&0x00AC_71F3_u32.to_be_bytes());
            bytes[212 + slot * 48..][..4].copy_from_slice(&ITERATIONS_MAX.to_be_bytes());
        }
        let mut large = Header::parse(&bytes).expect("it can be described");
        assert_eq!(large.check_work().unwrap_err().kind(), ErrorKind::Unsupported);
        for slot in 2..SLOTS {
            large.clear_slot(slot).unwrap();
        }
        assert!(large.check_work().is_err());
        large.clear_slot(1).unwrap();
        large.check_work().expect("one of them is within the bound");
        let more = large.fill_slot(1, &key, &secret("b"), ITERATIONS_MAX, &mut chance).unwrap_err();
        assert_eq!(more.kind(), ErrorKind::Invalid, "{more}");
    }

    #[test]
    fn damaged_headers_are_refused() {
        let mut chance = chance(3);
        let made = new(64, Hash::Sha512);
        let (mut header, key) = made.make(&mut chance).unwrap();
        header.fill_slot(0, &key, &secret("a"), 5000, &mut chance).unwrap();
        let good = header.encode();
        assert_eq!(header.payload(), made.payload());
        assert_eq!(made.payload(), 4040 * 512, "as in QEMU");
        let parsed = Header::parse(&good).unwrap();
        assert_eq!((parsed.uuid().len(), parsed.cipher(), parsed.encode()), (36, "aes-256", good));
        let bad = |at: usize, bytes: &[u8], kind: ErrorKind, what: &str| {
            let mut damaged = good;
            damaged[at..at + bytes.len()].copy_from_slice(bytes);
            let error = Header::parse(&damaged).expect_err(what);
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.chain().contains(what), "{}", error.chain());
        };
        use ErrorKind::{Corrupt, Unsupported};
        bad(0, b"X", Corrupt, "begin");
        bad(7, &[2], Unsupported, "version 2");
        bad(7, &[3], Unsupported, "version 3");
        bad(8, b"twofish", Unsupported, "twofish");
        bad(8, b"\xFF", Corrupt, "cipher");
        bad(40, b"ecb", Unsupported, "mode");
        bad(72, b"md5\0\0\0", Unsupported, "md5");
        bad(104, &[0, 0, 0, 9], Corrupt, "overlaps the data");
        bad(108, &[0, 0, 0, 63], Corrupt, "63 bytes");
        bad(108, &[0xFF; 4], Corrupt, "impossible");
        bad(164, &[0; 4], Corrupt, "no iterations");
        bad(164, &[0xFF; 4], Unsupported, "iterations");
        bad(208, &[1], Corrupt, "slot 0");
        bad(212, &[0xFF; 4], Unsupported, "4294967295");
        bad(248, &[0, 0, 0, 1], Corrupt, "overlaps the header");
        bad(248 + 48, &[0, 0, 0, 9], Corrupt, "another slot");
        bad(252, &[0, 0, 0, 1], Corrupt, "stripes");
        for len in 0..HEADER_LEN {
            assert!(Header::parse(&good[..len]).is_err());
        }
    }
}
