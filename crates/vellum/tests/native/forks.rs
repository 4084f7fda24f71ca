//! Clones of a snapshot, whose image is closed, or written by the server that serves them.

use std::path::Path;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{Ran, has, qemu_io, run, skipped, until_let_go, vellum};
use super::support::server::Server;
use super::{MIB, check_says, refused};

/// A disk of 8 MiB. Snapshot `monday` has ones in the first MiB and twos at 4 MiB; the disk has changed since.
fn parent(dir: &Dir, layout: &str) -> String {
    let image = dir.text("parent.vlm");
    vellum(&["create", "-f", "vellum", "-o", layout, &image, "8M"]).answer();
    let server = Started::with(&[&image]);
    let mut client = server.client("");
    client.write(0, &vec![1; MIB], 0).expect("written");
    client.write(4 << 20, &[2; 65_536], 0).expect("written");
    server.snapshot("create", &["monday"]).answer();
    client.write(0, &[9; 4096], 0).expect("written");
    client.write(4 << 20, &[9; 4096], 0).expect("written");
    client.write(6 << 20, &[9; 4096], 0).expect("written");
    client.disconnect();
    server.server.stop();
    until_let_go(&image);
    image
}

/// A server with a control socket.
struct Started {
    server: Server,
    control: String,
    _place: Dir,
}

impl Started {
    #[track_caller]
    fn with(arguments: &[&str]) -> Self {
        let place = Dir::short();
        let control = place.text("control");
        let all = [&["--export-snapshots", "--control", &control][..], arguments].concat();
        Self { server: Server::start(&all), control, _place: place }
    }

    fn snapshot(&self, verb: &str, rest: &[&str]) -> Ran {
        vellum(&[&["snapshot", verb, "--control", &self.control][..], rest].concat())
    }

    fn export(&self, verb: &str, rest: &[&str]) -> Ran {
        vellum(&[&["export", verb, "--control", &self.control][..], rest].concat())
    }

    fn clones(&self, from: &str, names: &[&str]) -> Ran {
        vellum(&[&["clone", "--control", &self.control, "--from", from][..], names].concat())
    }

    #[track_caller]
    fn client(&self, export: &str) -> Client {
        Client::connect(&self.server.peer(), export).expect("the export is there")
    }
}

/// What a clone of `monday` reads as; `own` at 2 MiB.
#[track_caller]
fn reads_as_monday(client: &mut Client, own: u8) {
    for (at, value) in
        [(0, 1), (MIB as u64 - 512, 1), (MIB as u64, 0), (2 << 20, own), (4 << 20, 2), (6 << 20, 0)]
    {
        let bytes = client.read(at, 512).expect("read");
        assert!(bytes.iter().all(|byte| *byte == value), "at {at:#x}: {} and not {value}", bytes[0]);
    }
}

fn names(said: &str, words: &[&str]) -> bool {
    words.iter().all(|word| said.contains(word))
}

#[test]
fn clones_of_a_closed_image_read_as_its_snapshot() {
    for layout in ["layout=zoned,zone_size=1M", "layout=table,unit_size=64k"] {
        let dir = Dir::new("forks-closed");
        let image = parent(&dir, layout);
        let [a, b, c] = ["a.qcow2", "b.vlm", "c.qcow2"].map(|name| dir.text(name));
        let from = format!("{image}@monday");
        let said = vellum(&["clone", "--output", "json", &from, &a, &b]).json();
        assert_eq!(
            (&said["virtual-size"], &said["template"]),
            (&(8 << 20).into(), &from.clone().into()),
            "{said}"
        );
        let listed = vellum(&["snapshot", "list", "--output", "json", &image]).json();
        assert_eq!(listed[0]["held-by-clones"], true, "{listed}");
        // The disk of the image goes on; a clone of a clone; one more clone where the snapshot is marked.
        let server = Server::start(&[&image]);
        Client::connect(&server.peer(), "").expect("there").write(0, &vec![8; MIB], 0).expect("written");
        server.stop();
        until_let_go(&image);
        vellum(&["clone", "-q", &a, &c]).answer();
        let reference = dir.text("monday.raw");
        vellum(&["convert", "-l", "monday", "-O", "raw", &image, &reference]).answer();
        for clone in [&a, &b, &c] {
            let format = if clone.ends_with("vlm") { "vellum" } else { "qcow2" };
            vellum(&["compare", "-f", format, "-F", "raw", clone, &reference]).answer();
            vellum(&["check", clone]).answer();
            let raw = dir.text("copy.raw");
            vellum(&["convert", "-O", "raw", clone, &raw]).answer();
            assert!(std::fs::read(&raw).expect("a copy") == std::fs::read(&reference).expect("a copy"));
        }
        let info = vellum(&["info", "--output", "json", &b]).json();
        assert_eq!(info["backing-filename"], "parent.vlm@monday#1", "{info}");
        assert_eq!(info["backing-filename-format"], "vellum-snapshot", "{info}");
        let chain = vellum(&["info", "--backing-chain", "--output", "json", &c]).json();
        assert_eq!(
            (&chain[2]["filename"], &chain[2]["snapshot"]["name"]),
            (&image.clone().into(), &"monday".into())
        );
        let chain = vellum(&["info", "--backing-chain", &c]).answer();
        assert!(names(&chain, &["parent.vlm@monday#1", "read as snapshot: monday (ID 1)"]), "{chain}");
        let map = vellum(&["map", "--output", "json", &a]).json();
        assert_eq!((&map[0]["depth"], &map[0]["data"]), (&1.into(), &true.into()), "{map}");
        check_says(&image, 0);
        // What a clone stands on is not deleted, and not released while there is a clone.
        refused(
            &["monday", "clones stand on it", "vellum flatten", "a.qcow2"],
            &["snapshot", "delete", &image, "monday"],
        );
        refused(
            &["clones still stand on snapshot monday", "b.vlm"],
            &["snapshot", "release", &image, "monday"],
        );
        vellum(&["flatten", &b]).answer();
        vellum(&["compare", "-f", "vellum", "-F", "raw", &b, &reference]).answer();
        refused(&["a.qcow2"], &["snapshot", "release", &image, "monday"]);
        let elsewhere = Dir::new("forks-elsewhere");
        std::fs::rename(&a, elsewhere.text("a.qcow2")).expect("moved");
        // It names its image by that image's directory no more, so it does not stand on it any more.
        vellum(&["snapshot", "release", "--look-in", elsewhere.text(".").as_str(), &image, "monday"])
            .answer();
        std::fs::rename(elsewhere.text("a.qcow2"), &a).expect("moved");
        refused(&["monday (ID 1) was released"], &["convert", "-O", "raw", &a, &dir.text("x.raw")]);
        vellum(&["clone", "-q", &from, &dir.text("d.vlm")]).answer();
        vellum(&["compare", "-f", "qcow2", "-F", "raw", &a, &reference]).answer();
        for clone in [&a, &b, &c, &dir.text("d.vlm")] {
            std::fs::remove_file(clone).expect("removed");
        }
        vellum(&["snapshot", "release", &image, "monday"]).answer();
        vellum(&["snapshot", "delete", &image, "monday"]).answer();
        check_says(&image, 0);
    }
}

/// Another snapshot of the same name is not the one that the clone stands on.
#[test]
fn a_snapshot_that_was_made_again_is_another_one() {
    let dir = Dir::new("forks-again");
    let image = parent(&dir, "layout=table,unit_size=64k");
    let (clone, from) = (dir.text("a.qcow2"), format!("{image}@monday"));
    vellum(&["clone", "-q", &from, &clone]).answer();
    let hidden = Dir::new("forks-hidden");
    std::fs::rename(&clone, hidden.text("a.qcow2")).expect("moved");
    vellum(&["snapshot", "release", &image, "monday"]).answer();
    vellum(&["snapshot", "delete", &image, "monday"]).answer();
    vellum(&["snapshot", "create", &image, "monday"]).answer();
    std::fs::rename(hidden.text("a.qcow2"), &clone).expect("moved");
    vellum(&["clone", "-q", &from, &dir.text("b.qcow2")]).answer();
    refused(
        &["no snapshot monday (ID 1)", "it was deleted"],
        &["convert", "-O", "raw", &clone, &dir.text("x.raw")],
    );
}

/// An `@` in a file's name is only that, and another program does not read a clone of a snapshot as something else.
#[test]
fn a_file_whose_name_has_an_at_is_a_file() {
    let dir = Dir::new("forks-at");
    let image = parent(&dir, "layout=table,unit_size=64k");
    let odd = dir.text("parent.vlm@monday");
    vellum(&["create", "-q", "-f", "raw", &odd, "1M"]).answer();
    let [over, clone] = ["over.qcow2", "clone.qcow2"].map(|name| dir.text(name));
    vellum(&["clone", "-q", "-F", "raw", &odd, &over]).answer();
    assert_eq!(vellum(&["info", "--output", "json", &over]).json()["virtual-size"], 1 << 20);
    vellum(&["compare", "-f", "qcow2", "-F", "raw", &over, &odd]).answer();
    std::fs::rename(&image, dir.text("par@ent.vlm")).expect("moved");
    let image = dir.text("par@ent.vlm");
    vellum(&["clone", "-q", &format!("{image}@monday"), &clone]).answer();
    assert_eq!(
        vellum(&["info", "--output", "json", &clone]).json()["backing-filename"],
        "par@ent.vlm@monday#1"
    );
    vellum(&["check", &clone]).answer();
    vellum(&["convert", "-O", "raw", &clone, &dir.text("copy.raw")]).answer();
    vellum(&["snapshot", "create", &image, "a@b"]).answer();
    refused(&["contains an \"@\""], &["clone", &format!("{image}@2"), &dir.text("none.qcow2")]);
    refused(&["no snapshot named none"], &["clone", &format!("{image}@none"), &dir.text("none.qcow2")]);
    assert!(!Path::new(&dir.text("none.qcow2")).exists());
    if !has("qemu-img") {
        return skipped("qemu-img is not installed");
    }
    // Even where the names would lead it to a file.
    std::fs::copy(&odd, dir.text("par@ent.vlm@monday#1")).expect("a copy");
    let ran = run("qemu-img", &["convert", "-O", "raw", &clone, &dir.text("wrong.raw")]);
    assert!(ran.code != 0 && ran.err.contains("vellum-snapshot"), "{ran:?}");
}

/// The disk is written while its clones are used; it is enlarged, reopened, removed, added and reverted.
#[test]
fn a_served_disk_is_forked() {
    for layout in ["layout=zoned,zone_size=1M", "layout=table,unit_size=64k"] {
        let dir = Dir::new("forks-served");
        let image = parent(&dir, layout);
        let started = Started::with(&["--export", &format!("disk={image}")]);
        let mut guest = started.client("disk");
        started.snapshot("create", &["tuesday"]).answer();
        let [a, b] = ["a.qcow2", "b.vlm"].map(|name| dir.text(name));
        let said = started.clones("disk@monday", &[&a, &b]).answer();
        assert!(names(&said, &["2 clones of", "parent.vlm@monday"]), "{said}");
        refused(
            &["clones stand on it", "a.qcow2"],
            &["snapshot", "delete", "--control", &started.control, "monday"],
        );
        refused(&["b.vlm"], &["snapshot", "release", "--control", &started.control, "monday"]);
        for (name, clone) in [("a", &a), ("b", &b)] {
            started.export("add", &[&format!("{name}={clone}")]).answer();
            let mut client = started.client(name);
            reads_as_monday(&mut client, 0);
            client.write(2 << 20, &[7; 4096], 1).expect("written");
        }
        assert_eq!(started.server.times_open(&image), 2, "the disk, and the header that the clones share");
        let mut clients = ["a", "b"].map(|name| started.client(name));
        let mut all_read = || clients.iter_mut().for_each(|client| reads_as_monday(client, 7));
        for value in 3..6 {
            guest.write(0, &vec![value; 8 * MIB], 0).expect("written");
            guest.flush().expect("flushed");
            all_read();
        }
        let mut reader = started.client("disk@monday");
        reads_as_monday(&mut reader, 0);
        // A client of the snapshot is in the way of these, and the clones are not.
        refused(&["reading a snapshot"], &["resize", "--control", &started.control, "--disk", "disk", "+8M"]);
        all_read();
        reader.disconnect();
        super::support::until("the reader has left", || {
            let disk = ["--control", &started.control, "--disk", "disk", "+8M"];
            vellum(&[&["resize"][..], &disk].concat()).code == 0
        });
        all_read();
        guest.write(0, &vec![6; 8 * MIB], 0).expect("written");
        started.export("reopen", &["disk"]).answer();
        all_read();
        guest.disconnect();
        super::support::until("the guest has left", || {
            started.snapshot("revert", &["--disk", "disk", "tuesday"]).code == 0
        });
        all_read();
        // Removed, the disk can be written by another program only when no clone is served.
        started.export("remove", &["disk"]).answer();
        all_read();
        refused(&["parent.vlm", "in use"], &["snapshot", "create", &image, "x"]);
        started.export("add", &[&format!("disk={image}")]).answer();
        all_read();
        let mut guest = started.client("disk");
        guest.write(0, &[5; 4096], 0).expect("written");
        guest.flush().expect("flushed");
        all_read();
        started.server.stop();
        until_let_go(&image);
        vellum(&["check", &a]).answer();
        check_says(&image, 0);
        check_says(&b, 0);
    }
}

/// Killed, and started again in any order; the snapshot stays, and what was flushed.
#[test]
fn a_killed_server_is_started_again_in_any_order() {
    let dir = Dir::new("forks-killed");
    let image = parent(&dir, "layout=zoned,zone_size=1M");
    let (disk, a, b) = (format!("disk={image}"), dir.text("a.qcow2"), dir.text("b.vlm"));
    let (its_a, its_b) = (format!("a={a}"), format!("b={b}"));
    let mut server = Started::with(&["--export", &disk]);
    server.clones("@monday", &[&a, &b]).answer();
    let mut own = 0;
    for round in 0..6u8 {
        let (first, then): (&[&str], &[&str]) = match round % 3 {
            0 => (&[&disk], &[&its_a, &its_b]),
            1 => (&[&its_a, &its_b], &[&disk]),
            // All at once.
            _ => (&[&its_b, &disk, &its_a], &[]),
        };
        let arguments: Vec<&str> = first.iter().flat_map(|export| ["--export", export]).collect();
        server.server.kill();
        for file in [&image, &a, &b] {
            until_let_go(file);
        }
        server = Started::with(&arguments);
        then.iter().for_each(|export| _ = server.export("add", &[export]).answer());
        let mut guest = server.client("disk");
        guest.write(0, &vec![round + 10; 8 * MIB], 0).expect("written");
        guest.flush().expect("flushed");
        for name in ["a", "b"] {
            let mut client = server.client(name);
            reads_as_monday(&mut client, own);
            client.write(2 << 20, &[round + 20; 512], 0).expect("written");
            client.flush().expect("flushed");
            reads_as_monday(&mut client, round + 20);
        }
        own = round + 20;
        guest.write(0, &vec![round + 30; MIB], 0).expect("written, and not flushed");
    }
    server.server.kill();
    // The clones alone: the image, which was not closed, is read as it will be recovered.
    until_let_go(&image);
    let server = Server::start(&["--export", &its_a, "--export", &its_b]);
    for name in ["a", "b"] {
        reads_as_monday(&mut Client::connect(&server.peer(), name).expect("there"), own);
    }
    server.stop();
    until_let_go(&image);
    vellum(&["recover", &image]).answer();
    check_says(&image, 0);
}

/// What another process has open is refused in plain words, in both directions.
#[test]
fn clones_are_served_where_their_disk_is_written() {
    let dir = Dir::new("forks-two");
    let image = parent(&dir, "layout=table,unit_size=64k");
    let [a, b] = ["a.qcow2", "b.vlm"].map(|name| dir.text(name));
    let first = Started::with(&[&image]);
    first.clones("@monday", &[&a]).answer();
    let refusal = Server::try_start(&[&a]).err().expect("it is refused");
    assert!(names(&refusal.err, &["parent.vlm", "serve the clones there"]), "{refusal:?}");
    refused(&["parent.vlm", "in use"], &["clone", &format!("{image}@monday"), &b]);
    // Over NBD anybody can read what the clone has.
    first.export("add", &[&format!("a={a}")]).answer();
    reads_as_monday(&mut first.client("a"), 0);
    if has("qemu-io") {
        let read = ["read -P 1 0 1M".to_owned(), "read -P 2 4M 64k".to_owned(), "read -P 0 6M 1M".to_owned()];
        qemu_io(&["-r", "-f", "raw", &first.server.uri("a")], &read);
    } else {
        skipped("qemu-io is not installed");
    }
    first.server.stop();
    until_let_go(&image);
    // Two processes that read the snapshot of an image that is not written; more clones; no writer.
    let second = Server::start(&[&a]);
    vellum(&["clone", "-q", &format!("{image}@monday"), &b]).answer();
    let third = Server::start(&[&b]);
    for server in [&second, &third] {
        reads_as_monday(&mut Client::connect(&server.peer(), "").expect("there"), 0);
    }
    refused(&["parent.vlm", "in use"], &["snapshot", "create", &image, "x"]);
    assert!(Server::try_start(&[&image]).is_err());
    second.kill();
    third.stop();
    until_let_go(&image);
    Server::start(&[&image]).stop();
}

/// Hundreds of clones of one snapshot are served over one open image.
#[test]
fn hundreds_of_clones_share_one_snapshot() {
    let dir = Dir::new("forks-hundreds");
    let image = parent(&dir, "layout=zoned,zone_size=1M");
    let files: Vec<String> = (0..200).map(|number| dir.text(&format!("c{number:03}.qcow2"))).collect();
    let all: Vec<&str> = files.iter().map(String::as_str).collect();
    let first = Started::with(&["--export", &format!("disk={image}")]);
    assert!(first.clones("disk@monday", &all).answer().contains("200 clones"));
    first.server.stop();
    until_let_go(&image);
    let mut exports: Vec<String> =
        files.iter().enumerate().map(|(number, file)| format!("{number}={file}")).collect();
    exports.insert(100, format!("disk={image}"));
    let arguments: Vec<&str> = exports.iter().flat_map(|export| ["--export", export]).collect();
    let server = Server::start(&arguments);
    let mut guest = Client::connect(&server.peer(), "disk").expect("there");
    guest.write(0, &vec![3; 8 * MIB], 1).expect("written");
    for number in (0..200).step_by(7) {
        reads_as_monday(&mut Client::connect(&server.peer(), &number.to_string()).expect("there"), 0);
    }
    assert_eq!(server.times_open(&image), 2);
    server.stop();
}

/// The directories take a while to be searched for clones. One that comes meanwhile keeps its snapshot.
#[test]
fn a_clone_that_is_made_during_a_release_is_not_lost() {
    let dir = Dir::new("forks-release-race");
    let image = parent(&dir, "layout=table,unit_size=64k");
    for other in 0..1000 {
        std::fs::write(dir.join(&format!("other{other}")), "x").expect("a file");
    }
    let server = Started::with(&["--export", &format!("p={image}")]);
    let mut made = 0;
    for round in 0..8 {
        let name = format!("s{round}");
        server.snapshot("create", &[&name]).answer();
        let [first, second] = ["first", "second"].map(|name| dir.text(&format!("{name}{round}.qcow2")));
        let from = format!("p@{name}");
        server.clones(&from, &[&first]).answer();
        std::fs::remove_file(&first).expect("the only clone");
        let released = std::thread::scope(|scope| {
            let released = scope.spawn(|| {
                let released = server.snapshot("release", &[&name]);
                released.code == 0 && server.snapshot("delete", &[&name]).code == 0
            });
            std::thread::sleep(std::time::Duration::from_millis(5 * round));
            let cloned = server.clones(&from, &[&second]);
            made += usize::from(cloned.code == 0);
            (released.join().expect("it ends"), cloned.code == 0)
        });
        assert!(released != (true, true), "round {round}: the snapshot of a clone was deleted");
    }
    assert!(made > 0, "no clone was made");
}
