//! Hashes, PBKDF2, and the anti-forensic split that spreads a key over many sectors.

use hmac::digest::Digest as _;
use pbkdf2::pbkdf2_hmac;
use sha1::Sha1;
use sha2::{Sha224, Sha256, Sha384, Sha512};
use vellum_core::{Error, Result};
use zeroize::{Zeroize as _, Zeroizing};

/// A hash that a header names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hash {
    /// SHA-1, the default of old versions of cryptsetup. PBKDF2 and the split are not weakened by its collisions.
    Sha1,
    /// SHA-224.
    Sha224,
    /// SHA-256, the usual one.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

impl Hash {
    /// The hash of this name.
    ///
    /// # Errors
    /// `Unsupported` for one that is not here.
    pub fn named(name: &str) -> Result<Self> {
        let all = [Self::Sha1, Self::Sha224, Self::Sha256, Self::Sha384, Self::Sha512];
        let found = all.into_iter().find(|hash| hash.name() == name);
        found.ok_or_else(|| {
            Error::unsupported(format!(
                "the hash {name:?} is not supported: sha1, sha224, sha256, sha384 and sha512 are"
            ))
        })
    }

    /// Its name in a header.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "sha1",
            Self::Sha224 => "sha224",
            Self::Sha256 => "sha256",
            Self::Sha384 => "sha384",
            Self::Sha512 => "sha512",
        }
    }

    /// Bytes of its result.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha224 => 28,
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    /// The hash of these parts, one after the other, cut to the length of `out`.
    pub(crate) fn of(self, parts: [&[u8]; 2], out: &mut [u8]) {
        macro_rules! hash {
            ($kind:ty) => {{
                let mut hash = <$kind>::new();
                parts.iter().for_each(|part| hash.update(part));
                let mut result = hash.finalize();
                out.copy_from_slice(&result[..out.len()]);
                result.as_mut_slice().zeroize();
            }};
        }
        match self {
            Self::Sha1 => hash!(Sha1),
            Self::Sha224 => hash!(Sha224),
            Self::Sha256 => hash!(Sha256),
            Self::Sha384 => hash!(Sha384),
            Self::Sha512 => hash!(Sha512),
        }
    }

    /// SHA-256 of these parts, one after the other.
    pub(crate) fn sha256_of(parts: [&[u8]; 3]) -> [u8; 32] {
        let mut hash = Sha256::new();
        parts.iter().for_each(|part| hash.update(part));
        hash.finalize().into()
    }

    /// Derives `len` bytes from a secret.
    pub(crate) fn derive(
        self,
        secret: &[u8],
        salt: &[u8],
        iterations: u32,
        len: usize,
    ) -> Zeroizing<Vec<u8>> {
        let mut out = Zeroizing::new(vec![0; len]);
        match self {
            Self::Sha1 => pbkdf2_hmac::<Sha1>(secret, salt, iterations, &mut out),
            Self::Sha224 => pbkdf2_hmac::<Sha224>(secret, salt, iterations, &mut out),
            Self::Sha256 => pbkdf2_hmac::<Sha256>(secret, salt, iterations, &mut out),
            Self::Sha384 => pbkdf2_hmac::<Sha384>(secret, salt, iterations, &mut out),
            Self::Sha512 => pbkdf2_hmac::<Sha512>(secret, salt, iterations, &mut out),
        }
        out
    }

    /// Makes each bit of the block depend on all the others of its part.
    fn diffuse(self, block: &mut [u8]) {
        for (index, part) in block.chunks_mut(self.len()).enumerate() {
            let index = u32::try_from(index).expect("a key is short").to_be_bytes();
            let mut hashed = Zeroizing::new(vec![0; part.len()]);
            self.of([&index, part], &mut hashed);
            part.copy_from_slice(&hashed);
        }
    }

    /// Spreads the key over the stripes: all but the last are given, as random bytes.
    pub(crate) fn split(self, key: &[u8], stripes: &mut [u8]) {
        let (random, last) = stripes.split_at_mut(stripes.len() - key.len());
        let sum = self.sum(key.len(), random);
        for ((out, key), sum) in last.iter_mut().zip(key).zip(&*sum) {
            *out = key ^ sum;
        }
    }

    /// The key that was spread over the stripes.
    pub(crate) fn merge(self, len: usize, stripes: &[u8]) -> Zeroizing<Vec<u8>> {
        let (random, last) = stripes.split_at(stripes.len() - len);
        let mut key = self.sum(len, random);
        xor(&mut key, last);
        key
    }

    fn sum(self, len: usize, stripes: &[u8]) -> Zeroizing<Vec<u8>> {
        let mut sum = Zeroizing::new(vec![0; len]);
        for stripe in stripes.chunks_exact(len) {
            xor(&mut sum, stripe);
            self.diffuse(&mut sum);
        }
        sum
    }
}

fn xor(to: &mut [u8], from: &[u8]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to ^= from);
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "patterns of small numbers")]
mod tests {
    use super::*;

    #[test]
    fn what_is_split_can_be_merged() {
        for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha512] {
            for len in [16, 32, 64] {
                let key: Vec<u8> = (0..len).map(|byte| u8::try_from(byte).unwrap().wrapping_mul(7)).collect();
                let mut stripes: Vec<u8> = (0..len * 9).map(|at| (at % 251) as u8).collect();
                hash.split(&key, &mut stripes);
                assert_eq!(*hash.merge(len, &stripes), key);
                stripes[3] ^= 1;
                assert_ne!(*hash.merge(len, &stripes), key, "each stripe counts");
            }
        }
    }

    /// RFC 6070, and the same for SHA-256 from RFC 7914.
    #[test]
    fn derived_keys_are_those_of_the_standards() {
        let key = Hash::Sha1.derive(b"password", b"salt", 4096, 20);
        assert_eq!(hex(&key), "4b007901b765489abead49d926f721d065a429c1");
        let key = Hash::Sha256.derive(b"passwd", b"salt", 1, 32);
        assert_eq!(hex(&key), "55ac046e56e3089fec1691c22544b605f94185216dde0465e68b9d57c20dacbc");
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
