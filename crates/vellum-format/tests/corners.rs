//! Corner cases in which bytes were lost once, or could have been: each test tells the story of one.

mod common;

use std::time::Duration;

use common::{QcowSetup, busy_drive, look};
use vellum_core::{
    Buffer, Disk, Extent, GuestOffset, GuestSpan, ImageOffset, Place, Random, SharedStorage, WriteFlags,
    ZeroFlags,
};
use vellum_format::qcow2::{CreateOptions, Files, Header, OpenOptions, Qcow2, create};
use vellum_sim::{Content, Drive, DriveOptions, FaultPlan, Operation, World};

fn whole(value: u8) -> Buffer {
    Buffer::copy_of(&[value; 512])
}

/// An image with more pages of refcounts than are kept in memory: 64 clusters of 512 bytes to a page, 1024
/// pages. All of its disk is allocated but the last 1000 clusters.
const FULL: u64 = 70_000 * 512;

fn many_refcounts() -> (QcowSetup, Content) {
    let size = FULL + 1000 * 512;
    let options =
        CreateOptions { size, cluster_size: 512, refcount_bits: 64, ..CreateOptions::without_journal() };
    let setup = QcowSetup { name: "many refcounts", options, has_base: false };
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

/// The allocator looks for a free cluster from the beginning. More pages are full than fit in memory; it must
/// get past them all the same, and not read them over and over for each cluster that was freed.
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

/// Two writers need the same page of refcounts. The first gets it, takes the last free cluster of it, and has
/// the page written and evicted. What the second one's read brings then must not be the page as it was
/// before.
#[test]
fn a_page_of_refcounts_that_comes_late_gives_no_cluster_away_twice() {
    let (setup, full) = many_refcounts();
    for seed in 0..6 {
        let world = World::new(seed);
        let drive = busy_drive(&world, full.clone(), FaultPlan::none());
        world.run(async {
            let disk = setup.open(&drive).await.unwrap();
            let first_page = refcounts_of_the_free_cluster(&drive.content());
            let (ours, theirs) = (GuestOffset::new(FULL), GuestOffset::new(FULL + 500 * 512));
            let hold = drive.hold_within(Operation::Read, first_page.span(512));
            let write = |at: GuestOffset, value: u8| {
                let disk = disk.clone();
                world.spawn(async move { disk.write(at, whole(value), WriteFlags::FUA).await.unwrap() })
            };
            let (first, second) = (write(ours, 2), write(theirs, 3));
            hold.caught(1).await;
            assert!(hold.release_one());
            // One of them has its page; if the other reads it all the same, that takes its time.
            while !first.is_finished() && !second.is_finished() {
                world.sleep(Duration::from_millis(1)).await;
            }
            // The cursor goes to the end, and with it what is kept in memory.
            disk.write(ours + 512, Buffer::copy_of(&[4; 400 * 512]), WriteFlags::FUA).await.unwrap();
            hold.release();
            first.await;
            second.await;
            // Something on that page is freed, and the allocator goes there again.
            disk.discard(GuestOffset::ZERO.span(8 * 512), WriteFlags::FUA).await.unwrap();
            let last = GuestOffset::new(FULL + 600 * 512);
            disk.write(last, Buffer::copy_of(&[5; 16 * 512]), WriteFlags::FUA).await.unwrap();
            let read = async |at: GuestOffset| disk.read(at, Buffer::zeroed(1)).await.unwrap().slice()[0];
            assert_eq!((read(ours).await, read(theirs).await), (2, 3), "two guests have one cluster");
            disk.close().await.unwrap();
            let image: SharedStorage = drive.clone();
            let (report, lines) = look(&image).await.unwrap();
            assert!(report.is_clean(), "{lines:?}");
        });
    }
}

/// A guest writes a cluster in place, and before that has ended it zeroes the cluster. Which of the two comes
/// first is open, but a raw data file must have them in the same order as the disk.
#[test]
fn a_raw_data_file_reads_as_the_disk_does_after_a_race() {
    let options = CreateOptions {
        size: 8192,
        cluster_size: 4096,
        data_file: Some("data".to_owned()),
        data_file_raw: true,
        ..CreateOptions::without_journal()
    };
    for may_unmap in [false, true] {
        let world = World::new(0);
        let new_drive = || busy_drive(&world, Content::default(), FaultPlan::none());
        let (image, data) = (new_drive(), new_drive());
        world.run(async {
            create(&*image, Some(&(data.clone() as SharedStorage)), &options).await.unwrap();
            let header = Header::read(&*image).await.unwrap();
            let files = Files { image: image.clone(), data_file: Some(data.clone()), below: None };
            let disk = Qcow2::open(header, files, OpenOptions::default()).await.unwrap();
            let write = async |value| {
                let data = Buffer::copy_of(&[value; 4096]);
                disk.write(GuestOffset::ZERO, data, WriteFlags::default()).await.unwrap();
            };
            write(1).await;
            let hold = data.hold(Operation::Write);
            let writer = world.spawn({
                let disk = disk.clone();
                async move {
                    let data = Buffer::copy_of(&[2; 4096]);
                    disk.write(GuestOffset::ZERO, data, WriteFlags::default()).await.unwrap();
                }
            });
            hold.caught(1).await;
            let zeroer = world.spawn({
                let disk = disk.clone();
                let flags = ZeroFlags { may_unmap, ..ZeroFlags::default() };
                async move { disk.write_zeroes(GuestOffset::ZERO.span(4096), flags).await.unwrap() }
            });
            world.sleep(Duration::from_millis(50)).await;
            hold.release();
            writer.await;
            zeroer.await;
            let in_the_file = || {
                let mut bytes = vec![9; 4096];
                data.content().read(ImageOffset::ZERO, &mut bytes);
                bytes
            };
            let read = async || disk.read(GuestOffset::ZERO, Buffer::zeroed(4096)).await.unwrap().to_vec();
            assert!(read().await == in_the_file(), "may_unmap {may_unmap}");
            write(3).await;
            assert!(read().await == in_the_file() && in_the_file() == [3; 4096], "may_unmap {may_unmap}");
            disk.close().await.unwrap();
        });
    }
}

/// Where the refcount of the first free cluster stands: 64 bits each, blocks of 64.
fn refcounts_of_the_free_cluster(image: &Content) -> ImageOffset {
    let word = |at: u64| {
        let mut bytes = [0; 8];
        image.read(ImageOffset::new(at), &mut bytes);
        u64::from_be_bytes(bytes)
    };
    let table = word(48);
    let block =
        (0..).map(|index| word(table + index * 8)).find(|block| (0..64).any(|i| word(block + i * 8) == 0));
    ImageOffset::new(block.unwrap())
}

/// A question about a run that has no tables costs a look per table that is missing, not per cluster; where
/// there is a table, others have their turn after 512 clusters.
#[test]
fn the_map_of_an_empty_disk_comes_at_once_and_that_of_a_full_one_yields() {
    let options = CreateOptions { size: 1 << 40, cluster_size: 4096, ..CreateOptions::without_journal() };
    let setup = QcowSetup { name: "an empty TiB", options, has_base: false };
    let world = World::new(0);
    let drive = Drive::new(&world, DriveOptions::default());
    world.run(async {
        create(&*drive, None, &setup.options).await.unwrap();
        let disk = setup.open(&drive).await.unwrap();
        let whole = GuestOffset::ZERO.span(1 << 40);
        let mut map = disk.map(whole);
        let extents = futures_lite::future::poll_once(&mut map).await.expect("it waits for nothing").unwrap();
        assert_eq!(extents.iter().map(|extent| extent.span).collect::<Vec<_>>(), [whole]);
        drop(map);
        // Two tables of 2 MiB each, and nothing between.
        for at in [0, 64 << 20] {
            disk.write(GuestOffset::new(at), self::whole(1), WriteFlags::default()).await.unwrap();
        }
        let extents = disk.map(whole).await.unwrap();
        let ends: Vec<_> = extents.iter().map(|extent| extent.span.end().bytes()).collect();
        assert_eq!(ends, [4096, 64 << 20, (64 << 20) + 4096, 1 << 40]);
        let mut map = disk.map(GuestOffset::ZERO.span(2 << 20));
        assert!(futures_lite::future::poll_once(&mut map).await.is_some(), "512 clusters");
        drop(map);
        let mut map = disk.map(GuestOffset::ZERO.span(3 << 20));
        assert!(futures_lite::future::poll_once(&mut map).await.is_none(), "more");
        map.await.unwrap();
        disk.close().await.unwrap();
    });
}

/// Where each sector of a run is, of as many looks as it takes.
async fn places(disk: &Qcow2, at: u64, len: u64) -> Vec<String> {
    let mut rest = GuestOffset::new(at).span(len);
    let mut sectors = Vec::new();
    while !rest.is_empty() {
        for Extent { span, place } in disk.map(rest).await.unwrap() {
            sectors.extend((0..span.len()).step_by(512).map(|skip| match &place {
                Place::Data { at, .. } => format!("data at {}", (*at + skip).bytes()),
                place => format!("{place:?}"),
            }));
            rest = GuestSpan::between(span.end(), rest.end());
        }
    }
    sectors
}

/// A run of a cluster's length over two clusters, of which neither has a table: a page of the mapping that is not there is not waited for.
#[test]
fn a_short_run_over_two_clusters_without_a_table_is_read() {
    let options = CreateOptions { size: 16 << 20, cluster_size: 4096, ..CreateOptions::without_journal() };
    let setup = QcowSetup { name: "without tables", options, has_base: false };
    let world = World::new(1);
    let drive = Drive::new(&world, DriveOptions::default());
    world.run(async {
        create(&*drive, None, &setup.options).await.unwrap();
        let disk = setup.open(&drive).await.unwrap();
        let table = 4096 / 8 * 4096;
        disk.write(GuestOffset::ZERO, whole(7), WriteFlags::default()).await.unwrap();
        // Within the table, from it into what has none, within what has none, and at the end.
        for (at, len) in
            [(2048, 4096), (table - 512, 1024), (table - 2048, 4096), (table + 512, 4096), (table + 512, 512)]
        {
            let span = GuestOffset::new(at).span(len);
            let buffer = Buffer::zeroed(usize::try_from(len).unwrap());
            let read = disk.read(span.start(), buffer).await.unwrap().to_vec();
            assert_eq!(read, vec![0; read.len()], "{at}");
            assert!(!disk.map(span).await.unwrap().is_empty(), "{at}");
        }
    });
}

/// A long run is looked up page by page, and neighbours in one step; a run within a cluster is not. Both say the same.
#[test]
fn a_look_at_many_clusters_says_what_looks_at_each_of_them_say() {
    const SIZE: u64 = 24 << 20;
    for (seed, cluster_size, version, extended_l2) in
        [(1, 4096, 2, false), (2, 4096, 3, false), (3, 512, 3, false), (4, 65536, 3, true)]
    {
        let options = CreateOptions {
            size: SIZE,
            cluster_size,
            version,
            extended_l2,
            ..CreateOptions::without_journal()
        };
        let setup = QcowSetup { name: "in pieces", options, has_base: false };
        let world = World::new(seed);
        let drive = Drive::new(&world, DriveOptions::default());
        let mut random = Random::from_seed(seed);
        world.run(async {
            create(&*drive, None, &setup.options).await.unwrap();
            let disk = setup.open(&drive).await.unwrap();
            for _ in 0..300 {
                let at = random.below(SIZE / 512) * 512;
                let most = if random.below(3) == 0 { 2048 } else { 64 };
                let len = (random.below(most) + 1) * 512;
                let span = GuestOffset::new(at).span(len.min(SIZE - at));
                let zeros = |may_unmap| ZeroFlags { may_unmap, ..ZeroFlags::default() };
                match random.below(6) {
                    0 => disk.write_zeroes(span, zeros(true)).await.unwrap(),
                    1 => disk.write_zeroes(span, zeros(false)).await.unwrap(),
                    2 => disk.discard(span, WriteFlags::default()).await.unwrap(),
                    _ => {
                        let data = Buffer::copy_of(&vec![7; usize::try_from(span.len()).unwrap()]);
                        disk.write(span.start(), data, WriteFlags::default()).await.unwrap();
                    }
                }
            }
            let mut each = Vec::new();
            for at in (0..SIZE).step_by(usize::try_from(cluster_size).unwrap()) {
                each.extend(places(&disk, at, cluster_size).await);
            }
            assert_eq!(places(&disk, 0, SIZE).await, each, "{cluster_size}");
            for _ in 0..30 {
                let first = random.below(SIZE / 512);
                let count = random.below(SIZE / 512 - first) + 1;
                let found = places(&disk, first * 512, count * 512).await;
                let [first, count] = [first, count].map(|number| usize::try_from(number).unwrap());
                assert_eq!(found, each[first..first + count], "{cluster_size} {first} {count}");
            }
            disk.close().await.unwrap();
        });
    }
}
