//! Bugs on purpose, for the tests that look for mistakes: would they find one?
//!
//! Each bug is a place in the engine where one line is left out, or comes too early. [`is`] says `false` unless the feature
//! `sabotage` is on and the thread has asked for that bug, so without the feature nothing of this is left in the program.
//! Only the tests of this crate turn it on.

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
    /// Clusters that are reserved, or freed, and not yet settled are left out of the record.
    NoOwed,
    /// A cluster that was published still counts as reserved.
    OwedNotSettled,
    /// Entries of the L1 table are left out of the record.
    NoL1,
    /// Refcounts are left out of the record.
    NoRefcounts,
    /// A sector whose check may have to hold is overwritten in place.
    UnprovenOverwritten,
    /// Units that are filled anew get their bytes although a check may have to hold there.
    FilledOverUnproven,
    /// A transaction counts as proven when its own record is flushed.
    DurableIsProven,
    /// A cluster is published, and joins the transaction, before its bytes are written.
    PublishedBeforeWritten,
    /// A cluster that an older write may still reach is checked like any other.
    LateWritesChecked,
    /// Entries and what belongs to them are sealed one after the other, not at one moment.
    SealHalf,
    /// Pages of a transaction go home before its record is flushed.
    CheckpointBeforeCommit,
    /// Pages go home whose old bytes a recovery may still have to verify.
    HomeBeforeProven,
    /// The record that goes out together with the pages says already that they are home.
    TailBeforeHome,
    /// What the tail has passed is given up before a flushed record says where the tail is.
    TailUsedEarly,
    /// A failed host flush is taken for a good one.
    FlushErrorIgnored,
    /// The records before an ordered commit do not ask for a repair.
    BarrierWantsNoRepair,
    /// The record before an ordered commit needs no older one, and the pages are not home.
    BarrierBeforeHome,
    /// Freed clusters are given back before anything says durably that they are free.
    FreedBeforeDurable,
    /// A punched cluster counts as zero before a flush covers the punch.
    PunchNotCovered,
    /// Clusters are given back whose bytes a replay would bring back.
    GivenBackInRecords,
    /// A sector of which records have bytes is overwritten in place as soon as it is proven.
    FullNotSticky,
    /// A page is loaded from its home although a newer version waits to go there.
    KeptNotAsked,
    /// The journal begins anew over its old records: no zeros, the same generation.
    OldRunKept,
    /// Closing clears the bit without a flush after the pages.
    ClosedBeforeHome,
    /// Recovery does not look at checksums.
    NoVerify,
    /// Recovery replays the newest record alone.
    OnlyNewestReplayed,
    /// Recovery lowers refcounts and goes home without a record that says so.
    ResultNotTold,
    /// The record of a recovery proves, and leaves the lowered refcounts out.
    LoweredNotTold,
    /// Recovery clears the bit without a flush after the pages.
    ForgottenBeforeHome,
    /// Bits, masks and entries join the transaction before the bytes are written.
    BitBeforeData,
    /// Masks are left out of the record.
    MaskNotInRecord,
    /// Entries of the table are left out of the record.
    EntryNotInRecord,
    /// Bits of the base bitmap are left out of the record.
    BitNotInRecord,
    /// A unit counts as free before anything says so durably.
    UnitFreedBeforeDurable,
    /// A unit is used again with what it held.
    UnitNotZeroed,
    /// A page of home changes before it is kept for the newest snapshot.
    PageKeptLate,
    /// That a page was kept is left out of the record.
    CopyNotInRecord,
    /// A unit that a snapshot sees is overwritten.
    HeldOverwritten,
    /// A unit is copied while writes that looked before it was held are still on their way to it.
    MovedUnderWriters,
    /// The copy of a unit counts although the unit was let go meanwhile, and perhaps written to where it lies.
    HoldNotLookedAtAgain,
    /// A unit is freed although a snapshot sees it.
    NamedUnitFreed,
    /// What becomes of a unit of a young zone is told to the table, and the zone's bit stays.
    NotSettled,
    /// The same the other way round: the bit is told, and the table is not.
    SettledEarly,
    /// Zeros ahead of need are written to units that may be given out meanwhile.
    ZerosOnGiven,
    /// A block that holds its unit's entry is overwritten where it lies.
    PlainInPlace,
    /// Recovery believes the newest record without looking at the packed blocks that it names.
    NewestBelieved,
    /// Recovery takes blocks for entries whose bit says that they are none any more.
    SettledCounts,
    /// A birth that failed is not retired.
    NotRetired,
    /// A zone is opened before its zeros are durable.
    ZoneNotZeroed,
    /// A unit counts as zero before a flush covers its zeros.
    ZeroNotCovered,
    /// Clusters are handed out while zeros are on their way to them.
    PreparedGivenOut,
    /// Recovery cuts the file off in the middle of what is in use.
    GivenBackInUse,
    /// Checksums are taken of memory that may still change, and what is there later is written.
    LentChecked,
}

#[cfg(feature = "sabotage")]
thread_local! {
    static CURRENT: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// From now on this thread's images have this bug, or none.
#[cfg(feature = "sabotage")]
pub fn put_in(bug: Option<Bug>) {
    CURRENT.set(bug);
}

/// Whether the bug is asked for.
#[cfg(feature = "sabotage")]
pub(crate) fn is(bug: Bug) -> bool {
    CURRENT.get() == Some(bug)
}

/// Whether the bug is asked for: never.
#[cfg(not(feature = "sabotage"))]
pub(crate) const fn is(_bug: Bug) -> bool {
    false
}
