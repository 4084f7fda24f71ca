//! Repairs after a check: reserved bits are cleared, refcounts are written in place or anew, and then the
//! flags, which are judged by the refcounts. The rules are in the module above.

use std::collections::BTreeSet;

use futures_lite::future::yield_now;
use vellum_core::{Buffer, Error, ErrorKind, ImageOffset, Result, SharedStorage, Storage};

use super::super::header::Header;
use super::super::layout::{REFCOUNT_TABLE_BYTES_MAX, put64};
use super::super::refcount;
use super::super::references::References;
use super::{Walk, Walked, finish, flags, to_usize};
use crate::report::Repair;
use crate::truth::settle;

/// A repair, after a walk.
pub(super) struct Fix<'a> {
    pub(super) header: &'a mut Header,
    pub(super) image: &'a dyn Storage,
    pub(super) walk: Walked,
    pub(super) repair: Repair,
    pub(super) say: &'a mut dyn FnMut(String),
    /// Every wrong refcount could be corrected.
    pub(super) is_whole: bool,
}

/// Repairs an image that was not closed, if nothing but refcounts and flags is wrong with it, in one pass
/// over its tables. Returns whether it did; if not, the image needs a full check.
pub(super) async fn mend_counts(header: &Header, image: &SharedStorage) -> Result<bool> {
    settle(&**image).await?;
    let say: &mut dyn FnMut(String) = &mut |_| {};
    let walk = Walk::counting(header, &**image, false, say).await?.result;
    if let Some(overlap) = walk.overlap {
        return Err(Error::corrupt(format!(
            "{overlap}: a repair cannot decide which of the two is right, so nothing was changed: see `vellum check`"
        )));
    }
    let report = &walk.report;
    let is_mere_count = report.check_errors == 0 && report.corruptions == walk.low_counts;
    if !is_mere_count || walk.structure_broken || walk.hidden || !walk.mended.is_empty() {
        return Ok(false);
    }
    let suspect = walk.flags_suspect;
    let mut header = header.clone();
    let repair = Repair::All;
    let mut fix =
        Fix { header: &mut header, image: &**image, walk, repair, say: &mut |_| {}, is_whole: true };
    fix.fix_counts().await?;
    if !fix.is_whole {
        return Ok(false);
    }
    if suspect {
        fix.fix_flags().await?;
    }
    image.flush().await?;
    finish(&mut header, &**image).await?;
    Ok(true)
}

impl Fix<'_> {
    pub(super) async fn run(&mut self) -> Result<()> {
        if self.repair == Repair::All {
            if self.walk.structure_broken && self.walk.hidden {
                return Err(Error::corrupt(
                    "the refcounts cannot be rebuilt: parts of the mapping are damaged, unreadable or also used for \
                     something else, and the clusters they name would count as free",
                ));
            }
            self.mend_entries().await?;
            match self.walk.structure_broken {
                true => self.rebuild().await?,
                false => self.fix_counts().await?,
            }
            self.fix_flags().await?;
            return self.image.flush().await;
        }
        self.fix_counts().await?;
        // A flag that matched a refcount that was too high is wrong now. It is corrected if nothing else is
        // wrong.
        let report = &self.walk.report;
        let is_sound = report.check_errors == 0 && report.corruptions == self.walk.wrong_flags;
        if is_sound && self.walk.stored.is_empty() && !self.walk.structure_broken && !self.walk.hidden {
            self.fix_flags().await?;
        }
        self.image.flush().await
    }

    /// Clears reserved bits, and places where no data is. The meaning of the entries stays as it is.
    async fn mend_entries(&mut self) -> Result<()> {
        for (at, entry) in std::mem::take(&mut self.walk.mended) {
            if self.walk.is_contested(self.header, at) {
                continue;
            }
            (self.say)(format!("Repairing the entry at {at}"));
            self.image.write(at, Buffer::copy_of(&entry.to_be_bytes())).await?;
        }
        Ok(())
    }

    async fn fix_flags(&mut self) -> Result<()> {
        let Self { header, image, walk, say, .. } = self;
        let mut on_wrong = |flag: &flags::WrongFlag| {
            say(format!("Repairing OFLAG_COPIED of entry {:x} at {}", flag.old, flag.at));
        };
        flags::visit(header, *image, walk, true, &mut on_wrong).await?;
        Ok(())
    }

    /// Writes the right refcounts into the existing blocks. No refcount is lowered when there may be
    /// references that were not seen, and nothing is written to blocks that may be something else.
    async fn fix_counts(&mut self) -> Result<()> {
        let cluster = self.header.cluster_size().bytes();
        let (order, per_block) = (self.header.refcount_order, (cluster * 8) >> self.header.refcount_order);
        if self.walk.structure_broken {
            (self.say)("The refcount structure must be rebuilt first; no leak is repaired".to_owned());
            return Ok(());
        }
        for block in std::mem::take(&mut self.walk.wrong_blocks) {
            let at = ImageOffset::new(self.walk.table[block]);
            let Ok(bytes) = self.image.read(at, Buffer::for_overwrite(to_usize(cluster))).await else {
                self.is_whole = false;
                continue;
            };
            let mut bytes = bytes.slice().to_vec();
            let mut changed = false;
            yield_now().await;
            let first = block as u64 * per_block;
            for n in self.walk.in_use(first, &bytes, order) {
                let index = n - first;
                let old = refcount::read(&bytes, order, index);
                let new = self.walk.references.get(n) + self.walk.structure.get(n);
                let may = if old > new { !self.walk.hidden } else { self.repair == Repair::All };
                let fits = order == 6 || new < 1 << (1u32 << order);
                self.is_whole &= old == new || may && fits;
                if old != new && may && fits {
                    (self.say)(format!("Repairing cluster {n} refcount={old} reference={new}"));
                    refcount::write(&mut bytes, order, index, new);
                    self.walk.stored.remove(&n);
                    changed = true;
                }
            }
            if changed {
                self.image.write(at, Buffer::copy_of(&bytes)).await?;
            }
        }
        Ok(())
    }

    /// Writes a new refcount structure and switches the header to it.
    async fn rebuild(&mut self) -> Result<()> {
        (self.say)("Rebuilding refcount structure".to_owned());
        let cluster = self.header.cluster_size();
        let order = self.header.refcount_order;
        let per_block = (cluster.bytes() * 8) >> order;
        let references = &self.walk.references;
        let mut blocks: BTreeSet<u64> = references.each().map(|n| n / per_block).collect();
        // The structure is placed behind everything else, and counted by blocks of its own.
        let first = references.last().map_or(1, |last| last + 1).max(cluster.count_for(self.image.len()));
        let (table_clusters, end) = loop {
            let entries = blocks.last().map_or(1, |last| last + 1);
            let table_clusters = cluster.count_for(entries * 8);
            // Checked before the table's own clusters are counted: in a very long file there would be
            // millions.
            if table_clusters << cluster.shift() > REFCOUNT_TABLE_BYTES_MAX.max(cluster.bytes()) {
                return Err(Error::corrupt(
                    "the image is too large for its cluster size: new refcounts do not fit",
                ));
            }
            let end = first + blocks.len() as u64 + table_clusters;
            let before = blocks.len();
            blocks.extend(first / per_block..=(end - 1) / per_block);
            if blocks.len() == before {
                break (table_clusters, end);
            }
        };
        let end_bytes = end << cluster.shift();
        if self.image.limits().fixed_len && end_bytes > self.image.len() {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("new refcounts need {} bytes more than the device has", end_bytes - self.image.len()),
            ));
        }
        let table_len = table_clusters << cluster.shift();
        let mut table = vec![0; to_usize(table_len)];
        for (place, block) in (first..).zip(&blocks) {
            let mut bytes = vec![0; to_usize(cluster.bytes())];
            let start = block * per_block;
            let own = first.max(start)..end.min(start + per_block);
            for n in self.walk.in_use(start, &bytes, order).chain(own.clone()) {
                let count = references.get(n) + u64::from(own.contains(&n));
                if order < 6 && count >= 1 << (1u32 << order) {
                    return Err(Error::corrupt(format!(
                        "cluster {n} has {count} references, too many for the width of its refcount"
                    )));
                }
                refcount::write(&mut bytes, order, n - start, count);
            }
            let at = ImageOffset::new(place << cluster.shift());
            self.image.write(at, Buffer::copy_of(&bytes)).await?;
            put64(&mut table, to_usize(block * 8), at.bytes());
        }
        let table_at = ImageOffset::new((first + blocks.len() as u64) << cluster.shift());
        self.image.write(table_at, Buffer::copy_of(&table)).await?;
        self.image.flush().await?;
        self.header.set_refcount_table(table_at.span(table_len));
        self.image.write(ImageOffset::ZERO, self.header.first_sector()).await?;
        self.image.flush().await?; // commit point: the new structure counts
        self.walk.stored.clear();
        self.walk.structure = References::default();
        Ok(())
    }
}
