//! How every mutex of the project is locked.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also one whose holder panicked.
///
/// Nothing that a mutex guards here is left half changed by a panic, so the value is as good as before. If
/// the poison counted, a panic in one request would be one in each later request that takes the same lock,
/// whichever client it is from.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_panic_of_one_holder_does_not_reach_the_next() {
        let mutex = Mutex::new(1);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            *lock(&mutex) = 2;
            let _held = lock(&mutex);
            panic!("as planned");
        }));
        assert!(panicked.is_err() && mutex.is_poisoned());
        assert_eq!(*lock(&mutex), 2);
    }
}
