//! Bugs on purpose, for the tests that look for mistakes: would they find one?
//!
//! Each bug is a place in the engine where one line is left out, or comes too early. The patches beside this
//! file put these places into a copy of the engine, and this file is added to it. [`is`] returns `false` unless
//! the thread has asked for that bug, so without one the copy does what the engine does.

/// One mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bug {
    /// Records have no checksums of the data that they count on.
    NoChecks,
    /// A sector is overwritten in the transaction that allocated it, and its checksum stays as it was.
    StaleCheck,
    /// The second value of a sector that is being overwritten is left out of the record.
    NoOthers,
    /// That a new table begins as zeros is left out of the record.
    NoZeros,
    /// Clusters that are reserved, or freed, and whose refcounts are pending, are left out of the record.
    NoPending,
    /// A cluster that was published still counts as reserved.
    PendingNotRemoved,
    /// Entries of the L1 table are left out of the record.
    NoL1,
    /// Refcounts are left out of the record.
    NoRefcounts,
    /// A sector whose check may have to hold is overwritten in place.
    UnverifiedOverwritten,
    /// Units that are filled anew get their bytes although a check may have to hold there.
    FilledOverUnverified,
    /// A transaction counts as verified when its own record is flushed.
    DurableIsVerified,
    /// What leads to bytes (entries, bits, masks) is published, and joins the transaction, before the bytes
    /// are written.
    PublishedBeforeWritten,
    /// A unit that was made zero is filled again at its place while an older write may still land there.
    LateWritesMet,
    /// Entries and what belongs to them are sealed one after the other, not at one moment.
    SealHalf,
    /// Without a journal, a seal does not wait for changes that are half done.
    SealedBesideChanges,
    /// Pages of a transaction are checkpointed before its record is flushed.
    CheckpointBeforeCommit,
    /// Pages are checkpointed whose old bytes a recovery may still have to verify.
    HomeBeforeVerified,
    /// The record that is written together with the pages already states that they are in place.
    TailBeforeHome,
    /// Records before the new tail are given up before a flushed record states where the tail is.
    TailUsedEarly,
    /// A failed host flush is taken for a good one.
    FlushErrorIgnored,
    /// The records before an ordered commit do not ask for a repair.
    BarrierWantsNoRepair,
    /// The record before an ordered commit needs no older one, and the pages are not checkpointed.
    BarrierBeforeHome,
    /// Freed clusters are given back before it is durable that they are free.
    FreedBeforeDurable,
    /// A punched cluster counts as zero before a flush covers the punch.
    PunchNotCovered,
    /// Clusters are given back whose bytes a replay would bring back.
    GivenBackInRecords,
    /// A sector of which records have bytes is overwritten in place as soon as it is verified.
    FullNotSticky,
    /// A page is loaded from its home location although a newer version is not checkpointed yet.
    OldPageLoaded,
    /// The journal begins anew over its old records: no zeros, the same generation.
    OldRunKept,
    /// Closing clears the bit without a flush after the pages.
    ClosedBeforeHome,
    /// Recovery takes what the host's page cache shows for what the medium has.
    CacheBelieved,
    /// Recovery does not look at checksums.
    NoVerify,
    /// Recovery replays the newest record alone.
    OnlyNewestReplayed,
    /// Recovery lowers refcounts and checkpoints without a record that says so.
    ResultNotRecorded,
    /// The record of a recovery verifies, and leaves the lowered refcounts out.
    LoweredNotRecorded,
    /// Recovery clears the bit without a flush after the pages.
    ForgottenBeforeHome,
    /// Masks are left out of the record.
    MaskNotInRecord,
    /// Entries of the table are left out of the record.
    EntryNotInRecord,
    /// Pages of the table behind the first one are left out of the record.
    LaterPageNotInRecord,
    /// Bits of the base bitmap are left out of the record.
    BitNotInRecord,
    /// A unit counts as free before that is durable.
    UnitFreedBeforeDurable,
    /// A unit is used again with what it held.
    UnitNotZeroed,
    /// A page of home changes before it is kept for the newest snapshot.
    PageKeptLate,
    /// That a page was kept is left out of the record.
    CopyNotInRecord,
    /// A unit that a snapshot sees is overwritten.
    HeldOverwritten,
    /// A unit is copied while writes that looked it up before it was held are still in flight to it.
    MovedUnderWriters,
    /// The copy of a unit counts although the unit was released meanwhile, and perhaps written in place.
    HoldNotLookedAtAgain,
    /// A snapshot that is being deleted still has pages kept for it: with each copy that is freed, units
    /// become held again.
    HeldAgain,
    /// What a snapshot sees is written to before it is durable that it is being deleted.
    ReleasedEarly,
    /// A snapshot is deleted although clones stand on it.
    ClonedDeleted,
    /// That clones stand on a snapshot is left out of the record.
    CloneNotInRecord,
    /// A snapshot is marked as cloned in an image that earlier programs open, which would delete it.
    CloneWithoutBit,
    /// A unit is freed although a snapshot sees it.
    NamedUnitFreed,
    /// The state of a unit in an open zone is recorded in the table, and the zone's bit stays.
    NotMarkedRecorded,
    /// The reverse: the bit is recorded, and the table entry is not.
    RecordedEarly,
    /// Zeros ahead of need are written to units that may be handed out meanwhile.
    ZerosOnGiven,
    /// A block that holds its unit's entry is overwritten in place.
    PlainInPlace,
    /// Recovery trusts the newest record without reading the packed blocks that it names.
    NewestBelieved,
    /// Recovery takes blocks for entries although their bit says that they no longer are.
    RecordedCounts,
    /// An embedded allocation that failed is not invalidated.
    NotInvalidated,
    /// A zone is opened before its zeros are durable.
    ZoneNotZeroed,
    /// A unit that is filled from end to end over other bytes has no checks.
    FilledUnchecked,
    /// An entry is embedded although the newest snapshot relies on its page at home.
    UnkeptEmbeds,
    /// An entry is embedded over the base although more than the packed block becomes the image's.
    MoreThanPacked,
    /// A sub-block beside a packed block over the base becomes data, and the entry is not recorded with it.
    EntryNotWithMask,
    /// The entry of a packed block over the base is recorded or let go, and its mask stays.
    PackedMaskLeft,
    /// Recovery takes over the entry of a packed block over the base, and not its mask.
    FoundMaskLeft,
    /// Recovery takes the mask of a packed block for recorded because the table has the entry.
    AgreedMaskLeft,
    /// A unit over the base gets a packed block while a recovery may still find an earlier one.
    PackedTwice,
    /// An entry is embedded over the base although the newest snapshot relies on the page of the mask at home.
    UnkeptMaskEmbeds,
    /// A unit counts as zero before a flush covers its zeros.
    ZeroNotCovered,
    /// Clusters are handed out while zeros are on their way to them.
    PreparedGivenOut,
    /// Recovery cuts the file off in the middle of what is in use.
    GivenBackInUse,
    /// Data without checksums is not flushed before the record that counts on it.
    NoFence,
    /// Data without checksums that is published after a commit does not fence the next transaction.
    UncheckedNotFenced,
    /// A map unit is used although the host has no space for its index.
    IndexNotReserved,
    /// A disk is resized although an interrupted change of its image is not finished.
    ResizedUnfinished,
    /// The superblock has the larger size of a disk before the added space is durably zero.
    GrownBeforeZeros,
    /// A part of a table keeps what the device held there before.
    PartNotZero,
    /// Units with parts of a table are taken for free ones.
    PartIsFree,
    /// Zeros that must be durable when the request is answered are not.
    ZerosNotDurable,
    /// The space that a device has gained counts as zeros.
    GrownIsClean,
    /// Recovery looks for records only in as much of the journal as the shortest one has.
    RunCutShort,
    /// The entries behind a smaller disk are cleared before its new size is durable.
    ClearedBeforeCut,
    /// An opening ignores the mark of a revert.
    RevertForgotten,
    /// The mark of a revert is gone before the size of the disk is durable.
    MarkGoneEarly,
    /// A snapshot of a closed image has the size that the disk has now.
    SnapshotGrows,
    /// A unit counts as zero although a write to it has failed half way.
    HalfWrittenIsClean,
    /// Bytes are overwritten in place before the superblock says that the image is in use.
    MarkedLate,
    /// Checksums are computed over memory that may still change before it is written.
    LentChecked,
    /// Records have no checksums of the copies of the disk below that they count on.
    CopyNotChecked,
    /// A copy of the disk below is written although the guest may have written there since that was read.
    CopyOverNewer,
    /// Zeros leave the bit in memory that sends readers to the filled bytes.
    FilledBehindZeros,
    /// A block is filled around its zeros, and what lies there is not zeroed.
    ZerosNotFilled,
    /// The bits of filled blocks are recorded before the bytes are durable.
    FilledBeforeDurable,
    /// Writers take what was filled for the image's own, which no crash remembers.
    FilledForgotten,
    /// A unit is promoted before what was copied is durable in the image.
    PromotedBeforeDurable,
    /// A unit is promoted before its copy is durable on the fast medium.
    CopyNotFlushed,
    /// A promoted unit is written before it is durable that its copy does not count.
    WrittenUnderBit,
    /// Only the writer that clears a promoted unit's bit waits until that is durable.
    ClearNotAwaited,
    /// A unit is promoted although it was written since it was marked.
    MarkKept,
    /// A unit is copied while writes that came before its mark are still in flight to it.
    CopiedBesideWriters,
    /// An image that is changed without its fast medium takes the session along.
    FastSessionKept,
    /// A fast medium that has lost what it had flushed is believed.
    ForgottenMediumCounts,
    /// Compressed data is not told from other data in the record, which has no checks for it.
    CompressedNotFenced,
    /// What a compressed cluster had before stays allocated.
    CompressedNotFreed,
    /// A fast medium is believed once other disks have promoted as much as it had lost.
    LastOfMedium,
    /// Entries of free slots stay, until their slots are used again.
    OldEntriesKept,
    /// They are blanked, and that is not durable before their slots are written.
    BlankedLate,
    /// What was promoted after an image was copied counts for the copy.
    LaterCopyCounts,
    /// An entry counts for whatever disk has its row.
    EntryOfAnyDisk,
    /// A write leaves a bit that leads to nothing.
    LostBitKept,
    /// A request changes the disk before it is marked in a bitmap on the medium.
    ChangedBeforeMarked,
    /// What is marked in bitmaps is left out of the record.
    NoBitmaps,
    /// A unit of an encrypted disk that moves is encrypted for the place that it had.
    MovedWithOldPlace,
    /// What goes through the journal is not encrypted.
    PlainInJournal,
    /// A part of a sector of an encrypted disk is written without the rest of it.
    RestOfSectorLost,
    /// The bit of a unit is cleared although only the fast medium has it.
    ClearedWhileMoved,
    /// An image whose units are on a medium alone is opened with one on which nothing counts.
    MovedOpened,
    /// And with one that lacks some of them.
    MissingOpened,
    /// The bits of units that a medium alone should have, and has not, are cleared with the others.
    MissingCleared,
    /// Such units are forgotten when all others have come back.
    MissingForgotten,
    /// A move draws no new number for its opening.
    MovedWithoutSession,
    /// Units are moved while there are snapshots.
    MovedBesideSnapshot,
    /// A snapshot is made while units are moved.
    SnapshotOfMoved,
    /// The medium does not know that it is needed.
    RowNotNeeded,
    /// One copy of the superblock says that the medium is needed.
    MovedSaidOnce,
    /// A copy is not compared before its unit is freed.
    MovedUnproven,
    /// A unit is moved although it was written meanwhile.
    MovedThoughWritten,
    /// A copy of an image takes over the row that units of the other one are in alone.
    NeededRowTaken,
    /// Bytes that come back have no checks.
    BackUnchecked,
    /// What has zeros for a part of a unit takes the place of all of it.
    OverForPart,
    /// The bytes of a request take the place of a unit after zeros have.
    OverByZeros,
    /// The bit of a unit stays set when what only the fast medium had of it is replaced.
    OverUnderBit,
    /// A medium that was cut off is believed again when it is longer.
    CutForgotten,
    /// A medium of which not all is known gets copies.
    BlindIsGiven,
    /// Only one superblock says that the medium was cut off.
    CutOnOnePage,
    /// Programs without the medium do not look whether it is needed.
    MovedForgotten,
}

thread_local! {
    static CURRENT: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// From now on this thread's images have this bug, or none.
pub fn put_in(bug: Option<Bug>) {
    CURRENT.set(bug);
}

/// Whether the bug is switched on.
pub(crate) fn is(bug: Bug) -> bool {
    CURRENT.get() == Some(bug)
}
