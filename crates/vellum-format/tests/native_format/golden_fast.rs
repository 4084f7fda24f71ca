//! A fast medium that was made once, with its image: what it has of the disk must be read for ever.
//!
//! `tests/golden/` has both, compressed with zstd, and `fast-medium.txt`: the units, and the CRC32C of the disk. With
//! `VELLUM_GOLDEN=write` in the environment they are made where they are missing.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{Buffer, Disk, GuestOffset, MemoryStorage, Random, SharedStorage, WriteFlags};
use vellum_format::fast::{FastMedium, Tiers};
use vellum_format::native::OpenOptions;

use super::golden::{directory, fast_id, with_fast};
use super::samples::{Dir, base_bytes, content, kinds, open_with, other_checker, used};

/// The images, each with its medium.
const PAIRS: [&str; 2] = ["table", "zoned-base"];

fn unpacked(name: &str) -> Arc<MemoryStorage> {
    let packed = std::fs::read(directory().join(name)).expect("a golden file");
    assert!(packed.len() <= 50 << 10, "{name}: {} bytes", packed.len());
    MemoryStorage::holding(name, &zstd::decode_all(&packed[..]).expect("it is packed by zstd"))
}

fn write_missing() {
    let list = directory().join("fast-medium.txt");
    let mut lines = std::fs::read_to_string(&list).unwrap_or_default();
    for (seed, (name, options)) in (141..).zip(kinds()).filter(|(_, (name, _))| PAIRS.contains(name)) {
        let at = directory().join(format!("{name}-with-medium.vlm.zst"));
        if at.exists() {
            continue;
        }
        let (image, _) = used(&options, seed, 40, true);
        let (bytes, medium) = with_fast(&image, true);
        let pack = |bytes: &[u8]| zstd::encode_all(bytes, 19).expect("packed");
        std::fs::write(at, pack(&bytes)).expect("written");
        std::fs::write(directory().join(format!("{name}-medium.fast.zst")), pack(&medium)).expect("written");
        let units = block_on(units_of(&image, MemoryStorage::holding("medium", &medium)));
        lines += &format!("{name} {units} {:08x}\n", crc32c::crc32c(&content(&image)));
    }
    std::fs::write(list, lines).expect("written");
}

async fn units_of(image: &Arc<MemoryStorage>, medium: SharedStorage) -> u64 {
    let fast = Some(FastMedium::open(medium, Random::from_seed(1)).await.expect("it opens"));
    let options = OpenOptions { fast, read_only: true, ..OpenOptions::default() };
    open_with(image, options).await.expect("a sound image").facts().units
}

/// What the other program says of them.
fn other(medium: &Path, image: &Path, base: &Path) -> Option<(Option<i32>, String)> {
    other_checker()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check-fast.py");
    let output = Command::new("python3").arg(script).args([medium, image, base]).output().expect("as above");
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    Some((output.status.code(), text))
}

#[test]
fn a_golden_medium_is_read_for_ever() {
    if std::env::var("VELLUM_GOLDEN").is_ok_and(|value| value == "write") {
        write_missing();
    }
    let dir = Dir::new("golden-fast");
    let base = dir.put("base.raw", &base_bytes());
    let list = std::fs::read_to_string(directory().join("fast-medium.txt")).expect("the list");
    assert_eq!(list.lines().count(), PAIRS.len(), "{list}");
    for line in list.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, units, crc] = words[..] else { panic!("{line}") };
        let units: u64 = units.parse().expect(line);
        assert!(units > 1, "{line}");
        let image = unpacked(&format!("{name}-with-medium.vlm.zst"));
        let medium = unpacked(&format!("{name}-medium.fast.zst"));
        let (image_bytes, medium_bytes) = (image.content().to_vec(), medium.content().to_vec());
        assert_eq!(format!("{:08x}", crc32c::crc32c(&content(&image))), crc, "{name}: the image alone");
        block_on(async {
            let shared: SharedStorage = medium.clone();
            let fast = FastMedium::open(shared, Random::from_seed(2)).await.expect("it opens");
            assert_eq!(fast.id(), fast_id());
            let options = OpenOptions { fast: Some(fast), ..OpenOptions::default() };
            let disk = open_with(&image, options).await.expect("a sound image");
            assert_eq!(disk.facts().units, units, "{name}: {:?}", disk.facts().trouble);
            let len = usize::try_from(disk.geometry().size).expect("a small disk");
            let read = disk.read(GuestOffset::ZERO, Buffer::for_overwrite(len)).await.expect("it is read");
            assert_eq!(format!("{:08x}", crc32c::crc32c(&read.to_vec())), crc, "{name}: with the medium");
            assert!(disk.facts().fast_reads[1] > 0, "{name}: it was read from the medium");
            // And it is written and promoted as any other.
            let at = GuestOffset::new(disk.unit_bytes());
            disk.write(at, Buffer::copy_of(&[0x5B; 4096]), WriteFlags::FUA).await.expect("written");
            assert_eq!(disk.facts().units, units - 1, "{name}");
            disk.close().await.expect("closed");
        });
        let paths = [dir.put("medium", &medium_bytes), dir.put("image", &image_bytes)];
        if let Some((code, text)) = other(&paths[0], &paths[1], &base) {
            assert_eq!(code, Some(0), "{name}: {text}");
            assert!(text.contains(&format!("{units} units on the medium, 0 with")), "{name}: {text}");
            // A byte of a copy: the last one that is not zero.
            let mut damaged = medium_bytes.clone();
            let last = damaged.iter().rposition(|byte| *byte != 0).expect("copies");
            damaged[last] ^= 1;
            let at = dir.put("damaged", &damaged);
            let (code, text) = other(&at, &paths[1], &base).expect("as before");
            assert_eq!(code, Some(2), "{name}: {text}");
        }
    }
}

/// The same with all of their units moved that can be.
fn write_missing_moved() {
    let list = directory().join("units-alone.txt");
    let mut lines = std::fs::read_to_string(&list).unwrap_or_default();
    for name in PAIRS {
        let at = directory().join(format!("{name}-alone.vlm.zst"));
        if at.exists() {
            continue;
        }
        let image = unpacked(&format!("{name}-with-medium.vlm.zst"));
        let medium = unpacked(&format!("{name}-medium.fast.zst"));
        let crc = crc32c::crc32c(&content(&image));
        let moved = block_on(async {
            let shared: SharedStorage = medium.clone();
            let fast = Some(FastMedium::open(shared, Random::from_seed(3)).await.expect("it opens"));
            let disk = open_with(&image, OpenOptions { fast, ..OpenOptions::default() })
                .await
                .expect("a sound image");
            for snapshot in disk.snapshots().expect("a list") {
                disk.snapshot_delete(&snapshot.name).await.expect("deleted");
            }
            let all = [GuestOffset::ZERO.span(disk.geometry().size)];
            let moved = disk.move_away(&all).await.expect("moved").units;
            disk.close().await.expect("closed");
            moved
        });
        let pack =
            |storage: &MemoryStorage| zstd::encode_all(&storage.content().to_vec()[..], 19).expect("packed");
        std::fs::write(at, pack(&image)).expect("written");
        std::fs::write(directory().join(format!("{name}-alone.fast.zst")), pack(&medium)).expect("written");
        lines += &format!("{name} {moved} {crc:08x}\n");
    }
    std::fs::write(list, lines).expect("written");
}

#[test]
fn golden_moved_units_are_read_for_ever() {
    if std::env::var("VELLUM_GOLDEN").is_ok_and(|value| value == "write") {
        write_missing_moved();
    }
    let dir = Dir::new("golden-moved");
    let base = dir.put("base.raw", &base_bytes());
    let list = std::fs::read_to_string(directory().join("units-alone.txt")).expect("the list");
    assert_eq!(list.lines().count(), PAIRS.len(), "{list}");
    for line in list.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [name, units, crc] = words[..] else { panic!("{line}") };
        let units: u64 = units.parse().expect(line);
        assert!(units > 1, "{line}");
        let image = unpacked(&format!("{name}-alone.vlm.zst"));
        let medium = unpacked(&format!("{name}-alone.fast.zst"));
        let paths =
            [dir.put("medium", &medium.content().to_vec()), dir.put("image", &image.content().to_vec())];
        block_on(async {
            let alone = open_with(&image, OpenOptions { read_only: true, ..OpenOptions::default() }).await;
            assert_eq!(alone.err().expect("refused").kind(), vellum_core::ErrorKind::Refused, "{name}");
            let shared: SharedStorage = medium.clone();
            let fast = FastMedium::open(shared, Random::from_seed(2)).await.expect("it opens");
            let options = OpenOptions { fast: Some(fast), ..OpenOptions::default() };
            let disk = open_with(&image, options).await.expect("a sound image");
            assert_eq!(disk.facts().moved, units, "{name}");
            let len = usize::try_from(disk.geometry().size).expect("a small disk");
            let read = disk.read(GuestOffset::ZERO, Buffer::for_overwrite(len)).await.expect("it is read");
            assert_eq!(format!("{:08x}", crc32c::crc32c(&read.to_vec())), crc, "{name}");
            disk.close().await.expect("closed");
        });
        if let Some((code, text)) = other(&paths[0], &paths[1], &base) {
            assert_eq!(code, Some(0), "{name}: {text}");
            assert!(text.contains(&format!("{units} there alone")), "{name}: {text}");
        }
    }
}
