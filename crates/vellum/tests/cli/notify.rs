//! Notifications to a service manager: `Type=notify`.

use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::support::client::{Client, Peer};
use super::support::dir::Dir;
use super::support::program::{pid_of, vellum, vellum_command, wait};

#[test]
fn a_manager_is_told_when_clients_can_connect_and_when_they_no_longer_can() {
    let dir = Dir::short();
    let manager = UnixDatagram::bind(dir.join("manager")).expect("a socket");
    manager.set_read_timeout(Some(Duration::from_secs(60))).expect("a time");
    // On a busy host it may ask for more time first.
    let said = || loop {
        let mut bytes = [0; 256];
        let len = manager.recv(&mut bytes).expect("a message");
        let message = String::from_utf8_lossy(&bytes[..len]).into_owned();
        if !message.starts_with("EXTEND_TIMEOUT_USEC=") {
            break message;
        }
    };
    vellum(&["create", "-f", "qcow2", &dir.text("image"), "1M"]).answer();
    let child = vellum_command()
        .args(["serve", &dir.text("image"), "--nbd", &format!("unix:{}", dir.text("nbd"))])
        .env("NOTIFY_SOCKET", dir.join("manager"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("our own program can be started");
    assert_eq!(said(), "READY=1");
    drop(Client::connect(&Peer::Unix(dir.join("nbd")), "").expect("it is ready"));
    kill_process(pid_of(&child), Signal::TERM).expect("it runs");
    assert_eq!(said(), "STOPPING=1");
    let ran = wait(child, Instant::now(), Duration::from_secs(60)).expect("it ends");
    assert_eq!(ran.code, 0, "{ran:?}");
}
