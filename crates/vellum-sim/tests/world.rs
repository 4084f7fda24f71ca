//! The world: order, time, chance, and that one seed is one story.

mod common;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use common::{any_order, drive_of, write};
use vellum_core::{Buffer, ByteStream, Storage, join_all};
use vellum_sim::{DriveOptions, StreamOptions, World, stream_pair};

fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// In which order four tasks that yield get their turns.
fn order_of_turns(world: &World) -> Vec<usize> {
    let order = Rc::new(RefCell::new(Vec::new()));
    let tasks: Vec<_> = (0..4)
        .map(|task| {
            let (order, clock) = (order.clone(), world.clock());
            world.spawn(async move {
                for _ in 0..3 {
                    order.borrow_mut().push(task);
                    clock.sleep(millis(1)).await;
                }
            })
        })
        .collect();
    world.run(join_all(tasks));
    order.take()
}

#[test]
fn turns_are_taken_first_come_first_served_or_shuffled_by_the_seed() {
    assert_eq!(order_of_turns(&World::new(1)), [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]);
    let orders: BTreeSet<Vec<usize>> = (0..50).map(|seed| order_of_turns(&World::shuffled(seed))).collect();
    assert!(orders.len() > 40, "fifty seeds gave only {} orders", orders.len());
}

#[test]
fn the_clock_jumps_to_the_next_alarm() {
    let world = World::new(1);
    let hour = Duration::from_hours(1);
    world.run(async {
        let slow = world.spawn({
            let clock = world.clock();
            async move {
                clock.sleep(hour).await;
                clock.now()
            }
        });
        world.sleep(millis(5)).await;
        assert_eq!(world.now(), millis(5));
        assert!(!slow.is_finished());
        // Dropped, an alarm does not go off.
        drop(world.sleep(millis(7)));
        assert_eq!(slow.await, hour);
    });
    assert_eq!(world.now(), hour);
}

#[test]
fn what_was_spawned_goes_on_in_the_next_run_and_ends_with_the_world() {
    let alive = Rc::new(());
    let world = World::new(1);
    let held = alive.clone();
    let sleep = world.sleep(millis(10));
    let task = world.spawn(async move {
        sleep.await;
        drop(held);
        7
    });
    let forever = alive.clone();
    let (one, other) = stream_pair(&world, &StreamOptions::default());
    drop(world.spawn(async move {
        // It waits for itself: its waker lies in what it owns.
        one.read(Buffer::zeroed(1)).await.expect("never");
        drop((other, forever));
    }));
    world.run(async {});
    assert_eq!(Rc::strong_count(&alive), 3);
    assert_eq!(world.run(task), 7);
    assert_eq!(Rc::strong_count(&alive), 2);
    drop(world);
    assert_eq!(Rc::strong_count(&alive), 1, "the world takes its tasks with it");
}

#[test]
fn a_killed_task_drops_what_it_holds() {
    let world = World::new(1);
    let alive = Rc::new(());
    let held = alive.clone();
    let task = world.spawn(async move {
        std::future::pending::<()>().await;
        drop(held);
    });
    world.run(async {
        world.yield_now().await;
        assert_eq!(task.abort().await, None);
        assert_eq!(Rc::strong_count(&alive), 1);
        let ended = world.spawn(async { 3 });
        world.yield_now().await;
        assert_eq!(ended.abort().await, Some(3));
    });
}

#[test]
fn tasks_start_tasks() {
    let world = World::shuffled(1);
    let spawner = world.spawner();
    let sum = world.spawn(async move {
        let parts = (1..=10u64).map(|number| spawner.spawn(async move { number }));
        join_all(parts).await.into_iter().sum::<u64>()
    });
    assert_eq!(world.run(sum), 55);
}

fn panic_of(run: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("it panics");
    panic.downcast_ref::<String>().expect("with a message").clone()
}

#[test]
fn deadlocks_and_panics_report_the_seed_and_the_time() {
    let message = panic_of(|| {
        let world = World::new(4711);
        world.run(async {
            world.sleep(millis(3)).await;
            std::future::pending::<()>().await;
        });
    });
    assert!(message.contains("seed 4711 at 3ms: deadlock"), "{message}");
    let message = panic_of(|| {
        let world = World::new(12);
        let task = world.spawn(async { assert_eq!(1, 2, "not the same") });
        world.run(task);
    });
    assert!(message.contains("seed 12 at 0ns") && message.contains("not the same"), "{message}");
}

/// Four writers and a flusher on a drive that answers in any order.
fn story(world: &World) -> (u64, u64) {
    let drive = drive_of(world, 1 << 20, DriveOptions { delay: any_order(), ..DriveOptions::default() });
    let writers: Vec<_> = (0..4u8)
        .map(|writer| {
            let (drive, mut random) = (drive.clone(), world.random());
            world.spawn(async move {
                for _ in 0..20 {
                    write(&*drive, random.below(1 << 20), 3_000, writer).await.expect("a write succeeds");
                    if random.one_in(4) {
                        drive.flush().await.expect("a flush succeeds");
                    }
                }
            })
        })
        .collect();
    world.run(join_all(writers));
    (world.digest(), drive.content().digest())
}

#[test]
fn one_seed_is_one_story() {
    for make in [World::new, World::shuffled] {
        let mut digests = BTreeSet::new();
        for seed in 0..20 {
            let first = story(&make(seed));
            assert_eq!(first, story(&make(seed)), "seed {seed} tells two stories");
            digests.insert(first);
        }
        assert_eq!(digests.len(), 20, "every seed tells its own");
    }
}
