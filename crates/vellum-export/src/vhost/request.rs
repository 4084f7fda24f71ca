//! What a guest asks for: the header of a chain becomes a checked request, or the status that refuses it.
//!
//! Everything here is pure. After this, only the presence of memory behind the addresses is checked.
//!
//! 1. A request that passes lies within the disk, moves whole sectors, and is no larger than
//!    [`REQUEST_BYTES_MAX`].
//! 2. An operation that was not offered is refused with `UNSUPP`, an invalid one with `IOERR`. SCSI commands
//!    are never passed on.
//!
//! Source: VIRTIO 1.2, 5.2.6.

use smallvec::SmallVec;
use vellum_core::{GuestOffset, GuestSpan};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::chain::HEADER_BYTES;

/// What positions and lengths are counted in, whatever the disk's blocks are.
pub(super) const SECTOR_BYTES: u64 = 512;

/// The most data of one request. A request with segments of the size and number that guests are given fits.
pub(super) const REQUEST_BYTES_MAX: usize = 32 << 20;

/// The most runs of one discard or write-zeroes.
pub(super) const RANGES_MAX: u32 = 32;

/// The most sectors of one run of a discard or write-zeroes: 2 GiB.
pub(super) const RANGE_SECTORS_MAX: u32 = 1 << 22;

/// How long a run of a discard or write-zeroes is on the wire.
const RANGE_BYTES: usize = 16;

/// The disk's identifier: this many bytes, padded with zeros.
pub(super) const ID_BYTES: usize = 20;

/// What became of a request, as the guest reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    IoError,
    Unsupported,
}

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    Read { at: GuestOffset },
    Write { at: GuestOffset },
    Flush,
    GetId,
    Discard,
    WriteZeroes,
}

/// A run to discard or zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) span: GuestSpan,
    /// The space may be given back.
    pub(super) may_unmap: bool,
}

/// What requests are measured by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    /// The size of the disk in sectors. What is behind the last whole one is not reached.
    pub(super) sectors: u64,
    pub(super) read_only: bool,
}

impl Status {
    /// In the layout of the guest's memory.
    pub(super) fn byte(self) -> u8 {
        let number = match self {
            Self::Ok => VIRTIO_BLK_S_OK,
            Self::IoError => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        };
        u8::try_from(number).expect("0, 1 or 2")
    }
}

impl Terms {
    fn span(&self, sector: u64, sectors: u64) -> Result<GuestSpan, Status> {
        let end = sector.checked_add(sectors).filter(|end| *end <= self.sectors);
        end.ok_or(Status::IoError)?;
        Ok(GuestOffset::new(sector * SECTOR_BYTES).span(sectors * SECTOR_BYTES))
    }

    fn transfer(&self, sector: u64, len: usize) -> Result<GuestOffset, Status> {
        if len > REQUEST_BYTES_MAX || !(len as u64).is_multiple_of(SECTOR_BYTES) {
            return Err(Status::IoError);
        }
        Ok(self.span(sector, len as u64 / SECTOR_BYTES)?.start())
    }

    fn writable(&self) -> Result<(), Status> {
        if self.read_only { Err(Status::IoError) } else { Ok(()) }
    }
}

impl Request {
    /// Reads a header. The lengths are those of the data behind it, and of the room before the status.
    pub(super) fn parse(
        header: &[u8; HEADER_BYTES],
        out_len: usize,
        in_len: usize,
        terms: &Terms,
    ) -> Result<Self, Status> {
        let (kind, rest) = header.split_first_chunk().expect("16 bytes");
        let (_reserved, sector) = rest.split_last_chunk().expect("12 bytes");
        let sector = u64::from_le_bytes(*sector);
        match u32::from_le_bytes(*kind) {
            VIRTIO_BLK_T_IN => Ok(Self::Read { at: terms.transfer(sector, in_len)? }),
            VIRTIO_BLK_T_OUT => {
                terms.writable()?;
                Ok(Self::Write { at: terms.transfer(sector, out_len)? })
            }
            VIRTIO_BLK_T_FLUSH => Ok(Self::Flush),
            VIRTIO_BLK_T_GET_ID if in_len < ID_BYTES => Err(Status::IoError),
            VIRTIO_BLK_T_GET_ID => Ok(Self::GetId),
            // A disk that cannot be written does not offer them.
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES if terms.read_only => Err(Status::Unsupported),
            kind @ (VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES) => {
                let most = usize::try_from(RANGES_MAX).expect("small") * RANGE_BYTES;
                if out_len == 0 || out_len > most || !out_len.is_multiple_of(RANGE_BYTES) {
                    return Err(Status::IoError);
                }
                Ok(if kind == VIRTIO_BLK_T_DISCARD { Self::Discard } else { Self::WriteZeroes })
            }
            _ => Err(Status::Unsupported),
        }
    }

    /// Reads the runs of a discard or write-zeroes. None of them is done unless all are right.
    pub(super) fn parse_ranges(self, bytes: &[u8], terms: &Terms) -> Result<SmallVec<[Range; 1]>, Status> {
        let (rows, rest) = bytes.as_chunks::<RANGE_BYTES>();
        assert!(rest.is_empty(), "the length was checked with the header");
        let one = |row: &[u8; RANGE_BYTES]| {
            let (sector, rest) = row.split_first_chunk().expect("16 bytes");
            let (sectors, flags) = rest.split_first_chunk().expect("8 bytes");
            let flags = u32::from_le_bytes(*flags.first_chunk().expect("4 bytes"));
            let may_unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
            // A discard with the flag has an error of its own; other flags are unknown.
            if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || (may_unmap && self == Self::Discard) {
                return Err(Status::Unsupported);
            }
            let sectors = u32::from_le_bytes(*sectors);
            if sectors > RANGE_SECTORS_MAX {
                return Err(Status::IoError);
            }
            Ok(Range { span: terms.span(u64::from_le_bytes(*sector), u64::from(sectors))?, may_unmap })
        };
        rows.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms { sectors: 100, read_only: false };
    const READ_ONLY: Terms = Terms { sectors: 100, read_only: true };

    /// What, where, how much data behind the header, how much room.
    type Asked = (u32, u64, usize, usize);

    fn header(kind: u32, sector: u64) -> [u8; HEADER_BYTES] {
        let mut bytes = [0xEE; HEADER_BYTES];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        bytes
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    }

    #[test]
    fn requests_and_what_becomes_of_them() {
        use Request::{Discard, Flush, GetId, Read, WriteZeroes};
        use Status::{IoError, Unsupported};
        let at = |sector: u64| GuestOffset::new(sector * 512);
        let huge = REQUEST_BYTES_MAX + 512;
        let rows: [(Asked, Result<Request, Status>); 24] = [
            ((VIRTIO_BLK_T_IN, 0, 0, 512), Ok(Read { at: at(0) })),
            ((VIRTIO_BLK_T_IN, 99, 0, 512), Ok(Read { at: at(99) })),
            ((VIRTIO_BLK_T_IN, 99, 0, 1024), Err(IoError)),
            ((VIRTIO_BLK_T_IN, 100, 0, 0), Ok(Read { at: at(100) })),
            ((VIRTIO_BLK_T_IN, 101, 0, 0), Err(IoError)),
            ((VIRTIO_BLK_T_IN, u64::MAX, 0, 512), Err(IoError)),
            ((VIRTIO_BLK_T_IN, 0, 0, 511), Err(IoError)),
            ((VIRTIO_BLK_T_IN, 0, 0, huge), Err(IoError)),
            ((VIRTIO_BLK_T_OUT, 1, 1024, 0), Ok(Request::Write { at: at(1) })),
            ((VIRTIO_BLK_T_OUT, 99, 1024, 0), Err(IoError)),
            ((VIRTIO_BLK_T_OUT, u64::MAX / 512, 1024, 0), Err(IoError)),
            ((VIRTIO_BLK_T_OUT, 0, 513, 0), Err(IoError)),
            ((VIRTIO_BLK_T_FLUSH, u64::MAX, 0, 0), Ok(Flush)),
            ((VIRTIO_BLK_T_GET_ID, 0, 0, 20), Ok(GetId)),
            ((VIRTIO_BLK_T_GET_ID, 0, 0, 19), Err(IoError)),
            ((VIRTIO_BLK_T_DISCARD, 0, 16, 0), Ok(Discard)),
            ((VIRTIO_BLK_T_DISCARD, 0, 0, 0), Err(IoError)),
            ((VIRTIO_BLK_T_DISCARD, 0, 17, 0), Err(IoError)),
            ((VIRTIO_BLK_T_WRITE_ZEROES, 0, 16 * 32, 0), Ok(WriteZeroes)),
            ((VIRTIO_BLK_T_WRITE_ZEROES, 0, 16 * 33, 0), Err(IoError)),
            // SCSI, the lifetime of a device, secure erase, and what there is not.
            ((2, 0, 512, 512), Err(Unsupported)),
            ((10, 0, 0, 512), Err(Unsupported)),
            ((14, 0, 16, 0), Err(Unsupported)),
            ((u32::MAX, 0, 0, 0), Err(Unsupported)),
        ];
        for ((kind, sector, out_len, in_len), expected) in rows {
            let parsed = Request::parse(&header(kind, sector), out_len, in_len, &TERMS);
            assert_eq!(parsed, expected, "{kind} at {sector}, {out_len} out, {in_len} in");
        }
    }

    #[test]
    fn a_disk_for_reading_is_not_written() {
        let parse = |kind| Request::parse(&header(kind, 0), 512, 512, &READ_ONLY);
        assert_eq!(parse(VIRTIO_BLK_T_IN), Ok(Request::Read { at: GuestOffset::new(0) }));
        assert_eq!(parse(VIRTIO_BLK_T_FLUSH), Ok(Request::Flush));
        assert_eq!(parse(VIRTIO_BLK_T_OUT), Err(Status::IoError));
        assert_eq!(parse(VIRTIO_BLK_T_DISCARD), Err(Status::Unsupported));
        assert_eq!(parse(VIRTIO_BLK_T_WRITE_ZEROES), Err(Status::Unsupported));
    }

    #[test]
    fn runs_are_all_right_or_none_is_done() {
        let zeroes = |bytes: &[u8]| Request::WriteZeroes.parse_ranges(bytes, &TERMS);
        let discard = |bytes: &[u8]| Request::Discard.parse_ranges(bytes, &TERMS);
        let span = |sector: u64, sectors: u64| GuestOffset::new(sector * 512).span(sectors * 512);
        let two = [range(1, 2, 0), range(99, 1, 1)].concat();
        let expected =
            [Range { span: span(1, 2), may_unmap: false }, Range { span: span(99, 1), may_unmap: true }];
        assert_eq!(zeroes(&two).expect("two").as_slice(), expected);
        assert_eq!(discard(&two), Err(Status::Unsupported));
        assert_eq!(discard(&range(0, 100, 0)).expect("one").len(), 1);
        assert_eq!(discard(&range(0, 101, 0)), Err(Status::IoError));
        assert_eq!(discard(&range(u64::MAX, 1, 0)), Err(Status::IoError));
        assert_eq!(zeroes(&range(0, 1, 2)), Err(Status::Unsupported));
        assert_eq!(zeroes(&range(0, RANGE_SECTORS_MAX + 1, 0)), Err(Status::IoError));
        assert_eq!(zeroes(&[range(0, 1, 0), range(100, 1, 0)].concat()), Err(Status::IoError));
    }
}
