//! A disk stops while it is served, and continues.

use std::time::Duration;

use rustix::process::Signal;

use super::support::PATIENCE;
use super::support::client::{FLUSH, READ, WRITE};
use super::support::dir::Dir;
use super::support::server::Server;
use super::{Controlled, MIB, made, until};

#[test]
fn what_is_asked_of_a_paused_disk_waits_and_its_image_does_not_change() {
    for (format, options) in [("raw", ""), ("qcow2", ""), ("vellum", "")] {
        let dir = Dir::new("control-pause");
        let image = made(&dir, format, options, "4M");
        let served = Controlled::start(&["-f", format, &image]);
        let mut client = served.client("");
        for at in 0..64 {
            client.write(at * 8192, &[7; 4096], 0).expect("written");
        }
        assert_eq!(served.told()["state"], "running");
        assert_eq!(served.json("pause", &[])["state"], "paused");
        served.ask("pause", &[]).answer();
        let before = std::fs::read(&image).expect("the image");
        // All kinds of requests, and a connection that came while it was paused.
        let mut late = served.client("");
        let write = late.send(WRITE, 0, 0, 4096, &[9; 4096]).expect("sent");
        client.send(READ, 0, 0, 4096, &[]).expect("sent");
        client.send(FLUSH, 0, 0, 0, &[]).expect("sent");
        until("all three have come", || served.told()["held"] == 3);
        client.socket.set_patience(Duration::from_millis(300)).expect("a socket");
        client.answer().expect_err("it waits");
        client.socket.set_patience(PATIENCE).expect("a socket");
        let told = served.told();
        assert_eq!((&told["state"], &told["held"]), (&"paused".into(), &3.into()), "{told}");
        assert!(told["paused-seconds"].is_u64(), "{told}");
        assert!(served.ask("stats", &[]).answer().contains("paused for"), "it is said to people, too");
        assert!(std::fs::read(&image).expect("the image") == before, "{format}: it has changed");
        assert_eq!(served.json("resume", &[])["was-paused"], true);
        assert_eq!(late.answer().expect("now"), super::support::client::Answer { cookie: write, error: 0 });
        let answers = [client.answer().expect("now")];
        assert_eq!(answers[0].error, 0);
        assert_eq!(served.json("resume", &[])["was-paused"], false);
        let told = served.told();
        assert_eq!((&told["state"], &told["held"]), (&"running".into(), &0.into()), "{told}");
        assert!(told.get("paused-seconds").is_none(), "{told}");
        assert_eq!(late.read(0, 1).expect("read"), [9]);
        served.server.stop();
    }
}

/// What was answered before the pause is there after a crash, without a flush of the guest.
#[test]
fn a_pause_is_durable() {
    for (format, options) in
        [("qcow2", ""), ("qcow2", "journal=off"), ("vellum", "layout=table"), ("vellum", "")]
    {
        let dir = Dir::new("control-pause-kill");
        let image = made(&dir, format, options, "4M");
        let served = Controlled::start(&["-f", format, &image]);
        let mut client = served.client("");
        for at in 0..32 {
            client.write(at * 100_000, &[5; 8192], 0).expect("written");
        }
        served.ask("pause", &[]).answer();
        served.server.kill();
        let server = Server::start(&["-f", format, &image]);
        let mut client = super::support::client::Client::connect(&server.peer(), "").expect("it is there");
        for at in 0..32 {
            assert!(client.read(at * 100_000, 8192).expect("read") == [5; 8192], "{format} {options}: {at}");
        }
        server.stop();
    }
}

#[test]
fn a_paused_server_ends_in_good_order() {
    for waits in [false, true] {
        let dir = Dir::new("control-pause-end");
        let image = made(&dir, "vellum", "", "4M");
        let served = Controlled::start(&[&image]);
        let mut client = served.client("");
        served.ask("pause", &[]).answer();
        let sent = waits.then(|| client.send(WRITE, 0, 0, 4096, &[3; 4096]).expect("sent"));
        if waits {
            until("it has come", || served.told()["held"] == 1);
        }
        served.server.signal(Signal::TERM);
        if let Some(cookie) = sent {
            let answer = client.answer().expect("what was begun is answered");
            assert_eq!((answer.cookie, answer.error), (cookie, 0));
        }
        let ran = served.server.wait(PATIENCE);
        assert_eq!(ran.code, 0, "{ran:?}");
        let server = Server::start(&[&image]);
        let mut client = super::support::client::Client::connect(&server.peer(), "").expect("it is there");
        assert_eq!(client.read(0, 1).expect("read"), [if waits { 3 } else { 0 }]);
        server.stop();
    }
}

#[test]
fn a_paused_disk_grows_and_has_snapshots_made() {
    let dir = Dir::new("control-pause-more");
    let image = made(&dir, "vellum", "layout=table", "4M");
    let served = Controlled::start(&[&image, "--export-snapshots"]);
    let mut client = served.client("");
    client.write(0, &[1; 4096], 0).expect("written");
    served.ask("pause", &[]).answer();
    client.send(WRITE, 0, 0, 4096, &[2; 4096]).expect("sent");
    super::vellum(&["snapshot", "create", "--control", &served.socket, "one"]).answer();
    served.json("resize", &["5M"]);
    assert_eq!(served.told()["state"], "paused", "it is still");
    served.ask("resume", &[]).answer();
    assert_eq!(client.answer().expect("now").error, 0);
    assert_eq!(served.client("").size, 5 * MIB);
    let mut snapshot = served.client("@one");
    assert_eq!(snapshot.read(0, 1).expect("read"), [1], "what waited came after the snapshot");
    served.ask("pause", &[]).answer();
    snapshot.send(READ, 0, 0, 1, &[]).expect("sent");
    until("reads of the snapshot wait, too", || served.told()["held"] == 1);
    served.ask("resume", &[]).answer();
    assert_eq!(snapshot.answer().expect("now").error, 0);
    served.server.stop();
}
