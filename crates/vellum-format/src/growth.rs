//! How the file of an image grows.

/// How the file of an image grows when much will be written soon. What is left over is cut off when the image is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FileGrowth {
    /// By a part of its length at a time, by a hole.
    #[default]
    Usual,
    /// By this many bytes at a time at least, by a hole.
    Hole(u64),
    /// By a hole, too; for `space_bytes` of it at a time the host's file system finds space, where it can: many small writes through
    /// its page cache then look for none.
    Allocated {
        /// How much longer the file becomes at a time, at least.
        hole_bytes: u64,
        /// For how much of it space is found at a time.
        space_bytes: u64,
    },
}

impl FileGrowth {
    /// The least that is added at a time, in bytes.
    pub fn least(self) -> u64 {
        match self {
            Self::Usual => 0,
            Self::Hole(bytes) | Self::Allocated { hole_bytes: bytes, .. } => bytes,
        }
    }
}
