//! Caches that this program wrote once, and must read for ever: `tests/golden/NAME.flash`, and `NAME.txt` with what they hold.
//!
//! ```text
//!   a sector that is not zero:  its number (4 bytes)  1, byte: 512 of these;  0: then 512 bytes         NAME.flash
//! ```
//!
//! With `VELLUM_GOLDEN=write` those that are missing are made. None is ever made anew.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use common::{ID, SECRET, options, over, over_with};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, MemoryDisk, MemoryStorage, SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_flash::{self as flash, FlashCache, FlashDisk, FlashPolicy, listing, look};

const SLOTS: usize = 64;
const CACHE_BYTES: usize = 8192 + 4 * 90_112 + (128 << 10) + SLOTS * 4096;
/// The first five have a CRC of each sector in their records, the next two one for each block, the others one for neighbouring
/// blocks.
const NAMES: [&str; 9] = [
    "drained",
    "kept",
    "killed",
    "void",
    "through",
    "one-crc",
    "one-crc-void",
    "neighbours",
    "neighbours-void",
];

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn pack(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    for (number, sector) in bytes.chunks(512).enumerate() {
        if sector.iter().any(|byte| *byte != 0) {
            packed.extend(u32::try_from(number).unwrap().to_be_bytes());
            if sector.iter().all(|byte| *byte == sector[0]) {
                packed.extend([1, sector[0]]);
            } else {
                packed.push(0);
                packed.extend(sector);
            }
        }
    }
    packed
}

fn unpack(mut packed: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; CACHE_BYTES];
    while let Some((head, rest)) = packed.split_at_checked(5) {
        let at = 512 * u32::from_be_bytes(head[..4].try_into().unwrap()) as usize;
        let len = if head[4] == 1 { 1 } else { 512 };
        if len == 1 {
            bytes[at..at + 512].fill(rest[0]);
        } else {
            bytes[at..at + 512].copy_from_slice(&rest[..512]);
        }
        packed = &rest[len..];
    }
    bytes
}

/// Two disks, with whole blocks and parts of blocks, clean and dirty, zeros that home may and may not give up.
async fn make(name: &str) -> Vec<u8> {
    let memory = MemoryStorage::new("flash");
    let storage: SharedStorage = memory.clone();
    storage.set_len(CACHE_BYTES as u64).await.unwrap();
    flash::create(&storage, CACHE_BYTES as u64, ID, SECRET).await.unwrap();
    let cache = FlashCache::open(storage, options(1)).await.unwrap();
    if name == "through" {
        return through(&cache, &memory).await;
    }
    let mut disks = Vec::new();
    for number in [1, 2] {
        disks.push(over(&cache, number, MemoryDisk::new(1 << 20)).await.unwrap());
    }
    for (index, disk) in disks.iter().enumerate() {
        let fill = u8::try_from(index * 16 + 1).unwrap();
        for (round, (at, len)) in [(0, 8192), (65_536, 4096), (131_584, 1024)].into_iter().enumerate() {
            let bytes = vec![fill + u8::try_from(round).unwrap(); len];
            disk.write(GuestOffset::new(at), Buffer::copy_of(&bytes), WriteFlags::default()).await.unwrap();
            disk.flush().await.unwrap();
        }
        disk.write_zeroes(GuestOffset::new(262_144).span(40_960), ZeroFlags::default()).await.unwrap();
        disk.discard(GuestOffset::new(524_288).span(16_384), WriteFlags::default()).await.unwrap();
        disk.flush().await.unwrap();
    }
    disks[0].drain().await.unwrap();
    cache.flush().await.unwrap();
    let last = if name.starts_with("neighbours") {
        // Blocks in a free group, and some that leave it together.
        disks[0]
            .write(GuestOffset::new(786_432), Buffer::copy_of(&[50; 65_536]), WriteFlags::default())
            .await
            .unwrap();
        disks[0].flush().await.unwrap();
        Buffer::copy_of(&[99; 3 * 4096])
    } else {
        Buffer::copy_of(&[99; 4096])
    };
    disks[0].write(GuestOffset::new(4096), last, WriteFlags::default()).await.unwrap();
    disks[0].flush().await.unwrap();
    let mut bytes = memory.content().to_vec();
    if name.ends_with("void") {
        // The last write did not arrive, its record did.
        let at = bytes.len() - 4096 * SLOTS;
        let lost = bytes[at..].iter().rposition(|byte| *byte == 99).unwrap();
        bytes[at + lost] = 0;
    }
    for disk in &disks {
        disk.keep_at_close(name == "kept");
        disk.close().await.unwrap();
    }
    cache.close().await.unwrap();
    if matches!(name, "drained" | "kept") { memory.content().to_vec() } else { bytes }
}

/// A disk that is written through, and killed: its first region is settled, its second and a far one are not. Beside it
/// a disk that is written back.
async fn through(cache: &Arc<FlashCache>, memory: &MemoryStorage) -> Vec<u8> {
    let back = over(cache, 1, MemoryDisk::new(1 << 20)).await.unwrap();
    let disk = over_with(cache, 2, MemoryDisk::new(8 << 30), FlashPolicy::WriteThrough).await.unwrap();
    let write = async |disk: &FlashDisk, at: u64, len: usize, fill: u8| {
        let bytes = Buffer::copy_of(&vec![fill; len]);
        disk.write(GuestOffset::new(at), bytes, WriteFlags::default()).await.unwrap();
    };
    write(&back, 0, 8192, 1).await;
    write(&disk, 0, 8192, 2).await;
    write(&disk, 65_536, 1024, 3).await;
    disk.settle().await.unwrap();
    for (at, fill) in [(64 << 20, 4), (65 << 20, 5), (5 << 30, 6)] {
        write(&disk, at, 4096, fill).await;
    }
    back.flush().await.unwrap();
    memory.content().to_vec()
}

#[test]
fn golden_caches_are_read_for_ever() {
    for name in NAMES {
        let (path, text) =
            (directory().join(format!("{name}.flash")), directory().join(format!("{name}.txt")));
        if !path.exists() && std::env::var("VELLUM_GOLDEN").is_ok_and(|how| how == "write") {
            let bytes = block_on(make(name));
            std::fs::create_dir_all(directory()).unwrap();
            std::fs::write(&path, pack(&bytes)).unwrap();
            let lines =
                block_on(listing(&(MemoryStorage::holding("flash", &bytes) as SharedStorage))).unwrap();
            std::fs::write(&text, lines.join("\n") + "\n").unwrap();
        }
        let bytes = unpack(&std::fs::read(&path).expect("a golden cache"));
        let expected = std::fs::read_to_string(&text).expect("what it holds");
        let expected: Vec<&str> = expected.lines().collect();
        let memory = MemoryStorage::holding("flash", &bytes);
        let storage: SharedStorage = memory.clone();
        assert_eq!(block_on(listing(&storage)).unwrap(), expected, "{name}");
        assert_eq!(block_on(look(&storage)).unwrap().has_void, name.ends_with("void"));
        let cache = block_on(FlashCache::open(storage.clone(), options(1))).unwrap();
        drop(cache);
        let found = block_on(look(&storage)).unwrap();
        assert!(!found.has_void, "{name}: an opening makes the record void");
        assert_eq!(block_on(listing(&storage)).unwrap(), expected, "{name}, after an opening");
        if name == "through" {
            block_on(void_is_forgotten(&storage));
        }
        other_reader_agrees(name, &bytes, &expected);
    }
}

/// An older cache gets the feature when it is opened, and is written and read with it.
#[test]
fn an_older_cache_learns_of_neighbours() {
    for name in ["killed", "one-crc"] {
        let bytes = unpack(&std::fs::read(directory().join(format!("{name}.flash"))).unwrap());
        let memory = MemoryStorage::holding("flash", &bytes);
        let storage: SharedStorage = memory.clone();
        let features = |bytes: &[u8]| [bytes[23], bytes[4096 + 23]];
        assert_eq!(features(&bytes).map(|bits| bits & 4), [0, 0], "{name}");
        block_on(async {
            let cache = FlashCache::open(storage.clone(), options(1)).await.unwrap();
            assert_eq!(features(&memory.content().to_vec()).map(|bits| bits & 4), [4, 4], "{name}");
            let disk = over(&cache, 1, MemoryDisk::new(1 << 20)).await.unwrap();
            let before = cache.counts().record_bytes;
            let data = Buffer::copy_of(&[77; 16 * 4096]);
            disk.write(GuestOffset::new(786_432), data, WriteFlags::default()).await.unwrap();
            disk.flush().await.unwrap();
            assert!(cache.counts().record_bytes > before);
        });
        let lines = block_on(listing(&storage)).unwrap();
        for block in 192..208 {
            let is_dirty =
                |line: &&String| line.starts_with(&format!("block 0 {block} ")) && line.ends_with(" ff 1");
            assert_eq!(lines.iter().filter(is_dirty).count(), 1, "{name}: {lines:?}");
        }
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        other_reader_agrees(name, &memory.content().to_vec(), &lines);
    }
}

/// What was written in regions that were not settled does not count, and the rest does.
async fn void_is_forgotten(storage: &SharedStorage) {
    let cache = FlashCache::open(storage.clone(), options(2)).await.unwrap();
    let disk = over_with(&cache, 2, MemoryDisk::new(8 << 30), FlashPolicy::WriteThrough).await.unwrap();
    for (at, fill) in [(0, 2), (65_536, 3), (64 << 20, 0), (65 << 20, 0), (5 << 30, 0)] {
        let found = disk.read(GuestOffset::new(at), Buffer::zeroed(512)).await.unwrap().to_vec();
        assert!(found.iter().all(|byte| *byte == fill), "{at}: {}", found[0]);
    }
    cache.flush().await.unwrap();
    let lines = listing(storage).await.unwrap();
    assert!(!lines.iter().any(|line| line.starts_with("written")), "{lines:?}");
}

#[allow(clippy::print_stderr, reason = "a test that is skipped says why")]
fn other_reader_agrees(name: &str, bytes: &[u8], expected: &[&str]) {
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        return eprintln!("skipped: python3 is not installed");
    }
    let path = std::env::temp_dir().join(format!("vellum-golden-{name}-{}", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check-flash.py");
    let output = Command::new("python3").arg(script).arg("--list").arg(&path).output().unwrap();
    std::fs::remove_file(&path).unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{name}: {text}");
    let is_listed =
        |line: &&str| ["row ", "written ", "zero ", "block "].iter().any(|word| line.starts_with(word));
    assert_eq!(text.lines().filter(is_listed).collect::<Vec<_>>(), expected, "{name}");
}
