//! How large an image will be that does not exist yet.

use vellum_core::BlockSize;

/// The sizes of an image, counted from its options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSizes {
    /// What is not data, in bytes, when all of the disk is stored.
    pub(crate) metadata: u64,
    /// Data is stored in blocks of this size.
    pub(crate) unit: BlockSize,
    /// The size of the disk in whole blocks, in bytes.
    pub(crate) disk: u64,
    /// Space for all of the disk is reserved from the beginning.
    pub(crate) is_full: bool,
}

impl ImageSizes {
    /// Data is stored in blocks of this size.
    pub fn unit(&self) -> BlockSize {
        self.unit
    }

    /// How large it is with this many bytes of data in whole blocks.
    pub fn required(&self, data: u64) -> u64 {
        self.metadata + if self.is_full { self.disk } else { data.min(self.disk) }
    }

    /// How large it is when all of the disk is stored.
    pub fn full(&self) -> u64 {
        self.metadata + self.disk
    }
}
