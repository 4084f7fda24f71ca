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
use crate::state::{Limits, Sealed, State};
use crate::stop::Stop;

/// At most this many slices are in flight at once.
const SLICES_AT_ONCE: usize = 16;

impl FlashCache {
    pub(crate) fn with(
        storage: SharedStorage,
        id: CacheId,
        mut state: State,
        options: FlashOptions,
        limits: Limits,
    ) -> Result<Arc<Self>> {
        state.limit_memory(limits).context(|| storage.name().to_owned())?;
        let clock: Option<Arc<dyn Clock>> = options.clock.clone();
        let random = Mutex::new(options.chance.clone());
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            storage,
            id,
            layout: state.layout,
            windows: state.windows.clone(),
            reserves: Mutex::default(),
            wanted: Mutex::default(),
            has_tasks: AtomicBool::new(false),
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
            is_cut: AtomicBool::new(false),
            looked: Mutex::default(),
            publishing: async_lock::Mutex::new(()),
            fetched_bytes: AtomicU64::new(0),
            has_offers: AtomicBool::new(false),
            offered: Event::new(),
            pace: Mutex::default(),
            trims: Mutex::default(),
        }))
    }

    /// The cache's id, which images name.
    pub fn id(&self) -> CacheId {
        self.id
    }

    /// The name of its storage, for messages.
    pub fn name(&self) -> &str {
        self.storage.name()
    }

    /// What proves its storage.
    pub fn proof(&self) -> Option<vellum_core::pin::Proof> {
        self.storage.proof()
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

    /// Gets room in the slice of a part: clean blocks leave it, or blocks of it go home: the disk's own, or those of others that
    /// are not in trouble. Where the background gives each disk a task of its own, theirs write them home, and the first of
    /// them that is done ends the wait: a home that does not answer is waited for only where there is no other.
    pub(crate) async fn make_part_room(&self, own: &Home, part: u32) -> Result<()> {
        self.stop.check()?;
        let listener = self.freed.listen();
        let mut dirty = self.state().empty_part(part);
        if dirty.is_empty() {
            return Ok(());
        }
        if self.state().room_for(Share::Evict) < 16 {
            return self.commit_all().await;
        }
        dirty.sort_by_key(|key| key.row() != own.row);
        let mut is_busy = false;
        for key in dirty {
            if key.row() == own.row {
                return match own.write_back_from(key.block()).await? {
                    0 => Err(part_is_full(self.name())),
                    _ => Ok(()),
                };
            }
            let Some(home) = lock(&self.disks).get(&key.row()).and_then(Weak::upgrade) else { continue };
            if lock(&home.trouble).is_some() {
                continue;
            }
            let is_free = home.writing_back.try_lock().is_some();
            if !is_free || self.has_tasks.load(Ordering::Relaxed) {
                is_busy = true;
                lock(&self.wanted).insert(key.row(), key.block());
                continue;
            }
            // Its error is its own: the next look passes it over.
            let written = home.write_back_from(key.block()).await;
            return match home.noting(written) {
                Ok(0) => Err(part_is_full(self.name())),
                _ => Ok(()),
            };
        }
        if !is_busy {
            return Err(part_is_full(self.name()));
        }
        listener.await;
        Ok(())
    }

    /// The disk is closed.
    pub(crate) fn forget_home(&self, home: &Home) {
        let mut disks = lock(&self.disks);
        if disks.get(&home.row).is_some_and(|known| std::ptr::eq(known.as_ptr(), home)) {
            disks.remove(&home.row);
            lock(&self.rooms).remove(&home.row);
            self.set_reserve(home.row, false);
            lock(&self.wanted).remove(&home.row);
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

    /// Reads from slots. What of them is gone does not read as zeros.
    pub(crate) async fn read_slots(&self, at: ImageOffset, buffer: Buffer) -> Result<Buffer> {
        if self.is_cut.load(Ordering::Acquire) {
            return Err(self.cut());
        }
        let read = self.storage.read(at, buffer).await;
        read.map_err(|error| if error.kind() == ErrorKind::Changed { self.note_cut(error) } else { error })
    }

    fn cut(&self) -> Error {
        let why = format!("{}: part of the flash cache was cut off while it was in use", self.name());
        Error::new(ErrorKind::Changed, why)
    }

    fn note_cut(&self, error: Error) -> Error {
        self.is_cut.store(true, Ordering::Release);
        self.stop.stop(error, format!("{}: part of the flash cache was cut off", self.name()))
    }

    /// Fails once the storage is shorter than it was, and stops the cache. The file is longer than what is written of it
    /// ([`FlashCache::keep_witness`]), so what was cut off does not come back by later writes.
    pub(crate) async fn check_whole(&self) -> Result<()> {
        if self.is_cut.load(Ordering::Acquire) {
            return Err(self.cut());
        }
        match self.storage.look_at_len().await {
            Ok(len) if len >= self.layout.total_bytes() => Ok(()),
            Ok(_) => Err(self.note_cut(self.cut())),
            Err(error) if error.kind() == ErrorKind::Changed => Err(self.note_cut(error)),
            Err(error) => Err(error),
        }
    }

    /// Makes a file longer than what is ever written of it: then its length shows for good that it was cut, also where
    /// slots were written behind the cut since. To be called before anything is written, so that a cache with a record had it.
    ///
    /// # Errors
    /// `Corrupt` for a cache that was used and has it no more: what was cut off would read as zeros. Those of the storage.
    pub async fn keep_witness(&self) -> Result<()> {
        let (len, wanted) = (self.storage.len(), self.layout.total_bytes() + crate::layout::BLOCK_BYTES);
        if self.storage.limits().fixed_len || len >= wanted {
            return Ok(());
        }
        if self.state().was_used() {
            let why = format!(
                "{} was cut off while it was in use: it has {len} bytes, and had {wanted}. What was cut off is lost: `vellum flash \
                 forget IMAGE` for the images that it has writes of, and make it anew (`vellum flash create --force`)",
                self.name()
            );
            return Err(Error::corrupt(why));
        }
        self.storage.set_len(wanted).await
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

    /// Whether nothing is written to it any more: it was closed, or a change of its size has come so far that it may have its new
    /// size.
    pub fn is_decided(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
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
