//! What the session tests share: a connection in memory, a client that watches the protocol, disks that wait,
//! fail and misbehave on request, and a clock that is set by hand. One thread, no time, no operating system.

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
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use async_executor::LocalExecutor;
use event_listener::Event;
use vellum_core::{CheckedDisk, Clock, LocalFuture, SharedDisk};
use vellum_export::Shutdown;
use vellum_export::nbd::{Bounds, Clients, Ending, Export, Exports, SessionLimits, TlsPolicy, serve_client};

use client::Client;
use pipe::{Pipe, pipe};

/// A clock on which time passes only when a test rings it.
#[derive(Clone, Default)]
pub struct HandClock(Arc<(AtomicBool, Event, AtomicU64)>);

impl HandClock {
    /// All sleepers, now and later, wake up.
    pub fn ring(&self) {
        self.0.0.store(true, Ordering::Release);
        self.0.1.notify(usize::MAX);
    }

    /// The current sleepers wake up.
    pub fn strike(&self) {
        self.0.2.fetch_add(1, Ordering::AcqRel);
        self.0.1.notify(usize::MAX);
    }
}

impl Clock for HandClock {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep(&self, _wait: Duration) -> LocalFuture<'static, ()> {
        let clock = self.0.clone();
        let strikes = clock.2.load(Ordering::Acquire);
        Box::pin(async move {
            loop {
                let rung = clock.1.listen();
                if clock.0.load(Ordering::Acquire) || clock.2.load(Ordering::Acquire) != strikes {
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
    pub limits: SessionLimits,
    pub tls: TlsPolicy,
    pub shutdown: Shutdown,
    pub clients: Clients,
    /// The disk of the default export, watched.
    pub disk: Arc<CheckedDisk>,
    running: Rc<Cell<usize>>,
}

impl World {
    /// Serves `disk` under the empty name.
    pub fn new(disk: SharedDisk) -> Self {
        Self::with(disk, false, SessionLimits::default())
    }

    pub fn with(disk: SharedDisk, read_only: bool, limits: SessionLimits) -> Self {
        let disk = CheckedDisk::new(disk);
        let exports = Exports::new();
        let clock = HandClock::default();
        let all = Bounds { seats: 1000, seats_per_export: 1000, lobby: 1000, memory_bytes: 1 << 40 };
        let world = Self {
            executor: LocalExecutor::new(),
            exports,
            clients: Clients::new(all, Arc::new(clock.clone())),
            clock,
            limits,
            tls: TlsPolicy::Off,
            shutdown: Shutdown::new(),
            disk,
            running: Rc::default(),
        };
        world.offer("", read_only);
        world
    }

    /// As above, with bounds for all clients.
    pub fn bounded(disk: SharedDisk, limits: SessionLimits, bounds: Bounds) -> Self {
        let world = Self::with(disk, false, limits);
        let clients = Clients::new(bounds, Arc::new(world.clock.clone()));
        Self { clients, ..world }
    }

    /// Offers the same disk under one more name.
    pub fn offer(&self, name: &str, read_only: bool) {
        let description = format!("the disk {}", &name[..name.len().min(20)]);
        let export =
            Export { name: name.to_owned(), description, disk: self.disk.clone(), read_only, marks: None };
        self.exports.add(export).expect("the name is free");
    }

    /// A session on this end of a connection; the task gives its ending.
    pub fn serve(&self, stream: Pipe) -> async_executor::Task<Ending> {
        let (exports, clock, limits, shutdown) =
            (self.exports.clone(), self.clock.clone(), self.limits.clone(), self.shutdown.clone());
        let tls = self.tls.clone();
        let running = self.running.clone();
        let client = self.clients.arrive("a pipe");
        running.set(running.get() + 1);
        self.executor.spawn(async move {
            let ending = serve_client(&client, &tls, &stream, &exports, &clock, &limits, &shutdown).await;
            running.set(running.get() - 1);
            ending
        })
    }

    /// A client that has not sent anything yet, and its session.
    pub fn connect(&self) -> (Client, async_executor::Task<Ending>) {
        self.connect_over(1 << 20)
    }

    /// As above, over a connection that holds `capacity` bytes each way.
    pub fn connect_over(&self, capacity: usize) -> (Client, async_executor::Task<Ending>) {
        let (server, client) = pipe(capacity);
        (Client::new(client), self.serve(server))
    }

    /// Sessions that have not ended.
    pub fn running(&self) -> usize {
        self.running.get()
    }

    /// Runs until the future has ended. When nothing moves any more, it fails instead of waiting forever.
    pub fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let unpark = Arc::new(Unpark { thread: std::thread::current(), woken: AtomicBool::new(false) });
        let waker = Waker::from(unpark.clone());
        let mut future = pin!(self.executor.run(future));
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return output;
            }
            // Other threads may wake us, too, but never after long.
            #[expect(clippy::disallowed_methods, reason = "a test must not hang")]
            let begun = Instant::now();
            while !unpark.woken.swap(false, Ordering::AcqRel) {
                assert!(begun.elapsed() < Duration::from_secs(120), "everybody waits, and for nothing");
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
