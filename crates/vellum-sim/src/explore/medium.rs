//! A storage without time: every operation happens at once. Recovery runs on it, thousands of times a second.
//!
//! A *recording* medium keeps a log, as a drive does, so that a crash can be put into the recovery too.

use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, ImageOffset, ImageSpan, Limits, LocalFuture, Result, Storage,
    StorageRun, Zeroes,
};

use crate::change::{Change, Granule, Patches};
use crate::content::Content;
use crate::log::{EventLog, History, Outcome};
use crate::operation::Operation;
use crate::world::Position;

/// Bytes on which operations happen at once.
pub struct Medium {
    limits: Limits,
    state: Mutex<State>,
}

enum State {
    Plain(Content),
    Recording(Box<EventLog>, Position),
}

impl Medium {
    /// What holds `content`, durably.
    pub fn new(content: Content) -> Arc<Self> {
        Arc::new(Self { limits: Limits::plain(), state: Mutex::new(State::Plain(content)) })
    }

    /// The same, with everything that happens to it recorded.
    pub(crate) fn recording(content: Content, granule: Granule) -> Arc<Self> {
        let log = EventLog::new(content, Position::START, granule, History::Whole);
        Self::going_on(log, Position::START)
    }

    /// What goes on where a log ends.
    pub(crate) fn going_on(log: EventLog, position: Position) -> Arc<Self> {
        let state = Mutex::new(State::Recording(Box::new(log), position.next()));
        Arc::new(Self { limits: Limits::plain(), state })
    }

    /// What it holds.
    pub fn content(&self) -> Content {
        self.lock().content().clone()
    }

    /// What happened to it; only for a recording one.
    pub(crate) fn log(&self) -> Option<EventLog> {
        match &*self.lock() {
            State::Plain(_) => None,
            State::Recording(log, _) => Some((**log).clone()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request happens: its bytes, and the growth that comes with them.
    fn change(&self, operation: Operation, span: ImageSpan, change: Change) -> Result<()> {
        let mut state = self.lock();
        let mut changes = vec![change.settled(state.content())];
        let may_grow =
            matches!(operation, Operation::Write | Operation::WriteZeroes | Operation::Preallocate);
        if may_grow && !span.is_empty() && span.end().bytes() > state.content().len() {
            changes.push(Change::Grow(span.end().bytes()));
        }
        match &mut *state {
            State::Plain(content) => {
                for change in &changes {
                    change.apply(content);
                }
                content.seal();
            }
            State::Recording(log, position) => {
                let submitted = *position;
                let effects: Vec<_> = changes
                    .into_iter()
                    .map(|change| (log.submit(submitted, operation, span, change.clone()), change))
                    .collect();
                log.end(submitted.next(), Outcome::Done, &effects);
                *position = submitted.next().next();
            }
        }
        Ok(())
    }
}

impl State {
    fn content(&self) -> &Content {
        match self {
            Self::Plain(content) => content,
            Self::Recording(log, _) => log.visible(),
        }
    }
}

fn answer<T: Send + 'static>(result: Result<T>) -> LocalFuture<'static, Result<T>> {
    Box::pin(ready(result))
}

impl Storage for Medium {
    fn name(&self) -> &'static str {
        "medium"
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.lock().content().len()
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        if ImageSpan::checked(at, buffer.len() as u64).is_none() {
            return answer(Err(Error::new(ErrorKind::Invalid, "medium: the request passes 2^64")));
        }
        let state = self.lock();
        buffer.fill_with(|from, piece| state.content().read(at + from as u64, piece));
        drop(state);
        answer(Ok(buffer))
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        let Some(span) =
            ImageSpan::checked(at, data.len() as u64).filter(|span| span.end().bytes() < 1 << 60)
        else {
            return answer(Err(Error::new(ErrorKind::NoSpace, "medium: the request passes the end")));
        };
        answer(self.change(Operation::Write, span, Change::Sectors(Patches::write(at, &data))))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        if let State::Recording(log, position) = &mut *self.lock() {
            let id = log.submit(*position, Operation::Flush, ImageOffset::ZERO.span(0), Change::Nothing);
            log.end(position.next(), Outcome::Done, &[(id, Change::Nothing)]);
            *position = position.next().next();
        }
        answer(Ok(()))
    }

    fn write_zeroes(&self, span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        answer(self.change(Operation::WriteZeroes, span, Change::Sectors(Patches::zeroes(span))))
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        let len = BlockSize::SECTOR.round_up(self.len());
        let inside = BlockSize::SECTOR.narrow(span.intersect(ImageOffset::ZERO.span(len)));
        answer(self.change(Operation::Discard, inside, Change::Sectors(Patches::zeroes(inside))))
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        answer(self.change(Operation::SetLen, ImageOffset::ZERO.span(len), Change::Length(len)))
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        answer(self.change(Operation::Preallocate, span, Change::Nothing))
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        answer(Ok(self.lock().content().runs(span)))
    }
}
