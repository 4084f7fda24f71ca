//! One run of a program in a world: what the host saw, and what the guest was answered.

use std::time::Duration;

use vellum_core::SharedDisk;

use super::Subject;
use super::case::Plan;
use super::program::{Program, Step};
use crate::content::Content;
use crate::delay::{Delay, random_between};
use crate::drive::{Drive, DriveOptions};
use crate::fault::{Effect, Fault, FaultPlan};
use crate::log::EventLog;
use crate::operation::Operation;
use crate::oracle::Oracle;
use crate::world::{Position, World};

pub(crate) struct Run {
    pub(crate) log: EventLog,
    pub(crate) oracle: Oracle,
    /// Where exploring begins.
    pub(crate) from: Position,
    /// What went wrong although nothing crashed.
    pub(crate) wrong: Option<String>,
    world: World,
}

/// What a drive takes that several queues ask.
fn delay(stalls: bool) -> Delay {
    let usual = Duration::from_micros(20)..=Duration::from_micros(300);
    let stalled = Duration::from_millis(2)..=Duration::from_millis(12);
    let delay = match stalls {
        false => Delay::between(usual),
        true => Delay::model(move |request, random| {
            let is_late = request.operation == Operation::Write && random.one_in(6);
            random_between(if is_late { &stalled } else { &usual }, random)
        }),
    };
    delay.with_flush(Duration::from_micros(400))
}

impl Run {
    pub(crate) fn of(subject: &dyn Subject, plan: &Plan, image: Content, guest: Content) -> Self {
        let several = plan.program.queues.len() > 1;
        let (world, delay) = match several {
            true => (World::shuffled(plan.seed), delay(plan.stalls)),
            false => (World::new(plan.seed), Delay::none()),
        };
        let faults = FaultPlan::none();
        if let Some(number) = plan.fail_flush {
            faults.add(Fault::nth(Operation::Flush, number));
        }
        if let Some(number) = plan.fail_write {
            faults.add(Fault { effect: Effect::Some, ..Fault::nth(Operation::Write, number) });
        }
        let drive =
            Drive::from_content(&world, image, DriveOptions { delay, faults, ..DriveOptions::default() });
        let oracle = Oracle::new(&world, guest);
        let mut from = Position::START;
        let outcome = world.run(async {
            let places = subject.places();
            let inner = subject.open(drive.clone()).await?;
            let mut disk: SharedDisk = oracle.watch(inner);
            if several {
                let mut tasks = Vec::new();
                for (queue, steps) in plan.program.queues.iter().cloned().enumerate() {
                    let (disk, places) = (disk.clone(), places.clone());
                    tasks.push(world.spawn(async move {
                        let mut first_error = None;
                        for (number, step) in steps.into_iter().enumerate() {
                            let seed = Program::seed_of(queue, number);
                            first_error = first_error.or(step.perform(&*disk, &places, seed).await.err());
                        }
                        first_error
                    }));
                }
                for task in tasks {
                    if let Some(error) = task.await {
                        return Err(error);
                    }
                }
                return disk.close().await;
            }
            let steps = &plan.program.queues[0];
            let mut first_error = None;
            for (number, step) in steps.iter().enumerate() {
                if plan.last_step_only && number + 1 == steps.len() {
                    from = world.position();
                }
                if *step == Step::Reopen {
                    disk.close().await?;
                    disk = oracle.watch(subject.open(drive.clone()).await?);
                    continue;
                }
                let seed = Program::seed_of(0, number);
                first_error = first_error.or(step.perform(&*disk, &places, seed).await.err());
            }
            disk.close().await?;
            first_error.map_or(Ok(()), Err)
        });
        let wrong = match outcome {
            Err(error) if plan.fail_flush.is_none() && plan.fail_write.is_none() => {
                Some(format!("nothing failed, and yet: {}", error.chain()))
            }
            _ => None,
        };
        Self { log: drive.log(), oracle, from, wrong, world }
    }

    /// Where a crash can leave something else, or be judged otherwise, than one position earlier.
    pub(crate) fn positions(&self) -> Vec<Position> {
        let mut positions = self.log.crash_positions();
        positions.extend(self.oracle.answers());
        positions.retain(|position| *position >= self.from && *position <= self.world.position());
        positions.sort_unstable();
        positions.dedup();
        positions
    }
}
