//! What a crash left in the journal: found, verified, and replayed in memory.
//!
//! | found | state | done |
//! |---|---|---|
//! | no record of this generation | nothing was committed | nothing |
//! | the newest record, and its checks hold | this is the state | replayed up to it |
//! | the newest record, and a check fails | it was never acknowledged | made void, replay ends before it |
//! | a record that the newest one needs is missing | the medium lost flushed data | refused: corrupt |
//!
//! The journal's bytes are trusted only as far as the format allows ([`Rules`]): it says which bytes of the
//! image may be changed.

use std::collections::{BTreeMap, BTreeSet};

use vellum_core::{
    BlockSize, Buffer, Context, Error, ImageOffset, ImageSpan, Result, Storage, Zeroes, try_join_all,
};

use super::record::{BLOCK, BLOCK_LEN, Item, Record, SECTOR, SECTOR_LEN};
use super::ring::Ring;
use crate::bytes::{be64, put64};
use crate::sabotage::{self, Bug};
use crate::work;

/// This many sectors are verified at once.
const VERIFIED_AT_ONCE: usize = 2048;
/// At most this many tables, and at most this many sectors of guest data, are held in memory at a time.
const PAGES_MAX: usize = 64 << 10;
/// Pages that are no further apart than this are read with one read, including the gap: a seek costs more.
const GAP_MAX: u64 = 64 << 10;
/// The longest read, and the longest write of a checkpoint, in bytes.
const PIECE_MAX: u64 = 1 << 20;
/// At most this many writes of a checkpoint are in flight at once.
const WRITES_AT_ONCE: usize = 16;

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
    start: u64,
    end: u64,
}

/// The records that make up the last durable state.
pub(crate) struct Needed {
    /// In order; the last one is the newest. Empty when nothing was committed.
    pub(crate) records: Vec<Found>,
    /// The newest record, or its data, was incomplete, and the record was made void.
    pub(crate) left_out: bool,
}

/// Finds the records that count, on a storage that was settled ([`truth`](crate::truth)). If records or data
/// that once counted are missing, the error is `Corrupt`.
pub(crate) async fn find(storage: &dyn Storage, place: Place) -> Result<Needed> {
    let mut left_out = false;
    let mut found = read_run(storage, place).await?;
    let mut last = found.values().rev();
    if let Some(newest) = last.next()
        && !verify(storage, &newest.record).await?
    {
        // The record before is verified first. If it is damaged, the newest one must stay, as evidence that
        // it is not the last.
        if let Some(before) = last.next()
            && !verify(storage, &before.record).await?
        {
            return Err(Error::corrupt("flushed data is missing: the drive, or a layer above it, lost it"));
        }
        storage.write(place.run.start() + newest.start, Buffer::zeroed(BLOCK_LEN)).await?;
        storage.flush().await?;
        found.pop_last();
        left_out = true;
    }
    let Some((_, newest)) = found.last_key_value() else {
        return Ok(Needed { records: Vec::new(), left_out });
    };
    let (first, last) = (newest.record.tail, newest.record.sequence);
    let needed: Vec<Found> = found.split_off(&first).into_values().collect();
    if needed.len() as u64 != last - first + 1 {
        return Err(Error::corrupt(format!(
            "the journal has {} of the {} records it needs: the drive lost flushed data",
            needed.len(),
            last - first + 1
        )));
    }
    Ok(Needed { records: needed, left_out })
}

/// Makes the newest record void, because it counts on something else that did not arrive. The caller then has
/// to find anew which records count.
pub(crate) async fn leave_out(storage: &dyn Storage, run: ImageSpan, needed: &Needed) -> Result<()> {
    let newest = needed.records.last().expect("somebody looked at it");
    storage.write(run.start() + newest.start, Buffer::zeroed(BLOCK_LEN)).await?;
    storage.flush().await
}

/// Makes the result of the recovery durable, in a record of its own. Returns whether that record asks for a
/// repair.
pub(crate) async fn write_result(
    storage: &dyn Storage,
    run: ImageSpan,
    needed: &[Found],
    result: Record,
) -> Result<bool> {
    let mut result = result;
    let places = needed.iter().map(|found| (found.record.sequence, found.start, found.end));
    let mut ring = Ring::resumed(run.len(), places);
    let place = |ring: &mut Ring, result: &Record| {
        let len = (result.encoded_len() as u64).next_multiple_of(BLOCK);
        Some(len).filter(|len| *len <= ring.record_max()).and_then(|len| ring.place(result.sequence, len))
    };
    let mut at = place(&mut ring, &result);
    if at.is_none() {
        // The result has too many scattered words for a record.
        (result.items, result.asks_for_repair) = (Vec::new(), true);
        at = place(&mut ring, &result);
    }
    let at = at.ok_or_else(|| Error::corrupt("the journal has no space for a recovery"))?;
    storage.write(run.start() + at, Buffer::copy_of(&result.encode())).await?;
    storage.flush().await?;
    Ok(result.asks_for_repair)
}

/// Whether the record has no checks and debts. It is then the result of a recovery already, perhaps one that
/// was interrupted later.
pub(crate) fn is_result(record: &Record) -> bool {
    record.items.iter().all(|item| matches!(item, Item::Words { .. } | Item::Zero(_) | Item::Full { .. }))
}

/// All records of this generation, by sequence.
async fn read_run(storage: &dyn Storage, place: Place) -> Result<BTreeMap<u64, Found>> {
    let run = place.run;
    let len = run.len().min(storage.len().saturating_sub(run.start().bytes()));
    let len = if sabotage::is(Bug::RunCutShort) { len.min(64 << 10) } else { len };
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
    Ok(found)
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
                if !is_right && !sabotage::is(Bug::NoVerify) {
                    return Ok(false);
                }
            }
        }
    }
    Ok(true)
}

/// What a format lets its journal change.
pub(crate) trait Rules {
    /// Refuses words where no table can be.
    fn check_words(&self, span: ImageSpan) -> Result<()>;
    /// Refuses guest data where none can be.
    fn check_data(&self, span: ImageSpan) -> Result<()>;
    /// Tables begin at multiples of this, have this length, and begin as zeros.
    fn table(&self) -> BlockSize;
    /// Tables are read and written in pages of this.
    fn page(&self) -> BlockSize;
}

/// The image's tables as they will be: pages by place, over the contents of the image.
pub(crate) struct Replay<'a, R> {
    pub(crate) rules: R,
    storage: &'a dyn Storage,
    pages: BTreeMap<ImageOffset, Vec<u8>>,
    /// Tables that begin as zeros.
    zeroed: BTreeSet<ImageOffset>,
    /// Guest data, by sectors.
    data: BTreeMap<ImageOffset, Vec<u8>>,
}

impl<'a, R: Rules> Replay<'a, R> {
    pub(crate) fn new(rules: R, storage: &'a dyn Storage) -> Self {
        Self { rules, storage, pages: BTreeMap::new(), zeroed: BTreeSet::new(), data: BTreeMap::new() }
    }

    /// The page that holds a byte of a table, and the byte's offset in it.
    pub(crate) async fn page(&mut self, at: ImageOffset) -> Result<(&mut Vec<u8>, usize)> {
        let size = self.rules.page();
        let place = ImageOffset::new(size.round_down(at.bytes()));
        let within = usize::try_from(at.bytes() - place.bytes()).expect("within a page");
        if !self.pages.contains_key(&place) {
            let len = usize::try_from(size.bytes()).expect("a page");
            let table = ImageOffset::new(self.rules.table().round_down(at.bytes()));
            let bytes = match self.zeroed.contains(&table) {
                true => vec![0; len],
                false => {
                    let read = self.storage.read(place, Buffer::for_overwrite(len)).await;
                    read.context(|| format!("can't read the table at {place}"))?.slice().to_vec()
                }
            };
            self.pages.insert(place, bytes);
        }
        Ok((self.pages.get_mut(&place).expect("it is there"), within))
    }

    /// Reads the pages of these places that are not in memory, close ones with one read. A place that cannot
    /// be a page is skipped: a later access to it reports the error.
    pub(crate) async fn bring(&mut self, words: impl Iterator<Item = ImageOffset>) -> Result<()> {
        let size = self.rules.page();
        let place_of = |at: ImageOffset| ImageOffset::new(size.round_down(at.bytes()));
        let is_missing = |place: &ImageOffset| {
            let table = ImageOffset::new(self.rules.table().round_down(place.bytes()));
            !self.pages.contains_key(place) && !self.zeroed.contains(&table)
        };
        let can_be = |place: &ImageOffset| self.rules.check_words(place.span(size.bytes())).is_ok();
        let missing: BTreeSet<ImageOffset> = words.map(place_of).filter(is_missing).filter(can_be).collect();
        let spans: Vec<ImageSpan> =
            missing.into_iter().take(PAGES_MAX).map(|place| place.span(size.bytes())).collect();
        let pages = &mut self.pages;
        let read = read_together(self.storage, &spans, GAP_MAX, |span, bytes| {
            pages.insert(span.start(), bytes.to_vec());
        });
        read.await.context(|| "can't read the tables")
    }

    /// Reads the pages that the records are about to change, as far as they are in `run`.
    pub(crate) async fn bring_for(&mut self, run: ImageSpan, records: &[Found]) -> Result<()> {
        let items = || records.iter().flat_map(|found| &found.record.items);
        let tables: BTreeSet<ImageOffset> = items()
            .filter_map(|item| if let Item::Zero(span) = item { Some(span.start()) } else { None })
            .collect();
        let table = self.rules.table();
        let words: BTreeSet<ImageOffset> = items()
            .filter_map(|item| match item {
                Item::Words { at, values } => Some(at.span(values.len() as u64 * 8).intersect(run)),
                _ => None,
            })
            .filter(|span| !span.is_empty())
            .flat_map(|span| {
                let first = self.rules.page().round_down(span.start().bytes());
                let step = usize::try_from(self.rules.page().bytes()).expect("a page");
                (first..span.end().bytes()).step_by(step).map(ImageOffset::new)
            })
            .filter(|place| !tables.contains(&ImageOffset::new(table.round_down(place.bytes()))))
            .collect();
        self.bring(words.into_iter()).await
    }

    /// The words of all pages within the run that the records have changed.
    pub(crate) fn words_in(&self, span: ImageSpan) -> impl Iterator<Item = u64> {
        let pages = self.pages.range(span.start()..span.end());
        pages.flat_map(|(_, page)| page.chunks_exact(8).map(|word| be64(word, 0)))
    }

    /// A page, if the records have changed it or it was read before.
    pub(crate) fn changed_page(&self, at: ImageOffset) -> Option<&[u8]> {
        self.pages.get(&at).map(Vec::as_slice)
    }

    /// A page that was read before.
    pub(crate) fn seen_page(&self, at: ImageOffset) -> (&[u8], usize) {
        let place = ImageOffset::new(self.rules.page().round_down(at.bytes()));
        (&self.pages[&place], usize::try_from(at.bytes() - place.bytes()).expect("within a page"))
    }

    /// Applies a record's words that are inside the run.
    pub(crate) async fn replay_within(&mut self, run: ImageSpan, record: &Record) -> Result<()> {
        for item in &record.items {
            let Item::Words { at, values } = item else { continue };
            for (place, value) in (0..).map(|index| *at + index * 8).zip(values) {
                if run.contains(place) {
                    let (page, within) = self.page(place).await?;
                    put64(page, within, *value);
                }
            }
        }
        Ok(())
    }

    /// Whether the limit of tables in memory is reached.
    pub(crate) fn is_full(&self) -> bool {
        self.pages.len() > PAGES_MAX
    }

    /// Applies a record.
    pub(crate) async fn replay(&mut self, record: &Record) -> Result<()> {
        for item in &record.items {
            if self.pages.len().max(self.data.len()).max(self.zeroed.len()) > PAGES_MAX {
                return Err(Error::corrupt(
                    "the journal has more in it than one that was written like that can have",
                ));
            }
            match item {
                Item::Zero(span) => {
                    self.rules.check_words(*span)?;
                    let table = self.rules.table();
                    if span.len() != table.bytes() || !table.aligns(span.start()) {
                        return Err(Error::corrupt("the journal makes a table that is no cluster"));
                    }
                    let inside: Vec<ImageOffset> =
                        self.pages.range(span.start()..span.end()).map(|(at, _)| *at).collect();
                    inside.iter().for_each(|at| drop(self.pages.remove(at)));
                    self.zeroed.insert(span.start());
                }
                Item::Words { at, values } => {
                    self.rules.check_words(at.span(values.len() as u64 * 8))?;
                    for (place, value) in (0..).map(|index| *at + index * 8).zip(values) {
                        let (page, within) = self.page(place).await?;
                        put64(page, within, *value);
                    }
                }
                Item::Full { at, bytes } => {
                    self.rules.check_data(at.span(bytes.len() as u64))?;
                    for (index, sector) in (0..).zip(bytes.chunks_exact(SECTOR_LEN)) {
                        self.data.insert(*at + index * SECTOR, sector.to_vec());
                    }
                }
                Item::Check { .. } | Item::Other { .. } | Item::PendingRefcount { .. } => {}
            }
        }
        Ok(())
    }

    /// Writes everything to its home location. Returns the number of pages.
    pub(crate) async fn checkpoint(&self) -> Result<u64> {
        for at in &self.zeroed {
            let span = at.span(self.rules.table().bytes());
            self.storage.write_zeroes(span, Zeroes::MayUnmap).await?;
        }
        for (whole, len) in [(&self.pages, self.rules.page().bytes()), (&self.data, SECTOR)] {
            let pieces = joined(whole.keys().map(|at| at.span(len)), 0);
            let mut pieces = pieces.into_iter().peekable();
            while pieces.peek().is_some() {
                let batch = pieces.by_ref().take(WRITES_AT_ONCE).map(|piece| {
                    let mut data = Buffer::for_overwrite(usize::try_from(piece.len()).expect("a piece"));
                    for (at, bytes) in whole.range(piece.start()..piece.end()) {
                        data.copy_from(usize::try_from(*at - piece.start()).expect("within a piece"), bytes);
                    }
                    self.storage.write(piece.start(), data)
                });
                try_join_all(batch).await?;
            }
        }
        Ok(self.pages.len() as u64)
    }
}

/// Reads spans in order, with one read for those that are no further apart than `gap`. An error in a gap is
/// no error: where a read of several spans fails, each span is read on its own.
pub(crate) async fn read_together(
    storage: &dyn Storage,
    spans: &[ImageSpan],
    gap: u64,
    mut see: impl FnMut(ImageSpan, &[u8]),
) -> Result<()> {
    let mut rest = spans;
    for piece in joined(spans.iter().copied(), gap) {
        let (inside, later) = rest.split_at(rest.partition_point(|span| span.end() <= piece.end()));
        rest = later;
        let bytes_of = |span: ImageSpan| {
            storage.read(span.start(), Buffer::for_overwrite(usize::try_from(span.len()).expect("a piece")))
        };
        match bytes_of(piece).await {
            Ok(bytes) => {
                let bytes = bytes.contiguous();
                for span in inside {
                    let from = usize::try_from(span.start() - piece.start()).expect("within a piece");
                    let len = usize::try_from(span.len()).expect("within a piece");
                    see(*span, &bytes.slice()[from..from + len]);
                }
            }
            Err(error) if inside.len() < 2 => return Err(error),
            Err(_) => {
                for span in inside {
                    see(*span, bytes_of(*span).await?.contiguous().slice());
                }
            }
        }
    }
    Ok(())
}

/// Merges spans, which are in order and none longer than `PIECE_MAX`: those no further apart than `gap`
/// become one.
fn joined(spans: impl Iterator<Item = ImageSpan>, gap: u64) -> Vec<ImageSpan> {
    let mut pieces: Vec<ImageSpan> = Vec::new();
    for span in spans {
        match pieces.last_mut() {
            Some(last) if span.start() <= last.end() + gap && span.end() - last.start() <= PIECE_MAX => {
                *last = ImageSpan::between(last.start(), span.end().max(last.end()));
            }
            _ => pieces.push(span),
        }
    }
    pieces
}
