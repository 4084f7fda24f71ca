//! Compressed clusters whose place is used again: nothing shows what was there before.

mod common;

use common::{QcowSetup, look};
use vellum_core::{Buffer, Disk as _, GuestOffset, SharedStorage, WriteFlags};
use vellum_format::image::Compressing as _;
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2};
use vellum_sim::{Drive, DriveOptions, World};

const CLUSTER: u64 = 64 << 10;

/// Stores a cluster of this byte compressed.
async fn pack(disk: &Qcow2, cluster: u64, byte: u8) {
    let data = Buffer::copy_of(&vec![byte; 64 << 10]);
    let packed = disk.compress(vec![(GuestOffset::new(cluster * CLUSTER), data)], None).await.unwrap();
    disk.write_compressed(packed).await.unwrap();
}

async fn read(disk: &Qcow2, cluster: u64) -> Vec<u8> {
    let buffer = Buffer::for_overwrite(64 << 10);
    disk.read(GuestOffset::new(cluster * CLUSTER), buffer).await.unwrap().to_vec()
}

#[test]
fn a_place_that_is_used_again_reads_as_what_is_there_now() {
    for journal in [None, Some(1 << 20)] {
        let options = CreateOptions { size: 8 << 20, journal, ..CreateOptions::default() };
        let setup = QcowSetup { name: "compressed", options, has_base: false };
        let world = World::new(0);
        let drive = Drive::from_content(&world, setup.empty_image(), DriveOptions::default());
        world.run(async {
            let image: SharedStorage = drive.clone();
            let header = Header::read(&*image).await.unwrap();
            let files = Files { image: image.clone(), data_file: None, below: None };
            let options = OpenOptions { journal_key: Some(1), ..OpenOptions::default() };
            let disk = Qcow2::open(header, files, options).await.unwrap();
            let mut is_reused = false;
            let mut places = std::collections::HashSet::new();
            for round in 1..40u8 {
                let cluster = u64::from(round % 3);
                let before = drive.counts().bytes_written;
                pack(&disk, cluster, round).await;
                assert!(drive.counts().bytes_written > before, "it is written");
                // Kept in memory, under its place.
                assert!(
                    read(&disk, cluster).await == vec![round; 64 << 10],
                    "journal {journal:?}, round {round}"
                );
                let len = image.len();
                is_reused |= !places.insert(len) && round > 8;
                let span = GuestOffset::new(cluster * CLUSTER).span(CLUSTER);
                disk.discard(span, WriteFlags::default()).await.unwrap();
                disk.flush().await.unwrap();
                while disk.tend(std::time::Duration::ZERO).await {}
                disk.flush().await.unwrap();
            }
            assert!(is_reused, "the image grows with every round");
            disk.close().await.unwrap();
            let (report, lines) = look(&image).await.unwrap();
            assert!(report.is_clean(), "{lines:?}");
        });
    }
}
