//! Persistent bitmaps, written by Vellum and by QEMU in turns. After every step QEMU's check has nothing to say, both programs list
//! the same bitmaps, and what QEMU reads as marked is what a model says: exactly, where every opening was closed.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use serde_json::Value;
use vellum_core::Random;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{qemu_io, run, succeed, vellum};
use super::support::scale;
use super::support::server::Server;
use super::{report, requires};

const SIZE: usize = 4 << 20;
const STEPS: usize = 30;

const KINDS: [&[&str]; 4] = [
    &["-o", "cluster_size=64k"],
    &["-o", "cluster_size=4k"],
    &["-o", "cluster_size=16k,extended_l2=on,refcount_bits=8"],
    &["-o", "cluster_size=512"],
];

/// A bitmap as it should be.
#[derive(Clone)]
struct Model {
    name: String,
    granularity: usize,
    is_enabled: bool,
    marked: BTreeSet<usize>,
}

impl Model {
    fn mark(&mut self, at: usize, len: usize) {
        if self.is_enabled {
            self.marked.extend(at / self.granularity..(at + len).div_ceil(self.granularity));
        }
    }

    fn merge(&mut self, other: &Self) {
        let g = other.granularity;
        let spans = other.marked.iter().map(|granule| (granule * g, g));
        let own = self.granularity;
        self.marked.extend(spans.flat_map(|(at, len)| at / own..(at + len).div_ceil(own)));
    }
}

/// What QEMU reads as marked, in bytes: the runs of the context, from a server of its own.
fn marked_by_qemu(dir: &Dir, image: &str, bitmap: &str, granularity: usize) -> BTreeSet<usize> {
    let socket = dir.text("nbd.sock");
    let mut server = Command::new("qemu-nbd")
        .args(["-r", "-f", "qcow2", "-B", bitmap, "-k", &socket, "-t", image])
        .stdin(Stdio::null())
        .spawn()
        .expect("qemu-nbd");
    let map = format!("--map=qemu:dirty-bitmap:{bitmap}");
    let ask = || run("nbdinfo", &[&map, "--json", &format!("nbd+unix:///?socket={socket}")]);
    let mut answer = ask();
    for _ in 0..500 {
        // The socket is there a moment before anybody listens.
        if !answer.err.contains("nbd_connect_uri: connect:") {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
        answer = ask();
    }
    server.kill().expect("it runs");
    server.wait().expect("it ends");
    let _ = std::fs::remove_file(&socket);
    runs_in(&answer.json(), granularity)
}

/// The granules in these runs.
pub(crate) fn runs_in(map: &Value, granularity: usize) -> BTreeSet<usize> {
    let number =
        |run: &Value, key: &str| usize::try_from(run[key].as_u64().expect("a number")).expect("small");
    let runs = map.as_array().expect("runs").iter().filter(|run| run["type"] == 1);
    runs.flat_map(|run| {
        let (at, len) = (number(run, "offset"), number(run, "length"));
        at / granularity..(at + len).div_ceil(granularity)
    })
    .collect()
}

fn bitmaps_to(program: &str, image: &str) -> Vec<Value> {
    let info = match program {
        "qemu-img" => run("qemu-img", &["info", "--output=json", image]).json(),
        _ => vellum(&["info", "--output", "json", image]).json(),
    };
    info["format-specific"]["data"]["bitmaps"].as_array().cloned().unwrap_or_default()
}

struct Subject {
    dir: Dir,
    image: String,
    bitmaps: Vec<Model>,
}

impl Subject {
    fn new(kind: &[&str], has_journal: bool) -> Self {
        let dir = Dir::new("bitmaps");
        let image = dir.text("disk.qcow2");
        succeed("qemu-img", &[&["create", "-q", "-f", "qcow2"][..], kind, &[&image, "4M"]].concat());
        if has_journal {
            vellum(&["journal", "enable", &image]).answer();
        }
        Self { dir, image, bitmaps: Vec::new() }
    }

    fn place(random: &mut Random) -> (usize, usize) {
        let at = random.index(SIZE / 512) * 512;
        (at, (512 * (1 + random.index(100))).min(SIZE - at))
    }

    fn mark(&mut self, at: usize, len: usize) {
        self.bitmaps.iter_mut().for_each(|bitmap| bitmap.mark(at, len));
    }

    fn write_with_qemu(&mut self, random: &mut Random) {
        let mut commands = Vec::new();
        for _ in 0..1 + random.index(3) {
            let (at, len) = Self::place(random);
            commands.push(match random.index(3) {
                0 => format!("write -z {at} {len}"),
                _ => format!("write -P {} {at} {len}", 1 + random.index(250)),
            });
            self.mark(at, len);
        }
        qemu_io(&["-f", "qcow2", &self.image], &commands);
    }

    fn write_with_vellum(&mut self, random: &mut Random, is_killed: bool) {
        let server = Server::start(&["-f", "qcow2", &self.image]);
        let mut client = Client::connect(&server.peer(), "").expect("the export");
        for _ in 0..1 + random.index(5) {
            let (at, len) = Self::place(random);
            let len32 = u32::try_from(len).expect("short");
            match random.index(4) {
                0 => client.zero(at as u64, len32, 0).expect("zeros"),
                1 => client.trim(at as u64, len32).expect("a discard"),
                _ => client.write(at as u64, &vec![7; len], 0).expect("a write"),
            };
            self.mark(at, len);
        }
        client.flush().expect("a flush");
        if is_killed {
            server.kill();
            vellum(&["recover", &self.image]).answer();
        } else {
            client.disconnect();
            assert_eq!(server.stop().code, 0);
        }
    }

    /// Runs one command line with either program.
    fn change(&self, random: &mut Random, arguments: &[&str]) {
        match random.one_in(2) {
            true => drop(succeed("qemu-img", arguments)),
            false => drop(vellum(arguments).answer()),
        }
    }

    /// Does something. Whether a server was killed, after which more may be marked.
    fn step(&mut self, number: usize, random: &mut Random) -> (String, bool) {
        let image = self.image.clone();
        if self.bitmaps.len() < 2 || self.bitmaps.len() < 5 && random.one_in(6) {
            let (name, granularity) = (format!("b{number}"), *random.pick(&[512, 4096, 65_536]));
            let text = granularity.to_string();
            self.change(random, &["bitmap", "--add", "-g", &text, "-f", "qcow2", &image, &name]);
            self.bitmaps.push(Model { name, granularity, is_enabled: true, marked: BTreeSet::new() });
            return ("adds".to_owned(), false);
        }
        let index = random.index(self.bitmaps.len());
        let name = self.bitmaps[index].name.clone();
        match random.index(12) {
            0 => {
                self.change(random, &["bitmap", "--remove", &image, &name]);
                self.bitmaps.remove(index);
                return ("removes".to_owned(), false);
            }
            1 => {
                self.change(random, &["bitmap", "--clear", &image, &name]);
                self.bitmaps[index].marked.clear();
            }
            2 => {
                let is_enabled = random.one_in(2);
                self.change(
                    random,
                    &["bitmap", if is_enabled { "--enable" } else { "--disable" }, &image, &name],
                );
                self.bitmaps[index].is_enabled = is_enabled;
            }
            3 => {
                let other = self.bitmaps[random.index(self.bitmaps.len())].clone();
                self.change(random, &["bitmap", "--merge", &other.name, &image, &name]);
                self.bitmaps[index].merge(&other);
            }
            4..=6 => {
                self.write_with_qemu(random);
                return ("QEMU writes".to_owned(), false);
            }
            7 => {
                self.write_with_vellum(random, true);
                return ("Vellum is killed".to_owned(), true);
            }
            _ => {
                self.write_with_vellum(random, false);
                return ("Vellum writes".to_owned(), false);
            }
        }
        (format!("changes {name}"), false)
    }

    /// Judges. After a kill what is marked besides is taken over.
    fn judge(&mut self, is_killed: bool, is_thorough: bool, when: &str) -> usize {
        let checked = run("qemu-img", &["check", "-f", "qcow2", &self.image]);
        assert!(checked.code == 0, "{when}: {checked:?}");
        assert_eq!(vellum(&["check", &self.image]).code, 0, "{when}: our check");
        let theirs = bitmaps_to("qemu-img", &self.image);
        assert_eq!(theirs, bitmaps_to("vellum", &self.image), "{when}");
        assert_eq!(theirs.len(), self.bitmaps.len(), "{when}");
        if !is_thorough && !is_killed {
            return 0;
        }
        for bitmap in &mut self.bitmaps {
            let found = marked_by_qemu(&self.dir, &self.image, &bitmap.name, bitmap.granularity);
            if is_killed {
                assert!(bitmap.marked.is_subset(&found), "{when}: {} lacks a change", bitmap.name);
                bitmap.marked = found;
            } else {
                assert_eq!(found, bitmap.marked, "{when}: {}", bitmap.name);
            }
        }
        self.bitmaps.len()
    }
}

#[test]
fn both_programs_keep_bitmaps_up_in_turns() {
    requires!("qemu-img", "qemu-io", "qemu-nbd", "nbdinfo");
    let (mut steps, mut compared) = (0, 0);
    for kind in KINDS {
        for has_journal in [false, true] {
            if has_journal && kind[1] == "cluster_size=512" {
                continue; // its header has no room for both
            }
            for seed in 0..scale() as u64 {
                let mut random = Random::from_seed(seed + 21);
                let mut subject = Subject::new(kind, has_journal);
                for number in 0..STEPS {
                    let (done, is_killed) = subject.step(number, &mut random);
                    let when = format!("{kind:?}, journal {has_journal}, seed {seed}, step {number}: {done}");
                    let is_thorough = number + 1 == STEPS || number % 3 == 2;
                    compared += subject.judge(is_killed, is_thorough, &when);
                    steps += 1;
                }
            }
        }
    }
    report(&format!("{steps} steps, {compared} bitmaps read by QEMU, 0 differences"));
}

/// What QEMU has left in use is listed, kept, refused, and can be removed.
#[test]
fn an_inconsistent_bitmap_is_kept_and_not_used() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("bitmaps");
    let image = dir.text("disk.qcow2");
    succeed("qemu-img", &["create", "-q", "-f", "qcow2", &image, "4M"]);
    succeed("qemu-img", &["bitmap", "--add", &image, "broken"]);
    succeed("qemu-img", &["bitmap", "--add", &image, "other"]);
    // Killed while it has the image open: both are in use.
    let mut qemu = Command::new("qemu-io")
        .args(["-f", "qcow2", &image])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("qemu-io");
    let in_use = || {
        let all = vellum(&["info", "-U", "--output", "json", &image]).json();
        all["format-specific"]["data"]["bitmaps"][0]["flags"] == serde_json::json!(["in-use", "auto"])
    };
    for _ in 0..500 {
        if in_use() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    qemu.kill().expect("it runs");
    qemu.wait().expect("it ends");
    assert!(in_use(), "{}", vellum(&["info", "--output", "json", &image]).answer());
    for arguments in [["--clear"], ["--enable"], ["--disable"]] {
        let ran = vellum(&[&["bitmap"][..], &arguments, &[&image, "broken"]].concat());
        assert!(ran.code == 1 && ran.err.contains("inconsistent"), "{ran:?}");
    }
    let merged = vellum(&["bitmap", "--add", "--merge", "broken", &image, "third"]);
    assert!(merged.code == 1 && merged.err.contains("inconsistent"), "{merged:?}");
    let server = Server::start(&["-f", "qcow2", &image]);
    let mut client = Client::connect(&server.peer(), "").expect("the export");
    client.write(0, &[1; 4096], 0).expect("a write");
    client.disconnect();
    let said = server.stop().err;
    assert!(said.contains("broken") && said.contains("inconsistent"), "{said}");
    assert_eq!(bitmaps_to("qemu-img", &image), bitmaps_to("vellum", &image));
    assert!(in_use());
    // What keeps each of them from being the base of a backup, and what helps.
    vellum(&["bitmap", "--add", "--disable", &image, "off"]).answer();
    let why = [("broken", ["inconsistent", "--remove"]), ("off", ["disabled", "--enable"])];
    for (name, words) in why.into_iter().chain([("none", ["no bitmap named none", "--add"])]) {
        let ran = vellum(&["backup", "--bitmap", name, &image, &dir.text("backup")]);
        assert!(ran.code == 1 && words.iter().all(|word| ran.err.contains(word)), "{name}: {ran:?}");
    }
    vellum(&["bitmap", "--remove", &image, "off"]).answer();
    succeed("qemu-img", &["check", &image]);
    vellum(&["bitmap", "--remove", &image, "broken"]).answer();
    vellum(&["bitmap", "--remove", "--add", &image, "other"]).answer();
    succeed("qemu-img", &["check", &image]);
    assert_eq!(bitmaps_to("qemu-img", &image).len(), 1);
}

/// Bitmaps of another image, and of disks that get another size.
#[test]
fn bitmaps_are_merged_from_other_images_and_resized() {
    requires!("qemu-img", "qemu-io", "qemu-nbd", "nbdinfo");
    let dir = Dir::new("bitmaps");
    let (one, two) = (dir.text("one.qcow2"), dir.text("two.qcow2"));
    for image in [&one, &two] {
        succeed("qemu-img", &["create", "-q", "-f", "qcow2", image, "4M"]);
    }
    vellum(&["bitmap", "--add", "-g", "64k", &one, "a"]).answer();
    qemu_io(&["-f", "qcow2", &one], &["write 1M 64k".to_owned()]);
    vellum(&[
        "bitmap",
        "--add",
        "--disable",
        "-g",
        "32k",
        "--merge",
        "a",
        "-b",
        &one,
        "-F",
        "qcow2",
        &two,
        "b",
    ])
    .answer();
    assert_eq!(marked_by_qemu(&dir, &two, "b", 32 << 10), [32, 33].into());
    let flags = bitmaps_to("qemu-img", &two)[0]["flags"].clone();
    assert_eq!(flags, serde_json::json!([]));
    for (size, expected) in [("8M", 2), ("5G", 2), ("1056K", 1), ("6M", 1)] {
        vellum(&["resize", "-q", "--shrink", &two, size]).answer();
        succeed("qemu-img", &["check", &two]);
        assert_eq!(marked_by_qemu(&dir, &two, "b", 32 << 10).len(), expected, "{size}");
    }
    // The same as QEMU's copy.
    for (program, copy) in [("qemu-img", dir.text("theirs.qcow2")), ("vellum", dir.text("ours.qcow2"))] {
        let line = ["convert", "--bitmaps", "-f", "qcow2", "-O", "qcow2", &two, &copy];
        match program {
            "vellum" => drop(vellum(&line).answer()),
            _ => drop(succeed(program, &line)),
        }
        succeed("qemu-img", &["check", &copy]);
        assert_eq!(bitmaps_to("qemu-img", &copy), bitmaps_to("qemu-img", &two), "{program}");
        let same = marked_by_qemu(&dir, &two, "b", 32 << 10);
        assert_eq!(marked_by_qemu(&dir, &copy, "b", 32 << 10), same, "{program}");
    }
    for (arguments, word) in [
        (&["bitmap", "--merge", "a", "-b", &one, &two, "b"][..], "must be the same"),
        (&["bitmap", &one, "a"], "at least one of"),
        (&["bitmap", "--clear", "-g", "4k", &one, "a"], "--add"),
        (&["bitmap", "--clear", "-b", &two, &one, "a"], "--merge"),
    ] {
        let ran = vellum(arguments);
        assert!(ran.code == 1 && ran.err.contains(word), "{arguments:?}: {ran:?}");
    }
}

/// Names are one line, and nothing is left of bitmaps that a revert has removed: other programs would warn of it at each opening.
#[test]
fn names_are_one_line_and_a_revert_leaves_no_trace() {
    requires!("qemu-img");
    let dir = Dir::new("bitmaps");
    let image = dir.text("disk.qcow2");
    for options in ["journal=off", "journal=on"] {
        let _ = std::fs::remove_file(&image);
        vellum(&["create", "-q", "-f", "qcow2", "-o", options, &image, "4M"]).answer();
        let refused = vellum(&["bitmap", "--add", &image, "two\nlines"]);
        assert!(refused.code == 1 && refused.err.contains("line breaks"), "{refused:?}");
        vellum(&["snapshot", "create", &image, "one"]).answer();
        vellum(&["bitmap", "--add", &image, "daily"]).answer();
        vellum(&["snapshot", "revert", &image, "one"]).answer();
        assert!(bitmaps_to("qemu-img", &image).is_empty());
        let ran = super::support::program::run("qemu-img", &["check", &image]);
        assert!(ran.code == 0 && ran.err.is_empty(), "{options}: {ran:?}");
        vellum(&["bitmap", "--add", &image, "daily"]).answer();
        assert_eq!(bitmaps_to("qemu-img", &image).len(), 1);
    }
}

/// QEMU's header is full of names of features; what proves the backing image, and a new backing image, find room in it.
#[test]
fn a_header_with_a_bitmap_of_qemu_has_room_for_a_pin() {
    requires!("qemu-img");
    let dir = Dir::new("bitmap-pin");
    let (base, other, image) = (dir.text("base.raw"), dir.text("other.raw"), dir.text("image.qcow2"));
    for path in [&base, &other] {
        std::fs::write(path, vec![7; 1 << 20]).expect("a disk");
    }
    let new = || {
        vellum(&["create", "-q", "-f", "qcow2", "-o", "journal=on", "-b", &base, "-F", "raw", &image, "4M"])
            .answer();
        succeed("qemu-img", &["bitmap", "--add", &image, "b"]);
    };
    for wish in ["--copy-on-read", "--prefetch"] {
        new();
        Server::start(&["-f", "qcow2", wish, &image]).stop().answer();
        let info = vellum(&["info", "--output", "json", &image]).json();
        assert_eq!(info["format-specific"]["data"]["bitmaps"][0]["name"], "b", "{info}");
        succeed("qemu-img", &["check", "-q", &image]);
    }
    new();
    vellum(&["rebase", "-b", &other, "-F", "raw", &image]).answer();
    succeed("qemu-img", &["check", "-q", &image]);
    succeed("qemu-img", &["compare", "-q", &image, &other]);
    // As often as QEMU takes it.
    vellum(&["bitmap", "--clear", "--disable", "--clear", "--enable", "--disable", &image, "b"]).answer();
    let info = vellum(&["info", "--output", "json", &image]).json();
    assert_eq!(info["format-specific"]["data"]["bitmaps"][0]["flags"], Value::Array(vec![]), "{info}");
}
