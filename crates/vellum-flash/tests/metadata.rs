//! Tables by sectors: what they cost, and that they are what the image has, over every crash.

mod common;
use vellum_flash as flash;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::tables::{Counts, explore};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, ImageOffset, LocalFuture, MemoryStorage, Random, Result, SharedStorage,
    Storage, WriteFlags,
};
use vellum_flash::{FlashCache, FlashMetadata, MetadataCounts, MetadataOptions};
use vellum_format::image::CachedTables;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_sim::{ForwardStorage, Forwarding};

#[allow(clippy::print_stderr, reason = "how much was looked at is worth knowing")]
fn all(slots: u64, programs: u64) {
    let is_soak = std::env::var("VELLUM_EXPLORE").is_ok_and(|what| what == "all");
    let mut counts = Counts::default();
    for seed in 0..programs * if is_soak { 20 } else { 1 } {
        match explore(slots, seed) {
            Ok(more) => counts += more,
            Err(what) => panic!("{what}"),
        }
    }
    eprintln!("{slots} slots: {counts:?}");
    assert!(counts.warm > 0 && counts.reads.flash_hits > 0 && counts.reads.zeros > 0, "{counts:?}");
}

#[test]
fn with_slots_for_all() {
    all(64, 12);
}

#[test]
fn with_few_slots() {
    all(24, 12);
}

const TABLE: u64 = 64 << 10;

struct Bench {
    image: SharedStorage,
    flash: SharedStorage,
    cache: Arc<FlashCache>,
    metadata: Arc<FlashMetadata>,
}

/// An image of 16 tables: each sector has the number of its table and its own.
async fn image() -> SharedStorage {
    let mut bytes = Vec::new();
    for table in 0..16u8 {
        for sector in 0..128u8 {
            bytes.extend([[table + 1, sector]; 256].concat());
        }
    }
    MemoryStorage::holding("image", &bytes)
}

async fn open(flash: &SharedStorage, image: &SharedStorage, name: u8, is_written: bool) -> Bench {
    // No opening draws the numbers of another.
    static SEED: AtomicU64 = AtomicU64::new(1);
    let cache = common::cache_on(flash, 512, SEED.fetch_add(1, Ordering::Relaxed)).await.unwrap();
    let options =
        MetadataOptions { image: image.clone(), name: Some([name; 16]), is_written, table_bytes: TABLE };
    let metadata = cache.open_metadata(options).await.unwrap();
    Bench { image: image.clone(), flash: flash.clone(), cache, metadata }
}

async fn bench() -> Bench {
    let flash: SharedStorage = MemoryStorage::new("flash");
    open(&flash, &image().await, 1, true).await
}

impl Bench {
    async fn read(&self, table: u64, sector: u64) -> [u8; 2] {
        let at = ImageOffset::new(table * TABLE + sector * 512);
        let bytes = self.metadata.tables().read(at, Buffer::for_overwrite(512)).await.unwrap().to_vec();
        let direct = self.image.read(at, Buffer::for_overwrite(512)).await.unwrap().to_vec();
        assert_eq!(bytes, direct, "table {table}, sector {sector}");
        [bytes[0], bytes[1]]
    }

    async fn write(&self, table: u64, sector: u64, value: u8) {
        let at = ImageOffset::new(table * TABLE + sector * 512);
        self.metadata.image().write(at, Buffer::copy_of(&[value; 512])).await.unwrap();
    }

    async fn close(self, name: Option<u8>) -> (SharedStorage, SharedStorage) {
        self.metadata.close(async || name.map(|name| [name; 16])).await.unwrap();
        self.cache.close().await.unwrap();
        (self.flash, self.image)
    }

    fn counts(&self) -> MetadataCounts {
        self.metadata.counts()
    }
}

#[test]
fn a_miss_brings_the_whole_table_to_flash_and_each_sector_is_read_from_there() {
    block_on(async {
        let bench = bench().await;
        for sector in 0..128 {
            assert_eq!(bench.read(3, sector).await, [4, u8::try_from(sector).unwrap()]);
        }
        let expected = MetadataCounts {
            flash_hits: 127,
            misses: 1,
            flash_read_bytes: 127 * 512,
            image_read_bytes: TABLE,
            flash_write_bytes: TABLE,
            ..MetadataCounts::default()
        };
        assert_eq!(bench.counts(), expected);
    });
}

#[test]
fn what_was_written_is_read_from_the_image_and_the_rest_of_its_table_from_flash() {
    block_on(async {
        let bench = bench().await;
        bench.read(3, 0).await;
        bench.write(3, 5, 77).await;
        assert_eq!(bench.read(3, 5).await, [77, 77]);
        bench.read(3, 4).await;
        let counts = bench.counts();
        assert_eq!((counts.flash_hits, counts.misses), (1, 2));
        assert_eq!(counts.image_read_bytes, TABLE + 512);
        assert_eq!(counts.flash_write_bytes, TABLE, "a write costs flash nothing");
    });
}

#[test]
fn a_table_that_was_written_is_kept_anew_after_256_reads_of_what_was() {
    block_on(async {
        let bench = bench().await;
        bench.read(3, 0).await;
        bench.write(3, 5, 77).await;
        for _ in 0..256 {
            assert_eq!(bench.read(3, 5).await, [77, 77]);
        }
        let before = bench.counts();
        assert_eq!((before.misses, before.flash_write_bytes), (257, 2 * TABLE));
        assert_eq!(bench.read(3, 5).await, [77, 77]);
        assert_eq!(bench.counts().flash_hits, before.flash_hits + 1);
    });
}

#[test]
fn what_is_zero_is_read_once_and_takes_no_flash() {
    block_on(async {
        let bench = bench().await;
        for sector in 0..128 {
            assert_eq!(bench.read(20, sector).await, [0, 0], "past the end");
        }
        let counts = bench.counts();
        assert_eq!((counts.misses, counts.zeros, counts.flash_write_bytes), (1, 127, 0));
        bench.write(20, 7, 1).await;
        assert_eq!(bench.read(20, 7).await, [1, 1]);
        assert_eq!(bench.read(20, 8).await, [0, 0]);
    });
}

#[test]
fn a_clean_end_leaves_the_tables_on_flash_but_what_was_written() {
    block_on(async {
        let bench = bench().await;
        for table in 0..4 {
            bench.read(table, 0).await;
        }
        bench.write(2, 9, 55).await;
        let (flash, image) = bench.close(Some(2)).await;
        let bench = open(&flash, &image, 2, true).await;
        for (table, sector) in [(0, 1), (1, 127), (2, 0), (3, 64)] {
            bench.read(table, sector).await;
        }
        assert_eq!((bench.counts().flash_hits, bench.counts().misses), (4, 0));
        assert_eq!(bench.read(2, 9).await, [55, 55]);
        assert_eq!(bench.counts().misses, 1);
        // Nothing was read of this one in this opening.
        bench.write(1, 3, 66).await;
        assert_eq!(bench.read(1, 3).await, [66, 66]);
    });
}

#[test]
fn without_a_clean_end_or_under_another_name_nothing_is_found() {
    block_on(async {
        let bench = bench().await;
        bench.read(1, 0).await;
        let (flash, image) = bench.close(Some(2)).await;
        // Killed.
        let bench = open(&flash, &image, 2, true).await;
        bench.read(1, 1).await;
        assert_eq!(bench.counts().flash_hits, 1);
        bench.cache.flush().await.unwrap();
        drop(bench);
        let bench = open(&flash, &image, 2, true).await;
        bench.read(1, 2).await;
        assert_eq!((bench.counts().flash_hits, bench.counts().misses), (0, 1));
        let (flash, image) = bench.close(Some(3)).await;
        // Changed by another program, which gave it another name.
        let bench = open(&flash, &image, 4, true).await;
        bench.read(1, 2).await;
        assert_eq!((bench.counts().flash_hits, bench.counts().misses), (0, 1));
        let (flash, image) = bench.close(None).await;
        let cache = common::cache_on(&flash, 512, 1).await.unwrap();
        let kept = cache.rows().iter().filter(|row| row.blocks > 0).count();
        assert_eq!(kept, 1, "that of name 3; neither the kill nor one without a name keeps anything");
        drop((cache, image));
    });
}

#[test]
fn an_image_that_is_only_read_finds_its_tables_after_a_kill_too() {
    block_on(async {
        let (flash, image): (SharedStorage, _) = (MemoryStorage::new("flash"), image().await);
        let bench = open(&flash, &image, 1, false).await;
        bench.read(1, 0).await;
        bench.cache.flush().await.unwrap();
        drop(bench);
        let bench = open(&flash, &image, 1, false).await;
        bench.read(1, 1).await;
        assert_eq!((bench.counts().flash_hits, bench.counts().misses), (1, 0));
        let (flash, image) = bench.close(None).await;
        let bench = open(&flash, &image, 1, true).await;
        bench.read(1, 2).await;
        assert_eq!(bench.counts().flash_hits, 1, "and so does one that is written");
    });
}

/// A data file of which nobody reads anything.
struct Nowhere(SharedStorage);

impl ForwardStorage for Nowhere {
    fn inner(&self) -> &dyn Storage {
        &*self.0
    }

    fn write(&self, _at: ImageOffset, _data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Random writes of whole clusters to a new image, with memory for `memory` bytes of its mapping. Returns the counts, and the
/// bytes of records and slices.
async fn random_writes(size: u64, writes: u64, memory: u64) -> (MetadataCounts, u64) {
    let (image, flash): (SharedStorage, SharedStorage) =
        (MemoryStorage::new("image"), MemoryStorage::new("flash"));
    let data: SharedStorage = Forwarding::new(Nowhere(MemoryStorage::new("data")));
    let options =
        CreateOptions { size, data_file: Some("data".to_owned()), ..CreateOptions::without_journal() };
    create(&*image, Some(&data), &options).await.unwrap();
    flash.set_len(256 << 20).await.unwrap();
    vellum_flash::create(&flash, 256 << 20, common::ID, common::SECRET).await.unwrap();
    let cache = FlashCache::open(flash.clone(), common::options(1)).await.unwrap();
    let options = MetadataOptions { image, name: None, is_written: true, table_bytes: TABLE };
    let metadata = cache.open_metadata(options).await.unwrap();
    let header = Header::read(&*metadata.image()).await.unwrap();
    let files = Files { image: metadata.image(), data_file: Some(data), below: None };
    let tables = CachedTables { storage: metadata.tables(), lookups: metadata.lookups() };
    let options = OpenOptions { mapping_bytes_max: memory, tables: Some(tables), ..OpenOptions::default() };
    let disk = Qcow2::open(header, files, options).await.unwrap();
    let mut random = Random::from_seed(1);
    let bytes = Buffer::zeroed(65_536);
    for number in 0..writes {
        let at = GuestOffset::new(random.below(size >> 16) << 16);
        disk.write(at, bytes.duplicate(), WriteFlags::default()).await.unwrap();
        if number % 64 == 63 {
            disk.flush().await.unwrap();
        }
    }
    let counts = metadata.counts();
    disk.close().await.unwrap();
    metadata.close(async || Some([1; 16])).await.unwrap();
    let written = cache.counts();
    (counts, written.record_bytes + written.slice_bytes)
}

/// A hundredth of the paper's 1 TB, a million writes and 1 MiB of memory; with `VELLUM_EXPLORE=all` the whole.
#[test]
#[allow(clippy::print_stderr, reason = "the numbers are worth knowing")]
fn random_writes_find_their_entries_in_memory_and_write_little_to_flash() {
    let part = if std::env::var("VELLUM_EXPLORE").is_ok_and(|what| what == "all") { 1 } else { 100 };
    let writes = 1_000_000 / part;
    let (counts, records) = block_on(random_writes(((16 << 20) / part) << 16, writes, (1 << 20) / part));
    eprintln!("{counts:?}, {} hits in memory, {records} bytes of records", counts.memory_hits());
    let ratio = counts.memory_hits() * 1000 / counts.lookups;
    assert!(ratio >= 750, "{ratio} of 1000 lookups found their sector in memory");
    // A cache of whole tables with as much memory writes 61.15 GiB for a million of them (the paper's table 1).
    let tables = u128::from(writes) * (6115 << 30) / 100 / 1_000_000;
    assert!(u128::from(counts.flash_write_bytes + records) * 10_000 <= tables * 77, "0.77 %");
}
