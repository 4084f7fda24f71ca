//! What was counted: the guest's operations, and what they cost the host.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use vellum_core::{Context, HostTally, IoCounts, Result};
use vellum_export::nbd::Exports;
use vellum_io::{IoMode, clock, io_mode};

use crate::served::Disks;

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
    /// `running`; `pausing` while what was begun is being ended; `paused` when nothing is under way.
    pub state: String,
    /// For how long it is paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused_seconds: Option<u64>,
    /// Requests that wait until it goes on.
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
    /// What that cost in the image.
    pub host: HostOperations,
    /// What that cost in the images below it.
    pub below: HostOperations,
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
}

impl Stats {
    /// What was counted so far.
    pub(crate) fn of(served: &Disks, exports: &Exports) -> Self {
        Self {
            uptime_seconds: clock().now().as_secs_f64(),
            io: match io_mode() {
                IoMode::Threads => "threads".to_owned(),
                _ => "uring".to_owned(),
            },
            disks: served.iter().map(|disk| disk.stats(exports)).collect(),
        }
    }

    /// Writes them as JSON, so that a reader sees the old or the new, never half.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_to(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self).expect("numbers and strings");
        text.push('\n');
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".new");
        let context = || format!("can't write the statistics to {}", path.display());
        std::fs::write(&temporary, text).context(context)?;
        std::fs::rename(&temporary, path).context(context)
    }
}
