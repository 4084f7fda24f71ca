//! Pages that the page cache shows but the medium may not have.
//!
//! When Linux cannot write a page back, it reports that to one flush of each open file, marks the page clean
//! and keeps it (ext4, XFS and block devices; btrfs and NFS mostly drop it). From then on the page can be
//! read but is on no medium, and no flush fails because of it. It vanishes when the cache needs the memory.
//!
//! ```text
//!   POSIX_FADV_DONTNEED ──▶ clean pages are gone: reads ask the medium
//!         │ is anything left?      cachestat (Linux 6.5): how much; mincore: which pages
//!         ▼
//!   nothing ─▶ done          some ─▶ read and written again: dirty, so that the next flush writes them, or fails
//! ```
//!
//! 1. A page that is already dirty is safe: the next flush writes it or fails. It may be written once more.
//! 2. A page that stays although it is clean is in use (mapped, or in transfer). It is made dirty.
//! 3. A file that is transferred with O_DIRECT needs the first step only, for its last, partial block.
//! 4. File systems in memory have no medium, and lose nothing.
//! 5. `cachestat` inspects the file itself, which on overlayfs holds no pages; there only `mincore` knows.
//!
//! Without `cachestat` each page of data is queried, at some 20 ns. The *length* of a file is trusted: file
//! systems misreport it only where they could not allocate a block during write-back.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;

use rustix::fs::{Advice, FsWord, fadvise};
use rustix::io::Errno;
use vellum_core::{BlockSize, Error, ImageOffset, ImageSpan, Result};

use super::handle::Handle;
use super::{File, Kind, retry, seek_runs};
use crate::blocking::unblock_on;

/// How much is queried, and mapped, at once.
const WINDOW: BlockSize = BlockSize::from_shift(30);
/// A page that is in use right now may be released a moment later.
const TRIES: usize = 3;

const IN_MEMORY: [FsWord; 3] = [0x0102_1994, 0x8584_58F6, 0x9584_58F6]; // tmpfs, ramfs, hugetlbfs
const OVERLAY: FsWord = 0x794C_7630;

impl File {
    /// As [`Storage::reconcile`](vellum_core::Storage::reconcile).
    pub(super) async fn reconcile_run(&self, span: ImageSpan) -> Result<bool> {
        let end = ImageOffset::new(self.handle.len()).max(span.start());
        let span = span.intersect(ImageSpan::between(span.start(), end));
        if self.limits.read_only || span.is_empty() {
            return Ok(false);
        }
        self.check_writable()?;
        let (handle, is_regular) = (self.handle.clone(), self.kind == Kind::Regular);
        let done =
            unblock_on(self.handle.storage().backend, move || reconcile(&handle, span, is_regular)).await;
        done.map_err(|errno| {
            Error::io(errno.into(), self.doing("find the written parts of", span.start().bytes(), span.len()))
        })
    }
}

/// Tells whether something was written again.
fn reconcile(handle: &Handle, span: ImageSpan, is_regular: bool) -> Result<bool, Errno> {
    let file = handle.descriptor(true);
    let kind = if is_regular { retry(|| rustix::fs::fstatfs(file))?.f_type } else { 0 };
    if IN_MEMORY.contains(&kind) {
        return Ok(false);
    }
    let pages = BlockSize::PAGE.widen(span);
    let mut left = Vec::new();
    for _ in 0..TRIES {
        // A file system that takes no advice keeps its pages; that is seen below.
        let _ = fadvise(file, pages.start().bytes(), pages.len().try_into().ok(), Advice::DontNeed);
        if handle.is_direct() {
            return Ok(false);
        }
        left = match kind != OVERLAY && cached(file, pages) == Some(0) {
            true => Vec::new(),
            false => resident(file, pages, is_regular)?,
        };
        if left.is_empty() {
            return Ok(false);
        }
    }
    let len = handle.len();
    for run in left {
        for piece in BlockSize::from_shift(20).pieces_of(run) {
            let end = piece.end().bytes().min(len);
            rewrite(file, piece.start().bytes()..end)?;
        }
    }
    Ok(true)
}

/// Makes the pages of the run dirty.
fn rewrite(file: BorrowedFd<'_>, run: std::ops::Range<u64>) -> Result<(), Errno> {
    let mut bytes = vec![0; usize::try_from(run.end.saturating_sub(run.start)).expect("a mebibyte")];
    let mut read = 0;
    while read < bytes.len() {
        match retry(|| rustix::io::pread(file, &mut bytes[read..], run.start + read as u64))? {
            0 => break, // it was cut off meanwhile
            count => read += count,
        }
    }
    let mut written = 0;
    while written < read {
        match retry(|| rustix::io::pwrite(file, &bytes[written..read], run.start + written as u64))? {
            0 => return Err(Errno::NOSPC),
            count => written += count,
        }
    }
    Ok(())
}

/// How many pages of the run are in the cache. `None` where the kernel does not report it.
fn cached(file: BorrowedFd<'_>, span: ImageSpan) -> Option<u64> {
    const CACHESTAT: libc::c_long = 451;
    let range = [span.start().bytes(), span.len()];
    // Pages in the cache, dirty, being written back, evicted, evicted not long ago.
    let mut counts = [0u64; 5];
    // SAFETY: the call reads the two numbers of `range` and writes the five of `counts`, both of which
    // outlive it.
    let result = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0 as libc::c_uint)
    };
    (result == 0).then_some(counts[0])
}

/// The runs of pages of the run that are in the cache.
fn resident(file: BorrowedFd<'_>, span: ImageSpan, is_regular: bool) -> Result<Vec<ImageSpan>, Errno> {
    let mut found: Vec<ImageSpan> = Vec::new();
    for window in WINDOW.pieces_of(span) {
        let mut rest = window;
        while is_regular && !rest.is_empty() {
            // Where the file has a hole there is nothing that a cache could have and a medium not.
            let runs = seek_runs(file, rest)?;
            let Some(end) = runs.last().map(|run| run.span.end()) else { break };
            for run in runs.iter().filter(|run| run.is_data) {
                resident_in(file, BlockSize::PAGE.widen(run.span), &mut found)?;
            }
            rest = ImageSpan::between(end, rest.end());
        }
        if !is_regular {
            resident_in(file, window, &mut found)?;
        }
    }
    Ok(found)
}

/// As above, for a run that is short enough to be mapped.
fn resident_in(file: BorrowedFd<'_>, span: ImageSpan, found: &mut Vec<ImageSpan>) -> Result<(), Errno> {
    let len = usize::try_from(span.len()).map_err(|_| Errno::INVAL)?;
    let offset = libc::off_t::try_from(span.start().bytes()).map_err(|_| Errno::INVAL)?;
    // SAFETY: a new mapping, at an address that the kernel chooses, which is never read or written.
    let memory = unsafe {
        libc::mmap(ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_fd().as_raw_fd(), offset)
    };
    if memory == libc::MAP_FAILED {
        return match last_error() {
            Errno::NODEV | Errno::ACCESS => Ok(()), // it cannot be mapped: its file system keeps no pages
            errno => Err(errno),
        };
    }
    let mut present = vec![0u8; BlockSize::PAGE.count_for(span.len()).try_into().expect("a window")];
    // SAFETY: the mapping is `len` bytes long, and `present` has a byte for each of its pages.
    let asked = match unsafe { libc::mincore(memory, len, present.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(last_error()),
    };
    // SAFETY: the mapping that was made above, and that is known only here.
    unsafe { libc::munmap(memory, len) };
    asked?;
    for (page, _) in (0..).zip(&present).filter(|(_, present)| *present & 1 == 1) {
        let page = (span.start() + page * BlockSize::PAGE.bytes()).span(BlockSize::PAGE.bytes());
        match found.last_mut() {
            Some(last) if last.end() >= page.start() => {
                *last = ImageSpan::between(last.start(), page.end().max(last.end()));
            }
            _ => found.push(page),
        }
    }
    Ok(())
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
