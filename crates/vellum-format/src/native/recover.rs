//! What a crash leaves, made whole: the journal is replayed into the home pages.
//!
//! ```text
//!   flush ► read the ring ► verify the newest ──fails──► void it ► flush ► the one before
//!         ► replay in memory ► a record that says so ► flush
//!         ► pages home ► flush ► superblock without the bit ► flush                                  commit point
//! ```
//!
//! Up to the last step every input stays as it was, or is replaced by one that says the same: recovery may be cut off
//! anywhere and begun again. The cost is bounded by the journal, whatever the size of the image.

use std::collections::BTreeSet;

use vellum_core::{BlockSize, Buffer, Error, ImageOffset, ImageSpan, Result, SharedStorage, Storage};

use super::geometry::{Places, Region};
use super::rescue::{self, rescue};
use super::superblock::Superblocks;
use crate::bytes::be64;
use crate::journal::record::{Item, Record};
use crate::journal::replay::{self, Needed, Place, Recovery, Replay, Rules};
use crate::sabotage::{self, Bug};

/// What the journal may make the file longer by: the length itself may have been lost in the crash.
const GROWTH_MAX: u64 = 1 << 40;

/// What a journal may change: words of home, and guest data.
struct Allowed {
    places: Places,
    /// Nothing may lie behind this.
    end: u64,
    /// Only then there are map units.
    has_snapshots: bool,
}

impl Allowed {
    /// The map unit in whose index the run lies, if it can be one.
    fn map_unit(&self, span: ImageSpan) -> Option<u32> {
        let unit = self.places.shape().layout.unit().filter(|_| self.has_snapshots)?;
        if span.start() < self.places.data_offset() || span.end().bytes() > self.end {
            return None;
        }
        let within = span.start() - self.places.data_offset();
        let is_index = within % unit.bytes() + span.len() <= BlockSize::PAGE.bytes();
        is_index.then(|| u32::try_from((within >> unit.shift()) + 1).ok()).flatten()
    }

    /// The map units that the record has words of.
    fn map_units(&self, record: &Record) -> impl Iterator<Item = u32> {
        record.items.iter().filter_map(|item| match item {
            Item::Words { at, values } => self.map_unit(at.span(values.len() as u64 * 8)),
            _ => None,
        })
    }

    /// The last unit that copies of pages of the table name, by what is now the index of their map unit.
    async fn last_named(&self, storage: &dyn Storage, map: u32, index: &[u64]) -> Result<u32> {
        let (start, table) = (self.places.unit(map).start(), self.places.region(Region::Table));
        let mut last = 0;
        for (slot, entry) in (0..).zip(index.chunks_exact(2).skip(1)) {
            let copy = (start + (slot + 1) * BlockSize::PAGE.bytes()).span(BlockSize::PAGE.bytes());
            let is_there = entry[0] != 0 && copy.end() <= self.places.unit(map).end();
            if !is_there || !table.contains(ImageOffset::new(entry[1])) {
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
        let home = self.places.home();
        match home.intersect(span) == span || self.map_unit(span).is_some() {
            true => Ok(()),
            false => Err(Error::corrupt(format!(
                "the journal changes bytes at {}, where no table is",
                span.start()
            ))),
        }
    }

    fn check_data(&self, span: ImageSpan) -> Result<()> {
        match span.start() >= self.places.data_offset() && span.end().bytes() <= self.end {
            true => Ok(()),
            false => Err(Error::corrupt(format!(
                "the journal changes bytes at {}, where no data is",
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

/// Replays the journal of an image that was not closed. Opening for writing does it by itself. An image that was closed is left
/// as it is.
///
/// # Errors
/// `Corrupt` when the journal or the data that it counts on is not what was flushed once, and what the storage says.
pub async fn recover(image: &SharedStorage) -> Result<Recovery> {
    let storage = &**image;
    let mut superblocks = Superblocks::read(storage).await?;
    let Some(key) = superblocks.superblock.key else { return Ok(Recovery::default()) };
    let places = superblocks.superblock.places();
    let has_snapshots = superblocks.superblock.has_snapshots();
    let run = places.region(Region::Journal);
    let place = Place { run, generation: superblocks.superblock.generation, key };
    let mut recovery = Recovery::default();
    let mut records = replay::find(storage, place).await?;
    recovery.left_out = records.left_out;
    if names_what_is_lost(storage, &places, has_snapshots, place.generation, &records).await? {
        replay::leave_out(storage, run, &records).await?;
        records = replay::find(storage, place).await?;
        recovery.left_out = true;
    }
    let Needed { records, .. } = records;
    if let Some(newest) = records.last() {
        let newest = newest.record.clone();
        if newest.asks_for_repair {
            return Err(Error::corrupt("the journal asks for a repair, which this format does not have"));
        }
        let end = end_of(storage);
        let from = if sabotage::is(Bug::OnlyNewestReplayed) { records.len() - 1 } else { 0 };
        let allowed = Allowed { places, end, has_snapshots };
        // An index is read where it lies: the file must reach there.
        let maps: BTreeSet<u32> =
            records[from..].iter().flat_map(|found| allowed.map_units(&found.record)).collect();
        let map = maps.last().copied();
        if let Some(map) =
            map.filter(|map| !storage.limits().fixed_len && places.unit(*map).end().bytes() > storage.len())
        {
            storage.set_len(places.unit(map).end().bytes()).await?;
        }
        let mut replay = Replay::new(allowed, storage);
        replay.bring_for(places.home(), &records[from..]).await?;
        for found in &records[from..] {
            replay.replay(&found.record).await?;
        }
        let rescued = rescue(&mut replay, storage, &places, place.generation).await?;
        recovery.born = rescued.count;
        // The table may have arrived where the file's new length has not.
        let mut named = replay
            .words_in(places.region(Region::Table))
            .map(|word| places.last_unit(word))
            .max()
            .unwrap_or(0);
        for map in maps {
            let index: Vec<u64> =
                replay.words_in(places.unit(map).start().span(BlockSize::PAGE.bytes())).collect();
            named = named.max(replay.rules.last_named(storage, map, &index).await?);
        }
        debug_assert!(rescued.last <= named, "what was found is in the table");
        if named > 0 && !places.may_hold(named, end, storage.limits().fixed_len) {
            return Err(Error::corrupt(format!(
                "the journal names unit {named}, far behind the end of the file"
            )));
        }
        recovery.records = records.len() as u64;
        if !replay::is_result(&newest) && !sabotage::is(Bug::ResultNotTold) {
            // It proves the newest: what then goes home cannot be held against its checks.
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
        recovery.pages = replay.go_home().await?;
        if !sabotage::is(Bug::ForgottenBeforeHome) {
            storage.flush().await?;
        }
    }
    superblocks.superblock.key = None;
    superblocks.write(storage).await?;
    storage.flush().await?; // commit point of the recovery
    Ok(recovery)
}

/// Nothing may lie behind this.
fn end_of(storage: &dyn Storage) -> u64 {
    storage.len().saturating_add(if storage.limits().fixed_len { 0 } else { GROWTH_MAX })
}

/// Whether the newest record, which nobody may have been told of, names a packed block that did not arrive. One that follows a
/// record that was left out was flushed.
async fn names_what_is_lost(
    storage: &dyn Storage,
    places: &Places,
    has_snapshots: bool,
    generation: u64,
    needed: &Needed,
) -> Result<bool> {
    let Some((newest, before)) = needed.records.split_last() else { return Ok(false) };
    if needed.left_out || places.shape().zone().is_none() {
        return Ok(false);
    }
    let mut replay = Replay::new(Allowed { places: *places, end: end_of(storage), has_snapshots }, storage);
    replay.bring_for(places.region(Region::Zones), before).await?;
    for found in before {
        replay.replay_within(places.region(Region::Zones), &found.record).await?;
    }
    rescue::names_what_is_lost(&replay, storage, places, generation, &newest.record).await
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{ErrorKind, MemoryStorage};

    use super::*;
    use crate::journal::record::Item;
    use crate::native::{CreateOptions, create};

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
