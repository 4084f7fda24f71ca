//! An image on a modelled drive, and the engine that serves it.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vellum_core::{
    Buffer, Clock, Error, GuestOffset, HostTally, ImageOffset, Limits, Result, SharedDisk, SharedStorage,
    WriteFlags, try_join_all,
};
use vellum_format::image::Files;
use vellum_format::native::{CreateOptions, Native, OpenOptions, create};
use vellum_format::{Prealloc, Raw, qcow2};
use vellum_lab::guest::Bytes;
use vellum_sim::World;
use vellum_sim::model::Medium;

use super::{Below, Drive, Image, REQUEST, Stage, UNIT, ZONE};
use crate::model::{ForgetfulDrive, Hdd, HddParameters, HostFile, HostLayout, Ssd, SsdParameters};
use crate::recent::Recent;
use crate::then::{Kind, Then};

/// The disk of the paper's random writes.
pub(super) const DISK: u64 = 300_000_000_000 / ZONE * ZONE;
const DRIVE: u64 = 320_000_000_000 / ZONE * ZONE;
/// What the drive keeps of an image: everything but guest data.
const KEPT: u64 = 256 << 20;
pub(super) const SEED: u64 = 1;
/// How often the engine is asked to tend its disk, as its server does: when there is nothing more to do at
/// once, and when there is.
pub(super) const TENDED_EVERY: Duration = Duration::from_millis(50);
const TENDED_NEXT: Duration = Duration::from_millis(1);
/// The idle time before a measurement: an image is made, and then not written for a while.
const IDLE: Duration = Duration::from_secs(60);
/// What it takes more to make a zone zero, with time to spare.
const IDLE_FOR_A_ZONE: Duration = Duration::from_millis(1500);

pub(super) enum Engine {
    Disk(SharedDisk),
    Then(Then),
}

impl Engine {
    pub(super) async fn write(&self, at: u64, data: &[u8]) -> Result<()> {
        match self {
            Self::Disk(disk) => {
                disk.write(GuestOffset::new(at), Buffer::copy_of(data), WriteFlags::default()).await
            }
            Self::Then(then) => then.write(at, data).await,
        }
    }

    pub(super) async fn flush(&self) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.flush().await,
            Self::Then(then) => then.flush().await,
        }
    }

    pub(super) async fn read(&self, at: u64, len: usize) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.read(GuestOffset::new(at), Buffer::zeroed(len)).await.map(drop),
            Self::Then(then) => then.read(at, len as u64).await,
        }
    }
}

/// An image on a drive.
pub(super) struct Scene {
    pub(super) world: World,
    pub(super) drive: Arc<Recent>,
    pub(super) engine: Rc<Engine>,
    pub(super) tally: HostTally,
    /// The disk is not tended any more.
    pub(super) has_crashed: Arc<AtomicBool>,
    idle: Duration,
    /// What guests write: as much as a request, so often as units that pack.
    pub(super) bytes: Arc<Vec<u8>>,
}

/// Data for guests of which this many units in a hundred are compressible.
pub(super) fn units_of_which(pack: u32) -> Arc<Vec<u8>> {
    let (same, noise) = (Bytes::Same.make(UNIT), Bytes::Noise.make(UNIT));
    let unit = |index: usize| match pack {
        0 => &noise,
        50 if index.is_multiple_of(2) => &noise,
        _ => &same,
    };
    Arc::new((0..REQUEST / UNIT).flat_map(|index| unit(index).iter().copied()).collect())
}

impl Scene {
    pub(super) fn new(image: Image, stage: Stage, disk: u64) -> Result<Self> {
        let world = World::new(SEED);
        let medium = match stage.drive {
            Drive::Hdd => Medium::new(Hdd::new(HddParameters::desktop_7200())),
            Drive::Ssd => Medium::new(Ssd::new(SsdParameters::consumer_sata())),
        };
        let limits = match stage.below {
            Below::Volume | Below::Cleared(_) => {
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
            Below::Volume | Below::Cleared(_) | Below::ThinVolume => drive.clone(),
        };
        let prealloc = match stage.below {
            Below::Cleared(zones) => Prealloc::Fixed(u64::from(zones) * ZONE),
            _ => Prealloc::Auto,
        };
        let tally = HostTally::default();
        let engine = match image {
            Image::Host => Engine::Disk(Raw::open(drive.clone(), false, &tally)),
            Image::Zoned | Image::Table => {
                let (opened, data_offset) =
                    world.run(open(storage, image == Image::Zoned, disk, &tally, world.clock(), prealloc))?;
                drive.count_from(data_offset + if stage.below == Below::File { ZONE } else { 0 });
                Engine::Disk(opened)
            }
            Image::RawFile => {
                if stage.below == Below::File {
                    world.run(storage.set_len(disk))?;
                }
                Engine::Disk(Raw::open(storage, false, &tally))
            }
            Image::Journal => Engine::Disk(world.run(open_qcow2(storage, disk, &tally, world.clock()))?),
            Image::Qcow2 => Engine::Then(Then::new(Kind::Qcow2, storage)),
            Image::Fvd => Engine::Then(Then::new(Kind::Fvd, storage)),
            Image::Qed => Engine::Then(Then::new(Kind::Qed, storage)),
        };
        let scene = Self {
            world,
            drive,
            engine: Rc::new(engine),
            tally,
            has_crashed: Arc::default(),
            idle: match stage.below {
                Below::Cleared(zones) => IDLE + IDLE_FOR_A_ZONE * zones,
                _ => IDLE,
            },
            bytes: units_of_which(stage.packs),
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

    /// Writes this many bytes there, as many requests at a time as they make.
    pub(super) async fn write(engine: &Engine, bytes: &[u8], at: u64, len: usize) -> Result<()> {
        let requests = (0..len).step_by(REQUEST).map(|from| {
            let at = at + from as u64;
            let within = usize::try_from(at).expect("64 bits") % REQUEST;
            let now = (len - from).min(REQUEST);
            Box::pin(engine.write(at, &bytes[within..within + now]))
        });
        try_join_all(requests).await.map(drop)
    }

    /// The first write of an image, followed by idle time for its preparations.
    pub(super) fn make_ready(&self, at: u64) -> Result<()> {
        self.world.run(async {
            self.engine.write(at, &self.bytes).await?;
            self.engine.flush().await
        })?;
        self.idle();
        Ok(())
    }

    /// Idle time, for preparations.
    pub(super) fn idle(&self) {
        self.world.run(self.world.sleep(self.idle));
    }

    /// So many workers, each of which takes the next item when it has done one.
    pub(super) fn work<I, A, F>(&self, workers: u64, items: I, act: A) -> Result<()>
    where
        I: Iterator + 'static,
        A: Fn(Rc<Engine>, I::Item) -> F + Clone + 'static,
        F: Future<Output = Result<()>> + 'static,
    {
        let items = Rc::new(RefCell::new(items));
        let workers = (0..workers).map(|_| {
            let (engine, items, act) = (self.engine.clone(), items.clone(), act.clone());
            self.world.spawn(async move {
                loop {
                    let next = items.borrow_mut().next();
                    match next {
                        Some(item) => act(engine.clone(), item).await?,
                        None => return Ok(()),
                    }
                }
            })
        });
        let workers: Vec<_> = workers.collect();
        self.world.run(try_join_all(workers)).map(drop)
    }

    pub(super) fn flush(&self) -> Result<()> {
        self.world.run(self.engine.flush())
    }

    /// How long that takes, in seconds of virtual time.
    pub(super) fn time(&self, act: impl FnOnce() -> Result<()>) -> Result<f64> {
        let begun = self.world.now();
        act()?;
        Ok((self.world.now() - begun).as_secs_f64())
    }
}

/// A new qcow2 image with a journal.
async fn open_qcow2(
    storage: SharedStorage,
    size: u64,
    tally: &HostTally,
    clock: Arc<dyn Clock>,
) -> Result<SharedDisk> {
    let options = qcow2::CreateOptions { size, ..qcow2::CreateOptions::default() };
    qcow2::create(&*storage, None, &options).await?;
    let header = qcow2::Header::read(&*storage).await?;
    let options = qcow2::OpenOptions {
        tally: tally.clone(),
        journal_key: Some(1),
        clock: Some(clock),
        ..qcow2::OpenOptions::default()
    };
    Ok(qcow2::Qcow2::open(header, Files { image: storage, data_file: None, below: None }, options).await?)
}

/// A new image, and where its units begin.
async fn open(
    storage: SharedStorage,
    has_zones: bool,
    size: u64,
    tally: &HostTally,
    clock: Arc<dyn Clock>,
    prealloc: Prealloc,
) -> Result<(SharedDisk, u64)> {
    let options =
        CreateOptions { size, has_table: true, has_zones, uuid: Some([7; 16]), ..CreateOptions::default() };
    let made = create(&*storage, &options).await?;
    let data_offset = made.places().data_offset().bytes();
    if data_offset > KEPT - 2 * ZONE {
        return Err(Error::invalid("the drive would forget metadata"));
    }
    let options = OpenOptions {
        tally: tally.clone(),
        journal_key: Some(1),
        clock: Some(clock),
        prealloc,
        ..OpenOptions::default()
    };
    Ok((Native::open(storage, None, options).await?, data_offset))
}
