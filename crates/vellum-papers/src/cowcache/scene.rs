//! One side with its devices: the rival, or the flash cache, over an overlay of 64 KiB clusters on a full base; and
//! guests that ask it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;
use vellum_core::{
    Buffer, GuestOffset, GuestSpan, IoCounts, Limits, Random, Result, SharedDisk, SharedStorage, WriteFlags,
    ZeroFlags, try_join_all,
};
use vellum_flash::{
    CacheCounts, DiskOptions, FlashCache, FlashCounts, FlashDisk, FlashMetadata, FlashOptions, FlashPolicy,
    MetadataOptions, create,
};
use vellum_format::image::{CachedTables, Files};
use vellum_format::qcow2::{self, CreateOptions, Header, OpenOptions, Qcow2};
use vellum_lab::guest::Request;
use vellum_sim::{Spawner, World};

use super::order::Order;
use super::processor::Processor;
use super::trdc::{Base, DataSide, FILL, Policy, TableSide, Trdc, TrdcCounts};
use super::{BLOCK_BYTES, CLUSTER_BYTES, DISK_BYTES};
use crate::model::{Device, ForgetfulDrive};

/// Memory of the rival's format for pages of tables: 128 of them, of which it writes 32 together. Tables in whole are
/// the cache's business.
const PAGES_BYTES: u64 = 128 * 4096;
const MIB: u64 = 1 << 20;
/// The secret and the id of a cache.
const SECRET: u64 = 0x5EC2_E700_0000_0001;
const ID: [u8; 16] = [7; 16];

/// Flash and the network below it.
#[derive(Clone)]
pub(crate) struct Devices {
    pub(crate) flash: Arc<Device>,
    pub(crate) network: Arc<Device>,
}

impl Devices {
    /// Those that take no time.
    pub(crate) fn instant() -> Self {
        Self { flash: Device::instant(), network: Device::instant() }
    }
}

/// A side.
pub(crate) struct Scene {
    pub(crate) disk: SharedDisk,
    pub(crate) devices: Devices,
    pub(crate) side: Side,
    /// How often the base was read. What fills a cluster comes from there.
    base_reads: Arc<AtomicU64>,
    /// What the network had carried before the first request: the image was made and opened.
    network_before: IoCounts,
}

pub(crate) enum Side {
    Rival(Arc<Trdc>),
    Ours(Box<Ours>),
}

/// The flash cache, and what it lies on.
pub(crate) struct Ours {
    cache: Arc<FlashCache>,
    disk: Arc<FlashDisk>,
    /// The tables of the image, where writes look them up: with writethrough.
    tables: Option<Arc<FlashMetadata>>,
    flash: SharedStorage,
    home: SharedDisk,
    sizes: Sizes,
    /// What it had written before the first request.
    before: CacheCounts,
}

/// How much flash there is, and the memory for tables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Blocks of 4 KiB that flash holds; as many as come, when none is said, and at most so many then.
    pub(crate) blocks: Option<u64>,
    pub(crate) blocks_max: u64,
    /// Memory for tables, in bytes.
    pub(crate) memory_bytes: u64,
}

/// What a run came to, in bytes unless it says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Counted {
    pub(crate) requests: u64,
    pub(crate) writes: u64,
    pub(crate) flash_data: u64,
    /// Of it, what reads brought.
    pub(crate) flash_admitted: u64,
    pub(crate) flash_metadata: u64,
    pub(crate) flash_metadata_read: u64,
    pub(crate) flash_flushes: u64,
    pub(crate) lookups: u64,
    pub(crate) misses: u64,
    pub(crate) network_read: u64,
    pub(crate) network_written: u64,
    /// Requests that the network carried.
    pub(crate) network_requests: u64,
    /// Of them, those that a write of the guest waited for.
    pub(crate) network_in_writes: u64,
    /// Reads of the base.
    pub(crate) base_reads: u64,
}

impl Counted {
    pub(crate) fn flash(&self) -> u64 {
        self.flash_data + self.flash_metadata
    }

    pub(crate) fn network(&self) -> u64 {
        self.network_read + self.network_written
    }

    /// Of three lookups for each write and one for each read, as the paper's driver makes, those that found their table
    /// in memory.
    pub(crate) fn hit_ratio(&self) -> f64 {
        let lookups = 3 * self.writes + (self.requests - self.writes);
        1.0 - self.misses as f64 / lookups.max(1) as f64
    }
}

fn forgetful(device: Arc<Device>, len: u64, kept: u64) -> SharedStorage {
    ForgetfulDrive::on(device, Limits::plain(), (len, kept), FILL)
}

/// The base as a disk, and how often it is read.
fn base(through: Option<Arc<Trdc>>, network: Arc<Device>) -> (SharedDisk, Arc<AtomicU64>) {
    let reads = Arc::new(AtomicU64::new(0));
    let bytes = forgetful(Device::instant(), DISK_BYTES, 0);
    (Arc::new(Base { through, network, bytes, reads: reads.clone() }), reads)
}

/// A new overlay of the paper's kind: its metadata in one file, its data in another. Returns the header, and where
/// tables of the mapping begin.
async fn new_overlay(
    image: &SharedStorage,
    data: &SharedStorage,
    has_subclusters: bool,
) -> Result<(Header, u64)> {
    let options = CreateOptions {
        size: DISK_BYTES,
        cluster_size: CLUSTER_BYTES,
        extended_l2: has_subclusters,
        backing: Some(("base".to_owned(), Some("raw".to_owned()))),
        data_file: Some("data".to_owned()),
        ..CreateOptions::without_journal()
    };
    qcow2::create(&**image, Some(data), &options).await?;
    Ok((Header::read(&**image).await?, image.len()))
}

impl Scene {
    /// The rival: the cache below the format.
    pub(crate) async fn rival(devices: Devices, policy: Policy, sizes: Sizes) -> Result<Self> {
        let tables = usize::try_from(sizes.memory_bytes / CLUSTER_BYTES).expect("a memory");
        let both = (devices.flash.clone(), devices.network.clone());
        let trdc = Trdc::new(both, policy, tables, sizes.blocks);
        let (below, base_reads) = base(Some(trdc.clone()), devices.network.clone());
        let disk = Self::rival_image(&trdc, below, 0).await?;
        let network_before = devices.network.counts();
        Ok(Self { disk, devices, side: Side::Rival(trdc), base_reads, network_before })
    }

    /// An overlay of the rival over what there is.
    async fn rival_image(trdc: &Arc<Trdc>, below: SharedDisk, image: u64) -> Result<SharedDisk> {
        let bytes = forgetful(Device::instant(), 0, u64::MAX);
        let data: SharedStorage = Arc::new(DataSide { trdc: trdc.clone(), limits: Limits::plain(), image });
        let (header, first) = new_overlay(&bytes, &data, false).await?;
        let tables: SharedStorage = Arc::new(TableSide { trdc: trdc.clone(), bytes, first, image });
        let options = OpenOptions { mapping_bytes_max: PAGES_BYTES, ..OpenOptions::default() };
        let files = Files { image: tables, data_file: Some(data), below: Some(below) };
        Ok(Qcow2::open(header, files, options).await?)
    }

    /// The flash cache over an image on the network. With write-back its clusters have subclusters, so that what goes home
    /// is not filled; with writethrough it is the paper's image, whose tables are cached by sectors.
    pub(crate) async fn ours(
        devices: Devices,
        world: Option<&World>,
        policy: Policy,
        sizes: Sizes,
    ) -> Result<Self> {
        let slots = sizes.blocks.unwrap_or(sizes.blocks_max).max(64);
        let flash_bytes = slots * BLOCK_BYTES + ring_and_slices(slots);
        // Guests write nothing but FILL; tables in slots are kept.
        let sizes_of_flash = (flash_bytes, flash_bytes - slots * BLOCK_BYTES);
        let plain: SharedStorage =
            ForgetfulDrive::remembering(devices.flash.clone(), Limits::plain(), sizes_of_flash, FILL);
        create(&plain, flash_bytes, ID, SECRET).await?;
        let cache = Self::cache(&plain, world, sizes).await?;
        let image = forgetful(devices.network.clone(), 0, u64::MAX);
        let data = forgetful(devices.network.clone(), DISK_BYTES, 0);
        let is_through = policy == Policy::WriteThrough;
        let (header, _) = new_overlay(&image, &data, !is_through).await?;
        let tables = match is_through {
            false => None,
            true => {
                let options = MetadataOptions {
                    image: image.clone(),
                    name: None,
                    is_written: true,
                    table_bytes: CLUSTER_BYTES,
                };
                Some(cache.open_metadata(options).await?)
            }
        };
        let image = tables.as_ref().map_or(image, FlashMetadata::image);
        let cached = |tables: &Arc<FlashMetadata>| CachedTables {
            storage: tables.tables(),
            lookups: tables.lookups(),
        };
        let options = OpenOptions {
            mapping_bytes_max: sizes.memory_bytes.max(MIB),
            tables: tables.as_ref().map(cached),
            ..OpenOptions::default()
        };
        let (below, base_reads) = base(None, devices.network.clone());
        let files = Files { image, data_file: Some(data), below: Some(below) };
        let home = Qcow2::open(header, files, options).await?;
        Self::opened(devices, (policy, sizes), (plain, cache, home), (tables, base_reads)).await
    }

    /// The cache in `flash`.
    async fn cache(flash: &SharedStorage, world: Option<&World>, sizes: Sizes) -> Result<Arc<FlashCache>> {
        let mut options = FlashOptions::new(world.map(World::clock), Random::from_seed(1));
        // Home goes what has to, as with the rival: nothing because it is old, and nothing while there is room for all.
        options.age = Duration::from_hours(24 * 365);
        if sizes.blocks.is_none() {
            options.dirty_percent = 100;
        }
        FlashCache::open(flash.clone(), options).await
    }

    /// An open cache over this home.
    async fn opened(
        devices: Devices,
        (policy, sizes): (Policy, Sizes),
        (flash, cache, home): (SharedStorage, Arc<FlashCache>, SharedDisk),
        (tables, base_reads): (Option<Arc<FlashMetadata>>, Arc<AtomicU64>),
    ) -> Result<Self> {
        let options = DiskOptions {
            disk: [1; 16],
            home: home.clone(),
            sessions: None,
            policy: match policy {
                Policy::WriteBack => FlashPolicy::WriteBack,
                Policy::WriteThrough => FlashPolicy::WriteThrough,
            },
            trusts_home: true,
        };
        let disk = cache.open_disk(options).await?;
        let before = cache.counts();
        let network_before = devices.network.counts();
        let ours = Ours { cache, disk: disk.clone(), tables, flash, home, sizes, before };
        Ok(Self { disk, devices, side: Side::Ours(Box::new(ours)), base_reads, network_before })
    }

    /// The same cache, which was not closed, opened again.
    pub(crate) async fn after_a_crash(self, world: &World) -> Result<Self> {
        let Side::Ours(ours) = self.side else { panic!("the rival's recovery is not modelled") };
        let Ours { flash, home, sizes, .. } = *ours;
        let cache = Self::cache(&flash, Some(world), sizes).await?;
        let below = (None, self.base_reads);
        Self::opened(self.devices, (Policy::WriteBack, sizes), (flash, cache, home), below).await
    }

    /// Sends home all that is dirty.
    pub(crate) async fn drain(&self) -> Result<()> {
        match &self.side {
            Side::Rival(_) => Ok(()),
            Side::Ours(ours) => ours.disk.drain().await,
        }
    }

    /// What has been counted by now.
    pub(crate) fn counted(&self, asked: Asked) -> Counted {
        let (network, before) = (self.devices.network.counts(), self.network_before);
        let of_network = Counted {
            requests: asked.requests,
            writes: asked.writes,
            flash_flushes: self.devices.flash.counts().flushes,
            network_read: network.bytes_read - before.bytes_read,
            network_written: network.bytes_written - before.bytes_written,
            network_requests: requests_of(network) - requests_of(before),
            network_in_writes: asked.network_in_writes,
            base_reads: self.base_reads.load(Ordering::Relaxed),
            ..Counted::default()
        };
        match &self.side {
            Side::Rival(trdc) => {
                let counts: TrdcCounts = trdc.counts();
                Counted {
                    flash_data: counts.data_bytes(),
                    flash_admitted: counts.admitted_bytes,
                    flash_metadata: counts.metadata_bytes(),
                    flash_metadata_read: counts.tables_read * CLUSTER_BYTES,
                    lookups: counts.lookups,
                    misses: counts.misses,
                    ..of_network
                }
            }
            Side::Ours(ours) => {
                let before = &ours.before;
                let (counts, disk): (CacheCounts, FlashCounts) = (ours.cache.counts(), ours.disk.counts());
                let tables = ours.tables.as_ref().map(|tables| tables.counts()).unwrap_or_default();
                let records = counts.record_bytes - before.record_bytes;
                Counted {
                    flash_data: disk.slot_writes + disk.admit_writes,
                    flash_admitted: disk.admit_writes,
                    flash_metadata: records + counts.slice_bytes - before.slice_bytes
                        + tables.flash_write_bytes,
                    flash_metadata_read: tables.flash_read_bytes,
                    lookups: tables.lookups,
                    misses: tables.flash_hits + tables.misses,
                    flash_flushes: counts.flushes - before.flushes,
                    ..of_network
                }
            }
        }
    }

    /// What a server does beside requests.
    pub(crate) async fn tend(&self, now: Duration) {
        if let Side::Ours(ours) = &self.side {
            while ours.cache.tend(now).await {}
        }
    }
}

fn requests_of(counts: IoCounts) -> u64 {
    counts.reads + counts.writes
}

/// Room for what is no slot, generously.
fn ring_and_slices(slots: u64) -> u64 {
    (64 << 20) + slots.div_ceil(4096) * (2 * 90_112) + (1 << 20)
}

/// How much was asked.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asked {
    pub(crate) requests: u64,
    pub(crate) writes: u64,
    /// Requests over the network from the beginning to the end of a write; known where one comes after the other.
    network_in_writes: u64,
}

/// One request, to its end.
pub(crate) async fn ask_one(disk: &SharedDisk, side: &Side, request: Request) -> Result<()> {
    ask_disk(disk, request).await?;
    if matches!(request, Request::Flush | Request::WriteThrough { .. })
        && let Side::Rival(trdc) = side
    {
        trdc.sync().await;
    }
    Ok(())
}

/// One request of a disk, to its end.
pub(crate) async fn ask_disk(disk: &SharedDisk, request: Request) -> Result<()> {
    let filled = |len: usize| {
        let mut buffer = Buffer::for_overwrite(len);
        buffer.fill(FILL);
        buffer
    };
    let span = |offset: u64, len: usize| GuestSpan::checked(GuestOffset::new(offset), len as u64);
    match request {
        Request::Write { offset, len } | Request::WriteThrough { offset, len } => {
            disk.write(GuestOffset::new(offset), filled(len), WriteFlags::default()).await?;
        }
        Request::Read { offset, len } => {
            disk.read(GuestOffset::new(offset), Buffer::for_overwrite(len)).await?;
        }
        Request::Zero { offset, len } => {
            let span = span(offset, len).expect("checked when it was read");
            disk.write_zeroes(span, ZeroFlags::default()).await?;
        }
        Request::Discard { offset, len } => {
            let span = span(offset, len).expect("checked when it was read");
            disk.discard(span, WriteFlags::default()).await?;
        }
        Request::Flush => {}
    }
    if matches!(request, Request::Flush | Request::WriteThrough { .. }) {
        disk.flush().await?;
    }
    Ok(())
}

impl Asked {
    pub(crate) fn note(&mut self, request: Request) {
        let is_write = is_write(request);
        self.writes += u64::from(is_write);
        self.requests += u64::from(is_write || matches!(request, Request::Read { .. }));
    }
}

fn is_write(request: Request) -> bool {
    matches!(request, Request::Write { .. } | Request::WriteThrough { .. })
}

/// All requests, one after the other; now and then what a server does beside them.
pub(crate) async fn ask(scene: &Scene, requests: impl Iterator<Item = (Duration, Request)>) -> Result<Asked> {
    let mut asked = Asked::default();
    let network = || requests_of(scene.devices.network.counts());
    for (time, request) in requests {
        let before = network();
        ask_one(&scene.disk, &scene.side, request).await?;
        asked.note(request);
        if is_write(request) {
            asked.network_in_writes += network() - before;
        }
        if asked.requests.is_multiple_of(64) {
            scene.tend(time).await;
        }
    }
    Ok(asked)
}

/// All requests, so many at a time, in [`Order`], each after the guest's processor has had it.
pub(crate) async fn ask_many(
    scene: &Rc<Scene>,
    spawner: &Spawner,
    requests: impl Iterator<Item = Request> + 'static,
    depth: u64,
    processor: &Arc<Processor>,
) -> Result<Asked> {
    let requests = Rc::new(RefCell::new(requests));
    let asked = Rc::new(RefCell::new(Asked::default()));
    let order = Rc::new(Order::default());
    let workers = (0..depth).map(|_| {
        let (scene, requests, asked) = (scene.clone(), requests.clone(), asked.clone());
        let (processor, order) = (processor.clone(), order.clone());
        spawner.spawn(async move {
            loop {
                let next = requests.borrow_mut().next();
                let Some(request) = next else { return Ok(()) };
                let is_read = matches!(request, Request::Read { .. });
                let number = (!is_read).then(|| order.take(request == Request::Flush));
                if let Some(number) = number {
                    order.turn(number).await;
                }
                processor.work(request).await;
                ask_one(&scene.disk, &scene.side, request).await?;
                if let Some(number) = number {
                    order.end(number);
                }
                asked.borrow_mut().note(request);
            }
        })
    });
    let workers: Vec<_> = workers.collect();
    try_join_all(workers).await?;
    let asked = *asked.borrow();
    Ok(asked)
}
