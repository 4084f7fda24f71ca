//! Making an image independent of its backing image: data that only the backing images have is copied into it, and
//! the reference to them is removed.
//!
//! 1. The guest sees the same before, meanwhile and afterwards, also after a crash at any moment: what is written is
//!    what the disk reads as anyway, and the header changes atomically ([`Format::detach`]).
//! 2. The images below are open, and so locked, until the reference is gone.
//! 3. Ranges that read as zero below are not copied: without an image below they read as zero as well.
//! 4. If it stops or fails, the image keeps its backing image and the data copied so far. The next run continues.
//!
//! [`Format::detach`]: vellum_format::image::Format::detach

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vellum_core::{
    Buffer, Context, Disk, Error, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Place, Result,
    SharedDisk, WriteFlags, ZeroFlags,
};
use vellum_layer::Chain;

use crate::copy::{CopyOptions, copy};
use crate::image::{ImageOptions, open_image};
use crate::signals::Stop;

/// Zeros are looked for in units of this many bytes.
const SPARSE_BYTES: u64 = 64 << 10;

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flattened {
    /// The image below that was named; nothing, where the image stood alone already.
    pub backing: Option<PathBuf>,
    /// Bytes of data that were written into the image.
    pub bytes_written: u64,
}

/// Copies what the images below have into the top one, and removes the reference to them. `progress` gets the size of
/// the disk and the bytes done.
///
/// # Errors
/// `Unsupported` when the image has snapshots, the errors of the images, and `Closed` when it was stopped.
pub async fn flatten(
    path: &Path,
    options: &ImageOptions,
    pieces_at_once: usize,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<Flattened> {
    let chain = stop.or_stopped(open_image(path, options)).await?;
    let stop = &*stop.flag;
    let done = flatten_open(&chain, pieces_at_once, stop, progress).await;
    let closed = chain.close().await;
    let flattened = done.and_then(|flattened| closed.map(|()| flattened))?;
    let top = chain.top();
    top.head.kind().format().detach(&top.storage, stop).await?;
    Ok(flattened)
}

async fn flatten_open(
    chain: &Chain,
    pieces_at_once: usize,
    stop: &AtomicBool,
    progress: &dyn Fn(u64, u64),
) -> Result<Flattened> {
    let Some(below) = chain.members().nth(1) else {
        return Ok(Flattened { backing: None, bytes_written: 0 });
    };
    let top = chain.top();
    if !top.head.snapshots(&top.storage, Some(&top.storage)).await?.is_empty() {
        return Err(Error::unsupported(format!(
            "{} has snapshots, which also read from its backing image: delete them first",
            top.path.display()
        )));
    }
    let disk = chain.disk();
    let size = disk.geometry().size;
    let missing: SharedDisk = Arc::new(Missing { disk: disk.clone() });
    let copying = CopyOptions {
        pieces_at_once,
        sparse_bytes: SPARSE_BYTES,
        target_is_zero: true,
        out_of_order: false,
        stop,
    };
    let copied = copy(&missing, disk, copying, &|bytes| progress(size, bytes)).await;
    copied.context(|| format!("can't copy {} into {}", below.path.display(), top.path.display()))?;
    let bytes_written = chain.top_tally.data.counts().bytes_written;
    let backing = top.head.backing().map(|(name, _)| PathBuf::from(name));
    Ok(Flattened { backing, bytes_written })
}

/// A disk as a source of what its image does not have: the rest counts as zero, which is not copied.
struct Missing {
    disk: SharedDisk,
}

impl Disk for Missing {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.disk.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.disk.read(at, buffer)
    }

    fn write(&self, _: GuestOffset, _: Buffer, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
        refused()
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        refused()
    }

    fn write_zeroes(&self, _: GuestSpan, _: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        refused()
    }

    fn discard(&self, _: GuestSpan, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
        refused()
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let mut extents = self.disk.map(span).await?;
            for extent in extents.iter_mut().filter(|extent| !matches!(extent.place, Place::Below)) {
                extent.place = Place::Zero { allocated: true };
            }
            Ok(extents)
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

fn refused() -> LocalFuture<'static, Result<()>> {
    Box::pin(std::future::ready(Err(Error::invalid("this disk is only read"))))
}
