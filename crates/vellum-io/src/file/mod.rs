//! Regular files and block devices as [`Storage`].
//!
//! ```text
//!   File ── read, write ──▶ transfer   one run of bytes, continued until it is complete
//!              │  O_DIRECT ─▶ direct   whole blocks past the page cache; what is no whole block, another way
//!        ── write_zeroes, discard, preallocate ──▶ space   what fallocate can do, and zeros where it cannot
//!        ── reconcile ──▶ reconcile   what the page cache shows, and a failed flush has not written
//!        ── flush, set_len, runs                ──▶ here
//!   Draft ─ begin, publish ──▶ draft   a file that gets its name when it is whole
//! ```
//!
//! A file belongs to no worker: any of them may use it, and each request goes through the driver of the
//! worker that first polls it.
//!
//! 1. The [`Storage`] contract holds; its suite runs on every kind of file that this module opens.
//! 2. After a failed flush every change fails with `Poisoned`, even if the future of that flush was dropped.
//! 3. Only regular files and block devices are opened, and opening never blocks on what a path leads to.
//! 4. A file that is opened as one that is never flushed makes no promise to a crash of the machine, and no system call that
//!    would keep one. Nothing is opened in this way but a new copy that the user wants so, and one that has no name yet and is
//!    flushed before it gets it.
//!
//! Left out: mapping files into memory; `copy_file_range` and reflinks.

mod direct;
mod draft;
mod facts;
pub(crate) mod gate;
pub(crate) mod handle;
mod lock;
mod open;
mod reconcile;
mod space;
mod transfer;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::fs::{SeekFrom, Stat};
use rustix::io::Errno;
use vellum_core::pin::Proof;
use vellum_core::{
    Buffer, Error, ErrorKind, ImageOffset, ImageSpan, Limits, LocalFuture, Result, Storage, StorageRun,
    Zeroes,
};

pub use draft::Draft;
pub use lock::LockMode;
pub use open::OpenOptions;

use crate::blocking::unblock_on;
use crate::driver::op::Op;
use crate::driver::{submit, why_given_up};
use direct::Direct;
use gate::Passage;
use handle::Handle;
use space::Abilities;

/// How many runs one answer has at most.
const RUNS_MAX: usize = 4096;

/// The kernel counts positions with a signed number.
const POSITION_MAX: u64 = i64::MAX as u64;

/// An open file or block device.
pub struct File {
    name: String,
    limits: Limits,
    kind: Kind,
    handle: Arc<Handle>,
    /// How to move whole blocks; `None` for a file that goes through the page cache.
    direct: Option<Direct>,
    abilities: Abilities,
    proof: Option<Proof>,
    /// What becomes shorter is an error.
    keeps_len: bool,
    /// A flush does nothing.
    never_flushed: bool,
}

/// What was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Regular,
    Block {
        /// Space is handled in units of this many bytes, also where bytes are not.
        sector: vellum_core::BlockSize,
    },
}

impl File {
    /// What was being done, for an error about a run of this file.
    fn doing(&self, what: &str, at: u64, len: u64) -> String {
        format!("can't {what} {len} bytes at {at:#x} of {}{}", self.name, why_given_up())
    }

    /// Whether a change may be made at all.
    fn check_writable(&self) -> Result<()> {
        if self.limits.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open read-only", self.name)));
        }
        if self.handle.is_poisoned() {
            return Err(Error::new(
                ErrorKind::Poisoned,
                format!(
                    "an earlier flush of {} failed, so its latest writes may be lost; reopen it",
                    self.name
                ),
            ));
        }
        Ok(())
    }

    /// Whether a change of this run may be made.
    fn check_change(&self, span: ImageSpan) -> Result<()> {
        self.check_writable()?;
        let end = span.end().bytes();
        if self.limits.fixed_len && end > self.handle.len() {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{} ends at {:#x}, before {end:#x}", self.name, self.handle.len()),
            ));
        }
        if end > POSITION_MAX {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("{} cannot grow to {end:#x}: no file can be that large", self.name),
            ));
        }
        Ok(())
    }

    async fn sync(&self) -> Result<()> {
        if self.limits.read_only {
            return Ok(());
        }
        self.check_writable()?;
        if self.never_flushed {
            return Ok(());
        }
        let (result, _) = submit(Op::Sync(self.handle.clone())).await;
        match result {
            Ok(_) => Ok(()),
            Err(errno) => Err(Error::os(errno, format!("can't flush {}{}", self.name, why_given_up()))),
        }
    }

    async fn change_len(&self, len: u64) -> Result<()> {
        self.check_writable()?;
        if self.limits.fixed_len {
            return Err(Error::unsupported(format!("the length of {}, a block device, is fixed", self.name)));
        }
        // A partial block must not be written back meanwhile, which would grow the file again.
        let passage = Passage::alone_everywhere(&self.handle).await;
        let handle = self.handle.clone();
        let changed = unblock_on(self.handle.storage().backend, move || {
            let file = handle.descriptor(false);
            let result = retry(|| rustix::fs::ftruncate(file, len));
            if let Ok(facts) = rustix::fs::fstat(file) {
                handle.set_len(u64::try_from(facts.st_size).unwrap_or(0));
            }
            drop(passage);
            result
        });
        changed.await.map_err(|errno| {
            // The kernel's word for "longer than any file".
            let errno = if errno == Errno::INVAL && len > POSITION_MAX { Errno::FBIG } else { errno };
            Error::io(errno.into(), format!("can't set the length of {} to {len}", self.name))
        })
    }

    /// A device may have grown. One that has shrunk fails when it is used. What keeps its length fails once it is shorter.
    async fn ask_for_len(&self) -> Result<u64> {
        self.check_len().await?;
        if matches!(self.kind, Kind::Block { .. }) {
            let handle = self.handle.clone();
            let asked = unblock_on(self.handle.storage().backend, move || {
                let end = retry(|| rustix::fs::seek(handle.descriptor(false), SeekFrom::End(0)));
                end.inspect(|end| handle.note_end(*end))
            });
            let end = asked.await.map_err(|errno| {
                Error::io(errno.into(), format!("can't find out the size of {}", self.name))
            })?;
            if self.keeps_len && end < self.handle.len() {
                self.ended_early().await?;
            }
        }
        Ok(self.handle.len())
    }

    /// What the kernel says of the file now. It notes the time of a change before it changes a byte.
    async fn look(&self) -> Result<Stat> {
        let handle = self.handle.clone();
        let backend = self.handle.storage().backend;
        let looked = unblock_on(backend, move || retry(|| rustix::fs::fstat(handle.descriptor(false))));
        looked.await.map_err(|errno| Error::io(errno.into(), format!("can't look at {}", self.name)))
    }

    async fn prove_now(&self) -> Result<Option<Proof>> {
        if self.proof.is_none() {
            return Ok(None);
        }
        let stat = self.look().await?;
        Ok(facts::proof(&stat, facts::len_of(&stat)))
    }

    /// Whether a file that is only read, or keeps its length, still has all the bytes that it had. What a program cuts
    /// off meanwhile would read as zero.
    async fn check_len(&self) -> Result<()> {
        if !(self.limits.read_only || self.keeps_len) || self.kind != Kind::Regular {
            return Ok(());
        }
        let (was, now) = (self.handle.len(), facts::len_of(&self.look().await?));
        if now >= was {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Changed,
            format!(
                "{} was cut to {now} bytes while it was in use; it had {was}: bring its content back, and open it again",
                self.name
            ),
        ))
    }

    /// What it means that a read has found the end before the known one.
    async fn ended_early(&self) -> Result<()> {
        match self.kind {
            Kind::Regular => self.check_len().await,
            // Nothing writes a device shorter: it was taken away, or exchanged.
            Kind::Block { .. } => Err(Error::new(
                ErrorKind::Changed,
                format!(
                    "{} ends before {} bytes, which it had when it was opened: give it its size again, and open it again",
                    self.name,
                    self.handle.len()
                ),
            )),
        }
    }

    async fn find_runs(&self, span: ImageSpan) -> Result<Vec<StorageRun>> {
        let end = ImageOffset::new(self.handle.len()).max(span.start());
        let span = span.intersect(ImageSpan::between(span.start(), end));
        if span.is_empty() {
            return Ok(Vec::new());
        }
        if self.kind != Kind::Regular {
            return Ok(vec![StorageRun { span, is_data: true }]);
        }
        self.check_len().await?;
        let handle = self.handle.clone();
        let found =
            unblock_on(self.handle.storage().backend, move || seek_runs(handle.descriptor(false), span))
                .await;
        found.map_err(|errno| {
            Error::io(errno.into(), self.doing("find the holes in", span.start().bytes(), span.len()))
        })
    }
}

/// The runs of data and holes. Where the file system cannot report them, everything is data.
fn seek_runs(file: BorrowedFd<'_>, span: ImageSpan) -> Result<Vec<StorageRun>, Errno> {
    let mut runs = Vec::new();
    let mut at = span.start();
    while at < span.end() && runs.len() < RUNS_MAX {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at.bytes())) {
            Ok(data) => ImageOffset::new(data),
            // No data from here on.
            Err(Errno::NXIO) => span.end(),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
            Err(errno) => return Err(errno),
        };
        let data = data.max(at).min(span.end());
        if data > at {
            runs.push(StorageRun { span: ImageSpan::between(at, data), is_data: false });
            at = data;
            continue;
        }
        let hole = match rustix::fs::seek(file, SeekFrom::Hole(at.bytes())) {
            Ok(hole) => ImageOffset::new(hole),
            Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => span.end(),
            Err(errno) => return Err(errno),
        };
        // A hole right here would contradict the last answer, unless the file changes concurrently: then it
        // counts as data.
        let hole = if hole <= at { span.end() } else { hole.min(span.end()) };
        runs.push(StorageRun { span: ImageSpan::between(at, hole), is_data: true });
        at = hole;
    }
    Ok(runs)
}

/// Calls again as long as the call is interrupted.
fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

impl Storage for File {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.handle.len()
    }

    fn proof(&self) -> Option<Proof> {
        self.proof.clone()
    }

    fn proof_now(&self) -> LocalFuture<'_, Result<Option<Proof>>> {
        Box::pin(self.prove_now())
    }

    fn changed_at(&self) -> LocalFuture<'_, Result<Option<i128>>> {
        Box::pin(async move {
            match self.kind {
                Kind::Regular => Ok(Some(facts::changed_at(&self.look().await?))),
                Kind::Block { .. } => Ok(None),
            }
        })
    }

    fn look_at_len(&self) -> LocalFuture<'_, Result<u64>> {
        Box::pin(self.ask_for_len())
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        match &self.direct {
            None => Box::pin(self.read_run(at.bytes(), buffer)),
            Some(direct) => Box::pin(self.read_direct(direct, at.bytes(), buffer)),
        }
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        match &self.direct {
            None => Box::pin(self.write_run(at.bytes(), data)),
            Some(direct) => Box::pin(self.write_direct(direct, at.bytes(), data)),
        }
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.sync())
    }

    fn reconcile(&self, span: ImageSpan) -> LocalFuture<'_, Result<bool>> {
        Box::pin(self.reconcile_run(span))
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.zero(span, how))
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.give_back(span))
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.change_len(len))
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.reserve(span))
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        Box::pin(self.find_runs(span))
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.descriptor(false)
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "File({}, {:?}, {:?})", self.name, self.kind, self.limits)
    }
}
