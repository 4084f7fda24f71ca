//! How far ahead of need an image is written with zeros. Pure: `qcow2/ahead.rs` and `native/ahead.rs` carry
//! it out.
//!
//! ```text
//!   rate of allocation, bytes/s   0          1 MiB/s              64 MiB/s
//!   distance                      nothing    1 MiB   … a second's worth …   64 MiB
//! ```
//!
//! A file system such as ext4 writes its own journal when a flush finds blocks that are new to the file, or
//! that were never written. Where zeros were written before, a flush writes the data alone. So the zeros are
//! written ahead, in the background, as far ahead as one second of allocation goes.
//!
//! 1. Where the distance is automatic, no more zeros are written than a few times what the guest writes
//!    ([`Budget`]), and no more than pays off, given what the guest is known to flush ([`earned_by_flush`]).
//!    A distance that the user sets is used as it is.
//! 2. After a failure nothing more is prepared ([`Need::give_up`]).

use std::fmt;
use std::time::Duration;

use vellum_core::Limits;

/// Whether space is prepared, and how far ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prealloc {
    /// As [`Prealloc::Adaptive`] where that helps
    /// ([`Limits::prefers_written`](vellum_core::Limits::prefers_written)), as [`Prealloc::Off`] where it
    /// does not.
    #[default]
    Auto,
    /// Nothing is prepared.
    Off,
    /// About as much as is allocated in a second.
    Adaptive,
    /// This many bytes.
    Fixed(u64),
}

impl fmt::Display for Prealloc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Adaptive => f.write_str("adaptive"),
            Self::Fixed(bytes) => write!(f, "{bytes}"),
        }
    }
}

/// The shortest distance, in bytes, once anything is allocated.
const DISTANCE_MIN: u64 = 1 << 20;
/// The longest automatic distance.
const DISTANCE_MAX: u64 = 64 << 20;

impl Prealloc {
    /// The smallest distance that may be requested, in bytes.
    pub const BYTES_MIN: u64 = 64 << 10;
    /// The largest distance that may be requested, in bytes.
    pub const BYTES_MAX: u64 = 64 << 30;
    /// The largest distance that an image can state.
    pub const STORED_BYTES_MAX: u64 = 1 << 30;

    /// The effective choice on a storage with or without this preference.
    fn settled(self, prefers_written: bool) -> Self {
        match self {
            Self::Auto if prefers_written => Self::Adaptive,
            Self::Auto => Self::Off,
            said => said,
        }
    }

    /// The value in the journal's header extension: 0 unspecified, 1 off, 2 adaptive, else units of 4 KiB.
    pub(crate) fn encode(self) -> u32 {
        match self {
            Self::Auto => 0,
            Self::Off => 1,
            Self::Adaptive => 2,
            Self::Fixed(bytes) => u32::try_from(bytes.clamp(Self::BYTES_MIN, Self::STORED_BYTES_MAX) >> 12)
                .expect("at most 2^18"),
        }
    }

    /// The reverse. A number that only a later version may understand counts as unspecified.
    pub(crate) fn decode(word: u32) -> Self {
        let bytes = u64::from(word) << 12;
        match word {
            1 => Self::Off,
            2 => Self::Adaptive,
            _ if (Self::BYTES_MIN..=Self::STORED_BYTES_MAX).contains(&bytes) => Self::Fixed(bytes),
            _ => Self::Auto,
        }
    }
}

/// What is known about one image's need for space, from its opening on.
#[derive(Debug)]
pub(crate) struct Need {
    how: Prealloc,
    pace: Pace,
    budget: Budget,
    has_given_up: bool,
}

impl Need {
    /// Nothing is prepared on a medium that cannot grow, or whose new space is not zero.
    pub(crate) fn new(how: Prealloc, limits: &Limits) -> Self {
        let can = !limits.fixed_len && limits.grows_zeroed;
        let how = if can { how.settled(limits.prefers_written) } else { Prealloc::Off };
        Self { how, pace: Pace::default(), budget: Budget::new(), has_given_up: false }
    }

    /// Whether anything may be prepared at all.
    pub(crate) fn is_on(&self) -> bool {
        self.how != Prealloc::Off && !self.has_given_up
    }

    /// Records the current end, and the number of bytes that the guest has written since the opening.
    pub(crate) fn note(&mut self, now: Duration, end: u64, written: u64) {
        self.pace.note(now, end);
        self.budget.note(written);
    }

    /// How many bytes should be written at once while this many are ready, if any.
    pub(crate) fn piece(&self, ready: u64) -> Option<u64> {
        let distance = if self.is_on() { self.pace.distance(self.how) } else { 0 };
        next_piece(distance, ready).filter(|bytes| self.is_asked_for() || self.budget.has(*bytes))
    }

    /// Records that this many bytes of zeros were written.
    pub(crate) fn spend(&mut self, bytes: u64) {
        self.budget.spend(bytes);
    }

    /// Prepares nothing more in this opening.
    pub(crate) fn give_up(&mut self) {
        self.has_given_up = true;
    }

    fn is_asked_for(&self) -> bool {
        matches!(self.how, Prealloc::Fixed(_))
    }
}

/// How fast the end of the image moves.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// The time of the last measurement, and where the end was then.
    last: Option<(Duration, u64)>,
    /// Bytes per second.
    rate: u64,
    /// It has moved at all.
    has_moved: bool,
}

impl Pace {
    /// Notes the present end. The rate is what was allocated in about the last second, so a burst does not
    /// make it high, and an idle moment does not make it low.
    pub(crate) fn note(&mut self, now: Duration, end: u64) {
        let Some((before, old)) = self.last else {
            self.last = Some((now, end));
            return;
        };
        let elapsed = now.saturating_sub(before);
        self.has_moved |= end > old;
        // An interval below a millisecond says little about the rate.
        let Ok(millis @ 1..) = u64::try_from(elapsed.as_millis()) else { return };
        let moved = u128::from(end.saturating_sub(old));
        let kept = u128::from(self.rate) * u128::from(1000 - millis.min(1000)) / 1000;
        let added = moved * 1000 / u128::from(millis.max(1000));
        self.rate = u64::try_from(kept + added).unwrap_or(u64::MAX);
        self.last = Some((now, end));
    }

    /// How far ahead space is to be prepared, in bytes.
    pub(crate) fn distance(&self, how: Prealloc) -> u64 {
        match how {
            Prealloc::Auto | Prealloc::Off => 0,
            Prealloc::Adaptive if self.has_moved => self.rate.clamp(DISTANCE_MIN, DISTANCE_MAX),
            // An image that is only overwritten never needs any.
            Prealloc::Adaptive => 0,
            Prealloc::Fixed(bytes) => bytes,
        }
    }
}

/// Roughly what the file system itself writes for a flush, in bytes. Zeros can save this much, however little
/// data the flush carries.
const SAVED_PER_FLUSH: u64 = 4096;
/// Where flushes carry more, one byte of zeros for this many is no burden.
const WRITTEN_PER_ZERO: u64 = 5;
/// No flush counts for more than this, in bytes: where flushes are rare there is little to save.
const FLUSHED_BYTES_MAX: u64 = 256 << 10;

/// How many of the bytes that a flush carries count as written for the budget.
pub(crate) fn earned_by_flush(bytes: u64) -> u64 {
    let of_flush = SAVED_PER_FLUSH / Budget::ZEROS_MAX;
    let of_bytes = bytes.min(FLUSHED_BYTES_MAX) / WRITTEN_PER_ZERO / Budget::ZEROS_MAX;
    bytes.min(of_flush).max(of_bytes)
}

/// How many bytes of zeros may be written: scattered small writes take a cluster each, and the zeros for all
/// of these would be many times what the guest writes.
#[derive(Debug)]
struct Budget {
    allowed: u64,
    /// How many bytes the guest had written when the budget was last updated.
    written: u64,
}

impl Budget {
    /// At most this many bytes of zeros for each byte that the guest writes.
    const ZEROS_MAX: u64 = 4;
    /// This many bytes may be written before the guest has written any.
    const SAVED_MIN: u64 = 1 << 20;
    /// At most this many unused bytes are kept for later.
    const SAVED_MAX: u64 = 64 << 20;

    /// The budget of an image that was just opened.
    const fn new() -> Self {
        Self { allowed: Self::SAVED_MIN, written: 0 }
    }

    /// Records that the guest has written this many bytes since the opening.
    fn note(&mut self, written: u64) {
        let more = written.saturating_sub(self.written).saturating_mul(Self::ZEROS_MAX);
        self.allowed = self.allowed.saturating_add(more).min(Self::SAVED_MAX);
        self.written = written;
    }

    /// Whether this many bytes of zeros may be written now.
    fn has(&self, bytes: u64) -> bool {
        bytes <= self.allowed
    }

    /// Records that this many bytes of zeros were written.
    fn spend(&mut self, bytes: u64) {
        self.allowed = self.allowed.saturating_sub(bytes);
    }
}

/// How many bytes to write at once when this many should be ready and this many are, if any. The next piece
/// is due only when a quarter of the distance is used up, so that a flush meanwhile has a few large pieces to
/// carry, not many small ones.
fn next_piece(distance: u64, ready: u64) -> Option<u64> {
    const PIECE_MAX: u64 = 1 << 20;
    let missing = distance.saturating_sub(ready);
    let piece = (distance / 4).clamp(1, PIECE_MAX);
    (missing >= piece).then_some(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn the_distance_follows_the_rate() {
        // Bytes allocated within 100 ms, and how far ahead that is.
        for (bytes, distance) in [
            (0, 0),
            (512, MIB),
            (MIB, MIB),
            (5 * MIB, 5 * MIB),
            (64 * MIB, 64 * MIB),
            (65 * MIB, 64 * MIB),
            (u64::MAX, 64 * MIB),
        ] {
            let mut pace = Pace::default();
            pace.note(at(5), 0);
            assert_eq!(pace.distance(Prealloc::Adaptive), 0, "nothing was allocated yet");
            pace.note(at(105), bytes);
            assert_eq!(pace.distance(Prealloc::Adaptive), distance, "{bytes} bytes");
            assert_eq!(pace.distance(Prealloc::Off), 0);
            assert_eq!(pace.distance(Prealloc::Fixed(3 * MIB)), 3 * MIB);
        }
    }

    #[test]
    fn the_rate_is_that_of_the_last_second() {
        // Steps of this many milliseconds: the result is about the same for all of them.
        for step in [10, 50, 100, 500, 1000] {
            let (mut pace, mut now, mut end) = (Pace::default(), 0, 0);
            pace.note(at(now), end);
            let mut run = |seconds: u64, per_second: u64| {
                for _ in 0..seconds * 1000 / step {
                    now += step;
                    end += per_second * step / 1000;
                    pace.note(at(now), end);
                }
                pace.distance(Prealloc::Adaptive)
            };
            let busy = run(1, 20 * MIB);
            assert!((12 * MIB..=20 * MIB).contains(&busy), "{busy} after a second in steps of {step} ms");
            let long = run(9, 20 * MIB);
            assert!((19 * MIB..=20 * MIB).contains(&long), "{long} after ten seconds in steps of {step} ms");
            let idle = run(1, 0);
            assert!(idle < 8 * MIB, "{idle} after an idle second in steps of {step} ms");
            assert_eq!(run(60, 0), MIB, "after an idle minute in steps of {step} ms");
        }
        let mut pace = Pace::default();
        pace.note(at(0), 0);
        pace.note(at(10_000), 50 * MIB);
        assert_eq!(pace.distance(Prealloc::Adaptive), 5 * MIB, "ten seconds between two looks");
    }

    #[test]
    fn a_clock_that_stands_still_does_no_harm() {
        let mut pace = Pace::default();
        for end in [0, MIB, 2 * MIB, MIB] {
            pace.note(at(7), end);
        }
        assert_eq!(pace.distance(Prealloc::Adaptive), MIB);
        pace.note(at(3), 5 * MIB);
        assert_eq!(pace.distance(Prealloc::Adaptive), MIB);
    }

    #[test]
    fn zeros_stay_within_a_few_times_what_the_guest_writes() {
        let mut budget = Budget::new();
        assert!(budget.has(MIB) && !budget.has(MIB + 1), "a little to begin with");
        budget.spend(MIB);
        budget.note(4096);
        assert!(budget.has(4 * 4096) && !budget.has(4 * 4096 + 1));
        budget.note(4096);
        assert!(!budget.has(4 * 4096 + 1), "nothing was written since");
        budget.note(1 << 40);
        assert!(budget.has(64 * MIB) && !budget.has(64 * MIB + 1), "not all is kept");
    }

    #[test]
    fn zeros_pay_for_themselves() {
        // Bytes that a flush carries, and the zeros that this earns.
        for (bytes, zeros) in [
            (0, 0),
            (512, 2048),
            (4096, 4096),
            (16_384, 4096),
            (65_536, 13_104),
            (MIB, 52_428),
            (1 << 40, 52_428),
        ] {
            assert_eq!(earned_by_flush(bytes) * Budget::ZEROS_MAX, zeros, "{bytes}");
        }
    }

    #[test]
    fn a_distance_that_is_asked_for_is_not_bounded_by_what_the_guest_writes() {
        let limits =
            Limits { fixed_len: false, grows_zeroed: true, prefers_written: true, ..Limits::plain() };
        for (how, pieces) in
            [(Prealloc::Fixed(8 * MIB), 8), (Prealloc::Adaptive, 1), (Prealloc::Auto, 1), (Prealloc::Off, 0)]
        {
            let mut need = Need::new(how, &limits);
            need.note(at(0), 0, 0);
            // Scattered: far more is allocated than written.
            need.note(at(1000), 8 * MIB, 0);
            let mut ready = 0;
            while let Some(bytes) = need.piece(ready) {
                need.spend(bytes);
                ready += bytes;
            }
            assert_eq!(ready, pieces * MIB, "{how:?}");
            need.give_up();
            assert_eq!(need.piece(0), None, "{how:?}");
        }
        for cannot in [Limits { fixed_len: true, ..limits.clone() }, Limits { grows_zeroed: false, ..limits }]
        {
            assert!(!Need::new(Prealloc::Fixed(MIB), &cannot).is_on());
        }
    }

    #[test]
    fn pieces() {
        for (distance, ready, piece) in [
            (0, 0, None),
            (MIB, 0, Some(MIB / 4)),
            (MIB, MIB / 4 * 3, Some(MIB / 4)),
            (MIB, MIB / 4 * 3 + 1, None),
            (MIB, 2 * MIB, None),
            (64 * MIB, 10 * MIB, Some(MIB)),
        ] {
            assert_eq!(next_piece(distance, ready), piece, "{distance} {ready}");
        }
    }

    #[test]
    fn a_wish_reads_as_it_was_written() {
        for setting in [Prealloc::Auto, Prealloc::Off, Prealloc::Adaptive]
            .into_iter()
            .chain([Prealloc::BYTES_MIN, 3 * MIB, Prealloc::STORED_BYTES_MAX].map(Prealloc::Fixed))
        {
            assert_eq!(Prealloc::decode(setting.encode()), setting);
        }
        for later in [3, 15, (1 << 18) + 1, u32::MAX] {
            assert_eq!(Prealloc::decode(later), Prealloc::Auto, "{later}");
        }
    }
}
