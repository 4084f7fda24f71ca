//! A file on the host's file system, on a simulated volume: what ext4 adds to a flush.
//!
//! ```text
//!   volume   ├── journal of the file system ──┤ ...            ├── the file, in one piece ...
//!
//!   flush, and no block is new and the length is the same:   flush of the volume
//!   flush after the file grew or got new blocks:             record ─ flush ─ commit block ─ flush
//! ```
//!
//! So a flush of a growing file is two flushes of the drive and two writes to the journal, far from the file.
//! A flush that is requested while a commit is in progress shares the next one. A block is new until it is
//! written: what was zeroed or preallocated without writing is marked as unwritten, and clearing that mark is
//! a metadata change like allocating a block.
//!
//! Left out: where ext4 puts blocks (a file is contiguous), its other metadata, the checkpoint of its
//! journal, and the page cache: a write is answered by the drive, as with O_DIRECT.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use vellum_core::{
    Buffer, Error, ErrorKind, ImageOffset, ImageSpan, Limits, LocalFuture, Result, SharedStorage, Storage,
    StorageRun, Zeroes, lock,
};

/// The file system's block.
const BLOCK: u64 = 4096;
/// A transaction that allocates blocks for a file: a descriptor, the inode's block, a bitmap, a group
/// descriptor.
const RECORD_BLOCKS: u64 = 4;

/// Where things are on the volume.
#[derive(Debug, Clone)]
pub(crate) struct HostLayout {
    /// The journal of the file system.
    pub(crate) journal: ImageSpan,
    /// The first byte of the file.
    pub(crate) file: ImageOffset,
}

/// A file on a volume.
pub(crate) struct HostFile {
    volume: SharedStorage,
    layout: HostLayout,
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    len: u64,
    /// Blocks that were written: first to end, joined.
    blocks: BTreeMap<u64, u64>,
    /// Whether the file system has something to commit.
    is_changed: bool,
    journal_at: u64,
    /// Commits that have begun, and those that have ended.
    begun: u64,
    ended: u64,
    waiting: Vec<Waker>,
}

/// What a flush has to do.
enum Turn {
    Nothing,
    Flush,
    Commit,
}

impl State {
    /// Records the file's new length, and that there is something to commit.
    fn change(&mut self, span: ImageSpan) {
        self.len = self.len.max(span.end().bytes());
        self.is_changed = true;
    }

    /// Blocks that are entirely in the run become as if they were never written.
    fn unwrite(&mut self, span: ImageSpan) {
        let (first, end) = (span.start().bytes().div_ceil(BLOCK), span.end().bytes() / BLOCK);
        let touched: Vec<_> = self.blocks.range(..end).rev().map(|(at, stop)| (*at, *stop)).collect();
        for (at, stop) in touched.into_iter().take_while(|(_, stop)| *stop > first) {
            self.blocks.remove(&at);
            if at < first {
                self.blocks.insert(at, first);
            }
            if stop > end {
                self.blocks.insert(end, stop);
            }
        }
    }

    /// The blocks of a write are the file's from here on.
    fn touch(&mut self, span: ImageSpan) {
        if span.is_empty() {
            return;
        }
        let (mut first, mut end) = (span.start().bytes() / BLOCK, span.end().bytes().div_ceil(BLOCK));
        let holds = self.blocks.range(..=first).next_back().is_some_and(|(_, stop)| *stop >= end);
        if !holds {
            let touched: Vec<_> = self.blocks.range(..=end).rev().map(|(at, stop)| (*at, *stop)).collect();
            let begins = first;
            for (at, stop) in touched.into_iter().take_while(|(_, stop)| *stop >= begins) {
                self.blocks.remove(&at);
                (first, end) = (first.min(at), end.max(stop));
            }
            self.blocks.insert(first, end);
            self.is_changed = true;
        }
        if span.end().bytes() > self.len {
            self.len = span.end().bytes();
            self.is_changed = true;
        }
    }
}

impl HostFile {
    /// An empty file.
    pub(crate) fn new(volume: SharedStorage, layout: HostLayout) -> Arc<Self> {
        let limits = Limits { prefers_written: true, ..Limits::plain() };
        Arc::new(Self { volume, layout, limits, state: Mutex::default() })
    }

    /// How many times the file system has committed.
    #[cfg(test)]
    pub(crate) fn commits(&self) -> u64 {
        self.lock().ended
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn place(&self, at: ImageOffset) -> Result<ImageOffset> {
        let place = self.layout.file.bytes().checked_add(at.bytes());
        place.map(ImageOffset::new).ok_or_else(|| Error::new(ErrorKind::Invalid, "the file ends before"))
    }

    /// Waits until no commit is in progress, and returns what is left to do. A commit that began after the
    /// caller arrived has done it.
    async fn turn(&self) -> Turn {
        let came = self.lock().begun;
        poll_fn(|context| {
            let mut state = self.lock();
            if state.ended > came {
                return Poll::Ready(Turn::Nothing);
            }
            if state.begun > state.ended {
                state.waiting.push(context.waker().clone());
                return Poll::Pending;
            }
            if !std::mem::take(&mut state.is_changed) {
                return Poll::Ready(Turn::Flush);
            }
            state.begun += 1;
            Poll::Ready(Turn::Commit)
        })
        .await
    }

    async fn commit(&self) -> Result<()> {
        let at = {
            let mut state = self.lock();
            let bytes = (RECORD_BLOCKS + 1) * BLOCK;
            if state.journal_at + bytes > self.layout.journal.len() {
                state.journal_at = 0;
            }
            let at = self.layout.journal.start().bytes() + state.journal_at;
            state.journal_at += bytes;
            at
        };
        let blocks = |count: u64| Buffer::zeroed(usize::try_from(count * BLOCK).expect("small"));
        self.volume.write(ImageOffset::new(at), blocks(RECORD_BLOCKS)).await?;
        self.volume.flush().await?;
        self.volume.write(ImageOffset::new(at + RECORD_BLOCKS * BLOCK), blocks(1)).await?;
        self.volume.flush().await
    }
}

impl Storage for HostFile {
    fn name(&self) -> &'static str {
        "file"
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.lock().len
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move { self.volume.read(self.place(at)?, buffer).await })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = at.span(data.len() as u64);
            self.volume.write(self.place(at)?, data).await?;
            self.lock().touch(span);
            Ok(())
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            match self.turn().await {
                Turn::Nothing => return Ok(()),
                Turn::Flush => return self.volume.flush().await,
                Turn::Commit => {}
            }
            let committed = self.commit().await;
            let waiting = {
                let mut state = self.lock();
                state.ended += 1;
                std::mem::take(&mut state.waiting)
            };
            waiting.into_iter().for_each(Waker::wake);
            committed
        })
    }

    /// Zeros are extents that the file system marks as unwritten: nothing is written except what the next
    /// flush commits. The volume's discards give zeros, which is the default of simulated drives.
    fn write_zeroes(&self, span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let place = self.place(span.start())?;
            self.volume.discard(place.span(span.len())).await?;
            let mut state = self.lock();
            state.unwrite(span);
            state.change(span);
            Ok(())
        })
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let place = self.place(span.start())?;
            {
                let mut state = self.lock();
                state.unwrite(span);
                state.is_changed = true;
            }
            self.volume.discard(place.span(span.len())).await
        })
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let old = {
                let mut state = self.lock();
                state.is_changed = true;
                let old = std::mem::replace(&mut state.len, len);
                state.unwrite(ImageSpan::between(ImageOffset::new(len.min(old)), ImageOffset::new(old)));
                old
            };
            let place = self.place(ImageOffset::new(len))?;
            self.volume.discard(place.span(old.saturating_sub(len))).await
        })
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.lock().change(span);
            Ok(())
        })
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        Box::pin(async move {
            let end = self.len().min(span.end().bytes());
            let place = self.place(span.start())?;
            let runs = self.volume.runs(place.span(end.saturating_sub(span.start().bytes()))).await?;
            let back = |run: StorageRun| {
                let start = run.span.start().bytes() - self.layout.file.bytes();
                StorageRun { span: ImageOffset::new(start).span(run.span.len()), ..run }
            };
            Ok(runs.into_iter().map(back).collect())
        })
    }
}
