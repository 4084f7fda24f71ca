//! Two checkers that share nothing but the specification must agree on every image.

use std::path::PathBuf;

use vellum_core::{MemoryStorage, Random};
use vellum_format::native::parts::Part;
use vellum_format::native::{Places, Region, Superblocks};

use super::samples::{
    Dir, base_bytes, content, encrypted_kinds, grown, kinds, other_checker, other_codes, other_hash,
    own_code, snapped, used,
};

/// How much longer than usual random tests run: the soak sets it.
fn scale() -> u64 {
    std::env::var("VELLUM_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1)
}

#[test]
fn both_read_the_same_bytes() {
    let dir = Dir::new("native-bytes");
    let base = dir.put("base.raw", &base_bytes());
    for (name, options) in kinds().into_iter().chain(encrypted_kinds()) {
        for seed in 0..2 * scale() {
            let (storage, model) = used(&options, seed, 30, true);
            assert!(content(&storage) == model, "{name}, seed {seed}: it reads as something else");
            let image = dir.put("image.vlm", &storage.content().to_vec());
            let model = dir.put("model.raw", &model);
            let Some(hash) = other_hash(&image, Some(&base), None) else { return };
            assert_eq!(Some(hash), sha256(&model), "{name}, seed {seed}");
        }
    }
}

/// The hash of a file, by Python too: it is what the other checker is compared with.
fn sha256(path: &std::path::Path) -> Option<String> {
    let code = "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())";
    let output = std::process::Command::new("python3").args(["-c", code]).arg(path).output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[test]
fn both_say_the_same_of_sound_and_of_broken_images() {
    if other_checker().is_none() {
        return;
    }
    let dir = Dir::new("native-opinions");
    let mut counts = [0; 4];
    for (name, options) in kinds().into_iter().chain(encrypted_kinds()) {
        let (storage, _) = used(&options, 3, 30, true);
        let sound = storage.content().to_vec();
        let places =
            futures_lite::future::block_on(Superblocks::read(&*MemoryStorage::holding("image", &sound)))
                .expect("a sound image")
                .superblock
                .places();
        let (open, _) = used(&options, 4, 30, false);
        let mut images =
            vec![("sound".to_owned(), sound.clone()), ("not closed".to_owned(), open.content().to_vec())];
        for seed in 0..60 * scale() {
            images.push((format!("seed {seed}"), poked(&sound, &places, seed)));
        }
        let paths: Vec<PathBuf> = images
            .iter()
            .enumerate()
            .map(|(index, (_, bytes))| dir.put(&format!("{name}-{index}"), bytes))
            .collect();
        let Some((codes, text)) = other_codes(&paths) else { return };
        for (((what, bytes), code), path) in images.iter().zip(codes).zip(paths) {
            let (own, lines) = own_code(bytes);
            let said: Vec<&str> = text
                .split_inclusive('\n')
                .take_while(|line| !line.starts_with(path.to_str().unwrap_or("?")))
                .collect();
            let said = said[said.len().saturating_sub(5)..].concat();
            assert_eq!(own, code, "{name}, {what}: we say {lines:#?}, the other one {said}");
            counts[usize::try_from(own).expect("small")] += 1;
        }
    }
    // These three answers are there, or this would compare nothing.
    assert!(counts[..3].iter().all(|count| *count > 3), "{counts:?}");
}

#[test]
fn both_say_the_same_of_tables_with_parts() {
    if other_checker().is_none() {
        return;
    }
    let dir = Dir::new("native-parts");
    let mut counts = [0; 4];
    for (name, options) in kinds().into_iter().filter(|(name, _)| ["table", "zoned"].contains(name)) {
        let sound = grown(&options, 5, true).content().to_vec();
        let parts: Vec<Part> =
            Superblocks::choose(&sound).expect("sound").superblock.places().parts().collect();
        assert_eq!(parts.len(), 2, "{name}");
        let mut images = vec![sound.clone()];
        images.extend((0..30 * scale()).map(|seed| poked_parts(&sound, &parts, seed)));
        for (seed, bytes) in images.iter().enumerate() {
            let path = dir.put("image", bytes);
            let Some((codes, text)) = other_codes(&[path.clone(), path]) else { return };
            let (own, lines) = own_code(bytes);
            assert_eq!(own, codes[0], "{name}, {seed}: we say {lines:#?}, the other one {text}");
            counts[usize::try_from(own).expect("small")] += 1;
        }
    }
    assert!(counts[..3].iter().all(|count| *count > 1), "{counts:?}");
}

/// The image with something else in the places of its parts, or in them.
fn poked_parts(sound: &[u8], parts: &[Part], seed: u64) -> Vec<u8> {
    let mut random = Random::from_seed(seed);
    let mut bytes = sound.to_vec();
    if random.one_in(2) {
        let at = 1296 + random.index(96);
        let bit = 1 << random.below(8);
        for page in bytes[..8192].chunks_exact_mut(4096) {
            page[at] ^= bit;
            page[8..12].fill(0);
            let crc = crc32c::crc32c(page);
            page[8..12].copy_from_slice(&crc.to_be_bytes());
        }
    } else {
        let part = parts[random.index(2)];
        let at = usize::try_from(part.at.bytes()).expect("a small image") + 4 * random.index(20);
        bytes[at..at + 4].copy_from_slice(&u32::try_from(random.below(60)).expect("small").to_be_bytes());
    }
    bytes
}

/// The image with something wrong in it, or at least other.
fn poked(sound: &[u8], places: &Places, seed: u64) -> Vec<u8> {
    let mut random = Random::from_seed(seed);
    let mut bytes = sound.to_vec();
    for _ in 0..1 + random.below(3) {
        let region = match random.below(13) {
            0 | 1 => None,
            12 => Some(Region::Keys),
            2 | 3 => Some(Region::Bitmap),
            4 | 5 => Some(Region::Masks),
            6 | 7 => Some(Region::Table),
            8 | 9 => Some(Region::Partials),
            _ => Some(Region::Snapshots),
        };
        let Some(region) = region.map(|region| places.region(region)).filter(|region| !region.is_empty())
        else {
            poke_superblock(&mut bytes, &mut random);
            continue;
        };
        // Most of what counts is in the first bytes.
        let start = usize::try_from(region.start().bytes()).expect("a small image");
        let room = usize::try_from(region.len()).expect("a small image");
        let reach = if random.one_in(6) { room - 8 } else { 260 };
        let within = random.index(reach);
        match random.below(4) {
            0 => bytes[start + within] ^= 1 << random.below(8),
            1 => bytes[start + within] = 0xFF,
            // A number such as units and ids have.
            _ => {
                let at = start + within / 4 * 4;
                let number = u32::try_from(random.below(24)).expect("small");
                bytes[at..at + 4].copy_from_slice(&number.to_be_bytes());
            }
        }
    }
    bytes
}

fn poke_superblock(bytes: &mut [u8], random: &mut Random) {
    let at = if random.one_in(8) { random.index(4096) } else { 12 + random.index(250) };
    for page in [0, 4096] {
        bytes[page + at] ^= 1 << (at % 8);
    }
    if random.one_in(6) {
        return; // and both CRCs are wrong
    }
    for page in bytes[..8192].chunks_exact_mut(4096) {
        page[8..12].fill(0);
        let crc = crc32c::crc32c(page);
        page[8..12].copy_from_slice(&crc.to_be_bytes());
    }
}

#[test]
fn both_say_the_same_of_snapshots() {
    if other_checker().is_none() {
        return;
    }
    let dir = Dir::new("native-snapshots");
    let (_, options) = &kinds()[3];
    let mut images = Vec::new();
    for seed in 0..100 * scale() {
        let (storage, _) = used(options, seed % 5, 20, true);
        images.push((seed, with_snapshots(storage.content().to_vec(), seed)));
    }
    let paths: Vec<PathBuf> =
        images.iter().map(|(seed, bytes)| dir.put(&format!("s-{seed}"), bytes)).collect();
    let Some((codes, _)) = other_codes(&paths) else { return };
    let mut counts = [0; 4];
    for ((seed, bytes), code) in images.iter().zip(codes) {
        let (own, lines) = own_code(bytes);
        assert_eq!(own, code, "seed {seed}: {lines:#?}");
        counts[usize::try_from(own).expect("small")] += 1;
    }
    assert!(counts[0] > 3 && counts[2] > 3 && counts[3] > 3, "{counts:?}");
}

#[test]
fn both_find_nothing_wrong_with_snapshots_that_were_made() {
    let dir = Dir::new("native-made-snapshots");
    let base = dir.put("base.raw", &base_bytes());
    let encrypted = encrypted_kinds();
    for (name, options) in kinds()[2..].iter().chain(&encrypted[2..]) {
        for seed in 0..6 * scale() {
            let (storage, model) = snapped(options, seed);
            let bytes = storage.content().to_vec();
            assert!(content(&storage) == model, "{name}, seed {seed}: the disk");
            let (own, lines) = own_code(&bytes);
            assert_eq!(own, 0, "{name}, seed {seed}: {lines:#?}");
            let image = dir.put("image.vlm", &bytes);
            let Some((codes, text)) = other_codes(&[image.clone(), image.clone()]) else { return };
            assert_eq!(codes, [0, 0], "{name}, seed {seed}: {text}");
            let hash = other_hash(&image, Some(&base), None);
            assert_eq!(hash, sha256(&dir.put("model.raw", &model)), "{name}, seed {seed}");
        }
    }
}

/// The image with a few snapshots, copies and partial units, some of which may not be.
fn with_snapshots(mut bytes: Vec<u8>, seed: u64) -> Vec<u8> {
    let mut random = Random::from_seed(seed);
    let superblock =
        futures_lite::future::block_on(Superblocks::read(&*MemoryStorage::holding("image", &bytes)))
            .expect("a sound image")
            .superblock;
    let places = superblock.places();
    let place = |region| usize::try_from(places.region(region).start().bytes()).expect("a small image");
    let data = usize::try_from(places.data_offset().bytes()).expect("a small image");
    let unit_count = (bytes.len() - data).div_ceil(65_536);
    // Three more units: the first holds copies, the others lie under partial ones.
    let map_unit = unit_count + 1;
    bytes.resize(data + (unit_count + 3) * 65_536, 0);
    let put =
        |bytes: &mut Vec<u8>, at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    let number = |value: usize| u32::try_from(value).expect("small");
    let is_honest = random.one_in(2);
    let ids: u32 = 3;
    for page in [0, 4096] {
        bytes[page + 47] |= 8;
    }
    let last = place(Region::Snapshots) + 128 * 4095;
    put(&mut bytes, last + 4, ids);
    put(&mut bytes, last + 8, ids + 1);
    for id in 1..=ids {
        let at = place(Region::Snapshots) + 128 * (id as usize * 3);
        put(&mut bytes, at, id);
        put(&mut bytes, at + 4, if id == ids { u32::MAX } else { id + 1 });
        put(&mut bytes, at + 12, 1 << 20);
        bytes[at + 64] = b'a' + u8::try_from(id).expect("small");
    }
    put(&mut bytes, last, number(map_unit));
    let map = data + (map_unit - 1) * 65_536;
    bytes[map..map + 8].copy_from_slice(b"VELLUMmu");
    for (slot, region) in [Region::Table, Region::Masks, Region::Bitmap].into_iter().enumerate() {
        put(&mut bytes, map + 16 + 16 * slot, 1 + number(slot) % ids);
        put(&mut bytes, map + 28 + 16 * slot, number(place(region)));
    }
    let table = place(Region::Table);
    let first: Vec<u8> = bytes[table..table + 4096].to_vec();
    bytes[map + 4096..map + 8192].copy_from_slice(&first);
    if let Some(entry) = first.chunks_exact(4).find(|entry| *entry != [0; 4]) {
        bytes[place(Region::Partials)..place(Region::Partials) + 4].copy_from_slice(entry);
        put(&mut bytes, place(Region::Partials) + 4, number(map_unit + 1));
        put(&mut bytes, place(Region::Partials) + 128, number(map_unit + 1));
        put(&mut bytes, place(Region::Partials) + 132, number(map_unit + 2));
    }
    for _ in 0..if is_honest { 0 } else { 1 + random.below(2) } {
        let at = match random.below(9) {
            7 => last + 4 * random.index(4),
            0 => place(Region::Snapshots) + 128 * 3 * (1 + random.index(3)) + 4 * random.index(4),
            1 => map + 16 + 4 * random.index(12),
            2 => map + 4 * random.index(4),
            3 => map + 4096 + 4 * random.index(30),
            4 => table + 4 * random.index(17),
            5 => place(Region::Partials) + 4 * random.index(3),
            6 => place(Region::Partials) + 128 + 4 * random.index(3),
            _ => map + 16,
        };
        put(&mut bytes, at, number(random.index(unit_count + 4)));
    }
    for page in bytes[..8192].chunks_exact_mut(4096) {
        page[8..12].fill(0);
        let crc = crc32c::crc32c(page);
        page[8..12].copy_from_slice(&crc.to_be_bytes());
    }
    bytes
}
