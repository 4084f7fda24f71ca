//! Checking: everything the image names is counted, and the counts are compared with what the refcounts say.
//!
//! ```text
//!   walk       header, L1 → L2 → data, snapshots (table, L1 → L2 → data), bitmaps      references per cluster
//!   compare    refcount table → blocks                                                  refcount per cluster
//!                refcount < references   corruption: the cluster could be given away while in use
//!                refcount > references   leak: space is lost, nothing else
//!              a cluster that is a table and something else: corruption, whatever its refcount is
//!              "copied" flags of the active tables against references = 1
//! ```
//!
//! Repair ([`Repair`]) writes refcounts and flags where they lie when the refcount structure itself is sound; otherwise a
//! new structure is written behind everything else and the header is switched to it. It never touches what maps guest
//! data, but for the flags, so guest bytes cannot be lost by it. Afterwards the image is walked again.
//!
//! 1. Nothing is allocated in proportion to what a header claims: references are counted for clusters inside the file
//!    only, in chunks that exist when something is in them.
//! 2. A repair may be cut off anywhere: until its last step, the switch of the header or the clearing of the dirty bit,
//!    running it again does the same work again.
//! 3. A part of the mapping that cannot be read, or is damaged, hides what it names. Then nothing that seems unused may
//!    be given away: refcounts are only raised, flags only cleared, and a new structure is not written at all.

use std::collections::BTreeSet;

use vellum_core::{
    Buffer, Context, Error, ErrorKind, GuestCluster, ImageOffset, ImageSpan, LocalFuture, Result,
    SharedStorage, Storage, try_join_all,
};

use super::entry::{ClusterState, Entries};
use super::header::Header;
use super::layout::*;
use super::prepare::give_back_tail;
use super::refcount;
use super::references::{GROUP, Kind, References, Tables, busy_groups};
use super::snapshot;

/// What may be repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Repair {
    /// Nothing is written.
    #[default]
    Nothing,
    /// Refcounts that are too high are lowered.
    Leaks,
    /// Refcounts and flags are made right.
    All,
}

/// What a check found. Counts are of what is left after the repair.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Parts of the image that could not be read.
    pub check_errors: u64,
    /// Contradictions that can lose data.
    pub corruptions: u64,
    /// Clusters in use by nobody.
    pub leaks: u64,
    /// Corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// Leaks that were repaired.
    pub leaks_fixed: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Those with a place in the image.
    pub allocated_clusters: u64,
    /// Those of them that do not follow the one before.
    pub fragmented_clusters: u64,
    /// Those of them that are compressed.
    pub compressed_clusters: u64,
    /// Where the last cluster in use ends, in bytes.
    pub image_end_offset: u64,
}

impl CheckReport {
    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.check_errors == 0 && self.corruptions == 0 && self.leaks == 0
    }
}

/// L2 tables read at once while walking.
const TABLES_AT_ONCE: usize = 8;

/// Checks an image, and repairs it when asked. `say` gets a line for each thing found, worded as `qemu-img check` does.
///
/// # Errors
/// When the header's tables cannot be read or a repair cannot be written. What is wrong *inside* the image is not an
/// error but a count.
pub async fn check(
    header: &Header,
    image: &SharedStorage,
    repair: Repair,
    say: &mut dyn FnMut(String),
) -> Result<CheckReport> {
    if header.needs_replay() {
        return Err(header.replay_first(image.name()).context(format!("can't check {}", image.name())));
    }
    check_tables(header, image, repair, say).await
}

/// The same, whatever a journal holds.
async fn check_tables(
    header: &Header,
    image: &SharedStorage,
    repair: Repair,
    say: &mut dyn FnMut(String),
) -> Result<CheckReport> {
    let first = Walk::run(header, &**image, say).await?;
    if repair == Repair::Nothing || (first.report.is_clean() && !header.is_dirty() && !header.is_corrupt()) {
        return Ok(first.report);
    }
    let mut header = header.clone();
    let before = first.report.clone();
    let mut fix = Fix { header: &mut header, image: &**image, walk: first, repair, say };
    fix.run().await?;
    let mut silent = |_: String| {};
    let mut after = Walk::run(&header, &**image, &mut silent).await?.report;
    after.corruptions_fixed = before.corruptions.saturating_sub(after.corruptions);
    after.leaks_fixed = before.leaks.saturating_sub(after.leaks);
    if repair == Repair::All && after.check_errors == 0 && after.corruptions == 0 {
        if header.is_dirty() {
            let journal = header.journal.filter(|_| header.needs_replay());
            let keep = journal.map_or(ImageOffset::ZERO.span(0), |(extension, _)| extension.run);
            give_back_tail(&header, &**image, keep).await?;
        }
        clear_marks(&mut header, &**image).await?;
    }
    Ok(after)
}

/// Repairs an image that was not closed, so that it can be written.
pub(crate) async fn repair_dirty(header: &Header, image: &SharedStorage) -> Result<()> {
    let report = check_tables(header, image, Repair::All, &mut |_| {}).await?;
    if report.check_errors == 0 && report.corruptions == 0 {
        return Ok(());
    }
    let mut first = None;
    let again = Header::read(&**image).await?;
    check_tables(&again, image, Repair::Nothing, &mut |line| first = first.take().or(Some(line))).await?;
    Err(Error::corrupt(format!(
        "{} corruptions and {} unreadable parts cannot be repaired (first: {}): see `vellum check`",
        report.corruptions,
        report.check_errors,
        first.unwrap_or_default()
    )))
}

async fn clear_marks(header: &mut Header, image: &dyn Storage) -> Result<()> {
    image.flush().await?;
    if header.version() >= 3 && (header.is_dirty() || header.is_corrupt()) {
        let bits = header.incompatible & !(incompatible::DIRTY | incompatible::CORRUPT);
        header.set_features(bits, header.autoclear);
        image.write(ImageOffset::ZERO, header.first_sector()).await?;
        image.flush().await?; // commit point of the repair
    }
    Ok(())
}

/// One pass over the image.
struct Walk<'a> {
    header: &'a Header,
    image: &'a dyn Storage,
    entries: Entries,
    say: &'a mut dyn FnMut(String),
    result: Walked,
}

/// What a pass found out.
struct Walked {
    report: CheckReport,
    /// References by everything but the refcount structure.
    references: References,
    /// Those of them that name tables.
    tables: Tables,
    /// The refcount structure's own clusters.
    structure: References,
    /// The structure cannot be repaired where it lies.
    structure_broken: bool,
    /// Something that names clusters could not be looked at: there may be more references than were counted.
    hidden: bool,
    table: Vec<u64>,
    /// A flag of the active tables may be wrong.
    flags_suspect: bool,
}

impl Walked {
    /// Clusters of a refcount block that may have a refcount or a reference, and some of their neighbours.
    fn in_use(&self, first: u64, block: &[u8], order: u32) -> impl Iterator<Item = u64> + use<> {
        let groups = busy_groups(first, block, order, [&self.references, &self.structure]);
        groups.into_iter().flat_map(|first| first..first + GROUP as u64)
    }
}

impl Walk<'_> {
    async fn run(header: &Header, image: &dyn Storage, say: &mut dyn FnMut(String)) -> Result<Walked> {
        let result = Walked {
            report: CheckReport {
                total_clusters: header.cluster_size().count_for(header.size()),
                ..CheckReport::default()
            },
            references: References::default(),
            tables: Tables::default(),
            structure: References::default(),
            structure_broken: false,
            hidden: false,
            table: Vec::new(),
            flags_suspect: header.snapshot_count > 0,
        };
        let mut walk = Walk { header, image, entries: Entries::of(header), say, result };
        walk.count_table(ImageOffset::ZERO.span(header.cluster_size().bytes()), Kind::Header);
        walk.walk_l1(header.l1_span(), true).await?;
        walk.walk_snapshots().await?;
        walk.walk_bitmaps().await?;
        walk.find_overlaps();
        walk.walk_structure().await?;
        walk.compare().await?;
        if walk.result.flags_suspect || walk.result.report.corruptions > 0 {
            walk.check_flags().await?;
        }
        Ok(walk.result)
    }

    fn error(&mut self, line: String) {
        self.result.report.corruptions += 1;
        (self.say)(format!("ERROR {line}"));
    }

    fn unreadable(&mut self, what: &str, error: &Error) {
        self.result.report.check_errors += 1;
        (self.say)(format!("ERROR: I/O error in {what}: {}", error.chain()));
    }

    /// Something that names clusters is damaged.
    fn hiding(&mut self, line: String) {
        self.result.hidden = true;
        self.error(line);
    }

    /// Counts a reference to each cluster of a table; false when it leaves the file, and what it names is not to be seen.
    fn count_table(&mut self, span: ImageSpan, kind: Kind) -> bool {
        let is_inside = self.count(span);
        self.result.hidden |= !is_inside;
        if is_inside {
            let clusters = self.header.cluster_size().clusters_in(span);
            clusters.for_each(|cluster| self.result.tables.add(cluster.index(), kind));
        }
        is_inside
    }

    /// A table that is also guest data, or two tables at once: what the guest writes would change the mapping. No
    /// refcount makes that right, and no repair can tell which of the two is meant.
    fn find_overlaps(&mut self) {
        for (cluster, kind) in self.result.tables.shared(&self.result.references) {
            self.error(format!("cluster {cluster} is mapped, but overlaps metadata ({})", kind.name()));
        }
    }

    /// Counts a reference to each cluster of the run; false when the run leaves the file.
    fn count(&mut self, span: ImageSpan) -> bool {
        let Some(clusters) = self.inside(span) else {
            // What lies wholly behind the end uses no cluster; what begins before it does.
            self.result.hidden |= span.start().bytes() < self.image.len();
            return false;
        };
        clusters.for_each(|cluster| self.result.references.add(cluster));
        true
    }

    fn inside(&mut self, span: ImageSpan) -> Option<std::ops::Range<u64>> {
        let shift = self.header.cluster_size().shift();
        let file_end = self.header.cluster_size().round_up(self.image.len());
        if span.end().bytes() > file_end && !span.is_empty() {
            self.error(format!(
                "offset={}: the region of {} bytes passes the end of the file",
                span.start(),
                span.len()
            ));
            return None;
        }
        let end = if span.is_empty() {
            span.start().bytes() >> shift
        } else {
            ((span.end().bytes() - 1) >> shift) + 1
        };
        Some(span.start().bytes() >> shift..end)
    }

    async fn read(&self, span: ImageSpan) -> Result<Buffer> {
        self.image.read(span.start(), Buffer::for_overwrite(to_usize(span.len()))).await
    }

    /// Counts an L1 table and all it leads to.
    async fn walk_l1(&mut self, span: ImageSpan, is_active: bool) -> Result<()> {
        if span.is_empty() || !self.count_table(span, Kind::L1) {
            return Ok(());
        }
        let table = match self.read(span).await {
            Ok(table) => table,
            Err(error) => {
                self.result.hidden = true;
                self.unreadable("the L1 table", &error);
                return Ok(());
            }
        };
        let table = table.slice();
        let mut wanted: Vec<(usize, ImageSpan)> = Vec::new();
        for index in 0..table.len() / 8 {
            let entry = be64(table, index * 8);
            if let Some(l2) = self.l2_place(index, entry, is_active) {
                wanted.push((index, l2));
            }
            if wanted.len() == TABLES_AT_ONCE || (index + 1) * 8 == table.len() {
                self.walk_tables(std::mem::take(&mut wanted), is_active).await?;
            }
        }
        Ok(())
    }

    /// Where an L1 entry's table lies, when it is one that can be read; counts it.
    fn l2_place(&mut self, index: usize, entry: u64, is_active: bool) -> Option<ImageSpan> {
        let at = ImageOffset::new(entry & OFFSET_MASK);
        if entry & L1_RESERVED != 0 {
            self.hiding(format!("found L1 entry with reserved bits set: {entry:x}"));
        }
        if at.bytes() == 0 {
            return None;
        }
        if !self.header.cluster_size().aligns(at) {
            self.hiding(format!("l2_offset={at}: Table is not cluster aligned; L1 entry {index} corrupted"));
            return None;
        }
        self.result.flags_suspect |= is_active && entry & COPIED == 0;
        let l2 = at.span(self.header.cluster_size().bytes());
        self.count_table(l2, Kind::L2).then_some(l2)
    }

    async fn walk_tables(&mut self, wanted: Vec<(usize, ImageSpan)>, is_active: bool) -> Result<()> {
        let image = self.image;
        let reads: Vec<LocalFuture<'_, Result<Result<Buffer>>>> = wanted
            .iter()
            .map(|(_, span)| {
                let read = image.read(span.start(), Buffer::for_overwrite(to_usize(span.len())));
                Box::pin(async move { Ok(read.await) }) as LocalFuture<'_, _>
            })
            .collect();
        for ((l1_index, span), table) in wanted.into_iter().zip(try_join_all(reads).await?) {
            match table {
                Ok(table) => self.walk_l2(l1_index, span, table.slice(), is_active),
                Err(error) => {
                    self.result.hidden = true;
                    self.unreadable(&format!("the L2 table at {}", span.start()), &error);
                }
            }
        }
        Ok(())
    }

    fn walk_l2(&mut self, l1_index: usize, at: ImageSpan, table: &[u8], is_active: bool) {
        // As with QEMU, the first cluster of a table is never counted as fragmented.
        let mut next: Option<ImageOffset> = None;
        let words = self.entries.words();
        let cluster = self.header.cluster_size().bytes();
        let first = (l1_index * (table.len() / (words * 8))) as u64;
        for (index, entry) in table.chunks_exact(words * 8).enumerate() {
            let pair = (be64(entry, 0), if words == 2 { be64(entry, 8) } else { 0 });
            if pair == (0, 0) {
                continue; // most of them, in most tables
            }
            let state = self.entries.decode(pair);
            if let Ok(state) = state
                && let Err(error) = self.entries.check_place(GuestCluster::new(first + index as u64), state)
            {
                self.error(format!("L2 table at {}, entry {index}: {error}", at.start()));
            }
            let place = match state {
                Err(error) => {
                    self.hiding(format!("L2 table at {}, entry {index}: {error}", at.start()));
                    continue;
                }
                Ok(ClusterState::Compressed(packed)) => {
                    if is_active {
                        self.result.report.compressed_clusters += 1;
                        self.result.report.allocated_clusters += 1;
                        self.result.report.fragmented_clusters += 1;
                    }
                    // The end is rounded up to a sector, which may lie behind a short last cluster.
                    self.count(packed);
                    continue;
                }
                Ok(ClusterState::Plain(units)) => units,
            };
            let Some(host) = place.host else { continue };
            if host.bytes() == 0 && words == 1 && place.zero == 1 {
                // At the start of a data file: to QEMU zeros without a place, so not counted.
                continue;
            }
            self.result.flags_suspect |= is_active && !place.copied;
            if is_active {
                self.result.report.allocated_clusters += 1;
                if next.is_some_and(|next| next != host) {
                    self.result.report.fragmented_clusters += 1;
                }
                next = Some(host + cluster);
            }
            if !self.header.has_data_file() {
                self.count(host.span(cluster));
            }
        }
    }

    async fn walk_snapshots(&mut self) -> Result<()> {
        if self.header.snapshot_count == 0 {
            return Ok(());
        }
        let table = match snapshot::read_table(self.header, self.image).await {
            Ok(table) => table,
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.hiding(format!("snapshot table: {}", error.chain()));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        self.count_table(table.span, Kind::Snapshots);
        for snapshot in &table.snapshots {
            self.walk_l1(snapshot.l1, false).await?;
        }
        Ok(())
    }

    async fn walk_bitmaps(&mut self) -> Result<()> {
        let Some(directory) = self.header.bitmaps() else { return Ok(()) };
        if !self.count_table(directory.span, Kind::Bitmaps) {
            return Ok(());
        }
        let bytes = self.read(directory.span).await.context(|| "can't read the bitmap directory")?;
        let bytes = bytes.slice();
        let mut at = 0;
        for _ in 0..directory.count {
            if at + 24 > bytes.len() {
                self.hiding("the bitmap directory ends too early".to_owned());
                return Ok(());
            }
            let (offset, entries) = (be64(bytes, at), be32(bytes, at + 8));
            let (name_len, extra_len) = (usize::from(be16(bytes, at + 18)), be32(bytes, at + 20) as usize);
            at += (24 + name_len + extra_len).next_multiple_of(8);
            let table = match self.header.table(offset, u64::from(entries) * 8, "bitmap table") {
                Ok(table) if table.len() <= L1_BYTES_MAX => table,
                _ => {
                    self.hiding(format!("a bitmap table cannot lie at {offset:#x}"));
                    continue;
                }
            };
            if !self.count_table(table, Kind::Bitmaps) {
                continue;
            }
            let table = self.read(table).await.context(|| "can't read a bitmap table")?;
            for entry in table.slice().chunks_exact(8) {
                let place = ImageOffset::new(be64(entry, 0) & OFFSET_MASK);
                if place.bytes() != 0 {
                    self.count(place.span(self.header.cluster_size().bytes()));
                }
            }
        }
        Ok(())
    }

    async fn walk_structure(&mut self) -> Result<()> {
        let span = self.header.refcount_table;
        match self.inside(span) {
            Some(clusters) => clusters.for_each(|cluster| self.result.structure.add(cluster)),
            None => self.result.structure_broken = true,
        }
        let table = self.read(span).await.context(|| "can't read the refcount table")?;
        let cluster = self.header.cluster_size();
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
                let inside = usable.then(|| self.inside(at.span(cluster.bytes()))).flatten();
                match inside {
                    Some(clusters) => clusters.for_each(|cluster| self.result.structure.add(cluster)),
                    None => {
                        self.result.structure_broken = true;
                        kept = 0;
                    }
                }
            }
            self.result.table.push(kept);
        }
        // A block that anything else uses, a second block included, cannot be trusted nor written.
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
        }
        Ok(())
    }

    /// Compares references with refcounts, block by block.
    async fn compare(&mut self) -> Result<()> {
        let per_block = (self.header.cluster_size().bytes() * 8) >> self.header.refcount_order;
        let mut counted = BTreeSet::new();
        for block in 0..self.result.table.len() {
            let at = ImageOffset::new(self.result.table[block]);
            if at.bytes() == 0 {
                continue;
            }
            counted.insert(block as u64);
            let bytes = match self.read(at.span(self.header.cluster_size().bytes())).await {
                Ok(bytes) => bytes,
                Err(error) => {
                    self.unreadable(&format!("the refcount block at {at}"), &error);
                    continue;
                }
            };
            let (bytes, order, first) = (bytes.slice(), self.header.refcount_order, block as u64 * per_block);
            for cluster in self.result.in_use(first, bytes, order) {
                self.compare_one(cluster, refcount::read(bytes, order, cluster - first));
            }
        }
        // Clusters in use without a block.
        let mut without: Vec<u64> = self
            .result
            .references
            .each()
            .chain(self.result.structure.each())
            .filter(|cluster| !counted.contains(&(cluster / per_block)))
            .collect();
        without.sort_unstable();
        without.dedup();
        for cluster in without {
            self.result.structure_broken = true;
            self.compare_one(cluster, 0);
        }
        Ok(())
    }

    fn compare_one(&mut self, cluster: u64, refcount: u64) {
        let references = self.result.references.get(cluster) + self.result.structure.get(cluster);
        if refcount > 0 {
            let end = (cluster + 1) << self.header.cluster_size().shift();
            self.result.report.image_end_offset = self.result.report.image_end_offset.max(end);
        }
        if refcount < references {
            self.error(format!("cluster {cluster} refcount={refcount} reference={references}"));
        } else if refcount > references {
            self.result.report.leaks += 1;
            (self.say)(format!("Leaked cluster {cluster} refcount={refcount} reference={references}"));
        }
    }

    /// Compares the "copied" flags of the active tables with the references.
    async fn check_flags(&mut self) -> Result<()> {
        let wrong = wrong_flags(self.header, self.image, &self.result).await?;
        for flag in wrong {
            let kind = if flag.is_table { "L2" } else { "data" };
            self.error(format!(
                "OFLAG_COPIED {kind} cluster: entry={:x} refcount={}",
                flag.old, flag.references
            ));
        }
        Ok(())
    }
}

/// A table entry whose "copied" flag is wrong.
struct WrongFlag {
    at: ImageOffset,
    old: u64,
    new: u64,
    references: u64,
    is_table: bool,
}

async fn wrong_flags(header: &Header, image: &dyn Storage, walked: &Walked) -> Result<Vec<WrongFlag>> {
    let entries = Entries::of(header);
    let cluster = header.cluster_size();
    let mut wrong = Vec::new();
    let span = header.l1_span();
    if span.end().bytes() > image.len() {
        return Ok(wrong);
    }
    let l1 = image.read(span.start(), Buffer::for_overwrite(to_usize(span.len()))).await?;
    let mut look = |at: ImageOffset, old: u64, host: ImageOffset, is_table: bool| {
        let count = walked.references.get(cluster.cluster_of(host).index());
        let new = match count {
            0 | 1 if walked.hidden => old, // there may be more references
            1 => old | COPIED,
            _ => old & !COPIED,
        };
        if old != new {
            wrong.push(WrongFlag { at, old, new, references: count, is_table });
        }
    };
    for (index, entry) in l1.slice().chunks_exact(8).enumerate() {
        let entry = be64(entry, 0);
        let table = ImageOffset::new(entry & OFFSET_MASK);
        let in_file = table.bytes() < image.len();
        if table.bytes() == 0 || !cluster.aligns(table) || !in_file {
            continue;
        }
        look(span.start() + index as u64 * 8, entry, table, true);
        let Ok(l2) = image.read(table, Buffer::for_overwrite(to_usize(cluster.bytes()))).await else {
            continue;
        };
        let len = entries.words() * 8;
        for (i, words) in l2.slice().chunks_exact(len).enumerate() {
            let pair = (be64(words, 0), if len == 16 { be64(words, 8) } else { 0 });
            let Ok(ClusterState::Plain(units)) = entries.decode(pair) else { continue };
            if let Some(host) =
                units.host.filter(|host| !header.has_data_file() && host.bytes() < image.len())
            {
                look(table + (i * len) as u64, pair.0, host, false);
            }
        }
    }
    Ok(wrong)
}

/// A repair, after a walk.
struct Fix<'a> {
    header: &'a mut Header,
    image: &'a dyn Storage,
    walk: Walked,
    repair: Repair,
    say: &'a mut dyn FnMut(String),
}

impl Fix<'_> {
    async fn run(&mut self) -> Result<()> {
        if self.repair == Repair::All {
            if self.walk.structure_broken && self.walk.hidden {
                return Err(Error::corrupt(
                    "the refcounts cannot be rebuilt: parts of the mapping are damaged or unreadable, and what they \
                     name would count as free",
                ));
            }
            self.fix_flags().await?;
            if self.walk.structure_broken {
                return self.rebuild().await;
            }
        }
        self.fix_counts().await?;
        self.image.flush().await
    }

    async fn fix_flags(&mut self) -> Result<()> {
        for flag in wrong_flags(self.header, self.image, &self.walk).await? {
            (self.say)(format!("Repairing OFLAG_COPIED of entry {:x} at {}", flag.old, flag.at));
            self.image.write(flag.at, Buffer::copy_of(&flag.new.to_be_bytes())).await?;
        }
        Ok(())
    }

    /// Writes the right refcounts into the blocks that there are. None is lowered when there may be references that were
    /// not seen; and nothing is written to blocks that may be something else.
    async fn fix_counts(&mut self) -> Result<()> {
        let cluster = self.header.cluster_size().bytes();
        let (order, per_block) = (self.header.refcount_order, (cluster * 8) >> self.header.refcount_order);
        if self.walk.structure_broken {
            (self.say)("The refcount structure must be rebuilt first; no leak is repaired".to_owned());
            return Ok(());
        }
        for (block, at) in self.walk.table.iter().enumerate().filter(|(_, at)| **at != 0) {
            let at = ImageOffset::new(*at);
            let Ok(bytes) = self.image.read(at, Buffer::for_overwrite(to_usize(cluster))).await else {
                continue;
            };
            let mut bytes = bytes.slice().to_vec();
            let mut changed = false;
            let first = block as u64 * per_block;
            for n in self.walk.in_use(first, &bytes, order) {
                let index = n - first;
                let old = refcount::read(&bytes, order, index);
                let new = self.walk.references.get(n) + self.walk.structure.get(n);
                let may = if old > new { !self.walk.hidden } else { self.repair == Repair::All };
                if old != new && may && (order == 6 || new < 1 << (1u32 << order)) {
                    (self.say)(format!("Repairing cluster {n} refcount={old} reference={new}"));
                    refcount::write(&mut bytes, order, index, new);
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
        // The structure lies behind everything, and is counted by blocks of its own.
        let first = references.last().map_or(1, |last| last + 1).max(cluster.count_for(self.image.len()));
        let (table_clusters, end) = loop {
            let entries = blocks.last().map_or(1, |last| last + 1);
            let table_clusters = cluster.count_for(entries * 8);
            // Asked before the table's own clusters are counted: in a very long file they would be millions.
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
                        "cluster {n} has {count} references, too many for the width"
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
        self.image.flush().await // commit point: the new structure counts
    }
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("it fits memory")
}
