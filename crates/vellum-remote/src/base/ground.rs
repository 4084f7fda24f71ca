//! The real ground of the fetch engine: the runtime's clock, timers and tasks, and the host's chance.

use std::time::{Duration, Instant};

use crate::runtime;
use crate::silence::{Ground, Task};

/// Tasks on the threads of the runtime.
pub(crate) struct Real {
    began: Instant,
    runtime: &'static tokio::runtime::Runtime,
}

impl Real {
    /// # Errors
    /// When the threads cannot be started.
    pub(crate) fn new() -> vellum_core::Result<Self> {
        Ok(Self { began: Instant::now(), runtime: runtime::start()? })
    }
}

impl Ground for Real {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn sleep(&self, time: Duration) -> Task<()> {
        let _in_runtime = self.runtime.enter();
        Box::pin(tokio::time::sleep(time))
    }

    fn chance(&self) -> u64 {
        fastrand::u64(..)
    }

    fn spawn(&self, task: Task<()>) {
        drop(self.runtime.spawn(task));
    }
}
