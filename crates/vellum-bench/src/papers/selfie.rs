//! The rows of the paper Selfie (SYSTOR 2015), made again: what it buys that a block holds its own entry.
//!
//! ```text
//!   threads: write ─ flush ─ write ─ ...  ┐    HOST │ zoned │ table │ QCOW2, FVD, QED of then       on a volume, or
//!   dd: writes, 32 at a time ─ flush      ┴─▶                                                       in a file that grows
//! ```
//!
//! The engine is the one that serves disks; HOST is a raw image; the others are in [`super::then`]. The drive is a model. A request of more than
//! 512 KiB comes to a disk as several, as virtio and the guest's block layer have it. A volume is a device: its units are made zero by
//! writing, in the time the engine takes for that (`tend`), before and while the guest writes. A thin volume makes them zero for nothing,
//! so it leaves out what the paper calls zone clearing: what is told of it has less to do than the paper's Selfie had.
//!
//! Nothing is fitted here: the one constant that was (the HDD's `flush_overhead`, on S4) is in the model.

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use vellum_core::{
    Buffer, Error, GuestOffset, HostTally, ImageOffset, IoCounts, Limits, Random, Result, SharedDisk,
    SharedStorage, WriteFlags, try_join_all,
};
use vellum_format::Raw;
use vellum_format::native::{CreateOptions, Native, OpenOptions, create, recover};
use vellum_sim::World;
use vellum_sim::model::{
    ForgetfulDrive, Hdd, HddParameters, HostFile, HostLayout, Medium, Ssd, SsdParameters,
};

use super::recent::Recent;
use super::then::{Kind, Then};
use crate::load::guest::Bytes;

/// The disk of the paper's random writes.
const DISK: u64 = 300_000_000_000 / ZONE * ZONE;
const DRIVE: u64 = 320_000_000_000 / ZONE * ZONE;
const ZONE: u64 = 64 << 20;
const UNIT: usize = 64 << 10;
/// What the drive keeps of an image: everything but guest data.
const KEPT: u64 = 256 << 20;
/// What a thread has for itself.
const PART: u64 = 8 << 30;
/// The longest request that reaches a disk.
const REQUEST: usize = 512 << 10;
const SEED: u64 = 1;
/// How often the engine is asked to tend its disk, as its server does: when there is nothing more to do at once, and when there is.
const TENDED_EVERY: Duration = Duration::from_millis(50);
const TENDED_NEXT: Duration = Duration::from_millis(1);

/// Who answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Image {
    Host,
    Zoned,
    Table,
    Qcow2,
    Fvd,
    Qed,
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
        }
    }
}

/// What the image lies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Below {
    /// A volume whose space has to be made zero.
    Volume,
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

/// Whether places follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    Sequential,
    Random,
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

enum Engine {
    Disk(SharedDisk),
    Then(Then),
}

impl Engine {
    async fn write(&self, at: u64, data: &[u8]) -> Result<()> {
        match self {
            Self::Disk(disk) => {
                disk.write(GuestOffset::new(at), Buffer::copy_of(data), WriteFlags::default()).await
            }
            Self::Then(then) => then.write(at, data).await,
        }
    }

    async fn flush(&self) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.flush().await,
            Self::Then(then) => then.flush().await,
        }
    }
}

/// An image on a drive.
struct Scene {
    world: World,
    drive: Arc<Recent>,
    engine: Rc<Engine>,
    metadata: HostTally,
    /// Nobody tends the disk any more.
    has_crashed: Arc<AtomicBool>,
    /// What guests write: as much as a request, so often as units that pack.
    bytes: Arc<Vec<u8>>,
}

impl Scene {
    fn new(image: Image, stage: Stage, disk: u64) -> Result<Self> {
        let world = World::new(SEED);
        let medium = match stage.drive {
            Drive::Hdd => Medium::new(Hdd::new(HddParameters::desktop_7200())),
            Drive::Ssd => Medium::new(Ssd::new(SsdParameters::consumer_sata())),
        };
        let limits = match stage.below {
            Below::Volume => {
                Limits { fixed_len: true, grows_zeroed: false, fast_zeroes: false, ..Limits::plain() }
            }
            Below::ThinVolume => Limits { fixed_len: true, grows_zeroed: false, ..Limits::plain() },
            Below::File => Limits::plain(),
        };
        let drive = Recent::over(ForgetfulDrive::new(&world, medium, limits, DRIVE, KEPT), KEPT);
        let storage: SharedStorage = match stage.below {
            Below::File => {
                let journal = ImageOffset::ZERO.span(ZONE);
                HostFile::new(drive.clone(), HostLayout { journal, file: ImageOffset::new(ZONE) })
            }
            Below::Volume | Below::ThinVolume => drive.clone(),
        };
        let metadata = HostTally::default();
        let engine = match image {
            Image::Host => Engine::Disk(Raw::open(drive.clone(), false, &metadata)),
            Image::Zoned | Image::Table => {
                Engine::Disk(world.run(open(storage, image == Image::Zoned, disk, &metadata))?)
            }
            Image::Qcow2 => Engine::Then(Then::new(Kind::Qcow2, storage)),
            Image::Fvd => Engine::Then(Then::new(Kind::Fvd, storage)),
            Image::Qed => Engine::Then(Then::new(Kind::Qed, storage)),
        };
        let (same, noise) = (Bytes::Same.make(UNIT), Bytes::Noise.make(UNIT));
        let unit = |index: usize| match stage.packs {
            0 => &noise,
            50 if index.is_multiple_of(2) => &noise,
            _ => &same,
        };
        let bytes = (0..REQUEST / UNIT).flat_map(|index| unit(index).iter().copied()).collect();
        let scene = Self {
            world,
            drive,
            engine: Rc::new(engine),
            metadata,
            has_crashed: Arc::default(),
            bytes: Arc::new(bytes),
        };
        scene.tend();
        Ok(scene)
    }

    /// What the server does beside the requests, as long as the scene is there.
    fn tend(&self) {
        let Engine::Disk(disk) = &*self.engine else { return };
        let (disk, spawner, clock) = (disk.clone(), self.world.spawner(), self.world.clock());
        let has_crashed = self.has_crashed.clone();
        spawner.spawn(async move {
            while !has_crashed.load(Ordering::Acquire) {
                let has_more = disk.tend(clock.now()).await;
                clock.sleep(if has_more { TENDED_NEXT } else { TENDED_EVERY }).await;
            }
        });
    }

    /// Writes so many bytes there, as many requests at a time as they are.
    async fn write(engine: &Engine, bytes: &[u8], at: u64, len: usize) -> Result<()> {
        let requests = (0..len).step_by(REQUEST).map(|from| {
            let at = at + from as u64;
            let within = usize::try_from(at).expect("64 bits") % REQUEST;
            let now = (len - from).min(REQUEST);
            Box::pin(engine.write(at, &bytes[within..within + now]))
        });
        try_join_all(requests).await.map(drop)
    }
}

async fn open(storage: SharedStorage, has_zones: bool, size: u64, tally: &HostTally) -> Result<SharedDisk> {
    let options =
        CreateOptions { size, has_table: true, has_zones, uuid: Some([7; 16]), ..CreateOptions::default() };
    let made = create(&*storage, &options).await?;
    if made.places().data_offset().bytes() > KEPT - 2 * ZONE {
        return Err(Error::invalid("the drive would forget metadata"));
    }
    let options = OpenOptions { tally: tally.clone(), journal_key: Some(1), ..OpenOptions::default() };
    Ok(Native::open(storage, None, options).await?)
}

/// Threads that write and flush: how much of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Fio {
    pub(crate) threads: u64,
    pub(crate) request: usize,
    pub(crate) order: Order,
    /// Of all threads together.
    pub(crate) bytes: u64,
}

/// What fio says: megabytes a second. The first quarter of the bytes does not count, nor a minute before it.
pub(crate) fn fio(image: Image, stage: Stage, fio: Fio) -> Result<f64> {
    let scene = Scene::new(image, stage, DISK)?;
    let each = fio.bytes / fio.threads / fio.request as u64;
    let run = |from: u64, count: u64| -> Result<Duration> {
        let begun = scene.world.now();
        let threads = (0..fio.threads).map(|thread| {
            let (engine, bytes) = (scene.engine.clone(), scene.bytes.clone());
            let places = places(fio, thread, from, count);
            scene.world.spawn(async move {
                for at in places {
                    Scene::write(&engine, &bytes, at, fio.request).await?;
                    engine.flush().await?;
                }
                Ok(())
            })
        });
        let threads: Vec<_> = threads.collect();
        scene.world.run(try_join_all(threads))?;
        Ok(scene.world.now() - begun)
    };
    let warm_up = (each / 4).max(1);
    run(0, 1)?;
    scene.world.run(scene.world.sleep(Duration::from_secs(60)));
    run(1, warm_up)?;
    let took = run(1 + warm_up, each)?;
    Ok((each * fio.threads * fio.request as u64) as f64 / took.as_secs_f64() / 1e6)
}

fn places(fio: Fio, thread: u64, from: u64, count: u64) -> Vec<u64> {
    let len = fio.request as u64;
    let mut random = Random::from_seed(SEED + thread * 1_000_003 + from);
    let place = |index: u64| match fio.order {
        Order::Sequential => thread * PART + index * len % PART,
        Order::Random => random.below(DISK / len) * len,
    };
    (from..from + count).map(place).collect()
}

/// `dd` with a sync at its end, once or twice to the same place: seconds of each, and what was read.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Dd {
    pub(crate) seconds: f64,
    /// Of one that is written over it, of bytes that do not pack.
    pub(crate) again_seconds: Option<f64>,
    pub(crate) again_reads: u64,
}

pub(crate) fn dd(image: Image, stage: Stage, bytes: u64, is_overwritten: bool) -> Result<Dd> {
    const DEPTH: u64 = 32;
    let scene = Scene::new(image, stage, DISK)?;
    let noise: Arc<Vec<u8>> = Arc::new(Bytes::Noise.make(REQUEST));
    let copy = |data: &Arc<Vec<u8>>| -> Result<f64> {
        let begun = scene.world.now();
        // Workers take the next request each, so that it is always as many.
        let next = Arc::new(Mutex::new(0));
        let workers = (0..DEPTH).map(|_| {
            let (engine, data, next) = (scene.engine.clone(), data.clone(), next.clone());
            scene.world.spawn(async move {
                loop {
                    let at = {
                        let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
                        let at = *next;
                        *next += REQUEST as u64;
                        at
                    };
                    if at >= bytes {
                        return Ok(());
                    }
                    engine.write(at, &data).await?;
                }
            })
        });
        let workers: Vec<_> = workers.collect();
        scene.world.run(async {
            try_join_all(workers).await?;
            scene.engine.flush().await
        })?;
        Ok((scene.world.now() - begun).as_secs_f64())
    };
    // The file that dd reads was read meanwhile: time to make ready.
    scene.world.run(async {
        scene.engine.write(DISK - ZONE, &scene.bytes).await?;
        scene.engine.flush().await
    })?;
    scene.world.run(scene.world.sleep(Duration::from_secs(60)));
    let seconds = copy(&scene.bytes)?;
    let before = scene.drive.counts().reads;
    let again_seconds = if is_overwritten { Some(copy(&noise)?) } else { None };
    Ok(Dd { seconds, again_seconds, again_reads: scene.drive.counts().reads - before })
}

/// What a recovery costs: reads and bytes of the image, and seconds on the modelled drive.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Recovered {
    /// Units that the image has, each born with its own entry.
    pub(crate) units: u64,
    /// Those whose block alone told of them.
    pub(crate) born: u64,
    pub(crate) records: u64,
    pub(crate) reads: u64,
    pub(crate) mebibytes_read: f64,
    pub(crate) seconds: f64,
}

/// An image of so many bytes, full of what packs but for half a zone, that was not closed. What is written of each unit is its first block: a recovery
/// does not look at more.
pub(crate) fn recovery(drive: Drive, bytes: u64) -> Result<Recovered> {
    let stage = Stage { drive, below: Below::ThinVolume, packs: 100 };
    let scene = Scene::new(Image::Zoned, stage, bytes)?;
    // The last zone is half full: its blocks alone tell of its units.
    let units = bytes / UNIT as u64 - 512;
    scene.world.run(async {
        for unit in 0..units {
            scene.engine.write(unit * UNIT as u64, &scene.bytes[..4096]).await?;
            if unit % 64 == 63 {
                scene.engine.flush().await?;
            }
        }
        scene.engine.flush().await
    })?;
    if scene.metadata.data.counts().writes != units {
        return Err(Error::corrupt("a unit was written otherwise than once"));
    }
    scene.has_crashed.store(true, Ordering::Release);
    scene.world.run(scene.world.sleep(2 * TENDED_EVERY));
    let (before, begun): (IoCounts, _) = (scene.drive.counts(), scene.world.now());
    let storage: SharedStorage = scene.drive.clone();
    let recovered = scene.world.run(recover(&storage))?;
    let after = scene.drive.counts();
    Ok(Recovered {
        units,
        born: recovered.born,
        records: recovered.records,
        reads: after.reads - before.reads,
        mebibytes_read: (after.bytes_read - before.bytes_read) as f64 / f64::from(1 << 20),
        seconds: (scene.world.now() - begun).as_secs_f64(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(below: Below) -> Stage {
        Stage { drive: Drive::Hdd, below, packs: 100 }
    }

    fn small(threads: u64) -> Fio {
        Fio { threads, request: UNIT, order: Order::Sequential, bytes: 8 << 20 }
    }

    #[test]
    fn a_zoned_image_is_as_fast_as_the_host_and_grows_with_threads() {
        let run = |image, threads| fio(image, stage(Below::ThinVolume), small(threads)).unwrap();
        let (host, zoned, qcow2) = (run(Image::Host, 1), run(Image::Zoned, 1), run(Image::Qcow2, 1));
        assert!(zoned >= 0.95 * host, "S4: {zoned} {host}");
        assert!(zoned >= 1.5 * qcow2, "S4: {zoned} {qcow2}");
        let many = run(Image::Zoned, 8);
        assert!(many >= 3.0 * zoned, "S5: {many} {zoned}");
        assert!(many >= 2.0 * run(Image::Qcow2, 8) && many >= 2.0 * run(Image::Host, 8), "S5: {many}");
        // Virtual time: the same each time.
        assert!((run(Image::Zoned, 8) - many).abs() < f64::EPSILON);
    }

    #[test]
    fn a_recovery_reads_the_journal_and_young_zones_whatever_the_size() {
        let (small, large) = (recovery(Drive::Hdd, 1 << 30).unwrap(), recovery(Drive::Hdd, 4 << 30).unwrap());
        for seen in [small, large] {
            assert!(seen.born > 0 && seen.born < seen.units, "{seen:?}");
            assert!(seen.reads <= 2048 && seen.mebibytes_read <= 160.0, "{seen:?}");
        }
        assert_eq!(recovery(Drive::Hdd, 1 << 30).unwrap(), small);
        assert!(large.mebibytes_read < small.mebibytes_read + 64.0, "{small:?} {large:?}");
    }
}
