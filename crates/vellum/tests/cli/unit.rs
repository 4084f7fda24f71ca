//! The unit for systemd: systemd accepts it, and it starts a server.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::support::client::{Client, Peer};
use super::support::dir::Dir;
use super::support::program::{path_text, pid_of, run, vellum, vellum_command, wait};
use crate::requires;

/// What the server's own options and its image are called in a unit's configuration.
const OPTIONS: &str = "--limit iops-total=5000 --threads 1";

fn unit() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/systemd/vellum@.service");
    std::fs::read_to_string(path).expect("the unit")
}

/// The unit of one disk, with the program that was built.
fn unit_of_ours(dir: &Dir) -> PathBuf {
    let path = dir.join("vellum@disk.service");
    let text = unit().replace("/usr/bin/vellum", env!("CARGO_BIN_EXE_vellum"));
    std::fs::write(&path, text).expect("a unit");
    path
}

#[test]
fn systemd_finds_nothing_wrong_with_the_unit() {
    requires!("systemd-analyze");
    let dir = Dir::new("unit");
    let path = unit_of_ours(&dir);
    let ran = run("systemd-analyze", &["verify", "--man=no", path_text(&path)]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let own: Vec<&str> = ran.err.lines().filter(|line| line.contains("vellum@")).collect();
    assert!(own.is_empty(), "{own:?}");
    // Of 100: 12 when this was written, with the network left open for tcp:.
    let ran = run("systemd-analyze", &["security", "--offline=true", "--threshold=20", path_text(&path)]);
    if ran.err.contains("unrecognized option") || ran.err.contains("Unknown") {
        return super::support::program::skipped("this systemd does not judge units that are not loaded");
    }
    assert_eq!(ran.code, 0, "{ran:?}");
}

#[test]
fn the_units_command_serves_and_tells_its_manager() {
    let dir = Dir::short();
    std::fs::create_dir_all(dir.join("vellum/disk")).expect("what RuntimeDirectory= makes");
    vellum(&["create", "-f", "vellum", &dir.text("image"), "1M"]).answer();
    let unit = unit();
    let line = |key: &str| {
        let found = unit.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("the unit has no {key}"))
    };
    assert_eq!((line("Type"), line("RuntimeDirectory")), ("notify", "vellum/%i"));
    let command = line("ExecStart").replace("%t", path_text(dir.path())).replace("%i", "disk");
    let command = command.replace("$OPTIONS", OPTIONS).replace("${IMAGE}", &dir.text("image"));
    let (program, arguments) = command.split_once(' ').expect("a program and its arguments");
    assert_eq!(program, "/usr/bin/vellum");
    let manager = UnixDatagram::bind(dir.join("manager")).expect("a socket");
    manager.set_read_timeout(Some(Duration::from_secs(60))).expect("a time");
    let child = vellum_command()
        .args(arguments.split(' '))
        .env("NOTIFY_SOCKET", dir.join("manager"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("our own program can be started");
    // On a busy host it may ask for more time first.
    let mut bytes = [0; 64];
    let message = loop {
        let len = manager.recv(&mut bytes).expect("a message");
        if !bytes[..len].starts_with(b"EXTEND_TIMEOUT_USEC=") {
            break &bytes[..len];
        }
    };
    assert_eq!(message, b"READY=1");
    drop(Client::connect(&Peer::Unix(dir.join("vellum/disk/nbd")), "").expect("it is ready"));
    let control = dir.text("vellum/disk/control");
    let limits = vellum(&["limits", "--control", &control, "--output", "json"]).json();
    assert_eq!(limits["limits"]["iops-total"], 5000, "its options count");
    kill_process(pid_of(&child), Signal::TERM).expect("it runs");
    let ran = wait(child, Instant::now(), Duration::from_secs(60)).expect("it ends");
    assert_eq!(ran.code, 0, "{ran:?}");
}
