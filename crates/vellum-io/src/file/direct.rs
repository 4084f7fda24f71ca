//! Transfers that bypass the page cache (O_DIRECT), of any byte range.
//!
//! ```text
//!   blocks       │        │        │        │        │         │  … end of the file
//!   a write          ├─edge─┼──────body───────┼edge─┤
//!                       │            │           └─ in or after the last block: through the page cache, exactly
//!                       │            └───────────── whole blocks from aligned memory, or copied into such
//!                       └────────────────────────── read the block, change it, write it back, alone
//! ```
//!
//! The drive moves whole blocks, from aligned memory only. Anything else is *bounced*: read into aligned
//! memory and copied. Writing part of a block is a read-modify-write, during which no other request may write
//! the block; the [`gate`](super::gate) ensures that.
//!
//! The file's last block is special when the file does not fill it: writing all of it would extend the file.
//! There, and beyond the end, edges are written through the page cache with a second descriptor, which keeps
//! the length exact and grows the file as any write does. The kernel keeps the two coherent as long as a page
//! is not written both ways at once: the gate's stripes are larger than pages. A block device has no such
//! block.
//!
//! 1. Whole aligned blocks from aligned memory are transferred directly, without a copy.
//! 2. Part of a block is changed by one request at a time, with no whole-block write in flight in its stripe.
//! 3. The file's length is exact at all times: nothing is written past the end of the requested range.

use vellum_core::{BlockSize, Buffer, ImageOffset, ImageSpan, Result};

use super::gate::Passage;
use super::{File, POSITION_MAX};
use crate::driver::op::Transfer;

/// How many bytes are bounced at once.
const BOUNCE_MAX: u64 = 1 << 20;

/// What O_DIRECT requires of transfers to this file.
pub(super) struct Direct {
    /// Position and length are multiples of this.
    pub(super) block: BlockSize,
    /// Memory starts at multiples of this.
    pub(super) memory: usize,
}

impl Direct {
    /// The whole blocks in that many bytes.
    pub(super) fn whole(&self, len: usize) -> usize {
        to_usize(self.block.round_down(len as u64))
    }

    fn aligns(&self, span: ImageSpan) -> bool {
        self.block.aligns(span.start()) && self.block.aligns(span.end())
    }

    /// Whether the drive can use the memory as it is.
    fn fits(&self, buffer: &Buffer) -> bool {
        buffer.is_aligned_to(self.memory, to_usize(self.block.bytes()))
    }
}

fn to_usize(len: u64) -> usize {
    usize::try_from(len).expect("a buffer fits the address space")
}

impl File {
    /// Reads any byte range.
    pub(super) async fn read_direct(&self, direct: &Direct, at: u64, mut buffer: Buffer) -> Result<Buffer> {
        let span = ImageSpan::checked(ImageOffset::new(at), buffer.len() as u64);
        let span = span.filter(|span| span.end().bytes() <= POSITION_MAX);
        let Some(span) = span.filter(|span| !direct.aligns(*span) || !direct.fits(&buffer)) else {
            // As it is; or where no file reaches.
            return self.read_run(at, buffer).await;
        };
        for part in chunks(direct.block.widen(span)) {
            let bounce = Buffer::for_overwrite(to_usize(part.len()));
            let bounce = self.read_run(part.start().bytes(), bounce).await?;
            let wanted = part.intersect(span);
            let from = to_usize(wanted.start() - part.start());
            let to = to_usize(wanted.start() - span.start());
            buffer.copy_from(to, &bounce.slice()[from..from + to_usize(wanted.len())]);
        }
        Ok(buffer)
    }

    /// Writes any byte range.
    pub(super) async fn write_direct(&self, direct: &Direct, at: u64, mut data: Buffer) -> Result<()> {
        self.check_write(at, data.len())?;
        if data.is_empty() {
            return Ok(());
        }
        let span = ImageOffset::new(at).span(data.len() as u64);
        if direct.aligns(span) {
            return self.write_blocks(direct, at, data).await;
        }
        let body = direct.block.narrow(span);
        if body.is_empty() {
            // One or two parts of blocks, and nothing whole between them.
            for part in direct.block.pieces_of(span) {
                let piece = data.split_to(to_usize(part.len()));
                self.write_edge(direct, part, piece).await?;
            }
            return Ok(());
        }
        let head = ImageSpan::between(span.start(), body.start());
        let tail = ImageSpan::between(body.end(), span.end());
        if !head.is_empty() {
            self.write_edge(direct, head, data.split_to(to_usize(head.len()))).await?;
        }
        let end = data.split_off(to_usize(body.len()));
        self.write_blocks(direct, body.start().bytes(), data).await?;
        if !tail.is_empty() {
            self.write_edge(direct, tail, end).await?;
        }
        Ok(())
    }

    /// Writes whole blocks.
    async fn write_blocks(&self, direct: &Direct, at: u64, data: Buffer) -> Result<()> {
        if direct.fits(&data) {
            let passage = Passage::shared(&self.handle, at, data.len() as u64).await;
            return self.write_all(self.transfer(at, data, passage)).await.map(drop);
        }
        let span = ImageOffset::new(at).span(data.len() as u64);
        for part in chunks(span) {
            let mut bounce = Buffer::for_overwrite(to_usize(part.len()));
            data.copy_to(to_usize(part.start() - span.start()), bounce.slice_mut());
            let passage = Passage::shared(&self.handle, part.start().bytes(), part.len()).await;
            self.write_all(self.transfer(part.start().bytes(), bounce, passage)).await?;
        }
        Ok(())
    }

    /// Writes part of one block.
    async fn write_edge(&self, direct: &Direct, part: ImageSpan, data: Buffer) -> Result<()> {
        let block = direct.block.widen(part);
        let passage = Passage::alone(&self.handle, part.start().bytes()).await;
        // Checked while the block is locked, so a file that reaches beyond the block now is not truncated
        // meanwhile.
        if !self.limits.fixed_len && block.end().bytes() > self.handle.len() {
            let transfer = self.transfer(part.start().bytes(), data, passage);
            return self.write_all(Transfer { cached: true, ..transfer }).await.map(drop);
        }
        let bounce = Buffer::for_overwrite(to_usize(block.len()));
        let mut bounce = self.read_run(block.start().bytes(), bounce).await?;
        let start = to_usize(part.start() - block.start());
        data.copy_to(0, &mut bounce.slice_mut()[start..start + data.len()]);
        self.write_all(self.transfer(block.start().bytes(), bounce, passage)).await.map(drop)
    }
}

/// The run in chunks that are worth bouncing at once, cut at multiples of their size.
fn chunks(span: ImageSpan) -> impl Iterator<Item = ImageSpan> {
    const { assert!(BOUNCE_MAX.is_power_of_two()) };
    BlockSize::from_shift(BOUNCE_MAX.trailing_zeros()).pieces_of(span)
}
