//! What an opening came to, for people and programs.

/// What an opening came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Opened {
    /// Slices of the map that were read.
    pub slices_read: u64,
    /// Clean blocks for which the memory was too little: they are not cached any more.
    pub given_up: u64,
    /// Slices that were written without them.
    pub slices_written: u64,
    /// The most memory that it took at a time, as the budget counts it: the map as far as it was read, and what was read
    /// for it.
    pub bytes_max: u64,
}
