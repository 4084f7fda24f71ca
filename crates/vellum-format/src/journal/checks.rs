//! The checksums by which recovery tells whether data arrived, and which writes may overwrite a sector that
//! has one.
//!
//! ```text
//!   fresh sectors published   ──► gathered in the open transaction                 value c1
//!   … more than 4 MiB of data, or than a record holds
//!                            ──► not checked: flushed before the record is written (the *fence*)
//!   overwritten while open    ──► both values count while the write is in flight   c1 or c2, then c2
//!   sealed                    ──► in the record; an overwrite waits
//!   verified                  ──► forgotten
//! ```
//!
//! 1. Runs of checks do not overlap, and no run crosses the end of a cluster.
//! 2. A check is listed before the mapping leads to its sector, so a writer that overwrites the sector sees
//!    the check.
//! 3. Behind a fence there are no checks, and every overwrite is allowed. The flush makes the bytes at the
//!    time of the seal durable, and newer bytes are just as good. All data of a transaction has been written
//!    before it is sealed.
//! 4. When several writes of one sector ran at the same time, all their values count until the transaction is
//!    verified.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use vellum_core::{BlockSize, Buffer, ImageOffset, ImageSpan};

use super::Journal;
use super::full::sectors_of;
use super::record::{Item, SECTOR, SECTOR_LEN};
use crate::state::lock;

/// Checksums of adjacent sectors, and the place of the first one.
pub(crate) type SectorChecks = (ImageOffset, Vec<u32>);

/// A sector has at most this many values.
const VALUES_MAX: usize = 8;
/// The bytes that a second value takes in a record.
const OTHER_BYTES: u64 = 24;
/// A transaction gathers at most this many bytes of checks, enough for 4 MiB of data. Beyond that, a flush
/// before the record costs less than reading all the data once more to compute them.
const CHECK_BYTES_MAX: u64 = 32 << 10;
/// An overwrite larger than this waits for a commit that verifies instead.
const REPLACED_BYTES_MAX: usize = 256 << 10;

/// The open transaction: what the journal gathers between two seals.
pub(super) struct OpenTransaction {
    /// The sequence of its record, the next one.
    sequence: u64,
    /// By place.
    checks: BTreeMap<u64, Vec<u32>>,
    /// How many sectors have a check.
    sectors: usize,
    /// Sectors that are being overwritten, with the values that they may get.
    others: BTreeMap<u64, Others>,
    pub(super) zeros: Vec<ImageSpan>,
    /// Sectors that go through the journal.
    full: BTreeSet<u64>,
    /// None of its data is checked.
    is_fenced: bool,
    /// Bytes of copies of the disk below that may join it.
    filled: u64,
}

#[derive(Default)]
struct Others {
    values: SmallVec<[u32; 2]>,
    under_way: u32,
}

impl Default for OpenTransaction {
    fn default() -> Self {
        Self {
            sequence: 1,
            checks: BTreeMap::new(),
            sectors: 0,
            others: BTreeMap::new(),
            zeros: Vec::new(),
            full: BTreeSet::new(),
            is_fenced: false,
            filled: 0,
        }
    }
}

impl OpenTransaction {
    pub(super) fn is_empty(&self) -> bool {
        self.checks.is_empty() && self.zeros.is_empty() && self.full.is_empty() && !self.is_fenced
    }

    pub(super) fn is_fenced(&self) -> bool {
        self.is_fenced
    }

    /// No copy of the disk below is in it.
    pub(super) fn no_copies(&mut self) {
        self.filled = 0;
    }

    /// The bytes that checks and second values will take in the record.
    pub(super) fn check_bytes(&self) -> u64 {
        self.sectors as u64 * 4 + self.others.len() as u64 * 48
    }

    /// The most that second values alone will take.
    fn other_bytes(&self) -> u64 {
        self.others.values().map(|others| others.values.len() as u64 * OTHER_BYTES).sum()
    }

    /// The bytes of guest data that the record will hold.
    pub(super) fn full_bytes(&self) -> u64 {
        self.full.len() as u64 * SECTOR
    }

    /// Takes the sequence of what was gathered, its items, and the sectors whose data is to be added. The
    /// next transaction begins.
    pub(super) fn take(&mut self) -> (u64, Vec<Item>, BTreeSet<u64>) {
        let next = Self { sequence: self.sequence + 1, ..Self::default() };
        let sealed = std::mem::replace(self, next);
        let mut items: Vec<Item> = sealed.zeros.into_iter().map(Item::Zero).collect();
        let checks = sealed.checks.into_iter();
        items.extend(checks.map(|(at, crcs)| Item::Check { at: ImageOffset::new(at), crcs }));
        for (at, others) in sealed.others {
            let other = |crc| Item::Other { at: ImageOffset::new(at), crc };
            items.extend(others.values.into_iter().map(other));
        }
        (sealed.sequence, items, sealed.full)
    }
}

/// Runs of sectors whose checks recovery may have to verify: start, then end and transaction.
#[derive(Default)]
pub(super) struct Unverified {
    runs: Mutex<BTreeMap<u64, (u64, u64)>>,
    /// Whether there are any runs. Read without the lock.
    any: AtomicBool,
}

impl Unverified {
    fn overlapping(&self, span: ImageSpan) -> SmallVec<[(u64, u64, u64); 4]> {
        if !self.any.load(Ordering::Acquire) {
            return SmallVec::new();
        }
        // Part of a sector is written as a whole sector.
        let (start, end) =
            (span.start().bytes() / SECTOR * SECTOR, span.end().bytes().next_multiple_of(SECTOR));
        let runs = lock(&self.runs);
        let back = runs.range(..end).rev().take_while(|(_, (run_end, _))| *run_end > start);
        back.map(|(at, (run_end, sequence))| (*at, *run_end, *sequence)).collect()
    }
}

/// Whether bytes may be overwritten in place.
pub(crate) enum Overwrite<'a> {
    /// They may be overwritten now.
    Now,
    /// They may be overwritten now. The check is replaced afterwards.
    Replacing(Replacing<'a>),
    /// The journal has taken the bytes, except for these parts, which may be overwritten in place.
    Taken(Vec<ImageSpan>),
    /// Not yet: see [`Journal::must_wait`].
    Later,
}

/// Checks of the open transaction that are being replaced.
pub(crate) struct Replacing<'a> {
    journal: &'a Journal,
    sequence: u64,
    sectors: Vec<Replaced>,
}

/// One sector whose check is being replaced.
struct Replaced {
    at: u64,
    crc: u32,
    /// How many values there were before, if no other write of the sector was in flight. Those earlier writes
    /// have ended, so this one lands after them.
    alone_after: Option<usize>,
}

impl Replacing<'_> {
    /// Reports that the write has ended. If it failed, old and new values both keep counting. They also keep
    /// counting if this is never called, because the write may still happen.
    pub(crate) fn ended(self, is_done: bool) {
        self.journal.replacing.fetch_sub(1, Ordering::AcqRel);
        let mut open = lock(&self.journal.open);
        if open.sequence != self.sequence {
            return; // sealed with all values
        }
        let OpenTransaction { checks, others, .. } = &mut *open;
        for Replaced { at, crc, alone_after } in self.sectors {
            let Some(other) = others.get_mut(&at) else { continue };
            other.under_way -= 1;
            if !is_done || alone_after.is_none_or(|before| other.values.len() != before + 1) {
                continue;
            }
            // The run may have been freed in the meantime.
            let run = checks.range_mut(..=at).next_back();
            if let Some(value) = run.and_then(|(first, crcs)| crcs.get_mut(index_of(*first, at))) {
                *value = crc;
            }
            others.remove(&at);
        }
    }
}

fn index_of(first: u64, at: u64) -> usize {
    usize::try_from((at - first) / SECTOR).expect("runs are shorter than memory")
}

impl Journal {
    /// Adds the checksums of guest data that the open transaction counts on. The caller holds the gate, and
    /// publishes the data before it releases the gate.
    pub(crate) fn add_checks(&self, checks: &[SectorChecks]) {
        if checks.is_empty() {
            return;
        }
        let longest = self.record_max();
        let mut open = lock(&self.open);
        if open.is_fenced {
            return;
        }
        let mut unverified = lock(&self.unverified.runs);
        for (at, crcs) in checks {
            open.sectors += crcs.len();
            unverified.insert(at.bytes(), (at.bytes() + crcs.len() as u64 * SECTOR, open.sequence));
            open.checks.insert(at.bytes(), crcs.clone());
        }
        self.unverified.any.store(true, Ordering::Release);
        drop(unverified);
        if open.sectors as u64 * 4 > CHECK_BYTES_MAX.min(longest / 4) {
            self.fence_open(&mut open);
        }
    }

    /// Whether a copy of this many bytes of the disk below may join the open transaction. Copies take at most a
    /// quarter of the room for checks, and sixteen times as much data where nothing is checked. A single copy
    /// that is larger is alone in its transaction.
    pub(crate) fn has_room_for_copy(&self, bytes: u64) -> bool {
        let longest = self.record_max();
        let mut open = lock(&self.open);
        let checked = CHECK_BYTES_MAX.min(longest / 4) / 4 / 4 * SECTOR;
        let most = if open.is_fenced { checked * 16 } else { checked };
        let has_room = open.filled == 0 || open.filled + bytes <= most;
        if has_room {
            open.filled += bytes;
        }
        has_room
    }

    /// Records that the open transaction counts on data without checks. The caller holds the gate, has
    /// written the data, and publishes it before it releases the gate.
    pub(crate) fn fence(&self) {
        let mut open = lock(&self.open);
        if !open.is_fenced {
            self.fence_open(&mut open);
        }
    }

    /// Fences the open transaction when its checks take more than `most` bytes of its record. Returns how
    /// many bytes they took, or 0 when they stay. The caller holds the gate.
    pub(crate) fn fence_instead(&self, most: u64) -> u64 {
        let mut open = lock(&self.open);
        let bytes = open.sectors as u64 * 4;
        if bytes <= most {
            return 0;
        }
        self.fence_open(&mut open);
        bytes
    }

    /// Whether checks of data that is written now would be useless. A seal may change that at any time.
    pub(crate) fn is_fenced(&self) -> bool {
        lock(&self.open).is_fenced
    }

    pub(super) fn fence_open(&self, open: &mut OpenTransaction) {
        let mut unverified = lock(&self.unverified.runs);
        for at in std::mem::take(&mut open.checks).into_keys() {
            unverified.remove(&at);
        }
        self.unverified.any.store(!unverified.is_empty(), Ordering::Release);
        open.others.clear();
        open.sectors = 0;
        open.is_fenced = true;
    }

    /// Forgets the checks of clusters in this run that are no longer part of the disk. A check that is
    /// already sealed must hold until it is verified, and the clusters are not reused before that.
    pub(crate) fn forget_checks(&self, wide: ImageSpan) {
        let range = wide.start().bytes()..wide.end().bytes();
        let mut open = lock(&self.open);
        let inside: Vec<u64> = open.checks.range(range.clone()).map(|(at, _)| *at).collect();
        let mut unverified = lock(&self.unverified.runs);
        for at in inside {
            let crcs = open.checks.remove(&at).expect("as just found");
            open.sectors -= crcs.len();
            unverified.remove(&at);
        }
        let others: Vec<u64> = open.others.range(range).map(|(at, _)| *at).collect();
        for at in others {
            open.others.remove(&at);
        }
    }

    /// Whether these bytes may change only after another commit, because recovery may still verify them or
    /// bring back the bytes that records hold for them.
    pub(crate) fn must_wait(&self, span: ImageSpan) -> bool {
        self.is_unverified(span) || self.full.has(span)
    }

    pub(crate) fn is_unverified(&self, span: ImageSpan) -> bool {
        !self.unverified.overlapping(span).is_empty()
    }

    /// Whether anything is unverified.
    pub(crate) fn has_unverified(&self) -> bool {
        self.unverified.any.load(Ordering::Acquire)
    }

    /// Called before bytes are overwritten in place. Decides how.
    pub(crate) fn overwrite(&self, at: ImageOffset, data: &Buffer) -> Overwrite<'_> {
        let span = at.span(data.len() as u64);
        if !self.must_wait(span) {
            return Overwrite::Now;
        }
        let mut open = lock(&self.open);
        let runs = self.unverified.overlapping(span);
        let is_here = self.full.has(span);
        let is_open = |(_, _, sequence): &(u64, u64, u64)| *sequence == open.sequence;
        match (!is_here, runs.iter().filter(|run| is_open(run)).count()) {
            (true, 0) if runs.is_empty() => Overwrite::Now, // settled since it was asked
            (true, count) if count == runs.len() => self.replace(&mut open, at, data, &runs),
            // A mix of both kinds, which is rare.
            (_, 1..) => Overwrite::Later,
            (_, 0) => self.take(&mut open, at, data, &runs),
        }
    }

    /// Lets the open transaction take up new values.
    fn replace(
        &self,
        open: &mut OpenTransaction,
        at: ImageOffset,
        data: &Buffer,
        runs: &[(u64, u64, u64)],
    ) -> Overwrite<'_> {
        let is_whole = at.bytes().is_multiple_of(SECTOR) && (data.len() as u64).is_multiple_of(SECTOR);
        let replaced = (data.len() as u64 / SECTOR) * OTHER_BYTES;
        if !is_whole || data.len() > REPLACED_BYTES_MAX || open.other_bytes() + replaced > self.others_max() {
            return Overwrite::Later;
        }
        let is_checked =
            |sector: ImageOffset| runs.iter().any(|(at, end, _)| (*at..*end).contains(&sector.bytes()));
        let sector_unit = BlockSize::from_shift(SECTOR.trailing_zeros());
        let checks = checks_of(at, data, sector_unit, is_checked);
        let has_many =
            |at: &ImageOffset| open.others.get(&at.bytes()).is_some_and(|o| o.values.len() >= VALUES_MAX);
        if checks.iter().any(|(at, _)| has_many(at)) {
            return Overwrite::Later;
        }
        let mut sectors = Vec::with_capacity(checks.len());
        for (place, crcs) in checks {
            let others = open.others.entry(place.bytes()).or_default();
            let alone_after = (others.under_way == 0).then_some(others.values.len());
            others.values.push(crcs[0]);
            others.under_way += 1;
            sectors.push(Replaced { at: place.bytes(), crc: crcs[0], alone_after });
        }
        self.replacing.fetch_add(1, Ordering::AcqRel);
        Overwrite::Replacing(Replacing { journal: self, sequence: open.sequence, sectors })
    }

    /// Lets the journal take the sectors that may not be overwritten in place: those that are sealed and not
    /// verified, and those that it holds already.
    fn take(
        &self,
        open: &mut OpenTransaction,
        at: ImageOffset,
        data: &Buffer,
        runs: &[(u64, u64, u64)],
    ) -> Overwrite<'_> {
        let span = at.span(data.len() as u64);
        let mut places = BTreeSet::new();
        let start = span.start().bytes() / SECTOR * SECTOR;
        for (run_start, run_end, _) in runs {
            places.extend((start.max(*run_start)..span.end().bytes().min(*run_end)).step_by(SECTOR_LEN));
        }
        let added = span.len() + open.full_bytes();
        // A write that began while the check was still open may be in flight. It must not land after these
        // bytes are checkpointed.
        let is_raced = self.replacing.load(Ordering::Acquire) > 0;
        if is_raced || added > self.full_max() || !self.full.take(at, data, &mut places) {
            return Overwrite::Later;
        }
        let mut rest: Vec<ImageSpan> = Vec::new();
        for place in sectors_of(span).filter(|place| !places.contains(place)) {
            let (from, to) = (place.max(span.start().bytes()), (place + SECTOR).min(span.end().bytes()));
            match rest.last_mut() {
                Some(last) if last.end().bytes() == from => {
                    *last = last.start().span(to - last.start().bytes())
                }
                _ => rest.push(ImageOffset::new(from).span(to - from)),
            }
        }
        open.full.append(&mut places);
        Overwrite::Taken(rest)
    }

    /// Lets the open transaction take whole sectors, which have no checks, whatever is in their place. False
    /// when it has no room. The caller holds the gate, and changes the mapping that leads to them.
    pub(crate) fn take_whole(&self, at: ImageOffset, data: &Buffer) -> bool {
        let span = at.span(data.len() as u64);
        debug_assert!(span.start().bytes().is_multiple_of(SECTOR) && span.len().is_multiple_of(SECTOR));
        let mut open = lock(&self.open);
        let mut places: BTreeSet<u64> = sectors_of(span).collect();
        if span.len() + open.full_bytes() > self.full_max() || !self.full.take(at, data, &mut places) {
            return false;
        }
        open.full.append(&mut places);
        true
    }

    /// The sequence of the open transaction.
    pub(crate) fn open_sequence(&self) -> u64 {
        lock(&self.open).sequence
    }

    /// A record may hold this many bytes of second values.
    fn others_max(&self) -> u64 {
        lock(&self.ledger).as_ref().map_or(u64::MAX, |ledger| ledger.ring.record_max() / 8)
    }

    /// A record may hold this many bytes of guest data.
    fn full_max(&self) -> u64 {
        lock(&self.ledger).as_ref().map_or(0, |ledger| ledger.ring.record_max() / 2)
    }

    /// Whether a record without a transaction would be of use: it verifies the last one, or checkpoints
    /// guest data that is overwritten through the journal.
    pub(crate) fn has_chores(&self) -> bool {
        self.has_unverified() || self.full.any()
    }

    /// Asks the next commit for that record.
    pub(crate) fn do_chores(&self) {
        match self.full.any() {
            true => self.request_checkpoint(),
            false => self.request_record(),
        }
    }

    /// Asks the next commit for a checkpoint.
    pub(crate) fn request_checkpoint(&self) {
        self.checkpoint_wanted.store(true, Ordering::Release);
        self.request_record();
    }

    /// Asks the next commit for a record, which verifies what was sealed before.
    pub(crate) fn request_record(&self) {
        self.record_wanted.store(true, Ordering::Release);
    }

    /// Takes a sequence number for a record that belongs to no transaction. The open transaction gets the
    /// next number.
    pub(crate) fn skip(&self) -> u64 {
        let mut open = lock(&self.open);
        let taken = open.sequence;
        open.sequence += 1;
        for (_, of) in lock(&self.unverified.runs).values_mut() {
            *of += u64::from(*of == taken);
        }
        taken
    }

    /// All transactions up to this one are verified.
    pub(crate) fn note_verified(&self, sequence: u64) {
        self.verified.fetch_max(sequence, Ordering::AcqRel);
        let mut runs = lock(&self.unverified.runs);
        runs.retain(|_, (_, of)| *of > sequence);
        self.unverified.any.store(!runs.is_empty(), Ordering::Release);
    }
}

/// The bytes, protected against changes from now on: a check has to be right for what is written later.
pub(crate) fn unchanging(data: Buffer) -> Buffer {
    data.owned()
}

/// The checksum of each sector from `at` on, padded with zeros, in runs that do not cross a multiple of
/// `unit`. Sectors that `wanted` refuses are left out.
pub(crate) fn checks_of(
    at: ImageOffset,
    data: &Buffer,
    unit: BlockSize,
    wanted: impl Fn(ImageOffset) -> bool,
) -> Vec<SectorChecks> {
    const ZEROS: [u8; 512] = [0; 512];
    let mut checks: Vec<SectorChecks> = Vec::new();
    let mut filled = usize::try_from(at.bytes() % SECTOR).expect("within a sector");
    let mut sector = ImageOffset::new(at.bytes() - filled as u64);
    let mut crc = crc32c::crc32c(&ZEROS[..filled]);
    let mut is_wanted = wanted(sector);
    let mut close = |sector: ImageOffset, crc| match checks.last_mut() {
        Some((first, crcs))
            if *first + crcs.len() as u64 * SECTOR == sector
                && !sector.bytes().is_multiple_of(unit.bytes()) =>
        {
            crcs.push(crc);
        }
        _ => checks.push((sector, vec![crc])),
    };
    for mut rest in data.pieces() {
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(512 - filled));
            if is_wanted {
                crc = crc32c::crc32c_append(crc, now);
            }
            (filled, rest) = (filled + now.len(), later);
            if filled == 512 {
                if is_wanted {
                    close(sector, crc);
                }
                sector += SECTOR;
                (filled, crc, is_wanted) = (0, 0, wanted(sector));
            }
        }
    }
    if filled > 0 && is_wanted {
        close(sector, crc32c::crc32c_append(crc, &ZEROS[filled..]));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: ImageOffset = ImageOffset::new(0x20_0000);

    fn crc(byte: u8) -> u32 {
        crc32c::crc32c(&[byte; 512])
    }

    fn items(journal: &Journal) -> Vec<Item> {
        journal.seal(false).map_or_else(Vec::new, |sealed| sealed.items)
    }

    #[test]
    fn part_of_a_sector_is_checked_with_the_zeros_around_it() {
        let mut bytes = [0; 512];
        bytes[500..].fill(7);
        let mut next = [0; 512];
        next[..3].fill(7);
        let page = BlockSize::PAGE;
        let mut data = Buffer::copy_of(&[7; 5]);
        data.append(Buffer::copy_of(&[7; 9]));
        data.append(Buffer::copy_of(&[7]));
        let expected = vec![(AT, vec![crc32c::crc32c(&bytes), crc32c::crc32c(&next)])];
        assert_eq!(checks_of(AT + 500, &data, page, |_| true), expected);
        let data = Buffer::copy_of(&[7; 1536]);
        let some = checks_of(AT + 3584, &data, page, |at| at != AT + 4608);
        assert_eq!(some, vec![(AT + 3584, vec![crc(7)]), (AT + 4096, vec![crc(7)])]);
    }

    #[test]
    fn an_overwrite_in_the_open_transaction_replaces_the_check() {
        let journal = Journal::new(None);
        journal.add_checks(&[(AT, vec![crc(1), crc(1)])]);
        assert!(matches!(journal.overwrite(AT + 1024, &Buffer::copy_of(&[2; 512])), Overwrite::Now));
        assert!(
            matches!(journal.overwrite(AT + 100, &Buffer::copy_of(&[2; 512])), Overwrite::Later),
            "half a sector"
        );
        let Overwrite::Replacing(replacing) = journal.overwrite(AT + 512, &Buffer::copy_of(&[2; 1024]))
        else {
            panic!()
        };
        replacing.ended(true);
        assert_eq!(items(&journal), [Item::Check { at: AT, crcs: vec![crc(1), crc(2)] }]);
        assert!(
            matches!(journal.overwrite(AT, &Buffer::copy_of(&[3; 512])), Overwrite::Later),
            "it is sealed"
        );
        journal.note_verified(1);
        assert!(matches!(journal.overwrite(AT, &Buffer::copy_of(&[3; 512])), Overwrite::Now));
    }

    #[test]
    fn both_values_count_while_the_write_is_under_way() {
        let journal = Journal::new(None);
        journal.add_checks(&[(AT, vec![crc(1)])]);
        let Overwrite::Replacing(replacing) = journal.overwrite(AT, &Buffer::copy_of(&[2; 512])) else {
            panic!()
        };
        let expected = [Item::Check { at: AT, crcs: vec![crc(1)] }, Item::Other { at: AT, crc: crc(2) }];
        assert_eq!(items(&journal), expected);
        replacing.ended(true);
        assert!(items(&journal).is_empty());
    }

    #[test]
    fn of_two_writes_at_a_time_either_may_win() {
        let journal = Journal::new(None);
        journal.add_checks(&[(AT, vec![crc(1)])]);
        let Overwrite::Replacing(first) = journal.overwrite(AT, &Buffer::copy_of(&[2; 512])) else {
            panic!()
        };
        let Overwrite::Replacing(second) = journal.overwrite(AT, &Buffer::copy_of(&[3; 512])) else {
            panic!()
        };
        first.ended(true);
        second.ended(true);
        let other = |byte| Item::Other { at: AT, crc: crc(byte) };
        assert_eq!(items(&journal), [Item::Check { at: AT, crcs: vec![crc(1)] }, other(2), other(3)]);
    }

    #[test]
    fn a_write_that_is_alone_again_settles_the_value() {
        let journal = Journal::new(None);
        journal.add_checks(&[(AT, vec![crc(1)])]);
        let replace = |byte| match journal.overwrite(AT, &Buffer::copy_of(&[byte; 512])) {
            Overwrite::Replacing(replacing) => replacing,
            _ => panic!(),
        };
        let (first, second) = (replace(2), replace(3));
        first.ended(true);
        second.ended(false);
        replace(4).ended(true);
        assert_eq!(items(&journal), [Item::Check { at: AT, crcs: vec![crc(4)] }]);
    }

    #[test]
    fn what_was_freed_need_not_arrive() {
        let journal = Journal::new(None);
        journal.add_checks(&[(AT, vec![crc(1)]), (AT + 4096, vec![crc(1)])]);
        let Overwrite::Replacing(replacing) = journal.overwrite(AT, &Buffer::copy_of(&[2; 512])) else {
            panic!()
        };
        journal.forget_checks(AT.span(4096));
        replacing.ended(true);
        assert_eq!(items(&journal), [Item::Check { at: AT + 4096, crcs: vec![crc(1)] }]);
    }
}
