//! Another size for a cache that no server has.
//!
//! ```text
//!   before   │ super │ slices, ring │ slots …                    │
//!   after    │ super │ slots …                       │ slices, ring │        or from this one to that one
//!
//!   blocks whose slots go away: clean ones are given up, dirty ones move      records of the old ring (commit points)
//!     ► the new slices and the new ring, where no table and no block is ► flush
//!     ► the first superblock ► flush (commit point) ► its copy ► flush
//! ```
//!
//! 1. Until the superblock is written, the cache is as ordinary commits leave it: it can be cut off anywhere, and is
//!    opened with its old size. From then on it has the new one.
//! 2. The new tables are at the other end, and where they would overlap the old ones the size is refused. They are written
//!    only over slots of which durable records say that no block has them.
//! 3. A slot that stays has the same place, and another number. Its bytes are not touched.
//! 4. Nothing dirty is given up. What does not fit is counted before anything is changed.
//! 5. The new ring has no record, so the slices are as of none, and what comes next is record 1. All of a record's checks
//!    have done their work: everything is durable.
//!
//! Left out: the length of the file, which a caller sees to: before it for a larger one, afterwards for a smaller one.

use std::sync::atomic::Ordering;

use vellum_core::{Buffer, Context, Error, ErrorKind, Result, Zeroes, try_join_all};

use crate::create::write_slices;
use crate::layout::{BLOCK_BYTES, BLOCK_LEN, Key, Layout, Slot, Superblock};
use crate::map::{Entry, Map};
use crate::open::{Open, PUT_BYTES, ROW_BYTES, Share};
use crate::record::Checks;
use crate::shared::FlashCache;

/// At most this many blocks are moved with one commit.
const BATCH_BLOCKS_MAX: usize = 1024;

/// What became of a cache whose size was changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resized {
    /// How many bytes of the storage it uses now.
    pub file_bytes: u64,
    /// How many blocks it can hold.
    pub slots: u64,
    /// Blocks that were moved.
    pub moved: u64,
    /// Blocks that were given up: images have them too.
    pub given_up: u64,
}

/// The slots of the one that the other has too.
struct Both {
    old: Layout,
    new: Layout,
}

impl Both {
    /// The number of a slot from now on; none where it goes away.
    fn renumbered(&self, slot: Slot) -> Option<Slot> {
        let (at, slots) = (self.old.slot_at(slot), self.new.all_slots());
        let stays = slots.start() <= at && at + BLOCK_BYTES <= slots.end();
        let number = || u32::try_from((at - slots.start()) / BLOCK_BYTES).expect("below the number of slots");
        stays.then(|| Slot(number()))
    }

    /// The old numbers of those that stay.
    fn staying(&self) -> std::ops::Range<u32> {
        let both = self.old.all_slots().intersect(self.new.all_slots());
        let number = |at: vellum_core::ImageOffset| {
            u32::try_from((at - self.old.all_slots().start()) / BLOCK_BYTES)
                .expect("below the number of slots")
        };
        if both.is_empty() { 0..0 } else { number(both.start())..number(both.end()) }
    }
}

impl FlashCache {
    /// Gives the cache, over which no disk is open, this many bytes of its storage, which has that length already. It is
    /// closed afterwards. `goes_on` gets how many bytes are done, and how many there are, and may stop it with an error: then the
    /// cache is as large as before.
    ///
    /// # Errors
    /// `Invalid` for a size that is too small, or while a disk is open; `NoSpace` when it has more dirty blocks than the
    /// new size has room for; those of `goes_on` and of the storage.
    pub async fn resize(
        &self,
        file_bytes: u64,
        goes_on: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Resized> {
        if let Some(home) = self.homes().iter().find(|home| home.is_open()) {
            return Err(Error::invalid(format!("{}: disk {} is open", self.name(), home.row)));
        }
        let resized = self.resize_to(file_bytes, goes_on).await;
        resized.context(|| format!("can't change the size of the flash cache {}", self.name()))
    }

    async fn resize_to(
        &self,
        file_bytes: u64,
        goes_on: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Resized> {
        self.commit_all().await?;
        let old = self.layout;
        let new = Layout { is_slots_first: !old.is_slots_first, ..Layout::for_size(file_bytes, old.secret)? };
        if (new.slots, new.ring_bytes) == (old.slots, old.ring_bytes) {
            self.close().await?;
            return Ok(Resized {
                file_bytes: old.total_bytes(),
                slots: old.slots.into(),
                ..Resized::default()
            });
        }
        if !old.tables().intersect(new.tables()).is_empty() {
            let least = (old.tables().len() + new.tables().len()) * 2;
            let why = format!(
                "{file_bytes} bytes are too few, or too near to what it has, for its tables to move: at least about \
                 {least} are needed; `vellum flash drain` and `vellum flash create` make a new one of any size"
            );
            return Err(Error::invalid(why));
        }
        let both = Both { old, new };
        let mut resized =
            Resized { file_bytes: new.total_bytes(), slots: new.slots.into(), ..Resized::default() };
        let going = self.check_room(&both)?;
        let total = going.len() as u64 * BLOCK_BYTES + new.tables().len();
        goes_on(0, total)?;
        resized.given_up = self.give_up_outside(&both, going.len() as u64).await?;
        resized.moved = going.len() as u64;
        self.move_all(&both, going, &mut |done| goes_on(done * BLOCK_BYTES, total)).await?;
        // From here on nothing of the old tables changes.
        let (map, left_out) = self.map_for(&both)?;
        resized.given_up += left_out;
        let moved = resized.moved * BLOCK_BYTES;
        self.storage.write_zeroes(new.ring(), Zeroes::Allocated).await?;
        let ledger = self.state().ledger.encode();
        let place = new.tables().len() / u64::from(new.slices());
        let mut payload = |number: u32| {
            goes_on(moved + u64::from(number) * place, total)?;
            Ok(if number == 0 { ledger.clone() } else { map.encode_part(number - 1) })
        };
        let id = u128::from_be_bytes(self.id.bytes());
        write_slices(&self.storage, id, &new, &mut payload).await?;
        self.storage.flush().await?;
        goes_on(total, total)?;
        // From here on nobody knows which tables count until the superblock is read again.
        self.is_closed.store(true, Ordering::Release);
        // Each copy is flushed by itself. The first decides.
        let features = self.state().features;
        Superblock { id, layout: new, features }.complete(&*self.storage).await?; // commit point
        Ok(resized)
    }

    /// The dirty blocks whose slots go away. Fails when all that is dirty has no room.
    fn check_room(&self, both: &Both) -> Result<Vec<(Key, Entry)>> {
        let state = self.state();
        let (dirty, room) = (state.map.dirty_blocks(), both.staying().len() as u64);
        if dirty > room {
            let why = format!(
                "images lack {dirty} blocks of it, and there would be room for {room}: `vellum flash drain` writes \
                 them home"
            );
            return Err(Error::new(ErrorKind::NoSpace, why));
        }
        let goes = |(_, entry): &(Key, Entry)| entry.dirty && both.renumbered(entry.slot).is_none();
        let mut going: Vec<(Key, Entry)> = state.map.entries().filter(goes).collect();
        going.sort_unstable_by_key(|(_, entry)| entry.slot);
        Ok(going)
    }

    /// Clean blocks whose slots go away are given up, and others until
    /// `wanted` of the slots that stay are free. Returns how many were given up.
    async fn give_up_outside(&self, both: &Both, wanted: u64) -> Result<u64> {
        let clean: Vec<(Key, Entry)> = self.state().map.entries().filter(|(_, entry)| !entry.dirty).collect();
        let (outside, inside): (Vec<_>, Vec<_>) =
            clean.into_iter().partition(|(_, entry)| both.renumbered(entry.slot).is_none());
        let free = {
            let state = self.state();
            both.staying().filter(|slot| state.slots.is_free(Slot(*slot))).count() as u64
        };
        let more = usize::try_from(wanted.saturating_sub(free)).expect("at most as many as there are slots");
        let mut given_up = 0;
        for (key, _) in outside.into_iter().chain(inside.into_iter().take(more)) {
            if self.state().room_for(Share::Evict) < 16 {
                self.commit_all().await?;
            }
            self.state().drop_block(key, Share::Evict);
            given_up += 1;
        }
        self.commit_all().await?; // commit point
        self.state().reclaim(&self.epochs);
        Ok(given_up)
    }

    /// Dirty blocks get slots that stay, with a record for each batch.
    async fn move_all(
        &self,
        both: &Both,
        going: Vec<(Key, Entry)>,
        goes_on: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let mut staying = both.staying();
        let share = Open::bytes_max(Share::Guest, self.state().record_bytes_max()) - ROW_BYTES;
        let mut done = 0;
        for batch in going.chunks((share / PUT_BYTES).clamp(1, BATCH_BLOCKS_MAX)) {
            let reads = batch.iter().map(|(_, entry)| {
                self.storage.read(self.slot_at(entry.slot), Buffer::for_overwrite(BLOCK_LEN))
            });
            let blocks = try_join_all(reads).await.context(|| "a block that images lack cannot be read")?;
            let (mut moves, mut parts) = (Vec::new(), Vec::new());
            for ((key, entry), block) in batch.iter().zip(blocks) {
                let block = block.contiguous();
                let slot = {
                    let mut state = self.state();
                    staying.find(|slot| state.slots.take_this(Slot(*slot))).map(Slot)
                };
                let Some(slot) = slot else {
                    return Err(Error::corrupt("there are fewer free slots than counted"));
                };
                moves.push((*key, slot, Checks::of(entry.sectors, block.slice())));
                parts.push((self.slot_at(slot), block));
            }
            self.write_slots(parts).await?;
            self.note_change();
            for (key, slot, checks) in moves {
                self.state().move_block(key, slot, checks);
            }
            self.commit_all().await?; // commit point
            done += batch.len() as u64;
            goes_on(done)?;
        }
        Ok(())
    }

    /// The map with the new numbers and the new parts. What is clean makes way where a part is full; returns how many blocks
    /// did.
    fn map_for(&self, both: &Both) -> Result<(Map, u64)> {
        let state = self.state();
        let (mut map, mut left_out) = (Map::new(&both.new), 0);
        for wants_dirty in [true, false] {
            for (key, entry) in state.map.entries().filter(|(_, entry)| entry.dirty == wants_dirty) {
                let Some(slot) = both.renumbered(entry.slot) else {
                    return Err(Error::corrupt("a block is left in a slot that goes away"));
                };
                if map.has_room(key) {
                    map.put(key, Entry { slot, ..entry });
                } else if entry.dirty {
                    let why =
                        "a part of the map would be full: `vellum flash drain` writes home what images lack";
                    return Err(Error::new(ErrorKind::NoSpace, why));
                } else {
                    left_out += 1;
                }
            }
        }
        Ok((map, left_out))
    }
}
