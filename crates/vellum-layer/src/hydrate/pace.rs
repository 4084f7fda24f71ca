//! How fast a prefetcher may go: two leaky buckets, and pauses when something else needs what it uses. Pure; the
//! time and the chance are arguments.
//!
//! ```text
//!   base    what is read from below      upper limit: a leaky bucket       lower limit: below it there is contention
//!   image   what is written above        the same                          the same
//!
//!   every second   bytes of the side / time in which it had requests ── under the lower limit? ── no ──► no pauses any more
//!                                                                             │ yes
//!                                                       one in two: pause, for a random time, up to twice as long as
//!                                                                   the last time
//! ```
//!
//! 1. A window counts as contention only by the time in which requests were in flight: while the bucket is waited for
//!    there are none. A window with little such time says nothing.
//! 2. Pauses grow from [`PAUSE_FIRST`] to [`PAUSE_MAX`]. A window that is fast enough ends the series.
//! 3. A guest comes first. While it has requests one piece at a time is fetched, and then nothing is done for
//!    [`REST`] times as long: so the guest keeps 95 % of the time. A request of it waits for one piece at most.
//!
//! Source: FVD (USENIX ATC 2011), section 3.3, which has the limits and the pauses.

use std::time::Duration;

use vellum_core::Random;

/// How long a window is, at least.
const WINDOW: Duration = Duration::from_secs(1);
/// A window with requests for less time than this says nothing.
const BUSY_MIN: Duration = Duration::from_millis(200);
/// How much more may go through at once than the upper limit allows for: what it allows in this time.
const AHEAD: Duration = Duration::from_millis(100);
/// The longest first pause, and the longest of all.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// A guest that is at work has this many times as long for itself as a piece took.
pub(super) const REST: u32 = 24;
/// The longest rest after a piece: one that took very long was not slow because of the guest.
const REST_MAX: Duration = Duration::from_secs(5);

/// The limits of one side, in bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SideLimits {
    /// No more than this; unlimited when not given.
    pub upper: Option<u64>,
    /// Less than this is contention; zero means that nothing is.
    pub lower: u64,
}

impl Default for SideLimits {
    fn default() -> Self {
        Self { upper: None, lower: 1 << 20 }
    }
}

/// The limits of a prefetcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefetchLimits {
    /// Of what is read from below.
    pub base: SideLimits,
    /// Of what is written into the image.
    pub image: SideLimits,
}

/// A side of a prefetcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// What is read.
    Base,
    /// What is written.
    Image,
}

/// The bucket and the window of one side.
#[derive(Debug)]
struct Gauge {
    limits: SideLimits,
    /// When the bucket is empty.
    empty_at: Duration,
    in_flight: u32,
    /// Since when there are requests in flight.
    since: Duration,
    busy: Duration,
    bytes: u64,
}

impl Gauge {
    fn new(limits: SideLimits) -> Self {
        let (empty_at, since, busy) = Default::default();
        Self { limits, empty_at, in_flight: 0, since, busy, bytes: 0 }
    }

    fn ready_at(&self) -> Duration {
        self.empty_at.saturating_sub(AHEAD)
    }

    fn begin(&mut self, bytes: u64, now: Duration) {
        if let Some(upper) = self.limits.upper {
            let cost = u128::from(bytes) * 1_000_000_000 / u128::from(upper.max(1));
            let cost = Duration::from_nanos(u64::try_from(cost).unwrap_or(u64::MAX / 2));
            self.empty_at = self.empty_at.max(now).saturating_add(cost);
        }
        if self.in_flight == 0 {
            self.since = now;
        }
        self.in_flight += 1;
    }

    fn end(&mut self, bytes: u64, now: Duration) {
        self.bytes += bytes;
        self.in_flight -= 1;
        if self.in_flight == 0 {
            self.busy += now.saturating_sub(self.since);
        }
    }

    /// Whether the window was too slow, if it says anything; the next one begins.
    fn judged(&mut self, now: Duration) -> Option<bool> {
        if self.in_flight > 0 {
            self.busy += now.saturating_sub(self.since);
            self.since = now;
        }
        let (busy, bytes) = (std::mem::take(&mut self.busy), std::mem::take(&mut self.bytes));
        (busy >= BUSY_MIN)
            .then(|| u128::from(bytes) * 1_000_000_000 < u128::from(self.limits.lower) * busy.as_nanos())
    }
}

/// The state of a prefetcher's pace.
#[derive(Debug)]
pub struct Pace {
    base: Gauge,
    image: Gauge,
    window_began: Duration,
    paused_until: Duration,
    /// How long the next pause may be.
    pause_max: Duration,
}

impl Pace {
    /// A pace with these limits, from now on.
    pub fn new(limits: PrefetchLimits, now: Duration) -> Self {
        let (base, image) = (Gauge::new(limits.base), Gauge::new(limits.image));
        Self { base, image, window_began: now, paused_until: now, pause_max: PAUSE_FIRST }
    }

    fn side(&mut self, side: Side) -> &mut Gauge {
        match side {
            Side::Base => &mut self.base,
            Side::Image => &mut self.image,
        }
    }

    /// From when on the next piece may be fetched.
    pub fn ready_at(&self) -> Duration {
        self.base.ready_at().max(self.image.ready_at()).max(self.paused_until)
    }

    /// Until when it pauses because of contention, if it does.
    pub fn paused_until(&self, now: Duration) -> Option<Duration> {
        (self.paused_until > now).then_some(self.paused_until)
    }

    /// A request of this many bytes begins.
    pub fn begin(&mut self, side: Side, bytes: u64, now: Duration) {
        self.side(side).begin(bytes, now);
    }

    /// It has ended, and this many bytes were moved.
    pub fn end(&mut self, side: Side, bytes: u64, now: Duration) {
        self.side(side).end(bytes, now);
    }

    /// Looks at the window, if it is over. Returns the pause that begins, if one does.
    pub fn look(&mut self, now: Duration, chance: &mut Random) -> Option<Duration> {
        if now.saturating_sub(self.window_began) < WINDOW {
            return None;
        }
        self.window_began = now;
        let judged = [self.base.judged(now), self.image.judged(now)];
        if !judged.contains(&Some(true)) {
            if judged.contains(&Some(false)) {
                self.pause_max = PAUSE_FIRST;
            }
            return None;
        }
        if !chance.one_in(2) {
            return None;
        }
        let longest = u64::try_from(self.pause_max.as_millis()).expect("a minute at most");
        let pause = Duration::from_millis(longest / 2 + chance.below(longest / 2 + 1));
        self.pause_max = (self.pause_max * 2).min(PAUSE_MAX);
        self.paused_until = now + pause;
        Some(pause)
    }
}

/// How long to rest after a piece that took this long, beside a guest that is at work.
pub fn rest_after(took: Duration) -> Duration {
    (took * REST).min(REST_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn limits(upper: Option<u64>, lower: u64) -> PrefetchLimits {
        let side = SideLimits { upper, lower };
        PrefetchLimits { base: side, image: SideLimits { upper: None, lower: 0 } }
    }

    /// Moves pieces of 256 KiB, each of which takes this long, for this many seconds. Returns the bytes, and the pauses.
    fn run(
        limits: PrefetchLimits,
        took: impl Fn(Duration) -> Duration,
        seconds: u64,
    ) -> (u64, Vec<Duration>) {
        let (mut pace, mut chance) = (Pace::new(limits, Duration::ZERO), Random::from_seed(3));
        let (mut now, mut moved, mut pauses) = (Duration::ZERO, 0, Vec::new());
        while now < Duration::from_secs(seconds) {
            now = now.max(pace.ready_at());
            for side in [Side::Base, Side::Image] {
                pace.begin(side, MIB / 4, now);
            }
            now += took(now);
            for side in [Side::Base, Side::Image] {
                pace.end(side, MIB / 4, now);
            }
            moved += MIB / 4;
            pauses.extend(pace.look(now, &mut chance));
        }
        (moved, pauses)
    }

    #[test]
    fn the_upper_limit_holds_and_waiting_for_it_is_no_contention() {
        // Each piece is fast; the limit makes it 2 MiB a second, which is under the lower limit of 10.
        let (moved, pauses) = run(limits(Some(2 * MIB), 10 * MIB), |_| Duration::from_millis(1), 60);
        assert!((119 * MIB..=121 * MIB).contains(&moved), "{moved}");
        assert!(pauses.is_empty(), "{pauses:?}");
        let (moved, _) = run(limits(None, MIB), |_| Duration::from_millis(1), 10);
        assert!(moved > 2000 * MIB, "{moved}");
    }

    #[test]
    fn it_pauses_when_it_is_too_slow_longer_each_time_and_no_more_when_it_is_fast() {
        // A piece takes a second for ten minutes, then a millisecond.
        let slow = |now: Duration| match now.as_secs() {
            0..600 => Duration::from_secs(1),
            _ => Duration::from_millis(1),
        };
        let (_, pauses) = run(limits(None, MIB), slow, 660);
        assert!(pauses.len() >= 8, "{pauses:?}");
        assert!(pauses[0] <= PAUSE_FIRST && pauses.iter().all(|pause| *pause <= PAUSE_MAX));
        assert!(pauses[..6].is_sorted(), "each is longer: {pauses:?}");
        assert!(pauses.iter().sum::<Duration>() > Duration::from_secs(300), "{pauses:?}");
        let (_, none) = run(limits(None, 0), slow, 60);
        assert!(none.is_empty(), "there is no lower limit");
    }

    #[test]
    fn the_guest_keeps_95_percent_of_the_time() {
        for millis in [1u32, 7, 100] {
            let took = Duration::from_millis(millis.into());
            let rest = rest_after(took);
            assert!(rest.as_secs_f64() / (took + rest).as_secs_f64() >= 0.95);
        }
        assert_eq!(rest_after(Duration::from_secs(60)), REST_MAX, "it is not stuck for an hour");
    }
}
