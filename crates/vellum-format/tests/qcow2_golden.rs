//! qcow2 images that were made once, and must open forever with the same bytes: closed, not closed, with a
//! journal that must be replayed.
//!
//! `tests/golden/` has each of them, compressed with zstd, and `qcow2-hashes.txt`: name, CRC32C and SHA-256
//! of the disk. With `VELLUM_GOLDEN=write` in the environment missing images are made; an existing one is
//! never made again. Where QEMU is installed it also checks what is recovered from each.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::pin::Pin;
use vellum_core::{
    Buffer, Disk, GuestOffset, MemoryDisk, MemoryStorage, Random, SharedDisk, SharedStorage, WriteFlags,
    ZeroFlags,
};
use vellum_format::FormatKind;
use vellum_format::handover::{Handover, MoveNumber};
use vellum_format::image::BitmapChange;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create, recover};
use vellum_format::session::{CacheId, Session, SessionNumber, SessionState, Sessions};

use common::look;

const SIZE: u64 = 1 << 20;
const BASE_SIZE: usize = 300_000;
/// What the last write of an image writes whose newest record is not to hold.
const LOST: [u8; 4096] = [0xC7; 4096];

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// No block of it is like another, and none is zero.
fn base_bytes() -> Vec<u8> {
    (0..BASE_SIZE).map(|at| u8::try_from(at / 4096 % 251 + 1).expect("small")).collect()
}

fn kinds() -> [(&'static str, CreateOptions); 6] {
    let plain = CreateOptions { size: SIZE, cluster_size: 4096, ..CreateOptions::without_journal() };
    let backing = Some(("base.raw".to_owned(), Some("raw".to_owned())));
    let journal = CreateOptions { journal: Some(64 << 10), ..plain.clone() };
    [
        ("plain", plain.clone()),
        ("version-2", CreateOptions { version: 2, ..plain }),
        ("journal", journal.clone()),
        ("journal-base", CreateOptions { backing, cluster_size: 512, ..journal.clone() }),
        (
            "journal-wide-refcounts",
            CreateOptions { refcount_bits: 64, cluster_size: 1024, ..journal.clone() },
        ),
        (
            "journal-subclusters",
            CreateOptions { extended_l2: true, cluster_size: 16_384, journal: Some(128 << 10), ..journal },
        ),
    ]
}

async fn open(image: &Arc<MemoryStorage>, read_only: bool) -> Arc<Qcow2> {
    let image: SharedStorage = image.clone();
    let header = Header::read(&*image).await.expect("a header");
    let below = header.backing_file().map(|_| MemoryDisk::holding(&base_bytes()) as SharedDisk);
    let flash = header.session().map(|session| session.cache);
    let options = OpenOptions { read_only, flash, journal_key: Some(0x1234_5678), ..OpenOptions::default() };
    Qcow2::open(header, Files { image, data_file: None, below }, options).await.expect("a sound image")
}

/// What the disk reads as; the image must have been closed, or recovered.
fn disk_of(image: &[u8]) -> Vec<u8> {
    block_on(async {
        let disk = open(&MemoryStorage::holding("image", image), true).await;
        let len = usize::try_from(disk.geometry().size).expect("a small disk");
        disk.read(GuestOffset::ZERO, Buffer::for_overwrite(len)).await.expect("readable").to_vec()
    })
}

/// An image that saw forty requests, drawn from the seed, and then one more.
fn used(options: &CreateOptions, seed: u64, is_closed: bool) -> Vec<u8> {
    let mut random = Random::from_seed(seed);
    let image = MemoryStorage::new("image");
    block_on(async {
        create(&*image, None, options).await.expect("an image");
        let disk = open(&image, false).await;
        for _ in 0..40 {
            let at = random.below(SIZE);
            let most = if random.one_in(4) { 60_000 } else { 5000 };
            let len = (1 + random.below(most)).min(SIZE - at);
            let span = GuestOffset::new(at).span(len);
            let done = match random.below(6) {
                0 => {
                    let flags = ZeroFlags { may_unmap: random.one_in(2), ..ZeroFlags::default() };
                    disk.write_zeroes(span, flags).await
                }
                1 => disk.discard(span, WriteFlags::default()).await,
                _ => {
                    let value = u8::try_from(1 + random.below(190)).expect("a byte");
                    let data = Buffer::copy_of(&vec![value; usize::try_from(len).expect("small")]);
                    disk.write(span.start(), data, WriteFlags::default()).await
                }
            };
            done.expect("done");
            if random.one_in(3) {
                disk.flush().await.expect("flushed");
            }
        }
        disk.flush().await.expect("flushed");
        if is_closed {
            disk.close().await.expect("closed");
        } else {
            let flags = WriteFlags::default();
            // Where there is no data yet: the write gets a cluster, and the record of it has the checksum of
            // its data.
            disk.discard(GuestOffset::new(SIZE / 2).span(65_536), flags).await.expect("discarded");
            disk.flush().await.expect("flushed");
            disk.write(GuestOffset::new(SIZE / 2), Buffer::copy_of(&LOST), flags).await.expect("written");
            disk.flush().await.expect("flushed");
        }
    });
    image.content().to_vec()
}

/// The image whose last write never reached the medium, although its record did.
fn without_the_last_write(image: &[u8]) -> Vec<u8> {
    let mut image = image.to_vec();
    let mut lost = 0;
    for sector in image.chunks_exact_mut(512).filter(|sector| **sector == LOST[..512]) {
        sector.fill(0);
        lost += 1;
    }
    assert_eq!(lost, LOST.len() / 512, "the bytes are there once");
    image
}

fn images() -> Vec<(String, Vec<u8>)> {
    let mut images = Vec::new();
    for (seed, (name, options)) in (51..).zip(kinds()) {
        images.push((name.to_owned(), used(&options, seed, true)));
        let open = used(&options, seed + 10, false);
        images.push((format!("{name}-not-closed"), open.clone()));
        if name == "journal" {
            images.push((format!("{name}-left-out"), without_the_last_write(&open)));
        }
    }
    let backing = Some(("base.raw".to_owned(), Some("raw".to_owned())));
    let plain = CreateOptions { size: SIZE, cluster_size: 4096, backing, ..CreateOptions::default() };
    for (name, version) in [("pinned", 3), ("version-2-pinned", 2)] {
        let image = used(&CreateOptions { version, journal: None, ..plain.clone() }, 71, true);
        let storage = MemoryStorage::holding("image", &image);
        let shared: SharedStorage = storage.clone();
        let pin = Pin::parse(PIN).expect("a pin");
        block_on(FormatKind::Qcow2.format().set_pin(&shared, &pin)).expect("it is recorded");
        images.push((name.to_owned(), storage.content().to_vec()));
    }
    let storage = MemoryStorage::holding("image", &used(&kinds()[2].1, 72, true));
    let shared: SharedStorage = storage.clone();
    let moved = Some(Handover::Moved(number()));
    block_on(FormatKind::Qcow2.format().set_handover(&shared, moved)).expect("it is recorded");
    images.push(("moved".to_owned(), storage.content().to_vec()));
    for (name, seed, is_closed, holds_writes) in [
        ("session", 73, true, false),
        ("session-behind", 74, true, true),
        ("session-behind-not-closed", 75, false, true),
    ] {
        images.push((name.to_owned(), with_session(&kinds()[2].1, seed, is_closed, holds_writes)));
    }
    images.push(("bitmaps".to_owned(), with_bitmaps(true)));
    images.push(("bitmaps-not-closed".to_owned(), with_bitmaps(false)));
    images.push(("qemu-bitmaps".to_owned(), with_bitmaps_of_qemu()));
    images
}

/// An image with bitmaps, that was written before and after one of them was disabled.
fn with_bitmaps(is_closed: bool) -> Vec<u8> {
    let storage = MemoryStorage::new("image");
    let image: SharedStorage = storage.clone();
    let bitmaps = FormatKind::Qcow2.format().closed_bitmaps().expect("qcow2 has bitmaps");
    let add = |granularity| BitmapChange::Add { granularity: Some(granularity) };
    block_on(async {
        create(&*storage, None, &kinds()[2].1).await.expect("an image");
        for (name, granularity) in [("fine", 512), ("coarse", 65_536), ("stopped", 4096)] {
            bitmaps.change(&image, name, &[add(granularity)]).await.expect("it is added");
        }
        for round in 0..2 {
            let mut random = Random::from_seed(81 + round);
            let disk = open(&storage, false).await;
            for _ in 0..12 {
                let (at, len) = (random.below(SIZE - 9000), 1 + random.below(9000));
                let data = Buffer::copy_of(&vec![7; usize::try_from(len).expect("small")]);
                disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.expect("written");
            }
            disk.flush().await.expect("flushed");
            if is_closed || round == 0 {
                disk.close().await.expect("closed");
            }
            if round == 0 {
                bitmaps.change(&image, "stopped", &[BitmapChange::Disable]).await.expect("it is disabled");
            }
        }
    });
    storage.content().to_vec()
}

/// Bitmaps that QEMU has made and kept up.
fn with_bitmaps_of_qemu() -> Vec<u8> {
    let file = scratch("bitmaps.qcow2");
    let image = file.to_str().expect("text");
    let run = |program: &str, words: &[&str]| {
        let ran = Command::new(program).args(words).arg(image).output().expect("this needs qemu-img");
        assert!(ran.status.success(), "{words:?}: {ran:?}");
    };
    let bitmap = |words: &[&str], name: &str| {
        let ran = Command::new("qemu-img").arg("bitmap").args(words).args([image, name]).output();
        assert!(ran.as_ref().is_ok_and(|ran| ran.status.success()), "{words:?}: {ran:?}");
    };
    let size = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4096,size=1M"];
    run("qemu-img", &size);
    for (name, granularity) in [("fine", "512"), ("coarse", "65536"), ("stopped", "4096")] {
        bitmap(&["--add", "-g", granularity], name);
    }
    run("qemu-io", &["-f", "qcow2", "-c", "write 10k 20k", "-c", "write -z 300k 4k"]);
    bitmap(&["--disable"], "stopped");
    run("qemu-io", &["-f", "qcow2", "-c", "write 700k 64k", "-c", "discard 64k 64k"]);
    std::fs::read(&file).expect("an image")
}

/// A line for each bitmap: its image, its name, what it is, and what is marked in it.
fn bitmaps_of(name: &str, image: &SharedStorage) -> String {
    let bitmaps = FormatKind::Qcow2.format().closed_bitmaps().expect("qcow2 has bitmaps");
    let mut lines = String::new();
    for bitmap in block_on(bitmaps.list(&**image)).expect("they can be read") {
        let bits = block_on(bitmaps.load(&**image, &bitmap.name)).expect("it can be relied on");
        let (mut runs, mut at) = (String::new(), GuestOffset::ZERO);
        while let Some(run) = bits.next_marked(at) {
            at = run.end();
            runs += &format!(" {}+{}", run.start(), run.len());
        }
        let kept_up = if bitmap.is_auto { "enabled" } else { "disabled" };
        lines += &format!("{name} {} {} {kept_up}{runs}\n", bitmap.name, bitmap.granularity);
    }
    lines
}

/// What the bitmaps of golden images say, once these are recovered.
#[test]
fn golden_bitmaps_say_the_same_for_ever() {
    if std::env::var("VELLUM_GOLDEN").is_ok_and(|value| value == "write") {
        write_missing();
    }
    let list = std::fs::read_to_string(directory().join("qcow2-bitmaps.txt")).expect("what they say");
    for name in ["bitmaps", "bitmaps-not-closed", "qemu-bitmaps"] {
        let packed = std::fs::read(directory().join(format!("{name}.qcow2.zst"))).expect("a golden image");
        let image = zstd::decode_all(&packed[..]).expect("it is packed by zstd");
        let image: SharedStorage = MemoryStorage::holding("image", &recovered(&image).0);
        let expected: Vec<&str> = list.lines().filter(|line| line.split(' ').next() == Some(name)).collect();
        assert_eq!(expected.len(), 3, "{name}: {list}");
        let found = bitmaps_of(name, &image);
        assert_eq!(found.lines().collect::<Vec<_>>(), expected, "{name}");
    }
}

fn session(name: &str) -> Option<Session> {
    let state = match name {
        "session" => SessionState::Clean,
        _ if name.starts_with("session-behind") => SessionState::HoldsWrites,
        _ => return None,
    };
    let (cache, number) = (CacheId::new(*b"golden flash one"), SessionNumber::new(*b"golden session 1"));
    Some(Session { cache: cache.expect("not zero"), number: number.expect("not zero"), state })
}

/// An image that was used, and then opened with a flash cache.
fn with_session(options: &CreateOptions, seed: u64, is_closed: bool, holds_writes: bool) -> Vec<u8> {
    let session = session(if holds_writes { "session-behind" } else { "session" }).expect("one of those");
    let storage = MemoryStorage::holding("image", &used(options, seed, true));
    let image: SharedStorage = storage.clone();
    block_on(async {
        let header = Header::read(&*image).await.expect("a header");
        let options = OpenOptions {
            flash: Some(session.cache),
            journal_key: Some(0x1234_5678),
            ..OpenOptions::default()
        };
        let files = Files { image, data_file: None, below: None };
        let disk = Qcow2::open(header, files, options).await.expect("a sound image");
        disk.begin(session.number, holds_writes).await.expect("it is recorded");
        disk.write(GuestOffset::new(70_000), Buffer::copy_of(&[0xC8; 8192]), WriteFlags::FUA)
            .await
            .expect("written");
        if is_closed {
            disk.close().await.expect("closed");
        }
    });
    storage.content().to_vec()
}

fn number() -> MoveNumber {
    MoveNumber::new(*b"golden migration").expect("it is not zero")
}

const PIN: &str =
    "etag 300000 \"9b2cf535f27731c974343645a3985328-17\"\nfile 300000 131077@1764042000000000000";

/// Makes the image whole. Tells what of the journal counted, where there was one.
fn recovered(image: &[u8]) -> (Vec<u8>, Option<vellum_format::report::Recovery>) {
    let storage = MemoryStorage::holding("image", image);
    let shared: SharedStorage = storage.clone();
    let recovery = block_on(async {
        let header = Header::read(&*shared).await.expect("a header");
        let replayed = match header.needs_replay() {
            true => Some(recover(&shared).await.expect("a golden image is recovered")),
            false => None,
        };
        // What has no journal is repaired by opening it. What has moved is only read.
        open(&storage, header.handover().is_some()).await.close().await.expect("closed");
        replayed
    });
    (storage.content().to_vec(), recovery)
}

fn sha256(bytes: &[u8], scratch: &Path) -> Option<String> {
    std::fs::write(scratch, bytes).expect("written");
    let output = Command::new("sha256sum").arg(scratch).output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).split_whitespace().next()?.to_owned())
}

fn scratch(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("qcow2-golden-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    dir.join(name)
}

#[test]
fn golden_images_open_for_ever() {
    if std::env::var("VELLUM_GOLDEN").is_ok_and(|value| value == "write") {
        write_missing();
    }
    std::fs::write(scratch("base.raw"), base_bytes()).expect("written");
    let list = std::fs::read_to_string(directory().join("qcow2-hashes.txt")).expect("the golden images");
    let mut replayed = 0;
    for line in list.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, crc, hash] = words[..] else { panic!("{line}") };
        let packed = std::fs::read(directory().join(format!("{name}.qcow2.zst"))).expect("a golden image");
        assert!(packed.len() <= 50 << 10, "{name}: {} bytes", packed.len());
        let image = zstd::decode_all(&packed[..]).expect("it is packed by zstd");
        let (image, recovery) = recovered(&image);
        let head = block_on(FormatKind::Qcow2.format().read(&*MemoryStorage::holding("image", &image)));
        let head = head.expect("a header");
        let moved = Some(Handover::Moved(number())).filter(|_| name == "moved");
        assert_eq!(head.handover(), moved, "{name}");
        assert_eq!(head.session(), session(name), "{name}");
        let pin = head.pin().map(ToString::to_string);
        assert_eq!(pin.as_deref(), Some(PIN).filter(|_| name.ends_with("pinned")), "{name}");
        let must_be_replayed =
            name.starts_with("journal") && name != "journal" && !kinds().iter().any(|kind| kind.0 == name)
                || ["session-behind-not-closed", "bitmaps-not-closed"].contains(&name);
        assert_eq!(recovery.is_some(), must_be_replayed, "{name}");
        if let Some(recovery) = recovery {
            replayed += 1;
            assert!(recovery.records > 0 && recovery.pages > 0, "{name}: {recovery:?}");
            assert_eq!(recovery.left_out, name.ends_with("left-out"), "{name}: {recovery:?}");
        }
        let disk = disk_of(&image);
        let is = (format!("{:08x}", crc32c::crc32c(&disk)), sha256(&disk, &scratch("disk.raw")));
        assert_eq!(is.0, crc, "{name} reads as something else");
        assert!(is.1.is_none_or(|is| is == hash), "{name} reads as something else");
        let shared: SharedStorage = MemoryStorage::holding("image", &image);
        let (report, lines) = block_on(look(&shared)).expect("it can be checked");
        assert!(report.check_errors == 0 && report.corruptions == 0, "{name}: {lines:#?}");
        assert!(report.leaks == 0 || name.starts_with("version-2"), "{name}: {lines:#?}");
        by_qemu(name, &image, &disk);
    }
    assert!(replayed >= 5, "{list}");
}

/// QEMU finds no errors in it and reads the same.
#[allow(clippy::print_stderr, reason = "that is where a test says what it leaves out")]
fn by_qemu(name: &str, image: &[u8], disk: &[u8]) {
    let (file, raw) = (scratch("image.qcow2"), scratch("qemu.raw"));
    std::fs::write(&file, image).expect("written");
    let qemu = |arguments: &[&str]| Command::new("qemu-img").args(arguments).arg(&file).output();
    let Ok(checked) = qemu(&["check", "-f", "qcow2"]) else {
        eprintln!("skipped: there is no qemu-img");
        return;
    };
    let refusal = match name {
        "moved" => Some("disk that migrates"),
        _ if name.starts_with("session-behind") => Some("vellum flash cache holds writes"),
        _ => None,
    };
    if let Some(words) = refusal {
        let said = String::from_utf8_lossy(&checked.stderr);
        assert!(!checked.status.success() && said.contains(words), "{name}: {checked:?}");
        return;
    }
    let is_sound =
        checked.status.success() || name.starts_with("version-2") && checked.status.code() == Some(3);
    assert!(is_sound, "{name}: {checked:?}");
    let converted = Command::new("qemu-img")
        .args(["convert", "-f", "qcow2", "-O", "raw"])
        .args([&file, &raw])
        .output()
        .expect("it was there just now");
    assert!(converted.status.success(), "{name}: {converted:?}");
    assert!(std::fs::read(&raw).expect("a copy") == disk, "{name}: QEMU reads something else");
}

fn write_missing() {
    let list = directory().join("qcow2-hashes.txt");
    let mut lines = std::fs::read_to_string(&list).unwrap_or_default();
    let bitmaps = directory().join("qcow2-bitmaps.txt");
    let mut marks = std::fs::read_to_string(&bitmaps).unwrap_or_default();
    for (name, image) in images() {
        let path = directory().join(format!("{name}.qcow2.zst"));
        if path.exists() {
            continue;
        }
        let whole = recovered(&image).0;
        marks += &bitmaps_of(&name, &(MemoryStorage::holding("image", &whole) as SharedStorage));
        let disk = disk_of(&whole);
        let hash = sha256(&disk, &scratch("disk.raw")).expect("this needs sha256sum");
        lines += &format!("{name} {:08x} {hash}\n", crc32c::crc32c(&disk));
        std::fs::write(&path, zstd::encode_all(&image[..], 19).expect("packed")).expect("written");
    }
    std::fs::write(list, lines).expect("written");
    std::fs::write(bitmaps, marks).expect("written");
}
