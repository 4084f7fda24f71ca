//! Sockets that a service manager passes: systemd's way, libnbd's, and mistakes.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::process::{Signal, kill_process};

use super::support::PATIENCE;
use super::support::client::{Client, Peer};
use super::support::dir::Dir;
use super::support::program::{Ran, pid_of, run, vellum, vellum_command, wait};
use crate::requires;

/// `vellum serve` with this as descriptor 3, and this environment for it. `PID` stands for its process id.
fn launch(passed: impl Into<OwnedFd>, environment: &str, arguments: &[&str]) -> Child {
    // The shell becomes the program, so `$$` is its number.
    let script = format!("exec 3<&0 0</dev/null; PID=$$; export {environment}; exec \"$@\"");
    Command::new("sh")
        .args(["-c", &script, "sh"])
        .arg(vellum_command().get_program())
        .arg("serve")
        .args(arguments)
        .stdin(Stdio::from(passed.into()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("there is a shell")
}

fn end(child: Child, signal: Option<Signal>) -> Ran {
    if let Some(signal) = signal {
        kill_process(pid_of(&child), signal).expect("it runs");
    }
    wait(child, Instant::now(), PATIENCE).expect("it ends")
}

fn image(dir: &Dir) -> String {
    vellum(&["create", "-f", "qcow2", &dir.text("image"), "1M"]).answer();
    dir.text("image")
}

#[test]
fn a_passed_socket_takes_the_place_of_one_that_is_named() {
    let dir = Dir::short();
    let image = image(&dir);
    for environment in
        ["LISTEN_PID=$PID LISTEN_FDS=1", "LISTEN_PID=$PID LISTEN_FDS=1 LISTEN_FDNAMES=vellum.socket"]
    {
        for is_nonblocking in [false, true] {
            let listener = UnixListener::bind(dir.join("nbd")).expect("a socket");
            listener.set_nonblocking(is_nonblocking).expect("either works");
            // A client that connects before the server starts waits in the socket.
            let mut early = UnixStream::connect(dir.join("nbd")).expect("somebody listens");
            let mut child = launch(listener, environment, &[&image]);
            let mut greeting = [0; 18];
            std::io::Read::read_exact(&mut early, &mut greeting).expect("the server says something");
            assert_eq!(&greeting[..8], b"NBDMAGIC");
            let client = Client::connect(&Peer::Unix(dir.join("nbd")), "").expect("it serves");
            drop((early, client));
            // Said when all is ready, which may be after the first client was served.
            let uri = format!("serving nbd+unix:///?socket={}", dir.text("nbd"));
            let mut lines = BufReader::new(child.stderr.take().expect("it was asked for")).lines();
            assert!(lines.any(|line| line.expect("text") == uri), "it does not say {uri}");
            let ran = end(child, Some(Signal::TERM));
            assert_eq!(ran.code, 0, "{ran:?}");
            assert!(dir.join("nbd").exists(), "the file is the manager's");
            std::fs::remove_file(dir.join("nbd")).expect("it is there");
        }
    }
}

#[test]
fn sockets_for_another_process_are_none() {
    let dir = Dir::short();
    let image = image(&dir);
    for environment in
        ["LISTEN_PID=1 LISTEN_FDS=1", "LISTEN_FDS=1", "LISTEN_PID=$PID", "LISTEN_PID=$PID LISTEN_FDS=0"]
    {
        let (one, _other) = UnixStream::pair().expect("sockets");
        let ran = end(launch(one, environment, &[&image]), None);
        assert_ne!(ran.code, 0);
        assert!(ran.err.contains("there is nowhere to serve the disk: use --nbd"), "{environment}: {ran:?}");
    }
}

#[test]
fn mistakes_are_told() {
    let dir = Dir::short();
    let image = image(&dir);
    let listener = || {
        drop(std::fs::remove_file(dir.join("nbd")));
        OwnedFd::from(UnixListener::bind(dir.join("nbd")).expect("a socket"))
    };
    let ours = "LISTEN_PID=$PID LISTEN_FDS";
    let file = || OwnedFd::from(std::fs::File::open(&image).expect("it is there"));
    let datagram = || OwnedFd::from(UnixDatagram::unbound().expect("a socket"));
    let connected = || OwnedFd::from(UnixStream::pair().expect("sockets").0);
    let cases: [(OwnedFd, &str, &[&str], &str); 8] = [
        (listener(), "=nonsense", &[], "LISTEN_FDS is \"nonsense\", which is not a number of sockets"),
        (listener(), "=-1", &[], "which is not a number of sockets"),
        (listener(), "=2", &[], "socket 4, which was passed to this program, is not open"),
        (listener(), "=1 LISTEN_FDNAMES=a:b", &[], "LISTEN_FDS says 1 sockets, LISTEN_FDNAMES names 2"),
        (file(), "=1", &[], "is not a stream socket"),
        (
            datagram(),
            "=1 LISTEN_FDNAMES=web",
            &[],
            "socket 3 (web), which was passed to this program, is not a stream socket",
        ),
        (connected(), "=1", &[], "does not listen; with systemd, use Accept=no"),
        (listener(), "=1", &["--nbd", "unix:elsewhere"], "replace --nbd: omit --nbd"),
    ];
    for (passed, environment, arguments, expected) in cases {
        let child = launch(passed, &format!("{ours}{environment}"), &[&[image.as_str()], arguments].concat());
        let ran = end(child, None);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.err.contains(expected), "{environment}: {expected:?} in {ran:?}");
        assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
    }
}

#[test]
fn systemd_starts_it_when_the_first_client_comes() {
    requires!("systemd-socket-activate");
    let dir = Dir::short();
    let image = image(&dir);
    let child = Command::new("systemd-socket-activate")
        .args(["--fdname=disk", "-l", &dir.text("nbd")])
        .arg(vellum_command().get_program())
        .args(["serve", &image])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it is installed");
    drop(Peer::Unix(dir.join("nbd")).wait_for(""));
    let ran = end(child, Some(Signal::TERM));
    assert_eq!(ran.code, 0, "{ran:?}");
}

/// libnbd makes a socket, passes it to the program, and ends the program when it is done.
#[test]
fn libnbd_starts_it_and_ends_it() {
    requires!("nbdinfo");
    let dir = Dir::short();
    let image = image(&dir);
    let program = vellum_command();
    let program = program.get_program().to_str().expect("a path in UTF-8");
    let ran = run("nbdinfo", &["--size", "[", program, "serve", &image, "]"]);
    assert_eq!((ran.code, ran.out.trim()), (0, "1048576"), "{ran:?}");
    requires!("nbdcopy");
    let noise: Vec<u8> = (0..1_u32 << 20).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    std::fs::write(dir.join("noise"), &noise).expect("a file");
    let ran =
        run("nbdcopy", &["--flush", "--", &dir.text("noise"), "[", program, "serve", "-q", &image, "]"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let ran = run("nbdcopy", &["--", "[", program, "serve", "-q", "-r", &image, "]", &dir.text("back")]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(std::fs::read(dir.join("back")).expect("the copy") == noise);
}
