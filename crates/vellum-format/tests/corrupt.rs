//! Images that contradict themselves, and how they are handled: nothing that an image needs is overwritten, a
//! writer stops at the first contradiction that it meets, and the image is marked corrupt until it has been
//! checked.

mod common;

use std::sync::Arc;

use common::look;
use futures_lite::future::block_on;
use vellum_core::{
    Buffer, Disk, Error, ErrorKind, GuestOffset, ImageOffset, MemoryStorage, Result, SharedStorage, Storage,
    WriteFlags, ZeroFlags,
};
use vellum_format::qcow2::check::check;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create, grow, recover};
use vellum_format::report::Repair;

const CLUSTER: u64 = 4096;
/// What one L2 table maps.
const REACH: u64 = CLUSTER / 8 * CLUSTER;
const PLACE: u64 = 0x00FF_FFFF_FFFF_FE00;
const COPIED: u64 = 1 << 63;

fn options() -> CreateOptions {
    CreateOptions { size: 4 * REACH, cluster_size: CLUSTER, ..CreateOptions::without_journal() }
}

async fn open_as(image: &Arc<MemoryStorage>, read_only: bool) -> Result<Arc<Qcow2>> {
    let image: SharedStorage = image.clone();
    let header = Header::read(&*image).await?;
    let options = OpenOptions { read_only, journal_key: Some(1), ..OpenOptions::default() };
    Qcow2::open(header, Files { image, data_file: None, below: None }, options).await
}

async fn open(image: &Arc<MemoryStorage>) -> Result<Arc<Qcow2>> {
    open_as(image, false).await
}

async fn write(disk: &Qcow2, at: u64, byte: u8) -> Result<()> {
    disk.write(GuestOffset::new(at), Buffer::copy_of(&[byte; 4096]), WriteFlags::FUA).await
}

async fn read(disk: &Qcow2, at: u64) -> Result<Vec<u8>> {
    disk.read(GuestOffset::new(at), Buffer::zeroed(4096)).await.map(|bytes| bytes.to_vec())
}

async fn word(image: &MemoryStorage, at: u64) -> u64 {
    let read = image.read(ImageOffset::new(at), Buffer::zeroed(8)).await.unwrap();
    u64::from_be_bytes(read.slice().try_into().unwrap())
}

async fn put(image: &MemoryStorage, at: u64, value: u64) {
    image.write(ImageOffset::new(at), Buffer::copy_of(&value.to_be_bytes())).await.unwrap();
}

/// An image with data at the beginning and behind its first table.
async fn image(options: &CreateOptions) -> Arc<MemoryStorage> {
    let image = MemoryStorage::new("image");
    create(&*image, None, options).await.unwrap();
    let disk = open(&image).await.unwrap();
    for (at, byte) in [(0, 1), (CLUSTER, 2), (REACH, 3)] {
        write(&disk, at, byte).await.unwrap();
    }
    disk.close().await.unwrap();
    image
}

/// Where the entry of a guest cluster stands.
async fn entry(image: &MemoryStorage, guest: u64) -> u64 {
    let table = word(image, word(image, 40).await + guest / REACH * 8).await & PLACE;
    table + guest % REACH / CLUSTER * 8
}

const CORRUPT_BIT: u64 = 2;

/// After a request has failed because of a contradiction.
async fn is_stopped_and_marked(image: &Arc<MemoryStorage>, disk: &Qcow2, error: &Error, what: &str) {
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {}", error.chain());
    assert_eq!(word(image, 72).await & CORRUPT_BIT, CORRUPT_BIT, "{what}: the header does not say so");
    let before = image.content().to_vec();
    let elsewhere = GuestOffset::new(CLUSTER);
    let refused = [
        write(disk, CLUSTER, 9).await,
        disk.write_zeroes(elsewhere.span(CLUSTER), ZeroFlags::default()).await,
        disk.discard(elsewhere.span(CLUSTER), WriteFlags::default()).await,
        disk.flush().await,
        disk.close().await,
    ];
    for result in refused {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Corrupt, "{what}");
    }
    assert!(image.content().to_vec() == before, "{what}: something was written after that");
    let error = open(image).await.map(drop).unwrap_err().chain();
    assert!(error.contains("check -r all"), "{what}: {error}");
    let reader = open_as(image, true).await.unwrap();
    assert!(read(&reader, CLUSTER).await.unwrap() == [2; 4096], "{what}: what is sound can be read");
}

/// Entries of an L1 table that name something else than an L2 table. What is written through them would land
/// on refcounts, on the L1 table, on a snapshot's.
#[test]
fn nothing_is_written_through_a_table_that_is_none() {
    block_on(async {
        for (what, is_copied) in [
            ("refcount table", true),
            ("refcount block", true),
            ("refcount block", false),
            ("L1 table", true),
        ] {
            let image = image(&options()).await;
            let at = match what {
                "refcount table" => word(&image, 48).await,
                "refcount block" => word(&image, word(&image, 48).await).await,
                _ => word(&image, 40).await,
            };
            let l1 = word(&image, 40).await;
            put(&image, l1 + 2 * 8, at | if is_copied { COPIED } else { 0 }).await;
            let before = image.read(ImageOffset::new(at), Buffer::zeroed(4096)).await.unwrap().to_vec();
            let disk = open(&image).await.unwrap();
            write(&disk, CLUSTER, 2).await.unwrap();
            let error = write(&disk, 2 * REACH, 9).await.unwrap_err();
            is_stopped_and_marked(&image, &disk, &error, what).await;
            let after = image.read(ImageOffset::new(at), Buffer::zeroed(4096)).await.unwrap().to_vec();
            assert!(before == after, "{what}: it was overwritten");
        }
    });
}

#[test]
fn the_first_contradiction_is_the_last() {
    block_on(async {
        for what in ["points to the L1 table", "lies between two clusters", "has a refcount of zero"] {
            let image = image(&options()).await;
            let entry = entry(&image, 0).await;
            let host = word(&image, entry).await & PLACE;
            match what {
                "points to the L1 table" => put(&image, entry, word(&image, 40).await | COPIED).await,
                "lies between two clusters" => put(&image, entry, (host + 512) | COPIED).await,
                _ => {
                    let block = word(&image, word(&image, 48).await).await;
                    let zero = Buffer::zeroed(2);
                    image.write(ImageOffset::new(block + host / CLUSTER * 2), zero).await.unwrap();
                }
            }
            let disk = open(&image).await.unwrap();
            let error = if what == "has a refcount of zero" {
                // Found out when the cluster is to be given back.
                let discarded = disk
                    .discard(GuestOffset::ZERO.span(CLUSTER), WriteFlags::FUA)
                    .await
                    .and(disk.flush().await);
                match discarded {
                    Err(error) => error,
                    Ok(()) => disk.close().await.unwrap_err(),
                }
            } else {
                write(&disk, 0, 9).await.unwrap_err()
            };
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {}", error.chain());
            assert_eq!(
                word(&image, 72).await & CORRUPT_BIT,
                CORRUPT_BIT,
                "{what}: the header does not say so"
            );
            if what != "has a refcount of zero" {
                is_stopped_and_marked(&image, &disk, &error, what).await;
            }
        }
    });
}

/// A reader marks nothing, whatever it meets; and in a version 2 image there is nothing to mark.
#[test]
fn a_reader_changes_nothing() {
    block_on(async {
        for version in [2, 3] {
            let image = image(&CreateOptions { version, ..options() }).await;
            let entry = entry(&image, 0).await;
            let broken = word(&image, entry).await + 512;
            put(&image, entry, broken).await;
            let before = image.content().to_vec();
            let disk = open_as(&image, true).await.unwrap();
            assert_eq!(read(&disk, 0).await.unwrap_err().kind(), ErrorKind::Corrupt);
            disk.close().await.unwrap();
            assert!(image.content().to_vec() == before);
            if version == 2 {
                let disk = open(&image).await.unwrap();
                assert!(write(&disk, 0, 1).await.is_err() && write(&disk, CLUSTER, 1).await.is_err());
            }
        }
    });
}

/// The mark is taken off by a repair that leaves nothing wrong.
#[test]
fn a_mark_goes_when_nothing_is_wrong_any_more() {
    block_on(async {
        let image = image(&options()).await;
        let entry = entry(&image, 0).await;
        let good = word(&image, entry).await;
        put(&image, entry, good + 512).await;
        let disk = open(&image).await.unwrap();
        write(&disk, 0, 9).await.unwrap_err();
        drop(disk);
        let shared: SharedStorage = image.clone();
        let repair = async || {
            let header = Header::read(&*image).await.unwrap();
            check(&header, &shared, Repair::All, &mut |_| {}).await
        };
        let report = repair().await.unwrap();
        assert!(report.corruptions > 0 && word(&image, 72).await & CORRUPT_BIT != 0, "{report:?}");
        put(&image, entry, good).await;
        let report = repair().await.unwrap();
        assert!(report.is_clean() && word(&image, 72).await & CORRUPT_BIT == 0, "{report:?}");
        let disk = open(&image).await.unwrap();
        assert!(read(&disk, 0).await.unwrap() == [1; 4096]);
        write(&disk, 0, 9).await.unwrap();
        disk.close().await.unwrap();
    });
}

/// Bits without a meaning do not change what is read, as with QEMU; a check reports them, and a repair clears
/// them.
#[test]
fn reserved_bits_mean_nothing_and_are_reported() {
    block_on(async {
        let image = image(&options()).await;
        let (l1, l2) = (word(&image, 40).await, entry(&image, CLUSTER).await);
        for (at, bits) in [(l1, 1 << 60), (l1, 1), (l1, 1 << 8), (l2, 1 << 56), (l2, 0x80), (l2, 2)] {
            let good = word(&image, at).await;
            put(&image, at, good | bits).await;
            for read_only in [true, false] {
                let disk = open_as(&image, read_only).await.unwrap();
                assert!(read(&disk, 0).await.unwrap() == [1; 4096], "{bits:#x}");
                assert!(read(&disk, CLUSTER).await.unwrap() == [2; 4096], "{bits:#x}");
                disk.close().await.unwrap();
            }
            let shared: SharedStorage = image.clone();
            let (report, lines) = look(&shared).await.unwrap();
            assert_eq!(report.corruptions, 1, "{bits:#x}: {lines:?}");
            let header = Header::read(&*image).await.unwrap();
            let report = check(&header, &shared, Repair::All, &mut |_| {}).await.unwrap();
            assert!(report.is_clean() && report.corruptions_fixed == 1, "{bits:#x}: {report:?}");
            assert_eq!(word(&image, at).await, good, "{bits:#x}");
        }
    });
}

/// An autoclear bit stands for something that is maintained beside the disk. A writer that does not know
/// what, clears it.
#[test]
fn unknown_autoclear_bits_do_not_survive_a_change() {
    block_on(async {
        let shared = |image: &Arc<MemoryStorage>| image.clone() as SharedStorage;
        for what in ["write", "resize", "check -r leaks", "check -r all", "recover"] {
            let journal = (what == "recover").then_some(128 << 10);
            let image = image(&CreateOptions { journal, size: 4 * REACH - 512, ..options() }).await;
            if what == "recover" {
                let disk = open(&image).await.unwrap();
                write(&disk, 2 * REACH, 4).await.unwrap();
            }
            put(&image, 88, 1 << 5).await;
            let header = Header::read(&*image).await.unwrap();
            match what {
                "write" => write(&open(&image).await.unwrap(), 0, 1).await.unwrap(),
                "resize" => assert!(grow(&shared(&image), 4 * REACH).await.is_ok()),
                "check -r leaks" => {
                    assert!(check(&header, &shared(&image), Repair::Leaks, &mut |_| {}).await.is_ok());
                }
                "check -r all" => {
                    assert!(check(&header, &shared(&image), Repair::All, &mut |_| {}).await.is_ok());
                }
                _ => assert!(recover(&shared(&image)).await.is_ok()),
            }
            assert_eq!(word(&image, 88).await, 0, "{what}");
        }
    });
}

/// What the journal holds is the first thing that is wrong with an image that was not closed.
#[test]
fn a_repair_of_an_image_that_was_not_closed_replays_its_journal() {
    block_on(async {
        for repair in [Repair::Leaks, Repair::All] {
            let image = image(&CreateOptions { journal: Some(128 << 10), ..options() }).await;
            let disk = open(&image).await.unwrap();
            write(&disk, 2 * REACH, 4).await.unwrap();
            drop(disk); // killed
            let shared: SharedStorage = image.clone();
            let header = Header::read(&*image).await.unwrap();
            assert!(header.needs_replay());
            let error = check(&header, &shared, Repair::Nothing, &mut |_| {}).await.unwrap_err().chain();
            assert!(error.contains("vellum recover"), "{error}");
            let report = check(&header, &shared, repair, &mut |_| {}).await.unwrap();
            assert!(report.is_clean(), "{report:?}");
            let header = Header::read(&*image).await.unwrap();
            assert!(!header.needs_replay() && !header.is_dirty());
            let disk = open(&image).await.unwrap();
            assert!(read(&disk, 2 * REACH).await.unwrap() == [4; 4096]);
            disk.close().await.unwrap();
        }
    });
}
