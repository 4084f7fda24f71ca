//! Room: what a request needs is promised to it before it claims blocks.
//!
//! ```text
//!   need ─► there is enough: promised ─► claim ─► …
//!        ├► flash has room to make, one caller for all: slots that are leaving ► a commit ► clean blocks
//!        └► the disk has its share, or all is dirty, one caller for each disk: its own write-back
//! ```
//!
//! 1. A caller that waits for room holds no claim, is in no epoch, and has no promise.
//! 2. What is done for all waits for flash, and for requests that are in an epoch or have a promise. Those wait for flash
//!    alone. So no home can hold it up.
//!    Where nothing could go home, because requests have claimed it, a caller waits for one of those to end.
//! 3. Write-back is waited for by callers of one disk alone, and they alone get its error. It is that disk's own, as long
//!    as the disk has anything to write home.
//! 4. Each open disk in write-back has a reserve (rule 2 of `promises`). Within it a disk needs no other home.
//! 5. Only what was dirty before a disk was opened can be in the way of its reserve. Then blocks of others go home, of
//!    disks without trouble alone; without any, the error says which disks have the slots.

use std::sync::Arc;

use smallvec::SmallVec;
use vellum_core::{Error, ErrorKind, Result, lock};

use crate::layout::{Key, Slot};
use crate::open::{Open, Share};
use crate::shared::{FlashCache, Home};
use crate::state::{Need, Shed, Short, State};

/// At most this many slices are written with one commit of an opening: copies that are in memory at once.
const SHORT_AT_ONCE: usize = 64;

/// What was promised to a request, until it is dropped.
pub(crate) struct Promise<'a> {
    cache: &'a FlashCache,
    row: u16,
    need: Need,
    left: Need,
}

impl Promise<'_> {
    /// One of the slots. The caller holds the state.
    pub(crate) fn take(&mut self, state: &mut State, key: Key) -> Slot {
        state.take_promised(key, &mut self.left)
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        self.cache.state().end_promise(self.row, self.need, self.left);
        self.cache.freed.notify(usize::MAX);
    }
}

impl FlashCache {
    /// Writes the slices again whose clean blocks an opening has left out, some with each commit. Until they are durable, flash
    /// has those blocks in slots that nothing else may get; and a disk that is open could change what home has of them.
    pub(crate) async fn write_short(&self) -> Result<()> {
        while self.state().write_short(SHORT_AT_ONCE) {
            self.commit().await?; // commit point
        }
        Ok(())
    }

    /// The rows of the open disks that may get dirty blocks. What is only read, or written through, has no reserve.
    pub(crate) fn open_rows(&self) -> SmallVec<[u16; 8]> {
        lock(&self.reserves).iter().copied().collect()
    }

    /// The disk of this row has a reserve from now on, or none.
    pub(crate) fn set_reserve(&self, row: u16, has_one: bool) {
        let mut reserves = lock(&self.reserves);
        match has_one {
            true => reserves.insert(row),
            false => reserves.remove(&row),
        };
    }

    fn short_of(&self, row: u16, need: Need) -> Option<Short> {
        let open = self.open_rows();
        self.state().short_of(row, need, &open)
    }

    /// Waits until this is there for the disk. The caller holds no claim and is in no epoch (rule 1).
    pub(crate) async fn promise(&self, home: &Home, need: Need) -> Result<Promise<'_>> {
        let row = home.row;
        loop {
            self.stop.check()?;
            let short = {
                let open = self.open_rows();
                let mut state = self.state();
                if need.bytes > Open::bytes_max(Share::Guest, state.record_bytes_max())
                    || need.slots > state.slots.total()
                {
                    // It would wait for ever.
                    let why =
                        format!("{}: a request needs more than the flash cache has at all", self.name());
                    return Err(Error::invalid(why));
                }
                match state.short_of(row, need, &open) {
                    None => {
                        state.promise(row, need);
                        return Ok(Promise { cache: self, row, need, left: need });
                    }
                    Some(short) => short,
                }
            };
            if self.needs_home(short) {
                let room = lock(&self.rooms).entry(row).or_default().clone();
                room.share(async || self.make_home_room(home, need).await, || None).await?;
            } else {
                self.room.share(async || self.make_room(row, need).await, || None).await?;
            }
        }
    }

    /// The same for bytes of the record alone, which no home can hold up.
    pub(crate) async fn promise_bytes(&self, home: &Home, need: Need) -> Result<Promise<'_>> {
        debug_assert!(need.slots == 0 && need.runs == 0);
        self.promise(home, need).await
    }

    /// Whether something has to be written home.
    fn needs_home(&self, short: Short) -> bool {
        let is_full = {
            let state = self.state();
            short.slots && !state.has_flash_room() || short.memory && !state.has_memory_room()
        };
        short.own_slots || short.own_runs || short.own_memory || short.runs || is_full && !short.bytes
    }

    /// Gets nearer to what a caller needs, on flash alone. One caller at a time.
    async fn make_room(&self, row: u16, need: Need) -> Result<()> {
        let listener = self.freed.listen();
        let waits_for = self.state().reclaim(&self.epochs);
        let Some(short) = self.short_of(row, need) else { return Ok(()) };
        if self.needs_home(short) {
            return Ok(());
        }
        if short.bytes && self.state().has_open() {
            return self.commit_all().await;
        }
        if short.memory {
            let shed = self.state().shed(u64::from(need.slots));
            match shed {
                Shed::Some => return Ok(()),
                Shed::NoRecord if self.state().has_open() => return self.commit_all().await,
                Shed::NoRecord | Shed::AllDirty => {}
            }
        }
        if short.slots {
            if let Some(stamp) = waits_for {
                self.epochs.until_passed(stamp).await;
                return Ok(());
            }
            let has_left = {
                let mut state = self.state();
                if !state.has_left() {
                    let wanted = (need.slots + state.low_water()) as usize;
                    state.evict(wanted);
                }
                state.has_left()
            };
            if has_left {
                return self.commit_all().await;
            }
        }
        // Other requests have all of it, and end without waiting for this one.
        listener.await;
        Ok(())
    }

    /// Gets nearer to what callers of the disk need: its own blocks go home. One caller of the disk at a time.
    async fn make_home_room(&self, home: &Home, need: Need) -> Result<()> {
        let listener = self.freed.listen();
        let Some(short) = self.short_of(home.row, need) else { return Ok(()) };
        if !self.needs_home(short) {
            return Ok(());
        }
        let needs_runs = short.own_runs || short.runs;
        let (dirty, has_runs) = {
            let state = self.state();
            (state.counts(home.row).dirty, state.runs_of(home.row).next().is_some())
        };
        if needs_runs && has_runs {
            match home.noting(home.send_runs_home().await)? {
                0 if short.runs => {
                    let why = format!("{}: flash has no room for more runs of zeros", self.name());
                    return Err(Error::new(ErrorKind::NoSpace, why));
                }
                0 => {}
                _ => return Ok(()),
            }
        } else if !needs_runs && dirty > 0 {
            if home.noting(home.write_back_some().await)? > 0 {
                return Ok(());
            }
        } else if !short.own_slots && !short.own_runs && !short.own_memory {
            if let Some(other) = self.most_of_others(home.row, needs_runs) {
                // Its error is its own. It is in trouble then, and the next look passes it over.
                let written = match needs_runs {
                    true => other.send_runs_home().await,
                    false => other.write_back_some().await,
                };
                match other.noting(written) {
                    Ok(0) if needs_runs => {
                        let why = format!("{}: flash has no room for more runs of zeros", self.name());
                        return Err(Error::new(ErrorKind::NoSpace, why));
                    }
                    // Requests of its own have claimed all of it, and end without waiting for this one.
                    Ok(0) => listener.await,
                    Ok(_) | Err(_) => {}
                }
                return Ok(());
            }
            self.check_not_stuck(needs_runs).await?;
            if self.short_of(home.row, need) != Some(short) {
                return Ok(());
            }
        }
        // Requests that are under way have all of it, or have claimed it, and end without waiting for this one.
        listener.await;
        Ok(())
    }

    /// The other disk that has most to write, among those that are not in trouble.
    fn most_of_others(&self, row: u16, runs: bool) -> Option<Arc<Home>> {
        let homes = self.homes();
        let state = self.state();
        let most = |home: &Arc<Home>| match runs {
            true => state.runs_of(home.row).count() as u64,
            false => state.counts(home.row).dirty,
        };
        homes
            .into_iter()
            .filter(|home| home.row != row && most(home) > 0 && !state.is_undecided(home.row))
            .filter(|home| lock(&home.trouble).is_none() && home.writing_back.try_lock().is_some())
            .max_by_key(most)
    }

    /// Fails when what is dirty stays dirty, as far as anybody knows. Waits for a session that is just beginning.
    async fn check_not_stuck(&self, runs: bool) -> Result<()> {
        let homes = self.homes();
        let (rows, undecided) = {
            let state = self.state();
            let holds = |row: &u16| match runs {
                true => state.runs_of(*row).next().is_some(),
                false => state.counts(*row).dirty > 0,
            };
            let rows: Vec<u16> = state.ledger.rows.keys().copied().filter(holds).collect();
            let undecided =
                homes.iter().find(|home| rows.contains(&home.row) && state.is_undecided(home.row));
            (rows, undecided)
        };
        if let Some(home) = undecided {
            drop(home.beginning.lock().await);
            return Ok(());
        }
        let holders: Vec<&Arc<Home>> = homes.iter().filter(|home| rows.contains(&home.row)).collect();
        let trouble = |home: &&Arc<Home>| lock(&home.trouble).clone();
        // A write-back is under way, and says at its end what came of it.
        if rows.is_empty() || holders.iter().any(|home| trouble(home).is_none()) {
            return Ok(());
        }
        match holders.iter().find_map(trouble) {
            Some(trouble) => {
                let why =
                    format!("{}: flash is full of blocks of another disk, which cannot go home", self.name());
                Err(trouble.context(why).with_kind(ErrorKind::NoSpace))
            }
            None => {
                let why = format!(
                    "{}: flash is full of blocks of disks that are not open: open them, or drain them with `vellum flash \
                     drain`",
                    self.name()
                );
                Err(Error::new(ErrorKind::NoSpace, why))
            }
        }
    }
}
