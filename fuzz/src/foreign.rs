//! Images of other programs, damaged or made up.
//!
//! ```text
//!   │ kind │ poke │ poke │ …      kind: which sample; a poke: where (3 bytes), how many, these bytes
//!   │ 0xFF │ bytes                the bytes are the image file
//! ```
//!
//! The checksums of a VHDX are made right after the pokes, or nothing behind them would ever be reached. Its pokes go
//! where its structures are, because most of it is empty.

use std::sync::Arc;

use futures_lite::future::block_on;
use vellum_core::memory::SparseBytes;
use vellum_core::{
    Buffer, ErrorKind, GuestOffset, GuestSpan, HostTally, ImageOffset, Inline, Limits, MemoryStorage, Place,
    Result, SharedDisk, SharedStorage,
};
use vellum_foreign::samples::{Sample, samples, seal_vhdx};
use vellum_foreign::{ForeignFiles, ForeignKind, look};
use vellum_format::probe::guess;

const POKES_MAX: usize = 16;
/// As much of a disk is looked at.
const LOOKED_AT: u64 = 256 << 10;
/// Where a VHDX has something, and how much of it is of interest.
const VHDX_PLACES: [(usize, usize); 8] = [
    (0x1_0000, 80),
    (0x2_0000, 80),
    (0x3_0000, 96),
    (0x10_0000, 192),
    (0x10_1000, 64),
    (0x20_0000, 160),
    (0x21_0000, 24),
    (0x30_0000, 32),
];
/// What follows in a VHDX are blocks, which stay empty here.
const VHDX_HEAD: usize = (3 << 20) + 8192;

/// The target for one format.
pub fn foreign(kind: ForeignKind, data: &[u8]) {
    crate::bounded(|| {
        if let Some((image, parts)) = image_of(kind, data) {
            block_on(use_all(kind, image, &parts));
        }
    });
}

/// Small files that the parts of an image can be.
type Parts = Vec<(String, Vec<u8>)>;

fn samples_of(kind: ForeignKind) -> Arc<Vec<Sample>> {
    thread_local! {
        static ALL: std::cell::RefCell<Option<(ForeignKind, Arc<Vec<Sample>>)>> = const { std::cell::RefCell::new(None) };
    }
    ALL.with_borrow_mut(|all| match all {
        Some((known, found)) if *known == kind => found.clone(),
        _ => {
            let mut found: Vec<Sample> = samples().into_iter().filter(|sample| sample.kind == kind).collect();
            for sample in &mut found {
                sample.disk = Vec::new();
                if kind == ForeignKind::Vhdx {
                    sample.image.truncate(VHDX_HEAD);
                    sample.image.shrink_to_fit();
                }
            }
            let found = Arc::new(found);
            *all = Some((kind, found.clone()));
            found
        }
    })
}

fn image_of(kind: ForeignKind, data: &[u8]) -> Option<(SharedStorage, Parts)> {
    let (first, mut rest) = data.split_first()?;
    let samples = samples_of(kind);
    let sample = &samples[usize::from(*first) % samples.len()];
    let mut content = SparseBytes::default();
    if *first == 0xFF {
        content.write(ImageOffset::ZERO, rest);
        return Some((MemoryStorage::with("image", Limits::plain(), content), sample.parts.clone()));
    }
    let (mut image, mut parts) = (sample.image.clone(), sample.parts.clone());
    for _ in 0..POKES_MAX {
        let Some(([a, b, c, len], tail)) = rest.split_first_chunk() else { break };
        let (bytes, tail) = tail.split_at(usize::from(len % 16).min(tail.len()));
        rest = tail;
        let at = usize::from(*a) | usize::from(*b) << 8;
        // One in a while is for another file of the image.
        let file = match parts.len() {
            0 => &mut image,
            count => match usize::from(*c) % (count + 1) {
                0 => &mut image,
                part => &mut parts[part - 1].1,
            },
        };
        let at = match kind {
            ForeignKind::Vhdx => {
                let (from, len) = VHDX_PLACES[usize::from(*c) % VHDX_PLACES.len()];
                from + at % len
            }
            _ => at % file.len().max(1),
        };
        let end = (at + bytes.len()).min(file.len());
        file[at.min(end)..end].copy_from_slice(&bytes[..end - at.min(end)]);
    }
    let mut len = image.len() as u64;
    if kind == ForeignKind::Vhdx {
        seal_vhdx(&mut image);
        len = 6 << 20;
    }
    content.write(ImageOffset::ZERO, &image);
    content.set_len(len);
    Some((MemoryStorage::with("image", Limits::plain(), content), parts))
}

async fn open(kind: ForeignKind, image: &SharedStorage, known: &Parts) -> Result<SharedDisk> {
    let description = look(kind, &**image).await?;
    assert!(description.size() < 1 << 63, "a disk that can be addressed");
    assert!(description.parts().len() <= 512, "a bounded number of files");
    let names =
        description.parts().iter().map(String::as_str).chain(description.backing().map(|backing| backing.0));
    for name in names {
        assert!(!name.is_empty() && name.len() < 1024, "a name that a file can have");
    }
    let parts = description.parts().iter().map(|name| {
        let found = known.iter().find(|(one, _)| one == name);
        MemoryStorage::holding(name.clone(), found.map_or(&[][..], |(_, bytes)| bytes)) as SharedStorage
    });
    let (parts, below) = (parts.collect(), description.backing().map(|_| crate::base()));
    let (offload, tally) = (Arc::new(Inline), HostTally::default());
    description.open(ForeignFiles { image: image.clone(), parts, below, offload, tally }).await
}

async fn use_all(kind: ForeignKind, image: SharedStorage, parts: &Parts) {
    let _ = guess(&*image).await;
    let Ok(disk) = open(kind, &image, parts).await else { return };
    let size = disk.geometry().size;
    let spans = [
        (0, size.min(LOOKED_AT)),
        (size.saturating_sub(5000), size.min(5000)),
        (size / 2, (size - size / 2).min(9000)),
    ];
    for (at, len) in spans {
        let mut rest = GuestOffset::new(at).span(len);
        while !rest.is_empty() {
            let Ok(extents) = disk.map(rest).await else { break };
            assert!(!extents.is_empty(), "an answer");
            for extent in extents {
                assert_eq!(extent.span.start(), rest.start(), "no gap");
                assert!(!extent.span.is_empty(), "an extent has bytes");
                rest = GuestSpan::between(extent.span.end(), rest.end());
                let some = extent.span.split_at(4096).0;
                let read = disk
                    .read(some.start(), Buffer::for_overwrite(usize::try_from(some.len()).expect("small")))
                    .await;
                match (read, extent.place) {
                    (Ok(bytes), Place::Zero { .. }) => assert!(bytes.is_zero(), "zeros are zero"),
                    (Ok(_), _) => {}
                    (Err(error), Place::Compressed { .. }) => assert_eq!(error.kind(), ErrorKind::Corrupt),
                    (Err(error), place) => panic!("{place:?} cannot be read: {}", error.chain()),
                }
            }
        }
    }
}
