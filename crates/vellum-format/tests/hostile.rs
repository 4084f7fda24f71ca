//! Images that lie. Each gives one clear error, or works as far as it is valid; never a panic, never more
//! than 64 MiB, never more than two seconds (`limits`), and nothing outside the image is ever read.
//!
//! The first table is the list of header pokes that QEMU's own test 080 tries; the second points tables at
//! each other; the third flips every byte of the metadata of a small image, one after the other, and uses
//! each result as a normal image.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_lite::future::block_on;
use peak_alloc::PeakAlloc;
use vellum_core::{
    Buffer, Disk, ErrorKind, GuestOffset, ImageOffset, LocalFuture, MemoryStorage, Result, SharedStorage,
    Storage, WriteFlags, ZeroFlags,
};
use vellum_format::qcow2::check::check;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_format::report::Repair;
use vellum_sim::{ForwardStorage, Forwarding};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Tests of this file measure the memory of the whole process, so they take turns.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

const SIZE: u64 = 8 << 20;

fn image_with(options: CreateOptions) -> Vec<u8> {
    let image = MemoryStorage::new("image");
    block_on(async {
        create(&*image, None, &options).await.unwrap();
        let disk = open(image.clone(), false).await.unwrap();
        for at in [0, 1 << 20, 5 << 20] {
            let write =
                disk.write(GuestOffset::new(at), Buffer::copy_of(&[1; 70_000]), WriteFlags::default());
            write.await.unwrap();
        }
        disk.close().await.unwrap();
    });
    image.content().to_vec()
}

fn image() -> Vec<u8> {
    image_with(CreateOptions { size: SIZE, ..CreateOptions::without_journal() })
}

async fn open(image: Arc<MemoryStorage>, read_only: bool) -> Result<Arc<Qcow2>> {
    let image: SharedStorage = image;
    let header = Header::read(&*image).await?;
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    Qcow2::open(header, Files { image, data_file: None, below: None }, options).await
}

/// Everything a user may do with an image. Whether each succeeds does not matter; that it ends, and how,
/// does.
async fn use_all(bytes: &[u8]) -> Vec<vellum_core::Error> {
    let mut errors = Vec::new();
    let image = || MemoryStorage::holding("image", bytes);
    match open(image(), true).await {
        Ok(disk) => {
            let len = usize::try_from(disk.geometry().size.min(SIZE)).unwrap();
            errors.extend(disk.read(GuestOffset::ZERO, Buffer::zeroed(len)).await.err());
            errors.extend(disk.map(GuestOffset::ZERO.span(len as u64)).await.err());
        }
        Err(error) => errors.push(error),
    }
    for repair in [Repair::Nothing, Repair::All] {
        let shared: SharedStorage = image();
        if let Ok(header) = Header::read(&*shared).await {
            errors.extend(check(&header, &shared, repair, &mut |_| {}).await.err());
        }
    }
    match open(image(), false).await {
        Ok(disk) => {
            let size = disk.geometry().size;
            for at in [0, 300_000, 1 << 20, 4 << 20, 5 << 20, 7 << 20] {
                if at + 100_000 > size {
                    continue;
                }
                let at = GuestOffset::new(at);
                errors.extend(disk.write(at, Buffer::copy_of(&[9; 4096]), WriteFlags::FUA).await.err());
                errors.extend(disk.write_zeroes(at.span(70_000), ZeroFlags::default()).await.err());
                errors.extend(disk.discard(at.span(100_000), WriteFlags::default()).await.err());
            }
            errors.extend(disk.close().await.err());
        }
        Err(error) => errors.push(error),
    }
    errors
}

/// Runs `use_all` within the limits, and returns its errors.
fn limits(what: &str, bytes: &[u8]) -> Vec<vellum_core::Error> {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    #[expect(clippy::disallowed_methods, reason = "a hostile image must not keep a program busy")]
    let start = Instant::now();
    let errors = block_on(use_all(bytes));
    let used = MEMORY.peak_usage().saturating_sub(before);
    assert!(used < 64 << 20, "{what}: {} MiB of memory", used >> 20);
    assert!(start.elapsed() < Duration::from_secs(2), "{what}: {:?}", start.elapsed());
    for error in &errors {
        assert!(error.chain().len() > 20, "{what}: the error says nothing: {error:?}");
    }
    errors
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

#[test]
fn header_pokes_of_qemu_test_080() {
    let good = image();
    assert!(limits("a good image", &good).is_empty());
    let huge = 0xFFFF_FFFFu32.to_be_bytes();
    let large = 0x7FFF_FFFFu32.to_be_bytes();
    let far = 0xFFFF_FFFF_FFFF_0000u64.to_be_bytes();
    let odd = 0x1234u64.to_be_bytes();
    let extension = [&0x1234_5678u32.to_be_bytes()[..], &large].concat();
    let snapshots = |count: u32, at: u64| [&count.to_be_bytes()[..], &at.to_be_bytes()].concat();
    let pokes: Vec<(&str, usize, Vec<u8>)> = vec![
        ("header length", 100, huge.to_vec()),
        ("header length", 100, large.to_vec()),
        ("header length 8 below the least", 100, 96u32.to_be_bytes().to_vec()),
        ("unknown extension of 2 GiB", 112, extension),
        ("refcount table clusters", 56, huge.to_vec()),
        ("refcount table clusters", 56, 0x0002_0001u32.to_be_bytes().to_vec()),
        ("refcount table of nothing", 56, vec![0; 4]),
        ("misaligned refcount table", 48, odd.to_vec()),
        ("refcount table far away", 48, far.to_vec()),
        ("refcount table at the header", 48, vec![0; 8]),
        ("snapshots", 60, snapshots(u32::MAX, 0x6_0000)),
        ("snapshots", 60, snapshots(0x7FFF_FFFF, 0x6_0000)),
        ("misaligned snapshot table", 60, snapshots(1, 0x1234)),
        ("snapshot table past the end", 60, snapshots(1, 1 << 40)),
        ("snapshot table at the top", 60, snapshots(10, 0xFFFF_FFFF_FFFF_0000)),
        ("L1 size", 36, huge.to_vec()),
        ("L1 size", 36, large.to_vec()),
        ("L1 size 0", 36, vec![0; 4]),
        ("misaligned L1 table", 40, odd.to_vec()),
        ("L1 table far away", 40, far.to_vec()),
        ("backing name length", 8, [&200u64.to_be_bytes()[..], &huge].concat()),
        ("backing name outside", 8, [&(1u64 << 40).to_be_bytes()[..], &8u32.to_be_bytes()].concat()),
        ("cluster bits", 20, 63u32.to_be_bytes().to_vec()),
        ("cluster bits", 20, 8u32.to_be_bytes().to_vec()),
        ("cluster bits", 20, 22u32.to_be_bytes().to_vec()),
        ("refcount order", 96, 7u32.to_be_bytes().to_vec()),
        ("version", 4, 4u32.to_be_bytes().to_vec()),
        ("version", 4, 1u32.to_be_bytes().to_vec()),
        ("disk of 2^63 bytes", 24, (1u64 << 63).to_be_bytes().to_vec()),
        ("disk larger than its L1 table", 24, (1u64 << 50).to_be_bytes().to_vec()),
        ("encryption", 32, 1u32.to_be_bytes().to_vec()),
        ("encryption", 32, 2u32.to_be_bytes().to_vec()),
        ("encryption", 32, 77u32.to_be_bytes().to_vec()),
        ("compression type without its bit", 104, vec![1]),
        ("unknown feature", 72, (1u64 << 40).to_be_bytes().to_vec()),
        ("data file that is not named", 72, 4u64.to_be_bytes().to_vec()),
    ];
    for (what, at, value) in pokes {
        let mut bytes = good.clone();
        put(&mut bytes, at, &value);
        let errors = limits(what, &bytes);
        assert!(!errors.is_empty(), "{what} ({value:02x?}) was accepted");
        assert_ne!(errors[0].kind(), ErrorKind::Io, "{what}");
    }
}

#[test]
fn a_file_cut_short_anywhere_is_an_error_or_reads_as_zero() {
    let good = image();
    for len in
        [0, 1, 71, 103, 511, 512, 65_535, 65_536, 131_072, 150_000, 200_000, 262_144, 300_000, good.len() - 1]
    {
        limits(&format!("cut off at {len}"), &good[..len]);
    }
    for len in [0, 100, 512, 131_072] {
        assert!(!limits(&format!("cut off at {len}"), &good[..len]).is_empty(), "{len}");
    }
}

#[test]
fn an_unknown_feature_is_refused_by_its_name() {
    let mut bytes = image();
    put(&mut bytes, 72, &(1u64 << 40).to_be_bytes());
    let name = |bytes: &[u8]| {
        let storage: SharedStorage = MemoryStorage::holding("image", bytes);
        block_on(Header::read(&*storage)).unwrap_err().chain()
    };
    assert!(name(&bytes).contains("bit 40"), "{}", name(&bytes));
    // The image's own table of names begins behind the header, and its first row is for a bit we know.
    let table = 112 + 8;
    put(&mut bytes, table, &[0, 40]);
    put(&mut bytes, table + 2, b"time travel\0");
    assert!(name(&bytes).contains("time travel"), "{}", name(&bytes));
}

/// Where things are in an image of the default layout: cluster 1 has the refcount table, 2 its block, 3 the
/// L1 table, 4 the L2 table, 5 and on data.
#[test]
fn tables_that_point_at_each_other() {
    let good = image();
    let copied = 1u64 << 63;
    let (l1, l2, table) = (3 * 65_536, 4 * 65_536, 65_536);
    let targets: Vec<(&str, u64)> = vec![
        ("the header", 0x1_0000 - 0x1_0000),
        ("the refcount table", 0x1_0000),
        ("the refcount block", 0x2_0000),
        ("the L1 table", 0x3_0000),
        ("the L2 table", 0x4_0000),
        ("between clusters", 0x4_0200),
        ("past the end", 1 << 50),
        ("the last of all bytes", u64::MAX),
        ("just past the end", good.len() as u64),
    ];
    for (what, target) in &targets {
        for (from, at) in [("L1", l1), ("L2", l2), ("refcount table", table)] {
            let flag = if at == table { 0 } else { copied };
            let mut bytes = good.clone();
            put(&mut bytes, at, &(target | flag).to_be_bytes());
            limits(&format!("{from} entry 0 points at {what}"), &bytes);
            put(&mut bytes, at, &(target | flag | 0x1FE).to_be_bytes());
            limits(&format!("{from} entry 0 points at {what}, with reserved bits"), &bytes);
        }
    }
    // Guest writes must never reach the image's own tables.
    for (what, target) in &targets[1..5] {
        let mut bytes = good.clone();
        put(&mut bytes, l2, &(target | copied).to_be_bytes());
        let image = MemoryStorage::holding("image", &bytes);
        block_on(async {
            let disk = open(image.clone(), false).await.unwrap();
            let write = disk.write(GuestOffset::ZERO, Buffer::copy_of(&[0xEE; 4096]), WriteFlags::FUA).await;
            assert_eq!(write.unwrap_err().kind(), ErrorKind::Corrupt, "a guest write to {what}");
            let _ = disk.close().await;
        });
        let after = image.content().to_vec();
        let target = usize::try_from(*target).unwrap();
        assert!(!after[target..target + 4096].contains(&0xEE), "the guest wrote into {what}");
    }
    // Compressed clusters that lie nowhere, in each other, or end too early.
    for word in [
        1 << 62,
        1 << 62 | 0x3F << 54 | 0x4_0000,
        1 << 62 | 0xFF << 54 | (1 << 53),
        1 << 62 | good.len() as u64,
    ] {
        let mut bytes = good.clone();
        put(&mut bytes, l2, &u64::to_be_bytes(word));
        let errors = limits(&format!("compressed entry {word:#x}"), &bytes);
        assert!(!errors.is_empty());
    }
}

#[test]
fn huge_sparse_images_cost_what_is_in_them() {
    for (size, cluster_size) in [(1u64 << 46, 65_536), (1 << 52, 2 << 20), (1 << 31, 512)] {
        let bytes = image_with(CreateOptions { size, cluster_size, ..CreateOptions::without_journal() });
        let errors = limits(&format!("a disk of {size} bytes"), &bytes);
        assert!(errors.is_empty(), "{errors:?}");
    }
}

/// Found by fuzzing: new refcounts would have had to count their own table, which in a file of this length is
/// millions of clusters.
#[test]
fn refcounts_of_a_very_long_file_are_refused_at_once() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let image = MemoryStorage::new("image");
    let options = CreateOptions {
        size: 65_536,
        cluster_size: 512,
        refcount_bits: 64,
        ..CreateOptions::without_journal()
    };
    block_on(async {
        create(&*image, None, &options).await.unwrap();
        image.set_len(1 << 40).await.unwrap();
        image.write(ImageOffset::new(512), Buffer::copy_of(&[0, 0, 0, 0, 0, 0, 7, 1])).await.unwrap();
        let header = Header::read(&*image).await.unwrap();
        #[expect(clippy::disallowed_methods, reason = "a hostile image must not keep a program busy")]
        let begun = Instant::now();
        let image: SharedStorage = image;
        let error = check(&header, &image, Repair::All, &mut |_| {}).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
        assert!(error.chain().contains("too large for its cluster size"), "{}", error.chain());
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    });
}

#[test]
fn every_byte_of_the_metadata_wrong_once() {
    let options = CreateOptions { size: 200_000, cluster_size: 512, ..CreateOptions::without_journal() };
    let image = MemoryStorage::new("image");
    block_on(async {
        create(&*image, None, &options).await.unwrap();
        let disk = open(image.clone(), false).await.unwrap();
        for at in [0, 40_000, 100_000] {
            let write = disk.write(GuestOffset::new(at), Buffer::copy_of(&[1; 1000]), WriteFlags::default());
            write.await.unwrap();
        }
        disk.close().await.unwrap();
    });
    let good = image.content().to_vec();
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut tried = 0;
    for at in 0..good.len() {
        let is_data = good[at] == 1 && at >= 112;
        if is_data {
            continue;
        }
        for change in [1, 0x80, 0xFF] {
            let mut bytes = good.clone();
            bytes[at] ^= change;
            block_on(use_all(&bytes)); // nothing is expected but that it ends
            tried += 1;
        }
    }
    assert!(tried > 3_000, "{tried}");
}

/// Found by fuzzing: the check passed such an entry, as QEMU does, but the disk could not be read.
#[test]
fn an_l1_entry_of_a_flag_and_nothing_else_names_no_table() {
    let mut bytes = image();
    let l1 = usize::try_from(u64::from_be_bytes(bytes[40..48].try_into().unwrap())).unwrap();
    put(&mut bytes, l1, &(1u64 << 63).to_be_bytes());
    let image = MemoryStorage::holding("image", &bytes);
    block_on(async {
        let disk = open(image.clone(), false).await.unwrap();
        let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await.unwrap();
        assert!(read.is_zero());
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&[7; 4096]), WriteFlags::FUA).await.unwrap();
        disk.close().await.unwrap();
        let disk = open(image.clone(), true).await.unwrap();
        let read = disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await.unwrap();
        assert_eq!(read.slice(), [7; 4096]);
    });
}

/// Counts what is read of an image.
struct Counting {
    inner: Arc<MemoryStorage>,
    reads: AtomicU64,
    bytes: AtomicU64,
}

impl ForwardStorage for Counting {
    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        self.inner.read(at, buffer)
    }
}

/// Where tables of the worst images lie: behind all that is in use, after a gap.
const TABLES_AT: u64 = 1 << 30;

/// An image of 512-byte clusters with this many snapshots, whose L1 tables have this many bytes: one for all
/// of them, or one each. The first entries of the shared one are filled, each with the same L2 table, which
/// is full.
fn with_snapshots(count: u64, l1_bytes: u64, is_shared: bool, entries: u64) -> Arc<MemoryStorage> {
    let options = CreateOptions { size: 1 << 20, cluster_size: 512, ..CreateOptions::without_journal() };
    let image = MemoryStorage::new("image");
    let put = async |at: u64, bytes: &[u8]| {
        image.write(ImageOffset::new(at), Buffer::copy_of(bytes)).await.unwrap();
    };
    block_on(async {
        create(&*image, None, &options).await.unwrap();
        let table_at = (1 << 20) + 512;
        let l2_at: u64 = 2 << 20;
        put(l2_at, &(l2_at + 512).to_be_bytes().repeat(64)).await;
        let l1 = (l2_at).to_be_bytes().repeat(usize::try_from(entries).unwrap());
        put(TABLES_AT, &l1).await;
        let mut table = Vec::new();
        for index in 0..count {
            let l1_at = TABLES_AT + if is_shared { 0 } else { index * l1_bytes };
            let mut entry = vec![0; 64];
            put64(&mut entry, 0, l1_at);
            entry[8..12].copy_from_slice(&u32::try_from(l1_bytes / 8).unwrap().to_be_bytes());
            entry[15] = 8; // bytes of the name
            entry[39] = 16; // of extra data
            put64(&mut entry, 56, index);
            table.extend(entry);
        }
        put(table_at, &table).await;
        put(60, &u32::try_from(count).unwrap().to_be_bytes()).await;
        put(64, &table_at.to_be_bytes()).await;
        let end = TABLES_AT + if is_shared { l1_bytes } else { count * l1_bytes };
        image.set_len(end).await.unwrap();
    });
    image
}

fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

/// What a header and a table claim costs no more work than the bytes that are there: neither opening for
/// writing, nor a check, nor the repair of an image that was not closed.
#[test]
fn snapshots_cost_what_their_tables_hold() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let max = 32 << 20;
    let cases = [
        ("as many snapshots as can be, of one small table", 65_536, 4096, true, 512),
        ("as many as can be, of a small table each, in a hole", 65_536, 4096, false, 0),
        ("the largest tables, in a hole", 8, max, false, 0),
        ("one table for all, in a hole", 8, max, true, 0),
        ("one table for all, and each entry names the same L2 table", 8, max, true, 65_536),
    ];
    for (what, count, l1_bytes, is_shared, entries) in cases {
        let inner = with_snapshots(count, l1_bytes, is_shared, entries);
        let there = count * 64 + entries * 8 + (1 << 20);
        for is_dirty in [false, true] {
            let image = Forwarding::new(Counting {
                inner: inner.clone(),
                reads: AtomicU64::new(0),
                bytes: AtomicU64::new(0),
            });
            let shared: SharedStorage = image.clone();
            if is_dirty {
                let bit = Buffer::copy_of(&1u64.to_be_bytes());
                block_on(inner.write(ImageOffset::new(72), bit)).unwrap();
            }
            MEMORY.reset_peak_usage();
            let before = MEMORY.current_usage();
            let opened = block_on(async {
                let header = Header::read(&*shared).await?;
                let files = Files { image: shared.clone(), data_file: None, below: None };
                Qcow2::open(header, files, OpenOptions::default()).await
            });
            let used = MEMORY.peak_usage().saturating_sub(before);
            let (reads, bytes) = (image.reads.load(Ordering::Relaxed), image.bytes.load(Ordering::Relaxed));
            let passes = if is_dirty { 6 } else { 1 };
            assert!(
                bytes <= passes * there * 2,
                "{what}, dirty {is_dirty}: {bytes} bytes read, {there} there"
            );
            assert!(reads <= passes * (1000 + count), "{what}, dirty {is_dirty}: {reads} reads");
            assert!(used < 192 << 20, "{what}, dirty {is_dirty}: {} MiB of memory", used >> 20);
            if let Err(error) = opened {
                assert!(is_dirty, "{what}: {}", error.chain());
            }
        }
    }
}

/// Together the tables of a real image's snapshots are far from this large.
#[test]
fn snapshots_that_claim_too_much_are_refused() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for is_shared in [true, false] {
        let image = with_snapshots(65_536, 32 << 20, is_shared, 16);
        let error = block_on(open(image.clone(), false)).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
        assert!(error.chain().contains("256 MiB"), "{}", error.chain());
        let shared: SharedStorage = image;
        let header = block_on(Header::read(&*shared)).unwrap();
        let report = block_on(check(&header, &shared, Repair::Nothing, &mut |_| {})).unwrap();
        assert!(report.corruptions > 0);
    }
}
