//! Freed space is returned to the host in few, large pieces, and no flush of the guest waits for it. All of
//! it is counted.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::QcowSetup;
use vellum_core::{Buffer, GuestOffset, IoCounts, SharedDisk, SharedStorage, WriteFlags, ZeroFlags};
use vellum_format::native;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2};
use vellum_sim::{Drive, DriveOptions, World};

const CLUSTER: u64 = 64 << 10;
const CLUSTERS: u64 = 512;
const SIZE: u64 = 64 << 20;

/// Opens an image on the drive, of which all is allocated.
async fn full(disk: SharedDisk) -> SharedDisk {
    for at in (0..CLUSTERS * CLUSTER).step_by(1 << 20) {
        disk.write(GuestOffset::new(at), Buffer::copy_of(&[7; 1 << 20]), WriteFlags::default())
            .await
            .unwrap();
    }
    disk.flush().await.unwrap();
    disk
}

async fn qcow2(drive: &Arc<Drive>) -> SharedDisk {
    let image: SharedStorage = drive.clone();
    let header = Header::read(&*image).await.unwrap();
    let options = OpenOptions { journal_key: Some(1), ..OpenOptions::default() };
    Qcow2::open(header, Files { image, data_file: None, below: None }, options).await.unwrap()
}

async fn native(drive: &Arc<Drive>) -> SharedDisk {
    let options = native::OpenOptions { journal_key: Some(1), ..native::OpenOptions::default() };
    native::Native::open(drive.clone(), None, options).await.unwrap()
}

/// One way to free what is in a row.
#[derive(Debug, Clone, Copy)]
enum Free {
    Trim,
    Zeroes,
    /// A cluster at a time, from the end on.
    Singly,
}

async fn free(disk: &SharedDisk, how: Free) {
    let all = GuestOffset::ZERO.span(CLUSTERS * CLUSTER);
    match how {
        Free::Trim => disk.discard(all, WriteFlags::default()).await.unwrap(),
        Free::Zeroes => {
            let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
            disk.write_zeroes(all, flags).await.unwrap();
        }
        Free::Singly => {
            for cluster in (0..CLUSTERS).rev() {
                let part = GuestOffset::new(cluster * CLUSTER).span(CLUSTER);
                disk.discard(part, WriteFlags::default()).await.unwrap();
            }
        }
    }
}

/// Frees everything, flushes, and lets `later` do what comes after that. The punches of each of the three.
async fn punches(drive: &Arc<Drive>, disk: &SharedDisk, how: Free, is_tended: bool) -> [IoCounts; 3] {
    let mut counts = [IoCounts::default(); 3];
    let mark = drive.counts();
    free(disk, how).await;
    counts[0] = drive.counts_since(mark);
    let mark = drive.counts();
    disk.flush().await.unwrap();
    counts[1] = drive.counts_since(mark);
    let mark = drive.counts();
    match is_tended {
        true => while disk.tend(Duration::ZERO).await {},
        false => {
            let data = Buffer::copy_of(&[9; 512]);
            disk.write(GuestOffset::new(40 << 20), data, WriteFlags::default()).await.unwrap();
        }
    }
    counts[2] = drive.counts_since(mark);
    counts
}

fn check(name: &str, how: Free, counts: [IoCounts; 3]) {
    let [freeing, flush, later] = counts;
    let calls = |counts: &IoCounts| counts.zeroes + counts.discards;
    assert_eq!(calls(&freeing), 0, "{name}, {how:?}: the request itself punches nothing: {freeing:?}");
    assert_eq!(calls(&flush), 0, "{name}, {how:?}: a flush punches nothing: {flush:?}");
    // One for the run; a new table may need zeros of its own.
    assert!((1..=2).contains(&calls(&later)), "{name}, {how:?}: neighbours are punched together: {later:?}");
    assert!(later.bytes_zeroed + later.bytes_discarded >= CLUSTERS * CLUSTER, "{name}, {how:?}: {later:?}");
}

#[test]
fn neighbours_are_punched_together_and_no_flush_waits_for_it() {
    for how in [Free::Trim, Free::Zeroes, Free::Singly] {
        for is_tended in [false, true] {
            for journal in [None, Some(1 << 20)] {
                let options = CreateOptions { size: SIZE, journal, ..CreateOptions::default() };
                let setup = QcowSetup { name: "given back", options, has_base: false };
                let world = World::new(0);
                let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
                world.run(async {
                    let disk = full(qcow2(&drive).await).await;
                    if is_tended {
                        disk.tend(Duration::ZERO).await;
                    }
                    let counts = punches(&drive, &disk, how, is_tended).await;
                    check(&format!("journal {journal:?}, tended {is_tended}"), how, counts);
                    disk.flush().await.unwrap();
                    disk.close().await.unwrap();
                    let image: SharedStorage = drive.clone();
                    let (report, lines) = common::look(&image).await.unwrap();
                    assert!(report.is_clean(), "{lines:?}");
                });
            }
        }
    }
}

#[test]
fn units_in_a_row_are_punched_together_and_no_flush_waits_for_it() {
    let options = native::CreateOptions {
        size: SIZE,
        has_table: true,
        unit_size: Some(CLUSTER),
        uuid: Some([7; 16]),
        ..native::CreateOptions::default()
    };
    for how in [Free::Trim, Free::Zeroes, Free::Singly] {
        for is_tended in [false, true] {
            let world = World::new(0);
            let drive = Drive::new(&world, DriveOptions::default());
            world.run(async {
                native::create(&*drive, &options).await.unwrap();
                let disk = full(native(&drive).await).await;
                if is_tended {
                    while disk.tend(Duration::ZERO).await {}
                }
                let counts = punches(&drive, &disk, how, is_tended).await;
                check(&format!("native, tended {is_tended}"), how, counts);
                disk.close().await.unwrap();
            });
        }
    }
}

/// Space is returned even if no change follows: the close returns the rest.
#[test]
fn a_close_gives_back_what_is_left() {
    for journal in [None, Some(1 << 20)] {
        let options = CreateOptions { size: SIZE, journal, ..CreateOptions::default() };
        let setup = QcowSetup { name: "given back", options, has_base: false };
        let world = World::new(0);
        let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
        let empty = drive.content().len();
        world.run(async {
            let disk = full(qcow2(&drive).await).await;
            free(&disk, Free::Trim).await;
            disk.close().await.unwrap();
            let image: SharedStorage = drive.clone();
            let (report, lines) = common::look(&image).await.unwrap();
            assert!(report.is_clean(), "{lines:?}");
            let runs = image.runs(vellum_core::ImageOffset::ZERO.span(image.len())).await.unwrap();
            let data: u64 = runs.iter().filter(|run| run.is_data).map(|run| run.span.len()).sum();
            assert!(data <= empty + 4 * CLUSTER, "{data} bytes are left of {empty}");
        });
    }
}
