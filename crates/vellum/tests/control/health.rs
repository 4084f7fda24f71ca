//! The state of a disk: full, hung, failing; which reports there are, and what it does not affect.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::support::client::{Client, WRITE};
use super::support::dir::Dir;
use super::support::loops::Mount;
use super::support::noise;
use super::support::program::vellum;
use super::{Controlled, made, until};

const PIECE: u32 = 256 << 10;

/// Images on a file system of 8 MiB, most of which is taken.
fn tight(format: &str, options: &str) -> Option<(Mount, String)> {
    let mount = Mount::tmpfs(8 << 20)?;
    let image = made(&mount.dir, format, options, "64M");
    std::fs::write(mount.dir.join("ballast"), noise(4 << 20, 1)).expect("there is room yet");
    Some((mount, image))
}

#[test]
fn requests_are_held_while_there_is_no_space() {
    for (format, options) in [("raw", ""), ("qcow2", "")] {
        let Some((mount, image)) = tight(format, options) else { return };
        let served = Controlled::start(&["-f", format, &image, "--on-full", "hold"]);
        let mut client = served.client("");
        let bytes = noise(PIECE as usize, 5);
        let pieces = 18;
        for piece in 0..pieces {
            client.send(WRITE, 0, u64::from(piece * PIECE), PIECE, &bytes).expect("sent");
        }
        until("it is full", || served.told()["state"] == "no space");
        let told = served.told();
        assert!(told["held"].as_u64().is_some_and(|held| held > 0), "{format} {options}: {told}");
        assert_eq!((&told["guest-errors"], &told["failures"]["io"]), (&0.into(), &serde_json::Value::Null));
        let mut other = served.client("");
        other.read(0, 512).expect("reads go on");
        std::fs::remove_file(mount.dir.join("ballast")).expect("the ballast");
        assert_eq!(served.json("resume", &[])["was-paused"], false);
        for _ in 0..pieces {
            assert_eq!(client.answer().expect("all are answered").error, 0, "{format} {options}");
        }
        client.flush().expect("durable");
        for piece in 0..pieces {
            assert!(other.read(u64::from(piece * PIECE), PIECE).expect("read") == bytes, "{piece}");
        }
        assert_eq!(served.told()["state"], "running", "{format} {options}");
        served.server.says("waits for space");
        served.server.stop();
    }
}

/// Each write went into a cluster of its own, and the tables that refer to them have no room. Nothing is lost
/// as long as the image is not closed, and it is not closed by mistake.
#[test]
fn a_full_host_takes_nothing_from_what_was_answered() {
    let Some((mount, image)) = tight("qcow2", "cluster_size=4k,journal=off") else { return };
    let disk = format!("a={image}");
    let served = Controlled::start(&["-f", "qcow2", "--export", &disk, "--prealloc", "off"]);
    let mut client = served.client("a");
    // Writes until there is no room. Returns where it wrote.
    let fill = |client: &mut Client, from: u64| -> Vec<u64> {
        let places = (0..1024).map(|step| from + step * (64 << 10));
        places.take_while(|at| client.write(*at, &noise(4096, *at), 0).is_ok()).collect()
    };
    let written = fill(&mut client, 0);
    assert!((500..1024).contains(&written.len()), "{}", written.len());
    client.flush().expect_err("the tables have no room");
    let export = |what: &str, rest: &[&str]| {
        vellum(&[&["export", what, "--control", &served.socket][..], rest].concat())
    };
    for (what, rest) in [("reopen", &["a"][..]), ("remove", &["a", "--force"])] {
        let ran = export(what, rest);
        assert!(ran.code == 1 && ran.err.contains("free space and try again"), "{what}: {ran:?}");
    }
    let whole = |client: &mut Client, written: &[u64]| {
        written.iter().all(|at| client.read(*at, 4096).expect("read") == noise(4096, *at))
    };
    assert!(whole(&mut client, &written), "nothing was lost, and the client is still there");
    std::fs::remove_file(mount.dir.join("ballast")).expect("the ballast");
    let reopened = export("reopen", &["a", "--output", "json"]).json();
    assert_eq!(reopened["may-miss-writes"], false, "{reopened}");
    client.flush().expect("nothing was lost");
    assert!(whole(&mut client, &written));

    // An explicit request discards it.
    let more = fill(&mut client, 32 << 10);
    assert!((100..1024).contains(&more.len()), "{}", more.len());
    client.flush().expect_err("the tables have no room");
    let reopened = export("reopen", &["a", "--lose-unflushed", "--output", "json"]).json();
    assert_eq!(reopened["may-miss-writes"], true, "{reopened}");
    client.flush().expect_err("what it wrote may be gone");
    assert!(whole(&mut client, &written) && !whole(&mut client, &more), "what was flushed is there");
    served.server.stop();
}

/// A failure is logged once, with its cause; and it is in the statistics.
#[test]
fn a_disk_that_fails_requests_says_so_once() {
    let Some((mount, image)) = tight("qcow2", "") else { return };
    let served = Controlled::start(&["-f", "qcow2", &image]);
    let mut client = served.client("");
    let bytes = noise(PIECE as usize, 5);
    let errors =
        (0..(8 << 20) / PIECE).filter(|piece| client.write(u64::from(piece * PIECE), &bytes, 0).is_err());
    let errors = errors.count() as u64;
    assert!(errors > 1, "{errors}");
    let told = served.told();
    assert_eq!(told["state"], "no space", "{told}");
    assert_eq!(told["failures"]["no-space"], errors, "{told}");
    assert_eq!(told["last-error"]["kind"], "no-space", "{told}");
    assert!(told["latency"]["write"]["count"].as_u64().is_some_and(|count| count > errors), "{told}");
    let said = served.server.says(" failed: ");
    assert_eq!(said.matches(" failed: ").count(), 1, "{said}");
    assert!(said.contains("WARN") && said.contains("a write of 262144 bytes at 0x"), "{said}");
    assert!(served.ask("stats", &[]).answer().contains("last error, "));
    std::fs::remove_file(mount.dir.join("ballast")).expect("the ballast");
    client.write(0, &bytes, 0).expect("there is room");
    client.write(7 << 20, &bytes, 0).expect("there is room");
    assert_eq!(served.told()["state"], "running");
    served.server.stop();
}

#[test]
fn prometheus_fetches_what_was_counted() {
    let dir = Dir::new("metrics");
    let place = Dir::short();
    let (image, metrics) = (made(&dir, "qcow2", "", "4M"), place.text("metrics"));
    let served = Controlled::start(&[&image, "--metrics", &format!("unix:{metrics}")]);
    let mut client = served.client("");
    for _ in 0..3 {
        client.write(0, &[1; 4096], 0).expect("written");
    }
    client.flush().expect("durable");
    let fetch = |line: &str| {
        let mut socket = UnixStream::connect(&metrics).expect("it listens");
        socket.write_all(format!("{line}\r\nHost: x\r\n\r\n").as_bytes()).expect("it reads");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("it answers, and ends");
        answer
    };
    let answer = fetch("GET /metrics HTTP/1.1");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text"), "{answer}");
    let disk = format!("export=\"\",image={image:?}");
    for line in [
        format!("vellum_guest_requests_total{{{disk},request=\"write\"}} 3"),
        format!("vellum_disk_state{{{disk},state=\"running\"}} 1"),
        format!("vellum_request_duration_seconds_count{{{disk},request=\"write\"}} 3"),
    ] {
        assert!(answer.lines().any(|one| one == line), "{line} is not in\n{answer}");
    }
    assert!(answer.ends_with("# EOF\n"), "{answer}");
    assert!(fetch("GET /other HTTP/1.1").starts_with("HTTP/1.1 404 "));
    assert!(fetch("PUT /metrics HTTP/1.1").starts_with("HTTP/1.1 405 "));
    assert!(fetch("what").starts_with("HTTP/1.1 400 "));
    served.server.stop();
    assert!(!place.join("metrics").exists());
}
