//! Models of drives: the duration of a request where arithmetic gives it, and that the order of the requests
//! is the medium's.

use std::sync::Arc;
use std::time::Duration;

use vellum_core::{Buffer, ImageOffset, Limits, Storage, Zeroes};
use vellum_sim::model::{Medium, MediumCounts};
use vellum_sim::{Delay, Drive, DriveOptions, History, World};

use super::{ForgetfulDrive, Hdd, HddParameters, HostFile, HostLayout, Ssd, SsdParameters};

const KIB: usize = 1 << 10;

fn drive(world: &World, medium: &Medium) -> Arc<Drive> {
    let delay = Delay::medium(medium.clone());
    Drive::new(world, DriveOptions { delay, history: History::Pending, ..DriveOptions::default() })
}

fn hdd(parameters: HddParameters) -> (World, Medium, Arc<Drive>) {
    let (world, medium) = (World::new(0), Medium::new(Hdd::new(parameters)));
    let drive = drive(&world, &medium);
    (world, medium, drive)
}

async fn write(drive: &Drive, at: u64, len: usize) {
    drive.write(ImageOffset::new(at), Buffer::zeroed(len)).await.unwrap();
}

/// All at once; how long it took, and in which order they ended.
fn writes_at_once(world: &World, drive: &Arc<Drive>, places: &[u64], len: usize) -> (Duration, Vec<u64>) {
    let ended = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let begun = world.now();
    world.run(async {
        let spawn = |at: &u64| {
            let (drive, ended, at) = (drive.clone(), ended.clone(), *at);
            world.spawn(async move {
                write(&drive, at, len).await;
                ended.borrow_mut().push(at);
            })
        };
        for task in places.iter().map(spawn).collect::<Vec<_>>() {
            task.await;
        }
    });
    (world.now() - begun, ended.take())
}

/// One after another and each flushed, each behind the last: a turn for each, for the sector has just passed
/// when the next one comes, and the transfer.
#[test]
fn flushed_writes_in_a_row_wait_for_a_turn_each() {
    let parameters = HddParameters::desktop_7200();
    let turn = parameters.turn;
    let (world, medium, drive) = hdd(parameters);
    world.run(async {
        for i in 0..64 {
            write(&drive, i * 65_536, 64 * KIB).await;
            drive.flush().await.unwrap();
        }
    });
    let transfer = Duration::from_nanos(655_360);
    let each = world.now() / 64;
    assert!(each > turn && each < turn + 2 * transfer, "{each:?}");
    let counts = medium.counts();
    let expected = MediumCounts {
        writes: 64,
        bytes_written: 64 * 65_536,
        flushes: 64,
        busy: counts.busy,
        ..MediumCounts::default()
    };
    assert_eq!(counts, expected, "each began where the last one had ended");
}

/// What waits together in the queue of a drive without a cache is one operation.
#[test]
fn neighbours_in_the_queue_are_joined_and_go_at_the_speed_of_the_medium() {
    let (world, medium, drive) = hdd(HddParameters::server_10k());
    let places: Vec<u64> = (0..16).map(|i| i * 65_536).collect();
    let (took, _) = writes_at_once(&world, &drive, &places, 64 * KIB);
    let counts = medium.counts();
    assert_eq!((counts.writes, counts.bytes_written), (2, 1 << 20), "512 KiB at most");
    let transfer = Duration::from_nanos((1 << 20) * 1_000_000_000 / 75_000_000);
    assert!(took > transfer && took < transfer + Duration::from_millis(8), "{took:?}");
}

#[test]
fn the_arm_goes_up_and_begins_again_at_the_bottom() {
    let (world, medium, drive) = hdd(HddParameters::server_10k());
    let gib = 1u64 << 30;
    // The first one moves the arm; what comes later is ordered by place.
    let (_, ended) =
        writes_at_once(&world, &drive, &[20 * gib, 30 * gib, 5 * gib, 25 * gib, 10 * gib], 4 * KIB);
    assert_eq!(ended, [5, 10, 20, 25, 30].map(|at| at * gib), "all were ready before the arm moved");
    assert_eq!(medium.counts().seek_bytes, 30 * gib - 4 * 4096);
    let (_, ended) = writes_at_once(&world, &drive, &[gib, 40 * gib, 35 * gib, 2 * gib], 4 * KIB);
    assert_eq!(ended, [35, 40, 1, 2].map(|at| at * gib));
}

/// A cache answers at once and writes in the order of places when it is flushed, neighbours joined.
#[test]
fn a_flush_writes_the_cache_in_order() {
    let (world, medium, drive) = hdd(HddParameters::desktop_7200());
    let gib = 1u64 << 30;
    let (took, _) = writes_at_once(&world, &drive, &[9 * gib, gib, 9 * gib + 4096, 5 * gib], 4 * KIB);
    assert!(took < Duration::from_millis(1), "{took:?}");
    assert_eq!(medium.counts(), MediumCounts::default());
    world.run(drive.flush()).unwrap();
    let counts = medium.counts();
    assert_eq!((counts.writes, counts.seek_bytes), (3, 9 * gib - 2 * 4096));
    let begun = world.now();
    world.run(drive.flush()).unwrap();
    assert_eq!(world.now() - begun, HddParameters::desktop_7200().flush_overhead, "nothing is left");
}

#[test]
fn a_full_cache_makes_writes_wait() {
    let parameters = HddParameters { cache_bytes: 64 << 10, ..HddParameters::desktop_7200() };
    let (world, medium, drive) = hdd(parameters);
    world.run(async {
        for i in 0..32u64 {
            write(&drive, i << 30, 4 * KIB).await;
        }
    });
    let written = medium.counts().writes;
    assert!((12..=16).contains(&written), "the rest fits: {written}");
    assert!(world.now() > Duration::from_millis(50));
}

/// Far is slower than near, and nothing is slower than all the way and a turn.
#[test]
fn seeks_grow_with_the_distance() {
    let mut last = Duration::ZERO;
    for distance in [0, 1u64 << 22, 1 << 30, 20 << 30, 60 << 30] {
        let parameters = HddParameters { turn: Duration::from_micros(10), ..HddParameters::server_10k() };
        let parameters = HddParameters { media_rate: 45_000_000_000, ..parameters };
        let longest = parameters.overhead + parameters.write_seek.full + Duration::from_micros(20);
        let (world, _, drive) = hdd(parameters);
        world.run(write(&drive, distance, 512));
        assert!(world.now() > last && world.now() <= longest, "{distance}: {:?}", world.now());
        last = world.now() + Duration::from_micros(10);
    }
}

/// A flush that is requested while one runs shares the next: eight tasks that write and flush need far less
/// than eight times as long.
#[test]
fn flushes_are_shared() {
    for medium in [Medium::new(Hdd::new(HddParameters::desktop_7200())), ssd()] {
        let world = World::new(0);
        let drive = drive(&world, &medium);
        world.run(async {
            let spawn = |guest: u64| {
                let drive = drive.clone();
                world.spawn(async move {
                    for i in 0..32 {
                        write(&drive, (guest * 32 + i) << 16, 64 * KIB).await;
                        drive.flush().await.unwrap();
                    }
                })
            };
            for guest in (0..8).map(spawn).collect::<Vec<_>>() {
                guest.await;
            }
        });
        let flushes = medium.counts().flushes;
        assert!((32..=8 * 32 / 3).contains(&flushes), "{flushes}");
    }
}

fn ssd() -> Medium {
    Medium::new(Ssd::new(SsdParameters::consumer_sata()))
}

#[test]
fn an_ssd_answers_at_once_and_flushes_what_it_has_to() {
    let (world, medium) = (World::new(0), ssd());
    let drive = drive(&world, &medium);
    let parameters = SsdParameters::consumer_sata();
    let time = |what: &str| {
        let begun = world.now();
        world.run(async {
            match what {
                "write" => write(&drive, 1 << 30, 4 * KIB).await,
                "read" => drop(drive.read(ImageOffset::ZERO, Buffer::zeroed(4 * KIB)).await.unwrap()),
                _ => drive.flush().await.unwrap(),
            }
        });
        world.now() - begun
    };
    let link = Duration::from_nanos(16_384);
    assert_eq!(time("write"), parameters.write_latency + link);
    assert_eq!(time("read"), parameters.read_latency + link);
    let flush = time("flush");
    assert_eq!(flush, parameters.flush_base, "a page is programmed by now");
    let (took, _) = writes_at_once(&world, &drive, &(0..256).map(|i| i << 20).collect::<Vec<_>>(), 1 << 20);
    let link = Duration::from_nanos((256u64 << 20) * 4);
    assert!(took >= link && took < link + Duration::from_millis(1), "the link is what limits: {took:?}");
}

/// The same requests, the same times.
#[test]
fn a_run_can_be_repeated() {
    let run = || {
        let (world, medium, drive) = hdd(HddParameters::server_10k());
        let mut random = vellum_core::Random::from_seed(3);
        let places: Vec<u64> = (0..64).map(|_| random.below(1 << 20) << 12).collect();
        let (took, ended) = writes_at_once(&world, &drive, &places, 4 * KIB);
        (took, ended, medium.counts(), world.digest())
    };
    assert_eq!(run(), run());
}

/// A file that grows costs two flushes of the drive each time, one that does not costs one; guests share
/// commits.
#[test]
fn a_growing_file_flushes_twice() {
    let (world, medium) = (World::new(0), ssd());
    let volume = drive(&world, &medium);
    let layout =
        HostLayout { journal: ImageOffset::new(1 << 20).span(1 << 20), file: ImageOffset::new(1 << 30) };
    let file = HostFile::new(volume.clone(), layout);
    let write_and_flush = async |at: u64| {
        let before = volume.counts();
        file.write(ImageOffset::new(at), Buffer::copy_of(&[7; 4096])).await.unwrap();
        file.flush().await.unwrap();
        let counts = volume.counts() - before;
        (counts.flushes, counts.writes)
    };
    world.run(async {
        for i in 0..200 {
            assert_eq!(write_and_flush(i * 4096).await, (2, 3), "it grows");
        }
        assert_eq!(write_and_flush(0).await, (1, 1), "it is there");
        assert_eq!(write_and_flush(1 << 20).await, (2, 3), "it grows, with a hole");
        assert_eq!(write_and_flush(900 << 10).await, (2, 3), "the hole gets a block");
        assert_eq!(write_and_flush(900 << 10).await, (1, 1));
        file.preallocate(ImageOffset::new(2 << 20).span(1 << 20)).await.unwrap();
        assert_eq!(write_and_flush(900 << 10).await, (2, 3), "there is more of the file");
        assert_eq!(write_and_flush(2 << 20).await, (2, 3), "it was there, and not written");
        assert_eq!(write_and_flush(2 << 20).await, (1, 1));
        file.write_zeroes(ImageOffset::new(2 << 20).span(4096), Zeroes::Allocated).await.unwrap();
        assert_eq!(write_and_flush(2 << 20).await, (2, 3), "it was, and is zero without being written");
        file.write(ImageOffset::new(3 << 20), Buffer::zeroed(1 << 20)).await.unwrap();
        file.flush().await.unwrap();
        assert_eq!(write_and_flush((3 << 20) + 8192).await, (1, 1), "zeros were written there");
    });
    assert_eq!((file.commits(), file.len()), (206, 4 << 20));
    let read = world.run(file.read(ImageOffset::new(4096), Buffer::zeroed(512))).unwrap();
    assert_eq!(read.to_vec(), [7; 512]);
    let before = (file.commits(), volume.counts());
    world.run(async {
        let spawn = |guest: u64| {
            let file = file.clone();
            world.spawn(async move {
                for i in 0..16 {
                    let at = ImageOffset::new(((guest + 1) << 24) + (i << 12));
                    file.write(at, Buffer::zeroed(4096)).await.unwrap();
                    file.flush().await.unwrap();
                }
            })
        };
        for guest in (0..8).map(spawn).collect::<Vec<_>>() {
            guest.await;
        }
    });
    let (commits, flushes) = (file.commits() - before.0, volume.counts_since(before.1).flushes);
    assert!(commits <= 8 * 16 / 3 && flushes <= 2 * commits, "{commits} commits, {flushes} flushes");
}

/// It takes the time of its model and keeps what it says it keeps.
#[test]
fn a_forgetful_drive_keeps_its_beginning() {
    let world = World::new(0);
    let medium = Medium::new(Hdd::new(HddParameters::server_10k()));
    let limits = Limits { fixed_len: true, ..Limits::plain() };
    let drive = ForgetfulDrive::new(&world, medium.clone(), limits, 1 << 40, 6000);
    let read = async |at: u64| drive.read(ImageOffset::new(at), Buffer::zeroed(4096)).await.unwrap().to_vec();
    world.run(async {
        drive.write(ImageOffset::new(4096), Buffer::copy_of(&[7; 4096])).await.unwrap();
        drive.write(ImageOffset::new(1 << 39), Buffer::copy_of(&[7; 4096])).await.unwrap();
        assert_eq!(read(4096).await, [[7; 1904].as_slice(), &[0; 2192]].concat());
        assert_eq!(read(1 << 39).await, [0; 4096]);
        drive.write_zeroes(ImageOffset::new(4096).span(512), Zeroes::Allocated).await.unwrap();
        assert_eq!(read(4096).await[..513], [[0; 512].as_slice(), &[7]].concat());
    });
    assert_eq!(medium.counts().operations(), 6);
    assert_eq!((drive.counts().writes, drive.counts().reads, drive.len()), (2, 3, 1 << 40));
}
