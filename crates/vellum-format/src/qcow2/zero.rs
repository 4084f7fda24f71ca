//! Zeros and discards: mostly a change of the mapping, and a cluster to free.
//!
//! | the cluster now | zeros that keep space | zeros that may unmap, discard |
//! |---|---|---|
//! | own place | zero flag beside the place | zero flag, the place is freed |
//! | place shared with a snapshot, compressed | zero flag, the place is freed | the same |
//! | no place, something below | zero flag | zero flag |
//! | no place, nothing below | reads as zero already | reads as zero already |
//!
//! Zeros that cover a unit only in part are written as data; a discard leaves such edges unchanged. Version 2
//! has no zero flag: there zeros are written as data, unless nothing lies below and the cluster can be freed.

use vellum_core::{
    Buffer, Error, GuestCluster, GuestOffset, GuestSpan, ImageOffset, Result, ZeroFlags, Zeroes,
};

use super::entry::{ClusterState, Units};
use super::image::Qcow2;
use super::late::Done;
use crate::engine::{Commit as _, Write as _};
use crate::luks::WholeSectors as _;

/// Zeros are written as data in pieces of this many bytes.
const WRITTEN_AT_ONCE: u64 = 1 << 20;

/// What happens to the place of a cluster whose units become zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Space {
    Keep,
    Free,
}

impl Qcow2 {
    pub(crate) async fn zero_span(&self, span: GuestSpan, flags: ZeroFlags) -> Result<()> {
        if span.is_empty() {
            return Ok(());
        }
        let can_unmap_instead = self.below.is_none() && flags.may_unmap;
        if flags.fast_only && !self.entries.has_zero_flag() && !can_unmap_instead {
            return Err(Error::unsupported(
                "a version 2 image cannot record zeros: they would have to be written",
            ));
        }
        self.begin_change().await?;
        let space = if flags.may_unmap { Space::Free } else { Space::Keep };
        let zero = async |span| self.each_cluster(span, async |part| self.zero_part(part, space).await).await;
        match &self.encrypted {
            Some(encrypted) => Box::pin(self.zero_encrypted(encrypted, span, zero)).await,
            None => zero(span).await,
        }
    }

    pub(crate) async fn discard_span(&self, span: GuestSpan) -> Result<()> {
        // The end of the disk may cut off the last cluster, but the cluster itself is whole.
        let end = span.end().bytes();
        let end = if end == self.engine.geometry.size {
            self.cluster.round_up(end)
        } else {
            self.cluster.round_down(end)
        };
        let start = self.cluster.round_up(span.start().bytes());
        if start >= end || (!self.entries.has_zero_flag() && self.below.is_some()) {
            return Ok(());
        }
        self.begin_change().await?;
        let end = end.min(self.engine.geometry.size);
        let whole = GuestSpan::between(GuestOffset::new(start), GuestOffset::new(end));
        self.each_cluster(whole, async |part| self.zero_part(part, Space::Free).await).await
    }

    /// Applies `act` to each cluster's part of the run. Skips parts that read as zero because there is no
    /// table and nothing below, and commits when too much metadata waits to be written.
    async fn each_cluster(
        &self,
        span: GuestSpan,
        act: impl AsyncFn(GuestSpan) -> Result<Done>,
    ) -> Result<()> {
        self.give_back_if_due().await?;
        let mut rest = span;
        while !rest.is_empty() {
            let (part, later) = match self.nothing_until(rest) {
                Some(nothing) => {
                    rest = rest.split_at(nothing).1;
                    continue;
                }
                None => self.first_part(rest),
            };
            if let Some(stamp) = self.late.is_full(&self.engine.epochs) {
                self.engine.epochs.until_passed(stamp).await;
                continue;
            }
            // Repeated from its start when space was missing or older writes must land first. Parts that are
            // zero already cost nothing then.
            let done = self.with_space(async || {
                let _inside = self.engine.epochs.enter();
                let result = act(part).await;
                self.engine.commits.note_change();
                result
            });
            if let Done::After(stamp) = done.await? {
                self.engine.epochs.until_passed(stamp).await;
                continue;
            }
            self.late.forget_passed(&self.engine.epochs);
            rest = later;
            if self.has_much_dirty() {
                self.commit().await?;
                self.give_back_if_due().await?;
            }
        }
        Ok(())
    }

    /// How many bytes from the start of the run have no L2 table, if nothing lies below either.
    fn nothing_until(&self, span: GuestSpan) -> Option<u64> {
        if self.below.is_some() || self.has_data_file {
            return None;
        }
        let reach = self.mapping.l2_reach();
        let (now, _) = span.split_at(reach.bytes() - reach.within(span.start()));
        (!self.mapping.has_table(self.cluster.cluster_of(now.start()))).then_some(now.len())
    }

    async fn zero_part(&self, part: GuestSpan, space: Space) -> Result<Done> {
        let cluster = self.cluster.cluster_of(part.start());
        let start = self.cluster.within(part.start());
        // A cluster that the end of the disk cuts off is covered when the part reaches that end.
        let is_last = part.end().bytes() == self.engine.geometry.size;
        let end = if is_last { self.cluster.bytes() } else { start + part.len() };
        let covered = self.entries.covered(start, end);
        let touched = self.entries.touched(start, end);
        let whole = covered == self.entries.all();
        let size = self.entries.unit_size();

        let can_flag =
            self.entries.has_zero_flag() || (whole && self.below.is_none() && space == Space::Free);
        // A compressed cluster has no subclusters that could be zero on their own.
        let is_packed = !whole && matches!(self.look(cluster).await?, ClusterState::Compressed(_));
        if covered == 0 || !can_flag || is_packed {
            return self.write_zeros(part).await;
        }
        if covered != touched {
            // The edges come first, as data; the rest is whole units.
            let inner_start = self.start(cluster) + size.round_up(start);
            let inner_end = self.start(cluster) + size.round_down(end);
            let head = GuestSpan::between(part.start(), inner_start.min(part.end()));
            let tail = GuestSpan::between(inner_end.max(part.start()).min(part.end()), part.end());
            for edge in [head, tail] {
                if let Done::After(stamp) = self.write_zeros(edge).await? {
                    return Ok(Done::After(stamp));
                }
            }
        }
        self.flag_zero(cluster, covered, space).await.map(|()| Done::Yes)
    }

    /// Writes zeros as data where the disk does not read as zero already. A raw data file may hold other
    /// bytes there, because QEMU does not pass discards on to it.
    async fn write_zeros(&self, span: GuestSpan) -> Result<Done> {
        let mut rest = span;
        while !rest.is_empty() {
            let (part, later) = self.first_part(rest);
            let (part, later) = match part.len() > WRITTEN_AT_ONCE {
                true => rest.split_between_blocks(WRITTEN_AT_ONCE),
                false => (part, later),
            };
            if self.data_file_is_raw() || !self.reads_zero(part).await? {
                let mut zeros = Buffer::zeroed(usize::try_from(part.len()).expect("bounded"));
                if let Done::After(stamp) = self.write_allocating(part, &mut zeros).await? {
                    return Ok(Done::After(stamp));
                }
            }
            rest = later;
        }
        Ok(Done::Yes)
    }

    /// Whether the mapping says that a part of one cluster reads as zero.
    async fn reads_zero(&self, part: GuestSpan) -> Result<bool> {
        let start = self.cluster.within(part.start());
        let touched = self.entries.touched(start, start + part.len());
        Ok(match self.look(self.cluster.cluster_of(part.start())).await? {
            ClusterState::Compressed(_) => false,
            ClusterState::Plain(units) => {
                let below = !(units.alloc | units.zero) & touched;
                units.alloc & touched == 0 && (below == 0 || self.below.is_none())
            }
        })
    }

    /// Makes the units of the mask zero in the mapping.
    async fn flag_zero(&self, cluster: GuestCluster, mask: u32, space: Space) -> Result<()> {
        let held = self.engine.claims.claim(cluster, mask).await;
        let result = self.flag_claimed(cluster, mask, space).await;
        self.release_claim(held).await;
        result
    }

    async fn flag_claimed(&self, cluster: GuestCluster, mask: u32, space: Space) -> Result<()> {
        let state = self.look(cluster).await?;
        let all = mask == self.entries.all();
        let is_zero = match state {
            ClusterState::Compressed(_) => false,
            ClusterState::Plain(units) => {
                units.alloc & mask == 0
                    && (units.zero & mask == mask || self.below.is_none())
                    && !(all && space == Space::Free && units.host.is_some())
            }
        };
        if is_zero && !self.data_file_is_raw() {
            return Ok(());
        }
        self.zero_data_file(cluster, mask, space).await?;
        if is_zero {
            return Ok(());
        }
        self.own_table(cluster).await?;
        let zero_flag = self.entries.has_zero_flag();
        let free_place = |old: ClusterState| match old {
            ClusterState::Compressed(packed) => Some(packed),
            ClusterState::Plain(units) => units
                .host
                .filter(|_| {
                    all && (space == Space::Free || !units.copied || !zero_flag) && !self.has_data_file
                })
                .map(|host| host.span(self.cluster.bytes())),
        };
        let change = |old| {
            let keeps = free_place(old).is_none();
            ClusterState::Plain(match old {
                ClusterState::Plain(units) if keeps => Units {
                    host: units.host.filter(|_| !(all && self.has_data_file && space == Space::Free)),
                    copied: units.copied,
                    alloc: units.alloc & !mask,
                    zero: if zero_flag { units.zero | mask } else { 0 },
                },
                _ => Units { host: None, copied: false, alloc: 0, zero: if zero_flag { mask } else { 0 } },
            })
        };
        self.publish(cluster, change, |before| match (free_place(before), before) {
            (Some(place), _) => self.free(place),
            (None, ClusterState::Plain(Units { host: Some(kept), alloc, .. })) => {
                self.late.note(kept, alloc & mask, &self.engine.epochs);
            }
            _ => {}
        })
        .await
        .map(drop)
    }

    /// Zeros units in the data file. A raw data file must itself read like the disk. Any other data file only
    /// discards the space that is freed.
    async fn zero_data_file(&self, cluster: GuestCluster, mask: u32, space: Space) -> Result<()> {
        if !self.has_data_file {
            return Ok(());
        }
        let size = self.entries.unit_size().bytes();
        let start = self.start(cluster).bytes();
        let mut unit = 0;
        while unit < self.entries.units() {
            let run = (mask >> unit).trailing_ones();
            if run > 0 {
                let at = start + u64::from(unit) * size;
                let end = (at + u64::from(run) * size).min(self.engine.geometry.size);
                let span = ImageOffset::new(at).span(end.saturating_sub(at));
                if self.data_file_is_raw() {
                    let how = if space == Space::Free { Zeroes::MayUnmap } else { Zeroes::Allocated };
                    self.data.write_zeroes(span, how).await?;
                } else if space == Space::Free {
                    self.data.discard(span).await?;
                }
            }
            unit += run.max(1);
        }
        Ok(())
    }
}
