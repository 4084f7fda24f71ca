//! Mistakes on purpose, for the tests that look for mistakes: would they find one?
//!
//! Each is a place in the cache where one line is left out, or comes too early. The patches beside this file put these
//! places into a copy of the cache, and this file is added to it. [`is`] returns `false` unless the thread has asked
//! for that mistake, so without one the copy does what the cache does.

/// One mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bug {
    /// Records have no checks of the slots that they fill.
    NoChecks,
    /// A record that says clean has no checks of what was read.
    CleanWithoutChecks,
    /// A block is overwritten in place although home has the same.
    InPlaceOverClean,
    /// A block is overwritten in place as soon as a record names its slot.
    InPlaceUnproven,
    /// A block is overwritten in place although no record names its slot.
    InPlaceUnsealed,
    /// A block is overwritten in place in sectors that its entry has not.
    InPlaceOtherSectors,
    /// What the old entry has of a block, and the write has not, is left behind.
    CarriedOverLost,
    /// A flush does not know of what was overwritten in place.
    OverwriteNotCounted,
    /// A write does not claim its blocks.
    WrittenPastClaim,
    /// A discard is made at home, and forgotten on flash.
    DiscardForgotten,
    /// A block that gets a slot stays in its run of zeros.
    RunNotLeft,
    /// A slot is free as soon as it was released.
    ReusedBeforeDurable,
    /// A slot is free when the record that released it is durable, though a request still reads it.
    ReusedBesideReaders,
    /// A slot is free although a TRIM of it is under way.
    ReusedBesideTrim,
    /// An entry is proven by its own record.
    ProvenWhenDurable,
    /// After a recovery nothing is unproven.
    NewestForgotten,
    /// The record that is written together with slices already counts them.
    TailBeforeSlices,
    /// A slice is written with the record that it counts.
    SliceTooEarly,
    /// A slice is written over the one that counts.
    SliceOverItself,
    /// A record may name slots whose bytes are still on their way.
    PublishedBeforeWritten,
    /// A failed flush of flash is taken for a good one.
    FlushErrorIgnored,
    /// Blocks go home although a recovery would not find them on flash.
    HomeBeforeDurable,
    /// Blocks are clean although the flush of home is left out.
    HomeNotFlushed,
    /// A block is clean although it was written since write-back has read it.
    CleanThoughTouched,
    /// Zeros go home although a recovery would not find them on flash.
    RunHomeBeforeDurable,
    /// Runs of zeros are forgotten although the flush of home is left out.
    RunGoneUnflushed,
    /// What was read is published although the block was written since.
    AdmittedThoughTouched,
    /// A recovery does not verify the newest record.
    UnverifiedKept,
    /// Neighbouring blocks that share an item have no CRC.
    NeighboursUnchecked,
    /// Neighbouring blocks share an item although their slots do not follow each other.
    NeighbourElsewhere,
    /// A recovery takes one of the blocks that leave their slots in one item.
    NeighbourNotDropped,
    /// After a recovery one block of several that share an item is unproven.
    NeighbourForgotten,
    /// A recovery trusts what the cache of the host shows.
    SettleLeftOut,
    /// A recovery forgets which slices are behind.
    SliceBehindForgotten,
    /// A dirty block is read from home with its neighbours.
    JoinedThoughDirty,
    /// An opening with less memory leaves dirty blocks out, too.
    DirtyLeftOut,
    /// Slices are not written without the blocks that an opening has left out, whose slots are free.
    ShortLeft,
    /// Those slots are free before the slices are on flash.
    ShortUnflushed,
    /// A write begins before a record says that its region is being written.
    RegionAfterWrite,
    /// A region is settled although home was not flushed.
    SettledHomeUnflushed,
    /// A region is settled in the record that names its slots.
    SettledFlashUnflushed,
    /// A region is settled although somebody has entered it since home was flushed.
    SettledThoughWritten,
    /// A slot that a recovery verifies is written through in place.
    ThroughOverChecked,
    /// A recovery keeps what regions have that are being written.
    VoidKept,
    /// A block that two write through at the same time stays cached.
    ContestedKept,
    /// A write of a table leaves what flash has of it believed.
    TableKeptThoughWritten,
    /// A table that was read anew is believed although it was written meanwhile.
    TableAnewThoughWritten,
    /// A table that is first read while it is being written is believed.
    ChangeUnderWayForgotten,
    /// Tables, and what is cached of a file, keep their name while it is open for writing, so an unclean end leaves them believed.
    NameLeft,
    /// A write of a table that an earlier opening has left on flash, and that this one has not read, is not noticed.
    TablesUnknownAtOpening,
    /// A clean close names tables together with what was written since flash has got them.
    TablesNamedThoughWritten,
    /// A clean close names tables before their image is flushed.
    TablesNamedUnflushed,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 52] = [
        Self::NoChecks,
        Self::CleanWithoutChecks,
        Self::InPlaceOverClean,
        Self::InPlaceUnproven,
        Self::InPlaceUnsealed,
        Self::InPlaceOtherSectors,
        Self::CarriedOverLost,
        Self::OverwriteNotCounted,
        Self::WrittenPastClaim,
        Self::DiscardForgotten,
        Self::RunNotLeft,
        Self::ReusedBeforeDurable,
        Self::ReusedBesideReaders,
        Self::ReusedBesideTrim,
        Self::ProvenWhenDurable,
        Self::NewestForgotten,
        Self::TailBeforeSlices,
        Self::SliceTooEarly,
        Self::SliceOverItself,
        Self::PublishedBeforeWritten,
        Self::FlushErrorIgnored,
        Self::HomeBeforeDurable,
        Self::HomeNotFlushed,
        Self::CleanThoughTouched,
        Self::RunHomeBeforeDurable,
        Self::RunGoneUnflushed,
        Self::AdmittedThoughTouched,
        Self::UnverifiedKept,
        Self::NeighboursUnchecked,
        Self::NeighbourElsewhere,
        Self::NeighbourNotDropped,
        Self::NeighbourForgotten,
        Self::SettleLeftOut,
        Self::SliceBehindForgotten,
        Self::JoinedThoughDirty,
        Self::DirtyLeftOut,
        Self::ShortLeft,
        Self::ShortUnflushed,
        Self::RegionAfterWrite,
        Self::SettledHomeUnflushed,
        Self::SettledFlashUnflushed,
        Self::SettledThoughWritten,
        Self::ThroughOverChecked,
        Self::VoidKept,
        Self::ContestedKept,
        Self::TableKeptThoughWritten,
        Self::TableAnewThoughWritten,
        Self::ChangeUnderWayForgotten,
        Self::NameLeft,
        Self::TablesUnknownAtOpening,
        Self::TablesNamedThoughWritten,
        Self::TablesNamedUnflushed,
    ];
}

thread_local! {
    static CURRENT: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// From now on this thread's caches have this mistake, or none.
pub fn put_in(bug: Option<Bug>) {
    CURRENT.set(bug);
}

/// Whether the mistake is switched on.
pub(crate) fn is(bug: Bug) -> bool {
    CURRENT.get() == Some(bug)
}
