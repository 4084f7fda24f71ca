//! The log of a drive: every request to change its medium, and when each began and ended.
//!
//! ```text
//!   position     0    1    2    3    4    5    6    7    8
//!   write A      ├────┤
//!   write B           ├─────────┤                                  A crash at 7: the flush has ended, so what ended
//!   flush                  ├────────────────────┤                  before the flush *began* is durable: A. B and C
//!   write C                          ├───────────────┤             are only perhaps on the medium. C is in flight.
//!                                                   ▲ crash
//! ```
//!
//! 1. An event has two positions: where it was submitted and where it ended. It takes effect at its end.
//! 2. A flush makes durable everything that had ended before the flush was submitted, once the flush has
//!    succeeded. So the durable content is what was *visible* when that flush was submitted, and the log
//!    keeps just that: a copy of a [`Content`] costs nothing. One look-up gives the state of the medium at
//!    any position.
//! 3. A change that makes the drive longer is two events with the same positions: the bytes, and the length.
//!    Either may reach the medium without the other.
//! 4. A failed event has the effect it had: none, a part or all. A failed flush makes nothing durable.
//! 5. An event whose future was dropped stays in flight until it takes effect after all, or forever.
//!
//! [`EventLog::crash`] computes what a crash may leave; `crash` has the result's type.

use std::collections::BTreeSet;
use std::fmt;

use vellum_core::ImageSpan;

use crate::change::{Change, Granule, Patches};
use crate::content::Content;
use crate::operation::Operation;
use crate::world::Position;

/// How much of the past a log keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum History {
    /// Everything: a crash can be placed at any position. For explorers.
    #[default]
    Whole,
    /// What is not yet durable: a crash can be placed now. For long simulations.
    Pending,
}

/// How an event stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It has not ended.
    InFlight,
    /// It has taken effect.
    Done,
    /// It has failed, perhaps with an effect.
    Failed,
}

/// A request to change the medium.
#[derive(Debug, Clone)]
pub struct Event {
    id: u64,
    operation: Operation,
    span: ImageSpan,
    submitted: Position,
    ended: Option<Position>,
    outcome: Outcome,
    /// As it was asked.
    change: Change,
    /// As it came to be when the event ended.
    effect: Change,
    /// What was visible after it ended; for a flush, when it was submitted.
    visible: Option<Content>,
    /// For a flush: the first event that had not ended when it was submitted.
    first_unended: u64,
}

impl Event {
    /// Its number in the log.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What was asked.
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// The requested bytes.
    pub fn span(&self) -> ImageSpan {
        self.span
    }

    /// Where it began.
    pub fn submitted(&self) -> Position {
        self.submitted
    }

    /// Where it ended.
    pub fn ended(&self) -> Option<Position> {
        self.ended
    }

    /// How it stands.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Whether it is the change of length that belongs to the event before it.
    pub fn is_growth(&self) -> bool {
        matches!(self.change, Change::Grow(_))
    }

    pub(crate) fn ended_before(&self, position: Position) -> bool {
        self.ended.is_some_and(|ended| ended < position)
    }

    pub(crate) fn change(&self) -> &Change {
        &self.change
    }

    pub(crate) fn effect(&self) -> &Change {
        &self.effect
    }
}

/// One line: `#3–#7 write 0x1000+0x200: 1 sectors`.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { submitted, operation, span, .. } = self;
        match self.ended {
            Some(ended) => write!(f, "{submitted}–{ended} {operation} {span}: ")?,
            None => write!(f, "{submitted}–… {operation} {span}: ")?,
        }
        match self.outcome {
            Outcome::InFlight => write!(f, "in flight, {:?}", self.change),
            Outcome::Done => write!(f, "{:?}", self.effect),
            Outcome::Failed => write!(f, "failed, {:?}", self.effect),
        }
    }
}

/// One line for each event.
impl fmt::Display for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.events.iter().try_for_each(|event| writeln!(f, "{event}"))
    }
}

/// What the medium is sure to hold at some position.
pub(crate) struct Durable<'a> {
    pub(crate) content: &'a Content,
    /// Everything that ended before this is in it.
    pub(crate) until: Position,
    /// The events before this one are all in it.
    first_pending: u64,
}

/// All requests to change a drive. A copy costs one reference per event.
#[derive(Debug, Clone)]
pub struct EventLog {
    granule: Granule,
    history: History,
    /// Durable when the log began, or where it was shortened.
    start: Content,
    /// What ended before this is in `start`.
    start_covers: Position,
    /// A crash can be placed from here on.
    start_position: Position,
    /// In the order they were submitted.
    events: Vec<Event>,
    /// The events that have ended, in that order.
    ended: Vec<(Position, u64)>,
    in_flight: BTreeSet<u64>,
    events_made: u64,
    visible: Content,
    poisoned: Option<Position>,
}

impl EventLog {
    pub(crate) fn new(start: Content, position: Position, granule: Granule, history: History) -> Self {
        Self {
            granule,
            history,
            visible: start.clone(),
            start,
            start_covers: position,
            start_position: position,
            events: Vec::new(),
            ended: Vec::new(),
            in_flight: BTreeSet::new(),
            events_made: 0,
            poisoned: None,
        }
    }

    /// The events, in the order they were submitted.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// What the medium held when the log began (or where it was shortened, see [`History`]).
    pub fn start(&self) -> &Content {
        &self.start
    }

    /// What reads see now.
    pub fn visible(&self) -> &Content {
        &self.visible
    }

    /// What reads saw at a position.
    pub fn visible_at(&self, position: Position) -> &Content {
        self.check_position(position);
        let count = self.ended.partition_point(|(ended, _)| *ended < position);
        if count == self.ended.len() {
            return &self.visible;
        }
        assert!(self.history == History::Whole, "this log keeps only what is pending");
        match count.checked_sub(1) {
            None => &self.start,
            Some(last) => {
                let event = self.event(self.ended[last].1);
                event.visible.as_ref().expect("a whole history keeps what was visible")
            }
        }
    }

    /// What is sure to be on the medium at a position.
    pub fn durable_at(&self, position: Position) -> &Content {
        self.durable(position).content
    }

    /// Where a crash can leave something else than one position earlier: at the beginning, and after each
    /// event's submission and end. In order.
    pub fn crash_positions(&self) -> Vec<Position> {
        let mut positions = vec![self.start_position];
        for event in &self.events {
            positions.push(event.submitted.next());
            positions.extend(event.ended.map(Position::next));
        }
        positions.retain(|position| *position >= self.start_position);
        positions.sort_unstable();
        positions.dedup();
        positions
    }

    pub(crate) fn granule(&self) -> Granule {
        self.granule
    }

    pub(crate) fn poisoned_before(&self, position: Position) -> bool {
        self.poisoned.is_some_and(|poisoned| poisoned < position)
    }

    pub(crate) fn durable(&self, position: Position) -> Durable<'_> {
        self.check_position(position);
        let submitted = self.events.partition_point(|event| event.submitted < position);
        // The flush submitted last, among those that have ended well, covers what the others cover.
        let flush = self.events[..submitted].iter().rev().find(|event| {
            event.operation == Operation::Flush
                && event.outcome == Outcome::Done
                && event.ended_before(position)
                && event.submitted >= self.start_covers
        });
        match flush {
            Some(flush) => Durable {
                content: flush.visible.as_ref().expect("a flush keeps what was visible"),
                until: flush.submitted,
                first_pending: flush.first_unended,
            },
            None => Durable { content: &self.start, until: self.start_covers, first_pending: 0 },
        }
    }

    /// The changes that had been submitted before `position` and are not surely durable then: first those
    /// that had ended, in the order in which they became visible, then those in flight.
    pub(crate) fn pending(&self, durable: &Durable<'_>, position: Position) -> Vec<&Event> {
        let first = self.index_from(durable.first_pending);
        let submitted = self.events.partition_point(|event| event.submitted < position);
        let mut pending: Vec<&Event> = self.events[first.min(submitted)..submitted]
            .iter()
            .filter(|event| event.operation != Operation::Flush && !event.ended_before(durable.until))
            .collect();
        pending.sort_by_key(|event| match event.ended {
            Some(ended) if ended < position => (ended, event.id),
            _ => (Position(u64::MAX), event.id),
        });
        pending
    }

    fn check_position(&self, position: Position) {
        assert!(
            position >= self.start_position,
            "the log begins at {}, and {position} lies before",
            self.start_position
        );
    }

    /// Numbers are in order but may have gaps, where a log was shortened.
    fn index_from(&self, id: u64) -> usize {
        self.events.partition_point(|event| event.id < id)
    }

    fn event(&self, id: u64) -> &Event {
        &self.events[self.index_from(id)]
    }

    pub(crate) fn submit(
        &mut self,
        position: Position,
        operation: Operation,
        span: ImageSpan,
        change: Change,
    ) -> u64 {
        let id = self.events_made;
        self.events_made += 1;
        let is_flush = operation == Operation::Flush;
        self.events.push(Event {
            id,
            operation,
            span,
            submitted: position,
            ended: None,
            outcome: Outcome::InFlight,
            change,
            effect: Change::Nothing,
            visible: is_flush.then(|| self.visible.clone()),
            first_unended: self.in_flight.first().copied().unwrap_or(id),
        });
        self.in_flight.insert(id);
        id
    }

    /// The change of an event that is in flight.
    pub(crate) fn change_of(&self, id: u64) -> &Change {
        &self.event(id).change
    }

    /// Ends events that belong to one operation, all at one position, with the effects they had.
    pub(crate) fn end(&mut self, position: Position, outcome: Outcome, effects: &[(u64, Change)]) {
        for (_, effect) in effects {
            effect.apply(&mut self.visible);
        }
        self.visible.seal();
        for (id, effect) in effects {
            let index = self.index_from(*id);
            let event = &mut self.events[index];
            assert!(event.outcome == Outcome::InFlight, "an event ends once");
            event.ended = Some(position);
            event.outcome = outcome;
            event.effect = effect.clone();
            let is_flush = event.operation == Operation::Flush;
            if self.history == History::Whole && !is_flush {
                event.visible = Some(self.visible.clone());
            }
            if !is_flush {
                self.ended.push((position, *id));
            }
            self.in_flight.remove(id);
            if is_flush && outcome == Outcome::Failed {
                self.poisoned.get_or_insert(position);
            }
            if is_flush && outcome == Outcome::Done && self.history == History::Pending {
                self.shorten(position.next());
            }
        }
    }

    /// The log as it stood at a position: what ended later is in flight.
    pub(crate) fn until(&self, position: Position) -> Self {
        let mut log = self.clone();
        log.visible = self.visible_at(position).clone();
        log.events.truncate(self.events.partition_point(|event| event.submitted < position));
        log.ended.retain(|(ended, _)| *ended < position);
        log.in_flight.clear();
        log.poisoned = self.poisoned.filter(|poisoned| *poisoned < position);
        for event in &mut log.events {
            if !event.ended_before(position) {
                event.ended = None;
                event.outcome = Outcome::InFlight;
                event.effect = Change::Nothing;
                if event.operation != Operation::Flush {
                    event.visible = None;
                }
                log.in_flight.insert(event.id);
            }
        }
        log.events_made = log.events.last().map_or(0, |event| event.id + 1);
        log
    }

    /// The process was killed at `position`, and the page cache holds `image`, of which nothing new is
    /// durable.
    pub(crate) fn become_visible(&mut self, position: Position, image: &Content) {
        for id in std::mem::take(&mut self.in_flight) {
            let index = self.index_from(id);
            self.events[index].ended = Some(position);
            self.events[index].outcome = Outcome::Failed;
        }
        let mut changes: Vec<Change> = image
            .pages_that_differ(&self.visible)
            .into_iter()
            .map(|index| Change::Sectors(Patches::page_of(image, index)))
            .collect();
        if image.len() != self.visible.len() {
            changes.push(Change::Length(image.len()));
        }
        for change in changes {
            let span = match &change {
                Change::Sectors(patches) => patches.span(),
                _ => vellum_core::ImageOffset::new(image.len()).span(0),
            };
            let id = self.submit(position, Operation::Write, span, change.clone());
            self.end(position, Outcome::Done, &[(id, change)]);
        }
    }

    /// Whether pages may have been dropped at a position, because a flush had failed.
    pub(crate) fn is_poisoned_at(&self, position: Position) -> bool {
        self.poisoned_before(position)
    }

    /// Forgets what is durable at `position`, which is now.
    fn shorten(&mut self, position: Position) {
        let durable = self.durable(position);
        let (content, until) = (durable.content.clone(), durable.until);
        self.events.retain(|event| match event.operation {
            Operation::Flush => event.ended.is_none(),
            _ => !event.ended_before(until),
        });
        self.ended.retain(|(ended, _)| *ended >= until);
        self.start = content;
        self.start_covers = until;
        self.start_position = position;
    }

    /// The log after a killed process was started again on the same host: nothing is in flight any more, and
    /// what survived has become visible.
    pub(crate) fn restarted(&self, position: Position, base: &Content, survived: Vec<Change>) -> Self {
        let mut log = match self.poisoned {
            // Dirty pages were dropped: `base` is what the medium holds, and what survived is perhaps on it.
            Some(_) => Self::new(base.clone(), position, self.granule, self.history),
            None => self.clone(),
        };
        for id in std::mem::take(&mut log.in_flight) {
            let index = log.index_from(id);
            log.events[index].ended = Some(position);
            log.events[index].outcome = Outcome::Failed;
        }
        for change in survived {
            let span = match &change {
                Change::Sectors(patches) => patches.span(),
                Change::Grow(len) | Change::Length(len) => vellum_core::ImageOffset::new(*len).span(0),
                Change::Nothing => continue,
            };
            let id = log.submit(position, Operation::Write, span, change.clone());
            log.end(position, Outcome::Done, &[(id, change)]);
        }
        log
    }
}
