//! What the stories share: a directory that is removed at the end of the test, programs that run to their
//! end, a server that never outlives its test, and a client of our own that is small enough to be trusted.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

pub mod client;
pub mod dir;
pub mod loops;
pub mod program;
pub mod server;

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use vellum_core::Random;

/// How long a test waits for what must come: far longer than it takes on a machine that has much else to do.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until it is so.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How much longer than usual random tests run: the soak sets it.
pub fn scale() -> usize {
    std::env::var("VELLUM_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1)
}

/// Bytes that do not repeat and do not compress.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Random::from_seed(seed).fill(&mut bytes);
    bytes
}

/// A disk with data here and there.
pub fn patchy(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::from_seed(seed);
    let mut bytes = vec![0; len];
    for _ in 0..12 {
        let at = random.index(len);
        let end = (at + 1 + random.index(len / 20)).min(len);
        random.fill(&mut bytes[at..end]);
    }
    bytes
}

/// The first byte in which two runs of bytes differ, for messages; lengths are compared first.
pub fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    assert_eq!(one.len(), other.len(), "the lengths");
    if one == other {
        return None;
    }
    one.iter().zip(other).position(|(a, b)| a != b)
}

/// How many bytes of the drive the files take that are in a directory besides these.
pub fn room_beside(dir: &dir::Dir, others: &[&str]) -> u64 {
    let names = dir.names().into_iter().filter(|name| !others.contains(&name.as_str()));
    // It may vanish or be renamed just now.
    names.filter_map(|name| std::fs::metadata(dir.join(&name)).ok()).map(|facts| facts.blocks() * 512).sum()
}
