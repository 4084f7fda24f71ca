//! Internal snapshots, made, reverted to, deleted and renamed by Vellum and by QEMU in turns, with writes and discards by
//! both in between. After every step QEMU's check has nothing to say, and QEMU and Vellum read the disk and each snapshot
//! as the model has them.

use std::path::Path;

use vellum_core::Random;

use super::support::client::Client;
use super::support::dir::Dir;
use super::support::program::{qemu_dump, qemu_io, run, succeed, vellum};
use super::support::server::Server;
use super::support::{patchy, scale};
use super::{report, requires};

const SIZE: usize = 1 << 20;
/// Steps with one image.
const STEPS: usize = 36;

/// How an image is made, of the raw disk `disk`.
struct Kind {
    name: &'static str,
    make: &'static [&'static str],
    has_backing: bool,
}

const KINDS: [Kind; 9] = [
    Kind { name: "qcow2", make: &["-o", "cluster_size=64k"], has_backing: false },
    Kind { name: "small clusters", make: &["-o", "cluster_size=512"], has_backing: false },
    Kind { name: "large clusters", make: &["-o", "cluster_size=256k"], has_backing: false },
    Kind {
        name: "8 bits, subclusters",
        make: &["-o", "cluster_size=16k,extended_l2=on,refcount_bits=8"],
        has_backing: false,
    },
    Kind {
        name: "64 bits, lazy",
        make: &["-o", "cluster_size=4k,refcount_bits=64,lazy_refcounts=on"],
        has_backing: false,
    },
    Kind { name: "version 2", make: &["-o", "cluster_size=4k,compat=0.10"], has_backing: false },
    Kind { name: "compressed", make: &["-c", "-o", "cluster_size=4k"], has_backing: false },
    Kind { name: "over a base", make: &["-o", "cluster_size=4k"], has_backing: true },
    Kind { name: "with a journal", make: &["-o", "cluster_size=4k"], has_backing: false },
];

struct Subject<'a> {
    kind: &'a Kind,
    dir: Dir,
    image: String,
    disk: Vec<u8>,
    /// In the order of the table.
    snapshots: Vec<(String, Vec<u8>)>,
}

impl Subject<'_> {
    fn new(kind: &Kind) -> Subject<'_> {
        let dir = Dir::new("snapshots");
        let (raw, image) = (dir.text("disk.raw"), dir.text("disk.qcow2"));
        let disk = patchy(SIZE, 5);
        std::fs::write(&raw, &disk).expect("the disk");
        if kind.has_backing {
            let options =
                [&["create", "-q", "-f", "qcow2"][..], kind.make, &["-b", &raw, "-F", "raw", &image]]
                    .concat();
            succeed("qemu-img", &options);
        } else {
            let options = [&["convert", "-f", "raw", "-O", "qcow2"][..], kind.make, &[&raw, &image]].concat();
            succeed("qemu-img", &options);
        }
        if kind.name == "with a journal" {
            vellum(&["journal", "enable", &image]).answer();
        }
        Subject { kind, dir, image, disk, snapshots: Vec::new() }
    }

    fn write_with_qemu(&mut self, random: &mut Random) {
        let mut commands = Vec::new();
        for _ in 0..1 + random.index(4) {
            let at = random.index(SIZE / 512) * 512;
            let len = (512 * (1 + random.index(120))).min(SIZE - at);
            let stamp = u8::try_from(1 + random.index(250)).expect("a byte");
            match random.index(4) {
                0 => {
                    commands.push(format!("write -z {at} {len}"));
                    self.disk[at..at + len].fill(0);
                }
                _ => {
                    commands.push(format!("write -P {stamp} {at} {len}"));
                    self.disk[at..at + len].fill(stamp);
                }
            }
        }
        qemu_io(&["-f", "qcow2", &self.image], &commands);
    }

    fn write_with_vellum(&mut self, random: &mut Random) {
        let server = Server::start(&["-f", "qcow2", &self.image]);
        let mut client = Client::connect(&server.peer(), "").expect("the export");
        for _ in 0..1 + random.index(6) {
            let at = random.index(SIZE / 512) * 512;
            let len = (512 * (1 + random.index(120))).min(SIZE - at);
            match random.index(4) {
                0 => {
                    client.zero(at as u64, u32::try_from(len).expect("short"), 0).expect("zeros");
                    self.disk[at..at + len].fill(0);
                }
                // What is discarded reads as zero or as before, and below a backing image as zero.
                1 => {
                    client.trim(at as u64, u32::try_from(len).expect("short")).expect("a discard");
                    let now = client.read(at as u64, u32::try_from(len).expect("short")).expect("a read");
                    self.disk[at..at + len].copy_from_slice(&now);
                }
                _ => {
                    random.fill(&mut self.disk[at..at + len]);
                    client.write(at as u64, &self.disk[at..at + len], 0).expect("a write");
                }
            }
        }
        client.flush().expect("a flush");
        client.disconnect();
        assert_eq!(server.stop().code, 0);
    }

    fn one(&self, random: &mut Random) -> usize {
        random.index(self.snapshots.len())
    }

    /// Does something, and says what.
    fn step(&mut self, number: usize, random: &mut Random) -> String {
        let image = self.image.clone();
        let choice = if self.snapshots.is_empty() { random.index(4) } else { random.index(11) };
        match choice {
            0 => {
                self.write_with_qemu(random);
                "QEMU writes".to_owned()
            }
            1 | 9 | 10 => {
                self.write_with_vellum(random);
                "Vellum writes".to_owned()
            }
            2 | 3 if self.snapshots.len() < 7 => {
                let name = format!("s{number}");
                match choice {
                    2 => succeed("qemu-img", &["snapshot", "-c", &name, &image]),
                    _ if random.one_in(2) => vellum(&["snapshot", "create", &image, &name]).answer(),
                    _ => vellum(&["snapshot", "-q", "-c", &name, &image]).answer(),
                };
                self.snapshots.push((name.clone(), self.disk.clone()));
                format!("{choice} creates {name}")
            }
            2..=5 => {
                let (name, content) = self.snapshots[self.one(random)].clone();
                match choice {
                    4 => succeed("qemu-img", &["snapshot", "-a", &name, &image]),
                    _ if random.one_in(2) => vellum(&["snapshot", "revert", &image, &name]).answer(),
                    _ => vellum(&["snapshot", "-a", &name, &image]).answer(),
                };
                self.disk = content;
                format!("{choice} reverts to {name}")
            }
            6 | 7 => {
                let index = self.one(random);
                let (name, _) = self.snapshots.remove(index);
                match choice {
                    6 => succeed("qemu-img", &["snapshot", "-d", &name, &image]),
                    _ if random.one_in(2) => vellum(&["snapshot", "delete", &image, &name]).answer(),
                    _ => vellum(&["snapshot", "-d", &name, &image]).answer(),
                };
                format!("{choice} deletes {name}")
            }
            _ => {
                let (index, new) = (self.one(random), format!("r{number}"));
                let name = std::mem::replace(&mut self.snapshots[index].0, new.clone());
                vellum(&["snapshot", "rename", &image, &name, &new]).answer();
                format!("{name} becomes {new}")
            }
        }
    }

    #[track_caller]
    fn judge(&self, is_thorough: bool, when: &str) {
        let when = format!("{}, {when}", self.kind.name);
        let checked = run("qemu-img", &["check", "-f", "qcow2", &self.image]);
        assert!(checked.code == 0, "{when}: {checked:?}");
        let path = Path::new(&self.image);
        assert!(qemu_dump(path, "qcow2", None) == self.disk, "{when}: the disk, to QEMU");
        let listed = vellum(&["snapshot", "list", "--output", "json", &self.image]).json();
        let names: Vec<&str> = self.snapshots.iter().map(|(name, _)| name.as_str()).collect();
        let listed: Vec<&str> = listed
            .as_array()
            .expect("a list")
            .iter()
            .map(|one| one["name"].as_str().expect("a name"))
            .collect();
        assert_eq!(listed, names, "{when}");
        if !is_thorough {
            return;
        }
        for (name, content) in &self.snapshots {
            assert!(qemu_dump(path, "qcow2", Some(name)) == *content, "{when}: {name}, to QEMU");
            let raw = self.dir.text("ours.raw");
            vellum(&["convert", "-q", "-l", name, "-O", "raw", &self.image, &raw]).answer();
            assert!(std::fs::read(&raw).expect("a copy") == *content, "{when}: {name}, to Vellum");
        }
        assert_eq!(vellum(&["check", &self.image]).code, 0, "{when}: our check");
        let theirs = run("qemu-img", &["info", "--output=json", &self.image]).json();
        let ours = vellum(&["info", "--output", "json", &self.image]).json();
        assert_eq!(ours["snapshots"], theirs["snapshots"], "{when}");
    }
}

#[test]
fn both_programs_change_the_snapshots_in_turns() {
    requires!("qemu-img", "qemu-io");
    let (mut steps, mut seen) = (0, 0);
    for kind in &KINDS {
        for seed in 0..scale() as u64 {
            let mut random = Random::from_seed(seed + 11);
            let mut subject = Subject::new(kind);
            for number in 0..STEPS {
                let done = subject.step(number, &mut random);
                let is_last = number + 1 == STEPS;
                subject.judge(is_last || number % 4 == 3, &format!("seed {seed}, step {number}: {done}"));
                steps += 1;
                seen += subject.snapshots.len();
            }
        }
    }
    report(&format!("{steps} steps with {} kinds of image, {seen} snapshots, 0 differences", KINDS.len()));
}

/// An image that is amended is what QEMU makes of it, too.
#[test]
fn an_image_is_amended_in_place() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("amended");
    let (image, raw) = (dir.text("disk.qcow2"), dir.text("disk.raw"));
    let disk = patchy(SIZE, 6);
    std::fs::write(&raw, &disk).expect("the disk");
    let convert = ["convert", "-f", "raw", "-O", "qcow2", "-o", "compat=0.10,cluster_size=4k", &raw, &image];
    succeed("qemu-img", &convert);
    vellum(&["snapshot", "create", &image, "one"]).answer();
    let facts = |what: &str| {
        run("qemu-img", &["info", "--output=json", &image]).json()["format-specific"]["data"][what].clone()
    };
    for (options, what, value) in [
        ("compat=1.1,lazy_refcounts=on", "compat", serde_json::json!("1.1")),
        ("lazy_refcounts=on", "lazy-refcounts", serde_json::json!(true)),
        ("refcount_bits=64", "refcount-bits", serde_json::json!(64)),
        ("refcount_bits=2", "refcount-bits", serde_json::json!(2)),
        ("compat=0.10,refcount_bits=16", "compat", serde_json::json!("0.10")),
        ("compat=v3,lazy_refcounts=off", "lazy-refcounts", serde_json::json!(false)),
    ] {
        vellum(&["amend", "-o", options, &image]).answer();
        assert_eq!(facts(what), value, "{options}");
        succeed("qemu-img", &["check", &image]);
        assert!(qemu_dump(Path::new(&image), "qcow2", None) == disk, "{options}");
        assert!(qemu_dump(Path::new(&image), "qcow2", Some("one")) == disk, "{options}: the snapshot");
    }
    for (options, word) in [
        ("compat=0.10,lazy_refcounts=on", "compat=1.1"),
        ("refcount_bits=1", "count to 1"),
        ("size=1k", "--shrink"),
        ("lazy_refcounts=on,encrypt.state=inactive,encrypt.old-secret=nope", "no secret named"),
        ("backing_file=x", "vellum rebase"),
        ("encrypt.state=active", "encrypt.new-secret=ID"),
        ("cluster_size=64k", "vellum convert"),
    ] {
        let ran = vellum(&["amend", "-o", options, &image]);
        assert!(ran.code == 1 && ran.err.contains(word), "{options}: {ran:?}");
    }
    assert_eq!(facts("lazy-refcounts"), serde_json::json!(false), "what was refused changed nothing");
    let larger = (SIZE as u64 + 1000).next_multiple_of(512);
    vellum(&["amend", "-o", &format!("size={}", SIZE + 1000), &image]).answer();
    let size = run("qemu-img", &["info", "--output=json", &image]).json()["virtual-size"].as_u64();
    assert_eq!(size, Some(larger));
    let ran = vellum(&["amend", "-o", "lazy_refcounts=on,encrypt.state=inactive,encrypt.keyslot=1", &image]);
    assert!(ran.code == 1 && ran.err.contains("the options of the image did change; then"), "{ran:?}");
    succeed("qemu-img", &["check", &image]);
}

/// What version 2 has no place for is refused by both programs; what it has a place for becomes what QEMU makes of it.
#[test]
fn an_image_becomes_one_of_version_2_where_it_can() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("downgraded");
    let (image, copy) = (dir.text("disk.qcow2"), dir.text("copy.qcow2"));
    std::fs::write(dir.text("base.raw"), patchy(1 << 20, 3)).expect("a base");
    let base = dir.text("base.raw");
    // How it is made, what is done to it, and the word in our refusal and in QEMU's, if it is refused.
    let write = "write -P 5 64k 200k";
    for (options, steps, refused, refused_by_qemu) in [
        ("", &[write][..], None, false),
        ("", &[write, "write -z 100k 300k", "write -z 1M 1M"], None, false),
        ("preallocation=metadata", &[write], None, false),
        ("lazy_refcounts=on", &[write], None, false),
        ("base", &[write], None, false),
        ("", &["snapshot"], None, false),
        ("base", &["write -z 64k 64k"], Some("over its backing image"), false),
        ("", &["write -z 64k 64k", "snapshot"], Some("snapshots have clusters that say zero"), false),
        ("refcount_bits=1", &[write], Some("refcount_bits=16"), true),
        ("extended_l2=on", &[write], Some("extended_l2"), true),
        ("compression_type=zstd", &[write], Some("a compression type"), false),
        ("data_file=DATA", &[write], Some("data file"), true),
        ("", &["snapshot", "larger"], Some("prevents it"), true),
        ("", &["bitmap"], Some("bitmaps"), false),
    ] {
        let context = format!("{options} {steps:?}");
        let _ = std::fs::remove_file(&image);
        let data = options.replace("DATA", &dir.text("data"));
        let mut words = vec!["create", "-q", "-f", "qcow2"];
        match options {
            "" => {}
            "base" => words.extend(["-b", &base, "-F", "raw"]),
            _ => words.extend(["-o", &data]),
        }
        words.extend([image.as_str(), "4M"]);
        succeed("qemu-img", &words);
        for step in steps {
            match *step {
                "snapshot" => drop(succeed("qemu-img", &["snapshot", "-c", "one", &image])),
                "larger" => drop(succeed("qemu-img", &["resize", "-q", &image, "5M"])),
                "bitmap" => drop(succeed("qemu-img", &["bitmap", "--add", &image, "changes"])),
                command => drop(qemu_io(&["-f", "qcow2", &image], &[command.to_owned()])),
            }
        }
        let before = qemu_dump(Path::new(&image), "qcow2", None);
        std::fs::copy(&image, &copy).expect("a copy");
        let theirs = run("qemu-img", &["amend", "-f", "qcow2", "-o", "compat=0.10", &copy]);
        assert_eq!(theirs.code != 0, refused_by_qemu, "{context}: {theirs:?}");
        let bytes = std::fs::read(&image).expect("the image");
        let ours = vellum(&["amend", "-o", "compat=0.10", &image]);
        let facts = run("qemu-img", &["info", "--output=json", &image]).json();
        let version = &facts["format-specific"]["data"]["compat"];
        match refused {
            Some(word) => {
                assert!(ours.code == 1 && ours.err.contains(word), "{context}: {ours:?}");
                assert!(std::fs::read(&image).expect("the image") == bytes, "{context}: it was changed");
                assert_eq!(version, "1.1", "{context}");
            }
            None => {
                assert_eq!(ours.code, 0, "{context}: {ours:?}");
                assert_eq!(version, "0.10", "{context}");
                assert_eq!(run("qemu-img", &["check", &image]).code, 0, "{context}");
                let compared = run("qemu-img", &["compare", "-f", "qcow2", "-F", "qcow2", &image, &copy]);
                assert_eq!(compared.code, 0, "{context}: {compared:?}");
                assert!(vellum(&["check", &image]).code == 0, "{context}");
            }
        }
        assert!(qemu_dump(Path::new(&image), "qcow2", None) == before, "{context}");
    }
    // An image of ours has a journal, which goes.
    vellum(&["create", "-q", "-f", "qcow2", "-o", "extended_l2=off", &image, "4M"]).answer();
    vellum(&["amend", "-o", "compat=0.10", &image]).answer();
    let facts = run("qemu-img", &["info", "--output=json", &image]).json();
    assert_eq!(facts["format-specific"]["data"]["compat"], "0.10");
    succeed("qemu-img", &["check", &image]);
}

/// Bitmaps that QEMU made stay valid while the disk reads the same, and are gone when it does not.
#[test]
fn bitmaps_are_kept_until_the_disk_is_another_one() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("bitmaps");
    let image = dir.text("disk.qcow2");
    succeed("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", &image, "8M"]);
    let io = |command: &str| qemu_io(&["-f", "qcow2", &image], &[command.to_owned()]);
    io("write -P 1 0 1M");
    succeed("qemu-img", &["bitmap", "--add", "-g", "512", &image, "changes"]);
    io("write -P 2 1M 1M");
    let bitmaps = || {
        let info = run("qemu-img", &["info", "--output=json", &image]).json();
        info["format-specific"]["data"]["bitmaps"].as_array().map_or(0, Vec::len)
    };
    for step in [["create", "one"], ["create", "two"], ["delete", "one"]] {
        vellum(&["snapshot", step[0], &image, step[1]]).answer();
        assert_eq!(bitmaps(), 1, "{step:?}");
        succeed("qemu-img", &["check", &image]);
    }
    io("write -P 3 2M 1M");
    vellum(&["snapshot", "revert", &image, "two"]).answer();
    assert_eq!(bitmaps(), 0);
    succeed("qemu-img", &["check", &image]);
    assert_eq!(vellum(&["check", &image]).code, 0);
    io("read -P 0 2M 1M");
    io("write -P 4 0 8M");
    succeed("qemu-img", &["check", &image]);
}

/// The machine's state lies behind the disk. QEMU writes it, and finds it after all that Vellum does.
#[test]
fn the_state_of_a_machine_is_kept() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("machine-state");
    let image = dir.text("disk.qcow2");
    let io = |commands: &[&str]| {
        qemu_io(
            &["-f", "qcow2", &image],
            &commands.iter().map(|command| (*command).to_owned()).collect::<Vec<_>>(),
        )
    };
    for options in ["cluster_size=64k", "cluster_size=4k,extended_l2=off,refcount_bits=8"] {
        succeed("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, &image, "3M"]);
        io(&["write -P 1 0 1M", "write -b -P 77 0 300k"]);
        succeed("qemu-img", &["snapshot", "-c", "machine", &image]);
        vellum(&["snapshot", "create", &image, "ours"]).answer();
        io(&["write -P 2 0 2M", "write -b -P 78 0 300k"]);
        vellum(&["snapshot", "create", &image, "more"]).answer();
        vellum(&["snapshot", "delete", &image, "ours"]).answer();
        vellum(&["snapshot", "revert", &image, "machine"]).answer();
        io(&["read -P 1 0 1M", "read -P 0 1M 2M"]);
        vellum(&["snapshot", "rename", &image, "machine", "kept"]).answer();
        vellum(&["snapshot", "delete", &image, "more"]).answer();
        succeed("qemu-img", &["check", &image]);
        succeed("qemu-img", &["snapshot", "-a", "kept", &image]);
        io(&["read -b -P 77 0 300k", "read -P 1 0 1M"]);
        succeed("qemu-img", &["check", &image]);
    }
}

/// A snapshot keeps the size of its disk.
#[test]
fn a_snapshot_of_another_size_is_reverted_to() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("sizes");
    let image = dir.text("disk.qcow2");
    succeed("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", &image, "1M"]);
    qemu_io(&["-f", "qcow2", &image], &["write -P 1 0 1M".to_owned()]);
    vellum(&["snapshot", "create", &image, "small"]).answer();
    // One L2 table maps 2 MiB, and a cluster of L1 entries 1 GiB.
    succeed("qemu-img", &["resize", "-q", &image, "3G"]);
    qemu_io(&["-f", "qcow2", &image], &["write -P 2 2G 1M".to_owned()]);
    vellum(&["snapshot", "create", &image, "large"]).answer();
    for (name, size, reads) in [
        ("small", 1_u64 << 20, "read -P 1 0 1M"),
        ("large", 3 << 30, "read -P 2 2G 1M"),
        ("small", 1 << 20, "read -P 1 0 1M"),
    ] {
        vellum(&["snapshot", "revert", &image, name]).answer();
        let info = run("qemu-img", &["info", "--output=json", &image]).json();
        assert_eq!(info["virtual-size"], size, "{name}");
        qemu_io(&["-f", "qcow2", &image], &[reads.to_owned()]);
        succeed("qemu-img", &["check", &image]);
    }
    vellum(&["snapshot", "delete", &image, "large"]).answer();
    succeed("qemu-img", &["check", &image]);
}

/// What is deleted or reverted to is never another snapshot than the one that was meant.
#[test]
fn a_name_that_is_the_id_of_another_is_refused() {
    requires!("qemu-img");
    let dir = Dir::new("ids");
    let image = dir.text("disk.qcow2");
    succeed("qemu-img", &["create", "-q", "-f", "qcow2", &image, "1M"]);
    for name in ["first", "1"] {
        succeed("qemu-img", &["snapshot", "-c", name, &image]);
    }
    for verb in ["delete", "revert"] {
        let ran = vellum(&["snapshot", verb, &image, "1"]);
        assert!(ran.code == 1 && ran.err.contains("first") && ran.err.contains("id is 2"), "{ran:?}");
    }
    let names = || {
        let info = run("qemu-img", &["info", "--output=json", &image]).json();
        let all = info["snapshots"].as_array().cloned().unwrap_or_default();
        all.iter().map(|one| one["name"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(), ["first", "1"]);
    vellum(&["snapshot", "delete", &image, "first"]).answer();
    assert_eq!(names(), ["1"]);
    vellum(&["snapshot", "delete", &image, "1"]).answer();
    assert!(names().is_empty());
}

/// The image is closed, changed and opened again while clients are connected.
#[test]
fn the_snapshots_of_a_served_disk_change_while_clients_are_connected() {
    requires!("qemu-img");
    let dir = Dir::new("served-snapshots");
    let (image, place) = (dir.text("disk.qcow2"), Dir::short());
    let socket = place.text("control");
    vellum(&["create", "-q", "-f", "qcow2", &image, "4M"]).answer();
    let server = Server::start(&["--control", &socket, &image]);
    let ask =
        |verb: &str, rest: &[&str]| vellum(&[&["snapshot", verb, "--control", &socket][..], rest].concat());
    let mut client = Client::connect(&server.peer(), "").expect("the export");
    for (stamp, name) in [(1_u8, "one"), (2, "two"), (3, "three")] {
        client.write(0, &vec![stamp; 1 << 20], 0).expect("a write");
        ask("create", &[name]).answer();
        assert_eq!(client.read(4096, 512).expect("a read"), [stamp; 512]);
    }
    client.write(0, &vec![4; 1 << 20], 0).expect("a write");
    ask("rename", &["two", "second"]).answer();
    ask("delete", &["one"]).answer();
    let listed = ask("list", &["--output", "json"]).json();
    assert_eq!((&listed[0]["name"], &listed[1]["name"]), (&"second".into(), &"three".into()), "{listed}");
    assert_eq!((&listed[0]["vm-state-size"], &listed[0]["id"]), (&0.into(), &"2".into()), "{listed}");
    let refused = ask("revert", &["second"]);
    assert!(refused.code == 1 && refused.err.contains("disconnect"), "{refused:?}");
    client.disconnect();
    ask("revert", &["second"]).answer();
    let mut client = Client::connect(&server.peer(), "").expect("the export");
    assert_eq!(client.read(4096, 512).expect("a read"), [2; 512]);
    client.write(1 << 20, &[5; 512], 0).expect("a write");
    client.disconnect();
    assert_eq!(server.stop().code, 0);
    succeed("qemu-img", &["check", &image]);
    // As qemu-img takes it.
    let (raw, three) = (dir.text("three.raw"), "snapshot.id=3,snapshot.name=three");
    vellum(&["convert", "-q", "-l", three, "-O", "raw", &image, &raw]).answer();
    let other =
        vellum(&["convert", "-q", "-l", "snapshot.id=2,snapshot.name=three", "-O", "raw", &image, &raw]);
    assert!(other.code == 1 && other.err.contains("there is no snapshot"), "{other:?}");
    let third = qemu_dump(Path::new(&image), "qcow2", Some("three"));
    assert!(std::fs::read(&raw).expect("a copy") == third);
    assert!(third[..1 << 20].iter().all(|byte| *byte == 3) && third[1 << 20..].iter().all(|byte| *byte == 0));
}
