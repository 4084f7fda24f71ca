//! What a crash left: from slices and records to the map.
//!
//! ```text
//!   settle ► superblock ► ring: the newest record ► verify its slots ─ differ ─► void it ► flush ► the one before
//!                                                     │ hold
//!                                                     └► slice by slice, with what records say of it ► map, zeros, rows,
//!                                                        slots
//! ```
//!
//! 1. It writes only to make void what was never acknowledged, a record and places of slices (`places`), and the copy of a
//!    superblock that a change of size left behind. So it may be cut off anywhere.
//! 2. It reads no more than the map and the ring, and the slots of one or two records. In memory it has what is kept of the map
//!    (`fit`), the live part of the ring (`changes`), and some slices. A group of which nothing newer is known goes from its slice
//!    into the map as it is.
//! 3. What contradicts itself is refused, and nothing is guessed.
//! 4. Until the next record, the blocks that the newest one checks are not overwritten in place: they are unproven.

mod ahead;
mod changes;
mod fit;
mod places;
mod ring;
mod rules;
mod sieve;

use std::collections::{BTreeMap, BTreeSet};

use futures_lite::future::yield_now;
use smallvec::SmallVec;
use vellum_core::{Buffer, Context, Error, LocalFuture, Result, SharedStorage, Zeroes, try_join_all};

use crate::layout::{
    BLOCK_BYTES, BLOCK_LEN, Key, Layout, PAYLOAD_MAX, SECTOR_BYTES, SLICE_HEADER_LEN, Superblock,
};
use crate::map::{Entry, Head, Map, heads_of};
use crate::opened::Opened;
use crate::record::{Item, Record};
use crate::regions::Word;
use crate::slice::{Ledger, PAIRS_MAX, Slice};
use crate::slices::Slices;
use crate::slots::Slots;
use crate::state::{Budget, Limits, Start};
use crate::zeros::Run;
use ahead::Ahead;
use changes::{Changes, Fate, Newer};
use fit::Fit;
use places::{Ages, Claim, Other, judge};
use rules::Rules;

/// At most this many reads are in flight at once.
const READS_AT_ONCE: usize = 32;
/// This many slices are read ahead, or wait in memory.
const SLICES_AHEAD: usize = 32;
/// The ring is read in pieces of this size, some of them ahead.
const PIECE_BYTES: u64 = 1 << 20;
const PIECES_AHEAD: usize = 4;

/// A good record, and where it is in the ring.
pub(crate) struct Found {
    bytes: Vec<u8>,
    at: u64,
}

impl Found {
    /// What it says. Panics where it is none, which an opening would have refused.
    pub(crate) fn record(&self, superblock: &Superblock) -> Record {
        self.decoded(superblock).expect("it was decoded before")
    }

    fn decoded(&self, superblock: &Superblock) -> Option<Record> {
        Record::decode(&self.bytes, superblock.id, superblock.layout.slots).map(|(record, _)| record)
    }

    fn end(&self) -> u64 {
        self.at + self.bytes.len() as u64
    }
}

/// The ring, and where in it each whole record is, by its sequence: its first byte, its length, its tail. Only those that count
/// are decoded, so old ones may still be none.
struct Records {
    bytes: Vec<u8>,
    places: BTreeMap<u64, (usize, usize, u64)>,
}

impl Records {
    fn found(&self, sequence: u64) -> Found {
        let (at, len, _) = self.places[&sequence];
        Found { bytes: self.bytes[at..at + len].to_vec(), at: at as u64 }
    }

    /// The newest record, and what it says. Those behind it that are none are forgotten.
    fn newest(&mut self, superblock: &Superblock) -> Option<(Found, Record)> {
        while let Some((&sequence, _)) = self.places.last_key_value() {
            let found = self.found(sequence);
            if let Some(record) = found.decoded(superblock) {
                return Some((found, record));
            }
            self.places.remove(&sequence);
        }
        None
    }
}

/// What is on flash, by what counts.
pub(crate) struct Image {
    pub(crate) superblock: Superblock,
    /// Records by their sequence, from the newest one's tail to the newest.
    pub(crate) records: BTreeMap<u64, Found>,
    pub(crate) ledger: Ledger,
    pub(crate) map: Map,
    pub(crate) slots: Slots,
    pub(crate) slices: Slices,
    /// A record that was never acknowledged, which a recovery makes void.
    pub(crate) void: Option<u64>,
    /// Places that were cut off, which a recovery makes void: of which slice, which one, and how old the other is.
    torn: Vec<(u32, u32, u64)>,
    /// Slices that name blocks which are not in the map.
    short: BTreeSet<u32>,
    opened: Opened,
}

/// Whether what a record checks is in its slots.
async fn holds(storage: &SharedStorage, layout: &Layout, record: &Record) -> Result<bool> {
    let checked = |item: &Item| item.checked_slots().is_some();
    let checked: Vec<&Item> = record.items.iter().filter(|item| checked(item)).collect();
    for some in checked.chunks(READS_AT_ONCE) {
        let reads = some.iter().filter_map(|item| item.checked_slots()).map(|(slot, blocks)| {
            let buffer = Buffer::for_overwrite(blocks as usize * BLOCK_LEN);
            storage.read(layout.slot_at(slot), buffer)
        });
        for (item, bytes) in some.iter().zip(try_join_all(reads).await?) {
            if !item.holds(bytes.contiguous().slice()) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// All records of the ring, by their sequence.
async fn records(storage: &SharedStorage, superblock: &Superblock) -> Result<Records> {
    let ring = superblock.layout.ring();
    let mut bytes = vec![0; usize::try_from(ring.len()).expect("at most 64 MiB")];
    let read = |at: u64| -> LocalFuture<'_, Result<(u64, Buffer)>> {
        let len = usize::try_from(PIECE_BYTES.min(ring.len() - at)).expect("a piece");
        let read = storage.read(ring.start() + at, Buffer::for_overwrite(len));
        Box::pin(async move { Ok((at, read.await?)) })
    };
    let (mut at, mut pieces, mut result) = (0, Ahead::new(), Ok(()));
    while result.is_ok() {
        while at < ring.len() && pieces.len() < PIECES_AHEAD {
            pieces.add(read(at));
            at += PIECE_BYTES;
        }
        let Some(piece) = pieces.next().await else { break };
        result = piece.map(|(at, piece)| {
            let start = usize::try_from(at).expect("at most 64 MiB");
            piece.copy_to(0, &mut bytes[start..start + piece.len()]);
        });
    }
    pieces.end().await;
    result?;
    let most = superblock.layout.record_bytes_max();
    match ring::find(&bytes, superblock.id, most) {
        Some(found) => Ok(Records { bytes, places: found.places }),
        None => Err(refused(storage, "records overlap")),
    }
}

/// A slice that counts, as it is on flash.
struct Counting {
    number: u32,
    place: u32,
    as_of: u64,
    bytes: Vec<u8>,
    payload_len: usize,
    /// The other place is to be made void.
    is_other_torn: bool,
}

impl Counting {
    fn torn(&self) -> Option<(u32, u32, u64)> {
        self.is_other_torn.then_some((self.number, 1 - self.place, self.as_of))
    }

    fn payload(&self) -> &[u8] {
        &self.bytes[SLICE_HEADER_LEN..][..self.payload_len]
    }
}

/// The slice that counts. Of both places a header is read, and of one the rest: no more than the slice has, in units of the storage.
async fn slice(
    storage: &SharedStorage,
    superblock: &Superblock,
    number: u32,
    ages: Ages,
) -> Result<Counting> {
    let at = [0, 1].map(|place| superblock.layout.slice_at(number, place));
    let unit = storage.limits().block_size.bytes().clamp(SECTOR_BYTES, BLOCK_BYTES);
    let unit_len = usize::try_from(unit).expect("at most 4 KiB");
    let heads = at.iter().map(|at| storage.read(*at, Buffer::for_overwrite(unit_len)));
    let heads = try_join_all(heads).await?;
    let mut claims = [Claim::Unwritten; 2];
    let mut found: SmallVec<[(u64, u32, usize); 2]> = SmallVec::new();
    for (place, head) in (0..).zip(&heads) {
        let mut bytes = [0; SLICE_HEADER_LEN];
        head.copy_to(0, &mut bytes);
        // What it claims, which is checked when all of it has been read.
        claims[place as usize] = Claim::of(&bytes, superblock.id, number);
        if let Claim::Copy { as_of, len } = claims[place as usize] {
            found.push((as_of, place, len));
        }
    }
    // The newer one first; its payload may be torn.
    found.sort_unstable_by_key(|(as_of, ..)| std::cmp::Reverse(*as_of));
    for (_, place, len) in found {
        let len = len.next_multiple_of(unit_len);
        let mut bytes = Vec::with_capacity(len);
        heads[place as usize].pieces().for_each(|piece| bytes.extend_from_slice(piece));
        if len > unit_len {
            let rest = Buffer::for_overwrite(len - unit_len);
            let rest = storage.read(at[place as usize] + unit, rest).await?;
            rest.pieces().for_each(|piece| bytes.extend_from_slice(piece));
        }
        if let Some((as_of, payload_len)) = Slice::look(&bytes, superblock.id, number) {
            let other = judge(as_of, claims[1 - place as usize], ages);
            if other == Other::Damaged {
                let why = format!("place {} of slice {number} of the map is damaged", 1 - place);
                return Err(refused(storage, &why));
            }
            let is_other_torn = other == Other::ToVoid;
            return Ok(Counting { number, place, as_of, bytes, payload_len, is_other_torn });
        }
    }
    Err(refused(storage, &format!("slice {number} of the map is damaged in both places")))
}

fn refused(storage: &SharedStorage, what: &str) -> Error {
    Error::corrupt(format!(
        "{}: {what}: the flash cache has lost what it had made durable. Images that lack writes can be given up to what they have with \
         `vellum flash forget`",
        storage.name()
    ))
}

/// Reads what is on flash. Writes nothing.
pub(crate) async fn look(storage: &SharedStorage) -> Result<Image> {
    look_within(storage, None).await
}

/// As above. With a bound of memory, clean blocks for which it is too little are not in the map.
async fn look_within(storage: &SharedStorage, limits: Option<Limits>) -> Result<Image> {
    let superblock = Superblock::read(&**storage).await?;
    let layout = superblock.layout;
    let (map, slots, slices) = (Map::new(&layout), Slots::new(layout.slots), Slices::new(layout.slices()));
    let budget = limits.map(|limits| Budget::new(&layout, (&slots, &slices, &map), limits)).transpose();
    let budget = budget.context(|| storage.name().to_owned())?;
    let (records, void) = live_records(storage, &superblock).await?;
    let ledger = Ledger::default();
    let (short, opened, torn) = (BTreeSet::new(), Opened::default(), Vec::new());
    let mut image = Image { superblock, records, ledger, map, slots, slices, void, torn, short, opened };
    let newest = image.records.last_key_value().map_or(0, |(sequence, _)| *sequence);
    // The first record that is here is the tail of the newest.
    let tail = image.records.keys().next().copied().unwrap_or(1);
    let ages = Ages::of(&superblock, newest, tail);
    let slice = slice(storage, &superblock, 0, ages).await?;
    image.torn.extend(slice.torn());
    let changes = take_ledger(storage, &mut image, &slice, newest)?;
    let fit = take_parts(storage, &mut image, (&changes, Fit::new(budget)), ages).await?;
    (image.short, image.opened) = fit.end();
    // What a cache keeps whatever is in it.
    image.opened.bytes_max +=
        image.slots.memory_bytes() + image.slices.memory_bytes_max() + image.map.empty_bytes_max();
    Ok(image)
}

/// The records from the newest one's tail to the newest, and where one is that was never acknowledged.
async fn live_records(
    storage: &SharedStorage,
    superblock: &Superblock,
) -> Result<(BTreeMap<u64, Found>, Option<u64>)> {
    let mut records = records(storage, superblock).await.context(|| "can't read the ring")?;
    let holds = async |record: &Record| holds(storage, &superblock.layout, record).await;
    let mut void = None;
    if let Some((newest, record)) = records.newest(superblock)
        && !holds(&record).await?
    {
        void = Some(newest.at);
        records.places.remove(&record.sequence);
        let before = match records.newest(superblock) {
            Some((_, before)) => before.sequence == record.sequence - 1 && holds(&before).await?,
            None => record.sequence == 1,
        };
        if !before {
            return Err(refused(storage, "neither the newest record nor the one before it holds"));
        }
    }
    let last = records.places.last_key_value();
    let (newest, tail) = last.map_or((0, 1), |(sequence, (.., tail))| (*sequence, *tail));
    let live = records.places.split_off(&tail);
    if live.len() as u64 != (newest + 1).saturating_sub(tail) {
        return Err(refused(storage, "a record is missing"));
    }
    records.places = live;
    let live = records.places.keys().map(|sequence| (*sequence, records.found(*sequence))).collect();
    Ok((live, void))
}

fn check_age(storage: &SharedStorage, slice: &Counting, newest: u64) -> Result<()> {
    match slice.as_of > newest {
        true => Err(refused(storage, &format!("slice {} is newer than all records", slice.number))),
        false => Ok(()),
    }
}

fn contradicts(storage: &SharedStorage, number: u32) -> Error {
    refused(storage, &format!("slice {number} of the map contradicts itself"))
}

/// The ledger, and what records newer than its slice say of it. Returns what they say of blocks.
fn take_ledger(storage: &SharedStorage, image: &mut Image, slice: &Counting, newest: u64) -> Result<Changes> {
    check_age(storage, slice, newest)?;
    image.slices.set_place(0, slice.place);
    image.ledger = Ledger::decode(slice.payload()).ok_or_else(|| contradicts(storage, 0))?;
    let mut changes = Changes::from(image.records.keys().next().copied().unwrap_or(1));
    for (&sequence, found) in &image.records {
        let decoded = found.decoded(&image.superblock);
        let record = decoded.ok_or_else(|| refused(storage, "a record is missing"))?;
        changes.add(&image.superblock.layout, &record);
        if sequence <= slice.as_of {
            continue;
        }
        for item in record.items.iter().filter(|item| item.blocks().is_none()) {
            if !tell(&mut image.ledger, item) {
                let why = format!("record {sequence} has more runs than there may be");
                return Err(refused(storage, &why));
            }
            image.slices.touch(0, sequence);
        }
    }
    changes.sort();
    let ledger = &image.ledger;
    if ledger.regions.len() + ledger.zeros.len() > PAIRS_MAX {
        return Err(refused(storage, "there are more regions than there may be"));
    }
    let has_row = |word: &Word| ledger.rows.contains_key(&word.key.row());
    if let Some(word) = ledger.regions.words().find(|word| !has_row(word)) {
        return Err(refused(storage, &format!("a region of disk {} has no row", word.key.row())));
    }
    match ledger.zeros.runs().find(|run| !ledger.rows.contains_key(&run.key.row())) {
        Some(run) => Err(refused(storage, &format!("a run of zeros of disk {} has no row", run.key.row()))),
        None => Ok(changes),
    }
}

/// What an item that is about no single block says of the ledger. False when that has no room.
fn tell(ledger: &mut Ledger, item: &Item) -> bool {
    match item {
        Item::Zero { key, blocks, may_free } => {
            return ledger.zeros.restore(Run { key: *key, blocks: *blocks, may_free: *may_free });
        }
        Item::Unzero { key, blocks } => return ledger.zeros.remove_found(*key, *blocks),
        Item::Row(row) => {
            ledger.rows.insert(row.number, *row);
        }
        Item::NoRow(row) => {
            ledger.zeros.remove_row(*row);
            ledger.regions.remove_row(*row);
            ledger.rows.remove(row);
        }
        Item::Written(word) => ledger.regions.add(*word),
        Item::Settled(word) | Item::Void(word) => ledger.regions.remove(*word),
        Item::Put { .. } | Item::Puts { .. } | Item::Drop { .. } | Item::Drops { .. } => {}
    }
    true
}

/// The parts, one after another, each with what records newer than its slice say of it. Some slices are read ahead.
async fn take_parts(
    storage: &SharedStorage,
    image: &mut Image,
    (changes, fit): (&Changes, Fit),
    ages: Ages,
) -> Result<Fit> {
    let superblock = image.superblock;
    let read = |number: u32| -> LocalFuture<'_, _> { Box::pin(slice(storage, &superblock, number, ages)) };
    let mut numbers = 1..superblock.layout.slices();
    let mut reads = Ahead::new();
    let records: Vec<&[u8]> = image.records.values().map(|found| &found.bytes[..]).collect();
    let records_bytes: u64 = records.iter().map(|bytes| bytes.len() as u64).sum();
    let rules = Rules::of(storage, &image.ledger);
    let (map, slots, slices, torn) = (&mut image.map, &mut image.slots, &mut image.slices, &mut image.torn);
    let mut parts = Parts {
        storage,
        layout: superblock.layout,
        records: &records,
        changes,
        rules,
        fit,
        heads: Vec::new(),
        plain: Vec::new(),
        newer: Newer::default(),
        blocks: Vec::new(),
    };
    let (mut longest, mut taken) = (0, Ok(()));
    while taken.is_ok() {
        while reads.len() < SLICES_AHEAD
            && let Some(number) = numbers.next()
        {
            reads.add(read(number));
        }
        // The first that is wrong is named, whatever the order in which they come.
        let Some(slice) = reads.next().await else { break };
        taken = slice.and_then(|slice| {
            check_age(storage, &slice, ages.newest)?;
            slices.set_place(slice.number, slice.place);
            torn.extend(slice.torn());
            longest = longest.max(slice.bytes.capacity());
            let waiting = (reads.len() + 1) * longest;
            let more = records_bytes + changes.memory_bytes() + waiting as u64;
            let behind = parts.take(map, slots, &slice, more)?;
            if let Some(record) = behind {
                slices.touch(slice.number, record);
            }
            Ok(())
        });
        // What has been read meanwhile is seen, and the next requests begin.
        yield_now().await;
    }
    let fit = parts.fit;
    reads.end().await;
    taken.map(|()| fit)
}

/// What it takes to take parts.
struct Parts<'a> {
    storage: &'a SharedStorage,
    layout: Layout,
    records: &'a [&'a [u8]],
    changes: &'a Changes,
    rules: Rules<'a>,
    fit: Fit,
    /// Of the part that is being taken; here so that the memory is used again.
    heads: Vec<Head>,
    plain: Vec<Head>,
    newer: Newer,
    blocks: Vec<(Key, Entry)>,
}

impl Parts<'_> {
    /// One part. `more` is what is in memory beside the map. Returns the first record that the slice lacks.
    fn take(&mut self, map: &mut Map, slots: &mut Slots, slice: &Counting, more: u64) -> Result<Option<u64>> {
        let Self { storage, layout, changes, heads, plain, newer, blocks, .. } = self;
        let (number, payload) = (slice.number, slice.payload());
        let contradicts = || contradicts(storage, number);
        heads_of(layout, number - 1, payload, heads).ok_or_else(contradicts)?;
        plain.clear();
        blocks.clear();
        changes.newer(layout, (number, slice.as_of), self.records, newer);
        for head in heads.iter() {
            match changes.fate(head, newer) {
                Fate::Stays => {
                    self.rules.take_plain(slots, head, payload)?;
                    plain.push(*head);
                }
                Fate::Kept => {}
                Fate::Twice => return Err(contradicts()),
            }
        }
        let behind = changes.apply(payload, newer, blocks).map_err(|_| contradicts())?;
        for group in blocks.chunk_by(|(a, _), (b, _)| a.group() == b.group()) {
            self.rules.take(slots, group)?;
        }
        let own = (heads.capacity() + plain.capacity()) * size_of::<Head>()
            + blocks.capacity() * size_of::<(Key, Entry)>();
        let more = more + own as u64 + newer.memory_bytes();
        if !self.fit.keep(map, slots, (number - 1, (plain, payload), blocks), more) {
            return Err(contradicts());
        }
        match map.payload_of(number - 1) > PAYLOAD_MAX {
            true => {
                let why = format!("part {} of the map has more blocks than there may be", number - 1);
                Err(refused(storage, &why))
            }
            false => Ok(behind),
        }
    }
}

/// Recovers a cache: what a [`State`](crate::state::State) begins with.
pub(crate) async fn recover(storage: &SharedStorage, limits: Limits) -> Result<Start> {
    vellum_format::settle(&**storage).await?;
    let image = look_within(storage, Some(limits)).await?;
    let layout = image.superblock.layout;
    image.superblock.complete(&**storage).await.context(|| "can't write the copy of the superblock")?;
    if let Some(at) = image.void {
        let first = (layout.ring().start() + at).span(BLOCK_BYTES);
        storage.write_zeroes(first, Zeroes::Allocated).await.context(|| "can't make a record void")?;
        storage.flush().await?; // commit point
    }
    if !image.torn.is_empty() {
        void_places(storage, &image).await.context(|| "can't make a place of the map void")?;
        storage.flush().await?; // commit point
    }
    Ok(start_of(image))
}

/// The places that were cut off: only now is it certain that they were.
async fn void_places(storage: &SharedStorage, image: &Image) -> Result<()> {
    let Superblock { id, layout, .. } = image.superblock;
    for some in image.torn.chunks(READS_AT_ONCE) {
        let writes = some.iter().map(|(number, place, other_as_of)| {
            let mut head = vec![0; BLOCK_LEN];
            head[..SLICE_HEADER_LEN].copy_from_slice(&Slice::void(*number, id, *other_as_of));
            storage.write(layout.slice_at(*number, *place), Buffer::copy_of(&head))
        });
        try_join_all(writes).await?;
    }
    Ok(())
}

/// A cache whose id is zero.
pub(crate) fn no_id() -> Error {
    Error::corrupt("the id of the flash cache is zero")
}

/// What a [`State`](crate::state::State) begins with.
pub(crate) fn start_of(image: Image) -> Start {
    let layout = image.superblock.layout;
    let newest = image.records.last_key_value();
    let checked = |item: &Item| {
        let (first, blocks) = item.checked_slots().and(item.blocks()).unzip();
        (0..blocks.unwrap_or(0)).filter_map(move |n| Some(first?.plus(u64::from(n))))
    };
    Start {
        id: image.superblock.id,
        features: image.superblock.features,
        layout,
        map: image.map,
        slots: image.slots,
        sequence: newest.map_or(0, |(sequence, _)| *sequence),
        newest: newest.map_or_else(Vec::new, |(_, found)| {
            found.record(&image.superblock).items.iter().flat_map(checked).collect()
        }),
        records: image.records.iter().map(|(sequence, found)| (*sequence, found.at, found.end())).collect(),
        slices: image.slices,
        ledger: image.ledger,
        short: image.short,
        opened: image.opened,
    }
}
