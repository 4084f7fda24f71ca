//! A published template as a storage: the raw content of its disk, which never changes.
//!
//! ```text
//!   read ─▶ index ─┬─ no chunk: zeros
//!                  └─ chunk ─▶ in memory? ─▶ being fetched? ─▶ wait for that one
//!                                                └─▶ local cache ─▶ store ─▶ decompress, compare the digest
//! ```
//!
//! 1. Every byte that a read returns belongs to a content whose digest the index has. The index itself is known by
//!    its own digest ([`TemplateStorage::digest`]), so that one value stands for the whole disk.
//! 2. Concurrent reads of a chunk share one fetch. Fetches, digests and decompression run on the threads of
//!    `runtime.rs`; a read that is dropped leaves its fetch running for those that come later. A read fails when nothing
//!    that it waits for has arrived for the deadline of the store, and at most [`LAST_TRY`] later: no bytes of its chunk, or,
//!    while the chunk waits for its turn, of any. While bytes keep coming it is held, however slow the link is.
//! 3. Memory: contents of at most [`MEMORY_BYTES_MAX`] are kept, and at most [`FETCHES_MAX`] chunks are fetched at
//!    once, for all disks that share the storage.
//! 4. A chunk that is damaged is fetched once more, past the local cache. One that is still damaged, or missing,
//!    fails the read with an error that names template and chunk.
//! 5. Reads in order make the next chunks be fetched before they are asked for: one after four chunks in order, twice
//!    as many after each further one, at most [`AHEAD_MAX`].

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use event_listener::Event;
use futures_util::future::{Either, select};
use futures_util::{StreamExt, TryStreamExt};
use tokio::sync::{Semaphore, SemaphorePermit};
use vellum_core::pin::{Proof, ProofKind};
use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, ImageOffset, ImageSpan, Limits, LocalFuture, Result,
    Storage, StorageRun, Zeroes, lock,
};

use super::chunk::{self, OVERHEAD};
use super::index::{Digest, INDEX_BYTES_MAX, Index};
use super::name::{TemplateName, index_key, resolve};
use super::push::chunk_key;
use crate::base::ground::Real;
use crate::cache::ChunkCache;
use crate::runtime::{blocking, job};
use crate::silence::{Failure, Ground as _, Heard, LAST_TRY, Patience};
use crate::store::Store;

/// Contents that are kept in memory, in bytes.
pub(crate) const MEMORY_BYTES_MAX: u64 = 32 << 20;

/// Chunks that are fetched at once.
pub(crate) const FETCHES_MAX: usize = 16;

/// Chunks that are fetched ahead of reads in order.
pub(crate) const AHEAD_MAX: u32 = 8;

/// Chunks of one read that are waited for at once.
const OF_ONE_READ: usize = 8;

/// Chunks in order before the next ones are fetched ahead.
const IN_ORDER: u32 = 4;

/// A template that is open. The module has the rules.
pub struct TemplateStorage {
    name: String,
    limits: Limits,
    chunks: Arc<Chunks>,
    order: Mutex<Order>,
}

struct Chunks {
    store: Store,
    index: Index,
    /// The URL of the version.
    url: String,
    cache: Option<Arc<ChunkCache>>,
    ground: Real,
    memory: Mutex<Memory>,
    turns: Semaphore,
    /// When bytes of any chunk arrived last.
    heard: Heard,
    counters: Counters,
}

/// A chunk that is being fetched, or has been.
struct Flight {
    /// When bytes of it arrived last, or else when its silence began.
    heard: Heard,
    has_turn: AtomicBool,
    /// Why its last try failed.
    failure: Mutex<Option<Error>>,
    landed: OnceLock<Result<Bytes, Failure>>,
    done: Event,
}

#[derive(Default)]
struct Memory {
    flights: HashMap<u32, Arc<Flight>>,
    contents: HashMap<u32, Kept>,
    bytes: u64,
    ticks: u64,
}

struct Kept {
    content: Bytes,
    used: u64,
}

/// How reads follow each other.
#[derive(Debug, Default)]
struct Order {
    /// The chunk in which the last read ended.
    last: u32,
    /// Chunks in order until there.
    run: u32,
    /// The first chunk that was not fetched ahead.
    ahead: u32,
}

#[derive(Default)]
struct Counters {
    fetched: AtomicU64,
    fetched_bytes: AtomicU64,
    cached: AtomicU64,
    shared: AtomicU64,
    damaged: AtomicU64,
    repeated: AtomicU64,
    failed: AtomicU64,
}

/// What a template did since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TemplateCounts {
    /// Chunks that came from the store.
    pub fetched: u64,
    /// Their length there, in bytes.
    pub fetched_bytes: u64,
    /// Chunks that came from the local cache.
    pub cached: u64,
    /// Reads that waited for the fetch of another.
    pub shared: u64,
    /// Objects that were something else than their chunk.
    pub damaged: u64,
    /// Requests that were made again after one had failed.
    pub repeated: u64,
    /// Chunks that could not be had.
    pub failed: u64,
}

impl TemplateStorage {
    /// Opens the template at a URL, `STORE/NAME[:VERSION]`; the newest version when it names none.
    ///
    /// # Errors
    /// `NotFound` when it is not published, `Corrupt` or `Unsupported` for its index; those of the store.
    pub async fn open(
        store: &Store,
        name: &TemplateName,
        cache: Option<Arc<ChunkCache>>,
    ) -> Result<Arc<Self>> {
        let version = resolve(store, name).await?;
        let key = index_key(&name.name, &version);
        let url = format!("{}/{}:{version}", store.url(), name.name);
        let bytes = store.get(&key, INDEX_BYTES_MAX).await.map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::new(
                ErrorKind::NotFound,
                format!("{url} is not published; `vellum template list {}` shows what is", store.url()),
            ),
            _ => error,
        })?;
        let index = blocking(move || Index::parse(bytes))?.await.context(|| format!("can't open {url}"))?;
        let limits = Limits {
            block_size: BlockSize::from_shift(0),
            physical_block: BlockSize::PAGE,
            fixed_len: true,
            read_only: true,
            grows_zeroed: false,
            fast_zeroes: false,
            discards: false,
            prefers_written: false,
        };
        let chunks = Arc::new(Chunks {
            store: store.clone(),
            index,
            url: url.clone(),
            cache,
            ground: Real::new()?,
            memory: Mutex::default(),
            turns: Semaphore::new(FETCHES_MAX),
            heard: Heard::default(),
            counters: Counters::default(),
        });
        Ok(Arc::new(Self { name: url, limits, chunks, order: Mutex::default() }))
    }

    /// The digest of the index, which stands for the whole content.
    pub fn digest(&self) -> Digest {
        self.chunks.index.digest()
    }

    /// Which chunks make it up.
    pub fn index(&self) -> &Index {
        &self.chunks.index
    }

    /// What it did until now.
    pub fn counts(&self) -> TemplateCounts {
        let Counters { fetched, fetched_bytes, cached, shared, damaged, repeated, failed } =
            &self.chunks.counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TemplateCounts {
            fetched: load(fetched),
            fetched_bytes: load(fetched_bytes),
            cached: load(cached),
            shared: load(shared),
            damaged: load(damaged),
            repeated: load(repeated),
            failed: load(failed),
        }
    }

    /// The chunks that a run of bytes touches, within the disk.
    fn touched(&self, span: ImageSpan) -> std::ops::Range<u32> {
        let index = &self.chunks.index;
        let end = span.end().bytes().min(index.size());
        let start = span.start().bytes().min(end);
        let number = |chunk: u64| u32::try_from(chunk).expect("the index numbers them");
        number(start / index.chunk_size())..number(end.div_ceil(index.chunk_size()))
    }

    async fn fill(&self, at: ImageOffset, mut buffer: Buffer) -> Result<Buffer> {
        let index = &self.chunks.index;
        let span = at.span(buffer.len() as u64);
        let touched = self.touched(span);
        self.go_ahead(&touched);
        let contents = touched.clone().map(|number| async move {
            let content = match index.chunk(number) {
                Some(digest) => Some(Chunks::content(&self.chunks, number, digest).await?),
                None => None,
            };
            Ok::<_, Error>((number, content))
        });
        let mut contents = futures_util::stream::iter(contents).buffered(OF_ONE_READ);
        let mut filled = 0;
        while let Some((number, content)) = contents.try_next().await? {
            let start = u64::from(number) * index.chunk_size();
            let from = at.bytes().saturating_sub(start).min(index.chunk_size());
            let to = (span.end().bytes() - start).min(index.chunk_len(number) as u64);
            let (from, to) = (in_memory(from), in_memory(to));
            match content {
                Some(content) => buffer.copy_from(filled, &content[from..to]),
                None => zero(&mut buffer, filled, to - from),
            }
            filled += to - from;
        }
        drop(contents);
        let len = buffer.len();
        zero(&mut buffer, filled, len - filled);
        Ok(buffer)
    }

    /// Begins to fetch what reads in order will want next.
    fn go_ahead(&self, touched: &std::ops::Range<u32>) {
        let index = &self.chunks.index;
        let wanted = lock(&self.order).next(touched);
        let last = u32::try_from(index.size().div_ceil(index.chunk_size())).expect("the index numbers them");
        for number in wanted.start..wanted.end.min(last) {
            if let Some(digest) = index.chunk(number) {
                let now = self.chunks.ground.now();
                drop(Chunks::flight(&self.chunks, number, digest, now));
            }
        }
    }
}

impl Order {
    /// After a read of these chunks: which to fetch ahead.
    fn next(&mut self, touched: &std::ops::Range<u32>) -> std::ops::Range<u32> {
        let Some(last) = touched.end.checked_sub(1).filter(|_| !touched.is_empty()) else { return 0..0 };
        let goes_on = touched.start == self.last || touched.start == self.last.saturating_add(1);
        self.run = if goes_on { self.run.saturating_add(last - self.last) } else { 0 };
        self.last = last;
        if self.run < IN_ORDER {
            self.ahead = 0;
            return 0..0;
        }
        let depth = AHEAD_MAX.min(1 << (self.run - IN_ORDER).min(16));
        let from = touched.end.max(self.ahead);
        let to = touched.end.saturating_add(depth);
        self.ahead = self.ahead.max(to);
        from..to.max(from)
    }
}

fn zero(buffer: &mut Buffer, at: usize, len: usize) {
    const ZEROS: [u8; 4096] = [0; 4096];
    let mut done = 0;
    while done < len {
        let now = ZEROS.len().min(len - done);
        buffer.copy_from(at + done, &ZEROS[..now]);
        done += now;
    }
}

fn in_memory(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a part of a chunk")
}

impl Chunks {
    async fn content(this: &Arc<Self>, number: u32, digest: Digest) -> Result<Bytes> {
        // Since when nothing that this read waits for has arrived.
        let mut silent_since = this.ground.now();
        loop {
            let flight = match Self::flight(this, number, digest, silent_since) {
                Found::Content(content) => return Ok(content),
                Found::Flight(flight) => flight,
            };
            match this.wait(&flight, &mut silent_since).await {
                Ok(Ok(content)) => return Ok(content.clone()),
                // It was begun for an earlier reader, or ahead: this one has time left.
                Ok(Err(Failure::Passing(_))) if this.ground.now() < silent_since + this.store.deadline() => {}
                Ok(Err(Failure::Passing(error))) => {
                    return Err(this.explain(number, digest, this.store.given_up(error.clone())));
                }
                Ok(Err(Failure::Final(error))) => return Err(this.explain(number, digest, error.clone())),
                Err(error) => return Err(this.explain(number, digest, error)),
            }
        }
    }

    /// The content, or the fetch that will give it. One is begun if there is none.
    fn flight(this: &Arc<Self>, number: u32, digest: Digest, silent_since: Duration) -> Found {
        let mut memory = lock(&this.memory);
        memory.ticks += 1;
        let now = memory.ticks;
        if let Some(kept) = memory.contents.get_mut(&number) {
            kept.used = now;
            return Found::Content(kept.content.clone());
        }
        if let Some(flight) = memory.flights.get(&number) {
            add(&this.counters.shared, 1);
            return Found::Flight(flight.clone());
        }
        let flight = Arc::new(Flight {
            heard: Heard::at(silent_since),
            has_turn: AtomicBool::new(false),
            failure: Mutex::default(),
            landed: OnceLock::new(),
            done: Event::new(),
        });
        memory.flights.insert(number, flight.clone());
        drop(memory);
        let (chunks, begun) = (this.clone(), flight.clone());
        this.ground.spawn(Box::pin(async move {
            let fetched = chunks.fetch(number, digest, &begun).await;
            chunks.land(number, &begun, fetched);
        }));
        Found::Flight(flight)
    }

    /// The end of a fetch. An error when nothing arrives for too long.
    async fn wait<'a>(
        &self,
        flight: &'a Flight,
        silent_since: &mut Duration,
    ) -> Result<&'a Result<Bytes, Failure>, Error> {
        loop {
            let listener = flight.done.listen();
            if let Some(landed) = flight.landed.get() {
                return Ok(landed);
            }
            // While bytes of others arrive, its turn will come.
            let heard = if flight.has_turn.load(Ordering::Acquire) { &flight.heard } else { &self.heard };
            *silent_since = (*silent_since).max(heard.time());
            let until = *silent_since + self.store.deadline() + LAST_TRY;
            let Some(left) = until.checked_sub(self.ground.now()).filter(|left| !left.is_zero()) else {
                let silent = || Error::new(ErrorKind::Io, "the store is silent");
                return Err(self.store.given_up(lock(&flight.failure).clone().unwrap_or_else(silent)));
            };
            select(listener, self.ground.sleep(left)).await;
        }
    }

    /// Keeps a content that has arrived, lets go of those that were not used for longest, and wakes those that wait.
    fn land(&self, number: u32, flight: &Flight, fetched: Result<Bytes, Failure>) {
        {
            let mut memory = lock(&self.memory);
            memory.flights.remove(&number);
            if let Ok(content) = &fetched {
                let used = memory.ticks;
                memory.bytes += content.len() as u64;
                memory.contents.insert(number, Kept { content: content.clone(), used });
                while memory.bytes > MEMORY_BYTES_MAX {
                    let oldest =
                        memory.contents.iter().min_by_key(|(_, kept)| kept.used).map(|(number, _)| *number);
                    let Some(kept) = oldest.and_then(|oldest| memory.contents.remove(&oldest)) else { break };
                    memory.bytes -= kept.content.len() as u64;
                }
            }
        }
        drop(flight.landed.set(fetched));
        flight.done.notify(usize::MAX);
    }

    /// Takes a turn, unless nothing at all arrives for too long.
    async fn take_turn(&self, flight: &Flight) -> Result<SemaphorePermit<'_>, Failure> {
        let mut turn = pin!(self.turns.acquire());
        loop {
            flight.heard.note(self.heard.time());
            let until = flight.heard.time() + self.store.deadline();
            let Some(left) = until.checked_sub(self.ground.now()).filter(|left| !left.is_zero()) else {
                let why = "all requests that may be made at once wait for the store";
                return Err(Failure::Passing(Error::new(ErrorKind::Io, why)));
            };
            if let Either::Left((turn, _)) = select(turn.as_mut(), self.ground.sleep(left)).await {
                flight.has_turn.store(true, Ordering::Release);
                return Ok(turn.expect("the semaphore is never closed"));
            }
        }
    }

    async fn fetch(&self, number: u32, digest: Digest, flight: &Flight) -> Result<Bytes, Failure> {
        let _turn = self.take_turn(flight).await?;
        let len = self.index.chunk_len(number);
        if let Some(cache) = &self.cache
            && let Some(object) = cache.get(digest.0).await
        {
            if let Ok(content) = decode(object, len, digest).await {
                add(&self.counters.cached, 1);
                return Ok(content);
            }
            cache.refuse(digest.0);
        }
        let key = chunk_key(digest);
        let patience = Patience {
            ground: &self.ground,
            timeout: self.store.deadline(),
            heard: &flight.heard,
            heard_any: &self.heard,
            failure: &flight.failure,
            repeated: &self.counters.repeated,
        };
        let mut is_again = false;
        loop {
            let decoded = match patience.whole(|| self.store.parts(&key, len as u64 + OVERHEAD)).await {
                Ok(object) => {
                    add(&self.counters.fetched, 1);
                    add(&self.counters.fetched_bytes, object.len() as u64);
                    let decoded = decode(object.clone(), len, digest).await;
                    decoded.map(|content| (object, content))
                }
                Err(Failure::Final(error)) => Err(error),
                Err(passing) => return Err(passing),
            };
            match decoded {
                Ok((object, content)) => {
                    if let Some(cache) = self.cache.clone() {
                        // The read does not wait for it.
                        let keeping = job(async move { cache.put(digest.0, object).await });
                        keeping.map_err(Failure::Final)?.detach();
                    }
                    return Ok(content);
                }
                Err(error) if error.kind() == ErrorKind::Corrupt && !is_again => {
                    add(&self.counters.damaged, 1);
                    is_again = true;
                }
                Err(error) => return Err(Failure::Final(error)),
            }
        }
    }

    /// Why a chunk cannot be had. Never `Corrupt`: that would say that the image above contradicts itself.
    fn explain(&self, number: u32, digest: Digest, error: Error) -> Error {
        add(&self.counters.failed, 1);
        let url = &self.url;
        let object = self.store.url_of(&chunk_key(digest));
        let what = match error.kind() {
            ErrorKind::NotFound => format!(
                "chunk {number} of the template {url} is missing in the store; publish the same image again with \
                 `vellum template push`, which uploads what is missing"
            ),
            ErrorKind::Corrupt => format!(
                "chunk {number} of the template {url} is damaged in the store; delete {object} and publish the same \
                 image again with `vellum template push`"
            ),
            _ => format!("chunk {number} of the template {url} cannot be read"),
        };
        error.context(what).with_kind(ErrorKind::Io)
    }
}

/// The content of a chunk, from its object.
async fn decode(object: Bytes, len: usize, digest: Digest) -> Result<Bytes> {
    blocking(move || chunk::decode(&object, len, digest))?.await
}

enum Found {
    Content(Bytes),
    Flight(Arc<Flight>),
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

fn read_only(name: &str) -> LocalFuture<'_, Result<()>> {
    let error = Error::new(ErrorKind::ReadOnly, format!("{name} is a published template and never changes"));
    Box::pin(std::future::ready(Err(error)))
}

impl Storage for TemplateStorage {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        self.chunks.index.size()
    }

    fn proof(&self) -> Option<Proof> {
        Proof::new(ProofKind::Index, self.len(), self.digest().to_string()).ok()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(self.fill(at, buffer))
    }

    fn write(&self, _at: ImageOffset, _data: Buffer) -> LocalFuture<'_, Result<()>> {
        read_only(&self.name)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn write_zeroes(&self, _span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        read_only(&self.name)
    }

    fn discard(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        read_only(&self.name)
    }

    fn set_len(&self, _len: u64) -> LocalFuture<'_, Result<()>> {
        read_only(&self.name)
    }

    fn preallocate(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        read_only(&self.name)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        const RUNS_MAX: usize = 1024;
        let index = &self.chunks.index;
        let end = span.end().min(ImageOffset::new(index.size()));
        let mut runs = Vec::new();
        let touched = self.touched(span);
        let mut number = touched.start;
        let mut at = span.start();
        while number < touched.end && runs.len() < RUNS_MAX {
            let (is_data, next) = index.run_from(number, touched.end);
            let until = ImageOffset::new(u64::from(next) * index.chunk_size()).min(end);
            runs.push(StorageRun { span: ImageSpan::between(at, until), is_data });
            (number, at) = (next, until);
        }
        Box::pin(std::future::ready(Ok(runs)))
    }
}
