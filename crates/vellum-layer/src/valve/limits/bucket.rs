//! The arithmetic of one limit: a leaky bucket. Pure; time is an argument.
//!
//! ```text
//!   a request ──► begins while the level is not above the capacity, and adds what it takes, however large it is
//!                      │
//!                      └──► the level leaks away at the rate that is allowed
//! ```
//!
//! The level is kept as the moment at which the bucket would be empty (`empty_at`): one number, so that many
//! cores can change it without a lock. A request that takes what the bucket leaks in `d` moves it by `d`.
//!
//! 1. Without a burst the capacity is what leaks in 0.1 s.
//! 2. With a burst (`max`, for `max-length` seconds) it is all of that burst. Where the burst lasts more than
//!    a second, a second bucket that leaks at `max` and holds 0.1 s of it keeps the burst to its rate.
//! 3. Costs are rounded up, to a sixteenth of a nanosecond: the rate never exceeds the limit, and falls below
//!    it by a negligible amount.
//!
//! Source: QEMU, docs/throttle.txt and util/throttle.c, which define these numbers.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

/// So many ticks are a nanosecond. The clock has room for 36 years.
const TICKS_PER_NS: u128 = 16;
const TICKS_PER_SECOND: u128 = TICKS_PER_NS * 1_000_000_000;

/// A moment, or how long something takes, in ticks.
pub(super) type Ticks = u64;

/// The moment as ticks.
pub(super) fn ticks(time: Duration) -> Ticks {
    narrow(time.as_nanos() * TICKS_PER_NS)
}

/// The duration of this many ticks, rounded up.
pub(super) fn duration(ticks: Ticks) -> Duration {
    Duration::from_nanos(ticks.div_ceil(u64::try_from(TICKS_PER_NS).expect("small")))
}

fn narrow(ticks: u128) -> Ticks {
    Ticks::try_from(ticks).unwrap_or(Ticks::MAX)
}

/// How much may go through, in units a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// In the long run.
    pub average: u64,
    /// In a burst, where there may be one.
    pub max: Option<u64>,
    /// How long a burst may last, in seconds.
    pub max_length: u64,
}

impl Rate {
    /// So much, without bursts.
    pub fn of(average: u64) -> Self {
        Self { average, max: None, max_length: 1 }
    }
}

/// One bucket.
#[derive(Debug)]
struct Leak {
    /// Units a second.
    rate: u64,
    /// It may be filled until it would take this long to empty.
    capacity: Ticks,
    empty_at: AtomicU64,
}

impl Leak {
    fn new(rate: u64, capacity: u128) -> Self {
        Self { rate, capacity: narrow(capacity), empty_at: AtomicU64::new(0) }
    }

    /// How long it takes until so much has leaked.
    fn cost(&self, units: Units) -> Ticks {
        narrow(
            (u128::from(units.number) * TICKS_PER_SECOND)
                .div_ceil(u128::from(self.rate) * u128::from(units.of)),
        )
    }

    fn ready_at(&self) -> Ticks {
        self.empty_at.load(SeqCst).saturating_sub(self.capacity)
    }

    /// Takes so much, if it may begin now.
    fn take(&self, units: Units, now: Ticks) -> bool {
        let cost = self.cost(units);
        let step = |empty_at: Ticks| {
            (empty_at.saturating_sub(self.capacity) <= now).then(|| empty_at.max(now).saturating_add(cost))
        };
        self.empty_at.fetch_update(SeqCst, SeqCst, step).is_ok()
    }

    /// Returns what was just taken.
    fn give_back(&self, units: Units) {
        let cost = self.cost(units);
        let _ = self.empty_at.fetch_update(SeqCst, SeqCst, |empty_at| Some(empty_at.saturating_sub(cost)));
    }
}

/// So many units, or a part of them: `number / of`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Units {
    pub(super) number: u64,
    pub(super) of: u64,
}

impl Units {
    pub(super) fn whole(number: u64) -> Self {
        Self { number, of: 1 }
    }
}

/// The bucket of one limit, and of its burst.
#[derive(Debug)]
pub(super) struct Bucket {
    long_run: Leak,
    burst: Option<Leak>,
}

impl Bucket {
    pub(super) fn new(rate: Rate) -> Self {
        let average = rate.average;
        let capacity = match rate.max {
            None => TICKS_PER_SECOND / 10,
            Some(max) => {
                let units = u128::from(max) * u128::from(rate.max_length);
                units.saturating_mul(TICKS_PER_SECOND) / u128::from(average)
            }
        };
        let burst = rate.max.filter(|_| rate.max_length > 1);
        Self {
            long_run: Leak::new(average, capacity),
            burst: burst.map(|max| Leak::new(max, TICKS_PER_SECOND / 10)),
        }
    }

    /// When a request may begin if no other request takes from the bucket before.
    pub(super) fn ready_at(&self) -> Ticks {
        let burst = self.burst.as_ref().map_or(0, Leak::ready_at);
        self.long_run.ready_at().max(burst)
    }

    /// Takes so much, if it may begin now.
    pub(super) fn take(&self, units: Units, now: Ticks) -> bool {
        if !self.long_run.take(units, now) {
            return false;
        }
        let is_within = self.burst.as_ref().is_none_or(|burst| burst.take(units, now));
        if !is_within {
            self.long_run.give_back(units);
        }
        is_within
    }

    /// Returns what was just taken.
    pub(super) fn give_back(&self, units: Units) {
        self.long_run.give_back(units);
        if let Some(burst) = &self.burst {
            burst.give_back(units);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many requests of this many units begin between zero and the end of a second, for each second,
    /// while there are always more.
    fn per_second(rate: Rate, units: Units, seconds: usize) -> Vec<u64> {
        let bucket = Bucket::new(rate);
        let mut counts = vec![0; seconds];
        let mut now = 0;
        while let Some(count) =
            counts.get_mut(usize::try_from(u128::from(now) / TICKS_PER_SECOND).expect("small"))
        {
            if bucket.take(units, now) {
                *count += 1;
            } else {
                assert!(bucket.ready_at() > now, "it says that it is ready");
                now = bucket.ready_at();
                assert!(bucket.take(units, now), "at that moment it is");
                bucket.give_back(units);
            }
        }
        counts
    }

    #[test]
    fn so_many_begin_in_each_second() {
        let one = Units::whole(1);
        let burst = |average, max, max_length| Rate { average, max: Some(max), max_length };
        // The first second also has the capacity: a tenth of a second's worth, and the one that begins at the
        // brim.
        for (rate, units, counts) in [
            (Rate::of(100), one, vec![110, 100, 100]),
            (Rate::of(10), one, vec![11, 10, 10]),
            (Rate::of(1), one, vec![2, 1, 1]),
            (Rate::of(1000), Units::whole(10), vec![110, 100, 100]),
            // Twice the size that counts as one.
            (Rate::of(100), Units { number: 8192, of: 4096 }, vec![55, 50, 50]),
            // A request larger than the amount for a second begins, and the next one waits for it.
            (Rate::of(100), Units::whole(200), vec![1, 1, 0, 1, 0]),
            // All of a burst of one second at once; then the average.
            (burst(100, 300, 1), one, vec![400, 100, 100]),
            // 300 a second while the level rises by 200 a second, to 3 × 300: that is reached after 4.35 s.
            (burst(100, 300, 3), one, vec![330, 300, 300, 300, 170, 100]),
        ] {
            assert_eq!(per_second(rate, units, counts.len()), counts, "{rate:?}, {units:?}");
        }
    }

    #[test]
    fn what_is_given_back_was_never_taken() {
        let bucket = Bucket::new(Rate { average: 10, max: Some(20), max_length: 5 });
        let now = ticks(Duration::from_secs(3));
        assert!(bucket.take(Units::whole(3), now));
        let before = bucket.ready_at();
        let later = now + ticks(Duration::from_millis(150));
        assert!(bucket.take(Units::whole(50), later));
        bucket.give_back(Units::whole(50));
        assert_eq!(bucket.ready_at().max(later), before.max(later));
    }

    #[test]
    fn nothing_overflows() {
        let slow = Bucket::new(Rate::of(1));
        assert!(slow.take(Units::whole(u64::MAX), 0));
        assert!(!slow.take(Units::whole(1), u64::MAX / 2));
        let fast = Bucket::new(Rate { average: u64::MAX, max: Some(u64::MAX), max_length: u64::MAX });
        assert!(fast.take(Units::whole(u64::MAX), 0), "one goes, however large");
        assert!(!fast.take(Units::whole(1), 0) && fast.take(Units::whole(1), fast.ready_at()));
    }

    #[test]
    fn small_costs_are_not_lost() {
        // 512 bytes at 10 GB/s take 51.2 ns.
        let bucket = Bucket::new(Rate::of(10_000_000_000));
        let mut taken = 0u64;
        while bucket.take(Units::whole(512), 0) {
            taken += 512;
        }
        let most = 1_000_000_000 + 512;
        assert!(taken <= most && taken > most - most / 1000, "{taken}");
    }
}
