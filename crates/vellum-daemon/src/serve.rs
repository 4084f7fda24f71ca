//! Runs a server as [`ServeSpec`] describes it, from the first thread to the last. `server` has the details.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc;
use std::time::Duration;

use futures_lite::future::block_on;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vellum_core::Result;
use vellum_export::fuse::allocate_without_write_back;
use vellum_io::{Workers, WorkersConfig};

use crate::server;
use crate::spec::{Ready, Report, ServeSpec};
use crate::stats::look_at_target;

/// Serves until a signal comes. `ready` is called once clients can connect; if it fails, the server ends.
///
/// # Errors
/// Why it cannot start, or the error of a disk when it was closed: then flushed data is safe, and the error
/// says what is not. Disks that do not end are named; their workers are abandoned, and the process should
/// end.
pub fn serve(
    spec: ServeSpec,
    ready: impl FnOnce(Ready<'_>) -> Result<()> + Send + 'static,
) -> Result<Report> {
    spec.session_limits.check()?;
    if let Some(path) = &spec.stats_path {
        look_at_target(path)?;
    }
    raise_file_limit();
    if !spec.fuse.is_empty() || !spec.ublk.is_empty() || !spec.nbd_devices.is_empty() {
        // Before there are threads: all of them take part.
        allocate_without_write_back();
    }
    let workers =
        Workers::start(WorkersConfig { threads: spec.threads, mode: spec.mode, poll_max: spec.poll_max })?;
    let handle = workers.handle();
    let control = workers.spawn(0, move || server::run(spec, handle, ready));
    let (report, hangs) = block_on(control)?;
    if hangs {
        // A worker ends when all its requests to the kernel have ended. One of them does not end here.
        std::mem::forget(workers);
    } else {
        shut_down(workers);
    }
    report
}

/// Ends the workers. All disks are closed by now, so a worker that does not end is not waited for any longer:
/// it waits for a request that the kernel does not complete. Panics when a worker did.
fn shut_down(workers: Workers) {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || drop(done.send(catch_unwind(AssertUnwindSafe(|| workers.shutdown())))));
    match ended.recv_timeout(WORKERS_END_IN) {
        Ok(Ok(())) => {}
        Ok(Err(panic)) => resume_unwind(panic),
        Err(_) => {
            tracing::warn!("all disks are closed, but a thread still waits for the host's storage")
        }
    }
}

/// How long the workers have to end.
const WORKERS_END_IN: Duration = Duration::from_secs(5);

/// As many open files as the process may have: each disk takes two, each client one. The soft limit is for
/// programs that use `select`, and nothing here does.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
    {
        tracing::warn!("can't raise the limit on open files ({:?}): {error}", limit.current);
    }
}
