//! Filling: what the engine needs of qcow2 to keep copies of the disk below. The order of a fill is in
//! `engine/fill.rs`.
//!
//! | the unit now | |
//! |---|---|
//! | read from below, in a cluster without a place | filled, in a fresh cluster |
//! | read from below, in a cluster that is the image's own | filled there, unless an older write may still land |
//! | read from below, in a cluster or a table that a snapshot shares | left out |
//! | anything else | left out |
//!
//! 1. Only an image with a journal is filled: in the ordered way each flush of the guest would pay for the stages
//!    of what was filled.
//! 2. No unit of a raw data file is filled, because it may have no disk below.
//! 3. A page of the mapping is loaded before the claim, so that the claim is not held meanwhile.

use vellum_core::{BlockSize, Buffer, Error, Filled, Filling, GuestSpan, ImageOffset, Result};

use super::entry::ClusterState;
use super::image::Qcow2;
use super::layout::COPIED;
use super::plan::{Plan, Segment, Source, Target};
use super::write::{Planned, Step};
use crate::engine::{Copier, Fill as _, Writer as _, whole_units};
use crate::state::UnderWay;

impl Qcow2 {
    pub(super) fn takes_copies(&self) -> Option<Filling> {
        let can = self.below.is_some() && self.journal.is_some() && !self.data_file_is_raw();
        can.then(|| Filling { unit: self.entries.unit_size(), kept_at_close: false })
    }

    pub(super) async fn fill_span(&self, span: GuestSpan, data: Buffer) -> Result<Filled> {
        let (Some(_), Some(below)) = (self.takes_copies(), &self.below) else {
            return Err(Error::unsupported(format!(
                "{} takes no copies of its backing image",
                self.engine.name
            )));
        };
        let unit: BlockSize = self.entries.unit_size();
        let (span, data) =
            whole_units(span, data.owned(), unit, below.geometry().size, self.engine.geometry.size);
        if span.is_empty() {
            return Ok(Filled::default());
        }
        self.begin_change().await?;
        if self.journal().is_none() {
            return Err(Error::unsupported(format!("{} has no room for its journal", self.engine.name)));
        }
        if self.has_much_dirty() {
            return Ok(Filled { kept: 0, wants_flush: true });
        }
        self.fill_in_parts(span, data).await
    }

    /// The plan to copy a part of a cluster in this state. `None` when it is left out.
    fn plan_of_copy(&self, part: GuestSpan, state: ClusterState) -> Option<Plan> {
        let start = self.cluster.within(part.start());
        let end = start + part.len();
        let units = self.entries.touched(start, end);
        let ClusterState::Plain(now) = state else { return None };
        if (now.alloc | now.zero) & units != 0 {
            return None;
        }
        let target = match now.host {
            Some(host) if now.copied => Target::Own(host),
            Some(_) => return None,
            None if self.has_data_file => {
                Target::Own(ImageOffset::new(self.start(self.cluster.cluster_of(part.start())).bytes()))
            }
            None => Target::Fresh,
        };
        let guest = Segment { start, end, source: Source::Guest };
        // The disk, and with it the part, may end within a unit.
        let behind =
            Segment { start: end, end: self.entries.unit_size().round_up(end), source: Source::Zero };
        let segments = [guest, behind].into_iter().filter(|segment| segment.start < segment.end).collect();
        Some(Plan { target, segments, claim: units, publish: units })
    }

    /// The plan, under the claim.
    async fn plan_claimed(&self, part: GuestSpan) -> Result<Option<Planned>> {
        let cluster = self.cluster.cluster_of(part.start());
        let state = self.look(cluster).await?;
        let Some(plan) = self.plan_of_copy(part, state) else { return Ok(None) };
        let is_late = self.must_wait_for_late_writes(&plan, state).is_some();
        Ok((!is_late).then_some(Planned { cluster, state, plan }))
    }
}

impl Copier for Qcow2 {
    async fn parts_below(&self, span: GuestSpan) -> Result<Vec<GuestSpan>> {
        let mut parts: Vec<GuestSpan> = Vec::new();
        for piece in self.cluster.pieces_of(span) {
            let cluster = self.cluster.cluster_of(piece.start());
            let ClusterState::Plain(units) = self.look(cluster).await? else { continue };
            let has = units.alloc | units.zero;
            let mut before: Option<GuestSpan> = None;
            for unit in self.entries.unit_size().pieces_of(piece) {
                let start = self.cluster.within(unit.start());
                let is_below = has & self.entries.touched(start, start + unit.len()) == 0;
                before = match (before, is_below) {
                    (Some(before), true) => Some(GuestSpan::between(before.start(), unit.end())),
                    (None, true) => Some(unit),
                    (before, false) => {
                        parts.extend(before);
                        None
                    }
                };
            }
            parts.extend(before);
        }
        Ok(parts)
    }

    async fn plan_copy<'a>(&'a self, part: GuestSpan) -> Result<Option<Step<'a>>> {
        let cluster = self.cluster.cluster_of(part.start());
        let slot = self.mapping.slot(cluster);
        let table = self.mapping.l1_entry(slot.l1_index);
        if table != 0 && table & COPIED == 0 {
            return Ok(None);
        }
        self.look(cluster).await?;
        let start = self.cluster.within(part.start());
        let units = self.entries.touched(start, start + part.len());
        let Some(held) = self.engine.claims.try_claim(cluster, units) else { return Ok(None) };
        match self.plan_claimed(part).await {
            Ok(Some(planned)) => {
                let mut step = self.step(planned, Some(held), None);
                step.under_way = Some(UnderWay::begin(&self.engine.state, "a copy of the backing image"));
                Ok(Some(step))
            }
            result => {
                self.release_claim(held).await;
                result.map(|_| None)
            }
        }
    }

    async fn place_copies(&self, steps: &mut [Step<'_>]) -> Result<()> {
        self.place_steps(steps).await
    }

    async fn publish_copy(&self, step: &Step<'_>) -> Result<bool> {
        self.publish_step(step).await.map(|()| true)
    }
}
