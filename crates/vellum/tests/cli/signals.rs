//! What ends a server and what does not: signals, a log without a reader, paths that are not files.

use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};
use std::time::Instant;

use rustix::process::{Signal, kill_process};

use super::refused;
use super::support::client::{Client, Peer};
use super::support::dir::Dir;
use super::support::program::{is_root, pid_of, vellum, vellum_command, wait};
use super::support::server::Server;
use super::support::{PATIENCE, until};

fn image(dir: &Dir) -> String {
    let image = dir.text("image");
    vellum(&["create", "-q", "-f", "qcow2", &image, "4M"]).answer();
    image
}

#[test]
fn only_signals_that_ask_for_the_end_end_a_server() {
    let dir = Dir::new("signals");
    let mut server = Server::start(&[&image(&dir)]);
    let mut client = Client::connect(&server.peer(), "").expect("a server");
    client.write(0, &[1; 4096], 0).expect("written");
    for (signal, lines) in [(Signal::HUP, 0), (Signal::USR1, 1), (Signal::USR2, 2), (Signal::QUIT, 3)] {
        server.signal(signal);
        until("it says how it is", || {
            server.said().matches("disks: 1 running; connections: 1;").count() >= lines
        });
        client.flush().expect("it serves");
        assert!(server.is_running(), "{signal:?}");
    }
    server.stop();
}

/// A server with this for its stderr, at a socket; a client writes, the server is asked to end, and ends
/// well.
#[track_caller]
fn serves_with(stderr: Stdio, about: &str) {
    let (dir, place) = (Dir::new("log"), Dir::short());
    let (image, control) = (image(&dir), place.text("control"));
    let nbd = format!("unix:{}", place.text("nbd"));
    let begun = Instant::now();
    let child = vellum_command()
        .args(["serve", &image, "--nbd", &nbd, "--control", &control])
        .env("VELLUM_LOG", "info")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .expect("our own program can be started");
    // The control socket is there before the disk is.
    let mut client = Peer::Unix(place.join("nbd")).wait_for("");
    client.write(0, &[7; 4096], 0).expect(about);
    // A line of the log each.
    for _ in 0..3 {
        vellum(&["pause", "--control", &control]).answer();
        vellum(&["resume", "--control", &control]).answer();
    }
    client.flush().expect(about);
    kill_process(pid_of(&child), Signal::TERM).expect("it runs");
    let ran = wait(child, begun, PATIENCE).expect("it ends");
    assert_eq!(ran.code, 0, "{about}: {ran:?}");
    assert_eq!(vellum(&["check", &image]).code, 0, "{about}: the image is closed");
}

#[test]
fn a_log_that_cannot_be_written_is_lost_and_nothing_else() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("it is there");
    serves_with(full.into(), "a full disk");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    serves_with(writer.into(), "a reader that is gone");
    let (_reader, mut writer) = std::io::pipe().expect("a pipe");
    rustix::io::ioctl_fionbio(&writer, true).expect("a pipe");
    while std::io::Write::write(&mut writer, &[b'x'; 4096]).is_ok() {}
    while std::io::Write::write(&mut writer, b"x").is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).expect("a pipe");
    serves_with(writer.into(), "a reader that does not read");
}

#[test]
fn statistics_replace_files_alone() {
    let dir = Dir::new("stats-json");
    let image = image(&dir);
    let (link, target) = (dir.text("link"), dir.text("target"));
    std::fs::write(&target, "precious").expect("a file");
    std::os::unix::fs::symlink(&target, &link).expect("a link");
    for (path, what) in
        [("/dev/null", "a device"), (&link, "a symbolic link"), (&dir.text(""), "a directory")]
    {
        refused(1, &[what, path], &["serve", &image, "--nbd", "unix:nobody", "--stats-json", path]);
    }
    assert!(std::fs::metadata("/dev/null").expect("it is there").file_type().is_char_device());
    assert_eq!(std::fs::read_to_string(&target).expect("it is there"), "precious");
}

#[test]
fn sockets_get_the_mode_and_the_group_that_were_asked_for() {
    let (dir, place) = (Dir::new("rights"), Dir::short());
    let (image, vhost, control) = (image(&dir), place.text("vhost"), place.text("control"));
    let mut arguments =
        vec![image.as_str(), "--vhost-user-blk", &vhost, "--control", &control, "--socket-mode", "0660"];
    if is_root() {
        arguments.extend(["--socket-group", "4"]);
    }
    let server = Server::start(&arguments);
    for path in [server.socket(), vhost.clone().into()] {
        let facts = std::fs::metadata(&path).expect("a socket");
        assert_eq!(facts.permissions().mode() & 0o777, 0o660, "{}", path.display());
        assert!(!is_root() || facts.gid() == 4, "{}", path.display());
    }
    let facts = std::fs::metadata(&control).expect("a socket");
    assert_eq!(facts.permissions().mode() & 0o777, 0o600, "that is its owner's alone");
    server.stop();
    refused(
        1,
        &["no group \"nobody-knows\""],
        &["serve", &image, "--nbd", "unix:x", "--socket-group", "nobody-knows"],
    );
}

/// Sixty images, where a shell gives a program forty files unless it asks for more.
#[test]
fn a_server_takes_as_many_files_as_it_may() {
    let (dir, place) = (Dir::new("files"), Dir::short());
    let base = image(&dir);
    let mut line = String::from("ulimit -S -n 40; exec \"$0\" serve -q \"$@\"");
    let mut arguments: Vec<String> = vec!["--nbd".into(), format!("unix:{}", place.text("nbd"))];
    for number in 0..60 {
        let clone = dir.text(&format!("clone-{number}"));
        std::fs::copy(&base, &clone).expect("a copy");
        arguments.extend(["--export".into(), format!("{number}={clone}")]);
    }
    line.push('\n');
    let begun = Instant::now();
    let mut child = Command::new("sh")
        .args(["-c", &line, env!("CARGO_BIN_EXE_vellum")])
        .args(&arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    let peer = Peer::Unix(place.join("nbd"));
    let mut stderr = child.stderr.take().expect("it was asked for");
    let clients: Vec<_> = (0..60).map(|number| peer.wait_for(&number.to_string())).collect();
    drop(clients);
    kill_process(pid_of(&child), Signal::TERM).expect("it runs");
    let mut said = String::new();
    stderr.read_to_string(&mut said).expect("text");
    let ran = wait(child, begun, PATIENCE).expect("it ends");
    assert_eq!(ran.code, 0, "{said}");
}
