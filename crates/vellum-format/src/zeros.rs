//! `TEMPLATE.vzero`: where the disk of a template reads as zero, computed once for all the images that are
//! made over it.
//!
//! ```text
//!  0          8     12        16          24      28      32     40      64
//!  ├──────────┼─────┼─────────┼───────────┼───────┼───────┼──────┼───────┼─────────────────────────┬──────────────────
//!  │ VELLUMz1 │ crc │ version │ disk size │ shift │ files │ runs │ zeros │ files × (length, mtime) │ runs × (at, len)
//!  └──────────┴─────┴─────────┴───────────┴───────┴───────┴──────┴───────┴─────────────────────────┴──────────────────
//! ```
//!
//! All numbers are big-endian; `docs/format/zeros.md` is the specification. The list is trusted only if every
//! file of the template's chain is unchanged: of the same length, and last changed at the same moment.

use vellum_core::{Error, ErrorKind, GuestOffset, GuestSpan, Result};

use crate::bytes::{be32, be64, put32, put64};

/// What is added to the name of a template.
pub const SUFFIX: &str = ".vzero";
/// Zeros are found in units of this many bytes.
pub const GRANULARITY: u64 = 4096;
/// More runs than these are not stored: the shortest are left out.
pub const RUNS_MAX: usize = 1 << 20;
/// A file that is longer than this is not such a list.
pub const FILE_BYTES_MAX: u64 =
    HEADER_LEN as u64 + FILES_MAX as u64 * FILE_LEN as u64 + RUNS_MAX as u64 * RUN_LEN as u64;

const MAGIC: &[u8; 8] = b"VELLUMz1";
const VERSION: u32 = 1;
const HEADER_LEN: usize = 64;
/// At most this many images in one chain.
const FILES_MAX: usize = 256;
const FILE_LEN: usize = 24;
const RUN_LEN: usize = 16;
const CRC_AT: usize = 8;

/// What shows whether a file is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileFacts {
    /// Its length in bytes.
    pub len: u64,
    /// When it was last changed: seconds since 1970.
    pub seconds: i64,
    /// The nanoseconds of that time.
    pub nanoseconds: u32,
}

/// Where a disk reads as zero, and of which files that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zeros {
    /// The size of the disk in bytes.
    pub size: u64,
    /// The files of its chain, from the top down.
    pub files: Vec<FileFacts>,
    /// Runs of zeros: in order, neighbours merged, multiples of [`GRANULARITY`] except at the end of the
    /// disk.
    pub runs: Vec<GuestSpan>,
}

impl Zeros {
    /// How many bytes are zero.
    pub fn zero_bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.len()).sum()
    }

    /// The bytes of the file. If there are too many runs, the shortest are left out.
    pub fn encode(&self) -> Vec<u8> {
        let mut runs = self.runs.clone();
        let mut shortest = GRANULARITY;
        while runs.len() > RUNS_MAX {
            shortest *= 2;
            runs.retain(|run| run.len() >= shortest);
        }
        let mut bytes = vec![0; HEADER_LEN];
        bytes[..8].copy_from_slice(MAGIC);
        put32(&mut bytes, 12, VERSION);
        put64(&mut bytes, 16, self.size);
        put32(&mut bytes, 24, GRANULARITY.trailing_zeros());
        put32(&mut bytes, 28, u32::try_from(self.files.len()).expect("a chain has at most 256 images"));
        put64(&mut bytes, 32, runs.len() as u64);
        for file in &self.files {
            bytes.extend(file.len.to_be_bytes());
            bytes.extend(file.seconds.to_be_bytes());
            bytes.extend(file.nanoseconds.to_be_bytes());
            bytes.extend([0; 4]);
        }
        for run in &runs {
            bytes.extend(run.start().bytes().to_be_bytes());
            bytes.extend(run.len().to_be_bytes());
        }
        let crc = crc32c::crc32c(&bytes);
        put32(&mut bytes, CRC_AT, crc);
        bytes
    }

    /// Checks the bytes of a file.
    ///
    /// # Errors
    /// `Invalid` when it is something else, `Unsupported` for another version, `Corrupt` when it contradicts
    /// itself.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let corrupt = |what: &str| Error::new(ErrorKind::Corrupt, format!("the list of zeros {what}"));
        if !bytes.starts_with(MAGIC) || bytes.len() < HEADER_LEN {
            return Err(Error::invalid("it is not a list of zeros: it does not begin with the magic number"));
        }
        let version = be32(bytes, 12);
        if version != VERSION {
            return Err(Error::unsupported(format!(
                "version {version} of the list of zeros is not supported (1 is)"
            )));
        }
        let (files, runs) = (be32(bytes, 28) as usize, be64(bytes, 32));
        let is_sized = (1..=FILES_MAX).contains(&files)
            && runs <= RUNS_MAX as u64
            && bytes.len() as u64 == (HEADER_LEN + files * FILE_LEN) as u64 + runs * RUN_LEN as u64;
        if !is_sized {
            return Err(corrupt("does not have the length that it states"));
        }
        let mut copy = bytes.to_vec();
        put32(&mut copy, CRC_AT, 0);
        if crc32c::crc32c(&copy) != be32(bytes, CRC_AT) {
            return Err(corrupt("is damaged: its CRC32C is wrong"));
        }
        let size = be64(bytes, 16);
        if be32(bytes, 24) != GRANULARITY.trailing_zeros() {
            return Err(corrupt("has an unknown granularity"));
        }
        let (files, runs) = bytes[HEADER_LEN..].split_at(files * FILE_LEN);
        let files = files.chunks_exact(FILE_LEN).map(|file| FileFacts {
            len: be64(file, 0),
            seconds: be64(file, 8).cast_signed(),
            nanoseconds: be32(file, 16),
        });
        let mut found = Self { size, files: files.collect(), runs: Vec::new() };
        let mut last = None;
        for run in runs.chunks_exact(RUN_LEN) {
            let span = GuestSpan::checked(GuestOffset::new(be64(run, 0)), be64(run, 8))
                .filter(|span| span.end().bytes() <= size && !span.is_empty())
                .filter(|span| span.start().bytes().is_multiple_of(GRANULARITY))
                .filter(|span| span.end().bytes().is_multiple_of(GRANULARITY) || span.end().bytes() == size)
                .filter(|span| last.is_none_or(|end| span.start() > end))
                .ok_or_else(|| corrupt("has an impossible run"))?;
            last = Some(span.end());
            found.runs.push(span);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Zeros {
        let at = GuestOffset::new;
        Zeros {
            size: (1 << 20) + 512,
            files: vec![
                FileFacts { len: 77, seconds: -3, nanoseconds: 999_999_999 },
                FileFacts { len: 0, seconds: 1 << 40, nanoseconds: 0 },
            ],
            runs: vec![at(0).span(4096), at(65_536).span(65_536), at(1 << 20).span(512)],
        }
    }

    fn seal(bytes: &mut [u8]) {
        put32(bytes, CRC_AT, 0);
        let crc = crc32c::crc32c(bytes);
        put32(bytes, CRC_AT, crc);
    }

    #[test]
    fn a_list_reads_as_it_was_written() {
        let bytes = sample().encode();
        assert_eq!(bytes.len(), 64 + 2 * 24 + 3 * 16);
        assert_eq!(Zeros::parse(&bytes).unwrap(), sample());
        assert_eq!(sample().zero_bytes(), 4096 + 65_536 + 512);
        let empty = Zeros { runs: vec![], ..sample() };
        assert_eq!(Zeros::parse(&empty.encode()).unwrap(), empty);
    }

    #[test]
    fn every_bit_counts() {
        let bytes = sample().encode();
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Zeros::parse(&bytes).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(Zeros::parse(&bytes[..len]).is_err(), "cut to {len}");
        }
    }

    #[test]
    fn impossible_lists_are_refused_although_the_crc_is_right() {
        let run = |index: usize| 64 + 48 + 16 * index;
        let pokes: [(&str, usize, u64); 9] = [
            ("no files", 24, 12 << 32),
            ("too many files", 24, 12 << 32 | 257),
            ("granularity", 24, 13 << 32 | 2),
            ("runs", 32, u64::MAX),
            ("not aligned", run(0), 512),
            ("empty", run(0) + 8, 0),
            ("past 2^64", run(1) + 8, u64::MAX),
            ("touches the one before", run(1), 4096),
            ("past the disk", run(2) + 8, 4096),
        ];
        for (what, at, value) in pokes {
            let mut bytes = sample().encode();
            put64(&mut bytes, at, value);
            seal(&mut bytes);
            assert!(Zeros::parse(&bytes).is_err(), "{what}");
        }
        let mut bytes = sample().encode();
        put32(&mut bytes, 12, 2);
        seal(&mut bytes);
        assert_eq!(Zeros::parse(&bytes).unwrap_err().kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn of_too_many_runs_the_shortest_are_left_out() {
        let mut zeros = sample();
        zeros.size = 1 << 40;
        zeros.runs = (0..RUNS_MAX as u64 + 10)
            .map(|index| GuestOffset::new(index * 32_768).span(if index % 2 == 0 { 4096 } else { 8192 }))
            .collect();
        let found = Zeros::parse(&zeros.encode()).unwrap();
        assert_eq!(found.runs.len(), RUNS_MAX / 2 + 5);
        assert!(found.runs.iter().all(|run| run.len() == 8192));
    }
}
