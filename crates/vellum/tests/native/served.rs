//! Snapshots of a disk that is served: made and deleted while it has clients, read as exports of their own.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use vellum_core::Random;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{Ran, has, qemu_io, run, skipped, until_let_go, vellum};
use super::support::server::Server;
use super::support::{PATIENCE, until};
use super::{MIB, check_says, refused};

/// A server with a control socket.
struct Controlled {
    server: Server,
    socket: String,
    _place: Dir,
}

impl Controlled {
    #[track_caller]
    fn start(arguments: &[&str]) -> Self {
        let place = Dir::short();
        let socket = place.text("control");
        let server = Server::start(&[&["--export-snapshots", "--control", &socket][..], arguments].concat());
        Self { server, socket, _place: place }
    }

    /// `vellum snapshot VERB --control …`.
    fn snapshot(&self, verb: &str, rest: &[&str]) -> Ran {
        vellum(&[&["snapshot", verb, "--control", &self.socket][..], rest].concat())
    }

    #[track_caller]
    fn refuses(&self, words: &[&str], verb: &str, rest: &[&str]) {
        refused(words, &[&["snapshot", verb, "--control", &self.socket][..], rest].concat());
    }

    #[track_caller]
    fn names(&self) -> Vec<String> {
        let all = self.snapshot("list", &["--output", "json"]).json();
        let all = all.as_array().expect("a list").iter();
        all.map(|one| one["name"].as_str().expect("a name").to_owned()).collect()
    }

    #[track_caller]
    fn client(&self, export: &str) -> Client {
        Client::connect(&self.server.peer(), export).expect("the export is there")
    }

    /// Sends a line as it is; returns the answer, unless the server disconnects.
    fn say(&self, line: &[u8]) -> Option<Value> {
        let mut stream = UnixStream::connect(&self.socket).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        // It may disconnect before everything is sent.
        drop(stream.write_all(line));
        drop(stream.shutdown(std::net::Shutdown::Write));
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).ok()?;
        (!answer.is_empty()).then(|| serde_json::from_str(&answer).expect("JSON"))
    }
}

fn table(dir: &Dir, size: &str, unit: &str) -> String {
    made(dir, size, &format!("layout=table,unit_size={unit}"))
}

fn made(dir: &Dir, size: &str, layout: &str) -> String {
    let image = dir.text("disk.vlm");
    vellum(&["create", "-f", "vellum", "-o", layout, &image, size]).answer();
    image
}

#[test]
fn snapshots_are_made_while_a_client_writes() {
    let dir = Dir::new("native-served");
    let image = made(&dir, "8M", "layout=zoned,zone_size=1M");
    let served = Controlled::start(&[&image]);
    let (quiet, busy) = (4 * MIB, AtomicBool::new(true));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = served.client("");
            let mut random = Random::from_seed(11);
            let mut requests = 0;
            while busy.load(Ordering::Relaxed) {
                let at = quiet + random.index(1024) * 4096;
                client.write(at as u64, &[9; 4096], 0).expect("written");
                if random.one_in(8) {
                    client.flush().expect("flushed");
                }
                requests += 1;
            }
            requests
        });
        // A part of the disk that only this one writes, so that it is known what each snapshot has.
        let mut client = served.client("");
        for generation in 1..=12u8 {
            for at in (0..quiet).step_by(256 << 10) {
                client.write(at as u64, &[generation; 8192], 0).expect("written");
            }
            served.snapshot("create", &[&format!("g{generation}")]).answer();
        }
        // They are read while the disk continues to change.
        for generation in 1..=12u8 {
            let mut snapshot = served.client(&format!("@g{generation}"));
            for at in (0..quiet).step_by(256 << 10) {
                let bytes = snapshot.read(at as u64, 12_288).expect("read");
                assert!(bytes[..8192].iter().all(|byte| *byte == generation), "g{generation} at {at:#x}");
                assert!(bytes[8192..].iter().all(|byte| *byte == 0), "g{generation} behind {at:#x}");
            }
            let first = snapshot.read(quiet as u64, 1 << 20).expect("read");
            assert!(snapshot.read(quiet as u64, 1 << 20).expect("read") == first, "it has changed");
            assert_eq!(snapshot.write(0, &[1; 512], 0).expect_err("read-only").raw_os_error(), Some(1));
        }
        busy.store(false, Ordering::Relaxed);
        assert!(writer.join().expect("the writer") > 0);
    });
    assert_eq!(served.names().len(), 12);
    served.refuses(&["this name already exists"], "create", &["g3"]);
    served.refuses(&["1 to 64 bytes"], "create", &[&"n".repeat(65)]);
    served.refuses(&["there is no snapshot named none"], "delete", &["none"]);
    // One that is read stays.
    let reader = served.client("@g3");
    served.refuses(&["g3", "it is being read"], "delete", &["g3"]);
    reader.disconnect();
    until("nobody reads it any more", || served.snapshot("delete", &["g3"]).code == 0);
    assert!(Client::connect(&served.server.peer(), "@g3").is_err());
    assert!(!served.names().contains(&"g3".to_owned()));
    served.snapshot("create", &["last"]).answer();
    if has("nbdinfo") {
        let ran = run("nbdinfo", &["--list", &served.server.uri("")]);
        assert_eq!(ran.code, 0, "{ran:?}");
        for name in ["\"\"", "\"@g12\"", "\"@last\""] {
            assert!(ran.out.contains(&format!("export={name}")), "{name}: {}", ran.out);
        }
        assert!(!ran.out.contains("@g3\""), "{}", ran.out);
    } else {
        skipped("nbdinfo is not installed");
    }
    if has("qemu-io") {
        let uri = served.server.uri("%40g12");
        qemu_io(
            &["-r", "-f", "raw", &uri],
            &["read -P 12 256k 8k".to_owned(), "read -P 0 264k 8k".to_owned()],
        );
    } else {
        skipped("qemu-io is not installed");
    }
    served.server.stop();
    check_says(&image, 0);
    assert_eq!(
        vellum(&["snapshot", "list", "--output", "json", &image]).json().as_array().map(Vec::len),
        Some(12)
    );
}

#[test]
fn a_served_disk_goes_back_when_nobody_is_connected() {
    let dir = Dir::new("native-served-back");
    let image = table(&dir, "4M", "64k");
    let served = Controlled::start(&[&image, "--export", &format!("other={image}")]);
    let mut client = served.client("other");
    client.write(0, &[1; 4096], 0).expect("written");
    served.snapshot("create", &["one"]).answer();
    client.write(0, &[2; 4096], 0).expect("written");
    served.refuses(&["a client is connected"], "revert", &["one"]);
    assert_eq!(client.read(0, 1).expect("read"), [2], "nothing happened");
    client.disconnect();
    let reader = served.client("other@one");
    let gone = |wanted: &str| {
        let mut last = None;
        until("whoever was connected has left", || {
            let ran = served.snapshot("revert", &["one"]);
            let is_it = ran.code == 0 || ran.err.contains(wanted);
            last = Some(ran);
            is_it
        });
        last.expect("it was asked")
    };
    let ran = gone("reading a snapshot");
    assert_ne!(ran.code, 0, "a snapshot of it is read");
    reader.disconnect();
    assert_eq!(gone("never said").code, 0);
    served.refuses(&["there is no snapshot named none"], "revert", &["none"]);
    let mut client = served.client("");
    assert_eq!(client.read(0, 4096).expect("read"), [1; 4096]);
    client.write(4096, &[3; 4096], 0).expect("it can be written again");
    served.snapshot("create", &["two"]).answer();
    assert_eq!(served.client("@two").read(4096, 1).expect("read"), [3]);
    client.disconnect();
    let stats = served.server.stop_and_count();
    assert!(stats["disks"][0]["guest"]["writes"] == 3, "those before are counted, too: {stats}");
    check_says(&image, 0);
}

/// A disk whose snapshot takes long to delete: each page of the table has changed since.
fn slow_to_delete(dir: &Dir) -> (String, u64) {
    let image = table(dir, "64G", "64k");
    let served = Controlled::start(&[&image]);
    let mut client = served.client("");
    let pages = 1024;
    for generation in 1..=2 {
        for page in 0..pages {
            client.write(page << 26, &[generation; 512], 0).expect("written");
        }
        if generation == 1 {
            served.snapshot("create", &["old"]).answer();
        }
    }
    served.snapshot("create", &["new"]).answer();
    client.disconnect();
    served.server.stop();
    (image, pages)
}

/// The server ends in this way in the middle of deleting; the image is sound, and the deletion is finished.
fn ends_while_deleting(name: &str, signal: Signal) {
    let dir = Dir::new(name);
    let (image, pages) = slow_to_delete(&dir);
    let whole = std::fs::read(&image).expect("the image");
    for round in 0..8u64 {
        std::fs::write(&image, &whole).expect("the image as it was");
        let served = Controlled::start(&[&image]);
        let request = format!("{}\n", json!({ "command": "snapshot-delete", "name": "old" }));
        let mut stream = UnixStream::connect(&served.socket).expect("it listens");
        stream.write_all(request.as_bytes()).expect("asked");
        std::thread::sleep(Duration::from_millis(3 * round));
        served.server.signal(signal);
        let mut answer = String::new();
        let _ = BufReader::new(stream).read_line(&mut answer);
        if answer.contains("error") {
            assert!(answer.contains("when the image is next opened"), "{answer}");
        }
        drop(served.server.wait(PATIENCE));
        until_let_go(&image);
        // The next opening.
        let served = Controlled::start(&[&image]);
        let names = served.names();
        assert!(names == ["new"] || (names == ["old", "new"] && answer.is_empty()), "{names:?}, {answer}");
        for (export, value) in [("", 2), ("@new", 2), ("@old", 1)] {
            if export == "@old" && names.len() == 1 {
                continue;
            }
            let mut client = served.client(export);
            for page in (0..pages).step_by(31) {
                assert_eq!(client.read(page << 26, 1).expect("read"), [value], "{export} at page {page}");
            }
        }
        served.server.stop();
        check_says(&image, 0);
    }
}

#[test]
fn a_killed_server_has_deleted_or_goes_on() {
    ends_while_deleting("native-served-kill", Signal::KILL);
}

#[test]
fn a_server_that_ends_leaves_the_rest_to_the_next_opening() {
    ends_while_deleting("native-served-term", Signal::TERM);
}

#[test]
fn the_control_socket_takes_what_it_should() {
    let dir = Dir::new("native-control");
    let image = table(&dir, "4M", "64k");
    let served = Controlled::start(&[&image]);
    let mode = std::fs::metadata(&served.socket).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "{mode:o}");
    let deep = format!("{}{}\n", "[".repeat(20_000), "]".repeat(20_000));
    let rude: [&[u8]; 12] = [
        b"\n",
        b"nonsense\n",
        b"{}\n",
        b"\xff\xfe\x00\n",
        b"{\"command\":\"explode\"}\n",
        b"{\"command\":\"snapshot-create\"}\n",
        b"{\"command\":\"snapshot-create\",\"name\":[1]}\n",
        b"{\"command\":\"snapshot-create\",\"name\":\"a\",\"more\":1}\n",
        b"{\"command\":\"snapshot-create\",\"name\":\"a\\u0000b\"}\n",
        b"{\"command\":\"snapshot-list\",\"disk\":\"none\"}\n",
        b"{\"command\":\"snapshot-delete\",\"name\":\"\"}\n",
        deep.as_bytes(),
    ];
    for line in rude {
        let answer = served.say(line).unwrap_or_else(|| panic!("no answer to {}", line.escape_ascii()));
        let error = &answer["error"];
        assert!(error["kind"].is_string() && error["message"].is_string(), "{answer}");
    }
    let answer = served.say(&vec![b'x'; 1 << 20]);
    assert!(answer.is_none_or(|answer| answer["error"]["kind"] == "invalid"), "too long, and cut off");
    assert_eq!(served.say(b"{\"command\":\"snapshot-list\"}"), None, "a line that has no end is no request");
    // More than it takes at once wait, and the others are answered.
    let idle: Vec<_> = (0..12).map(|_| UnixStream::connect(&served.socket).expect("it listens")).collect();
    served.snapshot("create", &["one"]).answer();
    assert_eq!(served.names(), ["one"]);
    drop(idle);
    // Several requests on one connection, answered in order.
    let mut stream = UnixStream::connect(&served.socket).expect("it listens");
    stream
        .write_all(b"{\"command\":\"snapshot-create\",\"name\":\"two\"}\nwhat?\n{\"command\":\"stats\"}\n")
        .expect("asked");
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let mut next = || serde_json::from_str::<Value>(&lines.next().expect("an answer")).expect("JSON");
    assert_eq!(next()["return"]["id"], "2");
    assert_eq!(next()["error"]["kind"], "invalid");
    assert!(next()["return"]["disks"][0]["host"]["data"]["flushes"].as_u64() > Some(0));
    // The file alone cannot be used while it is served, and the error names the way.
    refused(&["--control PATH", "in use"], &["snapshot", "create", &image, "three"]);
    let socket = served.socket.clone();
    served.server.kill();
    assert!(Path::new(&socket).exists(), "nobody removed it");
    let again = Server::start(&["--control", &socket, &image]);
    let both = Server::try_start(&["--control", &socket, "-r", "-U", &image]).err().expect("it is taken");
    assert!(both.err.contains("another program"), "{both:?}");
    assert_eq!(
        vellum(&["snapshot", "list", "--control", &socket, "--output", "json"])
            .json()
            .as_array()
            .map(Vec::len),
        Some(2)
    );
    again.stop();
    assert!(!Path::new(&socket).exists(), "removed at the end");
    refused(&["can't connect"], &["snapshot", "list", "--control", &socket]);
}

#[test]
fn other_formats_say_what_they_can() {
    let dir = Dir::new("native-control-others");
    let (linear, qcow2, raw) = (dir.text("linear.vlm"), dir.text("disk.qcow2"), dir.text("disk.raw"));
    vellum(&["create", "-f", "vellum", "-o", "layout=linear", &linear, "1M"]).answer();
    vellum(&["create", "-f", "qcow2", &qcow2, "1M"]).answer();
    vellum(&["create", "-f", "raw", &raw, "1M"]).answer();
    if has("qemu-img") {
        run("qemu-img", &["snapshot", "-c", "theirs", &qcow2]).answer();
    }
    let served = Controlled::start(&[&qcow2, "--export", &format!("linear={linear}")]);
    served.refuses(&["several disks", "\"linear\""], "list", &[]);
    served.refuses(&["no export \"x\""], "list", &["--disk", "x"]);
    let listed = served.snapshot("list", &["--disk", "", "--output", "json"]).json();
    assert!(!has("qemu-img") || listed[0]["name"] == "theirs", "{listed}");
    for verb in ["delete", "revert"] {
        served.refuses(&["there is no snapshot named one"], verb, &["--disk", "", "one"]);
    }
    for verb in ["create", "delete", "revert"] {
        served.refuses(&["layout=table"], verb, &["--disk", "linear", "one"]);
    }
    served.server.stop();
    let served = Controlled::start(&["-f", "raw", &raw]);
    for (verb, rest) in [("list", &[][..]), ("create", &["one"]), ("delete", &["one"]), ("revert", &["one"])]
    {
        served.refuses(&["a raw image has no snapshots"], verb, rest);
    }
    served.server.stop();
    let image = table(&dir, "1M", "64k");
    vellum(&["snapshot", "create", &image, "one"]).answer();
    let served = Controlled::start(&["-r", &image]);
    assert_eq!(served.names(), ["one"]);
    for verb in ["create", "delete", "revert"] {
        served.refuses(&["open read-only"], verb, &["one"]);
    }
    served.server.stop();
}
