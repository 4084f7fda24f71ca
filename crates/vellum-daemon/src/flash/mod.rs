//! The flash cache of a server: one file or block device, open and locked while the server runs, for all of its disks.
//!
//! ```text
//!   --flash PATH ──► opened and recovered, before any disk
//!                      │ each disk gets a place in it as it is opened (`vellum-layer`, chain/flash.rs)
//!                      ├── tended: write-back in the background
//!                      ▼
//!                    closed after the last disk
//! ```
//!
//! `closed` has what is done with a cache that no server has open.

mod closed;
mod facts;

pub use closed::{Completed, Made, ResizedFlash, check, complete, create, forget, forget_row, look, resize};
pub use facts::{
    CacheFacts, CacheStats, DiskFacts, FlashOperations, FlashStats, TableReads, facts_said, map_strip,
};

use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures_lite::future::or;
use vellum_core::pin::ProofKind;
use vellum_core::{Context, Error, ErrorKind, Random, Result, SharedStorage, lock};
use vellum_flash::{Facts, FlashCache, FlashOptions, FlashPolicy, Opened};
use vellum_io::{File, LockMode, OpenOptions, Spawned, WorkersHandle, clock, spawn_local, unblock_at};
use vellum_layer::FlashChoice;

use crate::contained::in_rounds;

/// How often a cache is tended in which something has just changed: what was read waits in memory for its place.
const OFTEN: Duration = Duration::from_millis(5);
/// And one in which nothing changes.
const SELDOM: Duration = Duration::from_millis(100);
/// Between two things that are done at once, so that requests come first.
const NEXT: Duration = Duration::from_millis(1);

/// The flash cache that a server uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlashSpec {
    /// Where it is: a file or a block device.
    pub path: PathBuf,
    /// What the images lack stays in the cache when the server ends.
    pub keeps_dirty: bool,
    /// The most memory that it takes; none for the usual, which the size of the cache determines.
    pub memory_bytes_max: Option<u64>,
    /// Places that become free are passed to the drive as discards. Where nothing is said, those of a block device are.
    pub discards: Option<bool>,
    /// It bypasses the page cache.
    pub direct: bool,
}

/// The policy of this name.
///
/// # Errors
/// `Invalid`, with all names.
pub fn policy_of(name: &str) -> Result<FlashPolicy> {
    POLICIES.into_iter().find(|policy| word_of(*policy) == name).ok_or_else(|| {
        let names: Vec<_> = POLICIES.into_iter().map(word_of).collect();
        Error::invalid(format!("unknown policy {name:?}: use {}", names.join(", ")))
    })
}

/// Its name.
pub fn word_of(policy: FlashPolicy) -> &'static str {
    match policy {
        FlashPolicy::WriteBack => "writeback",
        FlashPolicy::WriteThrough => "writethrough",
        FlashPolicy::ReadOnly => "readonly",
        FlashPolicy::Off => "off",
    }
}

/// Those that a user can choose.
const POLICIES: [FlashPolicy; 4] =
    [FlashPolicy::WriteBack, FlashPolicy::WriteThrough, FlashPolicy::ReadOnly, FlashPolicy::Off];

/// Opens the file or block device of a cache. It is locked: for writing against all others, for reading against
/// writers.
pub(crate) async fn open_storage(path: &Path, writable: bool) -> Result<SharedStorage> {
    open_storage_as(path, writable, false).await
}

/// The same. `direct`: past the page cache.
async fn open_storage_as(path: &Path, writable: bool, direct: bool) -> Result<SharedStorage> {
    let options = match writable {
        true => OpenOptions { keeps_len: true, ..OpenOptions::writing() },
        false => OpenOptions { lock: LockMode::Read, ..OpenOptions::reading() },
    };
    let opened = File::open(path, options.direct(direct)).await;
    Ok(opened.map_err(|error| match error.kind() {
        ErrorKind::Locked => error.context(format!(
            "the flash cache {} is in use: one server at a time has it, and all of its disks are served by that one",
            path.display()
        )),
        ErrorKind::NotFound => error.context(format!(
            "can't open the flash cache {} (`vellum flash create` makes one)",
            path.display()
        )),
        _ => error.context(cannot_open(path)),
    })?)
}

fn cannot_open(path: &Path) -> String {
    format!("can't open the flash cache {}", path.display())
}

/// Opens a cache, which recovers it, with as much memory as it needs.
///
/// # Errors
/// `Locked` while another program has it, `Invalid` if it is none, and those of the cache.
pub(crate) async fn open_cache(path: &Path) -> Result<Arc<FlashCache>> {
    open_with(path, NO_BOUND, Some(false), false).await.map(|(cache, _)| cache)
}

/// As much memory as it takes.
const NO_BOUND: Option<u64> = Some(u64::MAX >> 1);

/// As above, with a bound of the memory.
async fn open_with(
    path: &Path,
    memory_bytes_max: Option<u64>,
    discards: Option<bool>,
    direct: bool,
) -> Result<(Arc<FlashCache>, SharedStorage)> {
    let storage = open_storage_as(path, true, direct).await?;
    let chance = Random::from_seed(u64::from_be_bytes(random_bytes()?));
    // A file would lose the space that was reserved for it, and get its pieces from elsewhere later.
    let limits = storage.limits();
    let discards = discards.unwrap_or(limits.fixed_len) && limits.discards;
    let options = FlashOptions { memory_bytes_max, discards, ..FlashOptions::new(Some(clock()), chance) };
    let cache = FlashCache::open(storage.clone(), options).await.context(|| cannot_open(path))?;
    cache.keep_witness().await.context(|| cannot_open(path))?;
    Ok((cache, storage))
}

/// Why the file under this name is not the one that is open; nothing where it is, or where the host does not say.
async fn gone_from(path: &Path, file: &str) -> Option<String> {
    let number = file.split('@').next()?.parse::<u64>().ok()?;
    let named = path.to_owned();
    let looked: Result<std::io::Result<u64>> =
        unblock_at(path, move || Ok(std::fs::metadata(&named).map(|facts| facts.ino()))).await;
    let there = looked.ok()?;
    match there {
        Ok(there) if there == number => None,
        Ok(_) => Some("another file has its name now".to_owned()),
        Err(error) => Some(format!("it is not found under its name ({error})")),
    }
}

/// Says what an opening has given up for want of memory.
fn say_if_short(path: &Path, opened: Opened) {
    if opened.given_up > 0 {
        tracing::info!(
            "the flash cache {} has given up {} blocks for which `--flash-memory` is too little; images have them",
            path.display(),
            opened.given_up
        );
    }
}

/// Says what a cache keeps that has more than its memory allows: dirty blocks alone.
fn warn_if_over_budget(path: &Path, facts: Facts) {
    let Facts { budget_bytes, budget_used_bytes, dirty_blocks, .. } = facts;
    if budget_used_bytes > budget_bytes {
        tracing::warn!(
            "the flash cache {} takes {budget_used_bytes} bytes of memory, {} more than it may: images lack {dirty_blocks} \
             blocks of it. Writes wait until these are home; `--flash-memory` gives it more",
            path.display(),
            budget_used_bytes - budget_bytes
        );
    }
}

/// Random bytes of the host, as the seed of the numbers that a cache draws.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let read = std::fs::File::open("/dev/urandom")
        .and_then(|mut source| std::io::Read::read_exact(&mut source, &mut bytes));
    read.context(|| "can't read random bytes from /dev/urandom")?;
    Ok(bytes)
}

/// How often the cache is tended: half as often each time that nothing has changed.
#[derive(Default)]
struct Pace {
    before: Facts,
    pause: Duration,
}

impl Pace {
    fn pause(&mut self, now: Facts) -> Duration {
        self.pause = if now == self.before { (self.pause * 2).clamp(OFTEN, SELDOM) } else { OFTEN };
        self.before = now;
        self.pause
    }
}

/// The cache of a server, from before the first disk until after the last.
pub(crate) struct HostFlash {
    path: PathBuf,
    keeps_dirty: bool,
    is_server_ending: AtomicBool,
    cache: Arc<FlashCache>,
    has_ended: Arc<AtomicBool>,
    tending: Mutex<Option<Spawned<()>>>,
    has_said: AtomicBool,
    /// Why the file that is open is not the one under its name.
    gone: Mutex<Option<String>>,
    looked: Mutex<Duration>,
}

impl std::fmt::Debug for HostFlash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostFlash").field("path", &self.path).finish_non_exhaustive()
    }
}

impl HostFlash {
    /// Opens it, and begins to tend it.
    pub(crate) async fn open(spec: &FlashSpec, workers: &WorkersHandle) -> Result<Arc<Self>> {
        let (cache, _) = open_with(&spec.path, spec.memory_bytes_max, spec.discards, spec.direct).await?;
        say_if_short(&spec.path, cache.opened());
        warn_if_over_budget(&spec.path, cache.facts());
        let flash = Arc::new(Self {
            path: spec.path.clone(),
            keeps_dirty: spec.keeps_dirty,
            is_server_ending: AtomicBool::new(false),
            cache,
            has_ended: Arc::default(),
            tending: Mutex::default(),
            has_said: AtomicBool::new(false),
            gone: Mutex::default(),
            looked: Mutex::default(),
        });
        let (its, ended) = (flash.clone(), flash.has_ended.clone());
        let task = workers.spawn(workers.count() - 1, move || async move {
            let mut pace = Pace::default();
            in_rounds("write-back from the flash cache", async || {
                if ended.load(Ordering::Acquire) {
                    return ControlFlow::Break(());
                }
                its.tend_once(&mut pace).await;
                ControlFlow::Continue(())
            })
            .await;
        });
        *lock(&flash.tending) = Some(task);
        Ok(flash)
    }

    async fn tend_once(&self, pace: &mut Pace) {
        // Each disk has a task of its own: one whose home does not answer holds up no other.
        let has_more = self.cache.tend_with(clock().now(), &|step| spawn_local(step).detach()).await;
        self.say_if_stopped();
        self.look_at_name().await;
        if has_more {
            return clock().sleep(NEXT).await;
        }
        // What is read in the pause would not have room to wait for long.
        let read = async {
            self.cache.wait_for_reads().await;
            clock().sleep(NEXT).await;
        };
        or(clock().sleep(pace.pause(self.cache.facts())), read).await;
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Fails once the cache takes no more changes.
    ///
    /// # Errors
    /// `Poisoned`, with what opens it again.
    pub(crate) fn works(&self) -> Result<()> {
        let Some(why) = self.cache.failure() else { return Ok(()) };
        let path = self.path.display();
        Err(why.context(format!(
            "the flash cache {path} has failed, and is opened again only when the server is started again"
        )))
    }

    /// Warns when the file has lost its name: the next server does not find it. Looks once in a second.
    async fn look_at_name(&self) {
        let now = clock().now();
        {
            let mut looked = lock(&self.looked);
            if now.saturating_sub(*looked) < Duration::from_secs(1) {
                return;
            }
            *looked = now;
        }
        let proof = self.cache.proof().filter(|proof| proof.kind() == ProofKind::File);
        let Some(proof) = proof else { return };
        let why = gone_from(&self.path, proof.value()).await;
        let before = std::mem::replace(&mut *lock(&self.gone), why.clone());
        if let (Some(why), None) = (why, before) {
            tracing::warn!(
                "the flash cache {} is gone: {why}. This server goes on with the file that it has open, and completes the \
                 images when it ends, also with `--flash-keep`",
                self.path.display()
            );
        }
    }

    /// Warns once when the flash has failed.
    fn say_if_stopped(&self) {
        if let Some(error) = self.cache.failure()
            && !self.has_said.swap(true, Ordering::AcqRel)
        {
            tracing::warn!(
                "the flash cache {} has failed, and its disks refuse writes until the server is started again: {}",
                self.path.display(),
                error.chain()
            );
        }
    }

    /// As disks use it.
    pub(crate) fn choice(&self, policy: Option<FlashPolicy>) -> FlashChoice {
        FlashChoice { cache: self.cache.clone(), policy, boot: boot() }
    }

    /// The server ends: disks that are closed from now on may leave dirty blocks in it.
    pub(crate) fn server_ends(&self) {
        self.is_server_ending.store(true, Ordering::Release);
    }

    /// Whether dirty blocks stay in it when a disk is closed for good. One that is removed from a server is complete.
    pub(crate) fn keeps_dirty(&self) -> bool {
        self.keeps_dirty && self.is_server_ending.load(Ordering::Acquire) && lock(&self.gone).is_none()
    }

    /// What is known of it now.
    pub(crate) fn stats(&self) -> CacheStats {
        let mut stats = CacheStats::of(&self.path, &self.cache);
        if let Some(why) = lock(&self.gone).clone() {
            stats.last_error.get_or_insert(format!("the file is gone: {why}"));
        }
        stats
    }

    /// Closes it. All disks are closed by now, or hang.
    ///
    /// # Errors
    /// Those of the cache.
    pub(crate) async fn end(&self) -> Result<()> {
        self.has_ended.store(true, Ordering::Release);
        let task = lock(&self.tending).take();
        if let Some(task) = task {
            // A worker that has ended has nothing in flight.
            let _ = task.await;
        }
        self.say_if_stopped();
        self.cache.close().await.context(|| format!("can't close the flash cache {}", self.path.display()))
    }
}

/// The number that the kernel has drawn for this start of the host.
fn boot() -> Option<[u8; 16]> {
    static BOOT: OnceLock<Option<[u8; 16]>> = OnceLock::new();
    *BOOT.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let digits = text.trim().replace('-', "");
        u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
    })
}
