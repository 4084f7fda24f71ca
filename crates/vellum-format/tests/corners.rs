//! Corners in which bytes were lost once, or could have been: each test tells the story of one.

mod common;

use std::time::Duration;

use common::{Setup, busy_drive, look};
use vellum_core::{Buffer, Disk, GuestOffset, SharedStorage, WriteFlags};
use vellum_format::qcow2::{CreateOptions, create};
use vellum_sim::{Content, Drive, DriveOptions, FaultPlan, World};

fn whole(value: u8) -> Buffer {
    Buffer::copy_of(&[value; 512])
}

/// An image with more pages of refcounts than are kept in memory: 64 clusters of 512 bytes to a page, 1024 pages. All of
/// its disk is allocated but the last 1000 clusters.
const FULL: u64 = 70_000 * 512;

fn many_refcounts() -> (Setup, Content) {
    let size = FULL + 1000 * 512;
    let options = CreateOptions { size, cluster_size: 512, refcount_bits: 64, ..CreateOptions::default() };
    let setup = Setup { name: "many refcounts", options, has_base: false };
    let world = World::new(0);
    let drive = Drive::new(&world, DriveOptions::default());
    world.run(async {
        create(&*drive, None, &setup.options).await.unwrap();
        let disk = setup.open(&drive).await.unwrap();
        for at in (0..FULL).step_by(1 << 20) {
            let len = (FULL - at).min(1 << 20);
            let data = Buffer::copy_of(&vec![1; usize::try_from(len).unwrap()]);
            disk.write(GuestOffset::new(at), data, WriteFlags::default()).await.unwrap();
        }
        disk.close().await.unwrap();
    });
    (setup, drive.content())
}

/// The allocator looks for a free cluster from the beginning. More pages are full than fit in memory; it must get past
/// them all the same, and not read them over and over for each cluster that was freed.
#[test]
fn a_free_cluster_is_found_behind_more_refcounts_than_memory_holds() {
    let (setup, full) = many_refcounts();
    let world = World::new(0);
    let drive = busy_drive(&world, full, FaultPlan::none());
    world.run(async {
        let disk = setup.open(&drive).await.unwrap();
        let writer = world.spawn({
            let disk = disk.clone();
            async move {
                let data = Buffer::copy_of(&[2; 500 * 512]);
                disk.write(GuestOffset::new(FULL), data, WriteFlags::FUA).await.unwrap();
            }
        });
        world.sleep(Duration::from_secs(60)).await;
        assert!(writer.is_finished(), "after {:?}", drive.counts());
        let mark = drive.counts();
        for round in 0..8 {
            let (old, new) = (GuestOffset::new(round * 512), GuestOffset::new(FULL + (500 + round) * 512));
            disk.discard(old.span(512), WriteFlags::FUA).await.unwrap();
            // The first takes what was freed, the second has to look behind everything again.
            disk.write(new, whole(3), WriteFlags::FUA).await.unwrap();
            disk.write(new + 100 * 512, whole(4), WriteFlags::FUA).await.unwrap();
        }
        let reads = drive.counts_since(mark).reads;
        assert!(reads < 200, "{reads} reads");
        disk.close().await.unwrap();
        let image: SharedStorage = drive.clone();
        let (report, lines) = look(&image).await.unwrap();
        assert!(report.is_clean(), "{lines:?}");
    });
}
