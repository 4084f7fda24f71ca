//! A turn: a disk is opened, some requests warm it up, and the requests of all lanes are timed.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use imago::io_buffers::IoBuffer;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, StorageOpenOptions};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use vellum_core::{Buffer, Context, Error, GuestOffset, Random, Result, SharedDisk, WriteFlags};
use vellum_daemon::{CreateTarget, ImageOptions, create_native, create_qcow2, open_image};
use vellum_format::{FormatKind, Prealloc, native, qcow2};
use vellum_io::{IoMode, Workers, WorkersConfig, spawn_local};
use vellum_lab::guest::filler;

use super::cases::{Case, Engine, Pattern};
use crate::images::prepare;
use crate::load::workload::BLOCK;

/// What one write of [`Pattern::Allocate`] makes its own: a cluster of qcow2, a unit of the native format.
const UNIT: u64 = 64 << 10;

/// An odd number: multiples of it meet every unit of a power of two once, in an order without neighbours.
const STRIDE: u64 = 0x9E37_79B1;

const PIECE_BYTES: usize = 1 << 20;

/// What a turn came to.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Turn {
    pub(super) operations: u64,
    pub(super) seconds: f64,
    /// User and system time of this process.
    pub(super) cpu_seconds: f64,
}

impl Turn {
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    pub(super) fn cpu_us(&self) -> f64 {
        self.cpu_seconds * 1e6 / self.operations as f64
    }

    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    pub(super) fn kilo_per_second(&self) -> f64 {
        self.operations as f64 / self.seconds / 1000.0
    }
}

/// The images, and how they are used. Removed when dropped.
pub(super) struct Setting {
    dir: PathBuf,
    size: u64,
    depth: u64,
    workers: u16,
}

impl Setting {
    /// Makes the mapped images.
    pub(super) fn make(dir: &Path, size: u64, depth: u64, workers: u16) -> Result<Self> {
        let dir = dir.join(format!("vellum-bench-{}", std::process::id()));
        fs::create_dir_all(&dir).context(|| format!("can't make {}", dir.display()))?;
        let dir = dir.canonicalize().context(|| format!("can't find {}", dir.display()))?;
        let setting = Self { dir, size, depth, workers };
        for engine in Engine::ALL {
            let path = setting.mapped(engine);
            vellum_io::run(IoMode::Auto, async || {
                make(engine, &path, size).await?;
                fill(&path, engine, size).await
            })??;
        }
        Ok(setting)
    }

    fn mapped(&self, engine: Engine) -> PathBuf {
        self.dir.join(match engine {
            Engine::Qcow2 => "journaled.qcow2",
            Engine::Zoned => "zoned.vellum",
            Engine::Imago => "plain.qcow2",
        })
    }

    pub(super) fn take_turn(&self, engine: Engine, case: &Case, operations: u64, seed: u64) -> Result<Turn> {
        let warm_up = operations / 8;
        let workers = Workers::start(WorkersConfig {
            threads: self.workers.into(),
            mode: IoMode::Auto,
            ..WorkersConfig::default()
        })?;
        let path = if case.is_fresh() { self.dir.join("fresh") } else { self.mapped(engine) };
        let units = (operations + warm_up + u64::from(self.workers)).next_power_of_two();
        let size = if case.is_fresh() { units * UNIT } else { self.size };
        if case.is_fresh() {
            drop(fs::remove_file(&path));
            let path = path.clone();
            wait(workers.spawn(0, move || async move { make(engine, &path, size).await }))??;
        }
        prepare(&path, !case.is_direct)?;
        let is_direct = case.is_direct;
        let opened = {
            let path = path.clone();
            wait(workers.spawn(0, move || async move { Open::open(engine, &path, is_direct).await }))??
        };
        let drive = |done: u64, count: u64| {
            let each = count / u64::from(self.workers);
            let all: Vec<_> = (0..self.workers)
                .map(|index| {
                    let first = done / u64::from(self.workers);
                    let lanes = Lanes {
                        open: opened.clone(),
                        case: *case,
                        size,
                        units,
                        worker: u64::from(index),
                        workers: u64::from(self.workers),
                        next: Cell::new(first),
                        end: first + each,
                        seed,
                    };
                    let depth = self.depth;
                    workers.spawn(index.into(), move || lanes.run(depth))
                })
                .collect();
            all.into_iter().try_for_each(|one| wait(one)?)?;
            Ok::<u64, Error>(each * u64::from(self.workers))
        };
        drive(0, warm_up)?;
        let (begun, cpu) = (Instant::now(), cpu_seconds());
        let operations = drive(warm_up, operations)?;
        let turn =
            Turn { operations, seconds: begun.elapsed().as_secs_f64(), cpu_seconds: cpu_seconds() - cpu };
        wait(workers.spawn(0, move || async move { opened.close().await }))??;
        workers.join();
        Ok(turn)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.dir));
    }
}

fn wait<T: Send>(task: vellum_io::Spawned<T>) -> Result<T> {
    futures_lite::future::block_on(task)
}

/// User and system time of all threads of this process.
#[expect(clippy::cast_precision_loss, reason = "seconds are far below 2^53")]
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

async fn make(engine: Engine, path: &Path, size: u64) -> Result<()> {
    let target = CreateTarget {
        path: path.to_owned(),
        size: Some(size),
        backing: None,
        trust_backing: false,
        allow_dirs: Vec::new(),
        remote: Default::default(),
        trust_base: false,
        secrets: Default::default(),
        stands_on_encrypted: Default::default(),
        never_flushed: false,
    };
    match engine {
        Engine::Zoned => {
            let options = native::CreateOptions { has_table: true, has_zones: true, ..Default::default() };
            create_native(&target, options).await.map(drop)
        }
        Engine::Qcow2 | Engine::Imago => {
            let journal = (engine == Engine::Qcow2).then_some(qcow2::JOURNAL_BYTES_DEFAULT);
            create_qcow2(&target, qcow2::CreateOptions { journal, ..Default::default() }).await.map(drop)
        }
    }
}

fn options(engine: Engine, is_direct: bool) -> ImageOptions {
    let format = if engine == Engine::Zoned { FormatKind::Native } else { FormatKind::Qcow2 };
    ImageOptions { format: Some(format), direct: is_direct, prealloc: Prealloc::Off, ..Default::default() }
}

/// Writes all of the disk with bytes that do not compress.
async fn fill(path: &Path, engine: Engine, size: u64) -> Result<()> {
    let chain = open_image(path, &options(engine, false)).await?;
    let bytes = filler(PIECE_BYTES);
    for at in (0..size).step_by(PIECE_BYTES) {
        let data = Buffer::copy_of(&bytes);
        chain.disk().write(GuestOffset::new(at), data, WriteFlags::default()).await?;
    }
    chain.close().await
}

/// An engine with its disk.
#[derive(Clone)]
enum Open {
    Vellum(SharedDisk),
    Imago(Arc<FormatAccess<imago::file::File>>),
}

fn of_imago(error: std::io::Error) -> Error {
    Error::io(error, "imago")
}

impl Open {
    async fn open(engine: Engine, path: &Path, is_direct: bool) -> Result<Self> {
        if engine != Engine::Imago {
            let chain = open_image(path, &options(engine, is_direct)).await?;
            return Ok(Self::Vellum(chain.disk().clone()));
        }
        let file = StorageOpenOptions::new().filename(path).write(true).direct(is_direct);
        let file = <imago::file::File as imago::Storage>::open(file).await.map_err(of_imago)?;
        let disk = imago::qcow2::Qcow2::<imago::file::File>::builder(file)
            .write(true)
            .backing(None)
            .data_file(None)
            .open(DenyImplicitOpenGate::default());
        Ok(Self::Imago(Arc::new(FormatAccess::new(disk.await.map_err(of_imago)?))))
    }

    async fn flush(&self) -> Result<()> {
        match self {
            Self::Vellum(disk) => disk.flush().await,
            Self::Imago(disk) => {
                disk.flush().await.map_err(of_imago)?;
                disk.sync().await.map_err(of_imago)
            }
        }
    }

    async fn close(&self) -> Result<()> {
        match self {
            Self::Vellum(disk) => disk.close().await,
            Self::Imago(_) => self.flush().await,
        }
    }
}

/// The requests of one worker, and the engine that executes them.
struct Lanes {
    open: Open,
    case: Case,
    size: u64,
    units: u64,
    worker: u64,
    workers: u64,
    /// Which one comes next, of this worker's.
    next: Cell<u64>,
    end: u64,
    seed: u64,
}

impl Lanes {
    async fn run(self, depth: u64) -> Result<()> {
        let lanes = Rc::new(self);
        let spawn = |lane| {
            let lanes = lanes.clone();
            spawn_local(async move { lanes.lane(lane).await })
        };
        let all: Vec<_> = (0..depth).map(spawn).collect();
        for lane in all {
            lane.await?;
        }
        Ok(())
    }

    async fn lane(&self, lane: u64) -> Result<()> {
        let seed = (self.seed * self.workers + self.worker) * 4096 + lane + self.end;
        let mut random = Random::from_seed(seed);
        let mut own = IoBuffer::new(BLOCK, 4096).map_err(of_imago)?;
        own.as_mut().into_slice().copy_from_slice(&filler(BLOCK));
        let block = filler(BLOCK);
        loop {
            let index = self.next.get();
            if index >= self.end {
                return Ok(());
            }
            self.next.set(index + 1);
            let at = match self.case.pattern {
                Pattern::Allocate => {
                    let unit = (index * self.workers + self.worker).wrapping_mul(STRIDE) % self.units;
                    unit * UNIT + random.below(UNIT / BLOCK as u64) * BLOCK as u64
                }
                Pattern::Read | Pattern::Overwrite => random.below(self.size / BLOCK as u64) * BLOCK as u64,
            };
            match (&self.open, self.case.pattern) {
                (Open::Vellum(disk), Pattern::Read) => {
                    let read = disk.read(GuestOffset::new(at), Buffer::for_overwrite(BLOCK)).await?;
                    std::hint::black_box(read.len());
                }
                (Open::Vellum(disk), _) => {
                    disk.write(GuestOffset::new(at), Buffer::copy_of(&block), WriteFlags::default()).await?;
                }
                (Open::Imago(disk), Pattern::Read) => disk.read(&mut own, at).await.map_err(of_imago)?,
                (Open::Imago(disk), _) => disk.write(&own, at).await.map_err(of_imago)?,
            }
            if self.case.flush_every.is_some_and(|writes| (index + 1).is_multiple_of(writes)) {
                self.open.flush().await?;
            }
        }
    }
}
