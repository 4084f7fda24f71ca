//! A cache of remote chunks in a directory of this host, shared by all disks and all processes that name it.
//!
//! ```text
//!   DIR/0 … DIR/f                 16 parts, by the first digit of the key; each has a sixteenth of the bound
//!   DIR/a/abcd…                   an entry, by its key:
//!
//!       0   8  "VELLUMc1"         8   8  length of the payload, big-endian
//!      16  32  the key           48  32  digest of the payload
//!      80   …  the payload
//!
//!   DIR/a/tmp-PID-N               an entry that is being written; renamed when it is whole
//!   DIR/CACHEDIR.TAG              says to programs that make backups that this is a cache
//! ```
//!
//! A chunk of a template has the digest of its content as its key, and the object as the payload. A block of an
//! object that is read by URL has the digest of URL, strong entity tag and block number ([`key_of_block`]).
//!
//! 1. An entry is used only after its key, length and digest were compared. So nothing is flushed, a crash may leave
//!    anything, and the directory may be damaged or deleted at any time.
//! 2. The cache never fails a read. What goes wrong is a miss, and it is counted.
//! 3. A part that is over its share loses the entries that were not used for longest. A process looks at a part when
//!    it first writes there, and then whenever it has written a sixteenth of the part's share. So the total exceeds
//!    the bound by at most a sixteenth for each further process.
//! 4. At most [`WRITES_MAX`] entries are written at once; others are dropped, and counted. After a failed write, such
//!    as on a full disk, nothing is written for [`PAUSE`].
//! 5. A directory that does not answer, such as one on a hung file system, holds nobody up: after [`ANSWER_TIME_MAX`] an
//!    entry counts as a miss, and for [`PAUSE`] nothing is asked; then one request tries again. The cache has threads of
//!    its own, for which nobody waits. One that does not answer when it is opened is not used until a later opening.
//! 6. The directory is made for its owner alone, and one of another owner, one that all may write to, or one with
//!    something else in it is refused. Nothing is read or deleted but regular files with the names of entries, and
//!    symbolic links are not followed. Who can write to it can change what disks read from URLs, but not
//!    what they read from templates: contents of chunks are compared with the index.

use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use futures_util::future::{BoxFuture, Either, FutureExt as _, Shared, select};
use rustix::fs::OFlags;
use tokio::sync::Semaphore;
use vellum_core::{Context, Error, Result, lock};

use crate::runtime::{self, Job, Threads};

/// The smallest bound of a cache, in bytes.
pub const CACHE_BYTES_MIN: u64 = 64 << 20;

/// The bound unless the user says otherwise, in bytes.
pub const CACHE_BYTES_DEFAULT: u64 = 10 << 30;

/// The longest payload, in bytes.
pub const PAYLOAD_MAX: u64 = 8 << 20;

const PARTS: usize = 16;

/// The file that marks a cache (bford.info/cachedir).
const TAG: &str = "CACHEDIR.TAG";
const TAG_TEXT: &[u8] =
    b"Signature: 8a477f597d28d172789f06886806bc55\n# Chunks that Vellum fetched. Safe to delete.\n";
const HEADER: usize = 80;
const MAGIC: &[u8; 8] = b"VELLUMc1";

/// Entries written at once.
const WRITES_MAX: usize = 16;

/// How long an entry is waited for.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(1);

/// How long a directory is waited for when it is opened.
const OPEN_TIME_MAX: Duration = Duration::from_secs(5);

/// Threads that wait for the directory.
const THREADS_MAX: usize = 16;

/// How long nothing is written after a write failed, and nothing is asked after the directory did not answer.
const PAUSE: Duration = Duration::from_secs(10);

/// How old the time of an entry must be to be set anew when it is used.
const STALE: Duration = Duration::from_secs(600);

/// How old a file that is being written must be to count as left behind.
const LEFT_BEHIND: Duration = Duration::from_secs(3600);

/// Entries of one part that are looked at.
const ENTRIES_MAX: usize = 1 << 20;

/// What an entry is found by: 32 bytes that no other content has.
pub type Key = [u8; 32];

/// The key of a block of an object at a URL, which has this strong entity tag.
pub fn key_of_block(url: &str, etag: &str, block: u64) -> Key {
    let mut hasher = blake3::Hasher::new();
    for part in [url.as_bytes(), etag.as_bytes(), &block.to_be_bytes()] {
        hasher.update(&(part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

/// A cache. Clones of the `Arc` share its counts.
pub struct ChunkCache {
    dir: PathBuf,
    share: u64,
    parts: [Mutex<Part>; PARTS],
    writes: Semaphore,
    resumes: Mutex<Option<Instant>>,
    /// When the next one may ask, after the directory did not answer.
    silent_until: Mutex<Option<Instant>>,
    threads: Threads,
    names: AtomicU64,
    counters: Counters,
}

/// A cache that is being opened.
struct Opening {
    dir: PathBuf,
    bytes_max: u64,
    outcome: Shared<BoxFuture<'static, Result<Arc<ChunkCache>>>>,
    /// It was waited for in vain.
    is_silent: bool,
}

/// Those that are being opened. Of a directory that does not answer there is one, however many want it.
static OPENINGS: Mutex<Vec<Opening>> = Mutex::new(Vec::new());

/// Opens a cache on a thread of its own, which may never return. Nothing when that takes too long.
async fn in_time_or_none(
    dir: &Path,
    bytes_max: u64,
    limit: Duration,
    open: impl FnOnce() -> Result<Arc<ChunkCache>> + Send + 'static,
) -> Option<Result<Arc<ChunkCache>>> {
    let is_this = |one: &Opening| one.dir == dir && one.bytes_max == bytes_max;
    let begun = {
        let mut all = lock(&OPENINGS);
        match all.iter().find(|one| is_this(one)) {
            Some(one) => Ok((one.outcome.clone(), if one.is_silent { Duration::ZERO } else { limit })),
            None => Threads::new("vellum-cache", 1).map(|threads| {
                let opening = async move { threads.run(open).await };
                let outcome = opening.boxed().shared();
                let dir = dir.to_owned();
                all.push(Opening { dir, bytes_max, outcome: outcome.clone(), is_silent: false });
                (outcome, limit)
            }),
        }
    };
    let begun = begun.and_then(|(outcome, limit)| {
        let _in_runtime = runtime::start()?.enter();
        Ok((outcome, Box::pin(tokio::time::sleep(limit))))
    });
    let (outcome, limit) = match begun {
        Ok(begun) => begun,
        Err(error) => return Some(Err(error)),
    };
    match select(outcome.clone(), limit).await {
        Either::Left((opened, _)) => {
            let ended = |one: &mut Opening| one.outcome.ptr_eq(&outcome);
            drop(lock(&OPENINGS).extract_if(.., ended).collect::<Vec<_>>());
            Some(opened)
        }
        Either::Right(_) => {
            let mut all = lock(&OPENINGS);
            if let Some(one) = all.iter_mut().find(|one| one.outcome.ptr_eq(&outcome) && !one.is_silent) {
                one.is_silent = true;
                tracing::warn!(
                    "the cache of chunks in {} does not answer: what is opened now is read without it, until it is \
                     opened again",
                    dir.display()
                );
            }
            None
        }
    }
}

#[derive(Default)]
struct Part {
    /// Bytes written since this process looked at the part; nothing before it has.
    written: Option<u64>,
}

#[derive(Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    damaged: AtomicU64,
    written: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
    evicted: AtomicU64,
}

impl fmt::Debug for ChunkCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ChunkCache").field(&self.dir).finish()
    }
}

/// What a cache did for this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheCounts {
    /// Entries that were found.
    pub hits: u64,
    /// Entries that were not.
    pub misses: u64,
    /// Entries that were there and not what they should be. They are misses, too.
    pub damaged: u64,
    /// Entries that were written.
    pub written: u64,
    /// Entries that were not written, because too many were being written or a write had failed before.
    pub dropped: u64,
    /// Writes that failed, and entries for which the directory took too long.
    pub failed: u64,
    /// Entries that made place for others.
    pub evicted: u64,
}

impl ChunkCache {
    /// The cache in a directory, which is made if its parent exists. It holds about `bytes_max`.
    ///
    /// # Errors
    /// `Invalid` for a bound below [`CACHE_BYTES_MIN`]; when the directory cannot be made.
    pub fn open(dir: &Path, bytes_max: u64) -> Result<Arc<Self>> {
        if bytes_max < CACHE_BYTES_MIN {
            return Err(Error::invalid(format!(
                "a cache of chunks has at least {} MiB",
                CACHE_BYTES_MIN >> 20
            )));
        }
        make_dir(dir).context(|| format!("can't make the directory {} for the cache", dir.display()))?;
        // Relative names would change their meaning with the working directory.
        let dir = dir.canonicalize().context(|| format!("can't use {} for the cache", dir.display()))?;
        claim(&dir).context(|| format!("can't use {} for the cache", dir.display()))?;
        Self::of(dir, bytes_max)
    }

    /// As [`open`](Self::open), one for all of this process that name the same directory and bound. Nothing when the
    /// directory does not answer within [`OPEN_TIME_MAX`], which is logged, or did not answer others before.
    ///
    /// # Errors
    /// Those of `open`.
    pub async fn shared(dir: &Path, bytes_max: u64) -> Result<Option<Arc<Self>>> {
        static OPEN: Mutex<Vec<Weak<ChunkCache>>> = Mutex::new(Vec::new());
        let (asked, limit) = (dir.to_owned(), OPEN_TIME_MAX);
        let opened = in_time_or_none(dir, bytes_max, limit, move || Self::open(&asked, bytes_max)).await;
        let Some(own) = opened.transpose()? else { return Ok(None) };
        let mut open = lock(&OPEN);
        open.retain(|other| other.strong_count() > 0);
        let same = |other: &Arc<Self>| other.dir == own.dir && other.share == own.share;
        if let Some(other) = open.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(Some(other));
        }
        open.push(Arc::downgrade(&own));
        Ok(Some(own))
    }

    fn of(dir: PathBuf, bytes_max: u64) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            dir,
            share: bytes_max / PARTS as u64,
            parts: Default::default(),
            writes: Semaphore::new(WRITES_MAX),
            resumes: Mutex::new(None),
            silent_until: Mutex::new(None),
            threads: Threads::new("vellum-cache", THREADS_MAX)?,
            names: AtomicU64::new(0),
            counters: Counters::default(),
        }))
    }

    /// What it did until now.
    pub fn counts(&self) -> CacheCounts {
        let Counters { hits, misses, damaged, written, dropped, failed, evicted } = &self.counters;
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CacheCounts {
            hits: load(hits),
            misses: load(misses),
            damaged: load(damaged),
            written: load(written),
            dropped: load(dropped),
            failed: load(failed),
            evicted: load(evicted),
        }
    }

    /// An entry, if it is there and whole.
    pub async fn get(self: &Arc<Self>, key: Key) -> Option<Bytes> {
        let found = match self.may_ask() {
            true => {
                let cache = self.clone();
                self.in_time(self.threads.run(move || cache.read(&key))).await.flatten()
            }
            false => None,
        };
        let counter = if found.is_some() { &self.counters.hits } else { &self.counters.misses };
        add(counter, 1);
        found
    }

    /// Whether the directory answers, as far as is known. Of those that ask when it is time to try again, one may.
    fn may_ask(&self) -> bool {
        let mut silent_until = lock(&self.silent_until);
        let now = Instant::now();
        match &mut *silent_until {
            Some(until) if now < *until => false,
            Some(until) => {
                *until = now + PAUSE;
                true
            }
            None => true,
        }
    }

    /// What the work gives, unless that takes too long.
    async fn in_time<T: Send + 'static>(&self, work: Job<T>) -> Option<T> {
        let limit = {
            let _in_runtime = runtime::start().ok()?.enter();
            Box::pin(tokio::time::sleep(ANSWER_TIME_MAX))
        };
        match select(work, limit).await {
            Either::Left((value, _)) => {
                *lock(&self.silent_until) = None;
                Some(value)
            }
            Either::Right(_) => {
                *lock(&self.silent_until) = Some(Instant::now() + PAUSE);
                add(&self.counters.failed, 1);
                None
            }
        }
    }

    /// Keeps a payload, if it is worth it and possible. Returns when that is done or refused.
    pub async fn put(self: &Arc<Self>, key: Key, payload: Bytes) {
        let is_paused = lock(&self.resumes).is_some_and(|until| Instant::now() < until)
            || lock(&self.silent_until).is_some();
        let is_long = payload.len() as u64 > PAYLOAD_MAX.min(self.share / 2);
        let Ok(_permit) = self.writes.try_acquire() else {
            add(&self.counters.dropped, 1);
            return;
        };
        if is_paused || is_long {
            add(&self.counters.dropped, 1);
            return;
        }
        let cache = self.clone();
        match self.threads.run(move || cache.write(&key, &payload)).await {
            Ok(()) => add(&self.counters.written, 1),
            Err(_) => {
                add(&self.counters.failed, 1);
                *lock(&self.resumes) = Some(Instant::now() + PAUSE);
            }
        }
    }

    /// Drops an entry whose payload turned out to be something else than its key says.
    pub fn refuse(&self, key: Key) {
        add(&self.counters.damaged, 1);
        let path = self.path(&key);
        self.threads.run(move || drop(fs::remove_file(path))).detach();
    }

    fn part_dir(&self, part: usize) -> PathBuf {
        self.dir.join(format!("{part:x}"))
    }

    fn path(&self, key: &Key) -> PathBuf {
        let name = super::template::Digest(*key).to_string();
        self.part_dir(part_of(key)).join(name)
    }

    fn read(&self, key: &Key) -> Option<Bytes> {
        let path = self.path(key);
        // What is put there instead of a file is not waited for.
        let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits();
        let open = fs::OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(&path);
        let mut file = open.ok()?;
        let facts = file.metadata().ok().filter(fs::Metadata::is_file)?;
        let len = facts.len().checked_sub(HEADER as u64).filter(|len| *len <= PAYLOAD_MAX);
        let whole = len.and_then(|len| {
            let mut bytes = Vec::with_capacity(usize::try_from(len).ok()? + HEADER);
            // The file may be replaced by a longer one, not this one; yet anybody may append to it.
            Read::by_ref(&mut file).take(len + HEADER as u64).read_to_end(&mut bytes).ok()?;
            check(key, bytes)
        });
        if whole.is_none() {
            add(&self.counters.damaged, 1);
            drop(fs::remove_file(&path));
        } else if facts.modified().ok().and_then(|time| time.elapsed().ok()).is_some_and(|age| age > STALE) {
            drop(file.set_modified(SystemTime::now()));
        }
        whole
    }

    fn write(&self, key: &Key, payload: &Bytes) -> io::Result<()> {
        let part = part_of(key);
        let dir = self.part_dir(part);
        if fs::symlink_metadata(&dir).is_ok_and(|facts| !facts.is_dir()) {
            return Err(io::Error::other("a part of the cache is no directory"));
        }
        let number = self.names.fetch_add(1, Ordering::Relaxed);
        let draft = dir.join(format!("tmp-{}-{number}", std::process::id()));
        let open = || fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft);
        let mut file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_dir(&self.dir)?;
                make_dir(&dir)?;
                open()?
            }
            // Left by a process that had the same number.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_file(&draft)?;
                open()?
            }
            file => file?,
        };
        let written = file
            .write_all(&header(key, payload))
            .and_then(|()| file.write_all(payload))
            .and_then(|()| fs::rename(&draft, self.path(key)));
        if written.is_err() {
            drop(fs::remove_file(&draft));
        }
        written?;
        self.make_room(part, (payload.len() + HEADER) as u64)
    }

    /// After `len` bytes were written in a part: evicts from it when it is time to look.
    fn make_room(&self, part: usize, len: u64) -> io::Result<()> {
        let slack = self.share / 16;
        {
            let mut state = lock(&self.parts[part]);
            let written = state.written.map(|written| written + len);
            let is_due = written.is_none_or(|written| written >= slack);
            state.written = Some(if is_due { 0 } else { written.unwrap_or(0) });
            if !is_due {
                return Ok(());
            }
        }
        let mut entries = Vec::new();
        let mut total = 0_u64;
        for entry in fs::read_dir(self.part_dir(part))?.take(ENTRIES_MAX) {
            let entry = entry?;
            // What is gone meanwhile was evicted by another process.
            let Ok(facts) = entry.metadata() else { continue };
            if !facts.is_file() || !is_own(entry.file_name().as_encoded_bytes(), part) {
                continue;
            }
            let used = facts.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if entry.file_name().as_encoded_bytes().starts_with(b"tmp-") {
                if used.elapsed().is_ok_and(|age| age > LEFT_BEHIND) {
                    drop(fs::remove_file(entry.path()));
                }
                continue;
            }
            total += facts.len();
            entries.push((used, facts.len(), entry.file_name()));
        }
        if total <= self.share {
            return Ok(());
        }
        for name in victims(&mut entries, total, self.share - slack) {
            if fs::remove_file(self.part_dir(part).join(name)).is_ok() {
                add(&self.counters.evicted, 1);
            }
        }
        Ok(())
    }
}

/// The entries to delete so that at most `allowed` bytes are left, oldest first.
fn victims<T: Ord + Clone>(entries: &mut [(SystemTime, u64, T)], total: u64, allowed: u64) -> Vec<T> {
    let mut over = total.saturating_sub(allowed);
    entries.sort_unstable();
    let mut victims = Vec::new();
    for (_, len, name) in entries.iter() {
        if over == 0 {
            break;
        }
        over = over.saturating_sub(*len);
        victims.push(name.clone());
    }
    victims
}

/// Whether a file of this name in this part was made by a cache.
fn is_own(name: &[u8], part: usize) -> bool {
    let is_hex = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    name.starts_with(b"tmp-")
        || (name.len() == 64 && name.iter().all(is_hex) && name.starts_with(format!("{part:x}").as_bytes()))
}

/// Makes sure that the directory is a cache of this user, or empty.
fn claim(dir: &Path) -> io::Result<()> {
    let facts = fs::metadata(dir)?;
    let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::PermissionDenied, why.to_owned()));
    if facts.uid() != rustix::process::geteuid().as_raw() {
        return refuse(
            "it belongs to another user, who could change what disks read: name a directory of your own",
        );
    }
    if facts.mode() & 0o002 != 0 {
        return refuse(
            "all users may write to it, and could change what disks read: run chmod o-w, or name another one",
        );
    }
    for entry in fs::read_dir(dir)?.take(ENTRIES_MAX) {
        let name = entry?.file_name();
        let name = name.as_encoded_bytes();
        let is_part = matches!(name, [b'0'..=b'9' | b'a'..=b'f']);
        if !is_part && name != TAG.as_bytes() {
            return refuse("there is something else in it: name a new or an empty directory");
        }
    }
    match fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(dir.join(TAG)) {
        Ok(mut file) => file.write_all(TAG_TEXT),
        // It is there, or the directory cannot be written to: then nothing is kept, and nothing else is wrong.
        Err(_) => Ok(()),
    }
}

fn part_of(key: &Key) -> usize {
    usize::from(key[0] >> 4)
}

fn header(key: &Key, payload: &[u8]) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(&(payload.len() as u64).to_be_bytes());
    header.extend_from_slice(key);
    header.extend_from_slice(blake3::hash(payload).as_bytes());
    header
}

fn check(key: &Key, bytes: Vec<u8>) -> Option<Bytes> {
    let bytes = Bytes::from(bytes);
    let payload = (bytes.len() >= HEADER).then(|| bytes.slice(HEADER..))?;
    (header(key, &payload) == bytes[..HEADER]).then_some(payload)
}

fn make_dir(dir: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;

    use super::*;
    use crate::tests::Directory;

    fn key(number: u64) -> Key {
        key_of_block("u", "e", number)
    }

    fn payload(number: u64, len: usize) -> Bytes {
        let mut bytes = vec![0; len];
        vellum_core::Random::from_seed(number).fill(&mut bytes);
        bytes.into()
    }

    fn size_of(dir: &Path) -> u64 {
        let entries = fs::read_dir(dir).expect("lists").map(|entry| entry.expect("an entry"));
        entries
            .map(|entry| match entry.metadata().expect("facts") {
                facts if facts.is_dir() => size_of(&entry.path()),
                facts => facts.len(),
            })
            .sum()
    }

    #[test]
    fn a_directory_that_does_not_answer_holds_nobody_up() {
        let directory = Directory::new("cache-silent");
        let cache = ChunkCache::open(&directory.0.join("chunks"), CACHE_BYTES_MIN).expect("opens");
        block_on(cache.put(key(1), payload(1, 1000)));
        // All of its threads wait, as they do for a file system that does not answer.
        let gate = Arc::new(Mutex::new(()));
        let held = lock(&gate);
        for _ in 0..THREADS_MAX {
            let gate = gate.clone();
            cache.threads.run(move || drop(lock(&gate))).detach();
        }
        for _ in 0..100 {
            assert_eq!(block_on(cache.get(key(1))), None);
        }
        block_on(cache.put(key(2), payload(2, 1000)));
        let counts = cache.counts();
        assert_eq!((counts.failed, counts.misses, counts.dropped), (1, 100, 1), "only the first one waits");
        assert_eq!(block_on(runtime::blocking(|| 1).expect("starts")), 1, "other work goes on");
        drop(held);
        *lock(&cache.silent_until) = Some(Instant::now());
        assert_eq!(block_on(cache.get(key(1))), Some(payload(1, 1000)), "it answers again");
        block_on(cache.put(key(2), payload(2, 1000)));
        assert_eq!(cache.counts().written, 2);
    }

    #[test]
    fn a_directory_that_does_not_answer_is_opened_once_and_not_waited_for() {
        let directory = Directory::new("cache-hung");
        let dir = directory.0.join("chunks");
        let gate = Arc::new(Mutex::new(()));
        let held = lock(&gate);
        let openings = Arc::new(AtomicU64::new(0));
        let ask = |limit| {
            let (gate, openings, own) = (gate.clone(), openings.clone(), dir.clone());
            let open = move || {
                openings.fetch_add(1, Ordering::Relaxed);
                drop(lock(&gate));
                ChunkCache::open(&own, CACHE_BYTES_MIN)
            };
            block_on(in_time_or_none(&dir, CACHE_BYTES_MIN, limit, open))
        };
        assert!(ask(Duration::from_millis(20)).is_none());
        // Not for this long again.
        for _ in 0..100 {
            assert!(ask(Duration::from_secs(3600)).is_none());
        }
        assert_eq!(openings.load(Ordering::Relaxed), 1);
        drop(held);
        while ask(Duration::from_secs(3600)).is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        ask(Duration::from_secs(3600)).expect("it answers").expect("opens");
        assert_eq!(openings.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn threads_that_never_return_are_not_waited_for() {
        let directory = Directory::new("cache-stuck");
        let cache = ChunkCache::open(&directory.0.join("chunks"), CACHE_BYTES_MIN).expect("opens");
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        cache.threads.run(move || receiver.recv().is_ok()).detach();
        drop(cache);
        drop(sender);
    }

    #[test]
    fn what_is_not_its_own_is_left_alone() {
        let directory = Directory::new("cache-foreign");
        let dir = directory.0.join("chunks");
        let elsewhere = directory.0.join("elsewhere");
        fs::create_dir(&elsewhere).expect("a directory");
        let cache = ChunkCache::open(&dir, CACHE_BYTES_MIN).expect("opens");
        let precious: Vec<PathBuf> = (0..PARTS).map(|part| cache.part_dir(part).join("precious")).collect();
        for (part, path) in precious.iter().enumerate() {
            match part % 2 {
                0 => fs::create_dir(cache.part_dir(part)).expect("a part"),
                _ => std::os::unix::fs::symlink(&elsewhere, cache.part_dir(part)).expect("a link"),
            }
            let file = fs::File::create(path).expect("a file");
            file.set_len(64 << 20).expect("large");
            file.set_modified(SystemTime::UNIX_EPOCH).expect("old");
        }
        block_on(async {
            for number in 0..200 {
                *lock(&cache.resumes) = None; // what is refused is no reason to wait here
                cache.put(key(number), payload(number, 1 << 20)).await;
            }
        });
        assert!(cache.counts().evicted > 0 && cache.counts().failed > 0, "{:?}", cache.counts());
        assert_eq!(fs::read_dir(&elsewhere).expect("lists").count(), 1, "nothing is written there either");
        assert!(precious.iter().all(|path| path.exists()));
        fs::write(dir.join("notes"), "x").expect("a file");
        let refused = ChunkCache::open(&dir, CACHE_BYTES_MIN).expect_err("is not empty");
        assert!(refused.chain().contains("something else in it"), "{}", refused.chain());
    }

    #[test]
    fn what_was_put_is_found_by_every_process() {
        let directory = Directory::new("cache");
        let dir = directory.0.join("chunks");
        let one = ChunkCache::open(&dir, CACHE_BYTES_MIN).expect("opens");
        let other = ChunkCache::open(&dir, CACHE_BYTES_MIN).expect("opens");
        block_on(async {
            assert_eq!(one.get(key(1)).await, None);
            one.put(key(1), payload(1, 1000)).await;
            one.put(key(2), Bytes::new()).await;
            assert_eq!(other.get(key(1)).await, Some(payload(1, 1000)));
            assert_eq!(other.get(key(2)).await, Some(Bytes::new()));
            assert_eq!(other.get(key(3)).await, None);
        });
        assert_eq!((other.counts().hits, other.counts().misses, one.counts().written), (2, 1, 2));
    }

    #[test]
    fn a_damaged_entry_is_a_miss_and_goes_away() {
        let directory = Directory::new("cache-damaged");
        let cache = ChunkCache::open(&directory.0, CACHE_BYTES_MIN).expect("opens");
        let path = cache.path(&key(1));
        for at in [0, 8, 16, 48, 80, 1079] {
            block_on(cache.put(key(1), payload(1, 1000)));
            let mut bytes = fs::read(&path).expect("it is there");
            bytes[at] ^= 1;
            fs::write(&path, &bytes).expect("writes");
            assert_eq!(block_on(cache.get(key(1))), None, "byte {at}");
            assert!(!path.exists(), "byte {at}");
        }
        // What a crash leaves: an empty file, a short one; and another entry under this name.
        let whole = fs::read({
            block_on(cache.put(key(2), payload(2, 1000)));
            cache.path(&key(2))
        });
        for bytes in [vec![], vec![0; 4096], whole.expect("it is there")] {
            fs::create_dir_all(path.parent().expect("a part")).expect("makes it");
            fs::write(&path, &bytes).expect("writes");
            assert_eq!(block_on(cache.get(key(1))), None);
        }
        assert_eq!(cache.counts().damaged, 9);
    }

    #[test]
    fn the_directory_may_be_deleted_at_any_time() {
        let directory = Directory::new("cache-deleted");
        let dir = directory.0.join("chunks");
        let cache = ChunkCache::open(&dir, CACHE_BYTES_MIN).expect("opens");
        block_on(cache.put(key(1), payload(1, 1000)));
        fs::remove_dir_all(&dir).expect("removes");
        assert_eq!(block_on(cache.get(key(1))), None);
        block_on(cache.put(key(1), payload(1, 1000)));
        assert_eq!(block_on(cache.get(key(1))), Some(payload(1, 1000)));
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_left_alone_for_a_while() {
        let directory = Directory::new("cache-broken");
        let cache = ChunkCache::open(&directory.0, CACHE_BYTES_MIN).expect("opens");
        // A file where the part should be: what any user gets who may not write there, root included.
        fs::write(cache.part_dir(part_of(&key(1))), b"").expect("writes");
        block_on(cache.put(key(1), payload(1, 1000)));
        block_on(cache.put(key(1), payload(1, 1000)));
        assert_eq!(block_on(cache.get(key(1))), None);
        assert_eq!((cache.counts().failed, cache.counts().dropped), (1, 1));
    }

    #[test]
    fn the_total_stays_within_the_bound_and_the_oldest_go() {
        let directory = Directory::new("cache-bound");
        let caches = [1, 2].map(|_| ChunkCache::open(&directory.0, CACHE_BYTES_MIN).expect("opens"));
        let len = 256 << 10;
        for number in 0..400 {
            let cache = &caches[usize::try_from(number % 2).expect("small")];
            block_on(cache.put(key(number), payload(number, len)));
        }
        let most = CACHE_BYTES_MIN + CACHE_BYTES_MIN / 16 + PARTS as u64 * (len as u64 + HEADER as u64);
        let total = size_of(&directory.0);
        assert!(total <= most, "{total} bytes");
        assert!(total >= CACHE_BYTES_MIN / 2, "{total} bytes");
        let counts = caches.map(|cache| cache.counts());
        assert!(counts.iter().map(|counts| counts.evicted).sum::<u64>() > 100, "{counts:?}");
    }

    #[test]
    fn those_that_were_not_used_for_longest_make_room() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let mut entries = [(at(3), 10, 'c'), (at(1), 10, 'a'), (at(2), 10, 'b')];
        assert!(victims(&mut entries, 30, 30).is_empty());
        assert_eq!(victims(&mut entries, 30, 29), ['a']);
        assert_eq!(victims(&mut entries, 30, 10), ['a', 'b']);
        assert_eq!(victims(&mut entries, 30, 0).len(), 3);
    }

    #[test]
    fn keys_of_blocks_do_not_run_together() {
        assert_ne!(key_of_block("ab", "c", 1), key_of_block("a", "bc", 1));
        assert_ne!(key_of_block("a", "b", 1), key_of_block("a", "b", 2));
    }
}
