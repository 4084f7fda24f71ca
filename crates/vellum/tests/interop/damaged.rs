//! Damaged images, and the reports of both programs on them: the exit code of `check` is the same, and QEMU
//! finds no errors in what Vellum has repaired.

use std::fs;

use super::requires;
use super::support::dir::Dir;
use super::support::program::{run, vellum};

/// An image's bytes, and where its parts are.
struct Bytes(Vec<u8>);

const PLACE: u64 = 0x00FF_FFFF_FFFF_FE00;
const COPIED: u64 = 1 << 63;

impl Bytes {
    fn word(&self, at: u64) -> u64 {
        let at = usize::try_from(at).expect("a small image");
        u64::from_be_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        let at = usize::try_from(at).expect("a small image");
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn change(&mut self, at: u64, change: impl FnOnce(u64) -> u64) {
        let word = change(self.word(at));
        self.put(at, &word.to_be_bytes());
    }

    fn l1(&self) -> u64 {
        self.word(40)
    }

    fn l2(&self) -> u64 {
        self.word(self.l1()) & PLACE
    }

    /// Where the first cluster of the disk is.
    fn host(&self) -> u64 {
        self.word(self.l2()) & PLACE
    }

    /// Sets the refcount (16 bits) of the cluster (64 KiB) at an offset.
    fn count(&mut self, at: u64, refcount: u16) {
        let block = self.word(self.word(48));
        self.put(block + (at >> 16) * 2, &refcount.to_be_bytes());
    }
}

type Damage = (&'static str, fn(&mut Bytes));

/// What is done to an image, by name. With internal snapshots all flags are clear and refcounts higher.
const DAMAGES: [Damage; 16] = [
    ("a leak behind a flag that is clear", |image| {
        let (l2, host) = (image.l2(), image.host());
        image.change(l2, |entry| entry & !COPIED);
        image.count(host, 2);
    }),
    ("a refcount of two and the flag", |image| image.count(image.host(), 2)),
    ("a refcount of zero and the flag", |image| image.count(image.host(), 0)),
    ("a refcount of one without the flag", |image| image.change(image.l2(), |entry| entry & !COPIED)),
    ("a table without the flag", |image| image.change(image.l1(), |entry| entry & !COPIED)),
    ("a leaked table", |image| image.count(image.l2(), 2)),
    ("a refcount of zero without the flag", |image| {
        let (l2, host) = (image.l2(), image.host());
        image.change(l2, |entry| entry & !COPIED);
        image.count(host, 0);
    }),
    ("a leak of what nobody names", |image| image.change(image.l2(), |_| 0)),
    ("two clusters in one place", |image| {
        let entry = image.word(image.l2());
        image.change(image.l2() + 8, |_| entry);
    }),
    ("reserved bits of a data entry", |image| image.change(image.l2(), |entry| entry | 1 << 56)),
    ("reserved bits of an empty entry", |image| image.change(image.l2() + 24, |entry| entry | 0x80)),
    ("a low reserved bit", |image| image.change(image.l2(), |entry| entry | 2)),
    ("reserved bits of a table's entry", |image| image.change(image.l1(), |entry| entry | 1 << 57 | 1)),
    ("an entry between two clusters", |image| image.change(image.l2(), |entry| entry + 512)),
    ("a table between two clusters", |image| image.change(image.l1(), |entry| entry + 512)),
    ("the flag of a table that is there no more", |image| image.change(image.l1(), |_| COPIED)),
];

fn code(program: &str, image: &str) -> i32 {
    match program {
        "vellum" => vellum(&["check", image]).code,
        program => run(program, &["check", image]).code,
    }
}

#[test]
fn both_say_the_same_of_damaged_images() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("damaged");
    let (good, path) = (dir.text("good"), dir.text("image"));
    for kind in ["compat=1.1", "compat=0.10", "extended_l2=on", "snapshot"] {
        let options = if kind == "snapshot" { "compat=1.1" } else { kind };
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, &good, "64M"]).answer();
        run("qemu-io", &["-c", "write -P 1 0 128k", "-c", "write -P 2 40M 64k", &good]).answer();
        if kind == "snapshot" {
            run("qemu-img", &["snapshot", "-c", "one", &good]).answer();
            run("qemu-io", &["-c", "write -P 3 0 64k", &good]).answer();
        }
        for (what, damage) in DAMAGES {
            let fresh = || {
                let mut bytes = Bytes(fs::read(&good).expect("the image"));
                damage(&mut bytes);
                fs::write(&path, &bytes.0).expect("the damaged image");
            };
            fresh();
            let theirs = code("qemu-img", &path);
            let said = vellum(&["check", &path]);
            assert_eq!(
                said.code,
                theirs,
                "{kind}, {what}: {said:?}\n{:?}",
                run("qemu-img", &["check", &path])
            );
            // Where QEMU's own repair of leaks leaves no errors, ours leaves none either, and it never makes
            // things worse.
            let repaired = |program: &str, how: &str| {
                fresh();
                match program {
                    "vellum" => vellum(&["check", "-r", how, &path]),
                    program => run(program, &["check", "-r", how, &path]),
                };
                code("qemu-img", &path)
            };
            for how in ["leaks", "all"] {
                let (theirs, ours) = (repaired("qemu-img", how), repaired("vellum", how));
                assert!(
                    ours == 0 || ours == theirs,
                    "{kind}, {what}: -r {how} leaves {ours}, QEMU's {theirs}"
                );
                let left = code("vellum", &path);
                assert_eq!(left, ours, "{kind}, {what}: -r {how}: to Vellum it is {left}, to QEMU {ours}");
            }
        }
    }
}

/// Reserved bits mean nothing to readers; and a compressed cluster has no flag, whatever its entry says.
#[test]
fn what_qemu_reads_past_is_read_past() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("damaged");
    let (raw, path, out) = (dir.text("raw"), dir.text("image"), dir.text("out"));
    fs::write(&raw, b"some text that packs well ".repeat(20_000)).expect("a disk");
    run("qemu-img", &["convert", "-c", "-O", "qcow2", &raw, &path]).answer();
    let mut bytes = Bytes(fs::read(&path).expect("the image"));
    bytes.change(bytes.l2(), |entry| entry | COPIED);
    bytes.change(bytes.l1(), |entry| entry | 1 << 60);
    fs::write(&path, &bytes.0).expect("the damaged image");
    assert_eq!((code("vellum", &path), code("qemu-img", &path)), (2, 2));
    vellum(&["convert", "-O", "raw", &path, &out]).answer();
    let read = fs::read(&out).expect("the disk");
    assert!(read[..520_000] == fs::read(&raw).expect("the disk")[..], "it reads as it was");
    vellum(&["check", "-r", "all", &path]);
    assert_eq!((code("vellum", &path), code("qemu-img", &path)), (0, 0));
    assert_eq!(vellum(&["compare", "-F", "raw", &path, &out]).code, 0);
}

/// A snapshot of version 3 records the size of its disk. One that has no room for it is reported.
#[test]
fn an_incomplete_snapshot_is_told() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("damaged");
    let path = dir.text("image");
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "compat=0.10", &path, "1M"]).answer();
    run("qemu-img", &["snapshot", "-c", "one", &path]).answer();
    let mut bytes = Bytes(fs::read(&path).expect("the image"));
    let table = bytes.word(64);
    // The extra data goes, and what was in it is the beginning of a name.
    let extra = u32::try_from(bytes.word(table + 32) & 0xFFFF_FFFF).expect("32 bits");
    assert!(extra >= 16);
    let id_and_name = bytes.word(table + 8);
    let (id_len, name_len) = (id_and_name >> 16 & 0xFFFF, id_and_name & 0xFFFF);
    let names: Vec<u8> = (0..id_len + name_len)
        .map(|i| bytes.0[usize::try_from(table + 40 + u64::from(extra) + i).expect("small")])
        .collect();
    bytes.put(table + 36, &0u32.to_be_bytes());
    bytes.put(table + 40, &names);
    fs::write(&path, &bytes.0).expect("the image");
    assert_eq!((code("vellum", &path), code("qemu-img", &path)), (0, 0), "version 2 wants none");
    run("qemu-img", &["amend", "-o", "compat=1.1", &path]).answer();
    let mut bytes = Bytes(fs::read(&path).expect("the image"));
    let table = bytes.word(64);
    let extra = bytes.word(table + 32) & 0xFFFF_FFFF;
    if extra > 0 {
        let names: Vec<u8> = (0..id_len + name_len)
            .map(|i| bytes.0[usize::try_from(table + 40 + extra + i).expect("small")])
            .collect();
        bytes.put(table + 36, &0u32.to_be_bytes());
        bytes.put(table + 40, &names);
        fs::write(&path, &bytes.0).expect("the image");
    }
    let said = vellum(&["check", &path]);
    assert_eq!((said.code, code("qemu-img", &path)), (2, 2), "{said:?}");
    assert!(said.err.contains("incomplete"), "{said:?}");
}

/// A table of snapshots beyond what is read is mended as QEMU mends it: both say the same before, list the same snapshots after, and
/// find nothing wrong with what the other one has made.
#[test]
fn a_snapshot_table_over_the_limits_is_mended() {
    requires!("qemu-img", "qemu-io");
    let dir = Dir::new("damaged");
    let (path, other) = (dir.text("image"), dir.text("other"));
    let entry = |l1: &[u8], id: &str, extra: usize| {
        let mut entry = l1.to_vec();
        entry.extend(u16::try_from(id.len()).expect("short").to_be_bytes());
        entry.extend(4_u16.to_be_bytes());
        entry.resize(36, 0);
        entry.extend(u32::try_from(extra).expect("small").to_be_bytes());
        let mut sizes = [0_u64.to_be_bytes(), (1_u64 << 20).to_be_bytes()].concat();
        sizes.resize(extra, 0);
        entry.extend(sizes);
        entry.extend(id.as_bytes());
        entry.extend(b"name");
        entry.resize(entry.len().next_multiple_of(8), 0);
        entry
    };
    for (what, extras) in
        [("one entry has too much", vec![24, 1100, 24]), ("the first one, far too much", vec![70_000, 24])]
    {
        run("qemu-img", &["create", "-q", "-f", "qcow2", &path, "1M"]).answer();
        run("qemu-io", &["-f", "qcow2", &path, "-c", "write -P 1 0 300k"]).answer();
        run("qemu-img", &["snapshot", "-c", "name", &path]).answer();
        run("qemu-io", &["-f", "qcow2", &path, "-c", "write -P 2 0 300k"]).answer();
        let mut bytes = Bytes(fs::read(&path).expect("the image"));
        let table = bytes.word(64);
        let l1 = bytes.0[usize::try_from(table).expect("small")..][..12].to_vec();
        // The first one is the real one, the others have no table of their own.
        let entries = extras.iter().enumerate().map(|(index, extra)| {
            let l1 = if index == 0 { &l1[..] } else { &[0; 12] };
            entry(l1, &(index + 1).to_string(), *extra)
        });
        let all: Vec<u8> = entries.flatten().collect();
        let at = bytes.0.len().next_multiple_of(1 << 16);
        bytes.0.resize(at, 0);
        bytes.0.extend(&all);
        bytes.0.resize(bytes.0.len().next_multiple_of(1 << 16), 0);
        bytes.put(64, &(at as u64).to_be_bytes());
        bytes.put(60, &u32::try_from(extras.len()).expect("small").to_be_bytes());
        fs::write(&path, &bytes.0).expect("the image");
        fs::copy(&path, &other).expect("a copy");
        assert_eq!((code("vellum", &path), code("qemu-img", &other)), (1, 1), "{what}");
        let theirs = run("qemu-img", &["check", "-r", "all", &other]);
        let ours = vellum(&["check", "-r", "all", &path]);
        assert_eq!(
            (ours.code, theirs.code),
            (0, 0),
            "{what}: {ours:?}\n{}",
            theirs.err.lines().last().unwrap_or("")
        );
        for path in [&path, &other] {
            assert_eq!((code("vellum", path), code("qemu-img", path)), (0, 0), "{what}");
        }
        let list = |path: &String| run("qemu-img", &["snapshot", "-l", path]).out;
        assert_eq!(list(&path), list(&other), "{what}");
        assert!(list(&path).lines().count() > 2, "{what}");
        run("qemu-img", &["snapshot", "-a", "1", &path]).answer();
        run("qemu-io", &["-f", "qcow2", &path, "-c", "read -P 1 0 300k"]).answer();
    }
}
