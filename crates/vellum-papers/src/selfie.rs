//! The rows of the paper Selfie (SYSTOR 2015), reproduced: the gain of blocks that hold their own entry.
//!
//! ```text
//!   fio        threads: write ─ flush ─ write ─ ...   ┐
//!   dd         writes, 32 at a time ─ flush; reads    │    HOST │ zoned │ table │ QCOW2, FVD, QED of then    on a volume, or
//!   guest      recorded: mkfs, PostMark               ├─▶                                                    in a file that grows
//!   recovery   an image that was not closed           ┘
//! ```
//!
//! The engine is the one that serves disks; HOST is a raw image; the others are in [`crate::then`]. The drive
//! is a model. A request of more than 512 KiB reaches a disk as several, as with virtio and the guest's block
//! layer. A volume is a device: its units are zeroed by writing, in the time that the engine takes for that
//! (`tend`), before and while the guest writes: two zones, or as many as somebody wants to be kept ready. The
//! paper's Selfie clears zones in quiet times, too. A thin volume zeroes them for free, so it leaves out what the
//! paper calls zone clearing: its figures cover less work than those of the paper's Selfie.
//!
//! Nothing is fitted here: the one constant that was (the HDD's `flush_overhead`, on S4) is in the model.

mod dd;
mod fio;
mod guest;
mod recovery;
mod scene;

pub(crate) use dd::{Dd, dd};
pub(crate) use fio::{Fio, Order, Reached, fio, requests};
pub(crate) use guest::{Overwrites, Played, Recorded, play, replayed_log};
pub(crate) use recovery::{Recovered, recovery};
use serde::Serialize;

const ZONE: u64 = 64 << 20;
const UNIT: usize = 64 << 10;
/// The longest request that reaches a disk.
const REQUEST: usize = 512 << 10;

/// The engine under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Image {
    Host,
    Zoned,
    Table,
    Qcow2,
    Fvd,
    Qed,
    /// A raw image in a file, where `Host` is the volume itself. Not of this paper.
    RawFile,
    /// Ours with a journal. Not of this paper.
    Journal,
}

impl Image {
    pub(crate) const ALL: [Self; 6] =
        [Self::Host, Self::Zoned, Self::Table, Self::Qcow2, Self::Fvd, Self::Qed];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "HOST (raw)",
            Self::Zoned => "vellum zoned",
            Self::Table => "vellum table",
            Self::Qcow2 => "QCOW2 of then (model)",
            Self::Fvd => "FVD of then (model)",
            Self::Qed => "QED of then (model)",
            Self::RawFile => "raw in a file",
            Self::Journal => "vellum qcow2 (journal)",
        }
    }
}

/// What the image lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Below {
    /// A volume whose space has to be made zero.
    Volume,
    /// The same, of which so many zones of 64 MiB are kept ready, and were made so in idle time (`--prealloc`).
    Cleared(u32),
    /// One whose zeros cost nothing.
    ThinVolume,
    /// A file that grows.
    File,
}

/// The drive's model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Drive {
    Hdd,
    Ssd,
}

/// A drive, what is on it, and what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Stage {
    pub(crate) drive: Drive,
    pub(crate) below: Below,
    /// So many of a hundred units pack: 0, 50 or 100.
    pub(crate) packs: u32,
}
