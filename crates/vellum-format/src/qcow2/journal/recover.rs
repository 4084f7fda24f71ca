//! What a crash leaves, made whole.
//!
//! | found | state | done |
//! |---|---|---|
//! | no record of this generation | nothing was committed | the bit is cleared |
//! | the newest record, and its checks hold | it is the state | replayed up to it |
//! | the newest record, and a check fails | it was never acknowledged | made void, replayed up to the one before |
//! | a record that the newest one needs is missing | the medium lost what it had flushed | refused: corrupt |
//! | the newest record asks for a repair | the tables were being changed in place | replayed, then repaired |
//!
//! ```text
//!   flush ► read the run ► verify the newest ──fails──► void it ► flush ► the one before
//!         ► replay in memory ► lower what is owed ► a record that says so, and that the newest is durable ► flush
//!         ► zeros and pages home ► flush ► [repair] ► header without the bit ► flush                    commit point
//! ```
//!
//! 1. Up to the last step every input stays as it was, or is replaced by one that says the same: recovery may be cut off
//!    anywhere and begun again. The record that is added has no checks, so what is then written home cannot be held against
//!    the one before it.
//! 2. The cost is bounded by the journal, whatever the size of the image: one read of it, the checks of one transaction, a
//!    write of each page that changed. Only a repair looks at everything.
//! 3. The journal's bytes are believed no further than to change what is in clusters: nothing is written to the header, to the
//!    journal itself or far behind the end.

use std::collections::{BTreeMap, BTreeSet};

use vellum_core::{
    BlockSize, Buffer, Context, Error, ImageOffset, ImageSpan, Result, SharedStorage, Storage, Zeroes,
};

use super::super::check;
use super::super::header::Header;
use super::super::layout::{METADATA_PAGE, OFFSET_MASK, be64, incompatible, put64};
use super::super::prepare::give_back_tail;
use super::super::refcount;
use super::record::{BLOCK, BLOCK_LEN, Extension, Item, Record, SECTOR, SECTOR_LEN};
use super::ring::Ring;
use super::words::items_of;
use crate::sabotage::{self, Bug};

/// What the journal may make the file longer by: the length itself may have been lost in the crash.
const GROWTH_MAX: u64 = 1 << 40;
/// Sectors that are verified at once.
const VERIFIED_AT_ONCE: usize = 2048;
/// More tables than this are never away from home at a time, and more sectors of guest data neither.
const PAGES_MAX: usize = 64 << 10;
/// More owed clusters than this are left to a repair.
const OWED_MAX: u64 = 1 << 24;

/// What recovery did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Records that were replayed.
    pub records: u64,
    /// Pages of tables that were written.
    pub pages: u64,
    /// Clusters that were reserved for something that never came to be, and given back.
    pub given_back: u64,
    /// The newest record was not whole with its data, and was left out. Nobody had been told that it was durable.
    pub left_out: bool,
    /// The whole image was looked at and repaired.
    pub repaired: bool,
}

/// A record and where it lies in the run.
struct Found {
    record: Record,
    start: u64,
    end: u64,
}

/// Replays the journal of an image that was not closed ([`Header::needs_replay`]). Opening for writing does it by itself.
///
/// # Errors
/// `Corrupt` when the journal or the data that it counts on is not what was flushed once, and what the storage says.
pub async fn recover(header: &Header, image: &SharedStorage) -> Result<Recovery> {
    let storage = &**image;
    let (extension, _) =
        header.journal.ok_or_else(|| Error::corrupt("the header does not say where the journal is"))?;
    let run = extension.run;
    let cluster = header.cluster_size();
    if run.is_empty() || !cluster.aligns(run.start()) || run.start().bytes() == 0 {
        return Err(Error::corrupt("the journal cannot lie where the header says"));
    }
    storage.flush().await?; // what is read from here on is what a power cut would leave
    let mut recovery = Recovery::default();
    let mut found = read_run(storage, &extension).await?;
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
        storage.write(run.start() + newest.start, Buffer::zeroed(BLOCK_LEN)).await?;
        storage.flush().await?;
        found.pop_last();
        recovery.left_out = true;
    }
    let Some((_, newest)) = found.last_key_value() else {
        forget(header, storage, run).await?;
        return Ok(recovery);
    };
    let newest = newest.record.clone();
    let needed: Vec<&Found> = found.range(newest.tail..).map(|(_, found)| found).collect();
    if needed.len() as u64 != newest.sequence - newest.tail + 1 {
        return Err(Error::corrupt(format!(
            "the journal has {} of the {} records it needs: the drive lost what it had flushed",
            needed.len(),
            newest.sequence - newest.tail + 1
        )));
    }

    let mut tables = Tables::new(header, storage, run);
    let from = if sabotage::is(Bug::OnlyNewestReplayed) { needed.len() - 1 } else { 0 };
    for found in &needed[from..] {
        tables.replay(&found.record).await?;
    }
    recovery.records = needed.len() as u64;
    let mut asks_for_repair = newest.asks_for_repair;
    if !asks_for_repair {
        match tables.lower_owed(&newest).await? {
            Some(count) => recovery.given_back = count,
            None => asks_for_repair = true,
        }
    }
    // A record without checks and debts is a result already: of a recovery that was cut off after it, perhaps.
    let is_result = newest
        .items
        .iter()
        .all(|item| matches!(item, Item::Words { .. } | Item::Zero(_) | Item::Full { .. }));
    let is_told = is_result && asks_for_repair == newest.asks_for_repair;
    if !is_told && !sabotage::is(Bug::ResultNotTold) {
        let mut ring = Ring::resumed(
            run.len(),
            needed.iter().map(|found| (found.record.sequence, found.start, found.end)),
        );
        let result = Record {
            sequence: newest.sequence + 1,
            durable: newest.sequence,
            asks_for_repair,
            items: match asks_for_repair || sabotage::is(Bug::LoweredNotTold) {
                true => Vec::new(),
                false => tables.lowered_items(),
            },
            ..newest
        };
        asks_for_repair = write_result(storage, run, &mut ring, result).await?;
    }
    recovery.pages = tables.go_home().await?;
    if !sabotage::is(Bug::ForgottenBeforeHome) {
        storage.flush().await?;
    }
    if asks_for_repair {
        check::repair_dirty(header, image).await?;
        recovery.repaired = true;
    }
    forget(&Header::read(storage).await?, storage, run).await?;
    Ok(recovery)
}

/// Makes durable what the recovery comes to, in a record of its own. Tells whether that asks for a repair.
async fn write_result(
    storage: &dyn Storage,
    run: ImageSpan,
    ring: &mut Ring,
    result: Record,
) -> Result<bool> {
    let mut result = result;
    let place = |ring: &mut Ring, result: &Record| {
        let len = (result.encoded_len() as u64).next_multiple_of(BLOCK);
        Some(len).filter(|len| *len <= ring.record_max()).and_then(|len| ring.place(result.sequence, len))
    };
    let mut at = place(ring, &result);
    if at.is_none() {
        // Too many clusters were owed, one here, one there.
        (result.items, result.asks_for_repair) = (Vec::new(), true);
        at = place(ring, &result);
    }
    let at = at.ok_or_else(|| Error::corrupt("the journal has no room to be recovered in"))?;
    storage.write(run.start() + at, Buffer::copy_of(&result.encode())).await?;
    storage.flush().await?;
    Ok(result.asks_for_repair)
}

/// All records of this generation, by sequence.
async fn read_run(storage: &dyn Storage, extension: &Extension) -> Result<BTreeMap<u64, Found>> {
    let run = extension.run;
    let len = run.len().min(storage.len().saturating_sub(run.start().bytes()));
    let len = usize::try_from(len).expect("the extension was checked: a few MiB");
    let bytes =
        storage.read(run.start(), Buffer::for_overwrite(len)).await.context(|| "can't read the journal")?;
    let longest =
        usize::try_from(Ring::new(run.len()).record_max()).expect("shorter than the run").max(BLOCK_LEN);
    let mut found = BTreeMap::new();
    let mut at = 0;
    while at < len {
        let piece = &bytes.slice()[at..len.min(at + longest)];
        match Record::decode(piece, extension.generation, extension.key) {
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

/// Clears the bit, and forgets where the journal was. What the file grew by and nobody uses is given back: before, what lies
/// behind the journal; after, the journal, if it is last. What lies before it was there when the image was opened.
async fn forget(header: &Header, storage: &dyn Storage, run: ImageSpan) -> Result<()> {
    give_back_tail(header, storage, run).await?;
    let mut header = header.clone();
    let (extension, _) = header.journal.expect("as before");
    header.set_journal(Extension { run: ImageOffset::ZERO.span(0), key: 0, ..extension });
    header.set_features(header.incompatible & !incompatible::JOURNAL, header.autoclear);
    storage.write(ImageOffset::ZERO, header.first_sector()).await?;
    storage.flush().await?; // commit point of the recovery
    give_back_tail(&header, storage, run.start().span(0)).await?;
    if storage.limits().fast_zeroes && run.end().bytes() <= storage.len() {
        let _ = storage.write_zeroes(run, Zeroes::MayUnmap).await; // free space, from now on
    }
    Ok(())
}

/// The image's tables as they are to be: pages by place, over what is in the image.
struct Tables<'a> {
    header: &'a Header,
    storage: &'a dyn Storage,
    run: ImageSpan,
    page: BlockSize,
    /// Nothing may lie behind this.
    end: u64,
    pages: BTreeMap<ImageOffset, Vec<u8>>,
    /// Clusters that begin as zeros.
    zeroed: BTreeSet<ImageOffset>,
    /// Guest data, by sectors.
    data: BTreeMap<ImageOffset, Vec<u8>>,
    /// Words of refcounts that were lowered.
    lowered: BTreeSet<ImageOffset>,
}

impl<'a> Tables<'a> {
    fn new(header: &'a Header, storage: &'a dyn Storage, run: ImageSpan) -> Self {
        Self {
            header,
            storage,
            run,
            page: METADATA_PAGE.min(header.cluster_size()),
            end: storage.len().saturating_add(if storage.limits().fixed_len { 0 } else { GROWTH_MAX }),
            pages: BTreeMap::new(),
            zeroed: BTreeSet::new(),
            data: BTreeMap::new(),
            lowered: BTreeSet::new(),
        }
    }

    /// Refuses to change what no table can be.
    fn check(&self, span: ImageSpan) -> Result<()> {
        let is_header = span.start().bytes() < self.header.cluster_size().bytes();
        if is_header || span.overlaps(self.run) || span.end().bytes() > self.end {
            return Err(Error::corrupt(format!(
                "the journal changes bytes at {}, where no table is",
                span.start()
            )));
        }
        Ok(())
    }

    async fn page(&mut self, at: ImageOffset) -> Result<(&mut Vec<u8>, usize)> {
        let place = ImageOffset::new(self.page.round_down(at.bytes()));
        let within = usize::try_from(at.bytes() - place.bytes()).expect("within a page");
        if !self.pages.contains_key(&place) {
            let len = usize::try_from(self.page.bytes()).expect("a page");
            let cluster = ImageOffset::new(self.header.cluster_size().round_down(at.bytes()));
            let bytes = match self.zeroed.contains(&cluster) {
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

    async fn replay(&mut self, record: &Record) -> Result<()> {
        for item in &record.items {
            if self.pages.len().max(self.data.len()).max(self.zeroed.len()) > PAGES_MAX {
                return Err(Error::corrupt(
                    "the journal has more in it than one that was written like that can have",
                ));
            }
            match item {
                Item::Zero(span) => {
                    self.check(*span)?;
                    let cluster = self.header.cluster_size();
                    if span.len() != cluster.bytes() || !cluster.aligns(span.start()) {
                        return Err(Error::corrupt("the journal makes a table that is no cluster"));
                    }
                    let inside: Vec<ImageOffset> =
                        self.pages.range(span.start()..span.end()).map(|(at, _)| *at).collect();
                    inside.iter().for_each(|at| drop(self.pages.remove(at)));
                    self.zeroed.insert(span.start());
                }
                Item::Words { at, values } => {
                    self.check(at.span(values.len() as u64 * 8))?;
                    for (place, value) in (0..).map(|index| *at + index * 8).zip(values) {
                        let (page, within) = self.page(place).await?;
                        put64(page, within, *value);
                    }
                }
                Item::Full { at, bytes } => {
                    self.check(at.span(bytes.len() as u64))?;
                    for (index, sector) in (0..).zip(bytes.chunks_exact(SECTOR_LEN)) {
                        self.data.insert(*at + index * SECTOR, sector.to_vec());
                    }
                }
                Item::Check { .. } | Item::Other { .. } | Item::Owed { .. } => {}
            }
        }
        Ok(())
    }

    /// Lowers the refcounts that are owed; tells how many, or nothing when they are not what the journal believes and the
    /// image wants a repair.
    async fn lower_owed(&mut self, record: &Record) -> Result<Option<u64>> {
        let mut lowered = 0;
        for item in &record.items {
            let Item::Owed { first, count } = item else { continue };
            lowered += count;
            let end = (first + count).checked_mul(self.header.cluster_size().bytes());
            if lowered > OWED_MAX || end.is_none_or(|end| end > self.end) {
                return Ok(None);
            }
            for cluster in *first..first + count {
                if !self.lower(cluster).await? {
                    return Ok(None);
                }
            }
        }
        Ok(Some(lowered))
    }

    async fn lower(&mut self, cluster: u64) -> Result<bool> {
        let order = self.header.refcount_order;
        let per_block = (self.header.cluster_size().bytes() * 8) >> order;
        let entry = self.header.refcount_table.start() + (cluster / per_block) * 8;
        if entry >= self.header.refcount_table.end() {
            return Ok(false);
        }
        let (table, within) = self.page(entry).await?;
        let block = ImageOffset::new(be64(table, within) & OFFSET_MASK);
        if block.bytes() == 0 || !self.header.cluster_size().aligns(block) {
            return Ok(false);
        }
        let index = cluster % per_block;
        let word = block + ((index << order) / 64) * 8;
        self.check(word.span(8))?;
        let per_word = 64 >> order;
        let (page, within) = self.page(word).await?;
        let word_bytes = &mut page[within..within + 8];
        let count = refcount::read(word_bytes, order, index % per_word);
        if count == 0 {
            return Ok(false);
        }
        refcount::write(word_bytes, order, index % per_word, count - 1);
        self.lowered.insert(word);
        Ok(true)
    }

    fn lowered_items(&self) -> Vec<Item> {
        items_of(self.lowered.iter().map(|word| {
            let place = ImageOffset::new(self.page.round_down(word.bytes()));
            let within = usize::try_from(word.bytes() - place.bytes()).expect("within a page");
            (*word, be64(&self.pages[&place], within))
        }))
    }

    /// Writes everything; tells how many pages.
    async fn go_home(&self) -> Result<u64> {
        for at in &self.zeroed {
            let span = at.span(self.header.cluster_size().bytes());
            self.storage.write_zeroes(span, Zeroes::MayUnmap).await?;
        }
        for (at, bytes) in self.pages.iter().chain(&self.data) {
            self.storage.write(*at, Buffer::copy_of(bytes)).await?;
        }
        Ok(self.pages.len() as u64)
    }
}
