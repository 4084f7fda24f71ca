//! A disk over its home: what a guest, or an image above, is served.
//!
//! ```text
//!   read    ─► epoch ─► look up ─► slots, zeros, home: each run in one transfer
//!   write   ─► promise ─► claim ─► plan ─► slots ─► publish                                write.rs
//!           ─► region ─► join ─► plan ─► home and slots ─► publish                         through.rs
//!   zeroes  ─► whole blocks: a run ─► publish; the rest is written as data                 write.rs
//!   flush   ─► commit of the cache
//!   home    ◄─ write-back                                                                  home.rs
//! ```
//!
//! 1. A read enters an epoch before it looks a slot up, and leaves it after the transfer.
//! 2. A slot that cannot be read: where home has the same, home is read; else the read fails.
//! 3. Before the first change of an opening the session's number is durable in the row, and then in the image.
//! 4. A change is refused once the cache has stopped, unless home is always complete (writethrough). Reads go on.

mod begin;
mod masked;
mod named;
mod read;
mod through;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vellum_core::{
    Buffer, Disk, Error, ErrorKind, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan, LocalFuture,
    Losses, Result, Room, SharedDisk, WriteFlags, ZeroFlags, lock,
};

use crate::options::FlashPolicy;
use crate::shared::Home;

/// What a disk did with its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FlashCounts {
    /// Blocks that were read from flash, or known to be zero.
    pub hits: u64,
    /// Blocks that were read from home.
    pub misses: u64,
    /// Blocks that were written.
    pub writes: u64,
    /// Blocks that were read and got slots.
    pub admitted: u64,
    /// Blocks that were read and got none: they had changed, or there was no room.
    pub refused: u64,
    /// Blocks that were given up before others because a disk above has its own.
    pub demoted: u64,
    /// Blocks that were written home.
    pub written_home: u64,
    /// Bytes that writes of guests brought to slots.
    pub slot_writes: u64,
    /// Bytes that reads brought to slots.
    pub admit_writes: u64,
    /// Transfers of slots, and to home, that failed.
    pub errors: u64,
    /// Blocks that were written through, and are not cached: another wrote them too, or there was no room.
    pub passed: u64,
}

impl std::ops::AddAssign for FlashCounts {
    fn add_assign(&mut self, other: Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.writes += other.writes;
        self.admitted += other.admitted;
        self.refused += other.refused;
        self.demoted += other.demoted;
        self.written_home += other.written_home;
        self.slot_writes += other.slot_writes;
        self.admit_writes += other.admit_writes;
        self.errors += other.errors;
        self.passed += other.passed;
    }
}

impl std::iter::Sum for FlashCounts {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum += one;
            sum
        })
    }
}

/// Adds to a number that is only looked at.
pub(crate) fn count(number: &AtomicU64, more: u64) {
    number.fetch_add(more, Ordering::Relaxed);
}

impl Home {
    pub(crate) fn policy(&self) -> FlashPolicy {
        *lock(&self.policy)
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.is_closed.load(Ordering::Acquire)
    }

    pub(crate) fn size(&self) -> u64 {
        self.disk.geometry().size
    }

    fn check(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        if !self.is_open() {
            return Err(Error::new(ErrorKind::Closed, "the disk is closed"));
        }
        let span = span.ok_or_else(|| Error::invalid("the request exceeds 2^64"))?;
        let size = self.size();
        if span.end().bytes() > size {
            return Err(Error::invalid(format!(
                "the request {span} extends past the end of the disk at {size:#x}"
            )));
        }
        Ok(span)
    }

    fn check_change(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        let span = self.check(span)?;
        if self.disk.geometry().read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "the disk is open read-only"));
        }
        if self.policy() != FlashPolicy::WriteThrough {
            self.cache.stop.check()?;
        }
        Ok(span)
    }

    /// Commits what the disk was written, and flushes home where something was written past the cache.
    async fn flush(&self) -> Result<()> {
        self.check(Some(GuestOffset::ZERO.span(0)))?;
        match self.policy() {
            FlashPolicy::WriteBack => {
                self.cache.stop.check()?;
                if self.wants_flush.swap(false, Ordering::AcqRel) {
                    self.disk.flush().await?;
                }
                self.cache.commit().await
            }
            FlashPolicy::WriteThrough => self.flush_through().await,
            FlashPolicy::ReadOnly | FlashPolicy::Off if self.drawn.is_some() => self.flush_through().await,
            FlashPolicy::ReadOnly | FlashPolicy::Off => self.disk.flush().await,
        }
    }

    async fn close(&self) -> Result<()> {
        if !self.is_open() {
            return Ok(());
        }
        // An image that lacks nothing is complete, and says so.
        let is_kept = self.keeps_at_close.load(Ordering::Acquire) && self.cache.state().is_dirty(self.row);
        let flash = async {
            if self.disk.geometry().read_only {
                return Ok(());
            }
            if self.policy() == FlashPolicy::WriteThrough {
                return match self.end_through().await {
                    // Flash has failed just now: home is complete, and names no session any more.
                    Err(_) if self.cache.failure().is_some() => self.end_through().await,
                    ended => ended,
                };
            }
            if self.cache.failure().is_some() && !self.may_be_behind() {
                // Before home was first changed past the cache, the image ceased to name a session.
                return Ok(());
            }
            if is_kept {
                self.cache.commit().await?;
                return self.keep_session().await;
            }
            self.drain().await?;
            self.end_session().await?;
            self.cache.commit_all().await
        };
        let flash = flash.await;
        self.is_closed.store(true, Ordering::Release);
        // No step of the background begins any more, and the one that is under way has the row and the image until it ends.
        *self.tending.lock().await = true;
        drop(std::mem::take(&mut *lock(&self.below)));
        self.cache.forget_home(self);
        let home = self.disk.close().await;
        self.has_ended_well.store(flash.is_ok() && home.is_ok(), Ordering::Release);
        flash.and(home)
    }
}

/// A disk whose blocks are on flash and at home.
pub struct FlashDisk {
    pub(crate) home: Arc<Home>,
}

impl FlashDisk {
    /// Writes home what was dirty when it was called, flushed. Requests may go on meanwhile; what they write stays.
    ///
    /// # Errors
    /// Those of flash and of home.
    pub async fn drain(&self) -> Result<()> {
        self.home.drain().await
    }

    /// Drains, and takes the mark off the image: it is complete, as after a close. No request is under way meanwhile;
    /// the next change begins a new session.
    ///
    /// # Errors
    /// Those of flash and of home.
    pub async fn settle(&self) -> Result<()> {
        self.home.drain().await?;
        self.home.end_session().await
    }

    /// What is done for this disk.
    pub fn policy(&self) -> FlashPolicy {
        self.home.policy()
    }

    /// Does something else from now on. A disk leaves write-back by draining; no request changes it meanwhile.
    ///
    /// # Errors
    /// `Unsupported` for what this disk cannot have; those of the draining.
    pub async fn set_policy(&self, policy: FlashPolicy) -> Result<()> {
        self.home.set_policy(policy).await
    }

    /// What it did with its requests.
    pub fn counts(&self) -> FlashCounts {
        let tally = &self.home.tally;
        let of = |number: &AtomicU64| number.load(Ordering::Relaxed);
        FlashCounts {
            hits: of(&tally.hits),
            misses: of(&tally.misses),
            writes: of(&tally.writes),
            admitted: of(&tally.admitted),
            refused: of(&tally.refused),
            demoted: of(&tally.demoted),
            written_home: of(&tally.written_home),
            slot_writes: of(&tally.slot_writes),
            admit_writes: of(&tally.admit_writes),
            errors: of(&tally.errors),
            passed: of(&tally.passed),
        }
    }

    /// Why the background could not write home the last time that it tried; none when it could.
    pub fn trouble(&self) -> Option<Error> {
        lock(&self.home.trouble).clone()
    }

    /// Whether a close leaves dirty blocks on flash, and the image marked.
    pub fn keep_at_close(&self, keeps: bool) {
        self.home.keeps_at_close.store(keeps, Ordering::Release);
    }

    /// Blocks that home may have older. Runs of zeros count as their blocks.
    pub fn dirty_blocks(&self) -> u64 {
        let state = self.home.cache.state();
        let zeros: u64 = state.runs_of(self.home.row).map(|run| run.blocks).sum();
        state.counts(self.home.row).dirty + zeros
    }

    /// The same disk for a reader whose bytes are not worth keeping: a fill copies them to an image.
    pub fn unadmitting(&self) -> SharedDisk {
        Arc::new(Unadmitting { home: self.home.clone() })
    }
}

impl Disk for FlashDisk {
    fn geometry(&self) -> Geometry {
        self.home.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.home.disk.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(self.home.read(at, buffer, true))
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.home.write(at, data, flags))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.home.flush())
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.home.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.home.discard(span, flags))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(self.home.map(span))
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        self.home.disk.tend(now)
    }

    fn filling(&self) -> Option<Filling> {
        self.home.disk.filling()
    }

    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        Box::pin(async move {
            self.home.check(GuestSpan::checked(at, data.len() as u64))?;
            let filled = self.home.disk.fill(at, data).await?;
            if filled.wants_flush {
                self.home.wants_flush.store(true, Ordering::Release);
            }
            Ok(filled)
        })
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        self.home.disk.room()
    }

    fn losses(&self) -> Option<Arc<Losses>> {
        self.home.disk.losses()
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.home.close())
    }
}

/// The same disk, only read, and nothing of it is admitted.
struct Unadmitting {
    home: Arc<Home>,
}

impl Disk for Unadmitting {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, ..self.home.geometry() }
    }

    fn below(&self) -> Option<SharedDisk> {
        self.home.disk.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(self.home.read(at, buffer, false))
    }

    fn write(&self, _at: GuestOffset, _data: Buffer, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        refused()
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn write_zeroes(&self, _span: GuestSpan, _flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        refused()
    }

    fn discard(&self, _span: GuestSpan, _flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        refused()
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(self.home.map(span))
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

fn refused() -> LocalFuture<'static, Result<()>> {
    Box::pin(std::future::ready(Err(Error::new(ErrorKind::ReadOnly, "the disk is only read here"))))
}

impl Home {
    fn geometry(&self) -> Geometry {
        let home = self.disk.geometry();
        match self.policy() {
            FlashPolicy::WriteBack => Geometry { fast_zeroes: !home.read_only, ..home },
            _ => home,
        }
    }
}
