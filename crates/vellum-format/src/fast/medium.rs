//! An open fast medium: whose slots are whose, in memory, and the few writes that it ever gets.
//!
//! ```text
//!   promotion   take slots ► blank what is left ► flush ► copies ► entries, row ► flush     then the image sets its bits
//!   session     row: the new number beside the image's ► flush              then the image names it
//!               row: only the newest counts ► flush                         before the first entry of the opening
//! ```
//!
//! 1. One process has the medium open, and in it one image each row, or several chains an image that is only read.
//! 2. After a write or a flush has failed, nothing is written any more until it is opened again. Reads go on.
//! 3. A slot that is free keeps its entry until something is promoted next: it is blanked before any slot is written, and
//!    before any entry is. So an entry never outlives its bytes, and of a unit of a disk there is one promotion at most.
//! 4. Entries of one sector are written together, from memory, one write of the tables at a time.
//! 5. While a row says that it is needed, an entry that is damaged may be that of a unit which is here alone.
//! 6. Before anything is written, the storage must be as long as it was: what was cut off would come back as zeros. Where the
//!    superblock says that it was cut off, that is as long as it was found then, and no slot behind counts or is given out.
//! 7. While a row is damaged, or such an entry, or a sector of the tables cannot be read, or the medium was cut off, nothing is
//!    written but rows of disks that have one. What it has is read and goes home; it gets nothing new, and no disk comes or
//!    leaves. An entry that is not seen cannot be blanked (3), and the sector may be read again some day.
//! 8. A medium that was cut off while it was open gives nothing any more once it is longer again: zeros would pass for units.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use roaring::RoaringBitmap;
use vellum_core::{
    Buffer, Context, Error, ErrorKind, ImageOffset, LocalFuture, Random, Result, SharedStorage, try_join_all,
};

use super::cut::{AFTER_A_CUT, say_cut};
use super::known::{Opened, State};
use super::layout::{
    ENTRIES_TOGETHER, ENTRY_LEN, Entry, FastId, Layout, NAME_MAX, ROW_LEN, ROWS, Reason, Row, SLOT_BYTES,
    SLOT_LEN, SUPER_LEN, Super, runs_of,
};
use super::tables::{Rows, Tables, one_of, read_entries, read_rows, read_supers};
use crate::session::SessionNumber;
use crate::state::lock;
use crate::truth::reconcile;

/// The tables are written in pieces of this many bytes at most.
const PIECE_LEN: usize = 64 << 10;
/// At most this many at a time.
const WRITES_AT_ONCE: usize = 64;

/// A disk that is to have a row.
#[derive(Debug, Clone)]
pub struct NewRow {
    /// The UUID of its image.
    pub uuid: [u8; 16],
    /// Its copies take at most this many bytes.
    pub budget: u64,
    /// The image's name, for people. At most 255 bytes of it are kept.
    pub name: String,
}

/// What there is to know about a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowFacts {
    /// The UUID of the disk's image.
    pub uuid: [u8; 16],
    /// The image's name when it was attached.
    pub name: String,
    /// Its copies take at most this many bytes.
    pub budget: u64,
    /// They take this many, as far as is known: those of a disk that is not open may count for nothing.
    pub used: u64,
    /// Whether the disk is open in this process.
    pub is_open: bool,
    /// Units of the disk may be here alone.
    pub is_needed: bool,
}

/// What was done to the medium since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FastCounts {
    /// Bytes of copies that were written.
    pub copied_bytes: u64,
    /// Bytes of rows and entries that were written.
    pub table_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Reads of copies.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Reads of copies that failed.
    pub read_errors: u64,
}

#[derive(Default)]
struct Tally {
    copied_bytes: AtomicU64,
    table_bytes: AtomicU64,
    flushes: AtomicU64,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    read_errors: AtomicU64,
}

fn count(number: &AtomicU64, by: u64) {
    number.fetch_add(by, Ordering::Relaxed);
}

/// A part of a unit that the medium has, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) unit: u64,
    pub(crate) part: u16,
    pub(crate) slot: u32,
    pub(crate) sequence: u64,
    pub(crate) reason: Reason,
}

/// An open fast medium.
pub struct FastMedium {
    storage: SharedStorage,
    /// What can be read of it, in bytes.
    pub(super) len: u64,
    /// How long it must be to be written, in bytes.
    needs: u64,
    /// How it was first seen to be shorter than that while it was open.
    was_cut: OnceLock<Error>,
    /// The room that it has for copies, in bytes.
    pub(super) room: u64,
    id: FastId,
    pub(super) layout: Layout,
    pub(super) state: Mutex<State>,
    /// Held while rows or entries are written.
    tables: async_lock::Mutex<()>,
    tally: Tally,
}

impl std::fmt::Debug for FastMedium {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FastMedium").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Makes a fast medium of this many bytes of a storage. What was there is lost.
///
/// # Errors
/// `Invalid` where the bytes are too few, `NoSpace` where a device has fewer, and the errors of the storage.
pub async fn create(storage: &SharedStorage, bytes: u64, id: FastId) -> Result<()> {
    let context = || format!("can't make a fast medium of {}", storage.name());
    let layout = Layout::for_size(bytes).context(context)?;
    let tables = ImageOffset::ZERO.span(layout.data_at());
    let made = async {
        match storage.limits().fixed_len {
            true if storage.len() < layout.total_bytes() => {
                let why = format!("it has {} bytes, and {bytes} are asked for", storage.len());
                return Err(Error::new(ErrorKind::NoSpace, why));
            }
            true => storage.write_zeroes(tables, vellum_core::Zeroes::Allocated).await?,
            false => {
                storage.set_len(0).await?;
                storage.set_len(layout.total_bytes()).await?;
            }
        }
        storage.flush().await?;
        for at in [0, SUPER_LEN as u64] {
            storage
                .write(ImageOffset::new(at), Buffer::copy_of(&Super { id, layout, cut_at: None }.encode()))
                .await?;
        }
        storage.flush().await // commit point
    };
    made.await.context(context)
}

impl FastMedium {
    /// Opens it. `random` gives the numbers of sessions.
    ///
    /// # Errors
    /// `Invalid` when it is none, `Corrupt` and `Unsupported` as for images, and the errors of the storage.
    pub async fn open(storage: SharedStorage, random: Random) -> Result<Arc<Self>> {
        Self::open_as(storage, random, Tables::Whole).await
    }

    /// Opens it for what is left of it: what of its tables cannot be read says nothing, what was cut off is a read error, and
    /// nothing is ever written.
    ///
    /// # Errors
    /// As above, for its superblock.
    pub async fn open_to_salvage(storage: SharedStorage, random: Random) -> Result<Arc<Self>> {
        Self::open_as(storage, random, Tables::WhatIsLeft).await
    }

    async fn open_as(storage: SharedStorage, random: Random, tables: Tables) -> Result<Arc<Self>> {
        let name = storage.name().to_owned();
        let context = || format!("{name} is not usable as a fast medium");
        let pages = read_supers(&storage, tables).await;
        let found = one_of(&pages).and_then(|one| one.fits(tables.len_of(&storage))).context(context)?;
        let Super { id, layout, .. } = found;
        let differs = |page: &Result<Super>| page.as_ref().is_ok_and(|page| *page != found);
        if tables == Tables::Whole && !storage.limits().read_only && pages.iter().any(differs) {
            // Somebody was kept from noting it on both. If that fails again, it is no worse than before.
            let _ = say_cut(&storage, &found, &pages).await;
        }
        // After a failed flush a host may show what the medium has not.
        if tables == Tables::Whole {
            let tables = ImageOffset::ZERO.span(layout.data_at());
            reconcile(&*storage, tables).await.context(context)?;
        }
        let Rows { rows, bad: bad_rows } = read_rows(&storage, tables).await.context(context)?;
        let read =
            read_entries(&storage, &found, &rows, (!bad_rows.is_empty(), tables)).await.context(context)?;
        let last = rows.iter().flatten().map(|row| row.last).max();
        let only_read = (tables == Tables::WhatIsLeft).then(|| {
            Error::new(
                ErrorKind::ReadOnly,
                format!("{name} is open for what is left of it, and is not written"),
            )
        });
        let mut state = State {
            open: vec![Opened::NOT; rows.len()],
            used: vec![0; rows.len()],
            rows,
            entries: read.entries,
            free: RoaringBitmap::new(),
            litter: read.litter,
            bad_rows,
            blind: read.blind,
            sequence: read.sequence.max(last.unwrap_or_default()),
            random,
            failed: only_read,
        };
        state.find_free();
        Ok(Arc::new(Self {
            len: storage.len().min(found.len()),
            was_cut: OnceLock::new(),
            needs: found.len(),
            room: u64::from(found.whole_slots()) * SLOT_BYTES,
            storage,
            id,
            layout,
            state: Mutex::new(state),
            tables: async_lock::Mutex::default(),
            tally: Tally::default(),
        }))
    }

    /// Its id, which images name.
    pub fn id(&self) -> FastId {
        self.id
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        self.storage.name()
    }

    /// How many bytes of copies it has room for.
    pub fn room_bytes(&self) -> u64 {
        self.room
    }

    /// How many of those are free.
    pub fn free_bytes(&self) -> u64 {
        lock(&self.state).free.len() * SLOT_BYTES
    }

    /// What was done to it.
    pub fn counts(&self) -> FastCounts {
        let get = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let Tally { copied_bytes, table_bytes, flushes, reads, read_bytes, read_errors } = &self.tally;
        FastCounts {
            copied_bytes: get(copied_bytes),
            table_bytes: get(table_bytes),
            flushes: get(flushes),
            reads: get(reads),
            read_bytes: get(read_bytes),
            read_errors: get(read_errors),
        }
    }

    /// Why nothing can be promoted to it any more, if that is so.
    pub fn trouble(&self) -> Option<Error> {
        lock(&self.state).failed.clone()
    }

    /// Its rows.
    pub fn rows(&self) -> Vec<RowFacts> {
        let state = lock(&self.state);
        let facts = state.rows.iter().enumerate().filter_map(|(index, row)| {
            let row = row.as_ref()?;
            Some(RowFacts {
                uuid: row.uuid,
                name: row.name.clone(),
                budget: row.budget,
                used: u64::from(state.used[index]) * SLOT_BYTES,
                is_open: state.open[index] != Opened::NOT,
                is_needed: row.is_needed,
            })
        });
        facts.collect()
    }

    /// Gives a disk a row, or its row another budget and name. Durable when it returns.
    ///
    /// # Errors
    /// `NoSpace` when all rows are taken, `Refused` for a new one where not all of the tables can be read, and the errors of the storage.
    pub async fn attach(&self, new: NewRow) -> Result<()> {
        let NewRow { uuid, budget, mut name } = new;
        while name.len() > NAME_MAX {
            name.pop();
        }
        let _one = self.tables.lock().await;
        if lock(&self.state).row_of(uuid).is_none() {
            self.check_tables()?;
        }
        let (row, bytes) = {
            let mut state = lock(&self.state);
            let row = match state.row_of(uuid) {
                Some(row) => row,
                None => state.free_row().ok_or_else(|| {
                    let why = format!("{}: all {ROWS} rows are taken: detach a disk first", self.name());
                    Error::new(ErrorKind::NoSpace, why)
                })?,
            };
            let before = state.rows[usize::from(row)].take();
            let now = Row { budget, name, ..before.unwrap_or(Row { uuid, ..Row::default() }) };
            let bytes = now.encode(row);
            state.rows[usize::from(row)] = Some(now);
            (row, bytes)
        };
        self.write_row(row, bytes).await
    }

    /// Takes the row of a disk away, and with it all that the medium has of the disk. Durable when it returns. Whether
    /// there was one. Units that are here alone are lost, where `even_needed` allows that.
    ///
    /// # Errors
    /// `Locked` while the disk is open, `Refused` where units of it may be here alone, or not all of the tables can be read, and the
    /// errors of the storage.
    pub async fn forget(&self, uuid: [u8; 16], even_needed: bool) -> Result<bool> {
        let _one = self.tables.lock().await;
        if lock(&self.state).row_of(uuid).is_some() {
            self.check_tables()?;
        }
        let row = {
            let mut state = lock(&self.state);
            let Some(row) = state.row_of(uuid) else { return Ok(false) };
            if state.open[usize::from(row)] != Opened::NOT {
                return Err(Error::new(ErrorKind::Locked, format!("{}: the disk is open", self.name())));
            }
            if let Some(row) =
                state.rows[usize::from(row)].as_ref().filter(|row| row.is_needed && !even_needed)
            {
                let (medium, name) = (self.name(), &row.name);
                return Err(Error::new(
                    ErrorKind::Refused,
                    format!(
                        "{medium}: units of {name} are on it alone: bring them back first (`vellum tier move --back`), or give them \
                         up (`vellum tier forget --force`)"
                    ),
                ));
            }
            state.open[usize::from(row)] = Opened::Writes;
            state.free_all_of(row);
            row
        };
        let blanked = self.blank_litter().await;
        {
            let mut state = lock(&self.state);
            state.open[usize::from(row)] = Opened::NOT;
            if blanked.is_ok() {
                state.rows[usize::from(row)] = None;
            }
        }
        blanked?;
        self.write_row(row, vec![0; ROW_LEN]).await.map(|()| true)
    }

    /// Opens the row of an image. One that is only read may have it beside others. The error says why the medium has nothing for
    /// it.
    pub(crate) fn open_row(self: &Arc<Self>, uuid: [u8; 16], read_only: bool) -> Result<OpenRow> {
        let mut state = lock(&self.state);
        let Some(row) = state.row_of(uuid) else {
            let remedy = match state.bad_rows.is_empty() {
                true => "attach it (`vellum tier attach`)",
                false => "one of its rows is damaged, which may be that of this image",
            };
            let why = format!("{} has no row for this image: {remedy}", self.name());
            return Err(Error::new(ErrorKind::NotFound, why));
        };
        let open = &mut state.open[usize::from(row)];
        *open = match *open {
            Opened::Reads(readers) if read_only => Opened::Reads(readers + 1),
            Opened::NOT if !read_only => Opened::Writes,
            _ => {
                let why = format!("another open image has the same UUID, and its row of {}", self.name());
                return Err(Error::new(ErrorKind::Locked, why));
            }
        };
        Ok(OpenRow { medium: self.clone(), row, is_open: AtomicBool::new(true) })
    }

    fn check_failed(&self) -> Result<()> {
        match &lock(&self.state).failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Notes a failure after which nothing is written any more.
    fn noticed<T>(&self, what: &str, result: Result<T>) -> Result<T> {
        result.map_err(|error| {
            let error = error.context(format!(
                "{}: {what}: nothing is promoted to it until it is opened again",
                self.name()
            ));
            lock(&self.state).failed.get_or_insert(error).clone()
        })
    }

    /// How it was first seen to be shorter while it was open, if it was.
    pub(super) fn was_cut(&self) -> Option<&Error> {
        self.was_cut.get()
    }

    /// Whether it can be written: it did not fail, and has had its length all the time.
    async fn check(&self) -> Result<()> {
        self.check_failed()?;
        let looked = match self.look().await {
            Ok(()) if self.was_cut().is_some() => Err(Error::new(ErrorKind::Changed, "it is longer again")),
            looked => looked,
        };
        let what = match &looked {
            Err(error) if error.kind() == ErrorKind::Changed => "it was cut off",
            _ => "can't find out its length",
        };
        self.noticed(what, looked)
    }

    /// Whether it has its length now. That it had not is kept in mind.
    pub(super) async fn look(&self) -> Result<()> {
        let looked = self.storage.look_at_len().await.and_then(|len| match len >= self.needs {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::Changed,
                format!("{} has {len} bytes, and had {}", self.name(), self.needs),
            )),
        });
        if let Err(error) = &looked
            && error.kind() == ErrorKind::Changed
        {
            self.was_cut.get_or_init(|| error.clone());
        }
        looked
    }

    /// The caller holds `tables`.
    async fn write_row(&self, row: u16, bytes: Vec<u8>) -> Result<()> {
        self.check().await?;
        count(&self.tally.table_bytes, bytes.len() as u64);
        let written = self.storage.write(Layout::row_at(row), Buffer::copy_of(&bytes)).await;
        self.noticed("can't write a row", written)?;
        self.flush().await
    }

    async fn flush(&self) -> Result<()> {
        self.check_failed()?;
        count(&self.tally.flushes, 1);
        let flushed = self.storage.flush().await;
        self.noticed("can't flush", flushed)
    }

    /// Blanks, durably, what the medium says of slots that hold nothing any more. The caller holds `tables`.
    async fn blank_litter(&self) -> Result<()> {
        self.check().await?;
        let slots: Vec<u32> = {
            let mut state = lock(&self.state);
            let slots: Vec<u32> = std::mem::take(&mut state.litter).iter().collect();
            slots.iter().for_each(|slot| state.entries[*slot as usize] = None);
            slots
        };
        if slots.is_empty() {
            return Ok(());
        }
        self.write_entries(&slots).await?;
        self.flush().await // commit point: nothing is said of them
    }

    /// Writes the entries of these slots, as they are now, and their neighbours' with them. The caller holds `tables`.
    async fn write_entries(&self, slots: &[u32]) -> Result<()> {
        let sectors = self.sectors(slots);
        for some in sectors.chunks(WRITES_AT_ONCE) {
            let write = |(at, bytes): &(ImageOffset, Vec<u8>)| {
                count(&self.tally.table_bytes, bytes.len() as u64);
                self.storage.write(*at, Buffer::copy_of(bytes))
            };
            let writes: Vec<LocalFuture<'_, Result<()>>> = some.iter().map(write).collect();
            let written = try_join_all(writes).await.map(drop);
            self.noticed("can't write entries", written)?;
        }
        Ok(())
    }

    /// The sectors with these slots' entries, as they are now, neighbours in one piece.
    fn sectors(&self, slots: &[u32]) -> Vec<(ImageOffset, Vec<u8>)> {
        let state = lock(&self.state);
        let mut places: Vec<(ImageOffset, u32)> =
            slots.iter().map(|slot| self.layout.entries_at(*slot)).collect();
        places.sort_unstable();
        places.dedup();
        let mut pieces: Vec<(ImageOffset, Vec<u8>)> = Vec::new();
        for (at, first) in places {
            let bytes = match pieces.last_mut() {
                Some((start, bytes)) if *start + bytes.len() as u64 == at && bytes.len() < PIECE_LEN => bytes,
                _ => {
                    pieces.push((at, Vec::new()));
                    &mut pieces.last_mut().expect("it was just put there").1
                }
            };
            let sector = bytes.len();
            bytes.resize(sector + ENTRY_LEN * ENTRIES_TOGETHER as usize, 0);
            for (slot, place) in (first..self.layout.slots).zip(bytes[sector..].chunks_mut(ENTRY_LEN)) {
                let entry = state.entries[slot as usize];
                let row = entry.and_then(|entry| state.rows[usize::from(entry.row)].as_ref());
                if let (Some(entry), Some(row)) = (entry, row) {
                    place.copy_from_slice(&entry.encode(slot, &row.uuid));
                }
            }
        }
        pieces
    }
}

/// The row of an open image.
pub(crate) struct OpenRow {
    medium: Arc<FastMedium>,
    row: u16,
    is_open: AtomicBool,
}

impl Drop for OpenRow {
    fn drop(&mut self) {
        self.release();
    }
}

impl OpenRow {
    /// Lets another image have the row.
    pub(crate) fn release(&self) {
        if self.is_open.swap(false, Ordering::AcqRel) {
            let open = &mut lock(&self.medium.state).open[usize::from(self.row)];
            *open = match *open {
                Opened::Reads(readers) => Opened::Reads(readers.saturating_sub(1)),
                Opened::Writes => Opened::NOT,
            };
        }
    }

    pub(crate) fn medium(&self) -> &Arc<FastMedium> {
        &self.medium
    }

    fn with<T>(&self, act: impl FnOnce(&mut State, u16) -> T) -> T {
        act(&mut lock(&self.medium.state), self.row)
    }

    fn with_row<T>(&self, act: impl FnOnce(&mut Row) -> T) -> T {
        self.with(|state, row| act(state.rows[usize::from(row)].as_mut().expect("it is open")))
    }

    /// Whether the row is that of an image that names this number, and the medium has not forgotten what it had when
    /// this promotion was the disk's last one.
    pub(crate) fn counts(&self, number: SessionNumber, last_promotion: u64) -> bool {
        self.with_row(|row| row.counts(number) && row.last >= last_promotion)
    }

    /// What it has in slots. Of a unit it may be a part.
    pub(crate) fn parts(&self) -> Vec<Part> {
        self.with(|state, row| {
            let part = |(slot, entry): (u32, Entry)| {
                let Entry { sequence, unit, part, reason, .. } = entry;
                Part { unit, part, slot, sequence, reason }
            };
            state.slots_of(row).map(part).collect()
        })
    }

    pub(crate) fn budget(&self) -> u64 {
        self.with_row(|row| row.budget)
    }

    /// How many bytes its slots have.
    pub(crate) fn used(&self) -> u64 {
        self.with(|state, row| u64::from(state.used[usize::from(row)]) * SLOT_BYTES)
    }

    /// Draws a number for a new session, and makes the row say, durably, that it counts beside `named`.
    pub(crate) async fn draw(&self, named: Option<SessionNumber>) -> Result<SessionNumber> {
        let _one = self.medium.tables.lock().await;
        let (number, bytes) = self.with(|state, row| {
            let number = loop {
                let mut bytes = [0; 16];
                state.random.fill(&mut bytes);
                if let Some(number) = SessionNumber::new(bytes) {
                    break number;
                }
            };
            let it = state.rows[usize::from(row)].as_mut().expect("it is open");
            (it.previous, it.newest, it.only_newest) = (named, Some(number), false);
            (number, it.encode(row))
        });
        self.medium.write_row(self.row, bytes).await?;
        Ok(number)
    }

    /// Makes the row say, durably, that only its newest number counts.
    pub(crate) async fn settle(&self) -> Result<()> {
        let _one = self.medium.tables.lock().await;
        let row = self.row;
        let bytes = self.with_row(|it| {
            it.only_newest = true;
            it.encode(row)
        });
        self.medium.write_row(row, bytes).await
    }

    /// Whether the row says so.
    pub(crate) fn is_needed(&self) -> bool {
        self.with_row(|row| row.is_needed)
    }

    /// Makes the row say, durably, that units of the disk are here alone, or that none is.
    pub(crate) async fn say_needed(&self, is_needed: bool) -> Result<()> {
        let _one = self.medium.tables.lock().await;
        let row = self.row;
        let bytes = self.with_row(|it| {
            it.is_needed = is_needed;
            it.encode(row)
        });
        self.medium.write_row(row, bytes).await
    }

    /// Whether anything can be promoted.
    pub(crate) fn check(&self) -> Result<()> {
        self.medium.check_failed()?;
        self.medium.check_tables()?;
        match self.medium.storage.limits().read_only {
            true => Err(Error::new(ErrorKind::ReadOnly, format!("{} is read-only", self.medium.name()))),
            false => Ok(()),
        }
    }

    /// Slots for a unit, within the budget. None is promised: where there are too few, it gets none.
    pub(crate) fn take(&self, count: u32) -> Option<Vec<u32>> {
        self.with(|state, row| {
            let index = usize::from(row);
            let budget = state.rows[index].as_ref().expect("it is open").budget;
            let would_use = (u64::from(state.used[index]) + u64::from(count)) * SLOT_BYTES;
            if would_use > budget || state.free.len() < u64::from(count) {
                return None;
            }
            let slots: Vec<u32> = state.free.iter().take(count as usize).collect();
            for slot in &slots {
                state.free.remove(*slot);
            }
            state.used[index] += count;
            Some(slots)
        })
    }

    /// Gives slots back. No reader may be left that has looked them up, and no bit that a crash may leave leads to them.
    pub(crate) fn free(&self, slots: &[u32]) {
        self.with(|state, row| state.free_slots(row, slots));
    }

    pub(crate) fn free_all(&self) {
        self.with(State::free_all_of);
    }

    /// The sequence of the next promotion.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.with(|state, _| {
            state.sequence += 1;
            state.sequence
        })
    }

    /// Makes slots that were taken ready to be written: the medium says nothing of them any more, durably, nor of any
    /// other slot that has become free. A crash between the bytes and their entries would leave old entries over them.
    pub(crate) async fn vacate(&self) -> Result<()> {
        let _one = self.medium.tables.lock().await;
        self.medium.blank_litter().await
    }

    /// Writes the bytes of a unit to its slots.
    pub(crate) async fn write(&self, slots: &[u32], mut bytes: Buffer) -> Result<()> {
        self.medium.check().await?;
        let writes = runs_of(slots).map(|(slot, count)| {
            let piece = bytes.split_to((count as usize * SLOT_LEN).min(bytes.len()));
            count_up(&self.medium.tally.copied_bytes, piece.len());
            self.medium.storage.write(self.medium.layout.slot_at(slot), piece)
        });
        let writes: Vec<LocalFuture<'_, Result<()>>> = writes.collect();
        let written = try_join_all(writes).await.map(drop);
        self.medium.noticed("can't write a copy", written)
    }

    /// Writes the entries of these parts, and makes them durable with their copies.
    pub(crate) async fn enter(&self, parts: &[Part]) -> Result<()> {
        let _one = self.medium.tables.lock().await;
        self.medium.check().await?;
        let slots: Vec<u32> = parts.iter().map(|part| part.slot).collect();
        let row = self.with(|state, row| {
            let it = state.rows[usize::from(row)].as_mut().expect("it is open");
            for Part { unit, part, slot, sequence, reason } in parts.iter().copied() {
                debug_assert!(!state.litter.contains(slot), "vacated before");
                state.entries[slot as usize] = Some(Entry { sequence, unit, row, part, reason });
                it.last = it.last.max(sequence);
            }
            it.encode(row)
        });
        self.medium.write_entries(&slots).await?;
        self.medium.write_row(self.row, row).await
    }

    /// Reads a run of a unit, which begins `within` bytes from its start. The memory is not lent: a read that fails
    /// does not give it back.
    pub(crate) async fn read(&self, slots: &[u32], within: u64, mut buffer: Buffer) -> Result<Buffer> {
        let Tally { reads, read_bytes, read_errors, .. } = &self.medium.tally;
        count(reads, 1);
        count_up(read_bytes, buffer.len());
        let mut pieces: Vec<LocalFuture<'_, Result<Buffer>>> = Vec::new();
        let mut skip = within;
        for (slot, slots) in runs_of(slots) {
            let len = u64::from(slots) * SLOT_BYTES;
            if skip >= len {
                skip -= len;
                continue;
            }
            let piece = buffer.split_to(usize::try_from(len - skip).expect("a unit").min(buffer.len()));
            let at = self.medium.layout.slot_at(slot) + skip;
            skip = 0;
            if piece.is_empty() {
                break;
            }
            if (at + piece.len() as u64).bytes() > self.medium.len {
                count(read_errors, 1);
                let why = format!("{} was cut off: it ends at {} bytes", self.medium.name(), self.medium.len);
                return Err(Error::new(ErrorKind::Io, why));
            }
            pieces.push(self.medium.storage.read(at, piece));
        }
        let mut read = try_join_all(pieces).await;
        // While it is shorter, what is read is what it had. Looked at afterwards: it may have become longer meanwhile.
        if read.is_err() || self.medium.was_cut().is_some() {
            let has_its_length = self.medium.look().await.is_ok();
            if has_its_length && let Some(cut) = self.medium.was_cut() {
                let why = format!(
                    "{} was cut off while it was in use ({}), and is longer again: what was cut off would be zeros. {AFTER_A_CUT}",
                    self.medium.name(),
                    cut.chain()
                );
                read = Err(Error::new(ErrorKind::Io, why));
            }
        }
        let read = read.inspect_err(|_| count(read_errors, 1))?;
        let mut pieces = read.into_iter();
        let mut all = pieces.next().unwrap_or_else(Buffer::empty);
        pieces.for_each(|piece| all.append(piece));
        Ok(all)
    }
}

fn count_up(number: &AtomicU64, len: usize) {
    count(number, len as u64);
}
