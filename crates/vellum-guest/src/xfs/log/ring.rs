//! The records of the log: where it ends, where it begins, and which records are whole.
//!
//! ```text
//!   blocks of 512 bytes   │ 8 8 8 8 8 │ 8 8 7 8 │ 7 7 7 … 7 │ 7 7 7 │        the cycle in each block's first word
//!                         ▲ record    ▲ record  ▲ head                      (its second, in the first of a record)
//!                                         └ a hole: was not written, so the head is at the record before it
//!   record   1 to 8 headers │ body        header: cycle, length, its own place (LSN), the tail's, CRC32C, and the words
//!                                         of the body that the cycles have replaced
//! ```
//!
//! 1. Up to [`WRITES_MAX`] records are written at a time, in any order. So within that distance before the head a block of the
//!    cycle before is looked for, and the last records have to be whole; the head is before the first that is not.
//! 2. The newest whole record says where the tail is. What lies right behind the head may have been overwritten by records
//!    that are not whole, so there the tail is moved to the next whole one. Any other record that is not whole is damage.
//! 3. A record's numbers are checked against the log before anything is read by them.

use vellum_core::{Error, Result};

use crate::bytes::{be32, be64, le32};
use crate::pieces::Pieces;

const BLOCK: u64 = 512;
const BLOCK_LEN: usize = 512;
const RECORD_MAGIC: u32 = 0xfeed_babe;
/// What a record has for each header.
const HEADER_FOR: u32 = 32 << 10;
const WORDS: usize = 64;
/// A record's body, at most.
const RECORD_MAX: u32 = 256 << 10;
/// Records that may be under way at a time.
const WRITES_MAX: u64 = 8;
/// And their blocks.
const REACH: u64 = WRITES_MAX * (RECORD_MAX as u64) / BLOCK;
/// The last record begins no further before the head.
const BACK_MAX: u64 = 2 * (RECORD_MAX as u64) / BLOCK;
/// 2 GiB, which is the longest log there is.
const BLOCKS_MAX: u64 = 1 << 22;
/// A header on machines that align 64 bits, and on those that do not.
const HEADER_LENS: [usize; 2] = [328, 324];
/// What is read at a time.
const READ_BLOCKS: u64 = 128;
const LITTLE_ENDIAN: u32 = 1;
const UNMOUNT: u8 = 0x20;

/// A log in a volume.
pub(super) struct Ring<'x, 'a> {
    pieces: &'x Pieces<'a>,
    at: u64,
    blocks: u64,
    uuid: [u8; 16],
    /// A record without a CRC is not whole.
    needs_crc: bool,
}

/// What has to be replayed: from the tail up to the head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    pub(super) tail: u64,
    pub(super) head: u64,
    /// How far behind the head records may have been overwritten.
    reach: u64,
}

/// A record that is whole.
pub(super) struct Record {
    /// Its first block, and how many it has.
    pub(super) at: u64,
    pub(super) blocks: u64,
    pub(super) lsn: u64,
    pub(super) operations: u32,
    /// With the words that the cycles had replaced.
    pub(super) body: Vec<u8>,
}

/// The first block of a record, as far as it was checked.
struct Header {
    headers: u64,
    len: u64,
    bytes: Vec<u8>,
}

impl Header {
    fn blocks(&self) -> u64 {
        self.headers + self.len.div_ceil(BLOCK)
    }

    fn tail(&self) -> u64 {
        be64(&self.bytes, 24) & u64::from(u32::MAX)
    }

    /// The longest record of its time, with its headers.
    fn size(&self) -> u64 {
        self.headers * u64::from(HEADER_FOR)
    }

    fn operations(&self) -> u32 {
        be32(&self.bytes, 40)
    }
}

fn damaged(what: impl std::fmt::Display) -> Error {
    Error::corrupt(format!(
        "the log of its XFS file system is damaged ({what}): mount it in the guest, or repair it there (`xfs_repair`)"
    ))
}

impl<'x, 'a> Ring<'x, 'a> {
    /// This many bytes of the volume from there on.
    pub(super) fn new(
        pieces: &'x Pieces<'a>,
        at: u64,
        len: u64,
        uuid: [u8; 16],
        needs_crc: bool,
    ) -> Result<Self> {
        let blocks = len / BLOCK;
        if !(2..=BLOCKS_MAX).contains(&blocks) {
            return Err(damaged(format!("it has {blocks} blocks")));
        }
        Ok(Self { pieces, at, blocks, uuid, needs_crc })
    }

    async fn block(&self, number: u64) -> Result<Vec<u8>> {
        self.pieces.read(self.at + number % self.blocks * BLOCK, BLOCK).await
    }

    async fn blocks_of(&self, first: u64, count: u64) -> Result<Vec<u8>> {
        let (mut found, mut number, end) = (Vec::new(), first, first + count);
        while number < end {
            let place = number % self.blocks;
            let run = READ_BLOCKS.min(end - number).min(self.blocks - place);
            found.append(&mut self.pieces.read(self.at + place * BLOCK, run * BLOCK).await?);
            number += run;
        }
        Ok(found)
    }

    async fn cycle(&self, number: u64) -> Result<u32> {
        let block = self.block(number).await?;
        Ok(be32(&block, if be32(&block, 0) == RECORD_MAGIC { 4 } else { 0 }))
    }

    /// How far it is from one block to another, forwards.
    pub(super) fn distance(&self, from: u64, to: u64) -> u64 {
        (to % self.blocks + self.blocks - from % self.blocks) % self.blocks
    }

    pub(super) fn behind(&self, record: &Record) -> u64 {
        (record.at + record.blocks) % self.blocks
    }

    /// The first block from `from` to `upto` with this cycle.
    async fn first_with(&self, cycle: u32, from: u64, upto: u64) -> Result<Option<u64>> {
        for number in from..upto {
            if self.cycle(number).await? == cycle {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Where the log was written last, going by cycles alone. Nothing was ever written where there is none.
    async fn written_up_to(&self) -> Result<Option<u64>> {
        let (first, last) = (self.cycle(0).await?, self.cycle(self.blocks - 1).await?);
        if first == 0 {
            return Ok(None);
        }
        // What is behind the head has the cycle of the last block.
        let (mut head, old) = match first == last {
            true => (self.blocks, last - 1),
            false => {
                let (mut before, mut behind) = (0, self.blocks - 1);
                while behind - before > 1 {
                    let middle = before + (behind - before) / 2;
                    match self.cycle(middle).await? == last {
                        true => behind = middle,
                        false => before = middle,
                    }
                }
                (behind, last)
            }
        };
        // Blocks that were not written although later ones were.
        let reach = REACH.min(self.blocks);
        if head < reach
            && old > 0
            && let Some(hole) = self.first_with(old - 1, self.blocks - (reach - head), self.blocks).await?
        {
            return Ok(Some(hole));
        }
        if let Some(hole) = self.first_with(old, head.saturating_sub(reach), head).await? {
            head = hole;
        }
        Ok(Some(head % self.blocks))
    }

    /// The header in a block, if there is one whose numbers can be.
    fn header(&self, bytes: Vec<u8>) -> Option<Header> {
        let (version, len, size) = (be32(&bytes, 8), be32(&bytes, 12), be32(&bytes, 320));
        let headers = if version & 2 != 0 { size.div_ceil(HEADER_FOR).max(1) } else { 1 };
        let is_sound = be32(&bytes, 0) == RECORD_MAGIC
            && matches!(version, 1..=3)
            && (1..=RECORD_MAX).contains(&len)
            && headers <= RECORD_MAX / HEADER_FOR;
        let header = Header { headers: headers.into(), len: len.into(), bytes };
        (is_sound && header.blocks() <= self.blocks).then_some(header)
    }

    /// The last block before this one that begins a record, at most `most` blocks before it, and not itself.
    async fn begins_before(&self, block: u64, most: u64) -> Result<Option<u64>> {
        for back in 1..=most.min(self.blocks - 1) {
            let number = (block + self.blocks - back) % self.blocks;
            if be32(&self.block(number).await?, 0) == RECORD_MAGIC {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// The first block from this one on that begins a record, before `end`.
    async fn begins_from(&self, block: u64, end: u64) -> Result<Option<u64>> {
        for ahead in 0..self.distance(block, end) {
            let number = (block + ahead) % self.blocks;
            if be32(&self.block(number).await?, 0) == RECORD_MAGIC {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// The last record before the head.
    async fn last(&self, head: u64) -> Result<(u64, Option<Header>)> {
        match self.begins_before(head, BACK_MAX).await? {
            Some(at) => Ok((at, self.header(self.block(at).await?))),
            None => Err(damaged(format!("no record leads to block {head}"))),
        }
    }

    /// Whether it ends at the head, and says that the file system was unmounted.
    async fn is_unmount(&self, at: u64, header: &Header, head: u64) -> Result<bool> {
        let end = at + header.blocks();
        if header.operations() != 1 || end % self.blocks != head {
            return Ok(false);
        }
        Ok(self.block(at + header.headers).await?[9] & UNMOUNT != 0)
    }

    /// What has to be replayed, if there is something.
    pub(super) async fn ends(&self) -> Result<Option<Ends>> {
        let Some(mut head) = self.written_up_to().await? else { return Ok(None) };
        // A record that does not end at the head was not written to its end.
        let (at, header) = self.last(head).await?;
        if header.is_none_or(|header| (at + header.blocks()) % self.blocks != head) {
            head = at;
        }
        let (mut at, header) = self.last(head).await?;
        let mut header = header.ok_or_else(|| damaged(format!("its record at block {at}")))?;
        if self.is_unmount(at, &header, head).await? {
            return Ok(None);
        }
        // The last records, as many as may have been under way, in their order.
        let (tail, mut first) = (header.tail(), at);
        for _ in 1..WRITES_MAX {
            let back = self.distance(tail, first);
            match self.begins_before(first, back.min(BACK_MAX)).await? {
                Some(before) => first = before,
                None => break,
            }
        }
        while first != head {
            match self.record(first, head).await? {
                Some(record) => first = self.behind(&record),
                None => {
                    head = first;
                    let (newest, its) = self.last(head).await?;
                    header = its.ok_or_else(|| damaged(format!("its record at block {newest}")))?;
                    at = newest;
                    break;
                }
            }
        }
        if self.is_unmount(at, &header, head).await? {
            return Ok(None);
        }
        match header.tail() {
            tail if tail >= self.blocks || tail == head => Err(damaged(format!("its tail is block {tail}"))),
            tail => Ok(Some(Ends { tail, head, reach: WRITES_MAX * header.size() / BLOCK })),
        }
    }

    /// The record there, if it is whole and ends at the head at the latest.
    async fn record(&self, at: u64, head: u64) -> Result<Option<Record>> {
        let Some(header) = self.header(self.block(at).await?) else { return Ok(None) };
        let lsn = be64(&header.bytes, 16);
        if header.blocks() > self.distance(at, head) || lsn & u64::from(u32::MAX) != at {
            return Ok(None);
        }
        let headers = self.blocks_of(at, header.headers).await?;
        let headers: Vec<&[u8]> = headers.chunks_exact(BLOCK_LEN).collect();
        let mut body = self.blocks_of(at + header.headers, header.blocks() - header.headers).await?;
        let whole = usize::try_from(header.len).expect("256 KiB");
        if !self.has_its_crc(&headers, &body[..whole]) {
            return Ok(None);
        }
        if header.bytes[304..320] != self.uuid {
            return Err(damaged("it is the log of another file system"));
        }
        if be32(&header.bytes, 300) != LITTLE_ENDIAN {
            return Err(Error::unsupported(
                "the log of its XFS file system was written by a big-endian machine, and is not replayed here: unmount \
                 it in the guest, and try again",
            ));
        }
        for (index, block) in body.chunks_mut(BLOCK_LEN).enumerate() {
            let Some(words) = headers.get(index / WORDS) else { return Ok(None) };
            let from = if index < WORDS { 44 } else { 4 } + 4 * (index % WORDS);
            block[..4].copy_from_slice(&words[from..from + 4]);
        }
        body.truncate(whole);
        let operations = be32(&header.bytes, 40);
        Ok(Some(Record { at, blocks: header.blocks(), lsn, operations, body }))
    }

    /// The CRC is over the first header, as long as the machine has it, the cycles in the others, and the body.
    fn has_its_crc(&self, headers: &[&[u8]], body: &[u8]) -> bool {
        let its = le32(headers[0], 32);
        if its == 0 && !self.needs_crc {
            return true;
        }
        HEADER_LENS.into_iter().any(|len| {
            let mut crc = crc32c::crc32c(&headers[0][..32]);
            crc = crc32c::crc32c_append(crc, &[0; 4]);
            crc = crc32c::crc32c_append(crc, &headers[0][36..len]);
            if be32(headers[0], 8) & 2 != 0 {
                for header in headers.iter().take(body.len().div_ceil(HEADER_FOR as usize)).skip(1) {
                    crc = crc32c::crc32c_append(crc, &header[..4 + 4 * WORDS]);
                }
            }
            crc32c::crc32c_append(crc, body) == its
        })
    }

    /// The record there, which is the next one to be replayed.
    pub(super) async fn next(&self, at: u64, head: u64) -> Result<Record> {
        let record = self.record(at, head).await?;
        record.ok_or_else(|| damaged(format!("its record at block {at}")))
    }

    /// As above. Right behind the head, what is not whole is passed over (invariant 2).
    pub(super) async fn next_or_later(&self, at: u64, ends: Ends) -> Result<Record> {
        let mut next = Some(at);
        while let Some(begins) = next.filter(|begins| *begins != ends.head) {
            match self.record(begins, ends.head).await? {
                Some(record) => return Ok(record),
                None if self.distance(ends.head, begins) <= ends.reach => {
                    next = self.begins_from((begins + 1) % self.blocks, ends.head).await?;
                }
                None => return Err(damaged(format!("its record at block {begins}"))),
            }
        }
        Err(damaged(format!("no record at its tail, block {}", ends.tail)))
    }
}
