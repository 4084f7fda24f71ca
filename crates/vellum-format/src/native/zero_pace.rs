//! When units are made zero for zones, or because much is to be kept ready: in quiet times, and as far as the
//! guest's flushes pay for it. Pure: `ready.rs` carries it out.
//!
//! ```text
//!   the guest writes   ██ ▏██ ▏██ ▏          ██████████████████████        ▏: a flush
//!   zeros              ░  ░  ░      ░░░░░░░░ (none)              ░░░░░░
//!                      as much as a flush    quiet
//!                      carried
//! ```
//!
//! A unit that holds its own entry spares the record of a flush, so zeros for one pay off where the guest flushes.
//! Where it does not, as in a long copy, they would only double what is written: units that are filled from end
//! to end need none (`write.rs`).
//!
//! 1. Beside a guest that writes, no more is made zero than its flushes have carried, each counted for a mebibyte
//!    at most.
//! 2. In a quiet time there is no such limit.

use std::time::Duration;

/// The guest is quiet when it has not written for this long.
const QUIET_AFTER: Duration = Duration::from_secs(1);
/// No flush pays for more bytes of zeros than this.
const PER_FLUSH_MAX: u64 = 1 << 20;
/// At most this many bytes that were not used are kept for later.
const SAVED_MAX: u64 = 64 << 20;

/// What is known of one guest, from the opening of the image on.
#[derive(Debug, Default)]
pub(super) struct ZeroPace {
    /// How many bytes of zeros may be written beside the guest.
    allowed: u64,
    /// How many bytes the guest had written by its last flush.
    flushed: u64,
    /// How many it had written when it was last seen to write, and when that was.
    seen: Option<(u64, Duration)>,
}

impl ZeroPace {
    /// The guest has written so many bytes by now, and what it wrote was flushed.
    pub(super) fn note_flush(&mut self, written: u64) {
        let carried = written.saturating_sub(self.flushed).min(PER_FLUSH_MAX);
        self.allowed = (self.allowed + carried).min(SAVED_MAX);
        self.flushed = written;
    }

    /// Whether the guest, which has written so many bytes by now, is quiet.
    pub(super) fn is_quiet(&mut self, now: Duration, written: u64) -> bool {
        match self.seen {
            Some((before, since)) if before == written => now.saturating_sub(since) >= QUIET_AFTER,
            _ => {
                self.seen = Some((written, now));
                written == 0
            }
        }
    }

    /// Whether zeros may be written beside the guest.
    pub(super) fn is_paid_for(&self) -> bool {
        self.allowed > 0
    }

    /// So many bytes of zeros were written beside the guest.
    pub(super) fn spend(&mut self, bytes: u64) {
        self.allowed = self.allowed.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn flushes_pay_for_what_they_carry_up_to_a_mebibyte_each() {
        let mut pace = ZeroPace::default();
        assert!(!pace.is_paid_for(), "nothing was flushed");
        pace.note_flush(MIB / 4);
        pace.spend(MIB / 4);
        assert!(!pace.is_paid_for());
        pace.note_flush(100 * MIB);
        assert!(pace.is_paid_for());
        pace.spend(MIB);
        assert!(!pace.is_paid_for(), "one flush counts for a mebibyte");
        pace.note_flush(100 * MIB);
        assert!(!pace.is_paid_for(), "nothing was written since");
    }

    #[test]
    fn a_guest_is_quiet_after_a_second_without_a_write() {
        let at = Duration::from_millis;
        let mut pace = ZeroPace::default();
        assert!(pace.is_quiet(at(0), 0), "it has not written at all");
        assert!(!pace.is_quiet(at(10), 4096));
        assert!(!pace.is_quiet(at(1009), 4096));
        assert!(pace.is_quiet(at(1010), 4096));
        assert!(!pace.is_quiet(at(1020), 8192));
    }
}
