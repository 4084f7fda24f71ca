//! Images that several tests look at, and the second opinion on them: `tools/check-native.py`.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use futures_lite::future::{block_on, poll_once};
use vellum_core::{
    Buffer, Disk, GuestOffset, MemoryDisk, MemoryStorage, Random, Result, SharedDisk, SharedStorage,
    WriteFlags, ZeroFlags,
};
use vellum_format::native::check::check;
use vellum_format::native::snapshots::revert;
use vellum_format::native::{CreateOptions, Native, NewBase, OpenOptions, Superblocks, create, resize};
use vellum_format::report::Repair;

use crate::common::{SECRET, keys};

pub const SIZE: u64 = (1 << 20) + 512;
const BASE_SIZE: usize = 700_000;

/// No sub-block of it is like another, and none is zero.
pub fn base_bytes() -> Vec<u8> {
    (0..BASE_SIZE).map(|at| u8::try_from(at / 4096 % 251 + 1).expect("small")).collect()
}

fn base() -> SharedDisk {
    MemoryDisk::holding(&base_bytes())
}

/// Every switch, by a name.
pub fn kinds() -> [(&'static str, CreateOptions); 6] {
    let plain = CreateOptions { size: SIZE, uuid: Some([0x5A; 16]), ..CreateOptions::default() };
    let over = |options: CreateOptions| CreateOptions {
        base: Some(NewBase {
            name: "base.raw".to_owned(),
            format: Some("raw".to_owned()),
            size: BASE_SIZE as u64,
            zeros: Vec::new(),
        }),
        journal_bytes: Some(65_536),
        ..options
    };
    let table = CreateOptions {
        has_table: true,
        unit_size: Some(65_536),
        journal_bytes: Some(65_536),
        ..plain.clone()
    };
    let zoned = |options| CreateOptions { has_zones: true, zone_size: Some(1 << 19), ..options };
    [
        ("linear", plain.clone()),
        ("linear-base", over(plain)),
        ("table", table.clone()),
        ("table-base", over(table.clone())),
        ("zoned", zoned(table.clone())),
        ("zoned-base", zoned(over(table))),
    ]
}

/// Some of them encrypted. The secret is `SECRET`.
pub fn encrypted_kinds() -> Vec<(&'static str, CreateOptions)> {
    let names = ["linear-encrypted", "linear-base-encrypted", "table-encrypted", "table-base-encrypted"];
    let names = names.into_iter().chain(["zoned-encrypted", "zoned-base-encrypted"]);
    let encrypted = |options| CreateOptions { encryption: Some(keys().0.clone()), ..options };
    names.zip(kinds()).map(|(name, (_, options))| (name, encrypted(options))).collect()
}

pub async fn open(storage: &Arc<MemoryStorage>, read_only: bool) -> Result<Arc<Native>> {
    open_with(storage, OpenOptions { read_only, ..OpenOptions::default() }).await
}

/// An image that names a flash cache is opened with it.
pub async fn open_with(storage: &Arc<MemoryStorage>, options: OpenOptions) -> Result<Arc<Native>> {
    let superblock = Superblocks::read(&**storage).await?.superblock;
    let has_base = superblock.base().is_some();
    let flash = options.flash.or(superblock.session().map(|session| session.cache));
    let options =
        OpenOptions { journal_key: Some(0x1234_5678), flash, cipher: Some(keys().1.clone()), ..options };
    Native::open(storage.clone(), has_base.then(base), options).await
}

/// What the disk of an image reads as.
pub fn content(storage: &Arc<MemoryStorage>) -> Vec<u8> {
    content_of(storage, None)
}

/// The same of a snapshot in it.
pub fn content_of(storage: &Arc<MemoryStorage>, snapshot: Option<&str>) -> Vec<u8> {
    block_on(async {
        let snapshot = snapshot.map(str::to_owned);
        let options = OpenOptions { read_only: true, snapshot, ..OpenOptions::default() };
        let disk = open_with(storage, options).await.expect("a closed image");
        let len = usize::try_from(disk.geometry().size).expect("a small disk");
        let bytes = disk.read(GuestOffset::ZERO, Buffer::for_overwrite(len)).await.expect("readable");
        disk.close().await.expect("closed");
        bytes.to_vec()
    })
}

/// An image that saw `operations` requests, drawn from the seed, and what its disk must read as. Discarded
/// bytes are written again.
pub fn used(
    options: &CreateOptions,
    seed: u64,
    operations: usize,
    is_closed: bool,
) -> (Arc<MemoryStorage>, Vec<u8>) {
    let mut random = Random::from_seed(seed);
    let storage = MemoryStorage::new("image");
    let mut model = vec![0; usize::try_from(SIZE).expect("a mebibyte")];
    if options.base.is_some() {
        model[..BASE_SIZE].copy_from_slice(&base_bytes());
    }
    block_on(async {
        create(&*storage, options).await.expect("an image");
        let disk = open(&storage, false).await.expect("a fresh image");
        for _ in 0..operations {
            let at = random.index(model.len());
            let most = if random.one_in(4) { 150_000 } else { 9000 };
            let len = (1 + random.index(most)).min(model.len() - at);
            let span = GuestOffset::new(at as u64).span(len as u64);
            let value = u8::try_from(1 + random.below(255)).expect("a byte");
            let done = match random.below(5) {
                0 => {
                    model[at..at + len].fill(0);
                    disk.write_zeroes(span, ZeroFlags { may_unmap: random.one_in(2), ..ZeroFlags::default() })
                        .await
                }
                1 => {
                    disk.discard(span, WriteFlags::default()).await.expect("discarded");
                    model[at..at + len].fill(value);
                    disk.write(span.start(), Buffer::copy_of(&model[at..at + len]), WriteFlags::default())
                        .await
                }
                _ => {
                    model[at..at + len].fill(value);
                    disk.write(span.start(), Buffer::copy_of(&model[at..at + len]), WriteFlags::default())
                        .await
                }
            };
            done.unwrap_or_else(|error| panic!("seed {seed}: {}", error.chain()));
            if random.one_in(3) {
                disk.flush().await.expect("flushed");
            }
        }
        disk.flush().await.expect("flushed");
        if is_closed {
            disk.close().await.expect("closed");
        }
    });
    (storage, model)
}

/// An image with packed blocks over its base: some that no record has, one that its neighbour's word has, one that was
/// recorded when another sub-block of its unit was written, one of a unit that was discarded since, and one that was
/// written again.
pub fn packed(options: &CreateOptions, is_closed: bool) -> Arc<MemoryStorage> {
    const UNIT: u64 = 65_536;
    let storage = MemoryStorage::new("image");
    block_on(async {
        create(&*storage, options).await.expect("an image");
        let disk = open(&storage, false).await.expect("a fresh image");
        let write = async |at: u64, len: usize, value: u8| {
            let data = Buffer::copy_of(&vec![value; len]);
            disk.write(GuestOffset::new(at), data, WriteFlags::FUA).await.expect("written");
        };
        write(SIZE - 512, 512, 0xE0).await; // a zone is opened
        for unit in 0..8 {
            write(unit * UNIT + unit * 4096, 4096, 0xE1).await;
        }
        write(8 * UNIT + 512, 512, 0xE2).await;
        write(3 * UNIT, 4096, 0xE3).await;
        write(4 * UNIT + 4 * 4096, 4096, 0xE4).await;
        let unit = GuestOffset::new(5 * UNIT).span(UNIT);
        disk.discard(unit, WriteFlags::default()).await.expect("discarded");
        write(5 * UNIT, 4096, 0xE5).await;
        if is_closed {
            disk.close().await.expect("closed");
        }
    });
    storage
}

/// An image with snapshots, made, deleted and gone back to between requests, and what its disk must read as.
pub fn snapped(options: &CreateOptions, seed: u64) -> (Arc<MemoryStorage>, Vec<u8>) {
    let mut random = Random::from_seed(seed);
    let (storage, mut model) = used(options, seed, 10, true);
    let mut kept: Vec<(String, Vec<u8>)> = Vec::new();
    block_on(async {
        let mut disk = open(&storage, false).await.expect("a sound image");
        for step in 0..30 {
            match random.below(8) {
                0 | 1 => {
                    disk.snapshot_create(&format!("s{step}"), step).await.expect("a snapshot");
                    kept.push((format!("s{step}"), model.clone()));
                }
                2 if kept.len() > 2 => {
                    let (name, _) = kept.swap_remove(random.index(kept.len()));
                    disk.snapshot_delete(&name).await.expect("deleted");
                }
                3 if !kept.is_empty() && random.one_in(2) => {
                    disk.close().await.expect("closed");
                    let (name, then) = &kept[random.index(kept.len())];
                    let alone =
                        OpenOptions { without_base: true, without_key: true, ..OpenOptions::default() };
                    revert(storage.clone(), None, alone, name).await.expect("gone back");
                    model.clone_from(then);
                    disk = open(&storage, false).await.expect("a sound image");
                }
                _ => {
                    let at = random.index(model.len());
                    let len = (1 + random.index(90_000)).min(model.len() - at);
                    model[at..at + len].fill(u8::try_from(1 + random.below(255)).expect("a byte"));
                    let data = Buffer::copy_of(&model[at..at + len]);
                    disk.write(GuestOffset::new(at as u64), data, WriteFlags::default())
                        .await
                        .expect("written");
                }
            }
        }
        disk.close().await.expect("closed");
    });
    (storage, model)
}

/// An image whose table has two parts, of which the first is used, with a snapshot.
pub fn grown(options: &CreateOptions, seed: u64, is_closed: bool) -> Arc<MemoryStorage> {
    const PAST: u64 = (65 << 20) + 512;
    // Superblocks, partial units, list of snapshots; a page of table, and one of zones.
    let zones = if options.has_zones { 4096 } else { 0 };
    let journal_bytes = Some((1 << 20) - (8192 + 8192 + 524_288) - 4096 - zones);
    let (storage, _) = used(&CreateOptions { journal_bytes, ..options.clone() }, seed, 20, true);
    let shared: SharedStorage = storage.clone();
    block_on(async {
        resize(&shared, 80 << 20, false).await.expect("larger");
        resize(&shared, 2 << 30, false).await.expect("larger");
        let write = async |disk: &Native, value: u8, places: &[u64]| {
            for at in places {
                let data = Buffer::copy_of(&[value; 6000]);
                disk.write(GuestOffset::new(*at), data, WriteFlags::default()).await.expect("written");
            }
            disk.flush().await.expect("flushed");
        };
        let disk = open(&storage, false).await.expect("a sound image");
        write(&disk, 1, &[0, 66 << 20, 1 << 30, (2 << 30) - 6000]).await;
        disk.close().await.expect("closed");
        resize(&shared, PAST, true).await.expect("smaller");
        let disk = open(&storage, false).await.expect("a sound image");
        write(&disk, 2, &[100_000, 64 << 20, PAST - 6000]).await;
        disk.snapshot_create("past", 1).await.expect("a snapshot");
        write(&disk, 3, &[(64 << 20) + 1000, 200_000]).await;
        if is_closed {
            disk.close().await.expect("closed");
        }
    });
    storage
}

/// An image that was left while one of its snapshots was being deleted.
pub fn half_deleted(options: &CreateOptions, seed: u64) -> Arc<MemoryStorage> {
    let (storage, _) = used(options, seed, 40, true);
    block_on(async {
        let disk = open(&storage, false).await.expect("a sound image");
        for value in 1..=3 {
            disk.snapshot_create(&format!("s{value}"), value).await.expect("a snapshot");
            for at in (0..SIZE - 512).step_by(131_072) {
                let data = Buffer::copy_of(&[u8::try_from(value).expect("small"); 4096]);
                disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.expect("written");
            }
        }
        disk.flush().await.expect("flushed");
        let mut deleting = std::pin::pin!(disk.snapshot_delete("s2"));
        assert!(poll_once(&mut deleting).await.is_none(), "it has several steps");
    });
    storage
}

/// What our own check comes to, as an exit code.
pub fn own_code(bytes: &[u8]) -> (i32, Vec<String>) {
    let storage: SharedStorage = MemoryStorage::holding("image", bytes);
    let mut lines = Vec::new();
    let code = match block_on(check(&storage, Repair::Nothing, &mut |line| lines.push(line))) {
        Err(error) => {
            lines.push(error.chain());
            1
        }
        Ok(report) if report.corruptions > 0 => 2,
        Ok(report) if report.leaks > 0 => 3,
        Ok(_) => 0,
    };
    (code, lines)
}

/// A directory that goes with the test.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vellum-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    pub fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).expect("a file");
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The other checker, if it can be run here.
#[allow(clippy::print_stderr, reason = "a test that is skipped says why")]
pub fn other_checker() -> Option<Command> {
    let mut command = Command::new("python3");
    if !command.arg("--version").output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: python3 is not installed");
        return None;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check-native.py");
    let mut command = Command::new("python3");
    command.arg(script);
    Some(command)
}

/// What the other checker says of several images: its exit code for each, and all that it printed.
pub fn other_codes(paths: &[PathBuf]) -> Option<(Vec<i32>, String)> {
    let output = other_checker()?.args(paths).output().expect("it was there a moment ago");
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    let text = format!("{out}{}", String::from_utf8_lossy(&output.stderr));
    let code_of = |path: &PathBuf| {
        let prefix = format!("{}: ", path.display());
        let line = out.lines().find_map(|line| line.strip_prefix(&prefix));
        line.and_then(|code| code.parse().ok())
            .unwrap_or_else(|| panic!("no answer for {}: {text}", path.display()))
    };
    Some((paths.iter().map(code_of).collect(), text))
}

/// The SHA-256 of the disk's bytes, or of a snapshot's, by the other checker.
pub fn other_hash(image: &Path, base: Option<&Path>, snapshot: Option<&str>) -> Option<String> {
    let mut command = other_checker()?;
    let secret = image.with_extension("secret");
    std::fs::write(&secret, SECRET).expect("a file");
    command.arg("--secret").arg(&secret);
    if let Some(snapshot) = snapshot {
        command.args(["--snapshot", snapshot]);
    }
    let output = command.arg("--sha256").arg(image).args(base).output().expect("as above");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
