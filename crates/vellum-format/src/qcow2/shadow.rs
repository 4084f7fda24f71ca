//! New metadata beside the old, and one write that switches to it: how the snapshots of a closed image change.
//!
//! ```text
//!   plan      what is named more often, and less          ── nothing is written ──
//!   write     L1 and L2 tables, snapshot table, refcount blocks and table,
//!             all of it in clusters that the old refcounts call free          ── flush ──
//!   switch    sector 0: L1, refcount table, snapshot table, size              ── flush ──     commit point
//!   after     what is free now is punched, and the end of the file cut off
//! ```
//!
//! 1. Until the switch nothing that the old header leads to is changed, not even a flag. So a crash leaves the old image,
//!    with refcounts and flags that are right, and bytes in clusters that are free.
//! 2. After the switch all that the new header leads to is durable, and its refcounts and flags are right. Nothing that the
//!    old header led to is punched or reused before the switch is durable.
//! 3. So no mark of an unclean close is needed, there is nothing to repair and no leak, and version 2 is as safe as
//!    version 3.
//! 4. Refcounts are the stored ones, changed by what was planned. A cluster with a leak keeps it. The caller has checked the
//!    image, so that "free" is true.
//! 5. Memory: two counts for each cluster that the plan concerns. Blocks and tables are read, changed and written a few at a
//!    time.
//!
//! A new refcount block is in a cluster that some block counts, perhaps one that was not to change before. So blocks are
//! placed until there is a place for each that changes. The table is placed last, and again if it was too small then.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use futures_lite::future::yield_now;
use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, ImageCluster, ImageOffset, ImageSpan, Result,
    SharedStorage, Zeroes,
};

use super::entry::{ClusterState, Entries, Units};
use super::header::Header;
use super::layout::{COPIED, IMAGE_END, OFFSET_MASK, REFCOUNT_TABLE_BYTES_MAX, be64, put64};
use super::refcount;
use super::references::{GROUP, References, busy_groups};
use super::table_edits::{drop_zeros, put_places, put_words, put_zeros};
use super::tail::give_back_tail;
use super::tree::{entries_in, read_table};
use crate::hash::HashMap;
use crate::image::Reserve;

/// Blocks that are kept in memory for single looks, in bytes.
const KEPT_BYTES: usize = 64 << 20;
/// One punch takes at most this many bytes.
const PUNCHED_AT_ONCE: u64 = 256 << 20;
/// Zeros are written in pieces of this many bytes.
const WRITTEN_AT_ONCE: u64 = 1 << 20;

/// The flags that a copy of an L2 table has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flags {
    /// None: all that it names is shared.
    Clear,
    /// Where the refcount is one afterwards.
    ByCount,
}

/// How a copy of an L2 table differs from it, besides its flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Edit {
    /// This many entries are kept; those behind them name nothing.
    pub(super) keeps: usize,
    /// What has nothing of its own in these bytes of what the table maps reads as zero: from the first whole unit to the end
    /// of a cluster.
    pub(super) zeros: Range<u64>,
    /// Places for clusters that have none: which of the entries, and where the first one lies. They read as zero.
    pub(super) places: Option<(Range<u64>, ImageOffset)>,
    /// Entries that say zero name nothing.
    pub(super) drops_zeros: bool,
    /// The last entry that is kept, as it will be, without its flag.
    pub(super) last: Option<Units>,
}

impl Edit {
    /// None.
    pub(super) const NONE: Self =
        Self { keeps: usize::MAX, zeros: 0..0, places: None, drops_zeros: false, last: None };
}

/// An L2 table that is copied, or made new.
struct TableCopy {
    from: Option<ImageOffset>,
    to: ImageOffset,
    flags: Flags,
    edit: Edit,
}

pub(super) struct Shadow<'a> {
    /// As it will be after the switch.
    pub(super) header: Header,
    image: &'a SharedStorage,
    cluster: BlockSize,
    /// The width of the old refcounts.
    order: u32,
    /// The entries of the old refcount table.
    table: Vec<u64>,
    old_table: ImageSpan,
    /// How often clusters are named more than before, and less.
    pub(super) plus: References,
    pub(super) minus: References,
    /// The clusters of the new refcount structure.
    own: BTreeSet<u64>,
    free: Free,
    copies: Vec<TableCopy>,
    writes: Vec<(ImageOffset, Vec<u8>)>,
    /// Space for data, and how it is reserved.
    reserved: Vec<(ImageSpan, Reserve)>,
    /// Old blocks, for single looks.
    kept: HashMap<usize, Vec<u8>>,
    /// The end of the last cluster that was taken.
    end: u64,
    /// Blocks that count nothing afterwards are named no more.
    drops_idle: bool,
    /// Those blocks.
    idle: BTreeSet<usize>,
    /// Blocks that are written to new places though nothing that they count changes.
    moved: BTreeSet<usize>,
}

/// Clusters that are free by the old refcounts, as far as these have been looked through.
#[derive(Default)]
struct Free {
    runs: VecDeque<Range<u64>>,
    /// Blocks before this one have been looked through.
    next: usize,
    is_at_end: bool,
}

impl Free {
    fn add(&mut self, run: Range<u64>) {
        match self.runs.back_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ if run.is_empty() => {}
            _ => self.runs.push_back(run),
        }
    }

    fn take(&mut self, count: u64) -> Option<u64> {
        let index = self.runs.iter().position(|run| run.end - run.start >= count)?;
        let run = &mut self.runs[index];
        let first = run.start;
        run.start += count;
        if run.is_empty() {
            self.runs.remove(index);
        }
        Some(first)
    }
}

impl<'a> Shadow<'a> {
    /// For an image that is closed and was checked.
    pub(super) async fn new(header: Header, image: &'a SharedStorage) -> Result<Self> {
        let old_table = header.refcount_table;
        let len = usize::try_from(old_table.len()).expect("at most 8 MiB");
        let context = || "can't read the refcount table";
        let bytes = image.read(old_table.start(), Buffer::for_overwrite(len)).await.context(context)?;
        let table = bytes.slice().chunks_exact(8).map(|entry| be64(entry, 0) & OFFSET_MASK).collect();
        Ok(Self {
            cluster: header.cluster_size(),
            order: header.refcount_order,
            header,
            image,
            table,
            old_table,
            plus: References::default(),
            minus: References::default(),
            own: BTreeSet::new(),
            free: Free::default(),
            copies: Vec::new(),
            writes: Vec::new(),
            reserved: Vec::new(),
            kept: HashMap::default(),
            end: 0,
            drops_idle: false,
            idle: BTreeSet::new(),
            moved: BTreeSet::new(),
        })
    }

    /// All refcounts get this width, as a power of two.
    pub(super) fn set_width(&mut self, order: u32) {
        self.header.set_refcount_order(order);
    }

    /// Clusters that an old block counts.
    fn per_block(&self) -> u64 {
        (self.cluster.bytes() * 8) >> self.order
    }

    /// Clusters that a new block counts.
    fn per_new_block(&self) -> u64 {
        (self.cluster.bytes() * 8) >> self.header.refcount_order
    }

    /// The new block that counts a cluster.
    fn block_of(&self, cluster: u64) -> usize {
        usize::try_from(cluster / self.per_new_block()).unwrap_or(usize::MAX)
    }

    fn has_new_width(&self) -> bool {
        self.header.refcount_order != self.order
    }

    /// The bytes of an old block; zeros where there is none.
    async fn block(&self, index: usize) -> Result<Vec<u8>> {
        let len = usize::try_from(self.cluster.bytes()).expect("at most 2 MiB");
        match self.table.get(index).copied().filter(|at| *at != 0) {
            None => Ok(vec![0; len]),
            Some(at) => {
                let at = ImageOffset::new(at);
                let context = || format!("can't read the refcounts at {at}");
                Ok(self.image.read(at, Buffer::for_overwrite(len)).await.context(context)?.to_vec())
            }
        }
    }

    /// Clusters in a row that are free before and after the switch.
    async fn take(&mut self, count: u64) -> Result<u64> {
        loop {
            if let Some(first) = self.free.take(count) {
                self.end = self.end.max(first + count);
                return Ok(first);
            }
            if self.free.is_at_end {
                return Err(Error::new(ErrorKind::NoSpace, "the image's storage is full and cannot grow"));
            }
            self.look_on().await?;
        }
    }

    /// Looks through one more block for free clusters.
    async fn look_on(&mut self) -> Result<()> {
        let (per_block, order, index) = (self.per_block(), self.order, self.free.next);
        let end = match self.image.limits().fixed_len {
            true => self.image.len() >> self.cluster.shift(),
            false => IMAGE_END.bytes() >> self.cluster.shift(),
        };
        let first = index as u64 * per_block;
        if index >= self.table.len() || first >= end {
            self.free.add(first.min(end)..end);
            self.free.is_at_end = true;
            return Ok(());
        }
        self.free.next += 1;
        if self.table[index] == 0 {
            self.free.add(first..(first + per_block).min(end));
            return Ok(());
        }
        let bytes = self.block(index).await?;
        let mut from = None;
        for cluster in first..(first + per_block).min(end) {
            let is_free = refcount::read(&bytes, order, cluster - first) == 0;
            match (is_free, from) {
                (true, None) => from = Some(cluster),
                (false, Some(start)) => {
                    self.free.add(start..cluster);
                    from = None;
                }
                _ => {}
            }
        }
        if let Some(start) = from {
            self.free.add(start..(first + per_block).min(end));
        }
        yield_now().await;
        Ok(())
    }

    /// A place for a table of this many bytes. It is counted as named once.
    pub(super) async fn place(&mut self, len: u64) -> Result<ImageSpan> {
        let count = self.cluster.count_for(len);
        let first = self.take(count).await?;
        (first..first + count).for_each(|cluster| _ = self.plus.add(cluster, 1));
        Ok(self.at(first).span(len))
    }

    fn at(&self, cluster: u64) -> ImageOffset {
        self.cluster.start_of(ImageCluster::new(cluster))
    }

    fn number(&self, at: ImageOffset) -> u64 {
        self.cluster.cluster_of(at).index()
    }

    /// Counts the clusters of a table as named once less.
    pub(super) fn drop_table(&mut self, span: ImageSpan) {
        if !span.is_empty() {
            let clusters = self.cluster.clusters_in(span);
            clusters.for_each(|cluster| _ = self.minus.add(cluster.index(), 1));
        }
    }

    /// Counts an L2 table as named this many times more.
    pub(super) fn share(&mut self, table: ImageOffset, times: u64) {
        self.plus.add(self.number(table), times);
    }

    /// Counts an L2 table as named this many times less.
    pub(super) fn unshare(&mut self, table: ImageOffset, times: u64) {
        self.minus.add(self.number(table), times);
    }

    /// A copy of an L2 table, with these flags. It is counted as named once.
    pub(super) async fn copy_table(&mut self, from: ImageOffset, flags: Flags) -> Result<ImageOffset> {
        self.edit_table(Some(from), flags, Edit::NONE).await
    }

    /// A copy of an L2 table that differs from it, or a new one. It is counted as named once.
    pub(super) async fn edit_table(
        &mut self,
        from: Option<ImageOffset>,
        flags: Flags,
        edit: Edit,
    ) -> Result<ImageOffset> {
        let to = self.place(self.cluster.bytes()).await?.start();
        self.copies.push(TableCopy { from, to, flags, edit });
        Ok(to)
    }

    /// Places for the clusters in these bytes of what a table maps, each counted as named once; nothing for none.
    pub(super) async fn reserve(
        &mut self,
        bytes: Range<u64>,
        how: Reserve,
    ) -> Result<Option<(Range<u64>, ImageOffset)>> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let entries = bytes.start >> self.cluster.shift()..bytes.end >> self.cluster.shift();
        let place = self.place(bytes.end - bytes.start).await?;
        self.reserved.push((place, how));
        Ok(Some((entries, place.start())))
    }

    /// Writes a table to its place, with the rest.
    pub(super) fn write(&mut self, span: ImageSpan, mut bytes: Vec<u8>) {
        let len = usize::try_from(self.cluster.round_up(span.len())).expect("at most 64 MiB");
        bytes.resize(len, 0);
        self.writes.push((span.start(), bytes));
    }

    /// The refcount of a cluster after the switch, as far as it is planned.
    pub(super) async fn count_after(&mut self, at: ImageOffset) -> Result<u64> {
        let cluster = self.number(at);
        let block = usize::try_from(cluster / self.per_block()).unwrap_or(usize::MAX);
        let index = cluster % self.per_block();
        if !self.kept.contains_key(&block) {
            let bytes = self.block(block).await?;
            if (self.kept.len() + 1) * bytes.len() > KEPT_BYTES {
                self.kept.clear();
            }
            self.kept.insert(block, bytes);
        }
        let stored = refcount::read(&self.kept[&block], self.order, index);
        self.count_of(cluster, stored)
    }

    fn count_of(&self, cluster: u64, stored: u64) -> Result<u64> {
        let own = u64::from(self.own.contains(&cluster));
        let more = stored.saturating_add(self.plus.get(cluster)).saturating_add(own);
        let after = more.checked_sub(self.minus.get(cluster)).ok_or_else(|| {
            let at = self.at(cluster);
            Error::corrupt(format!(
                "the cluster at {at} has a refcount that is too low: run `vellum check -r all`"
            ))
        })?;
        self.fitting(after)
    }

    /// Refuses a count that does not fit in a refcount.
    fn fitting(&self, count: u64) -> Result<u64> {
        let bits = self.header.refcount_bits();
        if bits < 64 && count >> bits != 0 {
            let most = (1u64 << bits) - 1;
            return Err(Error::unsupported(format!(
                "a cluster would be shared by {count}, and refcounts of {bits} bits count to {most}: widen them with \
                 `vellum amend -o refcount_bits=16` first"
            )));
        }
        Ok(count)
    }

    /// Whether an L2 table of the active disk has an entry whose flag changes.
    pub(super) async fn changes_flags(&mut self, table: &[u8]) -> Result<bool> {
        for entry in entries_in(Entries::of(&self.header), table) {
            let (_, word, state) = entry?;
            if let Some(is_sole) = self.is_sole(state).await?
                && is_sole != (word & COPIED != 0)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a cluster that is named less often has a refcount of one afterwards. `None` for any other.
    async fn is_sole(&mut self, state: ClusterState) -> Result<Option<bool>> {
        match state {
            ClusterState::Plain(units) => match units.host {
                Some(host) if self.minus.get(self.number(host)) > 0 => {
                    Ok(Some(self.count_after(host).await? == 1))
                }
                _ => Ok(None),
            },
            ClusterState::Compressed(_) => Ok(None),
        }
    }

    /// Blocks of refcounts that are all zero afterwards are left out, with what they take.
    pub(super) fn drop_idle_blocks(&mut self) {
        self.drops_idle = true;
    }

    /// Lets blocks of refcounts in these places get new ones. Returns whether there are any.
    pub(super) fn move_blocks(&mut self, is_chosen: impl Fn(ImageOffset) -> bool) -> bool {
        let chosen =
            self.table.iter().enumerate().filter(|(_, at)| **at != 0 && is_chosen(ImageOffset::new(**at)));
        self.moved = chosen.map(|(index, _)| index).collect();
        !self.moved.is_empty()
    }

    /// The first cluster that is free, if one is before the end of the file.
    pub(super) async fn first_free(&mut self) -> Result<Option<u64>> {
        while self.free.runs.is_empty() && !self.free.is_at_end {
            self.look_on().await?;
        }
        let end = self.image.len() >> self.cluster.shift();
        Ok(self.free.runs.front().map(|run| run.start).filter(|first| *first < end))
    }

    /// Writes everything, and switches to it.
    pub(super) async fn switch(self) -> Result<()> {
        self.switch_and_tell().await.map(drop)
    }

    /// As above. Returns the clusters of all that was written.
    pub(super) async fn switch_and_tell(mut self) -> Result<BTreeSet<u64>> {
        let before = self.image.len();
        let freed = match self.write_all().await {
            Ok(freed) => freed,
            Err(error) => {
                // The old image counts, and needs nothing of what was added.
                if self.image.len() > before && !self.image.limits().fixed_len {
                    let _ = self.image.set_len(before).await;
                }
                return Err(error.context(
                    "nothing has changed: until the switch there has to be room for new tables beside the old ones",
                ));
            }
        };
        self.image.flush().await?;
        self.image.write(ImageOffset::ZERO, self.header.first_sector()).await?;
        self.image.flush().await?; // commit point
        // What follows may fail: the image is right without it.
        self.punch(freed).await;
        let _ = give_back_tail(&self.header, &**self.image, ImageOffset::ZERO.span(0)).await;
        Ok(self.own.into_iter().chain(self.plus.each()).collect())
    }

    async fn write_all(&mut self) -> Result<Vec<Range<u64>>> {
        let (blocks, table) = self.place_refcounts().await?;
        let end = self.end << self.cluster.shift();
        if end > self.image.len() {
            self.image.set_len(end).await.context(|| "can't grow the file")?;
        }
        for (place, how) in std::mem::take(&mut self.reserved) {
            self.fill(place, how).await.context(|| "can't reserve space for the disk")?;
        }
        // First of all tables, because it shows whether the counts fit.
        let freed = self.write_blocks(&blocks).await?;
        let mut bytes = vec![0; usize::try_from(table.len()).expect("at most 8 MiB")];
        // With another width nothing of the old structure stays.
        for (index, at) in self.table.iter().enumerate().filter(|_| !self.has_new_width()) {
            put64(&mut bytes, index * 8, if self.idle.contains(&index) { 0 } else { *at });
        }
        for (index, place) in &blocks {
            put64(&mut bytes, index * 8, self.at(*place).bytes());
        }
        self.writes.push((table.start(), bytes));
        self.header.set_refcount_table(table);
        for TableCopy { from, to, flags, edit } in std::mem::take(&mut self.copies) {
            let table = self.copied(from, flags, &edit).await?;
            self.image.write(to, Buffer::copy_of(&table)).await.context(|| "can't write an L2 table")?;
            yield_now().await;
        }
        for (at, bytes) in std::mem::take(&mut self.writes) {
            self.image.write(at, Buffer::copy_of(&bytes)).await.context(|| "can't write a table")?;
        }
        Ok(freed)
    }

    /// Reserves the space of clusters for data.
    async fn fill(&self, place: ImageSpan, how: Reserve) -> Result<()> {
        let mut rest = place;
        while !rest.is_empty() {
            let (now, later) = match how {
                Reserve::Nothing | Reserve::Places => return Ok(()),
                Reserve::Space => rest.split_at(PUNCHED_AT_ONCE),
                Reserve::Zeros => rest.split_at(WRITTEN_AT_ONCE),
            };
            match how {
                Reserve::Zeros => {
                    let len = usize::try_from(now.len()).expect("a piece is short");
                    self.image.write(now.start(), Buffer::zeroed(len)).await?;
                }
                _ => self.image.write_zeroes(now, Zeroes::Allocated).await?,
            }
            rest = later;
            yield_now().await;
        }
        Ok(())
    }

    /// The bytes of a copy.
    async fn copied(&mut self, from: Option<ImageOffset>, flags: Flags, edit: &Edit) -> Result<Vec<u8>> {
        let mut table = match from {
            Some(from) => read_table(&self.header, self.image, from).await?.to_vec(),
            None => vec![0; usize::try_from(self.cluster.bytes()).expect("at most 2 MiB")],
        };
        let kinds = Entries::of(&self.header);
        let kept = edit.keeps.saturating_mul(kinds.words() * 8).min(table.len());
        table[kept..].fill(0);
        if let Some(units) = edit.last {
            put_words(kinds, &mut table, edit.keeps - 1, kinds.encode(units));
        }
        if edit.drops_zeros {
            drop_zeros(kinds, &mut table)?;
        }
        put_zeros(kinds, self.cluster, &mut table, edit.zeros.clone())?;
        if let Some((places, at)) = &edit.places {
            put_places(kinds, self.cluster, &mut table, places.clone(), *at)?;
        }
        let entries: Vec<(usize, u64, ClusterState)> =
            entries_in(Entries::of(&self.header), &table).collect::<Result<_>>()?;
        for (at, word, state) in entries {
            let is_sole = match (flags, state) {
                (_, ClusterState::Compressed(_)) => None,
                (Flags::Clear, ClusterState::Plain(_)) => Some(false),
                (Flags::ByCount, state) => self.is_sole(state).await?,
            };
            match is_sole {
                Some(true) => put64(&mut table, at, word | COPIED),
                Some(false) => put64(&mut table, at, word & !COPIED),
                None => {}
            }
        }
        Ok(table)
    }

    /// Places for the blocks that change, and for the table.
    async fn place_refcounts(&mut self) -> Result<(BTreeMap<usize, u64>, ImageSpan)> {
        self.drop_table(self.old_table);
        let mut changed: BTreeSet<usize> =
            self.plus.each().chain(self.minus.each()).map(|cluster| self.block_of(cluster)).collect();
        if self.has_new_width() {
            changed.extend(self.drop_blocks().await?);
        } else {
            changed.append(&mut self.moved);
            if self.drops_idle {
                self.drop_idle(&mut changed).await?;
            }
        }
        let mut todo: Vec<usize> = changed.into_iter().collect();
        let mut blocks = BTreeMap::new();
        let mut table: Option<Range<u64>> = None;
        loop {
            while let Some(index) = todo.pop() {
                if blocks.contains_key(&index) {
                    continue;
                }
                let place = self.take(1).await?;
                self.own.insert(place);
                blocks.insert(index, place);
                todo.push(self.block_of(place));
                let old = self.table.get(index).copied().filter(|at| *at != 0 && !self.has_new_width());
                // It was to be left out, and counts something after all.
                if self.idle.remove(&index) {
                    continue;
                }
                if let Some(old) = old {
                    self.minus.add(self.number(ImageOffset::new(old)), 1);
                    todo.push(self.block_of(self.number(ImageOffset::new(old))));
                }
            }
            let last = blocks.last_key_value().map_or(0, |(index, _)| index + 1);
            let least = if self.has_new_width() { 1 } else { self.table.len() };
            let needed = self.cluster.count_for(last.max(least) as u64 * 8);
            if needed << self.cluster.shift() > REFCOUNT_TABLE_BYTES_MAX.max(self.cluster.bytes()) {
                let why = "the image has reached the largest size that its refcount table allows";
                return Err(Error::new(ErrorKind::NoSpace, why));
            }
            match table {
                Some(clusters) if clusters.end - clusters.start >= needed => {
                    let len = (clusters.end - clusters.start) << self.cluster.shift();
                    return Ok((blocks, self.at(clusters.start).span(len)));
                }
                before => {
                    before.into_iter().flatten().for_each(|cluster| _ = self.own.remove(&cluster));
                    let first = self.take(needed).await?;
                    self.own.extend(first..first + needed);
                    todo.extend((first..first + needed).map(|cluster| self.block_of(cluster)));
                    table = Some(first..first + needed);
                }
            }
        }
    }

    /// Finds the blocks that count nothing afterwards, and counts them as not named any more.
    async fn drop_idle(&mut self, changed: &mut BTreeSet<usize>) -> Result<()> {
        let (per_block, order) = (self.per_block(), self.order);
        let mut todo: Vec<usize> = (0..self.table.len()).filter(|index| self.table[*index] != 0).collect();
        while let Some(index) = todo.pop() {
            if self.idle.contains(&index) || self.table.get(index).is_none_or(|at| *at == 0) {
                continue;
            }
            let own = self.number(ImageOffset::new(self.table[index]));
            let bytes = self.block(index).await?;
            let first = index as u64 * per_block;
            let groups = busy_groups(first, &bytes, order, [&self.plus, &self.minus]);
            let is_idle = groups.into_iter().flat_map(|group| group..group + GROUP as u64).all(|cluster| {
                let more =
                    refcount::read(&bytes, order, cluster - first).saturating_add(self.plus.get(cluster));
                more <= self.minus.get(cluster).saturating_add(u64::from(cluster == own))
            });
            if is_idle {
                self.idle.insert(index);
                self.minus.add(own, 1);
                changed.remove(&index);
                let counting = self.block_of(own);
                if counting != index {
                    changed.insert(counting);
                    todo.push(counting);
                }
            }
            yield_now().await;
        }
        changed.retain(|index| !self.idle.contains(index));
        Ok(())
    }

    /// Counts all old blocks as not named any more. Returns the new blocks that count what they count.
    async fn drop_blocks(&mut self) -> Result<BTreeSet<usize>> {
        let (per_block, order) = (self.per_block(), self.order);
        let mut needed = BTreeSet::new();
        for index in 0..self.table.len() {
            if self.table[index] == 0 {
                continue;
            }
            let own = self.number(ImageOffset::new(self.table[index]));
            self.minus.add(own, 1);
            needed.insert(self.block_of(own));
            let bytes = self.block(index).await?;
            let first = index as u64 * per_block;
            for cluster in (0..per_block).filter(|at| refcount::read(&bytes, order, *at) != 0) {
                needed.insert(self.block_of(first + cluster));
            }
            yield_now().await;
        }
        Ok(needed)
    }

    /// A block as it is before its counts change: the old one, or all that the old ones say of its clusters.
    async fn unchanged(&self, index: usize) -> Result<Vec<u8>> {
        if !self.has_new_width() {
            return self.block(index).await;
        }
        let mut bytes = vec![0; usize::try_from(self.cluster.bytes()).expect("at most 2 MiB")];
        let (per_old, per_new) = (self.per_block(), self.per_new_block());
        let (first, end) = (index as u64 * per_new, (index as u64 + 1) * per_new);
        for old in first / per_old..end.div_ceil(per_old) {
            let old_index = usize::try_from(old).unwrap_or(usize::MAX);
            if self.table.get(old_index).is_none_or(|at| *at == 0) {
                continue;
            }
            let counts = self.block(old_index).await?;
            for cluster in first.max(old * per_old)..end.min((old + 1) * per_old) {
                let count = refcount::read(&counts, self.order, cluster - old * per_old);
                if count > 0 {
                    let count = self.fitting(count)?;
                    refcount::write(&mut bytes, self.header.refcount_order, cluster - first, count);
                }
            }
            yield_now().await;
        }
        Ok(bytes)
    }

    /// The clusters that become free by what is planned, if nothing is placed.
    pub(super) async fn freed(&self) -> Result<Vec<Range<u64>>> {
        let (per_block, order) = (self.per_block(), self.order);
        let mut changed: Vec<u64> = self.minus.each().collect();
        changed.sort_unstable();
        let mut freed: Vec<Range<u64>> = Vec::new();
        for in_block in changed.chunk_by(|a, b| a / per_block == b / per_block) {
            let block = in_block[0] / per_block;
            let bytes = self.block(usize::try_from(block).unwrap_or(usize::MAX)).await?;
            for cluster in in_block {
                let old = refcount::read(&bytes, order, cluster - block * per_block);
                if old > 0 && self.count_of(*cluster, old)? == 0 {
                    match freed.last_mut() {
                        Some(last) if last.end == *cluster => last.end += 1,
                        _ => freed.push(*cluster..*cluster + 1),
                    }
                }
            }
            yield_now().await;
        }
        Ok(freed)
    }

    /// Writes the blocks that change. Returns the clusters that become free.
    async fn write_blocks(&self, blocks: &BTreeMap<usize, u64>) -> Result<Vec<Range<u64>>> {
        let (order, per_block) = (self.header.refcount_order, self.per_new_block());
        let mut freed: Vec<Range<u64>> = Vec::new();
        for (index, place) in blocks {
            let mut bytes = self.unchanged(*index).await?;
            let first = *index as u64 * per_block;
            let none = vec![0; bytes.len()];
            let groups = busy_groups(first, &none, order, [&self.plus, &self.minus]);
            let named = groups.into_iter().flat_map(|group| group..group + GROUP as u64);
            let changed: BTreeSet<u64> =
                named.chain(self.own.range(first..first + per_block).copied()).collect();
            for cluster in changed {
                let old = refcount::read(&bytes, order, cluster - first);
                let new = self.count_of(cluster, old)?;
                refcount::write(&mut bytes, order, cluster - first, new);
                if old > 0 && new == 0 {
                    match freed.last_mut() {
                        Some(last) if last.end == cluster => last.end += 1,
                        _ => freed.push(cluster..cluster + 1),
                    }
                }
            }
            let context = || "can't write refcounts";
            self.image.write(self.at(*place), Buffer::copy_of(&bytes)).await.context(context)?;
            yield_now().await;
        }
        // What the blocks counted that are left out.
        for index in &self.idle {
            let bytes = self.block(*index).await?;
            let first = *index as u64 * per_block;
            for cluster in
                (first..first + per_block).filter(|at| refcount::read(&bytes, order, at - first) != 0)
            {
                freed.push(cluster..cluster + 1);
            }
        }
        Ok(freed)
    }

    /// Gives the space of clusters that are free now back to the host, where that is cheap.
    pub(super) async fn punch(&self, freed: Vec<Range<u64>>) {
        if !self.image.limits().fast_zeroes {
            return;
        }
        let end = self.image.len();
        for run in freed {
            let mut rest = self.at(run.start).span((run.end - run.start) << self.cluster.shift());
            while !rest.is_empty() && rest.start().bytes() < end {
                let (now, later) = rest.split_at(PUNCHED_AT_ONCE);
                let now = ImageSpan::between(now.start(), now.end().min(ImageOffset::new(end)));
                if self.image.write_zeroes(now, Zeroes::MayUnmap).await.is_err() {
                    return;
                }
                rest = later;
            }
        }
    }
}
