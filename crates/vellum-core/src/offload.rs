//! Where long computations run, so that they block no worker: decompressing, compressing, hashing.
//!
//! In production this is the runtime's pool of threads; in the simulator and in small tools the job runs in
//! place ([`Inline`]).

use std::sync::{Arc, Mutex};

use event_listener::Event;

use crate::lock;

/// Runs jobs somewhere.
pub trait Offload: Send + Sync {
    /// Runs the job, now or soon, here or on another thread, exactly once.
    fn run(&self, job: Box<dyn FnOnce() + Send>);
}

/// Runs each job at once, in place.
#[derive(Debug, Clone, Copy, Default)]
pub struct Inline;

impl Offload for Inline {
    fn run(&self, job: Box<dyn FnOnce() + Send>) {
        job();
    }
}

/// Has `job` run elsewhere and waits for its result. Panics when the job does.
pub async fn offload<T: Send + 'static>(place: &dyn Offload, job: impl FnOnce() -> T + Send + 'static) -> T {
    let done = Arc::new((Mutex::new(Slot::Running), Event::new()));
    let there = Finish(done.clone());
    place.run(Box::new(move || {
        let value = job();
        there.put(Slot::Done(value));
    }));
    loop {
        let listener = done.1.listen();
        let slot = std::mem::replace(&mut *lock(&done.0), Slot::Running);
        match slot {
            Slot::Done(value) => return value,
            Slot::Lost => panic!("an offloaded job did not finish"),
            Slot::Running => listener.await,
        }
    }
}

enum Slot<T> {
    Running,
    Done(T),
    Lost,
}

/// Wakes the waiter even when the job panics.
struct Finish<T>(Arc<(Mutex<Slot<T>>, Event)>);

impl<T> Finish<T> {
    fn put(&self, slot: Slot<T>) {
        *lock(&self.0.0) = slot;
        self.0.1.notify(usize::MAX);
    }
}

impl<T> Drop for Finish<T> {
    fn drop(&mut self) {
        let mut slot = lock(&self.0.0);
        if matches!(*slot, Slot::Running) {
            *slot = Slot::Lost; // taken already, or never put: it is read once
        }
        drop(slot);
        self.0.1.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;

    use super::*;

    struct Thread;

    impl Offload for Thread {
        fn run(&self, job: Box<dyn FnOnce() + Send>) {
            std::thread::spawn(job);
        }
    }

    #[test]
    fn a_job_gives_its_value_wherever_it_runs() {
        assert_eq!(block_on(offload(&Inline, || 6 * 7)), 42);
        assert_eq!(block_on(offload(&Thread, || 6 * 7)), 42);
    }

    #[test]
    #[should_panic(expected = "did not finish")]
    fn a_job_that_panics_elsewhere_panics_here() {
        block_on(offload(&Thread, || panic!("on purpose")));
    }
}
