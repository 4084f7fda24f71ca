//! Every kind of image over a storage whose guest changes its memory while it is written, and a run of random
//! writes, flushes and kills on it.

#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::common::native::{NativeSetup, look_native, native_setups};
use crate::common::{QcowSetup, SIZE, base, look, setups};
use vellum_core::{
    Buffer, CheckedDisk, Disk, GuestOffset, ImageOffset, LocalFuture, MemoryDisk, MemoryStorage, Random,
    Result, SharedBytes, SharedDisk, SharedStorage, Storage, WriteFlags,
};
use vellum_format::native::{self, Native};
use vellum_format::qcow2::{Files, Header, OpenOptions, Qcow2};
use vellum_sim::{ForwardStorage, Forwarding};

pub(crate) const SECTOR: usize = 512;

/// A storage under a guest that changes what is lent just before it is written.
pub(crate) struct Restless {
    inner: Arc<MemoryStorage>,
    /// So many bytes were changed.
    changed: AtomicU64,
    /// So many bytes were put into lent memory that no guest ever wrote.
    pub(crate) foreign: AtomicU64,
}

/// What the guest makes of a byte.
pub(crate) fn other(byte: u8) -> u8 {
    byte ^ 3
}

/// Whether a guest may have written it.
pub(crate) fn is_guests(byte: u8) -> bool {
    byte.is_multiple_of(4) || other(byte).is_multiple_of(4)
}

impl Restless {
    pub(crate) fn over(inner: Arc<MemoryStorage>) -> Arc<Forwarding<Self>> {
        Forwarding::new(Self { inner, changed: AtomicU64::new(0), foreign: AtomicU64::new(0) })
    }

    fn change(&self, data: Buffer) -> Buffer {
        let (mut rest, mut all) = (data, Buffer::empty());
        while !rest.is_empty() {
            let first = rest.piece_lengths().next().expect("there are bytes");
            let mut piece = rest.split_to(first);
            if piece.is_lent() {
                let bytes: Vec<u8> = piece.to_vec().into_iter().map(other).collect();
                piece.copy_from(0, &bytes);
                self.changed.fetch_add(first as u64, Relaxed);
            }
            all.append(piece);
        }
        all
    }
}

impl ForwardStorage for Restless {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let buffer = self.inner.read(at, buffer).await?;
            if buffer.is_lent() {
                let foreign = buffer.to_vec().into_iter().filter(|byte| !is_guests(*byte)).count();
                self.foreign.fetch_add(foreign as u64, Relaxed);
            }
            Ok(buffer)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        self.inner.write(at, self.change(data))
    }
}

/// One kind of image.
pub(crate) enum Kind {
    Qcow2(QcowSetup),
    Native(NativeSetup),
}

impl Kind {
    pub(crate) fn all() -> Vec<Self> {
        let qcow2 = setups().into_iter().map(Self::Qcow2);
        // Many units, so that some hold their own entries when a zone is open.
        let embedding = NativeSetup::zoned("zoned, many units", 8 * SIZE, 64 << 10, 1 << 20);
        qcow2.chain(native_setups().into_iter().chain([embedding]).map(Self::Native)).collect()
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Qcow2(setup) => setup.name,
            Self::Native(setup) => setup.name,
        }
    }

    /// Whether records say what data arrived.
    pub(crate) fn has_checks(&self) -> bool {
        match self {
            Self::Qcow2(setup) => setup.options.journal.is_some(),
            Self::Native(setup) => setup.base.is_some(),
        }
    }

    fn has_base(&self) -> bool {
        match self {
            Self::Qcow2(setup) => setup.has_base,
            Self::Native(setup) => setup.base.is_some(),
        }
    }

    /// Recovered, when there is something to recover.
    fn is_recovered(&self) -> bool {
        !matches!(self, Self::Qcow2(setup) if setup.options.journal.is_none())
    }

    pub(crate) fn empty(&self) -> (Vec<u8>, Vec<u8>) {
        match self {
            Self::Qcow2(setup) => (setup.empty_image().to_vec(), setup.content().to_vec()),
            Self::Native(setup) => (setup.empty_image().to_vec(), setup.content().to_vec()),
        }
    }

    pub(crate) async fn open(&self, image: SharedStorage) -> Result<SharedDisk> {
        let disk: SharedDisk = match self {
            Self::Qcow2(setup) => {
                let header = Header::read(&*image).await?;
                let below = setup.has_base.then(|| MemoryDisk::holding(&base()) as SharedDisk);
                let files = Files { image, data_file: None, below };
                let options = OpenOptions { journal_key: Some(1), ..OpenOptions::default() };
                Qcow2::open(header, files, options).await?
            }
            Self::Native(setup) => {
                let options = native::OpenOptions { journal_key: Some(1), ..native::OpenOptions::default() };
                Native::open(image, setup.below(), options).await?
            }
        };
        Ok(CheckedDisk::new(disk))
    }

    async fn check(&self, image: &SharedStorage) -> std::result::Result<(), String> {
        let said = |chain: vellum_core::Error| chain.chain();
        let (is_clean, lines) = match self {
            Self::Qcow2(_) => look(image).await.map(|(report, lines)| (report.is_clean(), lines)),
            Self::Native(_) => look_native(image).await.map(|(report, lines)| (report.is_clean(), lines)),
        }
        .map_err(said)?;
        if is_clean { Ok(()) } else { Err(format!("the check says {lines:?}")) }
    }
}

/// The whole disk, read into lent memory.
pub(crate) async fn whole(disk: &dyn Disk, len: usize) -> Result<Vec<u8>> {
    let memory = SharedBytes::zeroed(len);
    disk.read(GuestOffset::ZERO, memory.lend(&[(0, len)])).await?;
    Ok(memory.get(0, len))
}

/// Writes, flushes and kills; what was wrong, and how many bytes the guest changed in time.
pub(crate) async fn run(kind: &Kind, seed: u64, steps: usize) -> std::result::Result<u64, String> {
    let mut random = Random::from_seed(seed);
    let (bytes, mut model) = kind.empty();
    let mut image = MemoryStorage::holding("image", &bytes);
    let mut restless = Restless::over(image.clone());
    let mut disk = kind.open(restless.clone()).await.map_err(|error| error.chain())?;
    let mut changed = 0;
    for step in 0..steps {
        for _ in 0..=random.index(4) {
            let blocks = (model.len() - 32_768) / 4096;
            let block = if random.one_in(2) { random.index(4) * blocks / 4 } else { random.index(blocks) };
            let at = block * 4096 + random.index(3) * SECTOR;
            let len = *random.pick(&[SECTOR, 4096, 4096, 8192, 20_480]);
            let len = len.min(model.len() - at);
            // The two lowest bits say which of a write's values a byte is.
            let value = u8::try_from((random.index(60) + 1) * 4).expect("a byte");
            let memory = SharedBytes::zeroed(len + SECTOR);
            let cut = random.index(len / SECTOR) * SECTOR;
            let lent = || memory.lend(&[(SECTOR, cut), (SECTOR + cut, len - cut)]);
            lent().fill(value);
            disk.write(GuestOffset::new(at as u64), lent(), WriteFlags::default())
                .await
                .map_err(|error| error.chain())?;
            lent().fill(0xFF);
            model[at..at + len].fill(value);
        }
        if random.one_in(2) {
            // Also what has not gone home yet.
            whole(&*disk, model.len()).await.map_err(|error| error.chain())?;
        }
        disk.flush().await.map_err(|error| error.chain())?;
        let image_now = image.content();
        let what = |why: String| format!("{}, seed {seed}, step {step}: {why}", kind.name());
        if kind.is_recovered() && random.one_in(2) {
            // Killed: the disk gets no more requests. Another one continues with what is there.
            changed += restless.changed.load(Relaxed);
            image = MemoryStorage::with("image", image.limits().clone(), image_now);
            restless = Restless::over(image.clone());
            drop(disk);
            disk = kind.open(restless.clone()).await.map_err(|error| what(error.chain()))?;
        }
        let seen = whole(&*disk, model.len()).await.map_err(|error| what(error.chain()))?;
        let is_one = |(seen, wanted): (&u8, &u8)| *seen == *wanted || *seen == other(*wanted);
        if let Some(at) = seen.iter().zip(&model).position(|pair| !is_one(pair)) {
            return Err(what(format!("byte {at:#x} is {:#x}, and was {:#x}", seen[at], model[at])));
        }
        if !kind.has_base() && restless.foreign.load(Relaxed) > 0 {
            return Err(what("a guest saw bytes that are not its disk's".to_owned()));
        }
        // What is there now stays.
        model = seen;
    }
    disk.close().await.map_err(|error| error.chain())?;
    let image: SharedStorage = image;
    kind.check(&image).await?;
    Ok(changed + restless.changed.load(Relaxed))
}

pub(crate) const SEEDS: u64 = 12;
