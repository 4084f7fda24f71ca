//! The fast medium that an image names, and what is done with the units of an open image that it may have.

use vellum_core::{Error, GuestSpan, LocalFuture, Result};

use super::layout::{FastId, Reason};
use crate::session::SessionNumber;

/// The longest name of a fast medium in an image, in bytes.
pub const FAST_NAME_MAX: usize = 511;

/// Parts of a disk in a strip that shows where the fast medium has something.
pub const STRIP_PARTS: usize = 64;

/// What an image records of its fast medium.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFast {
    /// Which medium.
    pub id: FastId,
    /// Where it was when the image was attached to it: for people, and never opened because of this.
    pub name: String,
    /// The number of the session with it, if there has been one.
    pub number: Option<SessionNumber>,
    /// The session counts: the image was not changed without the medium since.
    pub counts: bool,
    /// It may be the only one that has a unit, so that the image is not opened without it.
    pub is_needed: bool,
}

/// Which ranges of a disk are promoted, and why.
#[derive(Debug, Clone)]
pub struct Promotion {
    /// Each unit that any of them touches.
    pub ranges: Vec<GuestSpan>,
    /// It is kept with each unit.
    pub reason: Reason,
    /// Also units of which the image has nothing, so that all of it is read from the base.
    pub copies_base: bool,
}

/// What became of the units of a promotion.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Promoted {
    /// They are on the fast medium now.
    pub units: u64,
    /// They were there before.
    pub there: u64,
    /// The image has nothing of them: they are read from the base, and were left there.
    pub in_base: u64,
    /// They are zero.
    pub zero: u64,
    /// They were written meanwhile.
    pub written: u64,
    /// There was no slot for them, or the budget is spent.
    pub no_room: u64,
    /// The image's region has no bits for them, because the disk has grown since it was attached.
    pub no_bit: u64,
}

/// What became of the units of a move.
#[derive(Debug, Clone, Default)]
pub struct Moved {
    /// Only the fast medium has them now.
    pub units: u64,
    /// Only the fast medium had them before.
    pub there: u64,
    /// The fast medium has no copy of them.
    pub not_copied: u64,
    /// Parts of them are read from the base, or nothing of them is stored.
    pub not_stored: u64,
    /// They were written meanwhile.
    pub written: u64,
    /// Those that could not be read, on the fast medium or in the image: nothing about them has changed. Neighbours are one span.
    pub left: Vec<GuestSpan>,
    /// Why the first of these could not be read.
    pub why: Option<Error>,
}

/// What became of units that were taken back.
#[derive(Debug, Clone, Default)]
pub struct Demoted {
    /// The fast medium had them, and they are read from the image now.
    pub units: u64,
    /// Those that only the fast medium has and that it does not give: they stay there. Neighbours are one span.
    pub left: Vec<GuestSpan>,
    /// Why the first of these could not be read.
    pub why: Option<Error>,
}

/// The state of an open image's tier.
#[derive(Debug, Clone)]
pub struct TierFacts {
    /// Why the fast medium is not used, if it is not.
    pub trouble: Option<Error>,
    /// The size of a unit in bytes.
    pub unit_bytes: u64,
    /// Units that the fast medium has.
    pub units: u64,
    /// How many of them for which reason, in the order of [`Reason::ALL`].
    pub by_reason: [u64; 4],
    /// How many of them only the fast medium has.
    pub moved: u64,
    /// Reads of those that the fast medium failed.
    pub lost_reads: u64,
    /// Units that only the fast medium has and of which it says nothing complete. They are none of the above.
    pub missing: u64,
    /// How many units the disk has.
    pub disk_units: u64,
    /// Of how many units it has something in each of these equal parts of the disk.
    pub strip: [u64; STRIP_PARTS],
    /// Bytes that they take of it.
    pub used: u64,
    /// At most this many.
    pub budget: u64,
    /// Requests that were read from the fast medium, and their bytes.
    pub fast_reads: [u64; 2],
    /// As above, from the slow one.
    pub slow_reads: [u64; 2],
    /// Requests that the fast medium failed, and the slow one answered.
    pub failed_reads: u64,
    /// Units that were promoted since the image was opened, and units that were written since and so went back.
    pub promoted: u64,
    /// How many of those that were promoted for which reason, in the order of [`Reason::ALL`].
    pub promoted_by: [u64; 4],
    /// See there.
    pub demoted: u64,
}

impl Default for TierFacts {
    fn default() -> Self {
        Self {
            trouble: None,
            unit_bytes: 0,
            units: 0,
            by_reason: [0; 4],
            moved: 0,
            lost_reads: 0,
            missing: 0,
            disk_units: 0,
            strip: [0; STRIP_PARTS],
            used: 0,
            budget: 0,
            fast_reads: [0; 2],
            slow_reads: [0; 2],
            failed_reads: 0,
            promoted: 0,
            promoted_by: [0; 4],
            demoted: 0,
        }
    }
}

/// The tier of an open image.
pub trait Tiers: Send + Sync {
    /// Copies units to the fast medium. They are read from there from now on, durably, until they are written.
    ///
    /// # Errors
    /// `ReadOnly` for an image or a medium that is only read, why the medium is not used, and the errors of both.
    fn promote(&self, promotion: Promotion) -> LocalFuture<'_, Result<Promoted>>;

    /// Frees the space of units in the image of which the fast medium has a copy that was read back and is the same. From
    /// the first one on the image needs the medium.
    ///
    /// # Errors
    /// As for [`promote`](Self::promote); `Unsupported` while there are snapshots, `Corrupt` for a copy that is not the same.
    fn move_away<'a>(&'a self, ranges: &'a [GuestSpan]) -> LocalFuture<'a, Result<Moved>>;

    /// What [`move_away`](Self::move_away) is refused for, whatever there is to move: to be asked before anything is copied for it.
    ///
    /// # Errors
    /// `Unsupported` while there are snapshots, and why the medium is not used.
    fn may_move(&self) -> Result<()>;

    /// Takes units back that the fast medium has. Those that only it has are copied back first; one that cannot be read there
    /// stays, and the others are taken back all the same. Without any left of these, the image does not need the medium any
    /// more.
    ///
    /// # Errors
    /// Those of the image.
    fn demote<'a>(&'a self, ranges: &'a [GuestSpan]) -> LocalFuture<'a, Result<Demoted>>;

    /// Refuses what would bring units home from a fast medium that alone has some and was cut off while it was open.
    ///
    /// # Errors
    /// `Changed`, with what is to be done instead.
    fn check_not_cut(&self) -> LocalFuture<'_, Result<()>>;

    /// What only the fast medium has and of which it says nothing complete: it is lost, unless the medium can be mended. Known
    /// since the image was opened. Neighbouring units are one span.
    fn missing(&self) -> Vec<GuestSpan>;

    /// Reads all that only the fast medium has, from there. How many units that are, and what of them cannot be read.
    ///
    /// # Errors
    /// Those of the image.
    fn look_for_lost<'a>(&'a self) -> LocalFuture<'a, Result<(u64, Vec<GuestSpan>)>>;

    /// What there is to know.
    fn facts(&self) -> TierFacts;

    /// How many reads failed of units that only the fast medium has.
    fn lost_reads(&self) -> u64;

    /// The size of a unit in bytes.
    fn unit_bytes(&self) -> u64;

    /// Counts from now on what is read of units since they were written: their heat. Whether that is new.
    fn count_heat(&self) -> bool;

    /// Takes up what [`heat`](Self::heat) gave in an earlier opening, or nothing if it is not of this disk. Whether it is.
    fn take_up_heat(&self, bytes: &[u8]) -> bool;

    /// The heat, to be kept; nothing if it is not counted.
    fn heat(&self) -> Option<Vec<u8>>;

    /// Time has passed: all heat is halved.
    fn age_heat(&self);

    /// Units that have become hot and that the fast medium has not, each once.
    fn hot(&self, most: usize) -> Vec<GuestSpan>;

    /// The coldest of the units that were promoted for their heat and have lost it.
    fn cold(&self, most: usize) -> Vec<GuestSpan>;
}
