//! The drives, the template, and an image for each machine with the engine that serves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum_core::{Disk, Error, HostTally, Limits, Random, Result, SharedDisk, SharedStorage};
use vellum_format::fast::{FastId, FastMedium, NewRow, Promotion, Reason, Tiers, create as create_fast};
use vellum_format::native::{CreateOptions, Native, NewBase, OpenOptions, create};
use vellum_format::{FormatKind, Raw};
use vellum_sim::World;

use super::processors::Processors;
use super::{DISK_BYTES, GIB, MIB, Place};
use crate::model::{Device, EarlySsd, EarlySsdParameters, ForgetfulDrive, Hdd, HddParameters};

/// What a drive keeps of an image or a fast medium: everything but data.
const KEPT: u64 = 64 * MIB;
/// From one image to the next.
const APART: u64 = DISK_BYTES + GIB / 2;
/// The size of the fast medium.
const FAST_BYTES: u64 = 8 * GIB;
/// How often the engine is asked to tend its disk when it has nothing more to do at once, and when it has.
const TENDED_EVERY: Duration = Duration::from_millis(50);
const TENDED_NEXT: Duration = Duration::from_millis(1);
/// As the server promotes: how often it looks, how much at a time, and how many times as long it rests then.
const WARMED_EVERY: Duration = Duration::from_secs(1);
const WARMED_BYTES: u64 = 4 * MIB;
const REST: u32 = 24;
const SEED: u64 = 1;

/// A disk of a machine.
pub(super) struct Machine {
    pub(super) disk: SharedDisk,
}

pub(super) struct Scene {
    pub(super) world: World,
    pub(super) hdd: Arc<Device>,
    pub(super) ssd: Arc<Device>,
    pub(super) processors: Arc<Processors>,
    pub(super) machines: Vec<Machine>,
    /// A drive alone: requests do not go through a driver's machine.
    pub(super) is_native: bool,
    fast: Option<Arc<FastMedium>>,
    has_ended: Arc<AtomicBool>,
}

fn part(device: &Arc<Device>, at: u64, len: u64, kept: u64) -> SharedStorage {
    ForgetfulDrive::part(device.clone(), at, Limits::plain(), (len, kept))
}

impl Scene {
    fn empty(is_native: bool) -> Self {
        let world = World::new(SEED);
        Self {
            hdd: Device::of(&world, Hdd::new(HddParameters::barracuda_7200())),
            ssd: Device::of(&world, EarlySsd::new(EarlySsdParameters::samsung_2008())),
            processors: Processors::new(world.clock()),
            world,
            machines: Vec::new(),
            is_native,
            fast: None,
            has_ended: Arc::default(),
        }
    }

    /// A drive without any image.
    pub(super) fn drive(is_ssd: bool) -> Result<Self> {
        let mut scene = Self::empty(true);
        let device = if is_ssd { &scene.ssd } else { &scene.hdd };
        let disk = Raw::open(part(device, 0, DISK_BYTES, 0), false, &HostTally::default());
        scene.machines.push(Machine { disk });
        Ok(scene)
    }

    /// So many machines with disks over one template.
    pub(super) fn new(place: Place, machines: usize) -> Result<Self> {
        let mut scene = Self::empty(false);
        let (of_template, of_images) = match place {
            Place::Hdd => (scene.hdd.clone(), scene.hdd.clone()),
            Place::Ssd => (scene.ssd.clone(), scene.ssd.clone()),
            Place::Hybrid | Place::Tiered => (scene.ssd.clone(), scene.hdd.clone()),
        };
        let id = FastId::new([3; 16]).expect("it is not zero");
        if place == Place::Tiered {
            let storage = part(&scene.ssd, (machines as u64 + 1) * APART, 0, KEPT);
            scene.fast = Some(scene.world.run(async {
                create_fast(&storage, FAST_BYTES, id).await?;
                FastMedium::open(storage, Random::from_seed(SEED)).await
            })?);
        }
        for number in 0..machines {
            let template =
                Raw::open(part(&of_template, 0, DISK_BYTES, 0), true, &HostTally::default()) as SharedDisk;
            let image = part(&of_images, (number as u64 + 1) * APART, 0, KEPT);
            let native = scene.world.run(open(image, template, number, scene.fast.clone(), &scene.world))?;
            scene.tend(native.clone());
            if place == Place::Tiered {
                native.count_heat();
                scene.warm(native.clone());
            }
            scene.machines.push(Machine { disk: native });
        }
        Ok(scene)
    }

    /// What the server does beside the requests.
    fn tend(&self, disk: Arc<Native>) {
        let (clock, has_ended) = (self.world.clock(), self.has_ended.clone());
        self.world.spawner().spawn(async move {
            while !has_ended.load(Ordering::Acquire) {
                let has_more = disk.tend(clock.now()).await;
                clock.sleep(if has_more { TENDED_NEXT } else { TENDED_EVERY }).await;
            }
        });
    }

    /// What the server does for `tier-heat`: hot units come to the fast medium, few at a time.
    fn warm(&self, native: Arc<Native>) {
        let (clock, has_ended) = (self.world.clock(), self.has_ended.clone());
        self.world.spawner().spawn(async move {
            let mut seen = 0;
            while !has_ended.load(Ordering::Acquire) {
                let most = usize::try_from(WARMED_BYTES / native.unit_bytes()).expect("few").max(1);
                let ranges = native.hot(most);
                if ranges.is_empty() {
                    clock.sleep(WARMED_EVERY).await;
                    continue;
                }
                let begun = clock.now();
                let promotion = Promotion { ranges, reason: Reason::Heat, copies_base: false };
                if native.promote(promotion).await.is_err() {
                    return;
                }
                // While the guest is at work.
                let facts = native.facts();
                let reads = facts.fast_reads[0] + facts.slow_reads[0];
                let is_at_work = std::mem::replace(&mut seen, reads) != reads;
                clock.sleep(if is_at_work { (clock.now() - begun) * REST } else { TENDED_NEXT }).await;
            }
        });
    }

    /// Bytes that promotions wrote, and that reads took from the fast medium.
    pub(super) fn fast_bytes(&self) -> (u64, u64) {
        let counts = self.fast.as_ref().map(|fast| fast.counts()).unwrap_or_default();
        (counts.copied_bytes + counts.table_bytes, counts.read_bytes)
    }

    /// Ends what runs beside the machines, and counts once more.
    pub(super) fn end(&self) -> (u64, u64) {
        self.has_ended.store(true, Ordering::Release);
        self.fast_bytes()
    }
}

/// A new image over the template, attached to the fast medium where there is one.
async fn open(
    image: SharedStorage,
    template: SharedDisk,
    number: usize,
    fast: Option<Arc<FastMedium>>,
    world: &World,
) -> Result<Arc<Native>> {
    let uuid = [u8::try_from(number + 1).expect("few machines"); 16];
    let options = CreateOptions {
        size: DISK_BYTES,
        has_table: true,
        base: Some(NewBase { name: "template".to_owned(), size: DISK_BYTES, ..NewBase::default() }),
        uuid: Some(uuid),
        ..CreateOptions::default()
    };
    let made = create(&*image, &options).await?;
    if made.places().data_offset().bytes() > KEPT {
        return Err(Error::invalid("the drive would forget metadata"));
    }
    if let Some(fast) = &fast {
        fast.attach(NewRow { uuid, budget: u64::MAX, name: format!("machine {number}") }).await?;
        FormatKind::Native.format().attach_fast(&image, fast.id(), "fast").await?;
    }
    let options =
        OpenOptions { journal_key: Some(1), clock: Some(world.clock()), fast, ..OpenOptions::default() };
    Native::open(image, Some(template), options).await
}
