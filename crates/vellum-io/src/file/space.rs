//! Zeros, holes and reservations: what the host does without moving bytes, and the fallbacks where it cannot.
//!
//! | asked for | regular file | block device |
//! |---|---|---|
//! | zeros that stay allocated | `ZERO_RANGE`; else punch and reserve; else write zeros | `ZERO_RANGE`; else write zeros |
//! | zeros that may be a hole | `PUNCH_HOLE`; else write zeros | `PUNCH_HOLE`; else `ZERO_RANGE`; else write zeros |
//! | discard | `PUNCH_HOLE` of whole pages | `PUNCH_HOLE` of whole sectors; else, if allowed, `BLKDISCARD` |
//! | reserve | `fallocate` | nothing to do |
//!
//! On a block device `PUNCH_HOLE` is the kernel's "write zeroes, and unmap if you can": the sectors read as
//! zero afterwards. `BLKDISCARD` promises nothing about what they read as, which the contract does not allow;
//! so it is used only where the user vouches for the drive ([`OpenOptions::trim`](super::OpenOptions::trim)).
//!
//! 1. A call that the host has reported as unsupported is not tried again.
//! 2. A file grows here as by a write: by writing its last byte, never by setting its length, which could
//!    truncate what another request has just written behind it.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::fs::FallocateFlags;
use vellum_core::{BlockSize, Buffer, Error, ErrorKind, ImageOffset, ImageSpan, Result, Storage, Zeroes};

use super::gate::Passage;
use super::handle::Handle;
use super::{File, Kind};
use crate::blocking::unblock_on;
use crate::driver::op::{Allocation, Op};
use crate::driver::submit;

/// How many zeros are written at once.
const ZEROS_MAX: usize = 1 << 20;

const ZERO: FallocateFlags = FallocateFlags::ZERO_RANGE;
const ZERO_INSIDE: FallocateFlags = FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE);
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
const RESERVE: FallocateFlags = FallocateFlags::empty();

/// What the host has not yet reported as unsupported.
pub(super) struct Abilities {
    punch: AtomicBool,
    zero: AtomicBool,
    reserve: AtomicBool,
    trim: AtomicBool,
}

impl Abilities {
    /// Everything; `BLKDISCARD` only if allowed.
    pub(super) fn hoped_for(trim: bool) -> Self {
        let yes = || AtomicBool::new(true);
        Self { punch: yes(), zero: yes(), reserve: yes(), trim: AtomicBool::new(trim) }
    }

    fn of(&self, mode: FallocateFlags) -> &AtomicBool {
        if mode.contains(FallocateFlags::PUNCH_HOLE) {
            &self.punch
        } else if mode.contains(FallocateFlags::ZERO_RANGE) {
            &self.zero
        } else {
            &self.reserve
        }
    }
}

impl File {
    /// Makes the run read as zero.
    pub(super) async fn zero(&self, span: ImageSpan, how: Zeroes) -> Result<()> {
        self.check_change(span)?;
        if span.is_empty() {
            return Ok(());
        }
        let what = "zero";
        match (self.kind, how) {
            (Kind::Regular, Zeroes::MayUnmap) => {
                if !self.allocate(PUNCH, span, what).await? {
                    return self.write_zeros(span).await;
                }
                if span.end().bytes() > self.handle.len() {
                    let last = ImageOffset::new(span.end().bytes() - 1);
                    return self.write(last, Buffer::zeroed(1)).await;
                }
                Ok(())
            }
            (Kind::Regular, Zeroes::Allocated) => {
                if self.allocate(ZERO, span, what).await? {
                    return Ok(());
                }
                if self.allocate(PUNCH, span, what).await? && self.allocate(RESERVE, span, what).await? {
                    return Ok(());
                }
                self.write_zeros(span).await
            }
            (Kind::Block { sector }, how) => {
                let body = sector.narrow(span);
                if body.is_empty() {
                    return self.write_zeros(span).await;
                }
                let unmapped = how == Zeroes::MayUnmap && self.allocate(PUNCH, body, what).await?;
                if !unmapped && !self.allocate(ZERO_INSIDE, body, what).await? {
                    self.write_zeros(body).await?;
                }
                self.write_zeros(ImageSpan::between(span.start(), body.start())).await?;
                self.write_zeros(ImageSpan::between(body.end(), span.end())).await
            }
        }
    }

    /// Frees the run's space on the host, as far as possible.
    pub(super) async fn give_back(&self, span: ImageSpan) -> Result<()> {
        self.check_writable()?;
        let len = self.handle.len();
        let unit = match self.kind {
            Kind::Regular => BlockSize::PAGE,
            Kind::Block { sector } => sector,
        };
        // The last page goes with the rest, though the file ends inside of it. Parts of others stay: freeing
        // nothing, they would only cost the host writes.
        let reaches_end = span.end().bytes() >= len && span.start().bytes() < len;
        let end = if reaches_end { ImageOffset::new(unit.round_up(len)) } else { span.end() };
        let span = unit.narrow(ImageSpan::between(span.start(), end.max(span.start())));
        let is_inside = span.start().bytes() < len && (!self.limits.fixed_len || span.end().bytes() <= len);
        if span.is_empty() || !is_inside {
            return Ok(());
        }
        if !self.allocate(PUNCH, span, "discard").await? && matches!(self.kind, Kind::Block { .. }) {
            self.trim(span).await?;
        }
        Ok(())
    }

    /// Reserves space for the run.
    pub(super) async fn reserve(&self, span: ImageSpan) -> Result<()> {
        self.check_change(span)?;
        if span.is_empty() || self.limits.fixed_len {
            return Ok(());
        }
        if self.allocate(RESERVE, span, "reserve").await? {
            return Ok(());
        }
        Err(Error::unsupported(format!("the file system of {} can't reserve space", self.name)))
    }

    /// Asks the host; false when it cannot do such a thing.
    async fn allocate(&self, mode: FallocateFlags, span: ImageSpan, what: &str) -> Result<bool> {
        let able = self.abilities.of(mode);
        let (at, len) = (span.start().bytes(), span.len());
        // Together with the whole-block writes of others: a read-modify-write must not write back blocks that
        // are being freed.
        let mut passage = Passage::shared(&self.handle, at, len).await;
        loop {
            if !able.load(Relaxed) {
                return Ok(false);
            }
            let allocation = Allocation { file: self.handle.clone(), mode, at, len, passage };
            let (result, op) = submit(Op::Allocate(allocation)).await;
            let Op::Allocate(allocation) = op else {
                unreachable!("an operation comes back as it was given")
            };
            passage = allocation.passage;
            match result {
                Ok(_) => return Ok(true),
                Err(libc::EINTR | libc::EAGAIN) => {}
                Err(libc::EOPNOTSUPP | libc::ENOSYS) => able.store(false, Relaxed),
                Err(errno) => return Err(Error::os(errno, self.doing(what, at, len))),
            }
        }
    }

    async fn write_zeros(&self, span: ImageSpan) -> Result<()> {
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = rest.split_between_blocks(ZEROS_MAX as u64);
            let len = usize::try_from(now.len()).expect("at most ZEROS_MAX");
            self.write(now.start(), Buffer::zeroed(len)).await?;
            rest = later;
        }
        Ok(())
    }

    async fn trim(&self, span: ImageSpan) -> Result<()> {
        if !self.abilities.trim.load(Relaxed) {
            return Ok(());
        }
        let passage = Passage::shared(&self.handle, span.start().bytes(), span.len()).await;
        let handle = self.handle.clone();
        let trimmed = unblock_on(self.handle.storage().backend, move || {
            let result = discard_sectors(&handle, span);
            drop(passage);
            result
        });
        match trimmed.await {
            Ok(()) => Ok(()),
            Err(error) if ErrorKind::of_io(&error) == ErrorKind::Unsupported => {
                self.abilities.trim.store(false, Relaxed);
                Ok(())
            }
            Err(error) => Err(Error::io(error, self.doing("discard", span.start().bytes(), span.len()))),
        }
    }
}

fn discard_sectors(handle: &Arc<Handle>, span: ImageSpan) -> std::io::Result<()> {
    /// `_IO(0x12, 119)`, which the `libc` crate does not have.
    const BLKDISCARD: libc::c_ulong = 0x1277;
    let range = [span.start().bytes(), span.len()];
    let file = handle.descriptor(false).as_raw_fd();
    // SAFETY: the call reads two 64-bit numbers, which `range` holds, and changes no memory of ours.
    let result = unsafe { libc::ioctl(file, BLKDISCARD as _, range.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{IoMode, LockMode, OpenOptions, run};
    use std::cell::Cell;
    use std::path::PathBuf;
    use vellum_core::contract::{StorageFixture, storage};
    use vellum_core::{LocalFuture, SharedStorage};

    /// Files on a host that can only move bytes.
    struct Unable {
        path: PathBuf,
        count: Cell<u32>,
    }

    impl Unable {
        fn path(&self) -> PathBuf {
            self.path.with_extension(self.count.get().to_string())
        }

        async fn open(&self, create: bool) -> Result<SharedStorage> {
            let options = OpenOptions::writing().lock(LockMode::None);
            let file = match create {
                true => File::create_new(self.path(), options).await?,
                false => File::open(self.path(), options).await?,
            };
            for ability in [&file.abilities.punch, &file.abilities.zero, &file.abilities.reserve] {
                ability.store(false, Relaxed);
            }
            Ok(file)
        }
    }

    impl StorageFixture for Unable {
        fn fresh(&self, len: u64) -> LocalFuture<'_, Result<SharedStorage>> {
            Box::pin(async move {
                drop(std::fs::remove_file(self.path()));
                self.count.set(self.count.get() + 1);
                let file = self.open(true).await?;
                file.set_len(len).await?;
                Ok(file)
            })
        }

        fn reopen(&self) -> LocalFuture<'_, Result<SharedStorage>> {
            Box::pin(self.open(false))
        }
    }

    #[test]
    fn a_host_that_can_do_nothing_is_done_without() {
        let name = format!("vellum-io-unable-{}", std::process::id());
        let fixture = Unable { path: std::env::temp_dir().join(name), count: Cell::new(0) };
        run(IoMode::Auto, async || {
            storage(&fixture).await;
            let file = fixture.fresh(0).await.expect("a file");
            let error = file.preallocate(ImageOffset::ZERO.span(4096)).await.expect_err("it can't reserve");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
        })
        .expect("a worker");
        std::fs::remove_file(fixture.path()).expect("the last file");
    }
}
