//! Which medium is taken for one, and work that is ended between two pieces.

use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::{Buffer, ImageOffset, WriteFlags};
use vellum_format::native;
use vellum_io::IoMode;
use vellum_sim::{Content, Drive, DriveOptions, Fault, Operation, Repeat, World};

use super::units::add_parts;
use super::*;

/// A medium of which one copy of the superblock is damaged, or lies in a sector that cannot be read, is the medium that it was.
/// What is there otherwise is not made into one.
#[test]
fn what_is_there_is_a_medium_or_is_kept() {
    const COPIES: [u64; 2] = [0, 4096];
    let world = World::new(1);
    let id = FastId::new([3; 16]).expect("it is not zero");
    let made = Drive::from_content(&world, Content::default(), DriveOptions::default());
    world.run(async {
        let storage: SharedStorage = made.clone();
        assert!(medium_there(&storage).await.expect("it is empty").is_none());
        create(&storage, 2 << 20, id).await.expect("it has space");
    });
    let found = |bad: &[u64], is_unreadable: bool| {
        let mut content = made.content();
        for at in bad.iter().filter(|_| !is_unreadable) {
            content.write(ImageOffset::new(at + 8), &[0x5A; 512]);
        }
        let drive = Drive::from_content(&world, content, DriveOptions::default());
        for at in bad.iter().filter(|_| is_unreadable) {
            let within = Some(ImageOffset::new(*at).span(512));
            drive.faults().add(Fault { within, repeat: Repeat::ForEver, ..Fault::nth(Operation::Read, 0) });
        }
        world.run(async {
            let storage: SharedStorage = drive;
            medium_there(&storage).await.map(|medium| medium.map(|medium| medium.id()))
        })
    };
    for is_unreadable in [false, true] {
        for bad in [&COPIES[..0], &COPIES[..1], &COPIES[1..]] {
            assert_eq!(found(bad, is_unreadable).expect("it opens"), Some(id), "{bad:?}, {is_unreadable}");
        }
        let error = found(&COPIES, is_unreadable).expect_err("none is left").chain();
        assert!(error.contains("not made anew") && error.contains("--salvage"), "{error}");
    }
    let mut content = Content::default();
    content.write(ImageOffset::ZERO, &[7; 512]);
    content.write(ImageOffset::new(4 << 20), &[7; 512]);
    let drive = Drive::from_content(&world, content, DriveOptions::default());
    world.run(async {
        let storage: SharedStorage = drive;
        let error = medium_there(&storage).await.expect_err("it is no medium").chain();
        assert!(error.contains("something else is there") && error.contains("blkdiscard"), "{error}");
    });
}

/// A move, and the way back, that are ended after their first piece have done all of it and nothing of the rest, and go on.
#[test]
fn long_work_ends_between_two_pieces() {
    const PIECE: u64 = 64 << 20;
    let dir = std::env::temp_dir().join(format!("vellum-tier-pieces-{}", std::process::id()));
    drop(std::fs::remove_dir_all(&dir));
    std::fs::create_dir_all(&dir).expect("a directory");
    let (image, path) = (dir.join("disk.vlm"), dir.join("fast"));
    vellum_io::run(IoMode::Threads, async || {
        let size = 3 * PIECE;
        let made = native::CreateOptions {
            size,
            has_table: true,
            unit_size: Some(64 << 10),
            ..native::CreateOptions::default()
        };
        let storage = File::create_new(&image, OpenOptions::writing()).await.expect("a file");
        native::create(&*storage, &made).await.expect("an image");
        drop(storage);
        let options = ImageOptions::default();
        let fast = FastFor { path: path.clone(), size: Some(8 << 20), budget: None };
        attach(&image, &fast, &options).await.expect("it is attached");
        // Two units in each piece; those of the first border are neighbours.
        let places = [0, PIECE - (64 << 10), PIECE, PIECE + (64 << 10), 2 * PIECE, 3 * PIECE - (64 << 10)];
        let chain = open_image(&image, &options).await.expect("it opens");
        for at in places {
            let data = Buffer::copy_of(&[9; 64 << 10]);
            chain.disk().write(GuestOffset::new(at), data, WriteFlags::default()).await.expect("a write");
        }
        chain.close().await.expect("it is closed");
        drop(chain);

        let all = Ranges { ranges: vec![(4096, size - 4096)], copies_base: false };
        let stop = AtomicBool::new(false);
        let seen = std::cell::RefCell::new(Vec::new());
        let ends = |total, done| {
            assert_eq!(total, size - 4096);
            seen.borrow_mut().push(done);
            stop.store(done >= PIECE - 4096, Ordering::Relaxed);
        };
        let watch = Watch { stop: &stop, progress: &ends };
        let moved = async |watch| move_away(&image, &path, (&all, false), &options, watch).await;
        let done = moved(watch).await.expect("some are moved");
        assert!(done.interrupted && (done.moved, done.zero) == (2, 1022), "{done:?}");
        assert_eq!(seen.take(), [0, PIECE - 4096]);
        stop.store(false, Ordering::Relaxed);
        let done = moved(Watch::nobody()).await.expect("the others are moved");
        assert!(!done.interrupted && (done.moved, done.there, done.zero) == (4, 2, 3 * 1022), "{done:?}");
        let facts = async || {
            let (_, facts) = status(&image, Some(&path), &options).await.expect("a status");
            facts.expect("it has a medium").moved
        };
        assert_eq!(facts().await, 6);

        let done = demote(&image, &path, &all, &options, watch).await.expect("some are home");
        assert!(done.interrupted && done.demoted == 2, "{done:?}");
        assert_eq!(facts().await, 4);
        let done = demote(&image, &path, &all, &options, Watch::nobody()).await.expect("all are home");
        assert!(!done.interrupted && done.demoted == 4, "{done:?}");
        // It does not need the medium any more.
        std::fs::remove_file(&path).expect("it is there");
        let chain = open_image(&image, &options).await.expect("it opens");
        for at in places {
            let read =
                chain.disk().read(GuestOffset::new(at), Buffer::zeroed(64 << 10)).await.expect("a read");
            assert!(read.to_vec().iter().all(|byte| *byte == 9), "at {at:#x}");
        }
        chain.close().await.expect("it is closed");
    })
    .expect("a worker");
    std::fs::remove_dir_all(&dir).expect("it is there");
}

/// The parts that could not be read are listed in order, and neighbours of two pieces as one part.
#[test]
fn parts_of_two_pieces_are_one() {
    let mut parts = vec![(0, 64), (128, 64)];
    add_parts(&mut parts, vec![(192, 64), (512, 64)]);
    assert_eq!(parts, [(0, 64), (128, 128), (512, 64)]);
    let mut parts = (0..LISTED_MAX as u64).map(|part| (part * 128, 64)).collect();
    add_parts(&mut parts, vec![(1 << 40, 64)]);
    assert_eq!(parts.len(), LISTED_MAX);
}
