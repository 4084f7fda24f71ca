//! Giving an image that is not in use another backing image.
//!
//! ```text
//!   image over the old one:  where it shows what is below, and old and new differ ► the old bytes into the image ► flush ► closed
//!                            ► header names the new one    commit point
//! ```
//!
//! 1. The guest sees the same before, meanwhile and afterwards, also after a crash at any moment: until the header changes,
//!    what is written is what the disk reads as anyway; then the two agree wherever the disk shows what is below.
//! 2. Both chains are open, and so locked, until the header has changed. A file below that another program changes all the
//!    same is noticed by its size and times, before and at the end ([`BaseFiles`]).
//! 3. What proves the images below is recorded anew with the name, in one change of the header.
//! 4. If it stops or fails, the image keeps its backing image and what was copied so far. The next run continues.
//! 5. Without the copies (`is_unsafe`) only the header changes: for a backing image that has another name or place now.
//!
//! [`BaseFiles`]: vellum_layer::hydrate::BaseFiles

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use vellum_core::pin::Pin;
use vellum_core::{BlockSize, Context, Error, ErrorKind, GuestOffset, GuestSpan, Place, Result, SharedDisk};
use vellum_format::FormatKind;
use vellum_format::image::NewBacking;
use vellum_layer::{Chain, Gate};

use crate::copy::differing::{RUNS_AT_ONCE, differences, write_runs};
use crate::copy::{Piece, zero_runs};
use crate::create::refuse_moved;
use crate::image::{ImageOptions, open_file, open_image};
use crate::signals::Stop;

/// Old and new are read and compared in pieces of this many bytes.
const PIECE: u64 = 512 << 10;
/// Several at a time: what both have of them, and one copy, is in memory.
const PIECES_AT_ONCE: usize = 8;
/// And differ in units of this many.
const UNIT: BlockSize = BlockSize::from_shift(16);

/// What an image is to stand on.
#[derive(Debug, Clone)]
pub struct Rebase {
    /// The name of the new backing image, as it will stand in the image, and its format; detected when not given.
    pub backing: (String, Option<FormatKind>),
    /// Nothing is compared or copied, and the old backing image need not exist.
    pub is_unsafe: bool,
}

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebased {
    /// The image below that was named before.
    pub before: Option<PathBuf>,
    /// The format of the image.
    pub kind: FormatKind,
    /// The format of the new one below.
    pub format: FormatKind,
    /// Bytes that were written into the image because the two differ: data and zeros.
    pub bytes_written: u64,
}

/// Gives the image another backing image. `progress` gets the size of the disk and the bytes done.
///
/// # Errors
/// `Unsupported` when the image has snapshots or cannot have that backing image, `Corrupt` for a chain that would be a loop,
/// the errors of the images, and `Closed` when it was stopped.
pub async fn rebase(
    path: &Path,
    options: &ImageOptions,
    wish: &Rebase,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<Rebased> {
    match wish.is_unsafe {
        true => rename(path, options, wish).await,
        false => compared(path, options, wish, stop, progress).await,
    }
}

/// Only the header changes.
async fn rename(path: &Path, options: &ImageOptions, wish: &Rebase) -> Result<Rebased> {
    let (name, format) = &wish.backing;
    let (storage, kind) = open_file(path, options).await?;
    let head = kind.format().read(&*storage).await?;
    let before = head.backing().map(|(name, _)| PathBuf::from(name));
    let format = match format {
        Some(format) => *format,
        None => {
            let below = Gate::resolve(path, name)?;
            open_file(&below, &ImageOptions { format: None, ..reading(options) })
                .await
                .context(|| "give the format of the backing image with -F, or its right name")?
                .1
        }
    };
    let said = format.to_string();
    let backing = NewBacking { name, format: Some(&said), size: None, pin: None };
    kind.format().set_backing(&storage, backing).await?;
    Ok(Rebased { before, kind, format, bytes_written: 0 })
}

fn reading(options: &ImageOptions) -> ImageOptions {
    ImageOptions { read_only: true, data_files: Vec::new(), ..options.clone() }
}

async fn compared(
    path: &Path,
    options: &ImageOptions,
    wish: &Rebase,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<Rebased> {
    let (name, format) = &wish.backing;
    let below = Gate::resolve(path, name)?;
    let new = stop
        .or_stopped(open_image(&below, &ImageOptions { format: *format, ..reading(options) }))
        .await
        .context(|| format!("can't use the backing image {name} (`-u` changes the name alone)"))?;
    refuse_moved(&new)?;
    let format = new.top().head.kind();
    refuse_loop(path, &new)?;
    let writing = ImageOptions { writes_direct: true, ..options.clone() };
    let chain = stop.or_stopped(open_image(path, &writing)).await?;
    if chain.has_snapshots().await? {
        return Err(Error::unsupported(format!(
            "{} has snapshots, which also read from its backing image: delete them first",
            path.display()
        )));
    }
    let pin = new.pin_of_all()?;
    let size = new.disk().geometry().size;
    let before = chain.members().nth(1).map(|member| member.opened.disk.geometry().size);
    if chain.top().head.kind() == FormatKind::Native && before.is_some_and(|before| before != size) {
        // Said before terabytes are copied.
        return Err(Error::unsupported(format!(
            "{name} has {size} bytes: the backing image of a vellum image is replaced by one of the same size, {} bytes. \
             Make the image independent with `vellum flatten`, or copy it with `vellum convert`",
            before.unwrap_or_default()
        )));
    }
    let copied = copy_differences(&chain, &new, &stop.flag, progress).await;
    // A file that has changed meanwhile proves nothing: what was compared is not what is there.
    let copied = match copied {
        Ok(bytes) => match chain.base_files().check().await {
            Ok(()) => new.base_files().check().await.map(|()| bytes),
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    let closed = chain.close().await;
    let bytes_written = copied.and_then(|bytes| closed.map(|()| bytes))?;
    let top = chain.top();
    let before = top.head.backing().map(|(name, _)| PathBuf::from(name));
    let renamed = set(&chain, name, format, size, pin.as_ref()).await;
    let closed = new.close().await;
    renamed.and(closed)?;
    Ok(Rebased { before, kind: top.head.kind(), format, bytes_written })
}

/// Checks that the image is no part of what is to be below it. Its lock would be in the way, and name another cause.
fn refuse_loop(path: &Path, new: &Chain) -> Result<()> {
    let Ok(image) = path.canonicalize() else { return Ok(()) };
    match new.members().find(|member| member.path.canonicalize().is_ok_and(|below| below == image)) {
        None => Ok(()),
        Some(_) => Err(Error::corrupt(format!(
            "the backing chain of {} would be a loop: {} stands on it",
            path.display(),
            new.top().path.display()
        ))),
    }
}

async fn set(chain: &Chain, name: &str, format: FormatKind, size: u64, pin: Option<&Pin>) -> Result<()> {
    let top = chain.top();
    let format = format.to_string();
    let backing = NewBacking { name, format: Some(&format), size: Some(size), pin };
    top.head.kind().format().set_backing(&top.storage, backing).await
}

/// Writes what the old backing image has, and the new one has not, into the image. Returns how many bytes that are.
async fn copy_differences(
    chain: &Chain,
    new: &Chain,
    stop: &AtomicBool,
    progress: &dyn Fn(u64, u64),
) -> Result<u64> {
    let disk = chain.disk();
    let whole = GuestOffset::ZERO.span(disk.geometry().size);
    let (mut rest, mut written) = (whole, 0);
    while !rest.is_empty() {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "stopped by a signal"));
        }
        let extents = chain.top().opened.disk.map(rest).await?;
        for extent in &extents {
            if matches!(extent.place, Place::Below) {
                written += copy_run(disk, new.disk(), extent.span, stop).await?;
            }
            progress(whole.len(), extent.span.end().bytes());
        }
        let done = extents.last().map_or(rest.end(), |extent| extent.span.end());
        rest = GuestSpan::between(done, rest.end());
    }
    disk.flush().await.context(|| format!("can't flush {}", chain.top().path.display()))?;
    Ok(written)
}

/// One run that the image has not. When it returns, all writes have ended.
async fn copy_run(disk: &SharedDisk, new: &SharedDisk, run: GuestSpan, stop: &AtomicBool) -> Result<u64> {
    let mut rest = run;
    let mut running = FuturesUnordered::new();
    let mut written = Ok(0);
    loop {
        while written.is_ok() && running.len() < PIECES_AT_ONCE && !rest.is_empty() {
            if stop.load(Ordering::Relaxed) {
                written = Err(Error::new(ErrorKind::Closed, "stopped by a signal"));
                break;
            }
            let now;
            (now, rest) = rest.split_at(PIECE - rest.start().bytes() % PIECE);
            running.push(copy_piece(disk, new, now));
        }
        let Some(ended) = running.next().await else { return written };
        written = written.and_then(|before| ended.map(|more| before + more));
    }
}

async fn copy_piece(disk: &SharedDisk, new: &SharedDisk, piece: GuestSpan) -> Result<u64> {
    let below_new = piece.intersect(GuestOffset::ZERO.span(new.geometry().size));
    if both_zero(disk, new, piece, below_new).await? {
        return Ok(0);
    }
    let runs = differences(disk, new, Piece { span: piece, is_zero: false }, UNIT).await?;
    let written = runs.iter().map(|(run, _)| run.len()).sum();
    write_runs(disk, runs, RUNS_AT_ONCE).await.map(|()| written)
}

/// Whether both are known to read as zero in all of a piece.
pub(crate) async fn both_zero(
    disk: &SharedDisk,
    new: &SharedDisk,
    piece: GuestSpan,
    below_new: GuestSpan,
) -> Result<bool> {
    let all_zero = async |disk: &SharedDisk, span: GuestSpan| {
        let runs = zero_runs(&[disk], span).await?;
        let covered = runs.last().is_some_and(|(run, _)| run.end() == span.end());
        Ok::<_, Error>(covered && runs.iter().all(|(_, zero)| *zero))
    };
    Ok(all_zero(disk, piece).await? && (below_new.is_empty() || all_zero(new, below_new).await?))
}
