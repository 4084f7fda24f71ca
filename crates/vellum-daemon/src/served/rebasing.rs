//! Another backing image for a disk that is served: one below it in its chain (what is between is streamed into the image), or any
//! other one.
//!
//! ```text
//!   guests at work   where the image shows what is below, and old and new differ ► the old bytes into the image
//!                    again, until a round finds no difference
//!   requests wait    flush ► close ► header names the new one ► open
//!                                    commit point
//! ```
//!
//! `docs/design/0025-live-chains.md` argues why a crash loses nothing.
//!
//! 1. What is copied is what the disk reads as anyway, and goes in by a fill (contract 15): it changes no answer, and never
//!    overwrites what a guest has written.
//! 2. Nothing becomes *below* again in an image that stays open. So once a round has found no difference there is none, whatever
//!    guests do until the header changes. What counts is what differs, not what was kept: a fill is dropped where a guest writes to
//!    the same block, and parts of that block may still be read from below afterwards.
//! 3. Both chains are open, and so locked, until then. A file below that another program changes all the same is noticed by its
//!    size and times.
//! 4. Whatever fails or is cancelled leaves the image over its old backing image, with what was copied. The next run continues.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vellum_core::{
    Buffer, Context, Error, ErrorKind, GuestOffset, GuestSpan, LocalFuture, Place, Result, SharedDisk, lock,
};
use vellum_format::FormatKind;
use vellum_format::image::NewBacking;
use vellum_io::clock;
use vellum_layer::merge::Steering;
use vellum_layer::{Chain, Gate};

use super::committing::AGAIN;
use super::job::{Job, JobStep};
use super::{Served, Step};
use crate::contained::contained;
use crate::create::{backing_name, refuse_moved};
use crate::host::{Host, canonical_path};
use crate::image::{ImageOptions, open_file, open_image};
use crate::rebase::both_zero;
use crate::stats::JobStats;

/// Old and new are read and compared in pieces of this many bytes, or of one block of the image if that is larger.
const PIECE: u64 = 1 << 20;
/// How often a fill is tried again that finds no room after a flush.
const FLUSHES_MAX: u32 = 64;

/// If nothing could be copied for so long, although there is something to copy, the rebase is given up.
const STILL_MAX: Duration = Duration::from_secs(60);

/// What a disk is to stand on.
#[derive(Debug, Clone)]
pub(crate) struct LiveRebase {
    /// The new backing image, by its absolute path.
    pub(crate) base: PathBuf,
    /// Its format; detected when not given.
    pub(crate) format: Option<FormatKind>,
    /// Bytes a second that are read and compared, at most.
    pub(crate) rate: Option<u64>,
}

/// The disks that are compared.
struct Comparing {
    /// The image, as guests see it: what is filled.
    disk: SharedDisk,
    aside: SharedDisk,
    /// The image's own map.
    top: SharedDisk,
    /// Those between the image and the new one, where that is in its chain: elsewhere the two are the same.
    between: Option<Vec<SharedDisk>>,
    old: SharedDisk,
    new: SharedDisk,
    /// The size of a block in bytes: a fill keeps whole blocks.
    unit: u64,
    /// How many bytes fills have kept.
    kept: Cell<u64>,
}

impl Served {
    /// Begins to give the image another backing image. It goes on when this has returned; its job says how far it is.
    ///
    /// # Errors
    /// `Unsupported` when the image takes no copies, has snapshots or cannot have that backing image, `Corrupt` for a chain that
    /// would be a loop, and the errors of the images. Nothing has changed then.
    pub(crate) async fn rebase(self: &Arc<Self>, wish: &LiveRebase) -> Result<JobStats> {
        let step = JobStep::begin(self, Step::Rebase)?;
        let chain = self.alone_or_closed().await?;
        let open = chain.as_ref().ok_or_else(|| self.is_closed())?;
        self.chain_may_change(open)?;
        let path = self.shown();
        let Some(old) = open.disk_below() else {
            return Err(Error::unsupported(format!("{path} has no backing image that could be replaced")));
        };
        if open.has_snapshots().await? {
            return Err(Error::unsupported(format!(
                "{path} has snapshots, which also read from its backing image: delete them first"
            )));
        }
        if let Some(below) = open
            .members()
            .skip(1)
            .find(|below| below.head.is_encrypted())
            .filter(|_| !open.top().head.is_encrypted())
        {
            return Err(Error::unsupported(format!(
                "{} is encrypted and {path} is not: what is copied would be readable there without a secret. Convert {path} into an \
                 encrypted image first (`vellum convert -o encrypt.format=luks`), or rebase it when no server has it",
                below.path.display()
            )));
        }
        let unit = vellum_core::Disk::filling(&*self.disk).map(|filling| filling.unit.bytes()).ok_or_else(|| {
            Error::unsupported(format!(
                "{path}: this image takes no copies of its backing image while it is served (it has no journal): stop the \
                 server and use `vellum rebase {path}`"
            ))
        })?;
        let reading = ImageOptions {
            read_only: true,
            format: wish.format,
            merges_into: None,
            tap: None,
            wished_tap: None,
            flash: None,
            data_files: Vec::new(),
            ..self.image.clone()
        };
        let base = canonical_path(&wish.base)
            .await
            .map_err(|error| Error::io(error, format!("can't find {}", wish.base.display())))?;
        let depth = depth_in(open, &base).await;
        if depth == Some(0) {
            return Err(Error::corrupt(format!("the backing chain of {path} would be a loop")));
        }
        let format = wish.format.or_else(|| depth.map(|depth| open.member(depth).head.kind()));
        let new = open_image(&wish.base, &ImageOptions { format, ..reading })
            .await
            .context(|| format!("can't use the backing image {}", wish.base.display()))?;
        self.may_stand_on(open, &new, &old).await?;
        let kind = new.top().head.kind();
        let between = depth.map(|depth| (1..depth).map(|at| open.member(at).opened.disk.clone()).collect());
        let comparing = Comparing {
            disk: self.disk(),
            aside: self.valve.aside(),
            top: open.disk().clone(),
            between,
            old,
            new: new.disk().clone(),
            unit,
            kept: Cell::new(0),
        };
        let useless = match depth {
            Some(depth) => (1..depth).map(|at| open.member(at).path.clone()).collect(),
            None => Vec::new(),
        };
        let files = open.base_files().clone();
        let total = open.disk().geometry().size;
        let job = Job::new("rebase", (wish.base.clone(), useless), total, wish.rate);
        drop(chain);
        *lock(&self.job) = Some(job.clone());
        let stats = job.stats();
        let (its, worker) = (self.clone(), self.workers.count() - 1 - self.number % self.workers.count());
        // What is open was opened on this worker, and disks are used on any.
        drop(self.workers.spawn(worker, move || async move {
            let what = format!("the rebase of {}", its.shown());
            let work = async {
                let copied = comparing.copy_all(&job, total).await;
                let copied = match copied {
                    // What was compared with files that have changed meanwhile proves nothing.
                    Ok(()) => match files.check().await {
                        Ok(()) => new.base_files().check().await,
                        failed => failed,
                    },
                    failed => failed,
                };
                drop(comparing);
                its.name_new_base(&job, copied, &new, kind).await
            };
            let ended = contained(&what, work).await;
            match &ended {
                Ok(_) => tracing::warn!("{what} is done: it stands on {}", job.base().display()),
                Err(error) => {
                    tracing::warn!("{what} has ended, and its chain is as before: {}", error.chain())
                }
            }
            let closed = new.close().await;
            drop(new);
            drop(step);
            job.end(ended.and_then(|image| closed.map(|()| image)));
        }));
        Ok(stats)
    }

    async fn may_stand_on(&self, open: &Chain, new: &Chain, old: &SharedDisk) -> Result<()> {
        refuse_moved(new)?;
        let path = self.path();
        let own = self.canonical();
        for member in new.members() {
            if canonical_path(&member.path).await.is_ok_and(|its| its == own) {
                return Err(Error::corrupt(format!(
                    "the backing chain of {} would be a loop: {} stands on it",
                    path.display(),
                    new.top().path.display()
                )));
            }
        }
        let (before, size) = (old.geometry().size, new.disk().geometry().size);
        let name = new.top().path.display().to_string();
        if open.top().head.kind() == FormatKind::Native && before != size {
            return Err(Error::unsupported(format!(
                "{name} has {size} bytes: the backing image of a vellum image is replaced by one of the same size, {before} \
                 bytes"
            )));
        }
        if size > before && open.disk().geometry().size > before {
            return Err(Error::unsupported(format!(
                "{name} has {size} bytes, and what is below {} now has {before}: stop the server and use `vellum rebase`",
                path.display()
            )));
        }
        let base = canonical_path(&new.top().path).await.map_err(|error| Error::io(error, name))?;
        let referrer = vellum_layer::Referrer {
            canonical: &own,
            is_device: open.top().storage.limits().fixed_len,
            trust: vellum_layer::Trust::Declared,
        };
        Host::gate(&self.image.allow_dirs, &[])?.check(referrer, &base)
    }

    /// The image has everything in which the two differ: its header names the new one.
    async fn name_new_base(
        self: &Arc<Self>,
        job: &Job,
        copied: Result<()>,
        new: &Chain,
        kind: FormatKind,
    ) -> Result<PathBuf> {
        copied?;
        let mut chain = self.alone_at_last().await;
        if let Some(flash) = chain.as_ref().and_then(Chain::flash) {
            flash.drain().await?;
        }
        let held = loop {
            if job.is_cancelled() {
                return Err(Error::new(ErrorKind::Closed, "it was cancelled"));
            }
            match self.hold_to_change(chain.as_ref()).await {
                Ok(held) => break held,
                Err(_) => clock().sleep(AGAIN).await,
            }
        };
        job.hurry();
        let pin = match chain.as_ref().is_some_and(|open| open.top().head.pin().is_some()) {
            true => new.pin_to_have(),
            false => new.pin_of_all(),
        };
        let changed = match self.close_held(&held, &mut chain).await {
            Ok(()) => match pin {
                Ok(pin) => self.set_base(new, kind, pin.as_ref()).await,
                Err(error) => Err(error),
            },
            failed => failed,
        };
        let opened = self.open_again(&held.hold, &mut chain).await;
        held.finish();
        opened?;
        changed.map(|()| self.path())
    }

    async fn set_base(
        &self,
        new: &Chain,
        kind: FormatKind,
        pin: Option<&vellum_core::pin::Pin>,
    ) -> Result<()> {
        let path = self.path();
        let writing = ImageOptions { format: Some(self.format()), read_only: false, ..self.image.clone() };
        let (storage, own) = open_file(&path, &writing).await?;
        let name = backing_name(&new.top().path, &path)?;
        // Named as it will be found.
        Gate::resolve(&path, &name)?;
        let format = kind.to_string();
        let size = Some(new.disk().geometry().size);
        own.format().set_backing(&storage, NewBacking { name: &name, format: Some(&format), size, pin }).await // commit point
    }
}

/// How many images are above the one at this place, if it is in the chain.
async fn depth_in(open: &Chain, base: &PathBuf) -> Option<usize> {
    for (depth, member) in open.members().enumerate() {
        if !member.is_snapshot && canonical_path(&member.path).await.is_ok_and(|its| its == *base) {
            return Some(depth);
        }
    }
    None
}

impl Comparing {
    /// In rounds, until one has found no difference.
    async fn copy_all(&self, job: &Job, size: u64) -> Result<()> {
        let mut moved_at = clock().now();
        loop {
            let kept_before = self.kept.get();
            let (mut rest, mut found) = (GuestOffset::ZERO.span(size), 0);
            while !rest.is_empty() {
                job.go_on(0).await?;
                let extents = self.top.map(rest).await?;
                for extent in &extents {
                    if matches!(extent.place, Place::Below) {
                        found += self.run(job, 0, extent.span).await?;
                    }
                    job.set_done(extent.span.end().bytes());
                }
                let done = extents.last().map_or(rest.end(), |extent| extent.span.end());
                rest = GuestSpan::between(done, rest.end());
            }
            if found == 0 {
                return Ok(());
            }
            job.set_left(found);
            if self.kept.get() > kept_before {
                moved_at = clock().now();
            } else if clock().now().saturating_sub(moved_at) > STILL_MAX {
                return Err(Error::new(
                    ErrorKind::Io,
                    format!(
                        "{found} bytes could not be copied into the image, because guests keep writing beside them: try again, limit \
                         the guests (`vellum limits`), or stop the server and use `vellum rebase`"
                    ),
                ));
            } else {
                clock().sleep(AGAIN).await;
            }
        }
    }

    /// A run that the image has not. Returns how many bytes were different.
    fn run<'a>(&'a self, job: &'a Job, depth: usize, run: GuestSpan) -> LocalFuture<'a, Result<u64>> {
        Box::pin(async move {
            let Some(between) = &self.between else { return self.compare(job, run).await };
            let Some(layer) = between.get(depth) else { return Ok(0) }; // it is the new one's already
            let within = run.intersect(GuestOffset::ZERO.span(layer.geometry().size));
            let behind = GuestSpan::between(within.end().max(run.start()), run.end());
            let (mut rest, mut found) = (within, 0);
            while !rest.is_empty() {
                let extents = layer.map(rest).await?;
                for extent in &extents {
                    found += match extent.place {
                        Place::Below => self.run(job, depth + 1, extent.span).await?,
                        _ => self.compare(job, extent.span).await?,
                    };
                }
                let done = extents.last().map_or(rest.end(), |extent| extent.span.end());
                rest = GuestSpan::between(done, rest.end());
            }
            Ok(found + self.compare(job, behind).await?)
        })
    }

    /// Compares old and new, piece by piece, and fills the blocks in which they differ.
    async fn compare(&self, job: &Job, run: GuestSpan) -> Result<u64> {
        let size = self.top.geometry().size;
        let unit = self.unit;
        let end = run.end().bytes().div_ceil(unit).saturating_mul(unit).min(size);
        let (mut at, mut found) = (run.start().bytes() / unit * unit, 0);
        while at < end && !run.is_empty() {
            let piece = PIECE.max(unit);
            let next = ((at / piece + 1) * piece).min(end);
            let span = GuestSpan::between(GuestOffset::new(at), GuestOffset::new(next));
            at = next;
            let below_new = span.intersect(GuestOffset::ZERO.span(self.new.geometry().size));
            let below_old = span.intersect(GuestOffset::ZERO.span(self.old.geometry().size));
            if !below_old.is_empty() && both_zero(&self.old, &self.new, below_old, below_new).await? {
                continue;
            }
            job.go_on(span.len()).await?;
            let (old, new) = (read(&self.old, span).await?, read(&self.new, span).await?);
            let block = usize::try_from(unit).expect("a block");
            let mut differs = old.chunks(block).zip(new.chunks(block)).map(|(one, other)| one != other);
            let mut from = 0;
            while let Some(skipped) = differs.by_ref().position(|differs| differs) {
                let start = from + skipped;
                // One that is equal ends the run, and was looked at.
                let len = 1 + differs.by_ref().take_while(|differs| *differs).count();
                let bytes = start * block..((start + len) * block).min(old.len());
                found += bytes.len() as u64;
                let kept = self.fill(span.start() + bytes.start as u64, &old[bytes]).await?;
                self.kept.set(self.kept.get() + kept);
                from = start + len + 1;
            }
        }
        Ok(found)
    }

    /// Gives the image blocks, where it has none by now. Returns how many bytes it has taken.
    async fn fill(&self, at: GuestOffset, blocks: &[u8]) -> Result<u64> {
        let mut flushes = 0;
        loop {
            match self.disk.fill(at, Buffer::copy_of(blocks)).await {
                Ok(filled) if !filled.wants_flush => return Ok(filled.kept),
                Ok(_) if flushes < FLUSHES_MAX => {
                    flushes += 1;
                    match self.aside.flush().await {
                        Err(error) if error.kind() != ErrorKind::Locked => return Err(error),
                        _ => {}
                    }
                }
                Ok(_) => {
                    return Err(Error::new(
                        ErrorKind::NoSpace,
                        "the image has no room for what is to be copied",
                    ));
                }
                // The disk is being exchanged, or a snapshot of it made.
                Err(error) if error.kind() == ErrorKind::Locked => clock().sleep(AGAIN).await,
                Err(error) => return Err(error.context(format!("can't copy {} bytes at {at}", blocks.len()))),
            }
        }
    }
}

/// A span of a disk; what is behind its end reads as zero.
async fn read(disk: &SharedDisk, span: GuestSpan) -> Result<Vec<u8>> {
    let within = span.intersect(GuestOffset::ZERO.span(disk.geometry().size));
    let mut bytes = vec![0; usize::try_from(span.len()).expect("a piece")];
    if !within.is_empty() {
        let len = usize::try_from(within.len()).expect("a piece");
        let read = disk
            .read(within.start(), Buffer::for_overwrite(len))
            .await
            .context(|| format!("can't read {len} bytes at {}", within.start()))?;
        bytes[..len].copy_from_slice(&read.to_vec());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};

    use vellum_core::{BlockSize, Disk, Extent, Filled, Geometry, MemoryDisk, WriteFlags, ZeroFlags};
    use vellum_io::{IoMode, run};

    use super::*;

    const BLOCK: u64 = 4096;
    const BLOCK_LEN: usize = 4096;
    const BLOCKS: usize = 8;
    const SIZE: u64 = 8 * BLOCK;

    /// An image without data, whose guests write to some of its blocks for a while: fills of those are dropped.
    struct Busy {
        filled: Mutex<Vec<Option<u8>>>,
        drops: AtomicU32,
    }

    impl Disk for Busy {
        fn geometry(&self) -> Geometry {
            let block = BlockSize::PAGE;
            Geometry {
                size: SIZE,
                block_size: block,
                preferred_size: block,
                read_only: false,
                fast_zeroes: false,
            }
        }

        fn read(&self, _: GuestOffset, _: Buffer) -> LocalFuture<'_, Result<Buffer>> {
            unreachable!("what it shows is read from below")
        }

        fn write(&self, _: GuestOffset, _: Buffer, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
            unreachable!("a rebase writes nothing")
        }

        fn flush(&self) -> LocalFuture<'_, Result<()>> {
            Box::pin(std::future::ready(Ok(())))
        }

        fn write_zeroes(&self, _: GuestSpan, _: ZeroFlags) -> LocalFuture<'_, Result<()>> {
            unreachable!("a rebase writes nothing")
        }

        fn discard(&self, _: GuestSpan, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
            unreachable!("a rebase writes nothing")
        }

        fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
            let block = usize::try_from(span.start().bytes() / BLOCK).expect("small");
            let place = match lock(&self.filled)[block] {
                Some(_) => Place::Zero { allocated: true },
                None => Place::Below,
            };
            let span = span.start().span(BLOCK.min(span.len()));
            Box::pin(std::future::ready(Ok(vec![Extent { span, place }])))
        }

        fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
            let bytes = data.to_vec();
            let mut kept = 0;
            for (index, block) in bytes.chunks(BLOCK_LEN).enumerate() {
                let number = usize::try_from(at.bytes() / BLOCK).expect("small") + index;
                let is_claimed = number == 5
                    && self
                        .drops
                        .fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1))
                        .is_ok();
                if !is_claimed && lock(&self.filled)[number].replace(block[0]).is_none() {
                    kept += block.len() as u64;
                }
            }
            Box::pin(std::future::ready(Ok(Filled { kept, wants_flush: false })))
        }

        fn close(&self) -> LocalFuture<'_, Result<()>> {
            Box::pin(std::future::ready(Ok(())))
        }
    }

    /// A round in which every fill was dropped has found differences all the same, and is not the last one.
    #[test]
    fn what_guests_write_to_is_copied_when_they_have_written() {
        let busy = Arc::new(Busy { filled: Mutex::new(vec![None; BLOCKS]), drops: AtomicU32::new(3) });
        let its = busy.clone();
        let ended = run(IoMode::Threads, async move || {
            let disk: SharedDisk = its;
            let comparing = Comparing {
                aside: disk.clone(),
                top: disk.clone(),
                disk,
                between: None,
                old: MemoryDisk::holding(&vec![7; BLOCKS * BLOCK_LEN]),
                new: MemoryDisk::new(SIZE),
                unit: BLOCK,
                kept: Cell::new(0),
            };
            comparing.copy_all(&Job::new("rebase", (PathBuf::new(), Vec::new()), SIZE, None), SIZE).await
        });
        ended.expect("a worker").expect("all was copied");
        assert_eq!(*lock(&busy.filled), vec![Some(7); BLOCKS]);
        assert_eq!(busy.drops.load(Ordering::Acquire), 0);
    }
}
