//! Runs of the paper *SSD-HDD-Hybrid Virtual Disk in Consolidated Environments* (KAIST, 2009): guests over one template, on
//! a hard disk, on an SSD of that time, and on both.
//!
//! ```text
//!   machine 1 … N ─ requests ─▶ engine: an image of each ─ not written ─▶ template       on   HDD   SSD   SSD      SSD
//!                                        └──────────────── written ─────▶ image          on   HDD   SSD   HDD      HDD
//!                                        └──── read often since ────────▶ fast medium    on    -     -     -       SSD
//!                                                                                            hdd   ssd  hybrid   tiered
//! ```
//!
//! The engine is the one that serves disks; the drives are models (`model`), and so are the guests (`guest`), whose
//! requests the paper does not print.

mod guest;
mod processors;
mod scene;

use std::time::Duration;

use serde::Serialize;
use vellum_core::{IoCounts, Result};

pub(crate) use guest::Load;
use scene::Scene;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
/// The size of a machine's disk, and of the template.
pub(crate) const DISK_BYTES: u64 = 4 * GIB;

/// Where template and images are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Place {
    Hdd,
    Ssd,
    /// The paper's: the template on the SSD, images on the hard disk.
    Hybrid,
    /// The same, and units that are read often come to a fast medium on the SSD.
    Tiered,
}

impl Place {
    pub(crate) const ALL: [Self; 4] = [Self::Hdd, Self::Ssd, Self::Hybrid, Self::Tiered];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Hdd => "all on HDD",
            Self::Ssd => "all on SSD",
            Self::Hybrid => "template on SSD",
            Self::Tiered => "with a fast medium",
        }
    }
}

/// What is to be run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Job {
    pub(crate) place: Place,
    pub(crate) load: Load,
    pub(crate) machines: usize,
    /// The load is one of this many parts of the whole one.
    pub(crate) part: u64,
}

/// What a run came to.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Run {
    pub(crate) job: Job,
    /// Until the last machine was done.
    pub(crate) seconds: f64,
    /// Of a transaction or a request, on average.
    pub(crate) response_ms: f64,
    pub(crate) answered: u64,
    pub(crate) hdd: Traffic,
    pub(crate) ssd: Traffic,
    /// Bytes that promotions wrote to the fast medium, and its tables.
    pub(crate) promoted_bytes: u64,
    /// Bytes that reads took from the fast medium.
    pub(crate) fast_read_bytes: u64,
}

impl Run {
    /// Bytes on the SSD that no promotion wrote: writes of guests.
    pub(crate) fn guest_bytes_on_ssd(&self) -> u64 {
        self.ssd.bytes_written - self.promoted_bytes
    }
}

/// What a drive was asked for.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Traffic {
    pub(crate) reads: u64,
    pub(crate) bytes_read: u64,
    pub(crate) writes: u64,
    pub(crate) bytes_written: u64,
}

impl Traffic {
    fn between(before: IoCounts, after: IoCounts) -> Self {
        Self {
            reads: after.reads - before.reads,
            bytes_read: after.bytes_read - before.bytes_read,
            writes: after.writes - before.writes,
            bytes_written: after.bytes_written - before.bytes_written,
        }
    }
}

/// Runs a load on machines.
pub(crate) fn run(job: Job) -> Result<Run> {
    let scene = Scene::new(job.place, job.machines)?;
    let (hdd, ssd) = (scene.hdd.counts(), scene.ssd.counts());
    let (promoted, read) = scene.fast_bytes();
    let begun = scene.world.now();
    let done = guest::all(&scene, job.load, job.part)?;
    let seconds = (scene.world.now() - begun).as_secs_f64();
    let (promoted_after, read_after) = scene.end();
    Ok(Run {
        job,
        seconds,
        response_ms: done.took.as_secs_f64() * 1000.0 / done.answered.max(1) as f64,
        answered: done.answered,
        hdd: Traffic::between(hdd, scene.hdd.counts()),
        ssd: Traffic::between(ssd, scene.ssd.counts()),
        promoted_bytes: promoted_after - promoted,
        fast_read_bytes: read_after - read,
    })
}

/// Requests a second of a drive alone, as on the paper's native machine.
pub(crate) fn alone(is_ssd: bool, load: Load, part: u64) -> Result<f64> {
    let scene = Scene::drive(is_ssd)?;
    let begun = scene.world.now();
    let done = guest::all(&scene, load, part)?;
    Ok(done.answered as f64 / (scene.world.now() - begun).as_secs_f64())
}

/// What guests were answered, and how long they waited for that in all.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Answered {
    pub(crate) answered: u64,
    pub(crate) took: Duration,
}

impl std::ops::AddAssign for Answered {
    fn add_assign(&mut self, other: Self) {
        self.answered += other.answered;
        self.took += other.took;
    }
}
