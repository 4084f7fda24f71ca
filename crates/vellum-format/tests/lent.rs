//! A guest that changes its memory while it is written: nothing but its own bytes may suffer, and an image
//! that is killed after a flush has one of the values of each byte.
//!
//! ```text
//!   write of 0x11, lent ──► format ──► here: the guest turns what is still its memory into 0x12 ──► storage
//! ```
//!
//! Data that is read into lent memory is the guest's, never what the format stores beside it: a packed block
//! contains a zone's tag.
//!
//! Bytes that the format copied arrive as 0x11, the rest as 0x12, and both are correct. A checksum of bytes
//! that did not arrive is not: then recovery would discard a write that was flushed.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use common::native::{NativeSetup, look_native, native_setups};
use common::{QcowSetup, SIZE, base, look, setups};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, CheckedDisk, Disk, GuestOffset, ImageOffset, LocalFuture, MemoryDisk, MemoryStorage, Random,
    Result, SharedBytes, SharedDisk, SharedStorage, Storage, WriteFlags,
};
use vellum_format::native::{self, Native};
use vellum_format::qcow2::{Files, Header, OpenOptions, Qcow2};
use vellum_format::sabotage::{Bug, put_in};
use vellum_sim::{ForwardStorage, Forwarding};

const SECTOR: usize = 512;

/// A storage under a guest that changes what is lent just before it is written.
struct Restless {
    inner: Arc<MemoryStorage>,
    /// So many bytes were changed.
    changed: AtomicU64,
    /// So many bytes were put into lent memory that no guest ever wrote.
    foreign: AtomicU64,
}

/// What the guest makes of a byte.
fn other(byte: u8) -> u8 {
    byte ^ 3
}

/// Whether a guest may have written it.
fn is_guests(byte: u8) -> bool {
    byte.is_multiple_of(4) || other(byte).is_multiple_of(4)
}

impl Restless {
    fn over(inner: Arc<MemoryStorage>) -> Arc<Forwarding<Self>> {
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
enum Kind {
    Qcow2(QcowSetup),
    Native(NativeSetup),
}

impl Kind {
    fn all() -> Vec<Self> {
        let qcow2 = setups().into_iter().map(Self::Qcow2);
        // Many units, so that some hold their own entries when a zone is open.
        let embedding = NativeSetup::zoned("zoned, many units", 8 * SIZE, 64 << 10, 1 << 20);
        qcow2.chain(native_setups().into_iter().chain([embedding]).map(Self::Native)).collect()
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Qcow2(setup) => setup.name,
            Self::Native(setup) => setup.name,
        }
    }

    /// Whether records say what data arrived.
    fn has_checks(&self) -> bool {
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

    fn empty(&self) -> (Vec<u8>, Vec<u8>) {
        match self {
            Self::Qcow2(setup) => (setup.empty_image().to_vec(), setup.content().to_vec()),
            Self::Native(setup) => (setup.empty_image().to_vec(), setup.content().to_vec()),
        }
    }

    async fn open(&self, image: SharedStorage) -> Result<SharedDisk> {
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
async fn whole(disk: &dyn Disk, len: usize) -> Result<Vec<u8>> {
    let memory = SharedBytes::zeroed(len);
    disk.read(GuestOffset::ZERO, memory.lend(&[(0, len)])).await?;
    Ok(memory.get(0, len))
}

/// Writes, flushes and kills; what was wrong, and how many bytes the guest changed in time.
async fn run(kind: &Kind, seed: u64, steps: usize) -> std::result::Result<u64, String> {
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

const SEEDS: u64 = 12;

#[test]
fn a_guest_that_changes_its_memory_loses_nothing_that_was_flushed() {
    for kind in Kind::all() {
        let mut changed = 0;
        for seed in 0..SEEDS * common::scale() {
            changed += block_on(run(&kind, seed, 12)).expect("nothing is lost");
        }
        assert!(changed > 0, "{}: some bytes were written as they lay", kind.name());
    }
}

#[test]
fn a_checksum_of_bytes_that_may_still_change_is_found() {
    for kind in Kind::all().into_iter().filter(Kind::has_checks) {
        put_in(Some(Bug::LentChecked));
        // The same seeds as above, where nothing is found.
        let found = (0..SEEDS).find_map(|seed| block_on(run(&kind, seed, 12)).err());
        put_in(None);
        assert!(found.is_some(), "{}: nobody noticed", kind.name());
    }
}

#[test]
fn a_guest_sees_no_packed_block() {
    const UNIT: u64 = 64 << 10;
    let mut setup = NativeSetup::zoned("zoned", 8 * SIZE, UNIT, 1 << 20);
    // A small one has no room for a block twice, and takes it home at once.
    setup.options.journal_bytes = Some(1 << 20);
    let kind = Kind::Native(setup);
    let image = MemoryStorage::holding("image", &kind.empty().0);
    let restless = Restless::over(image.clone());
    let len = 8192;
    block_on(async {
        let disk = kind.open(restless.clone()).await.expect("it opens");
        let write = async |unit: u64, value: u8| {
            let memory = SharedBytes::zeroed(4096);
            memory.lend(&[(0, 4096)]).fill(value);
            let at = GuestOffset::new(unit * UNIT);
            disk.write(at, memory.lend(&[(0, 4096)]), WriteFlags::default()).await.expect("it is written");
        };
        // With the first a zone is opened; those behind are allocated in it. Some are read packed, some when
        // they are so no more, and the new bytes are in the journal only.
        for unit in 0..12 {
            write(unit, 4).await;
            disk.flush().await.expect("flushed");
        }
        for unit in 0..12 {
            if unit % 2 == 0 {
                write(unit, 8).await;
            }
            let memory = SharedBytes::zeroed(len);
            disk.read(GuestOffset::new(unit * UNIT), memory.lend(&[(0, len)])).await.expect("it is read");
            let value = if unit % 2 == 0 { 8 } else { 4 };
            let seen = memory.get(0, len);
            assert!(seen[..4096].iter().all(|byte| [value, other(value)].contains(byte)), "unit {unit}");
            assert!(seen[4096..].iter().all(|byte| *byte == 0), "unit {unit}");
            assert_eq!(restless.foreign.load(Relaxed), 0, "unit {unit}: a packed block");
        }
        disk.close().await.expect("it closes");
    });
}
