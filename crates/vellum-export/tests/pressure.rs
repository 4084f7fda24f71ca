//! Memory and back-pressure: the server stops reading from a client that does not read its replies, and a
//! session's memory stays within what `SessionLimits` promises. The allocator itself counts the memory.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use support::World;
use support::client::{Wish, option_bytes};
use support::disks::{RuledDisk, shared};
use vellum_export::nbd::SessionLimits;
use vellum_export::nbd::wire::{RequestHeader, command};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn grown(by: usize) {
    let live = LIVE.fetch_add(by, Relaxed) + by;
    PEAK.fetch_max(live, Relaxed);
}

// SAFETY: everything is passed on to the system's allocator; only numbers are kept.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time: the counts are the whole program's.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// The most memory that was live at once while `run` ran, beyond what was live before.
fn peak_of(run: impl FnOnce()) -> usize {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    run();
    PEAK.load(Relaxed).saturating_sub(before)
}

fn header(command: u16, cookie: u64, offset: u64, len: u64) -> RequestHeader {
    RequestHeader { flags: 0, command, cookie, offset, len }
}

/// What a session of `limits` may take: the sum that `SessionLimits` documents, and the harness with its pipes.
fn allowance(limits: &SessionLimits) -> usize {
    limits.memory_bytes_max + limits.receive_bytes + limits.requests_max * 1024 + (512 << 10)
}

#[test]
fn replies_that_nobody_reads_stop_the_intake() {
    let _alone = ALONE.lock().unwrap_or_else(|error| error.into_inner());
    let size = 64 << 20;
    for (len, structured) in
        [(64 << 10, true), (64 << 10, false), (1 << 20, true), (512, false), (4096, true)]
    {
        let limits = SessionLimits {
            memory_bytes_max: 4 << 20,
            payload_bytes_max: 1 << 20,
            ..SessionLimits::default()
        };
        let disk = RuledDisk::new(size);
        let world = World::with(shared(&disk), false, limits.clone());
        let wish = Wish { structured, contexts: &[], ..Wish::default() };
        let (mut client, _session) = world.connect_over(256 << 10);
        world.run(async {
            client.begin(wish).await;
            // Noise, so that no reply is a hole. (The disk's own memory is not the session's.)
            for at in (0..4 << 20).step_by(512 << 10) {
                client.write(0, at, &vec![0xA5; 512 << 10]).await;
            }
            disk.take_seen();
        });
        let mut asked = 0;
        let peak = peak_of(|| {
            world.run(async {
                // Far more than may be in progress; the pipe holds what the server does not take.
                while asked < 5_000 {
                    if client.stream.unread_there() + 28 > 256 << 10 {
                        break;
                    }
                    let offset = (asked * 4096) % (2 << 20);
                    client.send(&header(command::READ, asked, offset, len).encode()).await;
                    asked += 1;
                }
                world.settle().await;
            });
        });
        let begun = disk.take_seen().len() as u64;
        assert!(begun < asked / 2, "{begun} of {asked} requests of {len} bytes were begun");
        assert!(begun >= 3, "but some were");
        assert!(peak <= allowance(&limits), "{peak} bytes for reads of {len}");
        drop(client);
        world.run(async {
            while world.running() > 0 {
                futures_lite::future::yield_now().await;
            }
        });
        world.assert_nothing_is_left();
    }
}

#[test]
fn a_client_that_reads_again_gets_every_reply() {
    let _alone = ALONE.lock().unwrap_or_else(|error| error.into_inner());
    let disk = RuledDisk::new(1 << 20);
    let limits = SessionLimits {
        memory_bytes_max: 256 << 10,
        payload_bytes_max: 64 << 10,
        ..SessionLimits::default()
    };
    let world = World::with(shared(&disk), false, limits);
    let (mut client, _session) = world.connect_over(32 << 10);
    world.run(async {
        client.begin(Wish { structured: false, contexts: &[], ..Wish::default() }).await;
        for cookie in 0..1000 {
            let bytes = client.note(header(command::READ, cookie, 0, 32 << 10));
            client.send(&bytes).await;
        }
        world.settle().await;
        for _ in 0..1000 {
            assert_eq!(client.answer().await.expect("it comes").data.len(), 32 << 10);
        }
        assert_eq!(client.open(), 0);
    });
}

/// Refusals, too, are replies: a flood of wrong requests must not pile them up.
#[test]
fn refusals_that_nobody_reads_stop_the_intake() {
    let _alone = ALONE.lock().unwrap_or_else(|error| error.into_inner());
    let limits = SessionLimits::default();
    let world = World::new(shared(&RuledDisk::new(1 << 20)));
    let (mut client, _session) = world.connect_over(8 << 10);
    world.run(client.begin(Wish::default()));
    let peak = peak_of(|| {
        world.run(async {
            let mut stuck = 0;
            while stuck < 3 {
                let batch: Vec<u8> = (0..100).flat_map(|i| header(99, i, 0, 0).encode()).collect();
                if client.stream.unread_there() + batch.len() > 8 << 10 {
                    stuck += 1;
                    world.settle().await;
                } else {
                    client.send(&batch).await;
                }
            }
        });
    });
    assert!(peak <= 600 << 10, "{peak} bytes");
    assert!(peak <= allowance(&limits));
}

/// The largest write, and the largest read, one after the other and together: nothing beyond the promise.
#[test]
fn the_largest_requests_keep_within_the_promise() {
    let _alone = ALONE.lock().unwrap_or_else(|error| error.into_inner());
    let limits = SessionLimits::default();
    let world = World::new(shared(&RuledDisk::new(64 << 20)));
    let (mut client, _session) = world.connect_over(64 << 10);
    world.run(client.begin(Wish::default()));
    let peak = peak_of(|| {
        world.run(async {
            // Three headers of 32 MiB each, of which one payload comes in part.
            client.send(&header(command::WRITE, 1, 0, 32 << 20).encode()).await;
            for _ in 0..100 {
                client.send(&[1; 10_000]).await;
            }
            world.settle().await;
        });
    });
    assert!(peak <= allowance(&limits), "{peak} bytes for a write");
    drop(client);
    let (mut client, _session) = world.connect_over(64 << 10);
    world.run(client.begin(Wish::default()));
    let peak = peak_of(|| {
        world.run(async {
            for cookie in 0..100 {
                let df = RequestHeader { flags: 4, ..header(command::READ, cookie, 0, 32 << 20) };
                client.send(&df.encode()).await;
            }
            world.settle().await;
        });
    });
    assert!(peak <= allowance(&limits) + (1 << 20), "{peak} bytes for reads");
}

#[test]
fn a_handshake_holds_little_whatever_is_sent() {
    let _alone = ALONE.lock().unwrap_or_else(|error| error.into_inner());
    let world = World::new(shared(&RuledDisk::new(1 << 20)));
    let (client, session) = world.connect_over(4 << 10);
    let peak = peak_of(|| {
        world.run(async {
            client.send(&[0, 0, 0, 3]).await;
            for _ in 0..60 {
                // The answers are never read.
                let bytes = option_bytes(77, &vec![0; 64 << 10]);
                for piece in bytes.chunks(1000) {
                    if client.stream.unread_there() + 1000 > 4 << 10 {
                        world.settle().await;
                        if client.stream.unread_there() + 1000 > 4 << 10 {
                            return;
                        }
                    }
                    client.try_send(piece).await.expect("fewer than the limit have been sent");
                }
            }
        });
    });
    assert!(peak <= 512 << 10, "{peak} bytes");
    drop(client);
    world.run(session);
}

/// What a request for status may gather is charged like a payload.
#[test]
fn requests_for_status_are_charged() {
    let _alone = ALONE.lock().unwrap_or_else(|error| error.into_inner());
    let limits =
        SessionLimits { memory_bytes_max: 3 << 20, payload_bytes_max: 1 << 20, ..SessionLimits::default() };
    let disk = RuledDisk::new(8 << 20);
    let world = World::with(shared(&disk), false, limits);
    let (mut client, _session) = world.connect();
    world.run(async {
        client.begin(Wish::default()).await;
        disk.close_gate();
        for cookie in 0..10 {
            client.request(header(command::BLOCK_STATUS, cookie, 0, 8 << 20), b"").await;
        }
        world.settle().await;
        assert_eq!(disk.take_seen().len(), 3);
        disk.open_gate();
        for _ in 0..10 {
            assert_eq!(client.answer().await.expect("it comes").error, 0);
        }
    });
}

/// A write of which only the header has come holds what was charged for it, and the next one waits.
#[test]
fn a_payload_is_charged_before_it_is_made() {
    let _alone = ALONE.lock().unwrap_or_else(|error| error.into_inner());
    let limits =
        SessionLimits { memory_bytes_max: 1 << 20, payload_bytes_max: 1 << 20, ..SessionLimits::default() };
    let disk = RuledDisk::new(8 << 20);
    let world = World::with(shared(&disk), false, limits);
    let (mut client, _session) = world.connect_over(4 << 20);
    world.run(async {
        client.begin(Wish { structured: false, contexts: &[], ..Wish::default() }).await;
        disk.close_gate();
        client.request(header(command::WRITE, 1, 0, 700_000), &vec![1; 700_000]).await;
        client.request(header(command::WRITE, 2, 0, 700_000), &vec![2; 700_000]).await;
        client.request(header(command::FLUSH, 3, 0, 0), b"").await;
        world.settle().await;
        assert_eq!(disk.take_seen().len(), 1, "the second does not fit beside the first");
        disk.open_gate();
        for cookie in [1, 2, 3] {
            assert_eq!(client.answer_to(cookie).await.error, 0);
        }
        assert_eq!(disk.bytes(0, 4), [2; 4]);
    });
}
