//! The walk over everything that names clusters: the active tables, those of snapshots, and bitmaps.
//!
//! An L1 table is read first, and its entries are put in order. Then each L2 table is read once and counted
//! as often as it is named.

use std::collections::BTreeMap;

use futures_lite::future::yield_now;
use smallvec::SmallVec;
use vellum_core::{Context, ErrorKind, GuestCluster, ImageOffset, ImageSpan, Result};

use super::super::entry::ClusterState;
use super::super::hole::Hole;
use super::super::layout::*;
use super::super::references::Kind;
use super::super::snapshot;
use super::{PIECE_BYTES, TABLES_AT_ONCE, Walk, read_clusters, to_usize};
use crate::work;

/// How an L2 table is named.
#[derive(Default)]
struct Naming {
    times: u64,
    /// The entries of the L1 table that name it, in order: always the first, and the others only where they
    /// make a difference, which is with a data file.
    indices: SmallVec<[usize; 1]>,
}

/// L2 tables to visit, by their places.
type Wanted = BTreeMap<ImageOffset, Naming>;

impl Walk<'_> {
    /// Counts the active L1 table and everything it leads to.
    pub(super) async fn walk_active(&mut self) -> Result<()> {
        let span = self.header.l1_span();
        if span.is_empty() || !self.count_table(span, Kind::L1, 1) {
            return Ok(());
        }
        let mut wanted = Wanted::new();
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(PIECE_BYTES);
            for (index, place) in self.read_l1(now, span.start()).await? {
                let naming = wanted.entry(place.start()).or_default();
                naming.times += 1;
                if naming.times == 1 || self.header.has_data_file() {
                    naming.indices.push(index);
                }
            }
            rest = later;
        }
        self.walk_tables(wanted, true).await
    }

    /// The L2 tables that a part of an L1 table names, with the index of each entry.
    async fn read_l1(&mut self, span: ImageSpan, table: ImageOffset) -> Result<Vec<(usize, ImageSpan)>> {
        let bytes = match self.read(span).await {
            Ok(bytes) => bytes,
            Err(error) => {
                self.result.hidden = true;
                self.unreadable("the L1 table", &error);
                return Ok(Vec::new());
            }
        };
        let is_active = table == self.header.l1_span().start();
        let mut named = Vec::new();
        for (place, entry) in (0..).map(|i| span.start() + i * 8).zip(bytes.slice().chunks_exact(8)) {
            let entry = be64(entry, 0);
            if entry == 0 {
                continue;
            }
            let index = to_usize((place - table) / 8);
            if let Some(l2) = self.l2_place(place, index, entry, is_active) {
                named.push((index, l2));
            }
        }
        Ok(named)
    }

    /// The place of an L1 entry's table, if that is a possible place.
    fn l2_place(
        &mut self,
        place: ImageOffset,
        index: usize,
        entry: u64,
        is_active: bool,
    ) -> Option<ImageSpan> {
        let at = ImageOffset::new(entry & OFFSET_MASK);
        // An entry that names no table has nothing that a flag could apply to.
        let bits = if at.bytes() == 0 { entry } else { entry & L1_RESERVED };
        if bits != 0 {
            self.reserved("L1", place, entry, bits, 1);
        }
        if at.bytes() == 0 {
            return None;
        }
        if !self.header.cluster_size().aligns(at) {
            self.hiding(
                1,
                format!("l2_offset={at}: Table is not cluster aligned; L1 entry {index} corrupted"),
            );
            return None;
        }
        self.result.flags_suspect |= is_active && entry & COPIED == 0;
        Some(at.span(self.header.cluster_size().bytes()))
    }

    async fn walk_tables(&mut self, wanted: Wanted, is_active: bool) -> Result<()> {
        let mut hole = Hole::default();
        let mut some: Vec<(ImageSpan, Naming)> = Vec::new();
        for (at, naming) in wanted {
            let place = at.span(self.header.cluster_size().bytes());
            if !self.count_table(place, Kind::L2, naming.times) || hole.covers(self.image, place).await {
                continue;
            }
            some.push((place, naming));
            if some.len() == TABLES_AT_ONCE {
                self.walk_some(std::mem::take(&mut some), is_active).await?;
            }
        }
        self.walk_some(some, is_active).await
    }

    async fn walk_some(&mut self, wanted: Vec<(ImageSpan, Naming)>, is_active: bool) -> Result<()> {
        let places = wanted.iter().map(|(place, _)| place.start());
        let read = read_clusters(self.image, self.header, places).await?;
        for ((place, naming), table) in wanted.into_iter().zip(read) {
            match table {
                Ok(table) => self.walk_l2(place.start(), &naming, table.slice(), is_active),
                Err(error) => {
                    self.result.hidden = true;
                    self.unreadable(&format!("the L2 table at {}", place.start()), &error);
                }
            }
            yield_now().await;
        }
        Ok(())
    }

    fn walk_l2(&mut self, at: ImageOffset, naming: &Naming, table: &[u8], is_active: bool) {
        let times = naming.times;
        work::note(table.len() / 8);
        // As with QEMU, the first cluster of a table is never counted as fragmented.
        let mut next: Option<ImageOffset> = None;
        let words = self.entries.words();
        let cluster = self.header.cluster_size().bytes();
        let may_run = words == 1 && !self.header.has_data_file();
        let mut counted_to = 0;
        for (index, entry) in table.chunks_exact(words * 8).enumerate() {
            let pair = (be64(entry, 0), if words == 2 { be64(entry, 8) } else { 0 });
            if pair == (0, 0) || index < counted_to {
                continue; // most entries, in most tables
            }
            if may_run && let Some((run, copied)) = self.plain_run(pair.0, &table[index * 8..]) {
                // As one by one, below.
                counted_to = index + to_usize(run.len() / cluster);
                self.result.flags_suspect |= is_active && !copied;
                if is_active {
                    self.result.report.allocated_clusters += times * (run.len() / cluster);
                    if next.is_some_and(|next| next != run.start()) {
                        self.result.report.fragmented_clusters += times;
                    }
                    next = Some(run.end());
                }
                let first = self.header.cluster_size().cluster_of(run.start()).index();
                self.result.flags_suspect |=
                    self.result.references.add_run(first, run.len() / cluster, times);
                continue;
            }
            let reserved = self.entries.reserved(pair);
            if reserved != 0 {
                let place = at + (index * words * 8) as u64;
                self.reserved("L2", place, pair.0, reserved, times);
            }
            let state = self.entries.decode(pair);
            if let Ok(state) = state {
                self.check_place(at, naming, index, state);
            }
            let place = match state {
                Err(error) => {
                    let line = format!("L2 table at {at}, entry {index}: {error}");
                    match self.entries.without_place(pair) {
                        Some(without) => {
                            // Zeros, which need no place: nothing is lost with it.
                            self.errors(times, line);
                            self.mend_entry(at + (index * words * 8) as u64, without);
                        }
                        None => self.hiding(times, line),
                    }
                    continue;
                }
                Ok(ClusterState::Compressed(packed)) => {
                    if is_active {
                        self.result.report.compressed_clusters += times;
                        self.result.report.allocated_clusters += times;
                        self.result.report.fragmented_clusters += times;
                    }
                    self.count_compressed(packed, times);
                    continue;
                }
                Ok(ClusterState::Plain(units)) => units,
            };
            let Some(host) = place.host else { continue };
            if host.bytes() == 0 && words == 1 && place.zero == 1 {
                // At the start of a data file: QEMU sees zeros without a place, so it is not counted.
                continue;
            }
            self.result.flags_suspect |= is_active && !place.copied;
            if is_active {
                self.result.report.allocated_clusters += times;
                if next.is_some_and(|next| next != host) {
                    self.result.report.fragmented_clusters += times;
                }
                next = Some(host + cluster);
            }
            if !self.header.has_data_file() {
                self.count(host.span(cluster), times);
            }
        }
    }

    /// The clusters that the first of these entries and those after it name, if they are ordinary ones that lie one behind the
    /// other within the file; and whether they have the flag.
    fn plain_run(&self, word: u64, table: &[u8]) -> Option<(ImageSpan, bool)> {
        let cluster = self.header.cluster_size();
        let at = ImageOffset::new(word & OFFSET_MASK);
        let file_end = cluster.round_up(self.image.len());
        let is_plain = word & !(OFFSET_MASK | COPIED) == 0 && at.bytes() != 0 && cluster.aligns(at);
        if !is_plain || at.bytes() >= file_end {
            return None;
        }
        // As many as lie in the file, so that no sum passes the bits of a place.
        let most = to_usize((file_end - at.bytes()) >> cluster.shift());
        let wanted = (0_u64..).map(|number| word + (number << cluster.shift()));
        let entries = table.chunks_exact(8).map(|entry| be64(entry, 0));
        let count = entries.zip(wanted).take(most).take_while(|(entry, wanted)| entry == wanted).count();
        Some((at.span((count as u64) << cluster.shift()), word & COPIED != 0))
    }

    /// Counts the clusters that a compressed cluster lies in. Compressed clusters share them with one
    /// another, and have no flag. A cluster that they share with anything else may have one.
    fn count_compressed(&mut self, packed: ImageSpan, times: u64) {
        // The end is rounded up to a sector, so it may be behind a short last cluster.
        let was_suspect = self.result.flags_suspect;
        if !self.count(packed, times) {
            return;
        }
        let shared = self.header.cluster_size().clusters_in(packed).any(|cluster| {
            let compressed = self.result.compressed.add(cluster.index(), times);
            self.result.references.get(cluster.index()) > compressed
        });
        self.result.flags_suspect = was_suspect || shared;
    }

    /// Checks an entry with a data file, which holds each cluster at the guest's own offset.
    fn check_place(&mut self, at: ImageOffset, naming: &Naming, index: usize, state: ClusterState) {
        let ClusterState::Plain(units) = state else { return };
        let Some(host) = units.host.filter(|_| self.header.has_data_file()) else { return };
        let per_table = self.header.l2_reach() >> self.header.cluster_size().shift();
        // The place is right for at most one of the entries that name the table.
        let right = to_usize((host.bytes() >> self.header.cluster_size().shift()) / per_table);
        let is_right = |l1_index: usize| {
            let guest = GuestCluster::new(l1_index as u64 * per_table + index as u64);
            self.entries.check_place(guest, state)
        };
        let found = naming.indices.binary_search(&right).is_ok() && is_right(right).is_ok();
        let wrong = naming.indices.len() as u64 - u64::from(found);
        let other = naming.indices.iter().take(2).find_map(|l1_index| is_right(*l1_index).err());
        if let Some(error) = other.filter(|_| wrong > 0) {
            self.errors(wrong, format!("L2 table at {at}, entry {index}: {error}"));
        }
    }

    pub(super) async fn walk_snapshots(&mut self) -> Result<()> {
        if self.header.snapshot_count == 0 {
            return Ok(());
        }
        let mended = match snapshot::read_table_to_mend(self.header, self.image).await {
            Ok(mended) => mended,
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.hiding(1, format!("snapshot table: {}", error.chain()));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let faults = mended.faults();
        self.result.is_over_limits = !faults.is_empty();
        if !faults.is_empty() && !self.mends_snapshots {
            // As with QEMU, the check is not complete.
            self.result.hidden = true;
            self.result.report.check_errors += 1;
            (self.say)(format!("ERROR {}; `check -r all` discards that", faults.join(", ")));
            return Ok(());
        }
        for fault in faults {
            self.error(fault);
        }
        let count = mended.cut.len() as u64 + u64::from(mended.dropped);
        self.result.incomplete += count;
        // One line for all that are dropped.
        self.result.report.corruptions += u64::from(mended.dropped).saturating_sub(1);
        let table = mended.table;
        self.count_table(table.span, Kind::Snapshots, 1);
        // Tables by their places, and how often they are named: many snapshots share most of their tables.
        let mut l1s: BTreeMap<(ImageOffset, u64), u64> = BTreeMap::new();
        for (index, snapshot) in table.snapshots.iter().enumerate() {
            if snapshot.is_incomplete {
                self.result.incomplete += 1;
                self.error(format!("snapshot table entry {index} is incomplete"));
            }
            *l1s.entry((snapshot.l1.start(), snapshot.l1.len())).or_insert(0) += 1;
        }
        let mut wanted = Wanted::new();
        for ((start, len), times) in l1s {
            let l1 = start.span(len);
            if l1.is_empty() || !self.count_table(l1, Kind::L1, times) {
                continue;
            }
            let mut rest = l1;
            while !rest.is_empty() {
                let runs = self.image.runs(rest.split_at(PIECE_BYTES).0).await?;
                for run in &runs {
                    rest = rest.split_at(run.span.len()).1;
                    if !run.is_data {
                        continue;
                    }
                    for (index, place) in self.read_l1(run.span, start).await? {
                        let naming = wanted.entry(place.start()).or_default();
                        if naming.times == 0 {
                            naming.indices.push(index);
                        }
                        naming.times = naming.times.saturating_add(times);
                    }
                }
            }
        }
        self.walk_tables(wanted, false).await
    }

    pub(super) async fn walk_bitmaps(&mut self) -> Result<()> {
        let Some(directory) = self.header.bitmaps() else { return Ok(()) };
        if !self.count_table(directory.span, Kind::Bitmaps, 1) {
            return Ok(());
        }
        let bytes = self.read(directory.span).await.context(|| "can't read the bitmap directory")?;
        let bytes = bytes.slice();
        let (mut at, mut tables_bytes) = (0, 0);
        for _ in 0..directory.count {
            if at + 24 > bytes.len() {
                self.hiding(1, "the bitmap directory ends too early".to_owned());
                return Ok(());
            }
            let (offset, entries) = (be64(bytes, at), be32(bytes, at + 8));
            let (name_len, extra_len) = (usize::from(be16(bytes, at + 18)), be32(bytes, at + 20) as usize);
            at += (24 + name_len + extra_len).next_multiple_of(8);
            let table = match self.header.table(offset, u64::from(entries) * 8, "bitmap table") {
                Ok(table) if table.len() <= L1_BYTES_MAX => table,
                _ => {
                    self.hiding(1, format!("a bitmap table cannot lie at {offset:#x}"));
                    continue;
                }
            };
            tables_bytes += table.len();
            if tables_bytes > TABLES_BYTES_MAX {
                self.hiding(1, "the bitmaps' tables are larger than 256 MiB together".to_owned());
                return Ok(());
            }
            if !self.count_table(table, Kind::Bitmaps, 1) {
                continue;
            }
            let mut rest = table;
            while !rest.is_empty() {
                let (now, later) = rest.split_at(PIECE_BYTES);
                let part = self.read(now).await.context(|| "can't read a bitmap table")?;
                for entry in part.slice().chunks_exact(8) {
                    let place = ImageOffset::new(be64(entry, 0) & OFFSET_MASK);
                    if place.bytes() != 0 {
                        self.count(place.span(self.header.cluster_size().bytes()), 1);
                    }
                }
                rest = later;
            }
        }
        Ok(())
    }
}
