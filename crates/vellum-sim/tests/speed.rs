//! How fast crash images are built and compared: printed, because an explorer's budget is computed from it.
//!
//! `cargo test --release -p vellum-sim --test speed -- --nocapture`

mod common;

use std::collections::HashSet;
use std::time::Instant;

use common::{at, write};
use vellum_core::{Buffer, Random, Storage};
use vellum_sim::{Content, CrashKind, CrashPoint, Drive, DriveOptions, World};

/// 4 MiB of noise, and twelve pending events on it: what a journal, some tables and some data would be.
fn point() -> CrashPoint {
    let world = World::new(1);
    let mut noise = vec![0; 4 << 20];
    Random::from_seed(1).fill(&mut noise);
    let drive = Drive::from_content(&world, Content::of(&noise), DriveOptions::default());
    world.run(async {
        for event in 0..12u64 {
            let len = [4096, 4096, 512, 65_536][usize::try_from(event % 4).expect("small")];
            let mut data = vec![0; len];
            Random::from_seed(event).fill(&mut data);
            let place = at(event * 349_184 / 4096 * 4096 + event % 4 * 512);
            drive.write(place, Buffer::copy_of(&data)).await.expect("a write succeeds");
        }
    });
    let point = drive.log().crash(CrashKind::PowerCut, world.position());
    assert_eq!(point.pending().len(), 12);
    point
}

#[expect(clippy::print_stdout, reason = "the figure is what this test is for")]
fn report(what: &str, mut work: impl FnMut(u64)) {
    let rounds = if cfg!(debug_assertions) { 4_096 } else { 65_536 };
    let start = Instant::now();
    for round in 0..rounds {
        work(round);
    }
    let each = start.elapsed() / u32::try_from(rounds).expect("small");
    let per_second = 1.0 / each.as_secs_f64();
    println!("{what:40} {each:>10.2?} each, {per_second:>12.0} per second");
}

#[test]
fn crash_images_per_second() {
    let point = point();
    report("a subset, by its bits", |round| drop(std::hint::black_box(point.image_of(round % 4096))));
    let mut subsets = point.subsets().expect("twelve changes");
    report("a subset, all in turn", |_| {
        let next = subsets.next().or_else(|| {
            subsets = point.subsets().expect("twelve changes");
            subsets.next()
        });
        drop(std::hint::black_box(next));
    });
    let mut subsets = point.subsets().expect("twelve changes");
    report("the same with its digest", |_| {
        let next = subsets.next().or_else(|| {
            subsets = point.subsets().expect("twelve changes");
            subsets.next()
        });
        std::hint::black_box(next.expect("never empty").1.digest());
    });
    let mut random = Random::from_seed(1);
    report("a random one, torn, with its digest", |_| {
        std::hint::black_box(point.random_image(&mut random).digest());
    });
    report("a world and a drive on an image", |round| {
        let world = World::new(round);
        let image = point.image_of(round % 4096);
        drop(std::hint::black_box(Drive::from_content(&world, image, DriveOptions::default())));
    });
    report("there, 16 reads, a write and a flush", |round| {
        let world = World::new(round);
        let drive = Drive::from_content(&world, point.image_of(round % 4096), DriveOptions::default());
        world.run(async {
            for page in 0..16 {
                let read = drive.read(at(page * 65_536), Buffer::for_overwrite(4096)).await;
                std::hint::black_box(read.expect("a read succeeds"));
            }
            write(&*drive, 0, 4096, 7).await.expect("a write succeeds");
            drive.flush().await.expect("a flush succeeds");
        });
    });
    let all: HashSet<u64> =
        point.subsets().expect("twelve changes").map(|(_, image)| image.digest()).collect();
    assert_eq!(all.len(), 4096, "all subsets are told apart");
}

#[test]
fn operations_per_second() {
    let world = World::new(1);
    let drive = Drive::from_content(&world, Content::zeroed(4 << 20), DriveOptions::default());
    world.run(async {
        let mut count = 0;
        let report_of = |what: &str, started: Instant, count: u32| {
            report_line(what, started.elapsed() / count);
        };
        let started = Instant::now();
        while count < 20_000 {
            write(&*drive, u64::from(count % 1024) * 4096, 4096, 7).await.expect("a write succeeds");
            count += 1;
        }
        report_of("a write of 4 KiB, recorded", started, count);
    });
    let log = drive.log();
    let positions = log.crash_positions();
    let started = Instant::now();
    for position in positions.iter().take(200) {
        std::hint::black_box(log.crash(CrashKind::PowerCut, *position));
    }
    report_line("a crash point", started.elapsed() / 200);
}

#[expect(clippy::print_stdout, reason = "the figure is what this test is for")]
fn report_line(what: &str, each: std::time::Duration) {
    println!("{what:40} {each:>10.2?} each");
}
