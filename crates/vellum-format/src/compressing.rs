//! Storing data compressed, for formats that can: whole blocks of a disk are compressed first, and written many at a time.
//!
//! ```text
//!   blocks ──compress──► packed blocks ──write_compressed──► the image
//!            on threads for long computations                as any write
//! ```

use vellum_core::{BlockSize, Buffer, GuestOffset, LocalFuture, Result};

/// Stores whole blocks of a disk compressed.
pub trait Compressing: Send + Sync {
    /// Data is compressed in blocks of this size, at multiples of it.
    fn block(&self) -> BlockSize;

    /// The levels of compression that there are: from fast to small.
    fn levels(&self) -> std::ops::RangeInclusive<i32>;

    /// Compresses blocks, each by itself, where long computations run. The last block of the disk may be shorter.
    ///
    /// # Errors
    /// Those of the compression.
    fn compress<'a>(
        &'a self,
        blocks: Vec<(GuestOffset, Buffer)>,
        level: Option<i32>,
    ) -> LocalFuture<'a, Result<Vec<PackedBlock>>>;

    /// Writes them, compressed ones one after the other. A block that cannot be compressed where it is gets written as it
    /// is. As durable as any write.
    ///
    /// # Errors
    /// `Unsupported` where the image can have no compressed data, and those of a write.
    fn write_compressed<'a>(&'a self, blocks: Vec<PackedBlock>) -> LocalFuture<'a, Result<()>>;
}

/// A block of a disk that may have become smaller.
pub struct PackedBlock {
    /// Where it is on the disk.
    pub at: GuestOffset,
    /// Its bytes.
    pub content: BlockContent,
}

/// The bytes of a block.
pub enum BlockContent {
    /// In compressed form.
    Compressed(Vec<u8>),
    /// As they are: compression makes them no smaller.
    Plain(Buffer),
}
