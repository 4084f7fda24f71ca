//! One row of the table: which witness counts it, or why it is absent.

use vellum_core::{Context, Result};
use vellum_lab::cost::lab::{Lab, Plan, Scene, Witness};
use vellum_lab::cost::{Counts, Host};
use vellum_lab::subjects::{Maker, NATIVE, SUBJECTS, Subject};

use super::workloads::{Below, Workload};
use crate::report::amplification::Row;

/// What stays the same for all rows.
pub(super) struct Bench {
    pub(super) lab: Lab,
    /// Operations that count.
    pub(super) operations: usize,
    /// Whether each row of ours is seen by both witnesses.
    pub(super) confirms_all: bool,
    /// Why subjects are left out, in their order.
    pub(super) refusals: Vec<Option<String>>,
}

/// A row, and what both witnesses say of it to the clean close: Vellum itself, and `strace`.
pub(super) struct Counted {
    pub(super) row: Row,
    pub(super) said: Option<(Counts, Counts)>,
}

impl Bench {
    /// Counts for one format, with the files of one worker. A format that cannot be measured is reported with
    /// the reason; the failure of a plain image of ours is an error.
    pub(super) fn row(&self, subject: usize, workload: &Workload, worker: usize) -> Result<Counted> {
        let refusal = &self.refusals[subject];
        let subject = &SUBJECTS[subject];
        let witness = match subject.maker {
            Maker::Qemu => Witness::Strace,
            Maker::Vellum if self.lab.blind.is_some() || subject.prepares() => Witness::Stats,
            // What is read of the base only `strace` sees.
            Maker::Vellum if self.confirms_all || workload.has_base() => Witness::Both,
            Maker::Vellum => Witness::Stats,
        };
        let is_qemus_snapshot = workload.below == Below::Snapshot && subject.format != NATIVE;
        let needs_qemu = subject.maker == Maker::Qemu || is_qemus_snapshot;
        let plan = workload.plan(self.operations);
        let mut row = Row {
            subject: subject.name,
            witness: if witness == Witness::Stats { "stats" } else { "strace" },
            guest: plan.asked(),
            host: None,
            device_flushes: None,
            base_bytes_read: None,
            skipped: refusal.clone(),
        };
        if row.skipped.is_none() && needs_qemu {
            row.skipped.clone_from(&self.lab.no_qemu);
        }
        if row.skipped.is_none() && witness == Witness::Strace {
            row.skipped.clone_from(&self.lab.blind);
        }
        let mut said = None;
        if row.skipped.is_none() {
            match self.with_scene(workload, &plan, |scene| self.lab.count(subject, scene, witness, worker)) {
                Ok(seen) => {
                    row.host = seen.host();
                    row.device_flushes = seen.device_flushes;
                    row.base_bytes_read = seen.base_bytes_read;
                    said = seen.stats.zip(seen.strace).map(|(stats, strace)| (stats.total, strace.total));
                }
                Err(error) if subject.maker == Maker::Qemu => row.skipped = Some(error.chain()),
                Err(error) => return Err(error).context(|| format!("{} at {}", subject.name, workload.id)),
            }
        }
        Ok(Counted { row, said })
    }

    /// What both witnesses say of one run.
    pub(super) fn both(&self, subject: &Subject, workload: &Workload, worker: usize) -> Result<(Host, Host)> {
        let plan = workload.plan(self.operations);
        self.with_scene(workload, &plan, |scene| self.lab.both(subject, scene, worker))
    }

    fn with_scene<T>(&self, workload: &Workload, plan: &Plan, count: impl FnOnce(Scene<'_>) -> T) -> T {
        let base = match workload.below {
            Below::Base | Below::BeforeBase => Some(self.lab.base()),
            Below::Zeros => Some(self.lab.zeros()),
            Below::Nothing | Below::Snapshot => None,
        };
        count(Scene { plan, base: base.as_deref(), snapshot: workload.below == Below::Snapshot })
    }
}
