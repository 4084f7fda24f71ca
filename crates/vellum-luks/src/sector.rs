//! The cipher of sectors: AES over 512 bytes (or up to 4096, in version 2), each with an initial vector made from the number
//! of its first 512 bytes.
//!
//! ```text
//!   xts      number ─► AES(key 2) ─► tweak, doubled from block to block      c = AES(key 1, p ^ t) ^ t
//!   cbc      number, or AES(hash of the key, number) for essiv ─► vector     c = AES(key, p ^ c before)
//! ```
//!
//! 1. Sectors are changed in place, and each by itself: one of them depends on no other.
//! 2. 4 KiB go through AES in one call, whatever the size of the sectors: with the widest registers AES takes 64 blocks at once,
//!    and what is less than that one by one. The tweaks of neighbouring sectors are made side by side.
//! 3. Only XTS is written. CBC is here to read old images: a program that can change their bytes can flip chosen bits of the
//!    disk.

use aes::cipher::array::Array;
use aes::cipher::{Block, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit, consts::U16};
use aes::{Aes128, Aes256};
use vellum_core::{Error, Result};
use zeroize::Zeroizing;

use crate::kdf::Hash;
use crate::{MasterKey, SECTOR, Secret};

/// Bytes that AES encrypts as one.
const BLOCK: usize = 16;
/// Blocks of a sector.
const BLOCKS: usize = SECTOR / BLOCK;
/// Blocks that go through AES in one call.
const TOGETHER: usize = 256;
/// Sectors that are as many blocks: their tweaks are encrypted together.
const SECTORS_TOGETHER: usize = TOGETHER / BLOCKS;

type AesBlock = Array<u8, U16>;

/// How a sector's number becomes its initial vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IvRule {
    /// The lowest 32 bits of the number.
    Plain,
    /// The number, in 64 bits.
    Plain64,
    /// The number, encrypted with a hash of the key.
    Essiv(Hash),
}

/// A mode of AES, as headers name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// XEX with ciphertext stealing, the usual one.
    Xts(IvRule),
    /// Cipher block chaining, of old images.
    Cbc(IvRule),
}

impl Mode {
    /// The mode of this name, such as `xts-plain64`.
    ///
    /// # Errors
    /// `Unsupported` for one that is not here.
    pub fn named(name: &str) -> Result<Self> {
        let unknown = || {
            Error::unsupported(format!(
                "the cipher mode {name:?} is not supported: xts-plain64 is, and xts-plain, and for reading cbc-plain, \
                 cbc-plain64 and cbc-essiv:HASH"
            ))
        };
        let (chaining, rule) = name.split_once('-').ok_or_else(unknown)?;
        let rule = match rule.split_once(':') {
            None if rule == "plain" => IvRule::Plain,
            None if rule == "plain64" => IvRule::Plain64,
            Some(("essiv", hash)) => IvRule::Essiv(Hash::named(hash)?),
            _ => return Err(unknown()),
        };
        match (chaining, rule) {
            ("xts", IvRule::Plain | IvRule::Plain64) => Ok(Self::Xts(rule)),
            ("cbc", _) => Ok(Self::Cbc(rule)),
            _ => Err(unknown()),
        }
    }

    /// Its name in a header.
    pub fn name(self) -> String {
        let (chaining, rule) = match self {
            Self::Xts(rule) => ("xts", rule),
            Self::Cbc(rule) => ("cbc", rule),
        };
        match rule {
            IvRule::Plain => format!("{chaining}-plain"),
            IvRule::Plain64 => format!("{chaining}-plain64"),
            IvRule::Essiv(hash) => format!("{chaining}-essiv:{}", hash.name()),
        }
    }

    /// The lengths that its keys may have, in bytes.
    pub fn key_lens(self) -> &'static [usize] {
        match self {
            Self::Xts(_) => &[32, 64],
            // With 24 the key material is no whole sectors, and QEMU makes none.
            Self::Cbc(_) => &[16, 32],
        }
    }

    /// Whether an image in this mode may be written and served.
    pub fn is_for_writing(self) -> bool {
        matches!(self, Self::Xts(_))
    }

    fn rule(self) -> IvRule {
        match self {
            Self::Xts(rule) | Self::Cbc(rule) => rule,
        }
    }
}

/// Encrypts and decrypts whole sectors in place. Its keys are made zero when it is dropped.
pub struct SectorCipher {
    mode: Mode,
    keys: Keys,
    sector_bytes: usize,
    /// What is added to each number.
    offset: u64,
}

enum Keys {
    Xts128(Box<[Aes128; 2]>),
    Xts256(Box<[Aes256; 2]>),
    Cbc128(Box<Aes128>, Option<Box<Aes256>>),
    Cbc256(Box<Aes256>, Option<Box<Aes256>>),
}

fn key<C: KeyInit>(bytes: &[u8]) -> C {
    C::new_from_slice(bytes).expect("its length was checked")
}

impl std::fmt::Debug for SectorCipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SectorCipher({})", self.mode.name())
    }
}

impl SectorCipher {
    /// The cipher of this mode with this key.
    ///
    /// # Errors
    /// `Unsupported` for a key of another length than the mode takes, or a hash of an impossible length.
    pub fn new(mode: Mode, master: &MasterKey) -> Result<Self> {
        Self::with_key(mode, master.bytes())
    }

    /// The cipher of qcow2's old scheme (`encryption=on`): the key is the secret, cut to 16 bytes or filled up with zeros.
    ///
    /// # Errors
    /// None, for any secret that there is.
    pub fn of_old_qcow2(secret: &Secret) -> Result<Self> {
        let mut key = Zeroizing::new([0; 16]);
        let len = secret.bytes().len().min(key.len());
        key[..len].copy_from_slice(&secret.bytes()[..len]);
        Self::with_key(Mode::Cbc(IvRule::Plain64), &*key)
    }

    pub(crate) fn with_key(mode: Mode, bytes: &[u8]) -> Result<Self> {
        if !mode.key_lens().contains(&bytes.len()) {
            return Err(Error::unsupported(format!(
                "a key of {} bytes for aes-{}",
                bytes.len(),
                mode.name()
            )));
        }
        let (first, second) = bytes.split_at(bytes.len() / 2);
        let keys = match (mode, bytes.len()) {
            (Mode::Xts(_), 32) => Keys::Xts128(Box::new([key(first), key(second)])),
            (Mode::Xts(_), _) => Keys::Xts256(Box::new([key(first), key(second)])),
            (Mode::Cbc(rule), 16) => Keys::Cbc128(Box::new(key(bytes)), essiv(rule, bytes)?),
            (Mode::Cbc(rule), _) => Keys::Cbc256(Box::new(key(bytes)), essiv(rule, bytes)?),
        };
        Ok(Self { mode, keys, sector_bytes: SECTOR, offset: 0 })
    }

    /// The same over sectors of this many bytes, with this added to the number of each. Only for XTS.
    pub(crate) fn of_sectors(self, sector_bytes: usize, offset: u64) -> Self {
        Self { sector_bytes, offset, ..self }
    }

    /// Bytes that are encrypted as one.
    pub fn sector_bytes(&self) -> usize {
        self.sector_bytes
    }

    /// Its mode.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Encrypts whole sectors. The first 512 bytes have this number.
    ///
    /// # Panics
    /// When the bytes are no whole sectors.
    pub fn encrypt(&self, first: u64, sectors: &mut [u8]) {
        assert!(sectors.len().is_multiple_of(self.sector_bytes), "whole sectors");
        let (rule, bytes, first) = (self.mode.rule(), self.sector_bytes, first.wrapping_add(self.offset));
        let numbers = |at: u64| vector(rule, first.wrapping_add(at));
        match &self.keys {
            Keys::Xts128(keys) => xts(keys, numbers, bytes, sectors, Aes128::encrypt_blocks),
            Keys::Xts256(keys) => xts(keys, numbers, bytes, sectors, Aes256::encrypt_blocks),
            Keys::Cbc128(key, essiv) => cbc_encrypt(&**key, rule, essiv.as_deref(), first, sectors),
            Keys::Cbc256(key, essiv) => cbc_encrypt(&**key, rule, essiv.as_deref(), first, sectors),
        }
    }

    /// Decrypts whole sectors. The first 512 bytes have this number.
    ///
    /// # Panics
    /// When the bytes are no whole sectors.
    pub fn decrypt(&self, first: u64, sectors: &mut [u8]) {
        assert!(sectors.len().is_multiple_of(self.sector_bytes), "whole sectors");
        let (rule, bytes, first) = (self.mode.rule(), self.sector_bytes, first.wrapping_add(self.offset));
        let numbers = |at: u64| vector(rule, first.wrapping_add(at));
        match &self.keys {
            Keys::Xts128(keys) => xts(keys, numbers, bytes, sectors, Aes128::decrypt_blocks),
            Keys::Xts256(keys) => xts(keys, numbers, bytes, sectors, Aes256::decrypt_blocks),
            Keys::Cbc128(key, essiv) => cbc_decrypt(&**key, rule, essiv.as_deref(), first, sectors),
            Keys::Cbc256(key, essiv) => cbc_decrypt(&**key, rule, essiv.as_deref(), first, sectors),
        }
    }
}

/// The cipher of the numbers of sectors, for the rule that has one.
fn essiv(rule: IvRule, bytes: &[u8]) -> Result<Option<Box<Aes256>>> {
    let IvRule::Essiv(hash) = rule else { return Ok(None) };
    let mut hashed = Zeroizing::new(vec![0; hash.len()]);
    hash.of([bytes, &[]], &mut hashed);
    match hashed.len() {
        32 => Ok(Some(Box::new(key(&hashed)))),
        _ => Err(Error::unsupported(format!(
            "cbc-essiv:{} is not possible with AES: its hash is no key of AES",
            hash.name()
        ))),
    }
}

fn vector(rule: IvRule, sector: u64) -> AesBlock {
    let number = match rule {
        IvRule::Plain => sector & u64::from(u32::MAX),
        IvRule::Plain64 | IvRule::Essiv(_) => sector,
    };
    AesBlock::from(u128::from(number).to_le_bytes())
}

fn blocks(bytes: &mut [u8]) -> &mut [AesBlock] {
    AesBlock::slice_as_chunks_mut(bytes).0
}

fn number(block: &AesBlock) -> u128 {
    u128::from_le_bytes((*block).into())
}

/// The next tweak: times x in the field of 2^128 elements.
#[inline(always)]
fn doubled(tweak: u128) -> u128 {
    let carry = (tweak.cast_signed() >> 127).cast_unsigned();
    (tweak << 1) ^ (carry & 0x87)
}

/// Puts the tweaks of N neighbouring sectors side by side: each follows from the one before, but those of another sector do
/// not, so the processor works on all N at once.
#[inline(always)]
fn spread<const N: usize>(starts: &[AesBlock], tweaks: &mut [u128]) {
    let blocks = tweaks.len() / N;
    let mut now: [u128; N] = std::array::from_fn(|sector| number(&starts[sector]));
    for block in 0..blocks {
        for (sector, now) in now.iter_mut().enumerate() {
            tweaks[sector * blocks + block] = *now;
            *now = doubled(*now);
        }
    }
}

/// XTS over whole sectors: `work` is AES in the direction that is wanted.
#[inline(always)]
fn xts<C: BlockCipherEncrypt<BlockSize = U16>>(
    [data, tweaks]: &[C; 2],
    numbers: impl Fn(u64) -> AesBlock,
    sector_bytes: usize,
    bytes: &mut [u8],
    work: impl Fn(&C, &mut [Block<C>]),
) {
    let (mut at, of_sector) = (0, sector_bytes / BLOCK);
    for group in bytes.chunks_mut(TOGETHER * BLOCK) {
        let count = group.len() / sector_bytes;
        let mut starts = [AesBlock::default(); SECTORS_TOGETHER];
        for start in &mut starts[..count] {
            *start = numbers(at);
            at += (sector_bytes / SECTOR) as u64;
        }
        tweaks.encrypt_blocks(&mut starts[..count]);
        let mut all = [0; TOGETHER];
        let all = &mut all[..count * of_sector];
        match count {
            SECTORS_TOGETHER => spread::<SECTORS_TOGETHER>(&starts, all),
            _ => {
                for (start, all) in starts.iter().zip(all.chunks_exact_mut(of_sector)) {
                    spread::<1>(std::slice::from_ref(start), all);
                }
            }
        }
        let blocks = blocks(group);
        mix(blocks, all);
        work(data, blocks);
        mix(blocks, all);
    }
}

#[inline(always)]
fn mix(blocks: &mut [AesBlock], with: &[u128]) {
    for (block, with) in blocks.iter_mut().zip(with) {
        *block = AesBlock::from((number(block) ^ with).to_le_bytes());
    }
}

fn cbc_vector(rule: IvRule, essiv: Option<&Aes256>, sector: u64) -> u128 {
    let mut vector = vector(rule, sector);
    if let Some(essiv) = essiv {
        essiv.encrypt_block(&mut vector);
    }
    number(&vector)
}

fn cbc_encrypt<C: BlockCipherEncrypt<BlockSize = U16>>(
    aes: &C,
    rule: IvRule,
    essiv: Option<&Aes256>,
    first: u64,
    sectors: &mut [u8],
) {
    for (sector, at) in sectors.chunks_exact_mut(SECTOR).zip(first..) {
        let mut before = cbc_vector(rule, essiv, at);
        for block in blocks(sector) {
            *block = AesBlock::from((number(block) ^ before).to_le_bytes());
            aes.encrypt_block(block);
            before = number(block);
        }
    }
}

fn cbc_decrypt<C: BlockCipherDecrypt<BlockSize = U16>>(
    aes: &C,
    rule: IvRule,
    essiv: Option<&Aes256>,
    first: u64,
    sectors: &mut [u8],
) {
    for (sector, at) in sectors.chunks_exact_mut(SECTOR).zip(first..) {
        let blocks = blocks(sector);
        let mut with = [0; BLOCKS];
        with[0] = cbc_vector(rule, essiv, at);
        for (with, block) in with[1..].iter_mut().zip(&*blocks) {
            *with = number(block);
        }
        aes.decrypt_blocks(blocks);
        mix(blocks, &with);
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "patterns of small numbers")]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
        (0..text.len()).step_by(2).map(digit).collect()
    }

    /// IEEE 1619-2007, annex B: vectors 4 and 10, which are as long as a sector.
    #[test]
    fn xts_is_that_of_the_standard() {
        let plain: Vec<u8> = (0..512).map(|byte| byte as u8).collect();
        let xts = Mode::named("xts-plain64").unwrap();
        let key = hex("2718281828459045235360287471352631415926535897932384626433832795");
        let cipher = SectorCipher::with_key(xts, &key).unwrap();
        let mut sector = plain.clone();
        cipher.encrypt(0, &mut sector);
        assert_eq!(sector[..32], hex("27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89c"));
        cipher.decrypt(0, &mut sector);
        assert_eq!(sector, plain);
        let key = hex(concat!(
            "2718281828459045235360287471352662497757247093699959574966967627",
            "3141592653589793238462643383279502884197169399375105820974944592"
        ));
        let cipher = SectorCipher::with_key(xts, &key).unwrap();
        let mut sector = plain.clone();
        cipher.encrypt(0xFF, &mut sector);
        assert_eq!(sector[..32], hex("1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b"));
        cipher.decrypt(0xFF, &mut sector);
        assert_eq!(sector, plain);
    }

    #[test]
    fn each_sector_is_by_itself() {
        for (name, len) in [
            ("xts-plain64", 32),
            ("xts-plain64", 64),
            ("xts-plain", 64),
            ("cbc-plain", 16),
            ("cbc-plain64", 32),
            ("cbc-essiv:sha256", 32),
        ] {
            let mode = Mode::named(name).unwrap();
            assert_eq!(mode.name(), name);
            let key: Vec<u8> = (0..len).map(|byte| byte as u8 ^ 0x5A).collect();
            let cipher = SectorCipher::with_key(mode, &key).unwrap();
            let plain: Vec<u8> = (0..SECTOR * 19).map(|at| (at * 7 % 253) as u8).collect();
            let mut all = plain.clone();
            cipher.encrypt(1000, &mut all);
            for (index, sector) in plain.chunks(SECTOR).enumerate() {
                let mut one = sector.to_vec();
                cipher.encrypt(1000 + index as u64, &mut one);
                assert_eq!(one, all[index * SECTOR..][..SECTOR], "{name}");
                cipher.decrypt(1000 + index as u64, &mut one);
                assert_eq!(one, sector, "{name}");
            }
            cipher.decrypt(1000, &mut all);
            assert_eq!(all, plain, "{name}");
        }
    }

    /// One of 4 KiB is a chain of tweaks from one number: its first 512 bytes are those of a small sector, and no others.
    #[test]
    fn large_sectors_have_one_number() {
        let xts = Mode::named("xts-plain64").unwrap();
        let key: Vec<u8> = (0..64).map(|byte| byte as u8 ^ 0x5A).collect();
        let cipher = |bytes, offset| SectorCipher::with_key(xts, &key).unwrap().of_sectors(bytes, offset);
        let plain: Vec<u8> = (0..3 * 4096).map(|at| (at * 7 % 253) as u8).collect();
        for (bytes, offset) in [(4096, 0), (4096, 77), (1024, 0), (2048, 5)] {
            let mut all = plain.clone();
            cipher(bytes, offset).encrypt(1000, &mut all);
            for (index, sector) in plain.chunks(bytes).enumerate() {
                let number = 1000 + (index * bytes / SECTOR) as u64;
                let mut one = sector.to_vec();
                cipher(bytes, 0).encrypt(number + offset, &mut one);
                assert_eq!(one, all[index * bytes..][..bytes], "{bytes}");
                let mut small = sector[..SECTOR].to_vec();
                cipher(SECTOR, offset).encrypt(number, &mut small);
                assert_eq!(one[..SECTOR], small);
            }
            cipher(bytes, offset).decrypt(1000, &mut all);
            assert_eq!(all, plain);
        }
        let mut two = [1; 1024];
        cipher(SECTOR, 0).encrypt(0, &mut two);
        let mut one = [1; 1024];
        cipher(1024, 0).encrypt(0, &mut one);
        assert_ne!(one[SECTOR..], two[SECTOR..]);
    }

    #[test]
    fn modes_that_are_not_here_are_refused() {
        for name in
            ["", "xts", "ecb", "lrw-benbi", "ctr-plain64", "xts-essiv:sha256", "cbc-essiv", "cbc-essiv:md5"]
        {
            assert!(Mode::named(name).is_err(), "{name}");
        }
        let xts = Mode::named("xts-plain64").unwrap();
        assert!(xts.is_for_writing() && !Mode::named("cbc-plain64").unwrap().is_for_writing());
        for len in [0, 16, 24, 31, 48, 65] {
            assert!(SectorCipher::with_key(xts, &vec![1; len]).is_err(), "{len}");
        }
        let essiv = Mode::named("cbc-essiv:sha1").unwrap();
        assert!(SectorCipher::with_key(essiv, &[1; 16]).is_err());
    }
}
