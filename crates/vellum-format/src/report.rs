//! The results of a check, a recovery and the like, in terms of no single format.

/// What may be repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Repair {
    /// Nothing is written.
    #[default]
    Nothing,
    /// Refcounts that are too high are lowered.
    Leaks,
    /// Refcounts and flags are corrected.
    All,
}

/// What a check found. Counts are of what is left after the repair.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Parts of the image that could not be read.
    pub check_errors: u64,
    /// Contradictions that can lose data.
    pub corruptions: u64,
    /// Clusters whose refcount is not zero although nothing refers to them.
    pub leaks: u64,
    /// Corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// Leaks that were repaired.
    pub leaks_fixed: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Those with a place in the image.
    pub allocated_clusters: u64,
    /// Those of them that do not follow the one before.
    pub fragmented_clusters: u64,
    /// Those of them that are compressed.
    pub compressed_clusters: u64,
    /// Clusters that a fast medium has alone. (native)
    pub moved_units: u64,
    /// The offset at which the last cluster in use ends.
    pub image_end_offset: u64,
}

impl CheckReport {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.check_errors == 0 && self.corruptions == 0 && self.leaks == 0
    }
}

/// What recovery did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Records that were replayed.
    pub records: u64,
    /// Pages of tables that were written.
    pub pages: u64,
    /// Units whose entry was embedded in a block. (native)
    pub embedded_units: u64,
    /// Clusters that were reserved but never used, and were freed. (qcow2)
    pub given_back: u64,
    /// The newest record was incomplete, or its data was, and it was left out. It had not been reported as
    /// durable.
    pub left_out: bool,
    /// It was complete, but names a packed block that is not there: either it had not been reported as
    /// durable, or the medium has lost the block since. (native)
    pub block_lost: bool,
    /// The whole image was checked and repaired. (qcow2)
    pub repaired: bool,
}

/// The result of a request to change the journal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JournalChange {
    /// The recorded size of the journal before, in bytes.
    pub before: Option<u64>,
    /// The recorded size now.
    pub after: Option<u64>,
    /// Names of features that the image does not have were left out of the header, to make room.
    pub names_cut: bool,
    /// The image had not been closed, and its journal was replayed first.
    pub recovery: Option<Recovery>,
}

/// What was found in an image that may not have been closed, and what was done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Its last writer had not closed it.
    pub was_dirty: bool,
    /// The result of replaying the journal, if there was one to replay.
    pub replayed: Option<Recovery>,
    /// The result of the full check, if one was needed.
    pub report: CheckReport,
    /// Changes of the closed image that a crash had interrupted, such as a revert, and that were finished.
    pub finished: Vec<&'static str>,
}
