//! Workers run tasks fairly, wake in time, and end in good order.

mod common;

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use common::{LONG, TempDir, in_both_modes, unlocked};
use futures_lite::future::{pending, poll_fn, poll_once, yield_now};
use vellum_core::{Buffer, ErrorKind, ImageOffset, Storage, join_all};
use vellum_io::{
    File, IoMode, Task, Workers, WorkersConfig, clock, io_mode, run, spawn_local, unblock, worker_index,
};

fn workers(threads: usize) -> Workers {
    Workers::start(WorkersConfig { threads, ..WorkersConfig::default() }).expect("workers start")
}

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

#[test]
fn run_gives_the_value_of_its_future_and_drops_what_is_left() {
    struct Dropped(Rc<Cell<bool>>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            // A task's end may still use its worker.
            assert_eq!(worker_index(), 0);
            self.0.set(true);
        }
    }
    in_both_modes(|| async {
        let value = spawn_local(async { 6 * 7 }).await;
        assert_eq!(value, 42);
    });
    let dropped = Rc::new(Cell::new(false));
    let held = Dropped(dropped.clone());
    let value = run(IoMode::Auto, async || {
        spawn_local(async move {
            let _held = held;
            pending::<()>().await;
        })
        .detach();
        yield_now().await;
        "value"
    });
    assert_eq!(value.expect("a worker"), "value");
    assert!(dropped.get());
}

#[test]
fn a_worker_within_a_worker_is_refused() {
    run(IoMode::Auto, async || {
        let error = run(IoMode::Auto, async || ()).expect_err("one is enough");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    })
    .expect("a worker");
}

#[test]
fn tasks_go_to_the_worker_they_are_given_to() {
    let workers = workers(3);
    assert_eq!(workers.count(), 3);
    let spawned: Vec<_> = (0..30).map(|n| (n % 3, workers.spawn(n % 3, async || worker_index()))).collect();
    for (index, task) in spawned {
        assert_eq!(futures_lite::future::block_on(task).expect("it ends"), index);
    }
    workers.join();
}

#[test]
fn join_waits_for_tasks_and_shutdown_does_not() {
    let ended = Arc::new(AtomicUsize::new(0));
    let workers_to_join = workers(2);
    for n in 0..10 {
        let ended = ended.clone();
        workers_to_join.spawn(n % 2, move || async move {
            clock().sleep(ms(10 + n as u64)).await;
            ended.fetch_add(1, SeqCst);
        });
    }
    workers_to_join.join();
    assert_eq!(ended.load(SeqCst), 10);

    let workers_to_end = workers(2);
    let task = workers_to_end.spawn(1, pending::<()>);
    let start = Instant::now();
    workers_to_end.shutdown();
    assert!(start.elapsed() < LONG);
    let error = futures_lite::future::block_on(task).expect_err("it had no end");
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[test]
fn a_panic_ends_all_workers_and_comes_out_of_join() {
    let workers = workers(2);
    let forever = workers.spawn(0, pending::<()>);
    workers.spawn(1, || async {
        // In a task of a task, whose handle is dropped.
        spawn_local(async { panic!("as planned") }).detach();
        pending::<()>().await;
    });
    let panic = catch_unwind(AssertUnwindSafe(|| workers.join())).expect_err("it panicked");
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"as planned"));
    assert!(futures_lite::future::block_on(forever).is_err());
}

#[test]
fn a_panic_in_a_task_comes_out_of_run() {
    let ran = catch_unwind(|| {
        run(IoMode::Auto, async || {
            let task: Task<()> = spawn_local(async { panic!("as planned") });
            task.await;
        })
    });
    assert_eq!(ran.expect_err("it panicked").downcast_ref::<&str>(), Some(&"as planned"));
    // The thread can be a worker again.
    assert_eq!(run(IoMode::Auto, async || 1).expect("a worker"), 1);
}

#[test]
fn workers_that_cannot_start_say_so() {
    let error = Workers::start(WorkersConfig { threads: 0, mode: IoMode::Auto, ..WorkersConfig::default() })
        .err()
        .expect("none at all");
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn sleepers_wake_in_order_of_their_deadlines() {
    in_both_modes(|| async {
        let order = Rc::new(RefCell::new(Vec::new()));
        // Deadlines are taken when a sleep is made; a pause in between could bring them out of order.
        let (start, sleeps) = loop {
            let start = clock().now();
            let sleeps = [50, 10, 30, 20, 40].map(|wait| (wait, clock().sleep(ms(wait))));
            if clock().now() - start < ms(5) {
                break (start, sleeps);
            }
        };
        let tasks: Vec<_> = sleeps
            .into_iter()
            .map(|(wait, sleep)| {
                let order = order.clone();
                spawn_local(async move {
                    sleep.await;
                    assert!(clock().now() - start >= ms(wait), "nobody wakes early");
                    order.borrow_mut().push(wait);
                })
            })
            .collect();
        join_all(tasks).await;
        assert_eq!(*order.borrow(), [10, 20, 30, 40, 50]);
    });
}

#[test]
fn thousands_sleep_at_once() {
    in_both_modes(|| async {
        let awake = Rc::new(Cell::new(0));
        let tasks: Vec<_> = (0..5000u64)
            .map(|n| {
                let awake = awake.clone();
                spawn_local(async move {
                    clock().sleep(Duration::from_micros(20_000 + n * 37 % 50_000)).await;
                    awake.set(awake.get() + 1);
                })
            })
            .collect();
        // And many more that are given up again.
        for _ in 0..5000 {
            let mut sleep = clock().sleep(Duration::from_secs(3600));
            assert!(poll_once(&mut sleep).await.is_none());
        }
        let start = Instant::now();
        for task in tasks {
            task.await;
        }
        assert_eq!(awake.get(), 5000);
        assert!(start.elapsed() < LONG, "{:?}", start.elapsed());
    });
}

#[test]
fn a_sleep_of_no_length_lets_others_run() {
    in_both_modes(|| async {
        let ran = Rc::new(Cell::new(false));
        let flag = ran.clone();
        spawn_local(async move { flag.set(true) }).detach();
        for _ in 0..3 {
            clock().sleep(Duration::ZERO).await;
        }
        assert!(ran.get());
    });
}

/// One thread wakes a task on a worker that sleeps, again and again, with every timing there is.
#[test]
fn wakeups_from_other_threads_are_not_lost() {
    in_both_modes(|| async {
        let (requests, inbox) = mpsc::channel::<(Arc<AtomicBool>, std::task::Waker)>();
        let thread = thread::spawn(move || {
            for (n, (done, waker)) in inbox.into_iter().enumerate() {
                for _ in 0..n % 300 {
                    std::hint::spin_loop();
                }
                if n % 64 == 0 {
                    thread::sleep(Duration::from_micros(200));
                }
                done.store(true, SeqCst);
                waker.wake();
            }
        });
        for _ in 0..20_000 {
            let done = Arc::new(AtomicBool::new(false));
            let mut asked = false;
            poll_fn(|context| {
                if done.load(SeqCst) {
                    return Poll::Ready(());
                }
                if !asked {
                    asked = true;
                    requests.send((done.clone(), context.waker().clone())).expect("the thread listens");
                }
                Poll::Pending
            })
            .await;
        }
        drop(requests);
        unblock(move || thread.join().expect("the thread ends")).await;
    });
}

#[test]
fn workers_call_each_other_without_losing_a_call() {
    for mode in common::MODES {
        let Ok(workers) = Workers::start(WorkersConfig { threads: 2, mode, ..WorkersConfig::default() })
        else {
            continue;
        };
        let handle = workers.handle();
        let total = workers.spawn(0, move || async move {
            let mut total = 0;
            for n in 0..5000u64 {
                total += handle.spawn(1, move || async move { n }).await.expect("the other works");
            }
            total
        });
        assert_eq!(futures_lite::future::block_on(total).expect("it ends"), 4999 * 5000 / 2);
        workers.join();
    }
}

#[test]
fn a_task_that_never_rests_does_not_starve_others() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let file = File::create_new(dir.join("file"), unlocked(false)).await.expect("a file");
        let stop = Rc::new(Cell::new(false));
        let turns = Rc::new(Cell::new(0u64));
        for _ in 0..100 {
            let (stop, turns) = (stop.clone(), turns.clone());
            spawn_local(async move {
                while !stop.get() {
                    turns.set(turns.get() + 1);
                    yield_now().await;
                }
            })
            .detach();
        }
        let start = Instant::now();
        for n in 0..50u64 {
            file.write(ImageOffset::new(n * 4096), Buffer::copy_of(&[7; 4096])).await.expect("a write");
            let read = file.read(ImageOffset::new(n * 4096), Buffer::zeroed(4096)).await.expect("a read");
            assert_eq!(read.to_vec(), [7; 4096]);
            clock().sleep(ms(1)).await;
        }
        file.flush().await.expect("a flush");
        assert!(turns.get() > 1000, "the others ran too");
        assert!(start.elapsed() < LONG, "in {:?} with {}", start.elapsed(), turns.get());
        stop.set(true);
    });
}

/// Tasks whose polls are long share the worker by time, not by number.
#[test]
fn io_that_has_ended_is_seen_after_few_long_polls_of_others() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let file = File::create_new(dir.join("file"), unlocked(false)).await.expect("a file");
        file.write(ImageOffset::ZERO, Buffer::copy_of(&[7; 4096])).await.expect("a write");
        let polls = Rc::new(Cell::new(0u64));
        let hogs: Vec<_> = (0..4)
            .map(|_| {
                let polls = polls.clone();
                spawn_local(async move {
                    loop {
                        let begun = Instant::now();
                        while begun.elapsed() < ms(1) {
                            std::hint::spin_loop();
                        }
                        polls.set(polls.get() + 1);
                        yield_now().await;
                    }
                })
            })
            .collect();
        // A read from the page cache completes as soon as it is submitted.
        let mut most = 0;
        for _ in 0..10 {
            let before = polls.get();
            file.read(ImageOffset::ZERO, Buffer::zeroed(4096)).await.expect("a read");
            most = most.max(polls.get() - before);
        }
        assert!(most <= 16, "{most} polls of others during one read");
        for hog in hogs {
            hog.cancel().await;
        }
    });
}

#[test]
fn reads_that_are_always_ready_do_not_starve_others() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let file = File::create_new(dir.join("file"), unlocked(false)).await.expect("a file");
        file.write(ImageOffset::ZERO, Buffer::zeroed(4096)).await.expect("a write");
        let reader = spawn_local(async move {
            loop {
                file.read(ImageOffset::ZERO, Buffer::zeroed(512)).await.expect("a read");
            }
        });
        let start = Instant::now();
        for _ in 0..20 {
            clock().sleep(ms(1)).await;
        }
        assert!(start.elapsed() < LONG);
        reader.cancel().await;
    });
}

#[test]
fn the_mode_is_what_was_asked_for() {
    run(IoMode::Threads, async || assert_eq!(io_mode(), IoMode::Threads)).expect("threads can always be had");
    let auto = run(IoMode::Auto, async || io_mode()).expect("one of the two can be had");
    assert_ne!(auto, IoMode::Auto);
}
