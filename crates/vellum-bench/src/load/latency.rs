//! How long operations took: a histogram whose buckets are 1/64 of their value wide.
//!
//! ```text
//!   0 1 2 … 63 │ 64 65 … 127 │ 128 130 … 254 │ 256 260 …      nanoseconds; each octave has 64 buckets
//! ```

const SUB_BITS: u32 = 6;
const SUBS: u64 = 1 << SUB_BITS;

/// Times of operations.
#[derive(Debug, Clone)]
pub(crate) struct Latency {
    buckets: Vec<u64>,
    count: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Self { buckets: vec![0; bucket_of(u64::MAX) + 1], count: 0 }
    }
}

fn bucket_of(nanoseconds: u64) -> usize {
    let octave = (u64::BITS - nanoseconds.leading_zeros()).saturating_sub(SUB_BITS + 1);
    let bucket = u64::from(octave) * SUBS + (nanoseconds >> octave);
    usize::try_from(bucket).expect("a few thousand")
}

/// The smallest value of a bucket.
fn floor_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let octave = (bucket / SUBS).saturating_sub(1);
    (bucket - octave * SUBS) << octave
}

impl Latency {
    /// Records that one operation took this long.
    pub(crate) fn note(&mut self, nanoseconds: u64) {
        self.buckets[bucket_of(nanoseconds)] += 1;
        self.count += 1;
    }

    /// Adds what another one noted.
    pub(crate) fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.count += other.count;
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.buckets.fill(0);
        self.count = 0;
    }

    /// The time in microseconds that this share of the operations did not exceed; zero when there were none.
    pub(crate) fn percentile(&self, percent: f64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
        let target = (self.count as f64 * percent / 100.0).max(1.0);
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            #[expect(clippy::cast_precision_loss, reason = "counts and times are far below 2^53")]
            if seen as f64 >= target {
                return floor_of(bucket) as f64 / 1000.0;
            }
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_are_narrow() {
        let mut before = None;
        for bucket in 0..=bucket_of(u64::MAX) {
            let floor = floor_of(bucket);
            assert_eq!(bucket_of(floor), bucket);
            if let Some(before) = before {
                assert!(floor > before, "bucket {bucket}");
                assert!(bucket_of(floor - 1) == bucket - 1);
                assert!((floor - before) * SUBS <= floor.max(SUBS), "bucket {bucket} is too wide");
            }
            before = Some(floor);
        }
    }

    #[test]
    fn percentiles_are_of_all_that_was_noted() {
        let (mut first, mut second) = (Latency::default(), Latency::default());
        (1..=50).for_each(|i| first.note(i * 1000));
        (51..=100).for_each(|i| second.note(i * 1000));
        first.add(&second);
        let near = |percent, expected: f64| (first.percentile(percent) - expected).abs() <= expected / 64.0;
        assert!(near(50.0, 50.0) && near(99.0, 99.0) && near(100.0, 100.0));
        first.clear();
        assert!(first.percentile(50.0) == 0.0);
    }
}
