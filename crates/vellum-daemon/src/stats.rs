//! Counters: the guest's operations, and what they cost the host.

use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use vellum_core::{Context, Error, HostTally, IoCounts, Result};
use vellum_io::{IoMode, clock, io_mode};
use vellum_remote::FetchCounts;

use crate::control::word_of;
use crate::flash::{CacheStats, FlashStats};
use crate::meter::{self, Kind, LONG, Record};

/// Operations and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Operations {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Write-zeroes.
    pub zeroes: u64,
    /// Discards.
    pub discards: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Bytes zeroed.
    pub bytes_zeroed: u64,
    /// Bytes discarded.
    pub bytes_discarded: u64,
}

impl From<IoCounts> for Operations {
    fn from(counts: IoCounts) -> Self {
        Self {
            reads: counts.reads,
            writes: counts.writes,
            flushes: counts.flushes,
            zeroes: counts.zeroes,
            discards: counts.discards,
            bytes_read: counts.bytes_read,
            bytes_written: counts.bytes_written,
            bytes_zeroed: counts.bytes_zeroed,
            bytes_discarded: counts.bytes_discarded,
        }
    }
}

/// Host operations, guest data and metadata apart. A flush covers both and is counted with the data.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct HostOperations {
    /// What moved guest bytes.
    pub data: Operations,
    /// What moved the format's own bytes.
    pub metadata: Operations,
    /// What took home bytes that a journal had made durable already.
    pub checkpoint: Operations,
    /// What wrote zeros ahead of need.
    pub prealloc: Operations,
}

impl From<&HostTally> for HostOperations {
    fn from(tally: &HostTally) -> Self {
        Self {
            data: tally.data.counts().into(),
            metadata: tally.metadata.counts().into(),
            checkpoint: tally.checkpoint.counts().into(),
            prealloc: tally.prealloc.counts().into(),
        }
    }
}

/// How long requests of one kind took, from when they were let through to their answer; in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Latency {
    /// How many there were.
    pub count: u64,
    /// The sum of their times.
    pub sum_us: u64,
    /// Half of them took no longer, to within a fifth.
    pub p50_us: u64,
    /// 99 of 100 did.
    pub p99_us: u64,
    /// 999 of 1000 did.
    pub p999_us: u64,
    /// The longest.
    pub max_us: u64,
    /// How many took less than this many microseconds.
    pub below_us: Vec<(u64, u64)>,
}

/// Requests to the image that are not answered yet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct UnderWay {
    /// How many there are.
    pub count: usize,
    /// Those that have taken longer than 10 s, the longest first; 8 at most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub long: Vec<LongRequest>,
}

/// A request that takes long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LongRequest {
    /// `read`, `write`, `flush`, `write-zeroes`, `discard`, `map`.
    pub request: String,
    /// Where, in bytes.
    pub offset: u64,
    /// How many bytes.
    pub length: u64,
    /// For how long.
    pub seconds: u64,
}

/// What went wrong last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LastError {
    /// Which request failed.
    pub request: String,
    /// What kind of error it was, by the words of the control socket.
    pub kind: String,
    /// What it said.
    pub message: String,
    /// When, in seconds since 1970.
    pub date_sec: u64,
}

impl From<meter::LastError> for LastError {
    fn from(last: meter::LastError) -> Self {
        Self {
            request: last.request.to_string(),
            kind: word_of(last.kind).to_owned(),
            message: last.message,
            date_sec: last.seconds,
        }
    }
}

/// The boundaries of the histograms, in microseconds.
pub(crate) const BOUNDS_US: [u64; 12] =
    [16, 64, 256, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26];
/// So many long requests are named.
const LONG_MAX: usize = 8;

impl UnderWay {
    pub(crate) fn of(record: &Record) -> Self {
        let all = record.under_way();
        let long = all.iter().filter(|(_, since)| *since >= LONG).take(LONG_MAX);
        let long = long.map(|(request, since)| LongRequest {
            request: request.kind.name().to_owned(),
            offset: request.at,
            length: request.len,
            seconds: since.as_secs(),
        });
        Self { count: all.len(), long: long.collect() }
    }
}

/// How many requests failed, by kind of failure.
pub(crate) fn failures_of(record: &Record) -> BTreeMap<String, u64> {
    record.failures().into_iter().map(|(kind, count)| (word_of(kind).to_owned(), count)).collect()
}

/// How long requests took, by kind of request.
pub(crate) fn latency_of(record: &Record) -> BTreeMap<String, Latency> {
    let of = |kind: Kind| {
        let times = record.times(kind)?;
        let latency = Latency {
            count: times.count(),
            sum_us: times.micros(),
            p50_us: times.quantile(500),
            p99_us: times.quantile(990),
            p999_us: times.quantile(999),
            max_us: times.max(),
            below_us: BOUNDS_US.map(|bound| (bound, times.below(bound))).to_vec(),
        };
        Some((kind.name().to_owned(), latency))
    };
    Kind::ALL.into_iter().filter_map(of).collect()
}

/// How a disk gets what its image does not have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct HydrationStats {
    /// `off`, `running`, `paused` by a user; `contended`, `waiting`, `no space` or `failed` while it waits before it tries
    /// again; `no answer` while the images below do not answer; `snapshots` when everything is in the image and snapshots keep
    /// it from being detached; `base changed` when a file below is not what it was when the disk was opened: then nothing is copied
    /// any more; `detaching`; `detached`; `closed` when the image could not be opened again.
    pub state: String,
    /// Blocks that guests read are copied.
    pub copy_on_read: bool,
    /// Bytes that the image does not have yet, as far as is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_missing: Option<u64>,
    /// Bytes a second that are copied ahead of need.
    pub bytes_per_second: u64,
    /// How long the rest takes at this rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<u64>,
    /// Bytes read from below for guests.
    pub bytes_fetched: u64,
    /// Bytes that a reader got from what was fetched for another.
    pub bytes_shared: u64,
    /// Bytes that guests read and that were copied into the image.
    pub bytes_filled: u64,
    /// Bytes that were copied ahead of need.
    pub bytes_prefetched: u64,
    /// Bytes that were not copied, because there was no memory for them or a copy had failed.
    pub bytes_dropped: u64,
    /// Flushes that no guest had asked for.
    pub commits: u64,
    /// Pauses because of contention.
    pub pauses: u64,
    /// Copies that failed.
    pub errors: u64,
    /// What went wrong last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// The limits in force, in bytes a second.
    pub limits: BTreeMap<String, u64>,
    /// Why what was asked for is not done, or not to its end: there is nothing to copy from, or there are snapshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remark: Option<String>,
}

/// One disk that is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DiskStats {
    /// The names under which it is served.
    pub exports: Vec<String>,
    /// The image file.
    pub image: String,
    /// Its size in bytes, as guests see it.
    pub virtual_size: u64,
    /// `running`; `pausing` while requests in flight are completed; `paused` when nothing is in flight; `no
    /// space` when a request found none and no other has since; `poisoned` after a failed flush: it refuses
    /// writes until it is reopened; `hung` when its storage has not answered for 10 s; `closed` when it could
    /// not be opened again.
    pub state: String,
    /// For how long it is paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused_seconds: Option<u64>,
    /// Requests that wait until it is resumed, or has space.
    pub held: usize,
    /// How its requests are limited.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, u64>,
    /// Requests that wait for that.
    pub limited: usize,
    /// Connections now.
    pub connections: usize,
    /// What guests asked.
    pub guest: Operations,
    /// Requests that failed.
    pub guest_errors: u64,
    /// Those that the image failed, by kind of failure: not what a client did wrong.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub failures: BTreeMap<String, u64>,
    /// What went wrong last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<LastError>,
    /// What the image has not answered yet.
    pub under_way: UnderWay,
    /// How long requests took, by kind; those that there were.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub latency: BTreeMap<String, Latency>,
    /// What that cost in the image.
    pub host: HostOperations,
    /// What that cost in the images below it. Disks of a server that share those images share these counts.
    pub below: HostOperations,
    /// How it gets what only the images below it have, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hydration: Option<HydrationStats>,
    /// What the flash cache does for it, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flash: Option<FlashStats>,
    /// What it has on its fast medium, where there is one: as the answer to `tier-status`, without pins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<serde_json::Value>,
    /// The last work on its chain, where there was any since it was opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<JobStats>,
}

/// How far the work on the chain of a disk is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct JobStats {
    /// `commit` or `rebase`.
    pub job: &'static str,
    /// `running`, `paused`, `switching`, `done`, `cancelled` or `failed`.
    pub state: &'static str,
    /// The image below that it is about.
    pub base: String,
    /// Bytes of the disk that it goes through.
    pub bytes_total: u64,
    /// So many of them are done.
    pub bytes_done: u64,
    /// Bytes of data that were written, all rounds together.
    pub bytes_written: u64,
    /// Bytes that guests have changed meanwhile, and that are to be copied again.
    pub bytes_left: u64,
    /// Bytes of data a second, at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second_max: Option<u64>,
    /// The image on top, once it is done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Images that are of no use once it is done.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub useless: Vec<String>,
    /// Why it has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// A server.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Stats {
    /// How long it has run, in seconds.
    pub uptime_seconds: f64,
    /// How it does its I/O: `uring` or `threads`.
    pub io: String,
    /// Its disks.
    pub disks: Vec<DiskStats>,
    /// Its flash cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flash: Option<CacheStats>,
    /// The remote images below them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remote: Vec<RemoteStats>,
}

/// What was done for the remote images at one URL since they were opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RemoteStats {
    /// The URL.
    pub url: String,
    /// Requests, with those that were made again.
    pub requests: u64,
    /// Bytes that they brought.
    pub fetched_bytes: u64,
    /// Requests that were made again after one had failed.
    pub retries: u64,
    /// Second requests beside a slow one.
    pub hedges: u64,
    /// Blocks that were read ahead, and read later.
    pub ahead_used: u64,
    /// Blocks that were read ahead, and dropped unread.
    pub ahead_wasted: u64,
    /// Blocks and chunks that the local cache had.
    pub cached: u64,
    /// Reads that failed.
    pub failed: u64,
}

impl RemoteStats {
    fn all() -> Vec<Self> {
        let of = |(url, counts): (String, FetchCounts)| Self {
            url,
            requests: counts.requests,
            fetched_bytes: counts.fetched_bytes,
            retries: counts.retries,
            hedges: counts.hedges,
            ahead_used: counts.ahead_used,
            ahead_wasted: counts.ahead_wasted,
            cached: counts.cached,
            failed: counts.failed,
        };
        vellum_remote::fetch_counts().into_iter().map(of).collect()
    }
}

impl Stats {
    /// Of a server that has these disks, as they are now.
    pub(crate) fn of(disks: Vec<DiskStats>, flash: Option<CacheStats>) -> Self {
        Self {
            uptime_seconds: clock().now().as_secs_f64(),
            io: match io_mode() {
                IoMode::Threads => "threads".to_owned(),
                _ => "uring".to_owned(),
            },
            disks,
            flash,
            remote: RemoteStats::all(),
        }
    }

    /// The most important in one line.
    pub(crate) fn line(&self) -> String {
        let mut states: BTreeMap<&str, usize> = BTreeMap::new();
        self.disks.iter().for_each(|disk| *states.entry(&disk.state).or_default() += 1);
        let states: Vec<String> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
        let sum = |of: &dyn Fn(&DiskStats) -> u64| self.disks.iter().map(of).sum::<u64>();
        format!(
            "up {:.0} s; disks: {}; connections: {}; reads: {}, writes: {}, flushes: {}, failed: {}; in flight: {}",
            self.uptime_seconds,
            if states.is_empty() { "none".to_owned() } else { states.join(", ") },
            self.disks.iter().map(|disk| disk.connections).sum::<usize>(),
            sum(&|disk| disk.guest.reads),
            sum(&|disk| disk.guest.writes),
            sum(&|disk| disk.guest.flushes),
            sum(&|disk| disk.guest_errors),
            self.disks.iter().map(|disk| disk.under_way.count).sum::<usize>(),
        )
    }

    /// Writes them as JSON, so that a reader sees the old or the new, never half. What is there must be a
    /// file like any other: a device, a pipe, a directory or a link is left as it is.
    ///
    /// # Errors
    /// When the file cannot be written, or something else is there.
    pub fn write_to(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self).expect("numbers and strings");
        text.push('\n');
        let context = || format!("can't write the statistics to {}", path.display());
        look_at_target(path)?;
        // A name that is not known elsewhere, for a file that does not exist yet: no link is followed.
        let name = path
            .file_name()
            .ok_or_else(|| Error::invalid(format!("{}: this is not the name of a file", context())))?;
        let temporary = loop {
            let number = std::hash::RandomState::new().hash_one(name);
            let mut hidden = std::ffi::OsString::from(".");
            hidden.push(name);
            hidden.push(format!(".vellum-{number:016x}"));
            let temporary = path.with_file_name(hidden);
            match std::fs::File::create_new(&temporary) {
                Ok(mut file) => {
                    let written = file.write_all(text.as_bytes());
                    break written.map(|()| Temporary(temporary)).context(context)?;
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).context(context),
            }
        };
        std::fs::rename(&temporary.0, path).context(context)
    }
}

/// Goes with its name; there is nothing left to remove once it has got another one.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.0));
    }
}

/// Whether statistics may take the place of what is there.
pub(crate) fn look_at_target(path: &Path) -> Result<()> {
    let kind = match std::fs::symlink_metadata(path) {
        Ok(facts) => facts.file_type(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).context(|| format!("can't stat {}", path.display())),
    };
    let what = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_symlink() => "a symbolic link",
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(Error::invalid(format!(
        "can't write the statistics to {}: it is {what}, which a file would replace; name a regular file or a new one",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, symlink};

    use super::*;

    #[test]
    fn only_a_file_is_replaced() {
        let dir = std::env::temp_dir().join(format!("vellum-stats-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let stats = Stats {
            uptime_seconds: 1.0,
            io: "uring".to_owned(),
            disks: Vec::new(),
            flash: None,
            remote: Vec::new(),
        };
        let file = dir.join("stats.json");
        for _ in 0..2 {
            stats.write_to(&file).expect("a new file, and one that is there");
        }
        symlink(&file, dir.join("link")).expect("a link");
        symlink(dir.join("elsewhere"), dir.join("stats.json.new")).expect("a link");
        let _socket = std::os::unix::net::UnixListener::bind(dir.join("socket")).expect("a socket");
        for (name, why) in [("link", "link"), ("socket", "socket"), (".", "directory")] {
            let error = stats.write_to(&dir.join(name)).expect_err("it is no file");
            assert!(error.chain().contains(why), "{name}: {}", error.chain());
        }
        assert!(stats.write_to(Path::new("/dev/null")).expect_err("a device").chain().contains("device"));
        assert!(std::fs::metadata("/dev/null").expect("it is there").file_type().is_char_device());
        stats.write_to(&file).expect("a file");
        assert!(!dir.join("elsewhere").exists(), "nothing was written through a link");
        let mut names: Vec<_> =
            std::fs::read_dir(&dir).expect("it").map(|one| one.expect("one").file_name()).collect();
        names.sort();
        assert_eq!(names, ["link", "socket", "stats.json", "stats.json.new"]);
        std::fs::remove_dir_all(&dir).expect("ours");
    }
}
