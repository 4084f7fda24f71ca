//! A program over an image of our own making.
//!
//! ```text
//!   │ shape 6 bytes │ step │ step │ …        a step is one byte for what, and what it needs
//!
//!   requests       checked against the model while the image is sound
//!   close, open    a clean close leaves a clean image
//!   kill           flushed, then dropped without a close: recovered on opening (version 2: by `vellum recover`, which
//!                  has no dirty bit), nothing flushed is lost
//!   poke           closed, a word of the metadata changed, opened again: from then on only rule 1 of the crate holds,
//!                  until a repair says that all is well
//! ```

use futures_lite::future::block_on;
use vellum_core::{Buffer, Disk, GuestOffset, GuestSpan, ImageOffset, MemoryStorage};
use vellum_format::qcow2::{CreateOptions, Header, OpenOptions, Preallocation, create};
use vellum_format::report::{CheckReport, Repair};

use crate::Image;
use crate::bytes::Bytes;
use crate::watched::{MODEL_BYTES_MAX, Request, Watched};

/// Steps of one program.
const STEPS_MAX: usize = 32;

/// The target.
pub fn qcow2_ops(data: &[u8]) {
    crate::bounded(|| block_on(run(Bytes::of(data))));
}

/// What kind of image: every combination that `create` accepts.
fn shape(bytes: &mut Bytes<'_>) -> (CreateOptions, bool) {
    let [cluster, refcounts, flags, scale] = bytes.array();
    let cluster_size = 512 << (cluster % 8);
    let options = CreateOptions {
        // Two clusters of the largest (the last is cut), three L2 tables of the smallest: much happens in little work.
        size: (bytes.number() << (scale % 8)).min(80 << 10),
        version: if flags & 1 == 0 { 3 } else { 2 },
        cluster_size,
        refcount_bits: 1 << (refcounts % 7),
        extended_l2: flags & 2 != 0,
        lazy_refcounts: flags & 4 != 0,
        preallocation: if flags & 8 == 0 { Preallocation::Off } else { Preallocation::Metadata },
        data_file: (flags & 16 != 0).then(|| "data".to_owned()),
        data_file_raw: flags & 32 != 0,
        journal: (scale & 64 != 0).then_some(64 << 10),
        backing: (flags & 64 != 0).then(|| ("base".to_owned(), Some("raw".to_owned()))),
        ..CreateOptions::without_journal()
    };
    (options, flags & 64 != 0)
}

async fn run(mut bytes: Bytes<'_>) {
    let (options, has_base) = shape(&mut bytes);
    let image =
        Image { storage: MemoryStorage::new("image"), data_file: MemoryStorage::new("data file"), has_base };
    let data_file = options.data_file.is_some().then(|| image.data_file.clone());
    if create(&*image.storage, data_file.as_ref(), &options).await.is_err() {
        return;
    }
    let Some(mut watched) = open(&image, true).await else { return };
    let mut is_poked = false;
    for _ in 0..STEPS_MAX {
        if bytes.is_empty() {
            break;
        }
        let step = bytes.byte();
        match step % 16 {
            0..=10 => {
                let span = span(&mut bytes, watched.disk.geometry().size);
                watched.request(span, request(step)).await;
            }
            11 => watched.flush().await,
            12 => {
                let is_sound = close(&image, watched, is_poked).await;
                let Some(again) = open(&image, is_sound).await else { return };
                watched = again;
            }
            13 => {
                watched.flush().await;
                let model = watched.model.clone();
                drop(watched); // the server is killed
                if model.is_some() {
                    recover(&image, is_poked).await;
                }
                let Some(mut again) = open(&image, model.is_some()).await else { return };
                again.model = model;
                again.compare().await;
                watched = again;
            }
            14 => {
                let is_sound = close(&image, watched, is_poked).await;
                poke(&image, &mut bytes).await;
                is_poked = true;
                let is_same =
                    is_sound && image.check(Repair::Nothing).await.is_ok_and(|(now, _)| now.is_clean());
                let Some(again) = open(&image, is_same).await else { return look(&image).await };
                watched = again;
            }
            _ => {
                close(&image, watched, is_poked).await;
                let repaired = image.check(Repair::All).await;
                let is_sound = repaired.is_ok_and(|(report, _)| report.is_clean());
                let Some(again) = open(&image, is_sound).await else { return };
                watched = again;
            }
        }
    }
    close(&image, watched, is_poked).await;
}

/// Which request a step is.
fn request(step: u8) -> Request {
    match step % 16 {
        0..=5 => Request::Write { seed: step, fua: step & 128 != 0 },
        6 | 7 => Request::Zero { may_unmap: step & 64 != 0, fua: step & 128 != 0 },
        8 | 9 => Request::Discard,
        _ => Request::Read,
    }
}

/// A place on the disk: mostly whole sectors or pages, sometimes any byte.
fn span(bytes: &mut Bytes<'_>, size: u64) -> GuestSpan {
    let (at, len, unit) =
        (bytes.number(), u64::from(bytes.byte()), [1, 512, 4096, 1024][usize::from(bytes.byte() % 4)]);
    let at = (at * unit) % (size + 1);
    GuestOffset::new(at).span((len * unit).min(size - at).min(80_000))
}

/// Opens for writing. A sound image must open, and must be read if it is not larger than a model may be. Only what is said
/// to be compressed need not unpack: we write none, and no check looks into those.
async fn open(image: &Image, is_sound: bool) -> Option<Watched> {
    let disk = match image.open(OpenOptions::default()).await {
        Ok(disk) => disk,
        Err(error) if is_sound => panic!("a sound image is not opened: {}", error.chain()),
        Err(_) => return None,
    };
    let watched = Watched::new(disk, is_sound).await;
    let size = watched.disk.geometry().size;
    if is_sound && size <= MODEL_BYTES_MAX && watched.model.is_none() {
        let all = Buffer::zeroed(usize::try_from(size).expect("small"));
        let error = watched.disk.read(GuestOffset::ZERO, all).await.err().map(|error| error.chain());
        let (report, _) = image.check(Repair::Nothing).await.expect("as before");
        assert!(
            report.compressed_clusters > 0,
            "a sound image cannot be read: {}",
            error.unwrap_or_default()
        );
    }
    Some(watched)
}

/// After a kill. Clusters may be lost, but none is in use with a refcount too low. Version 2 has no dirty bit to have it
/// repaired by the next opening: its user is told to run `vellum recover`, which is this.
async fn recover(image: &Image, is_poked: bool) {
    let header = Header::read(&*image.storage).await.expect("a killed image has a header");
    if header.needs_replay() {
        vellum_format::qcow2::recover(&image.storage).await.expect("a killed image is recovered");
    }
    let (left, lines) = image.check(Repair::Nothing).await.expect("a killed image can be checked");
    let corruptions = corruptions(&left, &lines, is_poked);
    assert!(corruptions == 0 && left.check_errors == 0, "corrupt after a kill: {lines:#?}");
    let header = Header::read(&*image.storage).await.expect("a killed image has a header");
    assert!(left.leaks == 0 || header.version() == 2 || header.is_dirty(), "lost for good: {lines:#?}");
    if header.version() == 2 {
        let (report, lines) = image.check(Repair::All).await.expect("a killed image is recovered");
        assert!(report.is_clean(), "not recovered: {lines:#?}");
    }
}

/// Closes and checks; whether the image is known to be sound.
async fn close(image: &Image, watched: Watched, is_poked: bool) -> bool {
    let model = watched.close().await;
    let report = image.check(Repair::Nothing).await;
    if model.is_none() {
        return false;
    }
    let (report, lines) = report.expect("a sound image can be checked");
    let corruptions = corruptions(&report, &lines, is_poked);
    let is_clean = report.check_errors == 0 && corruptions == 0 && report.leaks == 0;
    assert!(is_clean, "not clean after a clean close: {lines:#?}");
    let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk = image.open(reading).await.expect("a sound image opens");
    Watched { disk, model }.close().await;
    true
}

/// Corruptions that must not be there. In an image that was poked two guest clusters may have shared a place.
fn corruptions(report: &CheckReport, lines: &[String], is_poked: bool) -> u64 {
    if is_poked { crate::corruptions_but_flags(report, lines) } else { report.corruptions }
}

/// An image that does not open for writing may still be read, checked and repaired.
async fn look(image: &Image) {
    let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
    if let Ok(disk) = image.open(reading).await {
        let len = disk.geometry().size.min(100_000);
        let _ = disk.read(GuestOffset::ZERO, Buffer::zeroed(usize::try_from(len).expect("small"))).await;
        let _ = disk.map(GuestOffset::ZERO.span(disk.geometry().size)).await;
    }
    let _ = image.check(Repair::All).await;
    let _ = image.check(Repair::Nothing).await;
    if let Some(watched) = open(image, false).await {
        watched.close().await;
    }
}

/// Changes a word of the metadata of a closed image: a field of the header, or an entry of a table, to something that
/// looks like an entry.
async fn poke(image: &Image, bytes: &mut Bytes<'_>) {
    // An earlier poke may have left an address that lies far behind the end: nothing is there.
    let word = async |at: u64| {
        if at >= image.storage.len() {
            return 0;
        }
        let read = image.storage.read(ImageOffset::new(at), Buffer::zeroed(8)).await;
        u64::from_be_bytes(*read.expect("memory is read").slice().as_array().expect("eight bytes"))
    };
    let [where_, index, what, flags] = bytes.array();
    let cluster_bits = word(16).await & 0x1F;
    let offset_of = |entry: u64| entry & 0x00FF_FFFF_FFFF_FE00;
    let (l1, refcounts) = (word(40).await, word(48).await);
    let table = match where_ % 8 {
        0 | 1 => 0,
        2 => refcounts,
        3 => offset_of(word(refcounts).await),
        4 => l1,
        5 | 6 => offset_of(word(l1).await),
        _ => bytes.number() << 9,
    };
    let at = table.saturating_add(u64::from(index) * if where_ & 0x80 == 0 { 8 } else { 4 });
    let value = match flags % 4 {
        0 => word(at).await ^ (1 << (what % 64)),
        1 => u64::from(what) << cluster_bits,
        2 => (u64::from(what) << cluster_bits) | (u64::from(flags >> 2) << 58) | u64::from(flags >> 7),
        _ => u64::from_be_bytes(bytes.array()),
    };
    if at < image.storage.len() {
        let data = Buffer::copy_of(&value.to_be_bytes());
        image.storage.write(ImageOffset::new(at), data).await.expect("memory is written");
    }
}
