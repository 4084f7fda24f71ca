//! Compressing: whole clusters of the disk are stored in their compressed form, several of them in one cluster of
//! the image.
//!
//! ```text
//!   disk     │ cluster 7 │ cluster 8 │ cluster 9 │                each 64 KiB
//!                 │           │           │ compressed, each by itself
//!   image    ┌────▼────┬──────▼──────┬────▼──┬─────┐
//!            │ 21 KiB  │   38 KiB    │ 9 KiB │ free│              one after the other, from any byte on
//!            └─────────┴─────────┬───┴───────┴─────┘
//!            host cluster A      │ host cluster B
//!            refcount 2 (7, 8)   │ refcount 2 (8, 9)
//! ```
//!
//! An L2 entry says where the compressed bytes begin and in which sector they end. The refcount of a host cluster is
//! the number of compressed clusters that have a byte in it.
//!
//! 1. What is given together is placed together, in fresh host clusters that nothing else uses. So no sector with
//!    compressed data is written twice, and no older cluster shares one with what is being written.
//! 2. Refcounts are raised, and the bytes written, before an entry names them. Until then all of these refcounts are
//!    pending: with a journal a crash gives them back; without one the dirty bit leads to a repair.
//! 3. The data has no checks in the record: a transaction with compressed data is fenced (`journal/checks.rs`).
//! 4. Only a cluster that has no place of its own, or is compressed already, gets compressed data. In any other one a
//!    write in place could be under way without a claim: it is written as it is. So is one that another request has
//!    claimed, and one that compression does not make smaller.
//! 5. A place that is used again may be known to the decompressor with its old content, which is forgotten before the
//!    new entry is published. All who read the old content have left (epochs).
//!
//! A later write to a compressed cluster takes a fresh one and frees the compressed bytes, as for images that other
//! programs have compressed (`plan.rs`, `write.rs`).
//!
//! Left out: filling up the last host cluster of what was written before.

use std::collections::BTreeMap;

use vellum_core::{
    BlockSize, Buffer, Context, Error, GuestCluster, GuestOffset, ImageCluster, ImageOffset, ImageSpan,
    LocalFuture, Result, offload,
};

use super::compressed::{pack, unpack};
use super::entry::ClusterState;
use super::header::{Compression, Header};
use super::image::Qcow2;
use super::refcount::Run;
use crate::claims::Held;
use crate::engine::Commit as _;
use crate::image::{BlockContent, Compressing, PackedBlock};
use crate::state::UnderWay;

/// Adjacent host clusters that are filled with compressed clusters.
struct Extent {
    /// Index of the first host cluster.
    first: u64,
    /// For each host cluster, how many compressed clusters have a byte in it.
    users: Vec<u64>,
    bytes: Vec<u8>,
}

impl Extent {
    fn new(run: Run) -> Self {
        Self { first: run.first, users: vec![0; count(run.count)], bytes: Vec::new() }
    }

    fn end(&self) -> u64 {
        self.first + self.users.len() as u64
    }

    /// Puts the bytes behind what is there, and returns their place; `None` when there is no room. No host cluster gets
    /// more than `most` users. The bytes are fewer than a cluster.
    fn put(&mut self, cluster: BlockSize, most: u64, bytes: &[u8]) -> Option<ImageSpan> {
        let mut at = self.bytes.len() as u64;
        if self.users.get(count(at >> cluster.shift())).is_some_and(|users| *users >= most) {
            at = cluster.round_up(at);
        }
        let end = at + bytes.len() as u64;
        if end > (self.users.len() as u64) << cluster.shift() {
            return None;
        }
        self.bytes.resize(count(at), 0);
        self.bytes.extend_from_slice(bytes);
        for users in &mut self.users[count(at >> cluster.shift())..=count((end - 1) >> cluster.shift())] {
            *users += 1;
        }
        Some(ImageOffset::new((self.first << cluster.shift()) + at).span(bytes.len() as u64))
    }
}

fn count(number: u64) -> usize {
    usize::try_from(number).expect("it fits memory")
}

/// A cluster of the disk on its way to its compressed place.
struct Placed<'a> {
    cluster: GuestCluster,
    held: Held<'a>,
    span: ImageSpan,
}

/// References to host clusters that no entry explains yet: how many to each.
#[derive(Default)]
struct Unexplained(BTreeMap<u64, u64>);

impl Unexplained {
    fn add(&mut self, cluster: u64, more: u64) {
        *self.0.entry(cluster).or_insert(0) += more;
    }

    fn take(&mut self, clusters: std::ops::RangeInclusive<u64>) {
        for cluster in clusters {
            if let Some(left) = self.0.get_mut(&cluster) {
                *left -= 1;
            }
        }
    }
}

impl Qcow2 {
    /// What compressed data would be stored here, or why there cannot be any.
    pub(super) fn check_compressing(header: &Header, name: &str) -> Result<()> {
        let why = match () {
            () if header.has_data_file() => "its data is in an external data file",
            () if header.encryption().is_some() => "it is encrypted",
            () => return Ok(()),
        };
        Err(Error::unsupported(format!("{name} cannot have compressed data: {why}")))
    }

    /// The host clusters in which these bytes lie.
    fn host_clusters(&self, span: ImageSpan) -> std::ops::RangeInclusive<u64> {
        let wide = self.cluster.widen(span);
        let first = self.cluster.cluster_of(wide.start()).index();
        first..=first + self.cluster.count_for(wide.len()) - 1
    }

    /// Stores the compressed clusters, and returns those that must be stored as they are.
    async fn store_compressed(
        &self,
        blocks: Vec<(GuestCluster, Vec<u8>)>,
    ) -> Result<Vec<(GuestCluster, Vec<u8>)>> {
        let _inside = self.engine.epochs.enter();
        let mut plain = Vec::new();
        let mut claimed = Vec::new();
        for (cluster, bytes) in blocks {
            let held = self.engine.claims.try_claim(cluster, self.entries.all());
            let Some(held) = held else {
                plain.push((cluster, bytes));
                continue;
            };
            match self.look(cluster).await {
                Ok(ClusterState::Compressed(_)) => claimed.push((held, cluster, bytes)),
                Ok(ClusterState::Plain(units)) if units.host.is_none() => {
                    claimed.push((held, cluster, bytes))
                }
                other => {
                    self.release_claim(held).await;
                    if let Err(error) = other {
                        for (held, ..) in claimed {
                            self.release_claim(held).await;
                        }
                        return Err(error);
                    }
                    plain.push((cluster, bytes));
                }
            }
        }
        let under_way = UnderWay::begin(&self.engine.state, "a write of compressed data");
        let (mut placed, mut unexplained) = (Vec::with_capacity(claimed.len()), Unexplained::default());
        let mut claims = Vec::with_capacity(claimed.len());
        let mut packed = Vec::with_capacity(claimed.len());
        for (held, cluster, bytes) in claimed {
            claims.push((held, cluster));
            packed.push(bytes);
        }
        let mut result = self.place_compressed(claims, &packed, &mut placed, &mut unexplained).await;
        if result.is_ok() {
            for Placed { cluster, span, .. } in &placed {
                result = self.publish_compressed(*cluster, *span).await;
                if result.is_err() {
                    break;
                }
                unexplained.take(self.host_clusters(*span));
            }
        }
        self.engine.commits.note_change();
        if result.is_err() {
            self.engine.claims.note_spoiled();
        }
        for Placed { held, .. } in placed {
            self.release_claim(held).await;
        }
        for (first, left) in unexplained.0 {
            for _ in 0..left {
                self.give_back(Run { first, count: 1, zeroed: false }).await;
            }
        }
        under_way.end();
        result.map(|()| plain)
    }

    /// Finds places for the bytes of these clusters, raises the refcounts there, and writes the bytes.
    async fn place_compressed<'a>(
        &'a self,
        claims: Vec<(Held<'a>, GuestCluster)>,
        packed: &[Vec<u8>],
        placed: &mut Vec<Placed<'a>>,
        unexplained: &mut Unexplained,
    ) -> Result<()> {
        let nowhere = ImageOffset::ZERO.span(0);
        placed.extend(claims.into_iter().map(|(held, cluster)| Placed { cluster, held, span: nowhere }));
        let mut last_table = None;
        for Placed { cluster, .. } in &*placed {
            let table = self.mapping.slot(*cluster).l1_index;
            if last_table.replace(table) != Some(table) {
                self.own_table(*cluster).await?;
            }
        }
        let most = { self.refcounts().most() };
        let mut extents: Vec<Extent> = Vec::new();
        let mut rest: u64 = packed.iter().map(|bytes| bytes.len() as u64).sum();
        for (one, bytes) in placed.iter_mut().zip(packed) {
            one.span = loop {
                let span = extents.last_mut().and_then(|extent| extent.put(self.cluster, most, bytes));
                if let Some(span) = span {
                    self.entries.encode_compressed(span)?; // before anything depends on it
                    break span;
                }
                let run = self.allocate(self.cluster.count_for(rest)).await?;
                (run.first..run.first + run.count).for_each(|cluster| unexplained.add(cluster, 1));
                match extents.last_mut().filter(|extent| extent.end() == run.first) {
                    Some(extent) => extent.users.resize(extent.users.len() + count(run.count), 0),
                    None => extents.push(Extent::new(run)),
                }
            };
            rest -= bytes.len() as u64;
        }
        for extent in extents {
            for (cluster, users) in (extent.first..).zip(&extent.users).filter(|(_, users)| **users > 1) {
                self.raise(cluster, users - 1).await?;
                unexplained.add(cluster, users - 1);
            }
            self.write_compressed_bytes(extent).await?;
        }
        Ok(())
    }

    /// Adds to the refcount of a cluster, which is pending from then on.
    async fn raise(&self, cluster: u64, more: u64) -> Result<()> {
        self.with_refcounts(|refcounts| {
            refcounts.raise(cluster, more)?;
            if let Some(journal) = self.journal() {
                (0..more).for_each(|_| journal.add_pending(cluster, 1));
            }
            Ok(())
        })
        .await
    }

    async fn write_compressed_bytes(&self, extent: Extent) -> Result<()> {
        let at = self.cluster.start_of(ImageCluster::new(extent.first));
        let room = extent.users.len() << self.cluster.shift();
        let mut bytes = extent.bytes;
        // Readers read up to the end of the last sector; and whole blocks of the storage are written at once.
        bytes.resize(bytes.len().next_multiple_of(count(BlockSize::PAGE.bytes())).min(room), 0);
        let span = at.span(bytes.len() as u64);
        if let Some(journal) = self.journal() {
            journal.common.make_way(span, async || self.commit().await).await?;
        }
        self.decompressor.forget(span);
        let context = || format!("{}: can't write compressed data at {at}", self.engine.name);
        self.data.write(at, Buffer::copy_of(&bytes)).await.context(context)
    }

    async fn publish_compressed(&self, cluster: GuestCluster, span: ImageSpan) -> Result<()> {
        let noted = |before| {
            if let Some(journal) = self.journal() {
                journal.common.fence();
                self.host_clusters(span).for_each(|host| journal.remove_pending(ImageCluster::new(host)));
            }
            if let ClusterState::Compressed(old) = before {
                self.free(old);
            }
        };
        self.publish(cluster, |_| ClusterState::Compressed(span), noted).await.map(drop)
    }
}

impl Compressing for Qcow2 {
    fn block(&self) -> BlockSize {
        self.cluster
    }

    fn levels(&self) -> std::ops::RangeInclusive<i32> {
        match self.header.read(Header::compression) {
            Compression::Zlib => 1..=9,
            Compression::Zstd => 1..=19,
        }
    }

    fn compress<'a>(
        &'a self,
        blocks: Vec<(GuestOffset, Buffer)>,
        level: Option<i32>,
    ) -> LocalFuture<'a, Result<Vec<PackedBlock>>> {
        let method = self.header.read(Header::compression);
        let (cluster, size) = (count(self.cluster.bytes()), self.engine.geometry.size);
        Box::pin(async move {
            let packed = offload(self.decompressor.place(), move || {
                let mut packer = pack(method, level, cluster)?;
                let packed = blocks.into_iter().map(|(at, data)| {
                    // A part of a cluster is not all of it, unless the disk ends there.
                    if data.len() < cluster && at.bytes() + data.len() as u64 != size {
                        return Ok(PackedBlock { at, content: BlockContent::Plain(data) });
                    }
                    let mut whole = data.to_vec();
                    whole.resize(cluster, 0);
                    let content = match packer(&whole)? {
                        Some(bytes) => BlockContent::Compressed(bytes),
                        None => BlockContent::Plain(data),
                    };
                    Ok(PackedBlock { at, content })
                });
                packed.collect::<Result<Vec<_>>>()
            });
            packed.await.context(|| format!("{}: can't compress", self.engine.name))
        })
    }

    fn write_compressed<'a>(&'a self, blocks: Vec<PackedBlock>) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            self.header.read(|header| Self::check_compressing(header, &self.engine.name))?;
            let size = self.engine.geometry.size;
            let (mut compressed, mut plain) = (Vec::new(), Vec::new());
            for PackedBlock { at, content } in blocks {
                let end = size.min(at.bytes().saturating_add(self.cluster.bytes()));
                let span = self.engine.check_change(Some(at.span(end.saturating_sub(at.bytes()))))?;
                match content {
                    BlockContent::Compressed(bytes)
                        if self.cluster.within(at) == 0 && !span.is_empty() && !bytes.is_empty() =>
                    {
                        compressed.push((self.cluster.cluster_of(span.start()), bytes));
                    }
                    BlockContent::Compressed(_) => {
                        return Err(Error::invalid("compressed data is written in whole clusters"));
                    }
                    BlockContent::Plain(data) => plain.push((at, data)),
                }
            }
            for (cluster, _) in &compressed {
                let at = self.start(*cluster);
                self.mark_changed(at.span(self.cluster.bytes().min(size - at.bytes()))).await?;
            }
            for (at, data) in &plain {
                self.mark_changed(at.span(data.len() as u64)).await?;
            }
            if !compressed.is_empty() {
                self.begin_change().await?;
                self.give_back_if_due().await?;
                self.prepare.note_written(compressed.iter().map(|(_, bytes)| bytes.len() as u64).sum());
                let stored = self.noticed(self.store_compressed(compressed).await).await?;
                for (cluster, bytes) in stored {
                    let method = self.header.read(Header::compression);
                    let data = unpack(method, &bytes, count(self.cluster.bytes()))?;
                    let at = self.start(cluster);
                    let len = count((size - at.bytes()).min(self.cluster.bytes()));
                    plain.push((at, Buffer::copy_of(&data[..len])));
                }
                if self.has_much_dirty() {
                    self.noticed(self.commit().await).await?;
                }
            }
            for (at, data) in plain {
                self.noticed(self.write_span(at.span(data.len() as u64), data).await).await?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(clusters: u64) -> Extent {
        Extent::new(Run { first: 10, count: clusters, zeroed: false })
    }

    #[test]
    fn compressed_clusters_lie_one_after_the_other() {
        let (cluster, mut extent) = (BlockSize::from_shift(12), extent(3));
        let mut put = |len: usize| {
            extent.put(cluster, 100, &vec![1; len]).map(|span| (span.start().bytes() - 10 * 4096, span.len()))
        };
        assert_eq!(put(4000), Some((0, 4000)));
        assert_eq!(put(4000), Some((4000, 4000)));
        assert_eq!(put(192), Some((8000, 192)), "to the end of a cluster");
        assert_eq!(put(4095), Some((8192, 4095)));
        assert_eq!(put(2), None);
        assert_eq!(put(1), Some((12_287, 1)));
        assert_eq!(extent.users, [2, 2, 2]);
    }

    #[test]
    fn no_host_cluster_has_more_users_than_its_refcount_can_say() {
        let cluster = BlockSize::from_shift(12);
        for (most, expected) in [(1, [0, 4096, 8192]), (2, [0, 100, 4096])] {
            let mut extent = extent(3);
            let places = [100, 100, 100].map(|len| {
                extent.put(cluster, most, &vec![1; len]).expect("room").start().bytes() - 10 * 4096
            });
            assert_eq!(places, expected, "{most}");
            assert!(extent.users.iter().all(|users| *users <= most));
        }
        // One that straddles counts in both.
        let mut extent = extent(3);
        extent.put(cluster, 1, &[1; 4000]);
        extent.put(cluster, 1, &[1; 4000]);
        assert_eq!(extent.users, [1, 1, 0]);
    }
}
