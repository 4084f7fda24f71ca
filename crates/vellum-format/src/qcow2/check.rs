//! Checking: everything that the image names is counted, and the counts are compared with the refcounts.
//!
//! ```text
//!   walk       header, L1 → L2 → data, snapshots (table, L1 → L2 → data), bitmaps     references per cluster
//!   compare    refcount table → blocks                                                  refcount per cluster
//!                refcount < references   corruption: the cluster could be given away while in use
//!                refcount > references   leak: it wastes space and does no other harm
//!              a cluster that is a table and something else: corruption, whatever its refcount
//!              "copied" flags of the active tables against refcount = 1
//!              reserved bits of table entries against zero
//! ```
//!
//! The classification of errors, and so the exit code, is that of `qemu-img check`, with these exceptions:
//!
//! - A nonzero refcount of a cluster behind the end of the file counts as a leak, which QEMU ignores. It
//!   wastes no space now, but the cluster is never used, and later allocations have to avoid it. `-r leaks`
//!   lowers it.
//! - An entry of the refcount table that names an impossible place is a corruption: exit code 2. QEMU tries
//!   to read there if the highest bit is set, and gives up with 1. It does the same with `-r leaks` where the
//!   refcounts have to be rebuilt. The check is complete here.
//! - An extended entry whose bitmap contradicts itself is left unchanged, with everything it says. QEMU's
//!   repair makes zeros of it.
//!
//! The snapshot table is written anew when nothing else is wrong: entries that are too short for version 3 are completed, extra
//! data is cut to the most that is read (1024 bytes), and entries behind the most that there may be (65,536, in 64 MiB) are
//! discarded, with what only they name. No program can read such snapshots. Without a repair such a table is an error of the
//! check, as there.
//!
//! Repair ([`Repair`]) writes refcounts and flags in place when the refcount structure itself is sound.
//! Otherwise it writes a new structure behind everything else and switches the header to it. It never touches
//! what maps guest data, except for flags and reserved bits, so it cannot lose guest bytes. Flags are judged
//! by the stored refcounts, so they are repaired after the refcounts. Afterwards the image is walked again.
//!
//! 1. Nothing is allocated in proportion to what a header claims: references are counted only for clusters
//!    inside the file, in chunks that exist only when something is in them.
//! 2. A repair may be interrupted anywhere. Until its last step, the switch of the header or the clearing of
//!    the dirty bit, running it again does the same work again.
//! 3. Work is in proportion to the tables that exist. A table is read once however many entries and snapshots
//!    name it (what is found in it counts as often as the table is named). Holes are skipped, and a claim of
//!    more tables than a real image can have is not followed. After each table other tasks get their turn.
//! 4. An image that was not closed, with nothing wrong but refcounts and flags, is repaired with one pass
//!    over its tables (and one over the L2 tables if flags are suspect). Tables are read in small groups, and
//!    each is written at once. The image is not walked again.
//! 5. A part of the mapping that cannot be read, or is damaged, hides what it names. Then nothing that seems
//!    unused may be given away: refcounts are only raised, flags are only cleared, and a new structure is not
//!    written at all.
//! 6. A table whose cluster is also named as anything else may be guest data that a wrong entry calls a
//!    table. No repair writes an entry in it, and the references that the entry should have named are hidden
//!    (5). An image that was not closed is then left as it is.

mod counts;
mod flags;
mod mapping;
mod repair;

use std::collections::BTreeSet;

use vellum_core::{
    Buffer, Context, Error, ImageOffset, ImageSpan, LocalFuture, Result, SharedStorage, Storage, try_join_all,
};

use super::entry::Entries;
use super::header::Header;
use super::journal::recover::replay;
use super::layout::*;
use super::references::{GROUP, Kind, References, Tables, busy_groups};
use super::snapshot_table::complete;
use super::tail::give_back_tail;
use crate::hash::{HashMap, HashSet};
use crate::report::{CheckReport, Recovery, Repair};
use crate::truth::settle;
use repair::Fix;

/// At most this many L2 tables are read at once during a walk.
const TABLES_AT_ONCE: usize = 8;
/// At most this many bytes of an L1 table, or of a bitmap's, are read at once.
const PIECE_BYTES: u64 = 1 << 20;
/// One repair clears bits of at most this many entries. The rest is left for the next.
const MENDED_MAX: usize = 1 << 20;

/// Checks an image, and repairs it when asked. `say` gets a line for each finding, worded as by `qemu-img
/// check`.
///
/// # Errors
/// When the header's tables cannot be read or a repair cannot be written. Faults *inside* the image are not
/// errors but counts.
pub async fn check(
    header: &Header,
    image: &SharedStorage,
    repair: Repair,
    say: &mut dyn FnMut(String),
) -> Result<CheckReport> {
    if header.needs_replay() {
        let context = || format!("can't check {}", image.name());
        if repair == Repair::Nothing {
            return Err(header.replay_first(image.name())).context(context);
        }
        // A repair mends faults of the image, and an unreplayed journal is the first of them.
        let recovery = recover(image).await.context(context)?;
        say(format!("Replayed the journal: {} records", recovery.records));
        return check_tables(&Header::read(&**image).await?, image, (repair, repair == Repair::All), say)
            .await;
    }
    check_tables(header, image, (repair, repair == Repair::All), say).await
}

/// As above, without a look at the journal, and perhaps without discarding any snapshots.
async fn check_tables(
    header: &Header,
    image: &SharedStorage,
    (repair, mends_snapshots): (Repair, bool),
    say: &mut dyn FnMut(String),
) -> Result<CheckReport> {
    if repair != Repair::Nothing {
        settle(&**image).await?; // a table that is right only in a cache would not be repaired
    }
    let first = Walk::run(header, &**image, mends_snapshots, say).await?;
    let is_sound = first.report.is_clean() && !header.is_dirty() && !header.is_corrupt();
    if repair == Repair::Nothing || (is_sound && !header.has_unknown_autoclear()) {
        return Ok(first.report);
    }
    let mut header = header.clone();
    let before = first.report.clone();
    let mut fix = Fix { header: &mut header, image: &**image, walk: first, repair, say, is_whole: true };
    fix.run().await?;
    let mut silent = |_: String| {};
    let mut walked = Walk::run(&header, &**image, mends_snapshots, &mut silent).await?;
    let is_mere_table = walked.report.corruptions == walked.incomplete && walked.report.check_errors == 0;
    if repair == Repair::All && walked.incomplete > 0 && is_mere_table {
        say("Repairing the snapshot table".to_owned());
        complete(header, image).await?;
        header = Header::read(&**image).await?;
        walked = Walk::run(&header, &**image, mends_snapshots, &mut silent).await?;
    }
    let corruptions_fixed = before.corruptions.saturating_sub(walked.report.corruptions);
    let leaks_fixed = before.leaks.saturating_sub(walked.report.leaks);
    // A table over the limits that stays is not read by others, nor by the next check.
    if mends_snapshots && walked.is_over_limits {
        walked = Walk::run(&header, &**image, false, &mut silent).await?;
    }
    let mut after = walked.report;
    (after.corruptions_fixed, after.leaks_fixed) = (corruptions_fixed, leaks_fixed);
    if repair == Repair::All && after.check_errors == 0 && after.corruptions == 0 {
        finish(&mut header, &**image).await?;
    } else if header.has_unknown_autoclear() {
        image.write(ImageOffset::ZERO, header.first_sector()).await?;
        image.flush().await?;
    }
    Ok(after)
}

/// Replays the journal of an image that was not closed ([`Header::needs_replay`]), and repairs the image when
/// the journal asks for that. Opening for writing does this automatically.
///
/// # Errors
/// `Corrupt` when the journal or the data that it counts on is not what was once flushed, and errors of the
/// storage.
pub async fn recover(image: &SharedStorage) -> Result<Recovery> {
    replay(image, async |header| repair_dirty(header, image).await).await
}

/// Repairs an image that was not closed, so that it can be written.
pub(crate) async fn repair_dirty(header: &Header, image: &SharedStorage) -> Result<()> {
    if repair::mend_counts(header, image).await? {
        return Ok(());
    }
    let report = check_tables(header, image, (Repair::All, false), &mut |_| {}).await?;
    if report.check_errors == 0 && report.corruptions == 0 {
        return Ok(());
    }
    let mut first = None;
    let again = Header::read(&**image).await?;
    let mut say = |line| first = first.take().or(Some(line));
    check_tables(&again, image, (Repair::Nothing, false), &mut say).await?;
    Err(Error::corrupt(format!(
        "{} corruptions and {} unreadable parts cannot be repaired (first: {}): see `vellum check`",
        report.corruptions,
        report.check_errors,
        first.unwrap_or_default()
    )))
}

/// Clears the marks, because nothing is wrong any more.
async fn finish(header: &mut Header, image: &dyn Storage) -> Result<()> {
    if header.is_dirty() {
        let journal = header.journal.filter(|_| header.needs_replay());
        let keep = journal.map_or(ImageOffset::ZERO.span(0), |(extension, _)| extension.run);
        give_back_tail(header, image, keep).await?;
    }
    clear_marks(header, image).await
}

async fn clear_marks(header: &mut Header, image: &dyn Storage) -> Result<()> {
    image.flush().await?;
    let has_marks = header.is_dirty() || header.is_corrupt() || header.has_unknown_autoclear();
    if header.version() >= 3 && has_marks {
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
    /// A table of snapshots that is over the limits is seen as a repair will leave it.
    mends_snapshots: bool,
    say: &'a mut dyn FnMut(String),
    result: Walked,
}

/// The results of a pass.
struct Walked {
    report: CheckReport,
    /// References by everything but the refcount structure.
    references: References,
    /// Those of them by compressed clusters, which share clusters of the image with one another.
    compressed: References,
    /// Those of them that name tables.
    tables: Tables,
    /// The clusters of the refcount structure itself.
    structure: References,
    /// The structure cannot be repaired in place.
    structure_broken: bool,
    /// Something that names clusters could not be read, or may not be valid: there may be more references
    /// than were counted.
    hidden: bool,
    /// Clusters of tables that are also used as something else: nothing is written there.
    contested: HashSet<u64>,
    /// The first such overlap outside the refcount structure, which could be rebuilt.
    overlap: Option<String>,
    table: Vec<u64>,
    /// The stored refcounts of clusters in use whose refcount is wrong.
    stored: HashMap<u64, u64>,
    /// The indexes of blocks with a wrong refcount, and how many clusters have one that is too low.
    wrong_blocks: BTreeSet<usize>,
    low_counts: u64,
    /// A flag of the active tables may be wrong.
    flags_suspect: bool,
    /// Corruptions that are only wrong flags.
    wrong_flags: u64,
    /// Corruptions that are only entries of the snapshot table without what version 3 requires, or over the limits.
    incomplete: u64,
    /// The snapshot table is over the limits.
    is_over_limits: bool,
    /// Table entries to repair, with their new values: without reserved bits, and without an impossible place
    /// where nothing is lost.
    mended: Vec<(ImageOffset, u64)>,
}

impl Walked {
    /// The stored refcount of a cluster in use.
    fn refcount(&self, cluster: u64) -> u64 {
        let right = self.references.get(cluster) + self.structure.get(cluster);
        self.stored.get(&cluster).copied().unwrap_or(right)
    }

    /// Whether the entry at this place may be something else. A repair then leaves it unchanged.
    fn is_contested(&self, header: &Header, entry: ImageOffset) -> bool {
        self.contested.contains(&header.cluster_size().cluster_of(entry).index())
    }

    /// Clusters of a refcount block that may have a refcount or a reference, and some clusters beside them.
    fn in_use(&self, first: u64, block: &[u8], order: u32) -> impl Iterator<Item = u64> + use<> {
        let groups = busy_groups(first, block, order, [&self.references, &self.structure]);
        groups.into_iter().flat_map(|first| first..first + GROUP as u64)
    }
}

impl<'a> Walk<'a> {
    async fn run(
        header: &Header,
        image: &dyn Storage,
        mends_snapshots: bool,
        say: &mut dyn FnMut(String),
    ) -> Result<Walked> {
        let mut walk = Walk::counting(header, image, mends_snapshots, say).await?;
        let suspect = walk.result.flags_suspect || !walk.result.stored.is_empty();
        if suspect || walk.result.report.corruptions > 0 {
            walk.check_flags().await?;
        }
        Ok(walk.result)
    }

    /// Does everything except the flags, which are judged by the counts.
    async fn counting(
        header: &'a Header,
        image: &'a dyn Storage,
        mends_snapshots: bool,
        say: &'a mut dyn FnMut(String),
    ) -> Result<Self> {
        let result = Walked {
            report: CheckReport {
                total_clusters: header.cluster_size().count_for(header.size()),
                ..CheckReport::default()
            },
            references: References::default(),
            compressed: References::default(),
            tables: Tables::default(),
            structure: References::default(),
            structure_broken: false,
            hidden: false,
            contested: HashSet::default(),
            overlap: None,
            table: Vec::new(),
            stored: HashMap::default(),
            wrong_blocks: BTreeSet::new(),
            low_counts: 0,
            flags_suspect: header.snapshot_count > 0,
            wrong_flags: 0,
            incomplete: 0,
            is_over_limits: false,
            mended: Vec::new(),
        };
        let mut walk = Walk { header, image, entries: Entries::of(header), mends_snapshots, say, result };
        walk.count_table(ImageOffset::ZERO.span(header.cluster_size().bytes()), Kind::Header, 1);
        walk.walk_active().await?;
        walk.walk_snapshots().await?;
        walk.walk_bitmaps().await?;
        if let Some(keys) = header.key_area() {
            walk.count_table(keys, Kind::Keys, 1);
        }
        walk.find_overlaps();
        walk.walk_structure().await?;
        walk.compare().await?;
        Ok(walk)
    }

    fn error(&mut self, line: String) {
        self.errors(1, line);
    }

    /// As above, for a table that is named more than once.
    fn errors(&mut self, times: u64, line: String) {
        let report = &mut self.result.report;
        report.corruptions = report.corruptions.saturating_add(times);
        (self.say)(match times {
            1 => format!("ERROR {line}"),
            _ => format!("ERROR {line} ({times} times)"),
        });
    }

    fn unreadable(&mut self, what: &str, error: &Error) {
        self.result.report.check_errors += 1;
        (self.say)(format!("ERROR: I/O error in {what}: {}", error.chain()));
    }

    /// Reports damage in something that names clusters.
    fn hiding(&mut self, times: u64, line: String) {
        self.result.hidden = true;
        self.errors(times, line);
    }

    /// Counts a reference to each cluster of a table. False when the table extends past the end of the file,
    /// so that what it names cannot be seen.
    fn count_table(&mut self, span: ImageSpan, kind: Kind, times: u64) -> bool {
        let is_inside = self.count(span, times);
        self.result.hidden |= !is_inside;
        if is_inside {
            let clusters = self.header.cluster_size().clusters_in(span);
            clusters.for_each(|cluster| self.result.tables.add(cluster.index(), kind, times));
        }
        is_inside
    }

    /// Finds tables that are also guest data, and clusters that are two tables at once: guest writes there
    /// would change the mapping. No refcount makes that right, and no repair can tell which of the two is
    /// meant.
    fn find_overlaps(&mut self) {
        for (cluster, kind) in self.result.tables.shared(&self.result.references) {
            let line = format!("cluster {cluster} is mapped, but overlaps metadata ({})", kind.name());
            self.result.contested.insert(cluster);
            self.result.overlap.get_or_insert_with(|| line.clone());
            self.hiding(1, line);
        }
    }

    /// Reports reserved bits in an entry that names clusters. They do not change its meaning.
    fn reserved(&mut self, what: &str, at: ImageOffset, entry: u64, bits: u64, times: u64) {
        self.errors(times, format!("found {what} entry with reserved bits set: {entry:x}"));
        self.mend_entry(at, entry & !bits);
    }

    /// Lets a repair write this entry. Its meaning to the guest stays the same.
    fn mend_entry(&mut self, at: ImageOffset, entry: u64) {
        if self.result.mended.len() < MENDED_MAX {
            self.result.mended.push((at, entry));
        }
    }

    /// Counts references to each cluster of the run. False when the run extends past the end of the file.
    fn count(&mut self, span: ImageSpan, times: u64) -> bool {
        let Some(clusters) = self.inside(span, times) else {
            // A run wholly behind the end uses no cluster; one that begins before the end does.
            self.result.hidden |= span.start().bytes() < self.image.len();
            return false;
        };
        for cluster in clusters {
            self.result.flags_suspect |= self.result.references.add(cluster, times) > 1;
        }
        true
    }

    fn inside(&mut self, span: ImageSpan, times: u64) -> Option<std::ops::Range<u64>> {
        let shift = self.header.cluster_size().shift();
        let file_end = self.header.cluster_size().round_up(self.image.len());
        if span.end().bytes() > file_end && !span.is_empty() {
            let (start, len) = (span.start(), span.len());
            self.errors(
                times,
                format!("offset={start}: the region of {len} bytes passes the end of the file"),
            );
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

    /// Compares the "copied" flags of the active tables with the refcounts.
    async fn check_flags(&mut self) -> Result<()> {
        let Self { header, image, say, result, .. } = self;
        let mut on_wrong = |flag: &flags::WrongFlag| {
            let kind = if flag.is_table { "L2" } else { "data" };
            say(format!(
                "ERROR OFLAG_COPIED {kind} cluster: entry={:x} refcount={}",
                flag.old, flag.refcount
            ));
        };
        let wrong = flags::visit(header, *image, result, false, &mut on_wrong).await?;
        result.wrong_flags = wrong;
        result.report.corruptions = result.report.corruptions.saturating_add(wrong);
        Ok(())
    }
}

/// The clusters at these places, read at once.
async fn read_clusters(
    image: &dyn Storage,
    header: &Header,
    places: impl Iterator<Item = ImageOffset>,
) -> Result<Vec<Result<Buffer>>> {
    let len = to_usize(header.cluster_size().bytes());
    let read = |at| {
        let read = image.read(at, Buffer::for_overwrite(len));
        Box::pin(async move { Ok(read.await) }) as LocalFuture<'_, _>
    };
    try_join_all(places.map(read)).await
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("it fits memory")
}
