//! How long something that brings bytes may be silent, and whole objects that are read with that patience.
//!
//! ```text
//!   try ─► parts arrive ─► whole
//!    ▲        │ fails, or is silent
//!    └─ pause ┘   until nothing has arrived for the timeout
//! ```
//!
//! 1. All limits are on silence: whatever the link's pace, a try continues as long as at least [`PROGRESS_BYTES`] come
//!    in [`SILENCE_MAX`].
//! 2. A failure that may pass is tried again, after growing random pauses. It is given up when nothing has arrived for
//!    the timeout, and at most [`LAST_TRY`] later.
//! 3. Time and chance are those of a [`Ground`], so that tests script them.

use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::future::{Either, select};
use futures_util::stream::{Stream, StreamExt as _};
use vellum_core::{Error, ErrorKind, lock};

use crate::base::plan::{AfterFailure, after_failure};

/// How long a request may bring nothing before it counts as failed.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(15);

/// So many bytes end a silence: a server that sends one now and then holds nobody.
pub(crate) const PROGRESS_BYTES: usize = 4096;

/// How long the last try may take when it begins just before the timeout.
pub(crate) const LAST_TRY: Duration = Duration::from_secs(1);

/// A future for the tasks of the runtime.
pub(crate) type Task<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The bytes of a request as they arrive.
pub(crate) type Parts = Pin<Box<dyn Stream<Item = Result<Bytes, Failure>> + Send>>;

/// Why a request brought no bytes.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// It may pass: it is worth trying again.
    Passing(Error),
    /// It will not.
    Final(Error),
}

/// Time, chance and tasks. Any thread may wait for a sleep.
pub(crate) trait Ground: Send + Sync {
    fn now(&self) -> Duration;
    fn sleep(&self, time: Duration) -> Task<()>;
    fn chance(&self) -> u64;
    fn spawn(&self, task: Task<()>);
}

/// The last time that something was heard, by the clock of the ground.
#[derive(Default)]
pub(crate) struct Heard(AtomicU64);

impl Heard {
    pub(crate) fn at(time: Duration) -> Self {
        let heard = Self::default();
        heard.note(time);
        heard
    }

    pub(crate) fn note(&self, time: Duration) {
        self.0.fetch_max(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn time(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Watches one request for silence.
pub(crate) struct Watch {
    since: Duration,
    /// Bytes that came since then.
    fresh: usize,
}

impl Watch {
    pub(crate) fn begin(now: Duration) -> Self {
        Self { since: now, fresh: 0 }
    }

    /// The next part of the answer, and whether it ended a silence; `None` after the last part. `heard` is when bytes
    /// for those that wait came last, with which the timeout begins.
    ///
    /// # Errors
    /// Those of the request; `Err(None)` for a silence that was too long, of which [`Watch::said`] tells.
    pub(crate) async fn next(
        &mut self,
        parts: &mut Parts,
        ground: &dyn Ground,
        heard: Duration,
        timeout: Duration,
    ) -> Result<Option<(Bytes, bool)>, Option<Failure>> {
        let in_time = (heard + timeout).max(self.since + LAST_TRY);
        let until = in_time.min(self.since + SILENCE_MAX);
        let limit = ground.sleep(until.saturating_sub(ground.now()));
        match select(parts.next(), limit).await {
            Either::Left((Some(part), _)) => {
                let part = part.map_err(Some)?;
                self.fresh += part.len();
                let is_progress = self.fresh >= PROGRESS_BYTES;
                if is_progress {
                    *self = Self::begin(ground.now());
                }
                Ok(Some((part, is_progress)))
            }
            Either::Left((None, _)) => Ok(None),
            Either::Right(_) => Err(None),
        }
    }

    /// Why a request counts as failed that is silent until now.
    pub(crate) fn said(&self, now: Duration) -> Failure {
        let seconds = now.saturating_sub(self.since).as_secs_f64().round();
        let why = match self.fresh {
            0 => format!("the server was silent for {seconds} s"),
            fresh => format!("the server sent no more than {fresh} bytes in {seconds} s"),
        };
        Failure::Passing(Error::new(ErrorKind::Io, why))
    }
}

/// How long one object is waited for.
pub(crate) struct Patience<'a> {
    pub(crate) ground: &'a dyn Ground,
    pub(crate) timeout: Duration,
    /// When bytes of the object came last, or else when its silence began.
    pub(crate) heard: &'a Heard,
    /// When bytes of any object came last.
    pub(crate) heard_any: &'a Heard,
    /// Why the last try failed.
    pub(crate) failure: &'a Mutex<Option<Error>>,
    /// Counts tries after the first.
    pub(crate) repeated: &'a AtomicU64,
}

impl Patience<'_> {
    /// All parts of an object as one.
    ///
    /// # Errors
    /// `Passing` with the last failure when nothing has arrived for the timeout.
    pub(crate) async fn whole(&self, ask: impl Fn() -> Parts) -> Result<Bytes, Failure> {
        let (mut tries, mut most) = (0, 0);
        loop {
            let heard_before = self.heard.time();
            let error = match self.try_whole(ask(), &mut most).await {
                Err(Failure::Passing(error)) => error,
                ended => return ended,
            };
            let (heard, now) = (self.heard.time(), self.ground.now());
            let error = {
                let mut last = lock(self.failure);
                // A try that the timeout cut short says less than the one before.
                if last.is_none() || now < heard + self.timeout {
                    *last = Some(error);
                }
                last.clone().expect("there is one")
            };
            if heard > heard_before {
                tries = 0;
            }
            match after_failure(tries, self.ground.chance(), now, heard + self.timeout) {
                AfterFailure::GiveUp => return Err(Failure::Passing(error)),
                AfterFailure::Pause(pause) => self.ground.sleep(pause).await,
            }
            tries += 1;
            self.repeated.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// `most` is how many bytes a try has brought at most. To bring the same ones again is no progress: a server that
    /// always breaks at one place holds nobody.
    async fn try_whole(&self, mut parts: Parts, most: &mut usize) -> Result<Bytes, Failure> {
        let mut watch = Watch::begin(self.ground.now());
        let mut count = 0;
        // Most answers come in one part, which is not copied.
        let mut first = Bytes::new();
        let mut joined = BytesMut::new();
        loop {
            let next = watch.next(&mut parts, self.ground, self.heard.time(), self.timeout).await;
            let Some((part, is_progress)) =
                next.map_err(|failure| failure.unwrap_or_else(|| watch.said(self.ground.now())))?
            else {
                // Small objects end a silence, too.
                self.heard_any.note(self.ground.now());
                return Ok(if joined.is_empty() { first } else { joined.freeze() });
            };
            count += part.len();
            if is_progress && count > *most {
                *most = count;
                let now = self.ground.now();
                self.heard.note(now);
                self.heard_any.note(now);
            }
            if first.is_empty() {
                first = part;
                continue;
            }
            if joined.is_empty() {
                joined.extend_from_slice(&first);
            }
            joined.extend_from_slice(&part);
        }
    }
}
