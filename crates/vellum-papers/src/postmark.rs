//! PostMark in a guest with ext3, generated from its parameters: the requests to the guest's disk.
//!
//! ```text
//!   partition  ├─ journal ─┤ group: bitmaps, inodes │ data ... │ group: ... │ data ...
//!
//!   a round (a commit, some seconds): new data, in order, up to 504 KiB a request ─ the journal's record
//!   each sixth round (half a minute): what metadata changed since, home, in the order of places
//! ```
//!
//! The parameters are those of the paper FVD and of its author's second set-up: files of 10 to 50 KB,
//! 1,500,000 of them, one directory. Files are laid out one behind the other, group by group, as ext3 does
//! for one directory once its own group is full; their names are spread over the blocks of the directory by a
//! hash, if it has one. A transaction is, at even odds, a read or an append, and a creation or a deletion.
//! Reads reach the disk, because the pool is many times the guest's memory; metadata is in the guest's
//! memory. There are no barriers, as in ext3 then. A round has a fixed number of files, or takes five seconds, the time
//! from one commit of ext3 to the next: then a guest on a faster image writes its metadata less often. The generator is our own: no recording of the original
//! exists.

use std::collections::BTreeSet;
use std::time::Duration;

use vellum_core::Random;
use vellum_lab::guest::Request;

const BLOCK: u64 = 4096;
/// Blocks of a group, and those at its start that are not data: bitmaps, and an inode of 128 bytes for each 8
/// KiB.
const GROUP: u64 = 32_768;
const GROUP_META: u64 = 2 + 512;
const INODES_PER_BLOCK: u64 = 32;
const JOURNAL_BLOCKS: u64 = 32_768;
/// Names in a block of the directory, three quarters full.
const NAMES_PER_BLOCK: u64 = 180;
/// What a request of virtio held: 126 pages.
const REQUEST_BLOCKS: u64 = 126;
/// Files of the paper's pool.
pub(super) const FILES: u64 = 1_500_000;
/// Its transactions.
pub(super) const TRANSACTIONS: u64 = 100_000;
const SIZES: std::ops::RangeInclusive<u64> = 10_000..=50_000;
/// Files made in a round; transactions in one. Where rounds take a time, these are those of the first.
const ROUND_FILES: u64 = 1000;
const ROUND_TRANSACTIONS: u64 = 500;
/// The time of a round, as ext3 commits where nothing else is said.
const ROUND_TIME: Duration = Duration::from_secs(5);
/// No round has more files or transactions than this many times those of the first, nor fewer than a tenth.
const ROUND_MOST: u64 = 16;
/// Rounds from one writing home of metadata to the next.
const ROUNDS_PER_CHECKPOINT: u64 = 6;

/// A file: runs of blocks, and what is used of the last one.
#[derive(Debug, Clone)]
struct File {
    runs: Vec<(u64, u64)>,
    bytes: u64,
    inode: u64,
}

/// How long a round is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounds {
    /// So many files.
    Counted,
    /// So much time.
    Timed,
}

/// The length of rounds, and when the last one began.
#[derive(Debug)]
struct Pace {
    rounds: Rounds,
    items: u64,
    first: u64,
    begun: Option<Duration>,
}

impl Pace {
    const fn new(rounds: Rounds, first: u64) -> Self {
        Self { rounds, items: first, first, begun: None }
    }

    /// How many items the round has that begins now.
    fn next(&mut self, now: Duration) -> u64 {
        let begun = self.begun.replace(now);
        if let (Rounds::Timed, Some(begun)) = (self.rounds, begun) {
            let took_millis = (now - begun).as_millis().max(1);
            let items = u128::from(self.items) * ROUND_TIME.as_millis() / took_millis;
            self.items =
                u64::try_from(items).unwrap_or(u64::MAX).clamp(self.first / 10, self.first * ROUND_MOST);
        }
        self.items
    }
}

/// A guest.
pub(super) struct PostMark {
    creations: Pace,
    transactions: Pace,
    random: Random,
    /// Where the partition begins on the disk, in bytes.
    start: u64,
    is_hashed: bool,
    /// The next block that has never been used.
    next: u64,
    inodes: u64,
    files: Vec<File>,
    directory: Vec<u64>,
    names: u64,
    journal: u64,
    rounds: u64,
    /// Metadata blocks that changed in this round, and since they were last written home.
    changed: BTreeSet<u64>,
    dirty: BTreeSet<u64>,
    /// New data of this round.
    data: Vec<(u64, u64)>,
}

impl PostMark {
    /// With its partition there; names go to any block of the directory, or (without `dir_index`) to its last
    /// one.
    pub(super) fn new(start: u64, is_hashed: bool, rounds: Rounds, seed: u64) -> Self {
        Self {
            creations: Pace::new(rounds, ROUND_FILES),
            transactions: Pace::new(rounds, ROUND_TRANSACTIONS),
            random: Random::from_seed(seed),
            start,
            is_hashed,
            // The journal has the first group for itself.
            next: GROUP + GROUP_META,
            inodes: 0,
            files: Vec::new(),
            directory: Vec::new(),
            names: 0,
            journal: 0,
            rounds: 0,
            changed: BTreeSet::new(),
            dirty: BTreeSet::new(),
            data: Vec::new(),
        }
    }

    /// How far the partition is used, as a place on the disk.
    pub(super) fn end(&self) -> u64 {
        self.start + self.next * BLOCK
    }

    /// New blocks, one behind the other; a run ends where a group does.
    fn allocate(&mut self, mut blocks: u64, runs: &mut Vec<(u64, u64)>) {
        while blocks > 0 {
            let left = GROUP - self.next % GROUP;
            let run = blocks.min(left);
            match runs.last_mut() {
                Some((at, len)) if *at + *len == self.next => *len += run,
                _ => runs.push((self.next, run)),
            }
            self.changed.insert(self.next / GROUP * GROUP);
            self.next += run;
            blocks -= run;
            if self.next.is_multiple_of(GROUP) {
                self.next += GROUP_META;
            }
        }
    }

    fn touch_name(&mut self) {
        let (any, last) = (self.random.index(self.directory.len()), self.directory.len() - 1);
        self.changed.insert(self.directory[if self.is_hashed { any } else { last }]);
    }

    fn touch_inode(&mut self, inode: u64) {
        self.changed.insert(inode);
    }

    fn create(&mut self) {
        if self.names.is_multiple_of(NAMES_PER_BLOCK) {
            let mut runs = Vec::new();
            self.allocate(1, &mut runs);
            self.directory.push(runs[0].0);
        }
        self.names += 1;
        self.touch_name();
        let group = self.next / GROUP * GROUP;
        let inode = group + 2 + self.inodes / INODES_PER_BLOCK % (GROUP_META - 2);
        self.inodes += 1;
        self.changed.insert(group + 1);
        self.touch_inode(inode);
        let bytes = SIZES.start() + self.random.below(SIZES.end() - SIZES.start() + 1);
        let mut file = File { runs: Vec::new(), bytes, inode };
        self.allocate(bytes.div_ceil(BLOCK), &mut file.runs);
        self.data.extend(&file.runs);
        self.files.push(file);
    }

    fn write(&self, at: u64, blocks: u64) -> Request {
        let len = usize::try_from(blocks * BLOCK).expect("a request is short");
        Request::Write { offset: self.start + at * BLOCK, len }
    }

    /// Runs as requests, neighbours joined.
    fn requests(&self, runs: impl IntoIterator<Item = (u64, u64)>, requests: &mut Vec<Request>) {
        let mut open: Option<(u64, u64)> = None;
        for (at, len) in runs.into_iter().chain([(u64::MAX, 0)]) {
            match &mut open {
                Some((start, blocks)) if *start + *blocks == at => *blocks += len,
                open => {
                    let (mut at, mut left) = open.replace((at, len)).unwrap_or_default();
                    while left > 0 {
                        let now = left.min(REQUEST_BLOCKS);
                        requests.push(self.write(at, now));
                        (at, left) = (at + now, left - now);
                    }
                }
            }
        }
    }

    /// What the round leaves for the disk.
    fn commit(&mut self, requests: &mut Vec<Request>) {
        let data = std::mem::take(&mut self.data);
        self.requests(data, requests);
        // A descriptor, the blocks, and the commit.
        let record = self.changed.len() as u64 + 2;
        let at = if self.journal + record > JOURNAL_BLOCKS - GROUP_META { 0 } else { self.journal };
        self.journal = at + record;
        self.requests([(GROUP_META + at, record)], requests);
        let changed = std::mem::take(&mut self.changed);
        self.dirty.extend(changed);
        self.rounds += 1;
        if self.rounds.is_multiple_of(ROUNDS_PER_CHECKPOINT) {
            let dirty = std::mem::take(&mut self.dirty);
            self.requests(dirty.into_iter().map(|block| (block, 1)), requests);
        }
    }

    /// The next files of the pool; `None` when the pool has this many.
    pub(super) fn creation_round(&mut self, pool: u64, now: Duration) -> Option<Vec<Request>> {
        let left = pool.saturating_sub(self.files.len() as u64);
        if left == 0 {
            return None;
        }
        (0..left.min(self.creations.next(now))).for_each(|_| self.create());
        let mut requests = Vec::new();
        self.commit(&mut requests);
        Some(requests)
    }

    /// Some transactions of those that are left.
    pub(super) fn transaction_round(&mut self, left: &mut u64, now: Duration) -> Vec<Request> {
        let mut requests = Vec::new();
        let count = self.transactions.next(now).min(*left);
        *left -= count;
        for _ in 0..count {
            let index = self.random.index(self.files.len());
            if self.random.one_in(2) {
                let runs = self.files[index].runs.clone();
                requests.extend(runs.into_iter().map(|(at, blocks)| self.read(at, blocks)));
            } else {
                self.append(index, &mut requests);
            }
            if self.random.one_in(2) {
                self.create();
            } else {
                let index = self.random.index(self.files.len());
                let file = self.files.swap_remove(index);
                self.touch_name();
                self.touch_inode(file.inode);
                for (at, _) in file.runs {
                    self.changed.insert(at / GROUP * GROUP);
                }
            }
        }
        self.commit(&mut requests);
        requests
    }

    fn read(&self, at: u64, blocks: u64) -> Request {
        let len = usize::try_from(blocks * BLOCK).expect("a request is short");
        Request::Read { offset: self.start + at * BLOCK, len }
    }

    /// The block at the end is read and written again, and others come behind it.
    fn append(&mut self, index: usize, requests: &mut Vec<Request>) {
        let File { runs, bytes, inode } = self.files[index].clone();
        let room = SIZES.end().saturating_sub(bytes);
        let grows = self.random.below(room + 1);
        self.touch_inode(inode);
        if bytes % BLOCK != 0 {
            let (at, len) = *runs.last().expect("a file has blocks");
            requests.push(self.read(at + len - 1, 1));
            self.data.push((at + len - 1, 1));
        }
        let more = (bytes + grows).div_ceil(BLOCK) - bytes.div_ceil(BLOCK);
        let mut new = Vec::new();
        self.allocate(more, &mut new);
        self.data.extend(&new);
        let file = &mut self.files[index];
        file.bytes += grows;
        file.runs.extend(new);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn blocks(requests: &[Request]) -> Vec<u64> {
        let of = |request: &Request| match *request {
            Request::Write { offset, len } => (offset / BLOCK..(offset + len as u64) / BLOCK).collect(),
            _ => Vec::new(),
        };
        requests.iter().flat_map(of).collect()
    }

    #[test]
    fn a_pool_is_laid_in_a_row_and_metadata_goes_home_now_and_then() {
        let mut guest = PostMark::new(0, true, Rounds::Counted, 1);
        let mut rounds = Vec::new();
        while let Some(requests) = guest.creation_round(12_345, Duration::ZERO) {
            rounds.push(requests);
        }
        assert_eq!((rounds.len(), guest.files.len(), guest.names), (13, 12_345, 12_345));
        let mut seen = HashSet::new();
        for file in &guest.files {
            let len: u64 = file.runs.iter().map(|(_, len)| len).sum();
            assert_eq!(len, file.bytes.div_ceil(BLOCK));
            for (at, len) in &file.runs {
                for block in *at..at + len {
                    assert!(seen.insert(block) && block % GROUP >= GROUP_META, "block {block}");
                }
            }
        }
        let written: HashSet<u64> = rounds.iter().flat_map(|requests| blocks(requests)).collect();
        assert!(seen.is_subset(&written), "all data is written");
        assert!(guest.dirty.len() < guest.directory.len() + 400, "two checkpoints were made");
        assert!(guest.end() > 12_345 * 30_000 && guest.end() < 12_345 * 34_000 + (256 << 20));
    }

    #[test]
    fn a_round_by_time_has_as_many_files_as_fit() {
        let seconds = Duration::from_secs;
        let mut pace = Pace::new(Rounds::Timed, 1000);
        assert_eq!(pace.next(seconds(0)), 1000);
        assert_eq!(pace.next(seconds(10)), 500, "they took twice the time");
        assert_eq!(pace.next(seconds(11)), 2500);
        assert_eq!(pace.next(seconds(11)), 16_000, "bounded");
        assert_eq!(pace.next(seconds(10_000)), 100, "bounded");
        let mut counted = Pace::new(Rounds::Counted, 1000);
        assert_eq!([counted.next(seconds(0)), counted.next(seconds(9))], [1000, 1000]);
    }

    #[test]
    fn transactions_read_what_is_there_and_keep_the_pool() {
        let mut guest = PostMark::new(1 << 30, true, Rounds::Counted, 1);
        while guest.creation_round(2000, Duration::ZERO).is_some() {}
        let end = guest.end();
        let requests = guest.transaction_round(&mut 500, Duration::ZERO);
        let reads = requests.iter().filter(|request| matches!(request, Request::Read { .. })).count();
        assert!((450..=600).contains(&reads), "one for each, two where a file lies in two runs: {reads}");
        for request in &requests {
            if let Request::Read { offset, len } = *request {
                assert!(offset >= 1 << 30 && offset + len as u64 <= guest.end() && len <= 65_536);
            }
        }
        assert!((1850..=2150).contains(&guest.files.len()) && guest.end() > end);
    }
}
