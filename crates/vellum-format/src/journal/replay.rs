//! What a crash left in the journal: found, verified, and replayed in memory.
//!
//! | found | state | done |
//! |---|---|---|
//! | no record of this generation | nothing was committed | nothing |
//! | the newest record, and its checks hold | it is the state | replayed up to it |
//! | the newest record, and a check fails | it was never acknowledged | made void, replayed up to the one before |
//! | a record that the newest one needs is missing | the medium lost what it had flushed | refused: corrupt |
//!
//! The journal's bytes are believed no further than the format says ([`Rules`]): which bytes of the image may be changed.

use std::collections::{BTreeMap, BTreeSet};

use vellum_core::{
    BlockSize, Buffer, Context, Error, ImageOffset, ImageSpan, Result, Storage, Zeroes, try_join_all,
};

use super::record::{BLOCK, BLOCK_LEN, Item, Record, SECTOR, SECTOR_LEN};
use super::ring::Ring;
use crate::bytes::{be64, put64};
use crate::sabotage::{self, Bug};

/// Sectors that are verified at once.
const VERIFIED_AT_ONCE: usize = 2048;
/// More tables than this are never away from home at a time, and more sectors of guest data neither.
const PAGES_MAX: usize = 64 << 10;
/// Pages that lie no further apart are read with one read, together with what lies between: a seek costs more.
const GAP_MAX: u64 = 64 << 10;
/// The longest read, and the longest write home, in bytes.
const PIECE_MAX: u64 = 1 << 20;
/// So many writes home are under way at once.
const WRITES_AT_ONCE: usize = 16;

/// What recovery did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Records that were replayed.
    pub records: u64,
    /// Pages of tables that were written.
    pub pages: u64,
    /// Units that told of themselves what they are. (native)
    pub born: u64,
    /// Clusters that were reserved for something that never came to be, and given back. (qcow2)
    pub given_back: u64,
    /// The newest record was not whole with its data, and was left out. Nobody had been told that it was durable.
    pub left_out: bool,
    /// The whole image was looked at and repaired. (qcow2)
    pub repaired: bool,
}

/// Where a journal is, and which of its records count.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) run: ImageSpan,
    pub(crate) generation: u64,
    pub(crate) key: u128,
}

/// A record and where it lies in the run.
pub(crate) struct Found {
    pub(crate) record: Record,
    start: u64,
    end: u64,
}

/// The records that make up the last durable state.
pub(crate) struct Needed {
    /// In order; the last one is the newest. None: nothing was committed.
    pub(crate) records: Vec<Found>,
    /// The newest record was not whole with its data, and was made void.
    pub(crate) left_out: bool,
}

/// Finds the records that count. What counted once and is not there is `Corrupt`.
pub(crate) async fn find(storage: &dyn Storage, place: Place) -> Result<Needed> {
    storage.flush().await?; // what is read from here on is what a power cut would leave
    let mut left_out = false;
    let mut found = read_run(storage, place).await?;
    let mut last = found.values().rev();
    if let Some(newest) = last.next()
        && !verify(storage, &newest.record).await?
    {
        // Looked at first: were it damaged, the newest must go on saying that it is not the last.
        if let Some(before) = last.next()
            && !verify(storage, &before.record).await?
        {
            return Err(Error::corrupt(
                "data that was flushed is not there any more: the drive, or what lies between, lost it",
            ));
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
            "the journal has {} of the {} records it needs: the drive lost what it had flushed",
            needed.len(),
            last - first + 1
        )));
    }
    Ok(Needed { records: needed, left_out })
}

/// Makes the newest record void: it counts on something else that did not arrive. What counts is to be found anew.
pub(crate) async fn leave_out(storage: &dyn Storage, run: ImageSpan, needed: &Needed) -> Result<()> {
    let newest = needed.records.last().expect("somebody looked at it");
    storage.write(run.start() + newest.start, Buffer::zeroed(BLOCK_LEN)).await?;
    storage.flush().await
}

/// Makes durable what the recovery comes to, in a record of its own. Tells whether that asks for a repair.
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
        // Too much is to be told, one here, one there.
        (result.items, result.asks_for_repair) = (Vec::new(), true);
        at = place(&mut ring, &result);
    }
    let at = at.ok_or_else(|| Error::corrupt("the journal has no room to be recovered in"))?;
    storage.write(run.start() + at, Buffer::copy_of(&result.encode())).await?;
    storage.flush().await?;
    Ok(result.asks_for_repair)
}

/// Whether the record has no checks and debts: it is a result already, of a recovery that was cut off after it, perhaps.
pub(crate) fn is_result(record: &Record) -> bool {
    record.items.iter().all(|item| matches!(item, Item::Words { .. } | Item::Zero(_) | Item::Full { .. }))
}

/// All records of this generation, by sequence.
async fn read_run(storage: &dyn Storage, place: Place) -> Result<BTreeMap<u64, Found>> {
    let run = place.run;
    let len = run.len().min(storage.len().saturating_sub(run.start().bytes()));
    let len = usize::try_from(len).expect("the place was checked: a few MiB");
    let bytes =
        storage.read(run.start(), Buffer::for_overwrite(len)).await.context(|| "can't read the journal")?;
    let longest =
        usize::try_from(Ring::new(run.len()).record_max()).expect("shorter than the run").max(BLOCK_LEN);
    let mut found = BTreeMap::new();
    let mut at = 0;
    while at < len {
        let piece = &bytes.slice()[at..len.min(at + longest)];
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
    /// Tables begin at multiples of this, are as long, and begin as zeros.
    fn table(&self) -> BlockSize;
    /// Tables are read and written in pages of this.
    fn page(&self) -> BlockSize;
}

/// The image's tables as they are to be: pages by place, over what is in the image.
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

    /// The page in which a byte of a table lies, and where in it.
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

    /// Reads the pages of these places that are not here, those that lie close together at once. What cannot be one is passed over:
    /// who asks for it will hear why.
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

    /// Reads the pages that records are about to change, as far as `run` has them.
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

    /// A page, if the records have changed it or it was looked at.
    pub(crate) fn changed_page(&self, at: ImageOffset) -> Option<&[u8]> {
        self.pages.get(&at).map(Vec::as_slice)
    }

    /// A page that was looked at before.
    pub(crate) fn seen_page(&self, at: ImageOffset) -> (&[u8], usize) {
        let place = ImageOffset::new(self.rules.page().round_down(at.bytes()));
        (&self.pages[&place], usize::try_from(at.bytes() - place.bytes()).expect("within a page"))
    }

    /// Applies what a record says of the words of a run.
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
                Item::Check { .. } | Item::Other { .. } | Item::Owed { .. } => {}
            }
        }
        Ok(())
    }

    /// Writes everything; tells how many pages.
    pub(crate) async fn go_home(&self) -> Result<u64> {
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

/// Reads spans in order, those that lie no further apart than `gap` with one read. What lies between is nobody's business: where a read
/// of several fails, each is read by itself.
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

/// Spans in order, none longer than `PIECE_MAX`, made fewer: those that lie no further apart than `gap` are one.
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
