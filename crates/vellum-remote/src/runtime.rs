//! The tokio runtime of the crate: a few threads of its own, which no disk's worker ever enters.
//!
//! ```text
//!   a worker, or any thread         threads of this runtime
//!     job(future) ──────────────▶   runs beside the others
//!     Job, a future   ◀──────────   its value, or its panic
//! ```
//!
//! 1. A [`Job`] is a future for any executor. Dropping it cancels the work at its next `await`.
//! 2. At most [`BLOCKING_THREADS_MAX`] threads wait for files and compute. Callers bound how many jobs they begin; a
//!    job may wait for another.
//! 3. Work that may never return, such as on a file system that hangs, has [`Threads`] of its own, for which nobody waits.
//! 4. The threads start with the first job and last as long as the process. A program that uses no store
//!    has none of them.

use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll};

use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use vellum_core::{Context as _, Result};

/// Threads that move bytes of all connections.
const THREADS: usize = 2;

/// Threads that wait for local files, or compute.
const BLOCKING_THREADS_MAX: usize = 16;

/// Starts the threads unless they run already.
///
/// # Errors
/// When the host refuses to start a thread.
pub fn start() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<std::result::Result<Runtime, vellum_core::Error>> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        // The process-wide choice of cryptography, made only if the program has not made it: the one that the
        // servers of this project use, too.
        drop(rustls::crypto::ring::default_provider().install_default());
        Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .thread_name("vellum-remote")
            .enable_all()
            .build()
            .context(|| "can't start the threads for remote storage")
    });
    runtime.as_ref().map_err(Clone::clone)
}

/// Threads apart from all others, for work that blocks and may never return. Whoever drops them, or ends the process,
/// does not wait for them.
pub struct Threads(Option<Runtime>);

impl Threads {
    /// At most this number of threads, with this name. None starts before there is work.
    ///
    /// # Errors
    /// When the host refuses what they need.
    pub fn new(name: &str, most: usize) -> Result<Self> {
        let runtime = Builder::new_current_thread().max_blocking_threads(most).thread_name(name).build();
        Ok(Self(Some(runtime.context(|| format!("can't prepare the threads {name}"))?)))
    }

    /// Runs the function on one of them.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Job<T> {
        Job(Some(self.0.as_ref().expect("only `drop` takes it").spawn_blocking(work)))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Work on the runtime's threads, and its value. The module has the rules.
#[must_use = "dropping it cancels the work"]
pub struct Job<T>(Option<JoinHandle<T>>);

/// Runs the future on the runtime.
///
/// # Errors
/// Those of [`start`].
pub fn job<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Result<Job<T>> {
    Ok(Job(Some(start()?.spawn(work))))
}

/// Runs a function that blocks or computes for long, on threads that may.
///
/// # Errors
/// Those of [`start`].
pub fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<Job<T>> {
    Ok(Job(Some(start()?.spawn_blocking(work))))
}

impl<T> Job<T> {
    /// Lets the work run to its end. Its value is dropped.
    pub fn detach(mut self) {
        self.0 = None;
    }
}

impl<T> Future for Job<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let handle = self.0.as_mut().expect("only `detach` takes it, and the job with it");
        Pin::new(handle).poll(context).map(|ended| match ended {
            Ok(value) => value,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // Only its owner cancels a job, by dropping it, and then nothing polls it.
                Err(error) => panic!("a job of the runtime did not finish: {error}"),
            },
        })
    }
}

impl<T> Drop for Job<T> {
    fn drop(&mut self) {
        if let Some(handle) = &self.0 {
            handle.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use futures_lite::future::block_on;

    use super::*;

    #[test]
    fn a_job_gives_its_value_to_any_executor() {
        let thread =
            block_on(job(async { std::thread::current().name().map(str::to_owned) }).expect("starts"));
        assert_eq!(thread.as_deref(), Some("vellum-remote"));
        assert_eq!(block_on(blocking(|| 6 * 7).expect("starts")), 42);
    }

    #[test]
    #[should_panic(expected = "on purpose")]
    fn a_panic_arrives_where_the_value_would() {
        block_on(job(async { panic!("on purpose") }).expect("starts"))
    }

    #[test]
    fn a_dropped_job_is_cancelled() {
        struct Ends(Arc<AtomicUsize>);
        impl Drop for Ends {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let ended = Arc::new(AtomicUsize::new(0));
        let ends = Ends(ended.clone());
        let forever = job(async move {
            let _ends = ends;
            std::future::pending::<()>().await;
        });
        drop(forever.expect("starts"));
        while ended.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
