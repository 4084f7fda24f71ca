//! Work whose amount the bytes of an image determine, counted for the tests that look for images that cost
//! more than their length.
//!
//! A loop whose length comes from an image reports its steps here. Without the feature `test-hooks` none of
//! this is compiled in.

#[cfg(feature = "test-hooks")]
thread_local! {
    static STEPS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// What this thread has counted since the last call.
#[cfg(feature = "test-hooks")]
pub fn take() -> u64 {
    STEPS.take()
}

/// Counts this many steps: one for each entry read, or for each eight bytes summed.
#[cfg(feature = "test-hooks")]
pub(crate) fn note(steps: usize) {
    STEPS.set(STEPS.get() + steps as u64);
}

/// Counting is off.
#[cfg(not(feature = "test-hooks"))]
pub(crate) const fn note(_steps: usize) {}
