//! What the session tests stand on: a connection in memory, a client that watches the protocol, disks that wait, fail
//! and lie when told to, and a clock that is set by hand. One thread, no time, no operating system.

#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(unreachable_pub, reason = "shared by several test files")]

pub mod client;
pub mod disks;
pub mod pipe;
pub mod socket;

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use async_executor::LocalExecutor;
use event_listener::Event;
use vellum_core::{CheckedDisk, Clock, LocalFuture, SharedDisk};
use vellum_export::Shutdown;
use vellum_export::nbd::{Ending, Export, Exports, Limits, TlsPolicy, serve_connection_with};

use client::Client;
use pipe::{Pipe, pipe};

/// A clock on which the only thing that ever happens is that somebody rings.
#[derive(Clone, Default)]
pub struct HandClock(Arc<(AtomicBool, Event)>);

impl HandClock {
    /// Everybody who sleeps, now or later, wakes up.
    pub fn ring(&self) {
        self.0.0.store(true, Ordering::Release);
        self.0.1.notify(usize::MAX);
    }
}

impl Clock for HandClock {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep(&self, _wait: Duration) -> LocalFuture<'static, ()> {
        let clock = self.0.clone();
        Box::pin(async move {
            loop {
                let rung = clock.1.listen();
                if clock.0.load(Ordering::Acquire) {
                    return;
                }
                rung.await;
            }
        })
    }
}

struct Unpark {
    thread: std::thread::Thread,
    woken: AtomicBool,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// A server in one thread.
pub struct World {
    pub executor: LocalExecutor<'static>,
    pub exports: Exports,
    pub clock: HandClock,
    pub limits: Limits,
    pub tls: TlsPolicy,
    pub shutdown: Shutdown,
    /// The disk of the default export, watched.
    pub disk: Arc<CheckedDisk>,
    running: Rc<Cell<usize>>,
}

impl World {
    /// Serves `disk` under the empty name.
    pub fn new(disk: SharedDisk) -> Self {
        Self::with(disk, false, Limits::default())
    }

    pub fn with(disk: SharedDisk, read_only: bool, limits: Limits) -> Self {
        let disk = CheckedDisk::new(disk);
        let exports = Exports::new();
        let world = Self {
            executor: LocalExecutor::new(),
            exports,
            clock: HandClock::default(),
            limits,
            tls: TlsPolicy::Off,
            shutdown: Shutdown::new(),
            disk,
            running: Rc::default(),
        };
        world.offer("", read_only);
        world
    }

    /// Offers the same disk under one more name.
    pub fn offer(&self, name: &str, read_only: bool) {
        let description = format!("the disk {}", &name[..name.len().min(20)]);
        let export = Export { name: name.to_owned(), description, disk: self.disk.clone(), read_only };
        self.exports.add(export).expect("the name is free");
    }

    /// A session on this end of a connection; the task gives its ending.
    pub fn serve(&self, stream: Pipe) -> async_executor::Task<Ending> {
        let (exports, clock, limits, shutdown) =
            (self.exports.clone(), self.clock.clone(), self.limits.clone(), self.shutdown.clone());
        let tls = self.tls.clone();
        let running = self.running.clone();
        running.set(running.get() + 1);
        self.executor.spawn(async move {
            let ending = serve_connection_with(&tls, &stream, &exports, &clock, &limits, &shutdown).await;
            running.set(running.get() - 1);
            ending
        })
    }

    /// A client that has not said anything yet, and its session.
    pub fn connect(&self) -> (Client, async_executor::Task<Ending>) {
        self.connect_over(1 << 20)
    }

    /// The same over a connection that holds `capacity` bytes each way.
    pub fn connect_over(&self, capacity: usize) -> (Client, async_executor::Task<Ending>) {
        let (server, client) = pipe(capacity);
        (Client::new(client), self.serve(server))
    }

    /// Sessions that have not ended.
    pub fn running(&self) -> usize {
        self.running.get()
    }

    /// Runs until the future has ended. When nothing moves any more, it says so instead of waiting for ever.
    pub fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let unpark = Arc::new(Unpark { thread: std::thread::current(), woken: AtomicBool::new(false) });
        let waker = Waker::from(unpark.clone());
        let mut future = pin!(self.executor.run(future));
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return output;
            }
            // Other threads may wake us, too, but never after long.
            let begun = Instant::now();
            while !unpark.woken.swap(false, Ordering::AcqRel) {
                assert!(begun.elapsed() < Duration::from_secs(20), "everybody waits, and for nothing");
                std::thread::park_timeout(Duration::from_secs(1));
            }
        }
    }

    /// Lets everything run until nothing can move.
    pub async fn settle(&self) {
        for _ in 0..200 {
            futures_lite::future::yield_now().await;
        }
    }

    /// What must hold when all clients have left.
    pub fn assert_nothing_is_left(&self) {
        assert_eq!(self.running(), 0, "all sessions have ended");
        assert_eq!(self.disk.abandoned(), 0, "every disk request was polled to its end");
    }
}
