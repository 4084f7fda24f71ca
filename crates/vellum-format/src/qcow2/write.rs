//! Writing: plan, do, publish.
//!
//! ```text
//!   all of it in place?  ──yes──► one host write per run, nothing else           (no claim, no allocation)
//!          │no
//!   claim the units ► plan each cluster ► allocate ► fill + data, written together ► publish ► release
//! ```
//!
//! 1. Bytes are written before the entry that names them is published, so a reader never sees the bytes that
//!    were there before.
//! 2. Published entries reach the medium at the next commit, after the data or together with it
//!    (`engine/commit.rs`).
//! 3. When anything fails, clusters that were allocated and not published are given back: each cluster of the
//!    disk reads as before or as written.
//! 4. No lock is held while bytes move. Claims keep other writers only from the same units.
//! 5. With a raw data file, writes in place claim their units too. Elsewhere it is the mapping that makes a
//!    unit zero, and an older write may land at the old place afterwards. A write that fills the unit again
//!    takes a fresh cluster, or waits for the older write (`late.rs`). A raw data file is read without the
//!    mapping, so there zeros and data must land one after the other.

use std::cell::Cell;
use std::ops::ControlFlow;

use smallvec::SmallVec;
use vellum_core::{
    Buffer, Context, ErrorKind, GuestCluster, GuestOffset, GuestSpan, ImageCluster, ImageOffset, LocalFuture,
    Result, read_below, try_join_all,
};

use super::entry::{ClusterState, Units};
use super::image::{Missing, Qcow2};
use super::journal::{SECTOR, SectorChecks, checks_of, unchanging};
use super::late::Done;
use super::plan::{Plan, Segment, Source, Target, plan_write, published};
use super::refcount::Run;
use crate::claims::{Ask, Fresh, Held};
use crate::engine::Commit as _;
use crate::sabotage::{self, Bug};

/// A write that must allocate is done in pieces of at most this many clusters.
const CLUSTERS_AT_ONCE: u64 = 512;

/// One cluster of a write.
struct Step<'a> {
    cluster: GuestCluster,
    state: ClusterState,
    plan: Plan,
    held: Option<Held<'a>>,
    /// The place of the bytes, once that is settled.
    host: Option<Fresh>,
    /// For the journal: the checksums of the bytes in the units that will be published.
    checks: Vec<SectorChecks>,
    /// No checksums were taken of these bytes.
    is_unchecked: bool,
    /// If set, the step gets a fresh cluster only because older writes may land at its own place until this
    /// epoch has passed.
    instead_of_waiting: Option<u64>,
}

impl Step<'_> {
    /// Units without bytes of their own yet.
    fn fresh_units(&self) -> u32 {
        fresh_units(&self.plan, self.state)
    }
}

/// Units without bytes of their own before this plan is carried out.
fn fresh_units(plan: &Plan, state: ClusterState) -> u32 {
    match (plan.target, state) {
        (Target::Own(_), ClusterState::Plain(units)) => plan.publish & !units.alloc,
        _ => plan.publish,
    }
}

/// The state of a cluster whose place may not be filled yet, as if it had no place.
fn without_place(state: ClusterState) -> ClusterState {
    match state {
        ClusterState::Plain(units) => ClusterState::Plain(Units { host: None, copied: false, ..units }),
        packed => packed,
    }
}

impl Qcow2 {
    pub(crate) async fn write_span(&self, span: GuestSpan, mut data: Buffer) -> Result<()> {
        self.prepare.note_written(span.len());
        if span.is_empty() {
            return Ok(());
        }
        self.begin_change().await?;
        self.give_back_if_due().await?;
        let mut rest = span;
        let fresh_max = self.journal().map_or(u64::MAX, |journal| journal.common.fresh_bytes_max());
        let at_once = self.cluster.round_up(fresh_max.min(CLUSTERS_AT_ONCE << self.cluster.shift()));
        while !rest.is_empty() {
            let (now, later) = rest.split_between_blocks(at_once);
            let part = data.split_to(usize::try_from(now.len()).expect("within the buffer"));
            self.write_some(now, part).await?;
            rest = later;
            if self.has_much_dirty() {
                self.commit().await?;
            }
        }
        Ok(())
    }

    async fn write_some(&self, span: GuestSpan, mut data: Buffer) -> Result<()> {
        loop {
            let (given, mut copy) = (self.quarantine.given(), None);
            let result = {
                let _inside = self.engine.epochs.enter();
                if let Some(runs) = self.all_in_place(span).await? {
                    let result = self.write_runs(runs, data).await;
                    self.engine.commits.note_change();
                    return result;
                }
                // The host may be full as well. Freed clusters may then help, and the bytes are needed once
                // more.
                if self.has_quarantine() {
                    copy = Some(data.duplicate());
                }
                self.write_allocating(span, &mut data).await
            };
            let error = match result {
                Err(error) if error.kind() == ErrorKind::NoSpace => error,
                Err(error) => return Err(error),
                Ok(Done::Yes) => return Ok(()),
                Ok(Done::After(stamp)) => {
                    self.engine.epochs.until_passed(stamp).await;
                    continue;
                }
            };
            if data.len() as u64 != span.len() {
                let Some(copy) = copy else { return Err(error) };
                data = copy;
            }
            // The missing space may have been freed but not given back yet.
            if !self.make_space(given).await? {
                return Err(error);
            }
        }
    }

    /// The host runs of a write that changes no mapping. `None` when the mapping must change.
    async fn all_in_place(&self, span: GuestSpan) -> Result<Option<SmallVec<[(ImageOffset, u64); 2]>>> {
        if self.data_file_is_raw() {
            return Ok(None);
        }
        let mut runs: SmallVec<[(ImageOffset, u64); 2]> = SmallVec::new();
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = self.first_part(rest);
            let state = match self.lookup(self.cluster.cluster_of(now.start()))? {
                Ok(state) => state,
                Err(Missing(page)) => {
                    self.load(page).await?;
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

    async fn write_runs(&self, runs: SmallVec<[(ImageOffset, u64); 2]>, mut data: Buffer) -> Result<()> {
        if let [(at, _)] = runs[..] {
            return self.write_in_place(at, data).await;
        }
        let writes = runs.into_iter().map(|(at, len)| {
            let part = data.split_to(usize::try_from(len).expect("within the buffer"));
            Box::pin(self.write_in_place(at, part)) as LocalFuture<'_, Result<()>>
        });
        let writes: Vec<_> = writes.collect();
        try_join_all(writes).await.map(drop)
    }

    /// Overwrites bytes of the disk in place.
    async fn write_in_place(&self, at: ImageOffset, data: Buffer) -> Result<()> {
        let Some(journal) = self.journal() else { return self.data.write(at, data).await };
        journal.common.write_in_place(&self.data, at, data, async || self.commit().await).await
    }

    /// Writes clusters of which some must be allocated. Takes the data out of the buffer when all clusters
    /// are allocated. If it fails before that, or has to wait, the buffer is unchanged.
    pub(crate) async fn write_allocating(&self, span: GuestSpan, data: &mut Buffer) -> Result<Done> {
        let mut steps = Vec::new();
        let mut result = self.write_steps(span, data, &mut steps).await;
        if !matches!(result, Ok(Done::After(_))) {
            self.engine.commits.note_change();
        }
        if let Err(error) = &result {
            steps.iter().filter_map(|step| step.held.as_ref()).for_each(Held::spoil);
            // If there is no space for fresh clusters, those that have a place wait for it.
            let stamp = steps.iter().filter_map(|step| step.instead_of_waiting).max();
            if let Some(stamp) = stamp.filter(|_| error.kind() == ErrorKind::NoSpace) {
                result = Ok(Done::After(stamp));
            }
        }
        for held in steps.into_iter().filter_map(|step| step.held) {
            self.release_claim(held).await;
        }
        result
    }

    /// Ends a claim. A fresh cluster that was not published is given back.
    pub(crate) async fn release_claim(&self, held: Held<'_>) {
        if let Some(fresh) = held.release() {
            let first = self.cluster.cluster_of(fresh.at).index();
            self.give_back(Run { first, count: 1, zeroed: false }).await;
        }
    }

    async fn write_steps<'a>(
        &'a self,
        span: GuestSpan,
        data: &mut Buffer,
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
        let mut last_table = None;
        for step in steps.iter().filter(|step| step.plan.publish != 0) {
            let table = self.mapping.slot(step.cluster).l1_index;
            if last_table.replace(table) != Some(table) {
                self.own_table(step.cluster).await?;
            }
        }
        self.settle_hosts(steps).await?;
        // Only now is it known whether a step may have to wait after all when the host is full: other
        // requests made units zero while this one waited for claims and tables.
        let may_wait = steps.iter().any(|step| step.instead_of_waiting.is_some());
        let copy = may_wait.then(|| data.duplicate());
        let result = self.transfer_and_publish(steps, data).await;
        if let Some(copy) = copy.filter(|_| result.is_err()) {
            *data = copy;
        }
        result.map(|()| Done::Yes)
    }

    async fn transfer_and_publish(&self, steps: &mut [Step<'_>], data: &mut Buffer) -> Result<()> {
        self.transfer(steps, data).await?;
        match sabotage::is(Bug::PublishedBeforeWritten) {
            true => Ok(()),
            false => self.publish_steps(steps).await,
        }
    }

    async fn publish_steps(&self, steps: &[Step<'_>]) -> Result<()> {
        for step in steps {
            if let Some(held) = &step.held
                && step.plan.publish != 0
            {
                self.publish_step(step, held).await?;
            }
        }
        Ok(())
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
                return Ok(ControlFlow::Continue(Step {
                    cluster,
                    state,
                    plan,
                    held,
                    host: None,
                    checks: Vec::new(),
                    is_unchecked: false,
                    instead_of_waiting: instead,
                }));
            }
            if let Some(held) = held.take() {
                self.release_claim(held).await;
            }
            held = Some(self.engine.claims.claim(cluster, plan.claim).await);
        }
    }

    /// The epoch that must pass before the units of this plan may be filled at their old place.
    fn must_wait_for_late_writes(&self, plan: &Plan, state: ClusterState) -> Option<u64> {
        let Target::Own(place) = plan.target else { return None };
        self.late.must_wait(place, fresh_units(plan, state), &self.engine.epochs)
    }

    /// Whether the cluster's place holds no data, so that it may get another one. If some of its units are
    /// allocated, other requests may be writing to them without a claim.
    fn may_move(&self, state: ClusterState) -> bool {
        !self.has_data_file && matches!(state, ClusterState::Plain(units) if units.alloc == 0)
    }

    /// Settles the place of each cluster's bytes. Allocates fresh clusters in runs where adjacent ones need
    /// them.
    async fn settle_hosts(&self, steps: &mut [Step<'_>]) -> Result<()> {
        let mut mine = Vec::new();
        for (index, step) in steps.iter_mut().enumerate() {
            match step.plan.target {
                Target::InPlace(at) | Target::Own(at) => step.host = Some(Fresh { at, zeroed: false }),
                Target::Fresh => match step.held.as_ref().expect("a fresh cluster needs a claim").fresh() {
                    Ask::Have(fresh) => step.host = Some(fresh),
                    Ask::Yours => mine.push(index),
                    Ask::Wait(_) => {}
                },
            }
        }
        let mut next = 0;
        while next < mine.len() {
            let run = match self.allocate((mine.len() - next) as u64).await {
                Ok(run) => run,
                Err(error) => {
                    for index in &mine[next..] {
                        steps[*index].held.as_ref().expect("claimed").give_up();
                    }
                    return Err(error);
                }
            };
            for cluster in run.first..run.first + run.count {
                let at = self.cluster.start_of(ImageCluster::new(cluster));
                let step = &mut steps[mine[next]];
                let fresh = Fresh { at, zeroed: run.zeroed };
                step.held.as_ref().expect("claimed").provide(fresh);
                step.host = Some(fresh);
                next += 1;
            }
        }
        // Only now wait for allocations by other requests: they do not wait for this one.
        for step in steps.iter_mut().filter(|step| step.host.is_none()) {
            let held = step.held.as_ref().expect("claimed");
            step.host = Some(loop {
                match held.fresh() {
                    Ask::Have(fresh) => break fresh,
                    Ask::Wait(listener) => listener.await,
                    Ask::Yours => match self.allocate(1).await {
                        Ok(run) => {
                            let at = self.cluster.start_of(ImageCluster::new(run.first));
                            held.provide(Fresh { at, zeroed: run.zeroed });
                        }
                        Err(error) => {
                            held.give_up();
                            return Err(error);
                        }
                    },
                }
            });
        }
        Ok(())
    }

    /// Reads the fill of the clusters, and writes it together with the guest's bytes.
    async fn transfer(&self, steps: &mut [Step<'_>], data: &mut Buffer) -> Result<()> {
        // Bulk data is not checked: the data of the open transaction is flushed before its record.
        let is_checked = self.journal().is_some_and(|journal| !journal.common.is_fenced());
        if is_checked {
            // The record holds checksums of the bytes in fresh units, so the bytes must not change any more.
            *data = unchanging(std::mem::take(data));
        }
        // In order of the disk: guest bytes are split off the request, fill is read.
        let mut pieces: Vec<(ImageOffset, LocalFuture<'_, Result<Buffer>>)> = Vec::new();
        for step in &*steps {
            let host = step.host.expect("settled");
            for segment in &step.plan.segments {
                let mut segment = *segment;
                if self.has_data_file && segment.source != Source::Guest {
                    // A data file ends with the disk, not with the cluster.
                    segment.end =
                        segment.end.min(self.engine.geometry.size - self.start(step.cluster).bytes());
                }
                if segment.start >= segment.end || (segment.source == Source::Zero && host.zeroed) {
                    continue;
                }
                let len = usize::try_from(segment.end - segment.start).expect("within a cluster");
                let piece: LocalFuture<'_, Result<Buffer>> = match segment.source {
                    Source::Guest => {
                        let piece = data.split_to(len);
                        Box::pin(std::future::ready(Ok(piece)))
                    }
                    _ => Box::pin(self.fill(self.start(step.cluster), segment, Buffer::for_overwrite(len))),
                };
                pieces.push((host.at + segment.start, piece));
            }
        }
        let (places, pieces): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
        let pieces =
            try_join_all(pieces).await.context(|| format!("{}: can't copy on write", self.engine.name))?;
        let mut writes: Vec<(ImageOffset, Buffer)> = Vec::new();
        for (at, piece) in places.into_iter().zip(pieces) {
            match writes.last_mut() {
                Some((first, before)) if *first + before.len() as u64 == at => before.append(piece),
                _ => writes.push((at, piece)),
            }
        }
        if is_checked {
            for (at, data) in &writes {
                self.add_step_checks(steps, *at, data);
            }
        } else if self.journal().is_some() {
            steps.iter_mut().for_each(|step| step.is_unchecked = step.fresh_units() != 0);
        }
        if sabotage::is(Bug::PublishedBeforeWritten) {
            self.publish_steps(steps).await?;
        }
        let steps = &*steps;
        let mut parts = Vec::with_capacity(writes.len());
        for (at, data) in writes {
            self.write_units(steps, at, data, &mut parts);
        }
        try_join_all(parts).await.map(drop)
    }

    /// Writes a run of bytes that may mix fresh units and others. Where recovery may still look at the old
    /// bytes, the others are overwritten like any bytes in place, mostly without a commit, and only the fresh
    /// ones wait.
    fn write_units<'s>(
        &'s self,
        steps: &[Step<'_>],
        at: ImageOffset,
        mut data: Buffer,
        parts: &mut Vec<LocalFuture<'s, Result<()>>>,
    ) {
        let span = at.span(data.len() as u64);
        let journal = self.journal().filter(|_| !sabotage::is(Bug::FilledOverUnverified));
        let Some(journal) = journal.filter(|journal| journal.common.must_wait(span)) else {
            return parts.push(self.data.write(at, data));
        };
        let is_fresh = self.fresh_at(steps);
        let mut here = at;
        while here < span.end() {
            let fresh = is_fresh(here);
            let mut end = here;
            while end < span.end() && is_fresh(end) == fresh {
                end = ImageOffset::new((end.bytes() / SECTOR + 1) * SECTOR).min(span.end());
            }
            let part = data.split_to(usize::try_from(end - here).expect("within the buffer"));
            let place = here;
            parts.push(match fresh {
                false => Box::pin(self.write_in_place(place, part)),
                true => Box::pin(async move {
                    journal
                        .common
                        .make_way(place.span(part.len() as u64), async || self.commit().await)
                        .await?;
                    self.data.write(place, part).await
                }),
            });
            here = end;
        }
    }

    /// Whether a sector is in a unit that these steps are the first to fill.
    fn fresh_at<'s>(&'s self, steps: &'s [Step<'_>]) -> impl Fn(ImageOffset) -> bool + 's {
        let last = Cell::new((u64::MAX, 0));
        move |sector| {
            let number = self.cluster.cluster_of(sector).index();
            if last.get().0 != number {
                let fresh = self.owner(steps, sector).map_or(0, |index| steps[index].fresh_units());
                last.set((number, fresh));
            }
            let start = self.cluster.within(sector);
            self.entries.touched(start, start + 1) & last.get().1 != 0
        }
    }

    /// The step to which the bytes at this place belong.
    fn owner(&self, steps: &[Step<'_>], at: ImageOffset) -> Option<usize> {
        let place = ImageOffset::new(self.cluster.round_down(at.bytes()));
        steps.iter().position(|step| step.host.is_some_and(|host| host.at == place))
    }

    /// Records the checksums of the bytes that a write puts into fresh units. Bytes beside them are
    /// overwritten in place.
    fn add_step_checks(&self, steps: &mut [Step<'_>], at: ImageOffset, data: &Buffer) {
        for check in checks_of(at, data, self.cluster, self.fresh_at(steps)) {
            let index = self.owner(steps, check.0).expect("every write is some step's");
            steps[index].checks.push(check);
        }
    }

    async fn fill(&self, cluster: GuestOffset, segment: Segment, mut buffer: Buffer) -> Result<Buffer> {
        match segment.source {
            Source::Guest => unreachable!("the guest's bytes are not read"),
            Source::Zero => {
                buffer.fill(0);
                Ok(buffer)
            }
            Source::Below => read_below(self.below.as_ref(), cluster + segment.start, buffer).await,
            Source::Host(old) => self.data.read(old + segment.start, buffer).await,
            Source::Compressed(packed) => {
                let bytes = self.decompressor.read(packed).await?;
                let start = usize::try_from(segment.start).expect("within a cluster");
                buffer.copy_from(0, &bytes[start..start + buffer.len()]);
                Ok(buffer)
            }
        }
    }

    async fn publish_step(&self, step: &Step<'_>, held: &Held<'_>) -> Result<()> {
        let host = step.host.expect("settled").at;
        let is_fresh = step.plan.target == Target::Fresh;
        let noted = |before| {
            if let Some(journal) = self.journal() {
                match step.is_unchecked {
                    true if sabotage::is(Bug::UncheckedNotFenced) => {}
                    true => journal.common.fence(),
                    false => journal.common.add_checks(&step.checks),
                }
                // The first of the writers that share the place publishes it.
                if !matches!(before, ClusterState::Plain(units) if units.host == Some(host)) {
                    journal.remove_pending(self.cluster.cluster_of(host));
                }
            }
            // Frees the clusters that were replaced. A cluster without a place, or one that another holder
            // published, replaces nothing.
            match step.state {
                _ if !is_fresh => {}
                ClusterState::Compressed(packed) => self.free(packed),
                ClusterState::Plain(units) => {
                    if let Some(old) = units.host.filter(|old| *old != host) {
                        self.free(old.span(self.cluster.bytes()));
                    }
                }
            }
        };
        self.publish(step.cluster, |old| published(old, step.plan.publish, host), noted).await?;
        if is_fresh {
            held.published();
        }
        Ok(())
    }
}
