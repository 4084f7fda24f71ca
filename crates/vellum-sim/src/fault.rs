//! Which operations fail, and how: made so that a test can fail each of them in turn (SQLite's method).
//!
//! A [`FaultPlan`] is shared by a test and its drives. It counts the operations it sees, and fails those that
//! a [`Fault`] asks for: "the seventh flush, once", "every write from the third on, with no space left, after
//! some of its sectors changed". [`FaultSweep`] runs a scenario again and again, with N = 0, 1, 2 … as the
//! failing operation, until a run passes without meeting the fault.
//!
//! 1. An operation is counted when it is submitted and the drive has found no error in it, and fails when it
//!    ends.
//! 2. A failed write may have changed any sectors it covers, and no others (storage contract 5).
//! 3. A failed flush poisons the drive, whatever else the fault says (storage contract 6).

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard};

use vellum_core::{Error, ErrorKind, ImageSpan, lock};

use crate::operation::{Operation, Operations};
use crate::world::World;

/// What a failed operation did before it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// Some of the sectors, which the seed chooses.
    Some,
    /// All of it: only the answer is bad.
    All,
}

/// For how long operations fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeat {
    /// One operation.
    Once,
    /// That one and all that match after it.
    ForEver,
}

/// One thing that goes wrong. Start from [`Fault::nth`] and change what should be different.
#[derive(Debug, Clone)]
pub struct Fault {
    /// The kinds of operation that count and fail.
    pub operations: Operations,
    /// Only operations that touch this run count and fail.
    pub within: Option<ImageSpan>,
    /// How many matching operations pass first.
    pub skip: u64,
    /// For how long.
    pub repeat: Repeat,
    /// With which error.
    pub error: ErrorKind,
    /// With which effect.
    pub effect: Effect,
}

impl Fault {
    /// The operation with this number among those that match, counted from zero, fails once with an I/O error
    /// and without effect.
    pub fn nth(operations: impl Into<Operations>, number: u64) -> Self {
        Self {
            operations: operations.into(),
            within: None,
            skip: number,
            repeat: Repeat::Once,
            error: ErrorKind::Io,
            effect: Effect::None,
        }
    }

    fn matches(&self, operation: Operation, span: ImageSpan) -> bool {
        self.operations.contains(operation) && self.within.is_none_or(|within| within.overlaps(span))
    }
}

/// What will fail, and what has been seen. Copies are handles of one plan.
#[derive(Debug, Clone, Default)]
pub struct FaultPlan(Arc<Mutex<Plan>>);

#[derive(Debug, Default)]
struct Plan {
    armed: Vec<Armed>,
    seen: [u64; Operation::ALL.len()],
    hits: u64,
}

#[derive(Debug)]
struct Armed {
    fault: Fault,
    /// Matching operations since the fault was added.
    seen: u64,
}

/// How an operation is going to fail.
pub(crate) struct Failure {
    pub(crate) error: Error,
    pub(crate) effect: Effect,
}

impl FaultPlan {
    /// Nothing fails.
    pub fn none() -> Self {
        Self::default()
    }

    /// What `fault` says fails.
    pub fn of(fault: Fault) -> Self {
        let plan = Self::default();
        plan.add(fault);
        plan
    }

    /// Adds a fault, which counts operations from now on.
    pub fn add(&self, fault: Fault) {
        self.lock().armed.push(Armed { fault, seen: 0 });
    }

    /// Nothing fails any more: space has returned, the cable is back.
    pub fn clear(&self) {
        self.lock().armed.clear();
    }

    /// How many operations of these kinds it has seen.
    pub fn seen(&self, operations: impl Into<Operations>) -> u64 {
        let operations = operations.into();
        let plan = self.lock();
        let seen = Operation::ALL.iter().zip(plan.seen);
        seen.filter(|(operation, _)| operations.contains(**operation)).map(|(_, seen)| seen).sum()
    }

    /// How many operations it has failed.
    pub fn hits(&self) -> u64 {
        self.lock().hits
    }

    /// Counts an operation and returns whether it fails.
    pub(crate) fn meet(&self, drive: &str, operation: Operation, span: ImageSpan) -> Option<Failure> {
        let mut plan = self.lock();
        plan.seen[operation.index()] += 1;
        let mut failure = None;
        for Armed { fault, seen } in &mut plan.armed {
            if !fault.matches(operation, span) {
                continue;
            }
            let number = *seen;
            *seen += 1;
            let fails = match fault.repeat {
                Repeat::Once => number == fault.skip,
                Repeat::ForEver => number >= fault.skip,
            };
            if fails && failure.is_none() {
                let context = format!("{drive}: this {operation} of {span} was to fail");
                failure = Some(Failure { error: Error::new(fault.error, context), effect: fault.effect });
            }
        }
        plan.hits += u64::from(failure.is_some());
        failure
    }

    fn lock(&self) -> MutexGuard<'_, Plan> {
        lock(&self.0)
    }
}

/// Fails each operation of a scenario in turn. Each field lists variants; all combinations are tried.
#[derive(Debug, Clone)]
pub struct FaultSweep {
    /// The seed of every run's world.
    pub seed: u64,
    /// The kinds of operation that fail, counted together.
    pub operations: Operations,
    /// For how long.
    pub repeats: Vec<Repeat>,
    /// With which errors and effects.
    pub failures: Vec<(ErrorKind, Effect)>,
}

/// What a sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SweepReport {
    /// How often the scenario ran.
    pub runs: u64,
    /// How many operations failed.
    pub failures: u64,
}

impl FaultSweep {
    /// Every operation, once and forever, with an I/O error (without effect, with some, with all of it) and
    /// with no space left.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            operations: Operations::ALL,
            repeats: vec![Repeat::Once, Repeat::ForEver],
            failures: vec![
                (ErrorKind::Io, Effect::None),
                (ErrorKind::Io, Effect::Some),
                (ErrorKind::Io, Effect::All),
                (ErrorKind::NoSpace, Effect::None),
            ],
        }
    }

    /// Runs the scenario, which makes its drives with the given plan and panics when it finds an error. The
    /// panic names the operation that was failing.
    pub fn run(&self, scenario: impl AsyncFn(&World, &FaultPlan)) -> SweepReport {
        let mut report = SweepReport::default();
        for repeat in &self.repeats {
            for (error, effect) in &self.failures {
                for number in 0.. {
                    let fault = Fault {
                        repeat: *repeat,
                        error: *error,
                        effect: *effect,
                        ..Fault::nth(self.operations, number)
                    };
                    let plan = FaultPlan::of(fault.clone());
                    let world = World::new(self.seed);
                    let run = AssertUnwindSafe(|| world.run(scenario(&world, &plan)));
                    catch_unwind(run).unwrap_or_else(|panic| fail_with(&fault, panic));
                    report.runs += 1;
                    report.failures += plan.hits();
                    if plan.hits() == 0 {
                        break;
                    }
                }
            }
        }
        report
    }
}

fn fail_with(fault: &Fault, panic: Box<dyn Any + Send>) {
    match panic.downcast::<String>() {
        Ok(message) => {
            let Fault { skip, repeat, error, effect, .. } = fault;
            panic!("operation {skip} fails ({repeat:?}, {error:?}, effect {effect:?}): {message}")
        }
        Err(panic) => resume_unwind(panic),
    }
}

/// Runs the scenario with each of its operations failing in turn, in all the ways of [`FaultSweep::new`].
pub fn fault_loop(seed: u64, scenario: impl AsyncFn(&World, &FaultPlan)) -> SweepReport {
    FaultSweep::new(seed).run(scenario)
}
