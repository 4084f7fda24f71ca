//! How fast a guest is over each side, in virtual time.
//!
//! ```text
//!   guest   one processor, so long for each request; so many requests at a time
//!   flash   an Intel S3610 of 400 GB        network   NFS over IPoIB to an Intel P3700
//! ```
//!
//! Flash and network are their sheets' (`model::SsdParameters`). One constant is fitted: the processor's time for a
//! request, on C12 (write-back, 4 KiB, 4.4 times). Everything else is a prediction. What crosses the network is made three
//! times, with the network's latencies and rate as they are, halved and doubled.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum_core::{Clock, Result};
use vellum_lab::guest::Request;
use vellum_sim::World;

use super::scene::{Devices, Scene, Sizes, ask_many};
use super::trdc::Policy;
use crate::model::{Device, Ssd, SsdParameters};

/// What the guest's processor takes for a request: fitted on C12.
const PROCESSOR: Duration = Duration::from_micros(70);
/// Requests at a time. The paper does not say how many FIO had.
const DEPTH: u64 = 32;
const SEED: u64 = 1;
/// How often a server looks after the cache.
const TENDED_EVERY: Duration = Duration::from_millis(20);

/// How slow the network is, in percent of what the sheets say.
pub(crate) const NETWORKS: [u32; 3] = [100, 50, 200];

/// Requests a second over one side.
pub(crate) fn speed(
    is_ours: bool,
    sizes: Sizes,
    network_percent: u32,
    requests: impl Iterator<Item = Request> + 'static,
) -> Result<f64> {
    let world = World::new(SEED);
    let flash = Device::of(&world, Ssd::new(SsdParameters::data_centre_sata()));
    let network = Device::of(&world, Ssd::new(SsdParameters::nfs_store(network_percent)));
    let processor = Device::of(&world, Ssd::new(SsdParameters::one_at_a_time(PROCESSOR)));
    let devices = Devices { flash, network };
    let scene = Rc::new(world.run(async {
        match is_ours {
            true => Scene::ours(devices, Some(&world), sizes).await,
            false => Scene::rival(devices, Policy::WriteBack, sizes).await,
        }
    })?);
    let has_ended = Arc::new(AtomicBool::new(false));
    tend(&world, &scene, &has_ended);
    let begun = world.now();
    let asked = world.run(ask_many(&scene, &world.spawner(), requests, DEPTH, &processor))?;
    let took = (world.now() - begun).as_secs_f64();
    has_ended.store(true, Ordering::Relaxed);
    Ok(asked.requests as f64 / took)
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
