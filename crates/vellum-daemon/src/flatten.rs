//! Making an image independent of its backing image: data that only the backing images have is copied into it, and
//! the reference to them is removed.
//!
//! 1. The guest sees the same before, meanwhile and afterwards, also after a crash at any moment: what is written is
//!    what the disk reads as anyway, and the header changes atomically ([`Format::detach`]).
//! 2. The images below are open, and so locked, until the reference is gone.
//! 3. Ranges that read as zero below are not copied: without an image below they read as zero as well.
//! 4. A file below that another program changes meanwhile is noticed after each read and before anything of it is written
//!    ([`BaseFiles`]), and at the end. It ends there, and the image records from the beginning what it stands on.
//! 5. If it stops or fails, the image keeps its backing image and the data copied so far. The next run continues.
//!
//! [`Format::detach`]: vellum_format::image::Format::detach

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vellum_core::{
    Buffer, Context, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Place,
    Result, SharedDisk, WriteFlags, ZeroFlags,
};
use vellum_layer::Chain;
use vellum_layer::hydrate::BaseFiles;

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
/// `Unsupported` when the image has snapshots, `Changed` when a file below has changed since, the errors of the images, and
/// `Closed` when it was stopped.
pub async fn flatten(
    path: &Path,
    options: &ImageOptions,
    pieces_at_once: usize,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<Flattened> {
    let mut chain = stop.or_stopped(open_image(path, options)).await?;
    let stop = &*stop.flag;
    pin(&mut chain).await?;
    let done = flatten_open(&chain, pieces_at_once, stop, progress).await;
    let closed = chain.close().await;
    let flattened = done.and_then(|flattened| closed.map(|()| flattened))?;
    let top = chain.top();
    top.head.kind().format().detach(&top.storage, false, stop).await?;
    Ok(flattened)
}

/// Records what proves the images below: from the first copy on the image is refused over others. One that has no place for
/// that is only watched.
async fn pin(chain: &mut Chain) -> Result<()> {
    if chain.has_snapshots().await? {
        return Ok(()); // it is refused
    }
    match chain.pin_below().await {
        Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::NoSpace) => Ok(()),
        pinned => pinned,
    }
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
    let base_files = chain.base_files();
    let missing: SharedDisk = Arc::new(Missing { disk: disk.clone(), base_files: base_files.clone() });
    let copying = CopyOptions {
        pieces_at_once,
        sparse_bytes: SPARSE_BYTES,
        target_is_zero: true,
        skips_same: false,
        overlaps: false,
        looks_up: false,
        in_small_pieces: false,
        out_of_order: false,
        compression: None,
        rate: None,
        stop,
    };
    let copied = copy(&missing, disk, copying, &|bytes| progress(size, bytes)).await;
    // What they call zero was not read.
    let copied = match copied {
        Ok(_) => base_files.check().await,
        Err(error) => Err(error),
    };
    copied.context(|| format!("can't copy {} into {}", below.path.display(), top.path.display()))?;
    let bytes_written = chain.top_tally.data.counts().bytes_written;
    let backing = top.head.backing().map(|(name, _)| PathBuf::from(name));
    Ok(Flattened { backing, bytes_written })
}

/// A disk as a source of what its image does not have: the rest counts as zero, which is not copied.
struct Missing {
    disk: SharedDisk,
    base_files: Arc<BaseFiles>,
}

impl Disk for Missing {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.disk.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let read = self.disk.read(at, buffer).await?;
            self.base_files.check().await?;
            Ok(read)
        })
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

#[cfg(test)]
mod tests {
    use vellum_format::qcow2;
    use vellum_io::{File, IoMode, OpenOptions};

    use super::*;

    /// Another program writes the base between two pieces: no byte of the new content comes into the image, which keeps its
    /// base, and records which one.
    #[test]
    fn a_base_that_changes_meanwhile_ends_it_without_a_mixture() {
        const LEN: usize = 8 << 20;
        let dir = std::env::temp_dir().join(format!("vellum-flatten-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let (base, image) = (dir.join("base.raw"), dir.join("clone.qcow2"));
        std::fs::write(&base, vec![1; LEN]).expect("a base");
        let time = std::fs::metadata(&base).and_then(|facts| facts.modified()).expect("its time");
        vellum_io::run(IoMode::Threads, async || {
            let storage = File::create_new(&image, OpenOptions::writing()).await.expect("a file");
            let options = qcow2::CreateOptions {
                size: LEN as u64,
                backing: Some(("base.raw".to_owned(), Some("raw".to_owned()))),
                ..qcow2::CreateOptions::default()
            };
            qcow2::create(&*storage, None, &options).await.expect("an image");
            drop(storage);
            let changes = |_, done| {
                if done > 0 && done < LEN as u64 {
                    std::fs::write(&base, vec![2; LEN]).expect("no lock is asked for");
                }
            };
            let mut stop = Stop::new().expect("signals");
            let options = ImageOptions::default();
            let error = flatten(&image, &options, 1, &mut stop, &changes).await.expect_err("it has changed");
            assert_eq!(error.kind(), ErrorKind::Changed, "{}", error.chain());
            assert!(error.chain().contains("base.raw has changed"), "{}", error.chain());
            let refused =
                flatten(&image, &options, 1, &mut stop, &|_, _| {}).await.expect_err("it is another base");
            assert_eq!(refused.kind(), ErrorKind::Changed, "{}", refused.chain());
            std::fs::write(&base, vec![1; LEN]).expect("the old content");
            let file = std::fs::OpenOptions::new().write(true).open(&base).expect("it is there");
            file.set_modified(time).expect("and its time");
            let flattened =
                flatten(&image, &options, 1, &mut stop, &|_, _| {}).await.expect("it is the old one");
            assert!((1..LEN as u64).contains(&flattened.bytes_written), "it continues: {flattened:?}");
            std::fs::remove_file(&base).expect("nobody needs it");
            let chain = open_image(&image, &options).await.expect("it stands alone");
            let read = chain.disk().read(GuestOffset::ZERO, Buffer::zeroed(LEN)).await.expect("a read");
            assert!(read.to_vec().iter().all(|byte| *byte == 1), "nothing of the other content");
            chain.close().await.expect("it is closed");
        })
        .expect("a worker");
        std::fs::remove_dir_all(&dir).expect("it is there");
    }
}
