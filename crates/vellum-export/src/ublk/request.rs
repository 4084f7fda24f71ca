//! What the kernel asks for: a row becomes a checked request, or the `errno` that refuses it.
//!
//! Everything here is pure. Nothing is checked again after this.
//!
//! 1. A request that passes lies within the disk; its data is no larger than [`REQUEST_BYTES_MAX`].
//! 2. An operation that was not offered is refused with EOPNOTSUPP, an invalid one with EIO, a write to a
//!    read-only disk with EROFS.
//! 3. Flags about how a request came about, such as that it may fail fast, are ignored.
//!
//! Source: `include/uapi/linux/ublk_cmd.h`.

use vellum_core::{GuestOffset, GuestSpan};

/// What positions and lengths are counted in, whatever the disk's blocks are.
pub const SECTOR_BYTES: u64 = 512;

/// The most data of one request.
pub const REQUEST_BYTES_MAX: u32 = 512 << 10;

/// The most sectors of one discard or write-zeroes: 2 GiB.
pub const RANGE_SECTORS_MAX: u32 = 1 << 22;

/// The most sectors of one write-zeroes where each zero is written: 8 MiB, or one request would take minutes.
pub(super) const ZEROES_WRITTEN_SECTORS_MAX: u32 = 1 << 14;

const OP_READ: u32 = 0;
const OP_WRITE: u32 = 1;
const OP_FLUSH: u32 = 2;
const OP_DISCARD: u32 = 3;
const OP_WRITE_ZEROES: u32 = 5;
const OP_MASK: u32 = 0xFF;

const FLAG_FUA: u32 = 1 << 13;
const FLAG_NO_UNMAP: u32 = 1 << 15;

/// A request as the kernel shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Row {
    /// The operation, in the low byte, and its flags.
    pub op_flags: u32,
    /// How many sectors.
    pub sectors: u32,
    /// The first of them.
    pub start: u64,
}

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Read { at: GuestOffset, len: usize },
    Write { at: GuestOffset, len: usize, fua: bool },
    Flush,
    Discard { span: GuestSpan, fua: bool },
    WriteZeroes { span: GuestSpan, fua: bool, may_unmap: bool },
}

/// What requests are measured by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    /// The size of the disk.
    pub(super) sectors: u64,
    pub(super) read_only: bool,
    /// Each change is durable when it is answered.
    pub(super) write_through: bool,
}

impl Terms {
    fn span(&self, row: &Row) -> Result<GuestSpan, i32> {
        let sectors = u64::from(row.sectors);
        let end = row.start.checked_add(sectors).filter(|end| *end <= self.sectors);
        end.ok_or(libc::EIO)?;
        Ok(GuestOffset::new(row.start * SECTOR_BYTES).span(sectors * SECTOR_BYTES))
    }

    fn transfer(&self, row: &Row) -> Result<(GuestOffset, usize), i32> {
        let bytes = u64::from(row.sectors) * SECTOR_BYTES;
        if row.sectors == 0 || bytes > u64::from(REQUEST_BYTES_MAX) {
            return Err(libc::EIO);
        }
        Ok((self.span(row)?.start(), usize::try_from(bytes).expect("it is small")))
    }

    fn range(&self, row: &Row) -> Result<GuestSpan, i32> {
        self.writable()?;
        if row.sectors > RANGE_SECTORS_MAX {
            return Err(libc::EIO);
        }
        self.span(row)
    }

    fn writable(&self) -> Result<(), i32> {
        if self.read_only { Err(libc::EROFS) } else { Ok(()) }
    }
}

impl Request {
    pub(super) fn parse(row: &Row, terms: &Terms) -> Result<Self, i32> {
        let fua = terms.write_through || row.op_flags & FLAG_FUA != 0;
        match row.op_flags & OP_MASK {
            OP_READ => terms.transfer(row).map(|(at, len)| Self::Read { at, len }),
            OP_WRITE => {
                terms.writable()?;
                terms.transfer(row).map(|(at, len)| Self::Write { at, len, fua })
            }
            OP_FLUSH => Ok(Self::Flush),
            OP_DISCARD => Ok(Self::Discard { span: terms.range(row)?, fua }),
            OP_WRITE_ZEROES => {
                let may_unmap = row.op_flags & FLAG_NO_UNMAP == 0;
                Ok(Self::WriteZeroes { span: terms.range(row)?, fua, may_unmap })
            }
            _ => Err(libc::EOPNOTSUPP),
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    const TERMS: Terms = Terms { sectors: 100, read_only: false, write_through: false };
    const THROUGH: Terms = Terms { sectors: 100, read_only: false, write_through: true };
    const READ_ONLY: Terms = Terms { sectors: 100, read_only: true, write_through: false };
    const LARGE: Terms = Terms { sectors: 1 << 40, read_only: false, write_through: false };

    fn row(op_flags: u32, start: u64, sectors: u32) -> Row {
        Row { op_flags, sectors, start }
    }

    fn at(sector: u64) -> GuestOffset {
        GuestOffset::new(sector * 512)
    }

    #[test]
    fn requests_and_what_becomes_of_them() {
        use Request::{Discard, Flush, Read, Write, WriteZeroes};
        let span = |sector, sectors: u64| at(sector).span(sectors * 512);
        let (fua, keep, meta) = (FLAG_FUA, FLAG_NO_UNMAP, 1 << 11);
        let most = REQUEST_BYTES_MAX / 512;
        let rows = [
            (TERMS, row(OP_READ, 0, 1), Ok(Read { at: at(0), len: 512 })),
            (TERMS, row(OP_READ | meta, 99, 1), Ok(Read { at: at(99), len: 512 })),
            (TERMS, row(OP_READ, 99, 2), Err(libc::EIO)),
            (TERMS, row(OP_READ, 0, 0), Err(libc::EIO)),
            (TERMS, row(OP_READ, u64::MAX, 1), Err(libc::EIO)),
            (TERMS, row(OP_READ, u64::MAX / 512, 1), Err(libc::EIO)),
            (LARGE, row(OP_READ, 7, most), Ok(Read { at: at(7), len: 512 << 10 })),
            (LARGE, row(OP_READ, 7, most + 1), Err(libc::EIO)),
            (LARGE, row(OP_WRITE, 7, u32::MAX), Err(libc::EIO)),
            (TERMS, row(OP_WRITE, 1, 2), Ok(Write { at: at(1), len: 1024, fua: false })),
            (TERMS, row(OP_WRITE | fua, 1, 2), Ok(Write { at: at(1), len: 1024, fua: true })),
            (THROUGH, row(OP_WRITE, 1, 2), Ok(Write { at: at(1), len: 1024, fua: true })),
            (THROUGH, row(OP_DISCARD, 0, 8), Ok(Discard { span: span(0, 8), fua: true })),
            (TERMS, row(OP_WRITE, 100, 1), Err(libc::EIO)),
            (READ_ONLY, row(OP_WRITE, 1, 1), Err(libc::EROFS)),
            (READ_ONLY, row(OP_READ, 1, 1), Ok(Read { at: at(1), len: 512 })),
            (READ_ONLY, row(OP_FLUSH, 0, 0), Ok(Flush)),
            (TERMS, row(OP_FLUSH, u64::MAX, u32::MAX), Ok(Flush)),
            (TERMS, row(OP_DISCARD, 0, 100), Ok(Discard { span: span(0, 100), fua: false })),
            (TERMS, row(OP_DISCARD, 1, 100), Err(libc::EIO)),
            (READ_ONLY, row(OP_DISCARD, 0, 1), Err(libc::EROFS)),
            (LARGE, row(OP_DISCARD, 0, RANGE_SECTORS_MAX + 1), Err(libc::EIO)),
            (
                TERMS,
                row(OP_WRITE_ZEROES, 4, 8),
                Ok(WriteZeroes { span: span(4, 8), fua: false, may_unmap: true }),
            ),
            (
                TERMS,
                row(OP_WRITE_ZEROES | keep | fua, 4, 8),
                Ok(WriteZeroes { span: span(4, 8), fua: true, may_unmap: false }),
            ),
            (READ_ONLY, row(OP_WRITE_ZEROES, 0, 1), Err(libc::EROFS)),
            // Write-same, zones, and what there is not.
            (TERMS, row(4, 0, 1), Err(libc::EOPNOTSUPP)),
            (TERMS, row(10, 0, 1), Err(libc::EOPNOTSUPP)),
            (TERMS, row(18, 0, 1), Err(libc::EOPNOTSUPP)),
            (TERMS, row(0xFF, 0, 1), Err(libc::EOPNOTSUPP)),
        ];
        for (terms, row, expected) in rows {
            assert_eq!(Request::parse(&row, &terms), expected, "{row:?} of {terms:?}");
        }
    }

    #[test]
    fn no_row_whatever_leaves_the_disk_or_asks_for_too_much() {
        for seed in 0..200_000 {
            let mut random = Random::from_seed(seed);
            let terms = Terms {
                sectors: random.any() >> 9 >> random.index(55),
                read_only: random.one_in(4),
                write_through: random.one_in(2),
            };
            // Most of them near a limit, or nothing could pass.
            let start = match random.index(3) {
                0 => random.any(),
                1 => terms.sectors.wrapping_add(random.any() % 8).wrapping_sub(4),
                _ => random.any() >> random.index(64),
            };
            let words = random.any();
            let sectors = u32::try_from(words >> 32).expect("32 bits") >> random.index(32);
            let op = u32::try_from(words & 7).expect("3 bits");
            let flags = u32::try_from(words & u64::from(!OP_MASK)).expect("32 bits");
            let row = row(op | flags, start, sectors);
            let Ok(request) = Request::parse(&row, &terms) else { continue };
            let (span, is_write) = match request {
                Request::Flush => continue,
                Request::Read { at, len } | Request::Write { at, len, .. } => {
                    assert!(len > 0 && len <= REQUEST_BYTES_MAX as usize, "seed {seed}: {row:?}");
                    (at.span(len as u64), !matches!(request, Request::Read { .. }))
                }
                Request::Discard { span, .. } | Request::WriteZeroes { span, .. } => (span, true),
            };
            assert!(
                span.end().bytes() <= terms.sectors.saturating_mul(512),
                "seed {seed}: {row:?} of {terms:?}"
            );
            assert!(!(is_write && terms.read_only), "seed {seed}: {row:?} of {terms:?}");
        }
    }
}
