//! The scan of open zones after a crash: it finds entries that no record has.
//!
//! ```text
//!   all records but the newest replayed ► a newest record that names a broken packed block: left out
//!     ► the newest replayed
//!     ► open zones are read: some blocks count, and the table gets their entries
//! ```
//!
//! What becomes of the blocks that are found is decided by the table in `zone_cases.rs`.
//!
//! Only the newest record can name a block that did not arrive: all records before it were flushed, and the
//! blocks with them. It was never acknowledged, and is left out like a record whose check fails. The scan can
//! be interrupted and started again any number of times: bits, tags and blocks stay as they are until the
//! superblock says that there is nothing to recover.

use std::collections::BTreeMap;

use vellum_core::{BlockSize, Buffer, Error, ImageOffset, ImageSpan, Result, Storage, try_join_all};

use super::embed::{BLOCK_LEN, BLOCKS_MAX, Identity, identify};
use super::geometry::{Bits, GENERATION_WORD, Places, RECORDED_WORD, SUB_BLOCK, TAG_WORD};
use super::image::mask;
use super::zone_cases::{Bit, Block, Entry, Fact, Facts, Next, Then};
use crate::bytes::{be64, put64};
use crate::journal::record::{Item, Record};
use crate::journal::replay::{Replay, Rules, read_together};

/// This many bytes are read at once.
const PIECE: u64 = 1 << 20;
/// Packed blocks that lie no further apart than this are read together.
const GAP_MAX: u64 = 256 << 10;
/// At most this many pieces are read concurrently.
const READS_AT_ONCE: usize = 4;
/// The size of a block, packed or plain.
const BLOCK: BlockSize = BlockSize::PAGE;
/// At most this many zones are open at a time, so at most 4 GiB are read.
const OPEN_ACCEPTED_MAX: usize = 64;

/// A zone that was open.
struct OpenZone {
    zone: u32,
    tag: u64,
    recorded: Vec<u64>,
}

impl OpenZone {
    fn bit(&self, index: u32) -> Bit {
        let is_recorded = self.recorded[index as usize / 64] >> (index % 64) & 1 == 1;
        if is_recorded { Bit::Set } else { Bit::Clear }
    }
}

/// The last unit that the found entries name, and how many entries were found.
pub(super) struct FoundEntries {
    pub(super) last: u32,
    pub(super) count: u64,
}

/// Adds the entries that only packed blocks hold to the replayed table.
pub(super) async fn scan_open_zones<R: Rules>(
    replay: &mut Replay<'_, R>,
    storage: &dyn Storage,
    places: &Places,
    generation: u64,
) -> Result<FoundEntries> {
    let mut entries = FoundEntries { last: 0, count: 0 };
    if places.shape().zone().is_none() {
        return Ok(entries);
    }
    for zone in find_open_zones(replay, storage, places, generation).await? {
        let blocks = find_blocks(storage, places, &zone).await?;
        let known = |identity: &&Identity| u64::from(identity.guest_unit) < places.shape().units();
        let guests = blocks.values().filter(known);
        let words = guests.flat_map(|identity| {
            let entry = places.entry(u64::from(identity.guest_unit)).word;
            let of_base = bits_over_base(places, identity).map(|(bit, mask)| [bit.word, mask.word]);
            std::iter::once(entry).chain(of_base.into_iter().flatten())
        });
        replay.bring(words).await?;
        for index in 0..places.units_per_zone() {
            let unit = zone.zone * places.units_per_zone() + 1 + index;
            let identity = blocks.get(&unit);
            let then = decide(replay, places, zone.bit(index), unit, identity).await?;
            let (Then::BlockCounts | Then::BothCount, Some(identity)) = (then, identity) else { continue };
            if let Some((bit, mask)) = bits_over_base(places, identity) {
                let (page, within) = replay.page(bit.word).await?;
                if bit.get(be64(page, within)) == 0 {
                    let (page, within) = replay.page(mask.word).await?;
                    let word = mask.set(be64(page, within), mask::DATA);
                    put64(page, within, word);
                }
            }
            if then == Then::BothCount {
                continue;
            }
            let bits = places.entry(u64::from(identity.guest_unit));
            let (page, within) = replay.page(bits.word).await?;
            let entry = places.make_entry(unit, u32::from(identity.block) + 1);
            let word = bits.set(be64(page, within), u64::from(entry));
            put64(page, within, word);
            entries.last = entries.last.max(unit);
            entries.count += 1;
        }
    }
    Ok(entries)
}

/// The bit and the mask that say whether the image has the sub-block that this packed block is. `None` behind the base.
fn bits_over_base(places: &Places, identity: &Identity) -> Option<(Bits, Bits)> {
    let shape = places.shape();
    let unit = shape.layout.unit().expect("it has units");
    let sub = u64::from(identity.guest_unit) * unit.bytes() / SUB_BLOCK.bytes() + u64::from(identity.block);
    let block = sub >> (shape.block.shift() - SUB_BLOCK.shift());
    (sub < shape.sub_blocks()).then(|| (places.bit(block), places.mask(sub)))
}

/// The decision about a unit of an open zone in which this packed block was found, if any.
async fn decide<R: Rules>(
    replay: &mut Replay<'_, R>,
    places: &Places,
    bit: Bit,
    unit: u32,
    identity: Option<&Identity>,
) -> Result<Then> {
    let guest = identity.map_or(0, |identity| u64::from(identity.guest_unit));
    let mut facts = Facts::default();
    loop {
        match facts.next() {
            Next::LookAt(Fact::Bit) => facts.bit = Some(bit),
            Next::LookAt(Fact::Block) => {
                facts.block = Some(match identity {
                    None => Block::None,
                    Some(_) if guest >= places.shape().units() => Block::BehindTheEnd,
                    Some(_) => Block::OfTheDisk,
                });
            }
            Next::LookAt(Fact::Entry) => {
                let bits = places.entry(guest);
                let (page, within) = replay.page(bits.word).await?;
                let entry = u32::try_from(bits.get(be64(page, within))).expect("32 bits");
                let form = identity.map(|identity| u32::from(identity.block) + 1);
                facts.entry = Some(match places.split_entry(entry) {
                    (0, 0) => Entry::Empty,
                    (named, of) if named == unit && Some(of) == form => Entry::SameBlock,
                    (named, _) if named == unit => Entry::SameUnit,
                    _ => Entry::OtherUnit,
                });
            }
            Next::Do(then) => return Ok(then),
        }
    }
}

/// Whether the record names a packed block of an open zone that is not there. Such a record was never
/// acknowledged. `replay` has all records before it.
pub(super) async fn names_what_is_lost<R: Rules>(
    replay: &Replay<'_, R>,
    storage: &dyn Storage,
    places: &Places,
    generation: u64,
    record: &Record,
) -> Result<bool> {
    if places.shape().zone().is_none() {
        return Ok(false);
    }
    let open = find_open_zones(replay, storage, places, generation).await?;
    let mut named: BTreeMap<ImageOffset, Expected> = BTreeMap::new();
    for item in &record.items {
        let Item::Words { at, values } = item else { continue };
        let words = (0..).map(|index| *at + index * 8).zip(values);
        let entries = words.filter_map(|(word, value)| Some((places.entry_at(word)?, value)));
        for (first, value) in entries {
            for (number, shift) in [(0, 32), (1, 0)] {
                let guest_unit = first + number;
                let entry = u32::try_from(value >> shift & 0xFFFF_FFFF).expect("32 bits");
                let Some((at, expected)) = expected(places, &open, guest_unit, entry) else { continue };
                // No block belongs to two units.
                if named.insert(at, expected).is_some_and(|before| before != expected) {
                    return Ok(true);
                }
            }
        }
    }
    let blocks: Vec<ImageSpan> = named.keys().map(|at| at.span(BLOCK.bytes())).collect();
    let mut all_there = true;
    read_together(storage, &blocks, GAP_MAX, |span, bytes| {
        let expected = &named[&span.start()];
        let found = identify(bytes, expected.tag, expected.unit, expected.block);
        all_there &= found.is_some_and(|found| u64::from(found.guest_unit) == expected.guest_unit);
    })
    .await?;
    Ok(!all_there)
}

/// The identity that a packed block must have.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Expected {
    tag: u64,
    guest_unit: u64,
    unit: u32,
    block: u8,
}

/// What an entry names, if that is a packed block in an open zone.
fn expected(
    places: &Places,
    open: &[OpenZone],
    guest_unit: u64,
    entry: u32,
) -> Option<(ImageOffset, Expected)> {
    let (unit, form) = places.split_entry(entry);
    let block = form.checked_sub(1).filter(|_| unit != 0)?;
    let (zone, _) = places.zone_of(unit)?;
    let tag = open.iter().find(|open| open.zone == zone)?.tag;
    let at = places.unit(unit).start() + u64::from(block) * BLOCK_LEN as u64;
    let block = u8::try_from(block).expect("at most 30");
    Some((at, Expected { tag, guest_unit, unit, block }))
}

/// The zones that were open in this generation.
async fn find_open_zones<R: Rules>(
    replay: &Replay<'_, R>,
    storage: &dyn Storage,
    places: &Places,
    generation: u64,
) -> Result<Vec<OpenZone>> {
    let mut open = Vec::new();
    let recorded_words = u64::from(places.units_per_zone().div_ceil(64));
    for span in places.zone_table() {
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(PIECE);
            let len = usize::try_from(now.len()).expect("a piece");
            // A long table is mostly a hole. The journal may still have changed pages in it.
            let runs = storage.runs(now).await?;
            let is_hole = runs.iter().all(|run| !run.is_data)
                && runs.last().is_none_or(|run| run.span.end() >= now.end());
            let bytes = match is_hole {
                true => None,
                false => Some(storage.read(now.start(), Buffer::for_overwrite(len)).await?.contiguous()),
            };
            let pages = bytes.as_ref().map_or(&[][..], |bytes| bytes.slice()).chunks(4096);
            let pages = pages.map(Some).chain(std::iter::repeat(None));
            for (at, page) in (0..now.len() / 4096).map(|page| now.start() + page * 4096).zip(pages) {
                let Some(page) = replay.changed_page(at).or(page) else { continue };
                for (entry, zone) in
                    page.chunks_exact(256).zip(places.zone_at(at).expect("a page of the zone table")..)
                {
                    let word = |word: u64| be64(entry, usize::try_from(word * 8).expect("below 256"));
                    let zone = u32::try_from(zone).expect("at most 2^18");
                    let has_units = zone < places.unit_max() / places.units_per_zone();
                    if word(GENERATION_WORD) != generation || generation == 0 || !has_units {
                        continue;
                    }
                    let recorded = (0..recorded_words).map(|index| word(RECORDED_WORD + index)).collect();
                    open.push(OpenZone { zone, tag: word(TAG_WORD), recorded });
                }
            }
            rest = later;
        }
    }
    match open.len() <= OPEN_ACCEPTED_MAX {
        true => Ok(open),
        false => Err(Error::corrupt(format!("{} zones are open, which is impossible", open.len()))),
    }
}

/// The blocks of a zone that hold their units' entries, by unit.
async fn find_blocks(
    storage: &dyn Storage,
    places: &Places,
    zone: &OpenZone,
) -> Result<BTreeMap<u32, Identity>> {
    let mut found = BTreeMap::new();
    let mut pieces = Vec::new();
    for span in unrecorded(places, zone) {
        let end = span.end().bytes().min(storage.len());
        let mut at = span.start();
        while at.bytes() < end {
            let rest = ImageSpan::between(at, ImageOffset::new(end));
            let Some(run) = storage.runs(rest).await?.first().copied().filter(|run| !run.span.is_empty())
            else {
                break;
            };
            // The host's blocks may be smaller than ours. Pieces begin at our blocks, wherever the host's
            // runs begin.
            let run_end = run.span.end().bytes();
            let hole_end = ImageOffset::new(BLOCK.round_down(run_end));
            if !run.is_data && hole_end > at {
                at = hole_end;
                continue;
            }
            let data_end = BLOCK.round_up(run_end).max(at.bytes() + BLOCK.bytes());
            let piece = at.span((data_end - at.bytes()).min(PIECE).min(end - at.bytes()));
            pieces.push(piece);
            at = ImageOffset::new(BLOCK.round_up(piece.end().bytes()));
        }
    }
    for some in pieces.chunks(READS_AT_ONCE) {
        let reads = some.iter().map(|piece| {
            let len = usize::try_from(piece.len()).expect("a piece");
            storage.read(piece.start(), Buffer::for_overwrite(len))
        });
        for (piece, bytes) in some.iter().zip(try_join_all(reads).await?) {
            look_for_blocks(places, zone, *piece, bytes.contiguous().slice(), &mut found);
        }
    }
    Ok(found)
}

/// The runs of a zone's units that are not recorded. Only these are read.
fn unrecorded(places: &Places, zone: &OpenZone) -> Vec<ImageSpan> {
    let per_zone = places.units_per_zone();
    let first = zone.zone * per_zone + 1;
    let units = (0..per_zone).filter(|index| zone.bit(*index).is_scanned());
    let mut runs: Vec<ImageSpan> = Vec::new();
    for span in units.map(|index| places.unit(first + index)) {
        match runs.last_mut() {
            Some(last) if last.end() == span.start() => *last = ImageSpan::between(last.start(), span.end()),
            _ => runs.push(span),
        }
    }
    runs
}

/// Looks at the blocks of a piece, which begins at a block.
fn look_for_blocks(
    places: &Places,
    zone: &OpenZone,
    piece: ImageSpan,
    bytes: &[u8],
    found: &mut BTreeMap<u32, Identity>,
) {
    let first = zone.zone * places.units_per_zone() + 1;
    let start = places.unit(first).start();
    let unit = places.shape().layout.unit().expect("it has units");
    let places_of_blocks = (0..).map(|block| piece.start() + block * BLOCK.bytes());
    for (at, block) in places_of_blocks.zip(bytes.chunks(BLOCK_LEN)) {
        let within = at - start;
        let index = u32::try_from(within >> unit.shift()).expect("at most 1024");
        let number = (within & (unit.bytes() - 1)) / BLOCK.bytes();
        let Ok(number) = u8::try_from(number) else { continue };
        if u64::from(number) >= BLOCKS_MAX || !zone.bit(index).is_scanned() {
            continue;
        }
        if let Some(identity) = identify(block, zone.tag, first + index, number) {
            found.insert(first + index, identity);
        }
    }
}
