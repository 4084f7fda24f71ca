//! Templates that are published in a store: pushed from any image, pulled into one, listed, removed; and the
//! collection of chunks that no template needs.
//!
//! ```text
//!   image ─▶ Chain ─▶ Disk ─▶ chunks that are not zero ─▶ Push ─▶ store ─▶ TemplateStorage ─▶ raw Disk ─▶ image
//! ```
//!
//! 1. Where the map says that the disk is zero nothing is read, and zeros that are read are not pushed.
//! 2. [`CHUNKS_AT_ONCE`] chunks are in memory at once, each as content and compressed.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use vellum_core::{
    Buffer, Context, GuestOffset, GuestSpan, HostTally, LocalFuture, Result, SharedDisk, is_zero,
};
use vellum_format::raw::Raw;
use vellum_remote::template::{self, Collection, Push, TemplateStorage};
pub use vellum_remote::template::{
    CHUNK_SHIFT_DEFAULT, Collected, PublishedVersion, PushCounts, Pushed, TemplateCounts, TemplateName,
};
use vellum_remote::{Settings, Store};

use crate::chunk_cache::CacheChoice;
use crate::convert::{Conversion, Step, convert_disk};
use crate::copy::zero_runs;
use crate::image::{ImageOptions, open_image};
use crate::signals::Stop;

/// Chunks that are read, compressed and uploaded at once.
const CHUNKS_AT_ONCE: usize = 8;

/// The store of a template's URL, and the template's name in it.
fn split(url: &str) -> Result<(Store, TemplateName)> {
    let (store, name) = TemplateName::split(url)?;
    Ok((Store::open(store, &Settings::from_env())?, name))
}

/// The versions of all templates in the store at a URL: by name, then by age, oldest first.
///
/// # Errors
/// Those of the store.
pub async fn list(store: &str) -> Result<Vec<PublishedVersion>> {
    let store = Store::open(store, &Settings::from_env())?;
    template::list(&store, None).await
}

/// Removes a version. Its chunks stay until they are collected.
///
/// # Errors
/// `Invalid` without a version, `NotFound` when the store does not have it; those of the store.
pub async fn remove(url: &str) -> Result<()> {
    let (store, name) = split(url)?;
    template::remove(&store, &name).await
}

/// Deletes the chunks in the store at a URL that no template needs and that are older than `grace`. With `dry_run`
/// they are only counted.
///
/// # Errors
/// `Locked` when a push or another collection is under way; `Corrupt` when an index cannot be read; those of the
/// store.
pub async fn collect(store: &str, grace: Duration, dry_run: bool, stop: &mut Stop) -> Result<Collected> {
    let store = Store::open(store, &Settings::from_env())?;
    let collection = stop.or_stopped(Collection::begin(&store)).await?;
    let collected = stop.or_stopped(collection.run(grace, dry_run)).await;
    collection.end().await;
    collected
}

/// Publishes the disk of an image. Must be called on a worker. `progress` gets the size of the disk and the bytes
/// done.
///
/// # Errors
/// Those of the image and of the store; `Closed` when it was stopped. What was uploaded until then is not uploaded
/// again.
pub async fn push(
    image: &Path,
    options: &ImageOptions,
    url: &str,
    chunk_shift: u32,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<Pushed> {
    let (store, name) = split(url)?;
    let options = ImageOptions { read_only: true, ..options.clone() };
    let chain = stop.or_stopped(open_image(image, &options)).await?;
    let pushed = push_disk(chain.disk(), &store, &name, chunk_shift, stop, progress).await;
    let closed = chain.close().await;
    let pushed = pushed.context(|| format!("can't publish {} as {url}", image.display()))?;
    closed?;
    Ok(pushed)
}

async fn push_disk(
    disk: &SharedDisk,
    store: &Store,
    name: &TemplateName,
    chunk_shift: u32,
    stop: &mut Stop,
    progress: &dyn Fn(u64, u64),
) -> Result<Pushed> {
    let push = stop.or_stopped(Push::begin(store, name, disk.geometry().size, chunk_shift)).await?;
    match stop.or_stopped(push_chunks(&push, disk, progress)).await {
        Ok(()) => stop.or_stopped(push.commit()).await,
        Err(error) => {
            push.abandon().await;
            Err(error)
        }
    }
}

async fn push_chunks(push: &Push, disk: &SharedDisk, progress: &dyn Fn(u64, u64)) -> Result<()> {
    let size = disk.geometry().size;
    let mut next = NextChunk { disk, unit: push.chunk_size(), at: 0, known: VecDeque::new() };
    let mut running: FuturesUnordered<LocalFuture<'_, Result<()>>> = FuturesUnordered::new();
    loop {
        while running.len() < CHUNKS_AT_ONCE {
            let Some((number, span)) = next.find().await? else { break };
            running.push(Box::pin(push_chunk(push, disk, number, span)));
        }
        progress(size, next.at.min(size));
        match running.next().await {
            Some(done) => done?,
            None => return Ok(()),
        }
    }
}

async fn push_chunk(push: &Push, disk: &SharedDisk, number: u32, span: GuestSpan) -> Result<()> {
    let len = usize::try_from(span.len()).expect("a chunk is small");
    let context = || format!("can't read {len} bytes at {}", span.start());
    let content = disk.read(span.start(), Buffer::for_overwrite(len)).await.context(context)?.to_vec();
    if is_zero(&content) {
        return Ok(());
    }
    push.add(number, content).await
}

/// Goes through a disk by chunks, and passes those by that are zero according to the map.
struct NextChunk<'a> {
    disk: &'a SharedDisk,
    unit: u64,
    /// Where the next chunk begins.
    at: u64,
    known: VecDeque<(GuestSpan, bool)>,
}

impl NextChunk<'_> {
    async fn find(&mut self) -> Result<Option<(u32, GuestSpan)>> {
        let size = self.disk.geometry().size;
        while self.at < size {
            let zeros = self.zeros_until().await?;
            let whole = if zeros == size { size } else { zeros - zeros % self.unit };
            if whole > self.at {
                self.at = whole;
                continue;
            }
            let span = GuestOffset::new(self.at).span(self.unit.min(size - self.at));
            let number = u32::try_from(self.at / self.unit).expect("the push has checked it");
            self.at += self.unit;
            return Ok(Some((number, span)));
        }
        Ok(None)
    }

    /// Up to where the disk is zero from the next chunk on, as far as the map says.
    async fn zeros_until(&mut self) -> Result<u64> {
        let size = self.disk.geometry().size;
        let mut until = self.at;
        loop {
            while self.known.front().is_some_and(|(run, _)| run.end().bytes() <= until) {
                self.known.pop_front();
            }
            match self.known.front() {
                Some((run, true)) => until = run.end().bytes(),
                Some((_, false)) => return Ok(until),
                None if until >= size => return Ok(size),
                None => {
                    let rest = GuestOffset::new(until).span(size - until);
                    self.known = zero_runs(&[self.disk], rest).await?.into();
                }
            }
        }
    }
}

/// What a pull took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// The URL, with the version.
    pub url: String,
    /// The size of the disk in bytes.
    pub size: u64,
    /// What was fetched.
    pub counts: TemplateCounts,
}

/// Copies a published template into an image of any format. Must be called on a worker.
///
/// # Errors
/// Those of the store, and of [`convert`](crate::convert::convert).
pub async fn pull(
    url: &str,
    conversion: &Conversion,
    cache: Option<&CacheChoice>,
    stop: &mut Stop,
    progress: &dyn Fn(Step),
) -> Result<Pulled> {
    let (store, name) = split(url)?;
    let cache = match cache {
        Some(choice) => choice.open().await?,
        None => None,
    };
    let opened = TemplateStorage::open(&store, &name, cache);
    let template = stop.or_stopped(opened).await?;
    let disk: SharedDisk = Raw::open(template.clone(), true, &HostTally::default());
    convert_disk(&disk, conversion, stop, progress).await?;
    Ok(Pulled {
        url: vellum_core::Storage::name(&*template).to_owned(),
        size: disk.geometry().size,
        counts: template.counts(),
    })
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{Disk, MemoryDisk, WriteFlags};

    use super::*;

    #[test]
    fn chunks_that_the_map_knows_to_be_zero_are_passed_by() {
        const UNIT: u64 = 64 << 10;
        let nothing: SharedDisk = MemoryDisk::new(0);
        let disk = MemoryDisk::over(10 * UNIT + 512, Some(nothing));
        block_on(async {
            for at in [0, 3 * UNIT + 512, 4 * UNIT, 10 * UNIT] {
                let data = Buffer::copy_of(&[1; 512]);
                disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.expect("writes");
            }
            let disk: SharedDisk = disk;
            for (unit, expected) in [(UNIT, &[0, 3, 4, 10][..]), (2 * UNIT, &[0, 1, 2, 5]), (16 * UNIT, &[0])]
            {
                let mut next = NextChunk { disk: &disk, unit, at: 0, known: VecDeque::new() };
                let mut found = Vec::new();
                while let Some((number, span)) = next.find().await.expect("a map") {
                    assert_eq!(span.start().bytes(), u64::from(number) * unit);
                    assert!(span.len() == unit || span.end().bytes() == 10 * UNIT + 512, "{span:?}");
                    found.push(number);
                }
                assert_eq!(found, expected, "{unit}");
            }
        });
    }
}
