//! The file of a delta: what makes one disk of another, with the proof that it was made for that one.
//!
//! ```text
//!   │ header, 64 bytes │ record │ sectors │ data │ record │ sectors │ data │ … │ end │
//!
//!   a record     CRC │ kind │ offset │ length │ bytes of data │ digest before │ digest after        64 bytes
//!   sectors      a CRC of each sector before
//! ```
//!
//! 1. Records are in the order of their offsets and do not overlap. Each is about at most [`RUN_MAX`] bytes of the disk.
//! 2. The CRC of a record is that of the delta's id, its other bytes, its sectors and its data, so nothing of another delta fits, and a
//!    delta that was cut off or changed is refused.
//! 3. The digests are of the run before and after. A run that has neither is one that a crash has left half-written, if each of its
//!    sectors is as before or as after. Otherwise it was not what the delta was made of.
//! 4. The end says how many records and bytes there are. Nothing follows it.
//!
//! Bytes are untrusted until [`Record::verified`]. `docs/format/delta.md` is the specification.

use vellum_core::{Error, ErrorKind, Result};

/// Bytes of the header, and of a record without its data.
pub const HEAD_BYTES: usize = 64;
/// The longest run of a record, in bytes. Its data is never longer.
pub const RUN_MAX: u64 = 1 << 20;

const MAGIC: [u8; 8] = *b"VELLUMD1";
const VERSION: u32 = 1;
/// No disk is larger, in bytes.
const DISK_BYTES_MAX: u64 = 1 << 63;
const DIGEST_BYTES: usize = 16;
/// A crash leaves a sector as it was, or as it was written.
const SECTOR: usize = 512;
const CHECK: usize = 4;
/// The level of the compression: fast enough for a copy, half of the size of text.
const LEVEL: i32 = 1;

/// What a run of bytes is recognised by: the first half of its BLAKE3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest([u8; DIGEST_BYTES]);

impl Digest {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        let mut digest = [0; DIGEST_BYTES];
        digest.copy_from_slice(&blake3::hash(bytes).as_bytes()[..DIGEST_BYTES]);
        Self(digest)
    }
}

/// What a delta is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Random; each record depends on it.
    pub id: [u8; 16],
    /// The size of the disk before, in bytes.
    pub old_size: u64,
    /// The size of the disk afterwards, in bytes. All runs are within it.
    pub new_size: u64,
}

impl Header {
    /// The bytes of the header.
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[12..16].copy_from_slice(&VERSION.to_be_bytes());
        bytes[24..32].copy_from_slice(&self.old_size.to_be_bytes());
        bytes[32..40].copy_from_slice(&self.new_size.to_be_bytes());
        bytes[40..56].copy_from_slice(&self.id);
        let crc = crc32c::crc32c(&bytes[12..]);
        bytes[8..12].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// `Invalid` for something else, `Unsupported` for another version or features that are not known, `Corrupt` for a header
    /// that has changed.
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<Self> {
        if bytes[..8] != MAGIC {
            return Err(Error::invalid("this is not a delta that `vellum diff --delta` has made"));
        }
        if be32(bytes, 8) != crc32c::crc32c(&bytes[12..]) {
            return Err(bad("its header has changed"));
        }
        let (version, features) = (be32(bytes, 12), be64(bytes, 16));
        if version != VERSION || features != 0 {
            return Err(Error::unsupported(format!(
                "this is a delta of version {version} with the features {features:#x}; this program reads version {VERSION} \
                 without any"
            )));
        }
        let header = Self {
            id: bytes[40..56].try_into().expect("16 bytes"),
            old_size: be64(bytes, 24),
            new_size: be64(bytes, 32),
        };
        match header.old_size.max(header.new_size) <= DISK_BYTES_MAX {
            true => Ok(header),
            false => Err(bad("its disk is larger than 2^63 bytes")),
        }
    }
}

/// What a run of the disk becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The data, as it is.
    Plain,
    /// The data, compressed with zstd.
    Zstd,
    /// Zeros.
    Zeros,
}

/// What is in the place of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// A record, with as much data behind it.
    Record(Record),
    /// The end.
    End(End),
}

/// A record without its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    kind: Kind,
    crc: u32,
    /// Where the run begins on the disk, in bytes.
    pub offset: u64,
    /// How long it is, in bytes.
    pub len: u64,
    /// Bytes of data that follow the record and its sectors.
    stored: u64,
    /// Of the run before.
    pub before: Digest,
    /// Of the run afterwards.
    pub after: Digest,
}

/// A record whose bytes are all what was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// The record.
    pub record: Record,
    /// What the run becomes; nothing where it becomes zero.
    pub made: Option<Vec<u8>>,
    /// The CRCs of its sectors before.
    sectors: Vec<u8>,
}

/// What a run of a disk is to a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// As it was, or partly so: it is to be written.
    Before,
    /// As it is to be.
    After,
    /// Neither.
    Strange,
}

impl Verified {
    /// What these bytes of the run are.
    pub fn standing(&self, there: &[u8]) -> Standing {
        let digest = Digest::of(there);
        if digest == self.record.after {
            return Standing::After;
        }
        if digest == self.record.before {
            return Standing::Before;
        }
        let is_known = |(index, sector): (usize, &[u8])| {
            let at = index * SECTOR;
            let is_made = match &self.made {
                Some(made) => made.get(at..at + sector.len()) == Some(sector),
                None => sector.iter().all(|byte| *byte == 0),
            };
            is_made || self.sectors.get(index * CHECK..(index + 1) * CHECK) == Some(&check_of(sector))
        };
        let is_whole = there.len() as u64 == self.record.len;
        match is_whole && there.chunks(SECTOR).enumerate().all(is_known) {
            true => Standing::Before,
            false => Standing::Strange,
        }
    }
}

/// What the delta has in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct End {
    /// Records before it.
    pub records: u64,
    /// Bytes of the disk that they are about.
    pub bytes: u64,
}

impl Record {
    /// A run that had the first bytes, and gets the second: the record, its sectors and its data.
    ///
    /// # Panics
    /// When there are none, or more than [`RUN_MAX`], or not as many of both.
    pub fn encode(id: [u8; 16], offset: u64, before: &[u8], after: &[u8]) -> Vec<u8> {
        assert!(!after.is_empty() && after.len() as u64 <= RUN_MAX, "{} bytes are no run", after.len());
        assert_eq!(before.len(), after.len(), "a run");
        let packed = zstd::bulk::compress(after, LEVEL).ok().filter(|packed| packed.len() < after.len());
        let (kind, data): (u8, &[u8]) = match &packed {
            _ if after.iter().all(|byte| *byte == 0) => (3, &[]),
            Some(packed) => (2, packed),
            None => (1, after),
        };
        let (len, digests) = (after.len() as u64, [Digest::of(before), Digest::of(after)]);
        let mut bytes = head(kind, offset, len, data.len() as u64, digests);
        bytes.extend(before.chunks(SECTOR).flat_map(check_of));
        bytes.extend(data);
        seal(id, &mut bytes);
        bytes
    }

    /// Reads what stands behind the header, or behind the last record. `from` is where that one ended on the disk. Nothing of it
    /// counts until [`verified`](Self::verified), or [`End`] says that it is whole.
    ///
    /// # Errors
    /// `Corrupt` for what is no record that may stand there.
    pub fn decode(header: &Header, bytes: &[u8; HEAD_BYTES], from: u64) -> Result<Found> {
        let crc = be32(bytes, 0);
        let (offset, len, stored) = (be64(bytes, 8), be64(bytes, 16), be64(bytes, 24));
        let digest = |at: usize| Digest(bytes[at..at + DIGEST_BYTES].try_into().expect("16 bytes"));
        let kind = match bytes[4] {
            1 => Kind::Plain,
            2 => Kind::Zstd,
            3 => Kind::Zeros,
            4 => {
                return match crc == crc_of(header.id, &bytes[4..], &[]) {
                    true => Ok(Found::End(End { records: offset, bytes: len })),
                    false => Err(bad("its end has changed")),
                };
            }
            _ => return Err(bad("a record is of no known kind, or the file is cut off")),
        };
        let is_run = len > 0 && len <= RUN_MAX && offset >= from;
        let fits = offset.checked_add(len).is_some_and(|end| end <= header.new_size);
        let is_stored = match kind {
            Kind::Plain => stored == len,
            Kind::Zstd => stored > 0 && stored < len,
            Kind::Zeros => stored == 0,
        };
        if !is_run || !fits || !is_stored || bytes[5..8] != [0; 3] {
            return Err(bad(&format!("a record is about {len} bytes at {offset}, which cannot be")));
        }
        Ok(Found::Record(Self { kind, crc, offset, len, stored, before: digest(32), after: digest(48) }))
    }

    /// Bytes that follow the record: its sectors and its data.
    pub fn follow(&self) -> usize {
        self.sectors() + usize::try_from(self.stored).expect("at most a run")
    }

    fn sectors(&self) -> usize {
        usize::try_from(self.len).expect("at most a run").div_ceil(SECTOR) * CHECK
    }

    /// All of it, with the bytes that follow the record.
    ///
    /// # Errors
    /// `Corrupt` when a byte of the record or of the data has changed.
    pub fn verified(self, header: &Header, mut sectors: Vec<u8>) -> Result<Verified> {
        let kind = match self.kind {
            Kind::Plain => 1,
            Kind::Zstd => 2,
            Kind::Zeros => 3,
        };
        let head = head(kind, self.offset, self.len, self.stored, [self.before, self.after]);
        let has_changed =
            || bad(&format!("the record about {} bytes at {} has changed", self.len, self.offset));
        if sectors.len() != self.follow() || self.crc != crc_of(header.id, &head[4..], &sectors) {
            return Err(has_changed());
        }
        let data = sectors.split_off(self.sectors());
        let len = usize::try_from(self.len).expect("at most a run");
        let made = match self.kind {
            Kind::Zeros => return Ok(Verified { record: self, made: None, sectors }),
            Kind::Plain => data,
            Kind::Zstd => zstd::bulk::decompress(&data, len).map_err(|_| has_changed())?,
        };
        match made.len() == len && Digest::of(&made) == self.after {
            true => Ok(Verified { record: self, made: Some(made), sectors }),
            false => Err(has_changed()),
        }
    }
}

impl End {
    /// The bytes of the end.
    pub fn encode(&self, id: [u8; 16]) -> Vec<u8> {
        let none = Digest([0; DIGEST_BYTES]);
        let mut bytes = head(4, self.records, self.bytes, 0, [none; 2]);
        seal(id, &mut bytes);
        bytes
    }

    /// Counts a record.
    pub fn add(&mut self, len: u64) {
        self.records += 1;
        self.bytes += len;
    }
}

fn check_of(sector: &[u8]) -> [u8; CHECK] {
    crc32c::crc32c(sector).to_be_bytes()
}

fn head(kind: u8, offset: u64, len: u64, stored: u64, [before, after]: [Digest; 2]) -> Vec<u8> {
    let mut bytes = vec![0; HEAD_BYTES];
    bytes[4] = kind;
    bytes[8..16].copy_from_slice(&offset.to_be_bytes());
    bytes[16..24].copy_from_slice(&len.to_be_bytes());
    bytes[24..32].copy_from_slice(&stored.to_be_bytes());
    bytes[32..48].copy_from_slice(&before.0);
    bytes[48..64].copy_from_slice(&after.0);
    bytes
}

fn crc_of(id: [u8; 16], head: &[u8], data: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(&id), head), data)
}

fn seal(id: [u8; 16], bytes: &mut [u8]) {
    let crc = crc_of(id, &bytes[4..HEAD_BYTES], &bytes[HEAD_BYTES..]);
    bytes[..4].copy_from_slice(&crc.to_be_bytes());
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn bad(why: &str) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        format!("the delta is damaged: {why}. Nothing of it was used; copy or make it again"),
    )
}

/// Reads bytes from anywhere as a delta, to its end or its first fault.
pub fn fuzz_delta(bytes: &[u8]) {
    let Some((head, mut rest)) = bytes.split_first_chunk() else { return };
    let Ok(header) = Header::decode(head) else { return };
    let (mut from, mut counted) = (0, End::default());
    while let Some((head, behind)) = rest.split_first_chunk() {
        match Record::decode(&header, head, from) {
            Ok(Found::Record(record)) => {
                let Some((data, behind)) = behind.split_at_checked(record.follow()) else { return };
                let Ok(found) = record.verified(&header, data.to_vec()) else { return };
                assert_eq!(found.standing(&data[..data.len().min(9)]), Standing::Strange, "it is shorter");
                assert!(found.made.is_none_or(|made| made.len() as u64 == record.len));
                assert!(record.offset >= from && record.offset + record.len <= header.new_size);
                from = record.offset + record.len;
                counted.add(record.len);
                rest = behind;
            }
            Ok(Found::End(_)) | Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    const ID: [u8; 16] = [7; 16];

    fn header() -> Header {
        Header { id: ID, old_size: 1 << 20, new_size: 3 << 20 }
    }

    /// What comes before the data.
    fn first(bytes: &[u8]) -> &[u8; HEAD_BYTES] {
        bytes.first_chunk().expect("a head")
    }

    #[test]
    fn a_run_is_what_it_was() {
        let mut noise = vec![0; 5000];
        Random::from_seed(3).fill(&mut noise);
        for (after, kind) in
            [(noise, Kind::Plain), (vec![9; 70_000], Kind::Zstd), (vec![0; 4096], Kind::Zeros)]
        {
            let before = vec![5; after.len()];
            let bytes = Record::encode(ID, 8192, &before, &after);
            let Ok(Found::Record(record)) = Record::decode(&header(), first(&bytes), 8192) else {
                panic!("{kind:?} is no record")
            };
            assert_eq!((record.kind, record.offset, record.len), (kind, 8192, after.len() as u64));
            let found = record.verified(&header(), bytes[HEAD_BYTES..].to_vec()).unwrap();
            assert!(found.made.clone().unwrap_or_else(|| vec![0; 4096]) == after);
            assert_eq!(found.standing(&before), Standing::Before);
            assert_eq!(found.standing(&after), Standing::After);
            // A crash leaves sectors of both.
            let mut torn = before.clone();
            torn[512..2048].copy_from_slice(&after[512..2048]);
            assert_eq!(found.standing(&torn), Standing::Before);
            torn[4000] ^= 1;
            assert_eq!(found.standing(&torn), Standing::Strange);
            assert_eq!(found.standing(&before[512..]), Standing::Strange);
            Record::decode(&header(), first(&bytes), 8193).expect_err("it lies before the last one");
            let other = Header { id: [8; 16], ..header() };
            record.verified(&other, bytes[HEAD_BYTES..].to_vec()).expect_err("it is of another delta");
            let shorter = Header { new_size: 8192 + after.len() as u64 - 1, ..header() };
            Record::decode(&shorter, first(&bytes), 0).expect_err("it lies behind the end");
        }
    }

    #[test]
    fn every_byte_counts() {
        let mut all = header().encode().to_vec();
        for at in 0..all.len() {
            all[at] ^= 1;
            Header::decode(first(&all)).expect_err("it has changed");
            all[at] ^= 1;
        }
        assert_eq!(Header::decode(first(&all)).unwrap(), header());
        let mut all = Record::encode(ID, 0, &[2; 4096], &[1; 4096]);
        for at in 0..all.len() {
            all[at] ^= 1;
            if let Ok(Found::Record(record)) = Record::decode(&header(), first(&all), 0) {
                record.verified(&header(), all[HEAD_BYTES..].to_vec()).expect_err("it has changed");
            }
            all[at] ^= 1;
        }
        let mut all = End { records: 4, bytes: 9 }.encode(ID);
        assert_eq!(
            Record::decode(&header(), first(&all), 0).unwrap(),
            Found::End(End { records: 4, bytes: 9 })
        );
        for at in 0..all.len() {
            all[at] ^= 1;
            let found = Record::decode(&header(), first(&all), 0);
            assert!(!matches!(found, Ok(Found::End(_))), "byte {at}");
            all[at] ^= 1;
        }
    }
}
