//! What a crash left in the journal: found, verified, and reduced to the records that count.
//!
//! [`cases`](super::cases) decides. This file has the facts, and does what was decided.

use std::collections::{BTreeMap, BTreeSet};

use vellum_core::{Buffer, Context, Error, ImageOffset, ImageSpan, Result, Storage};

use super::cases::{Checked, Fact, Facts, FromTail, Named, Next, Then};
use super::record::{BLOCK_LEN, Item, Record, SECTOR_LEN};
use super::ring::Ring;
use crate::work;

/// This many sectors are verified at once.
const VERIFIED_AT_ONCE: usize = 2048;

/// Where a journal is, and which of its records count.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) run: ImageSpan,
    pub(crate) generation: u64,
    pub(crate) key: u128,
}

/// A record and its place in the run.
pub(crate) struct Found {
    pub(crate) record: Record,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// The records that make up the last durable state.
pub(crate) struct Needed {
    /// In order; the last one is the newest. Empty when nothing was committed.
    pub(crate) records: Vec<Found>,
    /// The newest record, or its data, was incomplete, and the record was made void.
    pub(crate) left_out: bool,
    /// It was made void because a packed block that it named did not arrive.
    pub(crate) block_lost: bool,
}

/// Finds the records that count, on a storage that was settled ([`truth`](crate::truth)). `names_lost` says
/// whether the last of these records names a packed block that did not arrive. If records or data that once
/// counted are missing, the error is `Corrupt`.
pub(crate) async fn find(
    storage: &dyn Storage,
    place: Place,
    names_lost: impl AsyncFn(&[Found]) -> Result<bool>,
) -> Result<Needed> {
    let (mut left_out, mut block_lost) = (false, false);
    let mut found = read_run(storage, place).await?;
    let mut facts = Facts::default();
    loop {
        match facts.next() {
            Next::LookAt(Fact::Newest) => facts.newest = Some(checked(storage, found.last()).await?),
            Next::LookAt(Fact::Before) => {
                facts.before = Some(checked(storage, found.iter().nth_back(1)).await?);
            }
            Next::LookAt(Fact::FromTail) => {
                let (needed, len) = needed_of(&found);
                facts.from_tail = Some(match needed.len() as u64 == len {
                    true => FromTail::Complete,
                    false => FromTail::Missing,
                });
            }
            Next::LookAt(Fact::Named) => {
                // When a newer record was left out, this one had been flushed, and what it names with it.
                let is_lost = !left_out && names_lost(needed_of(&found).0).await?;
                facts.named = Some(if is_lost { Named::Lost } else { Named::There });
            }
            Next::Do(Then::ReplayNothing) => return Ok(Needed { records: Vec::new(), left_out, block_lost }),
            Next::Do(Then::Replay) => {
                let older = found.len() - needed_of(&found).0.len();
                return Ok(Needed { records: found.split_off(older), left_out, block_lost });
            }
            Next::Do(Then::LeaveOut) => {
                let newest = found.pop().expect("it was looked at");
                storage.write(place.run.start() + newest.start, Buffer::zeroed(BLOCK_LEN)).await?;
                storage.flush().await?;
                left_out = true;
                block_lost |= facts.named == Some(Named::Lost);
                facts = Facts { newest: facts.before, ..Facts::default() };
            }
            Next::Do(Then::RefuseLostRecord) => {
                let (needed, len) = needed_of(&found);
                return Err(Error::corrupt(format!(
                    "the journal has {} of the {len} records it needs: the drive lost flushed data",
                    needed.len()
                )));
            }
            Next::Do(Then::RefuseLostData) => {
                return Err(Error::corrupt(
                    "flushed data is missing: the drive, or a layer above it, lost it",
                ));
            }
        }
    }
}

/// The records that the newest one needs, itself included, as far as they were found, and how many there
/// should be.
fn needed_of(found: &[Found]) -> (&[Found], u64) {
    let newest = &found.last().expect("it was looked at").record;
    let first = found.partition_point(|found| found.record.sequence < newest.tail);
    (&found[first..], newest.sequence - newest.tail + 1)
}

async fn checked(storage: &dyn Storage, found: Option<&Found>) -> Result<Checked> {
    let Some(found) = found else { return Ok(Checked::NoRecord) };
    Ok(if verify(storage, &found.record).await? { Checked::Good } else { Checked::Bad })
}

/// All records of this generation, by sequence.
async fn read_run(storage: &dyn Storage, place: Place) -> Result<Vec<Found>> {
    let run = place.run;
    let len = run.len().min(storage.len().saturating_sub(run.start().bytes()));
    let len = usize::try_from(len).expect("the place was checked: a few MiB");
    let bytes =
        storage.read(run.start(), Buffer::for_overwrite(len)).await.context(|| "can't read the journal")?;
    let longest =
        usize::try_from(Ring::new(run.len()).record_max()).expect("shorter than the run").max(BLOCK_LEN);
    let mut found = BTreeMap::new();
    let mut at = 0;
    // A whole record is skipped together with the bytes that it covers, and torn or partly overwritten
    // records are few. But with knowledge of the key every block could be made to claim the next thousand, so
    // the sum of all claims is bounded.
    let mut left = len.saturating_mul(2);
    while at < len {
        let piece = &bytes.slice()[at..len.min(at + longest)];
        let claimed = Record::claimed_len(piece, place.generation, place.key).unwrap_or(0);
        work::note(1 + claimed / 8);
        left = left.checked_sub(claimed).ok_or_else(|| {
            Error::corrupt("the journal has more records than it can hold: they overlap and are damaged")
        })?;
        match Record::decode(piece, place.generation, place.key) {
            Some((record, record_len)) => {
                let start = at as u64;
                at += record_len.next_multiple_of(BLOCK_LEN);
                found.insert(record.sequence, Found { record, start, end: at as u64 });
            }
            None => at += BLOCK_LEN,
        }
    }
    Ok(found.into_values().collect())
}

/// Whether the data that a transaction counts on has arrived.
async fn verify(storage: &dyn Storage, record: &Record) -> Result<bool> {
    let others: BTreeSet<(ImageOffset, u32)> = record
        .items
        .iter()
        .filter_map(|item| if let Item::Other { at, crc } = item { Some((*at, *crc)) } else { None })
        .collect();
    for item in &record.items {
        let Item::Check { at, crcs } = item else { continue };
        let starts = (at.bytes()..).step_by(VERIFIED_AT_ONCE * SECTOR_LEN);
        for (at, crcs) in starts.zip(crcs.chunks(VERIFIED_AT_ONCE)) {
            let buffer = Buffer::for_overwrite(crcs.len() * SECTOR_LEN);
            let buffer = storage.read(ImageOffset::new(at), buffer).await?;
            let sectors = buffer.slice().chunks_exact(SECTOR_LEN).zip((at..).step_by(SECTOR_LEN));
            for ((sector, at), crc) in sectors.zip(crcs) {
                let is = crc32c::crc32c(sector);
                let is_right = is == *crc || others.contains(&(ImageOffset::new(at), is));
                if !is_right {
                    return Ok(false);
                }
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_lite::future::block_on;
    use vellum_core::{ErrorKind, MemoryStorage};

    use super::*;
    use crate::journal::cases::tests::cases;

    const RUN_BYTES: u64 = 64 << 10;
    const BEFORE: u64 = 4;
    const NEWEST: u64 = 5;

    /// A journal of at most two records. Each counts on one sector of zeros.
    fn medium(newest: Checked, from_tail: FromTail, before: Checked) -> Vec<u8> {
        let first = if before == Checked::NoRecord { NEWEST } else { BEFORE };
        let tail = first - u64::from(from_tail == FromTail::Missing);
        let mut bytes = vec![0; 128 << 10];
        for (sequence, tail, checked) in [(BEFORE, BEFORE, before), (NEWEST, tail, newest)] {
            let crc = crc32c::crc32c(&[0; SECTOR_LEN]) ^ u32::from(checked == Checked::Bad);
            let items = vec![Item::Check { at: ImageOffset::new(RUN_BYTES), crcs: vec![crc] }];
            let record = Record { generation: 1, key: 7, sequence, tail, items, ..Record::default() };
            if checked != Checked::NoRecord {
                let at = usize::try_from(sequence).expect("small") * BLOCK_LEN;
                bytes[at..at + BLOCK_LEN].copy_from_slice(&record.encode());
            }
        }
        bytes
    }

    /// The records that count, and whether the newest was left out; nothing when the image is refused. In
    /// words instead of rows.
    fn outcome(
        newest: Checked,
        from_tail: FromTail,
        named: Named,
        before: Checked,
    ) -> Option<(Vec<u64>, bool)> {
        match (newest, before) {
            (Checked::NoRecord, _) => Some((Vec::new(), false)),
            (Checked::Bad, Checked::Bad) => None,
            (Checked::Good, _) if from_tail == FromTail::Missing => None,
            (Checked::Good, Checked::Bad) if named == Named::Lost => None,
            (Checked::Good, Checked::NoRecord) if named == Named::There => Some((vec![NEWEST], false)),
            (Checked::Good, _) if named == Named::There => Some((vec![BEFORE, NEWEST], false)),
            (_, Checked::Good) => Some((vec![BEFORE], true)),
            (_, _) => Some((Vec::new(), true)),
        }
    }

    #[test]
    fn each_case_on_a_medium() {
        for (newest, from_tail, named, before) in cases() {
            let case = format!("{newest:?} {from_tail:?} {named:?} {before:?}");
            let bytes = medium(newest, from_tail, before);
            let image = MemoryStorage::holding("image", &bytes);
            let place = Place { run: ImageOffset::ZERO.span(RUN_BYTES), generation: 1, key: 7 };
            let asked = Cell::new(0);
            let found = block_on(find(&*image, place, async |records: &[Found]| {
                asked.set(asked.get() + 1);
                assert_eq!(records.last().map(|found| found.record.sequence), Some(NEWEST), "{case}");
                Ok(named == Named::Lost)
            }));
            let Some((sequences, left_out)) = outcome(newest, from_tail, named, before) else {
                assert_eq!(found.map(|_| ()).expect_err(&case).kind(), ErrorKind::Corrupt, "{case}");
                assert!(image.content().to_vec() == bytes, "{case}: what is refused stays as it is");
                continue;
            };
            let found = found.map_err(|error| error.chain()).expect(&case);
            let got: Vec<u64> = found.records.iter().map(|found| found.record.sequence).collect();
            assert_eq!((got, found.left_out), (sequences, left_out), "{case}");
            assert_eq!(found.block_lost, left_out && newest == Checked::Good, "{case}");
            assert_eq!(asked.get(), u32::from(newest == Checked::Good), "{case}");
            let mut expected = bytes;
            if left_out {
                let at = usize::try_from(NEWEST).expect("small") * BLOCK_LEN;
                expected[at..at + BLOCK_LEN].fill(0);
            }
            assert!(image.content().to_vec() == expected, "{case}: no more is written");
        }
    }
}
