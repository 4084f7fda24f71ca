//! What copy-on-write costs below a guest without any cache: requests that one of the guest becomes, and how long a
//! request takes whose clusters are scattered.
//!
//! ```text
//!   guest ─► qcow2, the engine, no journal ─┬─► image ┐ Device: every request is counted
//!                                           └─► base ─┘
//!   64 KiB in one run, or 16 pieces of 4 KiB at random places, one after the other or all at once ─► modelled drive
//! ```

use std::sync::Arc;
use std::time::Duration;

use futures_lite::future::block_on;
use serde::Serialize;
use vellum_core::{
    Clock, ImageOffset, Limits, LocalFuture, Random, Result, SharedDisk, SharedStorage, try_join_all,
};
use vellum_format::image::Files;
use vellum_format::qcow2::{self, CreateOptions, Header, OpenOptions, Qcow2};
use vellum_sim::{Operation, World};

use super::guest::Guest;
use super::scene::{Asked, ask_disk};
use super::trdc::{Base, FILL};
use super::{BLOCK_BYTES, CLUSTER_BYTES, DISK_BYTES};
use crate::model::{Device, ForgetfulDrive, Hdd, HddParameters, Ssd, SsdParameters};

const SEED: u64 = 21;
/// Memory for tables of a qcow2 in QEMU 2.1, whichever the size.
const TABLES_BYTES: u64 = 1 << 20;

/// Requests to image and base for one of the guest.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Amplified {
    pub(crate) guest: Guest,
    /// The guest flushes after each.
    pub(crate) is_flushed: bool,
    pub(crate) asked: u64,
    pub(crate) reads: u64,
    pub(crate) writes: u64,
}

impl Amplified {
    pub(crate) fn times(&self) -> f64 {
        (self.reads + self.writes) as f64 / self.asked as f64
    }
}

/// How many requests reach the image and its base for random writes to a new overlay.
pub(crate) fn amplified(guest: Guest, is_flushed: bool, requests: u64) -> Result<Amplified> {
    let device = Device::instant();
    // A guest that only writes reads no data.
    let image: SharedStorage = ForgetfulDrive::forgetting(device.clone(), Limits::plain(), FILL);
    let nothing = ForgetfulDrive::on(Device::instant(), Limits::plain(), (DISK_BYTES, 0), FILL);
    let below: SharedDisk =
        Arc::new(Base { through: None, network: device.clone(), bytes: nothing, reads: Arc::default() });
    block_on(async {
        let options = CreateOptions {
            size: DISK_BYTES,
            cluster_size: CLUSTER_BYTES,
            backing: Some(("base".to_owned(), Some("raw".to_owned()))),
            ..CreateOptions::without_journal()
        };
        qcow2::create(&*image, None, &options).await?;
        let header = Header::read(&*image).await?;
        let options = OpenOptions { mapping_bytes_max: TABLES_BYTES, ..OpenOptions::default() };
        let files = Files { image, data_file: None, below: Some(below) };
        let disk: SharedDisk = Qcow2::open(header, files, options).await?;
        let before = device.counts();
        let mut asked = Asked::default();
        for request in guest.requests(requests, SEED) {
            ask_disk(&disk, request).await?;
            asked.note(request);
            if is_flushed {
                disk.flush().await?;
            }
        }
        disk.flush().await?;
        let counts = device.counts();
        let (reads, writes) = (counts.reads - before.reads, counts.writes - before.writes);
        Ok(Amplified { guest, is_flushed, asked: asked.requests, reads, writes })
    })
}

/// How many times as long 64 KiB take in 16 pieces, which are read or written one after the other, and all at once.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Scattered {
    pub(crate) in_turn: f64,
    pub(crate) at_once: f64,
}

/// Of a hard disk and of an SSD: read, and written and flushed.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Fragments {
    pub(crate) hdd: [Scattered; 2],
    pub(crate) ssd: [Scattered; 2],
}

impl Fragments {
    pub(crate) fn made() -> Self {
        let parameters = HddParameters::desktop_7200();
        let capacity = parameters.capacity;
        let hdd = |world: &World| Device::of(world, Hdd::new(HddParameters::desktop_7200()));
        let ssd = |world: &World| Device::of(world, Ssd::new(SsdParameters::data_centre_sata()));
        Self {
            hdd: [Operation::Read, Operation::Write].map(|operation| scattered(&hdd, capacity, operation)),
            ssd: [Operation::Read, Operation::Write].map(|operation| scattered(&ssd, capacity, operation)),
        }
    }
}

/// The mean time of 64 KiB in so many pieces.
async fn mean(
    device: &Device,
    clock: &dyn Clock,
    (operation, capacity): (Operation, u64),
    (pieces, is_at_once): (u64, bool),
) -> Duration {
    const SAMPLES: u32 = 200;
    let mut random = Random::from_seed(SEED);
    let bytes = CLUSTER_BYTES / pieces;
    let begun = clock.now();
    for _ in 0..SAMPLES {
        let mut place = || ImageOffset::new(random.below(capacity / bytes) * bytes).span(bytes);
        let spans: Vec<_> = (0..pieces).map(|_| place()).collect();
        if is_at_once {
            let pass = |span| -> LocalFuture<'_, Result<()>> {
                Box::pin(async move {
                    device.pass(operation, span).await;
                    Ok(())
                })
            };
            try_join_all(spans.into_iter().map(pass)).await.expect("nothing fails here");
        } else {
            for span in spans {
                device.pass(operation, span).await;
            }
        }
        if operation == Operation::Write {
            device.pass(Operation::Flush, ImageOffset::ZERO.span(0)).await;
        }
    }
    (clock.now() - begun) / SAMPLES
}

fn scattered(device: &dyn Fn(&World) -> Arc<Device>, capacity: u64, operation: Operation) -> Scattered {
    let seconds = |pieces, is_at_once| {
        let world = World::new(SEED);
        let device = device(&world);
        let clock = world.clock();
        let all = mean(&device, &*clock, (operation, capacity), (pieces, is_at_once));
        world.run(all).as_secs_f64()
    };
    let whole = seconds(1, false);
    let pieces = CLUSTER_BYTES / BLOCK_BYTES;
    Scattered { in_turn: seconds(pieces, false) / whole, at_once: seconds(pieces, true) / whole }
}
