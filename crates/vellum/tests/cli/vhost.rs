//! `serve --vhost-user-blk`: which disk is at which socket, alone and beside NBD; and what is refused.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::refused;
use super::support::dir::Dir;
use super::support::program::{Ran, pid_of, vellum, vellum_command, wait};
use super::support::server::Server;

const GET_FEATURES: u32 = 1;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const GET_QUEUE_NUM: u32 = 17;
const GET_CONFIG: u32 = 24;

/// What a front end reads about a disk before it uses it.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    bytes: u64,
    read_only: bool,
    queues: u64,
}

/// Sends a request; returns the body of the answer.
fn ask(socket: &mut UnixStream, request: u32, body: &[u8], answer: usize) -> Vec<u8> {
    let length = u32::try_from(body.len()).expect("small").to_le_bytes();
    let message = [&request.to_le_bytes()[..], &1u32.to_le_bytes(), &length, body].concat();
    socket.write_all(&message).expect("it listens");
    let mut got = vec![0; if answer > 0 { 12 + answer } else { 0 }];
    socket.read_exact(&mut got).expect("it answers");
    got.split_off(got.len().min(12))
}

fn told(path: &str) -> Told {
    let mut socket = UnixStream::connect(path).expect("it listens");
    let number = |bytes: Vec<u8>| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let features = number(ask(&mut socket, GET_FEATURES, &[], 8));
    let protocol = number(ask(&mut socket, GET_PROTOCOL_FEATURES, &[], 8));
    ask(&mut socket, SET_PROTOCOL_FEATURES, &protocol.to_le_bytes(), 0);
    let queues = number(ask(&mut socket, GET_QUEUE_NUM, &[], 8));
    let wanted = [&[0; 4][..], &8u32.to_le_bytes(), &[0; 4], &[0; 8]].concat();
    let sectors = number(ask(&mut socket, GET_CONFIG, &wanted, 20).split_off(12));
    Told { bytes: sectors * 512, read_only: features & 1 << 5 != 0, queues }
}

/// A server without NBD, once it reports that it serves this many sockets.
struct Alone(Option<Child>, Instant);

impl Alone {
    fn start(sockets: usize, arguments: &[&str]) -> Self {
        let mut command = vellum_command();
        let mut child =
            command.arg("serve").args(arguments).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stderr.take().expect("it was asked for")).lines();
        for _ in 0..sockets {
            let line = lines.next().expect("it says more").expect("text");
            assert!(line.contains("serving vhost-user-blk "), "{line}");
        }
        std::thread::spawn(move || lines.for_each(drop));
        Self(Some(child), Instant::now())
    }

    fn stop(mut self) -> Ran {
        let child = self.0.take().expect("it runs");
        kill_process(pid_of(&child), Signal::TERM).expect("it runs");
        wait(child, self.1, Duration::from_secs(60)).expect("it ends")
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

fn images(dir: &Dir) -> [String; 2] {
    [("one.qcow2", "4M"), ("two.qcow2", "8M")].map(|(name, size)| {
        let path = dir.text(name);
        vellum(&["create", "-q", "-f", "qcow2", &path, size]).answer();
        path
    })
}

#[test]
fn each_socket_has_its_disk() {
    let (dir, place) = (Dir::new("vhost"), Dir::short());
    let [one, two] = images(&dir);
    let [web, db] = ["web", "db"].map(|name| place.text(name));
    let exports = [format!("web={one}"), format!("db={two}")];
    let sockets = [format!("web={web}"), format!("db={db}")];
    let server = Alone::start(
        2,
        &[
            "--export",
            &exports[0],
            "--export",
            &exports[1],
            "--vhost-user-blk",
            &sockets[0],
            "--vhost-user-blk",
            &sockets[1],
            "--queues",
            "3",
        ],
    );
    // One after the other, and the first once more.
    for (path, mib) in [(&web, 4), (&db, 8), (&web, 4)] {
        assert_eq!(told(path), Told { bytes: mib << 20, read_only: false, queues: 3 });
    }
    // One that is connected does not keep the server from ending.
    let _idle = UnixStream::connect(&web).expect("it listens");
    assert_eq!(server.stop().code, 0);
    assert!(!place.join("web").exists() && !place.join("db").exists(), "the sockets are gone");

    let server = Alone::start(1, &["-r", "--threads", "2", &one, "--vhost-user-blk", &web]);
    assert_eq!(told(&web), Told { bytes: 4 << 20, read_only: true, queues: 2 });
    assert_eq!(server.stop().code, 0);
}

#[test]
fn a_disk_is_at_both_kinds_of_socket() {
    let (dir, place) = (Dir::new("vhost"), Dir::short());
    let [one, _] = images(&dir);
    let at = place.text("vhost");
    let server = Server::start(&[&one, "--vhost-user-blk", &at]);
    assert_eq!(told(&at).bytes, 4 << 20);
    let _client = UnixStream::connect(server.socket()).expect("NBD is served, too");
    server.stop();
}

#[test]
fn a_disk_does_not_go_back_under_a_machine() {
    let (dir, place) = (Dir::new("vhost"), Dir::short());
    let (image, at, control) = (dir.text("disk.vlm"), place.text("vhost"), place.text("control"));
    vellum(&["create", "-q", "-f", "vellum", "-o", "layout=table", &image, "8M"]).answer();
    let server = Alone::start(1, &[&image, "--vhost-user-blk", &at, "--control", &control]);
    let snapshot = |what: &str| vellum(&["snapshot", what, "--control", &control, "first"]);
    snapshot("create").answer();
    let mut machine = UnixStream::connect(&at).expect("it listens");
    ask(&mut machine, GET_FEATURES, &[], 8);
    let ran = snapshot("revert");
    assert!(ran.code == 1 && ran.err.contains("a client is connected"), "{ran:?}");
    drop(machine);
    let begun = Instant::now();
    while snapshot("revert").code != 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the machine has left");
    }
    assert_eq!(told(&at).bytes, 8 << 20);
    assert_eq!(server.stop().code, 0);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let dir = Dir::new("vhost");
    let [one, two] = images(&dir);
    let at = dir.text("socket");
    let exports = [format!("web={one}"), format!("db={two}")];
    let both = ["serve", "--export", &exports[0], "--export", &exports[1]];
    refused(1, &["several disks", "NAME=PATH"], &[&both[..], &["--vhost-user-blk", &at]].concat());
    let unknown = format!("mail={at}");
    refused(1, &["no export \"mail\""], &[&both[..], &["--vhost-user-blk", &unknown]].concat());
    for arguments in [
        &["serve", &one][..],
        &["serve", &one, "--nbd", "unix:x", "--queues", "2"],
        &["serve", &one, "--vhost-user-blk", "web="],
        &["serve", &one, "--vhost-user-blk", &at, "--queues", "0"],
        &["serve", &one, "--vhost-user-blk", &at, "--queues", "257"],
    ] {
        let ran = vellum(arguments);
        assert_eq!((ran.code, ran.out.as_str()), (1, ""), "{arguments:?}: {ran:?}");
    }
}
