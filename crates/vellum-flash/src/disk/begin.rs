//! Which row a disk has, and its session.
//!
//! ```text
//!   open    the number that the image names ─► the row that has it       its blocks count
//!                                           └─► none: a new row           nothing is cached yet
//!   begin   new number ─► row, beside the one that the image names ► commit ─► image ► flush      before the first change
//!   close   drained ─► the same ─► row: only the newest counts ► commit ─► the mark is taken away
//!   leave   closed ─► row: none counts ► commit ─► image: no session
//! ```
//!
//! 1. The blocks of a row count for an image that names the row's newest number, or the one beside it while the
//!    newest has no record.
//! 2. A marked image whose number no row has is refused: the writes that it lacks are elsewhere.
//! 3. A row that is open is not opened again.
//! 4. Between the row and the image no block of the disk is published, by whomever: the first record voids the number
//!    that the image still names.
//! 5. Home changes only under a number that this opening has drawn, also by write-back; and a close leaves a number that
//!    no copy has which was made before. So a copy of an image that is put back, or opened beside it, is refused or has
//!    nothing of the cache, unless nothing has changed since.
//! 6. Where nothing ties the image to the cache and it may be written, its blocks count in this opening alone, unless what proves
//!    its content ties them (`named`).

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vellum_core::{Error, ErrorKind, Result, lock};

use super::FlashDisk;
use crate::claims::Claims;
use crate::layout::Superblock;
use crate::options::{DiskOptions, FlashPolicy};
use crate::record::Row;
use crate::session::{Session, SessionNumber, Sessions};
use crate::shared::{Above, FlashCache, Home, Tally};
use crate::state::State;

/// The first 32 bits of a row's disk are zero if it was drawn and not named since.
const DRAWN_BITS: u32 = 32;

/// Whether nothing can find the row any more, once its opening is over.
pub(crate) fn is_lost(row: &Row) -> bool {
    row.named == 0 && row.newest == 0 && row.disk.leading_zeros() >= DRAWN_BITS
}

fn number_of(session: Option<&Session>) -> u128 {
    session.map_or(0, |session| u128::from_be_bytes(session.number.bytes()))
}

impl FlashCache {
    /// Opens a disk over its home.
    ///
    /// # Errors
    /// `Unsupported` for a policy that this disk cannot have; `Locked` when it is open already; `Refused` when the
    /// image lacks writes that this cache does not have; `NoSpace` when there is no row left.
    pub async fn open_disk(self: &Arc<Self>, options: DiskOptions) -> Result<Arc<FlashDisk>> {
        self.open_as(options, false).await
    }

    /// The same. `is_drawn`: the disk's bytes were drawn for this opening, and found by nobody else.
    pub(super) async fn open_as(
        self: &Arc<Self>,
        options: DiskOptions,
        is_drawn: bool,
    ) -> Result<Arc<FlashDisk>> {
        self.check_open()?;
        self.stop.check()?;
        let is_read_only = options.home.geometry().read_only;
        may_have(options.policy, &options, is_read_only)?;
        let is_through = options.policy == FlashPolicy::WriteThrough && !is_read_only;
        if is_through {
            // What an opening before has left in the host's memory: no region says that home may lose it.
            options.home.flush().await?; // commit point
        }
        let named = match &options.sessions {
            Some(sessions) => {
                let session = sessions.session().await;
                session.filter(|session| session.counts() && session.cache == self.id)
            }
            None => None,
        };
        if let (Some(session), Some(sessions)) = (&named, &options.sessions)
            && self.is_to_be_decided(session)
        {
            // A program that was killed may have left the number in the page cache alone. It becomes durable before the row
            // says that nothing else counts.
            sessions.begin(session.number, session.holds_writes()).await?; // commit point
        }
        let one_at_a_time = lock(&self.opening);
        let Chosen { row, is_copy } = self.choose_row(&options, named.as_ref(), is_read_only || is_drawn)?;
        if is_through && self.state().is_dirty(row.number) {
            return Err(Error::invalid(
                "the flash cache holds writes of the disk, so it has to be drained first",
            ));
        }
        let home = Arc::new(Home {
            cache: self.clone(),
            disk: options.home,
            row: row.number,
            claims: Arc::new(Claims::default()),
            policy: Mutex::new(options.policy),
            sessions: options.sessions,
            is_copy,
            has_begun: AtomicBool::new(false),
            trusts_home: options.trusts_home,
            drawn: is_drawn.then(|| u128::from_be_bytes(options.disk)),
            has_ended_well: AtomicBool::new(false),
            is_alone: AtomicBool::new(false),
            has_lost_flush: AtomicBool::new(false),
            unrecorded: AtomicU64::new(0),
            unrecorded_covered: AtomicU64::new(0),
            unrecorded_at: AtomicU32::new(0),
            beginning: async_lock::Mutex::new(()),
            writing_back: async_lock::Mutex::new(()),
            tending: Arc::default(),
            wants_flush: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            keeps_at_close: AtomicBool::new(false),
            tally: Tally::default(),
            below: Mutex::default(),
            above: Above::default(),
            fetched: Mutex::default(),
            hand: AtomicU64::new(0),
            trouble: Mutex::default(),
        });
        lock(&self.disks).insert(row.number, Arc::downgrade(&home));
        self.set_reserve(row.number, options.policy == FlashPolicy::WriteBack && !is_read_only);
        drop(one_at_a_time);
        // What an opening has left that did not end well.
        self.void_regions(row.number).await?;
        if is_through {
            self.add_features(Superblock::REGIONS).await?;
        }
        Ok(Arc::new(FlashDisk { home }))
    }

    pub(crate) fn is_row_open(&self, row: u16) -> bool {
        let home = lock(&self.disks).get(&row).and_then(std::sync::Weak::upgrade);
        home.is_some_and(|home| home.is_open())
    }

    fn check_closed(&self, row: u16) -> Result<()> {
        if self.is_row_open(row) {
            let why = format!("{}: the disk is open with this flash cache already", self.name());
            return Err(Error::new(ErrorKind::Locked, why));
        }
        Ok(())
    }

    /// Whether the row that this session names is closed, and does not say yet which of two numbers its image has.
    fn is_to_be_decided(&self, session: &Session) -> bool {
        let number = number_of(Some(session));
        let is_it = |row: &Row| !row.has_record && (row.newest == number || row.named == number);
        let row = self.state().ledger.rows.values().copied().find(is_it);
        row.is_some_and(|row| !self.is_row_open(row.number))
    }

    /// `is_known`: the disk's bytes say what it has.
    fn choose_row(&self, options: &DiskOptions, named: Option<&Session>, is_known: bool) -> Result<Chosen> {
        let disk = u128::from_be_bytes(options.disk);
        let mut is_copy = false;
        let found = match (named, &options.sessions) {
            (Some(session), _) => {
                let found = self.row_of_session(session)?;
                // A complete image beside the one of which it is a copy: nothing of the cache is its own.
                is_copy = found.is_some_and(|row| self.is_row_open(row.number));
                found.filter(|_| !is_copy)
            }
            (None, Some(_)) => None,
            (None, None) if is_known || options.trusts_home => self.state().row_of(disk),
            (None, None) => None,
        };
        if let Some(row) = found {
            self.check_closed(row.number)?;
            return Ok(Chosen { row: self.moved(row, disk), is_copy: false });
        }
        let counts_later = is_known || options.trusts_home || options.sessions.is_some();
        let disk = if counts_later { disk } else { self.draw_row() };
        self.forget_useless(disk);
        Ok(Chosen { row: self.state().add_row(disk)?, is_copy })
    }

    /// The row, which may have been that of another file until now.
    fn moved(&self, row: Row, disk: u128) -> Row {
        let moved = Row { disk, ..row };
        if moved != row {
            self.state().set_row(moved);
        }
        moved
    }

    /// The row whose blocks count for this session.
    fn row_of_session(&self, session: &Session) -> Result<Option<Row>> {
        let number = number_of(Some(session));
        let (newest, named) = {
            let state = self.state();
            let rows = || state.ledger.rows.values().copied();
            (rows().find(|row| row.newest == number), rows().find(|row| row.named == number))
        };
        if let Some(row) = newest.or(named.filter(|row| !row.has_record)) {
            // What this file names decides nothing of an open disk, of which it is a copy.
            if self.is_row_open(row.number) && !session.holds_writes() {
                return Ok(Some(row));
            }
            self.check_closed(row.number)?;
            // Either the newer number is in the image, or it never reached the image, and never will. A copy that names the
            // other one is another file.
            let row = Row { newest: number, has_record: true, ..row };
            self.state().decide_row(row);
            return Ok(Some(row));
        }
        match named {
            Some(_) if session.holds_writes() => {
                let why = format!(
                    "{0}: this file is an older copy: the image was written or drained with the flash cache since, so \
                     the writes that this copy lacks are not known any more. Use the image that was opened last, or give \
                     them up with `vellum flash forget IMAGE`",
                    self.name()
                );
                Err(Error::new(ErrorKind::Refused, why))
            }
            None if session.holds_writes() => {
                let why = format!(
                    "{}: the flash cache does not have the writes that the image lacks. Either this file is an older copy \
                     of an image that was written or drained since: then use that one. Or an older copy of the cache was \
                     put back, or the cache has forgotten the disk: then give them up with `vellum flash forget IMAGE`",
                    self.name()
                );
                Err(Error::new(ErrorKind::Refused, why))
            }
            _ => Ok(None),
        }
    }

    /// Clean rows of this disk that no session names. And one more when there is no row left: one without a session, else one
    /// that had this file, else the first. The image of a row with a session may still be marked, although all of its blocks
    /// went home before a kill; without its row it would be refused.
    pub(crate) fn forget_useless(&self, disk: u128) {
        let rows: Vec<Row> = self.state().ledger.rows.values().copied().collect();
        let is_full = rows.len() >= usize::from(crate::layout::ROWS_MAX);
        let is_idle = |row: &Row| !self.is_row_open(row.number) && !self.state().is_dirty(row.number);
        let idle: Vec<Row> = rows.into_iter().filter(is_idle).collect();
        let mut useless: Vec<Row> =
            idle.iter().filter(|row| row.disk == disk && row.newest == 0).copied().collect();
        if is_full && useless.is_empty() {
            let spare = idle.iter().find(|row| row.newest == 0);
            let spare = spare.or_else(|| idle.iter().find(|row| row.disk == disk)).or(idle.first());
            useless.extend(spare);
        }
        for row in useless {
            self.state().remove_row(row.number);
        }
    }

    /// The number of a row that counts in this opening alone, unless it gets a name later.
    pub(crate) fn draw_row(&self) -> u128 {
        self.draw_number() >> DRAWN_BITS
    }

    pub(crate) fn draw_number(&self) -> u128 {
        let mut random = lock(&self.random);
        (u128::from(random.any()) << 64 | u128::from(random.any())).max(1)
    }

    /// Forgets the disk of which these are the bytes, or the number of its session: its row, and what is cached of it,
    /// also what is dirty. False when there is no such row.
    ///
    /// # Errors
    /// `Invalid` when several rows have these bytes, and `Locked` while the disk is open: nothing is forgotten then.
    /// Those of the commit.
    pub async fn forget(&self, which: [u8; 16]) -> Result<bool> {
        let which = u128::from_be_bytes(which);
        let is_it = |row: &&Row| {
            row.disk == which || row.newest == which || (!row.has_record && row.named == which && which != 0)
        };
        let rows: Vec<Row> = self.state().ledger.rows.values().filter(is_it).copied().collect();
        let Some(row) = rows.first() else { return Ok(false) };
        if rows.len() > 1 {
            let sessions: Vec<String> = rows.iter().map(|row| format!("{:032x}", row.newest)).collect();
            let why = format!(
                "{}: {} disks have these digits, because the file of one image took the place of another's: give the \
                 session of the one instead, which is one of {}. `vellum info IMAGE` shows the sessions of the images \
                 that are to stay",
                self.name(),
                rows.len(),
                sessions.join(", ")
            );
            return Err(Error::invalid(why));
        }
        if self.is_row_open(row.number) {
            let why = format!("{}: disk {} is open: close it first", self.name(), row.number);
            return Err(Error::new(ErrorKind::Locked, why));
        }
        self.state().remove_row(row.number);
        self.commit_all().await?;
        Ok(true)
    }
}

/// The row of a disk.
struct Chosen {
    row: Row,
    /// The image names a number of another row, which is open.
    is_copy: bool,
}

fn may_have(policy: FlashPolicy, options: &DiskOptions, is_read_only: bool) -> Result<()> {
    match policy {
        FlashPolicy::WriteBack if !is_read_only && options.sessions.is_none() && !options.trusts_home => {
            Err(Error::unsupported(
                "write-back needs an image that can name its flash cache: qcow2 of version 3 or the native format",
            ))
        }
        _ => Ok(()),
    }
}

impl Home {
    /// Before the first change of this opening, which may also be a write-back of what an earlier one has left: a new
    /// number, in the row and then in the image.
    pub(crate) async fn begin(&self) -> Result<()> {
        let Some(sessions) = &self.sessions else { return Ok(()) };
        if self.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        let _alone = self.beginning.lock().await;
        if self.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        self.change_number(&**sessions).await?;
        self.has_begun.store(true, Ordering::Release);
        Ok(())
    }

    /// A new number, and for write-back the mark. After a crash the image names the new one or that before, and the row has both.
    async fn change_number(&self, sessions: &dyn Sessions) -> Result<()> {
        let named = sessions.session().await;
        let named = named.filter(|session| session.counts() && session.cache == self.cache.id);
        // What a copy names until it gets a number of its own is the original's.
        let named = named.filter(|_| !self.is_copy || self.has_number());
        let newest = {
            let drawn = self.cache.draw_number();
            let mut state = self.cache.state();
            let row = self.row_in(&state);
            match state.is_undecided(self.row) {
                // This was tried before and failed, perhaps after the image had got the number. Nothing else may be in
                // the row then.
                true => row.newest,
                false => {
                    let named = number_of(named.as_ref());
                    state.begin_row(Row { named, newest: drawn, has_record: false, ..row });
                    drawn
                }
            }
        };
        self.cache.commit().await?; // commit point
        let number = SessionNumber::new(newest.to_be_bytes()).expect("it is not zero");
        let holds_writes = self.policy() != FlashPolicy::WriteThrough;
        sessions.begin(number, holds_writes).await?; // commit point
        self.cache.state().row_has_begun(self.row);
        Ok(())
    }

    /// Whether this opening has drawn a number before.
    fn has_number(&self) -> bool {
        let state = self.cache.state();
        self.row_in(&state).newest != 0 && !state.is_undecided(self.row)
    }

    fn row_in(&self, state: &State) -> Row {
        state.ledger.rows.get(&self.row).copied().expect("an open disk has a row")
    }

    fn must_be_clean(&self) -> Result<()> {
        match self.cache.state().is_dirty(self.row) {
            true => Err(Error::new(ErrorKind::Io, "blocks of the disk are still dirty")),
            false => Ok(()),
        }
    }

    /// Before the first change past the cache: flash is not told of it durably, so nothing of it may count later. What
    /// flash holds goes home before.
    pub(super) async fn leave_session(&self) -> Result<()> {
        if self.sessions.is_none() || self.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        if self.cache.state().is_dirty(self.row) {
            self.drain().await?;
            // It was a change, under a number of this opening.
            self.has_begun.store(false, Ordering::Release);
        }
        let _alone = self.beginning.lock().await;
        if !self.has_begun.load(Ordering::Acquire) {
            self.leave().await?;
            self.has_begun.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Nothing of the disk counts any more, for no copy of the image. The row records that first: it may lack what the image
    /// gets from now on.
    async fn leave(&self) -> Result<()> {
        let Some(sessions) = &self.sessions else { return Ok(()) };
        self.must_be_clean()?;
        self.take_mark(&**sessions).await?;
        let is_known = {
            let mut state = self.cache.state();
            let row = self.row_in(&state);
            if row.newest != 0 {
                state.set_row(Row { named: 0, newest: 0, has_record: false, ..row });
            }
            row.newest != 0
        };
        if is_known {
            self.cache.commit_all().await?; // commit point
        }
        if sessions.session().await.is_some_and(|session| session.counts()) {
            sessions.end().await?; // commit point
        }
        Ok(())
    }

    /// The number becomes one that no copy of the image has, and then the row knows no other.
    pub(super) async fn renew(&self, sessions: &dyn Sessions) -> Result<()> {
        self.change_number(sessions).await?;
        {
            let mut state = self.cache.state();
            let row = self.row_in(&state);
            state.set_row(Row { has_record: true, ..row });
        }
        self.cache.commit_all().await // commit point
    }

    /// Of an image that is complete.
    async fn take_mark(&self, sessions: &dyn Sessions) -> Result<()> {
        if sessions.session().await.is_some_and(|session| session.holds_writes()) {
            self.must_be_clean()?;
            self.renew(sessions).await?;
            sessions.clear_mark().await?; // commit point
        }
        Ok(())
    }

    /// The disk is drained, and the image records that.
    pub(super) async fn end_session(&self) -> Result<()> {
        if self.policy() == FlashPolicy::WriteThrough {
            return self.end_through().await;
        }
        let Some(sessions) = &self.sessions else { return Ok(()) };
        let _alone = self.beginning.lock().await;
        self.take_mark(&**sessions).await?;
        self.has_begun.store(false, Ordering::Release);
        Ok(())
    }

    /// The disk's blocks stay where they are, and the image marked.
    pub(super) async fn keep_session(&self) -> Result<()> {
        let Some(sessions) = &self.sessions else { return Ok(()) };
        let _alone = self.beginning.lock().await;
        if self.has_begun.swap(false, Ordering::AcqRel) {
            self.renew(&**sessions).await?;
        }
        Ok(())
    }

    pub(super) async fn set_policy(&self, policy: FlashPolicy) -> Result<()> {
        let before = self.policy();
        if before == policy {
            return Ok(());
        }
        let is_read_only = self.disk.geometry().read_only;
        if policy == FlashPolicy::WriteBack && !is_read_only && self.sessions.is_none() && !self.trusts_home {
            return Err(Error::unsupported("write-back needs an image that can name its flash cache"));
        }
        if before == FlashPolicy::WriteBack && !is_read_only {
            self.drain().await?;
            if self.cache.state().is_dirty(self.row) {
                return Err(Error::new(ErrorKind::Invalid, "the disk was written while it was drained"));
            }
            let _alone = self.beginning.lock().await;
            match (policy, &self.sessions) {
                (FlashPolicy::WriteThrough, Some(sessions)) => self.take_mark(&**sessions).await?,
                (FlashPolicy::WriteThrough, None) => self.cache.commit_all().await?,
                // From now on home changes without flash being told durably, so nothing counts after a crash.
                _ => self.leave().await?,
            }
        }
        if before == FlashPolicy::WriteThrough && !is_read_only {
            self.end_through().await?;
            if policy == FlashPolicy::WriteBack && self.cache.state().has_regions(self.row) {
                let why = "nobody knows what the image has got of its writes: open it again first";
                return Err(Error::new(ErrorKind::Io, why));
            }
            if policy != FlashPolicy::WriteBack {
                let _alone = self.beginning.lock().await;
                self.leave().await?;
            }
        }
        if policy == FlashPolicy::WriteThrough {
            self.cache.add_features(Superblock::REGIONS).await?;
        }
        if matches!(policy, FlashPolicy::WriteBack | FlashPolicy::WriteThrough) && !is_read_only {
            // What went past the cache: a flush of write-back is one of flash alone, and no region counts as written of what
            // was read since.
            self.disk.flush().await?; // commit point
        }
        self.has_begun.store(false, Ordering::Release);
        self.cache.set_reserve(self.row, policy == FlashPolicy::WriteBack && !is_read_only);
        *lock(&self.policy) = policy;
        Ok(())
    }
}
