//! `vellum:diff:SNAPSHOT`: what of a served disk differs from a snapshot inside its image, as NBD clients are told.

use serde_json::Value;
use vellum_core::Random;

use super::Controlled;
use super::support::client::Client;
use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{path_text, run, skipped, until_let_go, vellum};
use crate::requires;

const SIZE: usize = 12 << 20;
const BLOCK: usize = 4096;

/// Kinds of images with snapshots, the options that a server needs, and the largest unit in which they change.
const KINDS: [(&str, &str, bool, usize); 8] = [
    ("qcow2", "journal=on", false, 64 << 10),
    ("qcow2", "journal=off", false, 64 << 10),
    ("qcow2", "compat=0.10,cluster_size=4k", false, 4 << 10),
    ("qcow2", "journal=on,extended_l2=on", true, 64 << 10),
    ("qcow2", "journal=on,encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10", false, 64 << 10),
    ("vellum", "layout=table,unit_size=256k", false, 256 << 10),
    ("vellum", "layout=zoned", true, 64 << 10),
    (
        "vellum",
        "layout=zoned,encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10",
        false,
        64 << 10,
    ),
];

/// A disk, its server, and what it reads as.
struct Subject {
    /// Kept as long as the images.
    _dir: Dir,
    format: &'static str,
    image: String,
    secret: Vec<String>,
    model: Vec<u8>,
    /// Whether a block was written since the last snapshot.
    written: Vec<bool>,
}

impl Subject {
    fn new((format, options, has_base, _): (&'static str, &str, bool, usize)) -> Self {
        let dir = Dir::short();
        let image = dir.text("disk");
        std::fs::write(dir.join("key"), "secret").expect("a file");
        let secret = match options.contains("encrypt") {
            true => vec!["--secret".to_owned(), format!("id=key,file={}", dir.text("key"))],
            false => Vec::new(),
        };
        let mut model = vec![0; SIZE];
        let mut words: Vec<String> = ["create", "-q", "-f", format, "-o", options].map(str::to_owned).into();
        words.extend(secret.clone());
        if has_base {
            model[..SIZE / 2].copy_from_slice(&noise(SIZE / 2, 1));
            std::fs::write(dir.join("base.raw"), &model).expect("a base");
            words.extend(["-b".to_owned(), dir.text("base.raw"), "-F".to_owned(), "raw".to_owned()]);
        }
        words.extend([image.clone(), SIZE.to_string()]);
        vellum(&words.iter().map(String::as_str).collect::<Vec<_>>()).answer();
        Self { _dir: dir, format, image, secret, model, written: vec![false; SIZE / BLOCK] }
    }

    fn serve(&self, more: &[&str]) -> Controlled {
        let secret = self.secret.iter().map(String::as_str);
        let words: Vec<&str> = ["-f", self.format]
            .into_iter()
            .chain(secret)
            .chain(more.iter().copied())
            .chain([&*self.image])
            .collect();
        Controlled::start(&words)
    }

    fn scribble(&mut self, guest: &mut Client, random: &mut Random, writes: usize) {
        for number in 0..writes {
            let len = 1 + random.index(30_000);
            let at = random.index(SIZE - len);
            match number % 4 {
                0 => {
                    guest.zero(at as u64, u32::try_from(len).expect("short"), 0).expect("zeros");
                    self.model[at..at + len].fill(0);
                }
                _ => {
                    let bytes = noise(len, random.below(u64::MAX));
                    guest.write(at as u64, &bytes, 0).expect("a write");
                    self.model[at..at + len].copy_from_slice(&bytes);
                }
            }
            self.written[at / BLOCK..=(at + len - 1) / BLOCK].fill(true);
        }
    }
}

/// What is marked: for each block, whether some of it is.
fn marked(map: &Value) -> Vec<bool> {
    let mut marked = vec![false; SIZE / BLOCK];
    let mut end = 0;
    for run in map.as_array().expect("runs") {
        let number = |name: &str| usize::try_from(run[name].as_u64().expect(name)).expect("within the disk");
        let (at, len) = (number("offset"), number("length"));
        assert_eq!(at, end, "runs follow each other");
        end = at + len;
        if number("type") == 1 {
            marked[at / BLOCK..(at + len).div_ceil(BLOCK)].fill(true);
        }
    }
    assert_eq!(end, SIZE, "all of the disk");
    marked
}

fn asked(served: &Controlled, snapshot: &str) -> Vec<bool> {
    let map = format!("--map=vellum:diff:{snapshot}");
    marked(&run("nbdinfo", &["--json", &map, &served.server.uri("")]).json())
}

fn contexts(served: &Controlled) -> Vec<String> {
    let listed = run("nbdinfo", &["--json", &served.server.uri("")]).json();
    let all = listed["exports"][0]["contexts"].as_array().expect("contexts").clone();
    all.iter().filter_map(|one| one.as_str()?.strip_prefix("vellum:diff:").map(str::to_owned)).collect()
}

/// Each block that reads differently is marked, and nothing that was not written within its unit.
#[track_caller]
fn is_right(is: &[bool], subject: &Subject, before: &[u8], unit: usize, about: &str) {
    let blocks = before.chunks(BLOCK).zip(subject.model.chunks(BLOCK));
    for (block, (old, new)) in blocks.enumerate() {
        assert!(is[block] || old == new, "{about}: block {block} differs and is not marked");
        let first = block * BLOCK / unit * (unit / BLOCK).max(1);
        let its = first.min(block)..(first + (unit / BLOCK).max(1)).min(is.len());
        assert!(!is[block] || subject.written[its].contains(&true), "{about}: block {block} was not written");
    }
}

#[test]
fn clients_are_told_what_differs_from_a_snapshot() {
    requires!("nbdinfo", "qemu-img");
    for kind in KINDS {
        let (format, options, _, unit) = kind;
        let about = format!("{format} {options}");
        let mut subject = Subject::new(kind);
        let mut random = Random::from_seed(7);
        let served = subject.serve(&[]);
        let mut guest = served.client("");
        subject.scribble(&mut guest, &mut random, 20);
        assert_eq!(contexts(&served), [""; 0], "{about}");
        vellum(&["snapshot", "create", "--control", &served.socket, "monday"]).answer();
        let monday = subject.model.clone();
        subject.written.fill(false);
        assert_eq!(contexts(&served), ["monday"], "{about}");
        assert!(!asked(&served, "monday").contains(&true), "{about}: nothing was written");
        subject.scribble(&mut guest, &mut random, 8);
        is_right(&asked(&served, "monday"), &subject, &monday, unit, &about);
        // QEMU has no long headers here.
        let theirs = format!(
            "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=vellum:diff:monday",
            path_text(&served.server.socket())
        );
        let map = run("qemu-img", &["map", "--output=json", "--image-opts", &theirs]).json();
        let no_data = map.as_array().expect("runs").iter().filter(|run| run["data"] == false).count();
        assert!(no_data > 0, "{about}: QEMU shows what is marked as no data: {map}");
        // A second snapshot: what differs from the first is more than what differs from the second.
        vellum(&["snapshot", "create", "--control", &served.socket, "tuesday"]).answer();
        let (tuesday, since_monday) = (subject.model.clone(), subject.written.clone());
        subject.written.fill(false);
        subject.scribble(&mut guest, &mut random, 6);
        is_right(&asked(&served, "tuesday"), &subject, &tuesday, unit, &about);
        let all = subject.written.iter().zip(&since_monday).map(|(one, other)| *one || *other).collect();
        let since_tuesday = std::mem::replace(&mut subject.written, all);
        is_right(&asked(&served, "monday"), &subject, &monday, unit, &about);
        // Killed, and recovered: what was flushed is marked.
        guest.flush().expect("a flush");
        served.server.kill();
        until_let_go(&subject.image);
        let served = subject.serve(&[]);
        is_right(&asked(&served, "monday"), &subject, &monday, unit, &about);
        let mut guest = served.client("");
        subject.written = since_tuesday;
        subject.scribble(&mut guest, &mut random, 4);
        is_right(&asked(&served, "tuesday"), &subject, &tuesday, unit, &about);
        vellum(&["snapshot", "rename", "--control", &served.socket, "monday", "first"]).answer();
        vellum(&["snapshot", "delete", "--control", &served.socket, "tuesday"]).answer();
        assert_eq!(contexts(&served), ["first"], "{about}");
        guest.disconnect();
        served.server.stop();
        let served = subject.serve(&["--read-only"]);
        if format == "qcow2" {
            assert_eq!(contexts(&served), ["first"], "{about}: read-only");
            subject.written.fill(true);
            is_right(&asked(&served, "first"), &subject, &monday, unit, &about);
        } else {
            assert_eq!(
                contexts(&served),
                [""; 0],
                "{about}: snapshots are read beside a disk that is written"
            );
        }
        served.server.stop();
    }
}

/// A block that is packed is told when it was written since, or its unit was copied because another block of it was; what is still
/// read from the base is not told then.
#[test]
fn what_is_packed_is_told_only_where_its_unit_was_written() {
    requires!("nbdinfo");
    const UNIT: usize = 64 << 10;
    let mut subject = Subject::new(("vellum", "layout=zoned", true, UNIT));
    let served = subject.serve(&["--export-snapshots"]);
    let mut guest = served.client("");
    let mut put = |unit: usize, block: usize, byte: u8| {
        let at = unit * UNIT + block * BLOCK;
        guest.write(at as u64, &[byte; BLOCK], 0).expect("a write");
        guest.flush().expect("a flush");
        at..at + BLOCK
    };
    // The first one opens a zone, behind the base.
    subject.model[put(100, 0, 1)].fill(1);
    for unit in 2..12 {
        subject.model[put(unit, unit % 16, 2)].fill(2);
    }
    vellum(&["snapshot", "create", "--control", &served.socket, "monday"]).answer();
    let told = || {
        let marked = asked(&served, "monday").into_iter().enumerate();
        marked.filter(|(_, is_marked)| *is_marked).map(|(block, _)| block).collect::<Vec<_>>()
    };
    assert_eq!(told(), [0; 0], "nothing was written");
    for unit in 20..24 {
        put(unit, unit % 16, 3);
    }
    put(5, 9, 3); // its block 5 is packed
    assert_eq!(told(), [5 * 16 + 5, 5 * 16 + 9, 20 * 16 + 4, 21 * 16 + 5, 22 * 16 + 6, 23 * 16 + 7]);
    vellum(&["snapshot", "create", "--control", &served.socket, "tuesday"]).answer();
    put(7, 7, 4); // its packed block
    let differs = |export: &str, snapshot: &str| {
        let map = format!("--map=vellum:diff:{snapshot}");
        let marked = marked(&run("nbdinfo", &["--json", &map, &served.server.uri(export)]).json());
        marked.iter().filter(|is_marked| **is_marked).count()
    };
    assert_eq!((differs("", "tuesday"), differs("@tuesday", "monday"), differs("", "monday")), (1, 6, 7));
    let mut reader = served.client("@monday");
    assert!(reader.read_all().expect("it is read") == subject.model, "the snapshot reads as it did");
    reader.disconnect();
    guest.disconnect();
    served.server.stop();
    let map = vellum(&["map", "-f", "vellum", "--output", "json", &subject.image]).json();
    let packed = map.as_array().expect("rows").iter().filter(|row| row["compressed"] == true).count();
    assert!(packed > 10, "too few were packed for this to be a test: {packed}");
}

/// A client that was told of a snapshot which is gone gets an error, and goes on; of a disk that has grown, what is added is marked where it
/// was written.
#[test]
fn snapshots_come_and_go_while_clients_are_connected() {
    // Not the one of a virtual environment.
    const PYTHON: &str = "/usr/bin/python3";
    if !std::path::Path::new(PYTHON).exists() || run(PYTHON, &["-c", "import nbd"]).code != 0 {
        return skipped("there are no bindings of libnbd for Python");
    }
    // The zoned layout knows which blocks of a unit a write has changed.
    for (format, options, differs) in [("qcow2", "journal=on", 65_536), ("vellum", "layout=zoned", 4096)] {
        let subject = Subject::new((format, options, false, 64 << 10));
        let served = subject.serve(&[]);
        vellum(&["snapshot", "create", "--control", &served.socket, "one"]).answer();
        let script = format!(
            "import nbd, subprocess\n\
             h = nbd.NBD()\n\
             def ask(where, count):\n\
             \x20   runs = []\n\
             \x20   def one(context, at, entries, error):\n\
             \x20       runs.append((context, list(zip(entries[::2], entries[1::2]))))\n\
             \x20   h.block_status(count, where, one)\n\
             \x20   return runs\n\
             h.add_meta_context('vellum:diff:one')\n\
             h.add_meta_context('base:allocation')\n\
             h.connect_uri('{uri}')\n\
             assert h.can_meta_context('vellum:diff:one')\n\
             h.pwrite(b'x' * 4096, 1 << 20)\n\
             runs = dict(ask(0, 2 << 20))\n\
             assert sum(len for len, flags in runs['vellum:diff:one'] if flags == 1) == {differs}, runs\n\
             assert 'base:allocation' in runs\n\
             def vellum(*words):\n\
             \x20   subprocess.run(['{program}', *words], check=True)\n\
             vellum('resize', '-q', '--control', '{socket}', '{larger}')\n\
             vellum('snapshot', 'delete', '--control', '{socket}', 'one')\n\
             try:\n\
             \x20   ask(0, 2 << 20)\n\
             \x20   assert False\n\
             except nbd.Error:\n\
             \x20   pass\n\
             vellum('snapshot', 'create', '--control', '{socket}', 'one')\n\
             try:\n\
             \x20   ask(0, 2 << 20)\n\
             \x20   assert False, 'another snapshot of that name'\n\
             except nbd.Error:\n\
             \x20   pass\n\
             assert h.pread(4096, 1 << 20) == b'x' * 4096\n",
            uri = served.server.uri(""),
            program = env!("CARGO_BIN_EXE_vellum"),
            socket = served.socket,
            larger = SIZE + (1 << 20),
        );
        let ran = run(PYTHON, &["-c", &script]);
        assert_eq!(ran.code, 0, "{format}: {ran:?}");
        served.server.stop();
    }
}

/// A snapshot is compared with the others, whatever becomes of the disk.
#[test]
fn snapshots_are_compared_with_each_other() {
    requires!("nbdinfo");
    let subject = Subject::new(("vellum", "layout=zoned", false, 64 << 10));
    let served = subject.serve(&["--export-snapshots"]);
    let take = |name: &str| {
        vellum(&["snapshot", "create", "--control", &served.socket, name]).answer();
    };
    let mut guest = served.client("");
    guest.write(0, &[1; 4096], 0).expect("a write");
    take("monday");
    guest.write(2 << 20, &[2; 4096], 0).expect("a write");
    take("tuesday");
    guest.trim(2 << 20, 1 << 20).expect("a discard");
    guest.write(4 << 20, &[3; 4096], 0).expect("a write");
    let differs = |export: &str, snapshot: &str| {
        let map =
            run("nbdinfo", &["--json", &format!("--map=vellum:diff:{snapshot}"), &served.server.uri(export)]);
        let blocks = marked(&map.json());
        let units = blocks.chunks((1 << 20) / BLOCK).enumerate().filter(|(_, unit)| unit.contains(&true));
        units.map(|(at, _)| at).collect::<Vec<_>>()
    };
    assert_eq!(differs("", "monday"), [4], "what was discarded is as it was");
    assert_eq!(differs("", "tuesday"), [2, 4]);
    assert_eq!(differs("@tuesday", "monday"), [2]);
    assert_eq!(differs("@monday", "tuesday"), [2]);
    let listed = run("nbdinfo", &["--json", &served.server.uri("@monday")]).json()["exports"][0]["contexts"]
        .to_string();
    assert!(listed.contains("vellum:diff:tuesday") && !listed.contains("vellum:diff:monday"), "{listed}");
    guest.disconnect();
    served.server.stop();
}

/// A part of a disk, and a snapshot that is served, offer none.
#[test]
fn what_is_no_disk_as_it_is_now_is_not_compared() {
    requires!("nbdinfo");
    let subject = Subject::new(KINDS[0]);
    vellum(&["snapshot", "create", &subject.image, "one"]).answer();
    for more in [["--snapshot", "one"], ["--offset", "1M"]] {
        let server =
            super::support::server::Server::start(&[&["-f", "qcow2"], &more[..], &[&subject.image]].concat());
        let listed = run("nbdinfo", &["--json", &server.uri("")]).json().to_string();
        assert!(listed.contains("base:allocation") && !listed.contains("vellum:diff"), "{more:?}: {listed}");
        server.stop();
    }
}
