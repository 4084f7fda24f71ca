//! Copies of what lies below come into the image of a served disk: what guests read, what nobody has read yet, until
//! the image stands alone; and what keeps it from that.

use serde_json::Value;

use super::support::dir::Dir;
use super::support::noise;
use super::support::program::{succeed, vellum};
use super::support::server::Server;
use super::support::until;
use super::{Controlled, told_of};
use crate::requires;

const LEN: usize = 6 << 20;

/// All kinds of images that take copies, each over the same base.
const KINDS: [(&str, &str); 4] = [
    ("qcow2", "journal=on"),
    ("vellum", "layout=linear"),
    ("vellum", "layout=table"),
    ("vellum", "layout=zoned"),
];

fn cloned(dir: &Dir, format: &str, options: &str) -> [String; 2] {
    let (base, image) =
        (dir.text("base.raw"), dir.text(if format == "qcow2" { "clone.qcow2" } else { "clone.vlm" }));
    std::fs::write(&base, noise(LEN, 3)).expect("a base");
    let arguments = ["create", "-q", "-f", format, "-o", options, "-b", "base.raw", "-F", "raw", &image];
    vellum(&arguments).answer();
    [base, image]
}

#[track_caller]
fn hydration(served: &Controlled) -> Value {
    told_of(served, "")["hydration"].clone()
}

#[track_caller]
fn until_detached(served: &Controlled) {
    until("it is detached", || hydration(served)["state"] == "detached");
}

#[test]
fn a_disk_that_prefetches_ends_up_without_its_base() {
    for (format, options) in KINDS {
        let dir = Dir::new("prefetch");
        let [base, image] = cloned(&dir, format, options);
        let served = Controlled::start(&[&image]);
        let mut model = noise(LEN, 3);
        let mut guest = served.client("");
        guest.write(1 << 20, &[9; 5000], 0).expect("it is written");
        model[1 << 20..(1 << 20) + 5000].fill(9);
        guest.flush().expect("a flush");
        assert_eq!(served.server.times_open(&base), 1, "{options}");
        vellum(&["prefetch", "start", "--control", &served.socket]).answer();
        until_detached(&served);
        assert_eq!(served.server.times_open(&base), 0, "{options}: the base is let go");
        std::fs::remove_file(&base).expect("nobody needs it");
        let len = u32::try_from(LEN).expect("short");
        assert!(guest.read(0, len).expect("it is read") == model, "{options}");
        guest.disconnect();
        assert_eq!(served.server.stop().code, 0);
        let info = vellum(&["info", "--output", "json", &image]).json();
        assert!(info.get("backing-filename").is_none(), "{options}: {info}");
        vellum(&["check", &image]).answer();
        let copy = dir.text("copy.raw");
        vellum(&["convert", "-O", "raw", &image, &copy]).answer();
        assert!(std::fs::read(&copy).expect("a copy") == model, "{options}");
    }
}

#[test]
fn what_guests_read_is_kept_and_not_read_from_the_base_again() {
    for (format, options) in KINDS {
        let dir = Dir::new("copy-on-read");
        let [_, image] = cloned(&dir, format, options);
        for is_first in [true, false] {
            let served = Controlled::start(&["--copy-on-read", &image]);
            let mut guest = served.client("");
            let bytes = guest.read(2 << 20, 1 << 20).expect("it is read");
            assert!(bytes == noise(LEN, 3)[2 << 20..3 << 20], "{options}");
            let told = hydration(&served);
            match is_first {
                true => until("it is copied", || hydration(&served)["bytes-filled"] == 1 << 20),
                false => assert_eq!(told["bytes-fetched"], 0, "{options}: {told}"),
            }
            guest.flush().expect("a flush");
            guest.disconnect();
            assert_eq!(served.server.stop().code, 0);
        }
        vellum(&["check", &image]).answer();
    }
}

/// The image asks for it itself, until it is detached; QEMU reads and checks such an image like any other.
#[test]
fn what_an_image_asks_for_is_done_unless_the_server_is_told_not_to() {
    requires!("qemu-img");
    for (format, options) in KINDS {
        let dir = Dir::new("wish");
        let [base, image] = cloned(&dir, format, &format!("{options},copy_on_read=on"));
        let facts =
            || vellum(&["info", "--output", "json", &image]).json()["format-specific"]["data"].clone();
        assert_eq!((&facts()["copy-on-read"], &facts()["prefetch"]), (&Value::from(true), &Value::Null));
        for (flags, copies) in [(&["--no-copies"][..], false), (&[], true)] {
            let served = Controlled::start(&[flags, &[&image]].concat());
            let mut guest = served.client("");
            guest.read(0, 1 << 20).expect("it is read");
            match copies {
                true => until("it is copied", || hydration(&served)["bytes-filled"] == 1 << 20),
                false => assert_eq!(hydration(&served)["copy-on-read"], false, "{options}"),
            }
            guest.flush().expect("a flush");
            guest.disconnect();
            assert_eq!(served.server.stop().code, 0);
        }
        if format == "qcow2" {
            succeed("qemu-img", &["check", "-q", &image]);
        }
        vellum(&["flatten", &image]).answer();
        assert_eq!(facts()["copy-on-read"], Value::Null, "{options}: an image on its own asks for nothing");
        std::fs::remove_file(&base).expect("nobody needs it");
        vellum(&["check", &image]).answer();

        let [base, image] = cloned(&dir, format, &format!("{options},prefetch=on"));
        // Without a control socket, too.
        let server = Server::start(&[&image]);
        until("the base is let go", || server.times_open(&base) == 0);
        assert_eq!(server.stop().code, 0);
        let info = vellum(&["info", "--output", "json", &image]).json();
        assert!(info.get("backing-filename").is_none(), "{options}: {info}");
    }
    let dir = Dir::new("wish-refused");
    for (format, words) in [("qcow2", "need a backing image"), ("vellum", "need a backing image")] {
        let ran = vellum(&["create", "-f", format, "-o", "copy_on_read=on", &dir.text("x"), "1M"]);
        assert!(ran.code == 1 && ran.err.contains(words), "{ran:?}");
    }
}

/// Whichever way the copying began: with bytes of one base in the image, another base is refused.
#[test]
fn an_image_with_copies_is_refused_over_another_base() {
    for (format, options) in KINDS {
        for way in ["--prefetch", "start"] {
            let dir = Dir::new("prefetch-pin");
            let [base, image] = cloned(&dir, format, options);
            // So slow that it does not end here.
            let slow = "base-max=4096";
            let limit = ["--prefetch", "--prefetch-limit", slow];
            let said: &[&str] = if way == "start" { &[] } else { &limit };
            let served = Controlled::start(&[said, &[&image]].concat());
            if way == "start" {
                let start = ["prefetch", "start", "--limit", slow, "--control", &served.socket];
                vellum(&start).answer();
            }
            assert_eq!(served.server.stop().code, 0);
            let info = vellum(&["info", &image]).answer();
            assert!(info.contains("backing file pin: file"), "{options}, {way}: {info}");
            std::fs::write(&base, noise(LEN, 4)).expect("another base");
            let refused = Server::try_start(&[&image]).err().expect("it is refused");
            assert!(refused.err.contains("has changed: it was"), "{options}, {way}: {refused:?}");
        }
    }
}

#[test]
fn a_disk_with_snapshots_is_not_flattened() {
    let dir = Dir::new("flatten-snapshots");
    let [_, image] = cloned(&dir, "vellum", "layout=table");
    vellum(&["snapshot", "create", &image, "s"]).answer();
    let served = Controlled::start(&[&image]);
    served.refuses(&["has snapshots", "delete them first"], "flatten", &[]);
    vellum(&["snapshot", "delete", "--control", &served.socket, "s"]).answer();
    served.ask("flatten", &[]).answer();
    until_detached(&served);
    assert_eq!(served.server.stop().code, 0);
}

#[test]
fn an_image_that_takes_no_copies_says_so() {
    let dir = Dir::new("no-copies");
    let [_, image] = cloned(&dir, "qcow2", "journal=off");
    let served = Controlled::start(&[&image]);
    let refused = vellum(&["prefetch", "start", "--control", &served.socket]);
    assert!(refused.code == 1 && refused.err.contains("vellum flatten"), "{refused:?}");
    assert_eq!(served.server.stop().code, 0);
}

/// Another program, which asks for no lock, writes the base or cuts it while it is copied. What was copied before stays,
/// nothing comes after it, and with the old base the disk is what it was.
#[test]
fn a_base_that_changes_while_it_is_copied_leaves_no_mixture() {
    for (format, options) in KINDS {
        for is_cut in [false, true] {
            let dir = Dir::new("base-changes");
            let [base, image] = cloned(&dir, format, options);
            let model = noise(LEN, 3);
            let facts = std::fs::metadata(&base).expect("it is there");
            let limit = ["--prefetch", "--prefetch-limit", "base-max=2M,base-min=0", "--copy-on-read"];
            let served = Controlled::start(&[&limit[..], &[&image]].concat());
            until("a part is copied", || hydration(&served)["bytes-prefetched"].as_u64() > Some(1 << 20));
            let file = std::fs::OpenOptions::new().write(true).open(&base).expect("no lock is asked for");
            match is_cut {
                true => file.set_len(1 << 20).expect("it is cut"),
                false => std::io::Write::write_all(&mut &file, &noise(LEN, 4)).expect("it is written"),
            }
            until("it is said", || hydration(&served)["state"] == "base changed");
            let told = hydration(&served);
            assert!(told["last-error"].as_str().expect("why").contains("base.raw"), "{told}");
            served.refuses(&["base.raw", "bring", "back"], "flatten", &[]);
            let start = vellum(&["prefetch", "start", "--control", &served.socket]);
            assert!(start.code == 1 && start.err.contains("base.raw"), "{start:?}");
            let mut guest = served.client("");
            let last = guest.read(LEN as u64 - 4096, 4096);
            assert_eq!(last.is_err(), is_cut, "{options}: what was cut off is not zero");
            guest.disconnect();
            let said = served.server.stop().err;
            assert_eq!(said.matches("gets no more copies of what is below it").count(), 1, "{said}");
            // The old base is back, with its times.
            std::fs::write(&base, &model).expect("a base");
            let file = std::fs::OpenOptions::new().write(true).open(&base).expect("it is there");
            file.set_modified(facts.modified().expect("times")).expect("its time");
            let copy = dir.text("copy.raw");
            vellum(&["convert", "-O", "raw", &image, &copy]).answer();
            assert!(std::fs::read(&copy).expect("a copy") == model, "{options}, cut: {is_cut}");
            vellum(&["flatten", &image]).answer();
        }
    }
}

/// Where there is nothing to copy from, or an image will stay over its base, that is said once at the start, and in the status.
#[test]
fn what_was_asked_for_and_does_nothing_is_said() {
    let dir = Dir::new("idle");
    let [_, image] = cloned(&dir, "vellum", "layout=table");
    let alone = dir.text("alone.vlm");
    vellum(&["create", "-q", "-f", "vellum", &alone, "1M"]).answer();
    let idle = "do nothing here";
    for (arguments, words) in [
        (&["--prefetch", alone.as_str()][..], [idle, "no backing image"]),
        (&["--copy-on-read", &alone], [idle, "no backing image"]),
        (&["--prefetch", "--read-only", &image], [idle, "read-only"]),
    ] {
        let served = Controlled::start(arguments);
        let told = hydration(&served);
        assert!(told["remark"].as_str().is_some_and(|remark| remark.contains(words[1])), "{told}");
        let status = served.ask("prefetch", &[]).code;
        assert_ne!(status, 0, "a verb is needed");
        let status = vellum(&["prefetch", "status", "--control", &served.socket]).answer();
        assert!(status.contains(words[1]), "{status}");
        let said = served.server.stop().err;
        let lines: Vec<&str> = said.lines().filter(|line| line.contains(words[0])).collect();
        assert!(lines.len() == 1 && lines[0].contains(words[1]), "{arguments:?}: {said}");
    }
    vellum(&["snapshot", "create", &image, "s"]).answer();
    let served = Controlled::start(&["--prefetch", &image]);
    assert!(hydration(&served)["remark"].as_str().is_some_and(|remark| remark.contains("delete them first")));
    let said = served.server.stop().err;
    assert!(said.contains("stays over its backing image"), "{said}");
    // Without the options there is no warning.
    let served = Controlled::start(&[&alone]);
    assert!(hydration(&served).is_null());
    // Nothing is left to flatten, as without a server.
    assert!(vellum(&["flatten", &alone, "--output", "json"]).code != 0, "it is in use");
    assert_eq!(served.ask("flatten", &["--output", "json"]).json()["bytes-written"], 0);
    assert!(!served.server.stop().err.contains(idle));
    vellum(&["flatten", &alone]).answer();
}

#[test]
fn a_boot_trace_that_is_none_or_of_another_disk_is_named() {
    let dir = Dir::new("bad-trace");
    let [_, image] = cloned(&dir, "vellum", "layout=table");
    let trace = dir.text("boot.trace");
    let none = dir.text("none.trace");
    std::fs::write(&trace, "hello\n").expect("a file");
    for (file, words) in [(&trace, "vellum trace record"), (&none, "can't read the boot trace")] {
        let refused = Server::try_start(&["--prefetch", "--prefetch-trace", file, &image])
            .err()
            .expect("it is refused");
        assert!(refused.err.contains(words) && refused.err.contains(file), "{refused:?}");
    }
    std::fs::remove_file(&trace).expect("a file");
    let larger = dir.text("larger.vlm");
    std::fs::write(dir.text("larger.raw"), noise(2 * LEN, 5)).expect("a base");
    vellum(&["create", "-q", "-f", "vellum", "-b", "larger.raw", "-F", "raw", &larger]).answer();
    let served = Controlled::start(&["--record-trace", &larger]);
    let mut guest = served.client("");
    for at in [0, 2 * LEN as u64 - 4096] {
        guest.read(at, 4096).expect("it is read");
    }
    guest.disconnect();
    vellum(&["trace", "record", "--control", &served.socket, &trace]).answer();
    assert_eq!(served.server.stop().code, 0);
    let served = Controlled::start(&["--prefetch", "--prefetch-trace", &trace, &image]);
    until_detached(&served);
    let said = served.server.stop().err;
    assert!(said.contains("1 of 2 runs of the boot trace") && said.contains("boot.trace"), "{said}");
}
