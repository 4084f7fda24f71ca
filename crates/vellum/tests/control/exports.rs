//! Exports that are added and removed while others are served; what the socket reports about itself; images
//! that cannot be opened.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::support::client::{Client, Peer};
use super::support::dir::Dir;
use super::support::loops::Failing;
use super::support::program::{Ran, has, run, succeed, vellum};
use super::support::server::Server;
use super::support::{PATIENCE, noise, until};
use super::{Controlled, MIB, made, told_of};

/// `vellum export WHAT --control … REST`.
fn export(served: &Controlled, what: &str, rest: &[&str]) -> Ran {
    vellum(&[&["export", what, "--control", &served.socket][..], rest].concat())
}

#[track_caller]
fn refuses(served: &Controlled, words: &[&str], what: &str, rest: &[&str]) {
    let ran = export(served, what, rest);
    assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{what} {rest:?}: {ran:?}");
    for word in words {
        assert!(ran.err.contains(word), "{what} {rest:?} does not say {word:?}: {}", ran.err);
    }
}

/// Repeats the request until it succeeds: a client that has left is gone a moment later.
#[track_caller]
fn at_last(served: &Controlled, what: &str, rest: &[&str]) -> Ran {
    let begun = Instant::now();
    loop {
        let ran = export(served, what, rest);
        if ran.code == 0 {
            return ran;
        }
        assert!(begun.elapsed() < PATIENCE, "{what} {rest:?}: {ran:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// An image of another server has a URL, which is no path beside the current directory.
#[test]
fn an_export_of_another_server_is_added_by_its_url() {
    let dir = Dir::new("exports-url");
    let (one, far) = (made(&dir, "qcow2", "", "4M"), made(&dir, "vellum", "", "8M"));
    let other = Server::start(&[&far]);
    let served = Controlled::start(&["--export", &format!("one={one}")]);
    export(&served, "add", &["-f", "raw", &format!("two={}", other.uri(""))]).answer();
    let mut client = served.client("two");
    assert_eq!(client.size, 8 * MIB);
    client.write(4096, &[2; 4096], 0).expect("written");
    client.flush().expect("flushed");
    drop(client);
    at_last(&served, "remove", &["two"]);
    served.server.stop();
    let mut client = Client::connect(&other.peer(), "").expect("it is served");
    assert_eq!(client.read(4096, 4096).expect("read"), vec![2; 4096]);
    drop(client);
    other.stop();
}

#[test]
fn exports_come_and_go_while_others_are_served() {
    let dir = Dir::new("exports");
    let (one, two) = (made(&dir, "qcow2", "", "4M"), made(&dir, "vellum", "", "8M"));
    let served = Controlled::start(&["--export", &format!("one={one}")]);
    let mut first = served.client("one");
    first.write(0, &[1; 4096], 0).expect("written");

    let vhost = dir.text("vhost");
    let added = format!("two={two}");
    export(&served, "add", &[&added, "--vhost-user-blk", &vhost, "--limit", "iops-total=100000"]).answer();
    refuses(&served, &["an export named \"two\" already exists"], "add", &[&added]);
    refuses(&served, &["none"], "add", &["three=none"]);
    let mut second = served.client("two");
    assert_eq!(second.size, 8 * MIB);
    second.write(0, &[2; 4096], 0).expect("written");
    let machine = UnixStream::connect(&vhost).expect("it listens for machines, too");
    until("that one has come", || told_of(&served, "two")["connections"] == 2);
    drop(machine);
    until("that one has left", || told_of(&served, "two")["connections"] == 1);
    let list = export(&served, "list", &["--output", "json"]).json();
    let names: Vec<_> = list.as_array().expect("a list").iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["one", "two"]);
    assert_eq!((&list[1]["state"], &list[1]["connections"]), (&"running".into(), &1.into()), "{list}");

    // The same image under one more name is the same disk.
    export(&served, "add", &["-r", &format!("again={two}")]).answer();
    assert_eq!(served.client("again").read(0, 1).expect("read"), [2]);
    let ran = at_last(&served, "remove", &["again"]);
    assert!(ran.out.contains("under another name"), "{ran:?}");

    refuses(&served, &["1 client is connected"], "remove", &["two"]);
    second.flush().expect("it is still there");
    drop(second);
    at_last(&served, "remove", &["two"]);
    assert!(!std::path::Path::new(&vhost).exists(), "its socket is gone");
    assert_eq!(vellum(&["check", &two]).code, 0, "it is closed, and nobody has it");
    assert!(Client::connect(&served.server.peer(), "two").is_err());
    refuses(&served, &["there is no export \"two\"; the exports are \"one\""], "remove", &["two"]);

    // Once more, and removed while a client uses it; what the client had been answered is there.
    export(&served, "add", &[&added]).answer();
    let mut second = served.client("two");
    second.write(4096, &[3; 4096], 0).expect("written");
    export(&served, "remove", &["--force", "two"]).answer();
    assert!(second.read(0, 1).is_err(), "it was sent away");
    export(&served, "add", &[&added]).answer();
    assert_eq!(served.client("two").read(4096, 1).expect("read"), [3]);

    assert_eq!(first.read(0, 1).expect("it has seen nothing of all that"), [1]);
    served.server.stop();
    assert_eq!(vellum(&["check", &two]).code, 0);
}

/// A client that reads a snapshot has the disk open, and is asked to leave, or disconnected, like a client of
/// the disk itself.
#[test]
fn a_disk_goes_also_while_a_snapshot_of_it_is_read() {
    let dir = Dir::new("exports-read");
    let (one, two) = (made(&dir, "qcow2", "", "4M"), made(&dir, "vellum", "", "8M"));
    let served = Controlled::start(&["--export", &format!("one={one}"), "--export-snapshots"]);
    let added = format!("two={two}");
    export(&served, "add", &[&added]).answer();
    vellum(&["snapshot", "create", "--control", &served.socket, "--disk", "two", "monday"]).answer();
    let mut reader = served.client("two@monday");
    refuses(&served, &["reading a snapshot", "use --force"], "remove", &["two"]);
    assert_eq!(reader.read(0, 1).expect("it has noticed nothing"), [0]);
    drop(served.client("two"));
    export(&served, "remove", &["--force", "two"]).answer();
    assert!(reader.read(0, 1).is_err(), "it was sent away");
    assert!(Client::connect(&served.server.peer(), "two@monday").is_err());
    assert_eq!(vellum(&["check", &two]).code, 0, "it is closed, and nobody has it");

    // It comes again, and so may its readers; without them it goes by itself.
    export(&served, "add", &[&added]).answer();
    assert_eq!(served.client("two@monday").read(0, 1).expect("read"), [0]);
    at_last(&served, "remove", &["two"]);
    served.server.stop();
}

/// A disk whose storage failed a flush refuses writes and says so; opened again it continues.
#[test]
fn a_poisoned_disk_says_so_and_is_opened_again() {
    let Some(device) = Failing::new() else { return };
    let served = Controlled::start(&["-f", "raw", &device.path]);
    let mut client = served.client("");
    client.write(0, &noise(1 << 20, 1), 0).expect("written");
    client.flush().expect("durable");
    device.fail();
    client.write(8 << 20, &noise(4 << 20, 3), 0).expect("into the page cache");
    client.flush().expect_err("there is no room for it");
    let told = served.told();
    assert_eq!(told["state"], "poisoned", "{told}");
    assert_eq!(told["last-error"]["request"], "a flush", "{told}");
    client.write(0, &[1; 512], 0).expect_err("it refuses writes");
    client.read(0, 512).expect("and reads");
    // The log names the remedy at once, not only with the next write.
    let said = served.server.says("a flush failed");
    let line = said.lines().find(|line| line.contains("a flush failed")).expect("it is there");
    assert!(line.contains("vellum export reopen"), "{said}");

    device.succeed();
    client.write(0, &[1; 512], 0).expect_err("that there is room again does not revive it");
    let reopened = export(&served, "reopen", &[]);
    assert!(reopened.answer().contains("may be missing"));
    assert_eq!(served.told()["state"], "running");
    assert!(client.read(0, 1 << 20).expect("the client is still there") == noise(1 << 20, 1));
    let shown = client.read(8 << 20, 4 << 20).expect("read");
    client.write(0, &[9; 512], 0).expect("it takes writes again");
    client.flush().expect_err("what was written since the flush that failed may be gone, too");
    client.flush().expect("and makes them durable");
    let mut back = served.client("");
    back.flush().expect_err("whoever comes now may be one that did not get the answer");
    back.flush().expect("it was told once");
    served.server.stop();
    // What only the cache had is gone, and was not shown.
    succeed("blockdev", &["--flushbufs", &device.path]);
    let mut left = vec![0; 4 << 20];
    let file = std::fs::File::open(&device.path).expect("the device");
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut left, 8 << 20).expect("read");
    assert!(left == shown, "what was read after the flush is on the device");
}

/// The flush that failed belonged to none of the writers: all of them get the error, and so does one that
/// reconnects.
#[test]
fn clients_hear_of_writes_that_were_lost_behind_their_back() {
    for comes_back in [false, true] {
        let Some(device) = Failing::new() else { return };
        let served = Controlled::start(&["-f", "raw", &device.path]);
        let (mut one, mut other) = (served.client(""), served.client(""));
        one.write(0, &noise(1 << 20, 1), 0).expect("written");
        one.flush().expect("durable");
        device.fail();
        one.write(8 << 20, &noise(8 << 20, 3), 0).expect("into the page cache");
        assert_eq!(served.ask("pause", &[]).code, 1, "its flush fails");
        assert_eq!(served.told()["state"], "poisoned");
        if comes_back {
            drop((one, other));
            (one, other) = (served.client(""), served.client(""));
        }
        device.succeed();
        let reopened = export(&served, "reopen", &["--output", "json"]).json();
        assert_eq!(reopened["may-miss-writes"], true, "{reopened}");
        if comes_back {
            drop((one, other));
            (one, other) = (served.client(""), served.client(""));
        }
        for client in [&mut one, &mut other] {
            client.flush().expect_err("what was written before may be gone");
            client.flush().expect("it was told once");
        }
        one.write(0, &[9; 512], 0).expect("written");
        one.flush().expect("durable");
        let reopened = export(&served, "reopen", &["--output", "json"]).json();
        assert_eq!(reopened["may-miss-writes"], false, "a disk that is sound loses nothing: {reopened}");
        one.flush().expect("nothing was lost");
        served.server.stop();
    }
}

/// The other way to open an image again: it goes and comes.
#[test]
fn clients_hear_of_writes_that_were_lost_before_the_disk_was_removed_and_added() {
    let Some(device) = Failing::new() else { return };
    let disk = format!("a={}", device.path);
    let served = Controlled::start(&["-f", "raw", "--export", &disk]);
    let mut client = served.client("a");
    client.write(0, &noise(1 << 20, 1), 0).expect("written");
    client.flush().expect("durable");
    device.fail();
    client.write(8 << 20, &noise(8 << 20, 3), 0).expect("into the page cache");
    client.flush().expect_err("there is no room for it");
    device.succeed();
    let removed = export(&served, "remove", &["--force", "a"]);
    assert!(removed.code == 1 && removed.err.contains("not flushed may be missing"), "{removed:?}");
    export(&served, "add", &["-f", "raw", &disk]).answer();
    served.server.says("not flushed before it was removed may be missing");
    let mut back = served.client("a");
    let shown = back.read(8 << 20, 8 << 20).expect("read");
    back.flush().expect_err("what it wrote before may be gone");
    back.flush().expect("it was told once");
    // Closed well this time; but a client that was connected at the loss may still come.
    export(&served, "remove", &["--force", "a"]).answer();
    export(&served, "add", &["-f", "raw", &disk]).answer();
    let mut late = served.client("a");
    late.flush().expect_err("it may be one of the first");
    late.flush().expect("it was told once");
    served.server.stop();
    succeed("blockdev", &["--flushbufs", &device.path]);
    let mut left = vec![0; 8 << 20];
    let file = std::fs::File::open(&device.path).expect("the device");
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut left, 8 << 20).expect("read");
    assert!(left == shown, "what was read is on the device");
}

fn overwrite(image: &str, head: &[u8]) {
    let file = std::fs::OpenOptions::new().write(true).open(image).expect("the image");
    std::os::unix::fs::FileExt::write_all_at(&file, head, 0).expect("written");
}

/// Zeros over the header: the image can be closed, and then not be opened. What was there.
pub(super) fn damage(image: &str) -> Vec<u8> {
    let mut head = vec![0; 8192];
    let file = std::fs::File::open(image).expect("the image");
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut head, 0).expect("read");
    overwrite(image, &vec![0; head.len()]);
    head
}

/// A healthy disk can also be reopened while it has clients, but not one with a snapshot that is being read.
#[test]
fn any_disk_is_opened_again() {
    for (format, options) in
        [("qcow2", ""), ("qcow2", "journal=off"), ("vellum", ""), ("vellum", "layout=table")]
    {
        let dir = Dir::new("reopen");
        let image = made(&dir, format, options, "4M");
        let served = Controlled::start(&[&image]);
        let mut client = served.client("");
        for round in 1..=3 {
            client.write(0, &[round; 8192], 0).expect("written");
            export(&served, "reopen", &[]).answer();
            assert_eq!(client.read(0, 1).expect("read"), [round], "{format} {options}");
            client.flush().expect("nothing was lost");
        }
        std::fs::rename(&image, dir.join("elsewhere")).expect("renamed");
        refuses(&served, &["not found under its name", "nothing was changed"], "reopen", &[]);
        client.write(0, &[8; 512], 0).expect("it is open");
        std::fs::rename(dir.join("elsewhere"), &image).expect("back");
        // What was not written since it was opened does not write its header at a close.
        export(&served, "reopen", &[]).answer();
        let head = damage(&image);
        refuses(&served, &[&image], "reopen", &[]);
        assert_eq!(served.told()["state"], "closed");
        client.write(0, &[9; 512], 0).expect_err("it is closed");
        overwrite(&image, &head);
        export(&served, "reopen", &[]).answer();
        client.write(0, &[9; 512], 0).expect("it is open");
        served.server.stop();
    }
}

/// It was closed well, and then could not be opened: the exit code must report that it has not been served
/// since.
#[test]
fn a_disk_that_could_not_be_opened_again_is_no_good_end() {
    for removes in [false, true] {
        let dir = Dir::new("not-reopened");
        let (image, good) = (made(&dir, "qcow2", "", "4M"), made(&dir, "vellum", "", "4M"));
        let (bad, good) = (format!("bad={image}"), format!("good={good}"));
        let served = Controlled::start(&["--export", &bad, "--export", &good]);
        damage(&image);
        refuses(&served, &[&image], "reopen", &["bad"]);
        if removes {
            refuses(&served, &[&image, "could not be reopened"], "remove", &["bad"]);
            refuses(&served, &["there is no export"], "remove", &["bad"]);
            served.server.stop();
        } else {
            served.server.signal(rustix::process::Signal::TERM);
            let ran = served.server.wait(PATIENCE);
            assert_eq!(ran.code, 1, "{ran:?}");
            assert!(ran.err.contains(&image) && ran.err.contains("could not be reopened"), "{ran:?}");
        }
    }
}

#[test]
fn the_socket_says_what_it_knows() {
    let dir = Dir::new("hello");
    let served = Controlled::start(&[&made(&dir, "qcow2", "", "1M")]);
    let mut socket = UnixStream::connect(&served.socket).expect("it listens");
    let mut answers = BufReader::new(socket.try_clone().expect("a descriptor")).lines();
    let mut ask = |line: &str| {
        socket.write_all(format!("{line}\n").as_bytes()).expect("it reads");
        let answer = answers.next().expect("an answer").expect("text");
        serde_json::from_str::<serde_json::Value>(&answer).expect("JSON")
    };
    let hello = ask(r#"{"command":"hello"}"#);
    assert_eq!(hello["return"]["protocol"], 1, "{hello}");
    let commands = hello["return"]["commands"].as_array().expect("a list");
    assert!(commands.contains(&"export-add".into()) && commands.contains(&"hello".into()), "{hello}");
    let unknown = ask(r#"{"command":"explode"}"#);
    let message = unknown["error"]["message"].as_str().expect("a message");
    assert!(message.starts_with("unknown command \"explode\"; known: hello, stats"), "{unknown}");
    assert_eq!(unknown["error"]["kind"], "unsupported");
    served.server.stop();
}

#[test]
fn one_image_that_cannot_be_opened_keeps_no_other_from_being_served() {
    let dir = Dir::new("one-bad");
    let good = made(&dir, "qcow2", "", "4M");
    let bad = dir.text("bad.qcow2");
    std::fs::write(&bad, b"QFI\xfb and nothing behind it").expect("a file");
    let place = Dir::short();
    let (exports, vhost) = ([format!("bad={bad}"), format!("good={good}")], place.text("vhost"));
    let sockets = format!("bad={vhost}");
    let arguments = ["--export", &exports[0], "--export", &exports[1], "--vhost-user-blk", &sockets];
    let server = Server::start(&arguments);
    let mut client = Client::connect(&server.peer(), "good").expect("it is served");
    client.write(0, &[1; 512], 0).expect("written");
    assert!(Client::connect(&server.peer(), "bad").is_err());
    server.says("the other images are served");
    server.says("bad.qcow2");
    assert!(!place.join("vhost").exists(), "nobody waits at a socket that leads nowhere");
    drop(client);
    server.stop();
    for arguments in [&[&arguments[..], &["--require-all"]].concat()[..], &["--export", &exports[0]]] {
        let ran = Server::try_start(arguments).err().expect("it does not start");
        assert!(ran.code == 1 && ran.err.contains("bad.qcow2"), "{ran:?}");
    }
    assert_eq!(vellum(&["check", &good]).code, 0, "and what was open is closed");
}

#[test]
fn clients_see_what_their_socket_shows() {
    let (dir, place) = (Dir::new("exports-shown"), Dir::short());
    let exports = [
        format!("web={}", made(&dir, "vellum", "layout=table", "4M")),
        format!("db={}", made(&dir, "qcow2", "", "4M")),
    ];
    // One argument each: the support for servers waits for those of two words.
    let at = |export: &str, socket: &str| format!("--nbd={export}=unix:{}", place.text(socket));
    let arguments = [
        &at("web", "web"),
        &at("web@one", "both"),
        &at("db", "both"),
        "--export",
        &exports[0],
        "--export",
        &exports[1],
    ];
    let sees = |served: &Controlled, socket: &str, seen: &[&str]| {
        let peer = if socket.is_empty() { served.server.peer() } else { Peer::Unix(place.join(socket)) };
        for export in ["web", "web@one", "db", "later", ""] {
            let is_there = Client::connect(&peer, export).is_ok();
            assert_eq!(is_there, seen.contains(&export), "{export:?} at {socket:?}");
        }
        if has("nbdinfo") && !socket.is_empty() {
            let ran = run("nbdinfo", &["--list", &format!("nbd+unix:///?socket={}", place.text(socket))]);
            let listed = seen.iter().filter(|export| ran.out.contains(&format!("export={export:?}")));
            assert_eq!(
                (listed.count(), ran.out.matches("export=").count()),
                (seen.len(), seen.len()),
                "{ran:?}"
            );
        }
    };
    let served = Controlled::start(&arguments);
    vellum(&["snapshot", "create", "--control", &served.socket, "--disk", "web", "one"]).answer();
    sees(&served, "", &["web", "db"]);
    sees(&served, "web", &["web"]);
    sees(&served, "both", &["web@one", "db"]);
    let later = format!("later={}", made(&dir, "raw", "", "4M"));
    export(&served, "add", &["-f", "raw", &later, "--nbd", &format!("unix:{}", place.text("later"))])
        .answer();
    sees(&served, "later", &["later"]);
    sees(&served, "", &["web", "db", "later"]);
    at_last(&served, "remove", &["later"]);
    assert!(!place.join("later").exists(), "its socket goes with it");
    served.server.stop();

    let served = Controlled::start(&[&arguments[..], &["--export-snapshots"]].concat());
    sees(&served, "", &["web", "web@one", "db"]);
    sees(&served, "web", &["web", "web@one"]);
    sees(&served, "both", &["web@one", "db"]);
    served.server.stop();
    let unknown = Server::try_start(&["--export", &exports[1], &at("web", "web")]);
    assert!(unknown.is_err_and(|ran| ran.code == 1 && ran.err.contains("there is no export \"web\"")));
}

/// A server that was started with one export has seats for 128 clients; those that are added bring theirs.
#[test]
fn exports_that_are_added_bring_seats_for_their_clients() {
    let dir = Dir::new("seats");
    let image = made(&dir, "raw", "", "4M");
    let served = Controlled::start(&["-f", "raw", "--export", &format!("0={image}")]);
    for number in 1..12 {
        export(&served, "add", &["-f", "raw", &format!("{number}={image}")]).answer();
    }
    let mut clients: Vec<Client> = (0..12)
        .flat_map(|number| (0..12).map(move |_| number.to_string()))
        .map(|name| served.client(&name))
        .collect();
    assert_eq!(clients.len(), 144);
    for client in &mut clients {
        client.read(0, 1).expect("it is served");
    }
    // Those that are there stay when seats go.
    let kept = clients.split_off(8 * 12);
    drop(clients);
    for number in 0..8 {
        at_last(&served, "remove", &[&number.to_string()]);
    }
    for mut client in kept {
        client.read(0, 1).expect("it is served");
    }
    served.server.stop();
}
