//! A written home that can name no session: a raw file, a qcow2 image of version 2. Its blocks count for the next opening if
//! this one ends well, and nothing has changed the home until then.
//!
//! ```text
//!   open    what proves the content ─► the row of that name ─► gets a number that was drawn ► commit     before any change
//!   close   settled, committed, home flushed and closed ─► longer than a tick of the clock
//!           ─► what proves the content now ─► the name of the row ► commit
//! ```
//!
//! 1. While the home is open for writing no name finds its row: after an unclean end nothing counts.
//! 2. A name is given only after a close of which nothing failed, nor any flush of home before it: then home is what the
//!    cache took it to be, and durably so. No region counts as written by then, and nothing is dirty.
//! 3. The caller names what nobody can change without changing the name: it is asked when the last change is older than a
//!    tick of the host's clock.
//! 4. A row without a name is removed at the close, or when the cache is next opened, so that it takes no slots.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_core::Result;

use super::FlashDisk;
use super::begin::is_lost;
use crate::options::{CLOCK_STEP, DiskOptions, FlashPolicy};
use crate::record::Row;
use crate::shared::FlashCache;
use crate::state::State;

/// At most this many rows are forgotten with one record.
const LOST_AT_ONCE: usize = 64;

impl FlashCache {
    /// Opens a disk over a home that is written and names no session. `found` is what proved its content before it was
    /// opened: what an opening before has left under this name ([`FlashDisk::leave_as`]) counts.
    ///
    /// # Errors
    /// As for [`open_disk`](Self::open_disk), and those of flash.
    pub async fn open_file(
        self: &Arc<Self>,
        options: DiskOptions,
        found: Option<[u8; 16]>,
    ) -> Result<Arc<FlashDisk>> {
        if options.sessions.is_some() || options.trusts_home || options.home.geometry().read_only {
            return self.open_disk(options).await;
        }
        self.check_open()?;
        self.stop.check()?;
        let found = found.map(u128::from_be_bytes);
        let drawn = self.take_name(found, || self.draw_row()).await?;
        let disk = self.open_as(DiskOptions { disk: drawn.to_be_bytes(), ..options }, true).await?;
        Ok(disk)
    }

    /// Rows of openings that did not end well, and that nothing can find: no disk is open yet.
    pub(crate) async fn forget_lost_rows(&self) -> Result<()> {
        loop {
            let lost: Vec<u16> = {
                let state = self.state();
                let is_lost = |row: &&Row| is_lost(row) && !state.is_dirty(row.number);
                let rows = state.ledger.rows.values().filter(is_lost);
                rows.map(|row| row.number).take(LOST_AT_ONCE).collect()
            };
            if lost.is_empty() {
                return Ok(());
            }
            lost.iter().for_each(|row| self.state().remove_row(*row));
            if lost.len() == LOST_AT_ONCE {
                self.commit_all().await?;
            }
        }
    }

    /// From here on no row has this name. Returns the number of the one that had it, or of none.
    pub(crate) async fn take_name(&self, name: Option<u128>, draw: impl Fn() -> u128) -> Result<u128> {
        let drawn = draw();
        let Some(name) = name else { return Ok(drawn) };
        let rows: Vec<Row> = {
            let state = self.state();
            state.ledger.rows.values().filter(|row| row.disk == name).copied().collect()
        };
        for (index, row) in rows.iter().enumerate() {
            // One that is open is left to whoever has it open, and found by nobody else.
            let is_ours = index == 0 && !self.is_row_open(row.number);
            let disk = if is_ours { drawn } else { draw() };
            self.state().set_row(Row { disk, ..*row });
        }
        if !rows.is_empty() {
            self.commit_all().await?; // commit point
        }
        Ok(drawn)
    }
}

impl FlashDisk {
    /// After the disk was closed, and nothing changes its home until this returns: `name` says what proves the home's
    /// content. Where there is no name, or the close failed, nothing of it counts any more. Of a disk that was not opened with
    /// [`FlashCache::open_file`] nothing changes.
    ///
    /// # Errors
    /// Those of flash.
    pub async fn leave_as(&self, name: impl AsyncFnOnce() -> Option<[u8; 16]>) -> Result<()> {
        let (home, cache) = (&self.home, &self.home.cache);
        let Some(drawn) = home.drawn.filter(|_| !home.is_open() && cache.failure().is_none()) else {
            return Ok(());
        };
        // Another disk may have got the row since the close, when none was left.
        let own = |state: &State| state.ledger.rows.get(&home.row).copied().filter(|row| row.disk == drawn);
        let is_known = {
            let state = cache.state();
            own(&state).is_some() && state.counts(home.row).blocks > 0 && !state.has_regions(home.row)
        };
        let has_ended_well = home.has_ended_well.load(Ordering::Acquire)
            && !home.has_lost_flush.load(Ordering::Acquire)
            && !home.is_alone.load(Ordering::Acquire)
            && home.policy() != FlashPolicy::Off;
        let mut named = None;
        if is_known && has_ended_well {
            if let Some(clock) = &cache.options.clock {
                clock.sleep(CLOCK_STEP).await;
            }
            named = name().await.map(u128::from_be_bytes);
        }
        if let Some(name) = named {
            let other = cache.state().row_of(name);
            match other {
                Some(row) if cache.is_row_open(row.number) => named = None,
                Some(row) => cache.state().remove_row(row.number),
                None => {}
            }
        }
        {
            let mut state = cache.state();
            let Some(row) = own(&state) else { return Ok(()) };
            match named {
                Some(name) => state.set_row(Row { disk: name, ..row }),
                None => state.remove_row(row.number),
            }
        }
        cache.commit_all().await // commit point
    }
}
