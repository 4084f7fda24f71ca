//! Work that is not done twice, and not at all where it was not requested. Counted.

mod common;

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use common::QcowSetup;
use vellum_core::{
    Buffer, Disk as _, GuestOffset, HostTally, ImageOffset, SharedStorage, Storage as _, WriteFlags,
    try_join_all,
};
use vellum_format::native::{self, Native};
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2};
use vellum_sim::{Content, Delay, Drive, DriveOptions, World};

const CLUSTER: usize = 64 << 10;

fn word(bytes: &[u8], at: u64) -> u64 {
    let at = usize::try_from(at).unwrap();
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & 0x00FF_FFFF_FFFF_FE00
}

fn drive(world: &World, content: Content) -> Arc<Drive> {
    let delay = Delay::fixed(Duration::from_millis(1));
    Drive::from_content(world, content, DriveOptions { delay, ..DriveOptions::default() })
}

async fn open(drive: &Arc<Drive>, tally: HostTally) -> Arc<Qcow2> {
    let image: SharedStorage = drive.clone();
    let header = Header::read(&*image).await.unwrap();
    let options = OpenOptions { journal_key: Some(1), tally, ..OpenOptions::default() };
    Qcow2::open(header, Files { image, data_file: None, below: None }, options).await.unwrap()
}

#[test]
fn requests_for_one_compressed_cluster_unpack_it_once() {
    let options = CreateOptions { size: 1 << 20, ..CreateOptions::without_journal() };
    let setup = QcowSetup { name: "compressed", options, has_base: false };
    let world = World::new(0);
    let drive = drive(&world, setup.empty_image());
    world.run(async {
        let disk = open(&drive, HostTally::default()).await;
        let plain: Vec<u8> = (0..CLUSTER).map(|i| u8::try_from(i / 512 % 251).unwrap()).collect();
        disk.write(GuestOffset::ZERO, Buffer::copy_of(&plain), WriteFlags::default()).await.unwrap();
        disk.close().await.unwrap();
        // As another program would have compressed it, where it lies.
        let bytes = drive.content().to_vec();
        let entry = word(&bytes, word(&bytes, 40));
        let at = word(&bytes, entry);
        let mut packer = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
        packer.write_all(&plain).unwrap();
        let packed = packer.finish().unwrap();
        drive.write(ImageOffset::new(at), Buffer::copy_of(&packed)).await.unwrap();
        let sectors = (packed.len() as u64).div_ceil(512) - 1;
        let new = 1u64 << 62 | sectors << (62 - (16 - 8)) | at;
        drive.write(ImageOffset::new(entry), Buffer::copy_of(&new.to_be_bytes())).await.unwrap();

        let tally = HostTally::default();
        let disk = open(&drive, tally.clone()).await;
        let reads = (0..CLUSTER / 4096).map(|block| {
            let at = GuestOffset::new(block as u64 * 4096);
            disk.read(at, Buffer::zeroed(4096))
        });
        let got = try_join_all(reads).await.unwrap();
        for (block, got) in got.iter().enumerate() {
            assert!(got.slice() == &plain[block * 4096..(block + 1) * 4096], "{block}");
        }
        assert_eq!(tally.data.counts().reads, 1, "of 16 requests at once, one reads and unpacks");
        disk.close().await.unwrap();
    });
}

#[test]
fn opening_a_disk_and_writing_nothing_writes_nothing() {
    let world = World::new(0);
    for journal in [None, Some(1 << 20)] {
        let options = CreateOptions { size: 1 << 20, journal, ..CreateOptions::without_journal() };
        let setup = QcowSetup { name: "untouched", options, has_base: false };
        let drive = drive(&world, setup.empty_image());
        world.run(async {
            let before = drive.counts();
            let disk = open(&drive, HostTally::default()).await;
            disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await.unwrap();
            disk.flush().await.unwrap();
            disk.tend(Duration::ZERO).await;
            disk.close().await.unwrap();
            let counts = drive.counts_since(before);
            assert_eq!((counts.writes, counts.zeroes, counts.discards), (0, 0, 0), "{journal:?}: {counts:?}");
        });
    }
    let drive = drive(&world, Content::default());
    let options =
        native::CreateOptions { size: 1 << 20, has_table: true, uuid: Some([7; 16]), ..Default::default() };
    world.run(async {
        native::create(&*drive, &options).await.unwrap();
        let before = drive.counts();
        let open = native::OpenOptions { journal_key: Some(1), ..Default::default() };
        let disk = Native::open(drive.clone(), None, open).await.unwrap();
        disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await.unwrap();
        disk.flush().await.unwrap();
        disk.tend(Duration::ZERO).await;
        disk.close().await.unwrap();
        let counts = drive.counts_since(before);
        assert_eq!((counts.zeroes, counts.discards), (0, 0), "{counts:?}");
        assert!(counts.bytes_written <= 8192, "{counts:?}");
    });
}
