//! The index of a published template: which chunks make up its disk. docs/format/template-store.md has the
//! specification; numbers are big-endian.
//!
//! ```text
//!    0   8  "VELLUMt1"
//!    8   4  version, 1                      12   4  length of this header, 64
//!   16   8  features that a reader must know; none are defined
//!   24   8  size of the disk in bytes, a multiple of 512
//!   32   1  chunk size, as a power of two   33   7  zero
//!   40   4  number of runs                  44   4  number of chunks that are stored
//!   48  16  zero
//!   64   8 × runs      first chunk, number of chunks: in order, with gaps between them, which read as zero
//!    …  32 × chunks    their digests, in the order of the disk
//!    …  32             digest of everything before it: the identity of the template
//! ```
//!
//! 1. An index is accepted whole or not at all, and it has exactly the length that its header says. So nothing
//!    is allocated that the bytes do not pay for.
//! 2. Equal disks with equal chunk sizes have equal indexes, byte by byte.

use std::fmt;

use bytes::Bytes;
use vellum_core::{Error, Result};

/// The digest of some content: BLAKE3, 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// From the first 64 hexadecimal digits of a text that has no more.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 32];
        let is_plain =
            text.len() == 64 && text.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
        if !is_plain {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(Self(bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The smallest and the largest chunk, as powers of two: 64 KiB and 4 MiB.
pub const CHUNK_SHIFTS: std::ops::RangeInclusive<u32> = 16..=22;

/// The longest index that is read or written: four million chunks, which is 1 TiB of data in chunks of 256 KiB.
pub const INDEX_BYTES_MAX: u64 = 128 << 20;

const MAGIC: &[u8; 8] = b"VELLUMt1";
const VERSION: u32 = 1;
const HEADER: usize = 64;
const RUN: usize = 8;
const DIGEST: usize = 32;
/// A disk is made of sectors of this many bytes.
const SECTOR: u64 = 512;

/// A run of chunks that are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    first: u32,
    count: u32,
    /// The place of its first digest.
    digests_from: u32,
}

/// Which chunks make up a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    size: u64,
    chunk_shift: u32,
    runs: Vec<Run>,
    digests: Bytes,
    digest: Digest,
}

impl Index {
    /// Reads an index.
    ///
    /// # Errors
    /// `Corrupt` when it is none, or damaged; `Unsupported` when a later version of the program wrote it.
    pub fn parse(bytes: Bytes) -> Result<Self> {
        let bad = |what: &str| Error::corrupt(format!("it is not a template's index: {what}"));
        let header = bytes.get(..HEADER).ok_or_else(|| bad("it is too short"))?;
        let u32_at = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        if &header[..8] != MAGIC {
            return Err(bad("it does not begin as one"));
        }
        if u32_at(8) != VERSION || u64_at(16) != 0 {
            return Err(Error::unsupported(format!(
                "the template's index has version {} and features {:#x}; a later vellum wrote it",
                u32_at(8),
                u64_at(16)
            )));
        }
        let (size, chunk_shift) = (u64_at(24), u32::from(header[32]));
        let (run_count, chunk_count) = (u32_at(40) as usize, u32_at(44) as usize);
        let is_plain = u32_at(12) as usize == HEADER
            && header[33..40].iter().chain(&header[48..64]).all(|byte| *byte == 0)
            && CHUNK_SHIFTS.contains(&chunk_shift)
            && size.is_multiple_of(SECTOR)
            && chunks_of(size, chunk_shift).is_some();
        if !is_plain {
            return Err(bad("a field of its header is out of range"));
        }
        let digests_at = HEADER as u64 + RUN as u64 * run_count as u64;
        let end = digests_at + DIGEST as u64 * chunk_count as u64;
        if bytes.len() as u64 > INDEX_BYTES_MAX || end + DIGEST as u64 != bytes.len() as u64 {
            return Err(bad("its length is not the one that its header says"));
        }
        let in_memory = |at: u64| usize::try_from(at).expect("it is within the bytes");
        let (digests_at, end) = (in_memory(digests_at), in_memory(end));
        let digest = Digest::of(&bytes[..end]);
        if digest.0 != bytes[end..] {
            return Err(bad("its checksum is wrong"));
        }
        let mut runs = Vec::with_capacity(run_count);
        let (mut next_allowed, mut digests_from) = (0_u64, 0_u64);
        for run in bytes[HEADER..digests_at].chunks_exact(RUN) {
            let first = u32::from_be_bytes(run[..4].try_into().expect("four bytes"));
            let count = u32::from_be_bytes(run[4..].try_into().expect("four bytes"));
            if u64::from(first) < next_allowed || count == 0 {
                return Err(bad("its runs are not in order"));
            }
            runs.push(Run {
                first,
                count,
                digests_from: u32::try_from(digests_from).map_err(|_| bad("too many"))?,
            });
            next_allowed = u64::from(first) + u64::from(count) + 1;
            digests_from += u64::from(count);
        }
        let last = next_allowed.saturating_sub(1);
        if digests_from != chunk_count as u64 || last > chunks_of(size, chunk_shift).unwrap_or(0) {
            return Err(bad("its runs do not fit the disk"));
        }
        Ok(Self { size, chunk_shift, runs, digests: bytes.slice(digests_at..end), digest })
    }

    /// Puts an index together from the stored chunks, by number.
    ///
    /// # Errors
    /// `Unsupported` when the index would be longer than [`INDEX_BYTES_MAX`]; `Invalid` for a chunk behind the
    /// end of the disk.
    pub fn build(
        size: u64,
        chunk_shift: u32,
        chunks: &std::collections::BTreeMap<u32, Digest>,
    ) -> Result<Bytes> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for number in chunks.keys() {
            match runs.last_mut() {
                Some((first, count)) if u64::from(*first) + u64::from(*count) == u64::from(*number) => {
                    *count += 1
                }
                _ => runs.push((*number, 1)),
            }
        }
        let len = HEADER as u64 + RUN as u64 * runs.len() as u64 + DIGEST as u64 * (chunks.len() as u64 + 1);
        if len > INDEX_BYTES_MAX {
            return Err(Error::unsupported(format!(
                "the template's index would have {len} bytes, and {INDEX_BYTES_MAX} are allowed; use larger chunks"
            )));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(len).expect("as just bounded"));
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(HEADER).expect("a small number").to_be_bytes());
        bytes.extend_from_slice(&0_u64.to_be_bytes());
        bytes.extend_from_slice(&size.to_be_bytes());
        bytes.push(u8::try_from(chunk_shift).expect("a small number"));
        bytes.extend_from_slice(&[0; 7]);
        for count in [runs.len(), chunks.len()] {
            bytes.extend_from_slice(&u32::try_from(count).expect("as just bounded").to_be_bytes());
        }
        bytes.extend_from_slice(&[0; 16]);
        for (first, count) in runs {
            bytes.extend_from_slice(&first.to_be_bytes());
            bytes.extend_from_slice(&count.to_be_bytes());
        }
        chunks.values().for_each(|digest| bytes.extend_from_slice(&digest.0));
        let digest = Digest::of(&bytes);
        bytes.extend_from_slice(&digest.0);
        let bytes = Bytes::from(bytes);
        // What is published can be read.
        Self::parse(bytes.clone()).map_err(|error| error.with_kind(vellum_core::ErrorKind::Invalid))?;
        Ok(bytes)
    }

    /// The size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The size of a chunk in bytes. The last one may be shorter.
    pub fn chunk_size(&self) -> u64 {
        1 << self.chunk_shift
    }

    /// The identity of the template: the digest of its index.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// How many chunks are stored, those that repeat counted each time.
    pub fn chunk_count(&self) -> u64 {
        (self.digests.len() / DIGEST) as u64
    }

    /// The digests of the stored chunks, in the order of the disk.
    pub fn digests(&self) -> impl Iterator<Item = Digest> {
        self.digests.chunks_exact(DIGEST).map(|digest| Digest(digest.try_into().expect("32 bytes")))
    }

    /// The digest of a chunk; nothing where the disk reads as zero.
    pub fn chunk(&self, number: u32) -> Option<Digest> {
        let place = self.runs.partition_point(|run| run.first <= number).checked_sub(1)?;
        let run = self.runs[place];
        let within = number - run.first;
        if within >= run.count {
            return None;
        }
        let at = (run.digests_from + within) as usize * DIGEST;
        Some(Digest(self.digests[at..at + DIGEST].try_into().expect("32 bytes")))
    }

    /// How many bytes of the disk a chunk has.
    pub fn chunk_len(&self, number: u32) -> usize {
        let left = self.size.saturating_sub(u64::from(number) << self.chunk_shift);
        usize::try_from(left.min(self.chunk_size())).expect("a chunk is small")
    }

    /// The chunks from this one on that are all stored, or all not: whether they are, and the first after them.
    /// `end` bounds the answer.
    pub fn run_from(&self, number: u32, end: u32) -> (bool, u32) {
        let next = self.runs.partition_point(|run| run.first <= number);
        if let Some(run) = next.checked_sub(1).map(|place| self.runs[place])
            && number - run.first < run.count
        {
            return (true, run.first.saturating_add(run.count).min(end));
        }
        (false, self.runs.get(next).map_or(end, |run| run.first.min(end)))
    }
}

/// How many chunks a disk has, if they can be numbered.
pub(crate) fn chunks_of(size: u64, chunk_shift: u32) -> Option<u64> {
    let count = size.div_ceil(1 << chunk_shift);
    (count <= u64::from(u32::MAX)).then_some(count)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use vellum_core::ErrorKind;

    use super::*;

    fn example() -> Bytes {
        let chunks: BTreeMap<u32, Digest> = [0, 1, 5, 6, 7, 9]
            .map(|number| (number, Digest::of(&[u8::try_from(number).expect("small")])))
            .into();
        Index::build(10 * 65536 - 512, 16, &chunks).expect("it fits")
    }

    #[test]
    fn an_index_gives_back_what_it_was_made_of() {
        let index = Index::parse(example()).expect("it is one");
        assert_eq!((index.size(), index.chunk_size(), index.chunk_count()), (10 * 65536 - 512, 65536, 6));
        let stored: Vec<u32> = (0..12).filter(|number| index.chunk(*number).is_some()).collect();
        assert_eq!(stored, [0, 1, 5, 6, 7, 9]);
        assert_eq!(index.chunk(6), Some(Digest::of(&[6])));
        assert_eq!((index.chunk_len(0), index.chunk_len(9), index.chunk_len(10)), (65536, 65536 - 512, 0));
        let runs: Vec<(bool, u32)> = [0, 1, 2, 5, 8, 9].map(|number| index.run_from(number, 10)).into();
        assert_eq!(runs, [(true, 2), (true, 2), (false, 5), (true, 8), (false, 9), (true, 10)]);
        assert_eq!(index.run_from(5, 6), (true, 6));
    }

    #[test]
    fn an_index_is_accepted_whole_or_not_at_all() {
        let whole = example();
        for len in 0..whole.len() {
            assert!(Index::parse(whole.slice(..len)).is_err(), "the first {len} bytes");
        }
        for at in 0..whole.len() {
            let mut bytes = whole.to_vec();
            bytes[at] ^= 1;
            assert!(Index::parse(bytes.into()).is_err(), "byte {at}");
        }
    }

    /// Changes bytes and makes the checksum right again.
    fn forged(change: impl FnOnce(&mut Vec<u8>)) -> Bytes {
        let mut bytes = example().to_vec();
        bytes.truncate(bytes.len() - 32);
        change(&mut bytes);
        let digest = Digest::of(&bytes);
        bytes.extend_from_slice(&digest.0);
        bytes.into()
    }

    #[test]
    fn a_forged_index_is_refused_before_anything_is_allocated() {
        let cases: [(&str, usize, &[u8]); 9] = [
            ("huge counts", 40, &[0xff; 8]),
            ("a huge disk", 24, &[0xff; 8]),
            ("a size that is no multiple of 512", 31, &[1]),
            ("chunks of one byte", 32, &[0]),
            ("huge chunks", 32, &[63]),
            ("a reserved byte", 50, &[1]),
            ("an empty run", 64 + 4, &[0, 0, 0, 0]),
            ("runs that overlap", 64 + 8, &[0, 0, 0, 1]),
            ("a run behind the end", 64 + 16, &[0, 0, 0, 10]),
        ];
        for (what, at, with) in cases {
            let bytes = forged(|bytes| bytes[at..at + with.len()].copy_from_slice(with));
            assert_eq!(Index::parse(bytes).expect_err(what).kind(), ErrorKind::Corrupt, "{what}");
        }
        let later = forged(|bytes| bytes[11] = 2);
        assert_eq!(Index::parse(later).expect_err("a later version").kind(), ErrorKind::Unsupported);
        let feature = forged(|bytes| bytes[23] = 1);
        assert_eq!(Index::parse(feature).expect_err("a feature").kind(), ErrorKind::Unsupported);
        Index::parse(forged(|_| {})).expect("unchanged it is accepted");
    }

    #[test]
    fn digests_are_written_in_lower_case() {
        let digest = Digest::of(b"x");
        assert_eq!(Digest::parse(&digest.to_string()), Some(digest));
        for bad in ["", "ab", &digest.to_string().to_uppercase(), &format!("{digest}0")] {
            assert_eq!(Digest::parse(bad), None, "{bad}");
        }
    }
}
