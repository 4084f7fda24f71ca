//! A future that is dropped leaves nothing behind: no freed memory that the kernel still writes to, no
//! descriptor, and no operation in flight when its worker has ended.
//!
//! Freed memory returns to the thread's pool and is handed out again at once. So after dropping an operation
//! half way the tests take that memory, fill it with a pattern, let the operation happen, and check the
//! pattern.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::{Duration, Instant};

use common::{LONG, MODES, TempDir, in_both_modes, skip, unlocked};
use futures_lite::future::{or, poll_once, yield_now};
use vellum_core::{Buffer, ByteStream, ErrorKind, ImageOffset, Random, Storage, join_all};
use vellum_io::{Address, File, IoMode, Listener, Socket, clock, run, spawn_local};

async fn pause(milliseconds: u64) {
    clock().sleep(Duration::from_millis(milliseconds)).await;
}

/// Buffers that would be made of memory that has just been freed, all of one value.
fn bait(len: usize) -> Vec<Buffer> {
    let mut buffers: Vec<_> = (0..32).map(|_| Buffer::zeroed(len)).collect();
    buffers.iter_mut().for_each(|buffer| buffer.fill(0xAA));
    buffers
}

fn is_untouched(buffers: &[Buffer]) -> bool {
    buffers.iter().all(|buffer| buffer.pieces().all(|piece| piece.iter().all(|byte| *byte == 0xAA)))
}

#[test]
fn a_read_that_is_never_answered_can_be_dropped() {
    in_both_modes(|| async {
        let (here, there) = UnixStream::pair().expect("a pair");
        let mut there = there;
        let stream = Socket::from(here).attach();
        for round in 0..20u8 {
            let mut read = stream.read(Buffer::zeroed(4096));
            assert!(poll_once(&mut read).await.is_none());
            // Even rounds let it reach the kernel first.
            if round % 2 == 0 {
                pause(1).await;
            }
            drop(read);
            let bait = bait(4096);
            there.write_all(&[round; 100]).expect("the other end writes");
            pause(2).await;
            assert!(is_untouched(&bait), "round {round}: the kernel wrote into freed memory");
        }
        // The connection works on; what came in between may be lost, as the contract says.
        there.write_all(b"end").expect("the other end writes");
        let (buffer, count) = stream.read(Buffer::zeroed(4096)).await.expect("a read");
        assert!(buffer.to_vec()[..count].ends_with(b"end"));
    });
}

#[test]
fn a_dropped_accept_leaves_its_connection_to_the_next() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let listener = Listener::bind(&Address::unix(dir.join("socket"))).await.expect("it listens");
        for _ in 0..5 {
            let mut accept = Box::pin(listener.accept());
            assert!(poll_once(&mut accept).await.is_none());
            pause(1).await;
            drop(accept);
        }
        pause(5).await;
        let client = UnixStream::connect(dir.join("socket")).expect("somebody listens");
        or(async { drop(listener.accept().await.expect("a connection")) }, async {
            clock().sleep(LONG).await;
            panic!("the connection was lost");
        })
        .await;
        drop(client);
    });
}

#[test]
fn a_worker_ends_while_reads_wait() {
    for mode in MODES {
        let (here, mut there) = UnixStream::pair().expect("a pair");
        let start = Instant::now();
        let ran = run(mode, async || {
            let stream = Socket::from(here).attach();
            spawn_local(async move { stream.read(Buffer::zeroed(1 << 16)).await }).detach();
            pause(5).await;
        });
        if let Err(error) = ran {
            skip(&error.chain());
            continue;
        }
        assert!(start.elapsed() < LONG);
        // The other end sees the connection closed: the operation has let go of its descriptor.
        there.set_read_timeout(Some(LONG)).expect("a timeout");
        assert_eq!(there.read(&mut [0; 1]).expect("the end"), 0);
    }
}

#[test]
fn dropped_reads_of_files_write_into_no_other_memory() {
    for direct in [false, true] {
        in_both_modes(|| async {
            let dir = TempDir::new();
            let file = match File::create_new(dir.join("file"), unlocked(direct)).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => return skip(&error.chain()),
                file => file.expect("a file"),
            };
            let mut content = Buffer::for_overwrite(4 << 20);
            content.fill(0x55);
            file.write(ImageOffset::ZERO, content).await.expect("a write");
            file.flush().await.expect("a flush");
            let mut random = Random::from_seed(5);
            for _ in 0..150 {
                let reads: Vec<_> = (0..8)
                    .map(|_| {
                        let at = random.below(48) * 65_536;
                        Box::pin(file.read(ImageOffset::new(at), Buffer::zeroed(65_536)))
                    })
                    .collect();
                let mut reads = reads;
                for read in &mut reads {
                    drop(poll_once(read).await);
                }
                if random.one_in(2) {
                    yield_now().await;
                }
                drop(reads);
                let bait = bait(65_536);
                yield_now().await;
                if random.one_in(4) {
                    pause(1).await;
                }
                assert!(is_untouched(&bait), "the kernel wrote into freed memory");
            }
        });
    }
}

#[test]
fn dropped_writes_write_what_they_were_given_or_nothing() {
    for direct in [false, true] {
        in_both_modes(|| async {
            let dir = TempDir::new();
            let file = match File::create_new(dir.join("file"), unlocked(direct)).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => return skip(&error.chain()),
                file => file.expect("a file"),
            };
            let file = Rc::new(file);
            file.set_len(64 * 16_384).await.expect("a length");
            let mut random = Random::from_seed(6);
            for round in 0..100u64 {
                let mut writes = Vec::new();
                for block in 0..64u64 {
                    let mut data = Buffer::for_overwrite(16_384);
                    data.fill(u8::try_from(block + 1).expect("a byte"));
                    writes.push(file.write(ImageOffset::new(block * 16_384), data));
                }
                for write in &mut writes {
                    drop(poll_once(write).await);
                }
                if round % 2 == 0 {
                    yield_now().await;
                }
                let keep = random.index(64);
                writes.truncate(keep);
                // What was dropped is memory again, and soon full of something else.
                let bait = bait(16_384);
                for written in join_all(writes).await {
                    written.expect("the others are written");
                }
                assert!(is_untouched(&bait));
            }
            pause(20).await;
            for block in 0..64u64 {
                let read = file.read(ImageOffset::new(block * 16_384), Buffer::zeroed(16_384)).await;
                let bytes = read.expect("a read").to_vec();
                let expected = u8::try_from(block + 1).expect("a byte");
                assert!(
                    bytes.iter().all(|byte| *byte == expected || *byte == 0),
                    "block {block} holds somebody else's bytes"
                );
            }
        });
    }
}

/// An operation whose future was dropped still ends before the worker does: nothing is written after the next
/// user of the file has started.
#[test]
fn nothing_is_written_after_the_worker_has_ended() {
    for mode in MODES {
        let dir = TempDir::new();
        let path = dir.join("file");
        for _ in 0..20 {
            let ran = run(mode, async || {
                let file = File::open(&path, unlocked(false)).await;
                let file = match file {
                    Ok(file) => file,
                    Err(_) => File::create_new(&path, unlocked(false)).await.expect("a file"),
                };
                let mut writes = Vec::new();
                for n in 0..64u64 {
                    let mut data = Buffer::for_overwrite(65_536);
                    data.fill(1);
                    writes.push(file.write(ImageOffset::new(n * 65_536), data));
                }
                for write in &mut writes {
                    drop(poll_once(write).await);
                }
                yield_now().await;
            });
            if let Err(error) = ran {
                skip(&error.chain());
                break;
            }
            std::fs::write(&path, vec![2; 64 * 65_536]).expect("somebody else writes");
            std::thread::sleep(Duration::from_millis(1));
            let content = std::fs::read(&path).expect("the file");
            assert!(content.iter().all(|byte| *byte == 2), "a dropped write came after the end");
        }
    }
}

/// More operations than the ring has room for, and more completions at once than it keeps.
#[test]
fn a_flood_of_operations_is_survived() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let file = File::create_new(dir.join("file"), unlocked(false)).await.expect("a file");
        let mut content = Buffer::for_overwrite(1 << 20);
        content.fill(3);
        file.write(ImageOffset::ZERO, content).await.expect("a write");
        let file = Rc::new(file);
        let reads: Vec<_> = (0..10_000u64)
            .map(|n| {
                let file = file.clone();
                spawn_local(async move {
                    let read = file.read(ImageOffset::new(n % 256 * 4096), Buffer::zeroed(512)).await;
                    assert_eq!(read.expect("a read").to_vec(), [3; 512]);
                })
            })
            .collect();
        for read in reads {
            read.await;
        }

        let (mut far, mut near) = (Vec::new(), Vec::new());
        for _ in 0..3000 {
            let (here, there) = UnixStream::pair().expect("a pair: the test needs 6000 descriptors");
            far.push(there);
            let stream = Socket::from(here).attach();
            near.push(spawn_local(async move {
                let (buffer, count) = stream.read(Buffer::zeroed(16)).await.expect("a read");
                assert_eq!((count, buffer.to_vec()[0]), (1, 9));
            }));
        }
        pause(20).await;
        // All of them at once, while the worker is busy here.
        for there in &mut far {
            there.write_all(&[9]).expect("the other end writes");
        }
        for task in near {
            task.await;
        }
    });
}

#[test]
fn an_operation_off_a_worker_panics_rather_than_hang() {
    let file = run(IoMode::Auto, async || {
        let dir = TempDir::new();
        File::create_new(dir.join("file"), unlocked(false)).await.expect("a file")
    })
    .expect("a worker");
    let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        drop(futures_lite::future::block_on(file.read(ImageOffset::ZERO, Buffer::zeroed(1))));
    }));
    assert!(read.is_err());
}
