//! What a crash left: from slices and records to the map.
//!
//! ```text
//!   settle ► superblock ► ring: the newest record ► verify its slots ─ differ ─► void it ► flush ► the one before
//!                                                     │ hold
//!                                                     └► slice by slice, with what records say of it ► map, zeros, rows,
//!                                                        slots
//! ```
//!
//! 1. It writes only to make a record void that was never acknowledged, and the copy of a superblock that a change of
//!    size left behind. So it may be cut off anywhere.
//! 2. It reads no more than the map and the ring, and the slots of one or two records. In memory it has what is kept of the map
//!    (`fit`), the live part of the ring (`changes`), and some slices.
//! 3. What contradicts itself is refused, and nothing is guessed.
//! 4. Until the next record, the blocks that the newest one checks are not overwritten in place: they are unproven.

mod changes;
mod fit;

use std::collections::{BTreeMap, BTreeSet};

use futures_lite::future::zip;
use vellum_core::{
    Buffer, Context, Error, LocalFuture, Result, SharedStorage, Zeroes, join_all, try_join_all,
};

use crate::bytes::{be32, be64};
use crate::layout::{
    BLOCK_BYTES, BLOCK_LEN, Key, Layout, PAYLOAD_MAX, PLACE_BYTES, SLICE_HEADER_LEN, Superblock,
};
use crate::map::{Entry, Map, decode_part};
use crate::opened::Opened;
use crate::record::{Item, Record};
use crate::regions::Word;
use crate::slice::{Ledger, PAIRS_MAX, Slice};
use crate::slices::Slices;
use crate::slots::Slots;
use crate::state::{Budget, Limits, Start};
use crate::zeros::Run;
use changes::Changes;
use fit::Fit;

/// At most this many reads are in flight at once.
const READS_AT_ONCE: usize = 32;
/// This many slices are read at once, and as many wait in memory meanwhile.
const SLICES_AT_ONCE: usize = 16;
/// Where a slice has these fields.
const AS_OF_AT: usize = 32;
const LENGTH_AT: usize = 40;
/// The ring is read in pieces of this size.
const PIECE_BYTES: u64 = 1 << 20;

/// A good record, and where it is in the ring.
pub(crate) struct Found {
    bytes: Vec<u8>,
    at: u64,
}

impl Found {
    pub(crate) fn record(&self, superblock: &Superblock) -> Record {
        let decoded = Record::decode(&self.bytes, superblock.id, superblock.layout.slots);
        decoded.expect("it was decoded before").0
    }

    fn end(&self) -> u64 {
        self.at + self.bytes.len() as u64
    }
}

/// The ring, and where in it each good record is, by its sequence: its first byte, its length, its tail.
struct Records {
    bytes: Vec<u8>,
    places: BTreeMap<u64, (usize, usize, u64)>,
}

impl Records {
    fn found(&self, sequence: u64) -> Found {
        let (at, len, _) = self.places[&sequence];
        Found { bytes: self.bytes[at..at + len].to_vec(), at: at as u64 }
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
    let mut at = 0;
    while at < ring.len() {
        let len = usize::try_from(PIECE_BYTES.min(ring.len() - at)).expect("a piece");
        let piece = storage.read(ring.start() + at, Buffer::for_overwrite(len)).await?;
        let start = usize::try_from(at).expect("at most 64 MiB");
        piece.copy_to(0, &mut bytes[start..start + len]);
        at += len as u64;
    }
    let most = superblock.layout.record_bytes_max();
    let mut places = BTreeMap::new();
    let mut at = 0;
    while at < bytes.len() {
        let claimed = Record::claimed_len(&bytes[at..], superblock.id, most);
        let record =
            claimed.and_then(|_| Record::decode(&bytes[at..], superblock.id, superblock.layout.slots));
        if let Some((record, len)) = record {
            places.insert(record.sequence, (at, len, record.tail));
        }
        // Old records may lie anywhere within the place of a newer one.
        at += BLOCK_LEN;
    }
    Ok(Records { bytes, places })
}

/// The slice that counts, and its place.
async fn slice(storage: &SharedStorage, superblock: &Superblock, number: u32) -> Result<(Slice, u32)> {
    let at = [0, 1].map(|place| superblock.layout.slice_at(number, place));
    let heads = at.iter().map(|at| storage.read(*at, Buffer::for_overwrite(BLOCK_LEN)));
    let heads = try_join_all(heads).await?;
    let mut found: Vec<(u64, u32, usize)> = Vec::new();
    for (place, head) in (0..).zip(&heads) {
        let mut bytes = [0; SLICE_HEADER_LEN];
        head.copy_to(0, &mut bytes);
        // What it claims, which is checked when all of it has been read.
        let (as_of, len) = (be64(&bytes, AS_OF_AT), SLICE_HEADER_LEN + be32(&bytes, LENGTH_AT) as usize);
        if len as u64 <= PLACE_BYTES {
            found.push((as_of, place, len));
        }
    }
    // The newer one first; its payload may be torn.
    found.sort_unstable_by_key(|(as_of, ..)| std::cmp::Reverse(*as_of));
    for (_, place, len) in found {
        let len = len.next_multiple_of(BLOCK_LEN).min(usize::try_from(PLACE_BYTES).expect("88 KiB"));
        let mut bytes = vec![0; len];
        heads[place as usize].copy_to(0, &mut bytes[..BLOCK_LEN]);
        if len > BLOCK_LEN {
            let rest = Buffer::for_overwrite(len - BLOCK_LEN);
            storage.read(at[place as usize] + BLOCK_BYTES, rest).await?.copy_to(0, &mut bytes[BLOCK_LEN..]);
        }
        if let Some(slice) = Slice::decode(&bytes, superblock.id, number) {
            return Ok((slice, place));
        }
    }
    Err(refused(storage, &format!("slice {number} of the map is damaged in both places")))
}

fn refused(storage: &SharedStorage, what: &str) -> Error {
    Error::corrupt(format!(
        "{}: {what}: the flash cache has lost what it had made durable. `vellum flash check` says more; images that lack \
         writes can be given up to what they have with `vellum flash forget`",
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
    let (short, opened) = (BTreeSet::new(), Opened::default());
    let mut image = Image { superblock, records, ledger, map, slots, slices, void, short, opened };
    let newest = image.records.last_key_value().map_or(0, |(sequence, _)| *sequence);
    let (slice, place) = slice(storage, &superblock, 0).await?;
    let changes = take_ledger(storage, &mut image, (slice, place), newest)?;
    let fit = take_parts(storage, &mut image, (&changes, Fit::new(budget)), newest).await?;
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
    let holds = async |found: &Found| holds(storage, &superblock.layout, &found.record(superblock)).await;
    let mut void = None;
    if let Some(sequence) = records.places.last_key_value().map(|(sequence, _)| *sequence) {
        let newest = records.found(sequence);
        if !holds(&newest).await? {
            void = Some(newest.at);
            records.places.remove(&sequence);
            let before = match records.places.last_key_value().map(|(before, _)| *before) {
                Some(before) => before == sequence - 1 && holds(&records.found(before)).await?,
                None => sequence == 1,
            };
            if !before {
                return Err(refused(storage, "neither the newest record nor the one before it holds"));
            }
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

fn check_age(storage: &SharedStorage, slice: &Slice, newest: u64) -> Result<()> {
    match slice.as_of > newest {
        true => Err(refused(storage, &format!("slice {} is newer than all records", slice.number))),
        false => Ok(()),
    }
}

fn contradicts(storage: &SharedStorage, number: u32) -> Error {
    refused(storage, &format!("slice {number} of the map contradicts itself"))
}

/// The ledger, and what records newer than its slice say of it. Returns what they say of blocks.
fn take_ledger(
    storage: &SharedStorage,
    image: &mut Image,
    (slice, place): (Slice, u32),
    newest: u64,
) -> Result<Changes> {
    check_age(storage, &slice, newest)?;
    image.slices.set_place(0, place);
    image.ledger = Ledger::decode(&slice.payload).ok_or_else(|| contradicts(storage, 0))?;
    let mut changes = Changes::from(image.records.keys().next().copied().unwrap_or(1));
    for (&sequence, found) in &image.records {
        let record = found.record(&image.superblock);
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

/// The parts, one after another, each with what records newer than its slice say of it. Some slices are read while those
/// before them are taken.
async fn take_parts(
    storage: &SharedStorage,
    image: &mut Image,
    (changes, mut fit): (&Changes, Fit),
    newest: u64,
) -> Result<Fit> {
    let superblock = image.superblock;
    let numbers: Vec<u32> = (1..superblock.layout.slices()).collect();
    let read = async |numbers: &[u32]| -> Result<Vec<(Slice, u32)>> {
        let read = |number: u32| -> LocalFuture<'_, _> { Box::pin(slice(storage, &superblock, number)) };
        // The first that is wrong is named, whatever the order in which they come.
        join_all(numbers.iter().map(|number| read(*number))).await.into_iter().collect()
    };
    let records_bytes: u64 = image.records.values().map(|found| found.bytes.len() as u64).sum();
    let mut chunks = numbers.chunks(SLICES_AT_ONCE);
    let mut some = read(chunks.next().unwrap_or_default()).await?;
    while !some.is_empty() {
        let waiting: usize = some.iter().map(|(slice, _)| slice.payload.capacity()).sum();
        let more = records_bytes + changes.memory_bytes() + 2 * waiting as u64;
        let take = async {
            for (slice, place) in std::mem::take(&mut some) {
                check_age(storage, &slice, newest)?;
                image.slices.set_place(slice.number, place);
                take_part(storage, image, (changes, &mut fit), (slice, more))?;
            }
            Ok::<_, Error>(())
        };
        let (next, taken) = zip(read(chunks.next().unwrap_or_default()), take).await;
        taken?;
        some = next?;
    }
    Ok(fit)
}

/// One part. `more` is what is in memory beside the map.
fn take_part(
    storage: &SharedStorage,
    image: &mut Image,
    (changes, fit): (&Changes, &mut Fit),
    (slice, more): (Slice, u64),
) -> Result<()> {
    let Slice { number, as_of, payload } = slice;
    let layout = &image.superblock.layout;
    let decoded = decode_part(layout, number - 1, &payload);
    let mut blocks = decoded.ok_or_else(|| contradicts(storage, number))?;
    drop(payload);
    if let Some(record) = changes.apply((number, as_of), &image.records, layout.slots, &mut blocks) {
        image.slices.touch(number, record);
    }
    for group in blocks.chunk_by(|(a, _), (b, _)| a.group() == b.group()) {
        validate(storage, &image.ledger, &mut image.slots, group)?;
    }
    let more = more + (blocks.capacity() * size_of::<(Key, Entry)>()) as u64;
    fit.keep(&mut image.map, &mut image.slots, (number - 1, &blocks), more);
    match image.map.payload_of(number - 1) > PAYLOAD_MAX {
        true => Err(refused(
            storage,
            &format!("part {} of the map has more blocks than there may be", number - 1),
        )),
        false => Ok(()),
    }
}

/// No two blocks have one slot, none has a slot and a run, and each has a row. Nothing dirty is in a region that counts as
/// written. The slots are taken.
fn validate(
    storage: &SharedStorage,
    ledger: &Ledger,
    slots: &mut Slots,
    group: &[(Key, Entry)],
) -> Result<()> {
    let which = |key: Key| format!("block {} of disk {}", key.block(), key.row());
    for (key, entry) in group {
        if !slots.take_this(entry.slot) {
            return Err(refused(storage, &format!("{} has the slot of another", which(*key))));
        }
        if !ledger.zeros.is_empty() && ledger.zeros.get(*key).is_some() {
            return Err(refused(storage, &format!("{} has a slot and is zero", which(*key))));
        }
    }
    let (first, _) = group[0];
    if !ledger.rows.contains_key(&first.row()) {
        return Err(refused(storage, &format!("{} has no row", which(first))));
    }
    // A region has whole groups.
    match group.iter().find(|(_, entry)| entry.dirty) {
        Some((key, _)) if ledger.regions.has(*key) => {
            Err(refused(storage, &format!("{} is dirty, and its region counts as written", which(*key))))
        }
        _ => Ok(()),
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
    Ok(start_of(image))
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
