//! What a crash left: from slices and records to the map.
//!
//! ```text
//!   settle ► superblock ► ring: the newest record ► verify its slots ─ differ ─► void it ► flush ► the one before
//!                                                     │ hold
//!                                                     └► slices ► records from the tail on ► map, zeros, rows, slots
//! ```
//!
//! 1. It writes only to make a record void that was never acknowledged, and the copy of a superblock that a change of
//!    size left behind. So it may be cut off anywhere.
//! 2. It reads no more than the map and the ring, and the slots of one or two records.
//! 3. What contradicts itself is refused, and nothing is guessed.
//! 4. Until the next record, the blocks that the newest one checks are not overwritten in place: they are unproven.

use std::collections::BTreeMap;

use vellum_core::{
    Buffer, Context, Error, LocalFuture, Result, SharedStorage, Zeroes, join_all, try_join_all,
};

use crate::bytes::{be32, be64};
use crate::layout::{
    BLOCK_BYTES, BLOCK_LEN, Key, Layout, PLACE_BYTES, SECTORS_ALL, SLICE_HEADER_LEN, Slot, Superblock,
};
use crate::map::{Entry, Map, decode_part};
use crate::record::{Item, Record};
use crate::regions::{REGION_BLOCKS, Word};
use crate::slice::{Ledger, PAIRS_MAX, Slice};
use crate::slices::Slices;
use crate::slots::Slots;
use crate::state::Start;
use crate::zeros::Run;

/// At most this many reads are in flight at once.
const READS_AT_ONCE: usize = 32;
/// Where a slice has these fields.
const AS_OF_AT: usize = 32;
const LENGTH_AT: usize = 40;
/// The ring is read in pieces of this size.
const PIECE_BYTES: u64 = 1 << 20;

/// A record and where it is: its first byte in the ring, and its length.
pub(crate) struct Found {
    pub(crate) record: Record,
    pub(crate) at: u64,
    pub(crate) len: u64,
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
async fn records(storage: &SharedStorage, superblock: &Superblock) -> Result<BTreeMap<u64, Found>> {
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
    let mut found = BTreeMap::new();
    let mut at = 0;
    while at < bytes.len() {
        let claimed = Record::claimed_len(&bytes[at..], superblock.id, most);
        let record =
            claimed.and_then(|_| Record::decode(&bytes[at..], superblock.id, superblock.layout.slots));
        if let Some((record, len)) = record {
            let sequence = record.sequence;
            found.insert(sequence, Found { record, at: at as u64, len: len as u64 });
        }
        // Old records may lie anywhere within the place of a newer one.
        at += BLOCK_LEN;
    }
    Ok(found)
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
        let bytes = storage.read(at[place as usize], Buffer::for_overwrite(len)).await?.contiguous();
        if let Some(slice) = Slice::decode(bytes.slice(), superblock.id, number) {
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
    let superblock = Superblock::read(&**storage).await?;
    let mut records = records(storage, &superblock).await.context(|| "can't read the ring")?;
    let layout = &superblock.layout;
    let mut void = None;
    if let Some((&sequence, newest)) = records.last_key_value()
        && !holds(storage, layout, &newest.record).await?
    {
        void = Some(newest.at);
        records.remove(&sequence);
        let before = match records.last_key_value() {
            Some((before, found)) => *before == sequence - 1 && holds(storage, layout, &found.record).await?,
            None => sequence == 1,
        };
        if !before {
            return Err(refused(storage, "neither the newest record nor the one before it holds"));
        }
    }
    let newest = records.last_key_value().map_or(0, |(sequence, _)| *sequence);
    let tail = records.last_key_value().map_or(1, |(_, found)| found.record.tail);
    records = records.split_off(&tail);
    if records.len() as u64 != (newest + 1).saturating_sub(tail) {
        return Err(refused(storage, "a record is missing"));
    }
    let mut image = Image {
        superblock,
        records,
        ledger: Ledger::default(),
        map: Map::new(layout),
        slots: Slots::new(layout.slots),
        slices: Slices::new(layout.slices()),
        void,
    };
    let as_of = read_slices(storage, &mut image, newest).await?;
    apply(storage, &mut image, &as_of)?;
    validate(storage, &mut image)?;
    Ok(image)
}

/// Takes the slices that count. Returns their `as_of`.
async fn read_slices(storage: &SharedStorage, image: &mut Image, newest: u64) -> Result<Vec<u64>> {
    let superblock = image.superblock;
    let numbers: Vec<u32> = (0..superblock.layout.slices()).collect();
    let mut all = Vec::with_capacity(numbers.len());
    for some in numbers.chunks(READS_AT_ONCE) {
        let reads: Vec<LocalFuture<'_, Result<(Slice, u32)>>> = some
            .iter()
            .map(|number| -> LocalFuture<'_, _> { Box::pin(slice(storage, &superblock, *number)) })
            .collect();
        for read in join_all(reads).await {
            let (slice, place) = read?;
            if slice.as_of > newest {
                return Err(refused(storage, &format!("slice {} is newer than all records", slice.number)));
            }
            image.slices.set_place(slice.number, place);
            all.push(slice.as_of);
            let number = slice.number;
            let damaged = || refused(storage, &format!("slice {number} of the map contradicts itself"));
            if number == 0 {
                image.ledger = Ledger::decode(&slice.payload).ok_or_else(damaged)?;
                continue;
            }
            let entries = decode_part(&superblock.layout, number - 1, &slice.payload).ok_or_else(damaged)?;
            for (key, entry) in entries {
                image.map.put(key, entry);
            }
        }
    }
    Ok(all)
}

/// Applies the records in order. A slice takes those that are newer than it.
fn apply(storage: &SharedStorage, image: &mut Image, as_of: &[u64]) -> Result<()> {
    let Image { superblock, records, ledger, map, slices, .. } = image;
    let layout = &superblock.layout;
    for (&sequence, Found { record, .. }) in records.iter() {
        let lacks = |number: u32| as_of[number as usize] < sequence;
        let lacks_key = |key: &Key| lacks(layout.slice_of(*key));
        for item in &record.items {
            match item {
                Item::Put { key, slot, sectors, dirty, .. } => {
                    if lacks_key(key) {
                        map.put(*key, Entry { slot: *slot, sectors: *sectors, dirty: *dirty });
                        slices.touch(layout.slice_of(*key), sequence);
                    }
                }
                Item::Puts { key, slot, blocks, dirty, .. } => {
                    // They are of one group, so of one slice.
                    if lacks_key(key) {
                        for n in 0..*blocks {
                            let slot = Slot(slot.0 + n);
                            let entry = Entry { slot, sectors: SECTORS_ALL, dirty: *dirty };
                            map.put(key.plus(u64::from(n)), entry);
                        }
                        slices.touch(layout.slice_of(*key), sequence);
                    }
                }
                Item::Drop { .. } | Item::Drops { .. } => {
                    if let Some((key, blocks)) = item.blocks()
                        && lacks_key(&key)
                    {
                        for n in 0..blocks {
                            map.remove(key.plus(u64::from(n)));
                        }
                        slices.touch(layout.slice_of(key), sequence);
                    }
                }
                Item::Zero { key, blocks, may_free } => {
                    for gone in map.keys_between(*key, *blocks).into_iter().filter(lacks_key) {
                        map.remove(gone);
                        slices.touch(layout.slice_of(gone), sequence);
                    }
                    let run = Run { key: *key, blocks: *blocks, may_free: *may_free };
                    if lacks(0) && !ledger.zeros.restore(run) {
                        return Err(refused(
                            storage,
                            &format!("record {sequence} has more runs than there may be"),
                        ));
                    }
                }
                Item::Unzero { key, blocks } => {
                    if lacks(0) && !ledger.zeros.remove_found(*key, *blocks) {
                        return Err(refused(
                            storage,
                            &format!("record {sequence} has more runs than there may be"),
                        ));
                    }
                }
                Item::Row(row) => {
                    if lacks(0) {
                        ledger.rows.insert(row.number, *row);
                    }
                }
                Item::NoRow(row) => {
                    let first = Key::new(*row, 0);
                    for gone in
                        map.keys_between(first, crate::layout::BLOCKS_MAX).into_iter().filter(lacks_key)
                    {
                        map.remove(gone);
                        slices.touch(layout.slice_of(gone), sequence);
                    }
                    if lacks(0) {
                        ledger.zeros.remove_row(*row);
                        ledger.regions.remove_row(*row);
                        ledger.rows.remove(row);
                    }
                }
                Item::Written(word) => {
                    if lacks(0) {
                        ledger.regions.add(*word);
                    }
                }
                Item::Settled(word) => {
                    if lacks(0) {
                        ledger.regions.remove(*word);
                    }
                }
                Item::Void(word) => {
                    for region in word.regions() {
                        let blocks = map.keys_between(region, REGION_BLOCKS);
                        for gone in blocks.into_iter().filter(lacks_key) {
                            map.remove(gone);
                            slices.touch(layout.slice_of(gone), sequence);
                        }
                    }
                    if lacks(0) {
                        ledger.regions.remove(*word);
                    }
                }
            }
            if item.blocks().is_none() && lacks(0) {
                slices.touch(0, sequence);
            }
        }
    }
    Ok(())
}

/// No two blocks have one slot, none has a slot and a run, and each has a row. Nothing dirty is in a region that counts as
/// written.
fn validate(storage: &SharedStorage, image: &mut Image) -> Result<()> {
    for (key, entry) in image.map.entries() {
        let which = || format!("block {} of disk {}", key.block(), key.row());
        if !image.slots.take_this(entry.slot) {
            return Err(refused(storage, &format!("{} has the slot of another", which())));
        }
        if image.ledger.zeros.get(key).is_some() {
            return Err(refused(storage, &format!("{} has a slot and is zero", which())));
        }
        if entry.dirty && image.ledger.regions.has(key) {
            return Err(refused(storage, &format!("{} is dirty, and its region counts as written", which())));
        }
        if !image.ledger.rows.contains_key(&key.row()) {
            return Err(refused(storage, &format!("{} has no row", which())));
        }
    }
    if image.ledger.regions.len() + image.ledger.zeros.len() > PAIRS_MAX {
        return Err(refused(storage, "there are more regions than there may be"));
    }
    let has_row = |word: &Word| image.ledger.rows.contains_key(&word.key.row());
    if let Some(word) = image.ledger.regions.words().find(|word| !has_row(word)) {
        return Err(refused(storage, &format!("a region of disk {} has no row", word.key.row())));
    }
    match image.ledger.zeros.runs().find(|run| !image.ledger.rows.contains_key(&run.key.row())) {
        Some(run) => Err(refused(storage, &format!("a run of zeros of disk {} has no row", run.key.row()))),
        None => Ok(()),
    }
}

/// Recovers a cache: what a [`State`](crate::state::State) begins with.
pub(crate) async fn recover(storage: &SharedStorage) -> Result<Start> {
    vellum_format::settle(&**storage).await?;
    let image = look(storage).await?;
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
        newest: newest
            .map_or_else(Vec::new, |(_, found)| found.record.items.iter().flat_map(checked).collect()),
        records: image
            .records
            .iter()
            .map(|(sequence, found)| (*sequence, found.at, found.at + found.len))
            .collect(),
        slices: image.slices,
        ledger: image.ledger,
    }
}
