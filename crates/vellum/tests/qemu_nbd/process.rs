//! The life of the process: in the background, with its number in a file, with several clients, killed, and with the rights
//! of another user.

use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::support::dir::Dir;
use super::support::program::{is_root, qemu_io, skipped, succeed, vellum, vellum_command};
use super::support::{noise, until};
use super::{MIB, Running, Whose, choose, greeted};
use crate::requires;

fn disk(dir: &Dir) -> Vec<u8> {
    let bytes = noise(2 * MIB, 3);
    std::fs::write(dir.join("d.raw"), &bytes).expect("a disk");
    bytes
}

/// A process that is no child of ours, killed with the test.
struct Daemon(Pid);

impl Daemon {
    /// The one whose number is in this file.
    fn of(file: &str) -> Self {
        let text =
            std::fs::read_to_string(file).expect("the file is written before the program that forks ends");
        assert!(text.ends_with('\n'), "{text:?}");
        Self(Pid::from_raw(text.trim().parse().expect("a number")).expect("not zero"))
    }

    fn lives(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.as_raw_nonzero()));
        test_kill_process(self.0).is_ok() && stat.is_ok_and(|stat| !stat.contains(") Z "))
    }

    fn end(&self, signal: Signal) {
        kill_process(self.0, signal).expect("it lives");
        until("the server has ended", || !self.lives());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

#[test]
fn a_server_that_forks_serves_when_the_program_ends_and_not_before() {
    requires!("qemu-nbd", "nbdinfo");
    let dir = Dir::short();
    disk(&dir);
    let (socket, file) = (dir.text("s"), dir.text("pid"));
    let uri = format!("nbd+unix:///?socket={socket}");
    for whose in Whose::BOTH {
        drop(std::fs::remove_file(&file));
        let pid_file = format!("--pid-file={file}");
        let ran = whose.run(&dir, &["--fork", "-t", &pid_file, "-k", &socket, "-f", "raw", "d.raw"]);
        // That this returns at all says that the server holds neither stdout nor stderr.
        assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, "", ""), "{whose:?}");
        let daemon = Daemon::of(&file);
        assert!(daemon.lives(), "{whose:?}");
        assert_eq!(succeed("nbdinfo", &["--size", &uri]).trim(), (2 * MIB).to_string());
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", daemon.0.as_raw_nonzero())).expect("it lives");
        let after = stat.rsplit(") ").next().expect("fields");
        let session: i32 = after.split(' ').nth(3).expect("a session").parse().expect("a number");
        assert_eq!(session, daemon.0.as_raw_nonzero().get(), "{whose:?}: it has a session of its own");
        // The file belongs to the server that lives.
        let other = format!("{socket}2");
        let second = whose.run(&dir, &["--fork", "-t", "-r", &pid_file, "-k", &other, "-f", "raw", "d.raw"]);
        assert_eq!(second.code, 1, "{whose:?}: {second:?}");
        daemon.end(Signal::TERM);
        assert!(!dir.join("s").exists(), "{whose:?}: the socket is removed");
        // One that ends with its client.
        let ran = whose.run(&dir, &["--fork", &pid_file, "-k", &socket, "-f", "raw", "d.raw"]);
        assert_eq!(ran.code, 0, "{whose:?}: {ran:?}");
        let daemon = Daemon::of(&file);
        succeed("nbdinfo", &["--size", &uri]);
        until("it ends with its client", || !daemon.lives());
    }
}

#[test]
fn clients_beyond_the_limit_wait_until_another_has_left() {
    requires!("qemu-nbd");
    let dir = Dir::short();
    disk(&dir);
    for whose in Whose::BOTH {
        let mut running = Running::start(whose, &dir, &["-t", "-e", "3", "-f", "raw", "d.raw"]);
        let mut clients: Vec<UnixStream> = (0..3).map(|_| greeted(&running.socket)).collect();
        clients.iter().for_each(choose);
        let waits = UnixStream::connect(&running.socket).expect("it waits in the queue");
        waits.set_nonblocking(true).expect("a switch");
        // Time for a mistake to show: it is never right that something comes.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let early = (&waits).read(&mut [0; 18]);
        assert!(early.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "{whose:?}");
        drop(clients.pop());
        waits.set_nonblocking(false).expect("a switch");
        waits.set_read_timeout(Some(super::PATIENCE)).expect("a timeout");
        (&waits).read_exact(&mut [0; 18]).expect("it is its turn");
        choose(&waits);
        drop((clients, waits));
        // All have left, and the server stays.
        choose(&greeted(&running.socket));
        assert!(running.is_running(), "{whose:?}");
        let ran = running.end(Some(Signal::TERM));
        assert_eq!(ran.code, 0, "{whose:?}: {ran:?}");
    }
}

#[test]
fn a_server_of_two_ends_when_the_second_has_left() {
    requires!("qemu-nbd");
    let dir = Dir::short();
    disk(&dir);
    for whose in Whose::BOTH {
        let mut running = Running::start(whose, &dir, &["-e", "2", "-f", "raw", "d.raw"]);
        // One that chooses nothing is none.
        drop(greeted(&running.socket));
        let (first, second) = (greeted(&running.socket), greeted(&running.socket));
        choose(&first);
        choose(&second);
        drop(first);
        let third = greeted(&running.socket);
        choose(&third);
        assert!(running.is_running(), "{whose:?}");
        drop(second);
        drop(third);
        let ran = running.end(None);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{whose:?}");
    }
}

#[test]
fn what_was_flushed_outlives_a_server_that_is_killed() {
    requires!("qemu-nbd", "qemu-img", "qemu-io");
    let dir = Dir::short();
    for whose in Whose::BOTH {
        for round in 0..4 {
            let image = dir.text("d.qcow2");
            succeed("qemu-img", &["create", "-q", "-f", "qcow2", &image, "16M"]);
            let words = ["-t", "-e", "0", "--discard=unmap", "-f", "qcow2", "d.qcow2"];
            let mut running = Running::start(whose, &dir, &words);
            let at = format!("{}k", 64 * round + 3);
            qemu_io(&["-f", "raw", &running.uri("")], &[format!("write -P 6 {at} 300k"), "flush".to_owned()]);
            running.end(Some(Signal::KILL));
            // The socket is left, and is taken by the next server.
            assert!(running.socket.exists());
            let mut next = Running::start(Whose::Ours, &dir, &words);
            qemu_io(&["-f", "raw", &next.uri("")], &[format!("read -P 6 {at} 300k")]);
            assert_eq!(next.end(Some(Signal::TERM)).code, 0);
            succeed("qemu-img", &["check", "-q", &image]);
        }
    }
}

#[test]
fn temporary_writes_leave_nothing_behind() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::short();
    let bytes = disk(&dir);
    let temporary = dir.join("tmp");
    std::fs::create_dir(&temporary).expect("a directory");
    let left = || std::fs::read_dir(&temporary).expect("the directory").count();
    for signal in [None, Some(Signal::TERM), Some(Signal::KILL)] {
        let socket = dir.text("s");
        let mut command = Whose::Ours.command(&dir, &["-t", "-s", "-f", "raw", "-k", &socket, "d.raw"]);
        let mut child = command.env("TMPDIR", &temporary).stdin(Stdio::null()).spawn().expect("it starts");
        until("it listens", || UnixStream::connect(&socket).is_ok());
        let uri = format!("nbd+unix:///?socket={socket}");
        qemu_io(
            &["-f", "raw", &uri],
            &["write -P 7 0 1M".to_owned(), "flush".to_owned(), "read -P 7 0 1M".to_owned()],
        );
        assert_eq!(left(), 0, "the file has no name any more");
        kill_process(super::pid_of(&child), signal.unwrap_or(Signal::INT)).expect("it runs");
        child.wait().expect("it ends");
        assert!(std::fs::read(dir.join("d.raw")).expect("the disk") == bytes, "{signal:?}");
        assert_eq!(left(), 0, "{signal:?}");
    }
    // One that cannot be served leaves nothing, either.
    let socket = dir.text("nothing/s");
    let mut command = Whose::Ours.command(&dir, &["-s", "-f", "raw", "-k", &socket, "d.raw"]);
    let output = command.env("TMPDIR", &temporary).output().expect("it runs");
    assert_eq!((output.status.code(), left()), (Some(1), 0));
    let nowhere = Whose::Ours
        .command(&dir, &["-s", "-f", "raw", "-k", &dir.text("s"), "d.raw"])
        .env("TMPDIR", dir.join("absent"))
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&nowhere.stderr).into_owned();
    assert!(nowhere.status.code() == Some(1) && said.contains("TMPDIR"), "{said}");
}

#[test]
fn rights_are_dropped_by_all_threads_once_clients_can_connect() {
    requires!("nbdinfo", "qemu-io");
    if !is_root() {
        return skipped("only root can drop rights");
    }
    let dir = Dir::short();
    disk(&dir);
    let (socket, file) = (dir.text("s"), dir.text("pid"));
    let image = dir.text("d.raw");
    std::fs::set_permissions(&image, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .expect("root's alone");
    let address = format!("unix:{socket}");
    let words = [
        "serve",
        "--fork",
        "--pid-file",
        &file,
        "--nbd",
        &address,
        "-f",
        "raw",
        "--user",
        "nobody",
        "-q",
        &image,
    ];
    let ran = vellum(&words);
    assert_eq!(ran.code, 0, "{ran:?}");
    let daemon = Daemon::of(&file);
    let pid = daemon.0.as_raw_nonzero();
    let nobody = succeed("id", &["-u", "nobody"]).trim().to_owned();
    let mut threads = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).expect("it lives") {
        let status =
            std::fs::read_to_string(thread.expect("a thread").path().join("status")).expect("it lives");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect(name);
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(field("Uid:"), vec![nobody.clone(); 4]);
        assert!(
            !field("Gid:").contains(&"0".to_owned()) && !field("Groups:").contains(&"0".to_owned()),
            "{status}"
        );
        assert_eq!(field("CapEff:"), ["0000000000000000"]);
        threads += 1;
    }
    assert!(threads > 1, "{threads}");
    let uri = format!("nbd+unix:///?socket={socket}");
    qemu_io(
        &["-f", "raw", &uri],
        &["write -P 8 4k 64k".to_owned(), "flush".to_owned(), "read -P 8 4k 64k".to_owned()],
    );
    daemon.end(Signal::TERM);
    let written = std::fs::read(&image).expect("the image");
    assert!(written[4096..68 << 10].iter().all(|byte| *byte == 8));
    for (user, word) in [("no-such-user", "no user"), ("99999", "group")] {
        let mut command = vellum_command();
        command.args(["serve", "--nbd", &address, "-f", "raw", "--user", user, &image]);
        let output = command.output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(word), "{said}");
    }
}
