//! How many iterations a new slot gets: as many as take a given time here, so that guessing takes as long.
//!
//! What is measured is passed in: best the time that this thread has had of a processor, because on a busy machine the
//! time of a clock would make the slots weaker. [`iterations_for`] takes the fastest of some attempts.

use std::time::Duration;

use crate::header::{ITERATIONS_MAX, ITERATIONS_MIN};
use crate::kdf::Hash;

/// How long opening a new slot is to take, as in QEMU and cryptsetup.
pub const TIME_DEFAULT: Duration = Duration::from_secs(2);

/// The shortest measurement that counts.
const ENOUGH: Duration = Duration::from_millis(50);
const ATTEMPTS: usize = 3;

/// The number of iterations that take about this long, for a key of `key_len` bytes. Busy for less than a second.
pub fn iterations_for(hash: Hash, key_len: usize, time: Duration, now: impl Fn() -> Duration) -> u32 {
    let mut trial = 4096_u32;
    loop {
        let fastest = (0..ATTEMPTS).map(|_| {
            let begin = now();
            drop(hash.derive(b"a passphrase", &[0x5A; 32], trial, key_len));
            now().saturating_sub(begin)
        });
        let fastest = fastest.min().expect("there are some");
        if fastest >= ENOUGH || trial >= ITERATIONS_MAX / 4 {
            let many = u128::from(trial) * time.as_nanos() / fastest.as_nanos().max(1);
            return u32::try_from(many).unwrap_or(u32::MAX).clamp(ITERATIONS_MIN, ITERATIONS_MAX);
        }
        trial *= 4;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn iterations_are_in_proportion_to_the_time() {
        // Each look at the time is 50 ms after the one before, so the first trial is long enough.
        let now = Cell::new(Duration::ZERO);
        let clock = || {
            now.set(now.get() + Duration::from_millis(50));
            now.get()
        };
        let iterations = |millis| iterations_for(Hash::Sha256, 32, Duration::from_millis(millis), clock);
        assert_eq!((iterations(50), iterations(1000)), (4096, 20 * 4096));
        assert_eq!(iterations(1), ITERATIONS_MIN);
        assert_eq!(iterations(u64::MAX / 2_000_000), ITERATIONS_MAX);
    }
}
