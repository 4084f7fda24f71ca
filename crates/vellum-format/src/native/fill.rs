//! Filling: what the engine needs of the native format to keep copies of the base. The order of a fill is in
//! `engine/fill.rs`; `linear` is filled in its own way (`fill_linear.rs`).
//!
//! 1. Sub-blocks are filled that are read from the base. A block whose last sub-block is filled gets its bit.
//! 2. A unit that a snapshot sees is left out, and so is one whose pages a snapshot has no copy of yet. So a fill
//!    keeps no page and copies no unit.
//! 3. A packed block is the image's, so it is never filled. Blocks beside it are, and where no record has the unit's
//!    entry yet, the transaction of the copy has it (`pack_over_base.rs`).

use vellum_core::{Buffer, Error, Filled, Filling, GuestOffset, GuestSpan, Result};

use super::geometry::SUB_BLOCK;
use super::image::{Native, Sub};
use super::publish::{Planned, Step};
use super::write::bytes_of;
use crate::claims::{Fresh, Held};
use crate::engine::{Copier, Fill as _, place_fresh, whole_units};
use crate::state::UnderWay;

impl Native {
    pub(super) fn takes_copies(&self) -> Option<Filling> {
        if self.below.is_none() || self.journal.is_none() {
            return None;
        }
        let shape = self.places.shape();
        shape.base_bytes?;
        Some(match self.unit() {
            Some(_) => Filling { unit: SUB_BLOCK, kept_at_close: false },
            None => Filling { unit: shape.block, kept_at_close: true },
        })
    }

    pub(super) async fn fill_span(&self, span: GuestSpan, data: Buffer) -> Result<Filled> {
        let (Some(filling), Some(below)) = (self.takes_copies(), &self.below) else {
            return Err(Error::unsupported(format!("{} takes no copies of a base", self.engine.name)));
        };
        let base_end = self.places.shape().base_bytes.unwrap_or(0).min(below.geometry().size);
        let (span, mut data) =
            whole_units(span, data.owned(), filling.unit, base_end, self.engine.geometry.size);
        // The last block of the base may be larger than what has masks in it.
        let masked = self.base_end().bytes().saturating_sub(span.start().bytes());
        let (span, _) = span.split_at(masked);
        drop(data.split_off(usize::try_from(span.len()).expect("within the buffer")));
        if span.is_empty() {
            return Ok(Filled::default());
        }
        if filling.kept_at_close {
            return self.fill_linear(span, data).await;
        }
        self.begin_journal().await?;
        self.fill_in_parts(span, data).await
    }

    /// What a step that was claimed needs to know. `None` when the part is left out.
    async fn plan_claimed(&self, part: GuestSpan) -> Result<Option<Planned>> {
        let number = self.cell_of(part.start()).index();
        let entry = self.find(|| self.entry(number)).await?;
        if entry == self.places.moved_number() || self.find(|| self.is_held(number)).await? {
            return Ok(None);
        }
        let mut planned = Planned::new(part);
        planned.subs = self.find(|| self.subs_to_publish(part)).await?;
        let last = GuestOffset::new(part.end().bytes() - 1);
        let subs = SUB_BLOCK.cluster_of(part.start()).index()..SUB_BLOCK.cluster_of(last).index() + 1;
        let is_base = self
            .find(|| {
                let mut is_base = true;
                for sub in subs.clone() {
                    is_base &= self.sub(sub)? == Sub::Base;
                }
                Ok(is_base)
            })
            .await?;
        planned.is_fresh = entry == 0;
        Ok(is_base.then_some(planned))
    }

    async fn step_of_copy<'a>(&'a self, part: GuestSpan, held: Held<'a>) -> Result<Option<Step<'a>>> {
        let planned = match self.plan_claimed(part).await {
            Ok(Some(planned)) => planned,
            result => {
                self.release_claim(held);
                return result.map(|_| None);
            }
        };
        let mut step = Step::new(planned, Some(held));
        step.under_way = Some(UnderWay::begin(&self.engine.state, "a copy of the base"));
        step.fresh = bytes_of(&step.plan.subs, self.cell.start_of(self.cell_of(part.start())));
        if !self.may_change(&|| self.words_of_any(&step)) {
            step.end().into_iter().for_each(|held| self.release_claim(held));
            return Ok(None);
        }
        Ok(Some(step))
    }
}

impl Copier for Native {
    async fn parts_below(&self, span: GuestSpan) -> Result<Vec<GuestSpan>> {
        // A copy that took more of a record would rarely find room.
        let most = SUB_BLOCK.round_down(self.record_max().saturating_mul(4)).max(SUB_BLOCK.bytes());
        let mut parts: Vec<GuestSpan> = Vec::new();
        let mut rest = span;
        while !rest.is_empty() {
            let (sub, len) = self.find(|| self.first_state(rest)).await?;
            let (now, later) = rest.split_at(len);
            if sub == Sub::Base {
                match parts.last_mut() {
                    Some(last)
                        if last.end() == now.start()
                            && last.len() + now.len() <= most
                            && !self.cell.aligns(now.start()) =>
                    {
                        *last = GuestSpan::between(last.start(), now.end());
                    }
                    _ => parts.push(now),
                }
            }
            rest = later;
        }
        Ok(parts)
    }

    async fn plan_copy<'a>(&'a self, part: GuestSpan) -> Result<Option<Step<'a>>> {
        let Some(held) = self.engine.claims.try_claim(self.cell_of(part.start()), self.parts_of(part)) else {
            return Ok(None);
        };
        self.step_of_copy(part, held).await
    }

    async fn place_copies(&self, steps: &mut [Step<'_>]) -> Result<()> {
        for step in &mut *steps {
            let number = self.cell_of(step.plan.part.start()).index();
            let (entry, _) = self.find(|| self.entry_and_form(number)).await?;
            step.plan.is_fresh = entry == 0;
            step.place = (entry != 0).then(|| Fresh { at: self.places.unit(entry).start(), zeroed: false });
        }
        let allocate = async |_| {
            let number = self.allocate().await?;
            Ok(Some(Fresh { at: self.places.unit(number).start(), zeroed: true }))
        };
        place_fresh(steps, allocate).await
    }

    async fn publish_copy(&self, step: &Step<'_>) -> Result<bool> {
        self.publish_if_room(step).await
    }
}
