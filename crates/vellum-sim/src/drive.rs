//! A simulated drive: a storage that remembers everything, takes its time, fails on request, and crashes.
//!
//! ```text
//!            submit                                    end
//!   poll ──▶ check · count · log · data captured ──▶ [held] ──▶ [delay] ──▶ log · effect becomes visible ──▶ result
//! ```
//!
//! 1. A change takes effect when it *ends*, with the data it was given when it was *submitted*. Of
//!    overlapping writes in flight the one that ends last wins, and with a random delay that is any of them.
//! 2. A read sees what is visible when it ends or, if it took time, perhaps what was visible when it was
//!    submitted.
//! 3. What is visible is what a host's cache would show. What a crash leaves may differ; [`EventLog::crash`]
//!    knows it.
//! 4. An operation whose future is dropped half way takes effect later, or never; the seed decides.
//! 5. After a failed flush every change and every flush fails with `Poisoned`, while reads continue.
//! 6. With no delay every operation ends in its first poll, so the drive then needs no running world.
//!
//! Left out: running full (a fault with `NoSpace` does it), and corruption of what is on the medium (change
//! the content between two runs).

use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use smallvec::SmallVec;
use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, ImageOffset, ImageSpan, IoCounts, IoTally, Limits, LocalFuture,
    Random, Result, Storage, StorageRun, Zeroes, lock,
};

use crate::alarm::Sleep;
use crate::change::{Change, Granule, Patches, Torn};
use crate::content::Content;
use crate::crash::CrashKind;
use crate::delay::{Delay, Wait, random_between};
use crate::fault::{Effect, Failure, FaultPlan};
use crate::hold::{Gate, Held, Hold};
use crate::log::{EventLog, History, Outcome};
use crate::mix::mix;
use crate::operation::{Operation, Operations, Request};
use crate::world::{Core, World};

/// No file is longer on any host.
const LEN_MAX: u64 = i64::MAX.unsigned_abs();
/// How long after it was dropped an operation may still take effect.
const AFTERMATH: Duration = Duration::from_millis(20);

/// What a discard does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Discards {
    /// Every sector that is entirely in the run reads as zero, if the limits say that discards work at all.
    #[default]
    Punch,
    /// Some of them, which the seed chooses: all that the contract promises.
    Whim,
}

/// What a drive is like.
#[derive(Debug, Clone)]
pub struct DriveOptions {
    /// What it is called in messages.
    pub name: String,
    /// What it can do.
    pub limits: Limits,
    /// How long it takes.
    pub delay: Delay,
    /// What fails.
    pub faults: FaultPlan,
    /// What it writes as a whole or not at all.
    pub granule: Granule,
    /// How much of the past it keeps.
    pub history: History,
    /// What a discard does.
    pub discards: Discards,
}

impl Default for DriveOptions {
    /// A file that can grow and do everything, at once.
    fn default() -> Self {
        Self {
            name: "drive".to_owned(),
            limits: Limits::plain(),
            delay: Delay::none(),
            faults: FaultPlan::none(),
            granule: Granule::default(),
            history: History::default(),
            discards: Discards::default(),
        }
    }
}

/// A simulated drive. The module lists what holds.
pub struct Drive {
    core: Arc<Core>,
    me: Weak<Self>,
    options: DriveOptions,
    tally: IoTally,
    state: Mutex<State>,
}

struct State {
    log: EventLog,
    random: Random,
    gates: Vec<Arc<Gate>>,
    in_flight: usize,
    poisoned: bool,
    unplugged: bool,
}

impl Drive {
    /// An empty drive.
    pub fn new(world: &World, options: DriveOptions) -> Arc<Self> {
        Self::from_content(world, Content::default(), options)
    }

    /// A drive that durably holds `content`: a fresh one, or the one that a power cut left.
    pub fn from_content(world: &World, content: Content, options: DriveOptions) -> Arc<Self> {
        let core = world.core().clone();
        let log = EventLog::new(content, world.position(), options.granule, options.history);
        Self::with(core, log, options)
    }

    fn with(core: Arc<Core>, log: EventLog, options: DriveOptions) -> Arc<Self> {
        let state = State {
            log,
            random: core.random(),
            gates: Vec::new(),
            in_flight: 0,
            poisoned: false,
            unplugged: false,
        };
        Arc::new_cyclic(|me| Self {
            core,
            me: me.clone(),
            options,
            tally: IoTally::default(),
            state: Mutex::new(state),
        })
    }

    /// What reads see now.
    pub fn content(&self) -> Content {
        self.lock().log.visible().clone()
    }

    /// A copy of the log.
    pub fn log(&self) -> EventLog {
        self.lock().log.clone()
    }

    /// What a crash of this kind, now, leaves; one of the possibilities, drawn from `random`. The drive is
    /// unplugged.
    pub fn crash(&self, kind: CrashKind, random: &mut Random) -> Content {
        self.unplug();
        self.lock().log.crash(kind, self.core.position()).random_image(random)
    }

    /// From now on nothing reaches the drive: every operation fails, those in flight included.
    pub fn unplug(&self) {
        let gates = {
            let mut state = self.lock();
            state.unplugged = true;
            std::mem::take(&mut state.gates)
        };
        for gate in gates {
            gate.open();
        }
    }

    /// The drive as seen by a process that starts after this one was killed, on the same host: what was
    /// visible still is, what was in flight happened or not (drawn from `random`), and what was not flushed
    /// is still not durable. After a failed flush the pages that were dropped are gone. This handle is
    /// unplugged; faults and delay stay in force.
    pub fn restart(&self, random: &mut Random) -> Arc<Self> {
        self.unplug();
        let position = self.core.take_position();
        let log = {
            let state = self.lock();
            let point = state.log.crash(CrashKind::ProcessKill, position);
            let fates = point.random_fates(random);
            state.log.restarted(position, point.base(), point.survivors(fates))
        };
        Self::with(self.core.clone(), log, self.options.clone())
    }

    /// Stops operations of these kinds half way, from now on, until the hold is released.
    pub fn hold(&self, operations: impl Into<Operations>) -> Hold {
        self.add_gate(Gate::new(operations.into(), None))
    }

    /// Stops operations of these kinds that touch the run.
    pub fn hold_within(&self, operations: impl Into<Operations>, span: ImageSpan) -> Hold {
        self.add_gate(Gate::new(operations.into(), Some(span)))
    }

    fn add_gate(&self, (hold, gate): (Hold, Arc<Gate>)) -> Hold {
        let mut state = self.lock();
        state.gates.retain(|gate| !gate.is_open());
        state.gates.push(gate);
        hold
    }

    /// The requests through this handle so far.
    pub fn counts(&self) -> IoCounts {
        self.tally.counts()
    }

    /// The requests since an earlier reading of [`Drive::counts`].
    pub fn counts_since(&self, mark: IoCounts) -> IoCounts {
        self.counts() - mark
    }

    /// The plan of what fails; it also counts the operations of every kind.
    pub fn faults(&self) -> &FaultPlan {
        &self.options.faults
    }

    /// Whether a flush has failed.
    pub fn is_poisoned(&self) -> bool {
        self.lock().poisoned
    }

    /// How many operations have been submitted and have not ended.
    pub fn in_flight(&self) -> usize {
        self.lock().in_flight
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn error(&self, kind: ErrorKind, context: &str) -> Error {
        Error::new(kind, format!("{}: {context}", self.options.name))
    }

    fn span(&self, at: ImageOffset, len: usize) -> Result<ImageSpan> {
        ImageSpan::checked(at, len as u64)
            .ok_or_else(|| self.error(ErrorKind::Invalid, "the request passes 2^64"))
    }

    /// What is wrong with a request, apart from what is to go wrong.
    fn check(&self, state: &State, operation: Operation, span: ImageSpan) -> Result<()> {
        let limits = &self.options.limits;
        if state.unplugged {
            return Err(self.error(ErrorKind::Io, "the drive has no power"));
        }
        if operation == Operation::Read {
            return Ok(());
        }
        if state.poisoned {
            return Err(self.error(ErrorKind::Poisoned, "a flush has failed"));
        }
        if operation == Operation::Flush {
            return Ok(());
        }
        if limits.read_only {
            return Err(self.error(ErrorKind::ReadOnly, "open for reading only"));
        }
        if operation == Operation::SetLen && limits.fixed_len {
            return Err(self.error(ErrorKind::Unsupported, "the length is fixed"));
        }
        let len_max = if limits.fixed_len { state.log.visible().len() } else { LEN_MAX };
        if operation != Operation::Discard && span.end().bytes() > len_max {
            return Err(self.error(ErrorKind::NoSpace, "the request passes the end"));
        }
        Ok(())
    }

    /// The beginning of an operation; `changes` is what it does to the medium.
    fn submit(&self, operation: Operation, span: ImageSpan, change: Change) -> Result<Running<'_>> {
        let mut state = self.lock();
        self.check(&state, operation, span)?;
        let failure = self.options.faults.meet(&self.options.name, operation, span);
        let request = Request { operation, span, now: self.core.now(), in_flight: state.in_flight };
        let wait = self.options.delay.of(&request, &mut state.random);
        let held = state.gates.iter().find_map(|gate| gate.stop(operation, span));
        let mut events = Events::new();
        if operation != Operation::Read {
            let position = self.core.take_position();
            self.note(operation, span, change.digest());
            let grows = grows(operation, span, state.log.visible().len());
            events.push(state.log.submit(position, operation, span, change));
            if grows {
                let growth = Change::Grow(span.end().bytes());
                events.push(state.log.submit(position, operation, span, growth));
            }
        }
        state.in_flight += 1;
        let early = !wait.is_none() && state.random.one_in(2);
        let early = (operation == Operation::Read && early).then(|| state.log.visible().clone());
        Ok(Running { drive: self, operation, span, wait, failure, held, events, early, ended: false })
    }

    fn note(&self, operation: Operation, span: ImageSpan, fact: u64) {
        let place = mix(span.start().bytes(), span.len());
        self.core.note(mix(place, fact).wrapping_add(operation.index() as u64));
    }

    /// The end of a change or flush: its effect becomes visible.
    fn end(
        &self,
        operation: Operation,
        span: ImageSpan,
        events: &[u64],
        failure: Option<Failure>,
    ) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        if state.unplugged {
            return Err(self.error(ErrorKind::Io, "the drive has no power"));
        }
        let position = self.core.take_position();
        if operation == Operation::Flush {
            let failure = match failure {
                Some(failure) => Some(failure.error),
                // It was submitted before another one failed, and must not promise what that one lost.
                None if state.poisoned => Some(self.error(ErrorKind::Poisoned, "another flush has failed")),
                None => None,
            };
            state.poisoned |= failure.is_some();
            let outcome = if failure.is_some() { Outcome::Failed } else { Outcome::Done };
            self.note(operation, span, u64::from(failure.is_some()));
            state.log.end(position, outcome, &[(events[0], Change::Nothing)]);
            return failure.map_or(Ok(()), Err);
        }
        let torn = match failure.as_ref().map(|failure| failure.effect) {
            None | Some(Effect::All) => None,
            Some(Effect::None) => Some(Torn::First(0)),
            Some(Effect::Some) => Some(Torn::Scattered(state.random.any())),
        };
        let mut effects: SmallVec<[(u64, Change); 2]> = SmallVec::new();
        for event in events {
            let change = state.log.change_of(*event).settled(state.log.visible());
            let effect = match (&torn, change) {
                (None, change) => change,
                // What has reached past the end has made the drive longer.
                (Some(torn), Change::Grow(_)) if *torn == Torn::First(0) => Change::Nothing,
                (Some(_), Change::Grow(len)) => Change::Grow(len),
                (Some(torn), change) => change.torn(torn, self.options.granule),
            };
            effects.push((*event, effect));
        }
        // The drive may have been truncated since the operation was submitted.
        let has_effect = torn != Some(Torn::First(0));
        if has_effect && events.len() == 1 && grows(operation, span, state.log.visible().len()) {
            let growth = Change::Grow(span.end().bytes());
            effects.push((state.log.submit(position, operation, span, growth.clone()), growth));
        }
        let outcome = if failure.is_some() { Outcome::Failed } else { Outcome::Done };
        for (_, effect) in &effects {
            self.note(operation, span, effect.digest());
        }
        state.log.end(position, outcome, &effects);
        failure.map_or(Ok(()), |failure| Err(failure.error))
    }

    async fn change(&self, operation: Operation, span: ImageSpan, change: Change) -> Result<()> {
        let mut running = self.submit(operation, span, change)?;
        running.pass().await;
        running.end()
    }
}

/// Whether a request makes a drive of this length longer.
fn grows(operation: Operation, span: ImageSpan, len: u64) -> bool {
    let may_grow = matches!(operation, Operation::Write | Operation::WriteZeroes | Operation::Preallocate);
    may_grow && !span.is_empty() && span.end().bytes() > len
}

/// The events of one operation: the change and perhaps the growth.
type Events = SmallVec<[u64; 2]>;

/// An operation between its submission and its end.
struct Running<'a> {
    drive: &'a Drive,
    operation: Operation,
    span: ImageSpan,
    wait: Wait,
    failure: Option<Failure>,
    held: Option<Held>,
    events: Events,
    /// The result of a read that looks at once.
    early: Option<Content>,
    ended: bool,
}

impl Running<'_> {
    async fn pass(&mut self) {
        if let Some(held) = self.held.take() {
            held.released().await;
        }
        let core = &self.drive.core;
        match &self.wait {
            Wait::For(delay) if delay.is_zero() => {}
            Wait::For(delay) => core.sleep(*delay).await,
            Wait::Until(ticket) => {
                while let Some(next) = ticket.look(core.now()) {
                    Sleep::until(core.clone(), next).await;
                }
            }
        }
    }

    fn end(mut self) -> Result<()> {
        self.ended = true;
        self.drive.lock().in_flight -= 1;
        self.drive.end(self.operation, self.span, &self.events, self.failure.take())
    }

    fn end_read(mut self, at: ImageOffset, buffer: &mut Buffer) -> Result<()> {
        self.ended = true;
        let content = {
            let mut state = self.drive.lock();
            state.in_flight -= 1;
            if state.unplugged {
                return Err(self.drive.error(ErrorKind::Io, "the drive has no power"));
            }
            self.early.take().unwrap_or_else(|| state.log.visible().clone())
        };
        if let Some(failure) = self.failure.take() {
            return Err(failure.error);
        }
        buffer.fill_with(|from, piece| content.read(at + from as u64, piece));
        Ok(())
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let is_change = !matches!(self.operation, Operation::Read | Operation::Flush);
        let after = {
            let mut state = self.drive.lock();
            state.in_flight -= 1;
            let happens = is_change && !state.unplugged && state.random.one_in(2);
            happens.then(|| random_between(&(Duration::ZERO..=AFTERMATH), &mut state.random))
        };
        if let (Some(after), Some(drive)) = (after, self.drive.me.upgrade()) {
            let (operation, span) = (self.operation, self.span);
            let events = std::mem::take(&mut self.events);
            let core = self.drive.core.clone();
            let aftermath = async move {
                drive.core.sleep(after).await;
                // The future was dropped.
                let _unheard = drive.end(operation, span, &events, None);
            };
            core.spawn(aftermath).detach();
        }
    }
}

impl Storage for Drive {
    fn name(&self) -> &str {
        &self.options.name
    }

    fn limits(&self) -> &Limits {
        &self.options.limits
    }

    fn len(&self) -> u64 {
        self.lock().log.visible().len()
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.tally.count_read(buffer.len() as u64);
        Box::pin(async move {
            let span = self.span(at, buffer.len())?;
            let mut running = self.submit(Operation::Read, span, Change::Nothing)?;
            running.pass().await;
            running.end_read(at, &mut buffer)?;
            Ok(buffer)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        self.tally.count_write(data.len() as u64);
        Box::pin(async move {
            let span = self.span(at, data.len())?;
            let change = Change::Sectors(Patches::write(at, &data));
            self.change(Operation::Write, span, change).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.tally.count_flush();
        Box::pin(self.change(Operation::Flush, ImageOffset::ZERO.span(0), Change::Nothing))
    }

    fn write_zeroes(&self, span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.tally.count_zeroes(span.len());
        Box::pin(self.change(Operation::WriteZeroes, span, Change::Sectors(Patches::zeroes(span))))
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.tally.count_discard(span.len());
        Box::pin(async move {
            let change = {
                let mut state = self.lock();
                let len = BlockSize::SECTOR.round_up(state.log.visible().len());
                let inside = span.intersect(ImageOffset::ZERO.span(len));
                let zeroes = Change::Sectors(Patches::zeroes(BlockSize::SECTOR.narrow(inside)));
                match self.options.discards {
                    _ if !self.options.limits.discards => Change::Nothing,
                    Discards::Punch => zeroes,
                    Discards::Whim => zeroes.torn(&Torn::Scattered(state.random.any()), Granule::Sector),
                }
            };
            self.change(Operation::Discard, span, change).await
        })
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.change(Operation::SetLen, ImageOffset::ZERO.span(len), Change::Length(len)))
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.change(Operation::Preallocate, span, Change::Nothing))
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        Box::pin(async move {
            let state = self.lock();
            self.check(&state, Operation::Read, span)?;
            Ok(state.log.visible().runs(span))
        })
    }
}
