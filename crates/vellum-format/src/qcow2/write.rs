//! Writing: what the engine needs of qcow2 to write a disk. The order of a write is in `engine/write.rs`, the
//! plan of one cluster in `plan.rs`.
//!
//! 1. A plan is made before its claim, to know what to claim, and again under it, because other requests may
//!    have changed the cluster meanwhile.
//! 2. With a raw data file, writes in place claim their units too. Elsewhere it is the mapping that makes a
//!    unit zero, and an older write may land at the old place afterwards. A write that fills the unit again
//!    takes a fresh cluster, or waits for the older write (`late.rs`). A raw data file is read without the
//!    mapping, so there zeros and data must land one after the other.

use std::ops::{ControlFlow, Range};

use smallvec::SmallVec;
use vellum_core::{
    BlockSize, Buffer, Context, GuestCluster, GuestOffset, GuestSpan, ImageCluster, ImageOffset, Result,
    SharedStorage, read_below,
};

use super::entry::{ClusterState, Units};
use super::image::{Missing, Qcow2};
use super::late::Done;
use super::plan::{Plan, Segment, Source, Target, plan_write, published};
use super::refcount::Run;
use crate::claims::{Fresh, Held};
use crate::engine::{self, Pieces, Runs, Space, Way, Write as _, Writer, place_fresh};
use crate::luks::WholeSectors as _;

/// A write that must allocate is done in pieces of at most this many clusters.
const CLUSTERS_AT_ONCE: u64 = 512;

/// One cluster of a write.
pub(super) type Step<'a> = engine::Step<'a, Qcow2>;

/// The plan of a step, and what it was made from.
pub(crate) struct Planned {
    pub(super) cluster: GuestCluster,
    pub(super) state: ClusterState,
    pub(super) plan: Plan,
}

/// Units without bytes of their own before this plan is carried out.
fn fresh_units(plan: &Plan, state: ClusterState) -> u32 {
    match (plan.target, state) {
        (Target::Own(_), ClusterState::Plain(units)) => plan.publish & !units.alloc,
        _ => plan.publish,
    }
}

/// The bytes of a cluster that lie in these units.
fn bytes_of(mut units: u32, size: BlockSize) -> SmallVec<[Range<u64>; 2]> {
    let (mut ranges, mut first) = (SmallVec::new(), 0);
    while units != 0 {
        first += units.trailing_zeros();
        units >>= units.trailing_zeros();
        let count = units.trailing_ones();
        ranges.push(u64::from(first) * size.bytes()..u64::from(first + count) * size.bytes());
        first += count;
        units = units.checked_shr(count).unwrap_or(0);
    }
    ranges
}

/// The state of a cluster whose place may not be filled yet, as if it had no place.
fn without_place(state: ClusterState) -> ClusterState {
    match state {
        ClusterState::Plain(units) => ClusterState::Plain(Units { host: None, copied: false, ..units }),
        packed => packed,
    }
}

impl Qcow2 {
    pub(crate) async fn write_span(&self, span: GuestSpan, data: Buffer) -> Result<()> {
        self.prepare.note_written(span.len());
        match &self.encrypted {
            _ if span.is_empty() => Ok(()),
            Some(encrypted) => Box::pin(self.write_encrypted(encrypted, span, data)).await,
            None => self.write_sectors(span, data).await,
        }
    }

    /// Writes a run that is not empty, and of an encrypted disk whole sectors.
    pub(super) async fn write_sectors(&self, span: GuestSpan, data: Buffer) -> Result<()> {
        self.begin_change().await?;
        self.give_back_if_due().await?;
        let fresh_max = self.journal().map_or(u64::MAX, |journal| journal.common.fresh_bytes_max());
        let at_once = self.cluster.round_up(fresh_max.min(CLUSTERS_AT_ONCE << self.cluster.shift()));
        self.write_in_parts(span, data, at_once, || self.has_much_dirty()).await
    }

    /// The host runs of a write that changes no mapping. `None` when the mapping must change.
    async fn all_in_place(&self, span: GuestSpan) -> Result<Option<Runs>> {
        if self.data_file_is_raw() {
            return Ok(None);
        }
        let mut runs = Runs::new();
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = self.first_part(rest);
            let state = match self.lookup(self.cluster.cluster_of(now.start()))? {
                Ok(state) => state,
                Err(Missing(page)) => {
                    Box::pin(self.load(page)).await?;
                    continue;
                }
            };
            let start = self.cluster.within(now.start());
            let ClusterState::Plain(units) = state else { return Ok(None) };
            if !units.writable_in_place(self.entries.touched(start, start + now.len())) {
                return Ok(None);
            }
            let at = units.host.expect("allocated units have a place") + start;
            match runs.last_mut() {
                Some((first, len)) if *first + *len == at => *len += now.len(),
                _ => runs.push((at, now.len())),
            }
            rest = later;
        }
        Ok(Some(runs))
    }

    /// Ends a claim. A fresh cluster that was not published is given back.
    pub(crate) async fn release_claim(&self, held: Held<'_>) {
        if let Some(fresh) = held.release() {
            let first = self.cluster.cluster_of(fresh.at).index();
            self.give_back(Run { first, count: 1, zeroed: false }).await;
        }
    }

    /// Plans one cluster and claims what the plan needs. Once the claim is held, the plan is made again from
    /// the current state, because other requests may have changed it meanwhile. Breaks with the epoch that
    /// must pass before the plan may be carried out.
    async fn plan_step(&self, part: GuestSpan) -> Result<ControlFlow<u64, Step<'_>>> {
        let cluster = self.cluster.cluster_of(part.start());
        let start = self.cluster.within(part.start());
        let identity = self.has_data_file.then(|| ImageOffset::new(self.start(cluster).bytes()));
        let always_claimed = match self.data_file_is_raw() {
            true => self.entries.touched(start, start + part.len()),
            false => 0,
        };
        let plan = |state| {
            let bytes = (start, start + part.len());
            let mut plan = plan_write(self.entries, state, bytes, identity, self.below.is_some());
            plan.claim |= always_claimed;
            plan
        };
        let mut held: Option<Held<'_>> = None;
        loop {
            let state = self.look(cluster).await?;
            let mut plan = plan(state);
            let late = self.must_wait_for_late_writes(&plan, state);
            let instead = late.filter(|_| self.may_move(state));
            if instead.is_some() {
                plan = plan_write(
                    self.entries,
                    without_place(state),
                    (start, start + part.len()),
                    None,
                    self.below.is_some(),
                );
                plan.claim = self.entries.all();
            }
            let has = held.as_ref().map_or(0, Held::mask);
            if plan.claim & !has == 0 {
                if plan.claim == 0
                    && let Some(held) = held.take()
                {
                    self.release_claim(held).await;
                }
                if let Some(stamp) = late.filter(|_| instead.is_none()) {
                    if let Some(held) = held {
                        self.release_claim(held).await;
                    }
                    return Ok(ControlFlow::Break(stamp));
                }
                return Ok(ControlFlow::Continue(self.step(Planned { cluster, state, plan }, held, instead)));
            }
            if let Some(held) = held.take() {
                self.release_claim(held).await;
            }
            held = Some(self.engine.claims.claim(cluster, plan.claim).await);
        }
    }

    /// The step of a plan that may be carried out. If `instead_of` is set, it gets a fresh cluster only because
    /// older writes may land at its own place until this epoch has passed.
    pub(super) fn step<'a>(
        &self,
        plan: Planned,
        held: Option<Held<'a>>,
        instead_of: Option<u64>,
    ) -> Step<'a> {
        let mut step = Step::new(plan, held);
        let Planned { plan, state, .. } = &step.plan;
        step.fresh = bytes_of(fresh_units(plan, *state), self.entries.unit_size());
        step.place = match plan.target {
            Target::InPlace(at) | Target::Own(at) => Some(Fresh { at, zeroed: false }),
            Target::Fresh => None,
        };
        step.instead_of = instead_of;
        step
    }

    /// The epoch that must pass before the units of this plan may be filled at their old place.
    pub(super) fn must_wait_for_late_writes(&self, plan: &Plan, state: ClusterState) -> Option<u64> {
        let Target::Own(place) = plan.target else { return None };
        self.late.must_wait(place, fresh_units(plan, state), &self.engine.epochs)
    }

    /// Whether the cluster's place holds no data, so that it may get another one. If some of its units are
    /// allocated, other requests may be writing to them without a claim.
    fn may_move(&self, state: ClusterState) -> bool {
        !self.has_data_file && matches!(state, ClusterState::Plain(units) if units.alloc == 0)
    }

    /// Gives a fresh cluster to each step that needs one. Tables are made first.
    pub(super) async fn place_steps(&self, steps: &mut [Step<'_>]) -> Result<()> {
        let mut last_table = None;
        for Planned { cluster, plan, .. } in steps.iter().map(|step| &step.plan) {
            let table = self.mapping.slot(*cluster).l1_index;
            if plan.publish != 0 && last_table.replace(table) != Some(table) {
                self.own_table(*cluster).await?;
            }
        }
        // Adjacent clusters, where adjacent steps need them.
        let allocate = async |want| {
            let run = self.allocate(want).await?;
            let at = |cluster| self.cluster.start_of(ImageCluster::new(cluster));
            let clusters = run.first..run.first + run.count;
            Ok(clusters.map(move |cluster| Fresh { at: at(cluster), zeroed: run.zeroed }))
        };
        place_fresh(steps, allocate).await
    }

    async fn fill(&self, cluster: GuestOffset, segment: Segment, buffer: Buffer) -> Result<Buffer> {
        // What lies behind the end of the disk is not the disk's: were it copied, a larger disk would show it.
        let room = self.engine.geometry.size.saturating_sub((cluster + segment.start).bytes());
        let mut within = buffer;
        let mut behind = within.split_off(within.len().min(usize::try_from(room).unwrap_or(usize::MAX)));
        behind.fill(0);
        if !within.is_empty() {
            let filled = self.fill_segment(cluster, segment, within).await;
            within = filled.context(|| format!("{}: can't copy on write", self.engine.name))?;
        }
        within.append(behind);
        Ok(within)
    }

    async fn fill_segment(
        &self,
        cluster: GuestOffset,
        segment: Segment,
        mut buffer: Buffer,
    ) -> Result<Buffer> {
        match segment.source {
            Source::Guest => unreachable!("the guest's bytes are not read"),
            Source::Zero => {
                buffer.fill(0);
                Ok(buffer)
            }
            Source::Below => read_below(self.fills.as_ref(), cluster + segment.start, buffer).await,
            Source::Host(old) => self.plain.read(old + segment.start, buffer).await,
            Source::Compressed(packed) => {
                let bytes = self.decompressor.read(packed).await?;
                let start = usize::try_from(segment.start).expect("within a cluster");
                buffer.copy_from(0, &bytes[start..start + buffer.len()]);
                Ok(buffer)
            }
        }
    }
}

impl Writer for Qcow2 {
    type Plan = Planned;
    /// The epoch that must pass.
    type Before = u64;
    type Turn<'a> = ();

    fn data(&self) -> &SharedStorage {
        &self.data
    }

    fn cell(&self) -> BlockSize {
        self.cluster
    }

    async fn as_stored(&self, at: ImageOffset, data: Buffer) -> Result<Buffer> {
        match &self.encrypted {
            None => Ok(data),
            Some(encrypted) => Box::pin(encrypted.seal(at, &data)).await,
        }
    }

    async fn decide(&self, span: GuestSpan, _data: &Buffer) -> Result<Way<u64>> {
        let in_place = self.all_in_place(span).await?;
        let space = || Space { given: self.quarantine.given(), more_may_come: self.has_quarantine() };
        Ok(in_place.map_or_else(|| Way::Allocate(space()), Way::InPlace))
    }

    async fn plan_steps<'a>(
        &'a self,
        span: GuestSpan,
        _data: &Buffer,
        steps: &mut Vec<Step<'a>>,
    ) -> Result<Done> {
        let mut rest = span;
        while !rest.is_empty() {
            let (part, later) = self.first_part(rest);
            match self.plan_step(part).await? {
                ControlFlow::Continue(step) => steps.push(step),
                ControlFlow::Break(stamp) => return Ok(Done::After(stamp)),
            }
            rest = later;
        }
        self.place_steps(steps).await.map(|()| Done::Yes)
    }

    fn add_pieces<'s>(&'s self, step: &'s Step<'_>, data: &mut Buffer, pieces: &mut Pieces<'s>) {
        let host = step.place.expect("settled");
        let start = self.start(step.plan.cluster);
        for segment in &step.plan.plan.segments {
            let mut segment = *segment;
            if self.has_data_file && segment.source != Source::Guest {
                // A data file ends with the disk, not with the cluster.
                segment.end = segment.end.min(self.engine.geometry.size - start.bytes());
            }
            if segment.start >= segment.end
                || (segment.source == Source::Zero && host.zeroed && self.encrypted.is_none())
            {
                continue;
            }
            let len = usize::try_from(segment.end - segment.start).expect("within a cluster");
            let at = host.at + segment.start;
            match segment.source {
                Source::Guest => pieces.add(at, data.split_to(len)),
                _ => pieces.fill(at, self.fill(start, segment, Buffer::for_overwrite(len))),
            }
        }
    }

    async fn publish_step(&self, step: &Step<'_>) -> Result<()> {
        let Planned { cluster, state, plan } = &step.plan;
        let Some(held) = step.held.as_ref().filter(|_| plan.publish != 0) else { return Ok(()) };
        let host = step.at();
        let is_fresh = plan.target == Target::Fresh;
        let noted = |before| {
            if let Some(journal) = self.journal() {
                step.note_fresh(&journal.common);
                // The first of the writers that share the place publishes it.
                if !matches!(before, ClusterState::Plain(units) if units.host == Some(host)) {
                    journal.remove_pending(self.cluster.cluster_of(host));
                }
            }
            // Frees the clusters that were replaced. A cluster without a place, or one that another holder
            // published, replaces nothing.
            match *state {
                _ if !is_fresh => {}
                ClusterState::Compressed(packed) => self.free(packed),
                ClusterState::Plain(units) => {
                    if let Some(old) = units.host.filter(|old| *old != host) {
                        self.free(old.span(self.cluster.bytes()));
                    }
                }
            }
        };
        self.publish(*cluster, |old| published(old, plan.publish, host), noted).await?;
        if is_fresh {
            held.published();
        }
        Ok(())
    }

    async fn release_steps(&self, steps: Vec<Step<'_>>) {
        for held in steps.into_iter().filter_map(Step::end) {
            self.release_claim(held).await;
        }
    }

    async fn wait_for(&self, stamp: u64, _span: GuestSpan) -> Result<()> {
        self.engine.epochs.until_passed(stamp).await;
        Ok(())
    }

    async fn find_space(&self, _span: GuestSpan, given: u64, _turn: &mut ()) -> Result<bool> {
        self.make_space(given).await
    }
}
