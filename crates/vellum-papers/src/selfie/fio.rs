//! Threads that write and flush, as in `fio`: each waits for its write, flushes, waits for the flush, and
//! continues.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use vellum_core::{Random, Result, try_join_all};
use vellum_lab::guest::Request;

use super::scene::{DISK, SEED, Scene, units_of_which};
use super::{Image, Stage};

/// A page of a table covers at least this much of the disk.
const TABLE_PAGE: usize = 32 << 20;
/// What a thread has for itself.
const PART: u64 = 8 << 30;

/// Whether places follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    Sequential,
    Random,
}

/// Threads that write and flush: how much of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Fio {
    pub(crate) threads: u64,
    pub(crate) request: usize,
    pub(crate) order: Order,
    /// Of all threads together.
    pub(crate) bytes: u64,
    /// Places that were written before, with what packs.
    pub(crate) is_again: bool,
    /// All of the image's table was read before.
    pub(crate) is_warm: bool,
}

/// What a group of threads reached, and what it cost the drive.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Reached {
    /// As fio reports it.
    pub(crate) megabytes_per_second: f64,
    /// Writes that the drive was asked for, for each of a thread's, background included.
    pub(crate) writes: f64,
    /// Flushes, for each of a thread's.
    pub(crate) flushes: f64,
}

/// What the threads reach. The first quarter of the bytes does not count, nor a minute before it.
pub(crate) fn fio(image: Image, stage: Stage, fio: Fio) -> Result<Reached> {
    let scene = Scene::new(image, stage, DISK)?;
    let each = fio.bytes / fio.threads / fio.request as u64;
    let run = |bytes: &Arc<Vec<u8>>, from: u64, count: u64| -> Result<Duration> {
        let begun = scene.world.now();
        let threads = (0..fio.threads).map(|thread| {
            let (engine, bytes) = (scene.engine.clone(), bytes.clone());
            let places = places(fio, thread, from, count);
            scene.world.spawn(async move {
                for at in places {
                    Scene::write(&engine, &bytes, at, fio.request).await?;
                    engine.flush().await?;
                }
                Ok(())
            })
        });
        let threads: Vec<_> = threads.collect();
        scene.world.run(try_join_all(threads))?;
        Ok(scene.world.now() - begun)
    };
    if fio.is_warm {
        scene.work(
            1,
            (0..DISK).step_by(TABLE_PAGE),
            |engine, at| async move { engine.read(at, 4096).await },
        )?;
    }
    let warm_up = (each / 4).max(1);
    let bytes = &scene.bytes;
    run(bytes, 0, 1)?;
    scene.idle();
    if fio.is_again {
        run(&units_of_which(100), 1, warm_up + each)?;
        scene.idle();
    }
    run(bytes, 1, warm_up)?;
    let before = scene.drive.counts();
    let took = run(bytes, 1 + warm_up, each)?;
    let cost = scene.drive.counts() - before;
    let asked = each * fio.threads;
    Ok(Reached {
        megabytes_per_second: (asked * fio.request as u64) as f64 / took.as_secs_f64() / 1e6,
        writes: cost.writes as f64 / asked as f64,
        flushes: cost.flushes as f64 / asked as f64,
    })
}

/// The requests of one thread to its disk.
pub(crate) fn requests(fio: Fio) -> Vec<Request> {
    let each = fio.bytes / fio.request as u64;
    let ask = |offset| [Request::Write { offset, len: fio.request }, Request::Flush];
    places(fio, 0, 0, each).into_iter().flat_map(ask).collect()
}

fn places(fio: Fio, thread: u64, from: u64, count: u64) -> Vec<u64> {
    let len = fio.request as u64;
    let mut random = Random::from_seed(SEED + thread * 1_000_003 + from);
    let place = |index: u64| match fio.order {
        Order::Sequential => thread * PART + index * len % PART,
        Order::Random => random.below(DISK / len) * len,
    };
    (from..from + count).map(place).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Below, Drive, UNIT};
    use super::*;

    fn stage(below: Below, packs: u32) -> Stage {
        Stage { drive: Drive::Hdd, below, packs }
    }

    fn small(threads: u64) -> Fio {
        Fio {
            threads,
            request: UNIT,
            order: Order::Sequential,
            bytes: 8 << 20,
            is_again: false,
            is_warm: false,
        }
    }

    #[test]
    fn a_zoned_image_is_as_fast_as_the_host_and_grows_with_threads() {
        let run = |image, threads| {
            fio(image, stage(Below::ThinVolume, 100), small(threads)).unwrap().megabytes_per_second
        };
        let (host, zoned, qcow2) = (run(Image::Host, 1), run(Image::Zoned, 1), run(Image::Qcow2, 1));
        assert!(zoned >= 0.95 * host, "S4: {zoned} {host}");
        assert!(zoned >= 1.5 * qcow2, "S4: {zoned} {qcow2}");
        let many = run(Image::Zoned, 8);
        assert!(many >= 3.0 * zoned, "S5: {many} {zoned}");
        assert!(many >= 2.0 * run(Image::Qcow2, 8) && many >= 2.0 * run(Image::Host, 8), "S5: {many}");
        // Virtual time: the same each time.
        assert!((run(Image::Zoned, 8) - many).abs() < f64::EPSILON);
    }

    /// In counts: one write for a unit that packs, and a second one with its record for one that does not. Between such
    /// ones a unit that packs also pays for a record: the flush behind a record with checks verifies it.
    #[test]
    fn what_does_not_pack_costs_a_record_and_so_does_noise_over_what_packs() {
        let run = |packs, is_again| {
            let work = Fio { is_again, ..small(1) };
            fio(Image::Zoned, stage(Below::ThinVolume, packs), work).unwrap()
        };
        let [all, half, none, again] =
            [(100, false), (50, false), (0, false), (0, true)].map(|(packs, is_again)| run(packs, is_again));
        let seen = format!("{all:?} {half:?} {none:?} {again:?}");
        for (reached, least, most) in [(all, 1.0, 1.1), (half, 1.5, 2.1), (none, 2.0, 2.1), (again, 2.0, 2.1)]
        {
            // Pages go home now and then, and zones are opened.
            assert!((least..most).contains(&reached.writes), "{least} to {most}: {seen}");
            assert!((1.0..1.05).contains(&reached.flushes), "one for each of the thread's: {seen}");
        }
        for slower in [half, none, again] {
            assert!(all.megabytes_per_second > 1.5 * slower.megabytes_per_second, "{seen}");
        }
    }

    #[test]
    fn random_places_cost_no_more_once_the_table_is_in_memory() {
        let run = |work| fio(Image::Zoned, stage(Below::ThinVolume, 100), work).unwrap().megabytes_per_second;
        let random = Fio { order: Order::Random, ..small(1) };
        let (cold, warm, sequential) = (run(random), run(Fio { is_warm: true, ..random }), run(small(1)));
        assert!(warm >= 0.95 * sequential && warm >= cold, "S7: {cold} {warm} {sequential}");
    }

    #[test]
    fn one_thread_asks_each_place_once_and_flushes() {
        let asked = requests(Fio { bytes: 1 << 20, ..small(1) });
        let expected = (0..16)
            .flat_map(|unit| [Request::Write { offset: unit * UNIT as u64, len: UNIT }, Request::Flush]);
        assert_eq!(asked, expected.collect::<Vec<_>>());
    }
}
