//! Images of every format that were made by hand: what they read as, what they map to; and the same when they are
//! cut short or damaged.

#![allow(missing_docs, clippy::cast_possible_truncation, reason = "a test, of small numbers")]

use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, ErrorKind, GuestOffset, GuestSpan, HostTally, Inline, MemoryStorage, Place, Result, SharedDisk,
    SharedStorage, WriteFlags, ZeroFlags, is_zero,
};
use vellum_foreign::samples::{Sample, refused, samples, seal_vhdx};
use vellum_foreign::{ForeignFiles, ForeignKind, look};

/// Larger disks are not read as a whole: what a damaged header states is not allocated here either.
const READ_MAX: u64 = 4 << 20;

async fn open(sample: &Sample) -> Result<SharedDisk> {
    let image: SharedStorage = MemoryStorage::holding("image", &sample.image);
    let description = look(sample.kind, &*image).await?;
    let parts = description.parts().iter().map(|name| {
        let found = sample.parts.iter().find(|(known, _)| known == name);
        let bytes = found.map_or(&[][..], |(_, bytes)| bytes);
        MemoryStorage::holding(name.clone(), bytes) as SharedStorage
    });
    let parts = parts.collect();
    let (offload, tally) = (Arc::new(Inline), HostTally::default());
    description.open(ForeignFiles { image, parts, below: None, offload, tally }).await
}

async fn read(disk: &SharedDisk, at: u64, len: u64) -> Result<Vec<u8>> {
    let len = usize::try_from(len).expect("small");
    Ok(disk.read(GuestOffset::new(at), Buffer::for_overwrite(len)).await?.to_vec())
}

/// The whole map.
async fn map(disk: &SharedDisk) -> Result<Vec<(GuestSpan, Place)>> {
    let mut rest = GuestOffset::ZERO.span(disk.geometry().size.min(READ_MAX));
    let mut extents = Vec::new();
    while !rest.is_empty() {
        for extent in disk.map(rest).await? {
            assert_eq!(extent.span.start(), rest.start(), "no gap");
            assert!(!extent.span.is_empty());
            rest = GuestSpan::between(extent.span.end(), rest.end());
            extents.push((extent.span, extent.place));
        }
    }
    Ok(extents)
}

#[test]
fn each_sample_reads_as_its_disk() {
    for sample in samples() {
        let name = sample.name;
        block_on(async {
            let disk = open(&sample).await.unwrap_or_else(|error| panic!("{name}: {}", error.chain()));
            let size = sample.disk.len() as u64;
            assert_eq!(disk.geometry().size, size, "{name}");
            assert!(read(&disk, 0, size).await.unwrap() == sample.disk, "{name}");
            for (at, len) in
                [(0, 1), (1, 511), (500, 40), (511, 2), (4095, 2), (4096, 4096), (size - 3, 3), (700, 0)]
            {
                let (at, len) = (at.min(size - 1), len.min(size - at.min(size - 1)));
                let wanted = &sample.disk[at as usize..(at + len) as usize];
                assert_eq!(read(&disk, at, len).await.unwrap(), wanted, "{name}: {len} bytes at {at}");
            }
            for (span, place) in map(&disk).await.unwrap() {
                let range = span.start().bytes() as usize..span.end().bytes() as usize;
                let wanted = &sample.disk[range.start..range.end.min(sample.disk.len())];
                match place {
                    Place::Zero { .. } | Place::Below => assert!(is_zero(wanted), "{name}: {span:?}"),
                    Place::Data { storage, at } => {
                        let bytes = storage.read(at, Buffer::for_overwrite(wanted.len())).await.unwrap();
                        assert!(bytes.to_vec() == wanted, "{name}: {span:?} at {at}");
                    }
                    Place::Compressed { .. } => {}
                }
            }
            let past = disk.read(GuestOffset::new(size - 1), Buffer::zeroed(2)).await;
            assert_eq!(past.expect_err("past the end").kind(), ErrorKind::Invalid);
            let written = disk.write(GuestOffset::ZERO, Buffer::zeroed(512), WriteFlags::default()).await;
            assert_eq!(written.expect_err("only read").kind(), ErrorKind::ReadOnly);
            let zeroed = disk.write_zeroes(GuestOffset::ZERO.span(512), ZeroFlags::default()).await;
            assert_eq!(zeroed.expect_err("only read").kind(), ErrorKind::ReadOnly);
            disk.close().await.unwrap();
            let closed = disk.read(GuestOffset::ZERO, Buffer::zeroed(1)).await;
            assert_eq!(closed.expect_err("closed").kind(), ErrorKind::Closed);
        });
    }
}

/// A copy that stopped half way: what it does not have is an error and never zeros.
#[test]
fn of_an_image_that_is_cut_short_every_byte_that_is_read_is_right() {
    let mut errors = 0;
    for mut sample in samples() {
        let whole = sample.image.clone();
        let is_large = whole.len() > 1 << 20;
        for len in (0..whole.len()).step_by(if is_large { 90_001 } else { 101 }) {
            sample.image.truncate(0);
            sample.image.extend_from_slice(&whole[..len]);
            errors += block_on(right_or_an_error(&sample));
        }
        sample.image = whole;
        for index in 0..sample.parts.len() {
            let whole = sample.parts[index].1.clone();
            for len in (0..whole.len()).step_by(101) {
                sample.parts[index].1 = whole[..len].to_vec();
                errors += block_on(right_or_an_error(&sample));
            }
            sample.parts[index].1 = whole;
        }
    }
    assert!(errors > 500, "{errors} cuts were noticed");
}

/// How many reads failed.
async fn right_or_an_error(sample: &Sample) -> usize {
    let Ok(disk) = open(sample).await else { return 1 };
    assert_eq!(disk.geometry().size, sample.disk.len() as u64, "{}", sample.name);
    let mut errors = 0;
    for (index, wanted) in sample.disk.chunks(512).enumerate() {
        match read(&disk, index as u64 * 512, wanted.len() as u64).await {
            Ok(bytes) => {
                assert!(bytes == wanted, "{} of {}: sector {index}", sample.image.len(), sample.name)
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{}: {}", sample.name, error.chain());
                errors += 1;
            }
        }
    }
    errors
}

/// The name of a backing image: read, none where it is empty, and refused where it cannot be one.
#[test]
fn a_name_of_a_backing_image_is_bounded() {
    let patched = |kind, fields: &[(usize, &[u8])]| {
        let mut image = samples().into_iter().find(|sample| sample.kind == kind).expect("there is one").image;
        for (at, bytes) in fields {
            image[*at..*at + bytes.len()].copy_from_slice(bytes);
        }
        let backing = |image: &[u8]| {
            let file = MemoryStorage::holding("image", image);
            block_on(look(kind, &*file)).map(|found| found.backing().map(|(name, _)| name.to_owned()))
        };
        backing(&image).map_err(|error| error.kind())
    };
    let qed = |len: u8, high: u8, name: &[u8]| {
        let fields: [(usize, &[u8]); 4] = [(16, &[1]), (56, &[64]), (60, &[len, high]), (64, name)];
        patched(ForeignKind::Qed, &fields)
    };
    let qcow = |len: u8, high: u8, name: &[u8]| {
        // Over the padding of a table that is not read.
        let fields: [(usize, &[u8]); 3] = [(14, &[1, 0]), (18, &[high, len]), (256, name)];
        patched(ForeignKind::Qcow1, &fields)
    };
    for backing in [&qed as &dyn Fn(u8, u8, &[u8]) -> _, &qcow] {
        assert_eq!(backing(5, 0, b"a.raw"), Ok(Some("a.raw".to_owned())));
        assert_eq!(backing(0, 0, b""), Ok(None));
        assert_eq!(backing(0, 4, b""), Err(ErrorKind::Corrupt));
        assert_eq!(backing(2, 0, &[0xFF, 0xFE]), Err(ErrorKind::Unsupported));
    }
}

#[test]
fn what_would_read_as_zeros_or_for_hours_is_refused() {
    for sample in refused() {
        let name = sample.name;
        let error = block_on(open(&sample)).err().unwrap_or_else(|| panic!("{name}: it was opened"));
        assert!(
            matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported),
            "{name}: {}",
            error.chain()
        );
    }
}

/// A descriptor may name one file as often as it likes: it is opened once.
#[test]
fn a_file_that_many_extents_name_is_one_part() {
    let mut image = "# Disk DescriptorFile\nCID=1\nparentCID=ffffffff\n".to_owned();
    for index in 0..10_000 {
        image.push_str(&format!("RW 1 FLAT \"own.raw\" {}\n", (index * 7) % 128));
    }
    let file: Vec<u8> = (0..128_u8).flat_map(|sector| [sector; 512]).collect();
    let parts = vec![("own.raw".to_owned(), file)];
    let sample = Sample {
        name: "one file",
        kind: ForeignKind::Vmdk,
        image: image.into_bytes(),
        parts,
        disk: Vec::new(),
    };
    block_on(async {
        let storage = MemoryStorage::holding("image", &sample.image);
        assert_eq!(look(sample.kind, &*storage).await.unwrap().parts(), ["own.raw"]);
        let disk = open(&sample).await.unwrap();
        let read = read(&disk, 0, 10_000 * 512).await.unwrap();
        assert!(read.chunks(512).enumerate().all(|(index, bytes)| bytes == [(index * 7 % 128) as u8; 512]));
    });
}

/// Damage anywhere: no panic, no hang, and what can be read can be mapped.
#[test]
fn damaged_images_end_in_answers_or_errors() {
    let mut random = vellum_core::Random::from_seed(11);
    let (mut opened, mut refused) = (0, 0);
    for sample in samples() {
        let is_large = sample.image.len() > 1 << 20;
        for round in 0..if is_large { 60 } else { 4000 } {
            let mut damaged = Sample {
                image: sample.image.clone(),
                parts: sample.parts.clone(),
                disk: Vec::new(),
                ..sample
            };
            for _ in 0..1 + random.below(4) {
                let index = random.below(damaged.parts.len() as u64 + 1) as usize;
                let file = match index {
                    0 => &mut damaged.image,
                    part => &mut damaged.parts[part - 1].1,
                };
                // Where the tables are, as a rule.
                let (from, span) = match (sample.kind, random.below(6)) {
                    (ForeignKind::Vhdx, 0) => (0x1_0000, 80),
                    (ForeignKind::Vhdx, 1) => (0x3_0000, 96),
                    (ForeignKind::Vhdx, 2) => (0x10_0000, 8192),
                    (ForeignKind::Vhdx, 3) => (0x20_0000, 128),
                    (ForeignKind::Vhdx, 4) => (0x21_0000, 20),
                    (ForeignKind::Vhdx, _) => (0x30_0000, 32),
                    (ForeignKind::Dmg, _) => (0, file.len() as u64),
                    _ => (0, (file.len() as u64).min(2600)),
                };
                let at = (from + random.below(span)) as usize;
                let values: [u8; 6] = [0, 1, 0x7F, 0x80, 0xFF, random.below(256) as u8];
                let value = values[random.below(6) as usize];
                let len = [1, 1, 2, 4, 8][random.below(5) as usize];
                let end = (at + len).min(file.len());
                file[at.min(end)..end].fill(value);
            }
            if sample.kind == ForeignKind::Vhdx && round % 3 > 0 {
                seal_vhdx(&mut damaged.image);
            }
            block_on(async {
                match open(&damaged).await {
                    Err(_) => refused += 1,
                    Ok(disk) => {
                        opened += 1;
                        let len = disk.geometry().size.min(READ_MAX);
                        let mapped = map(&disk).await;
                        for at in (0..len).step_by(4096) {
                            let bytes = read(&disk, at, (len - at).min(4096)).await;
                            assert!(
                                mapped.is_err() || bytes.is_ok() || has_compressed(&mapped),
                                "{}",
                                sample.name
                            );
                        }
                        let end = disk.geometry().size;
                        let _ = read(&disk, end.saturating_sub(700), end.min(700)).await;
                    }
                }
            });
        }
    }
    assert!(opened > 10_000 && refused > 2000, "{opened} opened, {refused} refused");
}

fn has_compressed(extents: &Result<Vec<(GuestSpan, Place)>>) -> bool {
    extents
        .as_ref()
        .is_ok_and(|extents| extents.iter().any(|(_, place)| matches!(place, Place::Compressed { .. })))
}
