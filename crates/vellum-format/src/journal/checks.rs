//! The checksums by which recovery tells whether data arrived, and who may overwrite what has one.
//!
//! ```text
//!   fresh sectors published   ──► gathered in the open transaction                 value c1
//!   overwritten while open    ──► both values count while the write is under way   c1 or c2, then c2
//!   sealed                    ──► in the record; whoever overwrites waits
//!   proven                    ──► forgotten
//! ```
//!
//! 1. Runs of checks do not overlap, and none reaches over a cluster's end.
//! 2. A check is listed before anybody can find the sector by the mapping, so that who overwrites it sees the check.
//! 3. Where several writes of one sector ran at a time, all their values count until the transaction is proven.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use vellum_core::{BlockSize, Buffer, ImageOffset, ImageSpan};

use super::Journal;
use super::full::sectors_of;
use super::record::{Item, SECTOR, SECTOR_LEN};
use crate::sabotage::{self, Bug};
use crate::state::lock;

/// Checksums of neighbouring sectors, and where the first of them lies.
pub(crate) type SectorChecks = (ImageOffset, Vec<u32>);

/// A sector has so many values at most.
const VALUES_MAX: usize = 8;
/// A second value takes so much of a record.
const OTHER_BYTES: u64 = 24;
/// An overwrite larger than this waits for a proof instead.
const REPLACED_BYTES_MAX: usize = 256 << 10;

/// What is gathered between two seals.
pub(super) struct Gathered {
    /// The open transaction: the sequence of the next record.
    sequence: u64,
    /// By place.
    checks: BTreeMap<u64, Vec<u32>>,
    /// How many sectors they are.
    sectors: usize,
    /// Sectors that are being overwritten: the values that they may get.
    others: BTreeMap<u64, Others>,
    pub(super) zeros: Vec<ImageSpan>,
    /// Sectors that go through the journal.
    full: BTreeSet<u64>,
}

#[derive(Default)]
struct Others {
    values: SmallVec<[u32; 2]>,
    under_way: u32,
}

impl Default for Gathered {
    fn default() -> Self {
        Self {
            sequence: 1,
            checks: BTreeMap::new(),
            sectors: 0,
            others: BTreeMap::new(),
            zeros: Vec::new(),
            full: BTreeSet::new(),
        }
    }
}

impl Gathered {
    pub(super) fn is_empty(&self) -> bool {
        self.checks.is_empty() && self.zeros.is_empty() && self.full.is_empty()
    }

    /// What checks and second values will take in the record, in bytes.
    pub(super) fn check_bytes(&self) -> u64 {
        self.sectors as u64 * 4 + self.others.len() as u64 * 48
    }

    /// What second values alone will take at most.
    fn other_bytes(&self) -> u64 {
        self.others.values().map(|others| others.values.len() as u64 * OTHER_BYTES).sum()
    }

    /// Guest data that the record will have.
    pub(super) fn full_bytes(&self) -> u64 {
        self.full.len() as u64 * SECTOR
    }

    /// The sequence of what was gathered, its items, and the sectors that are to be added; the next transaction begins.
    pub(super) fn take(&mut self) -> (u64, Vec<Item>, BTreeSet<u64>) {
        let next = Self { sequence: self.sequence + 1, ..Self::default() };
        let sealed = std::mem::replace(self, next);
        let mut items: Vec<Item> = Vec::new();
        if !sabotage::is(Bug::NoZeros) {
            items.extend(sealed.zeros.into_iter().map(Item::Zero));
        }
        let checks = sealed.checks.into_iter();
        if !sabotage::is(Bug::NoChecks) {
            items.extend(checks.map(|(at, crcs)| Item::Check { at: ImageOffset::new(at), crcs }));
        }
        for (at, others) in sealed.others {
            let other = |crc| Item::Other { at: ImageOffset::new(at), crc };
            if !sabotage::is(Bug::NoOthers) {
                items.extend(others.values.into_iter().map(other));
            }
        }
        (sealed.sequence, items, sealed.full)
    }
}

/// Runs of sectors whose checks recovery may have to verify: where, up to where, of which transaction.
#[derive(Default)]
pub(super) struct Unproven {
    runs: Mutex<BTreeMap<u64, (u64, u64)>>,
    /// There are some; looked at without the lock.
    any: AtomicBool,
}

impl Unproven {
    fn overlapping(&self, span: ImageSpan) -> SmallVec<[(u64, u64, u64); 4]> {
        if !self.any.load(Ordering::Acquire) {
            return SmallVec::new();
        }
        // Half a sector is written as a whole one.
        let (start, end) =
            (span.start().bytes() / SECTOR * SECTOR, span.end().bytes().next_multiple_of(SECTOR));
        let runs = lock(&self.runs);
        let back = runs.range(..end).rev().take_while(|(_, (run_end, _))| *run_end > start);
        back.map(|(at, (run_end, sequence))| (*at, *run_end, *sequence)).collect()
    }
}

/// Whether bytes may be overwritten where they lie.
pub(crate) enum Overwrite<'a> {
    /// Nothing speaks against it.
    Now,
    /// They may; afterwards the check is replaced.
    Replacing(Replacing<'a>),
    /// The journal has taken the bytes. These parts it has not, and they may be overwritten.
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

/// One sector of them.
struct Replaced {
    at: u64,
    crc: u32,
    /// How many values there were before, if no other write of the sector was under way. Those writes have ended, so this one
    /// lands after them.
    alone_after: Option<usize>,
}

impl Replacing<'_> {
    /// The write has ended. When it was not done, old and new values go on counting; so they do when it is never said that
    /// the write ended, because then it may still happen.
    pub(crate) fn ended(self, is_done: bool) {
        self.journal.replacing.fetch_sub(1, Ordering::AcqRel);
        let mut open = lock(&self.journal.open);
        if open.sequence != self.sequence {
            return; // sealed with all values
        }
        let Gathered { checks, others, .. } = &mut *open;
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
    /// Guest data that the open transaction counts on has these checksums. The caller holds the gate, and publishes the
    /// data before it lets go.
    pub(crate) fn add_checks(&self, checks: &[SectorChecks]) {
        if checks.is_empty() {
            return;
        }
        let mut open = lock(&self.open);
        let mut unproven = lock(&self.unproven.runs);
        for (at, crcs) in checks {
            open.sectors += crcs.len();
            unproven.insert(at.bytes(), (at.bytes() + crcs.len() as u64 * SECTOR, open.sequence));
            open.checks.insert(at.bytes(), crcs.clone());
        }
        self.unproven.any.store(true, Ordering::Release);
    }

    /// What lies in the clusters of this run is no longer part of the disk. Where it was sealed already, its check has to
    /// hold until it is proven; the clusters are not used again before.
    pub(crate) fn forget_checks(&self, wide: ImageSpan) {
        let range = wide.start().bytes()..wide.end().bytes();
        let mut open = lock(&self.open);
        let inside: Vec<u64> = open.checks.range(range.clone()).map(|(at, _)| *at).collect();
        let mut unproven = lock(&self.unproven.runs);
        for at in inside {
            let crcs = open.checks.remove(&at).expect("as just found");
            open.sectors -= crcs.len();
            unproven.remove(&at);
        }
        let others: Vec<u64> = open.others.range(range).map(|(at, _)| *at).collect();
        for at in others {
            open.others.remove(&at);
        }
    }

    /// Whether these bytes may be given other content only after another commit: recovery may still verify what lies there, or
    /// bring back what records have of it.
    pub(crate) fn must_wait(&self, span: ImageSpan) -> bool {
        self.is_unproven(span) || self.full.has(span)
    }

    pub(crate) fn is_unproven(&self, span: ImageSpan) -> bool {
        !self.unproven.overlapping(span).is_empty()
    }

    /// Whether anything is unproven.
    pub(crate) fn has_unproven(&self) -> bool {
        self.unproven.any.load(Ordering::Acquire)
    }

    /// Asked before bytes are overwritten in place.
    pub(crate) fn overwrite(&self, at: ImageOffset, data: &Buffer) -> Overwrite<'_> {
        let span = at.span(data.len() as u64);
        if !self.must_wait(span) {
            return Overwrite::Now;
        }
        let mut open = lock(&self.open);
        let runs = self.unproven.overlapping(span);
        if sabotage::is(Bug::FullNotSticky) && runs.is_empty() {
            self.forget_full(span);
            return Overwrite::Now;
        }
        let is_here = self.full.has(span);
        let is_open = |(_, _, sequence): &(u64, u64, u64)| *sequence == open.sequence;
        match (!is_here, runs.iter().filter(|run| is_open(run)).count()) {
            (true, 0) if runs.is_empty() => Overwrite::Now, // settled since it was asked
            (true, count) if count == runs.len() && sabotage::is(Bug::StaleCheck) => Overwrite::Now,
            (true, 0) if sabotage::is(Bug::UnprovenOverwritten) => Overwrite::Now,
            (true, count) if count == runs.len() => self.replace(&mut open, at, data, &runs),
            // Some of one kind and some of the other: rare.
            (_, 1..) => Overwrite::Later,
            (_, 0) => self.take(&mut open, at, data, &runs),
        }
    }

    /// The open transaction takes up new values.
    fn replace(
        &self,
        open: &mut Gathered,
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

    /// The journal takes what may not go home: sectors that are sealed and not proven, and those that it has already.
    fn take(
        &self,
        open: &mut Gathered,
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
        // A write of the time when the check was still open may be under way, and must not land after these bytes are home.
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

    /// The open transaction takes whole sectors, which have no checks, whatever lies in their place. False when it has no room.
    /// The caller holds the gate, and changes what leads to them.
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

    /// So many bytes of second values one record may have.
    fn others_max(&self) -> u64 {
        lock(&self.ledger).as_ref().map_or(u64::MAX, |ledger| ledger.ring.record_max() / 8)
    }

    /// So much guest data one record may have.
    fn full_max(&self) -> u64 {
        lock(&self.ledger).as_ref().map_or(0, |ledger| ledger.ring.record_max() / 2)
    }

    /// Whether a record without a transaction would be of use: to prove the last one, or to be rid of guest data that
    /// sticks to the journal.
    pub(crate) fn has_chores(&self) -> bool {
        self.has_unproven() || self.full.any()
    }

    /// Asks the next commit for that record.
    pub(crate) fn do_chores(&self) {
        match self.full.any() {
            true => self.want_relief(),
            false => self.want_proof(),
        }
    }

    /// Asks the next commit to take home what waits for it.
    pub(crate) fn want_relief(&self) {
        self.relief_wanted.store(true, Ordering::Release);
        self.want_proof();
    }

    /// Asks the next commit for a record, which proves what is sealed.
    pub(crate) fn want_proof(&self) {
        self.proof_wanted.store(true, Ordering::Release);
    }

    /// Takes a sequence for a record that is none of a transaction; the open transaction gets the next one.
    pub(crate) fn skip(&self) -> u64 {
        let mut open = lock(&self.open);
        let taken = open.sequence;
        open.sequence += 1;
        for (_, of) in lock(&self.unproven.runs).values_mut() {
            *of += u64::from(*of == taken);
        }
        taken
    }

    /// All transactions up to this one are proven.
    pub(crate) fn has_proven(&self, sequence: u64) {
        self.proven.fetch_max(sequence, Ordering::AcqRel);
        let mut runs = lock(&self.unproven.runs);
        runs.retain(|_, (_, of)| *of > sequence);
        self.unproven.any.store(!runs.is_empty(), Ordering::Release);
    }
}

/// The bytes, which nobody changes from now on: a check has to be right for what is written later.
pub(crate) fn unchanging(data: Buffer) -> Buffer {
    if sabotage::is(Bug::LentChecked) { data } else { data.owned() }
}

/// The checksum of each sector from `at` on, rounded out with zeros, in runs that reach over no multiple of `unit`; those
/// that `wanted` refuses are left out.
pub(crate) fn checks_of(
    at: ImageOffset,
    data: &Buffer,
    unit: BlockSize,
    wanted: impl Fn(ImageOffset) -> bool,
) -> Vec<SectorChecks> {
    const ZEROS: [u8; 512] = [0; 512];
    if sabotage::is(Bug::LentChecked) && data.is_lent() {
        return checks_of(at, &data.duplicate(), unit, wanted);
    }
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
        journal.has_proven(1);
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
