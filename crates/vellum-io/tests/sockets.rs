//! Connections carry bytes both ways at once, in any number of pieces, on any worker; listeners remove stale
//! files and nothing else.

mod common;

use std::fs;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{MODES, TempDir, in_both_modes};
use futures_lite::future::{block_on, or, poll_once};
use vellum_core::{Buffer, ByteStream, ErrorKind, Random};
use vellum_io::{
    Address, Listener, Socket, Stream, Workers, WorkersConfig, clock, connect, readable, spawn_local,
    writable,
};

async fn pause(milliseconds: u64) {
    clock().sleep(Duration::from_millis(milliseconds)).await;
}

/// Reads until `len` bytes are there or the other end sends no more.
async fn read_all(stream: &Stream, len: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < len {
        let room = (len - all.len()).min(65_536);
        let (buffer, count) = stream.read(Buffer::zeroed(room)).await.expect("a read");
        if count == 0 {
            break;
        }
        all.extend_from_slice(&buffer.to_vec()[..count]);
    }
    all
}

async fn both_ends(address: &Address) -> (Listener, Stream, Stream) {
    let listener = Listener::bind(address).await.expect("it listens");
    let near = connect(listener.address()).await.expect("somebody listens").attach();
    let far = listener.accept().await.expect("somebody calls").attach();
    (listener, near, far)
}

async fn talk(near: Stream, far: Stream) {
    let mut random = Random::from_seed(3);
    let mut message = vec![0; 3 << 20];
    random.fill(&mut message);
    let (near, far) = (Rc::new(near), Rc::new(far));
    let mut tasks = Vec::new();
    for (from, to) in [(near.clone(), far.clone()), (far, near)] {
        let bytes = message.clone();
        tasks.push(spawn_local(async move {
            // Pieces of all sizes, more of them than one call takes.
            let mut rest = &bytes[..];
            let mut data = Buffer::empty();
            let mut step = 0;
            while !rest.is_empty() {
                let (now, later) = rest.split_at((step * 7 % 3000 + 1).min(rest.len()));
                data.append(Buffer::copy_of(now));
                rest = later;
                step += 1;
            }
            assert!(data.piece_count() > 1024);
            from.write_all(data).await.expect("a write");
            from.write_all(Buffer::empty()).await.expect("nothing to write");
            from.shut_down(Shutdown::Write);
        }));
        let expected = message.clone();
        tasks.push(spawn_local(async move {
            // Into several pieces, of which the first ones are filled.
            let mut buffer = Buffer::zeroed(3);
            buffer.append(Buffer::zeroed(70));
            let (buffer, count) = to.read(buffer).await.expect("a read");
            let mut all = buffer.to_vec()[..count].to_vec();
            all.extend(read_all(&to, usize::MAX).await);
            assert!(all == expected);
        }));
    }
    for task in tasks {
        task.await;
    }
}

#[test]
fn both_directions_at_once_over_a_unix_socket() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let (listener, near, far) = both_ends(&Address::unix(dir.join("socket"))).await;
        assert!(near.peer().contains("process"), "{}", near.peer());
        talk(near, far).await;
        drop(listener);
        assert!(!dir.join("socket").exists(), "a listener removes its file");
    });
}

#[test]
fn both_directions_at_once_over_tcp() {
    in_both_modes(|| async {
        let (listener, near, far) = both_ends(&Address::tcp("127.0.0.1", 0)).await;
        assert!(listener.address().to_string().starts_with("127.0.0.1:"));
        assert_eq!(near.peer(), listener.address().to_string());
        talk(near, far).await;
    });
}

#[test]
fn both_directions_at_once_within_the_program() {
    in_both_modes(|| async {
        let (near, far) = Socket::pair().expect("a pair");
        talk(near.attach(), far.attach()).await;
    });
}

#[test]
fn shutting_down_wakes_a_read_that_waits() {
    in_both_modes(|| async {
        let (near, far) = Socket::pair().expect("a pair");
        let near = Rc::new(near.attach());
        let reader = near.clone();
        let read = spawn_local(async move { reader.read(Buffer::zeroed(10)).await.expect("the end").1 });
        pause(5).await;
        near.shutdown();
        assert_eq!(read.await, 0);
        let far = far.attach();
        assert_eq!(far.read(Buffer::zeroed(10)).await.expect("the end").1, 0);
        near.shutdown();
        let error = far.write_all(Buffer::zeroed(10)).await.expect_err("nobody listens");
        assert_eq!(error.kind(), ErrorKind::Closed);
        let error = far.read(Buffer::empty()).await.expect_err("a buffer of no bytes");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    });
}

/// A peer that reads nothing holds a write up; reading it lets it end; and a write that waits can be dropped.
#[test]
fn a_write_waits_for_room() {
    in_both_modes(|| async {
        let (near, far) = Socket::pair().expect("a pair");
        let (near, far) = (near.attach(), far.attach());
        let mut write = near.write_all(Buffer::zeroed(4 << 20));
        assert!(poll_once(&mut write).await.is_none());
        or(&mut write, async {
            pause(20).await;
            Ok(())
        })
        .await
        .expect("it waits");
        let reader = spawn_local(async move { read_all(&far, 4 << 20).await.len() });
        write.await.expect("it ends");
        assert_eq!(reader.await, 4 << 20);
    });
}

#[test]
fn sockets_that_somebody_made_non_blocking_work_too() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let listener = UnixListener::bind(dir.join("socket")).expect("it listens");
        listener.set_nonblocking(true).expect("a socket");
        let listener = Listener::adopt(listener.into(), Address::unix(dir.join("socket")));
        let calling = spawn_local(async move {
            pause(10).await;
            let (here, there) = UnixStream::pair().expect("a pair");
            here.set_nonblocking(true).expect("a socket");
            (Socket::from(here).attach(), there)
        });
        let mut accept = Box::pin(listener.accept());
        assert!(poll_once(&mut accept).await.is_none());
        let (stream, mut there) = calling.await;
        let client = UnixStream::connect(dir.join("socket")).expect("somebody listens");
        drop(accept.await.expect("a connection"));
        drop(client);
        let mut read = stream.read(Buffer::zeroed(10));
        assert!(poll_once(&mut read).await.is_none());
        pause(5).await;
        std::io::Write::write_all(&mut there, b"hello").expect("a write");
        assert_eq!(read.await.expect("a read").1, 5);
        drop(listener);
        assert!(dir.join("socket").exists(), "the file of an adopted listener stays");
    });
}

#[test]
fn connections_are_handed_to_other_workers() {
    // Also by workers that busy-poll before they sleep.
    let polled = MODES.map(|mode| (mode, Duration::from_millis(2)));
    for (mode, poll_max) in MODES.map(|mode| (mode, Duration::ZERO)).into_iter().chain(polled) {
        let Ok(workers) = Workers::start(WorkersConfig { threads: 2, mode, poll_max }) else { continue };
        let dir = TempDir::new();
        let address = Address::unix(dir.join("socket"));
        let (handle, at) = (workers.handle(), address.clone());
        let served = workers.spawn(0, move || async move {
            let listener = Listener::bind(&at).await.expect("it listens");
            let mut sessions = Vec::new();
            for n in 0..10 {
                let socket = listener.accept().await.expect("a connection");
                sessions.push(handle.spawn(n % 2, move || async move {
                    let stream = socket.attach();
                    let (mut buffer, count) = stream.read(Buffer::zeroed(100)).await.expect("a read");
                    drop(buffer.split_off(count));
                    stream.write_all(buffer).await.expect("a write");
                }));
            }
            for session in sessions {
                session.await.expect("the worker works");
            }
        });
        let called = workers.spawn(1, move || async move {
            for n in 0..10u8 {
                let stream = loop {
                    match connect(&address).await {
                        Ok(socket) => break socket.attach(),
                        Err(error) => {
                            assert!(
                                matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Closed),
                                "{error:?}"
                            );
                            pause(1).await;
                        }
                    }
                };
                stream.write_all(Buffer::copy_of(&[n; 50])).await.expect("a write");
                assert_eq!(read_all(&stream, 50).await, [n; 50]);
            }
        });
        block_on(served).expect("it ends");
        block_on(called).expect("it ends");
        workers.join();
    }
}

#[test]
fn a_dead_listeners_file_is_replaced_and_nothing_else() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let address = Address::unix(dir.join("socket"));
        // The file of a program that died.
        drop(UnixListener::bind(dir.join("socket")).expect("it listens"));
        assert!(dir.join("socket").exists());
        let listener = Listener::bind(&address).await.expect("the file is dead");
        let error = Listener::bind(&address).await.expect_err("somebody listens");
        assert_eq!(error.kind(), ErrorKind::Locked, "{error:?}");
        drop(connect(&address).await.expect("the first one still listens"));
        // Another program takes the name.
        fs::rename(dir.join("socket"), dir.join("moved")).expect("a name");
        let second = Listener::bind(&address).await.expect("the name is free");
        drop(listener);
        assert!(dir.join("socket").exists(), "the file is another's by now");
        drop(second);
        assert!(!dir.join("socket").exists());
        fs::write(dir.join("file"), b"content").expect("a file");
        let error = Listener::bind(&Address::unix(dir.join("file"))).await.expect_err("it is no socket");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
        assert_eq!(fs::read(dir.join("file")).expect("the file"), b"content");
        let long = "x".repeat(200);
        let error = Listener::bind(&Address::unix(dir.join(&long))).await.expect_err("the path is too long");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    });
}

/// The kernel may keep the socket of a killed program open for a moment. Here another process does, and
/// closes it later. Any program that may read the directory can lock it.
#[test]
fn a_directory_that_somebody_keeps_locked_does_not_keep_a_listener_out() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let path = dir.join("socket");
        drop(std::os::unix::net::UnixListener::bind(&path).expect("a dead listener's file"));
        let directory = std::fs::File::open(dir.path()).expect("a directory");
        rustix::fs::flock(&directory, rustix::fs::FlockOperation::LockExclusive).expect("it is locked");
        let listener = Listener::bind(&Address::unix(&path)).await.expect("it goes without");
        drop(listener);
        drop(directory);
    });
}

#[test]
fn a_killed_listeners_socket_is_waited_for() {
    let dir = TempDir::new();
    let path = dir.path().join("nbd.sock");
    let script = "import os, socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
if os.fork() == 0:
    listener.listen()
    os._exit(0)
os.wait()
print('ready', flush=True)
time.sleep(0.4)";
    let spawned =
        Command::new("python3").arg("-c").arg(script).arg(&path).stdout(std::process::Stdio::piped()).spawn();
    let Ok(mut other) = spawned else { return common::skip("no python3") };
    let mut said = [0; 6];
    std::io::Read::read_exact(other.stdout.as_mut().expect("piped"), &mut said).expect("it listens");
    in_both_modes(|| async { drop(Listener::bind(&Address::unix(&path)).await.expect("it is free again")) });
    other.wait().expect("it ends");
}

#[test]
fn connecting_to_nobody_fails() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let error = connect(&Address::unix(dir.join("none"))).await.expect_err("there is none");
        assert_eq!(error.kind(), ErrorKind::NotFound);
        drop(UnixListener::bind(dir.join("dead")).expect("it listens"));
        let error = connect(&Address::unix(dir.join("dead"))).await.expect_err("nobody listens");
        assert_eq!(error.kind(), ErrorKind::Closed);
        let port = {
            let listener = Listener::bind(&Address::tcp("127.0.0.1", 0)).await.expect("it listens");
            match listener.address() {
                Address::Tcp { port, .. } => *port,
                Address::Unix(_) => unreachable!("a port was asked for"),
            }
        };
        let error = connect(&Address::tcp("127.0.0.1", port)).await.expect_err("nobody listens any more");
        assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
    });
}

#[test]
fn addresses_are_written_as_people_do() {
    assert_eq!(Address::tcp("::1", 10809).to_string(), "[::1]:10809");
    assert_eq!(Address::tcp("host", 10809).to_string(), "host:10809");
    assert_eq!(Address::unix("/run/socket").to_string(), "/run/socket");
}

#[test]
fn any_descriptor_can_be_waited_for() {
    in_both_modes(|| async {
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).expect("an eventfd");
        let eventfd = Arc::new(eventfd);
        writable(&eventfd).await.expect("there is room");
        let mut wait = Box::pin(readable(&eventfd));
        assert!(poll_once(&mut wait).await.is_none());
        let bell = eventfd.clone();
        let ringing = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            rustix::io::write(&*bell, &[1, 0, 0, 0, 0, 0, 0, 0]).expect("it rings");
        });
        wait.await.expect("it rang");
        ringing.join().expect("it ends");
        assert_eq!(rustix::io::read(&*eventfd, &mut [0; 8]), Ok(8));
    });
}

/// Without descriptors an accept fails, again and again, and continues when there are some. In a process of
/// its own.
#[test]
fn accepting_survives_a_shortage_of_descriptors() {
    if std::env::var_os("VELLUM_TEST_CHILD").is_none() {
        let test = ["accepting_survives_a_shortage_of_descriptors", "--exact", "--nocapture"];
        let program = std::env::current_exe().expect("this program");
        let output =
            Command::new(program).args(test).env("VELLUM_TEST_CHILD", "1").output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    in_both_modes(|| async {
        let dir = TempDir::new();
        let listener = Listener::bind(&Address::unix(dir.join("socket"))).await.expect("it listens");
        let client = UnixStream::connect(dir.join("socket")).expect("somebody listens");
        let last = fs::File::open("/dev/null").expect("a descriptor").as_raw_fd();
        let mut taken = Vec::new();
        let limit = libc::rlimit { rlim_cur: last.cast_unsigned().into(), rlim_max: 20_000 };
        // SAFETY: sets a limit of this process from a value that lives through the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
        while let Ok(file) = fs::File::open("/dev/null") {
            taken.push(file);
        }
        let start = Instant::now();
        for _ in 0..2 {
            let error = listener.accept().await.expect_err("there is no descriptor left");
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error:?}");
        }
        assert!(start.elapsed() >= Duration::from_millis(200), "a loop does not spin");
        let limit = libc::rlimit { rlim_cur: 20_000, rlim_max: 20_000 };
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
        drop(listener.accept().await.expect("the connection has waited"));
        drop(client);
    });
}

#[test]
fn a_private_socket_is_its_owners_alone() {
    in_both_modes(|| async {
        let dir = TempDir::new();
        let path = dir.join("private");
        // The file of a program that died, open to everybody.
        drop(UnixListener::bind(&path).expect("it listens"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).expect("it is ours");
        let listener = Listener::bind_private(&path).await.expect("the file is dead");
        let mode = fs::metadata(&path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{mode:o}");
        drop(connect(&Address::unix(&path)).await.expect("it listens"));
        drop(listener);
        assert!(!path.exists());
    });
}
