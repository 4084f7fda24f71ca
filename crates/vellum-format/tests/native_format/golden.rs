//! Images that were made once, and must open forever with the same bytes.
//!
//! `tests/golden/` has each of them, compressed with zstd, and `hashes.txt`: name, CRC32C and SHA-256 of the
//! disk, or of a snapshot (`NAME@SNAPSHOT`). With `VELLUM_GOLDEN=write` in the environment missing images are
//! made; an existing one is never made again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::pin::Pin;
use vellum_core::{Buffer, Disk, GuestOffset, MemoryStorage, Random, SharedStorage, WriteFlags};
use vellum_format::FormatKind;
use vellum_format::fast::{FastId, FastMedium, NewRow, Promotion, Reason, Tiers, create as create_fast};
use vellum_format::handover::{Handover, MoveNumber};
use vellum_format::image::Head;
use vellum_format::native::snapshots::snapshots;
use vellum_format::native::{OpenOptions, Superblocks, recover};
use vellum_format::session::{CacheId, Session, SessionNumber, SessionState, Sessions};

use super::samples::{
    Dir, base_bytes, content, content_of, encrypted_kinds, grown, half_deleted, kinds, open, open_with,
    other_hash, own_code, packed, snapped, used,
};

pub fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// What there is to be: the four kinds, closed and not, and one with a damaged superblock.
fn images() -> Vec<(String, Vec<u8>)> {
    let mut images = Vec::new();
    for (seed, (name, options)) in (11..).zip(kinds()) {
        let (closed, _) = used(&options, seed, 40, true);
        images.push((name.to_owned(), closed.content().to_vec()));
        let (open, _) = used(&options, seed + 10, 40, false);
        images.push((format!("{name}-not-closed"), open.content().to_vec()));
    }
    let (_, mut damaged) = images[6].clone();
    damaged[..4096].fill(0xEE);
    images.push(("damaged-superblock".to_owned(), damaged));
    for (seed, (name, options)) in (31..).zip(kinds()).filter(|(_, (_, options))| options.has_table) {
        let (snapped, _) = snapped(&options, seed);
        images.push((format!("{name}-snapshots"), snapped.content().to_vec()));
        let half = half_deleted(&options, seed);
        images.push((format!("{name}-half-deleted"), half.content().to_vec()));
    }
    for (seed, (name, options)) in
        (51..).zip(kinds()).filter(|(_, (name, _))| ["table", "zoned"].contains(name))
    {
        images.push((format!("{name}-parts"), grown(&options, seed, true).content().to_vec()));
        images.push((format!("{name}-parts-not-closed"), grown(&options, seed, false).content().to_vec()));
    }
    for (seed, (name, options)) in (71..).zip(kinds()).filter(|(_, (name, _))| name.ends_with("-base")) {
        let (image, _) = used(&options, seed, 40, true);
        let shared: SharedStorage = image.clone();
        let pin = Pin::parse(PIN).expect("a pin");
        block_on(FormatKind::Native.format().set_pin(&shared, &pin)).expect("it is recorded");
        images.push((format!("{name}-pinned"), image.content().to_vec()));
    }
    for (name, options) in kinds().into_iter().filter(|(name, _)| *name == "table") {
        let (image, _) = used(&options, 81, 40, true);
        let shared: SharedStorage = image.clone();
        let moved = Some(Handover::Moved(number()));
        block_on(FormatKind::Native.format().set_handover(&shared, moved)).expect("it is recorded");
        images.push((format!("{name}-moved"), image.content().to_vec()));
    }
    for (seed, (name, options)) in (101..).zip(kinds()) {
        let (image, _) = used(&options, seed, 40, true);
        if ["linear", "table-base"].contains(&name) {
            images.push((format!("{name}-session"), with_session(&image, false)));
        }
        if ["linear-base", "zoned"].contains(&name) {
            images.push((format!("{name}-behind"), with_session(&image, true)));
        }
    }
    for (name, options) in kinds().into_iter().filter(|(name, _)| *name == "zoned-base") {
        images.push((format!("{name}-packed"), packed(&options, true).content().to_vec()));
        images.push((format!("{name}-packed-not-closed"), packed(&options, false).content().to_vec()));
    }
    for (seed, (name, options)) in (91..).zip(kinds()).filter(|(_, (_, options))| options.has_table) {
        let (image, _) = snapped(&options, seed);
        images.push((format!("{name}-cloned"), cloned(&image).content().to_vec()));
    }
    for (seed, (name, options)) in
        (121..).zip(kinds()).filter(|(_, (name, _))| ["table", "zoned-base"].contains(name))
    {
        let (image, _) = used(&options, seed, 40, true);
        images.push((format!("{name}-fast"), with_fast(&image, true).0));
        let (image, _) = used(&options, seed, 40, true);
        images.push((format!("{name}-fast-not-closed"), with_fast(&image, false).0));
    }
    for (seed, (name, options)) in (141..).zip(encrypted_kinds()) {
        if ["linear-base-encrypted", "table-base-encrypted"].contains(&name) {
            // Little of it is compressed here.
            let (image, _) = used(&options, seed, 6, true);
            images.push((name.to_owned(), image.content().to_vec()));
            let (image, _) = used(&options, seed + 10, 6, false);
            images.push((format!("{name}-not-closed"), image.content().to_vec()));
        }
    }
    images
}

pub fn fast_id() -> FastId {
    FastId::new(*b"golden fast one!").expect("it is not zero")
}

/// The image, with all of its units on a fast medium but one, which was written since; and the medium.
pub fn with_fast(image: &Arc<MemoryStorage>, closes: bool) -> (Vec<u8>, Vec<u8>) {
    let medium = MemoryStorage::new("fast");
    block_on(async {
        let shared: SharedStorage = image.clone();
        let fast: SharedStorage = medium.clone();
        create_fast(&fast, 64 << 20, fast_id()).await.expect("it is made");
        let medium = FastMedium::open(fast, Random::from_seed(1)).await.expect("it opens");
        let uuid = FormatKind::Native.format().read(&*shared).await.expect("a superblock").uuid();
        let row = NewRow { uuid: uuid.expect("it has one"), budget: u64::MAX, name: "golden".to_owned() };
        medium.attach(row).await.expect("it has room");
        FormatKind::Native.format().attach_fast(&shared, fast_id(), "/fast").await.expect("it has room, too");
        let options = OpenOptions { fast: Some(medium), ..OpenOptions::default() };
        let disk = open_with(image, options).await.expect("a sound image");
        let size = disk.geometry().size;
        let ranges = vec![GuestOffset::ZERO.span(size)];
        let promotion = Promotion { ranges, reason: Reason::Asked, copies_base: true };
        assert!(disk.promote(promotion).await.expect("it is promoted").units > 1);
        let data = Buffer::copy_of(&[0xFA; 8192]);
        disk.write(GuestOffset::ZERO, data, WriteFlags::FUA).await.expect("written");
        if closes {
            disk.close().await.expect("closed");
        }
    });
    (image.content().to_vec(), medium.content().to_vec())
}

fn session(name: &str) -> Option<Session> {
    let state = match name.rsplit('-').next() {
        Some("session") => SessionState::Clean,
        Some("behind") => SessionState::HoldsWrites,
        _ => return None,
    };
    let (cache, number) = (CacheId::new(*b"golden flash one"), SessionNumber::new(*b"golden session 1"));
    Some(Session { cache: cache.expect("not zero"), number: number.expect("not zero"), state })
}

/// The image, opened with a flash cache.
fn with_session(image: &Arc<MemoryStorage>, holds_writes: bool) -> Vec<u8> {
    let session = session(if holds_writes { "behind" } else { "session" }).expect("one of those");
    let options = OpenOptions { flash: Some(session.cache), ..OpenOptions::default() };
    block_on(async {
        let disk = open_with(image, options).await.expect("a sound image");
        disk.begin(session.number, holds_writes).await.expect("it is recorded");
        let data = Buffer::copy_of(&[0xC8; 8192]);
        disk.write(GuestOffset::new(70_000), data, WriteFlags::FUA).await.expect("written");
        disk.close().await.expect("closed");
    });
    image.content().to_vec()
}

fn number() -> MoveNumber {
    MoveNumber::new(*b"golden migration").expect("it is not zero")
}

/// Clones stand on the first of its snapshots.
fn cloned(image: &Arc<MemoryStorage>) -> &Arc<MemoryStorage> {
    let shared: SharedStorage = image.clone();
    block_on(async {
        let first = snapshots(&shared).await.expect("a list of snapshots").remove(0).name;
        let disk = open(image, false).await.expect("a sound image");
        assert!(disk.snapshot_mark_cloned(&first).await.expect("it is marked").is_cloned);
        disk.close().await.expect("closed");
    });
    image
}

const PIN: &str =
    "etag 700000 \"9b2cf535f27731c974343645a3985328-17\"\nfile 700000 131077@1764042000000000000";

/// Whether an earlier program refuses the image, because it would not find what packed blocks say of the base.
fn packs_over_base(image: &[u8]) -> bool {
    let newest = |at: &usize| u64::from_be_bytes(image[at + 16..at + 24].try_into().expect("eight bytes"));
    let copies = [0, 4096].into_iter().filter(|at| image[*at..].starts_with(b"VELLUMv1"));
    let at = copies.max_by_key(newest).expect("a superblock");
    u64::from_be_bytes(image[at + 40..at + 48].try_into().expect("eight bytes")) >> 12 & 1 == 1
}

/// Nothing for the disk, and all snapshots.
fn views(image: &[u8]) -> Vec<Option<String>> {
    let image: SharedStorage = MemoryStorage::holding("image", image);
    let all = block_on(snapshots(&image)).expect("a list of snapshots");
    [None].into_iter().chain(all.into_iter().map(|snapshot| Some(snapshot.name))).collect()
}

/// What the disk reads as, once its journal is replayed if it must be.
fn disk_of(image: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let storage = MemoryStorage::holding("image", image);
    let shared: SharedStorage = storage.clone();
    block_on(recover(&shared)).expect("a golden image is recovered");
    assert!(!block_on(Superblocks::read(&*storage)).expect("a superblock").superblock.needs_replay());
    (content(&storage), storage.content().to_vec())
}

#[test]
fn golden_images_open_for_ever() {
    if std::env::var("VELLUM_GOLDEN").is_ok_and(|value| value == "write") {
        write_missing();
    }
    let dir = Dir::new("native-golden");
    let base = dir.put("base.raw", &base_bytes());
    let list = std::fs::read_to_string(directory().join("hashes.txt")).expect("the list of golden images");
    assert!(list.lines().count() >= 9, "{list}");
    for line in list.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [what, crc, hash] = words[..] else { panic!("{line}") };
        let (name, snapshot) =
            what.split_once('@').map_or((what, None), |(name, snapshot)| (name, Some(snapshot)));
        let packed = std::fs::read(directory().join(format!("{name}.vlm.zst"))).expect("a golden image");
        // The material of a key alone has 125 KiB.
        let most = if name.contains("-encrypted") { 500 << 10 } else { 50 << 10 };
        assert!(packed.len() <= most, "{name}: {} bytes", packed.len());
        let image = zstd::decode_all(&packed[..]).expect("it is packed by zstd");
        assert_eq!(packs_over_base(&image), name.ends_with("-packed-not-closed"), "{name}");
        let (mut disk, recovered) = disk_of(&image);
        assert!(!packs_over_base(&recovered), "{name}");
        let recorded = block_on(Superblocks::read(&*MemoryStorage::holding("image", &recovered)));
        let recorded = recorded.expect("a superblock");
        let moved = Some(Handover::Moved(number())).filter(|_| name.ends_with("-moved"));
        assert_eq!(recorded.handover(), moved, "{name}");
        assert_eq!(Head::session(&recorded), session(name), "{name}");
        assert_eq!(recorded.is_encrypted(), name.contains("-encrypted"), "{name}");
        let fast = Head::fast(&recorded).map(|fast| (fast.id, fast.counts));
        let expected = name.contains("-fast").then(|| (fast_id(), true));
        assert_eq!(fast, expected, "{name}");
        let pin = recorded.superblock.pin().map(ToString::to_string);
        assert_eq!(pin.as_deref(), Some(PIN).filter(|_| name.ends_with("-pinned")), "{name}");
        if snapshot.is_some() {
            disk = content_of(&MemoryStorage::holding("image", &recovered), snapshot);
        }
        assert_eq!(format!("{:08x}", crc32c::crc32c(&disk)), crc, "{what} reads as something else");
        let opened: SharedStorage = MemoryStorage::holding("image", &recovered);
        let marked = block_on(snapshots(&opened)).expect("a list of snapshots");
        let has_clones = marked.iter().any(|snapshot| snapshot.is_cloned);
        assert_eq!(has_clones, name.ends_with("-cloned"), "{name}: clones stand on it");
        let (code, lines) = own_code(&recovered);
        assert_eq!(code, 0, "{name}: {lines:#?}");
        let path = dir.put("image.vlm", &recovered);
        if let Some(other) = other_hash(&path, Some(&base), snapshot) {
            assert_eq!(other, hash, "{what}, as the other checker reads it");
        }
    }
    let of_snapshots = list.lines().filter(|line| line.contains('@')).count();
    assert!(of_snapshots >= 8, "{list}");
}

fn write_missing() {
    let dir = Dir::new("native-golden-new");
    let base = dir.put("base.raw", &base_bytes());
    std::fs::create_dir_all(directory()).expect("a directory");
    let list = directory().join("hashes.txt");
    let mut lines = std::fs::read_to_string(&list).unwrap_or_default();
    for (name, image) in images() {
        let path = directory().join(format!("{name}.vlm.zst"));
        if path.exists() {
            continue;
        }
        let (_, recovered) = disk_of(&image);
        let file = dir.put("image.vlm", &recovered);
        for view in views(&recovered) {
            let view = view.as_deref();
            let disk = content_of(&MemoryStorage::holding("image", &recovered), view);
            let hash = other_hash(&file, Some(&base), view).expect("this needs python3");
            let what = view.map_or(name.clone(), |snapshot| format!("{name}@{snapshot}"));
            lines += &format!("{what} {:08x} {hash}\n", crc32c::crc32c(&disk));
        }
        std::fs::write(&path, zstd::encode_all(&image[..], 19).expect("packed")).expect("written");
    }
    std::fs::write(list, lines).expect("written");
}

#[test]
fn what_is_made_today_has_the_same_layout() {
    for (name, image) in images() {
        let packed = std::fs::read(directory().join(format!("{name}.vlm.zst"))).expect("a golden image");
        let golden = zstd::decode_all(&packed[..]).expect("it is packed by zstd");
        let places = |bytes: &[u8]| {
            let found = Superblocks::choose(&bytes[..8192]).expect("a superblock");
            (found.superblock.places(), found.superblock.base().cloned())
        };
        assert_eq!(places(&image), places(&golden), "{name}");
    }
}
