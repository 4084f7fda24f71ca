//! `tools/check-flash.py` reads what a cache left behind: it says what a recovery here finds, and refuses what that refuses.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use common::{cache_on, over};
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, GuestOffset, MemoryDisk, MemoryStorage, Random, SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_flash::{self as flash, listing, look};

const DISK_BYTES: u64 = 6 << 20;

/// The other reader, if it can be run here.
#[allow(clippy::print_stderr, reason = "a test that is skipped says why")]
fn other_reader() -> Option<Command> {
    let mut command = Command::new("python3");
    if !command.arg("--version").output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: python3 is not installed");
        return None;
    }
    let mut command = Command::new("python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check-flash.py"));
    Some(command)
}

/// A cache as a kill leaves it, after random requests to two disks.
async fn left_behind(seed: u64) -> Vec<u8> {
    let mut random = Random::from_seed(seed);
    let flash = MemoryStorage::new("flash");
    let storage: SharedStorage = flash.clone();
    let slots = *random.pick(&[40, 300, 2000]);
    let cache = cache_on(&storage, slots, seed).await.unwrap();
    let mut disks = Vec::new();
    for number in [1, 2] {
        disks.push(over(&cache, number, MemoryDisk::new(DISK_BYTES)).await.unwrap());
    }
    let requests = random.below(400);
    for step in 0..requests {
        let disk = random.pick(&disks).clone();
        let long = if random.one_in(10) { 1 << 19 } else { 20_000 };
        let len = 512 * (1 + random.below(long / 512));
        let at = GuestOffset::new(512 * random.below((DISK_BYTES - len) / 512));
        match random.below(12) {
            0..7 => {
                let bytes = vec![*random.pick(&[1, 7, 0x55, 255]); usize::try_from(len).unwrap()];
                disk.write(at, Buffer::copy_of(&bytes), WriteFlags::default()).await.unwrap();
            }
            7 => disk.write_zeroes(at.span(len), ZeroFlags::default()).await.unwrap(),
            8 => disk.discard(at.span(len), WriteFlags::default()).await.unwrap(),
            9 => drop(disk.read(at, Buffer::for_overwrite(usize::try_from(len).unwrap())).await.unwrap()),
            10 => drop(cache.tend(Duration::from_secs(step)).await),
            _ => disk.flush().await.unwrap(),
        }
    }
    if random.one_in(2) {
        disks[0].flush().await.unwrap();
    }
    let bytes = flash.content().to_vec();
    // What the test holds of it does not matter any more, and is closed in an orderly way.
    for disk in disks {
        disk.close().await.unwrap();
    }
    cache.close().await.unwrap();
    bytes
}

fn write_down(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn storage_of(bytes: &[u8]) -> SharedStorage {
    MemoryStorage::holding("flash", bytes)
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("vellum-flash-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

#[test]
fn two_readers_find_the_same() {
    let scratch = Scratch::new("same");
    let mut with_blocks = 0;
    for seed in 0..24 {
        let Some(mut reader) = other_reader() else { return };
        let bytes = block_on(left_behind(seed));
        let ours = block_on(listing(&storage_of(&bytes))).unwrap();
        let found = block_on(look(&storage_of(&bytes))).unwrap();
        with_blocks += u64::from(found.facts.dirty_blocks > 10);
        let path = write_down(&scratch.0, "cache", &bytes);
        let output = reader.arg("--list").arg(&path).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "seed {seed}: {text}{}", String::from_utf8_lossy(&output.stderr));
        let is_listed = |line: &&str| ["row ", "zero ", "block "].iter().any(|word| line.starts_with(word));
        let theirs: Vec<&str> = text.lines().filter(is_listed).collect();
        assert_eq!(theirs, ours, "seed {seed}");
        assert_eq!(text.contains("was never acknowledged"), found.has_void, "seed {seed}");
        let record = format!("record {}\n", found.facts.sequence);
        assert!(text.contains(&record), "seed {seed}: {record} in {text}");
    }
    assert!(with_blocks > 10, "{with_blocks} caches had something to compare");
}

#[test]
fn two_readers_refuse_the_same() {
    let scratch = Scratch::new("broken");
    let (mut refused, mut void) = (0, 0);
    for seed in 100..106 {
        let bytes = block_on(left_behind(seed));
        let mut random = Random::from_seed(seed);
        let metadata = usize::try_from(8192 + 4 * 90_112 + (128 << 10)).unwrap();
        let mut paths = Vec::new();
        let mut ours = Vec::new();
        for case in 0..12 {
            let mut bytes = bytes.clone();
            // What is in use: bytes that are not zero. Some are in slots, where only checks see them.
            let end = if case % 3 == 0 { bytes.len() } else { metadata };
            for _ in 0..=random.below(2) {
                let used: Vec<usize> =
                    (0..20_000).map(|_| random.index(end)).filter(|at| bytes[*at] != 0).collect();
                let at = used.first().copied().unwrap_or(24);
                bytes[at] ^= 1 << random.below(8);
            }
            let found = block_on(look(&storage_of(&bytes)));
            void += u64::from(found.as_ref().is_ok_and(|found| found.has_void));
            refused += u64::from(found.is_err());
            ours.push(found.is_ok());
            paths.push(write_down(&scratch.0, &format!("cache-{case}"), &bytes));
        }
        let Some(mut reader) = other_reader() else { return };
        let output = reader.args(&paths).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        for (path, is_good) in paths.iter().zip(ours) {
            let prefix = format!("{}: ", path.display());
            let code = text.lines().find_map(|line| line.strip_prefix(&prefix));
            let code = code.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
            assert_eq!(code == "0", is_good, "seed {seed}: {}: {text}", path.display());
        }
    }
    assert!(refused > 0 && void > 0, "{refused} refused, {void} with a void record");
}

#[test]
fn what_is_no_cache_is_refused_by_both() {
    let scratch = Scratch::new("none");
    for bytes in [vec![], vec![0; 4096], vec![7; 100_000]] {
        assert!(block_on(look(&storage_of(&bytes))).is_err());
        let Some(mut reader) = other_reader() else { return };
        let path = write_down(&scratch.0, "cache", &bytes);
        assert_eq!(reader.arg(&path).output().unwrap().status.code(), Some(1));
    }
}
