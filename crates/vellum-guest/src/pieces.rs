//! A volume's bytes, read in pieces of 64 KiB, some of which are kept.
//!
//! 1. A read past the end of the volume is an error of the file system, and never reaches the disk.
//! 2. The number of reads is bounded by the size of the volume. A file system reads each of its blocks a few times; one
//!    whose blocks lead to each other in circles comes to the bound.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use vellum_core::{Buffer, Disk, Error, GuestOffset, GuestSpan, Result};

const PIECE: u64 = 64 << 10;
/// How many are kept: 16 MiB.
const KEPT: u64 = 256;
/// Reads for each KiB of a volume: an inode of 128 bytes is read up to three times.
const READS_PER_KIB: u64 = 32;
const READS_MORE: u64 = 4096;
const READS_MAX: u64 = 1 << 30;

/// A piece, and its number.
type Piece = (u64, Rc<[u8]>);

pub(crate) struct Pieces<'a> {
    disk: &'a dyn Disk,
    volume: GuestSpan,
    kept: RefCell<Vec<Option<Piece>>>,
    reads_left: Cell<u64>,
}

impl<'a> Pieces<'a> {
    /// The volume lies in the disk.
    pub(crate) fn new(disk: &'a dyn Disk, volume: GuestSpan) -> Self {
        let reads = (volume.len() / 1024).saturating_mul(READS_PER_KIB).saturating_add(READS_MORE);
        let kept = volume.len().div_ceil(PIECE).min(KEPT);
        Self {
            disk,
            volume,
            kept: RefCell::new((0..kept).map(|_| None).collect()),
            reads_left: Cell::new(reads.min(READS_MAX)),
        }
    }

    pub(crate) fn volume(&self) -> GuestSpan {
        self.volume
    }

    pub(crate) fn len(&self) -> u64 {
        self.volume.len()
    }

    /// `len` bytes, at most 64 KiB.
    pub(crate) async fn read(&self, at: u64, len: u64) -> Result<Vec<u8>> {
        let end = at.checked_add(len).filter(|end| *end <= self.len());
        let Some(end) = end else {
            let why = format!("it refers to byte {at}, behind its end at {}", self.len());
            return Err(Error::corrupt(why));
        };
        let mut found = Vec::with_capacity(usize::try_from(len).expect("64 KiB"));
        let mut at = at;
        while at < end {
            let piece = self.piece(at / PIECE).await?;
            let from = usize::try_from(at % PIECE).expect("in a piece");
            let upto = usize::try_from((end - at / PIECE * PIECE).min(PIECE)).expect("in a piece");
            found.extend_from_slice(&piece[from..upto]);
            at = (at / PIECE + 1) * PIECE;
        }
        Ok(found)
    }

    async fn piece(&self, number: u64) -> Result<Rc<[u8]>> {
        let left = self.reads_left.get();
        if left == 0 {
            return Err(Error::corrupt("its blocks lead to each other in circles"));
        }
        self.reads_left.set(left - 1);
        let place = usize::try_from(number % KEPT).expect("a few");
        let place = place % self.kept.borrow().len().max(1);
        if let Some((its, bytes)) = &self.kept.borrow()[place]
            && *its == number
        {
            return Ok(bytes.clone());
        }
        let at = number * PIECE;
        let len = usize::try_from(PIECE.min(self.len() - at)).expect("a piece");
        let start: GuestOffset = self.volume.start() + at;
        let read = self.disk.read(start, Buffer::for_overwrite(len)).await?;
        let bytes: Rc<[u8]> = read.to_vec().into();
        self.kept.borrow_mut()[place] = Some((number, bytes.clone()));
        Ok(bytes)
    }
}
