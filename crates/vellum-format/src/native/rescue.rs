//! What units tell of themselves after a crash: entries that no record has.
//!
//! ```text
//!   records replayed ► entries of the newest that name packed blocks: one that is not whole names nothing
//!                    ► young zones are read: a block that is whole, where the zone's bit is 0 and the table says nothing yet, counts
//! ```
//!
//! | the unit of the disk in the table | a block tells of it | then |
//! |---|---|---|
//! | nothing | yes, its bit is 0 | the block counts |
//! | nothing | yes, its bit is 1 | the unit is free: it was let go, or retired |
//! | the same unit | yes | the table counts, which says the same, or that the block is one like others now |
//! | another unit | yes | the table counts: what came in between was not durable |
//!
//! Only the newest record can name a block that did not arrive: all before it were flushed, and the blocks with them.
//! It was not acknowledged, so what the block would have said is left out. All of it can be done again from the beginning as often as it
//! is cut off: the bits, the tags and the blocks stay as they are until the superblock says that there is nothing to recover.

use std::collections::BTreeMap;

use vellum_core::{Buffer, Error, ImageOffset, ImageSpan, Result, Storage};

use super::embed::{BLOCK_LEN, Identity, identify};
use super::geometry::{Bits, Places, Region, SETTLED_WORD, ZONE_LEN};
use super::zones::{GENERATION_WORD, TAG_WORD};
use crate::bytes::{be64, put64};
use crate::journal::record::{Item, Record};
use crate::journal::replay::{Replay, Rules};
use crate::sabotage::{self, Bug};

/// What is read at once.
const PIECE: u64 = 1 << 20;
/// More zones are never young at a time.
const YOUNG_MAX: usize = 256;

/// A zone that was open.
struct Young {
    zone: u32,
    tag: u64,
    settled: Vec<u64>,
}

impl Young {
    fn is_settled(&self, index: u32) -> bool {
        self.settled[index as usize / 64] >> (index % 64) & 1 == 1
    }
}

/// The last unit that is named because of this, and how many entries were found.
pub(super) struct Rescued {
    pub(super) last: u32,
    pub(super) count: u64,
}

/// Brings what units tell of themselves into the replayed table.
pub(super) async fn rescue<R: Rules>(
    replay: &mut Replay<'_, R>,
    storage: &dyn Storage,
    places: &Places,
    generation: u64,
    newest: Option<&Record>,
) -> Result<Rescued> {
    let mut rescued = Rescued { last: 0, count: 0 };
    if places.shape().zone().is_none() {
        return Ok(rescued);
    }
    if let Some(newest) = newest.filter(|_| !sabotage::is(Bug::NewestBelieved)) {
        look_at_entries(replay, storage, places, newest).await?;
    }
    for young in find_young(replay, storage, places, generation).await? {
        for (unit, identity) in find_blocks(storage, places, &young).await? {
            let guest = u64::from(identity.guest_unit);
            if guest >= places.shape().units() {
                continue;
            }
            let bits = places.entry(guest);
            let (page, within) = replay.page(bits.word).await?;
            let word = be64(page, within);
            if bits.get(word) == 0 {
                let entry = places.make_entry(unit, u32::from(identity.block) + 1);
                put64(page, within, bits.set(word, u64::from(entry)));
                rescued.last = rescued.last.max(unit);
                rescued.count += 1;
            }
        }
    }
    Ok(rescued)
}

/// Entries of the newest record that has words: those that name a packed block which is not whole name nothing.
async fn look_at_entries<R: Rules>(
    replay: &mut Replay<'_, R>,
    storage: &dyn Storage,
    places: &Places,
    newest: &Record,
) -> Result<()> {
    let table = places.region(Region::Table);
    for item in &newest.items {
        let Item::Words { at, values } = item else { continue };
        let words = (0..values.len() as u64).map(|index| *at + index * 8);
        for word in words.filter(|word| table.contains(*word)) {
            for (number, shift) in [(0, 32), (1, 0)] {
                let bits = Bits { word, shift, width: 32 };
                let guest_unit = (word - table.start()) / 4 + number;
                if guest_unit < places.shape().units() {
                    look_at_entry(replay, storage, places, guest_unit, bits).await?;
                }
            }
        }
    }
    Ok(())
}

async fn look_at_entry<R: Rules>(
    replay: &mut Replay<'_, R>,
    storage: &dyn Storage,
    places: &Places,
    guest_unit: u64,
    bits: Bits,
) -> Result<()> {
    let (page, within) = replay.page(bits.word).await?;
    let entry = u32::try_from(bits.get(be64(page, within))).expect("32 bits");
    let (unit, form) = places.split_entry(entry);
    let Some(block) = form.checked_sub(1) else { return Ok(()) };
    let is_whole = match places.zone_of(unit.max(1)).filter(|_| unit != 0) {
        None => false,
        Some((zone, _)) => {
            let (page, within) = replay.page(places.zone_word(zone, TAG_WORD)).await?;
            let tag = be64(page, within);
            let at = places.unit(unit).start() + u64::from(block) * BLOCK_LEN as u64;
            let bytes = storage.read(at, Buffer::for_overwrite(BLOCK_LEN)).await?.contiguous();
            let index = u8::try_from(block).expect("at most 30");
            let found = identify(bytes.slice(), tag, unit, index);
            found.is_some_and(|found| u64::from(found.guest_unit) == guest_unit)
        }
    };
    if !is_whole {
        let (page, within) = replay.page(bits.word).await?;
        let word = be64(page, within);
        put64(page, within, bits.set(word, 0));
    }
    Ok(())
}

/// The zones that were open in this generation.
async fn find_young<R: Rules>(
    replay: &mut Replay<'_, R>,
    storage: &dyn Storage,
    places: &Places,
    generation: u64,
) -> Result<Vec<Young>> {
    let mut young = Vec::new();
    let mut rest = places.region(Region::Zones);
    let settled_words = u64::from(places.units_per_zone().div_ceil(64));
    while !rest.is_empty() {
        let (now, later) = rest.split_at(PIECE);
        let len = usize::try_from(now.len()).expect("a piece");
        let bytes = storage.read(now.start(), Buffer::for_overwrite(len)).await?.contiguous();
        for (at, page) in (0..).map(|page| now.start() + page * 4096).zip(bytes.slice().chunks(4096)) {
            let page = replay.changed_page(at).unwrap_or(page);
            for (entry, zone) in
                page.chunks_exact(256).zip((at - places.region(Region::Zones).start()) / ZONE_LEN..)
            {
                let word = |word: u64| be64(entry, usize::try_from(word * 8).expect("below 256"));
                if word(GENERATION_WORD) != generation || generation == 0 {
                    continue;
                }
                let settled = (0..settled_words).map(|index| word(SETTLED_WORD + index)).collect();
                let zone = u32::try_from(zone).expect("at most 2^18");
                young.push(Young { zone, tag: word(TAG_WORD), settled });
            }
        }
        rest = later;
    }
    match young.len() <= YOUNG_MAX {
        true => Ok(young),
        false => Err(Error::corrupt(format!("{} zones are open: that cannot be", young.len()))),
    }
}

/// The blocks of a zone that tell of their units, by unit.
async fn find_blocks(
    storage: &dyn Storage,
    places: &Places,
    young: &Young,
) -> Result<BTreeMap<u32, Identity>> {
    let mut found = BTreeMap::new();
    let first = young.zone * places.units_per_zone() + 1;
    let start = places.unit(first).start();
    let zone = places.shape().zone().expect("it has zones");
    let unit = places.shape().layout.unit().expect("it has units");
    let in_file = ImageSpan::between(ImageOffset::ZERO, ImageOffset::new(storage.len()));
    let mut rest = start.span(zone.bytes()).intersect(in_file);
    while !rest.is_empty() {
        // Holes have nothing to tell.
        let Some(run) = storage.runs(rest).await?.first().copied().filter(|run| !run.span.is_empty()) else {
            break;
        };
        let (here, later) = rest.split_at((run.span.end() - rest.start()).min(PIECE));
        rest = later;
        if !run.is_data {
            rest = ImageSpan::between(run.span.end(), rest.end());
            continue;
        }
        let len = usize::try_from(here.len()).expect("a piece");
        let bytes = storage.read(here.start(), Buffer::for_overwrite(len)).await?.contiguous();
        for (at, block) in
            (0..).map(|block| here.start() + block * BLOCK_LEN as u64).zip(bytes.slice().chunks(BLOCK_LEN))
        {
            let within = at - start;
            let index = u32::try_from(within >> unit.shift()).expect("at most 1024");
            let Ok(block_index) = u8::try_from((within & (unit.bytes() - 1)) / BLOCK_LEN as u64) else {
                continue;
            };
            if young.is_settled(index) && !sabotage::is(Bug::SettledCounts) {
                continue;
            }
            if let Some(identity) = identify(block, young.tag, first + index, block_index) {
                found.insert(first + index, identity);
            }
        }
    }
    Ok(found)
}
