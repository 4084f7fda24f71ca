//! The stored refcounts, compared block by block with the counts.

use std::ops::Range;

use futures_lite::future::yield_now;
use vellum_core::{Context, ImageOffset, Result};

use super::super::hole::Hole;
use super::super::layout::*;
use super::super::refcount;
use super::super::references::CHUNK;
use super::{TABLES_AT_ONCE, Walk, Walked, read_clusters};
use crate::hash::HashSet;
use crate::work;

/// At most this many clusters are compared before other tasks get their turn.
const AT_ONCE: usize = 1 << 16;

impl Walk<'_> {
    pub(super) async fn walk_structure(&mut self) -> Result<()> {
        let span = self.header.refcount_table;
        match self.inside(span, 1) {
            Some(clusters) => clusters.for_each(|cluster| _ = self.result.structure.add(cluster, 1)),
            None => self.result.structure_broken = true,
        }
        let table = self.read(span).await.context(|| "can't read the refcount table")?;
        let cluster = self.header.cluster_size();
        let mut seen = HashSet::default();
        for (index, entry) in table.slice().chunks_exact(8).enumerate() {
            let at = ImageOffset::new(be64(entry, 0));
            let mut kept = at.bytes();
            if at.bytes() != 0 {
                let usable = cluster.aligns(at) && at < IMAGE_END;
                if !usable {
                    self.error(format!(
                        "refcount block {index} is not cluster aligned; refcount table entry corrupted"
                    ));
                }
                let inside = usable.then(|| self.inside(at.span(cluster.bytes()), 1)).flatten();
                match inside {
                    Some(clusters) => clusters.for_each(|cluster| _ = self.result.structure.add(cluster, 1)),
                    None => {
                        self.result.structure_broken = true;
                        kept = 0;
                    }
                }
                if kept != 0 && !seen.insert(kept) {
                    kept = 0; // it is counted below, and compared as what it was first named as
                }
            }
            self.result.table.push(kept);
        }
        // A block that is also used as anything else, even as a second block, can be neither trusted nor
        // written.
        let shared: Vec<u64> = self
            .result
            .structure
            .each()
            .filter(|cluster| {
                self.result.structure.get(*cluster) > 1 || self.result.references.get(*cluster) > 0
            })
            .collect();
        for cluster in shared {
            let references = self.result.structure.get(cluster) + self.result.references.get(cluster);
            self.error(format!("refcount block or table in cluster {cluster} refcount={references}"));
            self.result.structure_broken = true;
            if self.result.tables.has(cluster) {
                self.result.contested.insert(cluster);
            }
        }
        Ok(())
    }

    /// Compares references with refcounts, block by block.
    pub(super) async fn compare(&mut self) -> Result<()> {
        let per_block = (self.header.cluster_size().bytes() * 8) >> self.header.refcount_order;
        let mut counted = vec![false; self.result.table.len()];
        let blocks: Vec<(usize, ImageOffset)> = self
            .result
            .table
            .iter()
            .enumerate()
            .filter(|(_, at)| **at != 0)
            .map(|(block, at)| (block, ImageOffset::new(*at)))
            .collect();
        let mut hole = Hole::default();
        let (mut there, mut in_holes) = (Vec::new(), HashSet::default());
        for (block, at) in blocks {
            // A block of zeros is compared with the clusters in use, and the cost of that does not depend on
            // its length.
            if hole.covers(self.image, at.span(self.header.cluster_size().bytes())).await {
                in_holes.insert(block);
            } else {
                there.push((block, at));
            }
        }
        for some in there.chunks(TABLES_AT_ONCE) {
            let clusters = read_clusters(self.image, self.header, some.iter().map(|(_, at)| *at)).await?;
            for ((block, at), bytes) in some.iter().zip(clusters) {
                counted[*block] = true;
                match bytes {
                    Ok(bytes) => self.compare_block(*block, bytes.slice()).await,
                    Err(error) => self.unreadable(&format!("the refcount block at {at}"), &error),
                }
            }
        }
        // Clusters in use that no block counts.
        let is_counted = |block: u64| {
            usize::try_from(block).is_ok_and(|block| counted.get(block).copied().unwrap_or(false))
        };
        let is_looked_at = |clusters: Range<u64>| {
            !(clusters.start / per_block..=(clusters.end - 1) / per_block).all(is_counted)
        };
        let mut without: Vec<u64> = self
            .result
            .references
            .each_where(is_looked_at)
            .chain(self.result.structure.each_where(is_looked_at))
            .filter(|cluster| !is_counted(cluster / per_block))
            .collect();
        without.sort_unstable();
        without.dedup();
        for cluster in without {
            self.compare_one(cluster, 0);
            let block = usize::try_from(cluster / per_block).ok();
            match block.filter(|block| in_holes.contains(block)) {
                Some(block) => _ = self.result.wrong_blocks.insert(block),
                None => self.result.structure_broken = true,
            }
        }
        Ok(())
    }

    async fn compare_block(&mut self, block: usize, bytes: &[u8]) {
        let order = self.header.refcount_order;
        let block_first = block as u64 * ((self.header.cluster_size().bytes() * 8) >> order);
        work::note(bytes.len() / 8);
        let mut compared = 0;
        let chunk = (CHUNK << order >> 3).min(bytes.len());
        for (bytes, first) in bytes.chunks_exact(chunk).zip((block_first..).step_by(CHUNK)) {
            if order == 4 && self.is_right(first, bytes) {
                continue;
            }
            for cluster in self.result.in_use(first, bytes, order) {
                if !self.compare_one(cluster, refcount::read(bytes, order, cluster - first)) {
                    self.result.wrong_blocks.insert(block);
                }
                compared += 1;
                if compared % AT_ONCE == 0 {
                    yield_now().await;
                }
            }
        }
        yield_now().await;
    }

    /// Whether all of these refcounts of 16 bits are right, as far as that shows at once.
    fn is_right(&mut self, first: u64, refcounts: &[u8]) -> bool {
        let Walked { references, structure, report, .. } = &mut self.result;
        let count = refcounts.len() as u64 / 2;
        if !structure.has_none(first, count) || references.are(first, refcounts) != Some(true) {
            return false;
        }
        if let Some(last) = refcounts.iter().rposition(|byte| *byte != 0) {
            let end = (first + last as u64 / 2 + 1) << self.header.cluster_size().shift();
            report.image_end_offset = report.image_end_offset.max(end);
        }
        true
    }

    /// Whether the refcount is right.
    fn compare_one(&mut self, cluster: u64, refcount: u64) -> bool {
        let references = self.result.references.get(cluster) + self.result.structure.get(cluster);
        if refcount > 0 {
            let end = (cluster + 1) << self.header.cluster_size().shift();
            self.result.report.image_end_offset = self.result.report.image_end_offset.max(end);
        }
        if refcount != references && references > 0 {
            self.result.stored.insert(cluster, refcount);
        }
        if refcount < references {
            self.result.low_counts += 1;
            self.error(format!("cluster {cluster} refcount={refcount} reference={references}"));
        } else if refcount > references {
            self.result.report.leaks += 1;
            (self.say)(format!("Leaked cluster {cluster} refcount={refcount} reference={references}"));
        }
        refcount == references
    }
}
