//! Work on the chain of a disk that is served: how far it is, how fast it may go, and who stops it.
//!
//! ```text
//!   running ◄──► paused        a user pauses it, and lets it continue
//!      │ ▲
//!      ▼ │ in rounds: what guests have changed meanwhile is copied again
//!   switching                  requests wait; nobody can stop it any more
//!      │
//!      ▼
//!   done, cancelled, failed    it is kept for whoever asks, until the next one begins
//! ```
//!
//! 1. A disk has one such job at a time, and is not exchanged for another reason while it has one: the job is a step
//!    (`life`) from its beginning to its end.
//! 2. A job that is stopped at any time leaves a disk that reads the same, and can be run again.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{Error, ErrorKind, LocalFuture, Result, lock};
use vellum_io::clock;
use vellum_layer::merge::Steering;

use super::{Served, Step};
use crate::stats::JobStats;

/// How much more than its rate a job may move at once: what that allows in this time.
const AHEAD: Duration = Duration::from_millis(100);

/// What a job does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    Switching,
    Done,
    Cancelled,
    Failed,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    done: u64,
    written: u64,
    left: u64,
    error: Option<Error>,
    /// The image on top, once it is done.
    image: Option<PathBuf>,
}

/// A job of a disk.
#[derive(Debug)]
pub(crate) struct Job {
    kind: &'static str,
    base: PathBuf,
    useless: Vec<PathBuf>,
    total: u64,
    state: Mutex<State>,
    is_paused: AtomicBool,
    is_cancelled: AtomicBool,
    /// Requests wait for it.
    hurries: AtomicBool,
    /// Bytes of data a second, at most; 0 for no limit.
    rate: AtomicU64,
    ready_at: Mutex<Duration>,
    changed: Event,
}

impl Job {
    pub(crate) fn new(
        kind: &'static str,
        (base, useless): (PathBuf, Vec<PathBuf>),
        total: u64,
        rate: Option<u64>,
    ) -> Arc<Self> {
        let state = State { phase: Phase::Running, done: 0, written: 0, left: 0, error: None, image: None };
        Arc::new(Self {
            kind,
            base,
            useless,
            total,
            state: Mutex::new(state),
            is_paused: AtomicBool::new(false),
            is_cancelled: AtomicBool::new(false),
            hurries: AtomicBool::new(false),
            rate: AtomicU64::new(rate.unwrap_or(0)),
            ready_at: Mutex::default(),
            changed: Event::new(),
        })
    }

    /// The image below that it is about.
    pub(crate) fn base(&self) -> &Path {
        &self.base
    }

    /// So much of the disk is done.
    pub(crate) fn set_done(&self, bytes: u64) {
        lock(&self.state).done = bytes;
    }

    /// So much was changed meanwhile.
    pub(crate) fn set_left(&self, bytes: u64) {
        lock(&self.state).left = bytes;
    }

    /// Requests wait from now on: it goes as fast as it can, and is not stopped.
    pub(crate) fn hurry(&self) {
        self.hurries.store(true, Ordering::Release);
        lock(&self.state).phase = Phase::Switching;
    }

    /// It has ended, with this image on top.
    pub(crate) fn end(&self, ended: Result<PathBuf>) {
        let mut state = lock(&self.state);
        match ended {
            Ok(image) => {
                (state.phase, state.image) = (Phase::Done, Some(image));
                (state.done, state.left) = (self.total, 0);
            }
            Err(error) => {
                let is_cancelled = self.is_cancelled() && error.kind() == ErrorKind::Closed;
                state.phase = if is_cancelled { Phase::Cancelled } else { Phase::Failed };
                state.error = (!is_cancelled).then_some(error);
            }
        }
        drop(state);
        self.changed.notify(usize::MAX);
    }

    pub(crate) fn has_ended(&self) -> bool {
        !matches!(lock(&self.state).phase, Phase::Running | Phase::Switching)
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    /// Stops it for good.
    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        self.changed.notify(usize::MAX);
    }

    fn rate(&self) -> Option<u64> {
        Some(self.rate.load(Ordering::Acquire)).filter(|rate| *rate > 0)
    }

    /// How far it is.
    pub(crate) fn stats(&self) -> JobStats {
        let state = lock(&self.state);
        let is_paused = self.is_paused.load(Ordering::Acquire);
        JobStats {
            job: self.kind,
            state: match state.phase {
                Phase::Running if is_paused => "paused",
                Phase::Running => "running",
                Phase::Switching => "switching",
                Phase::Done => "done",
                Phase::Cancelled => "cancelled",
                Phase::Failed => "failed",
            },
            base: self.base.display().to_string(),
            bytes_total: self.total,
            bytes_done: state.done,
            bytes_written: state.written,
            bytes_left: state.left,
            bytes_per_second_max: self.rate(),
            image: state.image.as_ref().map(|image| image.display().to_string()),
            useless: match state.phase {
                Phase::Done => self.useless.iter().map(|path| path.display().to_string()).collect(),
                _ => Vec::new(),
            },
            last_error: state.error.as_ref().map(Error::chain),
        }
    }

    async fn may_go_on(&self, bytes: u64) -> Result<()> {
        while !self.hurries.load(Ordering::Acquire) {
            let changed = self.changed.listen();
            if self.is_cancelled() {
                return Err(Error::new(ErrorKind::Closed, "it was cancelled"));
            }
            if self.is_paused.load(Ordering::Acquire) {
                changed.await;
                continue;
            }
            let (now, ready) = (clock().now(), *lock(&self.ready_at));
            let Some(rate) = self.rate() else { break };
            let wait = ready.saturating_sub(now + AHEAD);
            if !wait.is_zero() {
                or(changed, clock().sleep(wait)).await;
                continue;
            }
            let takes = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
            let takes = Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX / 2));
            *lock(&self.ready_at) = ready.max(now).saturating_add(takes);
            break;
        }
        lock(&self.state).written += bytes;
        Ok(())
    }
}

impl Steering for Job {
    fn go_on(&self, bytes: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.may_go_on(bytes))
    }
}

/// A step that takes as long as a job does.
pub(super) struct JobStep(Arc<Served>);

impl JobStep {
    pub(super) fn begin(served: &Arc<Served>, step: Step) -> Result<Self> {
        served.life().begin(step).map_err(|why| served.in_use(why))?;
        Ok(Self(served.clone()))
    }
}

impl Drop for JobStep {
    fn drop(&mut self) {
        self.0.life().step_is_over();
    }
}

/// What a user wants of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobWish {
    /// To know how far it is.
    Status,
    /// That it stops for a while.
    Pause,
    /// That it goes on.
    Resume,
    /// That it stops for good.
    Cancel,
    /// So many bytes a second at most; no limit when not given.
    Limit(Option<u64>),
}

impl Served {
    /// Steers its job. Returns how far that is.
    ///
    /// # Errors
    /// `NotFound` when there was none.
    pub(crate) fn steer_job(&self, wish: JobWish) -> Result<JobStats> {
        let job = lock(&self.job).clone().ok_or_else(|| {
            let why =
                format!("{}: nothing is done with its chain: `vellum commit --control` begins", self.shown());
            Error::new(ErrorKind::NotFound, why)
        })?;
        match wish {
            JobWish::Status => {}
            _ if job.has_ended() => {
                let why = format!("{}: its {} has ended: {}", self.shown(), job.kind, job.stats().state);
                return Err(Error::new(ErrorKind::NotFound, why));
            }
            JobWish::Pause => job.is_paused.store(true, Ordering::Release),
            JobWish::Resume => job.is_paused.store(false, Ordering::Release),
            JobWish::Cancel => job.cancel(),
            JobWish::Limit(rate) => {
                job.rate.store(rate.unwrap_or(0), Ordering::Release);
                *lock(&job.ready_at) = Duration::ZERO;
            }
        }
        job.changed.notify(usize::MAX);
        Ok(job.stats())
    }

    /// How far its job is, or was.
    pub(crate) fn job_now(&self) -> Option<JobStats> {
        lock(&self.job).as_ref().map(|job| job.stats())
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use futures_lite::future::poll_once;

    use super::*;

    #[test]
    fn a_job_stops_when_it_is_told_to_but_not_while_requests_wait() {
        let job = Job::new("commit", (PathBuf::new(), Vec::new()), 10, None);
        block_on(async {
            job.go_on(3).await.expect("it runs");
            job.is_paused.store(true, Ordering::Release);
            assert_eq!(job.stats().state, "paused");
            let mut waits = std::pin::pin!(job.go_on(4));
            assert!(poll_once(&mut waits).await.is_none());
            job.is_paused.store(false, Ordering::Release);
            job.changed.notify(usize::MAX);
            waits.await.expect("it goes on");
            job.cancel();
            assert_eq!(job.go_on(1).await.expect_err("cancelled").kind(), ErrorKind::Closed);
            job.hurry();
            job.go_on(2).await.expect("to the end");
        });
        assert_eq!(job.stats().bytes_written, 9);
        job.end(Ok(PathBuf::from("a")));
        let stats = job.stats();
        assert_eq!((stats.state, stats.bytes_done), ("done", 10));
        let job = Job::new("commit", (PathBuf::new(), vec![PathBuf::from("b")]), 10, None);
        job.cancel();
        job.end(Err(Error::new(ErrorKind::Closed, "it was cancelled")));
        let stats = job.stats();
        assert_eq!((stats.state, stats.last_error, stats.useless.len()), ("cancelled", None, 0));
        let job = Job::new("commit", (PathBuf::new(), Vec::new()), 10, None);
        job.end(Err(Error::new(ErrorKind::Io, "the disk")));
        assert_eq!((job.stats().state, job.stats().last_error.as_deref()), ("failed", Some("the disk")));
    }
}
