//! An image of the native format with anything in it, used in every way there is.
//!
//! ```text
//!   │ kind │ poke │ poke │ …      kind: layout, base, closed or not; a poke: where, what. The superblocks' CRCs are made right
//! ```
//!
//! Such an image is a mebibyte of zeros with a few things in it, so the input says only what is changed.

use std::sync::{Arc, OnceLock};

use futures_lite::future::block_on;
use vellum_core::{
    Buffer, GuestOffset, MemoryStorage, Result, SharedDisk, SharedStorage, WriteFlags, ZeroFlags,
};
use vellum_format::native::check::check;
use vellum_format::native::{
    CreateOptions, Native, NewBase, OpenOptions, Places, Region, Superblocks, create, recover,
};
use vellum_format::report::{CheckReport, Repair};

use crate::bytes::Bytes;
use crate::watched::{Request, Watched};

const POKES_MAX: usize = 16;
const SIZE: u64 = 200 * 1024 + 512;
/// As much of a disk is looked at.
const REQUEST_BYTES_MAX: u64 = 300 << 10;

/// The target.
pub fn native_open(data: &[u8]) {
    crate::bounded(|| block_on(use_all(Bytes::of(data))));
}

/// An image to begin with: its bytes, and where its regions are.
type Sample = (Vec<u8>, Places);

fn samples() -> &'static [Sample] {
    static SAMPLES: OnceLock<Vec<Sample>> = OnceLock::new();
    SAMPLES.get_or_init(|| (0..12).map(|kind| block_on(sample(kind))).collect())
}

/// Bit 0: a table. Bit 1: over a base. Bit 2: not closed. From 8 on: zones.
async fn sample(kind: u8) -> Sample {
    let (has_zones, has_base) = (kind & 8 != 0, kind & 2 != 0);
    let has_table = has_zones || kind & 1 != 0;
    let base = NewBase { name: "base".to_owned(), size: 20_000, ..NewBase::default() };
    let options = CreateOptions {
        size: SIZE,
        has_table,
        has_zones,
        zone_size: has_zones.then_some(128 << 10),
        embed: has_zones.then_some(kind & 1 == 0),
        unit_size: has_table.then_some(64 << 10),
        block_size: has_base.then_some(4 << 10),
        journal_bytes: (has_table || has_base).then_some(64 << 10),
        base: has_base.then_some(base),
        uuid: Some([3; 16]),
        ..CreateOptions::default()
    };
    let storage = MemoryStorage::new("image");
    let superblock = create(&*storage, &options).await.expect("good options");
    let disk = open(&storage, false).await.expect("a new image");
    for at in [0, 10_000, 150_000] {
        let data = Buffer::copy_of(&[7; 5000]);
        disk.write(GuestOffset::new(at), data, WriteFlags::FUA).await.expect("memory");
    }
    disk.write_zeroes(GuestOffset::new(11_000).span(6000), ZeroFlags::default()).await.expect("memory");
    disk.flush().await.expect("memory");
    if kind & 4 == 0 {
        disk.close().await.expect("memory");
    }
    drop(disk);
    (storage.content().to_vec(), superblock.places())
}

async fn open(storage: &Arc<MemoryStorage>, read_only: bool) -> Result<SharedDisk> {
    let has_base = Superblocks::read(&**storage).await?.superblock.base().is_some();
    let options = OpenOptions { read_only, journal_key: Some(crate::KEY), ..OpenOptions::default() };
    let disk = Native::open(storage.clone(), has_base.then(crate::base), options).await?;
    Ok(disk)
}

async fn examine(storage: &Arc<MemoryStorage>, repair: Repair) -> Result<(CheckReport, Vec<String>)> {
    let shared: SharedStorage = storage.clone();
    let mut lines = Vec::new();
    let report = check(&shared, repair, &mut |line| lines.push(line)).await?;
    Ok((report, lines))
}

async fn use_all(mut bytes: Bytes<'_>) {
    let (image, places) = &samples()[usize::from(bytes.byte() % 12)];
    let mut image = image.clone();
    for _ in 0..POKES_MAX {
        if bytes.is_empty() {
            break;
        }
        poke(&mut image, places, &mut bytes);
    }
    for page in image[..8192].chunks_exact_mut(4096) {
        page[8..12].fill(0);
        let crc = crc32c::crc32c(page);
        page[8..12].copy_from_slice(&crc.to_be_bytes());
    }
    let fresh = || MemoryStorage::holding("image", &image);
    look(&fresh()).await;
    for repair in [Repair::Leaks, Repair::All] {
        let storage = fresh();
        let Ok((report, _)) = examine(&storage, repair).await else { continue };
        let (again, lines) =
            examine(&storage, Repair::Nothing).await.expect("what was repaired can be checked");
        let found = |report: &CheckReport| (report.check_errors, report.corruptions, report.leaks);
        assert_eq!(found(&again), found(&report), "a repair tells what it leaves: {lines:#?}");
    }
    let storage = fresh();
    let shared: SharedStorage = storage.clone();
    let _ = recover(&shared).await;
    change(&storage).await;
}

fn poke(image: &mut [u8], places: &Places, bytes: &mut Bytes<'_>) {
    let what = bytes.byte() % 8;
    let region = match what {
        0 => {
            let at = 12 + usize::from(bytes.byte());
            let value = bytes.byte();
            image[at] = value;
            image[4096 + at] = value;
            return;
        }
        1 => Region::Bitmap,
        2 => Region::Masks,
        3 => Region::Table,
        4 => Region::Partials,
        5 => Region::Snapshots,
        _ => Region::Journal,
    };
    let region = places.region(region);
    let start = usize::try_from(region.start().bytes()).expect("a small image");
    let len = usize::try_from(region.len()).expect("a small image");
    if what == 6 {
        let at = start + usize::from(bytes.byte() % 16) * 4096;
        let record = crate::journal::record(bytes);
        if let Some(room) = image.get_mut(at..at + record.len()).filter(|_| len > 0) {
            room.copy_from_slice(&record);
        }
        return;
    }
    let at = usize::try_from(bytes.number()).expect("16 bits");
    let value: [u8; 4] = bytes.array();
    if what == 7 {
        // The end of the image: data, and units that hold copies.
        let at = usize::try_from(places.data_offset().bytes()).expect("a small image") + at * 4;
        if let Some(room) = image.get_mut(at..at + 4) {
            room.copy_from_slice(&value);
        }
    } else if len > 0 {
        let at = start + at * 4 % (len - 4);
        image[at..at + 4].copy_from_slice(&value);
    }
}

/// What may be done to an image that is open for reading.
async fn look(storage: &Arc<MemoryStorage>) {
    let _ = examine(storage, Repair::Nothing).await;
    let Ok(disk) = open(storage, true).await else { return };
    let size = disk.geometry().size.min(REQUEST_BYTES_MAX);
    let _ = disk.map(GuestOffset::ZERO.span(disk.geometry().size)).await;
    let len = usize::try_from(size).expect("as bounded");
    let _ = disk.read(GuestOffset::ZERO, Buffer::for_overwrite(len)).await;
    let _ = disk.close().await;
}

/// Changes of every kind, then a second opening that must find them.
async fn change(storage: &Arc<MemoryStorage>) {
    let is_sound = examine(storage, Repair::Nothing).await.is_ok_and(|(report, _)| report.is_clean());
    let Ok(disk) = open(storage, false).await else { return };
    let mut watched = Watched::new(disk, is_sound).await;
    let size = watched.disk.geometry().size;
    for (seed, at) in (1..).zip([0, 9000, 64_000, 150_000]) {
        let span = GuestOffset::new(at).span(9500);
        if span.end().bytes() > size {
            continue;
        }
        let (first, last) = span.split_at(3300);
        watched.request(first, Request::Write { seed, fua: seed == 2 }).await;
        watched.request(span, Request::Zero { may_unmap: seed % 2 == 0, fua: false }).await;
        watched.request(first, Request::Discard).await;
        watched.request(last, Request::Write { seed, fua: false }).await;
        watched.flush().await;
    }
    let is_watched = watched.model.is_some();
    let model = watched.close().await;
    if !is_watched {
        return;
    }
    let (report, lines) = examine(storage, Repair::Nothing).await.expect("a sound image stays one");
    assert!(report.is_clean(), "unsound after being used: {lines:#?}");
    let disk =
        open(storage, true).await.unwrap_or_else(|error| panic!("not opened again: {}", error.chain()));
    Watched { disk, model }.close().await;
}
