//! Recovery of an image that was not closed: the journal is replayed into the home pages.
//!
//! ```text
//!   flush ► settle what only a cache has
//!         ► read the ring ► verify the newest ──fails──► void it ► flush ► the one before
//!         ► replay in memory ► a record that verifies the newest ► flush
//!         ► checkpoint ► flush ► superblock without the bit ► flush                            commit point
//! ```
//!
//! Up to the last step every input stays as it was, or is replaced by one with the same meaning. So recovery
//! may be interrupted anywhere and started again. The cost is bounded by the journal, whatever the size of
//! the image.

use std::collections::BTreeSet;

use vellum_core::{BlockSize, Buffer, Error, ImageOffset, ImageSpan, Result, SharedStorage, Storage};

use super::geometry::{Places, Region};
use super::superblock::Superblocks;
use super::zone_scan;
use crate::bytes::be64;
use crate::journal::find::{Found, Needed, Place, find};
use crate::journal::record::{Item, Record};
use crate::journal::replay::{self, Replay, Rules};
use crate::report::Recovery;
use crate::truth::settle;

/// How much the journal may extend the file, at most: the length itself may have been lost in the crash.
const GROWTH_MAX: u64 = 1 << 40;

/// What a journal may change: words of home, and guest data.
struct Allowed {
    places: Places,
    /// Nothing may lie past this offset.
    end: u64,
    /// Whether there can be map units.
    has_snapshots: bool,
}

impl Allowed {
    /// The map unit whose index contains the run, if it can be one.
    fn map_unit(&self, span: ImageSpan) -> Option<u32> {
        let unit = self.places.shape().layout.unit().filter(|_| self.has_snapshots)?;
        if span.start() < self.places.data_offset() || span.end().bytes() > self.end {
            return None;
        }
        let within = span.start() - self.places.data_offset();
        let is_index = within % unit.bytes() + span.len() <= BlockSize::PAGE.bytes();
        let unit = is_index.then(|| u32::try_from((within >> unit.shift()) + 1).ok()).flatten();
        unit.filter(|unit| !self.places.is_of_part(*unit)) // those have home pages
    }

    /// The map units that the record has words of.
    fn map_units(&self, record: &Record) -> impl Iterator<Item = u32> {
        record.items.iter().filter_map(|item| match item {
            Item::Words { at, values } => self.map_unit(at.span(values.len() as u64 * 8)),
            _ => None,
        })
    }

    /// The last unit that copies of table pages name, by the replayed index of their map unit.
    async fn last_named(&self, storage: &dyn Storage, map: u32, index: &[u64]) -> Result<u32> {
        let start = self.places.unit(map).start();
        let mut last = 0;
        for (slot, entry) in (0..).zip(index.chunks_exact(2).skip(1)) {
            let copy = (start + (slot + 1) * BlockSize::PAGE.bytes()).span(BlockSize::PAGE.bytes());
            let is_there = entry[0] != 0 && copy.end() <= self.places.unit(map).end();
            if !is_there || !self.places.is_in_table(ImageOffset::new(entry[1])) {
                continue;
            }
            let bytes = storage.read(copy.start(), Buffer::for_overwrite(4096)).await?;
            let words = (0..512).map(|word| self.places.last_unit(be64(bytes.slice(), word * 8)));
            last = words.fold(last, u32::max);
        }
        Ok(last)
    }
}

impl Rules for Allowed {
    fn check_words(&self, span: ImageSpan) -> Result<()> {
        match self.places.is_in_home(span) || self.map_unit(span).is_some() {
            true => Ok(()),
            false => Err(Error::corrupt(format!(
                "the journal changes bytes at {}, which belong to no table",
                span.start()
            ))),
        }
    }

    fn check_data(&self, span: ImageSpan) -> Result<()> {
        let is_data = !self.places.parts().any(|part| part.home().overlaps(span));
        match is_data && span.start() >= self.places.data_offset() && span.end().bytes() <= self.end {
            true => Ok(()),
            false => Err(Error::corrupt(format!(
                "the journal changes bytes at {}, which hold no data",
                span.start()
            ))),
        }
    }

    fn table(&self) -> BlockSize {
        BlockSize::PAGE
    }

    fn page(&self) -> BlockSize {
        BlockSize::PAGE
    }
}

/// Replays the journal of an image that was not closed. Opening an image read-write does this automatically.
/// An image that was closed is left as it is.
///
/// # Errors
/// `Corrupt` when the journal, or data that it relies on, is not what was once flushed, and the errors of the
/// storage.
pub async fn recover(image: &SharedStorage) -> Result<Recovery> {
    let storage = &**image;
    if Superblocks::read(storage).await?.superblock.key.is_none() {
        return Ok(Recovery::default());
    }
    settle(storage).await?;
    let mut superblocks = Superblocks::read(storage).await?;
    let Some(key) = superblocks.superblock.key else { return Ok(Recovery::default()) };
    let places = superblocks.superblock.places();
    let has_snapshots = superblocks.superblock.has_snapshots();
    let run = places.region(Region::Journal);
    let place = Place { run, generation: superblocks.superblock.generation, key };
    let names_lost = async |records: &[Found]| {
        names_what_is_lost(storage, &places, has_snapshots, place.generation, records).await
    };
    let Needed { records, left_out, block_lost } = find(storage, place, names_lost).await?;
    let mut recovery = Recovery { left_out, block_lost, ..Recovery::default() };
    if let Some(newest) = records.last() {
        let newest = newest.record.clone();
        if newest.asks_for_repair {
            return Err(Error::corrupt("the journal asks for a repair, which this format does not have"));
        }
        let end = end_of(storage);
        let allowed = Allowed { places, end, has_snapshots };
        // An index is read at its home location, so the file must reach that far.
        let maps: BTreeSet<u32> = records.iter().flat_map(|found| allowed.map_units(&found.record)).collect();
        let map = maps.last().copied();
        if let Some(map) =
            map.filter(|map| !storage.limits().fixed_len && places.unit(*map).end().bytes() > storage.len())
        {
            storage.set_len(places.unit(map).end().bytes()).await?;
        }
        let mut replay = Replay::new(allowed, storage);
        for home in places.homes() {
            replay.bring_for(home, &records).await?;
        }
        for found in &records {
            replay.replay(&found.record).await?;
        }
        let scanned = zone_scan::scan_open_zones(&mut replay, storage, &places, place.generation).await?;
        recovery.embedded_units = scanned.count;
        // The table may be on the medium although the file's new length is not.
        let mut named = places
            .table()
            .flat_map(|span| replay.words_in(span))
            .map(|word| places.last_unit(word))
            .max()
            .unwrap_or(0);
        for map in maps {
            let index: Vec<u64> =
                replay.words_in(places.unit(map).start().span(BlockSize::PAGE.bytes())).collect();
            named = named.max(replay.rules.last_named(storage, map, &index).await?);
        }
        debug_assert!(scanned.last <= named, "what was found is in the table");
        if named > 0 && !places.may_hold(named, end, storage.limits().fixed_len) {
            return Err(Error::corrupt(format!(
                "the journal names unit {named}, far behind the end of the file"
            )));
        }
        recovery.records = records.len() as u64;
        if !replay::is_result(&newest) {
            // It verifies the newest record. Pages that are checkpointed from now on cannot fail that
            // record's checks.
            let result = Record {
                sequence: newest.sequence + 1,
                durable: newest.sequence,
                items: Vec::new(),
                ..newest
            };
            replay::write_result(storage, run, &records, result).await?;
        }
        if named > 0 && !storage.limits().fixed_len && storage.len() < places.unit(named).end().bytes() {
            storage.set_len(places.unit(named).end().bytes()).await?;
        }
        recovery.pages = replay.checkpoint().await?;
        storage.flush().await?;
    }
    superblocks.superblock.key = None;
    superblocks.write(storage).await?;
    storage.flush().await?; // commit point of the recovery
    Ok(recovery)
}

/// Nothing may lie past this offset.
fn end_of(storage: &dyn Storage) -> u64 {
    storage.len().saturating_add(if storage.limits().fixed_len { 0 } else { GROWTH_MAX })
}

/// Whether the newest of these records, which may never have been acknowledged, names a packed block that did
/// not arrive.
async fn names_what_is_lost(
    storage: &dyn Storage,
    places: &Places,
    has_snapshots: bool,
    generation: u64,
    records: &[Found],
) -> Result<bool> {
    let Some((newest, before)) = records.split_last() else { return Ok(false) };
    if places.shape().zone().is_none() {
        return Ok(false);
    }
    let mut replay = Replay::new(Allowed { places: *places, end: end_of(storage), has_snapshots }, storage);
    for zones in places.zone_table().filter(|zones| !zones.is_empty()) {
        replay.bring_for(zones, before).await?;
        for found in before {
            replay.replay_within(zones, &found.record).await?;
        }
    }
    zone_scan::names_what_is_lost(&replay, storage, places, generation, &newest.record).await
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{ErrorKind, MemoryStorage};

    use super::*;
    use crate::journal::record::Item;
    use crate::native::geometry::{Layout, Shape};
    use crate::native::parts::Part;
    use crate::native::{CreateOptions, create};

    #[test]
    fn a_page_of_a_part_of_the_table_is_no_index_of_copies() {
        let size = BlockSize::from_shift;
        let layout = Layout::Zoned { unit: size(16), zone: size(23) };
        let shape = Shape { size: 1 << 20, layout, block: size(16), base_bytes: None };
        let places = Places::plan(shape, 65_536).unwrap();
        let part = Part { at: places.data_offset(), ..places.next_part(12 << 30) };
        let places = places.with_part(part).and_then(|places| places.resized(12 << 30)).unwrap();
        let allowed = Allowed { places, end: 1 << 40, has_snapshots: true };
        let named_by = |unit: u32| allowed.map_unit(places.unit(unit).start().span(8));
        let last = places.units_of_parts().inspect(|unit| assert_eq!(named_by(*unit), None)).last().unwrap();
        assert_eq!(named_by(last + 1), Some(last + 1));
    }

    /// An image whose journal has this item in its only record.
    fn recovered(item: impl Fn(&Places) -> Item) -> (Result<Recovery>, Vec<u8>) {
        block_on(async {
            let image = MemoryStorage::new("image");
            let options = CreateOptions {
                size: 1 << 20,
                has_table: true,
                unit_size: Some(64 << 10),
                journal_bytes: Some(64 << 10),
                ..CreateOptions::default()
            };
            create(&*image, &options).await.unwrap();
            let mut superblocks = Superblocks::read(&*image).await.unwrap();
            superblocks.superblock.generation += 1;
            superblocks.superblock.key = Some(7);
            superblocks.write(&*image).await.unwrap();
            let places = superblocks.superblock.places();
            let record = Record {
                generation: superblocks.superblock.generation,
                key: 7,
                sequence: 1,
                tail: 1,
                items: vec![item(&places)],
                ..Record::default()
            };
            let run = places.region(Region::Journal);
            image.write(run.start(), Buffer::copy_of(&record.encode())).await.unwrap();
            let shared: SharedStorage = image.clone();
            let result = recover(&shared).await;
            (result, image.content().to_vec())
        })
    }

    #[test]
    fn a_journal_changes_tables_and_data_and_nothing_else() {
        let words = |at| Item::Words { at, values: vec![1 << 32] };
        let (result, bytes) = recovered(|places| words(places.region(Region::Table).start()));
        assert_eq!(result.unwrap().records, 1);
        let places = Superblocks::choose(&bytes).unwrap().superblock.places();
        assert!(bytes.len() as u64 >= places.unit(1).end().bytes(), "the file holds what the table names");
        let refused = [
            recovered(|_| words(ImageOffset::new(192))).0,
            recovered(|places| words(places.region(Region::Journal).start())).0,
            recovered(|places| words(places.data_offset())).0,
            recovered(|places| Item::Full { at: places.region(Region::Table).start(), bytes: vec![1; 512] })
                .0,
            recovered(|_| Item::Full { at: ImageOffset::new(1 << 55), bytes: vec![1; 512] }).0,
        ];
        for (number, result) in refused.into_iter().enumerate() {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::Corrupt, "case {number}");
        }
    }
}
