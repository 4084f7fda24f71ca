//! How fast a guest is over each side, in virtual time.
//!
//! ```text
//!   guest   one processor, so long for each request; so many requests at a time
//!   flash   an Intel S3610 of 400 GB        network   NFS over IPoIB to an Intel P3700
//! ```
//!
//! Flash and network are their sheets' (`model::SsdParameters`). Two constants are fitted: the processor's time for a
//! write, on C12 (write-back, 4 KiB, 4.4 times), and for a read, on C15 (two writes for a read, 40 of 100 allocate, 1.8
//! times). Everything else is a prediction. What crosses the network is made three times, with the network's latencies and
//! rate as they are, halved and doubled.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum_core::{Clock, Result};
use vellum_lab::guest::Request;
use vellum_sim::World;

use super::guest::Guest;
use super::processor::Processor;
use super::scene::{Devices, Scene, Sizes, ask, ask_many};
use super::trdc::Policy;
use super::{BLOCK_BYTES, CLUSTER_BYTES};
use crate::model::{Device, Ssd, SsdParameters};

/// What the guest's processor takes for a write, fitted on C12, and for a read, fitted on C15.
const FOR_A_WRITE: Duration = Duration::from_micros(72);
const FOR_A_READ: Duration = Duration::from_micros(30);
/// Requests at a time. The paper does not say how many FIO had.
const DEPTH: u64 = 32;
const SEED: u64 = 1;
/// How often a server looks after the cache.
const TENDED_EVERY: Duration = Duration::from_millis(20);

/// How slow the network is, in percent of what the sheets say.
pub(crate) const NETWORKS: [u32; 3] = [100, 50, 200];

/// Requests a second over one side. What comes before them is not timed.
pub(crate) fn speed(
    is_ours: bool,
    policy: Policy,
    (sizes, network_percent): (Sizes, u32),
    before: Vec<Request>,
    requests: impl Iterator<Item = Request> + 'static,
) -> Result<f64> {
    let world = World::new(SEED);
    let flash = Device::of(&world, Ssd::new(SsdParameters::data_centre_sata()));
    let network = Device::of(&world, Ssd::new(SsdParameters::nfs_store(network_percent)));
    let processor = Processor::new(world.clock(), FOR_A_WRITE, FOR_A_READ);
    let devices = Devices { flash, network };
    let scene = Rc::new(world.run(async {
        match is_ours {
            true => Scene::ours(devices, Some(&world), policy, sizes).await,
            false => Scene::rival(devices, policy, sizes).await,
        }
    })?);
    let has_ended = Arc::new(AtomicBool::new(false));
    tend(&world, &scene, &has_ended);
    world.run(ask_many(&scene, &world.spawner(), before.into_iter(), DEPTH, &processor))?;
    let begun = world.now();
    let asked = world.run(ask_many(&scene, &world.spawner(), requests, DEPTH, &processor))?;
    let took = (world.now() - begun).as_secs_f64();
    has_ended.store(true, Ordering::Relaxed);
    Ok(asked.requests as f64 / took)
}

/// How long recovery takes after a crash with so much that is dirty, in clusters at random places: until the cache is
/// open again (fast), and from then until the image is complete (full). In seconds.
pub(crate) fn recovery(dirty_bytes: u64, network_percent: u32) -> Result<(f64, f64)> {
    let world = World::new(SEED);
    let flash = Device::of(&world, Ssd::new(SsdParameters::data_centre_sata()));
    let network = Device::of(&world, Ssd::new(SsdParameters::nfs_store(network_percent)));
    let blocks_max = dirty_bytes / BLOCK_BYTES * 5 / 4 + 65_536;
    let sizes = Sizes { blocks: None, blocks_max, memory_bytes: 0 };
    let guest = Guest::Random { bytes: CLUSTER_BYTES, is_aligned: true };
    let clusters = dirty_bytes / CLUSTER_BYTES;
    world.run(async {
        let scene = Scene::ours(Devices { flash, network }, Some(&world), Policy::WriteBack, sizes).await?;
        let requests = guest.requests(clusters, SEED).map(|request| (Duration::ZERO, request));
        ask(&scene, requests).await?;
        scene.disk.flush().await?;
        let begun = world.now();
        let scene = scene.after_a_crash(&world).await?;
        let opened = world.now();
        scene.drain().await?;
        let drained = world.now();
        Ok(((opened - begun).as_secs_f64(), (drained - opened).as_secs_f64()))
    })
}

/// What a server does beside the requests.
fn tend(world: &World, scene: &Rc<Scene>, has_ended: &Arc<AtomicBool>) {
    let (scene, clock, has_ended) = (scene.clone(), world.clock(), has_ended.clone());
    world.spawner().spawn(async move {
        let clock: Arc<dyn Clock> = clock;
        while !has_ended.load(Ordering::Relaxed) {
            clock.sleep(TENDED_EVERY).await;
            scene.tend(clock.now()).await;
        }
    });
}
