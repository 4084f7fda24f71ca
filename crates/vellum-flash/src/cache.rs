//! The cache: one per process and medium. It commits for all its disks, and hands out what they need.
//!
//! ```text
//!   flush ─► group commit ─► seal ► record, slices ► flash   ► one flush   (commit point)   ► settle
//!   need  ─► there is enough: promised ─► claim ─► …                                     room.rs
//! ```
//!
//! 1. One commit at a time. What was published before the call is durable when it returns.
//! 2. A record is written after all bytes that it counts on, and covered by the same flush.
//! 3. Where nothing was published and something was overwritten in place, a commit is a flush alone. Where
//!    nothing was written it is nothing.
//! 4. A failed write of a record or slice, or a failed flush, stops the cache until it is reopened. So does a
//!    commit, or a write to a slot, that is dropped half way.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use crate::session::CacheId;
use event_listener::Event;
use futures_lite::future::zip;
use vellum_core::{
    Buffer, Clock, Context, Error, ErrorKind, ImageOffset, LocalFuture, Result, SharedStorage, lock,
    try_join_all,
};
use vellum_format::commit::{Epochs, GroupCommit};

use crate::layout::Slot;
use crate::open::Share;
use crate::options::FlashOptions;
use crate::shared::{CacheCounts, FlashCache, Home, part_is_full};
use crate::state::{Sealed, State};
use crate::stop::Stop;

/// So many slices are in flight at once.
const SLICES_AT_ONCE: usize = 16;

impl FlashCache {
    pub(crate) fn with(
        storage: SharedStorage,
        id: CacheId,
        mut state: State,
        options: FlashOptions,
    ) -> Arc<Self> {
        state.replace_by(options.replacement);
        let clock: Option<Arc<dyn Clock>> = options.clock.clone();
        let random = Mutex::new(options.chance.clone());
        Arc::new(Self {
            storage,
            id,
            layout: state.layout,
            options,
            state: Mutex::new(state),
            epochs: Epochs::default(),
            stop: Stop::default(),
            commits: GroupCommit::with_clock(clock),
            room: GroupCommit::default(),
            rooms: Mutex::default(),
            tended: Mutex::default(),
            has_more: AtomicBool::new(false),
            changes: AtomicU64::new(0),
            covered: AtomicU64::new(0),
            freed: Event::new(),
            disks: Mutex::default(),
            opening: Mutex::default(),
            random,
            counts: Mutex::default(),
            is_closed: AtomicBool::new(false),
            publishing: async_lock::Mutex::new(()),
            fetched_bytes: AtomicU64::new(0),
            pace: Mutex::default(),
        })
    }

    /// The cache's id, which images name.
    pub fn id(&self) -> CacheId {
        self.id
    }

    /// The name of its storage, for messages.
    pub fn name(&self) -> &str {
        self.storage.name()
    }

    /// Why the cache has stopped; none while it works.
    pub fn failure(&self) -> Option<Error> {
        self.stop.why()
    }

    /// What it wrote to flash for itself.
    pub fn counts(&self) -> CacheCounts {
        *lock(&self.counts)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, format!("{}: the flash cache is closed", self.name())));
        }
        Ok(())
    }

    /// Bytes have reached slots. To be counted before what they are for is published.
    pub(crate) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    // A commit.

    /// Makes durable what was written to the cache before the call.
    pub(crate) async fn commit(&self) -> Result<()> {
        let abandoned = || {
            let error = Error::new(ErrorKind::Poisoned, "interrupted");
            Some(self.stop.stop(error, format!("{}: a commit was dropped half way", self.name())))
        };
        self.commits.share(async || self.lead().await, abandoned).await
    }

    /// As above, with what only saves work later.
    pub(crate) async fn commit_all(&self) -> Result<()> {
        self.state().make_urgent();
        self.commit().await
    }

    /// Makes durable what all disks were written, and what only saves work later.
    ///
    /// # Errors
    /// Those of flash; the cache has stopped then.
    pub async fn flush(&self) -> Result<()> {
        self.commit_all().await
    }

    async fn lead(&self) -> Result<()> {
        self.stop.check()?;
        let covers = self.changes.load(Ordering::Acquire);
        let sealed = self.state().seal().map_err(|error| self.stopped(error, "a record has no place"))?;
        let Some(sealed) = sealed else {
            if self.covered.load(Ordering::Acquire) != covers {
                self.flush_flash().await?; // commit point
                self.covered.fetch_max(covers, Ordering::AcqRel);
            }
            return Ok(());
        };
        let written = self.write_record(&sealed).await;
        written.map_err(|error| self.stopped(error, "a record or a slice could not be written"))?;
        self.flush_flash().await?; // commit point
        self.covered.fetch_max(covers, Ordering::AcqRel);
        self.state().settle(&sealed, &self.epochs);
        self.freed.notify(usize::MAX);
        Ok(())
    }

    fn stopped(&self, error: Error, what: &str) -> Error {
        self.stop.stop(error, format!("{}: {what}", self.name()))
    }

    /// The record, and slices whose own record is durable.
    async fn write_record(&self, sealed: &Sealed) -> Result<()> {
        let bytes = Buffer::copy_of(&sealed.record.encode());
        {
            let mut counts = lock(&self.counts);
            counts.records += 1;
            counts.record_bytes += bytes.len() as u64;
        }
        let at = self.layout.ring().start() + sealed.at;
        let record = self.storage.write(at, bytes);
        let slices = async {
            for some in sealed.slices.chunks(SLICES_AT_ONCE) {
                let writes = some.iter().map(|(slice, place)| {
                    let bytes = Buffer::copy_of(&slice.encode(u128::from_be_bytes(self.id.bytes())));
                    let mut counts = lock(&self.counts);
                    counts.slices += 1;
                    counts.slice_bytes += bytes.len() as u64;
                    self.storage.write(self.layout.slice_at(slice.number, *place), bytes)
                });
                try_join_all(writes).await?;
            }
            Ok::<_, Error>(())
        };
        let (record, slices) = zip(record, slices).await;
        record.and(slices)
    }

    async fn flush_flash(&self) -> Result<()> {
        lock(&self.counts).flushes += 1;
        self.storage.flush().await.map_err(|error| self.stopped(error, "a flush of flash failed"))
    }

    // Room.

    /// Gets room in the slice of a part: clean blocks leave it, or blocks of it go home.
    pub(crate) async fn make_part_room(&self, part: u32) -> Result<()> {
        self.stop.check()?;
        let dirty = self.state().empty_part(part);
        let Some(key) = dirty else { return Ok(()) };
        if self.state().room_for(Share::Evict) < 16 {
            return self.commit_all().await;
        }
        let home = lock(&self.disks).get(&key.row()).and_then(Weak::upgrade);
        let written = match home {
            Some(home) => home.write_back_from(key.block()).await?,
            None => 0,
        };
        if written == 0 { Err(part_is_full(self.name())) } else { Ok(()) }
    }

    /// The disk is closed.
    pub(crate) fn forget_home(&self, home: &Home) {
        let mut disks = lock(&self.disks);
        if disks.get(&home.row).is_some_and(|known| std::ptr::eq(known.as_ptr(), home)) {
            disks.remove(&home.row);
            lock(&self.rooms).remove(&home.row);
        }
    }

    /// The disks that are open.
    pub(crate) fn homes(&self) -> Vec<Arc<Home>> {
        lock(&self.disks).values().filter_map(Weak::upgrade).collect()
    }

    // Slots.

    pub(crate) fn slot_at(&self, slot: Slot) -> ImageOffset {
        self.layout.slot_at(slot)
    }

    /// Writes whole or partial slots: neighbours in one write. `parts` are in the order of their places.
    pub(crate) async fn write_slots(&self, parts: Vec<(ImageOffset, Buffer)>) -> Result<()> {
        let under_way = self.stop.under_way("a write to a slot");
        let mut writes: Vec<LocalFuture<'_, Result<()>>> = Vec::new();
        let mut parts = parts.into_iter().peekable();
        while let Some((at, mut data)) = parts.next() {
            while let Some((_, next)) = parts.next_if(|(next, _)| *next == at + data.len() as u64) {
                data.append(next);
            }
            writes.push(self.storage.write(at, data));
        }
        let written = try_join_all(writes).await;
        under_way.end();
        written.context(|| format!("{}: can't write to flash", self.name())).map(drop)
    }

    /// Commits, and writes nothing more. The disks are closed before.
    ///
    /// # Errors
    /// `Invalid` while a disk is open; those of the storage.
    pub async fn close(&self) -> Result<()> {
        if let Some(home) = self.homes().iter().find(|home| home.is_open()) {
            let why = format!("{}: disk {} is still open", self.name(), home.row);
            return Err(Error::invalid(why));
        }
        if self.is_closed.load(Ordering::Acquire) {
            return Ok(());
        }
        self.commit_all().await?;
        self.is_closed.store(true, Ordering::Release);
        Ok(())
    }
}
