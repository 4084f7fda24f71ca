//! What became of units that were promoted, moved or taken back, as programs read it.

use serde::Serialize;
use vellum_core::{Error, GuestSpan};
use vellum_format::fast::{Demoted, Moved, Promoted};

use super::LISTED_MAX;

/// What became of a promotion, as programs read it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PromotedUnits {
    /// The size of a unit in bytes.
    pub unit_size: u64,
    /// Units that were copied.
    pub promoted: u64,
    /// Units that were there already.
    pub there: u64,
    /// Units left in the backing image.
    pub in_backing: u64,
    /// Units that read as zero.
    pub zero: u64,
    /// Units that were written meanwhile.
    pub written: u64,
    /// Units for which there was no room, or the budget is spent.
    pub no_room: u64,
    /// Units that the image has no bit for.
    pub no_bit: u64,
}

impl PromotedUnits {
    pub(crate) fn none(unit_size: u64) -> Self {
        Self::of(unit_size, Promoted::default())
    }

    pub(crate) fn add(&mut self, more: Promoted) {
        let Promoted { units, there, in_base, zero, written, no_room, no_bit } = more;
        self.promoted += units;
        self.there += there;
        self.in_backing += in_base;
        self.zero += zero;
        self.written += written;
        self.no_room += no_room;
        self.no_bit += no_bit;
    }

    pub(super) fn of(unit_size: u64, done: Promoted) -> Self {
        let Promoted { units, there, in_base, zero, written, no_room, no_bit } = done;
        Self { unit_size, promoted: units, there, in_backing: in_base, zero, written, no_room, no_bit }
    }
}

/// What became of a move, as programs read it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct MovedUnits {
    /// The size of a unit in bytes.
    pub unit_size: u64,
    /// Units whose space in the image is free now.
    pub moved: u64,
    /// Units whose space was free before.
    pub there: u64,
    /// Units that the fast medium has no copy of, and that were not to be copied.
    pub not_copied: u64,
    /// Units that are read from the backing image, as a whole or in part.
    pub not_stored: u64,
    /// Units that read as zero.
    pub zero: u64,
    /// Units for which there was no room, or the budget is spent.
    pub no_room: u64,
    /// Units that the image has no bit for.
    pub no_bit: u64,
    /// Units that were written meanwhile.
    pub written: u64,
    /// What could not be read, on the fast medium or in the image, and is as it was: how many bytes.
    pub left_bytes: u64,
    /// Offset and length of the first of its parts.
    pub left: Vec<(u64, u64)>,
    /// Why the first of it could not be read.
    pub why: Option<String>,
    /// It was ended before it had come to all of them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub interrupted: bool,
}

impl MovedUnits {
    pub(crate) fn none(unit_size: u64) -> Self {
        Self::of(unit_size, Moved::default())
    }

    pub(super) fn of(unit_size: u64, done: Moved) -> Self {
        let Moved { units, there, not_copied, not_stored, written, left, why } = done;
        let (left_bytes, left, why) = listed(left, why);
        Self {
            unit_size,
            moved: units,
            there,
            not_copied,
            not_stored,
            zero: 0,
            no_room: 0,
            no_bit: 0,
            written,
            left_bytes,
            left,
            why,
            interrupted: false,
        }
    }

    pub(super) fn add(&mut self, more: Self) {
        self.moved += more.moved;
        self.there += more.there;
        self.not_copied += more.not_copied;
        self.not_stored += more.not_stored;
        self.zero += more.zero;
        self.no_room += more.no_room;
        self.no_bit += more.no_bit;
        self.written += more.written;
        self.left_bytes += more.left_bytes;
        add_parts(&mut self.left, more.left);
        self.why = self.why.take().or(more.why);
    }

    /// As above, of units that were to be copied first: why those were not that have no copy.
    pub(super) fn after(unit_size: u64, copied: Promoted, done: Moved) -> Self {
        let Promoted { in_base, zero, written, no_room, no_bit, .. } = copied;
        let moved = Self::of(unit_size, done);
        let known = in_base + zero + written + no_room + no_bit;
        Self {
            not_copied: moved.not_copied.saturating_sub(known),
            not_stored: moved.not_stored + in_base,
            written: moved.written + written,
            zero,
            no_room,
            no_bit,
            ..moved
        }
    }
}

/// What became of units that were taken back, as programs read it.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DemotedUnits {
    /// Units that are read from the image now.
    pub demoted: u64,
    /// What could not be read on the fast medium, which alone has it: how many bytes.
    pub left_bytes: u64,
    /// Offset and length of the first of its parts.
    pub left: Vec<(u64, u64)>,
    /// Why the first of it could not be read.
    pub why: Option<String>,
    /// It was ended before it had come to all of them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub interrupted: bool,
}

impl From<Demoted> for DemotedUnits {
    fn from(done: Demoted) -> Self {
        let Demoted { units, left, why } = done;
        let (left_bytes, left, why) = listed(left, why);
        Self { demoted: units, left_bytes, left, why, interrupted: false }
    }
}

impl DemotedUnits {
    pub(super) fn add(&mut self, more: Self) {
        self.demoted += more.demoted;
        self.left_bytes += more.left_bytes;
        add_parts(&mut self.left, more.left);
        self.why = self.why.take().or(more.why);
    }
}

/// Adds parts that come behind those that there are.
pub(super) fn add_parts(parts: &mut Vec<(u64, u64)>, more: Vec<(u64, u64)>) {
    for (at, len) in more {
        let has_room = parts.len() < LISTED_MAX;
        match parts.last_mut() {
            Some((last, last_len)) if *last + *last_len == at => *last_len += len,
            _ if has_room => parts.push((at, len)),
            _ => return,
        }
    }
}

/// How many bytes are left, the first of their parts, and why the first one is.
fn listed(left: Vec<GuestSpan>, why: Option<Error>) -> (u64, Vec<(u64, u64)>, Option<String>) {
    let bytes = left.iter().map(|span| span.len()).sum();
    let parts = left.iter().take(LISTED_MAX).map(|span| (span.start().bytes(), span.len()));
    (bytes, parts.collect(), why.map(|error| error.chain()))
}
