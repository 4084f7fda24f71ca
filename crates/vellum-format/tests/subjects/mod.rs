//! What the crash explorer explores: small images of several kinds.

#![allow(dead_code, reason = "each test file uses its part")]

mod device;
mod grown;
pub(crate) mod kinds;
pub(crate) mod native;
mod qemu;
mod snapped;

use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, HostTally, LocalFuture, MemoryDisk, Random, Result, SharedDisk, SharedStorage,
    WriteFlags,
};
use vellum_format::image::{BitmapChange, CachedTables};
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_format::raw::Raw;
use vellum_format::{FormatKind, Prealloc};
use vellum_sim::Content;
use vellum_sim::explore::{Medium, Plan, Subject};

use crate::common::packing::Packing;
use crate::common::tended::Tended;
use crate::common::{QcowSetup, SECRET, base, cipher_of, encrypted, look};
use device::Device;

const SIZE: u64 = 4 << 20;
const BITMAP: &str = "since";
const BITMAP_GRANULARITY: u64 = 512;

/// Programs in each of which one flush fails: any of those that there are, up to the one that closes.
pub(crate) fn failing_flushes() -> Vec<Plan> {
    let texts = [
        "w4k@0 flush w4k@1 flush w4k@0 flush",
        "w512@4 flush w512@0 w4k@2 flush w512@0 flush",
        "w64k@0 flush discard@0 w4k@1 flush drop64k@0 w512@2 flush",
        // Overwritten in place in a session of its own, before anything else and with something else.
        "w64k@0 reopen w4k@0 flush",
        "w64k@0 reopen flush w64k@0 fua@2",
        "w64k@1 zero@1 reopen discard@0 w64k@0 flush",
    ];
    let failing =
        |text: &str, number| Plan { fail_flush: Some(number), ..Plan::whole(text.parse().unwrap()) };
    texts.into_iter().flat_map(|text| (0..12).map(move |number| failing(text, number))).collect()
}

/// A qcow2 image.
pub(crate) struct QcowSubject {
    setup: QcowSetup,
    /// Where the second L2 table begins.
    far: u64,
    below: Option<SharedDisk>,
    /// Version 2 has no mark for an image that was not closed: what a crash leaves allocated stays so until a
    /// repair.
    may_leak: bool,
    /// It lies on a device of this length, which has other bytes on it.
    device: Option<u64>,
    /// Memory for the mapping is as small as it can be.
    has_small_cache: bool,
    /// The mapping is held by sectors.
    by_sectors: bool,
    /// The places follow each other.
    is_in_a_row: bool,
    /// Space is prepared ahead of need, beside every request.
    is_tended: bool,
    /// What is written is compressed.
    is_packed: bool,
    /// What another program has made: the image, and what the guest sees.
    made: Option<(Content, Content)>,
    /// It has a bitmap since then.
    has_bitmap: bool,
}

impl QcowSubject {
    fn new(name: &'static str, options: CreateOptions, has_base: bool, far: u64) -> Self {
        let below = has_base.then(|| MemoryDisk::holding(&base()) as SharedDisk);
        let may_leak = options.version == 2;
        let setup = QcowSetup { name, options, has_base };
        Self {
            setup,
            far,
            below,
            may_leak,
            device: None,
            has_small_cache: false,
            by_sectors: false,
            is_in_a_row: false,
            is_tended: false,
            is_packed: false,
            made: None,
            has_bitmap: false,
        }
    }

    fn options(cluster_size: u64) -> CreateOptions {
        CreateOptions { size: SIZE, cluster_size, ..CreateOptions::without_journal() }
    }

    pub(crate) fn plain() -> Self {
        Self::new("qcow2, 4 KiB clusters", Self::options(4096), false, 2 << 20)
    }

    pub(crate) fn over_a_base() -> Self {
        let options = CreateOptions { size: 256 << 10, ..Self::options(512) };
        Self::new("qcow2, 512 byte clusters over a base", options, true, 96 << 10)
    }

    /// The order of metadata is all there is to rely on.
    pub(crate) fn version_2() -> Self {
        let options = CreateOptions { version: 2, size: 256 << 10, ..Self::options(512) };
        Self::new("qcow2 version 2, 512 byte clusters", options, false, 96 << 10)
    }

    pub(crate) fn subclusters() -> Self {
        let options = CreateOptions { extended_l2: true, ..Self::options(16_384) };
        Self::new("qcow2, subclusters over a base", options, true, 3 << 20)
    }

    /// A journal so small that it goes round within a few steps, and much does not fit a record.
    pub(crate) fn journal() -> Self {
        let options = CreateOptions { journal: Some(64 << 10), ..Self::options(4096) };
        Self::new("qcow2 with a journal, 4 KiB clusters", options, false, 2 << 20)
    }

    pub(crate) fn journal_over_a_base() -> Self {
        let options = CreateOptions { size: 256 << 10, journal: Some(64 << 10), ..Self::options(512) };
        Self::new("qcow2 with a journal, 512 byte clusters over a base", options, true, 96 << 10)
    }

    pub(crate) fn journal_subclusters() -> Self {
        let options = CreateOptions { extended_l2: true, journal: Some(128 << 10), ..Self::options(16_384) };
        Self::new("qcow2 with a journal, subclusters over a base", options, true, 3 << 20)
    }

    /// Nothing grows, nothing is zero without having been written, and no zeros are fast.
    pub(crate) fn journal_on_a_device() -> Self {
        let options = CreateOptions { journal: Some(64 << 10), ..Self::options(4096) };
        let new = Self::new("qcow2 with a journal on a device", options, false, 2 << 20);
        Self { device: Some(1 << 20), ..new }
    }

    /// What is appended to, 64 KiB at a time.
    pub(crate) fn journal_appended() -> Self {
        let new = Self::journal_large_clusters();
        Self { is_in_a_row: true, ..new }
    }

    /// Writes one after another, so many that a record cannot hold their checksums.
    pub(crate) fn journal_in_bulk() -> Self {
        let options = CreateOptions { size: 512 << 10, journal: Some(64 << 10), ..Self::options(65_536) };
        let new = Self::new("qcow2 with a journal on a device, in bulk", options, false, 3 << 20);
        Self { device: Some(2 << 20), is_in_a_row: true, ..new }
    }

    pub(crate) fn journal_large_clusters() -> Self {
        let options = CreateOptions { journal: Some(256 << 10), ..Self::options(65_536) };
        Self::new("qcow2 with a journal, 64 KiB clusters", options, false, 3 << 20)
    }

    /// Refcounts take so much room that blocks of them are made again and again, which no record can express.
    pub(crate) fn journal_wide_refcounts() -> Self {
        let options = CreateOptions { refcount_bits: 64, journal: Some(64 << 10), ..Self::options(1024) };
        Self::new("qcow2 with a journal, refcounts of 64 bits", options, false, 1 << 20)
    }

    /// Sixty-four refcounts change with every word, and none can be two.
    pub(crate) fn journal_narrow_refcounts() -> Self {
        let options = CreateOptions { refcount_bits: 1, journal: Some(64 << 10), ..Self::options(4096) };
        Self::new("qcow2 with a journal, refcounts of 1 bit", options, true, 2 << 20)
    }

    /// Pages are loaded again and again: there is memory for sixteen of them.
    pub(crate) fn journal_small_cache() -> Self {
        let options = CreateOptions { journal: Some(64 << 10), ..Self::options(512) };
        let new = Self::new("qcow2 with a journal and little memory", options, false, 32 << 10);
        Self { has_small_cache: true, ..new }
    }

    /// The same, by sectors, two of them in each table.
    pub(crate) fn journal_sectors() -> Self {
        let options = CreateOptions { journal: Some(64 << 10), ..Self::options(1024) };
        let new = Self::new("qcow2 with a journal and little memory, by sectors", options, false, 32 << 10);
        Self { has_small_cache: true, by_sectors: true, ..new }
    }

    /// Without a journal.
    pub(crate) fn sectors() -> Self {
        let new = Self::new("qcow2 with little memory, by sectors", Self::options(1024), false, 32 << 10);
        Self { has_small_cache: true, by_sectors: true, ..new }
    }

    /// The same images, with space prepared ahead.
    pub(crate) fn prepared() -> Self {
        let new = Self::new("qcow2 with space prepared", Self::options(4096), false, 2 << 20);
        Self { is_tended: true, ..new }
    }

    /// Refcount blocks are near each other, and each is a boundary.
    pub(crate) fn prepared_over_a_base() -> Self {
        let options = CreateOptions { size: 256 << 10, ..Self::options(512) };
        let new = Self::new("qcow2 with space prepared over a base", options, true, 96 << 10);
        Self { is_tended: true, ..new }
    }

    pub(crate) fn journal_prepared() -> Self {
        let options = CreateOptions { journal: Some(64 << 10), ..Self::options(4096) };
        let new = Self::new("qcow2 with a journal and space prepared", options, false, 2 << 20);
        Self { is_tended: true, ..new }
    }

    /// QEMU has written to it and made snapshots; nothing where there is no QEMU.
    pub(crate) fn snapshots() -> Option<Self> {
        let new = Self::new("qcow2 with snapshots", Self::options(4096), false, 2 << 20);
        new.with_snapshots()
    }

    pub(crate) fn journal_snapshots() -> Option<Self> {
        let options = CreateOptions { journal: Some(64 << 10), ..Self::options(4096) };
        Self::new("qcow2 with a journal and snapshots", options, false, 2 << 20).with_snapshots()
    }

    fn with_snapshots(self) -> Option<Self> {
        let made = qemu::with_snapshots(&self.setup.empty_image(), self.far)?;
        Some(Self { made: Some(made), ..self })
    }

    fn on_its_medium(&self, image: SharedStorage) -> SharedStorage {
        if self.device.is_some() { Device::shared(image) } else { image }
    }

    /// The image on a device that was in use before.
    fn image_on_a_device(&self, len: u64) -> Content {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        Random::from_seed(9).fill(&mut bytes);
        let medium = Medium::new(Content::of(&bytes));
        block_on(create(&*Device::shared(medium.clone()), None, &self.setup.options)).unwrap();
        medium.content()
    }

    /// What is filled in around a write is encrypted, and so is not left out where the host has zeros.
    pub(crate) fn encrypted() -> Self {
        let options = encrypted(Self::options(4096));
        Self::new("encrypted qcow2, 4 KiB clusters", options, false, 2 << 20)
    }

    /// Checks are of encrypted bytes, and so is what goes through the journal.
    pub(crate) fn encrypted_journal() -> Self {
        let options = encrypted(CreateOptions { journal: Some(64 << 10), ..Self::options(4096) });
        Self::new("encrypted qcow2 with a journal, 4 KiB clusters", options, false, 2 << 20)
    }

    pub(crate) fn encrypted_journal_subclusters() -> Self {
        let options = CreateOptions { extended_l2: true, journal: Some(128 << 10), ..Self::options(16_384) };
        let options = encrypted(options);
        Self::new("encrypted qcow2 with a journal, subclusters over a base", options, true, 3 << 20)
    }

    /// Several compressed clusters share a cluster of the image.
    fn packed(self, name: &'static str) -> Self {
        let setup = QcowSetup { name, ..self.setup };
        Self { setup, is_packed: true, ..self }
    }

    pub(crate) fn compressed() -> Self {
        Self::plain().packed("compressed qcow2, 4 KiB clusters")
    }

    pub(crate) fn compressed_version_2() -> Self {
        Self::version_2().packed("compressed qcow2 version 2")
    }

    pub(crate) fn compressed_journal() -> Self {
        Self::journal().packed("compressed qcow2 with a journal")
    }

    pub(crate) fn compressed_journal_over_a_base() -> Self {
        Self::journal_over_a_base().packed("compressed qcow2 with a journal, 512 byte clusters over a base")
    }

    pub(crate) fn compressed_journal_subclusters() -> Self {
        Self::journal_subclusters().packed("compressed qcow2 with a journal, subclusters over a base")
    }

    pub(crate) fn compressed_journal_narrow_refcounts() -> Self {
        Self::journal_narrow_refcounts().packed("compressed qcow2 with a journal, refcounts of 1 bit")
    }

    pub(crate) fn compressed_journal_snapshots() -> Option<Self> {
        Some(Self::journal_snapshots()?.packed("compressed qcow2 with a journal and snapshots"))
    }

    /// All of the disk has data, and then a bitmap was added: what is overwritten in place must be marked before.
    fn with_bitmap(self, name: &'static str) -> Self {
        let setup = QcowSetup { name, ..self.setup };
        let medium = Medium::new(setup.empty_image());
        let mut bytes = vec![0; usize::try_from(setup.options.size).unwrap()];
        Random::from_seed(11).fill(&mut bytes);
        let below = self.below.clone();
        block_on(async {
            let image: SharedStorage = medium.clone();
            let header = Header::read(&*image).await.unwrap();
            let files = Files { image: image.clone(), data_file: None, below };
            let options = OpenOptions { journal_key: Some(1), ..OpenOptions::default() };
            let disk = Qcow2::open(header, files, options).await.unwrap();
            disk.write(GuestOffset::ZERO, Buffer::copy_of(&bytes), WriteFlags::default()).await.unwrap();
            disk.close().await.unwrap();
            let add = BitmapChange::Add { granularity: Some(BITMAP_GRANULARITY) };
            let bitmaps = FormatKind::Qcow2.format().closed_bitmaps().unwrap();
            bitmaps.change(&image, BITMAP, &[add]).await.unwrap();
        });
        let made = Some((medium.content(), Content::of(&bytes)));
        Self { setup, made, has_bitmap: true, ..self }
    }

    fn short(options: CreateOptions) -> CreateOptions {
        CreateOptions { size: 320 << 10, ..options }
    }

    pub(crate) fn bitmap() -> Self {
        let options = Self::short(Self::options(4096));
        Self::new("", options, false, 160 << 10).with_bitmap("qcow2 with a bitmap")
    }

    pub(crate) fn bitmap_journal() -> Self {
        let options = Self::short(CreateOptions { journal: Some(64 << 10), ..Self::options(4096) });
        Self::new("", options, false, 160 << 10).with_bitmap("qcow2 with a journal and a bitmap")
    }

    pub(crate) fn bitmap_journal_over_a_base() -> Self {
        let options = Self::short(CreateOptions { journal: Some(64 << 10), ..Self::options(512) });
        Self::new("", options, true, 160 << 10)
            .with_bitmap("qcow2 with a journal and a bitmap, 512 byte clusters")
    }

    pub(crate) fn bitmap_journal_packed() -> Self {
        let options = Self::short(CreateOptions { journal: Some(64 << 10), ..Self::options(4096) });
        let new = Self::new("", options, false, 160 << 10);
        Self { is_packed: true, ..new.with_bitmap("compressed qcow2 with a journal and a bitmap") }
    }

    /// What differs from what was there when the bitmap was added is marked in it.
    async fn verify_bitmap(&self, image: &SharedStorage) -> std::result::Result<(), String> {
        let text = |error: vellum_core::Error| error.chain();
        let bitmaps = FormatKind::Qcow2.format().closed_bitmaps().unwrap();
        let bits = bitmaps.load(&**image, BITMAP).await.map_err(text)?;
        let header = Header::read(&**image).await.map_err(text)?;
        let files = Files { image: image.clone(), data_file: None, below: self.below.clone() };
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let disk = Qcow2::open(header, files, options).await.map_err(text)?;
        let len = usize::try_from(disk.geometry().size).unwrap();
        let now = disk.read(GuestOffset::ZERO, Buffer::zeroed(len)).await.map_err(text)?.to_vec();
        let (_, before) = self.made.as_ref().unwrap();
        let before = before.to_vec();
        let granule = usize::try_from(BITMAP_GRANULARITY).unwrap();
        for at in (0..len).step_by(granule).filter(|at| now[*at..at + granule] != before[*at..at + granule]) {
            let marked = bits.next_marked(GuestOffset::new(at as u64));
            if marked.is_none_or(|run| run.start().bytes() > at as u64) {
                return Err(format!("the disk has changed at {at}, and the bitmap does not say so"));
            }
        }
        Ok(())
    }

    pub(crate) fn large_clusters() -> Self {
        Self::new("qcow2, 64 KiB clusters", Self::options(65_536), false, 3 << 20)
    }
}

impl Subject for QcowSubject {
    fn name(&self) -> String {
        self.setup.name.to_owned()
    }

    fn image(&self) -> Content {
        match (&self.made, self.device) {
            (Some((image, _)), _) => image.clone(),
            (None, Some(len)) => self.image_on_a_device(len),
            (None, None) => self.setup.empty_image(),
        }
    }

    fn guest(&self) -> Content {
        self.made.as_ref().map_or_else(|| self.setup.content(), |(_, guest)| guest.clone())
    }

    fn places(&self) -> Vec<GuestOffset> {
        if self.is_in_a_row {
            return (0..self.setup.options.size >> 16).map(|index| GuestOffset::new(index << 16)).collect();
        }
        let far = self.far;
        let places = [16_384, 32_768, far, far + 8192, 0, far + 4096, 49_152, far + 65_536];
        let mut places = places.map(GuestOffset::new).to_vec();
        if self.has_small_cache {
            // Each in a table of its own.
            places.extend((2..32).map(|table| GuestOffset::new(table << 16)));
        }
        places
    }

    fn open(&self, image: SharedStorage) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let image = self.on_its_medium(image);
            let header = Header::read(&*image).await?;
            let tables = CachedTables { storage: image.clone(), lookups: Arc::default() };
            let files = Files { image, data_file: None, below: self.below.clone() };
            let cipher = cipher_of(&self.setup.options);
            let mut options = OpenOptions { journal_key: Some(1), cipher, ..OpenOptions::default() };
            options.tables = self.by_sectors.then_some(tables);
            if self.has_small_cache {
                options.mapping_bytes_max = 0;
            }
            if self.is_packed {
                return Ok(Packing::shared(Qcow2::open(header, files, options).await?));
            }
            if !self.is_tended {
                return Ok(Qcow2::open(header, files, options).await? as SharedDisk);
            }
            options.prealloc = Prealloc::Fixed(64 << 10);
            Ok(Tended::shared(Qcow2::open(header, files, options).await?))
        })
    }

    fn verify(&self, image: SharedStorage) -> LocalFuture<'_, Result<(), String>> {
        Box::pin(async move {
            let image = self.on_its_medium(image);
            let (report, lines) = look(&image).await.map_err(|error| error.chain())?;
            let is_sound = report.check_errors == 0 && report.corruptions == 0;
            if is_sound && (report.leaks == 0 || self.may_leak) {
                if self.has_bitmap { self.verify_bitmap(&image).await } else { Ok(()) }
            } else {
                Err(format!("the check says: {}", lines.join("; ")))
            }
        })
    }

    fn sample(&self, recovered: &Content) -> std::result::Result<(), String> {
        let guest = block_on(self.read_all(recovered)).map_err(|error| error.chain())?;
        let secret = self.setup.options.encryption.as_ref().map(|_| SECRET);
        qemu::check(recovered, &guest, self.may_leak, secret)
    }
}

impl QcowSubject {
    /// What is read of a closed image, its base left aside.
    async fn read_all(&self, image: &Content) -> Result<Content> {
        let image = Medium::new(image.clone());
        let header = Header::read(&*image).await?;
        let files = Files { image, data_file: None, below: None };
        let cipher = cipher_of(&self.setup.options);
        let options = OpenOptions { read_only: true, cipher, ..OpenOptions::default() };
        let disk = Qcow2::open(header, files, options).await?;
        let len = usize::try_from(disk.geometry().size).unwrap();
        let bytes = disk.read(GuestOffset::ZERO, Buffer::zeroed(len)).await?;
        Ok(Content::of(&bytes.to_vec()))
    }
}

/// A raw image.
pub(crate) struct RawSubject;

impl Subject for RawSubject {
    fn name(&self) -> String {
        "raw".to_owned()
    }

    fn image(&self) -> Content {
        Content::zeroed(SIZE)
    }

    fn guest(&self) -> Content {
        Content::zeroed(SIZE)
    }

    fn places(&self) -> Vec<GuestOffset> {
        [16_384, 32_768, 3 << 20, 0, 8192].map(GuestOffset::new).to_vec()
    }

    fn reads_the_medium(&self) -> bool {
        false
    }

    fn open(&self, image: SharedStorage) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move { Ok(Raw::open(image, false, &HostTally::default()) as SharedDisk) })
    }

    fn verify(&self, image: SharedStorage) -> LocalFuture<'_, Result<(), String>> {
        Box::pin(async move {
            if image.len() == SIZE { Ok(()) } else { Err(format!("it is {} bytes long", image.len())) }
        })
    }
}
