//! Limits in virtual time: exact counts, and a model that computes as QEMU does, with levels in units.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use vellum_core::Random;
use vellum_sim::World;

use super::*;

/// When a request came and when it began, and what it was.
#[derive(Debug, Clone, Copy)]
struct Seen {
    came: Duration,
    began: Duration,
    direction: Direction,
    bytes: u64,
}

fn rates(said: &[(&str, u64)]) -> RateLimits {
    RateLimits::of(said.iter().copied()).expect("they go together")
}

/// This many tasks, each of which sends one request after the other until the time is over. Returns how many
/// each of them began.
fn saturate(said: &[(&str, u64)], tasks: &[(Direction, u64)], seconds: u64) -> Vec<usize> {
    let world = World::new(1);
    let limits = Rc::new(Limits::new(world.clock()));
    limits.set(rates(said));
    let counts = Rc::new(RefCell::new(vec![0; tasks.len()]));
    let end = Duration::from_secs(seconds);
    world.run(async {
        for (number, (direction, bytes)) in tasks.iter().copied().enumerate() {
            let (limits, counts, clock) = (limits.clone(), counts.clone(), world.clock());
            drop(world.spawn(async move {
                loop {
                    limits.pass(direction, bytes).await;
                    if clock.now() >= end {
                        return;
                    }
                    counts.borrow_mut()[number] += 1;
                }
            }));
        }
        world.sleep(end).await;
    });
    counts.take()
}

const READ: (Direction, u64) = (Direction::Read, 4096);
const WRITE: (Direction, u64) = (Direction::Write, 4096);

#[test]
fn exactly_so_many_begin() {
    for (said, tasks, seconds, total) in [
        // A tenth of a second's worth at once; the first begins where nothing is.
        (&[("iops-total", 1000)][..], &[READ; 8][..], 10, 10_100),
        (&[("iops-total", 1000)], &[READ], 10, 10_100),
        (&[("iops-total", 1000)], &[READ, WRITE, READ, WRITE], 10, 10_100),
        (&[("iops-read", 500), ("iops-write", 100)], &[READ, WRITE], 10, 5050 + 1010),
        (&[("bps-total", 4096 * 50)], &[WRITE; 3], 10, 505),
        // What is tighter counts.
        (&[("bps-total", 4096 * 50), ("iops-total", 1000)], &[WRITE; 3], 10, 505),
        (&[("bps-total", 4096 * 50), ("iops-total", 20)], &[WRITE; 3], 10, 202),
        (&[("iops-total", 100), ("iops-size", 2048)], &[WRITE; 3], 10, 505),
        (&[("iops-total", 100), ("iops-total-max", 400)], &[READ; 2], 10, 400 + 1000),
    ] {
        let counts = saturate(said, tasks, seconds);
        assert_eq!(counts.iter().sum::<usize>(), total, "{said:?}: {counts:?}");
    }
}

#[test]
fn all_get_the_same_and_no_direction_starves() {
    let counts = saturate(&[("iops-total", 1000)], &[READ; 7], 10);
    let (least, most) = (counts.iter().min().expect("seven"), counts.iter().max().expect("seven"));
    // All but the burst at the beginning is given out in turn.
    assert!(most - least <= 102, "{counts:?}");
    let mut tasks = vec![READ; 7];
    tasks.push(WRITE);
    let counts = saturate(&[("iops-total", 1000)], &tasks, 10);
    assert!((4900..=5100).contains(&counts[7]), "one that writes has half, whoever reads: {counts:?}");
    // Reads that wait for their own limit keep no write waiting.
    let counts = saturate(&[("iops-read", 10), ("bps-total", 4096 * 1000)], &[READ, READ, WRITE], 10);
    assert_eq!(counts[0] + counts[1], 101, "{counts:?}");
    assert_eq!(counts.iter().sum::<usize>(), 10_100, "{counts:?}");
}

#[test]
fn new_limits_count_for_those_who_wait() {
    let world = World::new(3);
    let limits = Rc::new(Limits::new(world.clock()));
    limits.set(rates(&[("iops-total", 1)]));
    world.run(async {
        let pass = |limits: Rc<Limits>| world.spawn(async move { limits.pass(Direction::Read, 1).await });
        for _ in 0..100 {
            drop(pass(limits.clone()));
        }
        world.sleep(Duration::from_millis(10)).await;
        assert_eq!(limits.waiting(), 99);
        limits.set(rates(&[("iops-total", 100)]));
        world.sleep(Duration::from_millis(1)).await;
        assert_eq!(limits.waiting(), 99 - 11);
        assert_eq!(limits.rates(), rates(&[("iops-total", 100)]));
        world.sleep(Duration::from_millis(500)).await;
        assert_eq!(limits.waiting(), 99 - 11 - 50);
        limits.set(RateLimits::default());
        assert_eq!(limits.waiting(), 0);
        pass(limits.clone()).await;
    });
    assert_eq!(world.now(), Duration::from_millis(511));
}

#[test]
fn who_goes_gives_up_its_place() {
    let world = World::new(4);
    let limits = Rc::new(Limits::new(world.clock()));
    limits.set(rates(&[("iops-total", 1)]));
    world.run(async {
        for _ in 0..2 {
            limits.pass(Direction::Write, 1).await;
        }
        let mut goes = Box::pin(limits.pass(Direction::Write, 1));
        assert!(futures_lite::future::poll_once(&mut goes).await.is_none());
        let stays = world.spawn({
            let limits = limits.clone();
            async move { limits.pass(Direction::Write, 1).await }
        });
        world.sleep(Duration::from_millis(1)).await;
        assert_eq!(limits.waiting(), 2);
        drop(goes);
        stays.await;
        assert_eq!(limits.waiting(), 0);
    });
}

/// One limit as QEMU computes it: the level in units, leaking with time.
struct Level {
    rate: f64,
    capacity: f64,
    level: f64,
    at: f64,
}

impl Level {
    fn leak(&mut self, now: f64) {
        self.level = (self.level - (now - self.at) * self.rate).max(0.0);
        self.at = now;
    }

    fn ready_at(&mut self, now: f64) -> f64 {
        self.leak(now);
        now + ((self.level - self.capacity) / self.rate).max(0.0)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a model, in numbers far below 2^52")]
fn model(rates: &RateLimits, kind: Kind) -> Vec<Level> {
    let Some(rate) = rates.rate(kind) else { return Vec::new() };
    let level = |rate: u64, capacity: f64| Level { rate: rate as f64, capacity, level: 0.0, at: 0.0 };
    match rate.max {
        None => vec![level(rate.average, rate.average as f64 / 10.0)],
        Some(max) => {
            let mut levels = vec![level(rate.average, (max * rate.max_length) as f64)];
            levels.extend((rate.max_length > 1).then(|| level(max, max as f64 / 10.0)));
            levels
        }
    }
}

/// Random limits and random requests: each begins as soon as the model lets it, and not before.
#[test]
#[expect(clippy::cast_precision_loss, reason = "a model, in numbers far below 2^52")]
fn requests_begin_when_the_model_says() {
    let scale = std::env::var("VELLUM_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1u64);
    for seed in 0..60 * scale {
        let mut random = Random::from_seed(seed);
        let mut said: Vec<(String, u64)> = Vec::new();
        for (unit, scale) in [("iops", 1), ("bps", 4096)] {
            let choices: [&[&str]; 5] = [&["total"], &["read"], &["write"], &["read", "write"], &[]];
            let directions = choices[random.index(choices.len())];
            for direction in directions {
                let average = (5 + random.below(300)) * scale;
                said.push((format!("{unit}-{direction}"), average));
                if random.one_in(2) {
                    said.push((format!("{unit}-{direction}-max"), average * (1 + random.below(4))));
                    said.push((format!("{unit}-{direction}-max-length"), 1 + random.below(3)));
                }
            }
        }
        if random.one_in(3) {
            said.push(("iops-size".to_owned(), 8192));
        }
        let rates =
            RateLimits::of(said.iter().map(|(name, number)| (&name[..], *number))).expect("they go together");
        let world = World::shuffled(seed);
        let limits = Rc::new(Limits::new(world.clock()));
        limits.set(rates.clone());
        let seen = Rc::new(RefCell::new(Vec::new()));
        world.run(async {
            let mut tasks = Vec::new();
            for _ in 0..200 + random.index(600) {
                if random.one_in(3) {
                    world.sleep(Duration::from_micros(random.below(20_000))).await;
                }
                let direction = if random.one_in(2) { Direction::Read } else { Direction::Write };
                let bytes = 512 * (1 + random.below(40));
                let (limits, seen, clock, came) = (limits.clone(), seen.clone(), world.clock(), world.now());
                // In line before the next one comes.
                let mut pass = Box::pin(async move {
                    limits.pass(direction, bytes).await;
                    seen.borrow_mut().push(Seen { came, began: clock.now(), direction, bytes });
                });
                if futures_lite::future::poll_once(&mut pass).await.is_none() {
                    tasks.push(world.spawn(pass));
                }
            }
            for task in tasks {
                task.await;
            }
        });
        let mut levels: Vec<(Kind, Vec<Level>)> =
            Kind::ALL.into_iter().map(|kind| (kind, model(&rates, kind))).collect();
        let mut last_of = [0.0f64; 2];
        // Those that began at one moment may stand in any order here; in time they stand as they began.
        for one in seen.take() {
            let (came, began) = (one.came.as_secs_f64(), one.began.as_secs_f64());
            let kinds = one.direction.kinds();
            let mut ready = came.max(last_of[one.direction as usize]);
            for (_, levels) in levels.iter_mut().filter(|(kind, _)| kinds.contains(kind)) {
                for level in levels {
                    ready = ready.max(level.ready_at(level.at.max(came.min(began))));
                }
            }
            // Rounding of each request's cost adds up.
            let off = began - ready;
            assert!(off.abs() < 2e-6, "seed {seed}, {said:?}: {one:?} began {off} s off");
            for (kind, levels) in levels.iter_mut().filter(|(kind, _)| kinds.contains(kind)) {
                let units = rates.units(*kind, one.bytes).expect("bytes are moved");
                for level in levels {
                    level.leak(began);
                    level.level += units.number as f64 / units.of as f64;
                }
            }
            last_of[one.direction as usize] = began;
        }
    }
}
