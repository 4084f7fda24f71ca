//! How long a drive takes: no time, a fixed time, a random one, or what a model of a real drive computes.
//!
//! A model is a closure that sees each [`Request`] when it is submitted (with the virtual time and the number
//! of requests in flight) and returns the time until it ends. It may keep any state: where the head is, how
//! full the cache is, until when a channel is busy. A model that reorders requests, or ends several at once,
//! is a [`DriveModel`](crate::model::DriveModel): see [`Delay::medium`].
//!
//! No delay means that an operation ends in its first poll, without a turn of the world. The smallest delay
//! is enough to let others run in between.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vellum_core::{Random, lock};

use crate::model::{Medium, Ticket};
use crate::operation::{Operation, Request};

type Model = dyn FnMut(&Request, &mut Random) -> Duration + Send;

/// How long operations take. Copies share one model, as two handles share one drive.
#[derive(Clone, Default)]
pub struct Delay(Kind);

#[derive(Clone, Default)]
enum Kind {
    #[default]
    None,
    Model(Arc<Mutex<Model>>),
    Medium(Medium),
}

/// How long an operation has to wait.
pub(crate) enum Wait {
    For(Duration),
    Until(Ticket),
}

impl Wait {
    /// Whether the operation ends in its first poll.
    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::For(Duration::ZERO))
    }
}

impl Delay {
    /// Every operation ends in its first poll.
    pub fn none() -> Self {
        Self(Kind::None)
    }

    /// Every operation takes the same time.
    pub fn fixed(delay: Duration) -> Self {
        Self::model(move |_, _| delay)
    }

    /// Every operation takes its own time, so that they end in another order than they began.
    pub fn between(range: RangeInclusive<Duration>) -> Self {
        Self::model(move |_, random| random_between(&range, random))
    }

    /// What `model` says.
    pub fn model(model: impl FnMut(&Request, &mut Random) -> Duration + Send + 'static) -> Self {
        Self(Kind::Model(Arc::new(Mutex::new(model))))
    }

    /// Delays from the model of a whole drive, which may be shared with code that asks what its medium did.
    pub fn medium(medium: Medium) -> Self {
        Self(Kind::Medium(medium))
    }

    /// As above, but flushes take `flush`. Not for a medium, which has flushes of its own.
    #[must_use]
    pub fn with_flush(self, flush: Duration) -> Self {
        Self::model(move |request, random| match request.operation {
            Operation::Flush => flush,
            _ => match self.of(request, random) {
                Wait::For(delay) => delay,
                Wait::Until(_) => panic!("a medium has flushes of its own"),
            },
        })
    }

    pub(crate) fn of(&self, request: &Request, random: &mut Random) -> Wait {
        match &self.0 {
            Kind::None => Wait::For(Duration::ZERO),
            Kind::Model(model) => {
                let mut model = lock(model);
                Wait::For(model(request, random))
            }
            Kind::Medium(medium) => Wait::Until(medium.submit(request)),
        }
    }
}

impl fmt::Debug for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::None => "Delay(none)",
            Kind::Model(_) => "Delay(model)",
            Kind::Medium(_) => "Delay(medium)",
        })
    }
}

/// A random time, to the nanosecond.
pub(crate) fn random_between(range: &RangeInclusive<Duration>, random: &mut Random) -> Duration {
    let width = range.end().saturating_sub(*range.start());
    let width = u64::try_from(width.as_nanos()).unwrap_or(u64::MAX - 1);
    *range.start() + Duration::from_nanos(random.below(width + 1))
}
