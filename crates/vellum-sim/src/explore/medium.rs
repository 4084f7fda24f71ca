//! A storage without time: every operation happens at once. Recovery runs on it, thousands of times a second.
//!
//! A *recording* medium keeps a log, as a drive does, so that a crash can be put into the recovery too.
//!
//! A medium after a failed flush may have *two contents*: its own, and that of a page cache, in which pages
//! that were never written look clean.
//!
//! 1. Reads see the cache. A change is made in the cache, and the whole pages that it touches go to the
//!    medium.
//! 2. [`Storage::reconcile`] ends the difference, one way or the other: pages are dropped from the cache, or
//!    written again.
//! 3. [`Medium::lose_cache`] ends it as the host does: without a report.
//! 4. Both contents have the same length: a host misreports only bytes.

use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard};

use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, ImageCluster, ImageOffset, ImageSpan, Limits, LocalFuture, Result,
    Storage, StorageRun, Zeroes, lock,
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
    /// What reads see, where that is something else.
    cache: Mutex<Option<Content>>,
    /// The cache never drops a page on request.
    is_stubborn: bool,
}

enum State {
    Plain(Content),
    Recording(Box<EventLog>, Position),
}

impl Medium {
    /// What holds `content`, durably.
    pub fn new(content: Content) -> Arc<Self> {
        Arc::new(Self::with(State::Plain(content)))
    }

    fn with(state: State) -> Self {
        Self {
            limits: Limits::plain(),
            state: Mutex::new(state),
            cache: Mutex::default(),
            is_stubborn: false,
        }
    }

    /// As above, seen through a cache that shows something else. `is_stubborn`: its pages cannot be dropped
    /// on request.
    pub fn behind(self: Arc<Self>, shown: Content, is_stubborn: bool) -> Arc<Self> {
        let mut medium = Arc::into_inner(self).expect("nobody has it yet");
        (medium.cache, medium.is_stubborn) = (Mutex::new(Some(shown)), is_stubborn);
        Arc::new(medium)
    }

    /// The cache forgets what is clean, and by now that is everything. False where there is none.
    pub fn lose_cache(&self) -> bool {
        self.cached().take().is_some()
    }

    fn cached(&self) -> MutexGuard<'_, Option<Content>> {
        lock(&self.cache)
    }

    /// As above, with every event recorded.
    pub(crate) fn recording(content: Content, granule: Granule) -> Arc<Self> {
        let log = EventLog::new(content, Position::START, granule, History::Whole);
        Self::going_on(log, Position::START)
    }

    /// Continues where a log ends.
    pub(crate) fn going_on(log: EventLog, position: Position) -> Arc<Self> {
        Arc::new(Self::with(State::Recording(Box::new(log), position.next())))
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
        lock(&self.state)
    }

    /// A request happens: its bytes, and the growth that comes with them.
    fn change(&self, operation: Operation, span: ImageSpan, change: Change) -> Result<()> {
        let (mut cache, mut state) = (self.cached(), self.lock());
        let mut changes = match &mut *cache {
            None => vec![change.settled(state.content())],
            Some(cache) => through(cache, span, change),
        };
        let may_grow =
            matches!(operation, Operation::Write | Operation::WriteZeroes | Operation::Preallocate);
        if may_grow && !span.is_empty() && span.end().bytes() > state.content().len() {
            changes.push(Change::Grow(span.end().bytes()));
        }
        if let Some(cache) = &mut *cache {
            changes.iter().for_each(|change| change.apply(cache));
            cache.seal();
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

/// Makes a change in a cache; what goes to the medium are the pages.
fn through(cache: &mut Content, span: ImageSpan, change: Change) -> Vec<Change> {
    let change = change.settled(cache);
    let Change::Sectors(_) = change else { return vec![change] };
    change.apply(cache);
    let whole = BlockSize::PAGE.widen(span);
    let pages = BlockSize::PAGE.pieces_of(whole).map(|page| page.start().bytes() >> BlockSize::PAGE.shift());
    pages.map(|index| Change::Sectors(Patches::page_of(cache, index))).collect()
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
        let (cache, state) = (self.cached(), self.lock());
        let seen = cache.as_ref().unwrap_or(state.content());
        buffer.fill_with(|from, piece| seen.read(at + from as u64, piece));
        drop((cache, state));
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

    fn reconcile(&self, span: ImageSpan) -> LocalFuture<'_, Result<bool>> {
        let differing = match &*self.cached() {
            Some(cache) => cache.pages_that_differ(self.lock().content()),
            None => Vec::new(),
        };
        let of = |index: &u64| BlockSize::PAGE.span_of(ImageCluster::new(*index));
        let asked: Vec<u64> = differing.iter().filter(|index| of(index).overlaps(span)).copied().collect();
        for index in &asked {
            let page = match (&*self.cached(), self.lock().content()) {
                (Some(shown), _) if self.is_stubborn => Patches::page_of(shown, *index),
                (_, medium) => Patches::page_of(medium, *index),
            };
            match self.is_stubborn {
                true => {
                    self.change(Operation::Discard, of(index), Change::Sectors(page)).expect("nothing fails")
                }
                false => Change::Sectors(page).apply(self.cached().as_mut().expect("it differs")),
            }
        }
        answer(Ok(self.is_stubborn && !asked.is_empty()))
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
