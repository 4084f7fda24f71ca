//! What the simulated tests share: small images in a world, opened, written at random, and checked
//! afterwards.

#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod native;
pub(crate) mod packing;
pub(crate) mod sim;
pub(crate) mod tended;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_lite::future::zip;
use vellum_core::{
    Buffer, Disk, GuestOffset, GuestSpan, MemoryDisk, Random, Result, SharedDisk, SharedStorage, WriteFlags,
    ZeroFlags, fill_from_below,
};
use vellum_format::Prealloc;
use vellum_format::luks::{Hash, Mode, NewHeader, NewKeys, Secret};
use vellum_format::qcow2::check::check;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_format::report::{CheckReport, Repair};
use vellum_luks::SectorCipher;
use vellum_sim::{Content, Delay, Drive, DriveOptions, FaultPlan, World};

use sim::Setup;

/// Keys that are always the same, and the cipher that they make. Quick to open, and small.
pub(crate) fn keys() -> &'static (Arc<NewKeys>, Arc<SectorCipher>) {
    static KEYS: OnceLock<(Arc<NewKeys>, Arc<SectorCipher>)> = OnceLock::new();
    KEYS.get_or_init(|| {
        let mut random = Random::from_seed(20);
        let mut chance = |bytes: &mut [u8]| {
            random.fill(bytes);
            Ok(())
        };
        let mode = Mode::named("xts-plain64").unwrap();
        let new = NewHeader { mode, key_len: 32, hash: Hash::Sha256, digest_iterations: 1000 };
        let secret = Secret::new(SECRET.into()).unwrap();
        let (keys, cipher) = NewKeys::make(&new, &secret, 1000, &mut chance).unwrap();
        (Arc::new(keys), cipher)
    })
}

/// What opens them.
pub(crate) const SECRET: &str = "correct horse";

/// The same image, encrypted.
pub(crate) fn encrypted(options: CreateOptions) -> CreateOptions {
    CreateOptions { encryption: Some(keys().0.clone()), ..options }
}

/// The cipher of an image that was made with these options.
pub(crate) fn cipher_of(options: &CreateOptions) -> Option<Arc<SectorCipher>> {
    options.encryption.as_ref().map(|_| keys().1.clone())
}

/// Space is prepared whenever the disk is tended.
const PREALLOC: Prealloc = Prealloc::Fixed(64 << 10);

/// One kind of image under test.
#[derive(Clone)]
pub(crate) struct QcowSetup {
    pub(crate) name: &'static str,
    pub(crate) options: CreateOptions,
    pub(crate) has_base: bool,
}

/// How much longer than usual random tests run: the soak sets it.
pub(crate) fn scale() -> u64 {
    std::env::var("VELLUM_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1)
}

pub(crate) const SIZE: u64 = 192 * 1024;

pub(crate) fn setups() -> Vec<QcowSetup> {
    let plain = |cluster_size| CreateOptions { size: SIZE, cluster_size, ..CreateOptions::without_journal() };
    let setup = |name, options, has_base| QcowSetup { name, options, has_base };
    vec![
        setup("4 KiB clusters", plain(4096), false),
        setup("512 byte clusters over a base", plain(512), true),
        setup("subclusters over a base", CreateOptions { extended_l2: true, ..plain(16_384) }, true),
        setup("wide refcounts", CreateOptions { refcount_bits: 64, ..plain(512) }, false),
        setup("a journal", CreateOptions { journal: Some(128 << 10), ..plain(4096) }, false),
        setup("a journal over a base", CreateOptions { journal: Some(64 << 10), ..plain(512) }, true),
        setup(
            "a journal, subclusters over a base",
            CreateOptions { extended_l2: true, journal: Some(128 << 10), ..plain(16_384) },
            true,
        ),
    ]
}

pub(crate) fn base() -> Vec<u8> {
    (0..150_000u32).map(|i| u8::try_from(i % 251 + 1).unwrap()).collect()
}

impl QcowSetup {
    /// What the empty disk reads as.
    pub(crate) fn content(&self) -> Content {
        let mut bytes = if self.has_base { base() } else { Vec::new() };
        bytes.resize(usize::try_from(self.options.size).unwrap(), 0);
        Content::of(&bytes)
    }

    /// The image as it is made, with nothing in it.
    pub(crate) fn empty_image(&self) -> Content {
        let world = World::new(0);
        let drive = Drive::new(&world, DriveOptions::default());
        world.run(create(&*drive, None, &self.options)).unwrap();
        drive.content()
    }

    pub(crate) async fn open(&self, drive: &Arc<Drive>) -> Result<Arc<Qcow2>> {
        let image: SharedStorage = drive.clone();
        let header = Header::read(&*image).await?;
        let below = self.has_base.then(|| MemoryDisk::holding(&base()) as SharedDisk);
        Qcow2::open(
            header,
            Files { image, data_file: None, below },
            OpenOptions {
                journal_key: Some(1),
                prealloc: PREALLOC,
                cipher: cipher_of(&self.options),
                ..OpenOptions::default()
            },
        )
        .await
    }
}

impl Setup for QcowSetup {
    fn name(&self) -> &'static str {
        self.name
    }

    fn base(&self) -> Vec<u8> {
        if self.has_base { base() } else { Vec::new() }
    }

    fn content(&self) -> Content {
        self.content()
    }

    fn empty_image(&self) -> Content {
        self.empty_image()
    }

    async fn create(&self, drive: &Drive, size: u64) -> Result<()> {
        create(drive, None, &CreateOptions { size, ..self.options.clone() }).await
    }

    async fn open(&self, drive: &Arc<Drive>) -> Result<SharedDisk> {
        Ok(self.open(drive).await?)
    }

    async fn look(&self, image: &SharedStorage) -> Result<(CheckReport, Vec<String>)> {
        look(image).await
    }
}

/// A drive with delays, so that operations run at the same time and end in any order.
pub(crate) fn busy_drive(world: &World, content: Content, faults: FaultPlan) -> Arc<Drive> {
    let delay = Delay::between(Duration::from_micros(20)..=Duration::from_micros(300))
        .with_flush(Duration::from_micros(500));
    Drive::from_content(world, content, DriveOptions { delay, faults, ..DriveOptions::default() })
}

/// Looks at an image from outside.
pub(crate) async fn look(image: &SharedStorage) -> Result<(CheckReport, Vec<String>)> {
    let header = Header::read(&**image).await?;
    let mut lines = Vec::new();
    let report = check(&header, image, Repair::Nothing, &mut |line| lines.push(line)).await?;
    Ok((report, lines))
}

/// One random request, and every second time the disk is tended beside it. Errors are for the caller to
/// judge.
pub(crate) async fn random_request(disk: &dyn Disk, random: &mut Random) -> Result<()> {
    let is_tended = random.one_in(2);
    let tending = async { while is_tended && disk.tend(Duration::ZERO).await {} };
    let copied = disk.filling().map(|_| random.fork());
    let filling = async {
        if let Some(mut random) = copied.filter(|_| is_tended) {
            let at = GuestOffset::new(random.below(disk.geometry().size));
            // A copy that fails leaves everything as it was.
            let _kept = fill_from_below(disk, at.span(random.below(40_000))).await;
        }
    };
    zip(zip(tending, filling), one_request(disk, random)).await.1
}

async fn one_request(disk: &dyn Disk, random: &mut Random) -> Result<()> {
    let size = disk.geometry().size;
    let align = *random.pick(&[1, 512, 4096, 16_384]);
    let at = random.below(size) / align * align;
    let longest = *random.pick(&[512, 4096, 20_000, 60_000]);
    let len = (1 + random.below(longest)).next_multiple_of(align).min(size - at);
    let span = GuestOffset::new(at).span(len);
    let fua = random.one_in(8);
    match random.below(12) {
        0..=6 => disk.write(span.start(), noise(span, random), WriteFlags { fua }).await,
        7 => disk.write_zeroes(span, ZeroFlags { fua, may_unmap: random.one_in(2), fast_only: false }).await,
        8 => disk.discard(span, WriteFlags { fua }).await,
        9 => disk.read(span.start(), Buffer::zeroed(usize::try_from(len).unwrap())).await.map(drop),
        _ => disk.flush().await,
    }
}

pub(crate) fn noise(span: GuestSpan, random: &mut Random) -> Buffer {
    let mut bytes = vec![0; usize::try_from(span.len()).unwrap()];
    random.fill(&mut bytes);
    Buffer::copy_of(&bytes)
}
