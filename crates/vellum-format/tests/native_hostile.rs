//! Images of the native format that lie. Each gives one clear error, or works as far as it is valid; never a
//! panic, never more than 64 MiB, never an endless loop (`limits`).
//!
//! The first test pokes every field of the superblock, with its CRC corrected; the second every kind of page
//! of home; the third truncates the file; the last damages the journal of an image that was not closed, and
//! its data.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_lite::future::block_on;
use peak_alloc::PeakAlloc;
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, GuestOffset, MemoryDisk, MemoryStorage, Random, Result, SharedDisk,
    SharedStorage, Storage, WriteFlags, ZeroFlags,
};
use vellum_format::native::check::check;
use vellum_format::native::{
    CreateOptions, Native, NewBase, OpenOptions, Region, Superblocks, create, recover,
};
use vellum_format::report::Repair;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Tests of this file measure the memory of the whole process, so they take turns.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

const SIZE: u64 = (1 << 20) + 512;

fn base() -> SharedDisk {
    MemoryDisk::holding(&vec![7; 700_000])
}

/// The kinds of image: with a table, with zones or without, over a base or not.
fn kinds() -> [CreateOptions; 6] {
    let plain = CreateOptions { size: SIZE, uuid: Some([1; 16]), ..CreateOptions::default() };
    let over = |options: CreateOptions| CreateOptions {
        base: Some(NewBase { name: "base".to_owned(), size: 700_000, ..NewBase::default() }),
        journal_bytes: Some(65_536),
        ..options
    };
    let table = CreateOptions {
        has_table: true,
        unit_size: Some(65_536),
        journal_bytes: Some(65_536),
        ..plain.clone()
    };
    let zoned = CreateOptions { has_zones: true, zone_size: Some(1 << 19), ..table.clone() };
    [plain.clone(), over(plain), table.clone(), over(table), zoned.clone(), over(zoned)]
}

async fn open(storage: Arc<MemoryStorage>, read_only: bool) -> Result<Arc<Native>> {
    // Where it says that it has a base, there is one.
    let has_base = Superblocks::read(&*storage).await?.superblock.base().is_some();
    let options = OpenOptions { read_only, journal_key: Some(1), ..OpenOptions::default() };
    Native::open(storage, has_base.then(base), options).await
}

/// An image that was used, and closed or not.
fn image(options: &CreateOptions, is_closed: bool) -> Vec<u8> {
    let storage = MemoryStorage::new("image");
    block_on(async {
        create(&*storage, options).await.unwrap();
        let disk = open(storage.clone(), false).await.unwrap();
        for at in [0, 100_000, 400_000, 1 << 20] {
            let len = (SIZE - at).min(9000);
            let data = Buffer::copy_of(&vec![3; usize::try_from(len).unwrap()]);
            disk.write(GuestOffset::new(at), data, WriteFlags::FUA).await.unwrap();
        }
        disk.write_zeroes(GuestOffset::new(200_000).span(100_000), ZeroFlags::default()).await.unwrap();
        disk.flush().await.unwrap();
        if is_closed {
            disk.close().await.unwrap();
        }
    });
    storage.content().to_vec()
}

/// Everything a user may do with an image. Whether each succeeds does not matter; that it ends, and how,
/// does.
async fn use_all(bytes: &[u8]) -> Vec<Error> {
    let mut errors = Vec::new();
    let fresh = || MemoryStorage::holding("image", bytes);
    match open(fresh(), true).await {
        Ok(disk) => {
            let len = usize::try_from(disk.geometry().size.min(2 * SIZE)).unwrap();
            errors.extend(disk.read(GuestOffset::ZERO, Buffer::zeroed(len)).await.err());
            errors.extend(disk.map(GuestOffset::ZERO.span(disk.geometry().size)).await.err());
        }
        Err(error) => errors.push(error),
    }
    for repair in [Repair::Nothing, Repair::All] {
        let storage: SharedStorage = fresh();
        errors.extend(check(&storage, repair, &mut |_| {}).await.err());
    }
    let storage: SharedStorage = fresh();
    errors.extend(recover(&storage).await.err());
    match open(fresh(), false).await {
        Ok(disk) => {
            let size = disk.geometry().size;
            for at in [0, 90_000, 400_000, 1 << 20] {
                if at + 70_000 > size {
                    continue;
                }
                let at = GuestOffset::new(at);
                errors.extend(disk.write(at, Buffer::copy_of(&[9; 5000]), WriteFlags::FUA).await.err());
                errors.extend(disk.write_zeroes(at.span(60_000), ZeroFlags::default()).await.err());
                errors.extend(disk.discard(at.span(70_000), WriteFlags::default()).await.err());
            }
            errors.extend(disk.close().await.err());
        }
        Err(error) => errors.push(error),
    }
    errors
}

/// Runs `use_all` within the limits, and gives its errors.
fn limits(what: &str, bytes: &[u8]) -> Vec<Error> {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    #[expect(clippy::disallowed_methods, reason = "a hostile image must not keep a program busy")]
    let start = Instant::now();
    let errors = block_on(use_all(bytes));
    let used = MEMORY.peak_usage().saturating_sub(before);
    assert!(used < 64 << 20, "{what}: {} MiB of memory", used >> 20);
    assert!(start.elapsed() < Duration::from_secs(20), "{what}: {:?}", start.elapsed());
    for error in &errors {
        assert!(error.chain().len() > 20, "{what}: the error says nothing: {error:?}");
    }
    errors
}

/// Makes the CRCs of both superblocks good again.
fn seal(bytes: &mut [u8]) {
    for page in bytes[..8192].chunks_exact_mut(4096) {
        page[8..12].fill(0);
        let crc = crc32c::crc32c(page);
        page[8..12].copy_from_slice(&crc.to_be_bytes());
    }
}

#[test]
fn good_images_are_good() {
    for options in kinds() {
        assert!(limits("closed", &image(&options, true)).is_empty(), "{options:?}");
        let errors = limits("not closed", &image(&options, false));
        // What cannot be checked is reported, and nothing else.
        assert!(errors.iter().all(|error| error.chain().contains("vellum recover")), "{errors:?}");
    }
}

#[test]
fn every_field_of_the_superblock() {
    let values: [u64; 6] = [0, 1, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 40, u64::MAX];
    let fields = [
        (12, 4),
        (16, 8),
        (40, 8),
        (48, 8),
        (56, 4),
        (60, 1),
        (61, 1),
        (64, 8),
        (72, 8),
        (176, 8),
        (184, 8),
        (192, 8),
        (208, 4),
        (212, 4),
        (216, 4),
        (220, 4),
    ];
    let regions = (0..12).map(|index| (80 + 8 * index, 8));
    for options in kinds() {
        let good = image(&options, true);
        for (at, len) in fields.into_iter().chain(regions.clone()) {
            for value in values.into_iter().chain([1 << 12, 1 << 20, 1 << 31]) {
                let mut bytes = good.clone();
                for page in [0, 4096] {
                    bytes[page + at..page + at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
                }
                seal(&mut bytes);
                limits(&format!("{value:#x} at {at}"), &bytes);
            }
        }
    }
}

#[test]
fn single_bits_of_the_superblock() {
    for options in &kinds()[2..] {
        let good = image(options, true);
        for at in (12..80).chain(168..242).chain([256, 1280]) {
            for bit in [0, 7] {
                let mut bytes = good.clone();
                bytes[at] ^= 1 << bit;
                bytes[4096 + at] ^= 1 << bit;
                seal(&mut bytes);
                limits(&format!("bit {bit} of byte {at}"), &bytes);
            }
        }
    }
}

#[test]
fn pages_of_home() {
    for (kind, is_closed) in [(3, true), (5, true), (5, false)] {
        pages_of_home_of(&kinds()[kind], is_closed);
    }
}

fn pages_of_home_of(options: &CreateOptions, is_closed: bool) {
    let good = image(options, is_closed);
    let storage = MemoryStorage::holding("image", &good);
    let places = block_on(Superblocks::read(&*storage)).unwrap().superblock.places();
    let regions = Region::ALL.into_iter().filter(|region| *region != Region::Journal);
    for region in regions.filter(|region| !places.region(*region).is_empty()) {
        let start = usize::try_from(places.region(region).start().bytes()).unwrap();
        let end = usize::try_from(places.region(region).end().bytes()).unwrap();
        for (at, len) in [(start, 4), (start, 64), (start + 4, 4), (start + 4096 - 8, 8), (end - 128, 4)] {
            for value in [1u8, 2, 3, 0x10, 0x7F, 0xAA, 0xFF] {
                let mut bytes = good.clone();
                let at = at.min(end - len);
                bytes[at..at + len].fill(value);
                limits(&format!("{value:#x} × {len} in {} at {at:#x}", region.name()), &bytes);
            }
        }
        let mut bytes = good.clone();
        Random::from_seed(at_seed(region)).fill(&mut bytes[start..end.min(start + 65_536)]);
        limits(&format!("noise in {}", region.name()), &bytes);
    }
}

/// Noise of its own for each.
fn at_seed(region: Region) -> u64 {
    region as u64 + 1
}

#[test]
fn two_units_in_one_place_are_refused_for_writing() {
    let good = image(&kinds()[2], true);
    let storage = MemoryStorage::holding("image", &good);
    let places = block_on(Superblocks::read(&*storage)).unwrap().superblock.places();
    let at = usize::try_from(places.region(Region::Table).start().bytes()).unwrap();
    let mut bytes = good.clone();
    let entry: [u8; 4] = good[at..at + 4].try_into().unwrap();
    assert_ne!(entry, [0; 4], "the first unit is there");
    bytes[at + 36..at + 40].copy_from_slice(&entry);
    let errors = limits("a unit for two", &bytes);
    assert!(errors.iter().any(|error| error.kind() == ErrorKind::Corrupt), "{errors:?}");
    let storage: SharedStorage = MemoryStorage::holding("image", &bytes);
    let mut lines = Vec::new();
    let report = block_on(check(&storage, Repair::All, &mut |line| lines.push(line))).unwrap();
    assert_eq!(report.corruptions, 1, "{lines:#?}");
}

#[test]
fn a_file_cut_short_anywhere() {
    for options in kinds() {
        let good = image(&options, true);
        for len in [0, 1, 511, 512, 4095, 4096, 8191, 8192, 12_288, 600_000, (1 << 20) - 1] {
            assert!(!limits(&format!("cut off at {len}"), &good[..len]).is_empty(), "{len}");
        }
        for len in [1 << 20, (1 << 20) + 1, (1 << 20) + 65_536, good.len() - 1] {
            limits(&format!("cut off at {len}"), &good[..len.min(good.len())]);
        }
    }
}

#[test]
fn regions_that_are_far_apart() {
    // A file of 8 GiB that takes no space on the host, and all of it is home pages.
    let good = image(&kinds()[1], true);
    let storage = MemoryStorage::holding("image", &good);
    let far: u64 = 8 << 30;
    let mut page = good[..4096].to_vec();
    page[176..184].copy_from_slice(&far.to_be_bytes());
    page[160..168].copy_from_slice(&(far - 65_536).to_be_bytes());
    let mut both = [page.clone(), page].concat();
    seal(&mut both);
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    block_on(async {
        storage.set_len(far).await.unwrap();
        storage.write(vellum_core::ImageOffset::ZERO, Buffer::copy_of(&both)).await.unwrap();
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let disk = open(storage.clone(), false).await.unwrap();
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&[9; 5000]), WriteFlags::FUA).await.unwrap();
        disk.close().await.unwrap();
        let used = MEMORY.peak_usage().saturating_sub(before);
        assert!(used < 64 << 20, "{} MiB of memory", used >> 20);
        let shared: SharedStorage = storage.clone();
        assert!(check(&shared, Repair::Nothing, &mut |_| {}).await.unwrap().is_clean());
    });
}

#[test]
fn journals_that_lie() {
    for options in &kinds()[2..] {
        let good = image(options, false);
        let storage = MemoryStorage::holding("image", &good);
        let superblock = block_on(Superblocks::read(&*storage)).unwrap().superblock;
        assert!(superblock.needs_replay());
        let journal = superblock.places().region(Region::Journal);
        let start = usize::try_from(journal.start().bytes()).unwrap();
        // Every byte of the first records' heads, and some of their bodies.
        for at in (0..4 * 4096).filter(|at| at % 4096 < 140 && at % 11 == 0) {
            let mut bytes = good.clone();
            bytes[start + at] ^= 0x41;
            limits(&format!("byte {at} of the journal"), &bytes);
        }
        let mut bytes = good.clone();
        bytes[start..start + 65_536].fill(0);
        limits("an empty journal", &bytes);
        // Data that a record counts on.
        let data = usize::try_from(superblock.places().data_offset().bytes()).unwrap();
        for at in (data..good.len()).step_by(150_000) {
            let mut bytes = good.clone();
            let end = (at + 4096).min(bytes.len());
            bytes[at..end].fill(0x55);
            limits(&format!("data at {at}"), &bytes);
        }
    }
}
