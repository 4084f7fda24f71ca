//! Guests of figure 13, as requests: Varmail, recorded; Fileserver and YCSB-A from generators of our own.
//!
//! ```text
//!   fileserver   fileserver.f: 10,000 files of 128 KiB (gamma, 1.5), 80 of 100 made before; a loop: a new file, an append of
//!                16 KiB at most, a whole read, a removal; nothing syncs
//!     ext4       files in the group of their directory, first fit; 200 MiB are written back together; a commit of the journal
//!                after every 1000 loops, then blocks of metadata in place
//!   ycsb-a       records of 1 KB, inserted in the order of a hash; then half reads, half updates, zipfian 0.99
//!     InnoDB     pages of 16 KiB, split where full; memory for 128 MiB; log of 96 MiB, a flush for four commits; pages go
//!                to the doublewrite area and, flushed, to their places
//! ```
//!
//! The papers' parameters are in their files (`fileserver.f`, YCSB's workload A). What they do not say is chosen once, here, and
//! nothing of it is fitted to a row: how many loops and records, that a guest of 2 GB reads its files from memory,
//! and MySQL's usual sizes. Bytes of applications are not made; places are.

use std::collections::{BTreeMap, BTreeSet};

use vellum_core::{Random, Result};
use vellum_lab::guest::Request;
use vellum_lab::trace::Trace;

const BLOCK: u64 = 4096;
/// The longest request that the guest's block layer makes.
const REQUEST_BYTES_MAX: u64 = 512 << 10;

/// An application.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Application {
    /// Recorded: varmail's parameters, on ext4.
    Varmail,
    /// Fileserver of Filebench.
    Fileserver,
    /// Workload A of YCSB.
    YcsbA,
}

impl Application {
    pub(crate) const ALL: [Self; 3] = [Self::Varmail, Self::Fileserver, Self::YcsbA];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Varmail => "Varmail",
            Self::Fileserver => "Fileserver",
            Self::YcsbA => "YCSB-A",
        }
    }

    /// Its requests, one part in `part` of them where it is made.
    pub(crate) fn requests(self, part: u64, seed: u64) -> Result<Asked> {
        Ok(match self {
            Self::Varmail => {
                let trace = Trace::recorded("varmail_16t")?;
                let is_work = |(phase, _): &(Option<String>, Request)| phase.as_deref() == Some("w");
                let (work, before): (Vec<_>, Vec<_>) = trace.requests.into_iter().partition(is_work);
                let requests =
                    |all: Vec<(Option<String>, Request)>| all.into_iter().map(|(_, one)| one).collect();
                Asked { before: requests(before), work: requests(work) }
            }
            Self::Fileserver => fileserver(part, seed),
            Self::YcsbA => ycsb(part, seed),
        })
    }
}

/// What an application asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    /// While its files are made, or its records inserted.
    pub(crate) before: Vec<Request>,
    pub(crate) work: Vec<Request>,
}

impl Asked {
    pub(crate) fn all(self) -> impl Iterator<Item = Request> {
        self.before.into_iter().chain(self.work)
    }
}

/// Writes and reads of a guest's block layer.
#[derive(Default)]
struct Sent(Vec<Request>);

impl Sent {
    fn each(at: u64, bytes: u64, mut send: impl FnMut(u64, usize)) {
        for offset in (at..at + bytes).step_by(usize::try_from(REQUEST_BYTES_MAX).expect("512 KiB")) {
            let len = REQUEST_BYTES_MAX.min(at + bytes - offset);
            send(offset, usize::try_from(len).expect("at most 512 KiB"));
        }
    }

    fn write(&mut self, at: u64, bytes: u64) {
        Self::each(at, bytes, |offset, len| self.0.push(Request::Write { offset, len }));
    }

    fn read(&mut self, at: u64, bytes: u64) {
        Self::each(at, bytes, |offset, len| self.0.push(Request::Read { offset, len }));
    }

    fn flush(&mut self) {
        self.0.push(Request::Flush);
    }

    /// Writes these blocks, neighbours together.
    fn write_blocks(&mut self, blocks: impl IntoIterator<Item = u64>) {
        let mut run: Option<(u64, u64)> = None;
        for block in blocks {
            match &mut run {
                Some((_, end)) if *end == block => *end += 1,
                _ => {
                    if let Some((start, end)) = run.replace((block, block + 1)) {
                        self.write(start * BLOCK, (end - start) * BLOCK);
                    }
                }
            }
        }
        if let Some((start, end)) = run {
            self.write(start * BLOCK, (end - start) * BLOCK);
        }
    }
}

/// A number above 0 and up to 1.
fn unit(random: &mut Random) -> f64 {
    (random.below(1 << 53) + 1) as f64 / (1u64 << 53) as f64
}

const FILES: u64 = 10_000;
const FILE_BYTES_MEAN: f64 = 131_072.0;
const APPEND_BYTES_MAX: u64 = 16 << 10;
const DIRECTORY_WIDTH: u64 = 20;
const LOOPS: u64 = 20_000;
/// Groups of ext4 among which the directories are.
const GROUPS: u64 = 24;
const GROUP_BLOCKS: u64 = 32_768;
/// Where the group of groups begins, in blocks: bitmaps of blocks, of inodes, tables of inodes, then data.
const FIRST_BLOCK: u64 = 1 << 18;
const INODE_TABLES_AT: u64 = FIRST_BLOCK + 32;
const INODES_OF_A_BLOCK: u64 = 16;
const DATA_AT: u64 = FIRST_BLOCK + (1 << 14);
/// The journal, in blocks.
const JOURNAL_AT: u64 = 1 << 24;
const JOURNAL_BLOCKS: u64 = 32_768;
/// So much that is dirty is written back: a tenth of the guest's memory. This and the commits shrink with the part that is
/// made, so that as many files as in the whole are gone before they are written.
const DIRTY_BLOCKS_MAX: u64 = 51_200;
const LOOPS_OF_A_COMMIT: u64 = 1000;

/// Gamma of shape 1.5 with the mean of a file, in bytes; one block at least.
fn file_bytes(random: &mut Random) -> u64 {
    let (first, second, turn) = (unit(random), unit(random), unit(random));
    let cosine = (std::f64::consts::TAU * turn).cos();
    let value = (-first.ln() - second.ln() * cosine * cosine) * FILE_BYTES_MEAN / 1.5;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some megabytes")]
    let bytes = value as u64;
    bytes.max(1)
}

struct File {
    bytes: u64,
    /// Its blocks, in the order of the file.
    blocks: Vec<u64>,
    inode: u64,
}

/// ext4, as far as places are concerned.
struct Ext4 {
    free: BTreeSet<u64>,
    files: Vec<File>,
    inodes: Vec<u64>,
    dirty: Vec<u64>,
    is_dirty: BTreeSet<u64>,
    dirty_max: u64,
    metadata: BTreeSet<u64>,
    journal: u64,
    sent: Sent,
}

impl Ext4 {
    fn new(files: u64, dirty_max: u64) -> Self {
        let free = (DATA_AT..DATA_AT + GROUPS * GROUP_BLOCKS).collect();
        Self {
            free,
            files: Vec::new(),
            inodes: (0..files * 2).rev().collect(),
            dirty: Vec::new(),
            is_dirty: BTreeSet::new(),
            dirty_max,
            metadata: BTreeSet::new(),
            journal: 0,
            sent: Sent::default(),
        }
    }

    /// Takes so many free blocks from here on, as few runs as come first; from the beginning where there are no more.
    fn take(&mut self, from: u64, blocks: u64) -> Vec<u64> {
        if blocks == 0 {
            return Vec::new();
        }
        let count = usize::try_from(blocks).expect("a file fits memory");
        // The first run that has room for all.
        let mut run: Vec<u64> = Vec::new();
        for block in self.free.range(from..).chain(self.free.range(..from)) {
            if run.last().is_some_and(|last| *last + 1 != *block) {
                run.clear();
            }
            run.push(*block);
            if run.len() == count {
                break;
            }
        }
        if run.len() < count {
            run = self.free.range(from..).chain(self.free.range(..from)).take(count).copied().collect();
        }
        for block in &run {
            self.free.remove(block);
            self.touch_bitmap(*block);
        }
        run
    }

    fn touch_bitmap(&mut self, block: u64) {
        self.metadata.insert(FIRST_BLOCK + (block - DATA_AT) / GROUP_BLOCKS);
    }

    fn make_dirty(&mut self, block: u64) {
        if self.is_dirty.insert(block) {
            self.dirty.push(block);
        }
    }

    /// The blocks of metadata that a change of a file concerns: its inode's, and its directory's.
    fn touch(&mut self, inode: u64) {
        self.metadata.insert(INODE_TABLES_AT + inode / INODES_OF_A_BLOCK);
        self.metadata.insert(INODE_TABLES_AT + 4096 + inode / DIRECTORY_WIDTH);
    }

    fn create(&mut self, random: &mut Random) {
        let bytes = file_bytes(random);
        let inode = self.inodes.pop().expect("there are more inodes than files");
        let group = (inode / DIRECTORY_WIDTH) % GROUPS;
        let blocks = self.take(DATA_AT + group * GROUP_BLOCKS, bytes.div_ceil(BLOCK));
        blocks.iter().for_each(|block| self.make_dirty(*block));
        self.metadata.insert(FIRST_BLOCK + 16);
        self.touch(inode);
        self.files.push(File { bytes, blocks, inode });
    }

    fn append(&mut self, random: &mut Random) {
        let index = random.index(self.files.len());
        let more = 1 + random.below(APPEND_BYTES_MAX);
        let (bytes, inode) = (self.files[index].bytes, self.files[index].inode);
        let last = *self.files[index].blocks.last().expect("a file has a block");
        let missing = (bytes + more).div_ceil(BLOCK) - bytes.div_ceil(BLOCK);
        if !bytes.is_multiple_of(BLOCK) {
            self.make_dirty(last);
        }
        for block in self.take(last + 1, missing) {
            self.make_dirty(block);
            self.files[index].blocks.push(block);
        }
        self.files[index].bytes += more;
        self.touch(inode);
    }

    fn remove(&mut self, random: &mut Random) {
        let file = self.files.swap_remove(random.index(self.files.len()));
        for block in &file.blocks {
            self.free.insert(*block);
            // What is gone is not written any more.
            self.is_dirty.remove(block);
            self.touch_bitmap(*block);
        }
        self.metadata.insert(FIRST_BLOCK + 16);
        self.touch(file.inode);
        self.inodes.push(file.inode);
    }

    fn write_back_if_due(&mut self) {
        if self.is_dirty.len() as u64 >= self.dirty_max {
            self.write_back();
        }
    }

    /// File by file, in the order in which they became dirty.
    fn write_back(&mut self) {
        let mut is_dirty = std::mem::take(&mut self.is_dirty);
        let dirty = std::mem::take(&mut self.dirty);
        self.sent.write_blocks(dirty.into_iter().filter(|block| is_dirty.remove(block)));
    }

    /// The journal's commit, data first, and metadata in place.
    fn commit(&mut self) {
        self.write_back();
        let metadata = std::mem::take(&mut self.metadata);
        let blocks = metadata.len() as u64 + 1;
        for block in 0..=blocks {
            let at = (JOURNAL_AT + (self.journal + block) % JOURNAL_BLOCKS) * BLOCK;
            if block == blocks {
                self.sent.flush();
            }
            match self.sent.0.last_mut() {
                Some(Request::Write { offset, len })
                    if *offset + *len as u64 == at && (*len as u64) < REQUEST_BYTES_MAX =>
                {
                    *len += usize::try_from(BLOCK).expect("4 KiB");
                }
                _ => self.sent.write(at, BLOCK),
            }
        }
        self.sent.flush();
        self.journal += blocks + 1;
        self.sent.write_blocks(metadata);
    }
}

fn fileserver(part: u64, seed: u64) -> Asked {
    let (files, loops) = (FILES / part, LOOPS / part);
    let loops_of_a_commit = (LOOPS_OF_A_COMMIT / part).max(1);
    let mut random = Random::from_seed(seed);
    let mut ext4 = Ext4::new(files, DIRTY_BLOCKS_MAX / part);
    for _ in 0..files * 8 / 10 {
        ext4.create(&mut random);
        ext4.write_back_if_due();
    }
    ext4.commit();
    let before = std::mem::take(&mut ext4.sent.0);
    for number in 0..loops {
        ext4.create(&mut random);
        ext4.append(&mut random);
        ext4.remove(&mut random);
        ext4.write_back_if_due();
        if number % loops_of_a_commit == loops_of_a_commit - 1 {
            ext4.commit();
        }
    }
    ext4.commit();
    Asked { before, work: ext4.sent.0 }
}

const RECORDS: u64 = 200_000;
const PAGE_BYTES: u64 = 16 << 10;
const RECORDS_OF_A_PAGE: usize = 14;
const POOL_PAGES: u64 = 8192;
/// Pages that are written together.
const BATCH_PAGES: usize = 64;
const DOUBLEWRITE_AT: u64 = 1 << 30;
const TABLE_AT: u64 = 4 << 30;
const REDO_AT: u64 = 2 << 30;
const REDO_BYTES: u64 = 96 << 20;
/// What has been dirty for so much of the log goes home.
const REDO_AGE_MAX: u64 = 72 << 20;
const REDO_BYTES_OF_A_CHANGE: u64 = 1200;
const COMMITS_OF_A_FLUSH: u64 = 4;
const ZIPFIAN: f64 = 0.99;

#[derive(Default, Clone)]
struct Page {
    records: Vec<u32>,
    /// When it was used; nothing while it is not in memory.
    used: Option<u64>,
    /// Where the log was when it became dirty.
    dirty: Option<u64>,
    is_on_disk: bool,
}

/// InnoDB, as far as places are concerned.
struct InnoDb {
    pages: Vec<Page>,
    page_of: Vec<u32>,
    order: BTreeMap<u64, u32>,
    flush_list: BTreeSet<(u64, u32)>,
    pool_pages: usize,
    clock: u64,
    redo: u64,
    written: u64,
    commits: u64,
    sent: Sent,
}

impl InnoDb {
    fn page(&mut self, number: u32) -> &mut Page {
        &mut self.pages[number as usize]
    }

    /// The page is in memory from here on.
    fn touch(&mut self, number: u32) {
        self.clock += 1;
        let clock = self.clock;
        let page = self.page(number);
        match page.used.replace(clock) {
            Some(used) => {
                self.order.remove(&used);
            }
            None => {
                if page.is_on_disk {
                    self.sent.read(TABLE_AT + u64::from(number) * PAGE_BYTES, PAGE_BYTES);
                }
                if self.order.len() >= self.pool_pages {
                    self.evict();
                }
            }
        }
        self.order.insert(clock, number);
    }

    fn evict(&mut self) {
        let victim = *self.order.first_key_value().expect("as many as there is room for").1;
        if self.page(victim).dirty.is_some() {
            // The oldest ones of memory go together.
            let oldest: Vec<u32> = self.order.values().take(BATCH_PAGES * 4).copied().collect();
            let dirty = oldest.into_iter().filter(|page| self.pages[*page as usize].dirty.is_some());
            let batch: Vec<u32> = dirty.take(BATCH_PAGES).collect();
            self.write_pages(batch);
        }
        self.order.pop_first();
        self.page(victim).used = None;
    }

    fn write_pages(&mut self, mut batch: Vec<u32>) {
        if batch.is_empty() {
            return;
        }
        self.write_redo();
        batch.sort_unstable();
        self.sent.write(DOUBLEWRITE_AT, batch.len() as u64 * PAGE_BYTES);
        self.sent.flush();
        for number in batch {
            self.sent.write(TABLE_AT + u64::from(number) * PAGE_BYTES, PAGE_BYTES);
            let page = self.page(number);
            page.is_on_disk = true;
            if let Some(since) = page.dirty.take() {
                self.flush_list.remove(&(since, number));
            }
        }
        self.sent.flush();
    }

    fn change(&mut self, number: u32) {
        self.touch(number);
        let redo = self.redo;
        let page = self.page(number);
        if page.dirty.is_none() {
            page.dirty = Some(redo);
            self.flush_list.insert((redo, number));
        }
    }

    fn commit(&mut self) {
        self.redo += REDO_BYTES_OF_A_CHANGE;
        self.commits += 1;
        if self.commits.is_multiple_of(COMMITS_OF_A_FLUSH) {
            self.write_redo();
        }
        if self.flush_list.first().is_some_and(|(since, _)| since + REDO_AGE_MAX < self.redo) {
            let batch = self.flush_list.iter().take(BATCH_PAGES).map(|(_, page)| *page).collect();
            self.write_pages(batch);
        }
    }

    /// The blocks of the log that are new or have grown, and a flush.
    fn write_redo(&mut self) {
        if self.written == self.redo {
            return;
        }
        let blocks = self.written / BLOCK..self.redo.div_ceil(BLOCK);
        self.sent.write_blocks(blocks.map(|block| REDO_AT / BLOCK + block % (REDO_BYTES / BLOCK)));
        self.sent.flush();
        self.written = self.redo;
    }

    /// Puts a record beside another one; a page that is full is split.
    fn insert(&mut self, record: u32, beside: u32) {
        let mut number = self.page_of[beside as usize];
        self.change(number);
        if self.page(number).records.len() == RECORDS_OF_A_PAGE {
            let new = u32::try_from(self.pages.len()).expect("pages are few");
            let moved = self.page(number).records.split_off(RECORDS_OF_A_PAGE / 2);
            moved.iter().for_each(|record| self.page_of[*record as usize] = new);
            self.pages.push(Page { records: moved, ..Page::default() });
            self.change(new);
            number = self.page_of[beside as usize];
        }
        self.page(number).records.push(record);
        self.page_of[record as usize] = number;
        self.commit();
    }
}

/// Ranks by YCSB's generator (Gray et al., "Quickly generating billion-record synthetic databases").
struct Zipfian {
    items: f64,
    zeta: f64,
    alpha: f64,
    eta: f64,
}

impl Zipfian {
    fn new(items: u64) -> Self {
        let zeta = |count: u64| (1..=count).map(|rank| (rank as f64).powf(-ZIPFIAN)).sum::<f64>();
        let (all, two) = (zeta(items), zeta(2));
        let items = items as f64;
        let eta = (1.0 - (2.0 / items).powf(1.0 - ZIPFIAN)) / (1.0 - two / all);
        Self { items, zeta: all, alpha: 1.0 / (1.0 - ZIPFIAN), eta }
    }

    fn rank(&self, random: &mut Random) -> u32 {
        let value = unit(random);
        let scaled = value * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5f64.powf(ZIPFIAN) {
            return 1;
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below the items")]
        let rank = (self.items * (self.eta * value - self.eta + 1.0).powf(self.alpha)) as u32;
        rank
    }
}

fn ycsb(part: u64, seed: u64) -> Asked {
    let records = u32::try_from(RECORDS / part).expect("records are few");
    let mut random = Random::from_seed(seed);
    let mut engine = InnoDb {
        pages: vec![Page::default()],
        page_of: vec![0; records as usize],
        order: BTreeMap::new(),
        flush_list: BTreeSet::new(),
        pool_pages: usize::try_from(POOL_PAGES / part).expect("pages fit memory").max(BATCH_PAGES),
        clock: 0,
        redo: 0,
        written: 0,
        commits: 0,
        sent: Sent::default(),
    };
    for record in 0..records {
        let beside = u32::try_from(random.below(u64::from(record).max(1))).expect("a record");
        engine.insert(record, beside);
    }
    let before = std::mem::take(&mut engine.sent.0);
    let zipfian = Zipfian::new(u64::from(records));
    for _ in 0..records {
        let number = engine.page_of[zipfian.rank(&mut random).min(records - 1) as usize];
        if random.below(2) == 0 {
            engine.touch(number);
        } else {
            engine.change(number);
            engine.commit();
        }
    }
    while !engine.flush_list.is_empty() {
        let batch = engine.flush_list.iter().take(BATCH_PAGES).map(|(_, page)| *page).collect();
        engine.write_pages(batch);
    }
    Asked { before, work: engine.sent.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fileserver_writes_whole_blocks_and_commits_its_journal() {
        let requests: Vec<_> = Application::Fileserver.requests(20, 1).unwrap().all().collect();
        let (mut bytes, mut flushes) = (0, 0);
        for request in &requests {
            match *request {
                Request::Write { offset, len } => {
                    assert!(offset.is_multiple_of(BLOCK) && (len as u64).is_multiple_of(BLOCK));
                    assert!(len as u64 <= REQUEST_BYTES_MAX, "{len}");
                    bytes += len as u64;
                }
                Request::Flush => flushes += 1,
                _ => panic!("it reads from memory"),
            }
        }
        // 400 files before and 1000 in loops, of 128 KiB and half a block each; metadata comes on top.
        let files = 1400 * (131_072 + 2048);
        assert!((files * 9 / 10..files * 12 / 10).contains(&bytes), "{bytes} of {files}");
        // Two for each commit: the files before, each 50 loops, and the last.
        assert_eq!(flushes, 2 * (1 + 20 + 1));
        assert_eq!(requests, Application::Fileserver.requests(20, 1).unwrap().all().collect::<Vec<_>>());
    }

    #[test]
    fn a_database_writes_each_page_twice_and_reads_what_has_left_memory() {
        let requests: Vec<_> = Application::YcsbA.requests(20, 1).unwrap().all().collect();
        let (mut doubled, mut pages, mut reads) = (0, 0, 0);
        // A batch is two of the longest requests.
        let doublewrite = DOUBLEWRITE_AT..DOUBLEWRITE_AT + BATCH_PAGES as u64 * PAGE_BYTES;
        for request in &requests {
            match *request {
                Request::Write { offset, len } if doublewrite.contains(&offset) => doubled += len as u64,
                Request::Write { offset, len } if offset >= TABLE_AT => pages += len as u64,
                Request::Read { .. } => reads += 1,
                _ => {}
            }
        }
        assert_eq!(doubled, pages);
        // 10,000 records in pages that are between half full and full.
        assert!(pages >= 10_000 / 14 * PAGE_BYTES && reads > 0, "{pages}, {reads}");
    }

    #[test]
    fn zipfian_ranks_are_skewed_as_the_law_says() {
        let (zipfian, mut random) = (Zipfian::new(1000), Random::from_seed(1));
        let ranks: Vec<u32> = (0..100_000).map(|_| zipfian.rank(&mut random)).collect();
        let first = ranks.iter().filter(|rank| **rank == 0).count();
        // 1 / zeta(1000, 0.99) is 0.130.
        assert!((12_500..13_600).contains(&first), "{first}");
        assert!(ranks.iter().all(|rank| *rank < 1000));
    }
}
