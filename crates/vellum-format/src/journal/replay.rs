//! The records that count after a crash ([`find`](super::find)), replayed in memory.
//!
//! The journal's bytes are trusted only as far as the format allows ([`Rules`]): it says which bytes of the
//! image may be changed.

use std::collections::{BTreeMap, BTreeSet};

use vellum_core::{
    BlockSize, Buffer, Context, Error, ImageOffset, ImageSpan, Result, Storage, Zeroes, try_join_all,
};

use super::find::Found;
use super::record::{BLOCK, Item, Record, SECTOR, SECTOR_LEN};
use super::ring::Ring;
use crate::bytes::{be64, put64};

/// At most this many tables, and at most this many sectors of guest data, are held in memory at a time.
const PAGES_MAX: usize = 64 << 10;
/// Pages that are no further apart than this are read with one read, including the gap: a seek costs more.
const GAP_MAX: u64 = 64 << 10;
/// The longest read, and the longest write of a checkpoint, in bytes.
const PIECE_MAX: u64 = 1 << 20;
/// At most this many writes of a checkpoint are in flight at once.
const WRITES_AT_ONCE: usize = 16;

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
