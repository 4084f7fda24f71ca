//! Every format passes the disk suite of `vellum-core`, in every configuration that changes how it works
//! internally, and is free of errors and leaks each time it was closed.

mod common;

use std::cell::RefCell;
use std::sync::Arc;

use common::tended::Tended;
use futures_lite::future::block_on;
use vellum_core::contract::{self, DiskFixture};
use vellum_core::{
    Buffer, CheckedDisk, Disk, GuestOffset, HostTally, LocalFuture, MemoryDisk, MemoryStorage, Result,
    SharedDisk, SharedStorage, Storage, WriteFlags,
};
use vellum_format::image::CachedTables;
use vellum_format::qcow2::check::check;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Preallocation, Qcow2, create};
use vellum_format::report::Repair;
use vellum_format::{Prealloc, Raw};

struct Qcow2Fixture {
    options: CreateOptions,
    base: Option<Vec<u8>>,
    mapping_bytes_max: u64,
    by_sectors: bool,
    /// Space is prepared beside every request.
    prealloc: Option<Prealloc>,
    image: RefCell<Option<Arc<MemoryStorage>>>,
    data_file: RefCell<Option<Arc<MemoryStorage>>>,
}

impl Qcow2Fixture {
    fn new(options: CreateOptions, with_base: bool) -> Self {
        let base = with_base.then(|| (0..700_001u32).map(|i| u8::try_from(i % 253 + 1).unwrap()).collect());
        Self {
            options,
            base,
            mapping_bytes_max: 1 << 20,
            by_sectors: false,
            prealloc: None,
            image: RefCell::default(),
            data_file: RefCell::default(),
        }
    }

    async fn open(&self) -> Result<SharedDisk> {
        let image = self.image.borrow().clone().expect("made before") as SharedStorage;
        let header = Header::read(&*image).await?;
        let mut lines = Vec::new();
        let report = check(&header, &image, Repair::Nothing, &mut |line| lines.push(line)).await?;
        assert!(report.is_clean(), "an image that was closed is clean: {report:?} {lines:?}");
        assert!(!header.is_dirty(), "the dirty bit is cleared by closing");
        let files = Files {
            image,
            data_file: self.data_file.borrow().clone().map(|file| file as SharedStorage),
            below: self.base.as_ref().map(|base| MemoryDisk::holding(base) as SharedDisk),
        };
        let mut options = OpenOptions { mapping_bytes_max: self.mapping_bytes_max, ..OpenOptions::default() };
        options.tables =
            self.by_sectors.then(|| CachedTables { storage: files.image.clone(), lookups: Arc::default() });
        let Some(prealloc) = self.prealloc else {
            return Ok(CheckedDisk::new(Qcow2::open(header, files, options).await?));
        };
        options.prealloc = prealloc;
        Ok(Tended::shared(CheckedDisk::new(Qcow2::open(header, files, options).await?)))
    }
}

impl DiskFixture for Qcow2Fixture {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(async move {
            let image = MemoryStorage::new("image");
            let data_file = self.options.data_file.is_some().then(|| MemoryStorage::new("data"));
            let shared = data_file.clone().map(|file| file as SharedStorage);
            let options = CreateOptions { size, ..self.options.clone() };
            create(&*image, shared.as_ref(), &options).await?;
            *self.image.borrow_mut() = Some(image);
            *self.data_file.borrow_mut() = data_file;
            self.open().await
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        Box::pin(self.open())
    }

    fn fresh_content(&self, size: u64) -> Vec<u8> {
        let mut content = self.base.clone().unwrap_or_default();
        content.resize(usize::try_from(size).unwrap(), 0);
        content
    }
}

fn suite(options: CreateOptions) {
    for with_base in [false, true] {
        let backing = with_base.then(|| ("base".to_owned(), Some("raw".to_owned())));
        if with_base && options.data_file_raw {
            continue;
        }
        let options = CreateOptions { backing, ..options.clone() };
        block_on(contract::disk(&Qcow2Fixture::new(options, with_base)));
    }
}

#[test]
fn defaults() {
    suite(CreateOptions::without_journal());
}

#[test]
fn version_2() {
    suite(CreateOptions { version: 2, ..CreateOptions::without_journal() });
}

#[test]
fn small_clusters() {
    for cluster_size in [512, 1024, 4096] {
        suite(CreateOptions { cluster_size, ..CreateOptions::without_journal() });
    }
}

#[test]
fn large_clusters() {
    suite(CreateOptions { cluster_size: 2 << 20, ..CreateOptions::without_journal() });
}

#[test]
fn space_prepared_ahead() {
    for (cluster_size, journal) in
        [(512, None), (4096, Some(64 << 10)), (65_536, None), (65_536, Some(1 << 20))]
    {
        for prealloc in [Prealloc::Adaptive, Prealloc::Fixed(64 << 10)] {
            let options = CreateOptions { cluster_size, journal, ..CreateOptions::without_journal() };
            let fixture = Qcow2Fixture { prealloc: Some(prealloc), ..Qcow2Fixture::new(options, false) };
            block_on(contract::disk(&fixture));
        }
    }
}

#[test]
fn every_refcount_width() {
    for refcount_bits in [1, 2, 4, 8, 32, 64] {
        suite(CreateOptions { refcount_bits, cluster_size: 1024, ..CreateOptions::without_journal() });
    }
}

#[test]
fn subclusters() {
    for cluster_size in [16_384, 65_536, 131_072] {
        suite(CreateOptions { extended_l2: true, cluster_size, ..CreateOptions::without_journal() });
    }
}

#[test]
fn data_file() {
    let data_file = Some("data".to_owned());
    suite(CreateOptions { data_file: data_file.clone(), ..CreateOptions::without_journal() });
    suite(CreateOptions {
        data_file: data_file.clone(),
        extended_l2: true,
        ..CreateOptions::without_journal()
    });
    suite(CreateOptions { data_file, data_file_raw: true, ..CreateOptions::without_journal() });
}

#[test]
fn preallocated_mapping() {
    suite(CreateOptions {
        preallocation: Preallocation::Metadata,
        extended_l2: true,
        ..CreateOptions::without_journal()
    });
    let options =
        CreateOptions { preallocation: Preallocation::Metadata, ..CreateOptions::without_journal() };
    block_on(contract::disk(&Qcow2Fixture::new(options, false)));
}

#[test]
fn a_mapping_that_does_not_fit_memory() {
    let options = CreateOptions { cluster_size: 512, ..CreateOptions::without_journal() };
    let fixture = Qcow2Fixture { mapping_bytes_max: 4096, ..Qcow2Fixture::new(options, true) };
    block_on(contract::disk(&fixture));
}

#[test]
fn a_mapping_by_sectors_that_does_not_fit_memory() {
    for (cluster_size, extended_l2) in [(1024, false), (16_384, true)] {
        let options = CreateOptions { cluster_size, extended_l2, ..CreateOptions::default() };
        let fixture = Qcow2Fixture::new(options, true);
        let fixture = Qcow2Fixture { mapping_bytes_max: 0, by_sectors: true, ..fixture };
        block_on(contract::disk(&fixture));
    }
}

#[test]
fn long_random_runs() {
    for (seed, cluster_size, extended_l2) in [(11, 512, false), (12, 65_536, false), (13, 16_384, true)] {
        let options = CreateOptions { cluster_size, extended_l2, ..CreateOptions::without_journal() };
        let fixture = Qcow2Fixture::new(options, seed % 2 == 0);
        block_on(contract::disk_random_operations(&fixture, 3 << 20, seed, 2_000));
    }
}

struct RawFixture(RefCell<Option<Arc<MemoryStorage>>>);

impl DiskFixture for RawFixture {
    fn fresh(&self, size: u64) -> LocalFuture<'_, Result<SharedDisk>> {
        let storage = MemoryStorage::new("raw");
        Box::pin(async move {
            storage.set_len(size).await?;
            *self.0.borrow_mut() = Some(storage);
            self.reopen().await
        })
    }

    fn reopen(&self) -> LocalFuture<'_, Result<SharedDisk>> {
        let storage = self.0.borrow().clone().expect("made before");
        let disk = Raw::open(storage, false, &HostTally::default());
        Box::pin(std::future::ready(Ok(CheckedDisk::new(disk) as SharedDisk)))
    }
}

#[test]
fn raw() {
    block_on(contract::disk(&RawFixture(RefCell::default())));
}

#[test]
fn a_raw_file_that_ends_within_a_sector() {
    block_on(async {
        let storage = MemoryStorage::holding("odd", &[1; 1000]);
        let disk = Raw::open(storage.clone(), false, &HostTally::default());
        assert_eq!(disk.geometry().size, 1024);
        let read = disk.read(GuestOffset::ZERO, Buffer::for_overwrite(1024)).await.unwrap();
        assert_eq!((read.slice()[999], read.slice()[1000], read.slice()[1023]), (1, 0, 0));
        assert_eq!(storage.len(), 1000, "reading changes nothing");
        disk.write(GuestOffset::new(1010), Buffer::copy_of(&[2; 5]), WriteFlags::default()).await.unwrap();
        assert_eq!(storage.len(), 1024, "the file is whole before it is written there");
        disk.close().await.unwrap();
    });
}
