//! Clients that lie, stall, flood and vanish: whatever one of them does, another one keeps its disk.
//!
//! ```text
//!   rude clients, one kind after the other ──►┐
//!                                             ├──► server: descriptors come back, memory is bounded, it ends well
//!   a good client, all the while ────────────►┘    writes, reads back, compares; it must get on during each kind
//! ```
//!
//! The kinds follow bugs that NBD servers have had: lengths that are trusted, names that are copied, endless
//! options, an assertion on an early hang-up, commands out of order, a handshake that takes forever.

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

mod support;

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use support::client::{Client, FLUSH, Peer, READ, Socket, TRIM, WRITE, WRITE_ZEROES, option, request};
use support::dir::Dir;
use support::program::vellum;
use support::server::Server;
use support::{PATIENCE, noise, until};
use vellum_core::Random;

const SIZE: usize = 16 << 20;
const CONNECTIONS: usize = 24;
/// What one client may make the server hold, as the limits say, and what its requests may take in the disk.
const KIB_FOR_A_CLIENT: u64 = 40 << 10;
/// Clients that make it hold as much as it will.
const HOARDERS: u64 = 4;

const GO: u32 = 7;
const EXPORT_NAME: u32 = 1;

/// Something rude. What is left open is given back, and stays open for a while.
type Rudeness = fn(&Peer) -> io::Result<Vec<Socket>>;

const KINDS: [(&str, Rudeness); 12] = [
    ("garbage instead of a handshake", garbage),
    ("handshakes that stop halfway and hang up", hang_up_halfway),
    ("handshakes that stop halfway and stay", stay_halfway),
    ("options with lengths that lie", lying_options),
    ("options without end", endless_options),
    ("lists that nobody reads", unread_lists),
    ("requests with lengths that lie", lying_requests),
    ("garbage instead of requests", garbage_requests),
    ("payloads that stop halfway", half_payloads),
    ("replies that nobody reads", hoard),
    ("many who come and go", come_and_go),
    ("more connections than there are", crowd),
];

/// The client's flags, to begin a handshake.
fn hello(peer: &Peer) -> io::Result<Socket> {
    let mut socket = peer.connect()?;
    socket.exactly(18)?;
    socket.write_all(&3_u32.to_be_bytes())?;
    Ok(socket)
}

fn go() -> Vec<u8> {
    option(GO, &[0; 6])
}

/// A header of an option that claims a length.
fn claim(number: u32, len: u32) -> Vec<u8> {
    [&option(number, &[])[..12], &len.to_be_bytes()].concat()
}

/// Waits until the server disconnects, or has sent enough.
fn until_end(socket: &mut Socket) {
    drop(socket.set_patience(Duration::from_secs(5)));
    let mut buffer = [0; 4096];
    let mut left = 1 << 20;
    while let Ok(len @ 1..) = socket.read(&mut buffer) {
        left -= len.min(left);
        if left == 0 {
            break;
        }
    }
}

fn garbage(peer: &Peer) -> io::Result<Vec<Socket>> {
    for seed in 0..20 {
        let mut socket = peer.connect()?;
        drop(socket.write_all(&noise(1 + 1000 * seed, seed as u64)));
        if seed % 2 == 0 {
            drop(socket.write_all(b"GET / HTTP/1.1\r\n\r\n"));
            until_end(&mut socket);
        }
    }
    Ok(Vec::new())
}

/// A whole conversation, to be cut anywhere.
fn conversation() -> Vec<u8> {
    let data = noise(4096, 1);
    let write = request(0, WRITE, 1, (SIZE / 2) as u64, 4096);
    [&3_u32.to_be_bytes()[..], &option(3, &[]), &go(), &write, &data].concat()
}

fn hang_up_halfway(peer: &Peer) -> io::Result<Vec<Socket>> {
    let all = conversation();
    for cut in (0..80).chain([100, 500, all.len() - 1]) {
        let mut socket = peer.connect()?;
        drop(socket.write_all(&all[..cut]));
    }
    Ok(Vec::new())
}

fn stay_halfway(peer: &Peer) -> io::Result<Vec<Socket>> {
    let all = conversation();
    let mut open = Vec::new();
    for cut in [0, 3, 4, 12, 20, 30, all.len() - 1] {
        let mut socket = peer.connect()?;
        socket.write_all(&all[..cut])?;
        open.push(socket);
    }
    Ok(open)
}

fn lying_options(peer: &Peer) -> io::Result<Vec<Socket>> {
    for number in [EXPORT_NAME, 2, 3, 5, 6, GO, 8, 9, 10, 11, 0, u32::MAX] {
        for len in [u32::MAX, 1 << 31, 5 << 20, 100_000, 4097] {
            let mut socket = hello(peer)?;
            drop(socket.write_all(&claim(number, len)));
            drop(socket.write_all(&noise(2000, u64::from(len))));
        }
    }
    let names: [&[u8]; 6] = [
        &u32::MAX.to_be_bytes(),
        &[&[0, 0, 0, 1][..], b"a", &u16::MAX.to_be_bytes(), &[0, 3]].concat(),
        &[&5000_u32.to_be_bytes()[..], &[b'n'; 5000], &[0, 0]].concat(),
        &[&[0, 0, 0, 2][..], &[0xff, 0xfe], &[0, 0]].concat(),
        &[&[0, 0, 0, 2][..], &[0, 0], &[0, 0]].concat(),
        &[],
    ];
    for number in [GO, 6, EXPORT_NAME, 9, 10] {
        for name in names {
            let mut socket = hello(peer)?;
            drop(socket.write_all(&option(3, &[])));
            drop(socket.write_all(&option(number, name)));
            drop(socket.write_all(&option(2, &[])));
            until_end_of_options(&mut socket);
        }
    }
    Ok(Vec::new())
}

/// Reads what comes at once.
fn until_end_of_options(socket: &mut Socket) {
    drop(socket.set_patience(Duration::from_millis(20)));
    drop(socket.read(&mut [0; 4096]));
}

fn endless_options(peer: &Peer) -> io::Result<Vec<Socket>> {
    let flood: Vec<u8> = (0..20_000).flat_map(|_| option(77, b"none")).collect();
    for _ in 0..3 {
        let mut socket = hello(peer)?;
        let mut reader = socket.duplicate()?;
        let reading = std::thread::spawn(move || until_end(&mut reader));
        // What the kernel still accepts proves nothing about the server; eventually it must be refused.
        let is_refused = (0..200).any(|_| socket.write_all(&flood).is_err());
        assert!(is_refused, "somebody listens for ever");
        reading.join().expect("it reads");
    }
    Ok(Vec::new())
}

fn unread_lists(peer: &Peer) -> io::Result<Vec<Socket>> {
    let flood: Vec<u8> = (0..5000).flat_map(|_| option(3, &[])).collect();
    let mut open = Vec::new();
    for _ in 0..4 {
        let mut socket = hello(peer)?;
        socket.set_patience(Duration::from_millis(300))?;
        while socket.write_all(&flood).is_ok() {}
        open.push(socket);
    }
    Ok(open)
}

/// A connection in transmission.
fn transmission(peer: &Peer) -> io::Result<Socket> {
    Ok(Client::connect(peer, "")?.socket)
}

fn lying_requests(peer: &Peer) -> io::Result<Vec<Socket>> {
    for command in [READ, WRITE, FLUSH, TRIM, WRITE_ZEROES, 5, 7, 8, 99, u16::MAX] {
        for (at, len) in [
            (0, u32::MAX),
            (u64::MAX, 4096),
            (u64::MAX - 4095, 4096),
            (1 << 63, 1),
            (SIZE as u64 - 1, 2),
            (SIZE as u64, 0),
            (0, 0),
            (0, (32 << 20) + 1),
        ] {
            // None of them changes a byte: no write with data is within the disk.
            if [TRIM, WRITE_ZEROES].contains(&command) && at == 0 {
                continue;
            }
            for flags in [0, 0xffff] {
                let mut socket = transmission(peer)?;
                drop(socket.write_all(&request(flags, command, 1, at, len)));
                until_end_of_options(&mut socket);
            }
        }
    }
    Ok(Vec::new())
}

fn garbage_requests(peer: &Peer) -> io::Result<Vec<Socket>> {
    for seed in 0..20 {
        let mut socket = transmission(peer)?;
        drop(socket.write_all(&noise(100 + 3000 * seed, 1000 + seed as u64)));
        until_end(&mut socket);
    }
    Ok(Vec::new())
}

fn half_payloads(peer: &Peer) -> io::Result<Vec<Socket>> {
    let mut open = Vec::new();
    for index in 0..12 {
        let mut socket = transmission(peer)?;
        // In the half of the disk that is not compared.
        socket.write_all(&request(0, WRITE, 1, (SIZE / 2) as u64, 1 << 20))?;
        socket.write_all(&noise(1000 * index, 2))?;
        if index % 4 == 0 {
            open.push(socket);
        }
    }
    Ok(open)
}

fn hoard(peer: &Peer) -> io::Result<Vec<Socket>> {
    let flood: Vec<u8> = (0..512).flat_map(|cookie| request(0, READ, cookie, 0, 1 << 20)).collect();
    let mut open = Vec::new();
    for _ in 0..HOARDERS {
        let mut socket = transmission(peer)?;
        socket.set_patience(Duration::from_millis(300))?;
        while socket.write_all(&flood).is_ok() {}
        open.push(socket);
    }
    Ok(open)
}

fn come_and_go(peer: &Peer) -> io::Result<Vec<Socket>> {
    for index in 0..300 {
        let mut socket = peer.connect()?;
        if index % 3 == 1 {
            drop(socket.write_all(&3_u32.to_be_bytes()));
        }
        if index % 3 == 2 {
            socket.shut_down();
        }
    }
    Ok(Vec::new())
}

fn crowd(peer: &Peer) -> io::Result<Vec<Socket>> {
    (0..3 * CONNECTIONS).map(|_| peer.connect()).collect()
}

/// Writes, reads back and compares in the first half of the disk until it is stopped. Returns what it wrote.
fn good_client(mut client: Client, stop: &AtomicBool, done: &AtomicU64) -> Vec<u8> {
    let mut disk = client.read(0, u32::try_from(SIZE / 2).expect("small")).expect("a read");
    let mut random = Random::from_seed(5);
    while !stop.load(Ordering::Relaxed) {
        let len = 1 + random.index(20_000);
        let at = random.index(disk.len() - len);
        let bytes = noise(len, random.any());
        client.write(at as u64, &bytes, 0).expect("a write of a good client");
        disk[at..at + len].copy_from_slice(&bytes);
        let (from, upto) = (at.saturating_sub(3000), (at + len + 3000).min(disk.len()));
        let read = client.read(from as u64, u32::try_from(upto - from).expect("short")).expect("a read");
        assert!(read == disk[from..upto], "what a good client wrote, at {at}, is not what it reads");
        if random.one_in(8) {
            client.flush().expect("a flush");
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    client.disconnect();
    disk
}

/// Lets the good client end, also when the test fails before it should.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn abused(way: &[&str]) {
    let dir = Dir::new("abuse");
    let image = dir.text("image.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &image, &SIZE.to_string()]).answer();
    let most = CONNECTIONS.to_string();
    let common = [&image, "--nbd", "tcp:127.0.0.1:0", "--max-connections", &most];
    let mut server = Server::start(&[&common, way].concat());
    let peers = [server.peer(), Peer::Tcp(server.tcp())];
    let client = Client::connect(&peers[0], "").expect("a server");
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let disk = std::thread::scope(|scope| {
        let working = scope.spawn(|| good_client(client, &stop, &done));
        let stopping = Stop(&stop);
        until("the good client works", || done.load(Ordering::Relaxed) > 20);
        let (descriptors, memory) = (server.descriptors(), server.memory_kib_max());
        for (name, rudeness) in KINDS {
            for peer in &peers {
                let before = done.load(Ordering::Relaxed);
                let open = rudeness(peer).unwrap_or_else(|error| panic!("{name}: {error}"));
                until(&format!("{name}: the good client gets on"), || {
                    assert!(!working.is_finished(), "{name}: the good client failed");
                    done.load(Ordering::Relaxed) > before + 20
                });
                assert!(server.is_running(), "{name}: the server ended:\n{}", server.said());
                drop(open);
                // New clients are admitted as soon as the rude ones are gone.
                Client::connect(peer, "").unwrap_or_else(|error| panic!("{name}: {error}")).disconnect();
            }
            until(&format!("{name}: descriptors stay open"), || server.descriptors() <= descriptors);
        }
        let grown = server.memory_kib_max() - memory;
        let bound = HOARDERS * KIB_FOR_A_CLIENT + (32 << 10);
        assert!(grown < bound, "{grown} KiB more, {bound} were to be expected at most");
        drop(stopping);
        working.join().expect("the good client")
    });
    assert!(!server.said().contains("panicked"), "{}", server.said());
    server.stop();
    vellum(&["check", &image]).answer();
    let copy = dir.text("copy");
    vellum(&["convert", "-O", "raw", &image, &copy]).answer();
    let copied = std::fs::read(&copy).expect("the copy");
    assert_eq!(support::first_difference(&copied[..SIZE / 2], &disk), None);
}

#[test]
fn abused_with_io_uring_if_there_is_any() {
    abused(&[]);
}

#[test]
fn abused_with_threads() {
    abused(&["--io", "threads", "--threads", "1"]);
}

/// Clients that are in the middle of something, or of nothing, do not keep a server from ending.
#[test]
fn a_server_ends_among_rude_clients() {
    let dir = Dir::new("abuse");
    let image = dir.text("image.qcow2");
    vellum(&["create", "-q", "-f", "qcow2", &image, &SIZE.to_string()]).answer();
    for signal in [Signal::TERM, Signal::INT] {
        let server = Server::start(&[&image, "--drain-seconds", "5"]);
        let peer = server.peer();
        let kinds: [Rudeness; 4] = [stay_halfway, half_payloads, hoard, unread_lists];
        let open: Vec<Socket> = kinds.iter().flat_map(|kind| kind(&peer).expect("a server")).collect();
        server.signal(signal);
        let ran = server.wait(PATIENCE);
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(ran.err.contains("closed") && !ran.err.contains("panicked"), "{ran:?}");
        drop(open);
        vellum(&["check", &image]).answer();
        assert_eq!(vellum(&["info", "--output", "json", &image]).json()["dirty-flag"], false);
    }
}
